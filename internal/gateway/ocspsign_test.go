package gateway

import (
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ocsp"
)

// resigned has an answer signed anew, by a key of a kind that the library does not sign with.
func resigned(t *testing.T, der []byte, algorithm pkix.AlgorithmIdentifier, sign func(data []byte) ([]byte, error)) []byte {
	t.Helper()
	var outer outerAnswer
	var basic basicAnswer
	if _, err := asn1.Unmarshal(der, &outer); err != nil {
		t.Fatal(err)
	}
	if _, err := asn1.Unmarshal(outer.Inside.Bytes, &basic); err != nil {
		t.Fatal(err)
	}
	signature, err := sign(basic.Data.FullBytes)
	if err != nil {
		t.Fatal(err)
	}
	basic.Algorithm, basic.Signature = algorithm, asn1.BitString{Bytes: signature, BitLength: 8 * len(signature)}
	if outer.Inside.Bytes, err = asn1.Marshal(basic); err != nil {
		t.Fatal(err)
	}
	out, err := asn1.Marshal(outer)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func pssOf(t *testing.T, hash, mgf asn1.ObjectIdentifier, salt int) pkix.AlgorithmIdentifier {
	t.Helper()
	marshal := func(v any) asn1.RawValue {
		b, err := asn1.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return asn1.RawValue{FullBytes: b}
	}
	return pkix.AlgorithmIdentifier{Algorithm: oidPSS, Parameters: marshal(pssParameters{
		Hash: pkix.AlgorithmIdentifier{Algorithm: hash}, MGF: pkix.AlgorithmIdentifier{Algorithm: oidMGF1, Parameters: marshal(pkix.AlgorithmIdentifier{Algorithm: mgf})}, Salt: salt, Trailer: 1,
	})}
}

// Answers of responders with keys of Ed25519 and RSA count, if they are signed as certificates may be, and by the key that they come with.
func TestAnswersAreSignedByEachKindOfKey(t *testing.T) {
	staff := newIssuer(t, "staff", nil, nil)
	client := staff.client(t, "/eng/alice").Leaf
	asked, err := newStatusRequest(client, staff.cert)
	if err != nil {
		t.Fatal(err)
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	large, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	pss := func(h crypto.Hash, salt int) func([]byte) ([]byte, error) {
		return func(data []byte) ([]byte, error) {
			return rsa.SignPSS(rand.Reader, large, h, hashed(h, data), &rsa.PSSOptions{SaltLength: salt})
		}
	}
	edSign := func(data []byte) ([]byte, error) { return ed25519.Sign(ed, data), nil }
	edAlgorithm := pkix.AlgorithmIdentifier{Algorithm: oidEd25519}
	for name, test := range map[string]struct {
		key       crypto.Signer
		algorithm pkix.AlgorithmIdentifier
		sign      func([]byte) ([]byte, error)
		want      string // "": it counts
	}{
		"Ed25519":                         {ed, edAlgorithm, edSign, ""},
		"RSA-PSS with SHA-256":            {large, pssOf(t, oidSHA256, oidSHA256, 32), pss(crypto.SHA256, 32), ""},
		"RSA-PSS with SHA-384":            {large, pssOf(t, oidSHA384, oidSHA384, 48), pss(crypto.SHA384, 48), ""},
		"RSA-PSS with SHA-512":            {large, pssOf(t, oidSHA512, oidSHA512, 64), pss(crypto.SHA512, 64), ""},
		"Ed25519 of other bytes":          {ed, edAlgorithm, func(data []byte) ([]byte, error) { return ed25519.Sign(ed, data[1:]), nil }, "is not signed by"},
		"Ed25519 with parameters":         {ed, pkix.AlgorithmIdentifier{Algorithm: oidEd25519, Parameters: asn1.NullRawValue}, edSign, "not known"},
		"Ed25519 by another key":          {large, edAlgorithm, edSign, "is not signed by"},
		"RSA-PSS with a short salt":       {large, pssOf(t, oidSHA256, oidSHA256, 8), pss(crypto.SHA256, 8), "salt of 8 bytes"},
		"RSA-PSS with a salt of zero":     {large, pssOf(t, oidSHA256, oidSHA256, 0), pss(crypto.SHA256, 0), "salt of 0 bytes"},
		"RSA-PSS with two hashes":         {large, pssOf(t, oidSHA256, oidSHA512, 32), pss(crypto.SHA256, 32), "two hashes"},
		"RSA-PSS with SHA-1":              {large, pssOf(t, asn1.ObjectIdentifier{1, 3, 14, 3, 2, 26}, asn1.ObjectIdentifier{1, 3, 14, 3, 2, 26}, 20), pss(crypto.SHA1, 20), "expect SHA-256"},
		"RSA-PSS without parameters":      {large, pkix.AlgorithmIdentifier{Algorithm: oidPSS}, pss(crypto.SHA256, 32), "not those of RFC 4055"},
		"RSA-PSS of another hash's bytes": {large, pssOf(t, oidSHA512, oidSHA512, 64), pss(crypto.SHA256, 64), "is not signed by"},
		"an unknown algorithm":            {large, pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 3, 4}}, pss(crypto.SHA256, 32), "not known, 1.2.3.4"},
	} {
		responder := sign(t, staff, test.key, func(c *x509.Certificate) {
			c.Subject.CommonName, c.ExtKeyUsage = "delegate", []x509.ExtKeyUsage{x509.ExtKeyUsageOCSPSigning}
		})
		der, err := ocsp.CreateResponse(staff.cert, responder, ocsp.Response{
			Status: ocsp.Good, SerialNumber: client.SerialNumber, ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour), Certificate: responder,
		}, newKey(t))
		if err != nil {
			t.Fatal(err)
		}
		a, err := readAnswer(resigned(t, der, test.algorithm, test.sign), client, staff.cert, asked, time.Now())
		switch refused, ok := errors.AsType[*Refusal](err); {
		case test.want == "" && (err != nil || a.revoked):
			t.Errorf("%s: %+v, %v; want that it is good", name, a, err)
		case test.want != "" && (!ok || refused.Reason != OCSPInvalid || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%s: %+v, %v; want %q", name, a, err, test.want)
		}
	}
}

