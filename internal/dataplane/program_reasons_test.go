package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// notProduced are the reasons that neither a packet nor what is in the maps can
// bring about, and why. Each is there since the verifier of the kernel, or a
// helper's failure, wants an answer.
var notProduced = map[abi.Reason]string{
	abi.ReasonWriteFailed:   "the room for the header was made a moment before",
	abi.ReasonPullFailed:    "the kernel would have to be out of memory",
	abi.ReasonBoundsBug:     "what it checks was checked before",
	abi.ReasonWindowBusyBug: "a number would have to be spent by other CPUs more often than it can be",
	abi.ReasonRestoreFailed: "the packet had a header of that size a moment before",
}

// reasonCase brings one reason about that no packet of Scapy's does.
type reasonCase struct {
	node   string
	routes []rigRoute
	damage func(*rig) error // what no plan would put into the maps
	packet string
	gso    [2]uint32 // gso_size, gso_segs
}

func reasonCases() map[abi.Reason]reasonCase {
	edit := func(t tables.Map, get func(*rig) (any, any)) func(*rig) error {
		return func(r *rig) error {
			k, v := get(r)
			return r.put(t, k, v)
		}
	}
	webKey := abi.EgressKey{Path: abi.BE32(0x5eed0001), Epoch: 1}
	// seen: r6 has accepted this packet of web.
	seen := func(x oracle.Train) func(*rig) error {
		return func(r *rig) error {
			return r.see(tables.CounterKey{Path: webKey.Path, Epoch: webKey.Epoch}, []oracle.Train{x})
		}
	}
	// changed is the headend entry of Scapy's chain web, which is r1's.
	changed := func(f func(*abi.Headend)) func(*rig) error {
		return edit(tables.MapHeadends, func(r *rig) (any, any) {
			k, h := headendEntry(r, 0x5eed0001)
			f(&h)
			return k, h
		})
	}
	return map[abi.Reason]reasonCase{
		abi.ReasonRNDExhausted: {node: "r1", packet: "edge-web", damage: func(r *rig) error { return r.setNumbers(0) }},
		abi.ReasonNoLane:       {node: "r1", packet: "edge-web", damage: changed(func(h *abi.Headend) { h.Lanes = 0 })},
		abi.ReasonTooBig:       {node: "r1", packet: "edge-web", routes: []rigRoute{{to: xtest.Prefix("fc00:0:0:200::/56"), mtu: 175}}},
		abi.ReasonPushFailed:   {node: "r1", packet: "edge-web", gso: [2]uint32{1000, 2}},
		abi.ReasonStripFailed:  {node: "r6", packet: "web-3", gso: [2]uint32{1000, 1}},
		abi.ReasonHeadendMissingBug: {node: "r1", packet: "edge-web", damage: func(r *rig) error {
			k, _ := headendEntry(r, 0x5eed0001)
			return r.g.maps[tables.MapHeadends].Put(k, abi.Headend{})
		}},
		abi.ReasonHeadendLengthBug:  {node: "r1", packet: "edge-web", damage: changed(func(h *abi.Headend) { h.OuterLen = 87 })},
		abi.ReasonCounterMissingBug: {node: "r1", packet: "edge-web", damage: changed(func(h *abi.Headend) { h.Counter = 1 << 20 })},
		abi.ReasonEgressMissingBug: {node: "r6", packet: "web-3", damage: func(r *rig) error {
			return r.d.run(r.g, []tables.Op{{Table: tables.MapEgresses, Key: &webKey, Value: nil}})
		}},
		abi.ReasonReplay: {node: "r6", packet: "web-3", damage: seen(oracle.Train{Lane: 5, Counter: 7, Frames: 1})},
		abi.ReasonStale:  {node: "r6", packet: "web-3", damage: seen(oracle.Train{Lane: 5, Counter: 4 + 1024, Frames: 1})},
		abi.ReasonWindowMissingBug: {node: "r6", packet: "web-3", damage: func(r *rig) error {
			return r.g.maps[tables.MapWindows].Delete(r.have.Egresses[webKey].Window / abi.WindowSlab)
		}},
		abi.ReasonExtensionProgramBug: {node: "r2", packet: "options-hop-by-hop-1", damage: func(r *rig) error {
			r.program(object.CoreTC) // with which the other comes
			return r.g.maps[tables.MapPrograms].Delete(uint32(abi.ProgramExt))
		}},
		abi.ReasonRulesMissingBug: {node: "r6", packet: "unproven", damage: func(r *rig) error {
			return r.g.maps[tables.MapMatch].Delete(uint32(abi.MatchUseRequire))
		}},
		abi.ReasonBehaviourBug: {node: "r2", packet: "web-1", damage: func(r *rig) error {
			k := tables.EncodeHopKey(xtest.Addr("fc00:0:0:201::"), 0x5eed0001, 1)
			h := r.have.Hops[k]
			h.Behaviour = 77
			return r.d.run(r.g, []tables.Op{{Table: tables.MapHops, Key: &k, Value: &h}})
		}},
	}
}

