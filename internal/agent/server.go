package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/scrape"
)

// socketMode gives the group of the run directory's owner access, too. All data on the socket
// may be read; what changes something is for root and the agent's user (changes).
const socketMode = 0o660

type listener struct{ net.Listener }

// listen replaces a socket that an earlier agent has left, but not one with a listener.
func listen(path string) (*listener, error) {
	if len(path) >= len(unix.RawSockaddrUnix{}.Path) {
		return nil, fmt.Errorf("the path of the agent's socket %s has %d bytes, and a socket takes %d: give a shorter --run-dir", path, len(path), len(unix.RawSockaddrUnix{}.Path)-1)
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return nil, fmt.Errorf("another agent listens at %s: stop it, or give this one another --run-dir", path)
	} else if errors.Is(err, unix.ECONNREFUSED) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove the socket that an agent has left: %w", err)
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen for clients: %w", err)
	}
	if err := os.Chmod(path, socketMode); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for clients: %w", err), l.Close())
	}
	return &listener{l}, nil
}

// answers reports whether a process listens there.
func answers(path string) bool {
	c, err := net.Dial("unix", path)
	if err == nil {
		c.Close()
	}
	return err == nil
}

func (a *agent) serveHTTP(ctx context.Context, l *listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+api.PathStatus, func(w http.ResponseWriter, _ *http.Request) {
		s := a.status.get()
		s.Readers = a.readers.get()
		interfaces, err := a.dp.Interfaces()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		s.Interfaces = wireEach(interfaces, wireInterface)
		refusals, err := a.dp.Refusals()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		s.Recent = a.recent.since(time.Now(), refusals)
		writeJSON(w, s)
	})
	mux.HandleFunc("GET "+api.PathCounters, func(w http.ResponseWriter, _ *http.Request) {
		c, err := a.dp.Counters()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		writeJSON(w, wireCounters(a.status.get().Node, c))
	})
	mux.HandleFunc("GET "+api.PathFunctions, func(w http.ResponseWriter, r *http.Request) {
		f, err := a.dp.FunctionsInFlight()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		functions := wireEach(f, wireFunction)
		rules := a.rulesOf(r.Context(), a.inForce.Load())
		streams := a.streamsOf()
		for i := range functions {
			functions[i].Stream = streams[functions[i].Function]
			functions[i].Rules = rules[functions[i].Function]
		}
		writeJSON(w, api.Functions{Version: api.Version, Node: a.status.get().Node, Functions: functions})
	})
	mux.HandleFunc("GET "+api.PathConnections, func(w http.ResponseWriter, r *http.Request) {
		limit, err := strconv.Atoi(cmp.Or(r.FormValue("limit"), strconv.Itoa(api.ConnectionsMax)))
		if err != nil || limit < 0 || limit > api.ConnectionsMax {
			http.Error(w, fmt.Sprintf("limit is %q; expect 0 to %d", r.FormValue("limit"), api.ConnectionsMax), http.StatusBadRequest)
			return
		}
		answer(w)(a.connectionsOf(r.FormValue("function"), limit))
	})
	a.serveGateway(mux)
	mux.HandleFunc("GET "+api.PathEvents, a.serveEvents)
	mux.HandleFunc("GET "+scrape.Path, scrape.Handler(Metrics, a.metrics))

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { mux.ServeHTTP(&timedWriter{w, a.readers.within}, r) }),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		// Ends the streams of events.
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: withPeer,
		ErrorLog:    slog.NewLogLogger(a.cfg.Log.Handler(), slog.LevelDebug),
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve clients: %w", err)
	case <-ctx.Done():
	}
	cause := context.Cause(ctx)
	grace, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer stop()
	if err := s.Shutdown(grace); err != nil {
		s.Close() // ends the remaining connections
	}
	<-done
	return cause
}

// timedWriter gives a client so long to take each part of an answer: one that does not read must not keep it in memory.
// The time does not count from the request on, as that of http.Server.WriteTimeout does: what asks for the data path waits
// while a plan is put in force, which takes minutes on an emulated machine.
type timedWriter struct {
	http.ResponseWriter
	within time.Duration
}

func (w *timedWriter) Write(b []byte) (int, error) {
	if err := http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(w.within)); err != nil {
		return 0, err
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (w *timedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func writeJSON(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(append(b, '\n'))
}
