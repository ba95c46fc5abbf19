package attack

import (
	"math/rand/v2"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
)

// traffic is what a tap on both links of the hop at position 1 sees of n packets
// numbered one after the other, and the hop's own stamp.
func traffic(t *testing.T, random *rand.ChaCha8, scheme model.Scheme, n int) (seen []tapped) {
	t.Helper()
	shares, _, err := pot.Generate(random, scheme, 4)
	if err != nil {
		t.Fatal(err)
	}
	first := uint64(3)<<48 | random.Uint64()&0xffff
	h := pot.Header{Scheme: scheme, Epoch: 1, Path: 7}
	step := func(s pot.Share, v pot.Values) pot.Values { return s.StampFlow(h, v, s.Binding(pot.Flow{})).WireOut }
	for i := range n {
		in := step(shares[0], pot.Values{RND: first + uint64(i)})
		out := step(shares[1], in)
		seen = append(seen, tapped{values{in.RND, in.CML}, values{out.RND, out.CML}})
	}
	return seen
}

// dice are the same in every run.
func dice() *rand.ChaCha8 { return rand.NewChaCha8([32]byte{4}) }

// learns is in how many of so many trials the stamp of a packet was forged, some
// packets after those that were seen.
func learns(t *testing.T, how func([]tapped) (forger, error), scheme model.Scheme, n, trials int) (forged int) {
	t.Helper()
	const later = 9
	random := dice()
	for range trials {
		seen := traffic(t, random, scheme, n+later)
		f, err := how(seen[:n])
		if last := len(seen) - 1; err == nil && f(seen[last].in, last) == seen[last].out {
			forged++
		}
	}
	t.Logf("%s: from %d packets in %d of %d trials", scheme, n, forged, trials)
	return forged
}

// The figures are those of SECURITY.md.
func TestATapLearnsPot(t *testing.T) {
	if n := learns(t, learnPlain, model.SchemePoT, 4, 100); n < 70 {
		t.Errorf("from 4 packets the stamp was forged in %d of 100 trials", n)
	}
	if n := learns(t, learnPlain, model.SchemePoT, 16, 100); n != 100 {
		t.Errorf("from 16 packets the stamp was forged in %d of 100 trials, want all", n)
	}
}

func TestATapLearnsOpot(t *testing.T) {
	if n := learns(t, learnMasked, model.SchemeOPoT, 16, 60); n < 40 {
		t.Errorf("from 16 packets the stamp was forged in %d of 60 trials", n)
	}
	if n := learns(t, learnMasked, model.SchemeOPoT, 64, 60); n != 60 {
		t.Errorf("from 64 packets the stamp was forged in %d of 60 trials, want all", n)
	}
	if n := learns(t, learnPlain, model.SchemeOPoT, 64, 60); n != 0 {
		t.Errorf("masks did not matter in %d of 60 trials", n)
	}
}

func TestATapLearnsNothingOfTags(t *testing.T) {
	for _, s := range []model.Scheme{model.SchemeKeyed, model.SchemeKeyedFlow} {
		seen := traffic(t, dice(), s, 512)
		if _, err := learnPlain(seen); err == nil {
			t.Errorf("%s: learnPlain found a stamp", s)
		}
		if _, err := learnMasked(seen); err == nil {
			t.Errorf("%s: learnMasked found a stamp", s)
		}
	}
}

// A packet that was missed makes numbers not follow one another.
func TestATapNoticesAGap(t *testing.T) {
	seen := traffic(t, dice(), model.SchemeOPoT, 40)
	if !consecutive(seen) {
		t.Error("40 packets in order do not follow one another")
	}
	for i := 1; i < len(seen)-1; i++ {
		if consecutive(append(append([]tapped{}, seen[:i]...), seen[i+1:]...)) {
			t.Errorf("without packet %d they still follow one another", i)
		}
	}
}
