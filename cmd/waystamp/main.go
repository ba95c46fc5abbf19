// Command waystamp is the whole product: the node agent, the lab and the tools
// around them. This package ties the process to internal/cli and does nothing
// else: arguments, standard streams, signals, the exit code.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/waystamp/waystamp/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	// The first signal asks the command to clean up and end; from then on a
	// signal has its ordinary effect, so that a second one ends it at once.
	context.AfterFunc(ctx, stop)
	os.Exit(cli.Main(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
