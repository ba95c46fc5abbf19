// Package plan compiles a domain into the plans of its nodes: SIDs, segment lists, lanes, MTUs
// and secrets. It is pure: the same domain, keyring and random bytes give the same plan. A
// node's plan has no other node's share. The package also has the two file formats for plans,
// which are the only places that write keys, and compiles matches into the tables of the data
// path. It does no I/O and is independent of eBPF. The commands, internal/lab, internal/agent,
// internal/dataplane and internal/explain call it.
package plan

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Node is the complete plan of one node.
type Node struct {
	Name string
	// Revision orders the plans of a controller: a later plan has a higher revision. 0: the plan
	// is not from a controller.
	Revision   uint64
	Block      netip.Prefix
	Address    netip.Addr
	Locator    netip.Prefix
	Advertise  model.Advertise
	MPLS       *MPLS // nil: the domain has no labels
	Interfaces []model.Interface
	Headends   []Headend
	Endpoints  []Endpoint
	Egresses   []Egress
	Proxies    []Proxy // of the node's functions of the kinds unaware and netfilter
}

// Proxy is a function of kind unaware, netfilter or stream; Endpoints name it by Function.
type Proxy struct {
	Function string
	model.Proxy
	// Matches are the matches of the chains through a local function: a matching packet that
	// leaves the node without an outer header has lost it.
	Matches []model.Match

	Netfilter *Netfilter // for kind netfilter, with Stream if it is intrusive; else nil
	Stream    *Stream    // for kind stream; else nil
	Gateway   *Gateway   // for model.GatewayName; else nil
}

// Stream is the agent's configuration for a function of kind stream.
type Stream struct {
	model.Stream
	MTU int // of packets that its namespace sends, so that they fit all parts that begin at it
	// Intrusive: the function is an end of its chains' seals. It receives and sends only sealed
	// data.
	Intrusive bool
}

// Netfilter is the agent's configuration for a function of kind netfilter.
type Netfilter struct {
	model.Netfilter
	// Groups are the arguments whose flows are tracked together if the function has zones: the
	// arguments of a chain's two directions.
	Groups [][]uint32
}

// PathID names one path: one direction of one chain.
type PathID struct {
	Path      uint32 // on the wire, never 0
	Epoch     uint8
	Chain     string
	Direction model.Direction
	// From is the function at which the path starts, on the node that is its headend: packets
	// that the function makes, or that a function of kind stream sends, take the chain from
	// there on. "": the path starts at the chain's ingress.
	From string
	// To is the function of kind stream that the path ends at. From and To of kind
	// stream: it is a part of its chain. "": the path ends at the chain's egress.
	// Both may be model.GatewayName, which is handled as a function of kind stream.
	To     string
	Scheme model.Scheme
	// Encapsulation is the form of Segments: the nodes of the path must have the same one, like
	// the scheme.
	Encapsulation model.Encapsulation
}

// Headend is a node's part in a path that starts at it.
type Headend struct {
	PathID
	Match    model.Match
	Own      bool         // also for packets that the node originates
	Segments []netip.Addr // the whole list in the order of the visit: SIDs, or containers of them
	// NodeLabels are the labels of the nodes of Segments, for a path over labels; else nil.
	NodeLabels []uint32
	Lane       uint16    // of CPU 0
	Lanes      uint16    // CPUs that have one, from Lane on
	MTU        int       // of inner packets; 0: not known
	MSS        int       // highest MSS in SYNs; 0: SYNs stay unchanged
	Share      pot.Share // Position 0

	Seal    *Seal        // of a sealed part between two ends of the domain, for the end that opens it; else nil
	Origins []SealOrigin // of a path from its chain's last intrusive function, which dials the origin
}

// Endpoint is one visit of a path to a function on the node.
type Endpoint struct {
	PathID
	SID       netip.Addr
	Behaviour model.Behaviour
	Argument  uint32 // for the function; 0: none
	Function  string
	Sources   []netip.Addr // of outer headers: the path's headends
	Share     pot.Share
}

