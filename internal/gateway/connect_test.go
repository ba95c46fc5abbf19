package gateway

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/gateway/policy"
	"github.com/waystamp/waystamp/internal/model"
)

// proxied has a proxy, proxy.example.org, whose clients may ask for two destinations: git.example.org:22, which says what it has
// heard, and shop.internal:443, the origin of HTTPS. A third one is there for nobody.
func proxied(t *testing.T, serve func(*net.TCPConn), change func(*world, *Config)) *world {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	t.Cleanup(func() { l.Close(); wait.Wait() })
	wait.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wait.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(await.Limit(time.Minute)))
				serve(c.(*net.TCPConn))
			})
		}
	})
	git := netip.MustParseAddrPort(l.Addr().String())
	return newWorld(t, func(w *world, c *Config) {
		shop := netip.MustParseAddrPort(w.origin.Listener.Addr().String())
		s := model.Service{Name: "proxy", Hosts: []string{"proxy.example.org"}, Mode: model.ModeConnect, Opaque: model.Opaque{On: true, Idle: time.Hour},
			Destinations: []model.Destination{{Host: "git.example.org", Port: 22, Address: git}, {Host: "shop.internal", Port: 443, Address: shop}, {Host: "nobody.example.org", Port: 1, Address: git}},
			Rules: []model.ServiceRule{
				{Who: "spiffe://staff.example/ops/*", To: []string{"git.example.org:22"}, Chain: "light"},
				{Who: "spiffe://staff.example/**", To: []string{"shop.internal:443"}, Chain: "deep"},
			}}
		rules, err := policy.Compile(s, model.IdentitySPIFFE)
		if err != nil {
			t.Fatal(err)
		}
		in := Service{Name: s.Name, Hosts: s.Hosts, Certificate: w.web.server(t, "proxy.example.org"), Clients: c.Services[0].Clients, Rules: rules, Opaque: s.Opaque, Destinations: map[string]netip.AddrPort{}}
		for _, d := range s.Destinations {
			in.Destinations[d.Name()] = d.Address
		}
		c.Services = append(c.Services, in)
		if change != nil {
			change(w, c)
		}
	})
}

// proxy connects to the proxy.
func (w *world) proxy(path string, protocols ...string) *tls.Conn {
	w.t.Helper()
	c := w.staff.client(w.t, path)
	conn, err := w.connect(w.tls(&c, "proxy.example.org", protocols...))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.NetConn().Close() })
	return conn
}

// tunnel asks for a destination, with bytes sent ahead.
func tunnel(t *testing.T, c *tls.Conn, to, ahead string) (*bufio.Reader, int) {
	t.Helper()
	if _, err := io.WriteString(c, "CONNECT "+to+" HTTP/1.1\r\nHost: "+to+"\r\nProxy-Authorization: Basic eDp5\r\n\r\n"+ahead); err != nil {
		t.Fatal(err)
	}
	b := bufio.NewReader(c)
	r, err := http.ReadResponse(b, &http.Request{Method: "CONNECT"})
	if err != nil {
		t.Fatal(err)
	}
	if r.StatusCode == 200 && (len(r.Header) > 0 || r.ContentLength > 0) {
		t.Errorf("the answer to CONNECT has fields: %v", r.Header)
	}
	return b, r.StatusCode
}

func TestAProxyCarriesWhatItsRulesName(t *testing.T) {
	up, down := string(random(t, 1_000_001)), random(t, 2_000_003)
	w := proxied(t, func(c *net.TCPConn) {
		all, err := io.ReadAll(c) // the client's end goes on
		if err != nil || string(all) != up {
			t.Errorf("the destination has %d bytes, %v; want %d", len(all), err, len(up))
		}
		c.Write(down)
		c.CloseWrite()
	}, nil)
	c := w.proxy("/ops/alice")
	r, status := tunnel(t, c, "Git.Example.Org:22", up[:3000]) // sent ahead, nothing is lost
	if status != 200 {
		t.Fatalf("the answer is %d", status)
	}
	go func() {
		io.WriteString(c, up[3000:])
		c.CloseWrite()
	}()
	if all, err := io.ReadAll(r); err != nil || string(all) != string(down) {
		t.Errorf("the client has %d bytes, %v; want %d and their end", len(all), err, len(down))
	}
	c.Close()
	if r := w.line(EventDecided, 1); r.Method != "CONNECT" || r.Host != "git.example.org:22" || r.Chain != "light" || r.Rule != 1 || r.Identity != "spiffe://staff.example/ops/alice" {
		t.Errorf("the log says %+v", r)
	}
	if r := w.line(EventEnded, 1); r.Received != int64(len(up)) || r.Bytes != int64(len(down)) || r.Text != "" {
		t.Errorf("the log says %+v", r)
	}
	if r := w.line(EventClosed, 1); r.Service != "proxy" {
		t.Errorf("the log says %+v", r)
	}
}

