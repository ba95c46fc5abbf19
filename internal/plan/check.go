package plan

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
)

// problems collects the errors of a plan.
type problems struct{ list []error }

func (p *problems) addf(format string, args ...any) {
	p.list = append(p.list, fmt.Errorf(format, args...))
}

// add reports err, if any, with the place that format names before it.
func (p *problems) add(err error, format string, args ...any) {
	if err != nil {
		p.list = append(p.list, fmt.Errorf("%s %w", fmt.Sprintf(format, args...), err))
	}
}

// within collects the problems of a part, each behind the part's name.
func (p *problems) within(part string, check func(*problems)) {
	var inner problems
	check(&inner)
	for _, err := range inner.list {
		p.list = append(p.list, fmt.Errorf("%s: %w", part, err))
	}
}

// check checks everything that a node can check of its own plan.
func (n Node) check() error {
	var p problems
	p.add(model.CheckName(n.Name), "name %q", n.Name)
	p.add(model.CheckBlock(n.Block), "block %q", n.Block)
	p.add(model.CheckLocator(n.Block, n.Locator), "locator %q", n.Locator)
	p.add(model.CheckAdvertise(n.Advertise, n.Locator), "advertise %s", n.Advertise)
	p.add(model.CheckAddress(n.Address), "address %q", n.Address)
	if len(p.list) == 0 && n.Block.Contains(n.Address) {
		p.addf("address %s is within the SID block %s; a node's address is outside", n.Address, n.Block)
	}
	if len(p.list) > 0 {
		return errors.Join(p.list...) // further checks need these
	}

	names := map[string]bool{}
	for i, f := range n.Interfaces {
		p.within(fmt.Sprintf("interfaces[%d]", i), func(p *problems) {
			p.add(model.CheckInterfaceName(f.Name), "name %q", f.Name)
			if names[f.Name] {
				p.addf("name %q is given already; names are unique", f.Name)
			}
			names[f.Name] = true
			p.add(checkMTU(f.MTU), "mtu %d", f.MTU)
			if f.Guard != model.GuardUnset && f.Role != model.RoleEdge {
				p.addf("guard %s: only an edge interface has one", f.Guard)
			}
		})
	}
	c := nodeChecker{
		node:     n,
		headsOf:  map[uint32]PathID{},
		ids:      map[uint32]direction{},
		headends: map[uint32]bool{},
		visits:   map[visit]bool{},
		sids:     map[netip.Addr]string{},
		starts:   map[string]map[model.Match]uint32{},
		whole:    map[uint32]PathID{},
		ends:     map[model.Match]uint32{},
		proxies:  map[string]model.Behaviour{},
		devices:  map[string]string{},

		sealKeys:  map[SealPublic]string{},
		sealPorts: map[string]model.Onward{},
	}
	for _, f := range n.Interfaces {
		c.devices[f.Name] = "the node"
	}
	c.labels(&p)
	for i, h := range n.Headends {
		p.within(part("headends", i, h.PathID), func(p *problems) { c.headend(p, h) })
	}
	for _, e := range n.Egresses {
		if e.Of == 0 {
			c.whole[e.Path] = e.PathID
		}
	}
	for i, x := range n.Proxies {
		p.within(fmt.Sprintf("proxies[%d] (function %s)", i, x.Function), func(p *problems) { c.proxy(p, x) })
	}
	for i, e := range n.Endpoints {
		p.within(part("endpoints", i, e.PathID), func(p *problems) { c.endpoint(p, e) })
	}
	for i, e := range n.Egresses {
		p.within(part("egresses", i, e.PathID), func(p *problems) { c.egress(p, e) })
	}
	if len(p.list) == 0 {
		p.list = append(p.list, n.fits())
	}
	return errors.Join(p.list...)
}

func part(list string, i int, id PathID) string {
	return fmt.Sprintf("%s[%d] (%s)", list, i, id)
}

// nodeChecker has the state that the parts of a node's plan are compared with.
type nodeChecker struct {
	node     Node
	ids      map[uint32]direction
	headends map[uint32]bool
	headsOf  map[uint32]PathID
	visits   map[visit]bool
	sids     map[netip.Addr]string
	starts   map[string]map[model.Match]uint32 // by the function that they start at
	whole    map[uint32]PathID                 // paths from an ingress that end here
	ends     map[model.Match]uint32
	proxies  map[string]model.Behaviour // by function
	devices  map[string]string          // interfaces, and their users

	sealKeys  map[SealPublic]string   // keys of ends, and the parts that have them
	sealPorts map[string]model.Onward // of sealed chains
}

