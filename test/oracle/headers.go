package oracle

import (
	"encoding/binary"
	"net/netip"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// ip is an inner packet of either version, from its header on.
type ip interface {
	// whole: it is of the version that carried it, and its header has room for
	// itself.
	whole() bool
	length() int // of the packet, as its header says
	source() netip.Addr
	destination() netip.Addr
	hopLimit() uint8
	decrement()
	trafficClass() uint8
	ecn() uint8
	setECN(uint8)
}

// headerOf is a packet's header; false: it runs past the end.
func headerOf(b []byte, v4 bool) (ip, bool) {
	if v4 {
		return ipv4(b), len(b) >= srv6.IPv4Len
	}
	return ipv6(b), len(b) >= srv6.IPv6Len
}

// ipv4 are the bytes of a packet, from an IPv4 header on that is in bounds but
// for its options (RFC 791 section 3.1).
type ipv4 []byte

func (b ipv4) whole() bool             { return b[0]>>4 == 4 && b.headerLength() >= srv6.IPv4Len }
func (b ipv4) headerLength() int       { return 4 * int(b[0]&15) }
func (b ipv4) length() int             { return b.totalLength() }
func (b ipv4) totalLength() int        { return int(binary.BigEndian.Uint16(b[2:])) }
func (b ipv4) hopLimit() uint8         { return b[8] }
func (b ipv4) trafficClass() uint8     { return b[1] }
func (b ipv4) ecn() uint8              { return b[1] & 3 }
func (b ipv4) source() netip.Addr      { return netip.AddrFrom4([4]byte(b[12:16])) }
func (b ipv4) destination() netip.Addr { return netip.AddrFrom4([4]byte(b[16:20])) }
func (b ipv4) decrement()              { b.set(8, b[8]-1) }
func (b ipv4) setECN(v uint8)          { b.set(1, b[1]&^3|v) }

// set changes one byte, and the checksum with it by RFC 1624, so that a wrong
// one stays wrong.
func (b ipv4) set(at int, v uint8) {
	word := at &^ 1
	before := binary.BigEndian.Uint16(b[word:])
	b[at] = v
	sum := uint32(^binary.BigEndian.Uint16(b[10:])) + uint32(^before) + uint32(binary.BigEndian.Uint16(b[word:]))
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum))
}

// sumIsRight: the sum of all words, the checksum among them, is all ones.
func (b ipv4) sumIsRight() bool {
	sum := uint32(0)
	for i := 0; i < b.headerLength(); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return sum == 0xffff
}

// ipv6 are the bytes of a packet, from an IPv6 header on that is in bounds.
type ipv6 []byte

func (b ipv6) whole() bool             { return b[0]>>4 == 6 }
func (b ipv6) trafficClass() uint8     { return b[0]<<4 | b[1]>>4 }
func (b ipv6) length() int             { return srv6.IPv6Len + b.payloadLength() }
func (b ipv6) payloadLength() int      { return int(binary.BigEndian.Uint16(b[4:])) }
func (b ipv6) nextHeader() uint8       { return b[6] }
func (b ipv6) hopLimit() uint8         { return b[7] }
func (b ipv6) decrement()              { b[7]-- }
func (b ipv6) source() netip.Addr      { return netip.AddrFrom16([16]byte(b[8:24])) }
func (b ipv6) destination() netip.Addr { return netip.AddrFrom16([16]byte(b[24:40])) }

func (b ipv6) setDestination(a netip.Addr) {
	a16 := a.As16()
	copy(b[24:40], a16[:])
}

// extensionsMax are the extension headers that are looked through for an SRH.
const extensionsMax = 4

// hasSRH: one of the headers before the upper layer is an SRH. What has more of
// them than are looked through, or is not whole, counts as if one were.
func (b ipv6) hasSRH() bool {
	next, rest := b.nextHeader(), b[srv6.IPv6Len:]
	for range extensionsMax {
		if !mayHideSRH(next) {
			return false
		}
		if len(rest) < 4 || next == srv6.NextHeaderRoute && rest[2] == srv6.RoutingTypeSRH {
			return true
		}
		length := 8 * (int(rest[1]) + 1)
		switch next {
		case protocolAuth:
			length = 4 * (int(rest[1]) + 2)
		case protocolFragment:
			length = 8
			if binary.BigEndian.Uint16(rest[2:])&0xfff8 != 0 {
				return false // the first fragment has it
			}
		}
		next, rest = rest[0], rest[min(length, len(rest)):]
	}
	return mayHideSRH(next)
}

