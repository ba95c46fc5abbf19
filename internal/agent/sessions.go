package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// serveGateway adds what the socket tells of the gateway's services and sessions, and lets operators change.
func (a *agent) serveGateway(mux *http.ServeMux) {
	mux.HandleFunc("GET "+api.PathServices, func(w http.ResponseWriter, _ *http.Request) { answer(w)(a.servicesOf()) })
	mux.HandleFunc("GET "+api.PathSessions, func(w http.ResponseWriter, _ *http.Request) { answer(w)(a.sessionsOf()) })
	mux.HandleFunc("GET "+api.PathRevoked, func(w http.ResponseWriter, _ *http.Request) { answer(w)(a.revokedOf()) })
	mux.HandleFunc("GET "+api.PathReaders, func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, a.readersOf()) })
	// As the audit log, it says what clients have asked for.
	mux.HandleFunc("GET "+api.PathSessions+"/{id}", owner("describe sessions", func(w http.ResponseWriter, r *http.Request) {
		id, err := strconv.ParseUint(r.PathValue("id"), 10, 64)
		if err != nil {
			http.Error(w, fmt.Sprintf("%q is not the number of a session", r.PathValue("id")), http.StatusBadRequest)
			return
		}
		answer(w)(a.sessionOf(r.Context(), id))
	}))
	mux.HandleFunc("DELETE "+api.PathSessions+"/{id}", changes(func(w http.ResponseWriter, r *http.Request) {
		id, err := strconv.ParseUint(r.PathValue("id"), 10, 64)
		if err != nil {
			http.Error(w, fmt.Sprintf("%q is not the number of a session", r.PathValue("id")), http.StatusBadRequest)
			return
		}
		answer(w)(a.endSession(id))
	}))
	mux.HandleFunc("POST "+api.PathRevoked, changes(func(w http.ResponseWriter, r *http.Request) {
		var q api.RevokeRequest
		if err := json.NewDecoder(io.LimitReader(r.Body, 64<<10)).Decode(&q); err != nil {
			http.Error(w, "the request cannot be read: "+err.Error(), http.StatusBadRequest)
			return
		}
		answer(w)(a.revoke(q))
	}))
}

// answer writes a value, or the error with its status.
func answer(w http.ResponseWriter) func(v any, err error) {
	return func(v any, err error) {
		if err == nil {
			writeJSON(w, v)
			return
		}
		status := http.StatusInternalServerError
		if s, ok := errors.AsType[*statusError](err); ok {
			status = s.status
		}
		http.Error(w, err.Error(), status)
	}
}

// statusError is an error with its status in HTTP.
type statusError struct {
	status int
	error
}

type peerKey struct{}

// withPeer notes who has connected.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return ctx
	}
	var who *unix.Ucred
	if raw.Control(func(fd uintptr) { who, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }) != nil || err != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, who)
}

// changes lets root and the agent's own user alone: the socket's group may read.
func changes(f http.HandlerFunc) http.HandlerFunc {
	return owner("end sessions and revoke identities", f)
}

func owner(what string, f http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		who, _ := r.Context().Value(peerKey{}).(*unix.Ucred)
		if who == nil || who.Uid != 0 && int(who.Uid) != os.Geteuid() {
			http.Error(w, "only root and the user of the agent "+what, http.StatusForbidden)
			return
		}
		f(w, r)
	}
}

// gatewayNow is the plan's gateway and its process; nil: it does not run, and err says why.
func (a *agent) gatewayNow() (g *plan.Gateway, w gatewayWorker, err error) {
	n := a.inForce.Load()
	if n == nil || n.Gateway() == nil {
		return nil, nil, nil
	}
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	f := a.streams.by[model.GatewayName]
	switch {
	case f == nil:
		return n.Gateway(), nil, errors.New("it is not started yet")
	case f.worker == nil && f.err != nil:
		return n.Gateway(), nil, f.err
	case f.worker == nil:
		return n.Gateway(), nil, errors.New("its process is started again")
	}
	w, _ = f.worker.(gatewayWorker)
	return n.Gateway(), w, nil
}

// shown is a text of the gateway's process, which is not trusted, for people's terminals.
func shown(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(s, string(unicode.ReplacementChar)))
}

func (a *agent) sessionsOf() (any, error) {
	out := api.Sessions{Version: api.Version, Node: a.status.get().Node, Sessions: []api.Session{}}
	_, w, _ := a.gatewayNow()
	if w == nil {
		return out, nil // none are open
	}
	list, err := w.Sessions()
	if err != nil {
		return nil, err
	}
	for _, s := range list {
		chains := []string{}
		for _, c := range s.Chains {
			chains = append(chains, shown(c))
		}
		out.Sessions = append(out.Sessions, api.Session{
			ID: s.ID, Service: shown(s.Service), Host: shown(s.Host), Identity: shown(s.Identity), Serial: shown(s.Serial), Client: s.Client,
			Since: s.Since, Until: s.Until, Resumed: s.Resumed, Requests: s.Requests, UnderWay: s.UnderWay, Chains: chains,
		})
	}
	return out, nil
}

