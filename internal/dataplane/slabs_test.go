package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// Windows come and go in any order, and a process may die while it makes or removes
// one: what is in the slabs alone says where the others are, none loses a word to
// another, and what is free is zero.
func TestWindowsInSlabsAreFoundAgain(t *testing.T) {
	in := &slabs{slabKind: windowSlabs()}
	t.Cleanup(func() { in.close() })
	if err := in.grow(3*in.words, Config{}.step); err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		in.clear(0, in.end())
		have := map[tables.WindowKey]tables.WindowSlot{}
		value := func(k tables.WindowKey) uint64 { return uint64(k.Path)<<32 + uint64(k.Epoch)<<16 + k.Secrets + 1 }
		for range rapid.IntRange(1, 30).Draw(t, "changes") {
			k := tables.WindowKey{CounterKey: tables.CounterKey{Path: uint32(rapid.IntRange(1, 3).Draw(t, "path")), Epoch: uint8(rapid.IntRange(0, 1).Draw(t, "epoch"))}, Secrets: uint64(rapid.IntRange(0, 1).Draw(t, "secrets"))}
			w := tables.Window{Key: k, Lanes: rapid.SampledFrom([]int{1, 2, 64, 300, 1500}).Draw(t, "lanes"), Size: rapid.SampledFrom([]int{64, 128, 1024}).Draw(t, "size")}
			old, there := have[k]
			at, err := tables.NewWindowSpace(have).Get(w)
			switch {
			case there && old.Window != w:
				if err == nil {
					t.Fatalf("%s takes another shape", w)
				}
				continue
			case err != nil:
				t.Fatal(err)
			case there && int(at) != old.At:
				t.Fatalf("%s is at %d, and was at %d", w, at, old.At)
			}
			if there {
				in.freeWindow(old)
				delete(have, k)
			} else if slot := (tables.WindowSlot{Window: w, At: int(at)}); slot.End() <= in.end() {
				for i := slot.Head(); i < slot.End(); i++ {
					if v := in.word(i).Load(); v != 0 {
						t.Fatalf("word %d is free, and %#x", i, v)
					}
				}
				in.makeWindow(slot, slices.Repeat([]uint64{value(k)}, w.Words()))
				if rapid.IntRange(0, 4).Draw(t, "dies") == 0 {
					in.word(slot.Head()).Store(windowMark(w, windowHalf))
				} else {
					have[k] = slot
				}
			}
			found, err := in.readWindows()
			if err != nil {
				t.Fatal(err)
			}
			if !maps.Equal(found, have) {
				t.Fatalf("found %v, want %v", found, have)
			}
		}
		for k, w := range have {
			for i, v := range in.wordsOf(w) {
				if v != value(k) {
					t.Fatalf("word %d of %s is %#x", i, w, v)
				}
			}
		}
	})
}

func TestDamagedSlabIsRefused(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	mem, err := d.memory()
	b.must(err)
	var w tables.WindowSlot
	for _, w = range mem.Placed.Windows {
	}
	for _, x := range []struct {
		what  string
		at    int
		value uint64
	}{
		{"what is no head", w.End(), 1},
		{"a head that goes on behind the slabs", w.End(), windowMark(tables.Window{Lanes: 4000, Size: 65536}, windowWhole)},
		{"a head without a state", w.End(), windowMark(tables.Window{Lanes: 1, Size: 64}, 0)},
	} {
		mem.windows.word(x.at).Store(x.value)
		if err := b.do(d.Reconcile); err == nil || !strings.Contains(err.Error(), "damaged") {
			t.Errorf("%s: got %v; want an error that says so", x.what, err)
		}
		mem.windows.word(x.at).Store(0)
	}
	b.must(mem.close())
	b.must(b.do(d.Reconcile))
}

