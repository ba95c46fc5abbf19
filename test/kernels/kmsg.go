package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"golang.org/x/sys/unix"
)

// faults begin what a kernel logs of a fault of its own: those are no test's, and no
// test that passed beside one has.
var faults = []string{"WARNING: ", "BUG: ", "KASAN: ", "Oops: ", "general protection fault", "Kernel panic", "INFO: task ", "UBSAN: ", "refcount_t: "}

// kernelFault is the first fault in the kernel's log with the lines after it; "": none.
func kernelFault() (string, error) {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", fmt.Errorf("read the kernel's log: %w", err)
	}
	defer unix.Close(fd)
	return firstFault(func(record []byte) (int, error) { return unix.Read(fd, record) })
}

// firstFault reads records as /dev/kmsg gives them, one with each read:
// LEVEL,NUMBER,TIME,FLAGS;TEXT.
func firstFault(read func([]byte) (int, error)) (string, error) {
	const after = 12
	var fault []string
	record := make([]byte, 8<<10)
	for len(fault) <= after {
		n, err := read(record)
		switch {
		case errors.Is(err, unix.EPIPE): // records were overwritten; it goes on with the oldest
			continue
		case errors.Is(err, unix.EAGAIN), errors.Is(err, io.EOF):
			return strings.Join(fault, "\n"), nil
		case err != nil:
			return "", fmt.Errorf("read the kernel's log: %w", err)
		}
		_, text, _ := strings.Cut(string(record[:n]), ";")
		text, _, _ = strings.Cut(text, "\n")
		if len(fault) > 0 || isFault(text) {
			fault = append(fault, text)
		}
	}
	return strings.Join(fault, "\n"), nil
}

func isFault(text string) bool {
	for _, f := range faults {
		if strings.HasPrefix(text, f) {
			return true
		}
	}
	return false
}
