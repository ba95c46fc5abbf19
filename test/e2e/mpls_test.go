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

// Functions that know nothing of segment routing, in a core of IPv4:
//
//	h1 --- r1 --- r2 (ids) --- r3 (dpi) --- r6 --- h2
const labelFunctions = `
version: 1
domain:
  block: fc00::/48
  mpls: {services: 100000, mtu: 1700}
nodes:
  - name: r1
    address: fc00:1::1
    locator: fc00:0:0:100::/56
    mpls: {label: 16001, address: 10.255.0.1}
    interfaces: [{name: r1-h1, role: edge}, {name: r1-r2, role: core}]
  - name: r2
    address: fc00:2::1
    locator: fc00:0:0:200::/56
    mpls: {label: 16002, address: 10.255.0.2}
    interfaces: [{name: r2-r1, role: core}, {name: r2-r3, role: core}]
  - name: r3
    address: fc00:3::1
    locator: fc00:0:0:300::/56
    mpls: {label: 16003, address: 10.255.0.3}
    interfaces: [{name: r3-r2, role: core}, {name: r3-r6, role: core}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    mpls: {label: 16006, address: 10.255.0.6}
    interfaces: [{name: r6-h2, role: edge}, {name: r6-r3, role: core}]
functions:
  - {name: ids, node: r2, kind: unaware, attach: {to: ids-to, from: ids-from}, cache: {size: 20000}, lifetime: 3s}
  - {name: dpi, node: r3, kind: unaware, attach: {to: dpi-to, from: dpi-from}, cache: {size: 20000}, lifetime: 3s}
chains:
  - name: web4
    ingress: [r1]
    functions: [ids, dpi]
    egress: r6
    match: {destination: 198.51.100.0/24}
    direction: both
    encapsulation: {type: sr-mpls}
    proof: {scheme: keyed, on-violation: drop}
  - name: web6
    ingress: [r1]
    functions: [ids, dpi]
    egress: r6
    match: {destination: "fc00:8::/64"}
    direction: both
    encapsulation: {type: sr-mpls}
    proof: {scheme: keyed, on-violation: drop}
lab:
  core: ipv4
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64", prefix4: 192.0.2.0/24}
    - {name: h2, node: r6, prefix: "fc00:8::/64", prefix4: 198.51.100.0/24}
  links: [{between: [r1, r2]}, {between: [r2, r3]}, {between: [r3, r6]}]
  functions: [{name: ids, kind: raw}, {name: dpi, kind: raw}]
`

// A function gets packets without labels, and each comes back to its own.
func TestFunctionsGetPacketsWithoutTheirLabels(t *testing.T) {
	t.Parallel()
	boundToo(t, func(t *testing.T, s model.Scheme) {
		w := build(t, labelFunctions, proven(s))
		for _, v := range []struct {
			chain string
			ipv4  bool
		}{{"web4", true}, {"web6", false}} {
			w.ipv4 = v.ipv4
			since, back := w.counting(w.path(v.chain, model.Forward)), w.counting(w.path(v.chain, model.Reverse))
			before := w.through("r2", "ids")
			w.reaches("h1", "h2")
			w.reaches("h2", "h1")
			r := w.download("h1", "h2", 2_000_000)
			t.Logf("%s: %.2f Gb/s", v.chain, gigabits(r))
			a, b := since().frames(), back().frames()
			if a+b < 1_400 {
				t.Errorf("%s: %d frames were stamped and verified forward, %d back; want 1400 or more", v.chain, a, b)
			}
			if n := w.through("r2", "ids") - before; n != uint64(a+b) {
				t.Errorf("%s: %d packets got their labels back from ids, and %d frames were verified", v.chain, n, a+b)
			}
		}
	})
}

// through is how many packets have come back from a function and were recognised.
func (w *world) through(node, function string) uint64 {
	w.t.Helper()
	all, err := w.client(node).Functions(soon(w.t))
	must(w.t, err)
	for _, f := range all.Functions {
		if f.Function == function {
			return f.TxSuccess
		}
	}
	w.t.Fatalf("%s has no counters of %s", node, function)
	return 0
}
