package pot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"math/bits"

	"github.com/waystamp/waystamp/internal/model"
)

// Positions of a path, headend and egress included.
const (
	PositionsMin = 2
	PositionsMax = model.SegmentsMax + 1
)

// PrimeMin is the least prime that Generate makes. Every RND is below it.
const PrimeMin = 1 << 60

// Draws from the reader for one number before it counts as broken. One prime
// needs about 22 on average; 10 000 fail by chance once in 10^200.
const drawsMax = 10_000

var errRandom = errors.New("the source of random bytes repeats itself")

// Generate makes all secrets of one path with that many positions, from random
// bytes (crypto/rand.Reader in production): the share of each position in
// order, and what the egress verifies with. Same bytes, same secrets.
//
// pot and opot: a prime of 61 to 63 bits, a secret and a public polynomial of
// degree positions - 1, distinct nonzero x. opot: a mask per link. keyed: a key
// per position that stamps. keyed-flow: and one for the binding.
func Generate(random io.Reader, scheme model.Scheme, positions int) ([]Share, Verifier, error) {
	shares, v, err := generate(random, scheme, positions)
	if err != nil {
		return nil, Verifier{}, fmt.Errorf("make %v secrets for %d positions: %w", scheme, positions, err)
	}
	return shares, v, nil
}

func generate(random io.Reader, scheme model.Scheme, positions int) ([]Share, Verifier, error) {
	if positions < PositionsMin || positions > PositionsMax {
		return nil, Verifier{}, fmt.Errorf("a path has %d to %d positions", PositionsMin, PositionsMax)
	}
	shares := make([]Share, positions)
	for j := range shares {
		shares[j].Position = uint8(j)
	}
	var v Verifier
	var err error
	switch scheme {
	case model.SchemePoT:
		v.Secret, err = generatePolynomials(random, shares)
	case model.SchemeOPoT:
		if v.Secret, err = generatePolynomials(random, shares); err == nil {
			err = generateMasks(random, shares)
		}
	case model.SchemeKeyed:
		v.Keys, err = generateKeys(random, shares)
	case model.SchemeKeyedFlow:
		if v.Keys, err = generateKeys(random, shares); err == nil {
			err = generateBinding(random, shares)
		}
	default:
		err = errors.New("the scheme is not known")
	}
	return shares, v, err
}

func generateKeys(random io.Reader, shares []Share) ([]Key, error) {
	keys := make([]Key, len(shares)-1)
	for j := range keys {
		if _, err := io.ReadFull(random, keys[j][:]); err != nil {
			return nil, err
		}
		shares[j].Key = keys[j]
	}
	return keys, nil
}

func generateBinding(random io.Reader, shares []Share) error {
	var k Key
	if _, err := io.ReadFull(random, k[:]); err != nil {
		return err
	}
	for j := range shares {
		shares[j].Bind = k
	}
	return nil
}

func generateMasks(random io.Reader, shares []Share) error {
	for j := range len(shares) - 1 {
		var m Mask
		var err error
		if m.RND, err = draw(random); err != nil {
			return err
		}
		if m.CML, err = draw(random); err != nil {
			return err
		}
		shares[j].Polynomial.Down = m
		shares[j+1].Polynomial.Up = m
	}
	return nil
}

// generatePolynomials fills in all but the masks, and returns the constant of
// the secret polynomial.
func generatePolynomials(random io.Reader, shares []Share) (uint64, error) {
	p, err := drawPrime(random)
	if err != nil {
		return 0, err
	}
	secret, err := drawPolynomial(random, p, len(shares))
	if err != nil {
		return 0, err
	}
	public, err := drawPolynomial(random, p, len(shares))
	if err != nil {
		return 0, err
	}
	public[0] = 0 // RND comes with the packet
	xs, err := drawDistinct(random, p, len(shares))
	if err != nil {
		return 0, err
	}
	for j, x := range xs {
		shares[j].Polynomial = Polynomial{
			Prime:  p,
			Share:  evaluate(secret, x, p),
			Public: evaluate(public, x, p),
			LPC:    lagrange(xs, j, p),
		}
	}
	return secret[0], nil
}

// evaluate is sum(c[i] * x^i) mod p.
func evaluate(c []uint64, x, p uint64) uint64 {
	sum, prime := new(big.Int), number(p)
	for i, ci := range c {
		power := new(big.Int).Exp(number(x), big.NewInt(int64(i)), prime)
		sum.Add(sum, power.Mul(power, number(ci)))
	}
	return sum.Mod(sum, prime).Uint64()
}

// lagrange is the Lagrange polynomial of xs[j] at zero, mod p: the product of
// (0 - x_m) / (x_j - x_m) over all other m.
func lagrange(xs []uint64, j int, p uint64) uint64 {
	prime := number(p)
	above, below := big.NewInt(1), big.NewInt(1)
	for m, x := range xs {
		if m == j {
			continue
		}
		above.Mul(above, new(big.Int).Neg(number(x)))
		below.Mul(below, new(big.Int).Sub(number(xs[j]), number(x)))
	}
	below.ModInverse(below.Mod(below, prime), prime) // exists: the x are distinct mod p
	return above.Mul(above, below).Mod(above, prime).Uint64()
}

// drawPrime is uniform over the primes from PrimeMin to 2^63.
func drawPrime(random io.Reader) (uint64, error) {
	for range drawsMax {
		n, err := draw(random)
		if err != nil {
			return 0, err
		}
		n = n>>(64-PrimeBits) | 1
		if n >= PrimeMin && isPrime(n) {
			return n, nil
		}
	}
	return 0, errRandom
}

// drawPolynomial is uniform over those of degree n-1; its constant comes first.
func drawPolynomial(random io.Reader, p uint64, n int) ([]uint64, error) {
	c := make([]uint64, n)
	for i := range c {
		least := uint64(0)
		if i == n-1 {
			least = 1
		}
		var err error
		if c[i], err = drawBelow(random, least, p); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// drawDistinct are n different numbers from 1 to p-1.
func drawDistinct(random io.Reader, p uint64, n int) ([]uint64, error) {
	xs := make([]uint64, 0, n)
	seen := make(map[uint64]bool, n)
	for range drawsMax {
		if len(xs) == n {
			return xs, nil
		}
		x, err := drawBelow(random, 1, p)
		if err != nil {
			return nil, err
		}
		if !seen[x] {
			seen[x] = true
			xs = append(xs, x)
		}
	}
	return nil, errRandom
}

// drawBelow is uniform from least to p-1.
func drawBelow(random io.Reader, least, p uint64) (uint64, error) {
	for range drawsMax {
		n, err := draw(random)
		if err != nil {
			return 0, err
		}
		n >>= bits.LeadingZeros64(p)
		if n >= least && n < p {
			return n, nil
		}
	}
	return 0, errRandom
}

func draw(random io.Reader) (uint64, error) {
	var b [8]byte
	if _, err := io.ReadFull(random, b[:]); err != nil {
		return 0, fmt.Errorf("read random bytes: %w", err)
	}
	return binary.BigEndian.Uint64(b[:]), nil
}
