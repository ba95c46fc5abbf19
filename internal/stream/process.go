package stream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// Process is a worker in a process of its own. It ends with this one, unless it was started to
// stay.
type Process struct {
	Config *Config

	pid    int
	handle *os.File          // of the process (pidfd)
	memory *host.SharedWords // nil: of Follow
	up     *os.File          // the worker ends when it is closed, unless it stays; nil: of Follow
	stays  bool
	stderr host.Tail
	ended  chan struct{}
	err    error
	once   sync.Once

	// Refused is told of connections that the worker refuses. It is set before Answer is called; nil: nobody is told.
	Refused func(Refusal)

	answering sync.WaitGroup
	drained   chan struct{} // closed: it says that it takes no more connections
	saysOnce  sync.Once
}

func newProcess(c *Config, pid int, stays bool) *Process {
	return &Process{Config: c, pid: pid, stays: stays, ended: make(chan struct{}), drained: make(chan struct{})}
}

// Text is the configuration as ReadConfig takes it; run and back are entries in JSON. loops is 0 for as many as there are
// CPUs, where the worker runs.
func Text(name string, port uint16, loops int, run, back []string, h *Hold, sealed bool, l Limits) ([]byte, error) {
	list := func(entries []string) []json.RawMessage {
		var out []json.RawMessage
		for _, e := range entries {
			out = append(out, json.RawMessage(e))
		}
		return out
	}
	m := map[string]any{
		"name": name, "port": port, "run": list(run),
		"limits": map[string]any{"connections": l.Connections, "buffer": l.Buffer, "idle": l.Idle.String(), "half-closed": l.HalfClosed.String()},
	}
	if loops > 0 {
		m["loops"] = loops
	}
	if sealed {
		m["sealed"] = true
	}
	if h != nil {
		m["hold"] = h.text()
	}
	if back != nil {
		m["back"] = list(back)
	}
	return json.Marshal(m)
}

// startTime bounds how long a worker takes until it listens.
const startTime = 10 * time.Second

// Start runs `program worker` in a place, and waits until it listens. listeners are one of
// IPv6 and one of IPv4; the caller closes them, and then they are the worker's alone. held is
// a HeldSocket if the configuration has SYNs wait; else nil. The caller closes it. answer says how a
// connection is sealed, if the configuration has them sealed; the worker hears the error. through are PlainListeners, if
// connections go in plain through a function; the caller closes them, too.
func Start(ns *host.NetNS, program string, config []byte, held *os.File, answer func(Ask) (*Ends, error), through ...*os.File) (p *Process, listeners []*os.File, err error) {
	return Begin(Options{NS: ns, Program: program, Config: config, Held: held, Answer: answer, Through: through})
}

// Options are what Begin needs; see Start. The caller closes the files.
type Options struct {
	NS      *host.NetNS
	Program string
	Config  []byte
	Held    *os.File
	Answer  func(Ask) (*Ends, error)
	Through []*os.File
	// Stay has the worker outlive this process. It takes no connection before Release.
	Stay *Stay
}

// Begin is Start, of a worker that may stay.
func Begin(o Options) (p *Process, listeners []*os.File, err error) {
	config, err := ReadConfig(bytes.NewReader(o.Config))
	if err != nil {
		return nil, nil, err
	}
	p = newProcess(config, 0, o.Stay != nil)
	if p.memory, err = NewStatistics(); err != nil {
		return nil, nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, errors.Join(os.NewSyscallError("socketpair", err), p.memory.Close())
	}
	p.up = os.NewFile(uintptr(fds[0]), "worker")
	child := os.NewFile(uintptr(fds[1]), "parent")
	cmd := host.Command(context.Background(), o.NS, o.Program, "worker", "--statistics-fd", "3", "--parent-fd", "4")
	cmd.Stdin, cmd.Stderr, cmd.ExtraFiles = bytes.NewReader(o.Config), &p.stderr, []*os.File{p.memory.File(), child}
	hand := func(option string, f *os.File) {
		cmd.Args = append(cmd.Args, option, strconv.Itoa(3+len(cmd.ExtraFiles)))
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	if o.Held != nil {
		hand("--held-fd", o.Held)
	}
	for _, f := range o.Through {
		hand("--through-fd", f)
	}
	if p.stays {
		hand("--stay-fd", o.Stay.At)
		hand("--link-fd", o.Stay.Link)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // no terminal's signals
	}
	handle := -1
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.PidFD = &handle
	if err := errors.Join(cmd.Start(), child.Close()); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("start the worker of function %s: %w", p.Config.Name, err), p.up.Close(), p.memory.Close())
	}
	p.pid = cmd.Process.Pid
	if handle >= 0 { // else the kernel has none, which is older than those that this runs on
		p.handle = os.NewFile(uintptr(handle), "process")
	}
	go func() {
		p.err = cmd.Wait()
		close(p.ended)
	}()
	listeners, err = p.receive()
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("worker of function %s: %w", p.Config.Name, err), p.Close())
	}
	if o.Answer != nil {
		p.Answer(o.Answer)
	}
	return p, listeners, nil
}

