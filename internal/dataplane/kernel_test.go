package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// bed is a namespace with an edge interface "out" and core interfaces "in" and
// "side", and an instance for it. All of it goes with the test.
type bed struct {
	*testing.T
	net *host.Net
	cfg Config
}

func newBed(t *testing.T) *bed {
	t.Helper()
	t.Parallel()
	return newLonelyBed(t)
}

// newLonelyBed is for tests that look at the whole process.
func newLonelyBed(t *testing.T) *bed {
	t.Helper()
	ns, err := host.Anonymous()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	n, err := host.Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	b := &bed{T: t, net: n, cfg: Config{
		Instance: testInstance(), StateDir: t.TempDir(), Net: n,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}}
	for _, name := range []string{"out", "in", "side"} {
		b.addVeth(name)
	}
	// To other nodes there is a way, without which a headend gives out no number.
	b.must(errors.Join(
		b.net.SetSysctl("net/ipv6/conf/all/forwarding", "1"),
		b.net.AddRoute(host.Route{Destination: xtest.Prefix("fc00::/48"), Device: "side"}),
	))
	t.Cleanup(func() {
		c := b.cfg
		c.before = nil
		if _, err := b.detach(c); err != nil && !errors.Is(err, ErrNotThere) {
			t.Errorf("clean up: %v", err)
		}
		if _, err := os.Stat(b.dir()); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("clean up: %s is still there", b.dir())
		}
	})
	return b
}

func (b *bed) addVeth(name string) {
	b.Helper()
	if err := b.net.AddVeth(host.Veth{Name: name, PeerName: name + "-peer"}); err != nil {
		b.Fatal(err)
	}
	if err := errors.Join(b.net.SetUp(name), b.net.SetUp(name+"-peer")); err != nil {
		b.Fatal(err)
	}
}

// program is one of the generation at work, also if no plan has needed it. The
// caller sees to it that nothing else changes the data path, or is in a step of that.
func (d *Dataplane) program(name string) *ebpf.Program {
	if err := d.need(d.gen, []string{name}); err != nil {
		panic(err)
	}
	return d.gen.programs[name]
}

func (b *bed) dir() string {
	if b.cfg.PinDir != "" {
		return instanceDir(b.cfg.PinDir, b.cfg.Instance)
	}
	return instanceDir(DefaultPinDir, b.cfg.Instance)
}

// do runs f in the namespace.
func (b *bed) do(f func() error) error {
	b.Helper()
	return b.net.NetNS().Do(f)
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *bed) detach(c Config) (r Removed, err error) {
	err = b.do(func() error {
		var err error
		r, err = Detach(c)
		return err
	})
	return r, err
}

func (b *bed) tryOpen(c Config) (d *Dataplane, err error) {
	err = b.do(func() error {
		var err error
		d, err = Open(c)
		return err
	})
	return d, err
}

func (b *bed) open() *Dataplane {
	b.Helper()
	d, err := b.tryOpen(b.cfg)
	b.must(err)
	b.Cleanup(func() {
		if err := d.Close(); err != nil {
			b.Errorf("close: %v", err)
		}
	})
	return d
}

func (b *bed) apply(d *Dataplane, n plan.Node) error {
	b.Helper()
	return b.do(func() error { return d.Apply(n) })
}

