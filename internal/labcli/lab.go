package labcli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/lab/inline"
)

// labCommand has the common parts of the commands below "waystamp lab".
type labCommand struct {
	prefix, runDir string
	verbose        bool
}

// NewLabCommand is "waystamp lab".
func NewLabCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "A domain of network namespaces on this machine",
		Long: `Build a domain on this machine, with the network around it from the lab section of
its file: a network namespace for each node, router, host and function behind
interfaces, links, addresses, routes, nftables rulesets, and an agent per node.
Several labs can be up at once; the names of their namespaces and pins start with
their prefix. Needs root, nft for rulesets, and the package frr for routing: frr.`,
		Example: `  waystamp lab up -f examples/paper.yaml
  waystamp lab exec h1 -- ping -c 3 fc00:8::2
  waystamp lab down`,
	}
	cmd.AddCommand(newLabUpCommand(), newLabDownCommand(), newLabExecCommand(), newLabLsCommand(), newLabInlineCommand(), newLabAttackCommand())
	return cmd
}

func (o *labCommand) flags(cmd *cobra.Command, prefixUsage string) {
	if prefixUsage != "" {
		cmd.Flags().StringVar(&o.prefix, "prefix", "", prefixUsage)
	}
	cmd.Flags().StringVar(&o.runDir, "run-dir", lab.DefaultRunDir, "`directory` where labs keep their state")
}

func (o *labCommand) log(cmd *cobra.Command) *slog.Logger {
	level := slog.LevelWarn
	if o.verbose {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level}))
}

// open finds the lab of the prefix, or the only one that there is.
func (o *labCommand) open(cmd *cobra.Command) (*lab.Lab, error) {
	prefix := o.prefix
	if prefix == "" {
		labs, err := lab.List(o.runDir)
		if err != nil {
			return nil, err
		}
		switch len(labs) {
		case 0:
			return nil, errors.New("no lab is up; try: waystamp lab up -f FILE")
		case 1:
			prefix = labs[0]
		default:
			return nil, command.Usagef("several labs are up, name one with --prefix: %s", strings.Join(labs, ", "))
		}
	}
	return lab.Open(o.runDir, prefix, o.log(cmd))
}

func newLabUpCommand() *cobra.Command {
	var (
		o        labCommand
		file     string
		noAgents bool
		governed bool
	)
	cmd := &cobra.Command{
		Use:   "up -f FILE",
		Short: "Build a lab and wait until its agents are ready",
		Long: `Build the domain of a file and the network of its lab section, start an agent per
node, and wait until all are ready. Prints the prefix of the lab. On a failure, on
Ctrl-C, or when the terminal is closed, everything is removed again. Under nohup a
closed terminal does nothing.

With --with-controller a controller is started on this machine and given the file, and each
agent joins it with a token. Change the lab with waystamp apply, rotate, node and so on,
with the --controller that is printed on standard error.`,
		Example: `  waystamp lab up -f examples/paper.yaml
  waystamp lab up -f examples/spare.yaml --with-controller
  waystamp lab up -f examples/paper.yaml --prefix mine`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				return command.Usagef("-f is missing; name the domain's file, as in waystamp lab up -f examples/paper.yaml")
			}
			m, err := command.ReadManifest(cmd.Context(), file, cmd.InOrStdin(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if governed && (file == "-" || noAgents) {
				return command.Usagef("--with-controller goes neither with -f - nor with --no-agents")
			}
			if m.Lab == nil {
				return fmt.Errorf("%s has no lab section with hosts and links; see examples/paper.yaml", file)
			}
			files, apply := "", ""
			if file != "-" {
				path, err := filepath.Abs(file)
				if err != nil {
					return err
				}
				if files = filepath.Dir(path); governed {
					apply = path
				}
			}
			ownLabs(cmd, o.runDir)
			l, err := lab.Up(cmd.Context(), lab.Config{
				Domain: m.Domain, Lab: *m.Lab, Files: files,
				Prefix: o.prefix, RunDir: o.runDir, WithoutAgents: noAgents, Apply: apply, Log: o.log(cmd),
				Progress: func(node string, ready, of int) {
					fmt.Fprintf(cmd.ErrOrStderr(), "the agent of %s is ready (%d of %d)\n", node, ready, of)
				},
			})
			if err != nil {
				return err
			}
			n := countMembers(l)
			fmt.Fprintf(cmd.ErrOrStderr(), "lab %s is up: %d nodes, %d routers, %d hosts, %d functions; state in %s\n",
				l.Prefix(), n[lab.RoleNode], n[lab.RoleRouter], n[lab.RoleHost], len(m.Domain.Functions), l.Dir())
			if governed {
				fmt.Fprintf(cmd.ErrOrStderr(), "its controller: export WAYSTAMP_CONTROLLER=%s\n", l.ControllerAddress())
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), l.Prefix())
			return err
		},
	}
	cmd.Flags().BoolVar(&governed, "with-controller", false, "start a controller that agents get their plans from, instead of plan files")
	cmd.Flags().StringVarP(&file, "file", "f", "", "domain `file` with a lab section; - is standard input")
	cmd.Flags().BoolVar(&noAgents, "no-agents", false, "leave the nodes plain routers, for comparison")
	cmd.Flags().BoolVarP(&o.verbose, "verbose", "v", false, "print more on standard error")
	o.flags(cmd, "prefix of the `names` of namespaces and pins (default: random)")
	return cmd
}

