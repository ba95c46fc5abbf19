package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/srv6"
)

// All links of the domain meet at m, which loses, doubles and delays packets:
//
//	h1 --- r1                     r6 --- h2   chain packed: to h2 by zip and unzip, and back
//	         \                   /  \
//	          -------- m --------    --- h3   chain plain: to h3 by tap, and back
//	         /                   \
//	    r2 (zip, tap)        r3 (unzip)
const streamStar = `
version: 1
domain: {block: "fc00::/48"}
nodes:
  - name: r1
    address: fc00:1::1
    locator: fc00:0:0:100::/56
    interfaces: [{name: r1-h1, role: edge}, {name: r1-m, role: core, mtu: 1700}]
  - name: r2
    address: fc00:2::1
    locator: fc00:0:0:200::/56
    interfaces: [{name: r2-m, role: core, mtu: 1700}]
  - name: r3
    address: fc00:3::1
    locator: fc00:0:0:300::/56
    interfaces: [{name: r3-m, role: core, mtu: 1700}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    interfaces: [{name: r6-h2, role: edge}, {name: r6-h3, role: edge}, {name: r6-m, role: core, mtu: 1700}]
functions:
  - {name: zip, node: r2, kind: stream, run: [{gzip: {level: 1}}]}
  - {name: unzip, node: r3, kind: stream, run: [gunzip], back: [{gzip: {level: 1}}]}
  - {name: tap, node: r2, kind: stream, run: [identity]}
chains:
  - {name: packed, ingress: [r1], functions: [zip, unzip], egress: r6, match: {destination: "fc00:8::/64"}, direction: both}
  - {name: plain, ingress: [r1], functions: [tap], egress: r6, match: {destination: "fc00:9::/64"}, direction: both}
lab:
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64", mtu: 1500}
    - {name: h2, node: r6, prefix: "fc00:8::/64", mtu: 1500}
    - {name: h3, node: r6, prefix: "fc00:9::/64", mtu: 1500}
  routers:
    - {name: m, address: "fc00:4::1"}
  links:
    - {between: [r1, m]}
    - {between: [m, r2]}
    - {between: [m, r3]}
    - {between: [m, r6]}
`

// badLink is what m does to packets, each by itself.
type badLink struct {
	m      *meddler
	random *rand.Rand
	late   sync.WaitGroup // packets that are held back

	lost, doubled, delayed int
}

// rule is called with the router's lock held.
func (b *badLink) rule(_ string, _ srv6.Packet, raw []byte) []lab.Sent {
	out := []lab.Sent{{Packet: raw}}
	switch n := b.random.IntN(100); {
	case n < 2:
		b.lost++
		return nil
	case n < 4:
		b.doubled++
		return append(out, out...)
	case n < 9:
		// Younger packets pass it meanwhile.
		b.delayed++
		packet := bytes.Clone(raw)
		b.late.Add(1)
		time.AfterFunc(time.Duration(1+b.random.IntN(3000))*time.Microsecond, func() {
			defer b.late.Done()
			b.m.Send(lab.Sent{Packet: packet})
		})
		return nil
	}
	return out
}

// abandoned is how long a function keeps a server's connection whose client has reset its own in the middle of the
// handshake, which the function's socket learns nothing of (heldQuiet in internal/stream): the link has lost the
// client's ACK, and not its RST.
const abandoned = 80 * time.Second

// script is what one side of a connection does: it writes pieces, with pauses between them, and then ends its
// direction, or resets the connection.
type script struct {
	pieces []int // bytes
	pauses []time.Duration
	resets bool
}

func (s script) total() (n int) {
	for _, p := range s.pieces {
		n += p
	}
	return n
}

func (s script) String() string {
	if s.resets {
		return fmt.Sprintf("writes %v, resets", s.pieces)
	}
	return fmt.Sprintf("writes %v, ends", s.pieces)
}

