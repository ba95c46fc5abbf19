package stream

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// A worker that may have 300 descriptors has 600 connections, in event loops with descriptors of their own; it knows that
// it has room for them; and a worker that dies resets them.
func TestAWorkerHasMoreConnectionsThanDescriptors(t *testing.T) {
	const descriptors, count = 300, 600
	w := once(t)
	w.descriptors = descriptors
	text, err := Text("zip", port, 1, nil, nil, nil, false, Limits{Connections: count, Buffer: BufferMin, Idle: 1 << 40, HalfClosed: 1 << 40})
	must(t, err)
	text, err = Placed(text, port, MemoryMin)
	must(t, err)
	p, _ := w.stayingAs(t, text)
	w.releases(t, p)
	l := w.listen(t, towards["IPv6"])
	var clients, servers []net.Conn
	for range count {
		c, s := w.pair(t, l, towards["IPv6"])
		clients, servers = append(clients, c), append(servers, s)
		echoes(t, c, s)
	}
	for i, c := range clients {
		echoes(t, c, servers[i])
	}
	s := p.Statistics()
	if want := loopsFor(count, (descriptors-otherDescriptors)/2); s.Now != count || s.Refused != 0 || s.Room != 0 || len(s.Rounds) != want {
		t.Errorf("%d connections are open and %d were refused, in %d loops, with room for %d; want %d, none, %d, and 0 for all", s.Now, s.Refused, len(s.Rounds), s.Room, count, want)
	}
	if err := w.firstError(towards["IPv6"]); !isReset(err) {
		t.Errorf("one connection more than the limit: %v; want a reset", err)
	}
	must(t, p.kill())
	for _, side := range [][]net.Conn{clients, servers} {
		for _, c := range side {
			if _, err := c.Read(make([]byte, 1)); !isReset(err) {
				t.Fatalf("a connection of a worker that died: %v; want a reset", err)
			}
		}
	}
}

// The loops of a worker suffice for its connections, also if one has more than its part, and there are no more than may be.
func TestLoopsForConnections(t *testing.T) {
	for _, c := range []struct {
		connections int
		room        uint64
		want        int
	}{
		{1, 1, 1}, {100_000, 9872, 12}, {100_000, 1 << 40, 1}, {ConnectionsMax, 384, LoopsMax}, {100, 0, 1}, {21, 22, 2},
	} {
		if got := loopsFor(c.connections, c.room); got != c.want {
			t.Errorf("%d connections at room for %d in each loop: %d loops; want %d", c.connections, c.room, got, c.want)
		}
	}
}

// Loops follow connections: those that do not listen rest until the tables of the others are full, and rest again behind them.
func TestLoopsFollowConnections(t *testing.T) {
	const descriptors, count = 300, 600
	w := once(t)
	w.descriptors = descriptors
	text, err := Text("zip", port, 1, []string{`{"xor": {"passes": 2}}`}, nil, nil, false, Limits{Connections: count, Buffer: BufferMin, Idle: 1 << 40, HalfClosed: 1 << 40})
	must(t, err)
	text, err = Placed(text, port, MemoryMin)
	must(t, err)
	p, _ := w.stayingAs(t, text)
	w.releases(t, p)
	l := w.listen(t, towards["IPv4"])
	each := int(usableOf((descriptors - otherDescriptors) / 2))
	opened := func() (by []uint64) {
		for i := range p.Statistics().Rounds {
			by = append(by, loopWords(p.memory, i)[wordOpened].Load())
		}
		return by
	}
	want := make([]uint64, loopsFor(count, (descriptors-otherDescriptors)/2))
	check := func(what string) {
		t.Helper()
		if got := opened(); !slices.Equal(got, want) {
			t.Fatalf("%s: the loops opened %v; want %v", what, got, want)
		}
		for i, rounds := range p.Statistics().Rounds {
			if want[i] == 0 && rounds > 0 {
				t.Errorf("%s: loop %d has come round %d times, without a connection; want that it rests", what, i, rounds)
			}
		}
	}
	var open []net.Conn
	opens := func(n int) {
		for range n {
			c, s := w.pair(t, l, towards["IPv4"])
			echoes(t, c, s)
			open = append(open, c, s)
		}
	}
	opens(each)
	want[0] = uint64(each)
	check("as many as one table takes")
	opens(2*each + 1)
	want[1], want[2], want[3] = uint64(each), uint64(each), 1
	check("more than that")
	for _, c := range open {
		must(t, c.Close())
	}
	eventually(t, "the connections have ended", func() bool { return p.Statistics().Now == 0 })
	opens(1)
	want[0]++
	check("one behind them")
}

