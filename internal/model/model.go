// Package model has the types of a domain, its nodes, functions and chains, as checked intent;
// all other packages use them. It does no I/O, and is independent of file formats and the
// kernel. A value that internal/manifest returned is valid as a whole: names are unique,
// references resolve, prefixes do not overlap.
package model

import (
	"fmt"
	"net/netip"
	"time"
)

// SegmentsMax is the length of the longest segment list that a node takes.
const SegmentsMax = 16

// Scheme is how the hops of a path prove that a packet visited them. The
// numbers are those on the wire.
type Scheme uint8

const (
	SchemePoT       Scheme = 0 // shares without masks: visits, not their order
	SchemeOPoT      Scheme = 1 // draft-ietf-sfc-proof-of-transit-08 section 3.5
	SchemeKeyed     Scheme = 2 // chained SipHash tags, one key per hop
	SchemeKeyedFlow Scheme = 3 // keyed, and bound to the inner flow
)

// Keyed reports whether stamps are tags made with keys.
func (s Scheme) Keyed() bool { return s == SchemeKeyed || s == SchemeKeyedFlow }

var schemeNames = []string{"pot", "opot", "keyed", "keyed-flow"}

func (s Scheme) String() string { return enumString("Scheme", schemeNames, int(s)) }

// MarshalText implements encoding.TextMarshaler.
func (s Scheme) MarshalText() ([]byte, error) { return enumMarshal("scheme", schemeNames, int(s)) }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Scheme) UnmarshalText(b []byte) error { return enumUnmarshal(s, "scheme", schemeNames, b) }

// Kind is how a function takes part in a chain.
type Kind uint8

const (
	// KindForward is a node that a packet must pass: End with a stamp.
	KindForward Kind = iota
	// KindUnaware is a function without segment routing: the node's proxy gives it inner
	// packets, and puts their headers back.
	KindUnaware
	// KindNetfilter is the kernel's own packet filter, on inner packets: the packet mark
	// identifies the visit for its rules.
	KindNetfilter
	// KindStream gets the bytes of TCP connections: the node ends a connection, and
	// opens another one to its server in the client's name. A chain is cut there into
	// parts, each a path of its own.
	KindStream
)

var kindNames = []string{"forward", "unaware", "netfilter", "stream"}

func (k Kind) String() string { return enumString("Kind", kindNames, int(k)) }

// MarshalText implements encoding.TextMarshaler.
func (k Kind) MarshalText() ([]byte, error) { return enumMarshal("kind", kindNames, int(k)) }

// UnmarshalText implements encoding.TextUnmarshaler.
func (k *Kind) UnmarshalText(b []byte) error { return enumUnmarshal(k, "kind", kindNames, b) }

// Behaviour is a node's processing of packets that are addressed to one of a function's SIDs. An
// egress always has End.DT46.
type Behaviour uint8

const (
	// BehaviourEnd is RFC 8986 4.1, with the stamp.
	BehaviourEnd Behaviour = iota
	// BehaviourEndAD is the dynamic proxy of draft-ietf-spring-sr-service-programming 6.3, with
	// the stamp: a detour by a function without segment routing.
	BehaviourEndAD
	// BehaviourEndAN is the SR-aware native function of the same draft, section 5: the
	// argument of the SID reaches the function. The data path detours as for End.AD.
	BehaviourEndAN
)

var behaviourNames = []string{"End", "End.AD", "End.AN"}

func (b Behaviour) String() string { return enumString("Behaviour", behaviourNames, int(b)) }

