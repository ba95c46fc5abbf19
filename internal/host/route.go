package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/model"
)

// Protocol identifies the origin of a route in the kernel's table (rtm_protocol).
type Protocol uint8

const (
	ProtocolStatic Protocol = unix.RTPROT_STATIC
	ProtocolBGP    Protocol = unix.RTPROT_BGP
	// ProtocolWaystamp marks waystamp's routes, which it may remove. A routing daemon can
	// redistribute them by it.
	ProtocolWaystamp Protocol = 119
)

// RouteType is the kernel's action for packets that match a route.
type RouteType uint8

const (
	RouteUnicast   RouteType = iota // forwarded
	RouteProhibit                   // drop, with an ICMPv6 error (1/1)
	RouteBlackhole                  // dropped without a word
	RouteEnd                        // the kernel's own SRv6 End (seg6local)
	RouteEncap                      // the kernel's own H.Encaps, with Segments
	RouteLocal                      // delivered here, as to an own address
)

// Route is a route of the main table, or of another one for experiments.
type Route struct {
	Destination netip.Prefix
	Type        RouteType
	Via         netip.Addr   // zero: the destination is on the link; of IPv6 also for a destination of IPv4
	Device      string       // needed except for Prohibit and Blackhole
	Source      netip.Addr   // preferred source; zero: the kernel's choice
	Segments    []netip.Addr // of RouteEncap, in the order of the visit
	Reduced     bool         // of RouteEncap: H.Encaps.Red; one segment then needs no SRH
	Compressed  bool         // of RouteEnd: of the flavour NEXT-C-SID, as in waystamp's blocks
	Protocol    Protocol     // 0: ProtocolStatic
	Metric      int          // smaller wins; 0: the kernel's default, 1024 for IPv6
	Table       int          // 0: the main one
}

// AddRoute adds a route. The error is fs.ErrExist if there is one to the same
// destination with the same metric.
func (n *Net) AddRoute(r Route) error { return n.changeRoute("add", r, n.h.RouteAdd) }

// ReplaceRoute adds a route in the place of any other to the same destination
// with the same metric.
func (n *Net) ReplaceRoute(r Route) error { return n.changeRoute("replace", r, n.h.RouteReplace) }

// DeleteRoute removes a route. The error is unix.ESRCH if there is none.
func (n *Net) DeleteRoute(r Route) error { return n.changeRoute("delete", r, n.h.RouteDel) }

func (n *Net) changeRoute(verb string, r Route, f func(*netlink.Route) error) error {
	nr, err := n.route(r)
	if err == nil {
		err = permission(f(nr))
	}
	if err != nil {
		return fmt.Errorf("%s route to %s in %s: %w", verb, r.Destination, n.ns, err)
	}
	return nil
}

func (n *Net) route(r Route) (*netlink.Route, error) {
	if !r.Destination.IsValid() || r.Destination != r.Destination.Masked() {
		return nil, fmt.Errorf("%s is not a prefix", r.Destination)
	}
	out := &netlink.Route{
		Dst:      ipNet(r.Destination),
		Table:    unix.RT_TABLE_MAIN,
		Type:     unix.RTN_UNICAST,
		Protocol: netlink.RouteProtocol(r.Protocol),
		Priority: r.Metric,
	}
	if r.Table != 0 {
		out.Table = r.Table
	}
	if r.Protocol == 0 {
		out.Protocol = netlink.RouteProtocol(ProtocolStatic)
	}
	switch {
	case !r.Via.IsValid():
	case r.Via.Is6() && r.Destination.Addr().Is4(): // RFC 8950
		out.Via = &netlink.Via{AddrFamily: unix.AF_INET6, Addr: r.Via.AsSlice()}
	default:
		out.Gw = r.Via.AsSlice()
	}
	if r.Source.IsValid() {
		out.Src = r.Source.AsSlice()
	}
	if r.Device != "" {
		l, err := n.link(r.Device)
		if err != nil {
			return nil, err
		}
		out.LinkIndex = l.Attrs().Index
	}
	switch r.Type {
	case RouteUnicast:
		if r.Destination.Addr().Is4() && !r.Via.IsValid() {
			out.Scope = unix.RT_SCOPE_LINK // otherwise it cannot lead to gateways
		}
	case RouteProhibit:
		out.Type = unix.RTN_PROHIBIT
	case RouteBlackhole:
		out.Type = unix.RTN_BLACKHOLE
	case RouteLocal:
		out.Type = unix.RTN_LOCAL
		if r.Destination.Addr().Is4() {
			out.Scope = unix.RT_SCOPE_HOST
		}
	case RouteEnd:
		end := &netlink.SEG6LocalEncap{Action: nl.SEG6_LOCAL_ACTION_END}
		end.Flags[nl.SEG6_LOCAL_ACTION] = true
		out.Encap = end
		if r.Compressed {
			out.Encap = nextCSID{end}
		}
	case RouteEncap:
		if len(r.Segments) == 0 {
			return nil, errors.New("an encapsulating route needs segments")
		}
		// The kernel takes them as they will be in the header: last one first.
		encap := &netlink.SEG6Encap{Mode: nl.SEG6_IPTUN_MODE_ENCAP}
		if r.Reduced {
			encap.Mode = seg6EncapReduced
		}
		for i := len(r.Segments) - 1; i >= 0; i-- {
			encap.Segments = append(encap.Segments, net.IP(r.Segments[i].AsSlice()))
		}
		out.Encap = encap
	default:
		return nil, fmt.Errorf("route type %d is not known", r.Type)
	}
	return out, nil
}

