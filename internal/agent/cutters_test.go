package agent

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// A node has the cutters that its plan needs, and the agent removes the others.
func TestANodeHasTheCuttersThatItsPlanNeeds(t *testing.T) {
	t.Parallel()
	labels := plan.Headend{PathID: plan.PathID{Encapsulation: model.Encapsulation{Type: model.EncapsulationSRMPLS}}}
	cut := plan.Proxy{Function: "fw"}
	cut.Segments = model.SegmentsCut
	for _, c := range []struct {
		what      string
		n         plan.Node
		need, not []string
	}{
		{"SRv6", plan.Node{Headends: []plan.Headend{{}}}, nil, []string{"wscut0", "wsback0", "wsenter0"}},
		{"a function", plan.Node{Proxies: []plan.Proxy{cut}}, []string{"wscut0", "wsback0"}, []string{"wsenter0"}},
		{"labels", plan.Node{Headends: []plan.Headend{{}, labels}}, []string{"wsenter0"}, []string{"wscut0", "wsback0"}},
		{"both", plan.Node{Headends: []plan.Headend{labels}, Proxies: []plan.Proxy{cut}}, []string{"wscut0", "wsback0", "wsenter0"}, nil},
	} {
		var need, not []string
		for _, p := range tables.Cutters(c.n) {
			need = append(need, p.In)
		}
		for _, u := range unneededCutters("test", c.n) {
			if u.Owner != "waystamp test" {
				t.Errorf("%s: the owner is %q", c.what, u.Owner)
			}
			not = append(not, u.In)
		}
		if diff := cmp.Diff([][]string{c.need, c.not}, [][]string{need, not}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.what, diff)
		}
	}
}