// bedNode is a plan with a part in every role.
func bedNode() plan.Node {
	n := xtest.Node()
	n.Interfaces = []model.Interface{{Name: "out", Role: model.RoleEdge, Unmatched: model.UnmatchedDrop}, {Name: "in", Role: model.RoleCore}}
	n.Headends = []plan.Headend{xtest.HeadendOf(1, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:1::/48")}, 3)}
	n.Endpoints = []plan.Endpoint{xtest.EndpointOf(2, 0, model.SchemeOPoT, xtest.OwnSID(1))}
	n.Egresses = []plan.Egress{xtest.EgressOf(3, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:2::/48"), Source: xtest.Prefix("fd00::/8")}, xtest.OwnSID(2), 2)}
	return n
}

// otherNode is one that differs from bedNode in all tables and interfaces.
func otherNode() plan.Node {
	n := bedNode()
	n.Interfaces = []model.Interface{{Name: "in", Role: model.RoleEdge}, {Name: "side", Role: model.RoleCore, Datapath: model.DatapathXDP}}
	n.Headends = []plan.Headend{xtest.HeadendOf(4, 1, model.SchemeOPoT, model.Match{Source: xtest.Prefix("fd00:1::/32")}, 2)}
	n.Endpoints = []plan.Endpoint{xtest.EndpointOf(5, 0, model.SchemeKeyed, xtest.OwnSID(3))}
	n.Egresses = []plan.Egress{xtest.EgressOf(6, 0, model.SchemePoT, model.Match{Destination: xtest.Prefix("2001:db8::/32")}, xtest.OwnSID(4), 3)}
	return n
}

// elsewhere is bedNode with another locator, which needs programs of its own.
func elsewhere(n plan.Node) plan.Node {
	n.Locator = xtest.Prefix("fc00:0:0:100::/57")
	return n
}

// world is all that packets could tell of a data path, and its pins.
type world struct {
	Generations []string
	Links       map[string]uint32 // interface and hook to program
	Maps        []tables.Contents
	Counters    map[string]span
	Armed       []uint32
}

// numbersOf is how far a headend has counted.
func numbersOf(t interface {
	Helper()
	Fatal(...any)
}, g *generation, h abi.Headend) span {
	t.Helper()
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		t.Fatal(err)
	}
	in, err := openSlabs(numberSlabs(cpus), "", g)
	if err != nil {
		t.Fatal(err)
	}
	defer in.close()
	return in.readNumbers(h.Counter)
}

func (b *bed) world() world {
	b.Helper()
	w := world{Links: map[string]uint32{}, Counters: map[string]span{}}
	whole, unfinished, err := generationDirs(b.dir())
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	b.must(err)
	w.Generations = append(whole, unfinished...)
	for _, name := range w.Generations {
		g := &generation{dir: filepath.Join(b.dir(), name)}
		b.must(g.load())
		t, err := g.read()
		b.must(err)
		w.Maps = append(w.Maps, t)
		for i, h := range t.Headends {
			w.Counters[fmt.Sprintf("%s %d", name, i)] = numbersOf(b, g, h)
		}
		var armed abi.Node
		b.must(g.maps[tables.MapNode].Lookup(uint32(0), &armed))
		w.Armed = append(w.Armed, armed.Armed)
		b.must(g.close())
	}
	b.must(b.do(func() error {
		for _, name := range []string{"out", "in", "side"} {
			dev, err := b.cfg.Net.Device(name)
			if err != nil {
				continue
			}
			for where, egress := range map[string]bool{"tc": false, "out": true} {
				for i, p := range b.programsAt(dev.Index, egress) {
					w.Links[fmt.Sprintf("%s %s %d", name, where, i)] = p
				}
			}
		}
		return nil
	}))
	pins, err := heldPins(b.dir())
	b.must(err)
	for _, p := range pins {
		b.must(b.do(func() error {
			h, err := p.open(b.cfg)
			if err != nil {
				return err
			}
			_, id, err := h.state()
			w.Links[filepath.Base(p.path)] = uint32(id)
			return errors.Join(err, h.close())
		}))
	}
	return w
}

// programsAt are the programs at an end of an interface in the order in which packets
// meet them: those of tcx, then those of clsact.
func (b *bed) programsAt(index int, egress bool) (out []uint32) {
	b.Helper()
	at := ebpf.AttachTCXIngress
	if egress {
		at = ebpf.AttachTCXEgress
	}
	b.must(b.do(func() error {
		q, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at})
		if errors.Is(err, unix.EINVAL) { // before Linux 6.6
			return nil
		}
		if err != nil {
			return err
		}
		for _, p := range q.Programs {
			out = append(out, uint32(p.ID))
		}
		return nil
	}))
	filters, err := b.net.Filters(index, egress)
	b.must(err)
	for _, f := range filters {
		out = append(out, f.Program)
	}
	return out
}

// netWith is a network whose devices are not quite what they are.
type netWith struct {
	Net
	device func(name string) (host.Device, error)
}

func (n netWith) Device(name string) (host.Device, error) { return n.device(name) }

// attachOther puts somebody else's program at an end of an interface, before or behind
// those that are there, by the way that the kernel has, or by clsact. The other
// program goes when the test ends, or when it is taken off.
func attachOther(n *host.Net, p *ebpf.Program, index int, egress, first, clsact bool) (off func() error, err error) {
	at, anchor := ebpf.AttachTCXIngress, link.Tail()
	if egress {
		at = ebpf.AttachTCXEgress
	}
	if first {
		anchor = link.Head()
	}
	if !clsact {
		l, err := link.AttachTCX(link.TCXOptions{Program: p, Attach: at, Interface: index, Anchor: anchor})
		if err == nil {
			return l.Close, nil
		}
		if !errors.Is(err, link.ErrNotSupported) {
			return nil, err
		}
	}
	f := host.Filter{Preference: 1, Name: "other"} // no other comes before
	if !first {
		f.Preference++
	}
	list, err := n.Filters(index, egress)
	if err != nil {
		return nil, err
	}
	f.Handle = uint32(len(list)) + 1
	if !first { // the newest of a preference is met first
		f.Preference += uint16(len(list))
	}
	return func() error { return n.RemoveFilter(index, egress, f) }, n.SetFilter(index, egress, f, p.FD(), true)
}

func diffWorlds(a, b world) string {
	return cmp.Diff(a, b, cmp.AllowUnexported(tables.Contents{}, world{}, span{}))
}

func TestDataPathOutlivesItsProcess(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	before := b.world()
	if len(before.Generations) != 1 || before.Armed[0] != 1 || len(before.Links) != 6 {
		t.Fatalf("after a start: %+v", before)
	}
	b.must(d.Close())
	if diff := diffWorlds(before, b.world()); diff != "" {
		t.Errorf("closing has changed something:\n%s", diff)
	}
	d = b.open()
	b.must(b.apply(d, bedNode()))
	if diff := diffWorlds(before, b.world()); diff != "" {
		t.Errorf("taking it over has changed something:\n%s", diff)
	}
}

func TestProgramOfEachRoleIsOnItsInterfaceAndFirst(t *testing.T) {
	b := newBed(t)
	// Somebody else's program is there already.
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Name: "other", License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	b.must(err)
	defer other.Close()
	b.must(b.do(func() error {
		dev, err := b.cfg.Net.Device("in")
		if err != nil {
			return err
		}
		off, err := attachOther(b.net, other, dev.Index, false, true, false)
		t.Cleanup(func() { off() })
		return err
	}))
	d := b.open()
	b.must(b.apply(d, bedNode()))
	w := b.world()
	for place, program := range map[string]string{"out tc 0": object.EdgeTC, "out out 0": object.EdgeOutTC, "in tc 0": object.CoreTC, "in tc 1": "other"} {
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(w.Links[place]))
		if err != nil {
			t.Errorf("%s: %v", place, err)
			continue
		}
		info, err := p.Info()
		b.must(err)
		if info.Name != program {
			t.Errorf("%s is %s, want %s", place, info.Name, program)
		}
		p.Close()
	}
	states, err := d.Interfaces()
	b.must(err)
	want := []InterfaceState{
		{Name: "out", Role: model.RoleEdge, Unmatched: "drop", TC: true, Out: true, Clsact: d.Clsact()},
		{Name: "in", Role: model.RoleCore, TC: true, Clsact: d.Clsact()},
	}
	if diff := cmp.Diff(want, states); diff != "" {
		t.Errorf("interfaces: %s", diff)
	}
}

// Somebody puts a program before ours later: the plan stays in force, and whoever
// asks is told.
func TestProgramBeforeOursIsReported(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Name: "other", License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	b.must(err)
	defer other.Close()
	for _, c := range []struct {
		dev    string
		egress bool
		want   string
	}{
		{"in", false, `interface in: program \d+ \(other\) stands before waystamp's at TC ingress`},
		{"out", true, `interface out: program \d+ \(other\) stands before waystamp's at TC egress`},
	} {
		var off func() error
		b.must(b.do(func() error {
			dev, err := b.cfg.Net.Device(c.dev)
			if err != nil {
				return err
			}
			off, err = attachOther(b.net, other, dev.Index, c.egress, true, b.cfg.clsact)
			return err
		}))
		degraded, ok := errors.AsType[*DegradedError](b.do(d.Reconcile))
		if !ok || len(degraded.Problems) != 1 || !regexp.MustCompile(c.want).MatchString(degraded.Error()) {
			t.Errorf("%s: %v; want one problem: %s", c.dev, degraded, c.want)
		}
		b.must(off())
		if err := b.do(d.Reconcile); err != nil {
			t.Errorf("%s, when it has gone: %v", c.dev, err)
		}
	}
}

