package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Another process may remove pins while this process has the objects open, or unmount their bpf
// filesystem. The data path then works until this process ends: then the links are removed, and
// with them the guard. So this process restores the pins before it ends.

// PinsError means that pins were removed and cannot be put back.
type PinsError struct {
	Dir string
	Err error
}

func (e *PinsError) Error() string {
	return fmt.Sprintf("pins below %s are gone and cannot be put back, and the data path, with its guard, would end with the agent: do not stop it before they are back: %v", e.Dir, e.Err)
}

// Unwrap gives the cause.
func (e *PinsError) Unwrap() error { return e.Err }

// PinDir is the directory of the instance's pins, in which they are and directories
// with more of them.
func (d *Dataplane) PinDir() string { return d.dir }

// KeepPins restores removed pins of the instance, mounts the bpf filesystem again if necessary,
// and returns the paths below PinDir of the pins restored since the last call. A PinsError means
// that some could not be restored, for example because another process has made new ones
// (ErrBusy), which stay.
func (d *Dataplane) KeepPins() (back []string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err = d.keepPinsLocked()
	back, d.back = d.back, nil
	return back, err
}

func (d *Dataplane) keepPinsLocked() (err error) {
	if d.lock == nil {
		return nil // closed
	}
	defer func() {
		if err != nil {
			err = &PinsError{d.dir, err}
		}
	}()
	for {
		before, err := d.keepDirectory()
		if err != nil {
			return err
		}
		err = d.keepObjects()
		if before != nil {
			// Last: with a filesystem that was unmounted the pins in it go now.
			err = errors.Join(err, before.Close())
		}
		if err == nil {
			return nil
		}
		if there, lost := d.ownsDirectory(); there || lost != nil {
			return err
		}
		// The directory was removed meanwhile.
	}
}

// keepObjects puts the pins back into the directory.
func (d *Dataplane) keepObjects() error {
	var first error
	failed := 0
	seen := map[string]seenPin{}
	defer func() { d.seen = seen }()
	keep := func(path string, o pinned) {
		// Each mount on the machine leads here. The file alone is looked at in one system call.
		file, err := statPin(path)
		now := seenPin{file, o}
		if err == nil && d.seen[path] == now {
			seen[path] = now
			return
		}
		if err := d.keepPin(path, o); err != nil {
			first = cmp.Or(first, err)
			failed++
			return
		}
		if again, err := statPin(path); err == nil && again == file {
			seen[path] = now
		}
	}
	// In an order, so that the same trouble makes the same words.
	for _, k := range slices.SortedFunc(maps.Keys(d.links), compareRemoval) {
		keep(d.links[k].path, d.links[k])
	}
	if g := d.gen; g != nil {
		for _, name := range slices.Sorted(maps.Keys(g.maps)) {
			keep(filepath.Join(g.dir, string(name)), mapPin{g.maps[name]})
		}
		for _, name := range slices.Sorted(maps.Keys(g.programs)) {
			keep(filepath.Join(g.dir, name), programPin{g.programs[name]})
			keep(filepath.Join(g.dir, constantsPin(name)), mapPin{g.constants[name]})
		}
		for _, name := range slices.Sorted(maps.Keys(g.inner)) {
			keep(filepath.Join(g.dir, name), mapPin{g.inner[name]})
		}
		for _, k := range []slabKind{windowSlabs(), numberSlabs(d.cpus)} {
			at := slabs{slabKind: k, instance: d.dir}
			for i := range k.most {
				id, err := g.slabAt(k.outer, i)
				if err != nil {
					return err
				}
				if id == 0 {
					break
				}
				keep(at.pin(i), slabPinned{id})
			}
		}
	}
	if failed > 1 {
		first = fmt.Errorf("%w; and %d more", first, failed-1)
	}
	return first
}

// seenPin is a pin that was found to be of an object.
type seenPin struct {
	file pinFile
	of   pinned
}

// pinFile tells a pin from others, earlier ones of the same path too: the object of a file in a bpf
// filesystem never changes.
type pinFile struct {
	device, inode uint64
	changed       unix.Timespec
}

func statPin(path string) (pinFile, error) {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return pinFile{}, err
	}
	return pinFile{uint64(s.Dev), s.Ino, s.Ctim}, nil
}

