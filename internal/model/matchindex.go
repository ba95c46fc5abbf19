package model

import (
	"net/netip"
	"slices"
	"sort"
)

// matchIndex finds, among many matches, those whose prefixes overlap those of another match. Of
// two overlapping prefixes one contains the other, so only the lengths in use need to be tried.
type matchIndex struct {
	destinations map[netip.Prefix]*sourceIndex
	lengths      []int // of the destinations
}

// sourceIndex is the same for the sources of one destination.
type sourceIndex struct {
	matches map[netip.Prefix][]int
	lengths []int
	sorted  []netip.Prefix // each before the prefixes that it contains
}

func newMatchIndex(matches []Match) *matchIndex {
	x := &matchIndex{destinations: map[netip.Prefix]*sourceIndex{}}
	for i, m := range matches {
		d, s := m.Whole()
		of := x.destinations[d]
		if of == nil {
			of = &sourceIndex{matches: map[netip.Prefix][]int{}}
			x.destinations[d] = of
			x.lengths = withLength(x.lengths, d)
		}
		if of.matches[s] == nil {
			of.sorted = append(of.sorted, s)
			of.lengths = withLength(of.lengths, s)
		}
		of.matches[s] = append(of.matches[s], i)
	}
	for _, of := range x.destinations {
		slices.SortFunc(of.sorted, comparePrefix)
	}
	return x
}

func withLength(lengths []int, p netip.Prefix) []int {
	if slices.Contains(lengths, p.Bits()) {
		return lengths
	}
	return append(lengths, p.Bits())
}

// comparePrefix orders by version and address, and puts a prefix before those within
// it.
func comparePrefix(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}

// around calls yield for the matches whose destination equals or contains that of m, and whose
// source overlaps that of m, until it returns false. same: the destinations are equal.
func (x *matchIndex) around(m Match, yield func(i int, same bool) bool) bool {
	d, s := m.Whole()
	for _, bits := range x.lengths {
		if bits > d.Bits() {
			continue
		}
		p := netip.PrefixFrom(d.Addr(), bits).Masked()
		if of := x.destinations[p]; of != nil && !of.overlapping(s, func(i int) bool { return yield(i, p == d) }) {
			return false
		}
	}
	return true
}

func (x *sourceIndex) overlapping(s netip.Prefix, yield func(int) bool) bool {
	all := func(p netip.Prefix) bool {
		for _, i := range x.matches[p] {
			if !yield(i) {
				return false
			}
		}
		return true
	}
	for _, bits := range x.lengths { // prefixes that contain s
		if bits < s.Bits() && !all(netip.PrefixFrom(s.Addr(), bits).Masked()) {
			return false
		}
	}
	first := sort.Search(len(x.sorted), func(i int) bool { return comparePrefix(x.sorted[i], s) >= 0 })
	for _, p := range x.sorted[first:] { // s, and those within it
		if !s.Contains(p.Addr()) {
			break
		}
		if !all(p) {
			return false
		}
	}
	return true
}

// overlapping calls yield once for each two matches that overlap, the later one
// first, until it returns false.
func overlapping(matches []Match, yield func(later, earlier int) bool) {
	x := newMatchIndex(matches)
	for i, m := range matches {
		if !x.around(m, func(j int, same bool) bool {
			switch {
			case same && j >= i: // found from there
			case !m.Overlaps(matches[j]):
			default:
				return yield(max(i, j), min(i, j))
			}
			return true
		}) {
			return
		}
	}
}

// EachOverlap calls yield once for each match of a and match of b that overlap, until
// it returns false.
func EachOverlap(a, b []Match, yield func(i, j int) bool) {
	x := newMatchIndex(b)
	for i, m := range a {
		if !x.around(m, func(j int, _ bool) bool { return !m.Overlaps(b[j]) || yield(i, j) }) {
			return
		}
	}
	x = newMatchIndex(a)
	for j, m := range b {
		if !x.around(m, func(i int, same bool) bool { return same || !m.Overlaps(a[i]) || yield(i, j) }) {
			return
		}
	}
}
