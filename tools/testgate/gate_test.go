package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A module with one test file, run by the real go test.
func runModule(t *testing.T, skips, testFile string, args ...string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module gated\n\ngo 1.26\n", "a_test.go": testFile, "skips": skips,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	err := run(context.Background(), dir, filepath.Join(dir, "skips"), append([]string{"."}, args...), &out)
	return out.String(), err
}

// once is a test whose subtest fails as often as told, and then passes.
func once(name string, fails int) string {
	file := fmt.Sprintf("%q", name+strconv.Itoa(fails))
	return "func " + name + "(t *testing.T) { t.Run(\"sub\", func(t *testing.T) { had, _ := os.ReadFile(" + file + "); os.WriteFile(" + file +
		", append(had, '.'), 0o600); if len(had) < " + strconv.Itoa(fails) + " { t.Fail() } }) }\n"
}

const (
	withFiles = "package gated\nimport (\"os\"; \"testing\")\n"
	passing   = "package gated\nimport \"testing\"\nfunc TestGood(t *testing.T) {}\n"
	failing   = "func TestBad(t *testing.T) { t.Log(\"what it said\"); t.Fail() }\n"
	skipped   = "func TestOld(t *testing.T) { t.Run(\"sub\", func(t *testing.T) { t.Skip(\"too old\") }) }\n"
)

