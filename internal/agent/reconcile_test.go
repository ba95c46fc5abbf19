package agent

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/test/logwatch"
)

// node is an agent of r1 on a fake machine, with its plan file.
type node struct {
	*testing.T
	*fakeMachine
	cfg Config
	log *logwatch.Log
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{T: t, fakeMachine: newFakeMachine(), log: logwatch.New(t)}
	n.cfg = Config{
		PlanFile: filepath.Join(dir, "plan", "r1.json"), Instance: "test",
		RunDir: filepath.Join(dir, "run"), StateDir: filepath.Join(dir, "state"), Log: slog.New(n.log),
		ReconcileEvery: time.Hour, // events are enough
	}
	n.must(os.Mkdir(filepath.Dir(n.cfg.PlanFile), 0o700))
	return n
}

func (n *node) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// r1 compiles a domain and gives the plan of its ingress.
func r1(t *testing.T, edit func(*model.Domain)) plan.Node {
	t.Helper()
	of := func(name string, n int, interfaces ...model.Interface) model.Node {
		return model.Node{
			Name: name, Address: netip.MustParseAddr(fmt.Sprintf("fc00:%d::1", n)),
			Locator: netip.MustParsePrefix(fmt.Sprintf("fc00:0:0:%d00::/56", n)), CPUs: 4, Interfaces: interfaces,
		}
	}
	d := model.Domain{
		Block: netip.MustParsePrefix("fc00::/48"),
		Nodes: []model.Node{
			of("r1", 1, model.Interface{Name: "r1-h1", Role: model.RoleEdge}, model.Interface{Name: "r1-r2", Role: model.RoleCore}),
			of("r2", 2, model.Interface{Name: "r2-r1", Role: model.RoleCore}, model.Interface{Name: "r2-r3", Role: model.RoleCore}),
			of("r3", 3, model.Interface{Name: "r3-r2", Role: model.RoleCore}, model.Interface{Name: "r3-h3", Role: model.RoleEdge}),
		},
		Chains: []model.Chain{{
			Name: "web", Ingress: []string{"r1"}, Functions: []string{"fw"}, Egress: "r3", Both: true,
			Match: model.Match{Destination: netip.MustParsePrefix("2001:db8:3::/48")},
			Proof: model.Proof{Scheme: model.SchemeKeyed},
		}},
		Functions: []model.Function{{Name: "fw", Node: "r2"}},
	}
	if edit != nil {
		edit(&d)
	}
	c, err := plan.Compile(d, plan.NewKeyring(rand.Reader, nil))
	if err != nil {
		t.Fatal(err)
	}
	return c.Nodes[slices.IndexFunc(c.Nodes, func(n plan.Node) bool { return n.Name == "r1" })]
}

func (n *node) write(content []byte) {
	n.Helper()
	n.must(os.WriteFile(n.cfg.PlanFile+".new", content, 0o600))
	n.must(os.Rename(n.cfg.PlanFile+".new", n.cfg.PlanFile))
}

func (n *node) encode(p plan.Node) []byte {
	n.Helper()
	b, err := plan.EncodeNode(p)
	n.must(err)
	return b
}

// started is a running agent of a node.
type started struct {
	n      *node
	client *Client
	halt   func() error
}

// start runs the agent until it says that it is ready.
func (n *node) start() *started {
	n.Helper()
	out, in := io.Pipe()
	cfg := n.cfg
	cfg.Stdout = in
	ctx, cancel := context.WithCancel(context.Background())
	ended, failed := make(chan struct{}), error(nil)
	s := &started{n: n, client: NewClient(SocketPath(cfg.RunDir))}
	s.halt = func() error {
		cancel()
		<-ended
		s.client.Close()
		return failed
	}
	n.Cleanup(func() { s.halt() })
	go func() {
		defer close(ended)
		failed = run(ctx, cfg, n.on)
		in.CloseWithError(errors.New("the agent has ended"))
	}()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "{\"ready\":true}\n" {
		n.Fatalf("the agent says %q, %v, and ends with %v", line, err, s.halt())
	}
	return s
}

