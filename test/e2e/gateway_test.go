package e2e

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/signer"
)

// A gateway on r1 of the paper's network, before an origin on h2: requests for /status take the firewall
// alone, others the DPI, too. The service has the origin's address.
func gatewayDomain(t *testing.T, address string) string {
	t.Helper()
	before, rest, ok := strings.Cut(paper, "\nchains:\n")
	_, after, ok2 := strings.Cut(rest, "\nlab:\n")
	if !ok || !ok2 {
		t.Fatal("examples/paper.yaml has no chains before its lab")
	}
	return before + `
clients:
  - name: staff
    ca: staff.pem
    identity: {spiffe: staff.example}
    revocation: {crl: staff.crl, older-than: 1h}

services:
  - name: shop
    hosts: [shop.example.org]
    gateway: {nodes: [r1], address: "` + address + `"}
    certificate: {file: shop.pem, key: shop.key}
    clients: staff
    origin: {address: "` + address + `", tls: {ca: web.pem, name: shop.internal}}
    rules:
      - {who: "spiffe://staff.example/**", methods: [GET], path: /status, chain: light}
      - {who: "spiffe://staff.example/eng/*", path: /files/**, chain: deep}

chains:
  - {name: light, ingress: [r1], functions: [fw], egress: r6, direction: both, proof: {scheme: keyed-flow}}
  - {name: deep, ingress: [r1], functions: [fw, dpi], egress: r6, direction: both, proof: {scheme: keyed-flow}}

lab:
` + after
}

// authority signs certificates of a test.
type authority struct {
	t      *testing.T
	folder string
	cert   *x509.Certificate
	key    crypto.Signer
	serial int64
}

func (a *authority) sign(change func(*x509.Certificate)) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(a.t, err)
	a.serial++
	c := &x509.Certificate{SerialNumber: big.NewInt(a.serial), Subject: pkix.Name{CommonName: "x"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature}
	change(c)
	parent, signer := c, crypto.Signer(key)
	if a.cert != nil {
		parent, signer = a.cert, a.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	must(a.t, err)
	cert, err := x509.ParseCertificate(der)
	must(a.t, err)
	return cert, key
}

// write replaces a file whole.
func (a *authority) write(name string, blocks ...*pem.Block) {
	a.t.Helper()
	var text []byte
	for _, b := range blocks {
		text = append(text, pem.EncodeToMemory(b)...)
	}
	next := filepath.Join(a.folder, name+".next")
	must(a.t, errors.Join(os.WriteFile(next, text, 0o600), os.Rename(next, filepath.Join(a.folder, name))))
}

func newAuthority(t *testing.T, folder, name string) *authority {
	t.Helper()
	a := &authority{t: t, folder: folder, serial: 100}
	a.cert, a.key = a.sign(func(c *x509.Certificate) {
		c.Subject.CommonName, c.IsCA, c.KeyUsage = name, true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	})
	a.write(name+".pem", &pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
	return a
}

// issue writes a certificate and its key.
func (a *authority) issue(file, keyFile string, change func(*x509.Certificate)) tls.Certificate {
	a.t.Helper()
	cert, key := a.sign(change)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	must(a.t, err)
	c, k := &pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}, &pem.Block{Type: "PRIVATE KEY", Bytes: der}
	if file == keyFile {
		a.write(file, c, k)
	} else {
		a.write(file, c)
		a.write(keyFile, k)
	}
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
}

func (a *authority) server(file, keyFile, name string) tls.Certificate {
	return a.issue(file, keyFile, func(c *x509.Certificate) {
		c.DNSNames, c.ExtKeyUsage = []string{name}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
}

func (a *authority) client(file, path string) tls.Certificate {
	return a.issue(file, file, func(c *x509.Certificate) {
		c.URIs, c.ExtKeyUsage = []*url.URL{{Scheme: "spiffe", Host: "staff.example", Path: path}}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	})
}

func (a *authority) revoke(file string, number int64, list ...*x509.Certificate) {
	a.t.Helper()
	l := &x509.RevocationList{Number: big.NewInt(number), ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour)}
	for _, c := range list {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, a.cert, a.key)
	must(a.t, err)
	a.write(file, &pem.Block{Type: "X509 CRL", Bytes: der})
}

// shop is a lab with a gateway, and an origin on h2 that says from where it is asked and what the client's certificate is.
type shop struct {
	*world
	folder     string
	staff, web *authority
	alice      tls.Certificate
	at         netip.AddrPort

	mu   sync.Mutex
	seen []string // "path client" of each request that the origin has got
}

func newShop(t *testing.T, address string) *shop {
	return newShopOf(t, gatewayDomain(t, address), address)
}

func newShopOf(t *testing.T, domain, address string, options ...func(*lab.Config)) *shop {
	return newShopWith(t, domain, address, func(*shop) {}, options...)
}

// newShopWith calls files before the lab begins, to make more of them.
func newShopWith(t *testing.T, domain, address string, files func(*shop), options ...func(*lab.Config)) *shop {
	s := &shop{folder: newDir(t), at: netip.MustParseAddrPort(address)}
	s.staff, s.web = newAuthority(t, s.folder, "staff"), newAuthority(t, s.folder, "web")
	s.staff.revoke("staff.crl", 1)
	s.alice = s.staff.client("alice.pem", "/eng/alice")
	s.staff.client("olga.pem", "/ops/olga")
	s.web.server("shop.pem", "shop.key", "shop.example.org")
	inside := s.web.server("inside.pem", "inside.key", "shop.internal")
	files(s)
	m := parse(t, domain)
	s.world = buildFrom(t, m, append(options, func(c *lab.Config) { c.Files = s.folder })...)
	var l net.Listener
	must(t, s.Do("h2", func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	}))
	server := &http.Server{
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			s.mu.Lock()
			s.seen = append(s.seen, r.URL.Path+" "+r.RemoteAddr)
			s.mu.Unlock()
			if r.Header.Get("Client-Cert") == "" {
				http.Error(rw, "who?", http.StatusTeapot)
				return
			}
			if r.URL.Path == "/files/large" {
				io.CopyN(rw, nulls{}, 20_000_000)
				return
			}
			if r.URL.Path == "/files/slow" { // until the client has gone
				io.WriteString(rw, "hello")
				http.NewResponseController(rw).Flush()
				<-r.Context().Done()
				return
			}
			io.Copy(io.Discard, r.Body)
			io.WriteString(rw, "hello")
		}),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{inside}, MinVersion: tls.VersionTLS13},
		ErrorLog:  slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	go server.ServeTLS(l, "", "")
	t.Cleanup(func() { server.Close() })
	return s
}

