package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/test/logwatch"
)

// stage is an agent that has nothing but events and readers of them.
type stage struct {
	*testing.T
	a      *agent
	log    *logwatch.Log
	socket string
	client *Client
	end    func()
}

func newStage(t *testing.T, within time.Duration, most int) *stage {
	t.Helper()
	s := &stage{T: t, log: logwatch.New(t), socket: filepath.Join(t.TempDir(), "agent.sock")}
	s.a = &agent{cfg: Config{Log: slog.New(s.log)}, log: newHistory(), readers: newReaders(), status: newStatusBoard("test"), dp: &dataplane.Dataplane{}}
	s.a.readers.within, s.a.readers.all.Most = within, most
	l, err := listen(s.socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.a.serveHTTP(ctx, l) }()
	s.client = NewClient(s.socket)
	s.end = func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the server ends with %v", err)
		}
		l.Close()
		s.client.Close()
	}
	return s
}

// happen adds an event, as long as real ones are.
func (s *stage) happen(n int) {
	s.a.log.add(event.Event{Reason: "proof", Len: uint32(n), Packet: make([]byte, 512)})
}

// deaf asks for events, and takes none. It returns when the agent has answered.
func (s *stage) deaf() (net.Conn, *bufio.Reader) {
	s.Helper()
	c, err := net.Dial("unix", s.socket)
	if err != nil {
		s.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "GET /v1/events HTTP/1.1\r\nHost: agent\r\n\r\n"); err != nil {
		s.Fatal(err)
	}
	r := bufio.NewReader(c)
	if _, err := r.Peek(1); err != nil {
		s.Fatal(err)
	}
	return c, r
}

// eventually waits for what nothing tells of.
func (s *stage) eventually(f func() string) {
	s.Helper()
	limit := time.After(patience)
	for {
		wrong := f()
		if wrong == "" {
			return
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-limit:
			s.Fatal(wrong)
		}
	}
}