func (a *agent) servicesOf() (any, error) {
	out := api.Services{Version: api.Version, Node: a.status.get().Node, Services: []api.Service{}, Refused: []api.GatewayRefusal{}}
	revoked, err := a.revoked.get(a.cfg.StateDir)
	if err != nil {
		out.Error = err.Error()
	}
	out.Revoked = len(revoked)
	g, w, why := a.gatewayNow()
	if g == nil {
		return out, nil
	}
	open := map[string]int{}
	if w != nil {
		list, err := w.Sessions()
		if err != nil && out.Error == "" {
			out.Error = err.Error()
		}
		for _, s := range list {
			open[s.Service]++
		}
		refused := w.Refused()
		for _, reason := range gateway.Reasons() { // a process that is not trusted has no others
			if n := refused[reason]; n > 0 {
				out.Refused = append(out.Refused, api.GatewayRefusal{Reason: string(reason), Count: n})
			}
		}
	} else if why != nil && out.Error == "" {
		out.Error = why.Error()
	}
	for _, s := range g.Services {
		v := api.Service{
			Name: s.Name, Hosts: s.Hosts, Address: s.Address, Clients: s.Clients, Protocol: s.Protocol(), Mode: s.Mode.String(), Origin: s.Origin.Address, Rules: len(s.Rules), Sessions: open[s.Name],
		}
		for _, c := range g.Clients {
			if c.Name == s.Clients {
				v.Kind, v.Within = fmt.Sprint(c.Kind), c.Within
			}
		}
		for _, d := range s.Destinations {
			v.Destinations = append(v.Destinations, d.Name())
		}
		for _, r := range s.Rules {
			if !slices.Contains(v.Chains, r.Chain) {
				v.Chains = append(v.Chains, r.Chain)
			}
		}
		out.Services = append(out.Services, v)
	}
	return out, nil
}

func (a *agent) revokedOf() (any, error) {
	list, err := a.revoked.get(a.cfg.StateDir)
	if err != nil {
		return nil, err
	}
	out := api.Revoked{Version: api.Version, Node: a.status.get().Node, Identities: []api.RevokedIdentity{}}
	out.Identities = append(out.Identities, list...)
	return out, nil
}

var errNoGateway = &statusError{http.StatusConflict, errors.New("this node has no gateway")}

func (a *agent) endSession(id uint64) (any, error) {
	g, w, _ := a.gatewayNow()
	if g == nil {
		return nil, errNoGateway
	}
	gone := &statusError{http.StatusNotFound, fmt.Errorf("no session has number %d; waystamp get sessions lists those that are open", id)}
	if w == nil {
		return nil, gone
	}
	ended, err := w.End(id)
	if err == nil && !ended {
		err = gone
	}
	if err != nil {
		return nil, err
	}
	a.cfg.Log.Info("a session of the gateway was ended by an operator", "session", id)
	return struct{}{}, nil
}

// revoke changes the list of revoked identities, and returns when the gateway has taken it.
func (a *agent) revoke(q api.RevokeRequest) (any, error) {
	g, _, _ := a.gatewayNow()
	if g == nil {
		return nil, errNoGateway
	}
	switch who, err := identityAmong(g.Clients, q.Identity); {
	case err == nil:
		q.Identity = who
	case !q.Undo: // what is on the list may be of clients that are gone
		return nil, &statusError{http.StatusBadRequest, err}
	}
	a.revoked.changing.Lock()
	defer a.revoked.changing.Unlock()
	changed, err := a.revoked.change(a.cfg.StateDir, q, time.Now())
	if err != nil {
		return nil, err
	}
	if q.Undo && !changed {
		return nil, &statusError{http.StatusNotFound, fmt.Errorf("%s is not revoked; waystamp get revoked lists who is", shown(q.Identity))}
	}
	// A gateway that is just being started has the list from before, and is there once its start is over: gatewayNow waits for that.
	_, w, _ := a.gatewayNow()
	out := api.RevokeAnswer{Version: api.Version, Node: a.status.get().Node, Identity: q.Identity, Changed: changed, Running: w != nil}
	if w != nil {
		names, err := a.revoked.names(a.cfg.StateDir)
		if err != nil {
			return nil, err
		}
		if out.Ended, err = w.Revoke(names); err != nil {
			return nil, fmt.Errorf("the list has it, and the gateway's process, which did not take it, is started again with it: %w", err)
		}
	}
	a.cfg.Log.Info("the list of revoked identities was changed by an operator", "identity", q.Identity, "revoked", !q.Undo, "sessions_ended", out.Ended)
	return out, nil
}

// identityAmong is an identity as the gateway writes it, if some of its clients can have it.
func identityAmong(clients []model.Clients, name string) (string, error) {
	var errs []string
	for _, c := range clients {
		who, err := gateway.Identity(c, name)
		if err == nil {
			return who, nil
		}
		errs = append(errs, fmt.Sprintf("clients %s: %v", c.Name, err))
	}
	return "", fmt.Errorf("no client of this node's gateway is %q: %s", name, strings.Join(errs, "; "))
}
