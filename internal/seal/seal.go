// Package seal has the two ends of a sealed part: TLS 1.3 between exactly two workers, each
// of which knows the other's key. The end that dials says first which part it means and for
// which service; the other answers whether the way onward is open, up to the origin. Package
// seal opens no connection and decides about no packet: it is given connections.
//
// Nothing calls it yet: internal/stream and internal/gateway/worker will.
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
	"time"
)

const (
	// ServerName is the same for all parts (RFC 6066 section 3): it tells observers nothing.
	ServerName = "part.waystamp.internal"
	// Protocol is that of ALPN (RFC 7301).
	Protocol = "waystamp/1"
)

// Part is what one end of a part knows of it.
type Part struct {
	Chain string
	Path  uint32 // of the part, in the direction of who dials
	Epoch uint32 // whose key this end shows
	Name  string // of this end, a SPIFFE URI
	Key   ed25519.PrivateKey

	Other string                       // the other end's name
	Peers map[uint32]ed25519.PublicKey // the other end's keys, by epoch: those of one now, before and next

	adjust func(*tls.Config) // for tests of this package alone
}

// Name is what an end of a part is called, as a URI (SPIFFE-ID section 2).
func Name(node, function string) string {
	return (&url.URL{Scheme: "spiffe", Host: "waystamp", Path: "/node/" + node + "/function/" + function}).String()
}

func (p *Part) check() error {
	switch {
	case len(p.Key) != ed25519.PrivateKeySize:
		return fmt.Errorf("%w: chain %s, path 0x%08x: this end has no key of epoch %d", errKey, p.Chain, p.Path, p.Epoch)
	case len(p.Peers) == 0:
		return fmt.Errorf("%w: chain %s, path 0x%08x: the other end's key is not known", errKey, p.Chain, p.Path)
	case p.Name == "" || p.Other == "":
		return fmt.Errorf("%w: chain %s, path 0x%08x: an end has no name", errKey, p.Chain, p.Path)
	}
	for epoch, k := range p.Peers {
		if len(k) != ed25519.PublicKeySize {
			return fmt.Errorf("%w: chain %s, path 0x%08x: the other end's key of epoch %d has %d bytes; expect %d", errKey, p.Chain, p.Path, epoch, len(k), ed25519.PublicKeySize)
		}
	}
	return nil
}

// certificate is of the end's key, signed by it. The other end looks at the key and the name
// alone: times and serial number say nothing.
func (p *Part) certificate() (tls.Certificate, error) {
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
	der, err := x509.CreateCertificate(rand.Reader, template, template, p.Key.Public(), p.Key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make the certificate of %s: %w", p.Name, err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: p.Key}, nil
}

// config is the same on both sides but for who asks for a certificate. epoch is where that
// of the other end's key is written.
func (p *Part) config(epoch *uint32) (*tls.Config, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	own, err := p.certificate()
	if err != nil {
		return nil, err
	}
	c := &tls.Config{
		MinVersion:             tls.VersionTLS13,
		CurvePreferences:       []tls.CurveID{tls.X25519MLKEM768, tls.X25519},
		Certificates:           []tls.Certificate{own},
		NextProtos:             []string{Protocol},
		ServerName:             ServerName,
		SessionTicketsDisabled: true,
		// No authority signs these certificates: VerifyConnection takes one key.
		InsecureSkipVerify: true,
		ClientAuth:         tls.RequireAnyClientCert,
		VerifyConnection:   func(s tls.ConnectionState) (err error) { *epoch, err = p.verify(s); return err },
	}
	if p.adjust != nil {
		p.adjust(c)
	}
	return c, nil
}

// verify holds the other end to its name and its key, and gives the key's epoch. That it has
// the key, TLS has shown (RFC 8446 section 4.4.3).
func (p *Part) verify(s tls.ConnectionState) (epoch uint32, err error) {
	switch {
	case s.Version != tls.VersionTLS13 || s.DidResume:
		return 0, fmt.Errorf("%w: it did not shake hands anew in TLS 1.3", ErrPeer)
	case s.ServerName != ServerName:
		return 0, fmt.Errorf("%w: it asks for %q; expect %s", ErrPeer, s.ServerName, ServerName)
	case s.NegotiatedProtocol != Protocol:
		return 0, fmt.Errorf("%w: it does not speak %s", ErrPeer, Protocol)
	case len(s.PeerCertificates) != 1:
		return 0, fmt.Errorf("%w: it shows %d certificates; expect 1", ErrPeer, len(s.PeerCertificates))
	}
	c := s.PeerCertificates[0]
	if len(c.URIs) != 1 || c.URIs[0].String() != p.Other {
		return 0, fmt.Errorf("%w: its certificate is not of %s", ErrPeer, p.Other)
	}
	shown, ok := c.PublicKey.(ed25519.PublicKey)
	if !ok {
		return 0, fmt.Errorf("%w: its key is %T; expect Ed25519", ErrPeer, c.PublicKey)
	}
	for epoch, k := range p.Peers {
		if k.Equal(shown) {
			return epoch, nil
		}
	}
	return 0, fmt.Errorf("%w: its key is not that of %s", ErrPeer, p.Other)
}

// Conn is an end's connection. Read gives io.EOF only after the other end has said that
// nothing more comes (close_notify, RFC 8446 section 6.1): bytes that were cut off end with
// ErrTruncated. Close alone says nothing to the other end, CloseWrite does.
type Conn struct {
	*tls.Conn
	under net.Conn
}

// Close closes the connection below without a close_notify, so that what was cut off never
// looks complete. What CloseWrite has said before, it has said.
func (c *Conn) Close() error { return c.under.Close() }

// transport tells a connection that just ended from one whose end TLS has said: crypto/tls
// takes both for the end, between two records.
type transport struct{ net.Conn }

func (t transport) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	if errors.Is(err, io.EOF) {
		err = ErrTruncated
	}
	return n, err
}

