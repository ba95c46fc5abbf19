package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
)

// dstKey is a destination prefix, in bits of an IPv6 address: an IPv4 address is
// ::ffff:a.b.c.d.
type dstKey struct {
	Prefixlen uint32
	Addr      [16]uint8
}

// srcKey is a source prefix within a class, which is never 0.
type srcKey struct {
	Class     uint32
	Prefixlen uint32
	Addr      [16]uint8
}

// match is what a rule by prefixes says: struct ws_match, but that the target of a
// source's rule is its class.
type match struct {
	Target uint32
	Action uint8
	Local  uint8
}

// prefixes are the rules of one use of ws_match.
type prefixes struct {
	dst map[dstKey]match
	src map[srcKey]match
}

func (p prefixes) equal(q prefixes) bool { return maps.Equal(p.dst, q.dst) && maps.Equal(p.src, q.src) }

// over are p, and those of q that p does not replace. A class of both is the same
// in both; see classes.
func (p prefixes) over(q prefixes) prefixes {
	out := prefixes{maps.Clone(q.dst), maps.Clone(q.src)}
	maps.Copy(out.dst, p.dst)
	maps.Copy(out.src, p.src)
	return out
}

const (
	lineSize   = 64
	linesLeast = 256
	linesMost  = 1 << 24
	linesLog2  = 24 // of the lines of one length, at most
)

// prefixEntry is an entry of a line.
type prefixEntry struct {
	addr   [2]uint64
	target uint32
	kind   uint8
}

// prefixStep is a step of a head, and what its lines will hold.
type prefixStep struct {
	length, hit, miss uint8
	entries           map[[2]uint64]prefixEntry
}

// prefixHead is what is looked up at once: the destinations, or a class.
type prefixHead struct {
	class uint32
	rules [129]map[[2]uint64]match // by length
	steps []prefixStep             // the first is none
	first uint8
	line  uint32
}

// masked is an address's first bits as numbers.
func masked(a [2]uint64, length uint8) [2]uint64 {
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

func addrWords(a [16]uint8) [2]uint64 {
	return [2]uint64{binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:])}
}

func (h *prefixHead) add(length uint32, addr [16]uint8, m match) error {
	if length > 128 {
		return fmt.Errorf("a prefix of %d bits", length)
	}
	if h.rules[length] == nil {
		h.rules[length] = map[[2]uint64]match{}
	}
	h.rules[length][masked(addrWords(addr), uint8(length))] = m
	return nil
}

// plan makes the tree of lengths: the one with the most rules is asked first, and
// those on both its sides in halves.
func (h *prefixHead) plan() {
	h.steps = []prefixStep{{}}
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
		h.steps = append(h.steps, prefixStep{length: ls[at], entries: map[[2]uint64]prefixEntry{}})
		shorter, longer := ls[:at], ls[at+1:]
		hit, miss := tree(longer, (len(longer)-1)/2), tree(shorter, (len(shorter)-1)/2)
		h.steps[i].hit, h.steps[i].miss = hit, miss
		return i
	}
	h.first = tree(lengths, most)
}

// enter puts a rule where a search ends that its addresses begin, and what leads
// there on the way.
func (h *prefixHead) enter(length uint8, addr [2]uint64, m match) {
	for i := h.first; i != 0; {
		s := &h.steps[i]
		if s.length > length {
			i = s.miss
			continue
		}
		at := masked(addr, s.length)
		e := s.entries[at]
		e.addr = at
		e.kind |= abi.MatchKindUsed
		if s.length == length {
			e.kind |= abi.MatchKindRule
			e.say(m)
			s.entries[at] = e
			return
		}
		e.kind |= abi.MatchKindLonger
		s.entries[at] = e
		i = s.hit
	}
}

func (e *prefixEntry) say(m match) {
	e.target = m.Target
	e.kind |= m.Action & abi.MatchKindAction
	if m.Local != 0 {
		e.kind |= abi.MatchKindLocal
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
			if e.kind&abi.MatchKindRule == 0 {
				e.say(h.covering(s.length, at))
				s.entries[at] = e
			}
		}
	}
}

// covering is what the longest rule says that covers a prefix.
func (h *prefixHead) covering(length uint8, addr [2]uint64) match {
	for l := int(length); l >= 0; l-- {
		if m, ok := h.rules[l][masked(addr, uint8(l))]; ok {
			return m
		}
	}
	return match{}
}

// line is one of ws_match_line.
type line struct {
	entries []prefixEntry
	more    bool
}

// hashed spreads entries over lines, a power of two and a few behind them.
func hashed(entries map[[2]uint64]prefixEntry) (lines []line, log2 uint8, err error) {
	order := slices.SortedFunc(maps.Keys(entries), compareAddrs)
	for log2 = uint8(bits.Len(uint(len(order) - 1))); log2 <= linesLog2; log2++ {
		if lines = spread(entries, order, log2); lines != nil {
			return lines, log2, nil
		}
	}
	return nil, 0, fmt.Errorf("%d prefixes of one length find no place in a table of 2^%d lines", len(order), linesLog2)
}

