// Package tables computes the wanted content of the maps of a node's data path: from a plan,
// from a description of the node's machine (Wiring), and from the present content, in the
// layouts of internal/abi. It determines the order in which one content replaces another so that
// no step opens a hole, and the place of each path in the slabs of replay windows and packet
// numbers. It is pure: it reads and writes no map; internal/dataplane does.
package tables

import (
	"errors"
	"maps"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
)

// Contents is the content of the maps that only user space writes. Changes compares two of them.
type Contents struct {
	Hops     map[abi.HopKey]abi.Hop
	Sids     map[abi.HopKey]uint32
	Sources  map[abi.SourceKey]uint32
	Egresses map[abi.EgressKey]abi.Egress
	Headends map[uint32]abi.Headend
	Paths    map[uint32]uint32         // that it is a headend of, as __be32: index in headends
	Streams  map[uint32]abi.Stream     // by the path as __be32 that ends at a function on byte streams
	Services map[abi.ServiceKey]uint32 // where clients connect to a gateway: its proxy
	Labels   map[uint32]abi.Label      // where nodes are, by their label
	Guards   map[uint32]uint32         // the guard setting of the chain of a path that ends here, by the path as __be32
	MatchDst map[DstKey]Match
	MatchSrc map[SrcKey]Match
	GuardDst map[DstKey]Match
	GuardSrc map[SrcKey]Match
	Ports    map[uint32]abi.Port
	Proxies  map[uint32]abi.Proxy
	LocalDst map[DstKey]Match
	LocalSrc map[SrcKey]Match
	Rules    map[uint32]abi.Ruleset // at 0, if there are any
	// Origins are the rules by prefixes of functions that originate, by
	// abi.Proxy.Origin. One without rules may be there, or not.
	Origins map[uint8]Prefixes
}

func New() Contents {
	return Contents{
		Hops: map[abi.HopKey]abi.Hop{}, Sids: map[abi.HopKey]uint32{}, Sources: map[abi.SourceKey]uint32{}, Egresses: map[abi.EgressKey]abi.Egress{},
		Headends: map[uint32]abi.Headend{}, Paths: map[uint32]uint32{}, Guards: map[uint32]uint32{}, Streams: map[uint32]abi.Stream{}, Services: map[abi.ServiceKey]uint32{}, Labels: map[uint32]abi.Label{},
		MatchDst: map[DstKey]Match{}, MatchSrc: map[SrcKey]Match{},
		GuardDst: map[DstKey]Match{}, GuardSrc: map[SrcKey]Match{},
		Ports: map[uint32]abi.Port{}, Proxies: map[uint32]abi.Proxy{},
		LocalDst: map[DstKey]Match{}, LocalSrc: map[SrcKey]Match{}, Rules: map[uint32]abi.Ruleset{},
		Origins: map[uint8]Prefixes{},
	}
}

// ByUse returns the rules by prefixes, by their use.
func (t Contents) ByUse() map[abi.MatchUse]Prefixes {
	uses := map[abi.MatchUse]Prefixes{
		abi.MatchUseSteer:   {t.MatchDst, t.MatchSrc},
		abi.MatchUseRequire: {t.GuardDst, t.GuardSrc},
		abi.MatchUseLocal:   {t.LocalDst, t.LocalSrc},
	}
	for origin, p := range t.Origins {
		uses[originUse(origin)] = p
	}
	return uses
}

// originUse is the table of a function that originates.
func originUse(origin uint8) abi.MatchUse { return abi.MatchUse(abi.MatchOrigin - 1 + origin) }

// Map names a map of the data path.
type Map string

