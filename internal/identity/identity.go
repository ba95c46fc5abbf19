// Package identity says who is who between a controller and its nodes: the controller's
// CA, certificates with SPIFFE IDs, tokens by which a node gets its first one, and the TLS on
// both sides. It keeps nothing on disk and makes no connection. internal/controller and
// internal/member call it.
package identity

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

const (
	// CAValid is how long a root lasts, CertificateValid what it signs.
	CAValid          = 10 * 365 * 24 * time.Hour
	CertificateValid = 24 * time.Hour
	// OperatorValid is how long an operator's certificate lasts, which nobody renews by itself.
	OperatorValid = 90 * 24 * time.Hour
	// LateMax is how long behind its end a certificate may still be renewed.
	LateMax = 90 * 24 * time.Hour
	// requestMax is more than a request for a P-256 key takes.
	requestMax = 4096
	// skew is how far a node's clock may be behind the controller's: certificates say that they are older than they are, which lets them end no later.
	skew = 2 * time.Hour
)

// ID is a caller: a controller, a node or an operator.
type ID struct {
	Node       string // else ""
	Operator   string // else ""
	Controller bool
}

func (i ID) String() string {
	switch {
	case i.Controller:
		return "the controller"
	case i.Operator != "":
		return "operator " + i.Operator
	}
	return "node " + i.Node
}

func (i ID) spiffe(domain spiffeid.TrustDomain) (spiffeid.ID, error) {
	if i.Controller {
		return spiffeid.FromPath(domain, "/controller")
	}
	if i.Operator != "" {
		return spiffeid.FromSegments(domain, "operator", i.Operator)
	}
	return spiffeid.FromSegments(domain, "node", i.Node)
}

// CheckTrustDomain holds the rule for names of trust domains.
func CheckTrustDomain(name string) error {
	_, err := spiffeid.TrustDomainFromString(name)
	if err == nil && strings.Contains(name, "/") {
		err = errors.New("it is a name, without slashes")
	}
	return err
}

// SPIFFEDomain is the trust domain of a SPIFFE ID, which has a path: it names a workload.
func SPIFFEDomain(uri string) (string, error) {
	id, err := spiffeid.FromString(uri)
	if err != nil {
		return "", fmt.Errorf("%q is not a SPIFFE ID: %w", uri, err)
	}
	if id.Path() == "" {
		return "", fmt.Errorf("%q names a trust domain and no workload", uri)
	}
	return id.TrustDomain().Name(), nil
}

// CA signs certificates. Its key never leaves the controller.
type CA struct {
	domain spiffeid.TrustDomain
	root   *x509.Certificate
	key    *ecdsa.PrivateKey
}

// NewCA makes a root for a trust domain.
func NewCA(domain string, now time.Time) (*CA, error) {
	td, err := spiffeid.TrustDomainFromString(domain)
	if err != nil {
		return nil, fmt.Errorf("trust domain %q: %w", domain, err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the key of the CA: %w", err)
	}
	t, err := template(now, CAValid, td.ID())
	if err != nil {
		return nil, err
	}
	t.Subject = pkix.Name{CommonName: "waystamp " + td.Name()}
	t.IsCA, t.BasicConstraintsValid, t.MaxPathLenZero = true, true, true
	t.KeyUsage = x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make the root: %w", err)
	}
	root, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make the root: %w", err)
	}
	return &CA{td, root, key}, nil
}

// LoadCA makes a CA of what Root and Key gave.
func LoadCA(root, key []byte) (*CA, error) {
	r, err := x509.ParseCertificate(root)
	if err != nil {
		return nil, fmt.Errorf("read the root: %w", err)
	}
	k, err := x509.ParseECPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("read the key of the CA: %w", err)
	}
	if !k.PublicKey.Equal(r.PublicKey) {
		return nil, errors.New("the key of the CA is not that of its root")
	}
	if len(r.URIs) != 1 {
		return nil, errors.New("the root has no SPIFFE ID")
	}
	id, err := spiffeid.FromURI(r.URIs[0])
	if err != nil {
		return nil, fmt.Errorf("read the root: %w", err)
	}
	return &CA{id.TrustDomain(), r, k}, nil
}

