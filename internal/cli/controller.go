package cli

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/controller"
	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/planfile"
	"github.com/waystamp/waystamp/internal/store"
)

const defaultDataDir = "/var/lib/waystamp/controller"

// NewControllerCommand is "waystamp controller".
func NewControllerCommand() *cobra.Command {
	var data, domain, records, advertise, metrics, audit, seal string
	var listen []string
	var etcd etcdFiles
	var rotate time.Duration
	cmd := &cobra.Command{
		Use:   "controller",
		Short: "Run the controller of a domain: compile its file, and send each node its plan",
		Long: `Run the controller of a domain. Operators send it a domain file (waystamp apply). Agents
that have joined (waystamp agent --controller) get only the plan of their node, without
secrets of other nodes. A change of a path uses epochs, and each step is recorded before it is sent, so that
a controller continues after a crash. The data paths of nodes do not depend on a running controller.

--listen unix:/PATH is for operators: root and the user of the controller. --listen tcp:HOST:PORT is
for nodes, and for operators with a certificate from waystamp operator add, over TLS with certificates on both sides; tls+unix:/PATH is TLS on a Unix socket, for
nodes in namespaces of this machine. Without --listen there is only the socket for operators.

Several controllers share the work if each gets the same etcd: --store etcd://HOST:PORT,... One of them
leads, and the others forward calls to it. If the leader fails, another controller leads and continues its change. Each
needs a --listen tcp:HOST:PORT that the others can reach; if they reach it by another address than it listens on,
give --advertise.

When it listens, the controller writes {"ready":true} to standard output.

The data directory, or etcd, holds the key of the CA and the secrets of all paths: keep it, and keep it to
yourself. With --seal-key FILE all records are encrypted there, and whoever has the records alone learns nothing but names; without the
file they are lost. Of several controllers each gets the same key. A store keeps to being sealed or not: to change that, or the
key, back up and restore into an empty one. Calls are logged on standard error (msg=audit), and in the file of --audit, without secrets.`,
		Example: `  waystamp controller --listen unix:/run/waystamp/controller.sock --listen tcp:[fd00::1]:7443
  waystamp controller --listen unix:/run/waystamp/controller.sock --listen tcp:[fd00::1]:7443 \
      --store etcd://[fd00::1]:2379,[fd00::2]:2379,[fd00::3]:2379 \
      --etcd-ca ca.pem --etcd-cert controller.pem --etcd-key controller-key.pem`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if domain != "" {
				if err := identity.CheckTrustDomain(domain); err != nil {
					return command.Usagef("--trust-domain %q: %w", domain, err)
				}
			}
			if cmd.Flags().Changed("rotate-every") && rotate < controller.RotateMin {
				return command.Usagef("--rotate-every %s: expect %s or more", rotate, controller.RotateMin)
			}
			if len(listen) == 0 {
				listen = []string{"unix:" + defaultControllerSocket}
			}
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			if err := controller.KeepFromDumps(); err != nil {
				return err
			}
			var s store.Store
			if records != "" {
				if advertise, err = advertised(advertise, listen); err != nil {
					return err
				}
				s, err = openEtcd(cmd, records, etcd)
			} else if cmd.Flags().Changed("advertise") || etcd != (etcdFiles{}) {
				return command.Usagef("--advertise, --etcd-ca, --etcd-cert and --etcd-key go with --store")
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
			var trail *controller.Audit
			if audit == "" && records == "" {
				audit = filepath.Join(data, "audit.jsonl")
			}
			if audit != "" {
				if trail, err = controller.OpenAudit(audit); err != nil {
					return err
				}
				defer func() { err = errors.Join(err, trail.Close()) }()
			}
			c, err := controller.New(cmd.Context(), controller.Config{Store: s, Advertise: advertise, TrustDomain: domain, RotateEvery: rotate, Log: log, Audit: trail})
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
			if metrics != "" {
				l, err := controller.ListenMetrics(metrics)
				if err != nil {
					return command.Usagef("--metrics: %w", err)
				}
				listeners = append(listeners, l)
			}
			if seal == "" {
				log.Warn("the secrets in the store are not encrypted: every reader of the store gets all of them; see --seal-key", "store", cmp.Or(records, data))
			}
			if _, err := fmt.Fprintln(cmd.OutOrStdout(), `{"ready":true}`); err != nil {
				return fmt.Errorf("say that the controller is ready: %w", err)
			}
			if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
				log.Warn("systemd does not hear that the controller is ready", "err", err)
			}
			return c.Run(cmd.Context(), listeners...)
		},
	}
	cmd.AddCommand(newBackupCommand(), newRestoreCommand(), newRotateCACommand())
	cmd.Flags().StringVar(&data, "data", defaultDataDir, "`directory` of the records; made if need be")
	etcd.add(cmd, &records)
	addSealKey(cmd, &seal)
	cmd.Flags().StringVar(&advertise, "advertise", "", "`address` where the other controllers reach this one: tcp:HOST:PORT (default: the first --listen tcp:)")
	cmd.Flags().StringArrayVar(&listen, "listen", nil, "`address` to listen on; several are possible (default unix:"+defaultControllerSocket+")")
	cmd.Flags().StringVar(&metrics, "metrics", "", "`address` to serve Prometheus metrics on, without authentication: HOST:PORT, as in [::1]:9464")
	cmd.Flags().DurationVar(&rotate, "rotate-every", 0, "`time` after which all chains get fresh secrets, but for those with a rotate-every of their own, up to a tenth earlier: 10s at least, as in 1h (default: never)")
	cmd.Flags().StringVar(&audit, "audit", "", "`file` for a log of calls, a JSON object per line; it is rotated at 16 MiB, and four old files are kept (default audit.jsonl in the data directory; with --store none)")
	cmd.Flags().StringVar(&domain, "trust-domain", "", "`name` in the certificates, of a new data directory (default "+controller.DefaultTrustDomain+")")
	return cmd
}

