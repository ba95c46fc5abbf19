// Package agent is the daemon of one node: it applies a plan file on the machine and keeps it
// applied. It joins internal/dataplane (programs and maps) with internal/host (routes,
// addresses, devices), and reports the state over a unix socket. internal/plan defines plans,
// internal/explain explains packets. waystamp agent, watch and get call it.
//
// The data path does not depend on the daemon: when that stops, is killed or is upgraded,
// programs, guard and locator route stay. Only Detach removes them.
package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/netfilter"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
	"github.com/waystamp/waystamp/internal/scrape"
	"github.com/waystamp/waystamp/internal/seal"
)

// ReconcileEvery is the interval after which changes by other programs are undone.
const ReconcileEvery = 30 * time.Second

// Config has the settings of an agent.
type Config struct {
	PlanFile string
	// Fallback is a file with the plan that was in force before. The agent starts from it if it
	// cannot start from PlanFile. It may be missing. "": there is none.
	Fallback string
	// InsecurePlan takes the plan file also if others can read or change it.
	InsecurePlan bool
	// Force also accepts a plan without an address of this machine, or one that is older than
	// the plan that was in force before.
	Force    bool
	Instance string // name of its pins; one agent each
	Node     string // only plans of this node are accepted; "": the node of the first plan
	RunDir   string // socket, and state that may be lost at a reboot
	StateDir string // state that must survive a reboot; see dataplane.Config
	PinDir   string // "": dataplane.DefaultPinDir
	// GatewayFiles is the folder that names of a gateway's files count from, and GatewayAudit its log.
	GatewayFiles string
	GatewayAudit string
	// AuditKey is what signs that log now; nil: it is not signed.
	AuditKey func() (*gateway.AuditKey, error)
	Metrics  string // HOST:PORT to serve Prometheus' metrics on; "": on the socket alone
	Flows    FlowExport
	Log      *slog.Logger
	Stdout   io.Writer // gets one line of JSON when the data path is armed

	// Report is called, from one goroutine, with the plan in force when that has changed; nil:
	// no reports.
	Report func(InForce)

	// Refused is called, from one goroutine, with each refused packet that the node samples, and must
	// not wait; nil: it is not.
	Refused func(event.Event)

	// Traced is called, from one goroutine, with each traced packet at each position of its path that the node is, and must
	// not wait; nil: it is not. Traces are those that are wanted of the node's headends, and TracesChanged has a value
	// when they have changed; nil: none ever are.
	Traced        func(event.Hop)
	Traces        func() []event.Trace
	TracesChanged <-chan struct{}

	// Numbers is called, from one goroutine, each second or so with the numbers of the epochs that Drains says, and must not wait; nil: it
	// is not. DrainsChanged has a value when Drains may say others than before.
	Numbers       func([]event.Given, []event.Seen)
	Drains        func() []event.Epoch
	DrainsChanged <-chan struct{}

	// End has the key and certificate of an end of sealed parts of this node, by its name, and EndCertificate until when that one is
	// valid; nil: it has no controller.
	End            func(name string) (seal.Identity, error)
	EndCertificate func(name string) time.Time

	// ClockOff is how much this machine's clock is ahead of the controller's, as last heard; nil, or not known: it has none.
	ClockOff func() (off time.Duration, known bool)

	// CertificateEnds is when the node's certificate does; nil: it has no controller.
	CertificateEnds func() time.Time

	// Net is the network of the node; nil: that of the process. Run does not
	// close it.
	Net *host.Net
	// ReconcileEvery overrides the constant of that name; tests do.
	ReconcileEvery time.Duration
}

// InForce is which plan the kernel holds, once it holds it.
type InForce struct {
	Revision uint64   // of the plan in force; 0: it is not a controller's
	Digest   string   // of its file: SHA-256, hexadecimal
	Refused  uint64   // the revision of a later plan that is not in force
	Error    string   // why the latest plan is not in force, or another error
	Problems []string // parts of the plan that are not in force
	Warnings []string
}

