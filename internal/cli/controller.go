package cli

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/controller"
	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/store"
)

const defaultDataDir = "/var/lib/waystamp/controller"

// NewControllerCommand is "waystamp controller".
func NewControllerCommand() *cobra.Command {
	var data, domain string
	var listen []string
	cmd := &cobra.Command{
		Use:   "controller",
		Short: "Run the controller of a domain: one file in, its part to each node",
		Long: `Run the controller of a domain. Operators give it a domain file (waystamp apply), agents
that have joined (waystamp agent --controller) get their own part of the plans, and
nobody else's secrets. A change of a path goes by epochs, each step recorded before anything is sent:
a controller that was killed goes on. Nodes go on without it.

--listen unix:/PATH is for operators: root and the user of the controller. --listen tcp:HOST:PORT is
for nodes, over TLS with certificates on both sides; tls+unix:/PATH is the same on a socket, for
nodes that are namespaces of this machine. Without --listen there is only the socket for operators.

The data directory holds the key of the CA and the secrets of all paths, as they are: keep it,
and keep it to yourself. Calls are logged on standard error (msg=audit), without secrets.`,
		Example: `  waystamp controller --listen unix:/run/waystamp/controller.sock --listen tcp:[fd00::1]:7443`,
		Args:    command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if domain != "" {
				if err := identity.CheckTrustDomain(domain); err != nil {
					return command.Usagef("--trust-domain %q: %w", domain, err)
				}
			}
			if len(listen) == 0 {
				listen = []string{"unix:" + defaultControllerSocket}
			}
			if err := os.MkdirAll(data, 0o700); err != nil {
				return fmt.Errorf("make the data directory: %w", err)
			}
			if info, err := os.Stat(data); err != nil {
				return fmt.Errorf("look at the data directory: %w", err)
			} else if mode := info.Mode().Perm(); mode&0o022 != 0 {
				return fmt.Errorf("the data directory %s has mode %04o: others can put another store in its place; try: chmod go-w %[1]s", data, mode)
			}
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			s, err := store.OpenBolt(filepath.Join(data, "store"))
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, s.Close()) }()
			c, err := controller.New(cmd.Context(), controller.Config{Store: s, TrustDomain: domain, Log: log})
			if err != nil {
				return err
			}
			var listeners []controller.Listener
			defer func() {
				for _, l := range listeners {
					l.Close()
				}
			}()
			for _, address := range listen {
				l, err := controller.Listen(address)
				if err != nil {
					return command.Usagef("--listen: %w", err)
				}
				listeners = append(listeners, l)
				log.Info("listening", "address", address)
			}
			log.Warn("the secrets in the data directory are not sealed: whoever can read it has them all", "directory", data)
			return c.Run(cmd.Context(), listeners...)
		},
	}
	cmd.Flags().StringVar(&data, "data", defaultDataDir, "`directory` of the records; made if need be")
	cmd.Flags().StringArrayVar(&listen, "listen", nil, "`address` to listen on; several are possible (default unix:"+defaultControllerSocket+")")
	cmd.Flags().StringVar(&domain, "trust-domain", "", "`name` in the certificates, of a new data directory (default "+controller.DefaultTrustDomain+")")
	return cmd
}
