package srv6

import (
	"fmt"
	"net/netip"

	"github.com/waystamp/waystamp/internal/model"
)

// HopLimit is what outer headers leave a headend with.
const HopLimit = 64

// CSIDsMax is how many C-SIDs an entry of a compressed segment list has: 16 bits
// each, behind the 48 bits of the block (RFC 9800 section 4.1).
const CSIDsMax = 5

// OuterLen is the length in bytes of what a headend puts in front of a packet:
// IPv6 header, SRH with so many entries in its segment list, proof TLV.
func OuterLen(entries int) int { return IPv6Len + SRHLen + SegmentLen*entries + ProofLen }

// Entries is how many entries the segment list of a path has, as carried, that
// makes so many visits. It has one at least: the proof needs an SRH.
func Entries(e model.Encapsulation, visits int) int {
	n := visits
	if e.SIDs == model.SIDsCompressed {
		n = (n + CSIDsMax - 1) / CSIDsMax
	}
	if e.Reduced && n > 1 {
		n--
	}
	return n
}

// ChainLen is the length in bytes of a chain's outer headers.
func ChainLen(c model.Chain) int { return OuterLen(Entries(c.Encapsulation, c.Segments())) }

// Carried is the segment list as it is in packets, of a whole one in the order of
// the visit, and in that order: a reduced one lacks its first entry.
func Carried(segments []netip.Addr, e model.Encapsulation) []netip.Addr {
	_, srh := Encapsulate(segments, e)
	return srh.Visit()
}

// OnWire is the same in the order of the packet: the last segment first.
func OnWire(segments []netip.Addr, e model.Encapsulation) []netip.Addr {
	_, srh := Encapsulate(segments, e)
	return srh.Segments
}

// Outer is what a headend puts before a packet, from its address and for a whole
// segment list in the order of the visit. What differs from packet to packet is
// zero: payload length, traffic class, flow label and the proof's values. What is
// inside is IPv6; for IPv4 the program changes that.
func Outer(source netip.Addr, segments []netip.Addr, e model.Encapsulation, proof Proof) ([]byte, error) {
	first, srh := Encapsulate(segments, e)
	srh.TLVs = []TLV{proof.TLV()}
	p := Packet{
		Header: Header{NextHeader: NextHeaderRoute, HopLimit: HopLimit, Source: source, Destination: first},
		SRH:    srh,
	}
	return p.Append(nil)
}

// Wrap is a frame without MAC addresses, of a packet in its outer headers on its way
// to the first of its segments. next: what the packet is, as a Next Header value.
func Wrap(source netip.Addr, segments []netip.Addr, proof Proof, next uint8, packet []byte) ([]byte, error) {
	if len(segments) == 0 {
		return nil, fmt.Errorf("a packet without segments goes nowhere")
	}
	first, srh := Encapsulate(segments, model.Encapsulation{})
	srh.NextHeader, srh.TLVs = next, []TLV{proof.TLV()}
	p := Packet{
		Ethernet: &Ethernet{Type: EtherTypeIPv6},
		Header:   Header{HopLimit: HopLimit, Source: source, Destination: first},
		SRH:      srh,
		Payload:  packet,
	}
	if err := p.Fix(); err != nil {
		return nil, err
	}
	return p.Append(nil)
}

// ReadProof reads a proof TLV as it is on the wire; false: it is another one, or of another length.
func ReadProof(b [ProofLen]byte) (Proof, bool) {
	p, err := ParseProof(TLV{Type: b[0], Value: b[2:]})
	return p, err == nil && int(b[1]) == ProofLen-2
}

// Encapsulated says whether the packet has outer headers with a segment list,
// waystamp's or somebody else's.
func (p Packet) Encapsulated() bool { return p.SRH != nil }

// Carried is the packet's segment list in the order of the visit; nil: it has none.
func (p Packet) Carried() []netip.Addr {
	if p.SRH == nil {
		return nil
	}
	return p.SRH.Visit()
}

// Flagged reports whether the packet has an SRH with the O-flag (RFC 9259 section 2.1).
func (p Packet) Flagged() bool { return p.SRH != nil && p.SRH.Flags&FlagOAM != 0 }

// AtLast says whether the packet is on its way to its last segment.
func (p Packet) AtLast() bool { return p.SRH != nil && p.SRH.SegmentsLeft == 0 }

// InnerFlow is the flow of the packet inside; false: there is none that can be read.
func (p Packet) InnerFlow() (Flow, bool) {
	if p.SRH == nil {
		return Flow{}, false
	}
	return ReadFlow(p.SRH.NextHeader, p.Payload)
}
