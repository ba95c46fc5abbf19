package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Two ways of equal cost in a core of nodes that pass labels on:
//
//	                e
//	               / \
//	h1 - r1 --- a     r2 (fw) --- r6 - h2
//	               \ /
//	                f
const equalWays = `
version: 1
domain:
  block: fc00::/48
  mpls: {services: 100000, mtu: 1700}
nodes:
  - {name: r1, address: fc00:1::1, locator: fc00:0:0:100::/56, mpls: {label: 16001, address: 10.255.0.1}, interfaces: [{name: r1-h1, role: edge}, {name: r1-a, role: core}]}
  - {name: r2, address: fc00:2::1, locator: fc00:0:0:200::/56, mpls: {label: 16002, address: 10.255.0.2}, interfaces: [{name: r2-e, role: core}, {name: r2-f, role: core}, {name: r2-r6, role: core}]}
  - {name: r6, address: fc00:6::1, locator: fc00:0:0:600::/56, mpls: {label: 16006, address: 10.255.0.6}, interfaces: [{name: r6-h2, role: edge}, {name: r6-r2, role: core}]}
  - {name: a, address: fc00:a::1, locator: fc00:0:0:a00::/56, mpls: {label: 16010, address: 10.255.0.10}, interfaces: [{name: a-r1, role: core}, {name: a-e, role: core}, {name: a-f, role: core}]}
  - {name: e, address: fc00:e::1, locator: fc00:0:0:e00::/56, mpls: {label: 16014, address: 10.255.0.14}, interfaces: [{name: e-a, role: core}, {name: e-r2, role: core}]}
  - {name: f, address: fc00:f::1, locator: fc00:0:0:f00::/56, mpls: {label: 16015, address: 10.255.0.15}, interfaces: [{name: f-a, role: core}, {name: f-r2, role: core}]}
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
    - {between: [a, f]}
    - {between: [e, r2]}
    - {between: [f, r2]}
    - {between: [r2, r6]}
`

// nodeOf is a node of the domain by its name.
func (w *world) nodeOf(name string) model.Node {
	w.t.Helper()
	i := slices.IndexFunc(w.manifest.Domain.Nodes, func(n model.Node) bool { return n.Name == name })
	if i < 0 {
		w.t.Fatalf("the domain has no node %s", name)
	}
	return w.manifest.Domain.Nodes[i]
}

// neighboured waits until the kernel of a node knows the link-layer address of a neighbour.
func (w *world) neighboured(node, neighbour string) {
	w.t.Helper()
	a := w.nodeOf(neighbour).MPLS.Address.String()
	eventually(w.t, func() error {
		if said := w.shell(node, "ip", "-4", "neigh", "show", "to", a, "dev", node+"-"+neighbour); !strings.Contains(said, "lladdr") {
			return fmt.Errorf("%s has the neighbour %s as %q", node, neighbour, said)
		}
		return nil
	})
}

// spread is how many packets of a path came to routers with each entropy label.
type spread map[uint32]map[string]int

func (s spread) by(router string) (n int) {
	for _, at := range s {
		n += at[router]
	}
	return n
}

// readSpread reads what has come in to routers.
func (w *world) readSpread(p plan.Path, recorded map[string]*frames) (s spread) {
	s = spread{}
	for router, r := range recorded {
		for _, b := range r.soFar() {
			v, err := mpls.ParseFrame(b, w.manifest.Domain.MPLS.IsService)
			if err != nil || v.Proof == nil {
				continue
			}
			if proof, ok := srv6.ReadProof(*v.Proof); !ok || proof.Path != p.Path {
				continue
			}
			const indicator = 7
			at := slices.IndexFunc(v.Stack, func(e mpls.Entry) bool { return e.Label() == indicator })
			if at < 0 || at+1 == len(v.Stack) {
				w.t.Fatalf("a packet came to %s with the stack %v, without an entropy label", router, v.Stack)
			}
			label := v.Stack[at+1].Label()
			if s[label] == nil {
				s[label] = map[string]int{}
			}
			s[label][router]++
		}
	}
	return s
}

