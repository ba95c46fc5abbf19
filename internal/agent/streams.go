package agent

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/stream"
)

// streamPlaces has the operations on the machine for functions of kind stream.
type streamPlaces interface {
	// Start makes a function's place, with its interface on the node, and a worker in it.
	// ends answers for the keys of sealed connections; nil: there are none.
	Start(p plan.Proxy, config []byte, ends func(stream.Ask) (*stream.Ends, error)) (streamWorker, error)
	// StartGateway does so for the node's gateway.
	StartGateway(p plan.Proxy, s gatewayStart) (gatewayWorker, error)
	// RemoveStrays removes interfaces that an earlier agent of the instance has left, except
	// these.
	RemoveStrays(keep []string) error
}

// streamWorker is a worker in its place. Both end with the agent.
type streamWorker interface {
	Ended() <-chan struct{}
	Err() error // why; only then
	// Whole gives an error if the place lacks an interface that it has had.
	Whole() error
	PID() int
	Statistics() stream.Statistics
	Close() error // and removes the place
}

// kernelStreams has a namespace without a name for each function, which ends with its
// worker and the agent.
type kernelStreams struct {
	node     *host.Net
	instance string
}

// alias marks an instance's interfaces.
func (k kernelStreams) alias() string { return "waystamp stream " + k.instance }

func (k kernelStreams) RemoveStrays(keep []string) error {
	links, err := k.node.Links()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		if l.Alias != k.alias() || slices.Contains(keep, l.Name) {
			continue
		}
		if err := k.node.DeleteLink(l.Name); !errors.Is(err, host.ErrNoLink) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// The interface and the port in a worker's namespace.
const (
	streamLink = "waystamp"
	streamPort = 8080 // of its listeners; the program directs all other ports to them
	// Frames of a super-packet: more are refused behind the interface.
	streamFrames = 63
)

var streamGateway = netip.MustParseAddr("fe80::1")

func (k kernelStreams) Start(p plan.Proxy, config []byte, ends func(stream.Ask) (*stream.Ends, error)) (_ streamWorker, err error) {
	ns, err := host.Anonymous()
	if err != nil {
		return nil, err
	}
	w := &kernelWorker{node: k.node, ns: ns, link: p.To, alias: k.alias()}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}()
	if err := w.place(p.To, p.Stream.MTU); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the program of workers: %w", err)
	}
	var held *os.File
	if !p.Stream.Early {
		if held, err = w.heldSocket(); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, held.Close()) }()
	}
	var through []*os.File
	if a := p.Stream.Attached; a != (model.Attached{}) {
		if through, err = w.attach(a); err != nil {
			return nil, err
		}
		defer func() {
			for _, f := range through {
				err = errors.Join(err, f.Close())
			}
		}()
	}
	var listeners []*os.File
	w.Process, listeners, err = stream.Start(ns, self, config, held, ends, through...)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, f := range listeners {
			err = errors.Join(err, f.Close())
		}
	}()
	w.listeners, err = dataplane.GiveConnections(ns, w.inside, listeners)
	return w, err
}

type kernelWorker struct {
	*stream.Process
	node      *host.Net
	ns        *host.NetNS
	link      string
	alias     string
	made      bool
	inside    int         // index of the interface in the place
	behind    *host.NetNS // where plain connections come out of a function; nil: there is none
	taken     []takenOver // of the function's interfaces
	listeners *dataplane.Listeners
}

// place makes the pair of interfaces, and the namespace's routes.
func (w *kernelWorker) place(link string, mtu int) (err error) {
	switch l, err := w.node.Link(link); {
	case errors.Is(err, host.ErrNoLink):
	case err != nil:
		return err
	case l.Alias != w.alias:
		return fmt.Errorf("interface %s exists and is not waystamp's; remove or rename it, or give the function another name", link)
	default: // of an agent before
		if err := w.node.DeleteLink(link); err != nil {
			return err
		}
	}
	node, inside := streamMACs(link)
	if err := w.node.AddVeth(host.Veth{Name: link, PeerName: streamLink, Peer: w.ns, MTU: mtu, MAC: node, PeerMAC: inside}); err != nil {
		return err
	}
	w.made = true
	if err := w.node.SetAlias(link, w.alias); err != nil {
		return err
	}
	place, err := host.Open(w.ns)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, place.Close()) }()
	l, err := place.Link(streamLink)
	if err != nil {
		return err
	}
	w.inside = l.Index
	// Only the programs process the worker's packets. No other protocol is used there.
	for _, s := range []struct {
		n          *host.Net
		key, value string
	}{
		{w.node, "net/ipv6/conf/" + link + "/disable_ipv6", "0"},
		{w.node, "net/ipv6/conf/" + link + "/addr_gen_mode", "1"},
		{w.node, "net/ipv6/conf/" + link + "/accept_ra", "0"},
		{w.node, "net/ipv4/conf/" + link + "/forwarding", "1"}, // otherwise the kernel answers no route look-ups for it
		{w.node, "net/ipv6/conf/" + link + "/forwarding", "1"},
		{place, "net/ipv6/conf/" + streamLink + "/disable_ipv6", "0"},
		{place, "net/ipv6/conf/" + streamLink + "/addr_gen_mode", "1"},
		{place, "net/ipv6/conf/" + streamLink + "/accept_ra", "0"},
	} {
		if err := s.n.SetSysctl(s.key, s.value); err != nil {
			return err
		}
	}
	if err := place.SetSuperPacketMax(streamLink, streamFrames); err != nil {
		return err
	}
	if err := w.node.SetUp(link); err != nil {
		return err
	}
	return stream.Place{Link: streamLink, Gateway: streamGateway, GatewayMAC: node}.Prepare(place)
}

