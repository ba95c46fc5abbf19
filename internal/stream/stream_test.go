package stream

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/await"
)

func TestServerSeesTheClientsAddressAndPort(t *testing.T) {
	bothVersions(t, settings{"run": listOf("identity")}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
		before := p.statistics()
		c, s := w.pair(t, l, to)
		if got, want := s.RemoteAddr().String(), c.LocalAddr().String(); got != want {
			t.Errorf("the server sees %s, the client is %s", got, want)
		}
		if got := c.RemoteAddr().String(); got != to.String() {
			t.Errorf("the client sees %s, the server is %s", got, to)
		}
		// Past the worker nothing of this gets there: the node has no route around it.
		if now := p.statistics(); now.Opened != before.Opened+1 || now.Now == 0 {
			t.Errorf("the worker has opened %d connections, %d are open; want one more than %d", now.Opened, now.Now, before.Opened)
		}
	})
}

// step is one thing that one side of a connection does.
type step struct {
	client bool
	what   string // write, drain, end, reset
	n      int    // bytes to write
}

func (s step) String() string {
	side := "server"
	if s.client {
		side = "client"
	}
	if s.what == "write" {
		return fmt.Sprintf("%s writes %d", side, s.n)
	}
	return side + " " + s.what + "s"
}

// half is one direction as the model sees it.
type half struct {
	written int
	sum     [sha256.Size]byte // of all bytes that were written
	ended   bool
}

// pattern fills p with bytes that depend on their place in the stream, and compress
// somewhat.
func pattern(p []byte, from int, client bool) {
	for i := range p {
		at := from + i
		p[i] = byte(at>>8) ^ byte(at*at>>12)
		if client {
			p[i] ^= 0x33
		}
	}
}

// received is what came out at the far end of a direction.
type received struct {
	n     int
	wrong int // place of the first wrong byte; -1: none
	err   error
}

// reader reads a direction to its end, and says how far it has come.
type reader struct {
	mu   sync.Mutex
	more *sync.Cond
	got  received
	end  bool
}

