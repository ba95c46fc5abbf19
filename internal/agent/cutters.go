package agent

import (
	"errors"
	"slices"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// cutters are the pairs of devices that an instance's data path cuts
// super-packets with. They carry its name, so that another instance, or somebody
// else, keeps theirs.
func cutters(instance string) []host.Cutter {
	to, back := tables.CutterPairs()
	return ownCutters(instance, []tables.CutterPair{to, back, tables.EnterCutter()})
}

func ownCutters(instance string, pairs []tables.CutterPair) (out []host.Cutter) {
	for _, p := range pairs {
		out = append(out, host.Cutter{In: p.In, Out: p.Out, Owner: "waystamp " + instance})
	}
	return out
}

// unneededCutters are those that a plan has no use for.
func unneededCutters(instance string, n plan.Node) []host.Cutter {
	needed := ownCutters(instance, tables.Cutters(n))
	return slices.DeleteFunc(cutters(instance), func(c host.Cutter) bool { return slices.Contains(needed, c) })
}

// ensureCutters makes those that a plan needs, before it is applied. It returns
// what it made, on an error too. Where a function's own device can cut what is sent
// to it, it is made to: that saves each frame the way through a cutter.
func (a *agent) ensureCutters(n plan.Node) (made []host.Cutter, err error) {
	for _, p := range n.Proxies {
		if p.Local || p.Segments != model.SegmentsCut {
			continue
		}
		if err := a.net.CutOnSend(p.To); err != nil && !errors.Is(err, host.ErrNoLink) {
			a.cfg.Log.Debug("super-packets for a function go through a cutter", "function", p.Function, "err", err)
		}
	}
	for _, c := range ownCutters(a.cfg.Instance, tables.Cutters(n)) {
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
