package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// The oracle has the way into a function of kind netfilter in the node's own kernel,
// with all of its refusals: see test/packets/arguments.txt. Here is the rest.

// netfilterProxy is the proxy of a function of that kind, behind "to" and "from" where
// it has a namespace of its own.
func netfilterProxy(name, namespace string) plan.Proxy {
	p := plan.Proxy{
		Function: name, Proxy: model.NetfilterDetour(name, namespace),
		Netfilter: &plan.Netfilter{Netfilter: model.Netfilter{Namespace: namespace}},
	}
	p.Cache, p.Lifetime = 1000, time.Minute
	if !p.Local {
		p.To, p.From = "to", "from"
	}
	return p
}

// The arguments of netfilterNode's SIDs.
const argumentOwn, argumentNode = 7, 1<<32 - 1

// netfilterNode has function own with a namespace at SID 1 of path 1 (with an argument)
// and path 2 (without one), and function in in the node's kernel at SID 2 of path 1.
func netfilterNode() plan.Node {
	n := proxyNode()
	n.Proxies = []plan.Proxy{netfilterProxy("own", model.NamespaceOwn), netfilterProxy("in", model.NamespaceNode)}
	n.Endpoints = []plan.Endpoint{
		xtest.EndpointOf(1, 0, model.SchemeKeyed, xtest.OwnSID(1)), xtest.EndpointOf(2, 0, model.SchemeOPoT, xtest.OwnSID(1)),
		xtest.EndpointOf(1, 0, model.SchemeKeyed, xtest.OwnSID(2)),
	}
	for i := range n.Endpoints {
		n.Endpoints[i].Behaviour, n.Endpoints[i].Function = model.BehaviourEndAN, "own"
	}
	n.Endpoints[0].Argument = argumentOwn
	n.Endpoints[2].Argument, n.Endpoints[2].Function, n.Endpoints[2].Share = argumentNode, "in", xtest.Share(2, 9)
	return n
}

// argued is a packet to a SID with this in its lower half.
func argued(path uint32, sid int, argument uint64, inner []byte) srv6.Packet {
	scheme := map[uint32]model.Scheme{1: model.SchemeKeyed, 2: model.SchemeOPoT}[path]
	p := outerOf(path, sid, scheme, 5, inner)
	p.Header.Destination = withLower(p.Header.Destination, argument)
	p.SRH.Segments[len(p.SRH.Segments)-1] = p.Header.Destination
	return p
}

// runMarked is run with the packet's mark before and after.
func (r *proxyRun) runMarked(program, at string, frame []byte, mark uint32) (verdict uint32, out []byte, after uint32) {
	r.Helper()
	frame = slices.Clone(frame)
	mac := r.macs[at]
	copy(frame, mac[:])
	var ctx skb
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+512), ContextOut: &ctx, Context: skb{
		Mark: mark, IngressIfindex: r.index[at], Ifindex: r.index[at],
	}}
	r.must(r.do(func() (err error) {
		verdict, err = r.d.program(program).Run(&opts)
		return err
	}))
	return verdict, opts.DataOut, ctx.Mark
}

