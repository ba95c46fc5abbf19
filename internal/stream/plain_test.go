package stream

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/seal"
)

// throughWorld is a connection through a function that knows nothing of seals. The test is the gateway,
// the origin and the function.
type throughWorld struct {
	gateway, origin *seal.Conn
	before, behind  *net.TCPConn // the function's ends of the plain connection
	l               *loop
	s               *sealed
	word            chan int // how it ends
}

// tcpPair is a connection on lo: both ends.
func tcpPair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv6loopback})
	must(t, err)
	defer l.Close()
	a, err = net.DialTCP("tcp", nil, l.Addr().(*net.TCPAddr))
	must(t, err)
	b, err = l.AcceptTCP()
	must(t, err)
	for _, c := range []*net.TCPConn{a, b} {
		soon(c)
		t.Cleanup(func() { c.Close() })
	}
	return a, b
}

// workersEnd makes one end of a connection the worker's, which resets what it only closes.
func workersEnd(t *testing.T) (far *net.TCPConn, own *socketFile) {
	t.Helper()
	far, near := tcpPair(t)
	must(t, near.SetLinger(0))
	raw, err := near.SyscallConn()
	must(t, err)
	fd := -1
	must(t, raw.Control(func(u uintptr) { fd, err = unix.FcntlInt(u, unix.F_DUPFD_CLOEXEC, 0) }))
	must(t, errors.Join(err, near.Close(), unix.SetNonblock(fd, true)))
	own, err = newSocketFile(int32(fd))
	must(t, err)
	t.Cleanup(func() { own.Close() })
	return far, own
}

func newThroughWorld(t *testing.T) *throughWorld {
	t.Helper()
	w := &throughWorld{word: make(chan int, 1)}
	w.l = &loop{
		w:     &Worker{config: &Config{Limits: Limits{Buffer: BufferMin, Idle: 10 * time.Hour, HalfClosed: time.Minute}}},
		words: make([]atomic.Uint64, wordsOfLoop), start: time.Now(),
	}
	w.s = &sealed{l: w.l}
	w.s.quit, w.s.stop = context.WithCancel(t.Context())
	var sessions [2]*seal.Conn
	ctx, stop := context.WithTimeout(t.Context(), await.Limit(time.Minute))
	defer stop()
	for i := range sessions {
		far, own := workersEnd(t)
		w.s.socket[i] = own
		dials, accepts := keysOfPart(t)
		dialling, accepting := net.Conn(far), net.Conn(own)
		if i == 1 {
			dialling, accepting = own, far
		}
		var dialled *seal.Conn
		done := make(chan error, 1)
		go func() {
			var err error
			dialled, err = dials.Dial(ctx, dialling, "shop", seal.HTTP1)
			done <- err
		}()
		accepted, _, err := accepts.Accept(ctx, accepting)
		must(t, err)
		must(t, accepted.Answer(ctx, seal.Answer{}))
		must(t, <-done)
		if i == 0 {
			w.gateway, sessions[i] = dialled, accepted
		} else {
			w.origin, sessions[i] = accepted, dialled
		}
	}
	var in, out *socketFile
	w.before, in = workersEnd(t)
	w.behind, out = workersEnd(t)
	w.s.plain = [2]*socketFile{in, out}
	go func() { w.word <- w.s.carryThrough(sessions[0], sessions[1], in, out) }()
	// Something comes through in each direction.
	for _, way := range []struct {
		from, to         io.ReadWriter
		enters, comesOut io.ReadWriter
	}{{w.gateway, w.origin, w.before, w.behind}, {w.origin, w.gateway, w.behind, w.before}} {
		for _, hop := range [][2]io.ReadWriter{{way.from, way.enters}, {way.comesOut, way.to}} {
			_, err := hop[0].Write([]byte("part of it"))
			must(t, err)
			b := make([]byte, len("part of it"))
			_, err = io.ReadFull(hop[1], b)
			must(t, err)
		}
	}
	return w
}