func spread(entries map[[2]uint64]prefixEntry, order [][2]uint64, log2 uint8) []line {
	lines := make([]line, 1<<log2+abi.MatchRun-1)
	last := 1<<log2 - 1
	for _, k := range order {
		i := int(prefixHash(k) & (1<<log2 - 1))
		end := i + abi.MatchRun
		for ; i < end && len(lines[i].entries) == abi.MatchWays; i++ {
			lines[i].more = true
		}
		if i == end {
			return nil
		}
		lines[i].entries = append(lines[i].entries, entries[k])
		last = max(last, i)
	}
	return lines[:last+1]
}

// encode is what the map shall hold: a whole number of lines.
func (p prefixes) encode() ([]byte, error) {
	heads := map[uint32]*prefixHead{0: {}}
	head := func(class uint32) *prefixHead {
		if heads[class] == nil {
			heads[class] = &prefixHead{class: class}
		}
		return heads[class]
	}
	for k, m := range p.src {
		if err := head(k.Class).add(k.Prefixlen, k.Addr, m); err != nil {
			return nil, err
		}
	}
	for k, m := range p.dst {
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
	out := make([]byte, next*lineSize)
	for _, class := range order {
		h := heads[class]
		h.fill(heads)
		putStep(out, h.line, 0, prefixStep{hit: h.first}, 0, h.class)
		for i, s := range h.steps[1:] {
			lines, log2, err := hashed(s.entries)
			if err != nil {
				return nil, err
			}
			putStep(out, h.line, i+1, s, log2, uint32(len(out)/lineSize))
			for _, l := range lines {
				out = l.append(out)
			}
		}
	}
	return out, nil
}

// putStep writes a struct ws_match_step.
func putStep(b []byte, head uint32, i int, s prefixStep, log2 uint8, base uint32) {
	b = b[int(head)*lineSize+8*i:]
	b[0], b[1], b[2], b[3] = s.length, log2, s.hit, s.miss
	binary.NativeEndian.PutUint32(b[4:], base)
}

// Where in a struct ws_match_line a target and a kind are, and its last byte.
const (
	lineTargets = 16 * abi.MatchWays
	lineKinds   = lineTargets + 4*abi.MatchWays
	lineMore    = lineKinds + abi.MatchWays
)

// append appends a struct ws_match_line.
func (l line) append(b []byte) []byte {
	var to [lineSize]byte
	for i, e := range l.entries {
		binary.NativeEndian.PutUint64(to[16*i:], e.addr[0])
		binary.NativeEndian.PutUint64(to[16*i+8:], e.addr[1])
		binary.NativeEndian.PutUint32(to[lineTargets+4*i:], e.target)
		to[lineKinds+i] = e.kind
	}
	if l.more {
		to[lineMore] = 1
	}
	return append(b, to[:]...)
}

var errNotPrefixes = errors.New("a table of prefixes is damaged")

// decodePrefixes reads back what encode has written.
func decodePrefixes(b []byte) (prefixes, error) {
	out := prefixes{map[dstKey]match{}, map[srcKey]match{}}
	seen := map[uint32]bool{}
	var heads func(head uint32) (class uint32, err error)
	heads = func(head uint32) (uint32, error) {
		none, class, _, err := stepAt(b, head, 0)
		if err != nil || seen[head] {
			return class, err
		}
		seen[head] = true
		var read [256]bool // steps; those of a damaged table may lead round in a circle
		for todo := []uint8{none.hit}; len(todo) > 0; todo = todo[1:] {
			if todo[0] == 0 || read[todo[0]] {
				continue
			}
			read[todo[0]] = true
			s, base, log2, err := stepAt(b, head, int(todo[0]))
			if err != nil {
				return 0, err
			}
			todo = append(todo, s.hit, s.miss)
			entries, err := entriesAt(b, base, log2)
			if err != nil {
				return 0, err
			}
			for _, e := range entries {
				if e.kind&abi.MatchKindRule == 0 {
					continue
				}
				m := match{Target: e.target, Action: e.kind & abi.MatchKindAction}
				if e.kind&abi.MatchKindLocal != 0 {
					m.Local = 1
				}
				if m.Action == uint8(abi.MatchActionSource) {
					if m.Target, err = heads(e.target); err != nil {
						return 0, err
					}
				}
				var addr [16]uint8
				binary.BigEndian.PutUint64(addr[:8], e.addr[0])
				binary.BigEndian.PutUint64(addr[8:], e.addr[1])
				if class == 0 {
					out.dst[dstKey{uint32(s.length), addr}] = m
				} else {
					out.src[srcKey{class, uint32(s.length), addr}] = m
				}
			}
		}
		return class, nil
	}
	_, err := heads(0)
	return out, err
}

func stepAt(b []byte, head uint32, i int) (s prefixStep, base uint32, log2 uint8, err error) {
	at := int(head)*lineSize + 8*i
	if at+8 > len(b) {
		return s, 0, 0, errNotPrefixes
	}
	b = b[at:]
	return prefixStep{length: b[0], hit: b[2], miss: b[3]}, binary.NativeEndian.Uint32(b[4:]), b[1], nil
}

// entriesAt are the entries of one length.
func entriesAt(b []byte, base uint32, log2 uint8) (out []prefixEntry, err error) {
	if log2 > linesLog2 {
		return nil, errNotPrefixes
	}
	for i, more := 0, false; i < 1<<log2 || more; i++ {
		at := (int(base) + i) * lineSize
		if at+lineSize > len(b) {
			return nil, errNotPrefixes
		}
		l := b[at : at+lineSize]
		for way := range abi.MatchWays {
			e := prefixEntry{
				addr:   [2]uint64{binary.NativeEndian.Uint64(l[16*way:]), binary.NativeEndian.Uint64(l[16*way+8:])},
				target: binary.NativeEndian.Uint32(l[lineTargets+4*way:]), kind: l[lineKinds+way],
			}
			if e.kind != 0 {
				out = append(out, e)
			}
		}
		more = l[lineMore] != 0
	}
	return out, nil
}

// matchMap is what ws_match holds for each use.
func matchMap(lines uint32) *ebpf.MapSpec {
	return &ebpf.MapSpec{
		Name: "ws_match_map", Type: ebpf.Array, Flags: unix.BPF_F_MMAPABLE, KeySize: 4, ValueSize: lineSize, MaxEntries: lines,
	}
}

// putPrefixes makes a map of rules and puts it into ws_match, in one step for the
// packets.
func putPrefixes(outer *ebpf.Map, lines uint32, use uint32, p prefixes) error {
	b, err := p.encode()
	if err != nil {
		return err
	}
	if err := roomForLines(b, lines); err != nil {
		return err
	}
	m, err := ebpf.NewMap(matchMap(lines))
	if err != nil {
		return fmt.Errorf("make a map of prefixes: %w", err)
	}
	defer m.Close() // ws_match has it
	memory, err := m.Memory()
	if err != nil {
		return fmt.Errorf("map a map of prefixes: %w", err)
	}
	if _, err := memory.WriteAt(b, 0); err != nil {
		return fmt.Errorf("write a map of prefixes: %w", err)
	}
	if err := outer.Put(use, m); err != nil {
		return fmt.Errorf("write to map %s: %w", tableMatch, err)
	}
	return nil
}

func roomForLines(b []byte, lines uint32) error {
	if have := len(b) / lineSize; have > int(lines) {
		return fmt.Errorf("%w: %d lines of prefixes, of %d", errCapacity, have, lines)
	}
	return nil
}

// openMatch opens what ws_match holds.
func (g *generation) openMatch(use abi.MatchUse) (*ebpf.Map, error) {
	var id ebpf.MapID
	if err := g.maps[tableMatch].Lookup(uint32(use), &id); err != nil {
		return nil, fmt.Errorf("read map %s: %w", tableMatch, err)
	}
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return nil, fmt.Errorf("open what map %s holds: %w", tableMatch, err)
	}
	return m, nil
}

