package e2e

import (
	"crypto/rand"
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// stepChange is one change of the domain that a lab was built of.
type stepChange struct {
	name   string
	change func(*model.Domain)
}

// A chain changes by the steps of waystamp plan --keep-epochs, several times, while
// datagrams go both ways and TCP one: none is lost, and no packet is refused.
func TestAChangeInStepsLosesNoDatagram(t *testing.T) {
	t.Parallel()
	changesInSteps(t, build(t, paper),
		stepChange{"order of functions", func(d *model.Domain) { d.Chains[0].Functions = []string{"dpi", "fw"} }},
		stepChange{"scheme", func(d *model.Domain) { d.Chains[0].Proof.Scheme = model.SchemeOPoT }},
		stepChange{"encapsulation", func(d *model.Domain) { d.Chains[0].Encapsulation.SIDs = model.SIDsCompressed }},
		stepChange{"a function less, and on another node", func(d *model.Domain) {
			d.Functions = []model.Function{{Name: "dpi", Node: "r2"}}
			d.Chains[0].Functions = []string{"dpi"}
		}},
		stepChange{"as at first", func(*model.Domain) {}})
}

// So does one that goes over labels, back, and over labels with another order.
func TestAChangeToLabelsAndBackLosesNoDatagram(t *testing.T) {
	t.Parallel()
	w := build(t, paper, func(m *manifest.Manifest) {
		m.Domain.MPLS = &model.MPLS{Services: 100000, MTU: 1700}
		for i := range m.Domain.Nodes {
			n := &m.Domain.Nodes[i]
			n.MPLS = &model.NodeMPLS{Label: 16001 + uint32(i), Address: n.Address}
		}
	})
	labels := func(d *model.Domain) { d.Chains[0].Encapsulation.Type = model.EncapsulationSRMPLS }
	changesInSteps(t, w,
		stepChange{"to labels", labels},
		stepChange{"back to SRv6", func(*model.Domain) {}},
		stepChange{"to labels, with another order and scheme", func(d *model.Domain) {
			labels(d)
			d.Chains[0].Functions, d.Chains[0].Proof.Scheme = []string{"dpi", "fw"}, model.SchemeOPoT
		}},
		stepChange{"as at first", func(*model.Domain) {}})
}

// changesInSteps carries changes out one after the other, each by its steps, under traffic, and holds
// that nothing of it is lost or refused.
func changesInSteps(t *testing.T, w *world, changes ...stepChange) {
	t.Helper()
	there, back := w.ticking("h1", "h2"), w.ticking("h2", "h1")
	s := w.stream("h1", "h2")
	flows := func() {
		t.Helper()
		there.more(200)
		back.more(200)
		s.more(1 << 20)
	}
	flows()
	last := w.plan
	for _, c := range changes {
		d := w.manifest.Domain
		d.Chains, d.Functions = slices.Clone(d.Chains), slices.Clone(d.Functions)
		c.change(&d)
		keys := plan.NewKeyring(rand.Reader, last.Paths)
		keys.KeepSIDs()
		next, err := plan.Compile(d, keys)
		must(t, err)
		steps, err := plan.MakeSteps(last.Paths, last.Nodes, next)
		must(t, err)
		if len(steps.Turns) != 2 || len(steps.Lossy) != 0 {
			t.Fatalf("%s: %d paths turn, %d are lossy, want 2 and none", c.name, len(steps.Turns), len(steps.Lossy))
		}
		for i, step := range [][]plan.Node{steps.Both, steps.Turn, next.Nodes} {
			for j := range step {
				// In no order that would favour it.
				w.follow(step[(j*3+i)%len(step)])
				flows()
			}
		}
		last = next
	}
	s.finish()
	for _, d := range []*ticking{there, back} {
		if missing, double := d.finish(); len(missing)+len(double) > 0 {
			t.Errorf("%s: %d datagrams are missing, %d came twice", d.name, len(missing), len(double))
		}
	}
	if got, err := w.refusals(); err != nil || len(got) > 0 {
		t.Errorf("refused: %v, %v", got, err)
	}
}
