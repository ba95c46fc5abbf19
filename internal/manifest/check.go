package manifest

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
)

// checker holds what the rules across the file need to find.
type checker struct {
	*reader
	file      file
	members   []model.Node // the nodes, as far as they could be read
	nodes     map[string]*node
	functions map[string]*function
	visits    map[string]int // SIDs that chains need, by node
	used      map[string]bool
	claims    map[claim]claimant
	compared  []*chain                // whose matches are held against each other
	tight     map[*iface]*chain       // the longest chain that does not fit an interface
	tightMPLS *chain                  // that does not fit the MTU of domain.mpls
	ends      map[string][]passage    // by node: the paths that end there
	locals    map[*function][]passage // the paths through a local function

	chains  map[string]*chain
	clients map[string]*clients
	served  map[served]*service
	leads   map[*chain]leading // the first whose rules name the chain
}

// check holds the rules across the file and makes the model of it. Without
// problems the model is whole.
func (r *reader) check(f file) Manifest {
	c := &checker{
		reader:    r,
		file:      f,
		members:   f.domain(r.name).Nodes,
		nodes:     map[string]*node{},
		functions: map[string]*function{},
		visits:    map[string]int{},
		used:      map[string]bool{},
		claims:    map[claim]claimant{},
		tight:     map[*iface]*chain{},
		ends:      map[string][]passage{},
		locals:    map[*function][]passage{},
		chains:    map[string]*chain{},
		served:    map[served]*service{},
		leads:     map[*chain]leading{},
	}
	c.checkNodes()
	c.checkFunctions()
	c.checkProxies()
	c.checkServices()
	c.checkChains()
	c.checkLocals()
	c.checkRoom()
	m := Manifest{Domain: f.domain(c.name)}
	if f.lab != nil {
		c.checkLab(f.lab)
		m.Lab = f.lab.model()
	}
	return m
}

func (c *checker) checkNodes() {
	if c.file.nodes.ok && len(c.file.nodes.value) == 0 {
		c.problemf(c.file.nodes.at, "no nodes; a domain has at least one")
	}
	addresses := map[netip.Addr]string{}
	for i := range c.file.nodes.value {
		n := &c.file.nodes.value[i]
		claimName(c.reader, c.nodes, n.name, n, func(n *node) place { return n.name.at })
		if n.address.ok {
			if c.file.block.ok && c.file.block.value.Contains(n.address.value) {
				c.problemf(n.address.at, "%q is within the SID block %s; a node's address is outside", n.address.value, c.file.block.value)
			}
			if other, ok := addresses[n.address.value]; ok {
				c.problemf(n.address.at, "%q is the address of %s already", n.address.value, other)
			} else {
				addresses[n.address.value] = n.name.value
			}
		}
		if n.advertise.ok && n.locator.ok {
			if err := model.CheckAdvertise(n.advertise.value, n.locator.value); err != nil {
				c.problemf(n.advertise.at, "%s %v", n.advertise.value, err)
			}
		}
		interfaces := map[string]*iface{}
		for j := range n.interfaces.value {
			i := &n.interfaces.value[j]
			claimName(c.reader, interfaces, i.name, i, func(i *iface) place { return i.name.at })
			if i.unmatched.ok && i.role.ok && i.role.value != model.RoleEdge {
				c.problemf(i.unmatched.at, "is a setting of edge interfaces, where traffic arrives that no chain takes; remove it here")
			}
			if i.guard.ok && i.role.ok && i.role.value != model.RoleEdge {
				c.problemf(i.guard.at, "is a setting of edge interfaces; at a core interface only the guard of each chain applies: set it there")
			}
		}
	}
	c.checkOverlap()
	c.checkNodeLabels()
}

// checkOverlap finds locators that overlap. In the order of their addresses,
// wider ones first, an overlap is with one that lies around.
func (c *checker) checkOverlap() {
	var list []*node
	for i := range c.file.nodes.value {
		if n := &c.file.nodes.value[i]; n.locator.ok {
			list = append(list, n)
		}
	}
	slices.SortStableFunc(list, func(a, b *node) int {
		return comparePrefix(a.locator.value, b.locator.value)
	})
	var around *node
	for _, n := range list {
		if around != nil && around.locator.value.Overlaps(n.locator.value) {
			later, earlier := n, around
			if later.locator.at.line < earlier.locator.at.line {
				later, earlier = earlier, later
			}
			c.problemf(later.locator.at, "%q overlaps %s, the locator of %s", later.locator.value, earlier.locator.value, earlier.name.value)
			continue
		}
		around = n
	}
}