// reasonNamed is the reason of that name.
func reasonNamed(name string) abi.Reason {
	all := abi.Reasons()
	return all[slices.IndexFunc(all, func(r abi.Reason) bool { return reasonName(r) == name })]
}

// headendEntry is the entry of a path, with its key.
func headendEntry(r *rig, path uint32) (uint32, abi.Headend) {
	for k, h := range r.have.Headends {
		if h.Path == abi.BE32(path) {
			return k, h
		}
	}
	return 0, abi.Headend{}
}

// Every reason there is, through the programs that ship: it and nothing else is
// counted. Those of Scapy's packets are looked at in
// TestProgramsDoWithScapysPacketsWhatTheyMust, and those that need a device in
// the tests that this one names.
func TestEveryReasonIsProduced(t *testing.T) {
	produced := map[abi.Reason]string{
		abi.ReasonPathMTU:         "TestHeadendLearnsFromPacketTooBig",
		abi.ReasonIp6Length:       "TestIPv6PacketShorterThanItSaysTakesNoChain",
		abi.ReasonTrainTooBig:     "TestHeadendStampsTrains",
		abi.ReasonTruncated:       "TestTruncatedHeaders",
		abi.ReasonEdgeTruncated:   "TestTruncatedHeaders",
		abi.ReasonVLANTags:        "TestSecondPriorityTagIsRefused",
		abi.ReasonLeakSID:         "TestWhatMayLeaveTheDomain",
		abi.ReasonLeakSRH:         "TestWhatMayLeaveTheDomain",
		abi.ReasonUnverified:      "TestWhatMayLeaveTheDomain",
		abi.ReasonLeaveTruncated:  "TestTruncatedPacketDoesNotLeave",
		abi.ReasonOriginUnmatched: "TestWhatAFunctionMakesTakesTheRestOfItsChain",
		abi.ReasonStreamUnknown:   "TestConnectionsPassAStreamFunction",
		abi.ReasonStreamNotTcp:    "TestWhatIsNotTCPIsRefusedAtAStreamFunction",
		abi.ReasonStreamDown:      "TestAStreamFunctionWithoutAWorkerGetsNothing",
		abi.ReasonStreamsFull:     "TestAFullTableOfConnectionsRefusesMore",
		abi.ReasonStreamQuota:     "TestAFunctionHasItsShareOfTheConnections",
	}
	// Those of the proxy, which has tests of its own.
	for _, r := range []abi.Reason{
		abi.ReasonNotCached, abi.ReasonCacheFull, abi.ReasonFunctionMTU, abi.ReasonCannotCut,
		abi.ReasonFunctionTruncated, abi.ReasonProxyMissingBug, abi.ReasonFunctionGone, abi.ReasonShareGone, abi.ReasonInnerAddress, abi.ReasonHeaderTooLong,
	} {
		produced[r] = "proxy_test.go"
	}
	for _, r := range []abi.Reason{abi.ReasonNoNeighbour, abi.ReasonLeakMPLS, abi.ReasonLabelsProgramBug} {
		produced[r] = "program_labels_test.go"
	}
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	labelled, err := packets.MPLS()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range labelled {
		for _, r := range oracle.LabelReasons() {
			if string(r) == p.Reason {
				produced[reasonNamed(p.Reason)] = p.Name
			}
		}
	}
	for _, p := range all {
		for _, name := range append(slices.Clone(p.Reports), p.Reason) {
			for _, r := range abi.Reasons() {
				if reasonName(r) == name && !(frame{b: p.Frame}).truncated() {
					produced[r] = p.Name
				}
			}
		}
	}
	rigs := map[string]*rig{} // those without routes of their own
	for reason, c := range reasonCases() {
		if by := produced[reason]; by != "" {
			t.Errorf("%s has a case of its own, though %s produces it", reason, by)
		}
		r := rigs[c.node]
		if r == nil || c.routes != nil {
			r = newScapyRig(t, c.node, c.routes...)
		}
		if c.routes == nil {
			rigs[c.node] = r
		}
		t.Run(reason.String(), func(t *testing.T) { c.run(t, r, reason) })
		produced[reason] = "reasonCases"
	}
	for _, reason := range abi.Reasons() {
		if reason == abi.ReasonNone {
			continue
		}
		by, why := produced[reason], notProduced[reason]
		switch {
		case by == "" && why == "":
			t.Errorf("nothing produces %s (%s): add a packet to test/packets or a case here", reason, reason.Text())
		case by != "" && why != "":
			t.Errorf("%s is produced by %s, yet is said to be out of reach: %s", reason, by, why)
		}
	}
}

