package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// What describe takes, as the controller names it.
const (
	aboutNode     = "node"
	aboutChain    = "chain"
	aboutFunction = "function"
)

// NewDescribeCommand is "waystamp describe".
func NewDescribeCommand() *cobra.Command { return newDescribeCommand(onThisMachine()) }

func newDescribeCommand(in surroundings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "describe",
		Short: "Print everything that the controller knows of a node, a chain or a function, or a gateway of a session",
		Example: `  waystamp describe node r2
  waystamp describe chain web
  waystamp describe function fw -o yaml
  waystamp describe session 17`,
	}
	cmd.AddCommand(
		newDescribeNoun(aboutNode, "A node: its state, its plan, and the chains that pass it", `Print the state of a node, with its reason and since when; the revisions of the plan in force and of the plan that it
should hold; parts of the plan that are not in force; the chains that pass it and their epochs; and what the current change waits for.`),
		newDescribeNoun(aboutChain, "A chain: its state, its nodes, and its epochs", `Print the state of a chain, with its reason and since when; the nodes that it passes and the plan of each; its epochs, and
the nodes that each waits for.`),
		newDescribeNoun(aboutFunction, "A function: its node, and the chains that pass it", `Print the node of a function with its state, and the chains that pass the function with their states and epochs.`),
		newDescribeSession(in),
	)
	return cmd
}

const helpDescribe = `

The command also prints the packets that nodes have refused, by reason, with an explanation of the latest, and the last
events. Both are of the time since this controller leads, and the packets are a sample: waystamp get refusals counts all of them on
the nodes. A state without a time was so when this controller began to lead.`

func newDescribeNoun(kind, short, long string) *cobra.Command {
	var at controllerFlag
	var output string
	cmd := &cobra.Command{
		Use:     kind + " NAME",
		Short:   short,
		Long:    long + helpDescribe,
		Example: fmt.Sprintf("  waystamp describe %s %s", kind, map[string]string{aboutNode: "r2", aboutChain: "web", aboutFunction: "fw"}[kind]),
		Args:    command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := command.CheckOutput(output, "table", "json", "yaml"); err != nil {
				return err
			}
			if args[0] == "" {
				return command.Usagef("the name is empty")
			}
			return at.with(cmd.Context(), func(c adminClient) error {
				answer, err := c.Describe(cmd.Context(), connect.NewRequest(&v1.DescribeRequest{Kind: kind, Name: args[0]}))
				if err != nil {
					return err
				}
				d := described(kind, args[0], answer.Msg)
				if output != "table" {
					return command.WriteOutput(cmd.OutOrStdout(), output, d)
				}
				return writeDescription(cmd.OutOrStdout(), d)
			})
		},
	}
	command.OutputFlag(cmd, &output, "table", "json", "yaml")
	at.add(cmd)
	cmd.ValidArgsFunction = at.completeFirst(kind)
	return cmd
}

// completionPatience is how long a shell waits for names.
const completionPatience = 2 * time.Second

// names are those of a kind that the controller has; none if it does not answer.
func (c *controllerFlag) names(ctx context.Context, kind string) (names []string) {
	ctx, cancel := context.WithTimeout(ctx, completionPatience)
	defer cancel()
	_ = c.with(ctx, func(client adminClient) error { // a shell shows no errors
		answer, err := client.Describe(ctx, connect.NewRequest(&v1.DescribeRequest{Kind: kind}))
		if err == nil {
			names = answer.Msg.Names
		}
		return err
	})
	return names
}

// completeFirst completes the first argument, of a kind.
func (c *controllerFlag) completeFirst(kind string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return c.names(contextOf(cmd), kind), cobra.ShellCompDirectiveNoFileComp
	}
}

// contextOf is the command's context, which a completion may not have.
func contextOf(cmd *cobra.Command) context.Context {
	if ctx := cmd.Context(); ctx != nil {
		return ctx
	}
	return context.Background()
}

func described(kind, name string, m *v1.DescribeResponse) api.DescribeOutput {
	d := api.DescribeOutput{
		Version: api.Version, Kind: kind, Name: name, Facts: []api.ControlFact{},
		Nodes: controlNodes(m.Nodes), Chains: controlChains(m.Chains), Epochs: controlEpochs(m.Epochs),
		Step: m.Step, Since: timeOf(m.Since), Problem: m.Problem, Waiting: controlWaiting(m.Waiting),
		Refusals: []api.ControlRefusal{}, Events: controlEvents(m.Events),
	}
	for _, f := range m.Facts {
		d.Facts = append(d.Facts, api.ControlFact{Name: f.Name, Value: f.Value})
	}
	for _, r := range m.Refusals {
		d.Refusals = append(d.Refusals, api.ControlRefusal{Node: r.Node, Reason: r.Reason, Packets: r.Packets, Last: r.Last.AsTime(), Sentence: r.Sentence})
	}
	return d
}

