package gateway

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"
	"net/url"
	"testing"
	"time"
)

// badCertificate is one that a client shows, and why it is refused. make may change the world before the gateway starts.
type badCertificate struct {
	name string
	why  Reason
	make func(t *testing.T, w *world) *tls.Certificate
}

// leaf makes a certificate of the right issuer that differs in one thing.
func leaf(change func(t *testing.T, c *x509.Certificate)) func(*testing.T, *world) *tls.Certificate {
	return func(t *testing.T, w *world) *tls.Certificate {
		return shown(t, w.staff, newKey(t), func(c *x509.Certificate) { change(t, c) })
	}
}

func shown(t *testing.T, by *issuer, key crypto.Signer, change func(*x509.Certificate), more ...*issuer) *tls.Certificate {
	cert := sign(t, by, key, func(c *x509.Certificate) {
		c.URIs = []*url.URL{spiffe(t, "/eng/alice")}
		if change != nil {
			change(c)
		}
	})
	out := &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
	for _, m := range more {
		out.Certificate = append(out.Certificate, m.cert.Raw)
	}
	return out
}

func lists(change func(*x509.RevocationList), number int64) func(*testing.T, *world) *tls.Certificate {
	return func(t *testing.T, w *world) *tls.Certificate {
		if err := w.lists.Take(w.staff.list(t, number, change), time.Now()); err != nil {
			t.Fatal(err)
		}
		return shown(t, w.staff, newKey(t), nil)
	}
}

func uris(list ...string) func(*testing.T, *x509.Certificate) {
	return func(t *testing.T, c *x509.Certificate) {
		c.URIs = nil
		for _, s := range list {
			u, err := url.Parse(s)
			if err != nil {
				t.Fatal(err)
			}
			c.URIs = append(c.URIs, u)
		}
	}
}