// resolve is where curl finds the service.
func (s *shop) resolve() string {
	if s.at.Addr().Is4() {
		return fmt.Sprintf("shop.example.org:%d:%s", s.at.Port(), s.at.Addr())
	}
	return fmt.Sprintf("shop.example.org:%d:[%s]", s.at.Port(), s.at.Addr())
}

type nulls struct{}

func (nulls) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// curl asks for paths from h1, on one connection if it can, and prints the answer's end, status, and how many connections it made.
func (s *shop) curl(cert, version string, paths ...string) string {
	s.t.Helper()
	return s.curlFor("40", cert, version, paths...)
}

// curlFor gives up after some seconds.
func (s *shop) curlFor(seconds, cert, version string, paths ...string) string {
	s.t.Helper()
	var args []string
	for i, p := range paths {
		if i > 0 {
			args = append(args, "--next")
		}
		args = append(args, "-sS", "-m", seconds, "--noproxy", "*", "--cacert", filepath.Join(s.folder, "web.pem"), "--http"+version,
			"--resolve", s.resolve(), "-w", "|%{size_download} %{http_code} %{num_connects}\n")
		if p == "/files/large" {
			args = append(args, "-o", "/dev/null")
		}
		if cert != "" {
			args = append(args, "--cert", filepath.Join(s.folder, cert))
		}
		args = append(args, fmt.Sprintf("https://shop.example.org:%d%s", s.at.Port(), p))
	}
	var out []byte
	must(s.t, s.Do("h1", func() error {
		out, _ = exec.CommandContext(soon(s.t), "curl", args...).CombinedOutput() // how it ends, its text says
		return nil
	}))
	return string(out)
}

