package lab

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/routing"
)

// MTUs of links that name none.
const (
	mtuHost = 1500
	mtuLink = 1500
)

// layout is what a lab is made of, as pure values.
type layout struct {
	stations []station
	wires    []wire
}

// station is a namespace to be: a node, router, host or function.
type station struct {
	name       string
	role       Role
	loopback   netip.Addr // zero: none
	labels     netip.Addr // also on the loopback: where packets with the node's label are routed to; zero: none
	interfaces []iface
	routes     []host.Route
	rules      []host.Rule
	speaker    *routing.Speaker // nil: it has no BGP
	learned    []netip.Prefix   // by BGP
	rulesets   []ruleset        // of a function of its own, or of a node's local ones
	copier     *copier          // nil: its kernel forwards
}

// iface is one end of a wire.
type iface struct {
	name      string
	addresses []netip.Prefix
	plain     bool // frames leave with their checksums
	noIPv6    bool
}

// wire is a veth pair between two stations. Its ends are named A-B and B-A, but
// for those of a function, which both have its name.
type wire struct {
	a, b string
	name string
	mtu  int
}

func (k wire) ends() (a, b string) {
	if k.name != "" {
		return k.name, k.name
	}
	return k.a + "-" + k.b, k.b + "-" + k.a
}

// layOut computes addresses and routes. There is IPv4 between hosts and their
// nodes only, since within the domain it is in tunnels; but nodes with a function
// in their own kernel have routes for it. The link-local address of a station is
// the same on all its links but those of functions: fe80::N, the N-th in the
// order of nodes, routers and hosts.
//
// Routes take the fewest links to each node's address and locator, router's
// address and SIDs, host's prefix. Among equally long ways each station takes
// the neighbour whose name sorts first, hence never in a circle: the next one is
// always one link nearer. Hosts forward nothing. Where FRR routes, nodes and routers
// announce the same prefixes instead, and are to learn all others.
//
// In a core of IPv4 links between nodes have no addresses: routes lead to the addresses of
// the nodes' labels, and nowhere else.
func layOut(d model.Domain, l model.Lab) (layout, error) {
	var w layout
	var fabric []string          // what forwards
	reach := map[string][]dest{} // what is behind each of it
	links := map[string][]string{}
	index := map[string]int{}
	kernels := map[string]bool{} // nodes whose kernel is a function
	for _, f := range d.Functions {
		if f.Proxy.Local {
			kernels[f.Node] = true
		}
	}
	add := func(s station) {
		index[s.name] = len(w.stations)
		w.stations = append(w.stations, s)
	}
	for _, n := range d.Nodes {
		s := station{name: n.Name, role: RoleNode, loopback: n.Address}
		reach[n.Name] = []dest{{prefix: single(n.Address)}, {prefix: n.Locator}}
		if n.MPLS != nil && n.MPLS.Address != n.Address {
			s.labels = n.MPLS.Address
			reach[n.Name] = append(reach[n.Name], dest{prefix: single(s.labels), labels: true})
		}
		add(s)
		fabric = append(fabric, n.Name)
	}
	for _, r := range l.Routers {
		add(station{name: r.Name, role: RoleRouter, loopback: r.Address})
		fabric = append(fabric, r.Name)
		reach[r.Name] = []dest{{prefix: single(r.Address)}}
		for _, sid := range r.SIDs {
			reach[r.Name] = append(reach[r.Name], dest{prefix: netip.PrefixFrom(sid, 64).Masked(), sid: true})
		}
	}
	for _, h := range l.Hosts {
		add(station{name: h.Name, role: RoleHost})
		reach[h.Node] = append(reach[h.Node], dest{prefix: h.Prefix})
		if h.Prefix4.IsValid() {
			reach[h.Node] = append(reach[h.Node], dest{prefix: h.Prefix4})
		}
	}
	linkLocal := func(name string) netip.Addr { return hostSide(netip.MustParsePrefix("fe80::/64"), index[name]+1) }
	connect := func(at, peer string, more ...netip.Prefix) error {
		i, ok := index[at]
		if !ok {
			return fmt.Errorf("a link of the lab ends at %q, which is no node, router or host", at)
		}
		s := &w.stations[i]
		f := iface{name: at + "-" + peer, addresses: append(more, netip.PrefixFrom(linkLocal(at), 64))}
		if len(more) == 0 && l.Core == model.LabIPv4 {
			f.addresses, f.noIPv6 = nil, true
		}
		s.interfaces = append(s.interfaces, f)
		return nil
	}
	for _, k := range l.Links {
		mtu := cmp.Or(k.MTU, l.MTU, mtuLink)
		w.wires = append(w.wires, wire{a: k.A, b: k.B, mtu: mtu})
		links[k.A] = append(links[k.A], k.B)
		links[k.B] = append(links[k.B], k.A)
		if err := connect(k.A, k.B); err != nil {
			return layout{}, err
		}
		if err := connect(k.B, k.A); err != nil {
			return layout{}, err
		}
	}
	for _, h := range l.Hosts {
		w.wires = append(w.wires, wire{a: h.Node, b: h.Name, mtu: cmp.Or(h.MTU, mtuHost)})
		near, far := []netip.Prefix{netip.PrefixFrom(hostSide(h.Prefix, 1), 64)}, []netip.Prefix{netip.PrefixFrom(hostSide(h.Prefix, 2), 64)}
		if p := h.Prefix4; p.IsValid() {
			near, far = append(near, netip.PrefixFrom(hostSide(p, 1), p.Bits())), append(far, netip.PrefixFrom(hostSide(p, 2), p.Bits()))
		}
		if err := connect(h.Node, h.Name, near...); err != nil {
			return layout{}, err
		}
		if err := connect(h.Name, h.Node, far...); err != nil {
			return layout{}, err
		}
		s := &w.stations[index[h.Name]]
		s.routes = append(s.routes, host.Route{
			Destination: netip.PrefixFrom(netip.IPv6Unspecified(), 0),
			Via:         hostSide(h.Prefix, 1),
			Device:      h.Name + "-" + h.Node,
		})
		if h.Prefix4.IsValid() {
			s.routes = append(s.routes, host.Route{
				Destination: netip.PrefixFrom(netip.IPv4Unspecified(), 0),
				Via:         hostSide(h.Prefix4, 1),
				Device:      h.Name + "-" + h.Node,
			})
		}
	}
	for _, to := range fabric {
		if s := &w.stations[index[to]]; s.role == RoleRouter {
			for _, d := range reach[to] {
				if !d.sid {
					continue
				}
				if len(s.interfaces) == 0 {
					return layout{}, fmt.Errorf("router %s has SIDs, and no link of the lab ends at it", to)
				}
				s.routes = append(s.routes, host.Route{Destination: d.prefix, Type: host.RouteEnd, Device: s.interfaces[0].name})
			}
		}
		next := nextHops(links, to)
		for _, from := range fabric {
			if from == to {
				continue
			}
			hop, ok := next[from]
			if !ok {
				return layout{}, fmt.Errorf("%s cannot reach %s: no links of the lab lead there", from, to)
			}
			s := &w.stations[index[from]]
			for _, d := range reach[to] {
				if l.Core == model.LabIPv4 {
					if r := labelRoute(d, from, hop, to, w.stations[index[hop]].labels, s.labels); d.labels {
						s.routes = append(s.routes, r)
					}
					continue
				}
				r := host.Route{Destination: d.prefix, Via: linkLocal(hop), Device: from + "-" + hop, Source: s.loopback}
				if d.prefix.Addr().Is4() {
					if !kernels[from] && !d.labels {
						continue
					}
					r.Source = netip.Addr{}
				}
				if l.Routing == model.LabFRR && d.prefix.Addr().Is6() {
					s.learned = append(s.learned, d.prefix)
					continue
				}
				s.routes = append(s.routes, r)
			}
		}
	}
	for i := range w.stations {
		if l.Core != model.LabIPv4 {
			break
		}
		// A neighbour's own route, which has no gateway, is what others are reached by.
		slices.SortStableFunc(w.stations[i].routes, func(a, b host.Route) int { return cmp.Compare(a.Via.BitLen(), b.Via.BitLen()) })
	}
	if l.Routing == model.LabFRR {
		for n, name := range fabric {
			s := &w.stations[index[name]]
			s.speaker = &routing.Speaker{
				Name: name, AS: routing.FirstAS + 1 + uint32(n), Number: 1 + uint32(n), Source: s.loopback,
			}
			for _, d := range reach[name] {
				switch {
				case d.sid:
					s.speaker.SIDs = append(s.speaker.SIDs, routing.SID{Prefix: d.prefix, Behaviour: routing.End})
				case d.prefix.Addr().Is6():
					s.speaker.Own = append(s.speaker.Own, d.prefix)
				}
			}
			for _, peer := range links[name] {
				s.speaker.Neighbours = append(s.speaker.Neighbours, name+"-"+peer)
			}
		}
	}
	return w, w.addFunctions(d, l)
}