// visit identifies a node's part in a path.
type visit struct {
	sid   netip.Addr
	path  uint32
	epoch uint8
}

func (c *nodeChecker) pathID(p *problems, id PathID) {
	id.check(p)
	if d, ok := c.ids[id.Path]; ok && d != id.direction() {
		p.addf("path 0x%08x is that of chain %s, %s%s, too", id.Path, d.chain, d.is, FromTo(d.from, d.to))
	}
	c.ids[id.Path] = id.direction()
}

func (c *nodeChecker) headend(p *problems, h Headend) {
	c.pathID(p, h.PathID)
	if c.headends[h.Path] {
		p.addf("is given twice; a headend has one epoch of a path")
	}
	c.headends[h.Path] = true
	c.headsOf[h.Path] = h.PathID
	checkMatch(p, c.node.Block, h.Match)
	if c.starts[h.From] == nil {
		c.starts[h.From] = map[model.Match]uint32{}
	}
	if !c.node.IsStream(h.From) { // there the connection determines the path
		claimMatch(p, c.starts[h.From], h.Match, h.Path)
		if h.From != "" {
			c.origin(p, h)
		}
	} else if h.Own {
		p.addf("own-traffic: a part that starts at a function takes only the function's connections")
	}
	checkSegments(p, c.node.Block, h.PathID, h.Segments)
	c.nodeLabels(p, h)
	c.sealDials(p, h)
	checkLanes(p, h.Lane, h.Lanes)
	p.add(checkMTU(h.MTU), "mtu %d", h.MTU)
	p.add(checkMSS(h.MSS, h.MTU, h.Match), "mss-clamp %d", h.MSS)
	if h.Share.Position != 0 {
		p.addf("share: has position %d; a headend's is 0", h.Share.Position)
	}
	checkShare(p, h.Scheme, h.Share, false)
}

// origin checks a headend of a path that starts at a function.
func (c *nodeChecker) origin(p *problems, h Headend) {
	is := slices.ContainsFunc(c.node.Proxies, func(x Proxy) bool {
		return x.Function == h.From && x.OnUnknown == model.OnUnknownOriginate
	})
	if !is {
		p.addf("from %q: is no function of this node of kind stream, or with on-unknown: originate", h.From)
	}
	if h.Own {
		p.addf("own-traffic: a path that starts at a function takes only packets that the function makes")
	}
	if h.Match.ByMark() {
		p.addf("match: by a mark, which only the chain's headend sees")
	}
}

func (c *nodeChecker) endpoint(p *problems, e Endpoint) {
	c.pathID(p, e.PathID)
	c.visit(p, e.PathID, e.SID, "function")
	checkSources(p, c.node.Block, e.Sources)
	p.add(model.CheckName(e.Function), "function %q", e.Function)
	if is, known := c.proxies[e.Function]; known != e.Behaviour.Proxied() || known && is != e.Behaviour {
		p.addf("behaviour %s of function %s: a function has a proxy if and only if its SIDs are End.AD, or End.AN for netfilter", e.Behaviour, e.Function)
	}
	if e.Argument != 0 && !e.Behaviour.Arguments() {
		p.addf("argument %d: SIDs of behaviour %s take none", e.Argument, e.Behaviour)
	}
	if e.Share.Position < 1 || int(e.Share.Position) >= model.SegmentsMax {
		p.addf("share: has position %d; a function's is from 1 to %d", e.Share.Position, model.SegmentsMax-1)
	}
	checkShare(p, e.Scheme, e.Share, false)
}

