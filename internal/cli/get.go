package cli

import (
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/model"
)

// NewGetCommand is "waystamp get".
func NewGetCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get",
		Short: "Read what a node's agent knows",
	}
	cmd.AddCommand(
		newGetCommand("refusals", "Packets refused, by reason", helpRefusals, renderRefusals),
		newGetCommand("errors", "ICMP errors that refused packets were answered with", helpErrors, renderErrors),
		newGetCommand("paths", "Packets stamped and verified, by path", helpPaths, renderPaths),
		newGetCommand("functions", "Packets through functions that know nothing of SRv6, by function", helpFunctions, renderFunctions),
		newGetCommand("interfaces", "What is attached to which interface", helpInterfaces, renderInterfaces),
	)
	return cmd
}

const (
	helpRefusals = `Packets that the node has refused, by reason: those with no packet are left out.
REPORTED were let go on all the same, since their chain says on-violation: report;
DROPPED were not. waystamp watch prints them one by one, and
docs/reference/refusals.md lists all reasons.`

	helpErrors = `ICMP errors that the node has sent, because of packets that it refused; each of
those counts as a refusal, too. At most so many are sent in a second (rate limit),
and none where nobody may be told, such as about other errors.`

	helpPaths = `What the node has done for each path that it is on: a headend and an endpoint count
the packets that they stamped, an egress those that it verified. FRAMES is what
they are on a wire, of which a super-packet of the kernel is several. BYTES are of
the packets inside, without outer headers.`

	helpFunctions = `Packets through the functions of kind unaware of this node. RX went to the function,
TX came back from it. docs/how-to/functions.md says what each column counts; CUT is
rx_cut and tx_cut together, and more is in -o json.`

	helpInterfaces = `The interfaces of the node's plan and of its functions, and where the data path is
attached to them: TC and XDP as packets come in, OUT at TC as they leave. What is
wrong is on standard error: a new plan that was refused, parts of the plan that
are not in force, settings of the machine that stop packets, pins that somebody
has removed.`
)

// getRenderer asks an agent and writes the answer.
type getRenderer func(cmd *cobra.Command, c *agent.Client, asJSON bool) error

func newGetCommand(noun, short, long string, render getRenderer) *cobra.Command {
	var socket, output string
	cmd := &cobra.Command{
		Use:   noun,
		Short: short,
		Long:  long,
		Args:  command.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return command.Usagef("--output is %q; expect table or json", output)
			}
			c := agent.NewClient(socket)
			defer c.Close()
			return render(cmd, c, output == "json")
		},
	}
	socketFlag(cmd, &socket)
	cmd.Flags().StringVarP(&output, "output", "o", "table", "`format` of the result: table or json")
	return cmd
}

func renderRefusals(cmd *cobra.Command, c *agent.Client, asJSON bool) error {
	v, err := c.Counters(cmd.Context())
	if err != nil {
		return err
	}
	if asJSON {
		return command.WriteJSON(cmd.OutOrStdout(), api.RefusalsOutput{Version: api.Version, Node: v.Node, Refusals: v.Refusals})
	}
	return command.WriteTable(cmd.OutOrStdout(), func(row func(...any)) {
		row("REASON", "DROPPED", "REPORTED", "WHAT THE PACKET WAS LIKE")
		for _, r := range v.Refusals {
			row(r.Reason, r.Dropped, r.Reported, r.Text)
		}
	})
}

func renderErrors(cmd *cobra.Command, c *agent.Client, asJSON bool) error {
	v, err := c.Counters(cmd.Context())
	if err != nil {
		return err
	}
	if asJSON {
		return command.WriteJSON(cmd.OutOrStdout(), api.ErrorsOutput{Version: api.Version, Node: v.Node, Errors: v.Errors})
	}
	return command.WriteTable(cmd.OutOrStdout(), func(row func(...any)) {
		row("ERROR", "PACKETS")
		row("packet too big", v.Errors.TooBig)
		row("time exceeded", v.Errors.TimeExceeded)
		row("parameter problem", v.Errors.Parameter)
		row("destination unreachable", v.Errors.Unreachable)
		row("not sent: rate limit", v.Errors.Suppressed)
		row("not sent: nobody to tell", v.Errors.Unanswerable)
	})
}

