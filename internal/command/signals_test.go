package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
)

// interrupting is a command that is asked to end.
type interrupting struct {
	ctx     context.Context
	signals chan os.Signal // unbuffered: what is sent is the next after what came before was done
	now     chan time.Time
	ended   chan os.Signal
	stderr  bytes.Buffer // of whoever has heard from ended, or sent once more
}

func interruptible() *interrupting {
	c := &interrupting{signals: make(chan os.Signal), now: make(chan time.Time, 1), ended: make(chan os.Signal, 1)}
	i := &Interrupts{Stderr: &c.stderr, Now: func() time.Time { return <-c.now }, End: func(s os.Signal) { c.ended <- s }}
	c.ctx = i.Watch(context.Background(), c.signals)
	return c
}

func (c *interrupting) at(t *testing.T, after time.Duration, s os.Signal) {
	t.Helper()
	c.now <- time.Unix(1000, 0).Add(after)
	select {
	case c.signals <- s:
	case <-c.ended:
		t.Fatalf("the signal before that after %s has ended it", after)
	case <-time.After(await.Limit(time.Minute)):
		t.Fatalf("nobody hears the signal after %s", after)
	}
}

// What somebody sends once may come twice: to the process, and to its group.
func TestSignalsTogetherAreOneRequest(t *testing.T) {
	c := interruptible()
	Leaves(c.ctx, aLab)
	if c.ctx.Err() != nil {
		t.Fatal("cancelled before there was a signal")
	}
	c.at(t, 0, unix.SIGINT)
	<-c.ctx.Done()
	c.at(t, time.Microsecond, unix.SIGINT)
	c.at(t, togetherTime-1, unix.SIGTERM)
	c.at(t, togetherTime, unix.SIGTERM)
	if s := <-c.ended; s != unix.SIGTERM {
		t.Errorf("ended by %s, want the last signal", s)
	}
	want := "waystamp: cleaning up; press Ctrl-C again to stop now; this leaves lab ws-1a2b behind\n" +
		"waystamp: left behind: lab ws-1a2b; remove it with: waystamp lab down --prefix ws-1a2b\n"
	if got := c.stderr.String(); got != want {
		t.Errorf("says\n%swant\n%s", got, want)
	}
}

// A command that has nothing to take away has nothing to say.
func TestSignalsToWhatLeavesNothing(t *testing.T) {
	c := interruptible()
	c.at(t, 0, unix.SIGTERM)
	c.at(t, 0, unix.SIGTERM)
	c.at(t, time.Minute, unix.SIGINT)
	if s := <-c.ended; s != unix.SIGINT {
		t.Errorf("ended by %s", s)
	}
	if c.stderr.Len() > 0 {
		t.Errorf("says %q", &c.stderr)
	}
}

// A process that was started to ignore a signal, as the shell's "&" in a script starts
// it, is not ended by that one, but still by another.
func TestSignalThatDoesNotEndIsNotTheLast(t *testing.T) {
	c := interruptible()
	c.at(t, 0, unix.SIGINT)
	for _, s := range []os.Signal{unix.SIGINT, unix.SIGTERM} {
		c.at(t, time.Hour, s)
		if ended := <-c.ended; ended != s {
			t.Errorf("ended by %s, want %s", ended, s)
		}
	}
}

// Shells pass the hangup of their terminal on, and it may come long after a Ctrl-C.
func TestAHangupIsNeverTheLastSignal(t *testing.T) {
	for _, first := range []os.Signal{unix.SIGHUP, unix.SIGINT} {
		c := interruptible()
		Leaves(c.ctx, aLab)
		c.at(t, 0, first)
		<-c.ctx.Done()
		// Its time does not matter: nobody asks for it, so that the next one takes it.
		c.signals <- unix.SIGHUP
		c.signals <- unix.SIGHUP
		c.at(t, time.Hour, unix.SIGINT)
		if s := <-c.ended; s != unix.SIGINT {
			t.Errorf("after %s ended by %s, want SIGINT", first, s)
		}
	}
}

// aLab is left behind.
func aLab() []Leftover {
	return []Leftover{{What: "lab ws-1a2b", Remove: "waystamp lab down --prefix ws-1a2b"}}
}

// failing is a standard output that cannot be written to.
type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func TestWhatNobodyReadsAsksToEnd(t *testing.T) {
	for _, c := range []struct {
		err  error
		ends bool
	}{
		{unix.EPIPE, true}, {&os.PathError{Op: "write", Path: "/dev/stdout", Err: unix.EPIPE}, true},
		{unix.EIO, true}, {unix.ENOSPC, false}, {nil, false},
	} {
		for _, stream := range []string{"out", "err"} {
			i := interruptible()
			cmd := &cobra.Command{}
			cmd.SetContext(i.ctx)
			cmd.SetOut(io.Discard)
			cmd.SetErr(io.Discard)
			if stream == "out" {
				cmd.SetOut(failing{c.err})
			} else {
				cmd.SetErr(failing{c.err})
			}
			EndsUnread(cmd)
			_, out := fmt.Fprintln(cmd.OutOrStdout(), "text")
			_, err := fmt.Fprintln(cmd.ErrOrStderr(), "text")
			if got := errors.Join(out, err); !errors.Is(got, c.err) || (got == nil) != (c.err == nil) {
				t.Errorf("%v on std%s: the write says %v", c.err, stream, got)
			}
			if ends := i.ctx.Err() != nil; ends != c.ends {
				t.Errorf("%v on std%s: asks to end: %t, want %t", c.err, stream, ends, c.ends)
			}
			close(i.signals)
		}
	}
}

// Pipes are kept from when a command has something to take away, and not before:
// the others end with who reads them.
func TestOnlyWhoCleansUpOutlivesItsReader(t *testing.T) {
	kept := 0
	i := &Interrupts{Stderr: io.Discard, Now: time.Now, End: func(os.Signal) {}, Pipes: func() { kept++ }}
	signals := make(chan os.Signal)
	defer close(signals)
	ctx := i.Watch(context.Background(), signals)
	if kept != 0 {
		t.Error("kept by every command")
	}
	Leaves(ctx, nil)
	if kept != 1 {
		t.Error("not kept by one that cleans up")
	}
	if l := i.leftovers(); len(l) != 0 {
		t.Errorf("left: %v", l)
	}
}
