package gateway

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/gateway/policy"
	"github.com/waystamp/waystamp/internal/model"
)

// opaqueWorld has a service db.example.org whose bytes are not read, before an origin that does serve with each connection.
func opaqueWorld(t *testing.T, o model.Opaque, speaks []string, serve func(*tls.Conn), change func(*world, *Config)) *world {
	t.Helper()
	return newWorld(t, func(w *world, c *Config) {
		l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{w.web.server(t, "db.internal")}, NextProtos: speaks})
		if err != nil {
			t.Fatal(err)
		}
		var wait sync.WaitGroup
		t.Cleanup(func() { l.Close(); wait.Wait() })
		wait.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				wait.Go(func() {
					defer conn.Close()
					conn.SetDeadline(time.Now().Add(await.Limit(time.Minute)))
					if s := conn.(*tls.Conn); s.Handshake() == nil {
						serve(s)
					}
				})
			}
		})
		o.On = true
		if o.Idle == 0 {
			o.Idle = time.Hour
		}
		rules, err := policy.Compile(model.Service{Hosts: []string{"db.example.org"}, Opaque: o, Rules: []model.ServiceRule{
			{Who: "spiffe://staff.example/ops/*", Chain: "light"}, {Who: "spiffe://staff.example/eng/*", Chain: "deep"},
		}}, model.IdentitySPIFFE)
		if err != nil {
			t.Fatal(err)
		}
		c.Services = append(c.Services, Service{
			Name: "db", Hosts: []string{"db.example.org"}, Certificate: w.web.server(t, "db.example.org"), Clients: c.Services[0].Clients, Rules: rules, Opaque: o,
			Origin: Origin{Address: netip.MustParseAddrPort(l.Addr().String()), Roots: pool(w.web), Name: "db.internal"},
		})
		if change != nil {
			change(w, c)
		}
	})
}

// db connects to the opaque service.
func (w *world) db(path string, protocols ...string) *tls.Conn {
	w.t.Helper()
	return w.dbAs(w.staff.client(w.t, path), protocols...)
}

func (w *world) dbAs(c tls.Certificate, protocols ...string) *tls.Conn {
	w.t.Helper()
	conn, err := w.connect(w.tls(&c, "db.example.org", protocols...))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.NetConn().Close() })
	return conn
}

// line waits for the n-th line of an event in the log.
func (w *world) line(event Event, n int) Record {
	w.t.Helper()
	for until := time.Now().Add(await.Limit(10 * time.Second)); time.Now().Before(until); {
		seen := 0
		for _, r := range w.log() {
			if r.Event == event {
				if seen++; seen == n {
					return r
				}
			}
		}
	}
	w.t.Fatalf("the log has no line %d of %s: %+v", n, event, w.log())
	return Record{}
}

// isCut reports whether an error says that bytes may be missing, as an end in order does not.
func isCut(err error) bool { return err != nil && !errors.Is(err, io.EOF) && !isTimeout(err) }

func isTimeout(err error) bool {
	n, ok := errors.AsType[net.Error](err)
	return ok && n.Timeout()
}

func random(t *testing.T, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(rand.Reader, b); err != nil {
		t.Fatal(err)
	}
	return b
}

