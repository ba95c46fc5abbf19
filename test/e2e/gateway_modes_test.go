package e2e

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
)

// modesDomain is gatewayDomain with two more services at r1's own address: the shop once more, and a proxy, whose clients may ask
// for the shop's server.
func modesDomain(t *testing.T) string {
	t.Helper()
	text := gatewayDomain(t, "[fc00:8::2]:443")
	for before, more := range map[string]string{
		"\nchains:\n": `
  - name: counter
    hosts: [counter.example.org]
    gateway: {nodes: [r1], address: "[fc00:1::1]:8443", mode: own}
    certificate: {file: own.pem, key: own.key}
    clients: staff
    origin: {address: "[fc00:8::2]:443", tls: {ca: web.pem, name: shop.internal}}
    rules:
      - {who: "spiffe://staff.example/eng/*", chain: light}
  - name: proxy
    hosts: [proxy.example.org]
    gateway: {nodes: [r1], address: "[fc00:1::1]:3128", mode: connect}
    certificate: {file: own.pem, key: own.key}
    clients: staff
    destinations:
      - {host: shop.internal, port: 8443, address: "[fc00:8::2]:443"}
      - {host: raw.internal, address: "[fc00:8::2]:7000"}
      - {host: gone.internal, address: "[fc00:8::2]:7001"}
    rules:
      - {who: "spiffe://staff.example/eng/*", to: ["shop.internal:8443"], chain: tunnel}
      - {who: "spiffe://staff.example/eng/*", to: ["raw.internal:7000"], chain: raw}
      - {who: "spiffe://staff.example/eng/*", to: ["gone.internal:7001"], chain: gone}
`,
		"\nlab:\n": `
  - {name: tunnel, ingress: [r1], functions: [fw, dpi], egress: r6, direction: both}
  - {name: raw, ingress: [r1], functions: [fw], egress: r6, direction: both}
  - {name: gone, ingress: [r1], functions: [fw], egress: r6, direction: both}
`,
	} {
		if strings.Count(text, before) != 1 {
			t.Fatalf("the domain has not one %q", before)
		}
		text = strings.Replace(text, before, strings.TrimSuffix(more, "\n")+before, 1)
	}
	return text
}

func newModes(t *testing.T) *shop {
	t.Helper()
	return newShopWith(t, modesDomain(t), "[fc00:8::2]:443", func(s *shop) {
		s.web.issue("own.pem", "own.key", func(c *x509.Certificate) {
			c.DNSNames, c.ExtKeyUsage = []string{"counter.example.org", "proxy.example.org"}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		})
	})
}

// ask runs curl on h1, and prints the answer, and the statuses of the proxy and of the server.
func (s *shop) ask(cert string, args ...string) string {
	s.t.Helper()
	ca := filepath.Join(s.folder, "web.pem")
	args = append([]string{"-sS", "-m", "40", "--cacert", ca, "--proxy-cacert", ca, "-w", "|%{http_connect} %{http_code}",
		"--resolve", "counter.example.org:8443:[fc00:1::1]", "--resolve", "proxy.example.org:3128:[fc00:1::1]"}, args...)
	if cert != "" {
		file := filepath.Join(s.folder, cert)
		args = append(args, "--cert", file, "--proxy-cert", file, "--proxy-key", file)
	}
	var out []byte
	must(s.t, s.Do("h1", func() error {
		out, _ = exec.CommandContext(soon(s.t), "curl", args...).CombinedOutput() // how it ends, its text says
		return nil
	}))
	return string(out)
}

// A gateway at an address of its node serves and guards as one at the service's: the origin sees the client, by the chain.
func TestAGatewayServesAtItsNodesAddress(t *testing.T) {
	t.Parallel()
	s := newModes(t)
	frames := s.counting(s.path("light", model.Forward))
	if got, want := s.ask("alice.pem", "https://counter.example.org:8443/status"), "hello|000 200"; got != want {
		t.Fatalf("curl prints %q; want %q", got, want)
	}
	if frames().frames() == 0 {
		t.Error("nothing went by the chain")
	}
	s.mu.Lock()
	if len(s.seen) != 1 || !strings.Contains(s.seen[0], s.addr("h1").String()) {
		t.Errorf("the origin has %q; want one request from h1", s.seen)
	}
	s.mu.Unlock()
	if got := s.ask("olga.pem", "https://counter.example.org:8443/status"); !strings.Contains(got, "|000 403") {
		t.Errorf("curl without a rule prints %q; want 403", got)
	}
	if got := s.ask("", "https://counter.example.org:8443/status"); !strings.Contains(got, "certificate required") {
		t.Errorf("curl without a certificate prints %q", got)
	}
	// The node's other ports are its own, and the shop's own address still serves.
	if err := dialIn(s, "h1", func() error {
		c, err := net.DialTimeout("tcp", "[fc00:1::1]:8444", settleTime)
		if err == nil {
			c.Close()
		}
		return err
	}); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("another port of r1's says %v; want connection refused by r1 itself", err)
	}
	if got, want := s.curl("alice.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
		t.Errorf("curl prints %q; want %q", got, want)
	}
}

