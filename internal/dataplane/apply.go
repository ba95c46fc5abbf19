package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// applyLocked puts n in force on the devices of t. lenient: without the places to which no
// program can be attached; otherwise such a place is an error.
func (d *Dataplane) applyLocked(n plan.Node, t topology, lenient bool) error {
	if err := d.letGo(); err != nil {
		return err
	}
	cfg, err := tables.EncodeConfig(n)
	if err != nil {
		return err
	}
	if d.decapL3 {
		cfg.DecapL3 = 1
	}
	cpus, err := CPUs()
	if err != nil {
		return err
	}
	if err := checkLanes(n, cpus); err != nil {
		return err
	}
	l, err := d.size(n)
	if err != nil {
		return err
	}
	if err := d.dropDeadLinks(lenient); err != nil {
		return err
	}
	notPinned := d.keepPinsLocked()
	shared, err := d.checkAlone(t.bindings)
	if err != nil && !lenient {
		return err
	}
	left := func(anew bool) *leftOut {
		if !lenient {
			return nil
		}
		return &leftOut{places: maps.Clone(shared), anew: anew}
	}
	notSaved := d.saveWindowsLocked()
	d.saved = nil
	d.made = made{}
	var problems []error
	if d.gen != nil && d.gen.identity == identityOf(cfg) && l.Buckets <= d.gen.limits.Buckets {
		problems, err = d.applyInPlace(n, &t, left(false))
		if errors.Is(err, tables.ErrCapacity) || errors.Is(err, tables.ErrTogether) {
			problems, err = d.applyAnew(n, cfg, &t, left(true))
		}
	} else {
		problems, err = d.applyAnew(n, cfg, &t, left(true))
	}
	if err != nil {
		if _, stuck := errors.AsType[*undoError](err); stuck {
			return err // other entries may still name the new ones
		}
		return errors.Join(err, d.unmake())
	}
	was := d.node
	d.node, d.topology = &n, t
	d.events.label(n.Name, t.bindings)
	d.traced.label(n.Name, t.bindings)
	d.problems = slices.Concat(t.missing, t.withheld, problems, d.checkPositions(t.bindings))
	for _, err := range []error{notSaved, notPinned, d.endRevoked(was, n)} {
		if err != nil {
			d.problems = append(d.problems, err)
		}
	}
	if len(d.problems) == 0 {
		if err := d.hold(t, d.settled); err != nil {
			d.cfg.Log.Warn("the next change will compare the whole plan with the kernel", "err", err)
		}
	}
	return nil
}

// applyPartLocked puts n in force on the devices of t if it differs from the plan in force in a part alone. Else
// it changes nothing.
func (d *Dataplane) applyPartLocked(n plan.Node, t topology) (done bool, err error) {
	defer func() {
		if !done {
			err = errors.Join(err, d.letGo())
		}
	}()
	p, ok, err := d.partOf(n, t)
	if err != nil || !ok { // the whole change finds the error again
		return false, nil
	}
	cpus, err := CPUs()
	if err != nil {
		return false, err
	}
	if err := checkLanes(n, cpus); err != nil {
		return false, err
	}
	if err := d.dropDeadLinks(false); err != nil {
		return false, err
	}
	notPinned := d.keepPinsLocked()
	if _, err := d.checkAlone(t.bindings); err != nil {
		return false, err
	}
	d.made = made{}
	problems, err := d.applyPart(n, t, p)
	if err != nil {
		if _, stuck := errors.AsType[*undoError](err); stuck {
			return false, err // other entries may still name the new ones
		}
		return false, errors.Join(err, d.unmake())
	}
	was := d.node
	d.node = &n
	d.problems = append(problems, d.checkPositions(t.bindings)...)
	for _, err := range []error{notPinned, d.endRevoked(was, n)} {
		if err != nil {
			d.problems = append(d.problems, err)
		}
	}
	if len(d.problems) > 0 {
		if err := d.letGo(); err != nil {
			d.problems = append(d.problems, err)
		}
	}
	return true, d.degraded()
}

// size chooses the maps for a plan.
func (d *Dataplane) size(n plan.Node) (tables.Limits, error) {
	l, err := tables.Need(n, d.cpus)
	if err != nil {
		return tables.Limits{}, err
	}
	if l.Lines, err = tables.NeedLines(n, d.local); err != nil {
		return tables.Limits{}, err
	}
	return l.Size()
}

func (d *Dataplane) wiring(t topology, xdp func(binding) bool) tables.Wiring {
	return tables.Wiring{Ports: portTable(t.bindings, xdp), Reach: t.reach, Cpus: d.cpus}
}

