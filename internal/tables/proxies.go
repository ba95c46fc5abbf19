package tables

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
	// proxiesMax is WS_PROXIES_MAX of bpf/lib/node/maps.h.
	proxiesMax = 1024
	// slotsMax is the number of values of the 16-bit skb->tc_index, without WS_INDEX_PROVEN and
	// WS_INDEX_LET_GO.
	slotsMax = abi.IndexLetGo - 1
	// BucketsLeast is the least number of buckets of one function.
	BucketsLeast = 8
	// cacheMost bounds the memory for a plan's caches: 2 GB.
	cacheMost = 1 << 21
)

// Reach is how a function's proxy gets at it on this machine.
type Reach struct {
	To   uint32  // 0: it is local; noInterface: it is not there
	Dmac [6]byte // of the interface that it sends to
	Cuts bool    // the device To segments super-packets itself
	// Namespace is the id of the namespace behind To in the node's network namespace, plus 1; 0:
	// it has no id there.
	Namespace int
}

// noInterface is the index of no device.
const noInterface = ^uint32(0)

// ProxyKeys gives each function its key in ws_proxies: 1 to 65533, derived from its name, so
// that a kept header names the same function after a change of plans and of agents.
func ProxyKeys(proxies []plan.Proxy) (map[string]uint32, error) {
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
		for key == 0 || key >= abi.IndexLetGo || used[key] {
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

// SlotsPerCPU is the number of slots of each CPU for each function that is recognised by
// metadata: if there is room, enough for all of its packets on one CPU, and in total at least
// the number in the plan.
func SlotsPerCPU(proxies []plan.Proxy, cpus int) (map[string]uint32, error) {
	out := map[string]uint32{}
	total, asked := 0, 0
	room := func(n uint32) int { return int(slotRoom(n, cpus)) }
	for _, p := range proxies {
		if p.Recognise != model.RecogniseMetadata {
			continue
		}
		asked += p.Cache
		out[p.Function] = ceilPower(min(p.Cache, slotsMax+1))
		total += room(out[p.Function])
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
		total -= room(out[most])
		out[most] /= 2
		total += room(out[most])
	}
	return out, nil
}

// slotRoom is the highest number of entries of ws_slots for a function with n slots for each
// CPU. With fewer than abi.SlotsNear slots some entries before the next function's may stay
// unused: see struct ws_proxy.
func slotRoom(n uint32, cpus int) uint32 {
	size := n * uint32(cpus)
	if n < abi.SlotsNear {
		size = (size + abi.SlotsNear - 1) / abi.SlotsNear * abi.SlotsNear
	}
	return size
}

// ceilPower is the lowest power of two that is not below n.
func ceilPower(n int) uint32 {
	p := uint32(1)
	for int(p) < n {
		p *= 2
	}
	return p
}

// needCaches adds the sizes for the functions of a plan to l.
func (l Limits) needCaches(n plan.Node, cpus int) (Limits, error) {
	byContent, buckets := 0, 0
	for _, p := range n.Proxies {
		if p.Cache < 1 || p.Lifetime <= 0 {
			return Limits{}, fmt.Errorf("function %s: a cache of %d headers for %s keeps none", p.Function, p.Cache, p.Lifetime)
		}
		if p.Recognise != model.RecogniseContent {
			continue
		}
		if p.Cache > cacheMost {
			return Limits{}, fmt.Errorf("function %s: a cache of %d headers is more than the %d that a node holds", p.Function, p.Cache, cacheMost)
		}
		byContent += p.Cache
		buckets += int(bucketsOf(p))
	}
	if byContent > cacheMost {
		return Limits{}, fmt.Errorf("functions that are recognised by content are to keep %d headers, more than the %d that a node holds", byContent, cacheMost)
	}
	l.Buckets = roomFor(buckets)
	slots, err := SlotsPerCPU(n.Proxies, cpus)
	if err != nil {
		return Limits{}, err
	}
	total := 1 // entry 0 is reserved
	for _, s := range slots {
		total += int(slotRoom(s, cpus))
	}
	l.Slots = ceilPower(total)
	return l, nil
}

// bucketsOf is how many buckets a function has that is recognised by content.
func bucketsOf(p plan.Proxy) uint32 {
	return uint32(max(BucketsLeast, (p.CacheEntries()+abi.Ways-1)/abi.Ways))
}

// roomFor is how many buckets a node has where its functions need n: some more
// while they are few, so that another function needs no new generation.
func roomFor(n int) uint32 {
	const least, step = 512, 8192
	if n < step {
		return max(least, ceilPower(n))
	}
	return uint32((n + step - 1) / step * step)
}

// ranges assigns parts of an array to proxies: of ws_slots or ws_buckets. A part that was in use
// stays in use until the next ranges: a program may still use it.
type ranges struct {
	limit uint32 // entries that can be assigned, and those before first
	have  map[uint32]abi.Proxy
	used  []entries // ordered
	// exact: a range of another length is no use.
	exact bool
}

type entries struct{ first, end uint32 }

// NewSlotRanges are ranges of ws_slots. Entry 0 is reserved.
func NewSlotRanges(limit uint32) *ranges {
	return &ranges{limit: min(limit, slotsMax+1), have: map[uint32]abi.Proxy{}, used: []entries{{0, 1}}, exact: true}
}

func NewBucketRanges(limit uint32) *ranges {
	return &ranges{limit: limit, have: map[uint32]abi.Proxy{}}
}

// keep notes the range of a proxy. The map does not contain the number of CPUs that have slots:
// Get receives that number.
func (r *ranges) keep(id uint32, p abi.Proxy) {
	if p.Slots > 0 {
		r.have[id] = p
	}
}

// Get returns the range of a proxy that has n entries, or at least as many, for
// each of so many CPUs.
func (r *ranges) Get(id, n uint32, cpus int) (first, each uint32, err error) {
	// Only now is it known how long those are that were kept.
	for _, k := range slices.Sorted(maps.Keys(r.have)) {
		p := r.have[k]
		r.add(entries{p.Slot, p.Slot + p.Slots*uint32(cpus)})
	}
	if p, ok := r.have[id]; ok && (p.Slots == n || p.Slots > n && !r.exact) {
		return p.Slot, p.Slots, nil
	}
	size := n * uint32(cpus)
	for _, u := range r.used {
		if u.first > first && u.first-first >= size {
			break
		}
		first = r.place(max(first, u.end), n)
	}
	if first+size > r.limit {
		return 0, 0, fmt.Errorf("%w: no %d entries are left for headers", ErrCapacity, size)
	}
	r.add(entries{first, first + size})
	return first, n, nil
}

// place is the first entry from first on where a range may begin that has n for each CPU:
// see struct ws_proxy.
func (r *ranges) place(first, n uint32) uint32 {
	if !r.exact || n < abi.SlotsNear {
		return first
	}
	return (first+abi.SlotsNear-2)/abi.SlotsNear*abi.SlotsNear + 1
}

func (r *ranges) add(e entries) {
	if slices.Contains(r.used, e) {
		return
	}
	r.used = append(r.used, e)
	slices.SortFunc(r.used, func(a, b entries) int { return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.end, b.end)) })
}

