package e2e

import (
	"testing"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// The paper's network, from examples/paper.yaml:
//
//	           r2 (fw) ---- r3 (dpi)
//	          /                     \         chain web, both ways: r1, fw, dpi, r6
//	h1 ---- r1                       r6 ---- h2
//	          \                     /
//	           r4 ---------------- r5         not of the domain
var paper = string(examples.Paper)

// Offloads are on, as they are by default: what TCP sends are super-packets, and
// they are stamped whole.
func TestEveryFrameIsStampedByAllAndVerified(t *testing.T) {
	t.Parallel()
	bothSchemes(t, func(t *testing.T, s model.Scheme) {
		alsoOverLabels(t, func(t *testing.T, carried change) { everyFrameIsStamped(t, s, carried) })
	})
}

func everyFrameIsStamped(t *testing.T, s model.Scheme, carried change) {
	w := borrow(t, paper, proven(s), carried)
	forward, reverse := w.path("web", model.Forward), w.path("web", model.Reverse)

	since, back := w.counting(forward), w.counting(reverse)
	w.reaches("h1", "h2")
	w.reaches("h2", "h1")
	// A request and an answer each.
	if a, b := since().frames(), back().frames(); a != 10 || b != 10 {
		t.Errorf("10 echo requests and answers each way: %d frames forward, %d back", a, b)
	}

	size := int64(50_000_000)
	if w.labelled() {
		size = 5_000_000 // in frames
	}
	for _, c := range []struct {
		from, to       string
		there, andBack plan.Path
	}{{"h1", "h2", forward, reverse}, {"h2", "h1", reverse, forward}} {
		since, back := w.counting(c.there), w.counting(c.andBack)
		r := w.download(c.from, c.to, size)
		data, acks := since(), back()
		t.Logf("%s to %s: %.1f Gb/s", c.from, c.to, gigabits(r))
		// The hosts' links take 1500 bytes, of which TCP leaves 1428 to data.
		if least := uint64(size / 1440); data.frames() < least {
			t.Errorf("%s to %s: %d frames, want %d at least", c.from, c.to, data.frames(), least)
		}
		if acks.frames() == 0 {
			t.Errorf("%s to %s: no frame came back", c.from, c.to)
		}
		for i, h := range data {
			if 4*h.Packets > h.Frames && !w.labelled() {
				t.Errorf("%s to %s, position %d: %d packets for %d frames: they are no super-packets", c.from, c.to, i, h.Packets, h.Frames)
			}
			if h.Packets != data[0].Packets || h.Bytes != data[0].Bytes {
				t.Errorf("%s to %s, position %d: %d packets, %d bytes; the headend had %d, %d",
					c.from, c.to, i, h.Packets, h.Bytes, data[0].Packets, data[0].Bytes)
			}
		}
	}
}

func gigabits(r lab.Transfer) float64 { return float64(r.Bytes) * 8 / r.Duration.Seconds() / 1e9 }

// Somewhere on the way a link cuts super-packets into frames, and the node
// behind it may merge them again. The stamp must survive both, on each link.
func TestSuperPacketsMayBeCutAndMergedAnywhere(t *testing.T) {
	t.Parallel()
	boundToo(t, func(t *testing.T, s model.Scheme) {
		w := borrow(t, paper, proven(s))
		p := w.path("web", model.Forward)
		for _, link := range []struct {
			from, to string
			position int // of the first hop behind it, or past the last one
		}{{"h1", "r1", 0}, {"r1", "r2", 1}, {"r2", "r3", 2}, {"r3", "r6", 3}, {"r6", "h2", 4}} {
			out, in := link.from+"-"+link.to, link.to+"-"+link.from
			cut := func(on bool) {
				for _, o := range []host.Offload{host.TSO, host.GSO} {
					must(t, w.net(link.from).SetOffload(out, o, !on))
				}
			}
			cut(true)
			for _, merge := range []bool{false, true} {
				must(t, w.net(link.to).SetOffload(in, host.GRO, merge))
				since := w.counting(p)
				r := w.download("h1", "h2", 10_000_000)
				f := since()
				t.Logf("%s cuts, %s merges: %-5t %.1f Gb/s, packets %v for %d frames", out, in, merge, gigabits(r), packets(f), f.frames())
				for i, h := range f {
					whole := 2*h.Packets < h.Frames
					switch {
					case i < link.position && !whole:
						t.Errorf("%s cuts: %d packets for %d frames at position %d, before it", out, h.Packets, h.Frames, i)
					case i >= link.position && !merge && h.Packets != h.Frames:
						t.Errorf("%s cuts: %d packets for %d frames at position %d, behind it", out, h.Packets, h.Frames, i)
					case i >= link.position && merge && !whole:
						t.Errorf("%s cuts, %s merges: %d packets for %d frames at position %d, behind it", out, in, h.Packets, h.Frames, i)
					}
				}
			}
			must(t, w.net(link.to).SetOffload(in, host.GRO, false))
			cut(false)
		}
	})
}

func packets(f flow) (out []uint64) {
	for _, h := range f {
		out = append(out, h.Packets)
	}
	return out
}

// A host cuts what is larger than its link takes; each fragment is a packet of
// its own, without ports but for the first.
func TestFragmentsTakeTheirChain(t *testing.T) {
	t.Parallel()
	pass := func(t *testing.T, s model.Scheme, carried change) {
		w := borrow(t, paper, proven(s), carried)
		since := w.counting(w.path("web", model.Forward))
		if got := w.ping("h1", "h2", lab.PingConfig{Count: 5, Size: 4000, Timeout: settleTime}); got != 5 {
			t.Errorf("%d of 5 echo requests were answered", got)
		}
		if n := since().frames(); n != 15 {
			t.Errorf("%d frames, want 3 for each request", n)
		}
	}
	boundToo(t, func(t *testing.T, s model.Scheme) {
		alsoOverLabels(t, func(t *testing.T, carried change) { pass(t, s, carried) })
	})
}
