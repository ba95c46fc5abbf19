package member

import (
	"log/slog"
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// A flow that the agent cannot read is not traced, instead of all packets of the path.
func TestAnOrderOfAFlowIsReadOrLeftOut(t *testing.T) {
	m := &Member{cfg: Config{Log: slog.New(slog.DiscardHandler)}, orders: orders{changed: make(chan struct{}, 1)}}
	m.order(&v1.Traces{Orders: []*v1.TraceOrder{
		{Id: 1, Path: 10, Packets: 3},
		{Id: 2, Path: 11, Packets: 3, Flow: "any,2001:db8::/32,tcp,any,443"},
		{Id: 3, Path: 12, Packets: 3, Flow: "any,2001:db8::/32,tcp,any,443,later"},
		{Id: 4, Path: 13, Packets: 3, Flow: "any,any,any"},
	}})
	flow, err := model.ParseFlow("any,2001:db8::/32,tcp,any,443")
	if err != nil {
		t.Fatal(err)
	}
	if have, want := m.Traces(), []event.Trace{{ID: 1, Path: 10, Packets: 3}, {ID: 2, Path: 11, Packets: 3, Flow: flow}}; !slices.Equal(have, want) {
		t.Errorf("traces %+v, want %+v", have, want)
	}
	select {
	case <-m.TracesChanged():
	default:
		t.Error("nothing says that they have changed")
	}
}
