// Package srv6 is the codec of what waystamp puts around a packet: the IPv6
// header, the segment routing header of RFC 8754 with its TLVs, and the proof
// TLV. It decodes packets that others captured, and builds headers for plans
// and tests. It decides nothing: whether a node takes a packet is the matter of
// the programs in bpf/ and of their model in test/oracle. It is
// called by internal/plan, internal/explain and the oracle.
//
// Decoding copies: no result refers to the bytes that were given.
package srv6

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/waystamp/waystamp/internal/model"
)

// Lengths in bytes.
const (
	EthernetLen = 14
	IPv6Len     = 40
	SRHLen      = 8  // without segments and TLVs
	SegmentLen  = 16 // one entry of the segment list
	ProofLen    = 24 // of the proof TLV, with type and length
)

// Numbers on the wire.
const (
	EtherTypeIPv6   = 0x86dd
	NextHeaderIPv4  = 4
	NextHeaderIPv6  = 41
	NextHeaderRoute = 43 // a routing header

	NextHeaderHopByHop    = 0  // options, as those of
	NextHeaderDestination = 60 // this

	RoutingTypeSRH = 4

	TLVPad1  = 0
	TLVPadN  = 4
	TLVHMAC  = 5
	TLVProof = 252 // experimental, and may change en route: its first bit is set
)

// FlagOAM is the O-flag in the flags of an SRH (RFC 9259 section 2.1).
const FlagOAM = 0x20

// SRHMax is the longest SRH that Hdr Ext Len can tell, in bytes.
const SRHMax = 8 + 255*8

// Ethernet is the header of a frame.
type Ethernet struct {
	Destination, Source [6]byte
	Type                uint16
}

// Header is an IPv6 header (RFC 8200 section 3).
type Header struct {
	TrafficClass  uint8
	FlowLabel     uint32 // 20 bits
	PayloadLength uint16 // as on the wire, also when fewer bytes were captured
	NextHeader    uint8
	HopLimit      uint8
	Source        netip.Addr
	Destination   netip.Addr
}

// SRH is a segment routing header (RFC 8754 section 2). Hdr Ext Len and Last
// Entry follow from Segments and TLVs.
type SRH struct {
	NextHeader   uint8
	SegmentsLeft uint8
	Flags        uint8
	Tag          uint16
	Segments     []netip.Addr // as on the wire: the last segment first
	TLVs         []TLV
}

// TLV is one entry behind the segment list. Pad1 has no Value. Types that
// nobody knows are kept as they are.
type TLV struct {
	Type  uint8
	Value []byte
}

// Proof is what the proof TLV carries.
type Proof struct {
	Scheme model.Scheme // as on the wire, also when it has no name
	Epoch  uint8
	Path   uint32
	RND    uint64
	CML    uint64
}

// Packet is an IPv6 packet, or the first bytes of one.
type Packet struct {
	Ethernet *Ethernet // nil: there was none
	Header   Header
	Options  []byte // hop-by-hop and destination options before the SRH, as they are on the wire
	SRH      *SRH   // nil: the next header is not a segment routing header, or options before one
	Payload  []byte // all that follows, as far as it was captured
}

// Error says what is wrong with bytes, and where.
type Error struct {
	Offset  int    // of the field, in bytes from the start of what was decoded
	Field   string // by the name that its RFC gives it
	Problem string
}

func (e *Error) Error() string {
	return fmt.Sprintf("byte %d (%s): %s", e.Offset, e.Field, e.Problem)
}

// DecodeFrame reads an Ethernet frame with an IPv6 packet. The result on an
// error is what was read before it; see Decode.
func DecodeFrame(frame []byte) (Packet, error) {
	c := cursor{b: frame}
	eth, err := c.take(EthernetLen, "Ethernet header")
	if err != nil {
		return Packet{}, err
	}
	e := &Ethernet{Type: binary.BigEndian.Uint16(eth[12:])}
	copy(e.Destination[:], eth[0:])
	copy(e.Source[:], eth[6:])
	if e.Type != EtherTypeIPv6 {
		return Packet{Ethernet: e}, &Error{12, "EtherType", fmt.Sprintf("is 0x%04x, not IPv6's 0x%04x", e.Type, EtherTypeIPv6)}
	}
	p, err := c.packet()
	p.Ethernet = e
	return p, err
}

