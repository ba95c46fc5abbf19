package cli

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/doctor"
)

func TestReportForPeopleBeginsWithTheWorst(t *testing.T) {
	r := doctor.Report{Findings: []doctor.Finding{
		{Check: "kernel", Verdict: doctor.Yes, Weight: doctor.Warning, Says: "this is Linux 6.1"},
		{Check: "extra", Verdict: doctor.No, Weight: doctor.Cost, Says: "the kernel lacks tcx", Effect: "filters hold the programs"},
		{Check: "forwarding", Verdict: doctor.No, Weight: doctor.Warning, Says: "interface eth0 does not forward IPv6", Effect: "packets find no way", Mend: "sysctl -w x=1"},
		{Check: "clock", Verdict: doctor.Unknown, Weight: doctor.Warning, Says: "no clock"},
		{Check: "rights", Verdict: doctor.No, Weight: doctor.Fatal, Says: "this process lacks CAP_BPF", Mend: "run as root"},
	}}
	const want = `fatal    rights: this process lacks CAP_BPF
         mend it: run as root
wrong    forwarding: interface eth0 does not forward IPv6
         so that packets find no way
         mend it: sysctl -w x=1
unknown  clock: no clock
slower   extra: the kernel lacks tcx
         so that filters hold the programs
this machine is not fit: 5 checks, 1 ok, 3 not, 1 could not tell
`
	var out bytes.Buffer
	if err := writeReport(&out, r, false); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	out.Reset()
	if err := writeReport(&out, r, true); err != nil || !strings.Contains(out.String(), "ok       kernel: this is Linux 6.1\n") {
		t.Errorf("with all: %v\n%s", err, out.String())
	}
}

// The names of the report's JSON are a promise: change Version with them.
func TestReportsJSONHasTheseNames(t *testing.T) {
	var out bytes.Buffer
	r := doctor.Report{Version: doctor.ReportVersion, Findings: []doctor.Finding{{
		Check: "a", About: "b", Verdict: doctor.No, Weight: doctor.Fatal, Says: "c", Effect: "d", Mend: "e",
	}}}
	if err := command.WriteOutput(&out, "json", r); err != nil {
		t.Fatal(err)
	}
	var got any
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"version": 1.0, "findings": []any{map[string]any{
		"check": "a", "about": "b", "verdict": "no", "weight": "fatal", "says": "c", "effect": "d", "mend": "e",
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

const minimal = "../../examples/minimal.yaml"

// The plan of a node of a file is compared as one from plan --out.
func TestDoctorTakesANodeOfAFile(t *testing.T) {
	var out, errs bytes.Buffer
	command.Run(t.Context(), NewRootCommand(), []string{"doctor", "--file", minimal, "--node", "b", "--all", "-o", "json", "--run-dir", t.TempDir(), "--state-dir", t.TempDir()}, nil, &out, &errs)
	if s := out.String(); !strings.Contains(s, "fd00:1::b of node b") || strings.Contains(s, "node c") {
		t.Errorf("%s%s", s, errs.String())
	}
}

func TestDoctorRefusesWhatItCannotUse(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"format":   {[]string{"-o", "table"}, command.ExitUsage, `--output is "table"; expect text, json or yaml`},
		"instance": {[]string{"--instance", "a/b"}, command.ExitUsage, "--instance"},
		"no plan":  {[]string{"--plan", "/nonexistent/r1.json"}, command.ExitFailed, "/nonexistent/r1.json"},
		"no file":  {[]string{"--file", "/nonexistent/domain.yaml", "--node", "r1"}, command.ExitFailed, "/nonexistent/domain.yaml"},
		"no node":  {[]string{"--file", minimal}, command.ExitUsage, "--file needs --node"},
		"a node":   {[]string{"--node", "a"}, command.ExitUsage, "--node goes with --file"},
		"another":  {[]string{"--file", minimal, "--node", "z"}, command.ExitUsage, `minimal.yaml has no node "z"`},
		"both":     {[]string{"--file", minimal, "--node", "a", "--plan", "a.json"}, command.ExitUsage, "--plan and --file exclude each other"},
	} {
		var out, errs bytes.Buffer
		code := command.Run(t.Context(), NewRootCommand(), append([]string{"doctor"}, c.args...), nil, &out, &errs)
		if code != c.code || !strings.Contains(errs.String(), c.says) || out.Len() > 0 {
			t.Errorf("%s: exit %d, %q, %q; want %d and %q", name, code, out.String(), errs.String(), c.code, c.says)
		}
	}
}
