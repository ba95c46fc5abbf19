package dataplane

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/bits"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/model"
)

// windowKey says whose replay window it is. Other secrets have numbers of their
// own, also under the same path and epoch: a chain that was taken out of the file
// and put back begins at epoch 1 again.
type windowKey struct {
	counterKey
	secrets uint64 // digest of what the egress verifies with
}

// secrets tells those of one epoch from those of another. It is the beginning of
// a hash, on the disk and in names of pins, and says nothing of them.
func (e *egress) secrets() uint64 {
	h := sha256.New()
	fmt.Fprint(h, "waystamp replay window", e.Keys, e.Secret, e.Key)
	return binary.BigEndian.Uint64(h.Sum(nil))
}

func (k windowKey) pin() string { return fmt.Sprintf("%s-%016x", k.counterKey.pin(), k.secrets) }

// parseWindowPin reads what pin wrote.
func parseWindowPin(name string) (k windowKey, ok bool) {
	path, digest, _ := cutLast(name, "-")
	k.counterKey, ok = parsePin(path)
	n, err := fmt.Sscanf(digest, "%016x", &k.secrets)
	return k, ok && n == 1 && err == nil && k.pin() == name
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// window is the replay window of a path in one epoch.
type window struct {
	key   windowKey
	lanes int
	size  int // numbers of each lane, a power of two
}

// windowName is that of a window's map. It says how many numbers each lane has:
// the same words are another window with other lanes.
func (w window) windowName() string {
	return fmt.Sprintf("%s%d", windowPrefix, bits.TrailingZeros(uint(w.size)))
}

const windowPrefix = "ws_window_"

// windowSize is how many numbers each lane of a window has.
func windowSize(m *ebpf.Map) (int, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	var log2 uint
	n, err := fmt.Sscanf(info.Name, windowPrefix+"%d", &log2)
	if n != 1 || err != nil || model.CheckWindow(1<<(log2&63)) != nil {
		return 0, fmt.Errorf("a map called %q is no replay window", info.Name)
	}
	return 1 << log2, nil
}

// words are the entries of its map.
func (w window) words() uint32 { return uint32(w.lanes * w.size / 4) }

func (w window) String() string { return w.shared(nil).String() }

// windowsName is the directory of the pins of all windows, of whichever
// generation.
const windowsName = "windows"

func windowsDir(dir string) string { return filepath.Join(dir, windowsName) }

func (w window) shared(d *Dataplane) shared {
	return shared{
		what: "replay window", key: w.key.counterKey, name: w.key.pin(), outer: tableWindows, dir: windowsName,
		spec: &ebpf.MapSpec{
			Name: w.windowName(), Type: ebpf.Array, KeySize: 4, ValueSize: 8,
			MaxEntries: w.words(), Flags: unix.BPF_F_INNER_MAP,
		},
		misfit: func(m *ebpf.Map) error {
			is := "another shape"
			if size, err := windowSize(m); err == nil {
				is = fmt.Sprintf("%d lanes of %d numbers", int(m.MaxEntries())*4/size, size)
			}
			return fmt.Errorf("has %s and the plan wants %d lanes of %d; give the path a new epoch (waystamp plan does)", is, w.lanes, w.size)
		},
		place: func(g *generation) (uint32, bool, error) {
			e, ok, err := g.egressOf(egressKey{Path: w.key.path, Epoch: w.key.epoch})
			return e.Window, ok && e.secrets() == w.key.secrets, err
		},
		begin: func(m *ebpf.Map) error { return d.recallWindow(m, w) },
	}
}

func (d *Dataplane) sharedWindows(want map[uint32]window) map[uint32]shared {
	out := make(map[uint32]shared, len(want))
	for i, w := range want {
		out[i] = w.shared(d)
	}
	return out
}

// removeWindows removes the windows that the plan has no more, when what they have
// seen is on the disk.
func (d *Dataplane) removeWindows(g *generation, want map[uint32]window) error {
	shared := d.sharedWindows(want)
	gone, err := d.goneShared(windowsName, shared)
	if err != nil || len(gone) == 0 {
		return err
	}
	if err := waitForPrograms(); err != nil {
		return err
	}
	if err := d.saveWindowsLocked(); err != nil {
		return fmt.Errorf("replay windows of paths that are gone are kept: %w", err)
	}
	return d.removeShared(g, tableWindows, windowsName, shared)
}

// prepareWindows puts the windows that egresses will name into ws_windows.
func (d *Dataplane) prepareWindows(g *generation, want map[uint32]window) error {
	return d.prepareShared(g, tableWindows, d.sharedWindows(want), stepWindow)
}

// windowAt opens what an entry of ws_windows names; nil: nothing.
func (g *generation) windowAt(i uint32) (*ebpf.Map, error) { return g.sharedAt(tableWindows, i) }
