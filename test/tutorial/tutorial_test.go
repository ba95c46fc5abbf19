package tutorial

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
)

// patience is for the whole tutorial, on a machine that does other things as well.
var patience = await.Limit(8 * time.Minute)

var reBlock = regexp.MustCompile("(?ms)^```(sh|sh fails|text)\n(.*?)^```$")

// step is a block of commands, with the output that the page shows behind it.
type step struct {
	line     int
	commands string
	fails    bool // its last command does, as the page says
	output   []string
}

func steps(page string) []step {
	var list []step
	end := 0
	for _, m := range reBlock.FindAllStringSubmatchIndex(page, -1) {
		kind, text := page[m[2]:m[3]], page[m[4]:m[5]]
		line := 1 + strings.Count(page[:m[4]], "\n")
		if kind != "text" {
			list = append(list, step{line: line, commands: text, fails: kind == "sh fails"})
			end = m[1]
			continue
		}
		// A picture is no output: only a block with nothing in between is.
		if len(list) > 0 && strings.TrimSpace(page[end:m[0]]) == "" {
			list[len(list)-1].output = strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		}
	}
	return list
}

// missing is the first line of want that is not in the output, in this order. Spaces
// count as one, and … stands for anything.
func missing(output string, want []string) string {
	lines := strings.Split(output, "\n")
	for _, w := range want {
		parts := strings.Split(strings.Join(strings.Fields(w), " "), "…")
		for i := range parts {
			parts[i] = regexp.QuoteMeta(parts[i])
		}
		re := regexp.MustCompile("^" + strings.Join(parts, ".*") + "$")
		i := 0
		for i < len(lines) && !re.MatchString(strings.Join(strings.Fields(lines[i]), " ")) {
			i++
		}
		if i == len(lines) {
			return w
		}
		lines = lines[i+1:]
	}
	return ""
}

func TestMissingFindsWhatIsNotShown(t *testing.T) {
	const output = "a  b\n3 packets, time 402ms\nlast\n"
	for _, c := range []struct {
		want string
		out  string
	}{
		{"a b", ""}, {"3 packets, …", ""}, {"a b\nlast", ""},
		{"3 packets", "3 packets"}, {"last\na b", "a b"}, {"…x…", "…x…"},
	} {
		if got := missing(output, strings.Split(c.want, "\n")); got != c.out {
			t.Errorf("missing of %q is %q; want %q", c.want, got, c.out)
		}
	}
}

// shell runs the steps, one after the other, in one bash, as the page asks for.
type shell struct {
	t      *testing.T
	in     io.Writer
	out    *bufio.Scanner
	marker string
}

// run gives back what a block wrote, the commands of it that failed, and the status of
// its last one.
func (s *shell) run(commands string) (output string, failed []string, status string) {
	fmt.Fprintf(s.in, "trap 'echo \"%s: $BASH_COMMAND\"' ERR\n%s\necho \"\n%s $?\"\n", s.marker, commands, s.marker)
	var b strings.Builder
	for s.out.Scan() {
		if status, ok := strings.CutPrefix(s.out.Text(), s.marker+" "); ok {
			return b.String(), failed, status
		}
		if command, ok := strings.CutPrefix(s.out.Text(), s.marker+": "); ok {
			failed = append(failed, command)
			continue
		}
		b.WriteString(s.out.Text() + "\n")
	}
	s.t.Fatalf("the shell ended: %v; so far it wrote\n%s", s.out.Err(), b.String())
	return "", nil, ""
}

// Every command of docs/tutorial.md does what the page shows. Only the prefix of names
// is another, so that the test meets nothing that somebody has built by hand.
func TestTheTutorialDoesWhatItShows(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes network namespaces and loads programs: run it as root")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs/tutorial.md"))
	if err != nil {
		t.Fatal(err)
	}
	var random [3]byte
	if _, err := rand.Read(random[:]); err != nil {
		t.Fatal(err)
	}
	prefix := "wst" + hex.EncodeToString(random[:])
	all := steps(string(page))
	if len(all) < 15 {
		t.Fatalf("the page has %d blocks of commands; there were more", len(all))
	}
	if n := strings.Count(all[0].commands, "\nP=wst "); n != 1 {
		t.Fatalf("the first block says P=wst %d times; the test puts another prefix there", n)
	}
	all[0].commands = strings.Replace(all[0].commands, "\nP=wst ", "\nP="+prefix+" ", 1)

	// Not t.Context, which ends before the shell has cleaned up.
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "bash")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir(), "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	sh := &shell{t: t, in: in, out: bufio.NewScanner(out), marker: "end of " + prefix}
	last := all[len(all)-1]
	done := false
	t.Cleanup(func() {
		if !done {
			// What the page does at its end, also if it did not get there.
			fmt.Fprintf(in, "%s\n", last.commands)
		}
		in.Close()
		for sh.out.Scan() {
		}
		cmd.Wait() //nolint:errcheck // its status is that of the last command, which was looked at
		for _, dir := range []string{"/run/netns", "/run/waystamp", "/var/lib/waystamp", "/sys/fs/bpf/waystamp"} {
			left, err := filepath.Glob(filepath.Join(dir, prefix+"-*"))
			if err != nil || len(left) > 0 {
				t.Errorf("left behind: %v %v", left, err)
			}
		}
	})
	for _, s := range all {
		output, failed, status := sh.run(s.commands)
		switch line := missing(output, s.output); {
		case len(failed) > 0 && !s.fails:
			t.Fatalf("docs/tutorial.md:%d: these commands fail: %q\n%s\n%s", s.line, failed, s.commands, output)
		case (status != "0") != s.fails:
			t.Fatalf("docs/tutorial.md:%d: status %s; want failure: %t\n%s\n%s", s.line, status, s.fails, s.commands, output)
		case line != "":
			t.Fatalf("docs/tutorial.md:%d: the page shows %q, which did not come; this did:\n%s\n%s", s.line, line, s.commands, output)
		}
		done = s.line == last.line
	}
}
