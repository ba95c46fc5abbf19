package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
)

const (
	replayLanes  = 4
	replayWindow = 64
)

// replayRig is an egress of one path, whose packets it makes.
type replayRig struct {
	*rig
	path     plan.PathID
	shares   []pot.Share
	segments []netip.Addr
	from, to netip.Addr // of the inner packets
}

func newReplayRig(t *testing.T, scheme model.Scheme, window int) *replayRig {
	t.Helper()
	const segments = 2
	r := &replayRig{rig: newRig(t, rigSpec{
		name: "r1", block: xtest.Prefix("fc00::/48"), locator: xtest.Prefix("fc00:0:0:100::/56"), address: xtest.Addr("fc00:1::1"),
	})}
	shares, verifier, err := pot.Generate(newSecretSource(), scheme, segments+1)
	r.must(err)
	n := xtest.Node()
	e := xtest.EgressOf(1, 1, scheme, model.Match{Destination: xtest.Prefix("2001:db8::/32")}, xtest.OwnSID(1), segments)
	e.Lanes, e.Window, e.Share, e.Verifier = replayLanes, window, shares[segments], verifier
	n.Egresses = []plan.Egress{e}
	r.must(r.apply(&n))
	r.path, r.shares, r.segments = e.PathID, shares, e.Segments
	r.from, r.to = xtest.Addr("fd00::1"), xtest.Addr("2001:db8::2")
	return r
}

// newSecretSource is not secret, and the same in every run.
func newSecretSource() *rand.ChaCha8 { return rand.NewChaCha8([32]byte{1}) }

func numberOf(lane int, frames int, counter uint64) uint64 {
	return uint64(lane)<<abi.RNDLaneShift | uint64(frames-1)<<abi.RNDFramesShift | counter
}

// frame is a packet with this number, rightly stamped, as it comes to the egress.
func (r *replayRig) frame(rnd uint64) frame {
	steps := pot.Walk(r.path.Header(), rnd, r.shares[:len(r.shares)-1]...)
	wire := steps[len(steps)-1].WireOut
	inner := srv6.Packet{
		Header:  srv6.Header{NextHeader: 17, HopLimit: 64, Source: r.from, Destination: r.to},
		Payload: make([]byte, 200),
	}
	r.must(inner.Fix())
	payload, err := inner.Append(nil)
	r.must(err)
	p := srv6.Packet{
		Ethernet: &srv6.Ethernet{Destination: rigMAC, Type: srv6.EtherTypeIPv6},
		Header:   srv6.Header{HopLimit: 64, Source: xtest.Sources[0], Destination: r.segments[len(r.segments)-1]},
		SRH: &srv6.SRH{
			NextHeader: srv6.NextHeaderIPv6, Segments: srv6.Reversed(r.segments),
			TLVs: []srv6.TLV{srv6.Proof{Scheme: r.path.Scheme, Epoch: r.path.Epoch, Path: r.path.Path, RND: wire.RND, CML: wire.CML}.TLV()},
		},
		Payload: payload,
	}
	r.must(p.Fix())
	b, err := p.Append(nil)
	r.must(err)
	return frame{port: portCore, b: b}
}

func (r *replayRig) key() tables.CounterKey {
	return tables.CounterKey{Path: abi.BE32(r.path.Path), Epoch: r.path.Epoch}
}

// offer gives a packet to a node as the kernel does: to XDP first if that is
// attached, and what that leaves alone to TC. It returns why it was refused;
// NONE: it was not.
func (r *replayRig) offer(f frame, xdp bool) (reason string, err error) {
	if _, err := r.counted(); err != nil {
		return "", err
	}
	if xdp {
		got, err := r.runXDP(f)
		if err != nil {
			return "", err
		}
		if got.verdict == xdpPass {
			xdp = false
		}
	}
	if !xdp {
		if _, err := r.runTC(f); err != nil {
			return "", err
		}
	}
	m, err := r.counted()
	if err != nil || len(m.dropped) == 0 {
		return "NONE", err
	}
	return m.dropped[0], nil
}