// building logs how far the data path is, and ends it when ctx has ended.
func (c Config) building(ctx context.Context) func(step, what string) error {
	last := ""
	return func(step, what string) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if step != last {
			c.Log.Info("building the data path", "step", step)
		}
		last = step
		c.Log.Debug("building the data path", "step", step, "what", what)
		return nil
	}
}

func (c Config) dataplane(n *host.Net) dataplane.Config {
	return dataplane.Config{
		PinDir: c.PinDir, Instance: c.Instance, StateDir: c.StateDir, Log: c.Log, Net: n,
	}
}

// forThisMachine refuses a plan without an address of this machine.
func (a *agent) forThisMachine(n plan.Node, own []netip.Addr) error {
	here := func(addr netip.Addr) bool { return addr == n.Address || n.Locator.Contains(addr) }
	if a.cfg.Force || slices.ContainsFunc(own, here) {
		return nil
	}
	return fmt.Errorf("%w, or its address is not there yet: no interface has the address %s of node %s; take the plan of this node, add the address (ip -6 address add %[2]s dev lo), or give the agent --force",
		ErrOtherNode, n.Address, n.Name)
}

// ErrOtherNode means that a plan is for another node than this agent's.
var ErrOtherNode = errors.New("the plan is for another node")

// PlanError means that a plan was refused. The one before stays in force.
type PlanError struct {
	Path string
	Err  error
}

func (e *PlanError) Error() string { return fmt.Sprintf("plan %s: %v", e.Path, e.Err) }

// Unwrap returns the cause.
func (e *PlanError) Unwrap() error { return e.Err }

// agent is a running one. Its loop alone applies plans.
type agent struct {
	cfg    Config
	net    network
	filter packetFilter
	places streamPlaces
	dp     dataPath
	state  *stateFile
	status *statusBoard
	log    *history

	readers *readers // of log
	recent  recentRefusals

	loaded  map[string][]netfilter.Ruleset // by namespace, as last loaded
	filters filters                        // as last ensured
	streams streams
	revoked revokedList

	node    string                    // the name that plans must have; "": none yet
	plan    *plan.Node                // in force; nil: none yet
	inForce atomic.Pointer[plan.Node] // the same, for other goroutines than the loop
	loss    lossWatch
	silence silenceWatch
	flows   flowsSent
	seen    string // digest of the plan file as last read; "": it cannot be read
	again   []byte // plan that the machine was not ready for
	said    string // to systemd, as the status

	insecure string // last logged reason why the plan file is insecure

	saveAfter   time.Time    // replay windows are not saved before
	savedAt     atomic.Int64 // when a successful saving of them began, in nanoseconds since 1970; 0: none has
	renewAfter  time.Time    // packet numbers are not renewed before
	drainAfter  time.Time    // numbers of draining epochs are not looked at before
	retryAfter  time.Time    // no plan is tried again before
	repairAfter time.Time    // changes by other programs are not undone before
	unseen      bool         // devices have changed meanwhile

	fallsBack bool // the plan that is being applied was in force before a later one was tried

	noSIDs       bool // no SID is announced, and none is to be
	noNeighbours bool // none are kept, and the plan has no labels

	clockWrong bool // beside the controller's, as last looked at

	refused uint64   // the revision of the plan that was refused last; 0: none since one is in force
	told    *InForce // by Report
}

// Run applies the plan file, and follows its changes until ctx ends. It then returns nil and
// leaves the data path in force. Any problem with the first plan, the machine or the permissions
// is an error before anything is changed; a later bad plan is refused, and the earlier plan
// stays in force.
func Run(ctx context.Context, cfg Config) error { return run(ctx, cfg, thisMachine) }