func (c *nodeChecker) egress(p *problems, e Egress) {
	c.pathID(p, e.PathID)
	c.visit(p, e.PathID, e.SID, "egress")
	checkSources(p, c.node.Block, e.Sources)
	checkMatch(p, c.node.Block, e.Match)
	if e.Of != 0 && e.From == "" && e.To == "" {
		p.addf("of 0x%08x: only a path that starts or ends at a function opens the guard for another one", e.Of)
	}
	c.through(p, e)
	c.sealTakes(p, e)
	if e.Of == 0 {
		claimMatch(p, c.ends, e.Match, e.Path)
	} else if of, ok := c.whole[e.Of]; !ok || of.Chain != e.Chain || of.Direction != e.Direction {
		p.addf("of 0x%08x: is not the whole path of chain %s, %s, that ends here", e.Of, e.Chain, e.Direction)
	}
	checkLanes(p, 0, e.Lanes)
	p.add(model.CheckWindow(e.Window), "window %d", e.Window)
	checkSegments(p, c.node.Block, e.PathID, e.Segments)
	sids := e.Segments
	if e.Encapsulation.SIDs == model.SIDsCompressed {
		sids = srv6.Uncompress(e.Segments)
	}
	n := len(sids)
	own := e.SID
	if e.hasParameters() {
		own = withParameters(own, e.parameters())
	}
	if n > 0 && sids[n-1] != own {
		p.addf("segments: end with %s; the last one is the egress's own, %s", sids[n-1], own)
	}
	// Fewer positions than SIDs: some SIDs belong to routers, which do not stamp.
	if at := int(e.Share.Position); at < 1 || at > n {
		p.addf("share: has position %d; behind %d segments it is from 1 to %d", at, n, n)
	}
	checkShare(p, e.Scheme, e.Share, true)
	checkVerifier(p, e.Scheme, e.Share, e.Verifier)
}

// hasParameters reports whether the path's lists have room for the parameters of the visit at their end.
func (id PathID) hasParameters() bool {
	return id.To != "" && !id.OverLabels() && id.Encapsulation.SIDs == model.SIDsPlain
}

// parameters are those of the visit to the function that the path ends at, by the name of the instance.
func (id PathID) parameters() uint64 {
	p, err := model.ReadInstance(id.To)
	switch {
	case err != nil: // reported
		return 0
	case id.Direction == model.Reverse:
		return p.Reverse
	}
	return p.Forward
}

// through checks how connections go on behind a function.
func (c *nodeChecker) through(p *problems, e Egress) {
	t := e.Through
	if (t != nil) != (e.To != "") {
		p.addf("to %q: a path that ends at a function says how connections go on there, and no other path does", e.To)
		return
	}
	if t == nil {
		return
	}
	if !c.node.IsStream(e.To) {
		p.addf("to %q: is no function of this node of kind stream", e.To)
	}
	if e.OnViolation != model.OnViolationDrop {
		p.addf("on-violation %s: a function gets no bytes that were not verified", e.OnViolation)
	}
	for _, path := range []uint32{t.Onward, t.Back} {
		if h, ok := c.headsOf[path]; ok && (h.Chain != e.Chain || h.From != e.To) {
			p.addf("through: path 0x%08x does not start at function %s for chain %s", path, e.To, e.Chain)
		}
	}
	if t.Part == 0 || t.Onward == 0 || t.Back == 0 || t.Other == 0 {
		p.addf("through: lacks a path")
	}
}

// netfilter checks a function of kind netfilter; its proxy is checked already.
func (c *nodeChecker) netfilter(p *problems, x Proxy) {
	if err := x.Netfilter.Check(); err != nil {
		p.list = append(p.list, fmt.Errorf("netfilter: %w", err))
		return
	}
	if x.Netfilter.Bypass {
		if err := model.CheckBypass(false, x.Rewrites); err != nil {
			p.addf("netfilter: bypass: established %w", err)
		}
	}
	is, want := x.Proxy, model.NetfilterDetour(x.Function, x.Netfilter.Namespace)
	if err := model.CheckOnUnknown(is.OnUnknown, x.Netfilter.Namespace); err != nil {
		p.addf("on-unknown: %q %w", is.OnUnknown, err)
	}
	want.OnUnknown, want.Rewrites, want.Cache, want.Lifetime = is.OnUnknown, is.Rewrites, is.Cache, is.Lifetime
	if is != want {
		p.addf("netfilter: its interfaces, or its way to recognise packets, do not fit namespace %s", x.Netfilter.Namespace)
	}
	seen := map[uint32]bool{}
	for _, g := range x.Netfilter.Groups {
		for _, v := range g {
			if seen[v] || !x.Netfilter.Zones {
				p.addf("netfilter: argument %d is in a zone that it does not belong to", v)
			}
			seen[v] = true
		}
	}
}

