package e2e

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

// controlled is a lab whose agents have a controller, on sockets that all namespaces reach.
type controlled struct {
	*world
	dir     string
	process *process
	agents  map[string]*process
	more    []string        // arguments of all agents
	lasts   context.Context // of processes that run for longer than others; nil: none does
}

// until is when a process ends that is not ended before.
func (c *controlled) until() context.Context {
	c.t.Helper()
	if c.lasts != nil {
		return c.lasts
	}
	return soon(c.t)
}

func buildControlled(t *testing.T, text string) *controlled {
	t.Helper()
	return controlledIn(t, buildFrom(t, parse(t, text), func(c *lab.Config) { c.WithoutAgents = true }))
}

// controlledIn is a controller for a lab without agents.
func controlledIn(t *testing.T, w *world) *controlled {
	t.Helper()
	c := &controlled{world: w, dir: newDir(t), agents: map[string]*process{}}
	must(t, os.WriteFile(filepath.Join(c.dir, "seal.key"), []byte(strings.Repeat("5e", 32)), 0o600))
	return c
}

// close ends all processes and takes the agents' data paths away, which the lab knows
// nothing of, also after Ctrl-C. It is deferred, so that the lab is still there.
func (c *controlled) close() {
	if c.t.Failed() && c.process != nil {
		c.tellAll()
		c.t.Logf("the controller says:\n%s", c.process.stderr)
		for name, a := range c.agents {
			c.t.Logf("the agent of %s says:\n%s", name, a.stderr)
		}
	}
	c.kill(&c.process)
	for name, a := range c.agents {
		c.kill(&a)
		ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(c.t.Context()), patience, fmt.Errorf("this takes longer than %s", patience))
		if r := c.detachWithin(ctx, name, "--yes"); r.code != 0 {
			c.t.Error(r)
		}
		cancel()
	}
}

func (c *controlled) start() {
	c.t.Helper()
	c.process = prepared(c.until(), c.t, []string{"controller", "--data", filepath.Join(c.dir, "data"), "--seal-key", filepath.Join(c.dir, "seal.key"), "--listen", "unix:" + filepath.Join(c.dir, "operators"), "--listen", "tls+unix:" + filepath.Join(c.dir, "nodes")})
	must(c.t, c.process.cmd.Start())
	eventually(c.t, func() error {
		// It is an operator's command that says whether it answers.
		if r := c.run("get", "nodes"); r.code != 0 {
			return fmt.Errorf("%s; the controller says: %s", r, c.process.stderr)
		}
		return nil
	})
}

// kill ends a process with -9, if it runs.
func (c *controlled) kill(p **process) {
	if *p == nil {
		return
	}
	must(c.t, (*p).cmd.Process.Signal(syscall.SIGKILL))
	(*p).cmd.Wait() // the signal is its error
	*p = nil
}

// run is an operator's command.
func (c *controlled) run(args ...string) result {
	c.t.Helper()
	return run(c.t, append(args, "--controller", "unix:"+filepath.Join(c.dir, "operators"))...)
}

func (c *controlled) must(args ...string) result {
	c.t.Helper()
	r := c.run(args...)
	if r.code != 0 {
		c.t.Fatalf("%s\nthe controller says:\n%s", r, c.process.stderr)
	}
	return r
}

// agent starts a node's agent, and joins with a token if it is given one.
func (c *controlled) agent(name, token string) {
	c.t.Helper()
	args := []string{"agent", "--controller", "tls+unix:" + filepath.Join(c.dir, "nodes"), "--node", name,
		"--instance", c.Instance(name), "--run-dir", c.AgentDir(name), "--state-dir", c.AgentDir(name)}
	args = append(args, c.more...)
	if token != "" {
		args = append(args, "--join", token)
	}
	p := prepared(c.until(), c.t, args)
	must(c.t, c.ns(name).Do(p.cmd.Start))
	c.agents[name] = p
}

func (c *controlled) ready(name string) {
	c.t.Helper()
	eventually(c.t, func() error {
		if p := c.agents[name]; !strings.Contains(p.stdout.String(), `{"ready":true}`) {
			return fmt.Errorf("the agent of %s is not ready: %s", name, p.stderr)
		}
		return nil
	})
}

