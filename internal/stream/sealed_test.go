package stream

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/seal"
)

// sealedWorld is a worker of an intrusive function between a gateway and an origin, which speaks TLS.
type sealedWorld struct {
	*world
	t       *testing.T
	process *Process
	origin  *net.TCPListener
	server  tls.Certificate
	to      netip.AddrPort
	dials   seal.Part

	mu     sync.Mutex
	ends   Ends
	refuse error // of whoever answers for keys
	asked  []Ask
}

func keysOfPart(t testing.TB) (dials, accepts seal.Part) {
	t.Helper()
	pd, kd, err := ed25519.GenerateKey(rand.Reader)
	must(t, err)
	pa, ka, err := ed25519.GenerateKey(rand.Reader)
	must(t, err)
	gateway, dpi := seal.Name("r1", "gateway"), seal.Name("r3", "dpi")
	return seal.Part{Chain: "deep", Path: 7, Name: gateway, Other: dpi, Epochs: []seal.Epoch{{Number: 3, Key: kd, Peer: pa}}},
		seal.Part{Chain: "deep", Path: 7, Name: dpi, Other: gateway, Epochs: []seal.Epoch{{Number: 3, Key: ka, Peer: pd}}}
}

func newSealedWorld(t *testing.T, run ...string) *sealedWorld {
	t.Helper()
	return newLimitedSealedWorld(t, Limits{Connections: 1000, Buffer: 1 << 20, Idle: time.Minute, HalfClosed: time.Minute}, run...)
}

// newSealedEnds is such a world without the worker.
func newSealedEnds(t *testing.T) *sealedWorld {
	t.Helper()
	w := &sealedWorld{world: newWorld(t, true), t: t, to: towards["IPv6"]}
	w.origin = w.listen(t, w.to)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"shop.internal"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	w.server = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	w.dials, w.ends.From = keysOfPart(t)
	w.ends.Origins = []SealedOrigin{{Service: "shop", Roots: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), Name: "shop.internal"}}
	return w
}

// answer answers for keys.
func (w *sealedWorld) answer(q Ask) (*Ends, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = append(w.asked, q)
	if w.refuse != nil {
		return nil, w.refuse
	}
	return &w.ends, nil
}

// newLimitedSealedWorld has limits of memory, too.
func newLimitedSealedWorld(t *testing.T, limits Limits, run ...string) *sealedWorld {
	t.Helper()
	w := newSealedEnds(t)
	t.Setenv(asWorker, "1")
	text, err := Text("dpi", port, 1, run, nil, nil, true, limits)
	must(t, err)
	text, err = Placed(text, port, limits.Memory)
	must(t, err)
	self, err := os.Executable()
	must(t, err)
	p, listeners, err := Start(w.place.NetNS(), self, text, nil, w.answer)
	must(t, err)
	for _, l := range listeners {
		must(t, l.Close())
	}
	w.process = p
	t.Cleanup(func() { must(t, p.Close()) })
	return w
}

// seal opens a session with the worker as a gateway does.
func (w *sealedWorld) seal(p seal.Part, service string) (*seal.Conn, *net.TCPConn, error) {
	w.t.Helper()
	under, err := w.dial(w.to)
	if err != nil {
		return nil, nil, err // it may be reset as soon as it is there
	}
	w.t.Cleanup(func() { under.Close() })
	ctx, stop := context.WithTimeout(w.t.Context(), await.Limit(30*time.Second))
	defer stop()
	c, err := p.Dial(ctx, under, service, seal.HTTP1)
	return c, under, err
}

// accept takes the next session at the origin.
func (w *sealedWorld) accept() (*tls.Conn, error) {
	w.origin.SetDeadline(time.Now().Add(await.Limit(30 * time.Second)))
	under, err := w.origin.AcceptTCP()
	if err != nil {
		return nil, err
	}
	w.t.Cleanup(func() { under.Close() })
	soon(under)
	c := tls.Server(under, &tls.Config{Certificates: []tls.Certificate{w.server}, NextProtos: []string{seal.HTTP1}})
	return c, c.Handshake()
}

// pair is a session from end to end.
func (w *sealedWorld) pair() (*seal.Conn, *net.TCPConn, *tls.Conn) {
	w.t.Helper()
	var server *tls.Conn
	var wait sync.WaitGroup
	inBackground(w.t, &wait, func() (err error) { server, err = w.accept(); return err })
	c, under, err := w.seal(w.dials, "shop")
	must(w.t, err)
	soon(under)
	wait.Wait()
	return c, under, server
}

