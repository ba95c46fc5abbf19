package plan

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
)

// Compile makes the plan of a domain. It reads the keyring and does not change it: the next
// keyring is made of the result's Paths. Without a keyring (nil) every path is new, with secrets
// from crypto/rand.
//
// internal/manifest has checked the domain. Compile joins the errors that such a domain can
// still have: references, room, MTU.
func Compile(d model.Domain, keys *Keyring) (*Domain, error) {
	if keys == nil {
		keys = NewKeyring(rand.Reader, nil)
	}
	d, errs := instances(d)
	c := newCompiler(d)
	c.errs = errs
	for _, f := range d.Functions {
		if err := c.checkProxy(f); err != nil {
			c.errs = append(c.errs, fmt.Errorf("function %s: %w", f.Name, err))
		}
	}
	var paths []Path
	for _, ch := range d.Chains {
		if err := c.check(ch); err != nil {
			c.errs = append(c.errs, fmt.Errorf("chain %s: %w", ch.Name, err))
			continue
		}
		for _, dir := range ch.Directions() {
			paths = append(paths, c.parts(ch, dir)...)
		}
	}
	for _, o := range model.FindOverlaps(d.Chains, model.OverlapsMax) {
		c.errs = append(c.errs, o.Err)
	}
	c.checkServices()
	if len(c.errs) > 0 {
		return nil, errors.Join(c.errs...)
	}
	if err := c.assignSIDs(paths, keys); err != nil {
		return nil, err
	}
	short, err := c.fromFunctions(paths)
	if err != nil {
		return nil, err
	}
	paths = append(paths, short...)
	assignPathIDs(paths)
	for i := range paths {
		c.assignLabels(&paths[i])
		if err := keys.secrets(&paths[i]); err != nil {
			return nil, err
		}
	}
	out := &Domain{Block: d.Block, Paths: paths}
	out.Nodes = nodePlans(d, paths, nil)
	for _, n := range out.Nodes {
		if err := n.fits(); err != nil {
			c.errs = append(c.errs, fmt.Errorf("node %s: %w", n.Name, err))
		}
	}
	if len(c.errs) > 0 {
		return nil, errors.Join(c.errs...)
	}
	return out, nil
}

type compiler struct {
	domain    model.Domain
	nodes     map[string]model.Node
	functions map[string]model.Function
	errs      []error
}

func newCompiler(d model.Domain) compiler {
	c := compiler{domain: d, nodes: make(map[string]model.Node, len(d.Nodes)), functions: make(map[string]model.Function, len(d.Functions))}
	for _, n := range d.Nodes {
		c.nodes[n.Name] = n
	}
	for _, f := range d.Functions {
		c.functions[f.Name] = f
	}
	return c
}

// checkProxy checks the requirements of a function's proxy, also if no chain uses the function.
func (c *compiler) checkProxy(f model.Function) error {
	if err := model.CheckIntrusive(f.Intrusive, f.Kind); err != nil {
		return fmt.Errorf("intrusive: %w", err)
	}
	if !f.Kind.Behaviour().Proxied() && f.Kind != model.KindStream {
		return nil
	}
	if _, ok := c.nodes[f.Node]; !ok {
		return fmt.Errorf("node %q does not exist", f.Node)
	}
	if err := f.Proxy.Check(); err != nil {
		return err
	}
	if f.Kind == model.KindNetfilter {
		if err := f.Netfilter.Check(); err != nil {
			return err
		}
		if f.Netfilter.Bypass {
			if err := model.CheckBypass(false, f.Proxy.Rewrites); err != nil {
				return fmt.Errorf("bypass: established %w", err)
			}
		}
	}
	if f.Kind == model.KindStream {
		if f.Netfilter.Namespace != "" {
			if err := f.Stream.CheckFilter(f.Name, f.Netfilter); err != nil {
				return err
			}
		}
		return f.Stream.Check()
	}
	if err := model.CheckOnUnknown(f.Proxy.OnUnknown, f.Netfilter.Namespace); err != nil {
		return fmt.Errorf("on-unknown: %q %w", f.Proxy.OnUnknown, err)
	}
	return nil
}

