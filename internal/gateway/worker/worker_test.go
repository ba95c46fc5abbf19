package worker

import (
	"bufio"
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ocsp"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/seal"
	"github.com/waystamp/waystamp/internal/signer"
	"github.com/waystamp/waystamp/internal/stream/sandbox"
)

// The test's binary is the worker's program, too.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "worker" && os.Args[2] == "gateway" {
		var listeners []*os.File
		for _, a := range os.Args {
			if a == "--listener-fd" {
				listeners = append(listeners, os.NewFile(uintptr(5+len(listeners)), "listener"))
			}
		}
		if as := os.Getenv(rogue); as != "" {
			turnedRogue(as)
		}
		if err := Serve(context.Background(), os.NewFile(3, "parent"), os.NewFile(4, "audit"), listeners, os.Stderr, 0); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// rogue is the environment's variable that says what a worker does once it has its configuration.
const rogue = "WAYSTAMP_TEST_ROGUE"

func turnedRogue(as string) {
	parent := os.NewFile(3, "parent")
	var m toWorker
	if err := receive(parent, &m, toWorkerMax); err != nil {
		panic(err)
	}
	if err := send(parent, toParent{Taken: &answer{Number: m.Configuration.Number}}, toParentMax); err != nil {
		panic(err)
	}
	switch as {
	case "babbles":
		parent.Write([]byte("\x00\x00\x00\x04nope"))
	case "shouts":
		parent.Write([]byte("\xff\xff\xff\xff"))
	case "hangs up":
		parent.Close()
	case "is deaf":
	case "cuts its log":
		if err := os.NewFile(4, "audit").Truncate(0); err != nil {
			panic(err)
		}
	}
	for {
		time.Sleep(time.Hour)
	}
}

// A worker that cannot be spoken with any more does not go on.
func TestAWorkerThatCannotBeSpokenWithIsKilled(t *testing.T) {
	for as, says := range map[string]string{
		"babbles": "what it says cannot be read", "shouts": "what it says cannot be read", "hangs up": "its socket was closed", "is deaf": "it has read nothing",
	} {
		t.Run(as, func(t *testing.T) {
			t.Setenv(rogue, as)
			w := newWorld(t)
			w.start()
			if as == "is deaf" {
				long := w.config
				long.Chains = []Chain{{Name: strings.Repeat("x", 4<<20)}} // more than the socket holds
				if err := w.process.Configure(long, time.Minute); err == nil || !strings.Contains(err.Error(), says) {
					t.Errorf("Configure says %v; want that %s", err, says)
				}
			}
			select {
			case <-w.process.Ended():
				if err := w.process.Err(); !strings.Contains(err.Error(), says) {
					t.Errorf("it ended since %v; want that %s", err, says)
				}
			case <-time.After(await.Limit(time.Minute)):
				t.Error("it goes on")
			}
		})
	}
}

// A worker that changes what it has logged is not gone on with, and neither is its log.
func TestAWorkerThatChangesItsLogIsKilled(t *testing.T) {
	w := newWorld(t)
	log, err := gateway.GoOnAudit(w.options.Audit, "audit.log", time.Now)
	must(t, err)
	must(t, log.Write(gateway.Record{Event: gateway.EventChanged}))
	// The worker before has logged, and its line was signed.
	s := w.signatures()
	must(t, s.Read())
	s.Sign()
	must(t, s.Close())
	t.Setenv(rogue, "cuts its log")
	w.options.Signatures = w.signatures()
	w.start()
	select {
	case <-w.process.Ended():
		if err := w.process.Err(); !strings.Contains(err.Error(), "lines were removed") {
			t.Errorf("it ended since %v", err)
		}
	case <-time.After(await.Limit(time.Minute)):
		t.Error("it goes on")
	}
	if _, err := gateway.OpenSignatures(w.options.Audit, w.key, w.options.Log, time.Now); err == nil || !strings.Contains(err.Error(), "it is empty, and line 1 of it was signed") {
		t.Errorf("at the next start: %v", err)
	}
}

// Files that change while a configuration comes in do not bring the one before back.
func TestTheLastConfigurationStays(t *testing.T) {
	ours, its := net.Pipe()
	folder := t.TempDir()
	must(t, os.WriteFile(filepath.Join(folder, "ca.pem"), make([]byte, 1<<16), 0o600))
	audit, err := gateway.OpenAuditFile(filepath.Join(folder, "audit.log"))
	must(t, err)
	defer audit.Close()
	p := &Process{options: Options{Folder: folder, Audit: audit}, conn: ours, pending: map[uint64]chan error{}, ended: make(chan struct{})}
	const last = 60
	taken := make(chan error, 1)
	go func() {
		number, name := uint64(0), 0
		for name < last {
			var m toWorker
			if err := receive(its, &m, toWorkerMax); err != nil {
				taken <- err
				return
			}
			c := m.Configuration
			if c.Number <= number || len(c.Chains[0].Name) < name {
				taken <- fmt.Errorf("configuration %d of chain %q comes after %d of %d letters", c.Number, c.Chains[0].Name, number, name)
				return
			}
			number, name = c.Number, len(c.Chains[0].Name)
			p.mu.Lock()
			to := p.pending[number]
			p.mu.Unlock()
			to <- nil
		}
		taken <- nil
	}()
	of := func(n int) Configuration {
		return Configuration{Clients: []model.Clients{{Name: "staff", Kind: model.IdentitySPIFFE, CA: "ca.pem"}}, Chains: []Chain{{Name: strings.Repeat("x", n)}}}
	}
	if err := p.Configure(of(1), 10*time.Second); err != nil {
		t.Fatal(err, <-taken)
	}
	stop, stopped := make(chan struct{}), sync.WaitGroup{}
	for range 4 {
		stopped.Go(func() {
			for i := 1; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				must(t, os.Chtimes(filepath.Join(folder, "ca.pem"), time.Time{}, time.Unix(int64(i), 0)))
				p.refresh(time.Minute) // the reader ends before it hears them all
			}
		})
	}
	go func() {
		for i := 2; i <= last; i++ {
			p.Configure(of(i), time.Minute)
		}
	}()
	if err := <-taken; err != nil {
		t.Error(err)
	}
	close(stop)
	its.Close()
	close(p.ended)
	stopped.Wait()
}

