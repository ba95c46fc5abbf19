package dataplane

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/tables"
)

// A slab is a map with the replay windows, or the packet numbers, of many paths. It is older
// than the generation that uses it and outlives it: all generations have the same slabs, so that
// their contents stay while the links are moved from one to the next. Each window or slot in it
// identifies its owner, so no other state is needed to find it again.

// slabKind describes the contents of slabs.
type slabKind struct {
	what  string     // for messages
	dir   string     // of the pins, below the instance's
	outer tables.Map // the map of maps that names them
	most  int
	words int // of eight bytes, in each, before its header
	spec  ebpf.MapSpec
	step  string
}

func windowSlabs() slabKind {
	return slabKind{
		what: "replay windows", dir: windowsName, outer: tables.MapWindows, most: abi.WindowSlabs, words: abi.WindowSlab, step: stepWindow,
		spec: ebpf.MapSpec{
			Name: "ws_window_slab", Type: ebpf.Array, KeySize: 4, ValueSize: 8,
			MaxEntries: abi.WindowSlab + slabHeader, Flags: unix.BPF_F_MMAPABLE,
		},
	}
}

// The header of a slab lies behind its words, where programs never look. Its words
// are the magic, the version, and the boot id in two.
const (
	slabHeader  = 8                  // words
	slabMagic   = 0x7761797374616d70 // "waystamp"
	slabVersion = 1                  // of the meaning of the words before it
)

// numberSize is that of struct ws_number, in words.
const numberSize = 2

func numberSlabs(cpus int) slabKind {
	entries := (cpus + 1) * abi.NumberSlots
	return slabKind{
		what: "packet numbers", dir: numbersName, outer: tables.MapNumbers, most: abi.NumberSlabs, words: entries * numberSize, step: stepNumbers,
		spec: ebpf.MapSpec{
			Name: "ws_number_slab", Type: ebpf.Array, KeySize: 4, ValueSize: 8 * numberSize,
			MaxEntries: uint32(entries + slabHeader/numberSize), Flags: unix.BPF_F_MMAPABLE,
		},
	}
}

// slab is one of them, in this process's memory.
type slab struct {
	m      *ebpf.Map
	pages  []byte
	words  []atomic.Uint64 // the same, with the header
	pinned bool            // or it was once
}

// slabs are all of a kind that an instance has. Their words are numbered through.
type slabs struct {
	slabKind
	instance string // directory; "": a test, which has no pins
	all      []*slab
}

// openSlabs opens the pinned slabs, and slabs of a generation whose pins were removed, which
// KeepPins restores.
func openSlabs(k slabKind, instance string, from ...*generation) (_ *slabs, err error) {
	s := &slabs{slabKind: k, instance: instance}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open the %s: %w", k.what, err), s.close())
		}
	}()
	for _, i := range s.pins() {
		m, err := ebpf.LoadPinnedMap(s.pin(i), nil)
		if err != nil {
			return s, err
		}
		if err := s.have(i, m, false); err != nil {
			return s, err
		}
	}
	for _, g := range from {
		if g == nil {
			continue
		}
		for i := 0; i < k.most; i++ {
			id, err := g.slabAt(k.outer, i)
			if err != nil {
				return s, err
			}
			if id == 0 && i >= len(s.all) {
				break
			}
			if id == 0 || i < len(s.all) && s.all[i] != nil {
				continue
			}
			m, err := ebpf.NewMapFromID(id)
			if err != nil {
				return s, err
			}
			if err := s.have(i, m, false); err != nil {
				return s, err
			}
		}
	}
	return s, nil
}

// slabAt is the map of an entry of an outer map; 0: none.
func (g *generation) slabAt(t tables.Map, i int) (id ebpf.MapID, err error) {
	err = g.maps[t].Lookup(uint32(i), &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read map %s: %w", t, err)
	}
	return id, nil
}

const slabPin = "slab-%d"

func (s *slabs) pin(i int) string {
	return filepath.Join(s.instance, s.dir, fmt.Sprintf(slabPin, i))
}

