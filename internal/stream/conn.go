package stream

import (
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/stream/function"
)

// conn is a connection: the client's socket, the server's, and what moves between them.
type conn struct {
	number uint32 // its place in the loop
	gen    uint32 // grows each time that the place is used again
	active uint32 // when bytes moved last, in seconds of the loop's clock
	fd     [2]int32

	open       bool
	connecting bool // the server has not answered yet
	queued     bool // in loop.again

	wait *waiting // the client's side is not there yet; else nil
	ends *ends    // its SYN has waited, or it is to be sealed; else nil

	sealed *sealed // goroutines have taken it over; else nil

	dir [2]direction // function.ToServer reads from fd[0] and writes to fd[1]; ToClient the reverse
}

// direction is what becomes of the bytes from one side.
type direction struct {
	flow  *flow           // the functions that want the bytes; nil: bytes pass
	gates []function.Gate // ask them before reading
	rest  []byte          // read, and not yet taken by the other side's socket
	pipe  pipe            // valid while held is not 0
	held  int32           // bytes in pipe

	readable bool // the socket may have bytes, or an end
	writable bool // the other side's socket may take bytes
	hangup   bool // the sender has ended; the end is behind the bytes that are left
	urgent   bool // had urgent data, at which splice(2) stops; do not splice
	bulk     bool // reads have been large: splice
	eof      bool // all bytes are read
	done     bool // all bytes are written, and the end is passed on
	waits    bool // for a timer, on behalf of a gate
}

// ready handles an event of one side's socket.
func (l *loop) ready(c *conn, side int, events uint32) {
	if events&unix.EPOLLERR != 0 {
		l.failed(c, side)
		return
	}
	if c.connecting && side == 1 {
		if events&unix.EPOLLOUT == 0 {
			return
		}
		c.connecting = false
		c.active = l.seconds()
		if c.wait != nil {
			l.serverAnswered(c)
		}
	}
	from, to := &c.dir[side], &c.dir[1-side]
	if events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLPRI) != 0 {
		from.readable = true
	}
	if events&(unix.EPOLLRDHUP|unix.EPOLLHUP) != 0 {
		from.hangup = true
	}
	if events&unix.EPOLLPRI != 0 {
		from.urgent = true
	}
	if events&unix.EPOLLOUT != 0 {
		to.writable = true
	}
	if !c.connecting && c.wait == nil && !c.queued {
		l.pump(c)
	}
}

// failed resets a connection whose socket on one side has an error: RST came, or nothing
// came for too long. The other side learns of it at once, also when it has not read
// all that came before.
func (l *loop) failed(c *conn, side int) {
	switch {
	case side == 1 && c.connecting && c.wait != nil:
		l.serverFailed(c)
	case side == 1 && c.connecting:
		l.reset(c, wordUnreached)
	case side == 1:
		l.reset(c, wordByServer)
	default:
		l.reset(c, wordByClient)
	}
}

// pump moves bytes in both directions as far as they go now. The connection may be
// closed behind it.
func (l *loop) pump(c *conn) {
	if l.w.config.Sealed {
		l.handOver(c)
		return
	}
	for side := range c.dir {
		d := &c.dir[side]
		if d.done || d.waits {
			continue
		}
		move := l.pass
		if d.flow != nil {
			move = l.work
		}
		if !move(c, side) {
			return
		}
	}
	if c.dir[0].done && c.dir[1].done {
		l.end(c)
	}
}

// later has a connection go on in the next round, behind all others.
func (l *loop) later(c *conn) {
	if !c.queued {
		c.queued = true
		l.again = append(l.again, c.number)
	}
}

// finish passes on the end of one direction, behind all its bytes.
func (l *loop) finish(c *conn, side int) bool {
	d := &c.dir[side]
	d.done = true
	c.active = l.seconds()
	if c.dir[1-side].done {
		return true // the sockets are closed, which says the same
	}
	if err := unix.Shutdown(int(c.fd[1-side]), unix.SHUT_WR); err != nil {
		l.failed(c, 1-side)
		return false
	}
	return true
}

// end closes a connection that both sides have ended. The kernel sends what is left.
func (l *loop) end(c *conn) {
	for _, fd := range c.fd {
		// If that fails, the socket sends RST: an end is never claimed too early.
		orderly(int(fd))
	}
	l.release(c, wordEnded)
}

