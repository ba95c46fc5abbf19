package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Neighbour is an address on the link of a device.
type Neighbour struct {
	Device  string
	Address netip.Addr
}

func (n Neighbour) compare(o Neighbour) int {
	return cmp.Or(cmp.Compare(n.Device, o.Device), n.Address.Compare(o.Address))
}

// ErrNoWay is that no route leads to an address, or one that refuses.
var ErrNoWay = errors.New("no route leads there")

// Way is a next hop of a route.
type Way struct {
	Neighbour
	Pushes bool // the route puts MPLS labels on packets, as those of segment routing daemons do
}

// NextHops are the neighbours that packets to an address may be sent to, of all equally good routes.
// There are none for an address of the namespace itself.
func (n *Net) NextHops(to netip.Addr) ([]Neighbour, error) {
	ways, err := n.Ways(to)
	var out []Neighbour
	for _, w := range ways {
		if !slices.Contains(out, w.Neighbour) {
			out = append(out, w.Neighbour)
		}
	}
	return out, err
}

// Ways are the next hops of all equally good routes to an address, sorted. There are none for an
// address of the namespace itself.
func (n *Net) Ways(to netip.Addr) ([]Way, error) {
	list, err := n.h.RouteGetWithOptions(net.IP(to.AsSlice()), &netlink.RouteGetOptions{FIBMatch: true})
	for _, none := range []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.ESRCH} {
		if errors.Is(err, none) {
			err = ErrNoWay
		}
	}
	if err != nil {
		return nil, fmt.Errorf("find the next hops to %s in %s: %w", to, n.ns, permission(err))
	}
	var out []Way
	add := func(link int, gw net.IP, via netlink.Destination, encap netlink.Encap) error {
		l, err := n.h.LinkByIndex(link)
		if err != nil {
			return fmt.Errorf("find the device of the next hop to %s in %s: %w", to, n.ns, err)
		}
		_, pushes := encap.(*netlink.MPLSEncap)
		hop := Way{Neighbour{Device: l.Attrs().Name, Address: to}, pushes}
		if a, ok := netip.AddrFromSlice(gw); ok {
			hop.Address = a.Unmap()
		}
		if v, ok := via.(*netlink.Via); ok {
			if a, ok := netip.AddrFromSlice(v.Addr); ok {
				hop.Address = a
			}
		}
		out = append(out, hop)
		return nil
	}
	for _, r := range list {
		switch {
		case r.Type == unix.RTN_LOCAL:
		case r.Type != unix.RTN_UNICAST:
			return nil, fmt.Errorf("find the next hops to %s in %s: %w", to, n.ns, ErrNoWay)
		case len(r.MultiPath) > 0:
			for _, p := range r.MultiPath {
				if err := add(p.LinkIndex, p.Gw, p.Via, p.Encap); err != nil {
					return nil, err
				}
			}
		default:
			if err := add(r.LinkIndex, r.Gw, r.Via, r.Encap); err != nil {
				return nil, err
			}
		}
	}
	slices.SortFunc(out, func(a, b Way) int { return a.compare(b.Neighbour) })
	return slices.Compact(out), nil
}

// ManageNeighbours makes the kernel keep the link-layer addresses of these neighbours, although
// it sends nothing to them itself (NTF_EXT_MANAGED), and ends this for neighbours of earlier
// calls. The entries carry waystamp's mark; entries of other programs stay. After an error it
// has done as much as possible.
func (n *Net) ManageNeighbours(want []Neighbour) (added, removed int, err error) {
	have, static, err := n.neighbours()
	if err != nil {
		return 0, 0, err
	}
	var errs []error
	for _, w := range want {
		// An entry that another program has set needs no resolving, and would lose its address.
		if slices.Contains(have, w) || slices.Contains(static, w) {
			continue
		}
		if err := n.changeNeighbour("keep", unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, w); err != nil {
			errs = append(errs, err)
			continue
		}
		added++
	}
	for _, h := range have {
		if slices.Contains(want, h) {
			continue
		}
		if err := n.changeNeighbour("let go", unix.RTM_DELNEIGH, 0, h); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
			continue
		}
		removed++
	}
	return added, removed, errors.Join(errs...)
}

// ManagedNeighbours are the entries of ManageNeighbours, by their mark.
func (n *Net) ManagedNeighbours() ([]Neighbour, error) {
	managed, _, err := n.neighbours()
	return managed, err
}

