package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
)

// NewPotCommand is "waystamp pot". newEBPF makes the engine that runs the
// programs of the data path in the kernel, and what releases it again; it is
// called only if that engine is asked for.
func NewPotCommand(newEBPF func() (pot.Engine, func() error, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pot",
		Short: "Compute proofs by hand",
	}
	cmd.AddCommand(newPotEvalCommand(newEBPF))
	return cmd
}

type potEval struct {
	profile, rnd, engine, order, output string
}

func newPotEvalCommand(newEBPF func() (pot.Engine, func() error, error)) *cobra.Command {
	var o potEval
	cmd := &cobra.Command{
		Use:   "eval --profile FILE --rnd N",
		Short: "Send a random number through the hops of a profile and verify it",
		Long: `Send a random number through the hops of a profile, as a packet would carry
it, and verify it at the hop visited last. The first hop of the profile is the
headend; each hop uses its own masks, also in another order.

The profile is YAML; numbers are decimal or, with 0x, hexadecimal. For pot and
opot:

  prime-number: 53            # below 2^63
  validator-key: 10           # the secret polynomial at 0
  hops:                       # two or more
    - secret-share: 28        # the secret polynomial at this hop
      lpc: 21                 # Lagrange polynomial constant
      public-polynomial: 1    # the public one at this hop, without RND
      # Optional: 32 hex digits, RND then CML, XORed on the link.
      # upstream-mask: 00112233445566778899aabbccddeeff
      # downstream-mask: 00112233445566778899aabbccddeeff
    - {secret-share: 17, lpc: 48, public-polynomial: 29}
    - {secret-share: 47, lpc: 38, public-polynomial: 20}

For keyed and keyed-flow, with the hops that stamp; the egress, which has all
their keys, verifies behind the hop visited last:

  scheme: keyed-flow          # or keyed, without binding-key and flow
  path: 0x01020304
  epoch: 3
  binding-key: f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff
  flow: {source: 192.0.2.1, source-port: 4242, destination: 198.51.100.2, destination-port: 53, protocol: 17}
  hops:
    - key: 000102030405060708090a0b0c0d0e0f
    - key: 101112131415161718191a1b1c1d1e1f

Under pot and opot a hop takes CML modulo the prime and RND as it is; only the verifier refuses:
with "proof" if CML is not (validator-key + RND) modulo the prime, with "range"
if it is, but RND or CML came in at or above the prime.

Exit code 0 if the packet verifies, 4 if it is refused, 2 for wrong usage, which
a wrong profile is too.`,
		Example: `  waystamp pot eval --profile path.yaml --rnd 45
  waystamp pot eval --profile path.yaml --rnd 45 --order 1,3,2 --engine ebpf -o json`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd, newEBPF) },
	}
	cmd.Flags().StringVar(&o.profile, "profile", "", "profile `file`; - is standard input")
	cmd.Flags().StringVar(&o.rnd, "rnd", "", "random `number` that the headend starts with, below 2^64")
	cmd.Flags().StringVar(&o.engine, "engine", "model", "`engine` that computes: model (Go, math/big) or ebpf (the programs in the kernel)")
	cmd.Flags().StringVar(&o.order, "order", "", "hops in the `order` of the visit, as in 1,3,2; leaving out and repeating is allowed (default: as in the profile)")
	cmd.Flags().StringVarP(&o.output, "output", "o", "table", "`format` of the result: table or json")
	return cmd
}

func (o *potEval) run(cmd *cobra.Command, newEBPF func() (pot.Engine, func() error, error)) (err error) {
	for _, required := range []string{"profile", "rnd"} {
		if !cmd.Flags().Changed(required) {
			return command.Usagef("--%s is missing; see waystamp pot eval --help", required)
		}
	}
	var render func(io.Writer, pot.Evaluation) error
	switch o.output {
	case "table":
	case "json":
		render = renderPotJSON
	default:
		return command.Usagef("--output: %q is not a format; expect table or json", o.output)
	}
	if o.engine != "model" && o.engine != "ebpf" {
		return command.Usagef("--engine: %q is not an engine; expect model or ebpf", o.engine)
	}
	rnd, err := pot.ParseNumber(o.rnd)
	if err != nil {
		return command.Usagef("--rnd: %w", err)
	}
	p, err := await.Do(cmd.Context(), func() (pot.Profile, error) { return o.readProfile(cmd.InOrStdin()) })
	if err != nil {
		return err
	}
	order, err := parseOrder(cmd.Flags().Changed("order"), o.order, len(p.Shares))
	if err != nil {
		return err
	}
	var engine pot.Engine = pot.Model{}
	if o.engine == "ebpf" {
		if newEBPF == nil {
			return errors.New("--engine ebpf: this build has no eBPF engine; use --engine model")
		}
		e, release, startErr := newEBPF()
		if startErr != nil {
			return fmt.Errorf("start the eBPF engine: %w", startErr)
		}
		defer func() {
			if releaseErr := release(); releaseErr != nil {
				err = afterResult(err, fmt.Errorf("release the eBPF engine: %w", releaseErr))
			}
		}()
		engine = e
	}
	ev, err := pot.Evaluate(engine, p, rnd, order)
	if err != nil {
		return fmt.Errorf("evaluate %s with the %s engine: %w", o.profile, o.engine, err)
	}
	if o.output == "table" {
		render = func(w io.Writer, ev pot.Evaluation) error { return renderPotTable(w, p.Header.Scheme, ev) }
	}
	if err := render(cmd.OutOrStdout(), ev); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	if ev.Result != pot.Verified {
		return &command.ExitError{Code: command.ExitRefused} // the result says it
	}
	return nil
}

