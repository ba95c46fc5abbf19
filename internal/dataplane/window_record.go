package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

// Layout of a word of a replay window (bpf/lib/proof/replay.h).
const (
	usesBits = 6
	allUses  = 1<<usesBits - 1
	tagShift = 4 * usesBits
)

// WindowsError means that the record of used numbers at egresses cannot be read or written.
// Without it packets could be accepted twice.
type WindowsError struct {
	Path string
	Err  error
}

func (e *WindowsError) Error() string {
	return fmt.Sprintf("the record of the replay windows %s: %s", e.Path, recordTrouble(e.Err, "no new window begins without it"))
}

// Unwrap gives the cause.
func (e *WindowsError) Unwrap() error { return e.Err }

// newest are the highest numbers that a window has accepted, by lane; 0: none. words are the
// words of its map.
func newest(words []uint64, size int) []uint64 {
	each := size / 4
	out := make([]uint64, len(words)/each)
	for i, word := range words {
		for slot := 3; slot >= 0; slot-- {
			if word>>(usesBits*slot)&allUses == 0 {
				continue
			}
			four := word>>tagShift*uint64(each) + uint64(i%each)
			out[i/each] = max(out[i/each], 4*four+uint64(slot))
			break
		}
	}
	return out
}

// begin are the words of a window that refuses all numbers up to those, as if
// each had been used up, and takes any above.
func begin(newest []uint64, size int) []uint64 {
	each := uint64(size / 4)
	words := make([]uint64, uint64(len(newest))*each)
	for lane, n := range newest {
		if n == 0 {
			continue
		}
		last := n / 4
		for i := range each {
			back := (last%each + each - i) % each // to the last four of this word
			if back > last {
				continue
			}
			uses := uint64(1)<<tagShift - 1
			if back == 0 {
				uses = 1<<(usesBits*(n%4+1)) - 1
			}
			words[uint64(lane)*each+i] = (last-back)/each<<tagShift | uses
		}
	}
	return words
}

// seenNumbers are the newest numbers that windows have accepted, by lane.
func seenNumbers(windows map[tables.WindowKey]tables.WindowSlot, in *slabs) map[tables.WindowKey][]uint64 {
	out := map[tables.WindowKey][]uint64{}
	for k, w := range windows {
		if n := newest(in.wordsOf(w), w.Size); slices.Max(n) > 0 {
			out[k] = n
		}
	}
	return out
}

// SaveWindows writes to the disk up to where the replay windows have seen
// numbers, so that a restarted machine begins them there.
func (d *Dataplane) SaveWindows() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.saveWindowsLocked()
}

func (d *Dataplane) saveWindowsLocked() error { return saveWindows(d.cfg.StateDir, d.dir, d.gen) }

// saveWindows does so for all windows that are pinned.
func saveWindows(stateDir, dir string, from ...*generation) (err error) {
	if stateDir == "" || dir == "" {
		return nil
	}
	in, err := openSlabs(windowSlabs(), dir, from...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.close()) }()
	windows, err := in.readWindows()
	if err != nil {
		return err
	}
	now := seenNumbers(windows, in)
	if len(now) == 0 {
		return nil
	}
	return openRecall(stateDir).update(now)
}

// recalled reads the record on disk.
func (d *Dataplane) recalled() (map[tables.WindowKey]recallEntry, error) {
	if d.cfg.StateDir == "" {
		return map[tables.WindowKey]recallEntry{}, nil
	}
	r := openRecall(d.cfg.StateDir)
	of := idOf(r.path) // before: a later file has another
	if d.recall.entries != nil && d.recall.of.equal(of) {
		return d.recall.entries, nil
	}
	entries, err := r.read()
	if err != nil {
		return nil, err
	}
	d.recall = recallCache{of, entries}
	return entries, nil
}

// recallWindow is the initial content of a new window; nil: zeroes.
func recallWindow(record map[tables.WindowKey]recallEntry, w tables.Window) []uint64 {
	n := record[w.Key].Newest
	if len(n) == 0 {
		return nil
	}
	// Entries of lanes that no longer exist do no harm.
	lanes := make([]uint64, w.Lanes)
	copy(lanes, n)
	return begin(lanes, w.Size)
}

// recall is the record on disk of accepted numbers. It keeps the entries of removed paths: they
// may come back.
type recall struct{ record[recallEntry] }

func openRecall(stateDir string) recall {
	return recall{record[recallEntry]{filepath.Join(stateDir, "windows.json"), "replay windows", 1}}
}

