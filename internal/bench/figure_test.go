package bench

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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

func testSeries() []Series {
	return []Series{
		{Name: "hop/drop/xdp", Unit: "ns/packet", Better: Less, Samples: []float64{100, 110, 90}},
		{Name: "hop/end/kernel", Unit: "ns/packet", Better: Less, Floor: "hop/drop/xdp", Samples: []float64{1000, 1100, 900}},
		{Name: "hop/end-opot/xdp", Unit: "ns/packet", Better: Less, Baseline: "hop/end/kernel", Floor: "hop/drop/xdp", Samples: []float64{400, 275, 450}},
		{Name: "tcp/srv6/offload-on", Unit: "Mbit/s", Better: More, Samples: []float64{10, 20, 10}},
		{Name: "tcp/opot/offload-on", Unit: "Mbit/s", Better: More, Baseline: "tcp/srv6/offload-on", Samples: []float64{11, 21, 12}},
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
	golden(t, "report.golden", r.Markdown([]string{"hop", "tcp"}))
	golden(t, "page.golden", r.Page([]string{"hop", "tcp"}))
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
	if diff := cmp.Diff(r, got); diff != "" {
		t.Errorf("read back (-written +read):\n%s", diff)
	}
	for _, name := range []string{"hop.svg", "hop.png", "tcp.svg", "tcp.png", "report.md"} {
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
	if diff := cmp.Diff(want, Join("all", a, b)); diff != "" {
		t.Errorf("joined (-want +got):\n%s", diff)
	}
}
