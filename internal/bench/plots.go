package bench

import (
	"cmp"
	"errors"
	"fmt"
	"image/color"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// axis is what is varied in a plot of lines.
type axis struct {
	label string
	log   bool // each step is a multiple of the last
}

// axes are the parameters of figures that lines are drawn over, by their names.
var axes = map[string]axis{
	"chains":    {"chains", true},
	"cores":     {"CPUs", false},
	"functions": {"functions", false},
	"labels":    {"visits that the stack has labels for", false},
	"gbit":      {"link speed, Gbit/s", false},
	"rules":     {"rules", true},
	"unused":    {"chains that nothing refers to", true},
	"tracked":   {"connection tracking", false},
	"arguments": {"arguments", true},
	"segments":  {"segments", false},
	"size":      {"bytes of the inner packet", false},
}

// A plot's name is its group's, -by- and what is varied if it has lines, and -N
// if there is more than one of its kind.
const byAxis = "-by-"

// groupOf is the group that a plot of that name belongs to.
func groupOf(name string) string {
	g, _, _ := strings.Cut(name, byAxis)
	if i := strings.LastIndex(g, "-"); i >= 0 {
		if _, err := strconv.Atoi(g[i+1:]); err == nil {
			return g[:i]
		}
	}
	return g
}

// line is the figures that one line goes through, by what is varied.
type line struct {
	name    string
	figures []Figure
}

// lines takes the figures out of a group that differ in a parameter alone: of
// each axis the lines through them. rest is what else there is.
func lines(figures []Figure) (by map[string][]line, rest []Figure) {
	by = map[string][]line{}
	sweepOf := func(f Figure) (param, name string) {
		for _, p := range slices.Sorted(maps.Keys(axes)) {
			x, ok := f.Params[p]
			if !ok {
				continue
			}
			ends := []string{fmt.Sprintf("/%s-%.0f", p, x), fmt.Sprintf("/%.0f-%s", x, p)}
			if p == "functions" {
				ends = append(ends, fmt.Sprintf("-%.0f", x))
			}
			for _, end := range ends {
				if s, ok := strings.CutSuffix(f.Name, end); ok {
					return p, s
				}
			}
			// Or in the middle: nf/size-126/own.
			before, after, ok := strings.Cut(f.Name, fmt.Sprintf("/%s-%.0f", p, x))
			if by, ipv4 := strings.CutPrefix(after, "-ipv4"); ipv4 {
				after = by + "-ipv4"
			}
			if ok && strings.HasPrefix(after, "/") {
				return p, before + after
			}
		}
		return "", ""
	}
	for _, f := range figures {
		p, name := sweepOf(f)
		if p == "" {
			rest = append(rest, f)
			continue
		}
		i := slices.IndexFunc(by[p], func(l line) bool { return l.name == name && l.figures[0].Unit == f.Unit })
		if i < 0 {
			by[p] = append(by[p], line{name: name})
			i = len(by[p]) - 1
		}
		by[p][i].figures = append(by[p][i].figures, f)
	}
	// What was measured for one value alone is no line.
	for p, list := range by {
		var drawn []line
		for _, l := range list {
			if len(l.figures) < 2 {
				rest = append(rest, l.figures...)
				continue
			}
			slices.SortFunc(l.figures, func(a, b Figure) int { return cmp.Compare(a.Params[p], b.Params[p]) })
			drawn = append(drawn, l)
		}
		if by[p] = drawn; drawn == nil {
			delete(by, p)
		}
	}
	return by, rest
}

// How much one plot can hold and still be read.
const (
	barsMax  = 40
	linesMax = 10
)

// Plots draws every figure, in SVG and PNG: figures that differ in a parameter
// alone as lines, those of many values as boxes, all others as bars; each group
// and unit by itself. It returns the names of the files without their endings.
func (r Result) Plots(dir string) ([]string, error) {
	names, by := r.groups()
	var out []string
	for _, g := range names {
		swept, rest := lines(by[g])
		var boxes, bars []Figure
		for _, f := range rest {
			if f.Box != nil {
				boxes = append(boxes, f)
			} else {
				bars = append(bars, f)
			}
		}
		var drawings []func(path string) error
		for _, part := range parts(bars, barsMax) {
			drawings = append(drawings, func(path string) error { return drawBars(path, g, part) })
		}
		for _, part := range parts(boxes, barsMax) {
			drawings = append(drawings, func(path string) error { return drawBoxes(path, g, part) })
		}
		drawn, err := drawAll(dir, g, drawings)
		if err != nil {
			return nil, err
		}
		out = append(out, drawn...)
		for _, p := range slices.Sorted(maps.Keys(swept)) {
			drawings = drawings[:0]
			for _, unit := range sameUnit(swept[p], func(l line) string { return l.figures[0].Unit }) {
				for part := range slices.Chunk(unit, linesMax) {
					drawings = append(drawings, func(path string) error { return drawLines(path, g, p, part) })
				}
			}
			drawn, err := drawAll(dir, g+byAxis+p, drawings)
			if err != nil {
				return nil, err
			}
			out = append(out, drawn...)
		}
	}
	return out, nil
}

func drawAll(dir, name string, drawings []func(string) error) (names []string, err error) {
	for i, d := range drawings {
		n := name
		if len(drawings) > 1 {
			n = fmt.Sprintf("%s-%d", name, i+1)
		}
		if err := d(filepath.Join(dir, n)); err != nil {
			return nil, fmt.Errorf("draw %s: %w", n, err)
		}
		names = append(names, n)
	}
	return names, nil
}

// parts are the figures by unit, so many at most in each.
func parts(figures []Figure, most int) (out [][]Figure) {
	for _, unit := range sameUnit(figures, func(f Figure) string { return f.Unit }) {
		out = slices.AppendSeq(out, slices.Chunk(unit, most))
	}
	return out
}

// sameUnit is list in parts of one unit each.
func sameUnit[T any](list []T, unit func(T) string) (out [][]T) {
	at := map[string]int{}
	for _, x := range list {
		i, ok := at[unit(x)]
		if !ok {
			i = len(out)
			at[unit(x)] = i
			out = append(out, nil)
		}
		out[i] = append(out[i], x)
	}
	return out
}

// Colours of baselines and of ours, told apart also by those who see no red.
var (
	colourBaseline = color.RGBA{0x99, 0x99, 0x99, 0xff}
	colourOurs     = color.RGBA{0x00, 0x72, 0xb2, 0xff}
)

// colours of lines (Okabe and Ito).
var colours = []color.Color{
	color.RGBA{0x00, 0x00, 0x00, 0xff}, color.RGBA{0xe6, 0x9f, 0x00, 0xff}, color.RGBA{0x56, 0xb4, 0xe9, 0xff},
	color.RGBA{0x00, 0x9e, 0x73, 0xff}, color.RGBA{0xd5, 0x5e, 0x00, 0xff}, color.RGBA{0x00, 0x72, 0xb2, 0xff},
	color.RGBA{0xcc, 0x79, 0xa7, 0xff}, color.RGBA{0x8a, 0x80, 0x00, 0xff}, color.RGBA{0x70, 0x70, 0x70, 0xff},
	color.RGBA{0x7b, 0x3f, 0x00, 0xff},
}

const (
	plotWidth  = 640 // points
	plotHeight = 420
	rowHeight  = 16
)

var plotFormats = []string{"svg", "png"}

// margin is around a plot, in points.
const margin = 10

func save(p *plot.Plot, height float64, path string) error {
	p.Title.Padding = vg.Points(margin)
	for _, format := range plotFormats {
		c, err := draw.NewFormattedCanvas(vg.Points(plotWidth), vg.Points(height), format)
		if err != nil {
			return err
		}
		if format == "png" {
			white := draw.New(c)
			white.FillPolygon(color.White, []vg.Point{white.Min, {X: white.Max.X, Y: white.Min.Y}, white.Max, {X: white.Min.X, Y: white.Max.Y}})
		}
		const m = vg.Length(margin)
		p.Draw(draw.Crop(draw.New(c), 2*m, -2*m, m, -m))
		f, err := os.Create(path + "." + format)
		if err != nil {
			return err
		}
		_, err = c.WriteTo(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// roundTicks are at multiples of 1, 2 or 5 times a power of ten, and say no less
// than where they are.
type roundTicks struct{}

// Ticks implements plot.Ticker.
func (roundTicks) Ticks(low, high float64) (out []plot.Tick) {
	const about = 7
	step := math.Pow(10, math.Floor(math.Log10((high-low)/about)))
	for _, times := range []float64{2, 2.5, 2} {
		if (high-low)/step <= about {
			break
		}
		step *= times
	}
	for i := math.Ceil(low / step); i*step <= high; i++ {
		out = append(out, plot.Tick{Value: i * step, Label: strconv.FormatFloat(i*step, 'f', max(0, int(-math.Floor(math.Log10(step)))), 64)})
	}
	return out
}

// rows begins a plot that has a row for each figure, the first on top. at is the
// height of the i-th.
func rows(title string, figures []Figure) (p *plot.Plot, at func(i int) float64) {
	p = plot.New()
	p.Title.Text = title
	p.X.Label.Text = figures[0].Unit
	p.X.Min = 0
	p.X.Tick.Marker = roundTicks{}
	p.Add(plotter.NewGrid())
	labels := make([]string, len(figures))
	at = func(i int) float64 { return float64(len(figures) - 1 - i) }
	for i, f := range figures {
		labels[len(figures)-1-i] = f.Name
	}
	p.NominalY(labels...)
	return p, at
}

// colourOf tells the kernel's figures from ours.
func colourOf(f Figure) color.Color {
	_, name, by := splitName(f.Name)
	kernel := name == "ipv6" || strings.HasPrefix(name, "srv6") || strings.HasPrefix(by, "kernel") || by == "plain" || by == "static" || by == "ip" || by == "end" || by == "routed"
	if kernel || f.Baseline == "" {
		return colourBaseline
	}
	return colourOurs
}

// drawBars: medians as bars, one above the other, lowest and highest run as
// whiskers.
func drawBars(path, title string, figures []Figure) error {
	p, at := rows(title+": medians, and the lowest and highest run", figures)
	spread := spreads{}
	for i, f := range figures {
		bar, err := plotter.NewBarChart(plotter.Values{f.Median}, vg.Points(9))
		if err != nil {
			return err
		}
		bar.Horizontal, bar.XMin, bar.LineStyle.Width = true, at(i), 0
		bar.Color = colourOf(f)
		p.Add(bar)
		spread.XYs = append(spread.XYs, plotter.XY{X: f.Median, Y: at(i)})
		spread.errors = append(spread.errors, [2]float64{f.Median - f.Min, f.Max - f.Median})
	}
	whiskers, err := plotter.NewXErrorBars(spread)
	if err != nil {
		return err
	}
	p.Add(whiskers)
	return save(p, float64(len(figures)*rowHeight+80), path)
}

type spreads struct {
	plotter.XYs
	errors [][2]float64 // below and above
}

func (s spreads) XError(i int) (low, high float64) { return s.errors[i][0], s.errors[i][1] }
func (s spreads) YError(i int) (low, high float64) { return s.errors[i][0], s.errors[i][1] }

// drawBoxes: a box for the quartiles, a line for the median, whiskers.
func drawBoxes(path, title string, figures []Figure) error {
	p, at := rows(title+": quartiles, median, and what is within 1.5 times their distance", figures)
	for i, f := range figures {
		p.Add(boxRow{*f.Box, at(i), colourOf(f)})
	}
	return save(p, float64(len(figures)*rowHeight+80), path)
}

// boxRow draws a box lying down.
type boxRow struct {
	Box
	at     float64
	colour color.Color
}

const boxHalf = 4 // points

// Plot implements plot.Plotter.
func (b boxRow) Plot(c draw.Canvas, p *plot.Plot) {
	tx, ty := p.Transforms(&c)
	x, y := func(v float64) vg.Length { return tx(v) }, ty(b.at)
	half := vg.Points(boxHalf)
	corners := []vg.Point{{X: x(b.Q1), Y: y - half}, {X: x(b.Q3), Y: y - half}, {X: x(b.Q3), Y: y + half}, {X: x(b.Q1), Y: y + half}, {X: x(b.Q1), Y: y - half}}
	c.FillPolygon(b.colour, corners)
	thin := draw.LineStyle{Color: color.Black, Width: vg.Points(0.6)}
	c.StrokeLines(thin, corners)
	c.StrokeLine2(draw.LineStyle{Color: color.White, Width: vg.Points(2.2)}, x(b.Median), y-half, x(b.Median), y+half)
	c.StrokeLine2(draw.LineStyle{Color: color.Black, Width: vg.Points(1)}, x(b.Median), y-half, x(b.Median), y+half)
	for _, w := range [][2]float64{{b.Low, b.Q1}, {b.High, b.Q3}} {
		c.StrokeLine2(thin, x(w[0]), y, x(w[1]), y)
		c.StrokeLine2(thin, x(w[0]), y-half/2, x(w[0]), y+half/2)
	}
}

// DataRange implements plot.DataRanger.
func (b boxRow) DataRange() (xmin, xmax, ymin, ymax float64) {
	return b.Low, b.High, b.at - 0.5, b.at + 0.5
}

// drawLines: medians over what is varied, lowest and highest run as whiskers.
// What headers alone would leave is dashed, where figures say it.
func drawLines(path, title, param string, list []line) error {
	p := plot.New()
	a := axes[param]
	over, _, _ := strings.Cut(a.label, ",")
	p.Title.Text = title + " by " + over + ": medians, and the lowest and highest run"
	p.X.Label.Text = a.label
	p.Y.Label.Text = list[0].figures[0].Unit
	p.Y.Min = 0
	p.Add(plotter.NewGrid())
	p.Legend.Top, p.Legend.Left = true, true
	p.Legend.TextStyle.Font.Size = vg.Points(8)
	var ticks []plot.Tick
	theory := title == "rho"
	if theory {
		p.Title.Text += "; dashed: by headers alone"
	}
	lowest, highest := math.Inf(1), 0.0
	for i, l := range list {
		var s spreads
		for _, f := range l.figures {
			x := f.Params[param]
			s.XYs = append(s.XYs, plotter.XY{X: x, Y: f.Median})
			s.errors = append(s.errors, [2]float64{f.Median - f.Min, f.Max - f.Median})
			lowest, highest = min(lowest, f.Min), max(highest, f.Max)
			if !slices.ContainsFunc(ticks, func(t plot.Tick) bool { return t.Value == x }) {
				ticks = append(ticks, plot.Tick{Value: x, Label: strconv.FormatFloat(x, 'f', -1, 64)})
			}
		}
		through, points, err := plotter.NewLinePoints(s.XYs)
		if err != nil {
			return err
		}
		through.Color, points.Color = colours[i%len(colours)], colours[i%len(colours)]
		points.Shape = shapes[i%len(shapes)]
		whiskers, err := plotter.NewYErrorBars(s)
		if err != nil {
			return err
		}
		whiskers.Color = through.Color
		p.Add(through, points, whiskers)
		p.Legend.Add(strings.TrimPrefix(l.name, title+"/"), through, points)
		if theory {
			e := make(plotter.XYs, len(s.XYs))
			for j, f := range l.figures {
				e[j] = plotter.XY{X: f.Params[param], Y: f.Params["efficiency"]}
			}
			dashed, err := plotter.NewLine(e)
			if err != nil {
				return err
			}
			dashed.Color, dashed.Dashes = through.Color, []vg.Length{vg.Points(4), vg.Points(3)}
			p.Add(dashed)
		}
	}
	slices.SortFunc(ticks, func(a, b plot.Tick) int { return cmp.Compare(a.Value, b.Value) })
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.ConstantTicks(ticks), roundTicks{}
	if a.log {
		p.X.Scale = plot.LogScale{}
	}
	if theory {
		p.Y.Min = 0.9 * lowest
	}
	// The legend is above the lines, as high as it needs to be.
	p.Y.Max = highest + (highest-p.Y.Min)*0.05*float64(len(list))
	return save(p, plotHeight, path)
}

var shapes = []draw.GlyphDrawer{
	draw.CircleGlyph{}, draw.SquareGlyph{}, draw.TriangleGlyph{}, draw.PyramidGlyph{}, draw.RingGlyph{}, draw.BoxGlyph{}, draw.PlusGlyph{}, draw.CrossGlyph{},
}
