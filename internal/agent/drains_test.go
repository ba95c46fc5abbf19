package agent

import (
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/stream"
)

// sleeper is a process that ends when it is told to.
type sleeper struct {
	*exec.Cmd
	ended chan struct{}
}

func newSleeper(t *testing.T) *sleeper {
	t.Helper()
	s := &sleeper{exec.Command("sleep", "1000"), make(chan struct{})}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		s.Wait()
		close(s.ended)
	}()
	t.Cleanup(func() {
		s.Process.Kill()
		<-s.ended
	})
	return s
}

func (s *sleeper) ends(t *testing.T) {
	t.Helper()
	select {
	case <-s.ended:
	case <-time.After(patience):
		t.Fatalf("process %d has not been ended", s.Process.Pid)
	}
}

func (s *sleeper) goesOn() bool {
	select {
	case <-s.ended:
		return false
	default:
		return true
	}
}

func (s *sleeper) record(t *testing.T, function string) workerRecord {
	t.Helper()
	start, err := processStart(s.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return workerRecord{Function: function, Link: "wss-" + function, PID: s.Process.Pid, Start: start}
}

func readRecords(t *testing.T, dir string) (f workersFile) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "workers.json"))
	if errors.Is(err, os.ErrNotExist) {
		return f
	}
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// An agent ends the workers of the one before whose time is over, and those behind interfaces that are gone; but not a process that has
// got a worker's number since, and none of another start of the machine.
func TestTheNextAgentEndsWorkersWhoseTimeIsOver(t *testing.T) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	node, err := host.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	for _, c := range []struct {
		name, boot string
		ends       bool
	}{
		{"of this start of the machine", strings.TrimSpace(string(boot)), true},
		{"of another start", "0", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			over, later, runs, gone, other := newSleeper(t), newSleeper(t), newSleeper(t), newSleeper(t), newSleeper(t)
			f := workersFile{Version: 1, Boot: c.boot}
			for _, s := range []*sleeper{over, later, runs} {
				f.Workers = append(f.Workers, s.record(t, "zip"))
			}
			f.Workers[0].Until, f.Workers[1].Until = sinceBoot(), sinceBoot()+1000
			f.Workers = append(f.Workers, gone.record(t, "dpi"), other.record(t, "dpi"))
			f.Workers[4].Start--
			b, err := json.Marshal(f)
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, "workers.json"), b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			r := newWorkerRecords(dir, slog.New(slog.DiscardHandler))
			if err := r.endAll(func(link string) bool { return link == "wss-dpi" }, node); err != nil {
				t.Fatal(err)
			}
			if c.ends {
				gone.ends(t)
				over.ends(t)
				if d := r.of("zip"); len(d) != 1 || d[0].PID != later.Process.Pid {
					t.Errorf("%+v drain; want process %d", d, later.Process.Pid)
				}
			}
			for _, s := range []*sleeper{later, runs, other} {
				if !s.goesOn() {
					t.Errorf("process %d was ended", s.Process.Pid)
				}
			}
			if !c.ends && (!over.goesOn() || !gone.goesOn()) {
				t.Error("a process of another start was ended")
			}
			if err := r.leave(); err != nil {
				t.Fatal(err)
			}
			if n := len(readRecords(t, dir).Workers); c.ends && n != 2 || !c.ends && n != 0 {
				t.Errorf("%d workers are written down", n)
			}
			if c.ends && !later.goesOn() {
				t.Error("a worker that drains was ended with its agent")
			}
		})
	}
}

// Of the workers of a function that drain, the oldest ends for one too many; the others' ends are noticed.
func TestTheWorkersThatDrainAreBounded(t *testing.T) {
	dir := t.TempDir()
	r := newWorkerRecords(dir, slog.New(slog.DiscardHandler))
	var all []*sleeper
	for range drainsMost + 1 {
		s := newSleeper(t)
		all = append(all, s)
		record, err := r.willDrain("zip", "wss-zip", s.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		handle, err := record.open()
		if err != nil {
			t.Fatal(err)
		}
		r.follow(&drain{workerRecord: record, process: stream.Follow("zip", s.Process.Pid, handle)})
	}
	all[0].ends(t)
	if n, written := len(r.of("zip")), len(readRecords(t, dir).Workers); n != drainsMost || written != drainsMost {
		t.Errorf("%d drain, and %d are written down; want %d", n, written, drainsMost)
	}
	if err := unix.Kill(all[1].Process.Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for limit := time.Now().Add(patience); len(r.of("zip")) == drainsMost; time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("the end of a worker that drains is not noticed")
		}
	}
	for _, s := range all[2:] {
		if !s.goesOn() {
			t.Errorf("process %d was ended", s.Process.Pid)
		}
	}
	for _, d := range r.of("zip") { // nobody follows them behind the test
		if err := unix.Kill(d.PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		<-d.process.Ended()
	}
	for limit := time.Now().Add(patience); len(readRecords(t, dir).Workers) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("workers that have ended stay written down")
		}
	}
}