func (f *file) mplsModel() model.MPLS {
	return model.MPLS{Services: uint32(f.mpls.services.value), MTU: f.mpls.mtu.value}
}

// checkNodeLabels holds that a label or an address is one node's.
func (c *checker) checkNodeLabels() {
	labels, addresses := map[int]string{}, map[netip.Addr]string{}
	for i := range c.file.nodes.value {
		n := &c.file.nodes.value[i]
		m := &n.mpls
		if m.at == (place{}) {
			continue
		}
		if c.file.mpls.at == (place{}) {
			c.problemf(m.at, "%s has a label, and the domain has no service labels; give domain an mpls such as {services: 100000, mtu: 1500}", n.name.value)
			continue
		}
		if m.label.ok {
			if c.file.mpls.services.ok {
				if err := c.file.mplsModel().CheckNodeLabel(uint32(m.label.value)); err != nil {
					c.problemf(m.label.at, "%d %v", m.label.value, err)
				}
			}
			if other, ok := labels[m.label.value]; ok {
				c.problemf(m.label.at, "%d is the label of %s already", m.label.value, other)
			} else {
				labels[m.label.value] = n.name.value
			}
		}
		if m.address.ok {
			if c.file.block.ok && c.file.block.value.Contains(m.address.value) {
				c.problemf(m.address.at, "%q is within the SID block %s; a node's address is outside", m.address.value, c.file.block.value)
			}
			if other, ok := addresses[m.address.value]; ok {
				c.problemf(m.address.at, "%q is the address for labels of %s already", m.address.value, other)
			} else {
				addresses[m.address.value] = n.name.value
			}
		}
	}
}

// checkLabels holds what a chain over labels needs. whole: its functions are known.
func (c *checker) checkLabels(ch *chain, whole bool) {
	if !ch.carrier.ok || ch.carrier.value != model.EncapsulationSRMPLS {
		return
	}
	m := ch.model()
	if !whole {
		m.Functions = nil
	}
	at := map[string]place{"sids": ch.sids.at, "reduced": ch.reduced.at}
	for _, p := range m.CheckLabels(func(name string) model.Function {
		f := c.functions[name]
		return model.Function{Kind: f.kind.value, Netfilter: model.Netfilter{Bypass: f.bypass.value}}
	}) {
		where, ok := at[p.Field]
		switch p.Field {
		case "waypoints":
			where, ok = ch.waypoints[p.Index].sid.at, true
		case "functions":
			where, ok = ch.functions.value[p.Index].at, true
		}
		if ok {
			c.problemf(where, "%v", p.Err)
		}
	}
	if c.file.mpls.at == (place{}) {
		c.problemf(ch.carrier.at, "the domain has no service labels; give domain an mpls such as {services: 100000, mtu: 1500}")
		return
	}
	if !whole {
		return
	}
	visited := func(name item[string], node string) {
		if n := c.nodes[node]; n != nil && n.mpls.at == (place{}) {
			c.problemf(name.at, "%s has no label, and chain %s is of type %s; give the node an mpls such as {label: 16002, address: 192.0.2.2}", node, ch.name.value, ch.carrier.value)
		}
	}
	for _, name := range ch.functions.value {
		visited(name, c.functions[name.value].node.value)
	}
	visited(ch.egress, ch.egress.value)
	if ch.both.value {
		visited(ch.ingress.value[0], ch.ingress.value[0].value)
	}
	if c.file.mpls.mtu.given() {
		return
	}
	for _, n := range c.nodesOf(ch) {
		for _, i := range n.interfaces.value {
			if i.role.value == model.RoleCore && !i.mtu.given() {
				c.problemf(ch.carrier.at, "the MTU of the core is not known, and routers send no ICMP errors for packets with labels: give domain.mpls an mtu, or every core interface of the chain's nodes (%s of %s has none)", i.name.value, n.name.value)
				return
			}
		}
	}
}

// nodesOf are the nodes of a chain whose references are known.
func (c *checker) nodesOf(ch *chain) []*node {
	var list []*node
	for _, in := range ch.ingress.value {
		list = append(list, c.nodes[in.value])
	}
	for _, name := range ch.functions.value {
		list = append(list, c.nodes[c.functions[name.value].node.value])
	}
	return append(list, c.nodes[ch.egress.value])
}

