//go:build stock

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

// Nodes of a chain over labels among routers whose labels are those of an IGP. All have FRR, with
// OSPF and segment routing (RFC 8665); a, b, e, f and c are routers of the kernel's own. The way by b and f
// costs more.
//
//	       a --- e
//	      /       \
//	h1 - r1       r2 (fw) --- c --- r6 - h2
//	      \       /
//	       b --- f
const ospf = `
version: 1
domain:
  block: fc00::/48
  mpls: {services: 100000, mtu: 1700}
nodes:
  - {name: r1, address: fc00:1::1, locator: fc00:0:0:100::/56, mpls: {label: 16001, address: 10.255.0.1}, interfaces: [{name: r1-h1, role: edge}, {name: r1-a, role: core}, {name: r1-b, role: core}]}
  - {name: r2, address: fc00:2::1, locator: fc00:0:0:200::/56, mpls: {label: 16002, address: 10.255.0.2}, interfaces: [{name: r2-e, role: core}, {name: r2-f, role: core}, {name: r2-c, role: core}]}
  - {name: r6, address: fc00:6::1, locator: fc00:0:0:600::/56, mpls: {label: 16006, address: 10.255.0.6}, interfaces: [{name: r6-h2, role: edge}, {name: r6-c, role: core}]}
  - {name: a, address: fc00:a::1, locator: fc00:0:0:a00::/56, mpls: {label: 16010, address: 10.255.0.10}, interfaces: [{name: a-r1, role: core}, {name: a-e, role: core}]}
  - {name: b, address: fc00:b::1, locator: fc00:0:0:b00::/56, mpls: {label: 16011, address: 10.255.0.11}, interfaces: [{name: b-r1, role: core}, {name: b-f, role: core}]}
  - {name: c, address: fc00:c::1, locator: fc00:0:0:c00::/56, mpls: {label: 16012, address: 10.255.0.12}, interfaces: [{name: c-r2, role: core}, {name: c-r6, role: core}]}
  - {name: e, address: fc00:e::1, locator: fc00:0:0:e00::/56, mpls: {label: 16014, address: 10.255.0.14}, interfaces: [{name: e-a, role: core}, {name: e-r2, role: core}]}
  - {name: f, address: fc00:f::1, locator: fc00:0:0:f00::/56, mpls: {label: 16015, address: 10.255.0.15}, interfaces: [{name: f-b, role: core}, {name: f-r2, role: core}]}
functions:
  - {name: fw, node: r2, kind: forward}
chains:
  - name: web
    ingress: [r1]
    functions: [fw]
    egress: r6
    match: {destination: 198.51.100.0/24}
    direction: both
    encapsulation: {type: sr-mpls}
    proof: {scheme: keyed, on-violation: drop}
lab:
  core: ipv4
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64", prefix4: 192.0.2.0/24}
    - {name: h2, node: r6, prefix: "fc00:8::/64", prefix4: 198.51.100.0/24}
  links:
    - {between: [r1, a]}
    - {between: [a, e]}
    - {between: [e, r2]}
    - {between: [r1, b]}
    - {between: [b, f]}
    - {between: [f, r2]}
    - {between: [r2, c]}
    - {between: [c, r6]}
`

// srgb is the base of all routers' SRGB: a node's label is it and the index of its prefix.
const srgb = 16000

// router is a member's FRR.
type router struct {
	w    *world
	name string
	dir  string
	said map[string]*bytes.Buffer
}

