package oracle

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/waystamp/waystamp/internal/srv6"
)

// Labels checks the flow labels that headends choose: which ones is theirs, but
// a flow has one, and it is not zero. The zero Labels is ready to use; it is
// for one headend.
type Labels struct{ of map[flow]uint32 }

type flow struct {
	source, destination netip.Addr
	protocol            uint8
	ports               uint32
}

// Check looks at one packet that a headend sent, from the outer IPv6 header on.
func (l *Labels) Check(sent []byte) error {
	p, err := srv6.Decode(sent)
	if err != nil {
		return err
	}
	inner, payload, err := p.Inner()
	if err != nil {
		return err
	}
	f := flow{source: inner.Source, destination: inner.Destination, protocol: inner.NextHeader}
	label := p.Header.FlowLabel
	if label == 0 {
		return fmt.Errorf("a headend sent a packet of %s to %s with flow label 0", f.source, f.destination)
	}
	const tcp, udp = 6, 17
	if !inner.Fragment && (f.protocol == tcp || f.protocol == udp) {
		if len(payload) < 4 {
			return nil // no packet of a flow; behind its end may have been other bytes
		}
		f.ports = binary.BigEndian.Uint32(payload)
	}
	if l.of == nil {
		l.of = make(map[flow]uint32)
	}
	if had, ok := l.of[f]; ok && had != label {
		return fmt.Errorf("a headend gave the flow from %s to %s, protocol %d, two labels: 0x%05x and 0x%05x",
			f.source, f.destination, f.protocol, had, label)
	}
	l.of[f] = label
	return nil
}

// WithoutLabel is a copy of a packet with flow label zero: what Result.Packet
// of an encapsulation is to be compared with.
func WithoutLabel(packet []byte) []byte {
	b := append([]byte(nil), packet...)
	if len(b) >= 4 {
		b[1] &= 0xf0
		b[2], b[3] = 0, 0
	}
	return b
}