// desireProxies adds the entries of a plan's functions. It returns their keys, by function. The
// entry of a function that cannot be reached is marked as gone, so that packets for it are
// refused.
func (w *Wanted) desireProxies(n plan.Node, at Wiring, have Contents, ix Indexes) (map[string]uint32, error) {
	keys, err := ProxyKeys(n.Proxies)
	if err != nil {
		return nil, err
	}
	slots, err := SlotsPerCPU(n.Proxies, at.Cpus)
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
		r, ok := at.Reach[p.Function]
		if !ok {
			r.To = noInterface
		}
		s, fresh, err := ix.Proxies.get(id)
		if err != nil {
			return nil, err
		}
		if fresh {
			w.FreshProxies = append(w.FreshProxies, s)
		}
		entry := encodeProxy(p, r, s)
		if entry.Stream != 0 {
			entry.Conns = connShare(n.Proxies)
		}
		if p.Recognise == model.RecogniseMetadata {
			entry.Slot, entry.Slots, err = ix.Slots.Get(id, slots[p.Function], at.Cpus)
		} else {
			entry.Slot, entry.Slots, err = ix.Buckets.Get(id, bucketsOf(p), 1)
		}
		if err != nil {
			return nil, err
		}
		if p.OnUnknown == model.OnUnknownOriginate {
			o, _, err := ix.origins.get(id)
			if err != nil {
				return nil, err
			}
			entry.Origin = uint8(o + 1)
		}
		w.Proxies[id] = entry
	}
	w.LocalDst, w.LocalSrc = expand(rules, have.LocalSrc, nil)
	return keys, nil
}

// OnwardMax is how many connections onward a gateway has at most: half of the table. The other half is for its clients, and
// for functions on byte streams.
const OnwardMax = abi.ConnsMax / 2

