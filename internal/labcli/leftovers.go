package labcli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/bench"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/lab"
)

func leftLabs(prefixes []string, runDir string) (out []command.Leftover) {
	where := ""
	if runDir != "" && runDir != lab.DefaultRunDir {
		where = " --run-dir " + runDir
	}
	for _, p := range prefixes {
		out = append(out, command.Leftover{What: "lab " + p, Remove: "waystamp lab down --prefix " + p + where})
	}
	return out
}

func leftPins(instances []string) (out []command.Leftover) {
	for _, name := range instances {
		out = append(out, command.Leftover{What: "the data path " + name, Remove: "waystamp agent --detach --yes --instance " + name})
	}
	return out
}

// ownLabs names the labs that the command leaves if it is ended early, and ends the command if
// the reader of its output is gone: call it before the command's outputs are used. First it
// names labs that other commands have left. The commands that need a lab report one that cannot
// be read now.
func ownLabs(cmd *cobra.Command, runDir string) {
	_, orphans, _ := lab.Owned(runDir)
	warnOf(cmd, leftLabs(orphans, runDir))
	command.Leaves(cmd.Context(), func() []command.Leftover {
		own, _, _ := lab.Owned(runDir)
		return leftLabs(own, runDir)
	})
	command.EndsUnread(cmd)
}

// ownBench is the same for the labs and the data paths of a bench.
func ownBench(cmd *cobra.Command) {
	_, labs, _ := lab.Owned("")
	_, pins, _ := bench.Owned()
	warnOf(cmd, append(leftLabs(labs, ""), leftPins(pins)...))
	command.Leaves(cmd.Context(), func() []command.Leftover {
		labs, _, _ := lab.Owned("")
		pins, _, _ := bench.Owned()
		return append(leftLabs(labs, ""), leftPins(pins)...)
	})
}

func warnOf(cmd *cobra.Command, orphans []command.Leftover) {
	for _, o := range orphans {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: an interrupted command left %s behind; remove it with: %s\n", o.What, o.Remove)
	}
}
