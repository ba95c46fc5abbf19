package gateway

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/test/tlsrecord"
)

// rawClient is a session of a client whose records a test makes itself.
type rawClient struct {
	net.Conn
	tls    *tls.Conn
	secret []byte
	number uint64
	t      *testing.T
}

func (w *world) rawClient(t *testing.T, c *tls.Certificate) *rawClient {
	t.Helper()
	var log bytes.Buffer
	settings := w.tls(c, "shop.example.org", "http/1.1")
	settings.KeyLogWriter = &log
	conn, err := w.connect(settings)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if suite := conn.ConnectionState().CipherSuite; suite != tls.TLS_AES_128_GCM_SHA256 {
		t.Fatalf("the cipher suite is %s; this test makes records of TLS_AES_128_GCM_SHA256", tls.CipherSuiteName(suite))
	}
	return &rawClient{Conn: conn.NetConn(), tls: conn, secret: tlsrecord.SecretOf(t, log.String(), "CLIENT_TRAFFIC_SECRET_0"), t: t}
}

// record sends one. Who has ended the connection has ended it.
func (c *rawClient) record(kind byte, text []byte) {
	c.Conn.Write(tlsrecord.Seal(c.t, c.secret, c.number, kind, text))
	c.number++
}

func (c *rawClient) update(asks byte) {
	c.record(22, []byte{24, 0, 0, 1, asks})
	c.secret, c.number = tlsrecord.Next(c.t, c.secret), 0
}

// Records that no client of TLS sends end their session, and nobody else's; nothing of them reaches the origin.
func TestRecordsThatAreWrongEndTheirSession(t *testing.T) {
	const request = "GET /x HTTP/1.1\r\nHost: shop.example.org\r\n\r\n"
	many := func(n int, f func()) {
		for range n {
			f()
		}
	}
	for name, test := range map[string]struct {
		send   func(c *rawClient)
		served bool
	}{
		"a request":                  {func(c *rawClient) { c.record(23, []byte(request)) }, true},
		"a request behind an update": {func(c *rawClient) { c.update(1); c.record(23, []byte(request)) }, true},
		"a request in two records": {func(c *rawClient) {
			c.record(23, []byte(request[:10]))
			c.record(23, nil)
			c.record(23, []byte(request[10:]))
		}, true},
		"2^14+1 bytes": {func(c *rawClient) { c.record(23, append([]byte(request), make([]byte, 1<<14+1-len(request))...)) }, false},
		"2^14+300 bytes": {func(c *rawClient) {
			c.record(23, append([]byte(request), make([]byte, 1<<14+300-len(request))...))
		}, false},
		"records of 0 bytes":   {func(c *rawClient) { many(100, func() { c.record(23, nil) }); c.record(23, []byte(request)) }, false},
		"a flood of KeyUpdate": {func(c *rawClient) { many(100, func() { c.update(0) }); c.record(23, []byte(request)) }, false},
		"KeyUpdates that ask":  {func(c *rawClient) { many(100, func() { c.update(1) }); c.record(23, []byte(request)) }, false},
		"a KeyUpdate of 2":     {func(c *rawClient) { c.record(22, []byte{24, 0, 0, 1, 2}); c.record(23, []byte(request)) }, false},
		"an alert in the midst": {func(c *rawClient) {
			c.record(23, []byte(request[:10]))
			c.record(21, []byte{2, 40})
			c.record(23, []byte(request[10:]))
		}, false},
		"an alert of 3 bytes":  {func(c *rawClient) { c.record(21, []byte{2, 40, 0}); c.record(23, []byte(request)) }, false},
		"a second ClientHello": {func(c *rawClient) { c.record(22, []byte{1, 0, 0, 4, 3, 3, 0, 0}); c.record(23, []byte(request)) }, false},
		"a Finished": {func(c *rawClient) {
			c.record(22, append([]byte{20, 0, 0, 32}, make([]byte, 32)...))
			c.record(23, []byte(request))
		}, false},
		"an unknown kind":    {func(c *rawClient) { c.record(99, []byte(request)); c.record(23, []byte(request)) }, false},
		"only zeros":         {func(c *rawClient) { c.record(0, make([]byte, 20)); c.record(23, []byte(request)) }, false},
		"a record again":     {func(c *rawClient) { c.number = 1; c.record(23, []byte(request)) }, false},
		"clear text":         {func(c *rawClient) { c.Conn.Write(append([]byte{23, 3, 3, 0, byte(len(request))}, request...)) }, false},
		"a request in clear": {func(c *rawClient) { io.WriteString(c.Conn, request) }, false},
		"a flood of CCS": {func(c *rawClient) {
			many(100, func() { c.Conn.Write([]byte{20, 3, 3, 0, 1, 1}) })
			c.record(23, []byte(request))
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil)
			alice, bob := w.staff.client(t, "/eng/alice"), w.staff.client(t, "/eng/bob")
			bystander := w.held(&bob)
			before := len(w.seen)
			c := w.rawClient(t, &alice)
			test.send(c)
			if test.served {
				if r, err := http.ReadResponse(bufio.NewReader(c.tls), nil); err != nil || r.StatusCode != 200 {
					t.Errorf("answered with %v, %v; want 200", r, err)
				}
				return
			}
			c.Conn.SetReadDeadline(time.Now().Add(await.Limit(20 * time.Second)))
			got, err := io.ReadAll(c.tls)
			if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() || bytes.Contains(got, []byte("200 OK")) {
				t.Errorf("the session goes on: %q, %v", got, err)
			}
			w.answers(bystander)
			w.mu.Lock()
			defer w.mu.Unlock()
			if n := len(w.seen) - before; n != 1 { // the bystander's
				t.Errorf("the origin has got %d requests; want that of another client alone", n)
			}
		})
	}
}

