package model

import (
	"encoding"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// Every name of every enumeration goes out and comes in again; all other values
// and texts are refused.
func TestEnumerationsSurviveTheirText(t *testing.T) {
	both(t, "Scheme", []Scheme{SchemePoT, SchemeOPoT, SchemeKeyed, SchemeKeyedFlow})
	both(t, "Kind", []Kind{KindForward, KindUnaware, KindNetfilter, KindStream})
	both(t, "Behaviour", []Behaviour{BehaviourEnd, BehaviourEndAD, BehaviourEndAN})
	both(t, "Role", []Role{RoleEdge, RoleCore})
	both(t, "Datapath", []Datapath{DatapathAuto, DatapathXDP, DatapathTC})
	both(t, "Unmatched", []Unmatched{UnmatchedRoute, UnmatchedDrop})
	both(t, "SIDs", []SIDs{SIDsPlain, SIDsCompressed})
	both(t, "OnViolation", []OnViolation{OnViolationDrop, OnViolationReport})
	both(t, "Direction", []Direction{Forward, Reverse})
	both(t, "Recognise", []Recognise{RecogniseContent, RecogniseMetadata})
	both(t, "OnUnknown", []OnUnknown{OnUnknownDrop, OnUnknownPlain, OnUnknownOriginate})
	both(t, "Segments", []Segments{SegmentsCut, SegmentsKeep})
	both(t, "LabKind", []LabKind{LabForward, LabNftables, LabRaw})
	both(t, "Advertise", []Advertise{AdvertiseLocator, AdvertiseSIDs})
	both(t, "LabRouting", []LabRouting{LabStatic, LabFRR})
}

// A file that does not say what the guard does leaves it out.
func TestGuardSurvivesItsText(t *testing.T) {
	for _, g := range []Guard{GuardOff, GuardAudit, GuardEnforce} {
		text, err := g.MarshalText()
		var got Guard
		if err := errors.Join(err, got.UnmarshalText(text)); err != nil || got != g || string(text) != g.String() {
			t.Errorf("%s is written as %q and read as %s: %v", g, text, got, err)
		}
	}
	for _, text := range []string{"unset", "", "Audit"} {
		got := GuardOff
		if err := got.UnmarshalText([]byte(text)); err == nil || got != GuardOff || !strings.Contains(err.Error(), "expect off, audit or enforce") {
			t.Errorf("%q is read as %s: %v", text, got, err)
		}
	}
}

func both[T interface {
	~uint8
	encoding.TextMarshaler
	String() string
}, P interface {
	*T
	encoding.TextUnmarshaler
}](t *testing.T, typ string, all []T) {
	t.Helper()
	for i, v := range all {
		if int(v) != i {
			t.Errorf("%s %v is %d; want %d", typ, v, v, i)
		}
		text, err := v.MarshalText()
		if err != nil || string(text) != v.String() {
			t.Errorf("%s %v is written as %q, %v", typ, v, text, err)
		}
		var got T
		if err := P(&got).UnmarshalText(text); err != nil || got != v {
			t.Errorf("%s %q is read as %v, %v", typ, text, got, err)
		}
	}
	unknown := T(len(all))
	if _, err := unknown.MarshalText(); err == nil {
		t.Errorf("%s %d is written", typ, unknown)
	}
	if s := unknown.String(); !strings.HasPrefix(s, typ+"(") {
		t.Errorf("%s %d prints as %q", typ, unknown, s)
	}
	var got T
	if err := P(&got).UnmarshalText([]byte("nonsense")); err == nil || !strings.Contains(err.Error(), "expect ") {
		t.Errorf("%s: error %v; want one that says what to expect", typ, err)
	}
}

func TestCheckContainer(t *testing.T) {
	block := netip.MustParsePrefix("fc00::/48")
	for _, c := range []struct{ address, want string }{
		{"fc00:0:0:1::", ""},
		{"fc00:0:0:1:2:3:4:5", ""},
		{"fc00:0:0:ffff:100::", ""},
		{"fc00::", "in front of the last one"},
		{"fc00:0:0:0:2::", "in front of the last one"},
		{"fc00:0:0:1:0:3::", "in front of the last one"},
		{"fc00:0:0:1::5", "in front of the last one"},
		{"fc00:0:1:1::", "not within the SID block"},
	} {
		err := CheckContainer(block, netip.MustParseAddr(c.address))
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v; want one with %q", c.address, err, c.want)
		}
	}
}

func TestReverseOfAChain(t *testing.T) {
	m := Match{Destination: netip.MustParsePrefix("2001:db8::/32")}
	c := Chain{Ingress: []string{"a"}, Functions: []string{"f", "g"}, Egress: "b", Match: m, Both: true}
	r := c.Directed(Reverse)
	if r.Ingress[0] != "b" || r.Egress != "a" || r.Functions[0] != "g" || r.Functions[1] != "f" || r.Match != m.Reverse() {
		t.Errorf("got %+v", r)
	}
	if c.Functions[0] != "f" {
		t.Error("the chain itself was turned round")
	}
	x, y := netip.MustParseAddr("fc00:0:0:a::"), netip.MustParseAddr("fc00:0:0:b::")
	c.Waypoints = []Waypoint{{0, x}, {0, y}, {1, y}, {2, x}}
	r = c.Directed(Reverse)
	for i, want := range [][]netip.Addr{{x}, {y}, {y, x}} {
		if got := r.WaypointsBefore(i); !slices.Equal(got, want) {
			t.Errorf("before function %d the reverse visits %v, want %v", i, got, want)
		}
	}
	if c.Waypoints[0].SID != x || c.Segments() != 7 {
		t.Errorf("the chain itself: %+v, %d segments", c.Waypoints, c.Segments())
	}
	in, out := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("fd00::1")
	if !m.Covers(in, out) || m.Covers(out, in) || !r.Match.Covers(out, in) || !(Match{}).Covers(out, out) {
		t.Error("a match covers what it must not, or the other way round")
	}
}
