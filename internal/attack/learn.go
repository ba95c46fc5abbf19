package attack

import (
	"errors"
	"math/big"
	"math/bits"
	"slices"
)

// values are RND and CML as they are on the wire.
type values struct{ rnd, cml uint64 }

// tapped is one packet as captured on both links of a hop.
type tapped struct{ in, out values }

// forger makes a hop's stamp without the hop's secrets, of the packet that
// comes so many packets after the first that was tapped.
type forger func(in values, number int) values

// errNothingLearned: no stamp of the kind fits the captured packets.
var errNothingLearned = errors.New("what was seen on both links fits no stamp of this kind")

// learnPlain learns a stamp of pot. A hop adds alpha + RND*LPC modulo p, all in the clear. D_i
// is the value added to packet i. With all values relative to packet 0, D_i*RND_j and D_j*RND_i
// differ by a multiple of p: the greatest common divisor of some of these differences is p, or a
// small multiple of it.
func learnPlain(seen []tapped) (forger, error) {
	if len(seen) < 4 {
		return nil, errNothingLearned
	}
	var (
		added, number []*big.Int
		most          uint64
	)
	for _, s := range seen {
		if s.in.rnd != s.out.rnd {
			return nil, errNothingLearned // it is masked
		}
		first := seen[0]
		d := new(big.Int).Sub(unsigned(s.out.cml), unsigned(s.in.cml))
		d.Sub(d, unsigned(first.out.cml)).Add(d, unsigned(first.in.cml))
		added = append(added, d)
		number = append(number, new(big.Int).Sub(unsigned(s.in.rnd), unsigned(first.in.rnd)))
		most = max(most, s.in.cml, s.out.cml)
	}
	multiple := new(big.Int)
	for i := 1; i < len(seen); i++ {
		for j := range i {
			a, b := new(big.Int).Mul(added[i], number[j]), new(big.Int).Mul(added[j], number[i])
			multiple.GCD(nil, nil, multiple, a.Sub(a, b).Abs(a))
		}
	}
	p := primeIn(multiple, most)
	if p == nil {
		return nil, errNothingLearned
	}
	lpc := new(big.Int).ModInverse(new(big.Int).Mod(number[1], p), p)
	if lpc == nil {
		return nil, errNothingLearned
	}
	lpc.Mul(lpc, added[1]).Mod(lpc, p)
	stamp := func(v values, alpha *big.Int) values {
		sum := new(big.Int).Mul(unsigned(v.rnd), lpc)
		sum.Add(sum, alpha).Add(sum, unsigned(v.cml))
		return values{v.rnd, sum.Mod(sum, p).Uint64()}
	}
	bare := stamp(seen[0].in, new(big.Int))
	alpha := new(big.Int).Sub(unsigned(seen[0].out.cml), unsigned(bare.cml))
	for _, s := range seen {
		if stamp(s.in, alpha) != s.out {
			return nil, errNothingLearned
		}
	}
	return func(in values, _ int) values { return stamp(in, alpha) }, nil
}

func unsigned(v uint64) *big.Int { return new(big.Int).SetUint64(v) }

// primeIn is the prime above most and below 2^63 that n is a small multiple of,
// or nil.
func primeIn(n *big.Int, most uint64) *big.Int {
	const factors = 1000
	if n.Sign() == 0 {
		return nil
	}
	for f := int64(1); f < factors; f++ {
		p, rest := new(big.Int).QuoRem(n, big.NewInt(f), new(big.Int))
		if p.Cmp(unsigned(most)) <= 0 {
			return nil
		}
		if rest.Sign() == 0 && p.BitLen() < 64 && p.ProbablyPrime(20) {
			return p
		}
	}
	return nil
}

