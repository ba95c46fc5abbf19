package manifest

import (
	"errors"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"github.com/waystamp/waystamp/internal/model"
)

// version reports whether the file is of the version that this package reads.
// If not, nothing else in it is known to mean what it says.
func (r *reader) version(root cursor) bool {
	if m, ok := root.node.(*ast.MappingNode); ok {
		for _, v := range m.Values {
			if key, ok := v.Key.(*ast.StringNode); ok && key.Value == "version" {
				if s, ok := v.Value.(*ast.IntegerNode); ok && s.GetToken().Value == "1" {
					return true
				}
				r.problemf(where("version", v.Value), "%s is not a version that is known here; expect the number 1", quote(v.Value.GetToken().Value))
				return false
			}
		}
	}
	r.problemf(root.at, `the file does not start with "version: 1"`)
	return false
}

// What follows mirrors the file. All that is item or list may be missing.

type file struct {
	at        place
	block     item[netip.Prefix]
	mpls      domainMPLS
	nodes     item[[]node]
	functions item[[]function]
	chains    item[[]chain]
	clients   item[[]clients]
	services  item[[]service]
	lab       *lab
}

// domainMPLS is what a domain says of labels; at is zero where it says nothing.
type domainMPLS struct {
	at       place
	services item[int]
	mtu      item[int]
}

// nodeMPLS is what a node says of them.
type nodeMPLS struct {
	at      place
	label   item[int]
	address item[netip.Addr]
}

type node struct {
	at         place
	name       item[string]
	address    item[netip.Addr]
	locator    item[netip.Prefix]
	cpus       item[int]
	advertise  item[model.Advertise]
	mpls       nodeMPLS
	interfaces item[[]iface]
}

type iface struct {
	at        place
	name      item[string]
	role      item[model.Role]
	datapath  item[model.Datapath]
	unmatched item[model.Unmatched]
	guard     item[model.Guard]
	mtu       item[int]
}

type function struct {
	at   place
	name item[string]
	node item[string]
	kind item[model.Kind]

	intrusive item[bool]

	// Of kind unaware.
	attach    item[attachment]
	recognise item[model.Recognise]
	segments  item[model.Segments]

	// Of kind netfilter.
	namespace item[string]
	arguments arguments
	zones     item[bool]
	bypass    item[bool]
	addresses []item[netip.Addr]
	rules     rules
	rulesFile item[string]

	// Of kind stream.
	run     item[[]string]
	back    item[[]string]
	connect item[string]
	other   item[model.Other]
	limits  item[streamLimits]

	// Of the kinds unaware and netfilter.
	onUnknown item[model.OnUnknown]
	rewrites  item[bool]
	cache     item[cache]
	lifetime  item[time.Duration]
}

// arguments are values by name. Of one that could not be read the name is known.
type arguments struct {
	at     place
	values map[string]item[uint32]
}

type rules struct {
	item[string]
	source model.Source
}

type attachment struct {
	local bool
	to    item[string]
	from  item[string]
	via   item[netip.Addr]
}

type cache struct {
	size  item[int]
	rate  item[int] // packets per second
	delay item[time.Duration]
}

type chain struct {
	at          place
	name        item[string]
	ingress     item[[]item[string]]
	functions   item[[]item[string]]
	back        item[[]item[string]] // of return
	arguments   []argument
	parameters  []parameters
	waypoints   []waypoint
	egress      item[string]
	match       place
	destination item[netip.Prefix]
	source      item[netip.Prefix]
	priority    item[int]
	protocol    item[model.Protocol]
	sourcePort  item[model.Ports]
	destPort    item[model.Ports]
	dscp        item[model.DSCP]
	mark        item[model.Mark]
	own         item[bool]
	both        item[bool]
	carrier     item[model.EncapsulationType]
	sids        item[model.SIDs]
	reduced     item[bool]
	clamp       item[model.Clamp]
	scheme      item[model.Scheme]
	onViolation item[model.OnViolation]
	window      item[int]
	rotate      item[time.Duration]
	guard       item[model.Guard]
	seal        item[bool]

	named  *rule         // the first that names it; found when all is read
	onward *model.Onward // of one that rules name
}

// argument is that of an entry of a chain's functions. reverse is forward where the
// file gives one for both.
type argument struct {
	of               int // index in functions
	forward, reverse item[string]
}

