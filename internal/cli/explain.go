package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
)

type explainOptions struct {
	paths  string
	names  []string
	output string

	controller controllerFlag
	chain      string
}

// NewExplainCommand is "waystamp explain".
func NewExplainCommand() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain --paths FILE [EVENTS] | --controller ADDRESS",
		Short: "Explain why packets were refused",
		Long: `Explain in a sentence why each packet was refused. EVENTS is a file of events as
waystamp watch -o json prints them, one JSON object a line; without it, or with -,
they are read from standard input.

The paths file holds the secrets of all hops. With them the command tries hypotheses:
hops left out, in another order or visited again, secrets of another epoch or chain,
a bit changed on the path. It prints a hypothesis only if it gives exactly the values
that the packet carried; if none does, it prints that. A file of secrets that other
users can read or change is refused: its mode must be 0600.

With --controller, or --chain, and without --paths, the command prints the explanations of the controller: agents that have a
controller send it their refused packets, and it keeps the last 10,000 of all nodes.`,
		Example: `  waystamp watch -o json | waystamp explain --paths paths.json
  waystamp explain --chain web
  waystamp explain --paths paths.json --name fc00:0:0:401::=r4 events.jsonl`,
		Args: command.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	f := cmd.Flags()
	f.StringVar(&o.paths, "paths", "", "`file` with the secrets of all paths, as waystamp plan writes it")
	f.StringArrayVar(&o.names, "name", nil, "`SID=NAME` of something that is no part of the domain; several are possible")
	o.controller.add(cmd)
	o.controller.addChain(cmd, &o.chain)
	f.StringVarP(&o.output, "output", "o", "text", "`format`: text, or json (one object a line)")
	return cmd
}

func (o *explainOptions) run(cmd *cobra.Command, args []string) error {
	return command.UnlessAsked(cmd.Context(), func() error { return o.explain(cmd, args) })
}

func (o *explainOptions) explain(cmd *cobra.Command, args []string) (err error) {
	if len(o.controller.addresses) > 0 || o.chain != "" {
		if err := command.CheckOutput(o.output, "text", "json"); err != nil {
			return err
		}
		if o.paths != "" || len(o.names) > 0 || len(args) > 0 {
			return command.Usagef("the controller explains what nodes have told it; leave out --paths, --name and EVENTS, or --controller and --chain")
		}
		return o.ask(cmd)
	}
	if o.paths == "" {
		return command.Usagef("--paths is missing, or --controller; see waystamp explain --help")
	}
	var render func(io.Writer, explain.Explanation) error
	switch o.output {
	case "text":
		render = renderExplanation
	case "json":
		render = func(w io.Writer, x explain.Explanation) error { return json.NewEncoder(w).Encode(x) }
	default:
		return command.Usagef("--output is %q; expect text or json", o.output)
	}
	names, err := parseNames(o.names)
	if err != nil {
		return err
	}
	b, err := planfile.Read(o.paths)
	if err != nil {
		return notFoundIsUsage(fmt.Errorf("read the paths: %w", err))
	}
	paths, err := plan.DecodePaths(b)
	if err != nil {
		return command.Usagef("paths %s: %w", o.paths, err)
	}

	in, name := cmd.InOrStdin(), "standard input"
	if len(args) == 1 && args[0] != "-" {
		f, err := os.Open(args[0])
		if err != nil {
			return notFoundIsUsage(fmt.Errorf("read events: %w", err))
		}
		defer f.Close() // read only: nothing can be lost
		in, name = f, args[0]
	}
	n := 0
	for e, err := range event.Read(in) {
		if err != nil {
			return command.Usagef("events in %s: %w", name, err)
		}
		n++
		if err := render(cmd.OutOrStdout(), explain.Explain(e, paths, names)); err != nil {
			return fmt.Errorf("write the explanation: %w", err)
		}
	}
	if n == 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "there are no events in %s\n", name)
	}
	return nil
}

// notFoundIsUsage: a file that is not there was named wrongly.
func notFoundIsUsage(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return &command.ExitError{Code: command.ExitUsage, Err: err}
	}
	return err
}

func parseNames(flags []string) (explain.Names, error) {
	names := explain.Names{}
	for _, f := range flags {
		sid, name, ok := strings.Cut(f, "=")
		if !ok || name == "" {
			return nil, command.Usagef("--name: %q is not of the form SID=NAME", f)
		}
		a, err := netip.ParseAddr(sid)
		if err != nil || !a.Is6() || a.Zone() != "" {
			return nil, command.Usagef("--name: %q is not an IPv6 address", sid)
		}
		names[a] = name
	}
	return names, nil
}

func renderExplanation(w io.Writer, x explain.Explanation) error {
	where := x.Node
	if x.Interface != "" {
		where += " " + x.Interface
	}
	verdict := event.Verdict(x.Reason, x.Reported)
	reason := x.Reason
	if x.Place != "" {
		reason += " at " + x.Place
	}
	_, err := fmt.Fprintf(w, "%s %s (%s): %s\n", where, verdict, reason, x.Sentence)
	return err
}
