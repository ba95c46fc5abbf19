package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/manifest"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
)

const (
	defaultControllerSocket = "/run/waystamp/controller.sock"
	controllerVariable      = "WAYSTAMP_CONTROLLER"
)

// controllerFlag says which controller is meant, or several, which are tried in turn.
type controllerFlag struct {
	addresses []string
	identity  string // a file; for addresses over TCP
}

func (c *controllerFlag) add(cmd *cobra.Command) {
	cmd.Flags().StringSliceVar(&c.addresses, "controller", nil, "`address` of the controller: unix:/PATH on its machine, or tcp:HOST:PORT; several are tried in turn (default $"+controllerVariable+", or unix:"+defaultControllerSocket+")")
	cmd.Flags().StringVar(&c.identity, "identity", "", "`file` of waystamp operator add, for tcp: (default $"+identityVariable+")")
}

// checkOperatorsAddress holds the rule for addresses of controllers that operators call.
func checkOperatorsAddress(a string) error {
	if path, ok := strings.CutPrefix(a, "unix:"); ok && filepath.IsAbs(path) {
		return nil
	}
	if at, ok := strings.CutPrefix(a, "tcp:"); ok {
		if host, port, err := net.SplitHostPort(at); err == nil && host != "" && port != "" {
			return nil
		}
	}
	return command.Usagef("%q is not the address of a controller for operators; expect unix:/PATH on the controller's machine, or tcp:HOST:PORT", a)
}

// adminClient talks to a controller as an operator.
type adminClient struct {
	waystampv1connect.AdminClient
	address   string
	transport *http.Transport
}

func (c adminClient) Close() { c.transport.CloseIdleConnections() }

func (c *controllerFlag) connect() (adminClient, error) {
	addresses := c.addresses
	if len(addresses) == 0 {
		addresses = strings.Split(cmp.Or(os.Getenv(controllerVariable), "unix:"+defaultControllerSocket), ",")
	}
	dial, err := c.dialer(addresses)
	if err != nil {
		return adminClient{}, err
	}
	t := &http.Transport{DialContext: dial}
	return adminClient{
		waystampv1connect.NewAdminClient(&http.Client{Transport: t}, "http://controller"), strings.Join(addresses, ", "), t,
	}, nil
}

// said is what a controller's error says to people.
func (c adminClient) said(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if e, ok := errors.AsType[*connect.Error](err); ok && connect.IsWireError(err) {
		err := errors.New(e.Message())
		switch e.Code() {
		case connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodeFailedPrecondition:
			return &command.ExitError{Code: command.ExitUsage, Err: err}
		}
		return fmt.Errorf("the controller: %w", err)
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) || connect.CodeOf(err) == connect.CodeUnavailable {
		return fmt.Errorf("no controller answers at %s: %w; run this on its machine as root, or name it with --controller and --identity", c.address, errors.Unwrap(err))
	}
	return err
}

// withController runs f with a connection.
func (c *controllerFlag) with(ctx context.Context, f func(adminClient) error) error {
	client, err := c.connect()
	if err != nil {
		return err
	}
	defer client.Close()
	err = f(client)
	if _, exit := errors.AsType[*command.ExitError](err); exit {
		return err
	}
	return client.said(ctx, err)
}

// readFile checks a domain's file as waystamp plan does, with the rules of its functions, and
// gives it as it goes to the controller.
func readFile(cmd *cobra.Command, name string) (*v1.File, error) {
	if name == "" {
		return nil, command.Usagef("-f is missing; name the domain's file, as in waystamp %s -f examples/paper.yaml", cmd.Name())
	}
	var in io.Reader = cmd.InOrStdin()
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, fmt.Errorf("read the domain's file: %w", err)
		}
		defer f.Close()
		in = f
	}
	source, err := io.ReadAll(io.LimitReader(in, manifest.SourceMax+1))
	if err != nil {
		return nil, fmt.Errorf("read the domain's file: %w", err)
	}
	m, err := command.ReadManifest(cmd.Context(), name, bytes.NewReader(source), cmd.ErrOrStderr())
	if err != nil {
		return nil, err
	}
	file := &v1.File{Name: command.ShownName(name), Source: source, Rules: map[string]string{}}
	for _, f := range m.Domain.Functions {
		if f.Netfilter.RulesFile != "" {
			file.Rules[f.Name] = f.Netfilter.Rules
		}
	}
	return file, nil
}