// Release lets a worker that stays serve. It keeps tag and files for the next process that
// takes it over, and lookup, the link of the program that gives it connections, for itself. The caller closes the files.
func (p *Process) Release(tag []byte, lookup *os.File, files ...*os.File) error {
	if len(tag) == 0 || len(tag) > tagMax || len(files) > filesMax-1 {
		return fmt.Errorf("worker of function %s: it keeps at most %d bytes and %d files", p.Config.Name, tagMax, filesMax-1)
	}
	fds := []int{int(lookup.Fd())}
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	return sendFiles(int(p.up.Fd()), tag, fds...)
}

// follow notices the end of a process that is no child of this one.
func (p *Process) follow() {
	conn, err := p.handle.SyscallConn()
	if err != nil { // it would be closed already
		p.err = err
		close(p.ended)
		return
	}
	go func() {
		over := false
		// Readable once the process has ended (pidfd_open(2)); it ends with an error once the handle is closed.
		conn.Read(func(fd uintptr) bool {
			poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, _ := unix.Poll(poll, 0)
			over = n > 0
			return over
		})
		if over {
			p.err = errors.New("it ended; an agent before had started it, and what it said last is not known")
			close(p.ended)
		}
	}()
}

// kill ends the process at once.
func (p *Process) kill() error {
	if p.handle == nil {
		return nil
	}
	err := unix.PidfdSendSignal(int(p.handle.Fd()), unix.SIGKILL, nil, 0)
	if err == unix.ESRCH {
		return nil
	}
	return os.NewSyscallError("pidfd_send_signal", err)
}

// receive takes the listeners. A worker that ends before has closed its end.
func (p *Process) receive() (files []*os.File, err error) {
	fd := int(p.up.Fd())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(startTime / time.Second)}); err != nil {
		return nil, os.NewSyscallError("setsockopt SO_RCVTIMEO", err)
	}
	oob := make([]byte, unix.CmsgSpace(2*4))
	for {
		n, oobn, _, _, err := unix.Recvmsg(fd, make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, os.NewSyscallError("recvmsg", err)
		}
		if n == 0 {
			<-p.ended
			return nil, fmt.Errorf("it ended before it listened: %w", p.Err())
		}
		oob = oob[:oobn]
		break
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("its listeners did not come: %d messages, %w", len(messages), err)
	}
	got, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, fmt.Errorf("its listeners did not come: %w", err)
	}
	for _, fd := range got {
		files = append(files, os.NewFile(uintptr(fd), "listener"))
	}
	if len(files) != 2 {
		for _, f := range files {
			f.Close()
		}
		return nil, fmt.Errorf("it sent %d listeners; expect 2", len(files))
	}
	return files, nil
}

// Answer answers what the worker asks from now on, once: what it has asked before has waited. nil: there are no keys.
func (p *Process) Answer(answer func(Ask) (*Ends, error)) {
	if answer == nil {
		answer = func(Ask) (*Ends, error) { return nil, errors.New("the function's connections are not sealed") }
	}
	p.answering.Go(func() { p.answer(answer) })
}

// Drain has the worker take no more connections, and waits until it says that it does not. It goes on with those that it has, and
// ends when they have ended, after DrainMost at most. Answer has to be called before.
func (p *Process) Drain() error {
	text, err := json.Marshal(jsonEnds{Drain: true})
	if err == nil {
		err = say(int(p.up.Fd()), text)
	}
	if err == nil {
		t := time.NewTimer(startTime)
		defer t.Stop()
		select {
		case <-p.drained:
		case <-p.ended:
			err = errors.New("it has ended")
		case <-t.C:
			err = os.ErrDeadlineExceeded
		}
	}
	if err != nil {
		return fmt.Errorf("have worker %d take no more connections: %w", p.pid, err)
	}
	return nil
}