// What the programs accept, on either hook, in whatever order, is what a set of
// all that was ever accepted says: reordered, doubled, cut, merged, or from
// before and after a jump.
func TestWindowIsThePlainSet(t *testing.T) {
	r := newReplayRig(t, model.SchemeKeyed, replayWindow)
	accepted := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		if err := r.forget(); err != nil {
			t.Fatal(err)
		}
		top := rapid.SampledFrom([]uint64{1, 60, 1 << 20, 1<<42 - 200}).Draw(t, "first")
		for range rapid.IntRange(1, 60).Draw(t, "packets") {
			back := rapid.SampledFrom([]uint64{0, 0, 1, 2, 3, 4, 58, 59, 60, 61, 62, 63, 64, 100}).Draw(t, "late by")
			switch rapid.IntRange(0, 9).Draw(t, "next") {
			case 0:
				top += rapid.SampledFrom([]uint64{5, 63, 64, 65, 1 << 16}).Draw(t, "jump")
			case 1, 2, 3, 4:
				top++
			}
			top = min(top, 1<<42-1)
			c := top - min(back, top-1)
			// The train of a number is the same each time: it is in the proof.
			f := r.frame(numberOf(rapid.IntRange(0, replayLanes).Draw(t, "lane"), []int{1, 2, 63, 7}[c%4], c))
			if rapid.IntRange(0, 3).Draw(t, "super-packet") == 0 {
				f.gsoSize, f.gsoSegs = 100, uint32(rapid.SampledFrom([]int{0, 2, 3, 62}).Draw(t, "frames"))
			}
			xdp := f.gsoSize == 0 && rapid.Bool().Draw(t, "XDP")
			want, _ := r.expect(f)
			wanted := string(want.Reason)
			if wanted == "" {
				wanted = "NONE"
			}
			var got string
			if err := r.in(func() (err error) {
				got, err = r.offer(f, xdp)
				return err
			}); err != nil {
				t.Fatal(err)
			}
			if got != wanted {
				t.Fatalf("number %d, XDP %t: %s, want %s; accepted before: %+v\n%s", c, xdp, got, wanted, r.seen[r.key()], layers(f.b))
			}
			accepted[got]++
			if want.Spent != nil {
				r.seen[r.key()] = append(r.seen[r.key()], want.Spent.Train)
			}
		}
	})
	for _, reason := range []string{"NONE", "REPLAY", "STALE", "NUMBER", "STRIP_FAILED"} {
		if accepted[reason] == 0 {
			t.Errorf("no packet was %s: %v", reason, accepted)
		}
	}
}

// Late by W - 4 is not too late, whatever the number; by W it is.
func TestPacketMayBeLateByAllButFour(t *testing.T) {
	t.Parallel()
	for _, scheme := range []model.Scheme{model.SchemeKeyed, model.SchemeOPoT, model.SchemePoT} {
		for _, w := range []uint64{64, 1024} {
			r := newReplayRig(t, scheme, int(w))
			r.must(r.in(func() error {
				for c := uint64(1); c <= 9; c++ {
					for lane, late := range []uint64{w - 4, w} {
						want := []string{"NONE", "STALE"}[lane]
						for i, x := range []struct {
							number uint64
							want   string
						}{{c + late, "NONE"}, {c, want}, {c, []string{"REPLAY", "STALE"}[lane]}, {c + late, "REPLAY"}} {
							got, err := r.offer(r.frame(numberOf(lane, 1, x.number)), c%2 == 0)
							if err != nil {
								return err
							}
							if got != x.want {
								return fmt.Errorf("%s, W %d: packet %d of the four, number %d: %s, want %s", scheme, w, i, x.number, got, x.want)
							}
						}
					}
					if err := r.forget(); err != nil {
						return err
					}
				}
				return nil
			}))
		}
	}
}