// learnMasked learns a stamp of opot from packets with consecutive numbers. Masks stay the same
// for an epoch, so another packet's RND before and after the hop cancels RND's mask. For CML, a
// link carries
//
//	mask XOR (a + i*l mod p)
//
// for packet i: every earlier stamp is linear in RND, too. As p is odd, the lowest bits show at
// which packets the sum exceeded p; then the sums are a + i*l - k_i*p, and a, l and p follow bit
// by bit from the lowest.
func learnMasked(seen []tapped) (forger, error) {
	if len(seen) < 4 || !consecutive(seen) {
		return nil, errNothingLearned
	}
	carried := make([]uint64, len(seen))
	for i, s := range seen {
		carried[i] = s.out.cml
		if s.in.rnd^s.out.rnd != seen[0].in.rnd^seen[0].out.rnd {
			return nil, errNothingLearned
		}
	}
	lines := linesThrough(carried)
	if len(lines) == 0 {
		return nil, errNothingLearned
	}
	return func(in values, number int) values {
		out := values{rnd: in.rnd ^ seen[0].in.rnd ^ seen[0].out.rnd}
		// The value that most fitting candidates agree on.
		votes := map[uint64]int{}
		for _, l := range lines {
			cml := l.at(number)
			votes[cml]++
			if votes[cml] > votes[out.cml] {
				out.cml = cml
			}
		}
		return out
	}, nil
}

// consecutive: each RND is the RND before plus one, under any mask.
func consecutive(seen []tapped) bool {
	known, value := 0, uint64(0) // the lower bits of the first number that are known
	for i := range len(seen) - 1 {
		flipped := seen[i].in.rnd ^ seen[i+1].in.rnd
		if flipped&(flipped+1) != 0 || flipped == 0 {
			return false
		}
		// As many ones at the end of the number as bits flipped, less one.
		ones := bits.Len64(flipped) - 1
		now := (uint64(1)<<ones - 1) - uint64(i)
		if wide := ones + 1; wide > known {
			if mask := uint64(1)<<known - 1; now&mask != value&mask {
				return false
			}
			known, value = wide, now
		} else if mask := uint64(1)<<wide - 1; now&mask != value&mask {
			return false
		}
	}
	return true
}

// line is (a + i*l mod p) under a mask. p is 0 if no sum went beyond it.
type line struct{ a, l, p, mask uint64 }

func (l line) at(i int) uint64 {
	sum := new(big.Int).Mul(unsigned(l.l), big.NewInt(int64(i)))
	sum.Add(sum, unsigned(l.a))
	if l.p != 0 {
		sum.Mod(sum, unsigned(l.p))
	}
	return sum.Uint64() ^ l.mask
}

// statesMax bounds the search: for tags no state is left after a few bits; for sums, a handful.
const statesMax = 1 << 14

// linesThrough are the lines that carried may be, in as many packets as there
// are; none: it is no line.
func linesThrough(carried []uint64) (found []line) {
	for odd := range uint64(2) { // the lowest bit of l
		beyond := make([]uint64, len(carried)) // k_i
		for i := 1; i < len(carried); i++ {
			beyond[i] = beyond[i-1] + ((carried[i]^carried[i-1])&1 ^ odd)
		}
		found = append(found, liftLines(carried, beyond)...)
	}
	return found
}

// liftLines finds a, l and p bit by bit.
func liftLines(carried, beyond []uint64) (found []line) {
	wraps := slices.Max(beyond) > 0
	states := []line{{}}
	for bit := range 64 {
		var next []line
		for _, s := range states {
			for guess := range uint64(8) {
				g := line{a: s.a | guess&1<<bit, l: s.l | guess>>1&1<<bit, p: s.p | guess>>2<<bit}
				if bit == 0 && wraps && g.p == 0 || !wraps && g.p != 0 {
					continue
				}
				if g.fits(carried, beyond, bit) {
					next = append(next, g)
				}
			}
		}
		if len(next) == 0 || len(next) > statesMax {
			return nil
		}
		states = next
	}
	for _, s := range states {
		s.mask = carried[0] ^ s.a
		if s.a < 1<<63 && s.l < 1<<63 && (!wraps || s.p < 1<<63 && s.a < s.p && s.l < s.p && unsigned(s.p).ProbablyPrime(20)) && s.through(carried) {
			found = append(found, s)
		}
	}
	return found
}

// fits: one bit of all packets agrees with the line, apart from the mask's.
func (l line) fits(carried, beyond []uint64, bit int) bool {
	first := (carried[0] ^ l.a) >> bit & 1
	for i, c := range carried {
		if (c^(l.a+uint64(i)*l.l-beyond[i]*l.p))>>bit&1 != first {
			return false
		}
	}
	return true
}

func (l line) through(carried []uint64) bool {
	for i, c := range carried {
		if l.at(i) != c {
			return false
		}
	}
	return true
}
