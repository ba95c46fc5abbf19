package dataplane

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// Where a path gets other SIDs, a node goes on from the counts of the earlier ones: beside the next epoch, without it, as a part of the plan or as the
// whole, and after a start of the agent. A path that leaves the node takes its counts along.
func TestCountsGoOnWhereSIDsAreGivenUp(t *testing.T) {
	b := newBed(t)
	first := bedNode()
	d := b.open()
	b.must(b.apply(d, first))
	count := func(n plan.Node, packets uint64) { // as the programs do, on each CPU
		t.Helper()
		index, err := d.statsIndexes()
		b.must(err)
		cpus, err := ebpf.PossibleCPU()
		b.must(err)
		for _, k := range []tables.StatsKey{
			{Sid: tables.Upper(n.Endpoints[0].SID), Path: abi.BE32(n.Endpoints[0].Path)}, {Sid: tables.Upper(n.Egresses[0].SID), Path: abi.BE32(n.Egresses[0].Path)},
		} {
			var each []abi.Stats
			b.must(d.gen.maps[tables.MapStats].Lookup(index[k], &each))
			if len(each) != cpus {
				t.Fatalf("counters of %d CPUs, want %d", len(each), cpus)
			}
			each[0].Packets, each[cpus-1].Frames, each[0].Bytes = each[0].Packets+packets, each[cpus-1].Frames+2*packets, each[0].Bytes+100*packets
			b.must(d.gen.maps[tables.MapStats].Put(index[k], each))
		}
	}
	sums := func(when string, want uint64) {
		t.Helper()
		c, err := d.Counters()
		b.must(err)
		got := map[Role]abi.Stats{}
		for _, p := range c.Paths {
			got[p.Role] = addStats(got[p.Role], abi.Stats{Packets: p.Packets, Frames: p.Frames, Bytes: p.Bytes})
		}
		for _, r := range []Role{RoleEndpoint, RoleEgress} {
			if w := (abi.Stats{Packets: want, Frames: 2 * want, Bytes: 100 * want}); got[r] != w {
				t.Errorf("%s, as %s: %+v, want %+v", when, r, got[r], w)
			}
		}
	}
	// moved has other SIDs and the next epoch.
	moved := func(n plan.Node, by int) plan.Node {
		n.Endpoints, n.Egresses = slices.Clone(n.Endpoints), slices.Clone(n.Egresses)
		n.Endpoints[0].SID, n.Egresses[0].SID = xtest.OwnSID(2*by+1), xtest.OwnSID(2*by+2)
		n.Endpoints[0].Epoch += uint8(by)
		n.Egresses[0].Epoch += uint8(by)
		return n
	}
	both := func(a, b plan.Node) plan.Node {
		b.Endpoints, b.Egresses = slices.Concat(a.Endpoints, b.Endpoints), slices.Concat(a.Egresses, b.Egresses)
		return b
	}
	count(first, 5)
	sums("at first", 5)
	second := moved(first, 1)
	held := d.force
	b.must(b.apply(d, both(first, second)))
	count(second, 2)
	sums("with both epochs", 7)
	b.must(b.apply(d, second))
	if d.force != held {
		t.Fatal("the change was one of the whole")
	}
	sums("without the first epoch", 7)
	third := moved(first, 2)
	b.must(b.apply(d, third)) // its counters may get the places of the first ones
	count(third, 1)
	sums("with other SIDs at once", 8)
	fourth := elsewhere(moved(first, 3))
	b.must(b.apply(d, fourth))
	count(fourth, 1)
	sums("with other programs", 9)

	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, fourth))
	sums("after a start", 9)
	if _, err := os.Stat(filepath.Join(b.cfg.StateDir, "earlier-counts.json")); err != nil {
		t.Error(err)
	}
	b.must(d.Close())
	b.must(os.WriteFile(filepath.Join(b.cfg.StateDir, "earlier-counts.json"), []byte("{"), 0o600))
	d = b.open()
	b.must(b.apply(d, fourth))
	sums("after a start with a damaged file", 1)

	fifth := moved(fourth, 1)
	b.must(b.apply(d, fifth))
	sums("with other SIDs again", 1)
	without := fifth
	without.Endpoints, without.Egresses = nil, nil
	b.must(b.apply(d, without))
	b.must(b.apply(d, fifth))
	sums("of a path that had left", 0)
}