func (c reasonCase) run(t *testing.T, r *rig, reason abi.Reason) {
	// All anew, whatever the case before did to the maps.
	n := scapyNode(t, c.node).Node
	r.must(errors.Join(r.apply(nil), r.apply(&n), r.freshEvents()))
	if c.damage != nil {
		r.must(c.damage(r))
	}
	p, err := packets.Load(c.packet)
	r.must(err)
	f := frame{port: p.Interface.Name, b: p.Frame, gsoSize: c.gso[0], gsoSegs: c.gso[1]}
	r.must(r.in(func() error {
		tc, err := r.runTC(f)
		if err != nil {
			return err
		}
		got, err := r.counted()
		if err != nil {
			return err
		}
		want := uint32(tcDrop)
		if reason == abi.ReasonTooBig { // the sender is told
			want = tcRedirect
		}
		if tc.verdict != want || !slices.Equal(got.dropped, []string{reasonName(reason)}) || len(got.reported) != 0 {
			return fmt.Errorf("TC: verdict %d, counted %+v; want it dropped for %s\n%s", int32(tc.verdict), got, reason, layers(f.b))
		}
		if len(got.stats) != 0 {
			return fmt.Errorf("TC counted %+v as done, though it was refused for %s", got.stats, reason)
		}
		if f.gsoSize != 0 {
			return nil
		}
		xdp, err := r.runXDP(f)
		if err != nil {
			return err
		}
		if xdp.verdict != xdpPass || !bytes.Equal(xdp.b, f.b) {
			return fmt.Errorf("XDP: verdict %d\n%s\nwant it left to TC, unchanged", xdp.verdict, layers(xdp.b))
		}
		return r.checkMoved("XDP", moved{})
	}))
	events, err := r.drain()
	r.must(err)
	if len(events) != 1 || abi.Reason(events[0].Reason) != reason {
		t.Errorf("%d events; want one for %s", len(events), reason)
	}
}

// An event names what the helper returned, where one failed.
func TestEventNamesTheHelpersError(t *testing.T) {
	r := newScapyRig(t, "r1")
	p, err := packets.Load("edge-web")
	r.must(err)
	r.must(r.in(func() error {
		_, err := r.runTC(frame{port: portEdge, b: p.Frame, gsoSize: 1000, gsoSegs: 2})
		return err
	}))
	events, err := r.drain()
	r.must(err)
	if len(events) != 1 || unix.Errno(-events[0].Err) != 524 { // ENOTSUPP
		t.Fatalf("got %+v; want one event with the error -524", events)
	}
}

// Events are a sample: 64 a second, of each reason and CPU. What is left out is
// told by the next.
func TestEventsAreASampleThatSaysSo(t *testing.T) {
	r := newScapyRig(t, "r6")
	p, err := packets.Load("unproven")
	r.must(err)
	f := frame{port: portCore, b: p.Frame}
	const n = abi.EventsPerSecond + 36
	flood := func() (sent, told int) {
		r.must(r.in(func() error {
			for range n {
				if _, err := r.runTC(f); err != nil {
					return err
				}
			}
			return nil
		}))
		events, err := r.drain()
		r.must(err)
		for _, e := range events {
			told += int(e.Suppressed)
		}
		return len(events), told
	}
	got, err := r.counted()
	r.must(err)
	sent, told := flood()
	if got, err = r.counted(); err != nil || len(got.dropped) != n {
		t.Fatalf("counted %d, %v; want %d", len(got.dropped), err, n)
	}
	// The machine may be so slow that a second passes meanwhile.
	if sent < abi.EventsPerSecond || sent == n {
		t.Fatalf("%d events of %d", sent, n)
	}
	// As if the second were over.
	var each []abi.Refusal
	r.must(r.g.maps[tables.MapRefusals].Lookup(uint32(abi.ReasonUnproven), &each))
	if int(each[0].Suppressed)+sent+told != n {
		t.Errorf("%d were sent, and %d and then %d left out, of %d", sent, told, each[0].Suppressed, n)
	}
	suppressed := each[0].Suppressed
	for i := range each {
		each[i].WindowNs -= uint64(2 * time.Second)
	}
	r.must(r.put(tables.MapRefusals, uint32(abi.ReasonUnproven), each))
	r.must(r.in(func() error {
		_, err := r.runTC(f)
		return err
	}))
	events, err := r.drain()
	r.must(err)
	if len(events) != 1 || events[0].Suppressed != suppressed {
		t.Errorf("%d events; want one that says %d were left out", len(events), suppressed)
	}
}

