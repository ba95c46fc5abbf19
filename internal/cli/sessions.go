package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
)

const (
	helpServices = `The services of the node's gateway, with the sessions that are open. Refused clients and requests
are on standard error, by reason, since the gateway's process was started; -o json has them, too.
Why the gateway does not run is an error there.`

	helpSessions = `The open sessions of the node's gateway: connections of clients that have shaken hands. ID is the
number of the session in the audit log; numbers begin with 1 when the gateway's process starts.
REQUESTS counts the requests that were let in, UNDER WAY those of them that have not ended,
CHAINS are the chains that they have taken. A connection to a service with protocol tls counts as
one request. "waystamp session end ID" ends a session.`

	helpRevoked = `The identities that "waystamp revoke identity" has revoked at the node's gateway, whatever their
certificates say. Certificates on a list of revoked ones are not here.`
)

func readServices(ctx context.Context, c client) (reading, error) {
	v, err := c.Services(ctx)
	r := reading{
		node: v.Node, output: v, error: v.Error,
		header: []string{"SERVICE", "ADDRESS", "HOSTS", "PROTOCOL", "CLIENTS", "ORIGIN", "RULES", "CHAINS", "SESSIONS"}, key: 1,
	}
	for _, s := range v.Services {
		destination := strings.Join(s.Destinations, ",")
		if s.Origin.IsValid() {
			destination = s.Origin.String()
		}
		r.rows = append(r.rows, []any{
			s.Name, s.Address, strings.Join(s.Hosts, ","), s.Protocol, s.Clients, destination, gauge(s.Rules), strings.Join(s.Chains, ","), gauge(s.Sessions),
		})
	}
	for _, f := range v.Refused {
		r.notes = append(r.notes, fmt.Sprintf("refused (%s): %d", f.Reason, f.Count))
	}
	if v.Revoked > 0 {
		r.notes = append(r.notes, fmt.Sprintf("identities that are revoked: %d", v.Revoked))
	}
	return r, err
}

// newSessionsCommand is a noun that is asked about some sessions alone.
func newSessionsCommand(in surroundings) *cobra.Command {
	var identity, service string
	cmd := newNounCommand(in, "sessions", "Open sessions of this node's gateway", helpSessions, func(ctx context.Context, c client) (reading, error) {
		return readSessions(ctx, c, identity, service)
	})
	cmd.Example = `  waystamp get sessions
  waystamp get sessions --identity spiffe://staff.example/ops/alice -o json`
	cmd.Flags().StringVar(&identity, "identity", "", "`name` of a client: its sessions alone")
	cmd.Flags().StringVar(&service, "service", "", "`name` of a service: its sessions alone")
	return cmd
}

func readSessions(ctx context.Context, c client, identity, service string) (reading, error) {
	v, err := c.Sessions(ctx)
	v.Sessions = slices.DeleteFunc(v.Sessions, func(s api.Session) bool {
		return identity != "" && s.Identity != identity || service != "" && s.Service != service
	})
	r := reading{
		node: v.Node, output: v,
		header: []string{"ID", "SERVICE", "IDENTITY", "CLIENT", "SINCE", "REQUESTS", "UNDER WAY", "CHAINS"}, key: 1,
	}
	for _, s := range v.Sessions {
		r.rows = append(r.rows, []any{
			gauge(s.ID), s.Service, s.Identity, s.Client, s.Since.Local().Format(time.DateTime), s.Requests, gauge(s.UnderWay), command.OrDash(strings.Join(s.Chains, ",")),
		})
	}
	return r, err
}

func readRevoked(ctx context.Context, c client) (reading, error) {
	v, err := c.Revoked(ctx)
	r := reading{node: v.Node, output: v, header: []string{"IDENTITY", "SINCE"}, key: 1}
	for _, i := range v.Identities {
		r.rows = append(r.rows, []any{i.Identity, i.Since.Local().Format(time.DateTime)})
	}
	return r, err
}

