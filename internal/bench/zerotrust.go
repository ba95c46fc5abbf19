package bench

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/manifest"
)

// The network for sealed chains: h1, r1 with the gateway, one node for each function, a node at the egress, h2
// with the origin. All clients are one.

// sealedWay is what the functions of a sealed chain do.
type sealedWay string

const (
	sealedForward   sealedWay = "forward"   // see headers alone: sealed from the gateway to the origin
	sealedIntrusive sealedWay = "intrusive" // of kind stream, look for a signature in payload
	sealedOpened    sealedWay = "opened"    // of kind stream, change and look at nothing
	sealedUnaware   sealedWay = "unaware"   // routers that get plain connections
	sealedHAProxy   sealedWay = "haproxy"   // as routers, without agents, and HAProxy on r1 in the gateway's place
)

const (
	sealedOrigin = "[fc00:8::2]:443"
	sealedWait   = 30 * time.Second // that a client waits for an answer at most

	// The paper's page: 9 files of 1.2 MB together. A browser opens six connections at most.
	pageFiles       = 9
	pageBytes       = 1_200_000
	pageConnections = 6

	sealedHeaders = 72 + 2*16 // that a chain with one function adds to a packet, in bytes

	sealedHeld = 100 // connections of which the memory is taken

	// Clients that ask again and again, a connection each, for so many bytes.
	askers     = 16
	askedBytes = 1000

	haproxyAt = "[fc00:11::1]:443" // of r1
)

// sealedCase is one network.
type sealedCase struct {
	way       sealedWay
	functions int
	// oneNode: all functions are on r2. Those that read what is sealed are then one function with as many operations, since
	// functions of kind stream that follow each other on one node are refused (ADR 0141): it is opened and sealed once.
	oneNode bool
	// mtu is that of the hosts' links, in bytes; 0: 1500. Parts between two ends have packets of that size, too.
	mtu int
}

func (c sealedCase) name() string {
	switch {
	case c.oneNode && c.way == sealedIntrusive:
		return fmt.Sprintf("one-node-%d", c.functions)
	case c.oneNode:
		return fmt.Sprintf("one-node-%s-%d", c.way, c.functions)
	case c.mtu != 0:
		return fmt.Sprintf("mtu-%d/%s-%d", c.mtu, c.way, c.functions)
	}
	return fmt.Sprintf("%s-%d", c.way, c.functions)
}

// last is the number of the egress node.
func (c sealedCase) last() int {
	if c.oneNode {
		return 3
	}
	return c.functions + 2
}

// baseline is the same network whose functions see headers alone.
func (c sealedCase) baseline() sealedCase {
	c.way = sealedForward
	return c
}

// domain is the case's, as a file.
func (c sealedCase) domain() string {
	var nodes, functions, links, made strings.Builder
	var names []string
	last, core, mtu := c.last(), 1700, 1500
	if c.mtu != 0 {
		core, mtu = c.mtu+sealedHeaders, c.mtu
	}
	// add adds a function with as many operations.
	add := func(name string, node, operations int) {
		names = append(names, name)
		switch c.way {
		case sealedForward, sealedHAProxy:
			fmt.Fprintf(&functions, "  - {name: %s, node: r%d, kind: forward}\n", name, node)
		case sealedIntrusive:
			var run []string
			for i := range operations {
				run = append(run, fmt.Sprintf("{match: {literals: [a-signature-that-is-not-there-%d]}}", i+1))
			}
			fmt.Fprintf(&functions, "  - {name: %s, node: r%d, kind: stream, intrusive: true, run: [%s]}\n", name, node, strings.Join(run, ", "))
		case sealedOpened:
			fmt.Fprintf(&functions, "  - {name: %s, node: r%d, kind: stream, intrusive: true, run: [identity]}\n", name, node)
		case sealedUnaware:
			fmt.Fprintf(&functions, "  - {name: %s, node: r%d, kind: unaware, intrusive: true, attach: {to: %s-to, from: %s-from, via: \"fe80::2\"}}\n", name, node, name, name)
			fmt.Fprintf(&made, "    - {name: %s, kind: forward}\n", name)
		}
	}
	for i := 1; i <= last; i++ {
		var faces []string
		if i == 1 {
			faces = append(faces, "{name: r1-h1, role: edge}")
		} else {
			faces = append(faces, fmt.Sprintf("{name: r%d-r%d, role: core, mtu: %d}", i, i-1, core))
		}
		if i == last {
			faces = append(faces, fmt.Sprintf("{name: r%d-h2, role: edge}", i))
		} else {
			faces = append(faces, fmt.Sprintf("{name: r%d-r%d, role: core, mtu: %d}", i, i+1, core))
			fmt.Fprintf(&links, "    - {between: [r%d, r%d]}\n", i, i+1)
		}
		// h1 and h2 have fc00:7:: and fc00:8::.
		fmt.Fprintf(&nodes, "  - {name: r%d, address: \"fc00:1%d::1\", locator: \"fc00:0:0:%x00::/56\", interfaces: [%s]}\n", i, i, i, strings.Join(faces, ", "))
		if i == 1 || i == last {
			continue
		}
		if c.oneNode {
			continue
		}
		add(fmt.Sprintf("f%d", i-1), i, 1)
	}
	switch {
	case c.oneNode && c.way == sealedForward:
		for i := range c.functions {
			add(fmt.Sprintf("f%d", i+1), 2, 1)
		}
	case c.oneNode:
		add("f1", 2, c.functions)
	}
	text := `version: 1
domain: {block: "fc00::/48"}
nodes:
` + nodes.String() + `functions:
` + functions.String() + `chains:
  - {name: c, ingress: [r1], functions: [` + strings.Join(names, ", ") + `], egress: r` + strconv.Itoa(last) + `, direction: both, seal: true}
clients:
  - {name: staff, ca: staff.pem, identity: {spiffe: staff.example}, revocation: {lifetime: 24h}}
services:
  - name: shop
    hosts: [shop.example.org]
    gateway: {nodes: [r1], address: "` + sealedOrigin + `"}
    certificate: {file: shop.pem, key: shop.key}
    clients: staff
    origin: {address: "` + sealedOrigin + `", tls: {ca: web.pem, name: shop.internal}}
    rules:
      - {who: "spiffe://staff.example/**", chain: c}
lab:
  mtu: ` + strconv.Itoa(core) + `
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64", mtu: ` + strconv.Itoa(mtu) + `}
    - {name: h2, node: r` + strconv.Itoa(last) + `, prefix: "fc00:8::/64", mtu: ` + strconv.Itoa(mtu) + `}
  links:
` + links.String()
	if made.Len() > 0 {
		text += "  functions:\n" + made.String()
	}
	return text
}

