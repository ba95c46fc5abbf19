package oracle

import (
	"encoding/binary"

	"github.com/waystamp/waystamp/internal/srv6"
)

// What is read of TCP (RFC 9293 3.1, 3.2).
const (
	protocolTCP    = 6
	tcpLen         = 20
	tcpSYN         = 2
	tcpOptionEnd   = 0
	tcpOptionNOP   = 1
	tcpOptionMSS   = 2
	tcpFlags       = 13
	tcpChecksum    = 16
	extensionBytes = 256 // that are passed over
)

// clampMSS lowers what a SYN says, in every option that says it, to most. b is an
// IP packet. What is not whole is left alone from there on. True: something has
// changed.
func clampMSS(b []byte, v4 bool, most int) (lowered bool) {
	tcp := tcpOf(b, v4)
	if len(tcp) < tcpLen || tcp[tcpFlags]&tcpSYN == 0 {
		return false
	}
	length := 4 * int(tcp[12]>>4)
	if length < tcpLen || length > len(tcp) {
		return false
	}
	tcp = tcp[:length]
	for at := tcpLen; at < length && tcp[at] != tcpOptionEnd; {
		if tcp[at] == tcpOptionNOP {
			at++
			continue
		}
		if at+2 > length {
			return lowered
		}
		n := int(tcp[at+1])
		if n < 2 || at+n > length {
			return lowered
		}
		if tcp[at] == tcpOptionMSS && n == 4 && int(binary.BigEndian.Uint16(tcp[at+2:])) > most {
			setSummed(tcp, at+2, byte(most>>8))
			setSummed(tcp, at+3, byte(most))
			lowered = true
		}
		at += n
	}
	return lowered
}

// setSummed changes one byte of a TCP header, and the checksum by RFC 1624.
func setSummed(tcp []byte, at int, v byte) {
	word := at &^ 1
	before := binary.BigEndian.Uint16(tcp[word:])
	tcp[at] = v
	sum := uint32(^binary.BigEndian.Uint16(tcp[tcpChecksum:])) + uint32(^before) + uint32(binary.BigEndian.Uint16(tcp[word:]))
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(tcp[tcpChecksum:], ^uint16(sum))
}

// tcpOf is what of a packet is one of TCP; nothing of a fragment, and of what is
// behind an authentication header.
func tcpOf(b []byte, v4 bool) []byte {
	if v4 {
		ip := ipv4(b)
		length, end := ip.headerLength(), min(ip.totalLength(), len(b))
		if b[9] != protocolTCP || isFragment(b, true) || end < length {
			return nil
		}
		return b[length:end]
	}
	ip := ipv6(b)
	next, rest, room := ip.nextHeader(), b[srv6.IPv6Len:], extensionBytes
	if ip.payloadLength() < len(rest) {
		rest = rest[:ip.payloadLength()]
	}
	for range extensionsMax {
		if !mayRoute(next) {
			break
		}
		if len(rest) < 2 {
			return nil
		}
		length := 8 * (int(rest[1]) + 1)
		if length > len(rest) || length > room {
			return nil
		}
		next, rest, room = rest[0], rest[length:], room-length
	}
	if next != protocolTCP {
		return nil
	}
	return rest
}
