package seal

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"math/big"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"
)

// signer signs ends, as a controller does.
type signer struct {
	t    testing.TB
	root *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newSigner(t testing.TB, ends time.Time) *signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: ends, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	root, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &signer{t, root, key}
}

// end is an identity of an end; change spoils its certificate.
func (a *signer) end(name string, change func(c *x509.Certificate)) Epoch {
	a.t.Helper()
	public, key := newKey(a.t)
	uri, err := url.Parse(name)
	if err != nil {
		a.t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(2), URIs: []*url.URL{uri}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(c)
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.root, public, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return Epoch{Number: 3, Key: key, Certificate: der, Roots: [][]byte{a.root.Raw}}
}

// certifiedPart is newPart whose ends have keys of their own.
func certifiedPart(a *signer) (dials, accepts *Part) {
	gateway, dpi := Name("r1", "gateway"), Name("r3", "dpi")
	return &Part{Chain: "deep", Path: 7, Name: gateway, Other: dpi, Epochs: []Epoch{a.end(gateway, nil)}},
		&Part{Chain: "deep", Path: 7, Name: dpi, Other: gateway, Epochs: []Epoch{a.end(dpi, nil)}}
}

func TestEndsWithCertificatesTakeEachOther(t *testing.T) {
	a := newSigner(t, time.Now().Add(time.Hour))
	dials, accepts := certifiedPart(a)
	// Workers are told in JSON.
	for _, p := range []*Part{dials, accepts} {
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		var again Part
		if err := json.Unmarshal(text, &again); err != nil {
			t.Fatal(err)
		}
		*p = again
	}
	resumes(t, dials, accepts)
	// A new certificate and key of one end are the same end.
	dials.Epochs[0] = a.end(dials.Name, nil)
	fresh(t, "who dials has renewed", dials, accepts)
	accepts.Epochs[0] = a.end(accepts.Name, nil)
	fresh(t, "who accepts has renewed", dials, accepts)
}

// Both ends are held to the same, whoever of them is not as it has to be.
func TestACertificateThatIsNotTheEndsIsRefused(t *testing.T) {
	a, foreign := newSigner(t, time.Now().Add(time.Hour)), newSigner(t, time.Now().Add(time.Hour))
	over := newSigner(t, time.Now().Add(-time.Minute))
	trustA := func(e Epoch) Epoch { e.Roots = [][]byte{a.root.Raw}; return e }
	r9, err := url.Parse(Name("r9", "gateway"))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		show   func(name string) Epoch
		reason Reason
		says   string
		both   bool // it also has to be refused as roots: the other end trusts this authority
	}{
		"of another authority": {func(n string) Epoch { return trustA(foreign.end(n, nil)) }, Untrusted, "unknown authority", false},
		"signed by itself": {func(n string) Epoch {
			p := &Part{Name: n}
			e := a.end(n, nil)
			own, err := p.certificate(Epoch{Key: e.Key})
			if err != nil {
				t.Fatal(err)
			}
			e.Certificate = own.Certificate[0]
			return e
		}, Untrusted, "unknown authority", false},
		"expired": {func(n string) Epoch {
			return a.end(n, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) })
		}, Expired, "not valid now", false},
		"not valid yet": {func(n string) Epoch {
			return a.end(n, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) })
		}, Expired, "not valid now", false},
		"of another node": {func(n string) Epoch {
			return a.end(strings.Replace(strings.Replace(n, "/r1/", "/r9/", 1), "/r3/", "/r9/", 1), nil)
		}, Peer, "not of spiffe://", false},
		"of the node and not of an end": {func(n string) Epoch { return a.end(n[:strings.Index(n, "/function/")], nil) }, Peer, "not of spiffe://", false},
		"of another trust domain":       {func(n string) Epoch { return a.end(strings.Replace(n, "//waystamp/", "//other/", 1), nil) }, Peer, "not of spiffe://", false},
		"of two names": {func(n string) Epoch {
			return a.end(n, func(c *x509.Certificate) { c.URIs = append(c.URIs, r9) })
		}, Peer, "not of spiffe://", false},
		"of a host, too": {func(n string) Epoch {
			return a.end(n, func(c *x509.Certificate) { c.DNSNames = []string{"shop.example"} })
		}, Untrusted, "more than the name", false},
		"of an authority": {func(n string) Epoch { return a.end(n, func(c *x509.Certificate) { c.IsCA = true }) }, Untrusted, "more than the name", false},
		"for something else": {func(n string) Epoch {
			return a.end(n, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning} })
		}, Untrusted, "usage", false},
		"of a root that has ended": {func(n string) Epoch { return trustA(over.end(n, nil)) }, Untrusted, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, dialling := range []bool{true, false} {
				dials, accepts := certifiedPart(a)
				wrong, right := dials, accepts
				if !dialling {
					wrong, right = accepts, dials
				}
				if c.both {
					right.Epochs[0].Roots = [][]byte{over.root.Raw, a.root.Raw}
				}
				wrong.Epochs[0] = c.show(wrong.Name)
				s := once(t, dials, accepts)
				err := s.acceptErr
				if !dialling {
					err = s.dialErr
				}
				if got := ReasonOf(err); err == nil || got != c.reason || !strings.Contains(err.Error(), c.says) {
					t.Errorf("dialling %t: the other end says %v (%s); want %s and %q", dialling, err, got, c.reason, c.says)
				}
				if len(s.got)+len(s.gotBack) > 0 {
					t.Errorf("dialling %t: %q and %q arrived", dialling, s.got, s.gotBack)
				}
			}
		})
	}
}

