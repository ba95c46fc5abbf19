// Package logwatch waits for what a tested program says in its log. Tests of the agent
// call it, with and without a kernel.
package logwatch

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
)

// patience is for what must come; nothing waits that long when all is well.
var patience = await.Limit(2 * time.Minute)

// Log is a slog.Handler that tests wait on. It also writes to the test's log.
type Log struct {
	slog.Handler
	t *testing.T

	mu    sync.Mutex
	lines []string
	more  chan struct{}
}

// New returns one whose Wait ends the test if a line never comes.
func New(t *testing.T) *Log {
	return &Log{Handler: slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}), t: t, more: make(chan struct{})}
}

// Handle implements slog.Handler.
func (l *Log) Handle(ctx context.Context, r slog.Record) error {
	l.mu.Lock()
	l.lines = append(l.lines, r.Message)
	close(l.more)
	l.more = make(chan struct{})
	l.mu.Unlock()
	return l.Handler.Handle(ctx, r)
}

// Forget lets Has, Count and Wait look only at lines that come from now on.
func (l *Log) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = nil
}

// Has says whether a line with part in it has come.
func (l *Log) Has(part string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.lines, func(s string) bool { return strings.Contains(s, part) })
}

// Count is how many lines with part in them have come.
func (l *Log) Count(part string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.lines {
		if strings.Contains(s, part) {
			n++
		}
	}
	return n
}

// More is closed when the next line comes.
func (l *Log) More() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.more
}

// Wait returns when a line with part in it has come.
func (l *Log) Wait(part string) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	for {
		more := l.More()
		if l.Has(part) {
			return
		}
		select {
		case <-more:
		case <-ctx.Done():
			l.t.Fatalf("the agent never said %q", part)
		}
	}
}
