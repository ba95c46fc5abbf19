// Package stream has the worker of a function of kind stream: the process that ends
// clients' TCP connections, opens others to their servers in the clients' own names, and
// moves the bytes between them through functions (internal/stream/function). It makes the
// worker's place, a network namespace in which that takes no privilege, and confines the
// process (internal/stream/sandbox). It decides nothing about which packets get there, and
// knows neither chains nor proofs. The hidden command "waystamp worker" calls it.
package stream

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// Worker serves connections with one event loop per thread.
type Worker struct {
	config      *Config
	loops       []*loop
	start       time.Time
	held        int          // a HeldSocket, which all loops write to; -1: there is none
	connections atomic.Int64 // open, in all loops
	stopping    atomic.Bool
	listening   int            // the first so many loops listen
	apart       bool           // loops have descriptors of their own
	each        int64          // connections that each of these takes before others have their turn
	hands       []int          // sockets by which loops that listen hand connections to each of them
	known       *known         // of all these
	draining    atomic.Bool    // no more connections are taken
	drained     sync.WaitGroup // of loops that are to begin so
	batches     batchBudget    // of sealed connections
	refused     *refusalQueue  // nil: there is no parent
	// ask asks by which keys a connection is sealed; nil: there is nobody to ask.
	ask func(context.Context, Ask) (*Ends, error)
	// plain: sealed connections go in plain through a function that knows nothing of it; nil: they
	// go through run and back.
	plain *plain
}

// New makes a worker that listens and does not accept yet. Its statistics go to memory
// of NewStatistics, which must stay mapped until Run has returned. held is a HeldSocket if
// config.Hold is set, which the worker takes over; else nil.
func New(config *Config, memory *host.SharedWords, held *os.File) (_ *Worker, err error) {
	if len(memory.Words) < config.Loops*wordsOfLoop {
		return nil, fmt.Errorf("the memory for statistics has %d words; %d loops need %d", len(memory.Words), config.Loops, config.Loops*wordsOfLoop)
	}
	if (config.Hold != nil) != (held != nil) {
		return nil, fmt.Errorf("worker of function %s: SYNs wait where there is a socket for them, and nowhere else", config.Name)
	}
	w := &Worker{config: config, start: time.Now(), held: -1}
	w.batches.left.Store(batchesMost(config.Memory))
	for i := range config.Loops {
		l, err := newLoop(w, loopWords(memory, i), true)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("worker of function %s: %w", config.Name, err), w.Close())
		}
		w.loops = append(w.loops, l)
	}
	w.listening = len(w.loops)
	if held != nil {
		if err := errors.Join(w.hold(held), w.spread()); err != nil {
			return nil, errors.Join(fmt.Errorf("worker of function %s: %w", config.Name, err), w.Close())
		}
	}
	loopWords(memory, 0)[wordLoops].Store(uint64(config.Loops))
	return w, nil
}

// Run serves until the context ends. Connections that are open then are reset.
func (w *Worker) Run(ctx context.Context) error {
	stopped := make(chan struct{})
	unless := context.AfterFunc(ctx, func() {
		w.stop()
		close(stopped)
	})
	errs := make([]error, len(w.loops))
	var wait, accepting sync.WaitGroup
	if w.plain != nil {
		for _, l := range w.plain.listeners {
			accepting.Go(func() { w.plain.accept(l) })
		}
	}
	for i, l := range w.loops {
		wait.Go(func() {
			if l.do(func() { errs[i] = l.run() }); errs[i] != nil {
				errs[i] = fmt.Errorf("event loop %d of function %s: %w", i, w.config.Name, errs[i])
				w.stop() // the others' listeners get no connections of this one's
			}
		})
	}
	wait.Wait()
	if !unless() {
		<-stopped // before the descriptors that it writes to are closed
	}
	errs = append(errs, w.Close())
	accepting.Wait()
	return errors.Join(errs...)
}

func (w *Worker) stop() {
	w.stopping.Store(true)
	for _, l := range w.loops {
		l.wakeUp()
	}
}

// Close resets all connections and gives up all descriptors. It must not be called
// while Run runs, and may be called more than once.
func (w *Worker) Close() error {
	for _, l := range w.loops {
		wake := l.wake
		l.do(l.close)
		l.endThread(wake)
	}
	if w.held >= 0 {
		unix.Close(w.held)
		w.held = -1
	}
	if !w.apart { // else it has closed them, and they end with the threads' tables
		for _, fd := range w.hands {
			unix.Close(fd)
		}
	}
	w.hands = nil
	if w.plain != nil {
		w.plain.close()
	}
	return nil
}

// pipeSize is the size of a pipe in bytes, a power of two.
func (w *Worker) pipeSize() int {
	size := BufferMin
	for size*2 <= min(w.config.Buffer, 1<<20) {
		size *= 2
	}
	return size
}
