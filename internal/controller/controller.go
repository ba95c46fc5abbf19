// Package controller keeps a domain: it compiles the file that an operator applied, gives each
// node its own part of the plans over connections that both sides have proven, and changes
// paths by epochs, each step of which is a record before anything is sent. It carries no
// packet, and nodes go on without it. Storage is internal/store's matter, certificates are
// internal/identity's. waystamp controller calls it.
package controller

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/metrics"
	"github.com/waystamp/waystamp/internal/store"
)

const (
	// DefaultTrustDomain is that of a controller that is given none.
	DefaultTrustDomain = "waystamp"
	// DefaultDrain is how long packets may be under way between nodes. The time in functions
	// comes on top.
	DefaultDrain = 5 * time.Second
	// failurePause is how long the controller waits when the store has failed.
	failurePause = time.Second
)

// Config says where a controller keeps its records, and who it is.
type Config struct {
	Store       store.Store // the caller closes it, when Run has returned
	Advertise   string      // how other controllers reach this one, if the store is store.Shared: tcp:HOST:PORT
	TrustDomain string      // of a new store; "": DefaultTrustDomain. One that has another is refused.
	Log         *slog.Logger
	// Admins tells which users may call Admin on the unix socket; nil: root, and who runs the
	// controller.
	Admins func(uid uint32) bool
	// Audit gets a line for each call that somebody has to answer for; nil: only Log does.
	Audit *Audit

	// RotateEvery is how often all chains get fresh secrets without an operator; 0: never. RotateMin at least.
	RotateEvery time.Duration

	Drain time.Duration    // 0: DefaultDrain
	Now   func() time.Time // nil: time.Now
}

// Controller is one that has its identity. Its methods may be called by several goroutines.
type Controller struct {
	cfg   Config
	store store.Store

	authority atomic.Pointer[authority]
	replacing sync.Mutex // of authority; taken before own

	// Of the loop alone:
	failed   string // the attempt to begin that was in vain
	watchful bool   // a node whose connection ends makes something due
	warnedOf uint64 // the revision of the CA of whose end was told

	counted *metrics.Set // what only grows

	leading struct {
		sync.Mutex
		ctx context.Context // while this controller leads; else nil
	}
	passing struct {
		sync.Mutex
		address     string           // of the controller that led last
		certificate *tls.Certificate // with which it is called
		transport   *http.Transport
	}

	known   knownPlans
	decoded knownRecords

	cache struct {
		sync.Mutex
		generations map[uint64]*generation
	}
	own struct {
		sync.Mutex
		key         *ecdsa.PrivateKey
		certificate *tls.Certificate
		renew       time.Time
	}
	sessions struct {
		sync.Mutex
		open map[string]int     // by node: streams of plans
		of   map[string]session // by node: of the stream that was opened last
		news chan struct{}      // closed with the next change
	}

	trouble struct {
		sync.Mutex
		text string // why the next step is not done; "": it is
	}

	every struct { // of chains that say it in the file
		sync.Mutex
		file  uint64 // its serial
		times map[string]time.Duration
	}

	journal  journal
	refusals refusals
	traces   traces
	drains   drains
	limits   limits
}

// New reads who the controller is, or makes a CA if the store is new.
func New(ctx context.Context, cfg Config) (*Controller, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Drain == 0 {
		cfg.Drain = DefaultDrain
	}
	if cfg.Admins == nil {
		cfg.Admins = admins
	}
	if cfg.RotateEvery != 0 && cfg.RotateEvery < RotateMin {
		return nil, fmt.Errorf("secrets cannot be rotated every %s; %s is the least", cfg.RotateEvery, RotateMin)
	}
	if _, shared := cfg.Store.(store.Shared); shared {
		if err := CheckAddress(cfg.Advertise); err != nil {
			return nil, fmt.Errorf("several controllers may share this store: %w", err)
		}
	}
	c := &Controller{cfg: cfg, store: cfg.Store, counted: metrics.NewSet(Metrics)}
	c.counted.Add(metricFailures, 0)
	for _, by := range []string{drainedByNumbers, drainedByTime} {
		c.counted.Add(metricDrained, 0, by)
	}
	c.cache.generations = map[uint64]*generation{}
	c.drains.init()
	c.sessions.open, c.sessions.of, c.sessions.news = map[string]int{}, map[string]session{}, make(chan struct{})
	var err error
	if _, err := readView(ctx, c.store); errors.Is(err, errLater) {
		return nil, err
	}
	a, err := c.openCA(ctx)
	if err != nil {
		return nil, err
	}
	c.authority.Store(a)
	if cfg.TrustDomain != "" && cfg.TrustDomain != c.ca().TrustDomain() {
		return nil, fmt.Errorf("the store belongs to the trust domain %s, and not to %s; take another store", c.ca().TrustDomain(), cfg.TrustDomain)
	}
	return c, nil
}

