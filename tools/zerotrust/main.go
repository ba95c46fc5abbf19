// Command zerotrust runs the tests that docs/reference/zero-trust.md names for its rows, and writes there what they came to:
// rows that did not run keep what they came to before.
//
//	go run ./tools/zerotrust [-row TEXT] [-page FILE]
//
// It needs root, as make test does, and ends with 1 if a row did not pass.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	o := options{}
	flag.StringVar(&o.page, "page", "docs/reference/zero-trust.md", "`file` with the rows, and for the results")
	flag.StringVar(&o.row, "row", "", "`name` of the row to run, or text in the names of several; all without it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := o.run(ctx, os.Stdout)
	if err != nil {
		fmt.Fprintf(os.Stderr, "zerotrust: %v\n", err)
		os.Exit(1)
	}
}

type options struct{ page, row string }

func (o options) run(ctx context.Context, w io.Writer) error {
	text, err := os.ReadFile(o.page)
	if err != nil {
		return err
	}
	rows := rowsOf(string(text))
	chosen := choose(rows, o.row)
	wanted := map[string]bool{}
	for _, r := range chosen {
		for _, t := range r.tests {
			wanted[t] = true
		}
	}
	if len(chosen) == 0 {
		return fmt.Errorf("no row of %s that names tests has %q in its name", o.page, o.row)
	}
	packages, err := packagesOf(".", wanted)
	if err != nil {
		return err
	}
	results := map[string]string{}
	for _, p := range packages {
		fmt.Fprintf(w, "%s: %s\n", p.path, strings.Join(p.tests, " "))
		if err := p.run(ctx, results, w); err != nil {
			return err
		}
	}
	now, err := surroundings(ctx)
	if err != nil {
		return err
	}
	kept := outcomesOf(string(text))
	passed := 0
	for _, r := range chosen {
		out := r.outcome(results)
		if out == allPassed {
			passed++
		}
		kept[r.name] = fmt.Sprintf("%s | %d | %s", out, len(r.tests), now)
		fmt.Fprintf(w, "%s: %s\n", r.name, out)
	}
	next, err := withOutcomes(string(text), rows, kept)
	if err != nil {
		return fmt.Errorf("%s: %w", o.page, err)
	}
	if err := os.WriteFile(o.page, []byte(next), 0o644); err != nil {
		return err
	}
	if passed < len(chosen) {
		return fmt.Errorf("%d of %d rows did not pass", len(chosen)-passed, len(chosen))
	}
	return nil
}

// row is one of the page's table.
type row struct {
	name  string
	there string // yes, in part or no
	tests []string
}

// choose finds the rows that name tests and have a text in their names, or the one whose name it is.
func choose(rows []row, text string) (out []row) {
	for _, r := range rows {
		switch {
		case len(r.tests) == 0:
		case strings.EqualFold(r.name, text):
			return []row{r}
		case strings.Contains(strings.ToLower(r.name), strings.ToLower(text)):
			out = append(out, r)
		}
	}
	return out
}

var (
	reRow  = regexp.MustCompile(`(?m)^\| ([A-Z][^|]*) \| \*+(yes|in part|no)\*+ \|.*\|([^|]*)\|$`)
	reTest = regexp.MustCompile("`(Test\\w+)`")
)

func rowsOf(page string) (rows []row) {
	for _, m := range reRow.FindAllStringSubmatch(page, -1) {
		r := row{name: m[1], there: m[2]}
		for _, t := range reTest.FindAllStringSubmatch(m[3], -1) {
			r.tests = append(r.tests, t[1])
		}
		rows = append(rows, r)
	}
	return rows
}

const allPassed = "passed"

// outcome says what a row's tests came to.
func (r row) outcome(results map[string]string) string {
	var bad []string
	for _, t := range r.tests {
		switch results[t] {
		case "pass":
		case "":
			bad = append(bad, "`"+t+"` did not run")
		case "skip":
			bad = append(bad, "`"+t+"` was skipped")
		default:
			bad = append(bad, "`"+t+"` failed")
		}
	}
	if bad == nil {
		return allPassed
	}
	return strings.Join(bad, ", ")
}

// testPackage is a package with tests to run.
type testPackage struct {
	path  string
	tests []string
}

var reFunc = regexp.MustCompile(`(?m)^func (Test\w+)\(`)

