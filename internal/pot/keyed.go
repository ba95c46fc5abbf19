package pot

import (
	"encoding/binary"
	"math/bits"
	"net/netip"

	"github.com/dchest/siphash"
)

// Lengths of the message that a keyed tag covers, in bytes.
const (
	MessageLen     = 23
	MessageFlowLen = 31
)

// Binding is B_j of keyed-flow: the SipHash-2-4 of a flow under K_B, its bytes
// in the order of the reference code.
type Binding [8]byte

// Flow is what keyed-flow binds a packet to: the inner packet's tuple as the
// hop sends it. Ports are zero for every fragment and for protocols without
// ports; whoever reads the packet sees to that.
type Flow struct {
	Source, Destination         netip.Addr
	Protocol                    uint8
	SourcePort, DestinationPort uint16
}

// Binding is B_j for a flow. An IPv4 address counts as ::ffff:a.b.c.d.
func (s Share) Binding(f Flow) Binding {
	src, dst := f.Source.As16(), f.Destination.As16()
	m := make([]byte, 0, 37)
	m = append(m, src[:]...)
	m = append(m, dst[:]...)
	m = append(m, f.Protocol)
	m = binary.BigEndian.AppendUint16(m, f.SourcePort)
	m = binary.BigEndian.AppendUint16(m, f.DestinationPort)
	var b Binding
	binary.LittleEndian.PutUint64(b[:], s.Bind.hash(m))
	return b
}

// Message is m_j of keyed, exactly as on the wire: what position j tags when
// it receives in.
//
//	RND (8) | T_(j-1) (8) | Scheme (1) | Epoch (1) | Path (4) | j (1)
func (h Header) Message(j uint8, in Values) [MessageLen]byte {
	return [MessageLen]byte(h.message(j, in, nil))
}

// MessageFlow is m_j of keyed-flow.
//
//	RND (8) | T_(j-1) (8) | B_j (8) | Scheme (1) | Epoch (1) | Path (4) | j (1)
func (h Header) MessageFlow(j uint8, in Values, b Binding) [MessageFlowLen]byte {
	return [MessageFlowLen]byte(h.message(j, in, &b))
}

func (h Header) message(j uint8, in Values, b *Binding) []byte {
	m := make([]byte, 0, MessageFlowLen)
	m = binary.BigEndian.AppendUint64(m, in.RND)
	m = binary.BigEndian.AppendUint64(m, in.CML)
	if b != nil {
		m = append(m, b[:]...)
	}
	m = append(m, uint8(h.Scheme), h.Epoch)
	m = binary.BigEndian.AppendUint32(m, h.Path)
	return append(m, j)
}

// stampKeyed is T_j in the place of T_(j-1).
func stampKeyed(k Key, h Header, j uint8, in Values, b *Binding) Values {
	return Values{RND: in.RND, CML: k.tag(h.message(j, in, b))}
}

// tag is the SipHash-2-4 of m with its eight bytes, in the reference code's
// order, read as a number in network order: what a CML field that holds them is.
func (k Key) tag(m []byte) uint64 { return bits.ReverseBytes64(k.hash(m)) }

func (k Key) hash(m []byte) uint64 {
	return siphash.Hash(binary.LittleEndian.Uint64(k[:8]), binary.LittleEndian.Uint64(k[8:]), m)
}
