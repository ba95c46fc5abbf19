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
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
)

// Layout of a word of a replay window (bpf/lib/proof/replay.h).
const (
	usesBits = 6
	allUses  = 1<<usesBits - 1
	tagShift = 4 * usesBits
)

// WindowsError means that the record of what egresses have seen cannot be read
// or written. Without it packets could be accepted twice.
type WindowsError struct {
	Path string
	Err  error
}

func (e *WindowsError) Error() string {
	return fmt.Sprintf("the record of the replay windows %s: %s", e.Path, recordTrouble(e.Err, "no new window begins without it"))
}

// Unwrap gives the cause.
func (e *WindowsError) Unwrap() error { return e.Err }

// recordTrouble says what is wrong with a record, what follows, and what to do. What
// the system says is told without the name of a temporary file: the same trouble
// makes the same words.
func recordTrouble(err error, so string) string {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return fmt.Sprintf("%v; %s: see to it that it can be read, and its directory be written to, with room for it", errno, so)
	}
	return fmt.Sprintf("%v; %s: restore the file, or remove it after giving the chains new secrets", err, so)
}

// newest are the highest numbers that a window has accepted, by lane; 0: none.
// words are those of its map.
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

func readWords(m *ebpf.Map) ([]uint64, error) {
	n := int(m.MaxEntries())
	keys, words := make([]uint32, n), make([]uint64, n)
	var at ebpf.MapBatchCursor
	got, err := m.BatchLookup(&at, keys, words, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, err
	}
	if got != n || keys[n-1] != uint32(n-1) {
		return nil, fmt.Errorf("%d of %d words were read", got, n)
	}
	return words, nil
}

// seenNumbers are what the windows of an instance have accepted: the newest numbers,
// by lane. mem: its slabs.
func seenNumbers(dir string, windows map[windowKey]windowSlot, in *slabs) (map[windowKey][]uint64, error) {
	out := map[windowKey][]uint64{}
	add := func(k windowKey, words []uint64, size int) {
		n := newest(words, size)
		for lane, other := range out[k] { // what an older version's window has seen
			if lane < len(n) {
				n[lane] = max(n[lane], other)
			}
		}
		if slices.Max(n) > 0 {
			out[k] = n
		}
	}
	// Those of versions before slabs, which have a map each, and those that such a
	// version's programs have written to until a moment ago.
	entries, err := os.ReadDir(windowsDir(dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the pinned replay windows: %w", err)
	}
	for _, e := range entries {
		k, ok := parseWindowPin(e.Name())
		if !ok {
			continue // a slab, or not ours: then it goes with the directory
		}
		words, size, err := oldWords(filepath.Join(windowsDir(dir), e.Name()))
		if err != nil {
			return nil, fmt.Errorf("read the pinned replay window %s: %w", e.Name(), err)
		}
		add(k, words, size)
	}
	for k, w := range windows {
		if !w.closed {
			add(k, in.wordsOf(w), w.size)
		}
	}
	return out, nil
}

// SaveWindows writes to the disk up to where the replay windows have seen
// numbers, so that a restarted machine begins them there.
func (d *Dataplane) SaveWindows() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.saveWindowsLocked()
}

func (d *Dataplane) saveWindowsLocked() error { return saveWindows(d.cfg.StateDir, d.dir, d.gen) }

// saveWindows does so for all windows that are pinned, of whichever version of
// the programs.
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
	now, err := seenNumbers(dir, windows, in)
	if err != nil || len(now) == 0 {
		return err
	}
	return openRecall(stateDir).update(now)
}

// recalled reads the record on disk.
func (d *Dataplane) recalled() (map[windowKey]recallEntry, error) {
	if d.cfg.StateDir == "" {
		return map[windowKey]recallEntry{}, nil
	}
	return openRecall(d.cfg.StateDir).read()
}

// recallWindow is what a new window begins with; nil: zeroes.
func recallWindow(record map[windowKey]recallEntry, w window) []uint64 {
	n := record[w.key].Newest
	if len(n) == 0 {
		return nil
	}
	// What it says of lanes that there are no more does no harm.
	lanes := make([]uint64, w.lanes)
	copy(lanes, n)
	return begin(lanes, w.size)
}

// recall is the record on disk of what replay windows have seen. What it says of
// paths that the node has no more it keeps: they may come back.
type recall struct {
	dir  string
	path string
}

func openRecall(stateDir string) recall {
	return recall{stateDir, filepath.Join(stateDir, "windows.json")}
}

type recallFile struct {
	Version int           `json:"version"`
	Windows []recallEntry `json:"windows"`
}

