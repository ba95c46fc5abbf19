// Package pcapng writes packets as a capture file that Wireshark reads, each with a comment
// (draft-ietf-opsawg-pcapng). internal/cli writes refused packets so.
package pcapng

import (
	"encoding/binary"
	"io"
	"time"
)

// Types of blocks.
const (
	blockSection   = 0x0a0d0d0a
	blockInterface = 1
	blockPacket    = 6 // enhanced
)

// Codes of options: of all blocks, of a section, an interface, a packet.
const (
	optionEnd     = 0
	optionComment = 1
	shbProgram    = 4
	idbName       = 2
	idbResolution = 9
	epbDropped    = 4
)

// Packet is a frame of an Ethernet interface.
type Packet struct {
	Time      time.Time
	Interface string // which of several machines', too
	Bytes     []byte // from the Ethernet header on; may be the first ones only
	Len       int    // of the whole frame
	Dropped   uint64 // packets between the one before and this that are not in the file
	Comment   string
}

// Writer writes one section. It is not safe for concurrent use.
type Writer struct {
	w          io.Writer
	interfaces map[string]uint32
	buf        []byte
}

// NewWriter begins a file. program is what Wireshark shows as its writer.
func NewWriter(w io.Writer, program string) (*Writer, error) {
	x := &Writer{w: w, interfaces: map[string]uint32{}}
	b := binary.LittleEndian.AppendUint32(nil, 0x1a2b3c4d) // the byte order
	b = binary.LittleEndian.AppendUint16(b, 1)             // version 1.0
	b = binary.LittleEndian.AppendUint16(b, 0)
	b = binary.LittleEndian.AppendUint64(b, ^uint64(0)) // the section's length: not said
	b = option(b, shbProgram, []byte(program))
	return x, x.block(blockSection, end(b))
}

// Write appends a packet, and flushes nothing: w has all of it when Write returns.
func (x *Writer) Write(p Packet) error {
	i, ok := x.interfaces[p.Interface]
	if !ok {
		i = uint32(len(x.interfaces))
		b := []byte{1, 0, 0, 0, 0, 0, 0, 0} // LINKTYPE_ETHERNET, reserved, no limit of length
		b = option(b, idbName, []byte(p.Interface))
		b = option(b, idbResolution, []byte{9}) // nanoseconds
		if err := x.block(blockInterface, end(b)); err != nil {
			return err
		}
		x.interfaces[p.Interface] = i
	}
	at := uint64(p.Time.UnixNano())
	b := x.buf[:0]
	for _, v := range []uint32{i, uint32(at >> 32), uint32(at), uint32(len(p.Bytes)), uint32(max(p.Len, len(p.Bytes)))} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	b = pad(append(b, p.Bytes...))
	if p.Comment != "" {
		b = option(b, optionComment, []byte(p.Comment))
	}
	if p.Dropped > 0 {
		b = option(b, epbDropped, binary.LittleEndian.AppendUint64(nil, p.Dropped))
	}
	x.buf = end(b)
	return x.block(blockPacket, x.buf)
}

// block writes a block in one piece, so that a reader of a pipe never has half of one.
func (x *Writer) block(kind uint32, body []byte) error {
	total := uint32(len(body) + 12)
	b := binary.LittleEndian.AppendUint32(nil, kind)
	b = binary.LittleEndian.AppendUint32(b, total)
	b = append(b, body...)
	b = binary.LittleEndian.AppendUint32(b, total)
	_, err := x.w.Write(b)
	return err
}

// option appends an option. Its value is cut at what the length can say.
func option(b []byte, code uint16, value []byte) []byte {
	value = value[:min(len(value), 1<<16-1)]
	b = binary.LittleEndian.AppendUint16(b, code)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(value)))
	return pad(append(b, value...))
}

func end(b []byte) []byte { return append(b, optionEnd, 0, 0, 0) }

func pad(b []byte) []byte { return append(b, make([]byte, -len(b)&3)...) }