// A loop that has no connection any more holds nothing for them, and takes the next one.
func TestALoopRests(t *testing.T) {
	w, memory, _ := heldWorker(t, nil, 0, 1)
	closes(t, w)
	must(t, w.extend(2, 8, memory))
	l := w.loops[1]
	for range 2 {
		if l.buf != nil || l.conns != nil || l.timeout() != -1 {
			t.Errorf("a loop without connections has a buffer of %d bytes and %d slabs, and waits %d ms; want none, none, and that it waits for others", len(l.buf), len(l.conns), l.timeout())
		}
		l.open.Add(1)
		if !l.admit(true) {
			t.Fatal("the loop takes no connection")
		}
		c := l.newConn()
		if l.rest(); l.buf == nil || l.at(c.number) != c {
			t.Fatal("a loop with a connection has given up what it needs")
		}
		l.reset(c, wordByClient)
		l.rest()
	}
	if w.loops[0].rest(); w.loops[0].buf == nil {
		t.Error("a loop that listens has given up what it needs")
	}
}

// Where clients wait for their servers, the first loop gives each SYN a loop with room, and who accepts the connection hands it there;
// a SYN that comes again goes to the loop that has it.
func TestWaitingClientsGoToLoopsWithRoom(t *testing.T) {
	const tables, room, clients = 4, 16, 40
	ns, err := host.Anonymous()
	must(t, err)
	n, err := host.Open(ns)
	must(t, err)
	t.Cleanup(func() { must(t, errors.Join(n.Close(), ns.Close())) })
	must(t, n.SetUp("lo"))
	runtime, err := host.RuntimeDescriptors()
	must(t, err)
	// The worker accepts in the namespace, and connects in the test's, where the server is.
	config := net.ListenConfig{}
	config.SetMultipathTCP(false)
	l, err := config.Listen(t.Context(), "tcp4", "127.9.8.7:0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	to := l.Addr().(*net.TCPAddr).AddrPort()
	w, memory, node := heldWorker(t, ns, to.Port(), 1)
	must(t, w.extend(tables, room, memory))
	must(t, w.setApart(runtime))
	ctx, stop := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- w.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		must(t, <-ran)
	})
	asks := func(client netip.AddrPort) {
		t.Helper()
		_, err := unix.Write(node, synOf(t, client, to))
		must(t, err)
		b := make([]byte, heldMax)
		n, err := unix.Read(node, b)
		for err == unix.EINTR {
			n, err = unix.Read(node, b)
		}
		must(t, err)
		if s, ok := readSegment(b[:n]); !ok || !s.opens() || s.client != client {
			t.Fatalf("the worker sent %x; want the SYN of %s", b[:n], client)
		}
	}
	opens := func(i int) (client, server net.Conn) {
		t.Helper()
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 2, byte(i)}), uint16(20000+i))
		asks(from)
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from)}
		d.SetMultipathTCP(false)
		must(t, ns.Do(func() (err error) {
			client, err = d.DialContext(t.Context(), "tcp", to.String())
			return err
		}))
		server, err := l.Accept()
		must(t, err)
		t.Cleanup(func() { errors.Join(client.Close(), server.Close()) })
		soon(client)
		soon(server)
		echoes(t, client, server)
		return client, server
	}
	each := usableOf(room)
	want := []uint64{each, each, clients - 2*each, 0}
	check := func(what string) {
		t.Helper()
		for i, n := range want {
			if got := loopWords(memory, i)[wordOpened].Load(); got != n {
				t.Errorf("%s: loop %d opened %d connections; want %d", what, i, got, n)
			}
		}
	}
	var all []net.Conn
	for i := range clients {
		c, s := opens(i)
		all = append(all, c, s)
	}
	check("more than two tables take")
	// Its loop knows the connection, and tries whether it is over.
	asks(all[2*int(each)].LocalAddr().(*net.TCPAddr).AddrPort())
	want[1]++
	check("a SYN again")
	if n := loopWords(memory, 1)[wordUnreached].Load(); n != 1 {
		t.Errorf("%d connections of a SYN that came again were given up; want one", n)
	}
	must(t, errors.Join(all[0].Close(), all[1].Close()))
	eventually(t, "one connection has ended", func() bool { return ReadStatistics(memory, w.config).Now == clients-1 })
	opens(clients)
	want[0]++
	check("one behind another")
	if n := loopWords(memory, 3)[wordRounds].Load(); n > 0 {
		t.Errorf("a loop without connections has come round %d times", n)
	}
}

