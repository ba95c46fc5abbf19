package dataplane

import (
	"errors"
	"maps"
	"reflect"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// inForce is what this process has put into the kernel for the plan in force, so that the next change reads and writes only what
// it changes. Nobody else writes there; if somebody does, the next reconciliation finds it, which compares everything.
type inForce struct {
	gen      *generation
	topology topology
	contents tables.Contents // of the maps, except that ports may have changed since
	indexes  tables.Indexes
	stores   *stores
	memory   *memory // open
}

// hold keeps what was put in force as a whole. Without it the next change is a whole one, too.
func (d *Dataplane) hold(t topology, c tables.Contents) error {
	f := &inForce{gen: d.gen, topology: t, contents: c}
	var err error
	if f.memory, err = d.memory(d.gen); err != nil {
		return err
	}
	f.memory.placed = true
	if f.stores, err = d.gen.openStores(); err != nil {
		return errors.Join(err, f.memory.close())
	}
	f.stores.partly = true
	f.indexes = tables.RecoverIndexes(c, d.gen.limits, f.memory.Placed)
	d.force = f
	return nil
}

// letGo ends what hold began.
func (d *Dataplane) letGo() error {
	f := d.force
	d.force = nil
	if f == nil {
		return nil
	}
	return f.memory.close()
}

// partOf computes the part of a plan on the devices of t that differs from the one in force. False: that is not
// known, or more than a part differs, or nothing does: whoever applies the same plan again may want it repaired.
func (d *Dataplane) partOf(n plan.Node, t topology) (p tables.Part, ok bool, err error) {
	f := d.force
	if f == nil || f.gen != d.gen || d.node == nil || len(d.problems) > 0 || !reflect.DeepEqual(f.topology, t) {
		return p, false, nil
	}
	p, ok, err = tables.Difference(*d.node, n, tables.Wiring{Reach: t.reach, Cpus: d.cpus}, f.contents, f.indexes)
	if !ok || err != nil {
		return p, false, err
	}
	return p, !p.Empty() && p.Fits(f.contents, d.gen.limits), nil
}

// applyPart is applyInPlace for a plan that differs from the one in force in a part. The maps of routes and ports, and the ways out that
// programs remember, stay as they are.
func (d *Dataplane) applyPart(n plan.Node, t topology, p tables.Part) (problems []error, err error) {
	f, g := d.force, d.gen
	var u undo
	defer func() {
		if err != nil {
			err = errors.Join(err, u.run())
		}
	}()
	if err := d.need(g, programsOf(n, t.bindings)); err != nil {
		return nil, err
	}
	if err := d.attachReturns(g, t.bindings, &u, nil); err != nil {
		return nil, err
	}
	if problems, err = d.prepare(g, f.memory, p.Wanted); err != nil {
		return nil, err
	}
	u.add(func() error { return d.restorePart(g, f.contents) }, nil)
	if err := d.runIn(g, f.stores, tables.Changes(p.Have, p.Want)); err != nil {
		return nil, err
	}
	if err := d.attach(g, t.bindings, &u, nil); err != nil {
		return nil, err
	}

	// From here on nothing is taken back.
	try := func(err error) {
		if err != nil {
			problems = append(problems, err)
		}
	}
	try(u.keep())
	kept, err := d.tidyPart(p)
	try(err)
	p.Follow(&f.contents, f.indexes, kept)
	gone := map[tables.CounterKey]bool{}
	for _, k := range p.Numbers {
		gone[k] = true
	}
	maps.DeleteFunc(d.counting, func(_ uint32, k tables.CounterKey) bool { return gone[k] })
	maps.Copy(d.counting, p.Wanted.Numbers)
	if d.saved != nil {
		d.saved.follow(p)
	}
	return problems, nil
}

// restorePart is restore, with the ports that there are.
func (d *Dataplane) restorePart(g *generation, before tables.Contents) error {
	before.Ports = map[uint32]abi.Port{}
	if err := readMap(g, tables.MapPorts, before.Ports); err != nil {
		return err
	}
	return d.restore(g, before)
}

// tidyPart removes the windows and numbers that a part gives up. No program uses them any more. It returns windows that are
// not on disk, and stay.
func (d *Dataplane) tidyPart(p tables.Part) (kept []tables.WindowKey, err error) {
	if len(p.Windows)+len(p.Numbers) == 0 {
		return nil, nil
	}
	mem := d.force.memory
	windows := p.Windows
	var errs []error
	if err := d.saveEnding(mem, windows); err != nil {
		errs = append(errs, keptError(err))
		kept, windows = windows, nil
	}
	last, err := d.numbers.takeBack(mem, p.Numbers)
	errs = append(errs, err)
	d.noteGiven(d.node, last)
	mem.free(windows, p.Numbers)
	for _, k := range p.Numbers {
		delete(d.paces, k)
	}
	return kept, errors.Join(append(errs, mem.shrink(d.gen))...)
}

// saveEnding writes to the disk how far the windows have come that end.
func (d *Dataplane) saveEnding(mem *memory, windows []tables.WindowKey) error {
	if d.cfg.StateDir == "" {
		return nil
	}
	ending := map[tables.WindowKey]tables.WindowSlot{}
	for _, k := range windows {
		if w, ok := mem.Placed.Windows[k]; ok {
			ending[k] = w
		}
	}
	now := seenNumbers(ending, mem.windows)
	if len(now) == 0 {
		return nil
	}
	record := openRecall(d.cfg.StateDir)
	before := idOf(record.path)
	err := record.updateBeside(now, func(k tables.WindowKey) bool {
		_, there := mem.Placed.Windows[k]
		return there
	})
	if err == nil && d.saved != nil && d.saved.record.equal(before) {
		d.saved.record = idOf(record.path) // it has all that SaveNews has left in it
	}
	return err
}
