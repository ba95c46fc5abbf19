package stream

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// A worker may outlive the process that started it, and be taken over by the next one. It holds for that one what
// only processes keep alive: its namespaces, the memory of its statistics, and the link of the program that gives it
// connections. It listens at a socket that has a name, and whoever connects there gets all of them but the link, with a
// text that the first process has written. It ends when its interface does, so that nothing has to find it
// to end it.

// Stay is what a worker that outlives its parent starts with. The caller closes the files.
type Stay struct {
	At   *os.File // a StaySocket
	Link *os.File // a LinkSocket of its interface
}

// StaySocket makes a socket with a name, which replaces one that is there. The worker listens at it.
func StaySocket(name string) (_ *os.File, err error) {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove the socket of a worker before: %w", err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	// Who may write to the name may connect.
	err = os.NewSyscallError("fchmod", unix.Fchmod(fd, 0o600))
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrUnix{Name: name}))
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("name a worker's socket %s: %w; if the name is long, give a shorter run directory", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// LinkSocket makes a socket that has an error once an interface is gone or down, and gets no frames that anybody
// sends. It takes a privilege that a worker does not have.
func LinkSocket(link int) (*os.File, error) { return packetSocket(link, unusedProtocol) }

// unusedProtocol is the second Ethertype for experiments (IEEE Std 802 9.2.3). Nobody sends such frames to a worker's place.
const unusedProtocol = 0x88b6

// packetSocket makes a packet socket for one Ethertype at an interface.
func packetSocket(link int, protocol uint16) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol<<8 | protocol>>8, Ifindex: link}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("bind", err)
	}
	return os.NewFile(uintptr(fd), "packets"), nil
}

const (
	tagMax   = 4 << 10 // bytes of the text that a worker keeps
	filesMax = 4       // that it keeps for the next process, besides its statistics
)

// sendFiles sends a text and files in one message.
func sendFiles(fd int, text []byte, files ...int) error {
	for {
		err := unix.Sendmsg(fd, text, unix.UnixRights(files...), nil, unix.MSG_NOSIGNAL)
		if err != unix.EINTR {
			return os.NewSyscallError("sendmsg", err)
		}
	}
}

// receiveFiles takes such a message. The error is io/fs.ErrClosed if the other end is closed.
func receiveFiles(fd int) (text []byte, files []*os.File, err error) {
	text, oob := make([]byte, tagMax), make([]byte, unix.CmsgSpace(4*(filesMax+1)))
	for {
		n, oobn, flags, _, err := unix.Recvmsg(fd, text, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, nil, os.NewSyscallError("recvmsg", err)
		}
		if n == 0 {
			return nil, nil, fs.ErrClosed
		}
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			return nil, nil, os.NewSyscallError("recvmsg", err)
		}
		for i := range messages {
			fds, err := unix.ParseUnixRights(&messages[i])
			if err != nil {
				return nil, files, fmt.Errorf("read the descriptors of a message: %w", err)
			}
			for _, fd := range fds {
				files = append(files, os.NewFile(uintptr(fd), "handed over"))
			}
		}
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			return nil, files, errors.New("a message is longer than what is expected")
		}
		return text[:n], files, nil
	}
}

