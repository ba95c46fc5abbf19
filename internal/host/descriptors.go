package host

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// The limit of open files (RLIMIT_NOFILE) is one of a table of descriptors, and a thread may have a table of its own.

// OnThread calls f in a goroutine on a thread that no other goroutine gets, and that ends when f has returned. It is never the
// process's first thread, which would not end, and whose descriptors are what /proc/self/fd and pidfd_getfd(2) mean.
func OnThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		other := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(other)
			f()
		}()
		<-other // while this goroutine has the first thread
		runtime.UnlockOSThread()
	}()
}

// OwnDescriptors gives the calling thread a table of descriptors of its own, with copies of those in keep. The others stay open in the
// table that it had. The caller has locked its goroutine to the thread and never unlocks it, so that the thread, and its
// table, end with the goroutine: see OnThread. What the goroutine opens, it alone can use and close. keep must have RuntimeDescriptors.
func OwnDescriptors(keep []int) error {
	if err := unix.Unshare(unix.CLONE_FILES); err != nil {
		return fmt.Errorf("give a thread descriptors of its own: %w", os.NewSyscallError("unshare CLONE_FILES", err))
	}
	next := 0
	for _, fd := range slices.Sorted(slices.Values(keep)) {
		if fd > next {
			if err := unix.CloseRange(uint(next), uint(fd-1), 0); err != nil {
				return os.NewSyscallError("close_range", err)
			}
		}
		next = max(next, fd+1)
	}
	return os.NewSyscallError("close_range", unix.CloseRange(uint(next), math.MaxUint32, 0))
}

// RuntimeDescriptors are those that Go's runtime uses on any thread: its epoll instance, the eventfd that wakes it up, and standard
// input, output and error. Other epoll instances and eventfds that the process has open are among them.
func RuntimeDescriptors() ([]int, error) {
	if err := startPoller(); err != nil {
		return nil, fmt.Errorf("find the runtime's descriptors: %w", err)
	}
	const dir = "/proc/self/fd/"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("find the runtime's descriptors: %w", err)
	}
	fds, epolls := []int{0, 1, 2}, 0
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		switch name, _ := os.Readlink(dir + e.Name()); name { // that of the directory is closed already
		case "anon_inode:[eventpoll]":
			epolls++
			fds = append(fds, fd)
		case "anon_inode:[eventfd]":
			fds = append(fds, fd)
		}
	}
	if epolls == 0 {
		return nil, fmt.Errorf("find the runtime's descriptors: %s has no epoll instance", dir)
	}
	return fds, nil
}

// startPoller has the runtime make its epoll instance, which it does for the first pipe or timer. One that it made later would be
// missing in tables that are there already.
func startPoller() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	return errors.Join(r.Close(), w.Close())
}

// DoOnOwnDescriptors is Do, on a thread that has a table of descriptors of its own, so that the limit of open files counts those that f
// opens by themselves. They are closed soon after f has returned. The table begins with copies of what this process has open. f makes system
// calls directly: files of os and connections of net may be used by other threads.
func (n *NetNS) DoOnOwnDescriptors(f func() error) error {
	if err := startPoller(); err != nil {
		return err
	}
	own, err := n.dup()
	if err != nil {
		return fmt.Errorf("enter %w", err)
	}
	defer own.Close()
	done := make(chan error, 1)
	OnThread(func() {
		result := errGoexit
		defer func() { done <- result }()
		if err := own.setns(int(own.file.Fd())); err != nil {
			result = fmt.Errorf("enter %s: %w", n, permission(err))
			return
		}
		if err := unix.Unshare(unix.CLONE_FILES); err != nil {
			result = fmt.Errorf("give a thread descriptors of its own: %w", os.NewSyscallError("unshare CLONE_FILES", err))
			return
		}
		result = f()
	})
	return <-done
}