// Nothing is opened but what a rule names for this identity, however it is written, and the page says no more than the status.
func TestAProxyRefusesEverythingElse(t *testing.T) {
	own := fmt.Sprintf("127.0.0.1:%d", 1)
	long := strings.Repeat("a", 40<<10)
	for name, test := range map[string]struct {
		path, request string
		status        int
		why           Reason // "": net/http has refused it
	}{
		"another's destination":        {"/eng/bob", "CONNECT git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 403, RuleNone},
		"nobody's destination":         {"/ops/alice", "CONNECT nobody.example.org:1 HTTP/1.1\r\nHost: nobody.example.org:1\r\n\r\n", 403, RuleNone},
		"another host":                 {"/ops/alice", "CONNECT evil.example.org:443 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 403, DestinationUnknown},
		"another port":                 {"/ops/alice", "CONNECT git.example.org:23 HTTP/1.1\r\nHost: git.example.org:23\r\n\r\n", 403, DestinationUnknown},
		"an address":                   {"/ops/alice", "CONNECT " + own + " HTTP/1.1\r\nHost: " + own + "\r\n\r\n", 403, DestinationUnknown},
		"loopback, of IPv6":            {"/ops/alice", "CONNECT [::1]:22 HTTP/1.1\r\nHost: [::1]:22\r\n\r\n", 403, DestinationUnknown},
		"cloud metadata":               {"/ops/alice", "CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", 403, DestinationUnknown},
		"a dot behind":                 {"/ops/alice", "CONNECT git.example.org.:22 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 403, DestinationUnknown},
		"the proxy itself":             {"/ops/alice", "CONNECT proxy.example.org:443 HTTP/1.1\r\nHost: proxy.example.org:443\r\n\r\n", 403, DestinationUnknown},
		"no port":                      {"/ops/alice", "CONNECT git.example.org HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, RequestMalformed},
		"an empty port":                {"/ops/alice", "CONNECT git.example.org: HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, RequestMalformed},
		"a port with zeros":            {"/ops/alice", "CONNECT git.example.org:0022 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, RequestMalformed},
		"a port beyond":                {"/ops/alice", "CONNECT git.example.org:65558 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, RequestMalformed},
		"somebody before":              {"/ops/alice", "CONNECT evil@git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, RequestMalformed},
		"an encoded name":              {"/ops/alice", "CONNECT %67it.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, ""},
		"a path behind":                {"/ops/alice", "CONNECT git.example.org:22/x HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, RequestMalformed},
		"a path, and a host":           {"/ops/alice", "CONNECT /git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, RequestMalformed},
		"a query":                      {"/ops/alice", "CONNECT git.example.org:22?a HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, RequestMalformed},
		"a length":                     {"/ops/alice", "CONNECT git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\nContent-Length: 5\r\n\r\nhello", 400, RequestMalformed},
		"a length of nothing":          {"/ops/alice", "CONNECT git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\nContent-Length: 0\r\n\r\n", 400, RequestMalformed},
		"chunks":                       {"/ops/alice", "CONNECT git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, RequestMalformed},
		"a length and chunks":          {"/ops/alice", "CONNECT git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, ""},
		"two hosts":                    {"/ops/alice", "CONNECT git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\nHost: evil.example.org\r\n\r\n", 400, ""},
		"a bare CR":                    {"/ops/alice", "CONNECT git.example.org:22\rX HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, ""},
		"a space more":                 {"/ops/alice", "CONNECT git.example.org:22 evil:1 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 400, ""},
		"a long line":                  {"/ops/alice", "CONNECT " + long + ":22 HTTP/1.1\r\nHost: a\r\n\r\n", 431, ""},
		"a long header":                {"/ops/alice", "CONNECT git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\nX: " + long + "\r\n\r\n", 431, ""},
		"GET of another proxy's kind":  {"/ops/alice", "GET http://git.example.org:22/ HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 405, MethodRefused},
		"GET":                          {"/ops/alice", "GET / HTTP/1.1\r\nHost: proxy.example.org\r\n\r\n", 405, MethodRefused},
		"OPTIONS of all":               {"/ops/alice", "OPTIONS * HTTP/1.1\r\nHost: proxy.example.org\r\n\r\n", 405, MethodRefused},
		"connect in small letters":     {"/ops/alice", "connect git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 0, ""},
		"a refused one, then the next": {"/ops/alice", "CONNECT evil.example.org:22 HTTP/1.1\r\nHost: a\r\n\r\nCONNECT git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n", 403, DestinationUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			w := proxied(t, func(*net.TCPConn) { t.Error("the destination has a connection") }, nil)
			c := w.proxy(test.path)
			io.WriteString(c, test.request)
			b := bufio.NewReader(c)
			r, err := http.ReadResponse(b, &http.Request{Method: "GET"})
			if err != nil {
				t.Fatal(err)
			}
			page, _ := io.ReadAll(r.Body)
			if test.status != 0 && r.StatusCode != test.status || r.StatusCode < 400 {
				t.Errorf("the answer is %d; want %d", r.StatusCode, test.status)
			}
			if s := string(page); strings.Contains(s, "git") || strings.Contains(s, "rule") || len(s) > 100 {
				t.Errorf("the page says %q", s)
			}
			if rest, err := io.ReadAll(b); len(rest) > 0 { // the next request of the connection is not read
				t.Errorf("behind the refusal the client reads %q, %v", rest, err)
			}
			if r.StatusCode == 405 && r.Header.Get("Allow") != "CONNECT" {
				t.Errorf("405 allows %q", r.Header.Get("Allow"))
			}
			if test.why != "" {
				w.refused(test.why)
			}
			w.quiet()
		})
	}
}

func TestAProxyTakesNoHTTP2(t *testing.T) {
	w := proxied(t, func(*net.TCPConn) {}, nil)
	c := w.staff.client(t, "/ops/alice")
	if conn, err := w.connect(w.tls(&c, "proxy.example.org", "h2")); err == nil {
		t.Errorf("a client that speaks HTTP/2 alone has agreed on %q", conn.ConnectionState().NegotiatedProtocol)
	}
	if p := w.proxy("/ops/alice", "h2", "http/1.1").ConnectionState().NegotiatedProtocol; p != "http/1.1" {
		t.Errorf("a client of both has agreed on %q", p)
	}
}

func TestADestinationThatIsNotThereIs502(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := netip.MustParseAddrPort(l.Addr().String())
	l.Close()
	w := proxied(t, func(*net.TCPConn) {}, func(_ *world, c *Config) { c.Services[2].Destinations["git.example.org:22"] = gone })
	if _, status := tunnel(t, w.proxy("/ops/alice"), "git.example.org:22", ""); status != 502 {
		t.Errorf("the answer is %d; want 502", status)
	}
	w.refused(OriginFailed)
	if r := w.line(EventEnded, 1); r.Chain != "light" || r.Text == "" {
		t.Errorf("the log says %+v", r)
	}
}

// A tunnel ends on both sides with its identity, its rule and its destination, and nothing looks complete then.
func TestATunnelEndsWithItsIdentity(t *testing.T) {
	changed := func(w *world, change func(*Service)) {
		next := w.services[2]
		change(&next)
		w.gateway.Update([]Service{w.services[0], w.services[1], next})
	}
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
		"its rule is gone":       {func(w *world, _ *x509.Certificate) { changed(w, func(s *Service) { s.Rules = s.Rules[1:] }) }, RuleNone},
		"its destination moves": {func(w *world, _ *x509.Certificate) {
			changed(w, func(s *Service) {
				s.Destinations = map[string]netip.AddrPort{"git.example.org:22": netip.MustParseAddrPort("127.0.0.1:9")}
			})
		}, RuleNone},
		"it is without a byte": {func(w *world, _ *x509.Certificate) { w.offset.Store(int64(30 * time.Minute)) }, Idle},
		"the service is no proxy now": {func(w *world, _ *x509.Certificate) {
			changed(w, func(s *Service) { s.Destinations, s.Origin = nil, w.services[0].Origin })
		}, Handshake},
	} {
		t.Run(name, func(t *testing.T) {
			ended := make(chan error, 1)
			w := proxied(t, func(c *net.TCPConn) {
				io.ReadFull(c, make([]byte, len("ahead"))) // what goes on later would begin the time anew
				io.WriteString(c, "hello")
				_, err := io.Copy(io.Discard, c)
				ended <- err
			}, func(_ *world, c *Config) { c.Services[2].Opaque.Idle = 20 * time.Minute })
			alice := w.staff.client(t, "/ops/alice")
			c, err := w.connect(w.tls(&alice, "proxy.example.org"))
			if err != nil {
				t.Fatal(err)
			}
			defer c.NetConn().Close()
			r, status := tunnel(t, c, "git.example.org:22", "ahead")
			b := make([]byte, 5)
			if _, err := io.ReadFull(r, b); status != 200 || err != nil || string(b) != "hello" {
				t.Fatalf("%d, %q, %v", status, b, err)
			}
			test.do(w, alice.Leaf)
			if _, err := r.ReadByte(); !isCut(err) {
				t.Errorf("the client reads %v; want a reset", err)
			}
			if err := <-ended; !isCut(err) {
				t.Errorf("the destination reads to its end with %v; want a reset", err)
			}
			if r := w.line(EventClosed, 1); r.Reason != test.why {
				t.Errorf("the log says %s; want %s", r.Reason, test.why)
			}
		})
	}
}

// A ticket of the shop's holder opens nothing at the proxy.
func TestAProxyTakesNoTicketOfOthers(t *testing.T) {
	w := proxied(t, func(*net.TCPConn) { t.Error("the destination has a connection") }, nil)
	c, k := w.staff.client(t, "/eng/alice"), &tickets{}
	if resumed, _, err := w.resume(&c, k, "shop.example.org"); resumed || err != nil {
		t.Fatal(resumed, err)
	}
	settings := w.tls(nil, "proxy.example.org")
	settings.ClientSessionCache, settings.InsecureSkipVerify = k, true
	conn, err := w.connect(settings)
	if err == nil {
		defer conn.Close()
		io.WriteString(conn, "CONNECT git.example.org:22 HTTP/1.1\r\nHost: git.example.org:22\r\n\r\n")
		if n, err := conn.Read(make([]byte, 1)); n > 0 || errors.Is(err, io.EOF) {
			t.Errorf("a ticket of the shop opens the proxy: %v", err)
		}
	}
	w.refused(CertMissing)
}

// curl is a client of the proxy: inside is TLS of its own with the destination, which the gateway does not open.
func TestCurlGoesThroughTheProxy(t *testing.T) {
	w := proxied(t, func(*net.TCPConn) {}, nil)
	client, ca := w.onDisk(w.staff.client(t, "/eng/bob"))
	_, port, _ := net.SplitHostPort(w.address)
	curl := func(url string, more ...string) string {
		return run(t, "", "curl", append([]string{"-sS", "-m", "20", "--noproxy", "", "--cacert", ca, "--proxy-cacert", ca, "--resolve", "proxy.example.org:" + port + ":127.0.0.1",
			"--proxy", "https://proxy.example.org:" + port, "-w", "|%{http_connect} %{http_code}", url}, more...)...)
	}
	with := []string{"--proxy-cert", client, "--proxy-key", client}
	if got, want := curl("https://shop.internal/x", with...), "hello|200 200"; got != want {
		t.Errorf("curl prints %q; want %q", got, want)
	}
	w.mu.Lock()
	seen := len(w.seen)
	w.mu.Unlock()
	if seen != 1 {
		t.Errorf("the destination has had %d requests; want one", seen)
	}
	if r := w.line(EventDecided, 1); r.Chain != "deep" || r.Host != "shop.internal:443" {
		t.Errorf("the log says %+v", r)
	}
	for url, want := range map[string]string{"https://other.internal/": "|403 000", "https://git.example.org:22/": "|403 000"} {
		if got := curl(url, with...); !strings.Contains(got, want) {
			t.Errorf("curl prints %q for %s; want %q", got, url, want)
		}
	}
	if got := curl("http://shop.internal/x", with...); !strings.Contains(got, "405") {
		t.Errorf("curl prints %q for a URL without TLS; want 405", got)
	}
	if got := curl("https://shop.internal/x"); !strings.Contains(got, "|000 000") {
		t.Errorf("curl without a certificate prints %q", got)
	}
}