// Certificates that a node had before it was revoked are refused, also if others have them by now; those of after are taken.
func TestACertificateOfBeforeARevocationIsRefused(t *testing.T) {
	a := newSigner(t, time.Now().Add(time.Hour))
	with := func(p *Part, number string) {
		roots := p.Epochs[0]
		p.Epochs[0] = a.end(p.Name, func(c *x509.Certificate) { c.Subject.SerialNumber = number })
		p.Epochs[0].PeerRevocations = roots.PeerRevocations
	}
	for _, dialling := range []bool{true, false} {
		for number, reason := range map[string]Reason{"": Revoked, "0": Revoked, "1": Revoked, "2": "", "3": "", "4294967296": Untrusted, "-1": Untrusted, "two": Untrusted} {
			dials, accepts := certifiedPart(a)
			shows, other := dials, accepts
			if !dialling {
				shows, other = accepts, dials
			}
			other.Epochs[0].PeerRevocations = 2
			with(shows, number)
			s := once(t, dials, accepts)
			err := s.acceptErr
			if !dialling {
				err = s.dialErr
			}
			if reason == "" {
				if !s.whole([]byte("request"), []byte("answer")) {
					t.Errorf("dialling %t, after %s revocations: %v %v", dialling, number, s.dialErr, s.acceptErr)
				}
				continue
			}
			if err == nil || ReasonOf(err) != reason || len(s.got)+len(s.gotBack) > 0 {
				t.Errorf("dialling %t, after %q revocations: %v; want %s", dialling, number, err, reason)
			}
		}
	}
}

// A key of a plan is no certificate, and the other way round.
func TestEndsOfTwoKindsDoNotTakeEachOther(t *testing.T) {
	a := newSigner(t, time.Now().Add(time.Hour))
	for _, dialling := range []bool{true, false} {
		dials, accepts := certifiedPart(a)
		d, p := newPart(t)
		if dialling {
			dials = d
		} else {
			accepts = p
		}
		if s := once(t, dials, accepts); s.acceptErr == nil && s.dialErr == nil || len(s.got)+len(s.gotBack) > 0 {
			t.Errorf("dialling %t: they talk", dialling)
		}
	}
	dials, accepts := certifiedPart(a)
	for what, spoil := range map[string]func(e *Epoch){
		"no roots":        func(e *Epoch) { e.Roots = nil },
		"no certificate":  func(e *Epoch) { e.Certificate = nil },
		"a key beside it": func(e *Epoch) { e.Peer = e.Key.Public().(ed25519.PublicKey) },
	} {
		p := *accepts
		p.Epochs = []Epoch{accepts.Epochs[0]}
		spoil(&p.Epochs[0])
		if s := once(t, dials, &p); ReasonOf(s.acceptErr) != Key {
			t.Errorf("%s: %v; want %s", what, s.acceptErr, Key)
		}
	}
}

// Roots change in steps: the new one is trusted beside the one that signs, signs, and then the old one is dropped.
func TestEndsTakeEachOtherWhileRootsChange(t *testing.T) {
	was, next := newSigner(t, time.Now().Add(time.Hour)), newSigner(t, time.Now().Add(time.Hour))
	both := [][]byte{was.root.Raw, next.root.Raw}
	dials, accepts := certifiedPart(was)
	name := func(p *Part, by *signer, roots [][]byte) {
		p.Epochs[0] = by.end(p.Name, nil)
		p.Epochs[0].Roots = roots
	}
	whole := func(step string) {
		t.Helper()
		if s := once(t, dials, accepts); !s.whole([]byte("request"), []byte("answer")) {
			t.Errorf("%s: %v %v", step, s.dialErr, s.acceptErr)
		}
	}
	whole("before")
	dials.Epochs[0].Roots = both
	whole("who dials trusts both")
	accepts.Epochs[0].Roots = both
	whole("both trust both")
	name(dials, next, both)
	whole("who dials has a certificate of the next")
	name(accepts, next, both)
	whole("both have")
	dials.Epochs[0].Roots = [][]byte{next.root.Raw}
	whole("who dials has dropped the old one")
	accepts.Epochs[0].Roots = [][]byte{next.root.Raw}
	whole("both have dropped it")
	name(dials, was, [][]byte{next.root.Raw})
	if s := once(t, dials, accepts); ReasonOf(s.acceptErr) != Untrusted {
		t.Errorf("a certificate of the dropped root: %v; want %s", s.acceptErr, Untrusted)
	}
}