// A second instance on the same interfaces would stamp each packet once more, with
// numbers that the first has used. It is refused before anything has changed, by
// the name of the other; where the other is not, it may be.
func TestInterfaceIsOfOneInstance(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	before := b.world()

	second := b.cfg
	second.Instance, second.StateDir = testInstance(), t.TempDir()
	var s *Dataplane
	b.must(b.do(func() (err error) { s, err = Open(second); return err }))
	t.Cleanup(func() {
		closed := s.Close()
		_, err := b.detach(second)
		if err := errors.Join(closed, err); err != nil && !errors.Is(err, ErrNotThere) {
			t.Errorf("clean up: %v", err)
		}
	})
	err := b.apply(s, bedNode())
	for _, dev := range []string{"out", "in"} {
		if want := fmt.Sprintf("interface %s: program ", dev); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	if want := "--detach --instance " + b.cfg.Instance + " --yes"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
	if diff := diffWorlds(before, b.world()); diff != "" {
		t.Errorf("the refused instance has changed something:\n%s", diff)
	}
	// The first goes on, also when it is started again.
	b.must(b.do(d.Reconcile))
	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, bedNode()))
	b.must(d.Close())
	_, err = b.detach(b.cfg)
	b.must(err)
	b.must(b.apply(s, bedNode()))
}

func TestPlanChangesInPlace(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	first := b.world()
	b.must(b.apply(d, otherNode()))
	w := b.world()
	if !slices.Equal(w.Generations, first.Generations) {
		t.Errorf("generations %v after %v; a new plan needs no new programs", w.Generations, first.Generations)
	}
	want, err := tables.Desire(otherNode(), tables.Wiring{Ports: w.Maps[0].Ports}, nil, w.Maps[0], tables.RecoverIndexes(w.Maps[0], d.gen.limits, xtest.PlacedBy(w.Maps[0])))
	b.must(err)
	if !xtest.EqualTables(want.Contents, w.Maps[0]) {
		t.Error("the maps do not hold the new plan, the whole of it and nothing else")
	}
	if len(w.Maps[0].Ports) != 2 {
		t.Errorf("ports %v, want those of in and side", w.Maps[0].Ports)
	}
	states, err := d.Interfaces()
	b.must(err)
	if len(states) != 2 || !states[0].TC || states[0].XDP || !states[1].TC || !states[1].XDP {
		t.Errorf("interfaces %+v", states)
	}
	if _, still := w.Links["out tc 0"]; still {
		t.Error("the program is still on an interface that the plan no longer has")
	}
	b.must(b.apply(d, bedNode()))
	w = b.world()
	if w.Links["in tc 0"] != first.Links["in tc 0"] || w.Links["out tc 0"] != first.Links["out tc 0"] || len(w.Links) != len(first.Links) {
		t.Errorf("links %v after going back, want %v", w.Links, first.Links)
	}
}

func TestOtherLocatorGetsNewProgramsOnTheSameLinks(t *testing.T) {
	b := newBed(t)
	d := b.open()
	n := bedNode()
	n.Interfaces[1].Datapath = model.DatapathXDP
	b.must(b.apply(d, n))
	b.runEdge(d, plainPacket("fd00::1", "fc00:0:0:101::")) // refused: outside-sid
	links := map[linkKey]string{}
	for k, a := range d.links {
		links[k] = b.identity(a)
	}
	first := b.world()

	b.must(b.apply(d, elsewhere(n)))
	w := b.world()
	if len(w.Generations) != 1 || w.Generations[0] == first.Generations[0] {
		t.Fatalf("generations %v after %v; want one new", w.Generations, first.Generations)
	}
	for k, a := range d.links {
		if now := b.identity(a); now != links[k] {
			t.Errorf("%v: %s has been replaced by %s; in between there was none", k, links[k], now)
		}
	}
	for name, id := range w.Links {
		if id == first.Links[name] {
			t.Errorf("%s still has the old program", name)
		}
	}
	if old, now := one(t, first.Counters), one(t, w.Counters); now != old {
		t.Errorf("numbers are %+v; want %+v, which they were", now, old)
	}
	c, err := d.Counters()
	b.must(err)
	if len(c.Refusals) != 1 || c.Refusals[0].Reason != abi.ReasonOutsideSID || c.Refusals[0].Dropped != 1 {
		t.Errorf("refusals %+v; want the one from before", c.Refusals)
	}
}

// identity tells links apart. A filter has none; see TestFiltersHoldPrograms.
func (b *bed) identity(a *attached) string {
	b.Helper()
	l, ok := a.holding.(linkHolding)
	if !ok {
		return "a filter"
	}
	info, err := l.Info()
	b.must(err)
	return fmt.Sprintf("link %d", info.ID)
}

func one[K comparable, V any](t *testing.T, m map[K]V) V {
	t.Helper()
	if len(m) != 1 {
		t.Fatalf("%d entries, want one: %v", len(m), m)
	}
	for _, v := range m {
		return v
	}
	panic("unreachable")
}

func TestManyMoreChainsGetLargerArraysAndKeepCounting(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	b.runEdge(d, plainPacket("fd00::1", "2001:db8:1::1")) // stamped by the headend, whatever becomes of it
	before, err := d.Counters()
	b.must(err)
	if before.Paths[0].Packets != 1 {
		t.Fatalf("counters %+v; want one packet stamped", before.Paths)
	}
	n := bedNode()
	for i := range 300 {
		a := xtest.Addr("2001:db8:ffff::").As16()
		a[6], a[7] = byte(i>>8), byte(i)
		m := model.Match{Destination: xtest.Prefix(netipAddr(a) + "/64")}
		n.Headends = append(n.Headends, xtest.HeadendOf(uint32(1000+i), 0, model.SchemeKeyed, m, 2))
	}
	b.must(b.apply(d, n))
	if d.gen.limits.Headends < 301 || d.gen.limits.Stats < 303 || d.gen.seq != 2 {
		t.Errorf("limits %+v, generation %d", d.gen.limits, d.gen.seq)
	}
	if got := len(b.world().Maps[0].Headends); got != 301 {
		t.Errorf("%d headends, want 301", got)
	}
	// Fewer again: no reason for smaller ones.
	b.must(b.apply(d, bedNode()))
	if d.gen.seq != 2 {
		t.Errorf("generation %d for a smaller plan, want the same", d.gen.seq)
	}
}

