package plan

import (
	"fmt"

	"github.com/waystamp/waystamp/internal/model"
)

// from is the part of a path behind one of its hops, as a path of its own: the hop's
// node is its headend. It visits the rest of the hops at the SIDs where p does, and it
// says of packets what p says, so that the node needs no number of SIDs more and a
// sender sees one MTU. Its replay window is small: it holds what a function makes
// itself. It has neither id nor secrets yet.
func (p Path) from(hop int, headend model.Node) Path {
	start := p.Hops[hop]
	id := p.PathID
	id.Path, id.Epoch, id.From = 0, 0, start.Function
	return Path{
		PathID:      id,
		Match:       p.Match,
		OnViolation: p.OnViolation,
		Window:      model.WindowMin,
		Ingress:     []Ingress{{Node: start.Node, Address: headend.Address, Lanes: uint16(cpus(headend))}},
		Hops:        append([]Hop{{Node: start.Node}}, p.Hops[hop+1:]...),
		MTU:         p.MTU,
		MSS:         p.MSS,
	}
}

// fromFunctions are the paths that start at functions: for each path through one that
// originates, what is left of it there. Where a path visits the function several times
// it is the first visit: what was made at a later one then goes by more of the chain than
// it need, and never by less. Nobody but the chain's headend sees a mark, so that chains
// by mark have none.
//
// Where two directions of chains take the same packets, nothing says which of them a
// packet is of.
func (c *compiler) fromFunctions(paths []Path) ([]Path, error) {
	var out []Path
	type claim struct {
		function string
		match    model.Match
	}
	claims := map[claim]PathID{}
	for _, p := range paths {
		if p.Match.ByMark() {
			continue
		}
		seen := map[string]bool{}
		for j, h := range p.Hops {
			if h.Function == "" || seen[h.Function] || c.functions[h.Function].Proxy.OnUnknown != model.OnUnknownOriginate {
				continue
			}
			seen[h.Function] = true
			k := claim{h.Function, p.Match}
			k.match.Destination, k.match.Source = p.Match.Whole()
			if other, ok := claims[k]; ok {
				return nil, fmt.Errorf("function %s: %s and %s take the same packets (%s), so that nothing says which of them a packet is of that the function makes itself; say on-unknown: drop at the function, or make the matches differ",
					h.Function, other, p.PathID, p.Match)
			}
			claims[k] = p.PathID
			out = append(out, p.from(j, c.nodes[h.Node]))
		}
	}
	return out, nil
}
