package srv6

import (
	"net/netip"

	"github.com/waystamp/waystamp/internal/model"
)

// Where the C-SIDs of a container are: behind a block of 48 bits, 16 bits each
// (RFC 9800 section 4.1, with LBL 48, LNFL 16 and AL 64).
const (
	blockLen = 6 // bytes
	csidLen  = 2
)

// Compress puts SIDs of one block into containers, in the order of the visit
// and as many into each as it has room for. A SID's C-SID are the 16 bits behind
// the block; they are not zero.
func Compress(sids []netip.Addr) []netip.Addr {
	var containers []netip.Addr
	for len(sids) > 0 {
		n := min(len(sids), CSIDsMax)
		c := sids[0].As16()
		for i, sid := range sids[:n] {
			b := sid.As16()
			copy(c[blockLen+csidLen*i:], b[blockLen:blockLen+csidLen])
		}
		containers = append(containers, netip.AddrFrom16(c))
		sids = sids[n:]
	}
	return containers
}

// Uncompress gives the SIDs of containers, each alone in its address.
func Uncompress(containers []netip.Addr) []netip.Addr {
	var sids []netip.Addr
	for _, c := range containers {
		for at, more := c, true; more; at, more = Shift(at) {
			b := at.As16()
			clear(b[blockLen+csidLen:])
			sids = append(sids, netip.AddrFrom16(b))
		}
	}
	return sids
}

// SameBlock says whether C-SIDs of one of the addresses can be in the other.
func SameBlock(a, b netip.Addr) bool {
	return netip.PrefixFrom(a, 8*blockLen).Contains(b)
}

// Shift is what a node of the NEXT-C-SID flavour makes of a destination address:
// the next C-SID comes behind the block. False: there is none, the argument is
// zero.
func Shift(a netip.Addr) (netip.Addr, bool) {
	b := a.As16()
	argument := b[blockLen+csidLen:]
	if [8]byte(argument) == [8]byte{} {
		return a, false
	}
	copy(b[blockLen:], argument)
	clear(b[len(b)-csidLen:])
	return netip.AddrFrom16(b), true
}

// Encapsulate is what a headend makes of a whole segment list in the order of
// the visit: the destination of the outer header, and an SRH without TLVs. A
// reduced list that would be empty is not: the proof needs an SRH, and that an
// entry (RFC 8754 section 2: Last Entry has no value for none).
func Encapsulate(segments []netip.Addr, e model.Encapsulation) (netip.Addr, *SRH) {
	carried := segments
	if e.Reduced && len(segments) > 1 {
		carried = segments[1:]
	}
	return segments[0], &SRH{NextHeader: NextHeaderIPv6, SegmentsLeft: uint8(len(segments) - 1), Segments: Reversed(carried)}
}