func netipAddr(a [16]byte) string { return netip.AddrFrom16(a).String() }

// breaker breaks off at the n-th step of a kind.
type breaker struct {
	count map[string]int // steps of each kind since reset
	kind  string
	nth   int
	fail  func() error
}

func (k *breaker) reset(kind string, nth int) { k.count, k.kind, k.nth = map[string]int{}, kind, nth }

func (k *breaker) before(step, _ string) error {
	k.count[step]++
	if step == k.kind && k.count[step] == k.nth {
		return k.fail()
	}
	return nil
}

// Each kind of step, the first and the last time that it is taken.
func TestFailureAtAnyStepLeavesWhatWasThere(t *testing.T) {
	build := []string{stepCreateMap, stepLoad, stepPin, stepWriteNumber, stepChange, stepArm, stepCommit}
	for _, c := range []struct {
		name  string
		first bool // nothing is there before, else bedNode is in force
		to    plan.Node
		kinds []string // in their order
	}{
		{"first start", true, bedNode(), append(build, stepLinkAttach)},
		{"new plan", false, otherNode(), []string{stepWriteNumber, stepChange, stepArm, stepLinkUpdate, stepLinkAttach}},
		{"new generation", false, elsewhere(otherNode()), append(build, stepLinkUpdate, stepLinkAttach)},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t)
			broken := errors.New("broken off by the test")
			k := &breaker{fail: func() error { return broken }}
			k.reset("", 0)
			b.cfg.before = k.before
			d := b.open()
			if !c.first {
				b.must(b.apply(d, bedNode()))
			}
			before := b.world()
			try := func(kind string, nth int) {
				t.Helper()
				k.reset(kind, nth)
				if err := b.apply(d, c.to); !errors.Is(err, broken) || errors.As(err, new(*DegradedError)) {
					t.Fatalf("broken off at %q, time %d: got %v; want the test's error", kind, nth, err)
				}
				if diff := diffWorlds(before, b.world()); diff != "" {
					t.Fatalf("broken off at %q, time %d: something has changed:\n%s", kind, nth, diff)
				}
			}
			for _, kind := range c.kinds {
				try(kind, 1)
			}
			// What came before the last kind is known now.
			last := k.count
			last[c.kinds[len(c.kinds)-1]] = 1
			if slices.Contains(c.kinds, stepLinkAttach) {
				last[stepLinkAttach] = 2
			}
			for _, kind := range c.kinds {
				if last[kind] > 1 {
					try(kind, last[kind])
				}
			}
			// And it is not stuck.
			k.reset("", 0)
			b.must(b.apply(d, c.to))
		})
	}
}

// A process that dies takes nothing back.
func TestDeathAtAnyStepIsMendedByTheNextProcess(t *testing.T) {
	for _, c := range []struct {
		kind string
		nth  int
	}{
		{stepCreateMap, 3}, {stepLoad, 2}, {stepPin, 18}, {stepReserve, 1}, {stepWriteNumber, 1}, {stepChange, 5},
		{stepArm, 1}, {stepCommit, 1}, {stepLinkUpdate, 1}, {stepLinkAttach, 1}, {stepLinkAttach, 2}, {stepLinkDetach, 1}, {stepRemoveOld, 1},
	} {
		t.Run(fmt.Sprint(c.kind, " ", c.nth), func(t *testing.T) {
			b := newBed(t)
			type died struct{}
			k := &breaker{fail: func() error { panic(died{}) }}
			k.reset("", 0)
			cfg := b.cfg
			cfg.before = k.before
			d, err := b.tryOpen(cfg)
			b.must(err)
			b.must(b.apply(d, bedNode()))
			n := elsewhere(otherNode())
			k.reset(c.kind, c.nth)
			b.must(b.do(func() (err error) {
				defer func() {
					if r := recover(); r != any(died{}) {
						t.Errorf("it did not die but %v: %v", r, err)
					}
				}()
				return d.Apply(n)
			}))
			b.must(d.kill())

			next := b.open()
			if w := b.world(); w.Links["in tc 0"] == 0 {
				t.Fatalf("an interface of both plans is unguarded: %v", w.Links)
			}
			b.must(b.apply(next, n))
			w := b.world()
			if len(w.Generations) != 1 || w.Armed[0] != 1 {
				t.Fatalf("generations %v, armed %v", w.Generations, w.Armed)
			}
			want, err := tables.Desire(n, tables.Wiring{Ports: w.Maps[0].Ports, Reach: next.topology.reach, Cpus: next.cpus}, nil, w.Maps[0], tables.RecoverIndexes(w.Maps[0], next.gen.limits, xtest.PlacedBy(w.Maps[0])))
			b.must(err)
			if !xtest.EqualTables(want.Contents, w.Maps[0]) {
				t.Fatal("the maps do not hold the plan")
			}
			for name := range w.Links {
				if strings.HasPrefix(name, "out ") { // the interface
					t.Errorf("%s is still attached", name)
				}
			}
		})
	}
}

// kill lets go of everything as the death of the process would.
func (d *Dataplane) kill() error {
	d.mu.TryLock() // whoever died held it
	d.mu.Unlock()
	var errs []error
	errs = append(errs, d.events.close())
	for _, l := range d.links {
		errs = append(errs, l.close())
	}
	return errors.Join(append(errs, d.gen.close(), d.lock.Close())...)
}

func TestMissingInterfaceIsNamedBeforeAnythingIsChanged(t *testing.T) {
	b := newBed(t)
	d := b.open()
	n := bedNode()
	n.Interfaces = append(n.Interfaces, model.Interface{Name: "gone", Role: model.RoleCore})
	err := b.apply(d, n)
	if !errors.Is(err, host.ErrNoLink) || !strings.Contains(err.Error(), "interface gone") {
		t.Errorf("got %v; want an error that names the interface", err)
	}
	b.must(b.apply(d, bedNode()))
	before := b.world()
	if err := b.apply(d, n); !errors.Is(err, host.ErrNoLink) {
		t.Errorf("got %v", err)
	}
	if diff := diffWorlds(before, b.world()); diff != "" {
		t.Errorf("a refused plan has changed something:\n%s", diff)
	}
}

