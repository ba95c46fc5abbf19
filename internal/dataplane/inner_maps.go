package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/tables"
)

// An outer map has only the ids of the maps in it, and opening a map by its id needs
// CAP_SYS_ADMIN. So a generation keeps the maps in its outer maps open, and pins them beside
// those.

func innerName(outer tables.Map, key uint32) string { return fmt.Sprintf("%s-%d", outer, key) }

// nextPin is where a map is pinned before an outer map names it.
func nextPin(path string) string { return path + "-next" }

// putInner puts m into an outer map, in one atomic step. m belongs to g from here on, also after
// an error. Pins do not affect packets: if their directory was removed, KeepPins restores m's
// with the others, or returns an error.
func (g *generation) putInner(outer tables.Map, key uint32, m *ebpf.Map) (err error) {
	path := filepath.Join(g.dir, innerName(outer, key))
	pinned := false
	if g.dir != "" {
		_ = os.Remove(nextPin(path)) // left over by an agent that was killed
		pinned = m.Pin(nextPin(path)) == nil
	}
	if err := g.maps[outer].Put(key, m); err != nil {
		return errors.Join(fmt.Errorf("write to map %s: %w", outer, err), m.Close())
	}
	before := g.inner[innerName(outer, key)]
	g.holdInner(outer, key, m)
	if before != nil {
		err = before.Close()
	}
	if pinned {
		_ = os.Rename(nextPin(path), path)
	}
	return err
}

func (g *generation) holdInner(outer tables.Map, key uint32, m *ebpf.Map) {
	if g.inner == nil {
		g.inner = map[string]*ebpf.Map{}
	}
	g.inner[innerName(outer, key)] = m
}

// openInner returns a map in an outer map; it still belongs to g. ebpf.ErrKeyNotExist: there is
// none.
func (g *generation) openInner(outer tables.Map, key uint32) (*ebpf.Map, error) {
	var id ebpf.MapID
	if err := g.maps[outer].Lookup(key, &id); err != nil {
		return nil, fmt.Errorf("read map %s: %w", outer, err)
	}
	before := g.inner[innerName(outer, key)]
	if before != nil {
		if has, err := mapID(before); err != nil || ebpf.MapID(has) == id {
			return before, err
		}
	}
	m, err := g.openInnerPin(outer, key, id)
	if err != nil {
		return nil, fmt.Errorf("open what map %s holds: %w", outer, err)
	}
	g.holdInner(outer, key, m)
	if before != nil {
		err = before.Close()
	}
	return m, err
}

// openInnerPin opens the map of that id by its pin. Without one the kernel wants CAP_SYS_ADMIN.
func (g *generation) openInnerPin(outer tables.Map, key uint32, id ebpf.MapID) (*ebpf.Map, error) {
	path := filepath.Join(g.dir, innerName(outer, key))
	// The process that pinned the next one may have ended before it renamed the pin.
	for _, at := range []string{path, nextPin(path)} {
		m, err := ebpf.LoadPinnedMap(at, nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if has, err := mapID(m); err == nil && ebpf.MapID(has) == id {
			return m, nil
		}
		if err := m.Close(); err != nil {
			return nil, err
		}
	}
	return ebpf.NewMapFromID(id)
}
