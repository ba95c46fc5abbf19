package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

func newGetCommand(in surroundings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get",
		Short: "Read the counters and interfaces of a node, and the controller's state",
		Example: `  waystamp get refusals
  waystamp get paths --watch
  waystamp get functions --lab ws-1a2b -o yaml`,
	}
	cmd.AddCommand(
		newNounCommand(in, "refusals", "Packets refused, by reason", helpRefusals, readRefusals),
		newNounCommand(in, "errors", "ICMP errors sent for refused packets", helpErrors, readErrors),
		newNounCommand(in, "paths", "Packets stamped and verified, by path", helpPaths, readPathCounts),
		newFunctionsCommand(in),
		newStreamsCommand(in),
		newNounCommand(in, "services", "Services of this node's gateway", helpServices, readServices),
		newSessionsCommand(in),
		newNounCommand(in, "revoked", "Identities that were revoked at this node's gateway", helpRevoked, readRevoked),
		newReadersCommand(in),
		newControllerNoun("nodes", "Nodes of the controller, and the plan of each", helpNodes, readNodes),
		newControllerNoun("chains", "Chains of the controller: active, preparing, degraded or blocked", helpChains, readChains),
		newControllerNoun("changes", "The controller's change in progress, and the nodes that it waits for", helpChanges, readChanges),
		newEventsCommand(),
		newControllerNoun("epochs", "Epochs that the controller's nodes hold", helpEpochs, readEpochs),
		newControllerNoun("roots", "Roots of the controller's CA that nodes trust", helpRoots, readRoots),
		newNounCommand(in, "interfaces", "Programs attached to each interface", helpInterfaces, readInterfaces),
	)
	return cmd
}

const helpWatch = `

Without --socket, --instance and --lab the command reads all agents of this machine,
except agents of labs. --watch prints rates per second, at each --interval, until
Ctrl-C; with -o json or yaml it prints the counters themselves.`

const (
	helpRefusals = `Packets that the node has refused, by reason. Reasons without packets are left out.
REPORTED packets were forwarded because of on-violation: report of their chain or, for
the reasons unproven and unverified, guard: audit. DROPPED packets were dropped. waystamp
watch prints them one by one, and docs/reference/refusals.md lists all reasons.`

	helpErrors = `ICMP errors that the node has sent for packets that it refused. Each of those packets
counts as a refusal, too. The number of errors per second is limited (rate limit),
and some packets get none, such as ICMP errors.`

	helpPaths = `Packets of each path that the node is on: a headend and an endpoint count the packets
that they stamped, an egress the packets that it verified. FRAMES counts frames on a
wire; a super-packet of the kernel counts as several frames. BYTES counts bytes of the
inner packets, without outer headers.`

	helpFunctions = `Packets through this node's functions of the kinds unaware and netfilter. RX counts packets to
the function, TX packets from it, BYPASSED packets that went past it. docs/how-to/functions.md
explains each column; CUT is the sum of rx_cut and tx_cut. -o json has further counters.

With the name of a function of kind netfilter: the counters of its rules, by argument
(packets as they entered) and by named counter.`

	helpStreams = `Connections through this node's functions of kind stream, since each one's worker was
started. NOW counts open connections; REFUSED connections above a limit; UNREACHED connections
without a server; RESET connections that one side, a function, or a limit on idle connections
ended. IN and OUT count bytes to the function and from it, both directions together; -o json
also has the bytes that were not copied, and the bytes of each operation. What match has
found, and gunzip and open have refused, is on standard error. With the name of a function: its
connections alone.

--connections lists the connections that have not ended, in the order of functions, clients and
servers, and at most --limit of each node. STATE is opening, open, client-ended or server-ended; IDLE
is how long there was no packet. FROM CLIENT and TO SERVER count bytes that came from the client,
and bytes that the function has sent to the server; FROM SERVER and TO CLIENT the same of the way
back. -o json also has the four paths that its packets take to the function and from it. All of that
is from the kernel; when a connection was opened is not known.`

	helpInterfaces = `The interfaces of the node's plan and of its functions, and where the data path is
attached to them: TC and XDP at ingress, OUT at TC egress. Errors and warnings are on
standard error: a new plan that was refused, parts of the plan that are not in force,
node settings that block packets, pins that were removed.`
)

