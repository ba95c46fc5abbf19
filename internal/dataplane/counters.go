package dataplane

import (
	"fmt"
	"net/netip"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/tables"
)

// Counts are the programs' counters since they were first loaded.
type Counts struct {
	Refusals  []RefusalCount  `json:"refusals"`  // by reason; those that occurred
	Paths     []PathCount     `json:"paths"`     // in the plan's order
	Functions []FunctionCount `json:"functions"` // that have a proxy, in the plan's order
	Errors    ErrorCount      `json:"errors"`
}

// ErrorCount counts the ICMP errors that refused packets were answered with.
// Each of those is counted as a refusal too.
type ErrorCount struct {
	TooBig       uint64 `json:"too_big"`
	TimeExceeded uint64 `json:"time_exceeded"`
	Parameter    uint64 `json:"parameter_problem"`
	Unreachable  uint64 `json:"unreachable"`
	Suppressed   uint64 `json:"suppressed"`   // not sent: more than the rate allows
	Unanswerable uint64 `json:"unanswerable"` // not sent: none may be sent, or there is no route
}

// RefusalCount counts the packets refused for one reason.
type RefusalCount struct {
	Reason   abi.Reason `json:"reason"`
	Text     string     `json:"text"`
	Dropped  uint64     `json:"dropped"`
	Reported uint64     `json:"reported"` // counted and let go on: on-violation: report, guard: audit
}

// Role is a node's part in a path.
type Role string

const (
	RoleHeadend  Role = "headend"
	RoleEndpoint Role = "endpoint"
	RoleEgress   Role = "egress"
)

// PathCount counts a node's packets of a path in one of its roles: stamped as headend or
// endpoint, verified as egress. All epochs together, and with the first of several SIDs those that were given up.
type PathCount struct {
	Role      Role            `json:"role"`
	Chain     string          `json:"chain"`
	Direction model.Direction `json:"direction"`
	From      string          `json:"from,omitempty"` // the function that the path starts at
	To        string          `json:"to,omitempty"`   // the function of kind stream that it ends at
	Path      uint32          `json:"path"`
	Function  string          `json:"function,omitempty"`
	SID       *netip.Addr     `json:"sid,omitempty"` // a headend has none
	Packets   uint64          `json:"packets"`       // super-packets count once
	Frames    uint64          `json:"frames"`        // frames on the link
	Bytes     uint64          `json:"bytes"`         // of the inner packets
}

// Counters reads all counters. They do not start again when the agent does.
func (d *Dataplane) Counters() (_ Counts, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := Counts{Refusals: []RefusalCount{}, Paths: []PathCount{}, Functions: []FunctionCount{}}
	if d.gen == nil {
		return out, nil
	}
	if err := d.gen.readRefusals(&out); err != nil {
		return Counts{}, err
	}
	if err := d.gen.readErrors(&out.Errors); err != nil {
		return Counts{}, err
	}
	if d.node == nil {
		return out, nil
	}
	if err := d.readPathsLocked(&out); err != nil {
		return Counts{}, err
	}
	out.Functions, err = d.readFunctionsLocked()
	return out, err
}

// Refusals reads the counters of refusals alone. Their number does not depend on the
// plan.
func (d *Dataplane) Refusals() ([]RefusalCount, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := Counts{Refusals: []RefusalCount{}}
	if d.gen == nil {
		return out.Refusals, nil
	}
	err := d.gen.readRefusals(&out)
	return out.Refusals, err
}

func (g *generation) readRefusals(out *Counts) error {
	m := g.maps[tables.MapRefusals]
	for i := range m.MaxEntries() {
		var each []abi.Refusal
		if err := m.Lookup(i, &each); err != nil {
			return fmt.Errorf("read entry %d of map %s: %w", i, tables.MapRefusals, err)
		}
		c := RefusalCount{Reason: abi.Reason(i), Text: abi.Reason(i).Text()}
		for _, r := range each {
			c.Dropped += r.Dropped
			c.Reported += r.Reported
		}
		if c.Dropped+c.Reported > 0 {
			out.Refusals = append(out.Refusals, c)
		}
	}
	return nil
}

func (g *generation) readErrors(out *ErrorCount) error {
	var each []abi.Errors
	if err := g.maps[tables.MapErrors].Lookup(uint32(0), &each); err != nil {
		return fmt.Errorf("read map %s: %w", tables.MapErrors, err)
	}
	for _, e := range each {
		out.TooBig += e.TooBig
		out.TimeExceeded += e.TimeExceeded
		out.Parameter += e.Parameter
		out.Unreachable += e.Unreachable
		out.Suppressed += e.Suppressed
		out.Unanswerable += e.Unanswerable
	}
	return nil
}

