package host

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ErrNoLink means that an interface does not exist.
var ErrNoLink = errors.New("there is no such interface")

// NameMax is the length of the longest name of an interface, in bytes.
const NameMax = unix.IFNAMSIZ - 1

// Link is a network interface as it is now.
type Link struct {
	Name   string
	Index  int
	Kind   string // "veth", "vlan" …; "device" for hardware
	Frame  string // what its frames begin with: "ether", "none" …
	MTU    int    // bytes of an IP packet
	Up     bool   // set up, and able to carry packets
	MAC    [6]byte
	Alias  string // text of its creator (ifalias); "": none
	VLAN   VLAN   // zero: the link is no VLAN
	Master int    // index of the bridge, bond, VRF … that the link belongs to; 0: none
	XDP    uint32 // id of the program at XDP, in the driver or generic; 0: none
	// The longest super-packet that the kernel merges from frames that arrive, or gives to the device, in bytes
	// (gro_max_size, gso_max_size, and those of IPv4); 0: it does not say.
	SuperMax uint32
	// PeerNamespace is what this namespace calls the one that the other end is in (of a veth
	// pair), counted from 1; 0: this one, or there is no other end.
	PeerNamespace int
	// Peer is the index of the other end of a veth pair, in its own namespace; 0: it has none.
	Peer int
}

// VLAN describes a VLAN interface.
type VLAN struct {
	Parent   int    // index of the interface that carries its frames
	ID       uint16 // 1 to 4094
	Provider bool   // tags of IEEE 802.1ad, otherwise of 802.1Q
}

// Device is a link, and whether the kernel cuts super-packets before they reach it.
type Device struct {
	Link
	Cuts bool
}

// Device looks up a link with the fields for the data path. The error is exactly ErrNoLink if
// there is none of that name.
func (n *Net) Device(name string) (Device, error) {
	l, err := n.Link(name)
	if errors.Is(err, ErrNoLink) {
		return Device{}, ErrNoLink
	}
	if err != nil {
		return Device{}, err
	}
	cuts, err := n.CutsOnSend(name)
	if err != nil {
		cuts = false // then a cutter does it
	}
	return Device{l, cuts}, nil
}

// Veth is a pair of virtual Ethernet devices to be made.
type Veth struct {
	Name     string
	PeerName string
	Peer     *NetNS // where the other end goes; nil: the same namespace
	MTU      int    // of both ends; 0: the kernel's 1500
	Queues   int    // of both ends, for sending and receiving; 0: the kernel's choice

	MAC, PeerMAC [6]byte // zero: the kernel's choice, which device managers may change
}

// AddVeth makes a pair, both ends down and each in its namespace from the
// start.
func (n *Net) AddVeth(v Veth) error {
	for _, name := range []string{v.Name, v.PeerName} {
		if name == "" || len(name) > NameMax {
			return fmt.Errorf("make veth %s in %s: %q is not 1 to %d bytes", v.Name, n.ns, name, NameMax)
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = v.Name
	attrs.MTU = v.MTU
	attrs.NumTxQueues, attrs.NumRxQueues = v.Queues, v.Queues
	link := netlink.NewVeth(attrs)
	link.PeerNumTxQueues, link.PeerNumRxQueues = uint32(v.Queues), uint32(v.Queues)
	link.PeerName = v.PeerName
	if v.MAC != [6]byte{} {
		link.HardwareAddr = v.MAC[:]
	}
	if v.PeerMAC != [6]byte{} {
		link.PeerHardwareAddr = v.PeerMAC[:]
	}
	if v.Peer != nil {
		peer, err := v.Peer.dup()
		if err != nil {
			return fmt.Errorf("make veth %s in %s: %w", v.Name, n.ns, err)
		}
		defer peer.Close()
		link.PeerNamespace = netlink.NsFd(peer.file.Fd())
	}
	if err := n.h.LinkAdd(link); err != nil {
		return fmt.Errorf("make veth %s and %s in %s: %w", v.Name, v.PeerName, n.ns, permission(err))
	}
	return nil
}

// AddPassthru makes an interface in another namespace that has all frames of one here (a macvlan
// in mode passthru): what comes in by the one here comes in by the other, and the IP stack of this
// namespace gets multicast and broadcast frames alone. Packet sockets here see all frames. It ends with its
// namespace, or with the one here, which stays in the first case.
func (n *Net) AddPassthru(link, name string, to *NetNS) error {
	return n.onLink("take over the frames of", link, func(l netlink.Link) error {
		far, err := to.dup()
		if err != nil {
			return err
		}
		defer far.Close()
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.Namespace = name, l.Attrs().Index, netlink.NsFd(far.file.Fd())
		return n.h.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PASSTHRU})
	})
}

