package attack

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Changes by the router. None changes the given packet.

func asIs(raw []byte) []lab.Sent { return []lab.Sent{{Packet: raw}} }

// whole is the packet as bytes, with a payload length and lengths of headers that
// are right.
func whole(p srv6.Packet) []lab.Sent {
	p.Ethernet = nil
	if err := p.Fix(); err != nil {
		return nil
	}
	b, err := p.Append(nil)
	if err != nil {
		return nil
	}
	return asIs(b)
}

// udp is an IPv6 packet with a UDP datagram (RFC 768).
func udp(from, to netip.AddrPort, payload []byte) []byte {
	length := 8 + len(payload)
	h := srv6.Header{
		NextHeader: unix.IPPROTO_UDP, HopLimit: 63, PayloadLength: uint16(length),
		Source: from.Addr(), Destination: to.Addr(),
	}
	b, _ := h.Append(nil) // both addresses are IPv6
	d := binary.BigEndian.AppendUint16(nil, from.Port())
	d = binary.BigEndian.AppendUint16(d, to.Port())
	d = binary.BigEndian.AppendUint16(d, uint16(length))
	d = append(append(d, 0, 0), payload...)
	sum := pseudoSum(from.Addr(), to.Addr(), unix.IPPROTO_UDP, d)
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(d[6:], sum)
	return append(b, d...)
}

// pseudoSum is the checksum of a packet's payload, with the pseudo-header before it (RFC 8200
// section 8.1).
func pseudoSum(from, to netip.Addr, protocol uint32, d []byte) uint16 {
	src, dst := from.As16(), to.As16()
	pseudo := append(append([]byte{}, src[:]...), dst[:]...)
	pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(len(d)))
	pseudo = binary.BigEndian.AppendUint32(pseudo, protocol)
	return checksum(append(pseudo, d...))
}

// checksum is that of RFC 1071.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
