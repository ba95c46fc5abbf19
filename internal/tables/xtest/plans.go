// Package xtest has plans, drawn at random or written down, and slow models of
// tables, for the tests of internal/tables and of internal/dataplane. Nothing else
// imports it.
package xtest

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/tables"
)

func Prefix(s string) netip.Prefix {
	if s == "" {
		return netip.Prefix{}
	}
	return netip.MustParsePrefix(s)
}

func Addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// Prefixes that lie in one another, so that rules meet.
var (
	testDst = []string{"::/0", "2001:db8::/32", "2001:db8:1::/48", "2001:db8:1:1::/64", "2001:db8:1:1::1/128", "2001:db8:2::/48"}
	Src     = []string{"", "fd00::/8", "fd00:1::/32", "fd00:1:1::/48", "fd00:1:1::1/128"}
	InDst   = []string{"2001:db8:1:1::1", "2001:db8:1:1::2", "2001:db8:1:2::1", "2001:db8:2::1", "2001:db8:3::1", "2620::1"}
	// The same in IPv4.
	testDst4 = []string{"0.0.0.0/0", "198.0.0.0/8", "198.51.0.0/16", "198.51.100.1/32"}
	testSrc4 = []string{"", "203.0.0.0/8", "203.0.113.1/32"}
	InDst4   = []string{"198.51.100.1", "198.51.100.2", "198.0.0.1", "8.8.8.8"}
	InSrc4   = []string{"203.0.113.1", "203.0.113.2", "9.9.9.9"}
	InSrc    = []string{"fd00:1:1::1", "fd00:1:1::2", "fd00:1:2::1", "fd00:2::1", "2620::2"}
)

func Node() plan.Node {
	return plan.Node{
		Name: "r1", Block: Prefix("fc00::/48"), Address: Addr("fc00:1::1"), Locator: Prefix("fc00:0:0:100::/56"),
	}
}

func testPathID(path uint32, epoch uint8, scheme model.Scheme) plan.PathID {
	return plan.PathID{Path: path, Epoch: epoch, Chain: "c" + string(rune('a'+path%26)), Scheme: scheme}
}

func Share(position uint8, seed byte) pot.Share {
	s := pot.Share{Position: position, Polynomial: pot.Polynomial{
		Prime: 53, Share: uint64(seed) % 53, Public: 3, LPC: 5, Up: pot.Mask{RND: 1}, Down: pot.Mask{CML: uint64(seed)},
	}}
	copy(s.Key[:], bytes.Repeat([]byte{seed}, 16))
	copy(s.Bind[:], bytes.Repeat([]byte{^seed}, 16))
	return s
}

// OwnSID is the n-th SID of testNode, otherSID one of another node.
func OwnSID(n int) netip.Addr {
	b := Addr("fc00:0:0:100::").As16()
	b[7] = byte(n)
	return netip.AddrFrom16(b)
}

func OtherSID(n int) netip.Addr {
	b := Addr("fc00:0:0:200::").As16()
	b[7] = byte(n)
	return netip.AddrFrom16(b)
}

func HeadendOf(path uint32, epoch uint8, scheme model.Scheme, m model.Match, segments int) plan.Headend {
	h := plan.Headend{
		PathID: testPathID(path, epoch, scheme), Match: m, Lane: 0, Lanes: 64, MTU: 1400,
		Share: Share(0, byte(path)+epoch),
	}
	for i := range segments {
		h.Segments = append(h.Segments, OtherSID(i+1))
	}
	return h
}

func EndpointOf(path uint32, epoch uint8, scheme model.Scheme, sid netip.Addr) plan.Endpoint {
	return plan.Endpoint{PathID: testPathID(path, epoch, scheme), SID: sid, Function: "fw", Sources: Sources, Share: Share(1, byte(path)+epoch)}
}

// Sources is the headend of paths that pass a test node or end at it.
var Sources = []netip.Addr{Addr("fc00:1::9")}

