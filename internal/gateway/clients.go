package gateway

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
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
	kind          model.IdentityKind
	within        string
	lifetime      time.Duration // 0: any
	revocations   *Revocations  // nil: short lives alone
}

// NewClients takes the authorities of a CA file. Those that have signed themselves are trusted, and
// the others complete chains to them. lists may be nil if the clients' lifetime is bounded.
func NewClients(c model.Clients, authorities []*x509.Certificate, lists *Revocations) (*Clients, error) {
	out := &Clients{
		name: c.Name, roots: x509.NewCertPool(), intermediates: x509.NewCertPool(), authorities: authorities,
		kind: c.Kind, within: c.Within, lifetime: c.Lifetime, revocations: lists,
	}
	trusted := 0
	for _, a := range authorities {
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
	case lists == nil && c.Lifetime == 0:
		return nil, errors.New("nothing ends what a stolen key may do; give a list of revoked certificates, or bound their lifetime")
	}
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
	if len(shown) == 0 {
		return "", refuse(CertMissing, "the client shows no certificate")
	}
	if len(shown) > chainMax {
		return "", refuse(CertUntrusted, "the client shows %d certificates; at most %d are read", len(shown), chainMax)
	}
	for _, s := range shown {
		if len(s.Raw) > certificateMax {
			return "", refuse(CertUntrusted, "a certificate has %d bytes; at most %d are read", len(s.Raw), certificateMax)
		}
		if n := len(s.DNSNames) + len(s.EmailAddresses) + len(s.URIs) + len(s.IPAddresses); n > namesMax {
			return "", refuse(CertUntrusted, "a certificate has %d subject alternative names; at most %d are read", n, namesMax)
		}
	}
	leaf := shown[0]
	if now.After(leaf.NotAfter) {
		return "", refuse(CertExpired, "the certificate was valid until %s", leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	if now.Before(leaf.NotBefore) {
		return "", refuse(CertExpired, "the certificate is valid from %s on", leaf.NotBefore.UTC().Format(time.RFC3339))
	}
	if err := checkKey(leaf); err != nil {
		return "", refuse(CertUntrusted, "the certificate: %w", err)
	}
	// One without extended key usage may be used for everything, also for what nobody has thought of.
	if !slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageClientAuth) {
		return "", refuse(CertUntrusted, "the certificate is not for clients of TLS (extended key usage)")
	}
	if leaf.IsCA {
		return "", refuse(CertUntrusted, "the certificate is an authority's")
	}
	if leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0 || leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0 {
		return "", refuse(CertUntrusted, "the certificate's key usage is not digital signature without signing of certificates and lists")
	}
	pool := c.intermediates.Clone()
	for _, s := range shown[1:] {
		pool.AddCert(s)
	}
	chains, err := leaf.Verify(x509.VerifyOptions{Roots: c.roots, Intermediates: pool, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if err != nil {
		if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
			return "", refuse(CertExpired, "an authority's certificate: %w", err)
		}
		return "", refuse(CertUntrusted, "the certificate: %w", err)
	}
	if life := leaf.NotAfter.Sub(leaf.NotBefore); c.lifetime != 0 && life > c.lifetime {
		return "", refuse(RevocationStale, "the certificate lives for %s; at most %s is taken", life, c.lifetime)
	}
	// A chain is good if none of its certificates is revoked.
	err = nil
	for _, chain := range chains {
		if err = c.checkChain(chain, now); err == nil {
			break
		}
	}
	if err != nil {
		return "", err
	}
	return c.identityOf(leaf)
}

func (c *Clients) checkChain(chain []*x509.Certificate, now time.Time) error {
	for _, in := range chain[:len(chain)-1] {
		if in.IsCA {
			if err := checkKey(in); err != nil {
				return refuse(CertUntrusted, "authority %q: %w", in.Subject, err)
			}
		}
	}
	if c.revocations == nil {
		return nil
	}
	for i, in := range chain[:len(chain)-1] {
		if err := c.revocations.check(in, chain[i+1], now); err != nil {
			return err
		}
	}
	return nil
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