// Of two routes of equal cost to the next node the entropy label chooses one, at a node that passes labels on (a) and at one that is
// visited (r2). All packets of a chain have the same other labels.
func TestNodesChooseAmongEqualRoutesByTheEntropyLabel(t *testing.T) {
	t.Parallel()
	w := buildFrom(t, parse(t, equalWays), func(c *lab.Config) { c.WithoutAgents = true })
	w.ipv4 = true
	for node, to := range map[string]string{"a": "r2", "r2": "r1"} {
		route := []string{"ip", "-4", "route", "replace", w.nodeOf(to).MPLS.Address.String() + "/32", "proto", "static"}
		for _, by := range []string{"e", "f"} {
			route = append(route, "nexthop", "via", w.nodeOf(by).MPLS.Address.String(), "dev", node+"-"+by, "onlink")
		}
		w.shell(node, route...)
		must(t, w.net(node).SetSysctl("net/ipv4/fib_multipath_hash_policy", "1")) // by the fields that have the entropy label
	}
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
	}
	for _, k := range w.manifest.Lab.Links {
		w.neighboured(k.A, k.B)
		w.neighboured(k.B, k.A)
	}
	w.reaches("h1", "h2")
	forward, reverse := w.path("web", model.Forward), w.path("web", model.Reverse)
	there := map[string]*frames{"e": w.record("e", "e-a"), "f": w.record("f", "f-a")}
	andBack := map[string]*frames{"e": w.record("e", "e-r2"), "f": w.record("f", "f-r2")}
	const flows, each = 64, 3
	w.manyFlows(flows, each)
	for _, c := range []struct {
		path     plan.Path
		recorded map[string]*frames
	}{{forward, there}, {reverse, andBack}} {
		s := w.spreadOf(c.path, c.recorded, flows, each)
		// A node remembers a way for every abi.Flows-th flow together.
		if s.by("e") == 0 || s.by("f") == 0 {
			t.Errorf("%s: %d packets went by e and %d by f; want both ways", c.path.Direction, s.by("e"), s.by("f"))
		}
	}
	for _, n := range w.nodes() {
		c, err := w.counters(n)
		must(t, err)
		for _, r := range c.Refusals {
			if r.Dropped > 0 && r.Reason != "no-neighbour" {
				t.Errorf("%s has refused %d packets: %s", n, r.Dropped, r.Reason)
			}
		}
	}
}

