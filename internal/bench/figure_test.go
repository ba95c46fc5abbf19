package bench

import (
	"context"
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

func TestQuantilesInterpolate(t *testing.T) {
	x := []float64{4, 1, 3, 2}
	for _, c := range []struct{ q, want float64 }{{0, 1}, {0.25, 1.75}, {0.5, 2.5}, {1, 4}} {
		if got := Quantile(x, c.q); !near(got, c.want) {
			t.Errorf("quantile %v of %v is %v, want %v", c.q, x, got, c.want)
		}
	}
	if x[0] != 4 {
		t.Error("Quantile sorted what it was given")
	}
	if got := Median([]float64{7}); got != 7 {
		t.Errorf("the median of 7 alone is %v", got)
	}
}

// The bounds are those of published tables of the sign test's interval.
func TestMedianIntervalIsTheSignTests(t *testing.T) {
	for _, c := range []struct{ n, low, high int }{{5, 0, 0}, {6, 1, 6}, {8, 1, 8}, {9, 2, 8}, {10, 2, 9}, {15, 4, 12}, {20, 6, 15}} {
		x := make([]float64, c.n)
		for i := range x {
			x[i] = float64(c.n - i)
		}
		low, high := MedianInterval(x)
		if low != float64(c.low) || high != float64(c.high) {
			t.Errorf("of 1 to %d: %v to %v, want %d to %d", c.n, low, high, c.low, c.high)
		}
	}
}

// The quartiles are R's (type 7, and Python's statistics.quantiles with method
// inclusive), the whiskers those of its boxplot.stats.
func TestBoxIsTukeys(t *testing.T) {
	for _, c := range []struct {
		x    []float64
		want Box
	}{
		{[]float64{52, 57, 57, 58, 63, 66, 66, 67, 67, 68, 69, 70, 70, 70, 70, 72, 73, 75, 75, 76, 76, 78, 79, 89}, Box{N: 24, Low: 57, Q1: 66, Median: 70, Q3: 75, High: 79, Max: 89, Mean: 1663. / 24, Outliers: 2}},
		{[]float64{1, 2, 3, 4, 100}, Box{N: 5, Low: 1, Q1: 2, Median: 3, Q3: 4, High: 4, Max: 100, Mean: 22, Outliers: 1}},
		{[]float64{1, 2, 3, 4, 6.5}, Box{N: 5, Low: 1, Q1: 2, Median: 3, Q3: 4, High: 6.5, Max: 6.5, Mean: 3.3}},
		{[]float64{7}, Box{N: 1, Low: 7, Q1: 7, Median: 7, Q3: 7, High: 7, Max: 7, Mean: 7}},
	} {
		got := BoxOf(c.x)
		if !near(got.Mean, c.want.Mean) {
			t.Errorf("the mean of %v is %v, want %v", c.x, got.Mean, c.want.Mean)
		}
		got.Mean = c.want.Mean
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%v (-want +got):\n%s", c.x, diff)
		}
	}
}

func testSeries() []Series {
	return []Series{
		{Name: "hop/drop/xdp", Unit: "ns/packet", Better: Less, Samples: []float64{100, 110, 90}},
		{Name: "hop/end/kernel", Unit: "ns/packet", Better: Less, Floor: "hop/drop/xdp", Samples: []float64{1000, 1100, 900}},
		{Name: "hop/end-opot/xdp", Unit: "ns/packet", Better: Less, Baseline: "hop/end/kernel", Floor: "hop/drop/xdp", Samples: []float64{400, 275, 450}},
		{Name: "tcp/srv6/offload-on", Unit: "Mbit/s", Better: More, Samples: []float64{10, 20, 10}},
		{Name: "tcp/opot/offload-on", Unit: "Mbit/s", Better: More, Baseline: "tcp/srv6/offload-on", Samples: []float64{11, 21, 12}},
		{Name: "tcp/ipv6/offload-off", Unit: "Mbit/s", Better: More, Samples: []float64{10, 11, 10, 12, 10, 10}},
		{Name: "tcp/srv6/offload-off", Unit: "Mbit/s", Better: More, Baseline: "tcp/ipv6/offload-off", Samples: []float64{9, 9, 8, 9, 9, 10}},
		{Name: "rho/opot/1-gbit", Unit: "of IPv6's bit rate", Better: More, Params: map[string]float64{"gbit": 1, "efficiency": 0.9}, Samples: []float64{0.89, 0.88, 0.9}},
		{Name: "rho/opot/5-gbit", Unit: "of IPv6's bit rate", Better: More, Params: map[string]float64{"gbit": 5, "efficiency": 0.9}, Samples: []float64{0.91, 0.87, 0.92}},
		{Name: "rtt/srv6/offload-on", Unit: "µs", Better: Less, Samples: []float64{40, 41, 42}},
		{Name: "rtt/opot/offload-on", Unit: "µs", Better: Less, Baseline: "rtt/srv6/offload-on", Samples: []float64{41, 41, 44}},
	}
}