// check checks the requirements of a path.
func (c *compiler) check(ch model.Chain) error {
	switch {
	case len(ch.Ingress) == 0:
		return errors.New("no ingress; a chain has at least one")
	case len(ch.Functions) == 0:
		return errors.New("no functions; a chain has at least one")
	case ch.Segments() > model.SegmentsMax:
		return fmt.Errorf("%d functions and waypoints; a chain has at most %d, and the egress", ch.Segments()-1, model.SegmentsMax-1)
	case ch.Both && len(ch.Ingress) > 1:
		return errors.New("a chain with several ingress nodes has no reverse")
	case slices.Contains(ch.Ingress, ch.Egress):
		return fmt.Errorf("node %s is ingress and egress; a chain leaves the domain at another node than it enters", ch.Egress)
	case ch.Proof.Scheme > model.SchemeKeyedFlow:
		return fmt.Errorf("proof scheme %s is not known; expect pot, opot, keyed or keyed-flow", ch.Proof.Scheme)
	}
	if err := model.CheckWindow(window(ch)); err != nil {
		return fmt.Errorf("proof window %d %w", ch.Proof.Window, err)
	}
	if err := ch.Match.Check(); err != nil {
		return fmt.Errorf("match %w", err)
	}
	lanes := 0
	for _, name := range append(slices.Clone(ch.Ingress), ch.Egress) {
		if _, ok := c.nodes[name]; !ok {
			return fmt.Errorf("node %q does not exist", name)
		}
	}
	for _, name := range ch.Ingress {
		lanes += cpus(c.nodes[name])
	}
	if lanes > model.LanesMax {
		return fmt.Errorf("its headends declare %d CPUs together; one path may have %d", lanes, model.LanesMax)
	}
	for _, name := range ch.AllFunctions() {
		f, ok := c.functions[name]
		if !ok {
			return fmt.Errorf("function %q does not exist", name)
		}
		if _, ok := c.nodes[f.Node]; !ok {
			return fmt.Errorf("node %q of function %s does not exist", f.Node, name)
		}
		// A packet that lost its header there is recognised by its addresses only.
		if ch.Match.Ordered() && f.Proxy.Local {
			return fmt.Errorf("its match has a priority, and function %s is in the node's own kernel, which takes only matches by prefixes; %s", name, instead(f))
		}
		if ch.OwnTraffic && f.Proxy.Local && (slices.Contains(ch.Ingress, f.Node) || ch.Both && f.Node == ch.Egress) {
			return fmt.Errorf("it takes its headends' own traffic, and function %s is in the kernel of one of them, where own packets cannot be distinguished from packets that lost their header in it; %s", name, instead(f))
		}
		if err := model.CheckFlow(ch.Proof.Scheme, f); err != nil {
			return fmt.Errorf("function %s: %w", name, err)
		}
	}
	if err := ch.CheckReturn(c.isStream); err != nil {
		return err
	}
	if err := ch.CheckStreams(c.isStream, c.nodeOf); err != nil {
		return err
	}
	if err := c.checkLabels(ch); err != nil {
		return err
	}
	for _, a := range ch.Arguments {
		if a.Of < 0 || a.Of >= len(ch.Functions) {
			return fmt.Errorf("an argument is of function %d of %d", a.Of+1, len(ch.Functions))
		}
		f := c.functions[ch.Functions[a.Of]]
		for _, v := range []uint32{a.Forward, a.Reverse} {
			if v != 0 && !slices.Contains(slices.Collect(maps.Values(f.Netfilter.Arguments)), v) {
				return fmt.Errorf("function %s has no argument of value %d", f.Name, v)
			}
		}
	}
	if err := c.checkZones(ch); err != nil {
		return err
	}
	for _, w := range ch.Waypoints {
		if err := model.CheckWaypoint(c.domain.Block, w.SID, c.domain.Nodes); err != nil {
			return fmt.Errorf("waypoint %s %w", w.SID, err)
		}
		if w.Before < 0 || w.Before > len(ch.Functions) {
			return fmt.Errorf("waypoint %s stands before function %d of %d", w.SID, w.Before+1, len(ch.Functions))
		}
	}
	for _, d := range ch.Directions() {
		if err := c.checkSizes(ch.Directed(d)); err != nil {
			return err
		}
	}
	return nil
}

