package agent

import (
	"errors"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// cutters are the pairs of devices that an instance's data path cuts
// super-packets with. They carry its name, so that another instance, or somebody
// else, keeps theirs.
func cutters(instance string) []host.Cutter {
	owner := "waystamp " + instance
	to, back := tables.CutterPairs()
	return []host.Cutter{
		{In: to.In, Out: to.Out, Owner: owner},
		{In: back.In, Out: back.Out, Owner: owner},
	}
}

// ensureCutters makes those that a plan needs, before it is applied. It returns
// what it made, on an error too. Where a function's own device can cut what is sent
// to it, it is made to: that saves each frame the way through a cutter.
func (a *agent) ensureCutters(n plan.Node) (made []host.Cutter, err error) {
	if !tables.NeedsCutters(n) {
		return nil, nil
	}
	for _, p := range n.Proxies {
		if p.Local || p.Segments != model.SegmentsCut {
			continue
		}
		if err := a.net.CutOnSend(p.To); err != nil && !errors.Is(err, host.ErrNoLink) {
			a.cfg.Log.Debug("super-packets for a function go through a cutter", "function", p.Function, "err", err)
		}
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
