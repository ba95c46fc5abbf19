package labcli

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/bench"
	"github.com/waystamp/waystamp/internal/command"
)

const benchResult = `{"version": 1, "command": "hop", "started": "2026-01-02T03:04:05Z", "seconds": 1,
"machine": {"cpu": "x", "cpus": 2, "kernel": "6.18", "arch": "amd64", "mitigations": [], "load": 0}, "setup": [], "notes": [],
"figures": [{"name": "hop/end-opot/xdp", "unit": "ns/packet", "better": "less", "median": MEDIAN, "min": MEDIAN, "max": MEDIAN,
"n": 1, "baseline": "hop/end/kernel", "ratio": 3.75, "samples": [MEDIAN]}]}`

func runBench(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	root := NewBenchCommand()
	var out, errs bytes.Buffer
	code = command.Run(t.Context(), root, args, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

func writeBenchResult(t *testing.T, name, median string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(benchResult, "MEDIAN", median)), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestBenchCompareShowsBothRuns(t *testing.T) {
	code, out, errs := runBench(t, "compare", writeBenchResult(t, "a.json", "400"), writeBenchResult(t, "b.json", "320"))
	if code != command.ExitDone {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	for _, want := range []string{"hop/end-opot/xdp", "400", "320", "1.25 ×", "spreads are apart"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestBenchDocsWritesThePage(t *testing.T) {
	dir := t.TempDir()
	old := filepath.Join(dir, "performance", "old.svg")
	if err := errors.Join(os.Mkdir(filepath.Dir(old), 0o700), os.WriteFile(old, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := runBench(t, "docs", writeBenchResult(t, "r.json", "400"), dir); code != command.ExitDone {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	b, err := os.ReadFile(filepath.Join(dir, "performance.md"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), "| ≥ 3.70 | 3.75 | reached |") {
		t.Errorf("the first goal is not shown as reached:\n%.1500s", b)
	}
	if _, err := os.Stat(old); err == nil {
		t.Error("a plot of an older result is still there")
	}
	for _, name := range []string{"hop.svg", "hop.png"} {
		if _, err := os.Stat(filepath.Join(dir, "performance", name)); err != nil {
			t.Error(err)
		}
	}
}

// What was measured is kept, whatever becomes of the parts after it.
func TestBenchAllKeepsWhatItHas(t *testing.T) {
	part := func(name string, run func(context.Context) error) benchPart {
		return benchPart{name: name, run: func(ctx context.Context, _ bench.Config) (bench.Result, error) {
			if err := run(ctx); err != nil {
				return bench.Result{}, err
			}
			return bench.Result{Version: 1, Command: name, Figures: []bench.Figure{{Name: name + "/x", Unit: "ns", Median: 1, Max: 1, Samples: []float64{1}}}}, nil
		}}
	}
	fine := func(context.Context) error { return nil }
	broken := func(context.Context) error { return errors.New("no luck") }
	none := func(context.Context) error { return &bench.NoCaseError{Only: "y"} }
	var out, errs bytes.Buffer
	all := func(ctx context.Context, parts ...benchPart) (figures []string, err error) {
		f := benchFlags{out: t.TempDir()}
		cmd := &cobra.Command{}
		cmd.SetContext(ctx)
		out.Reset()
		errs.Reset()
		cmd.SetOut(&out)
		cmd.SetErr(&errs)
		err = f.all(cmd, parts)
		if r, err := bench.Read(f.out); err == nil {
			for _, x := range r.Figures {
				figures = append(figures, x.Name)
			}
		}
		return figures, err
	}
	if got, err := all(t.Context(), part("a", fine), part("b", broken), part("c", fine), part("d", none)); len(got) != 2 || err == nil || err.Error() != "bench b: no luck" {
		t.Errorf("one part fails: %v, %v", got, err)
	}
	if got, err := all(t.Context(), part("d", none)); len(got) != 0 || err == nil {
		t.Errorf("nothing is measured: %v, %v", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stop := func(ctx context.Context) error { cancel(); return ctx.Err() }
	if got, err := all(ctx, part("a", fine), part("b", stop), part("c", fine)); len(got) != 1 || !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v, %v", got, err)
	}
	if !strings.Contains(out.String(), "a/x") || errs.String() != "not measured: b, c\n" {
		t.Errorf("interrupted: shows\n%sand says %q", &out, &errs)
	}
}

func TestBenchUsageErrors(t *testing.T) {
	for _, args := range [][]string{{"hop", "--runs", "-1"}, {"hop", "extra"}, {"compare", "one"}, {"stamps"}, {"hop", "--duration", "fast"}} {
		if code, _, errs := runBench(t, args...); code != command.ExitUsage || errs == "" {
			t.Errorf("bench %s: exit code %d, %q; want %d and a sentence", strings.Join(args, " "), code, errs, command.ExitUsage)
		}
	}
	if code, _, _ := runBench(t, "compare", "/nowhere/a", "/nowhere/b"); code != command.ExitFailed {
		t.Errorf("compare of files that are not there: exit code %d, want %d", code, command.ExitFailed)
	}
}