func TestRatiosAreOfTheSameRoundAndAboveOneWhereBetter(t *testing.T) {
	figures, err := Figures(testSeries())
	if err != nil {
		t.Fatal(err)
	}
	end := figures[2]
	// Rounds: 2.5, 4, 2. The ratio of the medians would be 2.5 as well only by
	// chance of another order; the net one is (1000-100) / (400-100).
	if end.Ratio != 2.5 || end.Net != 300 || end.NetRatio != 3 || end.Median != 400 || end.Min != 275 || end.Max != 450 || end.N != 3 {
		t.Errorf("less is better: got %+v", end)
	}
	if end.RatioLow != 0 || end.RatioHigh != 0 {
		t.Errorf("three rounds cannot tell an interval: got %v to %v", end.RatioLow, end.RatioHigh)
	}
	if tcp := figures[4]; !near(tcp.Ratio, 1.1) {
		t.Errorf("more is better: ratio %v, want 1.1", tcp.Ratio)
	}
}

func TestFiguresRefuseWhatCannotBeCompared(t *testing.T) {
	for name, c := range map[string]struct {
		series []Series
		want   string
	}{
		"twice":          {[]Series{{Name: "a", Samples: []float64{1}}, {Name: "a", Samples: []float64{1}}}, "two series are named a"},
		"nothing":        {[]Series{{Name: "a"}}, "nothing was measured"},
		"zero":           {[]Series{{Name: "a", Samples: []float64{1, 0}}}, "a run gave 0"},
		"not a number":   {[]Series{{Name: "a", Samples: []float64{math.NaN()}}}, "a run gave NaN"},
		"no baseline":    {[]Series{{Name: "a", Baseline: "b", Samples: []float64{1}}}, "no baseline b"},
		"no floor":       {[]Series{{Name: "a", Floor: "b", Samples: []float64{1}}}, "no series b"},
		"other rounds":   {[]Series{{Name: "a", Baseline: "b", Samples: []float64{1}}, {Name: "b", Samples: []float64{1, 2}}}, "same rounds"},
		"other unit":     {[]Series{{Name: "a", Unit: "s", Baseline: "b", Samples: []float64{1}}, {Name: "b", Samples: []float64{1}}}, "same rounds and unit"},
		"other judgment": {[]Series{{Name: "a", Better: More, Baseline: "b", Samples: []float64{1}}, {Name: "b", Better: Less, Samples: []float64{1}}}, "same rounds and unit"},
	} {
		_, err := Figures(c.series)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
}

func TestCompareTellsWhatChanged(t *testing.T) {
	a := Result{Figures: []Figure{
		{Name: "x", Unit: "ns", Better: Less, Median: 100, Min: 90, Max: 110, Ratio: 2},
		{Name: "y", Unit: "Mbit/s", Better: More, Median: 10, Min: 9, Max: 11},
		{Name: "gone", Unit: "ns", Median: 1},
	}}
	b := Result{Figures: []Figure{
		{Name: "new", Unit: "ns", Median: 2},
		{Name: "x", Unit: "ns", Better: Less, Median: 50, Min: 40, Max: 60, Ratio: 4},
		{Name: "y", Unit: "Mbit/s", Better: More, Median: 12, Min: 10, Max: 13},
	}}
	want := []Difference{
		{Name: "x", Unit: "ns", A: 100, B: 50, Change: 2, RatioA: 2, RatioB: 4, Apart: true},
		{Name: "y", Unit: "Mbit/s", A: 10, B: 12, Change: 1.2},
		{Name: "gone", Unit: "ns", A: 1, OnlyIn: "A"},
		{Name: "new", Unit: "ns", B: 2, OnlyIn: "B"},
	}
	if diff := cmp.Diff(want, Compare(a, b)); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
}

func testResult(t *testing.T) Result {
	t.Helper()
	figures, err := Figures(testSeries())
	if err != nil {
		t.Fatal(err)
	}
	for i := range figures {
		if strings.HasPrefix(figures[i].Name, "rtt/") {
			box := BoxOf([]float64{38, 40, 41, 42, 90})
			figures[i].Box = &box
		}
	}
	return Result{
		Version: resultVersion, Command: "all", Started: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Seconds: 42,
		Machine: Machine{CPU: "Some CPU", CPUs: 2, Kernel: "6.18.0", Arch: "amd64", Mitigations: []string{"spectre_v2: Retpolines"}, Load: 0.1},
		Setup:   []string{"How it was measured."}, Notes: []string{"What must be known."}, Figures: figures,
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(path, []byte(got), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got), UPDATE=1 to accept:\n%s", path, diff)
	}
}

func TestReports(t *testing.T) {
	r := testResult(t)
	plots, err := r.Plots(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "report.golden", r.Markdown(plots))
	golden(t, "page.golden", r.Page(plots))
	golden(t, "figures.golden", r.FiguresPage())
	golden(t, "table.golden", r.Table())
}

func TestAResultIsReadBackAsItWasWritten(t *testing.T) {
	dir := t.TempDir()
	r := testResult(t)
	if err := r.Write(dir); err != nil {
		t.Fatal(err)
	}
	got, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r, got, cmpopts.IgnoreUnexported(Result{})); diff != "" {
		t.Errorf("read back (-written +read):\n%s", diff)
	}
	// The file is read by other programs: its form is part of the contract.
	b, err := os.ReadFile(filepath.Join(dir, ResultName))
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "results.golden", string(b))
	for _, name := range []string{"hop.svg", "hop.png", "tcp.svg", "tcp.png", "rho-by-gbit.svg", "rho-by-gbit.png", "rtt.svg", "rtt.png", "report.md"} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Size() == 0 {
			t.Errorf("%s was not written: %v", name, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, ResultName), []byte(`{"version": 1, "colour": "red"}`), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(dir); err == nil {
		t.Error("a result with a field that is not known was read")
	}
}