// Egress is a node's part in a path that ends at it.
type Egress struct {
	PathID
	SID         netip.Addr
	Sources     []netip.Addr // of outer headers: the path's headends
	Match       model.Match
	Segments    []netip.Addr // the only list that verifies, whole, as a Headend has it
	OnViolation model.OnViolation
	Guard       model.Guard
	// Of is the path for which the guard accepts the proof: if several paths of one direction of
	// a chain end at the node, the first of them, which is a whole path or part. 0: the path
	// itself.
	Of       uint32
	Through  *Through  // of a path to a function of kind stream; else nil
	Lanes    uint16    // of the path, over all its headends
	Window   int       // numbers per lane in its replay window
	Share    pot.Share // its Polynomial counts for pot and opot
	Verifier pot.Verifier
	Seal     *Seal // of a sealed part to an intrusive function; else nil
}

// Through has the paths by which connections continue behind the function of kind stream at
// which the part ends.
type Through struct {
	Part   uint32 // that the path is, or belongs to
	Onward uint32 // the next part in the same direction
	Back   uint32 // path of answers, from the function on
	Other  uint32 // the part that ends at the function in the other direction
	Opens  bool   // connections are opened in this direction: the chain's forward one
}

// Domain is a compiled domain.
type Domain struct {
	Block netip.Prefix
	Paths []Path // in the order of the chains, the forward path first; then those from functions on
	Nodes []Node // in the order of the domain
}

// Path is a path with the secrets of all hops, as the controller has it.
type Path struct {
	PathID
	Match       model.Match
	OwnTraffic  bool // of its headends' own packets, too
	OnViolation model.OnViolation
	Guard       model.Guard
	Window      int       // of the egress, in numbers of each lane
	Ingress     []Ingress // its headends; all have the share of position 0
	Hops        []Hop     // position 0 is the (first) headend, the last is the egress
	Shares      []pot.Share
	Verifier    pot.Verifier
	MTU         int       // of inner packets; 0: not known
	MSS         int       // highest MSS in SYNs; 0: SYNs stay unchanged
	Seal        *PathSeal // of a part that is sealed between two ends of the domain; else nil
}

// Ingress is one headend of a path.
type Ingress struct {
	Node    string
	Address netip.Addr // source of the outer headers it makes
	Lane    uint16     // of its CPU 0
	Lanes   uint16
}

// SIDs are the SIDs of the path in order, without arguments and parameters, with those of waypoints; the last
// one is the egress's.
func (p Path) SIDs() []netip.Addr {
	sids := make([]netip.Addr, 0, len(p.Hops))
	for _, h := range p.Hops[1:] {
		sids = append(append(sids, h.Waypoints...), h.SID)
	}
	return sids
}

// Sources are the addresses that the path's outer headers come from.
func (p Path) Sources() []netip.Addr {
	sources := make([]netip.Addr, 0, len(p.Ingress))
	for _, in := range p.Ingress {
		sources = append(sources, in.Address)
	}
	return sources
}

// Segments is the path's segment list, whole, in the order of the visit: its
// SIDs with their arguments and parameters, or the containers that they are compressed to.
func (p Path) Segments() []netip.Addr {
	if p.Encapsulation.SIDs == model.SIDsCompressed {
		return srv6.Compress(p.SIDs()) // which have no room for arguments
	}
	var list []netip.Addr
	for _, h := range p.Hops[1:] {
		list = append(append(list, h.Waypoints...), withArgument(h.SID, h.Argument))
	}
	if last := &list[len(list)-1]; !p.OverLabels() {
		*last = withParameters(*last, p.Hops[len(p.Hops)-1].Parameters)
	}
	return list
}

// withParameters puts the parameters of a visit into the lowest 48 bits of a SID.
func withParameters(sid netip.Addr, parameters uint64) netip.Addr {
	if parameters == 0 {
		return sid
	}
	b := sid.As16()
	binary.BigEndian.PutUint64(b[8:], parameters)
	return netip.AddrFrom16(b)
}

// withArgument puts an argument into the lowest 32 bits of a SID (RFC 8986 3.1).
func withArgument(sid netip.Addr, argument uint32) netip.Addr {
	if argument == 0 {
		return sid
	}
	b := sid.As16()
	binary.BigEndian.PutUint32(b[12:], argument)
	return netip.AddrFrom16(b)
}