func (s *started) status() api.Status {
	s.n.Helper()
	v, err := s.client.Status(s.n.Context())
	s.n.must(err)
	return v
}

// eventually waits for what nothing tells of.
func (s *started) eventually(what string, f func() bool) {
	s.n.Helper()
	for limit := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			s.n.Fatal("never came: ", what)
		}
	}
}

func (n *node) same(what string, want ...string) {
	n.Helper()
	if diff := cmp.Diff(want, n.taken()); diff != "" {
		n.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// A SID must not be forwarded by another route, not even between two steps: its
// route is there before the programs are, and goes after they have changed.
func TestTheLocatorIsThereBeforeThePrograms(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	s := n.start()
	n.same("start", "check", "open", "own addresses [fc00:1::1]", "announce fc00:0:0:100::/56", "apply r1")

	moved := r1(t, func(d *model.Domain) { d.Nodes[0].Locator = netip.MustParsePrefix("fc00:0:0:900::/56") })
	n.write(n.encode(moved))
	n.log.Wait("the new plan is in force")
	n.same("another locator", "announce fc00:0:0:900::/56", "apply r1", "withdraw fc00:0:0:100::/56")
	if st := s.status(); st.Generation != 2 || st.Error != "" {
		t.Errorf("status %+v", st)
	}
	n.must(s.halt())
	n.same("end", "save windows", "close data path", "close network")
}

func TestAStartThatFailsTakesBackWhatItDid(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		at   string
		want []string
	}{
		{"check", []string{"check", "close network"}},
		{"open", []string{"check", "open", "close network"}},
		{"own addresses", []string{"check", "open", "own addresses [fc00:1::1]", "close data path", "close network"}},
		{"announce", []string{"check", "open", "own addresses [fc00:1::1]", "announce fc00:0:0:100::/56", "close data path", "close network"}},
		{"apply", []string{"check", "open", "own addresses [fc00:1::1]", "announce fc00:0:0:100::/56", "apply r1", "withdraw fc00:0:0:100::/56", "close data path", "close network"}},
	} {
		t.Run(c.at, func(t *testing.T) {
			n := newNode(t)
			n.write(n.encode(r1(t, nil)))
			n.fail(c.at, broken)
			var said strings.Builder
			n.cfg.Stdout = &said
			if err := run(t.Context(), n.cfg, n.on); !errors.Is(err, broken) {
				t.Errorf("ends with %v", err)
			}
			n.same("steps", c.want...)
			if said.Len() > 0 {
				t.Errorf("it says %q", &said)
			}
			for _, path := range []string{statePath(n.cfg.RunDir), SocketPath(n.cfg.RunDir)} {
				if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s is left, %v", path, err)
				}
			}
		})
	}
}

func TestARefusedPlanLeavesTheOneBefore(t *testing.T) {
	n := newNode(t)
	good := n.encode(r1(t, nil))
	n.write(good)
	s := n.start()
	before := s.status()
	n.taken()
	other := r1(t, nil)
	other.Name = "r2"
	check := func(name, want string) {
		t.Helper()
		st := s.status()
		if !strings.Contains(st.Error, want) || !strings.Contains(st.Error, "the one before stays in force") {
			t.Errorf("%s: status says %q, want %q in it", name, st.Error, want)
		}
		if !st.Ready || st.Generation != before.Generation || st.Plan != before.Plan {
			t.Errorf("%s: status %+v, want the plan before in force", name, st)
		}
	}
	for _, c := range []struct {
		name    string
		content []byte
		want    string
	}{
		{"not JSON", []byte("{"), n.cfg.PlanFile},
		{"of another node", n.encode(other), "the plan is for another node: r2; this is the agent of r1"},
	} {
		n.log.Forget()
		n.write(c.content)
		n.log.Wait("the new plan is refused")
		check(c.name, c.want)
		n.same(c.name)
	}

	n.fail("apply", errors.New("broken"))
	n.log.Forget()
	n.write(n.encode(r1(t, func(d *model.Domain) { d.Nodes[0].Locator = netip.MustParsePrefix("fc00:0:0:900::/56") })))
	n.log.Wait("the new plan is refused")
	check("that cannot be applied", "broken")
	n.same("that cannot be applied", "announce fc00:0:0:900::/56", "apply r1", "withdraw fc00:0:0:900::/56")

	n.log.Forget()
	n.must(os.Remove(n.cfg.PlanFile))
	n.log.Wait("the new plan is refused")
	check("that is gone", "no such file")
	n.log.Forget()
	n.write(good)
	n.log.Wait("the plan file contains the plan in force again")
	if st := s.status(); st.Error != "" || st.Generation != before.Generation {
		t.Errorf("with the plan back: %+v", st)
	}
	n.same("with the plan back")
}