// packagesOf finds the packages that have the tests, below a folder. The error names those that none has, or that two have.
func packagesOf(root string, wanted map[string]bool) (out []testPackage, err error) {
	in := map[string][]string{} // by folder
	seen := map[string]string{}
	err = filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && name != root:
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		folder := filepath.Dir(name)
		for _, m := range reFunc.FindAllStringSubmatch(string(text), -1) {
			if !wanted[m[1]] {
				continue
			}
			if other, twice := seen[m[1]]; twice && other != folder {
				return fmt.Errorf("%s is a test of %s and of %s; the page must name tests of which there is one", m[1], other, folder)
			}
			seen[m[1]] = folder
			in[folder] = append(in[folder], m[1])
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for t := range wanted {
		if seen[t] == "" {
			err = errors.Join(err, fmt.Errorf("there is no test %s", t))
		}
	}
	for folder, tests := range in {
		slices.Sort(tests)
		out = append(out, testPackage{"./" + filepath.ToSlash(folder), tests})
	}
	slices.SortFunc(out, func(a, b testPackage) int { return strings.Compare(a.path, b.path) })
	return out, err
}

// run runs the tests, and notes what each came to. A test that fails is no error.
func (p testPackage) run(ctx context.Context, results map[string]string, w io.Writer) error {
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-timeout", "60m", "-json", "-run", "^("+strings.Join(p.tests, "|")+")$", p.path)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // workers confine themselves: not with cgo
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	readErr := readResults(out, results, w)
	err = cmd.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.As(err, new(*exec.ExitError)) {
		err = nil // the results say so
		w.Write(said.Bytes())
	}
	return errors.Join(readErr, err)
}

// readResults reads the output of go test -json, and prints what tests that failed have printed.
func readResults(r io.Reader, results map[string]string, w io.Writer) error {
	printed := map[string]*strings.Builder{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e struct{ Action, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Fprintln(w, lines.Text()) // of a build that failed
			continue
		}
		name, _, sub := strings.Cut(e.Test, "/")
		if printed[name] == nil {
			printed[name] = &strings.Builder{}
		}
		printed[name].WriteString(e.Output)
		if e.Action != "pass" && e.Action != "fail" && e.Action != "skip" || sub {
			continue
		}
		if e.Test != "" {
			results[name] = e.Action
		}
		if e.Action == "fail" {
			io.WriteString(w, printed[name].String())
		}
	}
	return lines.Err()
}

// surroundings are on what the tests ran.
func surroundings(ctx context.Context) (string, error) {
	kernel, err := exec.CommandContext(ctx, "uname", "-rm").Output()
	if err != nil {
		return "", fmt.Errorf("uname: %w", err)
	}
	commit, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty=+", "--exclude=*").Output()
	if err != nil {
		return "", fmt.Errorf("git describe: %w", err)
	}
	words := strings.Fields(string(kernel))
	release := regexp.MustCompile(`^\d+\.\d+`).FindString(words[0])
	return fmt.Sprintf("%s %s | %s | %s", release, words[len(words)-1], strings.TrimSpace(string(commit)), time.Now().Format(time.DateOnly)), nil
}

// The results are between these lines of the page.
const (
	begin = "<!-- Written by go run ./tools/zerotrust. Do not edit. -->\n"
	end   = "<!-- end -->\n"
	head  = "| requirement | its tests | number | kernel | commit | day |\n|---|---|---|---|---|---|\n"
)

var reOutcome = regexp.MustCompile(`(?m)^\| ([A-Z][^|]*) \| ((?:[^|]*\|){4}[^|]*) \|$`)

// outcomesOf are the results that the page has, by row.
func outcomesOf(page string) map[string]string {
	kept := map[string]string{}
	_, text, _ := strings.Cut(page, begin)
	text, _, _ = strings.Cut(text, end)
	for _, m := range reOutcome.FindAllStringSubmatch(text, -1) {
		kept[m[1]] = m[2]
	}
	return kept
}

// withOutcomes puts results into the page, a line for each row.
func withOutcomes(page string, rows []row, kept map[string]string) (string, error) {
	before, rest, ok := strings.Cut(page, begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return "", fmt.Errorf("it has no place for the results: a line %q, and behind it %q", strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	var b strings.Builder
	b.WriteString(head)
	for _, r := range rows {
		out := kept[r.name]
		switch {
		case len(r.tests) == 0:
			out = "none | 0 | | | "
		case out == "":
			out = fmt.Sprintf("did not run | %d | | | ", len(r.tests))
		}
		fmt.Fprintf(&b, "| %s | %s |\n", r.name, strings.TrimSuffix(out, " "))
	}
	return before + begin + b.String() + end + after, nil
}
