package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/ocsp"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/model"
)

type asker func(ctx context.Context, w *world, q StatusQuestion) ([]byte, error)

// ofResponders has clients' certificates asked about, in place of lists.
func ofResponders(ask asker) func(*world, *Config) {
	return func(w *world, c *Config) {
		clients, err := NewClients(model.Clients{Name: "staff", Kind: model.IdentitySPIFFE, Within: "staff.example", OCSP: true, OlderThan: 24 * time.Hour}, []*x509.Certificate{w.staff.cert}, nil)
		if err != nil {
			w.t.Fatal(err)
		}
		for i := range c.Services {
			c.Services[i].Clients = clients
		}
		c.Status = func(ctx context.Context, q StatusQuestion) ([]byte, error) { return ask(ctx, w, q) }
	}
}

// opensslCA is an authority whose responder is openssl's.
type opensslCA struct {
	t           *testing.T
	folder      string
	signer, key string
	more        []string

	mu    sync.Mutex
	lines map[string]string // of the index, by serial number
}

func newOpensslCA(t *testing.T, by *issuer) *opensslCA {
	t.Helper()
	o := &opensslCA{t: t, folder: t.TempDir(), lines: map[string]string{}}
	o.file("ca.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: by.cert.Raw}))
	o.signer, o.key = o.holder("ca", by.cert, by.key)
	o.index()
	return o
}

func (o *opensslCA) file(name string, b []byte) string {
	o.t.Helper()
	name = filepath.Join(o.folder, name)
	next := name + ".next"
	if err := errors.Join(os.WriteFile(next, b, 0o600), os.Rename(next, name)); err != nil {
		o.t.Fatal(err)
	}
	return name
}

func (o *opensslCA) holder(name string, cert *x509.Certificate, key crypto.Signer) (certFile, keyFile string) {
	o.t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		o.t.Fatal(err)
	}
	return o.file(name+".crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})),
		o.file(name+".key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

// index writes what openssl ca keeps.
func (o *opensslCA) index() {
	text := ""
	for _, l := range o.lines {
		text += l
	}
	o.file("index.txt", []byte(text))
}

func (o *opensslCA) tell(c *x509.Certificate, revoked bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	state, since := "V", ""
	if revoked {
		state, since = "R", time.Now().UTC().Add(-time.Second).Format("060102150405Z")
	}
	number := c.SerialNumber.Text(16)
	number = strings.ToUpper(strings.Repeat("0", len(number)%2) + number)
	o.lines[number] = fmt.Sprintf("%s\t%s\t%s\t%s\tunknown\t/CN=%s\n", state, c.NotAfter.UTC().Format("060102150405Z"), since, number, number)
	o.index()
}

func (o *opensslCA) args(args ...string) []string {
	return append(append([]string{"ocsp", "-index", filepath.Join(o.folder, "index.txt"), "-CA", filepath.Join(o.folder, "ca.pem"), "-rsigner", o.signer, "-rkey", o.key, "-rmd", "sha256"}, o.more...), args...)
}

// answers is what openssl answers a question, without a network in between.
func (o *opensslCA) answers(request []byte) ([]byte, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	q, a := o.file("q.der", request), filepath.Join(o.folder, "a.der")
	said, err := exec.Command("openssl", o.args("-nmin", "60", "-reqin", q, "-respout", a)...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("openssl ocsp: %w: %s", err, said)
	}
	return os.ReadFile(a)
}

// serves starts openssl's responder at a URL; stop ends it.
func (o *opensslCA) serves(url string) (stop func()) {
	o.t.Helper()
	cmd := exec.CommandContext(o.t.Context(), "openssl", o.args("-nmin", "60", "-port", url[strings.LastIndex(url, ":")+1:len(url)-1])...)
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err != nil {
		o.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		o.t.Fatalf("openssl is not installed; tools/deps.sh test installs it: %v", err)
	}
	o.t.Cleanup(func() {
		if o.t.Failed() {
			o.t.Logf("openssl says %s", said.String())
		}
	})
	var once sync.Once
	stop = func() { once.Do(func() { cmd.Process.Kill(); cmd.Wait() }) }
	o.t.Cleanup(stop)
	if line, err := bufio.NewReader(out).ReadString('\n'); !strings.HasPrefix(line, "ACCEPT") {
		o.t.Fatalf("openssl ocsp does not listen: %q, %v", line, err)
	}
	return stop
}

// reads makes openssl's responder look at its index, which it does before it waits for the next question.
func (o *opensslCA) reads(url string) {
	o.t.Helper()
	said, err := exec.Command("openssl", "ocsp", "-url", url, "-issuer", filepath.Join(o.folder, "ca.pem"), "-serial", "1", "-noverify").CombinedOutput()
	if err != nil {
		o.t.Fatalf("%v: %s", err, said)
	}
}

// The responder that clients' certificates name is openssl's, and asked by HTTP, of itself and of one that it has let answer.
func TestRespondersOfOpenSSLAreAsked(t *testing.T) {
	for _, delegated := range []bool{false, true} {
		t.Run(fmt.Sprintf("delegated %v", delegated), func(t *testing.T) {
			t.Parallel()
			var url atomic.Value
			f := folder{t, t.TempDir()}
			setting := model.Clients{Name: "staff", CA: "staff.pem", Kind: model.IdentitySPIFFE, Within: "staff.example", OCSP: true, OlderThan: time.Hour}
			asks := NewResponders()
			t.Cleanup(asks.Close)
			w := newWorld(t, ofResponders(func(ctx context.Context, _ *world, q StatusQuestion) ([]byte, error) {
				at, err := ResponderOf(setting, Folder(f.name), q.Certificates, time.Now())
				if err != nil || at != url.Load() {
					return nil, fmt.Errorf("the responder is %q, %v; want %v", at, err, url.Load())
				}
				return asks.Ask(ctx, at, q.Request)
			}))
			f.certificates("staff.pem", w.staff.cert)
			o := newOpensslCA(t, w.staff)
			if delegated {
				key := newKey(t)
				o.signer, o.key = o.holder("delegate", sign(t, w.staff, key, func(c *x509.Certificate) {
					c.Subject.CommonName, c.ExtKeyUsage = "delegate", []x509.ExtKeyUsage{x509.ExtKeyUsageOCSPSigning}
				}), key)
			}
			l, err := net.Listen("tcp", "127.0.0.1:0") // a port for the certificates
			if err != nil {
				t.Fatal(err)
			}
			at := "http://" + l.Addr().String() + "/"
			l.Close()
			url.Store(at)
			client := func(path string) tls.Certificate {
				key := newKey(t)
				cert := sign(t, w.staff, key, func(c *x509.Certificate) {
					c.URIs, c.OCSPServer = append(c.URIs, spiffe(t, path)), []string{"ldap://ocsp.example.org/", at}
				})
				return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
			}
			alice, bob, strange, late := client("/eng/alice"), client("/eng/bob"), client("/eng/strange"), client("/eng/late")
			o.tell(alice.Leaf, false)
			o.tell(bob.Leaf, true)
			o.tell(late.Leaf, false)
			stop := o.serves(at)
			defer func() {
				if t.Failed() {
					t.Logf("the audit log: %+v", w.log())
				}
			}()
			conn := w.held(&alice)
			if status, err := w.get(&bob, "/x"); err == nil {
				t.Errorf("a client whose certificate is revoked is answered with %d", status)
			}
			w.refused(CertRevoked)
			if status, err := w.get(&strange, "/x"); err == nil {
				t.Errorf("a client whose certificate the responder does not know is answered with %d", status)
			}
			w.counts(OCSPInvalid, 1)
			// She is revoked while she is connected, which the gateway learns when it asks again.
			o.tell(alice.Leaf, true)
			o.reads(at)
			w.offset.Add(int64(statusAgain + time.Second))
			over(t, conn)
			w.counts(CertRevoked, 2)
			stop()
			if status, err := w.get(&late, "/x"); err == nil {
				t.Errorf("a client about whom nobody tells is answered with %d", status)
			}
			w.counts(OCSPUnreachable, 1)
		})
	}
}

// badAnswer is what a responder answers about a good certificate, and why its client is refused.
type badAnswer struct {
	name string
	why  Reason
	make func(t *testing.T, w *world, q StatusQuestion) ([]byte, error)
}

// made is an answer by the certificate's issuer that differs in one thing.
func made(change func(t *testing.T, w *world, r *ocsp.Response)) func(*testing.T, *world, StatusQuestion) ([]byte, error) {
	return func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		return by(w.staff, w.staff.cert, w.staff.key, change)(t, w, q)
	}
}

func by(issuer *issuer, named *x509.Certificate, key crypto.Signer, change func(*testing.T, *world, *ocsp.Response)) func(*testing.T, *world, StatusQuestion) ([]byte, error) {
	return func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		cert, err := x509.ParseCertificate(q.Certificates[0])
		if err != nil {
			return nil, err
		}
		r := ocsp.Response{Status: ocsp.Good, SerialNumber: cert.SerialNumber, ThisUpdate: w.now().Add(-time.Minute), NextUpdate: w.now().Add(time.Hour)}
		if change != nil {
			change(t, w, &r)
		}
		return ocsp.CreateResponse(issuer.cert, named, r, key)
	}
}

// delegate is an answer by who has a certificate of some issuer.
func delegate(of func(w *world) *issuer, change func(*x509.Certificate)) func(*testing.T, *world, StatusQuestion) ([]byte, error) {
	return func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		key := newKey(t)
		cert := sign(t, of(w), key, func(c *x509.Certificate) {
			c.Subject.CommonName, c.ExtKeyUsage = "delegate", []x509.ExtKeyUsage{x509.ExtKeyUsageOCSPSigning}
			if change != nil {
				change(c)
			}
		})
		return by(w.staff, cert, key, func(_ *testing.T, _ *world, r *ocsp.Response) { r.Certificate = cert })(t, w, q)
	}
}

