package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/waystamp/waystamp/internal/model"
)

// session is a connection of a client that has shaken hands.
type session struct {
	id       uint64
	service  string // its name; the settings may change
	host     string // the server name that the client asked for
	identity string
	shown    []*x509.Certificate
	serial   string
	client   netip.AddrPort
	conn     net.Conn
	known    bool // some rule was for the identity when it came
	since    time.Time
	resumed  bool

	mu       sync.Mutex
	stood    standing // when the session was verified last
	of       *service // by whose settings; nil: it has not been since the handshake
	requests map[uint64]inFlight
	last     uint64
	chains   map[string]bool // that requests have taken, chainsShown at most
	over     bool
	why      Reason   // for which the gateway has ended it
	onward   net.Conn // of a carried session, once it is open

	carried *carried // nil: the session is of HTTP
	proxied bool     // the client names the destination first
}

func (s *session) underWay() []inFlight {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []inFlight
	for _, r := range s.requests {
		list = append(list, r)
	}
	return list
}

// begin enters a request. It is false if the session has ended.
func (s *session) begin(r inFlight) (number uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return 0, false
	}
	s.last++
	s.requests[s.last] = r
	if len(s.chains) < chainsShown {
		s.chains[r.chain] = true
	}
	return s.last, true
}

func (s *session) done(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.requests, number)
}

// conn is a client's connection, below TLS.
type conn struct {
	net.Conn
	session *session    // once it has shaken hands
	closed  func()      // called once
	whole   atomic.Bool // its end is to be announced by TLS
	waits   atomic.Bool // deadlines for writing are not set
	once    sync.Once
}

// NetConn is the connection below.
func (c *conn) NetConn() net.Conn { return c.Conn }

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.whole.Load() && errors.Is(err, io.EOF) {
		err = errCut // crypto/tls takes the end of TCP between two records for an end
	}
	return n, err
}

func (c *conn) SetWriteDeadline(at time.Time) error {
	if c.waits.Load() {
		return nil
	}
	return c.Conn.SetWriteDeadline(at)
}

func (c *conn) Close() error {
	err := c.Conn.Close()
	c.once.Do(c.closed)
	return err
}

func remote(c net.Conn) netip.AddrPort { return addrPort(c.RemoteAddr()) }
func local(c net.Conn) netip.AddrPort  { return addrPort(c.LocalAddr()) }

func addrPort(of net.Addr) netip.AddrPort {
	a, err := netip.ParseAddrPort(of.String())
	if err != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// source is what handshakes are counted by: one client has a whole /64 of IPv6.
func source(a netip.Addr) netip.Prefix {
	bits := 64
	if a.Is4() {
		bits = 32
	}
	p, _ := a.Prefix(bits)
	return p
}

// admit counts a handshake that begins, before anything is computed for it.
func (g *Gateway) admit(from netip.Prefix) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.config.Limits
	switch {
	case g.handshakes >= l.Handshakes:
		return refuse(Limit, "%d handshakes are under way", g.handshakes)
	case g.sources[from] >= l.HandshakesOf:
		return refuse(Limit, "%d handshakes of %s are under way", g.sources[from], from)
	case len(g.sessions) >= l.Connections:
		return refuse(Limit, "%d connections are open", len(g.sessions))
	}
	g.handshakes++
	g.sources[from]++
	return nil
}

func (g *Gateway) release(from netip.Prefix) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.handshakes--
	if g.sources[from]--; g.sources[from] == 0 {
		delete(g.sources, from)
	}
}

// A client of TLS 1.3 may have sent a request before the alert that refuses its certificate
// comes. Closed with bytes that nobody has read, TCP would send RST, and the client's
// system would forget the alert.
const (
	unreadTime  = 500 * time.Millisecond
	unreadBytes = 64 << 10
)

// closeUnread ends what is sent, and takes what the client sends still for a moment.
func closeUnread(c net.Conn) {
	half, ok := c.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil || c.SetReadDeadline(time.Now().Add(unreadTime)) != nil {
		return
	}
	io.CopyN(io.Discard, c, unreadBytes)
}