// ospfOn runs zebra and ospfd at a node, until the test ends.
func (w *world) ospfOn(dir, name string, addresses map[string]netip.Prefix) *router {
	w.t.Helper()
	i := slices.IndexFunc(w.manifest.Domain.Nodes, func(n model.Node) bool { return n.Name == name })
	n := w.manifest.Domain.Nodes[i]
	r := &router{w: w, name: name, dir: filepath.Join(dir, name), said: map[string]*bytes.Buffer{}}
	must(w.t, os.Mkdir(r.dir, 0o755))
	own := w.net(name)
	must(w.t, own.SetSysctl("net/mpls/platform_labels", "20000"))
	conf := fmt.Sprintf(`
interface lo
 ip ospf area 0
 ip ospf passive
exit
router ospf
 ospf router-id %[1]s
 capability opaque
 mpls-te on
 mpls-te router-address %[1]s
 router-info area 0.0.0.0
 timers throttle spf 10 50 500
 timers throttle lsa all 500
 timers lsa min-arrival 200
 segment-routing on
 segment-routing global-block %[2]d %[3]d
 segment-routing node-msd 16
 segment-routing prefix %[1]s/32 index %[4]d
exit
`, n.MPLS.Address, srgb, srgb+7999, n.MPLS.Label-srgb)
	for _, f := range n.Interfaces {
		if f.Role != model.RoleCore {
			continue
		}
		must(w.t, own.AddAddress(f.Name, addresses[f.Name]))
		must(w.t, own.SetSysctl("net/mpls/conf/"+f.Name+"/input", "1"))
		cost := 10
		if f.Name == "r1-b" || f.Name == "b-r1" {
			cost = 100
		}
		conf += fmt.Sprintf(`interface %s
 ip ospf area 0
 ip ospf network point-to-point
 ip ospf hello-interval 2
 ip ospf dead-interval 40
 ip ospf cost %d
exit
`, f.Name, cost)
	}
	ctx, end := context.WithCancel(context.Background())
	var running []*host.Cmd
	w.t.Cleanup(func() {
		end()
		for _, cmd := range running {
			cmd.Wait() // killed: that is its error
		}
		if w.t.Failed() {
			for daemon, said := range r.said {
				w.t.Logf("%s of %s says:\n%s", daemon, name, said)
			}
		}
	})
	for _, daemon := range []string{"zebra", "ospfd"} {
		file := filepath.Join(r.dir, daemon+".conf")
		text := ""
		if daemon == "ospfd" {
			text = conf
		}
		must(w.t, os.WriteFile(file, []byte(text), 0o644))
		cmd := host.Command(ctx, w.ns(name), frrDaemon(w.t, daemon), "-u", "root", "-g", "root",
			"--vty_socket", r.dir, "-f", file, "-i", filepath.Join(r.dir, daemon+".pid"), "-z", filepath.Join(r.dir, "zserv.api"), "-P", "0", "--log", "stdout")
		r.said[daemon] = &bytes.Buffer{}
		cmd.Stdout, cmd.Stderr = r.said[daemon], r.said[daemon]
		must(w.t, cmd.Start())
		running = append(running, cmd)
		if daemon == "zebra" { // an ospfd that does not find it tries again after a while
			eventually(w.t, func() error {
				_, err := os.Stat(filepath.Join(r.dir, "zserv.api"))
				return err
			})
		}
	}
	return r
}

// frrDaemon is where one is: Debian has them outside of PATH, and the guest in it.
func frrDaemon(t *testing.T, name string) string {
	t.Helper()
	for _, file := range []string{"/usr/lib/frr/" + name, "/usr/bin/" + name} {
		if _, err := os.Stat(file); err == nil {
			return file
		}
	}
	t.Fatalf("there is no %s of FRR", name)
	panic("unreachable")
}

// vty asks a daemon as vtysh does, which wants PAM.
func (r *router) vty(daemon, command string) string {
	c, err := net.Dial("unix", filepath.Join(r.dir, daemon+".vty"))
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(settleTime))
	if _, err := c.Write(append([]byte(command), 0)); err != nil {
		return err.Error()
	}
	var said []byte
	buf := make([]byte, 4096)
	for !bytes.Contains(said, []byte{0, 0, 0}) { // and then a status
		n, err := c.Read(buf)
		said = append(said, buf[:n]...)
		if err != nil {
			return fmt.Sprintf("%s%v", said, err)
		}
	}
	return string(bytes.TrimRight(said, "\x00"))
}

