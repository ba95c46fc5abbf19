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
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// Process is a worker in a process of its own, which ends with this one.
type Process struct {
	Config *Config

	cmd    *host.Cmd
	memory *host.SharedWords
	up     *os.File // the worker ends when it is closed
	stderr host.Tail
	ended  chan struct{}
	err    error
	once   sync.Once

	answering sync.WaitGroup
}

// Text is the configuration as ReadConfig takes it; run and back are entries in JSON.
func Text(name string, port uint16, loops int, run, back []string, h *Hold, sealed bool, l Limits) ([]byte, error) {
	list := func(entries []string) []json.RawMessage {
		var out []json.RawMessage
		for _, e := range entries {
			out = append(out, json.RawMessage(e))
		}
		return out
	}
	m := map[string]any{
		"name": name, "port": port, "loops": loops, "run": list(run),
		"limits": map[string]any{"connections": l.Connections, "buffer": l.Buffer, "idle": l.Idle.String(), "half-closed": l.HalfClosed.String()},
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
	p = &Process{ended: make(chan struct{})}
	if p.Config, err = ReadConfig(bytes.NewReader(config)); err != nil {
		return nil, nil, err
	}
	if p.memory, err = NewStatistics(); err != nil {
		return nil, nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, errors.Join(os.NewSyscallError("socketpair", err), p.memory.Close())
	}
	p.up = os.NewFile(uintptr(fds[0]), "worker")
	child := os.NewFile(uintptr(fds[1]), "parent")
	p.cmd = host.Command(context.Background(), ns, program, "worker", "--statistics-fd", "3", "--parent-fd", "4")
	if held != nil {
		p.cmd.Args = append(p.cmd.Args, "--held-fd", "5")
	}
	p.cmd.Stdin, p.cmd.Stderr, p.cmd.ExtraFiles = bytes.NewReader(config), &p.stderr, []*os.File{p.memory.File(), child}
	if held != nil {
		p.cmd.ExtraFiles = append(p.cmd.ExtraFiles, held)
	}
	for _, f := range through {
		p.cmd.Args = append(p.cmd.Args, "--through-fd", strconv.Itoa(3+len(p.cmd.ExtraFiles)))
		p.cmd.ExtraFiles = append(p.cmd.ExtraFiles, f)
	}
	if err := errors.Join(p.cmd.Start(), child.Close()); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("start the worker of function %s: %w", p.Config.Name, err), p.up.Close(), p.memory.Close())
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	listeners, err = p.receive()
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("worker of function %s: %w", p.Config.Name, err), p.Close())
	}
	if answer != nil {
		p.answering.Go(func() { p.answer(answer) })
	}
	return p, listeners, nil
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

// askMax bounds what a worker asks, in bytes.
const askMax = 512

// answer answers what the worker asks, one after the other, until the process ends. Its word is
// not to be trusted: what it hears is about its own connections.
func (p *Process) answer(answer func(Ask) (*Ends, error)) {
	fd := int(p.up.Fd())
	buf := make([]byte, askMax)
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
			p.cmd.Process.Kill() // it cannot be spoken with
			return
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
		if _, err := unix.Write(fd, text); err != nil {
			return
		}
	}
}

// Ended is closed when the process is gone.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// PID is that of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

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
func (p *Process) Statistics() Statistics { return ReadStatistics(p.memory, p.Config) }

// Close ends the process: its connections are reset.
func (p *Process) Close() (err error) {
	p.once.Do(func() {
		// Who waits for the worker to ask hears of the end, too.
		err = os.NewSyscallError("shutdown", unix.Shutdown(int(p.up.Fd()), unix.SHUT_RDWR))
		if errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.EPIPE) {
			err = nil
		}
		p.answering.Wait()
		err = errors.Join(err, p.up.Close())
		select {
		case <-p.ended:
		case <-time.After(startTime):
			p.cmd.Process.Kill()
			<-p.ended
		}
		err = errors.Join(err, p.memory.Close())
	})
	return err
}
