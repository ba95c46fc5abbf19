package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
)

// ruledRig is r1 or r6 of Scapy's world with the chain web's match narrowed.
func ruledRig(t *testing.T, name string, narrow func(*model.Match)) *rig {
	t.Helper()
	r := newScapyRig(t, name)
	n := r.node.Node
	n.Proxies = nil
	for i := range n.Headends {
		if n.Headends[i].Chain == "web" {
			narrow(&n.Headends[i].Match)
		}
	}
	for i := range n.Egresses {
		if n.Egresses[i].Chain == "web" {
			narrow(&n.Egresses[i].Match)
		}
	}
	r.must(r.apply(&n))
	return r
}

// upperLayer is a packet from h1 to h2 of Scapy's world with ports, or a fragment of it.
func upperLayer(t *testing.T, protocol uint8, sport, dport uint16, fragment bool, class uint8) []byte {
	t.Helper()
	payload := make([]byte, 20)
	binary.BigEndian.PutUint16(payload, sport)
	binary.BigEndian.PutUint16(payload[2:], dport)
	payload[12] = 0x50
	h := srv6.Header{NextHeader: protocol, TrafficClass: class, HopLimit: 64, Source: xtest.Addr("fc00:7::2"), Destination: xtest.Addr("fc00:8::2")}
	if fragment {
		payload = append([]byte{protocol, 0, 0, 1, 0, 0, 0, 7}, payload...)
		h.NextHeader = 44
	}
	h.PayloadLength = uint16(len(payload))
	b, err := h.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return framed(srv6.EtherTypeIPv6, append(b, payload...))
}