func (c *checker) checkFunctions() {
	for i := range c.file.functions.value {
		f := &c.file.functions.value[i]
		claimName(c.reader, c.functions, f.name, f, func(f *function) place { return f.name.at })
		if n := resolve(c.reader, f.node, c.nodes, "node"); n != nil && !n.has(model.RoleCore) {
			c.problemf(f.node.at, "%q has no interface with role core; traffic for %s could not come in", f.node.value, f.name.value)
		}
	}
}

func (c *checker) checkChains() {
	names := map[string]*chain{}
	for i := range c.file.chains.value {
		ch := &c.file.chains.value[i]
		claimName(c.reader, names, ch.name, ch, func(ch *chain) place { return ch.name.at })
		c.checkChain(ch)
	}
	c.checkOverlaps()
	c.reportTight()
	for i := range c.file.functions.value {
		f := &c.file.functions.value[i]
		if f.name.ok && c.functions[f.name.value] == f && !c.used[f.name.value] {
			c.warnf(f.name.at, "%q is in no chain", f.name.value)
		}
	}
}

func (c *checker) checkChain(ch *chain) {
	whole := ch.name.ok && ch.egress.ok && ch.both.ok && ch.ingress.ok && ch.functions.ok
	terminal := func(name item[string], as string) *node {
		n := resolve(c.reader, name, c.nodes, "node")
		if n == nil {
			whole = false
			return nil
		}
		for _, role := range []model.Role{model.RoleEdge, model.RoleCore} {
			if !n.has(role) {
				c.problemf(name.at, "%q has no interface with role %s; an %s needs one of each role", name.value, role, as)
			}
		}
		return n
	}

	var nodes []*node // on the path
	cpus := 0
	given := map[string]bool{}
	for _, in := range ch.ingress.value {
		if in.ok && given[in.value] {
			c.problemf(in.at, "%q is given twice", in.value)
			continue
		}
		given[in.value] = in.ok
		if n := terminal(in, "ingress"); n != nil {
			nodes = append(nodes, n)
			cpus += n.cpus.value
		}
		if in.ok && ch.egress.ok && in.value == ch.egress.value {
			c.problemf(in.at, "%q is the egress too; a chain leaves the domain at another node than it enters", in.value)
			whole = false
		}
	}
	if ch.ingress.ok && len(ch.ingress.value) == 0 {
		c.problemf(ch.ingress.at, "no ingress; a chain has at least one")
	}
	if cpus > model.LanesMax {
		c.problemf(ch.ingress.at, "these nodes declare %d CPUs together; the headends of one chain may have %d (see cpus)", cpus, model.LanesMax)
	}
	if ch.both.ok && ch.both.value && len(ch.ingress.value) > 1 {
		c.problemf(ch.both.at, "a chain with %d ingress nodes has no reverse, because the egress of answers would be ambiguous; give each ingress a chain of its own", len(ch.ingress.value))
		whole = false
	}

	if n := len(ch.functions.value); ch.functions.ok && n == 0 {
		c.problemf(ch.functions.at, "no functions; a chain has at least one")
	} else if n += len(ch.waypoints); n+1 > model.SegmentsMax {
		c.problemf(ch.functions.at, "%d functions and waypoints; a chain has at most %d, and the egress", n, model.SegmentsMax-1)
	}
	for _, w := range ch.waypoints {
		if !w.sid.ok || !c.file.block.ok {
			whole = false
			continue
		}
		if err := model.CheckWaypoint(c.file.block.value, w.sid.value, c.members); err != nil {
			c.problemf(w.sid.at, "%q %v", w.sid.value, err)
		}
	}
	if ch.back.ok && len(ch.back.value) == 0 {
		c.problemf(ch.back.at, "no functions; answers of a chain with functions of kind stream pass all of these: leave return out for the functions of the chain the other way round")
		whole = false
	}
	for _, name := range slices.Concat(ch.functions.value, ch.back.value) {
		f := resolve(c.reader, name, c.functions, "function")
		if f == nil {
			whole = false
			continue
		}
		c.used[name.value] = true
		if ch.scheme.ok && f.proxied() {
			if err := model.CheckFlow(ch.scheme.value, model.Function{Kind: f.kind.value, Proxy: f.proxy()}); err != nil {
				c.problemf(name.at, "%q %v", name.value, err)
			}
		}
		if n := c.nodes[f.node.value]; n != nil && f.node.ok {
			nodes = append(nodes, n)
		} else {
			whole = false
		}
	}
	for _, a := range ch.arguments {
		if !c.checkArgument(ch, a) {
			whole = false
		}
	}
	if !c.checkParameters(ch) {
		whole = false
	}
	if egress := terminal(ch.egress, "egress"); egress != nil {
		nodes = append(nodes, egress)
	}
	whole = whole && len(ch.ingress.value) > 0 && len(ch.functions.value) > 0
	c.checkLabels(ch, whole)
	if !c.checkOnward(ch, whole) || !whole {
		return
	}

	m := ch.model()
	m.Arguments = make([]model.Argument, len(ch.arguments)) // how many is what counts
	if err := m.CheckReturn(c.isStream); err != nil {
		c.problemf(ch.back.at, "chain %s: %v", ch.name.value, err)
		return
	}
	if err := ch.model().CheckStreams(c.isStream, c.nodeOf); err != nil {
		c.problemf(ch.functions.at, "chain %s %v", ch.name.value, err)
		return
	}
	for _, d := range ch.model().Directions() {
		directed := ch.model().Directed(d)
		for _, name := range directed.Functions {
			c.visits[c.functions[name].node.value]++
		}
		c.visits[directed.Egress]++
	}
	c.checkMTU(ch, nodes)
	c.checkClamp(ch, nodes)
	if ch.matches() {
		if !c.checkAmbiguity(ch) {
			c.compared = append(c.compared, ch)
		}
		c.notePassages(ch)
	}
}

