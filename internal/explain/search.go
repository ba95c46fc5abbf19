package explain

import (
	"math/bits"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
)

// Bounds of what is tried, by the number of positions that should have stamped.
// Each keeps the longest search within a fraction of a second.
const (
	sequencesMax    = 5 // all sequences with repetitions, up to two stamps too many
	arrangementsMax = 8 // all orders of all selections
	// Beyond: all selections in order; and, also with one hop missing, one
	// moved, two exchanged or one repeated.
)

// search looks for what reproduces the values in want, which reached the
// position place of path.
type search struct {
	paths   []plan.Path
	path    *plan.Path
	place   int
	header  pot.Header // that the proof named when it was refused
	want    pot.Values
	flow    pot.Flow
	carried []int // positions that the carried segment list names, in its order

	own   []stamper // of path, by position
	seen  map[string]bool
	found []finding
}

// stamper is one position's share and the header under which it stamps.
type stamper struct {
	path     *plan.Path
	position int
	header   pot.Header
	share    *pot.Share
	binding  pot.Binding
	alpha    uint64 // of a polynomial
	index    byte   // in search.own, if it is there
}

// finding is a hypothesis that reproduces the values.
type finding struct {
	kind   Kind
	stamps []stamper
	start  uint64
	change *Change
	primes uint64
	flow   *FlowChange
}

func polynomial(s model.Scheme) bool { return s == model.SchemePoT || s == model.SchemeOPoT }

func (s *search) stamper(p *plan.Path, position int, h pot.Header) stamper {
	st := stamper{path: p, position: position, header: h, share: &p.Shares[position]}
	// A hop takes the scheme from its plan, and only a packet that names it.
	st.header.Scheme = p.Scheme
	switch {
	case polynomial(p.Scheme):
		st.alpha = st.share.Polynomial.Alpha()
	case st.header.Scheme == model.SchemeKeyedFlow:
		st.binding = st.share.Binding(s.flow)
	}
	return st
}

// stamp is the stamper's work on values on the wire. It is what pot.Share does,
// but for polynomials without math/big; what is found this way is confirmed by
// pot itself.
func (st *stamper) stamp(v pot.Values) pot.Values {
	if !polynomial(st.header.Scheme) {
		return st.share.StampFlow(st.header, v, st.binding).WireOut
	}
	q := &st.share.Polynomial
	v = q.Up.Of(v)
	hi, lo := bits.Mul64(v.RND%q.Prime, q.LPC%q.Prime)
	_, product := bits.Div64(hi, lo, q.Prime)
	// Three terms below p < 2^63: two at a time.
	v.CML = (v.CML%q.Prime + st.alpha) % q.Prime
	v.CML = (v.CML + product) % q.Prime
	return q.Down.Of(v)
}

// masks is what the stamper's masks do to RND on the wire, in sum.
func (st *stamper) masks() uint64 {
	if !polynomial(st.header.Scheme) {
		return 0
	}
	return st.share.Polynomial.Up.RND ^ st.share.Polynomial.Down.RND
}

// startOf is the RND that a packet must have had before these stamps, and a
// change, to have the one that it has. Stamps only mask it.
func (s *search) startOf(stamps []stamper, c *Change) uint64 {
	r := s.want.RND
	for i := range stamps {
		r ^= stamps[i].masks()
	}
	if c != nil && c.Field == "RND" {
		r ^= 1 << c.Bit
	}
	return r
}

// reproduces walks the stamps with the arithmetic of pot. change.After counts
// with its first place only.
func (s *search) reproduces(f finding) bool {
	v := pot.Values{RND: f.start}
	for i := 0; ; i++ {
		if f.change != nil && f.change.After[0] == i {
			v = f.change.of(v)
		}
		if i == len(f.stamps) {
			break
		}
		st := &f.stamps[i]
		v = st.share.StampFlow(st.header, v, st.binding).WireOut
	}
	if f.primes != 0 {
		q := &s.path.Shares[s.place].Polynomial
		v = q.Up.Of(v)
		v.CML += f.primes * q.Prime
		v = q.Up.Of(v)
	}
	return v == s.want
}

// of is v with the change.
func (c *Change) of(v pot.Values) pot.Values {
	if c.Field == "RND" {
		v.RND ^= 1 << c.Bit
	} else {
		v.CML ^= 1 << c.Bit
	}
	return v
}

// run tries everything. The simplest findings come first.
func (s *search) run() []finding {
	s.seen = make(map[string]bool)
	if s.header.Path != s.path.Path || s.header.Epoch != s.path.Epoch {
		// Nobody has secrets for what the proof names: whose were they?
		s.tryOtherSecrets()
		return s.found
	}
	for j := range s.place {
		st := s.stamper(s.path, j, s.header)
		st.index = byte(j)
		s.own = append(s.own, st)
	}
	whole := s.indices()
	s.trySequence(whole)
	s.tryUnreduced()
	s.tryCarried()
	switch n := len(whole); {
	case n <= sequencesMax:
		s.trySequences(n + 2)
	case n <= arrangementsMax:
		s.tryArrangements()
		s.tryRepeated(whole)
		for i := range whole {
			s.tryRepeated(slices.Delete(slices.Clone(whole), i, i+1))
		}
	default:
		s.trySelections()
		s.tryMoved(whole)
		for i := range whole {
			one := slices.Delete(slices.Clone(whole), i, i+1)
			s.tryMoved(one)
			s.tryRepeated(one)
		}
		s.tryRepeated(whole)
	}
	s.tryOtherSecrets()
	s.tryChangedBits()
	if len(s.found) == 0 && s.header.Scheme == model.SchemeKeyedFlow {
		s.tryOtherFlows()
	}
	return s.found
}

