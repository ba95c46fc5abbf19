package oracle

import "github.com/waystamp/waystamp/internal/plan"

// Train is a number that a headend gave to a packet, and how many frames have
// come with it.
type Train struct {
	Lane    uint16
	Counter uint64
	Frames  int
}

// Spent is a Train of a path.
type Spent struct {
	Path  uint32
	Epoch uint8
	Train
}

// window is the verdict on a number whose proof has verified (docs/protocol,
// "The replay window"), by a look at everything that was ever accepted.
func (p *packet) window(rnd uint64, inner []byte, e *plan.Egress) Reason {
	const counters, trains = 1 << framesShift, 64
	t := Train{Lane: uint16(rnd >> laneShift), Counter: rnd % counters, Frames: 1}
	if p.arrival.Counted != nil {
		t.Frames = p.arrival.Counted(inner)
	}
	length := int(rnd>>framesShift%trains) + 1
	if t.Lane >= e.Lanes || t.Counter == 0 || length > framesMax {
		return Number
	}
	var seen []Train
	if p.arrival.Seen != nil {
		seen = p.arrival.Seen(e.Path, e.Epoch)
	}
	// Four numbers share what the egress remembers them by, and every W-th four
	// the same place.
	four, places := t.Counter/4, uint64(e.Window/4)
	uses := 0
	for _, s := range seen {
		if s.Lane != t.Lane {
			continue
		}
		if newer := s.Counter / 4; newer > four && newer%places == four%places {
			return Stale
		}
		if s.Counter == t.Counter {
			uses += s.Frames
		}
	}
	if uses+t.Frames > length {
		return Replay
	}
	p.result.Spent = &Spent{e.Path, e.Epoch, t}
	return ""
}