func EgressOf(path uint32, epoch uint8, scheme model.Scheme, m model.Match, sid netip.Addr, segments int) plan.Egress {
	e := plan.Egress{
		PathID: testPathID(path, epoch, scheme), SID: sid, Sources: Sources, Match: m, Share: Share(uint8(segments), byte(path)+epoch),
		Lanes: 64, Window: 64,
		Verifier: pot.Verifier{Secret: 7},
	}
	for i := range segments - 1 {
		e.Segments = append(e.Segments, OtherSID(i+1))
	}
	e.Segments = append(e.Segments, sid)
	for range segments {
		e.Verifier.Keys = append(e.Verifier.Keys, pot.Key{byte(path), epoch})
	}
	return e
}

func drawMatches(t *rapid.T, n int, label string) []model.Match {
	gen := rapid.Custom(func(t *rapid.T) model.Match {
		dst, src := testDst, Src
		if rapid.IntRange(0, 2).Draw(t, "IPv4") == 0 {
			dst, src = testDst4, testSrc4
		}
		return model.NewMatch(Prefix(rapid.SampledFrom(dst).Draw(t, "dst")), Prefix(rapid.SampledFrom(src).Draw(t, "src")))
	})
	return rapid.SliceOfNDistinct(gen, n, n, func(m model.Match) model.Match { return m }).Draw(t, label)
}

// drawPriorities makes ordered rules of some matches.
func drawPriorities(t *rapid.T, ms []model.Match) []model.Match {
	for i := range ms {
		ms[i].Priority = rapid.SampledFrom([]uint16{0, 0, 10, 20}).Draw(t, "priority")
	}
	return ms
}

// DrawNode draws a plan with up to seven paths in each role.
func DrawNode(t *rapid.T) plan.Node {
	n := Node()
	schemes := rapid.SampledFrom([]model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed})
	paths := func(label string) []uint32 {
		return rapid.SliceOfNDistinct(rapid.Uint32Range(1, 12), 0, 7, rapid.ID[uint32]).Draw(t, label)
	}
	heads := paths("headends")
	for i, m := range drawPriorities(t, drawMatches(t, len(heads), "headend matches")) {
		n.Headends = append(n.Headends, HeadendOf(heads[i], rapid.Uint8Range(0, 2).Draw(t, "epoch"), schemes.Draw(t, "scheme"), m, rapid.IntRange(1, 16).Draw(t, "segments")))
	}
	for i, p := range paths("endpoints") {
		sid := OwnSID(1 + i%3)
		for e := range rapid.Uint8Range(1, 2).Draw(t, "epochs") {
			n.Endpoints = append(n.Endpoints, EndpointOf(p, e, schemes.Draw(t, "scheme"), sid))
		}
	}
	drawProxies(t, &n)
	drawOrigins(t, &n)
	for i := range n.Endpoints { // some paths have several headends
		if n.Endpoints[i].Path%3 == 0 {
			n.Endpoints[i].Sources = append(slices.Clone(Sources), Addr("fc00:1::a"))
		}
	}
	ends := paths("egresses")
	for i, m := range drawPriorities(t, drawMatches(t, len(ends), "egress matches")) {
		sid, guard := OwnSID(10+int(ends[i])), rapid.SampledFrom(Guards).Draw(t, "guard")
		for e := range rapid.Uint8Range(1, 2).Draw(t, "epochs") {
			n.Egresses = append(n.Egresses, EgressOf(ends[i], e, schemes.Draw(t, "scheme"), m, sid, rapid.IntRange(1, 16).Draw(t, "segments")))
			n.Egresses[len(n.Egresses)-1].Guard = guard
		}
	}
	return n
}

// Guards are those that tests draw from: mostly none is said.
var Guards = []model.Guard{model.GuardUnset, model.GuardUnset, model.GuardUnset, model.GuardOff, model.GuardAudit, model.GuardEnforce}

