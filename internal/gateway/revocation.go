package gateway

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"math/big"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of lists of revoked certificates.
const (
	listMax = 16 << 20        // bytes of one
	ahead   = 5 * time.Minute // how far the issuer's clock may be before this one
)

// Revocations are the lists of revoked certificates (RFC 5280 section 5) of clients'
// authorities, the newest of each. A list that is older than the bound is none.
type Revocations struct {
	authorities []*x509.Certificate
	olderThan   time.Duration

	generation atomic.Uint64 // changes with lists

	mu    sync.Mutex
	lists map[string]*list // by authorityOf its issuer
}

type list struct {
	number               *big.Int
	thisUpdate, nextTime time.Time
	revoked              map[string]bool // serial numbers, as bytes
	raw                  []byte
}

// NewRevocations has no lists yet: everybody is refused until Take has brought them.
func NewRevocations(authorities []*x509.Certificate, olderThan time.Duration) *Revocations {
	return &Revocations{authorities: authorities, olderThan: olderThan, lists: map[string]*list{}}
}

// Take takes a list in, in DER, in place of the one of its issuer. It refuses one that no authority has signed, that is not whole
// (a part or a difference of a list), and one whose number is below that of the list before.
func (r *Revocations) Take(der []byte, now time.Time) error {
	if len(der) > listMax {
		return fmt.Errorf("the list of revoked certificates has %d bytes; at most %d are read", len(der), listMax)
	}
	l, err := x509.ParseRevocationList(der)
	if err != nil {
		return fmt.Errorf("read the list of revoked certificates: %w", err)
	}
	who := fmt.Sprintf("the list of %q", l.Issuer)
	var issuer *x509.Certificate
	for _, a := range r.authorities {
		if bytes.Equal(a.RawSubject, l.RawIssuer) && l.CheckSignatureFrom(a) == nil {
			issuer = a
			break
		}
	}
	if issuer == nil {
		return fmt.Errorf("%s is signed by none of the authorities that may sign lists; add its issuer to the CA file, or give the right list", who)
	}
	if l.Number == nil || l.Number.Sign() < 0 {
		return fmt.Errorf("%s has no number (RFC 5280 section 5.2.3); it could be an old one", who)
	}
	if l.NextUpdate.IsZero() {
		return fmt.Errorf("%s does not say when the next one comes", who)
	}
	if l.ThisUpdate.After(now.Add(ahead)) {
		return fmt.Errorf("%s is from the future, %s; are the clocks right?", who, l.ThisUpdate.UTC().Format(time.RFC3339))
	}
	for _, e := range l.Extensions {
		if e.Critical {
			return fmt.Errorf("%s has critical extension %s: it is a part of a list, or a difference; give whole lists", who, e.Id)
		}
	}
	in := &list{number: l.Number, thisUpdate: l.ThisUpdate, nextTime: l.NextUpdate, revoked: map[string]bool{}, raw: der}
	for _, e := range l.RevokedCertificateEntries {
		for _, x := range e.Extensions {
			if x.Critical {
				return fmt.Errorf("%s has an entry with critical extension %s: it is about certificates of others; give a list of one issuer", who, x.Id)
			}
		}
		in.revoked[string(e.SerialNumber.Bytes())] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	key := authorityOf(issuer)
	if before := r.lists[key]; before != nil {
		switch before.number.Cmp(in.number) {
		case 1:
			return fmt.Errorf("%s has number %s, and the one before %s; numbers never go back (RFC 5280 section 5.2.3)", who, in.number, before.number)
		case 0:
			if !bytes.Equal(before.raw, der) {
				return fmt.Errorf("%s has number %s, as one of other content before; give each list a number of its own", who, in.number)
			}
		}
	}
	r.lists[key] = in
	r.generation.Add(1)
	return nil
}

// authorityOf tells authorities apart: by name and key.
func authorityOf(c *x509.Certificate) string {
	return string(c.RawSubject) + string(c.RawSubjectPublicKeyInfo)
}

// carry takes over the lists that another one has, so that numbers do not go back when the
// rest of a configuration changes.
func (r *Revocations) carry(from *Revocations) {
	from.mu.Lock()
	before := make(map[string]*list, len(from.lists))
	for k, l := range from.lists {
		before[k] = l
	}
	from.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, l := range before {
		if now := r.lists[k]; now == nil || now.number.Cmp(l.number) < 0 {
			for _, a := range r.authorities {
				if authorityOf(a) == k {
					r.lists[k] = l
					r.generation.Add(1)
				}
			}
		}
	}
}

// check refuses a certificate that its issuer has revoked, or of which that is not known. until is when the list gets too old.
func (r *Revocations) check(c, issuer *x509.Certificate, now time.Time) (until time.Time, err error) {
	r.mu.Lock()
	l := r.lists[authorityOf(issuer)]
	r.mu.Unlock()
	switch {
	case l == nil:
		return until, refuse(RevocationStale, "there is no list of revoked certificates of %q", issuer.Subject)
	case now.After(l.nextTime):
		return until, refuse(RevocationStale, "the list of %q should have been replaced at %s", issuer.Subject, l.nextTime.UTC().Format(time.RFC3339))
	case now.Sub(l.thisUpdate) > r.olderThan:
		return until, refuse(RevocationStale, "the list of %q is of %s, older than %s", issuer.Subject, l.thisUpdate.UTC().Format(time.RFC3339), r.olderThan)
	case now.Add(ahead).Before(l.thisUpdate):
		return until, refuse(RevocationStale, "the list of %q is from the future", issuer.Subject)
	case l.revoked[string(c.SerialNumber.Bytes())]:
		return until, refuse(CertRevoked, "certificate %x is revoked", c.SerialNumber)
	}
	return earlier(l.nextTime, l.thisUpdate.Add(r.olderThan)), nil
}
