package host

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Operations to keep a namespace of a function, and the links to it: each setting can be read
// before it is set, so that correct settings stay untouched.

// OpenPath returns a handle on the namespace that a file is, such as
// /proc/PID/ns/net. The error is fs.ErrNotExist if there is none.
func OpenPath(path string) (*NetNS, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", permission(err))
	}
	return newNetNS("", f)
}

// SetAlias marks an interface with a text (ifalias).
func (n *Net) SetAlias(link, alias string) error {
	return n.onLink("set the alias of", link, func(l netlink.Link) error { return n.h.LinkSetAlias(l, alias) })
}

// SetHardwareAddress sets the MAC address of an Ethernet device.
func (n *Net) SetHardwareAddress(link string, mac [6]byte) error {
	return n.onLink("set the MAC address of", link, func(l netlink.Link) error {
		return n.h.LinkSetHardwareAddr(l, mac[:])
	})
}

// ArePeers reports whether an interface here and one of another namespace are the two ends of a
// veth pair. A missing interface is no error.
func (n *Net) ArePeers(name string, other *Net, otherName string) (bool, error) {
	a, err := n.link(name)
	if err == nil {
		var b netlink.Link
		if b, err = other.link(otherName); err == nil {
			return n.arePeers(a, other, b)
		}
	}
	if errors.Is(err, ErrNoLink) {
		err = nil
	}
	return false, err
}

func (n *Net) arePeers(a netlink.Link, other *Net, b netlink.Link) (bool, error) {
	if a.Type() != "veth" || b.Type() != "veth" ||
		a.Attrs().ParentIndex != b.Attrs().Index || b.Attrs().ParentIndex != a.Attrs().Index {
		return false, nil
	}
	// Indices are each namespace's own: the peer must be in that namespace, too.
	far, err := other.ns.dup()
	if err != nil {
		return false, err
	}
	defer far.Close()
	id, err := n.h.GetNetNsIdByFd(int(far.file.Fd()))
	if err != nil {
		return false, fmt.Errorf("look up %s in %s: %w", other.ns, n.ns, err)
	}
	if n.ns.inode == other.ns.inode { // then the kernel names none
		return a.Attrs().NetNsID < 0, nil
	}
	return id >= 0 && a.Attrs().NetNsID == id, nil
}

// HasAddress reports whether an interface has an address.
func (n *Net) HasAddress(link string, p netip.Prefix) (has bool, err error) {
	family := netlink.FAMILY_V6
	if p.Addr().Is4() {
		family = netlink.FAMILY_V4
	}
	err = n.onLink("list addresses of", link, func(l netlink.Link) error {
		list, err := dump(func() ([]netlink.Addr, error) { return n.h.AddrList(l, family) })
		has = slices.ContainsFunc(list, func(a netlink.Addr) bool {
			have, ok := prefixOf(a.IPNet)
			return ok && have == p && a.Flags&unix.IFA_F_DADFAILED == 0
		})
		return err
	})
	return has, err
}

// HasNeighbour reports whether there is a permanent neighbour with this MAC address; see
// AddNeighbour.
func (n *Net) HasNeighbour(link string, a netip.Addr, mac [6]byte) (has bool, err error) {
	family := netlink.FAMILY_V6
	if a.Is4() {
		family = netlink.FAMILY_V4
	}
	err = n.onLink("list neighbours of", link, func(l netlink.Link) error {
		list, err := dump(func() ([]netlink.Neigh, error) { return n.h.NeighList(l.Attrs().Index, family) })
		has = slices.ContainsFunc(list, func(have netlink.Neigh) bool {
			ip, ok := netip.AddrFromSlice(have.IP)
			return ok && ip.Unmap() == a && have.State == netlink.NUD_PERMANENT && slices.Equal(have.HardwareAddr, net.HardwareAddr(mac[:]))
		})
		return err
	})
	return has, err
}

// HasRoute reports whether the main table has a route as AddRoute would add it, with one next
// hop and no encapsulation.
func (n *Net) HasRoute(r Route) (bool, error) {
	want, err := n.route(r)
	if err != nil {
		if errors.Is(err, ErrNoLink) {
			return false, nil
		}
		return false, fmt.Errorf("look up route to %s in %s: %w", r.Destination, n.ns, err)
	}
	list, err := n.routesBy(r.Destination.Addr().Is4(), want.LinkIndex)
	return slices.ContainsFunc(list, func(have netlink.Route) bool {
		dst, ok := prefixOf(have.Dst)
		if !ok {
			dst = netip.PrefixFrom(r.Destination.Addr(), 0).Masked()
		}
		via := have.Via == nil && want.Via == nil || have.Via != nil && want.Via != nil && have.Via.String() == want.Via.String()
		return dst == r.Destination && via && have.Gw.Equal(want.Gw) && have.Priority == want.Priority && have.Protocol == want.Protocol &&
			have.Table == want.Table && have.Type == want.Type && have.Encap == nil
	}), err
}

// RoutesLeaveBy reports whether a route of any table, other than routes that the kernel adds for
// addresses, leads out by an interface.
func (n *Net) RoutesLeaveBy(link string, ipv4 bool) (bool, error) {
	l, err := n.link(link)
	if err != nil {
		return false, err
	}
	list, err := n.routesBy(ipv4, l.Attrs().Index)
	return slices.ContainsFunc(list, func(r netlink.Route) bool {
		return r.Type == unix.RTN_UNICAST && r.Protocol != unix.RTPROT_KERNEL
	}), err
}

func (n *Net) routesBy(ipv4 bool, index int) ([]netlink.Route, error) {
	family := netlink.FAMILY_V6
	if ipv4 {
		family = netlink.FAMILY_V4
	}
	filter := &netlink.Route{LinkIndex: index, Table: unix.RT_TABLE_UNSPEC}
	list, err := dump(func() ([]netlink.Route, error) {
		return n.h.RouteListFiltered(family, filter, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes in %s: %w", n.ns, err)
	}
	return list, nil
}

// HasSysctl reports whether a kernel setting has a value. If this kernel lacks the setting, the
// error is fs.ErrNotExist.
func (n *Net) HasSysctl(key, value string) (bool, error) {
	have, err := n.Sysctl(key)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return have == value, err
}

// IsUp reports whether an interface has been set up. Unlike Link.Up it ignores whether the
// interface can carry packets, which needs the other end of a pair.
func (n *Net) IsUp(link string) (up bool, err error) {
	err = n.onLink("look up", link, func(l netlink.Link) error {
		up = l.Attrs().Flags&net.FlagUp != 0
		return nil
	})
	return up, err
}