// MarshalText implements encoding.TextMarshaler.
func (b Behaviour) MarshalText() ([]byte, error) {
	return enumMarshal("behaviour", behaviourNames, int(b))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (b *Behaviour) UnmarshalText(t []byte) error {
	return enumUnmarshal(b, "behaviour", behaviourNames, t)
}

// Behaviour is that of the SIDs of a function of this kind.
func (k Kind) Behaviour() Behaviour {
	switch k {
	case KindUnaware:
		return BehaviourEndAD
	case KindNetfilter:
		return BehaviourEndAN
	}
	return BehaviourEnd
}

// Proxied reports whether packets for the SID take a detour by a function, without their outer
// headers.
func (b Behaviour) Proxied() bool { return b == BehaviourEndAD || b == BehaviourEndAN }

// Arguments reports whether the lower bits of the SID are an argument for the function.
func (b Behaviour) Arguments() bool { return b == BehaviourEndAN }

// Role is the side of the domain's boundary that an interface is on.
type Role uint8

const (
	RoleEdge Role = iota // outside: nothing of segment routing comes in
	RoleCore             // inside
)

var roleNames = []string{"edge", "core"}

func (r Role) String() string { return enumString("Role", roleNames, int(r)) }

// MarshalText implements encoding.TextMarshaler.
func (r Role) MarshalText() ([]byte, error) { return enumMarshal("role", roleNames, int(r)) }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Role) UnmarshalText(b []byte) error { return enumUnmarshal(r, "role", roleNames, b) }

// Datapath selects the hooks of an interface. TC is always attached.
type Datapath uint8

const (
	DatapathAuto Datapath = iota // native XDP on devices that gain by it
	DatapathXDP                  // XDP and TC, or an error
	DatapathTC                   // TC alone
)

var datapathNames = []string{"auto", "xdp", "tc"}

func (d Datapath) String() string { return enumString("Datapath", datapathNames, int(d)) }

// MarshalText implements encoding.TextMarshaler.
func (d Datapath) MarshalText() ([]byte, error) {
	return enumMarshal("datapath", datapathNames, int(d))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Datapath) UnmarshalText(b []byte) error {
	return enumUnmarshal(d, "datapath", datapathNames, b)
}

// Unmatched is the action for edge traffic that no chain takes.
type Unmatched uint8

const (
	UnmatchedRoute Unmatched = iota // ordinary routing
	UnmatchedDrop
)

var unmatchedNames = []string{"route", "drop"}

func (u Unmatched) String() string { return enumString("Unmatched", unmatchedNames, int(u)) }