// sealedTrack is a lab of one case, with an origin on h2.
type sealedTrack struct {
	sealedCase
	lab    *lab.Lab
	folder string // of certificates
	server *http.Server
	client *tls.Config
	at     string       // where the service is
	end    func() error // HAProxy; nil: there is none
	rate   uint64

	// What the processes of the gateway and of the first function have taken of CPUs' time, in nanoseconds
	// for each KB, in each run of transfer without a limit.
	work [2][]float64

	fresh float64 // KB for each connection, of a function's process that had none before
}

func newSealedTrack(ctx context.Context, cfg Config, c sealedCase) (_ *sealedTrack, err error) {
	t := &sealedTrack{sealedCase: c, at: sealedOrigin}
	if t.folder, err = os.MkdirTemp("", "waystamp-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	inside, err := t.certificates()
	if err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	m, err := manifest.Parse("the domain of "+c.name(), []byte(c.domain()))
	if err != nil {
		return nil, err
	}
	if t.lab, err = lab.Up(ctx, lab.Config{Domain: m.Domain, Lab: *m.Lab, Binary: cfg.Binary, Own: true, Files: t.folder, WithoutAgents: c.way == sealedHAProxy, Log: cfg.Log}); err != nil {
		return nil, err
	}
	if c.way == sealedHAProxy {
		if err := t.haproxy(ctx); err != nil {
			return nil, err
		}
	}
	var l net.Listener
	err = t.lab.Do("h2", func() (err error) {
		config := net.ListenConfig{}
		config.SetMultipathTCP(false)
		l, err = config.Listen(ctx, "tcp", sealedOrigin)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("serve on h2: %w", err)
	}
	t.server = &http.Server{
		Handler:   http.HandlerFunc(serveSealed),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{inside}, MinVersion: tls.VersionTLS13},
		ErrorLog:  slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	go t.server.ServeTLS(l, "", "")
	if c.functions == 1 && c.mtu == 0 && c.way != sealedForward && c.way != sealedHAProxy {
		if t.fresh, err = t.memory(ctx); err != nil {
			return nil, fmt.Errorf("measure the memory of connections: %w", err)
		}
	}
	return t, nil
}

// haproxy starts HAProxy on r1.
func (t *sealedTrack) haproxy(ctx context.Context) (err error) {
	var pem []byte
	for _, name := range []string{"shop.pem", "shop.key"} {
		part, err := os.ReadFile(filepath.Join(t.folder, name))
		if err != nil {
			return fmt.Errorf("start HAProxy: %w", err)
		}
		pem = append(pem, part...)
	}
	if err := os.WriteFile(filepath.Join(t.folder, "haproxy.pem"), pem, 0o600); err != nil {
		return fmt.Errorf("start HAProxy: %w", err)
	}
	log, err := os.Create(filepath.Join(t.folder, "haproxy.log"))
	if err != nil {
		return fmt.Errorf("start HAProxy: %w", err)
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	ns, err := t.lab.NetNS("r1")
	if err != nil {
		return fmt.Errorf("start HAProxy: %w", err)
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	t.at = haproxyAt
	_, t.end, err = runHAProxy(ctx, ns, haproxyAt, fmt.Sprintf(haproxyGateway, runtime.NumCPU(), t.folder, sealedOrigin), log)
	return err
}

func (t *sealedTrack) close() error {
	var err error
	if t.end != nil {
		err = t.end()
	}
	if t.server != nil {
		err = errors.Join(err, t.server.Close())
	}
	if t.lab != nil {
		err = errors.Join(err, t.lab.Down(context.Background()))
	}
	return errors.Join(err, os.RemoveAll(t.folder))
}

// certificates makes those of the service, its clients and its origin, for a day.
func (t *sealedTrack) certificates() (inside tls.Certificate, err error) {
	var serial int64
	sign := func(parent *tls.Certificate, change func(*x509.Certificate)) (tls.Certificate, error) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return tls.Certificate{}, err
		}
		serial++
		c := &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: fmt.Sprintf("bench %d", serial)}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(23 * time.Hour),
			BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature,
		}
		change(c)
		by, signer := c, any(key)
		if parent != nil {
			by, signer = parent.Leaf, parent.PrivateKey
		}
		der, err := x509.CreateCertificate(rand.Reader, c, by, key.Public(), signer)
		if err != nil {
			return tls.Certificate{}, err
		}
		leaf, err := x509.ParseCertificate(der)
		return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, err
	}
	write := func(name, kind string, der []byte) error {
		return os.WriteFile(filepath.Join(t.folder, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
	}
	authority := func(c *x509.Certificate) { c.IsCA, c.KeyUsage = true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign }
	server := func(name string) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			c.DNSNames, c.ExtKeyUsage = []string{name}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		}
	}
	staff, err := sign(nil, authority)
	if err != nil {
		return inside, err
	}
	web, err := sign(nil, authority)
	if err != nil {
		return inside, err
	}
	alice, err := sign(&staff, func(c *x509.Certificate) {
		c.URIs, c.ExtKeyUsage = []*url.URL{{Scheme: "spiffe", Host: "staff.example", Path: "/alice"}}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	})
	if err != nil {
		return inside, err
	}
	shop, err := sign(&web, server("shop.example.org"))
	if err != nil {
		return inside, err
	}
	if inside, err = sign(&web, server("shop.internal")); err != nil {
		return inside, err
	}
	key, err := x509.MarshalPKCS8PrivateKey(shop.PrivateKey)
	if err != nil {
		return inside, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(web.Leaf)
	t.client = &tls.Config{
		RootCAs: roots, Certificates: []tls.Certificate{alice}, ServerName: "shop.example.org", MinVersion: tls.VersionTLS13,
		ClientSessionCache: tls.NewLRUClientSessionCache(16),
	}
	return inside, errors.Join(write("staff.pem", "CERTIFICATE", staff.Leaf.Raw), write("web.pem", "CERTIFICATE", web.Leaf.Raw),
		write("shop.pem", "CERTIFICATE", shop.Leaf.Raw), write("shop.key", "PRIVATE KEY", key))
}

// serveSealed is the origin: /bytes/N has so many, /endless has no end, /hold answers and waits, and /sink says how many bytes it got.
func serveSealed(w http.ResponseWriter, r *http.Request) {
	path, number, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	switch path {
	case "bytes":
		n, err := strconv.Atoi(number)
		if err != nil {
			http.Error(w, "how many?", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Length", number)
		for n > 0 {
			k := min(n, len(zeroes))
			if _, err := w.Write(zeroes[:k]); err != nil {
				return
			}
			n -= k
		}
	case "endless":
		for {
			if _, err := w.Write(zeroes[:]); err != nil {
				return
			}
		}
	case "sink":
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			return
		}
		fmt.Fprint(w, n)
	case "hold":
		w.WriteHeader(http.StatusOK)
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	default:
		http.NotFound(w, r)
	}
}

// browser is a client on h1 without connections, which knows the gateway's tickets.
func (t *sealedTrack) browser(http2 bool) *http.Client {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!http2)
	protocols.SetHTTP2(http2)
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: t.client.Clone(), Protocols: protocols, MaxConnsPerHost: pageConnections, MaxIdleConnsPerHost: pageConnections, DisableCompression: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return t.dial(ctx) },
	}}
}

