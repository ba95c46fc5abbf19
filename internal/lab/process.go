package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
)

// process is a process that cannot be taken for another one with the same
// number: its start time is part of it.
type process struct {
	pid   int
	start uint64 // field 22 of /proc/PID/stat
}

// findProcess returns the process that has the number now.
func findProcess(pid int) (process, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, err
	}
	// The second field is a name in brackets that may hold anything.
	_, rest, _ := bytes.Cut(b[bytes.LastIndexByte(b, ')')+1:], []byte(" "))
	fields := bytes.Fields(rest)
	if len(fields) < 20 {
		return process{}, fmt.Errorf("/proc/%d/stat is not understood", pid)
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return process{}, fmt.Errorf("/proc/%d/stat is not understood: %w", pid, err)
	}
	return process{pid: pid, start: start}, nil
}

// open returns a handle on the process; nil if it has ended, be it that nobody
// has asked for its status yet.
func (p process) open() (*os.File, error) {
	fd, err := unix.PidfdOpen(p.pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", p.pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	// The handle keeps the number; what it named before does not matter.
	now, err := findProcess(p.pid)
	if err == nil && now == p && !hasEnded(fd) {
		return f, nil
	}
	f.Close()
	if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	return nil, fmt.Errorf("open process %d: %w", p.pid, err)
}

// stop asks the process to end and waits; after the grace it no longer asks.
// A process that has ended before is no error.
func (p process) stop(ctx context.Context, grace time.Duration) error {
	return p.signal(ctx, grace, unix.SIGTERM, unix.SIGKILL)
}

// kill does not ask.
func (p process) kill(ctx context.Context, grace time.Duration) error {
	return p.signal(ctx, grace, unix.SIGKILL)
}

// signal sends one signal after the other until the process has ended, with a grace after each.
func (p process) signal(ctx context.Context, grace time.Duration, signals ...unix.Signal) error {
	f, err := p.open()
	if err != nil || f == nil {
		return err
	}
	defer f.Close()
	for _, signal := range signals {
		err := unix.PidfdSendSignal(int(f.Fd()), signal, nil, 0)
		if errors.Is(err, unix.ESRCH) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("send %s to process %d: %w", unix.SignalName(signal), p.pid, err)
		}
		waiting, cancel := context.WithTimeout(ctx, await.Limit(grace))
		ended := awaitEnd(waiting, f)
		cancel()
		if ended {
			return nil
		}
		// However little time is left, the process is not left running.
		if ctx.Err() != nil {
			ctx = context.WithoutCancel(ctx)
		}
	}
	return fmt.Errorf("process %d does not end", p.pid)
}

// awaitEnd waits until the process behind a handle has ended; false: ctx has.
func awaitEnd(ctx context.Context, f *os.File) bool {
	stop := context.AfterFunc(ctx, func() { f.SetReadDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() {
			f.SetReadDeadline(time.Time{})
		}
	}()
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	ended := false
	raw.Read(func(fd uintptr) bool {
		ended = hasEnded(int(fd))
		return ended
	})
	return ended
}

// hasEnded tells whether the process behind a pidfd has ended.
func hasEnded(fd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return err == nil && n == 1
}

// processesIn lists the processes whose first thread is in a network namespace.
func processesIn(inode uint64) []int {
	var out []int
	dirs, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, d := range dirs {
		st, err := os.Stat(d)
		if err != nil {
			continue
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Ino == inode {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(d)))); err == nil {
				out = append(out, pid)
			}
		}
	}
	return out
}
