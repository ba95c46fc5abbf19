package tables_test

import (
	"errors"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

func TestSamePlanWantsNothingNew(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, local := xtest.DrawNode(t), xtest.DrawLocal(t)
		first := xtest.MustDesire(t, n, local, xtest.MustDesire(t, xtest.DrawNode(t), nil, tables.New()).Contents)
		again := xtest.MustDesire(t, n, local, first.Contents)
		if !xtest.EqualTables(first.Contents, again.Contents) {
			t.Fatalf("the same plan over its own state wants something else:\n%v\n%v", first.MatchDst, again.MatchDst)
		}
		if len(again.FreshStats) != 0 || !maps.Equal(first.Numbers, again.Numbers) {
			t.Fatalf("the same plan over its own state wants %v anew, and numbers %v after %v", again.FreshStats, again.Numbers, first.Numbers)
		}
		if ops := tables.Changes(first.Contents, again.Contents); len(ops) != 0 {
			t.Fatalf("%d changes for the same plan", len(ops))
		}
	})
}

// Every step of a change of plans is looked at, with packets that meet all
// rules.
func TestNoStepOfAChangeOpensAHole(t *testing.T) {
	anew, rules, prefixes := 0, 0, 0
	defer func() {
		t.Logf("%d changes needed a new generation; of the others %d changed ordered rules, %d prefixes beside such", anew, rules, prefixes)
		if !t.Failed() && (anew == 0 || rules == 0 || prefixes == 0) {
			t.Error("want some of each")
		}
	}()
	rapid.Check(t, func(t *rapid.T) {
		first, local := xtest.DrawNode(t), xtest.DrawLocal(t)
		before := xtest.MustDesire(t, first, local, tables.New()).Contents
		n, local := xtest.DrawNext(t, first, local)
		w, err := tables.Desire(n, xtest.Wiring(n), local, before, tables.RecoverIndexes(before, xtest.Roomy, xtest.PlacedBy(before)))
		if errors.Is(err, tables.ErrCapacity) {
			t.Skip("needs a new generation")
		}
		if err != nil {
			t.Fatal(err)
		}
		after := w.Contents
		if tables.Together(before, after) {
			anew++
			return
		}
		switch {
		case !maps.Equal(before.Rules, after.Rules):
			rules++
		case len(before.Rules) > 0 && !maps.Equal(before.MatchDst, after.MatchDst):
			prefixes++
		}
		now := xtest.CloneTables(before)
		check := func() {
			checkSlots(t, now)
			for _, to := range xtest.InDst {
				for _, from := range xtest.InSrc {
					checkPacket(t, before, now, after, xtest.Addr(from), xtest.Addr(to))
				}
			}
			for _, to := range xtest.InDst4 {
				for _, from := range xtest.InSrc4 {
					checkPacket(t, before, now, after, xtest.Addr(from), xtest.Addr(to))
				}
			}
			for k, h := range now.Hops {
				if h.Behaviour == uint8(abi.BehaviourEndDT46) {
					if _, ok := now.Egresses[abi.EgressKey{Path: k.Path, Epoch: k.Epoch}]; !ok {
						t.Fatalf("an egress SID without its verifier")
					}
				}
				if h.Behaviour == uint8(abi.BehaviourEndAd) && now.Proxies[h.Proxy].LifetimeNs == 0 {
					t.Fatalf("a SID names proxy %d, which is not there", h.Proxy)
				}
				if now.Sids[abi.HopKey{Sid: k.Sid, Path: k.Path}] != 1 || now.Sids[abi.HopKey{Sid: k.Sid}] != 1 {
					t.Fatalf("a SID that ws_sids does not have")
				}
			}
		}
		check()
		for _, o := range append(tables.Changes(before, after), tables.LeftBehind(before, after)...) {
			xtest.DoOp(now, o)
			check()
		}
		if !xtest.EqualTables(now, after) {
			t.Fatal("the changes do not lead to what is wanted")
		}
	})
}

