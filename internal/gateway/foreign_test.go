package gateway

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// onDisk writes what other programs read: the certificate with its key, and the authority of servers.
func (w *world) onDisk(c tls.Certificate) (client, ca string) {
	w.t.Helper()
	dir := w.t.TempDir()
	key, err := x509.MarshalECPrivateKey(c.PrivateKey.(*ecdsa.PrivateKey))
	if err != nil {
		w.t.Fatal(err)
	}
	text := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate[0]}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: key})...)
	client, ca = filepath.Join(dir, "client.pem"), filepath.Join(dir, "ca.pem")
	for name, b := range map[string][]byte{client: text, ca: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: w.web.cert.Raw})} {
		if err := os.WriteFile(name, b, 0o600); err != nil {
			w.t.Fatal(err)
		}
	}
	return client, ca
}

func run(t *testing.T, stdin string, name string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Fatalf("%s is not installed; tools/deps.sh test installs it", name)
	}
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, _ := cmd.CombinedOutput() // how it ends, its text says
	return string(out)
}

func TestCurlIsServed(t *testing.T) {
	w := newWorld(t, nil)
	client, ca := w.onDisk(w.staff.client(t, "/ops/olga"))
	_, port, _ := net.SplitHostPort(w.address)
	curl := func(args ...string) string {
		return run(t, "", "curl", append([]string{"-sS", "-m", "20", "--noproxy", "*", "--cacert", ca, "--resolve", "shop.example.org:" + port + ":127.0.0.1",
			"-w", "|%{http_version} %{http_code} %{num_connects}\n"}, args...)...)
	}
	url := "https://shop.example.org:" + port
	for _, version := range []string{"1.1", "2"} {
		// Two requests of one connection, each by its chain.
		got := curl("--http"+version, "--cert", client, url+"/status", "--next", "-sS", "-m", "20", "--noproxy", "*", "--cacert", ca, "--cert", client, "--http"+version,
			"-w", "|%{http_version} %{http_code} %{num_connects}\n", url+"/files/a")
		if want := "hello|" + version + " 200 1\nhello|" + version + " 200 0\n"; got != want {
			t.Errorf("curl prints %q; want %q", got, want)
		}
	}
	if got := curl("--http2", "--cert", client, url+"/secret"); !strings.HasSuffix(got, "|2 403 1\n") {
		t.Errorf("curl prints %q for what no rule allows; want 403", got)
	}
	if got := curl(url + "/status"); !strings.Contains(got, "certificate required") {
		t.Errorf("curl without a certificate prints %q; want the alert certificate_required", got)
	}
	var chains []string
	for _, r := range w.log() {
		if r.Event == EventDecided {
			chains = append(chains, r.Chain)
		}
	}
	if got := strings.Join(chains, " "); got != "light deep light deep" {
		t.Errorf("requests took %s", got)
	}
}

func TestOpenSSLResumesUntilTheCertificateIsRevoked(t *testing.T) {
	w := newWorld(t, nil)
	c := w.staff.client(t, "/eng/alice")
	client, ca := w.onDisk(c)
	kept := filepath.Join(t.TempDir(), "session")
	const request = "GET /x HTTP/1.1\r\nHost: shop.example.org\r\nConnection: close\r\n\r\n"
	openssl := func(args ...string) string {
		return run(t, request, "openssl", append([]string{"s_client", "-connect", w.address, "-servername", "shop.example.org", "-CAfile", ca, "-verify_return_error", "-ign_eof"}, args...)...)
	}
	if got := openssl("-cert", client, "-key", client, "-sess_out", kept); !strings.Contains(got, "New, TLSv1.3") || !strings.Contains(got, "HTTP/1.1 200 OK") {
		t.Fatalf("openssl prints %s", got)
	}
	if got := openssl("-sess_in", kept); !strings.Contains(got, "Reused, TLSv1.3") || !strings.Contains(got, "HTTP/1.1 200 OK") {
		t.Fatalf("with its session openssl prints %s", got)
	}
	if got := openssl("-servername", "other.example.org", "-sess_in", kept); strings.Contains(got, "Reused") || strings.Contains(got, "HTTP/1.1 200") {
		t.Errorf("with its session openssl is served by another service: %s", got)
	}
	if err := w.lists.Take(w.staff.list(t, 2, nil, c.Leaf), time.Now()); err != nil {
		t.Fatal(err)
	}
	if got := openssl("-sess_in", kept); strings.Contains(got, "HTTP/1.1 200") {
		t.Errorf("with a revoked certificate's session openssl prints %s", got)
	}
	if n := w.gateway.Refused()[CertRevoked]; n != 1 {
		t.Errorf("%d refusals as cert-revoked; want 1", n)
	}
}

// The lists that openssl makes are those that are taken.
func TestListsOfOpenSSLAreTaken(t *testing.T) {
	w := newWorld(t, nil)
	c := w.staff.client(t, "/eng/alice")
	dir := t.TempDir()
	key, err := x509.MarshalECPrivateKey(w.staff.key.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	file := func(name string, b []byte) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	ca := file("ca.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: w.staff.cert.Raw}))
	caKey := file("ca.key", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: key}))
	victim := file("victim.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate[0]}))
	file("index.txt", nil)
	file("crlnumber", []byte("10\n"))
	config := file("ca.conf", []byte("[ca]\ndefault_ca=d\n[d]\ndatabase="+filepath.Join(dir, "index.txt")+"\ncrlnumber="+filepath.Join(dir, "crlnumber")+"\ndefault_md=sha256\ndefault_crl_days=1\n"))
	run(t, "", "openssl", "ca", "-config", config, "-cert", ca, "-keyfile", caKey, "-revoke", victim)
	out := filepath.Join(dir, "staff.crl")
	said := run(t, "", "openssl", "ca", "-config", config, "-cert", ca, "-keyfile", caKey, "-gencrl", "-out", out)
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	b, _ := pem.Decode(text)
	conn := w.held(&c)
	if err := w.lists.Take(b.Bytes, time.Now()); err != nil {
		t.Fatal(err)
	}
	over(t, conn)
	w.refused(CertRevoked)
	io.Copy(io.Discard, conn)
}
