package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/netfilter"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/stream"
)

// fakeMachine stands for a node's kernel: its network and its data path. It notes
// the steps that change it, in their order, and fails at those that a test names.
type fakeMachine struct {
	mu    sync.Mutex
	steps []string
	fails map[string]error // by the beginning of a step

	locators []netip.Prefix
	sids     []netip.Prefix
	others   []host.Route // to SIDs
	gone     []string     // functions
	conns    []dataplane.Connection
	hops     map[string][]host.Neighbour // by address
	pushes   map[string]bool             // labels, the route to an address
	managed  []host.Neighbour
	gateways map[uint32]netip.Addr
	cutters  []string
	links    map[string]host.Link
	sysctls  map[string]string
	own      []netip.Addr
	applied  *plan.Node
	degraded []error // what Apply and Reconcile say of the plan in force
	counts   dataplane.Counts
	numbers  []dataplane.NumberState
	unsaved  error  // what saving windows comes to
	given    uint64 // the last number of each epoch that was given up

	undrained error // what reading these comes to
	watchers  map[host.Change][]func() error
	building  func(step, what string) error
	withheld  map[string]error             // functions
	tables    map[string]netfilter.Ruleset // by namespace and function
	lacks     []string                     // what namespaces lack
	slow      func()                       // in the midst of Apply
	repaired  func()                       // in the midst of Reconcile
}

func newFakeMachine() *fakeMachine {
	return &fakeMachine{
		fails: map[string]error{}, watchers: map[host.Change][]func() error{},
		links: map[string]host.Link{
			"r1-h1": {Name: "r1-h1", Index: 2, MTU: 1500, Up: true},
			"r1-r2": {Name: "r1-r2", Index: 3, MTU: 1700, Up: true},
		},
		tables: map[string]netfilter.Ruleset{}, sysctls: map[string]string{}, own: []netip.Addr{netip.MustParseAddr("fc00:1::1")},
	}
}

func (f *fakeMachine) on(ctx context.Context, cfg Config) (machine, error) {
	f.building = cfg.building(ctx)
	return machine{
		net:    fakeNet{f},
		filter: fakeFilter{f},
		places: fakePlaces{},
		check:  func() ([]string, error) { return nil, f.step("check") },
		open: func() (dataPath, error) {
			if err := f.step("open"); err != nil {
				return nil, err
			}
			return fakeDataPath{f}, nil
		},
		close: func() error { return f.step("close network") },
	}, nil
}

// step notes what is done, and fails if the test has said so.
func (f *fakeMachine) step(format string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := fmt.Sprintf(format, args...)
	f.steps = append(f.steps, s)
	for begin, err := range f.fails {
		if strings.HasPrefix(s, begin) {
			return err
		}
	}
	return nil
}

// fail lets steps that begin so fail from now on; nil: no more.
func (f *fakeMachine) fail(begin string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		delete(f.fails, begin)
		return
	}
	f.fails[begin] = err
}

// taken gives the steps so far and forgets them.
func (f *fakeMachine) taken() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.steps
	f.steps = nil
	return out
}

// set changes the machine behind the agent's back.
func (f *fakeMachine) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// watchersOfAgent is for how many sets of changes an agent watches; until all are there,
// some of them would miss what is told.
const watchersOfAgent = 4

