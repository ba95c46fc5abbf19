package controller

import (
	"errors"
	"os"
	"os/exec"
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
	w.servesPlan(agents["r2"])

	w.must(os.Remove(filepath.Join(w.dir, "ballast")))
	w.until("the change", settled(w.apply(large)))
}

// broken is a file system at a directory that can be made read-only while files are open for writing, as the kernel does after an error. The
// function that it returns does so.
func broken(t *testing.T, dir string) (readOnly func()) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	image := filepath.Join(t.TempDir(), "disk")
	writeFile(t, image, nil)
	run := func(name string, args ...string) string {
		t.Helper()
		said, err := exec.Command(name, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, said)
		}
		return strings.TrimSpace(string(said))
	}
	run("truncate", "-s", "32M", image)
	run("mkfs.ext4", "-q", "-e", "remount-ro", image)
	device := run("losetup", "--find", "--show", image)
	t.Cleanup(func() { run("losetup", "--detach", device) })
	run("mount", device, dir)
	t.Cleanup(func() { run("umount", dir) })
	return func() {
		t.Helper()
		if err := os.WriteFile(filepath.Join("/sys/fs/ext4", filepath.Base(device), "trigger_fs_error"), []byte("a test"), 0o200); err != nil {
			t.Fatal(err)
		}
	}
}

// A controller whose file system becomes read-only refuses what it would have to write, says why, and sends nodes their plans meanwhile. The step that it
// cannot write is told to operators.
func TestADiskThatBecomesReadOnlyRefusesChangesAndServesPlans(t *testing.T) {
	w := newWorld(t)
	w.drain = time.Hour
	readOnly := broken(t, w.dir)
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("the first file", settled(w.apply(file)))
	w.until("turned", settled(w.rotate()))
	before := w.state()
	readOnly()
	const why = "read-only file system"
	_, err := w.admin.Apply(t.Context(), connect.NewRequest(&v1.ApplyRequest{File: &v1.File{Name: "test.yaml", Source: []byte(edit(file, "node: r2", "node: r3"))}}))
	if code(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "write to the store") || !strings.Contains(err.Error(), why) {
		t.Errorf("the change is refused by %v", err)
	}
	if s := w.state(); s.WantedSerial != before.WantedSerial || !s.Settled {
		t.Errorf("something of the change is there: %v", s)
	}
	// The old epoch has drained, and cannot be erased.
	for _, name := range []string{"r1", "r3"} {
		f := agents[name]
		of := f.asked(2)
		f.member.Numbers(f.gave(of), f.saw(of, allSeen))
	}
	w.until("the reason", func(s *v1.State) bool { return strings.Contains(s.Problem, why) })
	w.servesPlan(agents["r2"])
}

// servesPlan lets a node lose its plan, and waits until it gets it again.
func (w *world) servesPlan(f *fake) {
	w.Helper()
	f.stop()
	w.must(os.Remove(f.member.PlanFile()))
	came := make(chan struct{}, 1)
	f.refuses = func(plan.Node) bool {
		notify(came)
		return false
	}
	f.run("")
	select {
	case <-came:
	case <-time.After(patience):
		w.Fatal("no plan came")
	}
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
