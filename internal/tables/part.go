package tables

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/plan"
)

// Part is what changes of the content of the maps from one plan to another that differs from it only in
// visits, egresses, and epochs of headends. Which packets take and need which path is the same in both.
type Part struct {
	Have, Want Contents // the entries that change, and no others

	Wanted   Wanted        // of the entries in Want: what must be prepared before
	Numbers  []CounterKey  // that no headend names any more
	Windows  []WindowKey   // that no egress names any more
	Stats    []StatsKey    // that nothing names any more
	headends []abi.Headend // the same
}

// Difference computes the part of n against the plan is, whose content of the maps is have. False: the plans differ
// in more; use Desire. It takes numbers from ix, also if it returns false or an error: then ix is of no more use.
//
// It compares the plans as a whole, and computes entries only of what differs.
func Difference(is, n plan.Node, at Wiring, have Contents, ix Indexes) (p Part, ok bool, err error) {
	if !reflect.DeepEqual(withoutPaths(is), withoutPaths(n)) {
		return p, false, nil
	}
	goneHeads, heads, ok := replacedHeadends(is, n)
	if !ok {
		return p, false, nil
	}
	goneEnds, ends, ok := differ(is.Endpoints, n.Endpoints, plan.Endpoint.Equal, func(e plan.Endpoint) abi.HopKey { return EncodeHopKey(e.SID, e.Path, e.Epoch) })
	if !ok {
		return p, false, nil
	}
	goneEgresses, egresses, ok := differ(is.Egresses, n.Egresses, plan.Egress.Equal, func(e plan.Egress) abi.EgressKey { return abi.EgressKey{Path: abi.BE32(e.Path), Epoch: e.Epoch} })
	if !ok || !sameGuard(n, goneEgresses, egresses) {
		return p, false, nil
	}
	part := n
	part.Headends, part.Endpoints, part.Egresses = heads, ends, egresses
	part.Proxies = slices.Clone(n.Proxies)
	for i := range part.Proxies {
		part.Proxies[i].Matches = nil // their rules do not change
	}
	p.Have, p.Want = New(), New()
	if p.Wanted, err = Desire(part, at, nil, have, ix); err != nil {
		return p, false, err
	}
	w := &p.Wanted

	keys := map[abi.HopKey]bool{} // of visits that are gone
	for _, e := range goneEnds {
		keys[EncodeHopKey(e.SID, e.Path, e.Epoch)] = true
	}
	for _, e := range goneEgresses {
		keys[EncodeHopKey(e.SID, e.Path, e.Epoch)] = true
		k := abi.EgressKey{Path: abi.BE32(e.Path), Epoch: e.Epoch}
		v := have.Egresses[k]
		p.Have.Egresses[k] = v
		if its := (WindowKey{CounterKey{k.Path, k.Epoch}, SecretsOf(&v)}); w.Windows[v.Window].Key != its {
			p.Windows = append(p.Windows, its)
		}
	}
	for k := range keys {
		p.Have.Hops[k] = have.Hops[k]
	}
	for k, h := range w.Hops {
		if _, there := have.Hops[k]; there && !keys[k] {
			return p, false, nil // some visit is there twice
		}
		p.Want.Hops[k] = h
	}
	for k, e := range w.Egresses {
		if _, there := have.Egresses[k]; there {
			if _, gone := p.Have.Egresses[k]; !gone {
				return p, false, nil
			}
		}
		p.Want.Egresses[k] = e
	}
	for k, s := range w.Streams {
		if have.Streams[k] != s {
			return p, false, nil
		}
	}
	p.unused(n, have, goneEnds, goneEgresses)
	alongside(have.Sids, w.Sids, p.Have.Sids, p.Want.Sids)
	alongside(have.Sources, w.Sources, p.Have.Sources, p.Want.Sources)
	return p, p.headendsOf(have, goneHeads, heads), nil
}

// alongside adds wanted entries, with those that they replace.
func alongside[K, V comparable](have, want, partHave, partWant map[K]V) {
	for k, v := range want {
		partWant[k] = v
		if was, ok := have[k]; ok {
			partHave[k] = was
		}
	}
}

// withoutPaths is what a plan has besides its paths.
func withoutPaths(n plan.Node) plan.Node {
	n.Revision, n.Headends, n.Endpoints, n.Egresses = 0, nil, nil, nil
	return n
}

