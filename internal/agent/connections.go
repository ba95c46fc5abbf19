package agent

import (
	"fmt"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/stream"
)

// refusedBy makes events of what a function's worker has refused. They have no packet: a connection is not one, and the worker's word is no proof
// that there was one.
func (a *agent) refusedBy(p plan.Proxy) func(stream.Refusal) {
	return func(r stream.Refusal) {
		a.log.add(event.Event{
			Time: time.Now(), Node: a.status.get().Node, Interface: p.To, Hook: event.HookWorker, Reason: r.Why, Suppressed: r.Untold,
			Text: fmt.Sprintf("%s; function %s, %s to %s", stream.RefusalReasons[r.Why], p.Function, r.Client, r.Server),
		})
	}
}

// connectionsOf are the connections of a function of kind stream, or of all: the programs' table says which there are, and by which paths; the
// kernel what each of their sockets has moved.
func (a *agent) connectionsOf(function string, limit int) (any, error) {
	out := api.Connections{Version: api.Version, Node: a.status.get().Node, Functions: []string{}, Connections: []api.Connection{}}
	n := a.inForce.Load()
	if n == nil {
		return out, nil
	}
	for _, p := range n.Proxies {
		if p.Stream != nil && (function == "" || model.IsOf(p.Function, function)) {
			out.Functions = append(out.Functions, p.Function)
		}
	}
	slices.Sort(out.Functions)
	list, all, err := a.dp.Connections(out.Functions, limit)
	if err != nil {
		return nil, err
	}
	out.All = all
	for len(list) > 0 {
		of := list
		if i := slices.IndexFunc(list, func(c dataplane.Connection) bool { return c.Function != list[0].Function }); i > 0 {
			of = list[:i]
		}
		list = list[len(of):]
		sockets, err := a.socketsOf(of)
		if err != nil {
			return nil, err
		}
		for i, c := range of {
			out.Connections = append(out.Connections, wireConnection(*n, c, sockets[2*i], sockets[2*i+1]))
		}
	}
	return out, nil
}

// socketsOf are the sockets of one function's connections: two for each, the client's first. A function without a worker has none.
func (a *agent) socketsOf(list []dataplane.Connection) ([]host.TCPSocket, error) {
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock() // the worker's place stays meanwhile
	f := a.streams.by[list[0].Function]
	if f == nil || f.worker == nil {
		return make([]host.TCPSocket, 2*len(list)), nil
	}
	var ends []host.TCPEnds
	for _, c := range list {
		ends = append(ends, host.TCPEnds{Local: c.Server, Remote: c.Client}, host.TCPEnds{Local: c.Client, Remote: c.Server})
	}
	sockets, err := f.worker.Sockets(ends)
	if err != nil {
		return nil, fmt.Errorf("function %s: %w", list[0].Function, err)
	}
	return sockets, nil
}

func wireConnection(n plan.Node, c dataplane.Connection, client, server host.TCPSocket) api.Connection {
	w := api.Connection{
		Function: c.Function, Client: c.Client, Server: c.Server, State: connectionState(c), Idle: uint64(c.Idle / time.Second),
		ClientSide: wireSide(client), ServerSide: wireSide(server),
	}
	for _, e := range n.Egresses {
		if t := e.Through; t != nil && e.To == c.Function && t.Part == c.Part {
			w.Chain = e.Chain
			w.ClientSide.Comes, w.ClientSide.Goes = planPath(n, c.Part), planPath(n, t.Back)
			w.ServerSide.Comes, w.ServerSide.Goes = planPath(n, t.Other), planPath(n, t.Onward)
			break // its other epochs are the same
		}
	}
	return w
}

func connectionState(c dataplane.Connection) string {
	switch {
	case c.ClientEnded:
		return "client-ended"
	case c.ServerEnded:
		return "server-ended"
	case c.New || !c.Answered:
		return "opening"
	}
	return "open"
}

func wireSide(s host.TCPSocket) api.ConnectionSide {
	return api.ConnectionSide{State: s.State.String(), Received: s.Received, Sent: s.Sent}
}

// planPath names a path of the plan; nil: it has none.
func planPath(n plan.Node, path uint32) *api.ConnectionPath {
	for id := range n.PathIDs() {
		if id.Path == path {
			return &api.ConnectionPath{Path: path, Direction: id.Direction.String(), From: id.From, To: id.To}
		}
	}
	return nil
}