func TestSecondProcessIsRefused(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	if _, err := b.tryOpen(b.cfg); !errors.Is(err, ErrBusy) || !strings.Contains(fmt.Sprint(err), fmt.Sprintf("(process %d); stop that agent first", os.Getpid())) {
		t.Errorf("a second process: %v; want ErrBusy, and who holds it", err)
	}
	if _, err := b.detach(b.cfg); !errors.Is(err, ErrBusy) {
		t.Errorf("detach under a running process: %v; want ErrBusy", err)
	}
	if len(b.world().Links) != 6 {
		t.Error("it has changed something")
	}
}

func TestInstanceOfAnotherNamespaceIsRefused(t *testing.T) {
	a := newBed(t)
	d := a.open()
	a.must(a.apply(d, bedNode()))
	a.must(d.Close())
	b := newLonelyBed(t)
	cfg := b.cfg
	cfg.Instance = a.cfg.Instance
	_, err := b.tryOpen(cfg)
	if err == nil || !strings.Contains(err.Error(), "another network namespace") {
		t.Errorf("got %v", err)
	}
	if len(a.world().Links) != 6 {
		t.Error("it has changed something")
	}
}

func TestDetachLeavesNothing(t *testing.T) {
	b := newBed(t)
	d := b.open()
	n := bedNode()
	n.Interfaces[1].Datapath = model.DatapathXDP
	b.must(b.apply(d, n))
	b.runEdge(d, plainPacket("fd00::1", "2001:db8:1::1"))
	b.must(d.Close())
	r, err := b.detach(b.cfg)
	b.must(err)
	if r.Links != 4 || !slices.Equal(r.Unguarded, []uint32{3}) {
		t.Errorf("removed %+v; want 4 links, path 3 unguarded", r)
	}
	if w := b.world(); len(w.Links) != 0 {
		t.Errorf("still attached: %v", w.Links)
	}
	if _, err := os.Stat(b.dir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is still there", b.dir())
	}
	if _, err := b.detach(b.cfg); !errors.Is(err, ErrNotThere) {
		t.Errorf("detach of nothing: %v; want ErrNotThere", err)
	}
	// The headend gave out one number; the rest was given back.
	if s := reserveOne(t, b.cfg.StateDir, tables.CounterKey{Path: abi.BE32(1), Epoch: 0}); s.start != 1 {
		t.Errorf("the next numbers start after %d, want after 1", s.start)
	}
}

func TestDetachWorksOnABrokenDataPath(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(dir string) error
	}{
		{"a map's pin is gone", func(dir string) error { return os.Remove(filepath.Join(dir, "ws_hops")) }},
		{"a program's pin is gone", func(dir string) error { return os.Remove(filepath.Join(dir, object.CoreTC)) }},
		{"the generation is gone", os.RemoveAll},
		{"another generation is half built", func(dir string) error { return os.Mkdir(filepath.Join(filepath.Dir(dir), "new-HALF"), 0o700) }},
		{"something strange is there", func(dir string) error {
			return os.Mkdir(filepath.Join(linksDir(filepath.Dir(dir)), "tc-strange"), 0o700)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t)
			d := b.open()
			b.must(b.apply(d, bedNode()))
			dir := d.gen.dir
			b.must(d.Close())
			b.must(c.spoil(dir))
			if _, err := b.detach(b.cfg); err != nil {
				t.Error(err)
			}
			if w := b.world(); len(w.Links) != 0 {
				t.Errorf("still attached: %v", w.Links)
			}
		})
	}
}

func TestBrokenPinsAreReplacedWithoutAGap(t *testing.T) {
	for _, pin := range []string{"ws_hops", object.EdgeTC} {
		t.Run(pin, func(t *testing.T) {
			b := newBed(t)
			d := b.open()
			b.must(b.apply(d, bedNode()))
			b.runEdge(d, plainPacket("fd00::1", "2001:db8:1::1"))
			before := one(t, b.world().Counters)
			if before.start != 1 {
				t.Fatalf("numbers %+v after one packet", before)
			}
			dir := d.gen.dir
			b.must(d.Close())
			b.must(os.Remove(filepath.Join(dir, pin)))
			d = b.open()
			if len(d.links) != 3 {
				t.Fatalf("%d links after opening; want all three still there", len(d.links))
			}
			b.must(b.apply(d, bedNode()))
			w := b.world()
			if len(w.Generations) != 1 || w.Armed[0] != 1 {
				t.Errorf("generations %v, armed %v", w.Generations, w.Armed)
			}
			if c := one(t, w.Counters); c != before {
				t.Errorf("numbers are %+v; want %+v, which they were", c, before)
			}
		})
	}
}

func TestReconcileRepairsWhatOthersHaveDone(t *testing.T) {
	b := newBed(t)
	d := b.open()
	n := bedNode()
	b.must(b.apply(d, n))
	before := b.world()

	foreign := tables.EncodeHopKey(xtest.OwnSID(77), 99, 0)
	b.must(d.run(d.gen, []tables.Op{{Table: tables.MapHops, Key: &foreign, Value: &abi.Hop{Of: foreign, Behaviour: 1}}}))
	b.must(d.gen.putPrefixes(abi.MatchUseRequire, tables.Prefixes{}))
	b.must(d.gen.maps[tables.MapNode].Put(uint32(0), abi.Node{}))
	b.must(os.Remove(filepath.Join(d.gen.dir, "ws_egresses")))
	for _, a := range d.links {
		b.must(os.Remove(a.path))
	}
	b.must(b.do(d.Reconcile))
	if diff := diffWorlds(before, b.world()); diff != "" {
		t.Errorf("not repaired:\n%s", diff)
	}
	b.must(d.gen.putPrefixes(abi.MatchUseRequire, tables.Prefixes{}))
	b.must(b.apply(d, n)) // whoever applies the same plan again wants all of it in force
	if diff := diffWorlds(before, b.world()); diff != "" {
		t.Errorf("not repaired by the same plan:\n%s", diff)
	}
}

func TestInterfaceThatComesBackIsGuardedAgain(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	b.must(b.net.DeleteLink("in"))
	err := b.do(d.Reconcile)
	degraded, ok := errors.AsType[*DegradedError](err)
	if !ok || len(degraded.Problems) != 1 || !errors.Is(err, host.ErrNoLink) {
		t.Errorf("without the interface: %v; want a DegradedError that names it", err)
	}
	if w := b.world(); w.Links["out tc 0"] == 0 {
		t.Error("the other interface is not guarded any more")
	}
	b.addVeth("in")
	b.must(b.do(d.Reconcile))
	if w := b.world(); w.Links["in tc 0"] == 0 || len(w.Maps[0].Ports) != 2 {
		t.Errorf("links %v, ports %v; want the new device in both", w.Links, w.Maps[0].Ports)
	}
}

