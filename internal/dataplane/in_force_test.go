package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// turning is a node on whose paths epochs come and go, as a controller lets them.
type turning struct {
	plan.Node
	random *rand.Rand
	epochs map[uint32][]uint8 // by path; headends send the last but one, or the only one
	sid    map[uint32]int
}

const turningPaths = 12

func newTurning(seed uint64) *turning {
	w := &turning{Node: bedNode(), random: rand.New(rand.NewPCG(seed, 1)), epochs: map[uint32][]uint8{}, sid: map[uint32]int{}}
	for path := range uint32(turningPaths) {
		w.epochs[path+1], w.sid[path+1] = []uint8{1}, int(path)
	}
	w.build()
	return w
}

// build makes the plan: paths are begun at the node, pass it, or end at it in turn.
func (w *turning) build() {
	w.Headends, w.Endpoints, w.Egresses = nil, nil, nil
	for _, path := range slices.Sorted(maps.Keys(w.epochs)) {
		epochs := w.epochs[path]
		match := model.Match{Destination: xtest.Prefix(fmt.Sprintf("2001:db8:%x::/48", path))}
		sources := xtest.Sources
		if path%4 == 0 {
			sources = append(slices.Clone(sources), xtest.Addr("fc00:1::8"))
		}
		for i, epoch := range epochs {
			switch path % 3 {
			case 0:
				if i == max(0, len(epochs)-2) {
					w.Headends = append(w.Headends, xtest.HeadendOf(path, epoch, model.SchemeKeyed, match, 3))
				}
			case 1:
				e := xtest.EndpointOf(path, epoch, model.SchemeKeyed, xtest.OwnSID(w.sid[path]))
				e.Sources = sources
				w.Endpoints = append(w.Endpoints, e)
			default:
				e := xtest.EgressOf(path, epoch, model.SchemeKeyed, match, xtest.OwnSID(w.sid[path]), 2)
				e.Sources, e.Lanes = sources, uint16(1+path%3)
				w.Egresses = append(w.Egresses, e)
			}
		}
	}
	if w.random.IntN(4) == 0 { // the order means nothing
		w.random.Shuffle(len(w.Endpoints), func(i, j int) { w.Endpoints[i], w.Endpoints[j] = w.Endpoints[j], w.Endpoints[i] })
		w.random.Shuffle(len(w.Egresses), func(i, j int) { w.Egresses[i], w.Egresses[j] = w.Egresses[j], w.Egresses[i] })
	}
}

// next is the plan after a change. part: it is one of epochs alone.
func (w *turning) next() (n plan.Node, part bool) {
	part = true
	changed := map[uint32]bool{} // a path in one step at a time: one of its epochs stays
	for range 1 + w.random.IntN(3) {
		paths := slices.Sorted(maps.Keys(w.epochs))
		path := paths[w.random.IntN(len(paths))]
		if changed[path] {
			continue
		}
		changed[path] = true
		switch what := w.random.IntN(20); {
		case what == 0 && len(paths) > 6:
			delete(w.epochs, path)
			part = false
		case what == 1 && len(paths) < turningPaths:
			for w.epochs[path] != nil {
				path = 1 + w.random.Uint32N(turningPaths)
			}
			if changed[path] {
				continue
			}
			changed[path] = true
			w.epochs[path] = []uint8{1}
			part = false
		case len(w.epochs[path]) > 1 && w.random.IntN(2) == 0:
			w.epochs[path] = w.epochs[path][1:]
		case len(w.epochs[path]) < 3:
			last := w.epochs[path][len(w.epochs[path])-1]
			w.epochs[path] = append(slices.Clone(w.epochs[path]), last+1)
		}
	}
	w.build()
	return w.Node, part
}