// stream checks a function of kind stream.
func (c *nodeChecker) stream(p *problems, x Proxy) {
	if err := x.Stream.Check(); err != nil {
		p.list = append(p.list, fmt.Errorf("stream: %w", err))
	}
	if x.Proxy != model.StreamDetour(x.Function) {
		p.addf("stream: its interface, or its way to recognise packets, does not fit a function of kind stream")
	}
	if x.Netfilter != nil {
		if err := x.Stream.CheckFilter(x.Function, x.Netfilter.Netfilter); err != nil {
			p.list = append(p.list, fmt.Errorf("netfilter: %w", err))
		}
	}
	if a := x.Stream.Attached; a != (model.Attached{}) {
		if !x.Stream.Intrusive {
			p.addf("stream: attached is for an intrusive function; others get no plain connections")
		}
		c.device(p, x.Function, a.To)
		c.device(p, x.Function, a.From)
	}
	if x.Stream.MTU < model.MTUMin || x.Stream.MTU > model.MTUMax {
		p.addf("stream: mtu %d is not from %d to %d", x.Stream.MTU, model.MTUMin, model.MTUMax)
	}
}

// IsStream reports whether a function of the node is of kind stream or stands for the node's
// gateway: connections end there, and determine the paths that begin there.
func (n Node) IsStream(function string) bool {
	return function != "" && slices.ContainsFunc(n.Proxies, func(x Proxy) bool {
		return x.Function == function && (x.Stream != nil || x.Gateway != nil)
	})
}

// proxy checks a function without segment routing.
func (c *nodeChecker) proxy(p *problems, x Proxy) {
	if x.Stream != nil {
		p.add(model.CheckInstanceName(x.Function), "function %q", x.Function)
	} else {
		p.add(model.CheckName(x.Function), "function %q", x.Function)
	}
	if _, known := c.proxies[x.Function]; known {
		p.addf("function %q is given already; a function has one proxy", x.Function)
	}
	c.proxies[x.Function] = model.BehaviourEndAD
	if err := x.Check(); err != nil {
		p.list = append(p.list, err)
		return
	}
	if x.Gateway != nil {
		delete(c.proxies, x.Function)
		c.gateway(p, x)
	} else if x.Stream != nil {
		delete(c.proxies, x.Function) // its visits are egresses
		c.stream(p, x)
	} else if x.Netfilter != nil {
		c.proxies[x.Function] = model.BehaviourEndAN
		c.netfilter(p, x)
	} else if err := model.CheckOnUnknown(x.OnUnknown, ""); err != nil {
		p.addf("on-unknown: %q %w", x.OnUnknown, err)
	}
	if !x.Local {
		if len(x.Matches) > 0 {
			p.addf("has matches; only a local function's packets are known by them")
		}
		c.device(p, x.Function, x.To)
		if x.From != x.To {
			c.device(p, x.Function, x.From)
		}
		return
	}
	var ends []model.Match
	var egresses []Egress
	for _, e := range c.node.Egresses {
		if e.To == "" { // otherwise it goes to a namespace
			ends, egresses = append(ends, e.Match), append(egresses, e)
		}
	}
	taken, n := map[int][]int{}, 0 // by match: the egresses that take it, too
	model.EachOverlap(x.Matches, ends, func(j, i int) bool {
		taken[j] = append(taken[j], i)
		n++
		return n < model.OverlapsMax
	})
	has := map[model.Match]bool{}
	for j, m := range x.Matches {
		checkMatch(p, c.node.Block, m)
		if has[m] {
			p.addf("match: %s is given twice", m)
		}
		has[m] = true
		slices.Sort(taken[j])
		for _, i := range taken[j] {
			e := egresses[i]
			p.addf("match: %s is taken by chain %s, %s, too, which ends here; its packets would look like ones that lost their header", m, e.Chain, e.Direction)
		}
	}
}

// device enters an interface of a function.
func (c *nodeChecker) device(p *problems, function, name string) {
	if owner, ok := c.devices[name]; ok {
		p.addf("interface %q is that of %s already; a function has interfaces of its own", name, owner)
	}
	c.devices[name] = function
}