// MarshalText implements encoding.TextMarshaler.
func (u Unmatched) MarshalText() ([]byte, error) {
	return enumMarshal("unmatched", unmatchedNames, int(u))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (u *Unmatched) UnmarshalText(b []byte) error {
	return enumUnmarshal(u, "setting of unmatched", unmatchedNames, b)
}

// OnViolation is the action of an egress for a packet with a refused proof.
type OnViolation uint8

const (
	OnViolationDrop OnViolation = iota
	OnViolationReport
)

var onViolationNames = []string{"drop", "report"}

func (o OnViolation) String() string { return enumString("OnViolation", onViolationNames, int(o)) }

// MarshalText implements encoding.TextMarshaler.
func (o OnViolation) MarshalText() ([]byte, error) {
	return enumMarshal("on-violation", onViolationNames, int(o))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *OnViolation) UnmarshalText(b []byte) error {
	return enumUnmarshal(o, "setting of on-violation", onViolationNames, b)
}

// Guard is the guard's action for a packet without the proof that a chain requires. Of the
// chain's and the interface's setting, the higher number counts.
type Guard uint8

const (
	GuardUnset   Guard = iota // not set; if neither is set: enforce
	GuardOff                  // forwarded
	GuardAudit                // forwarded and counted
	GuardEnforce              // refused
)

var guardNames = []string{"unset", "off", "audit", "enforce"}

func (g Guard) String() string { return enumString("Guard", guardNames, int(g)) }

// Enforces reports whether packets are refused if the other setting is unset.
func (g Guard) Enforces() bool { return g == GuardUnset || g == GuardEnforce }

// MarshalText implements encoding.TextMarshaler.
func (g Guard) MarshalText() ([]byte, error) { return enumMarshal("guard", guardNames, int(g)) }

// UnmarshalText implements encoding.TextUnmarshaler. A file without the setting leaves it out.
func (g *Guard) UnmarshalText(b []byte) error {
	var said Guard
	if err := enumUnmarshal(&said, "setting of guard", guardNames[GuardOff:], b); err != nil {
		return err
	}
	*g = said + GuardOff
	return nil
}

// Direction is one of the two ways through a chain.
type Direction uint8

const (
	Forward Direction = iota
	Reverse
)

var directionNames = []string{"forward", "reverse"}

func (d Direction) String() string { return enumString("Direction", directionNames, int(d)) }

// MarshalText implements encoding.TextMarshaler.
func (d Direction) MarshalText() ([]byte, error) {
	return enumMarshal("direction", directionNames, int(d))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Direction) UnmarshalText(b []byte) error {
	return enumUnmarshal(d, "direction", directionNames, b)
}

// Domain is everything under one controller.
type Domain struct {
	Block     netip.Prefix // a /48 that all SIDs are cut from
	MPLS      *MPLS        // nil: no chain is carried by labels
	Nodes     []Node
	Functions []Function
	Chains    []Chain
	Clients   []Clients // of services
	Services  []Service
}

// Node is a Linux host in the domain.
type Node struct {
	Name       string
	Address    netip.Addr   // source of outer headers
	Locator    netip.Prefix // the node's share of the block, /49 to /64
	CPUs       int          // lanes that the node gets as a headend
	Advertise  Advertise
	MPLS       *NodeMPLS // nil: no packet with labels is sent to it
	Interfaces []Interface
}

// Interface is a network device of a node that waystamp attaches to.
type Interface struct {
	Name      string
	Role      Role
	Datapath  Datapath
	Unmatched Unmatched // of an edge interface
	Guard     Guard     // of an edge interface
	MTU       int       // bytes of an IP packet; 0: not declared
}

// Function is one instance of a service function.
type Function struct {
	Name  string
	Node  string
	Kind  Kind
	Proxy Proxy // of the kinds unaware, netfilter and stream
	// Intrusive: it reads and changes payload, and is an end of its chains' seals.
	Intrusive bool

	Netfilter Netfilter // of kind netfilter
	Stream    Stream    // of kind stream
}

// Proxy is the attachment of a function without segment routing, and the method by which its
// packets are recognised when they come back.
type Proxy struct {
	Local     bool       // in the node's own kernel; otherwise behind To and From
	To        string     // interface that inner packets leave by
	From      string     // interface that they come back on; may be To
	Via       netip.Addr // next hop on To; zero: the function takes any frame, as a bridge does
	Recognise Recognise
	OnUnknown OnUnknown
	Segments  Segments
	Rewrites  bool          // the function changes addresses or ports
	Cache     int           // headers that are kept at once
	Lifetime  time.Duration // of a header
}

// Recognise is how a packet that comes back from a function is recognised.
type Recognise uint8

const (
	RecogniseContent  Recognise = iota // by bytes that functions keep
	RecogniseMetadata                  // by an index that stays with it in the kernel
)

var recogniseNames = []string{"content", "metadata"}

func (r Recognise) String() string { return enumString("Recognise", recogniseNames, int(r)) }

// MarshalText implements encoding.TextMarshaler.
func (r Recognise) MarshalText() ([]byte, error) {
	return enumMarshal("setting of recognise", recogniseNames, int(r))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Recognise) UnmarshalText(b []byte) error {
	return enumUnmarshal(r, "setting of recognise", recogniseNames, b)
}

// OnUnknown is the action for a packet from a function without a kept header.
type OnUnknown uint8

const (
	OnUnknownDrop      OnUnknown = iota
	OnUnknownPlain               // ordinary routing
	OnUnknownOriginate           // its chain, from the function on, if the function has made it
)

var onUnknownNames = []string{"drop", "plain", "originate"}

func (o OnUnknown) String() string { return enumString("OnUnknown", onUnknownNames, int(o)) }

// MarshalText implements encoding.TextMarshaler.
func (o OnUnknown) MarshalText() ([]byte, error) {
	return enumMarshal("setting of on-unknown", onUnknownNames, int(o))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *OnUnknown) UnmarshalText(b []byte) error {
	return enumUnmarshal(o, "setting of on-unknown", onUnknownNames, b)
}

// Segments is a proxy's treatment of super-packets.
type Segments uint8

const (
	SegmentsCut  Segments = iota // into frames, each with a header of its own
	SegmentsKeep                 // they stay whole on every link of the function
)

var segmentsNames = []string{"cut", "keep"}

func (s Segments) String() string { return enumString("Segments", segmentsNames, int(s)) }

// MarshalText implements encoding.TextMarshaler.
func (s Segments) MarshalText() ([]byte, error) {
	return enumMarshal("setting of segments", segmentsNames, int(s))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Segments) UnmarshalText(b []byte) error {
	return enumUnmarshal(s, "setting of segments", segmentsNames, b)
}

// SIDs is how a segment list writes the SIDs of a path.
type SIDs uint8

const (
	SIDsPlain      SIDs = iota // an entry each
	SIDsCompressed             // several to an entry: NEXT-C-SID (RFC 9800 section 4.1)
)

var sidsNames = []string{"plain", "compressed"}

func (s SIDs) String() string { return enumString("SIDs", sidsNames, int(s)) }

// MarshalText implements encoding.TextMarshaler.
func (s SIDs) MarshalText() ([]byte, error) { return enumMarshal("form of SIDs", sidsNames, int(s)) }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *SIDs) UnmarshalText(b []byte) error {
	return enumUnmarshal(s, "form of SIDs", sidsNames, b)
}