// checkSizes holds that a direction of a chain leaves enough to packets.
func (c *compiler) checkSizes(ch model.Chain) error {
	mtu, declared := c.coreMTU(ch)
	if declared && mtu-chainLen(ch) < model.MTUMin {
		return fmt.Errorf("its headers take %d of the %d bytes that its nodes' core interfaces carry, which leaves less than %d to packets; raise the MTU to %d or shorten the chain",
			chainLen(ch), mtu, model.MTUMin, model.MTUMin+chainLen(ch))
	}
	if _, err := ch.Clamp.MSS(c.innerMTU(ch), ch.Match.Is4()); err != nil {
		return fmt.Errorf("mss-clamp: %w", err)
	}
	return nil
}

// instead names another way to attach a function than in the node's own kernel.
func instead(f model.Function) string {
	if f.Kind == model.KindNetfilter {
		return "give the function a namespace (own)"
	}
	return "put the function behind interfaces"
}

// checkZones holds that a flow which visits a function twice does not meet itself in
// one conntrack zone.
func (c *compiler) checkZones(ch model.Chain) error {
	for _, d := range ch.Directions() {
		directed := ch.Directed(d)
		seen := map[visitOf]bool{}
		for i, name := range directed.Functions {
			if !c.functions[name].Netfilter.Zones {
				continue
			}
			v := visitOf{name, directed.ArgumentOf(i)}
			if seen[v] {
				return fmt.Errorf("it visits function %s twice with the same argument, and connection tracking could not distinguish the visits; give the visits different arguments", name)
			}
			seen[v] = true
		}
	}
	return nil
}

type visitOf struct {
	function string
	argument uint32
}

// cpus is how many lanes a node gets; a Node made by hand may declare none.
func cpus(n model.Node) int {
	if n.CPUs == 0 {
		return model.CPUsDefault
	}
	return n.CPUs
}

// window is the size of a chain's replay windows; a Chain made by hand may
// declare none.
func window(ch model.Chain) int {
	if ch.Proof.Window == 0 {
		return model.WindowDefault
	}
	return ch.Proof.Window
}

// coreMTU is the least MTU that a core interface of the chain's nodes declares, or the domain for
// packets with labels.
func (c *compiler) coreMTU(ch model.Chain) (mtu int, declared bool) {
	if m := c.domain.MPLS; m != nil && m.MTU != 0 && ch.Encapsulation.Type == model.EncapsulationSRMPLS {
		mtu, declared = m.MTU, true
	}
	names := append(slices.Clone(ch.Ingress), ch.Egress)
	for _, f := range ch.Functions {
		names = append(names, c.functions[f].Node)
	}
	for _, name := range names {
		for _, i := range c.nodes[name].Interfaces {
			if i.Role == model.RoleCore && i.MTU != 0 && (!declared || i.MTU < mtu) {
				mtu, declared = i.MTU, true
			}
		}
	}
	return mtu, declared
}

// innerMTU is the MTU of a chain's inner packets; 0: not known.
func (c *compiler) innerMTU(ch model.Chain) int {
	if mtu, declared := c.coreMTU(ch); declared {
		return mtu - chainLen(ch)
	}
	return 0
}

