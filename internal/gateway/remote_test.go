package gateway

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/waystamp/waystamp/internal/signer"
)

// remoteWorld is a gateway whose service shop has its key elsewhere: sign has it.
func remoteWorld(t *testing.T, key crypto.Signer, sign func(ctx context.Context, service, algorithm string, message []byte) ([]byte, error)) *world {
	t.Helper()
	return newWorld(t, func(w *world, c *Config) {
		cert := signFor(t, w.web, key)
		c.Services[0].Certificate = tls.Certificate{Certificate: [][]byte{cert.Raw}, Leaf: cert, PrivateKey: &remoteKey{"shop", cert}}
		c.Sign = sign
	})
}

func signFor(t *testing.T, by *issuer, key crypto.Signer) *x509.Certificate {
	t.Helper()
	return sign(t, by, key, func(c *x509.Certificate) {
		c.DNSNames, c.ExtKeyUsage = []string{"shop.example.org"}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
}

// A service's handshakes are signed by whoever has its key, of each kind; one that is resumed needs no signature.
func TestHandshakesAreSignedElsewhere(t *testing.T) {
	keys := map[string]crypto.Signer{"ecdsa_secp256r1_sha256": newKey(t)}
	for name, make := range map[string]func() (crypto.Signer, error){
		"ecdsa_secp384r1_sha384": func() (crypto.Signer, error) { return ecdsa.GenerateKey(elliptic.P384(), rand.Reader) },
		"ed25519":                func() (crypto.Signer, error) { _, k, err := ed25519.GenerateKey(rand.Reader); return k, err },
		"rsa_pss_rsae_sha256":    func() (crypto.Signer, error) { return rsa.GenerateKey(rand.Reader, 2048) },
	} {
		k, err := make()
		if err != nil {
			t.Fatal(err)
		}
		keys[name] = k
	}
	for want, key := range keys {
		var asked atomic.Int32
		w := remoteWorld(t, key, func(_ context.Context, service, algorithm string, message []byte) ([]byte, error) {
			asked.Add(1)
			if service != "shop" || algorithm != want || signer.CheckMessage(message) != nil {
				t.Errorf("asked for %s, %s, %q", service, algorithm, message)
			}
			return signer.Sign(key, algorithm, message)
		})
		alice := w.staff.client(t, "/eng/alice")
		settings := w.tls(&alice, "shop.example.org")
		settings.ClientSessionCache = tls.NewLRUClientSessionCache(1)
		for i := range 2 {
			c, err := w.connect(settings)
			if err != nil {
				t.Errorf("%s: %v", want, err)
				break
			}
			if r, err := ask(c, "GET", "/x", "shop.example.org"); err != nil || r.StatusCode != 200 {
				t.Errorf("%s: answered with %v, %v; want 200", want, r, err)
			}
			if resumed := c.ConnectionState().DidResume; resumed != (i == 1) {
				t.Errorf("%s: connection %d is resumed: %t", want, i, resumed)
			}
			c.Close()
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("%s: %d signatures for one handshake and one that was resumed; want 1", want, n)
		}
	}
}

// Without a signature nobody gets in, and the reason is the failure's own; other services go on.
func TestHandshakesThatAreNotSigned(t *testing.T) {
	key, other := newKey(t), newKey(t)
	for want, sign := range map[Reason]func(message []byte) ([]byte, error){
		SignerUnreachable: func([]byte) ([]byte, error) {
			return nil, &signer.Error{Why: signer.Unreachable, Err: errors.New("nobody listens")}
		},
		SignerRefused: func([]byte) ([]byte, error) {
			return nil, &signer.Error{Why: signer.Refused, Err: errors.New("the token is not there")}
		},
		SignerInvalid: func(m []byte) ([]byte, error) { return signer.Sign(other, "ecdsa_secp256r1_sha256", m) },
	} {
		w := remoteWorld(t, key, func(_ context.Context, _, _ string, m []byte) ([]byte, error) { return sign(m) })
		alice := w.staff.client(t, "/eng/alice")
		if status, err := w.get(&alice, "/x"); err == nil {
			t.Errorf("%s: the client gets %d", want, status)
		}
		w.refused(want)
		c, err := w.connect(w.tls(&alice, "other.example.org"))
		if err != nil {
			t.Errorf("%s: another service: %v", want, err)
			continue
		}
		if r, err := ask(c, "GET", "/x", "other.example.org"); err != nil || r.StatusCode != 200 {
			t.Errorf("%s: another service answers with %v, %v", want, r, err)
		}
		c.Close()
	}
}

// A gateway that can ask no signer does not start with a service that needs one.
func TestAGatewayNeedsSomebodyToAskForSignatures(t *testing.T) {
	w := newWorld(t, nil)
	cert := signFor(t, w.web, newKey(t))
	c := w.gateway.config
	c.Services = []Service{w.services[0]}
	c.Services[0].Certificate = tls.Certificate{Certificate: [][]byte{cert.Raw}, Leaf: cert, PrivateKey: &remoteKey{"shop", cert}}
	if _, err := New(c); err == nil {
		t.Error("it starts")
	}
}