func TestReaderThatTakesNothingIsDroppedAndOthersGetAll(t *testing.T) {
	// The writes to the one that takes all never wait: the time is for the others.
	s := newStage(t, 2*time.Second, readersMost)
	defer s.end()
	conn, rest := s.deaf()
	defer conn.Close()

	// One that would take them, but is busy.
	busy, stuck, free := make(chan error, 1), make(chan struct{}), make(chan struct{})
	go func() {
		slow := NewClient(s.socket)
		defer slow.Close()
		first := true
		busy <- slow.Events(t.Context(), true, func(event.Event) error {
			if first {
				close(stuck)
				<-free
			}
			first = false
			return nil
		})
	}()
	// And one that takes each.
	got, good := make(chan event.Event), make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	go func() {
		good <- s.client.Events(ctx, true, func(e event.Event) error {
			select {
			case got <- e:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	s.eventually(func() string {
		return unless(s.a.readers.get().Now == 3, "%+v; want three readers", s.a.readers.get())
	})
	take := func(n int) {
		t.Helper()
		s.happen(n)
		select {
		case e := <-got:
			if e.Len != uint32(n) || e.Missed != 0 {
				t.Fatalf("event %d came with %d missed, want %d", e.Len, e.Missed, n)
			}
		case err := <-good:
			t.Fatalf("the one that takes all ends with %v", err)
		}
	}
	// More than a socket holds for them.
	const events = 2000
	for n := range events {
		take(n)
	}
	<-stuck
	s.eventually(func() string {
		return unless(s.log.Count("a reader of events was dropped") == 2, "%+v; want two dropped", s.a.readers.get())
	})
	take(events)
	if r := s.a.readers.get(); r.Now != 1 || r.Dropped != 2 || len(r.LastDropped) != 2 {
		t.Errorf("readers %+v", r)
	}
	close(free)
	err := <-busy
	if !errors.Is(err, ErrDropped) || !strings.Contains(err.Error(), "2 readers were dropped") {
		t.Errorf("the busy one ends with %v, want why", err)
	}
	resp, err := http.ReadResponse(rest, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the stream that was not taken ends with %v, want as one that is cut", err)
	}
	cancel()
	<-good
}

func TestOneReaderTooManyIsRefused(t *testing.T) {
	const most = 3
	s := newStage(t, patience, most)
	defer s.end()
	var first net.Conn
	for i := range most {
		c, _ := s.deaf()
		defer c.Close()
		if i == 0 {
			first = c
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for range 2 {
		err := s.client.Events(ctx, true, func(event.Event) error { return nil })
		if err == nil || !strings.Contains(err.Error(), "3 readers of events are connected, the most that an agent serves: end one of them (waystamp watch), and try again") {
			t.Errorf("got %v, want the sentence", err)
		}
	}
	c, r := s.deaf()
	defer c.Close()
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("got %+v, %v, want status 503", resp, err)
	}
	// Its connection is not kept either.
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Error(err)
	}
	if _, err := r.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("behind the answer: %v, want the end", err)
	}
	if r := s.a.readers.get(); r.Now != most || r.Refused != 3 {
		t.Errorf("readers %+v", r)
	}
	s.happen(1)
	first.Close()
	s.eventually(func() string {
		err := s.client.Events(t.Context(), false, func(event.Event) error { return nil })
		return unless(err == nil, "with one gone: %v", err)
	})
}

func TestReadersThatTakeNothingLeaveNothing(t *testing.T) {
	s := newStage(t, 2*time.Second, readersMost)
	defer s.end()
	c, _ := s.deaf() // by now the server is at work
	c.Close()
	s.eventually(func() string { return unless(s.a.readers.get().Now == 0, "the first one is still there") })
	base := runtime.NumGoroutine()
	const many = 400
	var conns []net.Conn
	for range many {
		c, _ := s.deaf()
		defer c.Close()
		conns = append(conns, c)
	}
	if r := s.a.readers.get(); r.Now != readersMost || r.Refused != many-readersMost {
		t.Errorf("readers %+v", r)
	}
	for n := range 2000 {
		s.happen(n)
	}
	s.eventually(func() string {
		return unless(runtime.NumGoroutine() <= base, "%d goroutines, at first %d; readers %+v", runtime.NumGoroutine(), base, s.a.readers.get())
	})
	r := s.a.readers.get()
	if r.Now != 0 || r.Dropped != readersMost || len(r.LastDropped) != readersMost {
		t.Errorf("readers %+v", r)
	}
	// The names that are kept are not more than readers there can be.
	s.a.readers.dropped("one more")
	if r := s.a.readers.get(); len(r.LastDropped) != readersMost || r.LastDropped[readersMost-1] != "one more" {
		t.Errorf("names %q", r.LastDropped)
	}
	runtime.KeepAlive(conns)
}

// One that is slow, but takes some, is told how many it has missed.
func TestSlowReaderIsToldWhatItMissed(t *testing.T) {
	s := newStage(t, patience, readersMost)
	defer s.end()
	const events = 3 * keep
	began := make(chan struct{})
	free := make(chan struct{})
	var taken, missed uint64
	ended := make(chan error, 1)
	enough := errors.New("enough")
	go func() {
		ended <- s.client.Events(t.Context(), true, func(e event.Event) error {
			if taken == 0 {
				close(began)
				<-free
			}
			taken++
			missed += e.Missed
			if e.Len == events {
				return enough
			}
			return nil
		})
	}()
	s.happen(0)
	<-began
	for n := range events {
		s.happen(n + 1)
	}
	close(free)
	if err := <-ended; err != enough {
		t.Fatal(err)
	}
	if taken+missed != events+1 || missed == 0 {
		t.Errorf("%d events came and %d were missed, want %d together, and some missed", taken, missed, events+1)
	}
	status, err := s.client.Status(t.Context())
	if err != nil || status.Readers.Missed != missed {
		t.Errorf("the agent says %+v, %v, want %d missed", status.Readers, err, missed)
	}
}

// A line may be half because the agent has ended, or because it is no event.
func TestHalfALineIsTheEndOnlyOfACutStream(t *testing.T) {
	const half = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ne\r\n{\"reason\":\"pro"
	for name, c := range map[string]struct {
		sent string
		end  bool
	}{
		"cut":   {half, true},
		"whole": {half + "\r\n0\r\n\r\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "agent.sock")
			l, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			served := make(chan struct{})
			go func() {
				defer close(served)
				c1, err := l.Accept()
				if err != nil {
					return
				}
				http.ReadRequest(bufio.NewReader(c1))
				l.Close()
				io.WriteString(c1, c.sent)
				c1.Close()
			}()
			client := NewClient(socket)
			defer client.Close()
			err = client.Events(t.Context(), true, func(event.Event) error { return nil })
			if c.end && err != io.EOF || !c.end && (err == nil || !strings.Contains(err.Error(), "is not an event")) {
				t.Errorf("got %v; the end of the agent: %t", err, c.end)
			}
			<-served
		})
	}
}

func unless(ok bool, format string, args ...any) string {
	if ok {
		return ""
	}
	return fmt.Sprintf(format, args...)
}