// parameters are those of an entry of a chain's functions, or of the functions of its way back.
type parameters struct {
	function         item[string]
	forward, reverse item[uint64] // of an entry of the way back: reverse alone
	back             bool         // it is an entry of the way back
}

// waypoint is an entry of a chain's functions that is a segment of somebody else's.
type waypoint struct {
	before int // index in functions
	sid    item[netip.Addr]
}

type lab struct {
	at        place
	mtu       item[int]
	hosts     item[[]host]
	routers   item[[]router]
	links     item[[]link]
	functions item[[]labFunction]
	routing   item[model.LabRouting]
	core      item[model.LabCore]
}

type labFunction struct {
	at      place
	name    item[string]
	kind    item[model.LabKind]
	ruleset item[string]
	mtu     item[int]
}

type host struct {
	at     place
	name   item[string]
	node   item[string]
	prefix item[netip.Prefix]
	four   item[netip.Prefix] // prefix4
	mtu    item[int]
}

type router struct {
	at      place
	name    item[string]
	address item[netip.Addr]
	sids    []item[netip.Addr]
}

type link struct {
	at      place
	between item[[]item[string]]
	mtu     item[int]
}

func (r *reader) file(root cursor) file {
	f := file{at: root.at}
	var locators []*item[netip.Prefix] // checked once the block is known
	var sids []*item[netip.Addr]
	root.fields(
		field{"version", true, func(c cursor) { c.takes("the number 1") }},
		field{"domain", true, func(c cursor) {
			c.fields(
				field{"block", true, into(&f.block, prefixBy("IPv6 prefix, a /48", model.CheckBlock))},
				field{"mpls", false, f.mpls.read},
			)
		}},
		field{"nodes", true, list(&f.nodes, readNode)},
		field{"functions", false, list(&f.functions, readFunction)},
		field{"chains", false, list(&f.chains, readChain)},
		field{"clients", false, list(&f.clients, readClients)},
		field{"services", false, list(&f.services, readService)},
		field{"lab", false, func(c cursor) { f.lab = readLab(c) }},
	)
	for i := range f.nodes.value {
		locators = append(locators, &f.nodes.value[i].locator)
	}
	if f.lab != nil {
		for i := range f.lab.routers.value {
			for j := range f.lab.routers.value[i].sids {
				sids = append(sids, &f.lab.routers.value[i].sids[j])
			}
		}
	}
	if !f.block.ok {
		return f
	}
	block := f.block.value
	for _, l := range locators {
		apply(r, l, func(p netip.Prefix) error { return model.CheckLocator(block, p) })
	}
	for _, s := range sids {
		apply(r, s, func(a netip.Addr) error { return model.CheckSID(block, a) })
	}
	for i := range f.chains.value {
		c := &f.chains.value[i]
		for _, p := range []*item[netip.Prefix]{&c.destination, &c.source} {
			apply(r, p, func(p netip.Prefix) error { return model.CheckMatchPrefix(block, p) })
		}
	}
	return f
}

func readNode(c cursor) node {
	n := node{at: c.at, cpus: item[int]{value: model.CPUsDefault, at: c.at, ok: true}}
	c.fields(
		field{"name", true, into(&n.name, name)},
		field{"address", true, into(&n.address, func(c cursor) item[netip.Addr] { return c.address(model.CheckAddress) })},
		field{"locator", true, into(&n.locator, prefixBy("IPv6 prefix, a /49 to /64", model.CheckPrefix))},
		field{"cpus", false, into(&n.cpus, func(c cursor) item[int] { return c.integer(1, model.LanesMax) })},
		field{"advertise", false, into(&n.advertise, enum[model.Advertise])},
		field{"mpls", false, n.mpls.read},
		field{"interfaces", true, list(&n.interfaces, readInterface)},
	)
	return n
}

func (m *domainMPLS) read(c cursor) {
	m.at = c.at
	c.fields(
		field{"services", true, into(&m.services, func(c cursor) item[int] {
			if c.takes("label from %d to %d", model.LabelMin, model.ServicesMax) {
				return item[int]{}
			}
			v := c.integer(0, model.LabelMax)
			if v.ok {
				if err := model.CheckServices(uint32(v.value)); err != nil {
					c.r.problemf(c.at, "%d %v", v.value, err)
					v.ok = false
				}
			}
			return v
		})},
		field{"mtu", false, into(&m.mtu, mtu)},
	)
}

