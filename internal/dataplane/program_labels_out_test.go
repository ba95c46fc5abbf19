package dataplane

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
)

// leave gives a frame to the program at the egress of a core interface. own: the node has sent
// it itself.
func (l *labelRun) leave(node string, b []byte, own bool, mark, gsoSize uint32) (o outcome, m moved) {
	l.Helper()
	r := l.rigs[node]
	ctx := skb{Ifindex: r.ports[portCore], Mark: mark, GSOSize: gsoSize}
	if !own {
		ctx.IngressIfindex = r.ports[portEdge]
	}
	if gsoSize > 0 {
		ctx.GSOSegs = 3
	}
	r.must(r.in(func() (err error) {
		if o, err = r.run(r.program(object.CoreOutTC), ebpf.RunOptions{Data: b, Context: ctx}); err != nil {
			return err
		}
		m, err = r.counted()
		return err
	}))
	return o, m
}

const testMark = 0x10

// leavingLabels is a domain whose chain for IPv6 takes r1's own packets, and that for IPv4 what is
// marked there.
func leavingLabels(d *model.Domain) {
	d.MPLS.MTU = 1400
	for i := range d.Chains {
		if c := &d.Chains[i]; c.Name == "web" {
			c.OwnTraffic = true
		} else {
			c.Match.Priority, c.Match.Mark = 10, model.Mark{Value: testMark, Mask: 0xff}
		}
	}
}

// What takes a path over labels as it leaves gets its labels there, is stamped by all, verified at the
// egress, and has lost no hop at its headend.
func TestOwnAndMarkedPacketsTakeAPathOverLabels(t *testing.T) {
	t.Parallel()
	for _, scheme := range []model.Scheme{model.SchemeKeyed, model.SchemeKeyedFlow} {
		l := newLabelRun(t, scheme, 4, leavingLabels)
		for chain, takes := range map[string]struct {
			own  bool
			mark uint32
		}{"web": {true, 0}, "legacy": {false, testMark}} {
			inner, _ := testInner(chain)
			if o, m := l.leave("r1", ether(inner), !takes.own, takes.mark^testMark, 0); chain == "legacy" && (o.verdict != tcPass || len(m.stats) > 0) {
				t.Errorf("%s: without the mark: verdict %d, counted %v; want it left alone", chain, int32(o.verdict), m.stats)
			}
			o, m := l.leave("r1", ether(inner), takes.own, takes.mark, 0)
			p := l.sent("r1", o, m)
			if !slices.Equal(p.Payload, inner) || len(m.stats) != 1 {
				t.Errorf("%s: counted %v, payload\n%x, want\n%x", chain, m.stats, p.Payload, inner)
			}
			for _, node := range []string{"r2", "r3"} {
				o, m = l.run(node, portCore, o.b)
				l.sent(node, o, m)
			}
			o, m = l.run("r6", portCore, o.b)
			if want := hopsLess(t, inner, 1); o.verdict != tcRedirect || len(m.dropped) > 0 || !slices.Equal(o.b[srv6.EthernetLen:], want) {
				t.Errorf("%s: at the egress: verdict %d, refused for %v\n%x, want\n%x", chain, int32(o.verdict), m.dropped, o.b, want)
			}
		}
	}
}

// A super-packet goes to the segmenter as it is, and spends no number; one whose frames do not
// fit is refused before.
func TestOwnSuperPacketsAreCutBeforeTheyGetLabels(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, leavingLabels)
	r := l.rigs["r1"]
	mac := [6]byte{2, 0, 0, 0, 0, 0x77}
	tcp := slices.Concat([]byte{4, 1, 1, 187, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0, 64, 0, 0, 0, 0}, make([]byte, 3000))
	b := ether(sentBy("2001:db8:1::1", "2001:db8:8::9", 6, tcp...))
	refused := func(what string, gso uint32, reason abi.Reason) {
		t.Helper()
		if _, m := l.leave("r1", b, true, 0, gso); !slices.Equal(m.dropped, []string{reasonName(reason)}) {
			t.Errorf("%s: refused for %v; want %s", what, m.dropped, reason)
		}
	}
	refused("no segmenter", 1200, abi.ReasonCannotCut)
	r.must(r.g.setNode(abi.Node{Armed: 1, Own: 1, CutEnterIfindex: r.ports[portOut], CutEnterDmac: mac}))
	o, m := l.leave("r1", b, true, 0, 1200)
	if want := slices.Concat(mac[:], b[6:]); o.verdict != tcRedirect || !slices.Equal(o.b, want) || len(m.dropped)+len(m.stats) > 0 {
		t.Errorf("verdict %d, refused for %v, counted %v, frame\n%s\nwant it unchanged for the segmenter", int32(o.verdict), m.dropped, m.stats, layers(o.b))
	}
	refused("frames that do not fit", 1330, abi.ReasonChainMTU)
	r.must(r.g.maps[tables.MapPrograms].Delete(uint32(abi.ProgramMPLSOut)))
	refused("no program", 1200, abi.ReasonLabelsProgramBug)
}

