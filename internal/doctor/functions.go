package doctor

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/plan"
)

// viaPatience is how long a function's next hop may take to answer: the kernel asks three times, once a second.
const viaPatience = 4 * time.Second

// resolver asks neighbours for their link-layer addresses; *host.Net does.
type resolver interface {
	Link(name string) (host.Link, error)
	Resolves(ctx context.Context, w host.Neighbour) (bool, error)
}

// vias: whether the next hops of functions have link-layer addresses, without which no packet gets to them.
func vias(net resolver, n plan.Node) []Finding {
	var wait sync.WaitGroup
	found := make([]Finding, len(n.Proxies))
	ctx, cancel := context.WithTimeout(context.Background(), viaPatience)
	defer cancel()
	for i, p := range n.Proxies {
		// Those of other kinds are the agent's to make.
		if p.Local || p.Netfilter != nil || p.Stream != nil || p.Gateway != nil || p.To == "" || !p.Via.IsValid() {
			continue
		}
		if l, err := net.Link(p.To); err != nil || !l.Up {
			continue // Interfaces speaks of it
		}
		wait.Go(func() {
			c := check{"via", p.Function, Warning}
			switch known, err := net.Resolves(ctx, host.Neighbour{Device: p.To, Address: p.Via}); {
			case err != nil:
				found[i] = c.unknown(fmt.Errorf("function %s: %w", p.Function, err))
			case !known:
				found[i] = c.no("no packet of a chain gets to the function", fmt.Sprintf("start the function, or correct via in the domain's file (ip neighbour show dev %s)", p.To),
					"nobody answers for %s on interface %s, the next hop to function %s", p.Via, p.To, p.Function)
			default:
				found[i] = c.yes("function %s has the link-layer address of its next hop %s on interface %s", p.Function, p.Via, p.To)
			}
		})
	}
	wait.Wait()
	out := found[:0]
	for _, f := range found {
		if f.Check != "" {
			out = append(out, f)
		}
	}
	return out
}

// ingresses tells what is at the ingress of interfaces; *host.Net does.
type ingresses interface {
	Link(name string) (host.Link, error)
	AtIngress(index int) (kind string, err error)
}

// queueing: where the kernel has no tcx, clsact holds the programs, and an interface has room for one discipline there.
func queueing(net ingresses, n plan.Node, tcx bool, err error) (out []Finding) {
	if tcx {
		return nil
	}
	for _, u := range usedBy(n) {
		c := check{"qdisc", u.name, Warning}
		l, bad := net.Link(u.name)
		if errors.Is(bad, host.ErrNoLink) {
			continue // Interfaces speaks of it
		}
		kind := ""
		if bad = errors.Join(err, bad); bad == nil {
			kind, bad = net.AtIngress(l.Index)
		}
		switch {
		case bad != nil:
			out = append(out, c.unknown(bad))
		case kind != "" && kind != "clsact":
			out = append(out, c.no("no program can be attached to it", fmt.Sprintf("tc qdisc del dev %s %s; tc qdisc add dev %[1]s clsact, which has what that one has; its filters have to be added again", u.name, kind),
				"%s has the queueing discipline %s, where clsact has to be", u.of, kind))
		default:
			out = append(out, c.yes("nothing is in the way of clsact at interface %s", u.name))
		}
	}
	return out
}
