// Package function has the functions that work on the bytes of TCP connections, and
// what each of them has to implement: identity, count, xor and others. It reads and
// writes no socket; internal/stream moves the bytes, and calls a function's handlers
// from one event loop, never from two at once. Its caller is that package; the parts of
// the domain file that name functions will be checked by it, too.
package function

import (
	"io"
	"net/netip"
	"sync/atomic"
	"time"
)

// Moment says what is known about the bytes behind those that a handler is given.
type Moment uint8

const (
	More  Moment = iota // more bytes may be at hand already
	Pause               // there are none at present: whatever the handler holds back has to go now
	End                 // there will be none: the sender has ended this direction
)

// Verdict is what a handler says about its direction of the connection.
type Verdict uint8

const (
	Continue Verdict = iota // all is handled; call again with the bytes that follow
	Full                    // the room for output is used up; call again with the bytes that are left
	Done                    // pass all bytes that are left, and all that follow, without this handler
	Reset                   // reset the connection in both directions
)

// Connection names a TCP connection by its two ends, as the client has opened it.
type Connection struct {
	Client, Server netip.AddrPort
}

// Transform is a handler that may change bytes.
type Transform interface {
	// Transform handles some of in and appends output to out, within its capacity. It
	// returns the number of bytes of in that it has handled, and out with the output.
	// Continue means that it has handled all of in, and at Pause or End that it holds
	// nothing back. Both slices are the caller's and are valid during the call only.
	Transform(in []byte, at Moment, out []byte) (n int, output []byte, v Verdict)
	// Close releases what the handler holds. No call follows.
	Close()
}

// Inspector is a handler that reads bytes and does not change them.
type Inspector interface {
	// Inspect reads p before it is sent on. At Reset p is not sent on. Full is not a
	// valid answer.
	Inspect(p []byte, at Moment) Verdict
}

// Gate is a handler that decides when bytes may go, and not which.
type Gate interface {
	// Take asks to move up to want bytes, at least 1, at a time on a clock that never
	// jumps. It returns how many may go; if it is 0, wait says when to ask again.
	Take(want int, now time.Duration) (n int, wait time.Duration)
	// Return gives back what was taken and not moved.
	Return(n int)
}

// Handler handles one direction of one connection. At most one field is set; the zero
// value passes all bytes.
type Handler struct {
	Transform Transform
	Inspector Inspector
	Gate      Gate
}

// Function makes handlers. An event loop has one of its own of each entry in a list, so
// that handlers may share what they need without locks.
type Function interface {
	Open(Connection) Handler
}

// Side is the direction that a list of functions is for.
type Side uint8

const (
	ToServer Side = iota // the list "run"
	ToClient             // the list "back"
)

func (s Side) String() string {
	switch s {
	case ToServer:
		return "run"
	case ToClient:
		return "back"
	}
	return "Side(?)"
}

// Surroundings is what a function gets from the worker that runs it.
type Surroundings struct {
	Side   Side
	Keys   Keys
	Random io.Reader      // for salts
	Event  *atomic.Uint64 // counts what the function is there to find, in the worker's statistics
}
