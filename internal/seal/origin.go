package seal

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
)

// Protocols that the last end speaks with an origin. Those of HTTP are as ALPN names them (RFC
// 7301).
const (
	HTTP1 = "http/1.1"
	HTTP2 = "h2"
	// Opaque is for bytes that client and origin alone understand. Behind a slash it can have the
	// name of a protocol, which is offered by ALPN and has to be taken: opaque/postgresql.
	Opaque = "opaque"
)

// offered is what is offered by ALPN to an origin that speaks protocol. must: it has to be taken.
func offered(protocol string) (names []string, must bool, err error) {
	name, named := strings.CutPrefix(protocol, Opaque+"/")
	switch {
	case protocol == HTTP1, protocol == HTTP2:
		return []string{protocol}, protocol == HTTP2, nil
	case protocol == Opaque:
		return nil, false, nil
	case named && name != "" && len(name) <= 255:
		return []string{name}, true, nil
	}
	return nil, false, fmt.Errorf("%w: %q is not spoken with origins", ErrMismatch, protocol)
}

// Origin shakes hands with an origin, which shows a certificate for name of one of roots (RFC
// 9525), and speaks protocol. The connection stays the caller's if that fails. KindOf tells
// what failed.
func Origin(ctx context.Context, under net.Conn, roots *x509.CertPool, name, protocol string) (*Conn, error) {
	if roots == nil || name == "" {
		return nil, fmt.Errorf("%w: the origin's authority or name is not known", errKey)
	}
	names, must, err := offered(protocol)
	if err != nil {
		return nil, err
	}
	stop := bound(ctx, under)
	defer stop()
	t := &transport{Conn: under}
	c, err := shake(tls.Client(t, &tls.Config{
		MinVersion:       tls.VersionTLS13,
		CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256},
		RootCAs:          roots,
		ServerName:       name,
		NextProtos:       names,
	}), t)
	if err != nil {
		return nil, fmt.Errorf("origin %s: %w", name, err)
	}
	// crypto/tls takes no protocol that was not offered.
	if got := c.ConnectionState().NegotiatedProtocol; got == "" && must {
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
