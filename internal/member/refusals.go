package member

import (
	"context"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/event"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

const (
	// refusalsHeld are how many refused packets wait for the controller; the earliest are lost first.
	refusalsHeld = 512
	// refusalsCall are how many one call has at most, and refusalsPause how long the node waits for the next one unless the
	// controller says something else, and refusalsPauseMax at most.
	refusalsCall     = 64
	refusalsPause    = time.Second
	refusalsPauseMax = time.Minute
)

// refusals are packets that the node has refused, on their way to the controller.
type refusals struct {
	mu      sync.Mutex
	lines   [][]byte // the earliest first
	dropped uint64   // that nobody was told of
	more    chan struct{}
}

// Refused hands a refused packet over for the controller. It does not wait, and there may be any number: what the
// controller cannot take is counted.
func (m *Member) Refused(e event.Event) {
	line, err := event.Append(nil, e)
	r := &m.refusals
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.dropped++
		return
	}
	if len(r.lines) == refusalsHeld {
		r.lines = append(r.lines[:0], r.lines[1:]...)
		r.dropped++
	}
	r.lines = append(r.lines, line[:len(line)-1])
	select {
	case r.more <- struct{}{}:
	default:
	}
}

// take is what the next call tells.
func (r *refusals) take() (lines [][]byte, dropped uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := min(len(r.lines), refusalsCall)
	lines, r.lines = r.lines[:n:n], append([][]byte(nil), r.lines[n:]...)
	dropped, r.dropped = r.dropped, 0
	return lines, dropped
}

// lose counts what was in a call that failed: whether the controller has it, nobody knows.
func (r *refusals) lose(n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropped += n
}

// tellRefusals tells the controller of refused packets as long as ctx lasts. Errors end nothing: plans matter more.
func (m *Member) tellRefusals(ctx context.Context, c client) error {
	for {
		lines, dropped := m.refusals.take()
		if len(lines) == 0 {
			m.refusals.lose(dropped) // it goes with the next ones
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-m.refusals.more:
			}
			continue
		}
		pause := refusalsPause
		answer, err := c.Refused(ctx, connect.NewRequest(&v1.RefusedRequest{Events: lines, Dropped: dropped}))
		if err != nil {
			m.refusals.lose(dropped + uint64(len(lines)))
		}
		switch {
		case err == nil:
			pause = min(max(pause, time.Duration(answer.Msg.PauseMilliseconds)*time.Millisecond), refusalsPauseMax)
		case ctx.Err() != nil:
			return context.Cause(ctx)
		default:
			m.cfg.Log.Debug("the controller does not take refused packets", "err", err)
			pause = pauseMax
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}
