package explain

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
)

// tampered is a packet as it is refused.
type tampered struct {
	path     plan.Path
	position int // where it is refused
	header   pot.Header
	values   pot.Values
	list     []netip.Addr // nil: as planned
}

var flow = pot.Flow{
	Source: netip.MustParseAddr("fc00:7::2"), Destination: netip.MustParseAddr("fc00:8::2"),
	Protocol: 17, SourcePort: 4242, DestinationPort: 53,
}

func (p tampered) frame(t failer) []byte {
	inner := srv6.Packet{
		Header:  srv6.Header{NextHeader: 17, HopLimit: 60, Source: flow.Source, Destination: flow.Destination},
		Payload: []byte{4242 >> 8, 4242 & 0xff, 0, 53, 0, 8, 0, 0},
	}
	if err := inner.Fix(); err != nil {
		t.Fatal(err)
	}
	payload, err := inner.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	list := p.list
	if list == nil {
		list = p.path.Segments()
	}
	proof := srv6.Proof{Scheme: p.header.Scheme, Epoch: p.header.Epoch, Path: p.header.Path, RND: p.values.RND, CML: p.values.CML}
	outer := srv6.Packet{
		Ethernet: &srv6.Ethernet{Type: srv6.EtherTypeIPv6},
		Header:   srv6.Header{HopLimit: 60, Source: netip.MustParseAddr("fc00:1::1"), Destination: p.path.Hops[p.position].SID},
		SRH:      &srv6.SRH{NextHeader: srv6.NextHeaderIPv6, Segments: srv6.Reversed(list), TLVs: []srv6.TLV{proof.TLV()}},
		Payload:  payload,
	}
	if err := outer.Fix(); err != nil {
		t.Fatal(err)
	}
	b, err := outer.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// failer is what testing.T and rapid.T have in common here.
type failer interface{ Fatal(args ...any) }

// stream is a reproducible source of secrets.
type stream struct {
	seed [32]byte
	left []byte
}

func (s *stream) Read(b []byte) (int, error) {
	for len(s.left) < len(b) {
		s.seed = sha256.Sum256(s.seed[:])
		s.left = append(s.left, s.seed[:]...)
	}
	n := copy(b, s.left)
	s.left = s.left[n:]
	return n, nil
}

func makePath(t failer, number uint32, epoch uint8, scheme model.Scheme, positions int) plan.Path {
	s := &stream{}
	binary.BigEndian.PutUint64(s.seed[:], uint64(number)<<32|uint64(epoch)<<16|uint64(scheme)<<8|uint64(positions))
	shares, verifier, err := pot.Generate(s, scheme, positions)
	if err != nil {
		t.Fatal(err)
	}
	p := plan.Path{
		PathID:   plan.PathID{Path: number, Epoch: epoch, Chain: fmt.Sprintf("chain%d", number), Scheme: scheme},
		Shares:   shares,
		Verifier: verifier,
		Ingress:  []plan.Ingress{{Node: "in", Lane: 0, Lanes: 4096}},
		Hops:     []plan.Hop{{Node: "in"}},
	}
	for j := 1; j < positions; j++ {
		h := plan.Hop{Node: fmt.Sprintf("n%d", j), SID: netip.MustParseAddr(fmt.Sprintf("fc00:0:0:%x%02x::", number, j))}
		if j < positions-1 {
			h.Function = "f"
		}
		p.Hops = append(p.Hops, h)
	}
	return p
}

var schemes = []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow}

// work is one stamp of a tampering, in the test's own words.
type work struct {
	path   *plan.Path
	j      int
	header pot.Header
}

func (w work) of(v pot.Values) pot.Values {
	s := w.path.Shares[w.j]
	return s.StampFlow(w.header, v, s.Binding(flow)).WireOut
}

func flip(v pot.Values, field string, bit int) pot.Values {
	if field == "RND" {
		v.RND ^= 1 << bit
	} else {
		v.CML ^= 1 << bit
	}
	return v
}

