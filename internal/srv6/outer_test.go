package srv6_test

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

func TestOuterLenIsThatOfTheHeaders(t *testing.T) {
	// IPv6 40, SRH 8 and 16 for each segment, proof TLV 24.
	for segments, want := range map[int]int{1: 88, 3: 120, 16: 328} {
		if got := srv6.OuterLen(segments); got != want {
			t.Errorf("%d segments: %d; want %d", segments, got, want)
		}
	}
}

func TestEntriesOfASegmentList(t *testing.T) {
	for _, c := range []struct {
		is                   model.Encapsulation
		one, five, six, most int
	}{
		{model.Encapsulation{}, 1, 5, 6, 16},
		{model.Encapsulation{Reduced: true}, 1, 4, 5, 15},
		{model.Encapsulation{SIDs: model.SIDsCompressed}, 1, 1, 2, 4},
		{model.Encapsulation{SIDs: model.SIDsCompressed, Reduced: true}, 1, 1, 1, 3},
	} {
		for visits, want := range map[int]int{1: c.one, 5: c.five, 6: c.six, model.SegmentsMax: c.most} {
			if got := srv6.Entries(c.is, visits); got != want {
				t.Errorf("%s: %d entries for %d visits; want %d", c.is, got, visits, want)
			}
		}
	}
}

// What a headend puts before a packet, and what others read of that packet.
func TestOuterHeadersSayWhereAndWhat(t *testing.T) {
	source, segments := netip.MustParseAddr("fc00:1::1"), []netip.Addr{
		netip.MustParseAddr("fc00:0:0:200::"), netip.MustParseAddr("fc00:0:0:300::"), netip.MustParseAddr("fc00:0:0:600::"),
	}
	proof := srv6.Proof{Scheme: model.SchemeKeyed, Epoch: 3, Path: 0xf2b9a3b7, RND: 5, CML: 7}
	for _, reduced := range []bool{false, true} {
		e := model.Encapsulation{Reduced: reduced}
		b, err := srv6.Outer(source, segments, e, proof)
		if err != nil {
			t.Fatal(err)
		}
		want := segments
		if reduced {
			want = segments[1:]
		}
		p, err := srv6.Decode(b)
		if err != nil || len(b) != srv6.OuterLen(srv6.Entries(e, len(segments))) {
			t.Fatalf("reduced %v: %d bytes: %v", reduced, len(b), err)
		}
		if !p.Encapsulated() || p.AtLast() || !slices.Equal(p.Carried(), want) || p.Header.HopLimit != srv6.HopLimit ||
			p.Header.Source != source || p.Header.Destination != segments[0] {
			t.Errorf("reduced %v: %+v %+v", reduced, p.Header, p.SRH)
		}
		if got := srv6.Carried(segments, e); !slices.Equal(got, want) {
			t.Errorf("reduced %v: carried %v; want %v", reduced, got, want)
		}
		if got := srv6.OnWire(segments, e); !slices.Equal(got, p.SRH.Segments) {
			t.Errorf("reduced %v: on the wire %v; want %v", reduced, got, p.SRH.Segments)
		}
	}

	inner := append([]byte{0x45, 0, 0, 24, 0, 0, 0, 0, 64, 17, 0, 0}, 192, 0, 2, 1, 192, 0, 2, 2, 0, 53, 0, 54)
	frame, err := srv6.Wrap(source, segments[:1], proof, srv6.NextHeaderIPv4, inner)
	if err != nil {
		t.Fatal(err)
	}
	p, err := srv6.DecodeFrame(frame)
	if err != nil || !p.AtLast() || !bytes.Equal(p.Payload, inner) {
		t.Errorf("%+v, %v; want the packet on its way to the last segment", p, err)
	}
	if got, ok := p.Proof(); !ok || got != proof {
		t.Errorf("proof %+v, %v; want %+v", got, ok, proof)
	}
	if f, ok := p.InnerFlow(); !ok || f.SourcePort != 53 || f.Protocol != 17 {
		t.Errorf("flow %+v, %v; want port 53 of UDP", f, ok)
	}
	if _, err := srv6.Wrap(source, nil, proof, srv6.NextHeaderIPv4, inner); err == nil {
		t.Error("a packet without segments is made")
	}
	var plain srv6.Packet
	if _, ok := plain.InnerFlow(); ok || plain.Encapsulated() || plain.AtLast() || plain.Carried() != nil {
		t.Error("a plain packet is taken for an encapsulated one")
	}
}
