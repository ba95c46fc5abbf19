package dataplane

import (
	"errors"
	"fmt"
	"maps"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

// read returns the content of the maps.
func (g *generation) read() (tables.Contents, error) {
	t := tables.New()
	for use, to := range map[abi.MatchUse]struct {
		dst *map[tables.DstKey]tables.Match
		src *map[tables.SrcKey]tables.Match
	}{
		abi.MatchUseSteer: {&t.MatchDst, &t.MatchSrc}, abi.MatchUseRequire: {&t.GuardDst, &t.GuardSrc}, abi.MatchUseLocal: {&t.LocalDst, &t.LocalSrc},
	} {
		var p tables.Prefixes
		if err := g.readPrefixes(use, &p); err != nil {
			return tables.Contents{}, err
		}
		*to.dst, *to.src = p.Dst, p.Src
	}
	for o := uint8(1); o <= abi.OriginsMax; o++ {
		var p tables.Prefixes
		err := g.readPrefixes(abi.MatchUse(abi.MatchOrigin-1+o), &p)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue
		}
		if err != nil {
			return tables.Contents{}, err
		}
		t.Origins[o] = p
	}
	err := errors.Join(
		g.readHops(t.Hops),
		readMap(g, tables.MapSIDs, t.Sids),
		readMap(g, tables.MapSources, t.Sources),
		g.readEgresses(t.Egresses),
		readHeadends(g, t.Headends), readMap(g, tables.MapPaths, t.Paths),
		readMap(g, tables.MapGuards, t.Guards),
		readMap(g, tables.MapStreams, t.Streams),
		readMap(g, tables.MapServices, t.Services),
		readMap(g, tables.MapLabels, t.Labels),
		readRules(g, t.Rules),
		readMap(g, tables.MapPorts, t.Ports),
		readMap(g, tables.MapProxies, t.Proxies),
	)
	return t, err
}

// readMap requires that no process adds or deletes at the same time: an instance has one writer.
func readMap[K comparable, V any](g *generation, t tables.Map, into map[K]V) error {
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

// readHeadends reads an array, in which missing entries are zero. Traces are no part of a plan.
func readHeadends(g *generation, into map[uint32]abi.Headend) error {
	err := readMap(g, tables.MapHeadends, into)
	for i, h := range into {
		if h.Trace != 0 {
			h.Trace = 0
			into[i] = h
		}
	}
	maps.DeleteFunc(into, func(_ uint32, h abi.Headend) bool { return h == abi.Headend{} })
	return err
}

// run does ops in their order and stops at the first that fails.
func (d *Dataplane) run(g *generation, ops []tables.Op) error { return d.runIn(g, nil, ops) }

// runIn is run with stores that are open already; nil: it opens them if it needs them.
func (d *Dataplane) runIn(g *generation, in *stores, ops []tables.Op) (err error) {
	waited := false
	defer func() {
		if in != nil {
			err = errors.Join(err, in.finish())
		}
	}()
	for _, o := range ops {
		if err := d.cfg.step(stepChange, string(o.Table)); err != nil {
			return err
		}
		if o.Table == tables.MapHops || o.Table == tables.MapEgresses {
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
		m := g.maps[o.Table]
		if o.Remove() {
			if o.Table == tables.MapHeadends {
				// A packet may have met the rule that named it just before.
				if !waited {
					if err := waitForPrograms(); err != nil {
						return err
					}
					waited = true
				}
				if err := m.Put(o.Key, abi.Headend{}); err != nil {
					return fmt.Errorf("clear an entry of map %s: %w", o.Table, err)
				}
				continue
			}
			if err := m.Delete(o.Key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("delete from map %s: %w", o.Table, err)
			}
			continue
		}
		if o.Table == tables.MapRules {
			if err := g.putRules(o.Value.(*abi.Ruleset)); err != nil {
				return err
			}
			continue
		}
		if o.Table == tables.MapMatch {
			if err := g.putPrefixes(abi.MatchUse(*o.Key.(*uint32)), *o.Value.(*tables.Prefixes)); err != nil {
				return err
			}
			continue
		}
		if err := m.Put(o.Key, o.Value); err != nil {
			return fmt.Errorf("write to map %s: %w", o.Table, err)
		}
	}
	return nil
}

// arm tells the programs that the maps have a complete plan, and sets the node's cutters.
func (d *Dataplane) arm(g *generation, n abi.Node) error {
	if err := d.cfg.step(stepArm, ""); err != nil {
		return err
	}
	return g.setNode(n)
}

// setNode also makes the next hops that TC remembers void.
func (g *generation) setNode(n abi.Node) error {
	now, err := g.node()
	if err != nil {
		return err
	}
	n.Ways = now.Ways + 1
	if err := g.maps[tables.MapNode].Put(uint32(0), n); err != nil {
		return fmt.Errorf("arm the data path: %w", err)
	}
	return nil
}

func (g *generation) node() (n abi.Node, err error) {
	if err := g.maps[tables.MapNode].Lookup(uint32(0), &n); err != nil {
		return abi.Node{}, fmt.Errorf("read map %s: %w", tables.MapNode, err)
	}
	return n, nil
}

// prepare writes the array entries that new entries of other maps will name. Headends without
// numbers are problems: they refuse all packets.
func (d *Dataplane) prepare(g *generation, mem *memory, w tables.Wanted) (problems []error, err error) {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, fmt.Errorf("count CPUs: %w", err)
	}
	if err := d.prepareMemory(g, mem, w); err != nil {
		return nil, err
	}
	zero := make([]abi.Stats, cpus)
	for _, i := range w.FreshStats {
		if err := g.maps[tables.MapStats].Put(i, zero); err != nil {
			return nil, fmt.Errorf("clear entry %d of map %s: %w", i, tables.MapStats, err)
		}
	}
	for _, i := range w.FreshProxies {
		if err := g.maps[tables.MapProxyStats].Put(i, make([]abi.ProxyStats, cpus)); err != nil {
			return nil, fmt.Errorf("clear entry %d of map %s: %w", i, tables.MapProxyStats, err)
		}
		var added uint64
		if err := g.maps[tables.MapConnsAdded].Lookup(i, &added); err != nil {
			return nil, fmt.Errorf("read entry %d of map %s: %w", i, tables.MapConnsAdded, err)
		}
		if err := g.maps[tables.MapConnsGone].Put(i, added); err != nil {
			return nil, fmt.Errorf("clear entry %d of map %s: %w", i, tables.MapConnsGone, err)
		}
	}
	return d.raiseNumbers(mem.numbers, w.Numbers, true)
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
