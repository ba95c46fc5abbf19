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
	Protocol                    uint8 // of a fragment what its Fragment header names
	Fragment                    bool  // a part of a datagram, the first one too
	SourcePort, DestinationPort uint16
}

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
	nextUDPLite     = 136
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
		Protocol: b[9], Fragment: binary.BigEndian.Uint16(b[6:])&(moreFragments|offset) != 0,
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
			length, f.Fragment = 8, true
		}
		if length > left || length > room {
			return Flow{}, false
		}
		f.Protocol = b[0]
		if f.Fragment {
			return f, true
		}
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

// withPorts: b is the upper layer, of which left bytes are the packet's.
func (f Flow) withPorts(b []byte, left int) (Flow, bool) {
	if f.Fragment || !hasPorts(f.Protocol) {
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

func hasPorts(protocol uint8) bool {
	switch protocol {
	case nextTCP, nextUDP, nextDCCP, nextSCTP, nextUDPLite:
		return true
	}
	return false
}