// Either side may end first what it sends, and hears all that the other one sends after that.
func TestBytesThatAreNotHTTPGoOnAsTheyAre(t *testing.T) {
	up, down := random(t, 3_000_001), random(t, 2_000_003)
	got := make(chan [32]byte, 1)
	w := opaqueWorld(t, model.Opaque{}, nil, func(c *tls.Conn) {
		io.WriteString(c, "220 ready\r\n") // the server speaks first
		all, err := io.ReadAll(c)
		if err != nil {
			t.Errorf("the origin reads: %v", err)
		}
		got <- sha256.Sum256(all)
		c.Write(down)
		c.CloseWrite()
	}, nil)
	c := w.db("/ops/alice")
	hello := make([]byte, 11)
	if _, err := io.ReadFull(c, hello); err != nil || string(hello) != "220 ready\r\n" {
		t.Fatalf("the client reads %q, %v", hello, err)
	}
	if _, err := c.Write(up); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if <-got != sha256.Sum256(up) {
		t.Error("the origin has other bytes than the client sent")
	}
	if all, err := io.ReadAll(c); err != nil || !bytes.Equal(all, down) {
		t.Errorf("the client reads %d bytes, %v; want the %d of the origin, and their end", len(all), err, len(down))
	}
	c.Close()
	if r := w.line(EventDecided, 1); r.Chain != "light" || r.Rule != 1 || r.Host != "db.example.org" || r.Identity != "spiffe://staff.example/ops/alice" || r.Method != "" {
		t.Errorf("the log says %+v", r)
	}
	if r := w.line(EventEnded, 1); r.Received != int64(len(up)) || r.Bytes != int64(len(down)+11) || r.Text != "" {
		t.Errorf("the log says %+v", r)
	}
	w.line(EventClosed, 1)
	bob := w.db("/eng/bob")
	bob.CloseWrite()
	io.Copy(io.Discard, bob)
	if r := w.line(EventDecided, 2); r.Chain != "deep" {
		t.Errorf("the log says %+v", r)
	}
}

// What one side cuts off never looks complete to the other one.
func TestWhatIsCutOffDoesNotLookComplete(t *testing.T) {
	type end func(under *net.TCPConn)
	ends := map[string]end{
		"FIN": func(c *net.TCPConn) { c.CloseWrite() },
		"RST": func(c *net.TCPConn) { c.SetLinger(0); c.Close() },
	}
	for name, cut := range ends {
		t.Run("the client sends "+name, func(t *testing.T) {
			got := make(chan error, 1)
			w := opaqueWorld(t, model.Opaque{}, nil, func(c *tls.Conn) {
				_, err := io.ReadAll(c)
				got <- err
			}, nil)
			c := w.db("/ops/alice")
			io.WriteString(c, "half of a")
			cut(c.NetConn().(*net.TCPConn))
			if err := <-got; !isCut(err) {
				t.Errorf("the origin reads to its end with %v; want an error that bytes may be missing", err)
			}
			if r := w.line(EventEnded, 1); r.Text == "" {
				t.Errorf("the log says not how it ended: %+v", r)
			}
		})
		t.Run("the origin sends "+name, func(t *testing.T) {
			w := opaqueWorld(t, model.Opaque{}, nil, func(c *tls.Conn) {
				io.WriteString(c, "half of a")
				cut(c.NetConn().(*net.TCPConn))
				io.Copy(io.Discard, c)
			}, nil)
			c := w.db("/ops/alice")
			if all, err := io.ReadAll(c); !isCut(err) {
				t.Errorf("the client reads %q to its end with %v; want an error that bytes may be missing", all, err)
			}
		})
	}
}

// A client that goes on to send to an origin that has said its last, and has gone, has all of that.
func TestAnOriginThatHasGoneIsHeardToItsEnd(t *testing.T) {
	down, nearly := random(t, 100_000), make(chan struct{})
	w := opaqueWorld(t, model.Opaque{}, nil, func(c *tls.Conn) {
		c.Write(down)
		c.CloseWrite()
		<-nearly
		c.NetConn().(*net.TCPConn).SetLinger(0)
		c.NetConn().Close()
	}, nil)
	c := w.db("/ops/alice")
	all := make([]byte, len(down)-1)
	if _, err := io.ReadFull(c, all); err != nil {
		t.Fatal(err)
	}
	close(nearly)
	for range 100 { // until the origin's reset is known, and behind it
		if _, err := c.Write(make([]byte, 1000)); err != nil {
			t.Fatalf("the client was reset: %v", err)
		}
		time.Sleep(time.Millisecond)
	}
	last, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(append(all, last...), down) {
		t.Errorf("the client reads %d bytes, %v; want %d and their end", len(all)+len(last), err, len(down))
	}
	c.Close()
	if r := w.line(EventEnded, 1); r.Text == "" {
		t.Errorf("the log says not that the client's bytes did not all go on: %+v", r)
	}
}

