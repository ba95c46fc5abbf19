package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
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

// What r1 sends itself takes a chain over labels, and so does what is marked there, sent or
// forwarded; super-packets are cut for both, and TCP loses nothing.
func TestOwnAndMarkedTrafficTakesAChainOverLabels(t *testing.T) {
	t.Parallel()
	boundToo(t, func(t *testing.T, s model.Scheme) {
		w := build(t, strings.NewReplacer(
			"    match: {destination: 198.51.100.0/24}\n", "    match: {destination: 198.51.100.0/24}\n    own-traffic: true\n",
			"lab:\n", `  - name: fast
    ingress: [r1]
    functions: [dpi]
    egress: r6
    match: {destination: 0.0.0.0/0, mark: 0x10/0xff, priority: 10}
    encapsulation: {type: sr-mpls}
    proof: {scheme: keyed, on-violation: drop}
lab:
`).Replace(string(examples.MPLS)), proven(s))
		w.ipv4 = true
		// The core routes loopbacks alone, and the kernel sends nothing that has no route.
		via := strings.Fields(w.shell("r1", "ip", "route", "show", "10.255.0.6"))
		if len(via) < 5 || via[1] != "via" {
			t.Fatalf("the route to r6 is %q", via)
		}
		w.shell("r1", append([]string{"ip", "route", "add", "198.51.100.0/24"}, via[1:5]...)...)
		var before [3]uint64
		paths := []func() flow{w.counting(w.path("web4", model.Forward)), w.counting(w.path("web4", model.Reverse)), w.counting(w.path("fast", model.Forward))}
		took := counts(func() (n [3]uint64) {
			for i, p := range paths {
				all := p().frames()
				n[i], before[i] = all-before[i], all
			}
			return n
		})
		w.reaches("h1", "h2")
		took()
		ping := []string{"ping", "-c", "3", "-i", "0.2"}
		w.shell("r1", append(ping, w.addr("h2").String())...)
		took.takes(t, "own echo requests", true, true, false)
		w.shell("r1", append(ping, "-m", "16", w.addr("h2").String())...)
		took.takes(t, "with a mark", false, true, true)

		cut := w.received("r1", tables.EnterCutter().Out)
		w.upload("r1", "h2", 0, 16, 5_000_000)
		took.takes(t, "TCP of a marked socket", false, true, true)
		w.upload("r1", "h2", 0, 0, 5_000_000)
		took.takes(t, "TCP", true, true, false)
		if n := w.received("r1", tables.EnterCutter().Out) - cut; n < 5_000 {
			t.Errorf("%d frames came out of the cutter of r1; want 5000 or more", n)
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

// tshark reads on each link what the plan says: the labels of each visit that is left, the entropy label
// with its indicator, TTLs, the word and the proof, and the inner packet, of both directions.
func TestTsharkReadsTheLabelsOfEachLink(t *testing.T) {
	t.Parallel()
	w := build(t, string(examples.MPLS))
	w.ipv4 = true
	// Where packets of the chain come to, and how many of its nodes have been visited, forward and back.
	links := []struct {
		node, link    string
		forward, back int
	}{{"r4", "r4-r1", 0, -1}, {"r2", "r2-r4", 0, -1}, {"r3", "r3-r2", 1, -1}, {"r5", "r5-r3", 2, -1}, {"r6", "r6-r5", 2, -1},
		{"r5", "r5-r6", -1, 0}, {"r3", "r3-r5", -1, 0}, {"r2", "r2-r3", -1, 1}, {"r4", "r4-r2", -1, 2}, {"r1", "r1-r4", -1, 2}}
	var recorded []*frames
	for _, l := range links {
		recorded = append(recorded, w.record(l.node, l.link))
	}
	w.reaches("h1", "h2")
	isService := model.MPLS{Services: 100000}.IsService
	for i, l := range links {
		path, done := w.path("web4", model.Forward), l.forward
		if done < 0 {
			path, done = w.path("web4", model.Reverse), l.back
		}
		var visits []mpls.Visit
		for _, h := range path.Hops[1:] {
			visits = append(visits, mpls.Visit{Node: h.NodeLabel, Service: h.ServiceLabel})
		}
		var raw [][]byte
		eventually(t, func() error {
			raw = nil
			for _, b := range recorded[i].soFar() {
				p, err := mpls.ParseFrame(b, isService)
				if err != nil || p.Proof == nil {
					continue
				}
				if v, ok := srv6.ReadProof(*p.Proof); ok && v.Path == path.Path {
					raw = append(raw, b)
				}
			}
			if len(raw) == 0 {
				return fmt.Errorf("no packet of path %08x has come to %s", path.Path, l.link)
			}
			return nil
		})
		file := pcap(t, raw)
		script := []string{"-X", "lua_script:../../tools/wireshark/waystamp.lua", "-r", file}
		if said := tool(t, append([]string{"tshark", "-Y", "_ws.malformed || _ws.expert.severity == error"}, script...)...); len(said) > 0 {
			t.Errorf("%s: tshark complains:\n%s", l.link, said)
		}
		args := append([]string{"tshark", "-T", "fields", "-E", "separator=;", "-E", "aggregator=,"}, script...)
		for _, f := range []string{"mpls.label", "mpls.ttl", "mpls.bottom", "waystamp.word.version", "waystamp.word.next", "waystamp.path", "ip.dst"} {
			args = append(args, "-e", f)
		}
		lines := strings.Split(strings.TrimSuffix(string(tool(t, args...)), "\n"), "\n")
		if len(lines) != len(raw) {
			t.Fatalf("%s: tshark shows %d of %d frames", l.link, len(lines), len(raw))
		}
		for _, line := range lines {
			v := strings.Split(line, ";")
			labels := strings.Split(v[0], ",")
			stack := mpls.Stack(visits, 0, 0, mpls.TTL)
			for range done {
				stack, _ = mpls.Advance(stack)
			}
			var want, bottom []string
			for n, e := range stack {
				label := fmt.Sprint(e.Label())
				if e.Label() == 0 { // the flow's, which each packet has for itself
					label = labels[2]
				}
				want = append(want, label)
				bottom = append(bottom, map[bool]string{true: "1", false: "0"}[n == len(stack)-1])
			}
			host := map[bool]string{true: "h2", false: "h1"}[l.forward >= 0]
			if v[0] != strings.Join(want, ",") || v[2] != strings.Join(bottom, ",") || v[3] != "0" || v[4] != "4" ||
				v[5] != fmt.Sprintf("0x%08x", path.Path) || v[6] != w.addr(host).String() {
				t.Errorf("%s: tshark shows %q; want labels %v, one bottom, a word of IPv4, path %08x to %s", l.link, line, want, path.Path, host)
			}
			if ttl := strings.Split(v[1], ","); l.node == "r4" && l.forward == 0 && ttl[0] != "64" || l.link == "r2-r4" && ttl[0] != "63" {
				t.Errorf("%s: TTLs %v", l.link, ttl)
			}
		}
	}
}
