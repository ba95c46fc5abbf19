package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/gateway/worker"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/seal"
	"github.com/waystamp/waystamp/internal/stream"
)

// gatewayWorker is a gateway's process in its place.
type gatewayWorker interface {
	streamWorker
	// Configure replaces the configuration. On an error the one before counts.
	Configure(c worker.Configuration) error
	// Sessions are those that are open, by their numbers. They are the process's word, as Refused is.
	Sessions() ([]gateway.SessionState, error)
	Refused() map[gateway.Reason]uint64
	Counts() map[string]gateway.ServiceCount // by service; its word, too
	// End ends a session; false: there is none of this number.
	End(id uint64) (bool, error)
	// Revoke replaces the list of revoked identities, and says how many sessions ended for it. On an error the process ends.
	Revoke(identities []string) (int, error)
}

// gatewayIdle is the longest time of a connection without a packet: the gateway sends
// keep-alives much more often.
const gatewayIdle = 10 * time.Minute

// gatewayConfiguration is the configuration of a gateway's process, from the plan.
func gatewayConfiguration(n plan.Node, g *plan.Gateway) worker.Configuration {
	c := worker.Configuration{Clients: g.Clients, Services: g.Services}
	for _, ch := range g.Chains {
		_, isSealed := sealedOnward(n, ch)
		c.Chains = append(c.Chains, worker.Chain{Name: ch.Chain, Origin: ch.Origin, First: ch.Ports.First, Last: ch.Ports.Last, Sealed: isSealed})
	}
	return c
}

// ensureGatewayLocked starts the node's gateway, or sends it changes. If it refuses them, it is
// ended: nothing is served that the plan no longer contains.
func (a *agent) ensureGatewayLocked(n plan.Node, p plan.Proxy) error {
	c := gatewayConfiguration(n, p.Gateway)
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	err = a.ensureWorkerLocked(p.Function, fmt.Sprintf("gateway %d", p.Gateway.MTU), func() (streamWorker, error) {
		revoked, err := a.revoked.names(a.cfg.StateDir)
		if err != nil {
			return nil, err
		}
		w, err := a.places.StartGateway(p, gatewayStart{Configuration: c, Revoked: revoked, Folder: a.cfg.GatewayFiles, Audit: a.cfg.GatewayAudit, AuditKey: a.cfg.AuditKey, Allow: a.allowOnward, Log: a.cfg.Log})
		if err != nil {
			return nil, err
		}
		return w, nil
	})
	f := a.streams.by[p.Function]
	if err != nil {
		f.told = ""
		return err
	}
	if f.told == "" { // it has just started
		f.told = string(text)
	}
	if f.told == string(text) {
		return nil
	}
	f.told = string(text)
	if err := f.worker.(gatewayWorker).Configure(c); err != nil {
		f.told = ""
		a.endStream(p.Function, f)
		return a.failedToStart(f, fmt.Errorf("the gateway does not take the plan: %w", err))
	}
	return nil
}

