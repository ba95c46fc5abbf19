package agent

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/stream"
)

// socketWorker has the sockets of one connection.
type socketWorker struct {
	placedWorker
	asked []host.TCPEnds
}

func (w *socketWorker) Sockets(ends []host.TCPEnds) (out []host.TCPSocket, err error) {
	w.asked = append(w.asked, ends...)
	for i := range ends {
		out = append(out, host.TCPSocket{State: 1, Received: uint64(10*len(w.asked) + i), Sent: uint64(i)})
	}
	return out, nil
}

func zipNode() *plan.Node {
	part := func(path uint32, d model.Direction, from, to string) plan.PathID {
		return plan.PathID{Path: path, Epoch: 1, Chain: "web", Direction: d, From: from, To: to}
	}
	return &plan.Node{
		Name: "r2",
		Headends: []plan.Headend{
			{PathID: part(2, model.Forward, "zip", "unzip")},
			{PathID: part(4, model.Reverse, "zip", "")},
		},
		Egresses: []plan.Egress{
			{PathID: part(3, model.Reverse, "unzip", "zip"), Through: &plan.Through{Part: 3, Onward: 4, Back: 2, Other: 1}},
			{PathID: part(1, model.Forward, "", "zip"), Through: &plan.Through{Part: 1, Onward: 2, Back: 4, Other: 3, Opens: true}},
		},
		Proxies: []plan.Proxy{{Function: "fw"}, {Function: "zip", Stream: &plan.Stream{}}, {Function: "dpi", Stream: &plan.Stream{}}},
	}
}

// A connection has the four paths of its plan, and what the kernel says of its two sockets. One whose worker or path is gone is there without.
func TestConnectionsHaveTheirPathsAndSockets(t *testing.T) {
	m := newFakeMachine()
	client, server := netip.MustParseAddrPort("[fc00:7::2]:40000"), netip.MustParseAddrPort("[fc00:8::2]:80")
	m.conns = []dataplane.Connection{
		{Function: "dpi", Client: client, Server: server, Part: 1, Answered: true, Idle: 1500 * time.Millisecond},
		{Function: "zip", Client: client, Server: server, Part: 1, Answered: true, ServerEnded: true},
		{Function: "zip", Client: client, Server: server, Part: 9, New: true},
	}
	w := &socketWorker{}
	a := &agent{dp: fakeDataPath{m}, streams: streams{by: map[string]*streamFunction{"zip": {worker: w}}}}
	a.status = newStatusBoard("test")
	a.inForce.Store(zipNode())
	got, err := a.connectionsOf("", 10)
	if err != nil {
		t.Fatal(err)
	}
	path := func(path uint32, direction, from, to string) *api.ConnectionPath {
		return &api.ConnectionPath{Path: path, Direction: direction, From: from, To: to}
	}
	want := api.Connections{Version: api.Version, Functions: []string{"dpi", "zip"}, All: 3, Connections: []api.Connection{
		{Function: "dpi", Client: client, Server: server, State: "open", Idle: 1},
		{
			Function: "zip", Client: client, Server: server, Chain: "web", State: "server-ended",
			ClientSide: api.ConnectionSide{State: "established", Received: 40, Sent: 0, Comes: path(1, "forward", "", "zip"), Goes: path(4, "reverse", "zip", "")},
			ServerSide: api.ConnectionSide{State: "established", Received: 41, Sent: 1, Comes: path(3, "reverse", "unzip", "zip"), Goes: path(2, "forward", "zip", "unzip")},
		},
		{
			Function: "zip", Client: client, Server: server, State: "opening",
			ClientSide: api.ConnectionSide{State: "established", Received: 42, Sent: 2}, ServerSide: api.ConnectionSide{State: "established", Received: 43, Sent: 3},
		},
	}}
	addresses := cmpopts.EquateComparable(netip.AddrPort{})
	if diff := cmp.Diff(want, got, addresses); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	ends := []host.TCPEnds{{Local: server, Remote: client}, {Local: client, Remote: server}}
	if diff := cmp.Diff(append(ends, ends...), w.asked, addresses); diff != "" {
		t.Errorf("sockets asked for (-want +got):\n%s", diff)
	}
	for function, want := range map[string]int{"zip": 2, "fw": 0, "nobody": 0} {
		got, err := a.connectionsOf(function, 1)
		if c := got.(api.Connections); err != nil || c.All != want || len(c.Connections) != min(want, 1) || len(c.Functions) != min(want, 1) {
			t.Errorf("%s: %d of %d connections of %q, %v; want one of %d at most", function, len(c.Connections), c.All, c.Functions, err, want)
		}
	}
}

// A function's name is also that of its instances.
func TestConnectionsOfAFunctionAreThoseOfItsInstances(t *testing.T) {
	a := &agent{dp: fakeDataPath{newFakeMachine()}, status: newStatusBoard("test")}
	n := zipNode()
	n.Proxies = append(n.Proxies, plan.Proxy{Function: "zip:0x2a", Stream: &plan.Stream{}}, plan.Proxy{Function: "zip2:0x2a", Stream: &plan.Stream{}})
	a.inForce.Store(n)
	for function, want := range map[string][]string{"zip": {"zip", "zip:0x2a"}, "zip:0x2a": {"zip:0x2a"}, "zip2": {"zip2:0x2a"}, "zip:0x2": {}} {
		got, err := a.connectionsOf(function, 1)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got.(api.Connections).Functions); diff != "" {
			t.Errorf("functions of %s (-want +got):\n%s", function, diff)
		}
	}
}

// A worker's refusal is an event, with the worker's interface and both ends.
func TestRefusalsOfWorkersAreEvents(t *testing.T) {
	a := &agent{log: newHistory(), status: newStatusBoard("test")}
	say := a.refusedBy(plan.Proxy{Function: "zip", Proxy: model.Proxy{To: "wss-zip"}})
	say(stream.Refusal{Client: netip.MustParseAddrPort("192.0.2.2:5"), Server: netip.MustParseAddrPort("198.51.100.2:80"), Why: "worker-limit", Untold: 3})
	events, _, _, _ := a.log.from(0)
	if len(events) != 1 {
		t.Fatalf("%d events", len(events))
	}
	e := events[0]
	if e.Hook != event.HookWorker || e.Interface != "wss-zip" || e.Reason != "worker-limit" || e.Suppressed != 3 || e.Packet != nil || !strings.HasSuffix(e.Text, "; function zip, 192.0.2.2:5 to 198.51.100.2:80") {
		t.Errorf("the event is %+v", e)
	}
	if line, err := event.Append(nil, e); err != nil {
		t.Error(err)
	} else if _, err := event.Parse(line[:len(line)-1]); err != nil {
		t.Errorf("a reader refuses it: %v", err)
	}
}

// The number of connections in an answer is bounded.
func TestConnectionsAreAskedForWithABound(t *testing.T) {
	s := newStage(t, time.Minute, 4)
	defer s.end()
	for _, limit := range []int{-1, api.ConnectionsMax + 1} {
		if _, err := s.client.Connections(t.Context(), "", limit); err == nil || !strings.Contains(err.Error(), "expect 0 to 10000") {
			t.Errorf("limit %d: %v; want that it is refused", limit, err)
		}
	}
	if v, err := s.client.Connections(t.Context(), "zip", 1); err != nil || v.Functions == nil || v.Connections == nil {
		t.Errorf("%+v, %v; want empty lists", v, err)
	}
}
