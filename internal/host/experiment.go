package host

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Additional functions for experiments: the kernel's own SRv6 at its best, permanent neighbours,
// links of a given speed.

// HardwareAddress returns the MAC address of an Ethernet device.
func (n *Net) HardwareAddress(link string) (mac [6]byte, err error) {
	err = n.onLink("read the address of", link, func(l netlink.Link) error {
		if copy(mac[:], l.Attrs().HardwareAddr) != len(mac) {
			return fmt.Errorf("it is no Ethernet device")
		}
		return nil
	})
	return mac, err
}

// Received is how many packets have come in by a device.
func (n *Net) Received(link string) (packets uint64, err error) {
	err = n.onLink("read the counters of", link, func(l netlink.Link) error {
		s := l.Attrs().Statistics
		if s == nil {
			return errors.New("the kernel has none")
		}
		packets = s.RxPackets
		return nil
	})
	return packets, err
}

// AddBridge makes a bridge with these ports, all of which forward from then on. DeleteLink
// releases them.
func (n *Net) AddBridge(name string, ports ...string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := n.h.LinkAdd(bridge); err != nil {
		return fmt.Errorf("make bridge %s in %s: %w", name, n.ns, err)
	}
	for _, p := range ports {
		if err := n.onLink("put into bridge "+name, p, func(l netlink.Link) error { return n.h.LinkSetMaster(l, bridge) }); err != nil {
			return errors.Join(err, n.DeleteLink(name))
		}
	}
	return n.SetUp(name)
}

// SetIndex makes the kernel give all packets that leave by a link an index
// (skb->tc_index): the class of a filter at its egress that has no action.
func (n *Net) SetIndex(link string, index uint16) error {
	return n.onLink("set the index of packets that leave by", link, func(l netlink.Link) error {
		if err := n.ensureClsact(l.Attrs().Index); err != nil {
			return err
		}
		return n.h.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1, Protocol: unix.ETH_P_ALL},
			ClassId:     netlink.MakeHandle(1, index),
		})
	})
}

// UnsetIndex removes the filter of SetIndex, and all else at the link's clsact.
func (n *Net) UnsetIndex(link string) error {
	return n.onLink("leave alone the index of packets that leave by", link, func(l netlink.Link) error {
		return n.h.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		}})
	})
}

// AddNeighbour adds a permanent neighbour: the kernel never resolves it.
func (n *Net) AddNeighbour(link string, a netip.Addr, mac [6]byte) error {
	family := unix.AF_INET6
	if a.Is4() {
		family = unix.AF_INET
	}
	return n.onLink("add neighbour "+a.String()+" to", link, func(l netlink.Link) error {
		return n.h.NeighSet(&netlink.Neigh{
			LinkIndex: l.Attrs().Index, Family: family, State: netlink.NUD_PERMANENT,
			IP: a.AsSlice(), HardwareAddr: mac[:],
		})
	})
}

// AddKernelEgress adds a route to a SID at which the kernel's own SRv6 takes the
// outer header off and looks the inner destination up in a table, 0 for the main
// one (End.DT6, RFC 8986 4.6).
func (n *Net) AddKernelEgress(sid netip.Prefix, link string, table int) error {
	return n.onLink("add End.DT6 on", link, func(l netlink.Link) error {
		e := &netlink.SEG6LocalEncap{Action: nl.SEG6_LOCAL_ACTION_END_DT6, Table: cmp.Or(table, unix.RT_TABLE_MAIN)}
		e.Flags[nl.SEG6_LOCAL_ACTION] = true
		e.Flags[nl.SEG6_LOCAL_TABLE] = true
		return n.h.RouteAdd(&netlink.Route{
			Dst: ipNet(sid), LinkIndex: l.Attrs().Index, Table: unix.RT_TABLE_MAIN,
			Protocol: netlink.RouteProtocol(ProtocolStatic), Encap: e,
		})
	})
}