// Link returns an interface; the error is ErrNoLink if there is none.
func (n *Net) Link(name string) (Link, error) {
	l, err := n.link(name)
	if err != nil {
		return Link{}, err
	}
	return linkOf(l), nil
}

// LinkAt returns the interface with an index; the error is ErrNoLink if there is none.
func (n *Net) LinkAt(index int) (Link, error) {
	l, err := n.h.LinkByIndex(index)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return Link{}, fmt.Errorf("interface %d in %s: %w", index, n.ns, ErrNoLink)
	}
	if err != nil {
		return Link{}, fmt.Errorf("look up interface %d in %s: %w", index, n.ns, err)
	}
	return linkOf(l), nil
}

// Links returns all interfaces, ordered by index.
func (n *Net) Links() ([]Link, error) {
	list, err := dump(n.h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces in %s: %w", n.ns, err)
	}
	out := make([]Link, len(list))
	for i, l := range list {
		out[i] = linkOf(l)
	}
	return out, nil
}

// DeleteLink removes an interface; of a veth pair both ends.
func (n *Net) DeleteLink(name string) error {
	return n.onLink("delete", name, n.h.LinkDel)
}

// SetUp switches an interface on.
func (n *Net) SetUp(name string) error { return n.onLink("set up", name, n.h.LinkSetUp) }

// SetDown switches an interface off.
func (n *Net) SetDown(name string) error { return n.onLink("set down", name, n.h.LinkSetDown) }

// SetMTU sets how many bytes an IP packet may have on an interface.
func (n *Net) SetMTU(name string, mtu int) error {
	return n.onLink("set the MTU of", name, func(l netlink.Link) error { return n.h.LinkSetMTU(l, mtu) })
}

// SetSuperPacketMax bounds how many frames a super-packet has that is sent by an interface.
func (n *Net) SetSuperPacketMax(name string, frames int) error {
	return n.onLink("set the super-packets of", name, func(l netlink.Link) error { return n.h.LinkSetGSOMaxSegs(l, frames) })
}

// AddAddress adds an address to an interface, without duplicate address detection. The namespace
// can use it at once; see WaitUp for its neighbours.
func (n *Net) AddAddress(link string, p netip.Prefix) error {
	return n.onLink("add address "+p.String()+" to", link, func(l netlink.Link) error {
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		return n.h.AddrAdd(l, a)
	})
}

// HasIPv4 tells whether an interface has an address of IPv4.
func (n *Net) HasIPv4(link string) (has bool, err error) {
	err = n.onLink("list addresses of", link, func(l netlink.Link) error {
		all, err := dump(func() ([]netlink.Addr, error) { return n.h.AddrList(l, netlink.FAMILY_V4) })
		has = len(all) > 0
		return err
	})
	return has, err
}

// DeleteAddress takes an address away.
func (n *Net) DeleteAddress(link string, p netip.Prefix) error {
	return n.onLink("delete address "+p.String()+" of", link, func(l netlink.Link) error {
		return n.h.AddrDel(l, &netlink.Addr{IPNet: ipNet(p)})
	})
}

// WaitUp waits until all interfaces named are up: able to carry packets, not
// only set up, and with neighbours able to find each of their IPv6 addresses. It
// ends with ErrNoLink if one is not there.
func (n *Net) WaitUp(ctx context.Context, names ...string) error {
	sub, err := n.ns.subscribe(unix.RTNLGRP_LINK, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return err
	}
	defer sub.close()
	for {
		missing, err := n.notUp(names)
		if err != nil || missing == "" {
			return err
		}
		if err := sub.wait(ctx); err != nil {
			return fmt.Errorf("wait for %s in %s to come up: %w", missing, n.ns, err)
		}
	}
}

