package dataplane

import (
	"errors"
	"maps"

	"github.com/waystamp/waystamp/internal/abi"
)

// tables is what the maps hold that user space alone writes. Two of them are
// compared to learn what must be done.
type tables struct {
	hops     map[abi.HopKey]abi.Hop
	sids     map[abi.HopKey]uint32
	sources  map[abi.SourceKey]uint32
	egresses map[abi.EgressKey]abi.Egress
	headends map[uint32]abi.Headend
	paths    map[uint32]uint32 // that it is a headend of, as __be32: index in headends
	matchDst map[dstKey]match
	matchSrc map[srcKey]match
	guardDst map[dstKey]match
	guardSrc map[srcKey]match
	ports    map[uint32]abi.Port
	proxies  map[uint32]abi.Proxy
	localDst map[dstKey]match
	localSrc map[srcKey]match
	rules    map[uint32]abi.Ruleset // at 0, if there are any
}

func newTables() tables {
	return tables{
		hops: map[abi.HopKey]abi.Hop{}, sids: map[abi.HopKey]uint32{}, sources: map[abi.SourceKey]uint32{}, egresses: map[abi.EgressKey]abi.Egress{},
		headends: map[uint32]abi.Headend{}, paths: map[uint32]uint32{},
		matchDst: map[dstKey]match{}, matchSrc: map[srcKey]match{},
		guardDst: map[dstKey]match{}, guardSrc: map[srcKey]match{},
		ports: map[uint32]abi.Port{}, proxies: map[uint32]abi.Proxy{},
		localDst: map[dstKey]match{}, localSrc: map[srcKey]match{}, rules: map[uint32]abi.Ruleset{},
	}
}

// prefixes are the rules by prefixes, by what they are for.
func (t tables) prefixes() map[abi.MatchUse]prefixes {
	return map[abi.MatchUse]prefixes{
		abi.MatchUseSteer:   {t.matchDst, t.matchSrc},
		abi.MatchUseRequire: {t.guardDst, t.guardSrc},
		abi.MatchUseLocal:   {t.localDst, t.localSrc},
	}
}

// table names a map of the data path.
type table string

const (
	tableNode        table = "ws_node"
	tableHops        table = "ws_hops"      // an array; ops name its entries by hopKey
	tableHopIndex    table = "ws_hop_index" // where they are
	tablePlaces      table = "ws_places"
	tableSIDs        table = "ws_sids"
	tableSources     table = "ws_sources"
	tableEgresses    table = "ws_egresses" // as tableHops
	tableEgressIndex table = "ws_egress_index"
	tableWindows     table = "ws_windows"
	tableHeadends    table = "ws_headends"
	tablePaths       table = "ws_paths"
	tablePathMTUs    table = "ws_path_mtus"
	tableNumbers     table = "ws_numbers"
	tableStats       table = "ws_stats"
	tableMatch       table = "ws_match" // ops name its entries by use, and replace them whole
	tableRules       table = "ws_rules"
	tablePorts       table = "ws_ports"
	tableExits       table = "ws_exits"
	tableNexthops    table = "ws_nexthops"
	tableProxies     table = "ws_proxies"
	tableProxyStats  table = "ws_proxy_stats"
	tableBuckets     table = "ws_buckets"
	tableCache       table = "ws_cache"
	tableCopies      table = "ws_copies"
	tableSlots       table = "ws_slots"
	tableRefusals    table = "ws_refusals"
	tableErrors      table = "ws_errors"
	tableEvents      table = "ws_events"
	tablePrograms    table = "ws_programs"
)

// op is one change of one map: a pointer to the value is put, or without one
// the entry is deleted.
type op struct {
	table      table
	key, value any
}

func (o op) remove() bool { return o.value == nil }

