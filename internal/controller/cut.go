package controller

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/model"
)

// cut is a chain that takes packets between nodes and the controller. Where these reach one of its headends they need
// the chain, and where they reach its egress they need a proof: a node that lost its plan could not get another one.
type cut struct {
	chain model.Chain
	nodes []string
	flow  string // of the first of the nodes
}

func (c cut) String() string {
	return fmt.Sprintf("chain %s takes the packets between the controller and %s (%s): they could be cut off from the controller", c.chain.Name, strings.Join(c.nodes, ", "), c.flow)
}

// isNew tells whether a domain did not have the chain, or had it for other packets or at other nodes.
func (c cut) isNew(was model.Domain) bool {
	at := func(ch model.Chain) model.Chain {
		return model.Chain{Name: ch.Name, Ingress: ch.Ingress, Egress: ch.Egress, Match: ch.Match, OwnTraffic: ch.OwnTraffic, Both: ch.Both}
	}
	return !slices.ContainsFunc(was.Chains, func(ch model.Chain) bool { return reflect.DeepEqual(at(ch), at(c.chain)) })
}

// cutOff are the chains of a domain that take packets of connections with nodes.
func cutOff(d model.Domain, connections map[string]session) (out []cut) {
	for _, ch := range d.Chains {
		x := cut{chain: ch}
		for _, name := range slices.Sorted(maps.Keys(connections)) {
			s := connections[name]
			if !s.local.IsValid() || !s.remote.IsValid() || !takes(ch, s) {
				continue
			}
			if x.nodes = append(x.nodes, name); x.flow == "" {
				x.flow = fmt.Sprintf("%s to %s", s.remote.Addr().Unmap(), s.local.Addr().Unmap())
				if port := s.local.Port(); port != 0 {
					x.flow += fmt.Sprintf(" port %d", port)
				}
			}
		}
		if len(x.nodes) > 0 {
			out = append(out, x)
		}
	}
	return out
}

// takes tells whether a chain, in either direction, matches packets of a connection, in either direction. The node's
// port is another one at the next time.
func takes(ch model.Chain, s session) bool {
	host := func(a netip.Addr) netip.Prefix {
		a = a.Unmap().WithZone("")
		return netip.PrefixFrom(a, a.BitLen())
	}
	const tcp = 6
	there := model.Match{Priority: 1, Destination: host(s.local.Addr()), Source: host(s.remote.Addr()), Protocol: tcp, DSCP: 1} // code point 0
	if port := s.local.Port(); port != 0 {
		there.DestinationPort = model.Ports{First: port, Last: port}
	}
	if ch.Match.ByMark() { // the connection's packets have none
		return false
	}
	for _, a := range []netip.Addr{s.local.Addr().Unmap(), s.remote.Addr().Unmap()} {
		if a.IsLoopback() || a.IsLinkLocalUnicast() { // no chain ever takes these
			return false
		}
	}
	matches := []model.Match{ch.Match}
	if ch.Both {
		matches = append(matches, ch.Match.Reverse())
	}
	return slices.ContainsFunc(matches, func(m model.Match) bool { return m.Overlaps(there) || m.Overlaps(there.Reverse()) })
}
