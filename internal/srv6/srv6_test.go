package srv6_test

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/test/packets"
)

var equal = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmpopts.EquateEmpty(),
}

func frame(t testing.TB, name string) []byte {
	t.Helper()
	p, err := packets.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return p.Frame
}

func addrs(s ...string) []netip.Addr {
	var a []netip.Addr
	for _, x := range s {
		a = append(a, netip.MustParseAddr(x))
	}
	return a
}

func TestDecodeReadsEveryFieldOfScapysPacket(t *testing.T) {
	p, err := srv6.DecodeFrame(frame(t, "fields-kept"))
	if err != nil {
		t.Fatal(err)
	}
	want := srv6.Packet{
		Ethernet: &srv6.Ethernet{Destination: [6]byte{2, 0, 0, 0, 0, 2}, Source: [6]byte{2, 0, 0, 0, 0, 1}, Type: 0x86dd},
		Header: srv6.Header{
			TrafficClass: 0xb9, FlowLabel: 0xfffff, PayloadLength: 136, NextHeader: 43, HopLimit: 63,
			Source: netip.MustParseAddr("fc00:1::1"), Destination: netip.MustParseAddr("fc00:0:0:201::"),
		},
		SRH: &srv6.SRH{
			NextHeader: 41, SegmentsLeft: 2, Flags: 0x2a, Tag: 0xbeef,
			Segments: addrs("fc00:0:0:601::", "fc00:0:0:301::", "fc00:0:0:201::"),
			TLVs:     []srv6.TLV{{Type: 252, Value: p.SRH.TLVs[0].Value}},
		},
		Payload: p.Payload,
	}
	if diff := cmp.Diff(want, p, equal); diff != "" {
		t.Errorf("packet (-want +got):\n%s", diff)
	}
	proof, err := p.SRH.Proof()
	if err != nil {
		t.Fatal(err)
	}
	wantProof := srv6.Proof{Scheme: model.SchemeKeyed, Epoch: 1, Path: 0x5eed0001, RND: 5<<48 | 7, CML: proof.CML}
	if proof != wantProof {
		t.Errorf("proof %+v, want %+v", proof, wantProof)
	}
	if diff := cmp.Diff(addrs("fc00:0:0:201::", "fc00:0:0:301::", "fc00:0:0:601::"), p.SRH.Visit(), equal); diff != "" {
		t.Errorf("order of the visit (-want +got):\n%s", diff)
	}
	inner, payload, err := p.Inner()
	if err != nil {
		t.Fatal(err)
	}
	wantInner := srv6.Inner{
		Version: 6, Length: 56, NextHeader: 17, HopLimit: 63,
		Source: netip.MustParseAddr("fc00:7::2"), Destination: netip.MustParseAddr("fc00:8::2"),
	}
	if diff := cmp.Diff(wantInner, inner, equal); diff != "" {
		t.Errorf("inner header (-want +got):\n%s", diff)
	}
	if !bytes.HasSuffix(payload, []byte("waystamp")) || len(payload) != 16 {
		t.Errorf("inner payload %q", payload)
	}
}

// All of Scapy's packets are read or refused, and what is read is written back
// as it was.
func TestScapysPacketsComeBackAsTheyWere(t *testing.T) {
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	read := 0
	for _, p := range all {
		d, err := srv6.DecodeFrame(p.Frame)
		if err != nil {
			continue
		}
		read++
		back, err := d.Append(nil)
		if err != nil {
			t.Errorf("%s: %v", p.Name, err)
			continue
		}
		if !bytes.Equal(back, p.Frame) {
			t.Errorf("%s: came back as %x, was %x", p.Name, back, p.Frame)
		}
	}
	if read < len(all)/2 {
		t.Errorf("only %d of %d packets could be read", read, len(all))
	}
}

