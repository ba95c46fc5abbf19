package agent_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
)

func (b *bed) pinDir() string {
	dir := b.cfg.PinDir
	if dir == "" {
		dir = dataplane.DefaultPinDir
	}
	return filepath.Join(dir, b.cfg.Instance)
}

// pins are what is pinned of an instance: the kernel's numbers of the objects, by
// path. What goes away while it looks is left out.
func (b *bed) pins() map[string]string {
	b.Helper()
	out := map[string]string{}
	filepath.WalkDir(b.pinDir(), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return nil
		}
		name, err := filepath.Rel(b.pinDir(), path)
		b.must(err)
		id, err := idAt(path, strings.HasPrefix(name, "links/"), isProgram(filepath.Base(name)))
		if err == nil {
			out[name] = id
		} else if !errors.Is(err, fs.ErrNotExist) {
			b.Fatalf("pin %s: %v", name, err)
		}
		return nil
	})
	return out
}

func isProgram(pin string) bool {
	return slices.ContainsFunc(object.All, func(o object.Object) bool { return o.Program == pin })
}

func idAt(path string, isLink, isProgram bool) (string, error) {
	switch {
	case isLink:
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return "", err
		}
		defer l.Close()
		info, err := l.Info()
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("link %d of program %d", info.ID, info.Program), nil
	case isProgram:
		p, err := ebpf.LoadPinnedProgram(path, nil)
		if err != nil {
			return "", err
		}
		defer p.Close()
		info, err := p.Info()
		if err != nil {
			return "", err
		}
		id, _ := info.ID()
		return fmt.Sprintf("program %d", id), nil
	}
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return "", err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return "", err
	}
	id, _ := info.ID()
	return fmt.Sprintf("map %d", id), nil
}

// eventually calls f, after each line of the log and now and then, until it has no
// more to complain of.
func (b *bed) eventually(what string, f func() string) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	for {
		more := b.log.More()
		wrong := f()
		if wrong == "" {
			return
		}
		select {
		case <-more:
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			b.Fatalf("%s: %s", what, wrong)
		}
	}
}

// pinsAreBack waits until what is pinned is what it was.
func (b *bed) pinsAreBack(what string, before map[string]string) {
	b.Helper()
	b.eventually(what, func() string { return cmp.Diff(before, b.pins()) })
}

// childConfig names the variable that makes this test's program an agent.
const childConfig = "WAYSTAMP_TEST_AGENT"

