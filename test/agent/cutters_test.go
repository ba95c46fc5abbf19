package agent_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
)

func functionPlan(t *testing.T, functions bool) []byte {
	t.Helper()
	n := plan.Node{
		Name: "r1", Block: netip.MustParsePrefix("fc00::/48"), Address: netip.MustParseAddr("fc00:1::1"),
		Locator:    netip.MustParsePrefix("fc00:0:0:100::/56"),
		Interfaces: []model.Interface{{Name: "in", Role: model.RoleCore}},
	}
	if functions {
		n.Endpoints = []plan.Endpoint{{
			PathID: plan.PathID{Path: 1, Chain: "web", Scheme: model.SchemeKeyed}, SID: netip.MustParseAddr("fc00:0:0:101::"),
			Behaviour: model.BehaviourEndAD, Function: "fw", Sources: []netip.Addr{netip.MustParseAddr("fc00:1::9")}, Share: pot.Share{Position: 1, Key: pot.Key{1}},
		}}
		n.Proxies = []plan.Proxy{{Function: "fw", Proxy: model.Proxy{
			To: "fw", From: "fw", Segments: model.SegmentsCut, Cache: 100, Lifetime: time.Second,
		}}}
	}
	b, err := plan.EncodeNode(n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestCuttersComeAndGoWithFunctions(t *testing.T) {
	ns, err := host.Anonymous()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	n, err := host.Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	for _, name := range []string{"in", "fw"} {
		if err := errors.Join(n.AddVeth(host.Veth{Name: name, PeerName: name + "-peer"}), n.SetUp(name), n.SetUp(name+"-peer")); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(n.SetUp("lo"), n.AddAddress("lo", netip.MustParsePrefix("fc00:1::1/128"))); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cfg := agent.Config{
		PlanFile: filepath.Join(dir, "plan.json"), Instance: fmt.Sprintf("test-%d-%s", os.Getpid(), strings.ToLower(rand.Text()[:10])),
		RunDir: dir, StateDir: dir, Net: n, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	write := func(functions bool) {
		t.Helper()
		if err := errors.Join(os.WriteFile(cfg.PlanFile+".new", functionPlan(t, functions), 0o600), os.Rename(cfg.PlanFile+".new", cfg.PlanFile)); err != nil {
			t.Fatal(err)
		}
	}
	there := func() int {
		t.Helper()
		links, err := n.Links()
		if err != nil {
			t.Fatal(err)
		}
		count := 0
		for _, l := range links {
			if strings.HasPrefix(l.Name, "wscut") || strings.HasPrefix(l.Name, "wsback") {
				count++
			}
		}
		return count
	}

	// A name that is taken is said before anything is changed.
	if err := n.AddVeth(host.Veth{Name: "wsback1", PeerName: "theirs"}); err != nil {
		t.Fatal(err)
	}
	write(true)
	if err := agent.Run(t.Context(), cfg); !errors.Is(err, host.ErrForeignLink) {
		t.Errorf("got %v; want ErrForeignLink", err)
	}
	if there() != 1 {
		t.Error("cutters are left of an agent that could not start")
	}
	if err := n.DeleteLink("wsback1"); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx, cfg) }()
	c := agent.NewClient(agent.SocketPath(dir))
	defer c.Close()
	wait := func(generation int) api.Status {
		t.Helper()
		deadline := time.Now().Add(patience)
		for tick := time.NewTicker(10 * time.Millisecond); ; <-tick.C {
			s, err := c.Status(t.Context())
			if err == nil && s.Generation >= generation {
				return s
			}
			if time.Now().After(deadline) {
				t.Fatalf("generation %d does not come: %+v, %v", generation, s, err)
			}
		}
	}
	s := wait(1)
	if len(s.Interfaces) != 2 || s.Interfaces[1].Name != "fw" || !s.Interfaces[1].TC || there() != 4 || len(s.Problems) > 0 {
		t.Errorf("%d cutter devices, status %+v", there(), s)
	}
	if f, err := c.Functions(t.Context()); err != nil || len(f.Functions) != 1 || f.Functions[0].InFlight == nil {
		t.Errorf("functions %+v, %v", f, err)
	}
	write(false)
	wait(2)
	if there() != 0 {
		t.Error("cutters that no function needs are still there")
	}
	write(true)
	wait(3)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if there() != 4 {
		t.Error("the cutters are gone with the agent, though the data path needs them")
	}
	d, err := agent.Detach(cfg)
	if err != nil || d.Links != 4 {
		t.Errorf("detach: %+v, %v; want in, fw and two cutters", d, err)
	}
	if there() != 0 {
		t.Error("cutters are still there after detaching")
	}
}

// To try a plan in vain makes cutters and removes them, which is a change of links
// again: the agent must not live on that. The devices that it makes are counted by
// the kernel's numbers.
func TestPlanThatCannotBeYetIsTriedWithPauses(t *testing.T) {
	b := newBed(t)
	b.must(b.net.AddVeth(host.Veth{Name: "in", PeerName: "in-peer"}))
	b.write(functionPlan(t, false))
	b.start()
	b.write(functionPlan(t, true))
	b.log.Wait("the new plan is refused")

	index := func() int {
		b.must(b.net.AddVeth(host.Veth{Name: "probe", PeerName: "probe-peer"}))
		l, err := b.net.Link("probe")
		b.must(err)
		b.must(b.net.DeleteLink("probe"))
		return l.Index
	}
	const changes = 80
	start := time.Now() // before the first: it may take long
	first := index()
	last := first
	for range changes {
		last = index()
	}
	elapsed := time.Since(start)
	if made := last - first - 2*changes; made > 4*(2+int(elapsed/time.Second)) {
		t.Errorf("%d devices of cutters in %v, four for each time that the plan was tried", made, elapsed)
	}
	if n := b.log.Count("the new plan is refused"); n != 1 {
		t.Errorf("the same refusal was logged %d times", n)
	}
	b.must(b.net.AddVeth(host.Veth{Name: "fw", PeerName: "fw-peer"}))
	b.log.Wait("the new plan is in force")
}
