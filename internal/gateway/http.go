package gateway

import (
	"context"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/gateway/policy"
)

type sessionKey struct{}
type decisionKey struct{}

// flushDelay is how long a part of an answer with a Content-Length waits for more of it. httputil.ReverseProxy sends parts of other answers
// at once: request and answer may overlap there, as in gRPC.
const flushDelay = 5 * time.Millisecond

// buffers are what httputil.ReverseProxy copies answers with, of 32 KiB each.
type buffers struct{}

var bufferPool = sync.Pool{New: func() any { return new([32 << 10]byte) }}

func (buffers) Get() []byte  { return bufferPool.Get().(*[32 << 10]byte)[:] }
func (buffers) Put(b []byte) { bufferPool.Put((*[32 << 10]byte)(b)) }

// server reads HTTP from connections that have shaken hands.
func (g *Gateway) server() *http.Server {
	l := g.config.Limits
	h := &handler{gateway: g}
	h.proxy = &httputil.ReverseProxy{
		Rewrite:        h.rewrite,
		Transport:      h,
		ModifyResponse: h.answer,
		ErrorHandler:   h.failed,
		FlushInterval:  flushDelay,
		BufferPool:     buffers{},
		ErrorLog:       log.New(io.Discard, "", 0),
	}
	return &http.Server{
		Handler:                      h,
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            l.HeaderTime,
		IdleTimeout:                  l.Idle,
		MaxHeaderBytes:               l.HeaderBytes,
		HTTP2:                        &http.HTTP2Config{MaxConcurrentStreams: l.Streams},
		ErrorLog:                     slog.NewLogLogger(g.config.Log.Handler(), slog.LevelDebug), // strangers write there
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, sessionKey{}, c.(interface{ NetConn() net.Conn }).NetConn().(*conn).session)
		},
	}
}

// handler decides about requests.
type handler struct {
	gateway *Gateway
	proxy   *httputil.ReverseProxy
}

// decision is what was decided about a request that is let in.
type decision struct {
	session *session
	service *service
	chain   string
	path    string // as it goes on, encoded
	cleaned string // decoded
	plain   bool   // the path goes on as it came
	http2   bool   // to the origin
	sealed  bool   // another end opens the session with the origin
	counted *counter
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g := h.gateway
	s := r.Context().Value(sessionKey{}).(*session)
	if s.proxied {
		g.connect(w, r, s)
		return
	}
	about := Record{Session: s.id, Service: s.service, Client: s.client.String(), Identity: s.identity, Serial: s.serial,
		Method: shorten(r.Method, 64), Host: shorten(r.Host, 300), Path: shorten(r.URL.EscapedPath(), 2048)}
	leave, err := g.enter(s)
	if err != nil {
		g.note(about, err)
		w.Header().Set("Retry-After", "1")
		deny(w, r, Limit)
		return
	}
	defer leave()
	var d *decision
	var rule int
	var number uint64
	for {
		var asked policy.Request
		var err error
		if d, asked, rule, err = g.decide(s, r); err != nil {
			g.note(about, err)
			deny(w, r, reasonOf(err, RuleNone))
			return
		}
		var ok bool
		if number, ok = s.begin(inFlight{Request: asked, chain: d.chain}); !ok {
			panic(http.ErrAbortHandler) // its connection is closed
		}
		// Recheck sees it from here on. What has changed between the two is decided about anew.
		if g.service(s.service) == d.service {
			break
		}
		s.done(number)
	}
	defer s.done(number)
	g.countRequest(s.service)
	about.Event, about.Request, about.Rule, about.Chain = EventDecided, number, rule+1, d.chain
	if err := g.config.Audit.Write(about); err != nil {
		g.note(about, &Refusal{AuditFailed, err})
		deny(w, r, AuditFailed)
		return
	}
	control := http.NewResponseController(w)
	r.Body = &patient{r.Body, control, g.config.Limits.Idle}
	counted := &counter{ResponseWriter: w, control: control, idle: g.config.Limits.Idle}
	control.SetWriteDeadline(time.Time{}) // of the request before
	defer func() {
		if r.ProtoMajor == 1 {
			control.SetWriteDeadline(time.Now().Add(g.config.Limits.Idle)) // for what the server still holds
		}
		end := Record{Event: EventEnded, Session: s.id, Request: number, Service: s.service, Identity: s.identity, Chain: d.chain, Status: counted.status, Bytes: counted.bytes}
		if err := g.config.Audit.Write(end); err != nil {
			g.config.Log.Error("the end of a request is not in the audit log", "err", err)
		}
	}()
	d.counted = counted
	h.proxy.ServeHTTP(counted, r.WithContext(context.WithValue(r.Context(), decisionKey{}, d)))
}

