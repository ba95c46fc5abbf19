package model

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
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

// slowOverlaps holds each chain against all before it, one by one.
func slowOverlaps(chains []Chain) (list []Overlap) {
	for i, a := range chains {
		for j, b := range chains[:i] {
			if err := CheckOverlap(a, b); err != nil {
				list = append(list, Overlap{i, j, err})
			}
		}
	}
	return list
}

// drawPrefix gives few prefixes, of many lengths, so that they often overlap.
func drawPrefix(t *rapid.T, name string, four bool) netip.Prefix {
	if rapid.IntRange(0, 3).Draw(t, name+" none") == 0 {
		return netip.Prefix{}
	}
	bits := rapid.SampledFrom([]int{0, 1, 7, 8, 9, 23, 24, 31, 32}).Draw(t, name+" bits")
	tail := rapid.SampledFrom([]byte{0, 1, 2, 128}).Draw(t, name+" tail")
	if four {
		a := netip.AddrFrom4([4]byte{rapid.SampledFrom([]byte{10, 11, 192}).Draw(t, name), tail, 0, tail})
		p := netip.PrefixFrom(a, bits)
		if rapid.Bool().Draw(t, name+" masked") {
			p = p.Masked()
		}
		return p
	}
	a := netip.AddrFrom16([16]byte{0x20, rapid.SampledFrom([]byte{1, 2}).Draw(t, name), tail, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, tail})
	if bits == 32 {
		bits = 128
	}
	return netip.PrefixFrom(a, bits).Masked()
}

func drawMatch(t *rapid.T) Match {
	four := rapid.Bool().Draw(t, "IPv4")
	m := NewMatch(drawPrefix(t, "destination", four), drawPrefix(t, "source", four))
	if rapid.IntRange(0, 2).Draw(t, "ordered") == 0 {
		m.Priority = uint16(rapid.IntRange(1, 3).Draw(t, "priority"))
		m.Protocol = rapid.SampledFrom([]Protocol{0, 6, 17}).Draw(t, "protocol")
		if m.Protocol != 0 {
			m.DestinationPort = rapid.SampledFrom([]Ports{{}, {1, 5}, {5, 9}, {80, 80}}).Draw(t, "port")
		}
		m.Mark = rapid.SampledFrom([]Mark{{}, {1, 1}, {0, 1}}).Draw(t, "mark")
	}
	return m
}

func TestFindOverlapsFindsWhatComparingAllFinds(t *testing.T) {
	nodes := []string{"r1", "r2", "r3"}
	rapid.Check(t, func(t *rapid.T) {
		var chains []Chain
		for i := range rapid.IntRange(0, 25).Draw(t, "chains") {
			c := Chain{
				Name: fmt.Sprintf("c%d", i), Egress: "r6", Functions: []string{"fw"}, Match: drawMatch(t),
				Ingress:    rapid.SliceOfNDistinct(rapid.SampledFrom(nodes), 0, 2, rapid.ID).Draw(t, "ingress"),
				OwnTraffic: rapid.Bool().Draw(t, "own"),
			}
			c.Both = len(c.Ingress) == 1 && rapid.Bool().Draw(t, "both")
			chains = append(chains, c)
		}
		want, got := slowOverlaps(chains), FindOverlaps(chains, OverlapsMax)
		if diff := cmp.Diff(said(want), said(got)); diff != "" {
			t.Fatalf("-one by one +found:\n%s", diff)
		}
		if len(want) > 1 {
			if few := FindOverlaps(chains, len(want)-1); len(few) != len(want)-1 {
				t.Fatalf("%d found where %d may be, of %d", len(few), len(want)-1, len(want))
			}
		}
		var a, b []Match
		for range rapid.IntRange(0, 12).Draw(t, "a") {
			a = append(a, drawMatch(t))
		}
		for range rapid.IntRange(0, 12).Draw(t, "b") {
			b = append(b, drawMatch(t))
		}
		pairs, slow := map[[2]int]int{}, map[[2]int]int{}
		EachOverlap(a, b, func(i, j int) bool { pairs[[2]int{i, j}]++; return true })
		for i, m := range a {
			for j, n := range b {
				if m.Overlaps(n) {
					slow[[2]int{i, j}] = 1
				}
			}
		}
		if diff := cmp.Diff(slow, pairs); diff != "" {
			t.Fatalf("pairs of %v and %v: -one by one +found:\n%s", a, b, diff)
		}
	})
}

func said(list []Overlap) (out []string) {
	for _, o := range list {
		out = append(out, fmt.Sprintf("%d %d %v", o.Chain, o.Before, o.Err))
	}
	return out
}

// Some chains are held against all others, though most of these are passed over by their destination alone.
func TestSomeOverlapFindsWhatEachPairHas(t *testing.T) {
	found, none := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		prefixes := []string{"", "2001:db8::/32", "2001:db8:1::/48", "2001:db8:1:1::/64", "2001:db8:1:1::/120", "2001:db8:1:2::/64", "2001:db8:2::/64", "192.0.2.0/24", "192.0.2.128/25", "198.51.100.0/24"}
		var chains []Chain
		for i := range rapid.IntRange(1, 6).Draw(t, "chains") {
			c := Chain{Name: fmt.Sprint("c", i), Ingress: []string{rapid.SampledFrom([]string{"r1", "r2"}).Draw(t, "ingress")}, Functions: []string{"fw"}, Egress: "r6", Both: rapid.Bool().Draw(t, "both")}
			if d := rapid.SampledFrom(prefixes).Draw(t, "destination"); d != "" {
				c.Match.Destination = netip.MustParsePrefix(d)
			}
			if s := rapid.SampledFrom(prefixes[:7]).Draw(t, "source"); s != "" && !c.Match.Is4() {
				c.Match.Source = netip.MustParsePrefix(s)
			}
			chains = append(chains, c)
		}
		some := []int{rapid.IntRange(0, len(chains)-1).Draw(t, "some")}
		want := false
		for _, i := range some {
			for j := range chains {
				want = want || i != j && CheckOverlap(chains[max(i, j)], chains[min(i, j)]) != nil
			}
		}
		if got := SomeOverlap(chains, some); got != want {
			t.Fatalf("chain %d of %+v: some overlap: %t, want %t", some[0], chains, got, want)
		}
		if want {
			found++
		} else {
			none++
		}
	})
	if found == 0 || none == 0 {
		t.Errorf("%d overlap and %d do not", found, none)
	}
}