func newLabDownCommand() *cobra.Command {
	var (
		o   labCommand
		all bool
	)
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove a lab, also an incomplete one",
		Long: `Stop the agents of a lab, remove their data path, delete its namespaces and its
state. Objects that only have the lab's names are not touched. The command
completes also after Ctrl-C or when the terminal is closed; a second Ctrl-C, at least a
second later, stops it.`,
		Example: `  waystamp lab down
  waystamp lab down --prefix ws-3f2a
  waystamp lab down --all`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !all {
				l, err := o.open(cmd)
				if err != nil {
					return err
				}
				return labDown(cmd, l)
			}
			if o.prefix != "" {
				return command.Usagef("--all and --prefix exclude each other")
			}
			labs, err := lab.List(o.runDir)
			if err != nil {
				return err
			}
			var errs []error
			for _, prefix := range labs {
				l, err := lab.Open(o.runDir, prefix, o.log(cmd))
				if errors.Is(err, fs.ErrNotExist) {
					continue // gone meanwhile
				}
				if err == nil {
					err = labDown(cmd, l)
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all labs")
	o.flags(cmd, "`prefix` of the lab (default: the only one)")
	return cmd
}

func labDown(cmd *cobra.Command, l *lab.Lab) error {
	// Half a lab is of no use: once begun, it goes to its end.
	command.Leaves(cmd.Context(), nil)
	if err := l.Down(context.WithoutCancel(cmd.Context())); err != nil {
		return err
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "lab %s is down\n", l.Prefix())
	return nil
}

func newLabExecCommand() *cobra.Command {
	var o labCommand
	cmd := &cobra.Command{
		Use:   "exec NAME -- COMMAND [ARG ...]",
		Short: "Run a command in the namespace of a node, router, host or function",
		Long: `Run a command in the network namespace of a node, router, host or function of a lab,
and exit with its status. Only the network is the namespace's; /sys and the rest
are the machine's.`,
		Example: `  waystamp lab exec h1 -- ping -c 3 fc00:8::2
  waystamp lab exec --prefix ws-3f2a r1 -- ip -6 route`,
		Args: command.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, argv := args[0], args[1:]
			if len(argv) > 0 && argv[0] == "--" {
				argv = argv[1:]
			}
			if len(argv) == 0 {
				return command.Usagef("name a command to run in %s, as in waystamp lab exec %s -- ip address", name, name)
			}
			l, err := o.open(cmd)
			if err != nil {
				return err
			}
			return l.Exec(name, argv, os.Environ())
		},
	}
	// All arguments after the name belong to the command, flags too.
	cmd.Flags().SetInterspersed(false)
	o.flags(cmd, "`prefix` of the lab (default: the only one)")
	return cmd
}

func newLabLsCommand() *cobra.Command {
	var (
		o      labCommand
		output string
	)
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the labs on this machine",
		Long: `List the labs on this machine. A lab is up; partial while it is built or removed; or
an orphan, if the command that should have removed it has ended before.`,
		Example: `  waystamp lab ls
  waystamp lab ls -o json`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return command.Usagef("-o %q is not a format; expect table or json", output)
			}
			labs, err := o.list(cmd)
			if err != nil {
				return err
			}
			if output == "json" {
				return command.WriteJSON(cmd.OutOrStdout(), labsOutput{api.Version, labs})
			}
			return command.WriteTable(cmd.OutOrStdout(), func(row func(...any)) {
				row("LAB", "STATE", "NODES", "ROUTERS", "HOSTS", "FUNCTIONS", "AGENTS", "SINCE")
				for _, l := range labs {
					row(l.Prefix, l.State, l.count[lab.RoleNode], l.count[lab.RoleRouter], l.count[lab.RoleHost], l.count[lab.RoleFunction], l.agents, l.Created.Format(time.RFC3339))
				}
			})
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "table", "`format` of the result: table or json")
	o.flags(cmd, "")
	return cmd
}