// pins are the numbers of the pinned slabs.
func (s *slabs) pins() (out []int) {
	if s.instance == "" {
		return nil
	}
	entries, _ := os.ReadDir(filepath.Join(s.instance, s.dir)) // none: nothing is pinned
	for _, e := range entries {
		var i int
		n, err := fmt.Sscanf(e.Name(), slabPin, &i)
		if n == 1 && err == nil && i >= 0 && i < s.most && fmt.Sprintf(slabPin, i) == e.Name() {
			out = append(out, i)
		}
	}
	return out
}

// have takes a map, which is s's from here on. fresh: it was just made, and gets its
// header; all others are pinned, or were once.
func (s *slabs) have(i int, m *ebpf.Map, fresh bool) error {
	for len(s.all) <= i {
		s.all = append(s.all, nil)
	}
	one := &slab{m: m, pinned: !fresh}
	s.all[i] = one
	if m.Type() != s.spec.Type || m.KeySize() != s.spec.KeySize || m.ValueSize() != s.spec.ValueSize ||
		m.MaxEntries() != s.spec.MaxEntries || m.Flags()&s.spec.Flags == 0 {
		return fmt.Errorf("slab %d is a map of another shape; %s", i, slabAdvice)
	}
	all := s.words + slabHeader
	var err error
	if one.pages, err = unix.Mmap(m.FD(), 0, 8*all, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map slab %d into memory: %w", i, err)
	}
	one.words = unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(one.pages))), all)
	header, err := newSlabHeader()
	if err != nil {
		return err
	}
	if fresh {
		for j, v := range header {
			one.words[s.words+j].Store(v)
		}
		return nil
	}
	var there [slabHeader]uint64
	for j := range there {
		there[j] = one.words[s.words+j].Load()
	}
	if err := checkSlabHeader(there, header); err != nil {
		return fmt.Errorf("slab %d %w; %s", i, err, slabAdvice)
	}
	return nil
}

const slabAdvice = "detach with the waystamp that made it (waystamp agent --detach) and start this one again"

// newSlabHeader is the one that this waystamp writes.
func newSlabHeader() (h [slabHeader]uint64, err error) {
	text, err := bootID()
	if err != nil {
		return h, err
	}
	boot, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	if err != nil || len(boot) != 16 {
		return h, fmt.Errorf("the kernel's boot id is %q", text)
	}
	return [slabHeader]uint64{slabMagic, slabVersion, binary.BigEndian.Uint64(boot), binary.BigEndian.Uint64(boot[8:])}, nil
}

// checkSlabHeader compares a slab's header with the one that this waystamp writes.
func checkSlabHeader(there, own [slabHeader]uint64) error {
	switch {
	case there[0] != own[0]:
		return fmt.Errorf("begins its header with %#x, as no waystamp does", there[0])
	case there[1] != own[1]:
		return fmt.Errorf("has version %d, and this waystamp reads version %d", there[1], own[1])
	case there != own:
		return errors.New("is of another boot than this kernel's")
	}
	return nil
}

func (s *slabs) close() error {
	if s == nil {
		return nil
	}
	var errs []error
	for _, one := range s.all {
		if one == nil {
			continue
		}
		if one.pages != nil {
			errs = append(errs, unix.Munmap(one.pages))
		}
		errs = append(errs, one.m.Close())
	}
	s.all = nil
	return errors.Join(errs...)
}

// word is one of all slabs' words; nil: its slab is not there.
func (s *slabs) word(at int) *atomic.Uint64 {
	i := at / s.words
	if i >= len(s.all) || s.all[i] == nil {
		return nil
	}
	return &s.all[i].words[at%s.words]
}

// end is the number of the first word behind them.
func (s *slabs) end() int { return len(s.all) * s.words }

// clear makes words zero. Their slabs are there.
func (s *slabs) clear(from, to int) {
	for at := from; at < to; at++ {
		s.word(at).Store(0)
	}
}

// grow makes slabs for all words below end, with zeroes in them.
func (s *slabs) grow(end int, step func(step, what string) error) error {
	n := (end + s.words - 1) / s.words
	if n > s.most {
		return fmt.Errorf("the %s need %d slabs and a node can have %d", s.what, n, s.most)
	}
	for i := range n {
		if i < len(s.all) && s.all[i] != nil {
			continue
		}
		if err := step(stepCreateMap, s.spec.Name); err != nil {
			return err
		}
		m, err := ebpf.NewMap(&s.spec)
		if err != nil {
			return fmt.Errorf("make slab %d of the %s, %d KiB of the kernel's memory: %w", i, s.what, s.words>>7, err)
		}
		if err := s.have(i, m, true); err != nil {
			return err
		}
	}
	return nil
}

