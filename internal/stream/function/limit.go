package function

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"
)

// rateMax is the highest rate of limit, in bytes per second.
const rateMax = 1 << 40

// limit holds connections to a rate, each by itself or all together. Both directions
// have the rate to themselves.
type limit struct {
	connection int64   // bytes per second; 0: any
	all        *bucket // nil: any; shared by all loops
}

func parseLimit(raw json.RawMessage) (Entry, error) {
	var set struct {
		Connection int64 `json:"connection"`
		All        int64 `json:"all"`
	}
	if err := settingsOf(raw, &set); err != nil {
		return Entry{}, err
	}
	if raw == nil {
		return openEntryOf("limit", nil), nil
	}
	if set.Connection == 0 && set.All == 0 {
		return Entry{}, errors.New("neither connection nor all is set; give a rate in bytes per second, or no settings for the rate that parameters of visits name")
	}
	for name, rate := range map[string]int64{"connection": set.Connection, "all": set.All} {
		if rate < 0 || rate > rateMax {
			return Entry{}, fmt.Errorf("%s is %d bytes per second; expect 1 to %d", name, rate, int64(rateMax))
		}
	}
	return limitEntry(set.Connection, set.All), nil
}

func limitEntry(connection, all int64) Entry {
	f := limit{connection: connection}
	if all > 0 {
		f.all = newBucket(all)
	}
	return Entry{
		Name: "limit",
		make: func(Surroundings) (Function, error) { return f, nil },
		back: func() Entry { return limitEntry(connection, all) },
	}
}

func (f limit) Open(Connection) Handler {
	switch {
	case f.connection == 0:
		return Handler{Gate: f.all}
	case f.all == nil:
		return Handler{Gate: newBucket(f.connection)}
	}
	return Handler{Gate: both{newBucket(f.connection), f.all}}
}

// bucket is a token bucket of a tenth of a second, but at least burstMin bytes.
type bucket struct {
	rate, burst float64 // bytes per second, bytes

	mu    sync.Mutex
	level float64 // bytes that may go
	at    time.Duration
}

// burstMin is also what a gate waits for, so that it does not let bytes go one by one.
const burstMin = 4 << 10

func newBucket(rate int64) *bucket {
	b := &bucket{rate: float64(rate), burst: max(float64(rate)/10, burstMin)}
	b.level = b.burst
	return b
}

func (b *bucket) Take(want int, now time.Duration) (int, time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now > b.at { // loops read the clock at different times
		b.level = min(b.level+(now-b.at).Seconds()*b.rate, b.burst)
		b.at = now
	}
	least := float64(min(want, burstMin))
	if b.level < least {
		return 0, time.Duration((least - b.level) / b.rate * float64(time.Second))
	}
	n := min(want, int(b.level))
	b.level -= float64(n)
	return n, 0
}

func (b *bucket) Return(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.level = min(b.level+float64(n), b.burst)
}

// both is two gates, one behind the other.
type both [2]*bucket

func (g both) Take(want int, now time.Duration) (int, time.Duration) {
	n, wait := g[0].Take(want, now)
	if n == 0 {
		return 0, wait
	}
	m, wait := g[1].Take(n, now)
	g[0].Return(n - m)
	return m, wait
}

func (g both) Return(n int) {
	g[0].Return(n)
	g[1].Return(n)
}