func itself(w *world) *issuer { return w.staff }

func fixed(b []byte) func(*testing.T, *world, StatusQuestion) ([]byte, error) {
	return func(*testing.T, *world, StatusQuestion) ([]byte, error) { return b, nil }
}

var unknownCritical = pkix.Extension{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 99999, 3}, Critical: true, Value: []byte{5, 0}}

var badAnswers = []badAnswer{
	{"that says revoked", CertRevoked, made(func(_ *testing.T, w *world, r *ocsp.Response) {
		r.Status, r.RevokedAt = ocsp.Revoked, w.now().Add(-time.Hour)
	})},
	{"that says unknown", OCSPInvalid, made(func(_ *testing.T, _ *world, r *ocsp.Response) { r.Status = ocsp.Unknown })},
	{"about another serial number", OCSPInvalid, made(func(_ *testing.T, _ *world, r *ocsp.Response) {
		r.SerialNumber = new(big.Int).Add(r.SerialNumber, big.NewInt(1))
	})},
	{"about another issuer's certificate", OCSPInvalid, func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		return by(w.web, w.staff.cert, w.staff.key, nil)(t, w, q)
	}},
	{"by another issuer", OCSPInvalid, func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		return by(w.staff, w.web.cert, w.web.key, nil)(t, w, q)
	}},
	{"by another key of the issuer's name", OCSPInvalid, func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		fake := newIssuer(t, "staff", nil, nil)
		return by(w.staff, fake.cert, fake.key, func(_ *testing.T, _ *world, r *ocsp.Response) { r.Certificate = fake.cert })(t, w, q)
	}},
	{"that names another responder", OCSPInvalid, func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		return by(w.staff, w.web.cert, w.staff.key, nil)(t, w, q)
	}},
	{"that is overdue", OCSPStale, made(func(_ *testing.T, w *world, r *ocsp.Response) { r.NextUpdate = w.now().Add(-time.Second) })},
	{"that is old", OCSPStale, made(func(_ *testing.T, w *world, r *ocsp.Response) { r.ThisUpdate = w.now().Add(-25 * time.Hour) })},
	{"from the future", OCSPStale, made(func(_ *testing.T, w *world, r *ocsp.Response) { r.ThisUpdate = w.now().Add(10 * time.Minute) })},
	{"that ends before it begins", OCSPInvalid, made(func(_ *testing.T, w *world, r *ocsp.Response) {
		r.ThisUpdate, r.NextUpdate = w.now().Add(time.Minute), w.now().Add(30*time.Second)
	})},
	{"of a moment ago, without a next one", "", made(func(_ *testing.T, _ *world, r *ocsp.Response) { r.NextUpdate = time.Time{} })},
	{"of an hour ago, without a next one", OCSPStale, made(func(_ *testing.T, w *world, r *ocsp.Response) {
		r.ThisUpdate, r.NextUpdate = w.now().Add(-time.Hour), time.Time{}
	})},
	{"with an unknown critical extension", OCSPInvalid, made(func(_ *testing.T, _ *world, r *ocsp.Response) {
		r.ExtraExtensions = []pkix.Extension{unknownCritical}
	})},
	{"to another question", OCSPInvalid, func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		cert, err := x509.ParseCertificate(q.Certificates[0])
		if err != nil {
			return nil, err
		}
		o := newOpensslCA(t, w.staff)
		o.tell(cert, false)
		other, err := newStatusRequest(cert, w.staff.cert)
		if err != nil {
			return nil, err
		}
		return o.answers(other.der)
	}},
	{"to this question, of openssl", "", func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		cert, err := x509.ParseCertificate(q.Certificates[0])
		if err != nil {
			return nil, err
		}
		o := newOpensslCA(t, w.staff)
		o.tell(cert, false)
		return o.answers(q.Request)
	}},
	{"that names its responder by key, of openssl", "", func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		cert, err := x509.ParseCertificate(q.Certificates[0])
		if err != nil {
			return nil, err
		}
		o := newOpensslCA(t, w.staff)
		o.more = []string{"-resp_key_id"}
		o.tell(cert, false)
		return o.answers(q.Request)
	}},
	{"whose names are hashed by SHA-256", "", made(func(_ *testing.T, _ *world, r *ocsp.Response) { r.IssuerHash = crypto.SHA256 })},
	{"by one that the issuer has let answer", "", delegate(itself, nil)},
	{"by a delegate without id-kp-OCSPSigning", OCSPInvalid, delegate(itself, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} })},
	{"by a delegate for any purpose", OCSPInvalid, delegate(itself, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} })},
	{"by a delegate whose certificate is over", OCSPInvalid, delegate(itself, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) })},
	{"by a delegate that may not sign", OCSPInvalid, delegate(itself, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement })},
	{"by a delegate with an unknown critical extension", OCSPInvalid, delegate(itself, func(c *x509.Certificate) { c.ExtraExtensions = []pkix.Extension{unknownCritical} })},
	{"by a delegate of another issuer", OCSPInvalid, delegate(func(w *world) *issuer { return w.web }, nil)},
	{"by a delegate below a delegate", OCSPInvalid, delegate(func(w *world) *issuer {
		key := newKey(w.t)
		return &issuer{sign(w.t, w.staff, key, func(c *x509.Certificate) {
			c.Subject.CommonName, c.ExtKeyUsage = "first", []x509.ExtKeyUsage{x509.ExtKeyUsageOCSPSigning}
		}), key}
	}, nil)},
	{"of nothing", OCSPInvalid, fixed(nil)},
	{"of random bytes", OCSPInvalid, fixed(bytes.Repeat([]byte{0x30, 0x82, 0xff}, 100))},
	{"of HTML", OCSPInvalid, fixed([]byte("<html><body>Sign in to this network</body></html>"))},
	{"that asks to come later", OCSPInvalid, fixed(ocsp.TryLaterErrorResponse)},
	{"that is of no right", OCSPInvalid, fixed(ocsp.UnauthorizedErrorResponse)},
	{"of 10 MB", OCSPInvalid, fixed(make([]byte, 10<<20))},
	{"with a byte behind it", OCSPInvalid, func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		b, err := made(nil)(t, w, q)
		return append(b, 0), err
	}},
	{"with a bit flipped", OCSPInvalid, func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		b, err := made(nil)(t, w, q)
		b[len(b)-10] ^= 1
		return b, err
	}},
	{"that does not come", OCSPUnreachable, func(*testing.T, *world, StatusQuestion) ([]byte, error) { return nil, errors.New("connection refused") }},
	{"that is good", "", made(nil)},
}

