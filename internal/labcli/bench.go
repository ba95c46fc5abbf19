package labcli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/bench"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/host"
)

// benchPart is an experiment.
type benchPart struct {
	name, short, long string
	run               func(context.Context, bench.Config) (bench.Result, error)
	runs, quickRuns   int
	each, quickEach   time.Duration
}

func benchParts() []benchPart {
	return []benchPart{
		{
			"stamp", "The time of the programs alone",
			"Runs each program on packets of its own with BPF_PROG_TEST_RUN, by scheme and number of\nsegments.",
			bench.Stamp, 9, 6, 200 * time.Millisecond, 100 * time.Millisecond,
		}, {
			"hop", "One node under load, on one CPU and on two",
			"Sends packets through one node as fast as a CPU goes: bare XDP redirect, the kernel's IPv6\nforwarding, End, H.Encaps and End.DT6, and ours in their places, on XDP and on TC; by packet\nsize, by number of segments, with compressed SIDs, with IPv4 inside, and on two CPUs.",
			bench.Hop, 11, 7, 150 * time.Millisecond, 100 * time.Millisecond,
		}, {
			"paper", "The paper's network under TCP",
			"Repeats the experiments of the paper on ordered proof of transit: its seven schemes and ours,\nTCP through five segments, offloads on and off, links of 1 to 5 Gbit/s, round trips. Needs\niperf3.",
			bench.Paper, 10, 3, time.Second, time.Second,
		}, {
			"proxy", "Functions without segment routing, under TCP",
			"Repeats the experiments of the paper on the caching SFC proxy: TCP through a function by plain\nrouting, by the kernel's own proxy (End.DT6, then H.Encaps again) and by ours; with packets\ndropped, delayed, and changed by a NAT; caches of different sizes. Needs iperf3 and nft.",
			bench.Proxy, 7, 3, time.Second, time.Second,
		}, {
			"nf", "Netfilter as a function, on one CPU",
			"Sends packets through one node's netfilter as fast as a CPU goes: by plain forwarding, by\nthe kernel's static proxy (End.DT6, then H.Encaps), and by ours in a namespace of its own,\nin the node's, and past the rules; by packet size, number of rules and number of arguments.\nThen what one packet takes at 10 000 a second, and TCP beside the same rules reached by\nplain routing. Needs nft and iperf3.",
			bench.Netfilter, 7, 3, 150 * time.Millisecond, 100 * time.Millisecond,
		}, {
			"streams", "Functions on byte streams, on one CPU",
			"Moves bytes through a function of kind stream, whose node has one CPU: one download, eight at\nonce, and connections for 1 KB, 100 KB and 10 MB, as ratios to plain routing, to a chain without\nsuch a function, to a program with io.Copy in the function's place, and to HAProxy there, if it is\ninstalled; the same on links that delay and lose; functions that change bytes; the time from SYN to\nSYN-ACK, with connect: first and early; and the memory that an idle connection takes.",
			bench.Streams, 9, 6, time.Second, 300 * time.Millisecond,
		}, {
			"zerotrust", "Sealed chains whose functions read payload",
			"Repeats the experiments of the paper on secure service function chaining in zero trust: throughput of\na download over 1 to 6 functions that read what is sealed, beside functions that see headers alone,\nunlimited and at the paper's own rates, and the time in which a page of nine files is there; CPU time\nof each process, and memory for each connection. Then the gateway beside HAProxy in its place, if it is\ninstalled: a large download by HTTP/1.1 and HTTP/2, and requests per second.",
			bench.ZeroTrust, 7, 3, 2 * time.Second, time.Second,
		}, {
			"mpls", "Labels beside SRv6, and TCP through a function by the number of labels",
			"Sends packets through one node as fast as a CPU goes, with a stack of labels and with an SRv6\nheader around the same packet: End, headend and verdict, on XDP and on TC. Then repeats the\nexperiments of the paper on the caching SFC proxy over labels: TCP through a function by the\nnumber of labels, recognised by content and by metadata, with packets dropped and delayed, and\ncaches of different sizes. Needs iperf3 and nft.",
			bench.MPLS, 9, 6, 150 * time.Millisecond, 100 * time.Millisecond,
		}, {
			"scale", "Cost over chains and segments",
			"Measures what a packet costs at a node as the chains that visit it, and the segments of a\nchain, grow in number.",
			bench.Scale, 7, 6, 150 * time.Millisecond, 100 * time.Millisecond,
		}, {
			"control", "What a change of a domain costs",
			"Measures one path's new epoch at a node that holds up to 8000 paths; a change of one chain of\n10000 by a controller with up to 1000 members over mutual TLS, without data paths; memory before and\nbehind 10 000 changes, which takes half an hour (500 with --quick); and TCP while secrets rotate\neach second. Needs iperf3.",
			bench.Control, 7, 3, 4 * time.Second, 4 * time.Second,
		},
	}
}

