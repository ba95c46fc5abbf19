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

	"golang.org/x/net/bpf"
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

// packetSocket makes a packet socket for one Ethertype at an interface. It never gets frames of another one: whoever holds a packet socket may
// bind it to any, and a filter on it cannot be taken off.
func packetSocket(link int, protocol uint16) (_ *os.File, err error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	filter, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtProto},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(protocol), SkipTrue: 1},
		bpf.RetConstant{Val: 1 << 18}, // bytes: all
		bpf.RetConstant{Val: 0},
	})
	if err == nil {
		list := make([]unix.SockFilter, len(filter))
		for i, r := range filter {
			list[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
		}
		err = os.NewSyscallError("setsockopt SO_ATTACH_FILTER", unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(list)), Filter: &list[0]}))
	}
	if err == nil {
		err = os.NewSyscallError("setsockopt SO_LOCK_FILTER", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_LOCK_FILTER, 1))
	}
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol<<8 | protocol>>8, Ifindex: link}))
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
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

// Found is a worker that an earlier process has started. Take, End or Leave ends it as such.
type Found struct {
	Tag   []byte     // of Release
	Files []*os.File // of Release; the caller closes them, before Take, End and Leave or after

	memory *os.File
	up     *os.File
	pid    int
	handle *os.File // of the process (pidfd)
}

// Find looks for a worker that listens at a name. The error is fs.ErrNotExist if there is none. The kernel says
// which process listens, and that this process's user has started it. With another error, Found may be there all the same, of a
// process that does not hand over what it has to; End ends it.
func Find(name string) (f *Found, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f = &Found{up: os.NewFile(uintptr(fd), "worker")}
	defer func() {
		if err != nil && f.handle == nil {
			f, err = nil, errors.Join(err, f.Leave())
		}
	}()
	// Also for connect: a worker has one process to speak with.
	for _, o := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, o, &unix.Timeval{Sec: int64(startTime / time.Second)}); err != nil {
			return f, os.NewSyscallError("setsockopt", err)
		}
	}
	switch err := unix.Connect(fd, &unix.SockaddrUnix{Name: name}); err {
	case nil:
	case unix.ENOENT, unix.ECONNREFUSED:
		return f, fmt.Errorf("no worker listens at %s: %w", name, fs.ErrNotExist)
	default:
		return f, fmt.Errorf("connect to the worker at %s: %w", name, err)
	}
	who, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return f, os.NewSyscallError("getsockopt SO_PEERCRED", err)
	}
	if who.Pid <= 0 || int(who.Uid) != os.Geteuid() {
		return f, fmt.Errorf("process %d listens at %s, and is user %d's and not %d's", who.Pid, name, who.Uid, os.Geteuid())
	}
	handle, err := unix.PidfdOpen(int(who.Pid), unix.O_NONBLOCK)
	if err != nil {
		return f, fmt.Errorf("open process %d of the worker at %s: %w", who.Pid, name, err)
	}
	// It is there, after its process was opened: so the number is its own.
	if err := stillThere(fd); err != nil {
		return f, errors.Join(fmt.Errorf("take over the worker at %s: %w", name, err), unix.Close(handle))
	}
	f.pid, f.handle = int(who.Pid), os.NewFile(uintptr(handle), "process")
	text, files, err := receiveFiles(fd)
	if err == nil && len(files) == 0 {
		err = errors.New("it hands over nothing")
	}
	if err != nil {
		return f, errors.Join(fmt.Errorf("take over the worker at %s: %w", name, err), closeAll(files))
	}
	f.Tag, f.memory, f.Files = text, files[0], files[1:]
	return f, nil
}

// stillThere is an error if the other end of a socket is closed.
func stillThere(fd int) error {
	p := []unix.PollFd{{Fd: int32(fd)}} // errors and ends are always told
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

// Handle is its pidfd, which the caller closes; nil: it was taken over, or left.
func (f *Found) Handle() (*os.File, error) {
	if f.handle == nil {
		return nil, nil
	}
	fd, err := unix.FcntlInt(f.handle.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	return os.NewFile(uintptr(fd), "process"), nil
}

// Take takes the worker over. config is what it was started with. With an error, it can be ended or left as before.
func (f *Found) Take(config []byte) (*Process, error) {
	c, err := ReadConfig(bytes.NewReader(config))
	if err != nil {
		return nil, err
	}
	memory, err := host.OpenSharedWords(f.memory)
	f.memory = nil // memory's, also where that has failed
	if err != nil {
		return nil, err
	}
	if want := LoopsMax * wordsOfLoop; len(memory.Words) != want {
		err := fmt.Errorf("the worker of function %s has %d words of statistics; expect %d", c.Name, len(memory.Words), want)
		return nil, errors.Join(err, memory.Close())
	}
	return f.process(c, memory), nil
}

// TakeToDrain takes a worker over whose connections shall end, of this program or another. What it says is answered; see
// Process.Answer and Process.Drain. It has statistics if they are as many as those of this program.
func (f *Found) TakeToDrain(function string, answer func(Ask) (*Ends, error)) *Process {
	memory, err := host.OpenSharedWords(f.memory)
	f.memory = nil
	if err == nil && len(memory.Words) != LoopsMax*wordsOfLoop {
		memory.Close()
		err = errors.ErrUnsupported
	}
	if err != nil {
		memory = nil
	}
	p := f.process(&Config{Name: function, Loops: 1}, memory)
	p.Answer(answer)
	return p
}

func (f *Found) process(c *Config, memory *host.SharedWords) *Process {
	p := newProcess(c, f.pid, true)
	p.memory, p.up, p.handle = memory, f.up, f.handle
	f.up, f.handle = nil, nil // p's
	p.follow()
	return p
}

// End ends the worker; its connections are reset. It does nothing behind Take and Leave.
func (f *Found) End() error {
	if f.handle == nil {
		return nil // Take or Leave was there before
	}
	return errors.Join(EndProcess(f.handle), f.Leave())
}

// EndProcess ends a process by its pidfd, and waits until it is gone.
func EndProcess(handle *os.File) error {
	err := unix.PidfdSendSignal(int(handle.Fd()), unix.SIGKILL, nil, 0)
	if err == unix.ESRCH {
		return nil
	}
	for until := time.Now().Add(startTime); err == nil; {
		left := time.Until(until)
		if left <= 0 {
			err = os.ErrDeadlineExceeded
			continue
		}
		p := []unix.PollFd{{Fd: int32(handle.Fd()), Events: unix.POLLIN}}
		n, perr := unix.Poll(p, int(left/time.Millisecond)+1)
		if n > 0 {
			return nil
		}
		if perr != unix.EINTR {
			err = perr
		}
	}
	return os.NewSyscallError("end a worker", err)
}

// Leave lets go of the worker, which goes on.
func (f *Found) Leave() (err error) {
	for _, file := range []**os.File{&f.up, &f.memory, &f.handle} {
		if *file != nil {
			err = errors.Join(err, (*file).Close())
			*file = nil
		}
	}
	return err
}

// Follow is a worker of before that drains, or does not hand itself over: it can be ended, and its end be noticed, and no more.
// It takes over the process's pidfd.
func Follow(function string, pid int, handle *os.File) *Process {
	p := newProcess(&Config{Name: function, Loops: 1}, pid, true)
	p.handle = handle
	p.follow()
	return p
}

// Of a worker that takes no more connections.
const (
	drainAccept = 10 * time.Second // clients that were answered may still come
	DrainMost   = time.Hour        // then the connections that are left are reset
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
	if l.w.connections.Load() == 0 || since > DrainMost {
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
