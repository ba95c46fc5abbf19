package agent

import (
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/plan"
)

func neighbour(device, address string) host.Neighbour {
	return host.Neighbour{Device: device, Address: netip.MustParseAddr(address)}
}

func TestNextHopsOfLabelsFollowRoutes(t *testing.T) {
	m := newFakeMachine()
	a := &agent{net: fakeNet{m}, dp: fakeDataPath{m}, cfg: Config{Log: slog.New(slog.NewTextHandler(io.Discard, nil))}, status: newStatusBoard("test")}
	node := func(name, address string, label uint32) plan.MPLSNode {
		return plan.MPLSNode{Name: name, Label: label, Address: netip.MustParseAddr(address)}
	}
	a.plan = &plan.Node{Name: "r1", MPLS: &plan.MPLS{Services: 100000, Label: 16001, Nodes: []plan.MPLSNode{
		node("r1", "192.0.2.1", 16001), node("r2", "192.0.2.2", 16002), node("r3", "192.0.2.3", 16003), node("r6", "2001:db8::6", 16006),
	}}}
	r2, other := neighbour("r1-r2", "192.0.2.2"), neighbour("r1-r4", "fe80::4")
	m.hops = map[string][]host.Neighbour{"192.0.2.2": {r2}, "192.0.2.3": {r2}, "2001:db8::6": {r2, other}}
	kept := func(what string, want ...host.Neighbour) {
		t.Helper()
		a.keepNeighbours()
		if !slices.Equal(m.managed, want) {
			t.Errorf("%s: %v; want %v", what, m.managed, want)
		}
	}
	kept("all routes are there", r2, other)
	if steps := m.taken(); !slices.Equal(steps, []string{"manage neighbours 2"}) {
		t.Errorf("steps: %v; the node's own address has no next hop", steps)
	}

	m.hops["2001:db8::6"] = []host.Neighbour{other}
	delete(m.hops, "192.0.2.3")
	kept("a route is gone", r2, other)
	if w := a.status.get().Warnings; len(w) != 1 || !strings.Contains(w[0], "192.0.2.3, so packets with the label of r3 (16003) are refused") {
		t.Errorf("warnings: %q", w)
	}

	// What is in use stays where routes cannot be read.
	m.fail("next hops to 192.0.2.2", errors.New("no memory"))
	m.hops["2001:db8::6"] = nil
	kept("routes cannot be read", r2, other)
	if e := a.status.get().Error; !strings.Contains(e, failedNeighbours) || !strings.Contains(e, "no memory") {
		t.Errorf("error: %q", e)
	}
	m.fail("next hops to 192.0.2.2", nil)
	kept("they can be read again", r2)

	// A plan without labels lets all go, once.
	a.plan = &plan.Node{Name: "r1"}
	m.taken()
	kept("no labels")
	kept("still none")
	if diff := cmp.Diff([]string{"manage neighbours 0"}, m.taken()); diff != "" {
		t.Errorf("steps without labels:\n%s", diff)
	}
}

// Programs are told no next hop of a route that pushes labels: they look up its gateway.
func TestGatewaysStandForNodesBehindRoutesThatPushLabels(t *testing.T) {
	m := newFakeMachine()
	a := &agent{net: fakeNet{m}, dp: fakeDataPath{m}, cfg: Config{Log: slog.New(slog.NewTextHandler(io.Discard, nil))}, status: newStatusBoard("test")}
	a.plan = &plan.Node{Name: "r1", MPLS: &plan.MPLS{Services: 100000, Label: 16001, Nodes: []plan.MPLSNode{
		{Name: "r1", Label: 16001, Address: netip.MustParseAddr("192.0.2.1")},
		{Name: "r2", Label: 16002, Address: netip.MustParseAddr("192.0.2.2")},
		{Name: "r3", Label: 16003, Address: netip.MustParseAddr("192.0.2.3")},
	}}}
	b, c := neighbour("r1-b", "198.51.100.2"), neighbour("r1-c", "198.51.100.6")
	m.hops = map[string][]host.Neighbour{
		"192.0.2.2": {b, c}, "192.0.2.3": {b, c}, // both ways are equally good
		"198.51.100.2": {b}, "198.51.100.6": {c}, // on the links
	}
	m.pushes = map[string]bool{}
	gateways := func(what string, want map[uint32]string) {
		t.Helper()
		a.keepNeighbours()
		got := map[uint32]string{}
		for label, gw := range m.gateways {
			got[label] = gw.String()
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		if !slices.Equal(m.managed, []host.Neighbour{b, c}) && len(m.hops["192.0.2.2"]) == 2 {
			t.Errorf("%s: the kernel keeps %v", what, m.managed)
		}
	}
	gateways("no route pushes labels", map[uint32]string{})
	m.pushes["192.0.2.2"], m.pushes["192.0.2.3"] = true, true
	gateways("nodes are spread over the gateways", map[uint32]string{16002: "198.51.100.2", 16003: "198.51.100.6"})
	if steps := m.taken(); !slices.Contains(steps, "gateways map[16002:198.51.100.2 16003:198.51.100.6]") {
		t.Errorf("steps: %q", steps)
	}

	// One of the links is cut.
	m.hops["192.0.2.2"], m.hops["192.0.2.3"] = []host.Neighbour{c}, []host.Neighbour{c}
	delete(m.hops, "198.51.100.2")
	gateways("one gateway is left", map[uint32]string{16002: "198.51.100.6", 16003: "198.51.100.6"})

	// A gateway that cannot be looked up: its own route pushes labels, or it is on every link.
	m.pushes["198.51.100.6"] = true
	m.hops["192.0.2.3"] = []host.Neighbour{neighbour("r1-c", "fe80::3")}
	gateways("none can be looked up", map[uint32]string{})
	w := a.status.get().Warnings
	if len(w) != 2 || !strings.Contains(w[0], "the route to 192.0.2.2 pushes labels") || !strings.Contains(w[1], "the label of r3 (16003) are refused (no-route)") {
		t.Errorf("warnings: %q", w)
	}

	// What is in use stays where routes cannot be read.
	m.pushes["198.51.100.6"] = false
	gateways("it can again", map[uint32]string{16002: "198.51.100.6"})
	m.fail("next hops to 192.0.2.3", errors.New("no memory"))
	m.pushes["192.0.2.2"] = false
	gateways("routes cannot be read", map[uint32]string{16002: "198.51.100.6"})
}
