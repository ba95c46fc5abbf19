package agent

import (
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Who may not connect is told so, and not that the agent may be down.
func TestClientSaysWhatToDo(t *testing.T) {
	c := NewClient("/run/some/agent.sock")
	for errno, want := range map[unix.Errno]string{
		unix.EACCES:       "ask the agent at /run/some/agent.sock: connect: permission denied; run as root",
		unix.ENOENT:       "ask the agent at /run/some/agent.sock: connect: no such file or directory; is it running?",
		unix.ECONNREFUSED: "ask the agent at /run/some/agent.sock: connect: connection refused; is it running?",
	} {
		err := &url.Error{Op: "Get", URL: "http://agent", Err: &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", errno)}}
		if got := c.unreachable(err).Error(); got != want {
			t.Errorf("%v: %q; want %q", errno, got, want)
		}
	}
}

// The kernel says "invalid argument" of a path that is too long for a socket.
func TestSocketPathHasRoom(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 108))
	if l, err := listen(long); err == nil || !strings.Contains(err.Error(), "a socket takes 107: give a shorter --run-dir") {
		t.Errorf("%v, %v", l, err)
	}
	dir, err := os.MkdirTemp("/tmp", "ws") // of any length, and short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	l, err := listen(filepath.Join(dir, strings.Repeat("x", 107-len(dir)-1)))
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}
