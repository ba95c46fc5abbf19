package plan

import (
	"fmt"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
)

// from is the part of a path behind one of its hops, as a path of its own; the hop's node is its
// headend. It visits the remaining hops at the SIDs of p, with the match and MTU of p, so that
// the node needs no further SIDs and a sender sees one MTU. Its replay window is small: only the
// function sends packets into it. It has no id and no secrets yet.
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

// fromFunctions are the paths that start at functions: for each path through a function with
// on-unknown: originate, the rest of the path behind it. If a path visits the function several
// times, the rest begins at the first visit: a packet that was made at a later visit then passes
// more of the chain than necessary, and never less. Only the chain's headend sees a mark, so
// chains by mark have no such path.
//
// If two directions of chains match the same packets, the path of a packet is ambiguous.
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
				return nil, fmt.Errorf("function %s: %s and %s take the same packets (%s), so the chain of a packet that the function makes would be ambiguous; set on-unknown: drop at the function, or make the matches differ",
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

// parts are the paths of one direction of a chain: functions of kind stream divide it.
// on-violation: report applies only at the chain's own egress: a function gets no bytes that are
// not verified.
func (c *compiler) parts(ch model.Chain, dir model.Direction) []Path {
	var out []Path
	for _, part := range ch.Directed(dir).Parts(c.isStream, c.nodeOf) {
		p := c.path(part.Chain, model.Forward)
		p.Direction, p.From, p.To = dir, part.From, part.To
		if part.To != "" {
			p.Hops[len(p.Hops)-1].Parameters = part.Chain.ParametersOf(part.To)
		}
		switch {
		case ch.Onward == nil:
		case dir == model.Forward && p.From == "":
			p.From = model.GatewayName
		case dir == model.Reverse && p.To == "":
			p.To = model.GatewayName
		}
		if sealed(ch, p) {
			p.Seal = new(PathSeal) // the keyring sets its keys
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

// guardPaths are the paths that guards require, for each node at which a direction of a chain,
// or a part of it, ends: the first one. Whole paths and parts come before paths from functions.
func guardPaths(paths []Path) map[end]uint32 {
	first := map[end]uint32{}
	for _, p := range paths {
		if _, ok := first[endOf(p)]; !ok {
			first[endOf(p)] = p.Path
		}
	}
	return first
}

// throughs has the continuation of connections behind functions of kind stream, by the paths
// that end there.
func throughs(d model.Domain, paths []Path) map[uint32]*Through {
	if !slices.ContainsFunc(paths, func(p Path) bool { return p.To != "" }) {
		return nil
	}
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
			continue // it has packets that a function made
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
			// By a chain, it receives only answers.
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

// streamMTU is the size in bytes of packets that fit all parts which begin at a function; if
// none has an MTU, the size that always fits.
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
