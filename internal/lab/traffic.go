package lab

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

// PingConfig says how Ping pings. Its zero value is one request that is waited
// for a second (await.Limit).
type PingConfig struct {
	Source   netip.Addr    // zero: the namespace's choice
	Count    int           // requests; 0: 1
	Interval time.Duration // between requests; 0: all at once
	Timeout  time.Duration // for answers after the last request; 0: a second
	Size     int           // bytes of payload
}

// PingResult is what Ping saw.
type PingResult struct {
	Sent     int
	Received int             // answers, each request's counted once
	RTTs     []time.Duration // of the answers, in the order of their arrival
}

// echo is what the versions of ICMP differ in (RFC 792, RFC 4443 section 4.1).
type echo struct {
	network, any   string
	request, reply icmp.Type
}

var (
	echo4 = echo{"ip4:icmp", "0.0.0.0", ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply}
	echo6 = echo{"ip6:ipv6-icmp", "::", ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply}
)

// filter lets the socket take answers only.
func (e echo) filter(conn *icmp.PacketConn) error {
	if e == echo4 {
		var only ipv4.ICMPFilter
		only.SetAll(true)
		only.Accept(ipv4.ICMPTypeEchoReply)
		return conn.IPv4PacketConn().SetICMPFilter(&only)
	}
	var only ipv6.ICMPFilter
	only.SetAll(true)
	only.Accept(ipv6.ICMPTypeEchoReply)
	return conn.IPv6PacketConn().SetICMPFilter(&only)
}

// Ping sends echo requests from inside a namespace, by the version of ICMP that
// the address is for, and returns when all are answered or the time is over. No answer is no error;
// a request that could not be sent is one.
func Ping(ctx context.Context, ns *host.NetNS, dst netip.Addr, c PingConfig) (r PingResult, err error) {
	if c.Count == 0 {
		c.Count = 1
	}
	if c.Timeout == 0 {
		c.Timeout = await.Limit(time.Second)
	}
	if c.Count < 1 || c.Count > math.MaxUint16 {
		return r, fmt.Errorf("ping %s: %d requests are not 1 to %d", dst, c.Count, math.MaxUint16)
	}
	kind := echo6
	if dst.Is4() {
		kind = echo4
	}
	source := kind.any
	if c.Source.IsValid() {
		source = c.Source.String()
	}
	var conn *icmp.PacketConn
	err = ns.Do(func() error {
		var err error
		conn, err = icmp.ListenPacket(kind.network, source)
		return err
	})
	if err != nil {
		return r, fmt.Errorf("ping %s from %s: %w", dst, ns, err)
	}
	defer conn.Close()
	if err := kind.filter(conn); err != nil {
		return r, fmt.Errorf("ping %s from %s: %w", dst, ns, err)
	}
	var id [2]byte
	rand.Read(id[:])
	p := &pinger{conn: conn, echo: kind, dst: dst, id: int(binary.BigEndian.Uint16(id[:])), sent: make([]time.Time, c.Count)}

	asked := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	received := make(chan error, 1)
	go func() { received <- p.receive() }()

	sendErr := p.send(ctx, c)
	if sendErr != nil {
		cancel()
	}
	last := time.AfterFunc(c.Timeout, cancel)
	defer last.Stop()
	recvErr := <-received
	r = PingResult{Sent: p.number, Received: len(p.rtts), RTTs: p.rtts}
	if sendErr == nil && r.Received < c.Count {
		sendErr = context.Cause(asked) // the caller's end, not the timeout's
	}
	if err := errors.Join(sendErr, recvErr); err != nil {
		return r, fmt.Errorf("ping %s from %s: %w", dst, ns, err)
	}
	return r, nil
}

type pinger struct {
	conn *icmp.PacketConn
	echo echo
	dst  netip.Addr
	id   int

	mu     sync.Mutex
	sent   []time.Time // by sequence number; zero: not sent, or answered
	number int
	rtts   []time.Duration
}

func (p *pinger) send(ctx context.Context, c PingConfig) error {
	payload := make([]byte, c.Size)
	to := &net.IPAddr{IP: p.dst.AsSlice(), Zone: p.dst.Zone()}
	for seq := range c.Count {
		if seq > 0 && c.Interval > 0 {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(c.Interval):
			}
		}
		b, err := (&icmp.Message{
			Type: p.echo.request,
			Body: &icmp.Echo{ID: p.id, Seq: seq, Data: payload},
		}).Marshal(nil) // the kernel computes the checksum of ICMPv6
		if err != nil {
			return err
		}
		p.mu.Lock()
		p.sent[seq] = time.Now()
		p.number++
		p.mu.Unlock()
		if _, err := p.conn.WriteTo(b, to); err != nil {
			return err
		}
	}
	return nil
}

// receive takes answers until there is one to every request or the deadline
// passes.
func (p *pinger) receive() error {
	buf := make([]byte, math.MaxUint16)
	for {
		n, from, err := p.conn.ReadFrom(buf)
		if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
			return nil
		}
		if err != nil {
			return err
		}
		if a, ok := from.(*net.IPAddr); !ok || !a.IP.Equal(p.dst.AsSlice()) {
			continue
		}
		m, err := icmp.ParseMessage(p.echo.reply.Protocol(), buf[:n])
		if err != nil {
			continue // not an answer to us
		}
		echo, ok := m.Body.(*icmp.Echo)
		if !ok || m.Type != p.echo.reply || echo.ID != p.id {
			continue
		}
		if p.answered(echo.Seq, time.Now()) {
			return nil
		}
	}
}