// A worker does not go back to a configuration before the one that it has, and leaves no trace of it.
func TestAnOlderConfigurationIsRefused(t *testing.T) {
	w := &worker{number: 7, chains: map[string]*chain{}}
	for _, n := range []uint64{6, 7} {
		c := &configuration{Number: n, Configuration: Configuration{Chains: []Chain{{Name: "old"}}}}
		if err := w.change(c); err == nil || !strings.Contains(err.Error(), "comes after 7") || len(w.chains) > 0 {
			t.Errorf("configuration %d: %v, chains %v; want it refused, since 7 was there", n, err, w.chains)
		}
	}
}

func TestAsksAreBounded(t *testing.T) {
	var b bucket
	now := time.Unix(1000, 0)
	let := func() (n int) {
		for range 5 * asksPerSecond {
			if b.take(now) {
				n++
			}
		}
		return n
	}
	if n := let(); n != 2*asksPerSecond {
		t.Errorf("%d asks at once; want %d", n, 2*asksPerSecond)
	}
	now = now.Add(time.Second / 2)
	if n := let(); n != asksPerSecond/2 {
		t.Errorf("%d asks after half a second; want %d", n, asksPerSecond/2)
	}
	now = now.Add(time.Hour)
	if n := let(); n != 2*asksPerSecond {
		t.Errorf("%d asks after an hour; want %d", n, 2*asksPerSecond)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(await.Limit(20 * time.Second)); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after 20 s still not: %s", what)
		}
	}
}

// issuer is an authority.
type issuer struct {
	cert *x509.Certificate
	key  crypto.Signer
}

var serial int64 = 1000

func (i *issuer) sign(t testing.TB, change func(*x509.Certificate)) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	serial++
	c := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "x"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature}
	change(c)
	parent, signer := c, crypto.Signer(key)
	if i != nil {
		parent, signer = i.cert, i.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	must(t, err)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	return cert, key
}

func newIssuer(t testing.TB, name string) *issuer {
	var none *issuer
	cert, key := none.sign(t, func(c *x509.Certificate) {
		c.Subject.CommonName, c.IsCA, c.KeyUsage = name, true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	})
	return &issuer{cert, key}
}

// world is a gateway's process between clients and an origin.
type world struct {
	testing.TB
	folder     string
	staff, web *issuer
	alice      *x509.Certificate
	list       int64
	address    netip.AddrPort
	config     Configuration
	process    *Process
	options    Options

	mu   sync.Mutex
	asks []Ask
	deny error
	part *seal.Part // of sealed chains
	seen []string   // paths that the origin has
	log  bytes.Buffer
}

func (w *world) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(b)
}

func (w *world) said() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.String()
}

func (w *world) file(name string, blocks ...*pem.Block) {
	w.Helper()
	var text []byte
	for _, b := range blocks {
		text = append(text, pem.EncodeToMemory(b)...)
	}
	// As whoever replaces files should: nobody reads half of one.
	next := filepath.Join(w.folder, name+".next")
	must(w, os.WriteFile(next, text, 0o600))
	must(w, os.Rename(next, filepath.Join(w.folder, name)))
}

func certificate(c *x509.Certificate) *pem.Block {
	return &pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}
}

func private(t testing.TB, k *ecdsa.PrivateKey) *pem.Block {
	der, err := x509.MarshalPKCS8PrivateKey(k)
	must(t, err)
	return &pem.Block{Type: "PRIVATE KEY", Bytes: der}
}

// revoke writes the next list.
func (w *world) revoke(list ...*x509.Certificate) {
	w.Helper()
	w.list++
	l := &x509.RevocationList{Number: big.NewInt(w.list), ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour)}
	for _, c := range list {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, w.staff.cert, w.staff.key)
	must(w, err)
	w.file("staff.crl", &pem.Block{Type: "X509 CRL", Bytes: der})
}

