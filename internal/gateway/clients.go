package gateway

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/model"
)

// Bounds of what clients show, before anything of it is verified.
const (
	chainMax       = 5       // certificates, the root not among them
	certificateMax = 1 << 14 // bytes of one
	namesMax       = 100     // subject alternative names of one
	rsaBitsMin     = 2048
	rsaBitsMax     = 4096
)

// Clients say whose certificates are taken, and who their holders are. Values do not change
// once they are made, but for the lists of Revocations.
type Clients struct {
	name          string
	roots         *x509.CertPool
	intermediates *x509.CertPool
	authorities   []*x509.Certificate
	fingerprint   [sha256.Size]byte // of authorities
	kind          model.IdentityKind
	within        string
	lifetime      time.Duration // 0: any
	revocations   *Revocations  // nil: no lists
	statuses      *Statuses     // nil: responders of OCSP are not asked
}

// NewClients takes the authorities of a CA file. Those that have signed themselves are trusted, and
// the others complete chains to them. lists may be nil if the clients' lifetime is bounded, or responders of OCSP are asked.
func NewClients(c model.Clients, authorities []*x509.Certificate, lists *Revocations) (*Clients, error) {
	out := &Clients{
		name: c.Name, roots: x509.NewCertPool(), intermediates: x509.NewCertPool(), authorities: authorities,
		kind: c.Kind, within: c.Within, lifetime: c.Lifetime, revocations: lists,
	}
	trusted, all := 0, sha256.New()
	for _, a := range authorities {
		fmt.Fprintf(all, "%d ", len(a.Raw))
		all.Write(a.Raw)
		if err := checkAuthority(a); err != nil {
			return nil, err
		}
		if isRoot(a) {
			out.roots.AddCert(a)
			trusted++
		} else {
			out.intermediates.AddCert(a)
		}
	}
	switch {
	case trusted == 0:
		return nil, errors.New("no certificate of the CA file has signed itself; add the root")
	case lists == nil && c.Lifetime == 0 && !c.OCSP:
		return nil, errors.New("nothing ends what a stolen key may do; give a list of revoked certificates, have responders asked (OCSP), or bound their lifetime")
	case c.OCSP:
		out.statuses = newStatuses(c.Name, c.OlderThan)
	}
	all.Sum(out.fingerprint[:0])
	return out, nil
}

func checkAuthority(a *x509.Certificate) error {
	switch {
	case !a.BasicConstraintsValid || !a.IsCA:
		return fmt.Errorf("certificate %q is a leaf and no authority; give the certificate of who has signed it", a.Subject)
	case a.KeyUsage != 0 && a.KeyUsage&x509.KeyUsageCertSign == 0:
		return fmt.Errorf("authority %q may not sign certificates, by its key usage", a.Subject)
	}
	if err := checkKey(a); err != nil {
		return fmt.Errorf("authority %q: %w", a.Subject, err)
	}
	return nil
}

func isRoot(c *x509.Certificate) bool {
	return bytes.Equal(c.RawSubject, c.RawIssuer) && c.CheckSignatureFrom(c) == nil
}

func checkKey(c *x509.Certificate) error {
	switch k := c.PublicKey.(type) {
	case *ecdsa.PublicKey:
		if k.Curve.Params().BitSize < 256 {
			return fmt.Errorf("its key is on curve %s; expect P-256 or more", k.Curve.Params().Name)
		}
	case ed25519.PublicKey:
	case *rsa.PublicKey:
		if n := k.N.BitLen(); n < rsaBitsMin || n > rsaBitsMax {
			return fmt.Errorf("its RSA key has %d bits; expect %d to %d", n, rsaBitsMin, rsaBitsMax)
		}
	default:
		return errors.New("its key is of an unknown kind; expect ECDSA, Ed25519 or RSA")
	}
	return nil
}

// Verify says who holds a certificate, or refuses it. shown is what the client has sent, its own
// certificate first.
func (c *Clients) Verify(shown []*x509.Certificate, now time.Time) (string, error) {
	who, _, err := c.verify(shown, now, standing{})
	return who, err
}

// standing is what a certificate was verified against, and for how long that is the same.
type standing struct {
	clients     *Clients
	lists       uint64 // generation of the lists of revoked certificates
	from, until time.Time
	chains      chains
	rests       []rest // answers of responders
}

// chains are those of a certificate, whose signatures were verified.
type chains struct {
	list        [][]*x509.Certificate
	authorities [sha256.Size]byte // of the clients that they lead to
	from, until time.Time         // while all their certificates are valid
}