func read(c *net.TCPConn, fromClient bool) *reader {
	r := &reader{got: received{wrong: -1}}
	r.more = sync.NewCond(&r.mu)
	go func() {
		buf, want := make([]byte, 64<<10), make([]byte, 64<<10)
		for {
			n, err := c.Read(buf)
			r.mu.Lock()
			pattern(want[:n], r.got.n, fromClient)
			if !bytes.Equal(buf[:n], want[:n]) && r.got.wrong < 0 {
				for i := range n {
					if buf[i] != want[i] {
						r.got.wrong = r.got.n + i
						break
					}
				}
			}
			r.got.n += n
			if err != nil {
				r.got.err, r.end = err, true
			}
			r.more.Broadcast()
			r.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return r
}

// upTo waits for n bytes, or the end.
func (r *reader) upTo(n int) received {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.got.n < n && !r.end {
		r.more.Wait()
	}
	return r.got
}

func (r *reader) toEnd() received {
	r.mu.Lock()
	defer r.mu.Unlock()
	for !r.end {
		r.more.Wait()
	}
	return r.got
}

func drawSteps(t *rapid.T) []step {
	var steps []step
	n := rapid.IntRange(0, 12).Draw(t, "steps")
	for range n {
		s := step{client: rapid.Bool().Draw(t, "client"), what: rapid.SampledFrom([]string{"write", "write", "write", "drain", "end", "reset"}).Draw(t, "what")}
		if s.what == "write" {
			s.n = rapid.SampledFrom([]int{1, 2, 100, 1000, 5000, 16 << 10, 16<<10 + 1, 100_000, 1 << 20}).Draw(t, "bytes")
		}
		if s.what == "reset" && rapid.IntRange(0, 2).Draw(t, "really") > 0 {
			continue
		}
		steps = append(steps, s)
	}
	return steps
}

// A connection through the worker is the connection that it would be without: bytes,
// their order, ends and the kind of end. Both sides write, pause until all has come,
// end and reset, as drawn; a model says what has to come.
func TestAStreamIsAStream(t *testing.T) {
	for _, run := range []string{"", "identity|count", `xor {"passes": 3}|xor {"passes": 3}`, "gzip|gunzip", `gzip {"level": 9}|seal {"key": 7}|count|open {"key": 7}|gunzip`, `match {"literals": ["not in there"], "bytes": 5000}`} {
		name := run
		if name == "" {
			name = "no function"
		}
		t.Run(name, func(t *testing.T) {
			bothVersions(t, settings{"run": listOf(run), "keys": testKeys, "limits": settings{"buffer": 64 << 10}}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
				rapid.Check(t, func(rt *rapid.T) { playSteps(rt, t, w, l, to, drawSteps(rt)) })
				eventually(t, "the worker has no connection left", func() bool { return p.statistics().Now == 0 })
			})
		})
	}
}

func playSteps(rt *rapid.T, t *testing.T, w *world, l *net.TCPListener, to netip.AddrPort, steps []step) {
	c, err := w.dial(to)
	if err != nil {
		rt.Fatal(err)
	}
	defer c.Close()
	l.SetDeadline(time.Now().Add(await.Limit(30 * time.Second)))
	s, err := l.AcceptTCP()
	if err != nil {
		rt.Fatal(err)
	}
	defer s.Close()
	soon(c)
	soon(s)
	ends := map[bool]*net.TCPConn{true: c, false: s}
	far := map[bool]*reader{true: read(s, true), false: read(c, false)} // of what this side writes
	model := map[bool]*half{true: {}, false: {}}
	reset := false
	for _, st := range steps {
		me, out := ends[st.client], model[st.client]
		if out.ended && st.what != "reset" {
			continue
		}
		switch st.what {
		case "write":
			b := make([]byte, st.n)
			pattern(b, out.written, st.client)
			if _, err := me.Write(b); err != nil {
				rt.Fatalf("%v: %v", st, err)
			}
			out.written += st.n
		case "drain":
			if got := far[st.client].upTo(out.written); got.n != out.written {
				rt.Fatalf("%v: %d bytes came (%v), want %d", st, got.n, got.err, out.written)
			}
		case "end":
			if err := me.CloseWrite(); err != nil {
				rt.Fatalf("%v: %v", st, err)
			}
			out.ended = true
		case "reset":
			// The other side has all bytes by then, so that it sees RST and not the end of an
			// unread stream.
			reset = true
			me.SetLinger(0)
			me.Close()
			got := far[st.client].toEnd()
			if got.wrong >= 0 || got.n > out.written {
				rt.Fatalf("%v: %d of %d bytes came, wrong from %d", st, got.n, out.written, got.wrong)
			}
			switch {
			case out.ended && got.err == io.EOF && got.n == out.written:
				// The end had come before. The reset is seen by writing.
				if !becomesReset(ends[!st.client]) {
					rt.Fatalf("%v: the other side can still write", st)
				}
			case !isReset(got.err):
				rt.Fatalf("%v: the other side saw %v, want a reset", st, got.err)
			}
		}
		if reset {
			return
		}
	}
	for _, fromClient := range []bool{true, false} {
		if !model[fromClient].ended {
			ends[fromClient].CloseWrite()
		}
	}
	for _, fromClient := range []bool{true, false} {
		got, want := far[fromClient].toEnd(), model[fromClient]
		if got.err != io.EOF || got.n != want.written || got.wrong >= 0 {
			rt.Fatalf("from client %v: %d of %d bytes came, wrong from %d, then %v; want all, and the end", fromClient, got.n, want.written, got.wrong, got.err)
		}
	}
}

// becomesReset writes until the connection turns out to be reset.
func becomesReset(c *net.TCPConn) bool {
	for {
		if _, err := c.Write([]byte{0}); err != nil {
			return isReset(err)
		}
		time.Sleep(time.Millisecond) // RST gives no event to a socket that nobody reads
	}
}

var errWrong = errors.New("wrong bytes came")

// A slow reader stops the sender; the worker holds no more than its buffers.
func TestAReaderThatDoesNotReadStopsTheSender(t *testing.T) {
	for _, run := range []string{"identity", "xor"} {
		t.Run(run, func(t *testing.T) {
			bothVersions(t, settings{"run": listOf(run), "back": []any{}}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
				before := p.statistics()
				c, s := w.pair(t, l, to)
				b := make([]byte, 1<<20)
				sent := 0
				c.SetWriteDeadline(time.Now().Add(await.Limit(3 * time.Second)))
				for {
					n, err := c.Write(b)
					sent += n
					if err != nil {
						break
					}
				}
				if sent > 64<<20 {
					t.Fatalf("the sender was not stopped: it sent %d MiB", sent>>20)
				}
				now := p.statistics()
				if held := now.ToServer.In - before.ToServer.In - (now.ToServer.Out - before.ToServer.Out); held > uint64(p.config.Buffer) {
					t.Errorf("the worker holds %d bytes, more than %d", held, p.config.Buffer)
				}
				soon(c)
				must(t, c.CloseWrite())
				got, err := io.Copy(io.Discard, s)
				if err != nil || got != int64(sent) {
					t.Errorf("%d of %d bytes came: %v", got, sent, err)
				}
			})
		})
	}
}

