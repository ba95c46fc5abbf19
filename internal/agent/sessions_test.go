package agent

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
)

const bob = "spiffe://staff.example/sales/bob"

// fakeGateway is a gateway's process that is made up.
type fakeGateway struct {
	gatewayWorker
	sessions []gateway.SessionState
	revoked  []string
	fails    error
}

func (g *fakeGateway) Sessions() ([]gateway.SessionState, error) { return g.sessions, g.fails }
func (g *fakeGateway) Refused() map[gateway.Reason]uint64 {
	return map[gateway.Reason]uint64{gateway.RuleNone: 3, "made-up\x1b": 9}
}
func (g *fakeGateway) Counts() map[string]gateway.ServiceCount {
	return map[string]gateway.ServiceCount{"shop": {Sessions: 2, Requests: 5}, "made-up": {Sessions: 1, Requests: 7}}
}
func (g *fakeGateway) End(id uint64) (bool, error) {
	i := slices.IndexFunc(g.sessions, func(s gateway.SessionState) bool { return s.ID == id })
	if i >= 0 {
		g.sessions = slices.Delete(g.sessions, i, i+1)
	}
	return i >= 0, g.fails
}
func (g *fakeGateway) Revoke(list []string) (n int, err error) {
	if g.fails != nil {
		return 0, g.fails
	}
	g.revoked = slices.Clone(list)
	g.sessions = slices.DeleteFunc(g.sessions, func(s gateway.SessionState) bool {
		if !slices.Contains(list, s.Identity) {
			return false
		}
		n++
		return true
	})
	return n, nil
}

// gatewayStage is an agent of a node with a gateway, as far as its socket needs it.
func gatewayStage(t *testing.T) (*stage, *fakeGateway) {
	t.Helper()
	s := newStage(t, time.Minute, 1)
	t.Cleanup(s.end)
	n := gatewayNode(t)
	s.a.inForce.Store(&n)
	s.a.cfg.StateDir = t.TempDir()
	at := netip.MustParseAddrPort("[fc00:7::2]:40000")
	g := &fakeGateway{sessions: []gateway.SessionState{
		{ID: 4, Service: "shop", Identity: bob, Client: at, Requests: 2, Chains: []string{"light"}},
		{ID: 7, Service: "shop", Identity: "\x1b[2J", Client: at},
	}}
	s.a.streams.by = map[string]*streamFunction{model.GatewayName: {worker: g}}
	return s, g
}