type benchFlags struct {
	runs     int
	duration time.Duration
	out      string
	quick    bool
	cpu      int
	only     string
	verbose  bool
}

func (f *benchFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.IntVar(&f.runs, "runs", 0, "`rounds` of measurement, each with one run of every case (default: by experiment)")
	fl.DurationVar(&f.duration, "duration", 0, "`time` of one run (default: by experiment)")
	fl.StringVar(&f.out, "out", "", "`directory` for results.json, report.md and plots")
	fl.BoolVar(&f.quick, "quick", false, "fewer cases and shorter runs")
	fl.IntVar(&f.cpu, "cpu", -1, "CPU that a node under load runs on (default: the last one)")
	fl.StringVar(&f.only, "only", "", "only cases with this `text` in their names, and their baselines")
	fl.BoolVarP(&f.verbose, "verbose", "v", false, "print the steps of labs on standard error")
}

func (f *benchFlags) check() error {
	if f.runs < 0 || f.duration < 0 {
		return command.Usagef("--runs and --duration are above 0")
	}
	return nil
}

func (f *benchFlags) config(cmd *cobra.Command, p benchPart) bench.Config {
	c := bench.Config{
		Runs: p.runs, Duration: p.each, CPU: f.cpu, Quick: f.quick, Only: f.only,
		Progress: bench.Terminal(cmd.ErrOrStderr()), Log: slog.New(slog.DiscardHandler),
	}
	if f.quick {
		c.Runs, c.Duration = p.quickRuns, p.quickEach
	}
	if f.runs > 0 {
		c.Runs = f.runs
	}
	if f.duration > 0 {
		c.Duration = f.duration
	}
	if f.verbose {
		c.Log = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
	}
	return c
}

// finish writes a result to the file of its flag, and to standard output.
func (f *benchFlags) finish(cmd *cobra.Command, r bench.Result) error {
	if f.out != "" {
		if err := r.Write(f.out); err != nil {
			return err
		}
	}
	fmt.Fprint(cmd.OutOrStdout(), r.Table())
	for _, n := range r.Notes {
		fmt.Fprintln(cmd.ErrOrStderr(), n)
	}
	return nil
}

// NewBenchCommand is `waystamp bench`.
func NewBenchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure waystamp beside the kernel without it",
		Long: `Measure waystamp and the kernel without it, in turns on the same machine: medians
with their spread, ratios with their error. Everything runs in network namespaces
of its own. Needs root, and an otherwise idle machine.`,
		Example: `  waystamp bench hop
  waystamp bench all --quick --out /tmp/bench
  waystamp bench compare before/ after/`,
	}
	for _, p := range benchParts() {
		var f benchFlags
		sub := &cobra.Command{
			Use: p.name, Short: p.short, Long: p.long, Args: command.NoArgs,
			Example: "  waystamp bench " + p.name + " --quick --out /tmp/bench",
			RunE: func(cmd *cobra.Command, _ []string) error {
				if err := f.ready(); err != nil {
					return err
				}
				ownBench(cmd)
				r, err := p.run(cmd.Context(), f.config(cmd, p))
				if err != nil {
					return err
				}
				return f.finish(cmd, r)
			},
		}
		f.add(sub)
		cmd.AddCommand(sub)
	}
	cmd.AddCommand(newBenchAllCommand(), newBenchCompareCommand(), newBenchDocsCommand(), newBenchRelayCommand())
	return cmd
}

func (f *benchFlags) ready() error {
	if err := f.check(); err != nil {
		return err
	}
	return host.Require(host.FeatureNetAdmin, host.FeatureNamespaces, host.FeatureIPv6, host.FeatureVeth, host.FeatureSEG6Local)
}

