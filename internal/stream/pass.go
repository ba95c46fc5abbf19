package stream

import "golang.org/x/sys/unix"

const (
	firstRead  = 16 << 10 // a read that fills this much is followed by splicing
	bulkLeast  = 4 << 10  // splicing less than this at once is followed by reading
	spliceMask = unix.SPLICE_F_MOVE | unix.SPLICE_F_NONBLOCK
)

// pass moves the bytes of a direction whose functions do not want them. They are
// spliced, through a pipe of the loop's, except where that costs more than it saves: a
// few bytes take one read and one write, against three or four calls of splice. It
// returns false if the connection is closed.
func (l *loop) pass(c *conn, side int) bool {
	d := &c.dir[side]
	for budget := turnBytes; budget > 0; {
		if !l.writeRest(c, side) {
			return false
		}
		if d.held > 0 {
			if !d.writable {
				return true
			}
			if !l.drainPipe(c, side) {
				return false
			}
			continue
		}
		if len(d.rest) > 0 {
			return true
		}
		if d.eof {
			return l.finish(c, side)
		}
		// Without room behind, bytes stay in the sender's socket, and stop the sender.
		if !d.readable || !d.writable {
			return true
		}
		var n int
		var ok bool
		if d.bulk && !d.urgent {
			n, ok = l.fillPipe(c, side)
		} else {
			n, ok = l.copyOnce(c, side)
		}
		if !ok {
			return false
		}
		if d.waits {
			return true
		}
		budget -= n
	}
	l.later(c)
	return true
}

// copyOnce reads and writes one buffer.
func (l *loop) copyOnce(c *conn, side int) (int, bool) {
	d := &c.dir[side]
	want := l.allow(c, side, min(len(l.buf), firstRead))
	if want == 0 {
		return 0, true
	}
	n, ok := l.read(c, side, l.buf[:want])
	if !ok {
		return 0, false
	}
	d.unused(want - n)
	d.bulk = n >= min(len(l.buf), firstRead)
	if n == 0 {
		return 0, true
	}
	l.stepped(side, n)
	k, ok := l.write(c, side, l.buf[:n])
	if !ok {
		return 0, false
	}
	if k < n {
		d.rest = append([]byte(nil), l.buf[k:n]...)
	}
	return n, true
}

// stepped counts bytes for functions that did not see them.
func (l *loop) stepped(side, n int) {
	for _, w := range l.steps[side] {
		w[stepIn].Add(uint64(n))
		w[stepOut].Add(uint64(n))
	}
}

// fillPipe splices from the sender's socket into a pipe.
func (l *loop) fillPipe(c *conn, side int) (int, bool) {
	d := &c.dir[side]
	want := l.allow(c, side, l.w.pipeSize())
	if want == 0 {
		return 0, true
	}
	p, err := l.takePipe()
	if err != nil { // no descriptors left: copy instead
		d.unused(want)
		d.bulk = false
		return l.copyOnce(c, side)
	}
	for {
		n, err := splice(int(c.fd[side]), int(p.w), want)
		if err == unix.EINTR {
			continue
		}
		if n > 0 {
			d.pipe, d.held = p, int32(n)
			d.unused(want - n)
			d.bulk = n >= bulkLeast
			l.moved(c, side, n)
			l.stepped(side, n)
			return n, true
		}
		l.givePipe(p)
		d.unused(want)
		switch {
		case err == nil:
			// The end, or urgent data: a read tells.
			d.bulk = false
		case err == unix.EAGAIN:
			d.readable = false
		default:
			l.failed(c, side)
			return 0, false
		}
		return 0, true
	}
}

// drainPipe splices from the pipe to the other side's socket.
func (l *loop) drainPipe(c *conn, side int) bool {
	d := &c.dir[side]
	n, err := splice(int(d.pipe.r), int(c.fd[1-side]), int(d.held))
	switch {
	case n > 0:
		c.active = l.seconds()
		l.wrote(side, n)
		l.words[wordSides+side*wordsOfSide+wordSplice].Add(uint64(n))
		if d.held -= int32(n); d.held == 0 {
			l.givePipe(d.pipe)
		}
	case err == unix.EINTR:
	case err == unix.EAGAIN:
		d.writable = false
	default:
		l.failed(c, 1-side)
		return false
	}
	return true
}

// splice moves at most n bytes and never blocks, so that the scheduler need not be told
// of the call.
func splice(from, to, n int) (int, error) {
	moved, _, errno := unix.RawSyscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n), spliceMask)
	if errno != 0 {
		return 0, errno
	}
	return int(moved), nil
}
