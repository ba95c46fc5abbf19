package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

func newReadersCommand() *cobra.Command {
	var file, output string
	cmd := &cobra.Command{
		Use:   "readers [CHAIN] -f FILE",
		Short: "Who can read the payload of chains, by a domain file",
		Long: `Compile a domain file, and say for each chain, or the one that is named, who can read its payload:
between which two ends each of its parts is sealed, with the identities that the ends show each
other, which functions hold payload in clear, and which see packets alone (SEALED FOR). On a
chain of no service nothing is sealed.`,
		Example: `  waystamp get readers -f examples/zerotrust.yaml
  waystamp get readers scan -f examples/zerotrust.yaml -o json`,
		Args: command.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if file == "" {
				return command.Usagef("-f is missing; name the domain's file, as in waystamp get readers -f examples/zerotrust.yaml")
			}
			if err := command.CheckOutput(output, "table", "json", "yaml"); err != nil {
				return err
			}
			ctx := cmd.Context()
			m, err := command.ReadManifest(ctx, file, cmd.InOrStdin(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if len(args) > 0 && !slices.ContainsFunc(m.Domain.Chains, func(c model.Chain) bool { return c.Name == args[0] }) {
				return command.Usagef("%s has no chain %s", command.ShownName(file), args[0])
			}
			d, err := await.Do(ctx, func() (*plan.Domain, error) { return plan.Compile(m.Domain, nil) })
			if err != nil {
				return err
			}
			v := readersIn(m.Domain, d, args)
			if output != "table" {
				return command.WriteOutput(cmd.OutOrStdout(), output, v)
			}
			return writeReaders(cmd.OutOrStdout(), v)
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "domain `file`; - is standard input")
	command.OutputFlag(cmd, &output, "table", "json", "yaml")
	return cmd
}

// readersIn says who reads what; of all chains if none is named.
func readersIn(m model.Domain, d *plan.Domain, named []string) api.ReadersOutput {
	out := api.ReadersOutput{Version: api.Version, Chains: []api.ChainsReaders{}}
	view := newPlanView(d, false)
	attached := map[string]model.Attached{}
	for _, f := range m.Functions {
		if f.Stream.Attached != (model.Attached{}) {
			attached[f.Name+" on "+f.Node] = f.Stream.Attached
		}
	}
	for _, c := range m.Chains {
		if len(named) > 0 && c.Name != named[0] {
			continue
		}
		found := false
		for _, s := range view.Services {
			for _, o := range s.Chains {
				if o.Chain != c.Name {
					continue
				}
				found = true
				if len(o.Parts) == 0 { // a proxy's
					out.Chains = append(out.Chains, api.ChainsReaders{Chain: c.Name, Service: s.Name, Readers: []string{}, Parts: []api.SealedPart{}})
					continue
				}
				r := api.ChainsReaders{Chain: c.Name, Service: s.Name, Readers: []string{}}
				for _, who := range o.Readers {
					if a, ok := attached[who]; ok {
						who = fmt.Sprintf("%s (in clear also on its links %s and %s)", who, a.To, a.From)
					}
					r.Readers = append(r.Readers, who)
				}
				for _, p := range o.Parts {
					r.Parts = append(r.Parts, api.SealedPart{From: p.From, FromIdentity: p.FromID, To: p.To, ToIdentity: p.ToID, Sealed: p.Sees})
				}
				out.Chains = append(out.Chains, r)
			}
		}
		if !found {
			out.Chains = append(out.Chains, api.ChainsReaders{Chain: c.Name, Readers: []string{}, Parts: []api.SealedPart{}})
		}
	}
	return out
}

func writeReaders(w io.Writer, v api.ReadersOutput) error {
	for i, c := range v.Chains {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if c.Service == "" {
			fmt.Fprintf(w, "chain %s: of no service; everybody on its way reads what its senders have not sealed themselves\n", c.Chain)
			continue
		}
		if len(c.Parts) == 0 {
			fmt.Fprintf(w, "chain %s, of service %s: its gateway is a proxy; from there on everybody on the way reads what clients have not sealed themselves\n", c.Chain, c.Service)
			continue
		}
		fmt.Fprintf(w, "chain %s, of service %s\n", c.Chain, c.Service)
		err := command.WriteTable(w, func(row func(...any)) {
			row("SEALED FROM", "WHO IS", "TO", "WHO IS", "SEALED FOR")
			for _, p := range c.Parts {
				row(p.From, command.OrDash(p.FromIdentity), p.To, p.ToIdentity, command.OrDash(strings.Join(p.Sealed, ", ")))
			}
		})
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "read by: %s\n", strings.Join(c.Readers, "; "))
		fmt.Fprintln(w, "by nobody else: all other functions, nodes and links of the chain have headers of IP and TCP, and sealed payload")
	}
	return nil
}
