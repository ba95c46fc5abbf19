package stream

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/seal"
)

// A function that knows nothing of seals gets plain connections. Once both sealed sessions of a
// connection are open, the worker opens one more, from the client's address and port to the server's
// address at the plain port, by an interface that leads to the function. What comes out behind the function
// is accepted in another namespace, and is known by its addresses and the client's port. So four sockets and
// two sessions make a connection:
//
//	client ── sealed ── worker ── plain ── function ── plain ── worker ── sealed ── server

// PlainSide is a namespace's end of the links of a function: plain connections are opened at one
// of two namespaces and accepted at the other.
type PlainSide struct {
	Link    string     // the interface that leads to the function
	Port    uint16     // of servers
	Accepts bool       // connections come in here; else they are opened here, in a worker's place
	Own     netip.Addr // link-local address of this side, which the function sends by
	Via     netip.Addr // link-local address of the next hop
	ViaMAC  [6]byte    // zero: the function is asked
}

// plainTable is the routing table of plain connections in a worker's place. Without the function's
// interface they have no route: a look-up that finds none would go on to the main table, which leads
// to the node. So the table ends with a route that refuses.
const (
	plainTable  = 80
	plainMetric = 1 << 20 // of that route; others have a smaller one
)

// Prepare makes the namespace have the side. Of what comes from the function it takes packets from or to the
// plain port alone, and packets to link-local addresses where the function is a next hop. The worker's listeners
// accept no connections from the function; see dataplane.GiveConnections.
func (s PlainSide) Prepare(n *host.Net) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("prepare the links of plain connections: %w", err)
		}
	}()
	settings := []struct{ key, value string }{
		{"net/ipv6/conf/" + s.Link + "/disable_ipv6", "0"},
		{"net/ipv6/conf/" + s.Link + "/addr_gen_mode", "1"},
		{"net/ipv6/conf/" + s.Link + "/accept_ra", "0"},
		{"net/ipv4/conf/" + s.Link + "/rp_filter", "0"},
	}
	if s.Accepts {
		settings = append(settings, placeSettings...)
	}
	for _, s := range settings {
		if err := n.SetSysctl(s.key, s.value); err != nil {
			return err
		}
	}
	if s.Accepts {
		if err := n.SetUp("lo"); err != nil {
			return err
		}
	}
	if err := n.AddAddress(s.Link, netip.PrefixFrom(s.Own, 64)); err != nil {
		return err
	}
	if err := n.SetUp(s.Link); err != nil {
		return err
	}
	asks := s.ViaMAC == [6]byte{}
	if !asks {
		if err := n.AddNeighbour(s.Link, s.Via, s.ViaMAC); err != nil {
			return err
		}
	}
	for _, any := range []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")} {
		ipv4 := any.Addr().Is4()
		in := host.Rule{IPv4: ipv4, Priority: 101, Input: s.Link, Table: host.LocalTable}
		rules := []host.Rule{in}
		way := host.Route{Destination: any, Device: s.Link, Via: s.Via}
		if s.Accepts {
			rules[0].DestinationPort = s.Port
			if err := n.AddRoute(host.Route{Destination: any, Type: host.RouteLocal, Device: "lo", Table: host.LocalTable}); err != nil {
				return err
			}
		} else {
			rules[0].SourcePort = s.Port
			way.Table = plainTable
			if err := n.AddRoute(host.Route{Destination: any, Type: host.RouteProhibit, Table: plainTable, Metric: plainMetric}); err != nil {
				return err
			}
			rules = append(rules, host.Rule{IPv4: ipv4, Priority: 200, DestinationPort: s.Port, Table: plainTable})
		}
		if asks && !ipv4 {
			for i, to := range []string{"fe80::/64", "ff00::/8"} {
				r := in
				r.Priority, r.Destination = 102+i, netip.MustParsePrefix(to)
				rules = append(rules, r)
			}
		}
		if err := n.AddRoute(way); err != nil {
			return err
		}
		for _, r := range rules {
			if err := n.AddRule(r); err != nil {
				return err
			}
		}
		if s.Accepts {
			// The kernel's rule has all packets look into the local table first.
			if err := n.DeleteRule(host.Rule{IPv4: ipv4, Priority: 0, Table: host.LocalTable}); err != nil {
				return err
			}
		}
	}
	return nil
}

// PlainListeners makes the sockets that accept plain connections, of IPv6 and IPv4, in the calling
// thread's namespace. The caller closes them.
func PlainListeners(port uint16) (files []*os.File, err error) {
	for _, family := range []int{unix.AF_INET6, unix.AF_INET} {
		fd, err := listen(family, port)
		if err != nil {
			for _, f := range files {
				f.Close()
			}
			return nil, err
		}
		files = append(files, os.NewFile(uintptr(fd), "listener of plain connections"))
	}
	return files, nil
}

