package demo

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

const gatewayPrologue = `
== a service behind a gateway ==

                 ---- r4 (fw, ids) ----
                /                       \
    h1 ---- r1 (gateway)                 r6 ---- h2 (shop)
                \                       /
                  r2 (fw2) --- r3 (dpi, av)

Clients show certificates. r1 ends their TLS, and chooses a chain for each of their
requests: what is public goes by light (fw), what staff uploads by scan (fw2, av), mail
by inspect (ids), all else that operators do by deep (fw2, dpi). To the shop r1 speaks
TLS of its own, and on scan to av, which reads what is uploaded, and seals it anew. ids
is a firewall of nftables that knows nothing of all this: r4 opens for it what is sealed.
`

// What bob uploads: what nobody but av and the shop may find, and what av lets nobody have (the test
// file of EICAR has this in it).
const (
	upload    = "/upload/note"
	marker    = "a-secret-that-bob-uploads"
	signature = "EICAR-STANDARD-ANTIVIRUS-TEST-FILE"
)

// What bob gets by mail: what ids alone may read on the way, and what ids lets nobody have, by its rule on the first bytes of a page.
const (
	letter      = "/mail/letter"
	letterText  = "a-letter-to-bob"
	infected    = "/mail/infected"
	pageHeading = "HTTP/1.0 200 ok\r\nContent-type: text/plain\r\n\r\n" // ids counts from its beginning; openssl s_server -WWW has the same
)

// bobAsks is what bob asks for, which his rule lets him.
const bobAsks = "/public/prices"

// shop is the service of the example, its origin on h2, and its clients on h1.
type shop struct {
	*stage
	folder     string // of the gateway's files
	staff, web *authority
	alice, bob tls.Certificate
	at         netip.AddrPort

	mu  sync.Mutex
	got []string // bodies of what was uploaded
}

// openShop makes certificates of the example into a folder.
func (s *stage) openShop(folder string) (*shop, error) {
	x := &shop{stage: s, folder: folder}
	var errs [5]error
	x.staff, errs[0] = newAuthority(folder, "staff-ca.pem")
	x.web, errs[1] = newAuthority(folder, "origin-ca.pem")
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	_, errs[0] = x.web.server("shop.pem", "shop.key", "shop.example.org")
	x.alice, errs[1] = x.staff.client("/ops/alice")
	x.bob, errs[2] = x.staff.client("/sales/bob")
	errs[3] = x.staff.revoke("staff.crl")
	return x, errors.Join(errs[:]...)
}

// serve answers on h2 until it is stopped.
func (x *shop) serve(ctx context.Context) (stop func() error, err error) {
	inside, err := x.web.server("origin.pem", "origin.key", "shop.internal")
	if err != nil {
		return nil, err
	}
	var l net.Listener
	err = x.h2.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp", x.at.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	server := &http.Server{
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case letter:
				page(rw, letterText)
				return
			case infected:
				page(rw, signature+", in a page")
				return
			}
			body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
			if err != nil {
				return // it was cut off
			}
			if r.Method == http.MethodPost {
				x.mu.Lock()
				x.got = append(x.got, string(body))
				x.mu.Unlock()
			}
			fmt.Fprintf(rw, "%s for %s\n", r.URL.Path, r.RemoteAddr)
		}),
		TLSConfig:   &tls.Config{Certificates: []tls.Certificate{inside}, MinVersion: tls.VersionTLS13},
		ReadTimeout: settleTime, WriteTimeout: settleTime,
	}
	done := make(chan error, 1)
	go func() { done <- server.ServeTLS(l, "", "") }()
	return func() error {
		err := server.Close()
		if served := <-done; !errors.Is(served, http.ErrServerClosed) {
			err = errors.Join(err, served)
		}
		return err
	}, nil
}

// page answers with pageHeading and a text, and ends the connection.
func page(w http.ResponseWriter, text string) {
	c, b, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	io.WriteString(b, pageHeading+text)
	b.Flush()
}