func (w *world) serverCertificate(name string) (*x509.Certificate, *ecdsa.PrivateKey) {
	return w.web.sign(w, func(c *x509.Certificate) {
		c.DNSNames, c.ExtKeyUsage = []string{name}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
}

func (w *world) clientCertificate(file, path string) *x509.Certificate {
	cert, key := w.staff.sign(w, func(c *x509.Certificate) {
		c.URIs, c.ExtKeyUsage = []*url.URL{{Scheme: "spiffe", Host: "staff.example", Path: path}}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	})
	w.file(file, certificate(cert), private(w, key))
	return cert
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{TB: t, folder: t.TempDir(), staff: newIssuer(t, "staff"), web: newIssuer(t, "web")}
	w.file("staff.pem", certificate(w.staff.cert))
	w.file("web.pem", certificate(w.web.cert))
	w.revoke()
	w.alice = w.clientCertificate("alice.pem", "/eng/alice")
	shop, key := w.serverCertificate("shop.example.org")
	w.file("shop.pem", certificate(shop))
	w.file("shop.key", private(t, key))
	inside, key := w.serverCertificate("shop.internal")
	origin := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.seen = append(w.seen, r.URL.Path)
		w.mu.Unlock()
		io.WriteString(rw, "hello")
	}))
	origin.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{inside.Raw}, PrivateKey: key}}}
	origin.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	origin.StartTLS()
	t.Cleanup(origin.Close)
	to := netip.MustParseAddrPort(origin.Listener.Addr().String())

	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	w.address = netip.MustParseAddrPort(l.Addr().String())
	file, err := l.(*net.TCPListener).File()
	must(t, err)
	must(t, l.Close())
	t.Cleanup(func() { file.Close() })
	audit, err := gateway.OpenAuditFile(filepath.Join(w.folder, "audit.log"))
	must(t, err)
	t.Cleanup(func() { audit.Close() })
	self, err := os.Executable()
	must(t, err)
	w.options = Options{Program: self, Folder: w.folder, Audit: audit, Listeners: []*os.File{file}, Allow: w.allow, Log: slog.New(slog.NewTextHandler(w, nil))}
	w.config = Configuration{
		Clients: []model.Clients{{Name: "staff", CA: "staff.pem", Kind: model.IdentitySPIFFE, Within: "staff.example", CRL: "staff.crl", OlderThan: time.Hour}},
		Services: []model.Service{{
			Name: "shop", Hosts: []string{"shop.example.org"}, Address: w.address, Certificate: "shop.pem", Key: "shop.key", Clients: "staff",
			Origin: model.Origin{Address: to, CA: "web.pem", Name: "shop.internal"},
			Rules: []model.ServiceRule{
				{Who: "spiffe://staff.example/eng/*", Methods: []string{"GET"}, Path: "/status", Chain: "light"},
				{Who: "spiffe://staff.example/eng/**", Path: "/files/**", Chain: "deep"},
			},
		}},
		Chains: []Chain{{Name: "light", Origin: to, First: 20000, Last: 20999}, {Name: "deep", Origin: to, First: 21000, Last: 21999}},
	}
	return w
}

// key signs the audit log.
func (w *world) key() (*gateway.AuditKey, error) { return &gateway.AuditKey{Signer: w.staff.key}, nil }

func (w *world) signatures() *gateway.Signatures {
	w.Helper()
	s, err := gateway.OpenSignatures(w.options.Audit, w.key, w.options.Log, time.Now)
	must(w, err)
	return s
}

func (w *world) start() {
	w.Helper()
	var err error
	w.process, err = Start(w.options, w.config)
	must(w, err)
	w.Cleanup(func() {
		if err := w.process.Close(); err != nil {
			w.Error(err)
		}
	})
}

func (w *world) allow(a Ask) (*seal.Part, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asks = append(w.asks, a)
	return w.part, w.deny
}

// curl prints version, status and new connections of each request.
func (w *world) curl(args ...string) string {
	w.Helper()
	if _, err := exec.LookPath("curl"); err != nil {
		w.Fatal("curl is not installed; tools/deps.sh test installs it")
	}
	url := fmt.Sprintf("https://shop.example.org:%d", w.address.Port())
	each := []string{"-sS", "-m", "20", "--noproxy", "*", "--cacert", filepath.Join(w.folder, "web.pem"), "-w", "|%{http_code} %{num_connects}\n",
		"--resolve", fmt.Sprintf("shop.example.org:%d:127.0.0.1", w.address.Port())}
	all := slices.Clone(each)
	for _, a := range args {
		if a == "--next" {
			all = append(append(all, a), each...)
		} else if strings.HasPrefix(a, "/") && !strings.HasSuffix(a, ".pem") {
			all = append(all, url+a)
		} else {
			all = append(all, a)
		}
	}
	out, _ := exec.CommandContext(w.Context(), "curl", all...).CombinedOutput() // how it ends, its text says
	return string(out)
}

func (w *world) pem(name string) string { return filepath.Join(w.folder, name) }

// events are those of the log, which must be whole.
func (w *world) verified() uint64 {
	w.Helper()
	f, err := os.Open(w.pem("audit.log"))
	must(w, err)
	defer f.Close()
	v, err := gateway.VerifyAudit(f)
	must(w, err)
	return v.Lines
}