// neighbours are the entries of ManagedNeighbours, and permanent entries of other programs
// (NUD_PERMANENT, NUD_NOARP).
func (n *Net) neighbours() (out, static []Neighbour, err error) {
	links, err := n.Links()
	if err != nil {
		return nil, nil, err
	}
	names := make(map[uint32]string, len(links))
	for _, l := range links {
		names[uint32(l.Index)] = l.Name
	}
	var msgs [][]byte
	err = n.ns.Do(func() error {
		var err error
		msgs, err = dump(func() ([][]byte, error) {
			req := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, unix.NLM_F_DUMP)
			req.AddData(&netlink.Ndmsg{})
			return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
		})
		return err
	})
	for _, m := range msgs {
		const header = 12 // struct ndmsg
		if len(m) < header {
			continue
		}
		attrs, bad := nl.ParseRouteAttr(m[header:])
		if bad != nil {
			err = errors.Join(err, bad)
			continue
		}
		one := Neighbour{Device: names[nl.NativeEndian().Uint32(m[4:])]}
		ours, managed := false, false
		for _, a := range attrs {
			switch a.Attr.Type {
			case netlink.NDA_DST:
				one.Address, _ = netip.AddrFromSlice(a.Value)
			case netlink.NDA_PROTOCOL:
				ours = len(a.Value) > 0 && Protocol(a.Value[0]) == ProtocolWaystamp
			case netlink.NDA_FLAGS_EXT:
				managed = len(a.Value) >= 4 && nl.NativeEndian().Uint32(a.Value)&netlink.NTF_EXT_MANAGED != 0
			}
		}
		switch state := nl.NativeEndian().Uint16(m[8:]); {
		case one.Device == "":
		case ours && managed:
			out = append(out, one)
		case state&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0:
			static = append(static, one)
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("list neighbours in %s: %w", n.ns, permission(err))
	}
	slices.SortFunc(out, Neighbour.compare)
	return out, static, nil
}

func (n *Net) changeNeighbour(verb string, message, flags int, w Neighbour) error {
	l, err := n.link(w.Device)
	if err == nil {
		family := unix.AF_INET6
		if w.Address.Is4() {
			family = unix.AF_INET
		}
		err = n.ns.Do(func() error {
			req := nl.NewNetlinkRequest(message, flags|unix.NLM_F_ACK)
			req.AddData(&netlink.Ndmsg{Family: uint8(family), Index: uint32(l.Attrs().Index)})
			req.AddData(nl.NewRtAttr(netlink.NDA_DST, w.Address.AsSlice()))
			req.AddData(nl.NewRtAttr(netlink.NDA_PROTOCOL, []byte{byte(ProtocolWaystamp)}))
			if message == unix.RTM_NEWNEIGH {
				req.AddData(nl.NewRtAttr(netlink.NDA_FLAGS_EXT, nl.Uint32Attr(netlink.NTF_EXT_MANAGED)))
			}
			_, err := req.Execute(unix.NETLINK_ROUTE, 0)
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("%s neighbour %s on %s in %s: %w", verb, w.Address, w.Device, n.ns, permission(err))
	}
	return nil
}

// Resolves asks for the link-layer address of a neighbour, by sending a datagram to its discard port, and tells whether
// one is known before ctx ends. An address that was known before may be that of a neighbour that has gone since.
func (n *Net) Resolves(ctx context.Context, w Neighbour) (bool, error) {
	fail := func(err error) (bool, error) {
		return false, fmt.Errorf("ask for the link-layer address of %s on %s in %s: %w", w.Address, w.Device, n.ns, permission(err))
	}
	l, err := n.link(w.Device)
	if err != nil {
		return fail(err)
	}
	sub, err := n.ns.subscribe(unix.RTNLGRP_NEIGH)
	if err != nil {
		return false, err
	}
	defer sub.close()
	const resolved = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT | netlink.NUD_NOARP
	for asked := false; ; asked = true {
		list, err := dump(func() ([]netlink.Neigh, error) { return n.h.NeighList(l.Attrs().Index, netlink.FAMILY_ALL) })
		if err != nil {
			return fail(err)
		}
		i := slices.IndexFunc(list, func(e netlink.Neigh) bool {
			a, _ := netip.AddrFromSlice(e.IP)
			return a.Unmap() == w.Address && e.Flags&netlink.NTF_PROXY == 0
		})
		switch {
		case i >= 0 && list[i].State&resolved != 0:
			return true, nil
		case asked && i >= 0 && list[i].State&netlink.NUD_FAILED != 0:
			return false, nil
		}
		if !asked {
			if err := n.sendDiscarded(l.Attrs().Index, w); err != nil {
				return fail(err)
			}
			continue
		}
		if err := sub.wait(ctx); ctx.Err() != nil {
			return false, nil
		} else if err != nil {
			return fail(err)
		}
	}
}

// sendDiscarded sends a datagram out by a device, to the port whose datagrams are discarded (RFC 863).
func (n *Net) sendDiscarded(index int, w Neighbour) error {
	family := unix.AF_INET6
	var to unix.Sockaddr
	if w.Address.Is4() {
		family, to = unix.AF_INET, &unix.SockaddrInet4{Port: 9, Addr: w.Address.As4()}
	} else {
		to = &unix.SockaddrInet6{Port: 9, Addr: w.Address.As16(), ZoneId: uint32(index)}
	}
	return n.ns.Do(func() error {
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.BindToDevice(fd, w.Device); err != nil {
			return err
		}
		return unix.Sendto(fd, []byte{0}, 0, to)
	})
}
