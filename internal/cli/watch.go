package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/pcapng"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
)

// watchAgain is how often an agent that has stopped is looked for.
const watchAgain = time.Second

type watchOptions struct {
	targets targetFlags
	paths   string
	output  string
	pcap    string
	once    bool
	again   time.Duration

	controller controllerFlag
	chain      string
}

func newWatchCommand(in surroundings) *cobra.Command {
	o := watchOptions{targets: targetFlags{in: in}, again: watchAgain}
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Print refused packets as they happen",
		Long: `Print the packets that nodes refuse: first the last 256 that each agent remembers,
then, below a line that says so, new ones as they happen. Each has its time, its
addresses, protocol and ports, and the chain and function that its headers name.
When an agent restarts, watch waits for it and goes on.

Of many packets that are refused for one reason a node sends a sample and says how
many it left out. A connection that a function of kind stream refuses, or an operation of it
resets, is printed as well, at most 16 a second of a function. A reader that is too slow misses some and is told how many; one
that takes none for 30 seconds is dropped. An agent has 64 readers at most.

With --paths, which holds the secrets of whole paths, or with --lab, which knows
where they are, each packet comes with a sentence that explains what happened to it.
Without --socket, --instance and --lab all agents of this machine are watched, but
for those of labs.

With --controller, or --chain, the controller is asked instead: agents that have a controller
send it their refused packets, and it explains each, because it has the secrets. It keeps the last 10,000 of all nodes in
memory, and prints those first. At most 64 a second of one node arrive; the number of those that
are lost is printed.

With --pcap the packets are written as a capture (pcapng), each with its node and
interface, and the reason as a comment: the first bytes of each, as the node sends them.`,
		Example: `  waystamp watch
  waystamp watch --lab demo
  waystamp watch --instance r6 --paths paths.json -o json
  waystamp watch --chain web
  waystamp watch --pcap - | wireshark -k -i -`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.targets.add(cmd)
	f := cmd.Flags()
	f.StringVar(&o.paths, "paths", "", "`file` with the secrets of all paths, to explain with (default with --lab: the lab's)")
	command.OutputFlag(cmd, &o.output, "text", "json")
	o.controller.add(cmd)
	o.controller.addChain(cmd, &o.chain)
	f.StringVar(&o.pcap, "pcap", "", "write a capture to this `file` instead; - is standard output")
	f.BoolVar(&o.once, "once", false, "print the packets in the agent's history, and exit")
	return cmd
}

// watched is one agent, and what explains its events.
type watched struct {
	client client
	socket string
	paths  []plan.Path

	mu    sync.Mutex
	names pathNames
}

func (o *watchOptions) run(cmd *cobra.Command) (failed error) {
	if err := command.CheckOutput(o.output, "text", "json"); err != nil {
		return err
	}
	if o.pcap != "" && cmd.Flags().Changed("output") {
		return command.Usagef("--pcap and --output exclude each other; give one of them")
	}
	p := eventPrinter{text: o.output == "text", out: cmd.OutOrStdout(), notes: cmd.ErrOrStderr()}
	ctx := cmd.Context()
	if len(o.controller.addresses) > 0 || o.chain != "" {
		for _, local := range []string{"socket", "instance", "lab", "paths"} {
			if cmd.Flags().Changed(local) {
				return command.Usagef("--%s is for agents of this machine, and --controller and --chain ask the controller; give one of them", local)
			}
		}
		return o.ask(cmd, &p)
	}
	agents, err := await.Do(ctx, o.agents)
	if err != nil {
		return withoutCancel(ctx, err)
	}
	closeCapture, err := p.captureTo(o.pcap)
	if err != nil {
		return err
	}
	defer func() { failed = errors.Join(failed, closeCapture()) }()
	group, groupCtx := errgroup.WithContext(ctx)
	for _, w := range agents {
		group.Go(func() error {
			defer w.client.Close()
			return o.follow(groupCtx, w, &p)
		})
	}
	return withoutCancel(ctx, group.Wait())
}

