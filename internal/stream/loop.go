package stream

import (
	"container/heap"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/stream/function"
)

const (
	eventsMax  = 256                    // taken from the kernel at once
	acceptMax  = 64                     // connections accepted before others have their turn
	roundMax   = 250 * time.Millisecond // a loop comes round at least this often
	chunkMax   = 64 << 10               // bytes read at once
	turnBytes  = 1 << 20                // moved for one direction before others have their turn
	pipesKept  = 32                     // empty pipes that a loop keeps for the next use
	slabConns  = 1024                   // connections per allocation
	generation = 1<<30 - 1              // mask of a connection's generation
)

// What an event is about: a connection by its number, or one of these.
const (
	aboutWake     = -1
	aboutListener = -2 // and below, one for each listener
	aboutHeld     = math.MinInt32
	aboutLink     = math.MinInt32 + 1
	aboutHanded   = math.MinInt32 + 2
)

// loop is one event loop. It runs on a thread of its own, and nothing in it is used by
// another; the statistics alone are read from outside. With descriptors of its own (setApart),
// it is that thread which opens and closes them.
type loop struct {
	w     *Worker
	index int // in w.loops
	epoll int
	wake  int // an eventfd; readable: come round and see whether to stop
	spare int // a descriptor to give up, so that a connection can be refused when none is left
	in    int // a socket by which other tables hand over clients' connections; -1: there is one table

	open atomic.Int64 // connections that it has, or that are handed to it

	listeners []int
	frame     []byte                 // from the HeldSocket, which the first loop alone reads
	waiting   map[ends]uint32        // connections whose clients have not been accepted; nil: clients are answered at once
	known     *known                 // these and the others, of a loop that holds SYNs
	functions [2][]function.Function // of each side

	conns  [][]conn // slabs; a connection stays at its place
	free   []uint32 // numbers of connections that are not in use
	again  []uint32 // have used up their turn
	timers timers
	start  time.Time     // of the worker: gates are shared by loops
	now    time.Duration // since start, on the monotonic clock
	swept  time.Duration // when connections were last looked at for their limits

	drainSince time.Duration // when the worker was told to take no more; 0: it was not

	buf     []byte   // what was read last
	scratch [][]byte // output of a function, by its place in the list
	pipes   []pipe   // empty
	events  []unix.EpollEvent

	words []atomic.Uint64
	steps [2][][]atomic.Uint64

	inbox  inbox       // from other loops
	thread chan func() // on which all is done that uses the loop's descriptors; nil: on any

	// Of sealed connections, which goroutines have taken over.
	working  sync.Mutex // functions, scratch, and the flows of such connections
	sealing  sync.WaitGroup
	over     sync.Mutex
	finished []uint32 // numbers of connections that are over
}

type pipe struct{ r, w int32 }

