package dataplane

import (
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// window is the replay window of a path in one epoch.
type window struct {
	key   counterKey
	lanes int
	size  int // numbers of each lane
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
		what: "replay window", key: w.key, outer: tableWindows, dir: windowsName,
		spec: &ebpf.MapSpec{
			Name: "ws_window", Type: ebpf.Array, KeySize: 4, ValueSize: 8,
			MaxEntries: w.words(), Flags: unix.BPF_F_INNER_MAP,
		},
		misfit: func(m *ebpf.Map) error {
			return fmt.Errorf("has %d words and the plan wants %d lanes of %d numbers, which are %d words; give the path a new epoch (waystamp plan does)",
				m.MaxEntries(), w.lanes, w.size, w.words())
		},
		place: func(g *generation) (uint32, bool, error) {
			e, ok, err := g.egressOf(egressKey{Path: w.key.path, Epoch: w.key.epoch})
			return e.Window, ok, err
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

// prepareWindows puts the windows that egresses will name into ws_windows.
func (d *Dataplane) prepareWindows(g *generation, want map[uint32]window) error {
	return d.prepareShared(g, tableWindows, d.sharedWindows(want), stepWindow)
}

// windowAt opens what an entry of ws_windows names; nil: nothing.
func (g *generation) windowAt(i uint32) (*ebpf.Map, error) { return g.sharedAt(tableWindows, i) }
