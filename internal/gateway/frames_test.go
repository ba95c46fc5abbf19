package gateway

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/waystamp/waystamp/internal/await"
)

// pinged waits for the answer to a PING: all frames before it have been read. It is false if the connection is over.
func (f *frames) pinged(number uint64) bool {
	var data [8]byte
	binary.BigEndian.PutUint64(data[:], number)
	if f.WritePing(false, data) != nil {
		return false
	}
	f.conn.SetReadDeadline(time.Now().Add(await.Limit(20 * time.Second)))
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return false
		}
		switch x := frame.(type) {
		case *http2.PingFrame:
			if x.IsAck() && x.Data == data {
				return true
			}
		case *http2.SettingsFrame:
			if !x.IsAck() {
				f.WriteSettingsAck()
			}
		case *http2.GoAwayFrame:
			if x.ErrCode != http2.ErrCodeNo {
				return false
			}
		}
	}
}

// over waits for the end of the connection.
func (f *frames) over(t *testing.T) {
	t.Helper()
	f.conn.SetReadDeadline(time.Now().Add(await.Limit(20 * time.Second)))
	_, err := io.Copy(io.Discard, f.conn)
	if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() {
		t.Error("the connection goes on")
	}
}

// begun counts the requests that handlers have begun with: each is in the log before it is sent on.
func (w *world) begun() (n int) {
	for _, r := range w.log() {
		if r.Event == EventDecided {
			n++
		}
	}
	return n
}

// limited counts the refusals by a limit that the log has of a session.
func (w *world) limited() (n int) {
	for _, r := range w.log() {
		if r.Event == EventRefused && r.Reason == Limit && r.Session != 0 {
			n++
		}
	}
	return n
}

// Streams that are begun and reset at once (CVE-2023-44487) end their connection, before each of them has cost a request. The client
// waits for each reset to be read, so that there is never more than one stream: no limit of streams at once holds it up.
func TestStreamsThatAreResetAtOnceEndTheirConnection(t *testing.T) {
	const most, tries = 50, 500
	w := newWorld(t, func(_ *world, c *Config) { c.Limits.Resets = most })
	alice, bob := w.staff.client(t, "/eng/alice"), w.staff.client(t, "/eng/bob")
	f := w.frames(t, &alice)
	over := 0
	for i := range tries {
		stream := uint32(2*i + 1)
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, EndStream: true, EndHeaders: true,
			BlockFragment: f.headers(":method", "GET", ":scheme", "https", ":authority", "shop.example.org", ":path", "/files/a")})
		f.WriteRSTStream(stream, http2.ErrCodeCancel)
		if !f.pinged(uint64(i)) {
			over = i + 1
			break
		}
	}
	if over != most+1 {
		t.Errorf("the connection was over with reset %d; want %d", over, most+1)
	}
	f.over(t)
	if n := w.begun(); n > most+1 {
		t.Errorf("%d handlers have begun; want %d at most", n, most+1)
	}
	if n := w.limited(); n != 1 {
		t.Errorf("the log has %d refusals by a limit; want one", n)
	}
	if status, err := w.get(&bob, "/x"); err != nil || status != 200 {
		t.Errorf("another client gets %d, %v; want 200", status, err)
	}
	// As many as the limit allows are no flood, and the connection goes on; in the next minute as many again.
	f = w.frames(t, &alice)
	stream := uint32(1)
	for range 2 {
		for range most {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, EndStream: true, EndHeaders: true,
				BlockFragment: f.headers(":method", "GET", ":scheme", "https", ":authority", "shop.example.org", ":path", "/files/a")})
			f.WriteRSTStream(stream, http2.ErrCodeCancel)
			stream += 2
		}
		if !f.pinged(uint64(stream)) {
			t.Fatalf("%d streams that are reset end the connection", most)
		}
		w.offset.Add(int64(2 * frameWindow))
	}
	f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, EndStream: true, EndHeaders: true,
		BlockFragment: f.headers(":method", "GET", ":scheme", "https", ":authority", "shop.example.org", ":path", "/files/a")})
	if got := f.outcome(stream); got != "200" {
		t.Errorf("a request behind them is answered with %q; want 200", got)
	}
}