// Where a ticket does open, the other end's certificate is held to what it is held to in a full handshake.
func TestAResumedEndIsHeldToItsCertificate(t *testing.T) {
	a, next := newSigner(t, time.Now().Add(3*time.Hour)), newSigner(t, time.Now().Add(3*time.Hour))
	later := func() time.Time { return time.Now().Add(2 * time.Hour) }
	for name, c := range map[string]struct {
		change func(d, p *Part)
		by     func(s session) error
		reason Reason
	}{
		"who accepts has dropped the root":           {func(_, p *Part) { p.Epochs[0].Roots = [][]byte{next.root.Raw} }, func(s session) error { return s.acceptErr }, Untrusted},
		"who dials has dropped the root":             {func(d, _ *Part) { d.Epochs[0].Roots = [][]byte{next.root.Raw} }, func(s session) error { return s.dialErr }, Untrusted},
		"the certificate of who dials has expired":   {func(_, p *Part) { p.now = later }, func(s session) error { return s.acceptErr }, Expired},
		"the certificate of who accepts has expired": {func(d, _ *Part) { d.now = later }, func(s session) error { return s.dialErr }, Expired},
		"the node of who dials was revoked":          {func(_, p *Part) { p.Epochs[0].PeerRevocations = 1 }, func(s session) error { return s.acceptErr }, Revoked},
		"the node of who accepts was revoked":        {func(d, _ *Part) { d.Epochs[0].PeerRevocations = 1 }, func(s session) error { return s.dialErr }, Revoked},
		"who accepts wants another name":             {func(_, p *Part) { p.Other = Name("r2", "gateway") }, func(s session) error { return s.acceptErr }, Peer},
	} {
		t.Run(name, func(t *testing.T) {
			dials, accepts := certifiedPart(a)
			kept := tls.NewLRUClientSessionCache(1)
			var mu sync.Mutex
			resumed := 0
			note := func(c *tls.Config) {
				verify := c.VerifyConnection
				c.VerifyConnection = func(s tls.ConnectionState) error {
					mu.Lock()
					if s.DidResume {
						resumed++
					}
					mu.Unlock()
					return verify(s)
				}
			}
			dials.adjust = func(c *tls.Config) { c.ClientSessionCache = kept; note(c) }
			accepts.adjust = func(c *tls.Config) { c.SetSessionTicketKeys([][32]byte{{1}}); note(c) } // whatever has changed
			resumes(t, dials, accepts)
			mu.Lock()
			before := resumed
			mu.Unlock()
			c.change(dials, accepts)
			s := once(t, dials, accepts)
			if err := c.by(s); err == nil || ReasonOf(err) != c.reason || len(s.got)+len(s.gotBack) > 0 {
				t.Errorf("it is taken, or for another reason than %s: %q %q, %v", c.reason, s.got, s.gotBack, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if resumed == before {
				t.Error("nobody was about to resume; the refusal shows nothing")
			}
		})
	}
}

// While the controller begins to sign, one epoch has keys of the plan and names of another trust domain.
func TestEpochsOfTwoKindsLiveBesideEachOther(t *testing.T) {
	a := newSigner(t, time.Now().Add(time.Hour))
	oldDials, accepts := newPart(t)
	newDials, newAccepts := certifiedPart(a)
	gateway, dpi := strings.Replace(oldDials.Name, "//waystamp/", "//corp.example/", 1), strings.Replace(accepts.Name, "//waystamp/", "//corp.example/", 1)
	newDials.Name, newDials.Other = gateway, dpi
	newDials.Epochs[0], newAccepts.Epochs[0] = a.end(gateway, nil), a.end(dpi, nil)
	newDials.Epochs[0].Number, newAccepts.Epochs[0].Number = 4, 4
	e := newAccepts.Epochs[0]
	e.Name, e.Other = dpi, gateway
	accepts.Epochs = append(accepts.Epochs, e)
	for _, d := range []*Part{oldDials, newDials} {
		if s := once(t, d, accepts); !s.whole([]byte("request"), []byte("answer")) {
			t.Errorf("epoch %d: %v %v", d.Epochs[0].Number, s.dialErr, s.acceptErr)
		}
	}
}

func TestAnIdentityIsNotPrinted(t *testing.T) {
	e := newSigner(t, time.Now().Add(time.Hour)).end(Name("r1", "gateway"), nil)
	i := Identity{e.Key, e.Certificate, e.Roots}
	if i.GoString() != "{identity of an end}" || i.String() != i.GoString() {
		t.Errorf("printed: %s", i)
	}
}
