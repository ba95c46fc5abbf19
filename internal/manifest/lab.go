package manifest

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/waystamp/waystamp/internal/model"
)

// MTUs of a lab's links whose files name none: Ethernet's.
const mtuDefault = 1500

// end is one end of a link, by the name that its interface gets.
type end struct {
	node, iface string
}

// wire is what a lab connects an interface to.
type wire struct {
	at   place
	role model.Role
	mtu  int
}

// labChecker holds what is in the lab so far.
type labChecker struct {
	*checker
	lab      *lab
	stations map[string]place // nodes, routers, hosts and functions: a network namespace each
	routers  map[string]*router
	wires    map[end]wire
}

// checkLab holds the rules of the lab section: what it describes can be built,
// and gives each interface that the nodes have its link.
func (c *checker) checkLab(l *lab) {
	lc := &labChecker{
		checker:  c,
		lab:      l,
		stations: map[string]place{},
		routers:  map[string]*router{},
		wires:    map[end]wire{},
	}
	for _, n := range c.file.nodes.value {
		if n.name.value != "" {
			lc.stations[n.name.value] = n.name.at
		}
	}
	lc.checkRouters()
	lc.checkHosts()
	lc.checkLinks()
	lc.checkFunctions()
	lc.checkInterfaces()
	lc.checkCore()
}

// checkCore holds that a core without IPv6 carries all chains.
func (c *labChecker) checkCore() {
	core := c.lab.core
	if !core.ok || core.value != model.LabIPv4 {
		return
	}
	for _, n := range c.file.nodes.value {
		if a := n.mpls.address; n.name.ok && (n.mpls.at == place{} || a.ok && !a.value.Is4()) {
			c.problemf(core.at, "a core of IPv4 needs an IPv4 address of mpls for each node, and %s has none; give it an mpls such as {label: 16002, address: 192.0.2.2}", n.name.value)
		}
	}
	for _, ch := range c.file.chains.value {
		if ch.carrier.value != model.EncapsulationSRMPLS {
			c.problemf(core.at, "a core of IPv4 carries chains of type sr-mpls, and %s is of type %s", ch.name.value, ch.carrier.value)
		}
	}
	for _, r := range c.lab.routers.value {
		c.problemf(r.at, "%s is a router of IPv6; a core of IPv4 has only nodes, which forward labels; remove the router", r.name.value)
	}
	if c.lab.routing.value != model.LabStatic {
		c.problemf(c.lab.routing.at, "%s routes IPv6; the routes of a core of IPv4 are static", c.lab.routing.value)
	}
}

// station enters a namespace under its name.
func (c *labChecker) station(name item[string]) {
	if name.value == "" {
		return
	}
	if at, ok := c.stations[name.value]; ok {
		c.problemf(name.at, "%q is given already, in line %d; nodes, hosts, routers and functions of a lab have names of their own", name.value, at.line)
		return
	}
	c.stations[name.value] = name.at
}

func (c *labChecker) checkRouters() {
	addresses := map[netip.Addr]string{}
	for _, n := range c.file.nodes.value {
		if n.address.ok {
			addresses[n.address.value] = n.name.value
		}
	}
	sids := map[netip.Addr]string{}
	for i := range c.lab.routers.value {
		r := &c.lab.routers.value[i]
		c.station(r.name)
		if r.name.value != "" {
			c.routers[r.name.value] = r
		}
		if a := r.address; a.ok {
			if c.file.block.ok && c.file.block.value.Contains(a.value) {
				c.problemf(a.at, "%q is within the SID block %s; a router's address is outside", a.value, c.file.block.value)
			}
			if other, ok := addresses[a.value]; ok {
				c.problemf(a.at, "%q is the address of %s already", a.value, other)
			}
			addresses[a.value] = r.name.value
		}
		for _, s := range r.sids {
			if !s.ok {
				continue
			}
			for _, n := range c.file.nodes.value {
				if n.locator.ok && n.locator.value.Contains(s.value) {
					c.problemf(s.at, "%q is within %s, the locator of %s", s.value, n.locator.value, n.name.value)
				}
			}
			if other, ok := sids[s.value]; ok {
				c.problemf(s.at, "%q is a SID of %s already", s.value, other)
			}
			sids[s.value] = r.name.value
		}
	}
}

func checkHostPrefix(p netip.Prefix) error {
	if err := model.CheckPrefix(p); err != nil {
		return err
	}
	if err := model.CheckAddress(p.Addr().Next()); err != nil {
		return err
	}
	if p.Bits() != 64 {
		return fmt.Errorf("is a /%d; the link of a host is a /64", p.Bits())
	}
	return nil
}