func (x *shop) scenes() []scene {
	return []scene{
		{"Two requests of one connection take two chains",
			"alice, an operator, asked the shop for /public/prices and for /orders, on one connection",
			x.twoChains},
		{"A client without a certificate reaches nothing",
			"bob asked for " + bobAsks + " without his certificate, with the ticket by which alice resumed her session, which she sends in clear, and then with his certificate",
			x.withoutCertificate},
		{"An upload is read by one function alone",
			"bob uploaded a secret, and then a file with a virus's signature; all frames on all interfaces of all machines were searched for the secret",
			x.uploads},
		{"A signature in a page is stopped by a firewall that knows nothing of all this",
			"bob got a letter, and then a page with a virus's signature; all frames on all interfaces of all machines were searched for the letter",
			x.mail},
		{"A certificate is revoked",
			"bob asked again, and kept his connection; then his certificate was put on the list of revoked ones, and he connected anew",
			x.revoked},
		{"Somebody changes the audit log",
			"r1's audit log was verified; then, in a copy, the chain of one request was changed",
			x.changedLog},
	}
}

// inShop plays a scene with the origin there.
func (x *shop) inShop(scenes []scene) []scene {
	for i := range scenes {
		run := scenes[i].run
		scenes[i].run = func(ctx context.Context) (saw []string, err error) {
			stop, err := x.serve(ctx)
			if err != nil {
				return nil, err
			}
			saw, err = run(ctx)
			return saw, errors.Join(err, stop())
		}
	}
	return scenes
}

// connection is one of a client's.
type connection struct {
	*tls.Conn
	reader *bufio.Reader
}

// connect opens a connection from h1 to the service. TLS 1.3 tells a client what the server thinks of its
// certificate when it reads.
func (x *shop) connect(ctx context.Context, shown ...tls.Certificate) (*connection, error) {
	return x.connectBy(ctx, nil, shown...)
}

