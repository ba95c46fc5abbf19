//go:build stock

package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/doctor"
	"github.com/waystamp/waystamp/internal/lab"
)

// A kernel that lacks what the programs need is refused in one sentence, the doctor's, before anything is
// changed; no verifier has been asked. The kernel must be older than 6.1: make test-kernels KERNEL=5.15
// STEP=old, with -deb.
func TestStockOldKernelIsRefused(t *testing.T) {
	dir := t.TempDir()
	pins := filepath.Join("/sys/fs/bpf", newPrefix())
	must(t, os.Mkdir(pins, 0o700))
	t.Cleanup(func() { must(t, os.Remove(pins)) })
	directories := []string{"--pin-dir", pins, "--run-dir", filepath.Join(dir, "run"), "--state-dir", filepath.Join(dir, "state")}

	asked := start(t, append([]string{"doctor", "-o", "json"}, directories...)...).wait()
	var report doctor.Report
	if err := json.Unmarshal([]byte(asked.stdout), &report); err != nil || asked.code != 1 {
		t.Fatalf("the doctor: %v, %s", err, asked)
	}
	sentence := ""
	for _, f := range report.Findings {
		switch f.Check {
		case "kernel":
			if f.Verdict != doctor.No || !strings.Contains(f.Says, "older than 6.1") {
				t.Errorf("of the kernel: %s: %s", f.Verdict, f)
			}
		case "features":
			if f.Verdict != doctor.No || f.Weight != doctor.Fatal {
				t.Fatalf("this kernel has what the programs need: %s; name an older one with -deb", f)
			}
			sentence = f.String()
		case "program":
			t.Errorf("a program was tried: %s", f)
		}
	}
	w := buildFrom(t, parse(t, string(examples.Paper)), func(c *lab.Config) { c.WithoutAgents = true })
	p := prepared(soon(t), t, append([]string{"agent", "--instance", "r1", "--plan", w.NodePlanPath("r1")}, directories...))
	must(t, w.ns("r1").Do(p.cmd.Start))
	r := p.wait()
	if said := strings.TrimSpace(r.stderr); r.code != 1 || !strings.HasSuffix(said, sentence) || strings.Contains(said, "processed ") {
		t.Errorf("the agent: %s, want %q", r, sentence)
	}
	if said := w.shell("r1", "tc", "qdisc", "show"); strings.Contains(said, "clsact") {
		t.Errorf("it has made places for programs:\n%s", said)
	}
	if left, err := os.ReadDir(pins); err != nil || len(left) > 0 {
		t.Errorf("it left %v, %v", left, err)
	}
}
