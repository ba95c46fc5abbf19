package srv6_test

import (
	"encoding/binary"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// The shape of the vector in the kernel's srv6_end_next_csid_l3vpn_test.sh, whose
// block has 32 bits, with a block of 48.
func TestShiftIsThatOfTheKernelsSelftest(t *testing.T) {
	for from, want := range map[string]string{
		"fcbb:0:1:400:300:200:d46:0":  "fcbb:0:1:300:200:d46::",
		"fcbb:0:1:300:200:d46::":      "fcbb:0:1:200:d46::",
		"fcbb:0:1:d46:1::":            "fcbb:0:1:1::",
		"fcbb:0:1:400:0:0:0:d46":      "fcbb:0:1::d46:0",
		"ffff:ffff:ffff:1:2:3:4:ffff": "ffff:ffff:ffff:2:3:4:ffff:0",
	} {
		got, ok := srv6.Shift(netip.MustParseAddr(from))
		if !ok || got.String() != want {
			t.Errorf("%s becomes %s, %t; want %s", from, got, ok, want)
		}
	}
	if got, ok := srv6.Shift(netip.MustParseAddr("fcbb:0:1:d46::")); ok {
		t.Errorf("an address without argument became %s", got)
	}
}

// Against RFC 9800 4.1 as arithmetic on a number of 128 bits: LBL 48, LNFL 16.
func TestShiftIsAMultiplication(t *testing.T) {
	const al = 128 - 48 - 16
	bits := func(n uint) *big.Int { return new(big.Int).Lsh(big.NewInt(1), n) }
	rapid.Check(t, func(t *rapid.T) {
		b := [16]byte(rapid.SliceOfN(rapid.SampledFrom([]byte{0, 0, 0, 1, 0x80, 0xff, 0x5a}), 16, 16).Draw(t, "address"))
		from := new(big.Int).SetBytes(b[:])
		argument := new(big.Int).Mod(from, bits(al))
		block := new(big.Int).Rsh(from, 80)
		want := new(big.Int).Add(new(big.Int).Lsh(block, 80), new(big.Int).Lsh(argument, 16))

		got, ok := srv6.Shift(netip.AddrFrom16(b))
		if ok != (argument.Sign() != 0) {
			t.Fatalf("%s: shifted %t with argument %x", netip.AddrFrom16(b), ok, argument)
		}
		a := got.As16()
		if ok && new(big.Int).SetBytes(a[:]).Cmp(want) != 0 {
			t.Fatalf("%s becomes %s, want %x", netip.AddrFrom16(b), got, want)
		}
	})
}

func drawSIDs(t *rapid.T) []netip.Addr {
	block := [8]byte(rapid.SliceOfN(rapid.Byte(), 8, 8).Draw(t, "block"))
	var sids []netip.Addr
	for _, csid := range rapid.SliceOfN(rapid.Uint16Range(1, 0xffff), 1, 40).Draw(t, "C-SIDs") {
		b := [16]byte{}
		copy(b[:], block[:6])
		binary.BigEndian.PutUint16(b[6:], csid)
		sids = append(sids, netip.AddrFrom16(b))
	}
	return sids
}

func TestCompressLosesNothing(t *testing.T) {
	block := netip.MustParsePrefix("::/0")
	rapid.Check(t, func(t *rapid.T) {
		sids := drawSIDs(t)
		containers := srv6.Compress(sids)
		if got := srv6.Uncompress(containers); !slices.Equal(got, sids) {
			t.Fatalf("%s came back as %s", sids, got)
		}
		for _, c := range containers {
			if err := model.CheckContainer(block, c); err != nil {
				t.Fatalf("%s %v", c, err)
			}
		}
		e := model.Encapsulation{SIDs: model.SIDsCompressed}
		if len(containers) != srv6.Entries(e, len(sids)) {
			t.Fatalf("%d containers for %d SIDs; Entries says %d", len(containers), len(sids), srv6.Entries(e, len(sids)))
		}
	})
}

// walk is a packet's way by its headers alone: RFC 8986 4.1 and RFC 9800 4.1.
func walk(first netip.Addr, s *srv6.SRH, compressed bool) []netip.Addr {
	at, left := first, int(s.SegmentsLeft)
	var visits []netip.Addr
	for {
		b := at.As16()
		clear(b[8:])
		visits = append(visits, netip.AddrFrom16(b))
		if next, ok := srv6.Shift(at); ok && compressed {
			at = next
			continue
		}
		if left == 0 {
			return visits
		}
		left--
		at = s.Segments[left]
	}
}

// In all four forms of encapsulation the headers lead the same way.
func TestEncapsulateLeadsAllTheWay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sids := drawSIDs(t)
		e := model.Encapsulation{
			SIDs:    rapid.SampledFrom([]model.SIDs{model.SIDsPlain, model.SIDsCompressed}).Draw(t, "SIDs"),
			Reduced: rapid.Bool().Draw(t, "reduced"),
		}
		segments := sids
		if e.SIDs == model.SIDsCompressed {
			segments = srv6.Compress(sids)
		}
		first, srh := srv6.Encapsulate(segments, e)
		if got := walk(first, srh, e.SIDs == model.SIDsCompressed); !slices.Equal(got, sids) {
			t.Fatalf("%v: %s leads to %s", e, sids, got)
		}
		if n := len(srh.Segments); n != srv6.Entries(e, len(sids)) || n == 0 {
			t.Fatalf("%v: %d entries for %d SIDs; want %d", e, n, len(sids), srv6.Entries(e, len(sids)))
		}
		// RFC 8754 4.3.1.1: what a receiver takes.
		if left := int(srh.SegmentsLeft); left > len(srh.Segments) {
			t.Fatalf("%v: Segments Left is %d with %d entries", e, left, len(srh.Segments))
		}
	})
}

func ExampleCompress() {
	for _, c := range srv6.Compress(addrs("fc00:0:0:201::", "fc00:0:0:301::", "fc00:0:0:202::", "fc00:0:0:302::", "fc00:0:0:203::", "fc00:0:0:601::")) {
		fmt.Println(c)
	}
	// Output:
	// fc00::201:301:202:302:203
	// fc00:0:0:601::
}
