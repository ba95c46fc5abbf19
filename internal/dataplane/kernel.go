package dataplane

import (
	"errors"
	"fmt"
	"maps"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
)

// read gives what the maps hold.
func (g *generation) read() (tables, error) {
	t := newTables()
	err := errors.Join(
		readMap(g, tableHops, t.hops),
		readMap(g, tableSIDs, t.sids),
		readMap(g, tableSources, t.sources),
		readMap(g, tableEgresses, t.egresses),
		readHeadends(g, t.headends), readMap(g, tablePaths, t.paths),
		readMap(g, tableMatchDst, t.matchDst),
		readMap(g, tableMatchSrc, t.matchSrc),
		readMap(g, tableGuardDst, t.guardDst),
		readMap(g, tableGuardSrc, t.guardSrc),
		readMap(g, tableLocalDst, t.localDst),
		readMap(g, tableLocalSrc, t.localSrc),
		readMap(g, tableRules, t.rules),
		readMap(g, tablePorts, t.ports),
		readMap(g, tableProxies, t.proxies),
	)
	return t, err
}

// readMap needs that nobody adds or deletes meanwhile: an instance has one
// writer.
func readMap[K comparable, V any](g *generation, t table, into map[K]V) error {
	var k K
	var v V
	it := g.maps[t].Iterate()
	for it.Next(&k, &v) {
		into[k] = v
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("read map %s: %w", t, err)
	}
	return nil
}

// readHeadends reads an array, in which what is not there is zero.
func readHeadends(g *generation, into map[uint32]headend) error {
	err := readMap(g, tableHeadends, into)
	maps.DeleteFunc(into, func(_ uint32, h headend) bool { return h == headend{} })
	return err
}

// run does ops in their order and stops at the first that fails.
func (d *Dataplane) run(g *generation, ops []op) error {
	waited := false
	for _, o := range ops {
		if err := d.cfg.step(stepChange, string(o.table)); err != nil {
			return err
		}
		m := g.maps[o.table]
		if o.remove() {
			if o.table == tableHeadends {
				// A packet may have met the rule that named it just before.
				if !waited {
					if err := waitForPrograms(); err != nil {
						return err
					}
					waited = true
				}
				if err := m.Put(o.key, headend{}); err != nil {
					return fmt.Errorf("clear an entry of map %s: %w", o.table, err)
				}
				continue
			}
			if err := m.Delete(o.key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("delete from map %s: %w", o.table, err)
			}
			continue
		}
		if err := m.Put(o.key, o.value); err != nil {
			return fmt.Errorf("write to map %s: %w", o.table, err)
		}
	}
	return nil
}

// arm tells the programs that the maps hold a whole plan, and where the node's
// cutters are.
func (d *Dataplane) arm(g *generation, n wsNode) error {
	if err := d.cfg.step(stepArm, ""); err != nil {
		return err
	}
	return g.setNode(n)
}

// setNode also makes void what TC remembers of ways out.
func (g *generation) setNode(n wsNode) error {
	now, err := g.node()
	if err != nil {
		return err
	}
	n.Ways = now.Ways + 1
	if err := g.maps[tableNode].Put(uint32(0), n); err != nil {
		return fmt.Errorf("arm the data path: %w", err)
	}
	return nil
}

func (g *generation) node() (n wsNode, err error) {
	if err := g.maps[tableNode].Lookup(uint32(0), &n); err != nil {
		return wsNode{}, fmt.Errorf("read map %s: %w", tableNode, err)
	}
	return n, nil
}

// spentCounters are the counters of headends from which the numbers of some CPU
// will soon be used up, or that have none.
func (g *generation) spentCounters(have tables) (map[uint32]bool, error) {
	spent := map[uint32]bool{}
	for _, h := range have.headends {
		c, err := g.counter(h.Counter)
		if err != nil {
			return nil, err
		}
		for _, cpu := range c {
			// At the end of the lower 42 bits there are no more to be had.
			if cpu.Last+numberReserve > cpu.Ceiling && cpu.Ceiling < abi.RNDCounterMax {
				spent[h.Counter] = true
			}
		}
	}
	return spent, nil
}

