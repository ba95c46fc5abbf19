package oracle

import (
	"encoding/binary"
	"net/netip"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// ipv6 are the bytes of a packet, from an IPv6 header on that is in bounds.
type ipv6 []byte

func (b ipv6) version() uint8          { return b[0] >> 4 }
func (b ipv6) trafficClass() uint8     { return b[0]<<4 | b[1]>>4 }
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

// hasSRH: the next header is an SRH, or a routing header of which too little is
// there to know.
func (b ipv6) hasSRH() bool {
	if b.nextHeader() != srv6.NextHeaderRoute {
		return false
	}
	r := b[srv6.IPv6Len:]
	return len(r) < srv6.SRHLen || r[2] == srv6.RoutingTypeSRH
}

// unsteered addresses are never anybody's chain: link-local fe80::/10 and
// multicast ff00::/8. netip's own questions would count ::ffff:224.0.0.1 too.
func unsteered(a netip.Addr) bool {
	b := a.As16()
	return b[0] == 0xff || b[0] == 0xfe && b[1]&0xc0 == 0x80
}

// header are the bytes of an SRH that checkSRH accepted.
type header struct {
	b     []byte
	proof int // where the proof TLV starts, once findProof has found it
}

func (h *header) segmentsLeft() int { return int(h.b[3]) }
func (h *header) segments() int     { return int(h.b[4]) + 1 }
func (h *header) tlvs() int         { return srv6.SRHLen + srv6.SegmentLen*h.segments() }

// segment is an entry of the list as carried: 0 is the last segment.
func (h *header) segment(i int) netip.Addr {
	return netip.AddrFrom16([16]byte(h.b[srv6.SRHLen+srv6.SegmentLen*i:]))
}

// checkSRH is RFC 8754 4.3.1.1, S03 to S12, and our own bounds.
func checkSRH(ip ipv6) (*header, Reason) {
	if ip.nextHeader() != srv6.NextHeaderRoute {
		return nil, NoSRH
	}
	b := ip[srv6.IPv6Len:]
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
	h := &header{b: b[:length]}
	switch {
	case h.tlvs() > length:
		return nil, SRHLastEntry
	case h.segmentsLeft() > h.segments():
		return nil, SRHSegmentsLeft
	case h.segments() > model.SegmentsMax, length-h.tlvs() > tlvsMax:
		return nil, SRHTooLong
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
