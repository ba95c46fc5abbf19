package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

// The cost of saving each second depends on the changes since the last time: a program that has
// used a number then counts the packet, for its path or as one of abi.SpentReasons. So the
// window of a path without new counts is unchanged. The tests compare those reasons with the
// reasons of all their packets.

// rereadTurns is how many savings it takes until each window has been read again,
// whether it has changed or not.
const rereadTurns = 64

// saved is the content of the windows at the last reading.
type saved struct {
	egresses map[tables.CounterKey][]uint32 // their entries of ws_stats
	began    bool                           // the fields below are valid
	packets  []uint64                       // by entry of ws_stats, before the windows were read
	refused  uint64                         // for one of abi.SpentReasons, too
	newest   map[tables.WindowKey]savedWindow
	turn     int
	record   fileID // as it was left; all of newest is in it
}

type savedWindow struct {
	tables.WindowSlot
	newest []uint64 // by lane
}

// fileID distinguishes a file from another one at the same name.
type fileID struct {
	info os.FileInfo
	size int64
	time time.Time
}

func idOf(path string) fileID {
	info, err := os.Stat(path)
	if err != nil {
		return fileID{}
	}
	return fileID{info, info.Size(), info.ModTime()}
}

func (f fileID) equal(g fileID) bool {
	return f.info != nil && g.info != nil && os.SameFile(f.info, g.info) && f.size == g.size && f.time.Equal(g.time)
}

func newSaved(hops map[abi.HopKey]abi.Hop) *saved {
	s := &saved{egresses: map[tables.CounterKey][]uint32{}}
	for k, h := range hops {
		if h.Behaviour == uint8(abi.BehaviourEndDT46) {
			key := tables.CounterKey{Path: k.Path, Epoch: k.Epoch}
			s.egresses[key] = append(s.egresses[key], h.Stats)
		}
	}
	return s
}

// follow notes which entries count for the egresses of a part.
func (s *saved) follow(p tables.Part) {
	for k := range p.Have.Egresses {
		delete(s.egresses, tables.CounterKey{Path: k.Path, Epoch: k.Epoch})
	}
	maps.Copy(s.egresses, newSaved(p.Want.Hops).egresses)
}

// SaveNews is SaveWindows, but that windows are not read which cannot have changed
// since the last time. It is to be called each second or so.
func (d *Dataplane) SaveNews() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.saved == nil || d.gen == nil || d.cfg.StateDir == "" {
		return d.saveWindowsLocked()
	}
	err := d.saveNews(d.saved)
	if err != nil {
		d.saved.began = false
	}
	return err
}

func (d *Dataplane) saveNews(s *saved) (err error) {
	if !s.began { // programs of the generation before count elsewhere
		if err := waitForPrograms(); err != nil {
			return err
		}
		s.newest = map[tables.WindowKey]savedWindow{}
	}
	// Before the windows: the next call processes what is counted later.
	packets, refused, err := d.gen.readSpent(d.cpus)
	if err != nil {
		return err
	}
	in, err := openSlabs(windowSlabs(), d.dir, d.gen)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.close()) }()
	windows, err := in.readWindows()
	if err != nil {
		return err
	}
	all := !s.began || refused != s.refused || len(packets) != len(s.packets)
	now := map[tables.WindowKey]savedWindow{}
	changed := false
	for _, w := range slices.SortedFunc(maps.Values(windows), func(a, b tables.WindowSlot) int { return cmp.Compare(a.At, b.At) }) {
		s.turn++
		was, there := s.newest[w.Key]
		if there && !all && was.WindowSlot == w && s.turn%rereadTurns != 0 && s.isQuiet(w.Key.CounterKey, packets) {
			now[w.Key] = was
			continue
		}
		x := savedWindow{w, newest(in.wordsOf(w), w.Size)}
		changed = changed || !slices.Equal(was.newest, x.newest) && slices.Max(x.newest) > 0
		now[w.Key] = x
	}
	// All of them shall be read again in so many turns, and not the same ones.
	s.turn -= len(windows) - 1
	record := openRecall(d.cfg.StateDir)
	if changed || !s.record.equal(idOf(record.path)) {
		seen := map[tables.WindowKey][]uint64{}
		for k, w := range now {
			if slices.Max(w.newest) > 0 {
				seen[k] = w.newest
			}
		}
		if len(seen) > 0 {
			if err := record.update(seen); err != nil {
				return err
			}
		}
		s.record = idOf(record.path)
	}
	s.began, s.packets, s.refused, s.newest = true, packets, refused, now
	return nil
}

// isQuiet: has an egress counted nothing since?
func (s *saved) isQuiet(k tables.CounterKey, packets []uint64) bool {
	entries, ok := s.egresses[k]
	for _, i := range entries {
		if int(i) >= len(packets) || packets[i] != s.packets[i] {
			return false
		}
	}
	return ok
}

// readSpent reads the packets that each entry of ws_stats has counted, and all those
// of abi.SpentReasons.
func (g *generation) readSpent(cpus int) (packets []uint64, refused uint64, err error) {
	m := g.maps[tables.MapStats]
	n := int(m.MaxEntries())
	keys, values := make([]uint32, n), make([]abi.Stats, n*cpus)
	var at ebpf.MapBatchCursor
	got, err := m.BatchLookup(&at, keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, 0, fmt.Errorf("read map %s: %w", tables.MapStats, err)
	}
	if got != n {
		return nil, 0, fmt.Errorf("read map %s: %d of %d entries", tables.MapStats, got, n)
	}
	packets = make([]uint64, n)
	for i, key := range keys {
		for _, s := range values[i*cpus : (i+1)*cpus] {
			packets[key] += s.Packets
		}
	}
	for _, r := range abi.SpentReasons {
		var each []abi.Refusal
		if err := g.maps[tables.MapRefusals].Lookup(uint32(r), &each); err != nil {
			return nil, 0, fmt.Errorf("read map %s: %w", tables.MapRefusals, err)
		}
		for _, c := range each {
			refused += c.Dropped
		}
	}
	return packets, refused, nil
}
