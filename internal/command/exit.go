// Package command has what the commands of all programs have in common: how one is
// run and interrupted, exit codes, tables and JSON, the reading of a domain's file. It
// knows no command but version; internal/cli and internal/labcli have the others.
// Results go to a command's standard output, narration to its standard error, and
// every command returns an error instead of ending the process.
package command

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// The exit codes of the process; they are part of its interface.
const (
	ExitDone      = 0
	ExitFailed    = 1
	ExitUsage     = 2 // wrong usage: flags, arguments, a file that breaks a rule
	ExitDifferent = 3 // differences found
	ExitRefused   = 4 // refused by policy, or not verified
)

// ExitError is an error that asks for an exit code. Without Err there is
// nothing more to say: the result said it.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

// Unwrap gives the cause.
func (e *ExitError) Unwrap() error { return e.Err }

// ExitCode is what the process ends with after err: that of the ExitError in
// its chain, ExitFailed for any other, ExitDone for nil.
func ExitCode(err error) int {
	if err == nil {
		return ExitDone
	}
	if e, ok := errors.AsType[*ExitError](err); ok {
		return e.Code
	}
	return ExitFailed
}

// Usagef is an ExitError with ExitUsage, its text made as fmt.Errorf does.
func Usagef(format string, args ...any) error {
	return &ExitError{Code: ExitUsage, Err: fmt.Errorf(format, args...)}
}

// UsageArgs turns the errors of an argument check into wrong usage.
func UsageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return Usagef("%w; its form is: %s", err, cmd.UseLine())
		}
		return nil
	}
}

// NoArgs refuses arguments, and names the flag that the first one may be meant for.
func NoArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	msg := fmt.Sprintf("%s takes no argument, and there is %q", cmd.CommandPath(), args[0])
	for _, name := range []string{"file", "plan", "prefix"} {
		if f := cmd.Flags().Lookup(name); f != nil && !f.Changed {
			msg += fmt.Sprintf("; did you mean --%s %s?", name, args[0])
			break
		}
	}
	return Usagef("%s", msg)
}
