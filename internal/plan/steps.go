package plan

import (
	"errors"
	"fmt"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
)

// Steps are the plans by which a domain changes without refusing packets that are under way.
// All nodes take one step before any takes the next:
//
//  1. Both: functions and egresses hold the old and the new epochs; headends are as before.
//  2. Turn: headends use the new epochs. What they sent before is still taken.
//  3. The nodes' plans themselves, without the old epochs, when no packet of those is
//     under way any more.
//
// A path that comes or goes, or takes other packets, does so in the second step: from the first node
// that has it until the last, its own packets are refused.
//
// A node that is not in the domain any more gets a last plan in step 2, with which it sends nothing
// into a path; after step 3 its agent can be detached.
type Steps struct {
	Both, Turn []Node // in the order of the domain's nodes; nodes that leave it come last
	Turns      []Path // paths that get another epoch, with their new values
	Lossy      []Path // paths that are added or removed, with their new or old values
}

// MakeSteps compares the paths and nodes of the last compilation with those of next. The keyring
// of next has kept the SIDs of the last (Keyring.KeepSIDs). The result shares parts of the
// arguments.
func MakeSteps(last []Path, was []Node, next *Domain) (Steps, error) {
	var s Steps
	before := map[direction]Path{}
	for _, p := range last {
		before[p.direction()] = p
	}
	both := map[uint32]bool{} // paths that were there, and are
	stays := func(path uint32) bool { return both[path] }
	for _, p := range next.Paths {
		q, ok := before[p.direction()]
		delete(before, p.direction())
		if !ok || !sameWay(&q, &p) {
			s.Lossy = append(s.Lossy, p)
			continue
		}
		both[p.Path] = true
		if q.Epoch != p.Epoch {
			s.Turns = append(s.Turns, p)
		}
	}
	for _, p := range last {
		if _, gone := before[p.direction()]; gone {
			s.Lossy = append(s.Lossy, p)
		}
	}
	old := map[string]Node{}
	for _, n := range was {
		old[n.Name] = n
	}
	var errs []error
	for _, n := range next.Nodes {
		o, ok := old[n.Name]
		delete(old, n.Name)
		if !ok {
			o = Node{Name: n.Name, Block: n.Block, Address: n.Address, Locator: n.Locator}
		}
		if o.Block != n.Block || o.Locator != n.Locator || o.Address != n.Address {
			errs = append(errs, fmt.Errorf("node %s: its address, its locator or the block changes, and a node has one of each; carry this change out in one step, without --keep-epochs", n.Name))
			continue
		}
		if err := sameLabels(o.MPLS, n.MPLS); err != nil {
			errs = append(errs, fmt.Errorf("node %s: %w; carry this change out in one step, without --keep-epochs", n.Name, err))
			continue
		}
		both, turn := bothEpochs(o, n, stays), turned(o, n, stays)
		for step, p := range map[string]Node{"1": both, "2": turn} {
			if err := p.check(); err != nil {
				errs = append(errs, fmt.Errorf("node %s, step %s: %w", n.Name, step, err))
			}
		}
		s.Both, s.Turn = append(s.Both, both), append(s.Turn, turn)
	}
	for _, o := range was {
		if _, leaves := old[o.Name]; leaves {
			s.Both = append(s.Both, o)
			o.Headends = nil
			s.Turn = append(s.Turn, o)
		}
	}
	return s, errors.Join(errs...)
}

// bothEpochs is a node's plan until all nodes have the new epochs.
func bothEpochs(o, n Node, stays func(path uint32) bool) Node {
	b := withOld(o, n)
	b.Headends = withOrigins(o.Headends, n.Headends)
	// Packets that a function makes take paths of their own: those of the headends.
	for i := range b.Proxies {
		if j := slices.IndexFunc(o.Proxies, func(x Proxy) bool { return x.Function == b.Proxies[i].Function }); j >= 0 {
			b.Proxies[i].OnUnknown = o.Proxies[j].OnUnknown
			if g := o.Proxies[j].Gateway; g != nil { // its rules name chains that begin at the node
				b.Proxies[i].Gateway = g
			}
			// Parts that end at it have keys if and only if it is intrusive.
			if is, was := b.Proxies[i].Stream, o.Proxies[j].Stream; is != nil && was != nil && is.Intrusive != was.Intrusive {
				s := *is
				s.Intrusive = was.Intrusive
				b.Proxies[i].Stream = &s
			}
		}
	}
	b.Endpoints = bothEndpoints(o, n)
	// A path takes the same packets in all its epochs, and has one guard.
	b.Egresses = bothEgresses(o.Egresses, n.Egresses, stays)
	return b
}

// turned is a node's plan while packets of the old epochs are under way.
func turned(o, n Node, stays func(path uint32) bool) Node {
	b := withOld(o, n)
	b.Headends = withOrigins(n.Headends, o.Headends)
	b.Endpoints = bothEndpoints(o, n)
	b.Egresses = bothEgresses(n.Egresses, o.Egresses, stays)
	return b
}

// bothEgresses are the egresses of first, and of the other those of paths that stay, in epochs that first has not. These take the
// packets that the path takes in first, if it is there.
func bothEgresses(first, other []Egress, stays func(path uint32) bool) []Egress {
	type epoch struct {
		path  uint32
		epoch uint8
	}
	has, at := make(map[epoch]bool, len(first)), make(map[uint32]int, len(first))
	for i := range first {
		e := &first[i]
		has[epoch{e.Path, e.Epoch}] = true
		if _, there := at[e.Path]; !there {
			at[e.Path] = i
		}
	}
	all := slices.Clone(first)
	for i := range other {
		if e := &other[i]; !stays(e.Path) || has[epoch{e.Path, e.Epoch}] {
			continue
		}
		e := other[i]
		if i, ok := at[e.Path]; ok {
			e = e.takesAs(first[i])
		}
		all = append(all, e)
	}
	return all
}

// bothEndpoints are the visits in both plans; a visit that both have is as in n.
func bothEndpoints(o, n Node) []Endpoint {
	has := make(map[visit]bool, len(n.Endpoints))
	for i := range n.Endpoints {
		e := &n.Endpoints[i]
		has[visit{e.SID, e.Path, e.Epoch}] = true
	}
	all := slices.Clone(n.Endpoints)
	for i := range o.Endpoints {
		if e := &o.Endpoints[i]; !has[visit{e.SID, e.Path, e.Epoch}] {
			all = append(all, *e)
		}
	}
	return all
}

// withOld is n with the interfaces, functions and labels of o that n no longer has.
func withOld(o, n Node) Node {
	n.Interfaces, n.Proxies = slices.Clone(n.Interfaces), slices.Clone(n.Proxies)
	n.MPLS = bothLabels(o.MPLS, n.MPLS)
	for _, i := range o.Interfaces {
		if !slices.ContainsFunc(n.Interfaces, func(x model.Interface) bool { return x.Name == i.Name }) {
			n.Interfaces = append(n.Interfaces, i)
		}
	}
	for _, p := range o.Proxies {
		i := slices.IndexFunc(n.Proxies, func(x Proxy) bool { return x.Function == p.Function })
		if i < 0 {
			n.Proxies = append(n.Proxies, p)
			continue
		}
		// A packet that has lost its header in a local function is recognised by the matches of
		// its paths.
		m := slices.Clone(n.Proxies[i].Matches)
		for _, x := range p.Matches {
			if n.Proxies[i].Local && !slices.Contains(m, x) {
				m = append(m, x)
			}
		}
		n.Proxies[i].Matches = m
	}
	return n
}
