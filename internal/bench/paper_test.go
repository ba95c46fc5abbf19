package bench

import (
	"crypto/rand"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/plan"
)

// The numbers are those of Table III of the paper.
func TestSchemesHaveThePapersMSS(t *testing.T) {
	want := map[string]int{
		"ipv6": 1440, "srv6": 1312, "srv6-csid": 1376, "opot": 1288, "opot-proxy": 1288, "opot-csid": 1352, "opot-proxy-csid": 1352,
	}
	got := map[string]int{}
	for _, w := range ways(true) {
		if _, ok := want[w.name]; ok {
			got[w.name] = w.mss()
			if !atSpeeds[w.name] {
				t.Errorf("%s is a scheme of the paper and not measured at link speeds", w.name)
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("segment sizes (-paper +got):\n%s", diff)
	}
}

// Headers of packets are as long as the segment sizes leave room for.
func TestSchemesAreDomainsAndHaveTheirBaselines(t *testing.T) {
	for _, offload := range []bool{true, false} {
		list := append(ways(offload), labelledWays[1])
		names := map[string]way{}
		for _, w := range list {
			names[w.name] = w
		}
		for _, network := range []string{netOurs, netProxy, netXDP, netLabels} {
			var in []way
			for _, w := range list {
				if b := names[w.baseline()]; w.network == network {
					in = append(in, w)
					if b.network != netKernel || b.csid != w.csid {
						t.Errorf("%s is held against %q", w.name, w.baseline())
					}
				}
			}
			d, l := paperDomain(network, in)
			p, err := plan.Compile(d, plan.NewKeyring(rand.Reader, nil))
			if err != nil {
				t.Fatalf("%s: %v", network, err)
			}
			if len(l.Hosts) != len(in)+1 || len(p.Paths) != len(in) {
				t.Fatalf("%s: %d hosts, %d paths for %d schemes", network, len(l.Hosts), len(p.Paths), len(in))
			}
			for i, w := range in {
				path := p.Paths[slices.IndexFunc(p.Paths, func(p plan.Path) bool { return p.Chain == w.name })]
				if len(path.SIDs()) != paperSegments || len(path.Carried()) != w.entries() || path.Scheme != w.scheme {
					t.Errorf("%s: %d segments, %d entries, %s", w.name, len(path.SIDs()), len(path.Carried()), path.Scheme)
				}
				if path.MTU != paperMTU-w.outer() || w.mss() != path.MTU-60 {
					t.Errorf("%s: the plan leaves %d bytes, an MSS of %d is used", w.name, path.MTU, w.mss())
				}
				if !path.Match.Destination.Contains(paperAddress(i)) {
					t.Errorf("%s: its host %s is not in %s", w.name, paperAddress(i), path.Match.Destination)
				}
			}
		}
	}
}

func TestWhatFollowsFromBitRates(t *testing.T) {
	figures, err := Figures([]Series{
		{Name: "bit-rate/ipv6/1-gbit", Unit: "Mbit/s", Better: More, Samples: []float64{1000, 800}},
		{Name: "bit-rate/srv6/1-gbit", Unit: "Mbit/s", Better: More, Baseline: "bit-rate/ipv6/1-gbit", Samples: []float64{900, 800}},
		{Name: "bit-rate/opot/1-gbit", Unit: "Mbit/s", Better: More, Baseline: "bit-rate/srv6/1-gbit", Samples: []float64{850, 800}},
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := fromBitRates(figures)
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]Figure{}
	for _, f := range got {
		by[f.Name] = f
	}
	// 850 Mbit/s in payloads of 1288 - 12 bytes.
	if p := by["packet-rate/opot/1-gbit"]; !near(p.Max, 850e6/8/1276/1e6) || p.Baseline != "packet-rate/srv6/1-gbit" {
		t.Errorf("packet rate: %+v", p)
	}
	if f := by["rho/opot/1-gbit"]; len(f.Samples) != 2 || !near(f.Samples[0], 0.85) || !near(f.Samples[1], 1) {
		t.Errorf("rho: %+v", f)
	}
	if _, ok := by["rho/ipv6/1-gbit"]; ok {
		t.Error("IPv6 is held against itself")
	}

	tcp := slices.Clone(figures)
	for i := range tcp {
		tcp[i].Name = strings.Replace(strings.Replace(tcp[i].Name, "bit-rate", "tcp", 1), "1-gbit", "offload-on", 1)
	}
	beside, err := besideIPv6(tcp)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range beside {
		names = append(names, f.Name)
	}
	if want := []string{"tcp-to-ipv6/ipv6/offload-on", "tcp-to-ipv6/opot/offload-on"}; !slices.Equal(names, want) || !near(beside[1].Ratio, 0.925) {
		t.Errorf("beside IPv6: %v, %+v", names, beside)
	}
}

// The kernel's schemes go through all six nodes with the headers that the table
// says, and a link speed holds.
func TestKernelSchemesOnTheKernel(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	n, err := newPaperNet(t.Context(), Config{Log: slog.New(slog.DiscardHandler)}, netKernel, ways(true), true)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.close(); err != nil {
			t.Error(err)
		}
	}()
	for i, w := range n.ways {
		if us, err := n.ping(t.Context(), i, 0, paperPings, paperPause); err != nil || len(us) != paperPings {
			t.Errorf("%s: %d answers, %v", w.name, len(us), err)
		}
	}
	const rate = 200e6
	for _, r := range []uint64{2 * rate, rate} {
		if err := n.setRate(r); err != nil {
			t.Fatal(err)
		}
	}
	bits, err := n.tcp(t.Context(), 0, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if bits > rate/1e6 {
		t.Errorf("%.0f Mbit/s over links of %.0f", bits, rate/1e6)
	}
}
