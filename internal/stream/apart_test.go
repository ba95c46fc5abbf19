package stream

import (
	"errors"
	"net"
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

// A client's connection that comes to the listener of another loop than its SYN cannot be handed over between tables of
// descriptors: it is reset, and so is the one to its server.
func TestAConnectionOfAnotherTableIsReset(t *testing.T) {
	ns, err := host.Anonymous()
	must(t, err)
	n, err := host.Open(ns)
	must(t, err)
	t.Cleanup(func() { must(t, errors.Join(n.Close(), ns.Close())) })
	must(t, n.SetUp("lo"))
	w, memory, _ := heldWorker(t, ns, 2)
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
	its := w.loopOf(of)
	other := w.loops[1-its.index]
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(pair[0])
	w.connections.Add(1)
	c := its.newConn()
	c.fd[1], c.wait = int32(pair[1]), &waiting{ends: of}
	its.waiting[of] = c.number
	other.acceptedHeld(fd, of.client)
	soon(client)
	if _, err := client.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("the client: %v; want a reset", err)
	}
	its.takeHanded()
	if n, err := unix.Read(pair[0], make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("the server's side: %d bytes, %v; want that it is closed", n, err)
	}
	if n := loopWords(memory, its.index)[wordByWorker].Load(); n != 1 || len(its.waiting) != 0 || w.connections.Load() != 0 {
		t.Errorf("%d were reset by the worker, %d wait, %d are open; want one, none, none", n, len(its.waiting), w.connections.Load())
	}
}
