package srv6

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// EtherTypeIPv4 is the other EtherType that an inner packet may have.
const EtherTypeIPv4 = 0x0800

// IPv4Len is the length of an IPv4 header without options, in bytes.
const IPv4Len = 20

// Inner is what the header of an inner packet says, in both versions of IP by
// the names of IPv6.
type Inner struct {
	Version      uint8 // 4 or 6
	TrafficClass uint8 // TOS in IPv4
	HopLimit     uint8 // TTL
	NextHeader   uint8 // Protocol
	Length       int   // of the packet as it says itself, with its header, in bytes
	Fragment     bool  // IPv4 only: part of a datagram, the first one too
	Source       netip.Addr
	Destination  netip.Addr
}

// Inner is the header of the packet that p carries, and what follows it and its
// options.
func (p Packet) Inner() (Inner, []byte, error) {
	next := p.Header.NextHeader
	if p.SRH != nil {
		next = p.SRH.NextHeader
	}
	switch next {
	case NextHeaderIPv4:
		return inner4(p.Payload)
	case NextHeaderIPv6:
		return inner6(p.Payload)
	}
	return Inner{}, nil, fmt.Errorf("next header %d is not an IP packet (%d or %d)", next, NextHeaderIPv4, NextHeaderIPv6)
}

// DecodeInner reads the IP packet, of either version, that a plain frame
// carries.
func DecodeInner(frame []byte) (Inner, []byte, error) {
	if len(frame) < EthernetLen {
		return Inner{}, nil, fmt.Errorf("the Ethernet header needs %d bytes, %d are left", EthernetLen, len(frame))
	}
	switch t := binary.BigEndian.Uint16(frame[12:]); t {
	case EtherTypeIPv4:
		return inner4(frame[EthernetLen:])
	case EtherTypeIPv6:
		return inner6(frame[EthernetLen:])
	default:
		return Inner{}, nil, fmt.Errorf("EtherType 0x%04x is not that of an IP packet", t)
	}
}

func inner6(b []byte) (Inner, []byte, error) {
	switch {
	case len(b) < IPv6Len:
		return Inner{}, nil, fmt.Errorf("the inner IPv6 header needs %d bytes, %d are left", IPv6Len, len(b))
	case b[0]>>4 != 6:
		return Inner{}, nil, fmt.Errorf("the inner packet's version is %d, not 6", b[0]>>4)
	}
	h := header(b)
	return Inner{
		Version: 6, TrafficClass: h.TrafficClass, HopLimit: h.HopLimit, NextHeader: h.NextHeader,
		Length: IPv6Len + int(h.PayloadLength), Source: h.Source, Destination: h.Destination,
	}, append([]byte(nil), b[IPv6Len:]...), nil
}

// inner4 reads an IPv4 header (RFC 791 section 3.1).
func inner4(b []byte) (Inner, []byte, error) {
	if len(b) < IPv4Len {
		return Inner{}, nil, fmt.Errorf("the inner IPv4 header needs %d bytes, %d are left", IPv4Len, len(b))
	}
	n := 4 * int(b[0]&15)
	switch {
	case b[0]>>4 != 4:
		return Inner{}, nil, fmt.Errorf("the inner packet's version is %d, not 4", b[0]>>4)
	case n < IPv4Len:
		return Inner{}, nil, fmt.Errorf("the inner IPv4 header says that it has %d bytes; it has %d at least", n, IPv4Len)
	case n > len(b):
		return Inner{}, nil, fmt.Errorf("the inner IPv4 header needs %d bytes, %d are left", n, len(b))
	}
	const moreFragments, offset = 0x2000, 0x1fff
	return Inner{
		Version: 4, TrafficClass: b[1], HopLimit: b[8], NextHeader: b[9],
		Length:   int(binary.BigEndian.Uint16(b[2:])),
		Fragment: binary.BigEndian.Uint16(b[6:])&(moreFragments|offset) != 0,
		Source:   netip.AddrFrom4([4]byte(b[12:16])), Destination: netip.AddrFrom4([4]byte(b[16:20])),
	}, append([]byte(nil), b[n:]...), nil
}

// IPv4 is an IPv4 header to be made (RFC 791 section 3.1).
type IPv4 struct {
	TOS         uint8
	ID          uint16
	Fragment    uint16 // flags and offset, as on the wire
	TTL         uint8
	Protocol    uint8
	Source      netip.Addr
	Destination netip.Addr
	Options     []byte // a multiple of 4 bytes, 40 at most
}

// Append adds a packet with that header to b, with its length and checksum.
func (h IPv4) Append(b, payload []byte) ([]byte, error) {
	n := IPv4Len + len(h.Options)
	switch {
	case n%4 != 0 || n > 60:
		return nil, fmt.Errorf("%d bytes of options; expect a multiple of 4, and 40 at most", len(h.Options))
	case n+len(payload) > 0xffff:
		return nil, fmt.Errorf("payload of %d bytes is longer than an IPv4 header can tell", len(payload))
	case !h.Source.Is4() || !h.Destination.Is4():
		return nil, fmt.Errorf("%s to %s: expect IPv4 addresses", h.Source, h.Destination)
	}
	start := len(b)
	b = append(b, 0x40|uint8(n/4), h.TOS)
	b = binary.BigEndian.AppendUint16(b, uint16(n+len(payload)))
	b = binary.BigEndian.AppendUint16(b, h.ID)
	b = binary.BigEndian.AppendUint16(b, h.Fragment)
	b = append(b, h.TTL, h.Protocol, 0, 0)
	src, dst := h.Source.As4(), h.Destination.As4()
	b = append(append(append(b, src[:]...), dst[:]...), h.Options...)
	binary.BigEndian.PutUint16(b[start+10:], IPv4Checksum(b[start:]))
	return append(b, payload...), nil
}

// IPv4Checksum is the checksum of an IPv4 header (RFC 791 section 3.1), its own
// field counted as zero.
func IPv4Checksum(header []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(header); i += 2 {
		if i != 10 {
			sum += uint32(binary.BigEndian.Uint16(header[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// UpperLayerChecksum is the checksum of payload, which begins with a header of protocol, and of
// the pseudo-header before it (RFC 8200 section 8.1, RFC 1071). For IPv4 addresses the sum is the
// same. The field of the header that it belongs in must be zero.
func UpperLayerChecksum(from, to netip.Addr, protocol uint32, payload []byte) uint16 {
	var sum uint32
	add := func(b []byte) {
		for len(b) > 1 {
			sum, b = sum+uint32(binary.BigEndian.Uint16(b)), b[2:]
		}
		if len(b) == 1 {
			sum += uint32(b[0]) << 8
		}
	}
	add(from.AsSlice())
	add(to.AsSlice())
	add(payload)
	sum += protocol + uint32(len(payload))>>16 + uint32(len(payload))&0xffff
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