// replacedHeadends are the headends that differ; false: in more than the path's epoch and way.
func replacedHeadends(is, n plan.Node) (gone, fresh []plan.Headend, ok bool) {
	if len(is.Headends) != len(n.Headends) {
		return nil, nil, false
	}
	for i, h := range n.Headends {
		was := is.Headends[i]
		if was.Equal(h) {
			continue
		}
		if was.Path != h.Path || was.Match != h.Match || was.Own != h.Own || was.From != h.From || h.Match.Ordered() || h.From != "" && !n.IsStream(h.From) {
			return nil, nil, false
		}
		gone, fresh = append(gone, was), append(fresh, h)
	}
	return gone, fresh, true
}

// differ returns what is in one of two lists alone. False: an entry changes under its key.
func differ[T any, K comparable](is, n []T, equal func(a, b T) bool, key func(T) K) (gone, fresh []T, ok bool) {
	for len(is) > 0 && len(n) > 0 && equal(is[0], n[0]) {
		is, n = is[1:], n[1:]
	}
	for len(is) > 0 && len(n) > 0 && equal(is[len(is)-1], n[len(n)-1]) {
		is, n = is[:len(is)-1], n[:len(n)-1]
	}
	before := map[K]int{}
	for i := range is {
		before[key(is[i])] = i
	}
	if len(before) != len(is) {
		return nil, nil, false
	}
	for i := range n {
		j, there := before[key(n[i])]
		switch {
		case !there:
			fresh = append(fresh, n[i])
		case !equal(is[j], n[i]):
			return nil, nil, false
		default:
			delete(before, key(n[i]))
		}
	}
	for _, i := range slices.Sorted(maps.Values(before)) {
		gone = append(gone, is[i])
	}
	return gone, fresh, true
}

// sameGuard holds that the guard requires the same with some egresses gone and others there: each of their paths has another epoch
// that stays and takes the same packets.
func sameGuard(n plan.Node, gone, fresh []plan.Egress) bool {
	is := map[uint32]plan.Egress{}
	differs := func(e plan.Egress) bool {
		was, ok := is[e.Path]
		return ok && (was.Match != e.Match || was.Guard != e.Guard || was.Of != e.Of || was.To != e.To)
	}
	added := map[abi.EgressKey]bool{}
	for _, e := range gone {
		if e.Match.Ordered() || differs(e) {
			return false
		}
		is[e.Path] = e
	}
	for _, e := range fresh {
		if e.Match.Ordered() || differs(e) {
			return false
		}
		is[e.Path] = e
		added[abi.EgressKey{Path: e.Path, Epoch: e.Epoch}] = true
	}
	stays := map[uint32]bool{}
	if len(is) == 0 {
		return true
	}
	for i := range n.Egresses {
		e := &n.Egresses[i]
		if _, changes := is[e.Path]; !changes || added[abi.EgressKey{Path: e.Path, Epoch: e.Epoch}] {
			continue
		}
		if differs(*e) {
			return false
		}
		stays[e.Path] = true
	}
	for path, e := range is {
		if (e.Of == 0 || e.To != "") && !stays[path] {
			return false
		}
	}
	return true
}

// unused adds the entries that visits of several epochs and paths share, where the last of them is gone.
func (p *Part) unused(n plan.Node, have Contents, ends []plan.Endpoint, egresses []plan.Egress) {
	sids, paths := map[uint64]bool{}, map[uint32]bool{} // of what is gone, as the maps have them
	gone := func(k abi.HopKey) {
		sids[k.Sid], paths[k.Path] = true, true
		for _, k := range []abi.HopKey{{Sid: k.Sid, Path: k.Path}, {Sid: k.Sid}} {
			if v, ok := have.Sids[k]; ok {
				p.Have.Sids[k] = v
			}
		}
	}
	for _, e := range ends {
		gone(EncodeHopKey(e.SID, e.Path, e.Epoch))
	}
	for _, e := range egresses {
		gone(EncodeHopKey(e.SID, e.Path, e.Epoch))
	}
	if len(paths) == 0 {
		return
	}
	for k, v := range have.Sources {
		if paths[k.Path] {
			p.Have.Sources[k] = v
		}
	}
	stays := func(k abi.HopKey, id *plan.PathID, sources []netip.Addr) {
		if sids[k.Sid] {
			delete(p.Have.Sids, abi.HopKey{Sid: k.Sid})
			delete(p.Have.Sids, abi.HopKey{Sid: k.Sid, Path: k.Path})
		}
		if paths[k.Path] && hasSources(id, sources) {
			for _, a := range sources {
				delete(p.Have.Sources, abi.SourceKey{Path: k.Path, Addr: Words(a)})
			}
		}
	}
	for i := range n.Endpoints {
		e := &n.Endpoints[i]
		stays(EncodeHopKey(e.SID, e.Path, e.Epoch), &e.PathID, e.Sources)
	}
	for i := range n.Egresses {
		e := &n.Egresses[i]
		stays(EncodeHopKey(e.SID, e.Path, e.Epoch), &e.PathID, e.Sources)
	}
	for k := range p.Have.Sids {
		if k.Path != 0 {
			p.Stats = append(p.Stats, StatsKey{Sid: k.Sid, Path: k.Path})
		}
	}
}

