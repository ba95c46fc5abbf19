package dataplane

import (
	"fmt"
	"net/netip"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// encodeRules puts the ordered rules of headends and of egresses into one list,
// by priority. Which of them a packet meets is a matter of who asks.
func encodeRules(steer, require []plan.Rule) (map[uint32]ruleset, error) {
	var all []plan.Rule
	var sides []bool
	ordered := plan.Ordered(steer)
	for _, r := range plan.Ordered(require) {
		for len(ordered) > 0 && ordered[0].Match.Priority <= r.Match.Priority {
			all, sides, ordered = append(all, ordered[0]), append(sides, true), ordered[1:]
		}
		all, sides = append(all, r), append(sides, false)
	}
	for _, r := range ordered {
		all, sides = append(all, r), append(sides, true)
	}
	if len(all) == 0 {
		return map[uint32]ruleset{}, nil
	}
	if len(all) > abi.RulesMax {
		return nil, fmt.Errorf("the plan has %d rules with a priority, more than the %d that a node holds", len(all), abi.RulesMax)
	}
	set := ruleset{Count: uint32(len(all))}
	for i, r := range all {
		x := &set.Rule[i]
		m := r.Match
		dst, src := m.Whole()
		x.Dst, x.DstMask = encodeMask(dst)
		x.Src, x.SrcMask = encodeMask(src)
		if m.Is4() {
			x.IsIp4 = 1
		}
		x.Protocol, x.Dscp = uint8(m.Protocol), abi.DscpAny
		if v, ok := m.DSCP.Value(); ok {
			x.Dscp = v
		}
		x.Mark, x.MarkMask = m.Mark.Value, m.Mark.Mask
		x.Sport, x.Dport = encodePorts(m.SourcePort), encodePorts(m.DestinationPort)
		if sides[i] {
			x.Steer = r.Target + 1
		} else {
			x.Require = r.Target
		}
	}
	return map[uint32]ruleset{0: set}, nil
}

func encodePorts(p model.Ports) [2]uint16 {
	if (p == model.Ports{}) {
		return [2]uint16{0, 65535}
	}
	return [2]uint16{p.First, p.Last}
}

// encodeMask is a prefix as an address and a mask.
func encodeMask(p netip.Prefix) (addr, mask [2]uint64) {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	var m [16]byte
	for i := range bits {
		m[i/8] |= 0x80 >> (i % 8)
	}
	return words(p.Masked().Addr()), words(netip.AddrFrom16(m))
}