// newLoop makes a loop that listens, or one that gets connections from such loops alone.
func newLoop(w *Worker, words []atomic.Uint64, listens bool) (_ *loop, err error) {
	l := &loop{w: w, index: len(w.loops), epoll: -1, wake: -1, spare: -1, in: -1, start: w.start, words: words}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	l.events = make([]unix.EpollEvent, eventsMax)
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	for _, fd := range []*int{&l.wake, &l.spare} {
		if *fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
			return nil, os.NewSyscallError("eventfd", err)
		}
	}
	if err := l.watch(l.wake, unix.EPOLLIN, aboutWake, 0); err != nil {
		return nil, err
	}
	if !listens {
		return l, nil
	}
	if err := l.prepare(); err != nil {
		return nil, err
	}
	for i, family := range []int{unix.AF_INET6, unix.AF_INET} {
		fd, err := listen(family, w.config.Port)
		if err != nil {
			return nil, err
		}
		l.listeners = append(l.listeners, fd)
		if err := l.watch(fd, unix.EPOLLIN, aboutListener-i, 0); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// prepare makes what the loop needs for connections, if it is not there.
func (l *loop) prepare() error {
	if l.buf != nil {
		return nil
	}
	stages := max(len(l.w.config.Run), len(l.w.config.Back))
	chunk := min(chunkMax, l.w.config.Buffer/(stages+1))
	for side, list := range [][]function.Entry{l.w.config.Run, l.w.config.Back} {
		l.functions[side], l.steps[side] = nil, nil
		for i, e := range list {
			step := stepWords(l.words, function.Side(side), i)
			f, err := e.Make(function.Surroundings{Side: function.Side(side), Keys: l.w.config.Keys, Random: rand.Reader, Event: &step[stepEvent]})
			if err != nil {
				return err
			}
			l.functions[side] = append(l.functions[side], f)
			l.steps[side] = append(l.steps[side], step)
		}
	}
	for range stages {
		l.scratch = append(l.scratch, make([]byte, 0, chunk))
	}
	l.buf = make([]byte, chunk)
	return nil
}

// admit counts a connection, unless there are as many as may be. placed: it has its place in the loop already (Worker.choose).
func (l *loop) admit(placed bool) bool {
	if !placed {
		l.open.Add(1)
	}
	if l.w.connections.Add(1) <= int64(l.w.config.Connections) && l.prepare() == nil {
		return true
	}
	l.w.connections.Add(-1)
	l.open.Add(-1)
	l.words[wordRefused].Add(1)
	return false
}

// close resets all connections that are left, and gives up all descriptors.
func (l *loop) close() {
	for i := range l.conns {
		for j := range l.conns[i] {
			if c := &l.conns[i][j]; c.open && c.sealed != nil {
				c.sealed.end(wordByWorker)
			} else if c.open {
				l.reset(c, wordByWorker)
			}
		}
	}
	l.sealing.Wait()
	l.takeFinished()
	for _, p := range l.pipes {
		p.close()
	}
	l.pipes = nil
	l.inbox.close()
	for _, fd := range append(l.listeners, l.epoll, l.wake, l.spare, l.in) {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	l.listeners, l.epoll, l.wake, l.spare, l.in = nil, -1, -1, -1, -1
}

func (p pipe) close() {
	unix.Close(int(p.r))
	unix.Close(int(p.w))
}

// watch has events of a descriptor reported with two numbers.
func (l *loop) watch(fd int, events uint32, about int, pad int32) error {
	err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(about), Pad: pad})
	return os.NewSyscallError("epoll_ctl", err)
}

// wakeUp makes the loop come round soon. It may be called from any thread, until the
// loop is closed.
func (l *loop) wakeUp() {
	one := [8]byte{1, 1, 1, 1, 1, 1, 1, 1} // not zero in any byte order
	unix.Write(l.wake, one[:])             // a full counter is readable, too
}

// run handles events until the worker is told to stop. The thread is the loop's alone.
func (l *loop) run() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for !l.w.stopping.Load() {
		n, err := unix.EpollWait(l.epoll, l.events, l.timeout())
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("epoll_wait", err)
		}
		l.now = time.Since(l.start)
		l.words[wordRounds].Add(1)
		for i := range n {
			l.handle(&l.events[i])
		}
		// Those that use up another turn wait for the next round.
		again := l.again
		l.again = nil
		for _, i := range again {
			if c := l.at(i); c.open && c.queued {
				c.queued = false
				l.pump(c)
			}
		}
		l.takeHanded()
		l.fireTimers()
		l.takeFinished()
		if l.drainSince == 0 && l.w.draining.Load() {
			l.beginDrain()
		}
		if l.now-l.swept >= time.Second {
			l.swept = l.now
			l.sweep()
			l.rest()
			if l.drainSince > 0 {
				l.goOnDraining()
			}
		}
	}
	return nil
}

// timeout is how long to wait for events, in milliseconds.
func (l *loop) timeout() int {
	if len(l.again) > 0 {
		return 0
	}
	if l.buf == nil { // it rests until it is handed something, or the worker stops
		return -1
	}
	wait := roundMax
	if len(l.timers) > 0 {
		wait = min(wait, max(l.timers[0].at-l.now, 0))
	}
	return int((wait + time.Millisecond - 1) / time.Millisecond)
}

func (l *loop) handle(e *unix.EpollEvent) {
	switch {
	case e.Fd == aboutWake:
		var b [8]byte
		unix.Read(l.wake, b[:])
	case e.Fd == aboutHeld:
		l.takeHeld()
	case e.Fd == aboutLink:
		l.w.stop()
	case e.Fd == aboutHanded:
		l.takeFiles()
	case e.Fd <= aboutListener:
		if i := int(aboutListener - e.Fd); i < len(l.listeners) { // a worker that drains has none
			l.accept(l.listeners[i])
		}
	default:
		c := l.at(uint32(e.Fd))
		// The event may be older than the connection that now has the number.
		switch {
		case !c.open || c.gen&generation != uint32(e.Pad)>>1:
		case c.sealed == nil:
			l.ready(c, int(e.Pad&1), e.Events)
		case e.Events&unix.EPOLLERR != 0:
			c.sealed.hasError(int(e.Pad & 1))
		}
	}
}