func addSealKey(cmd *cobra.Command, seal *string) {
	cmd.Flags().StringVar(seal, "seal-key", "", "`file` with a key that encrypts all records in the store: 64 hexadecimal digits, mode 0600 or 0400, of the user who runs this or of root; keep a copy elsewhere")
}

// sealedBy is a store whose records are sealed with the key in a file; "": as they are. It closes the store if it fails.
func sealedBy(s store.Store, file string) (store.Store, error) {
	if file == "" {
		return s, nil
	}
	text, err := planfile.Read(file)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read the seal key: %w", err), s.Close())
	}
	key, err := store.ParseSealKey(text)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the seal key %s: %w", file, err), s.Close())
	}
	return store.Seal(s, key), nil
}

// etcdFiles are what connections to etcd are protected with.
type etcdFiles struct{ ca, cert, key string }

func (f *etcdFiles) add(cmd *cobra.Command, records *string) {
	cmd.Flags().StringVar(records, "store", "", "`etcd` that several controllers share, instead of --data: etcd://HOST:PORT,HOST:PORT[/PREFIX]")
	cmd.Flags().StringVar(&f.ca, "etcd-ca", "", "`file` with the CA of etcd's certificates; needed unless etcd is on this machine")
	cmd.Flags().StringVar(&f.cert, "etcd-cert", "", "`file` with a client certificate for etcd")
	cmd.Flags().StringVar(&f.key, "etcd-key", "", "`file` with the key of that certificate")
}

func openEtcd(cmd *cobra.Command, records string, f etcdFiles) (store.Store, error) {
	c, err := store.ParseEtcd(records)
	if err != nil {
		return nil, command.Usagef("--store: %w", err)
	}
	c.CA, c.Cert, c.Key = f.ca, f.cert, f.key
	return store.OpenEtcd(cmd.Context(), c)
}

// openData opens the store in a data directory, which it makes.
func openData(data string) (store.Store, error) {
	if err := os.MkdirAll(data, 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	if info, err := os.Stat(data); err != nil {
		return nil, fmt.Errorf("look at the data directory: %w", err)
	} else if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return nil, fmt.Errorf("the data directory %s has mode %04o: others can put another store in its place; try: chmod go-w %[1]s", data, mode)
	}
	return store.OpenBolt(filepath.Join(data, "store"))
}

// advertised is where others reach this controller.
func advertised(address string, listen []string) (string, error) {
	if address != "" {
		if err := controller.CheckAddress(address); err != nil {
			return "", command.Usagef("--advertise: %w", err)
		}
		return address, nil
	}
	i := slices.IndexFunc(listen, func(l string) bool { return strings.HasPrefix(l, "tcp:") || strings.HasPrefix(l, "tls+unix:") })
	if i < 0 {
		return "", command.Usagef("with --store the other controllers have to reach this one; add --listen tcp:HOST:PORT")
	}
	if err := controller.CheckAddress(listen[i]); err != nil {
		return "", command.Usagef("--listen: %w; or say --advertise", err)
	}
	return listen[i], nil
}
