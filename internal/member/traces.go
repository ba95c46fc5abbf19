package member

import (
	"fmt"
	"slices"
	"sync"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// orders are the traces that the controller wants of the node. They end with the connection: nobody else could end them.
type orders struct {
	mu      sync.Mutex
	wanted  []event.Trace
	changed chan struct{}
}

// Traces are those that the controller wants of the node's headends now.
func (m *Member) Traces() []event.Trace {
	m.orders.mu.Lock()
	defer m.orders.mu.Unlock()
	return slices.Clone(m.orders.wanted)
}

// TracesChanged has a value when Traces may have others than before.
func (m *Member) TracesChanged() <-chan struct{} { return m.orders.changed }

func (m *Member) order(t *v1.Traces) {
	var wanted []event.Trace
	for _, o := range t.GetOrders() {
		w := event.Trace{ID: o.Id, Path: o.Path, Packets: int(min(o.Packets, event.TracePacketsMax))}
		if o.Flow != "" {
			f, err := model.ParseFlow(o.Flow)
			if err != nil { // not all packets instead
				m.cfg.Log.Error("the controller wants a flow traced, which this agent cannot read; it traces nothing of it", "path", fmt.Sprintf("%#x", o.Path), "err", err)
				continue
			}
			w.Flow = f
		}
		wanted = append(wanted, w)
	}
	m.orders.mu.Lock()
	same := slices.Equal(m.orders.wanted, wanted)
	m.orders.wanted = wanted
	m.orders.mu.Unlock()
	if same {
		return
	}
	select {
	case m.orders.changed <- struct{}{}:
	default:
	}
}