func TestSealedWorkerReadsWhatItCarries(t *testing.T) {
	w := newSealedWorld(t, `{"match": {"literals": ["marker"], "then": "mark"}}`, `"count"`)
	c, _, server := w.pair()
	// 20 MB there, and as many back when the sender has ended: half closed.
	payload := bytes.Repeat([]byte("0123456789abcdef marker\n"), 20<<20/24)
	var wait sync.WaitGroup
	inBackground(t, &wait, func() error {
		_, err := c.Write(payload)
		return errors.Join(err, c.CloseWrite())
	})
	inBackground(t, &wait, func() error {
		got, err := io.ReadAll(server)
		if err != nil || !bytes.Equal(got, payload) {
			t.Errorf("%d bytes arrived of %d: %v", len(got), len(payload), err)
		}
		_, err = server.Write(payload)
		return errors.Join(err, server.CloseWrite())
	})
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, payload) {
		t.Errorf("%d bytes came back of %d: %v", len(got), len(payload), err)
	}
	wait.Wait()
	eventually(t, "the connection has ended", func() bool { return w.process.Statistics().Ended == 1 })
	s := w.process.Statistics()
	if n := uint64(len(payload)); s.ToServer.In != n || s.ToServer.Out != n || s.ToClient.In != n || s.ToClient.Out != n || s.Run[0].Events == 0 || s.Now != 0 {
		t.Errorf("the worker counted %+v", s)
	}
	if len(w.asked) != 1 || w.asked[0].Server != w.to || w.asked[0].Client.Addr() != client6 {
		t.Errorf("the worker asked about %v", w.asked)
	}
}

func TestSealedWorkerEndsWhatMatches(t *testing.T) {
	w := newSealedWorld(t, `{"match": {"literals": ["EVIL"], "then": "reset"}}`)
	c, under, server := w.pair()
	_, err := c.Write([]byte("GET /EVIL HTTP/1.1\r\n\r\n"))
	must(t, err)
	got, err := io.ReadAll(server)
	if len(got) > 0 || err == nil {
		t.Errorf("the origin got %q, and %v", got, err)
	}
	if _, err := c.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("the gateway hears %v; want a reset", err)
	}
	under.Close()
	if s := w.process.Statistics(); s.ResetByFunction != 1 {
		t.Errorf("the worker counted %+v", s)
	}
}

func TestSealedWorkerRefuses(t *testing.T) {
	w := newSealedWorld(t, `"count"`)
	stranger, _ := keysOfPart(t)
	counted := func(what string, of func(Statistics) uint64) {
		t.Helper()
		eventually(t, what+" is counted", func() bool { return of(w.process.Statistics()) == 1 })
	}
	// The origin takes TCP; nothing of TLS may come to it.
	silent := func() {
		t.Helper()
		w.origin.SetDeadline(time.Now().Add(await.Limit(30 * time.Second)))
		o, err := w.origin.AcceptTCP()
		must(t, err)
		defer o.Close()
		soon(o)
		if n, err := o.Read(make([]byte, 1)); n > 0 || err == nil {
			t.Errorf("%d bytes came to the origin (%v)", n, err)
		}
	}
	if _, _, err := w.seal(stranger, "shop"); err == nil {
		t.Error("an end with another key is let in")
	}
	silent()
	counted("another key", func(s Statistics) uint64 { return s.Peer })

	under, err := w.dial(w.to)
	must(t, err)
	_, err = under.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	must(t, err)
	silent()
	under.Close()
	counted("plain text", func(s Statistics) uint64 { return s.Unsealed })

	other := w.dials
	other.Chain = "light"
	if _, _, err := w.seal(other, "shop"); err == nil {
		t.Error("a connection for another chain is let in")
	}
	silent()
	counted("another part", func(s Statistics) uint64 { return s.PartMismatch })

	w.mu.Lock()
	w.refuse = errors.New("no such path")
	w.mu.Unlock()
	if _, _, err := w.seal(w.dials, "shop"); err == nil {
		t.Error("a connection without a key is let in")
	}
	silent()
	counted("a missing key", func(s Statistics) uint64 { return s.NoKey })
	w.mu.Lock()
	w.refuse, w.ends.Origins[0].Name = nil, "other.internal"
	w.mu.Unlock()

	var wait sync.WaitGroup
	wait.Go(func() { w.accept() })
	_, _, err = w.seal(w.dials, "shop")
	if r, ok := errors.AsType[*seal.Refusal](err); !ok || r.Failure != seal.FailureCertificate {
		t.Errorf("the gateway hears %v of an origin of another name; want %s", err, seal.FailureCertificate)
	}
	wait.Wait()
	counted("the origin", func(s Statistics) uint64 { return s.Unreached })
}

