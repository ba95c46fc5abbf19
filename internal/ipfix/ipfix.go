// Package ipfix encodes flow records as messages of IPFIX (RFC 7011), for collectors that
// receive them over UDP. It knows how records are written, and not what they mean.
package ipfix

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// Sizes of RFC 7011.
const (
	version         = 10
	headerSize      = 16 // 3.1
	setHeaderSize   = 4  // 3.3.2
	setTemplates    = 2
	firstTemplate   = 256 // 3.4.1: identifiers of templates begin here
	variable        = 0xffff
	enterpriseField = 0x8000 // 3.2: an enterprise number follows
	longString      = 255    // 7: the length takes three bytes from here on
)

// Type is how the values of an element are written (RFC 7011 6.1). Numbers are big-endian.
type Type int

const (
	Unsigned8    Type = iota + 1
	Unsigned16        // 2 bytes
	Unsigned32        // 4 bytes
	Unsigned64        // 8 bytes
	Milliseconds      // 8 bytes: since 1970 UTC
	IPv6Address       // 16 bytes
	String            // UTF-8 of variable length
)

// lengths are the sizes of values, in bytes.
var lengths = map[Type]uint16{
	Unsigned8: 1, Unsigned16: 2, Unsigned32: 4, Unsigned64: 8, Milliseconds: 8, IPv6Address: 16, String: variable,
}

// Element is an information element: one of IANA's registry, or of an enterprise.
type Element struct {
	ID         uint16 // below 32768
	Enterprise uint32 // IANA's private enterprise number; 0: the element is one of IANA's own
	Type       Type
}

// Template says which elements the records of a kind have, in their order.
type Template struct {
	ID     uint16 // 256 or more
	Fields []Element
}

// Record is one data record.
type Record struct {
	Template int   // its index among the templates of the exporter
	Values   []any // by the element's type: uint64, time.Time, netip.Addr or string
}

// Exporter makes the messages of one transport session. It is not safe for concurrent use.
type Exporter struct {
	domain    uint32 // the observation domain
	sequence  uint32 // of the next data record, modulo 2^32
	size      int    // of a message, at most
	templates []Template
}

// NewExporter makes messages of at most size bytes for an observation domain.
func NewExporter(domain uint32, size int, templates []Template) (*Exporter, error) {
	e := &Exporter{domain: domain, size: size, templates: templates}
	seen := map[uint16]bool{}
	for _, t := range templates {
		if t.ID < firstTemplate || seen[t.ID] {
			return nil, fmt.Errorf("template %d is below %d, or there twice", t.ID, firstTemplate)
		}
		seen[t.ID] = true
		for _, f := range t.Fields {
			if lengths[f.Type] == 0 || f.ID == 0 || f.ID >= enterpriseField {
				return nil, fmt.Errorf("template %d: element %d has no type, or no identifier", t.ID, f.ID)
			}
		}
		if n := headerSize + setHeaderSize + len(appendTemplate(nil, t)); n > size {
			return nil, fmt.Errorf("template %d needs a message of %d bytes, more than %d", t.ID, n, size)
		}
	}
	return e, nil
}

// Messages are the templates and the records as of now. Over UDP a collector forgets templates, and messages
// get lost, so that each call repeats the templates (RFC 7011 8.4). A record that does not fit a message
// is an error, and then nothing counts as sent.
func (e *Exporter) Messages(now time.Time, records []Record) ([][]byte, error) {
	m := builder{e: *e, now: now}
	for _, t := range e.templates {
		m.add(setTemplates, appendTemplate(nil, t), false)
	}
	for _, r := range records {
		if r.Template < 0 || r.Template >= len(e.templates) {
			return nil, fmt.Errorf("there is no template %d", r.Template)
		}
		t := e.templates[r.Template]
		b, err := appendRecord(nil, t, r.Values)
		if err != nil {
			return nil, fmt.Errorf("record of template %d: %w", t.ID, err)
		}
		if n := headerSize + setHeaderSize + len(b); n > e.size {
			return nil, fmt.Errorf("record of template %d needs a message of %d bytes, more than %d", t.ID, n, e.size)
		}
		m.add(t.ID, b, true)
	}
	m.close()
	e.sequence = m.e.sequence
	return m.done, nil
}

