package agent

import (
	"testing"

	"github.com/waystamp/waystamp/internal/event"
)

func TestReaderThatComesLateOrIsSlowGetsTheLatest(t *testing.T) {
	h := newHistory()
	add := func(n int) {
		for range n {
			h.mu.Lock()
			next := h.n
			h.mu.Unlock()
			h.add(event.Event{Len: uint32(next)})
		}
	}
	read := func() (got []uint32) {
		pos, end := h.begin()
		err := h.follow(t.Context(), pos, end, false, func(e event.Event) error { got = append(got, e.Len); return nil }, func() error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := read(); len(got) != 0 {
		t.Errorf("before anything happened: %v", got)
	}
	add(10)
	if got := read(); len(got) != 10 || got[0] != 0 {
		t.Errorf("after 10: %v", got)
	}
	add(5000)
	if got := read(); len(got) != replay || got[0] != 5010-replay || got[replay-1] != 5009 {
		t.Errorf("after 5010: %d events from %d", len(got), got[0])
	}
	events, missed, next, _ := h.from(0)
	if len(events) != batch || next != 5010-keep+batch || missed != 5010-keep || events[0].Len != 5010-keep {
		t.Errorf("far behind: %d events from %d, %d missed", len(events), events[0].Len, missed)
	}
}
