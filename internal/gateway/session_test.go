package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/model"
)

// tickets keeps the session that a client may resume.
type tickets struct {
	mu   sync.Mutex
	kept *tls.ClientSessionState
}

func (k *tickets) Get(string) (*tls.ClientSessionState, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.kept, k.kept != nil
}

func (k *tickets) Put(_ string, s *tls.ClientSessionState) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s != nil {
		k.kept = s
	}
}

// resume connects to a host with the session that k keeps, and asks. It reports whether the session was resumed.
func (w *world) resume(c *tls.Certificate, k *tickets, host string) (resumed bool, status int, err error) {
	settings := w.tls(c, host)
	settings.ClientSessionCache = k
	// A name that the certificate has not, so that the client tries the ticket of another service at this one.
	settings.InsecureSkipVerify = true
	conn, err := w.connect(settings)
	if err != nil {
		return false, 0, err
	}
	defer conn.Close()
	r, err := ask(conn, "GET", "/x", host)
	if err != nil {
		return conn.ConnectionState().DidResume, 0, err
	}
	io.Copy(io.Discard, r.Body)
	return conn.ConnectionState().DidResume, r.StatusCode, nil
}

// ticketed has a client with a ticket of shop.
func ticketed(t *testing.T) (*world, tls.Certificate, *tickets) {
	t.Helper()
	w := newWorld(t, nil)
	c, k := w.staff.client(t, "/eng/alice"), &tickets{}
	if resumed, status, err := w.resume(&c, k, "shop.example.org"); resumed || status != 200 || err != nil {
		t.Fatalf("the first connection: resumed %t, %d, %v; want a full handshake and 200", resumed, status, err)
	}
	if resumed, status, err := w.resume(&c, k, "shop.example.org"); !resumed || status != 200 || err != nil {
		t.Fatalf("the second connection: resumed %t, %d, %v; want a resumption and 200", resumed, status, err)
	}
	return w, c, k
}

func TestASessionIsResumedByItsHolder(t *testing.T) {
	w, _, k := ticketed(t)
	// Who has the ticket and its secret is who had the certificate.
	if resumed, status, err := w.resume(nil, k, "shop.example.org"); !resumed || status != 200 || err != nil {
		t.Errorf("resumed %t, %d, %v; want a resumption and 200", resumed, status, err)
	}
	n := 0
	for _, r := range w.log() {
		if r.Event == EventOpened && r.Resumed && r.Identity == "spiffe://staff.example/eng/alice" {
			n++
		}
	}
	if n != 2 {
		t.Errorf("the audit log has %d resumed sessions of alice; want 2", n)
	}
}

func TestATicketOfAnotherServiceOpensNothing(t *testing.T) {
	w, _, k := ticketed(t)
	if resumed, status, err := w.resume(nil, k, "other.example.org"); resumed || err == nil {
		t.Errorf("resumed %t, %d, %v; want a full handshake, and a refusal for want of a certificate", resumed, status, err)
	}
	w.refused(CertMissing)
}