// The same by a program of others: openssl signs with RSA-PSS.
func TestAnswersOfOpenSSLBySignaturesOfRSAPSS(t *testing.T) {
	staff := newIssuer(t, "staff", nil, nil)
	client := staff.client(t, "/eng/alice").Leaf
	large, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	responder := sign(t, staff, large, func(c *x509.Certificate) {
		c.Subject.CommonName, c.ExtKeyUsage = "delegate", []x509.ExtKeyUsage{x509.ExtKeyUsageOCSPSigning}
	})
	o := newOpensslCA(t, staff)
	o.signer, o.key = o.holder("delegate", responder, large)
	o.more = []string{"-rsigopt", "rsa_padding_mode:pss", "-rsigopt", "rsa_pss_saltlen:digest"}
	o.tell(client, false)
	asked, err := newStatusRequest(client, staff.cert)
	if err != nil {
		t.Fatal(err)
	}
	der, err := o.answers(asked.der)
	if err != nil {
		t.Fatal(err)
	}
	if a, err := readAnswer(der, client, staff.cert, asked, time.Now()); err != nil || a.revoked {
		t.Errorf("%+v, %v; want that it is good", a, err)
	}
	o.tell(client, true)
	if der, err = o.answers(asked.der); err != nil {
		t.Fatal(err)
	}
	if a, err := readAnswer(der, client, staff.cert, asked, time.Now()); err != nil || !a.revoked {
		t.Errorf("%+v, %v; want that it is revoked", a, err)
	}
	// Each byte counts.
	for i := range der {
		flipped := append([]byte(nil), der...)
		flipped[i] ^= 1
		if a, err := readAnswer(flipped, client, staff.cert, asked, time.Now()); err == nil && !a.revoked {
			t.Fatalf("with byte %d of %d flipped it says that the certificate is good", i, len(der))
		}
	}
}