func newSessionCommand(in surroundings) *cobra.Command {
	cmd := &cobra.Command{Use: "session", Short: "End sessions of gateways"}
	o := targetFlags{in: in}
	end := &cobra.Command{
		Use:   "end ID",
		Short: "End a session of this node's gateway, with its requests",
		Long: `Close the connection of a client, with all its requests that are under way. "waystamp get sessions"
lists the IDs; they are a node's own, so that one agent has to be meant where several run.
The client may connect again: "waystamp revoke identity" keeps it out.

For root and the user of the agent.`,
		Example: `  waystamp session end 17
  waystamp session end 17 --instance edge`,
		Args: command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, gateways, err := o.sessionOf(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer closeAll(gateways)
			return gateways[0].EndSession(cmd.Context(), id)
		},
	}
	o.add(end)
	cmd.AddCommand(end)
	return cmd
}

// sessionOf reads the ID of a session, and connects to the one agent that has a gateway. The caller closes what is returned.
func (t *targetFlags) sessionOf(ctx context.Context, text string) (id uint64, gateways []client, err error) {
	if id, err = strconv.ParseUint(text, 10, 64); err != nil || id == 0 {
		return 0, nil, command.Usagef("%q is not the ID of a session; waystamp get sessions lists them", text)
	}
	if gateways, err = t.gateways(ctx); err != nil {
		return 0, nil, err
	}
	if len(gateways) > 1 {
		closeAll(gateways)
		return 0, nil, command.Usagef("%d of these agents have gateways, each with sessions of its own; name one with --instance or --socket", len(gateways))
	}
	return id, gateways, nil
}

func newDescribeSession(in surroundings) *cobra.Command {
	o := targetFlags{in: in}
	var output string
	cmd := &cobra.Command{
		Use:   "session ID",
		Short: "A session of this node's gateway: its client, and by which chain each request went",
		Long: `Print a client's session with its requests, from the gateway's audit log: what was asked for, which rule and chain it took,
how it ended, and what was refused. For each chain: the path that begins at the gateway, and who opens what the gateway
has sealed. "waystamp get sessions" lists the IDs of open sessions; one that has ended can be described, too, as long as its lines
are in the log. IDs begin with 1 each time that the gateway's process starts: of several sessions with an ID, the last one counts.
The command prints the last 1000 requests. It does not verify the log; "waystamp audit verify" does.

For root and the user of the agent.`,
		Example: `  waystamp describe session 17
  waystamp describe session 17 --instance edge -o json`,
		Args: command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := command.CheckOutput(output, "table", "json", "yaml"); err != nil {
				return err
			}
			id, gateways, err := o.sessionOf(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer closeAll(gateways)
			v, err := gateways[0].Session(cmd.Context(), id)
			if err != nil {
				return err
			}
			if output != "table" {
				return command.WriteOutput(cmd.OutOrStdout(), output, v)
			}
			return writeSession(cmd.OutOrStdout(), v)
		},
	}
	o.add(cmd)
	command.OutputFlag(cmd, &output, "table", "json", "yaml")
	return cmd
}

func writeSession(w io.Writer, v api.SessionDetail) error {
	at := func(t time.Time) string { return t.Local().Format(time.DateTime) }
	state := "its end is not in the log: the gateway's process ended before it"
	switch {
	case v.Open:
		state = "open"
	case v.Closed != nil && v.Reason != "":
		state = fmt.Sprintf("ended by the gateway at %s (%s)", at(*v.Closed), v.Reason)
	case v.Closed != nil:
		state = "ended at " + at(*v.Closed)
	}
	resumed := ""
	if v.Resumed {
		resumed = ", resumed by a ticket"
	}
	fmt.Fprintf(w, "session %d of %s: %s\n", v.ID, v.Node, state)
	fmt.Fprintf(w, "  %s from %s, certificate %s, since %s%s\n", v.Identity, v.Client, v.Serial, at(v.Opened), resumed)
	fmt.Fprintf(w, "  service %s, host %s\n", v.Service, v.Host)
	for _, c := range v.Chains {
		if c.Path == "" {
			fmt.Fprintf(w, "  chain %s: not in the plan any more\n", c.Chain)
			continue
		}
		fmt.Fprintf(w, "  chain %s: path %s, source ports %s, opened by %s\n", c.Chain, c.Path, c.Ports, c.Sealed)
	}
	if v.Omitted > 0 {
		fmt.Fprintf(w, "  %d earlier requests are in the audit log alone\n", v.Omitted)
	}
	if len(v.Requests) == 0 {
		fmt.Fprintln(w, "  no requests")
		return nil
	}
	fmt.Fprintln(w)
	return command.WriteTable(w, func(row func(...any)) {
		row("REQUEST", "AT", "METHOD", "HOST", "PATH", "RULE", "CHAIN", "STATUS", "BYTES", "END")
		for _, r := range v.Requests {
			number, rule, status, end := "-", "-", "-", "under way"
			if r.Number != 0 {
				number = fmt.Sprint(r.Number)
			}
			if r.Rule != 0 {
				rule = fmt.Sprint(r.Rule)
			}
			if r.Status != 0 {
				status = fmt.Sprint(r.Status)
			}
			switch {
			case r.Reason != "":
				end = "refused: " + r.Reason
			case r.Ended != nil && r.Text != "":
				end = r.Text
			case r.Ended != nil:
				end = at(*r.Ended)
			case !v.Open:
				end = "-"
			}
			row(number, at(r.At), command.OrDash(r.Method), command.OrDash(r.Host), command.OrDash(r.Path), rule, command.OrDash(r.Chain), status, r.Bytes, end)
		}
	})
}