// afterResult adds an error to how a command ended. An command.ExitError with nothing
// more to say keeps its code and says that.
func afterResult(err, more error) error {
	if e, ok := errors.AsType[*command.ExitError](err); ok && e.Err == nil {
		return &command.ExitError{Code: e.Code, Err: more}
	}
	return errors.Join(err, more)
}

func (o *potEval) readProfile(stdin io.Reader) (pot.Profile, error) {
	name := o.profile
	var text []byte
	var err error
	if name == "-" {
		name = "standard input"
		text, err = io.ReadAll(stdin)
	} else {
		text, err = os.ReadFile(name)
	}
	if err != nil {
		return pot.Profile{}, fmt.Errorf("read the profile: %w", err)
	}
	p, err := pot.ParseProfile(name, text)
	if err != nil {
		return pot.Profile{}, &command.ExitError{Code: command.ExitUsage, Err: err}
	}
	return p, nil
}

// parseOrder reads hops from 1 on, separated by commas. Not given, it is nil.
func parseOrder(given bool, s string, hops int) ([]int, error) {
	if !given {
		return nil, nil
	}
	var order []int
	for _, field := range strings.Split(s, ",") {
		hop, err := strconv.ParseUint(strings.TrimSpace(field), 10, 16)
		if err != nil || hop < 1 || hop > uint64(hops) {
			return nil, command.Usagef("--order: %q is not a hop of the profile; expect numbers from 1 to %d, separated by commas", field, hops)
		}
		order = append(order, int(hop))
	}
	return order, nil
}

// potEvalJSON is the result as -o json prints it. Numbers are text, since many
// readers of JSON lose all but 53 bits.
type potEvalJSON struct {
	Verified bool           `json:"verified"`
	Reason   string         `json:"reason"` // empty if verified
	Hops     []potVisitJSON `json:"hops"`
}

type potVisitJSON struct {
	RND     string `json:"rnd"`
	CML     string `json:"cml"`
	WireRND string `json:"wire_rnd"`
	WireCML string `json:"wire_cml"`
}

func renderPotJSON(w io.Writer, ev pot.Evaluation) error {
	out := potEvalJSON{Verified: ev.Result == pot.Verified, Hops: []potVisitJSON{}}
	if !out.Verified {
		out.Reason = ev.Result.String()
	}
	for _, v := range ev.Visits {
		out.Hops = append(out.Hops, potVisitJSON{
			RND: hexNumber(v.Out.RND), CML: hexNumber(v.Out.CML),
			WireRND: hexNumber(v.Wire.RND), WireCML: hexNumber(v.Wire.CML),
		})
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(out)
}

func renderPotTable(w io.Writer, scheme model.Scheme, ev pot.Evaluation) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "HOP\tRND\tCML\tWIRE RND\tWIRE CML\t")
	for _, v := range ev.Visits {
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t\n", v.Hop,
			hexNumber(v.Out.RND), hexNumber(v.Out.CML), hexNumber(v.Wire.RND), hexNumber(v.Wire.CML))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	verdict := "verified"
	switch ev.Result {
	case pot.Proof:
		verdict = "refused (proof): CML is not (validator-key + RND) modulo the prime"
		if scheme.Keyed() {
			verdict = "refused (proof): CML is not the tag that all hops in order come to"
		}
	case pot.Range:
		verdict = "refused (range): RND or CML came to the verifier at or above the prime"
	}
	_, err := fmt.Fprintln(w, verdict)
	return err
}

func hexNumber(n uint64) string { return "0x" + strconv.FormatUint(n, 16) }
