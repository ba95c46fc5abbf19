package function

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp/syntax"
	"slices"
)

// Patterns are those of package regexp (RE2), over bytes: each byte is a character from
// U+0000 to U+00FF. A search never goes back, takes the same small time for each byte, and
// holds one pointer per connection: it walks a deterministic automaton that is made, state
// by state, where the bytes lead to.

const (
	patternMax = 20_000 // instructions
	statesMax  = 2_000  // of an automaton; with more it is made anew
)

// compile compiles a pattern over bytes.
func compile(pattern string) (*syntax.Prog, error) {
	for _, r := range pattern {
		if r > 0x7f {
			return nil, fmt.Errorf("%q is not ASCII; write each of its bytes as \\xHH, or make it a literal", r)
		}
	}
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return nil, err
	}
	prog, err := syntax.Compile(re.Simplify())
	if err != nil {
		return nil, err
	}
	if len(prog.Inst) > patternMax {
		return nil, fmt.Errorf("the pattern compiles to %d instructions; at most %d are allowed", len(prog.Inst), patternMax)
	}
	d := newDFA(prog)
	if d.first.matched || d.matchesAtEnd(d.first) {
		return nil, errors.New("the pattern matches nothing at all, so it matches everything")
	}
	return prog, nil
}

// before is what stands before a position, as far as ^, $ and \b care.
type before uint8

const (
	begin before = iota
	newline
	word
	other
)

// rune is a character that stands for all of its kind.
func (b before) rune() rune { return [...]rune{-1, '\n', 'a', ' '}[b] }

type dfaState struct {
	threads []uint32    // instructions to follow at this position, sorted
	before  before      //
	matched bool        // a match ends here; no further state is made
	next    []*dfaState // by class of byte; an entry of nil: not made yet
	leaves  *leaves     // nil: not known yet
}

// leaves are the bytes behind which a search is at another state.
type leaves struct {
	count int
	byte  [256]bool
	only  byte // where count is 1
}

type dfa struct {
	prog    *syntax.Prog
	classes [256]uint8 // bytes that no instruction tells apart have the same class
	count   int        // of classes
	states  map[string]*dfaState
	first   *dfaState
	asked   bool // an instruction asks what stands before a position

	visited []uint32 // by instruction: the round that it was visited in
	round   uint32
	stack   []uint32
}

func newDFA(prog *syntax.Prog) *dfa {
	d := &dfa{prog: prog, states: map[string]*dfaState{}, visited: make([]uint32, len(prog.Inst))}
	d.asked = slices.ContainsFunc(prog.Inst, func(i syntax.Inst) bool { return i.Op == syntax.InstEmptyWidth })
	byKey := map[string]uint8{}
	for b := range 256 {
		key := []byte{byte(d.kindOf(byte(b)))}
		for i := range prog.Inst {
			if isRune(&prog.Inst[i]) {
				if prog.Inst[i].MatchRune(rune(b)) {
					key = append(key, 1)
				} else {
					key = append(key, 0)
				}
			}
		}
		class, ok := byKey[string(key)]
		if !ok {
			class = uint8(len(byKey))
			byKey[string(key)] = class
		}
		d.classes[b] = class
	}
	d.count = len(byKey)
	start := begin
	if !d.asked {
		start = other
	}
	d.first = d.state([]uint32{uint32(prog.Start)}, start)
	return d
}

// kindOf is the same for all bytes where no instruction asks.
func (d *dfa) kindOf(b byte) before {
	switch {
	case !d.asked:
	case b == '\n':
		return newline
	case syntax.IsWordChar(rune(b)):
		return word
	}
	return other
}

func isRune(i *syntax.Inst) bool {
	switch i.Op {
	case syntax.InstRune, syntax.InstRune1, syntax.InstRuneAny, syntax.InstRuneAnyNotNL:
		return true
	}
	return false
}

