package cli

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/plan"
)

var updatePlan = flag.Bool("update-plan", false, "write the golden files of waystamp plan")

const (
	planPaper      = "../../examples/paper.yaml"
	planMinimal    = "../../examples/minimal.yaml"
	planFunctions  = "../../examples/functions.yaml"
	planRouting    = "../../examples/routing.yaml"
	planCompressed = "../../examples/compressed.yaml"
)

// runPlan runs "waystamp plan" in this process.
func runPlan(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	root := &cobra.Command{Use: "waystamp", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(NewPlanCommand())
	var out, errs bytes.Buffer
	code = command.Run(t.Context(), root, append([]string{"plan"}, args...), strings.NewReader(stdin), &out, &errs)
	return out.String(), errs.String(), code
}

func TestPlanShowsEveryPathAndNode(t *testing.T) {
	for name, args := range map[string][]string{
		"plan-paper.txt":       {"-f", planPaper},
		"plan-paper.json":      {"-f", planPaper, "-o", "json"},
		"plan-minimal.txt":     {"-f", planMinimal},
		"plan-ipv4.txt":        {"-f", "../../examples/ipv4.yaml"},
		"plan-functions.txt":   {"-f", planFunctions},
		"plan-compressed.txt":  {"-f", planCompressed},
		"plan-compressed.json": {"-f", planCompressed, "-o", "json"},
		"plan-streams.txt":     {"-f", "../../examples/streams.yaml"},
		"plan-parameters.txt":  {"-f", "../../examples/parameters.yaml"},
		"plan-parameters.json": {"-f", "../../examples/parameters.yaml", "-o", "json"},
		"plan-zerotrust.txt":   {"-f", "../../examples/zerotrust.yaml"},
		"plan-zerotrust.json":  {"-f", "../../examples/zerotrust.yaml", "-o", "json"},
		"plan-mpls.txt":        {"-f", "testdata/mpls.yaml"},
		"plan-sealed.txt":      {"-f", "testdata/sealed.yaml"},
		"plan-sealed.json":     {"-f", "testdata/sealed.yaml", "-o", "json"},
		"plan-mpls.json":       {"-f", "testdata/mpls.yaml", "-o", "json"},
		"plan-streams.json":    {"-f", "../../examples/streams.yaml", "-o", "json"},
		"plan-functions.json":  {"-f", planFunctions, "-o", "json"},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code := runPlan(t, "", args...)
			if code != command.ExitDone || stderr != "" {
				t.Fatalf("exit %d, stderr %q", code, stderr)
			}
			golden := filepath.Join("testdata", name)
			if *updatePlan {
				if err := os.MkdirAll("testdata", 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(golden, []byte(stdout), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), stdout); diff != "" {
				t.Errorf("-golden +got (-update-plan writes it):\n%s", diff)
			}
		})
	}
}

func TestPlanReadsStandardInput(t *testing.T) {
	src, err := os.ReadFile(planMinimal)
	if err != nil {
		t.Fatal(err)
	}
	fromFile, _, _ := runPlan(t, "", "-f", planMinimal)
	fromStdin, stderr, code := runPlan(t, string(src), "-f", "-")
	if code != command.ExitDone || fromStdin != fromFile {
		t.Errorf("exit %d, stderr %q; want what the file gives", code, stderr)
	}
}

