package agent

import (
	"log/slog"
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
	full, missed uint64
	spoke        time.Time
}

// loss is what has become worse at a function.
type loss struct {
	dataplane.FunctionCount
	full, missed uint64 // since it was last spoken of
}

// look returns the functions that are due for a line.
func (w *lossWatch) look(now time.Time, counts []dataplane.FunctionCount) []loss {
	first := w.seen == nil
	next := map[string]lossSeen{}
	var out []loss
	for _, c := range counts {
		s, known := w.seen[c.Function]
		switch full, missed := c.RxIgnored-s.full, c.TxNotCached-s.missed; {
		case first, !known && c.RxSuccess == 0, c.RxIgnored < s.full, c.TxNotCached < s.missed:
			s.full, s.missed = c.RxIgnored, c.TxNotCached
		case full+missed > 0 && now.Sub(s.spoke) >= adviseAgain:
			s = lossSeen{c.RxIgnored, c.TxNotCached, now}
			out = append(out, loss{c, full, missed})
		}
		next[c.Function] = s
	}
	w.seen = next
	return out
}

// advice says what to do about it.
func (l loss) advice() string {
	switch {
	case l.full > 0:
		return "its cache is full: set a larger cache, or a shorter lifetime if it drops many packets"
	case l.Recognise == model.RecogniseContent && l.RxSuccess > l.TxSuccess+uint64(l.Cache):
		return "headers may have been evicted before their packets came back: set a larger cache; or the function changes packets in a way that content does not survive, or makes packets of its own"
	case l.Expired > 0:
		return "headers were too old when their packets came back: set a longer lifetime"
	}
	return "the function makes packets of its own, or changes them in a way that they are not recognised by: see the refusals not-cached, recognise and on-unknown"
}

// adviseCaches says which functions have lost packets, and what helps.
func (a *agent) adviseCaches() {
	if a.plan == nil || len(a.plan.Proxies) == 0 {
		return
	}
	c, err := a.dp.Counters()
	if err != nil {
		a.fail("the functions' counters could not be read", err)
		return
	}
	for _, l := range a.loss.look(time.Now(), c.Functions) {
		a.cfg.Log.Warn("packets of a function were refused", slog.String("function", l.Function),
			slog.Uint64("cache_full", l.full), slog.Uint64("not_cached", l.missed),
			slog.Int("cache", l.Cache), slog.String("advice", l.advice()))
	}
}
