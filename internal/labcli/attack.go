package labcli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/attack"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/model"
)

func newLabAttackCommand() *cobra.Command {
	var (
		o       labCommand
		schemes []string
		only    []string
		list    bool
		output  string
	)
	cmd := &cobra.Command{
		Use:   "attack",
		Short: "Mount every known attack on a lab, and check the outcome",
		Long: `Mount every known attack on every scheme, in a lab whose attacker controls the
router that connects all links of the domain. A program on that router captures
packets of real traffic with raw sockets and sends altered or new ones; it has no
secrets. Each attack has an expected outcome: refused for one reason, with the right
explanation, or not detected, as SECURITY.md says. Any other refusal is a failure,
too.

Needs root. Changes nothing outside the lab's namespaces, and removes them at the
end, also after Ctrl-C or when the terminal is closed. Exit code 0 if every
outcome is as expected, 1 otherwise.`,
		Example: `  waystamp lab attack
  waystamp lab attack --scheme keyed,keyed-flow --only preplay -o json
  waystamp lab attack --list`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains([]string{"table", "json", "markdown"}, output) {
				return command.Usagef("--output: %q is not a format; expect table, json or markdown", output)
			}
			known := attack.Attacks()
			if list {
				return listAttacks(cmd.OutOrStdout(), known, output)
			}
			c := attack.Config{Prefix: o.prefix, RunDir: o.runDir, Only: only, Log: o.log(cmd)}
			for _, name := range schemes {
				var s model.Scheme
				if err := s.UnmarshalText([]byte(name)); err != nil {
					return command.Usagef("--scheme: %w", err)
				}
				if slices.Contains(c.Schemes, s) {
					return command.Usagef("--scheme: %s is named twice", s)
				}
				c.Schemes = append(c.Schemes, s)
			}
			for i, name := range only {
				if !slices.ContainsFunc(known, func(a attack.Attack) bool { return a.Name == name }) {
					return command.Usagef("--only: there is no attack %q; see waystamp lab attack --list", name)
				}
				if slices.Contains(only[:i], name) {
					return command.Usagef("--only: %s is named twice", name)
				}
			}
			return runAttacks(cmd, c, known, output)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&schemes, "scheme", nil, "proof `schemes` to attack: pot, opot, keyed, keyed-flow (default: all)")
	f.StringSliceVar(&only, "only", nil, "`names` of the attacks to mount (default: all)")
	f.BoolVar(&list, "list", false, "list the attacks, and mount none")
	f.StringVarP(&output, "output", "o", "table", "`format` of the result: table, json, or markdown as in SECURITY.md")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "print more on standard error")
	o.flags(cmd, "prefix of the `names` of namespaces and pins (default: random)")
	return cmd
}

func listAttacks(w io.Writer, known []attack.Attack, output string) error {
	if output == "json" {
		return writeIndented(w, known)
	}
	for _, a := range known {
		if _, err := fmt.Fprintf(w, "%-18s %s (%s)\n", a.Name, a.What, a.Where); err != nil {
			return err
		}
	}
	return nil
}

func runAttacks(cmd *cobra.Command, c attack.Config, known []attack.Attack, output string) error {
	ownLabs(cmd, c.RunDir)
	narration, result := cmd.ErrOrStderr(), cmd.OutOrStdout()
	fmt.Fprintln(narration, "building a lab")
	c.Up = func(prefix string, took time.Duration) {
		fmt.Fprintf(narration, "lab %s is up, in %.1f s\n", prefix, took.Seconds())
	}
	scheme := ""
	c.Done = func(r attack.Result) {
		if output != "table" {
			fmt.Fprintf(narration, "%s, %s: %s\n", r.Scheme, r.Attack, r.Observed)
			return
		}
		if r.Scheme != scheme {
			scheme = r.Scheme
			fmt.Fprintf(result, "\n%s\n", scheme)
		}
		writeAttack(result, r, known)
	}
	start := time.Now()
	results, err := attack.Run(cmd.Context(), c)
	if err != nil {
		return err
	}
	switch output {
	case "json":
		err = writeIndented(result, results)
	case "markdown":
		_, err = io.WriteString(result, attack.Table(results))
	}
	if err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	wrong := 0
	for _, r := range results {
		if !r.OK {
			wrong++
		}
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %d attacks had another outcome than they must", wrong, len(results))
	}
	fmt.Fprintf(narration, "\nAll %d attacks had the outcome that they must, in %.1f s.\n", len(results), time.Since(start).Seconds())
	return nil
}

// writeAttack writes one row, with the explanation of the packet below it.
func writeAttack(w io.Writer, r attack.Result, known []attack.Attack) {
	mark := "ok   "
	if !r.OK {
		mark = "WRONG"
	}
	i := slices.IndexFunc(known, func(a attack.Attack) bool { return a.Name == r.Attack })
	fmt.Fprintf(w, "  %s %-18s %-24s %s\n", mark, r.Attack, r.Observed, known[i].What)
	if r.Explained != "" {
		fmt.Fprintf(w, "  %44s%s\n", "", "explained: "+r.Explained)
	}
	if !r.OK {
		fmt.Fprintf(w, "  %44s%s\n", "", "expected "+r.Expected+": "+r.Problem)
	}
}

func writeIndented(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