func TestOwnAddressesAreSetAndTakenBack(t *testing.T) {
	b := newBed(t)
	d := b.open()
	own := tables.EncodeDst(xtest.Prefix("2001:db8:1::7/128"))
	b.must(d.SetLocal([]netip.Addr{xtest.Addr("2001:db8:1::7"), xtest.Addr("192.0.2.1"), xtest.Addr("fe80::1%eth0")}))
	b.must(b.apply(d, bedNode()))
	w := b.world()
	if m := w.Maps[0].MatchDst[own]; m.Local != 1 || m.Action != uint8(abi.MatchActionPath) {
		t.Errorf("steering says %+v of an own address within a chain's match", m)
	}
	if m := w.Maps[0].GuardDst[own]; m.Local != 1 || m.Action != uint8(abi.MatchActionNone) {
		t.Errorf("the guard says %+v of an own address outside of all", m)
	}
	b.must(d.SetLocal(nil))
	if w := b.world(); len(w.Maps[0].GuardDst) != 1 || len(w.Maps[0].MatchDst) != 1 {
		t.Errorf("after taking them back: %v, %v", w.Maps[0].GuardDst, w.Maps[0].MatchDst)
	}
}

// The programs look up a gateway in place of a node's address, from the first packet of a plan on.
func TestGatewaysTakeThePlaceOfNodesWithLabels(t *testing.T) {
	b := newBed(t)
	d := b.open()
	n := bedNode()
	n.MPLS = &plan.MPLS{Services: 100000, Label: 16001, Nodes: []plan.MPLSNode{
		{Name: n.Name, Label: 16001, Address: xtest.Addr("192.0.2.1")}, {Name: "other", Label: 16002, Address: xtest.Addr("192.0.2.2")},
	}}
	holds := func(what, address string) {
		t.Helper()
		w := b.world()
		if got, want := w.Maps[0].Labels[16002], (abi.Label{Addr: tables.Words(xtest.Addr(address))}); got != want {
			t.Errorf("%s: packets with label 16002 go to %x, want %x", what, got.Addr, want.Addr)
		}
		if got, want := w.Maps[0].Labels[16001], (abi.Label{Addr: tables.Words(xtest.Addr("192.0.2.1"))}); got != want {
			t.Errorf("%s: the other label leads to %x", what, got.Addr)
		}
	}
	must := func(byLabel map[uint32]netip.Addr) {
		t.Helper()
		b.must(b.do(func() error { return d.SetGateways(byLabel) }))
	}
	ways := func() uint32 {
		t.Helper()
		node, err := d.gen.node()
		b.must(err)
		return node.Ways
	}
	must(map[uint32]netip.Addr{16002: xtest.Addr("198.51.100.2")})
	b.must(b.apply(d, n))
	holds("set before the plan", "198.51.100.2")
	before := ways()
	must(map[uint32]netip.Addr{16002: xtest.Addr("2001:db8::7"), 17000: xtest.Addr("2001:db8::8")})
	holds("another gateway", "2001:db8::7")
	if ways() == before {
		t.Error("next hops by the gateway of before are still in use")
	}
	b.must(b.do(d.Reconcile))
	holds("after a reconciliation", "2001:db8::7")
	must(nil)
	holds("none", "192.0.2.2")
}

// A node may get more addresses than its tables have room for, as routers of many
// tunnels do.
func TestOwnAddressesOutgrowTheirTables(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	before := b.world()
	var many []netip.Addr
	for i := range 4 * tables.LinesLeast * abi.MatchWays {
		many = append(many, netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 0xff, 14: byte(i >> 8), 15: byte(i)}))
	}
	b.must(b.do(func() error { return d.SetLocal(many) }))
	w := b.world()
	if len(w.Maps) != 1 || w.Maps[0].GuardDst[tables.EncodeDst(netip.PrefixFrom(many[len(many)-1], 128))].Local != 1 || len(w.Maps[0].GuardDst) != len(many)+1 {
		t.Errorf("%d generations; the guard has %d rules, want one and %d", len(w.Maps), len(w.Maps[0].GuardDst), len(many)+1)
	}
	if len(w.Links) != len(before.Links) || w.Generations[0] == before.Generations[0] || w.Armed[0] != 1 {
		t.Errorf("%v, armed %v, links %v; before %v, %v", w.Generations, w.Armed, w.Links, before.Generations, before.Links)
	}
	b.must(b.do(func() error { return d.SetLocal(nil) }))
	if w := b.world(); len(w.Maps[0].GuardDst) != 1 {
		t.Errorf("after taking them back: %d rules", len(w.Maps[0].GuardDst))
	}
}

func TestHeadendWithoutARecordOfNumbersRefusesAndTheRestWorks(t *testing.T) {
	b := newBed(t)
	path := filepath.Join(b.cfg.StateDir, "counters.json")
	b.must(os.WriteFile(path, []byte("{"), 0o600))
	d := b.open()
	err := b.apply(d, bedNode())
	if _, ok := errors.AsType[*DegradedError](err); !ok || !strings.Contains(err.Error(), path) {
		t.Fatalf("got %v; want a DegradedError that names the file", err)
	}
	b.runEdge(d, plainPacket("fd00::1", "2001:db8:1::1"))
	c, err := d.Counters()
	b.must(err)
	if len(c.Refusals) != 1 || c.Refusals[0].Reason != abi.ReasonRNDExhausted {
		t.Errorf("refusals %+v; want rnd-exhausted", c.Refusals)
	}
	if w := b.world(); w.Armed[0] != 1 || len(w.Maps[0].Egresses) != 1 || len(w.Links) != 6 {
		t.Errorf("the rest of the plan is not in force: %+v", w)
	}
	b.must(os.Remove(path))
	b.must(b.do(d.Reconcile))
	b.runEdge(d, plainPacket("fd00::1", "2001:db8:1::1"))
	if c, err = d.Counters(); err != nil || c.Paths[0].Packets != 1 {
		t.Errorf("with a record: %+v, %v; want one packet stamped", c.Paths, err)
	}
}

