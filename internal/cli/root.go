// Package cli has the commands of waystamp that read plans, run a node's agent and
// ask agents: one file per command, with what renders its results. It wires what
// other packages do and decides nothing itself; cmd/waystamp calls it. The commands of
// the laboratory are internal/labcli, in a program of their own, to which this one
// hands over.
package cli

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/dataplane"
)

// Main runs one command line, without the program's name, to its end and
// returns the exit code of the process. It changes nothing but what the command
// is for, so that tests run it in-process. A cancelled ctx asks the command to
// clean up and return.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return command.Run(ctx, NewRootCommand(), args, stdin, stdout, stderr)
}

// NewRootCommand is the tree of all commands of this program. The tests of the
// documentation look commands up in it.
func NewRootCommand() *cobra.Command { return newRoot(onThisMachine()) }

func newRoot(in surroundings) *cobra.Command {
	commands := []*cobra.Command{
		NewPlanCommand(),
		NewAgentCommand(),
		NewControllerCommand(),
		NewApplyCommand(),
		NewDiffCommand(),
		NewDeleteCommand(),
		NewRotateCommand(),
		NewNodeCommand(),
		NewOperatorCommand(),
		NewDoctorCommand(),
		newStatusCommand(in),
		newGetCommand(in),
		newDescribeCommand(in),
		newWatchCommand(in),
		newTraceCommand(in),
		newSessionCommand(in),
		newRevokeIdentityCommand(in),
		newExtcapCommand(in),
		NewExplainCommand(),
		NewRoutingCommand(),
		NewPotCommand(dataplane.NewEngine),
		NewAuditCommand(),
		NewGatewayCommand(),
		NewSignerCommand(),
		newWorkerCommand(),
	}
	for _, c := range InLab {
		commands = append(commands, newHandover(c))
	}
	return command.NewRoot(`waystamp steers traffic through an ordered list of service functions on ordinary
Linux machines. Every hop stamps each packet; the last one checks the stamps and
lets through only what really took the path, in order.`, commands...)
}