func (d *Dataplane) readPathsLocked(out *Counts) error {
	index, err := d.statsIndexes()
	if err != nil {
		return err
	}
	before, err := d.earlierNow()
	if err != nil {
		return err
	}
	counted := map[pathRole]bool{}
	seen := map[tables.StatsKey]bool{}
	add := func(k tables.StatsKey, c PathCount) error {
		i, ok := index[k]
		if !ok || seen[k] {
			return nil
		}
		seen[k] = true
		s, err := d.gen.readStats(i)
		if err != nil {
			return err
		}
		if r := (pathRole{c.Role, c.Path, c.Function}); !counted[r] {
			counted[r] = true
			s = addStats(s, before.of[r])
		}
		c.Packets, c.Frames, c.Bytes = s.Packets, s.Frames, s.Bytes
		out.Paths = append(out.Paths, c)
		return nil
	}
	for _, h := range d.node.Headends {
		if err := add(tables.StatsKey{Path: abi.BE32(h.Path)}, PathCount{
			Role: RoleHeadend, Chain: h.Chain, Direction: h.Direction, From: h.From, To: h.To, Path: h.Path,
		}); err != nil {
			return err
		}
	}
	for _, e := range d.node.Endpoints {
		if err := add(tables.StatsKey{Sid: tables.Upper(e.SID), Path: abi.BE32(e.Path)}, PathCount{
			Role: RoleEndpoint, Chain: e.Chain, Direction: e.Direction, From: e.From, To: e.To, Path: e.Path, Function: e.Function, SID: &e.SID,
		}); err != nil {
			return err
		}
	}
	for _, e := range d.node.Egresses {
		if err := add(tables.StatsKey{Sid: tables.Upper(e.SID), Path: abi.BE32(e.Path)}, PathCount{
			Role: RoleEgress, Chain: e.Chain, Direction: e.Direction, From: e.From, To: e.To, Path: e.Path, SID: &e.SID,
		}); err != nil {
			return err
		}
	}
	return nil
}

// InterfaceState describes waystamp's programs on an interface.
type InterfaceState struct {
	Name      string         `json:"name"`
	Role      model.Role     `json:"role"`
	Datapath  model.Datapath `json:"datapath"` // as the plan has it
	Unmatched string         `json:"unmatched,omitempty"`
	TC        bool           `json:"tc"`  // the program is attached there
	XDP       bool           `json:"xdp"` // the program is attached there
	// Out: a program is attached at TC egress: the second guard, and that of
	// functions in the node's own kernel.
	Out bool `json:"out,omitempty"`
	// Clsact: filters of clsact attach the programs at TC, since the kernel has no tcx.
	Clsact bool `json:"clsact,omitempty"`
	// Functions send here: the program at TC ingress is that of their proxies.
	Functions []string `json:"functions,omitempty"`
}

// Interfaces lists the programs on each interface: the plan's interfaces in its order, then the
// interfaces of functions.
func (d *Dataplane) Interfaces() ([]InterfaceState, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := []InterfaceState{}
	if d.node == nil {
		return out, nil
	}
	alive := map[linkKey]bool{}
	for k, a := range d.links {
		index, _, err := a.state()
		if err != nil {
			return nil, err
		}
		alive[k] = index != 0
	}
	for _, i := range d.node.Interfaces {
		s := InterfaceState{Name: i.Name, Role: i.Role, Datapath: i.Datapath, Clsact: d.clsact}
		if i.Role == model.RoleEdge {
			s.Unmatched = i.Unmatched.String()
		}
		for _, b := range d.topology.bindings {
			if b.Name == i.Name && !b.from && !b.cutter {
				s.TC = alive[linkKey{hookTC, b.device.Index}]
				s.Out = alive[linkKey{hookOut, b.device.Index}]
				s.XDP = alive[linkKey{hookXDP, b.device.Index}]
			}
		}
		out = append(out, s)
	}
	for _, p := range d.node.Proxies {
		if p.Local {
			continue
		}
		s := InterfaceState{Name: p.From, Role: model.RoleCore, Datapath: model.DatapathTC, Clsact: d.clsact, Functions: []string{p.Function}}
		for _, b := range d.topology.bindings {
			if b.Name == p.From && b.from {
				s.TC = alive[linkKey{hookFrom, b.device.Index}]
				s.XDP = alive[linkKey{hookFromXDP, b.device.Index}]
			}
		}
		out = append(out, s)
	}
	return out, nil
}