// frames is a client of HTTP/2 whose frames a test makes itself.
type frames struct {
	*http2.Framer
	conn  *tls.Conn
	block bytes.Buffer
	enc   *hpack.Encoder
}

func (w *world) frames(t *testing.T, c *tls.Certificate) *frames {
	t.Helper()
	conn, err := w.connect(w.tls(c, "shop.example.org", "h2"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	f := &frames{Framer: http2.NewFramer(conn, conn), conn: conn}
	f.AllowIllegalWrites = true
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	f.enc = hpack.NewEncoder(&f.block)
	io.WriteString(conn, http2.ClientPreface)
	f.WriteSettings()
	return f
}

func (f *frames) headers(list ...string) []byte {
	f.block.Reset()
	for i := 0; i < len(list); i += 2 {
		f.enc.WriteField(hpack.HeaderField{Name: list[i], Value: list[i+1]})
	}
	return bytes.Clone(f.block.Bytes())
}

// outcome is the status of a stream, "reset", or "over" when the connection is.
func (f *frames) outcome(stream uint32) string {
	f.conn.SetReadDeadline(time.Now().Add(await.Limit(20 * time.Second)))
	for {
		frame, err := f.ReadFrame()
		if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() {
			return "nothing"
		}
		if err != nil {
			return "over"
		}
		switch x := frame.(type) {
		case *http2.MetaHeadersFrame:
			if x.StreamID == stream {
				return x.PseudoValue("status")
			}
		case *http2.RSTStreamFrame:
			if x.StreamID == stream {
				return "reset"
			}
		case *http2.GoAwayFrame:
			if x.ErrCode != http2.ErrCodeNo {
				return "over"
			}
		}
	}
}

// Requests of HTTP/2 that would mean something else in HTTP/1.1, or that no parser agrees about, do not reach the origin.
func TestMalformedRequestsOfHTTP2AreRefused(t *testing.T) {
	method, scheme, host, path := []string{":method", "GET"}, []string{":scheme", "https"}, []string{":authority", "shop.example.org"}, []string{":path", "/files/a"}
	all := func(parts ...[]string) (list []string) {
		for _, p := range parts {
			list = append(list, p...)
		}
		return list
	}
	good := all(method, scheme, host, path)
	with := func(more ...string) []string { return append(append([]string(nil), good...), more...) }
	// The origin may have been asked before the body shows that it is wrong.
	const late = "a length that is too short"
	for name, test := range map[string]struct {
		headers []string
		body    string
		want    string // "": refused in one way or another
	}{
		"a good request":             {good, "", "200"},
		"a good one with a body":     {with("content-length", "3"), "abc", "200"},
		"pseudo headers behind":      {all(method, scheme, host, []string{"x-a", "b"}, path), "", ""},
		"an unknown pseudo header":   {append([]string{":evil", "1"}, good...), "", ""},
		"a pseudo header of answers": {append([]string{":status", "200"}, good...), "", ""},
		"two paths":                  {append([]string{":path", "/secret"}, good...), "", ""},
		"two methods":                {append([]string{":method", "POST"}, good...), "", ""},
		"two authorities":            {append([]string{":authority", "other.example.org"}, good...), "", ""},
		"no path":                    {all(method, scheme, host), "", ""},
		"an empty path":              {all(method, scheme, host, []string{":path", ""}), "", ""},
		"a path without a slash":     {all(method, scheme, host, []string{":path", "files/a"}), "", ""},
		"no method":                  {all(scheme, host, path), "", ""},
		"no scheme":                  {all(method, host, path), "", ""},
		"no authority":               {all(method, scheme, path), "", ""},
		"another authority":          {all(method, scheme, []string{":authority", "other.example.org"}, path), "", "421"},
		"an authority with a user":   {all(method, scheme, []string{":authority", "a@shop.example.org"}, path), "", ""},
		"a method of two words":      {all([]string{":method", "GET /secret HTTP/1.1\r\nX:"}, scheme, host, path), "", ""},
		"a path of two lines":        {all(method, scheme, host, []string{":path", "/files/a HTTP/1.1\r\nHost: other.example.org\r\n\r\nGET /secret"}), "", ""},
		"capital letters":            {with("X-A", "b"), "", ""},
		"a name with a space":        {with("x a", "b"), "", ""},
		"a name with a colon":        {with("x:a", "b"), "", ""},
		"a name of two lines":        {with("x\r\na", "b"), "", ""},
		"an empty name":              {with("", "b"), "", ""},
		"a value of two lines":       {with("x-a", "b\r\nx-b: c"), "", ""},
		"a value with a bare LF":     {with("x-a", "b\nx-b: c"), "", ""},
		"a value with a NUL":         {with("x-a", "b\x00c"), "", ""},
		"connection":                 {with("connection", "x-a"), "", ""},
		"transfer-encoding":          {with("transfer-encoding", "chunked"), "0\r\n\r\n", ""},
		"upgrade":                    {with("upgrade", "h2c"), "", ""},
		"keep-alive":                 {with("keep-alive", "timeout=5"), "", ""},
		"proxy-connection":           {with("proxy-connection", "x-a"), "", ""},
		"te that is not trailers":    {with("te", "gzip"), "", ""},
		late:                         {with("content-length", "1"), "abc", ""},
		"a length that is no number": {with("content-length", "+3"), "abc", ""},
		"two lengths":                {with("content-length", "3", "content-length", "4"), "abc", ""},
		"CONNECT with a path":        {all([]string{":method", "CONNECT"}, scheme, host, path), "", ""},
		"extended CONNECT, unasked":  {all([]string{":method", "CONNECT", ":protocol", "websocket"}, scheme, host, path), "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil)
			alice := w.staff.client(t, "/eng/alice")
			var whole atomic.Int32
			answer := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				if _, err := io.ReadAll(r.Body); err == nil {
					whole.Add(1)
				}
			})
			w.answer.Store(&answer)
			f := w.frames(t, &alice)
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.headers(test.headers...), EndStream: test.body == "", EndHeaders: true})
			if test.body != "" {
				f.WriteData(1, true, []byte(test.body))
			}
			got := f.outcome(1)
			if got != test.want && (test.want != "" || got == "nothing" || strings.HasPrefix(got, "2")) {
				t.Errorf("the outcome is %q; want %q", got, test.want)
			}
			f.conn.Close()
			w.origin.Close() // when it has answered
			if n := whole.Load(); (n == 1) != (test.want == "200") {
				t.Errorf("the origin has got %d requests that end", n)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if n := len(w.seen); (n == 1) != (test.want == "200") && name != late {
				t.Errorf("the origin has got %d requests, %+v", n, w.seen)
			}
		})
	}
}