// drawScripts are those of a connection's two sides. At most one of them resets.
func drawScripts(r *rand.Rand) (both [2]script) {
	for i := range both {
		for range r.IntN(6) {
			both[i].pieces = append(both[i].pieces, []int{1, 100, 1460, 10_000, 1 + r.IntN(120_000)}[r.IntN(5)])
			both[i].pauses = append(both[i].pauses, time.Duration(r.IntN(20))*time.Millisecond)
		}
	}
	if k := r.IntN(6); k < 2 {
		both[k].resets = true
	}
	return both
}

// streamed fills p with the bytes of a side's direction from a place on. They compress somewhat.
func streamed(p []byte, from, side int) {
	for i := range p {
		at := from + i
		p[i] = byte(at>>7) ^ byte(at*at>>13) ^ byte(side*0x55)
	}
}

// talker plays a side's script on its end of a connection.
type talker struct {
	side   int
	conn   *net.TCPConn
	own    script
	others script

	got      int
	readErr  error
	closed   bool // by a reset: the socket's state when reading ended
	writeErr error
}

// play ends when both directions have ended at this side, or the connection is reset.
func (k *talker) play() {
	var wait sync.WaitGroup
	wait.Go(k.read)
	k.writeErr = k.write()
	wait.Wait()
	k.conn.Close()
}

func (k *talker) write() error {
	at := 0
	for i, n := range k.own.pieces {
		time.Sleep(k.own.pauses[i])
		b := make([]byte, n)
		streamed(b, at, k.side)
		if _, err := k.conn.Write(b); err != nil {
			return err
		}
		at += n
	}
	switch {
	case k.own.resets:
		return errors.Join(k.conn.SetLinger(0), k.conn.Close())
	case !k.others.resets:
		return k.conn.CloseWrite()
	}
	// A RST may be lost, and is not sent again but as the answer to further data.
	for ; ; at++ {
		b := []byte{0}
		streamed(b, at, k.side)
		if _, err := k.conn.Write(b); err != nil {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (k *talker) read() {
	buf, want := make([]byte, 32<<10), make([]byte, 32<<10)
	for {
		n, err := k.conn.Read(buf)
		streamed(want[:n], k.got, 1-k.side)
		if !bytes.Equal(buf[:n], want[:n]) {
			k.readErr = fmt.Errorf("wrong bytes between %d and %d", k.got, k.got+n)
			k.conn.SetDeadline(time.Now()) // the writer ends, too
			return
		}
		k.got += n
		if err != nil {
			k.readErr = err
			// Whoever reads after a writer has learned of a RST reads an end. The state of a socket that has not
			// ended its own direction tells one from the other.
			if err == io.EOF {
				k.closed = socketState(k.conn) == unix.BPF_TCP_CLOSE
			}
			return
		}
	}
}

// socketState is a state of include/net/tcp_states.h; 0: it could not be read.
func socketState(c *net.TCPConn) (state int) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			state = int(info.State)
		}
	})
	return state
}

// judge is what the model says about a side that has played its script; nil: all is as it would be without functions.
func (k *talker) judge() error {
	whole := k.others.total()
	reset := func(err error) bool { return errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) }
	switch {
	case k.own.resets:
		// It has closed its socket; what came before was right.
		if !errors.Is(k.readErr, net.ErrClosed) || k.writeErr != nil {
			return fmt.Errorf("before it reset, reading ended with %v, and writing with %v", k.readErr, k.writeErr)
		}
	case k.others.resets:
		if k.got > whole || !reset(k.readErr) && !(k.readErr == io.EOF && k.closed) || !reset(k.writeErr) {
			return fmt.Errorf("%d of at most %d bytes came, reading ended with %v, and writing with %v; want a reset", k.got, whole, k.readErr, k.writeErr)
		}
	case k.got != whole || k.readErr != io.EOF || k.writeErr != nil:
		return fmt.Errorf("%d of %d bytes came, reading ended with %v, and writing with %v; want all, and the end", k.got, whole, k.readErr, k.writeErr)
	}
	return nil
}