// pinNew pins the slabs without a pin.
func (s *slabs) pinNew() error {
	if s.instance == "" {
		return nil
	}
	for i, one := range s.all {
		if one == nil || one.pinned {
			continue
		}
		if err := os.MkdirAll(filepath.Join(s.instance, s.dir), 0o700); err != nil {
			return err
		}
		if err := one.m.Pin(s.pin(i)); err != nil {
			return fmt.Errorf("pin slab %d of the %s: %w", i, s.what, err)
		}
		one.pinned = true
	}
	return nil
}

// placeIn makes an outer map of g name all slabs.
func (s *slabs) placeIn(g *generation, step func(step, what string) error) error {
	var indexes, fds []uint32
	for i, one := range s.all {
		if one == nil {
			continue
		}
		there, err := g.slabAt(s.outer, i)
		if err != nil {
			return err
		}
		info, err := one.m.Info()
		if err != nil {
			return err
		}
		if id, ok := info.ID(); !ok || id != there {
			indexes, fds = append(indexes, uint32(i)), append(fds, uint32(one.m.FD()))
		}
	}
	if len(indexes) == 0 {
		return nil
	}
	if err := step(s.step, ""); err != nil {
		return err
	}
	// At once: after each call the kernel waits for the programs that run.
	if _, err := g.maps[s.outer].BatchUpdate(indexes, fds, nil); err != nil {
		return fmt.Errorf("write to map %s: %w", s.outer, err)
	}
	return nil
}