// keepDirectory makes a new directory of the instance if the locked one is gone, locks it, and
// returns the lock of the old one; nil: it is the same. The caller holds the mutex; nothing here
// waits for the lock of an instance.
func (d *Dataplane) keepDirectory() (before *os.File, err error) {
	if there, err := d.ownsDirectory(); there || err != nil {
		return nil, err
	}
	if err := ensurePinDir(d.cfg.PinDir); err != nil {
		return nil, fmt.Errorf("%w; if a bpf filesystem was mounted there, mount it again (mount -t bpf bpf DIRECTORY)", err)
	}
	lock, err := lockInstance(d.dir, true)
	if errors.Is(err, ErrBusy) {
		return nil, fmt.Errorf("somebody removed the directory of the instance, and there is a new one: %w", err)
	}
	if err != nil {
		return nil, err
	}
	before, d.lock = d.lock, lock
	return before, nil
}

// ownsDirectory: is the directory that is locked still where it was?
func (d *Dataplane) ownsDirectory() (bool, error) {
	held, err := d.lock.Stat()
	if err != nil {
		return false, fmt.Errorf("look at the instance's pin directory: %w", err)
	}
	now, err := os.Stat(d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at the instance's pin directory: %w", err)
	}
	return os.SameFile(held, now), nil
}

// pinned is an object that is open, and has a pin.
type pinned interface {
	id() (uint32, error)
	idAt(path string) (uint32, error)
	pin(path string) error
	unpin() error // from where the library believes that it is
}

// keepPin sees to it that a pin is there, and of this object.
func (d *Dataplane) keepPin(path string, o pinned) error {
	there, err := o.idAt(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look at the pin %s: %w; remove it if it is not waystamp's", path, err)
	}
	if err == nil {
		own, err := o.id()
		if err != nil {
			return fmt.Errorf("look at what is pinned at %s: %w", path, err)
		}
		if own == there {
			return nil
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove the pin of another object: %w", err)
		}
	}
	if err := d.putBack(path, o); err != nil {
		return fmt.Errorf("put the pin %s back: %w", path, err)
	}
	name, err := filepath.Rel(d.dir, path)
	if err != nil {
		return err
	}
	d.back = append(d.back, name)
	return nil
}

func (d *Dataplane) putBack(path string, o pinned) error {
	if err := d.cfg.step(stepPin, path); err != nil {
		return err
	}
	// Not the directories above: they may be gone with a mount, and must not be made in the
	// filesystem below it.
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	// Without unpin, pin does nothing where the library believes that it is there.
	if err := o.unpin(); err != nil {
		return err
	}
	return o.pin(path)
}

type mapPin struct{ *ebpf.Map }

func (m mapPin) id() (uint32, error)              { return mapID(m.Map) }
func (m mapPin) idAt(path string) (uint32, error) { return mapIDAt(path) }
func (m mapPin) pin(path string) error            { return m.Pin(path) }
func (m mapPin) unpin() error                     { return m.Unpin() }

func mapID(m *ebpf.Map) (uint32, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	id, ok := info.ID()
	if !ok {
		return 0, errors.New("the kernel does not tell the map's id")
	}
	return uint32(id), nil
}

func mapIDAt(path string) (id uint32, err error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	return mapID(m)
}

// slabPinned is a slab. Only maps of the generation hold it: it is opened to be pinned.
type slabPinned struct{ mapID ebpf.MapID }

func (s slabPinned) id() (uint32, error)              { return uint32(s.mapID), nil }
func (s slabPinned) idAt(path string) (uint32, error) { return mapIDAt(path) }
func (s slabPinned) unpin() error                     { return nil }

func (s slabPinned) pin(path string) (err error) {
	m, err := ebpf.NewMapFromID(s.mapID)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	return m.Pin(path)
}

type programPin struct{ *ebpf.Program }

func (p programPin) pin(path string) error { return p.Pin(path) }
func (p programPin) unpin() error          { return p.Unpin() }

func (p programPin) id() (uint32, error) {
	info, err := p.Info()
	if err != nil {
		return 0, err
	}
	id, ok := info.ID()
	if !ok {
		return 0, errors.New("the kernel does not tell the program's id")
	}
	return uint32(id), nil
}

func (p programPin) idAt(path string) (id uint32, err error) {
	there, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, there.Close()) }()
	return programPin{there}.id()
}

func (l linkHolding) id() (uint32, error) {
	info, err := l.Info()
	if err != nil {
		return 0, err
	}
	return uint32(info.ID), nil
}

func (l linkHolding) idAt(path string) (id uint32, err error) {
	there, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, there.Close()) }()
	return linkHolding{there}.id()
}

func (f *filterHolding) id() (uint32, error)              { return mapID(f.mark) }
func (f *filterHolding) idAt(path string) (uint32, error) { return mapIDAt(path) }
