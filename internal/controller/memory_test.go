package controller

import (
	"os"
	"strings"
	"testing"
	"time"

	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// What a controller and its members hold after some hundred changes is as much as after some: records of the store, what the controller remembers of them, and files of
// a node. Events alone add up, to a number that is fixed.
func TestChangesLeaveNothingBehind(t *testing.T) {
	w := newWorld(t)
	began := time.Now()
	w.now = func() time.Time { return began.Add(50 * time.Since(began)) } // so that nodes may acknowledge as often as they have to
	w.start()
	agents := []*fake{w.join("r1"), w.join("r2"), w.join("r3")}
	one := strings.Replace(file, "direction: both, ", "", 1)
	w.until("the file", settled(w.apply(file)))
	held := func() map[string]int {
		t.Helper()
		w.until("no old epochs", func(s *v1.State) bool {
			v, err := w.ctl.view(t.Context())
			return err == nil && drained(s) && len(v.state.Erasing) == 0
		})
		n := map[string]int{}
		v, err := w.ctl.view(t.Context())
		w.must(err)
		snap, err := w.store.Snapshot(t.Context(), "")
		w.must(err)
		for key := range snap.Records {
			kind, _, _ := strings.Cut(key, "/")
			n["records "+kind]++
		}
		n["bytes of the state, by 100"] = len(snap.Records[keyState].Value) / 100 // times and numbers grow by digits
		n["erasing"], n["rotate"] = len(v.state.Erasing), len(v.wanted.Rotate)
		c := w.ctl
		c.cache.Lock()
		n["generations"] = len(c.cache.generations)
		c.cache.Unlock()
		c.known.Lock()
		for _, list := range c.known.of {
			n["plans known"] += len(list)
		}
		c.known.Unlock()
		c.decoded.mu.Lock()
		n["records decoded"] = len(c.decoded.of)
		c.decoded.mu.Unlock()
		c.sessions.Lock()
		n["sessions"] = len(c.sessions.open) + len(c.sessions.of)
		c.sessions.Unlock()
		c.drains.mu.Lock()
		n["draining"] = len(c.drains.of)
		c.drains.mu.Unlock()
		c.limits.mu.Lock()
		n["limits"] = len(c.limits.renew) + len(c.limits.tell) + len(c.limits.count) + len(c.limits.ack) + len(c.limits.join)
		c.limits.mu.Unlock()
		c.journal.mu.Lock()
		n["states"] = len(c.journal.states)
		events := len(c.journal.events)
		c.journal.mu.Unlock()
		if events > eventsMax {
			t.Errorf("%d events are kept; %d is the most", events, eventsMax)
		}
		parsed.Lock()
		if len(parsed.files) > parsedMax {
			t.Errorf("%d parsed files are kept; %d is the most", len(parsed.files), parsedMax)
		}
		parsed.Unlock()
		for _, f := range agents {
			files, err := os.ReadDir(f.dir)
			w.must(err)
			n["files of nodes"] += len(files)
		}
		return n
	}
	change := func(i int) {
		t.Helper()
		switch i % 4 {
		case 0:
			w.until("one direction", settled(w.apply(one)))
		case 2:
			w.until("both directions", settled(w.apply(file)))
		default:
			w.until("fresh secrets", settled(w.rotate()))
		}
	}
	for i := range 12 {
		change(i)
	}
	before := held()
	const changes = 200
	for i := range changes {
		change(i)
	}
	for what, n := range held() {
		// A file that nothing names any more goes with a later commit.
		if n != before[what] && (what != "records file" || n > before[what]+1) {
			t.Errorf("%s: %d before %d changes, %d behind them", what, before[what], changes, n)
		}
		delete(before, what)
	}
	if len(before) > 0 {
		t.Errorf("gone: %v", before)
	}
}