// A side that reads nothing holds up the other one, and nothing is lost.
func TestASideThatDoesNotReadHoldsUpTheOther(t *testing.T) {
	const all = 64 << 20
	read, got := make(chan struct{}), make(chan int64, 1)
	w := opaqueWorld(t, model.Opaque{}, nil, func(c *tls.Conn) {
		<-read
		n, err := io.Copy(io.Discard, c)
		if err != nil {
			t.Errorf("the origin reads: %v", err)
		}
		got <- n
	}, nil)
	c := w.db("/ops/alice")
	var sent atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for b := make([]byte, 1<<16); sent.Load() < all; sent.Add(int64(len(b))) {
			if _, err := c.Write(b); err != nil {
				t.Errorf("the client writes: %v", err)
				return
			}
		}
		c.CloseWrite()
	}()
	for before := int64(-1); before != sent.Load(); time.Sleep(300 * time.Millisecond) { // until nothing goes on
		before = sent.Load()
	}
	if n := sent.Load(); n >= all {
		t.Errorf("all %d bytes were taken of a client whose origin reads nothing", n)
	}
	close(read)
	<-done
	if n := <-got; n != all {
		t.Errorf("the origin has %d bytes; want %d", n, all)
	}
}

func TestAConnectionWithoutAByteEnds(t *testing.T) {
	origin := make(chan error, 1)
	w := opaqueWorld(t, model.Opaque{Idle: 10 * time.Minute}, nil, func(c *tls.Conn) {
		_, err := io.Copy(c, c)
		origin <- err
	}, nil)
	c := w.db("/ops/alice")
	b := make([]byte, 1)
	echo := func() error {
		if _, err := c.Write(b); err != nil {
			return err
		}
		_, err := c.Read(b)
		return err
	}
	for range 3 { // a byte begins the time anew
		if err := echo(); err != nil {
			t.Fatal(err)
		}
		w.offset.Add(int64(6 * time.Minute))
		w.gateway.Recheck()
	}
	if err := echo(); err != nil {
		t.Fatalf("the connection ended with a byte each 6 minutes: %v", err)
	}
	w.offset.Add(int64(11 * time.Minute))
	if _, err := c.Read(b); !isCut(err) {
		t.Errorf("the client reads %v; want a reset", err)
	}
	if err := <-origin; !isCut(err) {
		t.Errorf("the origin reads %v; want a reset", err)
	}
	if r := w.line(EventClosed, 1); r.Reason != Idle {
		t.Errorf("the log says %+v", r)
	}
	if n := w.gateway.Refused(); len(n) != 0 {
		t.Errorf("an idle connection counts as refused: %v", n)
	}
}