// applyInPlace changes the maps of the generation in use. It removes from t the places that had
// to be left out.
func (d *Dataplane) applyInPlace(n plan.Node, t *topology, left *leftOut) (problems []error, err error) {
	g := d.gen
	var u undo
	defer func() {
		if err != nil {
			err = errors.Join(err, u.run())
		}
	}()
	if err := d.need(g, programsOf(n, t.bindings)); err != nil {
		return nil, err
	}
	// Programs for packets from a function come before packets to the function.
	if err := d.attachReturns(g, t.bindings, &u, left); err != nil {
		return nil, err
	}
	reduced := t.without(left)
	node, err := g.node()
	if err != nil {
		return nil, err
	}
	// While either plan has rules, the programs look for them.
	either := node
	if either.Rules != reduced.node.Rules {
		either.Rules = uint32(abi.RulesStateMaybe)
	}
	either.Own |= reduced.node.Own
	either.Services |= reduced.node.Services
	// And the super-packets of either find their segmenter.
	if n := reduced.node; n.CutIfindex != 0 {
		either.CutIfindex, either.CutDmac = n.CutIfindex, n.CutDmac
	}
	if n := reduced.node; n.CutBackIfindex != 0 {
		either.CutBackIfindex, either.CutBackDmac = n.CutBackIfindex, n.CutBackDmac
	}
	if n := reduced.node; n.CutEnterIfindex != 0 {
		either.CutEnterIfindex, either.CutEnterDmac = n.CutEnterIfindex, n.CutEnterDmac
	}
	u.add(func() error { return g.setNode(node) }, nil)
	if either != node {
		if err := g.setNode(either); err != nil {
			return nil, err
		}
	}
	problems, before, want, err := d.fill(g, n, d.wiring(reduced, d.isTarget))
	if err != nil {
		return nil, err
	}
	u.add(func() error { return d.restore(g, before) }, nil)
	u.add(func() error { return g.setNode(either) }, nil)
	if err := d.arm(g, reduced.node); err != nil {
		return nil, err
	}
	if err := d.attach(g, t.bindings, &u, left); err != nil {
		return nil, err
	}
	*t = reduced
	return slices.Concat(problems, left.problems(t.bindings), d.settle(g, t.bindings, want, u)), nil
}

// applyAnew builds a generation beside the one in use and moves the links to it.
//
// It starts with empty caches: the headers of packets that are in a function at that time are
// lost, and these packets are refused when they come back. It removes from t the places that had
// to be left out.
func (d *Dataplane) applyAnew(n plan.Node, cfg abi.Config, t *topology, left *leftOut) (problems []error, err error) {
	old := d.gen
	had := tables.New()
	if old != nil {
		if had, err = old.read(); err != nil {
			return nil, err
		}
	}
	l, err := d.size(n)
	if err != nil {
		return nil, err
	}
	mem, err := d.memory(old)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, mem.close()) }()
	carry, done := d.carried()
	defer done()
	// A function keeps its counters; the contents of other maps start empty.
	fresh := func(l tables.Limits) tables.Indexes {
		ix := tables.NewIndexes(l, mem.Placed)
		ix.Proxies = tables.RecoverIndexes(had, l, mem.Placed).Proxies
		return ix
	}
	ix := fresh(l)
	if s := carry[tables.MapStats]; s != nil && old != nil && old.limits.Stats >= l.Stats {
		// Counters go on, so each path keeps its own.
		l.Stats = old.limits.Stats
		ix = tables.RecoverIndexes(had, l, mem.Placed)
		ix.Slots, ix.Buckets = tables.NewSlotRanges(l.Slots), tables.NewBucketRanges(l.Buckets)
	} else {
		delete(carry, tables.MapStats)
	}
	want, err := tables.Desire(d.byGateways(n), d.wiring(*t, d.isTarget), d.local, tables.New(), ix)
	if errors.Is(err, tables.ErrCapacity) {
		delete(carry, tables.MapStats)
		if l, err = d.size(n); err != nil {
			return nil, err
		}
		want, err = tables.Desire(d.byGateways(n), d.wiring(*t, d.isTarget), d.local, tables.New(), fresh(l))
	}
	if err != nil {
		return nil, err
	}

	g, err := d.buildGeneration(cfg, l, carry, programsOf(n, t.bindings))
	if err != nil {
		return nil, err
	}
	var u undo
	u.add(func() error { return errors.Join(g.close(), removeTree(g.dir)) }, nil)
	defer func() {
		if err != nil {
			d.gen = old
			err = errors.Join(err, u.run())
		}
	}()
	if problems, err = d.prepare(g, mem, want); err != nil {
		return nil, err
	}
	if err := d.run(g, tables.Changes(tables.New(), want.Contents)); err != nil {
		return nil, err
	}
	if err := d.arm(g, t.node); err != nil {
		return nil, err
	}
	if err := d.commit(g); err != nil {
		return nil, err
	}
	d.gen = g
	if err := d.attachReturns(g, t.bindings, &u, left); err != nil {
		return nil, err
	}
	reduced := t.without(left)
	if left.any() {
		// Only now is it known which functions can be guarded, and no packet goes to
		// any yet.
		var more []error
		if more, _, want, err = d.fill(g, n, d.wiring(reduced, d.isTarget)); err != nil {
			return nil, err
		}
		problems = append(problems, more...)
		if err := d.arm(g, reduced.node); err != nil {
			return nil, err
		}
	}
	if err := d.attach(g, t.bindings, &u, left); err != nil {
		return nil, err
	}
	if err := d.useRings(g); err != nil {
		return nil, err
	}

	// From here on the new generation is at work; nothing is taken back.
	*t = reduced
	problems = slices.Concat(problems, left.problems(t.bindings), d.settle(g, t.bindings, want, u))
	if err := old.close(); err != nil {
		problems = append(problems, err)
	}
	return problems, nil
}