// visit checks a SID of this node.
func (c *nodeChecker) visit(p *problems, id PathID, sid netip.Addr, as string) {
	switch err := model.CheckSID(c.node.Block, sid); {
	case err != nil:
		p.add(err, "sid %s", sid)
	case !c.node.Locator.Contains(sid):
		p.addf("sid %s is not within the node's locator %s", sid, c.node.Locator)
	}
	v := visit{sid, id.Path, id.Epoch}
	if c.visits[v] {
		p.addf("sid %s is given twice for path 0x%08x in epoch %d", sid, id.Path, id.Epoch)
	}
	c.visits[v] = true
	if other, ok := c.sids[sid]; ok && other != as {
		p.addf("sid %s is that of a function and of an egress", sid)
	}
	c.sids[sid] = as
}

func checkPaths(paths []Path) error {
	var p problems
	ids := map[uint32]bool{}
	directions := map[direction]bool{}
	seals := map[SealKey]bool{}
	for i, path := range paths {
		p.within(part("paths", i, path.PathID), func(p *problems) {
			if ids[path.Path] || directions[path.direction()] {
				p.addf("is given already; there is one path for each direction of a chain, or part of one, and one from each of its functions")
			}
			ids[path.Path], directions[path.direction()] = true, true
			if path.Seal != nil && path.Seal.Domain == "" {
				for _, k := range []SealKey{path.Seal.From, path.Seal.To} {
					if seals[k] {
						p.addf("seal: a key is given already; each end of each part has one of its own")
					}
					seals[k] = true
				}
			}
			path.check(p)
		})
	}
	return errors.Join(p.list...)
}

// check checks everything that the controller can check of a path, except the block and the
// locators.
func (path Path) check(p *problems) {
	path.PathID.check(p)
	checkMatch(p, netip.Prefix{}, path.Match)
	p.add(checkMTU(path.MTU), "mtu %d", path.MTU)
	p.add(checkMSS(path.MSS, path.MTU, path.Match), "mss-clamp %d", path.MSS)
	p.add(model.CheckWindow(path.Window), "window %d", path.Window)
	path.Seal.check(p, path)
	last := len(path.Hops) - 1
	if last < 1 || last > model.SegmentsMax || len(path.Shares) != len(path.Hops) {
		p.addf("has %d hops and %d shares; a path has 2 to %d of each", len(path.Hops), len(path.Shares), model.SegmentsMax+1)
		return
	}
	if n := len(path.SIDs()); n > model.SegmentsMax {
		p.addf("visits %d SIDs, with its waypoints; a path visits at most %d", n, model.SegmentsMax)
		return
	}
	if len(path.Ingress) == 0 || path.Ingress[0].Node != path.Hops[0].Node {
		p.addf("ingress: does not start with %s, where the first hop is", path.Hops[0].Node)
	}
	lane := 0
	for i, in := range path.Ingress {
		p.within(fmt.Sprintf("ingress[%d]", i), func(p *problems) {
			p.add(model.CheckName(in.Node), "node %q", in.Node)
			p.add(model.CheckAddress(in.Address), "address %q", in.Address)
			checkLanes(p, in.Lane, in.Lanes)
			if int(in.Lane) < lane {
				p.addf("lane %d is that of another headend too", in.Lane)
			}
			lane = int(in.Lane) + int(in.Lanes)
		})
	}
	sids := map[netip.Addr]bool{}
	for j, h := range path.Hops {
		p.within(fmt.Sprintf("hops[%d]", j), func(p *problems) {
			p.add(model.CheckName(h.Node), "node %q", h.Node)
			if inner := j > 0 && j < last; inner {
				p.add(model.CheckName(h.Function), "function %q", h.Function)
			} else if h.Function != "" {
				p.addf("function %q: headend and egress have none", h.Function)
			}
			switch {
			case j == 0 && h.SID.IsValid():
				p.addf("sid %s: the headend has none", h.SID)
			case j == 0 && len(h.Waypoints) > 0:
				p.addf("waypoints: the headend has none")
			case (j == 0 || j == last) && h.Argument != 0:
				p.addf("argument %d: headend and egress have none", h.Argument)
			case h.Parameters != 0 && j != last:
				p.addf("parameters %#x: only a path's last hop has them", h.Parameters)
			case j == last && h.Parameters != path.parameters():
				p.addf("parameters %#x: those of the function that the path ends at are %#x", h.Parameters, path.parameters())
			case j > 0 && !formOfSID(h.SID):
				p.addf("sid %q is not an IPv6 address with its lower 64 bits zero", h.SID)
			case slices.ContainsFunc(h.Waypoints, func(w netip.Addr) bool { return !formOfSID(w) }):
				p.addf("waypoints: %v are not all IPv6 addresses with their lower 64 bits zero", h.Waypoints)
			case j > 0 && sids[h.SID]:
				p.addf("sid %s is that of another hop too", h.SID)
			}
			sids[h.SID] = true
			for _, w := range h.Waypoints {
				if slices.ContainsFunc(path.Hops, func(h Hop) bool { return h.SID == w }) {
					p.addf("waypoints: %s is the SID of a hop", w)
				}
			}
			if int(path.Shares[j].Position) != j {
				p.addf("share: has position %d; expect %d", path.Shares[j].Position, j)
			}
			checkShare(p, path.Scheme, path.Shares[j], j == last)
		})
	}
	checkVerifier(p, path.Scheme, path.Shares[last], path.Verifier)
	if len(p.list) == 0 && path.walk(1) != pot.Verified {
		p.addf("the shares are not of one path: a packet that visits all hops in order does not verify")
	}
}

