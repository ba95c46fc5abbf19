package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/plan"
)

// errCapacity: the maps are too small for the plan, so that a new generation is
// needed.
var errCapacity = errors.New("the plan needs larger maps")

// statsKey says whose ws_stats entry it is: a headend's of a path (without
// SID), or that of a SID on a path. Epochs share one.
type statsKey struct {
	sid  uint64 // as in hopKey
	path uint32 // __be32
}

// counterKey says whose slot of ws_numbers it is.
type counterKey struct {
	path  uint32 // __be32
	epoch uint8
}

// allocator gives out the lowest free numbers below limit. What was in use
// before stays in use until the next allocator: a program may still be at it.
type allocator[K comparable] struct {
	have  map[K]uint32
	used  map[uint32]bool
	next  uint32
	limit uint32
}

func newAllocator[K comparable](limit uint32) *allocator[K] {
	return &allocator[K]{have: map[K]uint32{}, used: map[uint32]bool{}, limit: limit}
}

func (a *allocator[K]) keep(k K, i uint32) {
	a.have[k] = i
	a.used[i] = true
}

// get returns k's number, and whether it is a new one.
func (a *allocator[K]) get(k K) (index uint32, fresh bool, err error) {
	if i, ok := a.have[k]; ok {
		return i, false, nil
	}
	i, err := a.fresh()
	if err != nil {
		return 0, false, err
	}
	a.keep(k, i)
	return i, true, nil
}

func (a *allocator[K]) fresh() (uint32, error) {
	for a.used[a.next] {
		a.next++
	}
	if a.next >= a.limit {
		return 0, fmt.Errorf("%w: more than %d entries", errCapacity, a.limit)
	}
	a.used[a.next] = true
	return a.next, nil
}

// indexes are the numbers by which entries of one map name those of another.
// They are recovered from the maps, so that they outlive the agent.
type indexes struct {
	headends *allocator[abi.Headend] // by content: what a rule names never changes
	stats    *allocator[statsKey]
	counters *allocator[counterKey] // slots of ws_numbers
	windows  *windowSpace           // words of ws_windows
	proxies  *allocator[uint32]     // of ws_proxy_stats, by key in ws_proxies
	slots    *ranges                // of ws_slots
	buckets  *ranges                // of ws_buckets
}

// limits are the sizes of the maps that user space chooses.
type limits struct {
	lines           uint32 // of each table of prefixes
	headends, stats uint32
	hops, egresses  uint32
	places          uint32
	buckets         uint32 // for headers that are found by content, abi.Ways each
	slots           uint32 // that are found by metadata, and entry 0
}

func newIndexes(l limits, p placed) indexes {
	ix := indexes{
		headends: newAllocator[abi.Headend](l.headends),
		stats:    newAllocator[statsKey](l.stats),
		counters: newAllocator[counterKey](abi.NumberSlabs * abi.NumberSlots),
		windows:  newWindowSpace(p.windows),
		proxies:  newAllocator[uint32](proxiesMax),
		slots:    newSlotRanges(l.slots),
		buckets:  newBucketRanges(l.buckets),
	}
	for k, slot := range p.numbers {
		ix.counters.keep(k, slot)
	}
	return ix
}

// recoverIndexes reads them off the entries, and off what is in slabs.
func recoverIndexes(have tables, l limits, p placed) indexes {
	ix := newIndexes(l, p)
	// In order, so that whichever of two wins does not change from run to run.
	for _, i := range slices.Sorted(maps.Keys(have.headends)) {
		h := have.headends[i]
		ix.headends.keep(h, i)
		ix.stats.keep(statsKey{path: h.Path}, h.Stats)
	}
	for _, id := range slices.Sorted(maps.Keys(have.proxies)) {
		p := have.proxies[id]
		ix.proxies.keep(id, p.Stats)
		if p.Recognise == uint8(abi.RecogniseMetadata) {
			ix.slots.keep(id, p)
		} else {
			ix.buckets.keep(id, p)
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(have.hops), compareHopKeys) {
		ix.stats.keep(statsKey{sid: k.Sid, path: k.Path}, have.hops[k].Stats)
	}
	return ix
}

func compareHopKeys(a, b abi.HopKey) int {
	return cmp.Or(cmp.Compare(a.Sid, b.Sid), cmp.Compare(a.Path, b.Path), cmp.Compare(a.Epoch, b.Epoch))
}

// classes gives source classes numbers. A destination rule and the class that
// it names are two entries, so a class must not change while a rule names it:
// one whose content is what it was keeps its number, any other gets a new one.
func classes(have, want map[srcKey]match, dst map[dstKey]match) (map[dstKey]match, map[srcKey]match) {
	used := map[uint32]bool{}
	known := map[string]uint32{}
	for class, c := range byClass(have) {
		used[class] = true
		if other, ok := known[c]; !ok || class < other {
			known[c] = class
		}
	}
	content := byClass(want)
	number := map[uint32]uint32{} // from the compiler's to ours
	next := uint32(1)
	for _, class := range slices.Sorted(maps.Keys(content)) {
		c := content[class]
		n, ok := known[c]
		if !ok {
			for used[next] {
				next++
			}
			n = next
			used[n], known[c] = true, n
		}
		number[class] = n
	}
	outDst := make(map[dstKey]match, len(dst))
	for k, m := range dst {
		if m.Action == uint8(abi.MatchActionSource) {
			m.Target = number[m.Target]
		}
		outDst[k] = m
	}
	outSrc := make(map[srcKey]match, len(want))
	for k, m := range want {
		k.Class = number[k.Class]
		outSrc[k] = m
	}
	return outDst, outSrc
}

// byClass is the content of each class, as a text that is equal for equal ones.
func byClass(src map[srcKey]match) map[uint32]string {
	keys := slices.SortedFunc(maps.Keys(src), func(a, b srcKey) int {
		return cmp.Or(cmp.Compare(a.Class, b.Class),
			cmp.Compare(a.Prefixlen, b.Prefixlen), slices.Compare(a.Addr[:], b.Addr[:]))
	})
	out := map[uint32]string{}
	for _, k := range keys {
		m := src[k]
		out[k.Class] += fmt.Sprintf("%d %x %d %d;", k.Prefixlen, k.Addr, m.Target, m.Action)
	}
	return out
}

// expand compiles rules into the two tables of a classification, with the
// node's own addresses in them. have is the second table as it is.
func expand(rules []plan.Rule, have map[srcKey]match, own []dstKey) (map[dstKey]match, map[srcKey]match) {
	byDst, bySrc := plan.Classify(rules)
	dst := make(map[dstKey]match, len(byDst)+len(own))
	for _, e := range byDst {
		action := abi.MatchActionPath
		if e.Source {
			action = abi.MatchActionSource
		}
		dst[encodeDst(e.Prefix)] = match{Target: e.Target, Action: uint8(action)}
	}
	// ::/0 does not mean IPv4, though it covers where IPv4 is.
	ipv4 := encodeDst(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
	if _, ok := dst[ipv4]; !ok && covering(dst, ipv4) != (match{}) {
		dst[ipv4] = match{Action: uint8(abi.MatchActionNone)}
	}
	src := make(map[srcKey]match, len(bySrc))
	for _, e := range bySrc {
		src[encodeSrc(e.Class, e.Prefix)] = match{Target: e.Target, Action: uint8(abi.MatchActionPath)}
	}
	dst, src = classes(have, src, dst)
	return withLocal(dst, own), src
}