// errNoCA means that the record of the CA was taken away.
var errNoCA = errors.New("there are records in the store, and the one of the CA is missing: somebody has deleted it; restore a backup into an empty store")

func (c *Controller) openCA(ctx context.Context) (*authority, error) {
	if snap, err := c.store.Snapshot(ctx, keyRestoring); err != nil {
		return nil, err
	} else if len(snap.Records) > 0 {
		return nil, errHalfRestored
	}
	if a, err := readAuthority(ctx, c.store); err != nil || a != nil {
		return a, err
	}
	// Only of a new store: a CA that somebody has deleted is not replaced by one that no node knows.
	all, err := c.store.Snapshot(ctx, "")
	if err != nil {
		return nil, err
	}
	if _, ok := all.Records[keyCA]; ok { // another controller made one at the same time
		return c.openCA(ctx)
	}
	if _, ok := all.Records[keyRestoring]; ok {
		return nil, errHalfRestored
	}
	for _, r := range all.Records {
		if store.IsSealed(r.Value) {
			return nil, store.ErrSealed
		}
	}
	if len(all.Records) > 0 {
		return nil, errNoCA
	}
	domain := c.cfg.TrustDomain
	if domain == "" {
		domain = DefaultTrustDomain
	}
	ca, err := identity.NewCA(domain, c.cfg.Now())
	if err != nil {
		return nil, err
	}
	key, err := ca.Key()
	if err != nil {
		return nil, err
	}
	_, err = c.store.Commit(ctx, store.Txn{
		If: []store.Condition{{Key: keyCA}, {Key: keyRestoring}}, Put: map[string][]byte{keyCA: encode(caRecord{Root: ca.Root(), Key: key})},
	})
	if errors.Is(err, store.ErrConflict) { // another controller made one at the same time, or a restore has begun
		return c.openCA(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("keep the new CA: %w", err)
	}
	c.cfg.Log.Info("a CA was made", "trust domain", domain)
	return readAuthority(ctx, c.store)
}

// certificate is the controller's own, which it renews when half its life is over.
func (c *Controller) certificate() (*tls.Certificate, error) {
	c.own.Lock()
	defer c.own.Unlock()
	now := c.cfg.Now()
	if c.own.certificate != nil && now.Before(c.own.renew) {
		return c.own.certificate, nil
	}
	if c.own.key == nil {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return nil, err
		}
		c.own.key = key
	}
	ca := c.ca()
	der, err := ca.Issue(identity.ID{Controller: true}, c.own.key.Public(), now)
	if err != nil {
		return nil, err
	}
	c.own.certificate = &tls.Certificate{Certificate: [][]byte{der, ca.Root()}, PrivateKey: c.own.key}
	c.own.renew = now.Add(identity.CertificateValid / 2)
	return c.own.certificate, nil
}

func (c *Controller) rootsNow() []*x509.Certificate { return c.authority.Load().roots }

