package member

import (
	"context"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/event"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

const (
	// drainsMost are the epochs of whose numbers a node tells at once.
	drainsMost = 1024
	// numbersCall are the epochs and lanes that one call has, and numbersPause how long the node waits after one that failed.
	numbersCall  = 16384
	numbersPause = time.Second
)

// drains are the epochs of whose numbers the controller wants to know, and what it is to be told next. They end with the connection.
type drains struct {
	mu      sync.Mutex
	wanted  []event.Epoch
	changed chan struct{}

	given []event.Given
	seen  []event.Seen
	news  chan struct{} // there is something to tell
}

// Drains are the epochs of whose numbers the controller wants to know.
func (m *Member) Drains() []event.Epoch {
	m.drains.mu.Lock()
	defer m.drains.mu.Unlock()
	return slices.Clone(m.drains.wanted)
}

// DrainsChanged has a value when Drains may have others than before.
func (m *Member) DrainsChanged() <-chan struct{} { return m.drains.changed }

// Numbers hands over what the node knows of these epochs, in place of what was not told before. It does not wait.
func (m *Member) Numbers(given []event.Given, seen []event.Seen) {
	m.drains.mu.Lock()
	defer m.drains.mu.Unlock()
	m.drains.given, m.drains.seen = given, seen
	notify(m.drains.news)
}

func (m *Member) drain(d *v1.Drains) {
	var wanted []event.Epoch
	for _, e := range d.GetEpochs() {
		if len(wanted) < drainsMost && e.Epoch <= 255 {
			wanted = append(wanted, event.Epoch{Path: e.Path, Epoch: uint8(e.Epoch)})
		}
	}
	m.drains.mu.Lock()
	defer m.drains.mu.Unlock()
	if slices.Equal(m.drains.wanted, wanted) {
		return
	}
	m.drains.wanted, m.drains.given, m.drains.seen = wanted, nil, nil
	notify(m.drains.changed)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// tellNumbers tells the controller of numbers as long as ctx lasts. Errors end nothing: what it is not told of drains by time.
func (m *Member) tellNumbers(ctx context.Context, c client) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-m.drains.news:
		}
		m.drains.mu.Lock()
		given, seen := m.drains.given, m.drains.seen
		m.drains.given, m.drains.seen = nil, nil
		m.drains.mu.Unlock()
		for len(given)+len(seen) > 0 {
			var r *v1.NumbersRequest
			r, given, seen = numbersRequest(given, seen)
			_, err := c.Numbers(ctx, connect.NewRequest(r))
			if err == nil {
				continue
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			m.cfg.Log.Debug("the controller does not take the numbers of draining epochs", "err", err)
			select { // what is left is told anew, with later numbers
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(numbersPause):
			}
			break
		}
	}
}

// numbersRequest takes what one call has.
func numbersRequest(given []event.Given, seen []event.Seen) (*v1.NumbersRequest, []event.Given, []event.Seen) {
	r, room := &v1.NumbersRequest{}, numbersCall
	for len(given) > 0 && room > 0 {
		g := given[0]
		given = given[1:]
		room -= 1 + len(g.Lanes)
		r.Given = append(r.Given, &v1.GivenNumbers{Path: g.Path, Epoch: uint32(g.Epoch.Epoch), Lanes: lanes(g.Lanes)})
	}
	for len(seen) > 0 && room > 0 {
		s := seen[0]
		seen = seen[1:]
		room -= 1 + len(s.Lanes)
		r.Seen = append(r.Seen, &v1.SeenNumbers{
			Path: s.Path, Epoch: uint32(s.Epoch.Epoch), Lanes: lanes(s.Lanes), Missing: s.Missing, QuietMilliseconds: uint64(max(0, s.Quiet.Milliseconds())), Moved: s.Moved,
		})
	}
	return r, given, seen
}

func lanes(list []event.Lane) (out []*v1.LaneNumber) {
	for _, l := range list {
		out = append(out, &v1.LaneNumber{Lane: uint32(l.Lane), Number: l.Number})
	}
	return out
}
