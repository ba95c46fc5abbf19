package dataplane

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/plan"
)

// A headend tells the last numbers of an epoch that it has given up, by lane, whether a part of the plan changes or all of it; and an egress
// the newest that it has seen, and how many are missing below.
func TestNumbersOfAnEpochThatDrains(t *testing.T) {
	b := newBed(t)
	n := bedNode()
	n.Headends[0].Lane = 64
	d := b.open()
	b.must(b.apply(d, n))
	epoch := func(id plan.PathID) event.Epoch { return event.Epoch{Path: id.Path, Epoch: id.Epoch} }
	first, egress := epoch(n.Headends[0].PathID), epoch(n.Egresses[0].PathID)
	given := func(when string, of event.Epoch, want ...event.Given) {
		t.Helper()
		got, seen, err := d.Drained([]event.Epoch{of})
		b.must(err)
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" || len(seen) > 0 {
			t.Errorf("%s, given out (want, got):\n%s\nseen %v", when, diff, seen)
		}
	}
	turned := func(n plan.Node) plan.Node {
		n.Headends = slices.Clone(n.Headends)
		n.Headends[0].Epoch++
		return n
	}
	for range 3 {
		b.number(d)
	}
	given("while it sends", first)
	held := d.force
	second := turned(n)
	b.must(b.apply(d, second))
	if d.force != held {
		t.Fatal("the turn was a change of the whole")
	}
	three := event.Given{Epoch: first, Lanes: []event.Lane{{Lane: 64, Number: 3}}}
	given("after the turn", first, three)
	given("of the epoch that it sends", epoch(second.Headends[0].PathID))
	third := turned(elsewhere(second))
	b.must(b.apply(d, third))
	given("of an epoch without a packet", epoch(second.Headends[0].PathID), event.Given{Epoch: epoch(second.Headends[0].PathID)})
	given("after a turn with other programs", first, three)
	b.must(b.apply(d, n)) // whatever the reason
	given("of an epoch that it sends again", first)
	b.number(d)
	b.must(b.apply(d, second))
	// Its numbers have begun again behind 3 on all CPUs, and nobody knows which of them had given that out.
	four := event.Given{Epoch: first, Lanes: []event.Lane{{Lane: 64, Number: 4}}}
	for cpu := 1; cpu < d.cpus; cpu++ {
		four.Lanes = append(four.Lanes, event.Lane{Lane: uint16(64 + cpu), Number: 3})
	}
	given("and has given up again", first, four)

	seen := func(when string, want event.Seen) {
		t.Helper()
		gave, got, err := d.Drained([]event.Epoch{egress})
		b.must(err)
		want.Epoch = egress
		if diff := cmp.Diff([]event.Seen{want}, got, cmpopts.IgnoreFields(event.Seen{}, "Quiet")); diff != "" || len(gave) > 0 {
			t.Errorf("%s, seen (want, got):\n%s\ngiven out %v", when, diff, gave)
		}
	}
	offer := func(c uint64) {
		t.Helper()
		if got := b.offer(d, second, c); !accepted(got) {
			t.Fatalf("number %d: %s", c, got)
		}
	}
	seen("at first", event.Seen{})
	offer(1)
	offer(4)
	seen("with two missing", event.Seen{Lanes: []event.Lane{{Number: 4}}, Missing: 2, Moved: true})
	offer(3)
	offer(2)
	seen("with none missing", event.Seen{Lanes: []event.Lane{{Number: 4}}, Moved: true})
	offer(200) // of the 63 before it three are stale, whose word it has taken
	seen("far ahead", event.Seen{Lanes: []event.Lane{{Number: 200}}, Missing: 60, Moved: true})
	other := egress
	other.Epoch++
	if _, got, err := d.Drained([]event.Epoch{other}); err != nil || len(got) > 0 {
		t.Errorf("of an epoch that it does not have: %v, %v", got, err)
	}
	seen("after it was not asked for", event.Seen{Lanes: []event.Lane{{Number: 200}}, Missing: 60})
	began := d.looked[egress].since
	_, got, err := d.Drained([]event.Epoch{egress})
	b.must(err)
	if got[0].Quiet <= 0 || got[0].Quiet > time.Since(began) {
		t.Errorf("quiet for %s", got[0].Quiet)
	}
	without := second
	without.Egresses = nil
	b.must(b.apply(d, without))
	if _, got, err := d.Drained([]event.Epoch{egress}); err != nil || len(got) > 0 {
		t.Errorf("of an epoch that is erased: %v, %v", got, err)
	}
}

// What a window would still accept below its newest number is missing, and nothing else is.
func TestMissingNumbersAreThoseThatAWindowWouldAccept(t *testing.T) {
	const size = 64
	for name, c := range map[string]struct {
		used []uint64
		want uint64
	}{
		"nothing":             {nil, 0},
		"the first":           {[]uint64{1}, 0},
		"all":                 {[]uint64{1, 2, 3, 4, 5}, 0},
		"all but one":         {[]uint64{1, 2, 4, 5}, 1},
		"the second alone":    {[]uint64{2}, 1},
		"the last of a word":  {[]uint64{3}, 2},
		"an old one":          {[]uint64{1, 100}, 60}, // 37 to 39 have the word of 100, and are stale
		"one of a word again": {[]uint64{36, 100}, 60},
	} {
		t.Run(name, func(t *testing.T) {
			words := make([]uint64, 2*size/4) // two lanes
			lane, newest := words[size/4:], uint64(0)
			for _, n := range c.used {
				word := &lane[n/4%(size/4)]
				if *word>>tagShift != n/size {
					*word = n / size << tagShift
				}
				*word |= 1 << (usesBits * (n % 4))
				newest = n
			}
			var lanes []event.Lane
			if newest > 0 {
				lanes = append(lanes, event.Lane{Lane: 1, Number: newest})
			}
			if got := missing(words, size, lanes); got != c.want {
				t.Errorf("%d are missing, want %d", got, c.want)
			}
		})
	}
	// A window that begins behind numbers of before misses none of them.
	words := begin([]uint64{0, 777}, size)
	if got := missing(words, size, []event.Lane{{Lane: 1, Number: 777}}); got != 0 {
		t.Errorf("%d are missing of a window that has just begun", got)
	}
	if abi.WindowMin > size {
		t.Errorf("no window is that small")
	}
}