// path makes the path of one direction, without id, SIDs and secrets.
func (c *compiler) path(ch model.Chain, dir model.Direction) Path {
	ch = ch.Directed(dir)
	p := Path{
		PathID:      PathID{Chain: ch.Name, Direction: dir, Scheme: ch.Proof.Scheme, Encapsulation: ch.Encapsulation},
		Match:       ch.Match,
		OwnTraffic:  ch.OwnTraffic,
		OnViolation: ch.Proof.OnViolation,
		Guard:       guardOf(ch),
		Window:      window(ch),
		Hops:        []Hop{{Node: ch.Ingress[0]}},
	}
	lane := 0
	for _, name := range ch.Ingress {
		n := c.nodes[name]
		p.Ingress = append(p.Ingress, Ingress{Node: name, Address: n.Address, Lane: uint16(lane), Lanes: uint16(cpus(n))})
		lane += cpus(n)
	}
	for i, f := range ch.Functions {
		p.Hops = append(p.Hops, Hop{Node: c.functions[f].Node, Function: f, Waypoints: ch.WaypointsBefore(i), Argument: ch.ArgumentOf(i)})
	}
	p.Hops = append(p.Hops, Hop{Node: ch.Egress, Waypoints: ch.WaypointsBefore(len(ch.Functions))})
	p.MTU = c.innerMTU(ch)
	p.MSS, _ = ch.Clamp.MSS(p.MTU, ch.Match.Is4()) // check has reported the error
	return p
}

