package cli

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

type traceOptions struct {
	in         surroundings
	controller controllerFlag
	lab        string
	direction  string
	packets    uint
	flow       string
	timeout    time.Duration
	output     string
}

// directionBoth stands for both directions of a chain.
const directionBoth = "both"

func newTraceCommand(in surroundings) *cobra.Command {
	o := traceOptions{in: in}
	cmd := &cobra.Command{
		Use:   "trace CHAIN",
		Short: "Follow the next packets of a chain from hop to hop",
		Long: `Ask the controller to trace the next packets of a chain. The headend sets the O-flag (RFC 9259)
in the SRH of so many packets, over labels the flag in the word behind them, and each hop that stamps such a packet, and the egress that
verifies it, sends an event. The command prints for each packet its hops, the time between
them, the value CML of the proof before and after each stamp, and what became of the packet: verified,
refused by a node, or lost behind the last hop. The packets are those of the users: the command sends none.

The time between hops on two nodes is as exact as their clocks agree. With the scheme opot the values and
the packet's number are not printed: they are masked on each link. A refusal is printed if the node
has sampled it. A connection through a function on byte streams takes several paths, each of which is traced.

With --flow the headend takes only packets of that flow: source and destination, each an address or a prefix, the
protocol, by name or number, and with TCP, UDP and others the two ports; any stands for a field that does not matter. It is the
flow of the forward direction; packets of the reverse direction have its addresses and ports exchanged. They are compared as the packet
enters the path. A fragment has no ports: a flow with ports takes none, one without takes them.

If you interrupt the command, the headends set the flag no more.
Only an admin may trace.

Exit code 4 if a packet was refused or lost, 1 if no packet came before the time-out.`,
		Example: `  waystamp trace web
  waystamp trace web --direction reverse --packets 1 --timeout 5m
  waystamp trace web --flow 2001:db8:7::5,2001:db8:8::/64,tcp,any,443
  waystamp trace web --direction both --flow any,2001:db8:8::1,icmpv6
  waystamp trace web --lab demo -o json`,
		Args: command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return o.run(cmd, args[0]) },
	}
	f := cmd.Flags()
	f.StringVar(&o.direction, "direction", "forward", "`direction`: forward, reverse or both")
	f.UintVar(&o.packets, "packets", 3, fmt.Sprintf("`number` of packets of each path, %d at most", event.TracePacketsMax))
	f.StringVar(&o.flow, "flow", "", "`flow` of the packets: SRC,DST,PROTO or SRC,DST,PROTO,SPORT,DPORT, with any for a field that does not matter (default all packets)")
	f.DurationVar(&o.timeout, "timeout", 30*time.Second, "`duration` to wait for packets, 1s to 1h")
	f.StringVar(&o.lab, "lab", "", "`prefix` of a lab: ask its controller")
	command.OutputFlag(cmd, &o.output, "table", "json", "yaml")
	o.controller.add(cmd)
	cmd.ValidArgsFunction = o.controller.completeFirst(aboutChain)
	completeWith(cmd, "direction", func() []string { return []string{"forward", "reverse", directionBoth} })
	completeWith(cmd, "lab", func() []string {
		labs, _ := lab.List(in.labs)
		return labs
	})
	return cmd
}

func (o *traceOptions) run(cmd *cobra.Command, chain string) error {
	if err := command.CheckOutput(o.output, "table", "json", "yaml"); err != nil {
		return err
	}
	request := &v1.TraceRequest{Chain: chain, Direction: o.direction, Packets: uint32(o.packets), TimeoutSeconds: uint32(o.timeout / time.Second)}
	switch {
	case chain == "":
		return command.Usagef("the name of the chain is empty")
	case !slices.Contains([]string{"forward", "reverse", directionBoth}, o.direction):
		return command.Usagef("--direction: expect forward, reverse or %s, have %q", directionBoth, o.direction)
	case o.packets < 1 || o.packets > event.TracePacketsMax:
		return command.Usagef("--packets: expect 1 to %d, have %d", event.TracePacketsMax, o.packets)
	case o.timeout < time.Second || o.timeout > time.Hour:
		return command.Usagef("--timeout: expect 1s to 1h, have %v", o.timeout)
	}
	if o.direction == directionBoth {
		request.Direction = ""
	}
	flow := ""
	if cmd.Flags().Changed("flow") {
		f, err := model.ParseFlow(o.flow)
		if err != nil {
			return command.Usagef("--flow: %v", err)
		}
		flow = f.String()
	}
	if err := o.useLab(); err != nil {
		return err
	}
	ctx := cmd.Context()
	printer := tracePrinter{out: cmd.OutOrStdout(), notes: cmd.ErrOrStderr(), table: o.output == "table"}
	printer.all = api.TraceOutput{Version: api.Version, Chain: chain, Flow: flow, Paths: []api.TracePath{}, Packets: []api.TracePacket{}, Warnings: []string{}}
	err := o.controller.with(ctx, func(c adminClient) error { return printer.follow(ctx, c, request, flow) })
	if ctx.Err() != nil {
		err = nil
	}
	if err == nil && !printer.table {
		err = command.WriteOutput(printer.out, o.output, printer.all)
	}
	if err != nil || ctx.Err() != nil {
		return err
	}
	return printer.verdict(o.timeout)
}