// Headers of HTTP/2 without an end, or which a few bytes make large, end their connection before they take much; others are served.
func TestHeadersOfHTTP2AreBounded(t *testing.T) {
	long := strings.Repeat("a", 4000)
	for name, test := range map[string]struct {
		send func(f *frames) error
		want string // "": the connection, or the stream, is over
	}{
		"one of 64 KiB": {func(f *frames) error {
			block := f.headers(":method", "GET", ":scheme", "https", ":authority", "shop.example.org", ":path", "/x", "x-long", strings.Repeat("a", 64<<10))
			if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:16000], EndStream: true}); err != nil {
				return err
			}
			for block = block[16000:]; len(block) > 0; block = block[min(len(block), 16000):] {
				if err := f.WriteContinuation(1, len(block) <= 16000, block[:min(len(block), 16000)]); err != nil {
					return err
				}
			}
			return nil
		}, ""},
		"continuations without end": {func(f *frames) error {
			if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.headers(":method", "GET"), EndStream: true}); err != nil {
				return err
			}
			f.block.Reset()
			f.enc.WriteField(hpack.HeaderField{Name: "x-long", Value: strings.Repeat("\x00", 4000), Sensitive: true}) // in full each time
			block := bytes.Clone(f.block.Bytes())
			for range 20_000 { // 80 MB
				if err := f.WriteContinuation(1, false, block); err != nil {
					return nil // it is over, as it should be
				}
			}
			return errors.New("80 MB of headers were taken")
		}, ""},
		"empty continuations without end": {func(f *frames) error {
			if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.headers(":method", "GET"), EndStream: true}); err != nil {
				return err
			}
			f.conn.SetWriteDeadline(time.Now().Add(await.Limit(5 * time.Second)))
			for range 200_000 {
				if err := f.WriteContinuation(1, false, nil); err != nil {
					return nil
				}
			}
			return f.conn.Close()
		}, ""},
		"a header again and again by its index": {func(f *frames) error {
			block := f.headers(":method", "GET", ":scheme", "https", ":authority", "shop.example.org", ":path", "/x", "x-long", long)
			again := f.headers("x-long", long) // an index
			if len(again) > 4 {
				return fmt.Errorf("the header takes %d bytes the second time", len(again))
			}
			block = append(block, bytes.Repeat(again, 8000)...) // 32 MB
			return f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block, EndStream: true, EndHeaders: true})
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(_ *world, c *Config) { c.Limits.Idle = 500 * time.Millisecond })
			alice, bob := w.staff.client(t, "/eng/alice"), w.staff.client(t, "/eng/bob")
			f := w.frames(t, &alice)
			if err := test.send(f); err != nil && !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
			if got := f.outcome(1); got == "nothing" || strings.HasPrefix(got, "2") {
				t.Errorf("the outcome is %q", got)
			}
			if status, err := w.get(&bob, "/x"); err != nil || status != 200 {
				t.Errorf("another client gets %d, %v; want 200", status, err)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, r := range w.seen {
				if len(r.Header.Get("X-Long")) > 0 {
					t.Error("the origin has got the request")
				}
			}
		})
	}
}

