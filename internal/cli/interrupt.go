package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// togetherTime is how far apart signals are that somebody has sent once: Ctrl-C
// and timeout(1) signal the process, and its group besides.
const togetherTime = time.Second

// Interrupts is what becomes of the signals that ask a command to end. The first
// asks it to clean up. What follows within a second is the same request; what comes
// later ends the process at once, and says what that leaves.
type Interrupts struct {
	Stderr io.Writer
	Now    func() time.Time
	End    func(os.Signal) // ends the process by the signal

	mu   sync.Mutex
	left func() []leftover
}

// leftover is what is there after a process that was ended before it cleaned up.
type leftover struct {
	what   string
	remove string // the command that takes it away
}

// Watch returns a context that the first signal cancels.
func (i *Interrupts) Watch(ctx context.Context, signals <-chan os.Signal) context.Context {
	ctx, cancel := context.WithCancel(context.WithValue(ctx, interruptsKey{}, i))
	go func() {
		defer cancel()
		if _, ok := <-signals; !ok {
			return
		}
		first, told := i.Now(), false
		cancel()
		for s := range signals {
			if i.Now().Sub(first) >= togetherTime {
				i.end(s) // what the process was started to ignore does not end it
				continue
			}
			if !told {
				told = true
				i.tell()
			}
		}
	}()
	return ctx
}

func (i *Interrupts) leftovers() []leftover {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.left == nil {
		return nil
	}
	return i.left()
}

func (i *Interrupts) tell() {
	left := i.leftovers()
	if len(left) == 0 {
		return
	}
	var what []string
	for _, l := range left {
		what = append(what, l.what)
	}
	fmt.Fprintf(i.Stderr, "waystamp: cleaning up; once more stops at once, and leaves %s behind\n", strings.Join(what, ", "))
}

func (i *Interrupts) end(s os.Signal) {
	for _, l := range i.leftovers() {
		fmt.Fprintf(i.Stderr, "waystamp: %s is left behind; try: %s\n", l.what, l.remove)
	}
	i.End(s)
}

type interruptsKey struct{}

// leaves tells what is there, at any time, that a command has yet to take away.
func leaves(ctx context.Context, left func() []leftover) {
	i, ok := ctx.Value(interruptsKey{}).(*Interrupts)
	if !ok {
		return // a test's
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.left = left
}