func shake(ctx context.Context, c *tls.Conn, under net.Conn) (*Conn, error) {
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("shake hands: %w", err)
	}
	return &Conn{c, under}, nil
}

// Dial shakes hands over a connection to the other end, says what it is for, and waits for
// the answer; all of that before the context ends. The connection stays the caller's if that
// fails.
func (p *Part) Dial(ctx context.Context, under net.Conn, service, protocol string) (*Conn, error) {
	var epoch uint32
	config, err := p.config(&epoch)
	if err != nil {
		return nil, err
	}
	c, err := shake(ctx, tls.Client(transport{under}, config), under)
	if err != nil {
		return nil, p.wrap(err)
	}
	// What follows is bounded by the context, too.
	stop := context.AfterFunc(ctx, func() { under.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := send(c, Hello{Chain: p.Chain, Path: p.Path, Epoch: p.Epoch, Service: service, Protocol: protocol}); err != nil {
		return nil, p.wrap(err)
	}
	var a Answer
	if err := receive(c, &a); err != nil {
		return nil, p.wrap(fmt.Errorf("read the answer: %w", err))
	}
	if a.Failure != "" {
		return nil, &Refusal{a}
	}
	if !stop() {
		return nil, p.wrap(ctx.Err())
	}
	return c, nil
}

// Accept shakes hands over a connection of the other end, and reads what it is for. Who
// calls it answers, and then the bytes are the service's. The connection stays the caller's if
// that fails.
func (p *Part) Accept(ctx context.Context, under net.Conn) (*Conn, Hello, error) {
	var h Hello
	var epoch uint32
	config, err := p.config(&epoch)
	if err != nil {
		return nil, h, err
	}
	c, err := shake(ctx, tls.Server(transport{under}, config), under)
	if err != nil {
		return nil, h, p.wrap(err)
	}
	stop := context.AfterFunc(ctx, func() { under.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := receive(c, &h); err != nil {
		return nil, h, p.wrap(fmt.Errorf("read what the connection is for: %w", err))
	}
	if h.Chain != p.Chain || h.Path != p.Path || h.Epoch != epoch {
		return nil, h, p.wrap(fmt.Errorf("%w: it is for chain %q, path 0x%08x in epoch %d, and its key is of epoch %d", ErrMismatch, h.Chain, h.Path, h.Epoch, epoch))
	}
	if !stop() {
		return nil, h, p.wrap(ctx.Err())
	}
	return c, h, nil
}

// Answer says how the way onward is.
func (c *Conn) Answer(a Answer) error { return send(c, a) }

func (p *Part) wrap(err error) error {
	return fmt.Errorf("chain %s, path 0x%08x, with %s: %w", p.Chain, p.Path, p.Other, err)
}