// labsOutput is the output of "ls -o json".
type labsOutput struct {
	Version int       `json:"version"`
	Labs    []labView `json:"labs"`
}

// labView is a lab as "ls -o json" shows it.
type labView struct {
	Prefix  string       `json:"prefix"`
	State   string       `json:"state"` // up, partial; orphan: the process that would have removed it has ended
	Created time.Time    `json:"created"`
	Dir     string       `json:"dir"`
	Members []memberView `json:"members"`

	count  map[lab.Role]int
	agents int
}

type memberView struct {
	Name      string     `json:"name"`
	Role      lab.Role   `json:"role"`
	Namespace string     `json:"namespace"`
	Agent     *agentView `json:"agent,omitempty"`
	// Program is the program of a function of kind raw.
	Program *programView `json:"program,omitempty"`
}

type programView struct {
	PID     int  `json:"pid,omitempty"`
	Running bool `json:"running"`
}

type agentView struct {
	Instance string `json:"instance"`
	PID      int    `json:"pid,omitempty"`
	Running  bool   `json:"running"`
	RunDir   string `json:"run_dir"`
	Plan     string `json:"plan"`
}

func (o *labCommand) list(cmd *cobra.Command) ([]labView, error) {
	prefixes, err := lab.List(o.runDir)
	if err != nil {
		return nil, err
	}
	views := []labView{}
	for _, p := range prefixes {
		l, err := lab.Open(o.runDir, p, o.log(cmd))
		if errors.Is(err, fs.ErrNotExist) {
			continue // gone meanwhile
		}
		if err != nil {
			return nil, err
		}
		v := labView{Prefix: p, State: "partial", Created: l.Created(), Dir: l.Dir(), Members: []memberView{}, count: countMembers(l)}
		if l.IsUp() {
			v.State = "up"
		}
		if orphan, err := l.IsOrphan(); err != nil {
			return nil, err
		} else if orphan {
			v.State = "orphan"
		}
		for _, m := range l.Members() {
			mv := memberView{Name: m.Name, Role: m.Role, Namespace: m.Namespace}
			if a := m.Agent; a != nil {
				mv.Agent = &agentView{Instance: a.Instance, PID: a.PID, Running: a.Running(), RunDir: a.RunDir, Plan: a.Plan}
				if mv.Agent.Running {
					v.agents++
				}
			}
			if p := m.Program; p != nil {
				mv.Program = &programView{PID: p.PID, Running: p.Running()}
			}
			v.Members = append(v.Members, mv)
		}
		views = append(views, v)
	}
	return views, nil
}

func countMembers(l *lab.Lab) map[lab.Role]int {
	n := map[lab.Role]int{}
	for _, m := range l.Members() {
		n[m.Role]++
	}
	return n
}

// newLabInlineCommand is the command of a function of kind raw, as one process among the others
// of its lab. It is not for people.
func newLabInlineCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:    "inline TO FROM",
		Short:  "Copy frames between two interfaces, as a function in user space",
		Hidden: true,
		Args:   command.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return inline.Run(cmd.Context(), inline.Config{
				To: args[0], From: args[1],
				Log:   slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)),
				Ready: func() error { return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]bool{"ready": true}) },
			})
		},
	}
	cmd.Flags().String("name", "", "`name` that the lab finds the process by")
	return cmd
}
