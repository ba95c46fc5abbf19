package controller

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/store"
)

// RotateMin is how often the controller's clock may give chains fresh secrets at most.
const RotateMin = model.RotateMin

// rotateSlots are how many turns chains with the same time take within it at most: each turn is a change of the domain.
const rotateSlots = 16

// rotatesAt is when the controller's own setting asks for fresh secrets the next time, of chains that have no time of
// their own; zero: never. It is up to a tenth earlier than the time in the configuration, so that domains that were started together
// do not all turn at once; which part, follows from the records, and is the same on each controller.
func (c *Controller) rotatesAt(v *view) time.Time {
	if c.cfg.RotateEvery == 0 {
		return time.Time{}
	}
	at := v.wanted.Rotated
	if now := c.cfg.Now(); at.After(now.Add(c.cfg.RotateEvery)) { // by a clock that was far ahead
		return now
	}
	early := c.part(fmt.Sprint(at.UnixNano()), uint64(c.cfg.RotateEvery/10))
	return at.Add(c.cfg.RotateEvery - time.Duration(early))
}

// part is a number below n that follows from a text and the domain.
func (c *Controller) part(text string, n uint64) uint64 {
	sum := sha256.Sum256([]byte(c.ca().TrustDomain() + " " + text))
	return binary.BigEndian.Uint64(sum[:]) % n
}

// turnBehind is a chain's first turn behind a time, when it gets fresh secrets each so often. Chains with the same time share up to
// rotateSlots turns, which are so far apart that the secrets before have drained by the next one.
func (c *Controller) turnBehind(chain string, every, drain time.Duration, behind time.Time) time.Time {
	slots := min(max(every/(2*max(drain, time.Millisecond)), 1), rotateSlots)
	first := time.Unix(0, 0).Add(every / slots * time.Duration(c.part(chain, uint64(slots))))
	if behind.Before(first) {
		return first
	}
	return first.Add((behind.Sub(first)/every + 1) * every)
}

// timesOf are those that chains of the wanted file have of their own.
func (c *Controller) timesOf(ctx context.Context, v *view) (map[string]time.Duration, error) {
	if v.wanted.File == 0 {
		return nil, nil
	}
	c.every.Lock()
	defer c.every.Unlock()
	if c.every.file == v.wanted.File { // a file never changes under its serial
		return c.every.times, nil
	}
	d, err := c.domainOf(ctx, v.wanted)
	if err != nil {
		return nil, err
	}
	times := map[string]time.Duration{}
	for _, ch := range d.Chains {
		if ch.Proof.RotateEvery != 0 {
			times[ch.Name] = ch.Proof.RotateEvery
		}
	}
	c.every.file, c.every.times = v.wanted.File, times
	return times, nil
}

// nextRotation is when the clock asks for fresh secrets the next time, and of which chains; zero: never. Chains whose time has come by
// now are due together.
func (c *Controller) nextRotation(ctx context.Context, v *view) (at time.Time, chains []string, err error) {
	if v.state.Now == 0 {
		return at, nil, nil
	}
	times, err := c.timesOf(ctx, v)
	if err != nil {
		return at, nil, err
	}
	all := c.rotatesAt(v)
	if len(times) == 0 && all.IsZero() {
		return at, nil, nil
	}
	now, err := c.generation(ctx, v, v.state.Now)
	if err != nil {
		return at, nil, err
	}
	behind := v.wanted.Clock
	if clock := c.cfg.Now(); behind.After(clock) { // of a clock that was ahead
		behind = clock
	}
	due := map[string]time.Time{}
	for _, p := range now.domain.Paths {
		if _, seen := due[p.Chain]; seen {
			continue
		}
		when := all
		if every, own := times[p.Chain]; own {
			when = c.turnBehind(p.Chain, every, now.Drain, behind)
		}
		if due[p.Chain] = when; !when.IsZero() && (at.IsZero() || when.Before(at)) {
			at = when
		}
	}
	until := at
	if clock := c.cfg.Now(); clock.After(until) {
		until = clock
	}
	for _, chain := range slices.Sorted(maps.Keys(due)) {
		if when := due[chain]; !when.IsZero() && !when.After(until) {
			chains = append(chains, chain)
		}
	}
	return at, chains, nil
}

// rotate asks for fresh secrets of the chains that are due, in the place of an operator.
func (c *Controller) rotate(ctx context.Context, v *view) (bool, time.Time, error) {
	_, chains, err := c.nextRotation(ctx, v)
	if err != nil {
		return false, time.Time{}, err
	}
	now, err := c.generation(ctx, v, v.state.Now)
	if err != nil {
		return false, time.Time{}, err
	}
	clock := c.cfg.Now()
	w := v.wanted
	w.Serial++
	if all := c.rotatesAt(v); !all.IsZero() && !clock.Before(all) {
		w.Rotated = clock
	}
	w.Clock = clock
	requested := w.Rotate
	w.Rotate = map[string]uint64{}
	for _, p := range now.domain.Paths { // of chains that are gone nobody needs to know
		if serial, ok := requested[p.Chain]; ok {
			w.Rotate[p.Chain] = serial
		}
	}
	for _, chain := range chains {
		w.Rotate[chain] = w.Serial
	}
	if _, err := c.store.Commit(ctx, store.Txn{If: []store.Condition{v.at(keyWanted), v.at(keyState)}, Put: map[string][]byte{keyWanted: encode(w)}}); err != nil {
		return false, time.Time{}, fmt.Errorf("rotate: %w", err)
	}
	c.counted.Add(metricCommits, 1, "rotate")
	c.journal.add(clock, aboutChange, "rotate", fmt.Sprintf("by the clock: chains that get fresh secrets: %d", len(chains)))
	c.cfg.Log.Info("fresh secrets are due, by the clock", "chains", len(chains))
	return true, time.Time{}, nil
}
