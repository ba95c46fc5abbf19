package dataplane

import (
	"crypto/rand"
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

func newTestEngine(t *testing.T) pot.Engine {
	t.Helper()
	e, release, err := NewEngine()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := release(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// primes at the edges of what is allowed, and in the middle.
var enginePrimes = []uint64{
	2, 3, 53, 0xffffffbd3f0331, 2305843009213693951, // 2^61 - 1
	9223372036854775783, // the greatest below 2^63
}

func drawWord(t *rapid.T, p uint64, label string) uint64 {
	return rapid.OneOf(
		rapid.SampledFrom([]uint64{0, 1, p - 1, p, p + 1, 1<<63 - 1, 1 << 63, 1<<64 - 1}),
		rapid.Uint64(),
	).Draw(t, label)
}

func drawBelow(t *rapid.T, p uint64, label string) uint64 {
	return rapid.OneOf(rapid.SampledFrom([]uint64{0, p / 2, p - 1}), rapid.Uint64Range(0, p-1)).Draw(t, label)
}

func drawShare(t *rapid.T) pot.Share {
	p := rapid.SampledFrom(enginePrimes).Draw(t, "prime")
	mask := func(label string) pot.Mask {
		return pot.Mask{RND: rapid.Uint64().Draw(t, label+" rnd"), CML: rapid.Uint64().Draw(t, label+" cml")}
	}
	s := pot.Share{Position: rapid.Uint8Range(0, 16).Draw(t, "position"), Polynomial: pot.Polynomial{
		Prime: p, Share: drawBelow(t, p, "share"), Public: drawBelow(t, p, "public"), LPC: drawBelow(t, p, "lpc"),
		Up: mask("up"), Down: mask("down"),
	}}
	copy(s.Key[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "key"))
	copy(s.Bind[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "binding key"))
	return s
}

// engineFlow is any.
var engineFlow = pot.Flow{Source: xtest.Addr("2001:db8::1"), Destination: xtest.Addr("2001:db8::2"), Protocol: 6, SourcePort: 1, DestinationPort: 2}

// drawFlow: of one version of IP or of both.
func drawFlow(t *rapid.T, four bool) pot.Flow {
	f := pot.Flow{Source: xtest.Addr("2001:db8::1"), Destination: xtest.Addr("2001:db8::2"), Protocol: rapid.Uint8().Draw(t, "protocol")}
	var last [16]byte
	copy(last[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "address"))
	last[0], last[4] = 0x20, 10 // addresses that a chain may have
	f.Source = netip.AddrFrom16(last)
	if four && rapid.Bool().Draw(t, "IPv4") {
		f.Source, f.Destination = netip.AddrFrom4([4]byte(last[4:])), xtest.Addr("192.0.2.1")
	}
	if rapid.Bool().Draw(t, "ports") {
		f.Protocol = rapid.SampledFrom([]uint8{6, 17, 33, 132, 136}).Draw(t, "protocol with ports")
		f.SourcePort, f.DestinationPort = rapid.Uint16().Draw(t, "source port"), rapid.Uint16Min(1).Draw(t, "destination port")
	}
	return f
}

func drawHeader(t *rapid.T) pot.Header {
	return pot.Header{
		Scheme: rapid.SampledFrom([]model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow}).Draw(t, "scheme"),
		Epoch:  rapid.Uint8().Draw(t, "epoch"), Path: rapid.Uint32().Draw(t, "path"),
	}
}

func TestProgramStampsAsTheModelDoes(t *testing.T) {
	e := newTestEngine(t)
	rapid.Check(t, func(t *rapid.T) {
		s, h, f := drawShare(t), drawHeader(t), drawFlow(t, true)
		in := pot.Values{
			RND: drawWord(t, s.Polynomial.Prime, "rnd"), CML: drawWord(t, s.Polynomial.Prime, "cml"),
		}
		want, err := pot.Model{}.Stamp(s, h, f, in)
		if err != nil {
			t.Fatal(err)
		}
		got, err := e.Stamp(s, h, f, in)
		if err != nil || got != want {
			t.Fatalf("scheme %s, in %x: got %x, %v; want %x", h.Scheme, in, got, err, want)
		}
	})
}

func TestProgramVerifiesAsTheModelDoes(t *testing.T) {
	e := newTestEngine(t)
	seen := map[pot.Result]int{}
	rapid.Check(t, func(t *rapid.T) {
		s, h, f := drawShare(t), drawHeader(t), drawFlow(t, true)
		p := s.Polynomial.Prime
		in := pot.Values{RND: drawWord(t, p, "rnd"), CML: drawWord(t, p, "cml")}
		if rapid.Bool().Draw(t, "in range") {
			unmasked := pot.Values{RND: in.RND % p, CML: in.CML % p}
			in = s.Polynomial.Up.Of(unmasked)
		}
		v := pot.Verifier{Secret: drawBelow(t, p, "secret")}
		for range rapid.IntRange(1, 16).Draw(t, "keys") {
			var k pot.Key
			copy(k[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "key"))
			v.Keys = append(v.Keys, k)
		}
		if h.Scheme.Keyed() {
			s.Position = uint8(len(v.Keys)) // the egress's; the program takes no other
		}
		// By chance alone nothing would ever verify.
		if rapid.Bool().Draw(t, "right") {
			if h.Scheme.Keyed() {
				w := pot.Values{RND: in.RND}
				for i, k := range v.Keys {
					w = pot.Share{Position: uint8(i), Key: k}.StampFlow(h, w, s.Binding(f)).WireOut
				}
				in = w
			} else {
				final, _ := v.Verify(s, h, in)
				// What the sum is, less RND.
				v.Secret = (final.CML + p - final.RND%p) % p
			}
		}
		wantValues, want, err := pot.Model{}.Verify(s, v, h, f, in)
		if err != nil {
			t.Fatal(err)
		}
		gotValues, got, err := e.Verify(s, v, h, f, in)
		if err != nil || got != want || gotValues != wantValues {
			t.Fatalf("scheme %s: got %v %x, %v; want %v %x", h.Scheme, got, gotValues, err, want, wantValues)
		}
		seen[got]++
	})
	for _, r := range []pot.Result{pot.Verified, pot.Proof, pot.Range} {
		if seen[r] == 0 {
			t.Errorf("no draw came to %v: %v", r, seen)
		}
	}
}

func TestEngineFollowsWholePaths(t *testing.T) {
	e := newTestEngine(t)
	for _, scheme := range []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow} {
		for k := 2; k <= 17; k++ {
			shares, v, err := pot.Generate(rand.Reader, scheme, k)
			if err != nil {
				t.Fatal(err)
			}
			h := pot.Header{Scheme: scheme, Epoch: 7, Path: 0xdeadbeef}
			w := pot.Values{RND: 1<<48 | 5}
			for _, s := range shares[:k-1] {
				if w, err = e.Stamp(s, h, engineFlow, w); err != nil {
					t.Fatal(err)
				}
			}
			if _, r, err := e.Verify(shares[k-1], v, h, engineFlow, w); err != nil || r != pot.Verified {
				t.Errorf("%s, %d positions: %v, %v; want it verified", scheme, k, r, err)
			}
			w.CML ^= 1
			if _, r, err := e.Verify(shares[k-1], v, h, engineFlow, w); err != nil || r != pot.Proof {
				t.Errorf("%s, %d positions, one bit changed: %v, %v; want proof", scheme, k, r, err)
			}
		}
	}
}
