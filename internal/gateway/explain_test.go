package gateway

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/model"
)

// Of a service that is not HTTP no request is asked about: who and host decide.
func TestExplainSaysWhoIsCarried(t *testing.T) {
	f := folder{t, t.TempDir()}
	w := newWorld(t, nil)
	f.certificates("staff.pem", w.staff.cert)
	f.write("staff.crl", pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: w.staff.list(t, 2, nil)}), 0o644)
	s := model.Service{Name: "db", Hosts: []string{"db.example.org", "db2.example.org"}, Opaque: model.Opaque{On: true, Idle: time.Hour}, Rules: []model.ServiceRule{
		{Who: "spiffe://staff.example/ops/*", Hosts: []string{"db2.example.org"}, Chain: "deep"}, {Who: "spiffe://staff.example/ops/*", Chain: "light"},
	}}
	clients := model.Clients{Name: "staff", CA: "staff.pem", Kind: model.IdentitySPIFFE, Within: "staff.example", CRL: "staff.crl", OlderThan: time.Hour}
	for _, test := range []struct {
		path, host string
		rule       int
		misses     string
	}{
		{"/ops/alice", "db.example.org", 1, "host,"}, {"/ops/alice", "DB2.example.org:5432", 0, ","}, {"/eng/bob", "db.example.org", -1, "who,who"},
	} {
		c := w.staff.client(t, test.path)
		x, err := Explain(s, clients, Folder(f.name), Question{Shown: []*x509.Certificate{c.Leaf}, Host: test.host}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if x.Rule != test.rule || strings.Join(x.Misses, ",") != test.misses || (x.Refusal != nil) != (test.rule < 0) || x.Refusal != nil && x.Refusal.Reason != RuleNone {
			t.Errorf("%s at %s: %+v", test.path, test.host, x)
		}
	}
}

// What Explain says is what the gateway does, by its audit log.
func TestExplainSaysWhatTheGatewayDoes(t *testing.T) {
	f := folder{t, t.TempDir()}
	list := []model.ServiceRule{
		{Who: "spiffe://staff.example/ops/*", Methods: []string{"GET"}, Path: "/status", Chain: "light"},
		{Who: "spiffe://staff.example/ops/*", Path: "/beta/**", Headers: []model.ServiceHeader{{Name: "X-Version", Value: "beta"}}, Chain: "deep"},
		{Who: "spiffe://staff.example/eng/**", Hosts: []string{"www.example.org"}, Chain: "deep"},
	}
	w := newWorld(t, func(w *world, c *Config) { c.Services[0].Rules = w.rules(list...) })
	f.certificates("staff.pem", w.staff.cert)
	ops, eng := w.staff.client(t, "/ops/alice"), w.staff.client(t, "/eng/a/b")
	gone, stranger := w.staff.client(t, "/ops/mallory"), newIssuer(t, "other", nil, nil).client(t, "/ops/eve")
	revoked := w.staff.list(t, 2, nil, gone.Leaf)
	if err := w.lists.Take(revoked, time.Now()); err != nil {
		t.Fatal(err)
	}
	f.write("staff.crl", pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: revoked}), 0o644)
	s := model.Service{Name: "shop", Hosts: w.services[0].Hosts, Address: w.services[0].Origin.Address, Rules: list}
	clients := model.Clients{Name: "staff", CA: "staff.pem", Kind: model.IdentitySPIFFE, Within: "staff.example", CRL: "staff.crl", OlderThan: time.Hour}

	for _, test := range []struct {
		client               *tls.Certificate
		host, method, target string
		header               string
		rule                 int    // from 1; 0: refused
		reason               Reason // of the refusal
		misses               string // of all rules, where they were asked
	}{
		{client: &ops, target: "/status", rule: 1, misses: ",path,who"},
		{client: &ops, target: "/a/../status?x=1", rule: 1, misses: ",path,who"},
		{client: &ops, target: "/%73tatus", rule: 1, misses: ",path,who"},
		{client: &ops, target: "/status", method: "POST", reason: RuleNone, misses: "method,path,who"},
		{client: &ops, target: "/beta/x", header: "X-Version: beta", rule: 2, misses: "path,,who"},
		{client: &ops, target: "/beta/x", header: "X-Version: alpha", reason: RuleNone, misses: "path,header X-Version,who"},
		{client: &ops, target: "/beta/x", header: "X_Version: beta", reason: RuleNone, misses: "path,header X-Version,who"},
		{client: &ops, target: "/a%2fb", reason: PathAmbiguous},
		{client: &ops, target: "/status", method: "TRACE", reason: MethodRefused},
		{client: &eng, target: "/x", reason: RuleNone, misses: "who,who,host"},
		{client: &eng, host: "www.example.org", target: "/x", rule: 3, misses: "who,who,"},
		{client: nil, target: "/status", reason: CertMissing},
		{client: &gone, target: "/status", reason: CertRevoked},
		{client: &stranger, target: "/status", reason: CertUntrusted},
	} {
		if test.host == "" {
			test.host = "shop.example.org"
		}
		if test.method == "" {
			test.method = "GET"
		}
		q := Question{Host: test.host, Method: test.method, Target: test.target, Header: http.Header{}}
		if test.client != nil {
			q.Shown = []*x509.Certificate{test.client.Leaf}
		}
		if name, value, ok := strings.Cut(test.header, ": "); ok {
			q.Header[name] = []string{value}
		}
		x, err := Explain(s, clients, Folder(f.name), q, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		var reason Reason
		if x.Refusal != nil {
			reason = x.Refusal.Reason
		}
		if x.Rule+1 != test.rule || reason != test.reason || strings.Join(x.Misses, ",") != test.misses {
			t.Errorf("%+v: explained as rule %d, reason %q, misses %q", test, x.Rule+1, reason, x.Misses)
		}

		before := len(w.log())
		if conn, err := w.connect(w.tls(test.client, test.host)); err == nil {
			var headers []string
			if test.header != "" {
				headers = append(headers, test.header)
			}
			if r, err := ask(conn, test.method, test.target, test.host, headers...); err == nil {
				r.Body.Close()
			}
			conn.Close()
		}
		rule, reason := 0, Reason("")
		for deadline := time.Now().Add(await.Limit(20 * time.Second)); rule == 0 && reason == ""; {
			for _, r := range w.log()[before:] {
				if r.Event == EventDecided {
					rule = r.Rule
				}
				if r.Event == EventRefused {
					reason = r.Reason
				}
			}
			if time.Now().After(deadline) {
				t.Fatalf("%+v: the gateway says nothing", test)
			}
		}
		if rule != x.Rule+1 || x.Refusal != nil && reason != x.Refusal.Reason {
			t.Errorf("%+v: the gateway decides rule %d, reason %q; explained as %d, %v", test, rule, reason, x.Rule+1, x.Refusal)
		}
	}
}