// One file goes to a controller, and each agent gets its part. While datagrams go both ways and TCP one,
// secrets change each second, the functions change their order, the controller is killed in the
// midst of a change, an agent is killed and starts without a controller, and a change is given up whose node is away: no datagram is lost, and no
// packet refused. Then a node is revoked, and its chain is blocked.
func TestAControllerChangesChainsUnderTraffic(t *testing.T) {
	t.Parallel()
	bothTexts(t, func(t *testing.T, carried func(string) string) { controllerChangesChains(t, carried(paper)) })
}

func controllerChangesChains(t *testing.T, text string) {
	c := buildControlled(t, text)
	defer c.close()
	c.start()
	for _, name := range c.nodes() {
		c.agent(name, strings.TrimSpace(c.must("node", "token", name).stdout))
	}
	file := write(t, "domain.yaml", text)
	c.must("apply", "-f", file, "--wait")
	for _, name := range c.nodes() {
		c.ready(name)
	}
	if r := c.run("diff", "-f", file); r.code != 0 || r.stdout != "" {
		t.Errorf("what was applied differs: %s", r)
	}
	c.reaches("h1", "h2")
	refusedBefore, err := c.refusals()
	must(t, err)

	there, back := c.ticking("h1", "h2"), c.ticking("h2", "h1")
	s := c.stream("h1", "h2")
	flows := func() {
		t.Helper()
		there.more(200)
		back.more(200)
		s.more(1 << 18)
	}
	flows()
	for range 10 {
		second := time.After(time.Second)
		c.must("rotate", "--all", "--wait")
		flows()
		select {
		case <-second:
		case <-interrupted.Done():
			t.Fatal(context.Cause(interrupted))
		}
	}
	// The kernel says which numbers headends gave out and egresses have seen.
	eventually(t, func() error {
		if r := c.must("get", "events"); !strings.Contains(r.stdout, "old epochs have drained by numbers") {
			return fmt.Errorf("no epoch has drained by its numbers: %s%s", r, c.must("get", "epochs"))
		}
		return nil
	})
	other := write(t, "other.yaml", strings.Replace(text, "functions: [fw, dpi]", "functions: [dpi, fw]", 1))
	if r := c.run("diff", "-f", other); r.code != 3 || r.stdout != "~ chain web\n" {
		t.Errorf("the other order of functions: %s", r)
	}
	c.must("apply", "-f", other, "--wait")
	flows()

	// The controller dies when it has taken the request; the next one carries it out.
	c.must("rotate", "web")
	c.kill(&c.process)
	flows()
	c.killAgent("r2")
	c.agent("r2", "")
	c.ready("r2") // from what it has on disk
	flows()
	c.start()
	c.must("rotate", "web", "--wait")
	flows()

	// All agents get certificates of another root meanwhile.
	root := strings.Fields(c.must("get", "roots").stdout)
	c.must("controller", "rotate-ca")
	eventually(t, func() error {
		if r := c.must("get", "roots"); strings.Contains(r.stdout, "coming") || strings.Contains(r.stdout, "going") || slices.Equal(strings.Fields(r.stdout), root) {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
	c.must("rotate", "web", "--wait")
	flows()

	// A node's agent is gone in the midst of a change. A file that does without the node goes on over that.
	c.killAgent("r2")
	c.must("apply", "-f", file)
	eventually(t, func() error {
		if r := c.must("get", "changes"); !strings.Contains(r.stdout, "prepare") || !strings.Contains(r.stdout, "away") {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
	c.must("apply", "-f", write(t, "without.yaml", strings.Replace(text, "functions: [fw, dpi]", "functions: [dpi]", 1)), "--wait")
	flows()
	c.agent("r2", "")
	c.ready("r2")
	c.must("apply", "-f", other, "--wait")
	flows()

	s.finish()
	for _, d := range []*ticking{there, back} {
		if missing, double := d.finish(); len(missing)+len(double) > 0 {
			t.Errorf("%s: %d datagrams are missing, %d came twice", d.name, len(missing), len(double))
		}
	}
	got, err := c.refusals()
	must(t, err)
	for r, n := range got {
		if n != refusedBefore[r] {
			t.Errorf("refused: %v, %d times", r, n-refusedBefore[r])
		}
	}

	if r := c.must("node", "revoke", "r3", "--yes"); r.stdout != "chain web: blocked\n" {
		t.Error(r)
	}
	eventually(t, func() error {
		if r := c.must("get", "chains"); !strings.Contains(r.stdout, "its function dpi is on node r3, which was revoked") {
			return fmt.Errorf("%s", r)
		}
		if r := c.must("get", "nodes"); strings.Contains(r.stdout, "behind") {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
	before, err := c.refusals()
	must(t, err)
	c.isCutOff("h1", "h2", 3)
	after, err := c.refusals()
	must(t, err)
	r := refusal{Node: "r6", Reason: "unproven"}
	if n := after[r] - before[r]; n != 3 {
		t.Errorf("r6 refused %d packets as unproven, want 3; %v", n, after)
	}
}

// killAgent ends an agent with -9.
func (c *controlled) killAgent(name string) {
	p := c.agents[name]
	c.kill(&p)
}

// A lab with a controller of its own, by commands alone: agents have joined, an operator's command
// changes it, an agent that is started anew joins no second time, and nothing is left of it.
func TestALabWithAControllerByCommands(t *testing.T) {
	t.Parallel()
	file := write(t, "domain.yaml", paper)
	prefix, runDir := newPrefix(), newDir(t)
	sweep(t, prefix, runDir)
	in := func(cmd string, args ...string) []string {
		return append([]string{"lab", cmd, "--prefix", prefix, "--run-dir", runDir}, args...)
	}
	done := func(args ...string) result {
		t.Helper()
		r := run(t, args...)
		if r.code != 0 {
			t.Fatal(r)
		}
		return r
	}
	address := "unix:" + filepath.Join(runDir, prefix, "controller", "operators")
	if r := done(in("up", "-f", file, "--with-controller")...); !strings.Contains(r.stderr, "WAYSTAMP_CONTROLLER="+address) {
		t.Errorf("%s\nwant the controller's address", r)
	}
	l, err := lab.Open(runDir, prefix, nil)
	must(t, err)
	must(t, l.StopAgent(t.Context(), "r2"))
	must(t, l.StartAgent(t.Context(), "r2"))
	done("rotate", "--all", "--wait", "--controller", address)
	if r := done("get", "nodes", "--controller", address); strings.Count(r.stdout, "ready") != 4 {
		t.Errorf("%s\nwant four nodes ready", r)
	}
	// A packet of the core goes past the chain. Its egress refuses it, and the controller says why.
	run(t, in("exec", "r3", "--", "ping", "-c", "1", "-W", "1", "fc00:8::2")...)
	eventually(t, func() error {
		if r := done("watch", "--chain", "web", "--once", "--controller", address); !strings.Contains(r.stdout, "which chain web requires, came without proof") {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
	if r := done("describe", "chain", "web", "--controller", address); !strings.Contains(r.stdout, "unproven") || strings.Count(r.stdout, "ready") < 4 {
		t.Errorf("%s\nwant what was refused, and four nodes ready", r)
	}
	done(in("down")...)
	leavesNothing(t, runDir, prefix)
	if r := run(t, "get", "nodes", "--controller", address); r.code == 0 {
		t.Errorf("the controller of a lab that is down answers: %s", r)
	}
}

// The kernel dumps no memory of a controller, and shows it to no other process of its user: what it has in /proc is root's. Its key is a file as systemd makes
// a credential for a unit with User=: root's, and its user reads it by an access control list.
func TestAControllersMemoryIsNotDumped(t *testing.T) {
	t.Parallel()
	const nobody = 65534
	dir := newDir(t)
	must(t, os.Chown(dir, nobody, nobody))
	key := filepath.Join(dir, "seal.key")
	must(t, os.WriteFile(key, []byte(strings.Repeat("5e", 32)), 0o400))
	list := binary.LittleEndian.AppendUint32(nil, 2) // POSIX_ACL_XATTR_VERSION
	for _, e := range []struct {
		tag, permissions uint16
		id               uint32
	}{{0x01, 4, ^uint32(0)}, {0x02, 4, nobody}, {0x04, 0, ^uint32(0)}, {0x10, 4, ^uint32(0)}, {0x20, 0, ^uint32(0)}} {
		list = binary.LittleEndian.AppendUint16(list, e.tag)
		list = binary.LittleEndian.AppendUint16(list, e.permissions)
		list = binary.LittleEndian.AppendUint32(list, e.id)
	}
	must(t, unix.Setxattr(key, "system.posix_acl_access", list, 0))
	p := prepared(soon(t), t, []string{"controller", "--data", filepath.Join(dir, "data"), "--seal-key", key, "--listen", "unix:" + filepath.Join(dir, "operators")})
	p.cmd.Dir = "/"
	p.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	must(t, p.cmd.Start())
	eventually(t, func() error {
		if !strings.Contains(p.stdout.String(), `{"ready":true}`) {
			return fmt.Errorf("it is not ready: %s", p.stderr)
		}
		return nil
	})
	info, err := os.Stat(fmt.Sprintf("/proc/%d/environ", p.cmd.Process.Pid))
	must(t, err)
	if uid := info.Sys().(*syscall.Stat_t).Uid; uid != 0 {
		t.Errorf("what is in /proc of it belongs to user %d", uid)
	}
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if r := p.wait(); r.code != 0 {
		t.Error(r)
	}
}

// The disk of a node is full when its controller sends it a plan. The node refuses the plan and says why; the one before stays in force, and packets go on, also
// while its agent cannot start. The change is done once there is room.
func TestAChangeWaitsForANodeWhoseDiskIsFull(t *testing.T) {
	t.Parallel()
	c := buildControlled(t, paper)
	defer c.close()
	const full = "r3"
	dir := c.AgentDir(full)
	must(t, os.MkdirAll(dir, 0o755))
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=2m"))
	defer func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) }()
	c.start()
	for _, name := range c.nodes() {
		c.agent(name, strings.TrimSpace(c.must("node", "token", name).stdout))
	}
	c.must("apply", "-f", write(t, "domain.yaml", paper), "--wait")
	for _, name := range c.nodes() {
		c.ready(name)
	}
	c.reaches("h1", "h2")

	ballast := filepath.Join(dir, "ballast")
	fill := func() {
		t.Helper()
		f, err := os.OpenFile(ballast, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		must(t, err)
		defer f.Close()
		for err == nil {
			_, err = f.Write(make([]byte, 512))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	fill()
	since := c.counting(c.path("web", model.Forward))
	c.must("rotate", "--all")
	refuses := func() {
		t.Helper()
		eventually(t, func() error {
			r := c.must("get", "nodes")
			for line := range strings.Lines(r.stdout) {
				if strings.HasPrefix(line, full+" ") && strings.Contains(line, "refusing") && strings.Contains(line, "no space left on device") {
					return nil
				}
			}
			return fmt.Errorf("%s", r)
		})
	}
	refuses()
	c.reaches("h1", "h2")
	if since().frames() == 0 {
		t.Error("no frame went by the path before")
	}
	// An agent that starts writes its state before anything else. What the kernel has goes on without it.
	c.killAgent(full)
	c.agent(full, "")
	eventually(t, func() error {
		if said := c.agents[full].stderr.String(); !strings.Contains(said, "cannot start from its plan") || !strings.Contains(said, "no space left on device") {
			return fmt.Errorf("the agent says %s", said)
		}
		return nil
	})
	refuses()
	c.reaches("h1", "h2")

	must(t, os.Remove(ballast))
	within(t, patience, func() error { // the agent tries again by itself
		if r := c.must("get", "nodes"); strings.Count(r.stdout, " ready ") != len(c.nodes()) {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
	c.must("rotate", "--all", "--wait")
	c.reaches("h1", "h2")
}
