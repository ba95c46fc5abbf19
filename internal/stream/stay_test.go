package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

// staying starts a worker that outlives its parent, and returns where the next one finds it.
func (w *world) staying(t *testing.T) (*Process, string) {
	t.Helper()
	text, err := Text("zip", port, 1, []string{`{"xor": {"passes": 0}}`}, nil, nil, false, Limits{Connections: 1000, Buffer: 1 << 20, Idle: time.Minute, HalfClosed: time.Minute})
	must(t, err)
	return w.stayingAs(t, text)
}

// stayingAs has another configuration.
func (w *world) stayingAs(t *testing.T, text []byte) (*Process, string) {
	t.Helper()
	t.Setenv(asWorker, "1")
	dir, err := os.MkdirTemp("", "ws") // the name of a socket is short
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	name := filepath.Join(dir, "worker")
	self, err := os.Executable()
	must(t, err)
	at, err := StaySocket(name)
	must(t, err)
	l, err := w.place.Link("w")
	must(t, err)
	var link *os.File
	must(t, w.place.NetNS().Do(func() error {
		link, err = LinkSocket(l.Index)
		return err
	}))
	if w.descriptors > 0 {
		self = limited(t, self, w.descriptors)
	}
	p, listeners, err := Begin(Options{NS: w.place.NetNS(), Program: self, Config: text, Stay: &Stay{At: at, Link: link}})
	must(t, err)
	t.Cleanup(func() {
		p.Close()
		p.kill() // it may have been left
	})
	must(t, closeAll(append(listeners, at, link)))
	return p, name
}

// limited is a program that runs another one, which may have so many descriptors and not raise that.
func limited(t *testing.T, program string, descriptors int) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "limited")
	text := fmt.Sprintf("#!/bin/sh\nulimit -n %d && exec setpriv --bounding-set -sys_resource '%s' \"$@\"\n", descriptors, program)
	must(t, os.WriteFile(name, []byte(text), 0o755))
	return name
}

// releases lets a worker serve. Packets get to it by routing here: the link of a program is one end of a pipe. The other one, which
// it returns, ends once the worker has closed that.
func (w *world) releases(t *testing.T, p *Process) *os.File {
	t.Helper()
	gone, link, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() { gone.Close() })
	ns, err := w.place.NetNS().File()
	must(t, err)
	must(t, p.Release([]byte("a tag"), link, ns))
	must(t, closeAll([]*os.File{link, ns}))
	return gone
}

// withTables runs a test of a worker whose descriptors are one table, and of one whose event loops have a table each.
func withTables(t *testing.T, f func(t *testing.T, w *world)) {
	for _, c := range []struct {
		name        string
		descriptors int
	}{{"one table", 0}, {"a table each", 300}} {
		t.Run(c.name, func(t *testing.T) {
			w := once(t)
			w.descriptors = c.descriptors
			f(t, w)
		})
	}
}

// echoes moves bytes over a connection in both directions.
func echoes(t *testing.T, a, b net.Conn) {
	t.Helper()
	for _, d := range [][2]net.Conn{{a, b}, {b, a}} {
		if _, err := d[0].Write([]byte("these bytes")); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 11)
		if _, err := io.ReadFull(d[1], got); err != nil || string(got) != "these bytes" {
			t.Fatalf("%q came, then %v", got, err)
		}
	}
}

// A worker goes on without a parent, and the next one gets it with what it holds.
func TestAWorkerOutlivesItsParent(t *testing.T) { withTables(t, outlives) }

