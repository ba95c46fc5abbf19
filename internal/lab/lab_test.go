package lab

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// The tests build real labs, and fail where they cannot: a test that did not
// run has shown nothing. The test binary is also the agent of these labs: what
// it does then depends on the name that it is called by (see fakeAgent).
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "agent" {
		fakeAgent(filepath.Base(os.Args[0]), os.Args[2:])
	}
	if len(os.Args) > 2 && os.Args[1] == "lab" && os.Args[2] == "inline" {
		fakeProgram(os.Args[3:])
	}
	if err := host.Require(host.FeatureNetAdmin, host.FeatureNamespaces, host.FeatureIPv6, host.FeatureVeth, host.FeatureSEG6Local); err != nil {
		fmt.Fprintln(os.Stderr, "internal/lab:", err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// paper is the network of the paper:
//
//	             r2 ---- r3
//	            /          \
//	h1 ---- r1              r6 ---- h2
//	            \          /
//	             r4 ---- r5        (r4, r5: not of the domain)
func paper() (model.Domain, model.Lab) {
	addr, prefix := netip.MustParseAddr, netip.MustParsePrefix
	node := func(n int, links ...string) model.Node {
		out := model.Node{
			Name:    fmt.Sprintf("r%d", n),
			Address: addr(fmt.Sprintf("fc00:%d::1", n)),
			Locator: prefix(fmt.Sprintf("fc00:0:0:%d00::/56", n)),
			CPUs:    4,
		}
		for _, l := range links {
			role := model.RoleCore
			if l[0] == 'h' {
				role = model.RoleEdge
			}
			out.Interfaces = append(out.Interfaces, model.Interface{Name: out.Name + "-" + l, Role: role, MTU: map[model.Role]int{model.RoleCore: 1700}[role]})
		}
		return out
	}
	d := model.Domain{
		Block: prefix("fc00::/48"),
		Nodes: []model.Node{
			node(1, "h1", "r2", "r4"), node(2, "r1", "r3"), node(3, "r2", "r6"), node(6, "h2", "r3", "r5"),
		},
		Functions: []model.Function{{Name: "fw", Node: "r2"}, {Name: "dpi", Node: "r3"}},
		Chains: []model.Chain{{
			Name: "web", Ingress: []string{"r1"}, Functions: []string{"fw", "dpi"}, Egress: "r6",
			Match: model.Match{Destination: prefix("fc00:8::/64")},
			Both:  true,
			Proof: model.Proof{Scheme: model.SchemeKeyed},
		}},
	}
	l := model.Lab{
		MTU: 1700,
		Hosts: []model.LabHost{
			{Name: "h1", Node: "r1", Prefix: prefix("fc00:7::/64")},
			{Name: "h2", Node: "r6", Prefix: prefix("fc00:8::/64")},
		},
		Routers: []model.LabRouter{
			{Name: "r4", Address: addr("fc00:4::1"), SIDs: []netip.Addr{addr("fc00:0:0:400::")}},
			{Name: "r5", Address: addr("fc00:5::1"), SIDs: []netip.Addr{addr("fc00:0:0:500::")}},
		},
		Links: []model.LabLink{
			{A: "r1", B: "r2"}, {A: "r2", B: "r3"}, {A: "r3", B: "r6"},
			{A: "r1", B: "r4"}, {A: "r4", B: "r5"}, {A: "r5", B: "r6"},
		},
	}
	return d, l
}

var (
	h1 = netip.MustParseAddr("fc00:7::2")
	h2 = netip.MustParseAddr("fc00:8::2")
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// patience is for what must come; nothing waits that long when all is well.
var patience = await.Limit(5 * time.Minute)

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// up builds the paper's network, and checks when the test ends that nothing of
// it is left.
func up(t *testing.T, c Config) *Lab {
	t.Helper()
	c.Domain, c.Lab = paper()
	return upOf(t, c)
}

// self is the test binary, which is also the programs of functions.
func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	must(t, err)
	return path
}

// upOf is up for another network.
func upOf(t *testing.T, c Config) *Lab {
	t.Helper()
	if c.RunDir == "" {
		c.RunDir = t.TempDir()
	}
	if c.WithoutAgents = c.Binary == ""; c.WithoutAgents {
		c.Binary = self(t)
	}
	l, err := Up(soon(t), c)
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		members := l.Members()
		if err := l.Down(ctx); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
		leavesNothing(t, c.RunDir, l.Prefix(), members)
	})
	return l
}