// connShare is how many entries of ws_conns each function on bytes of a node may add, a gateway for its clients among them: all
// have the same.
func connShare(proxies []plan.Proxy) uint32 {
	all, functions := uint32(abi.ConnsMax), uint32(0)
	for _, p := range proxies {
		if p.Stream != nil || p.Gateway != nil {
			functions++
		}
		if p.Gateway != nil {
			all -= OnwardMax
		}
	}
	return all / max(functions, 1)
}

func encodeProxy(p plan.Proxy, r Reach, statsIndex uint32) abi.Proxy {
	out := abi.Proxy{
		LifetimeNs: uint64(p.Lifetime.Nanoseconds()), To: r.To, Stats: statsIndex,
		Recognise: uint8(abi.RecogniseContent), OnUnknown: uint8(p.OnUnknown), Dmac: r.Dmac,
	}
	if p.Recognise == model.RecogniseMetadata {
		out.Recognise = uint8(abi.RecogniseMetadata)
	}
	if p.Segments == model.SegmentsCut {
		out.Cut = 1
		if r.Cuts {
			out.Cuts = 1
		}
	}
	if r.To == noInterface {
		out.Gone = 1
	}
	if p.Rewrites {
		out.Rewrites = 1
	}
	if p.Netfilter != nil && p.Stream == nil {
		out.Mark = 1
		if !p.Local {
			out.Peer = 1
		}
		// Without a namespace id there is no bypass.
		if out.Netns = -1; !p.Local {
			out.Netns = int32(r.Namespace - 1)
		}
		if p.Local || r.Namespace > 0 {
			out.Bypass = p.Netfilter.BypassMark(p.Function)
		}
		for i, a := range p.Netfilter.Addresses {
			out.Address[i] = Words(a)
		}
	}
	if p.Stream != nil {
		out.Stream, out.Peer = uint8(abi.BytesStream), 1
	}
	if p.Gateway != nil {
		out.Stream, out.Peer = uint8(abi.BytesGateway), 1
	}
	if p.Via.IsValid() {
		out.HasVia, out.Via = 1, p.Via.As16()
	}
	return out
}

// NeedsCutters reports whether a node segments super-packets for its functions, or sends packets
// from a local function to a next segment on the node itself; both need the two pairs of devices
// that CutterPairs names.
func NeedsCutters(n plan.Node) bool {
	return slices.ContainsFunc(n.Proxies, func(p plan.Proxy) bool { return p.Local || p.Segments == model.SegmentsCut })
}

// CutterPair names a veth pair that segments super-packets: a super-packet sent into In arrives
// at Out as frames. The caller of Apply makes both before.
type CutterPair struct{ In, Out string }

// CutterPairs are those on the way to functions and on the way back from them.
func CutterPairs() (to, back CutterPair) {
	return CutterPair{"wscut0", "wscut1"}, CutterPair{"wsback0", "wsback1"}
}

// EnterCutter is the one before headends of paths over labels.
func EnterCutter() CutterPair { return CutterPair{"wsenter0", "wsenter1"} }

// Cutters are all that a node needs.
func Cutters(n plan.Node) (out []CutterPair) {
	if NeedsCutters(n) {
		to, back := CutterPairs()
		out = append(out, to, back)
	}
	if NeedsEnterCutter(n) {
		out = append(out, EnterCutter())
	}
	return out
}

// NeedsEnterCutter reports whether a node is the headend of a path over labels. The kernel
// segments no super-packet with labels.
func NeedsEnterCutter(n plan.Node) bool {
	return slices.ContainsFunc(n.Headends, func(h plan.Headend) bool { return h.OverLabels() })
}

func HasLocal(n plan.Node) bool {
	return slices.ContainsFunc(n.Proxies, func(p plan.Proxy) bool { return p.Local })
}

// HasOwn reports whether a path takes packets that the node originates, or marked packets.
func HasOwn(n plan.Node) bool {
	return slices.ContainsFunc(n.Headends, func(h plan.Headend) bool { return h.Own || h.Match.ByMark() })
}

// LeavesOverLabels reports whether packets get labels as they leave: the node's own and marked ones,
// those from functions in its kernel, and frames of super-packets that its functions send.
func LeavesOverLabels(n plan.Node) bool {
	return n.OverLabels() && HasLocal(n) ||
		slices.ContainsFunc(n.Headends, func(h plan.Headend) bool {
			return h.OverLabels() && (h.Own || h.Match.ByMark() || h.From != "")
		})
}