// checkClamp holds that what SYNs may say is known, and fits.
func (c *checker) checkClamp(ch *chain, nodes []*node) {
	least := 0
	for _, n := range nodes {
		for _, i := range n.interfaces.value {
			switch {
			case !i.role.ok || i.mtu.given() && !i.mtu.ok:
				return // reported
			case i.role.value == model.RoleCore && i.mtu.ok && (least == 0 || i.mtu.value < least):
				least = i.mtu.value
			}
		}
	}
	if m := c.coreMTU(ch); m.given() {
		if !m.ok {
			return // reported
		}
		if least == 0 || m.value < least {
			least = m.value
		}
	}
	mtu := 0
	if least > 0 {
		mtu = least - ch.outer()
	}
	if !ch.clamp.ok || least > 0 && mtu < model.MTUMin {
		return
	}
	if _, err := ch.clamp.value.MSS(mtu, ch.matched().Is4()); err != nil {
		c.problemf(ch.clamp.at, "%v", err)
	}
}

// coreMTU is the MTU that the domain declares for the links of a chain.
func (c *checker) coreMTU(ch *chain) item[int] {
	if ch.carrier.value == model.EncapsulationSRMPLS {
		return c.file.mpls.mtu
	}
	return item[int]{}
}

// checkMTU holds that what a chain leaves for the inner packet is enough.
func (c *checker) checkMTU(ch *chain, nodes []*node) {
	m := c.coreMTU(ch)
	if m.ok && m.value-ch.outer() < model.MTUMin && (c.tightMPLS == nil || c.tightMPLS.outer() < ch.outer()) {
		c.tightMPLS = ch
	}
	for _, n := range nodes {
		for j := range n.interfaces.value {
			i := &n.interfaces.value[j]
			core := i.role.ok && i.role.value == model.RoleCore && i.mtu.ok
			if core && i.mtu.value-ch.outer() < model.MTUMin && (c.tight[i] == nil || c.tight[i].outer() < ch.outer()) {
				c.tight[i] = ch
			}
		}
	}
}

// reportTight reports what checkMTU found, once for each interface.
func (c *checker) reportTight() {
	report := func(mtu item[int], ch *chain) {
		c.problemf(mtu.at, "%d leaves %d bytes to the packets of chain %s, whose headers take %d; expect %d or more",
			mtu.value, mtu.value-ch.outer(), ch.name.value, ch.outer(), model.MTUMin+ch.outer())
	}
	for i, ch := range c.tight {
		report(i.mtu, ch)
	}
	if ch := c.tightMPLS; ch != nil {
		report(c.file.mpls.mtu, ch)
	}
}

// outer is the length of the headers that the chain needs.
func (ch *chain) outer() int {
	m := ch.model()
	n := outerLen(m)
	if m.Return != nil && len(m.Ingress) == 1 {
		n = max(n, outerLen(m.Directed(model.Reverse)))
	}
	return n
}

func outerLen(c model.Chain) int {
	if c.Encapsulation.Type == model.EncapsulationSRMPLS {
		return mpls.OuterLen(c.Segments())
	}
	return srv6.ChainLen(c)
}

// claim is a match at a node, where only one path may have it.
type claim struct {
	match model.Match
	node  string
	as    string
}

