package member

import (
	"testing"
	"time"
)

// What took long is no clock that is wrong.
func TestClocksAreComparedByWhatMustBe(t *testing.T) {
	at := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct{ asked, answered, want time.Duration }{
		"at once":            {200 * time.Millisecond, 300 * time.Millisecond, 0},
		"an answer of a day": {-time.Hour, 24 * time.Hour, 0},
		"ahead":              {2 * time.Minute, 2*time.Minute + time.Second, 2*time.Minute - time.Second},
		"behind":             {-3 * time.Minute, -2 * time.Minute, -2 * time.Minute},
	} {
		if got := clockOff(at.Add(c.asked), at.Add(c.answered), at); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}
