package stream

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

// heldWorker is a worker of some loops in this process, to which the test gives SYNs as a node does. Its
// configuration is that of "hold", and its listeners are in ns at this port; nil: in the test's namespace, at a free one.
func heldWorker(t *testing.T, ns *host.NetNS, port uint16, loops int) (w *Worker, memory *host.SharedWords, node int) {
	t.Helper()
	memory, err := NewStatistics()
	must(t, err)
	t.Cleanup(func() { must(t, memory.Close()) })
	// Both keep the bounds of messages, and neither has a connection.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { unix.Close(fds[0]) })
	// Room for all that a test has under way: what does not fit is not sent.
	for _, fd := range fds {
		must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4<<20))
	}
	must(t, unix.SetsockoptTimeval(fds[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(await.Limit(30 * time.Second).Seconds())}))
	c := &Config{Name: "test", Port: port, Loops: loops, Hold: &Hold{}, Limits: Limits{Connections: 10_000, Buffer: BufferMin, Idle: time.Hour, HalfClosed: time.Hour}}
	make := func() error {
		w, err = New(c, memory, os.NewFile(uintptr(fds[1]), "held"))
		return err
	}
	if ns != nil {
		must(t, ns.Do(make))
	} else {
		must(t, make())
	}
	return w, memory, fds[0]
}

func closes(t *testing.T, w *Worker) { t.Cleanup(func() { must(t, w.Close()) }) }

// A connection that a client has after its SYN has waited is accepted by the loop that has the SYN: the kernel's
// program says the same as place, for both versions of IP, with options and without.
func TestTheKernelSpreadsConnectionsAsLoopsDo(t *testing.T) {
	const loops = 5
	ns, err := host.Anonymous()
	must(t, err)
	n, err := host.Open(ns)
	must(t, err)
	t.Cleanup(func() { must(t, errors.Join(n.Close(), ns.Close())) })
	must(t, n.SetUp("lo"))
	must(t, n.AddAddress("lo", netip.PrefixFrom(server6, 128)))
	eventually(t, "the kernel has a route to the address", func() bool {
		return ns.Do(func() error {
			c, err := net.Dial("udp", netip.AddrPortFrom(server6, port).String())
			if err == nil {
				c.Close()
			}
			return err
		}) == nil
	})
	w, _, _ := heldWorker(t, ns, port, loops)
	closes(t, w)
	for _, c := range []struct {
		name    string
		server  netip.Addr
		options []byte
	}{
		{"IPv4", netip.MustParseAddr("127.1.2.3"), nil},
		{"IPv4 with options", netip.MustParseAddr("127.1.2.4"), []byte{1, 1, 1, 0}},
		{"IPv6", server6, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var by [loops]int
			for range 200 {
				d := net.Dialer{Control: func(_, _ string, conn syscall.RawConn) (err error) {
					if c.options == nil {
						return nil
					}
					cerr := conn.Control(func(fd uintptr) {
						err = unix.SetsockoptString(int(fd), unix.IPPROTO_IP, unix.IP_OPTIONS, string(c.options))
					})
					return errors.Join(err, cerr)
				}}
				d.SetMultipathTCP(false)
				var client net.Conn
				must(t, ns.Do(func() (err error) {
					client, err = d.DialContext(t.Context(), "tcp", netip.AddrPortFrom(c.server, port).String())
					return err
				}))
				// It is at one listener when the client has its answer's answer; which one is told by asking all.
				var at = -1
				eventually(t, "a listener has the connection", func() bool {
					for i, l := range w.loops {
						for _, fd := range l.listeners {
							if got, from, err := unix.Accept4(fd, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK); err == nil {
								unix.Close(got)
								at = i
								if from := addrPort(from); from.String() != client.LocalAddr().String() {
									t.Fatalf("%s came; want %s", from, client.LocalAddr())
								}
							}
						}
					}
					return at >= 0
				})
				of := ends{client.LocalAddr().(*net.TCPAddr).AddrPort(), netip.AddrPortFrom(c.server, port)}
				if want := of.place(loops); at != want {
					t.Fatalf("listener %d has the connection of %s; want %d", at, of.client, want)
				}
				by[at]++
				client.Close()
			}
			for i, n := range by {
				if n == 0 {
					t.Errorf("no connection of 200 is loop %d's: %v", i, by)
				}
			}
		})
	}
}

// synOf is the frame of a SYN.
func synOf(t *testing.T, client, server netip.AddrPort) []byte {
	t.Helper()
	b, err := hex.DecodeString(refusals[1].syn)
	must(t, err)
	s, ok := readSegment(b)
	if !ok {
		t.Fatal("it is no segment")
	}
	copy(s.ip[ip4Source:], client.Addr().AsSlice())
	copy(s.ip[ip4Destination:], server.Addr().AsSlice())
	binary.BigEndian.PutUint16(s.tcp, client.Port())
	binary.BigEndian.PutUint16(s.tcp[2:], server.Port())
	s.check()
	return b
}

