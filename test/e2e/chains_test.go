package e2e

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// One chain with as many segments as there can be. Headend and egress have
// functions of their own, consecutive functions are on one node, and all of them
// are visited more than once:
//
//	h1 --- r1 (in) --- r2 (a, b, c) --- r3 (dpi) --- r6 (out) --- h2
const longest = `
version: 1
domain: {block: "fc00::/48"}
nodes:
  - name: r1
    address: fc00:1::1
    locator: fc00:0:0:100::/56
    interfaces: [{name: r1-h1, role: edge}, {name: r1-r2, role: core, mtu: 2000}]
  - name: r2
    address: fc00:2::1
    locator: fc00:0:0:200::/56
    interfaces: [{name: r2-r1, role: core, mtu: 2000}, {name: r2-r3, role: core, mtu: 2000}]
  - name: r3
    address: fc00:3::1
    locator: fc00:0:0:300::/56
    interfaces: [{name: r3-r2, role: core, mtu: 2000}, {name: r3-r6, role: core, mtu: 2000}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    interfaces: [{name: r6-h2, role: edge}, {name: r6-r3, role: core, mtu: 2000}]
functions:
  - {name: in, node: r1, kind: forward}
  - {name: a, node: r2, kind: forward}
  - {name: b, node: r2, kind: forward}
  - {name: c, node: r2, kind: forward}
  - {name: dpi, node: r3, kind: forward}
  - {name: out, node: r6, kind: forward}
chains:
  - name: long
    ingress: [r1]
    functions: [in, a, b, c, dpi, a, dpi, b, c, dpi, a, b, c, out, out]
    egress: r6
    match: {destination: "fc00:8::/64"}
    direction: both
    proof: {scheme: keyed, on-violation: drop}
lab:
  mtu: 2000
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64"}
    - {name: h2, node: r6, prefix: "fc00:8::/64"}
  links:
    - {between: [r1, r2]}
    - {between: [r2, r3]}
    - {between: [r3, r6]}
`

func TestALongestChainIsProvenByEachVisit(t *testing.T) {
	t.Parallel()
	pass := func(t *testing.T, s model.Scheme, carried change) {
		w := build(t, longest, proven(s), carried)
		forward, reverse := w.path("long", model.Forward), w.path("long", model.Reverse)
		if n := len(forward.Segments()); n != model.SegmentsMax {
			t.Fatalf("the chain has %d segments, want %d", n, model.SegmentsMax)
		}
		sids := map[netip.Addr]bool{}
		for _, sid := range slices.Concat(forward.Segments(), reverse.Segments()) {
			sids[sid] = true
		}
		if len(sids) != 2*model.SegmentsMax {
			t.Errorf("%d SIDs for %d visits", len(sids), 2*model.SegmentsMax)
		}
		since, back := w.counting(forward), w.counting(reverse)
		w.reaches("h1", "h2")
		r := w.download("h1", "h2", 10_000_000)
		t.Logf("forward: %.1f Gb/s", gigabits(r))
		r = w.download("h2", "h1", 10_000_000)
		t.Logf("reverse: %.1f Gb/s", gigabits(r))
		for _, f := range []flow{since(), back()} {
			for i, h := range f {
				if f.frames() < 7000 || 2*h.Packets > h.Frames && !w.labelled() {
					t.Errorf("position %d: %d packets for %d frames; want super-packets of 7000 frames or more", i, h.Packets, h.Frames)
				}
			}
		}
	}
	bothSchemes(t, func(t *testing.T, s model.Scheme) { pass(t, s, overSRv6) })
	t.Run("over labels", func(t *testing.T) {
		t.Parallel()
		pass(t, model.SchemeKeyed, overLabels)
	})
}