func TestAnswersOfRespondersAreVerified(t *testing.T) {
	for _, bad := range badAnswers {
		t.Run(bad.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, ofResponders(func(_ context.Context, w *world, q StatusQuestion) ([]byte, error) { return bad.make(t, w, q) }))
			c := w.staff.client(t, "/eng/alice")
			status, err := w.get(&c, "/x")
			if bad.why == "" {
				if err != nil || status != 200 {
					t.Errorf("the client is answered with %d, %v; want 200; refusals are %v", status, err, w.log())
				}
				return
			}
			if err == nil {
				t.Errorf("the client is answered with %d; want no handshake", status)
			}
			w.refused(bad.why)
			w.quiet()
		})
	}
}

// What HTTP brings is held to what an answer is, before anybody reads it.
func TestRespondersAreHeldToHTTP(t *testing.T) {
	for name, test := range map[string]struct {
		answer func(http.ResponseWriter, *http.Request)
		want   string // of the error; "": none
	}{
		"an answer": {func(rw http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodPost || r.Header.Get("Content-Type") != "application/ocsp-request" {
				http.Error(rw, "no", http.StatusBadRequest)
				return
			}
			rw.Header().Set("Content-Type", "application/ocsp-response")
			rw.Write([]byte("an answer"))
		}, ""},
		"a page": {func(rw http.ResponseWriter, _ *http.Request) { rw.Write([]byte("<html></html>")) }, "expect application/ocsp-response"},
		"an error": {func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "application/ocsp-response")
			rw.WriteHeader(http.StatusInternalServerError)
		}, "status 500"},
		"a redirection": {func(rw http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/elsewhere" {
				rw.Header().Set("Content-Type", "application/ocsp-response")
				return
			}
			http.Redirect(rw, r, "/elsewhere", http.StatusTemporaryRedirect)
		}, "status 307"},
		"10 MB": {func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "application/ocsp-response")
			rw.Write(make([]byte, 10<<20))
		}, "more than 65536 bytes"},
		"headers of 1 MB": {func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "application/ocsp-response")
			rw.Header().Set("X-Long", strings.Repeat("a", 1<<20))
		}, "exceeded"},
		"nothing, and stays": {func(_ http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body) // else the server does not see the client go
			<-r.Context().Done()
		}, "deadline exceeded"},
		"a part, and stays": {func(rw http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			rw.Header().Set("Content-Type", "application/ocsp-response")
			rw.Write([]byte{0x30})
			http.NewResponseController(rw).Flush()
			<-r.Context().Done()
		}, "deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(http.HandlerFunc(test.answer))
			defer server.Close()
			r := NewResponders()
			defer r.Close()
			ctx, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
			if test.want != "deadline exceeded" {
				stop()
				ctx, stop = context.WithTimeout(t.Context(), await.Limit(20*time.Second))
			}
			defer stop()
			der, err := r.Ask(ctx, server.URL, []byte("a question"))
			if (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) || err == nil && string(der) != "an answer" {
				t.Errorf("%q, %v; want an error with %q", der, err, test.want)
			}
		})
	}
}