// allowOnward answers the gateway's worker, which is not trusted: an onward connection must be
// for a client that is connected to a service, from its address, to the origin of a chain in the
// service's rules, from that chain's ports. It runs beside the loop.
func (a *agent) allowOnward(q worker.Ask) (*seal.Part, error) {
	n := a.inForce.Load()
	if n == nil || n.Gateway() == nil {
		return nil, errors.New("the plan in force has no gateway")
	}
	g := n.Gateway()
	i := slices.IndexFunc(g.Chains, func(c plan.GatewayChain) bool { return c.Chain == q.Chain })
	if i < 0 {
		return nil, fmt.Errorf("no rule names chain %q", q.Chain)
	}
	c := g.Chains[i]
	for _, at := range []netip.AddrPort{q.Client, q.Source, q.Origin} {
		if at.Addr().Is4In6() || at.Addr().Zone() != "" {
			return nil, fmt.Errorf("%s is not an address as those of packets are", at)
		}
	}
	switch {
	case q.Origin != c.Origin:
		return nil, fmt.Errorf("chain %s leads to %s, and not to %s", c.Chain, c.Origin, q.Origin)
	case q.Source.Addr() != q.Client.Addr():
		return nil, fmt.Errorf("%s is not the address of client %s", q.Source, q.Client)
	case q.Source.Port() < c.Ports.First || q.Source.Port() > c.Ports.Last:
		return nil, fmt.Errorf("port %d is not one of chain %s (%s)", q.Source.Port(), c.Chain, c.Ports)
	case slices.Contains(g.Addresses(), q.Source):
		return nil, fmt.Errorf("%s is a service's own address", q.Source)
	}
	for _, s := range g.Services {
		if !slices.ContainsFunc(s.Rules, func(r model.ServiceRule) bool { return r.Chain == c.Chain }) {
			continue
		}
		err := a.dp.OpenOnward(q.Client, s.Address, q.Source, q.Origin, c.Reverse)
		if err == nil {
			return sealOnward(*n, c, a.cfg.End)
		}
		if !errors.Is(err, dataplane.ErrNoClient) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w: %s", dataplane.ErrNoClient, q.Client)
}

// gatewayStart has the parameters of a gateway's process.
type gatewayStart struct {
	worker.Configuration
	Folder string // that names of files count from
	Audit  string // the log's name
	// AuditKey is as Config's.
	AuditKey func() (*gateway.AuditKey, error)
	Allow    func(worker.Ask) (*seal.Part, error)
	// Revoked are identities that are not let in; gatewayWorker's Revoke replaces them.
	Revoked []string
	Log     *slog.Logger
}

func (k kernelStreams) StartGateway(p plan.Proxy, s gatewayStart) (_ gatewayWorker, err error) {
	ns, err := host.Anonymous()
	if err != nil {
		return nil, err
	}
	w := &kernelGateway{kernelWorker: kernelWorker{node: k.node, ns: ns, link: p.To, alias: k.alias()}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}()
	if err := w.place(p.To, p.Gateway.MTU); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the program of workers: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(s.Audit), 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of the audit log: %w", err)
	}
	audit, err := gateway.OpenAuditFile(s.Audit)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, audit.Close()) }()
	if s.AuditKey == nil {
		s.Log.Warn("the gateway's audit log is not signed: this agent has no key for it; give --gateway-audit-key, or plans by a controller", "log", s.Audit)
	}
	signatures, err := gateway.OpenSignatures(audit, s.AuditKey, s.Log, time.Now)
	if err != nil {
		return nil, err
	}
	defer func() {
		if signatures != nil {
			err = errors.Join(err, signatures.Close())
		}
	}()
	var listeners []*os.File
	defer func() {
		for _, f := range listeners { // the worker's alone from now on
			err = errors.Join(err, f.Close())
		}
	}()
	for _, network := range []string{"tcp6", "tcp4"} {
		f, err := gatewayListener(ns, network)
		if err != nil {
			return nil, err
		}
		listeners = append(listeners, f)
	}
	if w.listeners, err = dataplane.GiveConnections(ns, w.inside, listeners); err != nil {
		return nil, err
	}
	o := worker.Options{
		NS: ns, Program: self, Folder: s.Folder, Audit: audit, Signatures: signatures, Listeners: listeners, Allow: s.Allow, Revoked: s.Revoked, Log: s.Log,
	}
	signatures = nil // the process's
	w.process, err = worker.Start(o, s.Configuration)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// gatewayListener listens in a gateway's namespace. The program directs connections to all
// addresses and ports to it.
func gatewayListener(ns *host.NetNS, network string) (f *os.File, err error) {
	config := net.ListenConfig{}
	config.SetMultipathTCP(false) // accepted sockets are plain TCP
	err = ns.Do(func() error {
		l, err := config.Listen(context.Background(), network, fmt.Sprintf(":%d", streamPort))
		if err != nil {
			return err
		}
		f, err = l.(*net.TCPListener).File()
		return errors.Join(err, l.Close())
	})
	if err != nil {
		return nil, fmt.Errorf("listen for the gateway's clients: %w", err)
	}
	return f, nil
}

// kernelGateway is a gateway's process in a namespace without a name.
type kernelGateway struct {
	kernelWorker
	process *worker.Process
}

func (w *kernelGateway) Ended() <-chan struct{} { return w.process.Ended() }
func (w *kernelGateway) Err() error             { return w.process.Err() }
func (w *kernelGateway) PID() int               { return w.process.PID() }

// Statistics are the counters of clients' connections: sessions, and refusals for any reason.
func (w *kernelGateway) Statistics() stream.Statistics {
	n := w.process.Statistics()
	s := stream.Statistics{Now: uint64(max(0, n.Now)), Opened: n.Opened}
	for _, c := range n.Refused {
		s.Refused += c
	}
	return s
}

// configureTime bounds how long a gateway takes to take a configuration.
const configureTime = 10 * time.Second

func (w *kernelGateway) Configure(c worker.Configuration) error {
	return w.process.Configure(c, configureTime)
}

func (w *kernelGateway) Sessions() ([]gateway.SessionState, error) { return w.process.Sessions() }
func (w *kernelGateway) Refused() map[gateway.Reason]uint64        { return w.process.Statistics().Refused }
func (w *kernelGateway) Counts() map[string]gateway.ServiceCount {
	return w.process.Statistics().Counts
}
func (w *kernelGateway) End(id uint64) (bool, error)             { return w.process.End(id) }
func (w *kernelGateway) Revoke(identities []string) (int, error) { return w.process.Revoke(identities) }

// Leave ends it: it asks its agent for each connection onward.
func (w *kernelGateway) Serve() error { return nil }

func (w *kernelGateway) Leave() error { return w.Close() }

func (w *kernelGateway) Close() error {
	var err error
	if w.process != nil {
		err = w.process.Close()
	}
	return errors.Join(err, w.kernelWorker.Close())
}