// Whatever ends a session of HTTP ends a carried connection on both sides within a second, and what is still in the
// gateway's buffers for the client goes nowhere.
func TestACarriedConnectionEndsWithItsIdentity(t *testing.T) {
	for name, test := range map[string]struct {
		do  func(w *world, leaf *x509.Certificate)
		why Reason
	}{
		"its certificate is revoked": {func(w *world, leaf *x509.Certificate) {
			if err := w.lists.Take(w.staff.list(w.t, 2, nil, leaf), time.Now()); err != nil {
				w.t.Error(err)
			}
		}, CertRevoked},
		"an operator revokes it": {func(w *world, _ *x509.Certificate) { w.gateway.Revoke([]string{"spiffe://staff.example/ops/alice"}) }, IdentityRevoked},
		"an operator ends it":    {func(w *world, _ *x509.Certificate) { w.gateway.End(w.gateway.list()[0].ID) }, SessionEnded},
		"its certificate ends":   {func(w *world, _ *x509.Certificate) { w.offset.Store(int64(61 * time.Minute)) }, CertExpired},
		"its rule is gone": {func(w *world, _ *x509.Certificate) {
			next := w.services[2]
			next.Rules = next.Rules[1:]
			w.gateway.Update([]Service{w.services[0], w.services[1], next})
		}, RuleNone},
		"its rule names another chain": {func(w *world, _ *x509.Certificate) {
			next := w.services[2]
			next.Rules = policy.Rules{}
			next.Rules, _ = next.Rules.Append(model.ServiceRule{Who: "**", Chain: "other"}, model.Service{Opaque: next.Opaque}, model.IdentitySPIFFE)
			w.gateway.Update([]Service{w.services[0], w.services[1], next})
		}, RuleNone},
		"the service is of HTTP now": {func(w *world, _ *x509.Certificate) {
			next := w.services[2]
			next.Opaque, next.Rules = model.Opaque{}, w.services[0].Rules
			w.gateway.Update([]Service{w.services[0], w.services[1], next})
		}, Handshake},
	} {
		t.Run(name, func(t *testing.T) {
			origin := make(chan time.Time, 1)
			w := opaqueWorld(t, model.Opaque{Idle: 48 * time.Hour}, nil, func(c *tls.Conn) {
				for b := make([]byte, 16<<10); ; {
					if _, err := c.Write(b); err != nil {
						origin <- time.Now()
						return
					}
				}
			}, nil)
			alice := w.staff.client(t, "/ops/alice")
			c := w.dbAs(alice)
			if _, err := io.CopyN(io.Discard, c, 1_000_000); err != nil { // under load
				t.Fatal(err)
			}
			start := time.Now()
			test.do(w, alice.Leaf)
			if _, err := io.Copy(io.Discard, c); !isCut(err) {
				t.Errorf("the client reads on to %v; want a reset", err)
			}
			client := time.Since(start)
			if last := (<-origin).Sub(start); max(last, client) > 5*time.Second {
				t.Errorf("the client had its last byte after %s, the origin after %s", client, last)
			}
			if r := w.line(EventClosed, 1); r.Reason != test.why {
				t.Errorf("the log says %s; want %s", r.Reason, test.why)
			}
			w.refused(test.why)
		})
	}
}

func TestOpaqueServicesRefuseBeforeAnythingIsOpened(t *testing.T) {
	for name, test := range map[string]struct {
		path      string // "": no certificate
		protocols []string
		alpn      []string
		why       Reason
	}{
		"an identity without a rule":     {path: "/sales/bob", why: RuleNone},
		"no certificate":                 {why: CertMissing},
		"no protocol where one is due":   {path: "/ops/alice", alpn: []string{"postgresql"}, why: Handshake},
		"another protocol":               {path: "/ops/alice", alpn: []string{"postgresql"}, protocols: []string{"h2", "http/1.1"}, why: Handshake},
		"a revoked identity":             {path: "/ops/mallory", why: IdentityRevoked},
		"an identity of another's kind":  {path: "", why: CertMissing},
		"a protocol, and no certificate": {protocols: []string{"postgresql"}, alpn: []string{"postgresql"}, why: CertMissing},
	} {
		t.Run(name, func(t *testing.T) {
			w := opaqueWorld(t, model.Opaque{ALPN: test.alpn}, nil, func(c *tls.Conn) { t.Error("the origin has a connection") },
				func(_ *world, c *Config) { c.Revoked = []string{"spiffe://staff.example/ops/mallory"} })
			settings := w.tls(nil, "db.example.org", test.protocols...)
			if test.path != "" {
				c := w.staff.client(t, test.path)
				settings = w.tls(&c, "db.example.org", test.protocols...)
			}
			if conn, err := w.connect(settings); err == nil {
				if _, err := conn.Read(make([]byte, 1)); !isCut(err) {
					t.Errorf("the client reads %v; want an alert", err)
				}
				conn.Close()
			}
			w.refused(test.why)
			w.quiet()
		})
	}
}

