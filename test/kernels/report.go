package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

// skipList is what a kernel cannot: lines of KERNEL PACKAGE TEST REASON.
type skipList []skip

type skip struct {
	kernel, pkg, test, reason string
}

func readSkips(file string) (skipList, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return parseSkips(file, string(text))
}

func parseSkips(file, text string) (out skipList, err error) {
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		if len(f) < 4 {
			return nil, fmt.Errorf("%s:%d: expect KERNEL PACKAGE TEST REASON, got %q", file, n, line)
		}
		out = append(out, skip{f[0], f[1], f[2], strings.Join(f[3:], " ")})
	}
	return out, nil
}

// of are the tests of a package that a kernel cannot do.
func (l skipList) of(kernel, pkg string) (tests []string) {
	for _, s := range l {
		if s.kernel == kernel && s.pkg == pkg {
			tests = append(tests, s.test)
		}
	}
	return tests
}

// report reads what a machine says, and judges it.
type report struct {
	w       io.Writer
	kernel  string
	steps   []step
	skips   skipList
	partial bool // not all tests of a step were asked for

	at      int // the step that runs; -1: none
	done    int
	tests   int                      // of this step that have ended
	said    map[string]*bytes.Buffer // by each test that has not passed, and by "", which is none
	speaker string                   // the test that the next lines are of
	failing string                   // the line about a test that has failed; what its parts say follows it
	problem []string

	verifier verifierFigures

	before tally // as the step began
	tally
	came []tally // of each step that has ended
}

// tally is what a step, or all of them, came to.
type tally struct {
	step                    string
	passed, failed, skipped int
	seconds                 float64
}

func newReport(w io.Writer, kernel string, steps []step, skips skipList, partial bool) *report {
	return &report{w: w, kernel: kernel, steps: steps, skips: skips, partial: partial, at: -1, said: map[string]*bytes.Buffer{}}
}

func (r *report) line(verdict, what string) {
	fmt.Fprintf(r.w, "%-6s %-4s %s\n", r.kernel, verdict, what)
}

func (r *report) read(in io.Reader) error {
	s := bufio.NewScanner(in)
	s.Buffer(nil, 64<<20)
	for s.Scan() {
		line := strings.TrimSuffix(s.Text(), "\r")
		if word, ok := strings.CutPrefix(line, mark); ok {
			r.where(word)
			continue
		}
		r.test(line)
	}
	return s.Err()
}

// where takes in where the guest is.
func (r *report) where(line string) {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "step":
		r.at = slices.IndexFunc(r.steps, func(s step) bool { return s.name == rest })
		r.tests = 0
		r.before = r.tally
		r.forget()
		for _, s := range r.skips {
			if r.at >= 0 && s.kernel == r.kernel && s.pkg == r.steps[r.at].pkg && r.steps[r.at].has(s.test) {
				r.skipped++
				r.line("skip", fmt.Sprintf("%s %s: %s", s.pkg, s.test, s.reason))
			}
		}
	case "end":
		r.end(rest)
	case "failed":
		r.problem = append(r.problem, "the machine's first process says: "+rest)
	}
}

func (r *report) end(rest string) {
	var code int
	var seconds float64
	if _, err := fmt.Sscan(rest, &code, &seconds); err != nil || r.at < 0 {
		r.problem = append(r.problem, fmt.Sprintf("the guest says %q", rest))
		return
	}
	s := r.steps[r.at]
	r.tellFailing()
	what := fmt.Sprintf("%s, %.0f s", s.name, seconds)
	switch {
	case s.pkg == "" && code == 0:
		r.passed++
		if s.shows {
			what += "; it said:\n" + r.allSaid()
		}
		r.line("pass", what)
	case s.pkg == "" || code != 0 && r.failed == r.before.failed:
		r.failed++
		r.line("FAIL", fmt.Sprintf("%s, ended with code %d; it said:\n%s", what, code, r.allSaid()))
	case r.tests == 0 && !r.partial:
		r.problem = append(r.problem, fmt.Sprintf("%s: not one test has run", s.name))
	default:
		fmt.Fprintf(r.w, "%-6s      %s\n", r.kernel, what)
	}
	r.came = append(r.came, tally{s.name, r.passed - r.before.passed, r.failed - r.before.failed, r.skipped - r.before.skipped, seconds})
	r.at = -1
	r.done++
}