const (
	MapNode        Map = "ws_node"
	MapHops        Map = "ws_hops"      // an array; ops name its entries by hopKey
	MapHopIndex    Map = "ws_hop_index" // where they are
	MapPlaces      Map = "ws_places"
	MapSIDs        Map = "ws_sids"
	MapSources     Map = "ws_sources"
	MapEgresses    Map = "ws_egresses" // as tableHops
	MapEgressIndex Map = "ws_egress_index"
	MapWindows     Map = "ws_windows"
	MapHeadends    Map = "ws_headends"
	MapPaths       Map = "ws_paths"
	MapGuards      Map = "ws_guards"
	MapStreams     Map = "ws_streams"
	MapServices    Map = "ws_services"
	MapConns       Map = "ws_conns"         // programs write it, and user space for a gateway
	MapConnsNew    Map = "ws_conns_new"     // the same
	MapConnsAdded  Map = "ws_conns_added"   // programs write it
	MapConnsGone   Map = "ws_conns_removed" // user space
	MapPathMTUs    Map = "ws_path_mtus"
	MapNumbers     Map = "ws_numbers"
	MapStats       Map = "ws_stats"
	MapMatch       Map = "ws_match" // ops name its entries by use, and replace them whole
	MapRules       Map = "ws_rules"
	MapPorts       Map = "ws_ports"
	MapExits       Map = "ws_exits"
	MapNexthops    Map = "ws_nexthops"
	MapProxies     Map = "ws_proxies"
	MapProxyStats  Map = "ws_proxy_stats"
	MapBuckets     Map = "ws_buckets"
	MapCache       Map = "ws_cache"
	MapCopies      Map = "ws_copies"
	MapSlots       Map = "ws_slots"
	MapRefusals    Map = "ws_refusals"
	MapErrors      Map = "ws_errors"
	MapEvents      Map = "ws_events"
	MapTraces      Map = "ws_traces" // user space and programs write it
	MapTracing     Map = "ws_tracing"
	MapTraced      Map = "ws_traced"
	MapPrograms    Map = "ws_programs"
	MapProgramsXDP Map = "ws_programs_xdp"
	MapLabels      Map = "ws_labels"
)

// Op is one change of one map: a pointer to the value is put, or without one
// the entry is deleted.
type Op struct {
	Table      Map
	Key, Value any
}

func (o Op) Remove() bool { return o.Value == nil }

// Changes are the ops from have to want, in an order in which each
// packet meets a complete state at every step, or is refused:
//
//   - the guard's requirements are added first and removed last, so that no
//     packet that needs a proof before and after passes without one in between;
//   - the entries on this node for a headend's packets are added before the headend,
//     and removed after it;
//   - a proxy is added before a SID, an interface or a rule names it, and the matches
//     of a local function before its first packet;
//   - a rule exists only together with its headend, and its source class;
//   - packets that a function makes are refused until the function's own rules exist;
//   - the entries behind a function on byte streams are added before packets to it, and
//     name existing paths;
//   - clients reach a gateway only while all of its chains exist.
//
// If Together is true, there is no such order.
//
// Rules by prefixes are replaced as a whole, twice: by the new rules over the old
// ones, and by the new ones only. A packet meets its old rule until it meets its
// new one, and never a third.
func Changes(have, want Contents) []Op {
	var ops []Op
	both := map[abi.MatchUse]Prefixes{}
	for use, p := range want.ByUse() {
		both[use] = p.Over(have.ByUse()[use])
	}
	before, after := have.ByUse(), want.ByUse()
	var origins []abi.MatchUse
	for use, p := range before {
		if use < abi.MatchOrigin {
			continue
		}
		origins = append(origins, use)
		if _, ok := both[use]; !ok {
			both[use], after[use] = p, Prefixes{}
		}
	}
	for use := range after {
		if _, ok := before[use]; !ok && use >= abi.MatchOrigin {
			origins = append(origins, use)
		}
	}
	slices.Sort(origins)
	swap := func(use abi.MatchUse, from, to map[abi.MatchUse]Prefixes) { ops = swaps(ops, use, from[use], to[use]) }
	ops = Puts(ops, MapGuards, have.Guards, want.Guards)
	swap(abi.MatchUseRequire, before, both)
	ops = Puts(ops, MapProxies, have.Proxies, want.Proxies)
	swap(abi.MatchUseLocal, before, both)
	ops = Puts(ops, MapSIDs, have.Sids, want.Sids)
	ops = Puts(ops, MapSources, have.Sources, want.Sources)
	ops = Puts(ops, MapEgresses, have.Egresses, want.Egresses)
	ops = Puts(ops, MapPorts, have.Ports, want.Ports)
	ops = Puts(ops, MapLabels, have.Labels, want.Labels)
	ops = Puts(ops, MapHeadends, have.Headends, want.Headends)
	ops = Puts(ops, MapPaths, have.Paths, want.Paths)
	ops = Puts(ops, MapStreams, have.Streams, want.Streams)
	ops = Puts(ops, MapHops, have.Hops, want.Hops)
	swap(abi.MatchUseSteer, before, both)
	for _, use := range origins {
		swap(use, before, both)
	}
	ops = Puts(ops, MapRules, have.Rules, want.Rules)
	ops = Puts(ops, MapServices, have.Services, want.Services)

	ops = Deletes(ops, MapServices, have.Services, want.Services)
	ops = Deletes(ops, MapRules, have.Rules, want.Rules)
	swap(abi.MatchUseSteer, both, after)
	for _, use := range origins {
		swap(use, both, after)
	}
	ops = Deletes(ops, MapHops, have.Hops, want.Hops)
	ops = Deletes(ops, MapStreams, have.Streams, want.Streams)
	ops = Deletes(ops, MapPaths, have.Paths, want.Paths)
	ops = Deletes(ops, MapHeadends, have.Headends, want.Headends)
	ops = Deletes(ops, MapLabels, have.Labels, want.Labels)
	ops = Deletes(ops, MapEgresses, have.Egresses, want.Egresses)
	ops = Deletes(ops, MapSources, have.Sources, want.Sources)
	ops = Deletes(ops, MapSIDs, have.Sids, want.Sids)
	swap(abi.MatchUseLocal, both, after)
	swap(abi.MatchUseRequire, both, after)
	ops = Deletes(ops, MapGuards, have.Guards, want.Guards)
	return ops
}