func TestDecodeSaysWhatIsWrongAndWhere(t *testing.T) {
	// Offsets are those in the frame.
	for name, want := range map[string]string{
		"ipv6-missing":        "byte 14 (IPv6 header): needs 40 bytes, 0 are left",
		"ipv6-truncated":      "byte 14 (IPv6 header): needs 40 bytes, 39 are left",
		"version-4":           "byte 14 (Version): is 4, not 6",
		"ipv4":                "byte 12 (EtherType): is 0x0800, not IPv6's 0x86dd",
		"srh-truncated-7":     "byte 54 (routing header): needs 8 bytes, 7 are left",
		"srh-truncated-8":     "byte 55 (Hdr Ext Len): asks for 80 bytes of header, 8 are left",
		"srh-hdrlen-255":      "byte 55 (Hdr Ext Len): asks for 2048 bytes of header, 136 are left",
		"last-entry-3":        "byte 58 (Last Entry): is 3, but Hdr Ext Len has room for 3 segments",
		"hdrlen-0":            "byte 58 (Last Entry): is 0, but Hdr Ext Len has room for 0 segments",
		"segments-left-4":     "byte 57 (Segments Left): is 4, beyond Last Entry + 1 = 3",
		"tlv-overrun":         "byte 111 (TLV Length): of type 252 is 22, 14 bytes are left in the header",
		"tlv-overrun-type":    "byte 141 (TLV): type 252 has no length: the header ends",
		"tlv-overrun-foreign": "byte 135 (TLV Length): of type 128 is 7, 6 bytes are left in the header",
	} {
		_, err := srv6.DecodeFrame(frame(t, name))
		if err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", name, err, want)
		}
	}
}

func TestDecodeReturnsWhatItReadBeforeAnError(t *testing.T) {
	p, err := srv6.DecodeFrame(frame(t, "tlv-overrun-foreign"))
	if err == nil {
		t.Fatal("no error")
	}
	if p.SRH == nil || len(p.SRH.Segments) != 3 {
		t.Fatalf("the segment list is lost: %+v", p.SRH)
	}
	if _, err := p.SRH.Proof(); err != nil {
		t.Errorf("the proof before the broken TLV is lost: %v", err)
	}
	if p, err := srv6.DecodeFrame(frame(t, "srh-truncated-8")); err == nil || p.Header.Destination != netip.MustParseAddr("fc00:0:0:201::") {
		t.Errorf("the IPv6 header is lost: %+v", p.Header)
	}
}

func TestDecodeKeepsNoReference(t *testing.T) {
	b := bytes.Clone(frame(t, "foreign-before-2"))
	p, err := srv6.DecodeFrame(b)
	if err != nil {
		t.Fatal(err)
	}
	q, err := srv6.DecodeFrame(bytes.Clone(b))
	if err != nil {
		t.Fatal(err)
	}
	clear(b)
	if diff := cmp.Diff(q, p, equal); diff != "" {
		t.Errorf("the packet changed with the bytes given (-want +got):\n%s", diff)
	}
}

func TestOtherRoutingHeadersAreNotSRHs(t *testing.T) {
	p, err := srv6.DecodeFrame(frame(t, "routing-type-2"))
	if err != nil || p.SRH != nil {
		t.Errorf("routing type 2: SRH %v, error %v", p.SRH, err)
	}
	if p, err = srv6.DecodeFrame(frame(t, "options-routing-type")); err != nil || p.SRH != nil || p.Options != nil {
		t.Errorf("routing type 2 behind options: SRH %v, options %x, error %v", p.SRH, p.Options, err)
	}
}

func TestInnerRefuses(t *testing.T) {
	for name, want := range map[string]string{
		"inner-truncated-39": "the inner IPv6 header needs 40 bytes, 39 are left",
		"inner-version-4":    "the inner packet's version is 4, not 6",
		"no-srh-udp":         "next header 17 is not an IP packet (4 or 41)",
	} {
		p, err := srv6.DecodeFrame(frame(t, name))
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err = p.Inner(); err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", name, err, want)
		}
	}
}