// XDP goes by what TC learned: for as long as that counts, where it may be sent,
// and if it is not too long.
func TestXDPGoesByWhatTCLearnedAndNoFurther(t *testing.T) {
	p, err := packets.Load("web-1")
	if err != nil {
		t.Fatal(err)
	}
	f := frame{port: portCore, b: p.Frame}
	r := newScapyRig(t, "r2")
	verdict := func() (v uint32) {
		r.must(r.in(func() error {
			o, err := r.runXDP(f)
			v = o.verdict
			return err
		}))
		return v
	}
	learn := func() {
		r.must(r.g.flushNexthops())
		r.must(r.in(func() error {
			_, err := r.runTC(f)
			return err
		}))
	}
	// All ways of the hop, by CPU. The headers are IPv6, SRH, three segments, TLV.
	tlv := p.Frame[srv6.EthernetLen+srv6.IPv6Len+8+3*16:]
	index := r.have.Hops[abi.HopKey{
		Sid:   binary.NativeEndian.Uint64(p.Frame[srv6.EthernetLen+24:]),
		Epoch: tlv[3], Path: binary.NativeEndian.Uint32(tlv[4:]),
	}].Stats
	exits := func() (each []abi.Exit) {
		r.must(r.g.maps[tables.MapExits].Lookup(index, &each))
		return each
	}
	learn()
	was := exits()
	cpu, flow := -1, -1
	for c := range was {
		for f, n := range was[c].Flow {
			if n.Ifindex != 0 {
				cpu, flow = c, f
			}
		}
	}
	if cpu < 0 {
		t.Fatal("TC learned nothing")
	}
	n := was[cpu].Flow[flow]
	if n.Ifindex != r.ports[portOut] || n.Dmac != neighbourMAC || n.Smac != rigMAC || n.Mtu != rigMTU || n.To != [2]uint64{tables.Upper(xtest.Addr("fc00:0:0:301::"))} {
		t.Errorf("TC learned %+v", n)
	}
	if n.Expires < rigNexthopTTL || tables.NexthopTTL*10*time.Millisecond >= time.Second {
		t.Errorf("what TC learned counts until jiffy %d of at least %d, and a node's for %d jiffies of at most 10 ms; want less than a second", n.Expires, uint64(rigNexthopTTL), tables.NexthopTTL)
	}
	put := func(n abi.Nexthop) {
		was[cpu].Flow[flow] = n
		r.must(r.put(tables.MapExits, index, was))
	}
	if v := verdict(); v != xdpRedirect {
		t.Errorf("verdict %d by what TC has just learned, want a redirect", v)
	}
	for what, change := range map[string]func(*abi.Nexthop){
		"expired":                  func(n *abi.Nexthop) { n.Expires = 1 },
		"one byte too long":        func(n *abi.Nexthop) { n.Mtu = uint16(len(p.Frame) - srv6.EthernetLen - 1) },
		"nothing may be that long": func(n *abi.Nexthop) { n.Mtu = 0 },
		"to somewhere else":        func(n *abi.Nexthop) { n.To[0]++ },
		"found before a change":    func(n *abi.Nexthop) { n.Ways-- },
		"not for XDP":              func(n *abi.Nexthop) { n.Xdp = 0 },
	} {
		m := n
		change(&m)
		put(m)
		if v := verdict(); v != xdpPass {
			t.Errorf("%s: verdict %d, want it left to TC", what, v)
		}
	}
	m := n
	m.Mtu = uint16(len(p.Frame) - srv6.EthernetLen)
	put(m)
	if v := verdict(); v != xdpRedirect {
		t.Errorf("just fits: verdict %d, want a redirect", v)
	}
	// A device that takes no redirect loses them without a word; at an edge
	// nobody would stop what leaves the domain encapsulated.
	for what, p := range map[string]abi.Port{"takes no redirects": {}, "is outside": {XdpTarget: 1, Edge: 1}} {
		r.must(r.put(tables.MapPorts, r.ports[portOut], p))
		learn()
		if n := exits()[cpu].Flow[flow]; n.Xdp != 0 {
			t.Errorf("TC learned a way out that %s: %+v", what, n)
		}
		if v := verdict(); v != xdpPass {
			t.Errorf("verdict %d without a way in, since it %s; want it left to TC", v, what)
		}
	}
}

