package gateway

import (
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"

	"golang.org/x/crypto/ocsp"
)

// outerAnswer and basicAnswer are what a responder's answer is wrapped in (RFC 6960 section 4.2.1).
type outerAnswer struct {
	Status asn1.Enumerated
	Inside struct {
		Type  asn1.ObjectIdentifier
		Bytes []byte
	} `asn1:"explicit,tag:0,optional"`
}

type basicAnswer struct {
	Data         asn1.RawValue
	Algorithm    pkix.AlgorithmIdentifier
	Signature    asn1.BitString
	Certificates []asn1.RawValue `asn1:"explicit,tag:0,optional"`
}

// signedAnswer is an answer with its signature, which is not verified.
type signedAnswer struct {
	*ocsp.Response
	algorithm pkix.AlgorithmIdentifier
	signer    *x509.Certificate // that came with it; nil: none
}

// parseAnswer parses an answer about a certificate. The library knows neither Ed25519 nor RSA-PSS, and refuses an answer that comes with a
// certificate and is signed by one of these; so it gets the answer without certificates, and verifies nothing.
func parseAnswer(der []byte, cert *x509.Certificate) (*signedAnswer, error) {
	var outer outerAnswer
	rest, err := asn1.Unmarshal(der, &outer)
	if err == nil && len(rest) > 0 {
		err = errors.New("something follows it")
	}
	if err != nil {
		return nil, err
	}
	var basic basicAnswer
	bare := der
	if len(outer.Inside.Bytes) > 0 {
		rest, err := asn1.Unmarshal(outer.Inside.Bytes, &basic)
		if err == nil && len(rest) > 0 {
			err = errors.New("something follows its signature")
		}
		if err != nil {
			return nil, err
		}
		without := basic
		without.Certificates = nil
		if outer.Inside.Bytes, err = asn1.Marshal(without); err != nil {
			return nil, err
		}
		if bare, err = asn1.Marshal(outer); err != nil {
			return nil, err
		}
	}
	out := &signedAnswer{algorithm: basic.Algorithm}
	if out.Response, err = ocsp.ParseResponseForCert(bare, cert, nil); err != nil {
		return nil, err
	}
	if len(basic.Certificates) > 0 { // others after the first are of authorities
		if out.signer, err = x509.ParseCertificate(basic.Certificates[0].FullBytes); err != nil {
			return nil, fmt.Errorf("its certificate: %w", err)
		}
	}
	return out, nil
}

// check holds that a certificate's key has signed the answer.
func (a *signedAnswer) check(by *x509.Certificate) error {
	algorithm, err := a.signatureAlgorithm()
	if err != nil {
		return err
	}
	return by.CheckSignature(algorithm, a.TBSResponseData, a.Signature)
}

var (
	oidEd25519 = asn1.ObjectIdentifier{1, 3, 101, 112}                 // RFC 8410 section 3
	oidPSS     = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 10}    // RFC 4055 section 3.1
	oidMGF1    = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 8}     // section 2.2
	oidSHA256  = asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 2, 1} // section 2.1
	oidSHA384  = asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 2, 2}
	oidSHA512  = asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 2, 3}
)

// pssParameters are RSASSA-PSS-params of RFC 4055 section 3.1. Where one is left out it stands for SHA-1, which nobody may use.
type pssParameters struct {
	Hash    pkix.AlgorithmIdentifier `asn1:"explicit,tag:0"`
	MGF     pkix.AlgorithmIdentifier `asn1:"explicit,tag:1"`
	Salt    int                      `asn1:"explicit,tag:2"`
	Trailer int                      `asn1:"optional,explicit,tag:3,default:1"`
}

func (a *signedAnswer) signatureAlgorithm() (x509.SignatureAlgorithm, error) {
	if a.SignatureAlgorithm != x509.UnknownSignatureAlgorithm {
		return a.SignatureAlgorithm, nil
	}
	switch oid := a.algorithm.Algorithm; {
	case oid.Equal(oidEd25519) && len(a.algorithm.Parameters.FullBytes) == 0:
		return x509.PureEd25519, nil
	case oid.Equal(oidPSS):
		return pssAlgorithm(a.algorithm.Parameters.FullBytes)
	}
	return 0, fmt.Errorf("it is signed by an algorithm that is not known, %s", a.algorithm.Algorithm)
}

// pssAlgorithm knows the parameters that certificates may have, too: one hash for all, and a salt of its length.
func pssAlgorithm(der []byte) (x509.SignatureAlgorithm, error) {
	var p pssParameters
	if rest, err := asn1.Unmarshal(der, &p); err != nil || len(rest) > 0 || p.Trailer != 1 || !p.MGF.Algorithm.Equal(oidMGF1) {
		return 0, errors.New("the parameters of its signature (RSA-PSS) are not those of RFC 4055 with SHA-256, SHA-384 or SHA-512")
	}
	var hash pkix.AlgorithmIdentifier
	if rest, err := asn1.Unmarshal(p.MGF.Parameters.FullBytes, &hash); err != nil || len(rest) > 0 || !hash.Algorithm.Equal(p.Hash.Algorithm) {
		return 0, errors.New("its signature (RSA-PSS) has two hashes")
	}
	for _, known := range []struct {
		oid       asn1.ObjectIdentifier
		hash      crypto.Hash
		algorithm x509.SignatureAlgorithm
	}{{oidSHA256, crypto.SHA256, x509.SHA256WithRSAPSS}, {oidSHA384, crypto.SHA384, x509.SHA384WithRSAPSS}, {oidSHA512, crypto.SHA512, x509.SHA512WithRSAPSS}} {
		if p.Hash.Algorithm.Equal(known.oid) && p.Salt == known.hash.Size() {
			return known.algorithm, nil
		}
	}
	return 0, fmt.Errorf("its signature (RSA-PSS) is by hash %s with a salt of %d bytes; expect SHA-256, SHA-384 or SHA-512, and a salt of the hash's length", p.Hash.Algorithm, p.Salt)
}