var badCertificates = []badCertificate{
	{"none", CertMissing, func(*testing.T, *world) *tls.Certificate { return nil }},
	{"of another authority", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate {
		return shown(t, newIssuer(t, "staff", nil, nil), newKey(t), nil)
	}},
	{"of the servers' authority", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate { return shown(t, w.web, newKey(t), nil) }},
	{"signed by itself", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate { return shown(t, nil, newKey(t), nil) }},
	{"expired", CertExpired, leaf(func(_ *testing.T, c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) })},
	{"not valid yet", CertExpired, leaf(func(_ *testing.T, c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) })},
	{"of an expired authority", CertExpired, func(t *testing.T, w *world) *tls.Certificate {
		old := newIssuer(t, "old", w.staff, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) })
		return shown(t, old, newKey(t), nil, old)
	}},
	{"for servers", CertUntrusted, leaf(func(_ *testing.T, c *x509.Certificate) {
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})},
	{"for no purpose that it names", CertUntrusted, leaf(func(_ *testing.T, c *x509.Certificate) { c.ExtKeyUsage = nil })},
	{"for any purpose", CertUntrusted, leaf(func(_ *testing.T, c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} })},
	{"of an authority for servers", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate {
		only := newIssuer(t, "servers", w.staff, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })
		return shown(t, only, newKey(t), nil, only)
	}},
	{"an authority's own", CertUntrusted, leaf(func(_ *testing.T, c *x509.Certificate) { c.IsCA = true })},
	{"without digital signature", CertUntrusted, leaf(func(_ *testing.T, c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyEncipherment })},
	{"that may sign certificates", CertUntrusted, leaf(func(_ *testing.T, c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCertSign })},
	{"signed by a leaf", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate {
		key := newKey(t)
		middle := sign(t, w.staff, key, func(c *x509.Certificate) { c.URIs = []*url.URL{spiffe(t, "/eng/bob")} })
		by := &issuer{middle, key}
		return shown(t, by, newKey(t), nil, by)
	}},
	{"outside of its authority's names", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate {
		narrow := newIssuer(t, "narrow", w.staff, func(c *x509.Certificate) {
			c.PermittedURIDomains, c.PermittedDNSDomainsCritical = []string{"guests.example"}, true
		})
		return shown(t, narrow, newKey(t), nil, narrow)
	}},
	{"below too long a path", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate {
		last := newIssuer(t, "last", w.staff, func(c *x509.Certificate) { c.MaxPathLenZero = true })
		more := newIssuer(t, "more", last, nil)
		return shown(t, more, newKey(t), nil, more, last)
	}},
	{"with an unknown critical extension", CertUntrusted, leaf(func(_ *testing.T, c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 99999, 1}, Critical: true, Value: []byte{5, 0}}}
	})},
	{"with a short RSA key", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate {
		key, err := rsa.GenerateKey(rand.Reader, 1024)
		if err != nil {
			t.Fatal(err)
		}
		return shown(t, w.staff, key, nil)
	}},
	{"with a key on a small curve", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate {
		key, err := ecdsa.GenerateKey(elliptic.P224(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		small := &issuer{sign(t, w.staff, key, func(c *x509.Certificate) {
			c.Subject.CommonName, c.IsCA, c.KeyUsage, c.ExtKeyUsage = "small", true, x509.KeyUsageCertSign, nil
		}), key}
		if err := w.lists.Take(w.staff.list(t, 2, nil), time.Now()); err != nil {
			t.Fatal(err)
		}
		return shown(t, small, newKey(t), nil, small)
	}},
	{"of 100 kB", CertUntrusted, leaf(func(_ *testing.T, c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 99999, 2}, Value: make([]byte, 100_000)}}
	})},
	{"with 10 000 names", CertUntrusted, leaf(func(_ *testing.T, c *x509.Certificate) {
		for i := range 10_000 {
			c.DNSNames = append(c.DNSNames, fmt.Sprintf("%d.example.org", i))
		}
	})},
	{"behind a chain of 20", CertUntrusted, func(t *testing.T, w *world) *tls.Certificate {
		all := []*issuer{w.staff}
		for range 19 {
			all = append([]*issuer{newIssuer(t, "more", all[0], nil)}, all...)
		}
		return shown(t, all[0], newKey(t), nil, all...)
	}},
	{"without a name", CertIdentity, leaf(uris())},
	{"with a common name alone", CertIdentity, leaf(func(t *testing.T, c *x509.Certificate) {
		uris()(t, c)
		c.Subject.CommonName = "spiffe://staff.example/eng/alice"
	})},
	{"with two SPIFFE IDs", CertIdentity, leaf(uris("spiffe://staff.example/eng/alice", "spiffe://staff.example/ops/bob"))},
	{"with a SPIFFE ID and another URI", CertIdentity, leaf(uris("spiffe://staff.example/eng/alice", "https://example.org/"))},
	{"of another trust domain", CertIdentity, leaf(uris("spiffe://guests.example/eng/alice"))},
	{"of the trust domain itself", CertIdentity, leaf(uris("spiffe://staff.example"))},
	{"with dot segments", CertIdentity, leaf(uris("spiffe://staff.example/ops/../eng/alice"))},
	{"with an empty segment", CertIdentity, leaf(uris("spiffe://staff.example/eng//alice"))},
	{"with a query", CertIdentity, leaf(uris("spiffe://staff.example/eng/alice?a=b"))},
	{"with an encoded slash", CertIdentity, leaf(uris("spiffe://staff.example/eng%2Falice"))},
	{"with a port", CertIdentity, leaf(uris("spiffe://staff.example:80/eng/alice"))},
	{"of scheme SPIFFE-X", CertIdentity, leaf(uris("spiffe-x://staff.example/eng/alice"))},
	{"with a star", CertIdentity, leaf(uris("spiffe://staff.example/eng/*"))},
	{"that is revoked", CertRevoked, func(t *testing.T, w *world) *tls.Certificate {
		c := w.staff.client(t, "/eng/alice")
		if err := w.lists.Take(w.staff.list(t, 2, nil, c.Leaf), time.Now()); err != nil {
			t.Fatal(err)
		}
		return &c
	}},
	{"of a revoked authority", CertRevoked, func(t *testing.T, w *world) *tls.Certificate {
		gone := newIssuer(t, "gone", w.staff, nil)
		w.lists.authorities = append(w.lists.authorities, gone.cert)
		for _, der := range [][]byte{w.staff.list(t, 2, nil, gone.cert), gone.list(t, 1, nil)} {
			if err := w.lists.Take(der, time.Now()); err != nil {
				t.Fatal(err)
			}
		}
		return shown(t, gone, newKey(t), nil, gone)
	}},
	{"of an authority without a list", RevocationStale, func(t *testing.T, w *world) *tls.Certificate {
		unlisted := newIssuer(t, "unlisted", w.staff, nil)
		return shown(t, unlisted, newKey(t), nil, unlisted)
	}},
	{"beside a list that is overdue", RevocationStale, lists(func(l *x509.RevocationList) { l.NextUpdate = time.Now().Add(-time.Second) }, 2)},
	{"beside a list that is old", RevocationStale, lists(func(l *x509.RevocationList) { l.ThisUpdate = time.Now().Add(-25 * time.Hour) }, 2)},
	{"before the first list", RevocationStale, func(t *testing.T, w *world) *tls.Certificate {
		w.lists.lists = map[string]*list{}
		return shown(t, w.staff, newKey(t), nil)
	}},
	{"that lives too long", RevocationStale, func(t *testing.T, w *world) *tls.Certificate {
		w.services[0].Clients.lifetime = time.Hour
		return shown(t, w.staff, newKey(t), nil)
	}},
}

