package identity

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func newCA(t *testing.T, domain string) *CA {
	t.Helper()
	ca, err := NewCA(domain, noon)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func issue(t *testing.T, ca *CA, id ID, key *ecdsa.PrivateKey, at time.Time) *x509.Certificate {
	t.Helper()
	der, err := ca.Issue(id, key.Public(), at)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func root(t *testing.T, ca *CA) *x509.Certificate {
	t.Helper()
	c, err := x509.ParseCertificate(ca.Root())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestACertificateSaysWhoItIsOf(t *testing.T) {
	ca, other, same := newCA(t, "example.org"), newCA(t, "example.net"), newCA(t, "example.org")
	key := newKey(t)
	roots := []*x509.Certificate{root(t, ca)}
	for name, c := range map[string]struct {
		cert *x509.Certificate
		at   time.Time
		want Peer
		says string
	}{
		"a node":         {cert: issue(t, ca, ID{Node: "r1"}, key, noon), at: noon, want: Peer{ID: ID{Node: "r1"}}},
		"the controller": {cert: issue(t, ca, ID{Controller: true}, key, noon), at: noon, want: Peer{ID: ID{Controller: true}}},
		"an operator":    {cert: issue(t, ca, ID{Operator: "r1"}, key, noon), at: noon.Add(OperatorValid - time.Hour), want: Peer{ID: ID{Operator: "r1"}}},
		"expired":        {cert: issue(t, ca, ID{Node: "r1"}, key, noon), at: noon.Add(CertificateValid + time.Second), want: Peer{ID: ID{Node: "r1"}, Expired: true}},
		"of the future":  {cert: issue(t, ca, ID{Node: "r1"}, key, noon.Add(skew+time.Hour)), at: noon, says: "not yet valid"},
		"another domain": {cert: issue(t, other, ID{Node: "r1"}, key, noon), at: noon, says: "unknown authority"},
		"another root":   {cert: issue(t, same, ID{Node: "r1"}, key, noon), at: noon, says: "unknown authority"},
		"the root":       {cert: root(t, ca), at: noon, says: "not one of a node"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := Verify(c.cert, roots, c.at)
			if c.says != "" {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("got %v, %v; want %q", p.ID, err, c.says)
				}
				return
			}
			if err != nil || p.ID != c.want.ID || p.Expired != c.want.Expired {
				t.Errorf("got %+v, %v; want %+v", p, err, c.want)
			}
			if id, err := KeyID(key.Public()); err != nil || p.KeyID != id {
				t.Errorf("key %s, want %s", p.KeyID, id)
			}
		})
	}
}

func TestACAComesBackFromWhatItGave(t *testing.T) {
	ca := newCA(t, "example.org")
	key, err := ca.Key()
	if err != nil {
		t.Fatal(err)
	}
	again, err := LoadCA(ca.Root(), key)
	if err != nil || again.TrustDomain() != "example.org" || again.Pin() != ca.Pin() {
		t.Fatalf("got %v, %v", again, err)
	}
	if _, err := Verify(issue(t, again, ID{Node: "r1"}, newKey(t), noon), []*x509.Certificate{root(t, ca)}, noon); err != nil {
		t.Error(err)
	}
	foreign, err := newCA(t, "example.org").Key()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := LoadCA(ca.Root(), foreign); err == nil {
		t.Error("a foreign key was taken")
	}
}

func TestARequestIsSignedByItsKey(t *testing.T) {
	key := newKey(t)
	r, err := Request(key)
	if err != nil {
		t.Fatal(err)
	}
	got, err := RequestedKey(r)
	if err != nil || !key.PublicKey.Equal(got) {
		t.Fatalf("got %v, %v", got, err)
	}
	r[len(r)-1] ^= 1
	if _, err := RequestedKey(r); err == nil {
		t.Error("a request that was changed is taken")
	}
	// What takes long to check is not checked.
	other, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	slow, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, other)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := RequestedKey(slow); err == nil || !strings.Contains(err.Error(), "another kind than P-256") {
		t.Errorf("a request for an RSA key: %v", err)
	}
	if _, err := RequestedKey(make([]byte, requestMax+1)); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("a long request: %v", err)
	}
	rsaLike, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newCA(t, "example.org").Issue(ID{Node: "r1"}, rsaLike.Public(), noon); err == nil {
		t.Error("a key of another curve is signed")
	}
	if _, err := newCA(t, "example.org").Issue(ID{Node: "../controller"}, key.Public(), noon); err == nil {
		t.Error("a name with a path is signed")
	}
}