// Urgent data stays where it is in the stream.
func TestUrgentDataStaysInTheStream(t *testing.T) {
	bothVersions(t, settings{"run": listOf("identity")}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
		c, s := w.pair(t, l, to)
		raw, err := c.SyscallConn()
		must(t, err)
		want := bytes.Repeat([]byte("before"), 20_000)
		_, err = c.Write(want)
		must(t, err)
		must(t, raw.Control(func(fd uintptr) { err = unix.Send(int(fd), []byte("!"), unix.MSG_OOB) }))
		must(t, err)
		want = append(want, '!')
		after := bytes.Repeat([]byte("after"), 20_000)
		_, err = c.Write(after)
		must(t, err)
		want = append(want, after...)
		must(t, raw.Control(func(fd uintptr) { err = unix.Send(int(fd), []byte("?"), unix.MSG_OOB) }))
		must(t, err)
		want = append(want, '?')
		// All of it comes, also before anything follows the urgent byte.
		got := make([]byte, len(want))
		_, err = io.ReadFull(s, got)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes came, want %d: %v", len(got), len(want), err)
		}
	})
}

func TestAServerThatRefusesResetsTheClient(t *testing.T) {
	w := once(t)
	p := w.startWorker(t, settings{})
	// Nobody listens.
	if err := w.firstError(towards["IPv6"]); !isReset(err) {
		t.Errorf("the client saw %v, want a reset", err)
	}
	if s := p.statistics(); s.Unreached != 1 || s.Now != 0 {
		t.Errorf("statistics are %+v; want one connection that was not reached, none open", s)
	}
}

// A worker that dies resets; the end of a stream comes only from who sent it.
func TestAKilledWorkerResetsAndEndsNothing(t *testing.T) {
	for _, run := range []string{"identity", "xor|xor"} {
		t.Run(run, func(t *testing.T) {
			w := once(t)
			p := w.startWorker(t, settings{"run": listOf(run)})
			var wait sync.WaitGroup
			defer wait.Wait()
			for _, version := range []string{"IPv4", "IPv6"} {
				l := w.listen(t, towards[version])
				for i := range 20 {
					c, s := w.pair(t, l, towards[version])
					from, to := c, s
					if i%2 == 1 {
						from, to = s, c
					}
					wait.Go(func() {
						b := make([]byte, 64<<10)
						for {
							if _, err := from.Write(b); err != nil {
								if !isReset(err) {
									t.Errorf("the sender saw %v, want a reset", err)
								}
								return
							}
						}
					})
					wait.Go(func() {
						if _, err := io.Copy(io.Discard, to); !isReset(err) {
							t.Errorf("the receiver saw %v (nil is an end), want a reset", err)
						}
					})
				}
			}
			eventually(t, "all connections carry bytes", func() bool {
				s := p.statistics()
				return s.Now == 40 && s.ToServer.Out > 20<<20 && s.ToClient.Out > 20<<20
			})
			must(t, p.cmd.Process.Kill())
			<-p.ended
		})
	}
}