// again walks a hypothesis from what it says of itself, for one place of its
// change.
func again(t *rapid.T, paths []*plan.Path, own *plan.Path, named pot.Header, h Hypothesis, place int) pot.Values {
	v := pot.Values{RND: uint64(h.Start)}
	for i := 0; ; i++ {
		if h.Change != nil && h.Change.After[place] == i {
			v = flip(v, h.Change.Field, h.Change.Bit)
		}
		if i == len(h.Stamps) {
			break
		}
		st := h.Stamps[i]
		k := slices.IndexFunc(paths, func(p *plan.Path) bool { return p.Path == uint32(st.Path) && p.Epoch == st.Epoch })
		if k < 0 {
			t.Fatalf("a stamp of an unknown path: %+v", st)
		}
		header := pot.Header{Scheme: paths[k].Scheme, Epoch: named.Epoch, Path: named.Path}
		if st.Renamed {
			header = paths[k].Header()
		}
		v = work{paths[k], int(st.Position), header}.of(v)
	}
	if h.Primes > 0 {
		q := own.Shares[len(own.Shares)-1].Polynomial
		v = q.Up.Of(v)
		v.CML += h.Primes * q.Prime
		v = q.Up.Of(v)
	}
	return v
}

// The true tampering is among what is offered, and everything that is offered
// gives the values that were received, bit for bit.
func TestTrueTamperingIsOfferedAndAllOffersReproduce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		scheme := rapid.SampledFrom(schemes).Draw(t, "scheme")
		positions := rapid.OneOf(rapid.IntRange(3, 7), rapid.IntRange(8, 17)).Draw(t, "positions")
		own := makePath(t, 1, 1, scheme, positions)
		next := makePath(t, 1, 2, scheme, positions)
		other := makePath(t, 2, 1, rapid.SampledFrom(schemes).Draw(t, "other scheme"), rapid.IntRange(3, 7).Draw(t, "other positions"))
		paths := []*plan.Path{&own, &next, &other}
		n := positions - 1
		rnd := rapid.Uint64Range(1, 1<<60-1).Draw(t, "RND")

		var walk []work
		all := func(p *plan.Path, h pot.Header) (w []work) {
			for j := range len(p.Hops) - 1 {
				w = append(w, work{p, j, h})
			}
			return w
		}
		whole := all(&own, own.Header())
		var field string
		bit, after := 0, -1
		list := own.Segments()
		primes := uint64(0)
		tampering := rapid.SampledFrom([]string{
			"none", "nobody", "selection", "arrangement", "exchange", "repeat", "list",
			"other epoch", "one of other epoch", "epoch turned", "other path", "bit", "unreduced",
		}).Draw(t, "tampering")
		kind := map[string]Kind{"nobody": Unstamped, "bit": BitChanged, "unreduced": Unreduced, "other path": OtherPath}[tampering]
		switch tampering {
		case "none":
			walk = whole
		case "selection":
			for _, w := range whole {
				if rapid.Bool().Draw(t, "stamps") {
					walk = append(walk, w)
				}
			}
		case "arrangement":
			walk = rapid.Permutation(whole).Draw(t, "order")
			if n > arrangementsMax {
				walk = whole
			}
			walk = walk[:rapid.IntRange(0, len(walk)).Draw(t, "stamps")]
		case "exchange":
			walk = slices.Clone(whole)
			i, j := rapid.IntRange(0, n-1).Draw(t, "one"), rapid.IntRange(0, n-1).Draw(t, "the other")
			walk[i], walk[j] = walk[j], walk[i]
			if rapid.Bool().Draw(t, "and one missing") {
				m := rapid.IntRange(0, n-1).Draw(t, "missing")
				if n <= arrangementsMax {
					walk = slices.Delete(walk, m, m+1)
				}
			}
		case "repeat":
			again := whole[rapid.IntRange(0, n-1).Draw(t, "again")]
			walk = slices.Insert(slices.Clone(whole), rapid.IntRange(0, n).Draw(t, "at"), again)
		case "list":
			// Any list of the path's own segments, however long, obeyed.
			walk = whole[:1]
			list = nil
			for _, j := range rapid.SliceOfN(rapid.IntRange(1, max(1, n-1)), 0, 14).Draw(t, "list") {
				if j < n {
					walk = append(slices.Clone(walk), whole[j])
					list = append(list, own.Hops[j].SID)
				}
			}
			list = append(list, own.Hops[n].SID)
		case "other epoch":
			h := next.Header()
			if rapid.Bool().Draw(t, "named all the way") {
				h = own.Header()
			}
			walk = all(&next, h)
			kind = OtherEpoch
		case "one of other epoch":
			walk = slices.Clone(whole)
			j := rapid.IntRange(0, n-1).Draw(t, "which")
			walk[j] = work{&next, j, own.Header()}
			kind = OtherEpoch
		case "epoch turned":
			j := rapid.IntRange(1, n-1).Draw(t, "after")
			walk = slices.Concat(all(&next, next.Header())[:j], whole[j:])
			kind = OtherEpoch
		case "other path":
			walk = all(&other, other.Header())
		case "bit", "unreduced":
			walk = whole
			if tampering == "bit" {
				field = rapid.SampledFrom([]string{"RND", "CML"}).Draw(t, "field")
				bit, after = rapid.IntRange(0, 63).Draw(t, "bit"), rapid.IntRange(1, n).Draw(t, "after")
			} else if primes = 1; !polynomial(scheme) {
				primes, kind = 0, ""
			}
		}

		v := pot.Values{RND: rnd}
		for i := 0; ; i++ {
			if i == after {
				v = flip(v, field, bit)
			}
			if i == len(walk) {
				break
			}
			v = walk[i].of(v)
		}
		if primes > 0 {
			q := own.Shares[n].Polynomial
			v = q.Up.Of(v)
			v.CML += q.Prime
			v = q.Up.Of(v)
		}
		p := tampered{path: own, position: n, header: own.Header(), values: v, list: list}
		x := Explain(event.Event{Node: own.Hops[n].Node, Reason: "PROOF", Packet: p.frame(t)}, []plan.Path{own, next, other}, nil)

		found := false
		for _, h := range x.Hypotheses {
			places := 1
			if h.Change != nil {
				places = len(h.Change.After)
			}
			for k := range places {
				if got := again(t, paths, &own, own.Header(), h, k); got != v {
					t.Fatalf("%s: offered, but gives %x and not %x", h.Sentence, got, v)
				}
			}
			found = found || h.tells(walk, kind, field, bit, after, scheme)
		}
		if !found {
			t.Fatalf("%s of %s with %d positions (%d stamps) is not among: %s", tampering, scheme, positions, len(walk), x.Sentence)
		}
	})
}