// run is Run on some machine.
func run(ctx context.Context, cfg Config, on func(context.Context, Config) (machine, error)) (err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Stdout == nil {
		cfg.Stdout = io.Discard
	}
	if cfg.ReconcileEvery == 0 {
		cfg.ReconcileEvery = ReconcileEvery
	}
	began := time.Now()
	cfg.Log.Info("reading the plan", "file", cfg.PlanFile)
	a := &agent{cfg: cfg, node: cfg.Node, log: newHistory(), readers: newReaders(), loaded: map[string][]netfilter.Ruleset{}}
	a.status = newStatusBoard(cfg.Instance)

	latest, refused := a.readPlan(ctx)
	before, err := a.readFallback(ctx)
	if err != nil {
		return err
	}
	if refused != nil && before == nil {
		return refused
	}
	m, err := on(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	a.net, a.filter, a.places = m.net, m.filter, m.places
	a.streams.by, a.streams.wakeUp = map[string]*streamFunction{}, make(chan struct{}, 1)
	defer a.leaveStreams()
	if err := a.inNamespace(func() error {
		warnings, err := m.check()
		for _, w := range warnings { // to the log alone: they stay until the agent is started anew
			cfg.Log.Warn("this machine is not fit", "warning", w)
		}
		return err
	}); err != nil {
		return err
	}
	// Before the final reading: later changes are seen.
	changes, err := watchPlan(cfg.PlanFile)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, changes.close()) }()
	if err := os.MkdirAll(cfg.RunDir, 0o750); err != nil {
		return fmt.Errorf("make the run directory: %w", err)
	}
	if err := a.inNamespace(func() error {
		a.dp, err = m.open()
		return err
	}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.dp.Close()) }()
	if a.state, err = openState(cfg.RunDir); err != nil {
		return err
	}
	listener, err := listen(SocketPath(cfg.RunDir))
	if err != nil {
		return err
	}
	defer listener.Close()
	var scraped net.Listener
	if cfg.Metrics != "" {
		if scraped, err = scrape.Listen(cfg.Metrics); err != nil {
			return err
		}
		defer scraped.Close()
	}

	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := a.begin(latest, refused, before); err != nil {
		return err
	}
	cfg.Log.Info("the data path is armed", "node", a.plan.Name, "after", time.Since(began).Round(time.Millisecond))
	a.sayStatus()
	a.say(daemon.SdNotifyReady)
	defer a.say(daemon.SdNotifyStopping)
	return a.serve(ctx, listener, scraped, changes)
}

// inNamespace runs f on a thread in the node's network namespace.
func (a *agent) inNamespace(f func() error) error { return a.net.Do(f) }

// begin starts from the plan file, or from the plan that was in force before: then the later one
// is refused as if it had come just now. refused is why the plan file could not be read.
func (a *agent) begin(latest readPlan, refused error, before *readPlan) error {
	if refused == nil {
		refused = a.start(latest.node)
	}
	if _, isPlan := errors.AsType[*PlanError](refused); !isPlan || before == nil {
		return refused
	}
	seen := a.seen
	a.seen, a.fallsBack = digest(before.content), true
	err := a.start(before.node)
	a.seen, a.fallsBack = seen, false
	if e, isPlan := errors.AsType[*PlanError](err); isPlan {
		err = e.Err
	}
	if err != nil {
		return fmt.Errorf("%w; the agent cannot start from the previous plan %s either: %w", refused, a.cfg.Fallback, err)
	}
	a.again, a.retryAfter, a.refused = latest.content, time.Now().Add(failurePause), latest.node.Revision
	a.refuse(refused, true)
	a.tell()
	return nil
}

// start applies the first plan, and undoes its steps if it cannot.
func (a *agent) start(n plan.Node) error {
	own, err := a.net.Addresses()
	if err != nil {
		return err
	}
	if err := a.inNamespace(func() error { return a.dp.SetLocal(own) }); err != nil {
		return err
	}
	if err := a.forThisMachine(n, own); err != nil {
		return &PlanError{a.cfg.PlanFile, err}
	}
	if err := a.apply(n); err != nil {
		return &PlanError{a.cfg.PlanFile, err}
	}
	a.tell()
	if err := json.NewEncoder(a.cfg.Stdout).Encode(map[string]bool{"ready": true}); err != nil {
		return fmt.Errorf("say that the agent is ready: %w", err)
	}
	return nil
}

