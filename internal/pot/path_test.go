package pot

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math/big"
	"math/bits"
	mrand "math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
)

var schemes = []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow}

func isPolynomial(s model.Scheme) bool { return s == model.SchemePoT || s == model.SchemeOPoT }

// path is a generated path with one packet's RND and flow.
type path struct {
	Header
	shares   []Share
	verifier Verifier
	rnd      uint64
	flow     Flow
}

func randomBytes(seed uint64) io.Reader {
	var s [32]byte
	copy(s[:], binary8(seed))
	return mrand.NewChaCha8(s)
}

func drawPath(t *rapid.T, among ...model.Scheme) path {
	p := path{
		Header: Header{
			Scheme: rapid.SampledFrom(among).Draw(t, "scheme"),
			Epoch:  rapid.Uint8().Draw(t, "epoch"),
			Path:   rapid.Uint32().Draw(t, "path"),
		},
		rnd: rapid.Uint64Range(0, 1<<60-1).Draw(t, "rnd"),
		flow: Flow{
			Source: netip.MustParseAddr("2001:db8::1"), Destination: netip.MustParseAddr("2001:db8::2"),
			Protocol: 6, SourcePort: rapid.Uint16().Draw(t, "sport"), DestinationPort: 80,
		},
	}
	k := rapid.IntRange(PositionsMin, PositionsMax).Draw(t, "positions")
	var err error
	p.shares, p.verifier, err = Generate(randomBytes(rapid.Uint64().Draw(t, "seed")), p.Scheme, k)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// stampers is how many positions stamp before the egress.
func (p path) stampers() int { return len(p.shares) - 1 }

func (p path) egress() Share { return p.shares[len(p.shares)-1] }

// send stamps a fresh packet at the positions given, and verifies it. before,
// if not nil, is called on each link with the position that sent last, -1 for
// none, and may change what travels on.
func (p path) send(visits []int, before func(sent int, h *Header, wire *Values)) Result {
	h, wire := p.Header, Values{RND: p.rnd}
	for _, j := range visits {
		wire = p.shares[j].StampFlow(h, wire, p.shares[j].Binding(p.flow)).WireOut
		if before != nil {
			before(j, &h, &wire)
		}
	}
	_, r := p.verifier.VerifyFlow(p.egress(), h, wire, p.egress().Binding(p.flow))
	return r
}

func (p path) honest() []int {
	var v []int
	for j := range p.stampers() {
		v = append(v, j)
	}
	return v
}

func TestEveryGeneratedPathVerifies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, schemes...)
		if r := p.send(p.honest(), nil); r != Verified {
			t.Fatalf("%v: %v", p.Header, r)
		}
		if p.Scheme == model.SchemeKeyedFlow {
			return
		}
		steps := Walk(p.Header, p.rnd, p.shares[:p.stampers()]...)
		if _, r := p.verifier.Verify(p.egress(), p.Header, steps[len(steps)-1].WireOut); r != Verified {
			t.Fatalf("walked, %v: %v", p.Header, r)
		}
	})
}

func TestEverySkippedPositionIsSeen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, schemes...)
		for j := range p.stampers() {
			if r := p.send(slices.Delete(p.honest(), j, j+1), nil); r != Proof {
				t.Fatalf("%v without position %d of %d: %v", p.Header, j, len(p.shares), r)
			}
		}
	})
}

func TestEveryDoubledVisitIsSeen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, schemes...)
		for j := range p.stampers() {
			if r := p.send(slices.Insert(p.honest(), j, j), nil); r != Proof {
				t.Fatalf("%v with position %d of %d twice: %v", p.Header, j, len(p.shares), r)
			}
		}
	})
}

func TestEverySwapIsSeenButUnderPoT(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, schemes...)
		want := Proof
		if p.Scheme == model.SchemePoT {
			want = Verified
		}
		for j := range p.stampers() {
			for i := range j {
				visits := p.honest()
				visits[i], visits[j] = visits[j], visits[i]
				if r := p.send(visits, nil); r != want {
					t.Fatalf("%v with positions %d and %d of %d swapped: %v, want %v", p.Header, i, j, len(p.shares), r, want)
				}
			}
		}
	})
}