func (m *nodeMPLS) read(c cursor) {
	m.at = c.at
	c.fields(
		field{"label", true, into(&m.label, func(c cursor) item[int] { return c.integer(model.LabelMin, model.LabelMax) })},
		field{"address", true, into(&m.address, func(c cursor) item[netip.Addr] {
			if c.takes("IPv4 or IPv6 address") {
				return item[netip.Addr]{}
			}
			return parsed(c, netip.ParseAddr, "is not an IP address", model.CheckNodeMPLSAddress)
		})},
	)
}

func readInterface(c cursor) iface {
	i := iface{at: c.at}
	c.fields(
		field{"name", true, into(&i.name, device)},
		field{"role", true, into(&i.role, enum[model.Role])},
		field{"datapath", false, into(&i.datapath, enum[model.Datapath])},
		field{"unmatched", false, into(&i.unmatched, enum[model.Unmatched])},
		field{"guard", false, into(&i.guard, enum[model.Guard])},
		field{"mtu", false, into(&i.mtu, mtu)},
	)
	return i
}

func readFunction(c cursor) function {
	f := function{at: c.at}
	c.fields(
		field{"name", true, into(&f.name, name)},
		field{"node", true, into(&f.node, nameOf("node"))},
		field{"kind", true, into(&f.kind, enum[model.Kind])},
		field{"intrusive", false, into(&f.intrusive, cursor.boolean)},
		field{"attach", false, into(&f.attach, readAttachment)},
		field{"recognise", false, into(&f.recognise, enum[model.Recognise])},
		field{"segments", false, into(&f.segments, enum[model.Segments])},
		field{"namespace", false, into(&f.namespace, namespace)},
		field{"arguments", false, f.arguments.read},
		field{"zones", false, into(&f.zones, zones)},
		field{"bypass", false, into(&f.bypass, bypass)},
		field{"address", false, f.readAddresses},
		field{"rules", false, func(c cursor) { f.rules = readRules(c) }},
		field{"rules-file", false, into(&f.rulesFile, func(c cursor) item[string] {
			c.takes("name of a file, from the folder of this one")
			return c.text()
		})},
		field{"run", false, into(&f.run, readStreamList)},
		field{"back", false, into(&f.back, readStreamList)},
		field{"connect", false, into(&f.connect, readConnect)},
		field{"other", false, into(&f.other, enum[model.Other])},
		field{"limits", false, into(&f.limits, readStreamLimits)},
		field{"on-unknown", false, into(&f.onUnknown, enum[model.OnUnknown])},
		field{"rewrites", false, into(&f.rewrites, cursor.boolean)},
		field{"cache", false, into(&f.cache, readCache)},
		field{"lifetime", false, into(&f.lifetime, func(c cursor) item[time.Duration] {
			return c.duration(model.LifetimeMin, model.LifetimeMax)
		})},
	)
	return f
}

func namespace(c cursor) item[string] {
	return c.checked("own, node or the name of a network namespace", model.CheckNamespace)
}

func zones(c cursor) item[bool] {
	if c.takes("none or argument") {
		return item[bool]{}
	}
	t := c.text()
	if t.ok && t.value != "none" && t.value != "argument" {
		c.r.problemf(c.at, "%s is not a setting of zones; expect none or argument", quote(t.value))
		t.ok = false
	}
	return item[bool]{value: t.value == "argument", at: c.at, ok: t.ok}
}

func bypass(c cursor) item[bool] {
	if c.takes("none or established") {
		return item[bool]{}
	}
	t := c.text()
	if t.ok && t.value != "none" && t.value != "established" {
		c.r.problemf(c.at, "%s is not a setting of bypass; expect none or established", quote(t.value))
		t.ok = false
	}
	return item[bool]{value: t.value == "established", at: c.at, ok: t.ok}
}

// argumentMax is the largest packet mark.
const argumentMax = 1<<32 - 1

