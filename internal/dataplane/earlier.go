package dataplane

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// A node counts by SID. Where a path gets other SIDs while the node keeps its role in it, as behind a change of the chain's functions, the
// counts of the earlier SIDs are added to those of the later ones, so that a chain's sum does not go down.

// pathRole is a node's role in a path, whatever its SID.
type pathRole struct {
	role     Role
	path     uint32
	function string
}

// earlier are the counts of SIDs that were given up, by the roles that the plan in force still has.
type earlier struct {
	stats uint32 // id of the map in which later SIDs are counted: in another one, all counters begin anew
	of    map[pathRole]abi.Stats
}

// earlierEntry is one of them on disk. Map ids are the kernel's until the next boot.
type earlierEntry struct {
	Stats    uint32 `json:"stats"`
	Boot     string `json:"boot"`
	Role     Role   `json:"role"`
	Path     string `json:"path"` // 0x and eight digits
	Function string `json:"function,omitempty"`
	Packets  uint64 `json:"packets"`
	Frames   uint64 `json:"frames"`
	Bytes    uint64 `json:"bytes"`
}

func earlierRecord(stateDir string) record[earlierEntry] {
	return record[earlierEntry]{filepath.Join(stateDir, "earlier-counts.json"), "counts of SIDs that were given up", 1}
}

func addStats(a, b abi.Stats) abi.Stats {
	return abi.Stats{Packets: a.Packets + b.Packets, Frames: a.Frames + b.Frames, Bytes: a.Bytes + b.Bytes}
}

// eachRole calls f with a node's roles at SIDs; with several epochs several times.
func eachRole(n *plan.Node, f func(tables.StatsKey, pathRole)) {
	for i := range n.Endpoints {
		e := &n.Endpoints[i]
		f(tables.StatsKey{Sid: tables.Upper(e.SID), Path: abi.BE32(e.Path)}, pathRole{RoleEndpoint, e.Path, e.Function})
	}
	for i := range n.Egresses {
		e := &n.Egresses[i]
		f(tables.StatsKey{Sid: tables.Upper(e.SID), Path: abi.BE32(e.Path)}, pathRole{RoleEgress, e.Path, ""})
	}
}

// leaving are the counts of SIDs that a plan gives up, of roles that it keeps.
func (d *Dataplane) leaving(n *plan.Node) (map[pathRole]abi.Stats, error) {
	if d.gen == nil || d.node == nil {
		return nil, nil
	}
	stays, roles := map[tables.StatsKey]bool{}, map[pathRole]bool{}
	eachRole(n, func(k tables.StatsKey, r pathRole) { stays[k], roles[r] = true, true })
	gone := map[tables.StatsKey]pathRole{}
	eachRole(d.node, func(k tables.StatsKey, r pathRole) {
		if !stays[k] && roles[r] {
			gone[k] = r
		}
	})
	if len(gone) == 0 {
		return nil, nil
	}
	if _, err := d.earlierNow(); err != nil { // of the map that the change may replace
		return nil, err
	}
	index, err := d.statsIndexes()
	if err != nil {
		return nil, err
	}
	out := map[pathRole]abi.Stats{}
	for k, r := range gone {
		i, ok := index[k]
		if !ok {
			continue
		}
		s, err := d.gen.readStats(i)
		if err != nil {
			return nil, err
		}
		out[r] = addStats(out[r], s)
	}
	return out, nil
}

// statsIndexes are the places of counters in their map.
func (d *Dataplane) statsIndexes() (map[tables.StatsKey]uint32, error) {
	if f := d.force; f != nil && f.gen == d.gen {
		return f.indexes.Stats.Have, nil
	}
	have := tables.New()
	if err := readHeadends(d.gen, have.Headends); err != nil {
		return nil, err
	}
	if err := d.gen.readHops(have.Hops); err != nil {
		return nil, err
	}
	return tables.RecoverIndexes(have, d.gen.limits, tables.Placed{}).Stats.Have, nil
}

// readStats is a counter, of all CPUs together.
func (g *generation) readStats(i uint32) (sum abi.Stats, err error) {
	var each []abi.Stats
	if err := g.maps[tables.MapStats].Lookup(i, &each); err != nil {
		return sum, fmt.Errorf("read entry %d of map %s: %w", i, tables.MapStats, err)
	}
	for _, s := range each {
		sum = addStats(sum, s)
	}
	return sum, nil
}

// earlierNow are the counts of SIDs that were given up, as this process knows them or the disk has them.
func (d *Dataplane) earlierNow() (*earlier, error) {
	id, err := mapID(d.gen.maps[tables.MapStats])
	if err != nil {
		return nil, err
	}
	if d.earlier != nil && d.earlier.stats == id {
		return d.earlier, nil
	}
	e := &earlier{stats: id, of: map[pathRole]abi.Stats{}}
	if d.earlier == nil && d.cfg.StateDir != "" {
		r := earlierRecord(d.cfg.StateDir)
		boot, err := bootID()
		if err != nil {
			return nil, err
		}
		entries, err := r.read()
		if err != nil { // the next one replaces it
			d.cfg.Log.Warn("counts of SIDs that were given up are lost, and the counters of their chains go down", "file", r.path, "err", err)
			entries = nil
		}
		for _, x := range entries {
			if path, err := parsePath(x.Path); err == nil && x.Stats == id && x.Boot == boot {
				e.of[pathRole{x.Role, path, x.Function}] = abi.Stats{Packets: x.Packets, Frames: x.Frames, Bytes: x.Bytes}
			}
		}
	}
	d.earlier = e
	return e, nil
}

// keepEarlier adds what has left to the counts of before, and forgets roles that the plan in force has not.
func (d *Dataplane) keepEarlier(n *plan.Node, left map[pathRole]abi.Stats) error {
	var before uint32
	if d.earlier != nil {
		before = d.earlier.stats
	}
	e, err := d.earlierNow()
	if err != nil {
		return err
	}
	changed := false
	if before == 0 || before == e.stats { // else all counters have begun anew
		for r, s := range left {
			if s != (abi.Stats{}) {
				e.of[r], changed = addStats(e.of[r], s), true
			}
		}
	}
	if len(e.of) > 0 {
		roles := map[pathRole]bool{}
		eachRole(n, func(_ tables.StatsKey, r pathRole) { roles[r] = true })
		maps.DeleteFunc(e.of, func(r pathRole, _ abi.Stats) bool {
			changed = changed || !roles[r]
			return !roles[r]
		})
	}
	if !changed || d.cfg.StateDir == "" {
		return nil
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	var entries []earlierEntry
	for r, s := range e.of {
		entries = append(entries, earlierEntry{e.stats, boot, r.role, pathText(r.path), r.function, s.Packets, s.Frames, s.Bytes})
	}
	slices.SortFunc(entries, func(a, b earlierEntry) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Role, b.Role), cmp.Compare(a.Function, b.Function))
	})
	return earlierRecord(d.cfg.StateDir).replace(entries)
}
