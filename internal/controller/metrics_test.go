package controller

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// scraped is what a reader of metrics gets.
func scraped(t *testing.T, l Listener) string {
	t.Helper()
	defer http.DefaultClient.CloseIdleConnections()
	r, err := http.Get("http://" + l.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v: %s", r.Status, err, b)
	}
	return string(b)
}

func TestMetricsTellHowTheDomainIs(t *testing.T) {
	l, err := ListenMetrics("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	w.listeners = []Listener{l}
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("settled", settled(w.apply(file)))
	w.until("drained", drained)
	agents["r2"].hush()
	w.rotate()
	w.until("r2 is waited for", func(s *v1.State) bool { return slices.Equal(s.WaitingFor, []string{"r2"}) })
	text := scraped(t, l)
	for _, line := range []string{
		"waystamp_controller_leads 1", "waystamp_controller_settled 0", "waystamp_controller_problem 0", "waystamp_controller_waiting_nodes 1",
		`waystamp_controller_nodes{state="ready"} 2`, `waystamp_controller_nodes{state="behind"} 1`, `waystamp_controller_nodes{state="revoked"} 0`,
		"waystamp_controller_connected_nodes 3", `waystamp_controller_chains{state="active"} 1`,
		`waystamp_controller_epochs{state="active"} 2`, `waystamp_controller_epochs{state="preparing"} 2`,
		`waystamp_controller_commits_total{commit="begin"} 2`, `waystamp_controller_commits_total{commit="turn"} 1`,
		`waystamp_controller_steps_seconds_count{step="prepare"} 1`, `waystamp_controller_steps_seconds_count{step="turn"} 1`,
		"waystamp_controller_failures_total 0", `waystamp_controller_calls_total{call="Node/Join",result="done"} 3`,
	} {
		if !strings.Contains(text, "\n"+line+"\n") {
			t.Errorf("there is no line %q in\n%s", line, text)
		}
	}
	// All that the table has is there.
	for _, m := range Metrics {
		if !strings.Contains(text, "\n# TYPE "+m.Name+" "+string(m.Type)+"\n") {
			t.Errorf("%s is missing", m.Name)
		}
	}
	agents["r2"].speak()
	w.until("drained", drained)
	for _, line := range []string{"waystamp_controller_settled 1", "waystamp_controller_waiting_nodes 0"} {
		if text := scraped(t, l); !strings.Contains(text, "\n"+line+"\n") || strings.Contains(text, "waystamp_controller_step_seconds{") {
			t.Errorf("there is no line %q, or still a step, in\n%s", line, text)
		}
	}
}
