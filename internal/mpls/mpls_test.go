package mpls_test

import (
	"bytes"
	"encoding/hex"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/mpls"
)

// Three visits: r2 at 16002, r3 at 16003, r6 at 16006.
var visits = []mpls.Visit{{Node: 16002, Service: 100512}, {Node: 16003, Service: 100768}, {Node: 16006, Service: 101536}}

func isService(label uint32) bool { return label >= 100000 && label < 165536 }

func entries(t *testing.T, words string) []mpls.Entry {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(words, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	p, err := mpls.Parse(b, func(uint32) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	return p.Stack
}

func TestLengthOfOuterHeaders(t *testing.T) {
	for visits, want := range map[int]int{1: 44, 3: 60, 16: 164} {
		if got := mpls.OuterLen(visits); got != want {
			t.Errorf("%d visits: %d bytes; want %d", visits, got, want)
		}
	}
}

// RFC 3032 section 2.1: label 20 bits, traffic class 3, bottom 1, TTL 8.
func TestEntryIsThatOfRFC3032(t *testing.T) {
	e := mpls.NewEntry(16002, 5, true, 64)
	if e != 0x03e82b40 {
		t.Errorf("entry is 0x%08x; want 0x03e82b40", uint32(e))
	}
	if e.Label() != 16002 || e.TC() != 5 || !e.Bottom() || e.TTL() != 64 {
		t.Errorf("read back: %s", e)
	}
	if got := e.WithLabel(1<<20 - 1).WithTTL(255).WithBottom(false); got != 0xfffffaff {
		t.Errorf("changed: 0x%08x; want 0xfffffaff", uint32(got))
	}
}

func TestStackLeadsFromVisitToVisit(t *testing.T) {
	stack := mpls.Stack(visits, 0x12345, 0, 64)
	want := entries(t, "03e82040 00007040 12345000 188a0040 03e83040 189a0040 03e86040 18ca0140")
	if !slices.Equal(stack, want) {
		t.Fatalf("at the headend: %v\nwant %v", stack, want)
	}
	if len(stack)*mpls.EntryLen != mpls.Len(len(visits)) {
		t.Errorf("%d entries; Len says %d bytes", len(stack), mpls.Len(len(visits)))
	}
	for _, c := range []struct{ at, want string }{
		{"behind the first hop", "03e8303f 00007040 12345000 189a003f 00007040 12345000 03e86040 18ca0140"},
		{"behind the second hop", "03e8603e 00007040 12345000 18ca003e 00007040 12345000 00007040 12345100"},
	} {
		var ok bool
		if stack, ok = mpls.Advance(stack); !ok || !slices.Equal(stack, entries(t, c.want)) {
			t.Fatalf("%s: %v, %v\nwant %v", c.at, stack, ok, entries(t, c.want))
		}
	}
	if _, ok := mpls.Advance(stack); ok {
		t.Error("the egress finds a visit behind its own")
	}
	if got := (mpls.Packet{Stack: stack}).Labels(); !slices.Equal(got, []uint32{16006, 101536}) {
		t.Errorf("labels at the egress: %v; want 16006 101536", got)
	}
}

func TestStackDoesNotAdvanceWithoutTTLOrTop(t *testing.T) {
	stack := mpls.Stack(visits, 99, 0, 64)
	spent := slices.Clone(stack)
	spent[3] = spent[3].WithTTL(1)
	for name, s := range map[string][]mpls.Entry{"TTL 1 of the service": spent, "top popped": stack[1:], "nothing": nil, "one visit": mpls.Stack(visits[:1], 99, 0, 64)} {
		if _, ok := mpls.Advance(s); ok {
			t.Errorf("%s: advances", name)
		}
	}
}

func TestOuterIsStackWordAndProof(t *testing.T) {
	proof := [mpls.ProofLen]byte{252, 22, 2, 7}
	b, err := mpls.Outer(visits[:1], proof)
	if err != nil {
		t.Fatal(err)
	}
	want, _ := hex.DecodeString("03e82040" + "00007040" + "00000000" + "188a0140" + "00000029" + "fc160207" + strings.Repeat("00", 20))
	if !bytes.Equal(b, want) {
		t.Errorf("is   %x\nwant %x", b, want)
	}
	if len(b) != mpls.OuterLen(1) {
		t.Errorf("%d bytes; OuterLen says %d", len(b), mpls.OuterLen(1))
	}
	for name, v := range map[string][]mpls.Visit{"none": nil, "special": {{Node: 15, Service: 100512}}, "too large": {{Node: 16002, Service: 1 << 20}}} {
		if _, err := mpls.Outer(v, proof); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestParseReadsWhatAppendWrote(t *testing.T) {
	p := mpls.Packet{
		Ethernet: &mpls.Ethernet{Destination: [6]byte{2, 0, 0, 0, 0, 1}, Source: [6]byte{2, 0, 0, 0, 0, 2}, Type: mpls.EtherTypeUnicast},
		Stack:    mpls.Stack(visits, 77, 3, 9), Word: &mpls.Word{Flags: mpls.FlagTrace, NextHeader: mpls.NextHeaderIPv4},
		Proof: &[mpls.ProofLen]byte{252, 22}, Payload: []byte{0x45, 0},
	}
	frame := p.Append(nil)
	got, err := mpls.ParseFrame(frame, isService)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Append(nil), frame) || got.Word == nil || *got.Word != *p.Word || *got.Proof != *p.Proof || !bytes.Equal(got.Payload, p.Payload) {
		t.Errorf("read back: %+v", got)
	}
	if e, ok := got.Entropy(); !ok || e != 77 {
		t.Errorf("entropy label %d, %v; want 77", e, ok)
	}
	if l := got.Labels(); !slices.Equal(l, []uint32{16002, 100512, 16003, 100768, 16006, 101536}) {
		t.Errorf("labels %v", l)
	}
	// Without a service label the rest is payload: somebody else's packet.
	if got, err := mpls.ParseFrame(frame, func(uint32) bool { return false }); err != nil || got.Word != nil || got.Proof != nil || len(got.Payload) != mpls.WordLen+mpls.ProofLen+2 {
		t.Errorf("of others: %+v, %v", got, err)
	}
}

// An entropy label may have the number of a service label.
func TestEntropyLabelIsNoService(t *testing.T) {
	b := mpls.Packet{Stack: []mpls.Entry{mpls.NewEntry(mpls.LabelEntropy, 0, false, 1), mpls.NewEntry(100512, 0, true, 0)}, Payload: []byte{1}}.Append(nil)
	p, err := mpls.Parse(b, isService)
	if err != nil || p.Word != nil || len(p.Payload) != 1 {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestParseSaysWhatIsWrong(t *testing.T) {
	proof := [mpls.ProofLen]byte{252, 22}
	whole, err := mpls.Outer(visits[:1], proof)
	if err != nil {
		t.Fatal(err)
	}
	word := mpls.Len(1)
	ip := bytes.Clone(whole)
	ip[word] = 0x40
	endless := bytes.Repeat([]byte{0x03, 0xe8, 0x20, 0x40}, mpls.EntriesMax+1)
	for _, c := range []struct {
		name string
		b    []byte
		want string
	}{
		{"nothing", nil, "byte 0 (label stack): an entry needs 4 bytes, 0 are left"},
		{"cut off in the stack", whole[:7], "byte 4 (label stack): an entry needs 4 bytes, 3 are left"},
		{"cut off in the word", whole[:word+3], "byte 16 (word): needs 4 bytes, 3 are left"},
		{"cut off in the proof", whole[:len(whole)-1], "byte 20 (proof): needs 24 bytes, 23 are left"},
		{"IP behind a service label", ip, "byte 16 (word): its first four bits are 4, not 0"},
		{"no bottom", endless, "byte 160 (label stack): none of 40 entries is the bottom"},
	} {
		if _, err := mpls.Parse(c.b, isService); err == nil || err.Error() != c.want {
			t.Errorf("%s: %v; want %s", c.name, err, c.want)
		}
	}
	if _, err := mpls.ParseFrame(append(make([]byte, 12), 0x86, 0xdd), isService); err == nil || !strings.Contains(err.Error(), "EtherType") {
		t.Errorf("an IPv6 frame: %v", err)
	}
	if _, err := mpls.ParseFrame(make([]byte, 13), isService); err == nil || !strings.Contains(err.Error(), "Ethernet header") {
		t.Errorf("13 bytes: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	proof := [mpls.ProofLen]byte{252, 22}
	for n := range visits {
		b, err := mpls.Outer(visits[:n+1], proof)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(make([]byte, 12), append([]byte{0x88, 0x47}, b...)...))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := mpls.ParseFrame(b, isService)
		p.Labels()
		p.Entropy()
		if next, ok := mpls.Advance(p.Stack); ok && len(next) != len(p.Stack) {
			t.Errorf("a stack of %d entries has %d behind a hop", len(p.Stack), len(next))
		}
		if err != nil {
			return
		}
		if again := p.Append(nil); !bytes.Equal(again, b) {
			t.Errorf("written again: %x\nwas           %x", again, b)
		}
	})
}
