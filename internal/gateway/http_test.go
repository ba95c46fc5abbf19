package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/model"
)

func TestRequestsOfOneConnectionTakeTheirOwnChains(t *testing.T) {
	w := newWorld(t, nil)
	c := w.staff.client(t, "/ops/olga")
	client := w.web2(&c)
	for _, target := range []string{"/status", "/files/a", "/status?x=1", "/files/b"} {
		r, err := client.Get("https://shop.example.org" + target)
		if err != nil || r.StatusCode != 200 || r.ProtoMajor != 2 {
			t.Fatalf("%s: %v, %v; want 200 by HTTP/2", target, r, err)
		}
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var chains []string
	for _, d := range w.dials {
		chains = append(chains, d.chain)
		if d.identity != "spiffe://staff.example/ops/olga" || d.client.Addr() != netip.MustParseAddr("127.0.0.1") {
			t.Errorf("a connection is opened for %s at %s", d.identity, d.client)
		}
	}
	if fmt.Sprint(chains) != "[light deep]" {
		t.Errorf("connections are opened by chains %v; want one by light, one by deep", chains)
	}
	var decided []string
	for _, r := range w.log() {
		if r.Event == EventDecided {
			decided = append(decided, fmt.Sprintf("%d %d %s %s", r.Session, r.Rule, r.Chain, r.Path))
		}
	}
	if want := "[1 1 light /status 1 3 deep /files/a 1 1 light /status 1 3 deep /files/b]"; fmt.Sprint(decided) != want {
		t.Errorf("the audit log has %v; want %s", decided, want)
	}
}

func TestConnectionsOnwardAreOfOneIdentityAlone(t *testing.T) {
	w := newWorld(t, nil)
	alice, bob := w.staff.client(t, "/eng/alice"), w.staff.client(t, "/eng/bob")
	for range 3 {
		for _, c := range []*http.Client{w.web2(&alice), w.web2(&bob)} {
			r, err := c.Get("https://shop.example.org/x")
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, r.Body)
			r.Body.Close()
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.dials) != 2 || w.dials[0].identity == w.dials[1].identity {
		t.Errorf("connections onward are %v; want one of each identity", w.dials)
	}
	// Which connection a request came by, the origin knows by its port.
	by := map[string]string{}
	for _, r := range w.seen {
		cert := r.Header.Get("Client-Cert")
		if other, ok := by[r.RemoteAddr]; ok && other != cert {
			t.Error("requests of two certificates came by one connection")
		}
		by[r.RemoteAddr] = cert
	}
}

// Clients that ask at once, again and again, have as many connections onward, which are kept: a gateway that closed some of them after
// each answer would shake hands with the origin for every second request.
func TestConnectionsOnwardAreKept(t *testing.T) {
	w := newWorld(t, nil)
	alice := w.staff.client(t, "/eng/alice")
	const clients, rounds = 16, 6
	var conns []*tls.Conn
	for range clients {
		c, err := w.connect(w.tls(&alice, "shop.example.org", "http/1.1"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	for range rounds {
		var all, asked sync.WaitGroup // no request is answered before all have come
		all.Add(clients)
		answer := http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			all.Done()
			all.Wait()
			io.WriteString(rw, "hello")
		})
		w.answer.Store(&answer)
		for _, c := range conns {
			asked.Go(func() {
				r, err := ask(c, "GET", "/x", "shop.example.org")
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := io.Copy(io.Discard, r.Body); err != nil || r.StatusCode != http.StatusOK {
					t.Errorf("status %d, %v", r.StatusCode, err)
				}
			})
		}
		asked.Wait()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// An answer may be with its client before its connection waits for the next request.
	if n := len(w.dials); n < clients || n > 2*clients {
		t.Errorf("%d connections onward were opened for %d requests, %d at once", n, clients*rounds, clients)
	}
}

func TestRequestsAreAnsweredByTheirStatus(t *testing.T) {
	for _, test := range []struct {
		who, method, target, host string
		status                    int
		why                       Reason
	}{
		{"/eng/alice", "GET", "/", "shop.example.org", 200, ""},
		{"/eng/alice", "GET", "/", "SHOP.example.org", 200, ""},
		{"/eng/alice", "DELETE", "/a%20b/c?d=%2f", "shop.example.org", 200, ""},
		{"/ops/olga", "HEAD", "/status", "shop.example.org", 200, ""},
		{"/ops/olga", "GET", "/a/../status", "shop.example.org", 200, ""},
		{"/ops/olga", "GET", "/stat%75s", "shop.example.org", 200, ""},
		{"/ops/olga", "POST", "/status", "shop.example.org", 403, RuleNone},
		{"/ops/olga", "GET", "/status/", "shop.example.org", 403, RuleNone},
		{"/ops/olga", "GET", "/files/../secret", "shop.example.org", 403, RuleNone},
		{"/ops/olga", "GET", "/files/%2e%2e/secret", "shop.example.org", 403, RuleNone},
		{"/ops/olga/deputy", "GET", "/status", "shop.example.org", 403, RuleNone},
		{"/guests/gina", "GET", "/status", "shop.example.org", 403, RuleNone},
		{"/eng/alice", "GET", "/", "www.example.org", 421, HostMismatch},
		{"/eng/alice", "GET", "/", "other.example.org", 421, HostMismatch},
		{"/eng/alice", "GET", "/", "shop.example.org:1", 421, HostMismatch},
		{"/eng/alice", "GET", "/", "shop.example.org.", 421, HostMismatch},
		{"/eng/alice", "GET", "https://other.example.org/", "shop.example.org", 421, HostMismatch},
		{"/eng/alice", "GET", "/files%2fsecret", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "/a%00", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", `/a\b`, "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "/a%5c..", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "/%252e%252e/secret", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "//secret", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "/..;/secret", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "/../..", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "/admin;x=1/secret", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "/admin%3bx", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "x:http://shop.example.org/admin/secret", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "GET", "http:foo", "shop.example.org", 400, PathAmbiguous},
		{"/eng/alice", "TRACE", "/", "shop.example.org", 405, MethodRefused},
		{"/eng/alice", "OPTIONS", "*", "shop.example.org", 405, MethodRefused},
		{"/eng/alice", "CONNECT", "shop.example.org:80", "shop.example.org", 421, HostMismatch},
	} {
		t.Run(fmt.Sprintf("%s %s %s", test.who, test.method, strings.ReplaceAll(test.target, "/", "|")), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil)
			c := w.staff.client(t, test.who)
			conn, err := w.connect(w.tls(&c, "shop.example.org"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r, err := ask(conn, test.method, test.target, test.host)
			if err != nil || r.StatusCode != test.status {
				t.Fatalf("answered with %v, %v; want %d", r, err, test.status)
			}
			if test.why == "" {
				return
			}
			w.refused(test.why)
			w.quiet()
		})
	}
}

func TestThePathGoesOnAsItWasDecided(t *testing.T) {
	for target, want := range map[string]string{
		"/a/./b/../c":                     "/a/c",
		"/a/b/..":                         "/a/",
		"/a%2db=%2c?":                     "/a%2db=%2c?", // as it came, where nothing was removed
		"/a/%2e/b%2cc":                    "/a/b,c",
		"http://u:p@shop.example.org/a?b": "/a?b",
		"/a?b=/../c":                      "/a?b=/../c",
	} {
		w := newWorld(t, nil)
		c := w.staff.client(t, "/eng/alice")
		if status, err := w.get(&c, target); err != nil || status != 200 {
			t.Fatalf("%s: %d, %v", target, status, err)
		}
		if got := w.seen[0].RequestURI; got != want {
			t.Errorf("%s reaches the origin as %s; want %s", target, got, want)
		}
	}
}

// What clients say about themselves never reaches the origin, however it is written.
func TestTheOriginHearsFromTheGatewayAloneWhoTheClientIs(t *testing.T) {
	w := newWorld(t, nil)
	c := w.staff.client(t, "/eng/alice")
	want := ":" + base64.StdEncoding.EncodeToString(c.Leaf.Raw) + ":"
	for name, headers := range map[string][]string{
		"plain":                     {"Client-Cert: :AAAA:", "X-Forwarded-For: 192.0.2.1", "Forwarded: for=192.0.2.1"},
		"twice":                     {"Client-Cert: :AAAA:", "client-cert: :BBBB:"},
		"with underscores":          {"Client_Cert: :AAAA:", "X_Forwarded_For: 192.0.2.1"},
		"named by Connection":       {"Connection: Client-Cert, keep-alive", "Client-Cert: :AAAA:"},
		"named, and not there":      {"Connection: client-cert"},
		"named by Keep-Alive":       {"Keep-Alive: Client-Cert", "Proxy-Connection: Client-Cert"},
		"to rewrite path, method":   {"X-Original-URL: /secret", "X-Rewrite-URL: /secret", "X-HTTP-Method-Override: DELETE"},
		"by other proxies":          {"X-SSL-Client-Forwarded: x", "X-Client-Original: x", "Remote_User_Original: x", "X.Forwarded.For: 192.0.2.1", "X-ARR-ClientCert-Original: x"},
		"the chain of certificates": {"Client-Cert-Chain: :AAAA:", "X-Forwarded-Client-Cert: By=x"},
	} {
		w.mu.Lock()
		w.seen = nil
		w.mu.Unlock()
		conn, err := w.connect(w.tls(&c, "shop.example.org"))
		if err != nil {
			t.Fatal(err)
		}
		r, err := ask(conn, "GET", "/x", "shop.example.org", append(headers, "X-Kept: yes")...)
		if err != nil || r.StatusCode != 200 {
			t.Fatalf("%s: %v, %v", name, r, err)
		}
		conn.Close()
		got := w.seen[0].Header
		if v := got.Values("Client-Cert"); len(v) != 1 || v[0] != want {
			t.Errorf("%s: the origin gets Client-Cert %q; want the certificate of the handshake", name, v)
		}
		for h := range got {
			plain := strings.ToLower(strings.ReplaceAll(h, "_", "-"))
			if h != "Client-Cert" && (strings.Contains(plain, "client-cert") || strings.Contains(plain, "forwarded") || strings.Contains(plain, "rewrite") ||
				strings.Contains(plain, "original") || strings.Contains(plain, "override")) {
				t.Errorf("%s: the origin gets %s", name, h)
			}
		}
		if got.Get("X-Kept") != "yes" {
			t.Errorf("%s: another header is lost", name)
		}
	}
}

// Under names of the file the origin hears who the client is from the gateway alone, as under Client-Cert; what does not name the certificate
// does not send it.
func TestTheOriginHearsByNamesOfTheFile(t *testing.T) {
	headers := model.ClientHeaders{PEM: "X-Shop-Cert", Identity: "Remote-Caller", Serial: "X-Shop-Serial"}
	w := newWorld(t, func(w *world, c *Config) {
		c.Services[0].Headers = headers
		c.Services[0].Rules = w.rules(model.ServiceRule{Who: "**", Path: "/x", Chain: "light"},
			model.ServiceRule{Who: "**", Headers: []model.ServiceHeader{{Name: "X-Shop-Serial", Value: "1"}}, Chain: "deep"})
	})
	forged := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		for _, h := range append(headers.List(), "Client-Cert") {
			if h != "" {
				rw.Header().Set(h, "from the origin")
			}
		}
	})
	w.answer.Store(&forged)
	c := w.staff.client(t, "/eng/alice")
	for name, sent := range map[string][]string{
		"none":             nil,
		"as they are":      {"X-Shop-Cert: a", "Remote-Caller: b", "X-Shop-Serial: 1", "Client-Cert: :AAAA:"},
		"with underscores": {"X_Shop_Cert: a", "REMOTE_CALLER: b", "X_shop-serial: 1", "Client_Cert: :AAAA:"},
		"with dots":        {"X.Shop.Cert: a", "Remote.Caller: b"},
		"of one hop":       {"Connection: X-Shop-Cert, Remote-Caller, X-Shop-Serial"},
	} {
		w.mu.Lock()
		w.seen = nil
		w.mu.Unlock()
		conn, err := w.connect(w.tls(&c, "shop.example.org"))
		if err != nil {
			t.Fatal(err)
		}
		r, err := ask(conn, "GET", "/x", "shop.example.org", sent...)
		if err != nil || r.StatusCode != 200 {
			t.Fatalf("%s: %v, %v", name, r, err)
		}
		for _, h := range append(headers.List(), "Client-Cert") {
			if v := r.Header.Values(h); h != "" && len(v) > 0 {
				t.Errorf("%s: the client gets %s: %q", name, h, v)
			}
		}
		if r, err := ask(conn, "GET", "/y", "shop.example.org", sent...); err != nil || r.StatusCode != 403 {
			t.Errorf("%s: by what the client says about itself a rule lets it in: %v, %v", name, r, err)
		}
		conn.Close()
		w.mu.Lock()
		got := w.seen[0].Header
		w.mu.Unlock()
		for h, v := range got {
			switch plain := hyphened(h); plain {
			case "X-Shop-Cert":
				text, err := url.PathUnescape(v[0])
				block, _ := pem.Decode([]byte(text))
				if err != nil || len(v) != 1 || h != plain || block == nil || !bytes.Equal(block.Bytes, c.Leaf.Raw) || strings.ContainsAny(v[0], "+/= \n") {
					t.Errorf("%s: the origin gets %s: %q", name, h, v)
				}
			case "Remote-Caller":
				if h != plain || len(v) != 1 || v[0] != "spiffe://staff.example/eng/alice" {
					t.Errorf("%s: the origin gets %s: %q", name, h, v)
				}
			case "X-Shop-Serial":
				if h != plain || len(v) != 1 || v[0] != c.Leaf.SerialNumber.Text(16) {
					t.Errorf("%s: the origin gets %s: %q", name, h, v)
				}
			case "Client-Cert":
				t.Errorf("%s: the origin gets the certificate by a name that the file does not have", name)
			}
		}
		for _, h := range headers.List() {
			if h != "" && got.Get(h) == "" {
				t.Errorf("%s: the origin gets no %s", name, h)
			}
		}
	}
}

// What net/http would refuse to send is sent frame by frame.
func TestATargetWithoutAPathIsRefusedInHTTP2(t *testing.T) {
	for _, target := range []string{"x:http://shop.example.org/admin/secret", "http:foo"} {
		w := newWorld(t, nil)
		c := w.staff.client(t, "/eng/alice")
		conn, err := w.connect(w.tls(&c, "shop.example.org", "h2"))
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, http2.ClientPreface)
		f := http2.NewFramer(conn, conn)
		f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		var block bytes.Buffer
		e := hpack.NewEncoder(&block)
		for _, h := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "shop.example.org"}, {":path", target}} {
			e.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
		}
		f.WriteSettings()
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndStream: true, EndHeaders: true})
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if h, ok := frame.(*http2.MetaHeadersFrame); ok {
				if got := h.PseudoValue("status"); got != "400" {
					t.Errorf("%s is answered with %s; want 400", target, got)
				}
				break
			}
		}
		conn.Close()
		w.refused(PathAmbiguous)
		w.quiet()
	}
}