// What a plan lacks may come with a device; each device is not a reason to try at once.
func TestARefusedPlanIsTriedAgainWhenDevicesChange(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	s := n.start()
	n.fail("apply", errors.New("there is no such interface"))
	n.write(n.encode(r1(t, nil)))
	n.log.Wait("the new plan is refused")
	n.taken()
	begin := time.Now()
	s.eventually("somebody who watches links", func() bool { return n.tell(host.ChangeLinks) == nil })
	for range 100 {
		n.must(n.tell(host.ChangeLinks))
		time.Sleep(time.Millisecond) // so that each is one of its own
	}
	applies := 0
	for _, step := range n.taken() {
		if strings.HasPrefix(step, "apply") {
			applies++
		}
	}
	if most := 1 + int(time.Since(begin)/failurePause); applies > most {
		t.Errorf("%d changes of devices let it try %d times in %s; want at most %d", 101, applies, time.Since(begin), most)
	}
	if got := n.log.Count("the new plan is refused"); got != 1 {
		t.Errorf("the same refusal was logged %d times", got)
	}
	n.fail("apply", nil)
	n.log.Wait("the new plan is in force")
	if st := s.status(); st.Error != "" || st.Generation != 2 {
		t.Errorf("status %+v", st)
	}
}

func TestWhatOthersChangeIsRepairedAndToldOnce(t *testing.T) {
	n := newNode(t)
	n.cfg.ReconcileEvery = 5 * time.Millisecond
	n.write(n.encode(r1(t, nil)))
	s := n.start()
	n.set(func() { n.locators = nil })
	s.eventually("the route to the locator", func() bool {
		l, _ := fakeNet{n.fakeMachine}.Locators()
		return len(l) == 1
	})

	n.fail("reconcile", errors.New("broken"))
	s.eventually("the error", func() bool { return strings.Contains(s.status().Error, "broken") })
	n.taken()
	s.eventually("three tries", func() bool { return len(n.reconciliations()) >= 3 })
	if got := n.log.Count("the data path could not be reconciled"); got != 1 {
		t.Errorf("logged %d times", got)
	}
	n.fail("reconcile", nil)
	s.eventually("no error", func() bool { return s.status().Error == "" })

	n.set(func() { n.degraded = []error{errors.New("interface r1-h1 is gone")} })
	n.log.Wait("the plan is in force, but not completely")
	if st := s.status(); !slices.Equal(st.Problems, []string{"interface r1-h1 is gone"}) || st.Error != "" || !st.Ready {
		t.Errorf("status %+v", st)
	}
	n.set(func() { n.degraded = nil })
	n.log.Wait("the plan is whole again")
}

