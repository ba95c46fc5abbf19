package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
)

// numbersName is the directory of the pins of all headends' numbers, of
// whichever generation. Programs count on in them while links are moved from one
// generation to the next, and after a restart of the agent.
const numbersName = "numbers"

func numbersDir(dir string) string { return filepath.Join(dir, numbersName) }

// pace is how fast a headend has been seen to give out numbers.
type pace struct {
	last uint64
	at   time.Time
	most uint64 // a second, on one CPU
}

func (k counterKey) sharedNumbers() shared {
	return shared{
		what: "packet numbers", key: k, name: k.pin(), outer: tableNumbers, dir: numbersName,
		spec: &ebpf.MapSpec{
			Name: "ws_number_map", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 8,
			MaxEntries: abi.NumberEntries,
		},
		misfit: func(*ebpf.Map) error {
			return errors.New("is a map of another shape, which no waystamp makes: detach (waystamp agent --detach) and start again")
		},
		place: func(g *generation) (uint32, bool, error) {
			var i uint32
			err := g.maps[tablePaths].Lookup(k.path, &i)
			var h headend
			if err == nil {
				err = g.maps[tableHeadends].Lookup(i, &h)
			}
			if errors.Is(err, ebpf.ErrKeyNotExist) {
				return 0, false, nil
			}
			if err != nil {
				return 0, false, fmt.Errorf("read maps %s and %s: %w", tablePaths, tableHeadends, err)
			}
			return h.Counter, h.Path == k.path && h.Epoch == k.epoch, nil
		},
		begin: func(*ebpf.Map) error { return nil }, // without numbers
	}
}

func (d *Dataplane) sharedNumbers(want map[uint32]counterKey) map[uint32]shared {
	out := make(map[uint32]shared, len(want))
	for i, k := range want {
		out[i] = k.sharedNumbers()
	}
	return out
}

// readNumbers tells the last number given out, on whichever CPU, and the ceiling.
func readNumbers(m *ebpf.Map) (span, error) {
	var last, ceiling []uint64
	if err := errors.Join(m.Lookup(uint32(abi.NumberLast), &last), m.Lookup(uint32(abi.NumberCeiling), &ceiling)); err != nil {
		return span{}, fmt.Errorf("read packet numbers: %w", err)
	}
	var s span
	for i := range last {
		s = span{max(s.start, last[i]), max(s.ceiling, ceiling[i])}
	}
	return s, nil
}

// everyCPU is v for each of a map's CPUs. The kernel copies each as a whole.
func everyCPU(m *ebpf.Map, entry uint32, v uint64) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	each := make([]uint64, cpus)
	for i := range each {
		each[i] = v
	}
	if err := m.Put(entry, each); err != nil {
		return fmt.Errorf("write packet numbers: %w", err)
	}
	return nil
}

// RenewNumbers gives headends more numbers before theirs are used up. It is to be
// called each second or so.
func (d *Dataplane) RenewNumbers() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil {
		return nil
	}
	problems, err := d.raiseNumbers(d.gen, d.counting, false)
	return errors.Join(append(problems, err)...)
}

// raiseNumbers sees to it that headends have numbers ahead, which are on the disk
// before they are in the map. Those whose numbers could not be had are problems:
// they refuse all packets once what they have is used up. all: what they have is
// compared with the disk even if it will do.
func (d *Dataplane) raiseNumbers(g *generation, who map[uint32]counterKey, all bool) (problems []error, err error) {
	now := time.Now()
	rations, at := map[counterKey]ration{}, map[counterKey]uint32{}
	for i, k := range who {
		have, err := g.numbersAt(i, readNumbers)
		if err != nil {
			return nil, err
		}
		r := ration{span: have, pace: d.paceOf(k, have.start, now)}
		r.more = have.ceiling < abi.RNDCounterMax && have.ceiling-min(have.start, have.ceiling) <= ahead(have.start, r.pace)/2
		if r.more || all {
			rations[k], at[k] = r, i
		}
	}
	if len(rations) == 0 {
		return nil, nil
	}
	err = d.cfg.step(stepReserve, "")
	var spans map[counterKey]span
	if err == nil {
		spans, err = d.numbers.reserve(rations)
	}
	if err != nil {
		return []error{fmt.Errorf("%d headend paths refuse all packets, or will when they have used up their numbers: %w", len(rations), err)}, nil
	}
	var fresh []counterKey
	for k, s := range spans {
		if s.start >= abi.RNDCounterMax {
			problems = append(problems, fmt.Errorf("path %s, epoch %d has used up its packet numbers: give it a new epoch", pathText(fromBE32(k.path)), k.epoch))
		}
		if rations[k].ceiling == 0 {
			fresh = append(fresh, k)
		}
	}
	for _, k := range fresh {
		if err := g.putNumber(at[k], abi.NumberLast, spans[k].start); err != nil {
			return nil, err
		}
	}
	if len(fresh) > 0 {
		// No CPU sees the ceiling before it sees where to start.
		if err := waitForPrograms(); err != nil {
			return nil, err
		}
	}
	for k, s := range spans {
		if s.ceiling == rations[k].ceiling {
			continue
		}
		if err := d.cfg.step(stepWriteNumber, ""); err != nil {
			return nil, err
		}
		if err := g.putNumber(at[k], abi.NumberCeiling, s.ceiling); err != nil {
			return nil, err
		}
	}
	return problems, nil
}

