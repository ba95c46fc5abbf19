package bench

import (
	"fmt"
	"image/color"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
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
	}
	return fmt.Sprintf("%.2f", x)
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
	m := r.Machine
	fmt.Fprintf(b, "Measured %s in %.0f seconds on %d × %s (%s), Linux %s.\n", r.Started.Format("2006-01-02 15:04 UTC"), r.Seconds, m.CPUs, m.CPU, m.Arch, m.Kernel)
	if len(m.Mitigations) > 0 {
		fmt.Fprintf(b, "CPU: %s.\n", strings.Join(m.Mitigations, "; "))
	}
	b.WriteString("\nEvery figure was measured in turns with its baseline. Ratios above 1 are better than the baseline; in brackets is where the\ntrue median lies with 95 % probability.\n")
	if len(r.Setup) > 0 {
		b.WriteString("\n## How\n\n")
		for _, s := range r.Setup {
			fmt.Fprintf(b, "- %s\n", s)
		}
	}
	if len(r.Notes) > 0 {
		b.WriteString("\n## To be known\n\n")
		for _, s := range r.Notes {
			fmt.Fprintf(b, "- %s\n", s)
		}
	}
	names, by := r.groups()
	for _, g := range names {
		fmt.Fprintf(b, "\n## %s\n", g)
		for _, p := range plots {
			if base := filepath.Base(p); base == g || plotOf(base) == g {
				fmt.Fprintf(b, "\n![%s](%s.svg)\n", p, p)
			}
		}
		net := false
		for _, f := range by[g] {
			net = net || f.Net > 0
		}
		b.WriteString("\n| figure | unit | median | min | max | n | baseline | ratio |")
		if net {
			b.WriteString(" net | net ratio |")
		}
		b.WriteString("\n|---|---|---:|---:|---:|---:|---|---:|")
		if net {
			b.WriteString("---:|---:|")
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
			b.WriteByte('\n')
		}
		proxyTable(b, by[g])
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

// plotOf is the group of a plot that is one of several: its name without -N.
func plotOf(name string) string {
	g, n, ok := cutLast(name, "-")
	if _, err := strconv.Atoi(n); !ok || err != nil {
		return name
	}
	return g
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
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

// plotsMax is how many bars one plot can hold and still be read.
const plotsMax = 40

// Colours of baselines and of ours, told apart also by those who see no red.
var (
	colourBaseline = color.RGBA{0x99, 0x99, 0x99, 0xff}
	colourOurs     = color.RGBA{0x00, 0x72, 0xb2, 0xff}
)

// Plots draws each group of figures that have one unit as bars, in SVG and PNG,
// and returns the names of the files without their endings.
func (r Result) Plots(dir string) ([]string, error) {
	names, by := r.groups()
	var out []string
	for _, g := range names {
		units := map[string][]Figure{}
		var order []string
		for _, f := range by[g] {
			if units[f.Unit] == nil {
				order = append(order, f.Unit)
			}
			units[f.Unit] = append(units[f.Unit], f)
		}
		for i, u := range order {
			name := g
			if len(order) > 1 {
				name = fmt.Sprintf("%s-%d", g, i+1)
			}
			figures := units[u]
			if len(figures) > plotsMax {
				figures = figures[:plotsMax]
			}
			if err := drawBars(filepath.Join(dir, name), g, u, figures); err != nil {
				return nil, fmt.Errorf("draw %s: %w", name, err)
			}
			out = append(out, name)
		}
	}
	return out, nil
}

// drawBars: medians as bars, one above the other, lowest and highest run as
// whiskers.
func drawBars(path, title, unit string, figures []Figure) error {
	p := plot.New()
	p.Title.Text = title + ": medians, and the lowest and highest run"
	p.X.Label.Text = unit
	p.X.Min = 0
	p.Add(plotter.NewGrid())
	isBaseline := map[string]bool{}
	for _, f := range figures {
		isBaseline[f.Baseline] = true
	}
	labels := make([]string, len(figures))
	spread := spreads{}
	for i, f := range figures {
		at := len(figures) - 1 - i // the first on top
		labels[at] = f.Name
		bar, err := plotter.NewBarChart(plotter.Values{f.Median}, vg.Points(9))
		if err != nil {
			return err
		}
		bar.Horizontal, bar.XMin, bar.LineStyle.Width = true, float64(at), 0
		bar.Color = colourOurs
		if isBaseline[f.Name] || f.Baseline == "" {
			bar.Color = colourBaseline
		}
		p.Add(bar)
		spread.XYs = append(spread.XYs, plotter.XY{X: f.Median, Y: float64(at)})
		spread.XErrors = append(spread.XErrors, struct{ Low, High float64 }{f.Median - f.Min, f.Max - f.Median})
	}
	whiskers, err := plotter.NewXErrorBars(spread)
	if err != nil {
		return err
	}
	p.Add(whiskers)
	p.NominalY(labels...)
	height := vg.Points(float64(len(figures))*16 + 80)
	for _, ending := range []string{".svg", ".png"} {
		if err := p.Save(vg.Points(640), height, path+ending); err != nil {
			return err
		}
	}
	return nil
}

type spreads struct {
	plotter.XYs
	plotter.XErrors
}
