// Package gateway ends clients' mutual TLS at the edge of a domain: it decides who a client
// is at each handshake, and for each request which rule of the service lets it in, and by
// which chain it goes on. It writes HTTP anew on both sides, and all that it decides into an
// audit log. Of services that are not HTTP it carries whole connections. It opens no
// connection to an origin itself: a Dialer does, which knows how chains are chosen. It needs
// no privilege.
package gateway

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/waystamp/waystamp/internal/gateway/policy"
)

// Gateway serves clients. It is safe for concurrent use.
type Gateway struct {
	config Config
	onward *onward
	ready  chan net.Conn // connections that have shaken hands, for the server of HTTP/1.1
	ready2 chan net.Conn // the same, for that of HTTP/2
	ended  chan struct{}
	end    sync.Once

	life      context.Context // of questions to responders; it ends with Serve
	stop      context.CancelFunc
	asks      sync.WaitGroup // such questions
	refreshes chan struct{}  // those about open sessions

	mu         sync.Mutex
	services   map[string]*service // by name
	hosts      map[string]*service
	sessions   map[*session]bool
	identities map[string]int // open sessions, by service and identity
	requests   map[string]int // of HTTP that are under way, by service and identity
	sources    map[netip.Prefix]int
	handshakes int
	lastID     uint64
	refused    map[Reason]uint64
	letIn      map[string]uint64 // requests, by service
	revoked    map[string]bool   // identities
	strangers  lineBudget        // of refusals without an identity
	known      lineBudget        // of others
}

// service is one with what lives longer than its configuration.
type service struct {
	Service
	tls     *tls.Config
	tickets [][32]byte // the newest first
	renewed time.Time
}

// Tickets of one key are taken for two of these.
const ticketTime = time.Hour

// tick is how often sessions are looked at.
const tick = 250 * time.Millisecond

// New makes a gateway.
func New(c Config) (*Gateway, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	g := &Gateway{
		config: c, ready: make(chan net.Conn), ready2: make(chan net.Conn), ended: make(chan struct{}),
		revoked: setOf(c.Revoked), sessions: map[*session]bool{}, identities: map[string]int{}, requests: map[string]int{}, sources: map[netip.Prefix]int{}, refused: map[Reason]uint64{}, letIn: map[string]uint64{},
	}
	g.life, g.stop = context.WithCancel(context.Background())
	g.refreshes = make(chan struct{}, refreshesMax)
	g.onward = newOnward(c.Dialer, c.Limits, c.Now)
	if err := g.set(c.Services); err != nil {
		return nil, err
	}
	return g, nil
}

// Update replaces the services. Sessions whose identity is not let in any more end, and requests that another rule
// decides about now, with their connection.
func (g *Gateway) Update(services []Service) error {
	if err := g.set(services); err != nil {
		return err
	}
	g.Recheck()
	return g.config.Audit.Write(Record{Event: EventChanged, Text: fmt.Sprintf("%d services", len(services))})
}

func (g *Gateway) set(list []Service) error {
	services, hosts := map[string]*service{}, map[string]*service{}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range list {
		if len(s.Hosts) == 0 || s.Clients == nil || len(s.Certificate.Certificate) == 0 || s.Destinations == nil && !s.Origin.Address.IsValid() {
			return fmt.Errorf("service %q has no host, no clients, no certificate or no origin", s.Name)
		}
		if s.Clients.statuses != nil && g.config.Status == nil {
			return fmt.Errorf("service %q: %w", s.Name, errNoResponder)
		}
		if _, remote := s.Certificate.PrivateKey.(*remoteKey); remote && g.config.Sign == nil {
			return fmt.Errorf("service %q: nobody asks signers for this gateway", s.Name)
		}
		if services[s.Name] != nil {
			return fmt.Errorf("service %q is given twice", s.Name)
		}
		in := &service{Service: s}
		if before := g.services[s.Name]; before != nil {
			in.tickets, in.renewed = before.tickets, before.renewed
			if s.Clients.revocations != nil && before.Clients.revocations != nil && s.Clients.revocations != before.Clients.revocations {
				s.Clients.revocations.carry(before.Clients.revocations)
			}
			if s.Clients.statuses != nil && before.Clients.statuses != nil && s.Clients.statuses != before.Clients.statuses {
				s.Clients.statuses.carry(before.Clients.statuses)
			}
		}
		if err := in.renew(g.config.Now); err != nil {
			return err
		}
		for _, h := range s.Hosts {
			if other := hosts[h]; other != nil {
				return fmt.Errorf("host %s is one of service %s and of service %s", h, other.Name, s.Name)
			}
			hosts[h] = in
		}
		services[s.Name] = in
	}
	g.services, g.hosts = services, hosts
	return nil
}

