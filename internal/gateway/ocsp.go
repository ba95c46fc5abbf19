package gateway

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"time"

	"golang.org/x/crypto/ocsp"
)

const (
	// statusBytesMax is the length in bytes of the longest answer of a responder.
	statusBytesMax = 64 << 10
	nonceBytes     = 32 // RFC 9654 section 2.1
)

var oidNonce = asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 48, 1, 2}

// statusRequest is a question about one certificate (RFC 6960 section 4.1).
type statusRequest struct {
	der   []byte
	nonce []byte // as the extension has it
}

func newStatusRequest(cert, issuer *x509.Certificate) (r statusRequest, err error) {
	plain, err := ocsp.CreateRequest(cert, issuer, nil)
	if err != nil {
		return r, err
	}
	// ocsp makes requests without extensions.
	var without struct {
		TBS struct{ List asn1.RawValue }
	}
	if _, err := asn1.Unmarshal(plain, &without); err != nil {
		return r, err
	}
	number := make([]byte, nonceBytes)
	if _, err := rand.Read(number); err != nil {
		return r, err
	}
	if r.nonce, err = asn1.Marshal(number); err != nil {
		return r, err
	}
	var with struct {
		TBS struct {
			List       asn1.RawValue
			Extensions []pkix.Extension `asn1:"explicit,tag:2"`
		}
	}
	with.TBS.List, with.TBS.Extensions = without.TBS.List, []pkix.Extension{{Id: oidNonce, Value: r.nonce}}
	r.der, err = asn1.Marshal(with)
	return r, err
}

// answerData is what ocsp.Response does not tell of an answer (RFC 6960 section 4.2.1).
type answerData struct {
	Version    int `asn1:"optional,default:0,explicit,tag:0"`
	Responder  asn1.RawValue
	Produced   time.Time `asn1:"generalized"`
	List       []answerOne
	Extensions []pkix.Extension `asn1:"explicit,tag:1,optional"`
}

type answerOne struct {
	ID struct {
		Hash      pkix.AlgorithmIdentifier
		Name, Key []byte // of the issuer, hashed
		Serial    *big.Int
	}
}

// answer is what a responder says of a certificate.
type answer struct {
	revoked bool
	since   time.Time // of the revocation
	of      time.Time // thisUpdate
	next    time.Time // nextUpdate; zero: a newer one is there at any time
	signer  time.Time // the end of the certificate that has signed it
}

// until is when an answer of so many hours at most comes to its end.
func (a *answer) until(olderThan time.Duration) time.Time {
	end := earlier(a.of.Add(olderThan), a.signer)
	if a.next.IsZero() {
		return earlier(end, a.of.Add(statusAgain))
	}
	return earlier(end, a.next)
}

// check refuses an answer that is too old, or from the future.
func (a *answer) check(now time.Time, olderThan time.Duration) error {
	switch end := a.until(olderThan); {
	case a.of.After(now.Add(ahead)):
		return refuse(OCSPStale, "the responder's answer is from the future, %s; are the clocks right?", a.of.UTC().Format(time.RFC3339))
	case now.After(end):
		return refuse(OCSPStale, "the responder's answer is of %s, and was good until %s", a.of.UTC().Format(time.RFC3339), end.UTC().Format(time.RFC3339))
	}
	return nil
}

