package ipfix

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"
	"time"
)

var templates = []Template{
	{ID: 256, Fields: []Element{{ID: 2, Type: Unsigned64}, {ID: 89, Type: Unsigned8}, {ID: 27, Type: IPv6Address}, {ID: 96, Type: String}}},
	{ID: 257, Fields: []Element{{ID: 1, Enterprise: 32473, Type: String}, {ID: 152, Type: Milliseconds}, {ID: 502, Type: Unsigned16}, {ID: 149, Type: Unsigned32}}},
}

// The bytes of two messages, written out by hand from RFC 7011 3.1 to 3.4 and 7.
func TestAMessageIsWhatTheRFCSays(t *testing.T) {
	e, err := NewExporter(0x01020304, 1232, templates)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(0x10203040, 0)
	records := []Record{
		{Template: 0, Values: []any{uint64(3), uint64(64), netip.MustParseAddr("fc00::1"), "web"}},
		{Template: 1, Values: []any{"", time.UnixMilli(0x1122), uint64(20), uint64(7)}},
		{Template: 1, Values: []any{"ab", time.UnixMilli(1), uint64(1), uint64(8)}},
	}
	const sets = "0002 0030" + // a template set
		"0100 0004 0002 0008 0059 0001 001b 0010 0060 ffff" +
		"0101 0004 8001 ffff 0000 7ed9 0098 0008 01f6 0002 0095 0004" +
		"0100 0021" + "0000000000000003 40 fc000000000000000000000000000001 03 776562" +
		"0101 0024" + "00 0000000000001122 0014 00000007" + "02 6162 0000000000000001 0001 00000008"
	for i, sequence := range []string{"00000000", "00000003"} {
		got, err := e.Messages(at, records)
		if err != nil || len(got) != 1 {
			t.Fatal(got, err)
		}
		want, err := hex.DecodeString(strings.ReplaceAll("000a 0085 10203040"+sequence+"01020304"+sets, " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got[0], want) {
			t.Errorf("message %d is\n%x, want\n%x", i, got[0], want)
		}
	}
}

// Many records need several messages, none of which is too long, and their sequence numbers count records.
func TestRecordsAreSplitOverMessages(t *testing.T) {
	const size, many = 400, 100
	e, err := NewExporter(1, size, templates)
	if err != nil {
		t.Fatal(err)
	}
	e.sequence = 0xffffffff - 40 // goes round
	var records []Record
	for i := range many {
		records = append(records, Record{Template: i % 2, Values: [][]any{
			{uint64(i), uint64(64), netip.IPv6Unspecified(), strings.Repeat("x", i)}, {"", time.Time{}, uint64(0), uint64(i)},
		}[i%2]})
	}
	sequence := e.sequence
	messages, err := e.Messages(time.Unix(0, 0), records)
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	for _, m := range messages {
		if len(m) > size || int(binary.BigEndian.Uint16(m[2:])) != len(m) || binary.BigEndian.Uint32(m[8:]) != sequence {
			t.Fatalf("a message of %d bytes: %x; its sequence number should be %x", len(m), m, sequence)
		}
		for set := m[headerSize:]; len(set) > 0; set = set[binary.BigEndian.Uint16(set[2:]):] {
			fields := set[setHeaderSize:binary.BigEndian.Uint16(set[2:])]
			for id := binary.BigEndian.Uint16(set); id >= firstTemplate && len(fields) > 0; total++ {
				if id == 256 {
					fields = fields[8+1+16+1+int(fields[25]):]
				} else {
					fields = fields[1+8+2+4:]
				}
				sequence++
			}
		}
	}
	if total != many || e.sequence != sequence || len(messages) < 10 {
		t.Errorf("%d records in %d messages; the next number is %x, want %x", total, len(messages), e.sequence, sequence)
	}
}

// RFC 7011 7, figures R and S: from 255 bytes on the length takes three.
func TestLongStringsHaveALongLength(t *testing.T) {
	for n, want := range map[int]string{0: "00", 254: "fe", 255: "ff00ff", 1000: "ff03e8"} {
		b, err := appendValue(nil, String, strings.Repeat("x", n))
		if err != nil || hex.EncodeToString(b[:len(want)/2]) != want || len(b) != len(want)/2+n {
			t.Errorf("%d: %x, %v", n, b[:4], err)
		}
	}
}

func TestWhatCannotBeEncodedIsRefused(t *testing.T) {
	for what, all := range map[string][]Template{
		"below 256, or there twice":    {{ID: 255}},
		"or there twice":               {{ID: 300}, {ID: 300}},
		"element 5 has no type":        {{ID: 300, Fields: []Element{{ID: 5}}}},
		"element 40000 has no type, o": {{ID: 300, Fields: []Element{{ID: 40000, Type: String}}}},
		"needs a message of":           {{ID: 300, Fields: make([]Element, 0, 1)}, {ID: 301, Fields: wide(300)}},
	} {
		if _, err := NewExporter(1, 500, all); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%q: %v", what, err)
		}
	}
	e, err := NewExporter(1, 200, templates)
	if err != nil {
		t.Fatal(err)
	}
	good := []any{"", time.Time{}, uint64(0), uint64(0)}
	with := func(i int, v any) []any {
		all := append([]any(nil), good...)
		all[i] = v
		return all
	}
	for what, r := range map[string]Record{
		"there is no template 2":                          {Template: 2},
		"record of template 257: 1 values for 4 elements": {Template: 1, Values: []any{""}},
		"element 502: 65536 is not in its range":          {Template: 1, Values: with(2, uint64(65536))},
		"element 1: 7 is not in its range":                {Template: 1, Values: with(0, uint64(7))},
		"element 149: string is not of its type":          {Template: 1, Values: with(3, "x")},
		"element 152: netip.Addr is not of its type":      {Template: 1, Values: with(1, netip.IPv6Unspecified())},
		"element 502: int is not of its type":             {Template: 1, Values: with(2, 3)},
		"element 27: netip.Addr is not of its type":       {Template: 0, Values: []any{uint64(0), uint64(0), netip.MustParseAddr("192.0.2.1"), ""}},
		"the string is too long":                          {Template: 1, Values: with(0, strings.Repeat("x", 70000))},
		"needs a message of 236 bytes, more than 200":     {Template: 1, Values: with(0, strings.Repeat("x", 201))},
	} {
		sequence := e.sequence
		if _, err := e.Messages(time.Unix(0, 0), []Record{{Template: 1, Values: good}, r}); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%q: %v", what, err)
		}
		if e.sequence != sequence {
			t.Errorf("%q: %d records count as sent", what, e.sequence-sequence)
		}
	}
}

func wide(n int) (all []Element) {
	for i := range n {
		all = append(all, Element{ID: uint16(i + 1), Type: Unsigned8})
	}
	return all
}