// follow prints the events of one agent, also of those after it at the same socket.
func (o *watchOptions) follow(ctx context.Context, w *watched, p *eventPrinter) error {
	first := true
	for {
		connected := false
		past := 0
		err := w.client.Watch(ctx, !o.once, func(n int) error {
			connected, past = true, n
			w.learn(ctx)
			if !first {
				p.note("the agent at %s is back", w.socket)
			}
			if n == 0 && !o.once {
				p.present(w)
			}
			return nil
		}, func(e event.Event) error {
			if err := p.event(ctx, e, w); err != nil {
				return err
			}
			if past--; past == 0 && !o.once {
				p.present(w)
			}
			return nil
		})
		switch {
		case o.once || ctx.Err() != nil:
			return err
		case connected && errors.Is(err, io.EOF):
			p.note("the agent at %s has stopped; waiting until it is back", w.socket)
			first = false
		case connected || first:
			return err // not for want of an agent
		}
		select {
		case <-time.After(o.again):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// learn asks the agent for the names of its paths. Without them their numbers do.
func (w *watched) learn(ctx context.Context) {
	s, err := w.client.Status(ctx)
	if err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names = namesOf(s)
}

// name gives the names of paths, asked for again if the packet has one that is new.
func (w *watched) name(ctx context.Context, pkt packetText) pathNames {
	w.mu.Lock()
	names := w.names
	w.mu.Unlock()
	if pkt.path == 0 || names.chain[pkt.path] != "" || time.Since(names.asked) < time.Second {
		return names
	}
	w.learn(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.names
}

func (o *watchOptions) agents() ([]*watched, error) {
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
	targets, err := o.targets.find()
	if err != nil {
		return nil, err
	}
	var out []*watched
	for _, t := range targets {
		w := &watched{client: o.targets.in.connect(t.socket), socket: t.socket, paths: paths}
		if o.paths == "" {
			if w.paths, err = t.paths(); err != nil {
				return nil, err
			}
		}
		out = append(out, w)
	}
	return out, nil
}

// explained is an event with its explanation.
type explained struct {
	event.Event
	Explanation *explain.Explanation `json:"explanation,omitempty"`
}

// eventPrinter writes the events of several agents, one at a time.
type eventPrinter struct {
	text    bool
	capture *pcapng.Writer // instead; nil: none

	mu    sync.Mutex
	out   io.Writer
	notes io.Writer
}

// captureTo makes p write a capture; "": it does not.
func (p *eventPrinter) captureTo(name string) (close func() error, err error) {
	out, close := p.out, func() error { return nil }
	switch name {
	case "":
		return close, nil
	case "-":
	default:
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600) // it has what packets carry
		if err != nil {
			return nil, fmt.Errorf("write the capture: %w", err)
		}
		out, close = f, f.Close
	}
	if p.capture, err = pcapng.NewWriter(out, "waystamp"); err != nil {
		return nil, errors.Join(fmt.Errorf("write the capture: %w", err), close())
	}
	return close, nil
}

// captured is an event as a packet of a capture.
func captured(e explained) pcapng.Packet {
	verdict := "refused"
	if e.Reported {
		verdict = "reported"
	}
	comment := fmt.Sprintf("%s: %s: %s, at %s%s", verdict, e.Reason, e.Text, e.Hook, inPlace(e.Place))
	if e.Explanation != nil {
		comment += "\n" + e.Explanation.Sentence
	}
	return pcapng.Packet{
		Time: e.Time, Interface: e.Node + "/" + e.Interface, Bytes: e.Packet, Len: int(e.Len),
		Dropped: uint64(e.Suppressed) + e.Missed, Comment: comment,
	}
}

func (p *eventPrinter) note(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.notes, format+"\n", args...)
}

// present marks that the past events of an agent have been printed.
func (p *eventPrinter) present(w *watched) {
	w.mu.Lock()
	of := w.names.node
	w.mu.Unlock()
	if of == "" {
		of = "the agent at " + w.socket
	}
	p.note("--- end of the history of %s; new refusals follow ---", of)
}

// inPlace is where in the source a packet was refused, as text behind its hook.
func inPlace(place string) string {
	if place == "" {
		return ""
	}
	return " (" + place + ")"
}

func (p *eventPrinter) event(ctx context.Context, e event.Event, w *watched) error {
	x := explained{Event: e}
	if w.paths != nil && e.Hook != event.HookWorker {
		ex := explain.Explain(e, w.paths, nil)
		x.Explanation = &ex
	}
	if p.capture != nil {
		if e.Hook == event.HookWorker { // there is no packet
			return nil
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.capture.Write(captured(x))
	}
	if !p.text {
		p.mu.Lock()
		defer p.mu.Unlock()
		return json.NewEncoder(p.out).Encode(x)
	}
	pkt := readPacket(e.Packet)
	names := w.name(ctx, pkt)
	p.mu.Lock()
	defer p.mu.Unlock()
	return printEvent(p.out, x, pkt.text(names))
}

func printEvent(out io.Writer, e explained, packet string) error {
	verdict := event.Verdict(e.Reason, e.Reported)
	var err error
	if e.Missed > 0 {
		_, err = fmt.Fprintf(out, "    %d events of %s were lost here: they were not read fast enough\n", e.Missed, e.Node)
	}
	if err != nil {
		return err
	}
	if packet != "" {
		packet += "; "
	}
	if e.Hook == event.HookWorker { // a connection, and no packet
		packet = "a connection"
	} else {
		packet += fmt.Sprintf("%d bytes", e.Len)
	}
	_, err = fmt.Fprintf(out, "%s  %s  %s  %s  %s  %s at %s%s: %s\n",
		e.Time.Local().Format(time.DateTime+".000"), e.Node, e.Interface, verdict, e.Reason, packet, e.Hook, inPlace(e.Place), e.Text)
	if e.Suppressed > 0 && err == nil {
		_, err = fmt.Fprintf(out, "    %d more like it were not shown before\n", e.Suppressed)
	}
	if e.Explanation != nil && err == nil {
		_, err = fmt.Fprintf(out, "    %s\n", e.Explanation.Sentence)
	}
	return err
}