// On two CPUs at once, on both hooks, every number is offered more often than it
// has frames, in any order that the window bears: it must be accepted exactly as
// often as it has.
func TestTwoCPUsAcceptEachNumberExactly(t *testing.T) {
	const numbers, more, block = 3000, 3, 256
	r := newReplayRig(t, model.SchemeKeyed, 1024)
	frames := make([]frame, numbers+1)
	train := func(c int) int { return 1 + c%5 }
	for c := 1; c <= numbers; c++ {
		frames[c] = r.frame(numberOf(1, train(c), uint64(c)))
	}
	// XDP must know the way out.
	r.must(r.in(func() error {
		_, err := r.runTC(r.frame(numberOf(0, 1, 1)))
		return err
	}))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var accepted [2][numbers + 1]int
	var wg sync.WaitGroup
	errs := make([]error, 2)
	meet := make([]sync.WaitGroup, numbers/block+1)
	for i := range meet {
		meet[i].Add(2)
	}
	for cpu := range 2 {
		wg.Go(func() {
			errs[cpu] = onCPU(r.ns, cpu, func() error {
				var failed error
				random := rand.New(rand.NewPCG(seed, uint64(cpu)))
				for first := 1; first <= numbers; first += block {
					// In blocks that are a quarter of the window: no CPU is ahead
					// of the other by more.
					meet[first/block].Done()
					meet[first/block].Wait()
					var order []int
					for c := first; c < min(first+block, numbers+1); c++ {
						for range train(c) + more {
							order = append(order, c)
						}
					}
					random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
					for i, c := range order {
						run, taken := r.runTC, uint32(tcRedirect)
						if (i+cpu)%2 == 0 {
							run, taken = r.runXDP, xdpRedirect
						}
						got, err := run(frames[c])
						if err != nil {
							failed = err // the other CPU waits
							continue
						}
						if got.verdict == taken {
							accepted[cpu][c]++
						}
					}
				}
				return failed
			})
		})
	}
	wg.Wait()
	r.must(errors.Join(errs...))
	shared := 0
	for c := 1; c <= numbers; c++ {
		a, b := accepted[0][c], accepted[1][c]
		if a > 0 && b > 0 {
			shared++
		}
		if a+b != train(c) {
			t.Errorf("number %d, a train of %d frames: accepted %d times on one CPU and %d on the other", c, train(c), a, b)
		}
	}
	if shared == 0 {
		t.Error("no number was accepted on both CPUs: they did not meet")
	}
}

// Between the look at a word and the change of it somebody else may change it: then
// the program looks again, and refuses nothing. Here user space does so all the time,
// on another CPU, with what is older than every number that comes.
func TestWordThatIsChangedMeanwhileIsLookedAtAgain(t *testing.T) {
	const numbers, size = 20000, 64
	r := newReplayRig(t, model.SchemeKeyed, size)
	w := r.windows[r.key()]
	at := func(i int) oracle.Train { return oracle.Train{Lane: 1, Counter: uint64(size*(i+1) + 4), Frames: 1} }
	frames := make([]frame, numbers)
	for i := range frames {
		if wordOf(w.Window, at(i)) != wordOf(w.Window, at(0)) {
			t.Fatal("the numbers do not share a word")
		}
		frames[i] = r.frame(numberOf(1, 1, at(i).Counter))
	}
	word := r.word(r.key(), wordOf(w.Window, at(0)))
	started, done := make(chan error), make(chan struct{})
	var changing errgroup.Group
	changing.Go(func() error {
		return onCPU(r.ns, 1, func() error {
			for {
				for range 512 {
					word.Store(0)
					word.Store(1 << 6)
				}
				select {
				case started <- nil:
				case <-done:
					return nil
				default:
				}
			}
		})
	})
	err := <-started
	for i := 0; i < numbers && err == nil; i++ {
		err = r.in(func() error {
			run, taken := r.runTC, uint32(tcRedirect)
			if i%2 == 1 {
				run, taken = r.runXDP, xdpRedirect // knows the way out by now
			}
			got, err := run(frames[i])
			if err == nil && got.verdict != taken {
				err = fmt.Errorf("packet %d: verdict %d, want %d", i, got.verdict, taken)
			}
			return err
		})
	}
	close(done)
	r.must(errors.Join(err, changing.Wait()))
}