// Only the plan's argument opens the way in: the packet is stripped, its mark is the
// argument, whatever mark it came with. Of any other packet nothing is changed or kept.
func TestFunctionTakesThePlansArgumentAlone(t *testing.T) {
	r := newProxyRun(t, netfilterNode())
	r.withXDP()
	for _, c := range []struct {
		name     string
		path     uint32
		sid      int
		planned  uint32
		to       string
		argument []uint64 // that are refused
	}{
		{"own namespace", 1, 1, argumentOwn, "own", []uint64{0, 6, 8, argumentOwn | 1<<31, argumentOwn | 1<<32, argumentOwn | 1<<63, argumentOwn << 32, argumentOwn << 56}},
		{"own namespace, none in the plan", 2, 1, 0, "own", []uint64{1, argumentOwn, 1 << 32, 1 << 63}},
		{"the node's kernel", 1, 2, argumentNode, "in", []uint64{0, 1, argumentNode - 1, argumentNode | 1<<32, 1<<64 - 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &proxyRun{r.bed.in(t), r.d, r.macs, r.index}
			verdict := map[bool]uint32{false: verdictRedirect, true: verdictUnspec}[c.to == "in"]
			inner := udp(1)
			good := frameOf(argued(c.path, c.sid, uint64(c.planned), inner))
			before := r.function(c.to)
			for _, came := range []uint32{0, 0xbad} {
				v, out, mark := r.runMarked(object.CoreTC, "in", good, came)
				if v != verdict || mark != c.planned || !bytes.Equal(out[srv6.EthernetLen:], inner) {
					t.Errorf("with mark %#x: verdict %d, mark %#x, packet %x, refusals %v; want the inner packet and mark %#x", came, int32(v), mark, out, r.refusals(), c.planned)
				}
			}
			kept := r.function(c.to)
			if kept.RxSuccess != before.RxSuccess+2 || *kept.InFlight != *before.InFlight+2 {
				t.Errorf("%+v after %+v; want two packets in the function", kept, before)
			}
			for _, a := range c.argument {
				frame := frameOf(argued(c.path, c.sid, a, inner))
				refused := r.refusals()[abi.ReasonArgument]
				v, out, mark := r.runMarked(object.CoreTC, "in", frame, 0x55)
				mac := r.macs["in"]
				copy(frame, mac[:])
				if v != verdictShot || r.refusals()[abi.ReasonArgument] != refused+1 {
					t.Errorf("argument %#x: verdict %d, refusals %v; want it refused for its argument", a, int32(v), r.refusals())
				}
				if !bytes.Equal(out, frame) || mark != 0x55 {
					t.Errorf("argument %#x: refused with mark %#x and changed to\n%x, was\n%x", a, mark, out, frame)
				}
			}
			if now := r.function(c.to); now.RxSuccess != kept.RxSuccess || *now.InFlight != *kept.InFlight || now.RxIgnored != kept.RxIgnored {
				t.Errorf("%+v after refused packets, %+v before: a header is kept", now, kept)
			}
			// XDP leaves all of these to TC; xdpThenTC sees that it changes nothing.
			for _, a := range append([]uint64{uint64(c.planned)}, c.argument...) {
				v, _, byXDP, err := r.xdpThenTC(object.CoreXDP, object.CoreTC, "in", frameOf(argued(c.path, c.sid, a, inner)))
				want := uint32(verdictShot)
				if a == uint64(c.planned) {
					want = verdict
				}
				if err != nil || byXDP || v != want {
					t.Errorf("argument %#x, XDP and TC: verdict %d, by XDP %t, %v; want %d by TC", a, int32(v), byXDP, err, int32(want))
				}
			}
		})
	}
}

// in is the bed as a subtest sees it.
func (b *bed) in(t *testing.T) *bed {
	sub := *b
	sub.T = t
	return &sub
}

// A function that knows nothing of arguments gets no packet with one, from either hook.
func TestFunctionWithoutArgumentsGetsNone(t *testing.T) {
	r := newProxyRun(t, proxyNode())
	r.withXDP()
	try := func(argument uint64) (verdict uint32, byXDP bool) {
		verdict, _, byXDP, err := r.xdpThenTC(object.CoreXDP, object.CoreTC, "in", frameOf(argued(1, 1, argument, udp(1))))
		r.must(err)
		return verdict, byXDP
	}
	for range 3 { // TC learns the way
		try(0)
	}
	if v, byXDP := try(0); v != verdictRedirect || !byXDP {
		t.Errorf("without an argument: verdict %d, by XDP %t; want XDP to take it", int32(v), byXDP)
	}
	for i, a := range []uint64{1, 1 << 31, 1 << 32, 1 << 63} {
		if v, byXDP := try(a); v != verdictShot || byXDP || r.refusals()[abi.ReasonArgument] != uint64(i+1) {
			t.Errorf("argument %#x: verdict %d, by XDP %t, refusals %v; want it refused by TC", a, int32(v), byXDP, r.refusals())
		}
	}
}