// To try in vain to attach a program changes devices (filters are put and taken off):
// the agent must not answer itself at once, and must try again all the same.
func TestAnInterfaceThatCannotBeAttachedIsTriedAgain(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	s := n.start()
	why := &dataplane.AttachError{Interface: "r1-h1", Err: errors.New("attach to interface r1-h1 at XDP: device or resource busy")}
	n.set(func() {
		n.degraded = []error{why}
		n.repaired = func() { n.tell(host.ChangeLinks) }
	})
	n.taken()
	begin := time.Now()
	s.eventually("somebody who watches devices", func() bool { return n.tell(host.ChangeLinks) == nil })
	n.log.Wait("the plan is in force, but not completely")
	if st := s.status(); !slices.Equal(st.Problems, []string{why.Error()}) || st.Error != "" || !st.Ready {
		t.Errorf("status %+v; want the problem, and the plan in force", st)
	}
	s.eventually("another try", func() bool { return len(n.reconciliations()) > 1 })
	if took := time.Since(begin); took < failurePause {
		t.Errorf("it tried again after %s; want a pause of %s", took, failurePause)
	}
	n.set(func() { n.degraded, n.repaired = nil, nil })
	n.log.Wait("the plan is whole again")
	if st := s.status(); len(st.Problems) != 0 {
		t.Errorf("status %+v", st)
	}
}

// reconciliations are those so far.
func (n *node) reconciliations() (out []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.steps {
		if s == "reconcile" {
			out = append(out, s)
		}
	}
	return out
}

// Who can read a plan has its keys.
func TestAPlanThatOthersCanReadIsRefused(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	dir := filepath.Dir(n.cfg.PlanFile)
	chmod := func(path string, mode os.FileMode) { n.must(os.Chmod(path, mode)) }
	chmod(n.cfg.PlanFile, 0o644)
	err := run(t.Context(), n.cfg, n.on)
	if _, ok := errors.AsType[*PlanError](err); !ok || !strings.Contains(err.Error(), "has mode 0644") {
		t.Fatalf("at the start: %v", err)
	}
	n.same("at the start")

	chmod(n.cfg.PlanFile, 0o600)
	s := n.start()
	before := s.status()
	for _, c := range []struct {
		path      string
		bad, good os.FileMode
		says      string
	}{
		{n.cfg.PlanFile, 0o640, 0o600, n.cfg.PlanFile + " has mode 0640"},
		{dir, 0o777, 0o700, dir + " has mode 0777"},
	} {
		n.log.Forget()
		chmod(c.path, c.bad)
		n.log.Wait("the new plan is refused")
		st := s.status()
		if !strings.Contains(st.Error, c.says) || !strings.Contains(st.Error, "the one before stays in force") || !st.Ready || st.Plan != before.Plan || st.Generation != before.Generation {
			t.Errorf("%s with mode %o: status %+v; want %q and the plan of the start", c.path, c.bad, st, c.says)
		}
		chmod(c.path, c.good)
		n.log.Wait("the plan file contains the plan in force again")
		if st := s.status(); st.Error != "" || st.Generation != before.Generation {
			t.Errorf("%s with mode %o again: status %+v", c.path, c.good, st)
		}
	}
	// A new plan does not get in like that.
	n.log.Forget()
	chmod(dir, 0o777)
	n.log.Wait("the new plan is refused")
	n.log.Forget()
	// It has its mode before it gets its name, so that no look at it finds another.
	n.must(os.WriteFile(n.cfg.PlanFile+".new", n.encode(r1(t, nil)), 0o600))
	chmod(n.cfg.PlanFile+".new", 0o606)
	n.must(os.Rename(n.cfg.PlanFile+".new", n.cfg.PlanFile))
	chmod(dir, 0o700)
	n.log.Wait("the new plan is refused")
	if st := s.status(); !strings.Contains(st.Error, "has mode 0606") || st.Plan != before.Plan || st.Generation != before.Generation {
		t.Errorf("status %+v; want the plan of the start", st)
	}
	chmod(n.cfg.PlanFile, 0o600)
	n.log.Wait("the new plan is in force")
	n.must(s.halt())

	chmod(n.cfg.PlanFile, 0o604)
	n.cfg.InsecurePlan = true
	n.log.Forget()
	s = n.start()
	n.log.Wait("other users can read or change the plan file; the agent uses it because of --insecure-plan")
	n.must(s.halt())
}

