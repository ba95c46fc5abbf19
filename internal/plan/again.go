package plan

import (
	"encoding/binary"
	"net/netip"
	"reflect"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
)

// CompileAfter is Compile of a domain of which most was compiled before: last is the compilation of was, and the keyring was made
// of last's paths. The result equals that of Compile. It costs by the chains that differ and by the nodes on them; what does not differ
// is last's memory, which nobody may write to. Compile does the rest: where not only chains differ, or these are in another order, where there
// are gateways, or functions at which paths start, and where there is a mistake.
func CompileAfter(was model.Domain, last *Domain, d model.Domain, keys *Keyring) (*Domain, error) {
	if out := compileChanged(was, last, d, keys); out != nil {
		return out, nil
	}
	return Compile(d, keys)
}

// compileChanged compiles the chains that differ; nil: Compile has to.
func compileChanged(was model.Domain, last *Domain, d model.Domain, keys *Keyring) *Domain {
	was, errs := instances(was)
	d, more := instances(d)
	if len(errs)+len(more) > 0 {
		return nil
	}
	if len(d.Chains) == 0 || len(d.Services) > 0 || !sameMemory(keys.last, last.Paths) || !sameBeside(was, d) || len(last.Nodes) != len(d.Nodes) ||
		slices.ContainsFunc(d.Functions, func(f model.Function) bool { return f.Proxy.OnUnknown == model.OnUnknownOriginate }) {
		return nil
	}
	x, ok := compareChains(was.Chains, last.Paths, d.Chains, keys.rotate)
	if !ok {
		return nil
	}
	c := newCompiler(d)
	some := d
	some.Chains = nil
	for _, i := range x.changed {
		if c.check(d.Chains[i]) != nil {
			return nil
		}
		some.Chains = append(some.Chains, d.Chains[i])
	}
	if some.CheckServices() != nil || model.SomeOverlap(d.Chains, x.changed) {
		return nil
	}
	paths := make([]Path, 0, len(last.Paths)+2*len(x.changed))
	var fresh []int // in paths
	for i := 0; i < len(d.Chains); i++ {
		if r := x.kept[i]; r.to > 0 {
			for ; i+1 < len(d.Chains) && x.kept[i+1].to > 0 && x.kept[i+1].from == r.to; i++ {
				r.to = x.kept[i+1].to
			}
			paths = append(paths, last.Paths[r.from:r.to]...)
			continue
		}
		ch := d.Chains[i]
		for _, dir := range ch.Directions() {
			for _, p := range c.parts(ch, dir) {
				fresh = append(fresh, len(paths))
				paths = append(paths, p)
			}
		}
	}
	few := keys.few(x.before)
	if !assignFreshPathIDs(paths, fresh) || !c.assignFreshSIDs(paths, fresh, last.Nodes, few, keys) {
		return nil
	}
	few.beyond = keys.beyondOf(paths, fresh)
	touched := map[string]bool{}
	for i := range x.before {
		x.before[i].eachNode(func(name string) { touched[name] = true })
	}
	for _, i := range fresh {
		c.assignLabels(&paths[i])
		if few.secrets(&paths[i]) != nil {
			return nil
		}
		paths[i].eachNode(func(name string) { touched[name] = true })
	}
	chains := map[string]bool{} // that pass these nodes
	for _, i := range fresh {
		chains[paths[i].Chain] = true
	}
	for i := range d.Nodes {
		n := &last.Nodes[i]
		if n.Name != d.Nodes[i].Name {
			return nil
		}
		if touched[n.Name] {
			for id := range n.PathIDs() {
				chains[id.Chain] = true
			}
		}
	}
	made := nodePlans(d, pathsOf(paths, chains), touched)
	out := &Domain{Block: d.Block, Paths: paths, Nodes: slices.Clone(last.Nodes)}
	for i := range d.Nodes {
		if touched[d.Nodes[i].Name] {
			if out.Nodes[i], made = made[0], made[1:]; out.Nodes[i].fits() != nil {
				return nil
			}
		}
	}
	return out
}

// chainChanges are the chains of a domain beside those of the compilation before.
type chainChanges struct {
	kept    []run  // by chain: its paths of before; to 0: it is compiled anew
	changed []int  // the others
	before  []Path // of chains that change or are gone
}

// run are the paths [from, to).
type run struct{ from, to int }

// compareChains is false if chains have another order, or too many differ, or the paths are not of those chains.
func compareChains(was []model.Chain, paths []Path, is []model.Chain, rotates func(string) bool) (x chainChanges, ok bool) {
	x.kept = make([]run, len(is))
	at, next := 0, 0 // in is and paths
	var stays map[string]bool
	for i := range was {
		r := run{next, next}
		for r.to < len(paths) && paths[r.to].Chain == was[i].Name {
			r.to++
		}
		if next = r.to; r.from == r.to {
			return x, false
		}
		if at == len(is) || is[at].Name != was[i].Name {
			if stays == nil {
				stays = make(map[string]bool, len(is))
				for j := range is {
					stays[is[j].Name] = true
				}
			}
			if !stays[was[i].Name] {
				x.before = append(x.before, paths[r.from:r.to]...)
				continue
			}
			for at < len(is) && is[at].Name != was[i].Name { // they are new, or further back before
				x.changed = append(x.changed, at)
				at++
			}
			if at == len(is) {
				return x, false
			}
		}
		if was[i].Equal(is[at]) && !rotates(is[at].Name) {
			x.kept[at] = r
		} else {
			x.changed, x.before = append(x.changed, at), append(x.before, paths[r.from:r.to]...)
		}
		at++
	}
	for ; at < len(is); at++ {
		x.changed = append(x.changed, at)
	}
	// With more than these it is quicker to compile all.
	return x, next == len(paths) && len(x.changed)+len(x.before) <= max(8, len(is)/8)
}

