package plan

import (
	"encoding/binary"
	"math"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
)

// Rule maps the packets of a match to a target.
type Rule struct {
	Match  model.Match
	Target uint32
}

// DstEntry is an entry of the first look-up, by longest destination prefix.
type DstEntry struct {
	Prefix netip.Prefix // ::/0 or 0.0.0.0/0, and longer
	Source bool         // Target is a class: look the source up in it
	Target uint32
}

// SrcEntry is an entry of the second look-up: the longest source prefix in one class.
type SrcEntry struct {
	Class  uint32
	Prefix netip.Prefix // ::/0 or 0.0.0.0/0, and longer
	Target uint32
}

// Classify compiles rules into tables for two look-ups. For every packet they find, of the rules
// that match it, those with the longest destination prefix, and of these the rule with the
// longest source prefix. If the second look-up finds no source, no rule matches. Classes are
// numbered from 0 without gaps. Of several rules with the same match the first counts. Classify
// does not handle ordered rules; see Ordered.
//
// The class of a destination has all relevant sources: its own, and those of the next shorter
// destination's class that its own do not cover.
func Classify(rules []Rule) (dst []DstEntry, src []SrcEntry) {
	return classify(rules, math.MaxInt)
}

// classify stops when there are more than so many entries of either table: there may
// be as many as pairs of rules.
func classify(rules []Rule, most int) (dst []DstEntry, src []SrcEntry) {
	own := map[netip.Prefix][]SrcEntry{}
	seen := map[model.Match]bool{}
	for _, r := range rules {
		if r.Match.Ordered() {
			continue
		}
		d, s := r.Match.Whole()
		if m := (model.Match{Destination: d, Source: s}); !seen[m] {
			seen[m] = true
			own[d] = append(own[d], SrcEntry{Prefix: s, Target: r.Target})
		}
	}
	order := make([]netip.Prefix, 0, len(own))
	for d := range own {
		order = append(order, d)
	}
	slices.SortFunc(order, comparePrefix)

	type level struct {
		prefix netip.Prefix
		table  []SrcEntry
	}
	var around []level // the destinations that contain the current one
	classes := map[string]uint32{}
	for _, d := range order {
		for len(around) > 0 && !around[len(around)-1].prefix.Overlaps(d) {
			around = around[:len(around)-1]
		}
		if len(src) > most || len(dst) > most {
			return dst, src
		}
		var outer []SrcEntry
		if len(around) > 0 {
			outer = around[len(around)-1].table
		}
		table := inherit(own[d], outer)
		around = append(around, level{d, table})

		if len(table) == 1 && table[0].Prefix.Bits() == 0 {
			dst = append(dst, DstEntry{Prefix: d, Target: table[0].Target})
			continue
		}
		key := tableKey(table)
		class, ok := classes[key]
		if !ok {
			class = uint32(len(classes))
			classes[key] = class
			for _, e := range table {
				e.Class = class
				src = append(src, e)
			}
		}
		dst = append(dst, DstEntry{Prefix: d, Source: true, Target: class})
	}
	return dst, src
}

// Ordered returns the ordered rules, which are matched before the rules of Classify. The first
// ordered rule that matches a packet counts.
func Ordered(rules []Rule) []Rule {
	var ordered []Rule
	for _, r := range rules {
		if r.Match.Ordered() {
			ordered = append(ordered, r)
		}
	}
	slices.SortStableFunc(ordered, func(a, b Rule) int { return int(a.Match.Priority) - int(b.Match.Priority) })
	return ordered
}

// inherit returns the own entries, and the outer entries that no own entry covers.
func inherit(own, outer []SrcEntry) []SrcEntry {
	table := slices.Clone(own)
	prefixes := make(map[netip.Prefix]bool, len(own))
	for _, e := range own {
		prefixes[e.Prefix] = true
	}
	for _, e := range outer {
		hidden := false
		for bits := e.Prefix.Bits(); bits >= 0 && !hidden; bits-- {
			hidden = prefixes[netip.PrefixFrom(e.Prefix.Addr(), bits).Masked()]
		}
		if !hidden {
			table = append(table, e)
		}
	}
	slices.SortFunc(table, func(a, b SrcEntry) int { return comparePrefix(a.Prefix, b.Prefix) })
	return table
}

func tableKey(table []SrcEntry) string {
	var b []byte
	for _, e := range table {
		a := e.Prefix.Addr().As16()
		b = append(b, a[:]...)
		b = append(b, byte(e.Prefix.Bits()))
		b = binary.BigEndian.AppendUint32(b, e.Target)
	}
	return string(b)
}

// comparePrefix orders by version and address, and puts a prefix before those within it.
func comparePrefix(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}
