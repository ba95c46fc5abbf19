package agent

import (
	"context"
	"sync"

	"github.com/waystamp/waystamp/internal/event"
)

const (
	// replay is how many past events a new reader gets.
	replay = 256
	// keep is how many events a reader may be behind before it misses some.
	keep = 4096
	// batch is how many of them are held for a reader at a time.
	batch = 64
)

// history holds the last events for any number of readers; no reader can delay the others.
type history struct {
	mu   sync.Mutex
	ring [keep]event.Event
	n    uint64        // events so far; the next goes to ring[n % keep]
	more chan struct{} // closed when n grows
}

func newHistory() *history { return &history{more: make(chan struct{})} }

func (h *history) add(e event.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ring[h.n%keep] = e
	h.n++
	close(h.more)
	h.more = make(chan struct{})
}

// begin returns the position at which a new reader starts, and the end of past events.
func (h *history) begin() (pos, end uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.n - min(h.n, replay), h.n
}

// from returns events after the first pos ones, up to a batch, how many the agent
// has forgotten before them, and where to go on. Without any it returns more, which
// is closed when there are.
func (h *history) from(pos uint64) (events []event.Event, missed, next uint64, more <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.n-pos > keep {
		missed = h.n - keep - pos
		pos += missed
	}
	for ; pos < h.n && len(events) < batch; pos++ {
		events = append(events, h.ring[pos%keep])
	}
	return events, missed, pos, h.more
}

// follow calls f with past events, from pos to end as returned by begin, and then, unless follow
// is false, with each new one until ctx ends. It calls flush when f has had all present events,
// or a batch.
func (h *history) follow(ctx context.Context, pos, end uint64, follow bool, f func(event.Event) error, flush func() error) error {
	for {
		events, missed, next, more := h.from(pos)
		for i, e := range events {
			if i == 0 {
				e.Missed = missed
			}
			if err := f(e); err != nil {
				return err
			}
		}
		pos = next
		if err := flush(); err != nil {
			return err
		}
		if !follow && pos >= end {
			return nil
		}
		if len(events) > 0 {
			continue
		}
		select {
		case <-more:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
