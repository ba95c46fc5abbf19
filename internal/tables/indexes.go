package tables

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

// ErrCapacity: the maps are too small for the plan, so that a new generation is
// needed.
var ErrCapacity = errors.New("the plan needs larger maps")

// StatsKey identifies an entry of ws_stats: of a path's headend (without SID), or of a SID on a
// path. All epochs share one entry.
type StatsKey struct {
	Sid  uint64 // as in hopKey
	Path uint32 // __be32
}

// CounterKey identifies a slot of ws_numbers.
type CounterKey struct {
	Path  uint32 // __be32
	Epoch uint8
}

// allocator assigns the lowest free numbers below limit. A number that was in use stays in use
// until the next allocator: a program may still use it.
type allocator[K comparable] struct {
	Have  map[K]uint32
	used  map[uint32]bool
	next  uint32
	limit uint32
}

func newAllocator[K comparable](limit uint32) *allocator[K] {
	return &allocator[K]{Have: map[K]uint32{}, used: map[uint32]bool{}, limit: limit}
}

func (a *allocator[K]) keep(k K, i uint32) {
	a.Have[k] = i
	a.used[i] = true
}

// get returns k's number, and whether it is a new one.
func (a *allocator[K]) get(k K) (index uint32, fresh bool, err error) {
	if i, ok := a.Have[k]; ok {
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
		return 0, fmt.Errorf("%w: more than %d entries", ErrCapacity, a.limit)
	}
	a.used[a.next] = true
	return a.next, nil
}

// Indexes are the numbers by which entries of one map name entries of another. They are
// recovered from the maps, so that they outlive the agent.
type Indexes struct {
	headends *allocator[abi.Headend] // by content: an entry that a rule names never changes
	Stats    *allocator[StatsKey]
	counters *allocator[CounterKey] // slots of ws_numbers
	windows  *windowSpace           // words of ws_windows
	Proxies  *allocator[uint32]     // of ws_proxy_stats, by key in ws_proxies
	origins  *allocator[uint32]     // of abi.Proxy.Origin less 1, by key in ws_proxies
	Slots    *ranges                // of ws_slots
	Buckets  *ranges                // of ws_buckets
}

// Limits are the sizes of the maps that user space chooses.
type Limits struct {
	Lines           uint32 // of each table of prefixes
	Headends, Stats uint32
	Hops, Egresses  uint32
	Places          uint32
	Buckets         uint32 // for headers that are found by content, abi.Ways each
	Slots           uint32 // that are found by metadata, and entry 0
}

func NewIndexes(l Limits, p Placed) Indexes {
	ix := Indexes{
		headends: newAllocator[abi.Headend](l.Headends),
		Stats:    newAllocator[StatsKey](l.Stats),
		counters: newAllocator[CounterKey](abi.NumberSlabs * abi.NumberSlots),
		windows:  NewWindowSpace(p.Windows),
		Proxies:  newAllocator[uint32](proxiesMax),
		origins:  newAllocator[uint32](abi.OriginsMax),
		Slots:    NewSlotRanges(l.Slots),
		Buckets:  NewBucketRanges(l.Buckets),
	}
	for k, slot := range p.Numbers {
		ix.counters.keep(k, slot)
	}
	return ix
}

// RecoverIndexes reads them from the entries and from the slabs.
func RecoverIndexes(have Contents, l Limits, p Placed) Indexes {
	ix := NewIndexes(l, p)
	// In order, so that of two entries always the same one wins.
	for _, i := range slices.Sorted(maps.Keys(have.Headends)) {
		h := have.Headends[i]
		ix.headends.keep(h, i)
		ix.Stats.keep(StatsKey{Path: h.Path}, h.Stats)
	}
	for _, id := range slices.Sorted(maps.Keys(have.Proxies)) {
		p := have.Proxies[id]
		ix.Proxies.keep(id, p.Stats)
		if p.Origin > 0 {
			ix.origins.keep(id, uint32(p.Origin-1))
		}
		if p.Recognise == uint8(abi.RecogniseMetadata) {
			ix.Slots.keep(id, p)
		} else {
			ix.Buckets.keep(id, p)
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(have.Hops), CompareHopKeys) {
		ix.Stats.keep(StatsKey{Sid: k.Sid, Path: k.Path}, have.Hops[k].Stats)
	}
	return ix
}

func CompareHopKeys(a, b abi.HopKey) int {
	return cmp.Or(cmp.Compare(a.Sid, b.Sid), cmp.Compare(a.Path, b.Path), cmp.Compare(a.Epoch, b.Epoch))
}

// classes assigns numbers to source classes. A destination rule and the class that it names are
// two entries, so a class must not change while a rule names it: a class with unchanged content
// keeps its number, any other class gets a new one.
func classes(have, want map[SrcKey]Match, dst map[DstKey]Match) (map[DstKey]Match, map[SrcKey]Match) {
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
	outDst := make(map[DstKey]Match, len(dst))
	for k, m := range dst {
		if m.Action == uint8(abi.MatchActionSource) {
			m.Target = number[m.Target]
		}
		outDst[k] = m
	}
	outSrc := make(map[SrcKey]Match, len(want))
	for k, m := range want {
		k.Class = number[k.Class]
		outSrc[k] = m
	}
	return outDst, outSrc
}

// byClass is the content of each class, as a text that is equal for equal ones.
func byClass(src map[SrcKey]Match) map[uint32]string {
	keys := slices.SortedFunc(maps.Keys(src), func(a, b SrcKey) int {
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
func expand(rules []plan.Rule, have map[SrcKey]Match, own []DstKey) (map[DstKey]Match, map[SrcKey]Match) {
	byDst, bySrc := plan.Classify(rules)
	dst := make(map[DstKey]Match, len(byDst)+len(own))
	for _, e := range byDst {
		action := abi.MatchActionPath
		if e.Source {
			action = abi.MatchActionSource
		}
		dst[EncodeDst(e.Prefix)] = Match{Target: e.Target, Action: uint8(action)}
	}
	// ::/0 does not mean IPv4, though it covers where IPv4 is.
	ipv4 := EncodeDst(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
	if _, ok := dst[ipv4]; !ok && Covering(dst, ipv4) != (Match{}) {
		dst[ipv4] = Match{Action: uint8(abi.MatchActionNone)}
	}
	src := make(map[SrcKey]Match, len(bySrc))
	for _, e := range bySrc {
		src[EncodeSrc(e.Class, e.Prefix)] = Match{Target: e.Target, Action: uint8(abi.MatchActionPath)}
	}
	dst, src = classes(have, src, dst)
	return withLocal(dst, own), src
}