// assignPathIDs derives a path's id from its name, so that an id does not change with edits
// elsewhere. The id is the FNV-1a hash of "chain/direction", or of "chain/direction/function" if
// the path starts at a function, with ">function" appended if the path ends at one. If two ids
// collide, the later path gets the next free id; the order is that of the names, paths of whole
// chains first. No path has id 0.
func assignPathIDs(paths []Path) {
	order := make([]*Path, len(paths))
	for i := range paths {
		order[i] = &paths[i]
	}
	slices.SortFunc(order, func(a, b *Path) int {
		return cmp.Or(cmp.Compare(min(len(a.From+a.To), 1), min(len(b.From+b.To), 1)), cmp.Compare(a.Chain, b.Chain), cmp.Compare(a.Direction, b.Direction), cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
	})
	taken := map[uint32]bool{0: true}
	for _, p := range order {
		id := pathHash(p.PathID)
		for taken[id] {
			id++
		}
		taken[id] = true
		p.Path = id
	}
}

func pathHash(p PathID) uint32 {
	const basis, prime = 2166136261, 16777619 // of FNV-1a with 32 bits
	h := uint32(basis)
	add := func(s string) {
		for i := range len(s) {
			h = (h ^ uint32(s[i])) * prime
		}
	}
	add(p.Chain)
	add("/")
	add(p.Direction.String())
	if p.From != "" {
		add("/")
		add(p.From)
	}
	if p.To != "" {
		add(">")
		add(p.To)
	}
	return h
}

// assignSIDs assigns a /64 of its node's locator to every visit: its SID of the last
// compilation, or else the lowest free SID, path by path.
func (c *compiler) assignSIDs(paths []Path, keys *Keyring) error {
	locators := map[string]netip.Prefix{}
	for _, n := range c.domain.Nodes {
		locators[n.Name] = n.Locator
	}
	taken := map[netip.Addr]bool{}
	kept := make([]bool, len(paths))
	for i, p := range paths {
		sids, ok := keys.sids(p, locators)
		if !ok || slices.ContainsFunc(sids, func(s netip.Addr) bool { return taken[s] }) {
			continue
		}
		kept[i] = true
		for j, s := range sids {
			taken[s] = true
			paths[i].Hops[j+1].SID = s
		}
	}
	old := keys.kept()
	next := map[string]int{} // by node: no instance below is free
	for i, p := range paths {
		if kept[i] {
			continue
		}
		for j := range p.Hops[1:] {
			h := &p.Hops[j+1]
			locator := locators[h.Node]
			for {
				sid, ok := instance(locator, next[h.Node])
				if !ok {
					return fmt.Errorf("node %s: its locator %s has no SID left for chain %s; give it a shorter prefix", h.Node, locator, p.Chain)
				}
				next[h.Node]++
				if sid.IsValid() && !taken[sid] && !old[sid] {
					taken[sid] = true
					h.SID = sid
					break
				}
			}
		}
	}
	return nil
}

// instance is the n-th /64 of a locator. Instance 0 of the block is reserved: in a compressed
// list (RFC 9800) it marks the end; so its address is not valid here.
func instance(locator netip.Prefix, n int) (sid netip.Addr, ok bool) {
	if n >= 1<<(64-locator.Bits()) {
		return netip.Addr{}, false
	}
	b := locator.Addr().As16()
	i := int(b[6])<<8 | int(b[7]) | n
	if i == 0 {
		return netip.Addr{}, true
	}
	b[6], b[7] = byte(i>>8), byte(i)
	return netip.AddrFrom16(b), true
}

// nodePlans returns each node's plan, without the shares of other nodes. With only, it returns the plans of these nodes, from all paths of all chains
// that pass one of them.
func nodePlans(d model.Domain, paths []Path, only map[string]bool) []Node {
	nodes := make([]Node, 0, len(d.Nodes))
	index := make(map[string]*Node, len(d.Nodes))
	for _, n := range d.Nodes {
		if only != nil && !only[n.Name] {
			continue
		}
		nodes = append(nodes, Node{
			Name:       n.Name,
			Block:      d.Block,
			Address:    n.Address,
			Locator:    n.Locator,
			Advertise:  n.Advertise,
			MPLS:       mplsOf(d, n),
			Interfaces: slices.Clone(n.Interfaces),
		})
		index[n.Name] = &nodes[len(nodes)-1]
	}
	behaviour := map[string]model.Behaviour{} // of functions on these nodes
	for i := range d.Functions {
		n := index[d.Functions[i].Node]
		if n == nil {
			continue
		}
		f := d.Functions[i]
		behaviour[f.Name] = f.Kind.Behaviour()
		if f.Kind == model.KindStream {
			x := Proxy{Function: f.Name, Proxy: f.Proxy, Stream: &Stream{Stream: f.Stream, MTU: streamMTU(f.Name, paths), Intrusive: f.Intrusive}}
			if f.Netfilter.Namespace != "" {
				x.Netfilter = &Netfilter{Netfilter: model.Netfilter{Namespace: f.Netfilter.Namespace, Rules: f.Netfilter.Rules}}
			}
			n.Proxies = append(n.Proxies, x)
		}
		if behaviour[f.Name].Proxied() {
			x := Proxy{Function: f.Name, Proxy: f.Proxy, Matches: localMatches(f, paths)}
			if f.Kind == model.KindNetfilter {
				x.Netfilter = &Netfilter{Netfilter: f.Netfilter, Groups: zoneGroups(f, paths)}
				x.Netfilter.RulesFile, x.Netfilter.RulesAt = "", model.Source{} // of the domain's file
			}
			n.Proxies = append(n.Proxies, x)
		}
	}
	gateways(d, paths, index)
	guarded := guardPaths(paths)
	through := throughs(d, paths)
	for _, p := range paths {
		from, to := sealEnds(d, p)
		for _, in := range p.Ingress {
			n := index[in.Node]
			if n == nil {
				continue
			}
			n.Headends = append(n.Headends, Headend{
				PathID:     p.PathID,
				Match:      p.Match,
				Own:        p.OwnTraffic,
				Segments:   p.Segments(),
				NodeLabels: p.NodeLabels(),
				Lane:       in.Lane,
				Lanes:      in.Lanes,
				MTU:        p.MTU,
				MSS:        p.MSS,
				Share:      p.Shares[0],
				Seal:       from,
				Origins:    sealOrigins(d, p),
			})
		}
		last := len(p.Hops) - 1
		for j := 1; j < last; j++ {
			n := index[p.Hops[j].Node]
			if n == nil {
				continue
			}
			n.Endpoints = append(n.Endpoints, Endpoint{
				PathID:    p.PathID,
				SID:       p.Hops[j].SID,
				Behaviour: behaviour[p.Hops[j].Function],
				Argument:  p.Hops[j].Argument,
				Function:  p.Hops[j].Function,
				Sources:   p.Sources(),
				Share:     p.Shares[j],
			})
		}
		n := index[p.Hops[last].Node]
		if n == nil {
			continue
		}
		of := guarded[endOf(p)]
		if of == p.Path {
			of = 0
		}
		n.Egresses = append(n.Egresses, Egress{
			PathID:      p.PathID,
			SID:         p.Hops[last].SID,
			Sources:     p.Sources(),
			Match:       p.Match,
			Segments:    p.Segments(),
			OnViolation: p.OnViolation,
			Guard:       p.Guard,
			Of:          of,
			Through:     through[p.Path],
			Lanes:       p.Lanes(),
			Window:      p.Window,
			Share:       p.Shares[last],
			Verifier:    p.Verifier,
			Seal:        to,
		})
	}
	return nodes
}

// zoneGroups are the arguments that share a conntrack zone: a flow's two directions
// are one flow. Chains that share an argument share their zone.
func zoneGroups(f model.Function, paths []Path) [][]uint32 {
	if !f.Netfilter.Zones {
		return nil
	}
	groups := map[uint32][]uint32{} // by each of their arguments
	join := func(a, b uint32) {
		all := append(slices.Clone(groups[a]), groups[b]...)
		all = append(all, a, b)
		slices.Sort(all)
		all = slices.Compact(all)
		for _, v := range all {
			groups[v] = all
		}
	}
	visits := map[string]map[model.Direction][]uint32{} // by chain
	for i := range paths {
		p := &paths[i]
		for _, h := range p.Hops {
			if h.Function != f.Name || h.Argument == 0 {
				continue
			}
			join(h.Argument, h.Argument)
			if visits[p.Chain] == nil {
				visits[p.Chain] = map[model.Direction][]uint32{}
			}
			visits[p.Chain][p.Direction] = append(visits[p.Chain][p.Direction], h.Argument)
		}
	}
	for _, v := range visits {
		// The way back visits them the other way round.
		there, back := v[model.Forward], v[model.Reverse]
		for i := range min(len(there), len(back)) {
			join(there[i], back[len(back)-1-i])
		}
	}
	out := [][]uint32{}
	for _, v := range slices.Sorted(maps.Keys(groups)) {
		if groups[v][0] == v {
			out = append(out, groups[v])
		}
	}
	return out
}

// localMatches are the matches of the paths through a function, each once; none
// unless it is local.
func localMatches(f model.Function, paths []Path) []model.Match {
	if !f.Proxy.Local {
		return nil
	}
	var matches []model.Match
	has := map[model.Match]bool{}
	for i := range paths {
		p := &paths[i]
		through := slices.ContainsFunc(p.Hops, func(h Hop) bool { return h.Function == f.Name })
		if through && !has[p.Match] {
			has[p.Match] = true
			matches = append(matches, p.Match)
		}
	}
	return matches
}

// WindowMemory is the memory of the node's replay windows, in bytes: whole slabs.
func (n Node) WindowMemory() int {
	sum := 0
	for _, e := range n.Egresses {
		sum += model.WindowMemory(int(e.Lanes), e.Window)
	}
	return model.WindowSlabs(sum)
}

// Sizes of the data path's maps.
const (
	ProxiesMax  = 1023
	OriginsMax  = 60 // functions that start paths
	HeadendsMax = 65536
	HopsMax     = 2 * 65536
	RulesMax    = 65536 // entries of each of the two levels of a classifier
)

// fits checks whether the data path has room for a node's plan.
func (n Node) fits() error {
	if len(n.Headends) > HeadendsMax {
		return fmt.Errorf("starts %d paths; a node can start %d", len(n.Headends), HeadendsMax)
	}
	if v := len(n.Endpoints) + len(n.Egresses); v > HopsMax {
		return fmt.Errorf("is visited %d times by paths; a node can hold %d visits", v, HopsMax)
	}
	if w := n.WindowMemory(); w > model.WindowMemoryMax {
		return fmt.Errorf("would need %d MiB for the replay windows of the %d paths and epochs that end at it; a node can have %d MiB: give the headends the cpus that they have, or the chains a smaller proof window",
			w>>20, len(n.Egresses), model.WindowMemoryMax>>20)
	}
	if err := rulesFit(n.HeadendRules()); err != nil {
		return fmt.Errorf("the matches of the paths that start at it %w", err)
	}
	if err := rulesFit(n.GuardRules()); err != nil {
		return fmt.Errorf("the matches of the paths that end at it %w", err)
	}
	origins := 0
	for _, p := range n.Proxies {
		if p.OnUnknown != model.OnUnknownOriginate {
			continue
		}
		origins++
		if err := rulesFit(n.OriginRules(p.Function)); err != nil {
			return fmt.Errorf("the matches of the paths that start at function %s %w", p.Function, err)
		}
	}
	if origins > OriginsMax {
		return fmt.Errorf("has %d functions with on-unknown: originate; a node can hold %d: say on-unknown: drop at the others", origins, OriginsMax)
	}
	if o := n.OrderedRules(); o > model.OrderedMax {
		return fmt.Errorf("starts and ends %d paths whose match has a priority, those that start at its functions among them; a node can hold %d", o, model.OrderedMax)
	}
	if err := rulesFit(n.LocalRules()); err != nil {
		return fmt.Errorf("the matches of its local functions %w", err)
	}
	return n.proxiesFit()
}

// proxiesFit checks whether the node can keep the headers of all its functions.
func (n Node) proxiesFit() error {
	if len(n.Proxies) > ProxiesMax {
		return fmt.Errorf("has %d functions that get packets without outer headers; a node can have %d", len(n.Proxies), ProxiesMax)
	}
	var content, metadata int
	for _, p := range n.Proxies {
		if p.Recognise == model.RecogniseMetadata {
			metadata += p.Cache
		} else {
			content += p.Cache
		}
	}
	if content > model.CacheMax {
		return fmt.Errorf("keeps %d headers for functions that are recognised by content; a node can keep %d", content, model.CacheMax)
	}
	if metadata > model.SlotsMax {
		return fmt.Errorf("keeps %d headers for functions that are recognised by metadata; a node can keep %d", metadata, model.SlotsMax)
	}
	return nil
}

func rulesFit(rules []Rule) error {
	if dst, src := classify(rules, RulesMax); len(dst) > RulesMax || len(src) > RulesMax {
		return fmt.Errorf("expand to %d destinations and %d sources, or more; a node can hold %d of each", len(dst), len(src), RulesMax)
	}
	return nil
}

// OrderedRules is how many of the node's rules have a priority.
func (n Node) OrderedRules() int {
	count := 0
	for _, h := range n.Headends {
		if h.Match.Ordered() {
			count++
		}
	}
	for _, e := range n.Egresses {
		if e.Of == 0 && e.Match.Ordered() {
			count++
		}
	}
	return count
}

// HeadendRules are the node's rules for traffic from outside. The target is the
// index in Headends.
func (n Node) HeadendRules() []Rule { return n.OriginRules("") }

// OriginRules are the node's rules for packets that one of its functions makes. The target is
// the index in Headends.
func (n Node) OriginRules(function string) []Rule {
	var rules []Rule
	for i, h := range n.Headends {
		if h.From == function {
			rules = append(rules, Rule{Match: h.Match, Target: uint32(i)})
		}
	}
	return rules
}

// GuardRules are the node's rules for packets that leave the domain at this node. The target is
// the path.
func (n Node) GuardRules() []Rule {
	var rules []Rule
	for _, e := range n.Egresses {
		if e.Of == 0 {
			rules = append(rules, Rule{Match: e.Match, Target: e.Path})
		}
	}
	return rules
}

// LocalRules are the node's rules for packets that leave it without an outer header: a packet
// that matches has lost its header in a local function. The target is the index in Proxies. If
// several functions have the same match, a function that drops unknown packets comes first.
func (n Node) LocalRules() []Rule {
	var rules []Rule
	for _, u := range []model.OnUnknown{model.OnUnknownDrop, model.OnUnknownPlain} {
		for i, p := range n.Proxies {
			if p.OnUnknown != u {
				continue
			}
			for _, m := range p.Matches {
				rules = append(rules, Rule{Match: m, Target: uint32(i)})
			}
		}
	}
	return rules
}

// CacheEntries is how many entries of the content cache the node's functions
// need together.
func (n Node) CacheEntries() int {
	entries := 0
	for _, p := range n.Proxies {
		entries += p.CacheEntries()
	}
	return entries
}
