package srv6

import (
	"encoding/binary"
	"net/netip"
)

// Flow is who sends a packet to whom: what keyed-flow binds a stamp to, and
// classification asks for. Ports are zero for every fragment and for protocols
// without ports.
type Flow struct {
	Source, Destination         netip.Addr
	Protocol                    uint8 // of a fragment of IPv6 what its Fragment header names
	Known                       Known
	SourcePort, DestinationPort uint16
}

// Known says how much of a packet's upper layer its receiver would read as Flow
// has it.
type Known uint8

const (
	// Hidden: Protocol may stand in front of another header, and is not passed
	// over.
	Hidden Known = iota
	// Later: a fragment of IPv6 that is not the first, whose receiver goes by what
	// the first one names (RFC 8200 4.5).
	Later
	// ProtocolOnly: another fragment.
	ProtocolOnly
	// ProtocolAndPorts: all, where the protocol has ports.
	ProtocolAndPorts
)

// Fragment says whether the packet is a part of a datagram, the first one too.
// What is hidden may be one.
func (k Known) Fragment() bool { return k == Later || k == ProtocolOnly }

// Next Header values that ReadFlow looks at.
const (
	nextHopByHop    = 0
	nextTCP         = 6
	nextUDP         = 17
	nextDCCP        = 33
	nextFragment    = 44
	nextAuth        = 51
	nextDestination = 60
	nextSCTP        = 132
	nextMobility    = 135
	nextUDPLite     = 136
	nextHIP         = 139
	nextShim6       = 140
	nextUnassigned  = 148 // from here on
)

// Extension headers that ReadFlow passes over: so many, and so many bytes.
const (
	flowExtensions    = 4
	flowExtensionsLen = 256
)

// ReadFlow reads the flow of a packet from its IP header on. next is the Next
// Header value that says which it is: 4 or 41. Whatever stands behind the
// packet, such as Ethernet's padding, is not read. False: it is neither, or it
// ends before all is known.
func ReadFlow(next uint8, b []byte) (Flow, bool) {
	switch next {
	case NextHeaderIPv4:
		return readFlow4(b)
	case NextHeaderIPv6:
		return readFlow6(b)
	}
	return Flow{}, false
}

func readFlow4(b []byte) (Flow, bool) {
	const header, moreFragments, offset = 20, 0x2000, 0x1fff
	if len(b) < header {
		return Flow{}, false
	}
	length, total := 4*int(b[0]&15), int(binary.BigEndian.Uint16(b[2:]))
	if length < header || total < length || len(b) < length {
		return Flow{}, false
	}
	f := Flow{
		Source: netip.AddrFrom4([4]byte(b[12:])), Destination: netip.AddrFrom4([4]byte(b[16:])),
		Protocol: b[9],
	}
	if binary.BigEndian.Uint16(b[6:])&(moreFragments|offset) != 0 {
		return f.ofFragment(), true
	}
	return f.withPorts(b[length:], total-length)
}

func readFlow6(b []byte) (Flow, bool) {
	if len(b) < IPv6Len {
		return Flow{}, false
	}
	h := header(b)
	f := Flow{Source: h.Source, Destination: h.Destination, Protocol: h.NextHeader}
	b, left, room := b[IPv6Len:], int(h.PayloadLength), flowExtensionsLen
	for range flowExtensions {
		if !isExtension(f.Protocol) {
			break
		}
		if len(b) < 8 {
			return Flow{}, false
		}
		length := 8 * (int(b[1]) + 1)
		switch f.Protocol {
		case nextAuth: // RFC 4302 2.2: in units of 4, and not the first two
			length = 4 * (int(b[1]) + 2)
		case nextFragment: // RFC 8200 4.5: reserved where others have a length
			length = 8
		}
		if length > left || length > room {
			return Flow{}, false
		}
		if f.Protocol == nextFragment {
			f.Protocol = b[0]
			if binary.BigEndian.Uint16(b[2:])>>3 != 0 {
				f.Known = Later
				return f, true
			}
			return f.ofFragment(), true
		}
		f.Protocol = b[0]
		if length > len(b) {
			return Flow{}, false
		}
		b, left, room = b[length:], left-length, room-length
	}
	if isExtension(f.Protocol) {
		return Flow{}, false
	}
	return f.withPorts(b, left)
}

// ofFragment: all fragments of the datagram name the same protocol, or this is the
// one that counts.
func (f Flow) ofFragment() Flow {
	if !mayHidePorts(f.Protocol) {
		f.Known = ProtocolOnly
	}
	return f
}

// withPorts: b is the upper layer, of which left bytes are the packet's.
func (f Flow) withPorts(b []byte, left int) (Flow, bool) {
	if mayHidePorts(f.Protocol) {
		return f, true
	}
	f.Known = ProtocolAndPorts
	if !hasPorts(f.Protocol) {
		return f, true
	}
	if len(b) < 4 || left < 4 {
		return Flow{}, false
	}
	f.SourcePort, f.DestinationPort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	return f, true
}

func isExtension(next uint8) bool {
	switch next {
	case nextHopByHop, NextHeaderRoute, nextFragment, nextAuth, nextDestination:
		return true
	}
	return false
}

// mayHidePorts: behind such a header there may be another one. Extension headers
// (IANA's list), and numbers that nobody has said what they are. Not ESP, which is
// for its receiver alone, as any other tunnel is.
func mayHidePorts(next uint8) bool {
	return isExtension(next) || next == nextMobility || next == nextHIP || next == nextShim6 || next >= nextUnassigned
}

func hasPorts(protocol uint8) bool {
	switch protocol {
	case nextTCP, nextUDP, nextDCCP, nextSCTP, nextUDPLite:
		return true
	}
	return false
}
