package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/seal"
)

// onward keeps connections to origins. One that a client has opened serves that identity, address and chain alone.
type onward struct {
	dialer Dialer
	limits Limits
	now    func() time.Time

	mu   sync.Mutex
	open map[onwardKey]*route
}

type onwardKey struct {
	service, identity, chain, name string
	client                         netip.Addr
	origin                         netip.AddrPort
	roots                          *x509.CertPool // nil: the connection is plain, or sealed already
	sealed, http2                  bool
}

// route is the connections of one key.
type route struct {
	transport *http.Transport
	requests  int
	used      time.Time
}

const (
	routeIdle         = 90 * time.Second
	routeDialTime     = 10 * time.Second
	answerHeaderBytes = 256 << 10
)

func newOnward(d Dialer, l Limits, now func() time.Time) *onward {
	return &onward{dialer: d, limits: l, now: now, open: map[onwardKey]*route{}}
}

func (o *onward) roundTrip(r *http.Request, d *decision) (*http.Response, error) {
	to := d.service.Origin
	key := onwardKey{d.session.service, d.session.identity, d.chain, to.Name, d.session.client.Addr(), to.Address, to.Roots, d.sealed, d.http2}
	if d.sealed {
		key.roots = nil // an end further on has them
	}
	o.mu.Lock()
	way := o.open[key]
	if way == nil {
		way = &route{transport: o.transport(key)}
		o.open[key] = way
	}
	way.requests++
	o.mu.Unlock()
	answer, err := way.transport.RoundTrip(r)
	o.mu.Lock()
	way.requests--
	way.used = o.now()
	o.mu.Unlock()
	return answer, err
}

func (o *onward) transport(key onwardKey) *http.Transport {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(!key.http2)
	protocols.SetHTTP2(key.http2)
	protocols.SetUnencryptedHTTP2(key.http2)
	t := &http.Transport{
		// With fewer, clients that ask at once have connections opened again and again.
		MaxIdleConnsPerHost:    o.limits.ConnectionsIdentity,
		Protocols:              protocols,
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return o.dial(ctx, key) },
		DisableCompression:     true, // bodies go as they come
		IdleConnTimeout:        routeIdle,
		TLSHandshakeTimeout:    routeDialTime,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: answerHeaderBytes,
	}
	if key.roots != nil {
		t.TLSClientConfig = &tls.Config{
			MinVersion:       tls.VersionTLS13,
			CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256},
			RootCAs:          key.roots,
			ServerName:       key.name, // and not the host of the request
		}
	}
	return t
}

// dial opens a connection for a request, whose context has who asks: the connection that the client has open now, and not the
// first that it had.
func (o *onward) dial(ctx context.Context, key onwardKey) (net.Conn, error) {
	d, ok := ctx.Value(decisionKey{}).(*decision)
	if !ok {
		return nil, errors.New("nobody has asked for this connection")
	}
	ctx, stop := context.WithTimeout(ctx, routeDialTime)
	defer stop()
	protocol := seal.HTTP1
	if key.http2 {
		protocol = seal.HTTP2
	}
	return o.dialer.Dial(ctx, Onward{
		Identity: key.identity, Chain: key.chain, Service: key.service, Client: d.session.client, Origin: key.origin, Sealed: key.sealed, Protocol: protocol,
	})
}

// sweep gives up what nobody has used for a while.
func (o *onward) sweep() {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := o.now()
	for key, way := range o.open {
		if way.requests == 0 && now.Sub(way.used) > routeIdle {
			way.transport.CloseIdleConnections()
			delete(o.open, key)
		}
	}
}

// drop gives up what is idle of an identity whose session was ended.
func (o *onward) drop(service, identity string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for key, way := range o.open {
		if key.service == service && key.identity == identity {
			way.transport.CloseIdleConnections()
		}
	}
}

func (o *onward) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for key, way := range o.open {
		way.transport.CloseIdleConnections()
		delete(o.open, key)
	}
}