func childAgent() int {
	var cfg agent.Config
	if err := json.Unmarshal([]byte(os.Getenv(childConfig)), &cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	cfg.Stdout = os.Stdout
	cfg.ReconcileEvery = never
	if err := agent.Run(context.Background(), cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// startChild runs an agent in a process of its own, until it says that it is ready.
func (b *bed) startChild() *exec.Cmd {
	b.Helper()
	content, err := json.Marshal(map[string]string{
		"PlanFile": b.cfg.PlanFile, "Instance": b.cfg.Instance, "RunDir": b.cfg.RunDir, "StateDir": b.cfg.StateDir,
	})
	b.must(err)
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childConfig+"="+string(content))
	cmd.Stderr = b.Output()
	out, err := cmd.StdoutPipe()
	b.must(err)
	b.must(b.net.NetNS().Do(cmd.Start))
	b.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	s := bufio.NewScanner(out)
	if !s.Scan() || !strings.Contains(s.Text(), "true") {
		b.Fatalf("the agent says %q, %v", s.Text(), s.Err())
	}
	return cmd
}

// never is a time between reconciliations that no test lives to see.
const never = 24 * time.Hour

// sidPacket sends a packet to a SID from outside, which the guard refuses.
func (b *bed) sidPacket() {
	b.Helper()
	b.must(b.peer.NetNS().Do(func() error {
		c, err := net.Dial("udp6", "[fc00:0:0:101::]:7")
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("hello"))
		return err
	}))
}

func (b *bed) connectPeer() {
	b.Helper()
	b.must(b.net.AddAddress("r1-h1", netip.MustParsePrefix("2001:db8:1::1/64")))
	b.must(b.peer.AddAddress("h1-r1", netip.MustParsePrefix("2001:db8:1::2/64")))
	b.must(b.peer.AddRoute(host.Route{Destination: netip.MustParsePrefix("fc00::/48"), Via: netip.MustParseAddr("2001:db8:1::1"), Device: "h1-r1"}))
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	b.must(b.peer.WaitUp(ctx, "h1-r1"))
}

// Nothing but events tells the agent here: it reconciles never.
func TestRemovedPinsAreBackAtOnce(t *testing.T) {
	b := newBed(t)
	b.writePlan(b.nodes["r1"])
	b.cfg.ReconcileEvery = never
	r := b.start()
	before := b.pins()
	kinds := map[string]int{}
	for _, id := range before {
		kinds[strings.Fields(id)[0]]++
	}
	if kinds["link"] != 3 || kinds["program"] < 4 || kinds["map"] < 20 {
		t.Fatalf("pins %v: %v", kinds, before)
	}
	find := func(pattern string) string {
		t.Helper()
		found, err := filepath.Glob(filepath.Join(b.pinDir(), pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %q, %v", pattern, found, err)
		}
		return found[0]
	}
	for _, c := range []struct {
		name   string
		remove func() error
	}{
		{"a link", func() error { return os.Remove(find("links/tc-*")) }},
		{"a map", func() error { return os.Remove(find("gen-*/ws_egresses")) }},
		{"a program", func() error { return os.Remove(find("gen-*/ws_core_tc")) }},
		{"the replay windows", func() error { return os.Remove(find("windows/slab-0")) }},
		{"the directory of packet numbers", func() error { return removeAll(find("numbers")) }},
		{"the directory of links", func() error { return removeAll(find("links")) }},
		{"the generation", func() error { return removeAll(find("gen-*")) }},
		{"the instance, by a rename", func() error { return os.Rename(b.pinDir(), b.pinDir()+"-moved") }},
		{"what that left", func() error { return os.RemoveAll(b.pinDir() + "-moved") }},
		{"the instance", func() error { return removeAll(b.pinDir()) }},
		{"another object in the place of one", func() error {
			m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
			if err != nil {
				return err
			}
			defer m.Close()
			path := filepath.Join(filepath.Dir(b.pinDir()), b.cfg.Instance+"-other")
			if err := m.Pin(path); err != nil {
				return err
			}
			return os.Rename(path, find("gen-*/ws_hops"))
		}},
	} {
		b.must(c.remove())
		b.pinsAreBack(c.name, before)
	}
	b.log.Wait("pins were removed, and the agent has restored them")
	s := r.status()
	if s.Error != "" || len(s.Problems) != 0 || !slices.ContainsFunc(s.Warnings, func(w string) bool { return strings.Contains(w, "pins below "+b.pinDir()+" were removed") }) {
		t.Errorf("status %+v; want a warning of it", s)
	}
	// Its own directory is locked again.
	if _, err := agent.Detach(b.cfg); !errors.Is(err, dataplane.ErrBusy) {
		t.Errorf("detach under it: %v; want ErrBusy", err)
	}
	b.must(r.halt())
	b.pinsAreBack("after the agent's end", before)
}

// removeAll removes what is below dir. The directory itself may stay: the agent puts
// pins back while they are removed.
func removeAll(dir string) error {
	if err := os.RemoveAll(dir); !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// An agent that was killed after somebody had removed its pins leaves its data path at
// work, and the next one goes on with it.
func TestAgentKilledAfterItsPinsWereRemovedLeavesTheGuard(t *testing.T) {
	b := newBed(t)
	b.connectPeer()
	b.writePlan(b.nodes["r1"])
	child := b.startChild()
	before := b.pins()
	client := agent.NewClient(agent.SocketPath(b.cfg.RunDir))
	defer client.Close()
	refused := func() (n uint64) {
		t.Helper()
		c, err := client.Counters(t.Context())
		b.must(err)
		for _, r := range c.Refusals {
			if r.Reason == "outside-sid" {
				n = r.Dropped
			}
		}
		return n
	}
	b.sidPacket()
	b.eventually("the first packet", func() string { return unless(refused() == 1, "it is not refused") })
	b.must(removeAll(b.pinDir()))
	b.pinsAreBack("under the agent", before)
	b.must(child.Process.Kill())
	child.Wait()
	b.pinsAreBack("after its death", before)
	// What is still attached is what was: the next agent finds it by its pins.
	b.sidPacket()
	r := b.start()
	b.eventually("what was refused while nobody was there", func() string {
		return unless(refused() == 2, "%d packets are counted, want 2", refused())
	})
	b.pinsAreBack("under the next agent", before)
	if s := r.status(); !s.Ready || s.Error != "" || len(s.Problems) != 0 || !s.Interfaces[0].TC || !s.Interfaces[1].TC {
		t.Errorf("status %+v", s)
	}
}

func unless(ok bool, format string, args ...any) string {
	if ok {
		return ""
	}
	return fmt.Sprintf(format, args...)
}

// A bpf filesystem elsewhere is not the agent's to mount.
func TestUnmountedPinsAreToldOfAndBackWhenTheyCan(t *testing.T) {
	b := newBed(t)
	at := filepath.Join(t.TempDir(), "bpf")
	mount := func() {
		t.Helper()
		b.must(unix.Mount("bpf", at, "bpf", 0, "mode=0700"))
	}
	b.must(os.Mkdir(at, 0o700))
	mount()
	t.Cleanup(func() {
		if _, err := agent.Detach(b.cfg); err != nil {
			t.Errorf("clean up: %v", err)
		}
		for unix.Unmount(at, unix.MNT_DETACH) == nil {
		}
	})
	b.cfg.PinDir = filepath.Join(at, "waystamp")
	b.cfg.ReconcileEvery = never
	b.writePlan(b.nodes["r1"])
	r := b.start()
	before := b.pins()
	b.log.Wait("the pins are watched") // from here on nothing but the mount tells it

	b.must(unix.Unmount(at, unix.MNT_DETACH))
	b.log.Wait("the guard would end with the agent")
	s := r.status()
	for _, part := range []string{"pins below " + b.pinDir(), "do not stop it", "mount it again"} {
		if !strings.Contains(s.Error, part) {
			t.Errorf("status says %q, want %q in it", s.Error, part)
		}
	}
	if strings.Contains(s.Error, "\n") || !s.Ready || len(s.Problems) != 0 {
		t.Errorf("status %+v", s)
	}
	if _, err := agent.Detach(b.cfg); !errors.Is(err, dataplane.ErrBusy) {
		t.Errorf("detach under it: %v; want ErrBusy", err)
	}
	if n := b.log.Count("the guard would end"); n != 1 {
		t.Errorf("it was said %d times, want once", n)
	}
	mount()
	b.pinsAreBack("mounted again", before)
	b.eventually("its status", func() string { return r.status().Error })
	b.must(r.halt())
	b.pinsAreBack("after the agent's end", before)
}
