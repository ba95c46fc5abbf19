package cli

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/command"
)

// clientFiles makes a folder with the example's domain file, the files of its clients, and certificates of alice,
// of ops, and of mallory, who is revoked.
func clientFiles(t *testing.T) (folder string, until time.Time) {
	t.Helper()
	folder = t.TempDir()
	write := func(name, kind string, der []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now().UTC().Truncate(time.Second)
	until = now.Add(time.Hour)
	issue := func(name string, serial int64, by *x509.Certificate, key *ecdsa.PrivateKey, change func(*x509.Certificate)) (*x509.Certificate, *ecdsa.PrivateKey) {
		t.Helper()
		own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name}, NotBefore: now.Add(-time.Minute), NotAfter: until,
			KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true}
		change(c)
		if by == nil {
			by, key = c, own
		}
		der, err := x509.CreateCertificate(rand.Reader, c, by, own.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		write(name+".pem", "CERTIFICATE", der)
		if c, err = x509.ParseCertificate(der); err != nil {
			t.Fatal(err)
		}
		return c, own
	}
	ca, key := issue("staff-ca", 1, nil, nil, func(c *x509.Certificate) { c.IsCA, c.KeyUsage = true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign })
	client := func(path string) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			c.ExtKeyUsage, c.URIs = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, []*url.URL{{Scheme: "spiffe", Host: "staff.example", Path: path}}
		}
	}
	issue("alice", 10, ca, key, client("/ops/alice"))
	issue("bob", 11, ca, key, client("/shop/bob"))
	issue("mallory", 12, ca, key, client("/ops/mallory"))
	list, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: now.Add(-time.Minute), NextUpdate: until,
		RevokedCertificateEntries: []x509.RevocationListEntry{{SerialNumber: big.NewInt(12), RevocationTime: now.Add(-time.Minute)}}}, ca, key)
	if err != nil {
		t.Fatal(err)
	}
	write("staff.crl", "X509 CRL", list)
	text, err := os.ReadFile("../../examples/zerotrust.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "domain.yaml"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	return folder, until
}