// Routes returns the IPv6 routes of the main table with this protocol. Of routes that waystamp
// never makes (several next hops, other encapsulations) it returns only destination, protocol
// and metric.
func (n *Net) Routes(protocol Protocol) ([]Route, error) {
	return n.routes(&netlink.Route{Table: unix.RT_TABLE_MAIN, Protocol: netlink.RouteProtocol(protocol)}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
}

func (n *Net) routes(filter *netlink.Route, by uint64) ([]Route, error) {
	list, err := dump(func() ([]netlink.Route, error) { return n.h.RouteListFiltered(netlink.FAMILY_V6, filter, by) })
	if err != nil {
		return nil, fmt.Errorf("list routes in %s: %w", n.ns, err)
	}
	links, err := n.Links()
	if err != nil {
		return nil, err
	}
	names := make(map[int]string, len(links))
	for _, l := range links {
		names[l.Index] = l.Name
	}
	out := make([]Route, 0, len(list))
	for _, r := range list {
		dst, ok := prefixOf(r.Dst)
		if !ok {
			dst = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		route := Route{
			Destination: dst,
			Device:      names[r.LinkIndex],
			Protocol:    Protocol(r.Protocol),
			Metric:      r.Priority,
		}
		route.Via, _ = netip.AddrFromSlice(r.Gw)
		route.Source, _ = netip.AddrFromSlice(r.Src)
		switch r.Type {
		case unix.RTN_PROHIBIT:
			route.Type = RouteProhibit
		case unix.RTN_BLACKHOLE:
			route.Type = RouteBlackhole
		}
		switch e := r.Encap.(type) {
		case *netlink.SEG6LocalEncap:
			if e.Action == nl.SEG6_LOCAL_ACTION_END {
				route.Type = RouteEnd
			}
		case *netlink.SEG6Encap:
			route.Type = RouteEncap
			for i := len(e.Segments) - 1; i >= 0; i-- {
				a, _ := netip.AddrFromSlice(e.Segments[i])
				route.Segments = append(route.Segments, a)
			}
		}
		out = append(out, route)
	}
	return out, nil
}

// locatorMetric makes our route win over another one to the very same prefix.
const locatorMetric = 1

func locatorRoute(prefix netip.Prefix) Route {
	return Route{
		Destination: prefix,
		Type:        RouteProhibit,
		Protocol:    ProtocolWaystamp,
		Metric:      locatorMetric,
	}
}

// AnnounceLocator puts a node's locator into the kernel's table as a route that
// refuses: routing daemons can redistribute it, and a packet to a SID that no
// program took is never forwarded unstamped. Announcing it again changes
// nothing.
func (n *Net) AnnounceLocator(prefix netip.Prefix) error {
	have, err := n.Locators()
	if err != nil {
		return err
	}
	for _, p := range have {
		if p == prefix {
			return nil
		}
	}
	return n.AddRoute(locatorRoute(prefix))
}

// WithdrawLocator removes the route of AnnounceLocator, and no other route. A missing route is
// no error.
func (n *Net) WithdrawLocator(prefix netip.Prefix) error {
	err := n.DeleteRoute(locatorRoute(prefix))
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// Locators returns the announced locators, by waystamp's mark.
func (n *Net) Locators() ([]netip.Prefix, error) {
	routes, err := n.Routes(ProtocolWaystamp)
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, r := range routes {
		if r.Type == RouteProhibit && r.Metric == locatorMetric {
			out = append(out, r.Destination)
		}
	}
	return out, nil
}

func sidRoute(sid netip.Prefix) Route {
	return Route{Destination: sid, Type: RouteProhibit, Protocol: ProtocolWaystamp, Metric: model.SIDMetric}
}

// AnnounceSID puts a SID into the kernel's table, as AnnounceLocator does a locator. The
// error is fs.ErrExist if there is a route to the same prefix with the same metric.
func (n *Net) AnnounceSID(sid netip.Prefix) error { return n.AddRoute(sidRoute(sid)) }

// WithdrawSID removes the route of AnnounceSID, and no other route. A missing route is no error.
func (n *Net) WithdrawSID(sid netip.Prefix) error {
	err := n.DeleteRoute(sidRoute(sid))
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// SIDs returns the /64s within a locator that have routes in the main table: the routes of
// AnnounceSID, by their mark, and other routes.
func (n *Net) SIDs(locator netip.Prefix) (announced []netip.Prefix, others []Route, err error) {
	all, err := n.routes(&netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, nil, err
	}
	for _, r := range all {
		switch mark := sidRoute(r.Destination); {
		case r.Destination.Bits() != 64 || !locator.Contains(r.Destination.Addr()):
		case r.Type == mark.Type && r.Protocol == mark.Protocol && r.Metric == mark.Metric:
			announced = append(announced, r.Destination)
		case r.Protocol == mark.Protocol && r.Metric == locatorMetric: // a locator of 64 bits
		default:
			others = append(others, r)
		}
	}
	return announced, others, nil
}
