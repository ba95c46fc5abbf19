//go:build stock

package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

// The link in the middle of a chain is a bond of two. One of them fails in the midst of a stream.
func TestStockChainOverABond(t *testing.T) {
	m := parse(t, narrowing, proven(model.SchemeKeyed))
	// The bond is in the plan, and the devices that it is made of are not.
	for node, old := range map[string]string{"r2": "r2-r3", "r3": "r3-r2"} {
		at := slices.IndexFunc(m.Domain.Nodes, func(n model.Node) bool { return n.Name == node })
		i := slices.IndexFunc(m.Domain.Nodes[at].Interfaces, func(i model.Interface) bool { return i.Name == old })
		m.Domain.Nodes[at].Interfaces[i].Name = "bonded"
	}
	w := buildFrom(t, m, func(c *lab.Config) { c.WithoutAgents = true })
	must(t, w.net("r2").AddVeth(host.Veth{Name: "second", PeerName: "second", Peer: w.ns("r3"), MTU: 1700}))
	var ends []movedEnd
	for node, first := range map[string]string{"r2": "r2-r3", "r3": "r3-r2"} {
		w.shell(node, "ip", "link", "add", "bonded", "type", "bond", "mode", "active-backup", "miimon", "20")
		must(t, w.net(node).SetMTU("bonded", 1700))
		ends = append(ends, movedEnd{node, first, "bonded"})
	}
	bond := func() {
		for _, e := range ends {
			for _, member := range []string{e.from, "second"} {
				w.shell(e.node, "ip", "link", "set", member, "down")
				w.shell(e.node, "ip", "link", "set", member, "master", "bonded")
				w.shell(e.node, "ip", "link", "set", member, "up")
			}
		}
	}
	for _, e := range ends {
		must(t, w.net(e.node).SetUp("bonded"))
	}
	w.moveToBond(ends, bond)
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
	}
	active := func(node string) string {
		said := strings.TrimSpace(w.shell(node, "cat", "/proc/net/bonding/bonded"))
		for line := range strings.Lines(said) {
			if name, ok := strings.CutPrefix(line, "Currently Active Slave: "); ok {
				return strings.TrimSpace(name)
			}
		}
		return ""
	}
	w.reaches("h1", "h2")
	s := w.stream("h1", "h2")
	const piece = 500_000
	s.more(piece)
	before := active("r2")
	received := func(name string) uint64 {
		t.Helper()
		n, err := w.net("r3").Received(name)
		must(t, err)
		return n
	}
	other := map[string]string{"r2-r3": "second", "second": "r2-r3"}[before]
	far := map[string]string{"r2-r3": "r3-r2", "second": "second"}[other]
	if other == "" {
		t.Fatalf("the bond of r2 sends by %q", before)
	}
	w.shell("r2", "ip", "link", "set", before, "down")
	eventually(t, func() error {
		if now := active("r2"); now != other {
			return fmt.Errorf("the bond of r2 sends by %q, want %q", now, other)
		}
		return nil
	})
	was := received(far)
	s.more(piece)
	if n := received(far) - was; n < piece/1500/50 {
		t.Errorf("%d packets came by %s behind the failure", n, far)
	}
	s.finish()
	if s.resent == 0 {
		t.Log("the failure has cost no packet")
	}
	// The failed device has taken packets with it; by the other one none is lost.
	since := w.counting(w.path("web", model.Forward))
	w.download("h1", "h2", piece)
	if n := since().frames(); n < piece/1500 {
		t.Errorf("%d frames were stamped and verified; want %d or more", n, piece/1500)
	}
}

// XDP on an interface leaves the frames of a VLAN on top of it, which is not in the plan, to the kernel, and takes the chain's.
func TestStockXDPLeavesVLANsAlone(t *testing.T) {
	w := buildOnXDP(t, model.SchemeKeyed)
	v := tag{7, "802.1Q"}
	for node, lower := range map[string]string{"r2": "r2-r3", "r3": "r3-r2"} {
		w.addVLAN(node, lower, v)
	}
	far := netip.MustParsePrefix("fc00:99::3/64")
	must(t, w.net("r2").AddAddress("r2-r3.7", netip.MustParsePrefix("fc00:99::2/64")))
	must(t, w.net("r3").AddAddress("r3-r2.7", far))
	for node, name := range map[string]string{"r2": "r2-r3.7", "r3": "r3-r2.7"} {
		must(t, w.net(node).WaitUp(soon(t), name))
	}
	w.reaches("h1", "h2")
	tagged, err := w.net("r3").Received("r3-r2.7")
	must(t, err)
	ran, since := w.runs("r3", "ws_core_xdp"), w.counting(w.path("web", model.Forward))
	const n = 50
	r, err := lab.Ping(soon(t), w.ns("r2"), far.Addr(), lab.PingConfig{Count: n, Interval: time.Millisecond, Timeout: settleTime})
	must(t, err)
	if r.Received != n {
		t.Errorf("%d of %d echo requests in the VLAN were answered", r.Received, n)
	}
	if got, err := w.net("r3").Received("r3-r2.7"); err != nil || got-tagged < n {
		t.Errorf("%d frames came by the VLAN, %v; want %d or more", got-tagged, err, n)
	}
	if got := ran(); got < n {
		t.Errorf("XDP ran %d times for %d frames of the VLAN", got, n)
	}
	if got := since().frames(); got != 0 {
		t.Errorf("the chain has counted %d frames, all of them of the VLAN", got)
	}
	if got := w.ping("h1", "h2", lab.PingConfig{Count: n, Interval: time.Millisecond, Timeout: settleTime}); got != n {
		t.Errorf("%d of %d echo requests were answered through the chain", got, n)
	}
	if got := since().frames(); got != n {
		t.Errorf("the chain has counted %d frames, want %d", got, n)
	}
}

// moveToBond moves addresses and routes to a bond while its members are made members: that takes addresses of IPv6 away from
// them, and a bond is not up without them.
func (w *world) moveToBond(ends []movedEnd, bond func()) {
	w.t.Helper()
	type kept struct {
		addresses []netip.Prefix
		routes    []host.Route
	}
	all := make([]kept, len(ends))
	for i, e := range ends {
		all[i].addresses = w.addressesOf(e.node, e.from)
		routes, err := w.net(e.node).Routes(host.ProtocolStatic)
		must(w.t, err)
		for _, r := range routes {
			if r.Device == e.from && r.Via.IsValid() {
				all[i].routes = append(all[i].routes, r)
			}
		}
	}
	bond()
	for i, e := range ends {
		n := w.net(e.node)
		must(w.t, n.WaitUp(soon(w.t), e.to))
		for _, a := range all[i].addresses {
			must(w.t, n.AddAddress(e.to, a))
		}
		for _, r := range all[i].routes {
			r.Device = e.to
			must(w.t, n.ReplaceRoute(r))
		}
	}
}