func outlives(t *testing.T, w *world) {
	l := w.listen(t, towards["IPv6"])
	p, name := w.staying(t)
	config, pid := p.Config, p.PID()
	w.releases(t, p)
	c, s := w.pair(t, l, towards["IPv6"])
	echoes(t, c, s)
	for range 3 {
		must(t, p.Leave())
		echoes(t, c, s)
		f, err := Find(name)
		must(t, err)
		if string(f.Tag) != "a tag" || f.PID() != pid || len(f.Files) != 1 {
			t.Fatalf("process %d says %q, and hands over %d files; want %d, its tag, and its namespace", f.PID(), f.Tag, len(f.Files), pid)
		}
		ns, err := f.Files[0].Stat()
		must(t, err)
		want, err := w.place.NetNS().File()
		must(t, err)
		if st, err := want.Stat(); err != nil || !os.SameFile(st, ns) {
			t.Errorf("the worker hands over another namespace than its own: %v", err)
		}
		must(t, closeAll(append(f.Files, want)))
		text, err := Text("zip", config.Port, 1, []string{`{"xor": {"passes": 0}}`}, nil, nil, false, config.Limits)
		must(t, err)
		p, err = f.Take(text)
		must(t, err)
		if n := p.Statistics(); n.Now != 1 || n.ToServer.In == 0 {
			t.Errorf("the worker has %+v; want a connection with bytes", n)
		}
		c2, s2 := w.pair(t, l, towards["IPv6"])
		echoes(t, c2, s2)
		must(t, errors.Join(c2.Close(), s2.Close()))
		eventually(t, "one connection is left", func() bool { return p.Statistics().Now == 1 })
	}
	must(t, p.Close())
	select {
	case <-p.Ended():
	default:
		t.Error("the worker was told to end, and did not")
	}
	if _, err := c.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("the connection of a worker that has ended: %v; want a reset", err)
	}
	if _, err := Find(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a worker that has ended is found: %v", err)
	}
}

// A worker ends with its interface, also where nobody is there to end it.
func TestAWorkerEndsWithItsInterface(t *testing.T) { withTables(t, endsWithInterface) }

func endsWithInterface(t *testing.T, w *world) {
	p, name := w.staying(t)
	w.releases(t, p)
	must(t, p.Leave())
	f, err := Find(name)
	must(t, err)
	text, err := Text("zip", port, 1, []string{`{"xor": {"passes": 0}}`}, nil, nil, false, p.Config.Limits)
	must(t, errors.Join(err, closeAll(f.Files)))
	p, err = f.Take(text)
	must(t, err)
	select {
	case <-p.Ended():
		t.Fatal("the worker has ended before its interface")
	default:
	}
	must(t, w.place.DeleteLink("w"))
	select {
	case <-p.Ended():
	case <-time.After(await.Limit(30 * time.Second)):
		t.Error("the worker goes on without its interface")
	}
	must(t, p.Close())
}

// A worker that drains keeps its connections, takes no others, and ends with the last.
func TestAWorkerThatDrainsKeepsItsConnections(t *testing.T) { withTables(t, drains) }

func drains(t *testing.T, w *world) {
	l := w.listen(t, towards["IPv4"])
	p, name := w.staying(t)
	lookup := w.releases(t, p)
	c, s := w.pair(t, l, towards["IPv4"])
	must(t, p.Leave())
	f, err := Find(name)
	must(t, errors.Join(err, closeAll(f.Files)))
	p = f.TakeToDrain("zip", nil)
	must(t, p.Drain())
	if _, err := Find(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a worker that drains is found: %v", err)
	}
	must(t, lookup.SetReadDeadline(time.Now().Add(await.Limit(30*time.Second))))
	if _, err := lookup.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the program that gives it connections: %v; want that the worker has closed it", err)
	}
	echoes(t, c, s)
	eventually(t, "it takes no more connections", func() bool {
		c, err := w.dial(towards["IPv4"])
		if err == nil { // it has until the clients that were answered have come
			must(t, errors.Join(c.SetLinger(0), c.Close()))
			time.Sleep(250 * time.Millisecond)
		}
		return errors.Is(err, unix.ECONNREFUSED)
	})
	select {
	case <-p.Ended():
		t.Fatal("the worker has ended with a connection open")
	default:
	}
	echoes(t, c, s)
	must(t, errors.Join(c.CloseWrite(), s.CloseWrite()))
	if _, err := io.ReadAll(c); err != nil {
		t.Errorf("the connection did not end in order: %v", err)
	}
	select {
	case <-p.Ended():
	case <-time.After(await.Limit(30 * time.Second)):
		t.Error("the worker goes on without a connection")
	}
}

