package cli

import (
	"crypto/rand"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
	"github.com/waystamp/waystamp/internal/routing"
)

// NewRoutingCommand is "waystamp routing".
func NewRoutingCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "routing",
		Short: "Print configurations of routing daemons that announce a domain",
		Args:  command.NoArgs,
	}
	cmd.AddCommand(newRoutingFRRCommand())
	return cmd
}

func newRoutingFRRCommand() *cobra.Command {
	var o routingOptions
	cmd := &cobra.Command{
		Use:   "frr NODE -f FILE",
		Short: "Print the configuration of a node's FRR",
		Long: `Print a configuration for zebra and bgpd of FRR, from 8.4 on, with which a node
announces its address and its locator to its neighbours, and, with "advertise: sids"
in the file, each SID that its agent has a route for.

BGP is external and unnumbered: each node has an AS of its own, 4200000000 and the
node's place in the file, and talks to the neighbours behind its interfaces of role
core (--neighbour names others) by link-local addresses.

A SID has the large community AS:BEHAVIOUR:FUNCTION. BEHAVIOUR is IANA's codepoint of
the SRv6 endpoint behavior: 1 End, 20 End.DT46, 43 and 64 the same with NEXT-CSID. End.AN
and End.AD have none yet, and take 32769 and 32771, of those for private use. FUNCTION is
the first 32 bits of the SHA-256 of the function's name, 0 at an egress. The first lines
of the configuration list them.

SIDs are those of a first plan. Where plans were changed since, as by "waystamp plan
--out", --paths names the file that has them. There is no BGP-LS.`,
		Example: `  waystamp routing frr r2 -f examples/routing.yaml
  waystamp routing frr r2 -f domain.yaml --paths plans/paths.json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return command.Usagef("%d nodes are named; name one, as in waystamp routing frr r2 -f examples/routing.yaml", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error { return o.frr(cmd, args[0]) },
	}
	f := cmd.Flags()
	f.StringVarP(&o.file, "file", "f", "", "domain `file`; - is standard input")
	f.StringVar(&o.paths, "paths", "", "`file` with all paths, as waystamp plan writes it, for their SIDs")
	f.Uint32Var(&o.as, "as", 0, "AS `number` of the node, different from its neighbours'; 0: 4200000000 plus the node's place in the file")
	f.StringArrayVar(&o.neighbours, "neighbour", nil, "`interface` to a neighbour; may be repeated (default: all interfaces of role core)")
	return cmd
}

type routingOptions struct {
	file, paths string
	as          uint32
	neighbours  []string
}

func (o *routingOptions) frr(cmd *cobra.Command, node string) error {
	if o.file == "" {
		return command.Usagef("-f is missing; name the domain's file, as in waystamp routing frr r2 -f examples/routing.yaml")
	}
	ctx := cmd.Context()
	m, err := command.ReadManifest(ctx, o.file, cmd.InOrStdin(), cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	var paths []plan.Path
	if o.paths == "" {
		d, err := await.Do(ctx, func() (*plan.Domain, error) { return plan.Compile(m.Domain, plan.NewKeyring(rand.Reader, nil)) })
		if err != nil {
			return err
		}
		paths = d.Paths
	} else {
		b, err := planfile.Read(o.paths)
		if err != nil {
			return notFoundIsUsage(fmt.Errorf("read the paths: %w", err))
		}
		if paths, err = plan.DecodePaths(b); err != nil {
			return command.Usagef("paths %s: %w", o.paths, err)
		}
	}
	s, err := routing.New(m.Domain, paths, node)
	if err != nil {
		return command.Usagef("%w", err)
	}
	if o.as != 0 {
		s.AS = o.as
	}
	if len(o.neighbours) > 0 {
		s.Neighbours = o.neighbours
	}
	if len(s.Neighbours) == 0 {
		return command.Usagef("%s has no interface of role core; give the interfaces to its neighbours by --neighbour", node)
	}
	for _, n := range s.Neighbours {
		if err := model.CheckInterfaceName(n); err != nil {
			return command.Usagef("--neighbour %q %w", n, err)
		}
	}
	_, err = io.WriteString(cmd.OutOrStdout(), s.FRR())
	return err
}