func TestNoOtherSequenceOfVisitsVerifies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, schemes...)
		visits := rapid.SliceOfN(rapid.IntRange(0, p.stampers()-1), 0, 2*p.stampers()).Draw(t, "visits")
		seen := slices.Clone(visits)
		if p.Scheme == model.SchemePoT {
			slices.Sort(seen)
		}
		want := Proof
		if slices.Equal(seen, p.honest()) {
			want = Verified
		}
		if r := p.send(visits, nil); r != want {
			t.Fatalf("%v, visits %v of %d: %v, want %v", p.Header, visits, len(p.shares), r, want)
		}
	})
}

func TestEveryFlippedBitIsSeen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, schemes...)
		link := rapid.IntRange(0, p.stampers()-1).Draw(t, "link")
		for bit := range 64 {
			for name, v := range map[string]Values{"RND": {RND: 1 << bit}, "CML": {CML: 1 << bit}} {
				r := p.send(p.honest(), func(sent int, _ *Header, wire *Values) {
					if sent == link {
						*wire = Mask(v).Of(*wire)
					}
				})
				if r == Verified {
					t.Fatalf("%v: bit %d of %s flipped after position %d of %d verifies", p.Header, bit, name, link, len(p.shares))
				}
			}
		}
	})
}

func TestKeyedTagsCoverPathAndEpoch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, model.SchemeKeyed, model.SchemeKeyedFlow)
		link := rapid.IntRange(0, p.stampers()-1).Draw(t, "link")
		for bit := range 40 {
			r := p.send(p.honest(), func(sent int, h *Header, _ *Values) {
				if sent != link {
					return
				}
				if bit < 32 {
					h.Path ^= 1 << bit
				} else {
					h.Epoch ^= 1 << (bit - 32)
				}
			})
			if r != Proof {
				t.Fatalf("%v: header bit %d flipped after position %d: %v", p.Header, bit, link, r)
			}
		}
	})
}

func TestKeyedFlowIsBoundToItsFlow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, model.SchemeKeyedFlow)
		var wire Values
		wire.RND = p.rnd
		for _, s := range p.shares[:p.stampers()] {
			wire = s.StampFlow(p.Header, wire, s.Binding(p.flow)).WireOut
		}
		for name, mutate := range map[string]func(*Flow){
			"source":      func(f *Flow) { f.Source = f.Source.Next() },
			"destination": func(f *Flow) { f.Destination = f.Destination.Next() },
			"protocol":    func(f *Flow) { f.Protocol = 17 },
			"sport":       func(f *Flow) { f.SourcePort ^= 1 },
			"dport":       func(f *Flow) { f.DestinationPort ^= 1 << 8 },
		} {
			f := p.flow
			mutate(&f)
			if _, r := p.verifier.VerifyFlow(p.egress(), p.Header, wire, p.egress().Binding(f)); r != Proof {
				t.Fatalf("another %s: %v", name, r)
			}
		}
	})
}

func TestProofsOfOnePathDoNotVerifyOnAnother(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawPath(t, schemes...), drawPath(t, schemes...)
		if a.verifier.Secret == b.verifier.Secret && slices.Equal(a.verifier.Keys, b.verifier.Keys) {
			t.Skip("the same secrets twice")
		}
		wire := Values{RND: a.rnd}
		for _, s := range a.shares[:a.stampers()] {
			wire = s.StampFlow(a.Header, wire, s.Binding(a.flow)).WireOut
		}
		if _, r := b.verifier.VerifyFlow(b.egress(), b.Header, wire, b.egress().Binding(a.flow)); r != Proof {
			t.Fatalf("%v on %v: %v", a.Header, b.Header, r)
		}
	})
}

