package dataplane

import (
	"fmt"
	"math/bits"
	"path/filepath"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/tables"
)

// windowsName is the directory of the pins of all slabs of windows, of all generations.
const windowsName = "windows"

func windowsDir(dir string) string { return filepath.Join(dir, windowsName) }

// The head of a window: a mark in its first word, which is written last; then path and epoch;
// then the secrets. The rest is zero. Windows, and the free space between them, begin at
// multiples of the head's length. Free space is zero.
const (
	windowMagic = 0x5753 << 48

	// The state, in bits 47 to 40.
	windowHalf   = 1 << 40 // being made or removed: no entry names it
	windowWhole  = 2 << 40
	windowStates = 0xff << 40

	windowLog2Shift = 32 // below: the lanes
)

// windowMark is the first word of the head.
func windowMark(w tables.Window, state uint64) uint64 {
	return windowMagic | state | uint64(bits.TrailingZeros(uint(w.Size)))<<windowLog2Shift | uint64(w.Lanes)
}

// readWindows finds all windows, and makes those zero that were never finished.
func (s *slabs) readWindows() (map[tables.WindowKey]tables.WindowSlot, error) {
	out := map[tables.WindowKey]tables.WindowSlot{}
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
		at = w.End()
		switch _, twice := out[w.Key]; {
		case state == windowHalf:
			s.freeWindow(w)
		case twice:
			return nil, fmt.Errorf("the memory of the replay windows is damaged: the %s is there twice; detach (waystamp agent --detach) and start again", w)
		default:
			out[w.Key] = w
		}
	}
	return out, nil
}

func (s *slabs) windowAt(at int, mark uint64) (w tables.WindowSlot, state uint64, ok bool) {
	log2 := mark >> windowLog2Shift & 0xff
	w.Lanes, w.Size, w.At = int(uint32(mark)), 1<<(log2&31), at+abi.WindowHead
	state = mark & windowStates
	if mark != windowMark(w.Window, state) || state == 0 || state > windowWhole || w.Lanes < 1 || w.Lanes > model.LanesMax || model.CheckWindow(w.Size) != nil || w.End() > s.end() {
		return w, 0, false
	}
	for i := at; i < w.End(); i = (i/s.words + 1) * s.words {
		if s.word(i) == nil {
			return w, 0, false
		}
	}
	of := s.word(at + 1).Load()
	w.Key = tables.WindowKey{CounterKey: tables.CounterKey{Path: abi.BE32(uint32(of >> 8)), Epoch: uint8(of)}, Secrets: s.word(at + 2).Load()}
	return w, state, true
}

// makeWindow makes a window in free space. words: its initial content, complete or empty.
func (s *slabs) makeWindow(w tables.WindowSlot, words []uint64) {
	at := w.Head()
	s.word(at).Store(windowMark(w.Window, windowHalf))
	s.word(at + 1).Store(uint64(abi.BE32(w.Key.Path))<<8 | uint64(w.Key.Epoch))
	s.word(at + 2).Store(w.Key.Secrets)
	s.putWords(w, words)
	s.word(at).Store(windowMark(w.Window, windowWhole))
}

// freeWindow ends a window that no program can meet any more.
func (s *slabs) freeWindow(w tables.WindowSlot) {
	s.word(w.Head()).Store(windowMark(w.Window, windowHalf))
	s.clear(w.Head()+1, w.End())
	s.word(w.Head()).Store(0)
}

func (s *slabs) putWords(w tables.WindowSlot, words []uint64) {
	for i, v := range words {
		s.word(w.At + i).Store(v)
	}
}

func (s *slabs) wordsOf(w tables.WindowSlot) []uint64 {
	out := make([]uint64, w.Words())
	for i := range out {
		out[i] = s.word(w.At + i).Load()
	}
	return out
}

// beginWindows makes the missing windows, when the disk has the last numbers of their
// predecessors.
func (d *Dataplane) beginWindows(mem *memory, want map[uint32]tables.Window) error {
	var record map[tables.WindowKey]recallEntry
	for at, w := range want {
		if _, there := mem.Placed.Windows[w.Key]; there {
			continue
		}
		if record == nil {
			var err error
			if record, err = d.recalled(); err != nil {
				return fmt.Errorf("%s: %w", w, err)
			}
		}
		slot := tables.WindowSlot{Window: w, At: int(at)}
		mem.windows.makeWindow(slot, recallWindow(record, w))
		mem.Placed.Windows[w.Key] = slot
		d.made.windows = append(d.made.windows, w.Key)
	}
	return nil
}
