// Package seal has the two ends of a sealed part: TLS 1.3 between exactly two workers, each
// of which knows the other's key. The end that dials says first which part it means and for
// which service; the other answers whether the way onward is open, up to the origin. Package
// seal opens no connection and decides about no packet: it is given connections.
//
// internal/stream and internal/gateway/worker use it.
package seal

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// Protocol is that of ALPN (RFC 7301). Ends refuse fields of messages that they do not know, so
// one more field is another protocol.
const Protocol = "waystamp/1"

// serverName is what who dials asks for (RFC 6066 section 3). It is the same for all parts but for
// the epoch, which says what key to show; stamps have it in clear, too.
func serverName(epoch uint32) string { return fmt.Sprintf("epoch-%d.waystamp.internal", epoch) }

// Part is what one end of a part knows of it.
type Part struct {
	Chain  string
	Path   uint32  // of the part, in the direction of who dials
	Name   string  // of this end, a SPIFFE URI
	Other  string  // the other end's
	Epochs []Epoch // who accepts knows all that live; who dials takes the first

	adjust func(*tls.Config) // for tests of this package alone
	now    func() time.Time  // the same; nil: time.Now
}

// Epoch are the keys of a part in one of its epochs. The other end is identified by its key, or by a certificate that one of
// Roots has signed for its name.
type Epoch struct {
	Number uint32
	Key    ed25519.PrivateKey // this end's
	Peer   ed25519.PublicKey  // the only one that is taken from the other end; nil with Roots

	Certificate []byte   `json:",omitempty"` // this end's, in DER, signed by a controller; nil: it signs one itself
	Roots       [][]byte `json:",omitempty"` // certificates in DER
	// PeerRevocations is how often the other end's node was revoked: a certificate that it had before is refused.
	PeerRevocations uint32 `json:",omitempty"`

	Name, Other string `json:",omitempty"` // those of both ends in this epoch; "": the Part's
}

// certified reports whether a controller signs both ends' certificates.
func (e Epoch) certified() bool { return len(e.Certificate) > 0 || len(e.Roots) > 0 }

// String leaves the key out.
func (e Epoch) String() string { return fmt.Sprintf("{epoch %d}", e.Number) }

// GoString leaves the key out.
func (e Epoch) GoString() string { return e.String() }

// Name is what an end of a part is called, as a URI (SPIFFE-ID section 2).
func Name(node, function string) string {
	return (&url.URL{Scheme: "spiffe", Host: "waystamp", Path: "/node/" + node + "/function/" + function}).String()
}

func (p *Part) check(e Epoch) error {
	switch {
	case len(e.Key) != ed25519.PrivateKeySize:
		return fmt.Errorf("%w: chain %s, path 0x%08x: this end has no key of epoch %d", errKey, p.Chain, p.Path, e.Number)
	case e.certified() && (len(e.Certificate) == 0 || len(e.Roots) == 0 || e.Peer != nil):
		return fmt.Errorf("%w: chain %s, path 0x%08x: of epoch %d there is a certificate without roots, roots without a certificate, or a key beside both", errKey, p.Chain, p.Path, e.Number)
	case !e.certified() && len(e.Peer) != ed25519.PublicKeySize:
		return fmt.Errorf("%w: chain %s, path 0x%08x: the other end's key of epoch %d is not known", errKey, p.Chain, p.Path, e.Number)
	case p.Name == "" || p.Other == "":
		return fmt.Errorf("%w: chain %s, path 0x%08x: an end has no name", errKey, p.Chain, p.Path)
	}
	return nil
}

// certificates are those of keys that this process has shown. Signing takes longer than the rest
// of what an end does before the other one has said anything.
var certificates = struct {
	sync.Mutex
	of map[string]tls.Certificate
}{of: map[string]tls.Certificate{}}

// certificatesMax bounds them: parts have a few keys each.
const certificatesMax = 1024

// certificate is of the end's key, signed by it. The other end looks at the key and the name
// alone: times and serial number say nothing. Where a controller signs, it is that one's.
func (p *Part) certificate(e Epoch) (tls.Certificate, error) {
	key := e.Key
	if e.certified() {
		return tls.Certificate{Certificate: [][]byte{e.Certificate}, PrivateKey: key}, nil
	}
	of := p.Name + " " + string(key)
	certificates.Lock()
	defer certificates.Unlock()
	if c, ok := certificates.of[of]; ok {
		return c, nil
	}
	name, err := url.Parse(p.Name)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("the name of an end: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		URIs:         []*url.URL{name},
		NotBefore:    time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC),
		NotAfter:     time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), // RFC 5280 section 4.1.2.5: no end
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make the certificate of %s: %w", p.Name, err)
	}
	if len(certificates.of) >= certificatesMax {
		clear(certificates.of)
	}
	c := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	certificates.of[of] = c
	return c, nil
}