// A client that stalls, in HTTP/2 too, is not waited for.
func TestSlowStreamsOfHTTP2End(t *testing.T) {
	head := []string{":method", "POST", ":scheme", "https", ":authority", "shop.example.org", ":path", "/x"}
	for name, test := range map[string]func(f *frames){
		"headers without an end": func(f *frames) {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.headers(head...)})
		},
		"a part of a frame": func(f *frames) { f.conn.Write([]byte{0, 0, 50, 1}) },
		"a body of a byte": func(f *frames) {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.headers(append(head, "content-length", "1000")...), EndHeaders: true})
			f.WriteData(1, false, []byte("a"))
		},
		"no request": func(*frames) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(_ *world, c *Config) {
				c.Limits.Idle, c.Limits.HeaderTime = 300*time.Millisecond, 300*time.Millisecond
			})
			read := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
			w.answer.Store(&read)
			alice := w.staff.client(t, "/eng/alice")
			f := w.frames(t, &alice)
			test(f)
			if got := f.outcome(1); got == "nothing" || strings.HasPrefix(got, "2") {
				t.Errorf("the outcome is %q; want an end", got)
			}
		})
	}
}

// Who does not read its answer is not written to for ever, by HTTP/1.1 or HTTP/2.
func TestAClientThatDoesNotReadIsLeft(t *testing.T) {
	for _, protocol := range []string{"http/1.1", "h2"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(_ *world, c *Config) { c.Limits.Idle = 300 * time.Millisecond })
			gone := make(chan struct{})
			large := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				defer close(gone)
				for b := make([]byte, 1<<20); ; {
					if _, err := rw.Write(b); err != nil {
						return
					}
				}
			})
			w.answer.Store(&large)
			alice := w.staff.client(t, "/eng/alice")
			if protocol == "h2" {
				f := w.frames(t, &alice)
				f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndStream: true, EndHeaders: true,
					BlockFragment: f.headers(":method", "GET", ":scheme", "https", ":authority", "shop.example.org", ":path", "/x")})
			} else {
				c := w.rawClient(t, &alice)
				io.WriteString(c.tls, "GET /x HTTP/1.1\r\nHost: shop.example.org\r\n\r\n")
			}
			select {
			case <-gone:
			case <-time.After(await.Limit(20 * time.Second)):
				t.Error("the origin is still asked for bytes that nobody takes")
			}
		})
	}
}

