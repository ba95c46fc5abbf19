package model

import (
	"errors"
	"net/netip"
)

var (
	allIPv4 = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	allIPv6 = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
)

// NewMatch gives two conditions the one form that a Match has for them: ::/0,
// and 0.0.0.0/0 beside another IPv4 prefix, say nothing. They are of one version
// of IP (see CheckMatch).
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

// Is4 says whether m is of IPv4 packets. A match is of one version, and one
// without conditions of IPv6.
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

// Reverse matches the answers to what m matches.
func (m Match) Reverse() Match { return NewMatch(m.Source, m.Destination) }

// Covers says whether m matches a packet with these addresses.
func (m Match) Covers(destination, source netip.Addr) bool {
	d, s := m.Whole()
	return d.Contains(destination) && s.Contains(source)
}

// Overlaps says whether there is a packet that both match.
func (m Match) Overlaps(o Match) bool {
	d, s := m.Whole()
	od, os := o.Whole()
	return d.Overlaps(od) && s.Overlaps(os)
}

func (m Match) String() string {
	switch {
	case m.Source.IsValid() && m.Destination.IsValid():
		return "destination " + m.Destination.String() + ", source " + m.Source.String()
	case m.Source.IsValid():
		return "source " + m.Source.String()
	case m.Destination.IsValid():
		return "destination " + m.Destination.String()
	}
	return "everything"
}

// CheckMatch holds that a match is of one version of IP.
func CheckMatch(destination, source netip.Prefix) error {
	if destination.IsValid() && source.IsValid() && destination.Addr().Is4() != source.Addr().Is4() {
		return errors.New("has a destination and a source of different versions of IP, which no packet has; make two chains")
	}
	return nil
}