// checkSlots: no two CPUs ever take from the same slot, and no two functions from
// the same bucket.
func checkSlots(t *rapid.T, now tables.Contents) {
	owner := map[[2]uint32]uint32{}
	for id, p := range now.Proxies {
		cpus := uint32(4)
		if p.Recognise == uint8(abi.RecogniseContent) {
			cpus = 1
			if p.Slots == 0 || p.Slot+p.Slots > xtest.Roomy.Buckets {
				t.Fatalf("proxy %d has %d buckets from %d on", id, p.Slots, p.Slot)
			}
		}
		for i := p.Slot; i < p.Slot+cpus*p.Slots; i++ {
			k := [2]uint32{uint32(p.Recognise), i}
			if other, taken := owner[k]; taken {
				t.Fatalf("slot or bucket %d is both proxy %d's and %d's", i, other, id)
			}
			owner[k] = id
		}
		if p.Recognise == uint8(abi.RecogniseMetadata) && (p.Slot == 0 || p.Slot+4*p.Slots > 1<<16) {
			t.Fatalf("proxy %d has slots from %d on", id, p.Slot)
		}
	}
}

func checkPacket(t *rapid.T, before, now, after tables.Contents, from, to netip.Addr) {
	const path = uint8(abi.MatchActionPath)
	guard := func(x tables.Contents) tables.Match {
		m := xtest.LookUp(x.GuardDst, x.GuardSrc, from, to)
		if rule := xtest.LookUpRule(x, false, from, to); rule != 0 {
			m.Action, m.Target = path, rule
		}
		return m
	}
	b, n, a := guard(before), guard(now), guard(after)
	required := func(m tables.Match) bool { return m.Action == path && m.Local == 0 }
	if required(b) && required(a) && !required(n) {
		t.Fatalf("%s to %s needs a proof before and after, but not in between", from, to)
	}
	if n != b && n != a {
		t.Fatalf("%s to %s: the guard says %+v, which is neither what it said (%+v) nor what it will (%+v)", from, to, n, b, a)
	}
	steer := func(x tables.Contents) (path uint32) {
		m := xtest.LookUp(x.MatchDst, x.MatchSrc, from, to)
		if rule := xtest.LookUpRule(x, true, from, to); rule != 0 {
			m.Action, m.Target = uint8(abi.MatchActionPath), rule-1
		}
		if m.Action != uint8(abi.MatchActionPath) || m.Local != 0 {
			return 0
		}
		h, ok := x.Headends[m.Target]
		if !ok {
			t.Fatalf("%s to %s: the rule names headend %d, which is not there", from, to, m.Target)
		}
		return h.Path
	}
	local := func(x tables.Contents) tables.Match {
		m := xtest.LookUp(x.LocalDst, x.LocalSrc, from, to)
		if m.Action == path && x.Proxies[m.Target].LifetimeNs == 0 {
			t.Fatalf("%s to %s must pass proxy %d, which is not there", from, to, m.Target)
		}
		return m
	}
	if is := local(now); is != local(before) && is != local(after) {
		t.Fatalf("%s to %s must pass %+v, which is right neither before nor after", from, to, is)
	}
	for id := range now.Proxies {
		origin := func(x tables.Contents) uint32 {
			path, err := xtest.LookUpOrigin(x, id, from, to)
			if err != nil {
				t.Fatalf("%s to %s: %v", from, to, err)
			}
			return path
		}
		if is := origin(now); is != 0 && is != origin(before) && is != origin(after) {
			t.Fatalf("%s to %s, made by function %d, takes path %#x, which it takes neither before nor after", from, to, id, is)
		}
	}
	if is := steer(now); is != steer(before) && is != steer(after) {
		t.Fatalf("%s to %s is steered into a path that it belongs to neither before nor after", from, to)
	}
}

