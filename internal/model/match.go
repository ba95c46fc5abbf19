package model

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Match selects the packets that a chain takes. A zero field matches all packets. A match by
// more than prefixes has a priority; matches with a priority come before all others, and lower
// priorities come first.
type Match struct {
	Destination     netip.Prefix
	Source          netip.Prefix
	Priority        uint16 // 0: by prefixes alone
	Protocol        Protocol
	SourcePort      Ports
	DestinationPort Ports
	DSCP            DSCP
	Mark            Mark
}

var (
	allIPv4 = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	allIPv6 = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
)

// NewMatch normalizes two conditions: ::/0, and 0.0.0.0/0 beside another IPv4 prefix, are no
// conditions. Both are of one version of IP (see CheckMatch).
func NewMatch(destination, source netip.Prefix) Match {
	var m Match
	if destination.IsValid() && destination.Bits() > 0 {
		m.Destination = destination
	}
	if source.IsValid() && source.Bits() > 0 {
		m.Source = source
	}
	if m == (Match{}) && (destination.Addr().Is4() || source.Addr().Is4()) {
		m.Destination = allIPv4
	}
	return m
}

// Is4 reports whether m is for IPv4 packets. A match is for one version; a match without
// conditions is for IPv6.
func (m Match) Is4() bool { return m.Destination.Addr().Is4() || m.Source.Addr().Is4() }

// Whole are the prefixes that m stands for: where it has no condition, all
// addresses of its version.
func (m Match) Whole() (destination, source netip.Prefix) {
	fill := func(p netip.Prefix) netip.Prefix {
		switch {
		case p.IsValid():
			return p.Masked()
		case m.Is4():
			return allIPv4
		}
		return allIPv6
	}
	return fill(m.Destination), fill(m.Source)
}

// Ordered reports whether m is a rule with a priority; other matches are by the longest prefix.
func (m Match) Ordered() bool { return m.Priority != 0 }

// ByMark reports whether m has a condition on the mark. Only the headend sees marks, and only on
// packets that leave.
func (m Match) ByMark() bool { return m.Mark != Mark{} }

// Check holds the rules between the parts of a match.
func (m Match) Check() error {
	more := m.Protocol != 0 || m.SourcePort != Ports{} || m.DestinationPort != Ports{} || m.DSCP != 0 || m.Mark != Mark{}
	ports := m.SourcePort != Ports{} || m.DestinationPort != Ports{}
	switch {
	case more && m.Priority == 0:
		return fmt.Errorf("has no priority; a match by more than prefixes needs one, from 1 to %d, the lowest first", PriorityMax)
	case ports && !m.Protocol.hasPorts():
		return fmt.Errorf("has ports, and protocol %s; expect one of %s", m.Protocol, expect(portProtocols()))
	}
	return nil
}

// PriorityMax is the highest priority number, and the one that comes last.
const PriorityMax = 65535

// OrderedMax is how many ordered rules a node holds.
const OrderedMax = 256

// Reverse matches the answers to packets of m. The mark stays: it is that of the node at which
// the answers come in.
func (m Match) Reverse() Match {
	r := NewMatch(m.Source, m.Destination)
	m.Destination, m.Source = r.Destination, r.Source
	m.DestinationPort, m.SourcePort = m.SourcePort, m.DestinationPort
	return m
}

// Covers reports whether m matches packets with these addresses; other conditions are not
// compared.
func (m Match) Covers(destination, source netip.Addr) bool {
	d, s := m.Whole()
	return d.Contains(destination) && s.Contains(source)
}

// Overlaps reports whether a packet can match both.
func (m Match) Overlaps(o Match) bool {
	d, s := m.Whole()
	od, os := o.Whole()
	ports := func(a, b Ports) bool {
		return a == Ports{} || b == Ports{} || a.First <= b.Last && b.First <= a.Last
	}
	return d.Overlaps(od) && s.Overlaps(os) &&
		(m.Protocol == 0 || o.Protocol == 0 || m.Protocol == o.Protocol) &&
		ports(m.SourcePort, o.SourcePort) && ports(m.DestinationPort, o.DestinationPort) &&
		(m.DSCP == 0 || o.DSCP == 0 || m.DSCP == o.DSCP) &&
		(m.Mark.Value^o.Mark.Value)&m.Mark.Mask&o.Mark.Mask == 0
}

func (m Match) String() string {
	var s []string
	add := func(there bool, what string, value any) {
		if there {
			s = append(s, fmt.Sprintf("%s %v", what, value))
		}
	}
	add(m.Ordered(), "priority", m.Priority)
	add(m.Destination.IsValid(), "destination", m.Destination)
	add(m.Source.IsValid(), "source", m.Source)
	add(m.Protocol != 0, "protocol", m.Protocol)
	add(m.SourcePort != Ports{}, "source port", m.SourcePort)
	add(m.DestinationPort != Ports{}, "destination port", m.DestinationPort)
	add(m.DSCP != 0, "DSCP", m.DSCP)
	add(m.ByMark(), "mark", m.Mark)
	if len(s) == 0 {
		return "everything"
	}
	return strings.Join(s, ", ")
}