// dest is a prefix behind a station.
type dest struct {
	prefix netip.Prefix
	sid    bool // of a router: the kernel's own End
	labels bool // of a node: where its label leads
}

// labelRoute is a route of a core without addresses on its links: on the link to a neighbour, and
// by that neighbour to all behind it.
func labelRoute(d dest, from, hop, to string, via, source netip.Addr) host.Route {
	r := host.Route{Destination: d.prefix, Device: from + "-" + hop, Source: source}
	if hop != to {
		r.Via = via
	}
	return r
}

// nextHops returns for every station from which there is a way to a
// destination the neighbour to take.
func nextHops(links map[string][]string, to string) map[string]string {
	distance := map[string]int{to: 0}
	next := map[string]string{}
	for queue := []string{to}; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		for _, from := range links[at] {
			if _, seen := distance[from]; !seen {
				distance[from] = distance[at] + 1
				queue = append(queue, from)
			}
			if distance[from] == distance[at]+1 && (next[from] == "" || at < next[from]) {
				next[from] = at
			}
		}
	}
	return next
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// hostSide returns the n-th address of a prefix.
func hostSide(p netip.Prefix, n int) netip.Addr {
	if p.Addr().Is4() {
		b := p.Masked().Addr().As4()
		b[3] |= byte(n)
		return netip.AddrFrom4(b)
	}
	b := p.Masked().Addr().As16()
	b[14], b[15] = byte(n>>8), byte(n)
	return netip.AddrFrom16(b)
}