func TestFilesThatAreHereAreChecked(t *testing.T) {
	f := folder{t, t.TempDir()}
	staff, web := newIssuer(t, "staff", nil, nil), newIssuer(t, "web", nil, nil)
	shop := web.server(t, "shop.example.org")
	at := func(line int) model.Source { return model.Source{File: "x.yaml", Line: line, Column: 1} }
	clients := []model.Clients{{Name: "staff", CA: "ca.pem", Kind: model.IdentitySPIFFE, Within: "staff.example", CRL: "staff.crl", OlderThan: time.Hour, At: at(1), CRLAt: at(2)}}
	services := []model.Service{{Name: "shop", Hosts: []string{"shop.example.org"}, Certificate: "shop.pem", Key: "shop.key", CertificateAt: at(3),
		Origin: model.Origin{CA: "origin.pem", Name: "shop.internal", CAAt: at(4)}}}
	check := func(what string, want ...string) {
		t.Helper()
		errs := CheckFiles(clients, services, Folder(f.name), time.Now())
		if len(errs) != len(want) {
			t.Errorf("%s: %v; want %q", what, errs, want)
			return
		}
		for i, err := range errs {
			if !strings.HasPrefix(err.Error(), want[i][:9]) || !strings.Contains(err.Error(), want[i][9:]) {
				t.Errorf("%s: %v; want %q", what, err, want[i])
			}
		}
	}
	check("no file is here")
	f.certificates("ca.pem", staff.cert)
	f.certificates("shop.pem", shop.Leaf)
	f.certificates("origin.pem", web.cert)
	check("some files are here")
	f.key("shop.key", shop.PrivateKey, 0o600)
	f.write("staff.crl", staff.list(t, 1, nil), 0o644)
	check("all files are here")
	f.write("staff.crl", web.list(t, 1, nil), 0o644)
	check("list of another", "x.yaml:2:signed by none of the authorities")
	f.certificates("ca.pem", staff.client(t, "/x").Leaf)
	f.certificates("origin.pem", shop.Leaf)
	f.key("shop.key", newKey(t), 0o600)
	check("leaves for authorities", "x.yaml:1:is a leaf and no authority", "x.yaml:3:has the key of another certificate", "x.yaml:4:is a leaf and no authority")
	if err := os.Remove(filepath.Join(f.name, "shop.key")); err != nil {
		t.Fatal(err)
	}
	check("without the key", "x.yaml:1:is a leaf", "x.yaml:4:is a leaf")
}
