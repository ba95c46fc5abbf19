package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// pinIDs are the kernel's numbers of what is pinned, by path.
func (b *bed) pinIDs(d *Dataplane) map[string]uint32 {
	b.Helper()
	out := map[string]uint32{}
	add := func(path string, o pinned) {
		id, err := o.idAt(path)
		b.must(err)
		out[path] = id
	}
	for _, a := range d.links {
		add(a.path, a)
	}
	for name, m := range d.gen.maps {
		add(filepath.Join(d.gen.dir, string(name)), mapPin{m})
	}
	for name, p := range d.gen.programs {
		add(filepath.Join(d.gen.dir, name), programPin{p})
		add(filepath.Join(d.gen.dir, constantsPin(name)), mapPin{d.gen.constants[name]})
	}
	for name, m := range d.gen.inner {
		add(filepath.Join(d.gen.dir, name), mapPin{m})
	}
	for _, kind := range []string{windowsName, numbersName} {
		slabs, err := filepath.Glob(filepath.Join(b.dir(), kind, "slab-*"))
		b.must(err)
		for _, path := range slabs {
			add(path, slabPinned{})
		}
	}
	return out
}

// inMountsOfItsOwn runs the rest of the test in a process whose mounts are its own,
// and where it is process 1, so that they are the machine's to it. It tells whether
// this is that process.
func inMountsOfItsOwn(t *testing.T) bool {
	t.Helper()
	const child = "WAYSTAMP_TEST_OWN_MOUNTS"
	if os.Getenv(child) != "" {
		if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
			t.Fatal(err)
		}
		for unix.Unmount(bpfRoot, unix.MNT_DETACH) == nil { // there may be several on top of each other
		}
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatal("the process has not run the test")
	}
	return false
}

func TestBPFFilesystemThatIsUnmountedIsMountedAgain(t *testing.T) {
	if !inMountsOfItsOwn(t) {
		return
	}
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	before := b.pinIDs(d)
	if back, err := d.KeepPins(); len(back) != 0 || err != nil { // so that it knows the files
		t.Fatalf("with all pins there: %q, %v", back, err)
	}
	b.must(unix.Unmount(bpfRoot, unix.MNT_DETACH))
	if on, err := onBPF(bpfRoot); on || err != nil {
		t.Fatalf("a bpf filesystem is at %s still: %v", bpfRoot, err)
	}
	back, err := d.KeepPins()
	b.must(err)
	if len(back) != len(before) {
		t.Errorf("%d pins are back, want all %d", len(back), len(before))
	}
	if diff := cmp.Diff(before, b.pinIDs(d)); diff != "" {
		t.Errorf("the pins are others:\n%s", diff)
	}
	if _, err := b.tryOpen(b.cfg); !errors.Is(err, ErrBusy) {
		t.Errorf("another process: %v, want ErrBusy", err)
	}
	// What the next process finds is what was.
	world := b.world()
	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, bedNode()))
	if diff := diffWorlds(world, b.world()); diff != "" {
		t.Errorf("taking it over has changed something:\n%s", diff)
	}
	if back, err := d.KeepPins(); len(back) != 0 || err != nil {
		t.Errorf("with all pins there: %q, %v", back, err)
	}
}

