package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/test/packets"
)

// runExplain runs the command on the test packets of these names.
func runExplain(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := NewExplainCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var out, errs bytes.Buffer
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	err := cmd.Execute()
	if err != nil {
		errs.WriteString(err.Error())
	}
	return out.String(), errs.String(), command.ExitCode(err)
}

func pathsFile(t *testing.T) string {
	t.Helper()
	w, err := packets.LoadWorld()
	if err != nil {
		t.Fatal(err)
	}
	b, err := plan.EncodePaths(w.Paths[:1])
	if err != nil {
		t.Fatal(err)
	}
	return writeFile(t, "paths.json", b)
}

func writeFile(t *testing.T, name string, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func eventLines(t *testing.T, names ...string) string {
	t.Helper()
	var b []byte
	for _, name := range names {
		p, err := packets.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		b, err = event.Append(b, event.Event{Node: p.Node, Interface: "r6-r5", Reason: event.ReasonName(p.Reason), Packet: p.Frame})
		if err != nil {
			t.Fatal(err)
		}
	}
	return string(b)
}

const explained2 = "r6 r6-r5 refused (segments): r2 (fw) and r3 (dpi) never stamped this packet; its segment list says r4, fc00:0:0:501::\n" +
	"r6 r6-r5 refused (unproven): a packet from fc00:7::2 to fc00:8::2, which chain web requires, came without proof\n"

func TestExplainReadsEventsFromAnywhere(t *testing.T) {
	paths := pathsFile(t)
	lines := eventLines(t, "list-r4-r5-unstamped", "unproven")
	file := writeFile(t, "events.jsonl", []byte(lines))
	for _, c := range []struct {
		stdin string
		args  []string
	}{{lines, nil}, {lines, []string{"-"}}, {"", []string{file}}} {
		args := append([]string{"--paths", paths, "--name", "fc00:0:0:401::=r4"}, c.args...)
		out, errs, code := runExplain(t, c.stdin, args...)
		if out != explained2 || errs != "" || code != command.ExitDone {
			t.Errorf("%v: exit %d, printed\n%s%s, want\n%s", c.args, code, out, errs, explained2)
		}
	}
}

func TestExplainPrintsJSON(t *testing.T) {
	out, errs, code := runExplain(t, eventLines(t, "keyed-skipped-1", "keyed-swapped"), "--paths", pathsFile(t), "-o", "json")
	if code != command.ExitDone || errs != "" {
		t.Fatalf("exit %d: %s", code, errs)
	}
	d := json.NewDecoder(strings.NewReader(out))
	for _, want := range []explain.Kind{explain.Skipped, explain.Order} {
		var x struct {
			Sentence   string
			Hypotheses []struct{ Kind explain.Kind }
		}
		if err := d.Decode(&x); err != nil {
			t.Fatal(err)
		}
		if x.Sentence == "" || len(x.Hypotheses) != 1 || x.Hypotheses[0].Kind != want {
			t.Errorf("got %+v, want one hypothesis of kind %s", x, want)
		}
	}
}

func TestExplainWithoutEventsSaysSo(t *testing.T) {
	out, errs, code := runExplain(t, "", "--paths", pathsFile(t))
	if out != "" || errs != "there are no events in standard input\n" || code != command.ExitDone {
		t.Errorf("exit %d, %q, %q", code, out, errs)
	}
}

func TestExplainRefusesWrongUsage(t *testing.T) {
	paths := pathsFile(t)
	broken := writeFile(t, "broken.json", []byte(`{"version": 1}`))
	for _, c := range []struct {
		stdin string
		args  []string
		want  string
	}{
		{"", nil, "--paths is missing"},
		{"", []string{"--paths", paths, "-o", "yaml"}, `--output is "yaml"; expect text or json`},
		{"", []string{"--paths", paths, "--name", "r4"}, `--name: "r4" is not of the form SID=NAME`},
		{"", []string{"--paths", paths, "--name", "10.0.0.1=r4"}, `--name: "10.0.0.1" is not an IPv6 address`},
		{"", []string{"--paths", paths, "a", "b"}, "accepts at most 1 arg"},
		{"", []string{"--paths", "/nonexistent"}, "read the paths: open /nonexistent"},
		{"", []string{"--paths", paths, "/nonexistent"}, "read events: open /nonexistent"},
		{"", []string{"--paths", broken}, "paths " + broken + ": "},
		{"\nnonsense\n", []string{"--paths", paths}, `events in standard input: line 2: "nonsense" is not an event`},
	} {
		out, errs, code := runExplain(t, c.stdin, c.args...)
		if out != "" || code != command.ExitUsage || !strings.Contains(errs, c.want) {
			t.Errorf("%v: exit %d, %q, want %d with %q", c.args, code, errs, command.ExitUsage, c.want)
		}
	}
}

func TestExplainRefusesSecretsThatOthersCanRead(t *testing.T) {
	file := writeFile(t, "paths.json", []byte(`{"version":1,"kind":"paths","paths":[]}`))
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"explain", "--paths", file}, {"watch", "--once", "--paths", file}} {
		var stdout, stderr bytes.Buffer
		code := Main(t.Context(), args, strings.NewReader(""), &stdout, &stderr)
		if says := file + " has mode 0640"; code != command.ExitFailed || !strings.Contains(stderr.String(), says) {
			t.Errorf("%q: exit code %d, says %q; want %q", args, code, &stderr, says)
		}
	}
}
