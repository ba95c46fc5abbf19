package lab

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var discard = slog.New(slog.DiscardHandler)

// fakeAgent is what the test binary does when it is run as an agent. It writes
// what it does into a file "log" beside the program it was called as.
func fakeAgent(kind string, args []string) {
	f := flag.NewFlagSet("agent", flag.ExitOnError)
	plan, instance, runDir := f.String("plan", "", ""), f.String("instance", "", ""), f.String("run-dir", "", "")
	f.String("state-dir", "", "")
	detach, yes := f.Bool("detach", false, ""), f.Bool("yes", false, "")
	f.Parse(args)
	inside, _ := os.Readlink("/proc/self/ns/net")
	say := func(format string, args ...any) {
		log, err := os.OpenFile(filepath.Join(filepath.Dir(os.Args[0]), "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Fprintf(log, format+"\n", args...)
		log.Close()
	}
	if *detach {
		if kind == "detach-fails" {
			fmt.Fprintln(os.Stderr, "no way")
			os.Exit(1)
		}
		if !*yes {
			os.Exit(2)
		}
		say("detach %s", *instance)
		os.Exit(0)
	}
	for _, path := range []string{*plan, *runDir} {
		if _, err := os.Stat(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, unix.SIGTERM)
	switch kind {
	case "fails":
		if strings.HasSuffix(*instance, "-r3") {
			fmt.Fprintln(os.Stderr, "r3-r2 does not exist")
			os.Exit(1)
		}
	case "hangs":
		if strings.HasSuffix(*instance, "-r3") {
			fmt.Println("not yet")
			say("hangs")
			<-asked
			os.Exit(0)
		}
	case "stubborn":
		signal.Ignore(unix.SIGTERM)
	}
	say("start %s %s", *instance, inside)
	fmt.Println(`{"msg": "starting"}`)
	fmt.Print(`{"ready"`) // a line may come in pieces
	fmt.Println(`: true}`)
	<-asked
	fmt.Println("nobody reads this, and it must not end me")
	say("stop %s", *instance)
	os.Exit(0)
}

// agentOf returns a program that behaves as the kind of fake agent.
func agentOf(t *testing.T, kind string) (path string, log func() []string) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	dir := t.TempDir()
	path = filepath.Join(dir, kind)
	must(t, os.Symlink(self, path))
	return path, func() []string {
		b, err := os.ReadFile(filepath.Join(dir, "log"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(string(b)), "\n")
		slices.Sort(lines)
		return lines
	}
}

// afterLog returns when a fake agent has written a line.
func afterLog(t *testing.T, binary string, log func() []string, line string) {
	path := filepath.Join(filepath.Dir(binary), "log")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		t.Error(err)
		return
	}
	f.Close()
	w, err := watchFile(path)
	if err != nil {
		t.Error(err)
		return
	}
	defer w.close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for !slices.Contains(log(), line) {
		if err := w.wait(ctx); err != nil {
			t.Error(err)
			return
		}
	}
}

func TestAgentsRunInTheirNamespacesUntilDown(t *testing.T) {
	t.Parallel()
	binary, log := agentOf(t, "good")
	l := up(t, Config{Binary: binary})
	var want []string
	for _, name := range []string{"r1", "r2", "r3", "r6"} {
		m, err := l.Member(name)
		must(t, err)
		if m.Agent == nil || m.Agent.PID == 0 {
			t.Fatalf("the agent of %s is not recorded", name)
		}
		if pids := processesIn(m.Inode); !slices.Equal(pids, []int{m.Agent.PID}) {
			t.Errorf("processes in %s: %v, want the agent %d", m.Namespace, pids, m.Agent.PID)
		}
		want = append(want, fmt.Sprintf("start %s-%s net:[%d]", l.Prefix(), name, m.Inode))
	}
	if got := log(); !slices.Equal(got, want) {
		t.Errorf("agents did\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if err := l.StartAgent(soon(t), "r1"); err == nil || !strings.Contains(err.Error(), "runs already") {
		t.Errorf("a second agent for r1: got %v", err)
	}
	for _, name := range []string{"r4", "h1"} {
		if err := l.StartAgent(soon(t), name); err == nil {
			t.Errorf("an agent for %s, which is no node: no error", name)
		}
	}
	must(t, l.StopAgent(soon(t), "r1"))
	must(t, l.StopAgent(soon(t), "r1"))
	m, err := l.Member("r1")
	must(t, err)
	if pids := processesIn(m.Inode); len(pids) > 0 {
		t.Errorf("processes in %s after StopAgent: %v", m.Namespace, pids)
	}
	must(t, l.StartAgent(soon(t), "r1"))

	// Another process takes it down.
	other, err := Open(filepath.Dir(l.Dir()), l.Prefix(), nil)
	must(t, err)
	members := l.Members()
	must(t, other.Down(soon(t)))
	for _, name := range []string{"r1", "r2", "r3", "r6"} {
		for _, did := range []string{"detach ", "stop "} {
			if !slices.Contains(log(), did+l.Prefix()+"-"+name) {
				t.Errorf("%s: no %q", name, did)
			}
		}
	}
	leavesNothing(t, filepath.Dir(l.Dir()), l.Prefix(), members)
}

func TestAgentThatFailsEndsUpWithItsWords(t *testing.T) {
	t.Parallel()
	binary, log := agentOf(t, "fails")
	dir := t.TempDir()
	d, world := paper()
	_, err := Up(soon(t), Config{Domain: d, Lab: world, RunDir: dir, Prefix: "wstest-" + randomPart(), Binary: binary})
	want := "start the agent of r3: it ended before it was ready (exit status 1): r3-r2 does not exist"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if labs, err := List(dir); err != nil || len(labs) != 0 {
		t.Errorf("left: %v, %v", labs, err)
	}
	// Whatever was started is detached, r3 too: nobody knows how far it came.
	started := 1
	for _, line := range log() {
		if strings.HasPrefix(line, "start ") {
			started++
		}
		if strings.HasPrefix(line, "detach ") {
			started--
		}
	}
	if started > 0 {
		t.Errorf("%d agents were not detached:\n%s", started, strings.Join(log(), "\n"))
	}
}

func TestUpCancelledWhileAnAgentStartsLeavesNothing(t *testing.T) {
	t.Parallel()
	binary, log := agentOf(t, "hangs")
	dir, prefix := t.TempDir(), "wstest-"+randomPart()
	d, world := paper()
	ctx, cancel := context.WithCancelCause(soon(t))
	enough := errors.New("enough")
	var canceller sync.WaitGroup
	canceller.Go(func() { afterLog(t, binary, log, "hangs"); cancel(enough) })
	_, err := Up(ctx, Config{Domain: d, Lab: world, RunDir: dir, Prefix: prefix, Binary: binary})
	canceller.Wait()
	if !errors.Is(err, enough) {
		t.Errorf("got %v, want %v", err, enough)
	}
	leavesNothing(t, dir, prefix, nil)
}

// An agent whose start was given up must not become ready later.
func TestStartAgentCancelledStopsIt(t *testing.T) {
	t.Parallel()
	l := up(t, Config{})
	binary, log := agentOf(t, "hangs")
	must(t, l.update(func(s *state) { s.Binary = binary }))
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(soon(t))
	var canceller sync.WaitGroup
	canceller.Go(func() { afterLog(t, binary, log, "hangs"); cancel(enough) })
	err := l.StartAgent(ctx, "r3")
	canceller.Wait()
	if !errors.Is(err, enough) {
		t.Errorf("got %v, want %v", err, enough)
	}
	m, err := l.Member("r3")
	must(t, err)
	if pids := processesIn(m.Inode); len(pids) > 0 {
		t.Errorf("left: processes %v", pids)
	}
	if m.Agent == nil || m.Agent.PID != 0 {
		t.Errorf("recorded: %+v, want an agent to be detached that does not run", m.Agent)
	}
}

// A process number that has become somebody else's must not be killed.
func TestAnotherProcessOfTheSameNumberIsLeftAlone(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(soon(t), "sleep", "1000")
	must(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	p, err := findProcess(cmd.Process.Pid)
	must(t, err)
	stale := process{pid: p.pid, start: p.start - 1}
	must(t, stale.stop(soon(t), time.Second))
	if f, err := p.open(); err != nil || f == nil {
		t.Errorf("it was stopped (%v)", err)
	} else {
		f.Close()
	}
}

func TestStubbornProcessIsKilled(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(soon(t), "sh", "-c", "trap '' TERM; echo; while :; do sleep 1000; done")
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	out.Read(make([]byte, 1)) // the trap is set
	p, err := findProcess(cmd.Process.Pid)
	must(t, err)
	must(t, p.stop(soon(t), 50*time.Millisecond))
	cmd.Wait()
	if f, err := p.open(); err != nil || f != nil {
		t.Errorf("it still runs (%v)", err)
	}
}

func TestFailedDetachKeepsTheRecord(t *testing.T) {
	t.Parallel()
	binary, log := agentOf(t, "detach-fails")
	l := up(t, Config{Binary: binary})
	err := l.Down(soon(t))
	if err == nil || !strings.Contains(err.Error(), "detach r2: exit status 1: no way") {
		t.Errorf("got %v, want that r2 was not detached", err)
	}
	if names := namespaces(t, l.Prefix()+"-"); len(names) > 0 {
		t.Errorf("left: namespaces %v", names)
	}
	// It can be done again, once what was wrong is mended.
	good := filepath.Join(filepath.Dir(binary), "good")
	must(t, os.Rename(binary, good))
	must(t, l.update(func(s *state) { s.Binary = good }))
	must(t, l.Down(soon(t)))
	if !slices.Contains(log(), "detach "+l.Instance("r2")) {
		t.Errorf("r2 was not detached:\n%s", strings.Join(log(), "\n"))
	}
}
