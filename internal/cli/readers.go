package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

func newReadersCommand(in surroundings) *cobra.Command {
	var file, chain string
	cmd := newNounCommand(in, "readers", "Who can read the payload of sealed chains: by what nodes hold, or by a domain file", `The ends on the node that hold payload of sealed chains in clear, by the plan in force: the gateway and
functions that have the keys for it now. OPENS FROM says whose sessions an end opens, SEALS FOR who opens what it sends on,
EPOCHS of which epochs it has keys, KEY OF who has made its own key: node, and the controller has signed it, or plan, whoever
makes the plan. CLEAR ON the interfaces on which root of the node sees payload in clear. Nodes
know their own ends alone: ask all of them, as with --lab or several of --socket.

With -f FILE compile a domain file, and say for each chain between which two ends each of its
parts is sealed, with the identities that the ends show each other, which functions hold
payload in clear, and which see packets alone (SEALED FOR). On a chain of no service nothing is
sealed.

With the name of a chain: that one alone.`, func(ctx context.Context, c client) (reading, error) { return readHeldReaders(ctx, c, chain) })
	run := cmd.RunE
	cmd.Use, cmd.Args = "readers [CHAIN]", command.UsageArgs(cobra.MaximumNArgs(1))
	cmd.Example = `  waystamp get readers --lab ws-1a2b
  waystamp get readers scan
  waystamp get readers scan -f examples/zerotrust.yaml -o json`
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		output, err := cmd.Flags().GetString("output")
		if err != nil {
			return err
		}
		if file == "" {
			if len(args) > 0 {
				chain = args[0]
			}
			return run(cmd, args)
		}
		for _, flag := range []string{"socket", "instance", "lab", "watch", "interval"} {
			if cmd.Flags().Changed(flag) {
				return command.Usagef("--%s is for what nodes hold, and -f names a domain file; leave one out", flag)
			}
		}
		return printReaders(cmd, file, output, args)
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "domain `file`, in place of nodes; - is standard input")
	return cmd
}

// printReaders prints those of a domain file.
func printReaders(cmd *cobra.Command, file, output string, args []string) error {
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
}

// readHeldReaders asks a node; of one chain, or of all if it is "".
func readHeldReaders(ctx context.Context, c client, chain string) (reading, error) {
	v, err := c.Readers(ctx)
	v.Readers = slices.DeleteFunc(slices.Clone(v.Readers), func(r api.HeldReader) bool { return chain != "" && r.Chain != chain })
	r := reading{
		node: v.Node, output: v,
		header: []string{"CHAIN", "READER", "IDENTITY", "OPENS FROM", "SEALS FOR", "EPOCHS", "KEY OF", "PROCESS", "CLEAR ON"}, key: 2,
	}
	for _, h := range v.Readers {
		process := "-"
		if h.Process != 0 {
			process = fmt.Sprint(h.Process)
		}
		r.rows = append(r.rows, []any{
			h.Chain, h.Function, command.OrDash(h.Identity), h.From, h.To, command.OrDash(strings.Trim(fmt.Sprint(h.Epochs), "[]")), command.OrDash(h.Key), process, command.OrDash(strings.Join(h.Clear, ", ")),
		})
		switch {
		case h.Key != "node":
		case h.CertificateEnds == nil:
			r.problems = append(r.problems, fmt.Sprintf("%s of chain %s has no certificate of the controller: its connections are refused until it has one", h.Function, h.Chain))
		case time.Now().After(*h.CertificateEnds):
			r.problems = append(r.problems, fmt.Sprintf("the certificate of %s of chain %s ended at %s: its connections are refused until the controller has signed another", h.Function, h.Chain, h.CertificateEnds.UTC().Format(time.RFC3339)))
		}
		if h.Error != "" {
			r.problems = append(r.problems, fmt.Sprintf("%s of chain %s does not run: %s", h.Function, h.Chain, h.Error))
		}
	}
	return r, err
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
