package pot

import (
	"math"
	"math/bits"
	"testing"

	"pgregory.net/rapid"
)

// stampShoup is the stamp as the kernel computes it: no number above 64 bits,
// no division but that of CML. The second opinion on the math/big oracle.
func stampShoup(p Polynomial, in Values) Values {
	q, _ := bits.Mul64(in.RND, p.LPCShoup())
	product := in.RND*p.LPC - q*p.Prime // below 2p, hence below 2^64
	cml := in.CML % p.Prime
	for _, term := range []uint64{reduce(product, p.Prime), p.Alpha()} {
		cml = reduce(cml+term, p.Prime)
	}
	return Values{RND: in.RND, CML: cml}
}

func reduce(n, p uint64) uint64 {
	if n >= p {
		return n - p
	}
	return n
}

// Primes at the edges: the greatest below 2^63, 2^62 and 2^61, the least of 61
// and 62 bits that are near, and small ones.
var edgePrimes = []uint64{
	1<<63 - 25, 1<<62 - 57, 1<<61 - 1, 1<<60 + 33, 1<<61 + 15, 1<<32 - 5, 1<<31 - 1, 65537, 53, 5, 3, 2,
}

func TestEdgePrimesArePrime(t *testing.T) {
	for _, p := range edgePrimes {
		if err := (Polynomial{Prime: p}).Check(); err != nil {
			t.Errorf("%d: %v", p, err)
		}
	}
	for n := uint64(1<<63 - 24); n < 1<<63; n++ {
		if isPrime(n) {
			t.Errorf("%d is prime too, and nearer to 2^63", n)
		}
	}
}

func edgeValues(p uint64) []uint64 {
	return []uint64{0, 1, p - 1, p, p + 1, 2*p - 1, 1<<60 - 1, 1<<63 - 1, 1 << 63, math.MaxUint64 - 1, math.MaxUint64}
}

func TestStampEqualsShoupAtTheEdges(t *testing.T) {
	cases := 0
	for _, p := range edgePrimes {
		for _, share := range []uint64{0, 1, p / 2, p - 1} {
			for _, public := range []uint64{0, p - 1} {
				for _, lpc := range []uint64{0, 1, p / 2, p - 1} {
					poly := Polynomial{Prime: p, Share: share % p, Public: public, LPC: lpc % p}
					for _, rnd := range edgeValues(p) {
						for _, cml := range edgeValues(p) {
							checkStamp(t, poly, Values{RND: rnd, CML: cml})
							cases++
						}
					}
				}
			}
		}
	}
	if cases != len(edgePrimes)*4*2*4*11*11 {
		t.Errorf("%d cases ran", cases)
	}
}

type errorer interface{ Errorf(string, ...any) }

func checkStamp(t errorer, p Polynomial, in Values) {
	got, want := p.Stamp(in), stampShoup(p, in)
	if got != want || got.CML >= p.Prime || got.RND != in.RND {
		t.Errorf("p %d, share %d, rest %d, LPC %d, in %v: oracle %v, Shoup %v", p.Prime, p.Share, p.Public, p.LPC, in, got, want)
	}
}

func drawPolynomialOf(t *rapid.T) Polynomial {
	p := rapid.OneOf(rapid.SampledFrom(edgePrimes), rapid.Custom(func(t *rapid.T) uint64 {
		n := rapid.Uint64Range(3, 1<<63-25).Draw(t, "from") | 1
		for !isPrime(n) {
			n += 2
		}
		return n
	})).Draw(t, "p")
	below := rapid.OneOf(rapid.Uint64Range(0, p-1), rapid.SampledFrom([]uint64{0, p - 1}))
	return Polynomial{Prime: p, Share: below.Draw(t, "share"), Public: below.Draw(t, "public"), LPC: below.Draw(t, "lpc")}
}

func TestStampEqualsShoup(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		checkStamp(t, drawPolynomialOf(t), Values{RND: rapid.Uint64().Draw(t, "rnd"), CML: rapid.Uint64().Draw(t, "cml")})
	})
}

func FuzzStampEqualsShoup(f *testing.F) {
	f.Add(uint64(1<<63-25), uint64(1<<63-26), uint64(1<<63-26), uint64(1<<63-26), uint64(math.MaxUint64), uint64(math.MaxUint64))
	f.Add(uint64(53), uint64(28), uint64(1), uint64(21), uint64(45), uint64(0))
	f.Fuzz(func(t *testing.T, prime, share, public, lpc, rnd, cml uint64) {
		// Shoup's method needs no prime, only 0 < p < 2^63.
		prime = prime%(1<<63-1) + 1
		checkStamp(t, Polynomial{Prime: prime, Share: share % prime, Public: public % prime, LPC: lpc % prime}, Values{RND: rnd, CML: cml})
	})
}

func TestCheckNamesWhatIsWrongWithAPolynomial(t *testing.T) {
	good := Polynomial{Prime: 53, Share: 52, Public: 52, LPC: 52}
	if err := good.Check(); err != nil {
		t.Fatal(err)
	}
	for want, mutate := range map[string]func(*Polynomial){
		"the prime is not below 2^63":                  func(p *Polynomial) { p.Prime = 1<<63 + 29 },
		"the prime is not a prime number":              func(p *Polynomial) { p.Prime = 1<<63 - 24 },
		"the secret share is not below the prime":      func(p *Polynomial) { p.Share = 53 },
		"the public polynomial is not below the prime": func(p *Polynomial) { p.Public = 53 },
		"the LPC is not below the prime":               func(p *Polynomial) { p.LPC = 53 },
	} {
		p := good
		mutate(&p)
		if err := p.Check(); err == nil || err.Error() != want {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	if err := (Polynomial{}).Check(); err == nil {
		t.Error("the zero polynomial passes")
	}
}