// dial opens a connection from h1 to the service.
func (t *sealedTrack) dial(ctx context.Context) (c net.Conn, err error) {
	err = t.lab.Do("h1", func() error {
		d := net.Dialer{Timeout: sealedWait}
		d.SetMultipathTCP(false)
		c, err = d.DialContext(ctx, "tcp", t.at)
		return err
	})
	return c, err
}

// get asks for a path and reads so many bytes of the answer; less than 0: all.
func get(ctx context.Context, c *http.Client, path string, read int64) (n int64, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://shop.example.org"+path, http.NoBody)
	if err != nil {
		return 0, err
	}
	a, err := c.Do(r)
	if err != nil {
		return 0, err
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("GET %s: status %d", path, a.StatusCode)
	}
	if read < 0 {
		return io.Copy(io.Discard, a.Body)
	}
	return io.CopyN(io.Discard, a.Body, read)
}

// function is what the agent of a node says of a function of kind stream, or of the gateway. It has a process.
func (t *sealedTrack) function(ctx context.Context, node, function string) (*api.Stream, error) {
	c := agent.NewClient(agent.SocketPath(t.lab.AgentDir(node)))
	defer c.Close()
	f, err := c.Function(ctx, function)
	switch {
	case err != nil:
		return nil, err
	case f.Stream == nil:
		return nil, fmt.Errorf("the agent of %s knows of no process of %s", node, function)
	case f.Stream.Worker == 0:
		return nil, fmt.Errorf("the agent of %s has no process of %s: %s", node, function, f.Stream.Error)
	}
	return f.Stream, nil
}