func checkHostPrefix4(p netip.Prefix) error {
	if err := model.CheckMatchPrefix(netip.Prefix{}, p); err != nil {
		return err
	}
	if !p.Addr().Is4() || p.Bits() < 8 || p.Bits() > 30 {
		return errors.New("is not an IPv4 prefix with room for a host and its node; expect one such as 192.0.2.0/24")
	}
	return nil
}

func (c *labChecker) checkHosts() {
	prefixes := map[netip.Prefix]string{}
	var fours []item[netip.Prefix]
	for _, h := range c.lab.hosts.value {
		c.station(h.name)
		resolve(c.reader, h.node, c.nodes, "node")
		if p := h.prefix; p.ok {
			if other, ok := prefixes[p.value]; ok {
				c.problemf(p.at, "%q is the prefix of %s already", p.value, other)
			}
			prefixes[p.value] = h.name.value
			if c.file.block.ok && c.file.block.value.Overlaps(p.value) {
				c.problemf(p.at, "%q is within the SID block %s; hosts are outside of the domain", p.value, c.file.block.value)
			}
			for _, n := range c.file.nodes.value {
				c.notWithin(p, n.address, n.name)
			}
			for _, r := range c.lab.routers.value {
				c.notWithin(p, r.address, r.name)
			}
		}
		if p := h.four; p.ok {
			for _, other := range fours {
				if other.value.Overlaps(p.value) {
					c.problemf(p.at, "%q overlaps %s in line %d", p.value, other.value, other.at.line)
				}
			}
			fours = append(fours, p)
		}
		if h.name.ok && h.node.ok {
			w := wire{at: h.at, role: model.RoleEdge, mtu: mtuDefault}
			if h.mtu.ok {
				w.mtu = h.mtu.value
			}
			c.connect(h.node.value, h.name.value, w)
			c.deviceName(h.at, h.name.value, h.node.value)
		}
	}
}

func (c *labChecker) notWithin(p item[netip.Prefix], a item[netip.Addr], of item[string]) {
	if a.ok && p.value.Contains(a.value) {
		c.problemf(p.at, "%q contains %s, the address of %s", p.value, a.value, of.value)
	}
}

func (c *labChecker) checkLinks() {
	for _, l := range c.lab.links.value {
		ends := l.between.value
		if len(ends) != 2 {
			if l.between.ok {
				c.problemf(l.between.at, "has %d ends; a link is between two", len(ends))
			}
			continue
		}
		both := true
		for _, e := range ends {
			both = both && c.isEnd(e)
		}
		if !both {
			continue
		}
		a, b := ends[0].value, ends[1].value
		if a == b {
			c.problemf(l.between.at, "both ends are %q; a link is between two", a)
			continue
		}
		w := wire{at: l.at, role: model.RoleCore, mtu: c.mtu()}
		if l.mtu.ok {
			w.mtu = l.mtu.value
		}
		if c.connect(a, b, w) {
			c.connect(b, a, w)
		}
	}
}

// mtu is that of links that name none.
func (c *labChecker) mtu() int {
	if c.lab.mtu.ok {
		return c.lab.mtu.value
	}
	return mtuDefault
}

// isEnd reports whether a link may end at what the name stands for.
func (c *labChecker) isEnd(name item[string]) bool {
	if !name.ok {
		return false
	}
	if c.nodes[name.value] != nil || c.routers[name.value] != nil {
		return true
	}
	all := map[string]bool{}
	for n := range c.nodes {
		all[n] = true
	}
	for n := range c.routers {
		all[n] = true
	}
	c.problemf(name.at, "%s is neither a node nor a router of this file; expect %s", quote(name.value), oneOf(nearest(name.value, all)))
	return false
}

// connect enters the end at a station of its link to a peer, unless they are
// connected already. If the station is a node, the end must be one of its
// interfaces.
func (c *labChecker) connect(station, peer string, w wire) bool {
	e := end{station, station + "-" + peer}
	if other, ok := c.wires[e]; ok {
		c.problemf(w.at, "%s is connected to %s already, in line %d", station, peer, other.at.line)
		return false
	}
	c.wires[e] = w
	n := c.nodes[station]
	if !c.deviceName(w.at, station, peer) || n == nil {
		return true
	}
	for _, i := range n.interfaces.value {
		if !i.name.ok || i.name.value != e.iface {
			continue
		}
		if i.role.ok && i.role.value != w.role {
			c.problemf(w.at, "%s of %s has role %s; here it must be %s", e.iface, station, i.role.value, w.role)
		}
		if i.mtu.ok && i.mtu.value != w.mtu {
			c.problemf(i.mtu.at, "%d is not the MTU of its link in the lab (line %d), which is %d", i.mtu.value, w.at.line, w.mtu)
		}
		return true
	}
	if n.interfaces.ok {
		c.problemf(w.at, "%s has no interface %s; expect one with role %s", station, e.iface, w.role)
	}
	return true
}