// A flood of frames that cost an answer, or move nothing, ends its connection; what the gateway has answered is counted.
func TestFloodsOfControlFramesEndTheirConnection(t *testing.T) {
	const most, tries = 60, 600
	for name, test := range map[string]struct {
		send     func(f *frames, i int)
		answered func(http2.Frame) bool // nil: nothing is
	}{
		"PING": {func(f *frames, i int) { f.WritePing(false, [8]byte{1}) }, func(x http2.Frame) bool {
			p, ok := x.(*http2.PingFrame)
			return ok && p.IsAck()
		}},
		"SETTINGS": {func(f *frames, i int) {
			f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(65535 + i)})
		}, func(x http2.Frame) bool {
			s, ok := x.(*http2.SettingsFrame)
			return ok && s.IsAck()
		}},
		"PRIORITY": {func(f *frames, i int) { f.WritePriority(uint32(2*i+1), http2.PriorityParam{Weight: 1}) }, nil},
		"unknown":  {func(f *frames, i int) { f.WriteRawFrame(0xfa, 0, 0, []byte("x")) }, nil},
		"DATA without a byte": {func(f *frames, i int) {
			if i == 0 {
				f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndHeaders: true,
					BlockFragment: f.headers(":method", "POST", ":scheme", "https", ":authority", "shop.example.org", ":path", "/files/a")})
			}
			f.WriteData(1, false, nil)
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(_ *world, c *Config) { c.Limits.ControlFrames = most })
			alice, bob := w.staff.client(t, "/eng/alice"), w.staff.client(t, "/eng/bob")
			f := w.frames(t, &alice)
			answers := make(chan int)
			go func() {
				n := 0
				f.conn.SetReadDeadline(time.Now().Add(await.Limit(20 * time.Second)))
				for {
					x, err := f.ReadFrame()
					if err != nil {
						answers <- n
						return
					}
					if test.answered != nil && test.answered(x) {
						n++
					}
				}
			}()
			for i := range tries {
				test.send(f, i)
			}
			if n := <-answers; n > most {
				t.Errorf("%d frames were answered; want %d at most", n, most)
			}
			if n := w.limited(); n != 1 {
				t.Errorf("the log has %d refusals by a limit; want one", n)
			}
			if status, err := w.get(&bob, "/x"); err != nil || status != 200 {
				t.Errorf("another client gets %d, %v; want 200", status, err)
			}
		})
	}
}

// Frames are found however they are cut, and none in the payload of another.
func TestFramesAreCountedHoweverTheyAreCut(t *testing.T) {
	var text bytes.Buffer
	text.WriteString(http2.ClientPreface)
	f := http2.NewFramer(&text, nil)
	f.AllowIllegalWrites = true
	reset := []byte{0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8} // RST_STREAM, as payload
	const resets, control = 17, 40
	for range resets {
		f.WriteRSTStream(1, http2.ErrCodeCancel)
		f.WriteData(1, false, bytes.Repeat(reset, 50))
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: reset})
		f.WriteWindowUpdate(0, 1)
		f.WritePing(true, [8]byte{})
		f.WriteData(1, true, nil)
	}
	for range control / 4 {
		f.WritePing(false, [8]byte{})
		f.WriteSettings()
		f.WriteData(1, false, nil)
		f.WriteRawFrame(0xfa, 0, 0, bytes.Repeat(reset, 2000))
	}
	now := time.Now()
	for first := 1; first < 200; first++ { // the length of the first piece
		c := frameCount{resetsMax: resets, controlMax: control}
		next := first
		for b := text.Bytes(); len(b) > 0; {
			n := min(next, len(b))
			next = []int{1, 8, 30, 20000, first}[(next*7+first)%5]
			if err := c.take(b[:n], now); err != nil {
				t.Fatal(err)
			}
			b = b[n:]
		}
		if c.resets != resets || c.control != control {
			t.Fatalf("%d resets and %d frames of control were counted; want %d and %d", c.resets, c.control, resets, control)
		}
	}
}
