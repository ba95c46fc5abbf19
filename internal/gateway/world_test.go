package gateway

import (
	"bufio"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/gateway/policy"
	"github.com/waystamp/waystamp/internal/model"
)

var serial atomic.Int64

// issuer is an authority of a test.
type issuer struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// sign makes a certificate; change changes what it says. by is nil for one that signs itself.
func sign(t testing.TB, by *issuer, key crypto.Signer, change func(*x509.Certificate)) *x509.Certificate {
	t.Helper()
	now := time.Now()
	c := &x509.Certificate{
		SerialNumber: big.NewInt(serial.Add(1) + 1000), Subject: pkix.Name{CommonName: "x"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	change(c)
	parent, signer := c, key
	if by != nil {
		parent, signer = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func newIssuer(t testing.TB, name string, by *issuer, change func(*x509.Certificate)) *issuer {
	t.Helper()
	key := newKey(t)
	cert := sign(t, by, key, func(c *x509.Certificate) {
		c.Subject.CommonName, c.IsCA, c.ExtKeyUsage = name, true, nil
		c.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
		c.NotBefore, c.NotAfter = c.NotBefore.Add(-48*time.Hour), c.NotAfter.Add(48*time.Hour)
		if change != nil {
			change(c)
		}
	})
	return &issuer{cert, key}
}

// list makes a list of revoked certificates.
func (i *issuer) list(t testing.TB, number int64, change func(*x509.RevocationList), revoked ...*x509.Certificate) []byte {
	t.Helper()
	l := &x509.RevocationList{Number: big.NewInt(number), ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(24 * time.Hour)}
	for _, c := range revoked {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: time.Now()})
	}
	if change != nil {
		change(l)
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, i.cert, i.key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func spiffe(t testing.TB, path string) *url.URL {
	t.Helper()
	u, err := url.Parse("spiffe://staff.example" + path)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// client gives a certificate for an identity below spiffe://staff.example.
func (i *issuer) client(t testing.TB, path string) tls.Certificate {
	t.Helper()
	key := newKey(t)
	cert := sign(t, i, key, func(c *x509.Certificate) { c.URIs = []*url.URL{spiffe(t, path)} })
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
}

func (i *issuer) server(t testing.TB, names ...string) tls.Certificate {
	t.Helper()
	key := newKey(t)
	cert := sign(t, i, key, func(c *x509.Certificate) {
		c.DNSNames, c.ExtKeyUsage = names, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
}

func pool(i *issuer) *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(i.cert)
	return p
}

// dialled is a connection that a gateway has opened.
type dialled struct {
	identity, chain string
	client          netip.AddrPort
	conn            net.Conn
}

// world is a gateway between clients and an origin, on the loopback interface.
type world struct {
	t        testing.TB
	staff    *issuer // of clients
	web      *issuer // of servers
	lists    *Revocations
	gateway  *Gateway
	services []Service
	address  string
	logName  string
	offset   atomic.Int64 // of the gateway's clock
	origin   *httptest.Server
	answer   atomic.Pointer[http.HandlerFunc]

	mu    sync.Mutex
	dials []dialled
	seen  []*http.Request // by the origin
}

func (w *world) now() time.Time { return time.Now().Add(time.Duration(w.offset.Load())) }

// Dial opens plain connections, and notes for whom.
func (w *world) Dial(ctx context.Context, to Onward) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", to.Origin.String())
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dials = append(w.dials, dialled{to.Identity, to.Chain, to.Client, c})
	return c, nil
}

// Sealed says that no chain is.
func (w *world) Sealed(string) bool { return false }

func (w *world) rules(list ...model.ServiceRule) policy.Rules {
	w.t.Helper()
	r, err := policy.Compile(model.Service{Hosts: []string{"shop.example.org", "www.example.org"}, Rules: list}, model.IdentitySPIFFE)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func (w *world) clients(change func(*model.Clients)) *Clients {
	w.t.Helper()
	m := model.Clients{Name: "staff", Kind: model.IdentitySPIFFE, Within: "staff.example"}
	if change != nil {
		change(&m)
	}
	c, err := NewClients(m, []*x509.Certificate{w.staff.cert}, w.lists)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// newWorld starts a gateway of two services, shop.example.org and other.example.org. change may change its configuration.
func newWorld(t testing.TB, change func(*world, *Config)) *world {
	t.Helper()
	w := &world{t: t, staff: newIssuer(t, "staff", nil, nil), web: newIssuer(t, "web", nil, nil), logName: filepath.Join(t.TempDir(), "audit.log")}
	w.lists = NewRevocations([]*x509.Certificate{w.staff.cert}, 24*time.Hour)
	if err := w.lists.Take(w.staff.list(t, 1, nil), time.Now()); err != nil {
		t.Fatal(err)
	}
	w.origin = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.seen = append(w.seen, r)
		w.mu.Unlock()
		if f := w.answer.Load(); f != nil {
			(*f)(rw, r)
			return
		}
		io.WriteString(rw, "hello")
	}))
	w.origin.EnableHTTP2 = true
	w.origin.TLS = &tls.Config{Certificates: []tls.Certificate{w.web.server(t, "shop.internal")}}
	w.origin.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	w.origin.StartTLS()
	t.Cleanup(w.origin.Close)
	audit, err := OpenAudit(w.logName, w.now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { audit.Close() })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.address = l.Addr().String()
	to := Origin{Address: netip.MustParseAddrPort(w.origin.Listener.Addr().String()), Roots: pool(w.web), Name: "shop.internal"}
	rules := w.rules(
		model.ServiceRule{Who: "spiffe://staff.example/ops/*", Methods: []string{"GET", "HEAD"}, Path: "/status", Chain: "light"},
		model.ServiceRule{Who: "spiffe://staff.example/eng/**", Chain: "deep"},
		model.ServiceRule{Who: "spiffe://staff.example/ops/*", Path: "/files/**", Chain: "deep"},
	)
	clients := w.clients(nil)
	c := Config{
		Services: []Service{
			{Name: "shop", Hosts: []string{"shop.example.org", "www.example.org"}, Port: netip.MustParseAddrPort(w.address).Port(),
				Certificate: w.web.server(t, "shop.example.org", "www.example.org"), Clients: clients, Rules: rules, Origin: to, Headers: model.StandardHeaders()},
			{Name: "other", Hosts: []string{"other.example.org"}, Certificate: w.web.server(t, "other.example.org"), Clients: clients, Rules: rules, Origin: to, Headers: model.StandardHeaders()},
		},
		Dialer: w, Audit: audit, Limits: DefaultLimits(), Log: slog.New(slog.DiscardHandler), Now: w.now,
	}
	if change != nil {
		change(w, &c)
	}
	w.services = c.Services
	if w.gateway, err = New(c); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- w.gateway.Serve(ctx, l) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("the gateway ended: %v", err)
		}
	})
	return w
}

func (w *world) tls(c *tls.Certificate, host string, protocols ...string) *tls.Config {
	out := &tls.Config{RootCAs: pool(w.web), ServerName: host, NextProtos: protocols}
	if c != nil {
		out.Certificates = []tls.Certificate{*c}
	}
	return out
}

// connect shakes hands, and waits until the gateway has decided: TLS 1.3 tells a client nothing of it before it reads.
func (w *world) connect(c *tls.Config) (*tls.Conn, error) {
	raw, err := net.Dial("tcp", w.address)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, c)
	conn.SetDeadline(time.Now().Add(await.Limit(20 * time.Second)))
	if err := conn.Handshake(); err != nil {
		raw.Close()
		return nil, err
	}
	return conn, nil
}

