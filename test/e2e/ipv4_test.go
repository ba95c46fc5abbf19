package e2e

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
)

// inIPv4 gives all hosts IPv4, and makes the chains that go to them take that in
// the place of IPv6.
func inIPv4(m *manifest.Manifest) {
	for i := range m.Lab.Hosts {
		h := &m.Lab.Hosts[i]
		h.Prefix4 = netip.MustParsePrefix(fmt.Sprintf("10.0.%d.0/24", i+1))
		for j := range m.Domain.Chains {
			if c := &m.Domain.Chains[j]; c.Match.Destination == h.Prefix {
				c.Match.Destination = h.Prefix4
			}
		}
	}
}

// Both versions side by side, with real TCP and ICMP and all offloads on, so that
// packets are super-packets at headend, hops and egress.
func TestIPv4GoesThroughTheChain(t *testing.T) {
	t.Parallel()
	bothSchemes(t, func(t *testing.T, s model.Scheme) {
		w := build(t, string(examples.IPv4), proven(s))
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
				r := w.download(way[0], way[1], 20_000_000)
				t.Logf("%s, from %s: %.1f Gb/s", v.chain, way[0], gigabits(r))
			}
			for _, f := range []flow{since(), back()} {
				for i, h := range f {
					if f.frames() < 13_000 || 2*h.Packets > h.Frames {
						t.Errorf("%s, position %d: %d packets for %d frames; want super-packets of 13000 frames or more", v.chain, i, h.Packets, h.Frames)
					}
				}
			}
		}
	})
}

// Links in the middle that cut super-packets, and a headend that gets frames:
// every one is stamped and verified.
func TestIPv4SuperPacketsAreCutOnTheWay(t *testing.T) {
	t.Parallel()
	w := build(t, string(examples.IPv4))
	w.ipv4 = true
	for _, l := range [][2]string{{"r2", "r2-r3"}, {"r3", "r3-r2"}, {"h1", "h1-r1"}} {
		must(t, w.net(l[0]).SetOffload(l[1], host.TSO, false))
		must(t, w.net(l[0]).SetOffload(l[1], host.GSO, false))
	}
	since := w.counting(w.path("web4", model.Forward))
	r := w.download("h1", "h2", 5_000_000)
	t.Logf("%.1f Gb/s, %d frames", gigabits(r), since().frames())
	w.download("h2", "h1", 5_000_000)
}

// XDP does the work for IPv4 as it does for IPv6.
func TestXDPDoesTheWorkForIPv4(t *testing.T) {
	t.Parallel()
	bothSchemes(t, func(t *testing.T, s model.Scheme) {
		w := buildFast(t, s, inIPv4)
		forward, reverse := w.path("web", model.Forward), w.path("web", model.Reverse)
		tc := map[place]func() uint64{}
		for _, p := range hooks {
			tc[p] = w.runs(p.node, p.program("tc"))
		}
		since, back := w.counting(forward), w.counting(reverse)
		const n = 300
		if got := w.ping("h1", "h2", lab.PingConfig{Count: n, Interval: 2 * time.Millisecond, Timeout: settleTime}); got != n {
			t.Errorf("%d of %d echo requests were answered", got, n)
		}
		if a, b := since().frames(), back().frames(); a != n || b != n {
			t.Errorf("%d frames stamped and verified forward, %d back, want %d each", a, b, n)
		}
		for p, ran := range tc {
			if ran := ran(); ran > n/5 {
				t.Errorf("%s %s: TC ran %d times for %d packets", p.node, p.kind, ran, n)
			}
		}
		r := w.download("h1", "h2", 5_000_000)
		t.Logf("TCP: %.1f Gb/s", gigabits(r))
	})
}

// What skips a hop is refused at the egress, at both hooks, and told of; and a
// packet without proof does not get in.
func TestIPv4ThatSkipsAHopIsRefused(t *testing.T) {
	t.Parallel()
	for _, hook := range []string{"tc", "xdp"} {
		t.Run(hook, func(t *testing.T) {
			t.Parallel()
			d := model.DatapathTC
			if hook == "xdp" {
				d = model.DatapathXDP
			}
			w := build(t, star, datapath(d), inIPv4)
			w.ipv4 = true
			for _, l := range [][2]string{{"h1", "h1-r1"}, {"h2", "h2-r6"}, {"h3", "h3-r6"}, {"m", "m-r1"}, {"m", "m-r2"}, {"m", "m-r3"}, {"m", "m-r6"}} {
				must(t, w.net(l[0]).SetOffload(l[1], host.GRO, hook == "xdp"))
			}
			m := w.meddle("m")
			w.reaches("h1", "h2")
			for _, sc := range scenes[:2] {
				sc.play(w.in(t), m, hook)
			}
			w.reaches("h1", "h2")
		})
	}
}

// A plain IPv4 packet that a chain requires is refused at its egress.
func TestPlainIPv4IsRefusedAtTheEgress(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, plainIPv4IsRefused)
}

func plainIPv4IsRefused(t *testing.T, carried change) {
	w := build(t, string(examples.IPv4), carried)
	w.ipv4 = true
	w.reaches("h1", "h2")
	// Somebody inside the domain, whose packets know no headend.
	must(t, w.net("r3").AddAddress("lo", netip.MustParsePrefix("192.0.2.77/32")))
	must(t, w.net("r3").AddRoute(host.Route{
		Destination: netip.PrefixFrom(w.addr("h2"), 24).Masked(), Device: "r3-r6",
		Via: netip.MustParseAddr("fe80::4"), // r6, the fourth station
	}))
	r, err := lab.Ping(soon(t), w.ns("r3"), w.addr("h2"), lab.PingConfig{Count: probes, Timeout: lostTime})
	must(t, err)
	if r.Received != 0 {
		t.Errorf("%d packets without proof were answered", r.Received)
	}
	w.refused("r6", "unproven", probes)
}
