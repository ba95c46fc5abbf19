package packets

import "encoding/binary"

// Dice is where variations come from: a *rand.Rand of math/rand/v2 with a seed
// that the test logs.
type Dice interface{ IntN(n int) int }

// Where things are in a frame with an outer header; the TLVs' place depends on
// the list.
const (
	offIPv6 = 14
	offSRH  = offIPv6 + 40
	offList = offSRH + 8
)

// Vary is p's frame with up to three changes, drawn from r: fields set to what
// is near the edge of being right, bits flipped, bytes cut off, parts taken from
// another packet of all. One in eight is left as it is. Most are refused, for
// reasons of all kinds. What is made depends on r alone.
func Vary(r Dice, p Packet, all []Packet) []byte {
	b := append([]byte(nil), p.Frame...)
	if r.IntN(8) == 0 {
		return b
	}
	for range 1 + r.IntN(3) {
		b = vary(r, b, all[r.IntN(len(all))].Frame)
	}
	return b
}

func vary(r Dice, b, other []byte) []byte {
	switch r.IntN(11) {
	case 0: // one bit, mostly of the headers
		if n := min(len(b), 220); n > offIPv6 {
			i := offIPv6 + r.IntN(n-offIPv6)
			b[i] ^= 1 << r.IntN(8)
		}
	case 1: // a field of the IPv6 header
		set(b, offIPv6+[]int{0, 1, 4, 5, 6, 7}[r.IntN(6)], near(r))
	case 2, 3: // a field of the SRH
		i := offSRH + r.IntN(8)
		if i < len(b) && r.IntN(2) == 0 {
			b[i] += byte(r.IntN(5)) - 2
		} else {
			set(b, i, near(r))
		}
	case 4: // the head of a TLV
		if i := tlvs(b); i > 0 {
			set(b, i+r.IntN(8), near(r))
		}
	case 5: // cut, and mostly say so
		if len(b) > offIPv6 {
			b = b[:offIPv6+r.IntN(len(b)-offIPv6)]
			if len(b) >= offSRH && r.IntN(4) > 0 {
				binary.BigEndian.PutUint16(b[offIPv6+4:], uint16(len(b)-offSRH))
			}
		}
	case 6: // longer than it says
		b = append(b, make([]byte, 1+r.IntN(40))...)
	case 7: // another's outer addresses
		take(b, other, offIPv6+8+16*r.IntN(2), 16)
	case 8: // another's proof, or what is there
		if i, j := tlvs(b), tlvs(other); i > 0 && j > 0 && i+24 <= len(b) && j+24 <= len(other) {
			from, to := r.IntN(24), r.IntN(25)
			copy(b[i+min(from, to):i+max(from, to)], other[j+min(from, to):])
		}
	case 10: // the length of the inner packet
		if i := behind(b); i > 0 && i+6 <= len(b) {
			at := i + 4 // of IPv6
			if b[i]>>4 == 4 {
				at = i + 2
			}
			binary.BigEndian.PutUint16(b[at:], binary.BigEndian.Uint16(b[at:])+uint16(r.IntN(64))-32)
		}
	case 9: // another's inner addresses
		if i := behind(b); i > 0 && i+40 <= len(b) {
			j := behind(other)
			if j <= 0 || j+40 > len(other) {
				j = offIPv6
			}
			if part := 8 + 16*r.IntN(2); j+part+16 <= len(other) {
				copy(b[i+part:i+part+16], other[j+part:])
			}
		}
	}
	return b
}

func near(r Dice) byte {
	v := []byte{0, 1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 22, 31, 32, 41, 43, 59, 63, 64, 127, 128, 252, 254, 255}
	return v[r.IntN(len(v))]
}

func set(b []byte, i int, v byte) {
	if i < len(b) {
		b[i] = v
	}
}

// take copies n bytes at the same place.
func take(b, from []byte, i, n int) {
	if i+n <= len(b) && i+n <= len(from) {
		copy(b[i:i+n], from[i:])
	}
}

// tlvs is where the TLVs of an SRH start by its Last Entry, or 0.
func tlvs(b []byte) int {
	if len(b) < offList || b[offIPv6+6] != 43 {
		return 0
	}
	if i := offList + 16*(int(b[offSRH+4])+1); i < len(b) {
		return i
	}
	return 0
}

// behind is where what follows an SRH starts, or 0.
func behind(b []byte) int {
	if len(b) < offList || b[offIPv6+6] != 43 {
		return 0
	}
	return offSRH + 8*(int(b[offSRH+1])+1)
}
