package tables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
)

// DstKey is a destination prefix, in bits of an IPv6 address: an IPv4 address is
// ::ffff:a.b.c.d.
type DstKey struct {
	Prefixlen uint32
	Addr      [16]uint8
}

// SrcKey is a source prefix within a class, which is never 0.
type SrcKey struct {
	Class     uint32
	Prefixlen uint32
	Addr      [16]uint8
}

// Match is the result of a rule by prefixes: struct ws_match, except that the target of a rule
// with sources is its class.
type Match struct {
	Target uint32
	Action uint8
	Local  uint8
}

// Prefixes are the rules of one use of ws_match.
type Prefixes struct {
	Dst map[DstKey]Match
	Src map[SrcKey]Match
}

func (p Prefixes) Equal(q Prefixes) bool { return maps.Equal(p.Dst, q.Dst) && maps.Equal(p.Src, q.Src) }

// Over returns p, and the entries of q that p does not replace. A class in both is equal in
// both; see classes.
func (p Prefixes) Over(q Prefixes) Prefixes {
	out := Prefixes{map[DstKey]Match{}, map[SrcKey]Match{}}
	maps.Copy(out.Dst, q.Dst)
	maps.Copy(out.Src, q.Src)
	maps.Copy(out.Dst, p.Dst)
	maps.Copy(out.Src, p.Src)
	return out
}

const (
	LineSize   = 64
	LinesLeast = 256
	linesMost  = 1 << 24
	linesLog2  = 24 // of the lines of one length, at most
)

// PrefixEntry is an entry of a line.
type PrefixEntry struct {
	addr   [2]uint64
	Target uint32
	Kind   uint8
}

// PrefixStep is a step of a head, and the content of its lines.
type PrefixStep struct {
	length, Hit, miss uint8
	entries           map[[2]uint64]PrefixEntry
}

// prefixHead is one table of a search: the destinations, or a class.
type prefixHead struct {
	class uint32
	rules [129]map[[2]uint64]Match // by length
	steps []PrefixStep             // the first one is reserved
	first uint8
	line  uint32
}

// Masked is an address's first bits as numbers.
func Masked(a [2]uint64, length uint8) [2]uint64 {
	if length < 64 {
		return [2]uint64{a[0] &^ (^uint64(0) >> length), 0}
	}
	return [2]uint64{a[0], a[1] &^ (^uint64(0) >> (length - 64))}
}

// prefixHash is that of bpf/lib/match/prefix.h.
func prefixHash(a [2]uint64) uint32 {
	h := a[0]*abi.MatchHashHi ^ a[1]*abi.MatchHashLo
	h ^= h >> 32
	return uint32(h * abi.MatchHashMix >> 32)
}

func AddrWords(a [16]uint8) [2]uint64 {
	return [2]uint64{binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:])}
}

func (h *prefixHead) add(length uint32, addr [16]uint8, m Match) error {
	if length > 128 {
		return fmt.Errorf("a prefix of %d bits", length)
	}
	if h.rules[length] == nil {
		h.rules[length] = map[[2]uint64]Match{}
	}
	h.rules[length][Masked(AddrWords(addr), uint8(length))] = m
	return nil
}

// plan makes the tree of lengths: first the length with the most rules, then halves of the
// lengths on both its sides.
func (h *prefixHead) plan() {
	h.steps = []PrefixStep{{}}
	var lengths []uint8
	most := 0
	for l, rules := range h.rules {
		if len(rules) == 0 {
			continue
		}
		lengths = append(lengths, uint8(l))
		if len(rules) > len(h.rules[lengths[most]]) {
			most = len(lengths) - 1
		}
	}
	var tree func(ls []uint8, at int) uint8
	tree = func(ls []uint8, at int) uint8 {
		if len(ls) == 0 {
			return 0
		}
		i := uint8(len(h.steps))
		h.steps = append(h.steps, PrefixStep{length: ls[at], entries: map[[2]uint64]PrefixEntry{}})
		shorter, longer := ls[:at], ls[at+1:]
		hit, miss := tree(longer, (len(longer)-1)/2), tree(shorter, (len(shorter)-1)/2)
		h.steps[i].Hit, h.steps[i].miss = hit, miss
		return i
	}
	h.first = tree(lengths, most)
}

// enter puts a rule at the step where a search for its addresses ends, and entries that lead to
// it at the steps before.
func (h *prefixHead) enter(length uint8, addr [2]uint64, m Match) {
	for i := h.first; i != 0; {
		s := &h.steps[i]
		if s.length > length {
			i = s.miss
			continue
		}
		at := Masked(addr, s.length)
		e := s.entries[at]
		e.addr = at
		e.Kind |= abi.MatchKindUsed
		if s.length == length {
			e.Kind |= abi.MatchKindRule
			e.say(m)
			s.entries[at] = e
			return
		}
		e.Kind |= abi.MatchKindLonger
		s.entries[at] = e
		i = s.Hit
	}
}