// What stands where the origin should be is not asked, or its answer is none.
func TestOriginsThatAreWrongAre502(t *testing.T) {
	for name, test := range map[string]struct {
		settings func(w *world) *tls.Config // nil: no TLS
		speaks   func(c net.Conn)
		asked    bool
	}{
		"expired": {func(w *world) *tls.Config {
			key := newKey(w.t)
			cert := sign(w.t, w.web, key, func(c *x509.Certificate) {
				c.DNSNames, c.ExtKeyUsage, c.NotAfter = []string{"shop.internal"}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, time.Now().Add(-time.Minute)
			})
			return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}}}
		}, nil, false},
		"with a certificate for clients": {func(w *world) *tls.Config {
			key := newKey(w.t)
			cert := sign(w.t, w.web, key, func(c *x509.Certificate) { c.DNSNames = []string{"shop.internal"} })
			return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}}}
		}, nil, false},
		"of TLS 1.2": {func(w *world) *tls.Config {
			return &tls.Config{Certificates: []tls.Certificate{w.web.server(w.t, "shop.internal")}, MaxVersion: tls.VersionTLS12}
		}, nil, false},
		"speaking plain HTTP": {nil, func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello") }, false},
		"that ends at once":   {nil, func(net.Conn) {}, false},
		"that answers nothing of HTTP": {func(w *world) *tls.Config {
			return &tls.Config{Certificates: []tls.Certificate{w.web.server(w.t, "shop.internal")}}
		}, func(c net.Conn) { c.Read(make([]byte, 4096)); io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n") }, true},
		"with headers of 1 MB": {func(w *world) *tls.Config {
			return &tls.Config{Certificates: []tls.Certificate{w.web.server(w.t, "shop.internal")}}
		}, func(c net.Conn) {
			c.Read(make([]byte, 4096))
			io.WriteString(c, "HTTP/1.1 200 OK\r\nX-Long: "+strings.Repeat("a", 1<<20)+"\r\n\r\n")
		}, true},
		"with two lengths": {func(w *world) *tls.Config {
			return &tls.Config{Certificates: []tls.Certificate{w.web.server(w.t, "shop.internal")}}
		}, func(c net.Conn) {
			c.Read(make([]byte, 4096))
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello")
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			w := newWorld(t, func(_ *world, c *Config) { c.Services[0].Origin.Address = addrPort(l.Addr()) })
			var asked atomic.Bool
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					if test.settings != nil {
						s := tls.Server(c, test.settings(w))
						if s.Handshake() != nil {
							c.Close()
							continue
						}
						c = s
						asked.Store(true)
					}
					if test.speaks != nil {
						test.speaks(c)
					}
					c.Close()
				}
			}()
			alice := w.staff.client(t, "/eng/alice")
			if status, err := w.get(&alice, "/x"); err != nil || status != 502 {
				t.Errorf("%d, %v; want 502", status, err)
			}
			w.refused(OriginFailed)
			if asked.Load() && !test.asked {
				t.Error("it was shaken hands with")
			}
		})
	}
}