func TestRulesLookAtHeadersThatGoOn(t *testing.T) {
	for name, test := range map[string]struct {
		headers []string
		status  int
	}{
		"there":                    {[]string{"X-Env: test"}, 200},
		"named by Connection":      {[]string{"X-Env: test", "Connection: x-env"}, 403},
		"twice":                    {[]string{"X-Env: test", "X-Env: test"}, 403},
		"also with an underscore":  {[]string{"X-Env: test", "X_Env: prod"}, 403},
		"with an underscore alone": {[]string{"X_Env: test"}, 403},
	} {
		w := newWorld(t, func(w *world, c *Config) {
			c.Services[0].Rules = w.rules(model.ServiceRule{Who: "**", Headers: []model.ServiceHeader{{Name: "X-Env", Value: "test"}}, Chain: "deep"})
		})
		c := w.staff.client(t, "/eng/alice")
		conn, err := w.connect(w.tls(&c, "shop.example.org"))
		if err != nil {
			t.Fatal(err)
		}
		if r, err := ask(conn, "GET", "/x", "shop.example.org", test.headers...); err != nil || r.StatusCode != test.status {
			t.Errorf("%s: %v, %v; want %d", name, r, err, test.status)
		}
		conn.Close()
	}
}

// The rules change when a request has been decided about and is not yet among those that Recheck sees.
func TestARequestIsDecidedByTheRulesOfNow(t *testing.T) {
	w := newWorld(t, nil)
	c := w.staff.client(t, "/eng/alice")
	conn := w.held(&c)
	w.gateway.mu.Lock()
	var s *session
	for s = range w.gateway.sessions {
	}
	w.gateway.mu.Unlock()
	for s.mu.Lock(); len(s.requests) > 0; s.mu.Lock() { // the one before ends
		s.mu.Unlock()
		runtime.Gosched()
	}
	io.WriteString(conn, "GET /x HTTP/1.1\r\nHost: shop.example.org\r\n\r\n")
	for all := make([]byte, 1<<20); !bytes.Contains(all[:runtime.Stack(all, true)], []byte("(*session).begin")); {
		runtime.Gosched()
	}
	w.services[0].Rules = w.rules(model.ServiceRule{Who: "**", Path: "/y", Chain: "light"})
	err := w.gateway.set(w.services)
	s.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if r, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || r.StatusCode != 403 {
		t.Errorf("answered with %v, %v; want 403", r, err)
	}
}