func newRevokeIdentityCommand(in surroundings) *cobra.Command {
	cmd := &cobra.Command{Use: "revoke", Short: "Revoke identities of clients at gateways"}
	o := targetFlags{in: in}
	var undo bool
	identity := &cobra.Command{
		Use:   "identity NAME",
		Short: "Refuse a client at this node's gateway, whatever its certificate says",
		Long: `Put a client's identity on a list of the gateway: its sessions end at once, with their requests, and
it is not let in again (identity-revoked in the audit log), by no certificate and no ticket.
The command returns when the gateway has taken the list. It is kept in the agent's state
directory, and outlives the agent. NAME is the identity as "waystamp get sessions" shows it.

The list is the node's own, also where a controller gives it its plan: run the command for each
node with a gateway; with --lab, or several of --instance and --socket, for all of them.
--undo takes the identity from the list.

For root and the user of the agent.`,
		Example: `  waystamp revoke identity spiffe://staff.example/sales/bob
  waystamp revoke identity spiffe://staff.example/sales/bob --undo`,
		Args: command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			targets, err := o.find()
			if err != nil {
				return err
			}
			// One that fails keeps none of the others from it, and nothing is asked before.
			var errs []error
			found := false
			for _, at := range targets {
				c := in.connect(at.socket)
				a, err := c.Revoke(cmd.Context(), api.RevokeRequest{Identity: args[0], Undo: undo})
				c.Close()
				switch {
				case errors.Is(err, agent.ErrNoGateway):
				case err != nil:
					errs = append(errs, err)
				default:
					found = true
					fmt.Fprintln(cmd.OutOrStdout(), revokedText(a, undo))
				}
			}
			if !found && len(errs) == 0 {
				return errNoGateways
			}
			return errors.Join(errs...)
		},
	}
	identity.Flags().BoolVar(&undo, "undo", false, "let the identity in again")
	o.add(identity)
	cmd.AddCommand(identity)
	return cmd
}

func revokedText(a api.RevokeAnswer, undo bool) string {
	switch {
	case undo:
		return fmt.Sprintf("%s: %s is not revoked any more", a.Node, a.Identity)
	case !a.Running:
		return fmt.Sprintf("%s: %s is revoked; the gateway does not run, and starts with it", a.Node, a.Identity)
	case !a.Changed:
		return fmt.Sprintf("%s: %s was revoked before; sessions ended: %d", a.Node, a.Identity, a.Ended)
	}
	return fmt.Sprintf("%s: %s is revoked; sessions ended: %d", a.Node, a.Identity, a.Ended)
}

var errNoGateways = errors.New("none of the selected agents has a gateway; run this on a node of the services' gateways, or name its agent with --instance")

// gateways are the agents that the flags mean and that have a gateway; at least one. The caller closes them.
func (t *targetFlags) gateways(ctx context.Context) (out []client, err error) {
	targets, err := t.find()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			closeAll(out)
		}
	}()
	for _, at := range targets {
		c := t.in.connect(at.socket)
		v, err := c.Services(ctx)
		if err != nil {
			c.Close()
			return out, err
		}
		if len(v.Services) == 0 {
			c.Close()
			continue
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, errNoGateways
	}
	return out, nil
}

func closeAll(list []client) {
	for _, c := range list {
		c.Close()
	}
}