// While no agent runs, the programs follow the kernel's routes: a route is replaced, and an interface goes down for which another
// route stands in. A next hop that nobody has the kernel look for is known once an agent runs.
func TestRoutesOfLabelsChangeWithoutAnAgent(t *testing.T) {
	t.Parallel()
	w := buildFrom(t, parse(t, equalWays), func(c *lab.Config) { c.WithoutAgents = true })
	w.ipv4 = true
	address := func(n string) string { return w.nodeOf(n).MPLS.Address.String() }
	// leads makes a node reach another by a gateway.
	leads := func(node, to, gateway, device, metric string) {
		t.Helper()
		w.shell(node, "ip", "-4", "route", "replace", address(to)+"/32", "via", gateway, "dev", device, "onlink", "metric", metric)
	}
	for node, to := range map[string]string{"a": "r2", "r2": "r1"} {
		w.shell(node, "ip", "-4", "route", "del", address(to)+"/32")
		leads(node, to, address("e"), node+"-e", "10")
		leads(node, to, address("f"), node+"-f", "20")
	}
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
	}
	for _, k := range w.manifest.Lab.Links {
		w.neighboured(k.A, k.B)
		w.neighboured(k.B, k.A)
	}
	w.reaches("h1", "h2")
	for _, n := range w.nodes() {
		must(t, w.StopAgent(soon(t), n))
	}
	forward, reverse := w.path("web", model.Forward), w.path("web", model.Reverse)
	there := map[string]*frames{"e": w.record("e", "e-a"), "f": w.record("f", "f-a")}
	andBack := map[string]*frames{"e": w.record("e", "e-r2"), "f": w.record("f", "f-r2")}
	s := w.stream("h1", "h2")
	// takes waits until packets of a path come by one router and not by the other.
	takes := func(p plan.Path, recorded map[string]*frames, router, other string) {
		t.Helper()
		eventually(t, func() error {
			before := w.readSpread(p, recorded)
			s.more(50_000)
			now := w.readSpread(p, recorded)
			if n, o := now.by(router)-before.by(router), now.by(other)-before.by(other); n < 3 || o != 0 {
				return fmt.Errorf("%s: %d packets came by %s, %d by %s", p.Direction, n, router, o, other)
			}
			return nil
		})
	}
	takes(forward, there, "e", "f")
	takes(reverse, andBack, "e", "f")
	leads("r2", "r1", address("f"), "r2-f", "5")
	takes(reverse, andBack, "f", "e")
	w.shell("a", "ip", "link", "set", "a-e", "down")
	takes(forward, there, "f", "e")
	s.finish()

	// An address of f that nobody has asked for.
	const second = "10.255.9.9"
	w.shell("f", "ip", "-4", "address", "add", second+"/32", "dev", "lo")
	leads("a", "r2", second, "a-f", "5")
	eventually(t, func() error { // what the programs remember counts for less than a second
		if got := w.ping("h1", "h2", lab.PingConfig{Count: 1, Timeout: lostTime}); got != 0 {
			return errors.New("an echo request is answered, though its next hop has no link-layer address")
		}
		return nil
	})
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
	}
	eventually(t, func() error {
		if got := w.ping("h1", "h2", lab.PingConfig{Count: 1, Timeout: lostTime}); got != 1 {
			return errors.New("the agent of a runs again, and an echo request is not answered")
		}
		return nil
	})
	w.reaches("h1", "h2")
	for _, n := range w.nodes() {
		c, err := w.counters(n)
		must(t, err)
		unknown := uint64(0)
		for _, r := range c.Refusals {
			switch {
			case r.Reason == "no-neighbour":
				unknown = r.Dropped
			case r.Reason == "no-route": // for a moment, while an interface goes down
			case r.Dropped > 0:
				t.Errorf("%s has refused %d packets: %s", n, r.Dropped, r.Reason)
			}
		}
		if n == "a" && unknown == 0 {
			t.Error("a has refused nothing for want of a link-layer address")
		}
	}
}

// manyFlows sends datagrams of flows from h1 to h2, each of which is answered.
func (w *world) manyFlows(flows, each int) {
	w.t.Helper()
	server := w.udp("h2", "udp4", netip.AddrPortFrom(w.addr("h2"), 9).String())
	buf := make([]byte, 64)
	pass := func(from *net.UDPConn, to netip.AddrPort, at *net.UDPConn) netip.AddrPort {
		w.t.Helper()
		_, err := from.WriteToUDPAddrPort([]byte("a datagram"), to)
		must(w.t, err)
		must(w.t, at.SetReadDeadline(time.Now().Add(settleTime)))
		_, peer, err := at.ReadFromUDPAddrPort(buf)
		must(w.t, err)
		return netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port())
	}
	for i := range flows {
		client := w.udp("h1", "udp4", netip.AddrPortFrom(w.addr("h1"), uint16(10000+i)).String())
		for range each {
			peer := pass(client, netip.AddrPortFrom(w.addr("h2"), 9), server)
			pass(server, peer, client)
		}
	}
}

// spreadOf waits until all packets of manyFlows have come to routers, and checks that each flow has an entropy label of its own.
func (w *world) spreadOf(p plan.Path, recorded map[string]*frames, flows, each int) (s spread) {
	w.t.Helper()
	eventually(w.t, func() error {
		s = w.readSpread(p, recorded)
		if n := s.by("e") + s.by("f"); n != flows*each {
			return fmt.Errorf("%s: %d packets have come by e, %d by f; want %d", p.Direction, s.by("e"), s.by("f"), flows*each)
		}
		return nil
	})
	w.t.Logf("%s: %d flows with %d entropy labels, %d packets by e, %d by f", p.Direction, flows, len(s), s.by("e"), s.by("f"))
	if len(s) < flows-2 { // of a million labels
		w.t.Errorf("%s: %d flows have %d entropy labels", p.Direction, flows, len(s))
	}
	return s
}
