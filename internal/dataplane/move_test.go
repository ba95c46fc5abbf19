package dataplane

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

// namesIn are the names in a directory of pins, none if it is not there.
func namesIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}

// The data path does not notice that its pins move, and the next agent takes it over from where they are. A move that fails, or whose
// process is killed, leaves what was there.
func TestPinsMoveToAnotherDirectoryAndOwner(t *testing.T) {
	const nobody = 65534
	to := filepath.Join(bpfRoot, testInstance())
	t.Cleanup(func() {
		if err := os.Remove(to); err != nil { // it is empty
			t.Error(err)
		}
	})
	b := newBed(t)
	from := b.dir()
	b.must(os.Mkdir(to, 0o700))
	d := b.open()
	n := bedNode()
	n.Interfaces[1].Datapath = model.DatapathXDP
	b.must(b.apply(d, n))
	b.runEdge(d, plainPacket("fd00::1", "2001:db8:1::1"))
	if _, err := MovePins(b.cfg, to, nobody, nobody); !errors.Is(err, ErrBusy) {
		t.Errorf("beside an agent: %v, want ErrBusy", err)
	}
	b.must(d.Close())
	before := b.world()
	if len(before.Links) == 0 {
		t.Fatal("nothing is attached")
	}
	same := func(what string) {
		t.Helper()
		if diff := diffWorlds(before, b.world()); diff != "" {
			t.Errorf("%s (-before +after):\n%s", what, diff)
		}
	}

	if _, err := MovePins(b.cfg, to, nobody, nobody); err == nil || !strings.Contains(err.Error(), "belongs to user 0, and an agent of user 65534 could pin nothing there") {
		t.Errorf("to a directory of somebody else: %v", err)
	}
	b.must(os.Chown(to, nobody, nobody))
	link := filepath.Join(from, "links", "stray")
	b.must(os.Symlink("/etc/passwd", link))
	if _, err := MovePins(b.cfg, to, nobody, nobody); err == nil || !strings.Contains(err.Error(), "links/stray is no pin") {
		t.Errorf("with a symbolic link among the pins: %v", err)
	}
	b.must(os.Remove(link))
	same("after what was refused at first")
	stop := errors.New("stop here")
	failing := b.cfg
	failing.before = func(step, _ string) error {
		if step == stepMove {
			return stop
		}
		return nil
	}
	if _, err := MovePins(failing, to, nobody, nobody); !errors.Is(err, stop) {
		t.Errorf("a move that fails: %v", err)
	}
	same("after one that failed")
	if left := namesIn(t, to); len(left) > 0 {
		t.Errorf("it has left %q", left)
	}
	killed := filepath.Join(to, b.cfg.Instance+movingMark+"1")
	b.must(os.Mkdir(killed, 0o700))
	if _, err := pinAgain(from, killed, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	same("beside what one has left that was killed")
	for _, mode := range []os.FileMode{0o755, 0o700} {
		given := filepath.Join(to, "given")
		b.must(errors.Join(os.Mkdir(given, 0o700), os.Chmod(given, mode)))
		if mode == 0o700 {
			b.must(os.Chown(given, nobody, nobody))
		}
		if _, err := pinAgain(from, given, nobody, nobody); err == nil || !strings.Contains(err.Error(), "was changed meanwhile") {
			t.Errorf("into a directory that others can write to, mode %s: %v", mode, err)
		}
		b.must(os.Remove(given))
	}

	// The first one is killed when the pins have their name, and those of before are there still.
	b.must(os.Mkdir(filepath.Join(to, "renamed"), 0o700))
	moved, err := pinAgain(from, filepath.Join(to, "renamed"), nobody, nobody)
	b.must(errors.Join(err, os.Rename(filepath.Join(to, "renamed"), filepath.Join(to, b.cfg.Instance))))
	finished, err := MovePins(b.cfg, to, nobody, nobody)
	b.must(err)
	if finished != moved {
		t.Errorf("%d pins were moved, and then %d", moved, finished)
	}
	b.cfg.PinDir = to
	same("finished")
	b.must(os.Mkdir(filepath.Join(bpfRoot, b.cfg.Instance+"-back"), 0o700))
	back := filepath.Join(bpfRoot, b.cfg.Instance+"-back")
	t.Cleanup(func() {
		if err := os.Remove(back); err != nil {
			t.Error(err)
		}
	})
	if n, err := MovePins(b.cfg, back, 0, 0); err != nil || n != moved {
		t.Fatalf("back to root: %d pins, %v", n, err)
	}
	b.cfg.PinDir = back
	same("back with root")

	moved, err = MovePins(b.cfg, to, nobody, nobody)
	b.must(err)
	b.cfg.PinDir = to
	same("moved")
	if left := slices.Concat(namesIn(t, from), namesIn(t, back), namesIn(t, to)); len(left) != 1 || left[0] != b.cfg.Instance {
		t.Errorf("there are %q, want %s alone", left, b.cfg.Instance)
	}
	files := 0
	b.must(filepath.WalkDir(b.dir(), func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		i, err := e.Info()
		if err != nil {
			return err
		}
		if s := i.Sys().(*syscall.Stat_t); s.Uid != nobody || s.Gid != nobody || i.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s is of %d:%d, mode %s", path, s.Uid, s.Gid, i.Mode())
		}
		if e.Type().IsRegular() {
			files++
		}
		return nil
	}))
	if files != moved || moved < 20 {
		t.Errorf("%d pins were moved, and %d are there", moved, files)
	}

	d = b.open()
	b.must(b.apply(d, n))
	same("with the next agent")
	b.must(d.Close())
	for name, c := range map[string]struct {
		cfg  Config
		to   string
		want error
		says string
	}{
		"where they are":   {b.cfg, to, nil, "are in " + to + " already"},
		"of no instance":   {Config{PinDir: to, Instance: "nobodys"}, bpfRoot, ErrNotThere, "nothing is there"},
		"off the bpf file": {b.cfg, t.TempDir(), nil, "is not on a bpf filesystem"},
		"not there":        {b.cfg, filepath.Join(to, "x"), nil, "does not exist: make it for that user"},
		"among them":       {b.cfg, filepath.Join(b.dir(), "links"), nil, "is among the pins that are to move there"},
		"relative":         {b.cfg, "x", nil, "is not an absolute path"},
	} {
		if _, err := MovePins(c.cfg, c.to, 0, 0); err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %q", name, err, c.says)
		}
	}
	// What a killed move to somewhere else has left goes with a detachment there, though the instance is not there.
	left := filepath.Join(back, b.cfg.Instance+movingMark+"2")
	b.must(os.Mkdir(left, 0o700))
	if _, err := pinAgain(b.dir(), left, 0, 0); err == nil {
		elsewhere := b.cfg
		elsewhere.PinDir = back
		if _, err := b.detach(elsewhere); !errors.Is(err, ErrNotThere) {
			t.Errorf("detach where only that is left: %v", err)
		}
	} else {
		t.Error(err)
	}
	if names := namesIn(t, back); len(names) > 0 {
		t.Errorf("there are still %q", names)
	}
	b.must(os.MkdirAll(from, 0o700))
	if _, err := MovePins(b.cfg, DefaultPinDir, 0, 0); !errors.Is(err, fs.ErrExist) {
		t.Errorf("to where others are: %v", err)
	}
	b.must(os.Remove(from))
	same("after what was refused")
}
