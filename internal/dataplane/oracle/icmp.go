package oracle

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"github.com/waystamp/waystamp/internal/srv6"
)

// ICMPv6 (RFC 4443).
const (
	protocolICMPv6   = 58
	protocolFragment = 44

	icmpTooBig       = 2
	icmpTimeExceeded = 3
	icmpParameter    = 4

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
	if e.kind == icmpTooBig {
		e.data = max(e.data, ipv6MinMTU)
	}
	res := p.drop(r)
	if about := ipv6(p.b[at:]); len(about) >= srv6.IPv6Len && p.node.mayAnswer(about) {
		res.Error = e.about(about, p.node)
	}
	return res
}

// mayAnswer: RFC 4443 2.4 e, and no SIDs, and there is a way to the source.
func (n Node) mayAnswer(about ipv6) bool {
	from := about.source()
	if from.IsUnspecified() || neverForwarded(from) || neverForwarded(about.destination()) || n.Block.Contains(from) || n.owns(from) {
		return false
	}
	if !about.whole() || about.isError() {
		return false
	}
	if n.Route == nil {
		return true
	}
	_, ok := n.Route(from)
	return ok
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