// A plan that came to the wrong machine would guard nothing, and its SIDs would be
// another node's.
func TestAPlanForAnotherMachineIsRefused(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	n.own = []netip.Addr{netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("fc00:2::1")}
	err := run(t.Context(), n.cfg, n.on)
	if !errors.Is(err, ErrOtherNode) || !strings.Contains(err.Error(), "no interface has the address fc00:1::1 of node r1") || !strings.Contains(err.Error(), "ip -6 address add fc00:1::1 dev lo") {
		t.Fatalf("ends with %v", err)
	}
	if steps := n.taken(); slices.Contains(steps, "apply r1") || slices.Contains(steps, "announce fc00:0:0:100::/56") {
		t.Errorf("steps %q; want neither programs nor a route", steps)
	}
	n.cfg.Force = true
	n.must(n.start().halt())
	n.cfg.Force, n.own = false, []netip.Addr{netip.MustParseAddr("fc00:0:0:1ff::1")} // of its locator
	n.must(n.start().halt())
}

// What is reported is what the kernel holds: not before the data path has it, and not what it
// refused.
func TestThePlanInForceIsReported(t *testing.T) {
	n := newNode(t)
	reports := make(chan InForce, 100)
	n.cfg.Report = func(f InForce) { reports <- f }
	revision := func(r uint64) []byte {
		p := r1(t, nil)
		p.Revision = r
		return n.encode(p)
	}
	next := func(what string, want InForce, says string) {
		t.Helper()
		for {
			select {
			case f := <-reports:
				if !strings.Contains(f.Error, says) || (says == "") != (f.Error == "") || len(f.Problems) > 0 {
					continue // of what is on the way there
				}
				if f.Revision != want.Revision || f.Digest != want.Digest || f.Refused != want.Refused {
					t.Errorf("%s: reported %+v, want %+v", what, f, want)
				}
				return
			case <-time.After(patience):
				t.Fatalf("%s: not reported", what)
			}
		}
	}
	five := revision(5)
	n.write(five)
	s := n.start()
	next("start", InForce{Revision: 5, Digest: digest(five)}, "")
	n.fail("apply", errors.New("no room"))
	n.write(revision(6))
	next("refused", InForce{Revision: 5, Digest: digest(five), Refused: 6}, "no room")
	n.fail("apply", nil)
	seven := revision(7)
	n.write(seven)
	next("the next one", InForce{Revision: 7, Digest: digest(seven)}, "")
	n.write(five)
	const older = "it has revision 5 of the controller's, and that had 7"
	next("an older one", InForce{Revision: 7, Digest: digest(seven), Refused: 5}, older)
	n.must(s.halt())
	if err := run(t.Context(), n.cfg, n.on); err == nil || !strings.Contains(err.Error(), older) {
		t.Errorf("started again with it: %v", err)
	}
}

func TestAnOlderPlanIsRefused(t *testing.T) {
	epochs := func(e uint8) plan.Node {
		p := r1(t, nil)
		for i := range p.Headends {
			p.Headends[i].Epoch = e
		}
		return p
	}
	n := newNode(t)
	n.write(n.encode(epochs(7)))
	s := n.start()
	// While it runs, and after it was started again.
	n.write(n.encode(epochs(6)))
	n.log.Wait("the new plan is refused")
	want := "the plan is older than the one before: chain web has epoch 6, and had 7 already; take the latest plan, or give the agent --force"
	if st := s.status(); !strings.Contains(st.Error, want) || st.Paths[0].Epoch != 7 {
		t.Errorf("status %+v; want %q", st, want)
	}
	n.must(s.halt())
	if err := run(t.Context(), n.cfg, n.on); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("started again: %v; want %q", err, want)
	}
	n.cfg.Force = true
	s = n.start()
	n.log.Wait("an older plan is taken, as --force says")
	if st := s.status(); st.Paths[0].Epoch != 6 {
		t.Errorf("with --force: status %+v", st)
	}
	n.must(s.halt())
	n.cfg.Force = false
	n.write(n.encode(epochs(6)))
	n.must(n.start().halt())
}