func TestOwnAddressKeepsWhatCoversIt(t *testing.T) {
	n := xtest.Node()
	n.Egresses = []plan.Egress{
		xtest.EgressOf(1, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8::/32")}, xtest.OwnSID(1), 2),
		xtest.EgressOf(2, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:1:1::1/128"), Source: xtest.Prefix("fd00::/8")}, xtest.OwnSID(2), 2),
	}
	w := xtest.MustDesire(t, n, []netip.Addr{xtest.Addr("2001:db8:1:1::1"), xtest.Addr("2001:db8:5::1"), xtest.Addr("2620::1")}, tables.New())
	for _, c := range []struct {
		from, to string
		want     tables.Match
	}{
		{"fd00::1", "2001:db8:1:1::1", tables.Match{Target: abi.BE32(2), Action: 1, Local: 1}},
		{"2620::2", "2001:db8:1:1::1", tables.Match{Target: abi.BE32(1), Action: 1, Local: 1}},
		{"2620::2", "2001:db8:5::1", tables.Match{Target: abi.BE32(1), Action: 1, Local: 1}},
		{"2620::2", "2001:db8:5::2", tables.Match{Target: abi.BE32(1), Action: 1}},
		{"2620::2", "2620::1", tables.Match{Local: 1}},
		{"2620::2", "2620::3", tables.Match{}},
	} {
		if got := xtest.LookUp(w.GuardDst, w.GuardSrc, xtest.Addr(c.from), xtest.Addr(c.to)); got != c.want {
			t.Errorf("%s to %s: %+v, want %+v", c.from, c.to, got, c.want)
		}
	}
}

// Functions keep the number of their rules while they are in the plan: what one of them
// makes never meets those of another.
func TestFunctionsKeepTheirOrigins(t *testing.T) {
	originating := func(names ...string) plan.Node {
		n := xtest.Node()
		for i, name := range names {
			n.Proxies = append(n.Proxies, plan.Proxy{Function: name, Proxy: model.Proxy{
				To: "to-" + name, From: "from-" + name, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep,
				OnUnknown: model.OnUnknownOriginate, Cache: 1, Lifetime: time.Second,
			}})
			h := xtest.HeadendOf(xtest.OriginPath(name), 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8::/32"), Priority: uint16(10 * i)}, 2)
			h.From = name
			n.Headends = append(n.Headends, h)
		}
		return n
	}
	first := xtest.MustDesire(t, originating("fw", "ids", "nat"), nil, tables.New()).Contents
	second := xtest.MustDesire(t, originating("tap", "nat", "ids"), nil, first).Contents
	keys, err := tables.ProxyKeys(originating("fw", "ids", "nat", "tap").Proxies)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ids", "nat"} {
		if a, b := first.Proxies[keys[name]].Origin, second.Proxies[keys[name]].Origin; a == 0 || a != b {
			t.Errorf("%s has the rules of number %d, and had those of %d", name, b, a)
		}
	}
	if a, b := first.Proxies[keys["fw"]].Origin, second.Proxies[keys["tap"]].Origin; a == b {
		t.Errorf("tap has the rules of number %d at once, which were fw's", b)
	}
	for _, name := range []string{"tap", "nat", "ids"} {
		got, err := xtest.LookUpOrigin(second, keys[name], xtest.Addr("fd00::1"), xtest.Addr("2001:db8::1"))
		if want := abi.BE32(xtest.OriginPath(name)); err != nil || got != want {
			t.Errorf("what %s makes takes path %#x, %v; want %#x", name, got, err, want)
		}
	}
	// The node's own headends have none of these rules.
	if m := xtest.LookUp(second.MatchDst, second.MatchSrc, xtest.Addr("fd00::1"), xtest.Addr("2001:db8::1")); m != (tables.Match{}) {
		t.Errorf("what comes in from outside meets %+v", m)
	}
	if r := xtest.LookUpRule(second, true, xtest.Addr("fd00::1"), xtest.Addr("2001:db8::1")); r != 0 {
		t.Errorf("what comes in from outside meets rule %d", r)
	}
}

func TestPlanThatDoesNotFitTogetherIsRefused(t *testing.T) {
	keyed := model.SchemeKeyed
	all := model.Match{Destination: xtest.Prefix("2001:db8::/32")}
	for _, c := range []struct {
		name string
		edit func(*plan.Node)
		want string
	}{
		{"path 0", func(n *plan.Node) { n.Headends = []plan.Headend{xtest.HeadendOf(0, 0, keyed, all, 1)} }, "path 0 is no path"},
		{"headend twice", func(n *plan.Node) {
			n.Headends = []plan.Headend{xtest.HeadendOf(1, 0, keyed, all, 1), xtest.HeadendOf(1, 1, keyed, all, 1)}
		}, "the node is its headend twice"},
		{"no segments", func(n *plan.Node) { n.Headends = []plan.Headend{xtest.HeadendOf(1, 0, keyed, all, 0)} }, "0 segments; expect 1 to 16"},
		{"17 segments", func(n *plan.Node) { n.Headends = []plan.Headend{xtest.HeadendOf(1, 0, keyed, all, 17)} }, "17 segments; expect 1 to 16"},
		{"lanes beyond the last", func(n *plan.Node) {
			h := xtest.HeadendOf(1, 0, keyed, all, 1)
			h.Lane, h.Lanes = 4095, 2
			n.Headends = []plan.Headend{h}
		}, "lanes 4095 to 4096 are not within 0 to 4095"},
		{"scheme to come", func(n *plan.Node) {
			n.Headends = []plan.Headend{xtest.HeadendOf(1, 0, 4, all, 1)}
		}, "does not know the scheme Scheme(4)"},
		{"SID of another node", func(n *plan.Node) { n.Endpoints = []plan.Endpoint{xtest.EndpointOf(1, 0, keyed, xtest.OtherSID(1))} }, "is not in the locator"},
		{"End.AD without a proxy", func(n *plan.Node) {
			e := xtest.EndpointOf(1, 0, keyed, xtest.OwnSID(1))
			e.Behaviour = model.BehaviourEndAD
			n.Endpoints = []plan.Endpoint{e}
		}, "its SID is End.AD, and the plan has no proxy for it"},
		{"SID twice", func(n *plan.Node) {
			n.Endpoints = []plan.Endpoint{xtest.EndpointOf(1, 0, keyed, xtest.OwnSID(1)), xtest.EndpointOf(1, 0, keyed, xtest.OwnSID(1))}
		}, "is visited twice"},
		{"egress twice", func(n *plan.Node) {
			n.Egresses = []plan.Egress{xtest.EgressOf(1, 0, keyed, all, xtest.OwnSID(1), 2), xtest.EgressOf(1, 0, keyed, all, xtest.OwnSID(2), 2)}
		}, "the node is its egress twice"},
		{"epochs that match differently", func(n *plan.Node) {
			n.Egresses = []plan.Egress{xtest.EgressOf(1, 0, keyed, all, xtest.OwnSID(1), 2), xtest.EgressOf(1, 1, keyed, model.Match{}, xtest.OwnSID(1), 2)}
		}, "its epochs match different packets"},
		{"path from a function that is not there", func(n *plan.Node) {
			h := xtest.HeadendOf(1, 0, keyed, all, 1)
			h.From = "fw"
			n.Headends = []plan.Headend{h}
		}, "function fw does not originate"},
		{"key missing", func(n *plan.Node) {
			e := xtest.EgressOf(1, 0, keyed, all, xtest.OwnSID(1), 3)
			e.Verifier.Keys = e.Verifier.Keys[:2]
			n.Egresses = []plan.Egress{e}
		}, "2 keys for 3 positions that stamp"},
		{"secret at the prime", func(n *plan.Node) {
			e := xtest.EgressOf(1, 0, model.SchemeOPoT, all, xtest.OwnSID(1), 3)
			e.Verifier.Secret = 53
			n.Egresses = []plan.Egress{e}
		}, "the secret is not below the prime"},
		{"share at the prime", func(n *plan.Node) {
			e := xtest.EndpointOf(1, 0, model.SchemeOPoT, xtest.OwnSID(1))
			e.Share.Polynomial.Share = 53
			n.Endpoints = []plan.Endpoint{e}
		}, "the secret share is not below the prime"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := xtest.Node()
			c.edit(&n)
			_, err := tables.Desire(n, tables.Wiring{}, nil, tables.New(), tables.NewIndexes(xtest.Roomy, tables.Placed{}))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

func TestConfigOfAPlanThatDoesNotFitTogetherIsRefused(t *testing.T) {
	for _, c := range []struct{ block, locator, want string }{
		{"10.0.0.0/8", "fc00:0:0:100::/56", "not an IPv6 prefix"},
		{"fc00::/48", "", "not an IPv6 prefix"},
		{"fc00::/48", "fc00:0:0:100::/80", "1 to 64 bits"},
		{"fc00::/48", "fc01:0:0:100::/56", "is not in the block"},
		{"fc00::/48", "fc00::/40", "is not in the block"},
	} {
		n := xtest.Node()
		n.Block, n.Locator = xtest.Prefix(c.block), xtest.Prefix(c.locator)
		if _, err := tables.EncodeConfig(n); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("block %s, locator %s: got %v; want %q", c.block, c.locator, err, c.want)
		}
	}
}

func TestMoreEntriesThanTheArraysHoldAskForLargerOnes(t *testing.T) {
	n := xtest.Node()
	for i := range 3 {
		n.Headends = append(n.Headends, xtest.HeadendOf(uint32(i+1), 0, model.SchemeKeyed, model.Match{Source: xtest.Prefix(xtest.Src[i+1])}, 1))
	}
	for _, l := range []tables.Limits{{Headends: 2, Stats: 256}, {Headends: 64, Stats: 2}} {
		if _, err := tables.Desire(n, tables.Wiring{}, nil, tables.New(), tables.NewIndexes(l, tables.Placed{})); !errors.Is(err, tables.ErrCapacity) {
			t.Errorf("with %+v: got %v; want errCapacity", l, err)
		}
	}
	if _, err := tables.Desire(n, tables.Wiring{}, nil, tables.New(), tables.NewIndexes(tables.Limits{Headends: 3, Stats: 3}, tables.Placed{})); err != nil {
		t.Errorf("with as many as needed: %v", err)
	}
}

func TestArraysHaveRoomForAChangeOfEverything(t *testing.T) {
	for _, c := range []struct{ Need, want tables.Limits }{
		{tables.Limits{Headends: 0, Stats: 0, Places: 2}, tables.Limits{Lines: 256, Headends: 64, Stats: 256, Hops: 256, Egresses: 64, Places: 2}},
		{tables.Limits{Headends: 32, Stats: 128, Hops: 128, Egresses: 32, Places: 2}, tables.Limits{Lines: 256, Headends: 64, Stats: 256, Hops: 256, Egresses: 64, Places: 2}},
		{tables.Limits{Headends: 33, Stats: 129, Hops: 129, Egresses: 33, Places: 512}, tables.Limits{Lines: 256, Headends: 128, Stats: 512, Hops: 512, Egresses: 128, Places: 512}},
		{
			tables.Limits{Headends: tables.ChainsMax, Stats: 2 * tables.ChainsMax, Hops: 2 * tables.ChainsMax, Egresses: 2 * tables.ChainsMax},
			tables.Limits{Lines: 256, Headends: tables.ChainsMax, Stats: 2 * tables.ChainsMax, Hops: 4 * tables.ChainsMax, Egresses: 4 * tables.ChainsMax},
		},
	} {
		if got, err := c.Need.Size(); err != nil || got != c.want {
			t.Errorf("%+v: got %+v, %v; want %+v", c.Need, got, err, c.want)
		}
	}
	if _, err := (tables.Limits{Headends: tables.ChainsMax + 1, Stats: 1}).Size(); err == nil {
		t.Error("more headends than a node holds are not refused")
	}
}

// A rule for all of IPv6 covers ::ffff:0:0/96, where IPv4 is, and must not take
// it; and the other way round.
func TestARuleOfOneVersionTakesNoPacketOfTheOther(t *testing.T) {
	n := xtest.Node()
	n.Headends = []plan.Headend{xtest.HeadendOf(5, 0, model.SchemeKeyed, model.Match{Source: xtest.Prefix("fd00::/8")}, 1)}
	w := xtest.MustDesire(t, n, []netip.Addr{xtest.Addr("192.0.2.1")}, tables.New())
	if m := xtest.LookUp(w.MatchDst, w.MatchSrc, xtest.Addr("203.0.113.1"), xtest.Addr("198.51.100.1")); m != (tables.Match{}) {
		t.Errorf("a rule for IPv6 gives an IPv4 packet %+v", m)
	}
	if m := xtest.LookUp(w.MatchDst, w.MatchSrc, xtest.Addr("203.0.113.1"), xtest.Addr("192.0.2.1")); m != (tables.Match{Local: 1}) {
		t.Errorf("a rule for IPv6 gives an IPv4 packet to the node itself %+v", m)
	}
	n.Headends[0].Match = model.Match{Source: xtest.Prefix("203.0.113.0/24")}
	w = xtest.MustDesire(t, n, nil, tables.New())
	if m := xtest.LookUp(w.MatchDst, w.MatchSrc, xtest.Addr("fd00::1"), xtest.Addr("2001:db8::1")); m != (tables.Match{}) {
		t.Errorf("a rule for IPv4 gives an IPv6 packet %+v", m)
	}
	if m := xtest.LookUp(w.MatchDst, w.MatchSrc, xtest.Addr("203.0.113.1"), xtest.Addr("198.51.100.1")); m.Action != uint8(abi.MatchActionPath) {
		t.Errorf("a rule for IPv4 gives its packet %+v", m)
	}
}

func onlyOne[K comparable, V any](t *testing.T, m map[K]V) (K, V) {
	t.Helper()
	if len(m) != 1 {
		t.Fatalf("%d entries, want one: %v", len(m), m)
	}
	for k, v := range m {
		return k, v
	}
	panic("unreachable")
}

// An array's entry does not change at once, so a rule must never name one that
// changes.
func TestNewEpochIsANewHeadendWithTheStatisticsOfThePath(t *testing.T) {
	n := xtest.Node()
	n.Headends = []plan.Headend{xtest.HeadendOf(5, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8::/32")}, 1)}
	n.Endpoints = []plan.Endpoint{xtest.EndpointOf(5, 0, model.SchemeKeyed, xtest.OwnSID(1)), xtest.EndpointOf(5, 1, model.SchemeKeyed, xtest.OwnSID(1))}
	first := xtest.MustDesire(t, n, nil, tables.New())
	n.Headends[0].Epoch = 1
	next := xtest.MustDesire(t, n, nil, first.Contents)
	i, a := onlyOne(t, first.Headends)
	j, b := onlyOne(t, next.Headends)
	if i == j {
		t.Errorf("the new epoch is written over the old one, at %d", i)
	}
	if _, m := onlyOne(t, next.MatchDst); m.Target != j {
		t.Errorf("the rule names headend %d, want %d", m.Target, j)
	}
	if a.Stats != b.Stats || a.Counter == b.Counter {
		t.Errorf("statistics %d and %d, want the same; counters %d and %d, want two", a.Stats, b.Stats, a.Counter, b.Counter)
	}
	x, y := first.Hops[tables.EncodeHopKey(xtest.OwnSID(1), 5, 0)], first.Hops[tables.EncodeHopKey(xtest.OwnSID(1), 5, 1)]
	if x.Stats != y.Stats {
		t.Errorf("two epochs of a visit have statistics %d and %d; want one", x.Stats, y.Stats)
	}
}
