package labcli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/command"
)

const paperFile = "../../examples/paper.yaml"

// labExecVar makes the test binary one "waystamp lab", for what replaces its
// process.
const labExecVar = "WAYSTAMP_TEST_LAB_ARGS"

func TestLabProcess(t *testing.T) {
	args, ok := os.LookupEnv(labExecVar)
	if !ok {
		return // only of use to the tests below
	}
	os.Unsetenv(labExecVar)
	root := labRoot()
	root.SetArgs(append([]string{"lab"}, strings.Split(args, "\x1f")...))
	err := root.Execute()
	fmt.Fprintln(os.Stderr, err)
	os.Exit(command.ExitCode(err))
}

func labRoot() *cobra.Command {
	root := &cobra.Command{Use: "waystamp", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(NewLabCommand())
	return root
}

func runLab(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut bytes.Buffer
	root := labRoot()
	root.SetArgs(append([]string{"lab"}, args...))
	root.SetOut(&out)
	root.SetErr(&errOut)
	err = root.ExecuteContext(t.Context())
	return out.String(), errOut.String(), err
}

func labExec(t *testing.T, args ...string) (output string, status int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLabProcess$")
	cmd.Env = append(os.Environ(), labExecVar+"="+strings.Join(args, "\x1f"))
	b, err := cmd.CombinedOutput()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	return string(b), cmd.ProcessState.ExitCode()
}

func TestLabFromUpToDown(t *testing.T) {
	dir := t.TempDir()
	up := func() string {
		t.Helper()
		stdout, stderr, err := runLab(t, "up", "-f", paperFile, "--no-agents", "--run-dir", dir)
		if err != nil {
			t.Fatal(err)
		}
		prefix := strings.TrimSpace(stdout)
		if want := "lab " + prefix + " is up: 4 nodes, 2 routers, 2 hosts, 2 functions; state in " + filepath.Join(dir, prefix) + "\n"; stderr != want {
			t.Errorf("narration: got %q, want %q", stderr, want)
		}
		return prefix
	}
	t.Cleanup(func() { runLab(t, "down", "--all", "--run-dir", dir) })
	first := up()

	// One lab needs no name.
	out, status := labExec(t, "exec", "--run-dir", dir, "h1", "--", "sh", "-c", "readlink /proc/self/ns/net; exit 7")
	if status != 7 {
		t.Errorf("exit status: got %d, want the command's 7; output %q", status, out)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join("/run/netns", first+"-h1"), &st); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("net:[%d]\n", st.Ino); out != want {
		t.Errorf("exec ran in %q, want %q", out, want)
	}
	// What follows the name is the command's, also what looks like our flags.
	if out, status := labExec(t, "exec", "--run-dir", dir, "r4", "echo", "--prefix", "x", "--"); status != 0 || out != "--prefix x --\n" {
		t.Errorf("echo: status %d, output %q", status, out)
	}
	if out, status := labExec(t, "exec", "--run-dir", dir, "h9", "--", "true"); status != command.ExitFailed || !strings.Contains(out, `has no "h9"; it has h1, h2, r1, r2, r3, r4, r5, r6`) {
		t.Errorf("in h9: status %d, output %q", status, out)
	}
	if _, _, err := runLab(t, "exec", "--run-dir", dir, "h1"); command.ExitCode(err) != command.ExitUsage {
		t.Errorf("without a command: got %v, want wrong usage", err)
	}

	second := up()
	_, _, err := runLab(t, "exec", "--run-dir", dir, "h1", "--", "true")
	if command.ExitCode(err) != command.ExitUsage || !strings.Contains(err.Error(), first) || !strings.Contains(err.Error(), second) {
		t.Errorf("two labs, no prefix: got %v, want wrong usage that names both", err)
	}
	if out, status := labExec(t, "exec", "--run-dir", dir, "--prefix", second, "r4", "true"); status != 0 {
		t.Errorf("with a prefix: status %d, output %q", status, out)
	}
	stdout, _, err := runLab(t, "ls", "-o", "json", "--run-dir", dir)
	if err != nil {
		t.Fatal(err)
	}
	var listed struct {
		Version int
		Labs    []labView
	}
	if err := json.Unmarshal([]byte(stdout), &listed); err != nil {
		t.Fatalf("%v in %s", err, stdout)
	}
	if listed.Version != 1 || len(listed.Labs) != 2 || len(listed.Labs[0].Members) != 8 || listed.Labs[0].State != "up" {
		t.Errorf("ls -o json: got %s", stdout)
	}
	if stdout, _, err := runLab(t, "ls", "--run-dir", dir); err != nil || strings.Count(stdout, "\n") != 3 || !strings.Contains(stdout, first) {
		t.Errorf("ls: got %q, %v", stdout, err)
	}

	if _, stderr, err := runLab(t, "down", "--prefix", first, "--run-dir", dir); err != nil || stderr != "lab "+first+" is down\n" {
		t.Errorf("down --prefix: %q, %v", stderr, err)
	}
	if _, _, err := runLab(t, "down", "--prefix", first, "--run-dir", dir); err == nil || !strings.Contains(err.Error(), "there is no lab "+first) {
		t.Errorf("down again: %v", err)
	}
	if _, _, err := runLab(t, "down", "--all", "--prefix", second, "--run-dir", dir); command.ExitCode(err) != command.ExitUsage {
		t.Errorf("down --all --prefix: got %v, want wrong usage", err)
	}
	if _, stderr, err := runLab(t, "down", "--all", "--run-dir", dir); err != nil || stderr != "lab "+second+" is down\n" {
		t.Errorf("down --all: %q, %v", stderr, err)
	}
	if _, _, err := runLab(t, "down", "--run-dir", dir); err == nil || !strings.Contains(err.Error(), "no lab is up") {
		t.Errorf("down without a lab: %v", err)
	}
	left, err := filepath.Glob("/run/netns/" + first + "-*")
	more, _ := filepath.Glob("/run/netns/" + second + "-*")
	if err != nil || len(left)+len(more) > 0 {
		t.Errorf("left: %v %v", left, more)
	}
}

func TestLabUpRefusesWhatIsNoLab(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"up"}, command.ExitUsage, "-f is missing"},
		{[]string{"up", "-f", filepath.Join(dir, "nothing.yaml")}, command.ExitFailed, "no such file"},
		{[]string{"up", "-f", "../../examples/minimal.yaml"}, command.ExitFailed, "has no lab section"},
		{[]string{"up", "-f", paperFile, "--prefix", "A/b"}, command.ExitFailed, `lab prefix "A/b"`},
		{[]string{"ls", "-o", "xml"}, command.ExitUsage, "not a format"},
	} {
		_, _, err := runLab(t, append(c.args, "--run-dir", dir)...)
		if command.ExitCode(err) != c.code || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: got code %d, %v; want code %d, %q", c.args, command.ExitCode(err), err, c.code, c.want)
		}
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
