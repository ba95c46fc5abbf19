package cli

import (
	"crypto/rand"
	"slices"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// NewPlanCommand is "waystamp plan".
func NewPlanCommand() *cobra.Command {
	var o planCommand
	cmd := &cobra.Command{
		Use:   "plan -f FILE",
		Short: "Check and compile a domain file; changes nothing",
		Long: `Check a domain file, compile it into plans for its nodes, and show them: paths with
their segment lists and SIDs, the length of their headers, the MTU and TCP MSS that
remain, and the MSS for SYNs where a chain clamps; the memory of replay windows at
the egress, in megabytes per node; and how functions are attached and
recognised, with the memory of their caches. No secret is shown.

With --out the plans are written, for "waystamp agent --plan": DIR/nodes/NAME.json
for each node, with its own secrets only, and DIR/paths.json with all secrets,
which stays with whoever plans; all have mode 0600. Run again, it keeps the SIDs and the secrets of
paths that did not change, and gives the others fresh secrets and their next
epoch. A file is replaced in one step, and only if it changes. DIR/paths.json is
refused if others can read or change it.

With --rotate CHAIN, or all, a chain gets fresh secrets though it does not change.

With --keep-epochs, besides, the plans of two steps by which paths change without
losing a packet: DIR/1-both/NAME.json and DIR/2-turn/NAME.json. Carry 1-both to all
nodes, then 2-turn, and when the last packets have arrived nodes/NAME.json. Agents
that read DIR/nodes itself take the last step at once: give each a copy elsewhere.

A guard that does not enforce is a warning on standard error.

A file has at most 16 MiB, two million brackets, commas, colons and dashes, 64 levels
of lists and mappings, and 256 bytes in a value. A block has SIDs for 32 767 chains.

Exit code 2 if the file is refused: every problem is shown with its line. Exit code
1, at once, on Ctrl-C, SIGTERM or a closed terminal.`,
		Example: `  waystamp plan -f examples/paper.yaml
  waystamp plan -f examples/paper.yaml -o json
  waystamp plan -f domain.yaml --out /var/lib/waystamp/plan
  waystamp plan -f domain.yaml --out /var/lib/waystamp/plan --keep-epochs --rotate all`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	cmd.Flags().StringVarP(&o.file, "file", "f", "", "domain `file`; - is standard input")
	cmd.Flags().StringVarP(&o.output, "output", "o", "table", "`format` of the result: table or json")
	cmd.Flags().StringVar(&o.out, "out", "", "`directory` to write plans to; made if need be")
	cmd.Flags().StringSliceVar(&o.rotate, "rotate", nil, "`chain` that gets fresh secrets though it does not change, or all; several are possible; needs --out")
	cmd.Flags().BoolVar(&o.keepEpochs, "keep-epochs", false, "also write the steps of a change that loses no packet; needs --out")
	return cmd
}

type planCommand struct {
	file, output, out string
	rotate            []string
	keepEpochs        bool
}

func (o *planCommand) run(cmd *cobra.Command) error {
	if o.file == "" {
		return command.Usagef("-f is missing; name the domain's file, as in waystamp plan -f examples/paper.yaml")
	}
	if o.output != "table" && o.output != "json" {
		return command.Usagef("-o %q is not a format; expect table or json", o.output)
	}
	if cmd.Flags().Changed("out") && o.out == "" {
		return command.Usagef("--out is empty; name a directory")
	}
	if o.out == "" && (o.keepEpochs || len(o.rotate) > 0) {
		return command.Usagef("--keep-epochs and --rotate need --out: the directory with the plans that are in force")
	}
	ctx := cmd.Context()
	m, err := command.ReadManifest(ctx, o.file, cmd.InOrStdin(), cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	if err := o.checkRotate(m.Domain); err != nil {
		return err
	}
	var d *plan.Domain
	if o.out == "" {
		d, err = await.Do(ctx, func() (*plan.Domain, error) { return plan.Compile(m.Domain, plan.NewKeyring(rand.Reader, nil)) })
	} else {
		d, err = writePlans(ctx, o.out, m.Domain, o.change(), cmd.ErrOrStderr())
	}
	if err != nil {
		return err
	}
	for _, n := range d.Nodes {
		for _, w := range n.Unenforced() {
			cmd.PrintErrf("%s: warning: node %s: %s\n", command.ShownName(o.file), n.Name, w)
		}
	}
	return command.UnlessAsked(ctx, func() error {
		view := newPlanView(d, o.out != "")
		if o.output == "json" {
			return view.json(cmd.OutOrStdout())
		}
		return view.table(cmd.OutOrStdout())
	})
}

// rotateAll stands for all chains in --rotate.
const rotateAll = "all"

func (o *planCommand) checkRotate(d model.Domain) error {
	for _, name := range o.rotate {
		if name != rotateAll && !slices.ContainsFunc(d.Chains, func(c model.Chain) bool { return c.Name == name }) {
			return command.Usagef("--rotate %s: %s has no chain of that name; name one of them, or all", name, o.file)
		}
	}
	return nil
}

func (o *planCommand) change() planChange {
	return planChange{keepEpochs: o.keepEpochs, rotate: func(chain string) bool {
		return slices.Contains(o.rotate, rotateAll) || slices.Contains(o.rotate, chain)
	}}
}
