package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

const detachTime = 2 * time.Minute

// StartAgent runs a node's agent in its namespace and waits until it says that
// its data path is armed. The agent outlives ctx and the process. If it ends
// before it is ready, the error has what it wrote to standard error.
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
	a := Agent{Instance: l.Instance(node), Plan: l.NodePlanPath(node), RunDir: l.AgentDir(node)}
	if err := os.MkdirAll(a.RunDir, 0o700); err != nil {
		return err
	}
	// Before it is there, so that Down looks for what it may have attached.
	if err := l.updateAgent(node, a); err != nil {
		return err
	}
	args := []string{"agent", "--instance", a.Instance, "--run-dir", a.RunDir, "--state-dir", a.RunDir}
	if l.IsControlled() {
		token, err := l.tokenFile(ctx, node)
		if err != nil {
			return err
		}
		args = append(args, "--controller", l.nodesAddress(), "--node", node, "--join", "@"+token)
	} else {
		args = append(args, "--plan", a.Plan)
	}
	if files := l.files(); files != "" {
		args = append(args, "--gateway-files", files)
	}
	return l.launch(ctx, m, func(p process) error {
		a.PID, a.Start = p.pid, p.start
		return l.updateAgent(node, a)
	}, args...)
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
	if err := stopWithArguments(ctx, m.Inode, "--instance", m.Agent.Instance); err != nil {
		return fmt.Errorf("stop the agent of %s: %w", m.Name, err)
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
	ctx, cancel := context.WithTimeout(ctx, await.Limit(detachTime))
	defer cancel()
	cmd := host.Command(ctx, ns, l.binary(),
		"agent", "--detach", "--yes", "--instance", m.Agent.Instance, "--run-dir", m.Agent.RunDir, "--state-dir", m.Agent.RunDir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, lastLines(said, 10))
	}
	return l.forgetAgent(node)
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
