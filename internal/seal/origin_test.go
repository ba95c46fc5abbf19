package seal

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"strings"
	"testing"
	"time"
)

// authority signs certificates of origins.
type authority struct {
	t     *testing.T
	key   *ecdsa.PrivateKey
	cert  *x509.Certificate
	roots *x509.CertPool
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, roots: x509.NewCertPool()}
	a.cert, a.key = a.sign(&x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, Subject: pkix.Name{CommonName: "origins"}}, nil, nil)
	a.roots.AddCert(a.cert)
	return a
}

func (a *authority) sign(c, by *x509.Certificate, byKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber = big.NewInt(1)
	if c.NotAfter.IsZero() {
		c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	}
	if by == nil {
		by, byKey = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by, key.Public(), byKey)
	if err != nil {
		a.t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return out, key
}

func (a *authority) server(name string, ends time.Time) tls.Certificate {
	a.t.Helper()
	c, key := a.sign(&x509.Certificate{DNSNames: []string{name}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: ends}, a.cert, a.key)
	return tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: key}
}

func TestOriginIsVerified(t *testing.T) {
	a, stranger := newAuthority(t), newAuthority(t)
	soon := time.Now().Add(time.Hour)
	good := a.server("shop.internal", soon)
	for name, c := range map[string]struct {
		shown     tls.Certificate
		speaks    []string
		version   uint16 // the highest; 0: all
		protocol  string
		failure   Failure // "": it is taken
		plainText bool
	}{
		"it speaks HTTP/1.1":                {shown: good, speaks: []string{HTTP1}, protocol: HTTP1},
		"it speaks HTTP/2":                  {shown: good, speaks: []string{HTTP2, HTTP1}, protocol: HTTP2},
		"it names no protocol":              {shown: good, protocol: HTTP1},
		"it names none for HTTP/2":          {shown: good, protocol: HTTP2, failure: FailureProtocol},
		"bytes of an unknown kind":          {shown: good, speaks: []string{HTTP1}, protocol: Opaque},
		"of a kind that it knows":           {shown: good, speaks: []string{"imap"}, protocol: Opaque + "/imap"},
		"of a kind that it does not know":   {shown: good, protocol: Opaque + "/imap", failure: FailureProtocol},
		"of another kind":                   {shown: good, speaks: []string{"smtp"}, protocol: Opaque + "/imap", failure: FailureTLS},
		"another name":                      {shown: a.server("other.internal", soon), protocol: HTTP1, failure: FailureCertificate},
		"another authority":                 {shown: stranger.server("shop.internal", soon), protocol: HTTP1, failure: FailureCertificate},
		"a certificate that is out of date": {shown: a.server("shop.internal", time.Now().Add(-time.Second)), protocol: HTTP1, failure: FailureCertificate},
		"TLS 1.2":                           {shown: good, version: tls.VersionTLS12, protocol: HTTP1, failure: FailureTLS},
		"no TLS":                            {plainText: true, protocol: HTTP1, failure: FailureTLS},
	} {
		t.Run(name, func(t *testing.T) {
			d, o, _, _ := newWires()
			go func() {
				defer o.Close()
				if c.plainText {
					o.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
					io.Copy(io.Discard, o)
					return
				}
				s := tls.Server(o, &tls.Config{Certificates: []tls.Certificate{c.shown}, NextProtos: c.speaks, MaxVersion: c.version})
				if s.Handshake() == nil {
					io.Copy(s, s)
				}
			}()
			conn, err := Origin(t.Context(), d, a.roots, "shop.internal", c.protocol)
			if c.failure != "" {
				if err == nil || KindOf(err) != c.failure {
					t.Errorf("the origin is taken, or refused with %v; want %s", err, c.failure)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			io.WriteString(conn, "hello")
			got := make([]byte, 5)
			if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
				t.Errorf("%q came back: %v", got, err)
			}
		})
	}
	for _, protocol := range []string{"", "h3", "opaque/", "opaquer", "opaque/" + strings.Repeat("x", 256)} {
		if _, err := Origin(t.Context(), nil, a.roots, "shop.internal", protocol); !errors.Is(err, ErrMismatch) {
			t.Errorf("protocol %.20q: %v; want ErrMismatch", protocol, err)
		}
	}
	if _, err := Origin(t.Context(), nil, nil, "shop.internal", HTTP1); err == nil {
		t.Error("an origin without an authority is taken")
	}
}