func renderPaths(cmd *cobra.Command, c *agent.Client, asJSON bool) error {
	v, err := c.Counters(cmd.Context())
	if err != nil {
		return err
	}
	if asJSON {
		return command.WriteJSON(cmd.OutOrStdout(), api.PathsOutput{Version: api.Version, Node: v.Node, Paths: v.Paths})
	}
	return command.WriteTable(cmd.OutOrStdout(), func(row func(...any)) {
		row("CHAIN", "DIRECTION", "ROLE", "FUNCTION", "PACKETS", "FRAMES", "BYTES")
		for _, p := range v.Paths {
			row(p.Chain, p.Direction, p.Role, command.OrDash(p.Function), p.Packets, p.Frames, p.Bytes)
		}
	})
}

func renderFunctions(cmd *cobra.Command, c *agent.Client, asJSON bool) error {
	v, err := c.Functions(cmd.Context())
	if err != nil {
		return err
	}
	if asJSON {
		return command.WriteJSON(cmd.OutOrStdout(), api.FunctionsOutput{Version: api.Version, Node: v.Node, Functions: v.Functions})
	}
	return command.WriteTable(cmd.OutOrStdout(), func(row func(...any)) {
		row("FUNCTION", "RECOGNISE", "RX_SUCCESS", "RX_IGNORED", "TX_SUCCESS", "TX_IGNORED", "TX_NOT_CACHED", "TX_PLAIN", "EXPIRED", "EVICTED", "CUT", "WAIT", "IN_FLIGHT", "CACHE")
		for _, f := range v.Functions {
			var inFlight uint64
			if f.InFlight != nil {
				inFlight = *f.InFlight
			}
			row(f.Function, f.Recognise, f.RxSuccess, f.RxIgnored, f.TxSuccess, f.TxIgnored, f.TxNotCached, f.TxPlain, f.Expired, f.Evicted, f.RxCut+f.TxCut, f.Wait().Round(time.Microsecond), inFlight, uint64(f.Cache))
		}
	})
}

func renderInterfaces(cmd *cobra.Command, c *agent.Client, asJSON bool) error {
	s, err := c.Status(cmd.Context())
	if err != nil {
		return err
	}
	if asJSON {
		return command.WriteJSON(cmd.OutOrStdout(), api.InterfacesOutput{
			Version: api.Version, Node: s.Node, Interfaces: s.Interfaces, Error: s.Error, Problems: s.Problems, Warnings: s.Warnings,
		})
	}
	if s.Error != "" {
		cmd.PrintErrln("waystamp: error:", s.Error)
	}
	for _, w := range slices.Concat(s.Problems, s.Warnings) {
		cmd.PrintErrln("waystamp: warning:", w)
	}
	return command.WriteTable(cmd.OutOrStdout(), func(row func(...any)) {
		row("INTERFACE", "ROLE", "UNMATCHED", "DATAPATH", "TC", "XDP", "OUT", "FUNCTIONS")
		for _, i := range s.Interfaces {
			unmatched := "-"
			if i.Role == model.RoleEdge.String() {
				unmatched = i.Unmatched
			}
			role := i.Role
			if len(i.Functions) > 0 {
				role = "function"
			}
			row(i.Name, role, unmatched, i.Datapath, attachedText(i.TC, i.Clsact), attachedText(i.XDP, false), attachedText(i.Out, i.Clsact), command.OrDash(strings.Join(i.Functions, ",")))
		}
	})
}

func attachedText(there, clsact bool) string {
	switch {
	case there && clsact:
		return "clsact"
	case there:
		return "attached"
	}
	return "-"
}