func TestJoinKeepsEveryFigureAndEachSentenceOnce(t *testing.T) {
	a := Result{Command: "hop", Seconds: 1, Setup: []string{"s", "t"}, Notes: []string{"n"}, Figures: []Figure{{Name: "a"}}, Machine: Machine{CPUs: 2}}
	b := Result{Command: "scale", Seconds: 2, Setup: []string{"s", "u"}, Figures: []Figure{{Name: "b"}}}
	want := Result{
		Version: resultVersion, Command: "all", Seconds: 3, Setup: []string{"s", "t", "u"}, Notes: []string{"n"},
		Figures: []Figure{{Name: "a"}, {Name: "b"}}, Machine: Machine{CPUs: 2},
	}
	if diff := cmp.Diff(want, Join("all", a, b), cmpopts.IgnoreUnexported(Result{})); diff != "" {
		t.Errorf("joined (-want +got):\n%s", diff)
	}
}

func TestGroupsOfPlots(t *testing.T) {
	for name, want := range map[string]string{
		"tcp": "tcp", "tcp-to-ipv6": "tcp-to-ipv6", "tcp-to-ipv6-2": "tcp-to-ipv6", "hop-by-size": "hop", "hop-by-size-2": "hop", "bit-rate-by-gbit": "bit-rate",
	} {
		if got := groupOf(name); got != want {
			t.Errorf("plot %s belongs to %s, want %s", name, got, want)
		}
	}
}

