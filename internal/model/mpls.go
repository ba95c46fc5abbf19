package model

import (
	"errors"
	"fmt"
	"net/netip"
)

// EncapsulationType is the type of a chain's outer headers.
type EncapsulationType uint8

const (
	EncapsulationSRv6   EncapsulationType = iota // RFC 8754
	EncapsulationSRMPLS                          // RFC 8660: a stack of labels, with the proof behind it
)

var encapsulationNames = []string{"srv6", "sr-mpls"}

func (t EncapsulationType) String() string {
	return enumString("EncapsulationType", encapsulationNames, int(t))
}

// MarshalText implements encoding.TextMarshaler.
func (t EncapsulationType) MarshalText() ([]byte, error) {
	return enumMarshal("type of encapsulation", encapsulationNames, int(t))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (t *EncapsulationType) UnmarshalText(b []byte) error {
	return enumUnmarshal(t, "type of encapsulation", encapsulationNames, b)
}

// Bounds of labels. Labels below LabelMin are special-purpose (RFC 3032, RFC 7274).
const (
	LabelMin    = 16
	LabelMax    = 1<<20 - 1
	ServicesMax = LabelMax - ServiceLabels + 1 // the highest label that service labels start from

	ServiceLabels = 1 << 16 // one for each SID of a block
)

// MPLS has a domain's settings for labels.
type MPLS struct {
	Services uint32 // the service label of SID 0 of the block: that of another is as far above
	MTU      int    // bytes behind the Ethernet header that each link of the core carries; 0: not declared
}

// NodeMPLS is how packets with labels reach a node.
type NodeMPLS struct {
	Label   uint32     // the node's label, the same all over the domain
	Address netip.Addr // IPv4 or IPv6, which routes lead to
}

// IsService reports whether a label is one of the domain's service labels.
func (m MPLS) IsService(label uint32) bool {
	return label >= m.Services && label-m.Services < ServiceLabels
}

// Service is the service label of a SID.
func (m MPLS) Service(sid netip.Addr) uint32 {
	b := sid.As16()
	return m.Services + (uint32(b[6])<<8 | uint32(b[7]))
}

// SID is the SID of a service label.
func (m MPLS) SID(block netip.Prefix, label uint32) netip.Addr {
	b := block.Addr().As16()
	n := label - m.Services
	b[6], b[7] = byte(n>>8), byte(n)
	return netip.AddrFrom16(b)
}

// CheckServices holds that the service labels of a domain are labels.
func CheckServices(first uint32) error {
	if first < LabelMin || first > ServicesMax {
		return fmt.Errorf("is not a label with %d labels from it on, all from %d to %d; expect %d to %d", ServiceLabels, LabelMin, LabelMax, LabelMin, ServicesMax)
	}
	return nil
}

// CheckNodeLabel holds the rule for a node's label in a domain with these service labels.
func (m MPLS) CheckNodeLabel(label uint32) error {
	switch {
	case label < LabelMin || label > LabelMax:
		return fmt.Errorf("is not a label from %d to %d", LabelMin, LabelMax)
	case m.IsService(label):
		return fmt.Errorf("is one of the service labels, which are %d to %d", m.Services, m.Services+ServiceLabels-1)
	}
	return nil
}

// CheckNodeMPLSAddress holds the rule for the address that packets with labels are routed
// to: unicast, and of more than one link.
func CheckNodeMPLSAddress(a netip.Addr) error {
	switch {
	case a.Is4In6():
		return errors.New("is an IPv4 address inside of an IPv6 address; write the IPv4 address")
	case !a.IsValid(), a.Zone() != "", a.IsUnspecified(), a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return errors.New("cannot be reached from other nodes; expect a unicast address that is neither loopback nor link-local")
	}
	return nil
}

// LabelProblem is a setting that a chain over labels cannot have.
type LabelProblem struct {
	Field string // of the chain, as the domain file names it
	Index int    // in its functions or waypoints
	Err   error
}

// CheckLabels finds settings that a chain over labels cannot have: forms of segment lists, and
// features that the data path has only over SRv6.
func (c Chain) CheckLabels(function func(name string) Function) (list []LabelProblem) {
	if c.Encapsulation.Type != EncapsulationSRMPLS {
		return nil
	}
	add := func(field string, i int, format string, args ...any) {
		list = append(list, LabelProblem{field, i, fmt.Errorf(format, args...)})
	}
	if c.Encapsulation.SIDs != SIDsPlain {
		add("sids", 0, "%s is a form of segment lists; a stack of labels has one form: leave it out", c.Encapsulation.SIDs)
	}
	if c.Encapsulation.Reduced {
		add("reduced", 0, "is a form of segment lists; a stack of labels has one form: leave it out")
	}
	for i, w := range c.Waypoints {
		add("waypoints", i, "%s is a waypoint, and a router finds no SID in a stack of labels; leave it out, or use type srv6", w.SID)
	}
	for i, name := range c.Functions {
		switch f := function(name); {
		case f.Kind == KindUnaware && f.Proxy.Recognise == RecogniseContent && f.Proxy.Segments != SegmentsCut:
			add("functions", i, "%s has segments: %s, and over sr-mpls there are no super-packets; leave it out", name, f.Proxy.Segments)
		}
	}
	return list
}
