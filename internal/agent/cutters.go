package agent

import (
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/plan"
)

// cutters are the pairs of devices that an instance's data path cuts
// super-packets with. They carry its name, so that another instance, or somebody
// else, keeps theirs.
func cutters(instance string) []host.Cutter {
	owner := "waystamp " + instance
	to, back := dataplane.CutterPairs()
	return []host.Cutter{
		{In: to.In, Out: to.Out, Owner: owner},
		{In: back.In, Out: back.Out, Owner: owner},
	}
}

// ensureCutters makes those that a plan needs, before it is applied. It returns
// what it made, on an error too.
func (a *agent) ensureCutters(n plan.Node) (made []host.Cutter, err error) {
	if !dataplane.NeedsCutters(n) {
		return nil, nil
	}
	for _, c := range cutters(a.cfg.Instance) {
		fresh, err := a.net.EnsureCutter(c)
		if fresh {
			made = append(made, c)
		}
		if err != nil {
			return made, err
		}
	}
	return made, nil
}

func (a *agent) removeCutters(cs []host.Cutter) error {
	for _, c := range cs {
		if err := a.net.RemoveCutter(c); err != nil {
			return err
		}
	}
	return nil
}