// A connection that was cut is reset on the other side, and not ended.
func TestSealedWorkerTellsAnEndFromACut(t *testing.T) {
	w := newSealedWorld(t, `"count"`)
	c, under, server := w.pair()
	_, err := c.Write([]byte("part of a request"))
	must(t, err)
	must(t, under.CloseWrite()) // FIN without a close_notify
	_, err = io.ReadAll(server)
	if !isReset(err) {
		t.Errorf("the origin hears %v of what was cut; want a reset", err)
	}
	eventually(t, "it is counted", func() bool { return w.process.Statistics().ResetByClient == 1 })
}

// A receiver that does not read stops the sender.
func TestSealedWorkerHoldsBackSenders(t *testing.T) {
	w := newSealedWorld(t, `"count"`)
	c, under, server := w.pair()
	must(t, under.SetWriteDeadline(time.Now().Add(await.Limit(2*time.Second))))
	sent := 0
	for piece := make([]byte, 64<<10); sent < 256<<20; {
		n, err := c.Write(piece)
		sent += n
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		must(t, err)
	}
	if sent >= 256<<20 {
		t.Errorf("%d bytes were taken from the sender, and the receiver read none", sent)
	}
	// The sender's reset does not wait for the receiver.
	must(t, errors.Join(under.SetLinger(0), under.Close()))
	eventually(t, "the reset is noticed", func() bool { return w.process.Statistics().ResetByClient == 1 })
	if _, err := io.Copy(io.Discard, server); !isReset(err) {
		t.Errorf("the receiver hears %v; want a reset", err)
	}
}

// Pieces of any size come as they were sent, while others go the other way, and none waits for the next: each is answered before
// the sender goes on.
func TestSealedPiecesDoNotWaitForEachOther(t *testing.T) {
	for _, run := range []string{`"count"`, `{"limit": {"connection": 20000000}}`} {
		w := newSealedWorld(t, run)
		c, under, server := w.pair()
		deadline := time.Now().Add(await.Limit(60 * time.Second))
		must(t, errors.Join(under.SetDeadline(deadline), server.SetDeadline(deadline)))
		var wait sync.WaitGroup
		inBackground(t, &wait, func() error {
			_, err := io.Copy(server, server) // what comes goes back
			return errors.Join(err, server.CloseWrite())
		})
		random := mrand.New(mrand.NewPCG(1, 2))
		const round = 3 * batchMax
		sent, got := make([]byte, round), make([]byte, round)
		for i := range 60 {
			size := 1 + random.IntN(round)
			if i%3 == 0 {
				size = 1 + random.IntN(200)
			}
			for j := range size {
				sent[j] = byte(random.Uint32())
			}
			failed := make(chan error, 1)
			go func() {
				for p := sent[:size]; len(p) > 0; {
					n, err := c.Write(p[:min(len(p), 1+size/3)])
					if err != nil {
						failed <- err
						return
					}
					p = p[n:]
				}
				failed <- nil
			}()
			_, err := io.ReadFull(c, got[:size])
			if err := errors.Join(err, <-failed); err != nil || !bytes.Equal(sent[:size], got[:size]) {
				t.Fatalf("with %s, %d bytes of round %d came back otherwise: %v", run, size, i, err)
			}
		}
		must(t, c.CloseWrite())
		if n, err := c.Read(got); n > 0 || !errors.Is(err, io.EOF) {
			t.Errorf("behind the end come %d bytes, and %v", n, err)
		}
		wait.Wait()
	}
}