func writeDifferences(out io.Writer, list []*v1.Difference) {
	signs := map[string]string{"added": "+", "removed": "-", "changed": "~"}
	for _, d := range list {
		fmt.Fprintf(out, "%s %s %s\n", cmp.Or(signs[d.Change], d.Change), d.Kind, d.Name)
	}
}

// NewApplyCommand is "waystamp apply".
func NewApplyCommand() *cobra.Command {
	var at controllerFlag
	var file string
	var dry, wait, force bool
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Put a domain file in force, through the controller",
		Long: `Send a domain file to the controller. The controller checks and compiles it, and carries
out the change. A changed path gets a new epoch; all nodes have the epoch before a
headend sends packets in it. Chains that are new in the file are added, and chains that
are not in the file are removed. The command prints the changes: + added, ~ changed, - removed.

Without --wait the command ends when the controller has accepted the file. With --wait it
ends when all headends send in the new epochs, and prints on standard error the nodes that it
waits for. If you interrupt the command, the change continues.

A chain that takes the packets between a node and the controller could cut the node off from
the controller. The file is refused, with the names of these nodes, unless you give --force. The addresses
are those of the connections of this moment.

Exit code 2 if the file is refused: every problem is shown with its line.`,
		Example: `  waystamp apply -f domain.yaml --dry-run
  waystamp apply -f domain.yaml --wait`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := readFile(cmd, file)
			if err != nil {
				return err
			}
			return at.with(cmd.Context(), func(c adminClient) error {
				r, err := c.Apply(cmd.Context(), connect.NewRequest(&v1.ApplyRequest{File: f, DryRun: dry, Force: force}))
				if err != nil {
					return err
				}
				for _, w := range r.Msg.CutOff {
					cmd.PrintErrln("waystamp: warning:", w)
				}
				writeDifferences(cmd.OutOrStdout(), r.Msg.Differences)
				if dry || !wait {
					return nil
				}
				return follow(cmd, c, r.Msg.Serial)
			})
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "domain `file`; - is standard input")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only print what would change")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until all headends have turned")
	cmd.Flags().BoolVar(&force, "force", false, "also if a chain takes the packets between nodes and the controller")
	at.add(cmd)
	return cmd
}

// followPatience is how long follow asks again when nobody answers: another controller has to be elected,
// or the one that there is to start anew.
const (
	followPatience = 30 * time.Second
	followPause    = 500 * time.Millisecond
)

// follow waits until a request is carried out.
func follow(cmd *cobra.Command, c adminClient, serial uint64) error {
	last, heard := "", time.Now()
	for {
		err := followOnce(cmd, c, serial, &last, &heard)
		if err == nil || cmd.Context().Err() != nil || connect.CodeOf(err) != connect.CodeUnavailable || time.Since(heard) > followPatience {
			return err
		}
		if line := "the controller does not answer; asking again"; line != last {
			cmd.PrintErrln(line)
			last = line
		}
		select {
		case <-cmd.Context().Done():
		case <-time.After(followPause):
		}
	}
}

// errEnded is a stream that the controller has ended.
var errEnded = connect.NewError(connect.CodeUnavailable, errors.New("the controller has ended the connection; the change goes on"))