func (a *arguments) read(c cursor) {
	a.at, a.values = c.at, map[string]item[uint32]{}
	if c.takes("mapping of names to whole numbers from 1 to %d, as in {guest: 1, staff: 2}", argumentMax) {
		return
	}
	by := map[uint32]string{}
	c.entries(func(name string, c cursor) {
		if err := model.CheckArgumentName(name); err != nil {
			c.r.problemf(c.at, "argument %s %v", quote(name), err)
			return
		}
		n := c.integer(1, argumentMax)
		v := item[uint32]{value: uint32(n.value), at: n.at, ok: n.ok}
		a.values[name] = v
		if other, ok := by[v.value]; v.ok && ok {
			c.r.problemf(c.at, "%d is argument %s already; rules could not distinguish them", v.value, other)
		} else if v.ok {
			by[v.value] = name
		}
	})
	if n := len(a.values); n > model.ArgumentsMax {
		c.r.problemf(c.at, "%d arguments; a function has at most %d", n, model.ArgumentsMax)
	}
}

// readAddresses reads one address or a list of them.
func (f *function) readAddresses(c cursor) {
	one := func(c cursor) {
		f.addresses = append(f.addresses, parsed(c, netip.ParseAddr, "is not an IP address", model.CheckFunctionAddress))
	}
	if c.takes("IPv6 or IPv4 address, or a list of one of each") {
		return
	}
	if _, ok := c.node.(*ast.SequenceNode); ok {
		c.each(one)
	} else {
		one(c)
	}
}

// readRules also finds where the text begins, for messages of those who check it.
func readRules(c cursor) rules {
	r := rules{item: c.lines(model.RulesMax)}
	r.source = model.Source{Line: c.at.line, Column: c.at.column}
	if n, ok := c.node.(*ast.LiteralNode); ok && n.Value != nil {
		r.source.Line, r.source.Column = c.at.line+1, c.r.indentAfter(c.at.line)
	}
	return r
}

// readAttachment is ok only if all of it is.
func readAttachment(c cursor) item[attachment] {
	a := item[attachment]{at: c.at}
	if s, ok := c.node.(*ast.StringNode); ok {
		a.value.local, a.ok = true, s.Value == "local"
		if !a.ok {
			c.r.problemf(c.at, "%s is not an attachment; expect local, or interfaces as in {to: eth2, from: eth3}", quote(s.Value))
		}
		return a
	}
	if _, ok := c.node.(*ast.MappingNode); !ok {
		c.wrong("expect local, or interfaces as in {to: eth2, from: eth3}")
		return a
	}
	c.takes("the word local")
	v := &a.value
	c.fields(
		field{"to", true, into(&v.to, device)},
		field{"from", true, into(&v.from, device)},
		field{"via", false, into(&v.via, func(c cursor) item[netip.Addr] { return c.address(model.CheckVia) })},
	)
	a.ok = v.to.ok && v.from.ok && (v.via.ok || !v.via.given())
	return a
}

// readCache is ok only if it gives one size.
func readCache(c cursor) item[cache] {
	v := item[cache]{at: c.at}
	size, rate, delay := &v.value.size, &v.value.rate, &v.value.delay
	before := len(c.r.problems)
	c.fields(
		field{"size", false, into(size, func(c cursor) item[int] { return c.integer(1, model.CacheMax) })},
		field{"rate", false, into(rate, func(c cursor) item[int] { return c.integer(1, model.RateMax) })},
		field{"delay", false, into(delay, func(c cursor) item[time.Duration] {
			return c.duration(time.Microsecond, model.LifetimeMax)
		})},
	)
	switch {
	case len(c.r.problems) > before:
	case size.ok && (rate.ok || delay.ok):
		c.r.problemf(size.at, "gives both a size, and rate and delay; give size, or rate and delay")
	case size.ok:
		v.ok = true
	case !rate.ok || !delay.ok:
		c.r.problemf(c.at, "gives no size; expect {size: HEADERS}, or {rate: PACKETS-PER-SECOND, delay: TIME-IN-THE-FUNCTION}")
	default:
		v.ok = true
	}
	return v
}