// Requests of one connection take the chains that their rules name; who shows no certificate, or has no rule, reaches nothing.
func TestAGatewaySendsRequestsByTheirChains(t *testing.T) {
	t.Parallel()
	bothTexts(t, func(t *testing.T, carried func(string) string) {
		gatewaySendsRequests(t, carried(gatewayDomain(t, "[fc00:8::2]:443")))
	})
}

func gatewaySendsRequests(t *testing.T, domain string) {
	s := newShopOf(t, domain, "[fc00:8::2]:443")
	light, deep := s.path("light", model.Forward), s.path("deep", model.Forward)
	lightBack, deepBack := s.path("light", model.Reverse), s.path("deep", model.Reverse)
	for _, version := range []string{"1.1", "2"} {
		var since []func() flow
		for _, p := range []func() func() flow{
			func() func() flow { return s.counting(light) }, func() func() flow { return s.counting(deep) },
			func() func() flow { return s.counting(lightBack) }, func() func() flow { return s.counting(deepBack) },
		} {
			since = append(since, p())
		}
		if got, want := s.curl("alice.pem", version, "/status"), "hello|5 200 1\n"; got != want {
			t.Fatalf("curl prints %q; want %q", got, want)
		}
		// Later, connections that are kept have signs of life.
		if a, b := since[0]().frames(), since[1]().frames(); a == 0 || b != 0 && version == "1.1" {
			t.Errorf("HTTP/%s: a request for /status took %d frames by light and %d by deep; want it by light alone", version, a, b)
		}
		before := s.counting(deep)
		if got, want := s.curl("alice.pem", version, "/status", "/files/a"), "hello|5 200 1\nhello|5 200 0\n"; got != want {
			t.Errorf("curl prints %q; want %q", got, want)
		}
		if n := before().frames(); n == 0 {
			t.Errorf("HTTP/%s: a request for /files/a took no frame by deep", version)
		}
		for i, f := range since[2:] {
			if f().frames() == 0 {
				t.Errorf("HTTP/%s: answers took no frame by the way back of chain %d", version, i)
			}
		}
	}
	if got := s.curl("olga.pem", "1.1", "/files/a"); !strings.Contains(got, "|10 403 1") {
		t.Errorf("curl prints %q for what no rule allows; want 403", got)
	}
	if got := s.curl("", "1.1", "/status"); !strings.Contains(got, "certificate required") {
		t.Errorf("curl without a certificate prints %q; want the alert certificate_required", got)
	}
	if got, want := s.curl("alice.pem", "1.1", "/files/large"), "|20000000 200 1\n"; got != want {
		t.Errorf("curl prints %q for 20 MB; want %q", got, want)
	}
	s.mu.Lock()
	seen := slices.Clone(s.seen)
	s.mu.Unlock()
	for _, r := range seen {
		path, from, _ := strings.Cut(r, " ")
		chain := deep
		if path == "/status" {
			chain = light
		}
		if p := netip.MustParseAddrPort(from); p.Addr() != s.addr("h1") || p.Port() < chain.Match.SourcePort.First && chain.Match.SourcePort.First > 0 {
			t.Errorf("the origin has %s; want it from h1, by a port of chain %s", r, chain.Chain)
		}
	}
	if len(seen) != 7 {
		t.Errorf("the origin has %q; want seven requests", seen)
	}
	m, err := s.Member("r1")
	must(t, err)
	f, err := os.Open(filepath.Join(m.Agent.RunDir, "gateway-audit.log"))
	must(t, err)
	defer f.Close()
	if v, err := gateway.VerifyAudit(f); err != nil || v.Lines < 20 {
		t.Errorf("the audit log has %d lines, %v", v.Lines, err)
	}
}

