package oracle

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/srv6"
)

// ICMPv6 (RFC 4443).
const (
	protocolICMPv6   = 58
	protocolFragment = 44
	protocolAuth     = 51

	icmpUnreachable  = 1
	icmpTooBig       = 2
	icmpTimeExceeded = 3
	icmpParameter    = 4

	icmpCodeNoRoute    = 0 // of the first, RFC 4443 3.1
	icmpCodeProhibited = 1
	icmpCodeAddress    = 3
	icmpCodeUpperLayer = 4 // RFC 8986 10.3
	icmpHeaderLen      = 8
	icmpHopLimit       = 64
	ipv6MinMTU         = 1280
)

// icmp is what an error says.
type icmp struct {
	kind, code uint8
	data       uint32 // MTU or pointer
}

// answer drops the packet, and tells the source of the IPv6 header at offset at
// of it.
func (p *packet) answer(r Reason, at int, e icmp) Result {
	if p.v4 {
		res := p.drop(r)
		lies := p.arrival.Frames <= 1 && ipv4(p.b).totalLength() < srv6.IPv4Len
		about := ipv4(p.b)
		about = about.unpadded(p.arrival.Frames > 1)
		if n := p.teller(about); !lies && n.mayAnswerIPv4(about) {
			res.Error = e.aboutIPv4(about, n)
		}
		return res
	}
	if e.kind == icmpTooBig {
		e.data = max(e.data, ipv6MinMTU)
	}
	res := p.drop(r)
	if about := ipv6(p.b[at:]); len(about) >= srv6.IPv6Len {
		about = about.unpadded(p.behind)
		if n := p.teller(about); n.mayAnswer(about) {
			res.Error = e.about(about, n)
		}
	}
	return res
}

// teller is who an error comes from: this node. Its own sender is told by the
// packet's destination, since its own address is no source of what comes in.
func (p *packet) teller(about ip) Node {
	n := p.node
	if p.own && n.owns(about.source()) {
		n.Address, n.Own = about.destination(), []netip.Addr{about.destination()}
	}
	return n
}

// mayAnswer: RFC 4443 2.4 e, and no SIDs, and there is a way to the source.
func (n Node) mayAnswer(about ipv6) bool {
	from := about.source()
	if from.IsUnspecified() || neverForwarded(from) || unsteered(about.destination()) && !about.destination().Is4In6() || n.Block.Contains(from) || n.owns(from) {
		return false
	}
	if !about.whole() || about.isError() {
		return false
	}
	if n.Route == nil {
		return true
	}
	return n.Route(from).None == 0
}

// isError: an ICMPv6 error or a redirect, or perhaps one.
func (b ipv6) isError() bool {
	next, rest := b.nextHeader(), b[srv6.IPv6Len:]
	for range extensionsMax + 1 {
		if next != protocolICMPv6 && next != protocolFragment && !mayRoute(next) {
			return false
		}
		if len(rest) < 4 {
			return true
		}
		if next == protocolICMPv6 {
			return rest[0] < 128 || rest[0] == 137
		}
		length := 8
		if next != protocolFragment {
			length = 8 * (int(rest[1]) + 1)
		} else if binary.BigEndian.Uint16(rest[2:])&0xfff8 != 0 {
			return rest[0] == protocolICMPv6
		}
		next, rest = rest[0], rest[min(length, len(rest)):]
	}
	return true
}

// isErrorAbout: an ICMPv6 error, behind no other header, about a packet to there.
func (b ipv6) isErrorAbout(there netip.Prefix) bool {
	const about = srv6.IPv6Len + icmpHeaderLen
	return b.nextHeader() == protocolICMPv6 && len(b) >= about+srv6.IPv6Len && b[srv6.IPv6Len] < 128 &&
		there.Contains(b[about:].destination())
}

// about is the message that tells n's word on a packet, from its IPv6 header on.
func (e icmp) about(packet []byte, n Node) []byte {
	quoted := packet[:min(len(packet), ipv6MinMTU-srv6.IPv6Len-icmpHeaderLen)]
	h := srv6.Header{
		NextHeader: protocolICMPv6, HopLimit: icmpHopLimit, PayloadLength: uint16(icmpHeaderLen + len(quoted)),
		Source: n.Address, Destination: ipv6(packet).source(),
	}
	b, err := h.Append(nil)
	if err != nil {
		panic("oracle: " + err.Error())
	}
	b = append(b, e.kind, e.code, 0, 0)
	b = binary.BigEndian.AppendUint32(b, e.data)
	b = append(b, bytes.Clone(quoted)...)
	binary.BigEndian.PutUint16(b[srv6.IPv6Len+2:], checksum(b))
	return b
}

