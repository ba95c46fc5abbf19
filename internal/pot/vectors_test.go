package pot

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"math/bits"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

func readProfile(t *testing.T, name string) Profile {
	t.Helper()
	path := filepath.Join("testdata", name)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	p, err := ParseProfile(path, text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func evaluateModel(t *testing.T, p Profile, rnd uint64, order ...int) Evaluation {
	t.Helper()
	ev, err := Evaluate(Model{}, p, rnd, order)
	if err != nil {
		t.Fatal(err)
	}
	return ev
}

func cmls(ev Evaluation) []uint64 {
	var c []uint64
	for _, v := range ev.Visits {
		c = append(c, v.Out.CML)
	}
	return c
}

func TestDraftsPolynomialsGiveItsSharesAndConstants(t *testing.T) {
	p := readProfile(t, "draft-08-3.3.yaml")
	secret, public, xs := []uint64{10, 3, 3}, []uint64{0, 7, 10}, []uint64{2, 4, 5}
	for j, x := range xs {
		got := Polynomial{Prime: 53, Share: evaluate(secret, x, 53), Public: evaluate(public, x, 53), LPC: lagrange(xs, j, 53)}
		if got != p.Shares[j].Polynomial {
			t.Errorf("x = %d: share %d, rest %d, LPC %d; want %d, %d, %d", x, got.Share, got.Public, got.LPC,
				p.Shares[j].Polynomial.Share, p.Shares[j].Polynomial.Public, p.Shares[j].Polynomial.LPC)
		}
	}
}

func TestPublishedRunsGiveTheirCumulativeValues(t *testing.T) {
	for name, c := range map[string]struct {
		rnd  uint64
		want []uint64
	}{
		"draft-08-3.3.yaml": {45, []uint64{17, 39, 2}},
		"ciscodevnet.yaml":  {0xc9554d4442ad67, []uint64{0xf30d6d95469259, 0x60f5615b5b97c9, 0xc9554d4442ad65}},
	} {
		ev := evaluateModel(t, readProfile(t, name), c.rnd)
		if d := cmp.Diff(c.want, cmls(ev)); d != "" || ev.Result != Verified {
			t.Errorf("%s: %v, -want +got:\n%s", name, ev.Result, d)
		}
	}
}

func TestWithoutMasksAllOrdersOfTheDraftVerifyAndNoSkipDoes(t *testing.T) {
	p := readProfile(t, "draft-08-3.3.yaml")
	for _, o := range [][]int{{1, 2, 3}, {1, 3, 2}, {2, 1, 3}, {2, 3, 1}, {3, 1, 2}, {3, 2, 1}} {
		if ev := evaluateModel(t, p, 45, o...); ev.Result != Verified {
			t.Errorf("order %v: %v, want verified", o, ev.Result)
		}
	}
	for want, o := range map[uint64][]int{39: {1, 2}, 33: {1, 3}, 38: {2, 3}} {
		ev := evaluateModel(t, p, 45, o...)
		if got := ev.Visits[1].Out.CML; got != want || ev.Result != Proof {
			t.Errorf("order %v: CML %d, %v; want %d, proof", o, got, ev.Result, want)
		}
	}
}

func TestMasksTravelOnTheLinksAndShowTheOrder(t *testing.T) {
	p := readProfile(t, "draft-08-3.3.yaml")
	p.Header.Scheme = model.SchemeOPoT
	m1, m2 := Mask{RND: 0x1111, CML: 0x2222}, Mask{RND: 1 << 63, CML: 1<<63 + 5}
	p.Shares[0].Polynomial.Down, p.Shares[1].Polynomial.Up = m1, m1
	p.Shares[1].Polynomial.Down, p.Shares[2].Polynomial.Up = m2, m2
	want := []Visit{
		{Hop: 1, Out: Values{45, 17}, Wire: Values{45 ^ 0x1111, 17 ^ 0x2222}},
		{Hop: 2, Out: Values{45, 39}, Wire: Values{45 ^ 1<<63, 39 ^ (1<<63 + 5)}},
		{Hop: 3, Out: Values{45, 2}, Wire: Values{45, 2}},
	}
	ev := evaluateModel(t, p, 45)
	if d := cmp.Diff(want, ev.Visits); d != "" || ev.Result != Verified {
		t.Errorf("%v, -want +got:\n%s", ev.Result, d)
	}
	// By hand: hop 3 takes off its own mask, which hop 1 never put on.
	rnd := uint64(45 ^ 0x1111 ^ 1<<63)
	third := (17^0x2222^(1<<63+5))%53 + (47+20+rnd%53)*38
	ev = evaluateModel(t, p, 45, 1, 3, 2)
	if got := ev.Visits[1].Out; got != (Values{rnd, third % 53}) || ev.Result != Proof {
		t.Errorf("order 1,3,2: hop 3 came to %#x, %v; want %#x, proof", got, ev.Result, Values{rnd, third % 53})
	}
	// The hop visited last verifies, whichever it is, and is shown as it sends.
	ev = evaluateModel(t, p, 45, 1, 2)
	if last := ev.Visits[1]; last != want[1] || ev.Result != Proof {
		t.Errorf("order 1,2: %#x, %v; want %#x, proof", last, ev.Result, want[1])
	}
}

// sipKey is 00 01 .. 0f.
var sipKey = Key(ascending(16))

func ascending(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

// sipVectors are the reference outputs by length of input.
func sipVectors(t *testing.T) [][]byte {
	t.Helper()
	f, err := os.ReadFile("testdata/siphash24.txt")
	if err != nil {
		t.Fatal(err)
	}
	var rows [][]byte
	for s := bufio.NewScanner(bytes.NewReader(f)); s.Scan(); {
		if strings.HasPrefix(s.Text(), "#") {
			continue
		}
		b, err := hex.DecodeString(s.Text())
		if err != nil || len(b) != 8 {
			t.Fatalf("row %d: %q", len(rows), s.Text())
		}
		rows = append(rows, b)
	}
	if len(rows) != 64 {
		t.Fatalf("%d rows, want 64", len(rows))
	}
	return rows
}

func bigEndian(b []byte) uint64 {
	var n uint64
	for _, c := range b {
		n = n<<8 | uint64(c)
	}
	return n
}

func TestSipHashGivesItsReferenceVectors(t *testing.T) {
	for n, want := range sipVectors(t) {
		if got := sipKey.tag(ascending(n)); got != bigEndian(want) {
			t.Errorf("%d bytes: %016x, want %x", n, got, want)
		}
		if got := sipKey.hash(ascending(n)); bits.ReverseBytes64(got) != bigEndian(want) {
			t.Errorf("%d bytes: %016x is not %x read as little-endian", n, got, want)
		}
	}
}

// The messages are chosen so that their bytes count up, as the reference
// vectors' inputs do: a field out of its place, or in the wrong byte order,
// gives another tag.
func TestKeyedMessagesAreLaidOutAsOnTheWire(t *testing.T) {
	vectors := sipVectors(t)
	in := Values{RND: 0x0001020304050607, CML: 0x08090a0b0c0d0e0f}

	h := Header{Scheme: 0x10, Epoch: 0x11, Path: 0x12131415}
	if got := h.Message(0x16, in); !bytes.Equal(got[:], ascending(23)) {
		t.Errorf("keyed message: %x", got)
	}
	if got := stampKeyed(sipKey, h, 0x16, in, nil); got != (Values{in.RND, bigEndian(vectors[23])}) {
		t.Errorf("keyed stamp: %x, want CML %x", got, vectors[23])
	}

	b := Binding(ascending(24)[16:])
	h = Header{Scheme: 0x18, Epoch: 0x19, Path: 0x1a1b1c1d}
	if got := h.MessageFlow(0x1e, in, b); !bytes.Equal(got[:], ascending(31)) {
		t.Errorf("keyed-flow message: %x", got)
	}
	if got := stampKeyed(sipKey, h, 0x1e, in, &b); got != (Values{in.RND, bigEndian(vectors[31])}) {
		t.Errorf("keyed-flow stamp: %x, want CML %x", got, vectors[31])
	}

	f := Flow{
		Source:      netip.AddrFrom16([16]byte(ascending(16))),
		Destination: netip.AddrFrom16([16]byte(ascending(32)[16:])),
		Protocol:    0x20, SourcePort: 0x2122, DestinationPort: 0x2324,
	}
	if got := (Share{Bind: sipKey}).Binding(f); !bytes.Equal(got[:], vectors[37]) {
		t.Errorf("binding: %x, want %x", got, vectors[37])
	}
}

func TestBindingTakesIPv4AsMapped(t *testing.T) {
	s := Share{Bind: sipKey}
	f := Flow{Source: netip.MustParseAddr("192.0.2.1"), Destination: netip.MustParseAddr("192.0.2.2"), Protocol: 17, SourcePort: 53, DestinationPort: 1024}
	g := f
	g.Source, g.Destination = netip.MustParseAddr("::ffff:192.0.2.1"), netip.MustParseAddr("::ffff:192.0.2.2")
	if s.Binding(f) != s.Binding(g) {
		t.Error("192.0.2.1 and ::ffff:192.0.2.1 bind differently")
	}
	swapped := f
	swapped.Source, swapped.Destination = f.Destination, f.Source
	if s.Binding(f) == s.Binding(swapped) {
		t.Error("both directions of a flow bind alike")
	}
}

// By hand: a path of two stamping hops, every byte of each message spelled out.
func TestKeyedPathByHand(t *testing.T) {
	h := Header{Scheme: model.SchemeKeyed, Epoch: 7, Path: 0xdeadbeef}
	rnd := uint64(0x0123456789abcdef)
	second := Key(bytes.Repeat([]byte{0xa5}, 16))
	prefix := []byte{0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef}
	suffix := []byte{2, 7, 0xde, 0xad, 0xbe, 0xef}
	t0 := sipKey.tag(slices.Concat(prefix, make([]byte, 8), suffix, []byte{0}))
	t1 := second.tag(slices.Concat(prefix, binary8(t0), suffix, []byte{1}))
	steps := Walk(h, rnd, Share{Position: 0, Key: sipKey}, Share{Position: 1, Key: second})
	if steps[0].WireOut != (Values{rnd, t0}) || steps[1].In != (Values{rnd, t0}) || steps[1].WireOut != (Values{rnd, t1}) {
		t.Errorf("%x, want tags %x and %x", steps, t0, t1)
	}
	final, r := Verifier{Keys: []Key{sipKey, second}}.Verify(Share{Position: 2}, h, steps[1].WireOut)
	if r != Verified || final != steps[1].WireOut {
		t.Errorf("%v with %x", r, final)
	}
}

func binary8(n uint64) []byte {
	b := make([]byte, 8)
	for i := range b {
		b[i] = byte(n >> (56 - 8*i))
	}
	return b
}