// renew makes the service's settings of TLS, with a new key for tickets if it is time. Keys of tickets are in memory alone.
func (s *service) renew(clock func() time.Time) error {
	now := clock()
	if len(s.tickets) == 0 || now.Sub(s.renewed) >= ticketTime || now.Before(s.renewed) {
		var key [32]byte
		if _, err := rand.Read(key[:]); err != nil {
			return fmt.Errorf("make a key for tickets of service %s: %w", s.Name, err)
		}
		before := s.tickets[:min(1, len(s.tickets))]
		if now.Sub(s.renewed) >= 2*ticketTime {
			before = nil
		}
		s.tickets, s.renewed = append([][32]byte{key}, before...), now
	} else if s.tls != nil {
		return nil
	}
	s.tls = serverTLS(s.Certificate, clock)
	switch {
	case s.Destinations != nil:
		s.tls.NextProtos = []string{"http/1.1"} // of HTTP/2 a tunnel would be a stream, whose end net/http cannot say by itself
	case s.Opaque.On:
		s.tls.NextProtos = s.Opaque.ALPN
	}
	s.tls.SetSessionTicketKeys(s.tickets)
	return nil
}

func serverTLS(c tls.Certificate, now func() time.Time) *tls.Config {
	return &tls.Config{
		Time:             now,
		MinVersion:       tls.VersionTLS13,
		CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519},
		NextProtos:       []string{"h2", "http/1.1"},
		Certificates:     []tls.Certificate{c},
		ClientAuth:       tls.RequireAnyClientCert, // VerifyConnection verifies, also where a session is resumed
	}
}

// Serve takes connections of a listener until the context ends. All connections are closed then.
func (g *Gateway) Serve(ctx context.Context, l net.Listener) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	server, server2 := g.server(), g.server()
	server2.Protocols = &http.Protocols{}
	server2.Protocols.SetUnencryptedHTTP2(true) // TLS is opened in front of it, where frames are counted
	var wait sync.WaitGroup
	unless := context.AfterFunc(ctx, func() {
		l.Close()
		server.Close()
		server2.Close()
		g.closeAll()
	})
	defer unless()
	wait.Go(func() { g.watch(ctx) })
	wait.Go(func() { server.Serve(handedOver{g, g.ready, l.Addr()}) })
	wait.Go(func() { server2.Serve(handedOver{g, g.ready2, l.Addr()}) })
	var err error
	var pause time.Duration
	for {
		var c net.Conn
		if c, err = l.Accept(); err != nil {
			if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() {
				continue
			}
			if passing(err) && ctx.Err() == nil {
				pause = min(max(2*pause, shortestPause), longestPause)
				g.config.Log.Warn("a connection could not be taken", "err", err, "again_in", pause)
				select {
				case <-time.After(pause):
				case <-ctx.Done():
				}
				continue
			}
			break
		}
		pause = 0
		wait.Go(func() { g.take(ctx, c) })
	}
	asked := ctx.Err() != nil
	stop()
	g.end.Do(func() { close(g.ended) })
	l.Close()
	server.Close()
	g.closeAll()
	g.stop()
	wait.Wait()
	g.asks.Wait()
	g.onward.close()
	if asked {
		return nil
	}
	return fmt.Errorf("accept connections: %w", err)
}

// How long the gateway waits for files and memory to come back before it takes the next connection.
const (
	shortestPause = 5 * time.Millisecond
	longestPause  = 100 * time.Millisecond
)

// passing reports whether accept failed for want of what comes back: files of the process, files of the system, memory.
func passing(err error) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM}, func(e error) bool { return errors.Is(err, e) })
}

// handedOver is the listener of a server of HTTP.
type handedOver struct {
	g     *Gateway
	ready chan net.Conn
	addr  net.Addr
}

func (h handedOver) Accept() (net.Conn, error) {
	select {
	case c := <-h.ready:
		return c, nil
	case <-h.g.ended:
		return nil, net.ErrClosed
	}
}

func (h handedOver) Close() error   { return nil }
func (h handedOver) Addr() net.Addr { return h.addr }

// watch ends sessions when it is time, and renews keys of tickets.
func (g *Gateway) watch(ctx context.Context) {
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		g.Recheck()
		g.refresh()
		g.onward.sweep()
	}
}

// Recheck holds all sessions against certificates, lists and rules as they are now, and ends those that would not
// be let in again. It is called each quarter of a second, and by whoever has taken in a list. A session is verified again when something
// has changed that its verification rests on, and at the first end of what it rests on.
func (g *Gateway) Recheck() {
	now := g.config.Now()
	g.mu.Lock()
	for _, s := range g.services {
		if err := s.renew(g.config.Now); err != nil {
			g.config.Log.Error("a key for tickets could not be made", "err", err)
		}
	}
	var all []*session
	for s := range g.sessions {
		all = append(all, s)
	}
	g.mu.Unlock()
	for _, s := range all {
		if err := g.allowed(s, now); err != nil {
			g.endSession(s, err)
			continue
		}
		g.endIdle(s, now)
	}
}

