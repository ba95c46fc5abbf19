package bench

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"text/tabwriter"
)

// number is a value with as many digits as mean something.
func number(x float64) string {
	switch a := math.Abs(x); {
	case x == 0:
		return "–"
	case a >= 100:
		return fmt.Sprintf("%.0f", x)
	case a >= 10:
		return fmt.Sprintf("%.1f", x)
	case a >= 1:
		return fmt.Sprintf("%.2f", x)
	}
	return fmt.Sprintf("%.3f", x)
}

// times is a ratio to a baseline with what is known of its error.
func (f Figure) times() string {
	if f.Ratio == 0 {
		return ""
	}
	s := fmt.Sprintf("%.2f ×", f.Ratio)
	if f.RatioLow > 0 {
		s += fmt.Sprintf(" (%.2f–%.2f)", f.RatioLow, f.RatioHigh)
	}
	return s
}

// Markdown is the report. plots are the names of files beside it, without their
// endings.
func (r Result) Markdown(plots []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# waystamp bench %s\n\n", r.Command)
	r.goals(&b, false)
	r.body(&b, plots)
	return b.String()
}

func (r Result) body(b *strings.Builder, plots []string) {
	r.measured(b)
	list(b, "How", r.Setup)
	list(b, "To be known", r.Notes)
	r.tables(b, plots)
}

// measured says when and where.
func (r Result) measured(b *strings.Builder) {
	m := r.Machine
	fmt.Fprintf(b, "Measured %s in %.0f seconds on %d × %s (%s), Linux %s.\n", r.Started.Format("2006-01-02 15:04 UTC"), r.Seconds, m.CPUs, m.CPU, m.Arch, m.Kernel)
	if len(m.Mitigations) > 0 {
		fmt.Fprintf(b, "CPU: %s.\n", strings.Join(m.Mitigations, "; "))
	}
	b.WriteString("\nEvery figure was measured in turns with its baseline. Ratios above 1 are better than the baseline; in brackets is where the\ntrue median lies with 95 % probability.\n")
}

func list(b *strings.Builder, heading string, sentences []string) {
	if len(sentences) > 0 {
		fmt.Fprintf(b, "\n## %s\n\n", heading)
		for _, s := range sentences {
			fmt.Fprintf(b, "- %s\n", s)
		}
	}
}

// ofGroup are the plots of a group of figures.
func ofGroup(plots []string, group string) (of []string) {
	for _, p := range plots {
		if groupOf(filepath.Base(p)) == group {
			of = append(of, p)
		}
	}
	return of
}

// tables has all figures by group, each with its plots.
func (r Result) tables(b *strings.Builder, plots []string) {
	names, by := r.groups()
	for _, g := range names {
		fmt.Fprintf(b, "\n## %s\n", g)
		if c, ok := commands[g]; ok {
			fmt.Fprintf(b, "\nAgain: `waystamp bench %s`.\n", c)
		}
		for _, p := range ofGroup(plots, g) {
			fmt.Fprintf(b, "\n![%s](%s.svg)\n", p, p)
		}
		net, headers := false, false
		for _, f := range by[g] {
			net = net || f.Net > 0
			headers = headers || g == "rho" && f.Params["efficiency"] > 0
		}
		b.WriteString("\n| figure | unit | median | min | max | n | baseline | ratio |")
		if net {
			b.WriteString(" net | net ratio |")
		}
		if headers {
			b.WriteString(" by headers alone |")
		}
		b.WriteString("\n|---|---|---:|---:|---:|---:|---|---:|")
		if net {
			b.WriteString("---:|---:|")
		}
		if headers {
			b.WriteString("---:|")
		}
		b.WriteByte('\n')
		for _, f := range by[g] {
			fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %d | %s | %s |", f.Name, f.Unit, number(f.Median), number(f.Min), number(f.Max), f.N, f.Baseline, f.times())
			if net {
				ratio := ""
				if f.NetRatio > 0 {
					ratio = fmt.Sprintf("%.2f ×", f.NetRatio)
				}
				fmt.Fprintf(b, " %s | %s |", number(f.Net), ratio)
			}
			if headers {
				fmt.Fprintf(b, " %.3f |", f.Params["efficiency"])
			}
			b.WriteByte('\n')
		}
		boxTable(b, by[g])
		proxyTable(b, by[g])
	}
}

