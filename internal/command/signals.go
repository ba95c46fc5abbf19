package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// togetherTime is how far apart signals are that somebody has sent once: Ctrl-C
// and timeout(1) signal the process, and its group besides.
const togetherTime = time.Second

// Interrupts is what becomes of the signals that ask a command to end. The first
// asks it to clean up. What follows within a second is the same request; what comes
// later ends the process at once, and says what that leaves. A hangup is never the
// one that ends it at once: nobody at a closed terminal is in a hurry.
type Interrupts struct {
	Stderr io.Writer
	Now    func() time.Time
	End    func(os.Signal) // ends the process by the signal
	// Pipes lets writes to a pipe that nobody reads fail from now on, where they
	// would end the process.
	Pipes func()

	cancel context.CancelFunc
	mu     sync.Mutex
	left   func() []Leftover
}

// Leftover is what is there after a process that was ended before it cleaned up.
type Leftover struct {
	What   string
	Remove string // the command that takes it away
}

// Watch returns a context that the first signal cancels.
func (i *Interrupts) Watch(ctx context.Context, signals <-chan os.Signal) context.Context {
	ctx, cancel := context.WithCancel(context.WithValue(ctx, interruptsKey{}, i))
	i.cancel = cancel
	go func() {
		defer cancel()
		if _, ok := <-signals; !ok {
			return
		}
		first, told := i.Now(), false
		cancel()
		for s := range signals {
			if s == unix.SIGHUP {
				continue
			}
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

func (i *Interrupts) leftovers() []Leftover {
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
		what = append(what, l.What)
	}
	fmt.Fprintf(i.Stderr, "waystamp: cleaning up; press Ctrl-C again to stop now; this leaves %s behind\n", strings.Join(what, ", "))
}

func (i *Interrupts) end(s os.Signal) {
	for _, l := range i.leftovers() {
		fmt.Fprintf(i.Stderr, "waystamp: left behind: %s; remove it with: %s\n", l.What, l.Remove)
	}
	i.End(s)
}

type interruptsKey struct{}

// Leaves tells what is there, at any time, that a command has yet to take away.
// From now on the command is not ended by a write: whoever has read what it writes
// may be gone, and the terminal closed, while it cleans up.
func Leaves(ctx context.Context, left func() []Leftover) {
	i, ok := ctx.Value(interruptsKey{}).(*Interrupts)
	if !ok {
		return // a test's
	}
	if i.Pipes != nil {
		i.Pipes()
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.left = left
}

// EndsUnread makes a command end, and clean up, once nobody reads any more what it
// writes.
func EndsUnread(cmd *cobra.Command) {
	i, ok := cmd.Context().Value(interruptsKey{}).(*Interrupts)
	if !ok {
		return // a test's
	}
	cmd.SetOut(readWriter{cmd.OutOrStdout(), i.cancel})
	cmd.SetErr(readWriter{cmd.ErrOrStderr(), i.cancel})
}

// readWriter calls unread when what is written reaches nobody any more.
type readWriter struct {
	io.Writer
	unread func()
}

func (w readWriter) Write(b []byte) (int, error) {
	n, err := w.Writer.Write(b)
	// A pipe without a reader, and a terminal that is closed.
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EIO) {
		w.unread()
	}
	return n, err
}