// in is the part with the names of its ends in an epoch.
func (p *Part) in(e Epoch) *Part {
	if e.Name == "" {
		return p
	}
	q := *p
	q.Name, q.Other = e.Name, e.Other
	return &q
}

// config is the same on both sides but for what sessions are resumed by: who dials keeps them, who accepts has a key
// for tickets.
func (p *Part) config(e Epoch, dials bool) (*tls.Config, error) {
	p = p.in(e)
	if err := p.check(e); err != nil {
		return nil, err
	}
	own, err := p.certificate(e)
	if err != nil {
		return nil, err
	}
	c := &tls.Config{
		MinVersion:       tls.VersionTLS13,
		CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519},
		Certificates:     []tls.Certificate{own},
		NextProtos:       []string{Protocol},
		ServerName:       serverName(e.Number),
		// Names are no host's: VerifyConnection takes one key or one identity, also where a session is resumed.
		InsecureSkipVerify: true,
		ClientAuth:         tls.RequireAnyClientCert,
		VerifyConnection:   func(s tls.ConnectionState) error { return p.verify(s, e, !dials) },
	}
	if err := resume.prepare(c, p, e, dials); err != nil {
		return nil, err
	}
	if p.adjust != nil {
		p.adjust(c)
	}
	return c, nil
}

// verify holds the other end to its name and to its key in one epoch. That it has the key,
// TLS has shown (RFC 8446 section 4.4.3); where a session is resumed, in the one that its ticket is of, whose
// certificate this is. dialled: the other end has dialled.
func (p *Part) verify(s tls.ConnectionState, e Epoch, dialled bool) error {
	switch {
	case s.Version != tls.VersionTLS13:
		return fmt.Errorf("%w: it did not shake hands in TLS 1.3", ErrPeer)
	case s.ServerName != serverName(e.Number):
		return fmt.Errorf("%w: it asks for %q; expect %s", ErrPeer, s.ServerName, serverName(e.Number))
	case s.NegotiatedProtocol != Protocol:
		return fmt.Errorf("%w: it does not speak %s", ErrPeer, Protocol)
	case len(s.PeerCertificates) != 1:
		return fmt.Errorf("%w: it shows %d certificates; expect 1", ErrPeer, len(s.PeerCertificates))
	}
	c := s.PeerCertificates[0]
	if len(c.URIs) != 1 || c.URIs[0].String() != p.Other {
		return fmt.Errorf("%w: its certificate is not of %s", ErrPeer, p.Other)
	}
	shown, ok := c.PublicKey.(ed25519.PublicKey)
	if !ok {
		return fmt.Errorf("%w: its key is %T; expect Ed25519", ErrPeer, c.PublicKey)
	}
	if e.certified() {
		return p.verifyCertificate(c, e, dialled)
	}
	if !e.Peer.Equal(shown) {
		return fmt.Errorf("%w: its key is not that of %s in epoch %d", ErrPeer, p.Other, e.Number)
	}
	return nil
}

// Conn is an end's connection. Read gives io.EOF only after the other end has said that
// nothing more comes (close_notify, RFC 8446 section 6.1): bytes that were cut off end with
// ErrTruncated. Close alone says nothing to the other end, CloseWrite does.
type Conn struct {
	*tls.Conn
	transport *transport
}

// Close closes the connection below without a close_notify, so that what was cut off never
// looks complete. What CloseWrite has said before, it has said.
func (c *Conn) Close() error { return c.transport.Conn.Close() }

// CloseWrite sends a close_notify. Like any Write it waits for as long as the other end reads
// nothing: crypto/tls would give up after 5 s, and what is complete would look cut off.
func (c *Conn) CloseWrite() error {
	c.transport.waits.Store(true)
	defer c.transport.waits.Store(false)
	return c.Conn.CloseWrite()
}

// transport tells a connection that just ended from one whose end TLS has said: crypto/tls
// takes both for the end, between two records.
type transport struct {
	net.Conn
	waits atomic.Bool // deadlines for writing are not set
}