func TestBadCertificatesAreRefusedWithTheirReason(t *testing.T) {
	for _, bad := range badCertificates {
		t.Run(bad.name, func(t *testing.T) {
			t.Parallel()
			var c *tls.Certificate
			w := newWorld(t, func(w *world, config *Config) {
				w.services = config.Services
				c = bad.make(t, w)
			})
			if status, err := w.get(c, "/x"); err == nil {
				t.Errorf("the client is answered with %d; want no handshake", status)
			}
			w.refused(bad.why)
			w.quiet()
		})
	}
}

func TestGoodCertificatesAreTaken(t *testing.T) {
	for name, make := range map[string]func(t *testing.T, w *world) *tls.Certificate{
		"of P-256":             leaf(func(*testing.T, *x509.Certificate) {}),
		"until in two seconds": leaf(func(_ *testing.T, c *x509.Certificate) { c.NotAfter = time.Now().Add(20 * time.Second) }),
		"of RSA with 2048 bits": func(t *testing.T, w *world) *tls.Certificate {
			key, err := rsa.GenerateKey(rand.Reader, 2048)
			if err != nil {
				t.Fatal(err)
			}
			return shown(t, w.staff, key, nil)
		},
		"with a DNS name beside": leaf(func(_ *testing.T, c *x509.Certificate) { c.DNSNames = []string{"host.example.org"} }),
		"of an authority below": func(t *testing.T, w *world) *tls.Certificate {
			below := newIssuer(t, "below", w.staff, func(c *x509.Certificate) {
				c.PermittedURIDomains, c.PermittedDNSDomainsCritical = []string{"staff.example"}, true
			})
			w.lists.authorities = append(w.lists.authorities, below.cert)
			if err := w.lists.Take(below.list(t, 1, nil), time.Now()); err != nil {
				t.Fatal(err)
			}
			return shown(t, below, newKey(t), nil, below)
		},
		"while another one is revoked": func(t *testing.T, w *world) *tls.Certificate {
			c := w.staff.client(t, "/eng/bob")
			if err := w.lists.Take(w.staff.list(t, 2, nil, c.Leaf), time.Now()); err != nil {
				t.Fatal(err)
			}
			return shown(t, w.staff, newKey(t), nil)
		},
		"of a short life": func(t *testing.T, w *world) *tls.Certificate {
			w.services[0].Clients.lifetime = 2 * time.Hour
			return shown(t, w.staff, newKey(t), nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var c *tls.Certificate
			w := newWorld(t, func(w *world, config *Config) {
				w.services = config.Services
				c = make(t, w)
			})
			if status, err := w.get(c, "/x"); err != nil || status != 200 {
				t.Errorf("the client is answered with %d, %v; want 200; refusals are %v", status, err, w.gateway.Refused())
			}
		})
	}
}

func TestListsAreTakenOnlyForward(t *testing.T) {
	staff := newIssuer(t, "staff", nil, nil)
	noLists := newIssuer(t, "no lists", nil, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCertSign })
	fake := newIssuer(t, "staff", nil, nil)
	r := NewRevocations([]*x509.Certificate{staff.cert, noLists.cert}, time.Hour)
	victim := sign(t, staff, newKey(t), func(*x509.Certificate) {})
	critical := pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 28}, Critical: true, Value: []byte{0x30, 0}}
	if err := r.Take(staff.list(t, 7, nil, victim), time.Now()); err != nil {
		t.Fatal(err)
	}
	for name, der := range map[string][]byte{
		"of a lower number":                    staff.list(t, 6, nil),
		"of the same number and other content": staff.list(t, 7, nil),
		"of another key with the same name":    fake.list(t, 8, nil),
		"from the future":                      staff.list(t, 8, func(l *x509.RevocationList) { l.ThisUpdate = time.Now().Add(time.Hour) }),
		"that is a part of a list":             staff.list(t, 8, func(l *x509.RevocationList) { l.ExtraExtensions = []pkix.Extension{critical} }),
		"about certificates of others": staff.list(t, 8, func(l *x509.RevocationList) {
			l.RevokedCertificateEntries = []x509.RevocationListEntry{{SerialNumber: victim.SerialNumber, RevocationTime: time.Now(), ExtraExtensions: []pkix.Extension{critical}}}
		}),
		"that is cut off": staff.list(t, 8, nil)[:100],
	} {
		if err := r.Take(der, time.Now()); err == nil {
			t.Errorf("a list %s is taken", name)
		}
		if _, err := r.check(victim, staff.cert, time.Now()); reasonOf(err, "") != CertRevoked {
			t.Errorf("after a list %s the certificate is not revoked any more: %v", name, err)
		}
	}
	if err := r.Take(staff.list(t, 8, nil), time.Now()); err != nil {
		t.Errorf("the next list is refused: %v", err)
	}
	if _, err := r.check(victim, staff.cert, time.Now()); err != nil {
		t.Errorf("a certificate that the newest list does not have is refused: %v", err)
	}
}
