// Package bench measures the data path beside what a Linux kernel does without
// it: the time of a program, of one hop, of a whole chain under TCP. It builds
// its networks from namespaces, runs baseline and own in turns, and writes what
// it saw as figures, a report and plots. It attaches the programs that ship, by
// internal/dataplane, and changes nothing of them. `waystamp bench` calls it.
package bench

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Better says which values of a figure are good.
type Better string

const (
	Less Better = "less"
	More Better = "more"
)

// Figure is one thing measured, over all runs.
type Figure struct {
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Better Better  `json:"better"`
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	N      int     `json:"n"` // runs

	// Baseline is the figure that this one is held against, measured in the
	// same rounds. Ratio > 1: better than it, by the median over rounds; with
	// probability 95 % or more the true median is between RatioLow and
	// RatioHigh (zero: too few rounds to say).
	Baseline  string  `json:"baseline"`
	Ratio     float64 `json:"ratio"`
	RatioLow  float64 `json:"ratio_low,omitempty"`
	RatioHigh float64 `json:"ratio_high,omitempty"`

	// Net is the median without what is only there to measure (the generator
	// and the sink); NetRatio the ratio of such medians.
	Net      float64 `json:"net,omitempty"`
	NetRatio float64 `json:"net_ratio,omitempty"`

	// Disturbed is the share of the machine's CPU time that others took while this
	// was measured, where it is too much to judge the figure; else 0.
	Disturbed float64 `json:"disturbed,omitempty"`

	Params  map[string]float64 `json:"params,omitempty"` // what was varied
	Samples []float64          `json:"samples"`          // by round

	// Box is of single values, where a run has many and Samples are their
	// medians; nil: a run has one.
	Box *Box `json:"box,omitempty"`
}

// Box is what a plot shows of many values (Tukey): the quartiles, and the lowest
// and highest value that is within 1.5 times the quartiles' distance from them.
type Box struct {
	N        int     `json:"n"`
	Low      float64 `json:"low"`
	Q1       float64 `json:"q1"`
	Median   float64 `json:"median"`
	Q3       float64 `json:"q3"`
	High     float64 `json:"high"`
	Max      float64 `json:"max"`
	Mean     float64 `json:"mean"`
	Outliers int     `json:"outliers"` // beyond Low and High
}

// BoxOf is the box of at least one value.
func BoxOf(x []float64) Box {
	s := slices.Sorted(slices.Values(x))
	b := Box{N: len(s), Q1: Quantile(s, 0.25), Median: Quantile(s, 0.5), Q3: Quantile(s, 0.75), Max: s[len(s)-1]}
	reach := 1.5 * (b.Q3 - b.Q1)
	b.Low, b.High = math.Inf(1), math.Inf(-1)
	for _, v := range s {
		b.Mean += v / float64(len(s))
		if v < b.Q1-reach || v > b.Q3+reach {
			b.Outliers++
			continue
		}
		b.Low, b.High = min(b.Low, v), max(b.High, v)
	}
	return b
}

// Result is what one command measured.
type Result struct {
	Version int       `json:"version"`
	Command string    `json:"command"`
	Started time.Time `json:"started"`
	Seconds float64   `json:"seconds"`
	Machine Machine   `json:"machine"`
	Setup   []string  `json:"setup"` // how it was measured, in sentences
	Notes   []string  `json:"notes"` // what a reader must know of these runs
	Figures []Figure  `json:"figures"`

	before *usage // when it began; nil: not known
}

// resultVersion is of the file format.
const resultVersion = 1

// ResultName is the file that Write puts a result in.
const ResultName = "results.json"

// Series is what was measured under one name, round by round.
type Series struct {
	Name     string
	Unit     string
	Better   Better
	Baseline string // name of another series of the same rounds; "": none
	Floor    string // name of the series that is only there to measure; "": none
	Params   map[string]float64
	Samples  []float64
}

// Figures does the arithmetic of series that were measured in the same rounds.
func Figures(all []Series) ([]Figure, error) {
	byName := make(map[string]Series, len(all))
	for _, s := range all {
		if _, twice := byName[s.Name]; twice {
			return nil, fmt.Errorf("two series are named %s", s.Name)
		}
		byName[s.Name] = s
	}
	var out []Figure
	for _, s := range all {
		f, err := s.figure(byName)
		if err != nil {
			return nil, fmt.Errorf("figure %s: %w", s.Name, err)
		}
		out = append(out, f)
	}
	return out, nil
}

func (s Series) figure(all map[string]Series) (Figure, error) {
	if len(s.Samples) == 0 {
		return Figure{}, errors.New("nothing was measured")
	}
	for _, x := range s.Samples {
		if !(x > 0) || math.IsInf(x, 0) { // also NaN
			return Figure{}, fmt.Errorf("a run gave %v %s", x, s.Unit)
		}
	}
	f := Figure{
		Name: s.Name, Unit: s.Unit, Better: s.Better, N: len(s.Samples), Baseline: s.Baseline,
		Median: Median(s.Samples), Min: slices.Min(s.Samples), Max: slices.Max(s.Samples),
		Params: s.Params, Samples: s.Samples,
	}
	var floor []float64
	if s.Floor != "" {
		fl, ok := all[s.Floor]
		if !ok {
			return Figure{}, fmt.Errorf("there is no series %s to take off", s.Floor)
		}
		floor = fl.Samples
		f.Net = max(f.Median-Median(floor), 0)
	}
	if s.Baseline == "" {
		return f, nil
	}
	b, ok := all[s.Baseline]
	if !ok {
		return Figure{}, fmt.Errorf("there is no baseline %s", s.Baseline)
	}
	if len(b.Samples) != len(s.Samples) || b.Unit != s.Unit || b.Better != s.Better {
		return Figure{}, fmt.Errorf("the baseline %s was not measured in the same rounds and unit", s.Baseline)
	}
	ratios := make([]float64, len(s.Samples))
	for i := range ratios {
		ratios[i] = ratio(s.Better, s.Samples[i], b.Samples[i])
	}
	f.Ratio = Median(ratios)
	f.RatioLow, f.RatioHigh = MedianInterval(ratios)
	if floor != nil && f.Net > 0 {
		f.NetRatio = ratio(s.Better, f.Net, max(Median(b.Samples)-Median(floor), 0))
	}
	return f, nil
}