// tells: the hypothesis is this tampering.
func (h Hypothesis) tells(walk []work, kind Kind, field string, bit, after int, scheme model.Scheme) bool {
	if kind != "" && h.Kind != kind || len(h.Stamps) != len(walk) {
		return false
	}
	if after >= 0 && (h.Change == nil || h.Change.Field != field || h.Change.Bit != bit || !slices.Contains(h.Change.After, after)) {
		return false
	}
	key := func(path uint32, epoch uint8, j int) string { return fmt.Sprint(path, epoch, j) }
	var got, want []string
	for _, s := range h.Stamps {
		got = append(got, key(uint32(s.Path), s.Epoch, int(s.Position)))
	}
	for _, w := range walk {
		want = append(want, key(w.path.Path, w.path.Epoch, w.j))
	}
	if scheme == model.SchemePoT {
		slices.Sort(got)
		slices.Sort(want)
	}
	return slices.Equal(got, want)
}

// Values that nobody's stamps give are given no explanation.
func TestRandomValuesAreNotExplained(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		scheme := rapid.SampledFrom(schemes).Draw(t, "scheme")
		positions := rapid.IntRange(2, 17).Draw(t, "positions")
		own, next := makePath(t, 1, 1, scheme, positions), makePath(t, 1, 2, scheme, positions)
		seed := rapid.Uint64().Draw(t, "values")
		r := rand.New(rand.NewPCG(seed, 1))
		p := tampered{path: own, position: positions - 1, header: own.Header(), values: pot.Values{RND: r.Uint64(), CML: r.Uint64()}}
		x := Explain(event.Event{Node: "n", Reason: "PROOF", Packet: p.frame(t)}, []plan.Path{own, next}, nil)
		if len(x.Hypotheses) != 0 || !x.Tried {
			t.Fatalf("tried %t: %s", x.Tried, x.Sentence)
		}
	})
}

