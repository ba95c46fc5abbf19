package tables

import (
	"fmt"
	"net/netip"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// ChainsMax is WS_CHAINS_MAX of bpf/lib/node/maps.h, which the maps are sized by.
const ChainsMax = 65536

// Wanted is the wanted content of the maps, and the array entries that must be prepared before
// other entries name them.
type Wanted struct {
	Contents
	FreshStats   []uint32              // to be zeroed
	FreshProxies []uint32              // entries of ws_proxy_stats, to be zeroed
	Numbers      map[uint32]CounterKey // that headends name, by slot
	Windows      map[uint32]Window     // that egresses name, by first word
}

// Desire computes the wanted content of a node's maps. It is pure: the same plan and the same
// earlier state give the same result. From the earlier state it keeps the numbers by which
// entries name each other: ix, and the source classes in have.
func Desire(n plan.Node, at Wiring, local []netip.Addr, have Contents, ix Indexes) (Wanted, error) {
	w := Wanted{Contents: New(), Numbers: map[uint32]CounterKey{}, Windows: map[uint32]Window{}}
	w.Ports = at.Ports
	var err error
	if w.Labels, err = encodeLabels(n.MPLS); err != nil {
		return Wanted{}, err
	}
	proxyOf, err := w.desireProxies(n, at, have, ix)
	if err != nil {
		return Wanted{}, err
	}
	statsIndex := func(k StatsKey) (uint32, error) {
		i, fresh, err := ix.Stats.get(k)
		if fresh {
			w.FreshStats = append(w.FreshStats, i)
		}
		return i, err
	}

	var steer, require []plan.Rule
	origins := map[uint8][]plan.Rule{}
	for _, p := range n.Proxies {
		if o := w.Proxies[proxyOf[p.Function]].Origin; o != 0 {
			origins[o] = nil
		}
	}
	heads := map[uint32]bool{}
	for _, h := range n.Headends {
		if h.Path == 0 {
			return Wanted{}, PartError(h.PathID, "path 0 is no path")
		}
		if heads[h.Path] {
			return Wanted{}, PartError(h.PathID, "the node is its headend twice")
		}
		heads[h.Path] = true
		s, err := statsIndex(StatsKey{Path: abi.BE32(h.Path)})
		if err != nil {
			return Wanted{}, err
		}
		key := CounterKey{abi.BE32(h.Path), h.Epoch}
		c, _, err := ix.counters.get(key)
		if err != nil {
			return Wanted{}, err
		}
		w.Numbers[c] = key
		entry, err := EncodeHeadend(n, h, s, c)
		if err != nil {
			return Wanted{}, PartError(h.PathID, "headend: %w", err)
		}
		i, _, err := ix.headends.get(entry)
		if err != nil {
			return Wanted{}, err
		}
		w.Headends[i] = entry
		w.Paths[abi.BE32(h.Path)] = i
		if h.From == "" {
			steer = append(steer, plan.Rule{Match: h.Match, Target: i})
			continue
		}
		if n.IsStream(h.From) {
			continue // its connections name the path
		}
		o := w.Proxies[proxyOf[h.From]].Origin
		if o == 0 {
			return Wanted{}, PartError(h.PathID, "function %s does not originate", h.From)
		}
		if h.Match.ByMark() {
			return Wanted{}, PartError(h.PathID, "nobody sees the mark of what a function makes")
		}
		origins[o] = append(origins[o], plan.Rule{Match: h.Match, Target: i})
	}

	for _, e := range n.Endpoints {
		s, err := statsIndex(StatsKey{Upper(e.SID), abi.BE32(e.Path)})
		if err != nil {
			return Wanted{}, err
		}
		entry, err := encodeHop(e, s, proxyOf[e.Function])
		if err != nil {
			return Wanted{}, PartError(e.PathID, "function %s: %w", e.Function, err)
		}
		if err := w.addHop(n, e.PathID, e.SID, e.Sources, entry); err != nil {
			return Wanted{}, err
		}
	}

	type requirement struct {
		match model.Match
		guard model.Guard
	}
	guarded := map[uint32]requirement{}
	for _, e := range n.Egresses {
		s, err := statsIndex(StatsKey{Upper(e.SID), abi.BE32(e.Path)})
		if err != nil {
			return Wanted{}, err
		}
		h, v, err := EncodeEgress(e, s)
		if err != nil {
			return Wanted{}, PartError(e.PathID, "egress: %w", err)
		}
		its := Window{WindowKey{CounterKey{abi.BE32(e.Path), e.Epoch}, SecretsOf(&v)}, int(e.Lanes), e.Window}
		if v.Window, err = ix.windows.Get(its); err != nil {
			return Wanted{}, PartError(e.PathID, "egress: %w", err)
		}
		if e.To != "" {
			if h, err = w.addStream(n, e, h, proxyOf[e.To]); err != nil {
				return Wanted{}, PartError(e.PathID, "egress: %w", err)
			}
		}
		if err := w.addHop(n, e.PathID, e.SID, e.Sources, h); err != nil {
			return Wanted{}, err
		}
		k := abi.EgressKey{Path: abi.BE32(e.Path), Epoch: e.Epoch}
		if _, twice := w.Egresses[k]; twice {
			return Wanted{}, PartError(e.PathID, "the node is its egress twice")
		}
		v.Of = k
		w.Egresses[k] = v
		w.Windows[v.Window] = its
		r, again := guarded[e.Path]
		if again && r != (requirement{e.Match, e.Guard}) {
			return Wanted{}, PartError(e.PathID, "its epochs match different packets, or differ in their guard")
		}
		if e.Of != 0 {
			continue // the whole path's guard
		}
		if !again {
			guarded[e.Path] = requirement{e.Match, e.Guard}
			if e.Guard != model.GuardUnset {
				w.Guards[abi.BE32(e.Path)] = uint32(e.Guard)
			}
			require = append(require, plan.Rule{Match: e.Match, Target: abi.BE32(e.Path)})
		}
	}

	if g := n.Gateway(); g != nil {
		for _, a := range g.Addresses() {
			w.Services[ServiceKey(a)] = proxyOf[model.GatewayName]
		}
	}
	own := ownKeys(local)
	w.MatchDst, w.MatchSrc = expand(steer, have.MatchSrc, own)
	w.GuardDst, w.GuardSrc = expand(require, have.GuardSrc, own)
	for o, rules := range origins {
		dst, src := expand(rules, have.Origins[o].Src, nil)
		w.Origins[o] = Prefixes{dst, src}
	}
	if w.Rules, err = EncodeRules(steer, require, w.Guards, origins); err != nil {
		return Wanted{}, err
	}
	return w, w.checkSizes()
}

// addStream adds the entry of the function on byte streams at which a path ends. It returns the
// path's hop: h with the function.
func (w *Wanted) addStream(n plan.Node, e plan.Egress, h abi.Hop, proxy uint32) (abi.Hop, error) {
	if proxy == 0 || e.Through == nil {
		return abi.Hop{}, fmt.Errorf("the node has no function %s, or no way on from it", e.To)
	}
	if e.OnViolation != model.OnViolationDrop {
		return abi.Hop{}, fmt.Errorf("on-violation: %s, and function %s gets no bytes that were not verified", e.OnViolation, e.To)
	}
	s := abi.Stream{
		Part: abi.BE32(e.Through.Part), Onward: abi.BE32(e.Through.Onward), Back: abi.BE32(e.Through.Back), Other: abi.BE32(e.Through.Other),
		Proxy: proxy,
	}
	if e.Through.Opens {
		s.Opens = 1
	}
	for _, p := range n.Proxies {
		if p.Function != e.To || p.Stream == nil {
			continue
		}
		if !p.Stream.Early {
			s.First = 1
		}
		s.By = uint8(by[p.Stream.Other])
	}
	w.Streams[abi.BE32(e.Path)] = s
	h.Behaviour, h.Proxy = uint8(abi.BehaviourStream), proxy
	return h, nil
}

// by are the packets that go by a function on byte streams.
var by = map[model.Other]abi.By{model.OtherRefuse: abi.ByNothing, model.OtherICMP: abi.ByIcmp, model.OtherRelay: abi.ByRelay}

// ServiceKey is the key of an address that clients connect to.
func ServiceKey(a netip.AddrPort) abi.ServiceKey {
	return abi.ServiceKey{Addr: Words(a.Addr()), Port: abi.BE16(a.Port())}
}

// ConnKey is the key of a connection through a function on byte streams, by its proxy.
func ConnKey(proxy uint32, client, server netip.AddrPort) abi.ConnKey {
	return abi.ConnKey{Client: Words(client.Addr()), Server: Words(server.Addr()), ClientPort: abi.BE16(client.Port()), ServerPort: abi.BE16(server.Port()), Proxy: proxy}
}

// ConnEnds are both ends of a connection with such a key.
func ConnEnds(k abi.ConnKey) (client, server netip.AddrPort) {
	return netip.AddrPortFrom(Address(k.Client), abi.BE16(k.ClientPort)), netip.AddrPortFrom(Address(k.Server), abi.BE16(k.ServerPort))
}

func ownKeys(local []netip.Addr) []DstKey {
	own := make([]DstKey, len(local))
	for i, a := range local {
		own[i] = EncodeDst(netip.PrefixFrom(a, a.BitLen()))
	}
	return own
}

// NeedLines is how many lines the tables of prefixes take for a plan.
func NeedLines(n plan.Node, local []netip.Addr) (uint32, error) {
	var steer, require, through []plan.Rule
	origins := map[string][]plan.Rule{}
	for i, h := range n.Headends {
		r := plan.Rule{Match: h.Match, Target: uint32(i)}
		if h.From == "" {
			steer = append(steer, r)
		} else if !n.IsStream(h.From) {
			origins[h.From] = append(origins[h.From], r)
		}
	}
	seen := map[uint32]bool{}
	for _, e := range n.Egresses {
		if e.Of == 0 && !seen[e.Path] {
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
	var all []Prefixes
	for _, rules := range [][]plan.Rule{steer, require} {
		dst, src := expand(rules, nil, ownKeys(local))
		all = append(all, Prefixes{dst, src})
	}
	for _, rules := range origins {
		dst, src := expand(rules, nil, nil)
		all = append(all, Prefixes{dst, src})
	}
	dst, src := expand(through, nil, nil)
	return LinesOf(append(all, Prefixes{dst, src})...)
}

func (w *Wanted) addHop(n plan.Node, id plan.PathID, sid netip.Addr, sources []netip.Addr, entry abi.Hop) error {
	if id.Path == 0 {
		return PartError(id, "path 0 is no path")
	}
	if !sid.Is6() || !n.Locator.Contains(sid) {
		return PartError(id, "SID %s is not in the locator %s of node %s", sid, n.Locator, n.Name)
	}
	k := EncodeHopKey(sid, id.Path, id.Epoch)
	if _, twice := w.Hops[k]; twice {
		return PartError(id, "SID %s is visited twice", sid)
	}
	entry.Of = k
	w.Hops[k] = entry
	w.Sids[EncodeHopKey(sid, id.Path, 0)] = 1
	w.Sids[EncodeHopKey(sid, 0, 0)] = 1
	if hasSources(&id, sources) {
		for _, a := range sources {
			w.Sources[abi.SourceKey{Path: abi.BE32(id.Path), Addr: Words(a)}] = 1
		}
	}
	return nil
}

// hasSources reports whether the headends of a path are in ws_sources, and not in its entries.
func hasSources(id *plan.PathID, sources []netip.Addr) bool {
	return len(sources) > 1 && !id.OverLabels()
}

// checkSizes compares with the maps of bpf/lib/node/maps.h, so that a plan that does
// not fit is refused before anything is changed.
func (w *Wanted) checkSizes() error {
	for _, m := range []struct {
		what      string
		have, max int
	}{
		{"hops (a SID, path and epoch each)", len(w.Hops), 2 * ChainsMax},
		{"SIDs and paths", len(w.Sids), 4 * ChainsMax},
		{"headends of paths that have several", len(w.Sources), 2 * ChainsMax},
		{"egresses", len(w.Egresses), 2 * ChainsMax},
		{"classification rules by destination", len(w.MatchDst), ChainsMax},
		{"classification rules by source", len(w.MatchSrc), ChainsMax},
		{"guard rules by destination", len(w.GuardDst), ChainsMax},
		{"guard rules by source", len(w.GuardSrc), ChainsMax},
		{"rules of local functions by destination", len(w.LocalDst), ChainsMax},
		{"rules of local functions by source", len(w.LocalSrc), ChainsMax},
		{"interfaces", len(w.Ports), 4096},
		{"nodes with labels", len(w.Labels), ChainsMax},
	} {
		if m.have > m.max {
			return fmt.Errorf("the plan has %d %s, more than the %d that a node holds", m.have, m.what, m.max)
		}
	}
	return nil
}

func PartError(id plan.PathID, format string, args ...any) error {
	return fmt.Errorf("%s, path %#x, epoch %d: %w", id, id.Path, id.Epoch, fmt.Errorf(format, args...))
}

// Need is how large the maps must be for a plan.
func Need(n plan.Node, cpus int) (Limits, error) {
	seen := map[StatsKey]bool{}
	for _, h := range n.Headends {
		seen[StatsKey{Path: abi.BE32(h.Path)}] = true
	}
	for _, e := range n.Endpoints {
		seen[StatsKey{Upper(e.SID), abi.BE32(e.Path)}] = true
	}
	for _, e := range n.Egresses {
		seen[StatsKey{Upper(e.SID), abi.BE32(e.Path)}] = true
	}
	return Limits{
		Headends: uint32(len(n.Headends)), Stats: uint32(len(seen)),
		Hops: uint32(len(n.Endpoints) + len(n.Egresses)), Egresses: uint32(len(n.Egresses)), Places: placeSize(n.Locator),
	}.needCaches(n, cpus)
}

// Size chooses the sizes of arrays for a plan: with room to grow without a new generation, since
// each change may need new numbers beside the old ones, but small on a small node, since each
// entry takes memory on every CPU. The functions determine the sizes of the caches of headers.
func (l Limits) Size() (Limits, error) {
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
	c, err := fit(l.Headends, 64, ChainsMax, "paths that start at the node")
	if err != nil {
		return Limits{}, err
	}
	s, err := fit(l.Stats, 256, 2*ChainsMax, "path counters")
	if err != nil {
		return Limits{}, err
	}
	h, err := fit(l.Hops, 256, 4*ChainsMax, "SIDs, paths and epochs")
	if err != nil {
		return Limits{}, err
	}
	e, err := fit(l.Egresses, 64, 4*ChainsMax, "egresses")
	if err != nil {
		return Limits{}, err
	}
	m, err := fit(l.Lines, LinesLeast, linesMost, "lines of prefixes")
	if err != nil {
		return Limits{}, err
	}
	return Limits{Lines: m, Headends: c, Stats: s, Hops: h, Egresses: e, Places: l.Places, Buckets: l.Buckets, Slots: l.Slots}, nil
}