// A gateway whose clock is wrong refuses, and takes the same clients when it is right again.
func TestAClockThatIsWrongRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		off time.Duration
		why Reason
	}{
		"two hours behind":    {-2 * time.Hour, CertExpired},        // the certificate is not valid yet
		"half an hour behind": {-30 * time.Minute, RevocationStale}, // the list is from the future
		"two hours ahead":     {2 * time.Hour, CertExpired},
	} {
		w := newWorld(t, nil)
		alice := w.staff.client(t, "/eng/alice")
		conn := w.held(&alice)
		w.offset.Store(int64(test.off))
		over(t, conn)
		if status, err := w.get(&alice, "/x"); err == nil {
			t.Errorf("%s: answered with %d", name, status)
		}
		w.refused(test.why)
		w.offset.Store(0)
		if status, err := w.get(&alice, "/x"); err != nil || status != 200 {
			t.Errorf("%s, and right again: %d, %v; want 200", name, status, err)
		}
	}
}

// A ticket that was changed, or is another gateway's, stands for nobody.
func TestTicketsThatAreWrongStandForNobody(t *testing.T) {
	_, _, others := ticketed(t)
	w, _, k := ticketed(t)
	ticket, state, err := k.kept.ResumptionState()
	if err != nil {
		t.Fatal(err)
	}
	text, err := state.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	otherTicket, _, err := others.kept.ResumptionState()
	if err != nil {
		t.Fatal(err)
	}
	bad := map[string][]byte{"another gateway's": otherTicket, "of one byte": {1}, "of 10 KB": make([]byte, 10_000), "cut off": ticket[:len(ticket)-1], "longer": append(bytes.Clone(ticket), 0)}
	for i := 0; i < len(ticket); i += max(1, len(ticket)/16) {
		flipped := bytes.Clone(ticket)
		flipped[i] ^= 1
		bad[fmt.Sprintf("with byte %d changed", i)] = flipped
	}
	for name, b := range bad {
		copied, err := tls.ParseSessionState(text) // a ticket is put into it
		if err != nil {
			t.Fatal(err)
		}
		c, err := tls.NewResumptionState(b, copied)
		if err != nil {
			t.Fatal(err)
		}
		if resumed, status, err := w.resume(nil, &tickets{kept: c}, "shop.example.org"); resumed || err == nil {
			t.Errorf("a ticket %s: resumed %t, answered with %d", name, resumed, status)
		}
	}
	w.refused(CertMissing)
	if resumed, status, err := w.resume(nil, k, "shop.example.org"); !resumed || status != 200 || err != nil {
		t.Errorf("the right one: resumed %t, %d, %v; want a resumption and 200", resumed, status, err)
	}
}
