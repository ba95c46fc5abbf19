// Package scrape serves metrics over HTTP. Which there are is its caller's matter, how they are
// written internal/metrics's.
package scrape

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/waystamp/waystamp/internal/metrics"
)

// Path is where metrics are.
const Path = "/metrics"

// Listen opens a listener at an address that is named: nobody serves on all addresses by leaving it out.
func Listen(address string) (net.Listener, error) {
	if host, _, err := net.SplitHostPort(address); err != nil || host == "" {
		return nil, fmt.Errorf("%q is no address for metrics; expect HOST:PORT, as in [::1]:9464", address)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for readers of metrics on %s: %w", address, err)
	}
	return l, nil
}

// Read is what there is at this moment.
type Read func(context.Context) ([]*metrics.Set, error)

// Handler answers with what read gives.
func Handler(table metrics.Table, read Read) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		sets, err := read(r.Context())
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		var b bytes.Buffer
		if err := metrics.Write(&b, table, sets...); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", metrics.ContentType)
		w.Write(b.Bytes())
	}
}

// Serve answers readers until ctx ends, and closes the listener.
func Serve(ctx context.Context, l net.Listener, table metrics.Table, read Read) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+Path, Handler(table, read))
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: log.New(io.Discard, "", 0),
	}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() { stopped <- server.Close() })
	err := server.Serve(l)
	if stop() { // it ended by itself
		return fmt.Errorf("serve metrics on %s: %w", l.Addr(), errors.Join(err, server.Close()))
	}
	<-stopped
	return context.Cause(ctx)
}
