package controller

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/waystamp/waystamp/internal/store"
)

// RotateMin is how often the controller's clock may give chains fresh secrets at most. Each rotation is an epoch of
// each path, of which there are 256.
const RotateMin = 10 * time.Second

// rotatesAt is when the controller's clock asks for fresh secrets of all chains the next time; zero: never. It is
// up to a tenth earlier than the time in the configuration, so that domains that were started together
// do not all turn at once; which part, follows from the records, and is the same on each controller.
func (c *Controller) rotatesAt(v *view) time.Time {
	if c.cfg.RotateEvery == 0 || v.state.Now == 0 {
		return time.Time{}
	}
	at := v.wanted.Rotated
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d", c.ca().TrustDomain(), at.UnixNano()))
	early := time.Duration(binary.BigEndian.Uint64(sum[:]) % uint64(c.cfg.RotateEvery/10))
	return at.Add(c.cfg.RotateEvery - early)
}

// rotate asks for fresh secrets of all chains in the place of an operator.
func (c *Controller) rotate(ctx context.Context, v *view) (bool, time.Time, error) {
	now, err := c.generation(ctx, v, v.state.Now)
	if err != nil {
		return false, time.Time{}, err
	}
	w := v.wanted
	w.Serial++
	w.Rotated, w.Rotate = c.cfg.Now(), map[string]uint64{}
	for _, p := range now.domain.Paths {
		w.Rotate[p.Chain] = w.Serial
	}
	if _, err := c.store.Commit(ctx, store.Txn{If: []store.Condition{v.at(keyWanted), v.at(keyState)}, Put: map[string][]byte{keyWanted: encode(w)}}); err != nil {
		return false, time.Time{}, fmt.Errorf("rotate: %w", err)
	}
	c.counted.Add(metricCommits, 1, "rotate")
	c.cfg.Log.Info("fresh secrets are due, by the clock", "every", c.cfg.RotateEvery, "chains", len(w.Rotate))
	return true, time.Time{}, nil
}
