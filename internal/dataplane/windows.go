package dataplane

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
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

func (k counterKey) String() string {
	return fmt.Sprintf("path %s, epoch %d", pathText(fromBE32(k.path)), k.epoch)
}

// pin is the name that its map had before there were slabs.
func (k counterKey) pin() string { return fmt.Sprintf("%08x-%d", fromBE32(k.path), k.epoch) }

// parsePin reads what pin wrote.
func parsePin(name string) (k counterKey, ok bool) {
	var path uint32
	n, err := fmt.Sscanf(name, "%08x-%d", &path, &k.epoch)
	k.path = be32(path)
	return k, n == 2 && err == nil && k.pin() == name
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

func (w window) String() string { return "replay window of " + w.key.counterKey.String() }

// words are those that count. Before them comes the head.
func (w window) words() int { return w.lanes * w.size / 4 }

// windowsName is the directory of the pins of all slabs of windows, of whichever
// generation.
const windowsName = "windows"

func windowsDir(dir string) string { return filepath.Join(dir, windowsName) }

// windowSlot is where a window is.
type windowSlot struct {
	window
	at     int  // its first word that counts
	closed bool // nothing passes until it has what an older version's window has seen
}

func (w windowSlot) head() int { return w.at - abi.WindowHead }
func (w windowSlot) end() int  { return w.at + w.words() }

// The head of a window: in its first word what makes it one, which is written last;
// then path and epoch; then the secrets. The rest is zero. Windows, and what is free
// between them, begin at multiples of the head's length. What is free is zero.
const (
	windowMagic = 0x5753 << 48

	// The state, in bits 47 to 40.
	windowHalf   = 1 << 40 // being made or removed: nobody names it
	windowWhole  = 2 << 40
	windowClosed = 3 << 40
	windowStates = 0xff << 40

	windowLog2Shift = 32 // below: the lanes

	// closedWord lets nothing pass: a tag that no number has, and all uses.
	closedWord = 1<<64 - 1
)

func (w window) mark(state uint64) uint64 {
	return windowMagic | state | uint64(bits.TrailingZeros(uint(w.size)))<<windowLog2Shift | uint64(w.lanes)
}

// readWindows finds all windows, and makes those zero that were never finished.
func (s *slabs) readWindows() (map[windowKey]windowSlot, error) {
	out := map[windowKey]windowSlot{}
	for at := 0; at < s.end(); {
		word := s.word(at)
		if word == nil {
			at += s.words // a slab that is gone
			continue
		}
		mark := word.Load()
		if mark == 0 {
			at += abi.WindowHead
			continue
		}
		w, state, ok := s.windowAt(at, mark)
		if !ok {
			return nil, fmt.Errorf("the memory of the replay windows is damaged: word %d says %#x; detach (waystamp agent --detach) and start again", at, mark)
		}
		at = w.end()
		switch _, twice := out[w.key]; {
		case state == windowHalf:
			s.freeWindow(w)
		case twice:
			return nil, fmt.Errorf("the memory of the replay windows is damaged: the %s is there twice; detach (waystamp agent --detach) and start again", w)
		default:
			w.closed = state == windowClosed
			out[w.key] = w
		}
	}
	return out, nil
}

func (s *slabs) windowAt(at int, mark uint64) (w windowSlot, state uint64, ok bool) {
	log2 := mark >> windowLog2Shift & 0xff
	w.lanes, w.size, w.at = int(uint32(mark)), 1<<(log2&31), at+abi.WindowHead
	state = mark & windowStates
	if mark != w.mark(state) || state == 0 || state > windowClosed || w.lanes < 1 || w.lanes > model.LanesMax || model.CheckWindow(w.size) != nil || w.end() > s.end() {
		return w, 0, false
	}
	for i := at; i < w.end(); i = (i/s.words + 1) * s.words {
		if s.word(i) == nil {
			return w, 0, false
		}
	}
	of := s.word(at + 1).Load()
	w.key = windowKey{counterKey{be32(uint32(of >> 8)), uint8(of)}, s.word(at + 2).Load()}
	return w, state, true
}

// makeWindow makes one where nothing is. words: what it counts at first, all of it
// or none.
func (s *slabs) makeWindow(w windowSlot, words []uint64) {
	at := w.head()
	s.word(at).Store(w.mark(windowHalf))
	s.word(at + 1).Store(uint64(fromBE32(w.key.path))<<8 | uint64(w.key.epoch))
	s.word(at + 2).Store(w.key.secrets)
	s.putWords(w, words)
	state := uint64(windowWhole)
	if w.closed {
		state = windowClosed
	}
	s.word(at).Store(w.mark(state))
}

// freeWindow ends a window that no program can meet any more.
func (s *slabs) freeWindow(w windowSlot) {
	s.word(w.head()).Store(w.mark(windowHalf))
	s.clear(w.head()+1, w.end())
	s.word(w.head()).Store(0)
}

func (s *slabs) putWords(w windowSlot, words []uint64) {
	for i, v := range words {
		s.word(w.at + i).Store(v)
	}
}

func (s *slabs) wordsOf(w windowSlot) []uint64 {
	out := make([]uint64, w.words())
	for i := range out {
		out[i] = s.word(w.at + i).Load()
	}
	return out
}

// windowSpace gives windows room in the slabs.
type windowSpace struct {
	have map[windowKey]windowSlot
	used []windowSlot // in their order
}

func newWindowSpace(have map[windowKey]windowSlot) *windowSpace {
	s := &windowSpace{have: map[windowKey]windowSlot{}}
	for k, w := range have {
		s.have[k] = w
		s.used = append(s.used, w)
	}
	slices.SortFunc(s.used, func(a, b windowSlot) int { return a.at - b.at })
	return s
}

// get returns a window's first word: where it is, or the lowest room that fits. A
// window never changes its shape: it would forget.
func (s *windowSpace) get(w window) (uint32, error) {
	if have, ok := s.have[w.key]; ok {
		if have.window != w {
			return 0, fmt.Errorf("the %s has %d lanes of %d numbers and the plan wants %d lanes of %d; give the path a new epoch (waystamp plan does)",
				w, have.lanes, have.size, w.lanes, w.size)
		}
		return uint32(have.at), nil
	}
	slot := windowSlot{window: w, at: abi.WindowHead}
	i := 0
	for ; i < len(s.used) && slot.end() > s.used[i].head(); i++ {
		slot.at = s.used[i].end() + abi.WindowHead
	}
	if most := abi.WindowSlabs * abi.WindowSlab; slot.end() > most {
		return 0, fmt.Errorf("no room is left for the %s, which takes %d KiB: the replay windows of %d paths and epochs are in the %d MiB that a node can have; take paths out of the plan, and when that is in force put the new ones in",
			w, model.WindowMemory(w.lanes, w.size)>>10, len(s.used), most>>17)
	}
	s.used = slices.Insert(s.used, i, slot)
	s.have[w.key] = slot
	return uint32(slot.at), nil
}

// beginWindows makes the windows that are not there, where what is on the disk says
// that those before them have ended.
func (d *Dataplane) beginWindows(mem *memory, want map[uint32]window) error {
	var record map[windowKey]recallEntry
	older := len(oldPins(d.dir)) > 0
	for at, w := range want {
		if have, there := mem.placed.windows[w.key]; there {
			if older && !have.closed {
				if err := d.checkAhead(mem, have); err != nil {
					return fmt.Errorf("%s: %w", w, err)
				}
			}
			continue
		}
		slot := windowSlot{window: w, at: int(at)}
		var words []uint64
		old, err := d.oldWindow(w)
		if err == nil && old {
			slot.closed, words = true, slices.Repeat([]uint64{closedWord}, w.words())
		} else if err == nil {
			if record == nil {
				record, err = d.recalled()
			}
			words = recallWindow(record, w)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", w, err)
		}
		mem.windows.makeWindow(slot, words)
		mem.placed.windows[w.key] = slot
		d.made.windows = append(d.made.windows, w.key)
	}
	return nil
}

// checkAhead: has a window of an older version counted on after w? Then somebody went
// back to that version, and w would accept again what it has accepted.
func (d *Dataplane) checkAhead(mem *memory, w windowSlot) error {
	words, size, err := oldWords(filepath.Join(windowsDir(d.dir), w.key.pin()))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	now := newest(mem.windows.wordsOf(w), w.size)
	for lane, n := range newest(words, size) {
		if lane >= len(now) || n > now[lane] {
			return errors.New("an older version of waystamp has been back at work and has seen newer numbers: detach (waystamp agent --detach) and start again")
		}
	}
	return nil
}

// oldWindow: is there a window of its own, as versions before slabs had them? Their
// programs may still use it.
func (d *Dataplane) oldWindow(w window) (bool, error) {
	if d.dir == "" {
		return false, nil
	}
	m, err := ebpf.LoadPinnedMap(filepath.Join(windowsDir(d.dir), w.key.pin()), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer m.Close()
	size, err := oldWindowSize(m)
	if err == nil && (size != w.size || int(m.MaxEntries()) != w.words()) {
		err = fmt.Errorf("has %d lanes of %d numbers and the plan wants %d lanes of %d; give the path a new epoch (waystamp plan does)",
			int(m.MaxEntries())*4/size, size, w.lanes, w.size)
	}
	return true, err
}

// oldWindowSize is how many numbers each lane of such a window has: its name says it.
func oldWindowSize(m *ebpf.Map) (int, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	var log2 uint
	n, err := fmt.Sscanf(info.Name, "ws_window_%d", &log2)
	if n != 1 || err != nil || model.CheckWindow(1<<(log2&63)) != nil {
		return 0, fmt.Errorf("a map called %q is no replay window", info.Name)
	}
	return 1 << log2, nil
}

// adoptWindows gives the closed windows what those of an older version have seen,
// whose programs have ended. From then on they let pass what is new. A word that a
// program has written to meanwhile, which began before this was broken off, is left
// alone.
func (mem *memory) adoptWindows(instance string) error {
	for k, w := range mem.placed.windows {
		if !w.closed {
			continue
		}
		words, _, err := oldWords(filepath.Join(windowsDir(instance), k.pin()))
		if err == nil && len(words) != w.words() {
			err = errors.New("it has another shape")
		}
		if err != nil {
			return fmt.Errorf("the %s refuses all packets: what it has seen before this version cannot be read: %w; give the path a new epoch", w, err)
		}
		for i, v := range words {
			if at := mem.windows.word(w.at + i); at.Load() == closedWord {
				at.Store(v)
			}
		}
		w.closed = false
		mem.windows.word(w.head()).Store(w.mark(windowWhole))
		mem.placed.windows[k] = w
	}
	return nil
}

// oldWords reads a window of its own.
func oldWords(pin string) (words []uint64, size int, err error) {
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if size, err = oldWindowSize(m); err != nil {
		return nil, 0, err
	}
	if words, err = readWords(m); err != nil {
		return nil, 0, err
	}
	if len(words) == 0 || len(words)%(size/4) != 0 {
		return nil, 0, fmt.Errorf("%d words are no lanes of %d numbers", len(words), size)
	}
	return words, size, nil
}