func TestARevokedCertificateIsNotResumed(t *testing.T) {
	w, c, k := ticketed(t)
	if err := w.lists.Take(w.staff.list(t, 2, nil, c.Leaf), time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, status, err := w.resume(&c, k, "shop.example.org"); err == nil {
		t.Errorf("answered with %d; want a refusal", status)
	}
	w.refused(CertRevoked)
	n := 0
	for _, r := range w.log() {
		if r.Event == EventOpened {
			n++
		}
	}
	if n != 2 {
		t.Errorf("%d sessions were opened; want those before the revocation alone", n)
	}
}

func TestACertificateOfADroppedAuthorityIsNotResumed(t *testing.T) {
	w, c, k := ticketed(t)
	w.staff = newIssuer(t, "staff", nil, nil)
	w.lists = NewRevocations([]*x509.Certificate{w.staff.cert}, time.Hour)
	if err := w.lists.Take(w.staff.list(t, 1, nil), time.Now()); err != nil {
		t.Fatal(err)
	}
	for i := range w.services {
		w.services[i].Clients = w.clients(nil)
	}
	if err := w.gateway.Update(w.services); err != nil {
		t.Fatal(err)
	}
	if _, status, err := w.resume(&c, k, "shop.example.org"); err == nil {
		t.Errorf("answered with %d; want a refusal", status)
	}
	w.refused(CertUntrusted)
}

func TestAnExpiredCertificateIsNotResumed(t *testing.T) {
	w, _, k := ticketed(t)
	w.offset.Store(int64(time.Hour + time.Minute))
	if resumed, status, err := w.resume(nil, k, "shop.example.org"); resumed || err == nil {
		t.Errorf("resumed %t, %d, %v; want a refusal", resumed, status, err)
	}
}

func TestKeysOfTicketsAreRenewedEachHour(t *testing.T) {
	w := newWorld(t, nil)
	key := func() [32]byte {
		w.gateway.Recheck()
		w.gateway.mu.Lock()
		defer w.gateway.mu.Unlock()
		return w.gateway.services["shop"].tickets[0]
	}
	first := key()
	w.offset.Store(int64(59 * time.Minute))
	if key() != first {
		t.Error("the key is another one after 59 minutes")
	}
	w.offset.Store(int64(time.Hour + time.Minute))
	second := key()
	w.gateway.mu.Lock()
	all := w.gateway.services["shop"].tickets
	other := w.gateway.services["other"].tickets[0]
	w.gateway.mu.Unlock()
	if second == first || len(all) != 2 || all[1] != first {
		t.Errorf("after an hour there are %d keys; want a new one, and the one before for tickets that are out", len(all))
	}
	if other == second || other == first {
		t.Error("two services have one key")
	}
	w.offset.Store(int64(24 * time.Hour))
	if key(); len(w.gateway.services["shop"].tickets) != 1 {
		t.Error("a key is taken for tickets a day later")
	}
}

// held opens a connection on which a request has been answered.
func (w *world) held(c *tls.Certificate) *tls.Conn {
	w.t.Helper()
	conn, err := w.connect(w.tls(c, "shop.example.org"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.Close() })
	r, err := ask(conn, "GET", "/x", "shop.example.org")
	if err != nil || r.StatusCode != 200 {
		w.t.Fatalf("answered with %v, %v; want 200", r, err)
	}
	io.Copy(io.Discard, r.Body)
	return conn
}

// over waits until the other side has closed a connection.
func over(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(await.Limit(10 * time.Second)))
	n, err := io.Copy(io.Discard, c)
	if e, ok := err.(net.Error); ok && e.Timeout() {
		t.Fatalf("the connection is open after ten seconds, and brought %d bytes", n)
	}
}

// alive holds that a connection still serves.
func alive(t *testing.T, c net.Conn) {
	t.Helper()
	r, err := ask(c, "GET", "/x", "shop.example.org")
	if err != nil || r.StatusCode != 200 {
		t.Fatalf("another client's connection: %v, %v; want 200", r, err)
	}
	io.Copy(io.Discard, r.Body)
}

func TestALiveConnectionEndsWithItsIdentity(t *testing.T) {
	for name, test := range map[string]struct {
		why Reason
		end func(t *testing.T, w *world, c tls.Certificate)
	}{
		"revoked": {CertRevoked, func(t *testing.T, w *world, c tls.Certificate) {
			if err := w.lists.Take(w.staff.list(t, 2, nil, c.Leaf), time.Now()); err != nil {
				t.Fatal(err)
			}
		}},
		"expired": {CertExpired, func(t *testing.T, w *world, c tls.Certificate) {
			w.offset.Store(int64(time.Until(c.Leaf.NotAfter) + time.Second))
		}},
		"without a rule": {RuleNone, func(t *testing.T, w *world, c tls.Certificate) {
			w.services[0].Rules = w.rules(model.ServiceRule{Who: "spiffe://staff.example/eng/bob", Chain: "deep"})
			if err := w.gateway.Update(w.services); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			alice := w.staff.client(t, "/eng/alice")
			bob := w.staff.client(t, "/eng/bob")
			if name == "expired" { // bob's lasts longer
				key := newKey(t)
				cert := sign(t, w.staff, key, func(c *x509.Certificate) { c.URIs, c.NotAfter = bob.Leaf.URIs, c.NotAfter.Add(time.Hour) })
				bob = tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
			}
			ends, stays := w.held(&alice), w.held(&bob)
			test.end(t, w, alice)
			over(t, ends)
			w.refused(test.why)
			for deadline := time.Now().Add(await.Limit(10 * time.Second)); !slices.ContainsFunc(w.log(), func(r Record) bool { return r.Event == EventClosed && r.Reason == test.why }); {
				if time.Now().After(deadline) {
					t.Fatalf("no end of a session is logged as %s", test.why)
				}
			}
			alive(t, stays)
		})
	}
}

