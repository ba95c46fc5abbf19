package dataplane

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/bits"
	"path/filepath"
	"slices"

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

// secretsOf tells the secrets of one epoch from those of another. It is the beginning of
// a hash, in slabs and on the disk, and says nothing of them.
func secretsOf(e *abi.Egress) uint64 {
	h := sha256.New()
	fmt.Fprint(h, "waystamp replay window", e.Keys, e.Secret, e.Key)
	return binary.BigEndian.Uint64(h.Sum(nil))
}

func (k counterKey) String() string {
	return fmt.Sprintf("path %s, epoch %d", pathText(abi.BE32(k.path)), k.epoch)
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
	at int // its first word that counts
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
	windowStates = 0xff << 40

	windowLog2Shift = 32 // below: the lanes
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
			out[w.key] = w
		}
	}
	return out, nil
}

func (s *slabs) windowAt(at int, mark uint64) (w windowSlot, state uint64, ok bool) {
	log2 := mark >> windowLog2Shift & 0xff
	w.lanes, w.size, w.at = int(uint32(mark)), 1<<(log2&31), at+abi.WindowHead
	state = mark & windowStates
	if mark != w.mark(state) || state == 0 || state > windowWhole || w.lanes < 1 || w.lanes > model.LanesMax || model.CheckWindow(w.size) != nil || w.end() > s.end() {
		return w, 0, false
	}
	for i := at; i < w.end(); i = (i/s.words + 1) * s.words {
		if s.word(i) == nil {
			return w, 0, false
		}
	}
	of := s.word(at + 1).Load()
	w.key = windowKey{counterKey{abi.BE32(uint32(of >> 8)), uint8(of)}, s.word(at + 2).Load()}
	return w, state, true
}

// makeWindow makes one where nothing is. words: what it counts at first, all of it
// or none.
func (s *slabs) makeWindow(w windowSlot, words []uint64) {
	at := w.head()
	s.word(at).Store(w.mark(windowHalf))
	s.word(at + 1).Store(uint64(abi.BE32(w.key.path))<<8 | uint64(w.key.epoch))
	s.word(at + 2).Store(w.key.secrets)
	s.putWords(w, words)
	s.word(at).Store(w.mark(windowWhole))
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
	for at, w := range want {
		if _, there := mem.placed.windows[w.key]; there {
			continue
		}
		if record == nil {
			var err error
			if record, err = d.recalled(); err != nil {
				return fmt.Errorf("%s: %w", w, err)
			}
		}
		slot := windowSlot{window: w, at: int(at)}
		mem.windows.makeWindow(slot, recallWindow(record, w))
		mem.placed.windows[w.key] = slot
		d.made.windows = append(d.made.windows, w.key)
	}
	return nil
}
