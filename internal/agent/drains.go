package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/stream"
)

// Workers outlive their agents, and those that take no more connections outlive their functions' configurations. An agent
// writes down which processes it has started, so that the next one can end those that do not speak with it, or
// do not end when their time is over.

// workerRecord is a worker's process. Its start tells it from a later one with its number.
type workerRecord struct {
	Function string `json:"function"`
	Link     string `json:"link"` // the node's interface that it is behind
	PID      int    `json:"pid"`
	Start    uint64 `json:"start"`           // of the process, in clock ticks since the machine started
	Until    uint64 `json:"until,omitempty"` // it drains, and is ended then: seconds since the machine started, CLOCK_BOOTTIME; 0: it takes connections
}

// open opens the process (pidfd). The error is fs.ErrNotExist if it is gone.
func (r workerRecord) open() (*os.File, error) {
	fd, err := unix.PidfdOpen(r.PID, unix.O_NONBLOCK)
	if err == unix.ESRCH {
		return nil, fs.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d, a worker: %w", r.PID, err)
	}
	f := os.NewFile(uintptr(fd), "process")
	// The number is that of the process that is open as long as that one is not gone.
	start, err := processStart(r.PID)
	if err == nil && start != r.Start {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// processStart is when a process has started, in clock ticks since the machine started.
func processStart(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			err = fs.ErrNotExist
		}
		return 0, err
	}
	// Behind the name, which may have any characters: the state is field 3, the start field 22 (proc_pid_stat(5)).
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields behind the name; expect 20 or more", pid, len(fields))
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// sinceBoot is CLOCK_BOOTTIME in seconds.
func sinceBoot() uint64 {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) != nil {
		return 0
	}
	return uint64(t.Sec)
}

// workersFile is what an agent has written down about its workers.
type workersFile struct {
	Version int            `json:"version"`
	Boot    string         `json:"boot"` // id of the machine's start that the rest counts from
	Workers []workerRecord `json:"workers"`
}

// Of workers that drain.
const (
	drainsMost  = 4                // of a function; the oldest ends for one more
	drainsGrace = 30 * time.Second // beyond the time when they end by themselves
)

// workerRecords are an instance's workers, on disk and those that drain also in memory.
type workerRecords struct {
	path string
	log  *slog.Logger

	mu     sync.Mutex
	read   bool
	boot   string
	now    []workerRecord
	drains []*drain
}

// drain is a worker that takes no more connections.
type drain struct {
	workerRecord
	process *stream.Process
	counts  bool // its statistics are those of this program
	timer   *time.Timer
	left    chan struct{} // closed: nobody follows it any more
}

func newWorkerRecords(runDir string, log *slog.Logger) *workerRecords {
	return &workerRecords{path: filepath.Join(runDir, "workers.json"), log: log}
}

// readLocked reads what the agent before has written down, and follows the workers that drain.
func (r *workerRecords) readLocked() error {
	if r.read {
		return nil
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("read the id of the machine's start: %w", err)
	}
	r.boot, r.read = strings.TrimSpace(string(boot)), true
	b, err := os.ReadFile(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var f workersFile
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err != nil || f.Version != 1 {
		r.log.Warn("the record of workers cannot be read; those of an agent before that do not answer, or drain, end with their interfaces alone", "file", r.path, "version", f.Version, "err", err)
		return nil
	}
	if f.Boot != r.boot {
		return nil // all are gone
	}
	for _, w := range f.Workers {
		handle, err := w.open()
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				r.log.Warn("a worker of an agent before cannot be looked at", "function", w.Function, "err", err)
			}
			continue
		}
		r.now = append(r.now, w)
		if w.Until == 0 {
			if err := handle.Close(); err != nil {
				return err
			}
			continue
		}
		r.followLocked(&drain{workerRecord: w, process: stream.Follow(w.Function, w.PID, handle)})
	}
	return nil
}

// writeLocked writes the records down.
func (r *workerRecords) writeLocked() error {
	if len(r.now) == 0 {
		if err := os.Remove(r.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the record of workers: %w", err)
		}
		return nil
	}
	b, err := json.MarshalIndent(workersFile{1, r.boot, r.now}, "", "\t")
	if err == nil {
		err = os.WriteFile(r.path+".new", append(b, '\n'), 0o600)
	}
	if err == nil {
		err = os.Rename(r.path+".new", r.path)
	}
	if err != nil {
		return fmt.Errorf("write down which workers there are: %w", err)
	}
	return nil
}

// started writes down a worker that is to take connections.
func (r *workerRecords) started(function, link string, pid int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.readLocked(); err != nil {
		return err
	}
	start, err := processStart(pid)
	if err != nil {
		return fmt.Errorf("look at process %d, a worker: %w", pid, err)
	}
	r.forgetLocked(pid)
	r.now = append(r.now, workerRecord{Function: function, Link: link, PID: pid, Start: start})
	return r.writeLocked()
}

// ended forgets a process.
func (r *workerRecords) ended(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.forgetLocked(pid) {
		if err := r.writeLocked(); err != nil {
			r.log.Warn("a worker that has ended stays in the record", "err", err) // and is not found there
		}
	}
}

func (r *workerRecords) forgetLocked(pid int) bool {
	n := len(r.now)
	r.now = slices.DeleteFunc(r.now, func(w workerRecord) bool { return w.PID == pid })
	return len(r.now) < n
}

