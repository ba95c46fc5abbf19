package model

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// The rules that a value must keep wherever it comes from. Their errors start
// with a verb: the caller puts the value, and where it stands, in front.

// NameMax is the length in bytes of the longest name, InterfaceNameMax that of
// a network device (IFNAMSIZ without its end).
const (
	NameMax          = 32
	InterfaceNameMax = 15
)

// CheckName holds the rule for the names of nodes, functions, chains, hosts and
// routers. They become parts of file names, namespaces and pins.
func CheckName(s string) error {
	switch {
	case s == "":
		return errors.New("is empty; a name is 1 to 32 of a-z, 0-9 and -")
	case len(s) > NameMax:
		return fmt.Errorf("has %d characters; a name has at most %d", len(s), NameMax)
	case s[0] == '-':
		return errors.New("starts with -; a name starts with one of a-z and 0-9")
	}
	for _, c := range s {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return fmt.Errorf("has the character %q; a name is made of a-z, 0-9 and -", c)
		}
	}
	return nil
}

// CheckInterfaceName holds the kernel's rule for the name of a network device,
// and keeps to visible ASCII.
func CheckInterfaceName(s string) error {
	switch {
	case s == "":
		return errors.New("is empty; expect the name of a network device")
	case len(s) > InterfaceNameMax:
		return fmt.Errorf("has %d characters; the name of a network device has at most %d", len(s), InterfaceNameMax)
	case s == "lo":
		return errors.New("is the loopback device, by which nothing comes in")
	case s == ".", s == "..", s[0] == '-':
		return errors.New("is not the name of a network device")
	}
	for _, c := range s {
		if c <= ' ' || c > '~' || strings.ContainsRune(`/:%"'\`, c) {
			return fmt.Errorf("has the character %q; the name of a network device has none such", c)
		}
	}
	return nil
}

// CheckAddress holds the rule for the address of a node: IPv6, unicast, and of
// more than one link.
func CheckAddress(a netip.Addr) error {
	switch {
	case a.Is4(), a.Is4In6():
		return errors.New("is an IPv4 address; expect an IPv6 address")
	case !a.IsValid(), a.Zone() != "", a.IsUnspecified(), a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast():
		return errors.New("cannot be reached from other nodes; expect a unicast IPv6 address that is neither loopback nor link-local")
	}
	return nil
}

// CheckPrefix checks the common rules of all prefixes: IPv6, and no bits set beyond the length.
func CheckPrefix(p netip.Prefix) error {
	switch {
	case !p.IsValid():
		return errors.New("is not a prefix; expect an IPv6 prefix such as 2001:db8::/64")
	case p.Addr().Is4(), p.Addr().Is4In6():
		return errors.New("is an IPv4 prefix; expect an IPv6 prefix")
	case p != p.Masked():
		return fmt.Errorf("has bits set beyond its length; expect %s", p.Masked())
	}
	return nil
}

// CheckBlock holds the rule for the block that SIDs are cut from.
func CheckBlock(p netip.Prefix) error {
	if err := CheckPrefix(p); err != nil {
		return err
	}
	switch {
	case p.Bits() != 48:
		return fmt.Errorf("is a /%d; the SID block is a /48", p.Bits())
	case p.Addr().IsUnspecified(), p.Addr().IsMulticast(), p.Addr().IsLinkLocalUnicast():
		return errors.New("is not a unicast prefix; the SID block must be routable within the domain")
	}
	return nil
}

// CheckLocator holds the rule for a node's share of the block.
func CheckLocator(block, p netip.Prefix) error {
	if err := CheckPrefix(p); err != nil {
		return err
	}
	switch {
	case p.Bits() < 49 || p.Bits() > 64:
		return fmt.Errorf("is a /%d; a locator is a /49 to /64", p.Bits())
	case !block.Contains(p.Addr()):
		return fmt.Errorf("is not within the SID block %s", block)
	}
	return nil
}

// Room is the number of SIDs in a locator. Instance 0 of the block is reserved: in a compressed
// list it marks the end.
func Room(locator netip.Prefix) int {
	room := 1 << (64 - locator.Bits())
	if b := locator.Addr().As16(); b[6] == 0 && b[7] == 0 {
		room--
	}
	return room
}

// CheckSID holds the rule for a SID in a segment list: a /64 of the block,
// without argument.
func CheckSID(block netip.Prefix, sid netip.Addr) error {
	switch {
	case !sid.IsValid(), sid.Zone() != "", !block.Contains(sid):
		return fmt.Errorf("is not within the SID block %s", block)
	case netip.PrefixFrom(sid, 64).Masked().Addr() != sid:
		return errors.New("has an argument; the lower 64 bits of a SID are zero")
	}
	return nil
}

// CheckLastSegment holds the rule for the last entry of the list of a part that ends at a function of kind stream: a SID, with
// parameters of 48 bits or without.
func CheckLastSegment(block netip.Prefix, segment netip.Addr) error {
	b := segment.As16()
	if segment.Is4() || b[8] != 0 || b[9] != 0 {
		return errors.New("is not a SID with parameters of 48 bits or none")
	}
	return CheckSID(block, netip.PrefixFrom(segment.WithZone(""), 64).Masked().Addr())
}

// CheckSegment holds the rule for an entry of a segment list: a SID, with an argument
// of 32 bits or without.
func CheckSegment(block netip.Prefix, segment netip.Addr) error {
	b := segment.As16()
	if segment.Is4() || [4]byte(b[8:12]) != [4]byte{} {
		return errors.New("is not a SID with an argument of 32 bits or none")
	}
	return CheckSID(block, netip.PrefixFrom(segment.WithZone(""), 64).Masked().Addr())
}

// CheckWaypoint holds the rule for the SID of a waypoint: one of the block that no
// node's locator covers.
func CheckWaypoint(block netip.Prefix, sid netip.Addr, nodes []Node) error {
	if err := CheckSID(block, sid); err != nil {
		return err
	}
	for _, n := range nodes {
		if n.Locator.Contains(sid) {
			return fmt.Errorf("is within the locator %s of node %s; a waypoint is a segment of a router without waystamp", n.Locator, n.Name)
		}
	}
	if b := sid.As16(); b[6] == 0 && b[7] == 0 {
		return fmt.Errorf("is the first /64 of the block; a compressed segment list cannot hold it, so no waypoint has it")
	}
	return nil
}

// CheckContainer holds the rule for an entry of a compressed segment list: C-SIDs
// behind the 48 bits of the block, one at least, and zero behind the last.
func CheckContainer(block netip.Prefix, container netip.Addr) error {
	if !container.IsValid() || container.Zone() != "" || !block.Contains(container) {
		return fmt.Errorf("is not within the SID block %s", block)
	}
	b, end := container.As16(), false
	for i := 6; i < len(b); i += 2 {
		zero := b[i] == 0 && b[i+1] == 0
		if zero && i == 6 || !zero && end {
			return errors.New("has a C-SID of zero in front of the last one; zero ends a container")
		}
		end = zero
	}
	return nil
}

// CheckMatchPrefix holds the rule for a prefix that a chain matches inner
// addresses by, of either version of IP. It must not reach into the block:
// nothing from outside may be addressed to a SID. ::/0 and 0.0.0.0/0 stand for
// all addresses of their version, and may.
func CheckMatchPrefix(block, p netip.Prefix) error {
	switch {
	case !p.IsValid():
		return errors.New("is not a prefix; expect one such as 2001:db8::/64 or 192.0.2.0/24")
	case p.Addr().Is4In6():
		return errors.New("is an IPv4 prefix in the form of an IPv6 address; expect one such as 192.0.2.0/24")
	case p != p.Masked():
		return fmt.Errorf("has bits set beyond its length; expect %s", p.Masked())
	case p.Bits() == 0:
		return nil
	case slices.ContainsFunc(unsteered, func(u netip.Prefix) bool { return u.Contains(p.Addr()) && u.Bits() <= p.Bits() }):
		return errors.New("is link-local, loopback or multicast, which no chain ever takes")
	case mapped.Overlaps(p):
		return fmt.Errorf("reaches into %s, which stands for IPv4; expect an IPv4 prefix for that", mapped)
	case block.IsValid() && block.Overlaps(p):
		return fmt.Errorf("overlaps the SID block %s, where nothing from outside may go", block)
	}
	return nil
}

var mapped = netip.MustParsePrefix("::ffff:0:0/96")

// unsteered are the addresses that no packet of a chain has.
var unsteered = []netip.Prefix{
	netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"),
}
