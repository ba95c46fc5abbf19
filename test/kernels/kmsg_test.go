package main

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// watched gives a watch the records of a log; "!" is one that was overwritten, "." that there is none yet.
func watched(t *testing.T, log ...string) string {
	t.Helper()
	w := &faultWatch{stop: make(chan struct{}), ended: make(chan error, 1)}
	w.during("e2e")
	i := 0
	w.ended <- w.read(func(record []byte) (int, error) {
		if i == len(log) {
			return 0, io.EOF
		}
		i++
		switch log[i-1] {
		case "!":
			return 0, unix.EPIPE
		case ".":
			return 0, unix.EAGAIN
		}
		return copy(record, log[i-1]), nil
	}, func() bool { return i < len(log) })
	if err := w.finish(); err != nil {
		return err.Error()
	}
	return ""
}

func TestKernelsFaultsAreFound(t *testing.T) {
	const is = "the kernel logged a fault of its own: in step e2e: "
	for name, c := range map[string]struct {
		log  []string
		want string
	}{
		"none":                  {[]string{"6,1,2,-;Linux version 6.1", "4,2,3,-;this WARNING: is in the middle"}, ""},
		"a warning":             {[]string{"6,1,2,-;x", "4,2,3,-;WARNING: CPU: 0 PID: 1 at net/core\n SUBSYSTEM=x", "4,3,3,-;Call Trace:"}, is + "WARNING: CPU: 0 PID: 1 at net/core\nCall Trace:"},
		"an oops":               {[]string{"1,1,2,-;BUG: kernel NULL pointer"}, is + "BUG: kernel NULL pointer"},
		"one of KASAN":          {[]string{"1,1,2,-;BUG: KASAN: slab-out-of-bounds in x"}, is + "BUG: KASAN: slab-out-of-bounds in x"},
		"one after others went": {[]string{"6,1,2,-;x", "!", ".", "4,9,3,-;WARNING: CPU: 1"}, is + "WARNING: CPU: 1"},
	} {
		if got := watched(t, c.log...); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("4,%d,3,-;WARNING: %d", i, i))
	}
	if got := watched(t, many...); strings.Count(got, "\n") != linesOfFault {
		t.Errorf("of a hundred lines it tells %q", got)
	}
}

func TestConsolesFaultsAreFound(t *testing.T) {
	const panics = "[   12.345678] Kernel panic - not syncing: sysrq triggered crash"
	for name, c := range map[string]struct{ console, want string }{
		"none":       {"SeaBIOS\n[    1.0] Loading x\n[    2.0] reboot: Power down\n", ""},
		"a panic":    {"x\r\n" + panics + "\r\n[   12.4] CPU: 0\r\n", panics},
		"a warning":  {"[    3.2] WARNING: CPU: 0 PID: 1 at x\n", "WARNING: CPU: 0"},
		"of no time": {"BUG: KASAN: x\n", "BUG: KASAN: x"},
		"quoted":     {"[    3.2] it says WARNING: CPU\n", ""},
	} {
		got := consoleFault(c.console)
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	r := newReport(io.Discard, "6.1", nil, nil, false)
	r.console(panics)
	if r.finish() {
		t.Error("a machine whose console shows a panic did what it must")
	}
}
