// Package labcli has the commands of the laboratory: a domain of network namespaces, the
// demonstration in it, attacks on it, and measurements. They are a program of their own, to
// which waystamp hands them over, so that the program on a node has neither them nor their
// libraries. One file per command; cmd/waystamp-lab calls it.
package labcli

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
)

// Main runs one command line, without the program's name, to its end and returns the exit code
// of the process. If ctx is cancelled, the command cleans up and returns.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return command.Run(ctx, NewRootCommand(), args, stdin, stdout, stderr)
}

// NewRootCommand is the tree of all commands of this program.
func NewRootCommand() *cobra.Command {
	return command.NewRoot(`waystamp-lab has the commands of waystamp that a node does not need: waystamp demo,
waystamp lab and waystamp bench hand over to it.`,
		NewDemoCommand(),
		NewLabCommand(),
		NewBenchCommand(),
	)
}