// ask sends a request in HTTP/1.1 on a connection.
func ask(c net.Conn, method, target, host string, headers ...string) (*http.Response, error) {
	text := method + " " + target + " HTTP/1.1\r\nHost: " + host + "\r\n"
	for _, h := range headers {
		text += h + "\r\n"
	}
	if _, err := io.WriteString(c, text+"\r\n"); err != nil {
		return nil, err
	}
	return http.ReadResponse(bufio.NewReader(c), &http.Request{Method: method})
}

// get connects and asks once.
func (w *world) get(c *tls.Certificate, target string) (int, error) {
	conn, err := w.connect(w.tls(c, "shop.example.org"))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	r, err := ask(conn, "GET", target, "shop.example.org")
	if err != nil {
		return 0, err
	}
	io.Copy(io.Discard, r.Body)
	return r.StatusCode, nil
}

// web2 is a client of HTTP/2.
func (w *world) web2(c *tls.Certificate) *http.Client {
	p := &http.Protocols{}
	p.SetHTTP2(true)
	tr := &http.Transport{Protocols: p, TLSClientConfig: w.tls(c, "shop.example.org"), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", w.address)
	}}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// log is the audit log, which must be whole.
func (w *world) log() []Record {
	w.t.Helper()
	f, err := os.Open(w.logName)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	if _, err := VerifyAudit(f); err != nil {
		w.t.Fatal(err)
	}
	f.Seek(0, io.SeekStart)
	var list []Record
	for d := json.NewDecoder(f); ; {
		var r Record
		if err := d.Decode(&r); err != nil {
			return list
		}
		list = append(list, r)
	}
}

// refused waits for a refusal to be counted, and checks that it is the only one.
func (w *world) refused(why Reason) {
	w.t.Helper()
	for deadline := time.Now().Add(await.Limit(10 * time.Second)); ; {
		m := w.gateway.Refused()
		switch {
		case len(m) == 1 && m[why] > 0:
			if !slices.ContainsFunc(w.log(), func(r Record) bool { return r.Event == EventRefused && r.Reason == why && r.Text != "" }) {
				continue // its line comes
			}
			return
		case len(m) > 0 || time.Now().After(deadline):
			w.t.Fatalf("refusals are %v; want %s alone", m, why)
		}
	}
}

// counts waits until so many clients have been refused for a reason: one hears of it before it is counted.
func (w *world) counts(why Reason, want uint64) {
	w.t.Helper()
	for deadline := time.Now().Add(await.Limit(10 * time.Second)); w.gateway.Refused()[why] != want; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("%d refusals as %s; want %d: %v", w.gateway.Refused()[why], why, want, w.gateway.Refused())
		}
	}
}

// quiet holds that nobody has asked the origin.
func (w *world) quiet() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.dials) > 0 {
		w.t.Errorf("the gateway opened %d connections to the origin; want none", len(w.dials))
	}
}
