// Package pot is the arithmetic of the proof, written to be read and checked:
// secrets of a path, one hop's stamp, the verifier's verdict. It is the slow
// oracle of the programs in bpf/, which must agree with it bit for bit, and it
// makes the secrets that they use. It does no I/O but for the reader of random
// bytes that it is given, knows neither packets nor plan files, and takes no
// care to run in constant time but in its comparison of tags. The planner, the
// explainer, the data path's loader and the command line call it.
package pot

import (
	"fmt"

	"github.com/waystamp/waystamp/internal/model"
)

// Values are the two proof fields of a packet: RND and CML. For the keyed
// schemes CML is the tag, as the number that its eight bytes are in network
// order.
type Values struct {
	RND, CML uint64
}

// Mask is what OPoT XORs onto Values on one link (draft-08 section 3.5). The
// zero Mask masks nothing. It prints as [redacted].
type Mask struct {
	RND, CML uint64
}

// Header is what the proof TLV says beside its values. It is part of what a
// keyed tag covers. Scheme is the plan's, never a packet's.
type Header struct {
	Scheme model.Scheme
	Epoch  uint8
	Path   uint32
}

// Key is a SipHash key, its bytes in the order of the reference code. It
// prints as [redacted].
type Key [16]byte

// Polynomial are the parameters of one position under pot and opot. It prints
// as [redacted].
type Polynomial struct {
	Prime  uint64 // p < 2^63
	Share  uint64 // f1(x)
	Public uint64 // the rest of f2 at x: f2(x) - RND
	LPC    uint64 // Lagrange polynomial constant
	Up     Mask   // of the link towards the headend; pot, and the headend: zero
	Down   Mask   // of the link towards the egress; pot, and the egress: zero
}

// Share is what one position of a path knows. Which fields count is the
// scheme's matter. Position 0 is the headend's, the last one the egress's.
type Share struct {
	Position   uint8
	Key        Key // keyed, keyed-flow; the egress has none here
	Bind       Key // keyed-flow: K_B, the same at every position
	Polynomial Polynomial
}

// Verifier is what the egress knows beyond its Share. It prints as [redacted].
type Verifier struct {
	Secret uint64 // s = f1(0); pot, opot
	Keys   []Key  // K_0 .. K_(k-2); keyed, keyed-flow
}

// Result is what the arithmetic says of a packet at its egress. A refusal for
// another reason than these two is not arithmetic.
type Result uint8

const (
	Verified Result = iota
	Proof           // the values are not those of the path
	Range           // they are, but not below the prime: pot, opot
)

var resultNames = []string{"verified", "proof", "range"}

func (r Result) String() string {
	if int(r) < len(resultNames) {
		return resultNames[r]
	}
	return fmt.Sprintf("Result(%d)", uint8(r))
}

// MarshalText implements encoding.TextMarshaler.
func (r Result) MarshalText() ([]byte, error) {
	if int(r) < len(resultNames) {
		return []byte(resultNames[r]), nil
	}
	return nil, fmt.Errorf("proof result %d has no name", uint8(r))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Result) UnmarshalText(b []byte) error {
	for i, n := range resultNames {
		if n == string(b) {
			*r = Result(i)
			return nil
		}
	}
	return fmt.Errorf("%q is not a proof result; expect verified, proof or range", b)
}

// Of applies the mask to values, or takes it off: the two are the same.
func (m Mask) Of(v Values) Values {
	return Values{RND: v.RND ^ m.RND, CML: v.CML ^ m.CML}
}
