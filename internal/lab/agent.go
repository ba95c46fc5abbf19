package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

const (
	stopGrace  = 10 * time.Second // for an agent to end after SIGTERM
	readyTime  = time.Minute      // for an agent to arm its data path
	detachTime = 30 * time.Second
)

// StartAgent runs a node's agent in its namespace and waits until it says that
// its data path is armed: a line {"ready":true} on its standard output. The
// agent outlives ctx and the process. If it ends before it is ready, the error
// has what it wrote to standard error.
func (l *Lab) StartAgent(ctx context.Context, node string) (err error) {
	m, err := l.Member(node)
	if err != nil {
		return err
	}
	if m.Role != RoleNode {
		return fmt.Errorf("start the agent of %s: it is a %s, not a node", node, m.Role)
	}
	if m.Agent.Running() {
		return fmt.Errorf("the agent of %s runs already, as process %d", node, m.Agent.PID)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("start the agent of %s: %w", node, err)
		}
	}()
	ns, err := m.open()
	if err != nil {
		return err
	}
	defer ns.Close()
	a := Agent{Instance: l.Instance(node), Plan: l.NodePlanPath(node), RunDir: l.AgentDir(node)}
	if err := os.MkdirAll(a.RunDir, 0o700); err != nil {
		return err
	}
	// Before it is there, so that Down looks for what it may have attached.
	if err := l.updateAgent(node, a); err != nil {
		return err
	}
	// Files, not pipes: the agent must be able to write when nobody is left to
	// read.
	out, err := os.Create(filepath.Join(l.dir, "logs", node+".out"))
	if err != nil {
		return err
	}
	defer out.Close()
	log, err := os.Create(filepath.Join(l.dir, "logs", node+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	ready, err := watchFile(out.Name())
	if err != nil {
		return err
	}
	defer ready.close()

	cmd := host.Command(context.WithoutCancel(ctx), ns, l.binary(),
		"agent", "--plan", a.Plan, "--instance", a.Instance, "--run-dir", a.RunDir, "--state-dir", a.RunDir)
	cmd.Stdout, cmd.Stderr = out, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C here is not meant for it
	if err := cmd.Start(); err != nil {
		return err
	}
	// Not reaped before Wait below, so the number is still its own.
	p, err := findProcess(cmd.Process.Pid)
	if err == nil {
		a.PID, a.Start = p.pid, p.start
		err = l.updateAgent(node, a)
	}
	if err != nil {
		return errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	waiting, cancel := context.WithTimeoutCause(ctx, readyTime, fmt.Errorf("it is not ready after %s", readyTime))
	defer cancel()
	// Told from other causes, such as another agent that has ended.
	ended := errors.New("the agent has ended")
	waiting, end := context.WithCancelCause(waiting)
	status := make(chan error, 1)
	go func() { // ends with the agent
		status <- cmd.Wait()
		end(ended)
	}()
	for !isReady(out.Name()) {
		err := ready.wait(waiting)
		switch {
		case err == nil:
		case err == ended: //nolint:errorlint // this one and no other
			said, _ := os.ReadFile(log.Name())
			return errors.Join(endedEarly(<-status, lastLines(said, 10)), l.forgetPID(node, a))
		default:
			return errors.Join(err, l.StopAgent(context.WithoutCancel(ctx), node))
		}
	}
	return nil
}

// endedEarly says that an agent ended before it was ready.
func endedEarly(status error, said string) error {
	if status == nil {
		status = errors.New("exit status 0")
	}
	if said == "" {
		said = "it said nothing"
	}
	return fmt.Errorf("it ended before it was ready (%w): %s", status, said)
}

func lastLines(b []byte, n int) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// isReady looks for the line that an agent writes when it is.
func isReady(path string) bool {
	b, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	for line := range bytes.Lines(b) {
		var said struct {
			Ready bool `json:"ready"`
		}
		if json.Unmarshal(line, &said) == nil && said.Ready {
			return true
		}
	}
	return false
}

// StopAgent ends a node's agent; its data path and guard stay. An agent that
// does not run is no error.
func (l *Lab) StopAgent(ctx context.Context, node string) error {
	m, err := l.Member(node)
	if err != nil {
		return err
	}
	if m.Agent == nil {
		return nil
	}
	if m.Agent.PID == 0 {
		return m.stopUnrecorded(ctx)
	}
	if err := (process{m.Agent.PID, m.Agent.Start}).stop(ctx, stopGrace); err != nil {
		return fmt.Errorf("stop the agent of %s: %w", node, err)
	}
	return l.forgetPID(node, *m.Agent)
}

// stopUnrecorded stops an agent whose number never came to be written down,
// since whoever started it was killed in between. It is known by the namespace
// that it runs in and the instance that it was given.
func (m Member) stopUnrecorded(ctx context.Context) error {
	for _, pid := range processesIn(m.Inode) {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || !strings.Contains(string(line), "\x00--instance\x00"+m.Agent.Instance+"\x00") {
			continue
		}
		p, err := findProcess(pid)
		if err != nil {
			continue // it has ended
		}
		if err := p.stop(ctx, stopGrace); err != nil {
			return fmt.Errorf("stop the agent of %s: %w", m.Name, err)
		}
	}
	return nil
}

func (l *Lab) forgetPID(node string, a Agent) error {
	a.PID, a.Start = 0, 0
	return l.updateAgent(node, a)
}

// Detach removes the data path of a node whose agent does not run, and with it
// the guard. A node that never had an agent has nothing to detach.
func (l *Lab) Detach(ctx context.Context, node string) (err error) {
	m, err := l.Member(node)
	if err != nil || m.Agent == nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("detach %s: %w", node, err)
		}
	}()
	ns, err := m.open()
	if errors.Is(err, fs.ErrNotExist) {
		// What is pinned is still to be removed. In a namespace of its own, so
		// that the routes and devices of the machine's cannot be meant.
		ns, err = host.Anonymous()
	}
	if err != nil {
		return err
	}
	defer ns.Close()
	ctx, cancel := context.WithTimeout(ctx, detachTime)
	defer cancel()
	cmd := host.Command(ctx, ns, l.binary(),
		"agent", "--detach", "--yes", "--instance", m.Agent.Instance, "--run-dir", m.Agent.RunDir, "--state-dir", m.Agent.RunDir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, lastLines(said, 10))
	}
	return l.forgetAgent(node)
}

// fileWatch tells when a file was written to.
type fileWatch struct{ f *os.File }

func watchFile(path string) (*fileWatch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), "inotify") // non-blocking, hence with deadlines
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY); err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: %w", path, err), f.Close())
	}
	return &fileWatch{f: f}, nil
}

func (w *fileWatch) close() { w.f.Close() }

// wait returns nil when the file was written to since the last call, and the
// cause of ctx's end when that came first.
func (w *fileWatch) wait(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { w.f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err := w.f.Read(make([]byte, 4096))
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// Running tells whether the agent's process is there.
func (a *Agent) Running() bool {
	if a == nil || a.PID == 0 {
		return false
	}
	f, err := (process{a.PID, a.Start}).open()
	if err != nil || f == nil {
		return false
	}
	f.Close()
	return true
}
