package model

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Bounds of a domain.
const (
	LanesMax      = 4096 // of one path, over all its headends
	CPUsDefault   = 64   // of a node that declares none
	WindowMin     = 64
	WindowMax     = 65536
	WindowDefault = 1024

	RotateMin = 10 * time.Second // each rotation is an epoch of each path, of which there are 256
	RotateMax = 365 * 24 * time.Hour
	// WindowHead is the overhead of a replay window beside its words, and WindowSlab the unit of
	// memory for windows on a node, in bytes.
	WindowHead = 64
	WindowSlab = 1 << 20
	// WindowMemoryMax bounds the replay windows of one node, in bytes.
	WindowMemoryMax = 1 << 30
	MTUMin          = 1280 // RFC 8200 section 5: every IPv6 link must carry this
	MTUMax          = 65535
	// MSSMin is the MSS of TCP over IPv6 with the least MTU: no chain needs less.
	MSSMin = MTUMin - 60
	MSSMax = MTUMax - 40
)

// MSS is the size of a TCP segment in a packet of mtu bytes, without IP and TCP headers without
// options (RFC 9293 section 3.7.1).
func MSS(mtu int, ipv4 bool) int {
	if ipv4 {
		return mtu - 20 - 20
	}
	return mtu - 40 - 20
}

// Clamp limits the MSS in the SYNs of a chain.
type Clamp struct {
	On   bool // one that is larger is lowered
	Most int  // in bytes; 0: to the size that fits the chain
}

// MSS is the highest MSS in SYNs of a path whose packets may have mtu bytes; mtu is 0 if it is
// not known. 0: SYNs stay unchanged.
func (c Clamp) MSS(mtu int, ipv4 bool) (int, error) {
	switch fits := MSS(mtu, ipv4); {
	case !c.On:
		return 0, nil
	case mtu == 0 && c.Most == 0:
		return 0, errors.New("the MTU is not known: no core interface on the way declares one; declare it, or give a number of bytes")
	case c.Most == 0:
		return fits, nil
	case mtu != 0 && c.Most > fits:
		return 0, fmt.Errorf("%d is more than fits: packets of %d bytes leave %d to TCP; give no more than that, or true", c.Most, mtu, fits)
	}
	return c.Most, nil
}

func (e Encapsulation) String() string {
	if e.Type == EncapsulationSRMPLS {
		return "labels"
	}
	if e.Reduced {
		return e.SIDs.String() + " SIDs, reduced"
	}
	return e.SIDs.String() + " SIDs"
}

// CheckWindow holds the rule for the size of a replay window.
func CheckWindow(w int) error {
	if w < WindowMin || w > WindowMax || w&(w-1) != 0 {
		return fmt.Errorf("is not a power of two from %d to %d", WindowMin, WindowMax)
	}
	return nil
}

// WindowMemory is the memory of a path's replay window at its egress in each epoch, in bytes:
// four numbers in a word.
func WindowMemory(lanes, window int) int { return WindowHead + lanes*window/4*8 }

// Node finds a node by name.
func (d Domain) Node(name string) (Node, bool) {
	return find(d.Nodes, func(n Node) bool { return n.Name == name })
}

// Function finds a function by name.
func (d Domain) Function(name string) (Function, bool) {
	return find(d.Functions, func(f Function) bool { return f.Name == name })
}

// Has reports whether the node has an interface of the role.
func (n Node) Has(role Role) bool {
	return slices.ContainsFunc(n.Interfaces, func(i Interface) bool { return i.Role == role })
}

// Segments is how many SIDs the chain visits: its functions, waypoints and the egress.
func (c Chain) Segments() int { return len(c.Functions) + len(c.Waypoints) + 1 }

// WaypointsBefore are the SIDs that are visited on the way to Functions[i], or to the
// egress for i = len(Functions), in the order of the visit.
func (c Chain) WaypointsBefore(i int) []netip.Addr {
	var sids []netip.Addr
	for _, w := range c.Waypoints {
		if w.Before == i {
			sids = append(sids, w.SID)
		}
	}
	return sids
}

// ArgumentOf is the argument of the visit to Functions[i] in the forward direction; 0:
// none.
func (c Chain) ArgumentOf(i int) uint32 {
	a, _ := find(c.Arguments, func(a Argument) bool { return a.Of == i })
	return a.Forward
}

// Directions lists the ways through the chain that have a path.
func (c Chain) Directions() []Direction {
	if c.Both {
		return []Direction{Forward, Reverse}
	}
	return []Direction{Forward}
}

// Directed is the chain as one of its directions sees it: the reverse of a
// chain starts at its egress, passes the same functions and waypoints the other way round, with the arguments
// and parameters of that direction, and ends at its ingress. With Return it passes those functions. Reverse is defined for
// one ingress only.
func (c Chain) Directed(d Direction) Chain {
	if d == Forward {
		return c
	}
	c.Ingress, c.Egress = []string{c.Egress}, c.Ingress[0]
	c.Parameters = slices.Clone(c.Parameters)
	for i, p := range c.Parameters {
		c.Parameters[i].Forward, c.Parameters[i].Reverse = p.Reverse, p.Forward
	}
	if c.Return != nil {
		c.Functions, c.Return = slices.Clone(c.Return), nil
		c.Arguments, c.Waypoints = nil, nil // it has none: CheckReturn
		c.Match = c.Match.Reverse()
		return c
	}
	c.Functions = slices.Clone(c.Functions)
	slices.Reverse(c.Functions)
	c.Arguments = slices.Clone(c.Arguments)
	for i, a := range c.Arguments {
		c.Arguments[i] = Argument{Of: len(c.Functions) - 1 - a.Of, Forward: a.Reverse, Reverse: a.Forward}
	}
	c.Waypoints = slices.Clone(c.Waypoints)
	slices.Reverse(c.Waypoints)
	for i := range c.Waypoints {
		c.Waypoints[i].Before = len(c.Functions) - c.Waypoints[i].Before
	}
	c.Match = c.Match.Reverse()
	return c
}

// AllFunctions are the functions of both directions. One may occur more than once.
func (c Chain) AllFunctions() []string { return slices.Concat(c.Functions, c.Return) }

func find[T any](list []T, is func(T) bool) (T, bool) {
	if i := slices.IndexFunc(list, is); i >= 0 {
		return list[i], true
	}
	var none T
	return none, false
}

// WindowSlabs is the number of slabs for replay windows of so many bytes.
func WindowSlabs(bytes int) int { return (bytes + WindowSlab - 1) / WindowSlab * WindowSlab }

// Equal reports whether two chains are the same in all. An empty list is the same as none, but for Return.
func (c Chain) Equal(o Chain) bool {
	return c.Name == o.Name && equalList(c.Ingress, o.Ingress) && equalList(c.Functions, o.Functions) && (c.Return == nil) == (o.Return == nil) && equalList(c.Return, o.Return) &&
		equalList(c.Arguments, o.Arguments) && equalList(c.Parameters, o.Parameters) && equalList(c.Waypoints, o.Waypoints) && c.Egress == o.Egress && c.Match == o.Match && c.OwnTraffic == o.OwnTraffic && c.Both == o.Both &&
		c.Encapsulation == o.Encapsulation && c.Clamp == o.Clamp && c.Proof == o.Proof && c.Guard == o.Guard &&
		(c.Onward == o.Onward || c.Onward != nil && o.Onward != nil && *c.Onward == *o.Onward) && c.Seal == o.Seal
}

// equalList does not look at lists of the same memory.
func equalList[T comparable](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}