// Inner packets leave their egress as TC found out: by the egress's own entry, or,
// where that is another destination's, by the hash that all CPUs share.
func TestInnerPacketsGoByWhatTheirEgressRemembers(t *testing.T) {
	for _, c := range []struct {
		packet        string
		byDestination bool // alone it tells the path
	}{{"web-3", false}, {"ordered-3", true}, {"four-2", true}} {
		t.Run(c.packet, func(t *testing.T) {
			p, err := packets.Load(c.packet)
			if err != nil {
				t.Fatal(err)
			}
			r := newScapyRig(t, "r6")
			// IPv6 header, SRH, its list, TLV.
			outer := srv6.IPv6Len + 8 + 16*(int(p.Frame[srv6.EthernetLen+srv6.IPv6Len+4])+1) + 24
			tlv := p.Frame[srv6.EthernetLen+outer-24:]
			index := r.have.Hops[abi.HopKey{
				Sid:   binary.NativeEndian.Uint64(p.Frame[srv6.EthernetLen+24:]),
				Epoch: tlv[3], Path: binary.NativeEndian.Uint32(tlv[4:]),
			}].Stats
			f := frame{port: portCore, b: p.Frame}
			run := func(hook func(frame) (outcome, error)) (o outcome) {
				r.must(r.forget())
				r.must(r.in(func() error {
					o, err = hook(f)
					return err
				}))
				return o
			}
			run(r.runTC)
			var exits []abi.Exit
			r.must(r.g.maps[tables.MapExits].Lookup(index, &exits))
			var own *abi.Nexthop
			for c := range exits {
				for f := range exits[c].Flow {
					if exits[c].Flow[f].Ifindex != 0 {
						own = &exits[c].Flow[f]
					}
				}
			}
			var key abi.NexthopKey
			var shared abi.Nexthop
			hash := r.g.maps[tables.MapNexthops]
			r.must(hash.NextKey(nil, &key))
			r.must(hash.Lookup(&key, &shared))
			if own == nil || *own != shared || own.Ifindex != r.ports[portOut] || own.Dmac != neighbourMAC || own.To != key.Addr {
				t.Fatalf("TC learned %+v and, for %+v, %+v", own, key, shared)
			}
			// The guard has an answer for the destination, or for its sources.
			required := tables.Covering(r.have.GuardDst, tables.DstKey{Prefixlen: 128, Addr: [16]uint8(xtest.BytesOf(&key.Addr))})
			byDestination := required.Action == uint8(abi.MatchActionPath)
			if byDestination != c.byDestination || (shared.Path != 0) != byDestination || (byDestination && shared.Path != required.Target) {
				t.Errorf("TC learned that path %#x is required; the guard says %+v", shared.Path, required)
			}
			learned := shared
			here, there, anew := [6]byte{2, 1}, [6]byte{2, 2}, [6]byte(p.Frame[:6])
			try := func(what string, change func(own, shared *abi.Nexthop), want [6]byte) {
				t.Helper()
				*own, shared = learned, learned
				own.Dmac, shared.Dmac = here, there
				change(own, &shared)
				for hook, run := range map[string]func() outcome{
					"TC": func() outcome { return run(r.runTC) }, "XDP": func() outcome { return run(r.runXDP) },
				} {
					r.must(r.put(tables.MapExits, index, exits))
					r.must(hash.Put(&key, &shared))
					verdict := uint32(tcRedirect)
					if hook == "XDP" {
						verdict = xdpRedirect
						if want == anew {
							verdict = xdpPass
						}
					}
					// A redirect to a neighbour writes its address later.
					if o := run(); o.verdict != verdict || [6]byte(o.b[:6]) != want {
						t.Errorf("%s, %s: verdict %d, to %x; want %d, %x", what, hook, o.verdict, o.b[:6], verdict, want)
					}
				}
			}
			try("as learned", func(own, _ *abi.Nexthop) {}, here)
			try("it just fits", func(own, _ *abi.Nexthop) {
				own.Mtu = uint16(len(p.Frame) - srv6.EthernetLen - outer)
			}, here)
			try("the guard must be asked", func(own, _ *abi.Nexthop) { own.Path = 0 }, here)
			if c.byDestination {
				// XDP takes the guard's word from there, and leaves the rest to TC,
				// which asks.
				*own = learned
				own.Path = abi.BE32(99)
				r.must(r.put(tables.MapExits, index, exits))
				if o := run(r.runXDP); o.verdict != xdpPass {
					t.Errorf("another path is required: verdict %d, want it left to TC", o.verdict)
				}
			}
			try("it is too long", func(own, _ *abi.Nexthop) {
				own.Mtu = uint16(len(p.Frame) - srv6.EthernetLen - outer - 1)
			}, anew)
			for what, spoil := range map[string]func(*abi.Nexthop){
				"expired":               func(n *abi.Nexthop) { n.Expires = 1 },
				"to somewhere else":     func(n *abi.Nexthop) { n.To[0]++ },
				"to somebody else":      func(n *abi.Nexthop) { n.To[1]++ },
				"found before a change": func(n *abi.Nexthop) { n.Ways-- },
			} {
				try("its own is "+what, func(own, _ *abi.Nexthop) { spoil(own) }, there)
				try("both are "+what, func(own, shared *abi.Nexthop) { spoil(own); spoil(shared) }, anew)
			}
		})
	}
}

