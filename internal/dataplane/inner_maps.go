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

// The kernel opens a map by its id, which is all that an outer map tells about the maps in it, for
// CAP_SYS_ADMIN alone. A generation therefore holds what its outer maps name, and pins it beside them.

func innerName(outer tables.Map, key uint32) string { return fmt.Sprintf("%s-%d", outer, key) }

// nextPin is where a map is pinned before an outer map names it.
func nextPin(path string) string { return path + "-next" }

// putInner makes an outer map name m, in one step for the packets. m is g's from here on, also
// after an error. What packets meet does not depend on pins: if somebody has taken their directory away,
// KeepPins puts m's back with the others, or says that it cannot.
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

// openInner gives what an outer map names; it stays g's. ebpf.ErrKeyNotExist: nothing.
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
	// Whoever pinned the next may have been ended before it took the other's name.
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
