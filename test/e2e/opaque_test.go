package e2e

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
)

// opaqueDomain is sealedDomain with services whose protocol is not HTTP, before h2: bytes go by dpi, which reads them, or by
// the firewall alone.
func opaqueDomain(t *testing.T) string {
	t.Helper()
	text := sealedDomain(t)
	for before, more := range map[string]string{
		"\nchains:\n": `
  - name: raw
    hosts: [raw.example.org]
    gateway: {nodes: [r1], address: "[fc00:8::2]:7000"}
    certificate: {file: raw.pem, key: raw.key}
    clients: staff
    origin: {address: "[fc00:8::2]:7000", tls: {ca: web.pem, name: raw.internal}}
    protocol: tls
    idle: 10m
    rules:
      - {who: "spiffe://staff.example/eng/*", chain: rawread}
      - {who: "spiffe://staff.example/ops/*", chain: rawlight}
  - name: desk
    hosts: [desk.example.org]
    gateway: {nodes: [r1], address: "[fc00:8::2]:2222"}
    certificate: {file: raw.pem, key: raw.key}
    clients: staff
    origin: {address: "[fc00:8::2]:2222", tls: {ca: web.pem, name: raw.internal}}
    protocol: tls
    alpn: [ssh]
    rules:
      - {who: "spiffe://staff.example/eng/*", chain: shell}
`,
		"\nlab:\n": `
  - {name: rawread, ingress: [r1], functions: [fw, dpi], egress: r6, direction: both, seal: true}
  - {name: rawlight, ingress: [r1], functions: [fw], egress: r6, direction: both}
  - {name: shell, ingress: [r1], functions: [fw], egress: r6, direction: both}
`,
	} {
		if strings.Count(text, before) != 1 {
			t.Fatalf("the domain has not one %q", before)
		}
		text = strings.Replace(text, before, strings.TrimSuffix(more, "\n")+before, 1)
	}
	return text
}

