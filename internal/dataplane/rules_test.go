package dataplane

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/waystamp/waystamp/internal/dataplane/oracle"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
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
	h := srv6.Header{NextHeader: protocol, TrafficClass: class, HopLimit: 64, Source: addr("fc00:7::2"), Destination: addr("fc00:8::2")}
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
					if err == nil && (got.want.Verdict != x.want || got.took) {
						err = fmt.Errorf("%s at %s, XDP took it: %t; want %s on TC", got.want.Verdict, x.port, got.took, x.want)
					}
					return err
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestRulesComeInTheOrderOfTheirPriorities(t *testing.T) {
	rule := func(priority uint16, target uint32) plan.Rule {
		return plan.Rule{Match: model.Match{Priority: priority}, Target: target}
	}
	byPrefix := plan.Rule{Match: model.Match{Destination: prefix("2001:db8::/32")}, Target: 99}
	got, err := encodeRules([]plan.Rule{rule(30, 3), byPrefix, rule(10, 1)}, []plan.Rule{rule(40, 4), rule(20, 2), rule(10, 5)})
	if err != nil {
		t.Fatal(err)
	}
	set := got[0]
	var order []string
	for _, r := range set.Rule[:set.Count] {
		order = append(order, fmt.Sprint(r.Steer, "/", r.Require))
	}
	if want := "[2/0 0/5 0/2 4/0 0/4]"; fmt.Sprint(order) != want {
		t.Errorf("steer/require in the order %v, want %s", order, want)
	}
	many := make([]plan.Rule, 257)
	for i := range many {
		many[i] = rule(uint16(i+1), 1)
	}
	if _, err := encodeRules(many, nil); err == nil {
		t.Error("257 rules were taken")
	}
	if got, err := encodeRules([]plan.Rule{byPrefix}, nil); err != nil || len(got) != 0 {
		t.Errorf("without a priority: %v, %v; want no rules", got, err)
	}
}