// console takes in what the machine's console has shown, once it has ended.
func (r *report) console(said string) {
	if fault := consoleFault(said); fault != "" {
		r.problem = append(r.problem, "the console shows a fault of the kernel's own:\n"+fault)
	}
}

// test takes in a line of a step. Tests that run beside each other mix what they say: go test names the one whose
// lines follow ("=== NAME"), and tells of a test's parts behind its verdict.
func (r *report) test(line string) {
	if r.at < 0 {
		return
	}
	if strings.HasPrefix(line, verifierMark) {
		if err := r.verifier.add(r.kernel, line); err != nil {
			r.problem = append(r.problem, err.Error())
		}
		return
	}
	if r.steps[r.at].pkg == "" {
		r.say(line)
		return
	}
	if f := strings.Fields(line); len(f) > 1 && f[0] == "===" {
		r.tellFailing()
		r.speaker, _, _ = strings.Cut(strings.Join(f[2:], " "), "/")
		return
	}
	for verdict, count := range map[string]*int{"PASS": &r.passed, "FAIL": &r.failed, "SKIP": nil} {
		what, ok := strings.CutPrefix(line, "--- "+verdict+": ")
		if !ok {
			continue
		}
		r.tellFailing()
		r.tests++
		r.speaker, _, _ = strings.Cut(what, " ")
		what = r.steps[r.at].pkg + " " + what
		switch verdict {
		case "PASS":
			*count++
			r.line("pass", what)
			delete(r.said, r.speaker)
		case "FAIL":
			*count++
			r.failing = what
		default:
			r.failed++
			r.failing = what + ": skipped, and skips.golden does not say why:"
		}
		return
	}
	if !strings.HasPrefix(strings.TrimLeft(line, " "), "--- PASS: ") {
		r.say(line)
	}
}

// say keeps a line of the test that speaks.
func (r *report) say(line string) {
	b := r.said[r.speaker]
	if b == nil {
		b = new(bytes.Buffer)
		r.said[r.speaker] = b
	}
	fmt.Fprintln(b, line)
}

// tellFailing tells of the test that has failed, once all that it says has come.
func (r *report) tellFailing() {
	if r.failing == "" {
		return
	}
	said := ""
	if b := r.said[r.speaker]; b != nil {
		said = b.String()
	}
	r.line("FAIL", r.failing+"\n"+said)
	delete(r.said, r.speaker)
	r.failing = ""
}

// allSaid is what those tests have said that have not ended, and a command.
func (r *report) allSaid() string {
	var all strings.Builder
	for _, test := range slices.Sorted(maps.Keys(r.said)) {
		all.WriteString(r.said[test].String())
	}
	return all.String()
}

// forget forgets what was said.
func (r *report) forget() { r.said, r.speaker, r.failing = map[string]*bytes.Buffer{}, "", "" }

// begun tells whether a guest has said anything.
func (r *report) begun() bool { return r.begunSince(report{at: -1}) }

// begunSince tells whether a guest has said anything since the report was as before.
func (r *report) begunSince(before report) bool {
	return r.at >= 0 || r.done > before.done || len(r.problem) > len(before.problem)
}

// endedSince tells whether a step has come to its end since, or why it could not was told.
func (r *report) endedSince(before report) bool {
	return r.done > before.done || len(r.problem) > len(before.problem)
}

func (r *report) finish() bool {
	for _, p := range r.problem {
		fmt.Fprintf(r.w, "%-6s FAIL %s\n", r.kernel, p)
	}
	return len(r.problem) == 0 && r.failed == 0
}