// gauge is a number that is no counter: it has no rate.
type gauge uint64

// reading is the answer of one agent.
type reading struct {
	node   string
	output any // for -o json and yaml
	header []string
	rows   [][]any // uint64: a counter
	// key is how many cells at the start of a row tell it from others.
	key             int
	error           string
	problems, warns []string
	notes           []string // beside the table
	lacks           string   // what was asked for by its name, and this node does not have
}

// reader asks an agent.
type reader func(ctx context.Context, c client) (reading, error)

type getOptions struct {
	targets  targetFlags
	output   string
	watch    bool
	interval time.Duration
}

func newNounCommand(in surroundings, noun, short, long string, read reader) *cobra.Command {
	o := getOptions{targets: targetFlags{in: in}}
	cmd := &cobra.Command{
		Use:   noun,
		Short: short,
		Long:  long + helpWatch,
		Args:  command.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return o.run(cmd, read) },
	}
	o.targets.add(cmd)
	command.OutputFlag(cmd, &o.output, "table", "json", "yaml")
	cmd.Flags().BoolVarP(&o.watch, "watch", "w", false, "print rates until Ctrl-C")
	cmd.Flags().DurationVar(&o.interval, "interval", time.Second, "`time` between two readings, with --watch")
	return cmd
}

// newFunctionsCommand is a noun that takes the name of one function.
func newFunctionsCommand(in surroundings) *cobra.Command {
	var name string
	cmd := newNounCommand(in, "functions", "Packets through functions without SRv6, and the counters of their rules", helpFunctions, func(ctx context.Context, c client) (reading, error) {
		if name != "" {
			return readRules(ctx, c, name)
		}
		return readFunctions(ctx, c)
	})
	run := cmd.RunE
	cmd.Use, cmd.Args = "functions [NAME]", command.UsageArgs(cobra.MaximumNArgs(1))
	cmd.Example = `  waystamp get functions
  waystamp get functions fw --watch`
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			name = args[0]
		}
		return run(cmd, args)
	}
	return cmd
}

// newStreamsCommand is a noun that takes the name of one function, and lists connections on request.
func newStreamsCommand(in surroundings) *cobra.Command {
	var name string
	var connections bool
	var limit int
	cmd := newNounCommand(in, "streams", "Connections through functions of kind stream", helpStreams, func(ctx context.Context, c client) (reading, error) {
		if connections {
			return readConnections(ctx, c, name, limit)
		}
		return readStreams(ctx, c, name)
	})
	run := cmd.RunE
	cmd.Use, cmd.Args = "streams [NAME]", command.UsageArgs(cobra.MaximumNArgs(1))
	cmd.Example = `  waystamp get streams
  waystamp get streams zip --connections --limit 20
  waystamp get streams --connections -o json`
	cmd.Flags().BoolVar(&connections, "connections", false, "list the connections")
	cmd.Flags().IntVar(&limit, "limit", 100, fmt.Sprintf("`number` of connections of each node that are listed at most, up to %d", api.ConnectionsMax))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			name = args[0]
		}
		if cmd.Flags().Changed("limit") && !connections {
			return command.Usagef("--limit is for a list of connections; give --connections as well")
		}
		if limit < 1 || limit > api.ConnectionsMax {
			return command.Usagef("--limit is %d; expect 1 to %d", limit, api.ConnectionsMax)
		}
		return run(cmd, args)
	}
	return cmd
}