// The maps after changes of parts are those that the whole plan makes, and this process knows them.
func TestPartsMakeTheSameAsTheWholePlan(t *testing.T) {
	b := newBed(t)
	d := b.open()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	w := newTurning(seed)
	b.must(b.apply(d, w.Node))
	parts := 0
	for step := range 60 {
		if step%20 == 19 {
			b.must(b.do(d.Reconcile))
		}
		held, ways := d.force, waysOf(b, d)
		is := w.Node
		n, part := w.next()
		b.must(b.apply(d, n))
		if part && !sameEntries(is, n) {
			parts++
			if d.force != held {
				t.Fatalf("step %d: a change of epochs alone was a change of the whole", step)
			}
			if now := waysOf(b, d); now != ways {
				t.Fatalf("step %d: a change of epochs alone has made the ways out void", step)
			}
		}
		b.asWhole(d, n, fmt.Sprintf("step %d", step))
	}
	if parts < 30 {
		t.Errorf("%d of 60 changes were of epochs alone", parts)
	}
}

// sameEntries: the plans differ in their order at most.
func sameEntries(a, b plan.Node) bool {
	has := func(n plan.Node) map[plan.PathID]bool {
		ids := map[plan.PathID]bool{}
		for _, h := range n.Headends {
			ids[h.PathID] = true
		}
		for _, e := range n.Endpoints {
			ids[e.PathID] = true
		}
		for _, e := range n.Egresses {
			ids[e.PathID] = true
		}
		return ids
	}
	return maps.Equal(has(a), has(b))
}

func waysOf(b *bed, d *Dataplane) uint32 {
	b.Helper()
	n, err := d.gen.node()
	b.must(err)
	return n.Ways
}

// asWhole compares the kernel with what the whole plan wants there, and what this process believes with the kernel.
func (b *bed) asWhole(d *Dataplane, n plan.Node, when string) {
	b.Helper()
	have, err := d.gen.read()
	b.must(err)
	mem, err := d.memory(d.gen)
	b.must(err)
	defer mem.close()
	want, err := tables.Desire(n, d.wiring(d.topology, d.isTarget), d.local, have, tables.RecoverIndexes(have, d.gen.limits, mem.Placed))
	b.must(err)
	if diff := cmp.Diff(want.Contents, have, cmpopts.EquateEmpty()); diff != "" {
		b.Fatalf("%s: the whole plan would change:\n%s", when, diff)
	}
	if len(want.FreshStats) > 0 || len(want.Windows) != len(mem.Placed.Windows) || len(want.Numbers) != len(mem.Placed.Numbers) {
		b.Fatalf("%s: %d new counters; %d windows of %d, %d slots of numbers of %d", when, len(want.FreshStats), len(mem.Placed.Windows), len(want.Windows), len(mem.Placed.Numbers), len(want.Numbers))
	}
	if diff := cmp.Diff(want.Numbers, d.counting); diff != "" {
		b.Fatalf("%s: numbers are renewed of others:\n%s", when, diff)
	}
	for _, k := range want.Numbers {
		if s := mem.numbers.readNumbers(mem.Placed.Numbers[k]); s.ceiling <= s.start {
			b.Fatalf("%s: %s has no numbers", when, k)
		}
	}
	if diff := cmp.Diff(newSaved(have.Hops).egresses, d.saved.egresses); diff != "" {
		b.Fatalf("%s: windows are saved by other counters:\n%s", when, diff)
	}
	f := d.force
	if f == nil {
		b.Fatalf("%s: it is not known what is in force", when)
	}
	if diff := cmp.Diff(have, f.contents, cmpopts.EquateEmpty()); diff != "" {
		b.Fatalf("%s: believed to be in force:\n%s", when, diff)
	}
	if diff := cmp.Diff(mem.Placed, f.memory.Placed); diff != "" {
		b.Fatalf("%s: believed to be placed:\n%s", when, diff)
	}
	everything := cmp.Options{cmp.Exporter(func(reflect.Type) bool { return true }), cmpopts.EquateEmpty(),
		cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".next" }, cmp.Ignore())} // where to begin to look
	if diff := cmp.Diff(tables.RecoverIndexes(have, d.gen.limits, mem.Placed), f.indexes, everything); diff != "" {
		b.Fatalf("%s: believed to be given out:\n%s", when, diff)
	}
	fresh, err := d.gen.openStores()
	b.must(err)
	if diff := cmp.Diff(fresh.hops.at, f.stores.hops.at) + cmp.Diff(fresh.egresses.at, f.stores.egresses.at) +
		cmp.Diff(fresh.hops.used, f.stores.hops.used) + cmp.Diff(fresh.egresses.used, f.stores.egresses.used); diff != "" {
		b.Fatalf("%s: believed to be in the arrays:\n%s", when, diff)
	}
	before := map[uint32]abi.Place{}
	b.must(readMap(d.gen, tables.MapPlaces, before))
	b.must(fresh.finish())
	after := map[uint32]abi.Place{}
	b.must(readMap(d.gen, tables.MapPlaces, after))
	if diff := cmp.Diff(after, before); diff != "" {
		b.Fatalf("%s: hints differ:\n%s", when, diff)
	}
}