// tell shows what a router knows.
func (r *router) tell() {
	for _, q := range [][2]string{{"ospfd", "show ip ospf neighbor"}, {"ospfd", "show ip ospf database segment-routing"}, {"zebra", "show mpls table"}, {"zebra", "show ip route"}} {
		r.w.t.Logf("%s, %s:\n%s", r.name, q[1], r.vty(q[0], q[1]))
	}
	for _, args := range [][]string{{"ip", "-d", "route"}, {"ip", "-f", "mpls", "route"}, {"ip", "nexthop"}} {
		out, err := r.w.Run(context.Background(), r.name, args...)
		r.w.t.Logf("%s, %s: %v\n%s", r.name, strings.Join(args, " "), err, out)
	}
}

// waysTo are how a node's kernel sends packets to another.
func (w *world) waysTo(from *host.Net, to string) (devices []string, pushes bool, err error) {
	i := slices.IndexFunc(w.manifest.Domain.Nodes, func(n model.Node) bool { return n.Name == to })
	ways, err := from.Ways(w.manifest.Domain.Nodes[i].MPLS.Address)
	for _, v := range ways {
		devices = append(devices, v.Device)
		pushes = pushes || v.Pushes
	}
	return devices, pushes, err
}

// takes waits until a router's route for a label has a way by the device, and takes all others out of it: FRR 8.4 leaves some behind when
// the way changes, so that packets of some flows go round between two routers.
func (w *world) takes(router, label, device string) {
	w.t.Helper()
	within(w.t, patience, func() error {
		said := w.shell(router, "ip", "-f", "mpls", "route", "show", label)
		// One way stands behind the label, several have a line each, with a weight at its end.
		var ways [][]string
		for line := range strings.Lines(said) {
			way, found := strings.CutPrefix(strings.TrimSpace(line), "nexthop ")
			if !found {
				way, found = strings.CutPrefix(line, label)
			}
			if found && strings.Contains(way, " dev ") {
				way, _, _ = strings.Cut(way, " weight ")
				way, _, _ = strings.Cut(way, " proto ")
				ways = append(ways, strings.Fields(way))
			}
		}
		i := slices.IndexFunc(ways, func(way []string) bool { return slices.Contains(way, device) })
		switch {
		case i < 0:
			return fmt.Errorf("%s has the route %q; want a way by %s", router, said, device)
		case len(ways) > 1:
			w.t.Logf("%s has the route %q; the way by %s stays", router, said, device)
			w.shell(router, slices.Concat([]string{"ip", "-f", "mpls", "route", "replace", label, "proto", "ospf"}, ways[i])...)
			return fmt.Errorf("%s had the route %q; want the way by %s alone", router, said, device)
		}
		return nil
	})
}

