package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

// Removed lists the objects that Detach has removed.
type Removed struct {
	Links int // programs taken off interfaces
	// Unguarded are the paths, in ascending order, for which the node no longer requires a
	// proof.
	Unguarded []uint32
}

// Detach removes the data path of an instance: its links, programs and maps. It also removes a
// broken one, and continues after errors; but the contents of the replay windows must be on disk
// before the maps are removed. The error is ErrBusy if an agent holds the instance, ErrNotThere
// if there is none.
func Detach(cfg Config) (Removed, error) {
	if cfg.PinDir == "" {
		cfg.PinDir = DefaultPinDir
	}
	dir := instanceDir(cfg.PinDir, cfg.Instance)
	lock, err := lockInstance(dir, false)
	if errors.Is(err, ErrNotThere) {
		if left := removeAborted(cfg.PinDir, cfg.Instance); left != nil {
			return Removed{}, left // callers take ErrNotThere for a success
		}
	}
	if err != nil {
		return Removed{}, err
	}
	defer lock.Close()

	var r Removed
	var errs []error
	r.Unguarded = guardedBy(dir)

	pins, err := heldPins(dir)
	if err != nil {
		errs = append(errs, err)
	}
	here, err := netnsInode()
	if err != nil {
		return r, errors.Join(append(errs, err)...)
	}
	for _, p := range pins {
		if p.ours && !p.link && p.netns != here {
			errs = append(errs, fmt.Errorf("detach %s: %w; if that namespace is gone, remove the pin", p.path, p.elsewhere(dir, here)))
			continue
		}
		h, err := p.openForDetach(cfg)
		if err != nil && p.link {
			continue // nothing that holds a program: it goes with the directory
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("detach %s: %w", p.path, err))
			continue
		}
		if err := cfg.step(stepLinkDetach, filepath.Base(p.path)); err != nil {
			errs = append(errs, err, h.close())
			continue
		}
		if err := detachHolding(h); err != nil {
			errs = append(errs, fmt.Errorf("detach %s: %w", filepath.Base(p.path), err))
			continue
		}
		r.Links++
	}
	if err := errors.Join(errs...); err != nil {
		// The pin of an attached program must stay.
		return r, err
	}
	if cfg.StateDir != "" {
		errs = append(errs, giveBackNumbers(cfg, dir))
		err := saveWindows(cfg.StateDir, dir)
		if _, ok := errors.AsType[*WindowsError](err); ok {
			err = fmt.Errorf("no program is attached any more, but the maps below %s stay: they alone know what the replay windows have seen; detach again when it can be saved: %w", dir, err)
			return r, errors.Join(append(errs, err)...)
		}
		errs = append(errs, err)
	}
	errs = append(errs, removeTree(dir), removeAborted(cfg.PinDir, cfg.Instance))
	return r, errors.Join(errs...)
}

// openForDetach is open, also where the pin of a filter is broken: unlike a link's it
// holds nothing, and the filter would stay when it goes.
func (p heldPin) openForDetach(c Config) (holding, error) {
	h, err := p.open(c)
	if err != nil && !p.link && p.ours && c.Net != nil {
		return filterWithoutMark{newFilterHolding(c, p.key)}, nil
	}
	return h, err
}

// filterWithoutMark is a filter whose pin is removed with the directory.
type filterWithoutMark struct{ *filterHolding }

func (filterWithoutMark) unpin() error { return nil }
func (filterWithoutMark) close() error { return nil }

// giveBackNumbers records where headends that nothing feeds any more have
// stopped.
func giveBackNumbers(cfg Config, dir string) (err error) {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("count CPUs: %w", err)
	}
	in, err := openSlabs(numberSlabs(cpus), dir)
	if err != nil {
		return err
	}
	mem := &memory{numbers: in, Placed: tables.Placed{Numbers: in.readSlots()}}
	defer func() { err = errors.Join(err, mem.close()) }()
	_, err = openNumbers(cfg.StateDir).takeBack(mem, slices.Collect(maps.Keys(mem.Placed.Numbers)))
	return err
}

// guardedBy reads, as far as it can, which paths a pinned data path guards.
func guardedBy(dir string) (guarded []uint32) {
	whole, _, err := generationDirs(dir)
	if err != nil {
		return nil
	}
	for _, name := range whole {
		_, id, _ := parseGenerationName(name)
		if id.objects != identityOf(abi.Config{}).objects {
			continue // its maps may be laid out in another way
		}
		g := &generation{identity: id, dir: filepath.Join(dir, name)}
		if g.load() != nil {
			g.close()
			continue
		}
		t, err := g.read()
		if err == nil {
			for k := range t.Egresses {
				guarded = append(guarded, abi.BE32(k.Path))
			}
		}
		g.close()
		if err != nil {
			continue
		}
		slices.Sort(guarded)
		return slices.Compact(guarded)
	}
	return nil
}
