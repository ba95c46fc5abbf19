package cli

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/command"
)

// argsVar makes the test binary a waystamp with these arguments, since handing over
// replaces a process.
const argsVar = "WAYSTAMP_TEST_ARGS"

func TestWaystampProcess(t *testing.T) {
	args, ok := os.LookupEnv(argsVar)
	if !ok {
		return // only of use to the tests below
	}
	os.Unsetenv(argsVar)
	os.Exit(Main(t.Context(), strings.Split(args, "\x1f"), os.Stdin, os.Stdout, os.Stderr))
}

// waystamp runs the test binary with dir as PATH.
func waystamp(t *testing.T, dir string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestWaystampProcess$")
	cmd.Env = []string{"PATH=" + dir, argsVar + "=" + strings.Join(args, "\x1f")}
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// labIn makes a LabProgram that shows its arguments, and ends with 7.
func labIn(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	script := `#!/bin/sh
[ "$1" != __complete ] || { printf '%s\n' "up-$3" "down" ":4"; exit 0; }
for a in "$0" "$@"; do printf '<%s>' "$a"; done
exit 7
`
	if err := os.WriteFile(filepath.Join(dir, LabProgram), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestWaystampHandsOverToItsLaboratory(t *testing.T) {
	dir := labIn(t)
	self := "<" + filepath.Join(dir, LabProgram) + ">"
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"lab", "exec", "--prefix", "x", "h1", "--", "ping", "-c", "3"}, self + "<lab><exec><--prefix><x><h1><--><ping><-c><3>"},
		{[]string{"demo"}, self + "<demo>"},
		{[]string{"bench", "--help"}, self + "<bench><--help>"},
		{[]string{"help", "lab"}, self + "<lab><--help>"},
	} {
		stdout, stderr, code := waystamp(t, dir, c.args...)
		if stdout != c.want || stderr != "" || code != 7 {
			t.Errorf("%q: exit code %d, %q, %q; want 7 and %q", c.args, code, stdout, stderr, c.want)
		}
	}
	stdout, _, code := waystamp(t, dir, "__complete", "lab", "u")
	if stdout != "up-u\ndown\n:4\n" || code != 0 {
		t.Errorf("completion of lab: exit code %d, %q", code, stdout)
	}
}

func TestWaystampSaysWhereItsLaboratoryShouldBe(t *testing.T) {
	_, stderr, code := waystamp(t, t.TempDir(), "lab", "ls")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	want := "waystamp: waystamp lab: the program waystamp-lab is neither in " + filepath.Dir(self) + " nor in PATH; install it beside waystamp (make build builds both)\n"
	if stderr != want || code != command.ExitFailed {
		t.Errorf("exit code %d, %q; want %q", code, stderr, want)
	}
}

func TestHelpListsWhatIsHandedOver(t *testing.T) {
	stdout, _, code := waystamp(t, t.TempDir(), "--help")
	for _, c := range InLab {
		if !strings.Contains(stdout, c.Name) || !strings.Contains(stdout, c.Short) {
			t.Errorf("no %s in the help:\n%s", c.Name, stdout)
		}
	}
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
}
