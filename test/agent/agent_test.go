package agent_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/test/logwatch"
)

func TestMain(m *testing.M) {
	if os.Getenv(childConfig) != "" {
		os.Exit(childAgent())
	}
	goleak.VerifyTestMain(m)
}

// patience is for what must come; nothing waits that long when all is well.
var patience = await.Limit(2 * time.Minute)

// bed is node r1 in a namespace of its own: ingress of chain "web" and egress
// of its reverse path.
type bed struct {
	*testing.T
	net   *host.Net
	peer  *host.Net // the host behind the edge interface r1-h1
	cfg   agent.Config
	log   *logwatch.Log
	nodes map[string]plan.Node
}

func newBed(t *testing.T) *bed {
	t.Helper()
	open := func() *host.Net {
		ns, err := host.Anonymous()
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		n, err := host.Open(ns)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close() })
		return n
	}
	dir := t.TempDir()
	b := &bed{T: t, net: open(), peer: open(), log: logwatch.New(t)}
	b.cfg = agent.Config{
		PlanFile: filepath.Join(dir, "plan", "r1.json"), Instance: fmt.Sprintf("test-%d-%s", os.Getpid(), strings.ToLower(rand.Text()[:10])),
		RunDir: filepath.Join(dir, "run"), StateDir: filepath.Join(dir, "state"),
		Log: slog.New(b.log), Net: b.net,
	}
	b.must(os.Mkdir(filepath.Dir(b.cfg.PlanFile), 0o700))
	b.must(b.net.AddVeth(host.Veth{Name: "r1-h1", PeerName: "h1-r1", Peer: b.peer.NetNS()}))
	b.must(b.net.AddVeth(host.Veth{Name: "r1-r2", PeerName: "r2-r1"}))
	b.must(errors.Join(b.net.SetUp("r1-h1"), b.peer.SetUp("h1-r1"), b.net.SetUp("r1-r2"), b.net.SetUp("r2-r1")))
	b.must(errors.Join(b.net.SetUp("lo"), b.net.AddAddress("lo", netip.MustParsePrefix("fc00:1::1/128"))))
	b.nodes = compile(t, nil)
	t.Cleanup(func() {
		if _, err := agent.Detach(b.cfg); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return b
}

// compile makes the plans of a domain with r1, r2 and r3.
func compile(t *testing.T, edit func(*model.Domain)) map[string]plan.Node {
	t.Helper()
	node := func(name string, n int, interfaces ...model.Interface) model.Node {
		return model.Node{
			Name: name, Address: netip.MustParseAddr(fmt.Sprintf("fc00:%d::1", n)),
			Locator: netip.MustParsePrefix(fmt.Sprintf("fc00:0:0:%d00::/56", n)), CPUs: 64, Interfaces: interfaces,
		}
	}
	edge := func(name string) model.Interface { return model.Interface{Name: name, Role: model.RoleEdge} }
	core := func(name string) model.Interface { return model.Interface{Name: name, Role: model.RoleCore} }
	d := model.Domain{
		Block: netip.MustParsePrefix("fc00::/48"),
		Nodes: []model.Node{
			node("r1", 1, edge("r1-h1"), core("r1-r2")),
			node("r2", 2, core("r2-r1"), core("r2-r3")),
			node("r3", 3, edge("r3-h3"), core("r3-r2")),
		},
		Functions: []model.Function{{Name: "fw", Node: "r2"}},
		Chains: []model.Chain{{
			Name: "web", Ingress: []string{"r1"}, Functions: []string{"fw"}, Egress: "r3", Both: true,
			Match: model.Match{Destination: netip.MustParsePrefix("2001:db8:3::/48")},
			Proof: model.Proof{Scheme: model.SchemeKeyed},
		}},
	}
	if edit != nil {
		edit(&d)
	}
	c, err := plan.Compile(d, plan.NewKeyring(rand.Reader, nil))
	if err != nil {
		t.Fatal(err)
	}
	nodes := map[string]plan.Node{}
	for _, n := range c.Nodes {
		nodes[n.Name] = n
	}
	return nodes
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// write puts a plan file in place as a controller would.
func (b *bed) write(content []byte) {
	b.Helper()
	b.must(os.WriteFile(b.cfg.PlanFile+".new", content, 0o600))
	b.must(os.Rename(b.cfg.PlanFile+".new", b.cfg.PlanFile))
}

func (b *bed) writePlan(n plan.Node) {
	b.Helper()
	content, err := plan.EncodeNode(n)
	b.must(err)
	b.write(content)
}

// running is an agent in this process.
type running struct {
	bed    *bed
	stop   context.CancelFunc
	ended  chan struct{}
	err    error
	client *agent.Client
}

// start runs an agent until it says that it is ready.
func (b *bed) start() *running {
	b.Helper()
	out, in := io.Pipe()
	cfg := b.cfg
	cfg.Stdout = in
	ctx, cancel := context.WithCancel(b.Context())
	r := &running{bed: b, stop: cancel, ended: make(chan struct{}), client: agent.NewClient(agent.SocketPath(cfg.RunDir))}
	b.Cleanup(func() { r.halt() })
	go func() {
		defer close(r.ended)
		r.err = agent.Run(ctx, cfg)
		in.CloseWithError(errors.New("the agent has ended"))
	}()
	s := bufio.NewScanner(out)
	if !s.Scan() {
		<-r.ended
		b.Fatalf("the agent is not ready: %v", r.err)
	}
	var said map[string]bool
	if err := json.Unmarshal(s.Bytes(), &said); err != nil || !said["ready"] {
		b.Fatalf("the agent says %q", s.Text())
	}
	return r
}

// halt ends the agent and returns what Run did.
func (r *running) halt() error {
	r.stop()
	r.client.Close()
	<-r.ended
	return r.err
}

func (r *running) status() api.Status {
	r.bed.Helper()
	s, err := r.client.Status(r.bed.Context())
	r.bed.must(err)
	return s
}

func (b *bed) locators() []netip.Prefix {
	b.Helper()
	l, err := b.net.Locators()
	b.must(err)
	return l
}

func TestAgentArmsWhatItsPlanSays(t *testing.T) {
	b := newBed(t)
	b.writePlan(b.nodes["r1"])
	r := b.start()
	s := r.status()
	if !s.Ready || s.Node != "r1" || s.Instance != b.cfg.Instance || s.Generation != 1 || s.Error != "" || len(s.Problems) != 0 {
		t.Errorf("status %+v", s)
	}
	if len(s.Interfaces) != 2 || !s.Interfaces[0].TC || !s.Interfaces[1].TC {
		t.Errorf("interfaces %+v", s.Interfaces)
	}
	if l := b.locators(); !slices.Equal(l, []netip.Prefix{b.nodes["r1"].Locator}) {
		t.Errorf("locators %v", l)
	}
	c, err := r.client.Counters(t.Context())
	b.must(err)
	if len(c.Paths) != 2 || c.Paths[0].Role != api.RoleHeadend || c.Paths[1].Role != api.RoleEgress || c.Node != "r1" {
		t.Errorf("counters %+v", c)
	}
	info, err := os.Stat(agent.SocketPath(b.cfg.RunDir))
	b.must(err)
	if info.Mode().Perm() != 0o660 {
		t.Errorf("socket has mode %o", info.Mode().Perm())
	}
}

func TestDataPathStaysWhenTheAgentEnds(t *testing.T) {
	b := newBed(t)
	b.writePlan(b.nodes["r1"])
	r := b.start()
	if err := r.halt(); err != nil {
		t.Fatalf("Run returned %v, want nil", err)
	}
	if !b.log.Has("stay in force") {
		t.Error("the agent did not say what stays")
	}
	if l := b.locators(); len(l) != 1 {
		t.Errorf("locators %v; want the route to stay", l)
	}
	if pins, _ := filepath.Glob(filepath.Join(dataplane.DefaultPinDir, b.cfg.Instance, "links", "*")); len(pins) != 3 {
		t.Errorf("links %v; want all three to stay", pins)
	}
	if _, err := os.Stat(agent.SocketPath(b.cfg.RunDir)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket stays: %v", err)
	}
	r = b.start()
	if s := r.status(); !s.Ready {
		t.Errorf("status of the next agent: %+v", s)
	}
}

func TestChangedPlanIsFollowed(t *testing.T) {
	b := newBed(t)
	b.writePlan(b.nodes["r1"])
	r := b.start()
	first := r.status()
	wider := compile(t, func(d *model.Domain) {
		d.Nodes[0].Locator = netip.MustParsePrefix("fc00:0:0:180::/57")
		d.Chains[0].Both = false
	})
	b.writePlan(wider["r1"])
	b.log.Wait("the new plan is in force")
	s := r.status()
	if s.Generation != 2 || s.Plan == first.Plan || s.Error != "" {
		t.Errorf("status %+v after %+v", s, first)
	}
	if l := b.locators(); !slices.Equal(l, []netip.Prefix{wider["r1"].Locator}) {
		t.Errorf("locators %v; want the new one only", l)
	}
	c, err := r.client.Counters(t.Context())
	b.must(err)
	if len(c.Paths) != 1 {
		t.Errorf("paths %+v; want the forward one only", c.Paths)
	}
}

// A plan that names an interface before it is there comes into force with it.
func TestRefusedPlanIsTriedAgainWhenAnInterfaceComes(t *testing.T) {
	b := newBed(t)
	b.writePlan(b.nodes["r1"])
	r := b.start()
	n := b.nodes["r1"]
	n.Interfaces = append(slices.Clone(n.Interfaces), model.Interface{Name: "late", Role: model.RoleCore})
	b.writePlan(n)
	b.log.Wait("the new plan is refused")
	b.must(b.net.AddVeth(host.Veth{Name: "late", PeerName: "late-peer"}))
	b.log.Wait("the new plan is in force")
	if s := r.status(); s.Error != "" || len(s.Interfaces) != 3 || !s.Interfaces[2].TC {
		t.Errorf("status %+v", s)
	}
}

// After a reboot nothing is in the kernel, and the latest plan does not go.
func TestPlanBeforeGuardsWhileTheLatestDoesNotGo(t *testing.T) {
	b := newBed(t)
	b.cfg.Fallback = b.cfg.PlanFile + ".before"
	b.writePlan(b.nodes["r1"])
	b.must(os.Rename(b.cfg.PlanFile, b.cfg.Fallback))
	n := b.nodes["r1"]
	n.Interfaces = append(slices.Clone(n.Interfaces), model.Interface{Name: "late", Role: model.RoleCore})
	b.writePlan(n)
	r := b.start()
	b.log.Wait("the new plan is refused")
	if s := r.status(); !strings.Contains(s.Error, "late") || len(s.Interfaces) != 2 || !s.Interfaces[0].TC || !s.Interfaces[1].TC {
		t.Errorf("status %+v; want the plan before in force, and the error", s)
	}
	b.must(b.net.AddVeth(host.Veth{Name: "late", PeerName: "late-peer"}))
	b.log.Wait("the new plan is in force")
	if s := r.status(); s.Error != "" || len(s.Interfaces) != 3 || !s.Interfaces[2].TC {
		t.Errorf("status %+v", s)
	}
}

func TestInterfaceThatIsMadeAnewIsGuardedAtOnce(t *testing.T) {
	b := newBed(t)
	b.writePlan(b.nodes["r1"])
	r := b.start()
	b.must(b.net.DeleteLink("r1-r2"))
	b.log.Wait("not completely")
	if s := r.status(); len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "r1-r2") || s.Interfaces[1].TC {
		t.Errorf("without its interface: %+v", s)
	}
	b.must(b.net.AddVeth(host.Veth{Name: "r1-r2", PeerName: "r2-r1"}))
	b.log.Wait("the plan is whole again")
	if s := r.status(); len(s.Problems) != 0 || !s.Interfaces[1].TC {
		t.Errorf("with a new one: %+v", s)
	}
}

func TestFirstPlanThatDoesNotGoLeavesNothing(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*bed)
		want string
	}{
		{"no file", func(b *bed) { b.must(os.Remove(b.cfg.PlanFile)) }, "no such file"},
		{"not a plan", func(b *bed) { b.write([]byte("{}")) }, "plan"},
		{"another node than named", func(b *bed) { b.cfg.Node = "r9" }, "the plan is for another node: r1; this is the agent of r9"},
		{"an interface that is not there", func(b *bed) { b.must(b.net.DeleteLink("r1-r2")) }, "interface r1-r2: there is no such interface"},
		{"a bad instance", func(b *bed) { b.cfg.Instance = "No/Good" }, "instance"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t)
			b.writePlan(b.nodes["r1"])
			instance := b.cfg.Instance
			c.edit(b)
			err := agent.Run(t.Context(), b.cfg)
			b.cfg.Instance = instance
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
			if l := b.locators(); len(l) != 0 {
				t.Errorf("locators %v", l)
			}
			if _, err := os.Stat(filepath.Join(dataplane.DefaultPinDir, instance)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("pins are there: %v", err)
			}
			if left, _ := filepath.Glob(filepath.Join(b.cfg.RunDir, "*")); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestSecondAgentIsRefused(t *testing.T) {
	b := newBed(t)
	b.writePlan(b.nodes["r1"])
	r := b.start()
	if err := agent.Run(t.Context(), b.cfg); !errors.Is(err, dataplane.ErrBusy) {
		t.Errorf("of the same instance: %v; want ErrBusy", err)
	}
	other := b.cfg
	other.Instance += "x"
	if err := agent.Run(t.Context(), other); err == nil || !strings.Contains(err.Error(), "another agent listens") {
		t.Errorf("of the same run directory: %v", err)
	}
	if _, err := agent.Detach(b.cfg); !errors.Is(err, dataplane.ErrBusy) {
		t.Errorf("detach under it: %v; want ErrBusy", err)
	}
	if s := r.status(); !s.Ready || !s.Interfaces[0].TC {
		t.Errorf("status %+v", s)
	}
}

func TestDetachNamesWhatIsUnguarded(t *testing.T) {
	b := newBed(t)
	b.writePlan(b.nodes["r1"])
	b.must(b.start().halt())
	would, err := agent.WouldDetach(b.cfg)
	b.must(err)
	done, err := agent.Detach(b.cfg)
	b.must(err)
	for _, d := range []agent.Detached{would, done} {
		if !slices.Equal(d.Unguarded, []string{"web (reverse)"}) || !slices.Equal(d.Locators, []netip.Prefix{b.nodes["r1"].Locator}) {
			t.Errorf("detached %+v", d)
		}
	}
	if done.Links != 3 || len(b.locators()) != 0 {
		t.Errorf("%d links, locators %v", done.Links, b.locators())
	}
	if left, _ := filepath.Glob(filepath.Join(b.cfg.RunDir, "*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := os.Stat(filepath.Join(b.cfg.StateDir, "counters.json")); err != nil {
		t.Errorf("the record of used numbers is gone: %v", err)
	}
	if again, err := agent.Detach(b.cfg); err != nil || again.Links != 0 {
		t.Errorf("detach of nothing: %+v, %v", again, err)
	}
}

// A packet from outside to the SID block, sent for real, comes out of the
// socket as a line.
func TestRefusedPacketIsStreamed(t *testing.T) {
	b := newBed(t)
	b.must(b.net.AddAddress("r1-h1", netip.MustParsePrefix("2001:db8:1::1/64")))
	b.must(b.peer.AddAddress("h1-r1", netip.MustParsePrefix("2001:db8:1::2/64")))
	b.must(b.peer.AddRoute(host.Route{Destination: netip.MustParsePrefix("fc00::/48"), Via: netip.MustParseAddr("2001:db8:1::1"), Device: "h1-r1"}))
	b.writePlan(b.nodes["r1"])
	r := b.start()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	b.must(b.peer.WaitUp(ctx, "h1-r1"))

	events := make(chan event.Event)
	ended := make(chan error, 1)
	go func() {
		ended <- r.client.Events(ctx, true, func(e event.Event) error {
			select {
			case events <- e:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	send := func() {
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
	for range 3 {
		send()
		select {
		case e := <-events:
			if e.Reason != "outside-sid" || e.Node != "r1" || e.Interface != "r1-h1" || len(e.Packet) != 14+40+8+5 {
				t.Errorf("event %+v", e)
			}
		case <-ctx.Done():
			t.Fatal("no event came")
		}
	}
	// Another reader gets what was, and ends.
	n := 0
	b.must(r.client.Events(ctx, false, func(event.Event) error { n++; return nil }))
	if n != 3 {
		t.Errorf("%d events are remembered, want 3", n)
	}
	b.must(r.halt())
	if err := <-ended; !errors.Is(err, io.EOF) {
		t.Errorf("the reader ends with %v, want io.EOF", err)
	}
}