// useLab asks the controller of a lab, if one is named.
func (o *traceOptions) useLab() error {
	if o.lab == "" {
		return nil
	}
	if len(o.controller.addresses) > 0 {
		return command.Usagef("--lab and --controller exclude each other; give one of them")
	}
	l, err := lab.Open(o.in.labs, o.lab, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	if !l.IsControlled() {
		return command.Usagef("lab %s has no controller: its agents follow plan files, and only a controller can lay the hops of several nodes side by side; bring it up with waystamp lab up --with-controller", o.lab)
	}
	o.controller.addresses = []string{l.ControllerAddress()}
	return nil
}

// tracePrinter prints packets as they come, or keeps all of them for one document.
type tracePrinter struct {
	out, notes io.Writer
	table      bool
	all        api.TraceOutput
}

// errNoFlows is a controller that does not have the call.
var errNoFlows = errors.New("the controller is of an earlier version, which cannot trace a flow; update it, or leave --flow out")

func (p *tracePrinter) follow(ctx context.Context, c adminClient, request *v1.TraceRequest, flow string) error {
	var stream *connect.ServerStreamForClient[v1.TraceResponse]
	var err error
	if flow == "" {
		stream, err = c.Trace(ctx, connect.NewRequest(request))
	} else {
		stream, err = c.TraceFlow(ctx, connect.NewRequest(&v1.TraceFlowRequest{Trace: request, Flow: flow}))
	}
	if err != nil {
		return err
	}
	defer stream.Close()
	ended := false
	for stream.Receive() {
		m := stream.Msg()
		switch {
		case m.Begun != nil:
			p.begin(m.Begun)
		case m.Packet != nil:
			packet := tracedPacket(m.Packet)
			p.all.Packets = append(p.all.Packets, packet)
			if err := p.packet(packet); err != nil {
				return err
			}
		case m.Ended != nil:
			ended = true
			p.all.TimedOut, p.all.Foreign, p.all.Suppressed = m.Ended.TimedOut, m.Ended.Foreign, m.Ended.Suppressed
		}
	}
	if err := stream.Err(); flow != "" && connect.CodeOf(err) == connect.CodeUnimplemented {
		return errNoFlows
	} else if err != nil {
		return err
	}
	if !ended && ctx.Err() == nil {
		return errors.New("the controller has ended the connection; run the command again")
	}
	return nil
}

func (p *tracePrinter) begin(b *v1.TraceBegun) {
	for _, x := range b.Paths {
		t := api.TracePath{Path: x.Path, Direction: x.Direction, From: x.From, To: x.To, Scheme: x.Scheme, Headends: append([]string{}, x.Headends...), Positions: []api.TracePosition{}}
		for _, at := range x.Positions {
			t.Positions = append(t.Positions, api.TracePosition{Node: at.Node, Function: at.Function})
		}
		p.all.Paths = append(p.all.Paths, t)
	}
	for _, w := range b.Warnings {
		p.all.Warnings = append(p.all.Warnings, w)
		fmt.Fprintln(p.notes, "waystamp: warning:", w)
	}
}

func tracedPacket(m *v1.TracedPacket) api.TracePacket {
	out := api.TracePacket{
		Path: m.Path, Epoch: m.Epoch, Number: m.Number, Outcome: m.Outcome, Sentence: m.Sentence,
		Hops: []api.TraceHop{}, Refusals: []api.TraceRefusal{},
	}
	for _, h := range m.Hops {
		out.Hops = append(out.Hops, api.TraceHop{
			Time: h.Time.AsTime(), Position: h.Position, Node: h.Node, Function: h.Function, Interface: h.Interface, Hook: h.Hook,
			Before: hex.EncodeToString(h.Before), After: hex.EncodeToString(h.After), Verified: h.Verified, Bytes: h.Bytes,
		})
	}
	for _, r := range m.Refusals {
		out.Refusals = append(out.Refusals, api.TraceRefusal{
			Time: r.Time.AsTime(), Node: r.Node, Interface: r.Interface, Hook: r.Hook, Reason: r.Reason, Text: r.Text, Reported: r.Reported,
		})
	}
	return out
}

// pathOf is the path of a packet.
func (p *tracePrinter) pathOf(packet api.TracePacket) (path api.TracePath) {
	for _, x := range p.all.Paths {
		if x.Path == packet.Path {
			return x
		}
	}
	return path
}

func (p *tracePrinter) packet(k api.TracePacket) error {
	if !p.table {
		return nil
	}
	of := p.pathOf(k)
	way := of.Direction
	if of.From != "" {
		way += " from " + of.From
	}
	if of.To != "" {
		way += " to " + of.To
	}
	fmt.Fprintf(p.out, "chain %s, %s: path 0x%08x, epoch %d", p.all.Chain, way, k.Path, k.Epoch)
	if k.Number != "" {
		fmt.Fprintf(p.out, ", packet 0x%s", k.Number)
	}
	fmt.Fprintln(p.out)
	last := len(of.Positions) - 1
	err := command.WriteTable(p.out, func(row func(...any)) {
		row("  POSITION", "NODE", "FUNCTION", "INTERFACE", "HOOK", command.Number("SINCE LAST"), command.Number("BYTES"), "CML BEFORE", "CML AFTER")
		for i, h := range k.Hops {
			function, since, after := h.Function, time.Duration(0), h.After
			switch {
			case function != "":
			case h.Position == 0:
				function = "(headend)"
			case int(h.Position) == last:
				function = "(egress)"
			}
			if i > 0 {
				since = h.Time.Sub(k.Hops[i-1].Time)
			}
			if h.Verified {
				after = "verified"
			}
			row(fmt.Sprintf("%10d", h.Position), h.Node, command.OrDash(function), h.Interface, h.Hook,
				command.Number(since.Round(time.Microsecond).String()), uint64(h.Bytes), command.OrDash(h.Before), command.OrDash(after))
		}
	})
	if err != nil {
		return err
	}
	for _, r := range k.Refusals {
		verdict := "refused"
		if r.Reported {
			verdict = "reported, and let go on,"
		}
		fmt.Fprintf(p.out, "  %s at %s (%s, %s): %s: %s\n", verdict, r.Node, r.Interface, r.Hook, r.Reason, r.Text)
	}
	_, err = fmt.Fprintf(p.out, "  %s: %s\n\n", k.Outcome, k.Sentence)
	return err
}

// verdict is the exit code, with what else there is to say.
func (p *tracePrinter) verdict(timeout time.Duration) error {
	if p.all.Foreign > 0 {
		fmt.Fprintf(p.notes, "%d packets of the chain had the O-flag, and no headend has told of them: somebody inside of the domain sets it\n", p.all.Foreign)
	}
	if p.all.Suppressed > 0 {
		fmt.Fprintf(p.notes, "%d hops are missing: a CPU of a node tells of %d in a second at most\n", p.all.Suppressed, abi.TracedPerSecond)
	}
	if len(p.all.Packets) == 0 {
		of := ""
		if p.all.Flow != "" {
			of = " of flow " + p.all.Flow
		}
		return fmt.Errorf("no packet%s took chain %s within %s; send some, or wait longer with --timeout", of, p.all.Chain, timeout)
	}
	if p.all.TimedOut {
		fmt.Fprintf(p.notes, "only %d packets came within %s\n", len(p.all.Packets), timeout)
	}
	if slices.ContainsFunc(p.all.Packets, func(k api.TracePacket) bool { return k.Outcome != "verified" }) {
		return &command.ExitError{Code: command.ExitRefused}
	}
	return nil
}