// NetConn is the connection below.
func (t *transport) NetConn() net.Conn { return t.Conn }

func (t *transport) SetWriteDeadline(at time.Time) error {
	if t.waits.Load() {
		return nil
	}
	return t.Conn.SetWriteDeadline(at)
}

func (t *transport) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	if errors.Is(err, io.EOF) {
		err = ErrTruncated
	}
	return n, err
}

// bound has all reads and writes fail when the context ends, until stop is called. stop gives the
// context's error if it has ended by then.
func bound(ctx context.Context, under net.Conn) (stop func() error) {
	unbound := context.AfterFunc(ctx, func() { under.SetDeadline(time.Unix(1, 0)) })
	return func() error {
		if !unbound() {
			return context.Cause(ctx)
		}
		return nil
	}
}

// shake is bounded by its caller: HandshakeContext would close the connection, which is not ours.
func shake(c *tls.Conn, t *transport) (*Conn, error) {
	if err := c.HandshakeContext(context.Background()); err != nil {
		return nil, fmt.Errorf("shake hands: %w", err)
	}
	return &Conn{c, t}, nil
}

// Dial shakes hands over a connection to the other end, says what it is for, and waits for
// the answer; all of that before the context ends. The connection stays the caller's if that
// fails.
func (p *Part) Dial(ctx context.Context, under net.Conn, service, protocol string) (*Conn, error) {
	if len(p.Epochs) == 0 {
		return nil, p.wrap(fmt.Errorf("%w: there is none of any epoch", errKey))
	}
	config, err := p.config(p.Epochs[0], true)
	if err != nil {
		return nil, p.wrap(err)
	}
	stop := bound(ctx, under)
	defer stop()
	t := &transport{Conn: under}
	c, err := shake(tls.Client(t, config), t)
	if err != nil {
		return nil, p.wrap(err)
	}
	if err := send(c, Hello{Chain: p.Chain, Path: p.Path, Epoch: p.Epochs[0].Number, Service: service, Protocol: protocol}); err != nil {
		return nil, p.wrap(err)
	}
	var a Answer
	if err := receive(c, &a); err != nil {
		return nil, p.wrap(fmt.Errorf("read the answer: %w", err))
	}
	if a.Failure != "" {
		return nil, &Refusal{a}
	}
	if err := stop(); err != nil {
		return nil, p.wrap(err)
	}
	return c, nil
}

// Accept shakes hands over a connection of the other end, and reads what it is for. Who
// calls it answers, and then the bytes are the service's. The connection stays the caller's if
// that fails.
func (p *Part) Accept(ctx context.Context, under net.Conn) (*Conn, Hello, error) {
	var h Hello
	var epoch uint32
	stop := bound(ctx, under)
	defer stop()
	t := &transport{Conn: under}
	c, err := shake(tls.Server(t, &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			for _, e := range p.Epochs {
				if hello.ServerName == serverName(e.Number) {
					epoch = e.Number
					return p.config(e, false)
				}
			}
			if len(p.Epochs) == 0 {
				return nil, fmt.Errorf("%w: there is none of any epoch", errKey)
			}
			return nil, fmt.Errorf("%w: it asks for %q; expect one of the epochs that live", ErrPeer, hello.ServerName)
		},
	}), t)
	if err != nil {
		return nil, h, p.wrap(err)
	}
	if err := receive(c, &h); err != nil {
		return nil, h, p.wrap(fmt.Errorf("read what the connection is for: %w", err))
	}
	if h.Chain != p.Chain || h.Path != p.Path || h.Epoch != epoch {
		return nil, h, p.wrap(fmt.Errorf("%w: it is for chain %q, path 0x%08x in epoch %d, and its key is of epoch %d", ErrMismatch, h.Chain, h.Path, h.Epoch, epoch))
	}
	if err := stop(); err != nil {
		return nil, h, p.wrap(err)
	}
	return c, h, nil
}

// Answer says how the way onward is, before the context ends.
func (c *Conn) Answer(ctx context.Context, a Answer) error {
	stop := bound(ctx, c.transport.Conn)
	defer stop()
	if err := send(c, a); err != nil {
		return err
	}
	return stop()
}

func (p *Part) wrap(err error) error {
	return fmt.Errorf("chain %s, path 0x%08x, with %s: %w", p.Chain, p.Path, p.Other, err)
}
