package demo

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// authority signs certificates that are good for an hour, and writes them into a folder.
type authority struct {
	folder string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	serial int64
	list   int64 // number of its last list of revoked certificates
}

func newAuthority(folder, name string) (*authority, error) {
	a := &authority{folder: folder}
	c, err := a.sign(func(c *x509.Certificate) {
		c.Subject.CommonName, c.IsCA, c.KeyUsage = name, true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	})
	if err != nil {
		return nil, err
	}
	a.cert, a.key = c.Leaf, c.PrivateKey.(*ecdsa.PrivateKey)
	return a, a.write(name, "CERTIFICATE", a.cert.Raw)
}

// sign makes a key and a certificate; the first is the authority's own.
func (a *authority) sign(change func(*x509.Certificate)) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	a.serial++
	now := time.Now()
	c := &x509.Certificate{
		SerialNumber: big.NewInt(a.serial), Subject: pkix.Name{CommonName: "demo"}, NotBefore: now.Add(-time.Minute), NotAfter: now.Add(time.Hour),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature,
	}
	change(c)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, err
}

// server makes files of a certificate for a name, and of its key.
func (a *authority) server(file, keyFile, name string) (tls.Certificate, error) {
	c, err := a.sign(func(c *x509.Certificate) {
		c.DNSNames, c.ExtKeyUsage = []string{name}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
	if err != nil {
		return c, err
	}
	key, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	return c, errors.Join(err, a.write(file, "CERTIFICATE", c.Leaf.Raw), a.write(keyFile, "PRIVATE KEY", key))
}

// client is known by a path below the trust domain of the example.
func (a *authority) client(path string) (tls.Certificate, error) {
	return a.sign(func(c *x509.Certificate) {
		c.URIs, c.ExtKeyUsage = []*url.URL{{Scheme: "spiffe", Host: "staff.example", Path: path}}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	})
}

// revoke writes the next list of revoked certificates.
func (a *authority) revoke(file string, certs ...*x509.Certificate) error {
	a.list++
	now := time.Now()
	l := &x509.RevocationList{Number: big.NewInt(a.list), ThisUpdate: now.Add(-time.Minute), NextUpdate: now.Add(time.Hour)}
	for _, c := range certs {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: now})
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, a.cert, a.key)
	if err != nil {
		return err
	}
	return a.write(file, "X509 CRL", der)
}

// write replaces a file whole.
func (a *authority) write(name, kind string, der []byte) error {
	next := filepath.Join(a.folder, name+".next")
	text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	return errors.Join(os.WriteFile(next, text, 0o600), os.Rename(next, filepath.Join(a.folder, name)))
}
