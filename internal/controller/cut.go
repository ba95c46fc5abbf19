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
	var flows []model.Match // two for each of names
	var names []string
	for _, name := range slices.Sorted(maps.Keys(connections)) {
		if there, ok := connections[name].flow(); ok {
			flows, names = append(flows, there, there.Reverse()), append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	var matches []model.Match
	var chains []int // that they are of
	for i, ch := range d.Chains {
		for _, m := range matchesOf(ch) {
			matches, chains = append(matches, m), append(chains, i)
		}
	}
	taken := map[int]map[int]bool{} // by chain: which of names
	model.EachOverlap(matches, flows, func(i, j int) bool {
		if taken[chains[i]] == nil {
			taken[chains[i]] = map[int]bool{}
		}
		taken[chains[i]][j/2] = true
		return true
	})
	for _, i := range slices.Sorted(maps.Keys(taken)) {
		x := cut{chain: d.Chains[i]}
		for _, n := range slices.Sorted(maps.Keys(taken[i])) {
			x.nodes = append(x.nodes, names[n])
		}
		s := connections[x.nodes[0]]
		x.flow = fmt.Sprintf("%s to %s", s.remote.Addr().Unmap(), s.local.Addr().Unmap())
		if port := s.local.Port(); port != 0 {
			x.flow += fmt.Sprintf(" port %d", port)
		}
		out = append(out, x)
	}
	return out
}

// matchesOf are a chain's, in both directions; none by mark: a connection's packets have no mark.
func matchesOf(ch model.Chain) []model.Match {
	switch {
	case ch.Match.ByMark():
		return nil
	case ch.Both:
		return []model.Match{ch.Match, ch.Match.Reverse()}
	}
	return []model.Match{ch.Match}
}

// flow matches the packets of a session to the controller. The node's port is another one at the next time. false: it is not known, or no
// chain ever takes them.
func (s session) flow() (there model.Match, ok bool) {
	if !s.local.IsValid() || !s.remote.IsValid() {
		return there, false
	}
	for _, a := range []netip.Addr{s.local.Addr().Unmap(), s.remote.Addr().Unmap()} {
		if a.IsLoopback() || a.IsLinkLocalUnicast() {
			return there, false
		}
	}
	host := func(a netip.Addr) netip.Prefix {
		a = a.Unmap().WithZone("")
		return netip.PrefixFrom(a, a.BitLen())
	}
	const tcp = 6
	there = model.Match{Priority: 1, Destination: host(s.local.Addr()), Source: host(s.remote.Addr()), Protocol: tcp, DSCP: 1} // code point 0
	if port := s.local.Port(); port != 0 {
		there.DestinationPort = model.Ports{First: port, Last: port}
	}
	return there, true
}
