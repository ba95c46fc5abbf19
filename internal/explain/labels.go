package explain

import (
	"fmt"
	"strings"

	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Label is one label of a packet's stack, from the top on.
type Label struct {
	Label uint32 `json:"label"`
	Name  string `json:"name"` // of the node, or of what is at the node; or the number
}

// isLabelled says whether the packet has a label stack.
func (x *explainer) isLabelled() bool {
	f := x.event.Packet
	return len(f) >= srv6.EthernetLen && int(f[12])<<8|int(f[13]) == mpls.EtherTypeUnicast
}

// atLabel finds a hop that a label leads to, by its node label or its service label.
func (x *explainer) atLabel(label uint32) (p *plan.Path, hop int, service bool) {
	for i := range x.paths {
		for j, h := range x.paths[i].Hops {
			if h.ServiceLabel == label && label != 0 {
				return &x.paths[i], j, true
			}
			if h.NodeLabel == label && label != 0 && p == nil {
				p, hop = &x.paths[i], j
			}
		}
	}
	return p, hop, false
}

// decodeLabels reads a packet with a label stack. Consumed labels are gone: what is
// there is ahead of it.
func (x *explainer) decodeLabels() {
	p, err := mpls.ParseFrame(x.event.Packet, func(label uint32) bool {
		_, _, service := x.atLabel(label)
		return service
	})
	if err != nil {
		x.out.Malformed = err.Error()
	}
	x.decoded, x.labelled = len(p.Stack) > 0, true
	var at *plan.Path
	for _, l := range p.Labels() {
		name := fmt.Sprintf("label %d", l)
		path, hop, service := x.atLabel(l)
		switch {
		case service:
			name = hopName(path, hop)
			if at == nil {
				at, x.to = path, path.Hops[hop].SID
			}
		case path != nil:
			name = path.Hops[hop].Node
		}
		x.out.Labels = append(x.out.Labels, Label{Label: l, Name: name})
	}
	if p.Word == nil || p.Proof == nil {
		return
	}
	x.next = p.Word.NextHeader
	x.packet = srv6.Packet{Header: srv6.Header{NextHeader: x.next}, Payload: p.Payload}
	if inner, payload, err := x.packet.Inner(); err == nil {
		x.inner, x.payload = &inner, payload
		x.out.Source, x.out.Destination = inner.Source, inner.Destination
	}
	proof, ok := srv6.ReadProof(*p.Proof)
	if !ok {
		return
	}
	x.proof = &proof
	x.out.Proof = &Proof{
		Scheme: proof.Scheme.String(), Epoch: proof.Epoch, Path: Hex32(proof.Path),
		RND: Hex64(proof.RND), CML: Hex64(proof.CML),
	}
	if x.path = x.find(proof.Path, proof.Epoch); x.path == nil {
		return
	}
	x.out.Proof.Chain, x.out.Proof.Direction, x.out.Proof.From = x.path.Chain, x.path.Direction, x.path.From
	for j, h := range x.path.Hops {
		if j > 0 && x.to.IsValid() && upper64(h.SID) == upper64(x.to) {
			x.place = j
		}
	}
}

// labelNames are the places that the labels lead to: a node label in front of a service
// label says no more than that.
func (x *explainer) labelNames() string {
	var names []string
	for i, l := range x.out.Labels {
		path, _, service := x.atLabel(l.Label)
		if i+1 < len(x.out.Labels) && path != nil && !service {
			if _, _, next := x.atLabel(x.out.Labels[i+1].Label); next {
				continue
			}
		}
		names = append(names, l.Name)
	}
	return strings.Join(names, ", ")
}
