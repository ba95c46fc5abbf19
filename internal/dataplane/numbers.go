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
	// numberStep is how many numbers a headend is given at a time, on each CPU.
	// It must last for as long as an agent may be away, and the lower 42 bits of
	// RND hold 64 of them.
	numberStep = 1 << 36
	// numberReserve is what is left of them when it gets the next ones.
	numberReserve = 1 << 35
)

// span are the numbers start+1 to ceiling. None: start is not below ceiling.
type span struct{ start, ceiling uint64 }

func (s span) counter() counter { return counter{Last: s.start, Ceiling: s.ceiling} }

// noNumbers makes a headend refuse everything.
var noNumbers = span{abi.RNDCounterMax, 0}

// NumbersError means that the record of the numbers that headends have given
// out cannot be read or written. Without it numbers could be given out twice.
type NumbersError struct {
	Path string
	Err  error
}

func (e *NumbersError) Error() string {
	return fmt.Sprintf("the record of used packet numbers %s: %v; no number is given out without it: restore the file, or remove it after giving the chains new secrets", e.Path, e.Err)
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

// reserve gives each key numbers that nobody has had, above those on disk and
// above floor's. A key that has come to the end of the lower 42 bits gets none.
func (s *numbers) reserve(keys []counterKey, floor map[counterKey]uint64) (map[counterKey]span, error) {
	out := map[counterKey]span{}
	err := s.update(func(ceilings map[counterKey]uint64) {
		for _, k := range keys {
			start := max(ceilings[k], floor[k])
			end := min(start+numberStep, abi.RNDCounterMax)
			out[k] = span{start, end}
			ceilings[k] = end
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