// A node of a controller signs the gateway's log with its key, and the controller's root says whose it is.
func TestANodesKeySignsTheAuditLog(t *testing.T) {
	t.Parallel()
	const address = "[fc00:8::2]:443"
	domain := gatewayDomain(t, address)
	file := filepath.Join(newDir(t), "domain.yaml")
	must(t, os.WriteFile(file, []byte(domain), 0o600))
	s := newShopWith(t, domain, address, func(*shop) {}, func(c *lab.Config) { c.Apply = file })
	if got, want := s.curl("alice.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
		t.Fatalf("curl prints %q; want %q", got, want)
	}
	m, err := s.Member("r1")
	must(t, err)
	dir := m.Agent.RunDir
	must(t, s.StopAgent(t.Context(), "r1"))
	var node struct{ Roots [][]byte }
	text, err := os.ReadFile(filepath.Join(dir, "member", "identity.json"))
	must(t, err)
	must(t, json.Unmarshal(text, &node))
	verify := func(name string) (gateway.Verified, error) {
		log, err := os.Open(filepath.Join(dir, "gateway-audit.log"))
		must(t, err)
		defer log.Close()
		signatures, err := os.Open(gateway.SignaturesOf(log.Name()))
		must(t, err)
		defer signatures.Close()
		trust := gateway.Trust{Node: name}
		for _, der := range node.Roots {
			c, err := x509.ParseCertificate(der)
			must(t, err)
			trust.Roots = append(trust.Roots, c)
		}
		return gateway.VerifySigned(log, signatures, trust)
	}
	// Up to the last line: the agent has ended.
	if v, err := verify("r1"); err != nil || v.Lines < 4 || v.Signed.Lines != v.Lines || v.Signed.Node != "r1" {
		t.Errorf("%d lines, %+v, %v; want all signed by r1", v.Lines, v.Signed, err)
	}
	if _, err := verify("r2"); err == nil || !strings.Contains(err.Error(), "that of node r1; expect r2") {
		t.Errorf("as node r2's: %v", err)
	}
	// The next agent goes on with both files.
	must(t, s.StartAgent(soon(t), "r1"))
	if got, want := s.curl("alice.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
		t.Errorf("with another agent curl prints %q; want %q", got, want)
	}
	must(t, s.StopAgent(t.Context(), "r1"))
	if v, err := verify("r1"); err != nil || v.Signed.Lines != v.Lines || v.Signed.Count < 2 {
		t.Errorf("of two agents: %d lines, %+v, %v; want all signed by r1", v.Lines, v.Signed, err)
	}
	must(t, s.StartAgent(soon(t), "r1"))
	s.mayRefuse("r1", "stream-down") // what was under way to gateways that have ended
}

// Past the gateway nothing reaches the service, and nothing that was not let open leaves the worker's place.
func TestNothingGetsAroundTheGateway(t *testing.T) {
	t.Parallel()
	bothTexts(t, func(t *testing.T, carried func(string) string) {
		nothingGetsAround(t, carried(gatewayDomain(t, "[fc00:8::2]:443")))
	})
}

func nothingGetsAround(t *testing.T, domain string) {
	s := newShopOf(t, domain, "[fc00:8::2]:443")
	if got, want := s.curl("alice.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
		t.Fatalf("curl prints %q; want %q", got, want)
	}
	closed := func(what string, err error) {
		t.Helper()
		if n, ok := errors.AsType[net.Error](err); !ok || !n.Timeout() {
			t.Errorf("%s: %v; want that nobody answers", what, err)
		}
	}
	dial := func() error {
		c, err := net.DialTimeout("tcp", s.at.String(), lostTime)
		if err == nil {
			c.Close()
		}
		return err
	}
	// From a router in the middle, and from a node that is on both chains: the egress wants a proof.
	for _, from := range []string{"r5", "r3"} {
		closed("from "+from, dialIn(s, from, dial))
		s.refusedSome("r6", "unproven")
	}
	// From the worker's own place, by a program that is not it.
	pid, err := s.worker("r1")
	must(t, err)
	before, err := s.refusals()
	must(t, err)
	for _, port := range []string{"1024", "10000", "40000"} {
		// The worker binds to such addresses by IP_FREEBIND, which curl does not know.
		out, _ := exec.CommandContext(soon(t), "nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", pid), "sh", "-c",
			"echo 1 >/proc/sys/net/ipv6/ip_nonlocal_bind && exec curl -sS -m 2 --noproxy '*' -k --interface "+s.addr("h1").String()+" --local-port "+port+" https://["+s.at.Addr().String()+"]").CombinedOutput()
		if !strings.Contains(string(out), "timed out") {
			t.Errorf("a connection that nobody has let open: curl prints %s", out)
		}
	}
	s.refusedSome("r1", "stream-unknown")
	after, err := s.refusals()
	must(t, err)
	if r := (refusal{Node: "r1", Reason: "stream-unknown"}); after[r] < before[r]+3 {
		t.Errorf("%d refusals of what the worker's place sends, %d before; want three more at least", after[r], before[r])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.seen) != 1 {
		t.Errorf("the origin has %q; want the one request through the gateway", s.seen)
	}
}

