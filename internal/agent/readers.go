package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/event"
)

const (
	// readersMost is how many read events at a time.
	readersMost = 64
	// readerWithin is how long a reader may take none while some wait for it.
	readerWithin = 30 * time.Second
)

// readerHeader gives a reader of events its name, by which it later finds the reason why its
// stream has ended.
const readerHeader = "Waystamp-Reader"

// pastHeader is the number of a stream's past events.
const pastHeader = "Waystamp-Past"

// readers bounds and counts the readers of events.
type readers struct {
	within time.Duration

	mu  sync.Mutex
	all api.Readers
}

func newReaders() *readers {
	return &readers{within: readerWithin, all: api.Readers{Most: readersMost}}
}

func (r *readers) get() api.Readers {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.all
	out.LastDropped = slices.Clone(out.LastDropped)
	return out
}

// enter reports whether there is room for another reader, which must call leave.
func (r *readers) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all.Now == r.all.Most {
		r.all.Refused++
		return false
	}
	r.all.Now++
	return true
}

func (r *readers) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.Now--
}

func (r *readers) missed(n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.Missed += n
}

func (r *readers) dropped(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.Dropped++
	r.all.LastDropped = append(r.all.LastDropped, name)
	if more := len(r.all.LastDropped) - r.all.Most; more > 0 {
		r.all.LastDropped = slices.Delete(r.all.LastDropped, 0, more)
	}
}

func (a *agent) serveEvents(w http.ResponseWriter, r *http.Request) {
	follow := true
	if v := r.URL.Query().Get("follow"); v != "" {
		var err error
		if follow, err = strconv.ParseBool(v); err != nil {
			http.Error(w, fmt.Sprintf("follow=%q is neither true nor false", v), http.StatusBadRequest)
			return
		}
	}
	if !a.readers.enter() {
		w.Header().Set("Connection", "close")
		http.Error(w, fmt.Sprintf("%d readers of events are connected, the most that an agent serves: end one of them (waystamp watch), and try again", a.readers.get().Most), http.StatusServiceUnavailable)
		return
	}
	defer a.readers.leave()
	name := rand.Text()
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set(readerHeader, name)
	pos, end := a.log.begin()
	w.Header().Set(pastHeader, strconv.FormatUint(end-pos, 10))
	w.WriteHeader(http.StatusOK)
	err := a.streamEvents(r.Context(), w, pos, end, follow)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		a.readers.dropped(name)
		a.cfg.Log.Warn("a reader of events was dropped: it did not read pending events", "for", a.readers.within)
	case err != nil && r.Context().Err() == nil:
		a.cfg.Log.Debug("a reader of events is gone", "err", err)
	}
}

// streamEvents writes events until ctx ends, or until the reader has not read in time: then the
// error is os.ErrDeadlineExceeded.
func (a *agent) streamEvents(ctx context.Context, w http.ResponseWriter, pos, end uint64, follow bool) error {
	out := http.NewResponseController(w)
	inTime := func(write func() error) error {
		if err := out.SetWriteDeadline(time.Now().Add(a.readers.within)); err != nil {
			return err
		}
		if err := write(); err != nil {
			return err
		}
		return out.SetWriteDeadline(time.Time{})
	}
	var line []byte
	return a.log.follow(ctx, pos, end, follow, func(e event.Event) (err error) {
		if e.Missed > 0 {
			a.readers.missed(e.Missed)
		}
		if line, err = event.Append(line[:0], e); err != nil {
			return err
		}
		return inTime(func() error {
			_, err := w.Write(line)
			return err
		})
	}, func() error { return inTime(out.Flush) })
}
