package model

import (
	"net/netip"
	"strings"
	"testing"
)

func TestOverlappingChainsMustShareTheirIngress(t *testing.T) {
	chain := func(name, dst, src string, ingress ...string) Chain {
		c := Chain{Name: name, Ingress: ingress, Functions: []string{"fw"}, Egress: "r6"}
		if dst != "" {
			c.Match.Destination = netip.MustParsePrefix(dst)
		}
		if src != "" {
			c.Match.Source = netip.MustParsePrefix(src)
		}
		return c
	}
	ordered := func(c Chain, priority uint16, port uint16) Chain {
		c.Match.Priority, c.Match.Protocol, c.Match.DestinationPort = priority, 6, Ports{First: port, Last: port}
		return c
	}
	marked := func(c Chain, priority uint16, mark uint32) Chain {
		c.Match.Priority, c.Match.Mark = priority, Mark{Value: mark, Mask: ^uint32(0)}
		return c
	}
	own := func(c Chain) Chain {
		c.OwnTraffic = true
		return c
	}
	for _, c := range []struct {
		name string
		a, b Chain
		want string // in the error; "": none
	}{
		{"apart", chain("a", "2001:db8:1::/64", "", "r1"), chain("b", "2001:db8:2::/64", "", "r2"), ""},
		{"inside, other ingress", chain("a", "2001:db8:1::/64", "", "r1"), chain("b", "2001:db8:1::/120", "", "r2"), "takes at r1"},
		{"inside, in the other order", chain("b", "2001:db8:1::/120", "", "r2"), chain("a", "2001:db8:1::/64", "", "r1"), "takes at r1"},
		{"inside, same ingress", chain("a", "2001:db8:1::/64", "", "r1"), chain("b", "2001:db8:1::/120", "", "r1", "r2"), ""},
		{"sources apart", chain("a", "2001:db8:1::/64", "2001:db8:8::/64", "r1"), chain("b", "2001:db8:1::/120", "2001:db8:9::/64", "r2"), ""},
		{"same priority", ordered(chain("a", "2001:db8:1::/64", "", "r1"), 5, 443), ordered(chain("b", "2001:db8:1::/120", "", "r1"), 5, 443), "with the same priority"},
		{"same priority, ports apart", ordered(chain("a", "2001:db8:1::/64", "", "r1"), 5, 443), ordered(chain("b", "2001:db8:1::/120", "", "r1"), 5, 80), ""},
		{"another priority", ordered(chain("a", "2001:db8:1::/64", "", "r1"), 5, 443), ordered(chain("b", "2001:db8:1::/120", "", "r1"), 6, 443), ""},
		{"ordered before longer, other ingress", ordered(chain("a", "2001:db8:1::/64", "", "r1"), 5, 443), chain("b", "2001:db8:1::/120", "", "r2"), "takes at r2"},
		{"by mark before prefixes, other ingress", marked(chain("a", "", "", "r1"), 5, 1), chain("b", "2001:db8:1::/120", "", "r2"), ""},
		{"same priority, other mark", marked(chain("a", "", "", "r1"), 5, 1), marked(chain("b", "", "", "r2"), 5, 2), ""},
		{"same priority, same mark", marked(chain("a", "", "", "r1"), 5, 1), marked(chain("b", "", "", "r1"), 5, 1), "with the same priority"},
		{"by mark behind a rule that takes nothing own", marked(chain("a", "", "", "r1"), 6, 1), ordered(chain("b", "2001:db8:1::/64", "", "r1"), 5, 443), "own-traffic"},
		{"by mark behind one that does", marked(chain("a", "", "", "r1"), 6, 1), own(ordered(chain("b", "2001:db8:1::/64", "", "r1"), 5, 443)), ""},
		{"own traffic, and a longer prefix without", own(chain("a", "2001:db8:1::/64", "", "r1")), chain("b", "2001:db8:1::/120", "", "r1"), "own-traffic"},
		{"own traffic, and a longer prefix with", own(chain("a", "2001:db8:1::/64", "", "r1")), own(chain("b", "2001:db8:1::/120", "", "r1")), ""},
		{"a longer prefix with own traffic", chain("a", "2001:db8:1::/64", "", "r1"), own(chain("b", "2001:db8:1::/120", "", "r1")), ""},
		{"by source alone", chain("a", "", "2001:db8:8::/64", "r1"), chain("b", "2001:db8:1::/64", "", "r2"), "takes at r1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := CheckOverlap(c.b, c.a)
			if c.want == "" {
				if err != nil {
					t.Fatalf("got %v, want no error", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

func TestTheTwoDirectionsOfAChainMayOverlap(t *testing.T) {
	c := Chain{Name: "web", Ingress: []string{"r1"}, Functions: []string{"fw"}, Egress: "r6", Both: true,
		Match: Match{Destination: netip.MustParsePrefix("2001:db8:1::/64")}}
	d := c
	d.Name, d.Match.Destination = "ssh", netip.MustParsePrefix("2001:db8:2::/64")
	if err := CheckOverlap(d, c); err != nil {
		t.Fatal(err)
	}
}