// shrink removes the slabs behind the last word that is used, from g too (may be
// nil).
func (s *slabs) shrink(g *generation, end int) error {
	keep := (end + s.words - 1) / s.words
	var errs []error
	for i := len(s.all) - 1; i >= keep; i-- {
		one := s.all[i]
		s.all = s.all[:i]
		if g != nil {
			if err := g.maps[s.outer].Delete(uint32(i)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				errs = append(errs, fmt.Errorf("write to map %s: %w", s.outer, err))
			}
		}
		if s.instance != "" {
			if err := os.Remove(s.pin(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
		if one != nil {
			errs = append(errs, unix.Munmap(one.pages), one.m.Close())
		}
	}
	return errors.Join(errs...)
}

// memory has the windows and slots of an instance in slabs.
type memory struct {
	windows, numbers *slabs
	tables.Placed
	placed bool // the generation at work names all of them
}

// memory opens the slabs and reads the owners in them. Only programs may change them at the same
// time.
func (d *Dataplane) memory(from ...*generation) (_ *memory, err error) {
	return openMemory(d.dir, d.cpus, from...)
}

func openMemory(instance string, cpus int, from ...*generation) (_ *memory, err error) {
	mem := &memory{}
	defer func() {
		if err != nil {
			err = errors.Join(err, mem.close())
		}
	}()
	if mem.windows, err = openSlabs(windowSlabs(), instance, from...); err != nil {
		return nil, err
	}
	if mem.numbers, err = openSlabs(numberSlabs(cpus), instance, from...); err != nil {
		return nil, err
	}
	if mem.Placed.Windows, err = mem.windows.readWindows(); err != nil {
		return nil, err
	}
	mem.Placed.Numbers = mem.numbers.readSlots()
	return mem, nil
}

func (mem *memory) close() error {
	if mem == nil {
		return nil
	}
	return errors.Join(mem.windows.close(), mem.numbers.close())
}

// shrink releases empty slabs.
func (mem *memory) shrink(g *generation) error {
	windows, numbers := 0, 0
	for _, w := range mem.Placed.Windows {
		windows = max(windows, w.End())
	}
	for _, slot := range mem.Placed.Numbers {
		numbers = max(numbers, (int(slot)/abi.NumberSlots+1)*mem.numbers.words)
	}
	return errors.Join(mem.windows.shrink(g, windows), mem.numbers.shrink(g, numbers))
}

// made lists the windows and slots that a change of the plan has made so far.
type made struct {
	began   bool
	windows []tables.WindowKey
	numbers []tables.CounterKey
}

// prepareMemory makes the new windows and slots of a plan. No other entry names them yet.
func (d *Dataplane) prepareMemory(g *generation, mem *memory, w tables.Wanted) error {
	d.made.began = true
	windows, numbers := mem.windows.end(), mem.numbers.end()
	for at, x := range w.Windows {
		windows = max(windows, tables.WindowSlot{At: int(at), Window: x}.End())
	}
	for slot := range w.Numbers {
		numbers = max(numbers, (int(slot)/abi.NumberSlots+1)*mem.numbers.words)
	}
	for _, s := range []struct {
		*slabs
		end int
	}{{mem.windows, windows}, {mem.numbers, numbers}} {
		if mem.placed && s.end <= s.slabs.end() {
			continue
		}
		if err := s.grow(s.end, d.cfg.step); err != nil {
			return err
		}
		if err := s.pinNew(); err != nil {
			return err
		}
		if err := s.placeIn(g, d.cfg.step); err != nil {
			return err
		}
	}
	if err := d.beginWindows(mem, w.Windows); err != nil {
		return err
	}
	for slot, k := range w.Numbers {
		if _, there := mem.Placed.Numbers[k]; !there {
			delete(d.given, event.Epoch{Path: abi.BE32(k.Path), Epoch: k.Epoch}) // it goes on
			mem.numbers.own(slot, k)
			mem.Placed.Numbers[k] = slot
			d.made.numbers = append(d.made.numbers, k)
		}
	}
	return nil
}

// unmake removes the windows and slots of a plan that could not be put in force.
func (d *Dataplane) unmake() (err error) {
	windows, numbers := d.made.windows, d.made.numbers
	if !d.made.began {
		return nil
	}
	d.made = made{}
	mem, err := d.memory(d.gen)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.close()) }()
	if _, err := d.numbers.takeBack(mem, numbers); err != nil {
		return err
	}
	if err := waitForPrograms(); err != nil {
		return err
	}
	mem.free(windows, numbers)
	return mem.shrink(d.gen)
}

func keptError(err error) error {
	return fmt.Errorf("replay windows of paths that are gone are kept: %w", err)
}

// free clears windows and slots that no program can use any more, for use by others.
func (mem *memory) free(windows []tables.WindowKey, numbers []tables.CounterKey) {
	for _, k := range windows {
		if w, ok := mem.Placed.Windows[k]; ok {
			mem.windows.freeWindow(w)
			delete(mem.Placed.Windows, k)
		}
	}
	for _, k := range numbers {
		if slot, ok := mem.Placed.Numbers[k]; ok {
			mem.numbers.disown(slot)
			delete(mem.Placed.Numbers, k)
		}
	}
}

// tidy removes the windows and numbers of removed paths when their contents are on disk. safe:
// no program of another generation is on any interface.
func (d *Dataplane) tidy(g *generation, want tables.Wanted, safe bool) (err error) {
	mem, err := d.memory(g)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.close()) }()
	var windows []tables.WindowKey
	var numbers []tables.CounterKey
	for k, slot := range mem.Placed.Windows {
		if w, ok := want.Windows[uint32(slot.At)]; !ok || w.Key != k {
			windows = append(windows, k)
		}
	}
	for k, slot := range mem.Placed.Numbers {
		if want.Numbers[slot] != k {
			numbers = append(numbers, k)
			delete(d.paces, k)
		}
	}
	if len(windows)+len(numbers) == 0 {
		return nil
	}
	if !safe {
		return errors.New("replay windows and packet numbers of paths that are gone are kept while programs of before are on some interface; see the problem with that")
	}
	if err := waitForPrograms(); err != nil {
		return err
	}
	var errs []error
	if err := d.saveWindowsLocked(); err != nil {
		errs = append(errs, keptError(err))
		windows = nil
	}
	// Numbers that cannot be returned are lost; nothing else is.
	last, err := d.numbers.takeBack(mem, numbers)
	errs = append(errs, err)
	d.noteGiven(d.node, last)
	mem.free(windows, numbers)
	return errors.Join(append(errs, mem.shrink(g))...)
}
