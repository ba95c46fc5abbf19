package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// event is a line of go test -json; see `go doc test2json`.
type event struct {
	Action      string
	Package     string
	Test        string
	Elapsed     float64 // seconds
	Output      string
	FailedBuild string
	ImportPath  string // of build-output and build-fail
}

// gate judges runs of go test. It is not safe for concurrent use.
type gate struct {
	file     string
	allowed  map[string]string // "package test" to the reason
	outcomes map[string]bool   // "package test" of every test that ended

	passed, failed, skipped int
	unsteady                int // of those that passed; see Steady
	problems                []string
	failures                []failure

	packages map[string]*pkg
	builds   map[string]*bytes.Buffer // what the compiler said, by import path
}

// failure is a test or subtest that failed.
type failure struct {
	pkg, test string
	said      string // the last of it
	passed    string // how it passed by itself, behind the others; "" if it did not
}

type pkg struct {
	passed, failed, skipped int
	noFiles                 bool
	ended                   bool
	running                 map[string]bool          // tests that have begun and not ended
	output                  map[string]*bytes.Buffer // by test; "" is the package's own
}

// newGate reads the list of allowed skips: a line is PACKAGE TEST REASON, where
// REASON names the kernel version or setting that the test wants; # starts a
// comment line.
func newGate(file, text string) (*gate, error) {
	g := &gate{
		file:     file,
		allowed:  map[string]string{},
		outcomes: map[string]bool{},
		packages: map[string]*pkg{},
		builds:   map[string]*bytes.Buffer{},
	}
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		if len(f) < 3 {
			return nil, fmt.Errorf("%s:%d: expect PACKAGE TEST REASON, got %q", file, n, line)
		}
		key := f[0] + " " + f[1]
		if _, dup := g.allowed[key]; dup {
			return nil, fmt.Errorf("%s:%d: %s is listed twice", file, n, key)
		}
		g.allowed[key] = strings.Join(f[2:], " ")
	}
	return g, nil
}

// Read takes the events of one go test to their end and prints a line for each
// package, and everything that a failing test said.
func (g *gate) Read(r io.Reader, w io.Writer) error {
	in := bufio.NewScanner(r)
	in.Buffer(nil, 64<<20)
	for in.Scan() {
		line := bytes.TrimSpace(in.Bytes())
		if len(line) == 0 {
			continue
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			// Not an event: go itself, or a test that wrote past the testing
			// package. Show it; the exit code of go test says what it means.
			fmt.Fprintf(w, "%s\n", line)
			continue
		}
		g.event(e, w)
	}
	if err := in.Err(); err != nil {
		return fmt.Errorf("read the output of go test: %w", err)
	}
	return nil
}

func (g *gate) event(e event, w io.Writer) {
	if e.ImportPath != "" {
		b := g.builds[e.ImportPath]
		if b == nil {
			b = &bytes.Buffer{}
			g.builds[e.ImportPath] = b
		}
		b.WriteString(e.Output)
		return
	}
	p := g.packages[e.Package]
	if p == nil {
		p = &pkg{output: map[string]*bytes.Buffer{}, running: map[string]bool{}}
		g.packages[e.Package] = p
	}
	if e.Action == "output" {
		if e.Test == "" && strings.Contains(e.Output, "[no test files]") {
			p.noFiles = true
		}
		if p.output[e.Test] == nil {
			p.output[e.Test] = &bytes.Buffer{}
		}
		p.output[e.Test].WriteString(e.Output)
		return
	}
	if e.Test == "" {
		g.packageEnded(e, p, w)
		return
	}
	g.testEnded(e, p, w)
}

func (g *gate) testEnded(e event, p *pkg, w io.Writer) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "run":
		p.running[e.Test] = true
		return
	case "pass":
		p.passed++
		g.passed++
	case "fail":
		p.failed++
		g.failed++
		said := indent(p.output[e.Test])
		fmt.Fprintf(w, "FAIL %s %s\n%s", e.Package, e.Test, said)
		g.failures = append(g.failures, failure{pkg: e.Package, test: e.Test, said: lastLines(said, 12)})
	case "skip":
		p.skipped++
		g.skipped++
		if reason, ok := g.allowed[key]; ok {
			fmt.Fprintf(w, "skip %s (allowed: %s)\n", key, reason)
		} else {
			g.Problem(fmt.Sprintf(
				"%s was skipped, which %s does not allow; it said:\n%s", key, g.file, indent(p.output[e.Test])))
		}
	default:
		return
	}
	g.outcomes[key] = true
	delete(p.running, e.Test)
	delete(p.output, e.Test)
}