func TestTheGateJudgesARun(t *testing.T) {
	tests := []struct {
		name, skips, file string
		args              []string
		ok                bool
		last              string // line
		want              []string
		not               string // in the report
	}{
		{name: "all pass", file: passing, ok: true, last: "1 passed, 0 failed, 0 skipped",
			want: []string{"ok   gated  1 passed"}},
		{name: "two groups count together", file: passing, args: []string{"--", "./nonesuch"},
			last: "1 passed, 1 failed, 0 skipped", want: []string{"./nonesuch"}},
		{name: "a run that go test refuses", file: passing, args: []string{"--", "-count=x"},
			last: "1 passed, 1 failed, 0 skipped", want: []string{"named no failure"}},
		{name: "a failure shows what the test said", file: passing + failing, last: "1 passed, 1 failed, 0 skipped",
			want: []string{"FAIL gated TestBad\n", "what it said", "the last that it said:\nFAIL gated TestBad\n     "}},
		{name: "a failure that comes once alone", last: "2 passed, 0 failed, 0 skipped, 2 unsteady", ok: true,
			file: withFiles + once("TestOnce", 1),
			want: []string{"FAIL gated TestOnce/sub\n", "again, by itself: gated TestOnce\n", "unsteady gated TestOnce/sub: failed beside the others, and passed 2 times by itself"}},
		{name: "a failure that comes twice", last: "0 passed, 2 failed, 0 skipped", file: withFiles + once("TestTwice", 2),
			want: []string{"again, by itself: gated TestTwice\n", "the last that it said:\nFAIL gated TestTwice/sub\n"}},
		{name: "more failures than few", last: "0 passed, 8 failed, 0 skipped", not: "again",
			file: withFiles + once("TestA", 1) + once("TestB", 1) + once("TestC", 1) + once("TestD", 1)},
		{name: "a failure beside a problem", last: "0 passed, 3 failed, 1 skipped", not: "again",
			file: withFiles + once("TestA", 1) + "func TestOld(t *testing.T) { t.Skip(\"too old\") }\n"},
		{name: "a skip that nothing allows", file: passing + skipped, last: "2 passed, 1 failed, 1 skipped",
			want: []string{"FAIL gated TestOld/sub was skipped", "too old"}},
		{name: "an allowed skip", skips: "gated TestOld/sub Linux 9\n", file: passing + skipped, ok: true,
			last: "2 passed, 0 failed, 1 skipped", want: []string{"allowed: Linux 9"}},
		{name: "an allowed skip that did run", skips: "gated TestGood Linux 9\n", file: passing, ok: true,
			last: "1 passed, 0 failed, 0 skipped"},
		{name: "an allowed skip of no test", skips: "# why\n\ngated TestGone Linux 9\n", file: passing,
			last: "1 passed, 1 failed, 0 skipped", want: []string{"TestGone", "take the line out"}},
		{name: "test files without tests", file: "package gated\n", last: "0 passed, 2 failed, 0 skipped",
			want: []string{"not one test of it ran", "not one test ran"}},
		{name: "tests that TestMain never ran", last: "0 passed, 2 failed, 0 skipped",
			file: withFiles + "func TestMain(*testing.M) { os.Exit(0) }\nfunc TestGood(t *testing.T) {}\n",
			want: []string{"not one test of it ran"}},
		{name: "a filter that leaves nothing", file: passing, args: []string{"-run", "Nonesuch"},
			last: "0 passed, 2 failed, 0 skipped", want: []string{"not one test ran"}},
		{name: "code that does not build", file: "package gated\nfunc f() int {}\n", last: "0 passed, 1 failed, 0 skipped",
			want: []string{"missing return"}},
		{name: "a process that dies", last: "0 passed, 1 failed, 0 skipped",
			file: withFiles + "func TestExit(t *testing.T) { println(\"last words\"); os.Exit(3) }\n",
			want: []string{"last words", "ended in the middle of TestExit"}},
		{name: "a process that is killed", last: "1 passed, 1 failed, 0 skipped",
			file: passing[:13] + "\nimport (\"os\"; \"syscall\"; \"testing\")\n" + passing[len("package gated\nimport \"testing\"\n"):] +
				"func TestKill(t *testing.T) { t.Run(\"sub\", func(t *testing.T) { syscall.Kill(os.Getpid(), syscall.SIGKILL) }) }\n",
			want: []string{"signal: killed", "ended in the middle of TestKill, TestKill/sub"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			out, err := runModule(t, tt.skips, tt.file, tt.args...)
			if (err == nil) != tt.ok || err != nil && !errors.Is(err, errTests) {
				t.Errorf("the gate returned %v; want ok %v", err, tt.ok)
			}
			lines := strings.Split(strings.TrimRight(out, "\n"), "\n")
			if got := lines[len(lines)-1]; got != tt.last {
				t.Errorf("the last line is %q; want %q", got, tt.last)
			}
			for _, w := range tt.want {
				if !strings.Contains(out, w) {
					t.Errorf("the report does not say %q", w)
				}
			}
			if tt.not != "" && strings.Contains(out, tt.not) {
				t.Errorf("the report says %q", tt.not)
			}
			if t.Failed() {
				t.Logf("the report:\n%s", out)
			}
		})
	}
}

func TestTheListOfSkipsIsRefusedWithoutAReason(t *testing.T) {
	for _, text := range []string{"gated TestOld\n", "gated\n", "a B c\na B d\n"} {
		if _, err := newGate("skips", text); err == nil || !strings.Contains(err.Error(), "skips:") {
			t.Errorf("%q: got %v; want an error that names the line", text, err)
		}
	}
}

func TestSplit(t *testing.T) {
	got := split([]string{"--", "a", "b", "--", "--", "c"})
	if want := [][]string{{"a", "b"}, {"c"}}; !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestPackagesWithoutAnOutcomeAreNamed(t *testing.T) {
	g, err := newGate("skips", "")
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	const events = `{"Action":"start","Package":"a"}
{"Action":"run","Package":"a","Test":"TestOne"}
{"Action":"pass","Package":"a","Test":"TestOne"}
{"Action":"run","Package":"a","Test":"TestTwo"}
{"Action":"start","Package":"b"}
`
	if err := g.Read(strings.NewReader(events), &out); err != nil {
		t.Fatal(err)
	}
	if g.Finish(&out) || !strings.Contains(out.String(), "FAIL a did not finish; it was at TestTwo\nFAIL b did not finish\n") {
		t.Errorf("the report:\n%s", &out)
	}
}