// prepare sets what links inherit, before there are any.
func (s station) prepare(n *host.Net) error {
	settings := [][2]string{
		{"net/ipv6/conf/all/accept_ra", "0"},
		{"net/ipv6/conf/default/accept_ra", "0"},
		{"net/ipv6/conf/default/autoconf", "0"},
		{"net/ipv6/conf/default/accept_dad", "0"},
		{"net/ipv6/conf/default/dad_transmits", "0"},
		{"net/ipv6/conf/default/addr_gen_mode", "1"}, // no link-local addresses but ours
	}
	if s.role != RoleHost {
		settings = append(settings, [2]string{"net/ipv6/conf/all/forwarding", "1"}) // and of default
	}
	if s.role == RoleNode {
		// What was in a tunnel comes in by an interface that no route leads to.
		settings = append(settings,
			[2]string{"net/ipv4/ip_forward", "1"},
			[2]string{"net/ipv4/conf/all/rp_filter", "0"},
			[2]string{"net/ipv4/conf/default/rp_filter", "0"})
	}
	switch {
	case s.role == RoleRouter:
		settings = append(settings,
			[2]string{"net/ipv6/conf/all/seg6_enabled", "1"},
			[2]string{"net/ipv6/conf/default/seg6_enabled", "1"})
	case s.copier != nil: // frames are not for its kernel
		settings = append(settings, [2]string{"net/ipv6/conf/default/disable_ipv6", "1"})
	case s.role == RoleFunction:
		settings = append(settings,
			[2]string{"net/ipv4/ip_forward", "1"},
			// Packets of both directions come in by one interface and go out by
			// another, or by the same one.
			[2]string{"net/ipv4/conf/all/rp_filter", "0"},
			[2]string{"net/ipv4/conf/default/rp_filter", "0"},
			[2]string{"net/ipv4/conf/all/send_redirects", "0"},
			[2]string{"net/ipv4/conf/default/send_redirects", "0"})
	}
	for _, kv := range settings {
		if err := n.SetSysctl(kv[0], kv[1]); err != nil {
			return err
		}
	}
	return nil
}

// address gives the links their addresses and sets them up.
func (s station) address(n *host.Net) error {
	if err := n.SetUp("lo"); err != nil {
		return err
	}
	if s.loopback.IsValid() {
		if err := n.AddAddress("lo", single(s.loopback)); err != nil {
			return err
		}
	}
	if s.labels.IsValid() {
		if err := n.AddAddress("lo", single(s.labels)); err != nil {
			return err
		}
	}
	for _, i := range s.interfaces {
		if i.noIPv6 {
			if err := n.SetSysctl("net/ipv6/conf/"+i.name+"/disable_ipv6", "1"); err != nil {
				return err
			}
		}
		for _, a := range i.addresses {
			if err := n.AddAddress(i.name, a); err != nil {
				return err
			}
		}
		if err := n.SetUp(i.name); err != nil {
			return err
		}
	}
	return nil
}

// route waits for the links and adds the routes.
func (s station) route(ctx context.Context, n *host.Net) error {
	names := make([]string, len(s.interfaces))
	for i, f := range s.interfaces {
		names[i] = f.name
	}
	if err := n.WaitUp(ctx, names...); err != nil {
		return err
	}
	for _, r := range s.routes {
		if err := n.AddRoute(r); err != nil {
			return err
		}
	}
	for _, r := range s.rules {
		if err := n.AddRule(r); err != nil {
			return err
		}
	}
	return nil
}