// builder fills messages one after the other.
type builder struct {
	e       Exporter
	now     time.Time
	done    [][]byte
	message []byte
	set     int    // where the open set begins in message; 0: none is open
	id      uint16 // of the open set
	records uint32 // data records in message
}

// add puts a record into the open set, or opens the set, or the next message.
func (m *builder) add(set uint16, record []byte, data bool) {
	need := len(record)
	if m.set == 0 || m.id != set {
		need += setHeaderSize
	}
	if len(m.message)+need > m.e.size {
		m.close()
	}
	if m.message == nil {
		m.message = make([]byte, headerSize, m.e.size)
	}
	if m.set == 0 || m.id != set {
		m.closeSet()
		m.set, m.id = len(m.message), set
		m.message = binary.BigEndian.AppendUint16(m.message, set)
		m.message = append(m.message, 0, 0)
	}
	m.message = append(m.message, record...)
	if data {
		m.records++
	}
}

func (m *builder) closeSet() {
	if m.set != 0 {
		binary.BigEndian.PutUint16(m.message[m.set+2:], uint16(len(m.message)-m.set))
		m.set = 0
	}
}

// close writes the header of the open message (RFC 7011 3.1). Its sequence number counts the data
// records before it.
func (m *builder) close() {
	if m.message == nil {
		return
	}
	m.closeSet()
	b := m.message
	binary.BigEndian.PutUint16(b, version)
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	binary.BigEndian.PutUint32(b[4:], uint32(m.now.Unix()))
	binary.BigEndian.PutUint32(b[8:], m.e.sequence)
	binary.BigEndian.PutUint32(b[12:], m.e.domain)
	m.e.sequence += m.records
	m.done, m.message, m.records = append(m.done, b), nil, 0
}

// appendTemplate writes a template record (RFC 7011 3.4.1).
func appendTemplate(b []byte, t Template) []byte {
	b = binary.BigEndian.AppendUint16(b, t.ID)
	b = binary.BigEndian.AppendUint16(b, uint16(len(t.Fields)))
	for _, f := range t.Fields {
		id := f.ID
		if f.Enterprise != 0 {
			id |= enterpriseField
		}
		b = binary.BigEndian.AppendUint16(b, id)
		b = binary.BigEndian.AppendUint16(b, lengths[f.Type])
		if f.Enterprise != 0 {
			b = binary.BigEndian.AppendUint32(b, f.Enterprise)
		}
	}
	return b
}

func appendRecord(b []byte, t Template, values []any) ([]byte, error) {
	if len(values) != len(t.Fields) {
		return nil, fmt.Errorf("%d values for %d elements", len(values), len(t.Fields))
	}
	for i, f := range t.Fields {
		var err error
		if b, err = appendValue(b, f.Type, values[i]); err != nil {
			return nil, fmt.Errorf("element %d: %w", f.ID, err)
		}
	}
	return b, nil
}

func appendValue(b []byte, t Type, value any) ([]byte, error) {
	switch v := value.(type) {
	case uint64:
		n := lengths[t]
		if t > Unsigned64 || n < 8 && v>>(8*n) != 0 {
			return nil, fmt.Errorf("%d is not in its range", v)
		}
		for ; n > 0; n-- {
			b = append(b, byte(v>>(8*(n-1))))
		}
		return b, nil
	case time.Time:
		if t == Milliseconds {
			return binary.BigEndian.AppendUint64(b, uint64(v.UnixMilli())), nil
		}
	case netip.Addr:
		if t == IPv6Address && v.Is6() {
			return append(b, v.AsSlice()...), nil
		}
	case string:
		switch {
		case t != String:
		case len(v) > 0xffff:
			return nil, errors.New("the string is too long")
		case len(v) >= longString: // RFC 7011 7, figure S
			b = append(b, longString)
			return append(binary.BigEndian.AppendUint16(b, uint16(len(v))), v...), nil
		default:
			return append(append(b, byte(len(v))), v...), nil
		}
	}
	return nil, fmt.Errorf("%T is not of its type", value)
}
