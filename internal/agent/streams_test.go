package agent

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/stream"
	"github.com/waystamp/waystamp/internal/stream/function"
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

// placesOf starts workers and keeps their configurations.
type placesOf struct {
	fakePlaces
	configs [][]byte
}

func (p *placesOf) Start(_ plan.Proxy, config []byte, _ func(stream.Ask) (*stream.Ends, error), _ func(stream.Refusal)) (streamWorker, error) {
	p.configs = append(p.configs, config)
	return &leftWorker{placedWorker{ended: make(chan struct{})}}, nil
}

// leftWorker goes on when it is left.
type leftWorker struct{ placedWorker }

func (w *leftWorker) Leave() error {
	close(w.ended) // for who waits for it
	return nil
}

// A function with seal gets its key from a file of the node, which nobody else may read, and another worker when the key changes. A key
// that cannot be read does not end the worker that is there.
func TestKeysOfFunctionsAreFilesOfTheNode(t *testing.T) {
	var said bytes.Buffer
	places := &placesOf{}
	a := &agent{places: places, streams: streams{by: map[string]*streamFunction{}, wakeUp: make(chan struct{}, 1)}}
	a.cfg.Log = slog.New(slog.NewTextHandler(&said, nil))
	defer a.leaveStreams()
	file := filepath.Join(t.TempDir(), "7.key")
	p := plan.Proxy{Function: "lock", Stream: &plan.Stream{MTU: 1500, Stream: model.Stream{
		Run:         []string{`{"seal": {"key": 7, "file": "` + file + `"}}`},
		Connections: 10, Buffer: 1 << 20, Idle: time.Hour, HalfClosed: time.Hour,
	}}}
	ensure := func(says string) {
		t.Helper()
		err := a.ensureStreamLocked(plan.Node{}, p)
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("the function gets packets: %v; want an error with %q, or none", err, says)
		}
	}
	write := func(text string, mode os.FileMode) {
		t.Helper()
		if err := errors.Join(os.WriteFile(file, []byte(text), mode), os.Chmod(file, mode)); err != nil {
			t.Fatal(err)
		}
	}
	keys := [3]function.Key{{1}, {2}}
	ensure("no such file")
	if s := a.streamsOf()["lock"]; s == nil || !strings.Contains(s.Error, "no such file") {
		t.Errorf("the function says %+v", s)
	}
	write(keys[0].Text(), 0o644)
	ensure("others can read")
	write("c2hvcnQ=", 0o600)
	ensure("a key is 32 bytes in base64")
	if len(places.configs) != 0 {
		t.Fatal("a worker was started without its key")
	}
	write(keys[0].Text()+"\n", 0o600)
	ensure("")
	ensure("")
	write(keys[1].Text(), 0o600)
	ensure("")
	if len(places.configs) != 2 {
		t.Fatalf("%d workers were started; want one for each key", len(places.configs))
	}
	for i, text := range places.configs {
		c, err := stream.ReadConfig(bytes.NewReader(text))
		if err != nil || c.Keys[7] != keys[i] {
			t.Errorf("worker %d has %v, %v", i, c.Keys[7] == keys[i], err)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	ensure("")
	ensure("")
	if n := strings.Count(said.String(), "its worker goes on as it is"); n != 1 || len(places.configs) != 2 {
		t.Errorf("it was said %d times, and %d workers were started; want once, and two:\n%s", n, len(places.configs), said.String())
	}
	for _, k := range keys[:2] {
		if strings.Contains(said.String(), k.Text()) || strings.Contains(a.streams.by["lock"].config, k.Text()) {
			t.Error("a key is in the log, or in what the agent keeps")
		}
	}
}