// curl asks the proxy for the shop's server, and speaks TLS of its own with it; nothing else is to be had, and a tunnel ends with
// its identity.
func TestAProxyCarriesByItsChains(t *testing.T) {
	t.Parallel()
	s := newModes(t)
	ended := make(chan error, 10)
	must(t, s.Do("h2", func() error {
		l, err := net.Listen("tcp", "[fc00:8::2]:7000")
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					io.WriteString(c, "ready\n")
					_, err := io.Copy(c, c)
					ended <- err
				}()
			}
		}()
		return nil
	}))
	by := []string{"--proxy", "https://proxy.example.org:3128", "--noproxy", ""}
	ask := func(cert, url string) string {
		t.Helper()
		return s.ask(cert, append(slices.Clone(by), url)...)
	}
	frames := s.counting(s.path("tunnel", model.Forward))
	// The server misses the header that a gateway sets: the client's request came to it as it was.
	if got, want := ask("alice.pem", "https://shop.internal:8443/status"), "who?\n|200 418"; got != want {
		t.Fatalf("curl prints %q; want %q", got, want)
	}
	if frames().frames() == 0 {
		t.Error("nothing went by the chain")
	}
	s.mu.Lock()
	if len(s.seen) != 1 || !strings.Contains(s.seen[0], s.addr("h1").String()) {
		t.Errorf("the server has %q; want one request from h1", s.seen)
	}
	s.mu.Unlock()
	for _, test := range []struct{ cert, url, want string }{
		{"olga.pem", "https://shop.internal:8443/status", "|403 000"},
		{"alice.pem", "https://shop.internal/status", "|403 000"},         // another port
		{"alice.pem", "https://[fc00:8::2]:443/status", "|403 000"},       // its address
		{"alice.pem", "https://[fc00:2::1]:22/", "|403 000"},              // a node of the domain
		{"alice.pem", "https://[::1]:22/", "|403 000"},                    // the gateway itself
		{"alice.pem", "https://gone.internal:7001/", "|502 000"},          // nobody listens there
		{"alice.pem", "http://shop.internal:8443/status", "|000 405"},     // no CONNECT
		{"", "https://shop.internal:8443/status", "certificate required"}, // nobody
	} {
		if got := ask(test.cert, test.url); !strings.Contains(got, test.want) {
			t.Errorf("%q asks for %s, and curl prints %q; want %q", test.cert, test.url, got, test.want)
		}
	}
	for _, why := range []gateway.Reason{gateway.RuleNone, gateway.DestinationUnknown, gateway.OriginFailed, gateway.MethodRefused, gateway.CertMissing} {
		eventually(t, func() error { // a client hears of it before the log has it
			if !slices.ContainsFunc(s.audit(), func(r gateway.Record) bool { return r.Event == gateway.EventRefused && r.Reason == why }) {
				return fmt.Errorf("the log has no line for %s", why)
			}
			return nil
		})
	}
	// A tunnel that is kept open by an identity that is revoked.
	settings := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "proxy.example.org", Certificates: []tls.Certificate{s.alice}}
	settings.RootCAs.AddCert(s.web.cert)
	var c *tls.Conn
	must(t, dialIn(s, "h1", func() error {
		under, err := net.DialTimeout("tcp", "[fc00:1::1]:3128", settleTime)
		if err != nil {
			return err
		}
		t.Cleanup(func() { under.Close() })
		c = tls.Client(under, settings)
		return errors.Join(c.SetDeadline(time.Now().Add(patience)), c.Handshake())
	}))
	const answer = "HTTP/1.1 200 Connection established\r\n\r\nready\n"
	fmt.Fprintf(c, "CONNECT raw.internal:7000 HTTP/1.1\r\nHost: raw.internal:7000\r\n\r\n")
	b := make([]byte, len(answer))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != answer {
		t.Fatalf("the proxy answers %q, %v", b, err)
	}
	s.staff.revoke("staff.crl", 2, s.alice.Leaf)
	began := time.Now()
	if _, err := c.Read(b); err == nil || errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a revoked client reads %v; want a reset", err)
	}
	if err := <-ended; err == nil {
		t.Error("the destination takes what a revocation has cut off for complete")
	}
	t.Logf("both sides ended %s after the list was there", time.Since(began).Round(time.Millisecond))
	if got := ask("alice.pem", "https://shop.internal:8443/status"); strings.Contains(got, fmt.Sprint(http.StatusTeapot)) {
		t.Errorf("with a revoked certificate curl prints %q", got)
	}
	s.mayRefuse("r1", "stream-unknown") // what was under way to a connection that is over
}
