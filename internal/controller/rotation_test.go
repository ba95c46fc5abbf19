package controller

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// clock is one that a test moves. The controller does not see that it has moved until something happens.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

func TestTheClockGivesFreshSecrets(t *testing.T) {
	w := newWorld(t)
	w.rotateEvery = time.Hour
	at := &clock{at: time.Now()}
	w.now = at.now
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	if s := w.state(); s.NextRotation != nil {
		t.Errorf("rotation of nothing at %v", s.NextRotation.AsTime())
	}
	applied := at.now()
	s := w.until("settled", settled(w.apply(file)))
	next := s.NextRotation.AsTime()
	if d := next.Sub(applied); d > time.Hour || d <= 54*time.Minute {
		t.Errorf("the next rotation is %s behind the first file", d)
	}
	// wake makes it look at the clock: a node comes that nobody has heard of.
	names := []string{"x1", "x2", "x3", "x4", "x5", "x6"}
	wake := func() {
		w.must((&fake{w: w, dir: t.TempDir()}).try(w.token(names[0]), names[0]))
		names = names[1:]
	}
	epoch := func(want uint8) {
		t.Helper()
		if sends, _ := epochsOf(agents["r1"].now(), "web"); !slices.Equal(sends, []uint8{want}) {
			t.Errorf("r1 sends %v, want %d", sends, want)
		}
	}
	at.add(next.Sub(applied) - time.Second)
	wake()
	if s := w.state(); s.WantedSerial != 1 || !s.NextRotation.AsTime().Equal(next) {
		t.Errorf("before it is due: %v", s)
	}
	epoch(1)
	at.add(time.Second)
	wake()
	w.until("rotated", settled(2))
	epoch(2)
	// A node that is away holds one rotation up, and not more come behind it.
	agents["r2"].hush()
	at.add(time.Hour)
	wake()
	w.until("r2 is waited for", func(s *v1.State) bool { return slices.Equal(s.WaitingFor, []string{"r2"}) })
	at.add(3 * time.Hour)
	wake()
	if s := w.state(); s.WantedSerial != 3 {
		t.Errorf("while it waits: %v", s)
	}
	agents["r2"].speak()
	w.until("one rotation, and the one that is due since", settled(4))
	epoch(4)
	at.add(time.Minute) // what drains
	wake()
	w.until("drained", drained)
	held := func(name string) plan.Node { return agents[name].now() }
	if n := w.accepted(held, "r1", "r2", "r3"); n != 2 {
		t.Errorf("%d paths are sent into", n)
	}
	// An operator's rotation counts.
	at.add(30 * time.Minute)
	s = w.until("by hand", settled(w.rotate()))
	if d := s.NextRotation.AsTime().Sub(at.now()); d > time.Hour || d <= 54*time.Minute {
		t.Errorf("the next rotation is %s behind that of the operator", d)
	}
	// Whoever carries on from the records rotates at the same time.
	next = s.NextRotation.AsTime()
	w.stop()
	w.start()
	if s := w.state(); !s.NextRotation.AsTime().Equal(next) {
		t.Errorf("another controller rotates at %v, and not at %v", s.NextRotation.AsTime(), next)
	}
	// A clock that was ahead, and is put right, delays nothing.
	for ahead, due := range map[time.Duration]time.Duration{0: time.Hour, 30 * time.Minute: 90 * time.Minute, 365 * 24 * time.Hour: 0} {
		v := &view{wanted: wantedRecord{Rotated: at.now().Add(ahead)}}
		if d := w.ctl.rotatesAt(v).Sub(at.now()); d > due || d < due-6*time.Minute {
			t.Errorf("after a clock that was %s ahead the next rotation is in %s; want %s", ahead, d, due)
		}
	}
	if _, err := New(t.Context(), Config{Store: w.store, RotateEvery: time.Second}); err == nil || !strings.Contains(err.Error(), "10s is the least") {
		t.Errorf("every second: %v", err)
	}
}

// Chains that say it in the file take turns, each once in its time, and others stay as they are.
func TestChainsTakeTurnsWithinTheTimeOfTheFile(t *testing.T) {
	w := newWorld(t)
	at := &clock{at: time.Now()}
	w.now = at.now
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	const every = 10 * time.Minute
	text := file
	chains := []string{"a", "b", "c"}
	for i, name := range chains {
		text += fmt.Sprintf("  - {name: %s, ingress: [r1], functions: [fw], egress: r3, match: {destination: \"2001:db8:%d::/48\"}, proof: {rotate-every: %s}}\n", name, 10+i, every)
	}
	s := w.until("settled", settled(w.apply(text)))
	began, serial := at.now(), s.Serial
	next := map[string]time.Time{}
	for _, name := range chains {
		next[name] = w.ctl.turnBehind(name, every, w.drain, began)
	}
	if next["a"].Equal(next["b"]) && next["b"].Equal(next["c"]) {
		t.Fatalf("all chains have one turn: %v", next)
	}
	epoch := func(chain string) uint8 {
		sends, _ := epochsOf(agents["r1"].now(), chain)
		if len(sends) != 1 {
			t.Fatalf("r1 sends %v of chain %s", sends, chain)
		}
		return sends[0]
	}
	for turn := 0; at.now().Before(began.Add(every)); turn++ {
		due, before := w.state().NextRotation.AsTime(), map[string]uint8{}
		if due.Before(at.now()) || due.After(began.Add(2*every)) {
			t.Fatalf("turn %d is at %v, and it is %v", turn, due, at.now())
		}
		for _, name := range append(chains, "web") {
			before[name] = epoch(name)
		}
		at.add(due.Sub(at.now()))
		w.must((&fake{w: w, dir: t.TempDir()}).try(w.token(fmt.Sprint("x", turn)), fmt.Sprint("x", turn))) // it looks at the clock
		serial++
		w.until("rotated", settled(serial))
		for _, name := range append(chains, "web") {
			want := before[name]
			if next[name].Equal(due) {
				want, next[name] = want+1, next[name].Add(every)
			}
			if got := epoch(name); got != want {
				t.Errorf("at turn %d chain %s is at epoch %d, want %d", turn, name, got, want)
			}
		}
	}
	for _, name := range chains {
		if got := epoch(name); got < 2 || got > 3 {
			t.Errorf("chain %s is at epoch %d after its time", name, got)
		}
	}
	// Another one carries on at the same times.
	due := w.state().NextRotation.AsTime()
	w.stop()
	w.start()
	if s := w.state(); !s.NextRotation.AsTime().Equal(due) {
		t.Errorf("another controller's next turn is at %v, and not at %v", s.NextRotation.AsTime(), due)
	}
}

func TestTurnsLeaveTimeToDrain(t *testing.T) {
	ca, err := identity.NewCA("waystamp", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	c := &Controller{}
	c.authority.Store(&authority{ca: ca})
	for _, x := range []struct {
		every, drain time.Duration
		turns        int
	}{{10 * time.Second, 5 * time.Second, 1}, {time.Minute, 5 * time.Second, 6}, {time.Hour, 5 * time.Second, 16}} {
		start, seen := time.Unix(1_700_000_000, 0), map[time.Time]bool{}
		for i := range 1000 {
			turn := c.turnBehind(fmt.Sprint(i), x.every, x.drain, start)
			if !turn.After(start) || turn.After(start.Add(x.every)) {
				t.Fatalf("each %s: a turn at %v behind %v", x.every, turn, start)
			}
			seen[turn] = true
		}
		if len(seen) != x.turns {
			t.Errorf("each %s: %d turns, want %d", x.every, len(seen), x.turns)
		}
	}
}