// Root is the root, in DER.
func (c *CA) Root() []byte { return c.root.Raw }

// Key is the private key, in the form of RFC 5915. Keep it secret.
func (c *CA) Key() ([]byte, error) { return x509.MarshalECPrivateKey(c.key) }

// TrustDomain is the CA's.
func (c *CA) TrustDomain() string { return c.domain.Name() }

// Pin tells a node which root is the controller's.
func (c *CA) Pin() [sha256.Size]byte { return sha256.Sum256(c.root.Raw) }

// template is a certificate without what differs.
func template(now time.Time, valid time.Duration, id spiffeid.ID) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make a serial number: %w", err)
	}
	uris := []*url.URL{id.URL()}
	return &x509.Certificate{SerialNumber: serial, NotBefore: now.Add(-skew), NotAfter: now.Add(valid), URIs: uris}, nil
}

// Issue signs a certificate for a key, of P-256. It is DER; the root is not behind it.
func (c *CA) Issue(id ID, key crypto.PublicKey, now time.Time) ([]byte, error) {
	if k, ok := key.(*ecdsa.PublicKey); !ok || k.Curve != elliptic.P256() {
		return nil, errors.New("the key is not one of P-256")
	}
	sid, err := id.spiffe(c.domain)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", id, err)
	}
	valid := CertificateValid
	if id.Operator != "" {
		valid = OperatorValid
	}
	t, err := template(now, valid, sid)
	if err != nil {
		return nil, err
	}
	t.BasicConstraintsValid = true
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err := x509.CreateCertificate(rand.Reader, t, c.root, key, c.key)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate for %s: %w", id, err)
	}
	return der, nil
}

// EndValid is how long a certificate of an end of sealed parts lasts: nodes have to go on for some time without a controller.
const EndValid = 24 * time.Hour

// EndName is who an end of sealed parts is: a function of a node, or its gateway.
func (c *CA) EndName(node, function string) (string, error) {
	id, err := c.end(node, function)
	return id.String(), err
}

func (c *CA) end(node, function string) (spiffeid.ID, error) {
	id, err := spiffeid.FromSegments(c.domain, "node", node, "function", function)
	if err != nil {
		return id, fmt.Errorf("function %s of node %s: %w", function, node, err)
	}
	return id, nil
}

// IssueEnd signs a certificate for an end of sealed parts: a key of Ed25519, so that no key is both a node's and an end's.
// revocations is how often the node's name was revoked before: the certificate has it, so that peers can refuse earlier ones.
func (c *CA) IssueEnd(node, function string, revocations uint32, key ed25519.PublicKey, now time.Time) ([]byte, error) {
	if len(key) != ed25519.PublicKeySize {
		return nil, errors.New("the key is not one of Ed25519")
	}
	id, err := c.end(node, function)
	if err != nil {
		return nil, err
	}
	t, err := template(now, EndValid, id)
	if err != nil {
		return nil, err
	}
	if revocations > 0 {
		t.Subject.SerialNumber = strconv.FormatUint(uint64(revocations), 10)
	}
	t.BasicConstraintsValid = true
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err := x509.CreateCertificate(rand.Reader, t, c.root, key, c.key)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate for function %s of node %s: %w", function, node, err)
	}
	return der, nil
}

// EndRequest makes a certificate request for the key of an end.
func EndRequest(key ed25519.PrivateKey) ([]byte, error) {
	return x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
}

// RequestedEndKey is the key of such a request that is whole. What the request says beside it counts nothing.
func RequestedEndKey(request []byte) (ed25519.PublicKey, error) {
	r, err := readRequest(request)
	if err != nil {
		return nil, err
	}
	key, ok := r.PublicKey.(ed25519.PublicKey)
	if !ok {
		return nil, errors.New("the certificate request is for a key of another kind than Ed25519")
	}
	if err := r.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the certificate request is not signed by its key: %w", err)
	}
	return key, nil
}