func (e *PrefixEntry) say(m Match) {
	e.Target = m.Target
	e.Kind |= m.Action & abi.MatchKindAction
	if m.Local != 0 {
		e.Kind |= abi.MatchKindLocal
	}
}

// fill enters all rules; classes are named by the lines of their heads.
func (h *prefixHead) fill(heads map[uint32]*prefixHead) {
	for length, rules := range h.rules {
		for addr, m := range rules {
			if m.Action == uint8(abi.MatchActionSource) {
				m.Target = heads[m.Target].line
				rules[addr] = m
			}
			h.enter(uint8(length), addr, m)
		}
	}
	for _, s := range h.steps[1:] {
		for at, e := range s.entries {
			if e.Kind&abi.MatchKindRule == 0 {
				e.say(h.covering(s.length, at))
				s.entries[at] = e
			}
		}
	}
}

// covering is the result of the longest rule that covers a prefix.
func (h *prefixHead) covering(length uint8, addr [2]uint64) Match {
	for l := int(length); l >= 0; l-- {
		if m, ok := h.rules[l][Masked(addr, uint8(l))]; ok {
			return m
		}
	}
	return Match{}
}

// Line is one of ws_match_line.
type Line struct {
	Entries []PrefixEntry
	more    bool
}

// hashed spreads entries over lines, a power of two and a few behind them.
func hashed(entries map[[2]uint64]PrefixEntry) (lines []Line, log2 uint8, err error) {
	order := slices.SortedFunc(maps.Keys(entries), CompareAddrs)
	for log2 = uint8(bits.Len(uint(len(order) - 1))); log2 <= linesLog2; log2++ {
		if lines = spread(entries, order, log2); lines != nil {
			return lines, log2, nil
		}
	}
	return nil, 0, fmt.Errorf("%d prefixes of one length find no place in a table of 2^%d lines", len(order), linesLog2)
}

func spread(entries map[[2]uint64]PrefixEntry, order [][2]uint64, log2 uint8) []Line {
	lines := make([]Line, 1<<log2+abi.MatchRun-1)
	last := 1<<log2 - 1
	for _, k := range order {
		i := int(prefixHash(k) & (1<<log2 - 1))
		end := i + abi.MatchRun
		for ; i < end && len(lines[i].Entries) == abi.MatchWays; i++ {
			lines[i].more = true
		}
		if i == end {
			return nil
		}
		lines[i].Entries = append(lines[i].Entries, entries[k])
		last = max(last, i)
	}
	return lines[:last+1]
}

// Encode is the content of the map: a whole number of lines.
func (p Prefixes) Encode() ([]byte, error) {
	heads := map[uint32]*prefixHead{0: {}}
	head := func(class uint32) *prefixHead {
		if heads[class] == nil {
			heads[class] = &prefixHead{class: class}
		}
		return heads[class]
	}
	for k, m := range p.Src {
		if err := head(k.Class).add(k.Prefixlen, k.Addr, m); err != nil {
			return nil, err
		}
	}
	for k, m := range p.Dst {
		if m.Action == uint8(abi.MatchActionSource) {
			head(m.Target)
		}
		if err := heads[0].add(k.Prefixlen, k.Addr, m); err != nil {
			return nil, err
		}
	}
	order := slices.Sorted(maps.Keys(heads))
	next := uint32(0)
	for _, class := range order {
		h := heads[class]
		h.plan()
		h.line = next
		next += uint32(len(h.steps)+abi.MatchHeadSteps-1) / abi.MatchHeadSteps
	}
	out := make([]byte, next*LineSize)
	for _, class := range order {
		h := heads[class]
		h.fill(heads)
		PutStep(out, h.line, 0, PrefixStep{Hit: h.first}, 0, h.class)
		for i, s := range h.steps[1:] {
			lines, log2, err := hashed(s.entries)
			if err != nil {
				return nil, err
			}
			PutStep(out, h.line, i+1, s, log2, uint32(len(out)/LineSize))
			for _, l := range lines {
				out = l.Append(out)
			}
		}
	}
	return out, nil
}

// PutStep writes a struct ws_match_step.
func PutStep(b []byte, head uint32, i int, s PrefixStep, log2 uint8, base uint32) {
	b = b[int(head)*LineSize+8*i:]
	b[0], b[1], b[2], b[3] = s.length, log2, s.Hit, s.miss
	binary.NativeEndian.PutUint32(b[4:], base)
}

