package seal

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
)

func newKey(t testing.TB) (ed25519.PublicKey, ed25519.PrivateKey) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return public, private
}

// newPart gives both ends of a part: who dials, and who accepts.
func newPart(t testing.TB) (dials, accepts *Part) {
	t.Helper()
	pd, kd := newKey(t)
	pa, ka := newKey(t)
	gateway, dpi := Name("r1", "gateway"), Name("r3", "dpi")
	return &Part{Chain: "deep", Path: 7, Name: gateway, Other: dpi, Epochs: []Epoch{{Number: 3, Key: kd, Peer: pa}}},
		&Part{Chain: "deep", Path: 7, Name: dpi, Other: gateway, Epochs: []Epoch{{Number: 3, Key: ka, Peer: pd}}}
}

// queue is one direction of a connection in memory, which takes what is written and never blocks.
// A queue that flips or cuts is the attacker on the way. Where both sides wait for the other, the
// connection ends: nothing more would ever happen.
type queue struct {
	*link
	other   *queue
	bytes   []byte
	seen    []byte // all that was written
	waiting bool
	ended   bool // by a side
	cut     int  // nothing from this byte on arrives, and the connection ends there; -1: all does
	flip    int  // this byte is changed; -1: none
}

// link is what both directions share.
type link struct {
	mu   sync.Mutex
	more *sync.Cond
}

func newQueues() (there, back *queue) {
	l := &link{}
	l.more = sync.NewCond(&l.mu)
	there, back = &queue{link: l, flip: -1, cut: -1}, &queue{link: l, flip: -1, cut: -1}
	there.other, back.other = back, there
	return there, back
}

func (q *queue) write(p []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended {
		return 0, io.ErrClosedPipe
	}
	for _, b := range p {
		at := len(q.seen)
		q.seen = append(q.seen, b)
		if at == q.flip {
			b ^= 0x01
		}
		if q.cut < 0 || at < q.cut {
			q.bytes = append(q.bytes, b)
		}
	}
	q.more.Broadcast()
	return len(p), nil
}

func (q *queue) read(p []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.bytes) == 0 && !q.ended && (q.cut < 0 || len(q.seen) < q.cut) {
		if o := q.other; o.waiting && len(o.bytes) == 0 {
			q.ended, o.ended = true, true
			q.more.Broadcast()
			break
		}
		q.waiting = true
		q.more.Wait()
		q.waiting = false
	}
	if len(q.bytes) == 0 {
		return 0, io.EOF
	}
	n := copy(p, q.bytes)
	q.bytes = q.bytes[n:]
	return n, nil
}

func (q *queue) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended = true
	q.more.Broadcast()
}

// wire is one side of a connection in memory. The end of one side is that of the other.
type wire struct{ in, out *queue }

func (w wire) Read(p []byte) (int, error)  { return w.in.read(p) }
func (w wire) Write(p []byte) (int, error) { return w.out.write(p) }
func (w wire) Close() error {
	w.in.end()
	w.out.end()
	return nil
}
func (w wire) LocalAddr() net.Addr              { return nil }
func (w wire) RemoteAddr() net.Addr             { return nil }
func (w wire) SetDeadline(at time.Time) error   { return w.SetReadDeadline(at) }
func (w wire) SetWriteDeadline(time.Time) error { return nil }
func (w wire) SetReadDeadline(at time.Time) error {
	if !at.IsZero() && at.Before(time.Now()) {
		w.Close()
	}
	return nil
}

func newWires() (dials, accepts wire, there, back *queue) {
	there, back = newQueues()
	return wire{back, there}, wire{there, back}, there, back
}

// session is what becomes of a request and its answer between two ends.
type session struct {
	got, gotBack       []byte
	err, errBack       error // of reading, nil: complete
	dialErr, acceptErr error
	hello              Hello
	resumed            bool // says who accepts
}

// talk sends payload from the end that dials, and back from the other one, over wires.
func talk(t testing.TB, dials, accepts *Part, d, a wire, payload, back []byte) (s session) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), await.Limit(time.Minute))
	defer stop()
	var wait sync.WaitGroup
	wait.Go(func() {
		defer d.Close()
		c, err := dials.Dial(ctx, d, "shop", HTTP1)
		if err != nil {
			s.dialErr = err
			return
		}
		c.Write(payload)
		c.CloseWrite()
		s.gotBack, s.errBack = io.ReadAll(c)
	})
	wait.Go(func() {
		defer a.Close()
		c, h, err := accepts.Accept(ctx, a)
		if err != nil {
			s.acceptErr = err
			return
		}
		s.hello, s.resumed = h, c.ConnectionState().DidResume
		if s.acceptErr = c.Answer(ctx, Answer{}); s.acceptErr != nil {
			return
		}
		s.got, s.err = io.ReadAll(c)
		if s.err == nil {
			c.Write(back)
			c.CloseWrite()
			io.Copy(io.Discard, a) // until the other one has read
		}
	})
	wait.Wait()
	return s
}

func (s session) whole(payload, back []byte) bool {
	return s.dialErr == nil && s.acceptErr == nil && s.err == nil && s.errBack == nil && bytes.Equal(s.got, payload) && bytes.Equal(s.gotBack, back)
}

func write(t *testing.T, name string, b []byte) string {
	t.Helper()
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}
