package agent

import (
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/model"
)

// adviseEvery is how often the functions' counters are looked at.
const adviseEvery = 10 * time.Second

// adviseAgain is how long there is no second line about the same function.
const adviseAgain = time.Minute

// lossWatch remembers how many packets the proxies had lost when it last spoke
// of them. Its zero value speaks of nothing that was lost before it was made.
type lossWatch struct {
	seen map[string]lossSeen
}

type lossSeen struct {
	full, missed, evicted uint64
	spoke                 time.Time
	rx                    uint64
	looked                time.Time
}

// loss counts the packets that a function has lost since the last look.
type loss struct {
	dataplane.FunctionCount
	full, missed, evicted uint64  // since it was last spoken of
	rate                  float64 // packets per second that came lately; 0: not known
}

// look returns the functions that are due for a line.
func (w *lossWatch) look(now time.Time, counts []dataplane.FunctionCount) []loss {
	first := w.seen == nil
	next := map[string]lossSeen{}
	var out []loss
	for _, c := range counts {
		s, known := w.seen[c.Function]
		l := loss{FunctionCount: c, full: c.RxIgnored - s.full, missed: c.TxNotCached - s.missed, evicted: c.Evicted - s.evicted}
		if d := now.Sub(s.looked); known && d > 0 && c.RxSuccess >= s.rx {
			l.rate = float64(c.RxSuccess-s.rx) / d.Seconds()
		}
		switch {
		case first, !known && c.RxSuccess == 0, c.RxIgnored < s.full, c.TxNotCached < s.missed, c.Evicted < s.evicted:
			s.full, s.missed, s.evicted = c.RxIgnored, c.TxNotCached, c.Evicted
		case l.full+l.missed+l.evicted > 0 && now.Sub(s.spoke) >= adviseAgain:
			s.full, s.missed, s.evicted, s.spoke = c.RxIgnored, c.TxNotCached, c.Evicted, now
			out = append(out, l)
		}
		s.rx, s.looked = c.RxSuccess, now
		next[c.Function] = s
	}
	w.seen = next
	return out
}

// enough is a cache size that would have sufficed for the latest traffic, by Little's law
// doubled, and at least twice the size that was too small.
func (l loss) enough() int {
	n := 2 * l.Cache
	if rate := int(l.rate); rate > 0 && rate <= model.RateMax {
		n = max(n, model.CacheFor(rate, min(l.Wait(), model.LifetimeMax)))
	}
	return n
}

// advice names the remedy.
func (l loss) advice() string {
	switch {
	case l.full > 0:
		return fmt.Sprintf("its cache is full: set a cache of %d, or a shorter lifetime if the function drops many packets", l.enough())
	case l.evicted > 0:
		return fmt.Sprintf("headers were evicted before their packets returned: set a cache of %d, or a shorter lifetime if the function drops many packets", l.enough())
	case l.Expired > 0:
		return "headers expired before their packets returned: set a longer lifetime"
	}
	return "the function originates packets, or changes bytes that recognition uses: see the refusal not-cached, and the settings recognise and on-unknown"
}

// adviseCaches names functions that have lost packets, and the remedy.
func (a *agent) adviseCaches() {
	if a.plan == nil || len(a.plan.Proxies) == 0 {
		a.adviseSilence(nil)
		return
	}
	c, err := a.dp.Counters()
	if err != nil {
		a.fail("the functions' counters could not be read", err)
		return
	}
	a.adviseSilence(c.Functions)
	for _, l := range a.loss.look(time.Now(), c.Functions) {
		a.cfg.Log.Warn("packets of a function were refused, or will be when they come back", slog.String("function", l.Function),
			slog.Uint64("cache_full", l.full), slog.Uint64("not_cached", l.missed),
			slog.Uint64("evicted", l.evicted), slog.Int("cache", l.Cache),
			slog.Float64("rate", math.Round(l.rate)), slog.Duration("wait", l.Wait().Round(time.Microsecond)), slog.String("advice", l.advice()))
	}
}