func TestGatewayExplainSaysTheRule(t *testing.T) {
	folder, until := clientFiles(t)
	explain := func(args ...string) (stdout, stderr string, code int) {
		t.Helper()
		var out, errs strings.Builder
		code = Main(t.Context(), append([]string{"gateway", "explain", "-f", filepath.Join(folder, "domain.yaml")}, args...), strings.NewReader(""), &out, &errs)
		return out.String(), errs.String(), code
	}
	for _, test := range []struct {
		cert, path string
		code       int
		want       string
	}{
		{"alice", "/cart", command.ExitDone, `service   shop, at [fc00:8::2]:443, gateway on r1
client    spiffe://staff.example/ops/alice (certificate a, valid until UNTIL)
request   GET shop.example.org/cart
decision  let in by rule 4, by chain deep: fw2, dpi, out at r6
read by   the gateway on r1, the server shop.internal

  RULE  WHO                           CHAIN    THE REQUEST
     1  spiffe://staff.example/**     scan     has another method
     2  spiffe://staff.example/**     inspect  has another path
     3  spiffe://staff.example/**     light    has another path
     4  spiffe://staff.example/ops/*  deep     matches, and the rule decides
`},
		{"alice", "/public/a", command.ExitDone, `service   shop, at [fc00:8::2]:443, gateway on r1
client    spiffe://staff.example/ops/alice (certificate a, valid until UNTIL)
request   GET shop.example.org/public/a
decision  let in by rule 3, by chain light: fw, out at r6
read by   the gateway on r1, the server shop.internal

  RULE  WHO                           CHAIN    THE REQUEST
     1  spiffe://staff.example/**     scan     has another method
     2  spiffe://staff.example/**     inspect  has another path
     3  spiffe://staff.example/**     light    matches, and the rule decides
     4  spiffe://staff.example/ops/*  deep     matches; not asked
`},
		{"bob", "/public/../cart", command.ExitRefused, `service   shop, at [fc00:8::2]:443, gateway on r1
client    spiffe://staff.example/shop/bob (certificate b, valid until UNTIL)
request   GET shop.example.org/cart
decision  refused (rule-none): no rule lets GET /cart in

  RULE  WHO                           CHAIN    THE REQUEST
     1  spiffe://staff.example/**     scan     has another method
     2  spiffe://staff.example/**     inspect  has another path
     3  spiffe://staff.example/**     light    has another path
     4  spiffe://staff.example/ops/*  deep     is of another identity
`},
		{"mallory", "/", command.ExitRefused, `service   shop, at [fc00:8::2]:443, gateway on r1
client    not known (certificate c, valid until UNTIL)
request   GET shop.example.org/
decision  refused (cert-revoked): `},
		{"alice", "/a%2fb", command.ExitRefused, `service   shop, at [fc00:8::2]:443, gateway on r1
client    spiffe://staff.example/ops/alice (certificate a, valid until UNTIL)
request   GET shop.example.org/a%2fb
decision  refused (path-ambiguous): the path has an encoded slash
`},
	} {
		stdout, stderr, code := explain("--cert", filepath.Join(folder, test.cert+".pem"), "--path", test.path)
		stdout = strings.ReplaceAll(stdout, until.Format(time.RFC3339), "UNTIL")
		if code != test.code || stderr != "" || !strings.HasPrefix(stdout, test.want) {
			t.Errorf("%s %s: exit code %d, %q\n%s\nwant:\n%s", test.cert, test.path, code, stderr, stdout, test.want)
		}
	}

	text, err := os.ReadFile("testdata/sealed.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "sealed.yaml"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	stdout, stderr, code := explain("-f", filepath.Join(folder, "sealed.yaml"), "--cert", filepath.Join(folder, "alice.pem"))
	if want := "read by   the gateway on r1, dpi on r3, the server shop.internal\n"; code != command.ExitDone || stderr != "" || !strings.Contains(stdout, want) {
		t.Errorf("by a chain that dpi reads: exit code %d, %q\n%s\nwant: %s", code, stderr, stdout, want)
	}

	// A responder that the gateway would ask is not asked here, which is said.
	text, err = os.ReadFile(filepath.Join(folder, "domain.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	asked := strings.Replace(string(text), "revocation: {crl: staff.crl, older-than: 24h}", "revocation: {ocsp: true}", 1)
	if err := os.WriteFile(filepath.Join(folder, "asked.yaml"), []byte(asked), 0o600); err != nil {
		t.Fatal(err)
	}
	stdout, stderr, code = explain("-f", filepath.Join(folder, "asked.yaml"), "--cert", filepath.Join(folder, "alice.pem"))
	if want := "\nrevoked   not asked here"; code != command.ExitDone || stderr != "" || asked == string(text) || !strings.Contains(stdout, want) {
		t.Errorf("with a responder: exit code %d, %q\n%s\nwant: %s", code, stderr, stdout, want)
	}

	stdout, _, code = explain("-o", "json", "--header", "X-A: b")
	var v struct {
		Allowed bool
		Reason  string
		Rules   []any
	}
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != command.ExitRefused || v.Allowed || v.Reason != "cert-missing" || v.Rules != nil {
		t.Errorf("without a certificate: exit code %d, %v\n%s", code, err, stdout)
	}

	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"--host", "www.example.org"}, "no service has host www.example.org"},
		{[]string{"--service", "desk"}, "service desk has no host shop.example.org"},
		{[]string{"--header", "X-A"}, "is not a header"},
		{[]string{"-o", "yaml"}, "not a format"},
		{[]string{"--path", "cart"}, `GET "cart" is no request`},
		{[]string{"--cert", filepath.Join(folder, "nobody.pem")}, "is not there"},
		{[]string{"--files", t.TempDir()}, "is not there"},
	} {
		if stdout, stderr, code := explain(test.args...); code == command.ExitDone || stdout != "" || !strings.Contains(stderr, test.want) {
			t.Errorf("%s: exit code %d, %q, %q; want %q", test.args, code, stdout, stderr, test.want)
		}
	}
}