// streamMACs are the addresses of a pair of interfaces, the same each time that it is made.
func streamMACs(link string) (node, inside [6]byte) {
	of := func(side string) (m [6]byte) {
		sum := sha256.Sum256([]byte(link + "\x00" + side))
		copy(m[:], sum[:])
		m[0] = m[0]&^1 | 2 // locally administered, of one station
		return m
	}
	return of("node"), of("inside")
}

// heldSocket is where SYNs wait in the place.
func (w *kernelWorker) heldSocket() (held *os.File, err error) {
	err = w.ns.Do(func() error {
		held, err = stream.HeldSocket(w.inside)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make the socket that SYNs wait at: %w", err)
	}
	return held, nil
}

func (w *kernelWorker) Whole() error {
	for _, t := range w.taken {
		if err := t.check(w.node); err != nil {
			return err
		}
	}
	return nil
}

func (w *kernelWorker) Close() error {
	var errs []error
	if w.Process != nil {
		errs = append(errs, w.Process.Close())
	}
	if w.listeners != nil {
		errs = append(errs, w.listeners.Close())
	}
	// A namespace ends some time after its last process; the function's interfaces are free at once.
	for _, t := range w.taken {
		errs = append(errs, t.release())
	}
	if w.behind != nil {
		errs = append(errs, w.behind.Close())
	}
	if w.made {
		if err := w.node.DeleteLink(w.link); err != nil && !errors.Is(err, host.ErrNoLink) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, w.ns.Close())...)
}

// streamFunction is a function of kind stream and its worker.
type streamFunction struct {
	config   string       // of the worker, and its MTU
	worker   streamWorker // nil: there is none
	err      error        // why
	restarts int
	failed   int       // times in a row
	since    time.Time // when the worker started
	after    time.Time // it is not started again before
	told     string    // a gateway's configuration; "": it has none
}

// A worker that ends is started again after a while, which doubles each time.
const (
	streamPauseMin = time.Second / 4
	streamPauseMax = 30 * time.Second
	streamWell     = time.Minute // after which it counts as the first time
)

// streams are the functions of kind stream that are there. The loop alone changes them.
type streams struct {
	mu     sync.Mutex // readers look, too
	by     map[string]*streamFunction
	kept   map[string]dataplane.Connections // as last counted
	wakeUp chan struct{}                    // a worker has ended
	swept  bool                             // nothing is left of an agent before
}

// ensureStreams starts the missing workers of a plan, and ends workers of functions that are
// gone. A function without a worker gets no packets.
func (a *agent) ensureStreams(n plan.Node, withheld map[string]error) {
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	wanted := map[string]bool{}
	var links []string
	for _, p := range n.Proxies {
		ensure := a.ensureStreamLocked
		switch {
		case p.Gateway != nil:
			ensure = a.ensureGatewayLocked
		case p.Stream == nil:
			continue
		}
		wanted[p.Function] = true
		links = append(links, p.To)
		if err := ensure(n, p); err != nil {
			withheld[p.Function] = err
		}
	}
	for name, f := range a.streams.by {
		if !wanted[name] {
			a.endStream(name, f)
			delete(a.streams.by, name)
		}
	}
	// An agent that was killed could not remove them; there are no others that it did not make.
	if !a.streams.swept {
		if err := a.places.RemoveStrays(links); err != nil {
			a.cfg.Log.Error("resources of a previous agent for functions of kind stream could not be removed", "err", err)
			return
		}
		a.streams.swept = true
	}
}

func (a *agent) endStream(name string, f *streamFunction) {
	if f.worker == nil {
		return
	}
	if err := f.worker.Close(); err != nil {
		a.cfg.Log.Error("a worker, or its place, could not be removed", "function", name, "err", err)
	}
	f.worker = nil
}

