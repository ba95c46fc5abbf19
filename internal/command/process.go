package command

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Process runs the command line of the process with main, which is like Run, and
// returns the exit code.
func Process(main func(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int) int {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // as nohup(1) has it
		signal.Notify(signals, syscall.SIGHUP)
	}
	i := &Interrupts{Stderr: os.Stderr, Now: time.Now, End: endBy, Pipes: keepPipes}
	return main(i.Watch(context.Background(), signals), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
}

// endBy ends the process by the signal, as whoever waits for it expects.
func endBy(s os.Signal) {
	signal.Reset(s)
	if n, ok := s.(syscall.Signal); ok {
		syscall.Kill(os.Getpid(), n)
	}
}

// keepPipes: without it, the runtime ends the process at a write to a standard
// output or error that is a pipe without a reader. It is not ignored, since
// programs that are started would ignore it, too.
func keepPipes() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) }