// A client's connection goes from the table of the loop that accepts it to that of the loop that has its SYN. One that cannot be handed over is reset, and so is
// the one to its server.
func TestAConnectionIsHandedToAnotherTable(t *testing.T) {
	for _, works := range []bool{true, false} {
		t.Run(map[bool]string{true: "handed over", false: "reset"}[works], func(t *testing.T) { handed(t, works) })
	}
}

func handed(t *testing.T, works bool) {
	ns, err := host.Anonymous()
	must(t, err)
	n, err := host.Open(ns)
	must(t, err)
	t.Cleanup(func() { must(t, errors.Join(n.Close(), ns.Close())) })
	must(t, n.SetUp("lo"))
	w, memory, _ := heldWorker(t, ns, port, 2)
	must(t, w.extend(2, 100, memory))
	closes(t, w)
	w.apart = true
	server, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { server.Close() })
	client, err := net.Dial("tcp4", server.Addr().String())
	must(t, err)
	t.Cleanup(func() { client.Close() })
	accepted, err := server.Accept()
	must(t, err)
	raw, err := accepted.(*net.TCPConn).File()
	must(t, err)
	must(t, accepted.Close())
	fd, err := unix.FcntlInt(raw.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	must(t, errors.Join(err, raw.Close()))
	must(t, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	of := ends{client.LocalAddr().(*net.TCPAddr).AddrPort(), client.RemoteAddr().(*net.TCPAddr).AddrPort()}
	its, other := w.loops[1], w.loops[0]
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(pair[0])
	w.known.add(of, its.index)
	its.open.Add(1)
	w.connections.Add(1)
	c := its.newConn()
	c.fd[1], c.wait = int32(pair[1]), &waiting{ends: of}
	its.waiting[of] = c.number
	soon(client)
	if works {
		other.acceptedHeld(fd, of.client)
		its.takeFiles()
		if c.fd[0] < 0 || c.wait != nil || len(its.waiting) != 0 {
			t.Fatalf("the connection waits, and has descriptor %d of the client; want that it has come", c.fd[0])
		}
		_, err := unix.Write(int(c.fd[0]), []byte("these bytes"))
		must(t, err)
		if _, err := io.ReadFull(client, make([]byte, 11)); err != nil {
			t.Errorf("the client: %v; want the bytes that were written to what was handed over", err)
		}
		return
	}
	must(t, unix.Close(w.hands[its.index]))
	other.acceptedHeld(fd, of.client)
	if _, err := client.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("the client: %v; want a reset", err)
	}
	its.takeHanded()
	if n, err := unix.Read(pair[0], make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("the server's side: %d bytes, %v; want that it is closed", n, err)
	}
	if n := loopWords(memory, its.index)[wordByWorker].Load(); n != 1 || len(its.waiting) != 0 || w.connections.Load() != 0 || its.open.Load() != 0 || len(w.known.by) != 0 {
		t.Errorf("%d were reset by the worker, %d wait, %d are open, %d of the loop, %d known; want one and no other", n, len(its.waiting), w.connections.Load(), its.open.Load(), len(w.known.by))
	}
}

// Both ends of a connection pass between loops as they are.
func TestEndsAreAText(t *testing.T) {
	for _, e := range []ends{{netip.AddrPortFrom(client4, 1), towards["IPv4"]}, {netip.AddrPortFrom(client6, 65535), towards["IPv6"]}} {
		text, err := e.text()
		must(t, err)
		if got, err := readEnds(text); err != nil || got != e || len(text) > 2*addrPortMax {
			t.Errorf("%v is read as %v, from %d bytes: %v", e, got, len(text), err)
		}
	}
	for n := range 2 * addrPortMax {
		if _, err := readEnds(make([]byte, n)); err == nil && n != 12 {
			t.Errorf("%d bytes are read as the ends of a connection", n)
		}
	}
}
