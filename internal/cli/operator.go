package cli

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/planfile"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// identityVariable names the file with which an operator calls over TLS.
const identityVariable = "WAYSTAMP_IDENTITY"

// operatorFile is an operator's identity on disk.
type operatorFile struct {
	Version     int      `json:"version"`
	Operator    string   `json:"operator"`
	Role        string   `json:"role"` // when it was made; the controller has the one that counts
	Key         []byte   `json:"key"`  // RFC 5915
	Certificate []byte   `json:"certificate"`
	Roots       [][]byte `json:"roots"`
}

const operatorFileVersion = 1

// readOperator is how connections with the identity in a file are made.
func readOperator(name string) (*tls.Config, error) {
	b, err := planfile.Read(name)
	if err != nil {
		return nil, fmt.Errorf("read the operator's identity: %w", err)
	}
	bad := func(err error) (*tls.Config, error) {
		return nil, fmt.Errorf("the operator's identity %s: %w; make another one on the controller: waystamp operator add NAME", name, err)
	}
	var f operatorFile
	if err := json.Unmarshal(b, &f); err != nil {
		return bad(err)
	}
	if f.Version != operatorFileVersion {
		return bad(fmt.Errorf("its version is %d; this program reads %d", f.Version, operatorFileVersion))
	}
	key, err := x509.ParseECPrivateKey(f.Key)
	if err != nil {
		return bad(err)
	}
	var roots []*x509.Certificate
	for _, r := range f.Roots {
		c, err := x509.ParseCertificate(r)
		if err != nil {
			return bad(err)
		}
		roots = append(roots, c)
	}
	return identity.ClientTLS(
		func() []*x509.Certificate { return roots },
		func() (*tls.Certificate, error) {
			return &tls.Certificate{Certificate: [][]byte{f.Certificate}, PrivateKey: key}, nil
		}, time.Now), nil
}

// dialPatience is how long a controller may take to answer over TCP.
const dialPatience = 10 * time.Second

// dialTLS connects to a controller as an operator.
func dialTLS(ctx context.Context, address string, t *tls.Config) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialPatience)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	over := tls.Client(conn, t)
	if err := over.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return over, nil
}

// NewOperatorCommand is "waystamp operator".
func NewOperatorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "operator",
		Short: "Let operators call the controller from other machines, and list and remove them",
	}
	cmd.AddCommand(newAddOperatorCommand(), newRemoveOperatorCommand(), newListOperatorsCommand())
	return cmd
}

func newAddOperatorCommand() *cobra.Command {
	var at controllerFlag
	var role, out string
	cmd := &cobra.Command{
		Use:   "add NAME --role reader|admin --out FILE",
		Short: "Make an identity with which an operator calls over TLS",
		Long: `Make a key and a certificate for an operator, and write both to a new file of mode 0600. Whoever has the file is that
operator, for 90 days or until he is removed: hand it over as you would a password. He names it with --identity or
$WAYSTAMP_IDENTITY, and the controller with --controller tcp:HOST:PORT.

A reader sees how things are and compares files. An admin may do everything, as on the controller's socket. For a name
that there is already, the file before is void; so a certificate is renewed, and a role changed.`,
		Example: `  waystamp operator add alice --role reader --out alice.json
  waystamp get nodes --controller 'tcp:[fd00::1]:7443' --identity alice.json`,
		Args: command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if role == "" || out == "" {
				return command.Usagef("--role and --out are needed; see waystamp operator add --help")
			}
			if _, err := os.Lstat(out); err == nil { // before the one in it is void
				return fmt.Errorf("%s is there already; name another file", out)
			}
			key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
			if err != nil {
				return err
			}
			request, err := identity.Request(key)
			if err != nil {
				return err
			}
			der, err := x509.MarshalECPrivateKey(key)
			if err != nil {
				return err
			}
			return at.with(cmd.Context(), func(c adminClient) error {
				r, err := c.AddOperator(cmd.Context(), connect.NewRequest(&v1.AddOperatorRequest{Name: args[0], Role: role, CertificateRequest: request}))
				if err != nil {
					return err
				}
				if len(r.Msg.Certificates) == 0 {
					return errors.New("the controller's answer has no certificate")
				}
				b, err := json.Marshal(operatorFile{Version: operatorFileVersion, Operator: args[0], Role: role, Key: der, Certificate: r.Msg.Certificates[0], Roots: r.Msg.Roots})
				if err != nil {
					return err
				}
				if err := writeNew(out, b); err != nil {
					return fmt.Errorf("write the operator's identity: %w", err)
				}
				cmd.PrintErrf("for operator %s, %s, until %s\n", args[0], role, r.Msg.Expires.AsTime().Local().Format(time.DateTime))
				return nil
			})
		},
	}
	cmd.Flags().StringVar(&role, "role", "", "`role`: reader or admin")
	cmd.Flags().StringVar(&out, "out", "", "new `file` for key and certificate")
	at.add(cmd)
	return cmd
}