// readPrefixes reads what ws_match holds for a use.
func (g *generation) readPrefixes(use abi.MatchUse, p *prefixes) error {
	m, err := g.openMatch(use)
	if err != nil {
		return err
	}
	defer m.Close()
	memory, err := m.Memory()
	if err != nil {
		return fmt.Errorf("map what map %s holds: %w", tableMatch, err)
	}
	b := make([]byte, int(m.MaxEntries())*lineSize)
	if _, err := memory.ReadAt(b, 0); err != nil {
		return fmt.Errorf("read what map %s holds: %w", tableMatch, err)
	}
	if *p, err = decodePrefixes(b); err != nil {
		return fmt.Errorf("read what map %s holds: %w", tableMatch, err)
	}
	return nil
}

// emptyMatch gives each use a table without rules: by them an agent knows later how
// large they are.
func (g *generation) emptyMatch() error {
	for use := range uint32(abi.MatchUses) {
		if err := putPrefixes(g.maps[tableMatch], g.limits.lines, use, prefixes{}); err != nil {
			return err
		}
	}
	return nil
}

// swaps are the ops that replace a use's rules.
func swaps(ops []op, use abi.MatchUse, have, want prefixes) []op {
	if have.equal(want) {
		return ops
	}
	k := uint32(use)
	return append(ops, op{tableMatch, &k, &want})
}

// linesOf is how many lines the largest table takes.
func linesOf(all ...prefixes) (uint32, error) {
	most := 0
	for _, p := range all {
		b, err := p.encode()
		if err != nil {
			return 0, err
		}
		most = max(most, len(b)/lineSize)
	}
	return uint32(most), nil
}
