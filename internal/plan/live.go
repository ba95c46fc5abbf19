package plan

import (
	"errors"
	"fmt"
)

// Live are the compilations of a domain that nodes hold at the same time, while a change moves
// one path after the other to its next epoch. With Next, its plans are those of step 1 of Steps.
// Without Next but with Old, they are those of step 2, and packets of several old compilations
// may be under way.
type Live struct {
	Old  []*Domain // packets of these may be under way; the oldest first
	Now  *Domain   // headends send with its epochs
	Next *Domain   // known to functions and egresses, and not sent yet; nil: none
	// Checked tells of a plan whether a check has found it good before; nil: no plan was.
	Checked func(Node) bool
}

// Nodes returns the plans of all nodes in any of the compilations, each once: the nodes of Next
// or Now in its order, then nodes that have left. A node that has left sends into no path. It
// returns an error if a node has no room for all of them.
//
// Each compilation but the first was made with the keyring of the one before, with KeepSIDs for
// the SIDs of all live compilations.
func (l Live) Nodes() ([]Node, error) {
	var out []Node
	var errs []error
	add := func(n Node, err error) {
		if err == nil && (l.Checked == nil || !l.Checked(n)) {
			err = n.check()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("node %s: %w", n.Name, err))
		}
		out = append(out, n)
	}
	seen := map[string]bool{}
	drains := draining{now: l.Now.byName()}
	for _, o := range l.Old {
		drains.old = append(drains.old, o.byName())
		drains.stays = append(drains.stays, staying(o, l.Now))
	}
	if l.Next != nil {
		stays := staying(l.Now, l.Next)
		for _, next := range l.Next.Nodes {
			seen[next.Name] = true
			now, ok, err := drains.on(next.Name)
			if !ok {
				now = emptied(next)
			}
			if !now.shares(next) { // else there is nothing to join
				err = errors.Join(err, sameNode(now, next))
				next = bothEpochs(now, next, stays)
			}
			add(next, err)
		}
	}
	for _, d := range append([]*Domain{l.Now}, l.Old...) {
		for _, n := range d.Nodes {
			if seen[n.Name] {
				continue
			}
			seen[n.Name] = true
			n, _, err := drains.on(n.Name)
			add(n, err)
		}
	}
	return out, errors.Join(errs...)
}

// draining has the plans of Now and Old by name, and the paths of each of Old that stay.
type draining struct {
	now   map[string]Node
	old   []map[string]Node
	stays []func(path uint32) bool
}

// on is a node's plan of Now, with the old paths whose packets may be under way.
func (l draining) on(name string) (n Node, ok bool, err error) {
	n, ok = l.now[name]
	for i := len(l.old) - 1; i >= 0; i-- {
		old, was := l.old[i][name]
		switch {
		case !was:
		case !ok: // it has left since
			n, ok = old, true
			n.Headends = nil
		case old.shares(n): // nothing changed since
		default:
			err = errors.Join(err, sameNode(old, n))
			n = turned(old, n, l.stays[i])
		}
	}
	return n, ok, err
}

func (d *Domain) byName() map[string]Node {
	nodes := make(map[string]Node, len(d.Nodes))
	for _, n := range d.Nodes {
		nodes[n.Name] = n
	}
	return nodes
}

// emptied is a node without a part in any path.
func emptied(n Node) Node {
	return Node{Name: n.Name, Block: n.Block, Address: n.Address, Locator: n.Locator}
}

// sameNode is an error if a node cannot hold both.
func sameNode(o, n Node) error {
	if o.Block != n.Block || o.Locator != n.Locator || o.Address != n.Address {
		return errors.New("its address, its locator or the block changes, and a node has one of each; take its chains off it first, or give the machine a new node name")
	}
	if err := sameLabels(o.MPLS, n.MPLS); err != nil {
		return fmt.Errorf("%w; take the chains over labels away first", err)
	}
	return nil
}

