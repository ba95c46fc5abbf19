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
	sum := srv6.UpperLayerChecksum(from.Addr(), to.Addr(), unix.IPPROTO_UDP, d)
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(d[6:], sum)
	return append(b, d...)
}