// Run carries changes out, when it leads, and serves on the listeners, until ctx ends; that is no
// error.
func (c *Controller) Run(ctx context.Context, listeners ...Listener) error {
	defer c.closePassing()
	group, ctx := errgroup.WithContext(ctx)
	if _, shared := c.store.(store.Shared); !shared {
		c.setLeading(ctx) // before the first call
	}
	group.Go(func() error { return c.govern(ctx) })
	group.Go(func() error { return c.followCA(ctx) })
	for _, l := range listeners {
		if l.metrics {
			group.Go(func() error { return c.serveMetrics(ctx, l) })
			continue
		}
		group.Go(func() error { return c.serve(ctx, l) })
	}
	err := group.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// carry does what is due whenever a record has changed or a time has come.
func (c *Controller) carry(ctx context.Context) error {
	changed, observed := make(chan struct{}, 1), make(chan struct{}, 1)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return c.watch(ctx, keyControl, func() {
			notify(changed)
			notify(observed)
		})
	})
	group.Go(func() error { return c.observe(ctx, observed) })
	group.Go(func() error {
		for {
			_, news := c.connected()
			replaced := c.authority.Load().replaced
			did, wake, err := c.advance(ctx)
			if !c.watchful {
				news = nil
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			var timer <-chan time.Time
			switch {
			case errors.Is(err, store.ErrConflict):
				continue
			case errors.Is(err, store.ErrClosed), errors.Is(err, store.ErrDeposed), errors.Is(err, errLater):
				return err
			case err != nil:
				c.counted.Add(metricFailures, 1)
				c.cfg.Log.Error("the domain does not go on; nodes hold what they have", "err", err)
				c.inTrouble(err)
				news, timer = nil, time.After(failurePause)
			case did:
				c.inTrouble(nil)
				continue
			case !wake.IsZero():
				timer = time.After(wake.Sub(c.cfg.Now()))
			}
			if err == nil {
				c.inTrouble(nil)
			}
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-changed:
			case <-replaced:
			case <-news:
			case <-c.drains.news:
			case <-timer:
			}
		}
	})
	return group.Wait()
}

// inTrouble notes why the next step of the domain cannot be written, or read; nil: it can. Operators see it beside the state.
func (c *Controller) inTrouble(err error) {
	c.trouble.Lock()
	text := ""
	if err != nil {
		text = err.Error()
	}
	changed := c.trouble.text != text
	c.trouble.text = text
	c.trouble.Unlock()
	if changed { // whoever follows the state looks again
		c.sessions.Lock()
		defer c.sessions.Unlock()
		c.newsLocked()
	}
}

// watch calls f once, and after each change below a prefix. A store that fails is tried again.
func (c *Controller) watch(ctx context.Context, prefix string, f func()) error {
	for {
		snap, err := c.store.Snapshot(ctx, prefix)
		if err == nil {
			f()
			err = c.store.Watch(ctx, prefix, snap.Revision, func(store.Commit) error {
				f()
				return nil
			})
		}
		switch _, passes := errors.AsType[*store.Failure](err); {
		case errors.Is(err, store.ErrCompacted):
		case !passes || ctx.Err() != nil:
			return err
		default:
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(failurePause):
			}
		}
	}
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// session is a stream of plans to a node.
type session struct {
	local, remote netip.AddrPort // of the connection, as this controller sees it; not valid: it is known to none
	lacks         []string       // what the node's plan asks for, and its agent does not know
	traces        bool           // its agent can trace packets
	flows         bool           // and those of a flow
	stream        *int           // which stream it is of; its address counts
}

// session notes that a stream of plans to a node begins or ends.
func (c *Controller) session(node string, by int, s session) {
	c.sessions.Lock()
	defer c.sessions.Unlock()
	c.sessions.open[node] += by
	if by > 0 {
		c.sessions.of[node] = s
	}
	if c.sessions.open[node] == 0 {
		delete(c.sessions.open, node)
		delete(c.sessions.of, node)
	}
	c.newsLocked()
}

func (c *Controller) newsLocked() {
	close(c.sessions.news)
	c.sessions.news = make(chan struct{})
}

// lacks notes what a connected node's agent does not know of its plan. Only the stream that was opened last says so: one before it may be of
// the agent of before an upgrade, and end later.
func (c *Controller) lacks(node string, stream *int, what []string) {
	c.sessions.Lock()
	defer c.sessions.Unlock()
	s, ok := c.sessions.of[node]
	if !ok || s.stream != stream || slices.Equal(s.lacks, what) {
		return
	}
	s.lacks = what
	c.sessions.of[node] = s
	c.newsLocked()
}

// incompatible is what a connected node's agent does not know of its plan; none: it knows all.
func (c *Controller) incompatible(node string) []string {
	c.sessions.Lock()
	defer c.sessions.Unlock()
	return c.sessions.of[node].lacks
}

// connections are those of all nodes, by name.
func (c *Controller) connections() map[string]session {
	c.sessions.Lock()
	defer c.sessions.Unlock()
	return maps.Clone(c.sessions.of)
}

// connected tells which nodes have a stream, and gives a channel that is closed when that changes.
func (c *Controller) connected() (map[string]bool, <-chan struct{}) {
	c.sessions.Lock()
	defer c.sessions.Unlock()
	m := map[string]bool{}
	for name := range c.sessions.open {
		m[name] = true
	}
	return m, c.sessions.news
}