// A connection through functions is the connection that it would be without them, also over links that lose, double and
// reorder packets: bytes, their order, ends and the kind of end. A packet that comes twice is refused by its number.
func TestAStreamIsAStreamOverBadLinks(t *testing.T) {
	t.Parallel()
	w := build(t, streamStar)
	for _, link := range [][2]string{{"r1", "r1-m"}, {"r2", "r2-m"}, {"r3", "r3-m"}, {"r6", "r6-m"}} {
		// Packets come to m one by one, with their checksums.
		for _, o := range []host.Offload{host.TSO, host.GSO, host.TransmitSum} {
			must(t, w.net(link[0]).SetOffload(link[1], o, false))
		}
	}
	w.download("h2", "h1", 1_000_000)
	seed := rand.Uint64()
	if s := os.Getenv("WAYSTAMP_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		must(t, err)
	}
	t.Logf("WAYSTAMP_SEED=%d draws the same scripts again", seed)
	bad := &badLink{m: w.meddle("m"), random: rand.New(rand.NewPCG(seed, 0))}
	bad.m.Set(bad.rule)
	const connections = 16 // to each server
	var wait, accepting sync.WaitGroup
	defer accepting.Wait()
	for _, to := range []string{"h2", "h3"} {
		var l net.Listener
		must(t, w.Do(to, func() (err error) {
			l, err = net.Listen("tcp", net.JoinHostPort(w.addr(to).String(), "0"))
			return err
		}))
		a := &acceptor{Listener: l, from: map[string]chan *net.TCPConn{}}
		accepting.Go(a.run)
		defer l.Close()
		for i := range connections {
			both := drawScripts(rand.New(rand.NewPCG(seed, uint64(to[1])<<8|uint64(i))))
			wait.Go(func() {
				var pair [2]*talker
				client, server, err := w.connected(a)
				if err != nil {
					t.Error(err)
					return
				}
				for side, c := range []*net.TCPConn{client, server} {
					c.SetDeadline(time.Now().Add(settleTime + abandoned))
					pair[side] = &talker{side: side, conn: c, own: both[side], others: both[1-side]}
				}
				var talk sync.WaitGroup
				for _, k := range pair {
					talk.Go(k.play)
				}
				talk.Wait()
				for side, k := range pair {
					if err := k.judge(); err != nil {
						t.Errorf("to %s, connection %d: client %v; server %v; at side %d (0: client): %v", to, i, both[0], both[1], side, err)
					}
				}
			})
		}
	}
	wait.Wait()
	bad.m.Set(nil)
	bad.late.Wait()
	if bad.lost == 0 || bad.doubled == 0 || bad.delayed == 0 {
		t.Errorf("m has lost %d packets, doubled %d and delayed %d; want some of each", bad.lost, bad.doubled, bad.delayed)
	}
	t.Logf("m has lost %d packets, doubled %d and delayed %d", bad.lost, bad.doubled, bad.delayed)
	w.refusedSome("r2", "replay")
	for _, node := range w.nodes() {
		w.mayRefuse(node, "replay")
	}
	// What is good again works again.
	w.download("h2", "h1", 1_000_000)
	w.download("h3", "h1", 1_000_000)
	for _, node := range w.nodes() {
		w.mayRefuse(node, "replay")
	}
}

// acceptor sorts a listener's connections by their clients.
type acceptor struct {
	net.Listener
	mu   sync.Mutex
	from map[string]chan *net.TCPConn // by the client's address
}

func (a *acceptor) of(client string) chan *net.TCPConn {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.from[client] == nil {
		a.from[client] = make(chan *net.TCPConn, 1)
	}
	return a.from[client]
}

// run ends when the listener is closed.
func (a *acceptor) run() {
	for {
		c, err := a.Accept()
		if err != nil {
			return
		}
		a.of(c.RemoteAddr().String()) <- c.(*net.TCPConn)
	}
}

// connected opens a connection from h1. The server knows it by the client's address and port.
func (w *world) connected(a *acceptor) (client, server *net.TCPConn, err error) {
	err = w.Do("h1", func() error {
		c, err := net.DialTimeout("tcp", a.Addr().String(), settleTime)
		if err == nil {
			client = c.(*net.TCPConn)
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	select {
	case server = <-a.of(client.LocalAddr().String()):
		return client, server, nil
	case <-time.After(settleTime):
		return nil, nil, errors.Join(fmt.Errorf("the server has no connection from %s", client.LocalAddr()), client.Close())
	}
}