// holds reports whether a certificate that was verified would be again, with the same result: its authorities and the lists are the
// same, and so are the answers of responders; none of them, and no certificate, has come to its end since, nor has the clock gone back
// behind the verification.
func (s standing) holds(c *Clients, now time.Time) bool {
	for _, r := range s.rests {
		if !r.holds(now) {
			return false
		}
	}
	return s.clients == c && (c.revocations == nil || s.lists == c.revocations.generation.Load()) && !now.Before(s.from) && !now.After(s.until)
}

// verify is Verify, and how long that stands. before is what an earlier call gave for the same certificates: signatures are verified
// again only if they would be by other authorities.
func (c *Clients) verify(shown []*x509.Certificate, now time.Time, before standing) (who string, s standing, err error) {
	s = standing{clients: c, from: now}
	if c.revocations != nil {
		s.lists = c.revocations.generation.Load() // before they are looked at: a list that comes meanwhile counts the next time
	}
	if k := before.chains; k.list != nil && k.authorities == c.fingerprint && !now.Before(k.from) && !now.After(k.until) {
		s.chains = k
		if who, s.until, s.rests, err = c.verifyUntil(shown, now, &s.chains); err == nil {
			return who, s, nil
		}
		s.chains = chains{} // another chain may have become good meanwhile
	}
	who, s.until, s.rests, err = c.verifyUntil(shown, now, &s.chains)
	return who, s, err
}

