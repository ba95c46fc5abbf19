package pot

import (
	"fmt"

	"github.com/waystamp/waystamp/internal/model"
)

// Engine does the hops' arithmetic: the Model, or the programs in the kernel.
// Values are as on the wire. The flow is that of the packet; only keyed-flow
// uses it.
type Engine interface {
	// Stamp is one hop's work: what it receives in, what it sends out.
	Stamp(s Share, h Header, f Flow, wire Values) (Values, error)
	// Verify is the egress's work, its own share included. The values are
	// those that it came to, not masked.
	Verify(egress Share, v Verifier, h Header, f Flow, wire Values) (Values, Result, error)
}

// Model is the Engine of this package.
type Model struct{}

var _ Engine = Model{}

// Stamp implements Engine.
func (Model) Stamp(s Share, h Header, f Flow, wire Values) (Values, error) {
	if err := modelled(h.Scheme); err != nil {
		return Values{}, err
	}
	return s.StampFlow(h, wire, s.Binding(f)).WireOut, nil
}

// Verify implements Engine.
func (Model) Verify(egress Share, v Verifier, h Header, f Flow, wire Values) (Values, Result, error) {
	if err := modelled(h.Scheme); err != nil {
		return Values{}, Proof, err
	}
	final, r := v.VerifyFlow(egress, h, wire, egress.Binding(f))
	return final, r, nil
}

func modelled(s model.Scheme) error {
	if s > model.SchemeKeyedFlow {
		return fmt.Errorf("scheme %v is not known", s)
	}
	return nil
}

// Visit is what one visited hop came to.
type Visit struct {
	Hop  int    // 1 is the headend
	Out  Values // as the hop computed them
	Wire Values // as it sent them; of the last, as it would
}

// Evaluation is a packet's way through a profile.
type Evaluation struct {
	Result Result
	Visits []Visit // in visiting order, never empty
}

// Evaluate sends a packet with this RND through the hops of a profile in the
// order given (1 is the headend; hops may be left out and visited again). The
// hop visited first receives RND and a CML of zero. Under pot and opot the one
// visited last stamps and then verifies with the profile's key, whichever it is,
// and each hop uses its own masks; under the keyed schemes the egress, which is no
// hop of the profile, verifies behind it. A nil order is that of the profile.
func Evaluate(e Engine, p Profile, rnd uint64, order []int) (Evaluation, error) {
	if order == nil {
		for i := range p.Shares {
			order = append(order, i+1)
		}
	}
	if err := p.checkOrder(order); err != nil {
		return Evaluation{}, err
	}
	var ev Evaluation
	wire := Values{RND: rnd}
	for i, hop := range order {
		s := p.Shares[hop-1]
		v := Visit{Hop: hop}
		var err error
		if i < len(order)-1 || p.Header.Scheme.Keyed() {
			v.Wire, err = e.Stamp(s, p.Header, p.Flow, wire)
			v.Out = s.Polynomial.Down.Of(v.Wire)
		} else {
			v.Out, ev.Result, err = e.Verify(s, p.Verifier, p.Header, p.Flow, wire)
			v.Wire = s.Polynomial.Down.Of(v.Out)
		}
		if err != nil {
			return Evaluation{}, fmt.Errorf("visit %d, of hop %d: %w", i+1, hop, err)
		}
		ev.Visits = append(ev.Visits, v)
		wire = v.Wire
	}
	if p.Header.Scheme.Keyed() {
		egress := Share{Position: uint8(len(p.Shares)), Bind: p.Shares[0].Bind}
		var err error
		if _, ev.Result, err = e.Verify(egress, p.Verifier, p.Header, p.Flow, wire); err != nil {
			return Evaluation{}, fmt.Errorf("the egress: %w", err)
		}
	}
	return ev, nil
}