// A window larger than a slab, beside another: a lane counts where it should, in
// whichever slab, and what has no lane counts nowhere, though there are words.
func TestWindowMayLieInSeveralSlabs(t *testing.T) {
	const lanes, size = 600, 1024 // a slab and a sixth
	r := newReplayRig(t, model.SchemeKeyed, size)
	n := r.node.Node
	n.Egresses = slices.Clone(n.Egresses)
	n.Egresses[0].Lanes = lanes
	e := xtest.EgressOf(2, 1, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db9::/32")}, xtest.OwnSID(2), 2)
	e.Lanes, e.Window = 64, size
	n.Egresses = append(n.Egresses, e)
	r.must(r.apply(&n))
	if w := r.windows[r.key()]; w.At/abi.WindowSlab == (w.End()-1)/abi.WindowSlab {
		t.Fatalf("the window is in one slab: %+v", w)
	}
	border := (abi.WindowSlab - r.windows[r.key()].At) / (size / 4)
	r.must(r.in(func() error {
		for _, x := range []struct {
			lane int
			want string
		}{{0, "NONE"}, {border - 1, "NONE"}, {border, "NONE"}, {border + 1, "NONE"}, {lanes - 1, "NONE"}, {lanes, "NUMBER"}, {4095, "NUMBER"}} {
			for i, c := range []uint64{1, 500, 1023, 1} {
				want := x.want
				if i == 3 && want == "NONE" {
					want = "REPLAY"
				}
				got, err := r.offer(r.frame(numberOf(x.lane, 1, c)), i%2 == 0)
				if err != nil {
					return err
				}
				if got != want {
					return fmt.Errorf("lane %d, number %d: %s, want %s", x.lane, c, got, want)
				}
			}
		}
		return nil
	}))
	for k, w := range r.windows {
		spent := 0
		for _, v := range r.mem.windows.wordsOf(w) {
			if v != 0 {
				spent++
			}
		}
		if want := map[bool]int{true: 15, false: 0}[k == r.key()]; spent != want {
			t.Errorf("%d words of the %s are spent, want %d", spent, w, want)
		}
	}
}

// While programs count on two CPUs, their ceiling rises, over and over: no number
// is lost, none comes twice.
func TestCeilingRisesWhileProgramsCount(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	slot := one(t, b.world().Maps[0].Headends).Counter
	mem, err := d.memory()
	b.must(err)
	defer mem.close()
	const packets = 20000
	var running atomic.Int32
	running.Store(2)
	errs := make([]error, 2)
	var wg sync.WaitGroup
	for cpu := range 2 {
		wg.Go(func() {
			defer running.Add(-1)
			errs[cpu] = onCPU(b.net.NetNS(), cpu, func() error {
				_, err := d.program(object.EdgeTC).Run(&ebpf.RunOptions{
					Data: plainPacket("fd00::1", "2001:db8:1::1"), DataOut: make([]byte, 500), Repeat: 1,
				})
				for range packets - 1 {
					if err == nil {
						_, err = d.program(object.EdgeTC).Run(&ebpf.RunOptions{Data: plainPacket("fd00::1", "2001:db8:1::1"), DataOut: make([]byte, 500)})
					}
				}
				return err
			})
		})
	}
	raised := uint64(0)
	for running.Load() > 0 {
		raised++
		mem.numbers.putCeiling(slot, numbersLeast+raised)
	}
	wg.Wait()
	b.must(errors.Join(errs...))
	for cpu := range 2 {
		at := mem.numbers.numberWord(slot, cpu+1)
		if got := mem.numbers.word(at).Load(); got != packets {
			t.Errorf("CPU %d is at number %d after %d packets", cpu, got, packets)
		}
	}
	if got := mem.numbers.readNumbers(slot).ceiling; got != numbersLeast+raised {
		t.Errorf("the ceiling is %d, want %d", got, numbersLeast+raised)
	}
}

// Two paths' windows and numbers never share a slot, and a slot that has become
// another's shows nothing of before.
func TestSlotOfAPathThatIsGoneIsAnothersAsNew(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	d := b.open()
	b.must(b.apply(d, n))
	if got := b.offer(d, n, 900); !accepted(got) {
		t.Fatalf("number 900: %s", got)
	}
	b.wantNumber(d, "at first", 1)
	first := one(t, b.world().Maps[0].Egresses)

	without := n
	without.Egresses, without.Headends = nil, nil
	b.must(b.apply(d, without))
	other := n
	other.Egresses, other.Headends = slices.Clone(n.Egresses), slices.Clone(n.Headends)
	other.Egresses[0].Path, other.Headends[0].Path = 33, 31
	b.must(b.apply(d, other))
	second := one(t, b.world().Maps[0].Egresses)
	if first.Window != second.Window {
		t.Fatalf("windows at %d and %d; want the same words", first.Window, second.Window)
	}
	if got := b.offer(d, other, 3); !accepted(got) {
		t.Errorf("number 3 of another path: %s", got)
	}
	b.wantNumber(d, "of another path", 1)
}

// A program that could not be taken off an interface may still count in a window:
// it stays.
func TestWindowStaysWhileAProgramOfBeforeDoes(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	broken := errors.New("broken off by the test")
	fail := false
	b.cfg.before = func(step, _ string) error {
		if fail && step == stepLinkDetach {
			return broken
		}
		return nil
	}
	d := b.open()
	b.must(b.apply(d, n))
	left := func() int {
		mem, err := d.memory()
		b.must(err)
		defer mem.close()
		return len(mem.Placed.Windows)
	}
	without := elsewhere(otherNode())
	without.Egresses = nil
	fail = true
	if err := b.apply(d, without); !errors.Is(err, broken) {
		t.Fatalf("got %v; want the test's error", err)
	}
	if left() != 1 {
		t.Error("the window of a path that is gone is gone, too")
	}
	fail = false
	b.must(b.do(d.Reconcile))
	if left() != 0 {
		t.Error("the window stays")
	}
}

// A slab says who made it, in the kernel's memory: what another version means by its
// words is not guessed, and the message names the slab and the way out.
func TestSlabOfAnotherVersionIsRefused(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	mem, err := d.memory()
	b.must(err)
	defer mem.close()
	for _, s := range []*slabs{mem.windows, mem.numbers} {
		for _, x := range []struct {
			what string
			word int
			says string
		}{
			{"magic", 0, "as no waystamp does"},
			{"version", 1, "has version 2, and this waystamp reads version 1"},
			{"boot", 3, "another boot"},
			{"the rest", slabHeader - 1, "another boot"},
		} {
			word := &s.all[0].words[s.words+x.word]
			was := word.Load()
			word.Store(was + 1)
			err := b.do(d.Reconcile)
			if err == nil || !strings.Contains(err.Error(), "open the "+s.what+": slab 0 ") || !strings.Contains(err.Error(), x.says) || !strings.Contains(err.Error(), "--detach") {
				t.Errorf("%s of the %s: got %v; want an error that says %q, and what to do", x.what, s.what, err, x.says)
			}
			word.Store(was)
		}
	}
	b.must(b.do(d.Reconcile))
}
