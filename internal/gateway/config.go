package gateway

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"context"

	"github.com/waystamp/waystamp/internal/gateway/policy"
	"github.com/waystamp/waystamp/internal/model"
)

// Dialer opens connections to origins. It alone knows how a chain is chosen. client is the client's
// address and port, which the origin sees where the path allows.
type Dialer interface {
	Dial(ctx context.Context, to Onward) (net.Conn, error)
	// Sealed says whether a chain's next end opens the session with the origin: what Dial gives is
	// sealed up to there already.
	Sealed(chain string) bool
}

// Onward is a connection that is asked for.
type Onward struct {
	Identity, Chain, Service string
	Client, Origin           netip.AddrPort
	Sealed                   bool   // as it was decided; a Dialer that cannot keep to it refuses
	Protocol                 string // that the origin is spoken with, as in internal/seal
}

// Config is what a gateway is made of.
type Config struct {
	Services []Service
	Revoked  []string // identities, as of Revoke
	Dialer   Dialer
	// Status asks a responder of OCSP; nil: no clients are asked about.
	Status func(context.Context, StatusQuestion) ([]byte, error)
	// Sign has a message signed with the key of a service, which another process has; nil: no service's key is elsewhere.
	Sign   func(ctx context.Context, service, algorithm string, message []byte) ([]byte, error)
	Audit  *Audit
	Limits Limits
	Log    *slog.Logger
	Now    func() time.Time
}

// Service is what a gateway serves under its hosts' names.
type Service struct {
	Name        string
	Hosts       []string       // lower case
	Address     netip.AddrPort // that it is served at; zero: at any
	Port        uint16         // that clients may name beside the host
	Certificate tls.Certificate
	Clients     *Clients
	Rules       policy.Rules
	Origin      Origin
	Opaque      model.Opaque        // On: connections are carried, and no HTTP is read
	Headers     model.ClientHeaders // by which the origin hears who a client is
	// Destinations are what clients of a proxy ask for by CONNECT (RFC 9110 section 9.3.6), by host and port, and where that
	// leads. nil: the service is no proxy. A proxy has no Origin, and its connections are carried from the answer on.
	Destinations map[string]netip.AddrPort
}

// leads is where connections go that are for a host, which in a proxy is a destination's name.
func (s *Service) leads(host string) netip.AddrPort {
	if s.Destinations != nil {
		return s.Destinations[host]
	}
	return s.Origin.Address
}

// Origin is where requests go on to.
type Origin struct {
	Address netip.AddrPort
	Roots   *x509.CertPool // nil: plain HTTP
	Name    string         // that its certificate is for
}

// Limits bound what clients take.
type Limits struct {
	Handshakes          int           // at once
	HandshakesOf        int           // at once, of one /64 of IPv6 or one address of IPv4
	HandshakeTime       time.Duration // of each
	Connections         int           // open at once
	ConnectionsIdentity int           // of one identity
	Streams             int           // requests at once of an HTTP/2 connection
	Resets              int           // streams that the client of such a connection resets in a minute
	ControlFrames       int           // frames in a minute of PING, SETTINGS, PRIORITY, without a byte, or of unknown kinds
	RequestsIdentity    int           // requests of HTTP at once of one identity, on all its connections to a service
	HeaderBytes         int           // of a request, its line included
	HeaderTime          time.Duration // until the headers of a request have come
	Idle                time.Duration // of a connection without a request, and of a body without a byte
}

// DefaultLimits are what a gateway has whose file names none.
func DefaultLimits() Limits {
	return Limits{
		Handshakes: 256, HandshakesOf: 16, HandshakeTime: 10 * time.Second, Connections: 5000, ConnectionsIdentity: 128, Streams: 100, Resets: 1000, ControlFrames: 1000, RequestsIdentity: 1000,
		HeaderBytes: 32 << 10, HeaderTime: 10 * time.Second, Idle: 2 * time.Minute,
	}
}

func (l Limits) check() error {
	for what, n := range map[string]int{"handshakes": l.Handshakes, "handshakes of one source": l.HandshakesOf, "connections": l.Connections,
		"connections of one identity": l.ConnectionsIdentity, "streams": l.Streams, "resets": l.Resets, "control frames": l.ControlFrames, "requests of one identity": l.RequestsIdentity, "bytes of headers": l.HeaderBytes,
		"time of a handshake": int(l.HandshakeTime), "time of headers": int(l.HeaderTime), "idle time": int(l.Idle)} {
		if n <= 0 {
			return fmt.Errorf("the limit of %s is %d; a gateway has a limit of each", what, n)
		}
	}
	return nil
}

func (c Config) check() error {
	switch {
	case c.Dialer == nil, c.Audit == nil, c.Log == nil, c.Now == nil:
		return errors.New("a gateway needs a dialer, an audit log, a logger and a clock")
	}
	return c.Limits.check()
}