// headendsOf adds the headends, and the rules that name them. False: rules with sources do, which get another class.
func (p *Part) headendsOf(have Contents, gone, fresh []plan.Headend) bool {
	moved := map[uint32]uint32{} // indexes of headends with rules by prefixes
	for i, h := range gone {
		path := abi.BE32(h.Path)
		was, is := have.Paths[path], p.Wanted.Paths[path]
		p.Have.Headends[was], p.Want.Headends[is] = have.Headends[was], p.Wanted.Headends[is]
		p.Have.Paths[path], p.Want.Paths[path] = was, is
		if h.Epoch != fresh[i].Epoch {
			p.Numbers = append(p.Numbers, CounterKey{path, h.Epoch})
		}
		if was == is {
			continue
		}
		p.headends = append(p.headends, have.Headends[was])
		if h.From == "" {
			moved[was] = is
		}
	}
	if len(moved) == 0 {
		return true
	}
	for _, m := range have.MatchSrc {
		if _, moves := moved[m.Target]; moves {
			return false
		}
	}
	p.Have.MatchDst, p.Have.MatchSrc = have.MatchDst, have.MatchSrc
	p.Want.MatchDst, p.Want.MatchSrc = maps.Clone(have.MatchDst), have.MatchSrc
	for k, m := range have.MatchDst {
		if to, moves := moved[m.Target]; moves && m.Action == uint8(abi.MatchActionPath) {
			m.Target = to
			p.Want.MatchDst[k] = m
		}
	}
	return true
}

// Empty reports whether the part changes no entry.
func (p Part) Empty() bool {
	return len(p.Have.Hops)+len(p.Want.Hops)+len(p.Have.Egresses)+len(p.Want.Egresses)+len(p.Want.Headends) == 0
}

// Fits reports whether limits leave room for the part beside all that there is.
func (p Part) Fits(have Contents, l Limits) bool {
	return len(have.Hops)+len(p.Want.Hops) < int(l.Hops) && len(have.Egresses)+len(p.Want.Egresses) < int(l.Egresses)
}

// Follow makes have and ix what they are with the part in force. No program uses what is gone any more.
// kept are windows that could not be given up.
func (p Part) Follow(have *Contents, ix Indexes, kept []WindowKey) {
	follow(have.Hops, p.Have.Hops, p.Want.Hops)
	follow(have.Sids, p.Have.Sids, p.Want.Sids)
	follow(have.Sources, p.Have.Sources, p.Want.Sources)
	follow(have.Egresses, p.Have.Egresses, p.Want.Egresses)
	follow(have.Headends, p.Have.Headends, p.Want.Headends)
	follow(have.Paths, p.Have.Paths, p.Want.Paths)
	if len(p.Want.MatchDst) > 0 {
		have.MatchDst = p.Want.MatchDst
	}
	for _, k := range p.Stats {
		ix.Stats.release(k)
	}
	for _, h := range p.headends {
		ix.headends.release(h)
	}
	for _, k := range p.Numbers {
		ix.counters.release(k)
	}
	for _, k := range p.Windows {
		if !slices.Contains(kept, k) {
			ix.windows.release(k)
		}
	}
}

func follow[K, V comparable](all, have, want map[K]V) {
	for k := range have {
		delete(all, k)
	}
	maps.Copy(all, want)
}

// release makes a number free that no program can meet any more.
func (a *allocator[K]) release(k K) {
	if i, ok := a.Have[k]; ok {
		delete(a.Have, k)
		delete(a.used, i)
		a.next = min(a.next, i)
	}
}

// release makes the place of a window free that no program can meet any more.
func (s *windowSpace) release(k WindowKey) {
	w, ok := s.have[k]
	if !ok {
		return
	}
	delete(s.have, k)
	if i, there := slices.BinarySearchFunc(s.used, w, func(a, b WindowSlot) int { return a.At - b.At }); there {
		s.used = slices.Delete(s.used, i, i+1)
	}
}