func (g *gate) packageEnded(e event, p *pkg, w io.Writer) {
	ran := p.passed + p.failed
	switch e.Action {
	case "fail":
		p.ended = true
		fmt.Fprintf(w, "FAIL %s  %d passed, %d failed, %d skipped  %.1f s\n", e.Package, p.passed, p.failed, p.skipped, e.Elapsed)
		if len(p.running) > 0 {
			fmt.Fprintf(w, "     ended in the middle of %s: a panic, a signal or the time limit\n", p.underWay())
		}
		if p.failed == 0 {
			// Did not build, panicked outside a test, or ran out of time.
			g.failed++
			if b := g.builds[e.FailedBuild]; b != nil {
				fmt.Fprint(w, indent(b))
			}
			for _, name := range slices.Sorted(maps.Keys(p.output)) {
				fmt.Fprint(w, indent(p.output[name]))
			}
		}
	case "pass", "skip":
		p.ended = true
		switch {
		case p.noFiles:
			fmt.Fprintf(w, "--   %s  no test files\n", e.Package)
		case ran == 0 && p.skipped == 0:
			g.Problem(fmt.Sprintf("%s has test files, but not one test of it ran", e.Package))
		default:
			fmt.Fprintf(w, "ok   %s  %d passed, %d skipped  %.1f s\n", e.Package, p.passed, p.skipped, e.Elapsed)
		}
	default:
		return
	}
	p.output = map[string]*bytes.Buffer{}
}

// underWay names the tests that have begun and not ended.
func (p *pkg) underWay() string { return strings.Join(slices.Sorted(maps.Keys(p.running)), ", ") }

// Unfinished says of each package that has no outcome what it was at.
func (g *gate) Unfinished() []string {
	var list []string
	for _, path := range slices.Sorted(maps.Keys(g.packages)) {
		if p := g.packages[path]; !p.ended {
			s := path + " did not finish"
			if len(p.running) > 0 {
				s += "; it was at " + p.underWay()
			}
			list = append(list, s)
		}
	}
	return list
}

// Problem makes the run a failure for a cause that is no test's.
func (g *gate) Problem(s string) { g.problems = append(g.problems, s) }

// Finish prints what is wrong and the sum, and says whether all is well.
func (g *gate) Finish(w io.Writer) bool {
	if g.passed+g.failed == 0 {
		g.Problem("not one test ran")
	}
	for _, s := range g.Unfinished() {
		g.Problem(s)
	}
	for _, key := range slices.Sorted(maps.Keys(g.allowed)) {
		if path, _, _ := strings.Cut(key, " "); g.packages[path] != nil && !g.outcomes[key] {
			g.Problem(fmt.Sprintf("%s allows %s to be skipped, but there is no such test; take the line out", g.file, key))
		}
	}
	if len(g.failures) > 0 {
		fmt.Fprintln(w, "Once more what failed, and the last that it said:")
	}
	unsteady := ""
	for _, f := range g.failures {
		if f.passed == "" {
			fmt.Fprintf(w, "FAIL %s %s\n%s", f.pkg, f.test, f.said)
			continue
		}
		unsteady = fmt.Sprintf(", %d unsteady", g.unsteady)
		fmt.Fprintf(w, "unsteady %s %s: failed beside the others, and %s; mend it\n%s", f.pkg, f.test, f.passed, f.said)
	}
	for _, p := range g.problems {
		fmt.Fprintf(w, "FAIL %s\n", strings.TrimRight(p, "\n"))
	}
	// A problem is a failure of the run, so the sum never shows none beside one.
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped%s\n", g.passed, g.failed+len(g.problems), g.skipped, unsteady)
	return g.failed == 0 && len(g.problems) == 0
}

// Alone returns the tests, without their subtests, that are worth a run by
// themselves: all that failed, by package, if these are few and nothing else is wrong.
func (g *gate) Alone() [][2]string {
	const few = 3
	var list [][2]string
	for _, f := range g.failures {
		top, _, _ := strings.Cut(f.test, "/")
		if t := [2]string{f.pkg, top}; !slices.Contains(list, t) {
			list = append(list, t)
		}
	}
	if len(list) > few || len(g.problems) > 0 || len(g.Unfinished()) > 0 || g.failed != len(g.failures) {
		return nil
	}
	return list
}

// Steady takes a test and its subtests off what failed, since it passed by itself; how says how.
func (g *gate) Steady(test [2]string, how string) {
	for i := range g.failures {
		f := &g.failures[i]
		if top, _, _ := strings.Cut(f.test, "/"); f.pkg == test[0] && top == test[1] {
			f.passed = how
			g.failed--
			g.passed++
			g.unsteady++
		}
	}
}

// lastLines returns the last n lines of s, which ends with a newline or is empty.
func lastLines(s string, n int) string {
	lines := strings.SplitAfter(s, "\n")
	return strings.Join(lines[max(0, len(lines)-1-n):], "")
}

func indent(b *bytes.Buffer) string {
	if b == nil {
		return ""
	}
	var out strings.Builder
	for line := range strings.Lines(b.String()) {
		out.WriteString("     " + strings.TrimRight(line, "\n") + "\n")
	}
	return out.String()
}
