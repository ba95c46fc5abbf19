package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Clients of functions on byte streams that do what TCP allows and few do.

// upload sends data on a connection and returns what the server answers with: the same data.
func upload(c net.Conn, data []byte) error {
	c.SetDeadline(time.Now().Add(settleTime))
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(data)
		if err == nil {
			err = c.(interface{ CloseWrite() error }).CloseWrite()
		}
		sent <- err
	}()
	got, err := io.ReadAll(c)
	err = errors.Join(err, <-sent)
	if err == nil && !bytes.Equal(got, data) {
		err = fmt.Errorf("%d bytes came back, and are not the %d that were sent", len(got), len(data))
	}
	return err
}

// echoServer sends back what comes, at a host, until the test ends.
type echoServer struct {
	net.Listener
	mu       sync.Mutex
	accepted []string // addresses of clients
}

func (w *world) echoTCP(at string, multipath bool) *echoServer {
	w.t.Helper()
	s := &echoServer{}
	var config net.ListenConfig
	config.SetMultipathTCP(multipath)
	must(w.t, w.Do(at, func() (err error) {
		s.Listener, err = config.Listen(w.t.Context(), "tcp", net.JoinHostPort(w.addr(at).String(), "0"))
		return err
	}))
	var wait sync.WaitGroup
	wait.Go(func() {
		for {
			c, err := s.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.accepted = append(s.accepted, c.RemoteAddr().String())
			s.mu.Unlock()
			wait.Go(func() {
				c.SetDeadline(time.Now().Add(settleTime))
				io.Copy(c, c)
				c.Close()
			})
		}
	})
	w.t.Cleanup(func() {
		s.Close()
		wait.Wait()
	})
	return s
}

// clients are the addresses of those that were accepted.
func (s *echoServer) clients() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.accepted...)
}

// tcpFrame is a frame with TCP in IPv6.
type tcpFrame []byte

const tcpAt = srv6.EthernetLen + srv6.IPv6Len

func (f tcpFrame) isTCP() bool {
	return len(f) >= tcpAt+20 && binary.BigEndian.Uint16(f[12:]) == srv6.EtherTypeIPv6 && f[srv6.EthernetLen+6] == unix.IPPROTO_TCP
}
func (f tcpFrame) port(at int) uint16 { return binary.BigEndian.Uint16(f[tcpAt+at:]) }
func (f tcpFrame) flags() byte        { return f[tcpAt+13] }
func (f tcpFrame) data() []byte       { return f[tcpAt+int(f[tcpAt+12]>>4)*4:] }

// with is the frame with a part of its data, and a checksum that fits.
func (f tcpFrame) with(from, to int) tcpFrame {
	headers := len(f) - len(f.data())
	out := append(bytes.Clone(f[:headers]), f.data()[from:to]...)
	binary.BigEndian.PutUint16(out[srv6.EthernetLen+4:], uint16(len(out)-tcpAt))
	segment := out[tcpAt:]
	binary.BigEndian.PutUint32(segment[4:], binary.BigEndian.Uint32(segment[4:])+uint32(from))
	segment[16], segment[17] = 0, 0
	src, dst := netip.AddrFrom16([16]byte(out[srv6.EthernetLen+8:])), netip.AddrFrom16([16]byte(out[srv6.EthernetLen+24:]))
	binary.BigEndian.PutUint16(segment[16:], srv6.UpperLayerChecksum(src, dst, unix.IPPROTO_TCP, segment))
	return out
}

// again sends frames of h1's TCP once more, as they come to r1.
type again struct {
	port *host.Frames // of h1

	mu   sync.Mutex
	to   uint16 // the server's port; 0: nothing is sent
	sent map[string]int
	kept []tcpFrame // that have data or FIN
}