// plain is a worker's way through a function that knows nothing of seals.
type plain struct {
	port      uint16
	listeners []*socketFile

	mu      sync.Mutex
	waiting map[ends]chan *socketFile // has room for one
}

// newPlain takes over PlainListeners.
func newPlain(files []*os.File) (_ *plain, err error) {
	p := &plain{waiting: map[ends]chan *socketFile{}}
	defer func() {
		if err != nil {
			p.close()
			err = fmt.Errorf("the listeners of plain connections: %w", err)
		}
	}()
	for _, f := range files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
		}
		if err := errors.Join(f.Close(), unix.SetNonblock(fd, true)); err != nil {
			unix.Close(fd)
			return nil, err
		}
		at, err := unix.Getsockname(fd)
		if err != nil {
			unix.Close(fd)
			return nil, os.NewSyscallError("getsockname", err)
		}
		l, err := newSocketFile(int32(fd))
		if err != nil {
			return nil, err
		}
		p.port = addrPort(at).Port()
		p.listeners = append(p.listeners, l)
	}
	return p, nil
}

func (p *plain) close() {
	for _, l := range p.listeners {
		l.Close()
	}
}

// acceptPause is how long a listener waits for descriptors.
const acceptPause = 20 * time.Millisecond

// accept takes what comes out behind the function, until the listener is closed. What nobody waits for, the
// function has made itself, or changed: it is reset.
func (p *plain) accept(l *socketFile) {
	for {
		var fd int
		var from unix.Sockaddr
		var failed error
		if l.raw.Read(func(u uintptr) bool {
			fd, from, failed = unix.Accept4(int(u), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			return failed != unix.EAGAIN
		}) != nil {
			return
		}
		if failed != nil {
			if failed == unix.EMFILE || failed == unix.ENFILE || failed == unix.ENOBUFS || failed == unix.ENOMEM {
				time.Sleep(acceptPause)
			}
			continue // this connection has ended meanwhile (accept(2))
		}
		to, err := unix.Getsockname(fd)
		if err != nil {
			unix.Close(fd)
			continue
		}
		p.give(ends{addrPort(from), addrPort(to)}, fd)
	}
}

func (p *plain) give(about ends, fd int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	came := p.waiting[about]
	if came == nil {
		unix.Close(fd) // RST: see setOptions
		return
	}
	f, err := newSocketFile(int32(fd))
	if err != nil {
		return // who waits gives up
	}
	delete(p.waiting, about)
	came <- f
}

var errTwice = errors.New("another connection of these ends is just being opened")

// plainTries bounds how many ports are tried for a plain connection.
const plainTries = 8

// open opens a plain connection through the function, before the context ends: the end that
// clients' bytes are written to, and the one that they come out of. All servers of an address have one port there. Where the
// client's port leads to another one of them already, the connection is from another port of the client's address.
func (p *plain) open(ctx context.Context, client netip.AddrPort, server netip.Addr) (in, out *socketFile, err error) {
	for try := 1; ; try++ {
		in, out, err = p.openFrom(ctx, client, server)
		taken := errors.Is(err, errTwice) || errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EADDRINUSE)
		if !taken || try == plainTries {
			return in, out, err
		}
		var b [2]byte
		if _, err := rand.Read(b[:]); err != nil {
			return nil, nil, err
		}
		client = netip.AddrPortFrom(client.Addr(), max(1024, binary.NativeEndian.Uint16(b[:])))
	}
}

func (p *plain) openFrom(ctx context.Context, client netip.AddrPort, server netip.Addr) (in, out *socketFile, err error) {
	about := ends{client, netip.AddrPortFrom(server, p.port)}
	came := make(chan *socketFile, 1)
	p.mu.Lock()
	if p.waiting[about] != nil {
		p.mu.Unlock()
		return nil, nil, errTwice
	}
	p.waiting[about] = came
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		if p.waiting[about] == came {
			delete(p.waiting, about)
		}
		p.mu.Unlock()
		if err == nil {
			return
		}
		if in != nil {
			in.Close()
		}
		select {
		case late := <-came:
			late.Close()
		default:
		}
	}()
	fd, err := connect(about.client, about.server, classDefault)
	if err != nil {
		return nil, nil, err
	}
	if in, err = newSocketFile(int32(fd)); err != nil {
		return nil, nil, err
	}
	if err = in.connected(ctx); err != nil {
		return in, nil, err
	}
	select {
	case out = <-came:
		return in, out, nil
	case <-ctx.Done():
		err = fmt.Errorf("it did not come out as %s to %s: %w", about.client, about.server, ctx.Err())
		return in, nil, err
	}
}