// allowed reports why a session would not be let in any more.
func (g *Gateway) allowed(s *session, now time.Time) error {
	in := g.service(s.service)
	if in == nil || !slices.Contains(in.Hosts, s.host) {
		return refuse(SNIUnknown, "the service is not there any more")
	}
	if in.Opaque.On != (s.carried != nil) || (in.Destinations != nil) != s.proxied {
		return refuse(Handshake, "the service has another protocol now")
	}
	s.mu.Lock()
	before, of := s.stood, s.of
	s.mu.Unlock()
	if of == in && before.holds(in.Clients, now) {
		return g.isRevoked(s.identity)
	}
	who, stands, err := g.verify(in.Clients, s.shown, now, before)
	if err != nil {
		return err
	}
	if who != s.identity {
		return refuse(CertIdentity, "the certificate is of another identity now")
	}
	if s.known && !in.Rules.Knows(who) {
		return refuse(RuleNone, "no rule is for this identity any more")
	}
	for _, r := range s.underWay() {
		i := in.Rules.Decide(r.Request)
		if i < 0 {
			return refuse(RuleNone, "no rule lets a request in any more that is under way")
		}
		if in.Rules[i].Chain() != r.chain {
			return refuse(RuleNone, "a request that is under way would take another chain now")
		}
		if r.to.IsValid() && in.leads(r.Host) != r.to {
			return refuse(RuleNone, "%s leads to another address now", r.Host)
		}
	}
	s.mu.Lock()
	s.stood, s.of = stands, in
	s.mu.Unlock()
	return nil
}

// service is one as it is now; nil: it is not there any more.
func (g *Gateway) service(name string) *service {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.services[name]
}

// Refused counts refusals by their reason.
func (g *Gateway) Refused() map[Reason]uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	m := map[Reason]uint64{}
	for r, n := range g.refused {
		m[r] = n
	}
	return m
}

// ServiceCount counts what a service has let in.
type ServiceCount struct {
	Sessions int    // that are open
	Requests uint64 // since the start; a session of bytes that the gateway does not read is one
}

// Counts are those of each service that has let somebody in.
func (g *Gateway) Counts() map[string]ServiceCount {
	g.mu.Lock()
	defer g.mu.Unlock()
	m := map[string]ServiceCount{}
	for service, n := range g.letIn {
		m[service] = ServiceCount{Requests: n}
	}
	for s := range g.sessions {
		c := m[s.service]
		c.Sessions++
		m[s.service] = c
	}
	return m
}

func (g *Gateway) countRequest(service string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.letIn[service]++
}

// Sessions is how many are open.
func (g *Gateway) Sessions() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.sessions)
}

// Opened is how many sessions have been opened.
func (g *Gateway) Opened() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.lastID
}

// note counts a refusal, and writes it into the audit log. Strangers cannot fill the log, and not
// take the lines of those who have an identity: each of the two has so many, and what has none is counted in the next one of its kind.
func (g *Gateway) note(r Record, err error) {
	r.Event, r.Reason, r.Text = EventRefused, reasonOf(err, Handshake), shorten(err.Error(), 500)
	g.mu.Lock()
	g.refused[r.Reason]++
	lines := &g.strangers
	if r.Identity != "" {
		lines = &g.known
	}
	write := lines.take(g.config.Now())
	if write {
		r.Omitted, lines.omitted = lines.omitted, 0
	} else {
		lines.omitted++
	}
	g.mu.Unlock()
	if write {
		if err := g.config.Audit.Write(r); err != nil {
			g.config.Log.Error("a refusal is not in the audit log", "err", err)
		}
	}
}

// lineBudget bounds the lines about refusals.
type lineBudget struct {
	second  int64
	used    int
	omitted uint64
}

const refusalsPerSecond = 100

func (b *lineBudget) take(now time.Time) bool {
	if s := now.Unix(); s != b.second {
		b.second, b.used = s, 0
	}
	b.used++
	return b.used <= refusalsPerSecond
}

func shorten(s string, most int) string {
	if len(s) > most {
		s = s[:most]
	}
	return strings.ToValidUTF8(s, "\ufffd")
}

// inFlight is a request that was let in and has not ended.
type inFlight struct {
	policy.Request
	chain string
	to    netip.AddrPort // that it is carried to; zero: it is a request of HTTP, which ends by itself
}