// writeDescription prints tables, each with a title; those without a row are left out.
func writeDescription(out io.Writer, d api.DescribeOutput) error {
	var err error
	table := func(title string, header []any, rows [][]any) {
		if err != nil || len(rows) == 0 {
			return
		}
		if _, err = fmt.Fprintf(out, "\n%s\n", title); err != nil {
			return
		}
		err = command.WriteTable(out, func(row func(...any)) {
			if header != nil {
				row(header...)
			}
			for _, r := range rows {
				row(r...)
			}
		})
	}
	_, err = fmt.Fprintln(out, d.Kind, d.Name)
	var rows [][]any
	for _, f := range d.Facts {
		rows = append(rows, []any{"  " + f.Name, f.Value})
	}
	if err == nil {
		err = command.WriteTable(out, func(row func(...any)) {
			for _, r := range rows {
				row(r...)
			}
		})
	}
	rows = nil
	for _, n := range d.Nodes {
		rows = append(rows, []any{n.Name, n.State, command.OrDash(shownTime(n.StateSince)), n.Revision, n.Wanted, n.Reason})
	}
	table("Nodes", []any{"NAME", "STATE", "SINCE", "REVISION", "WANTED", "REASON"}, rows)
	rows = nil
	for _, n := range d.Nodes {
		for _, p := range n.Problems {
			rows = append(rows, []any{n.Name, p})
		}
	}
	table("Problems", nil, rows)
	rows = nil
	for _, c := range d.Chains {
		rows = append(rows, []any{c.Name, c.State, command.OrDash(shownTime(c.Since)), c.Reason})
	}
	table("Chains", []any{"NAME", "STATE", "SINCE", "REASON"}, rows)
	var header []any
	epochs := epochTable(d.Epochs)
	for _, h := range epochs.header {
		header = append(header, h)
	}
	table("Epochs", header, epochs.rows)
	rows = nil
	for _, w := range d.Waiting {
		rows = append(rows, []any{w.Step, w.Node, w.State, shownTime(&w.Since), w.Reason})
	}
	table("The change waits for", []any{"STEP", "NODE", "STATE", "SINCE", "REASON"}, rows)
	if d.Problem != "" {
		table("The last applied domain file is not in progress", nil, [][]any{{d.Problem}})
	}
	rows = nil
	for _, r := range d.Refusals {
		rows = append(rows, []any{r.Node, r.Reason, r.Packets, shownTime(&r.Last), r.Sentence})
	}
	table("Refused packets", []any{"NODE", "REASON", "PACKETS", "LAST", "WHICH SHOWS"}, rows)
	table("Events", []any{"TIME", "KIND", "NAME", "EVENT"}, eventRows(d.Events))
	return err
}

func controlEvents(list []*v1.Event) []api.ControlEvent {
	out := []api.ControlEvent{}
	for _, e := range list {
		out = append(out, api.ControlEvent{Time: e.Time.AsTime(), Kind: e.Kind, Name: e.Name, Text: e.Text})
	}
	return out
}

func eventRows(events []api.ControlEvent) (rows [][]any) {
	for _, e := range events {
		rows = append(rows, []any{shownTime(&e.Time), e.Kind, e.Name, e.Text})
	}
	return rows
}

// newEventsCommand is "get events".
func newEventsCommand() *cobra.Command {
	var at controllerFlag
	var output string
	cmd := &cobra.Command{
		Use:   "events [NAME]",
		Short: "Events in the controller's domain: states of nodes and chains, changes, calls",
		Long: `Print the events since this controller leads, the latest last: nodes and chains that have another state than
before, the commits of changes, and the calls of operators that changed something. With NAME only those of the node or the chain of this name.
The controller keeps the last 1000 in memory; the file of --audit has the calls on disk.`,
		Example: `  waystamp get events
  waystamp get events r2 -o json`,
		Args: command.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := command.CheckOutput(output, "table", "json", "yaml"); err != nil {
				return err
			}
			about := ""
			if len(args) > 0 {
				about = args[0]
			}
			return at.with(cmd.Context(), func(c adminClient) error {
				answer, err := c.Events(cmd.Context(), connect.NewRequest(&v1.EventsRequest{About: about}))
				if err != nil {
					return err
				}
				out := api.EventsOutput{Version: api.Version, Since: answer.Msg.Since.AsTime(), Events: controlEvents(answer.Msg.Events)}
				if output != "table" {
					return command.WriteOutput(cmd.OutOrStdout(), output, out)
				}
				return writeReadings(cmd.OutOrStdout(), []reading{{header: []string{"TIME", "KIND", "NAME", "EVENT"}, rows: eventRows(out.Events)}})
			})
		},
	}
	command.OutputFlag(cmd, &output, "table", "json", "yaml")
	at.add(cmd)
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return append(at.names(contextOf(cmd), aboutNode), at.names(contextOf(cmd), aboutChain)...), cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}