// What a compressed list has in the place of an argument are C-SIDs: they are shifted,
// and the mark is the plan's.
func TestCompressedListLeavesTheArgumentToThePlan(t *testing.T) {
	n := netfilterNode()
	n.Endpoints[0].Encapsulation.SIDs = model.SIDsCompressed
	r := newProxyRun(t, n)
	container := srv6.Compress([]netip.Addr{xtest.OwnSID(1), xtest.OtherSID(1), xtest.OtherSID(9)})[0]
	for _, to := range []netip.Addr{container, xtest.OwnSID(1), withLower(xtest.OwnSID(1), argumentOwn)} {
		p := outerOf(1, 1, model.SchemeKeyed, 5, udp(1))
		p.Header.Destination = to
		v, out, mark := r.runMarked(object.CoreTC, "in", frameOf(p), 0)
		if v != verdictRedirect || mark != argumentOwn || !bytes.Equal(out[srv6.EthernetLen:], udp(1)) {
			t.Errorf("to %s: verdict %d, mark %#x, refusals %v; want it in the function with mark %#x", to, int32(v), mark, r.refusals(), argumentOwn)
		}
	}
}

// spy records mark and index of packets of one length where it is attached.
type spy struct {
	t    *testing.T
	seen *ebpf.Map
}

// sighting is what a spy has seen: of the last packet, and how many there were.
type sighting struct{ Mark, Index, Count uint32 }

// newSpy puts a program behind all others at an end of an interface.
func newSpy(t *testing.T, n *host.Net, link string, egress bool, length int) *spy {
	t.Helper()
	fatal := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("spy at %s: %v", link, err)
		}
	}
	seen, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 12, MaxEntries: 1})
	fatal(err)
	t.Cleanup(func() { seen.Close() })
	const packetLen, mark = 0, 8 // in struct __sk_buff
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadMem(asm.R2, asm.R6, packetLen, asm.Word),
			asm.JNE.Imm(asm.R2, int32(length), "out"),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, seen.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.LoadMem(asm.R2, asm.R6, mark, asm.Word),
			asm.StoreMem(asm.R0, 0, asm.R2, asm.Word),
			asm.LoadMem(asm.R2, asm.R6, tcIndex, asm.Word),
			asm.StoreMem(asm.R0, 4, asm.R2, asm.Word),
			asm.LoadMem(asm.R2, asm.R0, 8, asm.Word),
			asm.Add.Imm(asm.R2, 1),
			asm.StoreMem(asm.R0, 8, asm.R2, asm.Word),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("out"), // TC_ACT_UNSPEC
			asm.Return(),
		},
	})
	fatal(err)
	t.Cleanup(func() { p.Close() })
	l, err := n.Link(link)
	fatal(err)
	fatal(n.NetNS().Do(func() error {
		off, err := attachOther(n, p, l.Index, egress, false, false)
		if err == nil {
			t.Cleanup(func() { n.NetNS().Do(off) })
		}
		return err
	}))
	return &spy{t, seen}
}

func (s *spy) saw() (v sighting) {
	s.t.Helper()
	b, err := s.seen.LookupBytes(uint32(0))
	if err != nil {
		s.t.Fatal(err)
	}
	return sighting{binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint32(b[4:]), binary.NativeEndian.Uint32(b[8:])}
}

