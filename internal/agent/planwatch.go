package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// fileWatch reports possible changes of the plan file, and of pins. For the plan it watches the
// directory, since a new file is best put in place by a rename. Both use one inotify instance; a
// user may have 128.
type fileWatch struct {
	file *os.File
	dir  string
	name string
	plan int // watch descriptor

	mu   sync.Mutex
	pins map[int]string // watch descriptor to the only name that matters there; "": all do
}

func watchPlan(path string) (*fileWatch, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("watch the plan %s: %w", path, err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch the plan %s: %w", path, err)
	}
	w := &fileWatch{file: os.NewFile(uintptr(fd), "inotify"), dir: filepath.Dir(abs), name: filepath.Base(abs), pins: map[int]string{}}
	// Each of these events means a complete file, never half a write. Attributes include the
	// permissions.
	w.plan, err = unix.InotifyAddWatch(fd, w.dir, unix.IN_CLOSE_WRITE|unix.IN_MOVED_TO|unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_ATTRIB)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch the plan's directory %s: %w", w.dir, err), w.close())
	}
	return w, nil
}

func (w *fileWatch) close() error { return w.file.Close() }

// watchPins watches the existing directories of an instance's pins, and reports whether one of
// them is new.
func (w *fileWatch) watchPins(instance string) (fresh bool, err error) {
	// The directory of all instances reports the removal of this one: its own cannot while the
	// agent has it open.
	dirs := map[string]string{filepath.Dir(instance): filepath.Base(instance), instance: ""}
	entries, err := os.ReadDir(instance)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("watch the pins: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			dirs[filepath.Join(instance, e.Name())] = ""
		}
	}
	conn, err := w.file.SyscallConn()
	if err != nil {
		return false, fmt.Errorf("watch the pins: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for dir, name := range dirs {
		var wd int
		var addErr error
		err := conn.Control(func(fd uintptr) {
			wd, addErr = unix.InotifyAddWatch(int(fd), dir, unix.IN_CREATE|unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_MOVED_TO|unix.IN_ONLYDIR)
		})
		if err = errors.Join(err, addErr); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fresh, fmt.Errorf("watch the pins in %s: %w", dir, err)
		}
		if _, known := w.pins[wd]; !known {
			w.pins[wd], fresh = name, true
		}
	}
	return fresh, nil
}

// run calls planChanged and pinsChanged once for all that is to be read, until ctx
// ends.
func (w *fileWatch) run(ctx context.Context, planChanged, pinsChanged func()) error {
	stop := context.AfterFunc(ctx, func() { w.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, 64<<10)
	for {
		n, err := w.file.Read(buf)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("watch the plan's directory %s: %w", w.dir, err)
		}
		plan, pins := w.concerned(buf[:n])
		if plan {
			planChanged()
		}
		if pins {
			pinsChanged()
		}
	}
}

// concerned reports whether inotify's events concern the plan file, or pins.
func (w *fileWatch) concerned(b []byte) (plan, pins bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(b) >= unix.SizeofInotifyEvent {
		// struct inotify_event: wd, mask, cookie, len, each of 32 bits, and name
		wd, mask, length := int(int32(u32(b))), u32(b[4:]), int(u32(b[12:]))
		b = b[unix.SizeofInotifyEvent:]
		if mask&unix.IN_Q_OVERFLOW != 0 || length > len(b) {
			return true, true
		}
		gone := mask&unix.IN_IGNORED != 0
		name := unix.ByteSliceToString(b[:length])
		b = b[length:]
		if wd == w.plan {
			// Of the directory itself there is no name.
			plan = plan || gone || name == w.name || name == ""
			continue
		}
		only := w.pins[wd]
		pins = pins || gone || only == "" || name == only
		if gone {
			delete(w.pins, wd)
		}
	}
	return plan, pins
}