// decide finds the rule for a request.
func (g *Gateway) decide(s *session, r *http.Request) (d *decision, asked policy.Request, rule int, err error) {
	in := g.service(s.service)
	if in == nil {
		return nil, asked, 0, refuse(SNIUnknown, "the service is not there any more")
	}
	asked, raw, err := in.asked(s.identity, s.host, r)
	if err != nil {
		return nil, asked, 0, err
	}
	if rule, err = decide(in.Rules, asked); err != nil {
		return nil, asked, 0, err
	}
	unescaped, _ := url.PathUnescape(raw)
	d = &decision{session: s, service: in, chain: in.Rules[rule].Chain(), cleaned: asked.Path, path: raw, plain: unescaped == asked.Path, http2: needsHTTP2(r)}
	d.sealed = g.config.Dialer.Sealed(d.chain)
	return d, asked, rule, nil
}

// asked is what rules look at of a request on a connection of a host; raw is its path as it came.
func (s *Service) asked(identity, host string, r *http.Request) (asked policy.Request, raw string, err error) {
	its, port, found := strings.Cut(strings.ToLower(r.Host), ":")
	if its != host || found && port != strconv.Itoa(int(s.Port)) {
		return asked, "", refuse(HostMismatch, "the request is for host %q, the connection for %s", shorten(r.Host, 300), host)
	}
	// OPTIONS * is about the server and no path; TRACE would show the client what the gateway adds.
	if r.Method == http.MethodConnect || r.Method == http.MethodTrace || r.URL.Path == "*" {
		return asked, "", refuse(MethodRefused, "method %s for %q is not served", shorten(r.Method, 64), shorten(r.URL.Path, 64))
	}
	// In HTTP/2 net/http takes one that it cannot read for 0, and the first of several.
	if length := r.Header["Content-Length"]; len(length) > 0 {
		if _, err := strconv.ParseUint(length[0], 10, 63); err != nil || len(length) > 1 {
			return asked, "", refuse(RequestMalformed, "the length of the content is %q", shorten(strings.Join(length, ", "), 64))
		}
	}
	// "x:http://host/a" has no path for net/url, and goes on whole.
	if r.URL.Opaque != "" {
		return asked, "", refuse(PathAmbiguous, "the target %q is neither a path nor a URL with a host", shorten(r.URL.String(), 300))
	}
	raw = r.URL.EscapedPath()
	if raw == "" {
		raw = "/" // RFC 9110 section 4.2.3
	}
	path, err := policy.Clean(raw)
	if err != nil {
		return asked, raw, refuse(PathAmbiguous, "the path %w", err)
	}
	return policy.Request{Identity: identity, Host: its, Method: r.Method, Path: path, Header: s.decidable(r.Header)}, raw, nil
}

// decide finds the rule that lets a request in.
func decide(rules policy.Rules, asked policy.Request) (int, error) {
	rule := rules.Decide(asked)
	if rule < 0 {
		return rule, refuse(RuleNone, "no rule lets %s %s in", shorten(asked.Method, 64), shorten(asked.Path, 300))
	}
	return rule, nil
}

// needsHTTP2 reports whether a request means something in HTTP/2 alone: gRPC.
func needsHTTP2(r *http.Request) bool {
	kind := r.Header.Get("Content-Type")
	return r.ProtoMajor == 2 && (kind == "application/grpc" || strings.HasPrefix(kind, "application/grpc+") || strings.HasPrefix(kind, "application/grpc;"))
}

var statuses = map[Reason]int{
	HostMismatch: http.StatusMisdirectedRequest, PathAmbiguous: http.StatusBadRequest, MethodRefused: http.StatusMethodNotAllowed,
	Limit: http.StatusTooManyRequests, RuleNone: http.StatusForbidden, DestinationUnknown: http.StatusForbidden, RequestMalformed: http.StatusBadRequest, SNIUnknown: http.StatusMisdirectedRequest, AuditFailed: http.StatusServiceUnavailable, OriginFailed: http.StatusBadGateway,
}