// connected waits until a connection that was begun is there.
func (f *socketFile) connected(ctx context.Context) error {
	unbound := context.AfterFunc(ctx, func() { f.SetDeadline(time.Unix(1, 0)) })
	defer unbound()
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Write(func(fd uintptr) bool {
		if failed = socketError(int(fd)); failed != nil {
			return true
		}
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		failed = err
		return err != nil || info.State != tcpSynSent
	}); err != nil {
		return err
	}
	if failed != nil {
		return os.NewSyscallError("connect", failed)
	}
	return nil
}

// tcpSynSent is a connection's state in struct tcp_info (include/net/tcp_states.h).
const tcpSynSent = 2

// through opens the plain connection, which ends when the sealed one has to.
func (s *sealed) through(ctx context.Context) (in, out *socketFile, err error) {
	in, out, err = s.l.w.plain.open(ctx, s.about.Client, s.about.Server.Addr())
	if err != nil {
		return nil, nil, fmt.Errorf("function %s has let no plain connection through: %w", s.l.w.config.Name, err)
	}
	s.more.Lock()
	defer s.more.Unlock()
	s.plain = [2]*socketFile{in, out}
	if err := s.quit.Err(); err != nil {
		in.Close()
		out.Close()
		return nil, nil, err
	}
	return in, out, nil
}

// closePlain closes the plain connection, if there is one.
func (s *sealed) closePlain() {
	s.more.Lock()
	defer s.more.Unlock()
	for _, f := range s.plain {
		if f != nil {
			f.Close()
		}
	}
}

// leg is a stretch of one direction: to the function, or from it.
type leg struct {
	side          int // function.ToServer or ToClient
	counts        int // wordIn or wordOut
	from          io.Reader
	to            io.Writer
	end           func() error // says that nothing more comes
	reads, writes int          // words if reading or writing fails
}

// plainPiece is how much is read at once from a function, in bytes.
const plainPiece = 64 << 10

// carryThrough moves bytes in both directions through the function until all have ended, or one fails.
func (s *sealed) carryThrough(client, server *seal.Conn, in, out *socketFile) int {
	legs := []leg{
		{0, wordIn, client, in, in.endWrites, wordByClient, wordByFunction},
		{0, wordOut, out, server, func() error { return errors.Join(server.CloseWrite(), s.socket[1].endWrites()) }, wordByFunction, wordByServer},
		{1, wordIn, server, out, out.endWrites, wordByServer, wordByFunction},
		{1, wordOut, in, client, func() error { return errors.Join(client.CloseWrite(), s.socket[0].endWrites()) }, wordByFunction, wordByClient},
	}
	words := make(chan int, len(legs))
	for _, g := range legs {
		go func() {
			word := s.carryLeg(g)
			if word != wordEnded {
				s.end(word) // RST: what was cut off never looks complete
			}
			words <- word
		}()
	}
	word := wordEnded
	for range legs {
		if w := <-words; word == wordEnded {
			word = w
		}
	}
	return word
}

// halfClosed reports whether one side has ended, also if a function keeps that to itself.
func (s *sealed) halfClosed() bool { return s.half.Load() || s.ended[0].Load() || s.ended[1].Load() }

func (s *sealed) carryLeg(g leg) (word int) {
	words := s.l.words[wordSides+g.side*wordsOfSide:]
	size := pieceMax
	if g.counts == wordOut {
		size = min(plainPiece, s.l.w.config.Buffer)
	}
	for buf := make([]byte, size); ; {
		n, err := g.from.Read(buf)
		if n > 0 {
			if g.counts == wordIn {
				words[wordIn].Add(uint64(n))
			}
			k, werr := g.to.Write(buf[:n])
			if g.counts == wordOut {
				words[wordOut].Add(uint64(k))
			}
			s.active.Store(s.now())
			if werr != nil {
				return g.writes
			}
		}
		switch {
		case err == nil:
			continue
		case !errors.Is(err, io.EOF):
			return g.reads
		case g.counts == wordIn:
			s.ended[g.side].Store(true)
		case !s.ended[g.side].Load():
			// A FIN that the function, or somebody on its links, has made: it would make
			// what was cut off look complete.
			return g.reads
		}
		if err := g.end(); err != nil && !s.half.Load() {
			return g.writes // who has ended itself may be gone already
		}
		if g.counts == wordOut {
			s.half.Store(true)
		}
		return wordEnded
	}
}