// tell reports the plan in force, if that has changed.
func (a *agent) tell() {
	if a.cfg.Report == nil || a.plan == nil {
		return
	}
	s := a.status.get()
	now := InForce{Revision: a.plan.Revision, Digest: s.Plan, Refused: a.refused, Error: s.Error, Problems: s.Problems, Warnings: s.Warnings}
	if a.told != nil && reflect.DeepEqual(*a.told, now) {
		return
	}
	a.told = &now
	a.cfg.Report(now)
}

// apply puts a plan in force, or leaves the one before.
func (a *agent) apply(n plan.Node) error {
	err := a.applyPlan(n)
	if err != nil {
		a.refused = n.Revision
		return err
	}
	a.refused = 0
	return nil
}

func (a *agent) applyPlan(n plan.Node) error {
	before := a.state.get()
	if err := before.older(n); err != nil && !a.fallsBack {
		if !a.cfg.Force {
			return fmt.Errorf("%w; take the latest plan, or give the agent --force", err)
		}
		a.cfg.Log.Warn("an older plan is taken, as --force says", "err", err)
	}
	// The locator first: a packet that the programs do not process must not be forwarded by
	// another route, not even between two steps.
	announced, err := a.announce(n.Locator)
	if err != nil {
		return err
	}
	next := before.with(stateOf(n, a.cfg.Instance))
	if err := a.state.put(next); err != nil {
		return errors.Join(err, a.withdraw(announced))
	}
	made, err := a.ensureCutters(n)
	if err == nil {
		a.filters = a.ensureFilters(n)
		a.ensureStreams(n, a.filters.withheld)
		a.dp.Withhold(a.filters.withheld)
		a.lookUpGateways(n)
		err = a.inNamespace(func() error { return a.dp.Apply(n) })
	}
	degraded, inForce := errors.AsType[*dataplane.DegradedError](err)
	if err != nil && !inForce {
		err = errors.Join(err, a.removeCutters(made), a.removeFilters(next.Filters, before.Filters), a.withdraw(announced), a.state.put(before))
		if a.plan != nil { // its functions may have the rules of n by now
			a.filters = a.ensureFilters(*a.plan)
			a.ensureStreams(*a.plan, a.filters.withheld)
			a.dp.Withhold(a.filters.withheld)
			a.serveStreams()
		}
		return err
	}
	a.plan = &n
	a.inForce.Store(&n)
	a.serveStreams()
	if err := a.removeCutters(unneededCutters(a.cfg.Instance, n)); err != nil {
		return err
	}
	for _, old := range next.Locators {
		if old != n.Locator {
			if err := a.withdraw(old); err != nil {
				return err
			}
		}
	}
	notAdvertised, notRemoved := a.advertise(), a.removeOldFilters()
	rest := stateOf(n, a.cfg.Instance)
	if notAdvertised != nil { // Detach looks into the old locators, too
		rest.Locators = next.Locators
	}
	if notRemoved != nil { // and the next reconciliation tries again
		rest.Filters = next.Filters
	}
	if err := a.state.put(rest); err != nil {
		return err
	}
	a.node = n.Name
	a.status.applied(n, a.seen)
	if notAdvertised != nil {
		a.fail(failedSIDs, notAdvertised)
	}
	if notRemoved != nil {
		a.fail(failedFilters, notRemoved)
	}
	a.report(degraded)
	a.keepNeighbours()
	a.lookAtForwarding()
	return nil
}

// announce returns the locator if it was not announced already.
func (a *agent) announce(locator netip.Prefix) (netip.Prefix, error) {
	have, err := a.net.Locators()
	if err != nil {
		return netip.Prefix{}, err
	}
	for _, l := range have {
		if l == locator {
			return netip.Prefix{}, nil
		}
	}
	return locator, a.net.AnnounceLocator(locator)
}