// Clients that write byte by byte, never read, or go away at once do not keep others
// from being served.
func TestHostileClientsDoNotHinderOthers(t *testing.T) {
	bothVersions(t, settings{"run": listOf("xor|xor"), "loops": 1}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
		deaf, flood := w.pair(t, l, to) // never reads what the server sends
		_ = deaf
		var wait sync.WaitGroup
		wait.Go(func() {
			b := make([]byte, 64<<10)
			for {
				if _, err := flood.Write(b); err != nil {
					return
				}
			}
		})
		drip, sink := w.pair(t, l, to)
		inBackground(t, &wait, func() error {
			for i := range 3000 {
				if _, err := drip.Write([]byte{byte(i)}); err != nil {
					return err
				}
			}
			return drip.CloseWrite()
		})
		inBackground(t, &wait, func() error {
			got, err := io.ReadAll(sink)
			if err == nil && len(got) != 3000 {
				err = fmt.Errorf("%d of 3000 single bytes came", len(got))
			}
			for i, b := range got {
				if b != byte(i) {
					return errWrong
				}
			}
			return err
		})
		for range 50 {
			gone, far := w.pair(t, l, to)
			gone.SetLinger(0)
			gone.Close()
			if _, err := far.Read(make([]byte, 1)); !isReset(err) {
				t.Errorf("the server saw %v, want a reset", err)
			}
		}
		c, s := w.pair(t, l, to)
		for i := range 100 {
			b := make([]byte, 1)
			_, err := c.Write([]byte{byte(i)})
			must(t, err)
			_, err = io.ReadFull(s, b)
			must(t, err)
			_, err = s.Write(b)
			must(t, err)
			_, err = io.ReadFull(c, b)
			must(t, err)
			if b[0] != byte(i) {
				t.Fatal(errWrong)
			}
		}
		flood.SetLinger(0)
		flood.Close()
		deaf.Close()
		wait.Wait()
	})
}

func TestLimitsOfConnections(t *testing.T) {
	w := once(t)
	p := w.startWorker(t, settings{"limits": settings{"connections": 3}})
	l := w.listen(t, towards["IPv6"])
	var open []*net.TCPConn
	for range 3 {
		c, _ := w.pair(t, l, towards["IPv6"])
		open = append(open, c)
	}
	if err := w.firstError(towards["IPv6"]); !isReset(err) {
		t.Errorf("one too many saw %v, want a reset", err)
	}
	if n := p.statistics().Refused; n != 1 {
		t.Errorf("%d were refused, want 1", n)
	}
	must(t, errors.Join(open[0].SetLinger(0), open[0].Close()))
	eventually(t, "one has ended", func() bool { return p.statistics().Now < 3 })
	w.pair(t, l, towards["IPv6"]) // there is room again
}

func TestIdleConnectionsAreReset(t *testing.T) {
	w := once(t)
	p := w.startWorker(t, settings{"limits": settings{"idle": "1s", "half-closed": "1s"}})
	l := w.listen(t, towards["IPv6"])
	for range 3 {
		c, _ := w.pair(t, l, towards["IPv6"])
		if _, err := c.Read(make([]byte, 1)); !isReset(err) {
			t.Errorf("an idle client saw %v, want a reset", err)
		}
	}
	if s := p.statistics(); s.ResetByLimit != 3 || s.Now != 0 {
		t.Errorf("statistics are %+v; want three reset by the limit, none open", s)
	}
}

// A worker that has no descriptor left refuses connections, and serves others again when
// some have ended.
func TestAWorkerWithoutDescriptorsRefuses(t *testing.T) {
	w := once(t)
	p := w.startWorker(t, settings{"run": listOf("count"), "loops": 1, "descriptors": 40})
	l := w.listen(t, towards["IPv6"])
	var open []*net.TCPConn
	refused := 0
	for range 40 {
		c, err := w.dial(towards["IPv6"])
		if err == nil {
			soon(c)
			// It is refused by RST, or else the server gets the byte and sends it back.
			if _, err = c.Write([]byte("x")); err == nil {
				err = answered(t, l, c)
			}
		}
		switch {
		case err == nil:
			open = append(open, c)
		case isReset(err):
			refused++
		default:
			t.Fatal(err)
		}
	}
	if len(open) < 10 || refused < 10 {
		t.Fatalf("%d connections were served and %d refused; want ten of each at least", len(open), refused)
	}
	for _, c := range open {
		c.SetLinger(0)
		c.Close()
	}
	eventually(t, "the worker has no connection left", func() bool { return p.statistics().Now == 0 })
	w.pair(t, l, towards["IPv6"])
}

// answered waits for one byte at the client, which the server sends when it gets the
// connection.
func answered(t *testing.T, l *net.TCPListener, c *net.TCPConn) error {
	accepted := make(chan error, 1)
	l.SetDeadline(time.Now().Add(await.Limit(30 * time.Second)))
	go func() {
		s, err := l.AcceptTCP()
		if err == nil {
			t.Cleanup(func() { s.Close() })
			_, err = s.Write([]byte("y"))
		}
		accepted <- err
	}()
	_, err := c.Read(make([]byte, 1))
	if err != nil {
		l.SetDeadline(time.Now()) // nobody comes
	}
	if aerr := <-accepted; err == nil {
		err = aerr
	}
	return err
}
