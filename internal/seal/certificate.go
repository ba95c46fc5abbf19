package seal

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"
)

// Errors of the other end's certificate, where a controller signs them.
var (
	ErrUntrusted = errors.New("the other end's certificate is not one of the controller's for an end")
	ErrExpired   = errors.New("the other end's certificate is not valid now")
	ErrRevoked   = errors.New("the other end's certificate was issued before its node was revoked")
)

// Identity is what an end has of its own where a controller signs: a key, its certificate, and the roots that other ends'
// certificates are signed by; the last two in DER.
type Identity struct {
	Key         ed25519.PrivateKey
	Certificate []byte
	Roots       [][]byte
}

// String leaves the key out.
func (Identity) String() string { return "{identity of an end}" }

// GoString leaves the key out.
func (i Identity) GoString() string { return i.String() }

// Revocations is how often the name of a certificate's node was revoked before the certificate was issued. The controller
// writes it as the serialNumber of the subject (X.520 section 6.2.9), and nothing where it is 0.
func Revocations(c *x509.Certificate) (uint32, error) {
	text := c.Subject.SerialNumber
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("the serialNumber of its subject, %q, is no number of revocations", text)
	}
	return uint32(n), nil
}

// verifyCertificate holds a certificate that has the right name to what a controller signs for an end. It runs at every
// handshake, also where a session is resumed: the session has the certificate.
func (p *Part) verifyCertificate(c *x509.Certificate, e Epoch, dialled bool) error {
	now := time.Now
	if p.now != nil {
		now = p.now
	}
	at := now()
	if c.IsCA || len(c.DNSNames)+len(c.EmailAddresses)+len(c.IPAddresses) > 0 {
		return fmt.Errorf("%w: it has more than the name of %s", ErrUntrusted, p.Other)
	}
	if at.Before(c.NotBefore) || at.After(c.NotAfter) {
		return fmt.Errorf("%w: that of %s is from %s to %s", ErrExpired, p.Other, c.NotBefore.Format(time.RFC3339), c.NotAfter.Format(time.RFC3339))
	}
	use := x509.ExtKeyUsageServerAuth
	if dialled {
		use = x509.ExtKeyUsageClientAuth
	}
	ends, err := signed.by(c, e.Roots, use, at)
	switch {
	case err != nil:
		return fmt.Errorf("%w: that of %s: %w", ErrUntrusted, p.Other, err)
	case at.After(ends):
		return fmt.Errorf("%w: the root that has signed that of %s ended at %s", ErrExpired, p.Other, ends.Format(time.RFC3339))
	}
	switch had, err := Revocations(c); {
	case err != nil:
		return fmt.Errorf("%w: that of %s: %w", ErrUntrusted, p.Other, err)
	case had < e.PeerRevocations:
		return fmt.Errorf("%w: that of %s was issued after %d revocations of the node; the plan knows of %d", ErrRevoked, p.Other, had, e.PeerRevocations)
	}
	return nil
}

// signatures are certificates that were found to be signed by roots: that takes longer than the rest of what an end checks.
type signatures struct {
	mu sync.Mutex
	of map[[sha256.Size]byte]time.Time // when the root ends
}

var signed = &signatures{of: map[[sha256.Size]byte]time.Time{}}

// signedMax bounds them: a part's end has one certificate at a time.
const signedMax = 1024

// by is when the root ends that has signed a certificate for a use. Times of the certificate itself are the caller's to check.
func (s *signatures) by(c *x509.Certificate, roots [][]byte, use x509.ExtKeyUsage, at time.Time) (time.Time, error) {
	h := sha256.New()
	of := rootsOf(Epoch{Roots: roots})
	h.Write(of[:])
	h.Write([]byte{byte(use)})
	h.Write(c.Raw)
	key := [sha256.Size]byte(h.Sum(nil))
	s.mu.Lock()
	defer s.mu.Unlock()
	if ends, ok := s.of[key]; ok {
		return ends, nil
	}
	pool := x509.NewCertPool()
	for _, der := range roots {
		root, err := x509.ParseCertificate(der)
		if err != nil {
			return time.Time{}, fmt.Errorf("read a root: %w", err)
		}
		pool.AddCert(root)
	}
	chains, err := c.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{use}})
	if err != nil {
		return time.Time{}, err
	}
	var ends time.Time
	for _, chain := range chains {
		if end := chain[len(chain)-1].NotAfter; end.After(ends) {
			ends = end
		}
	}
	if len(s.of) >= signedMax {
		clear(s.of)
	}
	s.of[key] = ends
	return ends, nil
}

// rootsOf is a digest of an epoch's roots; zero: it has none.
func rootsOf(e Epoch) (sum [sha256.Size]byte) {
	if len(e.Roots) == 0 {
		return sum
	}
	h := sha256.New()
	for _, r := range e.Roots {
		one := sha256.Sum256(r)
		h.Write(one[:])
	}
	return [sha256.Size]byte(h.Sum(nil))
}
