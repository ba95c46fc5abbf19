package dataplane

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// traced reads the hops of a data path; next waits for one.
func (b *bed) traced(d *Dataplane) (next func() event.Hop) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), waitLimit)
	hops, ended := make(chan event.Hop, 1024), make(chan error, 1)
	go func() { ended <- d.Traced(ctx, func(h event.Hop) { hops <- h }) }()
	b.Cleanup(func() {
		cancel()
		<-ended
	})
	return func() event.Hop {
		b.Helper()
		select {
		case h := <-hops:
			return h
		case <-ctx.Done():
			b.Fatal("no hop came")
		}
		panic("unreachable")
	}
}

// A trace goes on over changes of the plan, epochs and generations, counts its packets exactly, and leaves nothing.
func TestATraceOutlivesChangesOfThePlan(t *testing.T) {
	b := newBed(t)
	changes := 0
	b.cfg.before = func(step, what string) error {
		if step == stepChange && what == string(tables.MapHeadends) {
			changes++
		}
		return nil
	}
	d := b.open()
	trace := event.Trace{ID: 1, Path: 1, Packets: 3, Flow: model.Flow{Source: xtest.Prefix("fd00::1/128")}}
	if err := d.Trace([]event.Trace{trace}); err == nil || !strings.Contains(err.Error(), "no plan is in force") {
		t.Errorf("without a plan: %v", err)
	}
	next := b.traced(d)
	b.must(b.apply(d, bedNode()))
	packet, other := plainPacket("fd00::1", "2001:db8:1::1"), plainPacket("fd00::2", "2001:db8:1::1")
	hop := func(epoch uint8) {
		t.Helper()
		before := time.Now()
		b.runEdge(d, other) // not of the flow
		b.runEdge(d, packet)
		h := next()
		if h.Node != "r1" || h.Hook != "tc" || h.Path != 1 || h.Epoch != epoch || h.Position != 0 || h.Verified || len(h.Before) != 0 || len(h.After) != 8 || h.Scheme != "keyed" {
			t.Errorf("hop %+v", h)
		}
		if h.Time.Before(before.Add(-time.Second)) || h.Time.After(time.Now().Add(time.Second)) {
			t.Errorf("time %s, want about %s", h.Time, before)
		}
	}
	left := func() (left int64) {
		t.Helper()
		for i := range uint32(abi.Traces) {
			var x abi.Trace
			b.must(d.gen.maps[tables.MapTraces].Lookup(i, &x))
			left += max(x.Left, 0)
		}
		return left
	}
	marks := func() (n int) {
		t.Helper()
		all := map[uint32]abi.Headend{}
		b.must(readMap(d.gen, tables.MapHeadends, all))
		for _, h := range all {
			if h.Trace != 0 {
				n++
			}
		}
		return n
	}
	b.must(d.Trace([]event.Trace{trace}))
	b.must(d.Trace([]event.Trace{trace})) // it goes on
	hop(0)
	before := b.world()
	changes = 0
	b.must(b.do(d.Reconcile)) // finds nothing that is not the plan's
	if now := b.world(); now.Generations[0] != before.Generations[0] || marks() != 1 || changes != 0 {
		t.Errorf("after Reconcile: %v, %d marks and %d changes, before %v", now.Generations, marks(), changes, before.Generations)
	}
	turned := bedNode()
	turned.Headends = []plan.Headend{xtest.HeadendOf(1, 1, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:1::/48")}, 3)}
	b.must(b.apply(d, turned))
	hop(1)
	b.must(b.apply(d, elsewhere(turned)))
	if now := b.world(); now.Generations[0] == before.Generations[0] {
		t.Fatal("this is the generation of before")
	}
	hop(1)
	b.runEdge(d, packet)
	if left() != 0 {
		t.Errorf("%d are left", left())
	}
	// Another one of the same path begins anew. What came before it is all that came.
	again := event.Trace{ID: 2, Path: 1, Packets: 1}
	again.Flow.Source = xtest.Prefix("fd00::/127") // without the other packet
	b.must(d.Trace([]event.Trace{again}))
	hop(1)

	for want, bad := range map[string][]event.Trace{
		"is no headend of it":               {again, {ID: 3, Path: 99, Packets: 1}},
		"another trace of the path":         {again, {ID: 4, Path: 1, Packets: 1}},
		"0 packets; expect 1 to 16":         {again, {ID: 5, Path: 1}},
		"17 packets; expect 1 to 16":        {again, {ID: 6, Path: 1, Packets: 17}},
		"this node is no headend of it\ntr": {again, {ID: 7, Path: 99, Packets: 1}, {ID: 8, Path: 98, Packets: 1}},
	} {
		if err := d.Trace(bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", bad, err, want)
		}
	}
	b.must(d.Trace([]event.Trace{{ID: 9, Path: 1, Packets: 16}}))
	// A process that ends leaves marks, and the next one takes them away.
	b.must(d.Close())
	d = b.open()
	if marks() != 1 {
		t.Fatalf("%d marks", marks())
	}
	b.must(b.apply(d, elsewhere(turned)))
	if marks() != 0 {
		t.Errorf("%d marks are left", marks())
	}
	b.must(d.Trace([]event.Trace{{ID: 10, Path: 1, Packets: 2}}))
	b.must(d.Trace(nil))
	if marks() != 0 || left() != 0 {
		t.Errorf("after the end: %d marks, %d packets", marks(), left())
	}
}

// A node traces so many paths at once.
func TestANodeTracesSoManyPaths(t *testing.T) {
	b := newBed(t)
	d := b.open()
	n := bedNode()
	var wanted []event.Trace
	for i := range uint32(abi.Traces + 1) {
		n.Headends = append(n.Headends, xtest.HeadendOf(100+i, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix(fmt.Sprintf("2001:db8:%d::/48", 100+i))}, 2))
		wanted = append(wanted, event.Trace{ID: uint64(i) + 1, Path: 100 + i, Packets: 1})
	}
	b.must(b.apply(d, n))
	if err := d.Trace(wanted); err == nil || !strings.Contains(err.Error(), "8 traces are under way") {
		t.Errorf("%d traces: %v", len(wanted), err)
	}
	b.must(d.Trace(wanted[1:])) // in the place of the first one
}

// A packet keeps its flag while it is in a function, and is told of when it has come back and has its stamp.
func TestATracedPacketComesBackFromAFunction(t *testing.T) {
	t.Parallel()
	for _, recognise := range []model.Recognise{model.RecogniseContent, model.RecogniseMetadata} {
		t.Run(recognise.String(), func(t *testing.T) {
			w := newWire(t, func(n *plan.Node) { n.Proxies[0].Recognise = recognise })
			next := w.traced(w.d)
			for i := range 4 {
				p := outerOf(1, 1, model.SchemeKeyed, uint64(i), udp(byte(i)))
				p.SRH.Flags = srv6.FlagOAM
				if i%2 == 1 { // somebody has put options before its SRH
					p = optioned(p, 8*(i+1))
				}
				w.send("in", frameOf(p))
				got := w.receive()
				if want := restored(t, p, xtest.Share(1, 1), forwarded(udp(byte(i)))); !bytes.Equal(got, want) {
					t.Fatalf("got\n%x, want\n%x", got, want)
				}
				checkReturned(t, next(), p, got, "tc")
			}
		})
	}
}

// checkReturned compares a hop with the packet as it came to the node and as it left.
func checkReturned(t *testing.T, h event.Hop, p srv6.Packet, left []byte, hook string) {
	t.Helper()
	was, _ := p.Proof()
	now := proofOf(t, left)
	if h.Interface != "from" || h.Hook != hook || h.Path != was.Path || h.Position != 1 || h.Verified || h.Number != was.RND ||
		!bytes.Equal(h.Before, beBytes(was.CML)) || !bytes.Equal(h.After, beBytes(now.CML)) || int(h.Len) != len(left)+srv6.EthernetLen {
		t.Errorf("hop %+v; it came with CML %x and left with %x, of %d bytes", h, was.CML, now.CML, len(left))
	}
}

func beBytes(v uint64) []byte { return valueOf(abi.BE64(v)) }

// The same on XDP, which puts headers back of functions that are recognised by content.
func TestATracedPacketComesBackOnXDP(t *testing.T) {
	r := newProxyRun(t, proxyNode())
	r.withXDP()
	next := r.traced(r.d)
	byXDP := 0
	for i := range 4 {
		p := outerOf(1, 1, model.SchemeKeyed, uint64(i), udp(byte(i)))
		p.SRH.Flags = srv6.FlagOAM
		if _, _, _, err := r.xdpThenTC(object.CoreXDP, object.CoreTC, "in", frameOf(p)); err != nil {
			t.Fatal(err)
		}
		_, out, own, err := r.xdpThenTC(object.FunctionXDP, object.FunctionTC, "from", ether(forwarded(udp(byte(i)))))
		r.must(err)
		hook := "tc"
		if own {
			byXDP++
			hook = "xdp"
		}
		checkReturned(t, next(), p, out[srv6.EthernetLen:], hook)
	}
	if byXDP == 0 {
		t.Error("TC did all of it")
	}
}

// The masks of opot are not to be had from events: neither value is in them.
func TestHopsOfOPoTHaveNoValues(t *testing.T) {
	src := newEventSource(tables.MapTraced)
	for scheme, want := range map[abi.Scheme]int{abi.SchemePoT: 8, abi.SchemeKeyed: 8, abi.SchemeOPoT: 0} {
		e := abi.Traced{TimeNs: 1, Before: 2, After: 3, Position: 1, Scheme: uint8(scheme)}
		h, err := src.decodeHop(xtest.BytesOf(&e))
		if err != nil {
			t.Fatal(err)
		}
		if len(h.Before) != want || len(h.After) != want {
			t.Errorf("%s: %d and %d bytes", scheme, len(h.Before), len(h.After))
		}
	}
}