func readChain(c cursor) chain {
	ch := chain{
		at:     c.at,
		both:   item[bool]{at: c.at, ok: true},
		scheme: item[model.Scheme]{value: model.SchemeKeyed, at: c.at, ok: true},
		window: item[int]{value: model.WindowDefault, at: c.at, ok: true},
	}
	// The block is not known yet: what concerns it is checked later.
	match := prefixBy("IPv6 or IPv4 prefix", func(p netip.Prefix) error { return model.CheckMatchPrefix(netip.Prefix{}, p) })
	c.fields(
		field{"name", true, into(&ch.name, name)},
		field{"ingress", true, list(&ch.ingress, nameOf("node"))},
		field{"functions", true, ch.readFunctions},
		field{"egress", true, into(&ch.egress, nameOf("node"))},
		field{"return", false, func(c cursor) {
			c.fields(field{"functions", true, ch.readReturn})
		}},
		field{"match", false, func(c cursor) {
			ch.match = c.at
			before := len(c.r.problems)
			c.fields(
				field{"destination", false, into(&ch.destination, match)},
				field{"source", false, into(&ch.source, match)},
				field{"priority", false, into(&ch.priority, func(c cursor) item[int] { return c.integer(1, model.PriorityMax) })},
				field{"protocol", false, into(&ch.protocol, enum[model.Protocol])},
				field{"source-port", false, into(&ch.sourcePort, enum[model.Ports])},
				field{"destination-port", false, into(&ch.destPort, enum[model.Ports])},
				field{"dscp", false, into(&ch.dscp, enum[model.DSCP])},
				field{"mark", false, into(&ch.mark, enum[model.Mark])},
			)
			if err := ch.model().Match.Check(); err != nil && len(c.r.problems) == before {
				c.r.problemf(c.at, "%v", err)
			}
			if m, ok := c.node.(*ast.MappingNode); ok && len(m.Values) == 0 {
				c.r.problemf(c.at, "matches nothing; give it a destination, a source or both (::/0 is all of IPv6, 0.0.0.0/0 all of IPv4)")
			}
			if err := model.CheckMatch(ch.destination.value, ch.source.value); err != nil {
				c.r.problemf(c.at, "%s", err)
			}
		}},
		field{"own-traffic", false, into(&ch.own, cursor.boolean)},
		field{"direction", false, into(&ch.both, direction)},
		field{"encapsulation", false, func(c cursor) {
			c.fields(
				field{"type", false, into(&ch.carrier, enum[model.EncapsulationType])},
				field{"sids", false, into(&ch.sids, enum[model.SIDs])},
				field{"reduced", false, into(&ch.reduced, cursor.boolean)},
			)
		}},
		field{"mss-clamp", false, into(&ch.clamp, clamp)},
		field{"proof", false, func(c cursor) {
			c.fields(
				field{"scheme", false, into(&ch.scheme, enum[model.Scheme])},
				field{"on-violation", false, into(&ch.onViolation, enum[model.OnViolation])},
				field{"window", false, into(&ch.window, window)},
				field{"rotate-every", false, into(&ch.rotate, func(c cursor) item[time.Duration] {
					return c.duration(model.RotateMin, model.RotateMax)
				})},
			)
		}},
		field{"guard", false, into(&ch.guard, enum[model.Guard])},
		field{"seal", false, into(&ch.seal, cursor.boolean)},
	)
	return ch
}

// readFunctions reads the names of functions, with arguments, and waypoints between
// them.
func (ch *chain) readFunctions(c cursor) {
	ch.functions.at = c.at
	_, ch.functions.ok = c.node.(*ast.SequenceNode)
	c.each(func(c cursor) {
		c.takes("name of a function")
		if _, ok := c.node.(*ast.MappingNode); !ok {
			ch.functions.value = append(ch.functions.value, c.text())
			return
		}
		n := len(ch.functions.value)
		var function item[string]
		a, w := argument{of: n}, waypoint{before: n}
		var p parameters
		before := len(c.r.problems)
		c.fields(
			field{"name", false, into(&function, nameOf("function"))},
			field{"argument", false, a.read},
			field{"parameters", false, p.read},
			field{"sid", false, into(&w.sid, func(c cursor) item[netip.Addr] {
				return c.address(func(netip.Addr) error { return nil })
			})},
		)
		switch given := a.forward.given() || a.reverse.given(); {
		case w.sid.given() && (function.given() || given || p.given()):
			c.r.problemf(w.sid.at, "a waypoint has only a sid; only a function has name, argument and parameters")
		case w.sid.given():
			ch.waypoints = append(ch.waypoints, w)
		case function.given():
			ch.functions.value = append(ch.functions.value, function)
			if given {
				ch.arguments = append(ch.arguments, a)
			}
			if p.given() {
				p.function = function
				ch.parameters = append(ch.parameters, p)
			}
		case len(c.r.problems) == before:
			c.r.problemf(c.at, "names nothing to visit; expect {name: FUNCTION, argument: NAME}, or {sid: SID} for a waypoint")
		}
	})
}

