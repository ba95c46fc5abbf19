package agent

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/plan"
)

// A node whose gateway would not run must not look as if its service were guarded.
func TestAPlanWithAGatewayIsRefused(t *testing.T) {
	const file = "../../examples/zerotrust.yaml"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m, err := manifest.Parse(file, text)
	if err != nil {
		t.Fatal(err)
	}
	d, err := plan.Compile(m.Domain, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range d.Nodes {
		b, err := plan.EncodeNode(n)
		if err != nil {
			t.Fatal(err)
		}
		a := &agent{cfg: Config{PlanFile: n.Name + ".json"}}
		_, err = a.decode(t.Context(), b)
		if n.Name != "r1" {
			if err != nil {
				t.Errorf("%s: %v", n.Name, err)
			}
			continue
		}
		if _, ok := errors.AsType[*PlanError](err); !ok || !strings.Contains(err.Error(), "service shop has its gateway on node r1") {
			t.Errorf("r1: got %v; want a refusal", err)
		}
	}
}
