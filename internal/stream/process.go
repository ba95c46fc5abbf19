package stream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
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
}

// Text is the configuration as ReadConfig takes it; run and back are entries in JSON.
func Text(name string, port uint16, loops int, run, back []string, h *Hold, l Limits) ([]byte, error) {
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
// a HeldSocket if the configuration has SYNs wait; else nil. The caller closes it.
func Start(ns *host.NetNS, program string, config []byte, held *os.File) (p *Process, listeners []*os.File, err error) {
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
		err = p.up.Close()
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
