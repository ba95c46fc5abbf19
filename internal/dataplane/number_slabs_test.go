package dataplane

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// onCPU runs f in a namespace on one CPU. Each counts by itself.
func onCPU(ns *host.NetNS, cpu int, f func() error) error {
	return ns.Do(func() error { return host.OnCPU(cpu, f) })
}

// numberBy is the number of the packet that a headend's program makes of one of
// path 1, without the lane; 0: it makes none.
func (b *bed) numberBy(p *ebpf.Program) uint64 {
	b.Helper()
	frame := plainPacket("fd00::1", "2001:db8:1::1")
	out := make([]byte, len(frame)+512)
	opts := ebpf.RunOptions{Data: frame, DataOut: out}
	b.must(onCPU(b.net.NetNS(), 0, func() error {
		_, err := p.Run(&opts)
		return err
	}))
	got, err := srv6.DecodeFrame(opts.DataOut)
	b.must(err)
	if got.SRH == nil {
		return 0
	}
	proof, err := got.SRH.Proof()
	b.must(err)
	return proof.RND & abi.RNDCounterMax
}

func (b *bed) number(d *Dataplane) uint64 { return b.numberBy(d.program(object.EdgeTC)) }

func (b *bed) wantNumber(d *Dataplane, when string, want uint64) {
	b.Helper()
	if got := b.number(d); got != want {
		b.Errorf("%s: a packet has number %d, want %d", when, got, want)
	}
}

// Another process, other programs, larger arrays, a pin that is gone: numbers go
// on. Only a reboot leaves a gap, as large as what was given ahead.
func TestNumbersGoOn(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	d := b.open()
	b.must(b.apply(d, n))
	b.wantNumber(d, "at first", 1)
	b.wantNumber(d, "then", 2)

	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, n))
	b.wantNumber(d, "after a restart", 3)

	b.must(b.apply(d, elsewhere(n)))
	b.wantNumber(d, "by other programs", 4)
	b.must(b.apply(d, n))
	b.wantNumber(d, "by the first ones again", 5)

	// Nothing of the generation is left but its links: as after an upgrade of
	// waystamp, whose maps nobody can read.
	b.must(d.Close())
	whole, _, err := generationDirs(b.dir())
	b.must(err)
	b.must(os.RemoveAll(filepath.Join(b.dir(), whole[0])))
	d = b.open()
	if d.gen != nil {
		t.Fatal("the generation is still there")
	}
	b.must(b.apply(d, n))
	b.wantNumber(d, "after an upgrade", 6)

	b.must(os.RemoveAll(numbersDir(b.dir())))
	b.must(b.do(d.Reconcile))
	b.wantNumber(d, "without its pin", 7)
	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, n))
	b.wantNumber(d, "with its pin again", 8)

	// Without the path, and with it again: what was not used was given back.
	without := n
	without.Headends = nil
	b.must(b.apply(d, without))
	if left, err := os.ReadDir(numbersDir(b.dir())); err != nil || len(left) != 0 {
		t.Errorf("numbers %v, %v are left of a path that is gone", left, err)
	}
	b.must(b.apply(d, n))
	b.wantNumber(d, "after the path came back", 9)

	// A reboot.
	b.must(d.Close())
	off := b.cfg
	off.StateDir = ""
	_, err = b.detach(off)
	b.must(err)
	d = b.open()
	b.must(b.apply(d, n))
	b.wantNumber(d, "after a reboot", 8+numbersLeast+1)
	b.must(d.Close())
	_, err = b.detach(b.cfg)
	b.must(err)
	d = b.open()
	b.must(b.apply(d, n))
	b.wantNumber(d, "after it was detached", 8+numbersLeast+2)
}

// While links are moved to new programs, old and new ones count in turn. An
// egress with the smallest window accepts all of it.
func TestUpgradeMakesNoPacketStale(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	// A chain from this node to itself.
	n.Egresses = []plan.Egress{xtest.EgressOf(3, 0, n.Egresses[0].Scheme, n.Egresses[0].Match, xtest.OwnSID(2), 2)}
	n.Egresses[0].Window = abi.WindowMin
	var old *ebpf.Program
	var d *Dataplane
	var numbers []uint64
	moved := 0
	b.cfg.before = func(step, _ string) error {
		if step != stepLinkUpdate || old == nil {
			return nil
		}
		moved++
		for range 50 {
			for _, p := range []*ebpf.Program{old, d.program(object.EdgeTC)} {
				numbers = append(numbers, b.numberBy(p))
			}
		}
		return nil
	}
	d = b.open()
	b.must(b.apply(d, n))
	p, err := d.program(object.EdgeTC).Clone()
	b.must(err)
	defer p.Close()
	old = p
	b.must(b.apply(d, elsewhere(n)))
	if moved < 2 {
		t.Fatalf("%d links were moved", moved)
	}
	for i, number := range numbers {
		if number != uint64(i)+1 {
			t.Fatalf("number %d after %d others", number, i)
		}
		if got := b.offer(d, n, number); !accepted(got) {
			t.Fatalf("number %d: %s", number, got)
		}
	}
}

