package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/member"
)

const (
	defaultRunDir   = "/run/waystamp"
	defaultStateDir = "/var/lib/waystamp"

	defaultGatewayFiles = "/etc/waystamp/gateway"
	defaultInstance     = "default"
)

type agentOptions struct {
	plan, instance, node, runDir, stateDir, pinDir string
	detach, yes, verbose                           bool
	movePins, owner                                string
	insecurePlan, force                            bool
	join                                           string
	controllers                                    []string
	gatewayFiles, gatewayAudit, gatewayAuditKey    string
	metrics                                        string
	collector                                      string
	flowEvery                                      time.Duration
	enterprise                                     uint32
}

// NewAgentCommand is "waystamp agent".
func NewAgentCommand() *cobra.Command {
	var o agentOptions
	cmd := &cobra.Command{
		Use:   "agent --plan FILE | --controller ADDRESS",
		Short: "Run the daemon of a node: apply its plan and keep it in force",
		Long: `Run the daemon of a node. It loads and attaches the data path of its plan, adds a
route for the node's locator to the kernel's table, and applies the plan file again
when it changes. When the data path is in force, the agent writes {"ready":true}
to standard output.

With --controller the plan comes from a controller. At the first start, give --join a token that waystamp
node token has printed on the controller; the agent then makes a key, which never leaves the node. The agent keeps the last plan
in the state directory: it starts from this plan also when no controller answers, and refuses plans with a
lower revision. If the kernel refuses the plan, the agent starts from the plan that was in force before, and
reports the reason to the controller. If several controllers share the work, name each: the agent tries them in turn.

A plan holds keys. It is refused if other users than its owner can read or write the
file (mode 0600), if the file or its directory belongs neither to root nor to the user who
runs the agent, or if other users can write to that directory and it is not sticky; the same
rules hold for the directory of a symbolic link. That goes for a file that becomes so
later: the plan before stays in force, and the status says why. --insecure-plan
takes it all the same.

A plan is also refused at the start if no interface has an address of its node, and
at any time if it has an epoch of some path that the node has given up for a later one:
--force takes it.

SIGINT, SIGTERM and SIGHUP stop it; SIGHUP does not if it was ignored when the
agent was started, as by nohup. A new plan needs no signal. When it stops, the
data path, the guard and the locator route stay in force; the next agent of the same
instance takes them over without a gap. --detach --yes removes them when no agent runs,
and names the chains whose packets need no proof any more.

--move-pins DIRECTORY moves the pins of the instance, when no agent runs, to another bpf filesystem, and gives
them to --owner: the data path stays at work meanwhile, and an agent of that user, with
that directory as --pin-dir, takes it over.`,
		Example: `  waystamp agent --plan /etc/waystamp/r1.json
  waystamp agent --controller '[fd00::1]:7443' --join @/root/token
  waystamp agent --controller '[fd00::1]:7443,[fd00::2]:7443,[fd00::3]:7443'
  waystamp agent --detach --yes
  waystamp agent --instance r1 --move-pins /run/waystamp-bpf --owner waystamp`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&o.plan, "plan", "", "plan `file` of this node")
	f.StringSliceVar(&o.controllers, "controller", nil, "`address` of the controller for nodes, instead of --plan: HOST:PORT; of several controllers, each")
	f.StringVar(&o.join, "join", "", "`token` with which the node joins, or @FILE that holds it; needed once")
	f.BoolVar(&o.insecurePlan, "insecure-plan", false, "take the plan file also if others can read or change it, and warn")
	f.BoolVar(&o.force, "force", false, "take the plan also if none of its node's addresses is on this machine, or if it is older than the plan before")
	f.StringVar(&o.instance, "instance", defaultInstance, "`name` of this node's data path on the machine")
	f.StringVar(&o.node, "node", "", "take plans for the node of this `name` only (default: the node of the first plan)")
	f.StringVar(&o.runDir, "run-dir", "", "`directory` of the agent's socket (default "+defaultRunDir+"/INSTANCE)")
	f.StringVar(&o.stateDir, "state-dir", "", "`directory` for state that must survive a reboot (default "+defaultStateDir+"/INSTANCE)")
	f.StringVar(&o.gatewayFiles, "gateway-files", defaultGatewayFiles, "`directory` that relative names of a gateway's certificates, keys and lists start from")
	f.StringVar(&o.metrics, "metrics", "", "`address` to serve Prometheus metrics on, without authentication: HOST:PORT, as in [::1]:9465")
	f.StringVar(&o.collector, "ipfix", "", "`address` of a collector to send flow records to, over UDP: ADDRESS:PORT, as in [fd00::9]:4739")
	f.DurationVar(&o.flowEvery, "ipfix-every", time.Minute, "with --ipfix: the `time` that one record is about")
	f.Uint32Var(&o.enterprise, "ipfix-enterprise", 0, "with --ipfix: your private enterprise `number`; records then also have waystamp's own elements")
	f.StringVar(&o.gatewayAudit, "gateway-audit", "", "`file` of a gateway's audit log (default gateway-audit.log in the state directory)")
	f.StringVar(&o.gatewayAuditKey, "gateway-audit-key", "", "`file` with the private key (PEM; ECDSA or Ed25519) that signs the gateway's audit log (default: the node's key from the controller; without one the log is not signed)")
	f.StringVar(&o.pinDir, "pin-dir", dataplane.DefaultPinDir, "`directory` on a bpf filesystem for programs and maps")
	f.BoolVar(&o.detach, "detach", false, "remove the data path instead, with its guard and the locator route")
	f.BoolVar(&o.yes, "yes", false, "with --detach: do it")
	f.StringVar(&o.movePins, "move-pins", "", "move the pins to this `directory` on a bpf filesystem instead; the data path stays at work")
	f.StringVar(&o.owner, "owner", "", "with --move-pins: the `user` to give them to, a name or a number (default: the one who runs this)")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "log more on standard error")
	return cmd
}