func followOnce(cmd *cobra.Command, c adminClient, serial uint64, said *string, heard *time.Time) error {
	stream, err := c.Follow(cmd.Context(), connect.NewRequest(&v1.FollowRequest{Progress: true}))
	if err != nil {
		return err
	}
	defer stream.Close()
	last := *said
	defer func() { *said = last }()
	for stream.Receive() {
		*heard = time.Now()
		s := stream.Msg().State
		if s.Settled && s.Serial >= serial {
			return nil
		}
		if s.Problem != "" && s.WantedSerial == serial && !strings.HasPrefix(s.Problem, "it waits") {
			return &command.ExitError{Code: command.ExitFailed, Err: errors.New(s.Problem)}
		}
		line := s.Problem
		if s.Step != "" {
			line = s.Step
			if len(s.Waiting) > 0 {
				line += ": waiting for " + strings.Join(waits(s), ", ")
			}
		}
		if line != "" && line != last {
			cmd.PrintErrln(line)
		}
		last = line
	}
	err = stream.Err()
	if err == nil || !connect.IsWireError(err) { // it was cut
		return errEnded
	}
	return err
}

// NewDiffCommand is "waystamp diff".
func NewDiffCommand() *cobra.Command {
	var at controllerFlag
	var file string
	cmd := &cobra.Command{
		Use:   "diff -f FILE",
		Short: "Compare a domain file with the controller's domain file",
		Long: `Print the changes that waystamp apply would make: + added, ~ changed, - removed. Exit
code 3 if there are changes.`,
		Example: `  waystamp diff -f domain.yaml`,
		Args:    command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := readFile(cmd, file)
			if err != nil {
				return err
			}
			return at.with(cmd.Context(), func(c adminClient) error {
				r, err := c.Diff(cmd.Context(), connect.NewRequest(&v1.DiffRequest{File: f}))
				if err != nil {
					return err
				}
				writeDifferences(cmd.OutOrStdout(), r.Msg.Differences)
				if len(r.Msg.Differences) > 0 {
					return &command.ExitError{Code: command.ExitDifferent}
				}
				return nil
			})
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "domain `file`; - is standard input")
	at.add(cmd)
	return cmd
}

// NewDeleteCommand is "waystamp delete".
func NewDeleteCommand() *cobra.Command {
	var at controllerFlag
	cmd := &cobra.Command{
		Use:   "delete CHAIN",
		Short: "Take a chain out of the domain, until the next apply",
		Long: `Remove a chain from the controller's domain. Packets that match the chain then need no
proof. If a file with this chain is applied later, the controller adds the chain again.`,
		Example: `  waystamp delete web`,
		Args:    command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return at.with(cmd.Context(), func(c adminClient) error {
				_, err := c.Delete(cmd.Context(), connect.NewRequest(&v1.DeleteRequest{Chain: args[0]}))
				return err
			})
		},
	}
	at.add(cmd)
	cmd.ValidArgsFunction = at.completeFirst(aboutChain)
	return cmd
}

// NewRotateCommand is "waystamp rotate".
func NewRotateCommand() *cobra.Command {
	var at controllerFlag
	var all, wait bool
	cmd := &cobra.Command{
		Use:   "rotate CHAIN...",
		Short: "Give chains fresh secrets, without losing a packet",
		Long: `Give chains the next epoch with fresh secrets. All nodes have the new secrets before a headend uses
them, and the old secrets are erased after their last packets have had time to arrive. Rotations that are requested
during a change are joined into one, which follows the change.`,
		Example: `  waystamp rotate web
  waystamp rotate --all --wait`,
		Args: command.UsageArgs(cobra.ArbitraryArgs),
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return command.Usagef("name chains, or give --all")
			}
			return at.with(cmd.Context(), func(c adminClient) error {
				r, err := c.Rotate(cmd.Context(), connect.NewRequest(&v1.RotateRequest{Chains: args, All: all}))
				if err != nil || !wait {
					return err
				}
				return follow(cmd, c, r.Msg.Serial)
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all chains")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until all headends have turned")
	at.add(cmd)
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		names := at.names(contextOf(cmd), aboutChain)
		return slices.DeleteFunc(names, func(name string) bool { return slices.Contains(args, name) }), cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}

// NewNodeCommand is "waystamp node".
func NewNodeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Let nodes join the controller, and revoke nodes",
	}
	cmd.AddCommand(newTokenCommand(), newRevokeCommand())
	return cmd
}