func (g *generation) counter(index uint32) ([]counter, error) {
	var c []counter
	if err := g.maps[tableCounters].Lookup(index, &c); err != nil {
		return nil, fmt.Errorf("read counter %d of map %s: %w", index, tableCounters, err)
	}
	return c, nil
}

// ceilings are the highest numbers that headends may have given out, by what is
// in the maps.
func (g *generation) ceilings(have tables) (map[counterKey]uint64, error) {
	out := map[counterKey]uint64{}
	for _, h := range have.headends {
		c, err := g.counter(h.Counter)
		if err != nil {
			return nil, err
		}
		k := counterKey{h.Path, h.Epoch}
		for _, cpu := range c {
			if cpu.Ceiling > 0 { // else it never had any
				out[k] = max(out[k], cpu.Ceiling)
			}
		}
	}
	return out, nil
}

// prepare makes the array entries ready that new entries of other maps will
// name. Those whose numbers could not be had are problems: their headends
// refuse all packets.
func (d *Dataplane) prepare(g *generation, w wanted, floor map[counterKey]uint64) (problems []error, err error) {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, fmt.Errorf("count CPUs: %w", err)
	}
	if err := d.prepareWindows(g, w.windows); err != nil {
		return nil, err
	}
	zero := make([]stats, cpus)
	for _, i := range w.freshStats {
		if err := g.maps[tableStats].Put(i, zero); err != nil {
			return nil, fmt.Errorf("clear entry %d of map %s: %w", i, tableStats, err)
		}
	}
	for _, i := range w.freshProxies {
		if err := g.maps[tableProxyStats].Put(i, make([]proxyStat, cpus)); err != nil {
			return nil, fmt.Errorf("clear entry %d of map %s: %w", i, tableProxyStats, err)
		}
	}
	if len(w.freshCounters) == 0 {
		return nil, nil
	}

	keys := make([]counterKey, 0, len(w.freshCounters))
	for _, k := range w.freshCounters {
		keys = append(keys, k)
	}
	err = d.cfg.step(stepReserve, "")
	var spans map[counterKey]span
	if err == nil {
		spans, err = d.numbers.reserve(keys, floor)
	}
	if err != nil {
		problems = append(problems, fmt.Errorf("%d headend paths refuse all packets: %w", len(keys), err))
	}
	// An entry that is free now may have been another headend's until lately.
	if err := waitForPrograms(); err != nil {
		return nil, err
	}
	for i, k := range w.freshCounters {
		s, ok := spans[k]
		switch {
		case !ok:
			s = noNumbers
		case s.start >= s.ceiling:
			problems = append(problems, fmt.Errorf("path %s, epoch %d has used up its packet numbers: give it a new epoch", pathText(fromBE32(k.path)), k.epoch))
		}
		each := make([]counter, cpus)
		for c := range each {
			each[c] = s.counter()
		}
		if err := d.cfg.step(stepWriteNumber, ""); err != nil {
			return nil, err
		}
		if err := g.maps[tableCounters].Put(i, each); err != nil {
			return nil, fmt.Errorf("write counter %d of map %s: %w", i, tableCounters, err)
		}
	}
	return problems, nil
}

// waitForPrograms returns when every program that was running when it was
// called has ended. The kernel promises that for updates of a map of maps.
func waitForPrograms() error {
	inner := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	outer, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner})
	if err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	defer outer.Close()
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	defer m.Close()
	if err := outer.Put(uint32(0), m); err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	return nil
}

// FlushNexthops makes XDP forget all ways out, for when routes, links or
// neighbours have changed. Packets then take the slow way once.
func (d *Dataplane) FlushNexthops() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil {
		return nil
	}
	return d.gen.flushNexthops()
}

func (g *generation) flushNexthops() error {
	n, err := g.node()
	if err != nil {
		return err
	}
	return g.setNode(n)
}