// Words that are made from the newest numbers refuse what is not newer, and take
// what is, exactly.
func TestWindowBeginsWhereItEnded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{64, 256}).Draw(t, "window")
		n := []uint64{rapid.Uint64Range(0, 300).Draw(t, "newest"), rapid.Uint64Range(1<<42-500, 1<<42-1).Draw(t, "newest of another lane"), 0}
		words := begin(n, size)
		if got := newest(words, size); !slices.Equal(got, n) {
			t.Fatalf("begins at %v, want %v", got, n)
		}
		for lane, last := range n {
			for c := max(1, last-min(last, 2*uint64(size))); c <= min(last+2*uint64(size), 1<<42-1); c++ {
				word := words[lane*size/4+int(c/4)%(size/4)]
				tag, own := word>>tagShift, c/uint64(size)
				full := word>>(usesBits*(c%4))&allUses == allUses
				refused := tag > own || tag == own && full
				if c <= last && !refused || c > last && (tag > own || tag == own && word>>(usesBits*(c%4))&allUses != 0) {
					t.Fatalf("lane %d, newest %d: number %d meets tag %d, its own %d, word %#x", lane, last, c, tag, own, word)
				}
			}
		}
	})
}

// The programs agree with that.
func TestProgramRefusesWhatWasSeenBeforeItsWindowBegan(t *testing.T) {
	r := newReplayRig(t, model.SchemeKeyed, replayWindow)
	for _, last := range []uint64{1, 4, 63, 64, 1000, 1003} {
		r.must(r.forget())
		starts := func() {
			r.mem.windows.putWords(r.windows[r.key()], begin([]uint64{last, 0, 0, last}, replayWindow))
		}
		starts()
		r.must(r.in(func() error {
			for _, c := range []uint64{1, last - last/2, last, last + 1, last + 2, last + replayWindow} {
				for lane, fresh := range []bool{c > last, true, true, c > last} {
					got, err := r.offer(r.frame(numberOf(lane, 63, c)), lane%2 == 0)
					if err != nil {
						return err
					}
					if (got == "NONE") != fresh {
						return fmt.Errorf("begun at %d, lane %d, number %d: %s", last, lane, c, got)
					}
				}
				starts()
			}
			return nil
		}))
	}
}

// offer gives a packet of bedNode's egress to the programs at work, and says
// why it was refused.
func (b *bed) offer(d *Dataplane, n plan.Node, counter uint64) string {
	b.Helper()
	return b.offerTo(d, n, counter, xtest.Addr("2001:db8:2::2"))
}

// offerTo is the same for another inner destination.
func (b *bed) offerTo(d *Dataplane, n plan.Node, counter uint64, to netip.Addr) string {
	b.Helper()
	e := n.Egresses[0]
	shares := make([]pot.Share, len(e.Verifier.Keys))
	for i, k := range e.Verifier.Keys {
		shares[i] = pot.Share{Position: uint8(i), Key: k}
	}
	r := &replayRig{rig: &rig{T: b.T}, path: e.PathID, shares: append(shares, pot.Share{}), segments: e.Segments, from: xtest.Addr("fd00::1"), to: to}
	f := r.frame(numberOf(0, 1, counter))
	clear(f.b[:6]) // the address of the loopback device, which a test run comes by
	count := func() map[abi.Reason]uint64 {
		var c Counts
		b.must(d.gen.readRefusals(&c)) // also in the middle of a change
		m := map[abi.Reason]uint64{}
		for _, x := range c.Refusals {
			m[x.Reason] = x.Dropped
		}
		return m
	}
	before := count()
	b.must(b.do(func() error {
		_, err := d.program(object.CoreTC).Run(&ebpf.RunOptions{Data: f.b, DataOut: make([]byte, len(f.b)+512)})
		return err
	}))
	for reason, n := range count() {
		if n > before[reason] {
			return reason.String()
		}
	}
	return "none"
}

// accepted: the number was spent; what the bed's routes say of the packet then
// does not matter.
func accepted(reason string) bool {
	return !slices.Contains([]string{"replay", "stale", "number", "proof", "wrong-chain"}, reason)
}

