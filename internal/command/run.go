package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// Run runs one command line, without the program's name, to its end and
// returns the exit code of the process. It changes nothing but what the command
// is for, so that tests run it in-process. A cancelled ctx asks the command to
// clean up and return.
func Run(ctx context.Context, root *cobra.Command, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)

	// What goes wrong before a command starts is how it was called: flags,
	// arguments, a name that is no command.
	started := false
	onStart(root, func() { started = true })

	// To --help behind such a name, too, the name is what is wrong.
	var wrong error
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if cmd.HasSubCommands() && cmd.Args != nil {
			wrong = cmd.Args(cmd, cmd.Flags().Args())
		}
		if wrong == nil {
			help(cmd, args)
		}
	})

	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		err = wrong
	}
	if err == nil {
		return ExitDone
	}
	code := ExitCode(err)
	if !started {
		code = ExitUsage
	}
	if e, ok := errors.AsType[*ExitError](err); ok && e.Err == nil {
		return code
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		fmt.Fprintln(stderr, "waystamp: interrupted")
		return code
	}
	fmt.Fprintf(stderr, "waystamp: %s\n", strings.TrimRight(err.Error(), "\n"))
	var hinter interface{ Hint() string }
	switch {
	case errors.As(err, &hinter) && hinter.Hint() != "":
		fmt.Fprintln(stderr, hinter.Hint())
	case !started:
		fmt.Fprintf(stderr, "try: %s --help\n", cmd.CommandPath())
	}
	return code
}

// NewRoot is a program with these commands. The commands of all programs are those of
// waystamp, whichever of them holds them.
func NewRoot(long string, commands ...*cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use:   "waystamp",
		Short: "Service function chains that prove themselves",
		Long:  long,
		// Run prints errors, once and in one form.
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version,
	}
	root.SetVersionTemplate(versionText())
	root.AddCommand(commands...)
	root.AddCommand(newVersionCommand())
	runGroups(root)
	return root
}

// Whole is a program's tree of commands, in which those of another one take the place
// of those of the same names: all commands that the documentation may show.
func Whole(root, other *cobra.Command) *cobra.Command {
	for _, c := range other.Commands() {
		for _, same := range root.Commands() {
			if same.Name() == c.Name() {
				root.RemoveCommand(same)
			}
		}
		root.AddCommand(c)
	}
	return root
}

// runGroups gives each command that only holds others something to do: its
// help, or an error for a name that it does not have.
func runGroups(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		runGroups(sub)
	}
	if cmd.Runnable() {
		return
	}
	cmd.DisableFlagsInUseLine = true
	cmd.SuggestionsMinimumDistance = 2
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		msg := fmt.Sprintf("%q is not a command of %s", args[0], cmd.CommandPath())
		if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
			msg += "; did you mean " + strings.Join(near, " or ") + "?"
		}
		return Usagef("%s", msg)
	}
	// A flag of the command that was meant is none of the group's: the name is what is wrong.
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if cmd.HasSubCommands() {
			if wrong := cmd.Args(cmd, cmd.Flags().Args()); wrong != nil {
				return wrong
			}
		}
		return err
	})
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
}

// onStart calls f when any command of the tree starts to run.
func onStart(cmd *cobra.Command, f func()) {
	for _, sub := range cmd.Commands() {
		onStart(sub, f)
	}
	run, runE := cmd.Run, cmd.RunE
	switch {
	case runE != nil:
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			f()
			return runE(cmd, args)
		}
	case run != nil:
		cmd.Run = func(cmd *cobra.Command, args []string) {
			f()
			run(cmd, args)
		}
	}
}