type recallEntry struct {
	Path    string   `json:"path"` // 0x and eight digits
	Epoch   uint8    `json:"epoch"`
	Secrets string   `json:"secrets"` // digest, 16 digits
	Saved   int64    `json:"saved"`   // when it changed last, Unix time in seconds
	Newest  []uint64 `json:"newest"`  // by lane; below 2^42
}

func (e recallEntry) key() (k tables.WindowKey, err error) {
	path, err := parsePath(e.Path)
	if err != nil {
		return k, err
	}
	k.CounterKey = tables.CounterKey{Path: abi.BE32(path), Epoch: e.Epoch}
	n, err := fmt.Sscanf(e.Secrets, "%016x", &k.Secrets)
	if n != 1 || err != nil || e.Secrets != secretsText(k.Secrets) {
		return k, fmt.Errorf("is damaged: %q is not a digest of secrets", e.Secrets)
	}
	return k, nil
}

func secretsText(v uint64) string { return fmt.Sprintf("%016x", v) }

// recallOld bounds the entries of a path with other secrets: they are for operators who put an
// old plan back, and each rotation adds one.
const recallOld = 16

func (r recall) update(now map[tables.WindowKey][]uint64) error {
	return r.updateBeside(now, func(tables.WindowKey) bool { return false })
}

// updateBeside is update with only some of the windows that there are; live tells which are.
func (r recall) updateBeside(now map[tables.WindowKey][]uint64, live func(tables.WindowKey) bool) error {
	err := r.record.update(func(entries []recallEntry) ([]recallEntry, bool, error) {
		all, err := recallMap(entries)
		if err != nil {
			return nil, false, err
		}
		changed := false
		for k, n := range now {
			if !slices.Equal(all[k].Newest, n) {
				all[k], changed = recallEntry{Saved: time.Now().Unix(), Newest: n}, true
			}
		}
		forgetOld(all, func(k tables.WindowKey) bool { return len(now[k]) > 0 || live(k) })
		return recallEntries(all), changed, nil
	})
	if err != nil {
		return &WindowsError{r.path, err}
	}
	return nil
}

// forgetOld keeps for each path the entry in use, and the newest few others.
func forgetOld(all map[tables.WindowKey]recallEntry, live func(tables.WindowKey) bool) {
	old := map[uint32][]tables.WindowKey{}
	for k := range all {
		if !live(k) {
			old[k.Path] = append(old[k.Path], k)
		}
	}
	for _, keys := range old {
		slices.SortFunc(keys, func(a, b tables.WindowKey) int {
			return cmp.Or(cmp.Compare(all[b].Saved, all[a].Saved), cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Secrets, b.Secrets))
		})
		for _, k := range keys[min(len(keys), recallOld):] {
			delete(all, k)
		}
	}
}

// recallCache is a record as it was read, or the one after that.
type recallCache struct {
	of      fileID
	entries map[tables.WindowKey]recallEntry
}

// read returns the record on disk.
func (r recall) read() (map[tables.WindowKey]recallEntry, error) {
	entries, err := r.record.read()
	if err != nil {
		return nil, &WindowsError{r.path, err}
	}
	all, err := recallMap(entries)
	if err != nil {
		return nil, &WindowsError{r.path, err}
	}
	return all, nil
}

func recallMap(entries []recallEntry) (map[tables.WindowKey]recallEntry, error) {
	all := map[tables.WindowKey]recallEntry{}
	for _, e := range entries {
		k, err := e.key()
		if err != nil {
			return nil, err
		}
		if _, twice := all[k]; twice {
			return nil, fmt.Errorf("is damaged: path %s, epoch %d is there twice with the same secrets", e.Path, e.Epoch)
		}
		if len(e.Newest) == 0 || len(e.Newest) > abi.RNDLanes || slices.Max(e.Newest) > abi.RNDCounterMax {
			return nil, fmt.Errorf("is damaged: path %s, epoch %d has no numbers that can be", e.Path, e.Epoch)
		}
		all[k] = e
	}
	return all, nil
}

func recallEntries(all map[tables.WindowKey]recallEntry) (out []recallEntry) {
	for _, k := range slices.SortedFunc(maps.Keys(all), func(a, b tables.WindowKey) int {
		return cmp.Or(cmp.Compare(abi.BE32(a.Path), abi.BE32(b.Path)), cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Secrets, b.Secrets))
	}) {
		e := all[k]
		e.Path, e.Epoch, e.Secrets = pathText(abi.BE32(k.Path)), k.Epoch, secretsText(k.Secrets)
		out = append(out, e)
	}
	return out
}