func (a *agent) withdraw(locator netip.Prefix) error {
	if !locator.IsValid() {
		return nil
	}
	return a.net.WithdrawLocator(locator)
}

// report shows the parts of the plan that are not in force; nil: all are.
func (a *agent) report(d *dataplane.DegradedError) {
	var problems []string
	if d != nil {
		for _, p := range withoutPins(d.Problems) {
			problems = append(problems, p.Error())
		}
	}
	problems = append(problems, a.filters.problems...)
	fresh, whole := a.status.degraded(problems)
	for _, p := range fresh {
		a.cfg.Log.Warn("the plan is in force, but not completely", "err", p)
	}
	if whole {
		a.cfg.Log.Info("the plan is whole again")
	}
}

// serve follows all that can change, until ctx ends.
func (a *agent) serve(ctx context.Context, l *listener, scraped net.Listener, changes *fileWatch) error {
	group, ctx := errgroup.WithContext(ctx)
	// Each message means "look again"; one stands for any number of changes.
	addresses := make(chan []netip.Addr)
	links := make(chan struct{}, 1)
	plans := make(chan struct{}, 1)
	settings := make(chan struct{}, 1)
	routes := make(chan struct{}, 1)
	pins := make(chan struct{}, 1)

	group.Go(func() error {
		return a.dp.Events(ctx, func(e event.Event) {
			a.log.add(e)
			if a.cfg.Refused != nil {
				a.cfg.Refused(e)
			}
		})
	})
	if a.cfg.Traced != nil {
		group.Go(func() error { return a.dp.Traced(ctx, a.cfg.Traced) })
	}
	group.Go(func() error { return a.serveHTTP(ctx, l) })
	if scraped != nil {
		group.Go(func() error { return scrape.Serve(ctx, scraped, Metrics, a.metrics) })
	}
	if a.cfg.Flows.Collector.IsValid() {
		group.Go(func() error { return a.exportFlows(ctx) })
	}
	group.Go(func() error {
		return changes.run(ctx, func() { notify(plans) }, func() { notify(pins) })
	})
	group.Go(func() error { return a.keepPins(ctx, changes, pins) })
	group.Go(func() error {
		// Without it, the next tick notices an unmounted file system.
		if err := watchMounts(ctx, func() { notify(pins) }); ctx.Err() == nil {
			a.cfg.Log.Warn("an unmount of the bpf filesystem cannot be watched, and is detected later", "within", a.cfg.ReconcileEvery, "err", err)
		}
		return nil
	})
	group.Go(func() error {
		return a.net.WatchAddresses(ctx, func(own []netip.Addr) {
			select {
			case addresses <- own:
			case <-ctx.Done():
			}
		})
	})
	group.Go(func() error {
		kinds := host.ChangeLinks
		if a.dp.Clsact() { // others can take our programs away
			kinds |= host.ChangeFilters
		}
		return a.net.Watch(ctx, kinds, func() error {
			notify(links)
			return nil
		})
	})
	group.Go(func() error {
		return a.net.Watch(ctx, host.ChangeLinks|host.ChangeRoutes, func() error {
			notify(routes)
			return nil
		})
	})
	group.Go(func() error {
		return a.net.Watch(ctx, host.ChangeForwarding, func() error {
			notify(settings)
			return nil
		})
	})
	group.Go(func() error {
		return a.net.Watch(ctx, host.ChangeLinks|host.ChangeRoutes|host.ChangeNeighbours, a.dp.FlushNexthops)
	})
	group.Go(func() error {
		a.noteRefusals()
		a.followTraces() // those that were wanted before there was an agent
		tick := time.NewTicker(a.cfg.ReconcileEvery)
		defer tick.Stop()
		recent := time.NewTicker(recentEvery)
		defer recent.Stop()
		losses := time.NewTicker(adviseEvery)
		defer losses.Stop()
		second := time.NewTicker(time.Second)
		defer second.Stop()
		var alive <-chan time.Time
		if every := a.watchdog(); every > 0 {
			t := time.NewTicker(every)
			defer t.Stop()
			alive = t.C
		}
		for {
			select {
			case <-alive:
				a.say(daemon.SdNotifyWatchdog)
			case <-ctx.Done():
				return context.Cause(ctx)
			case own := <-addresses:
				if err := a.inNamespace(func() error { return a.dp.SetLocal(own) }); err != nil {
					a.fail("own addresses could not be set", err)
				}
			case <-plans:
				a.followPlan(ctx)
			case <-links:
				a.lookAgain(ctx)
			case <-routes:
				a.keepNeighbours()
			case <-settings:
				a.lookAtForwarding()
			case <-a.cfg.TracesChanged:
				a.followTraces()
			case <-a.cfg.DrainsChanged:
				a.followDrains()
			case <-a.streams.wakeUp:
				a.followStreams()
			case <-recent.C:
				a.noteRefusals()
			case <-losses.C:
				a.adviseCaches()
			case <-second.C:
				// No event reports changes at the other end of a veth.
				if err := a.inNamespace(a.dp.RefreshTargets); err != nil {
					a.fail("XDP redirects could not be brought up to date", err)
				}
				a.saveWindows()
				a.renewNumbers()
				a.followDrains()
				a.sayStatus()
				if a.unseen {
					a.lookAgain(ctx)
				}
			case <-tick.C:
				// Also finds changes that inotify does not report, such as the target of a
				// symbolic link.
				a.followPlan(ctx)
				a.retry(ctx)
				a.reconcile()
				a.keepNeighbours()
				a.sweepConnections()
				notify(pins)
			}
			a.tell()
		}
	})
	err := group.Wait()
	if err := a.dp.SaveWindows(); err != nil {
		a.cfg.Log.Error("the replay windows could not be saved", "err", err)
	}
	if errors.Is(err, context.Canceled) {
		a.cfg.Log.Info("the agent stops; its data path, guard and locator route stay in force", "instance", a.cfg.Instance)
		return nil
	}
	return err
}

