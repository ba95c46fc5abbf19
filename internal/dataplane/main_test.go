package dataplane

import (
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/dataplane/object"
)

// A test that was killed leaves its instance's pins, and programs on interfaces
// with them. The next run removes them.
func TestMain(m *testing.M) {
	if _, err := await.Patience(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := removeDead(DefaultPinDir); err != nil {
		fmt.Fprintln(os.Stderr, "remove what killed tests have left:", err)
		os.Exit(1)
	}
	if err := setFlags(); err != nil {
		fmt.Fprintln(os.Stderr, "set flags of tests:", err)
		os.Exit(1)
	}
	readObjectsOnce()
	os.Exit(m.Run())
}

// setFlags: of what rapid finds the seed and the packet say all, and its files
// would be large. More tests than CPUs are at work at a time, since they wait a
// good part of it for the kernel to wait for programs.
func setFlags() error {
	flag.Parse()
	asked := false
	flag.Visit(func(f *flag.Flag) { asked = asked || f.Name == "test.parallel" })
	err := flag.Set("rapid.nofailfile", "true")
	if !asked {
		err = errors.Join(err, flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))))
	}
	return err
}

// readObjectsOnce spares the tests to read and parse the same objects hundreds of
// times, which is a tenth of a load.
func readObjectsOnce() {
	for i := range object.All {
		load := sync.OnceValues(object.All[i].Load)
		object.All[i].Load = func() (*ebpf.CollectionSpec, error) {
			spec, err := load()
			if err != nil {
				return nil, err
			}
			return spec.Copy(), nil
		}
	}
}

// testInstance is a name that tells whose it is.
func testInstance() string {
	return fmt.Sprintf("test-%d-%s", os.Getpid(), strings.ToLower(rand.Text()[:10]))
}

// removeDead removes the pins of instances whose tests' processes are gone.
func removeDead(pins string) error {
	entries, err := os.ReadDir(pins)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		var pid int
		if n, _ := fmt.Sscanf(e.Name(), "test-%d-", &pid); n != 1 {
			continue
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, removeTree(filepath.Join(pins, e.Name())))
		}
	}
	return errors.Join(errs...)
}

func TestPinsOfKilledTestsAreRemoved(t *testing.T) {
	if err := ensurePinDir(DefaultPinDir); err != nil {
		t.Fatal(err)
	}
	pins, err := os.MkdirTemp(bpfRoot, "ws-main-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeTree(pins) })
	killed := exec.CommandContext(t.Context(), "true")
	if err := killed.Run(); err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	left := fmt.Sprintf("test-%d-abc", killed.Process.Pid)
	for _, name := range []string{left, testInstance(), "r1", "test-abc"} {
		dir := filepath.Join(pins, name, "gen")
		if err := errors.Join(os.MkdirAll(dir, 0o700), m.Pin(filepath.Join(dir, "map")), m.Unpin()); err != nil {
			t.Fatal(err)
		}
		// The pin again: Unpin is for the library to forget it.
		if err := m.Pin(filepath.Join(dir, "map")); err != nil {
			t.Fatal(err)
		}
	}
	if err := removeDead(pins); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(pins)
	if err != nil || len(entries) != 3 {
		t.Errorf("%v, %v are there; want all but %s", entries, err, left)
	}
	if _, err := os.Stat(filepath.Join(pins, left)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is still there", left)
	}
}
