package model

import "net/netip"

// Lab is the network around a domain that `waystamp lab` builds on one machine, in place of an
// operator's own network. The domain's nodes become network namespaces too.
type Lab struct {
	MTU       int // of links that name none, in bytes of an IP packet
	Hosts     []LabHost
	Routers   []LabRouter
	Links     []LabLink
	Functions []LabFunction // every function of kind unaware that is behind interfaces has one
	Routing   LabRouting
	Core      LabCore
}

// LabHost is an end system behind an edge interface of a node. In Prefix the
// node has the address ::1 and the host ::2, in Prefix4 the first address and
// the second. The veth ends are NODE-HOST, as in
// the node's interfaces, and HOST-NODE.
type LabHost struct {
	Name   string
	Node   string
	Prefix netip.Prefix // /64
	// Prefix4 is of IPv4, a /8 to a /30; zero: the host has no IPv4.
	Prefix4 netip.Prefix
	MTU     int // of its link; 0: 1500
}

// LabRouter is a Linux router that is not a node of the domain: it forwards,
// and runs the kernel's own SRv6 End (seg6local) on its SIDs.
type LabRouter struct {
	Name    string
	Address netip.Addr
	SIDs    []netip.Addr // upper 64 bits count; routed to this router as /64
}

// LabLink is a veth pair between two nodes or routers A and B; its ends are
// named A-B and B-A.
type LabLink struct {
	A, B string
	MTU  int // 0: the lab's
}

// LabFunction is the implementation of a function of kind unaware. A function behind interfaces
// gets a namespace of its name, with one veth pair to its node for To and one for From, or one
// for both: both ends of a pair have the interface's name. Via is an address of the function's
// end of To. A local function is a ruleset in its node's own namespace.
type LabFunction struct {
	Name    string // of the function
	Kind    LabKind
	Ruleset string // of kind nftables, as nft -f reads it
	MTU     int    // of its links; 0: the lab's
}

// LabKind is what a lab's function does with packets: it selects the program of the function.
type LabKind uint8

const (
	LabForward  LabKind = iota // the kernel routes them from To to From
	LabNftables                // the same, behind a ruleset
	LabRaw                     // a program reads frames from To and writes them to From
)

var labKindNames = []string{"forward", "nftables", "raw"}

func (k LabKind) String() string { return enumString("LabKind", labKindNames, int(k)) }

// MarshalText implements encoding.TextMarshaler.
func (k LabKind) MarshalText() ([]byte, error) {
	return enumMarshal("kind of function in a lab", labKindNames, int(k))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (k *LabKind) UnmarshalText(b []byte) error {
	return enumUnmarshal(k, "kind of function in a lab", labKindNames, b)
}

// LabCore is the protocol of links between nodes and routers.
type LabCore uint8

const (
	LabIPv6 LabCore = iota
	// LabIPv4: no IPv6 at all, and routes to the addresses of labels alone.
	LabIPv4
)

var labCoreNames = []string{"ipv6", "ipv4"}

func (c LabCore) String() string { return enumString("LabCore", labCoreNames, int(c)) }

// MarshalText implements encoding.TextMarshaler.
func (c LabCore) MarshalText() ([]byte, error) {
	return enumMarshal("core of a lab", labCoreNames, int(c))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (c *LabCore) UnmarshalText(b []byte) error {
	return enumUnmarshal(c, "core of a lab", labCoreNames, b)
}

// LabRouting is where the routes of a lab's nodes and routers come from.
type LabRouting uint8

const (
	LabStatic LabRouting = iota // the lab computes them
	LabFRR                      // zebra and bgpd of FRR, in each namespace
)

var labRoutingNames = []string{"static", "frr"}

func (r LabRouting) String() string { return enumString("LabRouting", labRoutingNames, int(r)) }

// MarshalText implements encoding.TextMarshaler.
func (r LabRouting) MarshalText() ([]byte, error) {
	return enumMarshal("routing of a lab", labRoutingNames, int(r))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *LabRouting) UnmarshalText(b []byte) error {
	return enumUnmarshal(r, "routing of a lab", labRoutingNames, b)
}