// tell calls those who watch for a kind of change.
func (f *fakeMachine) tell(kind host.Change) error {
	f.mu.Lock()
	var to []func() error
	for kinds, list := range f.watchers {
		if kinds&kind != 0 {
			to = append(to, list...)
		}
	}
	all := len(f.watchers)
	f.mu.Unlock()
	if all < watchersOfAgent {
		return fmt.Errorf("%d of %d watch", all, watchersOfAgent)
	}
	if len(to) == 0 {
		return fmt.Errorf("nobody watches for changes of kind %v", kind)
	}
	for _, call := range to {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

type fakeNet struct{ f *fakeMachine }

func (n fakeNet) Do(do func() error) error         { return do() }
func (n fakeNet) Addresses() ([]netip.Addr, error) { return n.f.own, nil }

func (n fakeNet) Link(name string) (host.Link, error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	l, ok := n.f.links[name]
	if !ok {
		return host.Link{}, host.ErrNoLink
	}
	return l, nil
}

func (n fakeNet) LinkAt(index int) (host.Link, error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	for _, l := range n.f.links {
		if l.Index == index {
			return l, nil
		}
	}
	return host.Link{}, host.ErrNoLink
}

func (n fakeNet) HasIPv4(string) (bool, error)           { return false, nil }
func (n fakeNet) FeatureOn(string, string) (bool, error) { return false, nil }

func (n fakeNet) Sysctl(key string) (string, error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	v, ok := n.f.sysctls[key]
	if !ok {
		return "", fs.ErrNotExist
	}
	return v, nil
}

func (n fakeNet) Locators() ([]netip.Prefix, error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	return slices.Clone(n.f.locators), nil
}

func (n fakeNet) AnnounceLocator(l netip.Prefix) error {
	if err := n.f.step("announce %s", l); err != nil {
		return err
	}
	n.f.set(func() {
		if !slices.Contains(n.f.locators, l) {
			n.f.locators = append(n.f.locators, l)
		}
	})
	return nil
}

func (n fakeNet) WithdrawLocator(l netip.Prefix) error {
	if err := n.f.step("withdraw %s", l); err != nil {
		return err
	}
	n.f.set(func() {
		n.f.locators = slices.DeleteFunc(n.f.locators, func(o netip.Prefix) bool { return o == l })
	})
	return nil
}

func (n fakeNet) NextHops(to netip.Addr) (hops []host.Neighbour, err error) {
	ways, err := n.Ways(to)
	for _, w := range ways {
		hops = append(hops, w.Neighbour)
	}
	return hops, err
}

func (n fakeNet) Ways(to netip.Addr) (ways []host.Way, err error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	if err := n.f.fails["next hops to "+to.String()]; err != nil {
		return nil, err
	}
	hops, ok := n.f.hops[to.String()]
	if !ok {
		return nil, host.ErrNoWay
	}
	for _, h := range hops {
		ways = append(ways, host.Way{Neighbour: h, Pushes: n.f.pushes[to.String()]})
	}
	return ways, nil
}

func (n fakeNet) ManageNeighbours(want []host.Neighbour) (added, removed int, err error) {
	if len(want)+len(n.f.managed) == 0 {
		return 0, 0, nil // nothing is changed
	}
	if err := n.f.step("manage neighbours %d", len(want)); err != nil {
		return 0, 0, err
	}
	n.f.set(func() { n.f.managed = want })
	return 0, 0, nil
}

func (n fakeNet) SIDs(locator netip.Prefix) (announced []netip.Prefix, others []host.Route, err error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	for _, s := range n.f.sids {
		if locator.Contains(s.Addr()) {
			announced = append(announced, s)
		}
	}
	for _, r := range n.f.others {
		if locator.Contains(r.Destination.Addr()) {
			others = append(others, r)
		}
	}
	return announced, others, n.f.fails["list SIDs"]
}

func (n fakeNet) AnnounceSID(s netip.Prefix) error {
	if err := n.f.step("announce %s", s); err != nil {
		return err
	}
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	same := func(r host.Route) bool { return r.Destination == s && r.Metric == model.SIDMetric }
	if slices.Contains(n.f.sids, s) || slices.ContainsFunc(n.f.others, same) {
		return fs.ErrExist
	}
	n.f.sids = append(n.f.sids, s)
	return nil
}

func (n fakeNet) WithdrawSID(s netip.Prefix) error {
	if err := n.f.step("withdraw %s", s); err != nil {
		return err
	}
	n.f.set(func() {
		n.f.sids = slices.DeleteFunc(n.f.sids, func(o netip.Prefix) bool { return o == s })
	})
	return nil
}

func (n fakeNet) CutOnSend(name string) error { return n.f.step("cut on send %s", name) }

func (n fakeNet) EnsureCutter(c host.Cutter) (made bool, err error) {
	n.f.mu.Lock()
	there := slices.Contains(n.f.cutters, c.In)
	n.f.mu.Unlock()
	if there {
		return false, nil
	}
	if err := n.f.step("make cutter %s", c.In); err != nil {
		return false, err
	}
	n.f.set(func() { n.f.cutters = append(n.f.cutters, c.In) })
	return true, nil
}

func (n fakeNet) RemoveCutter(c host.Cutter) error {
	n.f.mu.Lock()
	there := slices.Contains(n.f.cutters, c.In)
	n.f.mu.Unlock()
	if !there {
		return nil
	}
	if err := n.f.step("remove cutter %s", c.In); err != nil {
		return err
	}
	n.f.set(func() { n.f.cutters = slices.DeleteFunc(n.f.cutters, func(s string) bool { return s == c.In }) })
	return nil
}

func (n fakeNet) Watch(ctx context.Context, kinds host.Change, f func() error) error {
	n.f.set(func() { n.f.watchers[kinds] = append(n.f.watchers[kinds], f) })
	<-ctx.Done()
	return context.Cause(ctx)
}

func (n fakeNet) WatchAddresses(ctx context.Context, _ func([]netip.Addr)) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

type fakeDataPath struct{ f *fakeMachine }

func (d fakeDataPath) state() error {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	problems := slices.Clone(d.f.degraded)
	for _, f := range slices.Sorted(maps.Keys(d.f.withheld)) {
		problems = append(problems, fmt.Errorf("function %s gets no packets: %w", f, d.f.withheld[f]))
	}
	if len(problems) > 0 {
		return &dataplane.DegradedError{Problems: problems}
	}
	return nil
}

func (d fakeDataPath) Apply(n plan.Node) error {
	if err := d.f.step("apply %s", n.Name); err != nil {
		return err
	}
	if err := d.f.building("create map", "hops"); err != nil {
		return err
	}
	if d.f.slow != nil {
		d.f.slow()
	}
	if err := d.f.building("load programs", "core_tc"); err != nil {
		return err
	}
	d.f.set(func() { d.f.applied = &n })
	return d.state()
}

func (d fakeDataPath) Reconcile() error {
	if err := d.f.step("reconcile"); err != nil {
		return err
	}
	d.f.mu.Lock()
	repaired := d.f.repaired
	d.f.mu.Unlock()
	if repaired != nil {
		repaired()
	}
	return d.state()
}

func (d fakeDataPath) Withhold(functions map[string]error) {
	d.f.set(func() { d.f.withheld = functions })
}

func (d fakeDataPath) SetGateways(byLabel map[uint32]netip.Addr) error {
	if maps.Equal(byLabel, d.f.gateways) {
		return nil
	}
	if err := d.f.step("gateways %v", byLabel); err != nil {
		return err
	}
	d.f.set(func() { d.f.gateways = byLabel })
	return nil
}

func (d fakeDataPath) SetLocal(own []netip.Addr) error { return d.f.step("own addresses %v", own) }
func (d fakeDataPath) FlushNexthops() error            { return nil }
func (d fakeDataPath) RefreshTargets() error           { return nil }
func (d fakeDataPath) SaveNews() error                 { return d.f.saveNews() }
func (d fakeDataPath) SaveWindows() error              { return d.f.step("save windows") }
func (d fakeDataPath) RenewNumbers() error             { return nil }

func (d fakeDataPath) Numbers() ([]dataplane.NumberState, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	return d.f.numbers, nil
}

func (f *fakeMachine) saveNews() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.unsaved
}

func (d fakeDataPath) OpenOnward(client, service, source, origin netip.AddrPort, back uint32) error {
	return d.f.step("open onward %s %s %s %s %#x", client, service, source, origin, back)
}
func (d fakeDataPath) ConnectionPart(function string, client, server netip.AddrPort) (uint32, error) {
	return 0, d.f.step("part of %s %s %s", function, client, server)
}
func (d fakeDataPath) Connections(functions []string, limit int) ([]dataplane.Connection, int, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(d.f.conns), func(c dataplane.Connection) bool { return !slices.Contains(functions, c.Function) })
	return all[:min(limit, len(all))], len(all), nil
}
func (d fakeDataPath) SweepConnections(map[string]time.Duration) (map[string]dataplane.Connections, error) {
	return nil, nil
}
func (d fakeDataPath) KeepPins() ([]string, error) { return nil, nil }
func (d fakeDataPath) PinDir() string              { return "/nonexistent" }
func (d fakeDataPath) Clsact() bool                { return false }