// At a hop before the egress only the positions before it have stamped.
func TestPlacesBeforeTheEgress(t *testing.T) {
	own, next := makePath(t, 1, 1, model.SchemeOPoT, 5), makePath(t, 1, 2, model.SchemeOPoT, 5)
	paths := []plan.Path{own, next}
	const same = "; its segment list is the planned one"

	whole := pot.Walk(own.Header(), 9, pick(own, 0, 1, 2)...)[2].WireOut
	p := tampered{path: own, position: 3, header: pot.Header{Scheme: own.Scheme, Epoch: 7, Path: own.Path}, values: whole}
	x := Explain(event.Event{Node: "n3", Reason: "UNKNOWN_EPOCH", Packet: p.frame(t)}, paths, nil)
	want := "the proof of a packet to n3 (f) names epoch 7 of chain chain1; known here is epoch 1 and 2; " +
		"this packet carries the stamps of epoch 1 of chain chain1, while its proof names epoch 7" + same
	if x.Sentence != want {
		t.Errorf("got %s, want %s", x.Sentence, want)
	}

	for want, stamps := range map[string][]byte{
		"every hop of chain chain1 before n3 (f) stamped this packet in order": {0, 1, 2},
		"n1 (f) never stamped this packet":                                     {0, 2},
	} {
		steps := pot.Walk(own.Header(), 9, pick(own, stamps...)...)
		p := tampered{path: own, position: 3, header: pot.Header{Scheme: model.SchemePoT, Epoch: 1, Path: own.Path}, values: steps[len(steps)-1].WireOut}
		x := Explain(event.Event{Node: "n3", Reason: "SCHEME", Packet: p.frame(t)}, paths, nil)
		if want = "the proof of a packet to n3 (f) says scheme pot, but chain chain1 has opot; " + want + same; x.Sentence != want {
			t.Errorf("got %s, want %s", x.Sentence, want)
		}
	}
}

// The fast arithmetic of the search is that of pot.
func TestSearchStampsAsPotDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		scheme := rapid.SampledFrom(schemes).Draw(t, "scheme")
		own := makePath(t, 1, 1, scheme, 4)
		s := search{flow: flow}
		st := s.stamper(&own, rapid.IntRange(0, 2).Draw(t, "position"), own.Header())
		v := pot.Values{RND: rapid.Uint64().Draw(t, "RND"), CML: rapid.Uint64().Draw(t, "CML")}
		if got, want := st.stamp(v), (work{&own, st.position, own.Header()}).of(v); got != want {
			t.Fatalf("got %x, want %x", got, want)
		}
	})
}

// busy is how long this process has been at work. Others may have the CPU meanwhile.
func busy(t *testing.T) time.Duration {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &now); err != nil {
		t.Fatal(err)
	}
	return time.Duration(now.Nano())
}

// A stream of events must be explained as it comes.
func TestTheLongestSearchIsShort(t *testing.T) {
	for _, scheme := range schemes {
		for _, positions := range []int{6, 9, 17} {
			own := makePath(t, 1, 1, scheme, positions)
			p := tampered{path: own, position: positions - 1, header: own.Header(), values: pot.Values{RND: 1, CML: 2}}
			e := event.Event{Reason: "PROOF", Packet: p.frame(t)}
			start := busy(t)
			Explain(e, []plan.Path{own}, nil)
			took := busy(t) - start
			t.Logf("%s, %d positions: %v", scheme, positions, took)
			if took > 5*time.Second {
				t.Errorf("%s, %d positions: took %v", scheme, positions, took)
			}
		}
	}
}
