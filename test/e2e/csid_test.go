package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// example reads a file of examples/.
func example(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile("../../examples/" + name)
	must(t, err)
	return string(b)
}

// forms are the chains of examples/compressed.yaml by the host that they lead to.
var forms = map[string]string{"h2": "compressed", "h3": "squeezed", "h4": "reduced"}

// TCP in both directions of chains of all forms. On TC with the links' offloads,
// so that super-packets cross the domain whole; on XDP frame by frame, over a
// router that takes them as they come.
func TestCompressedAndReducedChainsCarryTCP(t *testing.T) {
	t.Parallel()
	for _, d := range []model.Datapath{model.DatapathTC, model.DatapathXDP} {
		t.Run(d.String(), func(t *testing.T) {
			t.Parallel()
			w := build(t, example(t, "compressed.yaml"), datapath(d))
			if d == model.DatapathXDP {
				for _, l := range [][2]string{{"h1", "h1-r1"}, {"h2", "h2-r6"}, {"h3", "h3-r6"}, {"h4", "h4-r6"}, {"k", "k-r2"}, {"k", "k-r3"}} {
					must(t, w.net(l[0]).SetOffload(l[1], host.GRO, true)) // else it takes no redirects
					if l[0] != "k" {
						must(t, w.net(l[0]).SetOffload(l[1], host.TransmitSum, false)) // nobody completes them behind XDP
					}
				}
			}
			in, out := w.capture("r2", "r2-r1"), w.capture("r6", "r6-r3")
			for to, chain := range forms {
				forward, reverse := w.path(chain, model.Forward), w.path(chain, model.Reverse)
				since, back := w.counting(forward), w.counting(reverse)
				w.reaches("h1", to)
				w.download("h1", to, 5_000_000)
				w.download(to, "h1", 5_000_000)
				for _, f := range []flow{since(), back()} {
					for i, h := range f {
						if f.frames() < 3000 {
							t.Errorf("chain %s: %d frames at position %d for 5 MB", chain, h.Frames, i)
						}
						if d == model.DatapathTC && 2*h.Packets > h.Frames {
							t.Errorf("chain %s: %d packets for %d frames at position %d: super-packets were cut", chain, h.Packets, h.Frames, i)
						}
					}
				}
				first, srh := srv6.Encapsulate(forward.Segments(), forward.Encapsulation)
				if err := in.all(forward, "fc00:1::1", first, srh); err != nil {
					t.Errorf("as r1 sends it: %v", err)
				}
				srh.SegmentsLeft = 0
				if err := out.all(forward, "fc00:1::1", forward.Hops[len(forward.Hops)-1].SID, srh); err != nil {
					t.Errorf("as it comes to r6: %v", err)
				}
			}
		})
	}
}

// all says whether all packets of a path that were captured have these headers,
// and there are some. TCP's are more than a capture keeps: they are looked at
// too.
func (c *capture) all(p plan.Path, source string, to netip.Addr, srh *srv6.SRH) error {
	seen, packets := 0, c.soFar()
	for _, pkt := range packets {
		v, ok := pkt.Proof()
		if !ok || v.Path != p.Path || pkt.Header.Source != netip.MustParseAddr(source) || pkt.SRH.SegmentsLeft != srh.SegmentsLeft {
			continue
		}
		seen++
		if pkt.Header.Destination != to || fmt.Sprint(pkt.SRH.Segments) != fmt.Sprint(srh.Segments) {
			return fmt.Errorf("chain %s: to %s, segments %s; want %s, %s", p.Chain, pkt.Header.Destination, pkt.SRH.Segments, to, srh.Segments)
		}
	}
	if seen == 0 {
		return fmt.Errorf("chain %s: none of %d packets has Segments Left %d", p.Chain, len(packets), srh.SegmentsLeft)
	}
	return nil
}
