package main

import (
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

const page = "# x\n\n| requirement | there | by what | shown by |\n|---|---|---|---|\n" +
	"| First row | **yes** | a `thing` | `TestA`, `TestB` |\n" +
	"| Second | *in part* | b. Not: c | `TestB` |\n" +
	"| Third | **no** | | |\n\n" + begin + end + "\nmore\n"

func TestEachRowHasItsOutcome(t *testing.T) {
	rows := rowsOf(page)
	want := []row{{"First row", "yes", []string{"TestA", "TestB"}}, {"Second", "in part", []string{"TestB"}}, {"Third", "no", nil}}
	if !reflect.DeepEqual(rows, want) {
		t.Fatalf("the rows are %+v; want %+v", rows, want)
	}
	for text, want := range map[string]int{"": 2, "row": 1, "SECOND": 1, "third": 0, "s": 2, "none": 0} {
		if got := choose(rows, text); len(got) != want {
			t.Errorf("%q chooses %d rows; want %d", text, len(got), want)
		}
	}
	longer := append(rows, row{name: "Second of all", tests: []string{"TestA"}})
	if got := choose(longer, "second"); len(got) != 1 || got[0].name != "Second" {
		t.Errorf("the name of a row chooses %+v; want that row alone", got)
	}
	for want, results := range map[string]map[string]string{
		"passed":                              {"TestA": "pass", "TestB": "pass"},
		"`TestB` failed":                      {"TestA": "pass", "TestB": "fail"},
		"`TestA` was skipped":                 {"TestA": "skip", "TestB": "pass"},
		"`TestA` did not run, `TestB` failed": {"TestB": "fail"},
	} {
		if got := rows[0].outcome(results); got != want {
			t.Errorf("with %v the row is %q; want %q", results, got, want)
		}
	}
}

// What is written is read again, and rows that did not run keep what they have.
func TestRowsKeepTheirOutcomes(t *testing.T) {
	rows := rowsOf(page)
	first, err := withOutcomes(page, rows, map[string]string{"Second": "passed | 1 | 6.18 x86_64 | abc | 2026-11-27"})
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"| First row | did not run | 2 | | | |\n", "| Second | passed | 1 | 6.18 x86_64 | abc | 2026-11-27 |\n", "| Third | none | 0 | | | |\n", "\nmore\n"} {
		if !strings.Contains(first, line) {
			t.Errorf("the page has no %q:\n%s", line, first)
		}
	}
	kept := outcomesOf(first)
	if kept["Second"] != "passed | 1 | 6.18 x86_64 | abc | 2026-11-27" {
		t.Errorf("read again: %q", kept)
	}
	kept["First row"] = "`TestA` failed | 2 | k | c | d"
	second, err := withOutcomes(first, rows, kept)
	if err != nil || !strings.Contains(second, "| First row | `TestA` failed | 2 | k | c | d |\n") || !strings.Contains(second, "| Second | passed | 1 | 6.18") || strings.Count(second, "| Third |") != 2 {
		t.Errorf("%v:\n%s", err, second)
	}
	if !reflect.DeepEqual(rowsOf(second), rows) {
		t.Error("the results are taken for rows")
	}
	if _, err := withOutcomes("# x\n", rows, nil); err == nil {
		t.Error("a page without a place for results has them")
	}
}

func TestResultsAreThoseOfWholeTests(t *testing.T) {
	got := map[string]string{}
	var said strings.Builder
	err := readResults(strings.NewReader(`{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA/sub","Output":"why\n"}
{"Action":"fail","Test":"TestA/sub"}
{"Action":"fail","Test":"TestA"}
{"Action":"pass","Test":"TestB"}
{"Action":"pass","Test":"TestC/sub"}
{"Action":"skip","Test":"TestD"}
{"Action":"pass"}
no JSON
`), got, &said)
	if err != nil || !reflect.DeepEqual(got, map[string]string{"TestA": "fail", "TestB": "pass", "TestD": "skip"}) {
		t.Errorf("%v, %v", got, err)
	}
	if said.String() != "why\nno JSON\n" {
		t.Errorf("it says %q", said.String())
	}
}

func TestTestsAreFoundInTheirPackages(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("a/x_test.go", "package a\n\nfunc TestA(t *testing.T) {}\nfunc TestOther(t *testing.T) {}\n")
	write("b/c/y_test.go", "package c\n\nfunc TestB(t *testing.T) {}\n")
	t.Chdir(root)
	got, err := packagesOf(".", map[string]bool{"TestA": true, "TestB": true})
	if want := []testPackage{{"./a", []string{"TestA"}}, {"./b/c", []string{"TestB"}}}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	if _, err := packagesOf(".", map[string]bool{"TestC": true}); err == nil || !strings.Contains(err.Error(), "no test TestC") {
		t.Errorf("a test that is not there: %v", err)
	}
	write("d/z_test.go", "package d\n\nfunc TestA(t *testing.T) {}\n")
	if _, err := packagesOf(".", map[string]bool{"TestA": true}); err == nil || !strings.Contains(err.Error(), "of which there is one") {
		t.Errorf("a name of two tests: %v", err)
	}
}

// A run of a module of its own: one row passes, the other does not, and the page says so.
func TestARunIsWrittenIntoThePage(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":      "module example.org/x\n\ngo 1.26\n",
		"a/a_test.go": "package a\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) { t.Error(\"broken on purpose\") }\nfunc TestB(t *testing.T) {}\n",
		"page.md":     page,
		".git/HEAD":   "",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(root)
	results := map[string]string{}
	packages, err := packagesOf(".", map[string]bool{"TestA": true, "TestB": true})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range packages {
		if err := p.run(t.Context(), results, io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	if want := map[string]string{"TestA": "fail", "TestB": "pass"}; !reflect.DeepEqual(results, want) {
		t.Errorf("the tests came to %v; want %v", results, want)
	}
}
