package oracle

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/test/packets"
)

func world(t testing.TB) packets.World {
	t.Helper()
	w, err := packets.LoadWorld()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func node(t testing.TB, w packets.World, name string, armed bool) Node {
	t.Helper()
	n, err := w.Node(name)
	if err != nil {
		t.Fatal(err)
	}
	m := Node{Node: n.Node, Armed: armed, Own: n.Local, Route: func(to netip.Addr) Way {
		for _, x := range n.Routes {
			if x.To.Contains(to) {
				return Way{None: map[string]NoWay{"unreachable": Unreachable, "prohibit": Prohibited, "blackhole": BlackHole}[x.Kind]}
			}
		}
		return Way{}
	}}
	if !armed {
		m.Headends, m.Endpoints, m.Egresses = nil, nil, nil
	}
	return m
}

func arrival(p packets.Packet) Arrival {
	return Arrival{Interface: p.Interface, Frame: p.Frame, Frames: p.Frames, Number: p.Counter}
}

func TestPacketsOfScapy(t *testing.T) {
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	ofScapy(t, world(t), all)
}

func TestPacketsOfScapyWithLabels(t *testing.T) {
	all, err := packets.MPLS()
	if err != nil {
		t.Fatal(err)
	}
	w, err := packets.LoadMPLSWorld()
	if err != nil {
		t.Fatal(err)
	}
	ofScapy(t, w, all)
	made := map[Reason]bool{}
	for _, p := range all {
		made[Reason(p.Reason)] = true
	}
	for _, r := range LabelReasons() {
		if !made[r] {
			t.Errorf("no packet of test/packets/mpls makes %s", r)
		}
	}
}

func ofScapy(t *testing.T, w packets.World, all []packets.Packet) {
	for _, p := range all {
		t.Run(p.Name, func(t *testing.T) {
			before := bytes.Clone(p.Frame)
			r := node(t, w, p.Node, p.Armed).Process(arrival(p))
			if r.Verdict.String() != string(p.Verdict) || string(r.Reason) != p.Reason {
				t.Fatalf("%s: got %s %s, want %s %s", p.Note, r.Verdict, r.Reason, p.Verdict, p.Reason)
			}
			var reports []string
			for _, x := range r.Reported {
				reports = append(reports, string(x))
			}
			if !slices.Equal(reports, p.Reports) {
				t.Errorf("%s: reported %v, want %v", p.Note, reports, p.Reports)
			}
			if p.Verdict == packets.Forward && !bytes.Equal(r.Packet, p.Out) {
				t.Errorf("%s: the packet sent differs (-want +got):\n%s", p.Note, diff(p.Out, r.Packet))
			}
			if p.File == packets.Errors && !bytes.Equal(r.Error, p.Error) {
				t.Errorf("%s: its source is told\n%x\nwant\n%x", p.Note, r.Error, p.Error)
			}
			if !bytes.Equal(before, p.Frame) {
				t.Error("the frame given was changed")
			}
		})
	}
}

// diff shows two packets by their layers.
func diff(want, got []byte) string {
	show := func(b []byte) []string {
		p, err := srv6.Decode(b)
		s := []string{fmt.Sprintf("%+v", p.Header), fmt.Sprintf("%+v", p.SRH), fmt.Sprintf("%x", p.Payload)}
		if err != nil {
			s = append(s, err.Error())
		}
		return s
	}
	return cmp.Diff(show(want), show(got))
}

// leaving are the reasons of Leave.
var leaving = []Reason{LeakSID, LeakSRH, LeaveTruncated, Unverified}

// The packets must make every reason that a packet can make; the others are
// tested below, and named here so that a new one is not forgotten.
func TestEveryReasonIsMadeByAPacket(t *testing.T) {
	elsewhere := append([]Reason{Replay, Stale, RNDExhausted, NoLane, TrainTooBig, TooBig, PathMTU}, leaving...)
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	made := make(map[Reason]bool)
	for _, p := range all {
		made[Reason(p.Reason)] = true
	}
	for _, r := range Reasons() {
		if made[r] == slices.Contains(elsewhere, r) {
			t.Errorf("%s: made by a packet of test/packets: %t", r, made[r])
		}
	}
}

func TestReasonsAreTheContracts(t *testing.T) {
	// What only the kernel's failures or broken maps give, and tags that are no
	// part of a frame here.
	// Nor is the proxy modelled, but for the way into a function in the node's own kernel. Nor are
	// connections of functions on byte streams.
	kernel := regexp.MustCompile(`^(NONE|NOT_CACHED|ORIGIN_UNMATCHED|CACHE_FULL|FUNCTION_[A-Z]+|STREAM_[A-Z_]+|STREAMS_FULL|CANNOT_CUT|NO_NEIGHBOUR|LEAK_MPLS|SHARE_GONE|[A-Z_]+_FAILED|[A-Z_]+_BUG)$`)
	text, err := os.ReadFile("../../bpf/include/waystamp/reasons.h")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, m := range regexp.MustCompile(`\bX\(([A-Z0-9_]+), "`).FindAllSubmatch(text, -1) {
		if name := string(m[1]); !kernel.MatchString(name) {
			want = append(want, name)
		}
	}
	var got []string
	for _, r := range append(Reasons(), LabelReasons()...) {
		got = append(got, string(r))
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("bpf/include/waystamp/reasons.h and Reasons() (-contract +oracle):\n%s", diff)
	}
}

func load(t *testing.T, name string) packets.Packet {
	t.Helper()
	p, err := packets.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRoutesRefuse(t *testing.T) {
	w := world(t)
	none := func(netip.Addr) Way { return Way{None: Unreachable} }
	for _, c := range []struct {
		packet string
		route  func(netip.Addr) Way
		want   Reason
	}{
		{"web-1", none, NoRoute},
		{"edge-web", none, NoRoute},
		{"web-3", none, InnerNoRoute},
		{"inner-hop-limit-1", none, InnerNoRoute},
		{"web-1", mtu(175), TooBig},
		{"web-1", mtu(176), ""},
		{"edge-web", mtu(175), TooBig},
		{"edge-web", mtu(176), ""},
		{"web-3", mtu(55), TooBig},
		{"web-3", mtu(56), ""},
	} {
		p := load(t, c.packet)
		n := node(t, w, p.Node, true)
		n.Route = c.route
		r := n.Process(arrival(p))
		if r.Reason != c.want || (r.Packet == nil) != (c.want != "") {
			t.Errorf("%s: got %s %s, want %q", c.packet, r.Verdict, r.Reason, c.want)
		}
	}
}

func mtu(n int) func(netip.Addr) Way {
	return func(netip.Addr) Way { return Way{MTU: n} }
}

func TestTrainsAreMeasuredByTheirLongestFrame(t *testing.T) {
	w := world(t)
	p := load(t, "edge-web")
	n := node(t, w, "r1", true)
	n.Route = mtu(1500)
	a := arrival(p)
	a.Frames, a.Longest = 3, 1500-120
	if r := n.Process(a); r.Verdict != Forward {
		t.Errorf("frames that fit: %s %s", r.Verdict, r.Reason)
	}
	a.Longest++
	if r := n.Process(a); r.Reason != TooBig {
		t.Errorf("frames one byte too long: %s %s, want %s", r.Verdict, r.Reason, TooBig)
	}
	n.Headends[0].MTU = 1379
	a.Longest = 1380
	if r := n.Process(a); r.Reason != ChainMTU {
		t.Errorf("frames one byte too long for the chain: %s %s, want %s", r.Verdict, r.Reason, ChainMTU)
	}
}

func TestHeadendsNumbers(t *testing.T) {
	w := world(t)
	p := load(t, "edge-web")
	n := node(t, w, "r1", true)
	for _, c := range []struct {
		cpu    int
		number uint64
		want   Reason
	}{{0, 1, ""}, {3, 1, ""}, {4, 1, NoLane}, {0, 0, RNDExhausted}, {4, 0, NoLane}} {
		a := arrival(p)
		a.CPU, a.Number = c.cpu, c.number
		r := n.Process(a)
		if r.Reason != c.want {
			t.Errorf("CPU %d, number %d: got %s %s, want %q", c.cpu, c.number, r.Verdict, r.Reason, c.want)
		}
		if c.want != "" {
			continue
		}
		sent, err := srv6.Decode(r.Packet)
		if err != nil {
			t.Fatal(err)
		}
		proof, err := sent.SRH.Proof()
		if err != nil {
			t.Fatal(err)
		}
		if want := uint64(5+c.cpu)<<48 | c.number; proof.RND != want {
			t.Errorf("CPU %d, number %d: RND 0x%x, want 0x%x", c.cpu, c.number, proof.RND, want)
		}
	}
}

func TestHeadendRefusesWhatNoPayloadLengthCanTell(t *testing.T) {
	w := world(t)
	p := load(t, "edge-web")
	n := node(t, w, "r1", true)
	const more = 8 + 3*16 + 24
	a := arrival(p)
	a.Frames = 40
	a.Frame = append(bytes.Clone(p.Frame), make([]byte, 0xffff-more-(len(p.Frame)-14))...)
	says := func() { binary.BigEndian.PutUint16(a.Frame[14+4:], uint16(len(a.Frame)-14-srv6.IPv6Len)) }
	says()
	if r := n.Process(a); r.Verdict != Forward {
		t.Errorf("65535 bytes of payload: %s %s", r.Verdict, r.Reason)
	}
	a.Frame = append(a.Frame, 0)
	says()
	if r := n.Process(a); r.Reason != TrainTooBig {
		t.Errorf("65536 bytes of payload: %s %s, want %s", r.Verdict, r.Reason, TrainTooBig)
	}
}

// A path whose functions are all on its headend, and the egress too.
func TestHeadendGoesOnWithItsOwnFunctions(t *testing.T) {
	w := world(t)
	local, err := w.Node("r2")
	if err != nil {
		t.Fatal(err)
	}
	first, err := w.Node("r1")
	if err != nil {
		t.Fatal(err)
	}
	n := Node{Node: local.Node, Armed: true}
	n.Address = first.Address // as if the first function were there
	for _, h := range first.Headends {
		if h.Chain == "local" {
			n.Headends = append(n.Headends, h)
		}
	}
	p := load(t, "edge-web")
	frame := bytes.Clone(p.Frame)
	dst := netip.MustParseAddr("fc00:d::2").As16()
	copy(frame[14+24:], dst[:])
	r := n.Process(Arrival{Interface: model.Interface{Role: model.RoleEdge}, Frame: frame, Number: 1})
	if r.Verdict != Forward || r.Encapsulated {
		t.Fatalf("got %s %s, encapsulated %t", r.Verdict, r.Reason, r.Encapsulated)
	}
	want := bytes.Clone(frame[14:])
	want[7] -= 2 // as a headend, and as a router behind the egress
	if !bytes.Equal(want, r.Packet) {
		t.Errorf("the packet sent differs (-want +got):\n%s", diff(want, r.Packet))
	}
	var positions []uint8
	for _, v := range r.Visits {
		positions = append(positions, v.Position)
	}
	if !slices.Equal(positions, []uint8{0, 1, 2, 3}) {
		t.Errorf("positions that counted the packet: %v, want 0 to 3", positions)
	}
}

// The egress of a chain with a narrower source must not take a wider chain's
// packets, nor the other way round.
func TestLongestMatchIsByDestinationThenSource(t *testing.T) {
	rule := func(dst, src string) (m model.Match) {
		if dst != "" {
			m.Destination = netip.MustParsePrefix(dst)
		}
		if src != "" {
			m.Source = netip.MustParsePrefix(src)
		}
		return m
	}
	rules := []model.Match{
		rule("", ""), rule("fc00:8::/32", ""), rule("fc00:8::/32", "fc00:7::/32"),
		rule("fc00:8::/64", "fc00:5::/32"), rule("fc00:8::/64", "fc00:5:1::/48"),
	}
	for _, c := range []struct {
		dst, src string
		want     int
	}{
		{"fc00:8::1", "fc00:5::1", 3},
		{"fc00:8::1", "fc00:5:1::1", 4},
		{"fc00:8::1", "fc00:7::1", 2}, // the longest destination has no rule for this source
		{"fc00:8::1", "fc00:9::1", 1},
		{"fc00:8:1::1", "fc00:5::1", 1},
		{"fc00:9::1", "fc00:5::1", 0},
	} {
		h := srv6.Header{Source: netip.MustParseAddr(c.src), Destination: netip.MustParseAddr(c.dst)}
		b, err := h.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := longest(rules, ipv6(b)); got != c.want {
			t.Errorf("%s from %s: rule %d, want %d", c.dst, c.src, got, c.want)
		}
	}
	if got := longest(rules[1:], ipv6(mustHeader(t, "fc00:9::1", "::1"))); got != -1 {
		t.Errorf("a packet that no rule takes: rule %d", got)
	}
}

func mustHeader(t *testing.T, dst, src string) []byte {
	t.Helper()
	b, err := srv6.Header{Source: netip.MustParseAddr(src), Destination: netip.MustParseAddr(dst)}.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLabels(t *testing.T) {
	good := load(t, "edge-web").Out
	labelled := func(b []byte, l byte) []byte {
		b = bytes.Clone(b)
		b[3] = l
		return b
	}
	var l Labels
	if err := l.Check(good); err == nil {
		t.Error("label 0 was accepted")
	}
	for range 2 {
		if err := l.Check(labelled(good, 7)); err != nil {
			t.Error(err)
		}
	}
	if err := l.Check(labelled(good, 8)); err == nil {
		t.Error("a second label for one flow was accepted")
	}
	if err := l.Check(labelled(load(t, "edge-tcp").Out, 8)); err != nil {
		t.Errorf("another flow may have another label: %v", err)
	}
	if got := WithoutLabel(labelled(good, 7)); !bytes.Equal(got, good) {
		t.Errorf("WithoutLabel left something:\n%s", diff(good, got))
	}
}

// The variations that the programs are compared with are good for something:
// they make most reasons, and every verdict.
func TestVariationsReachMostReasons(t *testing.T) {
	w := world(t)
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	nodes := make(map[string]Node)
	r := rand.New(rand.NewPCG(1, 2))
	verdicts, reasons := make(map[Verdict]int), make(map[Reason]int)
	const count = 40_000
	for i := range count {
		p := all[i%len(all)]
		key := fmt.Sprint(p.Node, p.Armed)
		n, ok := nodes[key]
		if !ok {
			n = node(t, w, p.Node, p.Armed)
			nodes[key] = n
		}
		a := arrival(p)
		a.Frame = packets.Vary(r, p, all)
		x := n.Process(a)
		verdicts[x.Verdict]++
		reasons[x.Reason]++
	}
	for v := Pass; v <= Deliver; v++ {
		if verdicts[v] < count/100 && v != Deliver || verdicts[v] == 0 {
			t.Errorf("%s: %d of %d packets", v, verdicts[v], count)
		}
	}
	for _, x := range Reasons() {
		if slices.Contains(leaving, x) {
			continue
		}
		switch x {
		case Replay, Stale, RNDExhausted, NoLane, TrainTooBig, TooBig, PathMTU: // need more than a frame
		default:
			if reasons[x] < 5 {
				t.Errorf("%s: %d of %d packets", x, reasons[x], count)
			}
		}
	}
}

// No frame, however broken, may make the model panic, and what it drops or
// passes it must not send.
func FuzzProcess(f *testing.F) {
	all, err := packets.All()
	if err != nil {
		f.Fatal(err)
	}
	for _, p := range all {
		f.Add(p.Frame, p.Interface.Role == model.RoleEdge, p.Armed, p.Node)
	}
	w := world(f)
	f.Fuzz(func(t *testing.T, frame []byte, edge, armed bool, name string) {
		if _, err := w.Node(name); err != nil {
			name = "r2"
		}
		role := model.RoleCore
		if edge {
			role = model.RoleEdge
		}
		r := node(t, w, name, armed).Process(Arrival{Interface: model.Interface{Role: role}, Frame: frame, Number: 1})
		if sent := r.Verdict == Forward || r.Verdict == Deliver; sent != (r.Packet != nil) || (r.Verdict == Drop) != (r.Reason != "") {
			t.Errorf("%s %s with a packet of %d bytes", r.Verdict, r.Reason, len(r.Packet))
		}
		if !armed && r.Verdict == Forward {
			t.Error("a node without a plan forwarded")
		}
	})
}
