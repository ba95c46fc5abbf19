package cli

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/pot"
)

const potDraft = "../pot/testdata/draft-08-3.3.yaml"

// The draft's path with masks on both links.
const potMasked = `prime-number: 0x35
validator-key: 0xa
hops:
  - {secret-share: 28, lpc: 21, public-polynomial: 1, downstream-mask: 00000000000000110000000000000022}
  - {secret-share: 17, lpc: 48, public-polynomial: 29, upstream-mask: 00000000000000110000000000000022, downstream-mask: 80000000000000000000000000000300}
  - {secret-share: 47, lpc: 38, public-polynomial: 20, upstream-mask: 80000000000000000000000000000300}
`

// runPot runs "waystamp pot" in this process.
func runPot(t *testing.T, newEBPF func() (pot.Engine, func() error, error), stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	root := &cobra.Command{Use: "waystamp", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(NewPotCommand(newEBPF))
	var out, errs bytes.Buffer
	root.SetIn(strings.NewReader(stdin))
	root.SetOut(&out)
	root.SetErr(&errs)
	root.SetArgs(append([]string{"pot"}, args...))
	err = root.Execute()
	if e, ok := errors.AsType[*command.ExitError](err); err != nil && !(ok && e.Err == nil) {
		errs.WriteString("waystamp: " + err.Error() + "\n")
	}
	return out.String(), errs.String(), err
}

func TestPotEvalPrintsEveryVisitAndTheVerdict(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--profile", potDraft, "--rnd", "45"}, command.ExitDone, `  HOP   RND   CML  WIRE RND  WIRE CML
    1  0x2d  0x11      0x2d      0x11
    2  0x2d  0x27      0x2d      0x27
    3  0x2d   0x2      0x2d       0x2
verified
`},
		{[]string{"--profile", potDraft, "--rnd", "0x2d", "--order", "1, 3"}, command.ExitRefused, `  HOP   RND   CML  WIRE RND  WIRE CML
    1  0x2d  0x11      0x2d      0x11
    3  0x2d  0x21      0x2d      0x21
refused (proof): CML is not (validator-key + RND) modulo the prime
`},
		{[]string{"--profile", potDraft, "--rnd", "98", "--order", "3,1,2"}, command.ExitRefused, `  HOP   RND   CML  WIRE RND  WIRE CML
    3  0x62  0x10      0x62      0x10
    1  0x62  0x21      0x62      0x21
    2  0x62   0x2      0x62       0x2
refused (range): RND or CML came to the verifier at or above the prime
`},
	} {
		stdout, stderr, err := runPot(t, nil, "", append([]string{"eval"}, c.args...)...)
		if d := cmp.Diff(c.want, stdout); d != "" || command.ExitCode(err) != c.code || stderr != "" {
			t.Errorf("%v: exit %d, want %d, stderr %q, -want +got:\n%s", c.args, command.ExitCode(err), c.code, stderr, d)
		}
	}
}

func TestPotEvalJSON(t *testing.T) {
	verified := `{
  "verified": true,
  "reason": "",
  "hops": [
    {
      "rnd": "0x2d",
      "cml": "0x11",
      "wire_rnd": "0x3c",
      "wire_cml": "0x33"
    },
    {
      "rnd": "0x2d",
      "cml": "0x27",
      "wire_rnd": "0x800000000000002d",
      "wire_cml": "0x327"
    },
    {
      "rnd": "0x2d",
      "cml": "0x2",
      "wire_rnd": "0x2d",
      "wire_cml": "0x2"
    }
  ]
}
`
	stdout, stderr, err := runPot(t, nil, potMasked, "eval", "--profile", "-", "--rnd", "45", "-o", "json")
	if d := cmp.Diff(verified, stdout); d != "" || err != nil || stderr != "" {
		t.Errorf("%v, stderr %q, -want +got:\n%s", err, stderr, d)
	}
	// Hop 3 takes off a mask that hop 1 did not put on.
	stdout, _, err = runPot(t, nil, potMasked, "eval", "--profile", "-", "--rnd", "45", "--output", "json", "--order", "1,3,2")
	for _, want := range []string{`"verified": false`, `"reason": "proof"`, `"rnd": "0x800000000000003c"`} {
		if !strings.Contains(stdout, want) {
			t.Errorf("order 1,3,2 does not say %s:\n%s", want, stdout)
		}
	}
	if command.ExitCode(err) != command.ExitRefused {
		t.Errorf("exit %d", command.ExitCode(err))
	}
	stdout, _, err = runPot(t, nil, potMasked, "eval", "--profile", "-", "--rnd", "0xffffffffffffffff", "-o", "json")
	if !strings.Contains(stdout, `"reason": "range"`) || !strings.Contains(stdout, `"rnd": "0xffffffffffffffff"`) || command.ExitCode(err) != command.ExitRefused {
		t.Errorf("exit %d:\n%s", command.ExitCode(err), stdout)
	}
}

func TestPotEvalRefusesWrongUsageInOneSentence(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none.yaml")
	composite := strings.Replace(potMasked, "0x35", "0x37", 1)
	for _, c := range []struct {
		stdin string
		args  []string
		code  int
		want  string
	}{
		{"", []string{"eval", "--rnd", "1"}, command.ExitUsage, "waystamp: --profile is missing; see waystamp pot eval --help\n"},
		{"", []string{"eval", "--profile", potDraft}, command.ExitUsage, "waystamp: --rnd is missing; see waystamp pot eval --help\n"},
		{"", []string{"eval", "--profile", potDraft, "--rnd", "-1"}, command.ExitUsage, "waystamp: --rnd: \"-1\" is not a number from 0 to 2^64-1, decimal or hexadecimal with 0x\n"},
		{"", []string{"eval", "--profile", potDraft, "--rnd", "0x10000000000000000"}, command.ExitUsage, "waystamp: --rnd: 0x10000000000000000 does not fit in 64 bits\n"},
		{"", []string{"eval", "--profile", potDraft, "--rnd", "1", "--order", "1,4"}, command.ExitUsage, "waystamp: --order: \"4\" is not a hop of the profile; expect numbers from 1 to 3, separated by commas\n"},
		{"", []string{"eval", "--profile", potDraft, "--rnd", "1", "--order", "0,1"}, command.ExitUsage, "waystamp: --order: \"0\" is not a hop of the profile; expect numbers from 1 to 3, separated by commas\n"},
		{"", []string{"eval", "--profile", potDraft, "--rnd", "1", "--order", "1,,2"}, command.ExitUsage, "waystamp: --order: \"\" is not a hop of the profile; expect numbers from 1 to 3, separated by commas\n"},
		{"", []string{"eval", "--profile", potDraft, "--rnd", "1", "--order", ""}, command.ExitUsage, "waystamp: --order: \"\" is not a hop of the profile; expect numbers from 1 to 3, separated by commas\n"},
		{"", []string{"eval", "--profile", potDraft, "--rnd", "1", "--engine", "gpu"}, command.ExitUsage, "waystamp: --engine: \"gpu\" is not an engine; expect model or ebpf\n"},
		{"", []string{"eval", "--profile", potDraft, "--rnd", "1", "-o", "xml"}, command.ExitUsage, "waystamp: --output: \"xml\" is not a format; expect table or json\n"},
		{"", []string{"eval", "--profile", missing, "--rnd", "1"}, command.ExitFailed, "waystamp: read the profile: open " + missing + ": no such file or directory\n"},
		{composite, []string{"eval", "--profile", "-", "--rnd", "1"}, command.ExitUsage, "waystamp: standard input:1:15: prime-number: 0x37 is not a prime number\n   1 | prime-number: 0x37\n                     ^\n"},
		{"", []string{"eval", "--profile", potDraft, "--rnd", "1", "--engine", "ebpf"}, command.ExitFailed, "waystamp: --engine ebpf: this build has no eBPF engine; use --engine model\n"},
	} {
		stdout, stderr, err := runPot(t, nil, c.stdin, c.args...)
		if command.ExitCode(err) != c.code || stderr != c.want || stdout != "" {
			t.Errorf("%v: exit %d, want %d, stdout %q, stderr\n%swant\n%s", c.args, command.ExitCode(err), c.code, stdout, stderr, c.want)
		}
	}
}

// fakeEngine is the model, counted, that refuses at one hop.
type fakeEngine struct {
	pot.Model
	stamps, verifies int
	fail             error
}

func (f *fakeEngine) Stamp(s pot.Share, h pot.Header, flow pot.Flow, wire pot.Values) (pot.Values, error) {
	f.stamps++
	if f.fail != nil && s.Position == 1 {
		return pot.Values{}, f.fail
	}
	return f.Model.Stamp(s, h, flow, wire)
}

func (f *fakeEngine) Verify(s pot.Share, v pot.Verifier, h pot.Header, flow pot.Flow, wire pot.Values) (pot.Values, pot.Result, error) {
	f.verifies++
	return f.Model.Verify(s, v, h, flow, wire)
}

func TestPotEvalUsesAndReleasesTheEBPFEngine(t *testing.T) {
	broken, stuck, unfit := errors.New("test run refused"), errors.New("busy"), errors.New("no permission")
	for _, c := range []struct {
		name                 string
		start, fail, release error
		order                string
		stamps, verifies     int
		code                 int
		says                 []string
	}{
		{name: "verified", order: "1,2,3", stamps: 2, verifies: 1, code: command.ExitDone},
		{name: "refused", order: "1,2", stamps: 1, verifies: 1, code: command.ExitRefused},
		{name: "a hop fails", fail: broken, order: "1,2,3", stamps: 2, code: command.ExitFailed, says: []string{"evaluate " + potDraft + " with the ebpf engine: visit 2, of hop 2: test run refused"}},
		{name: "no start", start: unfit, order: "1,2,3", code: command.ExitFailed, says: []string{"start the eBPF engine: no permission"}},
		{name: "stuck", release: stuck, order: "1,2,3", stamps: 2, verifies: 1, code: command.ExitFailed, says: []string{"release the eBPF engine: busy"}},
		{name: "a hop fails, stuck", fail: broken, release: stuck, order: "1,2,3", stamps: 2, code: command.ExitFailed, says: []string{"test run refused", "release the eBPF engine: busy"}},
		{name: "refused, stuck", release: stuck, order: "1,2", stamps: 1, verifies: 1, code: command.ExitRefused, says: []string{"release the eBPF engine: busy"}},
	} {
		e := &fakeEngine{fail: c.fail}
		released := 0
		_, stderr, err := runPot(t, func() (pot.Engine, func() error, error) {
			if c.start != nil {
				return nil, nil, c.start
			}
			return e, func() error { released++; return c.release }, nil
		}, "", "eval", "--profile", potDraft, "--rnd", "45", "--engine", "ebpf", "--order", c.order)
		if command.ExitCode(err) != c.code || e.stamps != c.stamps || e.verifies != c.verifies || released != 1 && c.start == nil {
			t.Errorf("%s: exit %d, %d stamps, %d verifies, released %d times: %v", c.name, command.ExitCode(err), e.stamps, e.verifies, released, err)
		}
		for _, want := range c.says {
			if !strings.Contains(stderr, want) {
				t.Errorf("%s: stderr %q does not say %q", c.name, stderr, want)
			}
		}
		if len(c.says) == 0 && stderr != "" {
			t.Errorf("%s: stderr %q", c.name, stderr)
		}
	}
}

func TestPotEvalDoesNotStartTheEBPFEngineForTheModel(t *testing.T) {
	_, _, err := runPot(t, func() (pot.Engine, func() error, error) {
		t.Error("started")
		return nil, nil, errors.New("started")
	}, "", "eval", "--profile", potDraft, "--rnd", "45")
	if err != nil {
		t.Error(err)
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestPotEvalSaysWhenItsResultCannotBeWritten(t *testing.T) {
	for _, format := range []string{"table", "json"} {
		cmd := NewPotCommand(nil)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetOut(fullDisk{})
		cmd.SetErr(io.Discard)
		cmd.SetArgs([]string{"eval", "--profile", potDraft, "--rnd", "45", "-o", format})
		if err := cmd.Execute(); command.ExitCode(err) != command.ExitFailed || err == nil || !strings.Contains(err.Error(), "write the result: no space left") {
			t.Errorf("%s: %v", format, err)
		}
	}
}

// The profile that the help shows is one that the command takes.
func TestPotEvalHelpShowsAProfileThatIsTaken(t *testing.T) {
	stdout, _, err := runPot(t, nil, "", "eval", "--help")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(stdout, "  prime-number:")
	profile, _, end := strings.Cut(rest, "\n\n")
	if !ok || !end {
		t.Fatalf("no profile in the help:\n%s", stdout)
	}
	file := filepath.Join(t.TempDir(), "help.yaml")
	if err := os.WriteFile(file, []byte("  prime-number:"+profile+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, stderr, err := runPot(t, nil, "", "eval", "--profile", file, "--rnd", "45"); err != nil {
		t.Errorf("%v: %s", err, stderr)
	}
}

func TestAnErrorAfterTheResultKeepsItsExitCode(t *testing.T) {
	cause := errors.New("no route")
	if err := afterResult(&command.ExitError{Code: command.ExitRefused}, cause); command.ExitCode(err) != command.ExitRefused || err.Error() != "no route" {
		t.Errorf("after a refusal: exit %d, %v", command.ExitCode(err), err)
	}
	if err := afterResult(nil, cause); !errors.Is(err, cause) || command.ExitCode(err) != command.ExitFailed {
		t.Errorf("after a success: %v", err)
	}
}