// Another process, other programs, other plans of other chains, a pin that is
// gone: nothing makes a window forget but the path's end.
func TestWindowOutlivesWhatIsAroundIt(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	d := b.open()
	b.must(b.apply(d, n))
	expect := func(what string, counter uint64, want string) {
		t.Helper()
		got := b.offer(d, n, counter)
		if want == "accepted" && accepted(got) {
			return
		}
		if got != want {
			t.Errorf("%s: number %d: %s, want %s", what, counter, got, want)
		}
	}
	expect("at first", 5, "accepted")
	expect("again", 5, "replay")

	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, n))
	expect("after a restart", 5, "replay")
	expect("after a restart", 6, "accepted")

	// Programs of another configuration, in a generation of their own.
	moved := elsewhere(n)
	b.must(b.apply(d, moved))
	expect("after other programs", 6, "replay")

	more := n
	more.Egresses = append(slices.Clone(n.Egresses), xtest.EgressOf(9, 0, model.SchemePoT, model.Match{Destination: xtest.Prefix("2001:db8:9::/48")}, xtest.OwnSID(9), 2))
	b.must(b.apply(d, more))
	expect("after a chain more", 6, "replay")
	b.must(b.apply(d, n))
	expect("after a chain less", 6, "replay")

	// Somebody removes the pins.
	b.must(os.RemoveAll(windowsDir(b.dir())))
	b.must(b.do(d.Reconcile))
	expect("after its pin was removed", 6, "replay")
	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, n))
	expect("after its pin was removed and put back", 6, "replay")

	wider := n
	wider.Egresses = slices.Clone(n.Egresses)
	wider.Egresses[0].Lanes++
	if err := b.apply(d, wider); err == nil {
		t.Error("a plan with more lanes for the same epoch is not refused")
	}
	expect("after a plan that was refused", 6, "replay")
	// As many words, cut into lanes in another way.
	wider.Egresses[0].Lanes, wider.Egresses[0].Window = n.Egresses[0].Lanes/2, 2*n.Egresses[0].Window
	if err := b.apply(d, wider); err == nil {
		t.Error("a plan with half the lanes, twice as wide, for the same epoch is not refused")
	}
	expect("after another plan that was refused", 6, "replay")

	// Without the path there is no window, and with it again it begins anew,
	// where it ended.
	without := n
	without.Egresses = nil
	b.must(b.apply(d, without))
	if left, err := os.ReadDir(windowsDir(b.dir())); err != nil || len(left) != 0 {
		t.Errorf("windows %v, %v are left of a path that is gone", left, err)
	}
	b.must(b.apply(d, n))
	expect("after the path came back", 6, "replay")
	expect("after the path came back", 3, "replay")
	expect("after the path came back", 7, "accepted")
}

// A reboot: nothing is pinned any more. What is on the disk stands.
func TestWindowBeginsAfterARebootWhereItWasSaved(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	d := b.open()
	b.must(b.apply(d, n))
	for _, c := range []uint64{3, 5, 900} {
		if got := b.offer(d, n, c); !accepted(got) {
			t.Fatalf("number %d: %s", c, got)
		}
	}
	b.must(d.SaveWindows())
	b.must(d.Close())
	off := b.cfg
	off.StateDir = "" // nothing is written on the way down
	if _, err := b.detach(off); err != nil {
		t.Fatal(err)
	}
	d = b.open()
	b.must(b.apply(d, n))
	for _, c := range []uint64{1, 3, 899, 900} {
		if got := b.offer(d, n, c); got != "replay" && got != "stale" {
			t.Errorf("number %d after a reboot: %s", c, got)
		}
	}
	if got := b.offer(d, n, 901); !accepted(got) {
		t.Errorf("number 901 after a reboot: %s", got)
	}
}

