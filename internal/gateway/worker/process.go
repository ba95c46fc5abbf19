package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/host"
)

// Options are what Start needs. The caller closes the files.
type Options struct {
	NS        *host.NetNS // where the process runs; nil: where this one does
	Program   string      // that has the command "worker gateway"
	Folder    string      // that names of files count from
	Audit     *os.File    // of gateway.OpenAuditFile
	Listeners []*os.File  // one of each version of IP
	// Allow answers what the worker asks before it opens a connection, one after the other. The worker's word is not to be
	// trusted. The error goes to the worker.
	Allow func(Ask) error
	Log   *slog.Logger
}

// Process is a gateway in a process of its own, which ends with this one.
type Process struct {
	options Options
	cmd     *exec.Cmd
	conn    net.Conn // the worker ends when it is closed
	stderr  host.Tail
	ended   chan struct{}
	err     error
	once    sync.Once
	stop    chan struct{}
	wait    sync.WaitGroup

	writing sync.Mutex

	mu      sync.Mutex
	now     Configuration
	stamp   string // of the files that the worker has
	number  uint64
	pending map[uint64]chan error // of configurations that are sent
	numbers Statistics
}

const (
	// startTime bounds how long a worker takes to begin: it reads the whole audit log.
	startTime = time.Minute
	// endTime bounds how long it takes to end, or to read what it is sent.
	endTime = 5 * time.Second
	// lookTime is how often files are looked at.
	lookTime = 250 * time.Millisecond
)

// Start runs `program worker gateway`, hands it the files, and waits until it serves. From then on files
// that change are handed over again.
func Start(o Options, c Configuration) (_ *Process, err error) {
	p := &Process{options: o, now: c, ended: make(chan struct{}), stop: make(chan struct{}), pending: map[uint64]chan error{}}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, its := os.NewFile(uintptr(fds[0]), "worker"), os.NewFile(uintptr(fds[1]), "parent")
	p.conn, err = net.FileConn(ours)
	if err = errors.Join(err, ours.Close()); err != nil {
		return nil, errors.Join(err, its.Close())
	}
	args := []string{"worker", "gateway", "--parent-fd", "3", "--audit-fd", "4"}
	for i := range o.Listeners {
		args = append(args, "--listener-fd", fmt.Sprint(5+i))
	}
	p.cmd = exec.CommandContext(context.Background(), o.Program, args...)
	p.cmd.Stderr, p.cmd.ExtraFiles = &p.stderr, append([]*os.File{its, o.Audit}, o.Listeners...)
	start := p.cmd.Start
	if o.NS != nil {
		start = func() error { return o.NS.Do(p.cmd.Start) }
	}
	if err := errors.Join(start(), its.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("start the gateway's worker: %w", err), p.conn.Close())
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	p.wait.Go(p.follow)
	if err := p.Configure(c, startTime); err != nil {
		return nil, errors.Join(fmt.Errorf("the gateway's worker: %w", err), p.Close())
	}
	p.wait.Go(p.watch)
	return p, nil
}

func (p *Process) send(m toWorker) error {
	p.writing.Lock()
	defer p.writing.Unlock()
	// A worker that reads nothing does not stop this process.
	if err := p.conn.SetWriteDeadline(time.Now().Add(endTime)); err != nil {
		return err
	}
	err := send(p.conn, m, toWorkerMax)
	if err != nil {
		p.conn.Close() // half a message could be there
	}
	return err
}

// Configure hands over a configuration with the files as they are, and waits until the worker has taken it. On an error the worker
// goes on with the one before.
func (p *Process) Configure(c Configuration, most time.Duration) error {
	// Before the files are read: what changes meanwhile is seen.
	stamp := gateway.Stamp(p.options.Folder, c.Clients, c.Services)
	m := &configuration{Configuration: c, Files: gateway.TakeSnapshot(p.options.Folder, c.Clients, c.Services), Audit: p.options.Audit.Name()}
	done := make(chan error, 1)
	p.mu.Lock()
	p.number++
	m.Number = p.number
	p.now, p.stamp = c, stamp
	p.pending[m.Number] = done
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.pending, m.Number)
		p.mu.Unlock()
	}()
	if err := p.send(toWorker{Configuration: m}); err != nil {
		select {
		case <-p.ended:
			return p.Err()
		case <-time.After(endTime):
		}
		return fmt.Errorf("hand over the configuration: %w", err)
	}
	select {
	case err := <-done:
		return err
	case <-p.ended:
		select { // its last word
		case err := <-done:
			return err
		default:
		}
		return p.Err()
	case <-time.After(most):
		return fmt.Errorf("the worker has not taken its configuration in %s", most)
	}
}

// follow answers the worker.
func (p *Process) follow() {
	for {
		var m toParent
		if err := receive(p.conn, &m, toParentMax); err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				p.options.Log.Error("what the gateway's worker says cannot be read; it ends", "err", err)
			}
			p.conn.Close()
			return
		}
		if m.Taken != nil {
			p.mu.Lock()
			to := p.pending[m.Taken.Number]
			delete(p.pending, m.Taken.Number)
			p.mu.Unlock()
			if to != nil {
				var err error
				if m.Taken.Error != "" {
					err = errors.New(m.Taken.Error)
				}
				to <- err
			}
		}
		if m.Statistics != nil {
			p.mu.Lock()
			p.numbers = *m.Statistics
			p.mu.Unlock()
		}
		if m.Ask != nil {
			a := &answer{Number: m.Ask.Number}
			if err := p.options.Allow(m.Ask.Ask); err != nil {
				a.Error = err.Error()
			}
			if p.send(toWorker{Answer: a}) != nil {
				return
			}
		}
	}
}

// watch hands files over that have changed.
func (p *Process) watch() {
	t := time.NewTicker(lookTime)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-p.stop:
			return
		case <-p.ended:
			return
		}
		p.mu.Lock()
		c, stamp := p.now, p.stamp
		p.mu.Unlock()
		if gateway.Stamp(p.options.Folder, c.Clients, c.Services) == stamp {
			continue
		}
		switch err := p.Configure(c, startTime); {
		case err == nil:
			p.options.Log.Info("the gateway has taken files in that have changed")
		default:
			p.options.Log.Error("files of the gateway have changed and cannot be taken in; it goes on with those before", "err", err)
		}
	}
}

// Statistics are the worker's numbers, of a second ago at most.
func (p *Process) Statistics() Statistics {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.numbers
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

// Close ends the process: its connections are reset.
func (p *Process) Close() (err error) {
	p.once.Do(func() {
		close(p.stop)
		err = p.conn.Close()
		if errors.Is(err, net.ErrClosed) {
			err = nil
		}
		select {
		case <-p.ended:
		case <-time.After(endTime):
			p.cmd.Process.Kill()
			<-p.ended
		}
		p.wait.Wait()
	})
	return err
}
