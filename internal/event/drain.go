package event

import "time"

// Epoch is an epoch of a path.
type Epoch struct {
	Path  uint32
	Epoch uint8
}

// Lane is a number in a lane of a path: one CPU of one headend counts in it.
type Lane struct {
	Lane   uint16
	Number uint64 // without lane and frames
}

// Given are the last numbers that a headend gave out in an epoch that it has given up. Lanes in which it gave out none are left out.
type Given struct {
	Epoch
	Lanes []Lane
}

// Seen are the numbers that an egress has taken in an epoch.
type Seen struct {
	Epoch
	Lanes   []Lane        // the newest; lanes without one are left out
	Missing uint64        // numbers below these that the replay window has room for and has not seen, of all lanes
	Quiet   time.Duration // that nothing has changed, or that the node has looked
	Moved   bool          // something has changed since the node looks
}
