package seal

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
)

// Protocols that the last end speaks with an origin, as ALPN names them (RFC 7301).
const (
	HTTP1 = "http/1.1"
	HTTP2 = "h2"
)

// Origin shakes hands with an origin, which shows a certificate for name of one of roots (RFC
// 9525), and speaks protocol. The connection stays the caller's if that fails. KindOf tells
// what failed.
func Origin(ctx context.Context, under net.Conn, roots *x509.CertPool, name, protocol string) (*Conn, error) {
	if roots == nil || name == "" {
		return nil, fmt.Errorf("%w: the origin's authority or name is not known", errKey)
	}
	if protocol != HTTP1 && protocol != HTTP2 {
		return nil, fmt.Errorf("%w: %q is not spoken with origins", ErrMismatch, protocol)
	}
	stop := bound(ctx, under)
	defer stop()
	t := &transport{Conn: under}
	c, err := shake(tls.Client(t, &tls.Config{
		MinVersion:       tls.VersionTLS13,
		CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256},
		RootCAs:          roots,
		ServerName:       name,
		NextProtos:       []string{protocol},
	}), t)
	if err != nil {
		return nil, fmt.Errorf("origin %s: %w", name, err)
	}
	if got := c.ConnectionState().NegotiatedProtocol; got != protocol && (got != "" || protocol != HTTP1) {
		return nil, fmt.Errorf("origin %s: %w: it speaks %q, not %s", name, errProtocol, got, protocol)
	}
	if err := stop(); err != nil {
		return nil, fmt.Errorf("origin %s: %w", name, err)
	}
	return c, nil
}

var errProtocol = errors.New("another protocol")

// KindOf is what an end answers when Origin, or the Dial of the next part, has failed.
func KindOf(err error) Failure {
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r.Failure // of an end further on
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return FailureCertificate
	}
	if errors.Is(err, errProtocol) {
		return FailureProtocol
	}
	return FailureTLS
}