func (o *agentOptions) run(cmd *cobra.Command) error {
	if err := agent.CheckInstance(o.instance); err != nil {
		return command.Usagef("--instance: %q %w", o.instance, err)
	}
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	cfg := agent.Config{
		PlanFile: o.plan, Instance: o.instance, Node: o.node,
		RunDir: o.runDir, StateDir: o.stateDir, PinDir: o.pinDir, InsecurePlan: o.insecurePlan, Force: o.force,
		Log:    slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level})),
		Stdout: cmd.OutOrStdout(),
	}
	if cfg.RunDir == "" {
		cfg.RunDir = filepath.Join(defaultRunDir, o.instance)
	}
	if cfg.StateDir == "" {
		cfg.StateDir = filepath.Join(defaultStateDir, o.instance)
	}
	cfg.GatewayFiles, cfg.GatewayAudit, cfg.Metrics = o.gatewayFiles, o.gatewayAudit, o.metrics
	if cfg.GatewayAudit == "" {
		cfg.GatewayAudit = filepath.Join(cfg.StateDir, "gateway-audit.log")
	}
	if err := o.flows(&cfg.Flows); err != nil {
		return err
	}
	if o.gatewayAuditKey != "" && !o.detach {
		cfg.AuditKey = func() (*gateway.AuditKey, error) { return gateway.ReadAuditKey(o.gatewayAuditKey) }
		if _, err := cfg.AuditKey(); err != nil {
			return err
		}
	}
	switch {
	case o.detach && o.movePins != "":
		return command.Usagef("--detach and --move-pins exclude each other")
	case o.owner != "" && o.movePins == "":
		return command.Usagef("--owner goes with --move-pins")
	case o.detach:
		return o.runDetach(cmd.OutOrStdout(), cfg)
	case o.movePins != "":
		return o.runMovePins(cmd.OutOrStdout(), cfg)
	}
	if o.yes {
		return command.Usagef("--yes goes with --detach")
	}
	switch {
	case o.plan == "" && len(o.controllers) == 0:
		return command.Usagef("--plan or --controller is missing; see waystamp agent --help")
	case o.plan != "" && len(o.controllers) > 0:
		return command.Usagef("--plan and --controller exclude each other: a plan has one source")
	case o.join != "" && len(o.controllers) == 0:
		return command.Usagef("--join goes with --controller")
	}
	if len(o.controllers) > 0 {
		return o.runMember(cmd.Context(), cfg)
	}
	return agent.Run(cmd.Context(), cfg)
}

// flows reads where flow records go.
func (o *agentOptions) flows(f *agent.FlowExport) error {
	switch {
	case o.collector == "" && (o.flowEvery != time.Minute || o.enterprise != 0):
		return command.Usagef("--ipfix-every and --ipfix-enterprise go with --ipfix")
	case o.collector == "":
		return nil
	case o.flowEvery < time.Second || o.flowEvery > time.Hour:
		return command.Usagef("--ipfix-every: expect 1s to 1h, have %v", o.flowEvery)
	}
	c, err := agent.ParseCollector(o.collector)
	if err != nil {
		return command.Usagef("--ipfix: %w", err)
	}
	*f = agent.FlowExport{Collector: c, Every: o.flowEvery, Enterprise: o.enterprise}
	return nil
}