// Where it may not be mounted, what needs no pins goes on.
func TestPinsThatCannotBeBackAreToldOf(t *testing.T) {
	b := newBed(t)
	at := filepath.Join(t.TempDir(), "bpf")
	b.must(os.Mkdir(at, 0o700))
	b.must(unix.Mount("bpf", at, "bpf", 0, "mode=0700"))
	t.Cleanup(func() {
		for unix.Unmount(at, unix.MNT_DETACH) == nil {
		}
	})
	b.cfg.PinDir = at
	d := b.open()
	n := bedNode()
	b.must(b.apply(d, n))
	if got := b.offer(d, n, 20); got != "none" {
		t.Fatalf("number 20 is refused as %s", got)
	}
	// It is unmounted while a pin is put back.
	b.must(os.RemoveAll(linksDir(d.dir)))
	b.must(os.RemoveAll(filtersDir(d.dir)))
	d.cfg.before = func(step, _ string) error {
		if on, err := onBPF(at); step != stepPin || !on {
			return err
		}
		return unix.Unmount(at, unix.MNT_DETACH)
	}

	_, err := d.KeepPins()
	d.cfg.before = nil
	if _, ok := errors.AsType[*PinsError](err); !ok || !strings.Contains(err.Error(), "mount it again") {
		t.Errorf("got %v, want a PinsError that says what to do", err)
	}
	if left, _ := filepath.Glob(filepath.Join(at, "*")); len(left) != 0 {
		t.Errorf("where nothing is mounted, there are %q", left)
	}
	saved := func() (newest uint64) {
		t.Helper()
		seen, err := openRecall(b.cfg.StateDir).read()
		if err != nil || len(seen) != 1 {
			t.Fatalf("saved are %v, %v, want one replay window", seen, err)
		}
		for _, e := range seen {
			newest = slices.Max(e.Newest)
		}
		return newest
	}
	b.must(d.SaveNews())
	if got := saved(); got != 20 {
		t.Errorf("number %d is saved, want 20", got)
	}
	if got := b.offer(d, n, 21); got != "none" {
		t.Errorf("number 21 is refused as %s", got)
	}
	degraded, ok := errors.AsType[*DegradedError](b.do(d.Reconcile))
	if !ok || len(degraded.Problems) != 1 {
		t.Errorf("reconciling says %v, want the pins alone", degraded)
	}
	if got := saved(); got != 21 {
		t.Errorf("number %d is saved, want 21", got)
	}
	b.must(b.do(func() error { return d.SetLocal([]netip.Addr{xtest.Addr("2001:db8:1::7")}) }))
	if got := b.offer(d, n, 20); got != "replay" {
		t.Errorf("number 20 again is %q, want replay", got)
	}
	b.must(unix.Mount("bpf", at, "bpf", 0, "mode=0700"))
	back, err := d.KeepPins()
	if err != nil || len(back) < 40 {
		t.Errorf("mounted again: %d pins are back, %v", len(back), err)
	}
	b.must(b.do(d.Reconcile))
	b.must(d.Close())
	_, err = b.detach(b.cfg)
	b.must(err)
}

// A pin that was looked at before is looked at again where its file is another.
func TestPinsOfOtherObjectsAreReplaced(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	before := b.pinIDs(d)
	for range 2 {
		if back, err := d.KeepPins(); len(back) != 0 || err != nil {
			t.Fatalf("with all pins there: %q, %v", back, err)
		}
	}
	theirs, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	b.must(err)
	defer theirs.Close()
	var want []string
	remove := func(path string) {
		rel, err := filepath.Rel(b.dir(), path)
		b.must(err)
		want = append(want, rel)
		b.must(os.Remove(path))
	}
	for _, a := range d.links {
		remove(a.path)
		break
	}
	remove(filepath.Join(d.gen.dir, object.CoreTC))
	remove(filepath.Join(d.gen.dir, constantsPin(object.CoreTC)))
	for _, kind := range []string{windowsName, numbersName} {
		slabs, err := filepath.Glob(filepath.Join(b.dir(), kind, "slab-*"))
		b.must(err)
		remove(slabs[0])
	}
	for i, name := range slices.Sorted(maps.Keys(d.gen.maps))[:2] {
		path := filepath.Join(d.gen.dir, string(name))
		remove(path)
		if i == 1 {
			b.must(theirs.Pin(path))
		}
	}
	back, err := d.KeepPins()
	b.must(err)
	slices.Sort(back)
	slices.Sort(want)
	if !slices.Equal(back, want) {
		t.Errorf("%q are back, want %q", back, want)
	}
	if diff := cmp.Diff(before, b.pinIDs(d)); diff != "" {
		t.Errorf("the pins are others:\n%s", diff)
	}
}

// Whoever finds nothing, since it was removed, may begin; then the one before leaves it
// alone.
func TestPinsThatAnotherHasTakenAreLeftAlone(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	b.must(os.RemoveAll(b.dir()))
	other, err := b.tryOpen(b.cfg)
	b.must(err)
	b.must(os.Mkdir(filepath.Join(b.dir(), "theirs"), 0o700))
	for range 2 {
		if _, err := d.KeepPins(); !errors.Is(err, ErrBusy) || !strings.Contains(fmt.Sprint(err), "stop that agent first") {
			t.Errorf("got %v, want ErrBusy, and what to do", err)
		}
	}
	if entries, err := os.ReadDir(b.dir()); err != nil || len(entries) != 1 {
		t.Errorf("in their directory are %v, %v", entries, err)
	}
	b.must(os.Remove(filepath.Join(b.dir(), "theirs")))
	b.must(other.Close())
	if back, err := d.KeepPins(); err != nil || len(back) < 40 {
		t.Errorf("with the other gone %d are back, %v", len(back), err)
	}

	// The end of one that has lost its directory leaves it to whoever has it.
	b.must(os.RemoveAll(b.dir()))
	other, err = b.tryOpen(b.cfg)
	b.must(err)
	b.must(d.Close())
	if _, err := os.Stat(b.dir()); err != nil {
		t.Errorf("their directory: %v", err)
	}
	b.must(other.Close())
}
