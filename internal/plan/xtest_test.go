package plan

import (
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

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

// functions is the domain of examples/functions.yaml, but for the lab.
func functions() model.Domain {
	d := paper(model.SchemeKeyed)
	d.Functions = []model.Function{
		{Name: "fw", Node: "r2", Kind: model.KindUnaware, Proxy: model.Proxy{
			To: "fw-to", From: "fw-from", Via: netip.MustParseAddr("fe80::2"), Cache: 8000, Lifetime: time.Second,
		}},
		{Name: "dpi", Node: "r3", Kind: model.KindUnaware, Proxy: model.Proxy{
			To: "dpi-to", From: "dpi-from", Cache: 20000, Lifetime: 3 * time.Second,
		}},
		{Name: "nat", Node: "r3", Kind: model.KindUnaware, Proxy: model.Proxy{
			Local: true, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Rewrites: true, Cache: 10000, Lifetime: time.Second,
		}},
	}
	d.Chains[0].Functions = []string{"fw", "dpi", "nat"}
	return d
}

// proxies draws the proxy of the i-th function of a node.
func proxies(i int, local bool) *rapid.Generator[model.Proxy] {
	return rapid.Custom(func(t *rapid.T) model.Proxy {
		p := model.Proxy{
			Local:     local,
			Recognise: rapid.SampledFrom([]model.Recognise{model.RecogniseContent, model.RecogniseMetadata}).Draw(t, "recognise"),
			OnUnknown: rapid.SampledFrom([]model.OnUnknown{model.OnUnknownDrop, model.OnUnknownPlain}).Draw(t, "on-unknown"),
			Segments:  rapid.SampledFrom([]model.Segments{model.SegmentsCut, model.SegmentsKeep}).Draw(t, "segments"),
			Cache:     rapid.IntRange(1, 10000).Draw(t, "cache"),
			Lifetime:  time.Duration(rapid.Int64Range(int64(model.LifetimeMin), int64(model.LifetimeMax)).Draw(t, "lifetime")),
		}
		if local {
			p.Recognise = model.RecogniseMetadata
		} else {
			p.To = fmt.Sprintf("to%d", i)
			p.From = rapid.SampledFrom([]string{p.To, fmt.Sprintf("from%d", i)}).Draw(t, "from")
			p.Via = rapid.SampledFrom([]netip.Addr{{}, netip.MustParseAddr("fe80::2"), netip.MustParseAddr("fd00:2::1")}).Draw(t, "via")
		}
		if p.Recognise == model.RecogniseMetadata {
			p.Segments = model.SegmentsKeep
			p.Rewrites = rapid.Bool().Draw(t, "rewrites")
		}
		return p
	})
}

func netfilters() *rapid.Generator[model.Netfilter] {
	return rapid.Custom(func(t *rapid.T) model.Netfilter {
		n := model.Netfilter{
			Namespace: rapid.SampledFrom([]string{model.NamespaceOwn, model.NamespaceNode, "container"}).Draw(t, "namespace"),
			Rules:     rapid.SampledFrom([]string{"", "chain c {\n}\n"}).Draw(t, "rules"),
		}
		for i, v := range rapid.SliceOfNDistinct(rapid.Uint32Range(1, 1<<32-1), 0, 4, rapid.ID).Draw(t, "arguments") {
			if n.Arguments == nil {
				n.Arguments = map[string]uint32{}
			}
			n.Arguments[fmt.Sprintf("a%d", i)] = v
		}
		n.Zones = len(n.Arguments) > 0 && rapid.Bool().Draw(t, "zones")
		if n.Namespace == model.NamespaceOwn && rapid.Bool().Draw(t, "address") {
			n.Addresses = addresses("fd00:2::f", "192.0.2.1")
		}
		return n
	})
}

// domains draws domains as internal/manifest would let them through.
func domains() *rapid.Generator[model.Domain] {
	return rapid.Custom(func(t *rapid.T) model.Domain {
		d := model.Domain{Block: netip.MustParsePrefix("fd00:5::/48")}
		if rapid.Bool().Draw(t, "labels") {
			d.MPLS = &model.MPLS{Services: 100000, MTU: 1600}
		}
		for i := range rapid.IntRange(2, 6).Draw(t, "nodes") {
			var labels *model.NodeMPLS
			if d.MPLS != nil {
				labels = &model.NodeMPLS{Label: 16000 + uint32(i), Address: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})}
			}
			d.Nodes = append(d.Nodes, model.Node{
				MPLS:      labels,
				Name:      fmt.Sprintf("n%d", i),
				Address:   netip.MustParseAddr(fmt.Sprintf("fd00:1::%d", i+1)),
				Locator:   netip.MustParsePrefix(fmt.Sprintf("fd00:5:0:%x00::/56", i)),
				CPUs:      rapid.IntRange(1, 200).Draw(t, "cpus"),
				Advertise: rapid.SampledFrom([]model.Advertise{model.AdvertiseLocator, model.AdvertiseSIDs}).Draw(t, "advertise"),
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
			f := model.Function{
				Name: fmt.Sprintf("f%d", i),
				Node: rapid.SampledFrom(names).Draw(t, "node"),
				Kind: rapid.SampledFrom([]model.Kind{model.KindForward, model.KindUnaware, model.KindNetfilter}).Draw(t, "kind"),
			}
			if f.Kind == model.KindUnaware {
				// No chain ends at the first node if one of its functions is local.
				local := f.Node == names[0] && rapid.Bool().Draw(t, "local")
				f.Proxy = proxies(i, local).Draw(t, "proxy")
			}
			if f.Kind == model.KindNetfilter {
				f.Netfilter = netfilters().Draw(t, "netfilter")
				if f.Node != names[0] && f.Netfilter.Namespace == model.NamespaceNode {
					f.Netfilter.Namespace = "container"
				}
				f.Proxy = model.NetfilterDetour(f.Name, f.Netfilter.Namespace)
				f.Proxy.Cache = rapid.IntRange(1, 1000).Draw(t, "cache")
			}
			d.Functions = append(d.Functions, f)
		}
		local := slices.ContainsFunc(d.Functions, func(f model.Function) bool { return f.Proxy.Local })
		for i := range rapid.IntRange(0, 6).Draw(t, "chains") {
			order := rapid.Permutation(names).Draw(t, "order")
			if first := slices.Index(order, names[0]); local && first == 0 {
				order[0], order[1] = order[1], order[0]
			}
			ch := model.Chain{
				Name:    fmt.Sprintf("c%d", i),
				Ingress: order[1 : 1+rapid.IntRange(1, len(order)-1).Draw(t, "ingress")],
				Egress:  order[0],
				Match:   model.Match{Destination: netip.MustParsePrefix(fmt.Sprintf("2001:db8:%x::/48", i))},
				Guard:   rapid.SampledFrom([]model.Guard{model.GuardUnset, model.GuardOff, model.GuardAudit, model.GuardEnforce}).Draw(t, "guard"),
				Encapsulation: model.Encapsulation{
					SIDs:    rapid.SampledFrom([]model.SIDs{model.SIDsPlain, model.SIDsCompressed}).Draw(t, "SIDs"),
					Reduced: rapid.Bool().Draw(t, "reduced"),
				},
				Proof: model.Proof{
					Scheme:      rapid.SampledFrom([]model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed}).Draw(t, "scheme"),
					OnViolation: rapid.SampledFrom([]model.OnViolation{model.OnViolationDrop, model.OnViolationReport}).Draw(t, "on-violation"),
				},
			}
			forward := slices.DeleteFunc(slices.Clone(d.Functions), func(f model.Function) bool { return f.Kind != model.KindForward })
			overLabels := d.MPLS != nil && len(forward) > 0 && rapid.Bool().Draw(t, "over labels")
			if overLabels {
				ch.Encapsulation = model.Encapsulation{Type: model.EncapsulationSRMPLS}
			}
			for range rapid.IntRange(1, 15).Draw(t, "length") {
				if overLabels {
					ch.Functions = append(ch.Functions, rapid.SampledFrom(forward).Draw(t, "forward function").Name)
					continue
				}
				f := rapid.SampledFrom(d.Functions).Draw(t, "function")
				values := slices.Sorted(maps.Values(f.Netfilter.Arguments))
				if f.Netfilter.Zones && slices.Contains(ch.Functions, f.Name) {
					continue // a second visit needs arguments of its own
				}
				ch.Functions = append(ch.Functions, f.Name)
				if len(values) > 0 && rapid.Bool().Draw(t, "with argument") {
					value := rapid.SampledFrom(append(values, 0))
					ch.Arguments = append(ch.Arguments, model.Argument{
						Of: len(ch.Functions) - 1, Forward: value.Draw(t, "forward"), Reverse: value.Draw(t, "reverse"),
					})
				}
			}
			waypointsMax := 15 - len(ch.Functions)
			if overLabels {
				waypointsMax = 0
			}
			for range rapid.IntRange(0, waypointsMax).Draw(t, "waypoints") {
				ch.Waypoints = append(ch.Waypoints, model.Waypoint{
					Before: rapid.IntRange(0, len(ch.Functions)).Draw(t, "before"),
					SID:    netip.MustParseAddr(fmt.Sprintf("fd00:5:0:ff%02x::", rapid.IntRange(0, 3).Draw(t, "waypoint"))),
				})
			}
			if rapid.Bool().Draw(t, "clamps") {
				ch.Clamp = model.Clamp{On: true, Most: rapid.IntRange(model.MSSMin, model.MSSMin+20).Draw(t, "MSS")}
			}
			if rapid.Bool().Draw(t, "by source") {
				ch.Match.Source = netip.MustParsePrefix("2001:db8:ff::/48")
			}
			ch.Both = len(ch.Ingress) == 1 && rapid.Bool().Draw(t, "both") && (!local || ch.Ingress[0] != names[0])
			d.Chains = append(d.Chains, ch)
		}
		return d
	})
}