func TestRefusedPacketBecomesAnEvent(t *testing.T) {
	b := newBed(t)
	d := b.open()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events := make(chan event.Event, 16)
	ended := make(chan error, 1)
	go func() { ended <- d.Events(ctx, func(e event.Event) { events <- e }) }() // before there is a data path
	b.must(b.apply(d, bedNode()))
	sent := plainPacket("fd00::1", "fc00:0:0:101::")
	began := time.Now()
	b.runEdge(d, sent)
	next := func() event.Event {
		select {
		case e := <-events:
			return e
		case err := <-ended:
			t.Fatalf("the reader has ended: %v", err)
		case <-time.After(waitLimit): // since the data path is there, which takes a busy machine a minute
			t.Fatal("no event came")
		}
		panic("unreachable")
	}
	e := next()
	if e.Node != "r1" || e.Reason != "outside-sid" || e.Text != abi.ReasonOutsideSID.Text() || e.Hook != "tc" || e.Reported {
		t.Errorf("event %+v", e)
	}
	if !slices.Equal(e.Packet, sent) || e.Len != uint32(len(sent)) {
		t.Errorf("packet %x of %d bytes, want %x", e.Packet, e.Len, sent)
	}
	// The kernel's clock was read a little before or after ours.
	if now := time.Now(); e.Time.Before(began.Add(-time.Second)) || e.Time.After(now.Add(time.Second)) {
		t.Errorf("time is %s; want one between %s and %s", e.Time, began, now)
	}
	// The reader goes on over a change of generations.
	b.must(b.apply(d, elsewhere(bedNode())))
	b.runEdge(d, sent)
	if e := next(); e.Reason != "outside-sid" {
		t.Errorf("event %+v", e)
	}
	b.must(d.Close())
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("after Close the reader ends with %v, want nil", err)
		}
	case <-time.After(waitLimit):
		t.Error("after Close the reader goes on")
	}
}

func TestNothingIsLeftOpen(t *testing.T) {
	b := newLonelyBed(t)
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		b.must(err)
		return len(entries)
	}
	round := func() {
		d, err := b.tryOpen(b.cfg)
		b.must(err)
		b.must(b.apply(d, bedNode()))
		b.must(b.apply(d, otherNode()))
		b.must(b.apply(d, elsewhere(otherNode())))
		b.must(b.apply(d, elsewhere(bedNode())))
		b.must(b.do(d.Reconcile))
		b.must(d.Close())
		_, err = b.detach(b.cfg)
		b.must(err)
	}
	// What is forgotten must stay open, for the test to see it.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	round()
	before := count()
	for range 3 {
		round()
	}
	if after := count(); after > before {
		t.Errorf("%d file descriptors more than before", after-before)
	}
}

