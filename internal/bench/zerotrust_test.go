package bench

import (
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/manifest"
)

func TestSealedCasesAreDomainsAndHaveTheirBaselines(t *testing.T) {
	for _, quick := range []bool{true, false} {
		var figures []Figure
		for _, cases := range sealedCases(quick, true) {
			names := map[string]bool{}
			subjects := sealedSubjects(cases)
			for _, s := range subjects {
				if names[s.Name] {
					t.Errorf("%s is measured twice", s.Name)
				}
				names[s.Name] = true
				figures = append(figures, Figure{Name: s.Name, Unit: s.Unit, Params: s.Params})
			}
			for _, s := range subjects {
				if s.Baseline != "" && !names[s.Baseline] || (s.Baseline == "") != hasNoBaseline(s) {
					t.Errorf("%s is held against %q", s.Name, s.Baseline)
				}
			}
			for _, c := range cases {
				m, err := manifest.Parse(c.name(), []byte(c.domain()))
				if err != nil {
					t.Errorf("%s: %v", c.name(), err)
					continue
				}
				want, operations := c.functions, 1
				if c.oneNode && c.way == sealedIntrusive {
					want, operations = 1, c.functions
				}
				if ch := m.Domain.Chains[0]; len(ch.Functions) != want || !ch.Seal {
					t.Errorf("%s has chain %+v", c.name(), ch)
				}
				on := map[string]bool{}
				for _, f := range m.Domain.Functions {
					if on[f.Node] = true; c.way == sealedIntrusive && len(f.Stream.Run) != operations {
						t.Errorf("%s has function %+v; want %d operations", c.name(), f, operations)
					}
				}
				if c.oneNode && len(on) != 1 {
					t.Errorf("%s has functions on %d nodes", c.name(), len(on))
				}
				for _, f := range m.Domain.Functions {
					if f.Intrusive != (c.way != sealedForward && c.way != sealedHAProxy) {
						t.Errorf("%s has function %+v", c.name(), f)
					}
				}
			}
		}
		// Fig. 4 of the paper: throughput by the number of functions, a line for each way.
		by, _ := lines(figures)
		drawn := map[string]int{}
		for _, l := range by["functions"] {
			drawn[l.name] = len(l.figures)
		}
		want := 6
		if quick {
			want = 2
		}
		for _, way := range []sealedWay{sealedForward, sealedIntrusive} {
			if got := drawn["zt/throughput/"+string(way)]; got != want {
				t.Errorf("the line of %s has %d points; want %d", way, got, want)
			}
		}
	}
}

// hasNoBaseline says of what only sees headers, of HAProxy, and of times of a connection that they are held against nothing; a
// gateway is held against HAProxy.
func hasNoBaseline(s sealedSubject) bool {
	if strings.HasPrefix(s.Name, "zt/gateway/") {
		return s.way == sealedHAProxy
	}
	return s.way == sealedForward || s.Unit == "µs"
}

// Where HAProxy is not installed the gateway is measured all the same, and held against nothing.
func TestAGatewayIsMeasuredWithoutHAProxy(t *testing.T) {
	found := 0
	for _, cases := range sealedCases(true, false) {
		for _, s := range sealedSubjects(cases) {
			if s.way == sealedHAProxy || strings.Contains(s.Baseline, "haproxy") {
				t.Errorf("%s is measured, against %q", s.Name, s.Baseline)
			}
			if strings.HasPrefix(s.Name, "zt/gateway/") {
				found++
			}
		}
	}
	if found != 3 {
		t.Errorf("%d figures of the gateway; want 3", found)
	}
}