// checksum is that of an upper layer behind an IPv6 header (RFC 8200 8.1), whose
// own field is zero.
func checksum(b []byte) uint16 {
	sum := uint32(b[6]) + uint32(len(b)-srv6.IPv6Len)
	for i := 8; i < len(b); i++ {
		word := uint32(b[i])
		if i%2 == 0 {
			word <<= 8
		}
		sum += word
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// ICMP for IPv4 (RFC 792).
const (
	icmp4Protocol      = 1
	icmp4Unreachable   = 3
	icmp4Host          = 1
	icmp4FragNeeded    = 4
	icmp4Prohibited    = 13 // RFC 1812 5.2.7.1
	icmp4TimeExceeded  = 11
	icmp4MessageMax    = 576
	icmp4MinMTU        = 68
	dontFragment       = 0x40 // in byte 6 of an IPv4 header
	fragmentOffsetMask = 0x1fff
)

// dummyIPv4 answers for a node without an address of that version (RFC 7600).
var dummyIPv4 = netip.AddrFrom4([4]byte{192, 0, 0, 8})

// mayAnswerIPv4: RFC 1122 3.2.2.
func (n Node) mayAnswerIPv4(about ipv4) bool {
	from := about.source()
	if !about.whole() || neverForwarded(from) || neverForwarded(about.destination()) || n.owns(from) {
		return false
	}
	if binary.BigEndian.Uint16(about[6:])&fragmentOffsetMask != 0 {
		return false
	}
	kind := uint8(0)
	if l := about.headerLength(); l < len(about) {
		kind = about[l]
	}
	return about[9] != icmp4Protocol || kind != 3 && kind != 4 && kind != 5 && kind != 11 && kind != 12
}

// unpadded is the packet without what is behind it, but with behind where it says
// that it has no payload: so do super-packets that are longer than they can tell.
func (b ipv6) unpadded(behind []byte) ipv6 {
	if b.payloadLength() == 0 {
		return slices.Concat(b, behind)
	}
	return b[:min(b.length(), len(b))]
}

// unpadded is the packet without what Ethernet has padded it with. A super-packet
// may be longer than its header can tell.
func (b ipv4) unpadded(super bool) ipv4 {
	if l := b.totalLength(); l < len(b) && l >= srv6.IPv4Len && !super {
		return b[:l]
	}
	return b
}

// aboutIPv4 is the same message for a sender of IPv4.
func (e icmp) aboutIPv4(packet ipv4, n Node) []byte {
	quoted := packet[:min(len(packet), icmp4MessageMax-srv6.IPv4Len-icmpHeaderLen)]
	from := dummyIPv4
	for _, a := range n.Own {
		if a.Is4() {
			from = a
			break
		}
	}
	b := make([]byte, srv6.IPv4Len, icmp4MessageMax)
	b[0], b[6], b[8], b[9] = 0x45, dontFragment, icmpHopLimit, icmp4Protocol
	binary.BigEndian.PutUint16(b[2:], uint16(srv6.IPv4Len+icmpHeaderLen+len(quoted)))
	copy(b[12:], from.AsSlice())
	to := packet.source()
	copy(b[16:], to.AsSlice())
	binary.BigEndian.PutUint16(b[10:], sum(b))
	kind, code, data := uint8(icmp4TimeExceeded), uint8(0), uint32(0)
	switch {
	case e.kind == icmpTooBig:
		kind, code, data = icmp4Unreachable, icmp4FragNeeded, max(e.data, icmp4MinMTU)
	case e.kind == icmpUnreachable && e.code == icmpCodeProhibited:
		kind, code = icmp4Unreachable, icmp4Prohibited
	case e.kind == icmpUnreachable:
		kind, code = icmp4Unreachable, icmp4Host
	}
	b = append(b, kind, code, 0, 0)
	b = binary.BigEndian.AppendUint32(b, data)
	b = append(b, quoted...)
	binary.BigEndian.PutUint16(b[srv6.IPv4Len+2:], sum(b[srv6.IPv4Len:]))
	return b
}

// sum is the checksum of RFC 791 and 792, whose own field is zero.
func sum(b []byte) uint16 {
	s := uint32(0)
	for i, v := range b {
		if i%2 == 0 {
			s += uint32(v) << 8
		} else {
			s += uint32(v)
		}
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}
