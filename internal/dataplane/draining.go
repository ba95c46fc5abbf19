package dataplane

import (
	"errors"
	"maps"
	"time"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// An epoch has drained when its egress has seen all numbers that its headends gave out. A headend's last numbers are final
// once its ceiling is zero and the kernel has waited for the programs that ran (takeBack); the numbers that an egress has seen are in its replay window.

const (
	// givenKeep is how long the last numbers of an epoch that was given up are kept, and givenMost of how many epochs.
	givenKeep = 10 * time.Minute
	givenMost = 16384
)

// givenUp is an epoch that a headend of this node has given up.
type givenUp struct {
	event.Given
	at time.Time
}

// looked is what a window was like when it was looked at last.
type looked struct {
	sum   uint64    // of its words
	since time.Time // it was so
	moved bool      // it was otherwise before
	seen  event.Seen
}

// noteGiven keeps the last numbers, by CPU, of headends that a plan gives up. had is the plan before; nil: it is not known, and neither are the lanes.
func (d *Dataplane) noteGiven(had *plan.Node, last map[tables.CounterKey][]uint64) {
	if had == nil || len(last) == 0 {
		return
	}
	now := time.Now()
	maps.DeleteFunc(d.given, func(_ event.Epoch, g givenUp) bool { return now.Sub(g.at) > givenKeep })
	if d.given == nil {
		d.given = map[event.Epoch]givenUp{}
	}
	for i := range had.Headends {
		h := &had.Headends[i]
		cpus, ok := last[tables.CounterKey{Path: abi.BE32(h.Path), Epoch: h.Epoch}]
		if !ok || len(d.given) >= givenMost {
			continue
		}
		g := givenUp{event.Given{Epoch: event.Epoch{Path: h.Path, Epoch: h.Epoch}}, now}
		for cpu, n := range cpus[:min(len(cpus), int(h.Lanes))] {
			if n > 0 {
				g.Lanes = append(g.Lanes, event.Lane{Lane: h.Lane + uint16(cpu), Number: n})
			}
		}
		d.given[g.Epoch] = g
	}
}

// Drained tells of epochs which numbers headends of this node gave out until they gave them up, and which numbers its egresses have seen. Of what
// the node does not know it tells nothing. Call it each second or so: how long an egress has seen nothing counts from the first call.
func (d *Dataplane) Drained(of []event.Epoch) (given []event.Given, seen []event.Seen, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := map[event.Epoch]bool{}
	for _, e := range of {
		wanted[e] = true
	}
	for e := range d.looked {
		if !wanted[e] {
			delete(d.looked, e)
		}
	}
	for _, e := range of {
		if g, ok := d.given[e]; ok {
			given = append(given, g.Given)
		}
	}
	if d.gen == nil || d.node == nil {
		return given, nil, nil
	}
	verifies := map[event.Epoch]bool{}
	for i := range d.node.Egresses {
		if e := (event.Epoch{Path: d.node.Egresses[i].Path, Epoch: d.node.Egresses[i].Epoch}); wanted[e] {
			verifies[e] = true
		}
	}
	if len(verifies) == 0 {
		return given, nil, nil
	}
	var mem *memory
	if d.force != nil {
		mem = d.force.memory
	} else {
		if mem, err = d.memory(d.gen); err != nil {
			return nil, nil, err
		}
		defer func() { err = errors.Join(err, mem.close()) }()
	}
	windows, several := map[event.Epoch]tables.WindowSlot{}, map[event.Epoch]bool{}
	for k, w := range mem.Placed.Windows {
		e := event.Epoch{Path: abi.BE32(k.Path), Epoch: k.Epoch}
		if _, there := windows[e]; there {
			several[e] = true // one is of other secrets, and is about to go
		}
		windows[e] = w
	}
	for _, e := range of {
		if w, ok := windows[e]; ok && verifies[e] && !several[e] {
			seen = append(seen, d.lookAt(e, mem.windows.wordsOf(w), w.Size))
			delete(verifies, e)
		}
	}
	return given, seen, nil
}

// lookAt is how far a window is, with its words as they are now.
func (d *Dataplane) lookAt(e event.Epoch, words []uint64, size int) event.Seen {
	now, sum := time.Now(), uint64(0)
	for _, w := range words {
		sum = (sum ^ w) * 0x100000001b3
	}
	l, ok := d.looked[e]
	if !ok || l.sum != sum {
		l = looked{sum: sum, since: now, moved: ok, seen: event.Seen{Epoch: e}}
		for lane, n := range newest(words, size) {
			if n > 0 {
				l.seen.Lanes = append(l.seen.Lanes, event.Lane{Lane: uint16(lane), Number: n})
			}
		}
		l.seen.Missing = missing(words, size, l.seen.Lanes)
		if d.looked == nil {
			d.looked = map[event.Epoch]looked{}
		}
		d.looked[e] = l
	}
	l.seen.Quiet, l.seen.Moved = now.Sub(l.since), l.moved
	return l.seen
}

// missing counts the numbers below the newest ones that a window would still accept, in all lanes.
func missing(words []uint64, size int, lanes []event.Lane) (count uint64) {
	each := uint64(size / 4)
	for _, l := range lanes {
		first := uint64(1)
		if l.Number > uint64(size) {
			first = l.Number - uint64(size) + 1
		}
		for c := first; c < l.Number; c++ {
			word := words[uint64(l.Lane)*each+c/4%each]
			tag := c / uint64(size)
			if have := word >> tagShift; have < tag || have == tag && word>>(usesBits*(c%4))&allUses == 0 {
				count++
			}
		}
	}
	return count
}
