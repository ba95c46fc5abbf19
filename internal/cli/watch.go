package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
)

type watchOptions struct {
	sockets []string
	labs    []string
	paths   string
	output  string
	once    bool
}

// NewWatchCommand is "waystamp watch".
func NewWatchCommand() *cobra.Command {
	var o watchOptions
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Print refused packets as they happen",
		Long: `Print the packets that nodes refuse, as they happen, after the last 256 that
each remembers. Of many packets that are refused for one reason a node sends a
sample and says how many it left out. Whoever reads more slowly than they come
misses some, and is told how many; whoever takes none for 30 seconds is dropped
by the agent. An agent has 64 readers at most.

With --paths, which holds the secrets of whole paths, or with --lab, which knows
where they are, each comes with a sentence that says what the packet shows.`,
		Example: `  waystamp watch
  waystamp watch --lab demo
  waystamp watch --socket /run/waystamp/r6/agent.sock --paths paths.json -o json`,
		Args: command.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringArrayVar(&o.sockets, "socket", nil, "`path` of an agent's socket; several are possible (default "+agent.SocketPath(defaultRunDir+"/"+defaultInstance)+")")
	f.StringArrayVar(&o.labs, "lab", nil, "`prefix` of a lab, all of whose agents are meant; several are possible")
	f.StringVar(&o.paths, "paths", "", "`file` with the secrets of all paths, to explain with (default with --lab: the lab's)")
	f.StringVarP(&o.output, "output", "o", "text", "`format`: text, or json (one object a line)")
	f.BoolVar(&o.once, "once", false, "print what is remembered and end")
	return cmd
}

// watched is one agent, and what explains its events.
type watched struct {
	socket string
	paths  []plan.Path
}

func (o *watchOptions) run(cmd *cobra.Command) error {
	var p eventPrinter
	switch o.output {
	case "text":
		p.print = printEventText
	case "json":
		p.print = printEventJSON
	default:
		return command.Usagef("--output is %q; expect text or json", o.output)
	}
	p.out = cmd.OutOrStdout()
	ctx := cmd.Context()
	agents, err := await.Do(ctx, o.agents)
	if err != nil {
		return withoutCancel(ctx, err)
	}
	group, groupCtx := errgroup.WithContext(ctx)
	for _, w := range agents {
		group.Go(func() error {
			c := agent.NewClient(w.socket)
			defer c.Close()
			err := c.Events(groupCtx, !o.once, func(e event.Event) error { return p.event(e, w.paths) })
			if errors.Is(err, io.EOF) {
				fmt.Fprintf(cmd.ErrOrStderr(), "the agent at %s has stopped\n", w.socket)
				return nil
			}
			return err
		})
	}
	return withoutCancel(ctx, group.Wait())
}

func (o *watchOptions) agents() ([]watched, error) {
	var paths []plan.Path
	if o.paths != "" {
		b, err := planfile.Read(o.paths)
		if err != nil {
			return nil, fmt.Errorf("read the paths: %w", err)
		}
		if paths, err = plan.DecodePaths(b); err != nil {
			return nil, fmt.Errorf("paths %s: %w", o.paths, err)
		}
	}
	sockets := o.sockets
	if len(sockets) == 0 && len(o.labs) == 0 {
		sockets = []string{agent.SocketPath(defaultRunDir + "/" + defaultInstance)}
	}
	var out []watched
	for _, s := range sockets {
		out = append(out, watched{s, paths})
	}
	for _, prefix := range o.labs {
		l, err := lab.Open(lab.DefaultRunDir, prefix, slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, err
		}
		of := paths
		if o.paths == "" {
			if of, err = l.Paths(); err != nil {
				return nil, err
			}
		}
		for _, m := range l.Members() {
			if m.Agent != nil && m.Agent.PID != 0 {
				out = append(out, watched{agent.SocketPath(m.Agent.RunDir), of})
			}
		}
	}
	if len(out) == 0 {
		return nil, errors.New("no agent is running in the lab")
	}
	return out, nil
}

// explained is an event with what it shows.
type explained struct {
	event.Event
	Explanation *explain.Explanation `json:"explanation,omitempty"`
}

// eventPrinter writes the events of several agents, one at a time.
type eventPrinter struct {
	print func(io.Writer, explained) error

	mu  sync.Mutex
	out io.Writer
}

func (p *eventPrinter) event(e event.Event, paths []plan.Path) error {
	x := explained{Event: e}
	if paths != nil {
		ex := explain.Explain(e, paths, nil)
		x.Explanation = &ex
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.print(p.out, x)
}

func printEventJSON(out io.Writer, e explained) error { return json.NewEncoder(out).Encode(e) }

// inPlace is where in the source a packet was refused, as text behind its hook.
func inPlace(place string) string {
	if place == "" {
		return ""
	}
	return " (" + place + ")"
}

func printEventText(out io.Writer, e explained) error {
	verdict := "refused"
	if e.Reported {
		verdict = "reported"
	}
	var err error
	if e.Missed > 0 {
		_, err = fmt.Fprintf(out, "    %d events of %s were missed here: they came faster than they were read\n", e.Missed, e.Node)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s  %s  %s  %s  %s  %d bytes at %s%s: %s\n",
		e.Time.Local().Format(time.TimeOnly+".000"), e.Node, e.Interface, verdict, e.Reason, e.Len, e.Hook, inPlace(e.Place), e.Text)
	if e.Suppressed > 0 && err == nil {
		_, err = fmt.Fprintf(out, "    %d more like it were not shown before\n", e.Suppressed)
	}
	if e.Explanation != nil && err == nil {
		_, err = fmt.Fprintf(out, "    %s\n", e.Explanation.Sentence)
	}
	return err
}
