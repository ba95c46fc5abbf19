package dataplane

import (
	"errors"
	"fmt"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// hook is where a program is attached on an interface, and which family of
// programs.
type hook string

const (
	hookTC   hook = "tc"
	hookXDP  hook = "xdp"
	hookFrom hook = "from" // TC ingress of an interface that a function is behind
	hookOut  hook = "out"  // TC egress
	// hookFromXDP is XDP on an interface that a function is behind.
	hookFromXDP hook = "fromxdp"
)

// hooksByRemoval: XDP leaves packets to TC; and while TC sends packets to functions, the
// programs for packets from functions must be there.
var hooksByRemoval = []hook{hookXDP, hookFromXDP, hookTC, hookOut, hookFrom}

// binding is a device of this machine that programs are attached to: an
// interface of the plan, one that a function is behind, or a cutter's.
type binding struct {
	model.Interface
	device host.Device
	proxy  uint32 // key of the function that is behind it
	// function is its name.
	function string
	cutter   bool // the way out of a cutter
	from     bool // functions are behind it: their program is at its ingress
	out      bool // a program is at its egress too
	// vlans are the bindings on top of it, as WS_PORT_VLANS wants them.
	vlans [abi.PortVlans]uint16
}

// hardware reports whether a device gains by native XDP. On veth, tap and the like packets
// arrive as super-packets, which XDP would segment.
func (b binding) hardware() bool { return b.device.Kind == "device" && b.device.Name != "lo" }

// triesXDP: attach XDP if it goes. needsXDP: or fail.
func (b binding) needsXDP() bool { return b.Datapath == model.DatapathXDP }
func (b binding) triesXDP() bool {
	return b.needsXDP() || b.Datapath == model.DatapathAuto && b.hardware()
}

// hookXDP is where an XDP program of the interface is.
func (b binding) hookXDP() hook {
	if b.from {
		return hookFromXDP
	}
	return hookXDP
}

// hooks are the hooks that must have a program, without XDP.
func (b binding) hooks() []hook {
	switch {
	case b.from:
		return []hook{hookFrom}
	case b.out:
		return []hook{hookOut, hookTC}
	}
	return []hook{hookTC}
}

// settings are the interface's entry in ws_ports.
func (b binding) settings(target bool) abi.Port {
	p := abi.Port{Proxy: b.proxy, Vlans: b.vlans}
	if b.Role == model.RoleEdge && b.Unmatched == model.UnmatchedDrop {
		p.UnmatchedDrop = 1
	}
	if target {
		p.XdpTarget = 1
	}
	if b.Role == model.RoleEdge {
		p.Edge = 1
		p.Guard = uint32(b.Guard)
	}
	if b.cutter && (b.from || b.Role == model.RoleEdge) {
		p.Cutter = 1
	}
	return p
}

// topology is a plan's place on this machine.
type topology struct {
	bindings []binding               // see order
	reach    map[string]tables.Reach // of functions whose interfaces exist
	local    []string                // functions in the node's own kernel
	node     abi.Node                // armed, with the cutters, and whether XDP is tried
	missing  []error                 // interfaces that are missing, or differ from the plan
	withheld []error                 // reasons why functions get no packets although their interfaces may exist
}

// resolve looks up all devices of a plan. It leaves out and lists devices that are missing, or
// clash with another device of the plan; the error is for plans that fit no machine. Functions
// in withheld get no packets, for that reason, and their interfaces may be missing.
func resolve(n plan.Node, devices func(string) (host.Device, error), withheld map[string]error) (topology, error) {
	t := topology{reach: map[string]tables.Reach{}, node: abi.Node{Armed: 1}}
	if n.OrderedRules() > 0 {
		t.node.Rules = uint32(abi.RulesStateThere)
	}
	if tables.HasOwn(n) {
		t.node.Own = 1
	}
	if n.Gateway() != nil {
		t.node.Services = 1
	}
	uses := map[int]string{}
	look := func(name, what string) (host.Device, bool) {
		dev, err := devices(name)
		// The programs would take the first bytes of a packet for addresses of
		// a header that is not there, and let all of it pass.
		if err == nil && dev.Frame != "ether" {
			err = fmt.Errorf("its frames are of type %q; the data path needs Ethernet frames (a veth, a NIC, a tap), not tun, WireGuard or IP tunnels", dev.Frame)
		}
		if err != nil {
			t.missing = append(t.missing, fmt.Errorf("%s: %w", what, err))
		}
		return dev, err == nil
	}
	take := func(b binding, what string) bool {
		if other, twice := uses[b.device.Index]; twice {
			t.missing = append(t.missing, fmt.Errorf("%s is the same device as %s", what, other))
			return false
		}
		uses[b.device.Index] = what
		t.bindings = append(t.bindings, b)
		return true
	}

	leaving := tables.HasLocal(n) || tables.HasOwn(n)
	for _, i := range n.Interfaces {
		what := "interface " + i.Name
		dev, ok := look(i.Name, what)
		if !ok {
			continue
		}
		b := binding{Interface: i, device: dev, out: leaving || i.Role == model.RoleEdge}
		if take(b, what) && b.triesXDP() {
			t.node.Xdp = 1
		}
	}
	keys, err := tables.ProxyKeys(n.Proxies)
	if err != nil {
		return topology{}, err
	}
	for _, p := range n.Proxies {
		why := withheld[p.Function]
		if why != nil {
			t.withheld = append(t.withheld, fmt.Errorf("function %s gets no packets: %w", p.Function, why))
		}
		if p.Local {
			if why == nil {
				t.reach[p.Function] = tables.Reach{}
				t.local = append(t.local, p.Function)
			}
			continue
		}
		// Both ends are guarded, even if the function cannot be reached: packets that it sends
		// by the end at which it receives are no more trusted.
		ends := []struct{ name, what string }{{p.From, fmt.Sprintf("interface %s from function %s", p.From, p.Function)}}
		if p.To != p.From {
			ends = append(ends, struct{ name, what string }{p.To, fmt.Sprintf("interface %s to function %s", p.To, p.Function)})
		}
		var found []host.Device
		for _, e := range ends {
			missing := t.missing
			dev, ok := look(e.name, e.what)
			if !ok {
				if why != nil {
					t.missing = missing // the reason is reported already
				}
				continue
			}
			i := model.Interface{Name: e.name, Role: model.RoleCore, Datapath: model.DatapathTC}
			if p.Recognise == model.RecogniseContent {
				i.Datapath = model.DatapathAuto
			}
			b := binding{Interface: i, device: dev, proxy: keys[p.Function], function: p.Function, from: true}
			if !take(b, e.what) {
				continue
			}
			found = append(found, dev)
			if b.triesXDP() {
				t.node.Xdp = 1
			}
		}
		if len(found) == len(ends) && why == nil {
			to := found[len(found)-1]
			t.reach[p.Function] = tables.Reach{To: uint32(to.Index), Dmac: found[0].MAC, Cuts: to.Cuts, Namespace: to.PeerNamespace}
		}
	}
	t.resolveCutters(n, look, take)
	t.resolveVLANs()
	slices.SortStableFunc(t.bindings, func(a, b binding) int { return a.order() - b.order() })
	return t, nil
}

// resolveVLANs sets for each interface the planned VLANs on top of it, so that their own
// interfaces process their frames. XDP sees the frames of a VLAN without their tag and would
// process them as the interface's own; there TC does all the work.
func (t *topology) resolveVLANs() {
	for _, up := range t.bindings {
		v := up.device.VLAN
		i := slices.IndexFunc(t.bindings, func(b binding) bool { return v.ID != 0 && b.device.Index == v.Parent })
		if i < 0 {
			continue
		}
		b := &t.bindings[i]
		if b.needsXDP() {
			t.missing = append(t.missing, fmt.Errorf("interface %s has datapath xdp, and %s on top of it is in the plan too: XDP would take that VLAN's frames for its own; give %s datapath tc", b.Name, up.Name, b.Name))
		}
		b.Datapath = model.DatapathTC
		free := slices.Index(b.vlans[:], 0)
		if free < 0 {
			// Frames of this one are judged on both interfaces.
			t.missing = append(t.missing, fmt.Errorf("interface %s: more than %d VLANs on top of it are in the plan; leave %s itself out of it, or spread them over several interfaces", b.Name, len(b.vlans), b.Name))
			continue
		}
		b.vlans[free] = v.ID
		if v.Provider {
			b.vlans[free] |= abi.VLANAd
		}
		if t.hasVLANs(up) {
			b.vlans[free] |= abi.VLANStacked
		}
	}
}

// hasVLANs reports whether a binding is a VLAN on top of b.
func (t *topology) hasVLANs(b binding) bool {
	return slices.ContainsFunc(t.bindings, func(up binding) bool {
		return up.device.VLAN.ID != 0 && up.device.VLAN.Parent == b.device.Index
	})
}

func (t *topology) resolveCutters(n plan.Node, look func(name, what string) (host.Device, bool), take func(binding, string) bool) {
	to, back := tables.CutterPairs()
	needed := tables.Cutters(n)
	for _, c := range []struct {
		pair    tables.CutterPair
		role    model.Role
		from    bool
		ifindex *uint32
		dmac    *[6]uint8
	}{
		{to, model.RoleCore, false, &t.node.CutIfindex, &t.node.CutDmac},
		{back, model.RoleCore, true, &t.node.CutBackIfindex, &t.node.CutBackDmac},
		{tables.EnterCutter(), model.RoleEdge, false, &t.node.CutEnterIfindex, &t.node.CutEnterDmac},
	} {
		if !slices.Contains(needed, c.pair) {
			continue
		}
		what := fmt.Sprintf("cutter %s-%s", c.pair.In, c.pair.Out)
		in, ok := look(c.pair.In, what)
		out, okOut := look(c.pair.Out, what)
		if !ok || !okOut {
			continue
		}
		if take(binding{
			// A packet that no chain takes any more when it is cut may be of an interface where
			// such are dropped.
			Interface: model.Interface{Name: c.pair.Out, Role: c.role, Datapath: model.DatapathTC, Unmatched: model.UnmatchedDrop},
			device:    out, cutter: true, from: c.from,
		}, what) {
			*c.ifindex, *c.dmac = uint32(in.Index), out.MAC
		}
	}
}

// order: the programs for packets from functions come before packets to functions, and cutters
// before the programs that send into them. Inside comes before edge: verifiers and stamping hops
// change before headends do.
func (b binding) order() int {
	switch {
	case b.from:
		return 0
	case b.cutter:
		return 1
	case b.Role == model.RoleCore:
		return 2
	}
	return 3
}

// whole is an error that names all that is missing.
func (t topology) whole() error { return errors.Join(t.missing...) }

// portTable is ws_ports for these interfaces; target reports whether an interface accepts XDP
// redirects.
func portTable(bs []binding, target func(binding) bool) map[uint32]abi.Port {
	out := map[uint32]abi.Port{}
	for _, b := range bs {
		out[uint32(b.device.Index)] = b.settings(target(b))
	}
	return out
}