// commands measure the figures of a group again, by its name.
var commands = map[string]string{
	"stamp": "stamp", "hop": "hop", "cores": "hop --only cores-", "scale": "scale",
	"tcp": "paper --only tcp/", "tcp-to-ipv6": "paper --only tcp/", "rtt": "paper --only rtt/", "rtt-dense": "paper --only rtt-dense/",
	"path": "paper --only path/", "path-to-ipv6": "paper --only path/",
	"bit-rate": "paper --only bit-rate/", "packet-rate": "paper --only bit-rate/", "rho": "paper --only bit-rate/",
	"proxy": "proxy", "streams": "streams", "streams-to-haproxy": "streams --only streams/short", "mpls": "mpls", "zt": "zerotrust", "nf": "nf", "nf-to-end": "nf",
}

// boxTable is the spread of single values.
func boxTable(b *strings.Builder, figures []Figure) {
	first := true
	for _, f := range figures {
		if f.Box == nil {
			continue
		}
		if first {
			b.WriteString("\n| figure | unit | values | low | quartile | median | quartile | high | beyond | highest | mean |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n")
			first = false
		}
		x := f.Box
		fmt.Fprintf(b, "| %s | %s | %d | %s | %s | %s | %s | %s | %d | %s | %s |\n", f.Name, f.Unit, x.N,
			number(x.Low), number(x.Q1), number(x.Median), number(x.Q3), number(x.High), x.Outliers, number(x.Max), number(x.Mean))
	}
}

// proxyTable is what the proxies of functions counted, as in tables I and II of
// their paper.
func proxyTable(b *strings.Builder, figures []Figure) {
	first := true
	for _, f := range figures {
		p := f.Params
		if p["rx_success"] == 0 {
			continue
		}
		if first {
			b.WriteString("\nCounters of the proxies, all counted runs together. Packets are frames, or super-packets that were left whole. In the function is\nthe average by Little's law: rate × wait.\n\n| figure | rx_success | rx_ignored | rx_copies | tx_success | tx_ignored | tx_not_cached | misses | evicted | expired | wait, ms | in the function |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n")
			first = false
		}
		fmt.Fprintf(b, "| %s |", f.Name)
		for _, name := range []string{"rx_success", "rx_ignored", "rx_copies", "tx_success", "tx_ignored", "tx_not_cached"} {
			fmt.Fprintf(b, " %.0f |", p[name])
		}
		back := p["tx_success"] + p["tx_not_cached"]
		wait := p["waited_ns"] / max(p["tx_success"], 1)
		fmt.Fprintf(b, " %.3f %% | %.0f | %.0f | %.3f | %.0f |\n", 100*p["tx_not_cached"]/max(back, 1), p["evicted"], p["expired"], wait/1e6, p["rx_success"]/max(p["seconds"], 1)*wait/1e9)
	}
}

// Table is the result for a terminal.
func (r Result) Table() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "FIGURE\tMEDIAN\tMIN\tMAX\tN\tUNIT\tRATIO\tBASELINE")
	for _, f := range r.Figures {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", f.Name, number(f.Median), number(f.Min), number(f.Max), f.N, f.Unit, f.times(), f.Baseline)
	}
	w.Flush()
	return b.String()
}

// DifferenceTable is what Compare found, for a terminal.
func DifferenceTable(d []Difference) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "FIGURE\tUNIT\tA\tB\tB IS BETTER BY\tRATIO A\tRATIO B\t")
	for _, x := range d {
		change, verdict := "", ""
		switch {
		case x.OnlyIn != "":
			verdict = "only in " + x.OnlyIn
		case x.Apart:
			change, verdict = fmt.Sprintf("%.2f ×", x.Change), "spreads are apart"
		default:
			change = fmt.Sprintf("%.2f ×", x.Change)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", x.Name, x.Unit, number(x.A), number(x.B), change, number(x.RatioA), number(x.RatioB), verdict)
	}
	w.Flush()
	return b.String()
}
