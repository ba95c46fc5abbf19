package tables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// ruleBits are some of the rules, by their numbers.
type ruleBits = [abi.RuleWords]uint64

func setBit(b *ruleBits, i int) { b[i/64] |= 1 << (i % 64) }

// orderedRule is one of a node's rules in the order of their priorities.
type orderedRule struct {
	plan.Rule
	steers bool  // the target is a headend; else a path whose proof is required
	origin uint8 // of a headend: the function that the rule is of; 0: none
}

// orderRules puts the ordered rules of headends, of egresses and of functions that originate
// into one list, by priority. Each look-up has its own subset of them.
func orderRules(steer, require []plan.Rule, origins map[uint8][]plan.Rule) ([]orderedRule, error) {
	var all []orderedRule
	for _, r := range plan.Ordered(steer) {
		all = append(all, orderedRule{r, true, 0})
	}
	for _, r := range plan.Ordered(require) {
		all = append(all, orderedRule{r, false, 0})
	}
	for _, o := range slices.Sorted(maps.Keys(origins)) {
		for _, r := range plan.Ordered(origins[o]) {
			all = append(all, orderedRule{r, true, o})
		}
	}
	slices.SortStableFunc(all, func(a, b orderedRule) int { return int(a.Match.Priority) - int(b.Match.Priority) })
	if len(all) > abi.RulesMax {
		return nil, fmt.Errorf("the plan has %d rules with a priority, more than the %d that a node holds", len(all), abi.RulesMax)
	}
	return all, nil
}

// EncodeRules is the content of ws_rules. guards: see Contents.
func EncodeRules(steer, require []plan.Rule, guards map[uint32]uint32, origins map[uint8][]plan.Rule) (map[uint32]abi.Ruleset, error) {
	all, err := orderRules(steer, require, origins)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return map[uint32]abi.Ruleset{}, nil
	}
	s := new(abi.Ruleset)
	var dst, src []ruleSpan[[2]uint64]
	var sport, dport, proven []ruleSpan[uint32]
	for i, r := range all {
		m := r.Match
		to, from := m.Whole()
		dst, src = append(dst, addrSpan(i, to)), append(src, addrSpan(i, from))
		sport, dport = append(sport, portSpan(i, m.SourcePort)), append(dport, portSpan(i, m.DestinationPort))
		addUpperLayer(s, i, m)
		addUses(s, i, r)
		if !r.steers {
			setBit(&s.Guard[guards[r.Target]], i)
		}
		if !r.steers && m.ByMark() {
			proven = append(proven, ruleSpan[uint32]{i, r.Target, r.Target})
		}
	}
	addrs := axis[[2]uint64]{[2]uint64{math.MaxUint64, math.MaxUint64}, CompareAddrs, nextAddr}
	numbers := axis[uint32]{math.MaxUint32, cmp.Compare[uint32], nextNumber}
	s.Dst.Step = addrs.cut(dst, s.Dst.From[:], s.Dst.Fit[:])
	s.Src.Step = addrs.cut(src, s.Src.From[:], s.Src.Fit[:])
	s.Sport.Step = numbers.cut(sport, s.Sport.From[:], s.Sport.Fit[:])
	s.Dport.Step = numbers.cut(dport, s.Dport.From[:], s.Dport.Fit[:])
	s.Proven.Step = numbers.cut(proven, s.Proven.From[:], s.Proven.Fit[:])
	addMarks(s, all)
	return map[uint32]abi.Ruleset{0: *s}, nil
}

// addUpperLayer adds the protocols and DSCPs that match rule i.
func addUpperLayer(s *abi.Ruleset, i int, m model.Match) {
	for p := range s.Protocol {
		if m.Protocol == 0 || int(m.Protocol) == p {
			setBit(&s.Protocol[p], i)
		}
	}
	if m.Protocol == 0 {
		setBit(&s.AnyProtocol, i)
	}
	want, one := m.DSCP.Value()
	for d := range s.Dscp {
		if !one || int(want) == d {
			setBit(&s.Dscp[d], i)
		}
	}
}