func newRemoveOperatorCommand() *cobra.Command {
	var at controllerFlag
	cmd := &cobra.Command{
		Use:     "remove NAME",
		Short:   "Refuse an operator's certificate from now on",
		Example: `  waystamp operator remove alice`,
		Args:    command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return at.with(cmd.Context(), func(c adminClient) error {
				_, err := c.RemoveOperator(cmd.Context(), connect.NewRequest(&v1.RemoveOperatorRequest{Name: args[0]}))
				return err
			})
		},
	}
	at.add(cmd)
	return cmd
}

func newListOperatorsCommand() *cobra.Command {
	var at controllerFlag
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the operators who have a certificate",
		Example: `  waystamp operator list`,
		Args:    command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.with(cmd.Context(), func(c adminClient) error {
				r, err := c.Operators(cmd.Context(), connect.NewRequest(&v1.OperatorsRequest{}))
				if err != nil {
					return err
				}
				w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
				fmt.Fprintln(w, "NAME\tROLE\tEXPIRES")
				for _, o := range r.Msg.Operators {
					fmt.Fprintf(w, "%s\t%s\t%s\n", o.Name, o.Role, o.Expires.AsTime().Local().Format(time.DateTime))
				}
				return w.Flush()
			})
		},
	}
	at.add(cmd)
	return cmd
}

// dialer connects to the first of some addresses that answers.
func (c *controllerFlag) dialer(addresses []string) (func(context.Context, string, string) (net.Conn, error), error) {
	var over *tls.Config
	for _, a := range addresses {
		if err := checkOperatorsAddress(a); err != nil {
			return nil, err
		}
		if !strings.HasPrefix(a, "tcp:") || over != nil {
			continue
		}
		file := cmp.Or(c.identity, os.Getenv(identityVariable))
		if file == "" {
			return nil, command.Usagef("%q takes an operator's certificate; name the file that waystamp operator add has made with --identity or $%s", a, identityVariable)
		}
		var err error
		if over, err = readOperator(file); err != nil {
			return nil, err
		}
	}
	return func(ctx context.Context, _, _ string) (conn net.Conn, err error) {
		var all []error
		for _, a := range addresses {
			if path, unix := strings.CutPrefix(a, "unix:"); unix {
				conn, err = new(net.Dialer).DialContext(ctx, "unix", path)
			} else {
				conn, err = dialTLS(ctx, strings.TrimPrefix(a, "tcp:"), over)
			}
			if err == nil {
				return conn, nil
			}
			all = append(all, err)
		}
		if len(all) == 1 {
			return nil, err
		}
		return nil, errors.Join(all...)
	}, nil
}

func newRotateCACommand() *cobra.Command {
	var at controllerFlag
	cmd := &cobra.Command{
		Use:   "rotate-ca",
		Short: "Replace the root of all certificates, without a node that joins anew",
		Long: `Make a new root for the controller's CA. All nodes get it beside the one that they trust, and renew their
certificates. When all trust it, it signs; when all have certificates of it, the old one is dropped, and what it
has signed is refused. waystamp get roots shows how far it is, and for which nodes it waits; revoke nodes that do not
come back. Traffic and changes of the domain go on.

When the new root signs, tokens that nobody has used become invalid, and so do the certificates of operators, which
the command lists: make new ones on the controller's machine. Make a new backup when the old root is dropped: the nodes
would not trust a controller from an earlier one.

A root that ends within 30 days is replaced in this way without the command.`,
		Example: `  waystamp controller rotate-ca`,
		Args:    command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.with(cmd.Context(), func(c adminClient) error {
				r, err := c.RotateCA(cmd.Context(), connect.NewRequest(&v1.RotateCARequest{}))
				if err != nil {
					return err
				}
				cmd.PrintErrln("a new root is on its way to all nodes; waystamp get roots shows how far it is")
				for _, name := range r.Msg.Operators {
					fmt.Fprintf(cmd.OutOrStdout(), "operator %s: needs a new certificate when the new root signs\n", name)
				}
				return nil
			})
		},
	}
	at.add(cmd)
	return cmd
}
