// Package mpls is the codec of what waystamp puts around a packet of a chain over labels: a
// stack of label entries (RFC 3032), behind it a word that says what follows, and the proof TLV.
// It decodes packets that others captured, and builds stacks for plans and tests. It
// decides nothing: whether a node takes a packet is the matter of the programs in bpf/. It is
// called by internal/plan, internal/tables, internal/explain and tests.
//
// Decoding copies: no result refers to the bytes that were given.
package mpls

import (
	"encoding/binary"
	"fmt"
)

// Lengths in bytes.
const (
	EthernetLen = 14
	EntryLen    = 4
	WordLen     = 4  // between stack and proof
	ProofLen    = 24 // of the proof TLV, with type and length
)

// Numbers on the wire.
const (
	EtherTypeUnicast   = 0x8847 // RFC 5332 section 3
	EtherTypeMulticast = 0x8848 // a label that the sender assigned

	LabelIPv4Null    = 0 // RFC 3032 section 2.1: explicit null
	LabelRouterAlert = 1
	LabelIPv6Null    = 2
	LabelImplicit    = 3 // never on the wire
	LabelEntropy     = 7 // RFC 6790: the entropy label indicator; the entropy label is the next one

	LabelMin = 16 // of those that are not special-purpose

	NextHeaderIPv4 = 4
	NextHeaderIPv6 = 41

	// TTL is that of the labels that leave a headend.
	TTL = 64
)

// EntriesMax is how many entries of a stack are looked at for its bottom.
const EntriesMax = 40

// OuterLen is the length in bytes of what a headend puts in front of a packet: a stack for so
// many visits, the word, the proof TLV.
func OuterLen(visits int) int { return Len(visits) + WordLen + ProofLen }

// Len is the length in bytes of a stack for so many visits: two entries each, and an entropy
// indicator with its label.
func Len(visits int) int { return EntryLen * (2*visits + 2) }

// Entry is a label stack entry: Label 20 bits, TC 3, S 1, TTL 8, from the highest on. It is
// big-endian on the wire.
type Entry uint32

// NewEntry makes an entry of a label, with the lower bits of each.
func NewEntry(label uint32, tc uint8, bottom bool, ttl uint8) Entry {
	e := Entry(label)<<12 | Entry(tc&7)<<9 | Entry(ttl)
	if bottom {
		e |= bottomBit
	}
	return e
}

const bottomBit = 1 << 8

// Label is the entry's label.
func (e Entry) Label() uint32 { return uint32(e >> 12) }

// TC is the traffic class (RFC 5462).
func (e Entry) TC() uint8 { return uint8(e>>9) & 7 }

// Bottom says whether the entry is the last of its stack.
func (e Entry) Bottom() bool { return e&bottomBit != 0 }

// TTL is the entry's time to live.
func (e Entry) TTL() uint8 { return uint8(e) }

// WithLabel is the entry with another label.
func (e Entry) WithLabel(label uint32) Entry { return e&0xfff | Entry(label)<<12 }

// WithBottom is the entry with another S bit.
func (e Entry) WithBottom(bottom bool) Entry {
	if bottom {
		return e | bottomBit
	}
	return e &^ bottomBit
}

// WithTTL is the entry with another time to live.
func (e Entry) WithTTL(ttl uint8) Entry { return e&^0xff | Entry(ttl) }

func (e Entry) String() string {
	s := fmt.Sprintf("label %d, tc %d, ttl %d", e.Label(), e.TC(), e.TTL())
	if e.Bottom() {
		s += ", bottom"
	}
	return s
}

// Visit is the pair of labels that leads to a node, and says what it does there.
type Visit struct {
	Node, Service uint32
}

// Stack is what leaves a headend: the first node, entropy indicator and label, the
// first service, and a pair for each further visit. An entropy label has TTL 0 (RFC 6790
// section 4.2).
func Stack(visits []Visit, entropy uint32, tc, ttl uint8) []Entry {
	var list []Entry
	for i, v := range visits {
		list = append(list, NewEntry(v.Node, tc, false, ttl))
		if i == 0 {
			list = append(list, NewEntry(LabelEntropy, tc, false, ttl), NewEntry(entropy, tc, false, 0))
		}
		list = append(list, NewEntry(v.Service, tc, i == len(visits)-1, ttl))
	}
	return list
}

