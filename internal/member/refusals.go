package member

import (
	"bytes"
	"context"
	"encoding/json"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/event"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

const (
	// refusalsHeld are how many refused packets, or hops of traced ones, wait for the controller; the earliest are lost first.
	refusalsHeld = 512
	// refusalsCall are how many one call has at most, and refusalsPause how long the node waits for the next one unless the
	// controller says something else, and refusalsPauseMax at most.
	refusalsCall     = 64
	refusalsPause    = time.Second
	refusalsPauseMax = time.Minute
)

// outbox has what happens to packets at the node, on its way to the controller: refused packets, or hops of traced ones.
type outbox struct {
	mu      sync.Mutex
	lines   [][]byte // the earliest first
	dropped uint64   // that nobody was told of
	more    chan struct{}
}

// Refused hands a refused packet over for the controller. It does not wait, and there may be any number: what the
// controller cannot take is counted.
func (m *Member) Refused(e event.Event) {
	line, err := event.Append(nil, e)
	m.refusals.add(line, err)
}

// Traced hands a hop of a traced packet over for the controller, as Refused does.
func (m *Member) Traced(h event.Hop) {
	line, err := json.Marshal(h)
	m.traced.add(line, err)
}

func (r *outbox) add(line []byte, err error) {
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
	r.lines = append(r.lines, bytes.TrimSuffix(line, []byte("\n")))
	select {
	case r.more <- struct{}{}:
	default:
	}
}

// take is what the next call tells.
func (r *outbox) take() (lines [][]byte, dropped uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := min(len(r.lines), refusalsCall)
	lines, r.lines = r.lines[:n:n], append([][]byte(nil), r.lines[n:]...)
	dropped, r.dropped = r.dropped, 0
	return lines, dropped
}

// lose counts what was in a call that failed: whether the controller has it, nobody knows.
func (r *outbox) lose(n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropped += n
}

// tellRefusals tells the controller of refused packets as long as ctx lasts.
func (m *Member) tellRefusals(ctx context.Context, c client) error {
	return m.tellOf(ctx, &m.refusals, "refused packets", func(lines [][]byte, dropped uint64) (uint32, error) {
		answer, err := c.Refused(ctx, connect.NewRequest(&v1.RefusedRequest{Events: lines, Dropped: dropped}))
		if err != nil {
			return 0, err
		}
		return answer.Msg.PauseMilliseconds, nil
	})
}

// tellTraced tells the controller of hops of traced packets as long as ctx lasts.
func (m *Member) tellTraced(ctx context.Context, c client) error {
	return m.tellOf(ctx, &m.traced, "traced packets", func(lines [][]byte, dropped uint64) (uint32, error) {
		answer, err := c.Traced(ctx, connect.NewRequest(&v1.TracedRequest{Hops: lines, Dropped: dropped}))
		if err != nil {
			return 0, err
		}
		return answer.Msg.PauseMilliseconds, nil
	})
}

// tellOf empties an outbox as long as ctx lasts. Errors end nothing: plans matter more.
func (m *Member) tellOf(ctx context.Context, box *outbox, what string, call func(lines [][]byte, dropped uint64) (pause uint32, err error)) error {
	for {
		lines, dropped := box.take()
		if len(lines) == 0 {
			box.lose(dropped) // it goes with the next ones
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-box.more:
			}
			continue
		}
		pause := refusalsPause
		wanted, err := call(lines, dropped)
		if err != nil {
			box.lose(dropped + uint64(len(lines)))
		}
		switch {
		case err == nil:
			pause = min(max(pause, time.Duration(wanted)*time.Millisecond), refusalsPauseMax)
		case ctx.Err() != nil:
			return context.Cause(ctx)
		default:
			m.cfg.Log.Debug("the controller does not take what happens to packets", "what", what, "err", err)
			pause = pauseMax
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}
