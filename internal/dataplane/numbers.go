package dataplane

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
)

const (
	// A headend is given numbers ahead, which must last for as long as an agent may
	// be away. A reboot throws them away.
	numbersLeast = 1 << 30
	numbersMost  = 1 << 36
	// numbersFor is how long they last, in seconds, at the highest pace so far.
	numbersFor = 3600
	// numbersPart: a reboot costs no more than this part of what is left, so that
	// an epoch never ends by reboots; numbersFloor ends that.
	numbersPart  = 1024
	numbersFloor = 1 << 20
)

// ahead is how many numbers a headend that has given out the number last is
// given. pace is in numbers a second.
func ahead(last, pace uint64) uint64 {
	left := abi.RNDCounterMax - min(last, abi.RNDCounterMax)
	n := min(max(min(pace, numbersMost)*numbersFor, numbersLeast), numbersMost)
	return min(n, max(left/numbersPart, numbersFloor), left)
}

// span are the numbers start+1 to ceiling. None: start is not below ceiling.
type span struct{ start, ceiling uint64 }

// ration is a headend's numbers as they are, and how many it is to be given.
type ration struct {
	span        // zero: it has none yet
	pace uint64 // numbers a second
	more bool   // else what it has will do
}

// NumbersError means that the record of the numbers that headends have given
// out cannot be read or written. Without it numbers could be given out twice.
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
	dir  string
	path string
}

func openNumbers(stateDir string) *numbers {
	return &numbers{dir: stateDir, path: filepath.Join(stateDir, "counters.json")}
}

type numbersFile struct {
	Version  int            `json:"version"`
	Counters []numbersEntry `json:"counters"`
}

type numbersEntry struct {
	Path    string `json:"path"` // 0x and eight digits
	Epoch   uint8  `json:"epoch"`
	Ceiling uint64 `json:"ceiling"` // no number up to here is free
}

// reserve gives headends that have no numbers some that nobody has had, and
// those that want more a higher ceiling. It returns what they may use then. On
// disk no ceiling is below one that is in use.
func (s *numbers) reserve(needs map[counterKey]ration) (map[counterKey]span, error) {
	out := map[counterKey]span{}
	err := s.update(func(ceilings map[counterKey]uint64) {
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
func (s *numbers) giveBack(used map[counterKey]span) error {
	return s.update(func(ceilings map[counterKey]uint64) {
		for k, u := range used {
			if c, ok := ceilings[k]; ok && u.ceiling == c && u.start < c {
				ceilings[k] = u.start
			}
		}
	})
}

func (s *numbers) update(change func(map[counterKey]uint64)) error {
	if s.dir == "" {
		return &NumbersError{"(none)", errors.New("no state directory is named")}
	}
	if err := s.updateLocked(change); err != nil {
		return &NumbersError{s.path, err}
	}
	return nil
}

func (s *numbers) updateLocked(change func(map[counterKey]uint64)) error {
	dir, err := lockDir(s.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	ceilings, err := s.read()
	if err != nil {
		return err
	}
	before := maps.Clone(ceilings)
	change(ceilings)
	if maps.Equal(before, ceilings) {
		return nil
	}
	return s.write(dir, ceilings)
}

func (s *numbers) read() (map[counterKey]uint64, error) {
	ceilings := map[counterKey]uint64{}
	b, err := os.ReadFile(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return ceilings, nil
	}
	if err != nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var f numbersFile
	if err := dec.Decode(&f); err != nil {
		return nil, fmt.Errorf("is damaged: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("is damaged: something follows its end")
	}
	if f.Version != 1 {
		return nil, fmt.Errorf("has version %d; expect 1", f.Version)
	}
	for _, e := range f.Counters {
		path, err := parsePath(e.Path)
		if err != nil {
			return nil, err
		}
		k := counterKey{be32(path), e.Epoch}
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

func pathText(path uint32) string { return fmt.Sprintf("0x%08x", path) }

// write puts the record in the place of the one before, in one step.
func (s *numbers) write(dir *os.File, ceilings map[counterKey]uint64) error {
	f := numbersFile{Version: 1, Counters: []numbersEntry{}}
	for _, k := range slices.SortedFunc(maps.Keys(ceilings), func(a, b counterKey) int {
		return cmp.Or(cmp.Compare(fromBE32(a.path), fromBE32(b.path)), cmp.Compare(a.epoch, b.epoch))
	}) {
		f.Counters = append(f.Counters, numbersEntry{pathText(fromBE32(k.path)), k.epoch, ceilings[k]})
	}
	b, err := json.MarshalIndent(f, "", "\t")
	if err != nil {
		return err
	}
	return replaceSynced(dir, s.path, append(b, '\n'))
}