// CheckMatch holds that a match is of one version of IP.
func CheckMatch(destination, source netip.Prefix) error {
	if destination.IsValid() && source.IsValid() && destination.Addr().Is4() != source.Addr().Is4() {
		return errors.New("has a destination and a source of different versions of IP, which no packet has; make two chains")
	}
	return nil
}

// Protocol is the number of an upper-layer protocol; 0: any.
type Protocol uint8

var protocolNames = map[Protocol]string{1: "icmp", 6: "tcp", 17: "udp", 33: "dccp", 47: "gre", 50: "esp", 58: "icmpv6", 132: "sctp", 136: "udplite"}

func (p Protocol) hasPorts() bool { return slices.Contains([]Protocol{6, 17, 33, 132, 136}, p) }

func portProtocols() (names []string) {
	for _, p := range []Protocol{6, 17, 132, 33, 136} {
		names = append(names, p.String())
	}
	return names
}

func (p Protocol) String() string {
	if p == 0 {
		return "any"
	}
	if n, ok := protocolNames[p]; ok {
		return n
	}
	return strconv.Itoa(int(p))
}

// MarshalText implements encoding.TextMarshaler.
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads a name or a number. Extension headers of IPv6 are no protocols: the header
// behind them classifies a packet.
func (p *Protocol) UnmarshalText(b []byte) error {
	for n, name := range protocolNames {
		if name == string(b) {
			*p = n
			return nil
		}
	}
	n, err := strconv.ParseUint(string(b), 10, 8)
	if err != nil || slices.Contains([]uint64{0, 43, 44, 51, 60}, n) {
		return fmt.Errorf("%q is not a protocol; expect tcp, udp, icmpv6 or another name, or a number from 1 to 255 that is no extension header", b)
	}
	*p = Protocol(n)
	return nil
}

// Ports is a range of them, both ends included; zero: any, and packets without.
type Ports struct{ First, Last uint16 }

func (p Ports) String() string {
	if p.First == p.Last {
		return strconv.Itoa(int(p.First))
	}
	return fmt.Sprintf("%d-%d", p.First, p.Last)
}

// MarshalText implements encoding.TextMarshaler.
func (p Ports) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText takes a port, or two with a hyphen between them.
func (p *Ports) UnmarshalText(b []byte) error {
	first, last, isRange := strings.Cut(string(b), "-")
	if !isRange {
		last = first
	}
	f, err := strconv.ParseUint(first, 10, 16)
	l, err2 := strconv.ParseUint(last, 10, 16)
	if errors.Join(err, err2) != nil || f == 0 || l < f {
		return fmt.Errorf("%q is not a port or a range of them; expect a port from 1 to 65535, such as 443, or a range, such as 8000-8999", b)
	}
	*p = Ports{uint16(f), uint16(l)}
	return nil
}

// DSCP is the upper six bits of the traffic class (RFC 2474 3), plus one; 0: any.
type DSCP uint8

// Value is the code point, if there is a condition.
func (d DSCP) Value() (v uint8, ok bool) { return uint8(d) - 1, d != 0 }

func (d DSCP) String() string {
	if v, ok := d.Value(); ok {
		return strconv.Itoa(int(v))
	}
	return "any"
}

// MarshalText implements encoding.TextMarshaler.
func (d DSCP) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText takes a code point.
func (d *DSCP) UnmarshalText(b []byte) error {
	n, err := strconv.ParseUint(string(b), 10, 8)
	if err != nil || n > 63 {
		return fmt.Errorf("%q is not a DSCP; expect a number from 0 to 63", b)
	}
	*d = DSCP(n + 1)
	return nil
}

// Mark is a condition on the kernel's mark of a packet (SO_MARK, nftables' meta mark): its bits
// in Mask must equal Value. Zero: any.
type Mark struct{ Value, Mask uint32 }

func (m Mark) String() string {
	switch m.Mask {
	case 0:
		return "any"
	case math.MaxUint32:
		return fmt.Sprintf("%#x", m.Value)
	}
	return fmt.Sprintf("%#x/%#x", m.Value, m.Mask)
}

// MarshalText implements encoding.TextMarshaler.
func (m Mark) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText reads a value, or a value and a mask with a slash between them. A packet without
// a mark has 0, and no chain by mark takes it.
func (m *Mark) UnmarshalText(b []byte) error {
	value, mask, masked := strings.Cut(string(b), "/")
	if !masked {
		mask = "0xffffffff"
	}
	v, err := strconv.ParseUint(value, 0, 32)
	k, err2 := strconv.ParseUint(mask, 0, 32)
	switch {
	case errors.Join(err, err2) != nil:
		return fmt.Errorf("%q is not a packet mark; expect a number of 32 bits, such as 0x10, or one with a mask, such as 0x10/0xf0", b)
	case v&^k != 0:
		return fmt.Errorf("%q has bits set that its mask has not; expect a value within it, such as 0x10/0xf0", b)
	case v == 0:
		return fmt.Errorf("%q is the mark of unmarked packets; expect a mark with a bit set", b)
	}
	*m = Mark{uint32(v), uint32(k)}
	return nil
}
