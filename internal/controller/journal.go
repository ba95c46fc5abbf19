package controller

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// eventsMax is how many events are kept.
const eventsMax = 1000

// Kinds of events.
const (
	aboutNode   = "node"
	aboutChain  = "chain"
	aboutChange = "change" // a commit
	aboutCall   = "call"   // of an operator, that changes something; or a node that joins
)

// journal is what has happened since this controller leads. It is in memory alone: whoever leads next begins
// anew.
type journal struct {
	mu     sync.Mutex
	began  time.Time
	events []*v1.Event // the oldest first
	states map[thing]stateSince
	seen   bool // states has been filled
}

// thing is what has a state.
type thing struct{ kind, name string }

type stateSince struct {
	state string
	since time.Time // zero: it was so when this controller began to lead
}

// begin forgets what another term knew.
func (j *journal) begin(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.began, j.events, j.states, j.seen = now, nil, map[thing]stateSince{}, false
}

func (j *journal) add(now time.Time, kind, name, text string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.addLocked(now, kind, name, text)
}

func (j *journal) addLocked(now time.Time, kind, name, text string) {
	if n := len(j.events); n > 0 && now.Before(j.events[n-1].Time.AsTime()) { // two at a time, or a clock that was put back
		now = j.events[n-1].Time.AsTime()
	}
	if len(j.events) == eventsMax {
		j.events = slices.Delete(j.events, 0, 1)
	}
	j.events = append(j.events, &v1.Event{Time: timestamppb.New(now), Kind: kind, Name: name, Text: text})
}

// about are the events of a name, or all.
func (j *journal) about(keep func(*v1.Event) bool) (events []*v1.Event, since time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.events {
		if keep(e) {
			events = append(events, e)
		}
	}
	return events, j.began
}

// observe notes what has another state than at the last time.
func (j *journal) observe(now time.Time, s *v1.State) {
	j.mu.Lock()
	defer j.mu.Unlock()
	was := j.states
	j.states = make(map[thing]stateSince, len(was))
	note := func(kind, name, state, reason string) {
		of := thing{kind, name}
		if _, twice := j.states[of]; twice {
			return
		}
		have, ok := was[of]
		if ok && have.state == state {
			j.states[of] = have
			return
		}
		next := stateSince{state: state}
		if j.seen {
			next.since = now
		}
		// A node in trouble has an event of its own, and may be on thousands of chains.
		degrades := kind == aboutChain && (state == chainDegraded && have.state == chainActive || state == chainActive && have.state == chainDegraded)
		if j.seen && !degrades {
			text := state
			if ok {
				text = have.state + " -> " + state
			}
			if reason != "" {
				text += ": " + reason
			}
			j.addLocked(now, kind, name, text)
		}
		j.states[of] = next
	}
	for _, n := range s.Nodes {
		note(aboutNode, n.Name, n.State, n.Reason)
	}
	for _, ch := range s.Chains {
		note(aboutChain, ch.Name, ch.State, ch.Reason)
	}
	for of := range was {
		if _, ok := j.states[of]; !ok {
			j.addLocked(now, of.kind, of.name, "it is gone")
		}
	}
	j.seen = true
}

// stamp says since when nodes and chains have their states.
func (j *journal) stamp(now time.Time, s *v1.State) {
	j.mu.Lock()
	defer j.mu.Unlock()
	since := func(kind, name, state string) *timestamppb.Timestamp {
		have := j.states[thing{kind, name}]
		switch {
		case !j.seen:
			return nil
		case have.state != state: // it has just become so, and is about to be observed
			return timestamppb.New(now)
		case have.since.IsZero():
			return nil
		}
		return timestamppb.New(have.since)
	}
	for _, n := range s.Nodes {
		n.StateSince = since(aboutNode, n.Name, n.State)
	}
	for _, ch := range s.Chains {
		ch.Since = since(aboutChain, ch.Name, ch.State)
	}
}

// observeShare is how much of its time the controller may spend on looking at states: one part of so many.
const observeShare = 10

// observe keeps the journal, whenever changed says that records may be others, or a node comes or goes.
func (c *Controller) observe(ctx context.Context, changed <-chan struct{}) error {
	for {
		began := time.Now()
		_, news := c.connected()
		s, err := c.describe(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, store.ErrClosed):
			return err
		case err == nil:
			c.journal.observe(c.cfg.Now(), s)
		default: // the loop that carries changes says so
			c.cfg.Log.Debug("the states of nodes and chains cannot be read", "err", err)
		}
		pause := (observeShare - 1) * time.Since(began)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		case <-news:
		}
	}
}