// notUp returns the first of the interfaces that is not up yet, or "".
func (n *Net) notUp(names []string) (string, error) {
	var groups map[group]bool
	for _, name := range names {
		l, err := n.link(name)
		if err != nil {
			return "", err
		}
		if !linkOf(l).Up {
			return name, nil
		}
		a := l.Attrs()
		if a.RawFlags&(unix.IFF_LOOPBACK|unix.IFF_NOARP) != 0 {
			continue // has no neighbours
		}
		if groups == nil {
			if groups, err = n.groups(); err != nil {
				return "", err
			}
		}
		addrs, err := dump(func() ([]netlink.Addr, error) { return n.h.AddrList(l, netlink.FAMILY_V6) })
		if err != nil {
			return "", fmt.Errorf("list addresses of %s in %s: %w", name, n.ns, err)
		}
		for _, addr := range addrs {
			if ip, ok := netip.AddrFromSlice(addr.IP); ok && !groups[group{a.Index, solicitedNode(ip)}] {
				return name, nil
			}
		}
	}
	return "", nil
}

// group is a multicast group that an interface has joined.
type group struct {
	index int
	addr  netip.Addr
}

// groups lists the groups that the namespace's interfaces have joined. The kernel joins an
// address's solicited-node group some time after it has added the address, and then reports the
// address again (RTM_NEWADDR).
func (n *Net) groups() (map[group]bool, error) {
	var b []byte
	err := n.ns.Do(func() error {
		var err error
		b, err = os.ReadFile("/proc/thread-self/net/igmp6")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list multicast groups in %s: %w", n.ns, err)
	}
	out := map[group]bool{}
	for line := range strings.Lines(string(b)) {
		var index int
		var name, digits string
		if _, err := fmt.Sscan(line, &index, &name, &digits); err != nil {
			return nil, fmt.Errorf("list multicast groups in %s: %q is not understood: %w", n.ns, line, err)
		}
		b, err := hex.DecodeString(digits)
		addr, ok := netip.AddrFromSlice(b)
		if err != nil || !ok {
			return nil, fmt.Errorf("list multicast groups in %s: %q is not understood", n.ns, line)
		}
		out[group{index, addr}] = true
	}
	return out, nil
}

// solicitedNode is the group for neighbour solicitations of an address (RFC 4291 section 2.7.1).
func solicitedNode(a netip.Addr) netip.Addr {
	b := a.As16()
	return netip.AddrFrom16([16]byte{0xff, 2, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]})
}

func (n *Net) onLink(verb, name string, f func(netlink.Link) error) error {
	l, err := n.link(name)
	if err != nil {
		return fmt.Errorf("%s %s: %w", verb, name, err)
	}
	if err := f(l); err != nil {
		return fmt.Errorf("%s %s in %s: %w", verb, name, n.ns, permission(err))
	}
	return nil
}

func (n *Net) link(name string) (netlink.Link, error) {
	l, err := n.h.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, fmt.Errorf("interface %s in %s: %w", name, n.ns, ErrNoLink)
	}
	if err != nil {
		return nil, fmt.Errorf("look up interface %s in %s: %w", name, n.ns, err)
	}
	return l, nil
}

func linkOf(l netlink.Link) Link {
	a := l.Attrs()
	up := a.OperState == netlink.OperUp
	if a.OperState == netlink.OperUnknown { // loopback, and drivers without an operational state
		up = a.Flags&net.FlagUp != 0 && a.RawFlags&unix.IFF_LOWER_UP != 0
	}
	out := Link{Name: a.Name, Index: a.Index, Kind: l.Type(), Frame: a.EncapType, MTU: a.MTU, Up: up, Alias: a.Alias, PeerNamespace: a.NetNsID + 1}
	copy(out.MAC[:], a.HardwareAddr)
	if out.Kind == "veth" {
		out.Peer = a.ParentIndex
	}
	out.Master, out.SuperMax = a.MasterIndex, max(a.GROMaxSize, a.GSOMaxSize, a.GROIPv4MaxSize, a.GSOIPv4MaxSize)
	if a.Xdp != nil && a.Xdp.Attached {
		out.XDP = a.Xdp.ProgId
	}
	if v, ok := l.(*netlink.Vlan); ok {
		out.VLAN = VLAN{Parent: a.ParentIndex, ID: uint16(v.VlanId), Provider: v.VlanProtocol == netlink.VLAN_PROTOCOL_8021AD}
	}
	return out
}

// dump repeats a listing that the kernel could not give in one piece because
// something changed meanwhile.
func dump[T any](list func() ([]T, error)) ([]T, error) {
	for try := 0; ; try++ {
		out, err := list()
		if err == nil || try == 9 || !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
}