// workers are the processes of the gateway and of the first function; 0: it has none.
func (t *sealedTrack) workers(ctx context.Context) (pids [2]int, err error) {
	for i, at := range [][2]string{{"r1", "gateway"}, {"r2", "f1"}} {
		if i == 1 && t.way == sealedForward {
			break
		}
		f, err := t.function(ctx, at[0], at[1])
		if err != nil {
			return pids, err
		}
		pids[i] = f.Worker
	}
	return pids, nil
}

// setRate limits what every node sends out of each of its links; 0: nothing does.
func (t *sealedTrack) setRate(rate uint64) error {
	if rate == t.rate {
		return nil
	}
	for i := 1; i <= t.last(); i++ {
		node := fmt.Sprintf("r%d", i)
		err := onMember(t.lab, node, func(n *host.Net) error {
			links, err := n.Links()
			for _, l := range links {
				if err == nil && strings.HasPrefix(l.Name, node+"-") {
					err = n.SetRate(l.Name, rate)
				}
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	t.rate = rate
	return nil
}

// transfer is Mbit/s of one large download by HTTP/1.1.
func (t *sealedTrack) transfer(ctx context.Context, d time.Duration, rate uint64) (mbits float64, err error) {
	if err := t.setRate(rate); err != nil {
		return 0, err
	}
	pids, err := t.workers(ctx)
	if err != nil {
		return 0, err
	}
	var before [2]time.Duration
	for i, pid := range pids {
		if pid == 0 {
			continue
		}
		if before[i], err = cpuTime([]int{pid}); err != nil {
			return 0, err
		}
	}
	n, took, err := t.download(ctx, d, false)
	if err != nil {
		return 0, err
	}
	for i, pid := range pids {
		if pid == 0 {
			continue
		}
		after, err := cpuTime([]int{pid})
		if err != nil {
			return 0, err
		}
		if rate == 0 {
			t.work[i] = append(t.work[i], max(float64((after-before[i]).Nanoseconds()), 1)/(float64(n)/1024))
		}
	}
	return float64(n) * 8 / 1e6 / took.Seconds(), nil
}

// download reads so long of one endless answer.
func (t *sealedTrack) download(ctx context.Context, d time.Duration, http2 bool) (bytes int64, took time.Duration, err error) {
	c := t.browser(http2)
	defer c.CloseIdleConnections()
	within, stop := context.WithTimeout(ctx, sealedWait+d)
	defer stop()
	r, err := http.NewRequestWithContext(within, http.MethodGet, "https://shop.example.org/endless", http.NoBody)
	if err != nil {
		return 0, 0, err
	}
	a, err := c.Do(r)
	if err != nil {
		return 0, 0, err
	}
	defer a.Body.Close()
	if want := map[bool]int{false: 1, true: 2}[http2]; a.StatusCode != http.StatusOK || a.ProtoMajor != want {
		return 0, 0, fmt.Errorf("status %d by HTTP/%d; expect 200 by HTTP/%d", a.StatusCode, a.ProtoMajor, want)
	}
	b := make([]byte, 256<<10)
	start := time.Now()
	for time.Since(start) < d {
		k, err := a.Body.Read(b)
		bytes += int64(k)
		if err != nil {
			return 0, 0, fmt.Errorf("a transfer ended before its time: %w", err)
		}
	}
	return bytes, time.Since(start), nil
}

// endless are zeroes until a time, counted.
type endless struct {
	until time.Time
	n     int64
}

func (e *endless) Read(p []byte) (int, error) {
	if !time.Now().Before(e.until) {
		return 0, io.EOF
	}
	n := min(len(p), len(zeroes))
	clear(p[:n])
	e.n += int64(n)
	return n, nil
}

// upload is Mbit/s of one large upload by HTTP/1.1, until the origin has said that it has got all of it.
func (t *sealedTrack) upload(ctx context.Context, d time.Duration) (mbits float64, err error) {
	if err := t.setRate(0); err != nil {
		return 0, err
	}
	c := t.browser(false)
	defer c.CloseIdleConnections()
	// What there is to open is open before.
	if _, err := get(ctx, c, "/bytes/"+strconv.Itoa(askedBytes), -1); err != nil {
		return 0, err
	}
	within, stop := context.WithTimeout(ctx, sealedWait+d)
	defer stop()
	start := time.Now()
	body := &endless{until: start.Add(d)}
	r, err := http.NewRequestWithContext(within, http.MethodPost, "https://shop.example.org/sink", body)
	if err != nil {
		return 0, err
	}
	a, err := c.Do(r)
	if err != nil {
		return 0, err
	}
	defer a.Body.Close()
	text, err := io.ReadAll(io.LimitReader(a.Body, 64))
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	if got := string(text); a.StatusCode != http.StatusOK || got != strconv.FormatInt(body.n, 10) {
		return 0, fmt.Errorf("status %d, and the origin got %q bytes; expect 200 and %d", a.StatusCode, got, body.n)
	}
	return float64(body.n) * 8 / 1e6 / took.Seconds(), nil
}

// bulk is Mbit/s of one large download.
func (t *sealedTrack) bulk(ctx context.Context, d time.Duration, http2 bool) (mbits float64, err error) {
	if err := t.setRate(0); err != nil {
		return 0, err
	}
	n, took, err := t.download(ctx, d, http2)
	if err != nil {
		return 0, err
	}
	return float64(n) * 8 / 1e6 / took.Seconds(), nil
}

// requests is how many requests a second askers get answers to, by HTTP/1.1, each by a connection that is open before. They write
// requests and read answers themselves: net/http's client would take as much of the CPUs' time as a gateway.
func (t *sealedTrack) requests(ctx context.Context, d time.Duration) (perSecond float64, err error) {
	if err := t.setRate(0); err != nil {
		return 0, err
	}
	var conns []*tls.Conn
	defer func() {
		for _, c := range conns {
			c.NetConn().Close()
		}
	}()
	for range askers {
		raw, err := t.dial(ctx)
		if err != nil {
			return 0, err
		}
		settings := t.client.Clone()
		settings.NextProtos = []string{"http/1.1"}
		c := tls.Client(raw, settings)
		conns = append(conns, c)
		if err := c.SetDeadline(time.Now().Add(sealedWait + d)); err != nil {
			return 0, err
		}
		// The first one of each opens what there is to open.
		if err := ask(c, bufio.NewReader(c)); err != nil {
			return 0, err
		}
	}
	var asked atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	start := time.Now()
	for _, c := range conns {
		g.Go(func() error {
			in := bufio.NewReader(c)
			for time.Since(start) < d && ctx.Err() == nil {
				if err := ask(c, in); err != nil {
					return err
				}
				asked.Add(1)
			}
			return ctx.Err()
		})
	}
	if err := g.Wait(); err != nil {
		return 0, err
	}
	return float64(asked.Load()) / time.Since(start).Seconds(), nil
}

var askText = fmt.Sprintf("GET /bytes/%d HTTP/1.1\r\nHost: shop.example.org\r\n\r\n", askedBytes)

// ask sends one request and reads the answer.
func ask(c io.Writer, in *bufio.Reader) error {
	if _, err := io.WriteString(c, askText); err != nil {
		return err
	}
	a, err := http.ReadResponse(in, nil)
	if err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, a.Body)
	if err == nil && (a.StatusCode != http.StatusOK || n != askedBytes) {
		err = fmt.Errorf("status %d and %d bytes; expect 200 and %d", a.StatusCode, n, askedBytes)
	}
	return err
}

// page is the median time in milliseconds in which the paper's page is there, files of it by new connections
// whose sessions are resumed. Pages follow each other for a run's time.
func (t *sealedTrack) page(ctx context.Context, d time.Duration, http2 bool) (ms float64, err error) {
	if err := t.setRate(0); err != nil {
		return 0, err
	}
	var all []float64
	for end := time.Now().Add(d); len(all) == 0 || time.Now().Before(end); {
		c := t.browser(http2)
		start := time.Now()
		load := func() error {
			const each = pageBytes / pageFiles
			if _, err := get(ctx, c, "/bytes/"+strconv.Itoa(pageBytes-(pageFiles-1)*each), -1); err != nil {
				return err
			}
			g, ctx := errgroup.WithContext(ctx)
			for range pageFiles - 1 {
				g.Go(func() error {
					_, err := get(ctx, c, "/bytes/"+strconv.Itoa(each), -1)
					return err
				})
			}
			return g.Wait()
		}
		err := load()
		all = append(all, float64(time.Since(start).Nanoseconds())/1e6)
		c.CloseIdleConnections()
		if err != nil {
			return 0, err
		}
	}
	return Median(all), nil
}

// held opens so many connections that wait for more of an answer, each by one of its own onward, until stop.
func (t *sealedTrack) held(ctx context.Context, count int) (stop func() error, err error) {
	within, end := context.WithTimeout(ctx, 2*sealedWait)
	defer func() {
		if err != nil {
			end()
		}
	}()
	var open atomic.Int64
	g := errgroup.Group{}
	g.SetLimit(runtime.NumCPU())
	for range count {
		g.Go(func() error {
			c := t.browser(false)
			r, err := http.NewRequestWithContext(within, http.MethodGet, "https://shop.example.org/hold", http.NoBody)
			if err != nil {
				return err
			}
			a, err := c.Do(r)
			if err != nil {
				return err
			}
			context.AfterFunc(within, func() {
				a.Body.Close()
				c.CloseIdleConnections()
			})
			if a.StatusCode != http.StatusOK {
				return fmt.Errorf("status %d", a.StatusCode)
			}
			open.Add(1)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, fmt.Errorf("open connection %d of %d: %w", open.Load()+1, count, err)
	}
	return func() error {
		end()
		// The next ones are not to be too many for one identity.
		for begun := time.Now(); time.Since(begun) < sealedWait; time.Sleep(20 * time.Millisecond) {
			f, err := t.function(ctx, "r2", "f1")
			if err != nil || f.Now == 0 {
				return err
			}
		}
		return errors.New("connections do not end")
	}, nil
}

// connection is what a new connection takes of the CPU time of a function's process, in microseconds: both
// handshakes, and a request.
func (t *sealedTrack) connection(ctx context.Context) (us float64, err error) {
	if err := t.setRate(0); err != nil {
		return 0, err
	}
	first, err := t.function(ctx, "r2", "f1")
	if err != nil {
		return 0, err
	}
	before, err := cpuTime([]int{first.Worker})
	if err != nil {
		return 0, err
	}
	stop, err := t.held(ctx, sealedHeld)
	if err != nil {
		return 0, err
	}
	after, err := cpuTime([]int{first.Worker})
	if err != nil {
		return 0, errors.Join(err, stop())
	}
	last, err := t.function(ctx, "r2", "f1")
	if err != nil {
		return 0, errors.Join(err, stop())
	}
	opened := last.Opened - first.Opened
	if opened < sealedHeld/2 { // some idle ones of the gateway's are used again
		err = fmt.Errorf("the function has got %d connections of %d", opened, sealedHeld)
	}
	if err = errors.Join(err, stop()); err != nil {
		return 0, err
	}
	return float64((after - before).Nanoseconds()) / 1e3 / float64(opened), nil
}

// memory is what an open connection takes of the memory of a function's process, in KB: sealed on both sides,
// after its first bytes. A process that has had as many has the memory still: it is measured once.
func (t *sealedTrack) memory(ctx context.Context) (kb float64, err error) {
	f, err := t.function(ctx, "r2", "f1")
	if err != nil {
		return 0, err
	}
	before, err := residentKB(f.Worker)
	if err != nil {
		return 0, err
	}
	stop, err := t.held(ctx, sealedHeld)
	if err != nil {
		return 0, err
	}
	after, err := residentKB(f.Worker)
	return (after - before) / sealedHeld, errors.Join(err, stop())
}

// residentKB is what a process has in memory.
func residentKB(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(text), "\n") {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			return strconv.ParseFloat(f[1], 64)
		}
	}
	return 0, fmt.Errorf("process %d does not say what it has in memory", pid)
}

// paperRates are what the paper's chains carry without its proxy, in bits a second, by their functions.
var paperRates = map[int]uint64{1: 2_150_000_000, 6: 1_550_000_000}

// sealedCases are the networks, those together that are measured in turns.
func sealedCases(quick, haproxy bool) (out [][]sealedCase) {
	for n := 1; n <= 6; n++ {
		if quick && n != 1 && n != 6 {
			continue
		}
		cases := []sealedCase{{way: sealedForward, functions: n}, {way: sealedIntrusive, functions: n}}
		if n == 1 && haproxy {
			cases = append(cases, sealedCase{way: sealedHAProxy, functions: n})
		}
		if n == 1 || n == 6 && !quick {
			cases = append(cases, sealedCase{way: sealedOpened, functions: n}, sealedCase{way: sealedUnaware, functions: n})
		}
		out = append(out, cases)
	}
	for _, c := range []sealedCase{{functions: 6, oneNode: true}, {functions: 1, mtu: 1280}} {
		if quick && c.mtu != 0 {
			continue
		}
		read := c
		read.way = sealedIntrusive
		out = append(out, []sealedCase{c.baseline(), read})
	}
	return out
}

// sealedSubject is one figure of a case; measure is given the case's lab.
type sealedSubject struct {
	Series
	sealedCase
	measure func(ctx context.Context, t *sealedTrack, d time.Duration) (float64, error)
}

// sealedSubjects are the figures of cases of as many functions.
func sealedSubjects(cases []sealedCase) (out []sealedSubject) {
	add := func(c sealedCase, what, unit string, better Better, base bool, measure func(context.Context, *sealedTrack, time.Duration) (float64, error)) {
		s := Series{Name: "zt/" + what + "/" + c.name(), Unit: unit, Better: better, Params: map[string]float64{"functions": float64(c.functions)}}
		if base && c.way != sealedForward {
			s.Baseline = "zt/" + what + "/" + c.baseline().name()
		}
		out = append(out, sealedSubject{s, c, measure})
	}
	for _, c := range cases {
		if c.functions == 1 && c.mtu == 0 && (c.way == sealedForward || c.way == sealedHAProxy) {
			out = append(out, gatewaySubjects(c, slices.ContainsFunc(cases, func(c sealedCase) bool { return c.way == sealedHAProxy }))...)
		}
		if c.way == sealedHAProxy {
			continue
		}
		add(c, "throughput", "Mbit/s", More, true, func(ctx context.Context, t *sealedTrack, d time.Duration) (float64, error) {
			return t.transfer(ctx, d, 0)
		})
		if paperRates[c.functions] != 0 && (c.way == sealedForward || c.way == sealedIntrusive) {
			add(c, "upload", "Mbit/s", More, true, func(ctx context.Context, t *sealedTrack, d time.Duration) (float64, error) {
				return t.upload(ctx, d)
			})
		}
		if c.oneNode || c.mtu != 0 {
			continue
		}
		if rate := paperRates[c.functions]; rate != 0 {
			add(c, "paper-rate", "Mbit/s", More, true, func(ctx context.Context, t *sealedTrack, d time.Duration) (float64, error) {
				return t.transfer(ctx, d, rate)
			})
			add(c, "page", "ms", Less, true, func(ctx context.Context, t *sealedTrack, d time.Duration) (float64, error) {
				return t.page(ctx, d, false)
			})
			add(c, "page-http2", "ms", Less, true, func(ctx context.Context, t *sealedTrack, d time.Duration) (float64, error) {
				return t.page(ctx, d, true)
			})
		}
		// With one function, one session is with the origin, and is not resumed. With two, both of the first one's are with other ends.
		if c.functions == 1 && c.way != sealedForward || c.functions == 2 && c.way == sealedIntrusive {
			add(c, "connection", "µs", Less, false, func(ctx context.Context, t *sealedTrack, _ time.Duration) (float64, error) {
				return t.connection(ctx)
			})
		}
	}
	return out
}

// gatewaySubjects are the figures of a gateway, or of HAProxy in its place. With haproxy the gateway's are held against its.
func gatewaySubjects(c sealedCase, haproxy bool) (out []sealedSubject) {
	for _, f := range []struct {
		what, unit string
		measure    func(context.Context, *sealedTrack, time.Duration) (float64, error)
	}{
		{"bulk", "Mbit/s", func(ctx context.Context, t *sealedTrack, d time.Duration) (float64, error) {
			return t.bulk(ctx, d, false)
		}},
		{"bulk-http2", "Mbit/s", func(ctx context.Context, t *sealedTrack, d time.Duration) (float64, error) {
			return t.bulk(ctx, d, true)
		}},
		{"requests", "1/s", func(ctx context.Context, t *sealedTrack, d time.Duration) (float64, error) { return t.requests(ctx, d) }},
	} {
		s := Series{Name: "zt/gateway/" + f.what, Unit: f.unit, Better: More}
		switch {
		case c.way == sealedHAProxy:
			s.Name += "-haproxy"
		case haproxy:
			s.Baseline = s.Name + "-haproxy"
		}
		out = append(out, sealedSubject{s, c, f.measure})
	}
	return out
}

// ZeroTrust measures what it costs that functions read what is sealed.
func ZeroTrust(ctx context.Context, c Config) (_ Result, err error) {
	r := c.begin("zerotrust",
		fmt.Sprintf("Sealed chains to a service behind a gateway: h1, r1 with the gateway, a node for each of 1 to 6 functions, or one for all six, a node at the egress, h2 with the origin, in namespaces with veth pairs, offloads on. All share %d CPUs: client, gateway, each function's process and the origin. The client has a certificate; TLS 1.3 on each stretch; proofs of keyed-flow. The figure names say how many functions there are.", runtime.NumCPU()),
		"forward: functions see IP and TCP headers alone, and it is sealed from the gateway to the origin; the paper's functions without its proxy. intrusive: functions of kind stream that look for a signature: sealed anew at each. opened: the same without looking. unaware: the same with functions that know nothing of it, routers in namespaces of their own that get plain connections.",
		fmt.Sprintf("throughput: one endless download by HTTP/1.1, %s per run, as in Fig. 4 of the paper. paper-rate: the same with all links limited to what the paper's chains carry without its proxy, 2150 Mbit/s with one function and 1550 with six. page: %d files of %d bytes together, the first and then the others by at most %d new connections whose sessions are resumed, the median of a run's pages; page-http2: by one.", c.Duration, pageFiles, pageBytes, pageConnections),
		"upload: one endless upload by HTTP/1.1, until the origin has said that it got each byte. one-node: six functions on one node. Those that see headers (one-node-forward) are visited one after the other; those that read what is sealed are one function with six operations, which opens and seals once: a plan refuses functions on byte streams that follow each other on one node. mtu-1280: links of both hosts carry 1280 bytes, and those of the core so many beside the chain's headers: the paper's second size is 1000, and links of IPv6 carry no less than 1280.",
		fmt.Sprintf("cpu: what the process of the gateway, and of the first function, takes of CPUs' time in the runs of throughput, in nanoseconds for each KB. connection: what a new connection takes of the first function's process's, two handshakes and a request; with one function, the session with the origin is a new one, with two both are resumed. memory: what each of %d open connections adds to the function's process, which has had none before.", sealedHeld),
		fmt.Sprintf("gateway: bulk and bulk-http2 are one endless download over one function that sees headers, requests what %d clients get that ask for %d bytes again and again, each by a connection of HTTP/1.1. haproxy: the same with HAProxy on r1, by plain routing, without a chain, agents or a proof: mutual TLS 1.3, a thread for each CPU, the same host and Client-Cert, a line for each request, kept connections to the origin by TLS. It goes on from its own address; the gateway from the client's, and writes two lines.", askers, askedBytes),
	)
	c.note = r.note
	if !haveHAProxy() {
		r.note("HAProxy is not installed, so the gateway is not held against it: `make deps` installs it.")
	}
	for _, cases := range sealedCases(c.Quick, haveHAProxy()) {
		figures, err := c.sealedFigures(ctx, cases)
		if err != nil {
			return Result{}, err
		}
		r.Figures = append(r.Figures, figures...)
	}
	if len(r.Figures) == 0 {
		return Result{}, &NoCaseError{c.Only}
	}
	r.end()
	return r, nil
}

// sealedFigures measures networks in turns. Labs are there for them alone.
func (c Config) sealedFigures(ctx context.Context, cases []sealedCase) (figures []Figure, err error) {
	tracks := map[sealedCase]*sealedTrack{}
	defer func() {
		for _, t := range tracks {
			err = errors.Join(err, t.close())
		}
	}()
	var subjects []subject
	for _, s := range sealedSubjects(cases) {
		subjects = append(subjects, subject{s.Series, func() (_ *trial, err error) {
			t := tracks[s.sealedCase]
			if t == nil {
				if t, err = newSealedTrack(ctx, c, s.sealedCase); err != nil {
					return nil, err
				}
				tracks[s.sealedCase] = t
			}
			return &trial{measure: func(ctx context.Context) (float64, error) { return s.measure(ctx, t, c.Duration) }}, nil
		}})
	}
	if c.skips(subjects) {
		return nil, nil
	}
	if figures, err = c.rounds(ctx, "zerotrust, "+cases[0].name(), subjects); err != nil {
		return nil, err
	}
	for _, s := range cases {
		t := tracks[s]
		if t == nil || s.way == sealedForward || s.way == sealedHAProxy || len(t.work[1]) < c.Runs {
			continue
		}
		more, err := t.figures(c.Runs)
		if err != nil {
			return nil, err
		}
		figures = append(figures, more...)
	}
	return figures, nil
}

// figures are the CPU time of a case's processes in its last runs, and the memory of its connections.
func (t *sealedTrack) figures(runs int) ([]Figure, error) {
	params := map[string]float64{"functions": float64(t.functions)}
	gateway := Series{Name: "zt/cpu/gateway/" + t.name(), Unit: "ns/KB", Better: Less, Params: params, Samples: t.work[0][len(t.work[0])-runs:]}
	function := Series{Name: "zt/cpu/function-to-gateway/" + t.name(), Unit: "ns/KB", Better: Less, Params: params, Baseline: gateway.Name, Samples: t.work[1][len(t.work[1])-runs:]}
	series := []Series{gateway, function}
	if t.fresh > 0 {
		series = append(series, Series{Name: "zt/memory/" + t.name(), Unit: unitMemory, Better: Less, Params: params, Samples: []float64{t.fresh}})
	}
	return Figures(series)
}
