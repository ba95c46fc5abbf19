package tables_test

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

func wantBytes[T any](t *testing.T, what string, v T, want string) {
	t.Helper()
	want = strings.ReplaceAll(want, " ", "")
	if got := hex.EncodeToString(xtest.BytesOf(&v)); got != want {
		t.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
}

// Every byte written by hand, from abi.h.
func TestKeysLieInMemoryAsTheProgramsReadThem(t *testing.T) {
	wantBytes(t, "hop key", tables.EncodeHopKey(xtest.Addr("fc00:0:0:101::"), 0x01020304, 9), "fc00 0000 0000 0101 01020304 09 000000")
	wantBytes(t, "egress key", abi.EgressKey{Path: abi.BE32(0x01020304), Epoch: 9}, "01020304 09 000000")
	n := xtest.Node()
	cfg, err := tables.EncodeConfig(n)
	if err != nil {
		t.Fatal(err)
	}
	wantBytes(t, "configuration", cfg,
		"fc00000000000000 ffffffffffff0000 fc00000000000100 ffffffffffffff00 5a00000000000000 0000000000000000 0000000000000000"+
			"fc00000100000000 0000000000000001 40420f0000000000 00e1f50500000000 00000000 00000000 00000000 00000000")
}

func TestShareHoldsWhatItsSchemeNeedsAndNoMore(t *testing.T) {
	var k pot.Key
	for i := range k {
		k[i] = byte(i)
	}
	s := pot.Share{Key: k, Polynomial: pot.Polynomial{Prime: 53, Share: 28, Public: 1, LPC: 21, Up: pot.Mask{RND: 1, CML: 2}, Down: pot.Mask{RND: 3, CML: 4}}}
	got, err := tables.EncodeShare(s, model.SchemeKeyed)
	if want := (abi.Share{Key: [2]uint64{0x0706050403020100, 0x0f0e0d0c0b0a0908}}); err != nil || got != want {
		t.Errorf("keyed: %+v, %v; want the key's little-endian words alone", got, err)
	}
	got, err = tables.EncodeShare(s, model.SchemeOPoT)
	want := abi.Share{
		Prime: 53, Alpha: (28 + 1) * 21 % 53, Lpc: 21, LpcShoup: 7309087274488690262, // floor(21 * 2^64 / 53)
		UpRnd: 1, UpCml: 2, DownRnd: 3, DownCml: 4,
	}
	if err != nil || got != want {
		t.Errorf("opot: %+v, %v; want %+v", got, err, want)
	}
}

// The header, byte by byte, from RFC 8200, RFC 8754 and the TLV's definition.
func TestHeadendHoldsTheWholeOuterHeader(t *testing.T) {
	h := xtest.HeadendOf(0x01020304, 9, model.SchemeKeyed, model.Match{}, 3)
	h.Lane, h.Lanes, h.MSS = 64, 2, 1340
	e, err := tables.EncodeHeadend(xtest.Node(), h, 11, 12)
	if err != nil {
		t.Fatal(err)
	}
	want := "60000000 0000 2b 40 fc000001000000000000000000000001 fc000000000002010000000000000000" + // IPv6
		"29 09 04 02 02 00 0000" + // SRH: 9 * 8 bytes follow the first 8
		"fc000000000002030000000000000000 fc000000000002020000000000000000 fc000000000002010000000000000000" +
		"fc 16 02 09 01020304 0000000000000000 0000000000000000" // proof TLV
	if got := hex.EncodeToString(e.Outer[:e.OuterLen]); got != strings.ReplaceAll(want, " ", "") {
		t.Errorf("outer header:\n got %s\nwant %s", got, strings.ReplaceAll(want, " ", ""))
	}
	if e.OuterLen != 72+16*3 {
		t.Errorf("length %d, want %d", e.OuterLen, 72+16*3)
	}
	for _, b := range e.Outer[e.OuterLen:] {
		if b != 0 {
			t.Fatal("something behind the header")
		}
	}
	if e.Lane != 64 || e.Lanes != 2 || e.Stats != 11 || e.Counter != 12 || e.Mtu != 1400 || e.Mss != 1340 || e.Scheme != 2 || e.Epoch != 9 {
		t.Errorf("lane %d, lanes %d, stats %d, counter %d, mtu %d, mss %d, scheme %d, epoch %d", e.Lane, e.Lanes, e.Stats, e.Counter, e.Mtu, e.Mss, e.Scheme, e.Epoch)
	}
	if b := xtest.BytesOf(&e.Path); binary.BigEndian.Uint32(b) != 0x01020304 {
		t.Errorf("path %x in memory; want network order", b)
	}
}

func TestVerifierHoldsTheListAsOnTheWire(t *testing.T) {
	e := xtest.EgressOf(1, 0, model.SchemeKeyed, model.Match{}, xtest.OwnSID(9), 3)
	e.OnViolation = model.OnViolationReport
	h, v, err := tables.EncodeEgress(e, 4)
	if err != nil {
		t.Fatal(err)
	}
	if v.Segments != 3 || v.Keys != 3 || v.OnViolation != 1 || h.Position != 3 || h.Behaviour != 2 || h.Stats != 4 || v.WindowLog2 != 6 {
		t.Errorf("segments %d, keys %d, on violation %d, position %d, behaviour %d, stats %d, window of 2^%d", v.Segments, v.Keys, v.OnViolation, h.Position, h.Behaviour, h.Stats, v.WindowLog2)
	}
	if v.List[0] != xtest.OwnSID(9).As16() || v.List[2] != xtest.OtherSID(1).As16() || v.List[3] != [16]byte{} {
		t.Errorf("list %x; want the last segment first", v.List)
	}
}

// The key of a connection says its ends again, IPv4 as such.
func TestConnectionsAreReadFromTheirKeys(t *testing.T) {
	for _, c := range [][2]string{{"[fc00:7::2]:40000", "[fc00:8::2]:80"}, {"192.0.2.2:1", "198.51.100.2:65535"}} {
		client, server := netip.MustParseAddrPort(c[0]), netip.MustParseAddrPort(c[1])
		if gotClient, gotServer := tables.ConnEnds(tables.ConnKey(7, client, server)); gotClient != client || gotServer != server {
			t.Errorf("%s to %s are read as %s to %s", client, server, gotClient, gotServer)
		}
	}
}