func mayHideSRH(next uint8) bool {
	return mayRoute(next) || next == protocolFragment || next == protocolAuth
}

// mayRoute: a routing header, or one that may stand before it (RFC 8200 4.1).
func mayRoute(next uint8) bool {
	const hopByHop, destination = 0, 60
	return next == hopByHop || next == destination || next == srv6.NextHeaderRoute
}

// Explicit congestion notification (RFC 3168 5).
const (
	ecnNotECT = 0
	ecnECT1   = 1
	ecnECT0   = 2
	ecnCE     = 3
)

func (b ipv6) ecn() uint8 { return b.trafficClass() & 3 }

func (b ipv6) setECN(v uint8) { b[1] = b[1]&^0x30 | v<<4 }

// decapsulateECN is RFC 6040 4.2, figure 4. drop: a mark that the inner packet
// cannot carry.
func decapsulateECN(inner, outer uint8) (out uint8, drop bool) {
	switch {
	case outer == ecnCE && inner == ecnNotECT:
		return inner, true
	case outer == ecnCE:
		return ecnCE, false
	case outer == ecnECT1 && inner == ecnECT0:
		return ecnECT1, false
	}
	return inner, false
}

// neverForwarded are addresses from and to which the kernel forwards nothing: in
// IPv6 loopback ::1, link-local fe80::/10 and multicast ff00::/8, in IPv4 0.0.0.0/8,
// 127.0.0.0/8, 224.0.0.0/4 and 255.255.255.255. netip's own questions would
// count ::ffff:224.0.0.1 too.
func neverForwarded(a netip.Addr) bool {
	if a.Is4() {
		b := a.As4()
		return b[0] == 0 || b[0] == 127 || b[0]>>4 == 14 || b == [4]byte{255, 255, 255, 255}
	}
	b := a.As16()
	return a == netip.IPv6Loopback() || b[0] == 0xff || b[0] == 0xfe && b[1]&0xc0 == 0x80
}

// unsteered addresses are never anybody's chain: those, in IPv4 also link-local
// 169.254.0.0/16, and in IPv6 the addresses that stand for IPv4.
func unsteered(a netip.Addr) bool {
	if a.Is4() {
		b := a.As4()
		return neverForwarded(a) || b[0] == 169 && b[1] == 254
	}
	return neverForwarded(a) || a.Is4In6() || a == netip.IPv6Unspecified()
}

// header are the bytes of an SRH that checkSRH accepted.
type header struct {
	at    int // where it is, from the IPv6 header on
	b     []byte
	proof int // where the proof TLV starts, once findProof has found it
}

// end is where the inner packet starts, from the IPv6 header on.
func (h *header) end() int { return h.at + len(h.b) }

func (h *header) segmentsLeft() int { return int(h.b[3]) }
func (h *header) segments() int     { return int(h.b[4]) + 1 }
func (h *header) tlvs() int         { return srv6.SRHLen + srv6.SegmentLen*h.segments() }

// segment is an entry of the list as carried: 0 is the last segment.
func (h *header) segment(i int) netip.Addr {
	return netip.AddrFrom16([16]byte(h.b[srv6.SRHLen+srv6.SegmentLen*i:]))
}

// What of options before an SRH is taken.
const (
	optionHeadersMax = 2
	optionBytesMax   = 256 // in all headers
	optionsMax       = 32  // in one header of destination options
)

// Codes of a Parameter Problem (RFC 4443 3.4).
const (
	codeNextHeader = 1
	codeOption     = 2
)

// refusal is why what is before an SRH is not taken. Its source is told of the
// field at pointer, from the IPv6 header on, by that code; 0: of none.
type refusal struct {
	reason  Reason
	code    uint8
	pointer int
}