// A file that is here and wrong is refused where the domain is compiled, with the line that names it.
func TestPlanChecksFilesOfServicesThatAreHere(t *testing.T) {
	folder, _ := clientFiles(t)
	file := filepath.Join(folder, "domain.yaml")
	if _, stderr, code := runPlan(t, "", "-f", file); code != command.ExitDone {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	if err := os.Rename(filepath.Join(folder, "alice.pem"), filepath.Join(folder, "staff-ca.pem")); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := runPlan(t, "", "-f", file); code != command.ExitUsage || !strings.Contains(stderr, "domain.yaml:81:9: CA of clients staff, ") || !strings.Contains(stderr, "is a leaf and no authority") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// A service that is not HTTP is asked about by identity and host, and the plan says so.
func TestExplainAndPlanOfAServiceThatIsNotHTTP(t *testing.T) {
	folder, _ := clientFiles(t)
	file := filepath.Join(folder, "domain.yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), "    rules:")
	_, after, ok2 := strings.Cut(rest, "\n\n")
	if !ok || !ok2 {
		t.Fatal("the example has no rules before an empty line")
	}
	opaque := before + `    protocol: tls
    alpn: [postgresql]
    idle: 90m
    rules:
      - {who: "spiffe://staff.example/ops/*", chain: deep}
      - {who: "spiffe://staff.example/a/*", chain: light}
      - {who: "spiffe://staff.example/b/*", chain: scan}
      - {who: "spiffe://staff.example/c/*", chain: inspect}

` + after
	if err := os.WriteFile(file, []byte(opaque), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) (stdout, stderr string, code int) {
		t.Helper()
		var out, errs strings.Builder
		code = Main(t.Context(), args, strings.NewReader(""), &out, &errs)
		return out.String(), errs.String(), code
	}
	// The same chains behind a proxy.
	head, middle, _ := strings.Cut(before, "    origin: ")
	_, middle, _ = strings.Cut(middle, "\n")
	proxy := strings.Replace(head, "gateway: {", "gateway: {mode: connect, ", 1) + `    destinations:
      - {host: git.example.org, port: 22, address: "[fc00:8::2]:443"}
      - {host: wiki.example.org, address: "[fc00:8::2]:443"}
` + middle + `    rules:
      - {who: "spiffe://staff.example/ops/*", to: ["git.example.org:22"], chain: deep}
      - {who: "spiffe://staff.example/a/*", to: ["wiki.example.org:443"], chain: light}

` + after
	proxyFile := filepath.Join(folder, "proxy.yaml")
	if err := os.WriteFile(proxyFile, []byte(withoutSealed(proxy)), 0o600); err != nil {
		t.Fatal(err)
	}
	explain := []string{"gateway", "explain", "-f", proxyFile, "--cert", filepath.Join(folder, "alice.pem")}
	for _, test := range []struct {
		args []string
		code int
		want []string
	}{
		{append(explain, "--host", "Git.example.org:22"), command.ExitDone, []string{"let in by rule 1, by chain deep", "everybody on the way", "a connection to Git.example.org:22"}},
		{append(explain, "--host", "wiki.example.org:443"), command.ExitRefused, []string{"refused (rule-none)"}},
		{append(explain, "--service", "shop", "--host", "evil.example.org:1"), command.ExitRefused, []string{"refused (destination-unknown)"}},
		{append(explain, "--host", "evil.example.org:1"), command.ExitUsage, []string{"git.example.org:22"}},
		{append(explain, "--host", "shop.example.org"), command.ExitUsage, []string{"is a proxy", "--host git.example.org:22"}},
		{append(explain, "--host", "git.example.org:22", "--path", "/"), command.ExitUsage, []string{"leave --path out"}},
		{[]string{"plan", "-f", proxyFile}, command.ExitDone, []string{"as a proxy", "clients ask for a destination by CONNECT", "git.example.org:22", "what clients send is sealed by TLS up to the gateway on r1"}},
		{[]string{"get", "readers", "deep", "-f", proxyFile}, command.ExitDone, []string{"its gateway is a proxy"}},
		{[]string{"gateway", "explain", "-f", file, "--cert", filepath.Join(folder, "alice.pem")}, command.ExitDone,
			[]string{"asks for  a connection to shop.example.org", "let in by rule 1, by chain deep", "THE CONNECTION", "matches, and the rule decides"}},
		{[]string{"gateway", "explain", "-f", file, "--cert", filepath.Join(folder, "bob.pem")}, command.ExitRefused, []string{"refused (rule-none)", "is of another identity"}},
		{[]string{"gateway", "explain", "-f", file, "--cert", filepath.Join(folder, "alice.pem"), "--path", "/x"}, command.ExitUsage, []string{"protocol tls", "leave --path out"}},
		{[]string{"plan", "-f", file}, command.ExitDone,
			[]string{"its protocol is tls: bytes that the gateway does not read, of postgresql as both sides agree (ALPN); each connection takes one chain, and ends after 1h30m0s without a byte"}},
	} {
		stdout, stderr, code := run(test.args...)
		for _, want := range test.want {
			if code != test.code || !strings.Contains(stdout+stderr, want) {
				t.Errorf("%q: exit code %d, want %d and %q:\n%s%s", test.args, code, test.code, want, stdout, stderr)
			}
		}
	}
}

// withoutSealed takes the chains and functions of the example out that read payload, as a proxy has none, and the lab.
func withoutSealed(text string) string {
	var out []string
	text, _, _ = strings.Cut(text, "\nlab:\n")
	for line := range strings.Lines(text) {
		if !strings.Contains(line, "seal: true") && !strings.Contains(line, "intrusive: true") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}