func (o *getOptions) run(cmd *cobra.Command, read reader) error {
	if err := command.CheckOutput(o.output, "table", "json", "yaml"); err != nil {
		return err
	}
	if o.interval <= 0 {
		return command.Usagef("--interval is %s; expect more than 0", o.interval)
	}
	targets, err := o.targets.find()
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	var clients []client
	for _, t := range targets {
		c := o.targets.in.connect(t.socket)
		defer c.Close()
		clients = append(clients, c)
	}
	ask := func() (all []reading, err error) {
		for _, c := range clients {
			r, err := read(ctx, c)
			if err != nil {
				return nil, err
			}
			all = append(all, r)
		}
		return all, nil
	}
	all, err := ask()
	if err != nil {
		return err
	}
	if !o.watch {
		return o.print(cmd, all)
	}
	tick := time.NewTicker(o.interval)
	defer tick.Stop()
	for last := time.Now(); ; {
		if o.output != "table" {
			if err := o.print(cmd, all); err != nil {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		next, err := ask()
		if err != nil {
			return withoutCancel(ctx, err)
		}
		now := time.Now()
		if o.output == "table" {
			fmt.Fprintln(cmd.OutOrStdout(), now.Format(time.TimeOnly))
			if err := writeReadings(cmd.OutOrStdout(), rates(all, next, now.Sub(last))); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout())
		}
		all, last = next, now
	}
}

func (o *getOptions) print(cmd *cobra.Command, all []reading) error {
	if o.output != "table" {
		for _, r := range all {
			if err := command.WriteOutput(cmd.OutOrStdout(), o.output, r.output); err != nil {
				return err
			}
		}
		return nil
	}
	for _, r := range all {
		of := ""
		if len(all) > 1 {
			of = r.node + ": "
		}
		if r.error != "" {
			cmd.PrintErrln("waystamp: error:", of+r.error)
		}
		for _, w := range slices.Concat(r.problems, r.warns) {
			cmd.PrintErrln("waystamp: warning:", of+w)
		}
		for _, n := range r.notes {
			cmd.PrintErrln(of + n)
		}
	}
	if !slices.ContainsFunc(all, func(r reading) bool { return r.lacks == "" }) {
		cmd.PrintErrf("waystamp: warning: the selected nodes have no %s; waystamp get functions lists their functions\n", all[0].lacks)
	}
	return writeReadings(cmd.OutOrStdout(), all)
}

// writeReadings makes one table of them, with the node where there are several.
func writeReadings(out io.Writer, all []reading) error {
	return command.WriteTable(out, func(row func(...any)) {
		for i, r := range all {
			var lead []any
			if i == 0 {
				var header []any
				if len(all) > 1 {
					header = append(header, "NODE")
				}
				for _, h := range r.header {
					header = append(header, h)
				}
				row(header...)
			}
			if len(all) > 1 {
				lead = []any{r.node}
			}
			for _, cells := range r.rows {
				line := slices.Clone(lead)
				for _, c := range cells {
					if g, ok := c.(gauge); ok {
						c = uint64(g)
					}
					line = append(line, c)
				}
				row(line...)
			}
		}
	})
}

// rates puts what was counted per second in the place of counters. A row that was not
// there before has counted from 0.
func rates(before, now []reading, d time.Duration) []reading {
	out := slices.Clone(now)
	for i := range out {
		r := &out[i]
		old := map[string][]any{}
		for _, cells := range before[i].rows {
			old[fmt.Sprint(cells[:r.key]...)] = cells
		}
		counters := map[int]bool{}
		rows := make([][]any, len(r.rows))
		for j, cells := range r.rows {
			rows[j] = slices.Clone(cells)
			was := old[fmt.Sprint(cells[:r.key]...)]
			for k, c := range cells {
				n, ok := c.(uint64)
				if !ok {
					continue
				}
				counters[k] = true
				if was != nil {
					if then := was[k].(uint64); then <= n { // else it has begun again
						n -= then
					}
				}
				rows[j][k] = command.Number(strconv.FormatFloat(float64(n)/d.Seconds(), 'f', 1, 64))
			}
		}
		r.rows, r.header = rows, slices.Clone(r.header)
		for k := range counters {
			r.header[k] += "/S"
		}
	}
	return out
}

func readRefusals(ctx context.Context, c client) (reading, error) {
	v, err := c.Counters(ctx)
	r := reading{
		node: v.Node, output: api.RefusalsOutput{Version: api.Version, Node: v.Node, Refusals: v.Refusals},
		header: []string{"REASON", "DROPPED", "REPORTED", "MEANING"}, key: 1,
	}
	for _, f := range v.Refusals {
		r.rows = append(r.rows, []any{f.Reason, f.Dropped, f.Reported, f.Text})
	}
	return r, err
}

func readErrors(ctx context.Context, c client) (reading, error) {
	v, err := c.Counters(ctx)
	return reading{
		node: v.Node, output: api.ErrorsOutput{Version: api.Version, Node: v.Node, Errors: v.Errors},
		header: []string{"ERROR", "PACKETS"}, key: 1,
		rows: [][]any{
			{"packet too big", v.Errors.TooBig},
			{"time exceeded", v.Errors.TimeExceeded},
			{"parameter problem", v.Errors.Parameter},
			{"destination unreachable", v.Errors.Unreachable},
			{"not sent: rate limit", v.Errors.Suppressed},
			{"not sent: no valid receiver", v.Errors.Unanswerable},
		},
	}, err
}

func readPathCounts(ctx context.Context, c client) (reading, error) {
	v, err := c.Counters(ctx)
	r := reading{
		node: v.Node, output: api.PathsOutput{Version: api.Version, Node: v.Node, Paths: v.Paths},
		header: []string{"CHAIN", "DIRECTION", "ROLE", "FUNCTION", "PACKETS", "FRAMES", "BYTES"}, key: 4,
	}
	for _, p := range v.Paths {
		r.rows = append(r.rows, []any{p.Chain, p.Direction + plan.FromTo(p.From, p.To), p.Role, command.OrDash(p.Function), p.Packets, p.Frames, p.Bytes})
	}
	return r, err
}

func readFunctions(ctx context.Context, c client) (reading, error) {
	v, err := c.Functions(ctx)
	r := reading{
		node: v.Node, output: api.FunctionsOutput{Version: api.Version, Node: v.Node, Functions: v.Functions},
		header: []string{"FUNCTION", "RECOGNISE", "RX_SUCCESS", "RX_IGNORED", "TX_SUCCESS", "TX_IGNORED", "TX_NOT_CACHED", "TX_PLAIN", "TX_ORIGINATED", "BYPASSED", "EXPIRED", "EVICTED", "CUT", "WAIT", "IN_FLIGHT", "CACHE"},
		key:    1,
	}
	for _, f := range v.Functions {
		var inFlight uint64
		if f.InFlight != nil {
			inFlight = *f.InFlight
		}
		r.rows = append(r.rows, []any{
			f.Function, f.Recognise, f.RxSuccess, f.RxIgnored, f.TxSuccess, f.TxIgnored, f.TxNotCached, f.TxPlain, f.TxOriginated, f.Bypassed, f.Expired, f.Evicted,
			f.RxCut + f.TxCut, f.Wait().Round(time.Microsecond), gauge(inFlight), gauge(f.Cache),
		})
	}
	return r, err
}

func readStreams(ctx context.Context, c client, name string) (reading, error) {
	v, err := c.Functions(ctx)
	v.Functions = slices.DeleteFunc(v.Functions, func(f api.Function) bool { return f.Stream == nil || name != "" && !model.IsOf(f.Function, name) })
	r := reading{
		node: v.Node, output: api.StreamsOutput{Version: api.Version, Node: v.Node, Streams: v.Functions},
		header: []string{"FUNCTION", "WORKER", "RESTARTS", "NOW", "OPENED", "REFUSED", "UNREACHED", "RESET", "IN", "OUT"}, key: 1,
	}
	if name != "" && len(v.Functions) == 0 {
		r.lacks = "function " + name + " of kind stream"
	}
	for _, f := range v.Functions {
		s := f.Stream
		if s.Error != "" {
			r.problems = append(r.problems, "function "+f.Function+" gets no connections: "+s.Error)
		}
		for _, d := range s.Draining {
			open := "an unknown number of connections"
			if d.Now != nil {
				open = fmt.Sprintf("%d connections", *d.Now)
			}
			r.notes = append(r.notes, fmt.Sprintf("function %s: worker %d takes no more connections, and goes on with %s, for %s at most", f.Function, d.Worker, open, time.Duration(d.Seconds)*time.Second))
		}
		for _, d := range []struct {
			to         string
			operations []api.StreamOperation
		}{{"server", s.Run}, {"client", s.Back}} {
			for _, o := range d.operations {
				if o.Events > 0 && o.Name == "match" {
					r.notes = append(r.notes, fmt.Sprintf("function %s: match has found something in %d connections, towards the %s", f.Function, o.Events, d.to))
				} else if o.Events > 0 {
					r.notes = append(r.notes, fmt.Sprintf("function %s: %s has refused what came in %d connections, towards the %s", f.Function, o.Name, o.Events, d.to))
				}
			}
		}
		if s.Room > 0 {
			r.warns = append(r.warns, fmt.Sprintf("function %s: its worker has descriptors for %d connections, fewer than its limit allows; raise the agent's limit of open files (LimitNOFILE=)", f.Function, s.Room))
		}
		r.rows = append(r.rows, []any{
			f.Function, gauge(s.Worker), gauge(s.Restarts), gauge(s.Now), s.Opened, s.Refused + s.PartMismatch + s.Unsealed + s.Peer + s.Untrusted + s.Expired + s.Revoked + s.NoKey, s.Unreached,
			s.ResetByClient + s.ResetByServer + s.ResetByFunction + s.ResetByLimit, s.ToServer.In + s.ToClient.In, s.ToServer.Out + s.ToClient.Out,
		})
	}
	return r, err
}

// readConnections reads the first connections of a function of kind stream, or of all.
func readConnections(ctx context.Context, c client, name string, limit int) (reading, error) {
	v, err := c.Connections(ctx, name, limit)
	r := reading{
		node: v.Node, output: v,
		header: []string{"FUNCTION", "CLIENT", "SERVER", "CHAIN", "STATE", "IDLE", "FROM CLIENT", "TO SERVER", "FROM SERVER", "TO CLIENT"}, key: 3,
	}
	if name != "" && len(v.Functions) == 0 {
		r.lacks = "function " + name + " of kind stream"
	}
	if n := len(v.Connections); v.All > n {
		r.notes = append(r.notes, fmt.Sprintf("%d of %d connections; name a function, or give a higher --limit", n, v.All))
	}
	for _, k := range v.Connections {
		r.rows = append(r.rows, []any{
			k.Function, k.Client, k.Server, command.OrDash(k.Chain), k.State, time.Duration(k.Idle) * time.Second,
			k.ClientSide.Received, k.ServerSide.Sent, k.ServerSide.Received, k.ClientSide.Sent,
		})
	}
	return r, err
}

// readRules reads what the rules of one function count. A node without the function
// gives no rows; if none of those asked has it, the table is empty, with a warning.
func readRules(ctx context.Context, c client, name string) (reading, error) {
	v, err := c.Functions(ctx)
	v.Functions = slices.DeleteFunc(v.Functions, func(f api.Function) bool { return f.Function != name })
	r := reading{
		node: v.Node, output: api.FunctionsOutput{Version: api.Version, Node: v.Node, Functions: v.Functions},
		header: []string{"FUNCTION", "COUNTER", "NAME", "PACKETS", "BYTES"}, key: 3,
	}
	if len(v.Functions) == 0 {
		r.lacks = "function " + name
	}
	for _, f := range v.Functions {
		if f.Rules == nil {
			r.warns = append(r.warns, fmt.Sprintf("function %s has no rules: it is not of kind netfilter", name))
			continue
		}
		if f.Rules.Error != "" {
			r.problems = append(r.problems, f.Rules.Error)
		}
		for _, n := range f.Rules.Arguments {
			r.rows = append(r.rows, []any{name, "argument", n.Name, n.Packets, n.Bytes})
		}
		for _, n := range f.Rules.Counters {
			r.rows = append(r.rows, []any{name, "counter", n.Name, n.Packets, n.Bytes})
		}
	}
	return r, err
}

func readInterfaces(ctx context.Context, c client) (reading, error) {
	s, err := c.Status(ctx)
	r := reading{
		node: s.Node, error: s.Error, problems: s.Problems, warns: s.Warnings,
		output: api.InterfacesOutput{
			Version: api.Version, Node: s.Node, Interfaces: s.Interfaces, Error: s.Error, Problems: s.Problems, Warnings: s.Warnings,
		},
		header: []string{"INTERFACE", "ROLE", "UNMATCHED", "DATAPATH", "TC", "XDP", "OUT", "FUNCTIONS"}, key: 1,
	}
	for _, i := range s.Interfaces {
		unmatched := "-"
		if i.Role == model.RoleEdge.String() {
			unmatched = i.Unmatched
		}
		r.rows = append(r.rows, []any{
			i.Name, roleText(i), unmatched, i.Datapath, attachedText(i.TC, i.Clsact), attachedText(i.XDP, false), attachedText(i.Out, i.Clsact),
			command.OrDash(strings.Join(i.Functions, ",")),
		})
	}
	return r, err
}

func roleText(i api.Interface) string {
	if len(i.Functions) > 0 {
		return "function"
	}
	return i.Role
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