// followTraces sets the traces that are wanted. What a headend cannot trace is no fault of its data path.
func (a *agent) followTraces() {
	if a.cfg.Traces == nil {
		return
	}
	if err := a.dp.Trace(a.cfg.Traces()); err != nil {
		a.cfg.Log.Warn("packets are not traced as the controller wants", "err", err)
	}
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// saveShare bounds the part of the time that goes into each of saving replay windows
// and renewing numbers.
const saveShare = 50

// saveWindows writes the egress's accepted numbers to disk, each second, or as often as possible
// without much CPU time.
func (a *agent) saveWindows() {
	start := time.Now()
	if start.Before(a.saveAfter) {
		return
	}
	err := a.dp.SaveNews()
	if err != nil {
		err = fmt.Errorf("the replay windows could not be saved: %w", err)
	}
	switch news := a.status.saved(err); {
	case news && err != nil:
		a.cfg.Log.Error("after a reboot the machine may accept replayed packets", "err", err)
	case news:
		a.cfg.Log.Info("the replay windows are saved again")
	}
	if err == nil {
		a.savedAt.Store(start.UnixNano())
	}
	a.saveAfter = time.Now().Add(saveShare * time.Since(start))
}

// renewNumbers gives headends more packet numbers in time, each second, or as often as possible
// without much CPU time.
func (a *agent) renewNumbers() {
	start := time.Now()
	if start.Before(a.renewAfter) {
		return
	}
	if err := a.dp.RenewNumbers(); err != nil {
		a.fail("headends could not be given more packet numbers", err)
	}
	a.renewAfter = time.Now().Add(saveShare * time.Since(start))
}

// followDrains tells the controller of the numbers of epochs that drain, each second, or as often as possible without much CPU time. What
// it is not told of drains by time.
func (a *agent) followDrains() {
	if a.cfg.Drains == nil || a.cfg.Numbers == nil {
		return
	}
	start := time.Now()
	of := a.cfg.Drains()
	if len(of) == 0 || start.Before(a.drainAfter) {
		return
	}
	given, seen, err := a.dp.Drained(of)
	a.drainAfter = time.Now().Add(saveShare * time.Since(start))
	if err != nil {
		a.cfg.Log.Warn("the numbers of epochs that drain cannot be read; they drain by time", "err", err)
		return
	}
	if len(given)+len(seen) > 0 {
		a.cfg.Numbers(given, seen)
	}
}

// Parts of a plan in force that could not be brought about.
const (
	failedSIDs    = "the routes of SIDs could not be brought to the plan"
	failedFilters = "resources of removed functions could not be removed"
)

// fail shows an error until a reconciliation succeeds, and logs it once.
func (a *agent) fail(what string, err error) {
	if a.status.failed(fmt.Errorf("%s: %w", what, err)) {
		a.cfg.Log.Error(what, "err", err)
	}
}

// refuse logs the error of a new plan, and shows it until a plan can be put in force. anew:
// always log; otherwise only a new error.
func (a *agent) refuse(err error, anew bool) {
	const what = "the new plan is refused and the one before stays in force"
	if a.status.refused(fmt.Errorf("%s: %w", what, err)) || anew {
		a.cfg.Log.Error(what, "err", err)
	}
}

// readPlan is a plan as its file has it.
type readPlan struct {
	content []byte // nil: it cannot be tried again
	node    plan.Node
}

// readPlan reads the plan file and checks its node.
func (a *agent) readPlan(ctx context.Context) (readPlan, error) {
	b, err := a.readFile(ctx)
	if err != nil {
		return readPlan{}, &PlanError{a.cfg.PlanFile, err}
	}
	n, err := a.decode(ctx, b)
	if err != nil {
		return readPlan{}, err
	}
	return readPlan{b, n}, nil
}

// readFallback reads the plan that was in force before; nil: there is no usable one.
func (a *agent) readFallback(ctx context.Context) (*readPlan, error) {
	if a.cfg.Fallback == "" {
		return nil, nil
	}
	r, err := await.Do(ctx, func() (*readPlan, error) {
		b, err := planfile.Read(a.cfg.Fallback)
		if err != nil {
			return nil, err
		}
		n, err := plan.DecodeNode(b)
		return &readPlan{b, n}, err
	})
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err == nil:
		return r, nil
	case !errors.Is(err, fs.ErrNotExist):
		a.cfg.Log.Warn("the plan that was in force before cannot be used", "file", a.cfg.Fallback, "err", err)
	}
	return nil, nil
}

