package dataplane

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

// numbersName is the directory of the pins of all slabs of numbers, of all generations. Programs
// continue counting in them while links are moved from one generation to the next, and after a
// restart of the agent.
const numbersName = "numbers"

func numbersDir(dir string) string { return filepath.Join(dir, numbersName) }

// pace is how fast a headend has been seen to give out numbers.
type pace struct {
	last uint64
	at   time.Time
	most uint64 // a second, on one CPU
}

// The slab's first row identifies the owner of a slot of numbers: its first word has a mark,
// path and epoch, the other is unused. A free slot is zero.
const numberMagic = 0x574e << 48

// numberWord is where in the slabs a slot's number of a row is.
func (s *slabs) numberWord(slot uint32, row int) int {
	in, at := int(slot)/abi.NumberSlots, int(slot)%abi.NumberSlots
	return in*s.words + (row*abi.NumberSlots+at)*numberSize
}

// cpus are the rows of a slab of numbers but the first.
func (s *slabs) cpus() int { return s.words/numberSize/abi.NumberSlots - 1 }

// readSlots finds all slots that have an owner.
func (s *slabs) readSlots() map[tables.CounterKey]uint32 {
	out := map[tables.CounterKey]uint32{}
	for i, one := range s.all {
		if one == nil {
			continue
		}
		for at := range abi.NumberSlots {
			slot := uint32(i*abi.NumberSlots + at)
			mark := s.word(s.numberWord(slot, 0)).Load()
			if mark>>48<<48 == numberMagic {
				out[tables.CounterKey{Path: abi.BE32(uint32(mark >> 8)), Epoch: uint8(mark)}] = slot
			}
		}
	}
	return out
}

// own makes a slot a path's, with no numbers yet.
func (s *slabs) own(slot uint32, k tables.CounterKey) {
	s.zeroNumbers(slot)
	s.word(s.numberWord(slot, 0)).Store(numberMagic | uint64(abi.BE32(k.Path))<<8 | uint64(k.Epoch))
}

// disown lets others have a slot that no program can meet any more.
func (s *slabs) disown(slot uint32) {
	s.zeroNumbers(slot)
	s.word(s.numberWord(slot, 0)).Store(0)
}

func (s *slabs) zeroNumbers(slot uint32) {
	s.putCeiling(slot, 0)
	s.putLast(slot, 0)
}

// readNumbers returns the last used number, of all CPUs, and the ceiling.
func (s *slabs) readNumbers(slot uint32) (out span) {
	for cpu := range s.cpus() {
		at := s.numberWord(slot, cpu+1)
		out = span{max(out.start, s.word(at).Load()), max(out.ceiling, s.word(at+1).Load())}
	}
	return out
}

// lastByCPU are the last numbers in use, by CPU; 0: none.
func (s *slabs) lastByCPU(slot uint32) []uint64 {
	out := make([]uint64, s.cpus())
	for cpu := range out {
		out[cpu] = s.word(s.numberWord(slot, cpu+1)).Load()
	}
	return out
}

// putLast is only for slots without a ceiling: in others programs count.
func (s *slabs) putLast(slot uint32, v uint64) {
	for cpu := range s.cpus() {
		s.word(s.numberWord(slot, cpu+1)).Store(v)
	}
}

func (s *slabs) putCeiling(slot uint32, v uint64) {
	for cpu := range s.cpus() {
		s.word(s.numberWord(slot, cpu+1) + 1).Store(v)
	}
}

// RenewNumbers gives headends more numbers before theirs are used up. Call it each second or so.
func (d *Dataplane) RenewNumbers() (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil || len(d.counting) == 0 {
		return nil
	}
	s, err := openSlabs(numberSlabs(d.cpus), d.dir, d.gen)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	problems, err := d.raiseNumbers(s, d.counting, false)
	return errors.Join(append(problems, err)...)
}

// NumberState is how far a headend has counted.
type NumberState struct {
	Path  uint32
	Epoch uint8
	Left  uint64 // of the epoch; at 0 the headend refuses packets as exhausted
	Ahead uint64 // of these, those that the record on disk has, and that last while no agent runs
}

// Numbers tells how far the headends of the plan in force have counted, in no order.
func (d *Dataplane) Numbers() (out []NumberState, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil || len(d.counting) == 0 {
		return nil, nil
	}
	s, err := openSlabs(numberSlabs(d.cpus), d.dir, d.gen)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for slot, k := range d.counting {
		n := s.readNumbers(slot)
		out = append(out, NumberState{
			Path: abi.BE32(k.Path), Epoch: k.Epoch, Left: abi.RNDCounterMax - min(n.start, abi.RNDCounterMax), Ahead: n.ceiling - min(n.start, n.ceiling),
		})
	}
	return out, nil
}

// raiseNumbers gives headends numbers in advance; they are on disk before they are in the map.
// Headends that get no numbers are problems: they refuse all packets when theirs are used up.
// all: compare all headends with the disk, also those with enough numbers.
func (d *Dataplane) raiseNumbers(in *slabs, who map[uint32]tables.CounterKey, all bool) (problems []error, err error) {
	now := time.Now()
	rations, at := map[tables.CounterKey]ration{}, map[tables.CounterKey]uint32{}
	for i, k := range who {
		have := in.readNumbers(i)
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
	var spans map[tables.CounterKey]span
	if err == nil {
		spans, err = d.numbers.reserve(rations)
	}
	if err != nil {
		return []error{fmt.Errorf("%d headend paths refuse all packets, or will when they have used up their numbers: %w", len(rations), err)}, nil
	}
	var fresh []tables.CounterKey
	for k, s := range spans {
		if s.start >= abi.RNDCounterMax {
			problems = append(problems, fmt.Errorf("path %s, epoch %d has used up its packet numbers: give it a new epoch", pathText(abi.BE32(k.Path)), k.Epoch))
		}
		if rations[k].ceiling == 0 {
			fresh = append(fresh, k)
		}
	}
	for _, k := range fresh {
		in.putLast(at[k], spans[k].start)
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
		in.putCeiling(at[k], s.ceiling)
	}
	return problems, nil
}

// paceOf is the highest pace of a headend that has been seen.
func (d *Dataplane) paceOf(k tables.CounterKey, last uint64, now time.Time) uint64 {
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

// takeBack ends headends: no program gets a number of theirs from here on, and their last
// numbers are on disk. It returns these by CPU; nil: they are not known for certain.
func (s *numbers) takeBack(mem *memory, who []tables.CounterKey) (last map[tables.CounterKey][]uint64, err error) {
	used := map[tables.CounterKey]span{}
	for _, k := range who {
		if slot, ok := mem.Placed.Numbers[k]; ok {
			used[k] = mem.numbers.readNumbers(slot)
			mem.numbers.putCeiling(slot, 0)
		}
	}
	if len(used) == 0 {
		return nil, nil
	}
	if err := waitForPrograms(); err != nil {
		return nil, err
	}
	last = map[tables.CounterKey][]uint64{}
	for k, u := range used {
		slot := mem.Placed.Numbers[k]
		used[k] = span{mem.numbers.readNumbers(slot).start, u.ceiling}
		last[k] = mem.numbers.lastByCPU(slot)
	}
	return last, s.giveBack(used)
}