// RND and CML that are equal to the right ones mod p, but not below p.
func TestValuesAtOrAboveThePrimeAreRefusedForTheirRangeOnly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, model.SchemePoT, model.SchemeOPoT)
		prime := p.egress().Polynomial.Prime
		// CML on the last link, not masked, is below p.
		raise := func(sent int, _ *Header, wire *Values) {
			if sent == p.stampers()-1 {
				m := p.egress().Polynomial.Up
				v := m.Of(*wire)
				v.CML += prime
				*wire = m.Of(v)
			}
		}
		if r := p.send(p.honest(), raise); r != Range {
			t.Fatalf("CML + p: %v", r)
		}
		q := p
		q.rnd += prime
		if r := q.send(q.honest(), nil); r != Range {
			t.Fatalf("RND + p: %v", r)
		}
		q.rnd = prime
		if r := q.send(q.honest(), nil); r != Range {
			t.Fatalf("RND = p: %v", r)
		}
		q.rnd = prime - 1
		if r := q.send(q.honest(), nil); r != Verified {
			t.Fatalf("RND = p - 1: %v", r)
		}
		// What is wrong in both ways is wrong as a proof.
		q.rnd = p.rnd + prime
		if r := q.send(q.honest()[1:], nil); r != Proof {
			t.Fatalf("RND + p and a skip: %v", r)
		}
	})
}

func TestGeneratedSecretsKeepTheRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPath(t, schemes...)
		if err := p.verifier.Check(p.Scheme, p.egress()); err != nil {
			t.Fatal(err)
		}
		for j, s := range p.shares {
			if int(s.Position) != j {
				t.Fatalf("share %d says position %d", j, s.Position)
			}
		}
		if isPolynomial(p.Scheme) {
			checkPolynomials(t, p)
		} else {
			checkKeys(t, p)
		}
	})
}

func checkPolynomials(t *rapid.T, p path) {
	prime := p.shares[0].Polynomial.Prime
	if n := bits.Len64(prime); n < 61 || n > 63 {
		t.Fatalf("the prime %d has %d bits", prime, n)
	}
	secret, public, ones := new(big.Int), new(big.Int), new(big.Int)
	for j, s := range p.shares {
		q := s.Polynomial
		if err := q.Check(); err != nil || q.Prime != prime {
			t.Fatalf("position %d: prime %d, %v", j, q.Prime, err)
		}
		if s.Key != (Key{}) || s.Bind != (Key{}) {
			t.Fatalf("position %d has keys", j)
		}
		l := number(q.LPC)
		secret.Add(secret, new(big.Int).Mul(l, number(q.Share)))
		public.Add(public, new(big.Int).Mul(l, number(q.Public)))
		ones.Add(ones, l)
	}
	// Interpolation at zero: the secret, a polynomial without constant, and 1.
	for want, got := range map[uint64]*big.Int{p.verifier.Secret: secret, 0: public, 1: ones} {
		if got.Mod(got, number(prime)).Uint64() != want {
			t.Fatalf("interpolated %v at zero, want %d", got, want)
		}
	}
	var masks []Mask
	for j, s := range p.shares {
		up, down := s.Polynomial.Up, s.Polynomial.Down
		switch {
		case p.Scheme == model.SchemePoT && (up != Mask{} || down != Mask{}):
			t.Fatalf("pot has masks at position %d", j)
		case j == 0 && up != Mask{}:
			t.Fatal("the headend has an upstream mask")
		case j == len(p.shares)-1 && down != Mask{}:
			t.Fatal("the egress has a downstream mask")
		case j > 0 && up != p.shares[j-1].Polynomial.Down:
			t.Fatalf("the link before position %d has two masks", j)
		}
		if p.Scheme == model.SchemeOPoT && j > 0 {
			if up.RND == 0 || up.CML == 0 || slices.Contains(masks, up) {
				t.Fatalf("the mask before position %d is zero or another link's", j)
			}
			masks = append(masks, up)
		}
	}
}

func checkKeys(t *rapid.T, p path) {
	seen := map[Key]bool{{}: true}
	for j, s := range p.shares[:p.stampers()] {
		if seen[s.Key] || s.Key != p.verifier.Keys[j] {
			t.Fatalf("the key of position %d is zero, another's or not the verifier's", j)
		}
		seen[s.Key] = true
	}
	if p.egress().Key != (Key{}) {
		t.Fatal("the egress has a key to stamp with")
	}
	for j, s := range p.shares {
		if (p.Scheme == model.SchemeKeyedFlow) == seen[s.Bind] || s.Bind != p.shares[0].Bind {
			t.Fatalf("the binding key of position %d is zero, a stamping key or not that of the path", j)
		}
		if s.Polynomial != (Polynomial{}) {
			t.Fatalf("position %d has a polynomial", j)
		}
	}
}

