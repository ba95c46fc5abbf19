package lab

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
)

// ruleset is what nftables is to hold in a station's namespace.
type ruleset struct {
	function string
	text     string
}

// copier is a program that copies frames between two interfaces of its station;
// see internal/lab/inline.
type copier struct{ to, from string }

// Link-local addresses on the links of a function: the node's, and the
// function's where its file gives none.
var (
	nodeSide     = netip.MustParseAddr("fe80::1")
	functionSide = netip.MustParseAddr("fe80::2")
)

// addFunctions lays out what the lab makes of functions that know nothing of
// segment routing.
func (w *layout) addFunctions(d model.Domain, l model.Lab) error {
	for _, made := range l.Functions {
		i := slices.IndexFunc(d.Functions, func(f model.Function) bool { return f.Name == made.Name })
		if i < 0 || d.Functions[i].Kind != model.KindUnaware && d.Functions[i].Stream.Attached == (model.Attached{}) {
			return fmt.Errorf("the lab makes function %s, which is not one of kind unaware", made.Name)
		}
		f := d.Functions[i]
		node := slices.IndexFunc(w.stations, func(s station) bool { return s.name == f.Node && s.role == RoleNode })
		if node < 0 {
			return fmt.Errorf("function %s of the lab is on %q, which is no node", f.Name, f.Node)
		}
		if f.Proxy.Local {
			if made.Kind != model.LabNftables {
				return fmt.Errorf("function %s is local, and %s in the lab; a local one is a ruleset on its node", f.Name, made.Kind)
			}
			n := &w.stations[node]
			n.rulesets = append(n.rulesets, ruleset{f.Name, made.Ruleset})
			continue
		}
		if err := w.attach(node, f, made, cmp.Or(made.MTU, l.MTU, mtuLink)); err != nil {
			return fmt.Errorf("function %s of the lab: %w", f.Name, err)
		}
	}
	return nil
}

// attach puts a function behind interfaces of its node.
func (w *layout) attach(node int, f model.Function, made model.LabFunction, mtu int) error {
	p := f.Proxy
	plain := f.Stream.Attached != model.Attached{} // connections go through it both ways
	if a := f.Stream.Attached; plain {
		p.To, p.From, p.Via = a.To, a.From, a.Via
	}
	s := station{name: f.Name, role: RoleFunction}
	here, there := nodeSide, functionSide
	if via := p.Via; via.IsLinkLocalUnicast() {
		there = via
		if via == here {
			here = functionSide
		}
	}
	names := []string{p.To}
	if p.From != p.To {
		names = append(names, p.From)
	}
	for _, name := range names {
		w.wires = append(w.wires, wire{a: f.Node, b: f.Name, name: name, mtu: mtu})
		outside := iface{name: name, addresses: []netip.Prefix{netip.PrefixFrom(here, 64)}, plain: made.Kind == model.LabRaw}
		w.stations[node].interfaces = append(w.stations[node].interfaces, outside)
		inside := iface{name: name}
		if made.Kind != model.LabRaw {
			inside.addresses = []netip.Prefix{netip.PrefixFrom(there, 64)}
		}
		s.interfaces = append(s.interfaces, inside)
	}
	switch made.Kind {
	case model.LabRaw:
		s.copier = &copier{p.To, p.From}
	case model.LabForward, model.LabNftables:
		if !p.Via.IsValid() {
			return fmt.Errorf("it routes, and takes only frames that are addressed to it; give its attachment a via")
		}
		if there != p.Via {
			s.interfaces[0].addresses = append(s.interfaces[0].addresses, single(p.Via))
		}
		for _, all := range []netip.Addr{netip.IPv6Unspecified(), netip.IPv4Unspecified()} {
			if plain { // what comes in by one leaves by the other, and what it sends itself goes to servers by their port, else to clients
				s.rules = append(s.rules, host.Rule{IPv4: all.Is4(), Priority: 102, DestinationPort: model.StreamPlainPort, Table: 1})
				s.routes = append(s.routes, host.Route{Destination: netip.PrefixFrom(all, 0), Via: here, Device: p.To})
				for i, out := range []string{p.From, p.To} {
					s.routes = append(s.routes, host.Route{Destination: netip.PrefixFrom(all, 0), Via: here, Device: out, Table: 1 + i})
					s.rules = append(s.rules, host.Rule{IPv4: all.Is4(), Priority: 100 + i, Input: names[i], Table: 1 + i})
				}
				continue
			}
			s.routes = append(s.routes, host.Route{Destination: netip.PrefixFrom(all, 0), Via: here, Device: p.From})
		}
		if made.Kind == model.LabNftables {
			s.rulesets = []ruleset{{f.Name, made.Ruleset}}
		}
	default:
		return fmt.Errorf("its kind, %s, is not known", made.Kind)
	}
	w.stations = append(w.stations, s)
	return nil
}

// program loads rulesets and sets what programs in user space need of devices.
func (s station) program(ctx context.Context, n *host.Net) error {
	for _, i := range s.interfaces {
		// Nobody behind here completes checksums or expects super-packets.
		if i.plain {
			if err := n.SetOffload(i.name, host.TransmitSum, false); err != nil {
				return err
			}
		}
		if s.copier != nil {
			if err := n.SetOffload(i.name, host.GRO, false); err != nil {
				return err
			}
		}
	}
	for _, r := range s.rulesets {
		if err := n.LoadRuleset(ctx, r.text); err != nil {
			return fmt.Errorf("load the ruleset of function %s: %w", r.function, err)
		}
	}
	return nil
}

// startProgram runs the program that a function of kind raw is.
func (l *Lab) startProgram(ctx context.Context, name string, i copier) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("start the program of function %s: %w", name, err)
		}
	}()
	m, err := l.Member(name)
	if err != nil {
		return err
	}
	// Before it is there, so that Down looks for it.
	record := func(p process) error {
		return l.updateMember(name, func(m *Member) { m.Program = &Program{PID: p.pid, Start: p.start} })
	}
	if err := record(process{}); err != nil {
		return err
	}
	return l.launch(ctx, m, record, "lab", "inline", "--name", m.Namespace, i.to, i.from)
}

// stopProgram ends the program of a function. One that does not run, and a
// member that has none, are no error.
func (l *Lab) stopProgram(ctx context.Context, m Member) error {
	if m.Program == nil {
		return nil
	}
	var err error
	if m.Program.PID != 0 {
		err = process{m.Program.PID, m.Program.Start}.stop(ctx, stopGrace)
	} else {
		// Whoever started it was killed before he had its number written down.
		err = stopWithArguments(ctx, m.Inode, "--name", m.Namespace)
	}
	if err != nil {
		return fmt.Errorf("stop the program of function %s: %w", m.Name, err)
	}
	return l.updateMember(m.Name, func(m *Member) { m.Program = nil })
}

// Running tells whether the program's process is there.
func (p *Program) Running() bool { return p != nil && (&Agent{PID: p.PID, Start: p.Start}).Running() }