// ErrTogether: no order of changes takes a packet from a prefix to an ordered rule,
// or back, at once. That needs a new generation.
var ErrTogether = errors.New("ordered rules and prefixes change together")

// Together reports whether both the paths of ordered rules and those of prefixes change. If only
// one of them changes, every packet meets either its old path or its new one at every step.
// Tables by source do not change unless tables by destination do: see classes.
func Together(have, want Contents) bool {
	if maps.Equal(have.rulesByPath(), want.rulesByPath()) {
		return false
	}
	return !maps.Equal(have.GuardDst, want.GuardDst) ||
		!maps.Equal(byPath(have.MatchDst, have.Headends), byPath(want.MatchDst, want.Headends)) ||
		!maps.EqualFunc(have.originsByPath(), want.originsByPath(), maps.Equal)
}

// byPath names paths where the maps name headends: a path's next epoch has another
// one, and that packets meet the old or the new one is no matter.
func byPath(of map[DstKey]Match, headends map[uint32]abi.Headend) map[DstKey]Match {
	out := maps.Clone(of)
	for k, m := range out {
		if m.Action == uint8(abi.MatchActionPath) {
			m.Target = headends[m.Target].Path
			out[k] = m
		}
	}
	return out
}

// originsByPath are the rules by destination of functions that have any.
func (t Contents) originsByPath() map[uint8]map[DstKey]Match {
	out := map[uint8]map[DstKey]Match{}
	for origin, p := range t.Origins {
		if len(p.Dst) > 0 {
			out[origin] = byPath(p.Dst, t.Headends)
		}
	}
	return out
}

func (t Contents) rulesByPath() map[uint32]abi.Ruleset {
	out := maps.Clone(t.Rules)
	for k, set := range out {
		for i, steer := range set.Steer {
			if steer != 0 {
				set.Steer[i] = t.Headends[steer&abi.RuleTarget-1].Path
			}
		}
		set.Guard = [abi.Guards]ruleBits{} // they do not determine the path of a packet
		out[k] = set
	}
	return out
}

func Puts[K, V comparable](ops []Op, t Map, have, want map[K]V) []Op {
	for k, v := range want {
		if old, ok := have[k]; !ok || old != v {
			ops = append(ops, Op{t, &k, &v})
		}
	}
	return ops
}

func Deletes[K, V comparable](ops []Op, t Map, have, want map[K]V) []Op {
	for k := range have {
		if _, ok := want[k]; !ok {
			ops = append(ops, Op{t, &k, nil})
		}
	}
	return ops
}

// LeftBehind are the ops for interfaces that waystamp has left, and for the
// functions behind them: until then the programs on them look both up.
func LeftBehind(have, want Contents) []Op {
	ops := Deletes(nil, MapPorts, have.Ports, want.Ports)
	return Deletes(ops, MapProxies, have.Proxies, want.Proxies)
}

// withLocal adds this node's own addresses to rules: each as an entry with the result of the
// longest rule that covers the address, marked as local.
func withLocal(dst map[DstKey]Match, local []DstKey) map[DstKey]Match {
	out := maps.Clone(dst)
	for _, k := range local {
		m := Covering(dst, k)
		m.Local = 1
		out[k] = m
	}
	return out
}

// Covering is the result of the longest rule that covers the address k.
func Covering(dst map[DstKey]Match, k DstKey) Match {
	for bits := k.Prefixlen + 1; bits > 0; bits-- {
		if m, ok := dst[truncated(k, bits-1)]; ok {
			return m
		}
	}
	return Match{Action: uint8(abi.MatchActionNone)}
}

func truncated(k DstKey, bits uint32) DstKey {
	t := DstKey{Prefixlen: bits}
	copy(t.Addr[:], k.Addr[:bits/8])
	if r := bits % 8; r != 0 {
		t.Addr[bits/8] = k.Addr[bits/8] &^ (0xff >> r)
	}
	return t
}