// Super-packets are not XDP's, yet what TC learns from them is what XDP goes by:
// it must be the route's MTU and not the device's.
func TestSuperPacketTeachesXDPTheRoutesMTU(t *testing.T) {
	p, err := packets.Load("web-1")
	if err != nil {
		t.Fatal(err)
	}
	r := newScapyRig(t, "r2", rigRoute{to: xtest.Prefix("fc00:0:0:300::/56"), mtu: 1000})
	big := slices.Concat(p.Frame, make([]byte, 1500))
	r.must(r.in(func() error {
		super, err := r.runTC(frame{port: portCore, b: p.Frame, gsoSize: 20, gsoSegs: 3})
		if err != nil {
			return err
		}
		xdp, err := r.runXDP(frame{port: portCore, b: big})
		if err != nil {
			return err
		}
		tc, err := r.runTC(frame{port: portCore, b: big})
		if err != nil {
			return err
		}
		if super.verdict != tcRedirect || tc.verdict != tcRedirect || tc.b[20] != 58 || xdp.verdict != xdpPass {
			t.Errorf("super-packet: TC %d; then %d bytes on a way of 1000: XDP %d, TC %d; want XDP to leave it to TC, which says so", super.verdict, len(big), xdp.verdict, tc.verdict)
		}
		return nil
	}))
}

// consecutive is a plan where a path's headend, functions and egress are all on
// one node.
func consecutive(t *testing.T, scheme model.Scheme, segments int) plan.Node {
	t.Helper()
	n := scapyNode(t, "r2").Node
	n.Headends, n.Endpoints, n.Egresses = nil, nil, nil
	s := newSecretPool(t)[scheme][segments+1][0]
	p := fuzzPath{
		PathID: plan.PathID{Path: 7, Epoch: 9, Chain: "all", Scheme: scheme},
		match:  model.Match{Destination: xtest.Prefix("fc00:8::/64")}, visits: make([]int, segments+1), sources: []netip.Addr{n.Address}, secrets: s,
	}
	for i := range segments {
		b := n.Locator.Addr().As16()
		b[7] = byte(i + 1)
		p.segments = append(p.segments, netip.AddrFrom16(b))
	}
	nodes := []plan.Node{n}
	p.give(nodes, 0, 0, model.OnViolationDrop, model.GuardUnset, 3, 1)
	return nodes[0]
}