// staying tells which paths of either are in both. It costs by what differs between the first and the last path that does.
func staying(was, is *Domain) func(path uint32) bool {
	before, now := differing(was.Paths, is.Paths)
	if len(before)+len(now) == 0 {
		return func(uint32) bool { return true }
	}
	at := make(map[uint32]*Path, len(before))
	goes := make(map[uint32]bool, len(before))
	for i := range before {
		at[before[i].Path], goes[before[i].Path] = &before[i], true
	}
	for i := range now {
		p := &now[i]
		q := at[p.Path]
		goes[p.Path] = q == nil || q.direction() != p.direction() || !sameWay(q, p)
	}
	return func(path uint32) bool { return !goes[path] }
}

// Turning returns the paths of next that have another epoch in d, and the paths that are added
// or removed (lossy): their packets are refused until all nodes have changed.
func (d *Domain) Turning(next *Domain) (turning, lossy []Path) {
	was, is := differing(d.Paths, next.Paths)
	before := make(map[direction]*Path, len(was))
	for i := range was {
		before[was[i].direction()] = &was[i]
	}
	for i := range is {
		p := is[i]
		q, ok := before[p.direction()]
		delete(before, p.direction())
		switch {
		case !ok || !sameWay(q, &p):
			lossy = append(lossy, p)
		case q.Epoch != p.Epoch:
			turning = append(turning, p)
		}
	}
	for i := range was {
		if _, gone := before[was[i].direction()]; gone {
			lossy = append(lossy, was[i])
		}
	}
	return turning, lossy
}

// differing leaves the paths out at the beginning and at the end of both that stay as they are.
func differing(was, is []Path) (_, _ []Path) {
	same := func(p, q *Path) bool {
		return p.Epoch == q.Epoch && sameWay(p, q) && p.direction() == q.direction()
	}
	for len(was) > 0 && len(is) > 0 && same(&was[0], &is[0]) {
		was, is = was[1:], is[1:]
	}
	for len(was) > 0 && len(is) > 0 && same(&was[len(was)-1], &is[len(is)-1]) {
		was, is = was[:len(was)-1], is[:len(is)-1]
	}
	return was, is
}

// Without returns the domain with these chains blocked: no node has a share of them, and their
// egresses still require proofs, which no node can make.
func (d *Domain) Without(blocked func(chain string) bool) *Domain {
	out := &Domain{Block: d.Block, Paths: d.Paths}
	for _, n := range d.Nodes {
		heads, visits := n.Headends, n.Endpoints
		n.Headends, n.Endpoints = nil, nil
		for _, h := range heads {
			if !blocked(h.Chain) {
				n.Headends = append(n.Headends, h)
			}
		}
		for _, e := range visits {
			if !blocked(e.Chain) {
				n.Endpoints = append(n.Endpoints, e)
			}
		}
		out.Nodes = append(out.Nodes, n)
	}
	return out
}

// Drop returns the domain without the paths of these chains, as if the chains had never been in
// it. Nodes and functions stay.
func (d *Domain) Drop(chain func(name string) bool) *Domain {
	out := &Domain{Block: d.Block}
	for _, p := range d.Paths {
		if !chain(p.Chain) {
			out.Paths = append(out.Paths, p)
		}
	}
	for _, n := range d.Nodes {
		heads, visits, ends := n.Headends, n.Endpoints, n.Egresses
		n.Headends, n.Endpoints, n.Egresses = nil, nil, nil
		for _, h := range heads {
			if !chain(h.Chain) {
				n.Headends = append(n.Headends, h)
			}
		}
		for _, e := range visits {
			if !chain(e.Chain) {
				n.Endpoints = append(n.Endpoints, e)
			}
		}
		for _, e := range ends {
			if !chain(e.Chain) {
				n.Egresses = append(n.Egresses, e)
			}
		}
		out.Nodes = append(out.Nodes, n)
	}
	return out
}