// Each figure is drawn once: in a line if there are others like it, else alone.
func TestLinesGoThroughWhatDiffersInOneParameter(t *testing.T) {
	at := func(name string, params map[string]float64) Figure {
		return Figure{Name: name, Unit: "ns", Params: params}
	}
	swept, rest := lines([]Figure{
		at("scale/end/chains-16", map[string]float64{"chains": 16}), at("scale/end/chains-1", map[string]float64{"chains": 1}),
		at("scale/end/segments-2", map[string]float64{"segments": 2}),
		at("rho/opot/1-gbit", map[string]float64{"gbit": 1, "efficiency": 0.9}), at("rho/opot/2-gbit", map[string]float64{"gbit": 2, "efficiency": 0.9}),
		at("proxy/tcp/unaware", map[string]float64{"rx_success": 7}),
	})
	var got []string
	for _, p := range []string{"chains", "gbit", "segments"} {
		for _, l := range swept[p] {
			for _, f := range l.figures {
				got = append(got, l.name+" "+f.Name)
			}
		}
	}
	for _, f := range rest {
		got = append(got, f.Name)
	}
	want := []string{
		"scale/end scale/end/chains-1", "scale/end scale/end/chains-16", "rho/opot rho/opot/1-gbit", "rho/opot rho/opot/2-gbit",
		"proxy/tcp/unaware", "scale/end/segments-2",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("lines and the rest (-want +got):\n%s", diff)
	}
}