// The ceiling rises before it is reached, not with every packet, and not at all
// without the disk.
func TestHeadendGetsNewNumbersBeforeItsOwnAreUsedUp(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	counter := one(t, b.world().Maps[0].Headends).Counter
	is := func(when string, want span) {
		t.Helper()
		if got := one(t, b.world().Counters); got != want {
			t.Errorf("%s: numbers %+v, want %+v", when, got, want)
		}
	}
	last := func(n uint64) {
		mem, err := d.memory()
		b.must(err)
		mem.numbers.putLast(counter, n)
		b.must(mem.close())
		clear(d.paces) // nobody has been that fast
	}
	left := func(when string, want NumberState) {
		t.Helper()
		h := bedNode().Headends[0]
		want.Path, want.Epoch = h.Path, uint8(h.Epoch)
		all, err := d.Numbers()
		b.must(err)
		if len(all) != 1 || all[0] != want {
			t.Errorf("%s: %+v are left, want %+v", when, all, want)
		}
	}
	is("at first", span{0, numbersLeast})
	left("at first", NumberState{Left: abi.RNDCounterMax, Ahead: numbersLeast})
	last(numbersLeast/2 - 1)
	b.must(d.RenewNumbers())
	is("with more than half", span{numbersLeast/2 - 1, numbersLeast})
	last(numbersLeast / 2)
	b.must(d.RenewNumbers())
	is("with half", span{numbersLeast / 2, numbersLeast * 3 / 2})

	path := filepath.Join(b.cfg.StateDir, "counters.json")
	good, err := os.ReadFile(path)
	b.must(err)
	b.must(os.WriteFile(path, []byte("{"), 0o600))
	last(numbersLeast*3/2 - 1)
	if _, ok := errors.AsType[*NumbersError](d.RenewNumbers()); !ok {
		t.Error("without the disk there is no error")
	}
	b.wantNumber(d, "the last below the ceiling", numbersLeast*3/2)
	b.wantNumber(d, "at the ceiling", 0)
	left("at the ceiling", NumberState{Left: abi.RNDCounterMax - numbersLeast*3/2})
	c, err := d.Counters()
	b.must(err)
	if !slices.ContainsFunc(c.Refusals, func(r RefusalCount) bool { return r.Reason == abi.ReasonRNDExhausted && r.Dropped == 1 }) {
		t.Errorf("refusals %+v; want rnd-exhausted", c.Refusals)
	}
	b.must(os.WriteFile(path, good, 0o600))
	b.must(d.RenewNumbers())
	b.wantNumber(d, "with the disk again", numbersLeast*3/2+1)

	// The end: no number comes twice, and it is told.
	last(abi.RNDCounterMax - 1)
	b.must(d.RenewNumbers())
	b.wantNumber(d, "the last of all", abi.RNDCounterMax)
	b.wantNumber(d, "after the last", 0)
	left("after the last", NumberState{})
	if err := b.do(d.Reconcile); err == nil {
		t.Error("nobody is told that the epoch is used up")
	}
	b.wantNumber(d, "after the last", 0)
}

// A plan that cannot be put in force costs no numbers.
func TestPlanThatFailsGivesItsNumbersBack(t *testing.T) {
	b := newBed(t)
	broken := errors.New("broken off by the test")
	fail := true
	b.cfg.before = func(step, _ string) error {
		if fail && step == stepArm {
			return broken
		}
		return nil
	}
	d := b.open()
	for range 3 {
		if err := b.apply(d, bedNode()); !errors.Is(err, broken) {
			t.Fatalf("got %v; want the test's error", err)
		}
		for _, dir := range []string{numbersDir(b.dir()), windowsDir(b.dir())} {
			if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
				t.Errorf("%s has %v, %v; want nothing", dir, left, err)
			}
		}
	}
	fail = false
	b.must(b.apply(d, bedNode()))
	b.wantNumber(d, "then", 1)
}