// readReturn reads the functions of the way back, with the parameters of their visits there.
func (ch *chain) readReturn(c cursor) {
	ch.back.at = c.at
	_, ch.back.ok = c.node.(*ast.SequenceNode)
	c.each(func(c cursor) {
		c.takes("name of a function")
		if _, ok := c.node.(*ast.MappingNode); !ok {
			ch.back.value = append(ch.back.value, c.text())
			return
		}
		p := parameters{back: true}
		c.fields(
			field{"name", true, into(&p.function, nameOf("function"))},
			field{"parameters", false, into(&p.reverse, readParameters)},
		)
		if p.function.given() {
			ch.back.value = append(ch.back.value, p.function)
		}
		if p.function.given() && p.reverse.given() {
			ch.parameters = append(ch.parameters, p)
		}
	})
}

// read reads a number for both directions, or one for each.
func (p *parameters) read(c cursor) {
	c.takes("number of 48 bits from 1, decimal or hexadecimal as in 0x2a, or one for each direction as in {forward: 0x2a, reverse: 0x2b}")
	if _, ok := c.node.(*ast.MappingNode); !ok || c.r.outline != nil {
		p.forward = readParameters(c)
		p.reverse = p.forward
		return
	}
	c.fields(
		field{"forward", false, into(&p.forward, readParameters)},
		field{"reverse", false, into(&p.reverse, readParameters)},
	)
}

func (p *parameters) given() bool { return p.forward.given() || p.reverse.given() }

func readParameters(c cursor) item[uint64] {
	if c.takes("number of 48 bits from 1, decimal or hexadecimal as in 0x2a") {
		return item[uint64]{}
	}
	t := c.text()
	v := item[uint64]{at: c.at}
	if !t.ok {
		return v
	}
	digits, base := t.value, 10
	if hex, ok := strings.CutPrefix(t.value, "0x"); ok {
		digits, base = hex, 16
	}
	n, err := strconv.ParseUint(digits, base, 64)
	switch {
	case errors.Is(err, strconv.ErrRange) || n > model.ParametersMax:
		c.r.problemf(c.at, "%s is larger than the 48 bits that a SID has for parameters; give at most %#x", quote(t.value), uint64(model.ParametersMax))
	case err != nil:
		c.r.problemf(c.at, "%s is not a number; expect a decimal one, or a hexadecimal one as 0x2a", quote(t.value))
	case n == 0:
		c.r.problemf(c.at, "parameters of 0 are the same as none; leave them out, or give a number from 1")
	default:
		v.value, v.ok = n, true
	}
	return v
}

// read reads one name for both directions, or one for each.
func (a *argument) read(c cursor) {
	c.takes("name of an argument, or one for each direction as in {forward: guest, reverse: staff}")
	if _, ok := c.node.(*ast.MappingNode); !ok || c.r.outline != nil {
		a.forward = c.text()
		a.reverse = a.forward
		return
	}
	name := func(c cursor) item[string] { return c.text() }
	c.fields(
		field{"forward", false, into(&a.forward, name)},
		field{"reverse", false, into(&a.reverse, name)},
	)
}

func window(c cursor) item[int] {
	if c.takes("power of two from %d to %d", model.WindowMin, model.WindowMax) {
		return item[int]{}
	}
	w := c.integer(model.WindowMin, model.WindowMax)
	if w.ok {
		if err := model.CheckWindow(w.value); err != nil {
			c.r.problemf(c.at, "%d %v", w.value, err)
			w.ok = false
		}
	}
	return w
}

// clamp is a boolean, or the number of bytes.
func clamp(c cursor) item[model.Clamp] {
	if c.takes("true, false or a whole number of bytes from %d to %d", model.MSSMin, model.MSSMax) {
		return item[model.Clamp]{}
	}
	t := c.text()
	v := item[model.Clamp]{at: c.at, ok: t.ok}
	if !t.ok || t.value == "false" {
		return v
	}
	v.value.On = true
	if t.value == "true" {
		return v
	}
	n, err := strconv.Atoi(t.value)
	if err != nil || n < model.MSSMin || n > model.MSSMax {
		c.r.problemf(c.at, "%s is not true, false or a whole number of bytes from %d to %d", quote(t.value), model.MSSMin, model.MSSMax)
		v.ok = false
	}
	v.value.Most = n
	return v
}

