package controller

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

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
	if _, err := New(t.Context(), Config{Store: w.store, RotateEvery: time.Second}); err == nil || !strings.Contains(err.Error(), "10s is the least") {
		t.Errorf("every second: %v", err)
	}
}