func newTokenCommand() *cobra.Command {
	var at controllerFlag
	var valid time.Duration
	var reinstate bool
	cmd := &cobra.Command{
		Use:   "token NAME",
		Short: "Print a token with which one machine can join as a node, once",
		Long: `Print a token for waystamp agent --join. Until the token is used or expires, every machine that
has it can join as this node: protect it like a password. It contains the fingerprint of the
controller's root, so that the machine accepts no other controller.`,
		Example: `  waystamp node token r1
  waystamp node token r1 --valid 10m`,
		Args: command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if valid < time.Second {
				return command.Usagef("--valid %s is too short; give a second or more", valid)
			}
			return at.with(cmd.Context(), func(c adminClient) error {
				r, err := c.CreateToken(cmd.Context(), connect.NewRequest(&v1.CreateTokenRequest{
					Node: args[0], ValidSeconds: uint32(min(valid, 365*24*time.Hour) / time.Second), Reinstate: reinstate,
				}))
				if err != nil {
					return err
				}
				cmd.PrintErrf("for node %s, once, until %s\n", args[0], r.Msg.Expires.AsTime().Local().Format(time.DateTime))
				_, err = fmt.Fprintln(cmd.OutOrStdout(), r.Msg.Token)
				return err
			})
		},
	}
	cmd.Flags().DurationVar(&valid, "valid", time.Hour, "`time` for which the token is valid")
	cmd.Flags().BoolVar(&reinstate, "reinstate", false, "also for a node that was revoked: its machine was set up anew")
	at.add(cmd)
	cmd.ValidArgsFunction = at.completeFirst(aboutNode)
	return cmd
}