type claimant struct {
	chain     *chain
	direction model.Direction
}

// checkAmbiguity refuses two paths that a packet could take: at a common
// ingress the headend could not choose, at a common egress the guard could not
// tell which proof the packet needs. It tells whether it did.
func (c *checker) checkAmbiguity(ch *chain) bool {
	reported := map[*chain]bool{}
	for _, d := range ch.model().Directions() {
		directed := ch.model().Directed(d)
		claims := []claim{{directed.Match, directed.Egress, "egress"}}
		for _, in := range directed.Ingress {
			claims = append(claims, claim{directed.Match, in, "ingress"})
		}
		// Guards there ask for proofs, too.
		for _, name := range directed.Functions {
			if c.isStream(name) {
				claims = append(claims, claim{directed.Match, c.nodeOf(name), "egress"})
			}
		}
		for _, cl := range claims {
			other, taken := c.claims[cl]
			if !taken {
				c.claims[cl] = claimant{ch, d}
				continue
			}
			if other.chain == ch || reported[other.chain] {
				continue // an ingress that is given twice is reported as that
			}
			reported[other.chain] = true
			c.problemf(ch.matchAt(), "%s matches the same packets as %s (%s), and %s is the %s of both; give one of them a longer prefix",
				direct("this chain", d), direct("chain "+other.chain.name.value, other.direction), cl.match, cl.node, cl.as)
		}
	}
	return len(reported) > 0
}

// checkOverlaps holds chains against those before them.
func (c *checker) checkOverlaps() {
	chains := make([]model.Chain, len(c.compared))
	for i, ch := range c.compared {
		chains[i] = ch.model()
	}
	for _, o := range model.FindOverlaps(chains, model.OverlapsMax) {
		c.problemf(c.compared[o.Chain].matchAt(), "%v", o.Err)
	}
}

func direct(what string, d model.Direction) string {
	if d == model.Reverse {
		return "the reverse of " + what
	}
	return what
}

// checkRoom holds that a node's locator has a SID for each visit.
func (c *checker) checkRoom() {
	for _, n := range c.file.nodes.value {
		if n.name.ok && n.locator.ok && c.visits[n.name.value] > model.Room(n.locator.value) {
			c.problemf(n.locator.at, "%q has room for %d SIDs, but the chains need %d on %s; give it a shorter prefix",
				n.locator.value, model.Room(n.locator.value), c.visits[n.name.value], n.name.value)
		}
	}
}

// claimName enters something under its name, or reports that it is taken.
func claimName[T any](r *reader, taken map[string]*T, name item[string], v *T, at func(*T) place) {
	if name.value == "" {
		return // a name that breaks a rule still is what references mean
	}
	if other, ok := taken[name.value]; ok {
		r.problemf(name.at, "%q is given already, in line %d; names are unique", name.value, at(other).line)
		return
	}
	taken[name.value] = v
}

// comparedMax is how many references that name nothing are compared with what there
// is: as many as are shown, and some more, since the order is another.
const comparedMax = 10 * shownMax

// resolve finds what a reference names, or reports it. It returns nil also for
// a reference that could not be read.
func resolve[T any](r *reader, ref item[string], all map[string]*T, what string) *T {
	if !ref.ok {
		return nil
	}
	if v, ok := all[ref.value]; ok {
		return v
	}
	message := fmt.Sprintf("%s is not a %s of this file", quote(ref.value), what)
	// To compare takes time, and nobody reads on after so many.
	if r.compared++; len(all) > 0 && r.compared <= comparedMax {
		message += "; expect " + oneOf(nearest(ref.value, all))
	}
	r.problemf(ref.at, "%s", message)
	return nil
}

// shown are names as they can be put on a terminal, also those that are none.
func shown(names []string) []string {
	for i, name := range names {
		if model.CheckName(name) != nil {
			names[i] = quote(name)
		}
	}
	return names
}

// nearest are all names if they are few, else those most like s.
func nearest[T any](s string, all map[string]T) []string {
	const few = 8
	list := make([]string, 0, len(all))
	for name := range all {
		list = append(list, name)
	}
	slices.Sort(list)
	if len(list) <= few {
		return shown(list)
	}
	slices.SortStableFunc(list, func(a, b string) int { return distance(s, a) - distance(s, b) })
	return append(shown(list[:3:3]), fmt.Sprintf("another of the %d that there are", len(list)))
}