// A FIN of the function's own, or of somebody on its links, does not become an end that TLS has said.
func TestWhatAFunctionEndsItselfIsCut(t *testing.T) {
	for name, who := range map[string]func(w *throughWorld) (ends *net.TCPConn, hears *seal.Conn){
		"towards the server": func(w *throughWorld) (*net.TCPConn, *seal.Conn) { return w.behind, w.origin },
		"towards the client": func(w *throughWorld) (*net.TCPConn, *seal.Conn) { return w.before, w.gateway },
	} {
		t.Run(name, func(t *testing.T) {
			w := newThroughWorld(t)
			ends, hears := who(w)
			must(t, ends.CloseWrite())
			if n, err := hears.Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, io.EOF) {
				t.Fatalf("the end hears %d bytes and %v of what the function ended; want an error that is no end", n, err)
			}
			<-w.word
			if n := w.l.words[wordByFunction].Load(); n != 1 {
				t.Errorf("the function's resets are counted as %d; want 1", n)
			}
		})
	}
}

// Ends that the client and the server have said go through the function as such.
func TestEndsGoThroughAFunction(t *testing.T) {
	w := newThroughWorld(t)
	for _, way := range []struct {
		from, to         *seal.Conn
		enters, comesOut *net.TCPConn
	}{{w.gateway, w.origin, w.before, w.behind}, {w.origin, w.gateway, w.behind, w.before}} {
		must(t, way.from.CloseWrite())
		if n, err := way.enters.Read(make([]byte, 1)); n > 0 || !errors.Is(err, io.EOF) {
			t.Fatalf("the function hears %d bytes and %v; want the end", n, err)
		}
		must(t, way.comesOut.CloseWrite())
		if n, err := way.to.Read(make([]byte, 1)); n > 0 || !errors.Is(err, io.EOF) {
			t.Fatalf("the other end hears %d bytes and %v; want the end", n, err)
		}
	}
	if word := <-w.word; word != wordEnded {
		t.Errorf("it is counted as %d; want %d, ended", word, wordEnded)
	}
}

// A connection that the client has ended is half-closed also if the function keeps that to itself.
func TestAnEndThatAFunctionKeepsIsHalfClosed(t *testing.T) {
	w := newThroughWorld(t)
	w.l.conns = [][]conn{make([]conn, 1)}
	c := &w.l.conns[0][0]
	c.open, c.sealed = true, w.s
	w.l.start = time.Now().Add(-time.Hour) // some of it idle, less than Idle
	w.s.active.Store(0)
	w.l.now = time.Hour
	w.l.sweep()
	if n := w.l.words[wordByLimit].Load(); n != 0 {
		t.Fatal("it was reset while it was open")
	}
	must(t, w.gateway.CloseWrite())
	if n, err := w.before.Read(make([]byte, 1)); n > 0 || !errors.Is(err, io.EOF) {
		t.Fatalf("the function hears %d bytes and %v; want the end", n, err)
	}
	// What the handshakes have moved may be noted only now.
	eventually(t, "it is reset after an hour; want that after a minute", func() bool {
		w.s.active.Store(0)
		w.l.sweep()
		return w.l.words[wordByLimit].Load() == 1
	})
	w.s.end(wordByWorker)
	<-w.word
}

// plainWorld is a way through a function that does nothing: a wire.
type plainWorld struct {
	t     *testing.T
	place *host.Net
	p     *plain
}