// Mark and index arrive inside, over the hand-over to a namespace as well as up the
// node's own stack; and what leaves the node with its outer header has mark 0.
func TestMarkIsTheArgumentInsideAndZeroOutside(t *testing.T) {
	t.Parallel()
	w := newWire(t, func(n *plan.Node) {
		nf := netfilterNode()
		n.Proxies, n.Endpoints = nf.Proxies, nf.Endpoints
	})
	const plain = srv6.EthernetLen + srv6.IPv6Len + 28 // udp
	const whole = plain + srv6.IPv6Len + srv6.SRHLen + 3*srv6.SegmentLen + srv6.ProofLen
	inside, up := newSpy(t, w.fn, "to-peer", false, plain), newSpy(t, w.net, "in", false, plain)
	outside := newSpy(t, w.net, "next", true, whole)
	for i, c := range []struct {
		name     string
		path     uint32
		sid      int
		argument uint32
		sees     *spy
		share    pot.Share
	}{
		{"own", 1, 1, argumentOwn, inside, xtest.Share(1, 1)},
		{"own, no argument", 2, 1, 0, inside, xtest.Share(1, 2)},
		{"node", 1, 2, argumentNode, up, xtest.Share(2, 9)},
	} {
		before, left := c.sees.saw(), outside.saw()
		p := argued(c.path, c.sid, uint64(c.argument), udp(byte(i)))
		w.send("in", frameOf(p))
		if got, want := w.receive(), restored(t, p, c.share, forwarded(udp(byte(i)))); !bytes.Equal(got, want) {
			t.Fatalf("%s: got\n%x, want\n%x", c.name, got, want)
		}
		if got := c.sees.saw(); got.Count != before.Count+1 || got.Mark != c.argument || got.Index == 0 || got.Index == abi.IndexProven {
			t.Errorf("%s: inside it had %+v, want one packet more than %d, mark %#x and the index of a slot", c.name, got, before.Count, c.argument)
		}
		if got := outside.saw(); got.Count != left.Count+1 || got.Mark != 0 || got.Index != 0 {
			t.Errorf("%s: it leaves with %+v, want one packet more than %d, mark and index 0", c.name, got, left.Count)
		}
	}
}

// Whatever mark a rule has set in the node's own kernel, it chooses nothing for the
// outer packet.
func TestMarkOfARuleEndsWithTheOuterHeader(t *testing.T) {
	r := newProxyRun(t, netfilterNode())
	p := argued(1, 2, argumentNode, udp(1))
	if v, _, _ := r.runMarked(object.CoreTC, "in", frameOf(p), 0); v != verdictUnspec {
		t.Fatalf("verdict %d, refusals %v", int32(v), r.refusals())
	}
	_, kept := r.keptSlot()
	index := uint32(kept.Fingerprint)
	program := setsIndex(t, r.d.program(object.CoreOutTC), index)
	mac := r.macs["side"]
	frame := ether(udp(1))
	copy(frame, mac[:])
	var after skb
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+512), ContextOut: &after, Context: skb{
		Mark: 0x1234, IngressIfindex: r.index["in"], Ifindex: r.index["side"],
	}}
	var verdict uint32
	r.must(r.do(func() (err error) {
		verdict, err = program.Run(&opts)
		return err
	}))
	if verdict != verdictRedirect || after.Mark != 0 || !bytes.Equal(opts.DataOut[srv6.EthernetLen:], restored(t, p, xtest.Share(2, 9), udp(1))) {
		t.Errorf("verdict %d, mark %#x, refusals %v, packet %x; want its outer header back and mark 0", int32(verdict), after.Mark, r.refusals(), opts.DataOut)
	}
}

