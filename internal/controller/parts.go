package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"

	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/store"
)

// A generation is stored in parts, so that a change writes those that differ, and not all paths with all secrets: its paths in their order,
// cut before chains whose names say so, and its nodes likewise. Where the cuts are depends on the names alone, so that a chain that comes or
// goes changes one part. A part is under the number of the generation that wrote it, never changes, and is deleted with the last generation that has it.

// How many chains or nodes a part has, on average. The nodes' are larger, and a change of one chain touches some.
const (
	partChains = 32
	partNodes  = 8
)

// partRef is a part of a generation.
type partRef struct {
	Generation uint64 `json:"generation"` // that wrote it
	Part       int    `json:"part"`       // its number in that one
}

func (r partRef) key() string { return fmt.Sprintf("%s%016x/%04x", keyParts, r.Generation, r.Part) }

// partRecord is some paths, or some nodes.
type partRecord struct {
	Paths json.RawMessage   `json:"paths,omitempty"`
	Nodes []json.RawMessage `json:"nodes,omitempty"`
}

// part is one as it is worked with.
type part struct {
	ref   partRef
	paths []plan.Path
	nodes []plan.Node
}

// name is what two parts share that may be the same.
func (p *part) name() string {
	if len(p.nodes) > 0 {
		return "node/" + p.nodes[0].Name
	}
	return "chain/" + p.paths[0].Chain
}

func (p *part) equal(o *part) bool {
	return equalParts(p.paths, o.paths, plan.Path.Equal) && equalParts(p.nodes, o.nodes, plan.Node.Equal)
}

func equalParts[T any](a, b []T, equal func(T, T) bool) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !equal(a[i], b[i]) {
			return false
		}
	}
	return true
}

func (p *part) encode() ([]byte, error) {
	var r partRecord
	if len(p.paths) > 0 {
		b, err := plan.EncodePaths(p.paths)
		if err != nil {
			return nil, err
		}
		r.Paths = b
	}
	for _, n := range p.nodes {
		b, err := plan.EncodeNode(n)
		if err != nil {
			return nil, err
		}
		r.Nodes = append(r.Nodes, b)
	}
	return json.Marshal(r)
}

// partsOf cuts a domain.
func partsOf(d *plan.Domain) (parts []*part) {
	for from := 0; from < len(d.Paths); {
		to := from + 1
		for to < len(d.Paths) && (d.Paths[to].Chain == d.Paths[to-1].Chain || !cutBefore(d.Paths[to].Chain, partChains)) {
			to++
		}
		parts = append(parts, &part{paths: d.Paths[from:to:to]})
		from = to
	}
	for from := 0; from < len(d.Nodes); {
		to := from + 1
		for to < len(d.Nodes) && !cutBefore(d.Nodes[to].Name, partNodes) {
			to++
		}
		parts = append(parts, &part{nodes: d.Nodes[from:to:to]})
		from = to
	}
	return parts
}

// cutBefore tells whether a part begins with this name: one of so many does.
func cutBefore(name string, of uint32) bool {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // cannot fail
	sum := h.Sum32()
	return (sum^sum>>16)%of == 0
}

// store puts what no generation that is live, or made by the same commit, has yet into the transaction.
func (g *generation) store(number uint64, others []*generation, t *store.Txn) error {
	have := map[string][]*part{}
	for _, o := range others {
		for _, p := range o.parts {
			have[p.name()] = append(have[p.name()], p)
		}
	}
	g.parts = partsOf(g.domain)
	g.Parts = nil
	written := 0
	for _, p := range g.parts {
		for _, o := range have[p.name()] {
			if o.ref.Generation != 0 && p.equal(o) {
				p.ref = o.ref
				break
			}
		}
		if p.ref == (partRef{}) {
			p.ref = partRef{number, written}
			written++
			b, err := p.encode()
			if err != nil {
				return err
			}
			t.Put[p.ref.key()] = b
		}
		g.Parts = append(g.Parts, p.ref)
	}
	g.generationRecord.Paths, g.generationRecord.Nodes = nil, nil
	t.Put[keyGeneration(number)] = encode(g.generationRecord)
	return nil
}

// readParts reads a generation's domain.
func (c *Controller) readParts(ctx context.Context, g *generation) error {
	snap, err := c.store.Snapshot(ctx, keyParts)
	if err != nil {
		return err
	}
	for _, ref := range g.Parts {
		b, ok := snap.Records[ref.key()]
		if !ok {
			return fmt.Errorf("the record %s: %w", ref.key(), errGone)
		}
		var r partRecord
		if err := json.Unmarshal(b.Value, &r); err != nil {
			return fmt.Errorf("the record %s is damaged: %w", ref.key(), err)
		}
		p := &part{ref: ref}
		if r.Paths != nil {
			if p.paths, err = plan.DecodePaths(r.Paths); err != nil {
				return fmt.Errorf("the record %s is damaged: %w", ref.key(), err)
			}
		}
		for _, b := range r.Nodes {
			n, err := plan.DecodeNode(b)
			if err != nil {
				return fmt.Errorf("the record %s is damaged: %w", ref.key(), err)
			}
			p.nodes = append(p.nodes, n)
		}
		if len(p.paths)+len(p.nodes) == 0 {
			return fmt.Errorf("the record %s is damaged: nothing is in it", ref.key())
		}
		g.parts = append(g.parts, p)
		g.domain.Paths, g.domain.Nodes = append(g.domain.Paths, p.paths...), append(g.domain.Nodes, p.nodes...)
	}
	return nil
}

// unstore deletes a generation, and the parts of it that none of the others has.
func (g *generation) unstore(number uint64, others []*generation, t *store.Txn) {
	kept := map[partRef]bool{}
	for _, o := range others {
		for _, p := range o.parts {
			kept[p.ref] = true
		}
	}
	t.Delete = append(t.Delete, keyGeneration(number))
	for _, p := range g.parts {
		if p.ref.Generation != 0 && !kept[p.ref] {
			t.Delete = append(t.Delete, p.ref.key())
		}
	}
}

// others are the generations of the state but for one, and those that the view's commit makes.
func (c *Controller) others(ctx context.Context, v *view, but uint64) (out []*generation, err error) {
	numbers := v.state.live()
	for n := range v.made {
		numbers = append(numbers, n)
	}
	seen := map[uint64]bool{but: true, 0: true}
	for _, n := range numbers {
		if seen[n] {
			continue
		}
		seen[n] = true
		g, err := c.generation(ctx, v, n)
		if err != nil {
			return nil, err
		}
		out = append(out, g)
	}
	return out, nil
}