// willDrain writes down that a worker is told to take no more connections, before it is.
func (r *workerRecords) willDrain(function, link string, pid int) (workerRecord, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.readLocked(); err != nil {
		return workerRecord{}, err
	}
	start, err := processStart(pid)
	if err != nil {
		return workerRecord{}, fmt.Errorf("look at process %d, a worker: %w", pid, err)
	}
	r.forgetLocked(pid)
	w := workerRecord{function, link, pid, start, sinceBoot() + uint64((stream.DrainMost+drainsGrace)/time.Second)}
	r.now = append(r.now, w)
	return w, r.writeLocked()
}

// follow keeps a worker that drains, until it ends or its time is over. The oldest ones of the function end if there are too many.
func (r *workerRecords) follow(d *drain) {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := 1
	for i := len(r.drains) - 1; i >= 0; i-- {
		if old := r.drains[i]; old.Link == d.Link {
			if of++; of > drainsMost {
				r.log.Warn("too many workers of a function take no more connections; the oldest ends, and its connections are reset", "function", old.Function, "process", old.PID)
				r.killLocked(old)
			}
		}
	}
	r.followLocked(d)
}

func (r *workerRecords) followLocked(d *drain) {
	r.drains, d.left = append(r.drains, d), make(chan struct{})
	left := time.Duration(0)
	if now := sinceBoot(); d.Until > now {
		left = min(time.Duration(d.Until-now)*time.Second, stream.DrainMost+drainsGrace)
	}
	d.timer = time.AfterFunc(left, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if slices.Contains(r.drains, d) {
			r.log.Warn("a worker that takes no more connections has not ended in time; it is ended, and its connections are reset", "function", d.Function, "process", d.PID)
			r.killLocked(d)
		}
	})
	go func() {
		select {
		case <-d.process.Ended():
		case <-d.left:
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if slices.Contains(r.drains, d) {
			r.log.Info("a worker that took no more connections has ended", "function", d.Function, "process", d.PID)
			r.killLocked(d) // there is nothing to end
		}
	}()
}

// killLocked ends a worker that drains, and forgets it.
func (r *workerRecords) killLocked(d *drain) {
	r.drains = slices.DeleteFunc(r.drains, func(o *drain) bool { return o == d })
	d.timer.Stop()
	if err := d.process.Kill(); err != nil {
		r.log.Error("a worker could not be ended", "function", d.Function, "process", d.PID, "err", err)
	}
	r.forgetLocked(d.PID)
	if err := r.writeLocked(); err != nil {
		r.log.Warn("a worker that has ended stays in the record", "err", err)
	}
}

// endAll ends the workers behind interfaces that are gone, or are to be: those that drain, and those that have been started and have
// not ended. node is a namespace that is not looked into.
func (r *workerRecords) endAll(gone func(link string) bool, node *host.NetNS) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.readLocked(); err != nil {
		return err
	}
	for _, d := range slices.Clone(r.drains) {
		if gone(d.Link) {
			r.killLocked(d)
		}
	}
	var errs []error
	for _, w := range slices.Clone(r.now) {
		if w.Until != 0 || !gone(w.Link) {
			continue
		}
		handle, err := w.open()
		if err == nil {
			err = errors.Join(endWorker(w.PID, handle, node), handle.Close())
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
			continue
		}
		r.forgetLocked(w.PID)
	}
	return errors.Join(append(errs, r.writeLocked())...)
}

// leave lets go of all workers that drain; the next agent follows them.
func (r *workerRecords) leave() (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range r.drains {
		d.timer.Stop()
		close(d.left)
		err = errors.Join(err, d.process.Leave())
	}
	r.drains = nil
	return err
}

// of are a function's workers that drain, the oldest first.
func (r *workerRecords) of(function string) (out []*drain) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range r.drains {
		if d.Function == function {
			out = append(out, d)
		}
	}
	return out
}

// endWorker ends a worker's process, and gives back the interfaces that it kept namespaces of: these end some time after
// their last process. node is a namespace that is not looked into.
func endWorker(pid int, handle *os.File, node *host.NetNS) error {
	places, err := namespacesOf(pid, node)
	err = errors.Join(err, stream.EndProcess(handle))
	for _, ns := range places {
		for _, link := range []string{plainTo, plainFrom} {
			err = errors.Join(err, takenOver{ns: ns, link: link}.release())
		}
		err = errors.Join(err, ns.Close())
	}
	return err
}

// namespacesOf are the network namespaces that a process is in or holds, without one.
func namespacesOf(pid int, without *host.NetNS) (out []*host.NetNS, err error) {
	names, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return nil, err
	}
	for _, name := range append(names, fmt.Sprintf("/proc/%d/ns/net", pid)) {
		if to, err := os.Readlink(name); err != nil || !strings.HasPrefix(to, "net:[") {
			continue
		}
		f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0) // it may be a pipe by now
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has just ended
		}
		if err != nil {
			return out, err
		}
		ns, err := host.FromFile(f)
		if err != nil {
			return out, err
		}
		if ns.Inode() == without.Inode() || slices.ContainsFunc(out, func(o *host.NetNS) bool { return o.Inode() == ns.Inode() }) {
			if err := ns.Close(); err != nil {
				return out, err
			}
			continue
		}
		out = append(out, ns)
	}
	return out, nil
}