func (w *world) sendsAgain() *again {
	w.t.Helper()
	a := &again{port: openPort(w.t, w.ns("h1"), "h1-r1", unix.ETH_P_IPV6), sent: map[string]int{}}
	there := openPort(w.t, w.ns("r1"), "r1-h1", unix.ETH_P_ALL)
	done := make(chan error, 1)
	go func() {
		done <- there.Receive(make([]byte, 1<<16), func(frame []byte) {
			f := tcpFrame(bytes.Clone(frame))
			if !f.isTCP() || f[hopLimitAt] == hopsAgain {
				return
			}
			a.mu.Lock()
			defer a.mu.Unlock()
			if a.to == 0 || f.port(2) != a.to {
				return
			}
			const fin, syn = 1, 2
			n := len(f.data())
			switch {
			case f.flags()&syn != 0:
				a.send("SYN", f)
			case n > 1:
				a.kept = append(a.kept, f)
				// Parts that overlap with it, and with each other.
				a.send("overlapping", f.with(0, n/2+1))
				a.send("overlapping", f.with(n/2, n))
			case f.flags()&fin != 0:
				a.kept = append(a.kept, f)
			}
		})
	}()
	w.t.Cleanup(func() {
		there.Close()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	return a
}

// hopsAgain is the Hop Limit of what is sent again, which is not sent a third time.
const (
	hopLimitAt = srv6.EthernetLen + 7
	hopsAgain  = 63
)

// send is called with a.mu held.
func (a *again) send(what string, f tcpFrame) {
	f = bytes.Clone(f)
	f[hopLimitAt] = hopsAgain
	if a.port.Send(f) == nil {
		a.sent[what]++
	}
}

func TestOddClientsOfStreamFunctions(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "streams.yaml"))
	data := make([]byte, 300_000)
	streamed(data, 0, 0)

	// Multipath TCP (RFC 8684) falls back to TCP at the function; its options do not get further.
	for _, w.ipv4 = range []bool{false, true} {
		s := w.echoTCP("h2", true)
		must(t, w.Do("h1", func() error {
			var d net.Dialer
			d.SetMultipathTCP(true)
			c, err := d.Dial("tcp", s.Addr().String())
			if err != nil {
				return err
			}
			defer c.Close()
			if err := upload(c, data); err != nil {
				return fmt.Errorf("multipath TCP: %w", err)
			}
			if multi, err := c.(*net.TCPConn).MultipathTCP(); err != nil || multi {
				return fmt.Errorf("the connection is one of multipath TCP: %t, %w", multi, err)
			}
			return nil
		}))
	}

	// Data in the SYN, without a cookie (RFC 7413): it is not acknowledged with the SYN, and sent again.
	must(t, w.net("h1").SetSysctl("net/ipv4/tcp_fastopen", "5"))
	for _, w.ipv4 = range []bool{false, true} {
		s := w.echoTCP("h2", false)
		rec := &recorder[bool]{}
		at := 14
		if !w.ipv4 {
			at += 20
		}
		rec.start(w, "r1", "r1-h1", 1<<16, func(f []byte) (bool, bool) {
			tcp := at + 20
			opens := len(f) > tcp+20 && f[tcp+13]&0x12 == 2 && binary.BigEndian.Uint16(f[tcp+2:]) == uint16(s.Addr().(*net.TCPAddr).Port)
			return true, opens && len(f) > tcp+int(f[tcp+12]>>4)*4
		})
		must(t, w.Do("h1", func() error {
			d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
				done := c.Control(func(fd uintptr) {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_FASTOPEN_CONNECT, 1)
				})
				return errors.Join(done, err)
			}}
			c, err := d.Dial("tcp", s.Addr().String())
			if err != nil {
				return err
			}
			defer c.Close()
			if err := upload(c, data); err != nil {
				return fmt.Errorf("data in the SYN: %w", err)
			}
			return nil
		}))
		if len(rec.soFar()) == 0 {
			t.Error("no SYN had data; that the connection works shows nothing")
		}
	}

	// From here on frames are those of one segment each, with their checksums.
	w.ipv4 = false
	for _, o := range []host.Offload{host.TSO, host.GSO, host.TransmitSum} {
		must(t, w.net("h1").SetOffload("h1-r1", o, false))
	}
	a := w.sendsAgain()
	s := w.echoTCP("h2", false)
	to := s.Addr().(*net.TCPAddr).AddrPort()
	from := netip.AddrPortFrom(w.addr("h1"), 45454)
	connect := func() (c net.Conn, err error) {
		err = w.Do("h1", func() error {
			d := net.Dialer{Timeout: settleTime, LocalAddr: net.TCPAddrFromAddrPort(from), Control: func(_, _ string, c syscall.RawConn) (err error) {
				done := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
				return errors.Join(done, err)
			}}
			c, err = d.Dial("tcp", to.String())
			return err
		})
		return c, err
	}

	// The same SYN twice, and segments that overlap with others: one connection, and its bytes once.
	before, err := w.function("r2", "zip")
	must(t, err)
	a.mu.Lock()
	a.to = to.Port()
	a.mu.Unlock()
	c, err := connect()
	must(t, err)
	if err := upload(c, data); err != nil {
		t.Errorf("SYNs and segments that come twice: %v", err)
	}
	c.Close()
	a.mu.Lock()
	a.to = 0
	old := a.kept
	// Of the frames it sees those that a busy machine has time for.
	if a.sent["SYN"] == 0 || a.sent["overlapping"] < 15 {
		t.Errorf("%v were sent again; want SYNs, and 15 that overlap at least", a.sent)
	}
	a.mu.Unlock()
	after, err := w.function("r2", "zip")
	must(t, err)
	// The worker tries to connect once more for a SYN that comes when it has the connection, and cannot.
	if n := after.Stream.Opened - after.Stream.Unreached - before.Stream.Opened + before.Stream.Unreached; n != 1 || strings.Join(s.clients(), " ") != from.String() {
		t.Errorf("zip has opened %d connections, and the server has those from %q; want one from %s", n, s.clients(), from)
	}

	// A new connection of the same ports, and what the last one sent comes once more: data and ends.
	must(t, w.net("h1").SetSysctl("net/ipv4/tcp_tw_reuse", "1"))
	eventually(t, func() error {
		c, err = connect() // not in the first second of the client's own TIME_WAIT
		return err
	})
	half := len(data) / 2
	answer := make([]byte, half)
	_, err = c.Write(data[:half])
	must(t, err)
	must(t, c.SetReadDeadline(time.Now().Add(settleTime)))
	_, err = io.ReadFull(c, answer)
	must(t, err)
	a.mu.Lock()
	for _, f := range old {
		a.send("old", f)
	}
	a.mu.Unlock()
	if len(old) < 8 {
		t.Errorf("%d old segments were sent; want 8 at least", len(old))
	}
	must(t, upload(c, data[half:]))
	c.Close()
	if !bytes.Equal(answer, data[:half]) {
		t.Error("the first half came back as other bytes")
	}
}

