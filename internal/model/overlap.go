package model

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
)

// CheckOverlap refuses two chains with overlapping matches if a valid packet would be refused:
// it enters at a headend that has only the less specific chain and takes that chain, and the
// egress requires the proof of the more specific one. Chains are compared in the same direction:
// in opposite directions a packet would have to come from both sides at once. The error
// describes the problem of a.
func CheckOverlap(a, b Chain) error {
	for _, dir := range []Direction{Forward, Reverse} {
		if !slices.Contains(a.Directions(), dir) || !slices.Contains(b.Directions(), dir) {
			continue
		}
		if err := checkOverlap(a.Directed(dir), b.Directed(dir), dir); err != nil {
			return err
		}
	}
	return nil
}

func checkOverlap(a, b Chain, dir Direction) error {
	if !a.Match.Overlaps(b.Match) {
		return nil
	}
	if a.Match.Ordered() && a.Match.Priority == b.Match.Priority {
		return fmt.Errorf("chain %s, %s: its match (%s) and that of chain %s (%s) take the same packets with the same priority; give one of them another",
			a.Name, dir, a.Match, b.Name, b.Match)
	}
	inner, outer := a, b
	if before(b.Match, a.Match) {
		inner, outer = b, a
	}
	// A packet that bypasses a service's gateway must be refused.
	if inner.Onward != nil {
		return nil
	}
	if outer.Onward != nil {
		return fmt.Errorf("chain %s, %s: its match (%s) takes packets of the service behind chain %s around its gateway; give it a priority above %d, or keep it apart from %s",
			inner.Name, dir, inner.Match, outer.Name, onwardPriorityRest, outer.Match)
	}
	// Only the headend sees a mark: no egress requires such a chain, or refuses a packet of
	// another chain because of it.
	if inner.Match.ByMark() {
		return nil
	}
	for _, n := range outer.Ingress {
		if !slices.Contains(inner.Ingress, n) {
			return fmt.Errorf("chain %s, %s: packets that it takes at %s and that also match chain %s (%s) would be refused as wrong-chain or unproven, since %s is not an ingress of %s; make it one, or keep the matches apart",
				outer.Name, dir, n, inner.Name, inner.Match, n, inner.Name)
		}
	}
	if (outer.OwnTraffic || outer.Match.ByMark()) && !inner.OwnTraffic {
		return fmt.Errorf("chain %s, %s: own traffic of its headends that also matches chain %s (%s) would be refused as wrong-chain or unproven, since %s takes no own traffic; set own-traffic: true there too, or make the matches disjoint",
			outer.Name, dir, inner.Name, inner.Match, inner.Name)
	}
	return nil
}

// OverlapsMax is the highest number of overlaps that are reported for one domain. There may be
// as many as pairs of chains.
const OverlapsMax = 10000

// Overlap is two of a list of chains that CheckOverlap refuses.
type Overlap struct {
	Chain  int // index of the chain that comes later
	Before int // of the one that it is held against
	Err    error
}

// FindOverlaps compares each chain with all earlier ones, and returns the errors of CheckOverlap
// in that order; at most so many. It compares only chains with overlapping prefixes.
func FindOverlaps(chains []Chain, most int) []Overlap {
	type pair struct{ chain, before int }
	found := map[pair]error{}
	for _, dir := range []Direction{Forward, Reverse} {
		if len(found) >= most {
			break
		}
		var directed []Chain
		var index []int // in chains
		var matches []Match
		for i, c := range chains {
			// A chain without ingress has no reverse direction; another check reports that.
			if slices.Contains(c.Directions(), dir) && (dir == Forward || len(c.Ingress) > 0) {
				directed = append(directed, c.Directed(dir))
				index = append(index, i)
				matches = append(matches, directed[len(directed)-1].Match)
			}
		}
		overlapping(matches, func(i, j int) bool {
			p := pair{index[i], index[j]}
			if found[p] == nil {
				if err := checkOverlap(directed[i], directed[j], dir); err != nil {
					found[p] = err
				}
			}
			return len(found) < most
		})
	}
	list := make([]Overlap, 0, len(found))
	for p, err := range found {
		list = append(list, Overlap{p.chain, p.before, err})
	}
	slices.SortFunc(list, func(a, b Overlap) int {
		return cmp.Or(cmp.Compare(a.Chain, b.Chain), cmp.Compare(a.Before, b.Before))
	})
	return list
}

// SomeOverlap reports whether FindOverlaps would find something of which one is of some, the indices of chains. It looks at no pair
// of the others.
func SomeOverlap(chains []Chain, some []int) bool {
	for _, i := range some {
		hi, long := upper(&chains[i])
		for j := range chains {
			if o, also := upper(&chains[j]); long && also && o != hi {
				continue
			}
			if j != i && chains[i].mayOverlap(&chains[j]) && CheckOverlap(chains[max(i, j)], chains[min(i, j)]) != nil {
				return true
			}
		}
	}
	return false
}

// upper are the first 64 bits of a chain's destination, if it is of IPv6 and as long as that: two that differ do not overlap.
func upper(c *Chain) (bits uint64, long bool) {
	d := c.Match.Destination
	if d.Bits() < 64 {
		return 0, false
	}
	b := d.Addr().As16()
	return binary.BigEndian.Uint64(b[:]), true
}

// mayOverlap reports whether the matches of two chains overlap; of their reverses the same is true then.
func (c *Chain) mayOverlap(o *Chain) bool {
	d, s := c.Match.Whole()
	od, os := o.Match.Whole()
	return d.Overlaps(od) && s.Overlaps(os)
}

// before reports whether a takes a packet that matches both: ordered rules come first, by
// priority, then the longer prefixes.
func before(a, b Match) bool {
	if a.Ordered() && b.Ordered() {
		return a.Priority < b.Priority
	}
	return a.Ordered() || !b.Ordered() && specific(a) > specific(b)
}

// specific orders matches as classification does: by destination, then source.
func specific(m Match) int {
	return 256*max(0, m.Destination.Bits()) + max(0, m.Source.Bits())
}
