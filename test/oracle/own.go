package oracle

import (
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Out is what becomes of a packet that is about to go out by a core interface,
// with that mark, of a node without functions in its own kernel: Pass, Drop, or
// Forward with an outer header. A first segment on the node itself is the
// packet's next arrival. Of a, Interface does not count.
func (n Node) Out(a Arrival, d Departure, mark uint32) Result {
	p := &packet{node: n, arrival: a, leaves: true, own: d.From == FromNode}
	if !p.unframe() || !n.Armed || d.Index && d.From == FromPlan {
		return p.pass()
	}
	in, ok := headerOf(p.b, p.v4)
	if !ok || !in.whole() || !n.steerable(in) || n.owns(in.destination()) {
		return p.pass()
	}
	if !p.v4 && (ipv6(p.b).hasSRH() || ipv6(p.b).isDiscovery()) ||
		in.source().Is4In6() || in.destination().Is4In6() {
		return p.pass()
	}
	own := p.own && (!isFragment(p.b, p.v4) || d.Socket)
	if h := n.leaving(in, own, mark); h != nil {
		return p.headend(h)
	}
	return p.pass()
}

// leaving is the path that takes a packet on its way out: one by its mark, or if
// it is the node's own also another that asks for those. Nil: none.
func (n Node) leaving(ip ip, own bool, mark uint32) *plan.Headend {
	n.Headends = outside(n.Headends)
	matches := n.headendMatches()
	i := choose(matches, ip, fits, func(i int) bool { return mark&matches[i].Mark.Mask == matches[i].Mark.Value })
	if i < 0 {
		return nil
	}
	h := &n.Headends[i]
	_, byDSCP := h.Match.DSCP.Value()
	switch {
	case h.Match.ByMark():
		return h
	case !own || !h.Own || isControl(ip) && !byDSCP:
		return nil
	}
	return h
}

// isControl: of class CS6 or CS7 (RFC 4594 3.1).
func isControl(ip ip) bool {
	dscp := ip.trafficClass() >> 2
	return dscp == 48 || dscp == 56
}

// isDiscovery: one of the messages of RFC 4861.
func (b ipv6) isDiscovery() bool {
	const first, last = 133, 137
	return b.nextHeader() == protocolICMPv6 && len(b) > srv6.IPv6Len &&
		b[srv6.IPv6Len] >= first && b[srv6.IPv6Len] <= last
}