func (a *agent) decode(ctx context.Context, b []byte) (plan.Node, error) {
	a.seen = digest(b)
	// Of a large plan it takes seconds.
	n, err := await.Do(ctx, func() (plan.Node, error) { return plan.DecodeNode(b) })
	if err != nil {
		return plan.Node{}, &PlanError{a.cfg.PlanFile, err}
	}
	if ends := n.CertifiedEnds(); a.cfg.End == nil && len(ends) > 0 {
		return plan.Node{}, &PlanError{a.cfg.PlanFile, fmt.Errorf("it is a controller's, which signs the keys of ends of sealed parts (%s), and this agent has no controller: start it with --controller in place of --plan, or give it a plan of waystamp plan, which has these keys",
			strings.Join(slices.Sorted(maps.Keys(ends)), ", "))}
	}
	if a.node != "" && n.Name != a.node {
		return plan.Node{}, &PlanError{a.cfg.PlanFile, fmt.Errorf("%w: %s; this is the agent of %s", ErrOtherNode, n.Name, a.node)}
	}
	return n, nil
}

// followPlan applies the plan file if it has changed.
func (a *agent) followPlan(ctx context.Context) {
	b, err := a.readFile(ctx)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		anew := a.seen != ""
		a.seen = ""
		a.refuse(&PlanError{a.cfg.PlanFile, err}, anew)
		return
	}
	if a.seen == "" && digest(b) == a.status.get().Plan { // the one in force is back
		a.seen, a.again = digest(b), nil
		a.status.refused(nil)
		a.cfg.Log.Info("the plan file contains the plan in force again")
		return
	}
	if digest(b) != a.seen {
		a.again = nil
		a.try(ctx, b, true)
	}
}

