package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/plan"
)

// client is what the commands ask an agent.
type client interface {
	Status(ctx context.Context) (api.Status, error)
	Counters(ctx context.Context) (api.Counters, error)
	Functions(ctx context.Context) (api.Functions, error)
	Connections(ctx context.Context, function string, limit int) (api.Connections, error)
	Services(ctx context.Context) (api.Services, error)
	Sessions(ctx context.Context) (api.Sessions, error)
	Session(ctx context.Context, id uint64) (api.SessionDetail, error)
	Readers(ctx context.Context) (api.HeldReaders, error)
	Revoked(ctx context.Context) (api.Revoked, error)
	EndSession(ctx context.Context, id uint64) error
	Revoke(ctx context.Context, q api.RevokeRequest) (api.RevokeAnswer, error)
	Watch(ctx context.Context, follow bool, begin func(past int) error, f func(event.Event) error) error
	Close()
}

// surroundings are where the commands look for agents.
type surroundings struct {
	connect func(socket string) client
	runDir  string // of agents' run directories
	labs    string // lab.Config's RunDir
}

func onThisMachine() surroundings {
	return surroundings{
		connect: func(socket string) client { return agent.NewClient(socket) },
		runDir:  defaultRunDir, labs: lab.DefaultRunDir,
	}
}

// targetFlags say which agents are meant.
type targetFlags struct {
	in        surroundings
	sockets   []string
	instances []string
	labs      []string
}

// target is an agent, with the secrets of its lab.
type target struct {
	socket string
	lab    *lab.Lab // nil: of none
}

func (t *targetFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringArrayVar(&t.sockets, "socket", nil, "`path` of an agent's socket; several are possible (default: of all agents that run below "+defaultRunDir+")")
	f.StringArrayVar(&t.instances, "instance", nil, "`name` of an agent's instance; several are possible")
	f.StringArrayVar(&t.labs, "lab", nil, "`prefix` of a lab: read all its agents; may be repeated")
	completeWith(cmd, "instance", func() []string { return t.in.instances() })
	completeWith(cmd, "lab", func() []string {
		labs, _ := lab.List(t.in.labs)
		return labs
	})
}

// completeWith lets a shell complete the value of a flag.
func completeWith(cmd *cobra.Command, flag string, values func() []string) {
	f := func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return values(), cobra.ShellCompDirectiveNoFileComp
	}
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) // there is no such flag
	}
}

// instances are those whose agents have left a socket.
func (s surroundings) instances() (out []string) {
	paths, _ := filepath.Glob(agent.SocketPath(filepath.Join(s.runDir, "*")))
	for _, p := range paths {
		out = append(out, filepath.Base(filepath.Dir(p)))
	}
	return out
}

// left are the instances whose agents have ended and may have left a data path.
func (s surroundings) left() (out []string) {
	dirs, _ := filepath.Glob(filepath.Join(s.runDir, "*"))
	for _, d := range dirs {
		if agent.Left(d) {
			out = append(out, filepath.Base(d))
		}
	}
	return out
}

// leftBy says what became of an instance that is left.
func leftBy(instance string) error {
	return fmt.Errorf("the agent of instance %s does not run, but its data path is still in force: start the agent again (waystamp agent --plan FILE --instance %[1]s), or remove the data path (waystamp agent --detach --instance %[1]s --yes)", instance)
}

// running are the sockets of this node's agents: those that answer, or if none does,
// all that are there.
func (s surroundings) running() []string {
	var there, answer []string
	for _, name := range s.instances() {
		path := agent.SocketPath(filepath.Join(s.runDir, name))
		there = append(there, path)
		// Who may not connect is told so by the command.
		if c, err := net.Dial("unix", path); err == nil {
			c.Close()
			answer = append(answer, path)
		} else if errors.Is(err, os.ErrPermission) {
			answer = append(answer, path)
		}
	}
	if len(answer) > 0 {
		return answer
	}
	return there
}

// missing is an error if an instance has no socket, with the instances that have one:
// the name may be a slip.
func (t *targetFlags) missing() error {
	for _, name := range t.instances {
		path := agent.SocketPath(filepath.Join(t.in.runDir, name))
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			continue
		}
		if agent.Left(filepath.Dir(path)) {
			return leftBy(name)
		}
		have := "no instance has one here"
		if all := t.in.instances(); len(all) > 0 {
			have = "these have one: " + strings.Join(all, ", ")
		}
		return fmt.Errorf("the agent of instance %s does not run: it has no socket %s; %s", name, path, have)
	}
	return nil
}

// find gives the agents that the flags mean.
func (t *targetFlags) find() (out []target, err error) {
	sockets := slices.Clone(t.sockets)
	for _, name := range t.instances {
		if err := agent.CheckInstance(name); err != nil {
			return nil, fmt.Errorf("--instance: %q %w", name, err)
		}
		sockets = append(sockets, agent.SocketPath(filepath.Join(t.in.runDir, name)))
	}
	if err := t.missing(); err != nil {
		return nil, err
	}
	if len(sockets)+len(t.labs) == 0 {
		if sockets = t.in.running(); len(sockets) == 0 {
			if labs, _ := lab.List(t.in.labs); len(labs) > 0 {
				return nil, fmt.Errorf("no agent has a socket below %s, and there are labs: %s; name one with --lab", t.in.runDir, strings.Join(labs, ", "))
			}
			if _, err := os.ReadDir(t.in.runDir); errors.Is(err, os.ErrPermission) {
				return nil, fmt.Errorf("look for agents' sockets: %w; run as root", err)
			}
			if left := t.in.left(); len(left) > 0 {
				return nil, leftBy(left[0])
			}
			return nil, fmt.Errorf("no agent has a socket below %s: start one (waystamp agent --plan FILE), or name its socket with --socket", t.in.runDir)
		}
	}
	for _, s := range sockets {
		out = append(out, target{socket: s})
	}
	for _, prefix := range t.labs {
		l, err := lab.Open(t.in.labs, prefix, slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, err
		}
		n := len(out)
		for _, m := range l.Members() {
			if m.Agent != nil && m.Agent.PID != 0 {
				out = append(out, target{agent.SocketPath(m.Agent.RunDir), l})
			}
		}
		if len(out) == n {
			return nil, fmt.Errorf("no agent runs in lab %s", prefix)
		}
	}
	return out, nil
}

// paths are those of the target's lab; none: it is of no lab, or the lab's controller has them.
func (t target) paths() ([]plan.Path, error) {
	if t.lab == nil || t.lab.IsControlled() {
		return nil, nil
	}
	return t.lab.Paths()
}