func newRevokeCommand() *cobra.Command {
	var at controllerFlag
	var yes bool
	cmd := &cobra.Command{
		Use:   "revoke NAME",
		Short: "Revoke a node: its certificate and its secrets become invalid at once",
		Long: `End the connections of a node, refuse its key permanently, and give fresh secrets to all paths through
it, without waiting for other nodes. Packets of these paths that are under way are refused.
A chain that needs the node (a function, the egress, its only headend) is blocked: the egress refuses
its packets until you apply a file in which the chain does not need the node. Needs --yes.`,
		Example: `  waystamp node revoke r2 --yes`,
		Args:    command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !yes {
				return command.Usagef("node %s would be revoked, and chains that need it blocked; add --yes to revoke it", args[0])
			}
			return at.with(cmd.Context(), func(c adminClient) error {
				r, err := c.Revoke(cmd.Context(), connect.NewRequest(&v1.RevokeRequest{Node: args[0]}))
				if err != nil {
					return err
				}
				for _, chain := range r.Msg.Blocked {
					fmt.Fprintf(cmd.OutOrStdout(), "chain %s: blocked\n", chain)
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do it")
	at.add(cmd)
	cmd.ValidArgsFunction = at.completeFirst(aboutNode)
	return cmd
}

// waits are the nodes that a change waits for, with what hinders those that refuse.
func waits(s *v1.State) (names []string) {
	for _, w := range s.Waiting {
		name := w.Node
		if w.State == "refusing" {
			name += fmt.Sprintf(" (it refuses its plan since %s: %s)", w.Since.AsTime().Local().Format(time.DateTime), w.Reason)
		}
		names = append(names, name)
	}
	return names
}

// newControllerNoun is a noun of get that the controller answers.
func newControllerNoun(noun, short, long string, read func(s *v1.State) reading) *cobra.Command {
	var at controllerFlag
	var output string
	cmd := &cobra.Command{
		Use:   noun,
		Short: short,
		Long:  long,
		Args:  command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := command.CheckOutput(output, "table", "json", "yaml"); err != nil {
				return err
			}
			return at.with(cmd.Context(), func(c adminClient) error {
				answer, err := c.Get(cmd.Context(), connect.NewRequest(&v1.GetRequest{}))
				if err != nil {
					return err
				}
				s := answer.Msg.State
				if s.Problem != "" {
					cmd.PrintErrln("waystamp: warning: the last applied domain file is not in progress:", s.Problem)
				}
				if s.Step != "" {
					cmd.PrintErrf("a change is under way since %s: %s", s.Since.AsTime().Local().Format(time.DateTime), s.Step)
					if len(s.WaitingFor) > 0 {
						cmd.PrintErr(", waiting for ", strings.Join(waits(s), ", "))
					}
					cmd.PrintErrln()
				}
				r := read(s)
				if output != "table" {
					return command.WriteOutput(cmd.OutOrStdout(), output, r.output)
				}
				return writeReadings(cmd.OutOrStdout(), []reading{r})
			})
		},
	}
	command.OutputFlag(cmd, &output, "table", "json", "yaml")
	at.add(cmd)
	return cmd
}

const (
	helpNodes = `The nodes of the controller's domain. REVISION is the revision of the plan that the node's
kernel holds, WANTED the revision of the plan that the node should hold. A node is ready; behind, until it
has acknowledged its plan; refusing, if it could not put the plan in force; incompatible, if its agent is too old for the plan, which is then not sent; away, without a connection (its data
path stays in force); expected, before it has joined; or revoked.`

	helpChains = `The chains of the controller's domain. A chain is active; preparing, until all of its nodes hold it; degraded, as long as a
node on it is away, refuses its plan, does not know what is in it, or lacks parts of it: packets go on as the kernel of that node
has it; or blocked: it needs a node that was revoked, and its packets are refused at the egress.`

	helpChanges = `The change in progress, with a line for each node that it waits for. The step is prepare, until functions
and egresses hold the new epochs, or turn, until headends send in them. A node that refuses its plan delays the change; SINCE
is the time of the first refusal. Correct the cause in REASON, revoke the node, or apply another file, which replaces the
change. If the change was already in step turn, it stays listed until all headends have turned.`

	helpEpochs = `The epochs that nodes hold. An epoch is preparing, while functions and egresses get its secrets;
active: headends send in it; or draining: its last packets may be under way. It is erased when its egress has seen all numbers that
its headends gave out, or at UNTIL. WAITING FOR are the nodes on its path that have to acknowledge their plans before it goes on, or what it
drains by: packets that its egress has not seen, or time, since packets are lost or nodes do not tell their numbers.`

	helpRoots = `The roots that nodes and controllers trust. One signs certificates. While the CA is replaced (waystamp controller
rotate-ca) there is a second one: coming, until all nodes trust it; or going, until all nodes have certificates of the one
that signs. WAITING FOR are the nodes that have not done that. ROOT is the start of the certificate's SHA-256.`
)

func readRoots(s *v1.State) reading {
	out := api.RootsOutput{Version: api.Version, Roots: []api.ControlRoot{}}
	r := reading{header: []string{"ROOT", "STATE", "ENDS", "SINCE", "WAITING FOR"}}
	for _, x := range s.Roots {
		root := api.ControlRoot{Pin: x.Pin, State: x.State, Ends: x.Ends.AsTime(), WaitingFor: append([]string{}, x.WaitingFor...)}
		since := ""
		if x.Since != nil {
			t := x.Since.AsTime()
			root.Since, since = &t, t.Local().Format(time.DateTime)
		}
		out.Roots = append(out.Roots, root)
		r.rows = append(r.rows, []any{x.Pin[:min(12, len(x.Pin))], x.State, root.Ends.Local().Format(time.DateTime), since, strings.Join(x.WaitingFor, ", ")})
	}
	r.output = out
	return r
}

func readNodes(s *v1.State) reading {
	out := api.NodesOutput{Version: api.Version, Nodes: controlNodes(s.Nodes)}
	r := reading{header: []string{"NAME", "STATE", "REVISION", "WANTED", "REASON"}, output: out}
	for _, n := range out.Nodes {
		r.rows = append(r.rows, []any{n.Name, n.State, n.Revision, n.Wanted, strings.Join(slices.DeleteFunc(append([]string{n.Reason}, n.Problems...), func(s string) bool { return s == "" }), "; ")})
	}
	return r
}

func controlNodes(list []*v1.NodeState) []api.ControlNode {
	out := []api.ControlNode{}
	for _, n := range list {
		out = append(out, api.ControlNode{
			Name: n.Name, State: n.State, Reason: n.Reason, Wanted: n.WantedRevision, Revision: n.Revision, Problems: append([]string{}, n.Problems...),
			Since: timeOf(n.Since), StateSince: timeOf(n.StateSince),
		})
	}
	return out
}

// timeOf is a time of an answer, which may not be set.
func timeOf(t interface {
	IsValid() bool
	AsTime() time.Time
}) *time.Time {
	if !t.IsValid() {
		return nil
	}
	at := t.AsTime()
	return &at
}

// shownTime is a time as tables have it; nil: nothing.
func shownTime(t *time.Time) string {
	if t == nil {
		return ""
	}
	return t.Local().Format(time.DateTime)
}

func controlWaiting(list []*v1.WaitingState) []api.ControlWaiting {
	out := []api.ControlWaiting{}
	for _, w := range list {
		out = append(out, api.ControlWaiting{Step: w.Step, Node: w.Node, State: w.State, Reason: w.Reason, Since: w.Since.AsTime()})
	}
	return out
}

func controlChains(list []*v1.ChainState) []api.ControlChain {
	out := []api.ControlChain{}
	for _, c := range list {
		out = append(out, api.ControlChain{Name: c.Name, State: c.State, Reason: c.Reason, Since: timeOf(c.Since)})
	}
	return out
}

func controlEpochs(list []*v1.EpochState) []api.ControlEpoch {
	out := []api.ControlEpoch{}
	for _, e := range list {
		out = append(out, api.ControlEpoch{
			Chain: e.Chain, Direction: e.Direction, From: e.From, Path: e.Path, Epoch: e.Epoch, State: e.State, Until: timeOf(e.Until), WaitingFor: append([]string{}, e.WaitingFor...),
			Drain: e.Drain,
		})
	}
	return out
}

func readChanges(s *v1.State) reading {
	out := api.ChangesOutput{Version: api.Version, Step: s.Step, Since: timeOf(s.Since), Waiting: controlWaiting(s.Waiting), NextRotation: timeOf(s.NextRotation)}
	r := reading{header: []string{"STEP", "NODE", "STATE", "SINCE", "REASON"}, output: out}
	for _, w := range out.Waiting {
		r.rows = append(r.rows, []any{w.Step, w.Node, w.State, shownTime(&w.Since), w.Reason})
	}
	if out.NextRotation != nil {
		r.rows = append(r.rows, []any{"rotate", "-", "due", shownTime(out.NextRotation), "by the controller's clock"})
	}
	return r
}

func readChains(s *v1.State) reading {
	out := api.ChainsOutput{Version: api.Version, Chains: controlChains(s.Chains)}
	r := reading{header: []string{"NAME", "STATE", "REASON"}, output: out}
	for _, c := range out.Chains {
		r.rows = append(r.rows, []any{c.Name, c.State, c.Reason})
	}
	return r
}

func readEpochs(s *v1.State) reading {
	out := api.EpochsOutput{Version: api.Version, Epochs: controlEpochs(s.Epochs)}
	r := epochTable(out.Epochs)
	r.output = out
	return r
}

func epochTable(epochs []api.ControlEpoch) reading {
	r := reading{header: []string{"CHAIN", "DIRECTION", "EPOCH", "STATE", "UNTIL", "WAITING FOR"}}
	for _, e := range epochs {
		direction := e.Direction
		if e.From != "" {
			direction += ", from " + e.From + " on"
		}
		r.rows = append(r.rows, []any{e.Chain, direction, uint64(e.Epoch), e.State, shownTime(e.Until), cmp.Or(strings.Join(e.WaitingFor, ", "), e.Drain)})
	}
	return r
}