// connectBy is connect with a session that may be resumed.
func (x *shop) connectBy(ctx context.Context, kept tls.ClientSessionCache, shown ...tls.Certificate) (*connection, error) {
	roots := x509.NewCertPool()
	roots.AddCert(x.web.cert)
	var c net.Conn
	err := x.h1.Do(func() (err error) {
		c, err = (&net.Dialer{Timeout: settleTime}).DialContext(ctx, "tcp", x.at.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	c.SetDeadline(time.Now().Add(settleTime))
	t := tls.Client(c, &tls.Config{RootCAs: roots, Certificates: shown, ServerName: "shop.example.org", MinVersion: tls.VersionTLS13, ClientSessionCache: kept})
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &connection{t, bufio.NewReader(t)}, nil
}

// get asks for a path, and reads the whole answer.
func (c *connection) get(path string) (status int, err error) {
	return c.ask("GET " + path + " HTTP/1.1\r\nHost: shop.example.org\r\n\r\n")
}

func (c *connection) post(path, body string) (status int, err error) {
	return c.ask(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: shop.example.org\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body))
}

func (c *connection) ask(request string) (status int, err error) {
	if _, err := io.WriteString(c, request); err != nil {
		return 0, err
	}
	answer, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return answer.StatusCode, errors.Join(err, answer.Body.Close())
}

// twoChains shows that each request is decided about, by the frames that each chain's headend has sent.
func (x *shop) twoChains(ctx context.Context) (saw []string, err error) {
	c, err := x.connect(ctx, x.alice)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	chains := []string{"light", "deep"}
	for i, path := range []string{"/public/prices", "/orders"} {
		var before, sent [2]uint64
		for j, name := range chains {
			if before[j], err = x.sent(ctx, name); err != nil {
				return saw, err
			}
		}
		status, err := c.get(path)
		if err != nil {
			return saw, err
		}
		for j, name := range chains {
			now, err := x.sent(ctx, name)
			if err != nil {
				return saw, err
			}
			sent[j] = now - before[j]
		}
		saw = append(saw, fmt.Sprintf("GET %s: status %d; r1 sent %d frames by light, %d by deep", path, status, sent[0], sent[1]))
		if status != http.StatusOK || sent[i] == 0 {
			return saw, fmt.Errorf("want it answered, by chain %s", chains[i])
		}
		if i == 0 && sent[1] != 0 { // later, what was opened before has signs of life
			return saw, errors.New("want none by deep")
		}
	}
	for _, name := range chains {
		line, err := x.sameCounts(ctx, x.onward(name))
		saw = append(saw, name+", "+line)
		if err != nil {
			return saw, err
		}
	}
	return saw, nil
}

// onward is the path of a chain that begins at the gateway.
func (x *shop) onward(chain string) plan.Path {
	for _, p := range x.plan.Paths {
		if p.Chain == chain && p.From == model.GatewayName {
			return p
		}
	}
	panic("the example has no chain " + chain + " from a gateway on")
}

// sent is how many frames the gateway has sent by a chain.
func (x *shop) sent(ctx context.Context, chain string) (uint64, error) {
	return x.frames(ctx, "r1", x.onward(chain), 0)
}

// refusedClient shows what a client hears that is refused, and what the log says.
func (x *shop) refusedClient(ctx context.Context, reason gateway.Reason, shown ...tls.Certificate) (saw []string, err error) {
	return x.refusedBy(ctx, reason, nil, shown...)
}

func (x *shop) refusedBy(ctx context.Context, reason gateway.Reason, kept tls.ClientSessionCache, shown ...tls.Certificate) (saw []string, err error) {
	before, err := x.log()
	if err != nil {
		return nil, err
	}
	c, err := x.connectBy(ctx, kept, shown...)
	if err == nil {
		_, err = c.get(bobAsks)
		c.Close()
	}
	if _, alert := errors.AsType[tls.AlertError](err); !alert && !strings.Contains(fmt.Sprint(err), "remote error: tls") {
		return nil, fmt.Errorf("bob got %w; want an alert", err)
	}
	saw = append(saw, fmt.Sprintf("bob's TLS ended: %v", err))
	deadline := time.Now().Add(settleTime)
	for { // the line may come behind the alert
		lines, err := x.log()
		if err != nil {
			return saw, err
		}
		for _, l := range lines[len(before):] {
			if l.Event == gateway.EventRefused && l.Reason == reason {
				return append(saw, fmt.Sprintf("the audit log has it in line %d: refused, %s", l.Number, l.Text)), nil
			}
		}
		if time.Now().After(deadline) {
			return saw, fmt.Errorf("no line of the audit log says %s", reason)
		}
		if err := wait(ctx, 20*time.Millisecond); err != nil {
			return saw, err
		}
	}
}

func (x *shop) withoutCertificate(ctx context.Context) (saw []string, err error) {
	if saw, err = x.refusedClient(ctx, gateway.CertMissing); err != nil {
		return saw, err
	}
	stolen, err := x.stolenTicket(ctx)
	if err != nil {
		return saw, err
	}
	more, err := x.refusedBy(ctx, gateway.Handshake, stolen)
	if saw = append(saw, more...); err != nil {
		return saw, err
	}
	c, err := x.connect(ctx, x.bob)
	if err != nil {
		return saw, err
	}
	defer c.Close()
	for _, test := range []struct {
		path string
		want int
	}{{bobAsks, http.StatusOK}, {"/orders", http.StatusForbidden}} {
		status, err := c.get(test.path)
		saw = append(saw, fmt.Sprintf("with his certificate, GET %s: status %d", test.path, status))
		if err != nil || status != test.want {
			return saw, errors.Join(err, fmt.Errorf("want status %d", test.want))
		}
	}
	return saw, nil
}

// stolenTicket is alice's ticket with the secret of a session of bob's: he has seen the one, and not hers.
func (x *shop) stolenTicket(ctx context.Context) (tls.ClientSessionCache, error) {
	var ticket []byte
	var secret *tls.SessionState
	for i, who := range []tls.Certificate{x.alice, x.alice, x.bob} {
		kept := tls.NewLRUClientSessionCache(1)
		if i == 1 { // her own ticket is good
			state, err := tls.NewResumptionState(ticket, secret)
			if err != nil {
				return nil, err
			}
			kept.Put("shop.example.org", state)
		}
		c, err := x.connectBy(ctx, kept, who)
		if err != nil {
			return nil, err
		}
		_, err = c.get(bobAsks)
		resumed := c.ConnectionState().DidResume
		if err := errors.Join(err, c.Close()); err != nil {
			return nil, err
		}
		if resumed != (i == 1) {
			return nil, fmt.Errorf("connection %d with a ticket: resumed %t", i+1, resumed)
		}
		state, there := kept.Get("shop.example.org")
		if !there {
			return nil, errors.New("the gateway has given no ticket")
		}
		t, s, err := state.ResumptionState()
		if err != nil {
			return nil, err
		}
		if secret = s; i < 2 {
			ticket = t
		}
	}
	state, err := tls.NewResumptionState(ticket, secret)
	if err != nil {
		return nil, err
	}
	kept := tls.NewLRUClientSessionCache(1)
	kept.Put("shop.example.org", state)
	return kept, nil
}

// mail shows what a function reads that gets plain connections, and that what it stops is stopped.
func (x *shop) mail(ctx context.Context) (saw []string, err error) {
	search := &search{words: []string{letterText, "shop.internal"}}
	defer func() { err = errors.Join(err, search.close()) }()
	if err := search.everywhere(x.lab); err != nil {
		return nil, err
	}
	before, err := x.byteStream(ctx, "r4", "ids")
	if err != nil {
		return nil, err
	}
	c, err := x.connect(ctx, x.bob)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	status, err := c.get(letter)
	saw = append(saw, fmt.Sprintf("GET %s: status %d", letter, status))
	if err != nil || status != http.StatusOK {
		return saw, errors.Join(err, errors.New("want status 200"))
	}
	frames, _, err := search.found(ctx)
	if err != nil {
		return saw, err
	}
	at := search.where(0)
	saw = append(saw, fmt.Sprintf("of %d frames on %d interfaces those have the letter that came in at %s", frames, len(search.ports), strings.Join(at, ", ")))
	if want := []string{"ids ids-from", "r4 ids-to"}; !slices.Equal(at, want) {
		return saw, fmt.Errorf("want it at %s and nowhere else", strings.Join(want, ", "))
	}
	status, err = c.get(infected)
	after, wrong := x.byteStream(ctx, "r4", "ids")
	if err := errors.Join(err, wrong); err != nil {
		return saw, err
	}
	saw = append(saw, fmt.Sprintf("GET %s: status %d; ids has reset %d connection for what it found in the page", infected, status, after.ResetByFunction-before.ResetByFunction))
	if status != http.StatusBadGateway || after.ResetByFunction == before.ResetByFunction {
		return saw, errors.New("want status 502, and a connection reset by ids")
	}
	return saw, nil
}

// uploads shows that payload is in clear in the function that reads it, and on no link.
func (x *shop) uploads(ctx context.Context) (saw []string, err error) {
	search := &search{words: []string{marker, "shop.internal"}}
	defer func() { err = errors.Join(err, search.close()) }()
	if err := search.everywhere(x.lab); err != nil {
		return nil, err
	}
	before, err := x.byteStream(ctx, "r3", "av")
	if err != nil {
		return nil, err
	}
	c, err := x.connect(ctx, x.bob)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	status, err := c.post(upload, marker)
	saw = append(saw, fmt.Sprintf("POST %s with the secret: status %d", upload, status))
	if err != nil || status != http.StatusOK {
		return saw, errors.Join(err, errors.New("want status 200"))
	}
	x.mu.Lock()
	got := slices.Clone(x.got)
	x.mu.Unlock()
	if !slices.Equal(got, []string{marker}) {
		return saw, fmt.Errorf("the shop has got %q", got)
	}
	frames, found, err := search.found(ctx)
	if err != nil {
		return saw, err
	}
	saw = append(saw,
		fmt.Sprintf("the shop has got it; none of %d frames on %d interfaces has it", frames, len(search.ports)),
		fmt.Sprintf("the same search finds the name that av asks the shop for, which TLS has in clear, in %d frames", found[1]))
	if found[0] != 0 || found[1] == 0 {
		return saw, fmt.Errorf("the secret was in %d frames, and the name in %d", found[0], found[1])
	}
	status, err = c.post(upload, "a file with "+signature)
	after, wrong := x.byteStream(ctx, "r3", "av")
	if err := errors.Join(err, wrong); err != nil {
		return saw, err
	}
	saw = append(saw, fmt.Sprintf("POST %s with the signature: status %d; av has ended %d connection for what it found in it", upload, status, after.ResetByFunction-before.ResetByFunction))
	x.mu.Lock()
	defer x.mu.Unlock()
	if status != http.StatusBadGateway || after.ResetByFunction == before.ResetByFunction || len(x.got) != 1 {
		return saw, fmt.Errorf("want status 502, and nothing at the shop; it has got %q", x.got[1:])
	}
	return append(saw, "the shop has got nothing of it"), nil
}

func (x *shop) revoked(ctx context.Context) (saw []string, err error) {
	c, err := x.connect(ctx, x.bob)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	status, err := c.get(bobAsks)
	if err != nil || status != http.StatusOK {
		return nil, errors.Join(err, fmt.Errorf("GET %s: status %d", bobAsks, status))
	}
	started := time.Now()
	if err := x.staff.revoke("staff.crl", x.bob.Leaf); err != nil {
		return nil, err
	}
	if n, err := c.reader.Read(make([]byte, 1)); n != 0 || err == nil {
		return nil, errors.New("bob's connection is still there")
	} else if netErr, ok := errors.AsType[net.Error](err); ok && netErr.Timeout() {
		return nil, fmt.Errorf("bob's connection is still there after %s", settleTime)
	}
	saw = append(saw, fmt.Sprintf("bob's open connection ended %.0f ms after the new list was there", time.Since(started).Seconds()*1000))
	more, err := x.refusedClient(ctx, gateway.CertRevoked, x.bob)
	return append(saw, more...), err
}

func (x *shop) logName() string { return filepath.Join(x.lab.AgentDir("r1"), "gateway-audit.log") }

// log is the gateway's audit log.
func (x *shop) log() (out []gateway.Record, err error) {
	text, err := os.ReadFile(x.logName())
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(text) {
		var r gateway.Record
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("line %d of the audit log: %w", len(out)+1, err)
		}
		out = append(out, r)
	}
	return out, nil
}

func (x *shop) changedLog(context.Context) (saw []string, err error) {
	text, err := os.ReadFile(x.logName())
	if err != nil {
		return nil, err
	}
	v, err := gateway.VerifyAudit(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	saw = append(saw, fmt.Sprintf("%d lines, of which each has the hash of the one before", v.Lines))
	lines, err := x.log()
	if err != nil {
		return saw, err
	}
	changed := bytes.Clone(text)
	var at uint64
	for _, l := range lines {
		if l.Event == gateway.EventDecided && l.Chain == "deep" {
			at = l.Number
			saw = append(saw, fmt.Sprintf("line %d: %s may %s %s by rule %d, chain %s", l.Number, l.Identity, l.Method, l.Path, l.Rule, l.Chain))
			break
		}
	}
	if at == 0 {
		return saw, errors.New("no request was let in by chain deep")
	}
	all := bytes.SplitAfter(changed, []byte("\n"))
	all[at-1] = bytes.Replace(all[at-1], []byte(`"chain":"deep"`), []byte(`"chain":"none"`), 1)
	_, err = gateway.VerifyAudit(bytes.NewReader(bytes.Join(all, nil)))
	if err == nil {
		return saw, errors.New("the change was not found")
	}
	saw = append(saw, fmt.Sprintf("with another chain in it: %v", err))
	if !strings.Contains(err.Error(), fmt.Sprintf("line %d", at+1)) && !strings.Contains(err.Error(), fmt.Sprintf("line %d", at)) {
		return saw, fmt.Errorf("it does not name line %d", at)
	}
	return saw, nil
}

// playShop plays the scenes of a gateway, in a lab whose gateway's files are of this hour.
func (s *stage) playShop(ctx context.Context, play func(files string, scenes func() []scene) error) error {
	folder, err := os.MkdirTemp("", "waystamp-demo-")
	if err != nil {
		return err
	}
	x, err := s.openShop(folder)
	if err == nil {
		err = play(folder, func() []scene {
			x.at = s.manifest.Domain.Services[0].Address
			return x.inShop(x.scenes())
		})
	}
	return errors.Join(err, os.RemoveAll(folder))
}
