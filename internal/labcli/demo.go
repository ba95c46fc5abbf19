package labcli

import (
	"log/slog"
	"slices"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/demo"
	"github.com/waystamp/waystamp/internal/model"
)

// NewDemoCommand is `waystamp demo`.
func NewDemoCommand() *cobra.Command {
	var (
		schemes []string
		prefix  string
		runDir  string
		keep    bool
		verbose bool
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "The whole idea in a minute, on this machine",
		Long: `Build the network of examples/paper.yaml in network namespaces of this machine, send
real traffic through its chain, then tamper with the path in four ways and show why
each packet is refused. Then a controller rotates secrets, replaces a function and revokes
a node while traffic flows, in the network of examples/spare.yaml. Then other functions: netfilter, as in
examples/netfilter.yaml; compression of TCP connections, as in examples/streams.yaml;
a service behind a gateway, as in examples/zerotrust.yaml; a chain over labels, as in
examples/mpls.yaml; and functions without segment routing, as in
examples/functions.yaml: an nftables firewall, a program in user space, a NAT.
All packets go through the kernel. Needs root and nft. Changes nothing outside its
namespaces, and removes them at the end, also after Ctrl-C, or when the terminal or
the reader of its output is gone.`,
		Example: `  waystamp demo
  waystamp demo --scheme opot --keep`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := demo.Config{Prefix: prefix, RunDir: runDir, Keep: keep}
			for _, name := range schemes {
				var s model.Scheme
				if err := s.UnmarshalText([]byte(name)); err != nil {
					return command.Usagef("--scheme: %w", err)
				}
				if slices.Contains(c.Schemes, s) {
					return command.Usagef("--scheme: %s is named twice", s)
				}
				c.Schemes = append(c.Schemes, s)
			}
			if len(c.Schemes) == 0 {
				return command.Usagef("--scheme: name at least one of keyed, keyed-flow, opot, pot")
			}
			ownLabs(cmd, runDir)
			c.Out = cmd.OutOrStdout()
			if verbose {
				c.Log = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			}
			return demo.Run(cmd.Context(), c)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&schemes, "scheme", []string{"keyed", "opot"}, "proof schemes to play the scenes for: keyed, keyed-flow, opot, pot")
	f.StringVar(&prefix, "prefix", "", "prefix of the names of namespaces and pins (default: random)")
	f.StringVar(&runDir, "run-dir", "", "directory of labs (default: /run/waystamp/lab)")
	f.BoolVar(&keep, "keep", false, "leave the last lab up and print commands to try next")
	f.BoolVarP(&verbose, "verbose", "v", false, "print the steps of the lab on standard error")
	return cmd
}