func (l *loop) at(i uint32) *conn { return &l.conns[i/slabConns][i%slabConns] }

// newConn takes a connection that is not in use.
func (l *loop) newConn() *conn {
	if len(l.free) == 0 {
		first := uint32(len(l.conns)) * slabConns
		slab := make([]conn, slabConns)
		for i := range slab {
			slab[i].number = first + uint32(i)
			l.free = append(l.free, first+uint32(slabConns-1-i))
		}
		l.conns = append(l.conns, slab)
	}
	i := l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	c := l.at(i)
	*c = conn{number: i, gen: c.gen + 1, fd: [2]int32{-1, -1}, open: true, active: l.seconds()}
	return c
}

func (l *loop) seconds() uint32 { return uint32(l.now / time.Second) }

// accept takes connections that the kernel has established.
func (l *loop) accept(listener int) {
	for range acceptMax {
		fd, from, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
		case err == unix.EMFILE || err == unix.ENFILE:
			if !l.refuseOne(listener) {
				return
			}
			continue
		case errors.Is(err, unix.EAGAIN):
			return
		default:
			continue // this connection has ended meanwhile (accept(2))
		}
		l.accepted(fd, addrPort(from))
	}
}

// refuseOne resets the connection that has waited longest, with a descriptor that is
// kept for that: without any, it would wait on, and wake the loop for ever.
func (l *loop) refuseOne(listener int) bool {
	if l.spare < 0 {
		return false
	}
	unix.Close(l.spare)
	fd, from, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	if err == nil {
		l.w.refused.tell(ends{addrPort(from), endOf(fd)}, "worker-descriptors")
		l.words[wordRefused].Add(1)
		unix.Close(fd)
	}
	l.keepSpare()
	return err == nil
}

// keepSpare takes a descriptor to give up later.
func (l *loop) keepSpare() {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		fd = -1
	}
	l.spare = fd
}

// accepted takes a client's connection and begins the one to its server.
func (l *loop) accepted(fd int, client netip.AddrPort) {
	if l.waiting != nil {
		l.acceptedHeld(fd, client)
		return
	}
	if to := l.w.withRoom(l.index); to != l {
		to.open.Add(1)
		if !l.handFile(to, fd, ends{client: client}) {
			to.open.Add(-1)
			l.words[wordRefused].Add(1)
			unix.Close(fd)
		}
		return
	}
	l.takeEarly(fd, client, false)
}

// takeEarly takes a client's connection whose server was not asked before. placed: as of admit.
func (l *loop) takeEarly(fd int, client netip.AddrPort, placed bool) {
	if !l.admit(placed) {
		l.w.refused.tell(ends{client, endOf(fd)}, "worker-limit")
		unix.Close(fd)
		return
	}
	to, err := unix.Getsockname(fd)
	c := l.newConn()
	l.words[wordOpened].Add(1)
	c.fd[0] = int32(fd)
	if err != nil {
		l.reset(c, wordByClient)
		return
	}
	if l.w.config.Sealed {
		c.ends = &ends{client, addrPort(to)}
	}
	l.openHandlers(c, function.Connection{Client: client, Server: addrPort(to)})
	if err := l.connectOnward(c, client, addrPort(to), classDefault); err != nil {
		l.reset(c, wordUnreached)
		return
	}
	if err := l.watchSide(c, 0); err != nil {
		l.reset(c, wordByClient)
	}
}

// connectOnward begins the connection to the server. It needs no connection of the
// client's: one that waits for its server before it is answered begins here. class is
// its packets' traffic class, or classDefault.
func (l *loop) connectOnward(c *conn, client, server netip.AddrPort, class int) error {
	fd, err := connect(client, server, class)
	if err != nil {
		return err
	}
	c.fd[1], c.connecting = int32(fd), true
	return l.watchSide(c, 1)
}

