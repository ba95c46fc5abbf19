package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
)

// shared is a map of a path in one epoch. It is older than the generation that
// names it and outlives it: all generations have the same one, so that nothing
// is forgotten while the links are moved from one to the next.
type shared struct {
	what  string // for messages
	key   counterKey
	name  string // of its pin
	outer table  // the map of maps that names it
	dir   string // of its pin, below the instance's
	spec  *ebpf.MapSpec
	// misfit tells what to do about one of another shape.
	misfit func(*ebpf.Map) error
	// place is its index in outer of a generation that has it.
	place func(*generation) (index uint32, ok bool, err error)
	// begin fills a new one.
	begin func(*ebpf.Map) error
}

func (s shared) String() string {
	return fmt.Sprintf("%s of path %s, epoch %d", s.what, pathText(fromBE32(s.key.path)), s.key.epoch)
}

func (k counterKey) pin() string { return fmt.Sprintf("%08x-%d", fromBE32(k.path), k.epoch) }

// parsePin reads what pin wrote.
func parsePin(name string) (k counterKey, ok bool) {
	var path uint32
	n, err := fmt.Sscanf(name, "%08x-%d", &path, &k.epoch)
	k.path = be32(path)
	return k, n == 2 && err == nil && k.pin() == name
}

func (s shared) pin(instance string) string { return filepath.Join(instance, s.dir, s.name) }

// prepareShared puts the maps that a plan names into an outer map of g, by their
// index. What g, or the generation at work, has of a path and epoch it keeps.
func (d *Dataplane) prepareShared(g *generation, t table, want map[uint32]shared, step string) error {
	var indexes, fds []uint32
	var opened []*ebpf.Map
	defer func() {
		for _, m := range opened {
			m.Close()
		}
	}()
	for i, s := range want {
		m, fresh, err := d.openShared(g, i, s)
		if err != nil {
			return err
		}
		if !fresh {
			m.Close()
			continue
		}
		opened = append(opened, m)
		indexes, fds = append(indexes, i), append(fds, uint32(m.FD()))
	}
	if len(indexes) == 0 {
		return nil
	}
	if err := d.cfg.step(step, ""); err != nil {
		return err
	}
	// A packet may be under way that met an index when it was another path's.
	if err := waitForPrograms(); err != nil {
		return err
	}
	// At once: after each call the kernel waits for the programs that run.
	if _, err := g.maps[t].BatchUpdate(indexes, fds, nil); err != nil {
		return fmt.Errorf("write to map %s: %w", t, err)
	}
	return nil
}

// openShared gives a map: the one that is there, or a new one. fresh: entry i of
// g's outer map does not have it yet.
func (d *Dataplane) openShared(g *generation, i uint32, s shared) (m *ebpf.Map, fresh bool, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", s, err), m.Close())
		}
	}()
	pinned := false
	if d.dir != "" { // else a test, which has no pins
		m, err = ebpf.LoadPinnedMap(s.pin(d.dir), nil)
		pinned = err == nil
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, false, err
		}
	}
	if !pinned {
		if m, err = d.heldShared(g, s); err == nil && m == nil {
			m, err = d.newShared(s)
		}
		if err != nil {
			return m, false, err
		}
	}
	if other, err := s.misfits(m); err != nil || other {
		return m, false, cmp.Or(err, s.misfit(m))
	}
	if !pinned && d.dir != "" {
		if err := os.MkdirAll(filepath.Join(d.dir, s.dir), 0o700); err != nil {
			return m, false, err
		}
		if err := m.Pin(s.pin(d.dir)); err != nil {
			return m, false, fmt.Errorf("pin: %w", err)
		}
	}
	there, err := g.sharedAt(s.outer, i)
	if err != nil {
		return m, false, err
	}
	defer there.Close()
	same, err := sameMap(there, m)
	return m, !same, err
}

// heldShared finds a map whose pin somebody has removed: the programs still have
// it. nil: there is none.
func (d *Dataplane) heldShared(g *generation, s shared) (*ebpf.Map, error) {
	for _, gen := range []*generation{g, d.gen} {
		if gen == nil {
			continue
		}
		i, ok, err := s.place(gen)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if m, err := gen.sharedAt(s.outer, i); m != nil || err != nil {
			return m, err
		}
	}
	return nil, nil
}

func (d *Dataplane) newShared(s shared) (*ebpf.Map, error) {
	if err := d.cfg.step(stepCreateMap, s.name); err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(s.spec)
	if err != nil {
		return nil, err
	}
	d.madeShared = append(d.madeShared, s)
	return m, s.begin(m)
}

// misfits tells a map of another shape: it could not be made anew without
// forgetting what is in it.
func (s shared) misfits(m *ebpf.Map) (bool, error) {
	info, err := m.Info()
	if err != nil {
		return false, err
	}
	return info.Name != s.spec.Name || m.Type() != s.spec.Type || m.KeySize() != s.spec.KeySize || m.ValueSize() != s.spec.ValueSize ||
		m.MaxEntries() != s.spec.MaxEntries, nil
}

// sharedAt opens what an entry of an outer map names; nil: nothing.
func (g *generation) sharedAt(t table, i uint32) (*ebpf.Map, error) {
	var id ebpf.MapID
	err := g.maps[t].Lookup(i, &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read map %s: %w", t, err)
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

// unmakeShared removes the maps that were made for a plan that could not be put
// in force.
func (d *Dataplane) unmakeShared() error {
	var errs []error
	if err := d.takeBackMade(); err != nil {
		errs = append(errs, err)
	}
	for _, s := range d.madeShared {
		if err := os.Remove(s.pin(d.dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the %s: %w", s, err))
		}
	}
	d.madeShared = nil
	return errors.Join(errs...)
}

// removeShared removes the maps in a directory that no part of the plan has, from
// g too.
func (d *Dataplane) removeShared(g *generation, t table, dir string, want map[uint32]shared) error {
	gone, err := d.goneShared(dir, want)
	if err != nil || len(gone) == 0 {
		return err
	}
	var errs []error
	for _, name := range gone {
		errs = append(errs, os.Remove(filepath.Join(d.dir, dir, name)))
	}
	if err := errors.Join(append(errs, forgetShared(g, t, want))...); err != nil {
		return fmt.Errorf("remove the %s of paths that are gone: %w", dir, err)
	}
	return nil
}

// goneShared are the names of the pins in a directory that no part of the plan has.
func (d *Dataplane) goneShared(dir string, want map[uint32]shared) (gone []string, err error) {
	keep := map[string]bool{}
	for _, s := range want {
		keep[s.name] = true
	}
	entries, err := os.ReadDir(filepath.Join(d.dir, dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the pins of %s: %w", dir, err)
	}
	for _, e := range entries {
		if !keep[e.Name()] {
			gone = append(gone, e.Name())
		}
	}
	return gone, nil
}

// forgetShared empties the entries of an outer map that nobody names any more.
func forgetShared(g *generation, t table, want map[uint32]shared) error {
	var id ebpf.MapID
	outer := g.maps[t]
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