// What a node holds tells which epochs it has given up.
func TestANodeTakesNoEpochThatItHasGivenUp(t *testing.T) {
	holds := func(sends int, takes ...uint8) plan.Node {
		p := r1(t, nil)
		head, visit := p.Headends[0], plan.Endpoint{}
		p.Headends, p.Egresses = nil, nil
		if sends >= 0 {
			head.Epoch = uint8(sends)
			p.Headends = []plan.Headend{head}
		}
		for _, e := range takes {
			visit.PathID = head.PathID
			visit.Epoch = e
			p.Endpoints = append(p.Endpoints, visit)
		}
		return p
	}
	for i, c := range []struct {
		was, next plan.Node
		refused   bool
	}{
		{holds(-1, 1, 2), holds(-1, 1), false}, // nobody has sent 2
		{holds(-1, 1, 2), holds(-1, 1, 3), false},
		{holds(-1, 1, 3), holds(-1, 1, 2), true},
		{holds(-1, 2), holds(-1, 1, 2), true},
		{holds(-1, 2), holds(-1, 1), true},
		{holds(-1, 255, 0), holds(-1, 255, 1), false},
		{holds(-1, 0), holds(-1, 255), true},
		{holds(1), holds(2), false},
		{holds(2), holds(1), true},
		{holds(2, 1, 2), holds(1, 1, 2), true}, // it holds 1, and does not send it any more
		{holds(1, 1, 2), holds(1, 1), false},
		{holds(1, 1, 2), plan.Node{}, false},
	} {
		if err := stateOf(c.was, "x").older(c.next); (err != nil) != c.refused {
			t.Errorf("%d: %v", i, err)
		}
	}
	// An agent of before kept the latest alone.
	before := state{Epochs: []epoch{{Path: holds(1).Headends[0].Path, Epoch: 2}}}
	if before.older(holds(-1, 1, 2)) != nil || before.older(holds(-1, 1)) == nil {
		t.Error("the state of an earlier agent is not understood")
	}
}

// Epochs have eight bits.
func TestEpochsGoRound(t *testing.T) {
	for _, c := range []struct {
		e, than uint8
		older   bool
	}{{1, 2, true}, {2, 1, false}, {5, 5, false}, {0, 255, false}, {255, 0, true}, {3, 250, false}, {250, 3, true}} {
		if got := olderEpoch(c.e, c.than); got != c.older {
			t.Errorf("%d is older than %d: %t", c.e, c.than, got)
		}
	}
}

// What a file does not say of a link, nobody has compared with the headers.
func TestALinkTooNarrowForItsChainIsToldOf(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	n.links["r1-r2"] = host.Link{Name: "r1-r2", Index: 3, MTU: 1300, Up: true}
	n.links["r1-h1"] = host.Link{Name: "r1-h1", Index: 2, MTU: 1300, Up: true} // has no headers
	s := n.start()
	s.eventually("somebody who watches settings", func() bool { return n.tell(host.ChangeForwarding) == nil })
	want := "interface r1-r2 has an MTU of 1300, and the headers of chain web take 104, so that the chain's packets can have only 1196 bytes on this interface, and IPv6 needs 1280: ip link set r1-r2 mtu 1384, at both ends of the link"
	if st := s.status(); !slices.Equal(st.Warnings, []string{want}) || !st.Ready {
		t.Errorf("status %+v; want %q", st, want)
	}
	n.set(func() { n.links["r1-r2"] = host.Link{Name: "r1-r2", Index: 3, MTU: 1384, Up: true} })
	n.must(n.tell(host.ChangeForwarding))
	n.log.Wait("node settings no longer block packets")
	if st := s.status(); len(st.Warnings) != 0 {
		t.Errorf("it is wide enough, and the status warns: %q", st.Warnings)
	}
}