func (d fakeDataPath) Gone() []string {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	return slices.Clone(d.f.gone)
}

func (d fakeDataPath) Counters() (dataplane.Counts, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	return d.f.counts, nil
}

func (d fakeDataPath) Refusals() ([]dataplane.RefusalCount, error) {
	c, err := d.Counters()
	return c.Refusals, err
}

func (d fakeDataPath) FunctionsInFlight() ([]dataplane.FunctionCount, error) {
	c, err := d.Counters()
	return c.Functions, err
}

func (d fakeDataPath) Interfaces() ([]dataplane.InterfaceState, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	var out []dataplane.InterfaceState
	if d.f.applied != nil {
		for _, i := range d.f.applied.Interfaces {
			out = append(out, dataplane.InterfaceState{Name: i.Name, Role: i.Role, TC: true})
		}
	}
	return out, nil
}

func (d fakeDataPath) Events(ctx context.Context, _ func(event.Event)) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func (d fakeDataPath) Traced(ctx context.Context, _ func(event.Hop)) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func (d fakeDataPath) Trace(wanted []event.Trace) error {
	return d.f.step("trace %v", wanted)
}

func (d fakeDataPath) Drained(of []event.Epoch) (given []event.Given, seen []event.Seen, err error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	for _, e := range of {
		given = append(given, event.Given{Epoch: e, Lanes: []event.Lane{{Number: d.f.given}}})
	}
	return given, nil, d.f.undrained
}

