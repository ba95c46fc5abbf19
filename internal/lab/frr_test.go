package lab

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

// test/e2e has a domain that FRR routes.

func TestRoutingByFRRWantsFRR(t *testing.T) {
	for _, missing := range frrDaemons {
		dir := t.TempDir()
		for _, d := range frrDaemons {
			if d != missing {
				if err := os.WriteFile(filepath.Join(dir, d), nil, 0o755); err != nil {
					t.Fatal(err)
				}
			}
		}
		err := requireFRR([]string{filepath.Join(dir, "none"), dir})
		if !errors.Is(err, ErrNoFRR) || !strings.Contains(err.Error(), "install the package frr") {
			t.Errorf("without %s the error is %v", missing, err)
		}
	}
	if err := requireFRR(frrDirs); err != nil {
		t.Errorf("%v (tools/deps.sh test installs it)", err)
	}
}

// Ctrl-C while BGP converges: daemons, sockets and namespaces go.
func TestAnInterruptedLabLeavesNoFRR(t *testing.T) {
	d, world := paper()
	world.Routing = model.LabFRR
	prefix, dir := "wstest-"+randomPart(), t.TempDir()
	ctx, cancel := context.WithCancelCause(soon(t))
	defer cancel(nil)
	interrupted := errors.New("interrupted")
	// When r3's bgpd has written its number down, nobody has learned all.
	sockets := filepath.Join(frrRunDir, prefix)
	if err := os.MkdirAll(filepath.Join(sockets, "r3"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(sockets) })
	w, err := watchFile(filepath.Join(sockets, "r3"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	go func() {
		for w.wait(ctx) == nil {
			if _, err := os.Stat(filepath.Join(sockets, "r3", "bgpd.pid")); err == nil {
				cancel(interrupted)
			}
		}
	}()
	_, err = Up(ctx, Config{Domain: d, Lab: world, RunDir: dir, Prefix: prefix, WithoutAgents: true})
	if !errors.Is(err, interrupted) {
		t.Errorf("the error is %v", err)
	}
	if _, err := os.Stat(sockets); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is still there: %v", sockets, err)
	}
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range lines {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), sockets) {
			t.Errorf("still runs: %q", b)
		}
	}
	if labs, err := List(dir); err != nil || len(labs) > 0 {
		t.Errorf("labs %v are left, %v", labs, err)
	}
}