func TestATokenIsReadAsItWasWritten(t *testing.T) {
	tok, err := NewToken(newCA(t, "example.org").Pin())
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseToken(tok.Text() + "\n")
	if err != nil || got != tok {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"", "ws1", "ws2." + tok.Text()[4:], tok.Text()[:len(tok.Text())-4], tok.Secret} {
		if _, err := ParseToken(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if strings.Contains(HashToken(tok.Secret), tok.Secret) || strings.Contains(tok.String(), tok.Secret) {
		t.Error("the secret shows")
	}
}

// handshake is what both sides say to each other's certificate.
func handshake(t *testing.T, server, client *tls.Config) (serverState tls.ConnectionState, err error) {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	s, c := tls.Server(a, server), tls.Client(b, client)
	done := make(chan error, 1)
	go func() { done <- s.HandshakeContext(t.Context()) }()
	err = c.HandshakeContext(t.Context())
	if err != nil {
		b.Close()
		<-done
		return tls.ConnectionState{}, err
	}
	return s.ConnectionState(), <-done
}

func TestTheControllerIsWhomATokenOrARootSays(t *testing.T) {
	ca, other := newCA(t, "example.org"), newCA(t, "example.org")
	key := newKey(t)
	now := func() time.Time { return noon }
	serve := func(ca *CA, id ID, at time.Time) *tls.Config {
		der := issue(t, ca, id, key, at).Raw
		return ServerTLS(func() (*tls.Certificate, error) {
			return &tls.Certificate{Certificate: [][]byte{der, ca.Root()}, PrivateKey: key}, nil
		})
	}
	roots := func() []*x509.Certificate { return []*x509.Certificate{root(t, ca)} }
	nodeKey := newKey(t)
	nodeCert := issue(t, ca, ID{Node: "r1"}, nodeKey, noon)
	show := func() (*tls.Certificate, error) {
		return &tls.Certificate{Certificate: [][]byte{nodeCert.Raw}, PrivateKey: nodeKey}, nil
	}
	for name, c := range map[string]struct {
		server *tls.Config
		client *tls.Config
		says   string
	}{
		"by the pin":               {serve(ca, ID{Controller: true}, noon), JoinTLS(ca.Pin(), now), ""},
		"by the root":              {serve(ca, ID{Controller: true}, noon), ClientTLS(roots, show, now), ""},
		"another's pin":            {serve(other, ID{Controller: true}, noon), JoinTLS(ca.Pin(), now), "another pin"},
		"another's root":           {serve(other, ID{Controller: true}, noon), ClientTLS(roots, show, now), "unknown authority"},
		"a node as a controller":   {serve(ca, ID{Node: "r2"}, noon), JoinTLS(ca.Pin(), now), "but node r2"},
		"a node, to one with root": {serve(ca, ID{Node: "r2"}, noon), ClientTLS(roots, show, now), "but node r2"},
		"an expired controller":    {serve(ca, ID{Controller: true}, noon.Add(-25*time.Hour)), ClientTLS(roots, show, now), "has expired"},
	} {
		t.Run(name, func(t *testing.T) {
			state, err := handshake(t, c.server, c.client)
			if c.says != "" {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("got %v, want %q", err, c.says)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			p, err := PeerOf(&state, roots(), noon)
			if c.client.GetClientCertificate == nil {
				if !errors.Is(err, ErrNoCertificate) {
					t.Errorf("got %v, %v", p, err)
				}
			} else if err != nil || p.Node != "r1" {
				t.Errorf("got %v, %v", p, err)
			}
		})
	}
}

// A key of an end is certified as what it is, and is nobody's key else.
func TestACertificateOfAnEndIsNoNodes(t *testing.T) {
	now := time.Now()
	ca, err := NewCA("corp.example", now)
	if err != nil {
		t.Fatal(err)
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	request, err := EndRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	public, err := RequestedEndKey(request)
	if err != nil || !public.Equal(key.Public()) {
		t.Fatalf("the key of a request: %v", err)
	}
	der, err := ca.IssueEnd("r3", "dpi", 2, public, now)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	name, err := ca.EndName("r3", "dpi")
	if err != nil || name != "spiffe://corp.example/node/r3/function/dpi" || len(c.URIs) != 1 || c.URIs[0].String() != name || !c.NotAfter.Equal(now.Add(EndValid).UTC().Truncate(time.Second)) {
		t.Errorf("the certificate is of %v until %s; %q, %v", c.URIs, c.NotAfter, name, err)
	}
	if c.Subject.SerialNumber != "2" {
		t.Errorf("the certificate says %q of 2 revocations", c.Subject.SerialNumber)
	}
	if p, err := VerifyRaw(der, []*x509.Certificate{ca.root}, now); err == nil {
		t.Errorf("an end is taken for %s", p.ID)
	}
	if _, err := RequestedKey(request); err == nil {
		t.Error("a node gets a certificate for the key of an end")
	}
	if _, err := ca.Issue(ID{Node: "r3"}, public, now); err == nil {
		t.Error("a node gets a certificate for a key of Ed25519")
	}
	for _, of := range [][2]string{{"r3", "a/b"}, {"r3", ""}, {"..", "dpi"}} {
		if _, err := ca.IssueEnd(of[0], of[1], 0, public, now); err == nil {
			t.Errorf("function %q of node %q gets a certificate", of[1], of[0])
		}
	}
	if _, err := ca.IssueEnd("r3", "dpi", 0, nil, now); err == nil {
		t.Error("no key gets a certificate")
	}
	spoiled := slices.Clone(request)
	spoiled[len(spoiled)-1] ^= 1
	for what, r := range map[string][]byte{"another's signature": spoiled, "nothing": nil, "too much": make([]byte, requestMax+1)} {
		if _, err := RequestedEndKey(r); err == nil {
			t.Errorf("a request with %s is taken", what)
		}
	}
}