func TestCurlIsServedByAConfinedProcess(t *testing.T) {
	w := newWorld(t)
	w.start()
	alice := w.pem("alice.pem")
	if got, want := w.curl("--cert", alice, "/status", "--next", "--cert", alice, "/files/a"), "hello|200 1\nhello|200 0\n"; got != want {
		t.Errorf("curl prints %q; want %q\n%s", got, want, w.said())
	}
	if got := w.curl("--cert", alice, "/secret"); !strings.Contains(got, "|403 1") {
		t.Errorf("curl prints %q for what no rule allows; want 403", got)
	}
	if got := w.curl("/status"); !strings.Contains(got, "certificate required") {
		t.Errorf("curl without a certificate prints %q; want the alert certificate_required", got)
	}
	w.mu.Lock()
	asks, seen := w.asks, w.seen
	w.mu.Unlock()
	if len(asks) != 2 || asks[0].Chain != "light" || asks[1].Chain != "deep" || asks[0].Client != asks[1].Client || !slices.Equal(seen, []string{"/status", "/files/a"}) {
		t.Fatalf("asked for %+v, and the origin has seen %v", asks, seen)
	}
	for i, a := range asks {
		c := w.config.Chains[i]
		if a.Source.Addr() != a.Client.Addr() || a.Source.Port() < c.First || a.Source.Port() > c.Last || a.Origin != c.Origin {
			t.Errorf("%+v: want the client's address and a port of %+v", a, c)
		}
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.process.PID()))
	must(t, err)
	want := []string{"CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"}
	if os.Geteuid() == 0 {
		want = append(want, fmt.Sprintf("Uid:\t%d", sandbox.Nobody), "CapBnd:\t0000000000000000")
	}
	for _, line := range want {
		if !strings.Contains(string(status), line) {
			t.Errorf("the process has no %q:\n%s", line, status)
		}
	}
	eventually(t, "the parent knows of two sessions and two refusals", func() bool {
		s := w.process.Statistics()
		return s.Opened == 2 && s.Now == 0 && s.Refused[gateway.CertMissing] == 1 && s.Refused[gateway.RuleNone] == 1
	})
	if n := w.verified(); n < 8 {
		t.Errorf("the audit log has %d lines; want one at least of each session and request", n)
	}
}

// The log is signed while it grows, and to its end when the process ends.
func TestTheLogIsSigned(t *testing.T) {
	w := newWorld(t)
	w.options.Signatures = w.signatures()
	w.start()
	for range 2 {
		if got := w.curl("--cert", w.pem("alice.pem"), "/status"); !strings.HasPrefix(got, "hello|200") {
			t.Fatalf("curl says %q", got)
		}
	}
	must(t, w.process.Close())
	v := w.signed()
	if v.Lines < 6 || v.Signed.Lines != v.Lines {
		t.Errorf("%d of %d lines are signed", v.Signed.Lines, v.Lines)
	}
}

// signed is the log with its signatures, which must be whole.
func (w *world) signed() gateway.Verified {
	w.Helper()
	log, err := os.Open(w.options.Audit.Name())
	must(w, err)
	defer log.Close()
	signatures, err := os.Open(gateway.SignaturesOf(log.Name()))
	must(w, err)
	defer signatures.Close()
	v, err := gateway.VerifySigned(log, signatures, gateway.Trust{Keys: []crypto.PublicKey{w.staff.key.Public()}})
	must(w, err)
	return v
}

// On a disk that gets full, in the middle of a line, nothing is let in that is not in the log. With room it goes on, and all of the log is whole and signed.
func TestAFullDiskLetsNobodyIn(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a file system")
	}
	w := newWorld(t)
	disk := t.TempDir()
	must(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "size=256k"))
	t.Cleanup(func() { must(t, unix.Unmount(disk, unix.MNT_DETACH)) })
	audit, err := gateway.OpenAuditFile(filepath.Join(disk, "audit.log"))
	must(t, err)
	t.Cleanup(func() { audit.Close() })
	w.options.Audit = audit
	w.options.Signatures = w.signatures()
	// All but some pages are taken.
	ballast := filepath.Join(disk, "ballast")
	must(t, os.WriteFile(ballast, make([]byte, 200<<10), 0o600))
	w.start()
	pair, err := tls.LoadX509KeyPair(w.pem("alice.pem"), w.pem("alice.pem"))
	must(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(w.web.cert)
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", w.address.String())
		},
	}}
	t.Cleanup(client.CloseIdleConnections)
	get := func() int {
		r, err := client.Get(fmt.Sprintf("https://shop.example.org:%d/status", w.address.Port()))
		must(t, err)
		_, err = io.Copy(io.Discard, r.Body)
		must(t, errors.Join(err, r.Body.Close()))
		return r.StatusCode
	}
	answered := 0
	for answered < 10_000 {
		status := get()
		if status == http.StatusServiceUnavailable {
			break
		}
		if status != http.StatusOK {
			t.Fatalf("status %d", status)
		}
		answered++
	}
	var fs unix.Statfs_t
	must(t, unix.Statfs(disk, &fs))
	if fs.Bfree > 0 || answered == 0 || answered == 10_000 {
		t.Fatalf("%d requests were answered, and %d pages are free", answered, fs.Bfree)
	}
	// No more connections, and no more requests, in as many tries as would fill the rest of a page with shorter lines.
	for range 20 {
		if got := w.curl("--cert", w.pem("alice.pem"), "/status"); strings.Contains(got, "hello") {
			t.Fatalf("with a full disk curl says %q", got)
		}
	}
	decided := w.decided()
	w.mu.Lock()
	seen := len(w.seen)
	w.mu.Unlock()
	if seen != decided || answered != seen {
		t.Errorf("the origin has seen %d requests, %d are in the log, and %d were answered", seen, decided, answered)
	}
	eventually(t, "the refusals are counted", func() bool { return w.process.Statistics().Refused[gateway.AuditFailed] > 1 })
	must(t, os.Remove(ballast))
	if got := w.curl("--cert", w.pem("alice.pem"), "/status"); !strings.HasPrefix(got, "hello|200") {
		t.Errorf("with room again curl says %q", got)
	}
	if now := w.decided(); now != decided+1 {
		t.Errorf("%d requests are in the log; want %d", now, decided+1)
	}
	must(t, w.process.Close())
	if v := w.signed(); v.Signed.Lines != v.Lines {
		t.Errorf("%d of %d lines are signed", v.Signed.Lines, v.Lines)
	}
}