// What is saved each second is what has changed: nothing else is read. Nor is
// anything left out.
func TestOnlyNewsAreSaved(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	d := b.open()
	b.must(b.apply(d, n))
	e := n.Egresses[0]
	key := func() tables.WindowKey {
		have, err := d.gen.read()
		b.must(err)
		for _, v := range have.Egresses {
			if v.Of == (abi.EgressKey{Path: abi.BE32(e.Path), Epoch: e.Epoch}) {
				return tables.WindowKey{CounterKey: tables.CounterKey{Path: abi.BE32(e.Path), Epoch: e.Epoch}, Secrets: tables.SecretsOf(&v)}
			}
		}
		t.Fatal("there is no such egress")
		return tables.WindowKey{}
	}()
	saves := func(when string, want uint64) {
		t.Helper()
		b.must(d.SaveNews())
		record, err := openRecall(b.cfg.StateDir).read()
		b.must(err)
		var got uint64
		if r := record[key]; len(r.Newest) > 0 {
			got = r.Newest[0]
		}
		if got != want {
			t.Errorf("%s: the record says %d, want %d", when, got, want)
		}
	}
	take := func(counter uint64) {
		t.Helper()
		if got := b.offer(d, n, counter); !accepted(got) {
			t.Fatalf("number %d: %s", counter, got)
		}
	}
	// poke writes as no program does: nothing is counted. It makes the number the
	// newest.
	poke := func(counter uint64) {
		mem, err := d.memory()
		b.must(err)
		defer mem.close()
		w := mem.Placed.Windows[key]
		words := begin([]uint64{counter}, w.Size)
		for i, v := range words {
			mem.windows.word(w.At + i).Store(v)
		}
	}
	saves("before the first packet", 0)
	take(5)
	saves("after a packet", 5)
	poke(7)
	saves("where nothing is counted", 5)
	take(9)
	saves("after another packet", 9)

	// Its number is spent, and it is not counted for the path.
	if got := b.offerTo(d, n, 20, xtest.Addr("2001:db8:77::1")); got != "wrong-chain" {
		t.Fatalf("a packet of another chain: %s", got)
	}
	saves("after a packet that was refused behind the window", 20)

	b.must(os.Remove(openRecall(b.cfg.StateDir).path))
	saves("after somebody has removed the record", 20)
	poke(40)
	for range rereadTurns {
		b.must(d.SaveNews())
	}
	saves("after each window has been read again", 40)

	// Another process begins anew.
	b.must(d.Close())
	d = b.open()
	poke(50)
	saves("without a plan", 50)
	b.must(b.apply(d, n))
	poke(60)
	saves("at first", 60)
	poke(70)
	saves("and then", 60)
	b.must(b.do(d.Reconcile))
	saves("after a reconciliation", 70)
	take(81)
	saves("in the end", 81)
}

// A chain that was taken out of the file and put back has its path and epoch
// again, with fresh secrets: its numbers begin anew. With the old plan come the
// old secrets back, and what they have let through.
func TestOtherSecretsHaveAWindowOfTheirOwn(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	again := n
	again.Egresses = slices.Clone(n.Egresses)
	again.Egresses[0].Verifier.Keys = []pot.Key{{1: 77}, {1: 78}}
	d := b.open()
	b.must(b.apply(d, n))
	expect := func(what string, n plan.Node, counter uint64, want ...string) {
		t.Helper()
		got := b.offer(d, n, counter)
		if accepted(got) {
			got = "accepted"
		}
		if !slices.Contains(want, got) {
			t.Errorf("%s: number %d: %s, want %s", what, counter, got, want)
		}
	}
	expect("at first", n, 900, "accepted")
	b.must(b.apply(d, again))
	expect("with other secrets", again, 3, "accepted")
	expect("with other secrets", again, 3, "replay")
	expect("with other secrets", again, 900, "accepted")
	expect("with other secrets, under the old ones", n, 901, "proof")
	pins, err := os.ReadDir(windowsDir(b.dir()))
	if err != nil || len(pins) != 1 {
		t.Errorf("windows %v, %v; want the one at work", pins, err)
	}
	b.must(b.apply(d, n))
	expect("with the old plan", n, 900, "replay", "stale")
	expect("with the old plan", n, 3, "replay", "stale")
	expect("with the old plan", n, 901, "accepted")
}