// Several chains through the same functions:
//
//	h1, h4 --- r1                              chain web: to h2, from everybody at r1 and r7
//	             \                             chain one: to a second address of h2, by dpi alone
//	              r2 (fw) --- r3 (dpi) --- r6 --- h2, h3
//	             /                             chain db:  from h1 to h3, and back
//	    h7 --- r7                              at r7 what no chain takes is dropped
const several = `
version: 1
domain: {block: "fc00::/48"}
nodes:
  - name: r1
    address: fc00:1::1
    locator: fc00:0:0:100::/56
    interfaces: [{name: r1-h1, role: edge}, {name: r1-h4, role: edge}, {name: r1-r2, role: core, mtu: 1700}]
  - name: r7
    address: fc00:7:7::1
    locator: fc00:0:0:700::/56
    interfaces: [{name: r7-h7, role: edge, unmatched: drop}, {name: r7-r2, role: core, mtu: 1700}]
  - name: r2
    address: fc00:2::1
    locator: fc00:0:0:200::/56
    interfaces: [{name: r2-r1, role: core, mtu: 1700}, {name: r2-r7, role: core, mtu: 1700}, {name: r2-r3, role: core, mtu: 1700}]
  - name: r3
    address: fc00:3::1
    locator: fc00:0:0:300::/56
    interfaces: [{name: r3-r2, role: core, mtu: 1700}, {name: r3-r6, role: core, mtu: 1700}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    interfaces: [{name: r6-h2, role: edge}, {name: r6-h3, role: edge}, {name: r6-r3, role: core, mtu: 1700}]
functions:
  - {name: fw, node: r2, kind: forward}
  - {name: dpi, node: r3, kind: forward}
chains:
  - name: web
    ingress: [r1, r7]
    functions: [fw, dpi]
    egress: r6
    match: {destination: "fc00:8::/64"}
    proof: {scheme: keyed, on-violation: drop}
  - name: one
    ingress: [r1, r7]
    functions: [dpi]
    egress: r6
    match: {destination: "fc00:8::3/128"}
    proof: {scheme: opot, on-violation: drop}
  - name: db
    ingress: [r1]
    functions: [fw, dpi]
    egress: r6
    match: {destination: "fc00:9::/64", source: "fc00:7::/64"}
    direction: both
    proof: {scheme: keyed, on-violation: drop}
lab:
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64"}
    - {name: h4, node: r1, prefix: "fc00:a::/64"}
    - {name: h7, node: r7, prefix: "fc00:77::/64"}
    - {name: h2, node: r6, prefix: "fc00:8::/64"}
    - {name: h3, node: r6, prefix: "fc00:9::/64"}
  links:
    - {between: [r1, r2]}
    - {between: [r7, r2]}
    - {between: [r2, r3]}
    - {between: [r3, r6]}
`

func TestEachPacketTakesTheChainThatMatchesBest(t *testing.T) {
	t.Parallel()
	bothEncapsulations(t, eachPacketTakesTheChainThatMatchesBest)
}