func (d fakeDataPath) Close() error { return d.f.step("close data path") }

type fakeFilter struct{ f *fakeMachine }

func (p fakeFilter) Ensure(_ context.Context, n netfilter.Namespace) (netfilter.State, error) {
	err := p.f.step("ensure namespace %s", n.Name)
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	return netfilter.State{Missing: slices.Clone(p.f.lacks)}, err
}

func (p fakeFilter) Load(_ context.Context, n netfilter.Namespace, sets ...netfilter.Ruleset) error {
	var errs []error
	for _, s := range sets {
		if err := p.f.step("load rules %s/%s", n.Name, s.Function); err != nil {
			errs = append(errs, err)
			continue
		}
		p.f.set(func() { p.f.tables[n.Name+"/"+s.Function] = s })
	}
	return errors.Join(errs...)
}

func (p fakeFilter) Counters(_ context.Context, n netfilter.Namespace, function string) (netfilter.Counters, error) {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	if _, ok := p.f.tables[n.Name+"/"+function]; !ok {
		return netfilter.Counters{}, netfilter.ErrNotLoaded
	}
	return netfilter.Counters{
		Named:     map[string]netfilter.Counter{"seen": {Packets: 3, Bytes: 300}},
		Arguments: map[uint32]netfilter.Counter{1: {Packets: 2, Bytes: 200}},
	}, nil
}

func (p fakeFilter) Unload(_ context.Context, n netfilter.Namespace, functions ...string) error {
	if err := p.f.step("unload rules %s/%v", n.Name, functions); err != nil {
		return err
	}
	p.forget(n.Name, functions...)
	return nil
}

func (p fakeFilter) Remove(_ context.Context, n netfilter.Namespace) error {
	what := "remove namespace"
	if n.Existing {
		what = "leave namespace"
	}
	if n.To == "" {
		what += " without the interfaces of"
	}
	if err := p.f.step("%s %s", what, n.Name); err != nil || n.Existing {
		return err
	}
	p.forget(n.Name)
	return nil
}

// forget deletes the tables of functions in a namespace; of all if none is named.
func (p fakeFilter) forget(namespace string, functions ...string) {
	p.f.set(func() {
		maps.DeleteFunc(p.f.tables, func(name string, s netfilter.Ruleset) bool {
			return name == namespace+"/"+s.Function && (functions == nil || slices.Contains(functions, s.Function))
		})
	})
}

// fakePlaces has no workers.
type fakePlaces struct{}

func (fakePlaces) Start(plan.Proxy, []byte, func(stream.Ask) (*stream.Ends, error), func(stream.Refusal)) (streamWorker, error) {
	return nil, errors.New("no workers here")
}
func (fakePlaces) StartGateway(plan.Proxy, gatewayStart) (gatewayWorker, error) {
	return nil, errors.New("no gateway here")
}
func (fakePlaces) RemoveStrays([]string) error       { return nil }
func (fakePlaces) Draining(string) []api.StreamDrain { return nil }
func (fakePlaces) Leave() error                      { return nil }