// DrawNext draws the plan after n, and the node's own addresses after local. Of
// its headends, and of its egresses, often those by prefixes or by ordered rules
// stay what they are, or both do, headends in this epoch or the next.
func DrawNext(t *rapid.T, n plan.Node, local []netip.Addr) (plan.Node, []netip.Addr) {
	next := DrawNode(t)
	if rapid.IntRange(0, 3).Draw(t, "other own addresses") == 0 {
		local = DrawLocal(t)
	}
	changing := rapid.SampledFrom([]string{"headends", "egresses", "both"}).Draw(t, "changing")
	stays := func(label string) func(model.Match) bool {
		if changing != "both" && changing != label {
			return func(model.Match) bool { return true }
		}
		byPrefix, ordered := rapid.Bool().Draw(t, label+" by prefixes stay"), rapid.Bool().Draw(t, label+" by ordered rules stay")
		return func(m model.Match) bool { return m.Ordered() && ordered || !m.Ordered() && byPrefix }
	}
	taken := map[uint32]bool{}
	stay := stays("headends")
	var heads []plan.Headend
	for _, h := range n.Headends {
		if stay(h.Match) && h.From == "" {
			h.Epoch += rapid.Uint8Range(0, 1).Draw(t, "next epoch")
			heads, taken[h.Path] = append(heads, h), true
		}
	}
	for _, h := range next.Headends {
		if (!stay(h.Match) || h.From != "") && !taken[h.Path] {
			heads = append(heads, h)
		}
	}
	taken = map[uint32]bool{}
	stay = stays("egresses")
	var ends []plan.Egress
	for _, e := range n.Egresses {
		if stay(e.Match) {
			ends, taken[e.Path] = append(ends, e), true
		}
	}
	for _, e := range next.Egresses {
		if !stay(e.Match) && !taken[e.Path] {
			ends = append(ends, e)
		}
	}
	next.Headends, next.Egresses = heads, ends
	return next, local
}

// drawProxies puts some of the endpoints into functions with a proxy.
func drawProxies(t *rapid.T, n *plan.Node) {
	for _, name := range rapid.SliceOfDistinct(rapid.SampledFrom([]string{"fw", "nat", "ids", "tap"}), rapid.ID[string]).Draw(t, "functions") {
		p := plan.Proxy{Function: name, Proxy: model.Proxy{
			Local: rapid.Bool().Draw(t, "local"), To: "to-" + name, From: "from-" + name,
			OnUnknown: rapid.SampledFrom([]model.OnUnknown{model.OnUnknownDrop, model.OnUnknownPlain}).Draw(t, "on unknown"),
			Segments:  rapid.SampledFrom([]model.Segments{model.SegmentsCut, model.SegmentsKeep}).Draw(t, "segments"),
			Cache:     rapid.IntRange(1, 1000).Draw(t, "cache"), Lifetime: time.Second,
		}}
		if p.Local || rapid.Bool().Draw(t, "metadata") {
			p.Recognise = model.RecogniseMetadata
		}
		if p.Local {
			p.Matches = drawMatches(t, rapid.IntRange(0, 4).Draw(t, "matches"), "local matches")
		}
		n.Proxies = append(n.Proxies, p)
	}
	for i := range n.Endpoints {
		if len(n.Proxies) > 0 {
			n.Endpoints[i].Behaviour, n.Endpoints[i].Function = model.BehaviourEndAD, n.Proxies[i%len(n.Proxies)].Function
		}
	}
}

// drawOrigins lets paths start at some of the functions. Each function has ids of its
// own for them.
func drawOrigins(t *rapid.T, n *plan.Node) {
	for i := range n.Proxies {
		p := &n.Proxies[i]
		if p.Local || p.Recognise != model.RecogniseMetadata || !rapid.Bool().Draw(t, "originates") {
			continue
		}
		p.OnUnknown = model.OnUnknownOriginate
		for j, m := range drawPriorities(t, drawMatches(t, rapid.IntRange(0, 4).Draw(t, "paths from it"), "origin matches")) {
			h := HeadendOf(OriginPath(p.Function)+uint32(j), rapid.Uint8Range(0, 1).Draw(t, "epoch"), model.SchemeKeyed, m, 2)
			h.From = p.Function
			n.Headends = append(n.Headends, h)
		}
	}
}

// OriginPath is the first id of drawn paths that start at a function.
func OriginPath(function string) uint32 {
	return 100 + 10*uint32(slices.Index([]string{"fw", "nat", "ids", "tap"}, function))
}