// What fails half-way is taken back, and the change after that is right again.
func TestPartThatFailsIsTakenBack(t *testing.T) {
	b := newBed(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	w := newTurning(seed)
	var breakAt, at int
	b.cfg.before = func(step, what string) error {
		if at++; at == breakAt {
			return errors.New("broken off at " + step + " " + what)
		}
		return nil
	}
	d := b.open()
	b.must(b.apply(d, w.Node))
	for step, broken := 0, 0; broken < 12; step++ {
		is := w.Node
		n, part := w.next()
		if !part {
			b.must(b.apply(d, n))
			continue
		}
		before := b.world()
		at, breakAt = 0, 1+w.random.IntN(4)
		err := b.apply(d, n)
		breakAt = 0
		if _, inForce := errors.AsType[*DegradedError](err); inForce {
			b.must(b.do(d.Reconcile)) // no numbers could be reserved
		} else if err != nil {
			broken++
			if diff := diffWorlds(before, b.world()); diff != "" {
				t.Fatalf("step %d: %v, and it is not taken back:\n%s", step, err, diff)
			}
			b.must(b.apply(d, is))
			b.asWhole(d, is, fmt.Sprintf("step %d, taken back", step))
			b.must(b.apply(d, n))
		}
		b.asWhole(d, n, fmt.Sprintf("step %d", step))
	}
}

// A window that ends is on disk before its memory is given to another, and the windows beside it stay there.
func TestPartSavesTheWindowsThatEnd(t *testing.T) {
	b := newBed(t)
	d := b.open()
	w := newTurning(1)
	w.epochs[2], w.epochs[5] = []uint8{1, 2}, []uint8{1}
	w.build()
	b.must(b.apply(d, w.Node))
	b.must(d.SaveNews())
	key := func(path uint32, epoch uint8) tables.WindowKey {
		for k := range d.force.memory.Placed.Windows {
			if k.Path == abi.BE32(path) && k.Epoch == epoch {
				return k
			}
		}
		t.Fatalf("path %d has no window in epoch %d", path, epoch)
		return tables.WindowKey{}
	}
	ends, stays := key(2, 1), key(5, 1)
	for k, number := range map[tables.WindowKey]uint64{ends: 77, stays: 5} {
		slot := d.force.memory.Placed.Windows[k]
		lanes := make([]uint64, slot.Lanes)
		lanes[0] = number
		d.force.memory.windows.putWords(slot, begin(lanes, slot.Size))
	}
	held := d.force
	w.epochs[2] = []uint8{2}
	w.build()
	b.must(b.apply(d, w.Node))
	if d.force != held {
		t.Fatal("it was a change of the whole")
	}
	record, err := openRecall(b.cfg.StateDir).read()
	b.must(err)
	if got := record[ends].Newest; len(got) == 0 || got[0] != 77 {
		t.Errorf("the window that has ended is on disk as %v; want 77", got)
	}
	b.must(d.SaveWindows())
	w.epochs[2] = []uint8{1, 2} // an old plan comes back
	w.build()
	b.must(b.apply(d, w.Node))
	slot := d.force.memory.Placed.Windows[key(2, 1)]
	if got := newest(d.force.memory.windows.wordsOf(slot), slot.Size); got[0] != 77 {
		t.Errorf("it begins again at %v; want 77", got)
	}
	record, err = openRecall(b.cfg.StateDir).read()
	b.must(err)
	if got := record[stays].Newest; len(got) == 0 || got[0] != 5 {
		t.Errorf("the window beside it is on disk as %v; want 5", got)
	}
}