// Frames out of the segmenter take the headend that their index names, whatever they are; an index
// from elsewhere names none.
func TestTheIndexOfASuperPacketNamesItsHeadend(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, leavingLabels)
	r := l.rigs["r1"]
	inner, _ := testInner("web")
	legacy, _ := testInner("legacy") // no chain takes it where it comes in: its chain is by mark
	at := r.ports[portEdge]
	come := func(cutter bool, index uint32, b []byte) (o outcome, m moved) {
		t.Helper()
		port := abi.Port{Edge: 1}
		if cutter {
			port.Cutter = 1
		}
		r.must(r.put(tables.MapPorts, &at, &port))
		r.must(r.in(func() error {
			p, err := r.withIndex(object.EdgeTC, index)
			if err != nil {
				return err
			}
			if o, err = r.run(p, ebpf.RunOptions{Data: arriving(ether(b)), Context: skb{Ifindex: at, IngressIfindex: at}}); err != nil {
				return err
			}
			m, err = r.counted()
			return err
		}))
		return o, m
	}
	n := l.node("r1")
	for i, h := range n.Headends {
		b := map[string][]byte{"web": inner, "legacy": legacy}[h.Chain]
		o, m := come(true, uint32(i+1), b)
		if p := l.sent("r1", o, m); !slices.Equal(p.Payload, b) || p.Proof == nil {
			t.Errorf("%s, from the segmenter: payload\n%x, want\n%x", h.Chain, p.Payload, b)
		} else if v, ok := srv6.ReadProof(*p.Proof); !ok || v.Path != h.Path {
			t.Errorf("headend %d of path %08x: the proof is of path %08x", i, h.Path, v.Path)
		}
		// As another's bytes: it is classified, and chains by mark take nothing here.
		o, m = come(false, uint32(i+1), legacy)
		if o.verdict != tcPass || len(m.stats) > 0 {
			t.Errorf("with index %d, from an edge: verdict %d, counted %v; want it left alone", i+1, int32(o.verdict), m.stats)
		}
	}
	if _, m := come(true, 4711, inner); !slices.Equal(m.dropped, []string{reasonName(abi.ReasonHeadendMissingBug)}) {
		t.Errorf("an index of nobody: refused for %v", m.dropped)
	}
}

// A super-packet from a function takes the headend that its connection has chosen: it goes into the
// segmenter with one hop less, and its frames lose none.
func TestSuperPacketsOfFunctionsAreCutBeforeTheyGetLabels(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, leavingLabels)
	r := l.rigs["r1"]
	mac := [6]byte{2, 0, 0, 0, 0, 0x77}
	r.must(r.g.setNode(abi.Node{Armed: 1, CutEnterIfindex: r.ports[portOut], CutEnterDmac: mac}))
	// As function_tc's followers hand a packet over; LABELS_ENTER.
	enters := func(port abi.Port, b []byte, gso uint32) (o outcome, m moved) {
		t.Helper()
		at := r.ports[portCore]
		r.must(r.put(tables.MapPorts, &at, &port))
		p := calling(t, r.program(object.MPLSTC), asm.Instructions{
			asm.Mov.Imm(asm.R2, 1),
			asm.StoreMem(asm.R1, 48, asm.R2, asm.Word), // skb->cb[0]
			asm.Mov.Imm(asm.R2, 0),
			asm.StoreMem(asm.R1, 52, asm.R2, asm.Word), // skb->cb[1]
		})
		ctx := skb{Ifindex: at, IngressIfindex: at, GSOSize: gso}
		if gso > 0 {
			ctx.GSOSegs = 3
		}
		r.must(r.in(func() (err error) {
			if o, err = r.run(p, ebpf.RunOptions{Data: arriving(b), Context: ctx}); err != nil {
				return err
			}
			m, err = r.counted()
			return err
		}))
		return o, m
	}
	if h := l.node("r1").Headends[0]; h.Chain != "web" {
		t.Fatalf("headend 0 is of %s", h.Chain)
	}
	tcp := slices.Concat([]byte{4, 1, 1, 187, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0, 64, 0, 0, 0, 0}, make([]byte, 3000))
	whole := sentBy("2001:db8:1::1", "2001:db8:8::9", 6, tcp...)
	from := abi.Port{Proxy: 1}
	before := r.spending()
	o, m := enters(from, ether(whole), 1200)
	if want := slices.Concat(mac[:], arriving(ether(whole))[6:14], hopsLess(t, whole, 1)); o.verdict != tcRedirect || !slices.Equal(o.b, want) || len(m.dropped)+len(m.stats) > 0 {
		t.Errorf("verdict %d, refused for %v, counted %v, frame\n%s\nwant it in the segmenter with a hop less", int32(o.verdict), m.dropped, m.stats, layers(o.b))
	}
	if !cmp.Equal(r.spending(), before, cmp.AllowUnexported(spending{})) {
		t.Error("it has taken a number")
	}
	if o, _ = enters(abi.Port{Edge: 1}, ether(whole), 1200); o.b[srv6.EthernetLen+7] != whole[7] {
		t.Error("from an edge: it has lost a hop, and its frames lose another")
	}
	inner, _ := testInner("web")
	o, m = enters(from, ether(inner), 0)
	if p := l.sent("r1", o, m); !slices.Equal(p.Payload, hopsLess(t, inner, 1)) {
		t.Errorf("one frame: payload\n%x, want it with a hop less", p.Payload)
	}
}
