package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/tables"
)

// Over a core without IPv6, with nodes in it that only pass labels on: every packet of both
// versions that is sent is stamped at each hop and verified, both ways.
func TestChainsGoOverLabelsThroughACoreOfIPv4(t *testing.T) {
	t.Parallel()
	bothSchemes(t, func(t *testing.T, s model.Scheme) {
		w := build(t, string(examples.MPLS), proven(s))
		for _, v := range []struct {
			chain string
			ipv4  bool
		}{{"web4", true}, {"web6", false}} {
			w.ipv4 = v.ipv4
			forward, reverse := w.path(v.chain, model.Forward), w.path(v.chain, model.Reverse)
			since, back := w.counting(forward), w.counting(reverse)
			cut := map[string]uint64{}
			for _, node := range []string{"r1", "r6"} {
				cut[node] = w.received(node, tables.EnterCutter().Out)
			}
			w.reaches("h1", "h2")
			w.reaches("h2", "h1")
			if got := w.ping("h1", "h2", lab.PingConfig{Size: 1400}); got != 1 {
				t.Errorf("%s: a ping of 1400 bytes was not answered", v.chain)
			}
			for _, way := range [][2]string{{"h1", "h2"}, {"h2", "h1"}} {
				r := w.download(way[0], way[1], 5_000_000)
				t.Logf("%s, from %s: %.1f Gb/s", v.chain, way[0], gigabits(r))
			}
			// The hosts send super-packets, which are cut before they get labels.
			for node, before := range cut {
				if n := w.received(node, tables.EnterCutter().Out) - before; n < 2_000 {
					t.Errorf("%s: %d frames came out of the cutter of %s; want 2000 or more", v.chain, n, node)
				}
			}
			for _, f := range []flow{since(), back()} {
				if f.frames() < 3_000 {
					t.Errorf("%s: %d frames were stamped and verified; want 3000 or more", v.chain, f.frames())
				}
			}
		}
	})
}

// On XDP headend, hops and verdict are XDP's alone, but for the packets that keep its ways
// fresh; r4 and r5, which pass labels on, leave that to TC.
func TestChainsGoOverLabelsOnXDP(t *testing.T) {
	t.Parallel()
	countRuns(t)
	boundToo(t, func(t *testing.T, s model.Scheme) {
		w := build(t, string(examples.MPLS), proven(s), datapath(model.DatapathXDP))
		for name, link := range map[string]string{"h1": "h1-r1", "h2": "h2-r6"} {
			must(t, w.net(name).SetOffload(link, host.GRO, true))
			must(t, w.net(name).SetOffload(link, host.TransmitSum, false))
		}
		visited := []place{{"r1", "edge"}, {"r1", "core"}, {"r2", "core"}, {"r3", "core"}, {"r6", "core"}, {"r6", "edge"}}
		for _, v := range []struct {
			chain string
			ipv4  bool
		}{{"web4", true}, {"web6", false}} {
			w.ipv4 = v.ipv4
			forward, reverse := w.path(v.chain, model.Forward), w.path(v.chain, model.Reverse)
			eventually(t, func() error {
				const n = 40
				var tc []func() uint64
				for _, p := range visited {
					tc = append(tc, w.runs(p.node, p.program("tc")))
				}
				since, back := w.counting(forward), w.counting(reverse)
				if got := w.ping("h1", "h2", lab.PingConfig{Count: n, Interval: time.Millisecond, Timeout: settleTime}); got != n {
					t.Fatalf("%s: %d of %d echo requests were answered", v.chain, got, n)
				}
				if a, b := since().frames(), back().frames(); a != n || b != n {
					t.Fatalf("%s: %d frames stamped and verified forward, %d back, want %d each", v.chain, a, b, n)
				}
				for i, p := range visited {
					if ran := tc[i](); ran > n/4 {
						return fmt.Errorf("%s: %s %s: TC ran %d times for %d packets", v.chain, p.node, p.kind, ran, n)
					}
				}
				return nil
			})
			since := w.counting(forward)
			r := w.download("h1", "h2", 5_000_000)
			t.Logf("%s: %.1f Gb/s, %d frames", v.chain, gigabits(r), since().frames())
		}
	})
}

// received is how many packets have come in by a device of a node.
func (w *world) received(node, link string) uint64 {
	w.t.Helper()
	n, err := w.net(node).Received(link)
	must(w.t, err)
	return n
}