// A responder that hangs costs a handshake its time, and nobody else anything.
func TestAResponderThatHangsRefuses(t *testing.T) {
	come := make(chan struct{}, 10)
	w := newWorld(t, func(w *world, c *Config) {
		ofResponders(func(ctx context.Context, w *world, q StatusQuestion) ([]byte, error) {
			if cert, err := x509.ParseCertificate(q.Certificates[0]); err != nil || cert.URIs[0].Path != "/eng/alice" {
				return made(nil)(t, w, q)
			}
			come <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		})(w, c)
		c.Limits.HandshakeTime = 500 * time.Millisecond
	})
	alice, bob := w.staff.client(t, "/eng/alice"), w.staff.client(t, "/eng/bob")
	conn := w.held(&bob)
	done := make(chan error, 1)
	go func() {
		_, err := w.get(&alice, "/x")
		done <- err
	}()
	<-come
	w.answers(conn)
	if err := <-done; err == nil {
		t.Error("a client about whom nobody tells is let in")
	}
	w.refused(OCSPUnreachable)
}

// counted is a responder of the world's that can be made to say something else, and counts questions.
type counted struct {
	asked atomic.Int64
	say   atomic.Pointer[func(*testing.T, *world, StatusQuestion) ([]byte, error)]
}

func (c *counted) says(f func(*testing.T, *world, StatusQuestion) ([]byte, error)) { c.say.Store(&f) }