// Up to sixteen functions on one node are visited in one go, whether the packet
// enters the chain there or comes to any of them.
func TestConsecutiveFunctionsAreVisitedInOneGo(t *testing.T) {
	r := newScapyRig(t, "r2")
	for _, scheme := range []model.Scheme{model.SchemeKeyed, model.SchemeOPoT, model.SchemePoT} {
		for _, segments := range []int{1, 2, 15, 16} {
			n := consecutive(t, scheme, segments)
			r.must(r.apply(&n))
			inner := tcpPacket(t, "fc00:8::2", 100)
			check := func(f frame, visits int) {
				t.Helper()
				var s seen
				if err := r.in(func() (err error) {
					s, err = r.check(f, &oracle.Labels{}, true)
					return err
				}); err != nil {
					t.Errorf("%s, %d segments: %v", scheme, segments, err)
				}
				if len(s.want.Visits) != visits || s.want.Verdict != oracle.Forward {
					t.Errorf("%s, %d segments: %s after %d visits, want forward after %d", scheme, segments, s.want.Verdict, len(s.want.Visits), visits)
				}
			}
			check(frame{port: portEdge, b: inner}, segments+1)
			for at := 1; at <= segments; at++ {
				check(frame{port: portCore, b: onPath(t, n, at, inner[srv6.EthernetLen:])}, segments-at+1)
			}
		}
	}
}

// Each entry of a list counts, both its halves, in lists of an odd and of an even
// number of entries.
func TestEveryEntryOfASegmentListCounts(t *testing.T) {
	r := newScapyRig(t, "r2")
	inner := tcpPacket(t, "fc00:8::2", 100)[srv6.EthernetLen:]
	for _, segments := range []int{1, 2, 15, 16} {
		n := consecutive(t, model.SchemeOPoT, segments)
		r.must(r.apply(&n))
		for entry := range segments {
			for _, at := range []int{0, srv6.SegmentLen - 1} {
				b := onPath(t, n, segments, inner)
				b[srv6.EthernetLen+srv6.IPv6Len+srv6.SRHLen+entry*srv6.SegmentLen+at] ^= 1
				var s seen
				if err := r.in(func() (err error) {
					s, err = r.check(frame{port: portCore, b: b}, &oracle.Labels{}, false)
					return err
				}); err != nil {
					t.Errorf("%d segments, entry %d, byte %d: %v", segments, entry, at, err)
				}
				if s.want.Reason != oracle.Segments {
					t.Errorf("%d segments, entry %d, byte %d: the oracle says %s, want %s", segments, entry, at, s.want.Reason, oracle.Segments)
				}
			}
		}
	}
}

// onPath is a packet of a consecutive plan as it comes to a position.
func onPath(t *testing.T, n plan.Node, at int, inner []byte) []byte {
	t.Helper()
	h := n.Headends[0]
	shares := []pot.Share{h.Share}
	for _, e := range n.Endpoints {
		shares = append(shares, e.Share)
	}
	steps := pot.Walk(h.PathID.Header(), 3<<48|1, shares[:at]...)
	v := steps[at-1].WireOut
	p := srv6.Packet{
		Ethernet: &srv6.Ethernet{Destination: rigMAC, Type: srv6.EtherTypeIPv6},
		Header:   srv6.Header{HopLimit: 64, Source: n.Address, Destination: h.Segments[at-1]},
		SRH: &srv6.SRH{
			NextHeader: srv6.NextHeaderIPv6, SegmentsLeft: uint8(len(h.Segments) - at), Segments: srv6.Reversed(h.Segments),
			TLVs: []srv6.TLV{srv6.Proof{Scheme: h.Scheme, Epoch: h.Epoch, Path: h.Path, RND: v.RND, CML: v.CML}.TLV()},
		},
		Payload: inner,
	}
	if err := p.Fix(); err != nil {
		t.Fatal(err)
	}
	b, err := p.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The kernel knows how many frames a super-packet is, or it follows from its
// length.
func TestTrainsAreCountedAsWhatTheyAreOnAWire(t *testing.T) {
	r := newScapyRig(t, "r2")
	p, err := packets.Load("web-1")
	r.must(err)
	b := slices.Concat(p.Frame, make([]byte, 1000))
	inner := len(b) - srv6.EthernetLen - srv6.IPv6Len - 8 - 3*16 - 24
	payload := inner - srv6.IPv6Len - 8 // UDP
	for _, c := range []struct{ size, segs, want uint32 }{
		{0, 0, 1}, {0, 5, 1}, {100, 7, 7}, {100, 1, 1}, {100, 0, uint32(payload+99) / 100}, {uint32(payload), 0, 1}, {uint32(payload - 1), 0, 2}, {1, 0, uint32(payload)}, {65535, 0, 1},
	} {
		r.must(r.in(func() error {
			o, err := r.runTC(frame{port: portCore, b: b, gsoSize: c.size, gsoSegs: c.segs})
			if err != nil {
				return err
			}
			got, err := r.counted()
			if err != nil {
				return err
			}
			if o.verdict != tcRedirect || len(got.stats) != 1 {
				return fmt.Errorf("verdict %d, counted %+v", o.verdict, got)
			}
			for _, s := range got.stats {
				if s.Packets != 1 || s.Frames != uint64(c.want) || s.Bytes != uint64(inner) {
					t.Errorf("gso_size %d, gso_segs %d: counted %+v, want %d frames", c.size, c.segs, s, c.want)
				}
			}
			return nil
		}))
	}
}

// With empty maps, on every node: what DESIGN refuses is refused, also what is
// no SRv6 at all on the edge, and the node's own traffic lives.
func TestEmptyMapsForwardNothingThatTheyMustNot(t *testing.T) {
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"r1", "r6"} {
		r := newScapyRig(t, n)
		r.must(r.apply(nil))
		if len(r.have.Hops)+len(r.have.Headends)+len(r.have.GuardDst)+len(r.have.MatchDst)+len(r.have.Ports) != 0 {
			t.Fatal("the maps are not empty")
		}
		counts := map[oracle.Verdict]int{}
		for _, p := range all {
			f := frame{port: p.Interface.Name, b: p.Frame}
			if f.truncated() {
				continue
			}
			var s seen
			if err := r.in(func() (err error) {
				s, err = r.check(f, nil, true)
				return err
			}); err != nil {
				t.Errorf("%s: %v", p.Name, err)
			}
			counts[s.want.Verdict]++
		}
		if counts[oracle.Forward]+counts[oracle.Deliver] != 0 || counts[oracle.Drop] < 100 || counts[oracle.Pass] < 15 {
			t.Errorf("%s: verdicts %v", n, counts)
		}
	}
}