// Carried is the segment list as it is in packets, in the order of the visit: a
// reduced one lacks its first entry.
func (p Path) Carried() []netip.Addr {
	return srv6.Carried(p.Segments(), p.Encapsulation)
}

// OuterLen is the length in bytes of the outer headers of the path's packets.
func (p Path) OuterLen() int { return OuterLen(p.Encapsulation, p.Segments()) }

// Lanes is how many the path has, over all its headends.
func (p Path) Lanes() uint16 {
	if len(p.Ingress) == 0 {
		return 0
	}
	last := p.Ingress[len(p.Ingress)-1]
	return last.Lane + last.Lanes
}

// String names the path for people.
func (p PathID) String() string { return "chain " + p.Chain + ", " + p.Way() }

// Way is the path's direction, and where it starts if that is not at the ingress.
func (p PathID) Way() string { return p.Direction.String() + FromTo(p.From, p.To) }

// FromTo is where a path starts and ends, for people: nothing if both are the chain's own
// ends.
func FromTo(from, to string) string {
	if to == "" {
		return FromOn(from)
	}
	if from == "" {
		return ", up to " + to
	}
	return ", from " + from + " to " + to
}

// FromOn is where a path starts, for people: nothing if it does at the chain's ingress.
func FromOn(function string) string {
	if function == "" {
		return ""
	}
	return ", from " + function + " on"
}

// Requires is the path that guards name for packets with the egress's proofs.
func (e Egress) Requires() uint32 {
	if e.Of != 0 {
		return e.Of
	}
	return e.Path
}

// Header is the header of the proof TLV in the path's packets.
func (p PathID) Header() pot.Header {
	return pot.Header{Scheme: p.Scheme, Epoch: p.Epoch, Path: p.Path}
}

// Hop is one position of a path.
type Hop struct {
	Node      string
	Function  string       // "" for headend and egress
	Waypoints []netip.Addr // SIDs of others, visited on the way to this hop; not proven
	SID       netip.Addr   // zero for the headend; without the argument
	Argument  uint32       // for a function of kind netfilter; 0: none
	// Parameters are those of the visit to the function of kind stream that the path ends at: only its last hop has them; 0: none.
	Parameters uint64
	// For a path over labels; else, and for the headend, 0.
	NodeLabel, ServiceLabel uint32
}

// equal reports whether hops have the same place and task. Labels are not compared: they may
// change.
func (h Hop) equal(o Hop) bool {
	return h.Node == o.Node && h.Function == o.Function && h.SID == o.SID && h.Argument == o.Argument && h.Parameters == o.Parameters &&
		slices.Equal(h.Waypoints, o.Waypoints)
}

// PathIDs are the paths and epochs that a node has a part in; some come several times.
func (n Node) PathIDs() iter.Seq[PathID] {
	return func(yield func(PathID) bool) {
		for _, h := range n.Headends {
			if !yield(h.PathID) {
				return
			}
		}
		for _, e := range n.Endpoints {
			if !yield(e.PathID) {
				return
			}
		}
		for _, e := range n.Egresses {
			if !yield(e.PathID) {
				return
			}
		}
	}
}

// Unenforced are the guards of a node that do not refuse packets, a sentence each.
func (n Node) Unenforced() []string {
	does := map[model.Guard]string{model.GuardOff: "forwarded, not refused", model.GuardAudit: "counted and forwarded, not refused"}
	var out []string
	seen := map[uint32]bool{} // a path may have several epochs
	for _, e := range n.Egresses {
		if !e.Guard.Enforces() && !seen[e.Path] {
			out = append(out, fmt.Sprintf("guard: %s of chain %s, %s: its packets without a proof are %s", e.Guard, e.Chain, e.Direction, does[e.Guard]))
		}
		seen[e.Path] = true
	}
	for _, i := range n.Interfaces {
		if !i.Guard.Enforces() {
			out = append(out, fmt.Sprintf("guard: %s of interface %s: packets without a proof are %s there, unless their chain has guard: enforce", i.Guard, i.Name, does[i.Guard]))
		}
	}
	return out
}