// deviceName holds that the end of a link can be named as it must.
func (c *labChecker) deviceName(at place, station, peer string) bool {
	name := station + "-" + peer
	if err := model.CheckInterfaceName(name); err != nil {
		c.problemf(at, "the end of this link at %s would be %q, which %v", station, name, err)
		return false
	}
	return true
}

// checkFunctions holds that the lab makes each function that is behind
// interfaces, and that what it makes is what the domain says.
func (c *labChecker) checkFunctions() {
	made := map[string]place{}
	for i := range c.lab.functions.value {
		l := &c.lab.functions.value[i]
		f := resolve(c.reader, l.name, c.functions, "function")
		if f == nil {
			continue
		}
		if at, ok := made[l.name.value]; ok {
			c.problemf(l.name.at, "%q is made already, in line %d", l.name.value, at.line)
			continue
		}
		made[l.name.value] = l.name.at
		c.checkFunction(l, f)
	}
	for i := range c.file.functions.value {
		f := &c.file.functions.value[i]
		if _, ok := made[f.name.value]; !ok && f.unaware() && f.attach.ok && !f.attach.value.local {
			c.problemf(f.attach.at, "the functions of the lab section do not make %q; add an entry for it there", f.name.value)
		}
	}
}

func (c *labChecker) checkFunction(l *labFunction, f *function) {
	if l.kind.ok && l.kind.value == model.LabNftables {
		if !l.ruleset.given() || l.ruleset.ok && strings.TrimSpace(l.ruleset.value) == "" {
			c.problemf(l.kind.at, "%q needs a ruleset, as nft -f reads it", l.kind.value)
		}
	} else if l.kind.ok && l.ruleset.given() {
		c.problemf(l.ruleset.at, "is for functions of kind nftables; a function of kind %s has no ruleset", l.kind.value)
	}
	switch {
	case !f.kind.ok || f.unaware() && !f.attach.ok:
		return // reported
	case !f.unaware():
		c.problemf(l.name.at, "%q is of kind %s: the function is the node itself, so remove this entry", l.name.value, f.kind.value)
		return
	case f.attach.value.local:
		if l.kind.ok && l.kind.value != model.LabNftables {
			c.problemf(l.kind.at, "%q is not for a local function, which is a ruleset on its node; expect nftables", l.kind.value)
		}
		if l.mtu.given() {
			c.problemf(l.mtu.at, "%s is local; it has no link that could have an MTU", l.name.value)
		}
		return
	}
	c.station(l.name)
	if l.kind.ok && l.kind.value != model.LabRaw && !f.attach.value.via.given() {
		c.problemf(f.attach.at, "has no via; %s of kind %s routes in the lab, and accepts only frames to its own MAC address: expect via: fe80::2 or another address", l.name.value, l.kind.value)
	}
}

// checkInterfaces finds interfaces that the lab would not make.
func (c *labChecker) checkInterfaces() {
	for _, n := range c.file.nodes.value {
		for _, i := range n.interfaces.value {
			if !n.name.ok || !i.name.ok {
				continue
			}
			if _, ok := c.wires[end{n.name.value, i.name.value}]; !ok {
				c.problemf(i.name.at, "no host or link of the lab section makes %q; add one there", i.name.value)
			}
		}
	}
}

func (l *lab) model() *model.Lab {
	m := &model.Lab{MTU: mtuDefault, Routing: l.routing.value, Core: l.core.value}
	if l.mtu.ok {
		m.MTU = l.mtu.value
	}
	for _, h := range l.hosts.value {
		m.Hosts = append(m.Hosts, model.LabHost{Name: h.name.value, Node: h.node.value, Prefix: h.prefix.value, Prefix4: h.four.value, MTU: h.mtu.value})
	}
	for _, r := range l.routers.value {
		m.Routers = append(m.Routers, model.LabRouter{Name: r.name.value, Address: r.address.value, SIDs: values(r.sids)})
	}
	for _, k := range l.links.value {
		link := model.LabLink{MTU: k.mtu.value}
		if len(k.between.value) == 2 {
			link.A, link.B = k.between.value[0].value, k.between.value[1].value
		}
		m.Links = append(m.Links, link)
	}
	for _, f := range l.functions.value {
		m.Functions = append(m.Functions, model.LabFunction{Name: f.name.value, Kind: f.kind.value, Ruleset: f.ruleset.value, MTU: f.mtu.value})
	}
	return m
}