// worker is the process of the gateway of a node, which is its agent's child.
func (w *world) worker(node string) (int, error) {
	m, err := w.Member(node)
	if err != nil {
		return 0, err
	}
	list, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", m.Agent.PID))
	if err != nil {
		return 0, err
	}
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", m.Agent.PID))
	if err != nil {
		return 0, err
	}
	for _, task := range all {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", m.Agent.PID, task.Name()))
		list = append(append(list, ' '), b...)
	}
	for _, pid := range strings.Fields(string(list)) {
		line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		if strings.Contains(string(line), "\x00worker\x00") {
			return strconv.Atoi(pid)
		}
	}
	return 0, fmt.Errorf("the agent of %s has no worker", node)
}

func dialIn(s *shop, at string, dial func() error) (err error) {
	must(s.t, s.Do(at, func() error { err = dial(); return nil }))
	return err
}

// The service's key is in a process of its own, and clients are served while that signs their handshakes.
func TestASignerKeepsTheKeyFromTheGateway(t *testing.T) {
	t.Parallel()
	const address = "[fc00:8::2]:443"
	at := filepath.Join(newDir(t), "signer.sock")
	domain := strings.Replace(gatewayDomain(t, address), "key: shop.key}", "signer: "+at+"}", 1)
	var key crypto.Signer
	s := newShopWith(t, domain, address, func(s *shop) {
		pair, err := tls.LoadX509KeyPair(filepath.Join(s.folder, "shop.pem"), filepath.Join(s.folder, "shop.key"))
		must(t, err)
		key = pair.PrivateKey.(crypto.Signer)
		must(t, os.Remove(filepath.Join(s.folder, "shop.key")))
	})
	if got := s.curl("alice.pem", "2", "/files/a"); !strings.Contains(got, "(35)") && !strings.Contains(got, " 000 ") {
		t.Errorf("curl prints %q without a signer; want no answer", got)
	}
	ctx, stop := context.WithCancel(context.Background())
	l, err := net.Listen("unix", at)
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- signer.Serve(ctx, l, key, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	for _, version := range []string{"1.1", "2"} {
		if got, want := s.curl("alice.pem", version, "/files/a"), "hello|5 200 1\n"; got != want {
			t.Errorf("curl prints %q with a signer; want %q", got, want)
		}
	}
	m, err := s.Member("r1")
	must(t, err)
	text, err := os.ReadFile(filepath.Join(m.Agent.RunDir, "gateway-audit.log"))
	must(t, err)
	if !bytes.Contains(text, []byte(`"signer-unreachable"`)) {
		t.Errorf("the gateway's audit log does not say why nobody was let in:\n%s", text)
	}
}

// A list that revokes a certificate ends its connections, wherever they are; a worker that is killed is started again.
func TestARevokedClientIsCutOff(t *testing.T) {
	t.Parallel()
	s := newShop(t, "[fc00:8::2]:443")
	roots := x509.NewCertPool()
	roots.AddCert(s.web.cert)
	var conn *tls.Conn
	must(t, s.Do("h1", func() error {
		raw, err := net.DialTimeout("tcp", s.at.String(), settleTime)
		if err != nil {
			return err
		}
		conn = tls.Client(raw, &tls.Config{RootCAs: roots, ServerName: "shop.example.org", Certificates: []tls.Certificate{s.alice}})
		return conn.HandshakeContext(soon(t))
	}))
	defer conn.Close()
	ask := func() error {
		if _, err := io.WriteString(conn, "GET /status HTTP/1.1\r\nHost: shop.example.org\r\n\r\n"); err != nil {
			return err
		}
		b := make([]byte, 4096)
		n, err := conn.Read(b)
		if err == nil && !strings.HasPrefix(string(b[:n]), "HTTP/1.1 200") {
			err = fmt.Errorf("the gateway answers %q", b[:n])
		}
		return err
	}
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	must(t, ask())
	s.staff.revoke("staff.crl", 2, s.alice.Leaf)
	began := time.Now()
	_, err := io.Copy(io.Discard, conn)
	if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() {
		t.Errorf("the connection of a revoked certificate stays open: %v", err)
	}
	t.Logf("the connection ended %s after the list was there", time.Since(began).Round(time.Millisecond))
	if got := s.curl("alice.pem", "1.1", "/status"); strings.Contains(got, "200") {
		t.Errorf("with a revoked certificate curl prints %q", got)
	}
	if got, want := s.curl("olga.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
		t.Errorf("curl of another client prints %q; want %q", got, want)
	}
	pid, err := s.worker("r1")
	must(t, err)
	p, err := os.FindProcess(pid)
	must(t, errors.Join(err, p.Kill()))
	eventually(t, func() error {
		if now, err := s.worker("r1"); err != nil || now == pid {
			return fmt.Errorf("no other worker: %d, %v", now, err)
		}
		if got, want := s.curl("olga.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
			return fmt.Errorf("curl prints %q; want %q", got, want)
		}
		return nil
	})
	s.mayRefuse("r1", "stream-down")
	s.mayRefuse("r1", "stream-unknown")
}

// The agent asks openssl's responder, which runs on the gateway's node, about clients' certificates.
func TestAResponderKeepsClientsOut(t *testing.T) {
	t.Parallel()
	const address = "[fc00:8::2]:443"
	domain := strings.Replace(gatewayDomain(t, address), "revocation: {crl: staff.crl, older-than: 1h}", `revocation: {ocsp: true, responder: "http://127.0.0.1:8888/"}`, 1)
	var bob tls.Certificate
	index := func(s *shop, revoked ...*x509.Certificate) {
		text := ""
		for n := int64(101); n <= s.staff.serial; n++ { // all but the last are known
			state, since := "V", ""
			if slices.ContainsFunc(revoked, func(c *x509.Certificate) bool { return c.SerialNumber.Int64() == n }) {
				state, since = "R", time.Now().UTC().Add(-time.Minute).Format("060102150405Z")
			}
			text += fmt.Sprintf("%s\t%s\t%s\t%04X\tunknown\t/CN=%d\n", state, time.Now().UTC().Add(24*time.Hour).Format("060102150405Z"), since, n, n)
		}
		next := filepath.Join(s.folder, "index.next")
		must(t, errors.Join(os.WriteFile(next, []byte(text), 0o600), os.Rename(next, filepath.Join(s.folder, "index.txt"))))
	}
	s := newShopWith(t, domain, address, func(s *shop) {
		der, err := x509.MarshalPKCS8PrivateKey(s.staff.key)
		must(t, err)
		s.staff.write("staff.key", &pem.Block{Type: "PRIVATE KEY", Bytes: der})
		bob = s.staff.client("bob.pem", "/eng/bob")
		index(s, bob.Leaf)
		s.staff.client("strange.pem", "/eng/strange")
	})
	at := func(name string) string { return filepath.Join(s.folder, name) }
	// Nobody answers yet.
	if got := s.curl("olga.pem", "1.1", "/status"); strings.Contains(got, "200") {
		t.Errorf("without a responder curl prints %q", got)
	}
	responder := exec.CommandContext(t.Context(), "openssl", "ocsp", "-port", "8888", "-index", at("index.txt"), "-CA", at("staff.pem"), "-rsigner", at("staff.pem"), "-rkey", at("staff.key"), "-nmin", "1")
	must(t, s.Do("r1", responder.Start))
	t.Cleanup(func() {
		responder.Process.Kill()
		responder.Wait()
	})
	eventually(t, func() error {
		if got, want := s.curl("olga.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
			return fmt.Errorf("curl prints %q; want %q", got, want)
		}
		return nil
	})
	for _, client := range []string{"bob.pem", "strange.pem"} { // revoked, and not known
		if got := s.curl(client, "1.1", "/status"); !strings.Contains(got, "|0 000") {
			t.Errorf("%s: curl prints %q", client, got)
		}
	}
	// One that is in the midst of an answer is cut off once the responder says so, which is asked again after half a minute.
	began, ended := make(chan struct{}), make(chan string, 1)
	go func() {
		close(began)
		ended <- s.curl("alice.pem", "1.1", "/files/slow")
	}()
	<-began
	client := s.client("r1")
	defer client.Close()
	eventually(t, func() error {
		list, err := client.Sessions(t.Context())
		if err == nil && !slices.ContainsFunc(list.Sessions, func(s api.Session) bool { return s.UnderWay > 0 }) {
			err = fmt.Errorf("sessions are %+v", list.Sessions)
		}
		return err
	})
	index(s, bob.Leaf, s.alice.Leaf)
	// openssl looks at its index before it waits for the next question.
	must(t, s.Do("r1", exec.Command("openssl", "ocsp", "-url", "http://127.0.0.1:8888/", "-issuer", at("staff.pem"), "-serial", "1", "-noverify").Run))
	if got := <-ended; !strings.Contains(got, "curl:") || strings.Contains(got, "(28)") {
		t.Errorf("curl prints %q for the answer that was under way; want that it is cut off", got)
	}
	refused := map[string]uint64{}
	eventually(t, func() error {
		v, err := client.Services(t.Context())
		for _, r := range v.Refused {
			refused[r.Reason] = r.Count
		}
		if err == nil && (refused["cert-revoked"] != 2 || refused["ocsp-invalid"] != 1 || refused["ocsp-unreachable"] == 0) {
			err = fmt.Errorf("refusals are %v", v.Refused)
		}
		return err
	})
}

// An identity that an operator has revoked is out at once, also at the next agent and gateway, and others go on.
func TestARevokedIdentityStaysOut(t *testing.T) {
	t.Parallel()
	s := newShop(t, "[fc00:8::2]:443")
	const alice = "spiffe://staff.example/eng/alice"
	client := s.client("r1")
	defer client.Close()
	// A connection of hers that is in the midst of an answer.
	began := make(chan struct{})
	ended := make(chan string, 1)
	go func() {
		close(began)
		ended <- s.curl("alice.pem", "1.1", "/files/slow")
	}()
	<-began
	eventually(t, func() error {
		list, err := client.Sessions(t.Context())
		if err == nil && !slices.ContainsFunc(list.Sessions, func(s api.Session) bool {
			return s.Identity == alice && s.UnderWay > 0 && slices.Equal(s.Chains, []string{"deep"})
		}) {
			err = fmt.Errorf("sessions are %+v", list.Sessions)
		}
		return err
	})
	a, err := client.Revoke(t.Context(), api.RevokeRequest{Identity: alice})
	must(t, err)
	if !a.Changed || !a.Running || a.Ended == 0 {
		t.Errorf("the agent answers %+v", a)
	}
	if list, err := client.Sessions(t.Context()); err != nil || len(list.Sessions) != 0 {
		t.Errorf("sessions that are left: %+v, %v", list, err)
	}
	if got := <-ended; !strings.Contains(got, "curl:") {
		t.Errorf("curl prints %q for the answer that was under way; want an error", got)
	}
	out := func(when string) {
		t.Helper()
		if got := s.curl("alice.pem", "1.1", "/files/a"); !strings.Contains(got, "|0 000") {
			t.Errorf("%s she gets %q", when, got)
		}
		if got, want := s.curl("olga.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
			t.Errorf("%s curl prints %q for somebody else; want %q", when, got, want)
		}
	}
	out("at once")
	s.mayRefuse("r1", "stream-down") // what was under way to the gateway that ends
	must(t, s.StopAgent(soon(t), "r1"))
	must(t, s.StartAgent(soon(t), "r1"))
	out("at the next agent")
	_, err = client.Revoke(t.Context(), api.RevokeRequest{Identity: alice, Undo: true})
	must(t, err)
	if got, want := s.curl("alice.pem", "1.1", "/files/a"), "hello|5 200 1\n"; got != want {
		t.Errorf("curl prints %q once she is not revoked any more; want %q", got, want)
	}
}