// decided counts the requests that were let in, by the log.
func (w *world) decided() (n int) {
	w.Helper()
	var text []byte
	eventually(w, "the log is whole, and nobody is writing", func() bool {
		var err error
		text, err = os.ReadFile(w.options.Audit.Name())
		must(w, err)
		_, err = gateway.VerifyAudit(bytes.NewReader(text))
		return err == nil
	})
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		var r gateway.Record
		if err := d.Decode(&r); err != nil {
			return n
		}
		if r.Event == gateway.EventDecided {
			n++
		}
	}
}

// What the parent refuses reaches nobody.
func TestARefusedConnectionOnwardIsNotOpened(t *testing.T) {
	w := newWorld(t)
	w.deny = errors.New("not today")
	w.start()
	if got := w.curl("--cert", w.pem("alice.pem"), "/status"); !strings.Contains(got, "|502 1") {
		t.Errorf("curl prints %q; want 502", got)
	}
	log, err := os.ReadFile(w.pem("audit.log"))
	must(t, err)
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.seen) > 0 || len(w.asks) == 0 || !bytes.Contains(log, []byte("not today")) {
		t.Errorf("asked %+v, the origin has seen %v, and the log is %s", w.asks, w.seen, log)
	}
}

// held is a client's connection that has made a request.
func (w *world) held() *tls.Conn {
	w.Helper()
	pair, err := tls.LoadX509KeyPair(w.pem("alice.pem"), w.pem("alice.pem"))
	must(w, err)
	roots := x509.NewCertPool()
	roots.AddCert(w.web.cert)
	conn, err := tls.Dial("tcp", w.address.String(), &tls.Config{RootCAs: roots, ServerName: "shop.example.org", Certificates: []tls.Certificate{pair}})
	must(w, err)
	w.Cleanup(func() { conn.Close() })
	must(w, conn.SetDeadline(time.Now().Add(await.Limit(20*time.Second))))
	_, err = io.WriteString(conn, "GET /status HTTP/1.1\r\nHost: shop.example.org\r\n\r\n")
	must(w, err)
	b := make([]byte, 4096)
	n, err := conn.Read(b)
	if err != nil || !strings.HasPrefix(string(b[:n]), "HTTP/1.1 200") {
		w.Fatalf("the gateway answers %q, %v", b[:n], err)
	}
	return conn
}

// A list that comes in while a client is connected ends what it revokes, and files that are wrong change nothing.
func TestFilesThatChangeAreTakenIn(t *testing.T) {
	w := newWorld(t)
	w.start()
	conn := w.held()
	taken := func(n int, text string) {
		t.Helper()
		eventually(t, text, func() bool { return strings.Count(w.said(), text) == n })
	}
	w.file("staff.crl", &pem.Block{Type: "X509 CRL", Bytes: []byte("nonsense")})
	taken(1, "cannot be taken in")
	if got := w.curl("--cert", w.pem("alice.pem"), "/status"); got != "hello|200 1\n" {
		t.Errorf("with a list that is none, curl prints %q; want the one before to count", got)
	}
	w.revoke()
	taken(1, "has taken files in")
	other, key := w.serverCertificate("shop.example.org")
	w.file("both", certificate(other))
	must(t, os.Rename(w.pem("both"), w.pem("shop.pem")))
	w.file("shop.key", private(t, key))
	eventually(t, "the new certificate is shown", func() bool {
		c, err := tls.Dial("tcp", w.address.String(), &tls.Config{InsecureSkipVerify: true, ServerName: "shop.example.org"})
		must(t, err)
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].Equal(other)
	})
	w.revoke(w.alice)
	if n, err := io.Copy(io.Discard, conn); n > 4096 {
		t.Errorf("the connection of a revoked certificate goes on: %d bytes, %v", n, err)
	} else if nerr, ok := errors.AsType[net.Error](err); ok && nerr.Timeout() {
		t.Error("the connection of a revoked certificate stays open")
	}
	if got := w.curl("--cert", w.pem("alice.pem"), "/status"); strings.Contains(got, "200") {
		t.Errorf("with a revoked certificate curl prints %q", got)
	}
}

// A configuration that is wrong says why, at the start and later; one that is right replaces the one before.
func TestAConfigurationIsReplacedWhole(t *testing.T) {
	w := newWorld(t)
	bad := w.config
	bad.Services = slices.Clone(bad.Services)
	bad.Services[0].Key = "missing.key"
	if _, err := Start(w.options, bad); err == nil || !strings.Contains(err.Error(), "missing.key is not there") {
		t.Errorf("without its key the gateway starts with %v; want that missing.key is not there", err)
	}
	w.start()
	if err := w.process.Configure(bad, time.Minute); err == nil || !strings.Contains(err.Error(), "missing.key is not there") {
		t.Errorf("Configure says %v; want that missing.key is not there", err)
	}
	if got := w.curl("--cert", w.pem("alice.pem"), "/status"); got != "hello|200 1\n" {
		t.Errorf("curl prints %q; want the configuration before", got)
	}
	other := w.config
	other.Services = slices.Clone(other.Services)
	other.Services[0].Rules = other.Services[0].Rules[1:]
	must(t, w.process.Configure(other, time.Minute))
	if got := w.curl("--cert", w.pem("alice.pem"), "/status"); !strings.Contains(got, "|403") {
		t.Errorf("curl prints %q; want 403 by the rules that are left", got)
	}
	other.Services[0].Address = netip.AddrPortFrom(w.address.Addr(), w.address.Port()+1)
	must(t, w.process.Configure(other, time.Minute))
	if got := w.curl("--cert", w.pem("alice.pem"), "/files/a"); !strings.Contains(got, "unrecognized") {
		t.Errorf("curl prints %q at another address than the service's; want the alert unrecognized_name", got)
	}
}