// lookAgain does the work that has become possible or necessary by changes of devices. A failed
// attempt changes devices too (cutters and filters are added and removed): without a pause after
// a failure the agent would repeat it all the time.
func (a *agent) lookAgain(ctx context.Context) {
	now := time.Now()
	retry, repair := !now.Before(a.retryAfter), !now.Before(a.repairAfter)
	a.unseen = !retry || !repair
	if retry {
		a.retry(ctx)
	}
	if repair {
		a.reconcile()
	}
}

// failurePause is the time after a failure in which changes of devices cause no new attempt.
const failurePause = time.Second

// retry tries a plan again that the machine was not ready for.
func (a *agent) retry(ctx context.Context) {
	if a.again != nil {
		a.try(ctx, a.again, false)
	}
}

func (a *agent) try(ctx context.Context, b []byte, anew bool) {
	n, err := a.decode(ctx, b)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		a.refuse(err, anew)
		return
	}
	if err := a.apply(n); err != nil {
		a.again = b
		a.retryAfter = time.Now().Add(failurePause)
		a.refuse(&PlanError{a.cfg.PlanFile, err}, anew)
		return
	}
	a.again = nil
	a.cfg.Log.Info("the new plan is in force", "node", n.Name)
}

// reconcile undoes changes by other programs.
func (a *agent) reconcile() {
	if _, err := a.ensureCutters(*a.plan); err != nil {
		// Only functions that need them are affected: the rest is done.
		a.cfg.Log.Error("super-packets cannot be cut for functions", "err", err)
	}
	a.filters = a.ensureFilters(*a.plan)
	a.ensureStreams(*a.plan, a.filters.withheld)
	a.serveStreams()
	a.dp.Withhold(a.filters.withheld)
	err := a.inNamespace(a.dp.Reconcile)
	degraded, inForce := errors.AsType[*dataplane.DegradedError](err)
	if err != nil && !inForce {
		a.repairAfter = time.Now().Add(failurePause)
		a.fail("the data path could not be reconciled", err)
		return
	}
	if _, tried := errors.AsType[*dataplane.AttachError](err); tried {
		a.repairAfter = time.Now().Add(failurePause)
	}
	if err := a.net.AnnounceLocator(a.status.locator()); err != nil {
		a.fail("the locator could not be announced", err)
		return
	}
	if err := a.advertise(); err != nil {
		a.fail(failedSIDs, err)
		return
	}
	if err := a.removeOldFilters(); err != nil {
		a.fail(failedFilters, err)
		return
	}
	a.report(degraded)
	a.lookAtForwarding()
	a.status.failed(nil)
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// readFile reads the plan file, unless other users can read or change it; with --insecure-plan it
// only logs that.
func (a *agent) readFile(ctx context.Context) ([]byte, error) {
	type read struct {
		b        []byte
		insecure error
	}
	r, err := await.Do(ctx, func() (read, error) {
		b, insecure, err := planfile.ReadAnyway(a.cfg.PlanFile)
		return read{b, insecure}, err
	})
	if err != nil {
		return nil, err
	}
	if r.insecure != nil && !a.cfg.InsecurePlan {
		return nil, r.insecure
	}
	what := ""
	if r.insecure != nil {
		what = r.insecure.Error()
	}
	if what != "" && what != a.insecure {
		a.cfg.Log.Warn("other users can read or change the plan file; the agent uses it because of --insecure-plan", "err", what)
	}
	a.insecure = what
	return r.b, nil
}

// CheckInstance holds the rule for names of instances.
func CheckInstance(name string) error { return model.CheckName(name) }

// SocketPath is where an agent with this run directory listens.
func SocketPath(runDir string) string { return filepath.Join(runDir, "agent.sock") }