// leavesNothing checks that there is no namespace with the prefix, no agent that
// the members had, and no state.
func leavesNothing(t *testing.T, runDir, prefix string, members []Member) {
	t.Helper()
	for _, m := range members {
		if m.Program.Running() {
			t.Errorf("left: the program of %s, process %d", m.Name, m.Program.PID)
		}
		if m.Agent == nil || m.Agent.PID == 0 {
			continue
		}
		if f, err := (process{m.Agent.PID, m.Agent.Start}).open(); err != nil || f != nil {
			t.Errorf("left: the agent of %s, process %d (%v)", m.Name, m.Agent.PID, err)
		}
	}
	if names := namespaces(t, prefix+"-"); len(names) > 0 {
		t.Errorf("left: namespaces %v", names)
	}
	if labs, err := List(runDir); err != nil || slices.Contains(labs, prefix) {
		t.Errorf("left: %v in %s (%v)", labs, runDir, err)
	}
}

func namespaces(t *testing.T, prefix string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(host.NamespaceDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			out = append(out, e.Name())
		}
	}
	return out
}

func (l *Lab) mustNS(t *testing.T, name string) *host.NetNS {
	t.Helper()
	ns, err := l.NetNS(name)
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	return ns
}

func (l *Lab) mustNet(t *testing.T, name string) *host.Net {
	t.Helper()
	n, err := l.Net(name)
	must(t, err)
	t.Cleanup(func() { n.Close() })
	return n
}

func TestHostsReachEachOtherByRoutingAlone(t *testing.T) {
	t.Parallel()
	l := up(t, Config{})
	for _, c := range []struct {
		from string
		to   netip.Addr
	}{{"h1", h2}, {"h2", h1}, {"h1", netip.MustParseAddr("fc00:5::1")}, {"r2", netip.MustParseAddr("fc00:5::1")}} {
		r, err := Ping(soon(t), l.mustNS(t, c.from), c.to, PingConfig{Count: 3, Timeout: patience})
		must(t, err)
		if r.Sent != 3 || r.Received != 3 || len(r.RTTs) != 3 {
			t.Errorf("ping from %s to %s: %+v, want 3 answers", c.from, c.to, r)
		}
	}
	// Over r2 and r3: two times three requests and their answers. Over r4: what
	// went to r5 and back.
	for name, want := range map[string]int{"r2": 12, "r3": 12, "r4": 12, "r5": 0} {
		if got := forwarded(t, l, name); got != want {
			t.Errorf("%s forwarded %d packets, want %d", name, got, want)
		}
	}
	m, err := l.mustNet(t, "r1").Link("r1-r2")
	must(t, err)
	if m.MTU != 1700 {
		t.Errorf("MTU of r1-r2: got %d, want 1700", m.MTU)
	}
	if m, err = l.mustNet(t, "h1").Link("h1-r1"); err != nil || m.MTU != 1500 {
		t.Errorf("MTU of h1-r1: got %d, %v, want 1500", m.MTU, err)
	}
}

// forwarded reads how many IPv6 packets a member has forwarded.
func forwarded(t *testing.T, l *Lab, name string) (n int) {
	t.Helper()
	must(t, l.Do(name, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/snmp6")
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) == 2 && f[0] == "Ip6OutForwDatagrams" {
				fmt.Sscan(f[1], &n)
			}
		}
		return err
	}))
	return n
}