// deny answers a request that is not let in. The page says no more than the status.
func deny(w http.ResponseWriter, r *http.Request, why Reason) {
	status := statuses[why]
	if status == 0 {
		status = http.StatusForbidden
	}
	w.Header().Set("Cache-Control", "no-store")
	if r.ProtoMajor == 1 {
		// Its body is not read, or in part, and not waited for.
		w.Header().Set("Connection", "close")
		http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Second))
	}
	http.Error(w, http.StatusText(status), status)
}

// Headers that speak to the origin about the client, or change what was decided about: from the gateway alone.
var (
	removed = []string{
		"Client-Cert", "Client-Cert-Chain", "Forwarded", "Forwarded-For", "X-Forwarded", "X-Real-Ip", "X-Http-Method-Override", "X-Http-Method", "X-Method-Override",
		"X-Host", "X-Http-Host-Override", "True-Client-Ip", "Client-Ip", "X-Cluster-Client-Ip", "Cf-Connecting-Ip", "Cf-Connecting-Ipv6", "Fastly-Client-Ip", "Fly-Client-Ip",
		"X-Proxyuser-Ip", "X-Spiffe-Id", "X-User", "X-Email", "X-Groups", "Proxy", "Proxy-User",
	}
	removedPrefixes = []string{
		"X-Forwarded-", "X-Ssl-", "X-Tls-", "X-Original-", "X-Rewrite-", "X-Auth-Request-", "X-Authenticated-", "X-Client-", "X-Remote-", "X-Webauth-", "X-Envoy-", "X-Arr-",
		"Remote-", "Ssl-", "Cf-Access-", "X-Amzn-Mtls-", "X-Amzn-Oidc-", "X-Goog-Authenticated-User-", "X-Goog-Iap-", "X-Ms-Client-Principal", "X-Ms-Token-",
	}
	// RFC 9110 section 7.6.1 and what is older. net/http takes Transfer-Encoding and Trailer out by itself.
	hopByHop = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade", "Http2-Settings"}
)

// hyphened is the name as which many read a header: for CGI and its heirs all signs but letters and digits are alike.
func hyphened(name string) string {
	return textproto.CanonicalMIMEHeaderKey(strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' {
			return c
		}
		return '-'
	}, name))
}

func isRemoved(name string) bool {
	name = hyphened(name)
	return slices.Contains(removed, name) || slices.ContainsFunc(removedPrefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// isRemoved reports whether what clients send under a name does not go on.
func (s *Service) isRemoved(name string) bool {
	plain := hyphened(name)
	return isRemoved(name) || slices.ContainsFunc(s.Headers.List(), func(own string) bool { return own != "" && hyphened(own) == plain })
}

// tell says to the origin who the client is.
func (s *Service) tell(out http.Header, who *session) {
	set := func(name, value string) {
		if name != "" {
			out.Set(name, value)
		}
	}
	cert := who.shown[0].Raw
	if s.Headers.Certificate != "" {
		// RFC 9440 section 2.2: a byte sequence of structured fields.
		set(s.Headers.Certificate, ":"+base64.StdEncoding.EncodeToString(cert)+":")
	}
	if s.Headers.PEM != "" {
		set(s.Headers.PEM, strings.ReplaceAll(url.QueryEscape(string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}))), "+", "%20"))
	}
	set(s.Headers.Identity, who.identity)
	set(s.Headers.Serial, who.serial)
}

// decidable gives the headers that rules look at: those that go on to the origin. One that is there under another name too,
// or alone, which some read as the same, has no value that is sure.
func (s *Service) decidable(all http.Header) func(name string) []string {
	gone := slices.Clone(hopByHop)
	for _, v := range all["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			gone = append(gone, textproto.CanonicalMIMEHeaderKey(textproto.TrimString(name)))
		}
	}
	values, unsure := http.Header{}, map[string]bool{}
	for name, v := range all {
		plain := hyphened(name)
		switch {
		case slices.Contains(gone, name) || s.isRemoved(name):
		case name == plain:
			values[name] = slices.Clone(v)
		default:
			unsure[plain] = true
		}
	}
	return func(name string) []string {
		if unsure[textproto.CanonicalMIMEHeaderKey(name)] {
			return nil
		}
		return values.Values(name)
	}
}

