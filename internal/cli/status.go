package cli

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/plan"
)

func newStatusCommand(in surroundings) *cobra.Command {
	o := statusOptions{targets: targetFlags{in: in}, now: time.Now}
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the state of a node: its plan, interfaces, warnings and refusals",
		Long: `Show the state of a node: the plan in force and since when, the epochs of its
paths, the programs on its interfaces, packets refused in the last minute, and
whatever is wrong.

Without --socket, --instance and --lab all agents of this machine are asked, but for
those of labs. Exit code 1 if an agent does not answer, has ended and left its data path,
or reports an error or a part of its plan that is not in force; warnings leave it at 0.`,
		Example: `  waystamp status
  waystamp status --lab ws-1a2b
  waystamp status -o json`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.targets.add(cmd)
	command.OutputFlag(cmd, &o.output, "text", "json", "yaml")
	return cmd
}

type statusOptions struct {
	targets targetFlags
	output  string
	now     func() time.Time
}

// run shows every agent, also behind one that does not answer.
func (o *statusOptions) run(cmd *cobra.Command) error {
	if err := command.CheckOutput(o.output, "text", "json", "yaml"); err != nil {
		return err
	}
	targets, err := o.targets.find()
	if err != nil {
		return err
	}
	var errs []error
	wrong := false
	for i, t := range targets {
		c := o.targets.in.connect(t.socket)
		s, err := c.Status(cmd.Context())
		c.Close()
		if err != nil {
			errs = append(errs, err)
			continue
		}
		wrong = wrong || s.Error != "" || len(s.Problems) > 0 || !s.Ready
		if o.output != "text" {
			err = command.WriteOutput(cmd.OutOrStdout(), o.output, s)
		} else {
			if i > 0 {
				fmt.Fprintln(cmd.OutOrStdout())
			}
			err = writeStatus(cmd.OutOrStdout(), s, o.now())
		}
		if err != nil {
			return fmt.Errorf("write the status: %w", err)
		}
	}
	if len(o.targets.sockets)+len(o.targets.instances)+len(o.targets.labs) == 0 {
		for _, name := range o.targets.in.left() {
			socket := agent.SocketPath(filepath.Join(o.targets.in.runDir, name))
			if !slices.ContainsFunc(targets, func(t target) bool { return t.socket == socket }) {
				errs = append(errs, leftBy(name))
			}
		}
	}
	if len(errs) == 0 && wrong {
		return &command.ExitError{Code: command.ExitFailed} // the status says it
	}
	return errors.Join(errs...)
}

// writeStatus is a block of lines for people.
func writeStatus(out io.Writer, s api.Status, now time.Time) error {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-10s  %s\n", name, fmt.Sprintf(format, args...))
	}
	state := "ready"
	switch {
	case !s.Ready:
		state = "not ready"
	case s.Error != "" || len(s.Problems) > 0:
		state = "ready, with problems"
	}
	fmt.Fprintf(&b, "node %s, instance %s: %s\n", command.OrDash(s.Node), s.Instance, state)
	if s.Ready {
		line("plan", "%.12s, in force since %s (%s), number %d since the agent started",
			s.Plan, s.Since.Local().Format(time.DateTime), now.Sub(s.Since).Round(time.Second), s.Generation)
	}
	for i, p := range epochLines(s.Paths) {
		line(unlessFirst(i, "epochs"), "%s", p)
	}
	for i, f := range s.Interfaces {
		line(unlessFirst(i, "interfaces"), "%s", interfaceLine(f))
	}
	if len(s.Recent.Refusals) == 0 {
		line("refused", "no packet in the last %s", lately(s.Recent.Seconds))
	}
	for i, r := range s.Recent.Refusals {
		text := fmt.Sprintf("%d %s", r.Dropped+r.Reported, r.Reason)
		if r.Reported > 0 {
			by := "on-violation is report"
			if event.Verdict(r.Reason, true) == "audited" {
				by = "guard is audit"
			}
			text += fmt.Sprintf(" (%d of them forwarded: %s)", r.Reported, by)
		}
		line(unlessFirst(i, "refused"), "%s, in the last %s: %s", text, lately(s.Recent.Seconds), r.Text)
	}
	if s.Error != "" {
		line("error", "%s", s.Error)
	}
	for _, p := range s.Problems {
		line("problem", "%s", p)
	}
	for _, w := range s.Warnings {
		line("warning", "%s", w)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func unlessFirst(i int, name string) string {
	if i > 0 {
		return ""
	}
	return name
}

func lately(seconds int) string {
	if seconds >= 55 && seconds <= 75 {
		return "minute"
	}
	return (time.Duration(seconds) * time.Second).String()
}

// epochsMost is how many paths a status shows.
const epochsMost = 8

// epochLines has a line for each path, with the roles of the node in it.
func epochLines(paths []api.PathState) (out []string) {
	type path struct {
		api.PathState
		roles []string
	}
	var all []path
	for _, p := range paths {
		i := slices.IndexFunc(all, func(o path) bool { return o.Path == p.Path && o.Epoch == p.Epoch })
		if i < 0 {
			i, all = len(all), append(all, path{PathState: p})
		}
		if !slices.Contains(all[i].roles, p.Role) {
			all[i].roles = append(all[i].roles, p.Role)
		}
	}
	for i, p := range all {
		if i == epochsMost {
			return append(out, fmt.Sprintf("and %d more; -o json has all", len(all)-i))
		}
		out = append(out, fmt.Sprintf("chain %s, %s%s: %d (%s)", p.Chain, p.Direction, plan.FromTo(p.From, p.To), p.Epoch, strings.Join(p.roles, ", ")))
	}
	return out
}

func interfaceLine(i api.Interface) string {
	var on []string
	for _, h := range []struct {
		name  string
		there bool
	}{{"tc", i.TC}, {"xdp", i.XDP}, {"tc egress", i.Out}} {
		if h.there {
			on = append(on, h.name)
		}
	}
	text := "no program attached"
	if len(on) > 0 {
		text = strings.Join(on, ", ")
	}
	if len(i.Functions) > 0 {
		return fmt.Sprintf("%s (of function %s): %s", i.Name, strings.Join(i.Functions, ", "), text)
	}
	return fmt.Sprintf("%s (%s): %s", i.Name, i.Role, text)
}
