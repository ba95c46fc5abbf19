package gateway

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

// stays is a connection that has asked once.
func (w *world) stays(c *tls.Certificate) net.Conn {
	w.t.Helper()
	conn, err := w.connect(w.tls(c, "shop.example.org"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.Close() })
	w.answers(conn)
	return conn
}

func (w *world) answers(conn net.Conn) {
	w.t.Helper()
	r, err := ask(conn, "GET", "/x", "shop.example.org")
	if err == nil {
		_, err = io.Copy(io.Discard, r.Body)
	}
	if err != nil || r.StatusCode != 200 {
		w.t.Fatalf("the gateway answers %v, %v", r, err)
	}
}

// isOver holds that nothing comes on a connection any more.
func isOver(t *testing.T, what string, conn net.Conn) {
	t.Helper()
	n, err := conn.Read(make([]byte, 1))
	if nerr, ok := errors.AsType[net.Error](err); n > 0 || err == nil || ok && nerr.Timeout() {
		t.Errorf("%s is still there: %d bytes, %v", what, n, err)
	}
}

func TestARevokedIdentityIsNotLetIn(t *testing.T) {
	w, alice, k := ticketed(t)
	olga := w.staff.client(t, "/eng/olga")
	hers, olgas := w.stays(&alice), w.stays(&olga)
	const who = "spiffe://staff.example/eng/alice"
	if n := w.gateway.Revoke([]string{who}); n == 0 {
		t.Error("no session of hers has ended")
	}
	for _, s := range w.gateway.list() {
		if s.Identity == who {
			t.Errorf("session %d of hers is open when Revoke has returned", s.ID)
		}
	}
	isOver(t, "her connection", hers)
	if _, status, err := w.resume(nil, k, "shop.example.org"); err == nil {
		t.Errorf("her ticket is answered with %d", status)
	}
	if status, err := w.get(&alice, "/x"); err == nil {
		t.Errorf("her certificate is answered with %d", status)
	}
	again := w.staff.client(t, "/eng/alice")
	if status, err := w.get(&again, "/x"); err == nil {
		t.Errorf("another certificate of hers is answered with %d", status)
	}
	w.refused(IdentityRevoked)
	w.answers(olgas)
	// A configuration that comes in does not bring her back.
	if err := w.gateway.Update(w.services); err != nil {
		t.Fatal(err)
	}
	if status, err := w.get(&alice, "/x"); err == nil {
		t.Errorf("after a change of the services she is answered with %d", status)
	}
	if n := w.gateway.Revoke(nil); n != 0 {
		t.Errorf("%d sessions have ended since nobody is revoked", n)
	}
	if status, err := w.get(&alice, "/x"); status != 200 {
		t.Errorf("once she is not revoked any more: %d, %v; want 200", status, err)
	}
	var events []Event
	for _, r := range w.log() {
		if r.Event == EventRevoked || r.Event == EventTrusted {
			if events = append(events, r.Event); r.Identity != who {
				t.Errorf("the audit log has %s of %q; want %s", r.Event, r.Identity, who)
			}
		}
	}
	if want := []Event{EventRevoked, EventTrusted}; !slices.Equal(events, want) {
		t.Errorf("the audit log has %v; want %v", events, want)
	}
}

// Who was revoked before the gateway has started is not let in either.
func TestAGatewayStartsWithThoseWhoAreRevoked(t *testing.T) {
	w := newWorld(t, func(_ *world, c *Config) { c.Revoked = []string{"spiffe://staff.example/eng/alice"} })
	alice, olga := w.staff.client(t, "/eng/alice"), w.staff.client(t, "/eng/olga")
	if status, err := w.get(&alice, "/x"); err == nil {
		t.Errorf("she is answered with %d", status)
	}
	w.refused(IdentityRevoked)
	if status, err := w.get(&olga, "/x"); status != 200 {
		t.Errorf("somebody else gets %d, %v; want 200", status, err)
	}
}

// list is all open sessions, one at a time.
func (g *Gateway) list() (all []SessionState) {
	for after := uint64(0); ; {
		list, more := g.SessionsAfter(after, 1)
		if len(list) > 0 {
			after = list[0].ID
		}
		if all = append(all, list...); !more {
			return all
		}
	}
}

func TestSessionsAreListedAndEnded(t *testing.T) {
	w := newWorld(t, nil)
	alice := w.staff.client(t, "/eng/alice")
	one, two := w.stays(&alice), w.stays(&alice)
	w.answers(two)
	list := w.gateway.list()
	if len(list) != 2 || list[0].ID >= list[1].ID || list[0].Client != addrPort(one.LocalAddr()) || list[1].Client != addrPort(two.LocalAddr()) {
		t.Fatalf("the sessions are %+v", list)
	}
	if s := list[1]; s.Service != "shop" || s.Host != "shop.example.org" || s.Identity != "spiffe://staff.example/eng/alice" || s.Requests != 2 ||
		!slices.Equal(s.Chains, []string{"deep"}) || s.Resumed || !s.Until.Equal(alice.Leaf.NotAfter) || s.Since.IsZero() {
		t.Errorf("the second is %+v", s)
	}
	if got := w.gateway.Counts()["shop"]; got != (ServiceCount{Sessions: 2, Requests: 3}) {
		t.Errorf("the service has let in %+v, want two sessions and three requests", got)
	}
	if w.gateway.End(list[1].ID + 100) {
		t.Error("a session that is not there has ended")
	}
	if !w.gateway.End(list[0].ID) {
		t.Error("the first session was not found")
	}
	isOver(t, "the first connection", one)
	w.answers(two)
	w.refused(SessionEnded)
	if left := w.gateway.list(); len(left) != 1 || left[0].ID != list[1].ID {
		t.Errorf("the sessions that are left: %+v", left)
	}
	if got := w.gateway.Counts()["shop"]; got != (ServiceCount{Sessions: 1, Requests: 4}) {
		t.Errorf("with one session fewer, and one more request, the service has let in %+v", got)
	}
}

// Names that operators give are held to what clients can be called.
func TestAnIdentityIsOneThatClientsCanHave(t *testing.T) {
	for _, c := range []struct {
		kind               model.IdentityKind
		within, name, want string // "": refused
	}{
		{model.IdentitySPIFFE, "staff.example", "spiffe://staff.example/ops/bob", "spiffe://staff.example/ops/bob"},
		{model.IdentitySPIFFE, "staff.example", "spiffe://other.example/ops/bob", ""},
		{model.IdentitySPIFFE, "staff.example", "spiffe://staff.example/ops/*", ""},
		{model.IdentitySPIFFE, "staff.example", "bob", ""},
		{model.IdentitySPIFFE, "staff.example", "spiffe://staff.example/ops/b\nob", ""},
		{model.IdentityEmail, "example.org", "Bob@EXAMPLE.org", "Bob@example.org"},
		{model.IdentityEmail, "example.org", "bob@example.com", ""},
		{model.IdentityDNS, "example.org", "Pc7.Example.org", "pc7.example.org"},
		{model.IdentityDNS, "example.org", "example.org", ""},
		{model.IdentityURI, "urn:staff:", "urn:staff:bob", "urn:staff:bob"},
		{model.IdentityURI, "urn:staff:", "urn:staff:", ""},
	} {
		got, err := Identity(model.Clients{Kind: c.kind, Within: c.within}, c.name)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%q of kind %s within %s: %q, %v; want %q", c.name, c.kind, c.within, got, err, c.want)
		}
	}
}
