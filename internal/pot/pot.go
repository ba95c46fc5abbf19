// Package pot is the arithmetic of the proof, written to be read and checked:
// secrets of a path, one hop's stamp, the verifier's verdict. It is the slow
// oracle of the programs in bpf/, which must agree with it bit for bit, and it
// makes the secrets that they use. It does no I/O but for the reader of random
// bytes that it is given.
package pot

import "github.com/waystamp/waystamp/internal/model"

// Values are the two proof fields of a packet: RND and CML. For the keyed
// schemes CML is the tag, as the number that its eight bytes are in network
// order.
type Values struct {
	RND, CML uint64
}

// Mask is what OPoT XORs onto Values on one link (draft-08 section 3.5). The
// zero Mask masks nothing.
type Mask struct {
	RND, CML uint64
}

// Header is what the proof TLV says beside its values. It is part of what a
// keyed tag covers.
type Header struct {
	Scheme model.Scheme
	Epoch  uint8
	Path   uint32
}

// Key is a SipHash key, its bytes in the order of the reference code. It
// prints as [redacted].
type Key [16]byte

func (Key) String() string { return "[redacted]" }

// GoString keeps %#v from printing the key.
func (Key) GoString() string { return "pot.Key([redacted])" }

// MarshalText refuses: files that hold keys say so with a type of their own.
func (Key) MarshalText() ([]byte, error) { return nil, errKeyMarshal }

// Polynomial are the parameters of one position under pot and opot.
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

// Verifier is what the egress knows beyond its Share.
type Verifier struct {
	Secret uint64 // s = f1(0); pot, opot
	Keys   []Key  // K_0 .. K_(k-2); keyed, keyed-flow
}