// A request that is under way ends too, also where nothing is read or written.
func TestARequestThatIsUnderWayEndsWithItsIdentity(t *testing.T) {
	w := newWorld(t, nil)
	began, gone := make(chan struct{}), make(chan struct{})
	f := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
		close(gone)
	})
	w.answer.Store(&f)
	c := w.staff.client(t, "/eng/alice")
	failed := make(chan error, 1)
	go func() {
		r, err := w.web2(&c).Get("https://shop.example.org/x")
		if err == nil {
			r.Body.Close()
		}
		failed <- err
	}()
	<-began
	if err := w.lists.Take(w.staff.list(t, 2, nil, c.Leaf), time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; err == nil {
		t.Error("the request was answered")
	}
	<-gone // the origin hears of it
}

func TestARequestWhoseChainChangesEnds(t *testing.T) {
	w := newWorld(t, nil)
	began := make(chan struct{})
	f := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
	})
	w.answer.Store(&f)
	c := w.staff.client(t, "/eng/alice")
	conn, err := w.connect(w.tls(&c, "shop.example.org"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "GET /x HTTP/1.1\r\nHost: shop.example.org\r\n\r\n")
	<-began
	w.services[0].Rules = w.rules(model.ServiceRule{Who: "**", Chain: "light"})
	if err := w.gateway.Update(w.services); err != nil {
		t.Fatal(err)
	}
	over(t, conn)
	w.refused(RuleNone)
}

func TestHostsThatNoServiceHasAreRefused(t *testing.T) {
	for _, host := range []string{"", "nobody.example.org", "example.org"} {
		w := newWorld(t, nil)
		c := w.staff.client(t, "/eng/alice")
		settings := w.tls(&c, host)
		settings.InsecureSkipVerify = true
		if conn, err := w.connect(settings); err == nil {
			conn.Close()
			t.Errorf("host %q: hands are shaken", host)
		}
		w.refused(SNIUnknown)
	}
}

func TestTLS12IsRefused(t *testing.T) {
	w := newWorld(t, nil)
	c := w.staff.client(t, "/eng/alice")
	settings := w.tls(&c, "shop.example.org")
	settings.MaxVersion = tls.VersionTLS12
	if conn, err := w.connect(settings); err == nil {
		conn.Close()
		t.Error("hands are shaken by TLS 1.2")
	}
	w.refused(Handshake)
}

func TestHandshakesOfOneSourceAreBounded(t *testing.T) {
	w := newWorld(t, func(_ *world, c *Config) { c.Limits.HandshakesOf = 2 })
	var waiting []net.Conn
	for range 2 {
		c, err := net.Dial("tcp", w.address)
		if err != nil {
			t.Fatal(err)
		}
		waiting = append(waiting, c)
	}
	// The third is closed at once; which one is third, the gateway says.
	third, err := net.Dial("tcp", w.address)
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	w.refused(Limit)
	for _, c := range append(waiting, third) {
		c.Close()
	}
	// Once they are over, others have their turn.
	alice := w.staff.client(t, "/eng/alice")
	for deadline := time.Now().Add(await.Limit(10 * time.Second)); ; {
		if status, err := w.get(&alice, "/x"); err == nil && status == 200 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("an honest client is not let in after the others have gone")
		}
	}
}

// starved is a listener whose system has no files or memory for a while.
type starved struct {
	net.Listener
	with []error
}

func (s *starved) Accept() (net.Conn, error) {
	if len(s.with) > 0 {
		err := s.with[0]
		s.with = s.with[1:]
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", err)}
	}
	return s.Listener.Accept()
}