func newPlainWorld(t *testing.T) *plainWorld {
	t.Helper()
	w := newWorld(t, false)
	ns, err := host.Anonymous()
	must(t, err)
	behind, err := host.Open(ns)
	must(t, err)
	must(t, ns.Close())
	t.Cleanup(func() { must(t, behind.Close()) })
	to, from := [6]byte{2, 0, 0, 0, 9, 1}, [6]byte{2, 0, 0, 0, 9, 2}
	must(t, w.place.AddVeth(host.Veth{Name: "to", PeerName: "from", Peer: behind.NetNS(), MAC: to, PeerMAC: from, Queues: 1}))
	one, two := netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fe80::2")
	const plainPort = 80
	must(t, PlainSide{Link: "to", Port: plainPort, Own: one, Via: two, ViaMAC: from}.Prepare(w.place))
	must(t, PlainSide{Link: "from", Port: plainPort, Accepts: true, Own: two, Via: one, ViaMAC: to}.Prepare(behind))
	soon, cancel := context.WithTimeout(t.Context(), await.Limit(time.Minute))
	defer cancel()
	must(t, errors.Join(w.place.WaitUp(soon, "to"), behind.WaitUp(soon, "from")))
	x := &plainWorld{t: t, place: w.place}
	must(t, behind.NetNS().Do(func() error {
		files, err := PlainListeners(plainPort)
		if err != nil {
			return err
		}
		x.p, err = newPlain(files)
		return err
	}))
	for _, l := range x.p.listeners {
		go x.p.accept(l)
	}
	t.Cleanup(x.p.close)
	return x
}

// open opens a plain connection, and leaves it open until the test ends.
func (w *plainWorld) open(client, server netip.Addr, from uint16) (in, out *socketFile, err error) {
	w.t.Helper()
	ctx, stop := context.WithTimeout(w.t.Context(), await.Limit(10*time.Second))
	defer stop()
	must(w.t, w.place.NetNS().Do(func() error {
		if in, out, err = w.p.open(ctx, netip.AddrPortFrom(client, from), server); err == nil {
			w.t.Cleanup(func() {
				in.Close()
				out.Close()
			})
		}
		return nil
	}))
	return in, out, err
}

// When the interface to the function goes, plain connections do not take the way of sealed ones.
func TestPlainConnectionsHaveNoOtherWay(t *testing.T) {
	w := newPlainWorld(t)
	for _, way := range [][2]netip.Addr{{client6, server6}, {client4, server4}} {
		if _, _, err := w.open(way[0], way[1], 40000); err != nil {
			t.Errorf("%s to %s: %v; want that it comes out at the other side", way[0], way[1], err)
		}
	}
	must(t, w.place.DeleteLink("to"))
	for _, way := range [][2]netip.Addr{{client6, server6}, {client4, server4}} {
		if _, _, err := w.open(way[0], way[1], 40001); !errors.Is(err, unix.EACCES) {
			t.Errorf("%s to %s without the function's interface: %v; want %v", way[0], way[1], err, unix.EACCES)
		}
	}
}

// Two connections of a client from one port, to servers of one address with different ports, go side by side.
func TestServersOfOneAddressHaveTheirOwnPlainConnections(t *testing.T) {
	w := newPlainWorld(t)
	peer := func(f *socketFile) (from netip.AddrPort) {
		must(t, f.raw.Control(func(fd uintptr) {
			sa, err := unix.Getpeername(int(fd))
			must(t, err)
			from = addrPort(sa)
		}))
		return from
	}
	for _, way := range [][2]netip.Addr{{client6, server6}, {client4, server4}} {
		var in, out [2]*socketFile
		for i := range in {
			var err error
			in[i], out[i], err = w.open(way[0], way[1], 40000)
			must(t, err)
		}
		first, second := peer(out[0]), peer(out[1])
		if first != netip.AddrPortFrom(way[0], 40000) || second.Addr() != way[0] || second == first {
			t.Errorf("they come out from %s and %s; want the client's port and another one of its address", first, second)
		}
		for i, text := range []string{"to the first", "to the other"} {
			_, err := in[i].Write([]byte(text))
			must(t, err)
		}
		for i, want := range []string{"to the first", "to the other"} {
			b := make([]byte, len(want))
			if _, err := io.ReadFull(out[i], b); err != nil || string(b) != want {
				t.Errorf("connection %d brings %q, %v; want %q", i, b, err, want)
			}
		}
	}
}