// Nothing is wrong with the data path then, but no packet comes.
func TestAnInterfaceThatIsDownIsToldOf(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	down := host.Link{Name: "r1-r2", Index: 3, MTU: 1700}
	n.links["r1-r2"] = down
	s := n.start()
	s.eventually("somebody who watches settings", func() bool { return n.tell(host.ChangeForwarding) == nil })
	want := "core interface r1-r2 is down, so that no packet can arrive on it or leave by it: ip link set r1-r2 up, at both ends"
	if st := s.status(); !slices.Equal(st.Warnings, []string{want}) || !st.Ready {
		t.Errorf("status %+v; want %q", st, want)
	}
	down.Up = true
	n.set(func() { n.links["r1-r2"] = down })
	n.must(n.tell(host.ChangeLinks))
	n.log.Wait("an interface is up again")
	if st := s.status(); len(st.Warnings) != 0 {
		t.Errorf("it is up, and the status warns: %q", st.Warnings)
	}
}

func TestAFunctionThatGivesNothingBackIsToldOf(t *testing.T) {
	var w silenceWatch
	now := time.Unix(1000, 0)
	look := func(after int, rx, tx uint64) int {
		counts := []dataplane.FunctionCount{{Function: "fw", RxSuccess: rx, TxSuccess: tx}, {Function: "idle"}}
		return len(w.look(now.Add(time.Duration(after)*time.Second), counts))
	}
	for _, c := range []struct {
		after  int
		rx, tx uint64
		want   int
		why    string
	}{
		{0, 100, 0, 0, "what came before the agent is not known"},
		{10, 104, 0, 0, "ten seconds"},
		{25, 104, 0, 0, "four packets"},
		{30, 105, 0, 1, "five packets, and none back for as long"},
		{90, 105, 0, 1, "no more came since"},
		{100, 200, 1, 0, "one is back"},
		{130, 300, 1, 1, "and no other"},
		{140, 3, 0, 0, "the counters have begun again"},
	} {
		if got := look(c.after, c.rx, c.tx); got != c.want {
			t.Errorf("after %d s (%s): %d warnings, want %d", c.after, c.why, got, c.want)
		}
	}
	w = silenceWatch{}
	w.look(now, []dataplane.FunctionCount{{Function: "fw"}})
	got := w.look(now.Add(time.Minute), []dataplane.FunctionCount{{Function: "fw", RxSuccess: 50}})
	if len(got) != 1 || !strings.Contains(got[0], "function fw receives packets and returns none: check that it forwards") || !strings.Contains(got[0], "via inet6") {
		t.Errorf("it says %q", got)
	}
	// What comes back without a header is back: another advice is for that.
	got = w.look(now.Add(2*time.Minute), []dataplane.FunctionCount{{Function: "fw", RxSuccess: 90, TxNotCached: 1}})
	if len(got) != 0 {
		t.Errorf("packets come back without a header, and it says %q", got)
	}
}

// Loading takes seconds on a busy machine: an agent that is asked to end does not go
// on with it, and takes back what it did.
func TestAnAgentThatStartsHeedsItsEnd(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	ctx, cancel := context.WithCancel(t.Context())
	n.slow = cancel
	if err := run(ctx, n.cfg, n.on); !errors.Is(err, context.Canceled) {
		t.Errorf("ends with %v", err)
	}
	n.same("steps", "check", "open", "own addresses [fc00:1::1]", "announce fc00:0:0:100::/56", "apply r1", "withdraw fc00:0:0:100::/56", "close data path", "close network")
	if n.applied != nil || n.log.Has("armed") {
		t.Error("the plan was applied all the same")
	}
	for _, want := range []string{"reading the plan", "building the data path"} {
		if !n.log.Has(want) {
			t.Errorf("the log does not say %q", want)
		}
	}
}

