package srv6

import "slices"

// Edited packets, for tests and attacks. Each is a packet of its own; the one it
// is made from stays as it is.

// Proof is what the packet's proof TLV says; false: it has none that can be read.
func (p Packet) Proof() (Proof, bool) {
	if p.SRH == nil {
		return Proof{}, false
	}
	v, err := p.SRH.Proof()
	return v, err == nil
}

// WithSRH is the packet with its own copy of the SRH, changed.
func (p Packet) WithSRH(edit func(*SRH)) Packet {
	s := *p.SRH
	s.Segments = slices.Clone(s.Segments)
	s.TLVs = slices.Clone(s.TLVs)
	edit(&s)
	p.SRH = &s
	return p
}

// WithProof is the packet with another proof, the bytes of the rest as they were.
func (p Packet) WithProof(edit func(*Proof)) Packet {
	return p.WithSRH(func(s *SRH) {
		for i, t := range s.TLVs {
			if v, err := ParseProof(t); err == nil {
				edit(&v)
				s.TLVs[i] = v.TLV()
			}
		}
	})
}

// AtSegment is the packet on its way to another entry of its segment list, which
// stays as it is. Entry 0 is the egress.
func (p Packet) AtSegment(left uint8) Packet {
	p = p.WithSRH(func(s *SRH) { s.SegmentsLeft = left })
	p.Header.Destination = p.SRH.Segments[left]
	return p
}