// The frames of others are not XDP's either: the kernel forwards nothing that
// came to a group's address.
func TestFramesToGroupsAreLeftToTheKernel(t *testing.T) {
	for _, name := range []string{"web-1", "edge-web", "web-3"} {
		p, err := packets.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		r := newScapyRig(t, p.Node)
		r.must(r.in(func() error {
			good, err := r.check(frame{port: p.Interface.Name, b: p.Frame}, &oracle.Labels{}, true)
			if err != nil || !good.took {
				return errors.Join(err, fmt.Errorf("XDP finished it: %t", good.took))
			}
			for _, mac := range macs[1:] {
				b := bytes.Clone(p.Frame)
				copy(b, mac[:])
				if _, err := r.check(frame{port: p.Interface.Name, b: b}, &oracle.Labels{}, true); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			return nil
		}))
	}
}

// flowHash is flow_hash of bpf/lib/wire/flow.h, for what has ports.
func flowHash(src, dst [16]byte, next uint8, ports [4]byte) uint32 {
	word := func(b []byte) uint64 { return binary.NativeEndian.Uint64(b) }
	h := word(src[:8]) ^ word(dst[:8])*0x9e3779b97f4a7c15
	h ^= word(src[8:])*0xbf58476d1ce4e5b9 ^ word(dst[8:])
	h ^= uint64(next)
	h ^= uint64(binary.NativeEndian.Uint32(ports[:])) << 16
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return uint32(h >> 32)
}

// A flow label of 0 says that there is none, so no flow may get it. One in a
// million would.
func TestNoFlowGetsLabelZero(t *testing.T) {
	r := newScapyRig(t, "r1")
	b := tcpPacket(t, "fc00:8::2", 10)
	ip := b[srv6.EthernetLen:]
	label := func() uint32 {
		var s seen
		r.must(r.in(func() (err error) {
			s, err = r.check(frame{port: portEdge, b: b}, &oracle.Labels{}, true) // refuses 0
			return err
		}))
		return binary.BigEndian.Uint32(s.tc.b[srv6.EthernetLen:]) & 0xfffff
	}
	hash := func() uint32 {
		return flowHash([16]byte(ip[8:24]), [16]byte(ip[24:40]), ip[6], [4]byte(ip[40:44]))
	}
	if got, want := label(), hash()&0xfffff; got != want {
		t.Fatalf("label %05x, want %05x: the hash of bpf/lib/wire/flow.h is another one; write it here too", got, want)
	}
	for n := uint32(0); hash()&0xfffff != 0; n++ {
		binary.BigEndian.PutUint32(ip[20:], n) // of the source
	}
	if got := label(); got != 1 {
		t.Errorf("label %05x, want 1", got)
	}
}