// tryOtherFlows: all stamps in order, but of a packet whose flow differs in one
// part from this one's.
func (s *search) tryOtherFlows() {
	for _, field := range []string{"destination port", "source port", "protocol"} {
		f, part, most := s.flow, (*uint16)(nil), 0xffff
		var protocol uint16
		switch field {
		case "destination port":
			part = &f.DestinationPort
		case "source port":
			part = &f.SourcePort
		case "protocol":
			protocol, part, most = uint16(f.Protocol), &protocol, 0xff
		}
		is := *part
		for v := range most + 1 {
			*part = uint16(v)
			if field == "protocol" {
				f.Protocol = uint8(v)
			}
			if *part == is {
				continue
			}
			stamps := slices.Clone(s.own)
			binding := s.own[0].share.Binding(f)
			for i := range stamps {
				stamps[i].binding = binding
			}
			found := finding{kind: OtherFlow, stamps: stamps, start: s.want.RND, flow: &FlowChange{Field: field, Was: *part, Is: is}}
			if s.reproduces(found) {
				s.found = append(s.found, found)
			}
		}
	}
}

// indices are all positions that should have stamped.
func (s *search) indices() []byte {
	all := make([]byte, len(s.own))
	for i := range all {
		all[i] = byte(i)
	}
	return all
}

// commutes: the sum of pot is the same in every order.
func (s *search) commutes() bool { return s.path.Scheme == model.SchemePoT }

// trySequence tries stamps of the own path, in this order.
func (s *search) trySequence(seq []byte) {
	var r [32]stamper
	stamps := r[:0]
	for _, i := range seq {
		stamps = append(stamps, s.own[i])
	}
	v := pot.Values{RND: s.startOf(stamps, nil)}
	for i := range stamps {
		v = stamps[i].stamp(v)
	}
	if v.CML == s.want.CML {
		s.foundSequence(seq)
	}
}

// foundSequence keeps a sequence that pot confirms, once.
func (s *search) foundSequence(seq []byte) {
	seq = slices.Clone(seq)
	if s.commutes() {
		slices.Sort(seq)
	}
	if s.seen[string(seq)] {
		return
	}
	s.seen[string(seq)] = true
	f := finding{kind: s.kind(seq)}
	for _, i := range seq {
		f.stamps = append(f.stamps, s.own[i])
	}
	f.start = s.startOf(f.stamps, nil)
	if s.reproduces(f) {
		s.found = append(s.found, f)
	}
}

func (s *search) kind(seq []byte) Kind {
	sorted := slices.Sorted(slices.Values(seq))
	switch {
	case len(seq) == 0:
		return Unstamped
	case len(slices.Compact(slices.Clone(sorted))) < len(seq):
		return Repeated
	case !slices.Equal(sorted, seq):
		return Order
	case len(seq) < len(s.own):
		return Skipped
	}
	return Whole
}

// trySequences tries all sequences of at most n stamps.
func (s *search) trySequences(n int) {
	for length := range n + 1 {
		seq := make([]byte, length)
		for {
			if !s.commutes() || slices.IsSorted(seq) {
				s.trySequence(seq)
			}
			i := length - 1
			for i >= 0 && int(seq[i]) == len(s.own)-1 {
				seq[i] = 0
				i--
			}
			if i < 0 {
				break
			}
			seq[i]++
		}
	}
}

// trySelections tries all selections, in order.
func (s *search) trySelections() {
	var seq []byte
	for set := range uint32(1) << len(s.own) {
		seq = seq[:0]
		for i := range s.own {
			if set>>i&1 == 1 {
				seq = append(seq, byte(i))
			}
		}
		s.trySequence(seq)
	}
}

// tryArrangements tries all orders of all selections. Where RND starts depends
// on the selection only, so that a walk is shared by all that begin like it.
func (s *search) tryArrangements() {
	if s.commutes() {
		s.trySelections()
		return
	}
	for set := range uint32(1) << len(s.own) {
		var stamps []stamper
		for i := range s.own {
			if set>>i&1 == 1 {
				stamps = append(stamps, s.own[i])
			}
		}
		s.arrange(nil, set, pot.Values{RND: s.startOf(stamps, nil)})
	}
}