// fragments are the two fragments of a packet in a frame with TCP, the second from byte cut of the segment on (a multiple of 8).
func fragments(f []byte, cut int) [][]byte {
	const ip4, ip6 = 20, 40
	ip := f[srv6.EthernetLen:]
	var out [][]byte
	for i, part := range [][2]int{{0, cut}, {cut, -1}} {
		head := bytes.Clone(f[:srv6.EthernetLen])
		if ip[0]>>4 == 4 {
			segment := ip[ip4:]
			if part[1] < 0 {
				part[1] = len(segment)
			}
			h := bytes.Clone(ip[:ip4])
			binary.BigEndian.PutUint16(h[2:], uint16(ip4+part[1]-part[0]))
			offset := uint16(part[0] / 8)
			if i == 0 {
				offset |= 0x2000 // more fragments
			}
			binary.BigEndian.PutUint16(h[6:], offset)
			h[10], h[11] = 0, 0
			sum := uint32(0)
			for j := 0; j < ip4; j += 2 {
				sum += uint32(binary.BigEndian.Uint16(h[j:]))
			}
			sum = sum&0xffff + sum>>16
			binary.BigEndian.PutUint16(h[10:], ^uint16(sum+sum>>16))
			out = append(out, append(append(head, h...), segment[part[0]:part[1]]...))
			continue
		}
		segment := ip[ip6:]
		if part[1] < 0 {
			part[1] = len(segment)
		}
		h := bytes.Clone(ip[:ip6])
		binary.BigEndian.PutUint16(h[4:], uint16(8+part[1]-part[0]))
		h[6] = unix.IPPROTO_FRAGMENT
		more := uint16(part[0])
		if i == 0 {
			more |= 1
		}
		x := binary.BigEndian.AppendUint16([]byte{unix.IPPROTO_TCP, 0}, more) // RFC 8200 section 4.5
		x = append(x, 0, 0, 0, 7)
		out = append(out, append(append(append(head, h...), x...), segment[part[0]:part[1]]...))
	}
	return out
}

// Segments of an open connection come once more, in fragments: a function on byte streams gets none of them, and each is refused for that;
// the connection goes on.
func TestFragmentsOfSegmentsAreRefused(t *testing.T) {
	t.Parallel()
	w := borrow(t, example(t, "streams.yaml"))
	for _, w.ipv4 = range []bool{false, true} {
		protocol := uint16(unix.ETH_P_IPV6)
		at := srv6.EthernetLen + 40
		if w.ipv4 {
			protocol, at = unix.ETH_P_IP, srv6.EthernetLen+20
		}
		s := w.echoTCP("h2", false)
		to := uint16(s.Addr().(*net.TCPAddr).Port)
		rec := &recorder[[]byte]{}
		rec.start(w, "r1", "r1-h1", 1<<16, func(f []byte) ([]byte, bool) {
			return bytes.Clone(f), len(f) >= at+20 && len(f) < 600 && binary.BigEndian.Uint16(f[12:]) == protocol &&
				binary.BigEndian.Uint16(f[at+2:]) == to && len(f) > at+int(f[at+12]>>4)*4
		})
		var c net.Conn
		must(t, w.Do("h1", func() (err error) {
			c, err = net.DialTimeout("tcp", s.Addr().String(), settleTime)
			return err
		}))
		defer c.Close()
		must(t, c.SetDeadline(time.Now().Add(settleTime)))
		text := bytes.Repeat([]byte("a piece of text "), 20)
		_, err := c.Write(text)
		must(t, err)
		_, err = io.ReadFull(c, make([]byte, len(text)))
		must(t, err)
		var seen [][]byte
		eventually(t, func() error {
			if seen = rec.soFar(); len(seen) == 0 {
				return errors.New("no segment with data came by")
			}
			return nil
		})
		port := openPort(t, w.ns("h1"), "h1-r1", protocol)
		for _, f := range fragments(seen[0], 64) {
			must(t, port.Send(f))
		}
		w.refused("r2", "stream-not-tcp", 2)
		if err := upload(c, text); err != nil {
			t.Errorf("the connection behind its fragments: %v", err)
		}
	}
}
