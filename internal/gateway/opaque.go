package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/waystamp/waystamp/internal/gateway/policy"
	"github.com/waystamp/waystamp/internal/seal"
)

// carried is what is counted of a session whose bytes go on as they are.
type carried struct {
	idle     time.Duration
	moved    atomic.Int64 // when the last byte went on, in nanoseconds of the gateway's clock
	received atomic.Int64 // bytes of the client's that went on
	sent     atomic.Int64 // bytes to the client
}

// carryBuffer is the length in bytes of what is read at once: a record of TLS (RFC 8446 section 5.1).
const carryBuffer = 1 << 14

// errCut is the end of a connection that TLS has not announced (close_notify, RFC 8446 section 6.1).
var errCut = errors.New("cut off: it ended without a close_notify")

// opaque is what rules look at of a connection whose bytes are not read; host is a destination's name in a proxy.
func opaque(identity, host string) policy.Request {
	return policy.Request{Identity: identity, Host: host, Header: func(string) []string { return nil }}
}

// decideOpaque finds the rule that lets a connection in.
func decideOpaque(rules policy.Rules, identity, host string) (int, error) {
	rule := rules.Decide(opaque(identity, host))
	if rule < 0 {
		return rule, refuse(RuleNone, "no rule lets connections of %s to %s in", identity, shorten(host, 300))
	}
	return rule, nil
}

// errOver is that a session has ended meanwhile.
var errOver = errors.New("the session has ended")

// carry takes a connection of an opaque service to its origin.
func (g *Gateway) carry(ctx context.Context, s *session, client *tls.Conn) {
	protocol := seal.Opaque
	if name := client.ConnectionState().NegotiatedProtocol; name != "" {
		protocol += "/" + name
	}
	about := Record{Session: s.id, Service: s.service, Client: s.client.String(), Identity: s.identity, Serial: s.serial, Host: s.host}
	err := g.carryTo(ctx, s, about, protocol, func() (halfCloser, error) { return &clientLeg{Conn: client, under: s.conn.(*conn)}, nil })
	if err != nil {
		if !errors.Is(err, errOver) {
			g.note(about, err)
		}
		s.cut()
	}
}

// carryTo finds the rule for a connection to about.Host, opens the way onward by its chain, takes the client's connection from
// begin, and returns when both have ended. An end that one side announces goes on to the other one, which may go on to
// send. Everything else resets both: what was cut off never looks complete. On an error nothing was taken of begin.
func (g *Gateway) carryTo(ctx context.Context, s *session, about Record, protocol string, begin func() (halfCloser, error)) error {
	s.carried.moved.Store(g.config.Now().UnixNano())
	var in *service
	var rule int
	var number uint64
	var to netip.AddrPort
	for {
		var err error
		if in = g.service(s.service); in == nil {
			return refuse(SNIUnknown, "the service is not there any more")
		}
		if to = in.leads(about.Host); !to.IsValid() {
			return noDestination(about.Host)
		}
		if rule, err = decideOpaque(in.Rules, s.identity, about.Host); err != nil {
			return err
		}
		var ok bool
		if number, ok = s.begin(inFlight{opaque(s.identity, about.Host), in.Rules[rule].Chain(), to}); !ok {
			return errOver
		}
		// Recheck sees it from here on. What has changed between the two is decided about anew.
		if g.service(s.service) == in {
			break
		}
		s.done(number)
	}
	defer s.done(number)
	g.countRequest(s.service)
	about.Event, about.Request, about.Rule, about.Chain = EventDecided, number, rule+1, in.Rules[rule].Chain()
	if err := g.config.Audit.Write(about); err != nil {
		return &Refusal{AuditFailed, err}
	}
	var why error // for which the connection did not end in order
	defer func() {
		end := Record{Event: EventEnded, Session: s.id, Request: number, Service: s.service, Identity: s.identity, Chain: about.Chain,
			Bytes: s.carried.sent.Load(), Received: s.carried.received.Load()}
		if why != nil {
			end.Text = shorten(why.Error(), 300)
		}
		if err := g.config.Audit.Write(end); err != nil {
			g.config.Log.Error("the end of a connection is not in the audit log", "err", err)
		}
	}()
	var origin halfCloser
	if origin, why = g.openOpaque(ctx, in, s, to, about.Chain, protocol); why != nil {
		if ctx.Err() != nil || s.hasEnded() {
			return errOver
		}
		return &Refusal{OriginFailed, why}
	}
	defer origin.Close()
	if !s.attach(origin) {
		reset(origin)
		return errOver
	}
	var client halfCloser
	if client, why = begin(); why != nil {
		reset(origin)
		return errOver
	}
	s.conn.(*conn).whole.Store(true)
	why = g.passBoth(s.carried, client, origin)
	client.Close()
	return nil
}

