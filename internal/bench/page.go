package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// goal is what the data path must reach.
type goal struct {
	text   string
	figure string
	want   float64
	value  func(Figure, map[string]Figure) float64
	less   bool // the value must not be above want
}

// byRatio is the ratio to the figure's baseline.
func byRatio(f Figure, _ map[string]Figure) float64 { return f.Ratio }

// byTime is how many times as long as another figure it takes.
func byTime(other string) func(Figure, map[string]Figure) float64 {
	return func(f Figure, all map[string]Figure) float64 {
		if o, ok := all[other]; ok {
			return f.Median / o.Median
		}
		return 0
	}
}

func goals() []goal {
	return []goal{
		{"End + opot on XDP: × the packet rate of the kernel's unstamped End", "hop/end-opot/xdp", 3.7, byRatio, false},
		{"End + opot on XDP: × the time of a bare XDP redirect", "hop/end-opot/xdp", 1.3, byTime("hop/redirect/xdp"), true},
		{"End + keyed on XDP: × the kernel's End", "hop/end-keyed/xdp", 3.4, byRatio, false},
		{"headend with first stamp on XDP: × the kernel's H.Encaps", "hop/headend-opot/xdp", 4, byRatio, false},
		{"verify opot and decapsulate on XDP: × the kernel's End.DT6", "hop/verify-opot/xdp", 3, byRatio, false},
		{"verify keyed and decapsulate on XDP: × the kernel's End.DT6", "hop/verify-keyed/xdp", 3, byRatio, false},
		{"TCP, offloads on, opot: × the kernel's SRv6", "tcp/opot/offload-on", 1.03, byRatio, false},
		{"TCP, offloads on, opot: × plain IPv6", "tcp-to-ipv6/opot/offload-on", 1, byRatio, false},
		{"TCP, offloads on, keyed: × the kernel's SRv6", "tcp/keyed/offload-on", 1.03, byRatio, false},
		{"TCP, offloads on, keyed: × plain IPv6", "tcp-to-ipv6/keyed/offload-on", 1, byRatio, false},
		{"TCP, offloads off, opot on TC: × the kernel's SRv6", "tcp/opot/offload-off", 1.4, byRatio, false},
		{"TCP, offloads off, opot on TC: × plain IPv6", "tcp-to-ipv6/opot/offload-off", 1, byRatio, false},
		{"TCP, offloads off, opot on XDP: × the kernel's SRv6", "tcp/opot-xdp/offload-off", 1.8, byRatio, false},
		{"round trip, offloads on, opot: × as quick as the kernel's SRv6", "rtt/opot/offload-on", 1, byRatio, false},
		{"round trip, offloads on, keyed: × as quick as the kernel's SRv6", "rtt/keyed/offload-on", 1, byRatio, false},
		{fmt.Sprintf("End + keyed, %d chains: × the time of one chain, beyond the generator's own", chainsMax), fmt.Sprintf("scale/end-keyed/chains-%d", chainsMax), 1.1, beyondGenerator, true},
		{"End + opot, 16 segments: × the time of 2", "scale/end-opot/segments-16", 1.1, byTime("scale/end-opot/segments-2"), true},
		{"TCP through a function, super-packets whole: × plain routing", "proxy/tcp/unaware", 0.97, byRatio, false},
		{"TCP through a function, super-packets whole: × the kernel's static proxy", "proxy/tcp-to-static/unaware", 1.25, byRatio, false},
		{"TCP through a function, super-packets cut: × plain routing", "proxy/tcp-cut/unaware", 0.97, byRatio, false},
		{"TCP through a function, super-packets cut: × the kernel's static proxy", "proxy/tcp-cut-to-static/unaware", 1.25, byRatio, false},
		{"packets of a function that find their header, cache large enough: part", "proxy/tcp/unaware", 1, found, false},
		{"the same, super-packets cut", "proxy/tcp-cut/unaware", 1, found, false},
		{"the same, 1 % dropped", "proxy/drop/unaware", 1, found, false},
		{"the same, 5 ms in the function, 10 000 headers", "proxy/delay/unaware-10000", 1, found, false},
		{"TCP through a function, 11 segments: × the rate with 2", "proxy/segments/11", 0.97, byRatio, false},
	}
}

// found is the part of the packets that came back from a function that found
// their header.
func found(f Figure, _ map[string]Figure) float64 {
	return f.Params["tx_success"] / (f.Params["tx_success"] + f.Params["tx_not_cached"])
}

// beyondGenerator is how many times as long a packet takes at the node with many
// chains, without what the generator takes longer.
func beyondGenerator(f Figure, all map[string]Figure) float64 {
	one, ok := all["scale/end-keyed/chains-1"]
	dropMany, ok2 := all[fmt.Sprintf("scale/drop/chains-%d", chainsMax)]
	dropOne, ok3 := all["scale/drop/chains-1"]
	if !ok || !ok2 || !ok3 {
		return 0
	}
	return (f.Median - dropMany.Median) / (one.Median - dropOne.Median)
}

// Page is docs/performance.md: goals first, then all figures. Its plots are in
// a folder beside it.
func (r Result) Page(plots []string) string {
	var b strings.Builder
	b.WriteString("# Performance\n\n")
	b.WriteString("Made by `waystamp bench docs docs/performance/results.json docs`; do not edit. To repeat every figure:\n`waystamp bench all --out DIR`, or with `--quick` in three minutes, with fewer and shorter runs.\n\n")
	r.goals(&b, true)
	inFolder := make([]string, len(plots))
	for i, p := range plots {
		inFolder[i] = "performance/" + p
	}
	r.body(&b, inFolder)
	return b.String()
}

// goals is a table of what must be reached, and what was; every: also of goals
// that nothing was measured for.
func (r Result) goals(b *strings.Builder, every bool) {
	all := map[string]Figure{}
	for _, f := range r.Figures {
		all[f.Name] = f
	}
	head := "## Goals\n\n| goal | figure | wanted | measured | |\n|---|---|---:|---:|---|\n"
	rows := 0
	for _, g := range goals() {
		if _, ok := all[g.figure]; !ok && !every {
			continue
		}
		if rows++; rows == 1 {
			b.WriteString(head)
		}
		sign := "≥"
		if g.less {
			sign = "≤"
		}
		f, ok := all[g.figure]
		x := 0.0
		if ok {
			x = g.value(f, all)
		}
		measured, verdict := "–", "not measured"
		if x > 0 {
			measured, verdict = fmt.Sprintf("%.2f", x), "not reached"
			if g.less && x <= g.want || !g.less && x >= g.want {
				verdict = "reached"
			}
		}
		fmt.Fprintf(b, "| %s | %s | %s %.2f | %s | %s |\n", g.text, g.figure, sign, g.want, measured, verdict)
	}
	if rows > 0 {
		b.WriteString("\n")
	}
}

// WritePage writes dir/performance.md, and the plots to dir/performance.
func WritePage(r Result, dir string) error {
	folder := filepath.Join(dir, "performance")
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return fmt.Errorf("make the folder of the plots: %w", err)
	}
	plots, err := r.Plots(folder)
	if err != nil {
		return err
	}
	slices.Sort(plots)
	if err := os.WriteFile(filepath.Join(dir, "performance.md"), []byte(r.Page(plots)), 0o666); err != nil {
		return fmt.Errorf("write the page: %w", err)
	}
	return nil
}
