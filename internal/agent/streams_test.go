package agent

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/stream"
)

// placedWorker is a worker whose place may lose an interface.
type placedWorker struct {
	streamWorker
	lost   error
	ended  chan struct{}
	closed bool
}

func (w *placedWorker) Ended() <-chan struct{} { return w.ended }
func (w *placedWorker) Whole() error           { return w.lost }
func (w *placedWorker) PID() int               { return 1 }
func (w *placedWorker) Adopted() bool          { return false }
func (w *placedWorker) Statistics() stream.Statistics {
	return stream.Statistics{Room: 9, Rounds: []uint64{1, 1}}
}
func (w *placedWorker) Close() error {
	w.closed = true
	close(w.ended)
	return nil
}

// A function whose interface was made anew gets a new place, as if its worker had ended.
func TestAWorkerIsEndedWithItsFunctionsInterface(t *testing.T) {
	a := &agent{places: fakePlaces{}, streams: streams{by: map[string]*streamFunction{}, wakeUp: make(chan struct{}, 1)}}
	a.cfg.Log = slog.New(slog.DiscardHandler)
	defer a.leaveStreams()
	var started []*placedWorker
	ensure := func() error {
		return a.ensureWorkerLocked("dpi", "x", func() (streamWorker, error) {
			w := &placedWorker{ended: make(chan struct{})}
			started = append(started, w)
			return w, nil
		})
	}
	var said bytes.Buffer
	a.cfg.Log = slog.New(slog.NewTextHandler(&said, nil))
	for range 2 { // a worker that runs in its place stays
		if err := ensure(); err != nil || len(started) != 1 {
			t.Fatalf("%d were started: %v", len(started), err)
		}
	}
	// What its descriptors suffice for is said once, and shown.
	if s := a.streamsOf()["dpi"]; s.Room != 9 || s.Loops != 2 || strings.Count(said.String(), "descriptors for fewer connections") != 1 || !strings.Contains(said.String(), "connections=9") {
		t.Errorf("there is room for %d connections in %d loops, and the log has %q", s.Room, s.Loops, said.String())
	}
	started[0].lost = errors.New("interface dpi-to was made anew")
	if err := ensure(); err == nil || !strings.Contains(err.Error(), "made anew") || !started[0].closed || len(started) != 1 {
		t.Fatalf("%d were started, the first was closed: %t, and the function gets packets: %v", len(started), started[0].closed, err)
	}
	if s := a.streamsOf()["dpi"]; s.Room != 0 || s.Loops != 0 {
		t.Errorf("without a worker there is room for %d connections in %d loops", s.Room, s.Loops)
	}
	f := a.streams.by["dpi"]
	if f.restarts != 1 || time.Until(f.after) <= 0 {
		t.Errorf("%d restarts, and the next in %s; want one, and a pause", f.restarts, time.Until(f.after))
	}
	f.after = time.Time{}
	if err := ensure(); err != nil || len(started) != 2 || started[1].closed {
		t.Errorf("%d were started: %v; want a second one", len(started), err)
	}
}
