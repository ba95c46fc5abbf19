package attack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/waystamp/waystamp/internal/attack"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
)

var update = flag.Bool("update", false, "write the table of SECURITY.md")

const prefix = "attack-test"

var (
	program     string // the waystamp that is tested
	interrupted context.Context
)

func TestMain(m *testing.M) {
	flag.Parse()
	dir, err := prepare()
	if err != nil {
		fmt.Fprintln(os.Stderr, "test/attack:", err)
		os.RemoveAll(dir)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	interrupted = ctx
	goleak.VerifyTestMain(m, goleak.IgnoreCurrent(), goleak.Cleanup(func(code int) {
		stop()
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

func prepare() (dir string, err error) {
	if os.Geteuid() != 0 {
		return "", errors.New("these tests make network namespaces and load programs: run them as root")
	}
	err = host.Require(host.FeatureNetAdmin, host.FeatureNamespaces, host.FeatureIPv6, host.FeatureVeth, host.FeatureSEG6Local)
	if err != nil {
		return "", err
	}
	// A short path: those of the agents' sockets may have 107 bytes.
	if dir, err = os.MkdirTemp("", "ws-attack-"); err != nil {
		return "", err
	}
	program = filepath.Join(dir, "waystamp")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/", "../../cmd/...")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := cmd.CombinedOutput(); err != nil {
		return dir, fmt.Errorf("build waystamp: %w\n%s", err, said)
	}
	return dir, nil
}

// Every attack has the outcome that it must, on every scheme, and nothing but
// the attacks is refused.
func TestEveryAttackHasItsOutcome(t *testing.T) {
	results, err := attack.Run(interrupted, attack.Config{Prefix: prefix, RunDir: t.TempDir(), Binary: program})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range results {
		if !r.OK {
			t.Errorf("%s on %s: %s; want %s: %s\nexplained: %s", r.Attack, r.Scheme, r.Observed, r.Expected, r.Problem, r.Explained)
		}
		if refused := strings.HasPrefix(r.Expected, "refused: "); refused && r.Explained == "" {
			t.Errorf("%s on %s: the refusal is not explained", r.Attack, r.Scheme)
		}
	}
	if want := 4 * len(attack.Attacks()); len(results) != want {
		t.Errorf("%d results, want %d", len(results), want)
	}
	leavesNothing(t)
	securitySays(t, results)
}

// Marks around the table in SECURITY.md.
const (
	tableBegins = "<!-- attacks: made by make attacks -->\n"
	tableEnds   = "<!-- attacks end -->\n"
)

// securitySays: what operators read is what was seen.
func securitySays(t *testing.T, results []attack.Result) {
	t.Helper()
	const file = "../../SECURITY.md"
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), tableBegins)
	table, after, ended := strings.Cut(rest, tableEnds)
	if !ok || !ended {
		t.Fatalf("%s has no table between %q and %q", file, tableBegins, tableEnds)
	}
	want := attack.Table(results)
	if *update && !t.Failed() {
		if err := os.WriteFile(file, []byte(before+tableBegins+want+tableEnds+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(want, table); d != "" {
		t.Errorf("the table of SECURITY.md is not what was seen (-seen +written); make attacks writes it:\n%s", d)
	}
}

func leavesNothing(t *testing.T) {
	t.Helper()
	for _, dir := range []string{host.NamespaceDir, dataplane.DefaultPinDir} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), prefix+"-") {
				t.Errorf("%s is left", filepath.Join(dir, e.Name()))
			}
		}
	}
}

func TestTheCommandSaysItInJSON(t *testing.T) {
	var out, said bytes.Buffer
	cmd := exec.CommandContext(interrupted, program, "lab", "attack", "--scheme", "keyed,keyed-flow", "--only", "preplay,plain",
		"-o", "json", "--prefix", prefix, "--run-dir", t.TempDir())
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &said)
	}
	var results []attack.Result
	d := json.NewDecoder(&out)
	d.DisallowUnknownFields()
	if err := d.Decode(&results); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range results {
		got = append(got, fmt.Sprintf("%s %s: %s, %s, %t", r.Attack, r.Scheme, r.Expected, r.Observed, r.OK))
	}
	want := []string{
		"preplay keyed: not detected, not detected, true",
		"plain keyed: refused: unproven, refused: unproven, true",
		"preplay keyed-flow: refused: proof, refused: proof, true",
		"plain keyed-flow: refused: unproven, refused: unproven, true",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("results (-want +got):\n%s", d)
	}
	leavesNothing(t)
}

// Ctrl-C takes the lab away.
func TestAnInterruptLeavesNothing(t *testing.T) {
	runDir := t.TempDir()
	cmd := exec.CommandContext(interrupted, program, "lab", "attack", "--prefix", prefix, "--run-dir", runDir)
	said, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf, text := make([]byte, 4096), ""
	for !strings.Contains(text, "is up") {
		n, err := said.Read(buf)
		if err != nil {
			t.Fatalf("%v after %q", err, text)
		}
		text += string(buf[:n])
	}
	// Should it be killed, the lab says whose it was.
	record, err := os.ReadFile(filepath.Join(runDir, prefix, "lab.json"))
	var its struct{ Owner struct{ PID int } }
	if err := errors.Join(err, json.Unmarshal(record, &its)); err != nil || its.Owner.PID != cmd.Process.Pid {
		t.Errorf("the lab's owner is %d, %v; want %d", its.Owner.PID, err, cmd.Process.Pid)
	}
	// Once, and once more as to its group. By the second it may be over.
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	cmd.Process.Signal(syscall.SIGTERM)
	ended := time.AfterFunc(await.Limit(5*time.Minute), func() { cmd.Process.Kill() })
	defer ended.Stop()
	for err == nil {
		_, err = said.Read(buf)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the command says that all went well")
	}
	leavesNothing(t)
}