// formOfSID reports whether a has the form of a SID: an IPv6 address whose lower 64 bits, the
// argument, are zero.
func formOfSID(a netip.Addr) bool {
	return a.Is6() && !a.Is4In6() && netip.PrefixFrom(a, 64).Masked().Addr() == a
}

// walk sends a packet through the path's arithmetic.
func (path Path) walk(rnd uint64) pot.Result {
	last := len(path.Shares) - 1
	f := pot.Flow{Source: netip.IPv6Unspecified(), Destination: netip.IPv6Unspecified()} // any will do
	steps := pot.WalkFlow(path.Header(), rnd, f, path.Shares[:last]...)
	egress := path.Shares[last]
	_, result := path.Verifier.VerifyFlow(egress, path.Header(), steps[last-1].WireOut, egress.Binding(f))
	return result
}

func (id PathID) check(p *problems) {
	if id.Path == 0 {
		p.addf("path is 0; a path has another number")
	}
	p.add(model.CheckName(id.Chain), "chain %q", id.Chain)
	checkEncapsulation(p, id.Encapsulation)
	if id.From != "" {
		p.add(model.CheckInstanceName(id.From), "from %q", id.From)
	}
	if id.To != "" {
		p.add(model.CheckInstanceName(id.To), "to %q", id.To)
	}
}

func checkMatch(p *problems, block netip.Prefix, m model.Match) {
	p.add(m.Check(), "match: %s", m)
	for _, c := range []struct {
		name   string
		prefix netip.Prefix
	}{{"destination", m.Destination}, {"source", m.Source}} {
		if c.prefix.IsValid() {
			p.add(model.CheckMatchPrefix(block, c.prefix), "match: %s %s", c.name, c.prefix)
		}
	}
	p.add(model.CheckMatch(m.Destination, m.Source), "match")
}

// claimMatch checks that a match leads to one path, in one or several epochs.
func claimMatch(p *problems, claims map[model.Match]uint32, m model.Match, path uint32) {
	m.Destination, m.Source = m.Whole()
	if other, ok := claims[m]; ok && other != path {
		p.addf("match: path 0x%08x has the same", other)
	}
	claims[m] = path
}

func checkSegments(p *problems, block netip.Prefix, id PathID, segments []netip.Addr) {
	if n := len(segments); n < 1 || n > model.SegmentsMax {
		p.addf("segments: has %d entries; a list has 1 to %d", n, model.SegmentsMax)
	}
	rule := model.CheckSegment
	if id.Encapsulation.SIDs == model.SIDsCompressed {
		rule = model.CheckContainer
	}
	for i, s := range segments {
		if i == len(segments)-1 && id.hasParameters() {
			rule = model.CheckLastSegment
		}
		p.add(rule(block, s), "segments[%d]: %s", i, s)
	}
}