// reset closes a connection at once. Both sides get RST, since the sockets still have
// SO_LINGER of 0; word is who is to blame.
func (l *loop) reset(c *conn, word int) { l.release(c, word) }

func (l *loop) release(c *conn, word int) {
	// Counted first: whoever sees the end on the wire sees it in the statistics, too.
	l.words[word].Add(1)
	l.w.connections.Add(-1)
	l.open.Add(-1)
	l.tellReset(c, word)
	l.forget(c)
}

// forget gives up what a connection has, and its place.
func (l *loop) forget(c *conn) {
	if c.wait != nil {
		delete(l.waiting, c.wait.ends)
		l.known.drop(c.wait.ends)
	}
	if c.ends != nil && l.known != nil {
		l.known.drop(*c.ends)
	}
	for side := range c.dir {
		d := &c.dir[side]
		if d.flow != nil {
			d.flow.close()
		}
		if d.held > 0 {
			d.pipe.close() // its bytes go with it
		}
	}
	for _, fd := range c.fd {
		if fd >= 0 {
			unix.Close(int(fd))
		}
	}
	*c = conn{number: c.number, gen: c.gen}
	l.free = append(l.free, c.number)
}

// moved counts bytes that were read from one side.
func (l *loop) moved(c *conn, side, n int) {
	c.active = l.seconds()
	l.words[wordSides+side*wordsOfSide+wordIn].Add(uint64(n))
}

// wrote counts bytes that were written to the other side.
func (l *loop) wrote(side, n int) {
	l.words[wordSides+side*wordsOfSide+wordOut].Add(uint64(n))
}

// write writes what the other side's socket takes. It returns false if the connection
// is closed.
func (l *loop) write(c *conn, side int, p []byte) (n int, ok bool) {
	d := &c.dir[side]
	for n < len(p) && d.writable {
		k, err := unix.Write(int(c.fd[1-side]), p[n:])
		switch {
		case err == nil:
			n += k
			// Less than asked for means that the socket is full; it says when it is not.
			d.writable = n == len(p)
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			d.writable = false
		default:
			l.failed(c, 1-side)
			return n, false
		}
	}
	if n > 0 {
		c.active = l.seconds()
		l.wrote(side, n)
	}
	return n, true
}

// writeRest writes what was read before and not taken. It returns false if the
// connection is closed.
func (l *loop) writeRest(c *conn, side int) bool {
	d := &c.dir[side]
	if len(d.rest) == 0 {
		return true
	}
	n, ok := l.write(c, side, d.rest)
	if !ok {
		return false
	}
	if d.rest = d.rest[n:]; len(d.rest) == 0 {
		d.rest = nil // an idle connection holds no buffer
	}
	return true
}

// read reads at most len(p) bytes. n is 0 if there are none now, or none will come
// (direction.eof). It returns false if the connection is closed.
func (l *loop) read(c *conn, side int, p []byte) (n int, ok bool) {
	d := &c.dir[side]
	for {
		n, err := unix.Read(int(c.fd[side]), p)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			d.readable = false
			return 0, true
		case err != nil:
			l.failed(c, side)
			return 0, false
		case n == 0:
			d.eof = true
			return 0, true
		}
		// A short read has taken all, unless it stopped at urgent data, or the end is
		// next; for what comes later there is another event.
		if n < len(p) && !d.hangup && !d.urgent {
			d.readable = false
		}
		l.moved(c, side, n)
		return n, true
	}
}

// allow asks the gates of a direction how many of want bytes may be read now. If it
// returns 0, a timer is set.
func (l *loop) allow(c *conn, side, want int) int {
	d := &c.dir[side]
	for i, g := range d.gates {
		n, wait := g.Take(want, l.now)
		if n < want {
			for _, before := range d.gates[:i] {
				before.Return(want - n)
			}
		}
		if n == 0 {
			d.waits = true
			l.setTimer(c, side, wait)
			return 0
		}
		want = n
	}
	return want
}

// unused gives back to the gates what was allowed and not read.
func (d *direction) unused(n int) {
	for _, g := range d.gates {
		g.Return(n)
	}
}