// All but one share do not give the secret: the degree is no less than k - 1.
func TestOneShareLessDoesNotGiveTheSecret(t *testing.T) {
	const p = 1<<61 - 1
	for k := PositionsMin; k <= PositionsMax; k++ {
		c, err := drawPolynomial(randomBytes(uint64(k)), p, k)
		if err != nil {
			t.Fatal(err)
		}
		if len(c) != k || c[k-1] == 0 {
			t.Errorf("k = %d: degree of %v is not %d", k, c, k-1)
		}
	}
	// With a prime this small, a leading zero would turn up.
	for seed := range uint64(64) {
		if c, err := drawPolynomial(randomBytes(seed), 3, 3); err != nil || c[2] == 0 {
			t.Errorf("seed %d: %v, %v", seed, c, err)
		}
	}
	shares, v, err := Generate(randomBytes(1), model.SchemePoT, 5)
	if err != nil {
		t.Fatal(err)
	}
	for skip := range shares {
		sum := new(big.Int)
		for j, s := range shares {
			if j != skip {
				sum.Add(sum, new(big.Int).Mul(number(s.Polynomial.LPC), number(s.Polynomial.Share)))
			}
		}
		if sum.Mod(sum, number(shares[0].Polynomial.Prime)).Uint64() == v.Secret {
			t.Errorf("the shares without that of position %d give the secret", skip)
		}
	}
}

func TestPointsAreDistinctAndNotZero(t *testing.T) {
	for seed := range uint64(64) {
		xs, err := drawDistinct(randomBytes(seed), 5, 4)
		slices.Sort(xs)
		if err != nil || !slices.Equal(xs, []uint64{1, 2, 3, 4}) {
			t.Errorf("seed %d: %v, %v", seed, xs, err)
		}
	}
	if xs, err := drawDistinct(randomBytes(1), 5, 5); !errors.Is(err, errRandom) {
		t.Errorf("five points below 5: %v, %v", xs, err)
	}
}

func TestGenerateIsAFunctionOfItsBytes(t *testing.T) {
	for _, scheme := range schemes {
		a, av, errA := Generate(randomBytes(1), scheme, 4)
		b, bv, errB := Generate(randomBytes(1), scheme, 4)
		c, cv, errC := Generate(randomBytes(2), scheme, 4)
		if err := errors.Join(errA, errB, errC); err != nil {
			t.Fatal(err)
		}
		if !cmp.Equal(a, b) || !cmp.Equal(av, bv) {
			t.Errorf("%v: the same bytes give different secrets", scheme)
		}
		if cmp.Equal(a, c) || cmp.Equal(av, cv) {
			t.Errorf("%v: different bytes give the same secrets", scheme)
		}
		d, _, err := Generate(rand.Reader, scheme, PositionsMax)
		if err != nil || len(d) != PositionsMax {
			t.Errorf("%v from crypto/rand: %d shares, %v", scheme, len(d), err)
		}
	}
}

func TestGenerateRefuses(t *testing.T) {
	for _, c := range []struct {
		random    io.Reader
		scheme    model.Scheme
		positions int
		want      string
	}{
		{rand.Reader, model.SchemeKeyed, 1, "2 to 17 positions"},
		{rand.Reader, model.SchemeOPoT, 18, "2 to 17 positions"},
		{rand.Reader, model.Scheme(9), 3, "Scheme(9) secrets for 3 positions: the scheme is not known"},
	} {
		if s, _, err := Generate(c.random, c.scheme, c.positions); err == nil || !strings.Contains(err.Error(), c.want) || s != nil {
			t.Errorf("%v, %d positions: %v, want %q", c.scheme, c.positions, err, c.want)
		}
	}
	for _, scheme := range schemes {
		// Too few bytes, at every length that is too few.
		counted := &countingReader{r: randomBytes(3)}
		if _, _, err := Generate(counted, scheme, 3); err != nil {
			t.Fatal(err)
		}
		for n := range counted.n {
			s, v, err := Generate(io.LimitReader(randomBytes(3), int64(n)), scheme, 3)
			if err == nil || !(errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)) || s != nil || v.Keys != nil {
				t.Fatalf("%v from %d bytes of %d: %v", scheme, n, counted.n, err)
			}
		}
	}
	for _, scheme := range []model.Scheme{model.SchemePoT, model.SchemeOPoT} {
		for _, b := range []byte{0x00, 0xff, 0x55} {
			_, _, err := Generate(constantReader(b), scheme, 3)
			if !errors.Is(err, errRandom) {
				t.Errorf("%v from bytes that are all %#x: %v", scheme, b, err)
			}
		}
	}
}