func closeAll(files []*os.File) (err error) {
	for _, f := range files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// staying is the worker's side.
type staying struct {
	listener, link int // descriptors of Stay
	lookup         int // the program that gives it connections; -1: it has been taken off
	tag            []byte
	kept           []int      // descriptors that the next process gets
	files          []*os.File // that these are of: they would be closed when they are collected
}

func newStaying(at, link *os.File) *staying {
	return &staying{listener: int(at.Fd()), link: int(link.Fd()), lookup: -1, files: []*os.File{at, link}}
}

// prepare listens, so that the worker is the one whom the kernel names to those that connect (SO_PEERCRED).
func (s *staying) prepare() error { return os.NewSyscallError("listen", unix.Listen(s.listener, 1)) }

// release waits for the parent's word that the worker may serve.
func (s *staying) release(parent int, statistics *os.File) error {
	tag, files, err := receiveFiles(parent)
	if err == nil && len(files) == 0 {
		err = errors.New("the program that gives it connections is not there")
	}
	if err != nil {
		return errors.Join(fmt.Errorf("wait for the parent: %w", err), closeAll(files))
	}
	s.files = append(s.files, files...)
	s.tag, s.lookup, s.kept = tag, int(files[0].Fd()), []int{int(statistics.Fd())}
	for _, f := range files[1:] {
		s.kept = append(s.kept, int(f.Fd()))
	}
	return nil
}

// next waits for the next process that takes the worker over; -1: there will be none.
func (s *staying) next() int {
	for {
		fd, _, err := unix.Accept4(s.listener, unix.SOCK_CLOEXEC)
		switch {
		case err == unix.EINTR || err == unix.ECONNABORTED:
			continue
		case err == unix.EMFILE || err == unix.ENFILE || err == unix.ENOBUFS || err == unix.ENOMEM:
			time.Sleep(time.Second) // connections that end give some back
			continue
		case err != nil:
			return -1
		}
		if sendFiles(fd, s.tag, s.kept...) == nil {
			return fd
		}
		unix.Close(fd)
	}
}

// stop takes no more connections, and no more processes.
func (s *staying) stop() {
	if s.lookup >= 0 {
		unix.Close(s.lookup)
		unix.Close(s.listener)
		s.lookup, s.listener = -1, -1
	}
}

// Found is a worker that an earlier process has started. Take, End or Drain ends it as such.
type Found struct {
	Tag   []byte     // of Release
	Files []*os.File // of Release; the caller closes them, before Take, End and Drain or after

	memory *os.File
	up     *os.File
	pid    int
	handle *os.File // of the process (pidfd)
}

// Find looks for a worker that listens at a name. The error is fs.ErrNotExist if there is none. The kernel says
// which process listens, and that this process's user has started it.
func Find(name string) (_ *Found, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := &Found{up: os.NewFile(uintptr(fd), "worker")}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	// Also for connect: a worker has one process to speak with.
	for _, o := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, o, &unix.Timeval{Sec: int64(startTime / time.Second)}); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	switch err := unix.Connect(fd, &unix.SockaddrUnix{Name: name}); err {
	case nil:
	case unix.ENOENT, unix.ECONNREFUSED:
		return nil, fmt.Errorf("no worker listens at %s: %w", name, fs.ErrNotExist)
	default:
		return nil, fmt.Errorf("connect to the worker at %s: %w", name, err)
	}
	who, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, os.NewSyscallError("getsockopt SO_PEERCRED", err)
	}
	if who.Pid <= 0 || int(who.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("process %d listens at %s, and is user %d's and not %d's", who.Pid, name, who.Uid, os.Geteuid())
	}
	handle, err := unix.PidfdOpen(int(who.Pid), unix.O_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("open process %d of the worker at %s: %w", who.Pid, name, err)
	}
	f.pid, f.handle = int(who.Pid), os.NewFile(uintptr(handle), "process")
	text, files, err := receiveFiles(fd)
	if err == nil && len(files) == 0 {
		err = errors.New("it hands over nothing")
	}
	if err == nil {
		// It is there, after its process was opened: so the number is its own.
		err = stillThere(fd)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("take over the worker at %s: %w", name, err), closeAll(files))
	}
	f.Tag, f.memory, f.Files = text, files[0], files[1:]
	return f, nil
}

// stillThere is an error if the other end of a socket is closed.
func stillThere(fd int) error {
	p := []unix.PollFd{{Fd: int32(fd)}}
	if _, err := unix.Poll(p, 0); err != nil && err != unix.EINTR {
		return os.NewSyscallError("poll", err)
	}
	if p[0].Revents != 0 {
		return errors.New("it has ended")
	}
	return nil
}

// PID is that of the process.
func (f *Found) PID() int { return f.pid }

// Take takes the worker over. config is what it was started with.
func (f *Found) Take(config []byte, answer func(Ask) (*Ends, error)) (*Process, error) {
	p := &Process{up: f.up, ended: make(chan struct{}), stays: true, pid: f.pid, handle: f.handle}
	var err error
	if p.Config, err = ReadConfig(bytes.NewReader(config)); err != nil {
		return nil, errors.Join(err, f.close())
	}
	if p.memory, err = host.OpenSharedWords(f.memory); err != nil {
		f.memory = nil
		return nil, errors.Join(err, f.close())
	}
	if want := LoopsMax * wordsOfLoop; len(p.memory.Words) != want {
		err := fmt.Errorf("the worker of function %s has %d words of statistics; expect %d", p.Config.Name, len(p.memory.Words), want)
		f.memory = nil
		return nil, errors.Join(err, p.memory.Close(), f.close())
	}
	f.up, f.memory, f.handle = nil, nil, nil // p's
	p.follow()
	if answer != nil {
		p.answering.Go(func() { p.answer(answer) })
	}
	return p, nil
}

// End ends the worker; its connections are reset. It does nothing behind Take and Drain.
func (f *Found) End() error {
	if f.handle == nil {
		return nil // Take or Drain was there before
	}
	err := unix.PidfdSendSignal(int(f.handle.Fd()), unix.SIGKILL, nil, 0)
	if err == unix.ESRCH {
		err = nil
	}
	if err == nil {
		p := []unix.PollFd{{Fd: int32(f.handle.Fd()), Events: unix.POLLIN}}
		if _, perr := unix.Poll(p, int(startTime/time.Millisecond)); perr != nil && perr != unix.EINTR {
			err = perr
		}
	}
	return errors.Join(os.NewSyscallError("end a worker", err), f.close())
}

