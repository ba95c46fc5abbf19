package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// window is the replay window of a path in one epoch. Its map is older than the
// generation that names it and outlives it: all generations have the same one,
// so that no number is forgotten while the links are moved from one to the next.
type window struct {
	key   counterKey
	lanes int
	size  int // numbers of each lane
}

// words are the entries of its map.
func (w window) words() uint32 { return uint32(w.lanes * w.size / 4) }

func (w window) spec() *ebpf.MapSpec {
	return &ebpf.MapSpec{
		Name: "ws_window", Type: ebpf.Array, KeySize: 4, ValueSize: 8,
		MaxEntries: w.words(), Flags: unix.BPF_F_INNER_MAP,
	}
}

func (w window) String() string {
	return fmt.Sprintf("replay window of path %s, epoch %d", pathText(fromBE32(w.key.path)), w.key.epoch)
}

// windowsDir holds the pins of all windows, of whichever generation.
func windowsDir(dir string) string { return filepath.Join(dir, "windows") }

func (w window) pin() string {
	return fmt.Sprintf("%08x-%d", fromBE32(w.key.path), w.key.epoch)
}

// prepareWindows puts the windows that egresses will name into ws_windows. What
// g, or the generation at work, has of a path and epoch it keeps.
func (d *Dataplane) prepareWindows(g *generation, want map[uint32]window) error {
	outer := g.maps[tableWindows]
	var indexes, fds []uint32
	var opened []*ebpf.Map
	defer func() {
		for _, m := range opened {
			m.Close()
		}
	}()
	for i, w := range want {
		m, fresh, err := d.openWindow(g, i, w)
		if err != nil {
			return err
		}
		opened = append(opened, m)
		if fresh {
			indexes, fds = append(indexes, i), append(fds, uint32(m.FD()))
		}
	}
	if len(indexes) == 0 {
		return nil
	}
	if err := d.cfg.step(stepWindow, ""); err != nil {
		return err
	}
	// At once: after each call the kernel waits for the programs that run.
	if _, err := outer.BatchUpdate(indexes, fds, nil); err != nil {
		return fmt.Errorf("write to map %s: %w", tableWindows, err)
	}
	return nil
}

// openWindow gives the map of a window: the one that is there, or a new one.
// place: entry i of g's ws_windows does not have it yet.
func (d *Dataplane) openWindow(g *generation, i uint32, w window) (m *ebpf.Map, place bool, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", w, err), m.Close())
		}
	}()
	path := filepath.Join(windowsDir(d.dir), w.pin())
	pinned := false
	if d.dir != "" { // else a test, which has no pins
		m, err = ebpf.LoadPinnedMap(path, nil)
		pinned = err == nil
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, false, err
		}
	}
	if !pinned {
		if m, err = d.heldWindow(g, w); err == nil && m == nil {
			m, err = d.newWindow(w)
		}
		if err != nil {
			return m, false, err
		}
	}
	if err := w.fits(m); err != nil {
		return m, false, err
	}
	if !pinned && d.dir != "" {
		if err := os.MkdirAll(windowsDir(d.dir), 0o700); err != nil {
			return m, false, err
		}
		if err := m.Pin(path); err != nil {
			return m, false, fmt.Errorf("pin: %w", err)
		}
	}
	there, err := g.windowAt(i)
	if err != nil {
		return m, false, err
	}
	defer there.Close()
	same, err := sameMap(there, m)
	return m, !same, err
}

// heldWindow finds a window whose pin somebody has removed: the programs still
// have it. nil: there is none.
func (d *Dataplane) heldWindow(g *generation, w window) (*ebpf.Map, error) {
	for _, gen := range []*generation{g, d.gen} {
		if gen == nil {
			continue
		}
		var e egress
		err := gen.maps[tableEgresses].Lookup(egressKey{Path: w.key.path, Epoch: w.key.epoch}, &e)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read map %s: %w", tableEgresses, err)
		}
		if m, err := gen.windowAt(e.Window); m != nil || err != nil {
			return m, err
		}
	}
	return nil, nil
}

func (d *Dataplane) newWindow(w window) (*ebpf.Map, error) {
	if err := d.cfg.step(stepCreateMap, w.pin()); err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(w.spec())
	if err != nil {
		return nil, err
	}
	d.madeWindows = append(d.madeWindows, w.pin())
	return m, d.recallWindow(m, w)
}

// fits refuses a window of another size: it could not be made anew without
// forgetting what it has seen.
func (w window) fits(m *ebpf.Map) error {
	if m.Type() != ebpf.Array || m.KeySize() != 4 || m.ValueSize() != 8 || m.MaxEntries() != w.words() {
		return fmt.Errorf("has %d words and the plan wants %d lanes of %d numbers, which are %d words; give the path a new epoch (waystamp plan does)",
			m.MaxEntries(), w.lanes, w.size, w.words())
	}
	return nil
}

// windowAt opens what an entry of ws_windows names; nil: nothing.
func (g *generation) windowAt(i uint32) (*ebpf.Map, error) {
	var id ebpf.MapID
	err := g.maps[tableWindows].Lookup(i, &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read map %s: %w", tableWindows, err)
	}
	return ebpf.NewMapFromID(id)
}

func sameMap(a, b *ebpf.Map) (bool, error) {
	if a == nil {
		return false, nil
	}
	ids := [2]ebpf.MapID{}
	for i, m := range []*ebpf.Map{a, b} {
		info, err := m.Info()
		if err != nil {
			return false, err
		}
		id, ok := info.ID()
		if !ok {
			return false, errors.New("the kernel does not tell the ids of maps")
		}
		ids[i] = id
	}
	return ids[0] == ids[1], nil
}

// unmakeWindows removes those that were made for a plan that could not be put in
// force.
func (d *Dataplane) unmakeWindows() error {
	var errs []error
	for _, name := range d.madeWindows {
		if err := os.Remove(filepath.Join(windowsDir(d.dir), name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove a replay window: %w", err))
		}
	}
	d.madeWindows = nil
	return errors.Join(errs...)
}

// removeWindows removes the windows that no egress of the plan has.
func (d *Dataplane) removeWindows(g *generation, want map[uint32]window) error {
	keep := map[string]bool{}
	for _, w := range want {
		keep[w.pin()] = true
	}
	entries, err := os.ReadDir(windowsDir(d.dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the pinned replay windows: %w", err)
	}
	var errs []error
	gone := false
	for _, e := range entries {
		if !keep[e.Name()] {
			gone = true
			errs = append(errs, os.Remove(filepath.Join(windowsDir(d.dir), e.Name())))
		}
	}
	if gone {
		errs = append(errs, g.forgetWindows(want))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove replay windows: %w", err)
	}
	return nil
}

// forgetWindows empties the entries of ws_windows that nobody names any more.
func (g *generation) forgetWindows(want map[uint32]window) error {
	var id ebpf.MapID
	outer := g.maps[tableWindows]
	for i := range outer.MaxEntries() {
		if _, ok := want[i]; ok {
			continue
		}
		switch err := outer.Lookup(i, &id); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			continue
		case err != nil:
			return err
		}
		if err := outer.Delete(i); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	return nil
}
