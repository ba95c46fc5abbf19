package dataplane

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

const (
	// proxiesMax is WS_PROXIES_MAX of bpf/lib/maps.h.
	proxiesMax = 1024
	// slotsMax is what 16 bits of skb->tc_index can tell apart, less WS_INDEX_PROVEN.
	slotsMax = abi.IndexProven - 1
	// cacheLeast is the smallest content cache: the kernel gives each CPU free
	// entries by the batch, which a smaller one would not have enough of.
	cacheLeast = 2048
	// cachePerCPU is that batch (LOCAL_FREE_TARGET of kernel/bpf/bpf_lru_list.c).
	cachePerCPU = 128
	// cacheMost bounds the memory that a plan can ask for: 2.3 GB.
	cacheMost = 1 << 22
)

// reach is how a function's proxy gets at it on this machine.
type reach struct {
	to   uint32  // 0: it is local
	dmac [6]byte // of the interface that it sends to
}

// proxyKeys gives each function its key in ws_proxies: 1 to 65535, made of its
// name, so that a header that is kept names the same function after a change of
// plans and of agents.
func proxyKeys(proxies []plan.Proxy) (map[string]uint32, error) {
	if len(proxies) > proxiesMax {
		return nil, fmt.Errorf("the plan has %d functions with a proxy, more than the %d that a node holds", len(proxies), proxiesMax)
	}
	out := map[string]uint32{}
	used := map[uint32]bool{}
	for _, p := range byName(proxies) {
		if _, twice := out[p.Function]; twice {
			return nil, fmt.Errorf("function %s has two proxies", p.Function)
		}
		h := fnv.New32a()
		h.Write([]byte(p.Function))
		sum := h.Sum32()
		key := (sum>>16 ^ sum) & 0xffff
		for key == 0 || used[key] {
			key = (key + 1) & 0xffff
		}
		used[key] = true
		out[p.Function] = key
	}
	return out, nil
}

func byName(proxies []plan.Proxy) []plan.Proxy {
	return slices.SortedFunc(slices.Values(proxies), func(a, b plan.Proxy) int { return cmp.Compare(a.Function, b.Function) })
}

// slotsPerCPU is how many slots each CPU gets for each function that is
// recognised by metadata: if there is room, enough for all of its packets to come
// by one CPU, and in total never fewer than the plan says.
func slotsPerCPU(proxies []plan.Proxy, cpus int) (map[string]uint32, error) {
	out := map[string]uint32{}
	total, asked := 0, 0
	for _, p := range proxies {
		if p.Recognise != model.RecogniseMetadata {
			continue
		}
		asked += p.Cache
		out[p.Function] = ceilPower(min(p.Cache, slotsMax+1))
		total += int(out[p.Function]) * cpus
	}
	for total > slotsMax {
		most := ""
		for _, p := range byName(proxies) {
			s := out[p.Function]
			if s > 1 && int(s)/2*cpus >= p.Cache && s > out[most] {
				most = p.Function
			}
		}
		if most == "" {
			return nil, fmt.Errorf("functions that are recognised by metadata are to keep %d headers on %d CPUs, but a node can tell only %d apart: make their caches smaller", asked, cpus, slotsMax)
		}
		out[most] /= 2
		total -= int(out[most]) * cpus
	}
	return out, nil
}

// ceilPower is the lowest power of two that is not below n.
func ceilPower(n int) uint32 {
	p := uint32(1)
	for int(p) < n {
		p *= 2
	}
	return p
}

// needCaches adds to l what the functions of a plan need.
func (l limits) needCaches(n plan.Node, cpus int) (limits, error) {
	byContent := 0
	for _, p := range n.Proxies {
		if p.Cache < 1 || p.Lifetime <= 0 {
			return limits{}, fmt.Errorf("function %s: a cache of %d headers for %s keeps none", p.Function, p.Cache, p.Lifetime)
		}
		if p.Cache > cacheMost {
			return limits{}, fmt.Errorf("function %s: a cache of %d headers is more than the %d that a node holds", p.Function, p.Cache, cacheMost/2)
		}
		if p.Recognise == model.RecogniseContent {
			byContent += p.Cache
		}
	}
	l.cache = cacheLeast
	if byContent > 0 {
		// Twice, since an entry may lie free with one CPU while another
		// evicts.
		want := 2*byContent + cachePerCPU*cpus
		if 2*byContent > cacheMost {
			return limits{}, fmt.Errorf("functions that are recognised by content are to keep %d headers, more than the %d that a node holds", byContent, cacheMost/2)
		}
		l.cache = max(cacheLeast, ceilPower(want))
	}
	slots, err := slotsPerCPU(n.Proxies, cpus)
	if err != nil {
		return limits{}, err
	}
	total := 1 // entry 0 is none
	for _, s := range slots {
		total += int(s) * cpus
	}
	l.slots = ceilPower(total)
	return l, nil
}