// Word stands between stack and proof. Its first four bits are 0, so that no router takes
// what is behind the stack for IP (RFC 4385, RFC 9790).
type Word struct {
	Version    uint8 // 4 bits; 0
	Flags      uint8
	Reserved   uint8 // 0
	NextHeader uint8 // what is behind the proof: 4 or 41
}

// FlagTrace asks nodes for a record of the packet.
const FlagTrace = 1 << 0

// PutWord writes a word.
func PutWord(b *[WordLen]byte, w Word) {
	*b = [WordLen]byte{w.Version & 0xf, w.Flags, w.Reserved, w.NextHeader}
}

// ParseWord reads one. False: its first four bits are not 0, so that it is none.
func ParseWord(b [WordLen]byte) (Word, bool) {
	return Word{Version: b[0] & 0xf, Flags: b[1], Reserved: b[2], NextHeader: b[3]}, b[0]>>4 == 0
}

// Outer is what a headend puts in front of a packet: the stack, the word of an IPv6 packet
// and the proof TLV. What differs from packet to packet is zero: entropy label, traffic
// class and the proof's values.
func Outer(visits []Visit, proof [ProofLen]byte) ([]byte, error) {
	if len(visits) == 0 {
		return nil, fmt.Errorf("a packet without visits goes nowhere")
	}
	for i, v := range visits {
		for _, l := range []uint32{v.Node, v.Service} {
			if l < LabelMin || l >= 1<<20 {
				return nil, fmt.Errorf("visit %d: %d is not a label from %d to %d", i, l, LabelMin, 1<<20-1)
			}
		}
	}
	return Packet{Stack: Stack(visits, 0, 0, TTL), Word: &Word{NextHeader: NextHeaderIPv6}, Proof: &proof}.Append(nil), nil
}

// Ethernet is the header of a frame.
type Ethernet struct {
	Destination, Source [6]byte
	Type                uint16
}

// Packet is a frame with labels, or the first bytes of one.
type Packet struct {
	Ethernet *Ethernet // nil: there was none
	Stack    []Entry
	Word     *Word           // nil: no service label is in the stack, or it was cut off
	Proof    *[ProofLen]byte // the TLV; nil: there is none
	Payload  []byte          // all that follows, as far as it was captured
}

// Append adds the packet to b as it is on a wire.
func (p Packet) Append(b []byte) []byte {
	if e := p.Ethernet; e != nil {
		b = append(b, e.Destination[:]...)
		b = append(b, e.Source[:]...)
		b = binary.BigEndian.AppendUint16(b, e.Type)
	}
	for _, e := range p.Stack {
		b = binary.BigEndian.AppendUint32(b, uint32(e))
	}
	if p.Word != nil {
		var w [WordLen]byte
		PutWord(&w, *p.Word)
		b = append(b, w[:]...)
	}
	if p.Proof != nil {
		b = append(b, p.Proof[:]...)
	}
	return append(b, p.Payload...)
}

// Error says what is wrong with bytes, and where.
type Error struct {
	Offset  int    // in bytes from the start of what was decoded
	Field   string // by the name that its RFC gives it
	Problem string
}

func (e *Error) Error() string {
	return fmt.Sprintf("byte %d (%s): %s", e.Offset, e.Field, e.Problem)
}

// ParseFrame reads an Ethernet frame with labels, of which those that isService knows say
// that a word and a proof follow the stack. The result on an error is what was read before it.
func ParseFrame(frame []byte, isService func(label uint32) bool) (Packet, error) {
	if len(frame) < EthernetLen {
		return Packet{}, &Error{0, "Ethernet header", fmt.Sprintf("needs %d bytes, %d are left", EthernetLen, len(frame))}
	}
	e := &Ethernet{Type: binary.BigEndian.Uint16(frame[12:])}
	copy(e.Destination[:], frame[0:])
	copy(e.Source[:], frame[6:])
	if e.Type != EtherTypeUnicast && e.Type != EtherTypeMulticast {
		return Packet{Ethernet: e}, &Error{12, "EtherType", fmt.Sprintf("is 0x%04x, not MPLS's 0x%04x", e.Type, EtherTypeUnicast)}
	}
	p, err := parse(frame, EthernetLen, isService)
	p.Ethernet = e
	return p, err
}

