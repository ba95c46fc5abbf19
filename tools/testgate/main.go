// Command testgate runs the tests and decides whether that was a test run: a
// test that was skipped without a written reason, a package with tests of which
// none ran, and a run without any test are failures like a failing test. It
// knows nothing of what the tests are about; make test calls it.
//
//	testgate -skips test/skips.golden -- ARGUMENTS OF GO TEST [-- ARGUMENTS OF GO TEST ...]
//
// Each group of arguments is one run of go test, in order. Tests that failed, if
// they are few, then run again by themselves, twice each; one that passes both
// times is unsteady, and no failure (ADR 0155). The last line that it prints is
// "N passed, N failed, N skipped", and ", N unsteady" if there are.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
	"time"
)

func main() {
	skips := flag.String("skips", "", "file that lists the skips that are allowed, with their reasons")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := run(ctx, "", *skips, flag.Args(), os.Stdout)
	if err != nil && !errors.Is(err, errTests) {
		fmt.Fprintf(os.Stderr, "testgate: %v\n", err)
	}
	if err != nil {
		os.Exit(1)
	}
}

// errTests says that the report has told what is wrong.
var errTests = errors.New("the tests did not pass")

// run tests the module in dir, "" for the current folder.
func run(ctx context.Context, dir, skipsFile string, args []string, w io.Writer) error {
	text, err := os.ReadFile(skipsFile)
	if err != nil {
		return fmt.Errorf("read the list of allowed skips (-skips): %w", err)
	}
	gate, err := newGate(skipsFile, string(text))
	if err != nil {
		return err
	}
	for _, group := range split(args) {
		if err := goTest(ctx, gate, dir, group, w); err != nil {
			return err
		}
	}
	for _, test := range gate.Alone() {
		if err := alone(ctx, gate, string(text), dir, test, w); err != nil {
			return err
		}
	}
	if !gate.Finish(w) {
		return errTests
	}
	return nil
}

// alone runs a test of a package that failed beside others, with nothing beside it.
func alone(ctx context.Context, of *gate, skips, dir string, test [2]string, w io.Writer) error {
	const times = 2
	fmt.Fprintf(w, "again, by itself: %s %s\n", test[0], test[1])
	again, err := newGate(of.file, skips)
	if err != nil {
		return err
	}
	for range times {
		if err := goTest(ctx, again, dir, []string{"-timeout", "60m", "-run", "^" + test[1] + "$", test[0]}, w); err != nil {
			return err
		}
	}
	if again.failed == 0 && len(again.problems) == 0 && again.passed > 0 {
		of.Steady(test, fmt.Sprintf("passed %d times by itself", times))
	}
	return nil
}

// split cuts arguments into groups at each "--".
func split(args []string) [][]string {
	var groups [][]string
	for len(args) > 0 {
		n := slices.Index(args, "--")
		if n < 0 {
			return append(groups, args)
		}
		if n > 0 {
			groups = append(groups, args[:n])
		}
		args = args[n+1:]
	}
	return groups
}

// goTest runs go test once and feeds what it says to the gate.
func goTest(ctx context.Context, gate *gate, dir string, args []string, w io.Writer) error {
	cmd := exec.CommandContext(ctx, "go", slices.Concat([]string{"test", "-json", "-count=1"}, args)...)
	cmd.Dir = dir
	// Tests hold namespaces and pins; let them clean up when this is ended.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("run go test: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run go test: %w", err)
	}
	failedBefore := gate.failed
	readErr := gate.Read(out, w)
	waitErr := cmd.Wait()
	if ctx.Err() != nil {
		for _, s := range gate.Unfinished() {
			fmt.Fprintln(w, s)
		}
		return fmt.Errorf("interrupted while testing")
	}
	if readErr != nil {
		return readErr
	}
	if _, ok := errors.AsType[*exec.ExitError](waitErr); ok {
		if gate.failed == failedBefore {
			gate.Problem("go test ended with an error, yet named no failure; see above")
		}
	} else if waitErr != nil {
		return fmt.Errorf("run go test: %w", waitErr)
	}
	return nil
}