// watchSide has all events of one side's socket reported once each, when they come.
func (l *loop) watchSide(c *conn, side int) error {
	const all = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLPRI | unix.EPOLLET
	return l.watch(int(c.fd[side]), all, int(c.number), c.pad(side))
}

// pad is the second number of a connection's events: its generation, and the side.
func (c *conn) pad(side int) int32 { return int32(c.gen&generation)<<1 | int32(side) }

// openHandlers asks the functions for their handlers of both directions.
func (l *loop) openHandlers(c *conn, about function.Connection) {
	if l.w.config.Sealed {
		l.working.Lock()
		defer l.working.Unlock()
	}
	for side := range c.dir {
		d := &c.dir[side]
		var stages []stage
		works := false
		for i, f := range l.functions[side] {
			h := f.Open(about)
			if h.Gate != nil {
				d.gates = append(d.gates, h.Gate)
			}
			works = works || h.Transform != nil || h.Inspector != nil
			stages = append(stages, stage{handler: h, words: l.steps[side][i]})
		}
		if works {
			d.flow = &flow{l: l, stages: stages}
		}
	}
}

// sweep resets connections that have been idle or half-closed for too long.
func (l *loop) sweep() {
	if l.spare < 0 { // it could not be had when the last one was used
		l.keepSpare()
	}
	now := l.seconds()
	idle := uint32(min(l.w.config.Idle/time.Second, 1<<31))
	half := uint32(min(l.w.config.HalfClosed/time.Second, 1<<31))
	for i := range l.conns {
		for j := range l.conns[i] {
			c := &l.conns[i][j]
			if !c.open {
				continue
			}
			if c.quiet(now) {
				l.reset(c, wordUnreached)
				continue
			}
			if c.sealed != nil {
				if quiet := now - min(now, c.sealed.active.Load()); quiet > idle || quiet > half && c.sealed.halfClosed() {
					c.sealed.end(wordByLimit)
				}
				continue
			}
			if quiet := now - c.active; quiet > idle || quiet > half && (c.dir[0].done || c.dir[1].done) {
				l.reset(c, wordByLimit)
			}
		}
	}
}

// rest gives up what a loop needs for connections alone, if it has none. It must listen to nothing: another loop hands it connections.
func (l *loop) rest() {
	if l.open.Load() > 0 || l.listeners != nil || l.in < 0 || len(l.timers)+len(l.again) > 0 || l.drainSince > 0 {
		return
	}
	for _, p := range l.pipes {
		p.close()
	}
	// No event is left that has a number of a connection: those of this round are handled, and the sockets are closed.
	l.pipes, l.conns, l.free, l.timers, l.again = nil, nil, nil, nil, nil
	l.buf, l.scratch, l.functions = nil, nil, [2][]function.Function{}
}

// timer wakes a direction that a gate holds up.
type timer struct {
	at          time.Duration
	number, gen uint32
	side        uint8
}

type timers []timer

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].at < t[j].at }
func (t timers) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *timers) Push(x any)        { *t = append(*t, x.(timer)) }
func (t *timers) Pop() any {
	last := (*t)[len(*t)-1]
	*t = (*t)[:len(*t)-1]
	return last
}

func (l *loop) setTimer(c *conn, side int, wait time.Duration) {
	heap.Push(&l.timers, timer{at: l.now + wait, number: c.number, gen: c.gen, side: uint8(side)})
}

func (l *loop) fireTimers() {
	for len(l.timers) > 0 && l.timers[0].at <= l.now {
		t := heap.Pop(&l.timers).(timer)
		if c := l.at(t.number); c.open && c.gen == t.gen {
			c.dir[t.side].waits = false
			l.pump(c)
		}
	}
}

// takePipe returns an empty pipe.
func (l *loop) takePipe() (pipe, error) {
	if n := len(l.pipes); n > 0 {
		p := l.pipes[n-1]
		l.pipes = l.pipes[:n-1]
		return p, nil
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return pipe{}, fmt.Errorf("make a pipe: %w", err)
	}
	// Where the user's share of memory for pipes is used up, a pipe stays small.
	unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, l.w.pipeSize())
	return pipe{int32(fds[0]), int32(fds[1])}, nil
}

// givePipe takes back a pipe, which must be empty.
func (l *loop) givePipe(p pipe) {
	if len(l.pipes) < pipesKept {
		l.pipes = append(l.pipes, p)
		return
	}
	p.close()
}
