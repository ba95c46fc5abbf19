package gateway

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/signer"
)

// fileMax is the length in bytes of the largest file with certificates or a key.
const fileMax = 1 << 20

// LoadClients reads the files of clients, whose names count from a folder. Each error says which file is wrong, and how.
func LoadClients(c model.Clients, folder string, now time.Time) (*Clients, error) {
	return loadClients(c, Folder(folder), now)
}

func loadClients(c model.Clients, files Files, now time.Time) (*Clients, error) {
	if err := model.CheckWithin(c.Kind, c.Within); err != nil {
		return nil, fmt.Errorf("clients %s: %q %w", c.Name, c.Within, err)
	}
	authorities, err := readCertificates(files, c.CA)
	if err != nil {
		return nil, fmt.Errorf("CA of clients %s: %w", c.Name, err)
	}
	var lists *Revocations
	if c.OCSP && c.OlderThan <= 0 {
		return nil, fmt.Errorf("clients %s: say how old a responder's answer may be", c.Name)
	}
	if c.CRL != "" {
		if c.OlderThan <= 0 {
			return nil, fmt.Errorf("clients %s: say how old a list of revoked certificates may be", c.Name)
		}
		lists = NewRevocations(authorities, c.OlderThan)
		if err := loadLists(lists, files, c.CRL, now); err != nil {
			return nil, fmt.Errorf("clients %s: %w", c.Name, err)
		}
	}
	out, err := NewClients(c, authorities, lists)
	if err != nil {
		return nil, fmt.Errorf("CA of clients %s, %s: %w", c.Name, files.At(c.CA), err)
	}
	return out, nil
}

// LoadLists takes in the lists of revoked certificates that a file has: PEM, of one or several, or DER of one.
func LoadLists(r *Revocations, folder, name string, now time.Time) error {
	return loadLists(r, Folder(folder), name, now)
}

func loadLists(r *Revocations, files Files, name string, now time.Time) error {
	text, err := readFile(files, name, listMax)
	if err != nil {
		return err
	}
	blocks, err := pemBlocks(text, "X509 CRL")
	if err != nil {
		return fmt.Errorf("%s: %w", files.At(name), err)
	}
	if len(blocks) == 0 {
		blocks = [][]byte{text} // DER
	}
	for _, b := range blocks {
		if err := r.Take(b, now); err != nil {
			return fmt.Errorf("%s: %w", files.At(name), err)
		}
	}
	return nil
}

// LoadCertificate reads the certificate of a service and its key, which nobody else may read, and holds that it is for the service's hosts.
func LoadCertificate(s model.Service, folder string, now time.Time) (tls.Certificate, error) {
	return loadCertificate(s, Folder(folder), now)
}

func loadCertificate(s model.Service, files Files, now time.Time) (tls.Certificate, error) {
	fail := func(name string, err error) (tls.Certificate, error) {
		return tls.Certificate{}, fmt.Errorf("certificate of service %s, %s: %w", s.Name, files.At(name), err)
	}
	chain, err := readCertificates(files, s.Certificate)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("certificate of service %s: %w", s.Name, err)
	}
	var pair tls.Certificate
	if s.Signer != "" {
		if err := signer.CheckKey(chain[0].PublicKey); err != nil {
			return fail(s.Certificate, err)
		}
		pair = tls.Certificate{Leaf: chain[0], PrivateKey: &remoteKey{service: s.Name, cert: chain[0]}}
		for _, c := range chain {
			pair.Certificate = append(pair.Certificate, c.Raw)
		}
	} else {
		key, mode, err := files.Read(s.Key, fileMax)
		if err != nil {
			return tls.Certificate{}, fmt.Errorf("key of service %s: %w", s.Name, err)
		}
		if mode.Perm()&0o077 != 0 {
			return fail(s.Key, fmt.Errorf("others may read the key (mode %04o); chmod 600 it", mode.Perm()))
		}
		var text []byte
		for _, c := range chain {
			text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
		}
		if pair, err = tls.X509KeyPair(text, key); err != nil {
			if strings.Contains(err.Error(), "private key does not match") {
				return fail(s.Certificate, fmt.Errorf("%s has the key of another certificate", files.At(s.Key)))
			}
			return fail(s.Key, errors.New("there is no private key in PEM that could be read")) // the cause could quote it
		}
	}
	leaf := chain[0]
	switch {
	case leaf.IsCA:
		return fail(s.Certificate, errors.New("its first certificate is an authority's; the service's own comes first"))
	case now.After(leaf.NotAfter):
		return fail(s.Certificate, fmt.Errorf("it was valid until %s", leaf.NotAfter.UTC().Format(time.RFC3339)))
	case now.Before(leaf.NotBefore):
		return fail(s.Certificate, fmt.Errorf("it is valid from %s on", leaf.NotBefore.UTC().Format(time.RFC3339)))
	}
	for _, h := range s.Hosts {
		if err := leaf.VerifyHostname(h); err != nil {
			return fail(s.Certificate, fmt.Errorf("it is not for host %s: %w", h, err))
		}
	}
	return pair, nil
}

// LoadOrigin reads whose certificates an origin may have.
func LoadOrigin(s model.Service, folder string) (Origin, error) {
	return loadOrigin(s, Folder(folder))
}

func loadOrigin(s model.Service, files Files) (Origin, error) {
	o := Origin{Address: s.Origin.Address, Name: s.Origin.Name}
	if s.Origin.Plain() {
		return o, nil
	}
	if o.Name == "" {
		return o, fmt.Errorf("origin of service %s: say which name its certificate is for", s.Name)
	}
	authorities, err := readCertificates(files, s.Origin.CA)
	if err != nil {
		return o, fmt.Errorf("CA of the origin of service %s: %w", s.Name, err)
	}
	o.Roots = x509.NewCertPool()
	for _, a := range authorities {
		if err := checkAuthority(a); err != nil {
			return o, fmt.Errorf("CA of the origin of service %s, %s: %w", s.Name, files.At(s.Origin.CA), err)
		}
		o.Roots.AddCert(a)
	}
	return o, nil
}

func readFile(files Files, name string, most int64) ([]byte, error) {
	text, _, err := files.Read(name, most)
	return text, err
}

// readCertificates reads a file of certificates in PEM; there is at least one.
func readCertificates(files Files, name string) ([]*x509.Certificate, error) {
	text, err := readFile(files, name, fileMax)
	if err != nil {
		return nil, err
	}
	blocks, err := pemBlocks(text, "CERTIFICATE")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", files.At(name), err)
	}
	if len(blocks) == 0 {
		return nil, fmt.Errorf("%s has no certificate in PEM", files.At(name))
	}
	var list []*x509.Certificate
	for i, b := range blocks {
		c, err := x509.ParseCertificate(b)
		if err != nil {
			return nil, fmt.Errorf("%s: certificate %d: %w", files.At(name), i+1, err)
		}
		list = append(list, c)
	}
	return list, nil
}

// pemBlocks are the blocks of a file, which has no others, and no private key.
func pemBlocks(text []byte, kind string) ([][]byte, error) {
	var list [][]byte
	for {
		var b *pem.Block
		if b, text = pem.Decode(text); b == nil {
			return list, nil
		}
		if b.Type != kind {
			return nil, fmt.Errorf("it has a %s; expect %s alone", b.Type, kind)
		}
		list = append(list, b.Bytes)
	}
}
