package e2e

import (
	"testing"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
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
			w.reaches("h1", "h2")
			w.reaches("h2", "h1")
			if got := w.ping("h1", "h2", lab.PingConfig{Size: 1400}); got != 1 {
				t.Errorf("%s: a ping of 1400 bytes was not answered", v.chain)
			}
			for _, way := range [][2]string{{"h1", "h2"}, {"h2", "h1"}} {
				r := w.download(way[0], way[1], 5_000_000)
				t.Logf("%s, from %s: %.1f Gb/s", v.chain, way[0], gigabits(r))
			}
			for _, f := range []flow{since(), back()} {
				if f.frames() < 3_000 {
					t.Errorf("%s: %d frames were stamped and verified; want 3000 or more", v.chain, f.frames())
				}
			}
		}
	})
}
