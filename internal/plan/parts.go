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

func (c *compiler) isStream(function string) bool {
	return c.functions[function].Kind == model.KindStream
}

func (c *compiler) nodeOf(function string) string { return c.functions[function].Node }

// parts are the paths of one direction of a chain: one, or as many as its functions of kind
// stream cut it into. What a proof has found wrong is reported and let go at the chain's
// own egress alone: a function gets no bytes that were not verified.
func (c *compiler) parts(ch model.Chain, dir model.Direction) []Path {
	var out []Path
	for _, part := range ch.Directed(dir).Parts(c.isStream, c.nodeOf) {
		p := c.path(part.Chain, model.Forward)
		p.Direction, p.From, p.To = dir, part.From, part.To
		switch {
		case ch.Onward == nil:
		case dir == model.Forward && p.From == "":
			p.From = model.GatewayName
		case dir == model.Reverse && p.To == "":
			p.To = model.GatewayName
		}
		if sealed(ch, p) {
			p.Seal = new(PathSeal) // whose keys the keyring has
		}
		if p.To != "" {
			p.OnViolation = model.OnViolationDrop
		}
		out = append(out, p)
	}
	return out
}

// end is the node at which paths of one direction of a chain end.
type end struct {
	chain     string
	direction model.Direction
	node      string
}

func endOf(p Path) end { return end{p.Chain, p.Direction, p.Hops[len(p.Hops)-1].Node} }

// guardPaths are the paths that guards name, at each node that a direction of a chain, or
// a part of it, ends at: the first one. Whole paths and parts come before those of what
// functions make.
func guardPaths(paths []Path) map[end]uint32 {
	first := map[end]uint32{}
	for _, p := range paths {
		if _, ok := first[endOf(p)]; !ok {
			first[endOf(p)] = p.Path
		}
	}
	return first
}

// throughs says how connections go on behind functions of kind stream, by the paths that
// end there.
func throughs(d model.Domain, paths []Path) map[uint32]*Through {
	stream := map[string]bool{}
	for _, f := range d.Functions {
		stream[f.Name] = f.Kind == model.KindStream
	}
	stream[model.GatewayName] = len(d.Services) > 0
	intrusive := map[string]bool{}
	for _, f := range d.Functions {
		intrusive[f.Name] = f.Intrusive
	}
	type side struct {
		chain     string
		direction model.Direction
		function  string
	}
	begins, ends := map[side]uint32{}, map[side]uint32{}
	for _, p := range paths {
		if p.From != "" && !stream[p.From] {
			continue // of what a function makes
		}
		begins[side{p.Chain, p.Direction, p.From}] = p.Path
		ends[side{p.Chain, p.Direction, p.To}] = p.Path
	}
	out := map[uint32]*Through{}
	for _, p := range paths {
		if p.To == "" {
			continue
		}
		if p.To == model.GatewayName && stream[p.To] {
			// Nothing comes to it by a chain but answers to what it sends.
			onward := begins[side{p.Chain, model.Forward, p.To}]
			out[p.Path] = &Through{Part: p.Path, Onward: onward, Back: onward, Other: p.Path}
			continue
		}
		other := model.Forward
		if p.Direction == model.Forward {
			other = model.Reverse
		}
		out[p.Path] = &Through{
			Part:   ends[side{p.Chain, p.Direction, p.To}],
			Onward: begins[side{p.Chain, p.Direction, p.To}],
			Back:   begins[side{p.Chain, other, p.To}],
			Other:  ends[side{p.Chain, other, p.To}],
			// To an intrusive function only the end before opens connections.
			Opens: p.Direction == model.Forward && (p.From == "" || stream[p.From] || !intrusive[p.To]),
		}
	}
	return out
}

// streamMTU is the size in bytes of the packets that fit all parts that begin at a
// function; where nothing declares one, what always fits.
func streamMTU(function string, paths []Path) int {
	mtu := 0
	for _, p := range paths {
		if p.From == function && p.MTU != 0 && (mtu == 0 || p.MTU < mtu) {
			mtu = p.MTU
		}
	}
	if mtu == 0 {
		return model.MTUMin
	}
	return mtu
}
