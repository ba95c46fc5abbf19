package model

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Flow selects packets of a path by addresses, protocol and ports. A zero field selects all packets; a port selects no
// fragment, and no packet without ports. It is comparable.
type Flow struct {
	Source          netip.Prefix
	Destination     netip.Prefix
	Protocol        Protocol
	SourcePort      uint16
	DestinationPort uint16
}

// flowAny stands for a field without a condition.
const flowAny = "any"

// ParseFlow reads SRC,DST,PROTO or SRC,DST,PROTO,SPORT,DPORT.
func ParseFlow(s string) (f Flow, err error) {
	fields := strings.Split(s, ",")
	if len(fields) != 3 && len(fields) != 5 {
		return f, fmt.Errorf("%q has %d fields; expect SRC,DST,PROTO or SRC,DST,PROTO,SPORT,DPORT, with any for a field that does not matter", s, len(fields))
	}
	if f.Source, err = parseFlowAddress(fields[0]); err != nil {
		return Flow{}, fmt.Errorf("source: %w", err)
	}
	if f.Destination, err = parseFlowAddress(fields[1]); err != nil {
		return Flow{}, fmt.Errorf("destination: %w", err)
	}
	if fields[2] != flowAny {
		if err := f.Protocol.UnmarshalText([]byte(fields[2])); err != nil {
			return Flow{}, err
		}
	}
	if len(fields) == 5 {
		if f.SourcePort, err = parseFlowPort(fields[3]); err != nil {
			return Flow{}, fmt.Errorf("source port: %w", err)
		}
		if f.DestinationPort, err = parseFlowPort(fields[4]); err != nil {
			return Flow{}, fmt.Errorf("destination port: %w", err)
		}
	}
	if err := f.Check(); err != nil {
		return Flow{}, err
	}
	return f, nil
}

func parseFlowAddress(s string) (netip.Prefix, error) {
	if s == flowAny {
		return netip.Prefix{}, nil
	}
	p, err := netip.ParsePrefix(s)
	zone := ""
	if !strings.Contains(s, "/") {
		var a netip.Addr
		a, err = netip.ParseAddr(s)
		p, zone = netip.PrefixFrom(a, a.BitLen()), a.Zone()
	}
	switch {
	case err != nil || zone != "" || p.Addr().Is4In6():
		return netip.Prefix{}, fmt.Errorf("%q is neither an address nor a prefix; expect one such as 192.0.2.1 or 2001:db8::/32, or %s", s, flowAny)
	case p != p.Masked():
		return netip.Prefix{}, fmt.Errorf("%s has bits set behind its length; expect %s, or the address alone", s, p.Masked())
	}
	return p, nil
}

func parseFlowPort(s string) (uint16, error) {
	if s == flowAny {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a port; expect a number from 1 to 65535, or %s", s, flowAny)
	}
	return uint16(n), nil
}

// Check holds the rules between the parts of a flow.
func (f Flow) Check() error {
	switch {
	case f == Flow{}:
		return errors.New("selects all packets; name an address, a protocol or a port")
	case f.Source.IsValid() && f.Destination.IsValid() && f.Source.Addr().Is4() != f.Destination.Addr().Is4():
		return errors.New("has a source and a destination of different versions of IP, which no packet has")
	case (f.SourcePort != 0 || f.DestinationPort != 0) && !f.Protocol.hasPorts():
		return fmt.Errorf("has ports, and protocol %s; expect one of %s", f.Protocol, expect(portProtocols()))
	}
	return nil
}

// Reverse is the flow of the answers.
func (f Flow) Reverse() Flow {
	f.Source, f.Destination = f.Destination, f.Source
	f.SourcePort, f.DestinationPort = f.DestinationPort, f.SourcePort
	return f
}

// Meets reports whether a packet of the flow can match m.
func (f Flow) Meets(m Match) bool {
	destination, source := m.Whole()
	address := func(p, whole netip.Prefix) bool { return !p.IsValid() || p.Overlaps(whole) }
	port := func(p uint16, of Ports) bool { return p == 0 || of == Ports{} || of.First <= p && p <= of.Last }
	return address(f.Source, source) && address(f.Destination, destination) &&
		(f.Protocol == 0 || m.Protocol == 0 || f.Protocol == m.Protocol) &&
		port(f.SourcePort, m.SourcePort) && port(f.DestinationPort, m.DestinationPort)
}

// String is what ParseFlow reads.
func (f Flow) String() string {
	address := func(p netip.Prefix) string {
		switch {
		case !p.IsValid():
			return flowAny
		case p.IsSingleIP():
			return p.Addr().String()
		}
		return p.String()
	}
	port := func(p uint16) string {
		if p == 0 {
			return flowAny
		}
		return strconv.Itoa(int(p))
	}
	fields := []string{address(f.Source), address(f.Destination), f.Protocol.String()}
	if f.SourcePort != 0 || f.DestinationPort != 0 {
		fields = slices.Concat(fields, []string{port(f.SourcePort), port(f.DestinationPort)})
	}
	return strings.Join(fields, ",")
}