func TestTrailersOfClientsDoNotGoOn(t *testing.T) {
	w := newWorld(t, nil)
	var trailer http.Header
	f := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		trailer = r.Trailer
	})
	w.answer.Store(&f)
	c := w.staff.client(t, "/eng/alice")
	body := &trailing{Reader: strings.NewReader("abc")}
	r, err := http.NewRequest("POST", "https://shop.example.org/x", body)
	if err != nil {
		t.Fatal(err)
	}
	r.Trailer = http.Header{"Client-Cert": nil, "X-Sum": nil}
	body.end = func() { r.Trailer["Client-Cert"], r.Trailer["X-Sum"] = []string{":AAAA:"}, []string{"1"} }
	a, err := w.web2(&c).Do(r)
	if err != nil || a.StatusCode != 200 {
		t.Fatalf("%v, %v", a, err)
	}
	a.Body.Close()
	if len(trailer) != 0 {
		t.Errorf("the origin gets trailers %v", trailer)
	}
}

type trailing struct {
	io.Reader
	end func()
}

func (b *trailing) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err == io.EOF {
		b.end()
	}
	return n, err
}

// Bytes that two parsers could read in two ways: the origin gets one request, or none.
func TestNoRequestIsSmuggled(t *testing.T) {
	const smuggled = "GET /secret HTTP/1.1\r\nHost: shop.example.org\r\n\r\n"
	for name, test := range map[string]struct {
		bytes string
		want  int // requests that reach the origin; where a body breaks off, it or none
	}{
		"length and chunks":  {"POST /files/a HTTP/1.1\r\nHost: shop.example.org\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled, 1},
		"two lengths":        {"POST /files/a HTTP/1.1\r\nHost: shop.example.org\r\nContent-Length: 0\r\nContent-Length: 50\r\n\r\n" + smuggled, 0},
		"a length of +50":    {"POST /files/a HTTP/1.1\r\nHost: shop.example.org\r\nContent-Length: +50\r\n\r\n" + smuggled, 0},
		"chunked, identity":  {"POST /files/a HTTP/1.1\r\nHost: shop.example.org\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + smuggled, 0},
		"xchunked":           {"POST /files/a HTTP/1.1\r\nHost: shop.example.org\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + smuggled, 0},
		"tab chunked":        {"POST /files/a HTTP/1.1\r\nHost: shop.example.org\r\nTransfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n" + smuggled, 1},
		"space before colon": {"POST /files/a HTTP/1.1\r\nHost: shop.example.org\r\nTransfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + smuggled, 0},
		"chunk of bare LF":   {"POST /files/a HTTP/1.1\r\nHost: shop.example.org\r\nTransfer-Encoding: chunked\r\n\r\n1\nx\n0\n\n" + smuggled, -1},
		"chunk size 0x0":     {"POST /files/a HTTP/1.1\r\nHost: shop.example.org\r\nTransfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n" + smuggled, -1},
		"two hosts":          {"GET /files/a HTTP/1.1\r\nHost: shop.example.org\r\nHost: other.example.org\r\n\r\n", 0},
		"folded host":        {"GET /files/a HTTP/1.1\r\nHost: shop.example.org\r\n other.example.org\r\n\r\n", 0},
		"h2c":                {"GET /files/a HTTP/1.1\r\nHost: shop.example.org\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(_ *world, c *Config) { c.Limits.Idle = 300 * time.Millisecond })
			c := w.staff.client(t, "/ops/olga") // who may GET /status and all of /files
			conn, err := w.connect(w.tls(&c, "shop.example.org"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			io.WriteString(conn, test.bytes)
			io.Copy(io.Discard, conn) // until the gateway has answered all, and waits no longer
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, r := range w.seen {
				if !strings.HasPrefix(r.URL.Path, "/files/") {
					t.Errorf("the origin gets %s %s", r.Method, r.URL.Path)
				}
				if r.Header.Get("Upgrade") != "" || r.Header.Get("Http2-Settings") != "" {
					t.Errorf("the origin is asked to upgrade: %v", r.Header)
				}
			}
			if n := len(w.seen); n != test.want && (test.want >= 0 || n > 1) {
				t.Errorf("the origin gets %d requests; want %d", len(w.seen), test.want)
			}
		})
	}
}

func TestAWebSocketStaysWithItsChainAndEndsWithItsIdentity(t *testing.T) {
	w := newWorld(t, nil)
	f := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			rw.WriteHeader(http.StatusBadRequest)
			return
		}
		c, b, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		io.Copy(c, b) // an echo
	})
	w.answer.Store(&f)
	c := w.staff.client(t, "/eng/alice")
	conn, err := w.connect(w.tls(&c, "shop.example.org"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r, err := ask(conn, "GET", "/x", "shop.example.org", "Connection: Upgrade", "Upgrade: websocket")
	if err != nil || r.StatusCode != 101 {
		t.Fatalf("answered with %v, %v; want 101", r, err)
	}
	// A request in here is a message of somebody else's protocol.
	const message = "GET /secret HTTP/1.1\r\nHost: shop.example.org\r\n\r\n"
	io.WriteString(conn, message)
	back := make([]byte, len(message))
	if _, err := io.ReadFull(conn, back); err != nil || string(back) != message {
		t.Fatalf("%q, %v come back", back, err)
	}
	if err := w.lists.Take(w.staff.list(t, 2, nil, c.Leaf), time.Now()); err != nil {
		t.Fatal(err)
	}
	over(t, conn)
	w.refused(CertRevoked)
	if len(w.dials) != 1 || w.dials[0].chain != "deep" {
		t.Errorf("connections are opened for %v; want one by deep", w.dials)
	}
}

// What gRPC needs: HTTP/2 to the origin, both directions at once, trailers.
func TestGRPCGoesOnByHTTP2(t *testing.T) {
	w := newWorld(t, nil)
	f := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Trailer", "Grpc-Status")
		rw.Header().Set("Proto", r.Proto)
		rw.Header().Set("Te-Was", r.Header.Get("Te"))
		for b := bufio.NewReader(r.Body); ; {
			line, err := b.ReadString('\n')
			if err != nil {
				break
			}
			io.WriteString(rw, line)
			http.NewResponseController(rw).Flush()
		}
		rw.Header().Set("Grpc-Status", "0")
	})
	w.answer.Store(&f)
	c := w.staff.client(t, "/eng/alice")
	out, in := io.Pipe()
	r, err := http.NewRequest("POST", "https://shop.example.org/svc/Method", out)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/grpc+proto")
	r.Header.Set("Te", "trailers")
	go io.WriteString(in, "one\n")
	a, err := w.web2(&c).Do(r)
	if err != nil || a.StatusCode != 200 {
		t.Fatalf("%v, %v", a, err)
	}
	b := bufio.NewReader(a.Body)
	for _, line := range []string{"one\n", "two\n"} {
		if got, err := b.ReadString('\n'); got != line {
			t.Fatalf("%q, %v; want %q", got, err, line)
		}
		if line == "one\n" {
			io.WriteString(in, "two\n")
		}
	}
	in.Close()
	io.Copy(io.Discard, b)
	a.Body.Close()
	if a.Header.Get("Proto") != "HTTP/2.0" || a.Header.Get("Te-Was") != "trailers" || a.Trailer.Get("Grpc-Status") != "0" {
		t.Errorf("the origin is asked by %s with TE %q, and trailers are %v; want HTTP/2.0, trailers, a status of 0", a.Header.Get("Proto"), a.Header.Get("Te-Was"), a.Trailer)
	}
}

// The origin is verified end to end: who has no certificate of the authority for the name gets no request.
func TestAnOriginThatIsNotTheOneIsNotAsked(t *testing.T) {
	for name, change := range map[string]func(w *world, c *Config){
		"of another name":      func(w *world, c *Config) { c.Services[0].Origin.Name = "other.internal" },
		"of another authority": func(w *world, c *Config) { c.Services[0].Origin.Roots = pool(newIssuer(w.t, "web", nil, nil)) },
	} {
		w := newWorld(t, change)
		c := w.staff.client(t, "/eng/alice")
		if status, err := w.get(&c, "/x"); err != nil || status != 502 {
			t.Errorf("an origin %s: %d, %v; want 502", name, status, err)
		}
		w.refused(OriginFailed)
		if len(w.seen) != 0 {
			t.Errorf("an origin %s is asked", name)
		}
	}
}

func TestHeadersAreBounded(t *testing.T) {
	w := newWorld(t, func(_ *world, c *Config) { c.Limits.HeaderTime = 200 * time.Millisecond })
	c := w.staff.client(t, "/eng/alice")
	conn, err := w.connect(w.tls(&c, "shop.example.org"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r, err := ask(conn, "GET", "/x", "shop.example.org", "X-Long: "+strings.Repeat("a", 64<<10))
	if err != nil || r.StatusCode != 431 {
		t.Errorf("headers of 64 KiB are answered with %v, %v; want 431", r, err)
	}
	slow, err := w.connect(w.tls(&c, "shop.example.org"))
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	io.WriteString(slow, "GET /x HTTP/1.1\r\nHost: shop")
	over(t, slow)
	w.quiet()
}

func TestASlowBodyEnds(t *testing.T) {
	w := newWorld(t, func(_ *world, c *Config) { c.Limits.Idle = 200 * time.Millisecond })
	f := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
	w.answer.Store(&f)
	c := w.staff.client(t, "/eng/alice")
	conn, err := w.connect(w.tls(&c, "shop.example.org"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "POST /x HTTP/1.1\r\nHost: shop.example.org\r\nContent-Length: 1000\r\n\r\nabc")
	over(t, conn)
}

// An identity has so many requests under way on all its connections; others are served meanwhile, and so is it once one has ended.
func TestRequestsOfOneIdentityAreBounded(t *testing.T) {
	const most = 5
	w := newWorld(t, func(_ *world, c *Config) { c.Limits.RequestsIdentity = most })
	come, end := make(chan struct{}, 20), make(chan struct{})
	hold := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/held" {
			come <- struct{}{}
			<-end
		}
		io.WriteString(rw, "hello")
	})
	w.answer.Store(&hold)
	alice, bob := w.staff.client(t, "/eng/alice"), w.staff.client(t, "/eng/bob")
	get := func(c *http.Client, path string) int {
		r, err := c.Get("https://shop.example.org/" + path)
		if err != nil {
			t.Error(err)
			return 0
		}
		defer r.Body.Close()
		if r.StatusCode == http.StatusTooManyRequests && r.Header.Get("Retry-After") == "" {
			t.Error("429 does not say when to come again")
		}
		io.Copy(io.Discard, r.Body)
		return r.StatusCode
	}
	first, second := w.web2(&alice), w.web2(&alice) // two connections
	var wait sync.WaitGroup
	for i := range most {
		c := first
		if i%2 == 1 {
			c = second
		}
		wait.Go(func() {
			if status := get(c, "held"); status != 200 {
				t.Errorf("a request within the limit gets %d", status)
			}
		})
	}
	for range most {
		<-come
	}
	for _, c := range []*http.Client{first, second} {
		if status := get(c, "x"); status != http.StatusTooManyRequests {
			t.Errorf("a request beyond the limit gets %d; want 429", status)
		}
	}
	if status, err := w.get(&alice, "/x"); err != nil || status != http.StatusTooManyRequests {
		t.Errorf("one on a further connection gets %d, %v; want 429", status, err)
	}
	if status := get(w.web2(&bob), "x"); status != 200 {
		t.Errorf("another identity gets %d", status)
	}
	close(end)
	wait.Wait()
	if status := get(first, "x"); status != 200 {
		t.Errorf("once they have ended, a request gets %d", status)
	}
	w.refused(Limit)
}

// An origin that has said how long its answer is, and stops in the midst of it, goes on when the client has what there is: first its
// headers, then a part.
func TestPartsOfAnAnswerGoOn(t *testing.T) {
	w := newWorld(t, nil)
	had := make(chan struct{})
	answer := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Length", "10")
		rw.WriteHeader(http.StatusOK)
		for _, part := range []string{"first", "other"} {
			http.NewResponseController(rw).Flush()
			select {
			case <-had:
			case <-r.Context().Done():
				return
			}
			io.WriteString(rw, part)
		}
	})
	w.answer.Store(&answer)
	alice := w.staff.client(t, "/eng/alice")
	for _, protocol := range []string{"http/1.1", "h2"} {
		t.Run(protocol, func(t *testing.T) {
			protocols := &http.Protocols{}
			protocols.SetHTTP1(protocol == "http/1.1")
			protocols.SetHTTP2(protocol == "h2")
			c := &http.Client{Timeout: await.Limit(20 * time.Second), Transport: &http.Transport{
				Protocols: protocols, TLSClientConfig: w.tls(&alice, "shop.example.org"),
				DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
					return (&net.Dialer{}).DialContext(ctx, "tcp", w.address)
				},
			}}
			defer c.CloseIdleConnections()
			a, err := c.Get("https://shop.example.org/page")
			if err != nil {
				t.Fatal(err)
			}
			defer a.Body.Close()
			got := make([]byte, 5)
			for _, want := range []string{"first", "other"} {
				had <- struct{}{}
				if _, err := io.ReadFull(a.Body, got); err != nil || string(got) != want {
					t.Fatalf("the client has %q (%v); want %q", got, err, want)
				}
			}
		})
	}
}