// all runs the parts one after the other. It writes the result of each part before the next
// begins, and continues after a part that fails. After an interrupt it shows the results so far,
// and names the missing ones.
func (f *benchFlags) all(cmd *cobra.Command, list []benchPart) error {
	var parts []bench.Result
	var failed []error
	began := time.Now()
	for i, p := range list {
		if w := bench.Terminal(cmd.ErrOrStderr()); w != nil {
			fmt.Fprintf(w, "bench %s, %d of %d, after %s\n", p.name, i+1, len(list), time.Since(began).Round(time.Second))
		}
		r, err := p.run(cmd.Context(), f.config(cmd, p))
		if cmd.Context().Err() != nil {
			failed = append(failed, cmd.Context().Err(), err)
			fmt.Fprintln(cmd.ErrOrStderr(), "not measured:", namesOf(list[i:]))
			break
		}
		var none *bench.NoCaseError
		if errors.As(err, &none) {
			continue
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("bench %s: %w", p.name, err))
			continue
		}
		parts = append(parts, r)
		if f.out != "" {
			if err := bench.Join("all", parts...).Write(f.out); err != nil {
				return err
			}
		}
	}
	switch {
	case len(parts) > 0:
		failed = append(failed, f.finish(cmd, bench.Join("all", parts...)))
	case len(failed) == 0:
		return &bench.NoCaseError{Only: f.only}
	}
	return errors.Join(failed...)
}

func namesOf(parts []benchPart) string {
	var names []string
	for _, p := range parts {
		names = append(names, p.name)
	}
	return strings.Join(names, ", ")
}

func newBenchAllCommand() *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use:   "all",
		Short: "All experiments, one after the other",
		Long: `Run stamp, hop, paper, proxy, nf, streams, zerotrust, mpls, scale and control, and join their results. The result of each
part is written to --out before the next part begins, and shown also if the rest
is interrupted. Takes some 35 minutes; --quick is shorter, with fewer cases and
rounds.`,
		Example: "  waystamp bench all --quick --out /tmp/bench",
		Args:    command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.ready(); err != nil {
				return err
			}
			ownBench(cmd)
			return f.all(cmd, benchParts())
		},
	}
	f.add(cmd)
	return cmd
}

func newBenchCompareCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "compare A B",
		Short: "Compare two results",
		Long: `Show every figure of two results: directories written by --out, or their
results.json. Times vary between machines, and from run to run on one machine;
compare the ratios to the baselines of the same run.`,
		Example: "  waystamp bench compare before/ after/",
		Args:    command.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			var r [2]bench.Result
			for i, path := range args {
				var err error
				if r[i], err = bench.Read(path); err != nil {
					return err
				}
			}
			fmt.Fprint(cmd.OutOrStdout(), bench.DifferenceTable(bench.Compare(r[0], r[1])))
			return nil
		},
	}
}

func newBenchDocsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "docs RESULT DIR",
		Short: "Write DIR/performance.md, its figures and plots from a result",
		Long: `Write the page on performance from a result: goals, reached or not, and plots. Plots
and the page of all figures go to DIR/performance. The same result gives the same
pages.`,
		Example: "  waystamp bench docs docs/performance/results.json docs",
		Args:    command.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(_ *cobra.Command, args []string) error {
			r, err := bench.Read(args[0])
			if err != nil {
				return err
			}
			if _, err := os.Stat(args[1]); err != nil {
				return fmt.Errorf("write the page: %w", err)
			}
			return bench.WritePage(r, args[1])
		},
	}
}

// newBenchRelayCommand is the relay that a worker of functions is compared with, as a process of
// its own. It is not for people.
func newBenchRelayCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "relay PORT",
		Short:  "Move the bytes of connections by io.Copy, until standard input ends",
		Hidden: true,
		Args:   command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			port, err := strconv.ParseUint(args[0], 10, 16)
			if err != nil {
				return command.Usagef("PORT: %w", err)
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			go func() {
				io.Copy(io.Discard, cmd.InOrStdin())
				cancel()
			}()
			return bench.Relay(ctx, uint16(port), func() error {
				_, err := fmt.Fprintln(cmd.OutOrStdout(), "ready")
				return err
			})
		},
	}
}