// A node that is taken out of service with a full disk forgets nothing either.
func TestDetachKeepsWindowsThatCannotBeSaved(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	d := b.open()
	b.must(b.apply(d, n))
	if got := b.offer(d, n, 5); !accepted(got) {
		t.Fatalf("number 5: %s", got)
	}
	b.must(d.Close())
	full := filepath.Join(b.cfg.StateDir, "windows.json")
	b.must(os.Mkdir(full, 0o700)) // in the way of the file
	_, err := b.detach(b.cfg)
	if _, ok := errors.AsType[*WindowsError](err); !ok || !strings.Contains(err.Error(), "detach again") {
		t.Errorf("got %v; want a WindowsError that says what to do", err)
	}
	b.must(os.Remove(full))
	if _, err := b.detach(b.cfg); err != nil {
		t.Errorf("detach again: %v", err)
	}
	if _, err := os.Stat(b.dir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v; want it gone", b.dir(), err)
	}
	d = b.open()
	b.must(b.apply(d, n))
	if got := b.offer(d, n, 5); got != "replay" && got != "stale" {
		t.Errorf("number 5 after the node came back: %s", got)
	}
}

// What cannot be written to the disk is not forgotten in the kernel either.
func TestWindowOfAPathThatIsGoneStaysUntilItIsSaved(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	d := b.open()
	b.must(b.apply(d, n))
	if got := b.offer(d, n, 5); !accepted(got) {
		t.Fatalf("number 5: %s", got)
	}
	full := filepath.Join(b.cfg.StateDir, "windows.json")
	b.must(os.Mkdir(full, 0o700)) // in the way of the file
	without := n
	without.Egresses = nil
	err := b.apply(d, without)
	if _, ok := errors.AsType[*WindowsError](err); !ok {
		t.Errorf("got %v; want a WindowsError", err)
	}
	if left, err := os.ReadDir(windowsDir(b.dir())); err != nil || len(left) != 1 {
		t.Errorf("windows %v, %v; want the one that could not be saved", left, err)
	}
	b.must(os.Remove(full))
	b.must(b.apply(d, without))
	if left, err := os.ReadDir(windowsDir(b.dir())); err != nil || len(left) != 0 {
		t.Errorf("windows %v, %v are left of a path that is gone and saved", left, err)
	}
	b.must(b.apply(d, n))
	if got := b.offer(d, n, 5); got != "replay" && got != "stale" {
		t.Errorf("number 5 after the path came back: %s", got)
	}
}

// The record stays small, however often secrets change.
func TestRecordOfWindowsForgetsTheOldest(t *testing.T) {
	r := openRecall(t.TempDir())
	live := tables.WindowKey{CounterKey: tables.CounterKey{Path: abi.BE32(1), Epoch: 0}, Secrets: 1}
	if err := r.update(map[tables.WindowKey][]uint64{live: {9}}); err != nil {
		t.Fatal(err)
	}
	all, err := r.read()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 * recallOld {
		k := tables.WindowKey{CounterKey: tables.CounterKey{Path: abi.BE32(1), Epoch: uint8(i)}, Secrets: uint64(i) + 2}
		all[k] = recallEntry{Saved: int64(i), Newest: []uint64{uint64(i) + 1}}
	}
	forgetOld(all, func(k tables.WindowKey) bool { return k == live })
	if len(all) != recallOld+1 || all[live].Newest == nil {
		t.Errorf("%d records are kept; want the one at work and %d more", len(all), recallOld)
	}
	for k, e := range all {
		if k != live && e.Saved < 2*recallOld {
			t.Errorf("a record of second %d is kept, and younger ones are not", e.Saved)
		}
	}
}

// Without its record no window begins: it could accept what was seen before.
func TestDamagedRecordOfWindowsIsRefused(t *testing.T) {
	b := newBed(t)
	b.must(os.WriteFile(openRecall(b.cfg.StateDir).path, []byte(`{"record":"replay windows","version":1,"entries":[{"path":"0x1"}]}`), 0o600))
	d := b.open()
	err := b.apply(d, bedNode())
	if _, ok := errors.AsType[*WindowsError](err); !ok {
		t.Errorf("got %v; want a WindowsError", err)
	}
	if left, _ := os.ReadDir(windowsDir(b.dir())); len(left) != 0 {
		t.Errorf("windows %v are left of a plan that was refused", left)
	}
}