func newCounted(t *testing.T) (*world, *counted) {
	c := &counted{}
	c.says(made(nil))
	return newWorld(t, ofResponders(func(_ context.Context, w *world, q StatusQuestion) ([]byte, error) {
		c.asked.Add(1)
		return (*c.say.Load())(t, w, q)
	})), c
}

// lasting is a client whose certificate outlives what a test does to the clock.
func (w *world) lasting(path string) tls.Certificate {
	key := newKey(w.t)
	cert := sign(w.t, w.staff, key, func(c *x509.Certificate) {
		c.URIs, c.NotAfter = append(c.URIs, spiffe(w.t, path)), time.Now().Add(24*time.Hour)
	})
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
}

func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(await.Limit(20 * time.Second)); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after 20 s still not: %s", what)
		}
	}
}

func noAnswer(*testing.T, *world, StatusQuestion) ([]byte, error) {
	return nil, errors.New("connection refused")
}

// An answer counts until its next update, and no longer: for who comes, and for who is there.
func TestAnAnswerIsKeptUntilItsNextUpdate(t *testing.T) {
	w, responder := newCounted(t)
	c := w.lasting("/eng/alice")
	conn := w.held(&c)
	for range 3 {
		if status, err := w.get(&c, "/x"); err != nil || status != 200 {
			t.Fatalf("%d, %v", status, err)
		}
	}
	if n := responder.asked.Load(); n != 1 {
		t.Errorf("the responder was asked %d times for four handshakes; want 1", n)
	}
	// Another gets it from a change of the configuration, too.
	if err := w.gateway.Update(w.services); err != nil {
		t.Fatal(err)
	}
	responder.says(noAnswer)
	w.offset.Add(int64(statusAgain + time.Second))
	until(t, "the responder is asked again about an open session", func() bool { return responder.asked.Load() > 1 })
	if status, err := w.get(&c, "/x"); err != nil || status != 200 {
		t.Errorf("while the answer is good and the responder away: %d, %v; want 200", status, err)
	}
	w.answers(conn)
	w.offset.Store(int64(time.Hour + time.Second))
	over(t, conn)
	if status, err := w.get(&c, "/x"); err == nil {
		t.Errorf("when the answer is over and the responder away: %d", status)
	}
	w.refused(OCSPUnreachable)
	responder.says(made(nil))
	w.offset.Add(int64(statusPause + time.Second))
	if status, err := w.get(&c, "/x"); err != nil || status != 200 {
		t.Errorf("when the responder is back: %d, %v; want 200", status, err)
	}
}

