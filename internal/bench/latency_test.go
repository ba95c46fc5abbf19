package bench

import (
	"crypto/rand"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

func TestLatencyIsToldInThreeWays(t *testing.T) {
	var medians []Series
	runs := map[string][][]float64{}
	for i, f := range latencyCases() {
		ns := make([]float64, 100)
		for j := range ns {
			ns[j] = float64(i + 1)
		}
		ns[0], ns[1] = 1001, 1001 // beyond the 99th percentile's place
		runs[f.name()] = [][]float64{ns, ns}
		medians = append(medians, Series{Name: f.name(), Unit: "ns", Better: Less, Baseline: f.baseline(), Samples: []float64{Median(ns), Median(ns)}})
	}
	figures, err := Figures(medians)
	must(t, err)
	figures, err = latencyOf(figures, runs)
	must(t, err)
	have := map[string]Figure{}
	for _, f := range figures {
		have[f.Name] = f
	}
	// static is the third case, own the fourth, end the second, bypass the last.
	for name, want := range map[string]struct{ median, ratio float64 }{
		"nf/latency-median/own": {4, 3. / 4}, "nf/latency-mean/own": {(98*4 + 2002) / 100., (98*3 + 2002) / (98*4 + 2002.)},
		"nf/latency-p99/own": {1001, 1}, "nf/latency-median/end": {2, 0},
		"nf-to-end/latency-median/bypass": {6, 2. / 6}, "nf-to-end/latency-mean/end": {(98*2 + 2002) / 100., 0},
	} {
		f, ok := have[name]
		if !ok || !near(f.Median, want.median) || !near(f.Ratio, want.ratio) {
			t.Errorf("%s: %v, %v times its baseline; want %v, %v", name, f.Median, f.Ratio, want.median, want.ratio)
		}
	}
	if b := have["nf/latency-median/own"].Box; b == nil || b.N != 200 || b.Max != 1001 {
		t.Errorf("the box of own is %+v; want one of all 200 packets", b)
	}
	if len(figures) != 3*(6+4) {
		t.Errorf("%d figures", len(figures))
	}
}

func TestTCPThroughNetfilterHasTheSameRulesAndItsBaselines(t *testing.T) {
	names := map[string]bool{}
	for _, offload := range []bool{true, false} {
		for _, f := range filterTCPCases(offload) {
			names[f.name()] = true
			if b := f.baseline(); b != "" && !names[b] {
				t.Errorf("%s is held against %s, which is not measured before it", f.name(), b)
			}
			d, l := f.domain()
			p, err := plan.Compile(d, plan.NewKeyring(rand.Reader, nil))
			if err != nil {
				t.Errorf("%s: %v", f.name(), err)
				continue
			}
			if got, want := len(p.Paths), 2; got != want {
				t.Errorf("%s: %d paths; want %d", f.name(), got, want)
			}
			if (len(l.Functions) == 1) != (f.by == filterByRoute) || (d.Functions[0].Kind == model.KindNetfilter) != f.by.ours() {
				t.Errorf("%s: a function of kind %s, and %d of the lab", f.name(), d.Functions[0].Kind, len(l.Functions))
			}
			if got := strings.Replace(f.rules(), "ct mark set $bypass ", "", 1); got != (filterTCP{by: filterByRules}).rules() {
				t.Errorf("%s has rules of its own:\n%s", f.name(), got)
			}
		}
	}
	if len(names) != 10 {
		t.Errorf("%d cases", len(names))
	}
}

// The real thing, as short as can be: every packet is stamped by the data path (latencies).
func TestLatencyOnTheKernel(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	r, err := Netfilter(t.Context(), Config{Runs: 1, Duration: 5 * time.Millisecond, CPU: -1, Quick: true, Only: latencyMedian})
	must(t, err)
	if want := 3 * (6 + 4); len(r.Figures) != want {
		t.Errorf("%d figures; want %d", len(r.Figures), want)
	}
	for _, f := range r.Figures {
		if f.Median < 100 || f.Median > 1e8 {
			t.Errorf("%s: %v ns", f.Name, f.Median)
		}
	}
}

// What is varied may stand before who does it.
func TestLinesOfNetfilterAreByWhoDoesIt(t *testing.T) {
	var figures []Figure
	for _, name := range []string{"nf/size-126/own", "nf/size-300/own", "nf/size-126-ipv4/own", "nf/size-300-ipv4/own", "nf/latency-median/own"} {
		f := Figure{Name: name, Unit: "ns/packet"}
		if strings.Contains(name, "126") {
			f.Params = map[string]float64{"size": 126}
		} else if strings.Contains(name, "300") {
			f.Params = map[string]float64{"size": 300}
		}
		figures = append(figures, f)
	}
	by, rest := lines(figures)
	got := map[string]int{}
	for _, l := range by["size"] {
		got[l.name] = len(l.figures)
	}
	if len(got) != 2 || got["nf/own"] != 2 || got["nf/own-ipv4"] != 2 || len(rest) != 1 {
		t.Errorf("lines %v, and %d figures beside them", got, len(rest))
	}
}

func TestWhatRulesAddIsHeldAgainstWhatTheyAddElsewhere(t *testing.T) {
	all := map[string]Figure{}
	for name, x := range map[string]float64{"nf/rules-1/own": 300, "nf/rules-128/own": 900, "nf/rules-1/ip": 100, "nf/rules-128/ip": 500} {
		all[name] = Figure{Median: x}
	}
	v := added("nf/rules-%d/own", "nf/rules-%d/ip", 1, 128)
	if x, ok := v(Figure{}, all); !ok || !near(x, 1.5) {
		t.Errorf("%v, %t; want 600 / 400", x, ok)
	}
	delete(all, "nf/rules-1/ip")
	if x, ok := v(Figure{}, all); ok {
		t.Errorf("%v of figures that are not all there", x)
	}
}
