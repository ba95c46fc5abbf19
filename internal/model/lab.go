package model

import "net/netip"

// Lab is the world around a domain that `waystamp lab` builds on one machine:
// what an operator's own network would give. The domain's nodes become network
// namespaces too.
type Lab struct {
	MTU     int // of links that name none, in bytes of an IP packet
	Hosts   []LabHost
	Routers []LabRouter
	Links   []LabLink
}

// LabHost is an end system behind an edge interface of a node. In Prefix the
// node has the address ::1 and the host ::2. The veth ends are NODE-HOST, as in
// the node's interfaces, and HOST-NODE.
type LabHost struct {
	Name   string
	Node   string
	Prefix netip.Prefix // /64
	MTU    int          // of its link; 0: 1500
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