// The first loop reads SYNs, and each is opened by the loop of its ends, once, also when it comes again. What a
// loop's listener got that is another loop's goes there.
func TestSYNsGoToTheirLoops(t *testing.T) {
	const loops, clients = 4, 200
	w, memory, node := heldWorker(t, nil, 0, loops)
	ctx, stop := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- w.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		must(t, <-ran)
	})
	// One server refuses, one answers.
	answers, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { answers.Close() })
	// Bound, so that it is nobody else's, and not listening.
	refuses, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { unix.Close(refuses) })
	must(t, unix.Bind(refuses, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	bound, err := unix.Getsockname(refuses)
	must(t, err)
	refusing, answering := addrPort(bound), answers.Addr().(*net.TCPAddr).AddrPort()
	var want [loops]uint64
	var wait sync.WaitGroup
	inBackground(t, &wait, func() error {
		b := make([]byte, heldMax)
		opened, refused := map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}
		for len(opened) < clients/2 || len(refused) < clients/2 {
			n, err := unix.Read(node, b)
			if err == unix.EINTR {
				continue
			}
			if err != nil || n == 0 {
				return fmt.Errorf("%d were let in, %d refused; want %d each: %w", len(opened), len(refused), clients/2, errors.Join(err, io.EOF))
			}
			s, ok := readSegment(b[:n])
			switch {
			case !ok:
				return fmt.Errorf("the worker sent %x", b[:n])
			case s.opens():
				opened[s.client] = true
			default:
				refused[s.server] = true
			}
		}
		return nil
	})
	for i := range clients {
		client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 1, byte(i)}), uint16(20000+i))
		server := answering
		times := 2 // the second is let in as well, and opens nothing
		if i%2 == 1 {
			server, times = refusing, 1
		}
		frame := synOf(t, client, server)
		for range times {
			_, err := unix.Write(node, frame)
			must(t, err)
		}
		want[ends{client, server}.place(loops)]++
	}
	wait.Wait()
	all := 0
	for i, n := range want {
		got := loopWords(memory, i)[wordOpened].Load()
		all += int(got)
		if got != n || n == 0 {
			t.Errorf("loop %d opened %d; want %d, and some", i, got, n)
		}
	}
	s := ReadStatistics(memory, w.config)
	if all != clients || s.Opened != clients || s.Unreached != clients/2 || s.Now != clients/2 || len(s.Rounds) != loops {
		t.Errorf("the loops opened %d, and the statistics are %+v; want %d opened, half of them unreached, half open, by %d loops", all, s, clients, loops)
	}
	// No SYN has waited of one that a loop is handed: it closes it.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fds[0])
	w.loops[3].handAccepted(accepted{fds[1], ends{answering, answering}})
	if n, err := unix.Read(fds[0], make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("%d bytes, %v; want that it is closed", n, err)
	}
}

// A client whose SYN finds the worker without a descriptor is refused, and not left without an answer.
func TestASYNWithoutDescriptorsIsRefused(t *testing.T) {
	w, memory, node := heldWorker(t, nil, 0, 1)
	closes(t, w)
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	client, server := netip.MustParseAddrPort("127.0.1.1:20000"), netip.MustParseAddrPort("127.0.0.1:9")
	frame := synOf(t, client, server)
	s, ok := readSegment(frame)
	if !ok {
		t.Fatal("it is no segment")
	}
	none := limit
	none.Cur = 0
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &none))
	w.loops[0].takeSYN(s, frame, false)
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	b := make([]byte, heldMax)
	must(t, unix.SetNonblock(node, true)) // what it sends is there
	n, err := unix.Read(node, b)
	must(t, err)
	if s, ok := readSegment(b[:n]); !ok || s.opens() || s.client != server || s.server != client {
		t.Errorf("the worker sends %x; want a RST from %s to %s", b[:n], server, client)
	}
	if n := ReadStatistics(memory, w.config).Now; n != 0 || w.connections.Load() != 0 {
		t.Errorf("%d connections are open, %d are counted; want none", n, w.connections.Load())
	}
}

// Loops share the number of connections, and the rate of all together.
func TestLimitsHoldOverLoops(t *testing.T) {
	const rate, count, each = 2_000_000, 12, 200_000
	w := once(t)
	p := w.startWorker(t, settings{"loops": 4, "run": listOf(fmt.Sprintf(`limit {"all": %d}`, rate)), "limits": settings{"connections": count}})
	to := towards["IPv6"]
	l := w.listen(t, to)
	var wait sync.WaitGroup
	begin := time.Now()
	for range count {
		c, s := w.pair(t, l, to)
		inBackground(t, &wait, func() error {
			_, err := c.Write(make([]byte, each))
			return errors.Join(err, c.CloseWrite())
		})
		inBackground(t, &wait, func() error {
			n, err := io.Copy(io.Discard, s)
			if err == nil && n != each {
				err = fmt.Errorf("%d bytes came; want %d", n, each)
			}
			return err
		})
	}
	var by []uint64
	for i := range 4 {
		by = append(by, loopWords(p.memory, i)[wordOpened].Load())
	}
	several := 0
	for _, n := range by {
		if n > 0 {
			several++
		}
	}
	if several < 2 {
		t.Errorf("the loops opened %v; want that several did", by)
	}
	if err := w.firstError(to); !isReset(err) {
		t.Errorf("one connection too many: %v; want a reset", err)
	}
	wait.Wait()
	// A tenth of a second's may go at once.
	if most := rate/10 + time.Since(begin).Seconds()*rate; count*each > most {
		t.Errorf("%d bytes went through; at most %.0f may in that time", count*each, most)
	}
	s := p.statistics()
	if s.Opened != count || s.Refused != 1 || s.ToServer.In != count*each || s.ToServer.Out != count*each || len(s.Rounds) != 4 {
		t.Errorf("statistics are %+v; want %d opened, one refused, and %d bytes", s, count, count*each)
	}
}