// Who is connected stays while the responder goes on to tell, and not a moment longer.
func TestARevocationReachesWhoIsConnected(t *testing.T) {
	w, responder := newCounted(t)
	alice, bob := w.lasting("/eng/alice"), w.lasting("/eng/bob")
	hers, his := w.held(&alice), w.held(&bob)
	for range 30 { // beyond the first answer's end
		n := responder.asked.Load()
		w.offset.Add(int64(statusAgain + time.Second))
		until(t, "the responder is asked about both", func() bool { return responder.asked.Load() >= n+2 })
		until(t, "sessions rest on what it has told", func() bool {
			w.gateway.mu.Lock()
			defer w.gateway.mu.Unlock()
			for s := range w.gateway.sessions {
				for _, r := range s.stood.rests {
					r.of.mu.Lock()
					asking := r.of.asking != nil
					r.of.mu.Unlock()
					if asking {
						return false
					}
				}
			}
			return true
		})
	}
	w.answers(hers)
	responder.says(func(t *testing.T, w *world, q StatusQuestion) ([]byte, error) {
		return made(func(_ *testing.T, w *world, r *ocsp.Response) {
			if r.SerialNumber.Cmp(alice.Leaf.SerialNumber) == 0 {
				r.Status, r.RevokedAt = ocsp.Revoked, w.now()
			}
		})(t, w, q)
	})
	w.offset.Add(int64(statusAgain + time.Second))
	over(t, hers)
	w.answers(his)
	w.refused(CertRevoked)
}

// Without a nonce somebody on the way could bring an answer of before again.
func TestAnswersDoNotGoBack(t *testing.T) {
	w, responder := newCounted(t)
	c := w.staff.client(t, "/eng/alice")
	of := func(age time.Duration, status int) func(*testing.T, *world, StatusQuestion) ([]byte, error) {
		at := time.Now().Add(-age)
		return made(func(_ *testing.T, _ *world, r *ocsp.Response) { r.ThisUpdate, r.RevokedAt, r.Status = at, at, status })
	}
	good := of(time.Hour, ocsp.Good)
	responder.says(good)
	if status, err := w.get(&c, "/x"); err != nil || status != 200 {
		t.Fatalf("%d, %v", status, err)
	}
	w.offset.Add(int64(statusAgain + time.Second))
	responder.says(of(time.Minute, ocsp.Revoked))
	if status, err := w.get(&c, "/x"); err == nil {
		t.Errorf("a revoked client is answered with %d", status)
	}
	w.offset.Add(int64(statusAgain + time.Second))
	responder.says(good)
	if status, err := w.get(&c, "/x"); err == nil {
		t.Errorf("by the answer of before a revoked client is answered with %d", status)
	}
	w.refused(CertRevoked)
	w.offset.Add(int64(statusAgain + time.Second))
	responder.says(of(0, ocsp.Good)) // it was on hold
	if status, err := w.get(&c, "/x"); err != nil || status != 200 {
		t.Errorf("by a newer answer: %d, %v; want 200", status, err)
	}
}