func DrawLocal(t *rapid.T) []netip.Addr {
	var out []netip.Addr
	for _, s := range rapid.SliceOfDistinct(rapid.SampledFrom(slices.Concat(InDst, InDst4)), rapid.ID[string]).Draw(t, "own addresses") {
		out = append(out, Addr(s))
	}
	return out
}

// LookUp does what bpf/lib/match/classify.h does: slowly.
func LookUp(dst map[tables.DstKey]tables.Match, src map[tables.SrcKey]tables.Match, from, to netip.Addr) tables.Match {
	m := tables.Covering(dst, tables.EncodeDst(netip.PrefixFrom(to, to.BitLen())))
	if m.Action != uint8(abi.MatchActionSource) {
		return m
	}
	for bits := from.BitLen(); bits >= 0; bits-- {
		if s, ok := src[tables.EncodeSrc(m.Target, netip.PrefixFrom(from, bits))]; ok {
			return tables.Match{Target: s.Target, Action: s.Action, Local: m.Local}
		}
	}
	return tables.Match{Local: m.Local}
}

// LookUpRule does what bpf/lib/match/rules.h does for packets of which nothing but the
// addresses counts: the first rule that is for the headend, or for the guard. It
// reads all pieces, where the programs search.
func LookUpRule(t tables.Contents, steer bool, from, to netip.Addr) (target uint32) {
	if steer {
		return lookUpRule(t, abi.RuleUseSteer, from, to)
	}
	return lookUpRule(t, abi.RuleUseSuspect, from, to)
}

// LookUpOrigin is the path that takes what a function makes; 0: none does.
func LookUpOrigin(t tables.Contents, proxy uint32, from, to netip.Addr) (path uint32, err error) {
	origin := t.Proxies[proxy].Origin
	if origin == 0 {
		return 0, nil
	}
	m := LookUp(t.Origins[origin].Dst, t.Origins[origin].Src, from, to)
	if rule := lookUpRule(t, abi.RuleUse(abi.RuleOrigin-1+origin), from, to); rule != 0 {
		m.Action, m.Target = uint8(abi.MatchActionPath), rule-1
	}
	if m.Action != uint8(abi.MatchActionPath) {
		return 0, nil
	}
	h, ok := t.Headends[m.Target]
	if !ok {
		return 0, fmt.Errorf("the rule of proxy %d names headend %d, which is not there", proxy, m.Target)
	}
	return h.Path, nil
}

func lookUpRule(t tables.Contents, use abi.RuleUse, from, to netip.Addr) (target uint32) {
	set, ok := t.Rules[0]
	if !ok {
		return 0
	}
	steer := use != abi.RuleUseSuspect
	targets, version := &set.Require, 0
	if steer {
		targets = &set.Steer
	}
	if to.Is4() {
		version = 1
	}
	fit := set.Use[use][version]
	for w := range fit {
		fit[w] &= set.Dst.Fit[pieceOf(set.Dst.From[:], to)][w] & set.Src.Fit[pieceOf(set.Src.From[:], from)][w]
	}
	for i, target := range targets {
		if fit[i/64]>>(i%64)&1 != 0 {
			if steer {
				target &= abi.RuleTarget
			}
			return target
		}
	}
	return 0
}

// pieceOf is where the last piece begins that does not begin behind the address.
func pieceOf(from [][2]uint64, a netip.Addr) int {
	w := tables.HostWords(a)
	next := slices.IndexFunc(from, func(f [2]uint64) bool { return tables.CompareAddrs(f, w) > 0 })
	if next < 0 {
		next = len(from)
	}
	return next - 1
}