type recallEntry struct {
	Path    string   `json:"path"` // 0x and eight digits
	Epoch   uint8    `json:"epoch"`
	Secrets string   `json:"secrets"` // digest, 16 digits
	Saved   int64    `json:"saved"`   // when it changed last, Unix time in seconds
	Newest  []uint64 `json:"newest"`  // by lane; below 2^42
}

func (e recallEntry) key() (k windowKey, err error) {
	path, err := parsePath(e.Path)
	if err != nil {
		return k, err
	}
	k.counterKey = counterKey{be32(path), e.Epoch}
	n, err := fmt.Sscanf(e.Secrets, "%016x", &k.secrets)
	if n != 1 || err != nil || e.Secrets != secretsText(k.secrets) {
		return k, fmt.Errorf("is damaged: %q is not a digest of secrets", e.Secrets)
	}
	return k, nil
}

func secretsText(v uint64) string { return fmt.Sprintf("%016x", v) }

// recallVersion is that of the file. Version 1 did not say of which secrets a
// record was.
const recallVersion = 2

// recallOld bounds what is kept of a path that has other secrets by now: it is for
// those who put an old plan back, and grows with each rotation.
const recallOld = 16

func (r recall) update(now map[windowKey][]uint64) error {
	if err := r.updateLocked(now); err != nil {
		return &WindowsError{r.path, err}
	}
	return nil
}

func (r recall) updateLocked(now map[windowKey][]uint64) error {
	dir, err := lockDir(r.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	all, err := r.readLocked()
	if err != nil {
		return err
	}
	changed := false
	for k, n := range now {
		if !slices.Equal(all[k].Newest, n) {
			all[k], changed = recallEntry{Saved: time.Now().Unix(), Newest: n}, true
		}
	}
	if !changed {
		return nil
	}
	forgetOld(all, now)
	return r.write(dir, all)
}

// forgetOld leaves of each path what is at work, and the newest few of the rest.
func forgetOld(all map[windowKey]recallEntry, now map[windowKey][]uint64) {
	old := map[uint32][]windowKey{}
	for k := range all {
		if _, live := now[k]; !live {
			old[k.path] = append(old[k.path], k)
		}
	}
	for _, keys := range old {
		slices.SortFunc(keys, func(a, b windowKey) int {
			return cmp.Or(cmp.Compare(all[b].Saved, all[a].Saved), cmp.Compare(a.epoch, b.epoch), cmp.Compare(a.secrets, b.secrets))
		})
		for _, k := range keys[min(len(keys), recallOld):] {
			delete(all, k)
		}
	}
}

// read gives what is on the disk.
func (r recall) read() (map[windowKey]recallEntry, error) {
	all, err := r.readLocked()
	if err != nil {
		return nil, &WindowsError{r.path, err}
	}
	return all, nil
}

// readLocked may also be called without the lock: the file is replaced whole.
func (r recall) readLocked() (map[windowKey]recallEntry, error) {
	all := map[windowKey]recallEntry{}
	b, err := os.ReadFile(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var f recallFile
	if err := dec.Decode(&f); err != nil {
		return nil, fmt.Errorf("is damaged: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("is damaged: something follows its end")
	}
	if f.Version != recallVersion {
		return nil, fmt.Errorf("has version %d; expect %d", f.Version, recallVersion)
	}
	for _, e := range f.Windows {
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

func (r recall) write(dir *os.File, all map[windowKey]recallEntry) error {
	f := recallFile{Version: recallVersion, Windows: []recallEntry{}}
	for _, k := range slices.SortedFunc(maps.Keys(all), func(a, b windowKey) int {
		return cmp.Or(cmp.Compare(fromBE32(a.path), fromBE32(b.path)), cmp.Compare(a.epoch, b.epoch), cmp.Compare(a.secrets, b.secrets))
	}) {
		e := all[k]
		e.Path, e.Epoch, e.Secrets = pathText(fromBE32(k.path)), k.epoch, secretsText(k.secrets)
		f.Windows = append(f.Windows, e)
	}
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return replaceSynced(dir, r.path, append(b, '\n'))
}

// parsePath reads what pathText wrote.
func parsePath(s string) (uint32, error) {
	var path uint32
	if n, err := fmt.Sscanf(s, "0x%08x", &path); n != 1 || err != nil || s != pathText(path) {
		return 0, fmt.Errorf("is damaged: %q is not a path", s)
	}
	return path, nil
}

// lockDir makes and locks a state directory for as long as the file stays open.
func lockDir(path string) (*os.File, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), dir.Close())
	}
	return dir, nil
}

// replaceSynced puts a file of dir in the place of the one before, in one step,
// and on the disk.
func replaceSynced(dir *os.File, path string, b []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // not there any more if all went well
	_, err = tmp.Write(b)
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return err
	}
	return dir.Sync()
}