// Packets of a function that is withheld are refused, whether its interfaces are there
// or not; all others go on, and it gets its packets as soon as it is withheld no more.
func TestWithheldFunctionGetsNoPackets(t *testing.T) {
	r := newProxyRun(t, netfilterNode())
	d, n := r.d, netfilterNode()
	why := errors.New("its rules were refused")
	takes := func(sid int) {
		r.Helper()
		argument := map[int]uint64{1: argumentOwn, 2: argumentNode}[sid]
		if v, _, err := r.run(object.CoreTC, "in", frameOf(argued(1, sid, argument, udp(1))), 0); err != nil || v == verdictShot {
			r.Errorf("SID %d: verdict %d, %v, refusals %v; want it in the function", sid, int32(v), err, r.refusals())
		}
	}
	refuses := func(sid int) {
		r.Helper()
		argument := map[int]uint64{1: argumentOwn, 2: argumentNode}[sid]
		r.wantRefused(abi.ReasonFunctionGone, object.CoreTC, "in", frameOf(argued(1, sid, argument, udp(1))), 0)
	}
	degraded := func(err error, functions ...string) {
		r.Helper()
		var de *DegradedError
		if !errors.As(err, &de) || len(de.Problems) != len(functions) {
			r.Fatalf("got %v; want problems of %v alone", err, functions)
		}
		for i, f := range functions {
			if want := fmt.Sprintf("function %s gets no packets: %v", f, why); !strings.Contains(de.Problems[i].Error(), want) {
				r.Errorf("got %q, want %q", de.Problems[i], want)
			}
		}
		if got := d.Gone(); !slices.Equal(got, functions) {
			r.Errorf("gone are %v, want %v", got, functions)
		}
	}
	takes(1)
	takes(2)

	d.Withhold(map[string]error{"own": why})
	takes(1) // it counts from the next Apply or Reconcile on
	degraded(r.apply(d, n), "own")
	refuses(1)
	takes(2)
	// What is in it may still come back.
	_, kept := r.keptSlot()
	index := uint32(kept.Fingerprint)
	back := setsIndex(t, d.program(object.FunctionTC), index)
	mac, frame := r.macs["from"], ether(udp(1))
	copy(frame, mac[:])
	var verdict uint32
	r.must(r.do(func() (err error) {
		verdict, err = back.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, 512), Context: skb{Ifindex: r.index["from"]}})
		return err
	}))
	if verdict != verdictRedirect {
		t.Errorf("what was in it comes back: verdict %d, refusals %v", int32(verdict), r.refusals())
	}

	d.Withhold(map[string]error{"in": why})
	degraded(r.do(d.Reconcile), "in")
	takes(1)
	refuses(2)

	// Its interfaces need not be there, also for a plan that is new.
	r.must(r.net.DeleteLink("to"))
	r.must(r.net.DeleteLink("from"))
	d.Withhold(map[string]error{"own": why})
	more := netfilterNode()
	more.Endpoints = append(more.Endpoints, xtest.EndpointOf(3, 0, model.SchemeKeyed, xtest.OwnSID(3)))
	more.Endpoints[3].Behaviour, more.Endpoints[3].Function = model.BehaviourEndAN, "in"
	degraded(r.apply(d, more), "own")
	refuses(1)
	takes(2)
	if v, _, err := r.run(object.CoreTC, "in", frameOf(outerOf(3, 3, model.SchemeKeyed, 5, udp(1))), 0); err != nil || v != verdictUnspec {
		t.Errorf("of the new plan: verdict %d, %v, refusals %v", int32(v), err, r.refusals())
	}

	// Without the withholding it is the interfaces that are missing.
	d.Withhold(nil)
	if err := r.apply(d, n); err == nil || errors.As(err, new(*DegradedError)) || !strings.Contains(err.Error(), "interface from from function own") {
		t.Errorf("a plan without its interfaces: got %v", err)
	}
	r.addVeth("to")
	r.addVeth("from")
	r.must(r.apply(d, n))
	takes(1)
	takes(2)
}

// As at the start of an agent that cannot load rules.
func TestFirstPlanCanHaveAWithheldFunction(t *testing.T) {
	b := newProxyBed(t)
	b.must(b.net.DeleteLink("to"))
	b.must(b.net.DeleteLink("from"))
	d := b.open()
	d.Withhold(map[string]error{"own": errors.New("no nft")})
	if err := b.apply(d, netfilterNode()); !errors.As(err, new(*DegradedError)) || !strings.Contains(err.Error(), "function own gets no packets: no nft") {
		t.Fatalf("got %v", err)
	}
	if gone := d.Gone(); !slices.Equal(gone, []string{"own"}) {
		t.Errorf("gone are %v", gone)
	}
}
