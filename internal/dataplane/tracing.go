package dataplane

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/tables"
)

// tracing are the traces at headends of this node. A trace has an entry of ws_traces with the packets that are left, which
// programs count down, and the entry of its path in ws_headends names it. A change of the plan may give the path
// another entry of ws_headends, and a new generation takes ws_traces over.
type tracing struct {
	wanted [abi.Traces]event.Trace // by entry of ws_traces; Packets 0: none
	gen    *generation             // with these marks; any other has marks that nobody knows
	marked map[uint32]uint8        // headends with a trace: the field of the entry
}

// entry is the entry of a trace; -1: none.
func (t *tracing) entry(w event.Trace) int { return slices.Index(t.wanted[:], w) }

// Trace sets the traces at headends of this node: of each path the next packets, or those of a flow, so many, get the O-flag, over labels the flag of their word. A trace that
// was wanted already goes on. It returns an error for each trace that it does not take, and takes the others.
func (d *Dataplane) Trace(wanted []event.Trace) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil {
		return errors.New("trace: no plan is in force")
	}
	var errs []error
	t := &d.tracing
	for i, w := range t.wanted {
		if w.Packets != 0 && !slices.Contains(wanted, w) {
			t.wanted[i] = event.Trace{}
			errs = append(errs, d.leaveLocked(i, abi.Trace{}))
		}
	}
	errs = append(errs, d.markLocked()) // no headend names an entry that another trace gets
	for _, w := range wanted {
		if t.entry(w) >= 0 {
			continue
		}
		errs = append(errs, d.beginLocked(w))
	}
	return errors.Join(append(errs, d.markLocked())...)
}

func (d *Dataplane) beginLocked(w event.Trace) error {
	if w.Packets < 1 || w.Packets > event.TracePacketsMax {
		return fmt.Errorf("trace of path %#x: %d packets; expect 1 to %d", w.Path, w.Packets, event.TracePacketsMax)
	}
	if slices.ContainsFunc(d.tracing.wanted[:], func(o event.Trace) bool { return o.Packets != 0 && o.Path == w.Path }) {
		return fmt.Errorf("trace of path %#x: another trace of the path is under way", w.Path)
	}
	switch _, _, err := d.headendLocked(w.Path); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return fmt.Errorf("trace of path %#x: this node is no headend of it", w.Path)
	case err != nil:
		return err
	}
	i := d.tracing.entry(event.Trace{})
	if i < 0 {
		return fmt.Errorf("trace of path %#x: %d traces are under way at this node; one more is not possible", w.Path, abi.Traces)
	}
	// The flow before the packets: a program on another CPU may have the entry still.
	entry := tables.EncodeTrace(w.Flow)
	if err := d.leaveLocked(i, entry); err != nil {
		return err
	}
	entry.Left = int64(w.Packets)
	if err := d.leaveLocked(i, entry); err != nil {
		return err
	}
	d.tracing.wanted[i] = w
	return nil
}

// leaveLocked sets an entry of ws_traces: the packets that are left, and their flow.
func (d *Dataplane) leaveLocked(entry int, left abi.Trace) error {
	if err := d.gen.maps[tables.MapTraces].Put(uint32(entry), left); err != nil {
		return fmt.Errorf("write to map %s: %w", tables.MapTraces, err)
	}
	return nil
}

func (d *Dataplane) headendLocked(path uint32) (index uint32, h abi.Headend, err error) {
	if err := d.gen.maps[tables.MapPaths].Lookup(abi.BE32(path), &index); err != nil {
		return 0, h, fmt.Errorf("find path %#x in map %s: %w", path, tables.MapPaths, err)
	}
	if err := d.gen.maps[tables.MapHeadends].Lookup(index, &h); err != nil {
		return 0, h, fmt.Errorf("read map %s: %w", tables.MapHeadends, err)
	}
	return index, h, nil
}

// markLocked makes exactly the headends of traced paths name their traces. The caller has just changed traces, or the
// plan in force: changes of the plan write whole entries, without a trace.
func (d *Dataplane) markLocked() error {
	t := &d.tracing
	if t.gen != d.gen {
		// A process before this one may have left marks.
		left := map[uint32]abi.Headend{}
		if err := readMap(d.gen, tables.MapHeadends, left); err != nil {
			return err
		}
		t.gen, t.marked = d.gen, map[uint32]uint8{}
		for i, h := range left {
			if h.Trace != 0 {
				t.marked[i] = h.Trace
			}
		}
	}
	want := map[uint32]uint8{}
	for i, w := range t.wanted {
		if w.Packets == 0 {
			continue
		}
		index, _, err := d.headendLocked(w.Path)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue // the plan has it no more, or not now
		}
		if err != nil {
			return err
		}
		want[index] = uint8(i + 1)
	}
	for index := range t.marked {
		if want[index] == 0 {
			if err := d.markHeadend(index, 0); err != nil {
				return err
			}
			delete(t.marked, index)
		}
	}
	for index, trace := range want {
		if err := d.markHeadend(index, trace); err != nil {
			return err
		}
		t.marked[index] = trace
	}
	return nil
}

// markHeadend changes nothing but the trace: packets meet the entry meanwhile.
func (d *Dataplane) markHeadend(index uint32, trace uint8) error {
	var h abi.Headend
	m := d.gen.maps[tables.MapHeadends]
	if err := m.Lookup(index, &h); err != nil {
		return fmt.Errorf("read map %s: %w", tables.MapHeadends, err)
	}
	if h.Trace == trace || h == (abi.Headend{}) {
		return nil
	}
	h.Trace = trace
	if err := m.Put(index, h); err != nil {
		return fmt.Errorf("write to map %s: %w", tables.MapHeadends, err)
	}
	return nil
}

// keepTraces goes on with traces after a change of the plan. A trace is no reason for a plan not to be in force.
func (d *Dataplane) keepTraces() {
	none := d.tracing.wanted == [abi.Traces]event.Trace{} && len(d.tracing.marked) == 0
	if d.gen == nil || none && d.tracing.gen == d.gen {
		return
	}
	if err := d.markLocked(); err != nil {
		d.cfg.Log.Warn("traces do not go on", "err", err)
	}
}

// useRings makes a generation's ring buffers those that are read.
func (d *Dataplane) useRings(g *generation) error {
	return errors.Join(d.events.use(g), d.traced.use(g))
}