// Decode reads an IPv6 packet. Its payload may be cut short, as captures are;
// its headers may not. With an error it returns what was read before it: a
// Header with a source is whole, and so is an SRH except for its TLVs.
func Decode(packet []byte) (Packet, error) {
	c := cursor{b: packet}
	return c.packet()
}

// cursor is a read position that cannot leave the bytes.
type cursor struct {
	b   []byte
	off int
}

func (c *cursor) left() int { return len(c.b) - c.off }

// take returns the next n bytes; field is what they are.
func (c *cursor) take(n int, field string) ([]byte, error) {
	if n > c.left() {
		return nil, &Error{c.off, field, fmt.Sprintf("needs %d bytes, %d are left", n, c.left())}
	}
	b := c.b[c.off : c.off+n]
	c.off += n
	return b, nil
}

func (c *cursor) packet() (Packet, error) {
	start := c.off
	b, err := c.take(IPv6Len, "IPv6 header")
	if err != nil {
		return Packet{}, err
	}
	if v := b[0] >> 4; v != 6 {
		return Packet{}, &Error{start, "Version", fmt.Sprintf("is %d, not 6", v)}
	}
	var p Packet
	p.Header = header(b)
	next, length := c.options(p.Header.NextHeader)
	if next == NextHeaderRoute {
		at := c.off
		c.off += length
		p.SRH, err = c.srh()
		if p.SRH != nil || err != nil {
			p.Options = append([]byte(nil), c.b[at:at+length]...)
		} else {
			c.off = at
		}
	}
	p.Payload = append([]byte(nil), c.b[c.off:]...)
	return p, err
}

// options passes over the extension headers that may stand before a routing header
// (RFC 8200 section 4.1). It returns what is behind them, and their length; the
// next header itself where they are not whole.
func (c *cursor) options(first uint8) (next uint8, length int) {
	next = first
	for next == NextHeaderHopByHop || next == NextHeaderDestination {
		if c.left() < length+2 {
			return first, 0
		}
		h := c.b[c.off+length:]
		next, length = h[0], length+8+8*int(h[1])
	}
	if length > c.left() {
		return first, 0
	}
	return next, length
}

func header(b []byte) Header {
	word := binary.BigEndian.Uint32(b)
	return Header{
		TrafficClass:  uint8(word >> 20),
		FlowLabel:     word & 0xfffff,
		PayloadLength: binary.BigEndian.Uint16(b[4:]),
		NextHeader:    b[6],
		HopLimit:      b[7],
		Source:        netip.AddrFrom16([16]byte(b[8:24])),
		Destination:   netip.AddrFrom16([16]byte(b[24:40])),
	}
}

// srh reads the segment routing header, if the routing header is one.
func (c *cursor) srh() (*SRH, error) {
	start := c.off
	if c.left() < SRHLen {
		return nil, &Error{start, "routing header", fmt.Sprintf("needs %d bytes, %d are left", SRHLen, c.left())}
	}
	fixed := c.b[start : start+SRHLen]
	if fixed[2] != RoutingTypeSRH {
		return nil, nil
	}
	n := SRHLen + 8*int(fixed[1])
	if n > c.left() {
		return nil, &Error{start + 1, "Hdr Ext Len", fmt.Sprintf("asks for %d bytes of header, %d are left", n, c.left())}
	}
	segments := int(fixed[4]) + 1
	if segments*SegmentLen > n-SRHLen {
		return nil, &Error{start + 4, "Last Entry",
			fmt.Sprintf("is %d, but Hdr Ext Len has room for %d segments", fixed[4], (n-SRHLen)/SegmentLen)}
	}
	s := &SRH{
		NextHeader: fixed[0], SegmentsLeft: fixed[3], Flags: fixed[5],
		Tag:      binary.BigEndian.Uint16(fixed[6:]),
		Segments: make([]netip.Addr, segments),
	}
	for i := range s.Segments {
		s.Segments[i] = netip.AddrFrom16([16]byte(c.b[start+SRHLen+i*SegmentLen:]))
	}
	c.off = start + n

	area := cursor{b: c.b[:start+n], off: start + SRHLen + segments*SegmentLen}
	if err := area.tlvs(s); err != nil {
		return s, err
	}
	// RFC 8754 4.3.1.1: one past the last entry is legal, a reduced SRH leaves
	// its first segment out.
	if int(s.SegmentsLeft) > segments {
		return s, &Error{start + 3, "Segments Left", fmt.Sprintf("is %d, beyond Last Entry + 1 = %d", s.SegmentsLeft, segments)}
	}
	return s, nil
}

