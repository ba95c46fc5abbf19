// Package plan compiles a domain into what each node must hold. It is pure: the
// same domain, secrets and epochs give the same plan. A node's plan holds no
// other node's share.
package plan

import (
	"net/netip"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
)

// Node is the whole of what one node must hold.
type Node struct {
	Name       string
	Block      netip.Prefix
	Address    netip.Addr
	Locator    netip.Prefix
	Interfaces []model.Interface
	Headends   []Headend
	Endpoints  []Endpoint
	Egresses   []Egress
}

// PathID names one path: one direction of one chain.
type PathID struct {
	Path      uint32 // on the wire, never 0
	Epoch     uint8
	Chain     string
	Direction model.Direction
	Scheme    model.Scheme
}

// Headend is a node's part in a path that starts at it.
type Headend struct {
	PathID
	Match    model.Match
	Segments []netip.Addr // in the order of the visit; the last is the egress SID
	Lane     uint16       // of CPU 0
	Lanes    uint16       // CPUs that have one, from Lane on
	MTU      int          // of inner packets; 0: not known
	Share    pot.Share    // Position 0
}

// Endpoint is one visit of a path to a function on the node.
type Endpoint struct {
	PathID
	SID      netip.Addr
	Function string
	Share    pot.Share
}

// Egress is a node's part in a path that ends at it.
type Egress struct {
	PathID
	SID         netip.Addr
	Match       model.Match
	Segments    []netip.Addr // the only list that verifies, in the order of the visit
	OnViolation model.OnViolation
	Share       pot.Share // its Polynomial counts for pot and opot
	Verifier    pot.Verifier
}

// Path is a path as the controller knows it, with the secrets of all hops.
type Path struct {
	PathID
	Match    model.Match
	Hops     []Hop // position 0 is the (first) headend, the last is the egress
	Shares   []pot.Share
	Verifier pot.Verifier
	MTU      int // of inner packets; 0: not known
}

// Hop is one position of a path.
type Hop struct {
	Node     string
	Function string     // "" for headend and egress
	SID      netip.Addr // zero for the headend
}
