package bench

import (
	"strings"
	"testing"
)

// Names are what goals, plots and readers go by; baselines are of the same rounds.
func TestEveryCaseOfNetfilterHasANameAndItsBaseline(t *testing.T) {
	all := map[string]bool{}
	for _, quick := range []bool{false, true} {
		for _, cases := range filterCases(quick) {
			round := map[string]bool{}
			for _, f := range cases {
				name := f.name()
				if round[name] || !quick && all[name] {
					t.Errorf("%s is there twice", name)
				}
				if quick && !all[name] {
					t.Errorf("%s is of the quick run alone", name)
				}
				round[name] = true
				if !quick {
					all[name] = true
				}
			}
			for _, f := range cases {
				if b := f.baseline(); b != "" && !round[b] {
					t.Errorf("%s is held against %s, which is not measured with it", f.name(), b)
				}
			}
		}
	}
	for _, name := range []string{"nf/size-126/own", "nf/size-126/bypass", "nf/size-126-ipv4/bypass-xdp", "nf/size-1518-ipv4/node", "nf/rules-128/node", "nf/unused-8/static", "nf/arguments-1024/own"} {
		if !all[name] {
			t.Errorf("nothing is measured under the name %s", name)
		}
	}
}

func TestRulesAreThoseThatTheNameSays(t *testing.T) {
	for _, c := range []struct {
		f    filtering
		want map[string]int
	}{
		{filtering{rules: 3}, map[string]int{"chain": 0}},
		{filtering{hooked: true, rules: 3}, map[string]int{"meta l4proto udp\n": 3, "type filter hook": 3}},
		{filtering{hooked: true, rules: 3, regular: true}, map[string]int{"meta l4proto udp\n": 0, "chain unused": 3, "type filter hook": 3}},
		{filtering{hooked: true, tracked: true}, map[string]int{"ct state": 1}},
		{filtering{hooked: true, mapped: true, visits: 4}, map[string]int{" : accept": 4}},
	} {
		text := c.f.ruleset()
		for what, n := range c.want {
			if got := strings.Count(text, what); got != n {
				t.Errorf("%+v: %q is there %d times; want %d:\n%s", c.f, what, got, n, text)
			}
		}
	}
}
