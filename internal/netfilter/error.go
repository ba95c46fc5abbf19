package netfilter

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/waystamp/waystamp/internal/yamlfile"
)

// Problem is one thing that is wrong with a ruleset.
type Problem struct {
	Line    int // in the source's file, from 1; 0: the ruleset as a whole
	Column  int // from 1, in characters
	Message string
}

// Error is a ruleset with problems. There is at least one.
type Error struct {
	Function string
	Problems []Problem // in the order of the text

	source Source
	lines  []string // as in the file, with what YAML took off as spaces
	cause  error
}

// Problems that one message shows. Behind a syntax error nft finds many that are none.
const shownMax = 5

// Error shows each problem with the lines it is about.
func (e *Error) Error() string {
	var b strings.Builder
	for i, p := range e.Problems {
		if i > 0 {
			b.WriteByte('\n')
		}
		if i == shownMax {
			fmt.Fprintf(&b, "rules of function %s: and %d more problems", e.Function, len(e.Problems)-i)
			break
		}
		if p.Line == 0 {
			fmt.Fprintf(&b, "rules of function %s: %s", e.Function, p.Message)
			continue
		}
		if e.source.File != "" {
			fmt.Fprintf(&b, "%s:%d:%d: ", e.source.File, p.Line, p.Column)
		}
		fmt.Fprintf(&b, "rules of function %s", e.Function)
		if e.source.File == "" {
			fmt.Fprintf(&b, ", line %d, column %d", p.Line, p.Column)
		}
		b.WriteString(": " + p.Message)
		b.WriteString(yamlfile.Caret(e.lines, e.source.Line, p.Line, p.Column))
	}
	return b.String()
}

func (e *Error) Unwrap() error { return e.cause }

// wrong is an error about the ruleset as a whole.
func (s Ruleset) wrong(message string, cause ...error) *Error {
	e := s.problems([]Problem{{Message: message}})
	if len(cause) > 0 {
		e.cause = cause[0]
	}
	return e
}

// problems makes an error of problems that are told by the lines and columns of the
// text.
func (s Ruleset) problems(ps []Problem) *Error {
	e := &Error{Function: s.Function, source: s.At}
	e.source.Line, e.source.Column = max(1, s.At.Line), max(1, s.At.Column)
	indent := strings.Repeat(" ", e.source.Column-1)
	for _, line := range s.lines() {
		e.lines = append(e.lines, indent+line)
	}
	for _, p := range ps {
		if p.Line > 0 {
			p.Line += e.source.Line - 1
			p.Column += e.source.Column - 1
		}
		e.Problems = append(e.Problems, p)
	}
	slices.SortStableFunc(e.Problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	e.Problems = slices.Compact(e.Problems)
	return e
}

// explain tells what nft has against a ruleset by the lines of its text.
func (s Ruleset) explain(r *refusal) *Error {
	var inside, outside []Problem
	lines := s.lines()
	for _, m := range r.messages {
		switch at := m.origin; {
		case at.line > 0:
			// nft counts bytes, and a tab as one of them.
			line := lines[at.line-1]
			before := line[:min(max(m.column-1, 0), len(line))]
			inside = append(inside, Problem{at.line, 1 + utf8.RuneCountInString(before), m.text})
		case at.argument != "":
			outside = append(outside, Problem{Message: fmt.Sprintf(
				"nft does not take %s as the name of an argument; give it another name (nft: %s)", at.argument, m.text)})
		default:
			outside = append(outside, Problem{Message: m.text})
		}
	}
	// A mistake in the text is often met again at the end of the table.
	if len(inside) > 0 && !slices.ContainsFunc(r.messages, func(m message) bool { return m.origin.argument != "" }) {
		outside = nil
	}
	return s.problems(append(inside, outside...))
}
