package plan

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
)

// random is a source of bytes that a test can repeat.
func random(seed uint64) io.Reader {
	var s [32]byte
	for i := range 8 {
		s[i] = byte(seed >> (8 * i))
	}
	return rand.NewChaCha8(s)
}

// paper is the domain of examples/paper.yaml, with the scheme given.
func paper(scheme model.Scheme) model.Domain {
	node := func(name string, n int, interfaces ...model.Interface) model.Node {
		return model.Node{
			Name:       name,
			Address:    netip.MustParseAddr(fmt.Sprintf("fc00:%d::1", n)),
			Locator:    netip.MustParsePrefix(fmt.Sprintf("fc00:0:0:%d00::/56", n)),
			CPUs:       64,
			Interfaces: interfaces,
		}
	}
	edge := func(name string) model.Interface { return model.Interface{Name: name, Role: model.RoleEdge} }
	core := func(name string) model.Interface {
		return model.Interface{Name: name, Role: model.RoleCore, MTU: 1700}
	}
	return model.Domain{
		Block: netip.MustParsePrefix("fc00::/48"),
		Nodes: []model.Node{
			node("r1", 1, edge("r1-h1"), core("r1-r2")),
			node("r2", 2, core("r2-r1"), core("r2-r3")),
			node("r3", 3, core("r3-r2"), core("r3-r6")),
			node("r6", 6, edge("r6-h2"), core("r6-r3")),
		},
		Functions: []model.Function{{Name: "fw", Node: "r2"}, {Name: "dpi", Node: "r3"}},
		Chains: []model.Chain{{
			Name:      "web",
			Ingress:   []string{"r1"},
			Functions: []string{"fw", "dpi"},
			Egress:    "r6",
			Match:     model.Match{Destination: netip.MustParsePrefix("fc00:8::/64")},
			Both:      true,
			Proof:     model.Proof{Scheme: scheme},
		}},
	}
}

// domains draws domains as internal/manifest would let them through.
func domains() *rapid.Generator[model.Domain] {
	return rapid.Custom(func(t *rapid.T) model.Domain {
		d := model.Domain{Block: netip.MustParsePrefix("fd00:5::/48")}
		for i := range rapid.IntRange(2, 6).Draw(t, "nodes") {
			d.Nodes = append(d.Nodes, model.Node{
				Name:    fmt.Sprintf("n%d", i),
				Address: netip.MustParseAddr(fmt.Sprintf("fd00:1::%d", i+1)),
				Locator: netip.MustParsePrefix(fmt.Sprintf("fd00:5:0:%x00::/56", i)),
				CPUs:    rapid.IntRange(1, 200).Draw(t, "cpus"),
				Interfaces: []model.Interface{
					{Name: "eth0", Role: model.RoleEdge},
					{Name: "eth1", Role: model.RoleCore, MTU: rapid.SampledFrom([]int{0, 1700, 9000}).Draw(t, "mtu")},
				},
			})
		}
		names := make([]string, len(d.Nodes))
		for i, n := range d.Nodes {
			names[i] = n.Name
		}
		for i := range rapid.IntRange(1, 5).Draw(t, "functions") {
			d.Functions = append(d.Functions, model.Function{
				Name: fmt.Sprintf("f%d", i),
				Node: rapid.SampledFrom(names).Draw(t, "node"),
			})
		}
		for i := range rapid.IntRange(0, 6).Draw(t, "chains") {
			order := rapid.Permutation(names).Draw(t, "order")
			ch := model.Chain{
				Name:    fmt.Sprintf("c%d", i),
				Ingress: order[1 : 1+rapid.IntRange(1, len(order)-1).Draw(t, "ingress")],
				Egress:  order[0],
				Match:   model.Match{Destination: netip.MustParsePrefix(fmt.Sprintf("2001:db8:%x::/48", i))},
				Proof: model.Proof{
					Scheme:      rapid.SampledFrom([]model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed}).Draw(t, "scheme"),
					OnViolation: rapid.SampledFrom([]model.OnViolation{model.OnViolationDrop, model.OnViolationReport}).Draw(t, "on-violation"),
				},
			}
			for range rapid.IntRange(1, 15).Draw(t, "length") {
				ch.Functions = append(ch.Functions, rapid.SampledFrom(d.Functions).Draw(t, "function").Name)
			}
			if rapid.Bool().Draw(t, "by source") {
				ch.Match.Source = netip.MustParsePrefix("2001:db8:ff::/48")
			}
			ch.Both = len(ch.Ingress) == 1 && rapid.Bool().Draw(t, "both")
			d.Chains = append(d.Chains, ch)
		}
		return d
	})
}