// The process ends with its parent's end of the socket.
func TestTheProcessEndsWithItsParent(t *testing.T) {
	w := newWorld(t)
	w.start()
	conn := w.held()
	must(t, w.process.Close())
	if err := w.process.Err(); err == nil || err.Error() != "it ended" {
		t.Errorf("the process ended with %v; want that it just ended", err)
	}
	conn.SetDeadline(time.Now().Add(await.Limit(20 * time.Second)))
	if _, err := io.Copy(io.Discard, conn); err != nil {
		if nerr, ok := errors.AsType[net.Error](err); ok && nerr.Timeout() {
			t.Error("a connection of the process is still open")
		}
	}
	w.verified()
}

// A worker that was taken over sends what it likes.
func TestMessagesAreBounded(t *testing.T) {
	var b bytes.Buffer
	must(t, send(&b, toParent{Ask: &ask{1, Ask{Chain: "light"}}}, toParentMax))
	var m toParent
	if err := receive(&b, &m, toParentMax); err != nil || m.Ask == nil || m.Ask.Chain != "light" {
		t.Errorf("a message comes back as %+v, %v", m, err)
	}
	for name, c := range map[string]struct{ text, says string }{
		"too long":   {"\x00\x01\x00\x01{}", "at most 65536 are read"},
		"cut":        {"\x00\x00\x00\x05{}", "not whole"},
		"cut early":  {"\x00\x00", "unexpected EOF"},
		"no JSON":    {"\x00\x00\x00\x02xx", "invalid character"},
		"wrong type": {"\x00\x00\x00\x0a{\"Ask\":[]}", "cannot unmarshal"},
	} {
		if err := receive(strings.NewReader(c.text), &m, toParentMax); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %q", name, err, c.says)
		}
	}
	if err := send(io.Discard, toParent{Ask: &ask{1, Ask{Chain: strings.Repeat("x", toParentMax)}}}, toParentMax); err == nil {
		t.Error("a message of more than the most is sent")
	}
}

// On a sealed chain a request goes to the next end in TLS with its key, and nothing goes where there is no key.
func TestASealedChainIsDialledWithItsKey(t *testing.T) {
	w := newWorld(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	to := netip.MustParseAddrPort(l.Addr().String())
	pd, kd, err := ed25519.GenerateKey(rand.Reader)
	must(t, err)
	pa, ka, err := ed25519.GenerateKey(rand.Reader)
	must(t, err)
	gateway, dpi := seal.Name("r1", "gateway"), seal.Name("r3", "dpi")
	end := seal.Part{Chain: "deep", Path: 7, Name: dpi, Other: gateway, Epochs: []seal.Epoch{{Number: 3, Key: ka, Peer: pd}}}
	var hellos []seal.Hello
	var errs []error
	heard := make(chan struct{}, 16)
	go func() {
		for {
			under, err := l.Accept()
			if err != nil {
				return
			}
			c, h, err := end.Accept(t.Context(), under)
			w.mu.Lock()
			hellos, errs = append(hellos, h), append(errs, err)
			w.mu.Unlock()
			if err == nil && c.Answer(context.Background(), seal.Answer{}) == nil {
				if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\n"+"hello")
				}
			}
			under.Close()
			heard <- struct{}{}
		}
	}()
	w.config.Services[0].Origin.Address = to
	w.config.Chains = []Chain{{Name: "light", Origin: to, First: 20000, Last: 20999}, {Name: "deep", Origin: to, First: 21000, Last: 21999, Sealed: true}}
	w.part = &seal.Part{Chain: "deep", Path: 7, Name: gateway, Other: dpi, Epochs: []seal.Epoch{{Number: 3, Key: kd, Peer: pa}}}
	w.start()

	ask := func() string {
		return w.curl("--cert", filepath.Join(w.folder, "alice.pem"), "/files/a")
	}
	if got := ask(); got != "hello|200 1\n" {
		t.Errorf("curl prints %q; want 200", got)
	}
	<-heard
	w.mu.Lock()
	if want := (seal.Hello{Chain: "deep", Path: 7, Epoch: 3, Service: "shop", Protocol: seal.HTTP1}); len(hellos) != 1 || errs[0] != nil || hellos[0] != want {
		t.Errorf("the next end heard %+v, %v; want %+v", hellos, errs, want)
	}
	w.part = nil
	w.mu.Unlock()
	if got := ask(); !strings.Contains(got, "502") {
		t.Errorf("curl prints %q without a key; want 502", got)
	}
	<-heard
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(errs) != 2 || errs[1] == nil {
		t.Errorf("without a key something came to the next end: %v", errs)
	}
}

