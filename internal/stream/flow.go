package stream

import (
	"sync/atomic"

	"github.com/waystamp/waystamp/internal/stream/function"
)

// flow runs the bytes of one direction through the handlers of its functions. Whatever
// could not go on is held in it: at most one buffer per function and one behind the last.
// Until that has gone, nothing is read.
type flow struct {
	l       *loop
	stages  []stage
	fed     bool            // bytes came since the handlers were told of a pause
	sweeps  bool            // the handlers are being told of moment, from the first to the last
	next    int             // the one to be told next
	moment  function.Moment // Pause or End
	flushed bool            // all were told of the end
	gathers bool            // what comes out of the last handler is kept in out, and not written
	out     []byte
}

type stage struct {
	handler function.Handler
	held    []byte // input that waits until there is room behind
	stopped bool   // has to be called again, with held, at moment at
	at      function.Moment
	words   []atomic.Uint64
}

// outcome is what became of bytes that were given to handlers.
type outcome uint8

const (
	flows   outcome = iota // all went on
	blocked                // some is held
	refuse                 // a handler wants the connection reset
	closed                 // the connection is closed already
)

func (f *flow) close() {
	for i := range f.stages {
		f.stages[i].done()
	}
}

// done takes a handler out; bytes pass its place from then on.
func (s *stage) done() {
	if t := s.handler.Transform; t != nil {
		t.Close()
	}
	s.handler = function.Handler{}
	s.stopped = false
}

// passes tells whether no handler wants bytes any more.
func (f *flow) passes() bool {
	for i := range f.stages {
		s := &f.stages[i]
		if s.handler.Transform != nil || s.handler.Inspector != nil || s.stopped {
			return false
		}
	}
	return true
}

// work moves the bytes of a direction through its functions. It returns false if the
// connection is closed.
func (l *loop) work(c *conn, side int) bool {
	d := &c.dir[side]
	f := d.flow
	for budget := turnBytes; budget > 0; {
		if !l.writeRest(c, side) {
			return false
		}
		if len(d.rest) > 0 {
			return true
		}
		switch f.resume(c, side) {
		case blocked: // until the other side's socket takes bytes
			return true
		case refuse:
			l.reset(c, wordByFunction)
			return false
		case closed:
			return false
		}
		switch {
		case f.flushed:
			return l.finish(c, side)
		case f.passes():
			d.flow = nil
			return l.pass(c, side)
		case d.eof:
			f.sweep(function.End)
			continue
		case !d.readable:
			if !f.fed {
				return true
			}
			f.fed = false
			f.sweep(function.Pause)
			continue
		case !d.writable:
			return true
		}
		want := l.allow(c, side, len(l.buf))
		if want == 0 {
			return true
		}
		n, ok := l.read(c, side, l.buf[:want])
		if !ok {
			return false
		}
		d.unused(want - n)
		if n == 0 {
			continue
		}
		f.fed = true
		budget -= n
		switch f.push(c, side, 0, l.buf[:n], function.More) {
		case refuse:
			l.reset(c, wordByFunction)
			return false
		case closed:
			return false
		}
	}
	l.later(c)
	return true
}

func (f *flow) sweep(m function.Moment) { f.sweeps, f.next, f.moment = true, 0, m }

// resume goes on with what was held, beginning at the end of the list, and then with
// telling handlers of a pause or an end.
func (f *flow) resume(c *conn, side int) outcome {
	for i := len(f.stages) - 1; i >= 0; i-- {
		s := &f.stages[i]
		if !s.stopped {
			continue
		}
		p := s.held
		s.held, s.stopped = nil, false
		if o := f.step(c, side, i, p, s.at); o != flows {
			return o
		}
	}
	for f.sweeps {
		if f.next == len(f.stages) {
			f.sweeps = false
			f.flushed = f.moment == function.End
			break
		}
		i := f.next
		f.next++
		if o := f.push(c, side, i, nil, f.moment); o != flows {
			return o
		}
	}
	return flows
}

// push gives bytes to the handler at place i, and what comes of them to those behind
// it. It takes all of p: what cannot go on is copied and held.
func (f *flow) push(c *conn, side, i int, p []byte, at function.Moment) outcome {
	if i == len(f.stages) {
		return f.emit(c, side, p)
	}
	s := &f.stages[i]
	s.words[stepIn].Add(uint64(len(p)))
	switch {
	case s.handler.Inspector != nil:
		switch s.handler.Inspector.Inspect(p, at) {
		case function.Continue:
		case function.Done:
			s.done()
		default:
			return refuse
		}
		fallthrough
	case s.handler.Transform == nil:
		if len(p) == 0 {
			return flows // each is told of pause and end by itself
		}
		s.words[stepOut].Add(uint64(len(p)))
		return f.push(c, side, i+1, p, function.More)
	case s.stopped:
		s.held = append(s.held, p...)
		return blocked
	}
	return f.step(c, side, i, p, at)
}

// step calls the handler at place i until it has handled all of p, or what is behind it
// is blocked.
func (f *flow) step(c *conn, side, i int, p []byte, at function.Moment) outcome {
	s := &f.stages[i]
	for {
		if s.handler.Transform == nil { // it was taken out while it waited
			if len(p) == 0 {
				return flows
			}
			s.words[stepOut].Add(uint64(len(p)))
			return f.push(c, side, i+1, p, function.More)
		}
		n, out, v := s.handler.Transform.Transform(p, at, f.l.scratch[i])
		p = p[n:]
		s.words[stepOut].Add(uint64(len(out)))
		o := flows
		if len(out) > 0 {
			if o = f.push(c, side, i+1, out, function.More); o == refuse || o == closed {
				return o
			}
		}
		switch v {
		case function.Continue:
			if len(p) > 0 {
				return refuse // a handler that says that it is through must be
			}
			return o
		case function.Done:
			s.done()
		case function.Full:
			if n == 0 && len(out) == 0 {
				return refuse // it would go on for ever
			}
		default:
			return refuse
		}
		if o == blocked {
			s.stopped, s.at = true, at
			s.held = append([]byte(nil), p...)
			return blocked
		}
	}
}

// emit writes what comes out of the last handler.
func (f *flow) emit(c *conn, side int, p []byte) outcome {
	if f.gathers {
		if f.out = append(f.out, p...); len(f.out) >= pieceMax {
			return blocked
		}
		return flows
	}
	d := &c.dir[side]
	n := 0
	if len(d.rest) == 0 {
		var ok bool
		if n, ok = f.l.write(c, side, p); !ok {
			return closed
		}
	}
	if n < len(p) {
		d.rest = append(d.rest, p[n:]...)
		return blocked
	}
	return flows
}
