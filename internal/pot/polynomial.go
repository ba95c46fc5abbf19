package pot

import (
	"errors"
	"math/big"
)

// PrimeBits is the greatest length of a prime: p < 2^63.
const PrimeBits = 63

// Stamp adds this position's part to values that are not masked (draft-08
// section 3.2): CML + (f1(x) + f2(x)) * LPC mod p with f2(x) = RND + Public.
// RND stays as it is, also when it is not below p; CML is taken mod p.
func (p Polynomial) Stamp(in Values) Values {
	sum := number(p.Share)
	sum.Add(sum, number(in.RND))
	sum.Add(sum, number(p.Public))
	sum.Mul(sum, number(p.LPC))
	sum.Add(sum, number(in.CML))
	sum.Mod(sum, number(p.Prime))
	return Values{RND: in.RND, CML: sum.Uint64()}
}

// Verify says whether CML, with this position's part in it, is (RND + s) mod p,
// and then whether the values as received, before that part, were below p.
func (p Polynomial) Verify(secret uint64, received, stamped Values) Result {
	want := number(received.RND)
	want.Add(want, number(secret))
	want.Mod(want, number(p.Prime))
	switch {
	case want.Uint64() != stamped.CML:
		return Proof
	case received.RND >= p.Prime || received.CML >= p.Prime:
		return Range
	}
	return Verified
}

// Alpha is the part of a stamp that does not depend on the packet:
// (Share + Public) * LPC mod p. A stamp adds Alpha + RND * LPC.
func (p Polynomial) Alpha() uint64 {
	a := number(p.Share)
	a.Add(a, number(p.Public))
	a.Mul(a, number(p.LPC))
	return a.Mod(a, number(p.Prime)).Uint64()
}

// LPCShoup is floor(LPC * 2^64 / p), with which Shoup's method multiplies any
// 64-bit number by LPC mod p without a division. LPC must be below p.
func (p Polynomial) LPCShoup() uint64 {
	l := number(p.LPC)
	l.Lsh(l, 64)
	return l.Div(l, number(p.Prime)).Uint64()
}

// Check says what is wrong with the parameters, without their values.
func (p Polynomial) Check() error {
	switch {
	case p.Prime >= 1<<PrimeBits:
		return errors.New("the prime is not below 2^63")
	case !isPrime(p.Prime):
		return errors.New("the prime is not a prime number")
	case p.Share >= p.Prime:
		return errors.New("the secret share is not below the prime")
	case p.Public >= p.Prime:
		return errors.New("the public polynomial is not below the prime")
	case p.LPC >= p.Prime:
		return errors.New("the LPC is not below the prime")
	}
	return nil
}

// isPrime is exact: below 2^64 the Baillie-PSW test has no exceptions.
func isPrime(n uint64) bool { return number(n).ProbablyPrime(0) }

func number(n uint64) *big.Int { return new(big.Int).SetUint64(n) }