// rewrite makes the request for the origin. Headers of one hop, and those that Connection names, are gone already.
func (h *handler) rewrite(p *httputil.ProxyRequest) {
	d := p.In.Context().Value(decisionKey{}).(*decision)
	out := p.Out
	for name := range out.Header {
		if d.service.isRemoved(name) {
			delete(out.Header, name)
		}
	}
	out.Trailer = nil // a client's trailers come behind all checks
	out.Header.Del("Trailer")
	// What follows h2c would be HTTP that nobody decides about.
	if up := strings.ToLower(out.Header.Get("Upgrade")); up != "" && up != "websocket" {
		out.Header.Del("Upgrade")
		out.Header.Del("Connection")
	}
	d.service.tell(out.Header, d.session)
	out.Host = d.session.host
	// Of the client's URL nothing goes on but what is named here. The transport knows the address and the seal.
	in := p.In.URL
	out.URL = &url.URL{Scheme: "http", Host: d.session.host, Path: d.cleaned, RawQuery: in.RawQuery, ForceQuery: in.ForceQuery}
	if d.service.Origin.Roots != nil && !d.sealed {
		out.URL.Scheme = "https"
	}
	if d.plain {
		out.URL.RawPath = d.path // as it came
	}
}

// RoundTrip sends a request to the origin, by the client's own connections.
func (h *handler) RoundTrip(r *http.Request) (*http.Response, error) {
	d := r.Context().Value(decisionKey{}).(*decision)
	return h.gateway.onward.roundTrip(r, d)
}

func (h *handler) answer(r *http.Response) error {
	r.Header.Del("Alt-Svc") // leads around the gateway
	r.Header.Del("Client-Cert")
	for _, name := range r.Request.Context().Value(decisionKey{}).(*decision).service.Headers.List() {
		r.Header.Del(name)
	}
	if r.StatusCode == http.StatusSwitchingProtocols {
		r.Request.Context().Value(decisionKey{}).(*decision).counted.status = r.StatusCode
	}
	return nil
}

func (h *handler) failed(w http.ResponseWriter, r *http.Request, err error) {
	d := r.Context().Value(decisionKey{}).(*decision)
	if errors.Is(err, context.Canceled) && r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // the client has gone
	}
	h.gateway.note(Record{Session: d.session.id, Service: d.session.service, Client: d.session.client.String(), Identity: d.session.identity, Chain: d.chain},
		&Refusal{OriginFailed, err})
	deny(w, r, OriginFailed)
}

// counter notes the status of an answer and its length. The client has so long for each part of it.
type counter struct {
	http.ResponseWriter
	control *http.ResponseController
	idle    time.Duration
	status  int
	bytes   int64
}

func (c *counter) WriteHeader(status int) {
	if c.status < 200 {
		c.status = status
	}
	c.ResponseWriter.WriteHeader(status)
}

func (c *counter) Write(b []byte) (int, error) {
	if c.status < 200 {
		c.status = http.StatusOK
	}
	c.control.SetWriteDeadline(time.Now().Add(c.idle))
	n, err := c.ResponseWriter.Write(b)
	c.control.SetWriteDeadline(time.Time{})
	c.bytes += int64(n)
	return n, err
}

// FlushError is what the proxy calls behind each part.
func (c *counter) FlushError() error {
	c.control.SetWriteDeadline(time.Now().Add(c.idle))
	defer c.control.SetWriteDeadline(time.Time{})
	return c.control.Flush()
}

// Unwrap lets connections be upgraded.
func (c *counter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// patient is a body that has so long for each byte.
type patient struct {
	io.ReadCloser
	control *http.ResponseController
	idle    time.Duration
}

func (p *patient) Read(b []byte) (int, error) {
	p.control.SetReadDeadline(time.Now().Add(p.idle))
	n, err := p.ReadCloser.Read(b)
	if err == io.EOF {
		p.control.SetReadDeadline(time.Time{})
	}
	return n, err
}