func TestPlanSaysWhatIsWrong(t *testing.T) {
	locked := t.TempDir()
	f, err := os.Open(locked)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	foreign := t.TempDir()
	if err := os.WriteFile(filepath.Join(foreign, "paths.json"), []byte(`{"version": 1, "kind": "lunch"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		stdin string
		args  []string
		code  int
		want  string
	}{
		"no file":        {args: nil, code: command.ExitUsage, want: "-f is missing"},
		"argument":       {args: []string{"x"}, code: command.ExitUsage, want: `takes no argument, and there is "x"; did you mean --file x?`},
		"format":         {args: []string{"-f", "-", "-o", "yaml"}, code: command.ExitUsage, want: `-o "yaml" is not a format; expect table or json`},
		"empty out":      {args: []string{"-f", "-", "--out", ""}, code: command.ExitUsage, want: "--out is empty"},
		"unknown flag":   {args: []string{"--nope"}, code: command.ExitUsage, want: "unknown flag"},
		"file not there": {args: []string{"-f", "nowhere.yaml"}, code: command.ExitFailed, want: "open nowhere.yaml: no such file"},
		"bad manifest":   {stdin: "version: 1\ndomain: {}\n", args: []string{"-f", "-"}, code: command.ExitUsage, want: "waystamp: <stdin>:1:1: \"nodes\" is missing; it is required here\n>    1 | version: 1\n       | ^\n<stdin>:2:9: domain: \"block\" is missing; it is required here\n     1 | version: 1\n>    2 | domain: {}\n       |         ^\n<stdin> has 2 problems\n"},
		"compiled file":  {stdin: "{\n  \"version\": 1,\n  \"kind\": \"node-plan\"\n}\n", args: []string{"-f", "-"}, code: command.ExitUsage, want: `<stdin> is not a domain file: its kind is "node-plan", as in files that waystamp plan --out writes`},
		"locked":         {args: []string{"-f", planMinimal, "--out", locked}, code: command.ExitFailed, want: "another waystamp plan is writing to " + locked},
		"foreign paths":  {args: []string{"-f", planMinimal, "--out", foreign}, code: command.ExitFailed, want: `its kind is "lunch"; expect "paths"; restore it, or move it away`},
		"out is a file":  {args: []string{"-f", planMinimal, "--out", planMinimal}, code: command.ExitFailed, want: "make the directory for plans"},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code := runPlan(t, c.stdin, c.args...)
			if code != c.code || stdout != "" || !strings.Contains(stderr, c.want) {
				t.Errorf("exit %d, stdout %q, stderr %q; want exit %d and %q", code, stdout, stderr, c.code, c.want)
			}
		})
	}
}

func TestPlanWarnsAndGoesOn(t *testing.T) {
	src, err := os.ReadFile(planMinimal)
	if err != nil {
		t.Fatal(err)
	}
	idle := strings.Replace(string(src), "functions:\n", "functions:\n  - {name: idle, node: b, kind: forward}\n", 1)
	_, stderr, code := runPlan(t, idle, "-f", "-")
	if code != command.ExitDone || !strings.Contains(stderr, `warning: functions[0].name: "idle" is in no chain`) {
		t.Errorf("exit %d, stderr %q", code, stderr)
	}
}

// contents reads all files below dir.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		files[name] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func names(files map[string]string) []string {
	var list []string
	for name := range files {
		list = append(list, name)
	}
	slices.Sort(list)
	return list
}

func TestPlanWarnsOfGuardsThatDoNotEnforce(t *testing.T) {
	src, err := os.ReadFile(planPaper)
	if err != nil {
		t.Fatal(err)
	}
	file := strings.Replace(string(src), "    proof: {", "    guard: audit\n    proof: {", 1)
	file = strings.Replace(file, "{name: r6-h2, role: edge}", "{name: r6-h2, role: edge, guard: off}", 1)
	stdout, stderr, code := runPlan(t, file, "-f", "-")
	want := `<stdin>: warning: node r1: guard: audit of chain web, reverse: its packets without a proof are counted and forwarded, not refused
<stdin>: warning: node r6: guard: audit of chain web, forward: its packets without a proof are counted and forwarded, not refused
<stdin>: warning: node r6: guard: off of interface r6-h2: packets without a proof are forwarded, not refused there, unless their chain has guard: enforce
`
	if diff := cmp.Diff(want, stderr); diff != "" || code != command.ExitDone || strings.Count(stdout, ", on violation drop, guard audit\n") != 2 {
		t.Errorf("exit %d, warnings (-want +got):\n%s\nand:\n%s", code, diff, stdout)
	}
}

func TestPlanOutWritesWhatEachNodeMayKnow(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "plans")
	stdout, stderr, code := runPlan(t, "", "-f", planPaper, "--out", dir)
	if code != command.ExitDone || !strings.Contains(stderr, "5 of 5 files written\n") || !strings.Contains(stdout, ", epoch 1,") {
		t.Fatalf("exit %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	files := contents(t, dir)
	want := []string{"nodes/r1.json", "nodes/r2.json", "nodes/r3.json", "nodes/r6.json", "paths.json"}
	if diff := cmp.Diff(want, names(files)); diff != "" {
		t.Fatalf("files (-want +got):\n%s", diff)
	}
	paths, err := plan.DecodePaths([]byte(files["paths.json"]))
	if err != nil {
		t.Fatal(err)
	}
	key := hex.EncodeToString(paths[0].Shares[1].Key[:]) // fw's, on r2; the egress r6 has all
	for name, text := range files {
		if got, want := strings.Contains(text, key), name != "nodes/r1.json" && name != "nodes/r3.json"; got != want {
			t.Errorf("%s: holds fw's key: %v; want %v", name, got, want)
		}
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: mode %v, %v; want 0600", name, info.Mode(), err)
		}
		if n, ok := strings.CutPrefix(name, "nodes/"); ok {
			got, err := plan.DecodeNode([]byte(text))
			if err != nil || got.Name+".json" != n {
				t.Errorf("%s: plan of %q, %v", name, got.Name, err)
			}
		}
	}
	if strings.Contains(stdout, key) || strings.Contains(stderr, key) {
		t.Error("a key was printed")
	}
	jsonOut, _, _ := runPlan(t, "", "-f", planPaper, "--out", dir, "-o", "json")
	if strings.Contains(jsonOut, key) || !json.Valid([]byte(jsonOut)) {
		t.Error("-o json prints a key, or no JSON")
	}
}

func TestPlanOutAgainKeepsWhatDidNotChange(t *testing.T) {
	dir := t.TempDir()
	src, err := os.ReadFile(planPaper)
	if err != nil {
		t.Fatal(err)
	}
	plan1 := func(src string) (stderr string, files map[string]string) {
		t.Helper()
		_, stderr, code := runPlan(t, src, "-f", "-", "--out", dir)
		if code != command.ExitDone {
			t.Fatalf("exit %d, stderr %q", code, stderr)
		}
		return stderr, contents(t, dir)
	}
	_, first := plan1(string(src))
	stderr, again := plan1(string(src))
	if diff := cmp.Diff(first, again); diff != "" || !strings.Contains(stderr, "0 of 5 files written") {
		t.Fatalf("stderr %q, -first +again:\n%s", stderr, diff)
	}

	// r2's firewall moves to r3: r2 keeps nothing, and everybody's secrets change.
	moved := strings.Replace(string(src), "{name: fw, node: r2", "{name: fw, node: r3", 1)
	_, changed := plan1(moved)
	for name := range first {
		if first[name] == changed[name] {
			t.Errorf("%s did not change", name)
		}
	}
	before, err := plan.DecodePaths([]byte(first["paths.json"]))
	if err != nil {
		t.Fatal(err)
	}
	after, err := plan.DecodePaths([]byte(changed["paths.json"]))
	if err != nil {
		t.Fatal(err)
	}
	for i := range after {
		if after[i].Epoch != before[i].Epoch+1 || after[i].Shares[0] == before[i].Shares[0] {
			t.Errorf("%s: epoch %d after %d, or the old secrets", after[i].Direction, after[i].Epoch, before[i].Epoch)
		}
	}

	// A node's file whose mode somebody opened is put right. Secrets that others may
	// have read are not used again without a word.
	chmod := func(name string, mode os.FileMode) {
		t.Helper()
		if err := os.Chmod(filepath.Join(dir, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	chmod("nodes/r1.json", 0o644)
	plan1(moved)
	if info, err := os.Stat(filepath.Join(dir, "nodes", "r1.json")); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	chmod("paths.json", 0o644)
	if _, stderr, code := runPlan(t, moved, "-f", "-", "--out", dir); code != command.ExitFailed || !strings.Contains(stderr, "paths.json has mode 0644") || !strings.Contains(stderr, "try: chmod 600 ") {
		t.Errorf("secrets that others can read: exit %d, stderr %q", code, stderr)
	}
	chmod("paths.json", 0o600)

	// The plan of a node that is gone is named, and left alone.
	minimal, err := os.ReadFile(planMinimal)
	if err != nil {
		t.Fatal(err)
	}
	stderr, files := plan1(string(minimal))
	if !strings.Contains(stderr, "r2 is not a node of the domain any more") || files["nodes/r2.json"] == "" {
		t.Errorf("stderr %q, files %v", stderr, names(files))
	}
}

// The steps of a change are beside the plans, until the next change.
func TestPlanKeepsEpochsInSteps(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "plans")
	src, err := os.ReadFile(planPaper)
	if err != nil {
		t.Fatal(err)
	}
	run := func(file string, want int, args ...string) (stderr string) {
		t.Helper()
		_, stderr, code := runPlan(t, file, append([]string{"-f", "-", "--out", dir}, args...)...)
		if code != want {
			t.Fatalf("%q: exit %d, want %d: %s", args, code, want, stderr)
		}
		return stderr
	}
	epochs := func(folder, node string) (headend uint8, egress []uint8) {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, folder, node+".json"))
		if err != nil {
			t.Fatal(err)
		}
		n, err := plan.DecodeNode(b)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range n.Egresses {
			egress = append(egress, e.Epoch)
		}
		slices.Sort(egress)
		return n.Headends[0].Epoch, egress
	}
	paper := string(src)
	if said := run(paper, command.ExitFailed, "--keep-epochs"); !strings.Contains(said, "holds no plans yet") {
		t.Errorf("without plans: %q", said)
	}
	run(paper, command.ExitDone)
	if said := run(paper, command.ExitDone, "--keep-epochs"); !strings.Contains(said, "no path gets another epoch") {
		t.Errorf("without a change: %q", said)
	}
	if said := run(paper, command.ExitUsage, "--rotate", "wbe"); !strings.Contains(said, "--rotate wbe: - has no chain of that name") {
		t.Errorf("an unknown chain: %q", said)
	}
	for _, c := range []struct {
		args   []string
		file   string
		epochs [2]uint8
	}{
		{nil, strings.Replace(paper, "functions: [fw, dpi]", "functions: [dpi, fw]", 1), [2]uint8{1, 2}},
		{[]string{"--rotate", "web"}, strings.Replace(paper, "functions: [fw, dpi]", "functions: [dpi, fw]", 1), [2]uint8{2, 3}},
		{[]string{"--rotate", "all"}, strings.Replace(paper, "functions: [fw, dpi]", "functions: [dpi, fw]", 1), [2]uint8{3, 4}},
	} {
		said := run(c.file, command.ExitDone, append(c.args, "--keep-epochs")...)
		if want := "  3. " + dir + "/nodes/NAME.json, 5s later"; !strings.Contains(said, want) {
			t.Errorf("%q: %q, want %q in it", c.args, said, want)
		}
		for folder, want := range map[string]struct {
			headend uint8
			egress  []uint8
		}{
			planBothName: {c.epochs[0], c.epochs[:]}, planTurnName: {c.epochs[1], c.epochs[:]}, planNodesName: {c.epochs[1], c.epochs[1:]},
		} {
			if h, e := epochs(folder, "r1"); h != want.headend || !slices.Equal(e, want.egress) {
				t.Errorf("%q, %s: r1 sends epoch %d and takes %d, want %d and %d", c.args, folder, h, e, want.headend, want.egress)
			}
		}
		// Run again, it leaves the steps that may be just being carried.
		run(c.file, command.ExitDone, "--keep-epochs")
		epochs(planTurnName, "r1")
	}
	// A change in one step takes them away: they would turn nodes back.
	run(paper, command.ExitDone)
	if _, err := os.Stat(filepath.Join(dir, planBothName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the steps of the change before are still there: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, planNodesName, "r2.json")); err != nil {
		t.Fatal(err)
	}
	if said := run(paper, command.ExitFailed, "--keep-epochs"); !strings.Contains(said, "lacks the plans of r2") {
		t.Errorf("without the plan of a node: %q", said)
	}
}

func TestPlanOutThatCannotBeWrittenLeavesNoTrace(t *testing.T) {
	dir := t.TempDir()
	// A directory in the place of a file: the rename fails.
	if err := os.MkdirAll(filepath.Join(dir, "nodes", "b.json", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, stderr, code := runPlan(t, "", "-f", planMinimal, "--out", dir)
	if code != command.ExitFailed || !strings.Contains(stderr, "b.json") {
		t.Errorf("exit %d, stderr %q", code, stderr)
	}
	entries, err := os.ReadDir(filepath.Join(dir, "nodes"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			t.Errorf("%s was left behind", e.Name())
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "paths.json")); errors.Is(err, os.ErrNotExist) {
		t.Error("the secrets that node a has got are not kept for the next run")
	}
}

// Who clamps in one direction is told that it is not the one that this chain's own
// packets need.
func TestPlanTellsWhoClampsOneWay(t *testing.T) {
	src, err := os.ReadFile(planMinimal)
	if err != nil {
		t.Fatal(err)
	}
	const said, hint = "  lowers the MSS in TCP SYNs to 1300 bytes, for segments of the reverse direction\n", "  and has no reverse path"
	for clamp, want := range map[string][2]bool{
		"":                      {false, false},
		"    mss-clamp: 1300\n": {true, true},
		"    mss-clamp: 1300\n    direction: both\n": {true, false},
	} {
		stdout, stderr, code := runPlan(t, string(src)+clamp, "-f", "-")
		if code != command.ExitDone || strings.Contains(stdout, said) != want[0] || strings.Contains(stdout, hint) != want[1] {
			t.Errorf("%q: exit %d, %s; want the MSS %t, the hint %t in\n%s", clamp, code, stderr, want[0], want[1], stdout)
		}
	}
}