// passBoth takes bytes on in both directions until both have ended. The error is of the first that did not end in
// order. Then a side that was told of an end keeps it, and the other one is reset.
func (g *Gateway) passBoth(c *carried, client, origin halfCloser) (why error) {
	var told [2]atomic.Bool // the client, the origin
	sides := [2]halfCloser{client, origin}
	down := make(chan struct{}) // closed when the client gets nothing more
	var once sync.Once
	pass := func(to int, what string, count *atomic.Int64) {
		err := c.pass(sides[to], sides[1-to], count, g.config.Now)
		if err == nil {
			told[to].Store(true)
			return
		}
		once.Do(func() { why = fmt.Errorf("%s: %w", what, err) })
		if to == 1 && errors.As(err, new(notTaken)) {
			// The origin has gone. What it has sent may be on its way to the client; a reset could overtake it.
			go func() {
				<-down
				if told[0].Load() {
					client.SetReadDeadline(time.Now().Add(lingerTime))
				} else {
					reset(client)
				}
			}()
			io.Copy(io.Discard, client)
			<-down
			reset(origin)
			return
		}
		for i, side := range sides {
			if told[i].Load() {
				side.Close()
			} else {
				reset(side)
			}
		}
	}
	var wait sync.WaitGroup
	wait.Go(func() { pass(1, "from the client to the origin", &c.received) })
	pass(0, "from the origin to the client", &c.sent)
	close(down)
	wait.Wait()
	return why
}

// lingerTime bounds how long a client takes to read the end of what an origin has sent that has gone.
const lingerTime = 10 * time.Second

// openOpaque opens the way to the origin, and the session with it unless an end further on does.
func (g *Gateway) openOpaque(ctx context.Context, in *service, s *session, to netip.AddrPort, chain, protocol string) (halfCloser, error) {
	ctx, stop := context.WithTimeout(ctx, routeDialTime)
	defer stop()
	sealed := g.config.Dialer.Sealed(chain)
	c, err := g.config.Dialer.Dial(ctx, Onward{
		Identity: s.identity, Chain: chain, Service: s.service, Client: s.client, Origin: to, Sealed: sealed, Protocol: protocol,
	})
	if err != nil {
		return nil, err
	}
	if !sealed && in.Destinations == nil {
		secured, err := seal.Origin(ctx, c, in.Origin.Roots, in.Origin.Name, protocol)
		if err != nil {
			reset(c)
			return nil, err
		}
		return secured, nil
	}
	half, ok := c.(halfCloser)
	if !ok {
		reset(c)
		return nil, errors.New("the connection onward cannot be ended in one direction")
	}
	return half, nil
}

// pass takes bytes on until their end, which it announces. A side that reads nothing holds up the
// other one.
func (c *carried) pass(to halfCloser, from net.Conn, count *atomic.Int64, now func() time.Time) error {
	b := make([]byte, carryBuffer)
	for {
		n, err := from.Read(b)
		if n > 0 {
			came := now() // before it goes on: who has it may have gone on, too
			if _, err := to.Write(b[:n]); err != nil {
				return notTaken{err}
			}
			count.Add(int64(n))
			c.moved.Store(came.UnixNano())
		}
		if errors.Is(err, io.EOF) {
			return to.CloseWrite()
		}
		if err != nil {
			return err
		}
	}
}

// notTaken is the error of a side that takes no more bytes.
type notTaken struct{ error }

func (e notTaken) Unwrap() error { return e.error }

// halfCloser is a connection whose end can be announced, and that can be read from then on.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// clientLeg is a client's connection.
type clientLeg struct {
	*tls.Conn
	under *conn
	ahead []byte // read already
}

func (l *clientLeg) Read(b []byte) (int, error) {
	if len(l.ahead) > 0 {
		n := copy(b, l.ahead)
		l.ahead = l.ahead[n:]
		return n, nil
	}
	return l.Conn.Read(b)
}

// CloseWrite sends a close_notify. Like any Write it waits for as long as the client reads nothing;
// crypto/tls would give up after 5 s.
func (l *clientLeg) CloseWrite() error {
	l.under.waits.Store(true)
	defer l.under.waits.Store(false)
	return l.Conn.CloseWrite()
}

// reset closes a connection so that neither end takes what was sent for complete: TCP sends RST, and
// TLS no close_notify.
func reset(c net.Conn) {
	under := c
	for {
		if t, ok := under.(interface{ SetLinger(int) error }); ok {
			t.SetLinger(0)
			break
		}
		above, ok := under.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		under = above.NetConn()
	}
	under.Close()
	c.Close()
}

// attach enters the way onward, which ends with the session. It is false if the session has ended.
func (s *session) attach(onward net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return false
	}
	s.onward = onward
	return true
}

// cut resets both sides of a carried connection.
func (s *session) cut() {
	s.mu.Lock()
	onward := s.onward
	s.mu.Unlock()
	reset(s.conn)
	if onward != nil {
		reset(onward)
	}
}

// hasEnded reports whether the gateway has ended the session.
func (s *session) hasEnded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.over
}

// endIdle ends a carried connection that had no byte for too long.
func (g *Gateway) endIdle(s *session, now time.Time) {
	if s.carried == nil || now.Sub(time.Unix(0, s.carried.moved.Load())) < s.carried.idle {
		return
	}
	s.mu.Lock()
	first := !s.over
	if first {
		s.over, s.why = true, Idle
	}
	s.mu.Unlock()
	if first {
		s.cut()
	}
}
