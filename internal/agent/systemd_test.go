package agent

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// systemd gives the name of a socket, and wants READY when the data path is armed and
// not before, a status, and a sign of life from the loop (sd_notify(3)).
func TestSystemdHearsOfTheAgent(t *testing.T) {
	dir, err := os.MkdirTemp("", "ws") // the name of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	at := filepath.Join(dir, "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: at, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", at)
	t.Setenv("WATCHDOG_USEC", fmt.Sprint((20 * time.Millisecond).Microseconds()))
	t.Setenv("WATCHDOG_PID", fmt.Sprint(os.Getpid()))
	hears := func(want string, never ...string) {
		t.Helper()
		if err := l.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 4096)
		for {
			n, err := l.Read(b)
			if err != nil {
				t.Fatalf("%q was never said: %v", want, err)
			}
			got := string(b[:n])
			for _, bad := range never {
				if strings.HasPrefix(got, bad) {
					t.Fatalf("%q before %q", got, want)
				}
			}
			if strings.Contains(got, want) {
				return
			}
		}
	}

	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	n.fails["apply r1"] = fmt.Errorf("broken by the test")
	ended := make(chan error, 1)
	go func() { ended <- run(t.Context(), n.cfg, n.on) }()
	if err := <-ended; err == nil {
		t.Fatal("the agent ended without an error")
	}
	delete(n.fails, "apply r1")
	s := n.start()
	hears("STATUS=the plan of node r1 is in force", "READY")
	hears("READY=1", "WATCHDOG")
	hears("WATCHDOG=1")
	hears("WATCHDOG=1")
	n.write([]byte("{"))
	hears("STATUS=the plan of node r1 is in force; the new plan is refused")
	n.write(n.encode(r1(t, nil)))
	hears("STATUS=the plan of node r1 is in force")
	if err := s.halt(); err != nil && !strings.Contains(err.Error(), "context canceled") {
		t.Fatal(err)
	}
	hears("STOPPING=1")
}
