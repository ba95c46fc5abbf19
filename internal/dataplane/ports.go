package dataplane

import (
	"errors"
	"fmt"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
)

// hook is where a program is attached on an interface.
type hook string

const (
	hookTC  hook = "tc"
	hookXDP hook = "xdp"
)

// binding is an interface of the plan as it is on this machine.
type binding struct {
	model.Interface
	device Device
}

// hardware tells devices that gain by native XDP. On veth, tap and the like
// packets arrive as super-packets, which XDP would force apart.
func (b binding) hardware() bool { return b.device.Kind == "device" && b.device.Name != "lo" }

// triesXDP: attach XDP if it goes. needsXDP: or fail.
func (b binding) needsXDP() bool { return b.Datapath == model.DatapathXDP }
func (b binding) triesXDP() bool {
	return b.needsXDP() || b.Datapath == model.DatapathAuto && b.hardware()
}

// settings are the interface's entry in ws_ports.
func (b binding) settings(target bool) port {
	var p port
	if b.Role == model.RoleEdge && b.Unmatched == model.UnmatchedDrop {
		p.UnmatchedDrop = 1
	}
	if target {
		p.XdpTarget = 1
	}
	return p
}

// resolvePorts looks the interfaces of a plan up, and names all that are
// missing.
func resolvePorts(interfaces []model.Interface, devices func(string) (Device, error)) ([]binding, error) {
	var errs []error
	byIndex := map[int]string{}
	var out []binding
	for _, i := range interfaces {
		dev, err := devices(i.Name)
		if err != nil {
			errs = append(errs, fmt.Errorf("interface %s: %w", i.Name, err))
			continue
		}
		// The programs would take the first bytes of a packet for addresses of
		// a header that is not there, and let all of it pass.
		if dev.Frame != "ether" {
			errs = append(errs, fmt.Errorf("interface %s: its frames are of type %q; the data path needs Ethernet frames (a veth, a NIC, a tap), not tun, WireGuard or IP tunnels", i.Name, dev.Frame))
			continue
		}
		if other, twice := byIndex[dev.Index]; twice {
			errs = append(errs, fmt.Errorf("interface %s is the same device as %s", i.Name, other))
			continue
		}
		byIndex[dev.Index] = i.Name
		out = append(out, binding{i, dev})
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	// Inside first: verifiers and stamping hops change before headends do.
	slices.SortStableFunc(out, func(a, b binding) int { return int(b.Role) - int(a.Role) })
	return out, nil
}

// portTable is ws_ports for these interfaces; target tells which of them take XDP
// redirects.
func portTable(bs []binding, target func(binding) bool) map[uint32]port {
	out := map[uint32]port{}
	for _, b := range bs {
		out[uint32(b.device.Index)] = b.settings(target(b))
	}
	return out
}