// addUses adds rule i to its look-ups, with its targets.
func addUses(s *abi.Ruleset, i int, r orderedRule) {
	version := 0
	if r.Match.Is4() {
		version = 1
	}
	add := func(u abi.RuleUse) { setBit(&s.Use[u][version], i) }
	if !r.steers {
		s.Require[i] = r.Target
		add(abi.RuleUseRequire)
		if !r.Match.ByMark() {
			add(abi.RuleUseSuspect)
		}
		return
	}
	s.Steer[i] = r.Target + 1
	if r.origin != 0 {
		add(abi.RuleUse(abi.RuleOrigin - 1 + r.origin))
		return
	}
	add(abi.RuleUseLeave)
	if r.Match.ByMark() {
		s.Steer[i] |= abi.RuleByMark
	} else {
		add(abi.RuleUseSteer)
	}
	if _, one := r.Match.DSCP.Value(); one {
		s.Steer[i] |= abi.RuleByDscp
	}
}

// addMarks adds the marks that match each rule.
func addMarks(s *abi.Ruleset, all []orderedRule) {
	byMark := map[model.Mark]ruleBits{}
	for i, r := range all {
		b := byMark[r.Match.Mark]
		setBit(&b, i)
		byMark[r.Match.Mark] = b
	}
	s.AnyMark = byMark[model.Mark{}]
	delete(byMark, model.Mark{})
	var marks []model.Mark
	for m := range byMark {
		marks = append(marks, m)
	}
	slices.SortFunc(marks, func(a, b model.Mark) int {
		return cmp.Or(cmp.Compare(a.Mask, b.Mask), cmp.Compare(a.Value, b.Value))
	})
	for i, m := range marks {
		if i == 0 || m.Mask != marks[i-1].Mask {
			s.Mask[s.Masks].Mask, s.Mask[s.Masks].First = m.Mask, uint16(i)
			s.Masks++
		}
		s.Mask[s.Masks-1].Count++
		s.Marks[i], s.Marked[i] = m.Value, byMark[m]
	}
}

// ruleSpan is the range of values that match a rule's condition, both ends included.
type ruleSpan[K any] struct {
	rule     int
	from, to K
}

func portSpan(rule int, p model.Ports) ruleSpan[uint32] {
	if (p == model.Ports{}) {
		p.Last = math.MaxUint16
	}
	return ruleSpan[uint32]{rule, uint32(p.First), uint32(p.Last)}
}

// addrSpan is a prefix as its first address and its last.
func addrSpan(rule int, p netip.Prefix) ruleSpan[[2]uint64] {
	length := p.Bits()
	if p.Addr().Is4() {
		length += 96
	}
	from := HostWords(p.Masked().Addr())
	free := 128 - length
	to := [2]uint64{from[0] | ones(max(0, free-64)), from[1] | ones(min(64, free))}
	return ruleSpan[[2]uint64]{rule, from, to}
}

// ones is a number with its lowest n bits set.
func ones(n int) uint64 { return 1<<n - 1 }

// HostWords are the two halves of an address as numbers.
func HostWords(a netip.Addr) [2]uint64 {
	b := a.As16()
	return [2]uint64{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

// axis is all values that a condition may be about, from zero on.
type axis[K comparable] struct {
	highest K
	compare func(a, b K) int
	next    func(K) K
}

func CompareAddrs(a, b [2]uint64) int {
	return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1]))
}

func nextAddr(a [2]uint64) [2]uint64 {
	lo, carry := bits.Add64(a[1], 1, 0)
	return [2]uint64{a[0] + carry, lo}
}

func nextNumber(n uint32) uint32 { return n + 1 }

// cut divides the axis at the ends of spans, and lists the rules that match each piece. It
// returns the first step of a binary search.
func (a axis[K]) cut(spans []ruleSpan[K], from []K, fit []ruleBits) (step uint32) {
	var zero K
	starts := []K{zero}
	for _, s := range spans {
		starts = append(starts, s.from)
		if s.to != a.highest {
			starts = append(starts, a.next(s.to))
		}
	}
	slices.SortFunc(starts, a.compare)
	starts = slices.Compact(starts)
	for i, start := range starts {
		from[i] = start
		for _, s := range spans {
			if a.compare(s.from, start) <= 0 && a.compare(start, s.to) <= 0 {
				setBit(&fit[i], s.rule)
			}
		}
	}
	for i := len(starts); i < len(from); i++ {
		from[i], fit[i] = a.highest, fit[len(starts)-1]
	}
	if len(starts) == 1 {
		return 0
	}
	return uint32(min(1<<(bits.Len(uint(len(starts)-1))-1), abi.RulesMax))
}