func (a *agent) ensureStreamLocked(_ plan.Node, p plan.Proxy) error {
	s := p.Stream
	var hold *stream.Hold
	if !s.Early {
		node, inside := streamMACs(p.To)
		hold = &stream.Hold{Node: node, Worker: inside}
	}
	text, err := stream.Text(p.Function, streamPort, 1, s.Run, s.Back, hold, s.Intrusive, stream.Limits{
		Connections: s.Connections, Buffer: s.Buffer, Idle: s.Idle, HalfClosed: s.HalfClosed,
	})
	if err != nil {
		return err
	}
	return a.ensureWorkerLocked(p.Function, fmt.Sprintf("%s %d %v", text, s.MTU, s.Attached), func() (streamWorker, error) { return a.places.Start(p, text, a.endsOf(p)) })
}

// ensureWorkerLocked starts a function's worker, unless one of that configuration runs, or has just failed.
func (a *agent) ensureWorkerLocked(function, config string, start func() (streamWorker, error)) error {
	f := a.streams.by[function]
	if f == nil || f.config != config {
		if f != nil {
			a.endStream(function, f) // its connections are reset
		}
		f = &streamFunction{config: config}
		a.streams.by[function] = f
	}
	if f.worker != nil {
		var why error
		what := "a worker ended; its connections are reset"
		select {
		case <-f.worker.Ended():
			why = f.worker.Err()
			f.err = fmt.Errorf("its worker ended: %w", why)
		default:
			if why = f.worker.Whole(); why == nil {
				return nil
			}
			what = "a function lost an interface; its worker is ended, and its connections are reset"
			f.err = why
		}
		if time.Since(f.since) > streamWell {
			f.failed = 0
		}
		f.failed++
		f.restarts++
		pause := min(streamPauseMax, streamPauseMin<<min(f.failed-1, 10))
		f.after = time.Now().Add(pause)
		a.cfg.Log.Error(what, "function", function, "err", why, "again in", pause)
		a.endStream(function, f)
	}
	if wait := time.Until(f.after); wait > 0 {
		time.AfterFunc(wait, func() { notify(a.streams.wakeUp) })
		return f.err
	}
	worker, err := start()
	if err != nil {
		return a.failedToStart(f, err)
	}
	f.worker, f.err, f.since = worker, nil, time.Now()
	go func() {
		<-worker.Ended()
		notify(a.streams.wakeUp)
	}()
	a.cfg.Log.Info("a worker runs", "function", function, "process", worker.PID())
	return nil
}

// failedToStart tries again after a while.
func (a *agent) failedToStart(f *streamFunction, err error) error {
	f.err, f.failed = err, f.failed+1
	f.after = time.Now().Add(min(streamPauseMax, streamPauseMin<<min(f.failed-1, 10)))
	time.AfterFunc(time.Until(f.after), func() { notify(a.streams.wakeUp) })
	return err
}

// endStreams ends all workers.
func (a *agent) endStreams() {
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	for name, f := range a.streams.by {
		a.endStream(name, f)
	}
}

// followStreams reconciles if a worker has ended, or may be started again.
func (a *agent) followStreams() {
	if a.plan != nil && slices.ContainsFunc(a.plan.Proxies, func(p plan.Proxy) bool { return p.Stream != nil || p.Gateway != nil }) {
		a.reconcile()
	}
}

// sweepConnections removes ended connections of functions of kind stream. The worker ends
// connections that are idle for too long; they are kept only a little longer.
func (a *agent) sweepConnections() {
	idle := map[string]time.Duration{}
	for _, p := range a.plan.Proxies {
		if p.Stream != nil {
			idle[p.Function] = max(p.Stream.Idle, p.Stream.HalfClosed) + streamWell
		}
		if p.Gateway != nil {
			idle[p.Function] = gatewayIdle
		}
	}
	if len(idle) == 0 {
		return
	}
	kept, err := a.dp.SweepConnections(idle)
	if err != nil {
		a.fail("closed connections could not be removed from the table", err)
		return
	}
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	a.streams.kept = kept
}

// streamsOf is the state of the functions of kind stream.
func (a *agent) streamsOf() map[string]*api.Stream {
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	out := map[string]*api.Stream{}
	for name, f := range a.streams.by {
		s := &api.Stream{Restarts: f.restarts, Kept: a.streams.kept[name].Open + a.streams.kept[name].New}
		out[name] = s
		if f.worker == nil {
			if f.err != nil {
				s.Error = f.err.Error()
			}
			continue
		}
		n := f.worker.Statistics()
		s.Worker, s.Now, s.Opened, s.Refused, s.Ended, s.Unreached = f.worker.PID(), n.Now, n.Opened, n.Refused, n.Ended, n.Unreached
		s.ResetByClient, s.ResetByServer, s.ResetByFunction, s.ResetByLimit = n.ResetByClient, n.ResetByServer, n.ResetByFunction, n.ResetByLimit
		s.PartMismatch, s.Unsealed, s.Peer, s.NoKey = n.PartMismatch, n.Unsealed, n.Peer, n.NoKey
		s.ToServer, s.ToClient = api.StreamBytes(n.ToServer), api.StreamBytes(n.ToClient)
	}
	return out
}