func (s *search) arrange(seq []byte, left uint32, v pot.Values) {
	if left == 0 {
		if v.CML == s.want.CML {
			s.foundSequence(seq)
		}
		return
	}
	for rest := left; rest != 0; rest &= rest - 1 {
		i := bits.TrailingZeros32(rest)
		s.arrange(append(seq, byte(i)), left&^(1<<i), s.own[i].stamp(v))
	}
}

// tryMoved tries seq with one stamp at another place, and with two exchanged.
func (s *search) tryMoved(seq []byte) {
	if s.commutes() {
		return
	}
	for i := range seq {
		for j := range seq {
			if i == j {
				continue
			}
			swapped := slices.Clone(seq)
			swapped[i], swapped[j] = swapped[j], swapped[i]
			s.trySequence(swapped)
			moved := slices.Delete(slices.Clone(seq), i, i+1)
			s.trySequence(slices.Insert(moved, j, seq[i]))
		}
	}
}

// tryRepeated tries seq with one stamp once more, anywhere.
func (s *search) tryRepeated(seq []byte) {
	for _, again := range seq {
		for at := range len(seq) + 1 {
			s.trySequence(slices.Insert(slices.Clone(seq), at, again))
		}
	}
}

// tryCarried takes the segment list of the packet at its word.
func (s *search) tryCarried() {
	seq := []byte{0}
	for _, i := range s.carried {
		if len(seq) < model.SegmentsMax && i < len(s.own) {
			seq = append(seq, byte(i))
		}
	}
	s.trySequence(seq)
	s.trySequence(seq[1:])
}

// tryUnreduced: the verifier's sum is right modulo p for CML plus any multiple
// of p, which no hop sends.
func (s *search) tryUnreduced() {
	if !polynomial(s.path.Scheme) {
		return
	}
	q := &s.path.Shares[s.place].Polynomial
	f := finding{kind: Unreduced, stamps: s.own, start: s.startOf(s.own, nil)}
	if f.primes = q.Up.Of(s.want).CML / q.Prime; f.primes != 0 && s.reproduces(f) {
		s.found = append(s.found, f)
	}
}

// tryOtherSecrets tries the stamps of other epochs and other paths: all of
// them, those of a packet that changed its name on the way, and of another
// epoch also a single hop's.
func (s *search) tryOtherSecrets() {
	for i := range s.paths {
		q := &s.paths[i]
		if len(q.Shares) != len(q.Hops) || q.Path == s.header.Path && q.Epoch == s.header.Epoch {
			continue
		}
		kind := OtherPath
		if q.Path == s.header.Path {
			kind = OtherEpoch
		}
		headers := []pot.Header{q.Header()}
		if !polynomial(q.Scheme) {
			headers = append(headers, s.header) // it was named like this all the way
		}
		for _, h := range headers {
			var all []stamper
			for j := range len(q.Hops) - 1 {
				all = append(all, s.stamper(q, j, h))
			}
			s.tryOther(kind, all)
			if s.place < len(all) {
				s.tryOther(kind, all[:s.place])
			}
			for j := 1; j < len(s.own) && j <= len(all); j++ {
				s.tryOther(kind, slices.Concat(all[:j], s.own[j:]))
				if kind == OtherEpoch && j < len(all) {
					one := slices.Clone(s.own)
					one[j] = all[j]
					s.tryOther(kind, one)
				}
			}
		}
	}
}

func (s *search) tryOther(kind Kind, stamps []stamper) {
	f := finding{kind: kind, stamps: stamps, start: s.startOf(stamps, nil)}
	v := pot.Values{RND: f.start}
	for i := range stamps {
		v = stamps[i].stamp(v)
	}
	if v.CML != s.want.CML || !s.reproduces(f) {
		return
	}
	if !slices.ContainsFunc(s.found, func(g finding) bool { return g.same(f) }) {
		s.found = append(s.found, f)
	}
}

// same: the stamps are those of f.
func (f finding) same(g finding) bool {
	return f.kind == g.kind && slices.EqualFunc(f.stamps, g.stamps, func(a, b stamper) bool {
		return a.path == b.path && a.position == b.position && a.header == b.header
	})
}

// tryChangedBits: all stamps in order, and one bit of a value is not as it was
// sent on some link.
func (s *search) tryChangedBits() {
	// Values before the change are those of a walk without it, for each of the
	// 65 RNDs that a packet may have started with: its own, and with one bit
	// changed.
	for _, field := range []string{"RND", "CML"} {
		for bit := range 64 {
			c := &Change{Field: field, Bit: bit}
			start := s.startOf(s.own, c)
			v := pot.Values{RND: start}
			for i := range s.own {
				v = s.own[i].stamp(v)
				end := c.of(v)
				for j := i + 1; j < len(s.own); j++ {
					end = s.own[j].stamp(end)
				}
				if end != s.want {
					continue
				}
				f := finding{kind: BitChanged, stamps: s.own, start: start, change: &Change{Field: field, Bit: bit, After: []int{i + 1}}}
				if s.reproduces(f) {
					c.After = append(c.After, i+1)
				}
			}
			if len(c.After) > 0 {
				s.found = append(s.found, finding{kind: BitChanged, stamps: s.own, start: start, change: c})
			}
		}
	}
}
