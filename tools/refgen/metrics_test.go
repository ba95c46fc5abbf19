package main

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/controller"
	"github.com/waystamp/waystamp/internal/metrics"
)

var (
	named    = regexp.MustCompile(`waystamp_[a-z_]+`)
	selected = regexp.MustCompile(`(waystamp_[a-z_]+)\{([^}]*)\}`)
	matcher  = regexp.MustCompile(`([a-z_]+)\s*(?:=~|!~|!=|=)\s*"`)
	grouped  = regexp.MustCompile(`\bby \(([^)]*)\)`)
	legend   = regexp.MustCompile(`\{\{([^}]*)\}\}`)
)

// unknown is what a query has that the tables have not: metrics, and labels of none of its metrics. Prometheus itself
// adds the label instance.
func unknown(table metrics.Table, expr, legendFormat string) (bad []string) {
	of := func(name string) *metrics.Metric {
		for i, m := range table {
			if m.Name == name && m.Type != metrics.Summary || m.Type == metrics.Summary && (m.Name+"_sum" == name || m.Name+"_count" == name) {
				return &table[i]
			}
		}
		return nil
	}
	labels := []string{"instance"}
	for _, name := range named.FindAllString(expr, -1) {
		m := of(name)
		if m == nil {
			bad = append(bad, name)
			continue
		}
		labels = append(labels, m.Labels...)
	}
	check := func(label string, in []string) {
		if !slices.Contains(in, label) {
			bad = append(bad, "label "+label)
		}
	}
	for _, s := range selected.FindAllStringSubmatch(expr, -1) {
		if m := of(s[1]); m != nil {
			for _, l := range matcher.FindAllStringSubmatch(s[2], -1) {
				check(l[1], m.Labels)
			}
		}
	}
	left := labels
	for _, g := range grouped.FindAllStringSubmatch(expr, -1) {
		left = nil
		for l := range strings.SplitSeq(g[1], ",") {
			check(strings.TrimSpace(l), labels)
			left = append(left, strings.TrimSpace(l))
		}
	}
	for _, l := range legend.FindAllStringSubmatch(legendFormat, -1) {
		check(l[1], left)
	}
	return bad
}

// The Grafana board asks for nothing that nobody serves.
func TestTheBoardAsksForMetricsThatThereAre(t *testing.T) {
	table := slices.Concat(agent.Metrics, controller.Metrics)
	seen := map[string]bool{}
	for _, m := range table {
		if seen[m.Name] {
			t.Errorf("%s is there twice", m.Name)
		}
		seen[m.Name] = true
	}
	b, err := os.ReadFile("../../packaging/grafana.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			ID      int
			Type    string
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal(b, &board); err != nil {
		t.Fatal(err)
	}
	asked, ids := 0, map[int]bool{}
	for _, p := range board.Panels {
		if ids[p.ID] || p.Title == "" || p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %d, %q: its number is taken, or it asks for nothing", p.ID, p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			if !named.MatchString(target.Expr) {
				t.Errorf("%s asks for %q", p.Title, target.Expr)
			}
			for _, bad := range unknown(table, target.Expr, target.LegendFormat) {
				t.Errorf("%s: %s: there is no %s", p.Title, target.Expr, bad)
			}
			asked++
		}
	}
	if asked < 20 {
		t.Errorf("the board has %d queries", asked)
	}
	for _, c := range []struct{ expr, legend, want string }{
		{"rate(waystamp_packet_total[5m])", "", "waystamp_packet_total"},
		{"waystamp_function_seconds", "", "waystamp_function_seconds"},
		{`waystamp_packets_total{reason="x"}`, "", "label reason"},
		{"sum by (reason) (waystamp_packets_total)", "", "label reason"},
		{"sum by (chain) (waystamp_packets_total)", "{{role}}", "label role"},
	} {
		if bad := unknown(table, c.expr, c.legend); !slices.Contains(bad, c.want) {
			t.Errorf("%s is taken: %q", c.expr, bad)
		}
	}
}