// do applies an op to tables.
func DoOp(t tables.Contents, o tables.Op) {
	switch k := o.Key.(type) {
	case *abi.HopKey:
		switch v := o.Value.(type) {
		case *abi.Hop:
			t.Hops[*k] = *v
		case *uint32:
			t.Sids[*k] = *v
		default:
			if o.Table == tables.MapSIDs {
				delete(t.Sids, *k)
			} else {
				delete(t.Hops, *k)
			}
		}
	case *abi.ServiceKey:
		set(t.Services, k, o.Value)
	case *abi.SourceKey:
		set(t.Sources, k, o.Value)
	case *abi.EgressKey:
		set(t.Egresses, k, o.Value)
	case *uint32:
		switch o.Table {
		case tables.MapMatch:
			p, of := o.Value.(*tables.Prefixes), t.ByUse()[abi.MatchUse(*k)]
			if *k >= abi.MatchOrigin {
				t.Origins[uint8(*k-abi.MatchOrigin+1)] = tables.Prefixes{Dst: maps.Clone(p.Dst), Src: maps.Clone(p.Src)}
				return
			}
			clear(of.Dst)
			clear(of.Src)
			maps.Copy(of.Dst, p.Dst)
			maps.Copy(of.Src, p.Src)
		case tables.MapPorts:
			set(t.Ports, k, o.Value)
		case tables.MapRules:
			set(t.Rules, k, o.Value)
		case tables.MapProxies:
			set(t.Proxies, k, o.Value)
		case tables.MapPaths:
			set(t.Paths, k, o.Value)
		case tables.MapStreams:
			set(t.Streams, k, o.Value)
		case tables.MapGuards:
			set(t.Guards, k, o.Value)
		default:
			set(t.Headends, k, o.Value)
		}
	default:
		panic("an op of an unknown table")
	}
}

func set[K comparable, V any](m map[K]V, k *K, v any) {
	if v == nil {
		delete(m, *k)
		return
	}
	m[*k] = *v.(*V)
}

func CloneTables(t tables.Contents) tables.Contents {
	origins := map[uint8]tables.Prefixes{}
	for o, p := range t.Origins {
		origins[o] = tables.Prefixes{Dst: maps.Clone(p.Dst), Src: maps.Clone(p.Src)}
	}
	return tables.Contents{
		Hops: maps.Clone(t.Hops), Sids: maps.Clone(t.Sids), Sources: maps.Clone(t.Sources), Egresses: maps.Clone(t.Egresses), Headends: maps.Clone(t.Headends), Paths: maps.Clone(t.Paths), Guards: maps.Clone(t.Guards), Streams: maps.Clone(t.Streams),
		MatchDst: maps.Clone(t.MatchDst), MatchSrc: maps.Clone(t.MatchSrc), GuardDst: maps.Clone(t.GuardDst), GuardSrc: maps.Clone(t.GuardSrc), Ports: maps.Clone(t.Ports),
		Proxies: maps.Clone(t.Proxies), LocalDst: maps.Clone(t.LocalDst), LocalSrc: maps.Clone(t.LocalSrc), Rules: maps.Clone(t.Rules),
		Origins: origins,
	}
}

func EqualTables(a, b tables.Contents) bool {
	return maps.Equal(a.Hops, b.Hops) && maps.Equal(a.Sids, b.Sids) && maps.Equal(a.Sources, b.Sources) && maps.Equal(a.Egresses, b.Egresses) &&
		maps.Equal(a.Headends, b.Headends) && maps.Equal(a.Paths, b.Paths) && maps.Equal(a.Guards, b.Guards) && maps.Equal(a.Streams, b.Streams) && maps.Equal(a.MatchDst, b.MatchDst) && maps.Equal(a.MatchSrc, b.MatchSrc) &&
		maps.Equal(a.GuardDst, b.GuardDst) && maps.Equal(a.GuardSrc, b.GuardSrc) && maps.Equal(a.Ports, b.Ports) &&
		maps.Equal(a.Proxies, b.Proxies) && maps.Equal(a.LocalDst, b.LocalDst) && maps.Equal(a.LocalSrc, b.LocalSrc) && maps.Equal(a.Rules, b.Rules) &&
		maps.EqualFunc(originsOf(a), originsOf(b), tables.Prefixes.Equal)
}

// originsOf are the tables of functions that have rules in them.
func originsOf(t tables.Contents) map[uint8]tables.Prefixes {
	out := maps.Clone(t.Origins)
	maps.DeleteFunc(out, func(_ uint8, p tables.Prefixes) bool { return len(p.Dst) == 0 })
	return out
}

func sortedKeys[V any](m map[uint32]V) []uint32 { return slices.Sorted(maps.Keys(m)) }
