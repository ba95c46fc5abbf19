package agent

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
)

const (
	// recentEvery is how often the counters of refusals are kept.
	recentEvery = 10 * time.Second
	// recentFor is how far the status looks back.
	recentFor = time.Minute
)

// recentRefusals keeps earlier counters of refusals, to find the recent ones.
type recentRefusals struct {
	mu      sync.Mutex
	samples []refusalSample // the oldest first
}

type refusalSample struct {
	at     time.Time
	counts map[string]api.Refusal // by reason
}

func sampleRefusals(now time.Time, counts []dataplane.RefusalCount) refusalSample {
	s := refusalSample{now, map[string]api.Refusal{}}
	for _, c := range counts {
		r := wireRefusal(c)
		s.counts[r.Reason] = r
	}
	return s
}

// note keeps the present counters, and deletes those that are too old.
func (r *recentRefusals) note(now time.Time, counts []dataplane.RefusalCount) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.samples) > 1 && now.Sub(r.samples[1].at) >= recentFor {
		r.samples = r.samples[1:]
	}
	r.samples = append(r.samples, sampleRefusals(now, counts))
}

// since counts the refusals of the last minute, or of the time that is recorded.
func (r *recentRefusals) since(now time.Time, counts []dataplane.RefusalCount) api.Recent {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := api.Recent{Refusals: []api.Refusal{}}
	if len(r.samples) == 0 {
		return out
	}
	then := r.samples[0]
	for _, s := range r.samples {
		if now.Sub(s.at) >= recentFor {
			then = s
		}
	}
	out.Seconds = int(now.Sub(then.at).Round(time.Second) / time.Second)
	current := sampleRefusals(now, counts).counts
	for _, reason := range slices.Sorted(maps.Keys(current)) {
		c, before := current[reason], then.counts[reason]
		if c.Dropped < before.Dropped || c.Reported < before.Reported {
			before = api.Refusal{} // the counters have begun again
		}
		c.Dropped -= before.Dropped
		c.Reported -= before.Reported
		if c.Dropped+c.Reported > 0 {
			out.Refusals = append(out.Refusals, c)
		}
	}
	return out
}

// noteRefusals keeps the counters of refusals for the status.
func (a *agent) noteRefusals() {
	counts, err := a.dp.Refusals()
	if err != nil {
		a.fail("the counters of refusals could not be read", err)
		return
	}
	a.recent.note(time.Now(), counts)
}