// What operators want of sessions is done in the process, also for a new one.
func TestSessionsAreListedEndedAndRevoked(t *testing.T) {
	w := newWorld(t)
	w.start()
	const alice = "spiffe://staff.example/eng/alice"
	var conns []*tls.Conn
	for range sessionsMost + 5 { // more than one reply has
		conns = append(conns, w.held())
	}
	list, err := w.process.Sessions()
	must(t, err)
	if len(list) != len(conns) {
		t.Fatalf("%d sessions are listed; want %d", len(list), len(conns))
	}
	for i, s := range list {
		if s.Identity != alice || s.Client.String() != conns[i].LocalAddr().String() || s.Requests != 1 || !slices.Equal(s.Chains, []string{"light"}) {
			t.Fatalf("session %d is %+v, of the connection from %s", i, s, conns[i].LocalAddr())
		}
	}
	if there, err := w.process.End(list[0].ID); !there || err != nil {
		t.Errorf("the first session: %t, %v; want it ended", there, err)
	}
	if there, err := w.process.End(list[0].ID); there || err != nil {
		t.Errorf("the first session again: %t, %v; want that it is not there", there, err)
	}
	if n, err := w.process.Revoke([]string{alice}); n != len(conns)-1 || err != nil {
		t.Errorf("%d sessions ended with the revocation, %v; want %d", n, err, len(conns)-1)
	}
	for i, c := range conns {
		if n, err := io.Copy(io.Discard, c); n > 4096 {
			t.Errorf("connection %d goes on: %d bytes, %v", i, n, err)
		} else if nerr, ok := errors.AsType[net.Error](err); ok && nerr.Timeout() {
			t.Errorf("connection %d stays open", i)
		}
	}
	if list, err := w.process.Sessions(); len(list) != 0 || err != nil {
		t.Errorf("sessions that are left: %+v, %v", list, err)
	}
	if got := w.curl("--cert", w.pem("alice.pem"), "/status"); strings.Contains(got, "|200") {
		t.Errorf("curl prints %q for who is revoked", got)
	}
	must(t, w.process.Close())
	w.options.Revoked = []string{alice}
	w.start()
	if got := w.curl("--cert", w.pem("alice.pem"), "/status"); strings.Contains(got, "|200") {
		t.Errorf("curl prints %q for who is revoked, at a new process", got)
	}
	if _, err := w.process.Revoke(nil); err != nil {
		t.Error(err)
	}
	if got := w.curl("--cert", w.pem("alice.pem"), "/status"); got != "hello|200 1\n" {
		t.Errorf("curl prints %q for who is not revoked any more", got)
	}
	must(t, w.process.Close())
	if _, err := w.process.Sessions(); err == nil {
		t.Error("a process that has ended lists sessions")
	}
	w.verified()
}

// A process that opens no connection itself has responders asked by its parent: the one that its clients' setting names, or the certificate.
func TestTheParentAsksResponders(t *testing.T) {
	for name, named := range map[string]bool{"named by the file": true, "named by the certificate": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			var revoked sync.Map
			responder := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				text, err := io.ReadAll(r.Body)
				if err != nil {
					return
				}
				q, err := ocsp.ParseRequest(text)
				if err != nil {
					http.Error(rw, err.Error(), http.StatusBadRequest)
					return
				}
				a := ocsp.Response{Status: ocsp.Good, SerialNumber: q.SerialNumber, ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour)}
				if _, is := revoked.Load(q.SerialNumber.String()); is {
					a.Status, a.RevokedAt = ocsp.Revoked, time.Now()
				}
				der, err := ocsp.CreateResponse(w.staff.cert, w.staff.cert, a, w.staff.key)
				if err != nil {
					http.Error(rw, err.Error(), http.StatusInternalServerError)
					return
				}
				rw.Header().Set("Content-Type", "application/ocsp-response")
				rw.Write(der)
			}))
			defer responder.Close()
			c := &w.config.Clients[0]
			c.CRL, c.OCSP = "", true
			if named {
				c.Responder = responder.URL + "/"
			}
			client := func(file, path string, at ...string) *x509.Certificate {
				cert, key := w.staff.sign(w, func(c *x509.Certificate) {
					c.URIs, c.ExtKeyUsage = []*url.URL{{Scheme: "spiffe", Host: "staff.example", Path: path}}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
					c.OCSPServer = at
				})
				w.file(file, certificate(cert), private(w, key))
				return cert
			}
			client("olga.pem", "/eng/olga", responder.URL)
			revoked.Store(client("bob.pem", "/eng/bob", responder.URL).SerialNumber.String(), true)
			client("alone.pem", "/eng/alone")
			w.start()
			if got := w.curl("--cert", w.pem("olga.pem"), "/status"); got != "hello|200 1\n" {
				t.Errorf("curl prints %q; want 200: %s", got, w.said())
			}
			if got := w.curl("--cert", w.pem("bob.pem"), "/status"); strings.Contains(got, "|200") {
				t.Errorf("curl prints %q for a revoked client", got)
			}
			if got := w.curl("--cert", w.pem("alone.pem"), "/status"); (got == "hello|200 1\n") != named {
				t.Errorf("curl prints %q for a client whose certificate names no responder", got)
			}
			responder.Close()
			client("late.pem", "/eng/late", responder.URL)
			if got := w.curl("--cert", w.pem("late.pem"), "/status"); strings.Contains(got, "|200") {
				t.Errorf("curl prints %q for a client about whom nobody answers", got)
			}
			want := map[gateway.Reason]uint64{gateway.CertRevoked: 1, gateway.OCSPUnreachable: 2}
			if named {
				want[gateway.OCSPUnreachable] = 1
			}
			eventually(t, fmt.Sprintf("refusals are %v", want), func() bool { return maps.Equal(w.process.Statistics().Refused, want) })
			w.verified()
		})
	}
}