// take shakes hands, and hands the connection to the server of HTTP, or carries it.
func (g *Gateway) take(ctx context.Context, raw net.Conn) {
	client := remote(raw)
	about := Record{Client: client.String()}
	from := source(client.Addr())
	if err := g.admit(from); err != nil {
		raw.Close()
		g.note(about, err)
		return
	}
	c := &conn{Conn: raw, closed: func() {}}
	h := &handshake{gateway: g, client: client, at: local(raw)}
	secured := tls.Server(c, &tls.Config{GetConfigForClient: h.settings, MinVersion: tls.VersionTLS13})
	limited, stop := context.WithTimeout(ctx, g.config.Limits.HandshakeTime)
	err := secured.HandshakeContext(limited)
	stop()
	about.Service, about.Host = h.service, shorten(h.host, 300)
	if err != nil {
		g.note(about, h.why(err))
		closeUnread(c.Conn)
		c.Close()
		g.release(from) // and not before: who is refused and stays holds a file
		return
	}
	state := secured.ConnectionState()
	s := &session{
		service: h.service, host: h.host, identity: h.identity, shown: state.PeerCertificates,
		serial: fmt.Sprintf("%x", state.PeerCertificates[0].SerialNumber), client: client, conn: c, known: h.known, stood: h.stood,
		since: g.config.Now(), resumed: state.DidResume, requests: map[uint64]inFlight{}, chains: map[string]bool{},
	}
	if h.opaque.On {
		s.carried, s.proxied = &carried{idle: h.opaque.Idle}, h.proxied
		s.carried.moved.Store(s.since.UnixNano())
	}
	about.Identity, about.Serial, about.Resumed = s.identity, s.serial, state.DidResume
	c.session, c.closed = s, func() { g.forget(s) }
	err = g.open(s, about)
	g.release(from)
	if err != nil {
		c.Close()
		g.note(about, err)
		return
	}
	// What has changed since the handshake, before the session could be found, counts.
	if err := g.allowed(s, g.config.Now()); err != nil {
		g.endSession(s, err)
		return
	}
	if s.carried != nil && !s.proxied {
		g.carry(ctx, s, secured)
		return
	}
	var served net.Conn = secured
	ready := g.ready
	if state.NegotiatedProtocol == "h2" {
		l := g.config.Limits
		served = &framed{Conn: secured, frames: frameCount{resetsMax: l.Resets, controlMax: l.ControlFrames}, now: g.config.Now, over: func(why error) { g.endSession(s, why) }}
		ready = g.ready2
	}
	select {
	case ready <- served:
	case <-g.ended:
		c.Close()
	case <-ctx.Done():
		c.Close()
	}
}

// open enters a session, if the log takes it.
func (g *Gateway) open(s *session, about Record) error {
	key := s.service + "\x00" + s.identity
	g.mu.Lock()
	if n := g.identities[key]; n >= g.config.Limits.ConnectionsIdentity {
		g.mu.Unlock()
		return refuse(Limit, "%d connections of %s are open", n, s.identity)
	}
	g.identities[key]++
	g.lastID++
	s.id = g.lastID
	g.mu.Unlock()
	about.Event, about.Session = EventOpened, s.id
	err := g.config.Audit.Write(about)
	g.mu.Lock()
	defer g.mu.Unlock()
	if err != nil {
		g.leaveLocked(key)
		return &Refusal{AuditFailed, err}
	}
	g.sessions[s] = true
	return nil
}

// enter counts a request of an identity that begins; leave undoes it.
func (g *Gateway) enter(s *session) (leave func(), err error) {
	key := s.service + "\x00" + s.identity
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := g.requests[key]; n >= g.config.Limits.RequestsIdentity {
		return nil, refuse(Limit, "%d requests of %s are under way", n, s.identity)
	}
	g.requests[key]++
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.requests[key]--; g.requests[key] == 0 {
			delete(g.requests, key)
		}
	}, nil
}

func (g *Gateway) leaveLocked(key string) {
	if g.identities[key]--; g.identities[key] == 0 {
		delete(g.identities, key)
	}
}

func (g *Gateway) drop(s *session) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.sessions[s] {
		return false
	}
	delete(g.sessions, s)
	g.leaveLocked(s.service + "\x00" + s.identity)
	return true
}

