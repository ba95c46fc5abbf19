package cli

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/doctor"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
)

type doctorOptions struct {
	plan, file, node                           string
	instance, runDir, stateDir, pinDir, output string
	fix, all                                   bool
}

// NewDoctorCommand is "waystamp doctor".
func NewDoctorCommand() *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this machine can run a node, and print how to correct problems",
		Long: `Check whether this machine can run a node: its kernel, the rights of this process,
the directories of an agent, and, with a plan, the interfaces, their settings, the programs
of others on them, the next hops of functions, interfaces that are in no plan, and what costs
time. Each check has the result yes, no or unknown; its effect; and the command that corrects
the problem. The command loads programs into the kernel and removes them again, and sends one
datagram (to the port discard) to each next hop of a function; it changes nothing else, and no
agent needs to run. With --file and --node it compares the machine with the plan that the node
would have, before there is one.

--fix mounts the bpf file system, makes missing directories, and switches off settings that
lose forwarded packets. It changes no setting that could let unchecked packets pass, such as
forwarding.

Exit code 0 if the machine is fit, 1 if it is not, 3 if a check is unknown. Checks that
only concern speed, such as a feature of newer kernels, do not change the exit code.`,
		Example: `  waystamp doctor
  waystamp doctor --plan /etc/waystamp/r1.json
  waystamp doctor --plan /etc/waystamp/r1.json --fix
  waystamp doctor --file domain.yaml --node r1
  waystamp doctor --all -o json`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&o.plan, "plan", "", "plan `file` of the node, to compare the machine with")
	f.StringVarP(&o.file, "file", "f", "", "domain `file` to take the node's plan from; - is standard input")
	f.StringVar(&o.node, "node", "", "`name` of the node, with --file")
	f.StringVar(&o.instance, "instance", defaultInstance, "`name` of the node's data path on the machine")
	f.StringVar(&o.runDir, "run-dir", "", "`directory` of the agent's socket (default "+defaultRunDir+"/INSTANCE)")
	f.StringVar(&o.stateDir, "state-dir", "", "`directory` for state that must survive a reboot (default "+defaultStateDir+"/INSTANCE)")
	f.StringVar(&o.pinDir, "pin-dir", dataplane.DefaultPinDir, "`directory` on a bpf filesystem for programs and maps")
	f.BoolVar(&o.fix, "fix", false, "correct problems whose correction lets no further packets pass")
	f.BoolVar(&o.all, "all", false, "also show checks without a problem")
	command.OutputFlag(cmd, &o.output, "text", "json", "yaml")
	return cmd
}

func (o *doctorOptions) run(cmd *cobra.Command) error {
	if err := command.CheckOutput(o.output, "text", "json", "yaml"); err != nil {
		return err
	}
	if err := agent.CheckInstance(o.instance); err != nil {
		return command.Usagef("--instance: %q %w", o.instance, err)
	}
	m := doctor.Machine{Instance: o.instance, RunDir: o.runDir, StateDir: o.stateDir, PinDir: o.pinDir}
	if m.RunDir == "" {
		m.RunDir = filepath.Join(defaultRunDir, o.instance)
	}
	if m.StateDir == "" {
		m.StateDir = filepath.Join(defaultStateDir, o.instance)
	}
	n, err := o.nodePlan(cmd)
	if err != nil {
		return err
	}
	if n != nil {
		m.Plan = n
		if m.Net, m.NoNet = host.Open(nil); m.NoNet == nil {
			defer m.Net.Close()
		}
	}
	r := m.Look()
	if o.fix {
		var errs []error
		for _, f := range r.Fixable() {
			fmt.Fprintf(cmd.ErrOrStderr(), "doctor: %s\n", f.Mend)
			errs = append(errs, f.Fix())
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
		if len(errs) > 0 {
			r = m.Look()
		}
	}
	if o.output == "text" {
		err = writeReport(cmd.OutOrStdout(), r, o.all)
	} else {
		err = command.WriteOutput(cmd.OutOrStdout(), o.output, r)
	}
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	switch r.Fit() {
	case doctor.No:
		return &command.ExitError{Code: command.ExitFailed} // the report says it
	case doctor.Unknown:
		return &command.ExitError{Code: command.ExitDifferent}
	}
	return nil
}

// nodePlan reads the plan to compare the machine with; nil: none is named.
func (o *doctorOptions) nodePlan(cmd *cobra.Command) (*plan.Node, error) {
	switch {
	case o.plan != "" && o.file != "":
		return nil, command.Usagef("--plan and --file exclude each other: a plan has one source")
	case o.file == "" && o.node != "":
		return nil, command.Usagef("--node goes with --file: the plan of which domain?")
	case o.file != "" && o.node == "":
		return nil, command.Usagef("--file needs --node: which of its nodes is this machine?")
	case o.file != "":
		m, err := command.ReadManifest(cmd.Context(), o.file, cmd.InOrStdin(), cmd.ErrOrStderr())
		if err != nil {
			return nil, err
		}
		d, err := plan.Compile(m.Domain, nil)
		if err != nil {
			return nil, err
		}
		for i, n := range d.Nodes {
			if n.Name == o.node {
				return &d.Nodes[i], nil
			}
		}
		return nil, command.Usagef("--node: %s has no node %q", command.ShownName(o.file), o.node)
	case o.plan == "":
		return nil, nil
	}
	b, err := planfile.Read(o.plan)
	if err != nil {
		return nil, err
	}
	n, err := plan.DecodeNode(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.plan, err)
	}
	return &n, nil
}

// writeReport is for people: a block for each finding that needs one, worst first.
func writeReport(out io.Writer, r doctor.Report, all bool) error {
	var b strings.Builder
	counts := map[doctor.Verdict]int{}
	for _, f := range r.Findings {
		counts[f.Verdict]++
	}
	for _, w := range []struct {
		verdict doctor.Verdict
		weight  doctor.Weight
		label   string
	}{
		{doctor.No, doctor.Fatal, "fatal"}, {doctor.No, doctor.Warning, "wrong"},
		{doctor.Unknown, doctor.Fatal, "unknown"}, {doctor.Unknown, doctor.Warning, "unknown"},
		{doctor.No, doctor.Cost, "slower"}, {doctor.Unknown, doctor.Cost, "unknown"},
		{doctor.Yes, doctor.Fatal, "ok"}, {doctor.Yes, doctor.Warning, "ok"}, {doctor.Yes, doctor.Cost, "ok"},
	} {
		for _, f := range r.Findings {
			if f.Verdict != w.verdict || f.Weight != w.weight || f.Verdict == doctor.Yes && !all {
				continue
			}
			fmt.Fprintf(&b, "%-7s  %s: %s\n", w.label, f.Check, f.Says)
			if f.Effect != "" {
				fmt.Fprintf(&b, "         so that %s\n", f.Effect)
			}
			if f.Mend != "" {
				fmt.Fprintf(&b, "         mend it: %s\n", f.Mend)
			}
		}
	}
	fit := map[doctor.Verdict]string{doctor.Yes: "this machine is fit", doctor.No: "this machine is not fit", doctor.Unknown: "no problem was found, but some checks could not be made"}
	fmt.Fprintf(&b, "%s: %d checks, %d ok, %d not, %d could not tell\n", fit[r.Fit()], len(r.Findings), counts[doctor.Yes], counts[doctor.No], counts[doctor.Unknown])
	_, err := io.WriteString(out, b.String())
	return err
}