// Encapsulation is how the outer headers of a chain are written.
type Encapsulation struct {
	SIDs SIDs
	// Reduced is H.Encaps.Red (RFC 8986 section 5.2): the first entry of the
	// segment list is in the destination address alone.
	Reduced bool
	Type    EncapsulationType
}

// Chain is an ordered list of functions that matching traffic must take.
type Chain struct {
	Name          string
	Ingress       []string // nodes
	Functions     []string // one may occur more than once
	Return        []string // functions of the reverse, in its order; nil: Functions the other way round
	Arguments     []Argument
	Parameters    []Parameters // of functions of kind stream
	Waypoints     []Waypoint
	Egress        string // node
	Match         Match
	OwnTraffic    bool // it also takes packets that its headends originate
	Both          bool // also the reverse chain, from Egress to every Ingress
	Encapsulation Encapsulation
	Clamp         Clamp
	Proof         Proof
	Guard         Guard   // of its egress, for packets without a proof
	Onward        *Onward // of a chain that rules of services name; Match is its match then
	Seal          bool    // only its ends and its intrusive functions can read its payload
}

// Waypoint is a segment of a node that is not waystamp's, such as a router with an
// End SID. Packets of the chain are sent by it; nothing stamps or proves the visit.
type Waypoint struct {
	Before int // index of the next function; len(Functions): the egress
	SID    netip.Addr
}

// Argument is the argument of a chain's visit for a function of kind netfilter, in each
// direction; 0: none.
type Argument struct {
	Of               int // index of the function
	Forward, Reverse uint32
}

// Proof is how a chain is proven.
type Proof struct {
	Scheme      Scheme
	OnViolation OnViolation
	Window      int // numbers per lane that the egress remembers; 0: WindowDefault
	// RotateEvery is how often the controller gives the chain fresh secrets by itself; 0: when its own settings say.
	RotateEvery time.Duration
}

func enumString(typ string, names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("%s(%d)", typ, i)
}

func enumMarshal(what string, names []string, i int) ([]byte, error) {
	if i < len(names) {
		return []byte(names[i]), nil
	}
	return nil, fmt.Errorf("%s %d has no name", what, i)
}

func enumUnmarshal[T ~uint8](dst *T, what string, names []string, b []byte) error {
	for i, n := range names {
		if n == string(b) {
			*dst = T(i)
			return nil
		}
	}
	return fmt.Errorf("%q is not a %s; expect %s", b, what, expect(names))
}

func expect(names []string) string {
	s := names[0]
	for i, n := range names[1:] {
		if i == len(names)-2 {
			s += " or " + n
		} else {
			s += ", " + n
		}
	}
	return s
}
