package agent

import (
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/plan"
)

func TestPlansWithLabelsAreRefused(t *testing.T) {
	if err := withoutLabels(plan.Node{}); err != nil {
		t.Errorf("a plan without labels: %v", err)
	}
	if err := withoutLabels(plan.Node{MPLS: &plan.MPLS{Services: 100000}}); err == nil || !strings.Contains(err.Error(), "use type srv6") {
		t.Errorf("a plan with labels: %v", err)
	}
}
