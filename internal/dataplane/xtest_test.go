package dataplane

import (
	"bytes"
	"maps"
	"net/netip"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
)

func prefix(s string) netip.Prefix {
	if s == "" {
		return netip.Prefix{}
	}
	return netip.MustParsePrefix(s)
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// Prefixes that lie in one another, so that rules meet.
var (
	testDst = []string{"::/0", "2001:db8::/32", "2001:db8:1::/48", "2001:db8:1:1::/64", "2001:db8:1:1::1/128", "2001:db8:2::/48"}
	testSrc = []string{"", "fd00::/8", "fd00:1::/32", "fd00:1:1::/48", "fd00:1:1::1/128"}
	inDst   = []string{"2001:db8:1:1::1", "2001:db8:1:1::2", "2001:db8:1:2::1", "2001:db8:2::1", "2001:db8:3::1", "2620::1"}
	// The same in IPv4.
	testDst4 = []string{"0.0.0.0/0", "198.0.0.0/8", "198.51.0.0/16", "198.51.100.1/32"}
	testSrc4 = []string{"", "203.0.0.0/8", "203.0.113.1/32"}
	inDst4   = []string{"198.51.100.1", "198.51.100.2", "198.0.0.1", "8.8.8.8"}
	inSrc4   = []string{"203.0.113.1", "203.0.113.2", "9.9.9.9"}
	inSrc    = []string{"fd00:1:1::1", "fd00:1:1::2", "fd00:1:2::1", "fd00:2::1", "2620::2"}
)

func testNode() plan.Node {
	return plan.Node{
		Name: "r1", Block: prefix("fc00::/48"), Address: addr("fc00:1::1"), Locator: prefix("fc00:0:0:100::/56"),
	}
}

func testPathID(path uint32, epoch uint8, scheme model.Scheme) plan.PathID {
	return plan.PathID{Path: path, Epoch: epoch, Chain: "c" + string(rune('a'+path%26)), Scheme: scheme}
}

func testShare(position uint8, seed byte) pot.Share {
	s := pot.Share{Position: position, Polynomial: pot.Polynomial{
		Prime: 53, Share: uint64(seed) % 53, Public: 3, LPC: 5, Up: pot.Mask{RND: 1}, Down: pot.Mask{CML: uint64(seed)},
	}}
	copy(s.Key[:], bytes.Repeat([]byte{seed}, 16))
	copy(s.Bind[:], bytes.Repeat([]byte{^seed}, 16))
	return s
}

// ownSID is the n-th SID of testNode, otherSID one of another node.
func ownSID(n int) netip.Addr {
	b := addr("fc00:0:0:100::").As16()
	b[7] = byte(n)
	return netip.AddrFrom16(b)
}

func otherSID(n int) netip.Addr {
	b := addr("fc00:0:0:200::").As16()
	b[7] = byte(n)
	return netip.AddrFrom16(b)
}

func headendOf(path uint32, epoch uint8, scheme model.Scheme, m model.Match, segments int) plan.Headend {
	h := plan.Headend{
		PathID: testPathID(path, epoch, scheme), Match: m, Lane: 0, Lanes: 64, MTU: 1400,
		Share: testShare(0, byte(path)+epoch),
	}
	for i := range segments {
		h.Segments = append(h.Segments, otherSID(i+1))
	}
	return h
}

func endpointOf(path uint32, epoch uint8, scheme model.Scheme, sid netip.Addr) plan.Endpoint {
	return plan.Endpoint{PathID: testPathID(path, epoch, scheme), SID: sid, Function: "fw", Sources: testSources, Share: testShare(1, byte(path)+epoch)}
}

// testSources is the headend of paths that pass a test node or end at it.
var testSources = []netip.Addr{addr("fc00:1::9")}

func egressOf(path uint32, epoch uint8, scheme model.Scheme, m model.Match, sid netip.Addr, segments int) plan.Egress {
	e := plan.Egress{
		PathID: testPathID(path, epoch, scheme), SID: sid, Sources: testSources, Match: m, Share: testShare(uint8(segments), byte(path)+epoch),
		Lanes: 64, Window: 64,
		Verifier: pot.Verifier{Secret: 7},
	}
	for i := range segments - 1 {
		e.Segments = append(e.Segments, otherSID(i+1))
	}
	e.Segments = append(e.Segments, sid)
	for range segments {
		e.Verifier.Keys = append(e.Verifier.Keys, pot.Key{byte(path), epoch})
	}
	return e
}

func drawMatches(t *rapid.T, n int, label string) []model.Match {
	gen := rapid.Custom(func(t *rapid.T) model.Match {
		dst, src := testDst, testSrc
		if rapid.IntRange(0, 2).Draw(t, "IPv4") == 0 {
			dst, src = testDst4, testSrc4
		}
		return model.NewMatch(prefix(rapid.SampledFrom(dst).Draw(t, "dst")), prefix(rapid.SampledFrom(src).Draw(t, "src")))
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

// drawNode draws a plan with up to seven paths in each role.
func drawNode(t *rapid.T) plan.Node {
	n := testNode()
	schemes := rapid.SampledFrom([]model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed})
	paths := func(label string) []uint32 {
		return rapid.SliceOfNDistinct(rapid.Uint32Range(1, 12), 0, 7, rapid.ID[uint32]).Draw(t, label)
	}
	heads := paths("headends")
	for i, m := range drawPriorities(t, drawMatches(t, len(heads), "headend matches")) {
		n.Headends = append(n.Headends, headendOf(heads[i], rapid.Uint8Range(0, 2).Draw(t, "epoch"), schemes.Draw(t, "scheme"), m, rapid.IntRange(1, 16).Draw(t, "segments")))
	}
	for i, p := range paths("endpoints") {
		sid := ownSID(1 + i%3)
		for e := range rapid.Uint8Range(1, 2).Draw(t, "epochs") {
			n.Endpoints = append(n.Endpoints, endpointOf(p, e, schemes.Draw(t, "scheme"), sid))
		}
	}
	drawProxies(t, &n)
	for i := range n.Endpoints { // some paths have several headends
		if n.Endpoints[i].Path%3 == 0 {
			n.Endpoints[i].Sources = append(slices.Clone(testSources), addr("fc00:1::a"))
		}
	}
	ends := paths("egresses")
	for i, m := range drawPriorities(t, drawMatches(t, len(ends), "egress matches")) {
		sid := ownSID(10 + int(ends[i]))
		for e := range rapid.Uint8Range(1, 2).Draw(t, "epochs") {
			n.Egresses = append(n.Egresses, egressOf(ends[i], e, schemes.Draw(t, "scheme"), m, sid, rapid.IntRange(1, 16).Draw(t, "segments")))
		}
	}
	return n
}

// drawNext draws the plan after n, and the node's own addresses after local. Of
// its headends, and of its egresses, often those by prefixes or by ordered rules
// stay what they are, or both do, headends in this epoch or the next.
func drawNext(t *rapid.T, n plan.Node, local []netip.Addr) (plan.Node, []netip.Addr) {
	next := drawNode(t)
	if rapid.IntRange(0, 3).Draw(t, "other own addresses") == 0 {
		local = drawLocal(t)
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
		if stay(h.Match) {
			h.Epoch += rapid.Uint8Range(0, 1).Draw(t, "next epoch")
			heads, taken[h.Path] = append(heads, h), true
		}
	}
	for _, h := range next.Headends {
		if !stay(h.Match) && !taken[h.Path] {
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

func drawLocal(t *rapid.T) []netip.Addr {
	var out []netip.Addr
	for _, s := range rapid.SliceOfDistinct(rapid.SampledFrom(slices.Concat(inDst, inDst4)), rapid.ID[string]).Draw(t, "own addresses") {
		out = append(out, addr(s))
	}
	return out
}

// lookUp does what bpf/lib/match/classify.h does: slowly.
func lookUp(dst map[dstKey]match, src map[srcKey]match, from, to netip.Addr) match {
	m := covering(dst, encodeDst(netip.PrefixFrom(to, to.BitLen())))
	if m.Action != uint8(abi.MatchActionSource) {
		return m
	}
	for bits := from.BitLen(); bits >= 0; bits-- {
		if s, ok := src[encodeSrc(m.Target, netip.PrefixFrom(from, bits))]; ok {
			return match{Target: s.Target, Action: s.Action, Local: m.Local}
		}
	}
	return match{Local: m.Local}
}

// lookUpRule does what bpf/lib/match/rules.h does for packets of which nothing but the
// addresses counts: the first rule that is for the headend, or for the guard. It
// reads all pieces, where the programs search.
func (t tables) lookUpRule(steer bool, from, to netip.Addr) (target uint32) {
	set, ok := t.rules[0]
	if !ok {
		return 0
	}
	use, targets, version := abi.RuleUseSuspect, &set.Require, 0
	if steer {
		use, targets = abi.RuleUseSteer, &set.Steer
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
	w := hostWords(a)
	next := slices.IndexFunc(from, func(f [2]uint64) bool { return compareAddrs(f, w) > 0 })
	if next < 0 {
		next = len(from)
	}
	return next - 1
}

// do applies an op to tables.
func (t tables) do(o op) {
	switch k := o.key.(type) {
	case *abi.HopKey:
		switch v := o.value.(type) {
		case *abi.Hop:
			t.hops[*k] = *v
		case *uint32:
			t.sids[*k] = *v
		default:
			if o.table == tableSIDs {
				delete(t.sids, *k)
			} else {
				delete(t.hops, *k)
			}
		}
	case *abi.SourceKey:
		set(t.sources, k, o.value)
	case *abi.EgressKey:
		set(t.egresses, k, o.value)
	case *uint32:
		switch o.table {
		case tableMatch:
			p, of := o.value.(*prefixes), t.prefixes()[abi.MatchUse(*k)]
			clear(of.dst)
			clear(of.src)
			maps.Copy(of.dst, p.dst)
			maps.Copy(of.src, p.src)
		case tablePorts:
			set(t.ports, k, o.value)
		case tableRules:
			set(t.rules, k, o.value)
		case tableProxies:
			set(t.proxies, k, o.value)
		case tablePaths:
			set(t.paths, k, o.value)
		default:
			set(t.headends, k, o.value)
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

func (t tables) clone() tables {
	return tables{
		maps.Clone(t.hops), maps.Clone(t.sids), maps.Clone(t.sources), maps.Clone(t.egresses), maps.Clone(t.headends), maps.Clone(t.paths),
		maps.Clone(t.matchDst), maps.Clone(t.matchSrc), maps.Clone(t.guardDst), maps.Clone(t.guardSrc), maps.Clone(t.ports),
		maps.Clone(t.proxies), maps.Clone(t.localDst), maps.Clone(t.localSrc), maps.Clone(t.rules),
	}
}

func equalTables(a, b tables) bool {
	return maps.Equal(a.hops, b.hops) && maps.Equal(a.sids, b.sids) && maps.Equal(a.sources, b.sources) && maps.Equal(a.egresses, b.egresses) &&
		maps.Equal(a.headends, b.headends) && maps.Equal(a.paths, b.paths) && maps.Equal(a.matchDst, b.matchDst) && maps.Equal(a.matchSrc, b.matchSrc) &&
		maps.Equal(a.guardDst, b.guardDst) && maps.Equal(a.guardSrc, b.guardSrc) && maps.Equal(a.ports, b.ports) &&
		maps.Equal(a.proxies, b.proxies) && maps.Equal(a.localDst, b.localDst) && maps.Equal(a.localSrc, b.localSrc) && maps.Equal(a.rules, b.rules)
}

func sortedKeys[V any](m map[uint32]V) []uint32 { return slices.Sorted(maps.Keys(m)) }