func (c *cursor) tlvs(s *SRH) error {
	for c.left() > 0 {
		start, typ := c.off, c.b[c.off]
		if typ == TLVPad1 {
			s.TLVs = append(s.TLVs, TLV{})
			c.off++
			continue
		}
		if c.left() < 2 {
			return &Error{start, "TLV", fmt.Sprintf("type %d has no length: the header ends", typ)}
		}
		n := int(c.b[start+1])
		c.off += 2
		if n > c.left() {
			return &Error{start + 1, "TLV Length", fmt.Sprintf("of type %d is %d, %d bytes are left in the header", typ, n, c.left())}
		}
		s.TLVs = append(s.TLVs, TLV{Type: typ, Value: append([]byte{}, c.b[c.off:c.off+n]...)})
		c.off += n
	}
	return nil
}

// Append adds the packet to b as it is on a wire. PayloadLength and NextHeader
// are written as they are in p; Fix makes them true.
func (p Packet) Append(b []byte) ([]byte, error) {
	if e := p.Ethernet; e != nil {
		b = append(b, e.Destination[:]...)
		b = append(b, e.Source[:]...)
		b = binary.BigEndian.AppendUint16(b, e.Type)
	}
	b, err := p.Header.Append(b)
	if err != nil {
		return nil, err
	}
	b = append(b, p.Options...)
	if p.SRH != nil {
		if b, err = p.SRH.Append(b); err != nil {
			return nil, err
		}
	}
	return append(b, p.Payload...), nil
}

// Fix sets PayloadLength to what follows the IPv6 header, and NextHeader if an
// SRH does; Options name theirs, and the IPv6 header's is what they are.
func (p *Packet) Fix() error {
	n := len(p.Options) + len(p.Payload)
	if p.SRH != nil {
		l, err := p.SRH.Len()
		if err != nil {
			return err
		}
		n += l
		if len(p.Options) == 0 {
			p.Header.NextHeader = NextHeaderRoute
		}
	}
	if n > 0xffff {
		return fmt.Errorf("payload of %d bytes is longer than the 65535 that an IPv6 header can tell", n)
	}
	p.Header.PayloadLength = uint16(n)
	return nil
}

// Append adds the header to b as it is on a wire.
func (h Header) Append(b []byte) ([]byte, error) {
	if h.FlowLabel > 0xfffff {
		return nil, fmt.Errorf("flow label 0x%x has more than 20 bits", h.FlowLabel)
	}
	for _, a := range []struct {
		name string
		addr netip.Addr
	}{{"source", h.Source}, {"destination", h.Destination}} {
		if !a.addr.Is6() {
			return nil, fmt.Errorf("%s %s is not an IPv6 address", a.name, a.addr)
		}
	}
	b = binary.BigEndian.AppendUint32(b, 6<<28|uint32(h.TrafficClass)<<20|h.FlowLabel)
	b = binary.BigEndian.AppendUint16(b, h.PayloadLength)
	b = append(b, h.NextHeader, h.HopLimit)
	src, dst := h.Source.As16(), h.Destination.As16()
	b = append(b, src[:]...)
	return append(b, dst[:]...), nil
}

