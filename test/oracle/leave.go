package oracle

import (
	"encoding/binary"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Departure is one packet that is about to go out by an edge interface, of a
// node without functions in its own kernel.
type Departure struct {
	Frame []byte // from the Ethernet header
	From  Origin
	// Index is what skb->tc_index says: verified by this node.
	Index  bool
	LetGo  bool        // or the first guard has let it go
	Guard  model.Guard // of the interface
	Socket bool        // the packet has one
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
	if len(d.Frame) < srv6.EthernetLen {
		return p.pass()
	}
	b := d.Frame[srv6.EthernetLen:]
	if hasTag(d.Frame) {
		return p.drop(VLANTags)
	}
	etherType := binary.BigEndian.Uint16(d.Frame[12:])
	if etherType != srv6.EtherTypeIPv6 && etherType != srv6.EtherTypeIPv4 {
		return p.pass()
	}
	v4 := etherType == srv6.EtherTypeIPv4
	in, ok := headerOf(b, v4)
	if !ok {
		return p.drop(LeaveTruncated)
	}
	if !in.whole() {
		return p.pass()
	}
	// Nobody but the programs at the plan's interfaces can be believed.
	verified := d.Index && d.From == FromPlan
	own := d.From == FromNode && (!isFragment(b, v4) || d.Socket)
	otherwise := model.GuardEnforce
	letGo := d.LetGo && d.From == FromPlan
	if letGo {
		otherwise = model.GuardOff
	}
	does := n.guard(in, d.Guard, otherwise)
	switch {
	case !v4 && n.Block.Contains(in.destination()):
		return p.drop(LeakSID)
	case !v4 && ipv6(b).hasSRH():
		return p.drop(LeakSRH)
	case in.destination().Is4In6(), in.source().Is4In6():
		return p.drop(MappedAddress)
	case verified || own || neverForwarded(in.destination()):
	case does == model.GuardEnforce:
		return p.drop(Unverified)
	case does == model.GuardAudit && !letGo:
		p.result.Reported = append(p.result.Reported, Unverified)
	}
	return p.pass()
}

func isFragment(b []byte, v4 bool) bool {
	if v4 {
		const moreFragments, offset = 0x2000, 0x1fff
		return binary.BigEndian.Uint16(b[6:])&(moreFragments|offset) != 0
	}
	// A Fragment header may stand behind these.
	return mayHideSRH(ipv6(b).nextHeader())
}
