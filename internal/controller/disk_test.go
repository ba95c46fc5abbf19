package controller

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// small mounts a file system of some size, in bytes, at a directory.
func small(t *testing.T, dir, size string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
}

// A controller whose disk is full refuses what it would have to write, says why, sends nodes their plans meanwhile, and goes on when there is room.
func TestAFullDiskRefusesChangesAndServesPlans(t *testing.T) {
	w := newWorld(t)
	small(t, w.dir, "8m")
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("the first file", settled(w.apply(file)))
	w.until("drained", drained)
	before := w.state()

	ballast, err := os.Create(filepath.Join(w.dir, "ballast"))
	w.must(err)
	for err == nil {
		_, err = ballast.Write(make([]byte, 4096))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	w.must(ballast.Close())
	// Larger than what the store's file has free inside.
	large := edit(file, "node: r2", "node: r3") + "# " + strings.Repeat("x", 1<<20) + "\n"
	_, err = w.admin.Apply(t.Context(), connect.NewRequest(&v1.ApplyRequest{File: &v1.File{Name: "test.yaml", Source: []byte(large)}}))
	if code(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "write to the store") || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("the change is refused by %v", err)
	}
	if s := w.state(); s.WantedSerial != before.WantedSerial || !s.Settled {
		t.Errorf("something of the change is there: %v", s)
	}
	// A node that has lost its plan gets it again.
	r2 := agents["r2"]
	r2.stop()
	w.must(os.Remove(r2.member.PlanFile()))
	came := make(chan struct{}, 1)
	r2.refuses = func(plan.Node) bool {
		notify(came)
		return false
	}
	r2.run("")
	select {
	case <-came:
	case <-time.After(patience):
		t.Fatal("no plan came")
	}

	w.must(os.Remove(filepath.Join(w.dir, "ballast")))
	w.until("the change", settled(w.apply(large)))
}

// A store that cannot be written to is an error at the start, which names the file.
func TestAReadOnlyDiskIsToldAtTheStart(t *testing.T) {
	dir := t.TempDir()
	small(t, dir, "8m")
	name := filepath.Join(dir, "store")
	s, err := store.OpenBolt(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := store.OpenBolt(name); err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "read-only file system") {
		t.Errorf("the error is %v", err)
	}
}