// A worker whose parent does not read fails the asks that do not fit, and waits with none of its locks held.
func TestAParentThatDoesNotReadHoldsNobodyUp(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	s := &speaking{fd: pair[0], waiting: map[uint64]*waitingAsk{}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // who was asked is not waited for
	for range 100_000 {
		if _, err = s.ask(ctx, Ask{}); errors.Is(err, errBusy) {
			break
		}
	}
	if !errors.Is(err, errBusy) || len(s.waiting) != 0 {
		t.Errorf("the last ask: %v, and %d are waited for; want %v", err, len(s.waiting), errBusy)
	}
}

// The packet sockets of a worker get the frames that they are for, also where the worker has bound them to all others: it
// would see what other workers of its place get.
func TestAWorkersPacketSocketsGetNoOtherFrames(t *testing.T) {
	w := once(t)
	l, err := w.place.Link("w")
	must(t, err)
	for _, c := range []struct {
		name     string
		of       func(int) (*os.File, error)
		protocol uint16
	}{
		{"held", HeldSocket, abi.EthPHeld},
		{"link", LinkSocket, unusedProtocol},
	} {
		var f *os.File
		must(t, w.place.NetNS().Do(func() error {
			f, err = c.of(l.Index)
			return err
		}))
		defer f.Close()
		fd := int(f.Fd())
		if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: unix.ETH_P_ALL << 8, Ifindex: l.Index}); err != nil {
			t.Fatal(err) // the kernel lets whoever holds it
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0); err != unix.EPERM {
			t.Errorf("%s: the filter can be taken off: %v", c.name, err)
		}
		port, err := host.OpenFrames(w.node.NetNS(), "n-w", unix.ETH_P_ALL)
		must(t, err)
		defer port.Close()
		for _, protocol := range []uint16{unix.ETH_P_IPV6, unix.ETH_P_IP, unix.ETH_P_ARP, c.protocol} {
			frame := make([]byte, 60)
			copy(frame, []byte{2, 0, 0, 0, 2, 2, 2, 0, 0, 0, 2, 1})
			frame[12], frame[13] = byte(protocol>>8), byte(protocol)
			must(t, port.Send(frame))
		}
		// Frames come in the order in which they were sent.
		got := make([]byte, 100)
		var n int
		eventually(t, "its frame comes", func() bool {
			n, err = unix.Read(fd, got)
			return err == nil
		})
		if at := uint16(got[12])<<8 | uint16(got[13]); at != c.protocol {
			t.Errorf("%s: a frame of %d bytes of protocol %#x came; want %#x alone", c.name, n, at, c.protocol)
		}
		if n, err := unix.Read(fd, got); err != unix.EAGAIN {
			t.Errorf("%s: %d bytes more, %v", c.name, n, err)
		}
	}
}

// A sealed connection that a worker lets in while it drains gets its keys from the parent that has told it to.
func TestAWorkerThatDrainsGetsKeys(t *testing.T) {
	w := newSealedEnds(t)
	text, err := Text("dpi", port, 1, []string{`"count"`}, nil, nil, true, Limits{Connections: 1000, Buffer: 1 << 20, Idle: time.Minute, HalfClosed: time.Minute})
	must(t, err)
	p, name := w.stayingAs(t, text)
	w.releases(t, p)
	must(t, p.Leave())
	f, err := Find(name)
	must(t, errors.Join(err, closeAll(f.Files)))
	w.process = f.TakeToDrain("dpi", w.answer)
	t.Cleanup(func() { w.process.Kill() })
	must(t, w.process.Drain())
	c, _, server := w.pair() // its listener is there for ten more seconds
	echoes(t, c, server)
	if n := w.process.Statistics().Now; n != 1 {
		t.Errorf("it has %d connections; want one", n)
	}
}