// carried are the maps that a new generation may take over from the one at
// work: of one of another version, those of connections, which workers and
// gateways go on with. The caller calls done when it has.
func (d *Dataplane) carried() (out map[tables.Map]*ebpf.Map, done func()) {
	out, done = map[tables.Map]*ebpf.Map{}, func() {}
	if d.gen != nil {
		for _, t := range observed {
			out[t] = d.gen.maps[t]
		}
		return out, done
	}
	whole, _, err := generationDirs(d.dir)
	if err != nil || len(whole) == 0 {
		return out, done // they begin empty, as they may at any time
	}
	for _, t := range []tables.Map{tables.MapConns, tables.MapConnsNew} {
		if m, err := ebpf.LoadPinnedMap(filepath.Join(d.dir, whole[0], string(t)), nil); err == nil {
			out[t] = m
		}
	}
	return out, func() {
		for _, m := range out {
			m.Close()
		}
	}
}

// fill writes the wanted content of a plan into the maps of g; without ports in the wiring the
// ports stay. After an error the maps are unchanged.
func (d *Dataplane) fill(g *generation, n plan.Node, at tables.Wiring) (problems []error, before tables.Contents, want tables.Wanted, err error) {
	if before, err = g.read(); err != nil {
		return nil, tables.Contents{}, tables.Wanted{}, err
	}
	if at.Ports == nil {
		at.Ports = before.Ports
	}
	mem, err := d.memory(g)
	if err != nil {
		return nil, tables.Contents{}, tables.Wanted{}, err
	}
	defer func() { err = errors.Join(err, mem.close()) }()
	want, err = tables.Desire(d.byGateways(n), at, d.local, before, tables.RecoverIndexes(before, g.limits, mem.Placed))
	if err != nil {
		return nil, tables.Contents{}, tables.Wanted{}, err
	}
	if tables.Together(before, want.Contents) {
		return nil, tables.Contents{}, tables.Wanted{}, tables.ErrTogether
	}
	if err := g.checkRoom(before, want.Contents); err != nil {
		return nil, tables.Contents{}, tables.Wanted{}, err
	}
	if problems, err = d.prepare(g, mem, want); err != nil {
		return nil, tables.Contents{}, tables.Wanted{}, err
	}
	if err := d.run(g, tables.Changes(before, want.Contents)); err != nil {
		return nil, tables.Contents{}, tables.Wanted{}, errors.Join(err, undo{{back: func() error { return d.restore(g, before) }}}.run())
	}
	return problems, before, want, nil
}

// restore brings the maps back to a state that they had.
func (d *Dataplane) restore(g *generation, before tables.Contents) error {
	now, err := g.read()
	if err != nil {
		return err
	}
	quiet := Dataplane{} // a step that a test breaks is broken once, not here again
	if err := quiet.run(g, append(tables.Changes(now, before), tables.LeftBehind(now, before)...)); err != nil {
		return fmt.Errorf("restore the maps: %w", err)
	}
	return nil
}

// updateMapsLocked brings the maps to the plan, without a look at interfaces.
func (d *Dataplane) updateMapsLocked(n plan.Node) error {
	held := d.force != nil
	if err := d.letGo(); err != nil {
		return err
	}
	_, _, want, err := d.fill(d.gen, n, tables.Wiring{Ports: nil, Reach: d.topology.reach, Cpus: d.cpus})
	if err == nil && held {
		err = d.hold(d.topology, want.Contents)
	}
	return err
}

// settle does the steps that cannot open a hole and are never undone: redirect targets, programs
// at interfaces that are not in the plan, older generations, and the windows and numbers of
// removed paths.
func (d *Dataplane) settle(g *generation, bs []binding, w tables.Wanted, u undo) (problems []error) {
	have := w.Contents
	try := func(err error) {
		if err != nil {
			problems = append(problems, err)
		}
	}
	try(u.keep())
	want := have
	want.Ports = portTable(bs, d.isTarget)
	try(d.run(g, tables.Changes(have, want)))
	gone := d.surplus(bs)
	safe := true
	for _, k := range gone {
		err := d.detachOne(k)
		safe = safe && err == nil
		try(err)
	}
	now := have
	now.Ports, now.Proxies = map[uint32]abi.Port{}, map[uint32]abi.Proxy{}
	try(readMap(g, tables.MapPorts, now.Ports))
	try(readMap(g, tables.MapProxies, now.Proxies))
	try(d.run(g, tables.LeftBehind(now, want)))
	if len(gone) > 0 {
		try(g.flushNexthops()) // ways out through them
	}
	try(d.removeOthers(g))
	try(d.tidy(g, w, safe))
	if safe {
		d.saved = newSaved(w.Hops)
	}
	d.counting = w.Numbers
	d.settled = want
	return problems
}
