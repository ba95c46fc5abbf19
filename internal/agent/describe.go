package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// requestsMost bounds the requests of a session that are told.
const requestsMost = 1000

// sessionOf reads a session from the audit log.
func (a *agent) sessionOf(ctx context.Context, id uint64) (_ any, err error) {
	g, w, _ := a.gatewayNow()
	if g == nil {
		return nil, errNoGateway
	}
	log, err := os.Open(a.cfg.GatewayAudit)
	if err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	h, ok, err := gateway.ReadSession(ctx, log, id, requestsMost)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, &statusError{http.StatusNotFound, fmt.Errorf("the audit log %s has no session %d; waystamp get sessions lists those that are open", a.cfg.GatewayAudit, id)}
	}
	h.Shorten(requestsMost)
	o := h.Opened
	out := api.SessionDetail{
		Version: api.Version, Node: a.status.get().Node, ID: id, Opened: o.Time, Service: shown(o.Service), Host: shown(o.Host), Client: shown(o.Client),
		Identity: shown(o.Identity), Serial: shown(o.Serial), Resumed: o.Resumed, Omitted: h.Omitted, Requests: []api.SessionRequest{}, Chains: []api.SessionChain{},
	}
	if h.Closed != nil {
		at := h.Closed.Time
		out.Closed, out.Reason = &at, shown(string(h.Closed.Reason))
	} else if w != nil {
		open, err := w.Sessions()
		if err != nil {
			return nil, err
		}
		// One of an earlier process may have had the number.
		out.Open = slices.ContainsFunc(open, func(s gateway.SessionState) bool {
			return s.ID == id && s.Client.String() == o.Client && s.Identity == o.Identity
		})
	}
	for _, r := range h.Requests {
		d := r.Decided
		v := api.SessionRequest{
			Number: d.Request, At: d.Time, Method: shown(d.Method), Host: shown(d.Host), Path: shown(d.Path), Rule: d.Rule, Chain: shown(d.Chain), Reason: shown(string(d.Reason)), Text: shown(d.Text),
		}
		if e := r.Ended; e != nil {
			at := e.Time
			v.Ended, v.Status, v.Bytes, v.Received, v.Text = &at, e.Status, e.Bytes, e.Received, shown(e.Text)
		}
		out.Requests = append(out.Requests, v)
		if d.Chain != "" && !slices.ContainsFunc(out.Chains, func(c api.SessionChain) bool { return c.Chain == v.Chain }) {
			out.Chains = append(out.Chains, a.sessionChain(g, o.Service, v.Chain))
		}
	}
	return out, nil
}

// sessionChain is a chain as the plan in force has it.
func (a *agent) sessionChain(g *plan.Gateway, service, chain string) api.SessionChain {
	v := api.SessionChain{Chain: chain}
	n := a.inForce.Load()
	i := slices.IndexFunc(g.Chains, func(c plan.GatewayChain) bool { return c.Chain == chain })
	if n == nil || i < 0 {
		return v
	}
	c := g.Chains[i]
	v.Path, v.Ports, v.Sealed = fmt.Sprintf("0x%08x", c.Forward), c.Ports, originsOf(g, chain, service)
	for _, h := range n.Headends {
		if h.Path != c.Forward || h.From != model.GatewayName {
			continue
		}
		v.Epochs = append(v.Epochs, int(h.Epoch))
		if h.Seal != nil {
			v.Identity, v.Sealed = h.Seal.Name, h.Seal.Peer
		}
	}
	return v
}

// originsOf names the servers that a chain leads to: of a service, or of all if it is "".
func originsOf(g *plan.Gateway, chain, service string) string {
	var names []string
	for _, s := range g.Services {
		if service != "" && s.Name != service || !slices.ContainsFunc(s.Rules, func(r model.ServiceRule) bool { return r.Chain == chain }) {
			continue
		}
		name := "the server " + s.Origin.Name
		if s.Mode == model.ModeConnect {
			name = "nobody: the gateway is a proxy, and what its clients do not seal themselves is in clear"
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// readersOf are the ends on the node that hold payload in clear.
func (a *agent) readersOf() api.HeldReaders {
	out := api.HeldReaders{Version: api.Version, Node: a.status.get().Node, Readers: []api.HeldReader{}}
	n := a.inForce.Load()
	if n == nil {
		return out
	}
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	process := func(v *api.HeldReader) {
		switch f := a.streams.by[v.Function]; {
		case f == nil:
			v.Error = "its process is not started yet"
		case f.worker == nil && f.err != nil:
			v.Error = f.err.Error()
		case f.worker == nil:
			v.Error = "its process is started again"
		default:
			v.Process = f.worker.PID()
		}
	}
	certified := n.CertifiedEnds()
	key := func(v *api.HeldReader) {
		v.Key = "plan"
		name, own := certified[v.Function]
		if !own {
			return
		}
		v.Key = "node"
		if a.cfg.EndCertificate == nil {
			return
		}
		if ends := a.cfg.EndCertificate(name); !ends.IsZero() {
			v.CertificateEnds = &ends
		}
	}
	if g := n.Gateway(); g != nil {
		for _, c := range g.Chains {
			s := a.sessionChain(g, "", c.Chain)
			v := api.HeldReader{Chain: c.Chain, Function: model.GatewayName, Identity: s.Identity, From: "clients", To: s.Sealed, Epochs: []int{}}
			if s.Identity != "" {
				v.Epochs = append(v.Epochs, s.Epochs...)
				key(&v)
			}
			process(&v)
			out.Readers = append(out.Readers, v)
		}
	}
	for _, x := range n.Proxies {
		if x.Stream == nil || !x.Stream.Intrusive {
			continue
		}
		for _, e := range n.Egresses {
			if e.To != x.Function || e.Direction != model.Forward || e.Seal == nil {
				continue
			}
			i := slices.IndexFunc(out.Readers, func(v api.HeldReader) bool { return v.Function == x.Function && v.Chain == e.Chain })
			if i >= 0 {
				out.Readers[i].Epochs = append(out.Readers[i].Epochs, int(e.Epoch))
				continue
			}
			v := api.HeldReader{Chain: e.Chain, Function: x.Function, Identity: e.Seal.Name, From: e.Seal.Peer, Epochs: []int{int(e.Epoch)}}
			for _, h := range n.Headends {
				if h.From != x.Function || h.Chain != e.Chain || h.Direction != model.Forward {
					continue
				}
				if h.Seal != nil {
					v.To = h.Seal.Peer
					break
				}
				var names []string
				for _, o := range h.Origins {
					names = append(names, "the server "+o.Name)
				}
				v.To = strings.Join(names, ", ")
			}
			key(&v)
			if at := x.Stream.Attached; at != (model.Attached{}) {
				v.Clear = []string{at.To, at.From}
			}
			process(&v)
			out.Readers = append(out.Readers, v)
		}
	}
	return out
}