// sameBeside reports whether two domains are the same but for their chains.
func sameBeside(a, b model.Domain) bool {
	if sameMemory(a.Nodes, b.Nodes) {
		a.Nodes, b.Nodes = nil, nil
	}
	if sameMemory(a.Functions, b.Functions) {
		a.Functions, b.Functions = nil, nil
	}
	a.Chains, b.Chains = nil, nil
	return reflect.DeepEqual(a, b)
}

func sameMemory[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// assignFreshPathIDs gives the fresh ones of the paths the ids that assignPathIDs would; false: some path
// has another than that of its name, or would have.
func assignFreshPathIDs(paths []Path, fresh []int) bool {
	ids := make(map[uint32]bool, len(fresh))
	for _, i := range fresh {
		id := pathHash(paths[i].PathID)
		if id == 0 || ids[id] {
			return false
		}
		ids[id] = true
		paths[i].Path = id
	}
	k := 0
	for i := range paths {
		if k < len(fresh) && fresh[k] == i {
			k++
			continue
		}
		if p := &paths[i]; ids[p.Path] || p.Path != pathHash(p.PathID) {
			return false
		}
	}
	return true
}

// assignFreshSIDs gives the fresh ones of the paths the SIDs that assignSIDs would. nodes are the plans before; few has the paths of before in
// whose places they are; false: a locator has no SID left.
func (c *compiler) assignFreshSIDs(paths []Path, fresh []int, nodes []Node, few, keys *Keyring) bool {
	locators := map[string]netip.Prefix{}
	for _, i := range fresh {
		for _, h := range paths[i].Hops[1:] {
			locators[h.Node] = c.nodes[h.Node].Locator
		}
	}
	var left []int
	from := map[string]bool{} // the nodes that SIDs are assigned from
	for _, i := range fresh {
		// No two paths of the last compilation share one, so none of these is taken.
		sids, ok := few.sids(paths[i], locators)
		if !ok {
			left = append(left, i)
			for _, h := range paths[i].Hops[1:] {
				from[h.Node] = true
			}
			continue
		}
		for j, s := range sids {
			paths[i].Hops[j+1].SID = s
		}
	}
	if len(left) == 0 {
		return true
	}
	// Each visit of before is in the plan of its node, and has a SID of that node's locator.
	taken := map[netip.Addr]bool{}
	for i := range nodes {
		n := &nodes[i]
		if !from[n.Name] {
			continue
		}
		for j := range n.Endpoints {
			taken[n.Endpoints[j].SID] = true
		}
		for j := range n.Egresses {
			taken[n.Egresses[j].SID] = true
		}
	}
	each := func(p *Path, f func(sid netip.Addr)) {
		for j := 1; j < len(p.Hops); j++ {
			f(p.Hops[j].SID)
		}
	}
	if !keys.keep {
		for i := range few.last {
			each(&few.last[i], func(sid netip.Addr) { delete(taken, sid) })
		}
	}
	for _, i := range fresh {
		each(&paths[i], func(sid netip.Addr) { taken[sid] = true })
	}
	if keys.keep {
		keys.takenOf(taken, locators, from)
	}
	next := map[string]int{}
	for _, i := range left {
		for j := range paths[i].Hops[1:] {
			h := &paths[i].Hops[j+1]
			for {
				sid, ok := instance(locators[h.Node], next[h.Node])
				if !ok {
					return false
				}
				next[h.Node]++
				if sid.IsValid() && !taken[sid] {
					taken[sid] = true
					h.SID = sid
					break
				}
			}
		}
	}
	return true
}

// takenOf adds the SIDs of nodes that earlier paths have which nodes still hold.
func (k *Keyring) takenOf(taken map[netip.Addr]bool, locators map[string]netip.Prefix, nodes map[string]bool) {
	if len(k.also) == 0 {
		return
	}
	// Locators are /49 to /64, so the upper 64 bits say which one a SID is of.
	upper := func(a netip.Addr) uint64 {
		b := a.As16()
		return binary.BigEndian.Uint64(b[:8])
	}
	near := map[int]map[uint64]bool{} // by length
	for name := range nodes {
		l := locators[name]
		if near[l.Bits()] == nil {
			near[l.Bits()] = map[uint64]bool{}
		}
		near[l.Bits()][upper(l.Addr())>>(64-l.Bits())] = true
	}
	for bits, of := range near {
		var low [256]bool // most SIDs need no look-up
		for at := range of {
			low[byte(at)] = true
		}
		for _, list := range k.also {
			for i := range list {
				p := &list[i]
				for j := 1; j < len(p.Hops); j++ {
					if at := upper(p.Hops[j].SID) >> (64 - bits); low[byte(at)] && of[at] {
						taken[p.Hops[j].SID] = true
					}
				}
			}
		}
	}
}

// eachNode calls f with the nodes of a path; some come several times.
func (p *Path) eachNode(f func(name string)) {
	for i := range p.Ingress {
		f(p.Ingress[i].Node)
	}
	for i := range p.Hops {
		f(p.Hops[i].Node)
	}
}

// pathsOf are the paths of some chains, in order.
func pathsOf(paths []Path, chains map[string]bool) (out []Path) {
	for i := range paths {
		if chains[paths[i].Chain] {
			out = append(out, paths[i])
		}
	}
	return out
}
