package cli

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/host"
)

// LabProgram has the commands InLab. A node needs neither it nor the libraries for
// plots that it brings.
const LabProgram = "waystamp-lab"

// LabCommand is a command of LabProgram.
type LabCommand struct{ Name, Short string }

// InLab are the commands that this program hands over.
var InLab = []LabCommand{
	{"demo", "The whole idea in a minute, on this machine"},
	{"lab", "A domain of network namespaces on this machine"},
	{"bench", "Measure waystamp beside the kernel without it"},
}

// newHandover is a command that becomes the same command of LabProgram.
func newHandover(c LabCommand) *cobra.Command {
	cmd := &cobra.Command{
		Use:                c.Name,
		Short:              c.Short,
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			program, err := host.Program(LabProgram)
			if err != nil {
				return fmt.Errorf("waystamp %s: %w; install it beside waystamp (make build builds both)", c.Name, err)
			}
			argv := append([]string{LabProgram, c.Name}, args...)
			return fmt.Errorf("hand waystamp %s over to %s: %w", c.Name, program, syscall.Exec(program, argv, os.Environ()))
		},
		ValidArgsFunction: func(_ *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
			return completeInLab(append(append([]string{c.Name}, args...), toComplete))
		},
	}
	// For "waystamp help lab": --help itself is an argument like any other.
	cmd.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		if err := cmd.RunE(cmd, []string{"--help"}); err != nil {
			cmd.PrintErrln("waystamp:", err)
		}
	})
	return cmd
}

// completeInLab asks LabProgram for what the last word can be, as a shell does.
func completeInLab(words []string) ([]string, cobra.ShellCompDirective) {
	program, err := host.Program(LabProgram)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	out, err := exec.Command(program, append([]string{cobra.ShellCompRequestCmd}, words...)...).Output()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	lines := strings.Split(strings.TrimRight(string(out), "\n"), "\n")
	var directive cobra.ShellCompDirective
	if _, err := fmt.Sscanf(lines[len(lines)-1], ":%d", &directive); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return lines[:len(lines)-1], directive
}