// distance is how many characters must be put in, taken out or changed to make
// b of a (Levenshtein).
func distance(a, b string) int {
	a = a[:min(len(a), 2*model.NameMax)]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

func comparePrefix(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}

func (n *node) has(role model.Role) bool {
	return slices.ContainsFunc(n.interfaces.value, func(i iface) bool {
		// One that could not be read may be it; that was reported.
		return !i.role.ok || i.role.value == role
	}) || !n.interfaces.ok
}

// matchAt is the place of the match, or of the chain if rules name it.
func (ch *chain) matchAt() place {
	if ch.match == (place{}) {
		return ch.at
	}
	return ch.match
}

// matches reports whether the match was read as it is meant.
func (ch *chain) matches() bool {
	if ch.onward != nil {
		return true
	}
	read := func(p item[netip.Prefix]) bool { return p.ok || !p.given() }
	return read(ch.destination) && read(ch.source) && (ch.destination.ok || ch.source.ok || ch.priority.ok)
}

func (f file) domain(name string) model.Domain {
	functions := map[string]*function{}
	for i := range f.functions.value {
		functions[f.functions.value[i].name.value] = &f.functions.value[i]
	}
	d := model.Domain{Block: f.block.value}
	if f.mpls.at != (place{}) {
		d.MPLS = new(f.mplsModel())
	}
	for _, n := range f.nodes.value {
		m := model.Node{Name: n.name.value, Address: n.address.value, Locator: n.locator.value, CPUs: n.cpus.value, Advertise: n.advertise.value}
		if n.mpls.at != (place{}) {
			m.MPLS = &model.NodeMPLS{Label: uint32(n.mpls.label.value), Address: n.mpls.address.value}
		}
		for _, i := range n.interfaces.value {
			m.Interfaces = append(m.Interfaces, model.Interface{
				Name:      i.name.value,
				Role:      i.role.value,
				Datapath:  i.datapath.value,
				Unmatched: i.unmatched.value,
				Guard:     i.guard.value,
				MTU:       i.mtu.value,
			})
		}
		d.Nodes = append(d.Nodes, m)
	}
	for _, f := range f.functions.value {
		d.Functions = append(d.Functions, model.Function{Name: f.name.value, Node: f.node.value, Kind: f.modelKind(), Proxy: f.proxy(), Intrusive: f.intrusive.value, Netfilter: f.netfilterModel(name), Stream: f.streamModel()})
	}
	for i := range f.chains.value {
		ch := &f.chains.value[i]
		m := ch.model()
		for _, a := range ch.arguments {
			of := functions[ch.functions.value[a.of].value]
			if of == nil {
				continue // reported
			}
			values := of.arguments.values
			m.Arguments = append(m.Arguments, model.Argument{Of: a.of, Forward: values[a.forward.value].value, Reverse: values[a.reverse.value].value})
		}
		m.Parameters = ch.parametersModel()
		d.Chains = append(d.Chains, m)
	}
	d.Clients, d.Services = f.gatewayModels(name)
	return d
}

func (ch *chain) model() model.Chain {
	var waypoints []model.Waypoint
	for _, w := range ch.waypoints {
		waypoints = append(waypoints, model.Waypoint{Before: w.before, SID: w.sid.value})
	}
	return model.Chain{
		Name:          ch.name.value,
		Ingress:       values(ch.ingress.value),
		Functions:     values(ch.functions.value),
		Return:        values(ch.back.value),
		Waypoints:     waypoints,
		Egress:        ch.egress.value,
		Match:         ch.matched(),
		OwnTraffic:    ch.own.value,
		Both:          ch.both.value,
		Encapsulation: model.Encapsulation{SIDs: ch.sids.value, Reduced: ch.reduced.value, Type: ch.carrier.value},
		Clamp:         ch.clamp.value,
		Proof:         model.Proof{Scheme: ch.scheme.value, OnViolation: ch.onViolation.value, Window: ch.window.value, RotateEvery: ch.rotate.value},
		Guard:         ch.guard.value,
		Onward:        ch.onward,
		Seal:          ch.seal.value,
	}
}

func values[T any](list []item[T]) []T {
	var out []T
	for _, i := range list {
		out = append(out, i.value)
	}
	return out
}

func (ch *chain) matched() model.Match {
	if ch.onward != nil {
		return ch.onward.Match()
	}
	m := model.NewMatch(ch.destination.value, ch.source.value)
	m.Priority, m.Protocol, m.DSCP, m.Mark = uint16(ch.priority.value), ch.protocol.value, ch.dscp.value, ch.mark.value
	m.SourcePort, m.DestinationPort = ch.sourcePort.value, ch.destPort.value
	return m
}
