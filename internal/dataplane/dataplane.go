// Package dataplane owns every eBPF object: it loads the programs of bpf/, pins
// and attaches them, keeps their maps equal to a node's plan, replaces them
// without a gap, and reads their counters and events. It decides nothing about
// chains (internal/plan does) and touches no addresses, routes or devices
// (internal/host does). The agent calls it; NewEngine is for `waystamp pot
// eval`.
//
// Programs and maps are pinned and outlive the process. Below
// PinDir/Instance:
//
//	gen-SEQ-HASH/       the maps of one generation, and the programs that plans
//	                    have needed so far
//	links/HOOK-IFINDEX-NETNS
//	                    the link of a program at an interface: at tc, xdp,
//	                    from (interfaces of functions) or out (TC egress)
//	filters/HOOK-IFINDEX-NETNS
//	                    on kernels without tcx, at TC: the mark of a filter of
//	                    clsact in place of the link
//	windows/slab-N      the replay windows of paths, shared by all generations
//	numbers/slab-N      the numbers of paths at headends, shared likewise
//	new-RANDOM/         an unfinished generation
//
// A generation is built aside, filled and armed before its directory gets its
// name; then the links are moved to its programs, one atomic step each. So the
// generation with the highest number is always complete, and a process that finds links
// with programs of an older one moves them. KeepPins restores removed pins.
//
// All functions that use a network interface must run on a thread in the
// node's network namespace.
package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// DefaultPinDir is the default directory of instances.
const DefaultPinDir = "/sys/fs/bpf/waystamp"

// Net has the operations on the node's network that a data path needs; *host.Net implements it.
type Net interface {
	// Device looks an interface up.
	Device(name string) (host.Device, error)
	// Filters are the classifiers at an end of clsact, in the order in which packets
	// meet them; they hold programs at TC where the kernel has no tcx (before Linux 6.6).
	Filters(index int, egress bool) ([]host.Filter, error)
	// SetFilter makes one; fresh: the error is host.ErrFilterThere if it exists; otherwise an
	// existing filter gets the program in one step.
	SetFilter(index int, egress bool, f host.Filter, program int, fresh bool) error
	RemoveFilter(index int, egress bool, f host.Filter) error
}

// Config has the places of a node's data path.
type Config struct {
	PinDir   string // on a bpf filesystem; "": DefaultPinDir
	Instance string // a directory of its own below PinDir

	// StateDir has the state that must survive a reboot: the numbers that headends have used. It
	// must exist as long as the secrets of the plan.
	StateDir string

	// Net is the network of the node. Detach may do without; then it cannot take
	// filters off.
	Net Net

	Log *slog.Logger

	// Building runs before each map is made and each program is loaded, which takes most of the
	// time of Apply. An error stops Apply, which then undoes its steps.
	Building func(step, what string) error

	clsact    bool // as if the kernel had no tcx; tests set it
	noDecapL3 bool // as if the kernel had no flag for what is below an outer header; tests set it

	// before runs before each step that can fail half-way; tests make it fail.
	before func(step, what string) error
}

// Steps at which a test can break off.
const (
	stepCreateMap   = "create map"
	stepLoad        = "load programs"
	stepPin         = "pin"
	stepReserve     = "reserve numbers"
	stepChange      = "change a map"
	stepWindow      = "place replay windows"
	stepNumbers     = "place packet numbers"
	stepArm         = "arm"
	stepCommit      = "rename the new generation"
	stepLinkUpdate  = "move a link"
	stepLinkAttach  = "attach"
	stepLinkDetach  = "detach"
	stepMove        = "move" // all pins are there a second time
	stepRemoveOld   = "remove the old generation"
	stepWriteNumber = "write numbers"
)

func (c Config) step(step, what string) error {
	if c.Building != nil && (step == stepCreateMap || step == stepLoad) {
		if err := c.Building(step, what); err != nil {
			return err
		}
	}
	if c.before == nil {
		return nil
	}
	return c.before(step, what)
}

// DegradedError means that a plan is in force, but not all of it.
type DegradedError struct {
	Problems []error
}

func (e *DegradedError) Error() string {
	return "in force, but not whole: " + errors.Join(e.Problems...).Error()
}

// Unwrap returns the problems.
func (e *DegradedError) Unwrap() []error { return e.Problems }