// inPrivateMounts runs f in a process of its own whose mounts are, too, and
// without a bpf filesystem. It returns what that printed.
func inPrivateMounts(t *testing.T, f func()) string {
	t.Helper()
	const child = "WAYSTAMP_TEST_PRIVATE_MOUNTS"
	if os.Getenv(child) != "" {
		var err error
		for err == nil { // there may be several on top of each other
			err = unix.Unmount(bpfRoot, unix.MNT_DETACH)
		}
		if ok, statErr := onBPF(bpfRoot); ok || statErr != nil {
			t.Fatalf("unmount: %v, %v", err, statErr)
		}
		f()
		return ""
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// Where `ip netns exec` has put another /sys in place, a bpf filesystem mounted
// there would be gone, and the guard with it, when the process ends.
func TestPinsThatWouldNotOutliveTheProcessAreRefused(t *testing.T) {
	out := inPrivateMounts(t, func() { fmt.Println("said:", ensurePinDir(DefaultPinDir)) })
	if out != "" && !strings.Contains(out, "said: no bpf filesystem at /sys/fs/bpf in this mount namespace") {
		t.Error(out)
	}
}

func TestAgentsThatStartAtOnceMountOneBPFFilesystem(t *testing.T) {
	out := inPrivateMounts(t, func() {
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if err := mountOnce(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println("mounted:", strings.Count(string(mounts), " "+bpfRoot+" "))
	})
	if out != "" && !strings.Contains(out, "mounted: 1\n") {
		t.Error(out)
	}
}

func TestPinsOutsideOfABPFFilesystemAreRefused(t *testing.T) {
	b := newBed(t)
	cfg := b.cfg
	cfg.PinDir = t.TempDir()
	if _, err := b.tryOpen(cfg); err == nil || !strings.Contains(err.Error(), "is not on a bpf filesystem") {
		t.Errorf("got %v", err)
	}
	cfg.PinDir = "relative"
	if _, err := b.tryOpen(cfg); err == nil || !strings.Contains(err.Error(), "not an absolute path") {
		t.Errorf("got %v", err)
	}
	cfg = b.cfg
	cfg.Instance = "../x"
	if _, err := b.tryOpen(cfg); err == nil {
		t.Error("an instance outside of the pin directory is taken")
	}
}

func TestXDPThatCannotBeSaysWhy(t *testing.T) {
	b := newBed(t)
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	b.must(err)
	defer other.Close()
	b.must(b.do(func() error {
		dev, err := b.cfg.Net.Device("in")
		if err != nil {
			return err
		}
		l, err := link.AttachXDP(link.XDPOptions{Program: other, Interface: dev.Index})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
	d := b.open()
	n := bedNode()
	n.Interfaces[1].Datapath = model.DatapathXDP
	err = b.apply(d, n)
	if err == nil || !strings.Contains(err.Error(), "interface in at XDP") || !strings.Contains(err.Error(), "another XDP program is there") {
		t.Errorf("got %v", err)
	}
	if w := b.world(); len(w.Links) != 0 || len(w.Generations) != 0 {
		t.Errorf("left behind: %v", w.Generations)
	}
	b.must(d.Close())
	if _, err := os.Stat(b.dir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory of an instance that never was is still there: %v", err)
	}
	// A device without native XDP, taken for one with Ethernet frames.
	real := b.cfg.Net.Device
	b.cfg.Net = netWith{b.cfg.Net, func(name string) (host.Device, error) {
		dev, err := real(name)
		dev.Frame = "ether"
		return dev, err
	}}
	d = b.open()
	n.Interfaces = []model.Interface{{Name: "lo", Role: model.RoleCore, Datapath: model.DatapathXDP}}
	if err = b.apply(d, n); err == nil || !strings.Contains(err.Error(), "may have no native XDP") {
		t.Errorf("got %v", err)
	}
}

// A frame redirected into a veth whose peer has no XDP program and no GRO is
// lost, and nobody hears of it.
func TestVethIsATargetOfRedirectsOnlyWhileItsPeerTakesThem(t *testing.T) {
	b := newBed(t)
	d := b.open()
	n := bedNode()
	n.Interfaces = []model.Interface{{Name: "in", Role: model.RoleCore, Datapath: model.DatapathXDP}, {Name: "side", Role: model.RoleCore}}
	b.must(b.apply(d, n))
	target := func(name string) uint8 {
		t.Helper()
		dev, err := b.cfg.Net.Device(name)
		b.must(err)
		return b.world().Maps[0].Ports[uint32(dev.Index)].XdpTarget
	}
	if target("in") != 0 || target("side") != 0 {
		t.Error("redirects go to a veth whose peer does not take them")
	}
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	b.must(err)
	defer pass.Close()
	var links []link.Link
	for _, name := range []string{"in-peer", "side-peer"} {
		b.must(b.do(func() error {
			dev, err := b.cfg.Net.Device(name)
			if err != nil {
				return err
			}
			l, err := link.AttachXDP(link.XDPOptions{Program: pass, Interface: dev.Index})
			links = append(links, l)
			return err
		}))
	}
	b.must(b.do(d.RefreshTargets))
	if target("in") != 1 {
		t.Error("no redirects go to a veth whose peer takes them")
	}
	if target("side") != 0 {
		t.Error("redirects go to a veth that has no XDP of its own")
	}
	b.must(b.do(d.Reconcile))
	if target("in") != 1 {
		t.Error("a reconciliation forgets it")
	}
	for _, l := range links {
		b.must(l.Close())
	}
	b.must(b.do(d.RefreshTargets))
	if target("in") != 0 {
		t.Error("redirects still go to a veth whose peer no longer takes them")
	}
}

func TestMissingPermissionIsNamed(t *testing.T) {
	ns, err := host.Anonymous()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	for _, c := range []struct {
		keep []uint
		want string
	}{
		{nil, "CAP_NET_ADMIN"},
		{[]uint{unix.CAP_NET_ADMIN}, "CAP_BPF"},
		{[]uint{unix.CAP_NET_ADMIN, unix.CAP_BPF}, "CAP_PERFMON"},
	} {
		var got error
		// The thread cannot come back to its namespace afterwards, so it ends.
		if err := ns.Do(func() error {
			hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var data [2]unix.CapUserData
			for _, k := range c.keep {
				data[k/32].Effective |= 1 << (k % 32)
				data[k/32].Permitted |= 1 << (k % 32)
			}
			if err := unix.Capset(&hdr, &data[0]); err != nil {
				return err
			}
			got = Check()
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if !errors.Is(got, fs.ErrPermission) || !strings.Contains(got.Error(), c.want) {
			t.Errorf("with %v: %v; want it to name %s", c.keep, got, c.want)
		}
	}
}

func TestKernelAndPermissionsAreEnough(t *testing.T) {
	if err := Check(); err != nil {
		t.Fatal(err)
	}
	e := &host.UnsupportedError{Feature: "tcx", Min: "6.6"}
	if !errors.Is(e, errors.ErrUnsupported) || !strings.Contains(e.Error(), "Linux 6.6 is the first") {
		t.Error(e)
	}
}

// runEdge gives a frame to the program of edge interfaces.
func (b *bed) runEdge(d *Dataplane, frame []byte) {
	b.Helper()
	b.must(b.do(func() error {
		_, err := d.program(object.EdgeTC).Run(&ebpf.RunOptions{Data: frame})
		return err
	}))
}

func plainPacket(from, to string) []byte {
	p := srv6.Packet{
		Ethernet: &srv6.Ethernet{Type: srv6.EtherTypeIPv6},
		Header:   srv6.Header{NextHeader: 59, HopLimit: 64, Source: xtest.Addr(from), Destination: xtest.Addr(to)},
		Payload:  make([]byte, 20),
	}
	if err := p.Fix(); err != nil {
		panic(err)
	}
	b, err := p.Append(nil)
	if err != nil {
		panic(err)
	}
	return b
}

// A chain that was found by prefixes and is found by an ordered rule from then on,
// or the other way round, has both at once or neither: by a new generation.
func TestChainThatChangesToAnOrderedRuleGetsANewGeneration(t *testing.T) {
	b := newBed(t)
	d := b.open()
	n := bedNode()
	b.must(b.apply(d, n))
	ordered := bedNode()
	ordered.Egresses[0].Match.Priority = 10
	for i, to := range []plan.Node{ordered, n} {
		b.must(b.apply(d, to))
		w := b.world()
		if d.gen.seq != i+2 || len(w.Generations) != 1 {
			t.Fatalf("generation %d of %v, want %d alone", d.gen.seq, w.Generations, i+2)
		}
		if has := len(w.Maps[0].Rules) == 1; has != (i == 0) {
			t.Errorf("ordered rules are there: %t", has)
		}
	}
	// Beside what stays they come and go in place.
	ordered = bedNode()
	e := xtest.EgressOf(9, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:9::/48"), Priority: 10}, xtest.OwnSID(9), 2)
	ordered.Egresses = append(ordered.Egresses, e)
	state := func() abi.RulesState {
		node, err := d.gen.node()
		b.must(err)
		return abi.RulesState(node.Rules)
	}
	var meanwhile []abi.RulesState
	d.cfg.before = func(step, _ string) error {
		if step == stepArm {
			meanwhile = append(meanwhile, state())
		}
		return nil
	}
	// A set is missed while it is there for certain, and then only.
	for _, c := range []struct {
		plan            plan.Node
		meanwhile, then abi.RulesState
	}{
		{plan: ordered, meanwhile: abi.RulesStateMaybe, then: abi.RulesStateThere},
		{plan: ordered, meanwhile: abi.RulesStateThere, then: abi.RulesStateThere},
		{plan: n, meanwhile: abi.RulesStateMaybe, then: abi.RulesStateNone},
	} {
		meanwhile = nil
		b.must(b.apply(d, c.plan))
		if got := state(); got != c.then || !slices.Equal(meanwhile, []abi.RulesState{c.meanwhile}) {
			t.Errorf("rules are %s meanwhile and %s then; want %s and %s", meanwhile, got, c.meanwhile, c.then)
		}
	}
	if d.gen.seq != 3 {
		t.Errorf("generation %d, want 3 still", d.gen.seq)
	}
}
