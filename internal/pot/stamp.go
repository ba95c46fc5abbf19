package pot

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/waystamp/waystamp/internal/model"
)

// Step is what one hop does to the values of a packet.
type Step struct {
	In      Values // as received, the upstream link's mask taken off
	Out     Values // as this hop computed them
	WireOut Values // as sent: under the downstream link's mask
}

// Stamp is one hop's work on values as they are on the wire. The headend
// starts with its RND and a CML of zero. Masks are applied as they are: under
// pot they are zero, and keyed has none. A scheme without a stamp of this kind
// (keyed-flow needs a Binding: see StampFlow) is the caller's mistake, and a
// panic.
func (s Share) Stamp(h Header, in Values) Step {
	if h.Scheme == model.SchemeKeyedFlow {
		panic("pot: keyed-flow stamps a packet's flow: use StampFlow")
	}
	return s.stamp(h, in, nil)
}

// StampFlow is Stamp for every scheme. Only keyed-flow uses b.
func (s Share) StampFlow(h Header, in Values, b Binding) Step {
	return s.stamp(h, in, &b)
}

func (s Share) stamp(h Header, in Values, b *Binding) Step {
	switch h.Scheme {
	case model.SchemePoT, model.SchemeOPoT:
		in = s.Polynomial.Up.Of(in)
		out := s.Polynomial.Stamp(in)
		return Step{In: in, Out: out, WireOut: s.Polynomial.Down.Of(out)}
	case model.SchemeKeyed:
		out := stampKeyed(s.Key, h, s.Position, in, nil)
		return Step{In: in, Out: out, WireOut: out}
	case model.SchemeKeyedFlow:
		out := stampKeyed(s.Key, h, s.Position, in, b)
		return Step{In: in, Out: out, WireOut: out}
	}
	panic(fmt.Sprintf("pot: no stamp for %v", h.Scheme))
}

// Walk stamps a fresh packet with the shares in the order given, and returns
// what each did. It panics where Stamp does.
func Walk(h Header, rnd uint64, visits ...Share) []Step {
	if h.Scheme == model.SchemeKeyedFlow {
		panic("pot: keyed-flow stamps a packet's flow: use WalkFlow")
	}
	return WalkFlow(h, rnd, Flow{}, visits...)
}

// WalkFlow is Walk for every scheme, of a packet of that flow.
func WalkFlow(h Header, rnd uint64, f Flow, visits ...Share) []Step {
	steps := make([]Step, 0, len(visits))
	wire := Values{RND: rnd}
	for _, s := range visits {
		st := s.StampFlow(h, wire, s.Binding(f))
		steps = append(steps, st)
		wire = st.WireOut
	}
	return steps
}

// Verify is the egress's work on values as they are on the wire, with the
// egress's own share. It returns the values that it came to: under pot and
// opot with the egress's part in them, under the keyed schemes as received,
// since the egress stamps nothing. It panics where Stamp does.
func (v Verifier) Verify(egress Share, h Header, wire Values) (Values, Result) {
	if h.Scheme == model.SchemeKeyedFlow {
		panic("pot: keyed-flow verifies a packet's flow: use VerifyFlow")
	}
	return v.verify(egress, h, wire, nil)
}

// VerifyFlow is Verify for every scheme. Only keyed-flow uses b.
func (v Verifier) VerifyFlow(egress Share, h Header, wire Values, b Binding) (Values, Result) {
	return v.verify(egress, h, wire, &b)
}

func (v Verifier) verify(egress Share, h Header, wire Values, b *Binding) (Values, Result) {
	switch h.Scheme {
	case model.SchemePoT, model.SchemeOPoT:
		st := egress.stamp(h, wire, nil)
		return st.Out, egress.Polynomial.Verify(v.Secret, st.In, st.Out)
	case model.SchemeKeyed:
		return wire, v.verifyKeyed(h, wire, nil)
	case model.SchemeKeyedFlow:
		return wire, v.verifyKeyed(h, wire, b)
	}
	panic(fmt.Sprintf("pot: no verifier for %v", h.Scheme))
}

func (v Verifier) verifyKeyed(h Header, wire Values, b *Binding) Result {
	want := Values{RND: wire.RND}
	for j, k := range v.Keys {
		want = stampKeyed(k, h, uint8(j), want, b)
	}
	var w, g [8]byte
	binary.BigEndian.PutUint64(w[:], want.CML)
	binary.BigEndian.PutUint64(g[:], wire.CML)
	if subtle.ConstantTimeCompare(w[:], g[:]) != 1 {
		return Proof
	}
	return Verified
}

// Check says what is wrong with the secrets of an egress under a scheme,
// without their values: a verifier without keys, for one, accepts whoever
// leaves CML at zero.
func (v Verifier) Check(scheme model.Scheme, egress Share) error {
	switch scheme {
	case model.SchemePoT, model.SchemeOPoT:
		if err := egress.Polynomial.Check(); err != nil {
			return err
		}
		if v.Secret >= egress.Polynomial.Prime {
			return errors.New("the validator key is not below the prime")
		}
		return nil
	case model.SchemeKeyed, model.SchemeKeyedFlow:
		if len(v.Keys) < PositionsMin-1 || len(v.Keys) > PositionsMax-1 {
			return fmt.Errorf("the verifier has %d keys; a path has %d to %d", len(v.Keys), PositionsMin-1, PositionsMax-1)
		}
		if len(v.Keys) != int(egress.Position) {
			return fmt.Errorf("the verifier has %d keys and the egress is at position %d; they must agree", len(v.Keys), egress.Position)
		}
		return nil
	}
	return fmt.Errorf("scheme %v is not known", scheme)
}