// AddKernelEgress4 adds a route to a SID at which the kernel's own SRv6 takes the
// outer header off a packet of IPv4 and sends it to a next hop on a link
// (End.DX4, RFC 8986 4.5). A look-up in a table of IPv4 (End.DT4) would need VRF
// devices.
func (n *Net) AddKernelEgress4(sid netip.Prefix, link string, next netip.Addr) error {
	return n.onLink("add End.DX4 on", link, func(l netlink.Link) error {
		e := &netlink.SEG6LocalEncap{Action: nl.SEG6_LOCAL_ACTION_END_DX4, InAddr: next.AsSlice()}
		e.Flags[nl.SEG6_LOCAL_ACTION] = true
		e.Flags[nl.SEG6_LOCAL_NH4] = true
		return n.h.RouteAdd(&netlink.Route{
			Dst: ipNet(sid), LinkIndex: l.Attrs().Index, Table: unix.RT_TABLE_MAIN,
			Protocol: netlink.RouteProtocol(ProtocolStatic), Encap: e,
		})
	})
}

// Constants of <linux/seg6_iptunnel.h> and <linux/seg6_local.h> that the library lacks.
const (
	seg6EncapReduced     = 3 // SEG6_IPTUN_MODE_ENCAP_RED
	seg6LocalFlavors     = 11
	seg6FlavorOperation  = 1
	seg6FlavorBlockBits  = 2
	seg6FlavorNodeBits   = 3
	seg6FlavorOpNextCSID = 4
)

// Lengths of waystamp's SIDs as the kernel expects them, in bits.
const (
	csidBlockBits = 48
	csidNodeBits  = 16
)

// nextCSID is End of the flavour NEXT-C-SID (RFC 9800 section 4.1).
type nextCSID struct{ *netlink.SEG6LocalEncap }

func (e nextCSID) Encode() ([]byte, error) {
	b, err := e.SEG6LocalEncap.Encode()
	flavors := nl.NewRtAttr(seg6LocalFlavors|unix.NLA_F_NESTED, nil)
	flavors.AddRtAttr(seg6FlavorOperation, nl.Uint32Attr(1<<seg6FlavorOpNextCSID))
	flavors.AddRtAttr(seg6FlavorBlockBits, []byte{csidBlockBits})
	flavors.AddRtAttr(seg6FlavorNodeBits, []byte{csidNodeBits})
	return append(b, flavors.Serialize()...), err
}

// Of the generic netlink family SEG6 (<linux/seg6_genl.h>).
const (
	seg6CmdSetTunnelSource = 3
	seg6AttrDestination    = 1
)

// SetTunnelSource sets the source of the outer headers that the kernel's own
// H.Encaps makes in the namespace. Without one it looks for a source for every
// packet.
func (n *Net) SetTunnelSource(a netip.Addr) error {
	err := n.ns.Do(func() error {
		family, err := netlink.GenlFamilyGet("SEG6")
		if err != nil {
			return err
		}
		req := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
		req.AddData(&nl.Genlmsg{Command: seg6CmdSetTunnelSource, Version: 1})
		req.AddData(nl.NewRtAttr(seg6AttrDestination, a.AsSlice()))
		_, err = req.Execute(unix.NETLINK_GENERIC, 0)
		return err
	})
	if err != nil {
		return fmt.Errorf("set the source of the kernel's SRv6 tunnels in %s: %w", n.ns, permission(err))
	}
	return nil
}

// SetRate limits a device's sending rate to so many bits per second, with the HTB queueing
// discipline, as libvirt does it. 0 removes the limit.
func (n *Net) SetRate(link string, bitsPerSecond uint64) error {
	return n.onLink("set the speed of", link, func(l netlink.Link) error {
		root := netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
		// HTB takes no changes as a whole: another one in its place.
		err := n.h.QdiscDel(&netlink.GenericQdisc{QdiscAttrs: root, QdiscType: "htb"})
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
			return err
		}
		if bitsPerSecond == 0 {
			return nil
		}
		q := netlink.NewHtb(root)
		q.Defcls = 1
		if err := n.h.QdiscAdd(q); err != nil {
			return err
		}
		// A bucket of 10 ms at most: enough for a super-packet at any speed.
		burst := max(uint32(bitsPerSecond/8/100), 128<<10)
		return n.h.ClassReplace(netlink.NewHtbClass(netlink.ClassAttrs{
			LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 1), Parent: netlink.MakeHandle(1, 0),
		}, netlink.HtbClassAttrs{Rate: bitsPerSecond, Ceil: bitsPerSecond, Buffer: burst, Cbuffer: burst}))
	})
}
