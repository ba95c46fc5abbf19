package dataplane

import (
	"fmt"
	"net/netip"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// chainsMax is WS_CHAINS_MAX of bpf/lib/node/maps.h, which the maps are sized by.
const chainsMax = 65536

// wanted is what the maps shall hold, and what must be prepared in the arrays
// before anything names it.
type wanted struct {
	tables
	freshStats   []uint32              // to be zeroed
	freshProxies []uint32              // entries of ws_proxy_stats, to be zeroed
	numbers      map[uint32]counterKey // that headends name, by slot
	windows      map[uint32]window     // that egresses name, by first word
}

// desire says what the maps of a node shall hold. It is pure: the same plan and
// the same state before give the same. What it keeps of the state before are
// the numbers by which entries name each other: ix, and the source classes in
// have.
func desire(n plan.Node, at wiring, local []netip.Addr, have tables, ix indexes) (wanted, error) {
	w := wanted{tables: newTables(), numbers: map[uint32]counterKey{}, windows: map[uint32]window{}}
	w.ports = at.ports
	proxyOf, err := w.desireProxies(n, at, have, ix)
	if err != nil {
		return wanted{}, err
	}
	statsIndex := func(k statsKey) (uint32, error) {
		i, fresh, err := ix.stats.get(k)
		if fresh {
			w.freshStats = append(w.freshStats, i)
		}
		return i, err
	}

	var steer, require []plan.Rule
	heads := map[uint32]bool{}
	for _, h := range n.Headends {
		if h.Path == 0 {
			return wanted{}, partError(h.PathID, "path 0 is no path")
		}
		if heads[h.Path] {
			return wanted{}, partError(h.PathID, "the node is its headend twice")
		}
		heads[h.Path] = true
		s, err := statsIndex(statsKey{path: abi.BE32(h.Path)})
		if err != nil {
			return wanted{}, err
		}
		key := counterKey{abi.BE32(h.Path), h.Epoch}
		c, _, err := ix.counters.get(key)
		if err != nil {
			return wanted{}, err
		}
		w.numbers[c] = key
		entry, err := encodeHeadend(n, h, s, c)
		if err != nil {
			return wanted{}, partError(h.PathID, "headend: %w", err)
		}
		i, _, err := ix.headends.get(entry)
		if err != nil {
			return wanted{}, err
		}
		w.headends[i] = entry
		w.paths[abi.BE32(h.Path)] = i
		steer = append(steer, plan.Rule{Match: h.Match, Target: i})
	}

	for _, e := range n.Endpoints {
		s, err := statsIndex(statsKey{upper(e.SID), abi.BE32(e.Path)})
		if err != nil {
			return wanted{}, err
		}
		entry, err := encodeHop(e, s, proxyOf[e.Function])
		if err != nil {
			return wanted{}, partError(e.PathID, "function %s: %w", e.Function, err)
		}
		if err := w.addHop(n, e.PathID, e.SID, e.Sources, entry); err != nil {
			return wanted{}, err
		}
	}

	guarded := map[uint32]model.Match{}
	for _, e := range n.Egresses {
		s, err := statsIndex(statsKey{upper(e.SID), abi.BE32(e.Path)})
		if err != nil {
			return wanted{}, err
		}
		h, v, err := encodeEgress(e, s)
		if err != nil {
			return wanted{}, partError(e.PathID, "egress: %w", err)
		}
		its := window{windowKey{counterKey{abi.BE32(e.Path), e.Epoch}, secretsOf(&v)}, int(e.Lanes), e.Window}
		if v.Window, err = ix.windows.get(its); err != nil {
			return wanted{}, partError(e.PathID, "egress: %w", err)
		}
		if err := w.addHop(n, e.PathID, e.SID, e.Sources, h); err != nil {
			return wanted{}, err
		}
		k := abi.EgressKey{Path: abi.BE32(e.Path), Epoch: e.Epoch}
		if _, twice := w.egresses[k]; twice {
			return wanted{}, partError(e.PathID, "the node is its egress twice")
		}
		v.Of = k
		w.egresses[k] = v
		w.windows[v.Window] = its
		m, again := guarded[e.Path]
		if again && m != e.Match {
			return wanted{}, partError(e.PathID, "its epochs match different packets")
		}
		if !again {
			guarded[e.Path] = e.Match
			require = append(require, plan.Rule{Match: e.Match, Target: abi.BE32(e.Path)})
		}
	}

	own := ownKeys(local)
	w.matchDst, w.matchSrc = expand(steer, have.matchSrc, own)
	w.guardDst, w.guardSrc = expand(require, have.guardSrc, own)
	if w.rules, err = encodeRules(steer, require); err != nil {
		return wanted{}, err
	}
	return w, w.checkSizes()
}

func ownKeys(local []netip.Addr) []dstKey {
	own := make([]dstKey, len(local))
	for i, a := range local {
		own[i] = encodeDst(netip.PrefixFrom(a, a.BitLen()))
	}
	return own
}

// needLines is how many lines the tables of prefixes take for a plan.
func needLines(n plan.Node, local []netip.Addr) (uint32, error) {
	var steer, require, through []plan.Rule
	for i, h := range n.Headends {
		steer = append(steer, plan.Rule{Match: h.Match, Target: uint32(i)})
	}
	seen := map[uint32]bool{}
	for _, e := range n.Egresses {
		if !seen[e.Path] {
			seen[e.Path] = true
			require = append(require, plan.Rule{Match: e.Match, Target: e.Path})
		}
	}
	for i, p := range n.Proxies {
		if p.Local {
			for _, m := range p.Matches {
				through = append(through, plan.Rule{Match: m, Target: uint32(i)})
			}
		}
	}
	var all []prefixes
	for _, rules := range [][]plan.Rule{steer, require} {
		dst, src := expand(rules, nil, ownKeys(local))
		all = append(all, prefixes{dst, src})
	}
	dst, src := expand(through, nil, nil)
	return linesOf(append(all, prefixes{dst, src})...)
}

func (w *wanted) addHop(n plan.Node, id plan.PathID, sid netip.Addr, sources []netip.Addr, entry abi.Hop) error {
	if id.Path == 0 {
		return partError(id, "path 0 is no path")
	}
	if !sid.Is6() || !n.Locator.Contains(sid) {
		return partError(id, "SID %s is not in the locator %s of node %s", sid, n.Locator, n.Name)
	}
	k := encodeHopKey(sid, id.Path, id.Epoch)
	if _, twice := w.hops[k]; twice {
		return partError(id, "SID %s is visited twice", sid)
	}
	entry.Of = k
	w.hops[k] = entry
	w.sids[encodeHopKey(sid, id.Path, 0)] = 1
	w.sids[encodeHopKey(sid, 0, 0)] = 1
	if len(sources) > 1 {
		for _, a := range sources {
			w.sources[abi.SourceKey{Path: abi.BE32(id.Path), Addr: words(a)}] = 1
		}
	}
	return nil
}

// checkSizes compares with the maps of bpf/lib/node/maps.h, so that a plan that does
// not fit is refused before anything is changed.
func (w *wanted) checkSizes() error {
	for _, m := range []struct {
		what      string
		have, max int
	}{
		{"hops (a SID, path and epoch each)", len(w.hops), 2 * chainsMax},
		{"SIDs and paths", len(w.sids), 4 * chainsMax},
		{"headends of paths that have several", len(w.sources), 2 * chainsMax},
		{"egresses", len(w.egresses), 2 * chainsMax},
		{"classification rules by destination", len(w.matchDst), chainsMax},
		{"classification rules by source", len(w.matchSrc), chainsMax},
		{"guard rules by destination", len(w.guardDst), chainsMax},
		{"guard rules by source", len(w.guardSrc), chainsMax},
		{"rules of local functions by destination", len(w.localDst), chainsMax},
		{"rules of local functions by source", len(w.localSrc), chainsMax},
		{"interfaces", len(w.ports), 4096},
	} {
		if m.have > m.max {
			return fmt.Errorf("the plan has %d %s, more than the %d that a node holds", m.have, m.what, m.max)
		}
	}
	return nil
}

func partError(id plan.PathID, format string, args ...any) error {
	return fmt.Errorf("chain %s, %s, path %#x, epoch %d: %w", id.Chain, id.Direction, id.Path, id.Epoch, fmt.Errorf(format, args...))
}

// need is how large the maps must be for a plan.
func need(n plan.Node, cpus int) (limits, error) {
	seen := map[statsKey]bool{}
	for _, h := range n.Headends {
		seen[statsKey{path: abi.BE32(h.Path)}] = true
	}
	for _, e := range n.Endpoints {
		seen[statsKey{upper(e.SID), abi.BE32(e.Path)}] = true
	}
	for _, e := range n.Egresses {
		seen[statsKey{upper(e.SID), abi.BE32(e.Path)}] = true
	}
	return limits{
		headends: uint32(len(n.Headends)), stats: uint32(len(seen)),
		hops: uint32(len(n.Endpoints) + len(n.Egresses)), egresses: uint32(len(n.Egresses)), places: placeSize(n.Locator),
	}.needCaches(n, cpus)
}

// size chooses the arrays for what a plan needs: room to grow without a new
// generation, since every change may need new numbers beside the old ones, yet
// small where a node has little. Every entry costs memory on every CPU. The caches
// of headers are sized by their functions.
func (l limits) size() (limits, error) {
	fit := func(n, least, most uint32, what string) (uint32, error) {
		if n > most {
			return 0, fmt.Errorf("the plan needs %d %s, more than the %d that a node holds", n, what, most)
		}
		s := least
		for s < 2*n && s < most {
			s *= 2
		}
		return s, nil
	}
	c, err := fit(l.headends, 64, chainsMax, "paths that start at the node")
	if err != nil {
		return limits{}, err
	}
	s, err := fit(l.stats, 256, 2*chainsMax, "path counters")
	if err != nil {
		return limits{}, err
	}
	h, err := fit(l.hops, 256, 4*chainsMax, "SIDs, paths and epochs")
	if err != nil {
		return limits{}, err
	}
	e, err := fit(l.egresses, 64, 4*chainsMax, "egresses")
	if err != nil {
		return limits{}, err
	}
	m, err := fit(l.lines, linesLeast, linesMost, "lines of prefixes")
	if err != nil {
		return limits{}, err
	}
	return limits{lines: m, headends: c, stats: s, hops: h, egresses: e, places: l.places, buckets: l.buckets, slots: l.slots}, nil
}