// Request makes a certificate request for a key: it shows that the node has it.
func Request(key *ecdsa.PrivateKey) ([]byte, error) {
	return x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
}

func readRequest(request []byte) (*x509.CertificateRequest, error) {
	if len(request) > requestMax {
		return nil, fmt.Errorf("the certificate request has %d bytes; expect %d at most", len(request), requestMax)
	}
	r, err := x509.ParseCertificateRequest(request)
	if err != nil {
		return nil, fmt.Errorf("read the certificate request: %w", err)
	}
	return r, nil
}

// RequestedKey is the key of a request that is whole.
func RequestedKey(request []byte) (crypto.PublicKey, error) {
	r, err := readRequest(request)
	if err != nil {
		return nil, err
	}
	// Before the signature is checked: that takes as long as whoever made an RSA key wants.
	if key, ok := r.PublicKey.(*ecdsa.PublicKey); !ok || key.Curve != elliptic.P256() {
		return nil, errors.New("the certificate request is for a key of another kind than P-256")
	}
	if err := r.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the certificate request is not signed by its key: %w", err)
	}
	return r.PublicKey, nil
}

// KeyID names a public key: the SHA-256 of its SubjectPublicKeyInfo.
func KeyID(key crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return "", fmt.Errorf("name a key: %w", err)
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), nil
}

// Peer is who showed a certificate.
type Peer struct {
	ID
	KeyID   string
	Key     crypto.PublicKey
	Expired bool // all else is in order
	TooLate bool // it has been for longer than LateMax
}

// VerifyRaw is Verify of a certificate in DER. Of none it is ErrNoCertificate.
func VerifyRaw(der []byte, roots []*x509.Certificate, now time.Time) (Peer, error) {
	if len(der) == 0 {
		return Peer{}, ErrNoCertificate
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return Peer{}, err
	}
	return Verify(cert, roots, now)
}

// Verify says who a certificate is of, if one of the roots has signed it.
func Verify(cert *x509.Certificate, roots []*x509.Certificate, now time.Time) (Peer, error) {
	pool := x509.NewCertPool()
	for _, r := range roots {
		pool.AddCert(r)
	}
	at := now
	if at.After(cert.NotAfter) {
		at = cert.NotAfter // whether that matters is for the caller to say
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return Peer{}, err
	}
	if cert.IsCA || len(cert.URIs) != 1 {
		return Peer{}, errors.New("the certificate is not one of a node or a controller")
	}
	id, err := spiffeid.FromURI(cert.URIs[0])
	if err != nil {
		return Peer{}, fmt.Errorf("the certificate: %w", err)
	}
	ours := false
	for _, r := range roots {
		if len(r.URIs) == 1 {
			td, err := spiffeid.FromURI(r.URIs[0])
			ours = ours || err == nil && id.MemberOf(td.TrustDomain())
		}
	}
	if !ours {
		return Peer{}, fmt.Errorf("the certificate is of %s, which is another trust domain", id)
	}
	p := Peer{Key: cert.PublicKey, Expired: now.After(cert.NotAfter), TooLate: now.After(cert.NotAfter.Add(LateMax))}
	if p.KeyID, err = KeyID(cert.PublicKey); err != nil {
		return Peer{}, err
	}
	path := strings.TrimPrefix(id.Path(), "/")
	node, isNode := strings.CutPrefix(path, "node/")
	operator, isOperator := strings.CutPrefix(path, "operator/")
	switch {
	case path == "controller":
		p.Controller = true
	case isNode && node != "" && !strings.Contains(node, "/"):
		p.Node = node
	case isOperator && operator != "" && !strings.Contains(operator, "/"):
		p.Operator = operator
	default:
		return Peer{}, fmt.Errorf("the certificate is of %s, which is neither a node, an operator nor a controller", id)
	}
	return p, nil
}

// Token is what a node joins with, once.
type Token struct {
	Secret string // as it goes to the controller
	Pin    [sha256.Size]byte
}

const tokenHead = "ws1"