// Dataplane is the data path of one node. Its methods may be called by several
// goroutines at once.
type Dataplane struct {
	cfg     Config
	dir     string // PinDir/Instance
	lock    *os.File
	numbers *numbers // on disk

	mu       sync.Mutex
	gen      *generation // nil: none yet
	links    map[linkKey]*attached
	node     *plan.Node // in force; nil: none since Open
	topology topology   // its place on the machine
	cpus     int        // that the kernel may ever have
	decapL3  bool       // see haveDecapL3
	clsact   bool       // programs at TC are held by filters; see noTCX
	local    []netip.Addr
	gateways map[uint32]netip.Addr // see SetGateways
	events   *eventSource
	traced   *eventSource
	tracing  tracing
	problems []error
	withheld map[string]error   // functions that get no packets; see Withhold
	back     []string           // pins that were put back; see KeepPins
	seen     map[string]seenPin // by path
	onward   int                // connections that the gateway was let open, those over included until they are swept

	made     made                         // by the change that is under way
	counting map[uint32]tables.CounterKey // the numbers of the plan in force, by slot
	paces    map[tables.CounterKey]pace
	saved    *saved          // nil: other programs than the generation's may be at work
	force    *inForce        // what node has in the kernel; nil: not known for certain
	settled  tables.Contents // of the last change that was settled
	recall   recallCache
	earlier  *earlier // nil: not read yet
	given    map[event.Epoch]givenUp
	looked   map[event.Epoch]looked
}

// Open opens an instance with its pins, if it has any. It changes nothing that packets could
// meet. Only one process at a time can hold an instance.
func Open(cfg Config) (_ *Dataplane, err error) {
	if cfg.PinDir == "" {
		cfg.PinDir = DefaultPinDir
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := model.CheckName(cfg.Instance); err != nil {
		return nil, fmt.Errorf("instance %q %w", cfg.Instance, err)
	}
	if err := ensurePinDir(cfg.PinDir); err != nil {
		return nil, err
	}
	d := &Dataplane{cfg: cfg, dir: instanceDir(cfg.PinDir, cfg.Instance), events: newEventSource(tables.MapEvents), traced: newEventSource(tables.MapTraced), paces: map[tables.CounterKey]pace{}}
	if d.lock, err = lockInstance(d.dir, true); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if d.cpus, err = ebpf.PossibleCPU(); err != nil {
		return nil, fmt.Errorf("count CPUs: %w", err)
	}
	if d.decapL3, err = haveDecapL3(); err != nil {
		return nil, err
	}
	d.decapL3 = d.decapL3 && !cfg.noDecapL3
	d.numbers = openNumbers(cfg.StateDir)
	if d.clsact, err = noTCX(cfg); err != nil {
		return nil, err
	}
	if d.clsact {
		cfg.Log.Info("this kernel has no tcx (Linux 6.6): filters of clsact hold the programs at TC")
	}
	if d.links, err = openLinks(cfg, d.dir); err != nil {
		return nil, err
	}
	if d.gen, err = openGeneration(d.dir, cfg.Log); err != nil {
		return nil, err
	}
	if d.gen != nil {
		if err := d.useRings(d.gen); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// Close lets go of the instance and leaves its data path at work. Running calls
// of Events end.
func (d *Dataplane) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	errs = append(errs, d.events.close(), d.traced.close(), d.letGo())
	for _, l := range d.links {
		errs = append(errs, l.close())
	}
	d.links = nil
	if d.gen != nil {
		errs = append(errs, d.gen.close())
		d.gen = nil
	}
	if d.lock != nil {
		// Only an instance without anything in it goes with its directories, and only
		// if another process has not taken their place.
		dirs := []string{linksDir(d.dir), filtersDir(d.dir), windowsDir(d.dir), numbersDir(d.dir), d.dir}
		if own, err := d.ownsDirectory(); err != nil || !own {
			dirs = nil
			errs = append(errs, err)
		}
		for _, dir := range dirs {
			if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !isNotEmpty(err) {
				errs = append(errs, err)
			}
		}
		errs = append(errs, d.lock.Close())
		d.lock = nil
	}
	return errors.Join(errs...)
}

// Apply puts a plan in force, on exactly the interfaces that it names. If it cannot, it returns
// an error and the earlier plan stays in force; a DegradedError means that the plan is in force
// except for the parts that it names.
//
// It changes, reads and saves only what differs from the plan in force, if that is in visits, egresses and epochs of
// headends; what others have done to the maps meanwhile is for Reconcile.
func (d *Dataplane) Apply(n plan.Node) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	t, err := resolve(n, d.cfg.Net.Device, d.withheld)
	if err != nil {
		return err
	}
	if err := t.whole(); err != nil {
		return err
	}
	defer d.keepTraces()
	left, err := d.leaving(&n) // before others may get the places of these counters
	if err != nil {
		return err
	}
	done, err := d.applyPartLocked(n, t)
	if !done && err == nil {
		if err = d.applyLocked(n, t, false); err == nil {
			err = d.degraded()
		}
	}
	if _, degraded := errors.AsType[*DegradedError](err); err == nil || degraded {
		if lost := d.keepEarlier(&n, left); lost != nil { // what is in memory counts on
			d.cfg.Log.Warn("counts of SIDs that were given up are not on disk; the counters of their chains go down when the agent starts again", "err", lost)
		}
	}
	return err
}

// Withhold sets the functions that get no packets, and the reasons, from the next Apply or
// Reconcile on: packets for them are refused (function-gone), and the interfaces of such a
// function may be missing. All other functions get packets. It keeps the map.
func (d *Dataplane) Withhold(functions map[string]error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.withheld = functions
}

// Reconcile restores the plan in force in the kernel: after changes and removals by others,
// after changes of its interfaces, and for headends with few numbers left. It reports an
// interface that is missing, or to which no program can be attached (AttachError), in a
// DegradedError; it does all else, and the next call tries again. Programs that are attached to
// such an interface stay.
func (d *Dataplane) Reconcile() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.node == nil {
		return errors.New("reconcile: no plan is in force")
	}
	defer d.keepTraces()
	if err := d.reconcileLocked(); err != nil {
		return err
	}
	return d.degraded()
}

