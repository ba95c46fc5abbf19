package dataplane

import (
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

func TestListOfCPUsIsCounted(t *testing.T) {
	for list, want := range map[string]int{"0\n": 1, "0-1\n": 2, "0-3,8-11\n": 12, "0,2": 3, "": 0, "0-\n": 0, "x": 0} {
		if got, err := parseCPUs(list); got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: got %d, %v; want %d", list, got, err, want)
		}
	}
	if n, err := CPUs(); n < 1 || err != nil {
		t.Errorf("of this machine: %d, %v", n, err)
	}
}

func TestPlanWithoutALaneForEachCPUIsRefused(t *testing.T) {
	n := xtest.Node()
	n.Headends = []plan.Headend{xtest.HeadendOf(1, 0, model.SchemeKeyed, model.Match{}, 1)}
	n.Headends[0].Lanes = 4
	if err := checkLanes(n, 4); err != nil {
		t.Error(err)
	}
	if err := checkLanes(n, 5); err == nil || !strings.Contains(err.Error(), "say cpus: 5") {
		t.Errorf("got %v; want it refused, and what to do", err)
	}
}
