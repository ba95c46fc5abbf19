package stream

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ownMemory is what a process holds in pages that belong to no file, in bytes.
func ownMemory(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	_, after, _ := strings.Cut(string(text), "\nRssAnon:")
	kb, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.SplitN(strings.TrimSpace(after), "\n", 2)[0], "kB")))
	must(t, err)
	return kb << 10
}

// A connection that does nothing takes a kilobyte of the worker's memory at most.
func TestAnIdleConnectionTakesLittleMemory(t *testing.T) {
	w := once(t)
	p := w.startWorker(t, settings{"run": listOf("identity"), "loops": 1})
	l := w.listen(t, towards["IPv6"])
	const count = 4000
	pid := p.cmd.Process.Pid
	before := ownMemory(t, pid)
	var all []net.Conn
	t.Cleanup(func() {
		for _, c := range all {
			c.Close()
		}
	})
	b := []byte{1}
	for range count {
		c, s := w.pair(t, l, towards["IPv6"])
		all = append(all, c, s)
		for _, d := range [][2]io.ReadWriter{{c, s}, {s, c}} {
			_, werr := d[0].Write(b)
			_, rerr := io.ReadFull(d[1], b)
			must(t, errors.Join(werr, rerr))
		}
	}
	each := (ownMemory(t, pid) - before) / count
	t.Logf("%d bytes for each of %d connections", each, count)
	if each > 1024 {
		t.Errorf("an idle connection takes %d bytes of the worker's memory; want 1024 at most", each)
	}
}

// A worker that eats memory ends, and resets its connections, before the machine has none left.
func TestAWorkerThatEatsMemoryEnds(t *testing.T) {
	w := once(t)
	t.Setenv(asWorker, "1")
	text, err := Text("zip", port, 1, []string{`"identity"`}, nil, nil, false, Limits{Connections: 1000, Buffer: 1 << 20, Idle: time.Minute, HalfClosed: time.Minute})
	must(t, err)
	text, err = Placed(text, port, MemoryMin)
	must(t, err)
	self, err := os.Executable()
	must(t, err)
	p, listeners, err := Start(w.place.NetNS(), self, text, nil, nil)
	must(t, err)
	t.Cleanup(func() { p.Close() })
	must(t, closeAll(listeners))
	c, s := w.pair(t, w.listen(t, towards["IPv6"]), towards["IPv6"])
	echoes(t, c, s)
	must(t, unix.Kill(p.PID(), unix.SIGUSR1))
	most := 0
	for ended := false; !ended; {
		select {
		case <-p.Ended():
			ended = true
		case <-time.After(10 * time.Millisecond):
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.PID())); err == nil {
				var size, resident int
				if n, _ := fmt.Sscan(string(b), &size, &resident); n == 2 {
					most = max(most, resident*os.Getpagesize())
				}
			}
			if most > 2*MemoryMin {
				t.Fatalf("the worker has %d bytes; want %d at most, and that it ends", most, MemoryMin)
			}
		}
	}
	t.Logf("it had %d MiB, and ended: %.40v", most>>20, p.Err())
	if !strings.Contains(p.Err().Error(), "exit status 2") { // of the runtime
		t.Errorf("the worker ended for another reason: %v", p.Err())
	}
	for _, end := range []net.Conn{c, s} {
		if _, err := end.Read(make([]byte, 1)); !isReset(err) {
			t.Errorf("its connection: %v; want a reset", err)
		}
	}
}

// A worker takes as many descriptors as it may, and knows for how many connections these suffice.
func TestAWorkerKnowsForHowManyConnectionsItHasDescriptors(t *testing.T) {
	for _, connections := range []int{1, ConnectionsMax} {
		room, err := raiseDescriptors(connections)
		must(t, err)
		var have unix.Rlimit
		must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &have))
		if want := (have.Cur - otherDescriptors) / 2; room != want || have.Cur != have.Max {
			t.Errorf("for %d connections there is room for %d, with %+v descriptors; want %d, and all that may be had", connections, room, have, want)
		}
	}
}