// A ticket of the shop's, of the same holder, opens nothing here, and one of this service is held to rules and lists again.
func TestATicketOfAnOpaqueServiceIsHeldToItsRules(t *testing.T) {
	w := opaqueWorld(t, model.Opaque{}, nil, func(c *tls.Conn) { io.Copy(c, c); c.CloseWrite() }, nil)
	c, k := w.staff.client(t, "/ops/alice"), &tickets{}
	settings := func(host string, c *tls.Certificate) *tls.Config {
		s := w.tls(c, host)
		s.ClientSessionCache, s.InsecureSkipVerify = k, true
		return s
	}
	try := func(host string, c *tls.Certificate) (resumed bool, err error) {
		conn, err := w.connect(settings(host, c))
		if err != nil {
			return false, err
		}
		defer conn.Close()
		if _, err = io.WriteString(conn, "x"); err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
		return conn.ConnectionState().DidResume, err
	}
	if resumed, status, err := w.resume(&c, k, "shop.example.org"); resumed || err != nil {
		t.Fatal(resumed, status, err)
	}
	if resumed, err := try("db.example.org", nil); err == nil || resumed {
		t.Errorf("a ticket of the shop opens a connection without a certificate: resumed %t", resumed)
	}
	k.kept = nil
	if resumed, err := try("db.example.org", &c); resumed || err != nil {
		t.Fatal(resumed, err)
	}
	if resumed, err := try("db.example.org", nil); !resumed || err != nil {
		t.Fatalf("the ticket is not taken: %t, %v", resumed, err)
	}
	if _, status, err := w.resume(nil, k, "shop.example.org"); err == nil {
		t.Errorf("a ticket of the opaque service is served with %d at the shop", status)
	}
	if err := w.lists.Take(w.staff.list(t, 2, nil, c.Leaf), time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := try("db.example.org", nil); err == nil {
		t.Error("the ticket of a revoked client is taken")
	}
}

func TestProtocolsOfOpaqueServicesAreAgreedOnWithBoth(t *testing.T) {
	for name, test := range map[string]struct {
		speaks []string // the origin
		fails  bool
	}{
		"the origin speaks it":         {speaks: []string{"postgresql"}},
		"the origin speaks no such":    {speaks: []string{"imap"}, fails: true},
		"the origin says nothing":      {fails: true},
		"the origin speaks HTTP alone": {speaks: []string{"http/1.1"}, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := opaqueWorld(t, model.Opaque{ALPN: []string{"smtp", "postgresql"}}, test.speaks, func(c *tls.Conn) { io.Copy(c, c); c.CloseWrite() }, nil)
			c := w.db("/ops/alice", "postgresql")
			if p := c.ConnectionState().NegotiatedProtocol; p != "postgresql" {
				t.Fatalf("the client has agreed on %q", p)
			}
			_, err := io.WriteString(c, "x") // an error is given once
			if err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			if test.fails {
				if !isCut(err) {
					t.Errorf("the client reads %v; want a reset", err)
				}
				w.refused(OriginFailed)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// A client learns nothing but a reset of an origin that is not the one, and the log says why.
func TestAnOriginOfAnOpaqueServiceIsVerified(t *testing.T) {
	w := opaqueWorld(t, model.Opaque{}, nil, func(c *tls.Conn) { t.Error("the origin was spoken with") },
		func(w *world, c *Config) { c.Services[2].Origin.Name = "other.internal" })
	if _, err := w.db("/ops/alice").Read(make([]byte, 1)); !isCut(err) || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client reads %v; want a reset", err)
	}
	w.refused(OriginFailed)
	if r := w.line(EventRefused, 1); !strings.Contains(r.Text, "other.internal") {
		t.Errorf("the log says %q", r.Text)
	}
}

// OpenSSL is a client of what is not HTTP.
func TestOpenSSLIsCarried(t *testing.T) {
	w := opaqueWorld(t, model.Opaque{}, nil, func(c *tls.Conn) { io.Copy(c, c); c.CloseWrite() }, nil)
	client, ca := w.onDisk(w.staff.client(t, "/ops/alice"))
	text := strings.Repeat("select 1;\n", 20_000)
	cmd := exec.CommandContext(t.Context(), "openssl", "s_client", "-quiet", "-verify_return_error", "-connect", w.address, "-servername", "db.example.org", "-CAfile", ca, "-cert", client, "-key", client)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go io.WriteString(in, text)
	got := make([]byte, len(text))
	if _, err := io.ReadFull(out, got); err != nil || string(got) != text {
		t.Errorf("openssl s_client has %d bytes of its echo, %v", len(got), err)
	}
	in.Close()
	io.Copy(io.Discard, out)
	cmd.Wait()
	w.line(EventClosed, 1)
}
