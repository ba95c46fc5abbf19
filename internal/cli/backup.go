package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/controller"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

func newBackupCommand() *cobra.Command {
	var at controllerFlag
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Write all records of the controller to a file, with all secrets",
		Long: `Write all records of the running controller, as they are at one moment, to a new file of mode 0600. It holds the
key of the CA and the secrets of all paths, in clear text: protect it like the controller's machine.`,
		Example: `  waystamp controller backup waystamp.backup`,
		Args:    command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return at.with(cmd.Context(), func(c adminClient) error {
				stream, err := c.Backup(cmd.Context(), connect.NewRequest(&v1.BackupRequest{}))
				if err != nil {
					return err
				}
				defer stream.Close()
				var all []byte
				for stream.Receive() {
					all = append(all, stream.Msg().Part...)
				}
				if err := stream.Err(); err != nil {
					return err
				}
				if _, err := controller.CheckBackup(all); err != nil {
					return fmt.Errorf("read the records that the controller sent: %w", err)
				}
				if err := writeNew(args[0], all); err != nil {
					return fmt.Errorf("write the backup: %w", err)
				}
				return nil
			})
		},
	}
	at.add(cmd)
	return cmd
}

// writeNew writes a file that must not be there yet, and makes it last. Half of one is removed.
func writeNew(name string, b []byte) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(cmp.Or(err, f.Sync()), f.Close()); err != nil {
		return errors.Join(err, os.Remove(name))
	}
	return nil
}

func newRestoreCommand() *cobra.Command {
	var data, records, seal string
	var etcd etcdFiles
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Put a backup into an empty store, before the controller is started",
		Long: `Put the records of a backup into an empty data directory, or an empty etcd, while no controller runs on it. Nodes may hold later plans than
the backup. So the controller, when you start it, sends nothing until each node has reported its revision and epochs, and continues with higher ones and
fresh secrets for all chains. Packets that are under way at this moment are refused. Revoke nodes that do not connect again.

The backup does not contain revocations that were made later: revoke these nodes again at once. Nodes that joined later need a new token.`,
		Example: `  waystamp controller restore waystamp.backup --data /var/lib/waystamp/controller`,
		Args:    command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			f, err := os.Open(args[0])
			if err != nil {
				return fmt.Errorf("read the backup: %w", err)
			}
			defer f.Close()
			b, err := io.ReadAll(f)
			if err != nil {
				return fmt.Errorf("read the backup: %w", err)
			}
			if _, err := controller.CheckBackup(b); err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			var s store.Store
			if records != "" {
				s, err = openEtcd(cmd, records, etcd)
			} else {
				s, err = openData(data)
			}
			if err == nil {
				s, err = sealedBy(s, seal)
			}
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, s.Close()) }()
			r, err := controller.Restore(cmd.Context(), s, b)
			if err != nil {
				return fmt.Errorf("restore %s: %w", args[0], err)
			}
			cmd.PrintErrf("restored: the records of %s\n", r.Made.Local().Format(time.DateTime))
			cmd.PrintErrf("revoked nodes in the backup: %s; revoke again the nodes that were revoked later\n", cmp.Or(strings.Join(r.Revoked, ", "), "none"))
			if len(r.Waits) > 0 {
				cmd.PrintErrf("the controller will wait for the reports of these nodes: %s\n", strings.Join(r.Waits, ", "))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&data, "data", defaultDataDir, "`directory` of the records; made if need be")
	etcd.add(cmd, &records)
	addSealKey(cmd, &seal)
	return cmd
}