// Labels, next hops and the way around a link that is cut are the IGP's. Nodes' routes to one another push labels of their
// own, as routers' do; packets of the chain have those of their headend alone.
func TestStockFRRsSegmentRoutingCarriesAChain(t *testing.T) {
	w := buildFrom(t, parse(t, ospf), func(c *lab.Config) { c.WithoutAgents = true })
	w.ipv4 = true
	addresses := map[string]netip.Prefix{}
	for i, k := range w.manifest.Lab.Links {
		first := netip.AddrFrom4([4]byte{10, 0, byte(i), 1})
		addresses[k.A+"-"+k.B] = netip.PrefixFrom(first, 30)
		addresses[k.B+"-"+k.A] = netip.PrefixFrom(first.Next(), 30)
	}
	dir := newDir(t)
	var all []*router
	for _, name := range w.nodes() {
		w.shell(name, "ip", "-4", "route", "flush", "proto", "static") // the lab's own
		all = append(all, w.ospfOn(dir, name, addresses))
	}
	leads := func(from, to string, want ...string) {
		t.Helper()
		node := w.net(from)
		within(t, patience, func() error { // an emulator is slow
			devices, pushes, err := w.waysTo(node, to)
			if err != nil || !slices.Equal(devices, want) || !pushes {
				return fmt.Errorf("%s reaches %s by %q, and its route pushes labels: %t (%w); want it by %q, with labels", from, to, devices, pushes, err, want)
			}
			return nil
		})
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, r := range all {
				if r.name == "r1" || r.name == "a" || r.name == "e" {
					r.tell()
				}
			}
		}
	})
	leads("r1", "r2", "r1-a")
	leads("r1", "r6", "r1-a")
	leads("r2", "r1", "r2-e")
	leads("r6", "r2", "r6-c")
	// a swaps the label of r2 for the same one, and e takes it off.
	for router, swaps := range map[string]bool{"a": true, "e": false} {
		within(t, patience, func() error {
			said := w.shell(router, "ip", "-f", "mpls", "route", "show", "16002")
			if said == "" || strings.Contains(said, "as to 16002") != swaps {
				return fmt.Errorf("%s has the route %q; swaps: want %t", router, said, swaps)
			}
			return nil
		})
	}
	for _, n := range []string{"r1", "r2", "r6"} {
		must(t, w.StartAgent(soon(t), n))
	}
	forward, reverse := w.path("web", model.Forward), w.path("web", model.Reverse)
	since, back := w.counting(forward), w.counting(reverse)
	w.reaches("h1", "h2")
	w.reaches("h2", "h1")
	const size = 500_000
	w.download("h1", "h2", size)
	if a, b := since().frames(), back().frames(); a+b < size/1500 {
		t.Errorf("%d frames were stamped and verified forward, %d back; want %d or more", a, b, size/1500)
	}

	// The link is cut in the midst of a stream.
	by := func(router, device string) uint64 {
		t.Helper()
		n, err := w.net(router).Received(device)
		must(t, err)
		return n
	}
	s := w.stream("h1", "h2")
	s.more(size)
	byF := by("f", "f-b")
	w.ip("r1", "link set r1-a down")
	leads("r1", "r2", "r1-b")
	leads("r2", "r1", "r2-f")
	for _, way := range [][3]string{{"b", "16002", "b-f"}, {"f", "16002", "f-r2"}, {"f", "16001", "f-b"}, {"b", "16001", "b-r1"}} {
		w.takes(way[0], way[1], way[2])
	}
	s.more(size)
	if n := by("f", "f-b") - byF; n < size/1500/2 {
		t.Errorf("%d packets have come to f by b since the link was cut; want %d or more", n, size/1500/2)
	}
	// It is whole again: the IGP takes the old way, and nobody is told.
	w.ip("r1", "link set r1-a up")
	leads("r1", "r2", "r1-a")
	leads("r2", "r1", "r2-e")
	for _, way := range [][3]string{{"a", "16002", "a-e"}, {"e", "16002", "e-r2"}, {"e", "16001", "e-a"}, {"a", "16001", "a-r1"}} {
		w.takes(way[0], way[1], way[2])
	}
	s.more(size)
	s.finish()
	since, back = w.counting(forward), w.counting(reverse)
	w.reaches("h1", "h2")
	w.download("h2", "h1", size)
	if a, b := since().frames(), back().frames(); a+b < size/1500 {
		t.Errorf("with the link whole again %d frames were stamped and verified forward, %d back; want %d or more", a, b, size/1500)
	}
	// While routes changed, nodes had no way for a moment, or did not know a neighbour yet. The others are routers without an agent.
	for _, n := range []string{"r1", "r2", "r6"} {
		c, err := w.counters(n)
		must(t, err)
		for _, r := range c.Refusals {
			if r.Dropped+r.Reported > 0 && r.Reason != "no-route" && r.Reason != "no-neighbour" {
				t.Errorf("%s has refused %d packets: %s", n, r.Dropped+r.Reported, r.Reason)
			}
		}
	}
}
