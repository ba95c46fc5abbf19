package gateway

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/model"
)

// folder has files of a test.
type folder struct {
	t    *testing.T
	name string
}

func (f folder) certificates(name string, list ...*x509.Certificate) {
	f.t.Helper()
	var text []byte
	for _, c := range list {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	f.write(name, text, 0o644)
}

func (f folder) key(name string, key crypto.PrivateKey, mode os.FileMode) {
	f.t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		f.t.Fatal(err)
	}
	f.write(name, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), mode)
}

func (f folder) write(name string, text []byte, mode os.FileMode) {
	f.t.Helper()
	name = filepath.Join(f.name, name)
	if err := os.WriteFile(name, text, mode); err != nil {
		f.t.Fatal(err)
	}
	if err := os.Chmod(name, mode); err != nil {
		f.t.Fatal(err)
	}
}

func TestFilesThatAreWrongAreNamed(t *testing.T) {
	f := folder{t, t.TempDir()}
	staff, other, web := newIssuer(t, "staff", nil, nil), newIssuer(t, "other", nil, nil), newIssuer(t, "web", nil, nil)
	below := newIssuer(t, "below", staff, nil)
	shop := web.server(t, "shop.example.org")
	f.certificates("staff.pem", staff.cert, below.cert)
	f.certificates("leaf.pem", staff.client(t, "/x").Leaf)
	f.certificates("below.pem", below.cert)
	f.certificates("shop.pem", shop.Leaf, web.cert)
	f.certificates("turned.pem", web.cert, shop.Leaf)
	f.certificates("web.pem", web.cert)
	f.key("shop.key", shop.PrivateKey, 0o600)
	f.key("open.key", shop.PrivateKey, 0o644)
	f.key("other.key", newKey(t), 0o600)
	f.key("web.key", web.key, 0o600)
	f.write("nothing", []byte("hello\n"), 0o600)
	f.write("staff.crl", pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: staff.list(t, 1, nil)}), 0o644)
	f.write("der.crl", staff.list(t, 1, nil), 0o644)
	f.write("other.crl", pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: other.list(t, 1, nil)}), 0o644)
	f.write("late.crl", staff.list(t, 1, func(l *x509.RevocationList) { l.ThisUpdate = time.Now().Add(time.Hour) }), 0o644)

	clients := func(change func(*model.Clients)) error {
		c := model.Clients{Name: "staff", CA: "staff.pem", Kind: model.IdentitySPIFFE, Within: "staff.example", CRL: "staff.crl", OlderThan: time.Hour}
		change(&c)
		_, err := LoadClients(c, f.name, time.Now())
		return err
	}
	certificate := func(change func(*model.Service)) error {
		s := model.Service{Name: "shop", Hosts: []string{"shop.example.org"}, Certificate: "shop.pem", Key: "shop.key"}
		change(&s)
		_, err := LoadCertificate(s, f.name, time.Now())
		return err
	}
	origin := func(change func(*model.Origin)) error {
		s := model.Service{Name: "shop", Origin: model.Origin{CA: "web.pem", Name: "shop.internal"}}
		change(&s.Origin)
		_, err := LoadOrigin(s, f.name)
		return err
	}
	for name, test := range map[string]struct {
		err  error
		says string // "": it is right
	}{
		"clients":                  {clients(func(*model.Clients) {}), ""},
		"a list in DER":            {clients(func(c *model.Clients) { c.CRL = "der.crl" }), ""},
		"short lives":              {clients(func(c *model.Clients) { c.CRL, c.Lifetime = "", time.Hour }), ""},
		"no CA file":               {clients(func(c *model.Clients) { c.CA = "missing.pem" }), "missing.pem is not there"},
		"a CA file without any":    {clients(func(c *model.Clients) { c.CA = "nothing" }), "has no certificate in PEM"},
		"a CA file with a leaf":    {clients(func(c *model.Clients) { c.CA, c.CRL, c.Lifetime = "leaf.pem", "", time.Hour }), "is a leaf and no authority"},
		"a CA file without a root": {clients(func(c *model.Clients) { c.CA, c.CRL, c.Lifetime = "below.pem", "", time.Hour }), "add the root"},
		"a CA file with a key":     {clients(func(c *model.Clients) { c.CA = "shop.key" }), "has a PRIVATE KEY"},
		"nothing that ends":        {clients(func(c *model.Clients) { c.CRL = "" }), "give a list of revoked certificates, have responders asked (OCSP), or bound their lifetime"},
		"any age of lists":         {clients(func(c *model.Clients) { c.OlderThan = 0 }), "say how old"},
		"a list of another issuer": {clients(func(c *model.Clients) { c.CRL = "other.crl" }), "is signed by none of the authorities"},
		"a list from the future":   {clients(func(c *model.Clients) { c.CRL = "late.crl" }), "from the future"},
		"a list that is none":      {clients(func(c *model.Clients) { c.CRL = "nothing" }), "read the list of revoked certificates"},
		"no trust domain":          {clients(func(c *model.Clients) { c.Within = "Staff" }), "is not a trust domain"},
		"a certificate":            {certificate(func(*model.Service) {}), ""},
		"another's key":            {certificate(func(s *model.Service) { s.Key = "other.key" }), "has the key of another certificate"},
		"a key for all to read":    {certificate(func(s *model.Service) { s.Key = "open.key" }), "others may read the key (mode 0644)"},
		"no key":                   {certificate(func(s *model.Service) { s.Key = "nothing" }), "there is no private key in PEM"},
		"an authority first":       {certificate(func(s *model.Service) { s.Certificate, s.Key = "turned.pem", "web.key" }), "the service's own comes first"},
		"another host":             {certificate(func(s *model.Service) { s.Hosts = []string{"www.example.org"} }), "not for host www.example.org"},
		"an origin":                {origin(func(*model.Origin) {}), ""},
		"a plain origin":           {origin(func(o *model.Origin) { *o = model.Origin{} }), ""},
		"an origin without a name": {origin(func(o *model.Origin) { o.Name = "" }), "say which name"},
		"an origin's own":          {origin(func(o *model.Origin) { o.CA = "leaf.pem" }), "is a leaf and no authority"},
	} {
		if test.says == "" && test.err != nil || test.says != "" && (test.err == nil || !strings.Contains(test.err.Error(), test.says)) {
			t.Errorf("%s: %v; want %q", name, test.err, test.says)
		}
	}
}