// slotRanges gives out parts of ws_slots. What was in use before stays in use
// until the next ones: a program may still be at it.
type slotRanges struct {
	limit uint32 // entries of the map
	have  map[uint32]proxy
	used  []slotRange // ordered
}

type slotRange struct{ first, end uint32 }

func newSlotRanges(limit uint32) *slotRanges {
	return &slotRanges{limit: limit, have: map[uint32]proxy{}, used: []slotRange{{0, 1}}}
}

// keep notes the range of a proxy. The map does not say on how many CPUs it has
// slots; whoever takes a range for as many is told by get.
func (r *slotRanges) keep(id uint32, p proxy) {
	if p.Slots > 0 {
		r.have[id] = p
	}
}

// get returns the first slot of a proxy that has this many on each CPU.
func (r *slotRanges) get(id, slots uint32, cpus int) (uint32, error) {
	// Only now is it known how long those are that were kept.
	for _, k := range slices.Sorted(maps.Keys(r.have)) {
		p := r.have[k]
		r.add(slotRange{p.Slot, p.Slot + p.Slots*uint32(cpus)})
	}
	if p, ok := r.have[id]; ok && p.Slots == slots {
		return p.Slot, nil
	}
	size := slots * uint32(cpus)
	first := uint32(0)
	for _, u := range r.used {
		if u.first > first && u.first-first >= size {
			break
		}
		first = max(first, u.end)
	}
	if first+size > min(r.limit, slotsMax+1) {
		return 0, fmt.Errorf("%w: no %d slots are left", errCapacity, size)
	}
	r.add(slotRange{first, first + size})
	return first, nil
}

func (r *slotRanges) add(s slotRange) {
	if slices.Contains(r.used, s) {
		return
	}
	r.used = append(r.used, s)
	slices.SortFunc(r.used, func(a, b slotRange) int { return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.end, b.end)) })
}

// desireProxies adds what the functions of a plan need. It returns their keys,
// by function; those that cannot be reached have a key, but no entry, so that
// their packets are refused.
func (w *wanted) desireProxies(n plan.Node, at wiring, have tables, ix indexes) (map[string]uint32, error) {
	keys, err := proxyKeys(n.Proxies)
	if err != nil {
		return nil, err
	}
	slots, err := slotsPerCPU(n.Proxies, at.cpus)
	if err != nil {
		return nil, err
	}
	var rules []plan.Rule
	for _, p := range byName(n.Proxies) {
		if p.Local && p.Recognise != model.RecogniseMetadata {
			return nil, fmt.Errorf("function %s: a function in this node's kernel is recognised by metadata only", p.Function)
		}
		id := keys[p.Function]
		if p.Local {
			for _, m := range p.Matches {
				rules = append(rules, plan.Rule{Match: m, Target: id})
			}
		}
		r, ok := at.reach[p.Function]
		if !ok {
			continue
		}
		s, fresh, err := ix.proxies.get(id)
		if err != nil {
			return nil, err
		}
		if fresh {
			w.freshProxies = append(w.freshProxies, s)
		}
		entry := encodeProxy(p, r, s)
		if p.Recognise == model.RecogniseMetadata {
			entry.Slots = slots[p.Function]
			if entry.Slot, err = ix.slots.get(id, entry.Slots, at.cpus); err != nil {
				return nil, err
			}
		}
		w.proxies[id] = entry
	}
	w.localDst, w.localSrc = expand(rules, have.localSrc, nil)
	return keys, nil
}

func encodeProxy(p plan.Proxy, r reach, statsIndex uint32) proxy {
	out := proxy{
		LifetimeNs: uint64(p.Lifetime.Nanoseconds()), To: r.to, Stats: statsIndex,
		Recognise: uint8(abi.RecogniseContent), OnUnknown: uint8(p.OnUnknown), Dmac: r.dmac,
	}
	if p.Recognise == model.RecogniseMetadata {
		out.Recognise = uint8(abi.RecogniseMetadata)
	}
	if p.Segments == model.SegmentsCut {
		out.Cut = 1
	}
	if p.Via.IsValid() {
		out.HasVia, out.Via = 1, p.Via.As16()
	}
	return out
}

// NeedsCutters tells whether a node cuts super-packets for its functions, or
// sends what a local one lets go to its own next segment, and so needs the two
// pairs of devices that CutterPairs names.
func NeedsCutters(n plan.Node) bool {
	return slices.ContainsFunc(n.Proxies, func(p plan.Proxy) bool { return p.Local || p.Segments == model.SegmentsCut })
}

// CutterPair names a veth pair that cuts super-packets: what goes into In comes
// out of Out frame by frame. Whoever calls Apply makes both before.
type CutterPair struct{ In, Out string }

// CutterPairs are those on the way to functions and on the way back from them.
func CutterPairs() (to, back CutterPair) {
	return CutterPair{"wscut0", "wscut1"}, CutterPair{"wsback0", "wsback1"}
}

func hasLocal(n plan.Node) bool {
	return slices.ContainsFunc(n.Proxies, func(p plan.Proxy) bool { return p.Local })
}
