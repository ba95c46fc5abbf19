// Package manifest turns the file that an operator writes into a model.Domain.
// What it returns is valid as a whole, so that no one checks it again; what it
// refuses, it refuses with every problem of the file at once, each with its
// place. It reads bytes, never files, and knows nothing of plans. It is called
// by the commands that take a file, by internal/lab and by tests.
package manifest

import (
	"fmt"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
)

// Manifest is a checked file.
type Manifest struct {
	Domain   model.Domain
	Lab      *model.Lab // nil: the file has no lab section
	Warnings []Problem  // what is allowed, yet looks like a mistake
}

// SourceMax is the length in bytes of the largest file that is read: 512 for each of
// the 32 768 chains that the SIDs of a block are enough for.
const SourceMax = 16 << 20

// Parse reads a file. The name is only used in messages. The error is an
// *Error with all problems, in the order of the file.
func Parse(name string, src []byte) (Manifest, error) {
	r := &reader{name: name}
	m, _, err := r.parse(src)
	return m, err
}

func (r *reader) parse(src []byte) (Manifest, *Parsed, error) {
	lines, root, ok := r.document(src)
	if !ok {
		return Manifest{}, nil, r.error(r.name, lines)
	}
	if !r.version(root) {
		return Manifest{}, nil, r.error(r.name, lines)
	}
	f := r.file(root)
	p := &Parsed{lines: lines}
	if starts, end, ok := chainLines(root, lines); ok && len(starts) == len(f.chains.value) {
		p.chains, p.starts, p.end = slices.Clone(f.chains.value), starts, end
	}
	m := r.check(f)
	if len(r.problems) > 0 {
		return Manifest{}, nil, r.error(r.name, lines)
	}
	m.Warnings = inOrder(r.warnings)
	return m, p, nil
}

// error is what Parse returns once there are problems.
func (r *reader) error(name string, lines []string) *Error {
	return &Error{Name: name, Problems: inOrder(r.problems), lines: lines}
}

func inOrder(problems []Problem) []Problem {
	slices.SortStableFunc(problems, func(a, b Problem) int {
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return a.Column - b.Column
	})
	return problems
}

func (r *reader) problemf(at place, format string, args ...any) {
	r.problems = append(r.problems, at.problem(fmt.Sprintf(format, args...)))
}

func (r *reader) warnf(at place, format string, args ...any) {
	r.warnings = append(r.warnings, at.problem(fmt.Sprintf(format, args...)))
}
