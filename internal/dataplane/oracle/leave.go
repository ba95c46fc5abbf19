package oracle

import (
	"encoding/binary"

	"github.com/waystamp/waystamp/internal/srv6"
)

// Departure is one packet that is about to go out by an edge interface, of a
// node without functions in its own kernel.
type Departure struct {
	Frame []byte // from the Ethernet header
	From  Origin
	// Index is what skb->tc_index says: verified by this node.
	Index  bool
	Socket bool // the packet has one
}

// Origin is where a packet that leaves has come from.
type Origin uint8

const (
	FromNode      Origin = iota // it has come in nowhere
	FromPlan                    // an interface that our programs are at
	FromElsewhere               // any other
)

// Leave is the second guard: Pass or Drop. It needs no plan, without which
// nothing is required.
func (n Node) Leave(d Departure) Result {
	p := &packet{node: n}
	if len(d.Frame) < srv6.EthernetLen || binary.BigEndian.Uint16(d.Frame[12:]) != srv6.EtherTypeIPv6 {
		return p.pass()
	}
	ip := ipv6(d.Frame[srv6.EthernetLen:])
	if len(ip) < srv6.IPv6Len {
		return p.drop(LeaveTruncated)
	}
	if ip.version() != 6 {
		return p.pass()
	}
	// Nobody but the programs at the plan's interfaces can be believed.
	verified := d.Index && d.From == FromPlan
	own := d.From == FromNode && (ip.nextHeader() != fragment || d.Socket)
	_, required := n.requires(ip)
	switch {
	case n.Block.Contains(ip.destination()):
		return p.drop(LeakSID)
	case ip.hasSRH():
		return p.drop(LeakSRH)
	case required && !verified && !own && !unsteered(ip.destination()):
		return p.drop(Unverified)
	}
	return p.pass()
}

// fragment is the next header of a fragment (RFC 8200 4.5).
const fragment = 44