func TestGoalsThatAreNotReachedSayWhy(t *testing.T) {
	r := Result{Figures: []Figure{
		{Name: "hop/end-opot/xdp", Median: 140, Ratio: 3.6, RatioLow: 3.5, RatioHigh: 3.7}, {Name: "hop/redirect/xdp", Median: 100},
		{Name: "hop/end-keyed/xdp", Ratio: 3.5}, {Name: "hop/verify-opot/xdp", Ratio: 2.9},
		{Name: "stamp/end-opot/xdp/segments-3", Median: 70}, {Name: "stamp/end-pot/xdp/segments-3", Median: 71},
	}}
	var b strings.Builder
	r.goals(&b, false)
	for _, want := range []string{
		"| hop/end-opot/xdp | ≥ 3.70 | 3.60 (3.50–3.70) | not reached [1] |", "| hop/end-opot/xdp | ≤ 1.30 | 1.40 | not reached [1] |",
		"| hop/end-keyed/xdp | ≥ 3.40 | 3.50 | reached |", "| hop/verify-opot/xdp | ≥ 3.00 | 2.90 | not reached [2] |",
		"| stamp/end-opot/xdp/segments-3 | ≤ 10.00 | -1.00 | reached |", "1. " + whyChecks, "2. " + whyWindow,
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

// Beside others' load nothing is judged but memory, neither reached nor not.
func TestFiguresBesideOthersAreNotJudged(t *testing.T) {
	r := Result{Command: "hop", Figures: []Figure{{Name: "hop/end-keyed/xdp", Ratio: 3.5}, {Name: "hop/verify-opot/xdp", Ratio: 2.9}, {Name: "control/memory/node-heap/changes-10000", Unit: unitMemory}}}
	r.judge(disturbedMost)
	if len(r.Notes) != 0 || r.Figures[0].Disturbed != 0 {
		t.Errorf("on a quiet machine: %+v", r)
	}
	r.judge(0.31)
	var b strings.Builder
	r.goals(&b, false)
	if n := strings.Count(b.String(), "| not judged: others used the machine |"); n != 2 || strings.Contains(b.String(), "reached") {
		t.Errorf("%d of 2 goals are not judged:\n%s", n, b.String())
	}
	if r.Figures[2].Disturbed != 0 {
		t.Error("a figure of memory is not judged")
	}
	if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "31 %") {
		t.Errorf("notes %q", r.Notes)
	}
}

func TestOthersTimeIsWhatIsNotOurs(t *testing.T) {
	// proc_stat(5): user nice system idle iowait irq softirq steal.
	all, err := userTime(strings.NewReader("cpu  100 20 3000 40000 5 6 7 30 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"))
	if err != nil || all != 1500*time.Millisecond {
		t.Errorf("%s, %v; want 1.5s", all, err)
	}
	if _, err := userTime(strings.NewReader("intr 5\n")); err == nil {
		t.Error("a file without the line of all CPUs was read")
	}
	start := time.Now()
	before := usage{all: 10 * time.Second, own: 4 * time.Second, at: start}
	now := usage{all: 14 * time.Second, own: 7 * time.Second, at: start.Add(5 * time.Second)}
	if got := now.disturbed(before, 2); got != 0.1 {
		t.Errorf("others took %v of two CPUs, want 0.1", got)
	}
	// What this test spends is its own.
	a, err := usageNow()
	if err != nil {
		t.Fatal(err)
	}
	b := a
	for x := 1; b.own-a.own < 50*time.Millisecond && b.at.Sub(a.at) < time.Minute; {
		for range 1 << 20 {
			x *= 3
		}
		if b, err = usageNow(); err != nil || x == 0 {
			t.Fatal(x, err)
		}
	}
	if b.own-a.own < 50*time.Millisecond {
		t.Errorf("in a minute of work this process has spent %s", b.own-a.own)
	}
}

// A worker outlives the agent that started it: its time is not that of others, whether it runs still or has ended.
func TestTheTimeOfOrphansIsOurs(t *testing.T) {
	if err := keepOrphans(); err != nil {
		t.Fatal(err)
	}
	before, err := usageNow()
	if err != nil {
		t.Fatal(err)
	}
	const work = 100 * time.Millisecond
	// The first shell ends at once. The second one works for ten ticks (column 14), says so, and ends when its input does.
	cmd := exec.CommandContext(t.Context(), "sh", "-c", `exec 3<&0
		{
			spent=0
			while [ "$spent" -lt 10 ]; do
				i=0
				while [ "$i" -lt 20000 ]; do i=$((i+1)); done
				read -r _ _ _ _ _ _ _ _ _ _ _ _ _ spent _ </proc/self/stat
			done
			echo worked
			read -r _
		} <&3 &`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := cmd.Process.Wait(); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 16)
	if n, err := out.Read(said); err != nil || string(said[:n]) != "worked\n" {
		t.Fatalf("it said %q, %v", said[:n], err)
	}
	own := func(what string) time.Duration {
		now, err := usageNow()
		if err != nil {
			t.Fatal(err)
		}
		spent := now.own - before.own
		if spent < work {
			t.Errorf("%s: this process and all below it have spent %s; want %s and more", what, spent, work)
		}
		return spent
	}
	runs := own("an orphan runs")
	in.Close()
	if n, err := out.Read(said); err != io.EOF {
		t.Fatalf("it said %q, %v", said[:n], err)
	}
	if ended := own("it has ended"); ended < runs {
		t.Errorf("it has spent %s, and with its end %s", runs, ended)
	}
}

func TestTicksAreRoundNumbers(t *testing.T) {
	for _, c := range []struct {
		low, high float64
		want      string
	}{
		{0, 860, "0 200 400 600 800"}, {0.75, 1, "0.75 0.80 0.85 0.90 0.95 1.00"}, {0, 14000, "0 2000 4000 6000 8000 10000 12000 14000"},
		{0, 0.41, "0.0 0.1 0.2 0.3 0.4"}, {0, 7, "0 1 2 3 4 5 6 7"},
	} {
		var got []string
		for _, x := range (roundTicks{}).Ticks(c.low, c.high) {
			got = append(got, x.Label)
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("from %v to %v: %s, want %s", c.low, c.high, s, c.want)
		}
	}
}

// A run that fails is tried again, and a reader is told; what fails always ends
// the measurement.
func TestRunsAreTriedAgain(t *testing.T) {
	measured := 0
	failing := func(fails int) subject {
		return subject{Series: Series{Name: "x", Unit: "ns", Better: Less}, prepare: func() (*trial, error) {
			return &trial{measure: func(context.Context) (float64, error) {
				measured++
				if measured > 1 && measured <= 1+fails {
					return 0, errors.New("a ping was lost")
				}
				return 7, nil
			}}, nil
		}}
	}
	var r Result
	c := Config{Runs: 2, note: r.note}
	figures, err := c.rounds(t.Context(), "test", []subject{failing(2)})
	if err != nil || len(figures) != 1 || figures[0].N != 2 || measured != 5 || len(r.Notes) != 2 || !strings.Contains(r.Notes[0], "x: a ping was lost") {
		t.Errorf("two failures: %v, %+v, %d runs, notes %q", err, figures, measured, r.Notes)
	}
	measured = 0
	if _, err := c.rounds(t.Context(), "test", []subject{failing(3)}); err == nil || measured != 4 {
		t.Errorf("three failures: %v, %d runs", err, measured)
	}
}