func readLab(c cursor) *lab {
	l := &lab{at: c.at}
	c.fields(
		field{"mtu", false, into(&l.mtu, mtu)},
		field{"hosts", false, list(&l.hosts, readHost)},
		field{"routers", false, list(&l.routers, readRouter)},
		field{"links", true, list(&l.links, readLink)},
		field{"functions", false, list(&l.functions, readLabFunction)},
		field{"routing", false, into(&l.routing, enum[model.LabRouting])},
		field{"core", false, into(&l.core, enum[model.LabCore])},
	)
	return l
}

// rulesetMax is the length in bytes of the longest ruleset of a lab's function.
const rulesetMax = 1 << 16

func readLabFunction(c cursor) labFunction {
	f := labFunction{at: c.at}
	c.fields(
		field{"name", true, into(&f.name, nameOf("function"))},
		field{"kind", true, into(&f.kind, enum[model.LabKind])},
		field{"ruleset", false, into(&f.ruleset, func(c cursor) item[string] { return c.lines(rulesetMax) })},
		field{"mtu", false, into(&f.mtu, mtu)},
	)
	return f
}

func readHost(c cursor) host {
	h := host{at: c.at}
	c.fields(
		field{"name", true, into(&h.name, name)},
		field{"node", true, into(&h.node, nameOf("node"))},
		field{"prefix", true, into(&h.prefix, prefixBy("IPv6 prefix, a /64", checkHostPrefix))},
		field{"prefix4", false, into(&h.four, prefixBy("IPv4 prefix, a /8 to /30", checkHostPrefix4))},
		field{"mtu", false, into(&h.mtu, mtu)},
	)
	return h
}

func readRouter(c cursor) router {
	r := router{at: c.at}
	c.fields(
		field{"name", true, into(&r.name, name)},
		field{"address", true, into(&r.address, func(c cursor) item[netip.Addr] { return c.address(model.CheckAddress) })},
		field{"sids", false, func(c cursor) {
			c.each(func(c cursor) {
				r.sids = append(r.sids, c.address(func(netip.Addr) error { return nil }))
			})
		}},
	)
	return r
}

func readLink(c cursor) link {
	l := link{at: c.at}
	c.fields(
		field{"between", true, list(&l.between, nameOf("node or router"))},
		field{"mtu", false, into(&l.mtu, mtu)},
	)
	return l
}

// list makes the read function of a list.
func list[T any](dst *item[[]T], read func(cursor) T) func(cursor) {
	return func(c cursor) {
		dst.at = c.at
		_, dst.ok = c.node.(*ast.SequenceNode)
		c.each(func(c cursor) { dst.value = append(dst.value, read(c)) })
	}
}

func name(c cursor) item[string] { return c.checked("name", model.CheckName) }

// nameOf makes the read function of a reference, which is resolved when all is read.
func nameOf(what string) func(cursor) item[string] {
	return func(c cursor) item[string] {
		c.takes("name of a %s", what)
		return c.text()
	}
}

func device(c cursor) item[string] {
	return c.checked("name of a network device", model.CheckInterfaceName)
}

func mtu(c cursor) item[int] { return c.integer(model.MTUMin, model.MTUMax) }

func prefixBy(what string, rule func(netip.Prefix) error) func(cursor) item[netip.Prefix] {
	return func(c cursor) item[netip.Prefix] { return c.prefix(what, rule) }
}

func direction(c cursor) item[bool] {
	if c.takes("forward or both") {
		return item[bool]{}
	}
	t := c.text()
	if t.ok && t.value != "forward" && t.value != "both" {
		c.r.problemf(c.at, "%s is not a direction of a chain; expect forward or both", quote(t.value))
		t.ok = false
	}
	return item[bool]{value: t.value == "both", at: c.at, ok: t.ok}
}

// apply checks a value that was read before its rule could be known.
func apply[T interface{ String() string }](r *reader, v *item[T], rule func(T) error) {
	if !v.ok {
		return
	}
	if err := rule(v.value); err != nil {
		r.problemf(v.at, "%s %v", quote(v.value.String()), err)
		v.ok = false
	}
}