func (d *Dataplane) reconcileLocked() error {
	n := *d.node
	t, err := resolve(n, d.cfg.Net.Device, d.withheld)
	if err != nil {
		return err
	}
	return d.applyLocked(n, t, true)
}

// SetLocal sets the node's own addresses: traffic to them is never steered and needs no proof.
// If they exceed the tables, a generation with larger tables replaces this one.
func (d *Dataplane) SetLocal(addrs []netip.Addr) error {
	local := make([]netip.Addr, 0, len(addrs))
	for _, a := range addrs {
		local = append(local, a.Unmap().WithZone(""))
	}
	slices.SortFunc(local, netip.Addr.Compare)
	local = slices.Compact(local)

	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.local
	d.local = local
	if d.gen == nil || d.node == nil {
		return nil
	}
	defer d.keepTraces()
	err := d.updateMapsLocked(*d.node)
	if errors.Is(err, tables.ErrCapacity) {
		err = d.reconcileLocked()
	}
	if err != nil {
		d.local = before
		return fmt.Errorf("own addresses: %w", err)
	}
	return nil
}

// SetGateways sets the addresses whose routes the programs look up for packets to nodes with these
// labels, in place of the plan's addresses: gateways of routes that push labels. It keeps the map.
func (d *Dataplane) SetGateways(byLabel map[uint32]netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if maps.Equal(byLabel, d.gateways) {
		return nil
	}
	before := d.gateways
	d.gateways = byLabel
	if d.gen == nil || d.node == nil {
		return nil
	}
	defer d.keepTraces()
	if err := d.updateMapsLocked(*d.node); err != nil {
		d.gateways = before
		return fmt.Errorf("gateways of packets with labels: %w", err)
	}
	return d.gen.flushNexthops()
}

// byGateways is the plan with the gateways in place of the addresses of nodes with labels.
func (d *Dataplane) byGateways(n plan.Node) plan.Node {
	if n.MPLS == nil || len(d.gateways) == 0 {
		return n
	}
	m := *n.MPLS
	m.Nodes = slices.Clone(m.Nodes)
	for i, to := range m.Nodes {
		if gw, ok := d.gateways[to.Label]; ok {
			m.Nodes[i].Address = gw
		}
	}
	n.MPLS = &m
	return n
}

func (d *Dataplane) degraded() error {
	if len(d.problems) == 0 {
		return nil
	}
	return &DegradedError{slices.Clone(d.problems)}
}