func eachPacketTakesTheChainThatMatchesBest(t *testing.T, carried change) {
	w := build(t, several, carried)
	second := netip.MustParseAddr("fc00:8::3")
	must(t, w.net("h2").AddAddress("h2-r6", netip.PrefixFrom(second, 64)))

	r6 := w.record("r6", "r6-r3")
	for _, c := range []struct {
		name, from string
		to         netip.Addr
		want       map[string]uint64 // frames by path, as those of 4 echo requests and their answers
	}{
		{"by destination", "h1", w.addr("h2"), map[string]uint64{"web forward": 4}},
		{"from another ingress", "h7", w.addr("h2"), map[string]uint64{"web forward": 4}},
		{"whatever the source", "h4", w.addr("h2"), map[string]uint64{"web forward": 4}},
		{"by the longest destination", "h1", second, map[string]uint64{"one forward": 4}},
		{"by destination and source", "h1", w.addr("h3"), map[string]uint64{"db forward": 4, "db reverse": 4}},
		{"none, for another source", "h4", w.addr("h3"), map[string]uint64{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := w.in(t)
			since := map[string]func() flow{}
			for _, p := range w.plan.Paths {
				since[pathName(p)] = w.counting(p)
			}
			r, err := lab.Ping(soon(t), w.ns(c.from), c.to, lab.PingConfig{Count: 4, Timeout: settleTime})
			must(t, err)
			if r.Received != 4 {
				t.Errorf("%d of 4 echo requests were answered", r.Received)
			}
			got := map[string]uint64{}
			for name, f := range since {
				if n := f().frames(); n > 0 {
					got[name] = n
				}
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("frames by path (-want +got):\n%s", d)
			}
		})
	}

	// Each headend numbers in lanes of its own.
	web := w.path("web", model.Forward)
	lanes := map[string]int{}
	for _, p := range proofsIn(r6.soFar(), web.Path) {
		for _, in := range web.Ingress {
			if lane := p.RND >> 48; lane >= uint64(in.Lane) && lane < uint64(in.Lane)+uint64(in.Lanes) {
				lanes[in.Node]++
			}
		}
	}
	if d := cmp.Diff(map[string]int{"r1": 8, "r7": 4}, lanes); d != "" {
		t.Errorf("stamped packets of chain web by the headend whose lane they are in (-want +got):\n%s", d)
	}

	// At r7's edge what takes no chain goes nowhere.
	since := time.Now()
	w.isCutOff("h7", "h3", probes)
	w.refused("r7", "unmatched", probes)
	w.explained(w.event(since, "r7", "unmatched"),
		"a packet from fc00:77::2 to fc00:9::2 was refused: no chain takes this packet, and its interface refuses such packets")
	// Nobody gets to h2 beside its chain, not even from next door.
	since = time.Now()
	w.isCutOff("h3", "h2", probes)
	w.refused("r6", "unproven", probes)
	w.explained(w.event(since, "r6", "unproven"), "a packet from fc00:9::2 to fc00:8::2, which chain web requires, came without proof")
}

// proofsIn are the proofs of a path in frames, over whichever outer header.
func proofsIn(frames [][]byte, path uint32) (list []srv6.Proof) {
	for _, b := range frames {
		at := 0
		for ; at+mpls.ProofLen <= len(b); at++ {
			if v, ok := srv6.ReadProof([mpls.ProofLen]byte(b[at:])); ok && v.Path == path {
				list = append(list, v)
				break
			}
		}
	}
	return list
}

func pathName(p plan.Path) string { return p.Chain + " " + p.Direction.String() }

// What a chain leaves to the inner packet is kept to the byte, as the plan says.
func TestAPacketTooBigForItsChainIsRefused(t *testing.T) {
	t.Parallel()
	bothEncapsulations(t, packetTooBigForItsChain)
}

func packetTooBigForItsChain(t *testing.T, carried change) {
	w := build(t, paper, carried)
	for _, l := range [][2]string{{"h1", "h1-r1"}, {"r1", "r1-h1"}, {"r6", "r6-h2"}, {"h2", "h2-r6"}} {
		must(t, w.net(l[0]).SetMTU(l[1], 1700))
	}
	const headers = 40 + 8 // IPv6, ICMPv6
	fits := w.path("web", model.Forward).MTU - headers
	w.reaches("h1", "h2")
	if got := w.ping("h1", "h2", lab.PingConfig{Size: fits, Timeout: settleTime}); got != 1 {
		t.Errorf("a packet that just fits was not answered")
	}
	since := time.Now()
	if got := w.ping("h1", "h2", lab.PingConfig{Size: fits + 1, Timeout: lostTime}); got != 0 {
		t.Errorf("a packet that is a byte too long was answered")
	}
	w.refused("r1", "chain-mtu", 1)
	w.explained(w.event(since, "r1", "chain-mtu"),
		"a packet from fc00:7::2 to fc00:8::2 was refused: the packet is larger than the MTU of its chain")
}
