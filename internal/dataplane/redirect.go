package dataplane

import (
	"fmt"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/tables"
)

// isTarget reports whether XDP programs may redirect to an interface. The kernel decides; a veth
// without XDP of its own is left to TC, since its peer may stop accepting frames at any time.
func (d *Dataplane) isTarget(b binding) bool {
	if b.device.Kind == "veth" && !(b.triesXDP() && d.hasXDP(b)) {
		return false
	}
	ok, err := host.TakesRedirects(b.device.Index)
	if err != nil {
		d.cfg.Log.Debug("no XDP redirects to this interface", "interface", b.Name, "err", err)
	}
	return ok && err == nil
}

// RefreshTargets finds the interfaces that accept XDP redirects again: that changes with the
// programs at the other end of a veth.
func (d *Dataplane) RefreshTargets() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil || d.node == nil || !d.anyXDP() {
		return nil
	}
	have := tables.New()
	if err := readMap(d.gen, tables.MapPorts, have.Ports); err != nil {
		return err
	}
	lost := false
	for _, b := range d.topology.bindings {
		k := uint32(b.device.Index)
		old, ok := have.Ports[k]
		now := b.settings(d.isTarget(b))
		if !ok || old == now {
			continue
		}
		if err := d.gen.maps[tables.MapPorts].Put(k, now); err != nil {
			return fmt.Errorf("write to map %s: %w", tables.MapPorts, err)
		}
		lost = lost || now.XdpTarget < old.XdpTarget
	}
	if lost {
		return d.gen.flushNexthops()
	}
	return nil
}

func (d *Dataplane) anyXDP() bool {
	for k := range d.links {
		if k.hook == hookXDP || k.hook == hookFromXDP {
			return true
		}
	}
	return false
}
