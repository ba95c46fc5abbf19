package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// planWatch tells when a file may have changed. It watches the directory, since
// a new file is best put in place by a rename.
type planWatch struct {
	file *os.File
	dir  string
	name string
}

func watchPlan(path string) (*planWatch, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("watch the plan %s: %w", path, err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch the plan %s: %w", path, err)
	}
	w := &planWatch{file: os.NewFile(uintptr(fd), "inotify"), dir: filepath.Dir(abs), name: filepath.Base(abs)}
	// Each of these events stands for a whole file, never for half a write.
	_, err = unix.InotifyAddWatch(fd, w.dir, unix.IN_CLOSE_WRITE|unix.IN_MOVED_TO|unix.IN_DELETE|unix.IN_MOVED_FROM)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch the plan's directory %s: %w", w.dir, err), w.close())
	}
	return w, nil
}

func (w *planWatch) close() error { return w.file.Close() }

// run calls changed once for all that is to be read, until ctx ends.
func (w *planWatch) run(ctx context.Context, changed func()) error {
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
		if w.concerned(buf[:n]) {
			changed()
		}
	}
}

// concerned looks for the file's name among inotify's events.
func (w *planWatch) concerned(b []byte) bool {
	for len(b) >= unix.SizeofInotifyEvent {
		// struct inotify_event: wd, mask, cookie, len, each of 32 bits, and name
		mask, length := u32(b[4:]), int(u32(b[12:]))
		b = b[unix.SizeofInotifyEvent:]
		if mask&(unix.IN_Q_OVERFLOW|unix.IN_IGNORED) != 0 {
			return true
		}
		if length > len(b) {
			return true
		}
		if unix.ByteSliceToString(b[:length]) == w.name {
			return true
		}
		b = b[length:]
	}
	return false
}