// newOpaque is a lab with these services, and their certificates.
func newOpaque(t *testing.T) (*shop, tls.Certificate) {
	t.Helper()
	s := newShopWith(t, opaqueDomain(t), "[fc00:8::2]:443", func(s *shop) {
		s.web.issue("raw.pem", "raw.key", func(c *x509.Certificate) {
			c.DNSNames, c.ExtKeyUsage = []string{"raw.example.org", "desk.example.org"}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		})
		s.staff.client("bob.pem", "/sales/bob")
	})
	inside := s.web.issue("rawinside.pem", "rawinside.pem", func(c *x509.Certificate) {
		c.DNSNames, c.ExtKeyUsage = []string{"raw.internal"}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
	return s, inside
}

// raw connects h1 to an opaque service.
func (s *shop) raw(file, host string, port uint16) (conn *tls.Conn, err error) {
	s.t.Helper()
	settings := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: host}
	settings.RootCAs.AddCert(s.web.cert)
	if file != "" {
		c, err := tls.LoadX509KeyPair(filepath.Join(s.folder, file), filepath.Join(s.folder, file))
		must(s.t, err)
		settings.Certificates = []tls.Certificate{c}
	}
	err = dialIn(s, "h1", func() error {
		under, err := net.DialTimeout("tcp", netip.AddrPortFrom(s.at.Addr(), port).String(), settleTime)
		if err != nil {
			return err
		}
		s.t.Cleanup(func() { under.Close() })
		conn = tls.Client(under, settings)
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		return conn.Handshake()
	})
	return conn, err
}

// audit is the log of r1's gateway.
func (s *shop) audit() (list []gateway.Record) {
	s.t.Helper()
	m, err := s.Member("r1")
	must(s.t, err)
	f, err := os.Open(filepath.Join(m.Agent.RunDir, "gateway-audit.log"))
	must(s.t, err)
	defer f.Close()
	for d := json.NewDecoder(f); ; {
		var r gateway.Record
		if d.Decode(&r) != nil {
			return list
		}
		list = append(list, r)
	}
}

// Bytes that are not HTTP go by the chain of their identity's rule, in both directions, to their end; what a function stops,
// and what an authority revokes, is reset at both sides.
func TestBytesOfAnyProtocolGoByTheirChains(t *testing.T) {
	t.Parallel()
	s, inside := newOpaque(t)
	var mu sync.Mutex
	var from []netip.AddrPort
	ended := make(chan error, 10) // how the origin's connections have
	must(t, s.Do("h2", func() error {
		l, err := tls.Listen("tcp", "[fc00:8::2]:7000", &tls.Config{Certificates: []tls.Certificate{inside}, MinVersion: tls.VersionTLS13})
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
					if c.(*tls.Conn).Handshake() != nil {
						return
					}
					mu.Lock()
					from = append(from, netip.MustParseAddrPort(c.RemoteAddr().String()))
					mu.Unlock()
					if _, err := io.WriteString(c, "ready\n"); err != nil {
						ended <- err
						return
					}
					_, err := io.Copy(c, c)
					if err == nil {
						err = c.(*tls.Conn).CloseWrite()
					}
					ended <- err
				}()
			}
		}()
		return nil
	}))
	data := make([]byte, 3_000_000)
	rand.Read(data)
	hello := func(c *tls.Conn) {
		t.Helper()
		b := make([]byte, 6)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "ready\n" { // the origin speaks first
			t.Fatalf("the client reads %q, %v", b, err)
		}
	}
	whole := func(file string) {
		t.Helper()
		c, err := s.raw(file, "raw.example.org", 7000)
		must(t, err)
		hello(c)
		go func() {
			c.Write(data)
			c.CloseWrite()
		}()
		if all, err := io.ReadAll(c); err != nil || !bytes.Equal(all, data) {
			t.Errorf("%s: %d bytes came back, %v; want %d and their end", file, len(all), err, len(data))
		}
		if err := <-ended; err != nil {
			t.Errorf("%s: the origin's connection ended with %v", file, err)
		}
		c.Close()
	}
	light, read := s.path("rawlight", model.Forward), s.part("rawread", "forward, from gateway to dpi")
	lights, reads := s.counting(light), s.counting(read)
	whole("alice.pem")
	if l, r := lights().frames(), reads().frames(); l != 0 || r == 0 {
		t.Errorf("alice's bytes took %d frames of the firewall's chain and %d of dpi's; want dpi's alone", l, r)
	}
	whole("olga.pem")
	if lights().frames() == 0 {
		t.Error("olga's bytes did not take the firewall's chain")
	}
	mu.Lock()
	if len(from) != 2 || from[0].Addr() != s.addr("h1") || from[1].Addr() != s.addr("h1") || from[1].Port() < light.Match.SourcePort.First && light.Match.SourcePort.First > 0 {
		t.Errorf("the origin has connections from %v; want two from h1, the last by a port of its chain", from)
	}
	mu.Unlock()

	// dpi resets what it does not like, and neither side takes it for an end.
	evil, err := s.raw("alice.pem", "raw.example.org", 7000)
	must(t, err)
	hello(evil)
	if _, err := io.WriteString(evil, "drop table seal-evil"); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, evil); err == nil || n > 0 {
		t.Errorf("the client has %d bytes back of what dpi stops, and %v; want a reset", n, err)
	}
	if err := <-ended; err == nil {
		t.Error("the origin takes what dpi has stopped for complete")
	}

	// Nobody gets in without a certificate, or without a rule.
	for file, why := range map[string]gateway.Reason{"": gateway.CertMissing, "bob.pem": gateway.RuleNone} {
		c, err := s.raw(file, "raw.example.org", 7000)
		if err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		if err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%q reads %v; want an alert", file, err)
		}
		eventually(t, func() error {
			for _, r := range s.audit() {
				if r.Event == gateway.EventRefused && r.Reason == why {
					return nil
				}
			}
			return fmt.Errorf("the log has no line for %s", why)
		})
	}

	// A revoked certificate ends what is under way, at both sides.
	held, err := s.raw("alice.pem", "raw.example.org", 7000)
	must(t, err)
	hello(held)
	s.staff.revoke("staff.crl", 2, s.alice.Leaf)
	began := time.Now()
	if _, err := held.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a revoked client reads %v; want a reset", err)
	}
	if err := <-ended; err == nil {
		t.Error("the origin takes what a revocation has cut off for complete")
	}
	t.Logf("both sides ended %s after the list was there", time.Since(began).Round(time.Millisecond))
	mu.Lock()
	if len(from) != 4 {
		t.Errorf("the origin has had %d connections; want four", len(from))
	}
	mu.Unlock()
	s.mayRefuse("r1", "stream-unknown") // what was under way to a connection that is over
}