// runMember runs an agent whose plans a controller sends.
func (o *agentOptions) runMember(ctx context.Context, cfg agent.Config) error {
	token := o.join
	if name, ok := strings.CutPrefix(token, "@"); ok {
		b, err := os.ReadFile(name)
		switch {
		case err == nil:
			token = strings.TrimSpace(string(b))
		case member.HasJoined(filepath.Join(cfg.StateDir, "member")):
			cfg.Log.Warn("the token cannot be read, and is left aside: this node has joined before", "err", err)
			token = ""
		default:
			return fmt.Errorf("--join: %w", err)
		}
	}
	m, err := member.Open(member.Config{
		Controllers: o.controllers, Token: token, Dir: filepath.Join(cfg.StateDir, "member"), Node: o.node, Log: cfg.Log,
	})
	if err != nil {
		return err
	}
	cfg.PlanFile, cfg.Fallback = m.PlanFile(), m.FallbackFile()
	cfg.CertificateEnds, cfg.ClockOff, cfg.Refused = m.CertificateEnds, m.ClockOff, m.Refused
	cfg.End, cfg.EndCertificate = m.End, m.EndCertificate
	cfg.Traced, cfg.Traces, cfg.TracesChanged = m.Traced, m.Traces, m.TracesChanged()
	cfg.Numbers, cfg.Drains, cfg.DrainsChanged = m.Numbers, m.Drains, m.DrainsChanged()
	if cfg.AuditKey == nil {
		cfg.AuditKey = func() (*gateway.AuditKey, error) {
			key, certificate := m.Key()
			if key == nil {
				return nil, nil
			}
			return &gateway.AuditKey{Signer: key, Certificate: certificate}, nil
		}
	}
	cfg.Report = func(f agent.InForce) { m.Report(member.Report(f)) }
	ctx, cancel := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return m.Run(ctx) })
	group.Go(func() error {
		defer cancel()
		return m.Serve(ctx, func(ctx context.Context) error { return agent.Run(ctx, cfg) }, func(err error) bool {
			_, refused := errors.AsType[*agent.PlanError](err)
			return refused
		})
	})
	return group.Wait()
}

func (o *agentOptions) runDetach(out io.Writer, cfg agent.Config) error {
	if o.plan != "" {
		return command.Usagef("--detach takes no --plan")
	}
	if len(o.controllers) > 0 || o.join != "" {
		return command.Usagef("--detach needs no controller: leave out --controller and --join")
	}
	if !o.yes {
		would, err := agent.WouldDetach(cfg)
		if err != nil {
			return err
		}
		if _, err := os.Lstat(filepath.Join(cfg.PinDir, cfg.Instance)); errors.Is(err, os.ErrNotExist) && len(would.Locators) == 0 {
			fmt.Fprintf(out, "instance %s: nothing is there\n", o.instance)
			return nil
		}
		var b strings.Builder
		fmt.Fprintf(&b, "--detach would remove the data path of instance %s, with its guard", o.instance)
		for _, l := range would.Locators {
			fmt.Fprintf(&b, " and the route to its locator %s", l)
		}
		if len(would.Unguarded) > 0 {
			fmt.Fprintf(&b, "; packets of these chains would need no proof any more: %s", strings.Join(would.Unguarded, ", "))
		}
		b.WriteString("; add --yes to do it")
		return &command.ExitError{Code: command.ExitUsage, Err: errors.New(b.String())}
	}
	done, err := agent.Detach(cfg)
	if err != nil {
		return err
	}
	if done.Links == 0 && len(done.Locators) == 0 && len(done.Unguarded) == 0 {
		fmt.Fprintf(out, "instance %s: nothing is there\n", o.instance)
		return nil
	}
	fmt.Fprintf(out, "instance %s: %d programs taken off their interfaces\n", o.instance, done.Links)
	for _, l := range done.Locators {
		fmt.Fprintf(out, "locator %s: route withdrawn\n", l)
	}
	if done.SIDs > 0 {
		fmt.Fprintf(out, "%d SIDs: routes withdrawn\n", done.SIDs)
	}
	for _, c := range done.Unguarded {
		fmt.Fprintf(out, "chain %s: now unguarded\n", c)
	}
	return nil
}

// runMovePins is for an agent that is to run as another user.
func (o *agentOptions) runMovePins(out io.Writer, cfg agent.Config) error {
	if o.plan != "" || len(o.controllers) > 0 || o.join != "" || o.yes {
		return command.Usagef("--move-pins takes no --plan, --controller, --join or --yes")
	}
	uid, gid := os.Geteuid(), os.Getegid()
	if o.owner != "" {
		u, err := user.Lookup(o.owner)
		_, bad := strconv.ParseUint(o.owner, 10, 31)
		switch {
		case err == nil:
		case bad == nil: // of a user that no file has, too
			if u, err = user.LookupId(o.owner); err != nil {
				u, err = &user.User{Uid: o.owner, Gid: o.owner}, nil
			}
		default:
			return fmt.Errorf("--owner: %w", err)
		}
		if uid, err = strconv.Atoi(u.Uid); err == nil {
			gid, err = strconv.Atoi(u.Gid)
		}
		if err != nil {
			return fmt.Errorf("--owner: %w", err)
		}
	}
	pins, err := dataplane.MovePins(dataplane.Config{PinDir: cfg.PinDir, Instance: cfg.Instance}, o.movePins, uid, gid)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "instance %s: %d pins moved to %s; start its agent with --pin-dir %[3]s\n", o.instance, pins, o.movePins)
	return nil
}

// withoutCancel makes the end of a command that follows something, by Ctrl-C,
// no error.
func withoutCancel(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return nil
	}
	return err
}