// Drain has the worker take no more connections, and waits until it does not. It goes on with those that it has, and ends
// when they have ended, after an hour at most.
func (f *Found) Drain() error {
	text, err := json.Marshal(jsonEnds{Drain: true})
	if err == nil {
		_, err = unix.Write(int(f.up.Fd()), text)
	}
	buf := make([]byte, askMax)
	until := time.Now().Add(startTime)
	for err == nil {
		if time.Now().After(until) {
			err = os.ErrDeadlineExceeded
			continue
		}
		var n int
		n, err = unix.Read(int(f.up.Fd()), buf)
		switch {
		case err == unix.EINTR:
			err = nil
			continue
		case err == nil && n == 0:
			err = errors.New("it has ended")
			continue
		case err != nil:
			continue
		}
		var m jsonAsk
		if err = json.Unmarshal(buf[:n], &m); err == nil && m.Drained {
			break
		}
	}
	if err != nil { // End ends it
		return fmt.Errorf("have worker %d take no more connections: %w", f.pid, err)
	}
	return f.close()
}

func (f *Found) close() (err error) {
	for _, file := range []**os.File{&f.up, &f.memory, &f.handle} {
		if *file != nil {
			err = errors.Join(err, (*file).Close())
			*file = nil
		}
	}
	return err
}

// Of a worker that takes no more connections.
const (
	drainAccept = 10 * time.Second // clients that were answered may still come
	drainMost   = time.Hour        // then the connections that are left are reset
)

// drain has all loops take no more connections, and calls done when they do not.
func (w *Worker) drain(done func()) {
	w.drained.Add(len(w.loops))
	w.draining.Store(true)
	for _, l := range w.loops {
		l.wakeUp()
	}
	w.drained.Wait()
	done()
}

// beginDrain gives up SYNs that wait for their servers: their clients try again. From now on none
// is taken. Those that were let in are accepted yet.
func (l *loop) beginDrain() {
	l.drainSince = max(l.now, 1)
	if l.waiting != nil {
		if l.index == 0 {
			unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, l.w.held, nil)
		}
		for _, number := range l.waiting {
			if c := l.at(number); c.connecting {
				l.reset(c, wordUnreached)
			}
		}
	}
	l.w.drained.Done()
}

// goOnDraining looks whether a worker that drains is through.
func (l *loop) goOnDraining() {
	since := l.now - l.drainSince
	if since < drainAccept {
		return
	}
	for _, fd := range l.listeners {
		unix.Close(fd) // epoll forgets it
	}
	l.listeners = nil
	for _, number := range l.waiting {
		l.reset(l.at(number), wordUnreached)
	}
	if l.w.connections.Load() == 0 || since > drainMost {
		l.w.stop()
	}
}

// speaking is a worker's side of its parent's socket.
type speaking struct {
	w    *Worker
	stay *staying // nil: the worker ends with its parent

	mu      sync.Mutex
	fd      int // blocks; -1: there is no parent
	number  uint64
	waiting map[uint64]*waitingAsk
}

// waitingAsk is a question that has not been answered.
type waitingAsk struct {
	text []byte
	to   chan jsonEnds
}

// run does what parents say, until the last one is gone.
func (s *speaking) run() {
	for {
		end := s.follow()
		s.mu.Lock()
		unix.Close(s.fd)
		s.fd = -1
		s.mu.Unlock()
		if end || s.stay == nil {
			return
		}
		fd := s.stay.next()
		if fd < 0 { // it drains
			select {}
		}
		s.mu.Lock()
		s.fd = fd
		// What the parent before has not answered.
		for number, a := range s.waiting {
			if say(fd, a.text) == unix.EAGAIN {
				delete(s.waiting, number)
				a.to <- jsonEnds{Error: errBusy.Error()}
			}
		}
		s.mu.Unlock()
	}
}

// follow reads what one parent says; end: that the worker is to end.
func (s *speaking) follow() (end bool) {
	buf := make([]byte, messageMax)
	for {
		n, err := unix.Read(s.fd, buf)
		if err == unix.EINTR {
			continue
		}
		if n <= 0 || err != nil {
			return false
		}
		var m jsonEnds
		if json.Unmarshal(buf[:n], &m) != nil {
			continue // who waits for it gives up
		}
		switch {
		case m.End:
			return true
		case m.Drain && s.stay != nil:
			s.w.drain(s.stay.stop)
			if text, err := json.Marshal(jsonAsk{Drained: true}); err == nil {
				unix.Write(s.fd, text)
			}
			continue
		}
		s.mu.Lock()
		a := s.waiting[m.Number]
		delete(s.waiting, m.Number)
		s.mu.Unlock()
		if a != nil {
			a.to <- m
		}
	}
}
