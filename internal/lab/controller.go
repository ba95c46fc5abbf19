package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

var (
	errNoController = errors.New("this lab has no controller: its agents follow plan files")
	errControlled   = errors.New("this lab has no plan files: its controller has the plans")
)

// followTime is how long a first file may take until all agents have it in force.
const followTime = 5 * time.Minute

// IsControlled tells whether the lab's agents get their plans from a controller.
func (l *Lab) IsControlled() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state.Controller != nil
}

func (l *Lab) controllerDir() string { return filepath.Join(l.dir, "controller") }

// ControllerAddress is where operators reach the lab's controller.
func (l *Lab) ControllerAddress() string {
	return "unix:" + filepath.Join(l.controllerDir(), "operators")
}

// nodesAddress is where agents do, by TLS on a socket: paths are the same in all network namespaces.
func (l *Lab) nodesAddress() string {
	return "tls+unix:" + filepath.Join(l.controllerDir(), "nodes")
}

func (l *Lab) recordController(p process) error {
	return l.update(func(s *state) { s.Controller = &Program{PID: p.pid, Start: p.start} })
}

// StartController runs the lab's controller on the machine's own network and waits until it
// listens. It outlives ctx and the process. It goes on with what it has on disk.
func (l *Lab) StartController(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("start the lab's controller: %w", err)
		}
	}()
	if err := os.MkdirAll(l.controllerDir(), 0o700); err != nil {
		return err
	}
	here, err := host.Current()
	if err != nil {
		return err
	}
	defer here.Close()
	// Before it is there, so that Down looks for it.
	if err := l.recordController(process{}); err != nil {
		return err
	}
	return l.launchIn(ctx, here, "controller", l.recordController,
		"controller", "--data", l.controllerData(), "--listen", l.ControllerAddress(), "--listen", l.nodesAddress())
}

func (l *Lab) controllerData() string { return filepath.Join(l.controllerDir(), "data") }

// KillController ends the controller at once (SIGKILL), as a crash would.
func (l *Lab) KillController(ctx context.Context) error {
	l.mu.Lock()
	c := l.state.Controller
	l.mu.Unlock()
	if c == nil || c.PID == 0 {
		return nil
	}
	if err := (process{c.PID, c.Start}).kill(ctx, stopGrace); err != nil {
		return fmt.Errorf("kill the lab's controller: %w", err)
	}
	return l.recordController(process{})
}

// stopController ends the controller and forgets it, also one whose number never came to be
// written down: that is known by its data directory.
func (l *Lab) stopController(ctx context.Context) error {
	l.mu.Lock()
	c := l.state.Controller
	l.mu.Unlock()
	if c == nil {
		return nil
	}
	err := process{c.PID, c.Start}.stop(ctx, stopGrace)
	if c.PID == 0 {
		var here *host.NetNS
		if here, err = host.Current(); err == nil {
			err = errors.Join(stopWithArguments(ctx, here.Inode(), "--data", l.controllerData()), here.Close())
		}
	}
	if err != nil {
		return fmt.Errorf("stop the lab's controller: %w", err)
	}
	return l.update(func(s *state) { s.Controller = nil })
}

// Operate runs a command of an operator, as in "get", "nodes", and returns its standard output. An
// error has what it said besides.
func (l *Lab) Operate(ctx context.Context, args ...string) (string, error) {
	if !l.IsControlled() {
		return "", errNoController
	}
	here, err := host.Current()
	if err != nil {
		return "", err
	}
	defer here.Close()
	cmd := host.Command(ctx, here, l.binary(), append(args, "--controller", l.ControllerAddress())...)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("waystamp %s: %w: %s", strings.Join(args, " "), err, lastLines(said.Bytes(), 10))
	}
	return out.String(), nil
}

// tokenFile makes a token for a node that has none in the lab yet.
func (l *Lab) tokenFile(ctx context.Context, node string) (string, error) {
	path := filepath.Join(l.AgentDir(node), "token")
	_, err := os.Stat(path)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	token, err := l.Operate(ctx, "node", "token", node)
	if err != nil {
		return "", err
	}
	return path, replaceFile(path, []byte(token))
}

// control starts a controller, gives it the lab's file, and lets all agents join. It waits until
// everybody holds the first plans.
func (l *Lab) control(ctx context.Context, file string, progress func(node string, ready, of int)) error {
	if err := l.StartController(ctx); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		ctx, cancel := context.WithTimeoutCause(ctx, await.Limit(followTime), fmt.Errorf("the file is not in force after %s", await.Limit(followTime)))
		defer cancel()
		_, err := l.Operate(ctx, "apply", "-f", file, "--wait")
		return err
	})
	g.Go(func() error { return l.startAgents(ctx, progress) })
	return g.Wait()
}
