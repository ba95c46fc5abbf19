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
	for use, to := range map[abi.MatchUse]struct {
		dst *map[dstKey]match
		src *map[srcKey]match
	}{
		abi.MatchUseSteer: {&t.matchDst, &t.matchSrc}, abi.MatchUseRequire: {&t.guardDst, &t.guardSrc}, abi.MatchUseLocal: {&t.localDst, &t.localSrc},
	} {
		var p prefixes
		if err := g.readPrefixes(use, &p); err != nil {
			return tables{}, err
		}
		*to.dst, *to.src = p.dst, p.src
	}
	err := errors.Join(
		g.readHops(t.hops),
		readMap(g, tableSIDs, t.sids),
		readMap(g, tableSources, t.sources),
		g.readEgresses(t.egresses),
		readHeadends(g, t.headends), readMap(g, tablePaths, t.paths),
		readRules(g, t.rules),
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
func readHeadends(g *generation, into map[uint32]abi.Headend) error {
	err := readMap(g, tableHeadends, into)
	maps.DeleteFunc(into, func(_ uint32, h abi.Headend) bool { return h == abi.Headend{} })
	return err
}

// run does ops in their order and stops at the first that fails.
func (d *Dataplane) run(g *generation, ops []op) (err error) {
	waited := false
	var in *stores
	defer func() {
		if in != nil {
			err = errors.Join(err, in.finish())
		}
	}()
	for _, o := range ops {
		if err := d.cfg.step(stepChange, string(o.table)); err != nil {
			return err
		}
		if o.table == tableHops || o.table == tableEgresses {
			if in == nil {
				if in, err = g.openStores(); err != nil {
					return err
				}
			}
			if err := in.do(o); err != nil {
				return err
			}
			continue
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
				if err := m.Put(o.key, abi.Headend{}); err != nil {
					return fmt.Errorf("clear an entry of map %s: %w", o.table, err)
				}
				continue
			}
			if err := m.Delete(o.key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("delete from map %s: %w", o.table, err)
			}
			continue
		}
		if o.table == tableRules {
			if err := g.putRules(o.value.(*abi.Ruleset)); err != nil {
				return err
			}
			continue
		}
		if o.table == tableMatch {
			if err := putPrefixes(m, g.limits.lines, *o.key.(*uint32), *o.value.(*prefixes)); err != nil {
				return err
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
func (d *Dataplane) arm(g *generation, n abi.Node) error {
	if err := d.cfg.step(stepArm, ""); err != nil {
		return err
	}
	return g.setNode(n)
}

// setNode also makes void what TC remembers of ways out.
func (g *generation) setNode(n abi.Node) error {
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

func (g *generation) node() (n abi.Node, err error) {
	if err := g.maps[tableNode].Lookup(uint32(0), &n); err != nil {
		return abi.Node{}, fmt.Errorf("read map %s: %w", tableNode, err)
	}
	return n, nil
}

// prepare makes the array entries ready that new entries of other maps will
// name. Those whose numbers could not be had are problems: their headends
// refuse all packets.
func (d *Dataplane) prepare(g *generation, mem *memory, w wanted) (problems []error, err error) {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, fmt.Errorf("count CPUs: %w", err)
	}
	if err := d.prepareMemory(g, mem, w); err != nil {
		return nil, err
	}
	zero := make([]abi.Stats, cpus)
	for _, i := range w.freshStats {
		if err := g.maps[tableStats].Put(i, zero); err != nil {
			return nil, fmt.Errorf("clear entry %d of map %s: %w", i, tableStats, err)
		}
	}
	for _, i := range w.freshProxies {
		if err := g.maps[tableProxyStats].Put(i, make([]abi.ProxyStats, cpus)); err != nil {
			return nil, fmt.Errorf("clear entry %d of map %s: %w", i, tableProxyStats, err)
		}
	}
	return d.raiseNumbers(mem.numbers, w.numbers, true)
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
