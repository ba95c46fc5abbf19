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
	// NextHops fails with host.ErrNoWay where no route leads.
	NextHops(to netip.Addr) ([]host.Neighbour, error)
	// ManageNeighbours has the kernel keep these, and no others by waystamp's mark.
	ManageNeighbours(want []host.Neighbour) (added, removed int, err error)
}

const failedNeighbours = "the next hops of packets with labels could not be kept"

var warnWays = warningKind{"no route leads to a node of the domain's labels", "a route leads to the node of the domain's labels again"}

// nextHops are the next hops to all other nodes of a plan's labels, each once, and the nodes
// without a route.
func nextHops(net neighbours, n plan.Node) (hops []host.Neighbour, noWay []string, err error) {
	if n.MPLS == nil {
		return nil, nil, nil
	}
	var errs []error
	for _, to := range n.MPLS.Nodes {
		if to.Name == n.Name {
			continue
		}
		more, err := net.NextHops(to.Address)
		switch {
		case errors.Is(err, host.ErrNoWay):
			noWay = append(noWay, fmt.Sprintf("no route leads to %s, so packets with the label of %s (%d) are refused (no-route); add a route to that address, and check it with ip route get %[1]s",
				to.Address, to.Name, to.Label))
		case err != nil:
			errs = append(errs, err)
		}
		for _, h := range more {
			if !slices.Contains(hops, h) {
				hops = append(hops, h)
			}
		}
	}
	return hops, noWay, errors.Join(errs...)
}

// keepNeighbours has the kernel resolve the next hops of the plan in force, as routes are now. On an
// error it has done as much as it could; the next reconciliation tries again.
func (a *agent) keepNeighbours() {
	if a.plan == nil || a.plan.MPLS == nil && a.noNeighbours {
		return
	}
	hops, noWay, err := nextHops(a.net, *a.plan)
	added, removed := 0, 0
	if err == nil { // after an error the list may lack a next hop in use
		added, removed, err = a.net.ManageNeighbours(hops)
	}
	if added+removed > 0 {
		a.cfg.Log.Info("the next hops of packets with labels have changed", "added", added, "removed", removed)
	}
	a.warn(warnWays, noWay)
	a.noNeighbours = err == nil && a.plan.MPLS == nil
	if err != nil {
		a.fail(failedNeighbours, err)
	}
}
