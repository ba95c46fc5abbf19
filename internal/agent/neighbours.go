package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/plan"
)

// neighbours are the next hops of packets with labels. The programs write link-layer
// addresses themselves, and the kernel sends nothing there that would have it find them.
type neighbours interface {
	// Ways and NextHops fail with host.ErrNoWay where no route leads.
	Ways(to netip.Addr) ([]host.Way, error)
	NextHops(to netip.Addr) ([]host.Neighbour, error)
	// ManageNeighbours has the kernel keep these, and no others by waystamp's mark.
	ManageNeighbours(want []host.Neighbour) (added, removed int, err error)
}

const failedNeighbours = "the next hops of packets with labels could not be kept"

var warnWays = warningKind{"no route leads to a node of the domain's labels", "a route leads to the node of the domain's labels again"}

// labelWays are the ways to the other nodes of a plan's labels, as routes are now.
type labelWays struct {
	hops []host.Neighbour // all next hops, each once
	// The gateway that the programs look up in place of a node's address, by the node's label: the kernel
	// tells programs no next hop of a route that pushes labels, as those of segment routing daemons do.
	gateways map[uint32]netip.Addr
	warnings []string // of nodes that nothing can be sent to
}

// waysOf finds the ways to all other nodes of a plan's labels. After an error the rest is there.
func waysOf(net neighbours, n plan.Node) (w labelWays, err error) {
	if n.MPLS == nil {
		return w, nil
	}
	w.gateways = map[uint32]netip.Addr{}
	var errs []error
	for _, to := range n.MPLS.Nodes {
		if to.Name == n.Name {
			continue
		}
		ways, err := net.Ways(to.Address)
		switch {
		case errors.Is(err, host.ErrNoWay):
			w.warnings = append(w.warnings, fmt.Sprintf("no route leads to %s, so packets with the label of %s (%d) are refused (no-route); add a route to that address, and check it with ip route get %[1]s",
				to.Address, to.Name, to.Label))
		case err != nil:
			errs = append(errs, err)
		}
		for _, h := range ways {
			if !slices.Contains(w.hops, h.Neighbour) {
				w.hops = append(w.hops, h.Neighbour)
			}
		}
		if !slices.ContainsFunc(ways, func(h host.Way) bool { return h.Pushes }) {
			continue
		}
		gateways, err := gatewaysOf(net, to.Address, ways)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if len(gateways) == 0 {
			w.warnings = append(w.warnings, fmt.Sprintf("the route to %s pushes labels, and its gateway has no address with a route of its own, so packets with the label of %s (%d) are refused (no-route); give the links of the core addresses, and check the route with ip route get %[1]s",
				to.Address, to.Name, to.Label))
			continue
		}
		// Nodes behind equally good gateways are spread over them.
		w.gateways[to.Label] = gateways[to.Label%uint32(len(gateways))]
	}
	return w, errors.Join(errs...)
}

// gatewaysOf are the gateways among the ways to an address that programs can look up.
func gatewaysOf(net neighbours, to netip.Addr, ways []host.Way) (out []netip.Addr, err error) {
	for _, h := range ways {
		// A link-local address is on every link.
		if h.Address == to || h.Address.IsLinkLocalUnicast() {
			continue
		}
		own, err := net.Ways(h.Address)
		if err != nil && !errors.Is(err, host.ErrNoWay) {
			return nil, err
		}
		if len(own) > 0 && !slices.ContainsFunc(own, func(h host.Way) bool { return h.Pushes }) {
			out = append(out, h.Address)
		}
	}
	return out, nil
}

// keepNeighbours has the kernel resolve the next hops of the plan in force, and the programs look up the
// right addresses, as routes are now. On an error it has done as much as it could; the next reconciliation tries again.
func (a *agent) keepNeighbours() {
	if a.plan == nil || a.plan.MPLS == nil && a.noNeighbours {
		return
	}
	w, err := waysOf(a.net, *a.plan)
	added, removed := 0, 0
	if err == nil { // after an error the list may lack a next hop in use
		added, removed, err = a.net.ManageNeighbours(w.hops)
		err = errors.Join(err, a.inNamespace(func() error { return a.dp.SetGateways(w.gateways) }))
	}
	if added+removed > 0 {
		a.cfg.Log.Info("the next hops of packets with labels have changed", "added", added, "removed", removed)
	}
	a.warn(warnWays, w.warnings)
	a.noNeighbours = err == nil && a.plan.MPLS == nil
	if err != nil {
		a.fail(failedNeighbours, err)
	}
}

// lookUpGateways sets the gateways for a plan that comes into force, so that the first packets find them. What
// fails is told when the plan is in force.
func (a *agent) lookUpGateways(n plan.Node) {
	if w, err := waysOf(a.net, n); err == nil {
		_ = a.inNamespace(func() error { return a.dp.SetGateways(w.gateways) })
	}
}