// Parse reads a packet whose first bytes are its stack; see ParseFrame.
func Parse(packet []byte, isService func(label uint32) bool) (Packet, error) {
	return parse(packet, 0, isService)
}

func parse(b []byte, at int, isService func(label uint32) bool) (Packet, error) {
	var p Packet
	proven := false
	for bottom := false; !bottom; at += EntryLen {
		if len(p.Stack) == EntriesMax {
			return p, &Error{at, "label stack", fmt.Sprintf("none of %d entries is the bottom", EntriesMax)}
		}
		if len(b)-at < EntryLen {
			return p, &Error{at, "label stack", fmt.Sprintf("an entry needs %d bytes, %d are left", EntryLen, len(b)-at)}
		}
		e := Entry(binary.BigEndian.Uint32(b[at:]))
		bottom = e.Bottom()
		p.Stack = append(p.Stack, e)
	}
	for i, v := 0, p.visible(); i < len(v); i++ {
		proven = proven || isService(v[i].Label())
	}
	if !proven {
		p.Payload = append([]byte(nil), b[at:]...)
		return p, nil
	}
	if len(b)-at < WordLen {
		return p, &Error{at, "word", fmt.Sprintf("needs %d bytes, %d are left", WordLen, len(b)-at)}
	}
	w, ok := ParseWord([WordLen]byte(b[at:]))
	if !ok {
		return p, &Error{at, "word", fmt.Sprintf("its first four bits are %d, not 0", b[at]>>4)}
	}
	p.Word = &w
	at += WordLen
	if len(b)-at < ProofLen {
		return p, &Error{at, "proof", fmt.Sprintf("needs %d bytes, %d are left", ProofLen, len(b)-at)}
	}
	p.Proof = new([ProofLen]byte(b[at:]))
	p.Payload = append([]byte(nil), b[at+ProofLen:]...)
	return p, nil
}

// visible is the stack without its entropy indicators and labels.
func (p Packet) visible() []Entry {
	var list []Entry
	for i := 0; i < len(p.Stack); i++ {
		if p.Stack[i].Label() == LabelEntropy {
			i++
			continue
		}
		list = append(list, p.Stack[i])
	}
	return list
}

// Labels are those of the stack from the top on, without entropy indicators and entropy labels.
func (p Packet) Labels() []uint32 {
	var list []uint32
	for _, e := range p.visible() {
		list = append(list, e.Label())
	}
	return list
}

// Entropy is the first entropy label; false: there is none.
func (p Packet) Entropy() (uint32, bool) {
	for i, e := range p.Stack[:max(0, len(p.Stack)-1)] {
		if e.Label() == LabelEntropy {
			return p.Stack[i+1].Label(), true
		}
	}
	return 0, false
}

// Advance is what a hop makes of a stack whose first service label is its own: the next visit's
// pair takes the place of the hop's, and an entropy pair that of the next visit's. The stack keeps its length. Both
// labels have the least TTL of the hop's, less one. False: there is no next visit, the TTL
// ends here, or the top label is gone.
func Advance(stack []Entry) ([]Entry, bool) {
	const top, indicator, service, node = 0, 1, 3, 4
	at := node
	for at+1 < len(stack) && stack[at].Label() == LabelEntropy {
		at += 2 // where hops before were
	}
	if at+1 >= len(stack) || stack[indicator].Label() != LabelEntropy {
		return nil, false
	}
	ttl := min(stack[top].TTL(), stack[service].TTL())
	if ttl <= 1 {
		return nil, false
	}
	out := append([]Entry(nil), stack...)
	out[top] = stack[top].WithLabel(stack[at].Label()).WithTTL(ttl - 1)
	out[service] = stack[service].WithLabel(stack[at+1].Label()).WithTTL(ttl - 1)
	out[at] = stack[indicator]
	out[at+1] = stack[indicator+1].WithBottom(stack[at+1].Bottom())
	return out, true
}