// The plan on disk was replaced by one that the kernel refuses, and the agent starts, perhaps after a reboot.
func TestAnAgentStartsFromThePlanBeforeIfItCannotFromTheLatest(t *testing.T) {
	good := r1(t, nil)
	good.Revision = 1
	latest := r1(t, func(d *model.Domain) { d.Nodes[0].Locator = netip.MustParsePrefix("fc00:0:0:900::/56") })
	latest.Revision = 2
	broken := errors.New("broken")
	const step = "announce fc00:0:0:900::/56" // of the latest alone
	prepare := func(t *testing.T) (*node, chan InForce) {
		n := newNode(t)
		n.cfg.Fallback = filepath.Join(filepath.Dir(n.cfg.PlanFile), "before.json")
		n.must(os.WriteFile(n.cfg.Fallback, n.encode(good), 0o600))
		n.write(n.encode(latest))
		n.fail(step, broken)
		reports := make(chan InForce, 10)
		n.cfg.Report = func(f InForce) { reports <- f }
		return n, reports
	}
	check := func(t *testing.T, n *node, s *started, reports chan InForce) {
		t.Helper()
		in := <-reports
		for in.Refused == 0 {
			in = <-reports
		}
		if in.Revision != 1 || in.Digest != digest(n.encode(good)) || in.Refused != 2 || !strings.Contains(in.Error, "broken") {
			t.Errorf("reported %+v; want revision 1 in force and 2 refused", in)
		}
		if st := s.status(); !st.Ready || !strings.Contains(st.Error, "broken") {
			t.Errorf("status %+v", st)
		}
		n.fail(step, nil)
		s.eventually("somebody who watches links", func() bool { return n.tell(host.ChangeLinks) == nil })
		n.log.Wait("the new plan is in force")
		for in = <-reports; in.Revision != 2; in = <-reports {
		}
		if in.Digest != digest(n.encode(latest)) || in.Refused != 0 || in.Error != "" {
			t.Errorf("reported %+v; want revision 2 in force", in)
		}
	}
	t.Run("refused", func(t *testing.T) {
		n, reports := prepare(t)
		check(t, n, n.start(), reports)
	})
	t.Run("in the midst of which the agent before died", func(t *testing.T) {
		n, reports := prepare(t)
		n.must(os.MkdirAll(n.cfg.RunDir, 0o750))
		left, err := openState(n.cfg.RunDir)
		n.must(err)
		n.must(left.put(stateOf(latest, n.cfg.Instance)))
		check(t, n, n.start(), reports)
	})
	t.Run("damaged", func(t *testing.T) {
		n, reports := prepare(t)
		n.write([]byte("{"))
		s := n.start()
		if in := <-reports; in.Revision != 1 {
			t.Errorf("reported %+v", in)
		}
		n.log.Wait("the new plan is refused")
		n.fail(step, nil)
		n.write(n.encode(latest))
		n.log.Wait("the new plan is in force")
		if st := s.status(); st.Error != "" {
			t.Errorf("status %+v", st)
		}
	})
	for name, c := range map[string]struct {
		spoil func(n *node)
		says  []string
	}{
		"and that is not there": {func(n *node) { n.must(os.Remove(n.cfg.Fallback)) }, []string{"broken"}},
		"and that is damaged":   {func(n *node) { n.must(os.WriteFile(n.cfg.Fallback, []byte("{"), 0o600)) }, []string{"broken"}},
		"nor from that":         {func(n *node) { n.fail("apply", errors.New("too old")) }, []string{"broken", "the agent cannot start from the previous plan", "too old"}},
	} {
		t.Run(name, func(t *testing.T) {
			n, _ := prepare(t)
			c.spoil(n)
			err := run(t.Context(), n.cfg, n.on)
			if _, is := errors.AsType[*PlanError](err); !is {
				t.Fatalf("ends with %v", err)
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("ends with %v; want %q in it", err, want)
				}
			}
			if _, err := os.Stat(statePath(n.cfg.RunDir)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("its state is left: %v", err)
			}
		})
	}
}