// The SIDs of r4 and r5 are the kernel's own End: a packet with a segment list
// over them must go their way.
func TestRoutersRunTheKernelsEnd(t *testing.T) {
	t.Parallel()
	l := up(t, Config{})
	// r6 takes what r5 sends it as the end of the list.
	r6 := l.mustNet(t, "r6")
	for _, kv := range [][2]string{{"net/ipv6/conf/all/seg6_enabled", "1"}, {"net/ipv6/conf/r6-r5/seg6_enabled", "1"}} {
		must(t, r6.SetSysctl(kv[0], kv[1]))
	}
	must(t, l.mustNet(t, "r1").ReplaceRoute(host.Route{
		Destination: netip.MustParsePrefix("fc00:8::/64"),
		Type:        host.RouteEncap,
		Segments: []netip.Addr{
			netip.MustParseAddr("fc00:0:0:400::"), netip.MustParseAddr("fc00:0:0:500::"), netip.MustParseAddr("fc00:6::1"),
		},
		Via:    netip.MustParseAddr("fe80::5"), // r4
		Device: "r1-r4",
		Source: netip.MustParseAddr("fc00:1::1"),
	}))
	before := forwarded(t, l, "r2")
	r, err := Ping(soon(t), l.mustNS(t, "h1"), h2, PingConfig{Count: 3, Timeout: patience})
	must(t, err)
	if r.Received != 3 {
		t.Errorf("over r4 and r5: %+v, want 3 answers", r)
	}
	for _, name := range []string{"r4", "r5"} {
		if got := forwarded(t, l, name); got < 3 {
			t.Errorf("%s forwarded %d packets, want the 3 requests", name, got)
		}
	}
	if got := forwarded(t, l, "r2") - before; got != 3 {
		t.Errorf("r2 forwarded %d packets, want the 3 answers and no request", got)
	}
	// Without the SID the same packets are lost: it is what carried them.
	must(t, l.mustNet(t, "r5").DeleteRoute(host.Route{Destination: netip.MustParsePrefix("fc00:0:0:500::/64"), Type: host.RouteEnd, Device: "r5-r4"}))
	r, err = Ping(soon(t), l.mustNS(t, "h1"), h2, PingConfig{Timeout: 100 * time.Millisecond})
	must(t, err)
	if r.Received != 0 {
		t.Errorf("without r5's SID: %+v, want no answer", r)
	}
}

func TestDownLeavesNothing(t *testing.T) {
	t.Parallel()
	c := Config{RunDir: t.TempDir()}
	l := up(t, c)
	if got := len(namespaces(t, l.Prefix()+"-")); got != 8 {
		t.Errorf("%d namespaces, want 8", got)
	}
	other, err := Open(c.RunDir, l.Prefix(), nil) // as another process would
	must(t, err)
	members := l.Members()
	must(t, other.Down(soon(t)))
	leavesNothing(t, c.RunDir, l.Prefix(), members)
	if err := other.Down(soon(t)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Down again: got %v, want %v", err, fs.ErrNotExist)
	}
	if _, err := Open(c.RunDir, l.Prefix(), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Open after Down: got %v, want %v", err, fs.ErrNotExist)
	}
}

// What is named like a lab's namespace, and is not, stays.
func TestDownLeavesAnothersNamespaceAlone(t *testing.T) {
	t.Parallel()
	l := up(t, Config{})
	m, err := l.Member("h1")
	must(t, err)
	must(t, l.deleteNamespace(m))
	foreign, err := host.New(m.Namespace)
	must(t, err)
	t.Cleanup(func() { foreign.Delete() })
	must(t, l.Down(soon(t)))
	ns, err := host.OpenNamed(m.Namespace)
	if err != nil {
		t.Fatalf("Down has deleted a namespace that it did not make: %v", err)
	}
	must(t, ns.Close())
	must(t, foreign.Delete())
}

// Who builds a lab has to take it away until it says otherwise, or Up has ended and
// the lab is not for itself.
func TestWhoseALabIs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	check := func(when string, own, orphans []string) {
		t.Helper()
		gotOwn, gotOrphans, err := Owned(dir)
		if err != nil || !slices.Equal(gotOwn, own) || !slices.Equal(gotOrphans, orphans) {
			t.Errorf("%s: own %v, orphans %v, %v; want %v, %v", when, gotOwn, gotOrphans, err, own, orphans)
		}
	}
	l, unlock, err := create(Config{RunDir: dir, Prefix: "ws-built"})
	must(t, err)
	defer unlock()
	check("while it is built", []string{"ws-built"}, nil)
	child := exec.Command("sleep", "inf")
	must(t, child.Start())
	p, err := findProcess(child.Process.Pid)
	must(t, err)
	must(t, l.update(func(s *state) { s.Owner = &Owner{p.pid, p.start} }))
	check("while another process has it", nil, nil)
	must(t, child.Process.Kill())
	child.Wait()
	check("when that has ended", nil, []string{"ws-built"})
	must(t, l.update(func(s *state) { s.Owner = &Owner{os.Getpid(), 1} }))
	check("of a process that had this one's number", nil, []string{"ws-built"})
	must(t, l.Keep())
	check("when it shall stay", nil, nil)
}

func TestTwoLabsAtOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	labs := make([]*Lab, 2)
	var both sync.WaitGroup
	d, world := paper()
	for i := range labs {
		both.Go(func() {
			var err error
			if labs[i], err = Up(soon(t), Config{Domain: d, Lab: world, RunDir: dir, WithoutAgents: true}); err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
	for _, l := range labs {
		if l != nil {
			t.Cleanup(func() { l.Down(context.Background()) })
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	if own, orphans, err := Owned(dir); err != nil || len(own)+len(orphans) > 0 {
		t.Errorf("labs that shall stay are own %v, orphans %v, %v", own, orphans, err)
	}
	for i, l := range labs {
		r, err := Ping(soon(t), l.mustNS(t, "h1"), h2, PingConfig{Count: 1, Timeout: patience})
		if err != nil || r.Received != 1 {
			t.Errorf("lab %d: %+v, %v", i, r, err)
		}
	}
	must(t, labs[0].Down(soon(t)))
	r, err := Ping(soon(t), labs[1].mustNS(t, "h1"), h2, PingConfig{Count: 1, Timeout: patience})
	if err != nil || r.Received != 1 {
		t.Errorf("the second lab, once the first is down: %+v, %v", r, err)
	}
	must(t, labs[1].Down(soon(t)))
	for _, l := range labs {
		leavesNothing(t, dir, l.Prefix(), l.Members())
	}
}

func TestPrefixes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d, world := paper()
	prefix := "wstest-" + randomPart()
	l := up(t, Config{RunDir: dir, Prefix: prefix})
	_, err := Up(soon(t), Config{Domain: d, Lab: world, RunDir: dir, Prefix: prefix, WithoutAgents: true})
	if !errors.Is(err, fs.ErrExist) || !strings.Contains(err.Error(), "waystamp lab down --prefix "+prefix) {
		t.Errorf("the same prefix again: got %v", err)
	}
	if r, err := Ping(soon(t), l.mustNS(t, "h1"), h2, PingConfig{Timeout: patience}); err != nil || r.Received != 1 {
		t.Errorf("the first lab of that prefix has suffered: %+v, %v", r, err)
	}
	for _, p := range []string{"../x", "a/b", "A", ".", strings.Repeat("a", 33)} {
		if _, err := Up(soon(t), Config{Domain: d, Lab: world, RunDir: dir, Prefix: p, WithoutAgents: true}); err == nil {
			t.Errorf("prefix %q: no error", p)
		}
	}
	if labs, err := List(dir); err != nil || !slices.Equal(labs, []string{prefix}) {
		t.Errorf("got labs %v, %v, want %s alone", labs, err, prefix)
	}
	if labs, err := List(filepath.Join(dir, "nothing")); err != nil || len(labs) != 0 {
		t.Errorf("in a directory that does not exist: %v, %v", labs, err)
	}
}

// A name that is taken stops the build half way.
func TestFailedUpLeavesNothing(t *testing.T) {
	t.Parallel()
	dir, prefix := t.TempDir(), "wstest-"+randomPart()
	foreign, err := host.New(prefix + "-r5")
	must(t, err)
	t.Cleanup(func() { foreign.Delete() })
	d, world := paper()
	_, err = Up(soon(t), Config{Domain: d, Lab: world, RunDir: dir, Prefix: prefix, WithoutAgents: true})
	if !errors.Is(err, fs.ErrExist) {
		t.Fatalf("got %v, want %v", err, fs.ErrExist)
	}
	if got := namespaces(t, prefix+"-"); !slices.Equal(got, []string{prefix + "-r5"}) {
		t.Errorf("left: %v, want what was there before alone", got)
	}
	must(t, foreign.Delete())
	leavesNothing(t, dir, prefix, nil)
}

// Cancelled at any step, Up leaves nothing.
func TestCancelledUpLeavesNothing(t *testing.T) {
	t.Parallel()
	d, world := paper()
	cancelled(t, Config{Domain: d, Lab: world}, 10)
}

// cancelled checks it for each step of building a lab, of which there are so
// many at least.
func cancelled(t *testing.T, c Config, least int) {
	t.Helper()
	enough := errors.New("enough")
	finished := false
	for steps := 0; !finished; steps++ {
		c.RunDir, c.Prefix, c.WithoutAgents = t.TempDir(), "wstest-"+randomPart(), true
		ctx := &endsAfter{Context: t.Context(), steps: steps, done: make(chan struct{}), err: enough}
		l, err := Up(ctx, c)
		switch {
		case err == nil:
			finished = true
			if steps < least {
				t.Errorf("Up looked at its context %d times only", steps)
			}
			must(t, l.Down(soon(t)))
		case !errors.Is(err, enough):
			t.Errorf("cancelled at step %d: got %v, want %v", steps, err, enough)
		}
		leavesNothing(t, c.RunDir, c.Prefix, nil)
		if t.Failed() {
			return
		}
		steps += 3 // each one takes a tenth of a second
	}
}

// endsAfter is a context that ends when it has been asked a number of times.
type endsAfter struct {
	context.Context
	mu    sync.Mutex
	steps int
	done  chan struct{}
	err   error
}

func (c *endsAfter) Done() <-chan struct{} { return c.done }

func (c *endsAfter) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.done:
		return c.err
	default:
	}
	if c.steps--; c.steps < 0 {
		close(c.done)
		return c.err
	}
	return nil
}

// A builder that was killed leaves what it had recorded.
func TestDownTakesAHalfBuiltLabAway(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(t *testing.T, l *Lab){
		"nothing but the directory": func(t *testing.T, l *Lab) { must(t, os.Remove(l.statePath())) },
		"recorded, not named": func(t *testing.T, l *Lab) {
			must(t, l.update(func(s *state) {
				s.Members = []Member{{Name: "h1", Role: RoleHost, Namespace: l.Prefix() + "-h1", Inode: 1}}
			}))
		},
		"one namespace": func(t *testing.T, l *Lab) {
			ns, err := host.Anonymous()
			must(t, err)
			must(t, l.update(func(s *state) {
				s.Members = []Member{{Name: "h1", Role: RoleHost, Namespace: l.Prefix() + "-h1", Inode: ns.Inode()}}
			}))
			must(t, ns.Publish(l.Prefix()+"-h1"))
			must(t, ns.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			l, unlock, err := create(Config{RunDir: dir, Log: discard})
			must(t, err)
			leave(t, l)
			other, err := Open(dir, l.Prefix(), nil)
			must(t, err)
			if err := other.Down(soon(t)); err == nil {
				t.Error("Down of a lab that is being built: no error")
			}
			unlock() // as the end of the process would
			must(t, other.Down(soon(t)))
			leavesNothing(t, dir, l.Prefix(), nil)
		})
	}
}

func TestPlansAreWrittenForTheirNodesOnly(t *testing.T) {
	t.Parallel()
	l := up(t, Config{})
	paths, err := l.Paths()
	must(t, err)
	if len(paths) != 2 {
		t.Errorf("%d paths, want 2", len(paths))
	}
	for _, name := range []string{"r1", "r2", "r3", "r6"} {
		n, err := l.NodePlan(name)
		must(t, err)
		if n.Name != name {
			t.Errorf("the plan of %s is %s's", name, n.Name)
		}
		for _, path := range []string{l.NodePlanPath(name), l.PathsPath(), l.statePath()} {
			st, err := os.Stat(path)
			must(t, err)
			if st.Mode().Perm() != 0o600 {
				t.Errorf("%s has mode %v, want 0600", path, st.Mode())
			}
		}
	}
	n, err := l.NodePlan("r1")
	must(t, err)
	n.Headends[0].Segments = slices.Clone(n.Headends[0].Segments)
	slices.Reverse(n.Headends[0].Segments)
	must(t, l.WriteNodePlan("r1", n))
	again, err := l.NodePlan("r1")
	must(t, err)
	if !slices.Equal(again.Headends[0].Segments, n.Headends[0].Segments) {
		t.Errorf("got segments %v, want %v", again.Headends[0].Segments, n.Headends[0].Segments)
	}
	if left, _ := filepath.Glob(filepath.Join(l.Dir(), "nodes", ".*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if err := l.WriteNodePlan("r1", plan.Node{}); err == nil {
		t.Error("a plan that is none was written")
	}
}

func TestCommandsRunInAMembersNamespace(t *testing.T) {
	t.Parallel()
	l := up(t, Config{})
	out, err := l.Run(soon(t), "r4", "readlink", "/proc/self/ns/net")
	must(t, err)
	m, err := l.Member("r4")
	must(t, err)
	if got, want := strings.TrimSpace(string(out)), fmt.Sprintf("net:[%d]", m.Inode); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if _, err := l.Run(soon(t), "r9", "true"); err == nil || !strings.Contains(err.Error(), "it has h1, h2, r1, r2, r3, r4, r5, r6") {
		t.Errorf("in r9: got %v, want an error that says what there is", err)
	}
}

// randomPart is the random part of a name.
func randomPart() string { return strings.ToLower(rand.Text()[:8]) }
