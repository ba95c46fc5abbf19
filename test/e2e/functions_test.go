package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/model"
)

// Functions that know nothing of segment routing, from examples/functions.yaml:
// fw, an nftables firewall in its own namespace; dpi, a program in user space;
// nat, a source NAT in r3's own kernel.
//
//	           r2 (fw) ---- r3 (dpi, nat)
//	          /                          \      chain web, both ways: r1, fw, dpi, nat, r6
//	h1 ---- r1                            r6 ---- h2
var functions = string(examples.Functions)

// natted is the address that nat gives packets.
var natted = netip.MustParseAddr("fc00:33::1")

// function is what the proxy of a function has counted.
func (w *world) function(node, name string) (api.Function, error) {
	c := w.client(node)
	defer c.Close()
	return c.Function(soon(w.t), name)
}

// passed waits until all that went into a function has come out of it, with its
// header, and checks that nothing was refused or lost on the way.
func (w *world) passed(node, name string) api.Function {
	w.t.Helper()
	var f api.Function
	eventually(w.t, func() (err error) {
		if f, err = w.function(node, name); err != nil {
			return err
		}
		if f.RxSuccess != f.TxSuccess || *f.InFlight != 0 {
			return fmt.Errorf("%s: %d went in, %d came out, %d headers are kept", name, f.RxSuccess, f.TxSuccess, *f.InFlight)
		}
		return nil
	})
	if f.RxIgnored != 0 || f.TxNotCached != 0 || f.Expired != 0 || f.TxPlain != 0 {
		w.t.Errorf("%s: %+v", name, f)
	}
	return f
}

func TestTheExampleOfFunctionsRuns(t *testing.T) {
	t.Parallel()
	bothEncapsulations(t, exampleOfFunctionsRuns)
}

func exampleOfFunctionsRuns(t *testing.T, carried change) {
	w := build(t, functions, carried)
	forward, reverse := w.path("web", model.Forward), w.path("web", model.Reverse)
	since, back := w.counting(forward), w.counting(reverse)
	w.reaches("h1", "h2")
	if there, andBack := since().frames(), back().frames(); there != 5 || andBack != 5 {
		t.Errorf("5 echo requests and answers: %d frames forward, %d back", there, andBack)
	}
	for _, f := range []struct{ node, name string }{{"r2", "fw"}, {"r3", "dpi"}, {"r3", "nat"}} {
		if got := w.passed(f.node, f.name); got.RxSuccess != 10 {
			t.Errorf("%s: %+v, want 10 packets", f.name, got)
		}
	}

	h2 := w.capture("h2", "h2-r6")
	r := w.download("h2", "h1", 20_000_000)
	t.Logf("%.2f Gb/s", gigabits(r))
	var there, andBack flow
	eventually(t, func() error { // what ends a connection may be on its way still
		fw, dpi, nat := w.passed("r2", "fw"), w.passed("r3", "dpi"), w.passed("r3", "nat")
		there, andBack = since(), back()
		// Every frame has a header of its own in fw and dpi. nat gets super-packets:
		// answers go there first.
		frames, packets := there.frames()+andBack.frames(), there[3].Packets+andBack[1].Packets
		if fw.RxSuccess != frames || dpi.RxSuccess != frames || nat.RxSuccess != packets {
			return fmt.Errorf("fw %+v, dpi %+v, nat %+v; want %d, %d and %d packets", fw, dpi, nat, frames, frames, packets)
		}
		return nil
	})
	// The slower the machine, the fewer segments TCP sends at once.
	if !w.labelled() && 10*andBack[1].Packets > 9*andBack.frames() {
		t.Errorf("%d packets for %d frames: they are no super-packets", andBack[1].Packets, andBack.frames())
	}
	seen := 0
	for _, p := range h2.soFar() {
		if p.Header.NextHeader != unix.IPPROTO_TCP {
			continue
		}
		if seen++; p.Header.Source != natted {
			t.Errorf("h2 got a packet from %s, want %s", p.Header.Source, natted)
		}
	}
	if seen == 0 {
		t.Error("h2 got no TCP")
	}
}
