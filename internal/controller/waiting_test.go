package controller

import (
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// refuse sets which plans an agent's kernel does not take. It tries the one again that it refused.
func (f *fake) refuse(which func(plan.Node) bool) {
	f.mu.Lock()
	f.refuses = which
	again := f.refused
	f.mu.Unlock()
	if again != nil {
		again()
	}
}

// A node refuses what a change prepares: whoever asks is told which one, why and since when, until it takes it.
func TestAChangeSaysWhichNodeHoldsItUp(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	agents["r2"].refuse(func(n plan.Node) bool {
		return slices.ContainsFunc(n.Endpoints, func(e plan.Endpoint) bool { return e.Epoch > 1 })
	})
	serial := w.apply(file + `  - {name: mail, ingress: [r1], functions: [fw], egress: r3, match: {destination: "2001:db8:25::/48"}}` + "\n")
	w.until("web and mail", settled(serial)) // r2 takes a new chain's first epoch
	w.rotate()
	s := w.until("r2 refuses", func(s *v1.State) bool {
		return len(s.Waiting) == 1 && s.Waiting[0].State == nodeRefusing
	})
	x := s.Waiting[0]
	if x.Node != "r2" || x.Reason != "the kernel lacks something" || s.Step != string(stepPrepare) || x.Since.AsTime().Before(s.Since.AsTime()) {
		t.Errorf("step %s since %v waits for %v", s.Step, s.Since, x)
	}
	// Another rotation waits: it would meet the same refusal.
	serial = w.rotate()
	s = w.state()
	if len(s.WaitingFor) != 1 || s.WaitingFor[0] != "r2" || s.Serial == s.WantedSerial {
		t.Errorf("state %v", s)
	}
	agents["r2"].refuse(nil)
	s = w.until("settled", settled(serial))
	if len(s.Waiting) != 0 || slices.ContainsFunc(s.Chains, func(ch *v1.ChainState) bool { return strings.Contains(ch.Reason, "waits") }) {
		t.Errorf("state %v", s)
	}
}