// Len is the length of the header on a wire, in bytes. It is an error if no
// SRH can be like that.
func (s SRH) Len() (int, error) {
	if len(s.Segments) == 0 {
		return 0, fmt.Errorf("an SRH without segments cannot be told on the wire: Last Entry has no value for it")
	}
	n := SRHLen + SegmentLen*len(s.Segments)
	for i, t := range s.TLVs {
		switch {
		case t.Type == TLVPad1 && len(t.Value) != 0:
			return 0, fmt.Errorf("TLV %d is Pad1 and has a value of %d bytes", i, len(t.Value))
		case t.Type == TLVPad1:
			n++
		case len(t.Value) > 255:
			return 0, fmt.Errorf("TLV %d of type %d has a value of %d bytes, its length field ends at 255", i, t.Type, len(t.Value))
		default:
			n += 2 + len(t.Value)
		}
	}
	switch {
	case n%8 != 0:
		return 0, fmt.Errorf("SRH of %d bytes is not a multiple of 8: add %d bytes of padding", n, 8-n%8)
	case n > SRHMax:
		return 0, fmt.Errorf("SRH of %d bytes is longer than the %d that Hdr Ext Len can tell", n, SRHMax)
	}
	return n, nil
}

// Append adds the header to b as it is on a wire.
func (s SRH) Append(b []byte) ([]byte, error) {
	n, err := s.Len()
	if err != nil {
		return nil, err
	}
	b = append(b, s.NextHeader, uint8((n-SRHLen)/8), RoutingTypeSRH, s.SegmentsLeft, uint8(len(s.Segments)-1), s.Flags)
	b = binary.BigEndian.AppendUint16(b, s.Tag)
	for i, a := range s.Segments {
		if !a.Is6() {
			return nil, fmt.Errorf("segment %d, %s, is not an IPv6 address", i, a)
		}
		a16 := a.As16()
		b = append(b, a16[:]...)
	}
	for _, t := range s.TLVs {
		b = append(b, t.Type)
		if t.Type != TLVPad1 {
			b = append(b, uint8(len(t.Value)))
			b = append(b, t.Value...)
		}
	}
	return b, nil
}

// Visit returns the segments in the order of the visit: the first one first.
func (s SRH) Visit() []netip.Addr { return Reversed(s.Segments) }

// Reversed is list in the other order: that of the visit for one as on the
// wire, and back.
func Reversed(list []netip.Addr) []netip.Addr {
	r := make([]netip.Addr, len(list))
	for i, a := range list {
		r[len(list)-1-i] = a
	}
	return r
}

// Proof returns the first proof TLV.
func (s SRH) Proof() (Proof, error) {
	for _, t := range s.TLVs {
		if t.Type == TLVProof {
			return ParseProof(t)
		}
	}
	return Proof{}, fmt.Errorf("no proof TLV (type %d)", TLVProof)
}

// ParseProof reads a proof TLV.
func ParseProof(t TLV) (Proof, error) {
	if t.Type != TLVProof {
		return Proof{}, fmt.Errorf("TLV type %d is not a proof (%d)", t.Type, TLVProof)
	}
	v := t.Value
	if len(v) != ProofLen-2 {
		return Proof{}, fmt.Errorf("proof TLV has length %d, not %d", len(v), ProofLen-2)
	}
	return Proof{
		Scheme: model.Scheme(v[0]),
		Epoch:  v[1],
		Path:   binary.BigEndian.Uint32(v[2:]),
		RND:    binary.BigEndian.Uint64(v[6:]),
		CML:    binary.BigEndian.Uint64(v[14:]),
	}, nil
}

// TLV is the proof as it is on the wire.
func (p Proof) TLV() TLV {
	v := make([]byte, 0, ProofLen-2)
	v = append(v, uint8(p.Scheme), p.Epoch)
	v = binary.BigEndian.AppendUint32(v, p.Path)
	v = binary.BigEndian.AppendUint64(v, p.RND)
	v = binary.BigEndian.AppendUint64(v, p.CML)
	return TLV{Type: TLVProof, Value: v}
}

// Bytes is the TLV as it is on the wire.
func (p Proof) Bytes() [ProofLen]byte {
	t := p.TLV()
	return [ProofLen]byte(append([]byte{t.Type, uint8(len(t.Value))}, t.Value...))
}
