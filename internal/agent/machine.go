package agent

import (
	"cmp"
	"context"
	"net/netip"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/doctor"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/plan"
)

// dataPath has the operations of internal/dataplane that an agent uses.
type dataPath interface {
	// Apply puts a plan in force, or leaves the earlier one. A *dataplane.DegradedError means
	// that it is in force except for a part.
	Apply(n plan.Node) error
	Reconcile() error
	// Withhold counts from the next Apply or Reconcile on.
	Withhold(functions map[string]error)
	SetLocal(own []netip.Addr) error
	// SetGateways sets the addresses that are looked up in place of those of nodes with labels.
	SetGateways(byLabel map[uint32]netip.Addr) error
	FlushNexthops() error
	RefreshTargets() error

	SaveNews() error
	SaveWindows() error
	RenewNumbers() error
	Numbers() ([]dataplane.NumberState, error)

	KeepPins() (back []string, err error)
	PinDir() string
	Clsact() bool
	Gone() []string // functions whose packets are refused as function-gone

	OpenOnward(client, service, source, origin netip.AddrPort, back uint32) error
	ConnectionPart(function string, client, server netip.AddrPort) (uint32, error)
	Connections(functions []string, limit int) (first []dataplane.Connection, all int, err error)
	SweepConnections(idle map[string]time.Duration) (map[string]dataplane.Connections, error)
	Counters() (dataplane.Counts, error)
	Refusals() ([]dataplane.RefusalCount, error)
	FunctionsInFlight() ([]dataplane.FunctionCount, error)
	Interfaces() ([]dataplane.InterfaceState, error)
	Events(ctx context.Context, f func(event.Event)) error
	Trace(wanted []event.Trace) error
	Traced(ctx context.Context, f func(event.Hop)) error
	// Drained tells of epochs which numbers headends of the node gave out and its egresses have seen.
	Drained(of []event.Epoch) ([]event.Given, []event.Seen, error)

	Close() error
}

// network has the operations of internal/host that an agent uses, in the node's namespace.
type network interface {
	// Do runs f on a thread in the namespace.
	Do(f func() error) error
	Addresses() ([]netip.Addr, error)
	Link(name string) (host.Link, error)
	LinkAt(index int) (host.Link, error)
	HasIPv4(name string) (bool, error)
	FeatureOn(name, feature string) (bool, error)
	Sysctl(key string) (string, error)

	Locators() ([]netip.Prefix, error)
	AnnounceLocator(locator netip.Prefix) error
	WithdrawLocator(locator netip.Prefix) error
	sidRoutes
	neighbours

	CutOnSend(name string) error
	EnsureCutter(c host.Cutter) (made bool, err error)
	RemoveCutter(c host.Cutter) error

	// Watch calls f for each change of these kinds, WatchAddresses with all addresses
	// after each, until ctx ends (with its cause).
	Watch(ctx context.Context, kinds host.Change, f func() error) error
	WatchAddresses(ctx context.Context, f func([]netip.Addr)) error
}

// machine is the machine of an agent: this machine's kernel, or a test's fake.
type machine struct {
	net    network
	filter packetFilter
	places streamPlaces
	check  func() (warnings []string, err error) // what an agent needs outside of its plan; in the namespace
	open   func() (dataPath, error)
	close  func() error
}

// kernelNet is the network of the kernel.
type kernelNet struct{ *host.Net }

func (n kernelNet) Do(f func() error) error { return n.NetNS().Do(f) }

// thisMachine is the kernel that the process runs on.
func thisMachine(ctx context.Context, cfg Config) (machine, error) {
	n, close := cfg.Net, func() error { return nil }
	if n == nil {
		var err error
		if n, err = host.Open(nil); err != nil {
			return machine{}, err
		}
		close = n.Close
	}
	return machine{
		net:    kernelNet{n},
		filter: kernelFilter{n},
		places: newKernelStreams(n, cfg.Instance, cfg.RunDir, cfg.Log),
		check:  doctor.Machine{Instance: cfg.Instance, RunDir: cfg.RunDir, StateDir: cfg.StateDir, PinDir: cmp.Or(cfg.PinDir, dataplane.DefaultPinDir)}.Start,
		open: func() (dataPath, error) {
			d := cfg.dataplane(n)
			d.Building = cfg.building(ctx)
			dp, err := dataplane.Open(d)
			if err != nil {
				return nil, err // and not a nil pointer in the interface
			}
			return dp, nil
		},
		close: close,
	}, nil
}
