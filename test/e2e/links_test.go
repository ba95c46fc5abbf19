package e2e

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// A link in the middle of a chain is one of bridges, and the edge is a macvlan. They are in the plan, and what is
// below them is not.
func TestChainOverBridgesAndAMacvlan(t *testing.T) {
	m := parse(t, narrowing, proven(model.SchemeKeyed))
	for old, replaced := range map[string]string{"r2-r3": "bridged", "r3-r2": "bridged", "r1-h1": "edge"} {
		node, _, _ := strings.Cut(old, "-")
		at := slices.IndexFunc(m.Domain.Nodes, func(n model.Node) bool { return n.Name == node })
		i := slices.IndexFunc(m.Domain.Nodes[at].Interfaces, func(i model.Interface) bool { return i.Name == old })
		m.Domain.Nodes[at].Interfaces[i].Name = replaced
	}
	w := buildFrom(t, m, func(c *lab.Config) { c.WithoutAgents = true })
	for node, port := range map[string]string{"r2": "r2-r3", "r3": "r3-r2"} {
		must(t, w.net(node).AddBridge("bridged", port))
		must(t, w.net(node).SetMTU("bridged", 1700))
	}
	w.shell("r1", "ip", "link", "add", "link", "r1-h1", "name", "edge", "type", "macvlan", "mode", "private")
	must(t, w.net("r1").SetUp("edge"))
	w.moveLink(movedEnd{"r2", "r2-r3", "bridged"}, movedEnd{"r3", "r3-r2", "bridged"}, movedEnd{"r1", "r1-h1", "edge"})
	w.shell("h1", "ip", "neighbour", "flush", "dev", "h1-r1") // r1's address has another link-layer address now
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
	}
	w.silent = false

	w.reaches("h1", "h2")
	for _, way := range []struct {
		direction model.Direction
		from, to  string
	}{{model.Forward, "h1", "h2"}, {model.Reverse, "h2", "h1"}} {
		const size = 2_000_000
		since := w.counting(w.path("web", way.direction))
		w.download(way.from, way.to, size)
		if n := since().frames(); n < size/1500 {
			t.Errorf("from %s: %d frames were stamped and verified; want %d or more", way.from, n, size/1500)
		}
	}

	// The guard is on the macvlan, by which h1's packets come.
	r1, err := w.net("r1").HardwareAddress("edge")
	must(t, err)
	outside := openPort(t, w.ns("h1"), "h1-r1", unix.ETH_P_IPV6)
	for _, sid := range w.path("web", model.Forward).Segments() {
		must(t, sendBy(outside, srv6.Packet{
			Ethernet: &srv6.Ethernet{Destination: r1, Source: outside.MAC, Type: srv6.EtherTypeIPv6},
			Header:   srv6.Header{NextHeader: unix.IPPROTO_NONE, HopLimit: 64, Source: netip.MustParseAddr("fc00:7::2"), Destination: sid},
		}))
	}
	w.refused("r1", "outside-sid", uint64(len(w.path("web", model.Forward).Segments())))
}

// movedEnd is a node's end of a link: the interface that has its addresses and routes, and the one that gets them.
type movedEnd struct{ node, from, to string }

// moveLink moves the addresses and routes of both ends of a link to other interfaces.
func (w *world) moveLink(ends ...movedEnd) {
	w.t.Helper()
	for _, e := range ends {
		for _, a := range w.addressesOf(e.node, e.from) {
			must(w.t, w.net(e.node).AddAddress(e.to, a))
		}
	}
	for _, e := range ends {
		n := w.net(e.node)
		must(w.t, n.WaitUp(soon(w.t), e.to))
		routes, err := n.Routes(host.ProtocolStatic)
		must(w.t, err)
		for _, r := range routes {
			if r.Device != e.from || !r.Via.IsValid() {
				continue
			}
			must(w.t, n.DeleteRoute(r))
			r.Device = e.to
			must(w.t, n.AddRoute(r))
		}
		for _, a := range w.addressesOf(e.node, e.from) {
			must(w.t, n.DeleteAddress(e.from, a))
		}
	}
}

// addressesOf are an interface's, of IPv6.
func (w *world) addressesOf(node, device string) (out []netip.Prefix) {
	w.t.Helper()
	for line := range strings.Lines(w.shell(node, "ip", "-6", "-o", "address", "show", "dev", device)) {
		f := strings.Fields(line) // INDEX: NAME inet6 PREFIX scope ...
		if len(f) < 4 || f[2] != "inet6" {
			w.t.Fatalf("ip says %q", line)
		}
		out = append(out, netip.MustParsePrefix(f[3]))
	}
	return out
}