// What a process wants asked that was taken over is asked of nobody.
func TestTheParentAsksNobodyElse(t *testing.T) {
	w := newWorld(t)
	asked := make(chan string, 10)
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked <- r.URL.Path }))
	defer other.Close()
	w.config.Clients[0].OCSP = true
	w.start()
	stranger, _ := newIssuer(t, "staff").sign(t, func(c *x509.Certificate) { c.OCSPServer = []string{other.URL + "/stranger"} })
	for name, q := range map[string]gateway.StatusQuestion{
		"of a stranger's certificate": {Clients: "staff", Certificates: [][]byte{stranger.Raw, w.staff.cert.Raw}, Request: []byte{1}},
		"of other clients":            {Clients: "guests", Certificates: [][]byte{w.alice.Raw, w.staff.cert.Raw}, Request: []byte{1}},
		"that is long":                {Clients: "staff", Certificates: [][]byte{w.alice.Raw, w.staff.cert.Raw}, Request: make([]byte, statusBytes+1)},
	} {
		if der, err := w.process.status(t.Context(), q); err == nil {
			t.Errorf("a question %s is answered with %x", name, der)
		}
	}
	select {
	case at := <-asked:
		t.Errorf("somebody was asked for %s", at)
	default:
	}
}

// signs serves with a key at a socket until the end of the test, or what it returns is called.
func (w *world) signs(at string, key crypto.Signer) (stop func()) {
	w.Helper()
	l, err := net.Listen("unix", at)
	must(w, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- signer.Serve(ctx, l, key, slog.New(slog.DiscardHandler)) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.Error(err)
		}
	})
	w.Cleanup(stop)
	return stop
}

// A process that has no key has its handshakes signed by way of its parent, and refuses clients, each with the reason, while it cannot.
func TestTheParentAsksSigners(t *testing.T) {
	w := newWorld(t)
	cert, key := w.serverCertificate("shop.example.org")
	_, other := w.serverCertificate("shop.example.org")
	w.file("shop.pem", certificate(cert))
	must(t, os.Remove(w.pem("shop.key")))
	at := filepath.Join(w.folder, "signer.sock")
	w.config.Services[0].Key, w.config.Services[0].Signer = "", at
	stop := w.signs(at, key)
	w.start()
	ask := func() string { return w.curl("--cert", w.pem("alice.pem"), "/status") }
	if got := ask(); got != "hello|200 1\n" {
		t.Errorf("curl prints %q; want 200: %s", got, w.said())
	}
	want := map[gateway.Reason]uint64{}
	refused := func(why gateway.Reason) {
		t.Helper()
		if got := ask(); strings.Contains(got, "|200") {
			t.Errorf("curl prints %q; want a handshake that is refused (%s)", got, why)
		}
		want[why]++
		eventually(t, fmt.Sprintf("refusals are %v", want), func() bool { return maps.Equal(w.process.Statistics().Refused, want) })
	}
	stop()
	refused(gateway.SignerUnreachable)
	stop = w.signs(at, other)
	refused(gateway.SignerInvalid)
	stop()
	large, err := rsa.GenerateKey(rand.Reader, 2048) // signs by another algorithm
	must(t, err)
	stop = w.signs(at, large)
	refused(gateway.SignerRefused)
	stop()
	w.signs(at, key)
	if got := ask(); got != "hello|200 1\n" {
		t.Errorf("with its signer again curl prints %q; want 200", got)
	}
	w.verified()
	// What a process wants signed that was taken over is asked of nobody.
	hello := append(bytes.Repeat([]byte{' '}, 64), "TLS 1.3, server CertificateVerify\x00"+strings.Repeat("h", 32)...)
	for name, q := range map[string]*signAsk{
		"for another service": {Service: "other", Algorithm: "ecdsa_secp256r1_sha256", Message: hello},
		"of something else":   {Service: "shop", Algorithm: "ecdsa_secp256r1_sha256", Message: hello[1:]},
		"of a client":         {Service: "shop", Algorithm: "ecdsa_secp256r1_sha256", Message: bytes.Replace(hello, []byte("server"), []byte("client"), 1)},
	} {
		if signature, err := w.process.signed(t.Context(), q); err == nil || !strings.Contains(err.Error(), "there is no such service") && !strings.Contains(err.Error(), "no CertificateVerify") {
			t.Errorf("a signature %s: %x, %v", name, signature, err)
		}
	}
	if _, err := w.process.signed(t.Context(), &signAsk{Service: "shop", Algorithm: "ecdsa_secp256r1_sha256", Message: hello}); err != nil {
		t.Errorf("a handshake of the service: %v", err)
	}
}

// A worker that does not take the list of revoked identities does not go on.
func TestAWorkerThatTakesNoListIsKilled(t *testing.T) {
	t.Setenv(rogue, "is deaf")
	w := newWorld(t)
	w.start()
	if _, err := w.process.Revoke([]string{"spiffe://staff.example/eng/alice"}); err == nil {
		t.Error("it is said to have taken the list")
	}
	select {
	case <-w.process.Ended():
		if err := w.process.Err(); !strings.Contains(err.Error(), "has not taken the list of revoked identities") {
			t.Errorf("it ended since %v", err)
		}
	case <-time.After(await.Limit(time.Minute)):
		t.Error("it goes on")
	}
}