// forget is the end of a session, whoever has closed its connection.
func (g *Gateway) forget(s *session) {
	if !g.drop(s) {
		return
	}
	s.mu.Lock()
	why := s.why
	s.mu.Unlock()
	if err := g.config.Audit.Write(Record{Event: EventClosed, Session: s.id, Service: s.service, Client: s.client.String(), Identity: s.identity, Reason: why}); err != nil {
		g.config.Log.Error("the end of a session is not in the audit log", "err", err)
	}
}

// endSession closes a connection that would not be let in any more.
func (g *Gateway) endSession(s *session, why error) {
	s.mu.Lock()
	first := !s.over
	if first {
		s.over, s.why = true, reasonOf(why, Handshake)
	}
	s.mu.Unlock()
	if !first {
		return
	}
	g.note(Record{Session: s.id, Service: s.service, Client: s.client.String(), Identity: s.identity, Serial: s.serial}, why)
	if s.carried != nil {
		s.cut()
	} else {
		s.conn.Close()
	}
	g.onward.drop(s.service, s.identity)
}

func (g *Gateway) closeAll() {
	g.mu.Lock()
	var all []*session
	for s := range g.sessions {
		all = append(all, s)
	}
	g.mu.Unlock()
	for _, s := range all {
		s.mu.Lock()
		s.over = true
		s.mu.Unlock()
		s.conn.Close()
	}
}

// handshake is what is known of a connection until it has shaken hands.
type handshake struct {
	gateway  *Gateway
	client   netip.AddrPort
	at       netip.AddrPort // that the client has connected to
	service  string
	host     string
	identity string
	known    bool
	opaque   model.Opaque
	proxied  bool
	stood    standing
	refusal  error
}

// settings finds the service that a client asks for. Without a certificate TLS answers unrecognized_name.
func (h *handshake) settings(hello *tls.ClientHelloInfo) (*tls.Config, error) {
	h.host = strings.ToLower(hello.ServerName)
	h.gateway.mu.Lock()
	s := h.gateway.hosts[h.host]
	if s != nil && s.Address.IsValid() && s.Address != h.at {
		s = nil // another address's
	}
	var settings *tls.Config
	if s != nil {
		settings = s.tls.Clone()
	}
	h.gateway.mu.Unlock()
	if s == nil {
		h.refusal = refuse(SNIUnknown, "no service at %s has host %q", h.at, shorten(h.host, 300))
		if h.host == "" {
			h.refusal = refuse(SNIUnknown, "the client names no host")
		}
		return &tls.Config{MinVersion: tls.VersionTLS13}, nil
	}
	h.service, h.opaque, h.proxied = s.Name, s.Opaque, s.Destinations != nil
	if k, remote := s.Certificate.PrivateKey.(*remoteKey); remote {
		settings.Certificates = []tls.Certificate{s.Certificate}
		settings.Certificates[0].PrivateKey = &askedKey{k, h, hello.Context()}
	}
	settings.VerifyConnection = func(state tls.ConnectionState) error {
		h.identity, h.stood, h.refusal = h.gateway.verifyShown(hello.Context(), s.Clients, state.PeerCertificates)
		h.known = s.Rules.Knows(h.identity)
		if h.refusal == nil && s.Opaque.On && s.Destinations == nil {
			h.refusal = s.admits(h.identity, h.host, state.NegotiatedProtocol)
		}
		return h.refusal
	}
	return settings, nil
}

// admits reports why a client of an opaque service is refused although its certificate is good: all that
// rules look at is known with the handshake.
func (s *Service) admits(identity, host, protocol string) error {
	if len(s.Opaque.ALPN) > 0 && protocol == "" {
		return refuse(Handshake, "the client offers none of the service's protocols (ALPN), %s", strings.Join(s.Opaque.ALPN, ", "))
	}
	_, err := decideOpaque(s.Rules, identity, host)
	return err
}

// why is the reason for which a handshake has failed.
func (h *handshake) why(err error) error {
	switch {
	case h.refusal != nil:
		return h.refusal
	case strings.Contains(err.Error(), "client didn't provide a certificate"):
		return &Refusal{CertMissing, errors.New("the client shows no certificate")}
	case errors.Is(err, context.DeadlineExceeded):
		return refuse(Limit, "the handshake took longer than %s", h.gateway.config.Limits.HandshakeTime)
	}
	return &Refusal{Handshake, err}
}