// state returns the state with these threads, which it sorts.
func (d *dfa) state(threads []uint32, b before) *dfaState {
	slices.Sort(threads)
	key := make([]byte, 1, 1+4*len(threads))
	key[0] = byte(b)
	for _, t := range threads {
		key = binary.LittleEndian.AppendUint32(key, t)
	}
	if s, ok := d.states[string(key)]; ok {
		return s
	}
	if len(d.states) >= statesMax {
		// Connections keep the states that they are at, and nothing that is behind those.
		for _, old := range d.states {
			old.next = nil
		}
		clear(d.states)
	}
	s := &dfaState{threads: threads, before: b, next: make([]*dfaState, d.count)}
	// A match that needs not to know what follows is one already.
	s.matched = d.follow(threads, 0, nil)
	d.states[string(key)] = s
	return s
}

// follow visits what can be reached from threads without a byte, where the conditions in
// holds are met, and tells whether a match is among it. Instructions that take a byte go
// to visit.
func (d *dfa) follow(threads []uint32, holds syntax.EmptyOp, visit func(*syntax.Inst)) (matched bool) {
	if d.round++; d.round == 0 {
		clear(d.visited)
		d.round = 1
	}
	d.stack = append(d.stack[:0], threads...)
	for len(d.stack) > 0 {
		pc := d.stack[len(d.stack)-1]
		d.stack = d.stack[:len(d.stack)-1]
		if d.visited[pc] == d.round {
			continue
		}
		d.visited[pc] = d.round
		switch i := &d.prog.Inst[pc]; i.Op {
		case syntax.InstAlt, syntax.InstAltMatch:
			d.stack = append(d.stack, i.Out, i.Arg)
		case syntax.InstCapture, syntax.InstNop:
			d.stack = append(d.stack, i.Out)
		case syntax.InstEmptyWidth:
			if syntax.EmptyOp(i.Arg)&^holds == 0 {
				d.stack = append(d.stack, i.Out)
			}
		case syntax.InstMatch:
			matched = true
		case syntax.InstFail:
		default:
			if visit != nil {
				visit(i)
			}
		}
	}
	return matched
}

// step returns the state behind a byte.
func (d *dfa) step(s *dfaState, b byte) *dfaState {
	class := d.classes[b]
	if s.next == nil { // of an automaton before this one
		s = d.state(s.threads, s.before)
	}
	if next := s.next[class]; next != nil {
		return next
	}
	// A search may begin at each byte.
	threads := []uint32{uint32(d.prog.Start)}
	seen := map[uint32]bool{threads[0]: true}
	matched := d.follow(s.threads, syntax.EmptyOpContext(s.before.rune(), rune(b)), func(i *syntax.Inst) {
		if i.MatchRune(rune(b)) && !seen[i.Out] {
			seen[i.Out] = true
			threads = append(threads, i.Out)
		}
	})
	var next *dfaState
	if matched {
		next = &dfaState{matched: true}
	} else {
		next = d.state(threads, d.kindOf(b))
	}
	if s.next != nil {
		s.next[class] = next
	}
	return next
}

// leavesMax is a number of bytes above which a search that skips has little to skip.
const leavesMax = 64

// skip returns how many of the first bytes of p leave a search at s, so that nobody has to walk
// over them.
func (d *dfa) skip(s *dfaState, p []byte) int {
	if s.leaves == nil {
		l := &leaves{}
		for b := range 256 {
			// The automaton may have been made anew meanwhile: then its states are others, and more bytes
			// than have to be are taken for such that leave.
			if d.step(s, byte(b)) != s {
				l.byte[b], l.only = true, byte(b)
				l.count++
			}
		}
		s.leaves = l
	}
	l := s.leaves
	switch {
	case l.count == 0:
		return len(p)
	case l.count == 1:
		if i := bytes.IndexByte(p, l.only); i >= 0 {
			return i
		}
		return len(p)
	case l.count > leavesMax:
		return 0
	}
	for i, b := range p {
		if l.byte[b] {
			return i
		}
	}
	return len(p)
}

// matchesAtEnd tells whether there is a match if the bytes end at a state.
func (d *dfa) matchesAtEnd(s *dfaState) bool {
	return d.follow(s.threads, syntax.EmptyOpContext(s.before.rune(), -1), nil)
}
