package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

const (
	// A headend gets numbers in advance, which must last for as long as an agent may be away. A
	// reboot discards them.
	numbersLeast = 1 << 30
	numbersMost  = 1 << 36
	// numbersFor is how long they last, in seconds, at the highest pace so far.
	numbersFor = 3600
	// numbersPart: a reboot costs at most this part of the remaining numbers, so that reboots
	// never end an epoch; numbersFloor is the lower limit.
	numbersPart  = 1024
	numbersFloor = 1 << 20
)

// ahead is the count of numbers in advance for a headend whose last number is last. pace is in
// numbers per second.
func ahead(last, pace uint64) uint64 {
	left := abi.RNDCounterMax - min(last, abi.RNDCounterMax)
	n := min(max(min(pace, numbersMost)*numbersFor, numbersLeast), numbersMost)
	return min(n, max(left/numbersPart, numbersFloor), left)
}

// span are the numbers start+1 to ceiling. None: start is not below ceiling.
type span struct{ start, ceiling uint64 }

// ration has a headend's present numbers, and the count that it gets.
type ration struct {
	span        // zero: it has none yet
	pace uint64 // numbers a second
	more bool   // otherwise its present numbers suffice
}

// NumbersError means that the record of used numbers cannot be read or written. Without it
// numbers could be used twice.
type NumbersError struct {
	Path string
	Err  error
}

func (e *NumbersError) Error() string {
	return fmt.Sprintf("the record of used packet numbers %s: %s", e.Path, recordTrouble(e.Err, "no number is given out without it"))
}

// Unwrap gives the cause.
func (e *NumbersError) Unwrap() error { return e.Err }

// numbers is the record on disk of how far each path and epoch has counted. It
// is written, and on the disk, before a number is used.
type numbers struct {
	dir string
	record[numbersEntry]
}

func openNumbers(stateDir string) *numbers {
	return &numbers{stateDir, record[numbersEntry]{filepath.Join(stateDir, "counters.json"), "packet numbers", 1}}
}

type numbersEntry struct {
	Path    string `json:"path"` // 0x and eight digits
	Epoch   uint8  `json:"epoch"`
	Ceiling uint64 `json:"ceiling"` // no number up to here is free
}

// reserve gives unused numbers to headends that have none, and a higher ceiling to those that
// need more. It returns the numbers that they may then use. On disk no ceiling is below one that
// is in use.
func (s *numbers) reserve(needs map[tables.CounterKey]ration) (map[tables.CounterKey]span, error) {
	out := map[tables.CounterKey]span{}
	err := s.update(func(ceilings map[tables.CounterKey]uint64) {
		for k, n := range needs {
			got := n.span
			switch {
			case n.ceiling == 0:
				got.start = ceilings[k]
				got.ceiling = got.start + ahead(got.start, n.pace)
			case n.more:
				got.ceiling = max(n.ceiling, n.start+ahead(n.start, n.pace))
			}
			ceilings[k] = max(ceilings[k], got.ceiling)
			out[k] = got
		}
	})
	return out, err
}

// giveBack records where keys have stopped in the spans that were last reserved
// for them. Of other spans numbers beyond may be in use.
func (s *numbers) giveBack(used map[tables.CounterKey]span) error {
	return s.update(func(ceilings map[tables.CounterKey]uint64) {
		for k, u := range used {
			if c, ok := ceilings[k]; ok && u.ceiling == c && u.start < c {
				ceilings[k] = u.start
			}
		}
	})
}

func (s *numbers) update(change func(map[tables.CounterKey]uint64)) error {
	if s.dir == "" {
		return &NumbersError{"(none)", errors.New("no state directory is named")}
	}
	err := s.record.update(func(entries []numbersEntry) ([]numbersEntry, bool, error) {
		ceilings, err := numbersMap(entries)
		if err != nil {
			return nil, false, err
		}
		before := maps.Clone(ceilings)
		change(ceilings)
		return numbersEntries(ceilings), !maps.Equal(before, ceilings), nil
	})
	if err != nil {
		return &NumbersError{s.path, err}
	}
	return nil
}

// read returns the record on disk.
func (s *numbers) read() (map[tables.CounterKey]uint64, error) {
	entries, err := s.record.read()
	if err != nil {
		return nil, err
	}
	return numbersMap(entries)
}

func numbersMap(entries []numbersEntry) (map[tables.CounterKey]uint64, error) {
	ceilings := map[tables.CounterKey]uint64{}
	for _, e := range entries {
		path, err := parsePath(e.Path)
		if err != nil {
			return nil, err
		}
		k := tables.CounterKey{Path: abi.BE32(path), Epoch: e.Epoch}
		if _, twice := ceilings[k]; twice {
			return nil, fmt.Errorf("is damaged: path %s, epoch %d is there twice", e.Path, e.Epoch)
		}
		if e.Ceiling > abi.RNDCounterMax {
			return nil, fmt.Errorf("is damaged: ceiling %d of path %s is above %d", e.Ceiling, e.Path, uint64(abi.RNDCounterMax))
		}
		ceilings[k] = e.Ceiling
	}
	return ceilings, nil
}

func numbersEntries(ceilings map[tables.CounterKey]uint64) (out []numbersEntry) {
	for _, k := range slices.SortedFunc(maps.Keys(ceilings), func(a, b tables.CounterKey) int {
		return cmp.Or(cmp.Compare(abi.BE32(a.Path), abi.BE32(b.Path)), cmp.Compare(a.Epoch, b.Epoch))
	}) {
		out = append(out, numbersEntry{pathText(abi.BE32(k.Path)), k.Epoch, ceilings[k]})
	}
	return out
}