// ssh logs in at a server that knows nothing of TLS: openssl s_client shows the certificate to the gateway, and HAProxy ends TLS
// before sshd. 1 MB goes in and comes back.
func TestSSHGoesThroughAGateway(t *testing.T) {
	t.Parallel()
	s, _ := newOpaque(t)
	dir := newDir(t)
	for _, name := range []string{"host", "user"} {
		s.tell("h1", nil, 0, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", filepath.Join(dir, name))
	}
	text := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		must(t, err)
		return strings.TrimSpace(string(b))
	}
	keys := write(t, "keys", text("user.pub")+"\n")
	known := write(t, "known", "desk.example.org "+text("host.pub")+"\n")
	config := write(t, "sshd_config", fmt.Sprintf(`
Port 2200
HostKey %s
AuthorizedKeysFile %s
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
`, filepath.Join(dir, "host"), keys))
	must(t, os.MkdirAll("/run/sshd", 0o755))
	at := func(port uint16) []netip.AddrPort { return []netip.AddrPort{netip.AddrPortFrom(s.at.Addr(), port)} }
	s.serve("h2", unix.SIGTERM, nil, at(2200), programPath(t, "sshd", "/usr/sbin/sshd"), "-D", "-e", "-f", config)
	proxy := write(t, "haproxy.cfg", fmt.Sprintf(`
defaults
  mode tcp
  timeout connect 10s
  timeout client 1m
  timeout server 1m
frontend tls
  bind [%[1]s]:2222 ssl crt %[2]s alpn ssh ssl-min-ver TLSv1.3
  default_backend sshd
backend sshd
  server sshd [%[1]s]:2200
`, s.at.Addr(), filepath.Join(s.folder, "rawinside.pem")))
	s.serve("h2", unix.SIGTERM, nil, at(2222), programPath(t, "haproxy", "/usr/sbin/haproxy"), "-db", "-f", proxy)
	login := func(cert, alpn string) []string {
		client := fmt.Sprintf("openssl s_client -quiet -verify_quiet -verify_return_error -connect [%s]:2222 -servername desk.example.org -alpn %s -CAfile %s -cert %[4]s -key %[4]s",
			s.at.Addr(), alpn, filepath.Join(s.folder, "web.pem"), filepath.Join(s.folder, cert))
		return []string{"ssh", "-F", "none", "-i", filepath.Join(dir, "user"), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes",
			"-o", "UserKnownHostsFile=" + known, "-o", "GlobalKnownHostsFile=none", "-o", "ProxyCommand=" + client, "root@desk.example.org"}
	}
	data := make([]byte, 1<<20)
	rand.Read(data)
	frames := s.counting(s.path("shell", model.Forward))
	if got := string(s.tell("h1", nil, 7, append(login("alice.pem", "ssh"), "printf done; exit 7")...)); got != "done" {
		t.Errorf("the command prints %q; want done", got)
	}
	if got := s.tell("h1", bytes.NewReader(data), 0, append(login("alice.pem", "ssh"), "cat")...); !bytes.Equal(got, data) {
		t.Errorf("%d bytes came back, and are not the %d that were sent", len(got), len(data))
	}
	if frames().frames() == 0 {
		t.Error("nothing went by the chain")
	}
	const failed = 255 // ssh's own status
	s.tell("h1", nil, failed, append(login("olga.pem", "ssh"), "printf done")...)
	s.tell("h1", nil, failed, append(login("alice.pem", "h2"), "printf done")...)
	s.mayRefuse("r1", "stream-unknown")
}