// ratio > 1: x is better than base.
func ratio(better Better, x, base float64) float64 {
	if better == Less {
		return base / x
	}
	return x / base
}

// Median of at least one number.
func Median(x []float64) float64 { return Quantile(x, 0.5) }

// Quantile interpolates between the numbers of x in order; q is 0 to 1.
func Quantile(x []float64, q float64) float64 {
	s := slices.Sorted(slices.Values(x))
	at := q * float64(len(s)-1)
	i := int(at)
	if i+1 >= len(s) {
		return s[len(s)-1]
	}
	return s[i] + (at-float64(i))*(s[i+1]-s[i])
}

// MedianInterval is where the median of what x was drawn from lies with a
// probability of at least 95 %, whatever its distribution: two order statistics
// (the sign test turned round). Fewer than six numbers cannot say: zeroes.
func MedianInterval(x []float64) (low, high float64) {
	n := len(x)
	s := slices.Sorted(slices.Values(x))
	// The interval from the k-th smallest to the k-th largest misses with twice
	// the probability that fewer than k of n fall on one side.
	tail, p := 0.0, math.Pow(0.5, float64(n))
	k := 0
	for tail+p <= 0.025 {
		tail += p
		p *= float64(n-k) / float64(k+1)
		k++
	}
	if k == 0 {
		return 0, 0
	}
	return s[k-1], s[n-k]
}

// Write puts results.json, report.md and the plots into a directory, which it
// makes.
func (r Result) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return fmt.Errorf("make the directory of the results: %w", err)
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, ResultName), append(b, '\n'), 0o666); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	plots, err := r.Plots(dir)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "report.md"), []byte(r.Markdown(plots)), 0o666); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// Read reads a result: a file, or the results.json of a directory.
func Read(path string) (Result, error) {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		path = filepath.Join(path, ResultName)
	}
	f, err := os.Open(path)
	if err != nil {
		return Result{}, fmt.Errorf("read a result: %w", err)
	}
	defer f.Close()
	d := json.NewDecoder(f)
	d.DisallowUnknownFields()
	var r Result
	if err := d.Decode(&r); err != nil {
		return Result{}, fmt.Errorf("read the result %s: %w", path, err)
	}
	if r.Version != resultVersion {
		return Result{}, fmt.Errorf("the result %s is of version %d; this program reads version %d", path, r.Version, resultVersion)
	}
	return r, nil
}

// Join makes one result of several that were measured one after the other.
func Join(command string, parts ...Result) Result {
	out := Result{Version: resultVersion, Command: command}
	for i, p := range parts {
		if i == 0 {
			out.Started, out.Machine = p.Started, p.Machine
		}
		out.Seconds += p.Seconds
		for _, s := range p.Setup {
			if !slices.Contains(out.Setup, s) {
				out.Setup = append(out.Setup, s)
			}
		}
		out.Notes = append(out.Notes, p.Notes...)
		out.Figures = append(out.Figures, p.Figures...)
	}
	return out
}

// groups are the figures by the first word of their names, in their order.
func (r Result) groups() (names []string, by map[string][]Figure) {
	by = map[string][]Figure{}
	for _, f := range r.Figures {
		g, _, _ := strings.Cut(f.Name, "/")
		if by[g] == nil {
			names = append(names, g)
		}
		by[g] = append(by[g], f)
	}
	return names, by
}

// Difference is a figure in two results.
type Difference struct {
	Name   string
	Unit   string
	A, B   float64 // medians
	Change float64 // > 1: B is better
	RatioA float64 // to the baseline of its own run; 0: it has none
	RatioB float64
	Apart  bool   // the spreads do not overlap
	OnlyIn string // "A" or "B": the other has no such figure
}

// Compare holds two results against each other, figure by figure. Across
// machines or moods of one, the ratios to the baselines of the same run say more
// than times do.
func Compare(a, b Result) []Difference {
	inB := map[string]Figure{}
	for _, f := range b.Figures {
		inB[f.Name] = f
	}
	var out []Difference
	seen := map[string]bool{}
	for _, f := range a.Figures {
		seen[f.Name] = true
		g, ok := inB[f.Name]
		if !ok || g.Unit != f.Unit {
			out = append(out, Difference{Name: f.Name, Unit: f.Unit, A: f.Median, RatioA: f.Ratio, OnlyIn: "A"})
			continue
		}
		out = append(out, Difference{
			Name: f.Name, Unit: f.Unit, A: f.Median, B: g.Median, Change: ratio(f.Better, g.Median, f.Median),
			RatioA: f.Ratio, RatioB: g.Ratio, Apart: f.Max < g.Min || g.Max < f.Min,
		})
	}
	for _, f := range b.Figures {
		if !seen[f.Name] {
			out = append(out, Difference{Name: f.Name, Unit: f.Unit, B: f.Median, RatioB: f.Ratio, OnlyIn: "B"})
		}
	}
	slices.SortStableFunc(out, func(x, y Difference) int { return cmp.Compare(x.OnlyIn, y.OnlyIn) })
	return out
}