// askMax bounds what a worker asks, in bytes.
const askMax = 512

// answer answers what the worker asks, one after the other, until the process ends. Its word is
// not to be trusted: what it hears is about its own connections.
func (p *Process) answer(answer func(Ask) (*Ends, error)) {
	fd := int(p.up.Fd())
	buf := make([]byte, askMax)
	var gate refusalGate
	for {
		n, _, flags, _, err := unix.Recvmsg(fd, buf, nil, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR || err == unix.EAGAIN { // a time-out: it has nothing to ask
			select {
			case <-p.ended:
				return
			default:
			}
			continue
		}
		if err != nil || n == 0 {
			return
		}
		var q jsonAsk
		if flags&unix.MSG_TRUNC != 0 || json.Unmarshal(buf[:n], &q) != nil {
			p.kill() // it cannot be spoken with
			return
		}
		if q.Drained {
			p.saysOnce.Do(func() { close(p.drained) })
			continue
		}
		if q.Refused != nil {
			if p.Refused != nil && gate.take(q.Refused, time.Now()) {
				p.Refused(*q.Refused)
			}
			continue
		}
		a := jsonEnds{Number: q.Number}
		if a.Ends, err = answer(q.Ask); err != nil {
			a.Ends, a.Error = nil, err.Error()
		}
		text, err := json.Marshal(a)
		if err == nil && len(text) > messageMax {
			text, err = json.Marshal(jsonEnds{Number: q.Number, Error: fmt.Sprintf("the files of origins' authorities take %d bytes; at most %d are handed over", len(text), messageMax)})
		}
		if err != nil {
			return
		}
		_, err = unix.Write(fd, text)
		for err == unix.EINTR {
			_, err = unix.Write(fd, text)
		}
		if err != nil {
			if err != unix.EPIPE && err != unix.ECONNRESET { // it does not read, and would wait for answers for ever
				p.kill()
			}
			return
		}
	}
}

// Ended is closed when the process is gone.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// PID is that of the process.
func (p *Process) PID() int { return p.pid }

// Err says why the process is gone; only then.
func (p *Process) Err() error {
	said := strings.TrimSpace(p.stderr.String())
	switch {
	case p.err == nil:
		return errors.New("it ended")
	case said != "":
		return fmt.Errorf("%w: %s", p.err, said)
	}
	return p.err
}

// Statistics are the worker's numbers, also when it is gone.
func (p *Process) Statistics() Statistics {
	if p.memory == nil {
		return Statistics{}
	}
	return ReadStatistics(p.memory, p.Config)
}

// Leave lets go of a process that stays: its connections go on.
func (p *Process) Leave() error { return p.letGo(false) }

// Close ends the process: its connections are reset.
func (p *Process) Close() error { return p.letGo(true) }

// Kill is Close, of a process that may not do what it is told.
func (p *Process) Kill() error { return errors.Join(p.kill(), p.letGo(true)) }

func (p *Process) letGo(end bool) (err error) {
	p.once.Do(func() {
		if p.up == nil {
			if end {
				err = p.kill()
			}
		} else if end && p.stays {
			if text, merr := json.Marshal(jsonEnds{End: true}); merr == nil {
				// One that waits for Release ends as well: it is no message with the program.
				if say(int(p.up.Fd()), text) == unix.EAGAIN { // it does not read
					err = p.kill()
				}
			}
		}
		// Who waits for the worker to ask hears of the end, too.
		if p.up != nil {
			down := unix.Shutdown(int(p.up.Fd()), unix.SHUT_RDWR)
			if down == unix.ENOTCONN || down == unix.EPIPE {
				down = nil
			}
			err = errors.Join(err, os.NewSyscallError("shutdown", down))
			p.answering.Wait()
			err = errors.Join(err, p.up.Close())
		}
		if end || !p.stays {
			select {
			case <-p.ended:
			case <-time.After(startTime):
				err = errors.Join(err, p.kill())
				<-p.ended
			}
		}
		if p.handle != nil {
			err = errors.Join(err, p.handle.Close())
		}
		if p.memory != nil {
			err = errors.Join(err, p.memory.Close())
		}
	})
	return err
}