// The chain takes what its rule says, at the headend and at the guard, and a
// fragment, whose ports nobody knows, gets past no guard without a proof.
func TestRulesWithPorts(t *testing.T) {
	narrow := func(m *model.Match) {
		m.Priority, m.Protocol, m.DestinationPort = 10, 6, model.Ports{First: 440, Last: 443}
		m.DSCP = 47
	}
	headend, egress := ruledRig(t, "r1", narrow), ruledRig(t, "r6", narrow)
	for _, c := range []struct {
		name     string
		packet   []byte
		steered  bool
		required bool
	}{
		{"first port", upperLayer(t, 6, 1, 440, false, 46<<2), true, true},
		{"last port, ECN", upperLayer(t, 6, 1, 443, false, 46<<2|1), true, true},
		{"port below", upperLayer(t, 6, 1, 439, false, 46<<2), false, false},
		{"port above", upperLayer(t, 6, 1, 444, false, 46<<2), false, false},
		{"the port as source", upperLayer(t, 6, 443, 1, false, 46<<2), false, false},
		{"another protocol", upperLayer(t, 17, 1, 443, false, 46<<2), false, false},
		{"another DSCP", upperLayer(t, 6, 1, 443, false, 45<<2), false, false},
		{"fragment", upperLayer(t, 6, 1, 443, true, 46<<2), false, true},
		{"fragment of another protocol", upperLayer(t, 17, 1, 443, true, 46<<2), false, false},
		{"fragment of another DSCP", upperLayer(t, 6, 1, 443, true, 0), false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, x := range []struct {
				r    *rig
				port string
				want oracle.Verdict
			}{
				{headend, portEdge, map[bool]oracle.Verdict{true: oracle.Forward, false: oracle.Pass}[c.steered]},
				{egress, portCore, map[bool]oracle.Verdict{true: oracle.Drop, false: oracle.Pass}[c.required]},
			} {
				if err := x.r.in(func() error {
					got, err := x.r.check(frame{port: x.port, b: c.packet}, &oracle.Labels{}, true)
					if err == nil && (got.want.Verdict != x.want || got.took != (x.want == oracle.Forward)) {
						err = fmt.Errorf("%s at %s, XDP took it: %t; want %s", got.want.Verdict, x.port, got.took, x.want)
					}
					return err
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// Random rules, few of them or as many as a node holds, at a headend and an egress
// next to one another, and packets that fit some of them in part: the programs
// say what a search through the rules as they are written does, at each of the
// places where they are asked.
func TestRulesAreWhatASearchThroughThemFinds(t *testing.T) {
	t.Parallel()
	headend, egress := newScapyRig(t, "r1"), newScapyRig(t, "r6")
	r1, r6 := headend.node.Node, egress.node.Node
	start, end := *startOf(&r1, "direct"), r6.Egresses[slices.IndexFunc(r6.Egresses, func(e plan.Egress) bool { return e.Chain == "direct" })]
	r1.Proxies, r6.Proxies = nil, nil
	labels := &oracle.Labels{}
	taken, required, proven, left := 0, 0, 0, 0
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.SampledFrom([]int{1, 2, 3, 3, 5, 5, 8, 8, 13, 60}).Draw(t, "rules")
		matches := make([]model.Match, n)
		r1.Headends, r6.Egresses, r6.Headends, r1.Egresses = nil, nil, nil, nil
		for i := range matches {
			m := drawMatch(t)
			m.Priority = uint16(1000*i + 500)
			if i == n-1 && rapid.Bool().Draw(t, "by prefix") {
				m = model.Match{Destination: m.Destination}
			}
			h, e := start, end
			h.Path, h.Match, h.Own = 0x10000+uint32(i), m, rapid.Bool().Draw(t, "own")
			e.Path, e.Match = h.Path, m
			r1.Headends, r6.Egresses = append(r1.Headends, h), append(r6.Egresses, e)
		}
		headend.must(errors.Join(headend.apply(nil), headend.apply(&r1)))
		egress.must(errors.Join(egress.apply(nil), egress.apply(&r6)))
		most := rapid.IntRange(0, 256-n).Draw(t, "others")
		headend.must(headend.crowd(most))
		egress.must(egress.crowd(most))
		for range 10 {
			b, mark := drawPacket(t), rapid.SampledFrom([]uint32{0, 1, 2, 3, 5, 8, 0x10, 0x11, 0xff01}).Draw(t, "mark")
			var got, plain seen
			err := headend.in(func() (err error) {
				if got, err = headend.check(frame{port: portEdge, b: b}, labels, true); err != nil {
					return err
				}
				from := rapid.SampledFrom([]oracle.Origin{oracle.FromNode, oracle.FromElsewhere}).Draw(t, "from")
				out, err := headend.checkOwn(b, oracle.Departure{From: from}, mark, labels)
				if out.Verdict == oracle.Forward {
					left++
				}
				return err
			})
			if err == nil {
				err = egress.in(func() (err error) {
					if plain, err = egress.check(frame{port: portCore, b: b}, labels, true); err != nil || got.want.Verdict != oracle.Forward {
						return err
					}
					x, err := egress.check(frame{port: portCore, b: slices.Concat(b[:12], etherType(false), got.tc.b[srv6.EthernetLen:])}, labels, true)
					if x.want.Verdict == oracle.Forward {
						proven++
					}
					return err
				})
			}
			if err != nil {
				t.Fatalf("%v\nrules %v", err, matches)
			}
			if got.want.Verdict == oracle.Forward {
				taken++
			}
			if plain.want.Verdict == oracle.Drop {
				required++
			}
		}
	})
	if taken < 50 || required < 50 || proven < 50 || left < 50 {
		t.Errorf("%d packets were taken, %d required, %d proven, %d taken as they left; the packets show too little", taken, required, proven, left)
	}
}

// crowd puts rules that fit nothing between those of the plan.
func (r *rig) crowd(n int) error {
	steer := make([]plan.Rule, 0, n)
	for i := range n {
		steer = append(steer, plan.Rule{Match: model.Match{
			Priority: uint16(i * 251), Destination: netip.PrefixFrom(xtest.Addr(fmt.Sprintf("2001:db8:%x::", i+1)), 48), Protocol: 6,
			DestinationPort: model.Ports{First: uint16(i + 1), Last: uint16(i + 500)}, Mark: model.Mark{Value: uint32(i + 1), Mask: 0xffff},
		}})
		steer[i].Match.Priority++
	}
	var require []plan.Rule
	for _, h := range r.node.Headends {
		i, err := r.headendOf(oracle.Visit{Path: h.Path, Epoch: h.Epoch})
		if err != nil {
			return err
		}
		for k, e := range r.have.Headends {
			if e == i {
				steer = append(steer, plan.Rule{Match: h.Match, Target: k})
			}
		}
	}
	for _, e := range r.node.Egresses {
		require = append(require, plan.Rule{Match: e.Match, Target: abi.BE32(e.Path)})
	}
	set, err := tables.EncodeRules(steer, require, nil, nil)
	if err != nil {
		return err
	}
	if s, ok := set[0]; ok {
		return r.g.putRules(&s)
	}
	return nil
}

// Few values, so that rules and packets often agree.
var (
	drawnDestinations = []string{"fc00:8::/64", "fc00:8::/127", "fc00:8::2/128", "fc00::/16", "", "198.51.100.0/24", "198.51.100.2/32", "0.0.0.0/0"}
	drawnSources      = []string{"", "fc00:7::/64", "fc00:7::3/128", "203.0.113.0/24"}
	drawnPorts        = []uint16{1, 2, 442, 443, 444, 65534, 65535}
)

func drawMatch(t *rapid.T) (m model.Match) {
	prefixOf := func(what string, from []string) netip.Prefix {
		s := rapid.SampledFrom(from).Draw(t, what)
		if s == "" {
			return netip.Prefix{}
		}
		return netip.MustParsePrefix(s)
	}
	m.Destination = prefixOf("destination", drawnDestinations)
	m.Source = prefixOf("source", drawnSources)
	if m.Destination.IsValid() && m.Source.IsValid() && m.Destination.Addr().Is4() != m.Source.Addr().Is4() {
		m.Source = netip.Prefix{}
	}
	if (m == model.Match{}) {
		m.Destination = netip.MustParsePrefix("fc00::/16")
	}
	m.Protocol = rapid.SampledFrom([]model.Protocol{0, 0, 6, 17, 58}).Draw(t, "protocol")
	ports := func(what string) (p model.Ports) {
		if (m.Protocol == 6 || m.Protocol == 17) && rapid.Bool().Draw(t, what) {
			a, b := rapid.SampledFrom(drawnPorts).Draw(t, what+" from"), rapid.SampledFrom(drawnPorts).Draw(t, what+" to")
			p = model.Ports{First: min(a, b), Last: max(a, b)}
		}
		return p
	}
	m.SourcePort, m.DestinationPort = ports("source port"), ports("destination port")
	m.DSCP = rapid.SampledFrom([]model.DSCP{0, 0, 0, 1, 47, 49}).Draw(t, "DSCP")
	m.Mark = rapid.SampledFrom([]model.Mark{{}, {}, {}, {Value: 1, Mask: 0xff}, {Value: 2, Mask: 0xff}, {Value: 3, Mask: 0xff}, {Value: 5, Mask: 0xff}, {Value: 8, Mask: 0xff}, {Value: 0x10, Mask: 0xf0}, {Value: 0xff01, Mask: 0xffffffff}}).Draw(t, "mark")
	return m
}

func drawPacket(t *rapid.T) []byte {
	protocol := rapid.SampledFrom([]uint8{6, 17, 58, 1, 59}).Draw(t, "protocol")
	payload := make([]byte, rapid.SampledFrom([]int{20, 20, 20, 3, 0}).Draw(t, "bytes"))
	if len(payload) == 20 {
		binary.BigEndian.PutUint16(payload, rapid.SampledFrom(drawnPorts).Draw(t, "source port"))
		binary.BigEndian.PutUint16(payload[2:], rapid.SampledFrom(drawnPorts).Draw(t, "destination port"))
		payload[12] = 0x50
	}
	class := rapid.SampledFrom([]uint8{0, 1, 46 << 2, 48 << 2}).Draw(t, "class")
	fragment := rapid.SampledFrom([]string{"", "", "", "first", "second"}).Draw(t, "fragment")
	if rapid.Bool().Draw(t, "IPv4") {
		from, to := rapid.SampledFrom([]string{"203.0.113.9", "192.0.2.9"}).Draw(t, "from"), rapid.SampledFrom([]string{"198.51.100.2", "198.51.100.3", "10.0.0.1"}).Draw(t, "to")
		h := make([]byte, 20)
		h[0], h[1], h[8], h[9] = 0x45, class, 64, protocol
		binary.BigEndian.PutUint16(h[2:], uint16(20+len(payload)))
		binary.BigEndian.PutUint16(h[6:], map[string]uint16{"": 0x4000, "first": 0x2000, "second": 0x0001}[fragment])
		copy(h[12:], xtest.Addr(from).AsSlice())
		copy(h[16:], xtest.Addr(to).AsSlice())
		binary.BigEndian.PutUint16(h[10:], sumOf(h))
		return framed(srv6.EtherTypeIPv4, append(h, payload...))
	}
	next := protocol
	switch fragment {
	case "first":
		payload, next = append([]byte{protocol, 0, 0, 1, 0, 0, 0, 7}, payload...), 44
	case "second":
		payload, next = append([]byte{protocol, 0, 0, 8, 0, 0, 0, 7}, payload...), 44
	default:
		if rapid.IntRange(0, 5).Draw(t, "options") == 0 {
			payload, next = append([]byte{protocol, 0, 1, 4, 0, 0, 0, 0}, payload...), 60
		}
	}
	h := srv6.Header{
		NextHeader: next, TrafficClass: class, HopLimit: 64, PayloadLength: uint16(len(payload)),
		Source:      xtest.Addr(rapid.SampledFrom([]string{"fc00:7::2", "fc00:7::3", "fc00:5::9"}).Draw(t, "from")),
		Destination: xtest.Addr(rapid.SampledFrom([]string{"fc00:8::2", "fc00:8::3", "fc00:8::1:0", "fc00:9::1"}).Draw(t, "to")),
	}
	b, err := h.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return framed(srv6.EtherTypeIPv6, append(b, payload...))
}

func TestRulesComeInTheOrderOfTheirPriorities(t *testing.T) {
	rule := func(priority uint16, target uint32) plan.Rule {
		return plan.Rule{Match: model.Match{Priority: priority}, Target: target}
	}
	byPrefix := plan.Rule{Match: model.Match{Destination: xtest.Prefix("2001:db8::/32")}, Target: 99}
	got, err := tables.EncodeRules([]plan.Rule{rule(30, 3), byPrefix, rule(10, 1)}, []plan.Rule{rule(40, 4), rule(20, 2), rule(10, 5)}, map[uint32]uint32{4: 2}, nil)
	if err != nil {
		t.Fatal(err)
	}
	set := got[0]
	var order []string
	for i := range set.Steer[:6] {
		order = append(order, fmt.Sprint(set.Steer[i], "/", set.Require[i]))
	}
	if want := "[2/0 0/5 0/2 4/0 0/4 0/0]"; fmt.Sprint(order) != want {
		t.Errorf("steer/require in the order %v, want %s", order, want)
	}
	if want := [abi.Guards][abi.RuleWords]uint64{abi.GuardUnset: {1<<1 | 1<<2}, abi.GuardAudit: {1 << 4}}; set.Guard != want {
		t.Errorf("rules by their guards: %b, want %b", set.Guard, want)
	}
	many := make([]plan.Rule, 257)
	for i := range many {
		many[i] = rule(uint16(i+1), 1)
	}
	if _, err := tables.EncodeRules(many, nil, nil, nil); err == nil {
		t.Error("257 rules were taken")
	}
	if got, err := tables.EncodeRules([]plan.Rule{byPrefix}, nil, nil, nil); err != nil || len(got) != 0 {
		t.Errorf("without a priority: %v, %v; want no rules", got, err)
	}
}