// changes are the ops that lead from have to want, in an order in which a
// packet meets a whole state at every step, or is refused:
//
//   - what the guard requires is added first and given up last, so that no
//     packet that needs a proof before and after slips by in between;
//   - what a headend's packets need on this node is there before they come, and
//     stays until they are gone;
//   - a proxy is there before a SID, an interface or a rule names it, and what
//     must pass a local function is known before the first packet comes to it;
//   - a rule is there only while its headend, and its source class, are.
//
// There is no such order where together says so.
//
// Rules by prefixes are replaced as a whole, twice: by the new ones over the old
// ones, and by the new ones alone. A packet meets its old rule until it meets its
// new one, and never a third.
func changes(have, want tables) []op {
	var ops []op
	both := map[abi.MatchUse]prefixes{}
	for use, p := range want.prefixes() {
		both[use] = p.over(have.prefixes()[use])
	}
	before, after := have.prefixes(), want.prefixes()
	swap := func(use abi.MatchUse, from, to map[abi.MatchUse]prefixes) { ops = swaps(ops, use, from[use], to[use]) }
	swap(abi.MatchUseRequire, before, both)
	ops = puts(ops, tableProxies, have.proxies, want.proxies)
	swap(abi.MatchUseLocal, before, both)
	ops = puts(ops, tableSIDs, have.sids, want.sids)
	ops = puts(ops, tableSources, have.sources, want.sources)
	ops = puts(ops, tableEgresses, have.egresses, want.egresses)
	ops = puts(ops, tablePorts, have.ports, want.ports)
	ops = puts(ops, tableHops, have.hops, want.hops)
	ops = puts(ops, tableHeadends, have.headends, want.headends)
	ops = puts(ops, tablePaths, have.paths, want.paths)
	swap(abi.MatchUseSteer, before, both)
	ops = puts(ops, tableRules, have.rules, want.rules)

	ops = deletes(ops, tableRules, have.rules, want.rules)
	swap(abi.MatchUseSteer, both, after)
	ops = deletes(ops, tablePaths, have.paths, want.paths)
	ops = deletes(ops, tableHeadends, have.headends, want.headends)
	ops = deletes(ops, tableHops, have.hops, want.hops)
	ops = deletes(ops, tableEgresses, have.egresses, want.egresses)
	ops = deletes(ops, tableSources, have.sources, want.sources)
	ops = deletes(ops, tableSIDs, have.sids, want.sids)
	swap(abi.MatchUseLocal, both, after)
	swap(abi.MatchUseRequire, both, after)
	return ops
}

// errTogether: no order of changes takes a packet from a prefix to an ordered rule,
// or back, at once. That needs a new generation.
var errTogether = errors.New("ordered rules and prefixes change together")

// together: do the paths of ordered rules differ as well as those of prefixes?
// Where only one of them does, a packet that an ordered rule covers meets either
// its old path or its new one at every step, and any other packet, too. Tables by
// source do not differ where those by destination do not: see classes.
func together(have, want tables) bool {
	if maps.Equal(have.rulesByPath(), want.rulesByPath()) {
		return false
	}
	return !maps.Equal(have.guardDst, want.guardDst) ||
		!maps.Equal(byPath(have.matchDst, have.headends), byPath(want.matchDst, want.headends))
}

// byPath names paths where the maps name headends: a path's next epoch has another
// one, and that packets meet the old or the new one is no matter.
func byPath(of map[dstKey]match, headends map[uint32]abi.Headend) map[dstKey]match {
	out := maps.Clone(of)
	for k, m := range out {
		if m.Action == uint8(abi.MatchActionPath) {
			m.Target = headends[m.Target].Path
			out[k] = m
		}
	}
	return out
}

func (t tables) rulesByPath() map[uint32]abi.Ruleset {
	out := maps.Clone(t.rules)
	for k, set := range out {
		for i, steer := range set.Steer {
			if steer != 0 {
				set.Steer[i] = t.headends[steer&abi.RuleTarget-1].Path
			}
		}
		out[k] = set
	}
	return out
}

func puts[K, V comparable](ops []op, t table, have, want map[K]V) []op {
	for k, v := range want {
		if old, ok := have[k]; !ok || old != v {
			ops = append(ops, op{t, &k, &v})
		}
	}
	return ops
}

func deletes[K, V comparable](ops []op, t table, have, want map[K]V) []op {
	for k := range have {
		if _, ok := want[k]; !ok {
			ops = append(ops, op{t, &k, nil})
		}
	}
	return ops
}

// leftBehind are the ops for interfaces that waystamp has left, and for the
// functions behind them: until then the programs on them look both up.
func leftBehind(have, want tables) []op {
	ops := deletes(nil, tablePorts, have.ports, want.ports)
	return deletes(ops, tableProxies, have.proxies, want.proxies)
}

// withLocal adds this node's own addresses to rules: an entry each that says
// what the longest rule covering the address says, and that it is local.
func withLocal(dst map[dstKey]match, local []dstKey) map[dstKey]match {
	out := maps.Clone(dst)
	for _, k := range local {
		m := covering(dst, k)
		m.Local = 1
		out[k] = m
	}
	return out
}

// covering is what the longest rule says that covers the address k.
func covering(dst map[dstKey]match, k dstKey) match {
	for bits := k.Prefixlen + 1; bits > 0; bits-- {
		if m, ok := dst[truncated(k, bits-1)]; ok {
			return m
		}
	}
	return match{Action: uint8(abi.MatchActionNone)}
}

func truncated(k dstKey, bits uint32) dstKey {
	t := dstKey{Prefixlen: bits}
	copy(t.Addr[:], k.Addr[:bits/8])
	if r := bits % 8; r != 0 {
		t.Addr[bits/8] = k.Addr[bits/8] &^ (0xff >> r)
	}
	return t
}