func TestAGatewayOutlastsWantOfFilesAndMemory(t *testing.T) {
	w := newWorld(t, nil)
	g, err := New(w.gateway.config)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.address = l.Addr().String()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() {
		done <- g.Serve(ctx, &starved{l, []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM}})
	}()
	c := w.staff.client(t, "/eng/alice")
	if status, err := w.get(&c, "/x"); err != nil || status != 200 {
		t.Errorf("answered with %d, %v; want 200", status, err)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// lingering is a connection whose gateway is about to read what a refused client sends still.
type lingering struct {
	*net.TCPConn
	reached, leave chan struct{}
}

func (l *lingering) CloseWrite() error {
	close(l.reached)
	<-l.leave
	return l.TCPConn.CloseWrite()
}

func TestARefusedClientThatStaysHasItsPlaceStill(t *testing.T) {
	w := newWorld(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(client, "no TLS")
	client.(*net.TCPConn).CloseWrite()
	defer client.Close()
	raw, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := &lingering{raw.(*net.TCPConn), make(chan struct{}), make(chan struct{})}
	done := make(chan struct{})
	go func() { w.gateway.take(t.Context(), c); close(done) }()
	places := func() int {
		w.gateway.mu.Lock()
		defer w.gateway.mu.Unlock()
		return w.gateway.handshakes
	}
	<-c.reached
	if n := places(); n != 1 {
		t.Errorf("%d handshakes are counted while the client stays; want 1", n)
	}
	close(c.leave)
	<-done
	if n := places(); n != 0 {
		t.Errorf("%d handshakes are counted; want none", n)
	}
}

func TestStrangersDoNotTakeTheLinesOfIdentities(t *testing.T) {
	at := time.Now()
	w := newWorld(t, func(_ *world, c *Config) { c.Now = func() time.Time { return at } })
	for range refusalsPerSecond + 5 {
		w.gateway.note(Record{}, refuse(Handshake, "noise"))
	}
	w.gateway.note(Record{Identity: "x"}, refuse(RuleNone, "an identity"))
	log := w.log()
	if last := log[len(log)-1]; last.Identity != "x" || last.Omitted != 0 || len(log) != refusalsPerSecond+1 {
		t.Errorf("the log has %d lines, and %+v is the last; want %d, and the identity's", len(log), last, refusalsPerSecond+1)
	}
}

func TestASlowHandshakeEnds(t *testing.T) {
	w := newWorld(t, func(_ *world, c *Config) { c.Limits.HandshakeTime = 50 * time.Millisecond })
	c, err := net.Dial("tcp", w.address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	over(t, c)
	w.refused(Limit)
}

func TestConnectionsOfOneIdentityAreBounded(t *testing.T) {
	w := newWorld(t, func(_ *world, c *Config) { c.Limits.ConnectionsIdentity = 2 })
	alice, bob := w.staff.client(t, "/eng/alice"), w.staff.client(t, "/eng/bob")
	w.held(&alice)
	first := w.held(&alice)
	if status, err := w.get(&alice, "/x"); err == nil {
		t.Errorf("a third connection is answered with %d", status)
	}
	w.refused(Limit)
	w.held(&bob)
	first.Close()
	for deadline := time.Now().Add(await.Limit(10 * time.Second)); ; {
		if status, err := w.get(&alice, "/x"); err == nil && status == 200 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no connection is let in after another one has ended")
		}
	}
}

func TestWhatCannotBeLoggedIsNotLetIn(t *testing.T) {
	t.Run("a session", func(t *testing.T) {
		w := newWorld(t, func(w *world, c *Config) { c.Audit.file = readOnly(t, w.logName) })
		c := w.staff.client(t, "/eng/alice")
		if status, err := w.get(&c, "/x"); err == nil {
			t.Errorf("answered with %d", status)
		}
		// The client may know before it is counted.
		for deadline := time.Now().Add(await.Limit(10 * time.Second)); ; time.Sleep(time.Millisecond) {
			n := w.gateway.Refused()[AuditFailed]
			if n == 1 {
				break
			}
			if n > 1 || time.Now().After(deadline) {
				t.Fatalf("%d refusals as audit-failed; want 1", n)
			}
		}
		w.quiet()
	})
	t.Run("a request", func(t *testing.T) {
		var audit *Audit
		w := newWorld(t, func(w *world, c *Config) { audit = c.Audit })
		c := w.staff.client(t, "/eng/alice")
		conn := w.held(&c)
		dials := len(w.dials)
		audit.mu.Lock()
		good := audit.file
		audit.file = readOnly(t, w.logName)
		audit.mu.Unlock()
		r, err := ask(conn, "GET", "/x", "shop.example.org")
		if err != nil || r.StatusCode != 503 {
			t.Errorf("answered with %v, %v; want 503", r, err)
		}
		audit.mu.Lock()
		audit.file = good
		audit.mu.Unlock()
		if len(w.dials) != dials || len(w.seen) != 1 {
			t.Errorf("the origin got %d requests; want the first alone", len(w.seen))
		}
		// The log goes on where it was.
		if status, err := w.get(&c, "/x"); err != nil || status != 200 {
			t.Errorf("answered with %d, %v; want 200", status, err)
		}
		w.log()
	})
}

func readOnly(t *testing.T, name string) *os.File {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestAGatewayEndsItsConnections(t *testing.T) {
	var l net.Listener
	w := newWorld(t, nil)
	g, err := New(w.gateway.config)
	if err != nil {
		t.Fatal(err)
	}
	if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	w.address = l.Addr().String()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- g.Serve(ctx, l) }()
	c := w.staff.client(t, "/eng/alice")
	conn := w.held(&c)
	stop()
	over(t, conn)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := g.Sessions(); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
}