// NewToken makes one for a CA's domain.
func NewToken(pin [sha256.Size]byte) (Token, error) {
	var b [32]byte
	if _, err := rand.Read(b[:]); err != nil {
		return Token{}, err
	}
	return Token{base64.RawURLEncoding.EncodeToString(b[:]), pin}, nil
}

// Text is the token as an operator hands it over.
func (t Token) Text() string {
	return strings.Join([]string{tokenHead, t.Secret, base64.RawURLEncoding.EncodeToString(t.Pin[:])}, ".")
}

// String hides the secret.
func (t Token) String() string { return "[redacted]" }

// ParseToken reads what Text gave.
func ParseToken(text string) (Token, error) {
	parts := strings.Split(strings.TrimSpace(text), ".")
	if len(parts) != 3 || parts[0] != tokenHead {
		return Token{}, errors.New("it is not a token; waystamp node token NAME prints one on the controller")
	}
	pin, err := base64.RawURLEncoding.DecodeString(parts[2])
	if err != nil || len(pin) != sha256.Size || parts[1] == "" {
		return Token{}, errors.New("the token is not whole; copy all of it")
	}
	return Token{parts[1], [sha256.Size]byte(pin)}, nil
}

// HashToken is what a controller keeps of a token's secret.
func HashToken(secret string) string {
	sum := sha256.Sum256([]byte("waystamp join token\n" + secret))
	return hex.EncodeToString(sum[:])
}

// ServerTLS is the controller's side: it asks for a certificate, and lets in also without
// one, for Join. Whoever serves a call verifies the certificate that it came with (PeerOf).
func ServerTLS(certificate func() (*tls.Certificate, error)) *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate() },
		ClientAuth:     tls.RequestClientCert,
		NextProtos:     []string{"h2", "http/1.1"},
		// A session that is resumed would not be seen to have another certificate.
		SessionTicketsDisabled: true,
	}
}

// ErrNoCertificate means that a caller showed none.
var ErrNoCertificate = errors.New("the caller has no certificate; join with a token first")

// PeerOf is who is at the other end of a connection that ServerTLS has made.
func PeerOf(s *tls.ConnectionState, roots []*x509.Certificate, now time.Time) (Peer, error) {
	if s == nil || len(s.PeerCertificates) == 0 {
		return Peer{}, ErrNoCertificate
	}
	return Verify(s.PeerCertificates[0], roots, now)
}

// ClientTLS is a node's side: it takes a controller alone whose certificate one of the roots
// has signed. certificate may be nil.
func ClientTLS(roots func() []*x509.Certificate, certificate func() (*tls.Certificate, error), now func() time.Time) *tls.Config {
	c := &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // names are SPIFFE IDs: VerifyConnection does it
		VerifyConnection: func(s tls.ConnectionState) error {
			return verifyController(s.PeerCertificates, roots(), now())
		},
	}
	if certificate != nil {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return certificate() }
	}
	return c
}

// JoinTLS is the side of a node that knows no more of the controller than the pin of its
// token. got is called with the root that the pin is of.
func JoinTLS(pin [sha256.Size]byte, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // as above
		VerifyConnection: func(s tls.ConnectionState) error {
			for _, c := range s.PeerCertificates {
				sum := sha256.Sum256(c.Raw)
				if bytes.Equal(sum[:], pin[:]) {
					return verifyController(s.PeerCertificates, []*x509.Certificate{c}, now())
				}
			}
			return errors.New("it is not the controller that the token is from: its root has another pin")
		},
	}
}

func verifyController(certs, roots []*x509.Certificate, now time.Time) error {
	if len(certs) == 0 {
		return errors.New("it shows no certificate")
	}
	p, err := Verify(certs[0], roots, now)
	switch {
	case err != nil:
		return fmt.Errorf("it is not the controller of this node: %w", err)
	case !p.Controller:
		return fmt.Errorf("it is not the controller of this node, but %s", p.ID)
	case p.Expired:
		return errors.New("the controller's certificate has expired; are the clocks right?")
	}
	return nil
}