// checkSources holds that packets of a path come from somewhere, and not from a
// SID.
func checkSources(p *problems, block netip.Prefix, sources []netip.Addr) {
	if len(sources) == 0 {
		p.addf("sources: has none; the packets of a path come from a headend")
	}
	if len(sources) > model.LanesMax {
		p.addf("sources: has %d; a path has at most %d headends", len(sources), model.LanesMax)
		return
	}
	for i, a := range sources {
		p.add(model.CheckAddress(a), "sources[%d]: %s", i, a)
		if block.Contains(a) {
			p.addf("sources[%d]: %s is within the SID block %s; a node's address is outside", i, a, block)
		}
		if slices.Contains(sources[:i], a) {
			p.addf("sources[%d]: %s is given twice", i, a)
		}
	}
}

func checkLanes(p *problems, lane, lanes uint16) {
	if lanes < 1 || int(lane)+int(lanes) > model.LanesMax {
		p.addf("lanes: %d from %d on; there are lanes 0 to %d, and a headend has one at least", lanes, lane, model.LanesMax-1)
	}
}

func checkMTU(mtu int) error {
	if mtu != 0 && (mtu < model.MTUMin || mtu > model.MTUMax) {
		return fmt.Errorf("is not from %d to %d", model.MTUMin, model.MTUMax)
	}
	return nil
}

func checkMSS(mss, mtu int, m model.Match) error {
	most := model.MSSMax
	if mtu != 0 {
		most = min(most, max(model.MSSMin, model.MSS(mtu, m.Is4())))
	}
	if mss != 0 && (mss < model.MSSMin || mss > most) {
		return fmt.Errorf("is not from %d to %d", model.MSSMin, most)
	}
	return nil
}

// checkShare checks that a share has the values of its scheme and position, and no others.
func checkShare(p *problems, scheme model.Scheme, s pot.Share, egress bool) {
	p.within("share", func(p *problems) {
		if scheme.Keyed() {
			switch {
			case s.Polynomial != pot.Polynomial{}, scheme == model.SchemeKeyed && !absent(s.Bind):
				p.addf("has more than a key; scheme %s uses only a key", scheme)
			case scheme == model.SchemeKeyedFlow && absent(s.Bind):
				p.addf("has no key of the binding")
			case egress && !absent(s.Key):
				p.addf("has a key; an egress does not stamp, and uses the keys of the verifier")
			case !egress && absent(s.Key):
				p.addf("has no key")
			}
			return
		}
		if !absent(s.Key) || !absent(s.Bind) {
			p.addf("has a key; scheme %s needs none", scheme)
		}
		if err := s.Polynomial.Check(); err != nil {
			p.list = append(p.list, err)
			return
		}
		var none pot.Mask
		switch {
		case s.Polynomial.Prime < pot.PrimeMin:
			p.addf("the prime is below 2^60, and so below numbers that packets will carry")
		case s.Polynomial.LPC == 0:
			p.addf("the LPC is 0: this position would add nothing")
		case scheme == model.SchemePoT && (s.Polynomial.Up != none || s.Polynomial.Down != none):
			p.addf("has a link mask; scheme %s has none", scheme)
		case s.Position == 0 && s.Polynomial.Up != none:
			p.addf("has a mask for the link before the headend")
		case egress && s.Polynomial.Down != none:
			p.addf("has a mask for the link behind the egress")
		}
	})
}

// absent reports whether a key is the zero key, which means no key.
func absent(k pot.Key) bool {
	var none pot.Key
	return subtle.ConstantTimeCompare(k[:], none[:]) == 1
}

func checkVerifier(p *problems, scheme model.Scheme, egress pot.Share, v pot.Verifier) {
	p.within("verifier", func(p *problems) {
		if err := v.Check(scheme, egress); err != nil && (scheme.Keyed() || egress.Polynomial.Check() == nil) {
			p.list = append(p.list, err)
		}
		switch {
		case scheme.Keyed() && v.Secret != 0:
			p.addf("has a secret of polynomials; scheme %s has keys", scheme)
		case !scheme.Keyed() && len(v.Keys) > 0:
			p.addf("has keys; scheme %s has a secret of polynomials", scheme)
		case slices.ContainsFunc(v.Keys, absent):
			p.addf("has a key that is zero")
		}
	})
}