// verifyUntil is Verify, when at the latest the certificate is to be verified again, and what of responders that rests on. It finds the
// chains, unless they are known.
func (c *Clients) verifyUntil(shown []*x509.Certificate, now time.Time, known *chains) (who string, until time.Time, rests []rest, err error) {
	if len(shown) == 0 {
		return "", until, nil, refuse(CertMissing, "the client shows no certificate")
	}
	if len(shown) > chainMax {
		return "", until, nil, refuse(CertUntrusted, "the client shows %d certificates; at most %d are read", len(shown), chainMax)
	}
	for _, s := range shown {
		if len(s.Raw) > certificateMax {
			return "", until, nil, refuse(CertUntrusted, "a certificate has %d bytes; at most %d are read", len(s.Raw), certificateMax)
		}
		if n := len(s.DNSNames) + len(s.EmailAddresses) + len(s.URIs) + len(s.IPAddresses); n > namesMax {
			return "", until, nil, refuse(CertUntrusted, "a certificate has %d subject alternative names; at most %d are read", n, namesMax)
		}
	}
	leaf := shown[0]
	if now.After(leaf.NotAfter) {
		return "", until, nil, refuse(CertExpired, "the certificate was valid until %s", leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	if now.Before(leaf.NotBefore) {
		return "", until, nil, refuse(CertExpired, "the certificate is valid from %s on", leaf.NotBefore.UTC().Format(time.RFC3339))
	}
	if err := checkKey(leaf); err != nil {
		return "", until, nil, refuse(CertUntrusted, "the certificate: %w", err)
	}
	// One without extended key usage may be used for everything, also for what nobody has thought of.
	if !slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageClientAuth) {
		return "", until, nil, refuse(CertUntrusted, "the certificate is not for clients of TLS (extended key usage)")
	}
	if leaf.IsCA {
		return "", until, nil, refuse(CertUntrusted, "the certificate is an authority's")
	}
	if leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0 || leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0 {
		return "", until, nil, refuse(CertUntrusted, "the certificate's key usage is not digital signature without signing of certificates and lists")
	}
	if known.list == nil {
		if *known, err = c.chainsOf(shown, now); err != nil {
			return "", until, nil, err
		}
	}
	if life := leaf.NotAfter.Sub(leaf.NotBefore); c.lifetime != 0 && life > c.lifetime {
		return "", until, nil, refuse(RevocationStale, "the certificate lives for %s; at most %s is taken", life, c.lifetime)
	}
	// A chain is good if none of its certificates is revoked.
	err = nil
	for _, chain := range known.list {
		if until, rests, err = c.checkChain(chain, now); err == nil {
			break
		}
	}
	if err != nil {
		return "", until, nil, err
	}
	who, err = c.identityOf(leaf)
	return who, until, rests, err
}

// chainsOf verifies signatures.
func (c *Clients) chainsOf(shown []*x509.Certificate, now time.Time) (k chains, err error) {
	pool := c.intermediates.Clone()
	for _, s := range shown[1:] {
		pool.AddCert(s)
	}
	k.authorities = c.fingerprint
	k.list, err = shown[0].Verify(x509.VerifyOptions{Roots: c.roots, Intermediates: pool, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if err != nil {
		if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
			return k, refuse(CertExpired, "an authority's certificate: %w", err)
		}
		return k, refuse(CertUntrusted, "the certificate: %w", err)
	}
	k.until = shown[0].NotAfter
	for _, chain := range k.list {
		for _, in := range chain {
			k.until = earlier(k.until, in.NotAfter)
			if in.NotBefore.After(k.from) {
				k.from = in.NotBefore
			}
		}
	}
	return k, nil
}

// checkChain says until when a chain is good: the first of the ends of its certificates, lists and responders' answers.
func (c *Clients) checkChain(chain []*x509.Certificate, now time.Time) (until time.Time, rests []rest, err error) {
	until = chain[len(chain)-1].NotAfter
	for _, in := range chain[:len(chain)-1] {
		if in.IsCA {
			if err := checkKey(in); err != nil {
				return until, nil, refuse(CertUntrusted, "authority %q: %w", in.Subject, err)
			}
		}
		until = earlier(until, in.NotAfter)
	}
	for i, in := range chain[:len(chain)-1] {
		if c.revocations != nil {
			end, err := c.revocations.check(in, chain[i+1], now)
			if err != nil {
				return until, nil, err
			}
			until = earlier(until, end)
		}
		if c.statuses != nil {
			on, end, err := c.statuses.check(chain[i:], now)
			if err != nil {
				return until, nil, err
			}
			until, rests = earlier(until, end), append(rests, on)
		}
	}
	return until, rests, nil
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// identityOf is the one subject alternative name of the kind. Names of other kinds are not looked at, but for the
// verification of the chain's name constraints.
func (c *Clients) identityOf(leaf *x509.Certificate) (string, error) {
	var names []string
	switch c.kind {
	case model.IdentitySPIFFE, model.IdentityURI:
		for _, u := range leaf.URIs {
			names = append(names, u.String())
		}
	case model.IdentityEmail:
		names = leaf.EmailAddresses
	case model.IdentityDNS:
		names = leaf.DNSNames
	default:
		return "", refuse(CertIdentity, "identities of kind %q are not known here", c.kind)
	}
	if len(names) != 1 {
		return "", refuse(CertIdentity, "the certificate has %d names of kind %s; expect one", len(names), c.kind)
	}
	return c.named(names[0])
}

// named is a name of the clients' kind as rules and the audit log have it.
func (c *Clients) named(s string) (string, error) {
	if len(s) > identityMax || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) || strings.Contains(s, "*") {
		return "", refuse(CertIdentity, "the name of kind %s is too long, or has characters that no identity has", c.kind)
	}
	switch c.kind {
	case model.IdentitySPIFFE:
		domain, err := identity.SPIFFEDomain(s)
		if err != nil {
			return "", refuse(CertIdentity, "the name: %w", err)
		}
		if domain != c.within {
			return "", refuse(CertIdentity, "%s is not of trust domain %s", s, c.within)
		}
		return s, nil
	case model.IdentityURI:
		if !strings.HasPrefix(s, c.within) || len(s) == len(c.within) {
			return "", refuse(CertIdentity, "%s does not begin with %s", s, c.within)
		}
		return s, nil
	case model.IdentityEmail:
		local, domain, ok := strings.Cut(s, "@")
		domain = strings.ToLower(domain) // of the local part, case counts (RFC 5321 section 2.4)
		if !ok || local == "" || domain != c.within {
			return "", refuse(CertIdentity, "%s is not an address of %s", s, c.within)
		}
		return local + "@" + domain, nil
	case model.IdentityDNS:
		s = strings.ToLower(s)
		if model.CheckHost(s) != nil || !strings.HasSuffix(s, "."+c.within) {
			return "", refuse(CertIdentity, "%s is not a host of %s", s, c.within)
		}
		return s, nil
	}
	return "", refuse(CertIdentity, "identities of kind %q are not known here", c.kind)
}

// identityMax is the length in bytes of the longest identity.
const identityMax = 1024

// Identity is a name as rules and the audit log have it, if holders of these clients' certificates can have it.
func Identity(c model.Clients, name string) (string, error) {
	name, err := (&Clients{kind: c.Kind, within: c.Within}).named(name)
	if r, ok := errors.AsType[*Refusal](err); ok {
		err = r.Err
	}
	return name, err
}