type countingReader struct {
	r io.Reader
	n int
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += n
	return n, err
}

type constantReader byte

func (c constantReader) Read(b []byte) (int, error) {
	copy(b, bytes.Repeat([]byte{byte(c)}, len(b)))
	return len(b), nil
}

func TestVerifierCheckRefuses(t *testing.T) {
	_, keyed, err := Generate(randomBytes(1), model.SchemeKeyed, 3)
	if err != nil {
		t.Fatal(err)
	}
	poly := Share{Polynomial: Polynomial{Prime: 53}}
	for _, c := range []struct {
		v      Verifier
		scheme model.Scheme
		egress Share
		want   string
	}{
		{Verifier{Secret: 53}, model.SchemeOPoT, poly, "the validator key is not below the prime"},
		{Verifier{Secret: 1}, model.SchemePoT, Share{}, "the prime is not a prime number"},
		{Verifier{}, model.SchemeKeyed, Share{}, "the verifier has 0 keys; a path has 1 to 16"},
		{Verifier{Keys: make([]Key, 17)}, model.SchemeKeyedFlow, Share{Position: 17}, "the verifier has 17 keys; a path has 1 to 16"},
		{keyed, model.SchemeKeyed, Share{Position: 3}, "the verifier has 2 keys and the egress is at position 3; they must agree"},
		{keyed, model.Scheme(7), Share{Position: 2}, "scheme Scheme(7) is not known"},
	} {
		if err := c.v.Check(c.scheme, c.egress); err == nil || err.Error() != c.want {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
}

func TestWithoutABindingKeyedFlowPanicsAndTheModelRefuses(t *testing.T) {
	h := Header{Scheme: model.SchemeKeyedFlow}
	for name, f := range map[string]func(){
		"stamp":          func() { Share{}.Stamp(h, Values{}) },
		"verify":         func() { Verifier{}.Verify(Share{}, h, Values{}) },
		"unknown stamp":  func() { Share{}.Stamp(Header{Scheme: 9}, Values{}) },
		"unknown verify": func() { Verifier{}.VerifyFlow(Share{}, Header{Scheme: 9}, Values{}, Binding{}) },
	} {
		if !panics(f) {
			t.Errorf("%s does not panic", name)
		}
	}
	unknown := Header{Scheme: 9}
	if _, err := (Model{}).Stamp(Share{}, unknown, Flow{}, Values{}); err == nil {
		t.Error("the model stamps an unknown scheme")
	}
	if _, r, err := (Model{}).Verify(Share{}, Verifier{}, unknown, Flow{}, Values{}); err == nil || r == Verified {
		t.Errorf("the model verifies an unknown scheme: %v", r)
	}
}

func panics(f func()) (yes bool) {
	defer func() { yes = recover() != nil }()
	f()
	return false
}

func TestResultHasANameForEachValue(t *testing.T) {
	for r, want := range map[Result]string{Verified: "verified", Proof: "proof", Range: "range"} {
		text, err := r.MarshalText()
		var back Result
		if err := errors.Join(err, back.UnmarshalText(text)); err != nil || back != r || string(text) != want || r.String() != want {
			t.Errorf("%d: %q, back %v, %v", r, text, back, err)
		}
	}
	if got := fmt.Sprint(Result(17)); got != "Result(17)" {
		t.Errorf("%q", got)
	}
	if _, err := Result(17).MarshalText(); err == nil {
		t.Error("Result(17) has a name")
	}
	if err := new(Result).UnmarshalText([]byte("ok")); err == nil {
		t.Error(`"ok" is a result`)
	}
}