// paceOf is the highest pace of a headend that has been seen.
func (d *Dataplane) paceOf(k counterKey, last uint64, now time.Time) uint64 {
	p, seen := d.paces[k]
	if took := now.Sub(p.at); seen && took >= time.Second/2 && last > p.last {
		p.most = max(p.most, uint64(float64(last-p.last)/took.Seconds()))
	} else if seen && took < time.Second/2 {
		return p.most
	}
	p.last, p.at = last, now
	d.paces[k] = p
	return p.most
}

func (g *generation) numbersAt(i uint32, f func(*ebpf.Map) (span, error)) (s span, err error) {
	m, err := g.sharedAt(tableNumbers, i)
	if err != nil {
		return span{}, err
	}
	if m == nil {
		return span{}, fmt.Errorf("read map %s: nothing is at %d", tableNumbers, i)
	}
	defer m.Close()
	return f(m)
}

func (g *generation) putNumber(i, entry uint32, v uint64) error {
	_, err := g.numbersAt(i, func(m *ebpf.Map) (span, error) { return span{}, everyCPU(m, entry, v) })
	return err
}

// countedPaths are those that an instance has numbers of, whichever version's.
func countedPaths(dir string) ([]counterKey, error) {
	entries, err := os.ReadDir(numbersDir(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the pinned numbers: %w", err)
	}
	var out []counterKey
	for _, e := range entries {
		if k, ok := parsePin(e.Name()); ok { // else not ours; it goes with the directory
			out = append(out, k)
		}
	}
	return out, nil
}

// takeBack ends headends for good: no program gets a number of theirs from here
// on, and the disk knows where each has stopped.
func (s *numbers) takeBack(dir string, who []counterKey) (err error) {
	if len(who) == 0 {
		return nil
	}
	held := map[counterKey]*ebpf.Map{}
	defer func() {
		for _, m := range held {
			m.Close()
		}
	}()
	used := map[counterKey]span{}
	for _, k := range who {
		m, err := ebpf.LoadPinnedMap(k.sharedNumbers().pin(dir), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", k.sharedNumbers(), err)
		}
		held[k] = m
		if used[k], err = readNumbers(m); err == nil {
			err = everyCPU(m, abi.NumberCeiling, 0)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", k.sharedNumbers(), err)
		}
	}
	if err := waitForPrograms(); err != nil {
		return err
	}
	for k, m := range held {
		stopped, err := readNumbers(m)
		if err != nil {
			return fmt.Errorf("%s: %w", k.sharedNumbers(), err)
		}
		used[k] = span{stopped.start, used[k].ceiling}
	}
	return s.giveBack(used)
}

// takeBackMade ends the headends that a plan would have had.
func (d *Dataplane) takeBackMade() error {
	var who []counterKey
	for _, s := range d.madeShared {
		if s.outer == tableNumbers && d.dir != "" {
			who = append(who, s.key)
		}
	}
	return d.numbers.takeBack(d.dir, who)
}

// removeNumbers ends the headends that the plan has no more.
func (d *Dataplane) removeNumbers(g *generation, want map[uint32]counterKey) error {
	who, err := countedPaths(d.dir)
	if err != nil {
		return err
	}
	keep := map[counterKey]bool{}
	for _, k := range want {
		keep[k] = true
	}
	who = slices.DeleteFunc(who, func(k counterKey) bool { return keep[k] })
	for _, k := range who {
		delete(d.paces, k)
	}
	// Numbers that cannot be given back are lost, and nothing else.
	return errors.Join(d.numbers.takeBack(d.dir, who), d.removeShared(g, tableNumbers, numbersName, d.sharedNumbers(want)))
}