// options is where the packet's routing header starts, behind hop-by-hop and
// destination options (RFC 8200 4.1), from the IPv6 header on.
func (b ipv6) options() (at int, _ refusal) {
	const hopByHop, destination = 0, 60
	at = srv6.IPv6Len
	field, next := 6, b.nextHeader()
	for n := 0; next == hopByHop || next == destination; n++ {
		if n == optionHeadersMax || n > 0 && next == hopByHop {
			return 0, refusal{ExtensionFirst, codeNextHeader, field}
		}
		if len(b) < at+2 {
			return 0, refusal{reason: ExtensionTruncated}
		}
		end := at + 8 + 8*int(b[at+1])
		if end-srv6.IPv6Len > optionBytesMax {
			return 0, refusal{ExtensionFirst, codeNextHeader, field}
		}
		if end > len(b) {
			return 0, refusal{reason: ExtensionTruncated}
		}
		if next == destination {
			if r := b.destinationOptions(at+2, end, field); r.reason != "" {
				return 0, r
			}
		}
		field, next, at = at, b[at], end
	}
	switch next {
	case srv6.NextHeaderRoute:
		return at, refusal{}
	case protocolFragment:
		return 0, refusal{reason: OuterFragment}
	}
	return 0, refusal{NoSRH, icmpCodeUpperLayer, at}
}

// destinationOptions looks at the options from byte at to end (RFC 8200 4.2), of a
// header that the byte at field names. We know none but padding.
func (b ipv6) destinationOptions(at, end, field int) refusal {
	for n := 0; at < end; n++ {
		if n == optionsMax {
			return refusal{ExtensionFirst, codeNextHeader, field}
		}
		if b[at] == 0 { // Pad1
			at++
			continue
		}
		if at+2 > end || at+2+int(b[at+1]) > end {
			return refusal{reason: OptionLength}
		}
		switch b[at] >> 6 {
		case 0: // to be passed over
		case 1: // to be discarded
			return refusal{reason: OptionUnknown}
		default: // and told of
			return refusal{OptionUnknown, codeOption, at}
		}
		at += 2 + int(b[at+1])
	}
	return refusal{}
}

// checkSRH is RFC 8754 4.3.1.1, S03 to S12, and our own bounds, of the routing
// header at an offset.
func checkSRH(ip ipv6, at int) (*header, Reason) {
	b := ip[at:]
	if len(b) < srv6.SRHLen {
		return nil, SRHTruncated
	}
	if b[2] != srv6.RoutingTypeSRH {
		return nil, RoutingType
	}
	length := 8 * (int(b[1]) + 1)
	if length > len(b) {
		return nil, SRHTruncated
	}
	h := &header{at: at, b: b[:length]}
	switch {
	case h.tlvs() > length:
		return nil, SRHLastEntry
	case h.segmentsLeft() > h.segments():
		return nil, SRHSegmentsLeft
	case h.segments() > model.SegmentsMax, length-h.tlvs() > tlvsMax:
		return nil, SRHTooLong
	case b[0] == protocolFragment:
		return nil, OuterFragment
	}
	return h, ""
}

// findProof reads the one proof TLV that must be there. All TLVs must be in
// bounds, also behind it.
func (h *header) findProof() (srv6.Proof, Reason) {
	for at := h.tlvs(); at < len(h.b); {
		if h.b[at] == srv6.TLVPad1 {
			at++
			continue
		}
		if at+2 > len(h.b) || at+2+int(h.b[at+1]) > len(h.b) {
			return srv6.Proof{}, TLVOverrun
		}
		length := 2 + int(h.b[at+1])
		if h.b[at] == srv6.TLVProof {
			switch {
			case length != srv6.ProofLen:
				return srv6.Proof{}, TLVLength
			case at%8 != 0:
				return srv6.Proof{}, TLVAlignment
			case h.proof != 0:
				return srv6.Proof{}, TLVDuplicate
			}
			h.proof = at
		}
		at += length
	}
	if h.proof == 0 {
		return srv6.Proof{}, TLVMissing
	}
	p, err := srv6.ParseProof(srv6.TLV{Type: srv6.TLVProof, Value: h.b[h.proof+2 : h.proof+srv6.ProofLen]})
	if err != nil {
		return srv6.Proof{}, TLVLength // has been checked: not reached
	}
	return p, ""
}
