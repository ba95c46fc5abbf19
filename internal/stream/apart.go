package stream

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// Where a process may have fewer descriptors than a worker's connections take, each event loop has a table of descriptors of its own,
// on its own thread (host.OwnDescriptors): the limit is one of a table. A number means another file in each. Only those loops listen that there
// would be with one table; the others rest, without memory for connections, until the tables of these are full. A
// client's connection goes to them as a file in a message (SCM_RIGHTS). Sealed connections do not fit: goroutines on any thread read and write them.

// loopsFor is how many event loops connections need if each has descriptors for room of them.
func loopsFor(connections int, room uint64) int {
	usable := int(usableOf(room))
	if usable < 1 {
		return 1
	}
	return min((connections+usable-1)/usable, LoopsMax)
}

// usableOf is how many connections are a loop's part. The rest of the room is for their pipes, and for connections on their way to other loops.
func usableOf(room uint64) uint64 { return min(room-room/apartSpare, ConnectionsMax) }

// extend adds loops that do not listen, so that there are so many, each with room for so many connections once it has descriptors of its own. setApart
// comes next.
func (w *Worker) extend(loops int, room uint64, memory *host.SharedWords) error {
	w.each = int64(usableOf(room))
	w.known = &known{}
	for i := len(w.loops); i < loops; i++ {
		l, err := newLoop(w, loopWords(memory, i), false)
		if err != nil {
			return err
		}
		if w.held >= 0 {
			l.waiting = map[ends]uint32{}
		}
		w.loops = append(w.loops, l)
	}
	for _, l := range w.loops {
		if l.waiting != nil {
			l.known = w.known
		}
		// Each message is taken as a whole, and waits in the sender's memory.
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socketpair", err)
		}
		w.hands = append(w.hands, fds[0])
		l.in = fds[1]
		if err := l.watch(l.in, unix.EPOLLIN, aboutHanded, 0); err != nil {
			return err
		}
	}
	loopWords(memory, 0)[wordLoops].Store(uint64(len(w.loops)))
	return nil
}

// handFile gives a client's connection to a loop with another table, and closes it in this one. false: the caller still has it.
func (l *loop) handFile(to *loop, fd int, of ends) bool {
	text, err := of.text()
	if err == nil {
		err = sendFiles(l.w.hands[to.index], text, fd)
	}
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// takeFiles takes clients' connections that other loops hand over.
func (l *loop) takeFiles() {
	var text [2 * addrPortMax]byte
	var control [64]byte // unix.CmsgSpace of a descriptor is less
	for range acceptMax {
		n, controls, _, _, err := unix.Recvmsg(l.in, text[:], control[:], unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return // there are no more
		}
		a := accepted{fd: -1} // as one that found no descriptor here
		if messages, err := unix.ParseSocketControlMessage(control[:controls]); err == nil && len(messages) == 1 {
			if fds, err := unix.ParseUnixRights(&messages[0]); err == nil && len(fds) == 1 {
				a.fd = fds[0]
			}
		}
		if a.of, err = readEnds(text[:n]); err != nil {
			if a.fd >= 0 {
				unix.Close(a.fd)
			}
			continue // no loop sends that
		}
		switch {
		case l.waiting != nil:
			l.takeAccepted(a)
		case a.fd >= 0:
			l.takeEarly(a.fd, a.of.client, true)
		default:
			l.open.Add(-1)
			l.words[wordRefused].Add(1)
		}
	}
}

// addrPortMax is what an address and a port take in a message, in bytes.
const addrPortMax = 18

// text is the client's end, and behind it the server's, as long as it.
func (e ends) text() ([]byte, error) {
	client, err := e.client.MarshalBinary()
	if err != nil {
		return nil, err
	}
	server := e.server
	if !server.IsValid() { // its loop asks for it
		server = netip.AddrPortFrom(e.client.Addr(), 0)
	}
	return server.AppendBinary(client)
}

func readEnds(text []byte) (e ends, err error) {
	n := len(text) / 2
	err = errors.Join(e.client.UnmarshalBinary(text[:n]), e.server.UnmarshalBinary(text[n:]))
	if err == nil && !(e.client.IsValid() && e.server.IsValid()) {
		err = errors.New("an address is missing")
	}
	if err != nil {
		return e, fmt.Errorf("read the ends of a connection: %w", err)
	}
	return e, nil
}

// apartSpare: one in this number of a loop's descriptors is not counted on.
const apartSpare = 8

// do calls f on the loop's own thread, if it has one.
func (l *loop) do(f func()) {
	if l.thread == nil {
		f()
		return
	}
	done := make(chan struct{})
	l.thread <- func() {
		defer close(done)
		f()
	}
	<-done
}

// setApart gives each loop a thread with a table of descriptors of its own. others are what all threads need,
// see host.RuntimeDescriptors; first is what the first loop needs beside them. The process's own table loses
// what only loops use: a listener is closed once no table has it.
func (w *Worker) setApart(others []int, first ...int) error {
	shared := slices.Clone(others)
	for _, l := range w.loops {
		shared = append(shared, l.wake)
	}
	if w.held >= 0 {
		shared = append(shared, w.held)
	}
	w.apart = true
	for i, l := range w.loops {
		l.thread = make(chan func())
		host.OnThread(func() { // whose table ends with it
			for f := range l.thread {
				f()
			}
		})
		keep := append(slices.Clone(shared), l.epoll, l.spare, l.in)
		keep = append(keep, l.listeners...)
		if i < w.listening {
			keep = append(keep, w.hands...)
		}
		if i == 0 {
			keep = append(keep, first...)
		}
		var err error
		l.do(func() { err = host.OwnDescriptors(keep) })
		if err != nil {
			return err
		}
	}
	for _, l := range w.loops {
		for _, fd := range append(slices.Clone(l.listeners), l.epoll, l.spare, l.in) {
			unix.Close(fd)
		}
	}
	for _, fd := range w.hands {
		unix.Close(fd)
	}
	return nil
}

// endThread ends the loop's own thread, once the loop is closed. wake is the process's own descriptor to wake it up by.
func (l *loop) endThread(wake int) {
	if l.thread != nil {
		close(l.thread)
		l.thread = nil
		unix.Close(wake)
	}
}
