package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// faults begin what a kernel logs of a fault of its own: those are no test's, and no
// test that passed beside one has.
var faults = []string{"WARNING: ", "BUG: ", "KASAN: ", "Oops: ", "general protection fault", "Kernel panic", "int3: ", "INFO: task ", "UBSAN: ", "refcount_t: "}

// linesOfFault is how many lines of the log after a fault are told with it.
const linesOfFault = 12

// faultWatch reads the kernel's log from the beginning to the end of a guest. Records that a busy
// machine overwrites were read before.
type faultWatch struct {
	stop  chan struct{}
	ended chan error

	mu    sync.Mutex
	step  string
	fault []string // the first one, with the lines after it
}

// watchFaults begins to read; finish ends it.
func watchFaults() (*faultWatch, error) {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read the kernel's log: %w", err)
	}
	w := &faultWatch{stop: make(chan struct{}), ended: make(chan error, 1)}
	go func() {
		defer unix.Close(fd)
		w.ended <- w.read(func(record []byte) (int, error) { return unix.Read(fd, record) }, func() bool {
			select {
			case <-w.stop:
				return false
			default:
			}
			// An error is the next read's, too.
			unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 200)
			return true
		})
	}()
	return w, nil
}

// during names the step that runs from now on.
func (w *faultWatch) during(step string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step = step
}

// finish reads what the log still has. An error that begins with "the kernel" is a fault.
func (w *faultWatch) finish() error {
	close(w.stop)
	err := <-w.ended
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.fault) > 0 {
		err = errors.Join(fmt.Errorf("the kernel logged a fault of its own: %s", strings.Join(w.fault, "\n")), err)
	}
	return err
}

// read takes records as /dev/kmsg gives them, one with each read: LEVEL,NUMBER,TIME,FLAGS;TEXT. Where
// there is none, more waits, and tells whether to go on.
func (w *faultWatch) read(read func([]byte) (int, error), more func() bool) error {
	record := make([]byte, 8<<10)
	for {
		n, err := read(record)
		switch {
		case errors.Is(err, unix.EPIPE): // records were overwritten; it goes on with the oldest
			continue
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN), errors.Is(err, io.EOF):
			if more() {
				continue
			}
			// What came between the look and the end.
			if n, err = read(record); err != nil {
				return nil
			}
		case err != nil:
			return fmt.Errorf("read the kernel's log: %w", err)
		}
		_, text, _ := strings.Cut(string(record[:n]), ";")
		text, _, _ = strings.Cut(text, "\n")
		w.record(text)
	}
}

func (w *faultWatch) record(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case len(w.fault) == 0 && isFault(text):
		at := "before the first step"
		if w.step != "" {
			at = "in step " + w.step
		}
		w.fault = append(w.fault, at+": "+text)
	case len(w.fault) > 0 && len(w.fault) <= linesOfFault:
		w.fault = append(w.fault, text)
	}
}

// consoleFault is the first fault that a console shows, with the lines after it: of one that ended the machine
// its first process can tell nothing. "": none.
func consoleFault(console string) string {
	lines := strings.Split(console, "\n")
	for i, line := range lines {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") { // [  seconds] TEXT
			_, line, _ = strings.Cut(line, "] ")
		}
		if isFault(line) {
			return strings.Join(lines[i:min(len(lines), i+1+linesOfFault)], "\n")
		}
	}
	return ""
}

func isFault(text string) bool {
	for _, f := range faults {
		if strings.HasPrefix(text, f) {
			return true
		}
	}
	return false
}

// staleBreakpoint tells whether a console ends with a kernel that met a breakpoint that nobody had set. While it changes its
// own code the kernel puts one there (text_poke), and takes it out again before other CPUs may forget it; qemu's emulator
// seems to run it after that, on another CPU (ADR 0153).
func staleBreakpoint(console string) bool {
	fault := consoleFault(console)
	first, _, _ := strings.Cut(fault, "\n")
	return strings.Contains(first, "int3: 0000 [#1]") && strings.Contains(console, "Kernel panic - not syncing")
}
