package agent

import (
	"errors"
	"slices"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// cutters are the pairs of devices in which an instance's data path segments super-packets. They
// have the instance's name, so that other instances and programs keep theirs.
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

// unneededCutters are the cutters that a plan does not need.
func unneededCutters(instance string, n plan.Node) []host.Cutter {
	needed := ownCutters(instance, tables.Cutters(n))
	return slices.DeleteFunc(cutters(instance), func(c host.Cutter) bool { return slices.Contains(needed, c) })
}

// ensureCutters makes the cutters of a plan, before it is applied. It returns the new ones, also
// with an error. If a function's own device can segment packets to it, the device does so: that
// saves each frame the way through a cutter.
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