// Where in a struct ws_match_line a target and a kind are, and its last byte.
const (
	lineTargets = 16 * abi.MatchWays
	lineKinds   = lineTargets + 4*abi.MatchWays
	lineMore    = lineKinds + abi.MatchWays
)

// Append appends a struct ws_match_line.
func (l Line) Append(b []byte) []byte {
	var to [LineSize]byte
	for i, e := range l.Entries {
		binary.NativeEndian.PutUint64(to[16*i:], e.addr[0])
		binary.NativeEndian.PutUint64(to[16*i+8:], e.addr[1])
		binary.NativeEndian.PutUint32(to[lineTargets+4*i:], e.Target)
		to[lineKinds+i] = e.Kind
	}
	if l.more {
		to[lineMore] = 1
	}
	return append(b, to[:]...)
}

var errNotPrefixes = errors.New("a table of prefixes is damaged")

// DecodePrefixes reads the output of Encode.
func DecodePrefixes(b []byte) (Prefixes, error) {
	out := Prefixes{map[DstKey]Match{}, map[SrcKey]Match{}}
	seen := map[uint32]bool{}
	var heads func(head uint32) (class uint32, err error)
	heads = func(head uint32) (uint32, error) {
		none, class, _, err := stepAt(b, head, 0)
		if err != nil || seen[head] {
			return class, err
		}
		seen[head] = true
		var read [256]bool // steps; in a damaged table they may form a loop
		for todo := []uint8{none.Hit}; len(todo) > 0; todo = todo[1:] {
			if todo[0] == 0 || read[todo[0]] {
				continue
			}
			read[todo[0]] = true
			s, base, log2, err := stepAt(b, head, int(todo[0]))
			if err != nil {
				return 0, err
			}
			todo = append(todo, s.Hit, s.miss)
			entries, err := entriesAt(b, base, log2)
			if err != nil {
				return 0, err
			}
			for _, e := range entries {
				if e.Kind&abi.MatchKindRule == 0 {
					continue
				}
				m := Match{Target: e.Target, Action: e.Kind & abi.MatchKindAction}
				if e.Kind&abi.MatchKindLocal != 0 {
					m.Local = 1
				}
				if m.Action == uint8(abi.MatchActionSource) {
					if m.Target, err = heads(e.Target); err != nil {
						return 0, err
					}
				}
				var addr [16]uint8
				binary.BigEndian.PutUint64(addr[:8], e.addr[0])
				binary.BigEndian.PutUint64(addr[8:], e.addr[1])
				if class == 0 {
					out.Dst[DstKey{uint32(s.length), addr}] = m
				} else {
					out.Src[SrcKey{class, uint32(s.length), addr}] = m
				}
			}
		}
		return class, nil
	}
	_, err := heads(0)
	return out, err
}

func stepAt(b []byte, head uint32, i int) (s PrefixStep, base uint32, log2 uint8, err error) {
	at := int(head)*LineSize + 8*i
	if at+8 > len(b) {
		return s, 0, 0, errNotPrefixes
	}
	b = b[at:]
	return PrefixStep{length: b[0], Hit: b[2], miss: b[3]}, binary.NativeEndian.Uint32(b[4:]), b[1], nil
}

// entriesAt are the entries of one length.
func entriesAt(b []byte, base uint32, log2 uint8) (out []PrefixEntry, err error) {
	if log2 > linesLog2 {
		return nil, errNotPrefixes
	}
	for i, more := 0, false; i < 1<<log2 || more; i++ {
		at := (int(base) + i) * LineSize
		if at+LineSize > len(b) {
			return nil, errNotPrefixes
		}
		l := b[at : at+LineSize]
		for way := range abi.MatchWays {
			e := PrefixEntry{
				addr:   [2]uint64{binary.NativeEndian.Uint64(l[16*way:]), binary.NativeEndian.Uint64(l[16*way+8:])},
				Target: binary.NativeEndian.Uint32(l[lineTargets+4*way:]), Kind: l[lineKinds+way],
			}
			if e.Kind != 0 {
				out = append(out, e)
			}
		}
		more = l[lineMore] != 0
	}
	return out, nil
}

// swaps are the ops that replace a use's rules.
func swaps(ops []Op, use abi.MatchUse, have, want Prefixes) []Op {
	if have.Equal(want) {
		return ops
	}
	k := uint32(use)
	return append(ops, Op{MapMatch, &k, &want})
}

// LinesOf is how many lines the largest table takes.
func LinesOf(all ...Prefixes) (uint32, error) {
	most := 0
	for _, p := range all {
		b, err := p.Encode()
		if err != nil {
			return 0, err
		}
		most = max(most, len(b)/LineSize)
	}
	return uint32(most), nil
}