// Many receivers that do not read: what waits for them has as many batches as the worker may have, and no more; connections that find none
// left carry their bytes all the same, and all are given back. A connection with a small buffer has none.
func TestBatchesOfAWorkerAreBounded(t *testing.T) {
	for _, c := range []struct {
		buffer, connections, resets int
		most                        uint64
	}{
		{1 << 20, 450, 50, MemoryMin / batchShare / batchMax}, // two each, of most
		{batchesBuffer - 1, 20, 0, 0},
	} {
		w := newLimitedSealedWorld(t, Limits{Connections: 1000, Buffer: c.buffer, Idle: time.Minute, HalfClosed: time.Minute, Memory: MemoryMin}, `"count"`)
		raw, err := w.origin.SyscallConn()
		must(t, err)
		must(t, raw.Control(func(fd uintptr) {
			must(t, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 16<<10)) // of the connections that are accepted
		}))
		payload := make([]byte, 1<<20)
		random := mrand.New(mrand.NewPCG(3, 4))
		for i := range payload {
			payload[i] = byte(random.Uint32())
		}
		var wait sync.WaitGroup
		var servers []*tls.Conn
		for i := range c.connections {
			client, under, server := w.pair()
			deadline := time.Now().Add(await.Limit(2 * time.Minute))
			must(t, errors.Join(under.SetDeadline(deadline), server.SetDeadline(deadline)))
			servers = append(servers, server)
			inBackground(t, &wait, func() error {
				_, err := client.Write(payload)
				err = errors.Join(err, client.CloseWrite())
				if i < c.resets {
					err = nil // or not: the reset may come behind
				}
				return err
			})
		}
		seen := uint64(0)
		look := func() Statistics {
			s := w.process.Statistics()
			seen = max(seen, s.Batches)
			return s
		}
		eventually(t, "the worker waits for all receivers", func() bool {
			s := look()
			if c.most == 0 {
				return s.ToServer.In > uint64(c.connections)<<16
			}
			return s.Unbatched > 0 // all were taken, and some may have been given back since
		})
		for i, server := range servers {
			if i < c.resets {
				under := server.NetConn().(*net.TCPConn)
				must(t, errors.Join(under.SetLinger(0), under.Close()))
				continue
			}
			inBackground(t, &wait, func() error {
				got, err := io.ReadAll(server)
				if err == nil && !bytes.Equal(got, payload) {
					err = fmt.Errorf("%d bytes came, and are not the %d that were sent", len(got), len(payload))
				}
				return errors.Join(err, server.CloseWrite())
			})
		}
		eventually(t, "all have ended", func() bool { return look().Now == 0 })
		wait.Wait()
		eventually(t, "all batches are given back", func() bool { return look().Batches == 0 })
		if s := look(); s.Ended != uint64(c.connections-c.resets) || seen > c.most || c.most == 0 && s.Unbatched != 0 {
			t.Errorf("with a buffer of %d bytes: %d connections have ended of %d, %d batches were taken at once, and %d were missing; want %d batches at most", c.buffer, s.Ended, c.connections-c.resets, seen, s.Unbatched, c.most)
		}
	}
}

// Ends with certificates of a controller are refused by reasons of their own, which are counted.
func TestSealedWorkerRefusesCertificates(t *testing.T) {
	w := newSealedWorld(t, `"count"`)
	ca, err := identity.NewCA("waystamp", time.Now())
	must(t, err)
	foreign, err := identity.NewCA("waystamp", time.Now())
	must(t, err)
	end := func(by *identity.CA, node, function string, at time.Time) seal.Epoch {
		public, key, err := ed25519.GenerateKey(rand.Reader)
		must(t, err)
		der, err := by.IssueEnd(node, function, 0, public, at)
		must(t, err)
		return seal.Epoch{Number: 3, Key: key, Certificate: der, Roots: [][]byte{ca.Root()}}
	}
	w.mu.Lock()
	w.ends.From.Epochs = []seal.Epoch{end(ca, "r3", "dpi", time.Now())}
	w.mu.Unlock()
	for _, c := range []struct {
		what  string
		epoch seal.Epoch
		of    func(Statistics) uint64
	}{
		{"a certificate of another authority", end(foreign, "r1", "gateway", time.Now()), func(s Statistics) uint64 { return s.Untrusted }},
		{"a certificate that has ended", end(ca, "r1", "gateway", time.Now().Add(-identity.EndValid-time.Minute)), func(s Statistics) uint64 { return s.Expired }},
		{"a certificate of another node", end(ca, "r2", "gateway", time.Now()), func(s Statistics) uint64 { return s.Peer }},
	} {
		part := w.dials
		part.Epochs = []seal.Epoch{c.epoch}
		if _, _, err := w.seal(part, "shop"); err == nil {
			t.Errorf("an end with %s is let in", c.what)
		}
		w.origin.SetDeadline(time.Now().Add(await.Limit(30 * time.Second)))
		o, err := w.origin.AcceptTCP()
		must(t, err)
		soon(o)
		if n, err := o.Read(make([]byte, 1)); n > 0 || err == nil {
			t.Errorf("%s: %d bytes came to the origin (%v)", c.what, n, err)
		}
		must(t, o.Close())
		eventually(t, c.what+" is counted", func() bool { return c.of(w.process.Statistics()) == 1 })
	}
	w.dials.Epochs = []seal.Epoch{end(ca, "r1", "gateway", time.Now())}
	c, _, server := w.pair()
	_, err = c.Write([]byte("request"))
	must(t, err)
	must(t, c.CloseWrite())
	if got, err := io.ReadAll(server); string(got) != "request" || err != nil {
		t.Errorf("the origin got %q of an end with a certificate, %v", got, err)
	}
}
