package agent

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/event"
)

// An agent tells of the numbers that it is asked for when it is asked, and then each second, and of no others. If they cannot be read it goes on.
func TestNumbersOfDrainingEpochsAreToldWhileTheyAreWanted(t *testing.T) {
	n := newNode(t)
	var mu sync.Mutex
	var wanted []event.Epoch
	told, changed := make(chan []event.Given, 16), make(chan struct{}, 1)
	n.cfg.Drains = func() []event.Epoch {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(wanted)
	}
	n.cfg.DrainsChanged = changed
	n.cfg.Numbers = func(given []event.Given, _ []event.Seen) {
		select {
		case told <- given:
		default: // nobody looks
		}
	}
	want := func(e ...event.Epoch) {
		mu.Lock()
		wanted = e
		mu.Unlock()
		changed <- struct{}{}
	}
	next := func() []event.Given {
		t.Helper()
		select {
		case got := <-told:
			return got
		case <-time.After(patience):
			t.Fatal("nothing is told")
			return nil
		}
	}
	n.set(func() { n.given = 5 })
	n.write(n.encode(r1(t, nil)))
	n.start()
	e := event.Epoch{Path: 7, Epoch: 2}
	want(e)
	for _, number := range []uint64{5, 6} {
		n.set(func() { n.given = number })
		for { // the one before may have been read yet
			got := next()
			if len(got) != 1 || got[0].Epoch != e {
				t.Fatalf("told %v, want what is known of %v", got, e)
			}
			if got[0].Lanes[0].Number == number {
				break
			}
		}
	}
	n.set(func() { n.undrained = errors.New("no map") })
	n.log.Wait("the numbers of epochs that drain cannot be read")
	other := event.Epoch{Path: 8}
	n.set(func() { n.undrained = nil })
	want(other)
	for next()[0].Epoch != other { // what was told before
	}
}