// What is kept is bounded, and what sessions rest on is not forgotten for others.
func TestKeptAnswersAreBounded(t *testing.T) {
	root := newIssuer(t, "root", nil, nil)
	s := newStatuses("staff", time.Hour)
	now := time.Now()
	chain := func(i int) [][]*x509.Certificate {
		return [][]*x509.Certificate{{{SerialNumber: big.NewInt(int64(i + 1))}, root.cert}}
	}
	for i := range statusesMax {
		if due, err := s.due(chain(i), now); err != nil || len(due) != 1 {
			t.Fatalf("certificate %d: %d are due, %v", i, len(due), err)
		}
	}
	if _, err := s.due(chain(statusesMax), now); reasonOf(err, "") != Limit {
		t.Errorf("one more than can be kept, all in use: %v; want %s", err, Limit)
	}
	later := now.Add(statusInUse + time.Second)
	s.find(chain(0)[0]).used.Store(later.UnixNano())
	if _, err := s.due(chain(statusesMax), later); err != nil {
		t.Errorf("one more, when one alone is in use: %v", err)
	}
	if n := len(s.by); n > statusesMax {
		t.Errorf("%d are kept; at most %d", n, statusesMax)
	}
	if s.find(chain(0)[0]) == nil {
		t.Error("the one in use is forgotten")
	}
}

// Whoever has taken a gateway's process over has nobody asked but responders that authorities of the clients have named.
func TestOnlyRespondersOfAuthoritiesAreAsked(t *testing.T) {
	f := folder{t, t.TempDir()}
	staff, other := newIssuer(t, "staff", nil, nil), newIssuer(t, "other", nil, nil)
	below := newIssuer(t, "below", staff, nil)
	f.certificates("staff.pem", staff.cert)
	named := func(by *issuer, urls ...string) []byte {
		return sign(t, by, newKey(t), func(c *x509.Certificate) { c.OCSPServer = urls }).Raw
	}
	const at = "http://ocsp.example.org:8080/a"
	automatic := model.Clients{Name: "staff", CA: "staff.pem", Kind: model.IdentitySPIFFE, Within: "staff.example", OCSP: true, OlderThan: time.Hour}
	for name, test := range map[string]struct {
		change       func(*model.Clients)
		certificates [][]byte
		want         string // "": an error
	}{
		"named by the certificate":            {nil, [][]byte{named(staff, at), staff.cert.Raw}, at},
		"of an authority below":               {nil, [][]byte{named(below, at), below.cert.Raw, staff.cert.Raw}, at},
		"behind one that is not HTTP":         {nil, [][]byte{named(staff, "ldap://a.example/", at), staff.cert.Raw}, at},
		"named by the file":                   {func(c *model.Clients) { c.Responder = "http://192.0.2.1/" }, [][]byte{named(staff, at)}, "http://192.0.2.1/"},
		"of another authority":                {nil, [][]byte{named(other, at), other.cert.Raw}, ""},
		"of another, beside the right root":   {nil, [][]byte{named(other, at), staff.cert.Raw}, ""},
		"signed by itself":                    {nil, [][]byte{named(nil, at)}, ""},
		"that is not named":                   {nil, [][]byte{named(staff), staff.cert.Raw}, ""},
		"that is a file":                      {nil, [][]byte{named(staff, "file:///etc/shadow"), staff.cert.Raw}, ""},
		"that is not to be asked":             {func(c *model.Clients) { c.OCSP, c.Lifetime = false, time.Hour }, [][]byte{named(staff, at), staff.cert.Raw}, ""},
		"of no certificate":                   {nil, nil, ""},
		"of what is no certificate":           {nil, [][]byte{{1, 2, 3}}, ""},
		"behind a chain of more than is read": {nil, [][]byte{named(staff, at), {}, {}, {}, {}, {}, {}}, ""},
	} {
		c := automatic
		if test.change != nil {
			test.change(&c)
		}
		got, err := ResponderOf(c, Folder(f.name), test.certificates, time.Now())
		if got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%s: %q, %v; want %q", name, got, err, test.want)
		}
	}
}
