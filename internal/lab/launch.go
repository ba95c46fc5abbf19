package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

const (
	stopGrace = 10 * time.Second // for a process to end after SIGTERM
	readyTime = 5 * time.Minute  // for one to get ready; one that ends is noticed at once
)

// launch runs the lab's own program in a member's namespace, with these
// arguments, and waits until it says that it is ready: a line {"ready":true} on
// its standard output. It outlives ctx and the process. record is called with
// what runs, and with the zero process when that has ended. If it ends before it
// is ready, the error has what it wrote to standard error.
func (l *Lab) launch(ctx context.Context, m Member, record func(process) error, args ...string) error {
	ns, err := m.open()
	if err != nil {
		return err
	}
	defer ns.Close()
	return l.launchIn(ctx, ns, m.Name, record, args...)
}

// launchIn is launch in any namespace. What the program writes is in the logs under name.
func (l *Lab) launchIn(ctx context.Context, ns *host.NetNS, name string, record func(process) error, args ...string) error {
	// Files, not pipes: it must be able to write when nobody is left to read.
	out, err := os.Create(filepath.Join(l.dir, "logs", name+".out"))
	if err != nil {
		return err
	}
	defer out.Close()
	log, err := os.Create(filepath.Join(l.dir, "logs", name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	ready, err := watchFile(out.Name())
	if err != nil {
		return err
	}
	defer ready.close()

	cmd := host.Command(context.WithoutCancel(ctx), ns, l.binary(), args...)
	cmd.Stdout, cmd.Stderr = out, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C here is not meant for it
	if err := cmd.Start(); err != nil {
		return err
	}
	// Not reaped before Wait below, so the number is still its own.
	p, err := findProcess(cmd.Process.Pid)
	if err == nil {
		err = record(p)
	}
	if err != nil {
		return errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	waiting, cancel := context.WithTimeoutCause(ctx, await.Limit(readyTime), fmt.Errorf("it is not ready after %s", await.Limit(readyTime)))
	defer cancel()
	// Told from other causes, such as another process that has ended.
	ended := errors.New("the process has ended")
	waiting, end := context.WithCancelCause(waiting)
	status := make(chan error, 1)
	go func() { // ends with the process
		status <- cmd.Wait()
		end(ended)
	}()
	for !isReady(out.Name()) {
		err := ready.wait(waiting)
		switch {
		case err == nil:
		case err == ended: //nolint:errorlint // this one and no other
			said, _ := os.ReadFile(log.Name())
			return errors.Join(endedEarly(<-status, lastLines(said, 10)), record(process{}))
		default:
			stopErr := p.stop(context.WithoutCancel(ctx), stopGrace)
			if stopErr == nil {
				stopErr = record(process{})
			}
			return errors.Join(err, stopErr)
		}
	}
	return nil
}

// stopWithArguments stops the processes of a namespace that have these two
// arguments, one after the other.
func stopWithArguments(ctx context.Context, inode uint64, name, value string) error {
	for _, pid := range processesIn(inode) {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || !strings.Contains(string(line), "\x00"+name+"\x00"+value+"\x00") {
			continue
		}
		p, err := findProcess(pid)
		if err != nil {
			continue // it has ended
		}
		if err := p.stop(ctx, stopGrace); err != nil {
			return err
		}
	}
	return nil
}

// endedEarly says that a process ended before it was ready.
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

// isReady looks for the line that a process writes when it is.
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