// A session is told with its requests, from the audit log, and by which chain each went.
func TestTheSocketDescribesASession(t *testing.T) {
	s, g := gatewayStage(t)
	log := filepath.Join(t.TempDir(), "audit.log")
	s.a.cfg.GatewayAudit = log
	if _, err := s.client.Session(t.Context(), 4); err == nil || !strings.Contains(err.Error(), "open the audit log") {
		t.Errorf("without a log: %v", err)
	}
	a, err := gateway.OpenAudit(log, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	at := g.sessions[0].Client.String()
	for _, r := range []gateway.Record{
		{Event: gateway.EventOpened, Session: 4, Service: "shop", Host: "shop.example.org", Client: at, Identity: bob, Serial: "3e9"},
		{Event: gateway.EventDecided, Session: 4, Request: 1, Method: "GET", Host: "shop.example.org", Path: "/status", Rule: 3, Chain: "light"},
		{Event: gateway.EventEnded, Session: 4, Request: 1, Chain: "light", Status: 200, Bytes: 5},
		{Event: gateway.EventDecided, Session: 4, Request: 2, Method: "GET", Path: "/\x1b[2J", Rule: 1, Chain: "scan"},
		{Event: gateway.EventRefused, Session: 4, Path: "/secret", Reason: gateway.RuleNone, Text: "no rule"},
		{Event: gateway.EventDecided, Session: 4, Request: 3, Rule: 9, Chain: "gone"},
		{Event: gateway.EventOpened, Session: 9, Service: "shop", Identity: bob},
		{Event: gateway.EventClosed, Session: 9, Reason: gateway.Idle},
		{Event: gateway.EventOpened, Session: 7, Service: "shop", Identity: "of a process before"},
	} {
		if err := a.Write(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	v, err := s.client.Session(t.Context(), 4)
	if err != nil || !v.Open || v.Closed != nil || v.Identity != bob || v.Service != "shop" || v.Serial != "3e9" || len(v.Requests) != 4 {
		t.Fatalf("%+v, %v", v, err)
	}
	if r := v.Requests[0]; r.Number != 1 || r.Chain != "light" || r.Rule != 3 || r.Status != 200 || r.Bytes != 5 || r.Ended == nil {
		t.Errorf("the first request is %+v", r)
	}
	if r := v.Requests[1]; strings.Contains(r.Path, "\x1b") || r.Ended != nil {
		t.Errorf("the second request is %+v; want it without what terminals do, and without an end", r)
	}
	if r := v.Requests[2]; r.Number != 0 || r.Reason != "rule-none" || r.Text != "no rule" {
		t.Errorf("what was refused is %+v", r)
	}
	var chains []string
	for _, c := range v.Chains {
		chains = append(chains, c.Chain)
	}
	if !slices.Equal(chains, []string{"light", "scan", "gone"}) || v.Chains[0].Path == "" || v.Chains[0].Sealed == "" || len(v.Chains[0].Epochs) == 0 || v.Chains[2].Path != "" {
		t.Errorf("its chains are %+v", v.Chains)
	}
	if v, err := s.client.Session(t.Context(), 9); err != nil || v.Open || v.Closed == nil || v.Reason != "idle" {
		t.Errorf("a session that has ended: %+v, %v", v, err)
	}
	if v, err := s.client.Session(t.Context(), 7); err != nil || v.Open || v.Closed != nil {
		t.Errorf("a session of a process before, whose number an open one has: %+v, %v", v, err)
	}
	if _, err := s.client.Session(t.Context(), 8); err == nil || !strings.Contains(err.Error(), "has no session 8") {
		t.Errorf("a session that is not there: %v", err)
	}
	g.fails = errors.New("it is gone")
	if _, err := s.client.Session(t.Context(), 4); err == nil || !strings.Contains(err.Error(), "it is gone") {
		t.Errorf("a process that does not answer: %v", err)
	}
	s.a.inForce.Store(nil)
	if _, err := s.client.Session(t.Context(), 4); err == nil || !strings.Contains(err.Error(), "has no gateway") {
		t.Errorf("without a gateway: %v", err)
	}
}

// Who reads what is what the node holds keys for, and an end without a process says why.
func TestTheSocketTellsWhoReads(t *testing.T) {
	s, _ := gatewayStage(t)
	s.a.streams.by[model.GatewayName] = &streamFunction{err: errors.New("no certificate")}
	v, err := s.client.Readers(t.Context())
	if err != nil || len(v.Readers) == 0 {
		t.Fatalf("%+v, %v", v, err)
	}
	for _, r := range v.Readers {
		if r.Function != model.GatewayName || r.From != "clients" || r.To == "" || r.Process != 0 || r.Error != "no certificate" || (r.Identity == "") != (len(r.Epochs) == 0) {
			t.Errorf("the gateway on chain %s is %+v", r.Chain, r)
		}
	}
	_, n := sealedNodes(t)
	s.a.inForce.Store(&n)
	if v, err = s.client.Readers(t.Context()); err != nil || !slices.ContainsFunc(v.Readers, func(r api.HeldReader) bool { return r.Chain == "deep" && r.Function == "dpi" }) {
		t.Fatalf("%+v, %v", v, err)
	}
	for _, r := range v.Readers {
		if r.Identity != model.SealName("r3", r.Function) || r.From != model.SealName("r1", model.GatewayName) || r.To != "the server shop.internal" || len(r.Epochs) != 1 || r.Error != "its process is not started yet" {
			t.Errorf("the function is %+v", r)
		}
	}
	s.a.inForce.Store(nil)
	if v, err = s.client.Readers(t.Context()); err != nil || len(v.Readers) != 0 {
		t.Errorf("without a plan: %+v, %v", v, err)
	}
}

func TestTheSocketTellsOfServicesAndSessions(t *testing.T) {
	s, g := gatewayStage(t)
	v, err := s.client.Services(t.Context())
	if err != nil || len(v.Services) != 1 || v.Services[0].Name != "shop" || v.Services[0].Sessions != 2 || !slices.Equal(v.Services[0].Chains, []string{"scan", "inspect", "light", "deep"}) {
		t.Errorf("services are %+v, %v", v, err)
	}
	if len(v.Refused) != 1 || v.Refused[0] != (api.GatewayRefusal{Reason: "rule-none", Count: 3}) {
		t.Errorf("refusals are %+v; want those of reasons that there are", v.Refused)
	}
	list, err := s.client.Sessions(t.Context())
	if err != nil || len(list.Sessions) != 2 || list.Sessions[0].Identity != bob || list.Sessions[0].Requests != 2 {
		t.Errorf("sessions are %+v, %v", list, err)
	}
	if got := list.Sessions[1].Identity; strings.Contains(got, "\x1b") {
		t.Errorf("what the process says reaches terminals as it is: %q", got)
	}
	if err := s.client.EndSession(t.Context(), 4); err != nil || len(g.sessions) != 1 {
		t.Errorf("%v, and sessions %+v are left; want one", err, g.sessions)
	}
	if err := s.client.EndSession(t.Context(), 4); err == nil || !strings.Contains(err.Error(), "no session has number 4") {
		t.Errorf("a session that is not there: %v", err)
	}
	g.fails = errors.New("it is gone")
	if _, err := s.client.Sessions(t.Context()); err == nil || !strings.Contains(err.Error(), "it is gone") {
		t.Errorf("a process that does not answer: %v", err)
	}
	if v, err := s.client.Services(t.Context()); err != nil || len(v.Services) == 0 || v.Error != "it is gone" {
		t.Errorf("services of a process that does not answer: %+v, %v", v, err)
	}
	s.a.streams.by[model.GatewayName] = &streamFunction{err: errors.New("no certificate")}
	if v, err := s.client.Services(t.Context()); err != nil || v.Error != "no certificate" {
		t.Errorf("without a process: %+v, %v", v, err)
	}
	s.a.inForce.Store(nil)
	if v, err := s.client.Services(t.Context()); err != nil || len(v.Services) != 0 {
		t.Errorf("without a gateway: %+v, %v", v, err)
	}
	for _, err := range []error{s.client.EndSession(t.Context(), 7), second(s.client.Revoke(t.Context(), api.RevokeRequest{Identity: bob}))} {
		if err == nil || !strings.Contains(err.Error(), "has no gateway") {
			t.Errorf("without a gateway: %v", err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestARevocationIsKept(t *testing.T) {
	s, g := gatewayStage(t)
	a, err := s.client.Revoke(t.Context(), api.RevokeRequest{Identity: bob})
	if err != nil || !a.Changed || a.Ended != 1 || !a.Running || !slices.Equal(g.revoked, []string{bob}) {
		t.Fatalf("%+v, %v, and the gateway has %q", a, err, g.revoked)
	}
	if a, err := s.client.Revoke(t.Context(), api.RevokeRequest{Identity: bob}); err != nil || a.Changed {
		t.Errorf("again: %+v, %v", a, err)
	}
	for _, wrong := range []string{"", "bob", "spiffe://other.example/bob", "spiffe://staff.example/*"} {
		if err := second(s.client.Revoke(t.Context(), api.RevokeRequest{Identity: wrong})); err == nil || !strings.Contains(err.Error(), "no client of this node's gateway is") {
			t.Errorf("%q: %v", wrong, err)
		}
	}
	// Another agent of the same state directory.
	var next revokedList
	if names, err := next.names(s.a.cfg.StateDir); err != nil || !slices.Equal(names, []string{bob}) {
		t.Errorf("the next agent has %q, %v", names, err)
	}
	// The list counts although the process does not take it.
	g.fails = errors.New("it is deaf")
	const eve = "spiffe://staff.example/sales/eve"
	if err := second(s.client.Revoke(t.Context(), api.RevokeRequest{Identity: eve})); err == nil || !strings.Contains(err.Error(), "it is deaf") {
		t.Errorf("a process that does not take the list: %v", err)
	}
	if names, err := new(revokedList).names(s.a.cfg.StateDir); err != nil || !slices.Equal(names, []string{bob, eve}) {
		t.Errorf("the next agent has %q, %v", names, err)
	}
	// Without a process the list waits for it.
	s.a.streams.by[model.GatewayName] = &streamFunction{}
	if a, err := s.client.Revoke(t.Context(), api.RevokeRequest{Identity: eve, Undo: true}); err != nil || a.Running || !a.Changed {
		t.Errorf("%+v, %v", a, err)
	}
	if v, err := s.client.Revoked(t.Context()); err != nil || len(v.Identities) != 1 || v.Identities[0].Identity != bob || v.Identities[0].Since.IsZero() {
		t.Errorf("%+v, %v", v, err)
	}
	if err := second(s.client.Revoke(t.Context(), api.RevokeRequest{Identity: eve, Undo: true})); err == nil || !strings.Contains(err.Error(), "is not revoked") {
		t.Errorf("who is not on the list: %v", err)
	}
}

// Without its list a gateway does not start: who was revoked would be let in.
func TestAGatewayDoesNotStartWithoutItsList(t *testing.T) {
	for text, says := range map[string]string{"{": "is damaged", `{"version":2}`: "has version 2", `{"version":1,"more":1}`: "is damaged"} {
		a := &agent{cfg: Config{StateDir: t.TempDir()}, places: fakePlaces{}}
		if err := os.WriteFile(filepath.Join(a.cfg.StateDir, revokedName), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		a.streams.by, a.streams.wakeUp = map[string]*streamFunction{}, make(chan struct{}, 1)
		n := gatewayNode(t)
		for _, p := range n.Proxies {
			if p.Gateway == nil {
				continue
			}
			if err := a.ensureGatewayLocked(n, p); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("with the list %q: %v; want %q", text, err, says)
			}
		}
	}
}

// The socket's group may read, and end nothing.
func TestChangesAreForRootAndTheAgentsUser(t *testing.T) {
	done := 0
	h := changes(func(http.ResponseWriter, *http.Request) { done++ })
	for _, c := range []struct {
		who  *unix.Ucred
		want int
	}{
		{&unix.Ucred{Uid: 0}, http.StatusOK}, {&unix.Ucred{Uid: uint32(os.Geteuid())}, http.StatusOK},
		{&unix.Ucred{Uid: uint32(os.Geteuid()) + 1}, http.StatusForbidden}, {nil, http.StatusForbidden},
	} {
		r := httptest.NewRequest(http.MethodDelete, api.PathSessions+"/1", nil)
		if c.who != nil {
			r = r.WithContext(context.WithValue(r.Context(), peerKey{}, c.who))
		}
		w := httptest.NewRecorder()
		h(w, r)
		if w.Code != c.want {
			t.Errorf("%+v gets %d; want %d", c.who, w.Code, c.want)
		}
	}
	if done != 2 {
		t.Errorf("%d of 4 were let; want 2", done)
	}
}