func TestProofRefuses(t *testing.T) {
	for name, want := range map[string]string{
		"tlv-missing":   "no proof TLV (type 252)",
		"tlv-length-21": "proof TLV has length 21, not 22",
	} {
		p, err := srv6.DecodeFrame(frame(t, name))
		if err != nil {
			t.Fatal(err)
		}
		if _, err = p.SRH.Proof(); err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", name, err, want)
		}
	}
	if _, err := srv6.ParseProof(srv6.TLV{Type: 124, Value: make([]byte, 22)}); err == nil {
		t.Error("a TLV of type 124 was taken for a proof")
	}
}

func TestAppendRefusesWhatNoHeaderCanTell(t *testing.T) {
	one := addrs("fc00::")
	header := srv6.Header{Source: one[0], Destination: one[0]}
	for want, p := range map[string]srv6.Packet{
		"SRH without segments":       {Header: header, SRH: &srv6.SRH{}},
		"add 7 bytes of padding":     {Header: header, SRH: &srv6.SRH{Segments: one, TLVs: []srv6.TLV{{}}}},
		"is Pad1 and has a value":    {Header: header, SRH: &srv6.SRH{Segments: one, TLVs: []srv6.TLV{{Value: []byte{1}}}}},
		"its length field ends at":   {Header: header, SRH: &srv6.SRH{Segments: one, TLVs: []srv6.TLV{{Type: 1, Value: make([]byte, 256)}}}},
		"longer than the 2048":       {Header: header, SRH: &srv6.SRH{Segments: make([]netip.Addr, 128)}},
		"more than 20 bits":          {Header: srv6.Header{FlowLabel: 1 << 20, Source: one[0], Destination: one[0]}},
		"source 192.0.2.1 is not an": {Header: srv6.Header{Source: netip.MustParseAddr("192.0.2.1"), Destination: one[0]}},
		"destination invalid IP is":  {Header: srv6.Header{Source: one[0]}},
		"segment 0, invalid IP, is ": {Header: header, SRH: &srv6.SRH{Segments: make([]netip.Addr, 1)}},
	} {
		if _, err := p.Append(nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	long := srv6.Packet{Header: header, Payload: make([]byte, 0x10000)}
	if err := long.Fix(); err == nil {
		t.Error("a payload of 65536 bytes was accepted")
	}
}

func drawAddr(t *rapid.T, label string) netip.Addr {
	return netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, label)))
}

func drawPacket(t *rapid.T) srv6.Packet {
	p := srv6.Packet{
		Header: srv6.Header{
			TrafficClass: rapid.Byte().Draw(t, "traffic class"),
			FlowLabel:    rapid.Uint32Range(0, 0xfffff).Draw(t, "flow label"),
			NextHeader:   rapid.SampledFrom([]uint8{6, 17, 41, 59}).Draw(t, "next header"),
			HopLimit:     rapid.Byte().Draw(t, "hop limit"),
			Source:       drawAddr(t, "source"),
			Destination:  drawAddr(t, "destination"),
		},
		Payload: rapid.SliceOf(rapid.Byte()).Draw(t, "payload"),
	}
	if rapid.Bool().Draw(t, "with Ethernet") {
		p.Ethernet = &srv6.Ethernet{Type: srv6.EtherTypeIPv6}
		copy(p.Ethernet.Source[:], rapid.SliceOfN(rapid.Byte(), 6, 6).Draw(t, "MAC"))
	}
	if rapid.Bool().Draw(t, "with SRH") {
		n := rapid.IntRange(1, 20).Draw(t, "segments")
		s := &srv6.SRH{
			NextHeader:   rapid.Byte().Draw(t, "SRH next header"),
			SegmentsLeft: rapid.Uint8Range(0, uint8(n)).Draw(t, "segments left"),
			Flags:        rapid.Byte().Draw(t, "flags"),
			Tag:          rapid.Uint16().Draw(t, "tag"),
		}
		for range n {
			s.Segments = append(s.Segments, drawAddr(t, "segment"))
		}
		size := 0
		for range rapid.IntRange(0, 4).Draw(t, "TLVs") {
			v := srv6.TLV{Type: rapid.Byte().Draw(t, "type")}
			if v.Type != srv6.TLVPad1 {
				v.Value = rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "value")
				size++
			}
			size += 1 + len(v.Value)
			s.TLVs = append(s.TLVs, v)
		}
		for ; size%8 != 0; size++ {
			s.TLVs = append(s.TLVs, srv6.TLV{})
		}
		p.SRH = s
	}
	return p
}

func TestEveryPacketSurvivesTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPacket(t)
		if err := p.Fix(); err != nil {
			t.Fatal(err)
		}
		b, err := p.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		decode := srv6.Decode
		if p.Ethernet != nil {
			decode = srv6.DecodeFrame
		}
		got, err := decode(b)
		if err != nil {
			t.Fatalf("%x: %v", b, err)
		}
		if diff := cmp.Diff(p, got, equal); diff != "" {
			t.Fatalf("packet (-want +got):\n%s", diff)
		}
	})
}

func TestEveryProofSurvivesTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := srv6.Proof{
			Scheme: model.Scheme(rapid.Byte().Draw(t, "scheme")), Epoch: rapid.Byte().Draw(t, "epoch"),
			Path: rapid.Uint32().Draw(t, "path"), RND: rapid.Uint64().Draw(t, "RND"), CML: rapid.Uint64().Draw(t, "CML"),
		}
		got, err := srv6.ParseProof(p.TLV())
		if err != nil || got != p {
			t.Fatalf("got %+v, %v, want %+v", got, err, p)
		}
	})
}

func TestProofTLVIsTheDocumentedLayout(t *testing.T) {
	p := srv6.Proof{Scheme: 2, Epoch: 3, Path: 0x04050607, RND: 0x08090a0b0c0d0e0f, CML: 0x1011121314151617}
	s := srv6.SRH{Segments: addrs("::"), TLVs: []srv6.TLV{p.TLV()}}
	b, err := s.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := hex.EncodeToString(b[24:]), "fc16020304050607"+"08090a0b0c0d0e0f"+"1011121314151617"; got != want {
		t.Errorf("TLV %s, want %s", got, want)
	}
}

// No bytes make the decoder panic; what it accepts it can write back, as it
// was.
func FuzzDecode(f *testing.F) {
	all, err := packets.All()
	if err != nil {
		f.Fatal(err)
	}
	for _, p := range all {
		f.Add(p.Frame)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := srv6.DecodeFrame(b)
		p.Inner() // must not panic
		if p.SRH != nil {
			p.SRH.Proof() // must not panic
		}
		if err != nil {
			return
		}
		back, err := p.Append(nil)
		if err != nil {
			t.Fatalf("decoded, but cannot be written: %v", err)
		}
		if !bytes.Equal(back, b) {
			t.Fatalf("came back as %x, was %x", back, b)
		}
	})
}

// The checksums of UDP and TCP in Scapy's inner packets are those that this package computes.
func TestChecksumsAreThoseOfScapysPackets(t *testing.T) {
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	field := map[uint8]int{6: 16, 17: 6}
	right := map[uint8]int{}
	for _, p := range all {
		d, err := srv6.DecodeFrame(p.Frame)
		if err != nil {
			continue
		}
		inner, b, err := d.Inner()
		at, ok := field[inner.NextHeader]
		if err != nil || !ok || inner.Version != 6 || len(b) < at+2 || srv6.IPv6Len+len(b) != int(inner.Length) {
			continue
		}
		b = bytes.Clone(b)
		want := uint16(b[at])<<8 | uint16(b[at+1])
		b[at], b[at+1] = 0, 0
		if got := srv6.UpperLayerChecksum(inner.Source, inner.Destination, uint32(inner.NextHeader), b); got == want {
			right[inner.NextHeader]++
		} else if p.Name != "inner-long-behind" { // longer in its IP header than in UDP's
			t.Errorf("%s: %#x, want %#x", p.Name, got, want)
		}
	}
	if right[6] < 20 || right[17] < 200 {
		t.Errorf("TCP and UDP by protocol: only %v compared", right)
	}
}
