package cli

import (
	"encoding/hex"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/gateway"
)

// NewAuditCommand has the commands on audit logs.
func NewAuditCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "audit", Short: "Look at the audit log of a gateway"}
	cmd.AddCommand(newAuditVerifyCommand())
	return cmd
}

func newAuditVerifyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "verify FILE",
		Short: "Check that no line of an audit log was changed, removed or put in",
		Long: `Each line of an audit log has a number and the hash of the line before. This
command reads the log to its end, and names the first line that does not follow
from the one before. FILE - is standard input.

It prints the number of lines, and the hash of the last line. Keep both on another
machine: a user who can write the file can shorten it, or write all of it again, and
only this hash shows the change.

Exit code 0 if every line follows, 4 if a line does not.`,
		Example: `  waystamp audit verify audit.log`,
		Args:    command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			v, err := await.Do(cmd.Context(), func() (gateway.Verified, error) { return verifyAudit(args[0], cmd.InOrStdin()) })
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d lines, each follows from the one before\nhash of the last line: %s\n", v.Lines, hex.EncodeToString(v.Last[:]))
			return err
		},
	}
}

func verifyAudit(name string, stdin io.Reader) (gateway.Verified, error) {
	in := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return gateway.Verified{}, fmt.Errorf("read the audit log: %w", err)
		}
		defer f.Close()
		in = f
	}
	v, err := gateway.VerifyAudit(in)
	if err != nil {
		return v, &command.ExitError{Code: command.ExitRefused, Err: fmt.Errorf("%s: %w", command.ShownName(name), err)}
	}
	return v, nil
}