// readAnswer verifies a responder's answer about a certificate (RFC 6960 section 3.2). It does not look at its age.
func readAnswer(der []byte, cert, issuer *x509.Certificate, asked statusRequest, now time.Time) (*answer, error) {
	invalid := func(format string, args ...any) (*answer, error) { return nil, refuse(OCSPInvalid, format, args...) }
	if len(der) > statusBytesMax {
		return invalid("the responder's answer has %d bytes; at most %d are read", len(der), statusBytesMax)
	}
	r, err := parseAnswer(der, cert)
	if failed, ok := errors.AsType[ocsp.ResponseError](err); ok {
		return invalid("the responder gives no answer: %s (RFC 6960 section 2.3)", failed.Status)
	}
	if err != nil {
		return invalid("the responder's answer: %w", err)
	}
	signer, end := issuer, issuer.NotAfter
	if r.signer != nil && authorityOf(r.signer) != authorityOf(issuer) {
		if err := checkDelegate(r.signer, issuer, now); err != nil {
			return invalid("the responder %q: %w", r.signer.Subject, err)
		}
		signer, end = r.signer, r.signer.NotAfter
	}
	if err := r.check(signer); err != nil {
		return invalid("the responder's answer is not signed by %q: %w", signer.Subject, err)
	}
	key, err := publicKeyBits(signer)
	if err != nil {
		return invalid("the responder's key: %w", err)
	}
	if r.RawResponderName != nil && !bytes.Equal(r.RawResponderName, signer.RawSubject) || r.ResponderKeyHash != nil && !bytes.Equal(r.ResponderKeyHash, hashed(crypto.SHA1, key)) {
		return invalid("the responder's answer names another responder than the one that has signed it")
	}
	var data answerData
	if rest, err := asn1.Unmarshal(r.TBSResponseData, &data); err != nil || len(rest) > 0 {
		return invalid("the responder's answer is not as RFC 6960 has it")
	}
	data.List = slices.DeleteFunc(data.List, func(o answerOne) bool { return o.ID.Serial.Cmp(cert.SerialNumber) != 0 })
	if n := len(data.List); n != 1 {
		return invalid("the responder's answer is %d times about certificate %x; expect one", n, cert.SerialNumber)
	}
	if key, err = publicKeyBits(issuer); err != nil {
		return invalid("the issuer's key: %w", err)
	}
	if id := data.List[0].ID; !bytes.Equal(id.Name, hashed(r.IssuerHash, issuer.RawSubject)) || !bytes.Equal(id.Key, hashed(r.IssuerHash, key)) {
		return invalid("the responder's answer is about a certificate of another issuer than %q", issuer.Subject)
	}
	for _, e := range data.Extensions {
		switch {
		case e.Id.Equal(oidNonce) && !bytes.Equal(e.Value, asked.nonce):
			return invalid("the responder's answer is to another question (nonce)")
		case e.Critical && !e.Id.Equal(oidNonce):
			return invalid("the responder's answer has the unknown critical extension %s", e.Id)
		}
	}
	switch a := (&answer{revoked: r.Status == ocsp.Revoked, since: r.RevokedAt, of: r.ThisUpdate, next: r.NextUpdate, signer: end}); {
	case r.Status != ocsp.Good && r.Status != ocsp.Revoked:
		return invalid("the responder does not know certificate %x", cert.SerialNumber)
	case !a.next.IsZero() && !a.next.After(a.of):
		return invalid("the responder's answer ends at %s, and is of %s", a.next.UTC().Format(time.RFC3339), a.of.UTC().Format(time.RFC3339))
	case r.ProducedAt.After(now.Add(ahead)):
		return nil, refuse(OCSPStale, "the responder's answer is from the future, %s; are the clocks right?", r.ProducedAt.UTC().Format(time.RFC3339))
	default:
		return a, nil
	}
}

// checkDelegate holds that an issuer has let a responder answer for it (RFC 6960 section 4.2.2.2).
func checkDelegate(c, issuer *x509.Certificate, now time.Time) error {
	if err := c.CheckSignatureFrom(issuer); err != nil || !bytes.Equal(c.RawIssuer, issuer.RawSubject) {
		return fmt.Errorf("its certificate is not of %q", issuer.Subject)
	}
	switch {
	case !slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageOCSPSigning):
		return errors.New("its certificate is not for signing answers (id-kp-OCSPSigning)")
	case now.Before(c.NotBefore) || now.After(c.NotAfter):
		return fmt.Errorf("its certificate is valid from %s to %s", c.NotBefore.UTC().Format(time.RFC3339), c.NotAfter.UTC().Format(time.RFC3339))
	case c.KeyUsage != 0 && c.KeyUsage&x509.KeyUsageDigitalSignature == 0:
		return errors.New("its certificate may not sign, by its key usage")
	case len(c.UnhandledCriticalExtensions) > 0:
		return fmt.Errorf("its certificate has the unknown critical extension %s", c.UnhandledCriticalExtensions[0])
	}
	return checkKey(c)
}

func publicKeyBits(c *x509.Certificate) ([]byte, error) {
	var info struct {
		Algorithm pkix.AlgorithmIdentifier
		Key       asn1.BitString
	}
	if _, err := asn1.Unmarshal(c.RawSubjectPublicKeyInfo, &info); err != nil {
		return nil, err
	}
	return info.Key.RightAlign(), nil
}

func hashed(by crypto.Hash, b []byte) []byte {
	h := by.New()
	h.Write(b)
	return h.Sum(nil)
}