// answered enters an answer and tells whether it was the last one.
func (p *pinger) answered(seq int, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if seq >= len(p.sent) || p.sent[seq].IsZero() {
		return false
	}
	p.rtts = append(p.rtts, now.Sub(p.sent[seq]))
	p.sent[seq] = time.Time{}
	return len(p.rtts) == len(p.sent)
}

// Content is a number of bytes that look random and follow from a seed alone:
// the key stream of AES-128 in counter mode. Nothing repeats, so that no two
// packets are alike and none compresses.
type Content struct {
	Seed uint64
	Size int64 // bytes
}

// Reader returns the content from its beginning.
func (c Content) Reader() io.Reader {
	var key, iv [16]byte
	binary.BigEndian.PutUint64(key[:], c.Seed)
	block, err := aes.NewCipher(key[:])
	if err != nil {
		panic(err) // 16 bytes are a key
	}
	return io.LimitReader(keyStream{cipher.NewCTR(block, iv[:])}, c.Size)
}

// SHA256 returns the checksum of the content.
func (c Content) SHA256() (sum [sha256.Size]byte) {
	h := sha256.New()
	io.Copy(h, c.Reader()) // neither side fails
	h.Sum(sum[:0])
	return sum
}

type keyStream struct{ s cipher.Stream }

func (k keyStream) Read(b []byte) (int, error) {
	clear(b)
	k.s.XORKeyStream(b, b)
	return len(b), nil
}

// Server is an HTTP server inside a namespace.
type Server struct {
	addr netip.AddrPort
	http *http.Server
	done chan struct{}
}

// Serve answers every GET inside a namespace with the content. With port 0 the
// kernel chooses one; see Addr. The caller closes it.
func Serve(ns *host.NetNS, addr netip.AddrPort, c Content) (*Server, error) {
	var l net.Listener
	err := ns.Do(func() error {
		var err error
		var lc net.ListenConfig
		lc.SetMultipathTCP(false) // what is measured is TCP
		l, err = lc.Listen(context.Background(), "tcp", addr.String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("serve HTTP in %s: %w", ns, err)
	}
	s := &Server{
		addr: l.Addr().(*net.TCPAddr).AddrPort(),
		done: make(chan struct{}),
		http: &http.Server{
			ErrorLog:          log.New(io.Discard, "", 0), // clients that go away are the test's matter
			ReadHeaderTimeout: await.Limit(time.Minute),
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method != http.MethodGet {
					w.WriteHeader(http.StatusMethodNotAllowed)
					return
				}
				w.Header().Set("Content-Type", "application/octet-stream")
				w.Header().Set("Content-Length", strconv.FormatInt(c.Size, 10))
				io.Copy(w, c.Reader()) // what the client lacks it will notice
			}),
		},
	}
	go func() {
		defer close(s.done)
		s.http.Serve(l) // until Close
	}()
	return s, nil
}

// Addr returns where the server listens.
func (s *Server) Addr() netip.AddrPort { return s.addr }

// Close ends the server and all its connections.
func (s *Server) Close() error {
	err := s.http.Close()
	<-s.done
	return err
}

// Transfer is what Download saw.
type Transfer struct {
	Bytes    int64
	Duration time.Duration
	SHA256   [sha256.Size]byte
}

// Download gets the content from a Server, from inside a namespace, over a TCP
// connection of its own. It is an error if a single byte differs.
func Download(ctx context.Context, ns *host.NetNS, from netip.AddrPort, want Content) (t Transfer, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("download from %s in %s: %w", from, ns, err)
		}
	}()
	transport := &http.Transport{
		DisableKeepAlives:  true,
		DisableCompression: true,
		DialContext: func(ctx context.Context, network, _ string) (conn net.Conn, err error) {
			err = ns.Do(func() error {
				// A literal address: no resolver runs, and no other goroutine dials.
				conn, err = new(net.Dialer).DialContext(ctx, network, from.String())
				return err
			})
			return conn, err
		},
	}
	defer transport.CloseIdleConnections()
	start := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+from.String()+"/", nil)
	if err != nil {
		return t, err
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return t, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return t, fmt.Errorf("the server says %s", resp.Status)
	}
	sum := sha256.New()
	t.Bytes, err = io.Copy(sum, resp.Body)
	t.Duration = time.Since(start)
	sum.Sum(t.SHA256[:0])
	if err != nil {
		return t, fmt.Errorf("after %d of %d bytes: %w", t.Bytes, want.Size, err)
	}
	if t.Bytes != want.Size {
		return t, fmt.Errorf("got %d bytes, want %d", t.Bytes, want.Size)
	}
	if expected := want.SHA256(); t.SHA256 != expected {
		return t, fmt.Errorf("got SHA-256 %s, want %s", hex.EncodeToString(t.SHA256[:]), hex.EncodeToString(expected[:]))
	}
	return t, nil
}
