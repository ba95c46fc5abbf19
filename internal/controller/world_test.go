package controller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/member"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
	"github.com/waystamp/waystamp/internal/store"
	"github.com/waystamp/waystamp/test/etcdtest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		etcdtest.Stop()
		os.Exit(code)
	}), goleak.IgnoreAnyFunction("github.com/waystamp/waystamp/test/etcdtest.start.func1"))
}

// patience is for what must come; nothing waits that long when all is well.
var patience = await.Limit(time.Minute)

// drain is short: the fake agents have no packets.
const drain = 20 * time.Millisecond

// file is a domain with three nodes and a spare one for its function.
const file = `version: 1
domain: {block: "fc00::/48"}
nodes:
  - {name: r1, address: "fc00:1::1", locator: "fc00:0:0:100::/56", cpus: 2, interfaces: [{name: r1-h1, role: edge}, {name: r1-r2, role: core}]}
  - {name: r2, address: "fc00:2::1", locator: "fc00:0:0:200::/56", cpus: 2, interfaces: [{name: r2-r1, role: core}, {name: r2-r3, role: core}]}
  - {name: r3, address: "fc00:3::1", locator: "fc00:0:0:300::/56", cpus: 2, interfaces: [{name: r3-h3, role: edge}, {name: r3-r2, role: core}]}
functions:
  - {name: fw, node: r2, kind: forward}
chains:
  - {name: web, ingress: [r1], functions: [fw], egress: r3, direction: both, match: {destination: "2001:db8:3::/48"}}
`

// world is a controller that can die, and its fake agents.
type world struct {
	*testing.T
	dir       string
	listen    string
	listeners []Listener // more than the usual
	seats     []string   // the addresses of all controllers, if there are several
	drain     time.Duration
	now       func() time.Time
	admins    func(uint32) bool
	audit     *Audit // nil: none

	rotateEvery time.Duration

	store  store.Store
	wrap   func(store.Store) store.Store
	ctl    *Controller
	cancel context.CancelFunc
	ended  chan error
	admin  waystampv1connect.AdminClient
	http   *http.Transport
	log    *slog.Logger
}

func newWorld(t *testing.T) *world {
	w := &world{T: t, dir: t.TempDir(), listen: "127.0.0.1:0", drain: drain, log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	w.http = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(w.dir, "s"))
	}}
	w.admin = waystampv1connect.NewAdminClient(&http.Client{Transport: w.http}, "http://controller")
	t.Cleanup(w.http.CloseIdleConnections)
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// start runs a controller on the records that there are.
func (w *world) start() {
	w.Helper()
	bolt, err := store.OpenBolt(filepath.Join(w.dir, "store"))
	w.must(err)
	w.store = bolt
	if w.wrap != nil {
		w.store = w.wrap(bolt)
	}
	w.ctl, err = New(w.Context(), Config{Store: w.store, Log: w.log, Drain: w.drain, Now: w.now, Admins: w.admins, RotateEvery: w.rotateEvery, Audit: w.audit})
	w.must(err)
	operators, err := Listen("unix:" + filepath.Join(w.dir, "s"))
	w.must(err)
	nodes, err := Listen("tcp:" + w.listen)
	w.must(err)
	w.listen = nodes.Addr().String() // the same one the next time
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel, w.ended = cancel, make(chan error, 1)
	go func() { w.ended <- w.ctl.Run(ctx, append([]Listener{operators, nodes}, w.listeners...)...) }()
	w.Cleanup(w.stop)
}

func (w *world) stop() {
	if w.cancel == nil {
		return
	}
	w.cancel()
	w.cancel = nil
	if err := <-w.ended; err != nil && !errors.Is(err, errDead) && !errors.Is(err, store.ErrClosed) {
		w.Errorf("the controller ends with %v", err)
	}
	w.must(w.store.Close())
}

// fake is an agent without a kernel: it says that it holds what it received.
type fake struct {
	w      *world
	name   string
	dir    string
	member *member.Member
	stop   func()

	mu       sync.Mutex
	held     []plan.Node  // all plans, in the order in which they came
	wire     bytes.Buffer // what it received
	sent     bytes.Buffer
	silent   bool // it does not acknowledge
	released []member.Report
	before   bool                 // it tells of no numbers, as an agent of before
	noFlows  bool                 // it traces no flows, as an agent of before
	knows    []string             // what its agent says that it knows; nil: everything
	refuses  func(plan.Node) bool // plans that its kernel does not take; nil: none
	inForce  member.Report
	refused  func()           // takes the plan that was refused last
	clock    func() time.Time // nil: time.Now
	offered  []plan.Node      // all that came, also refused ones
}

func (w *world) token(name string) string {
	w.Helper()
	r, err := w.admin.CreateToken(w.Context(), connect.NewRequest(&v1.CreateTokenRequest{Node: name}))
	w.must(err)
	return r.Msg.Token
}

// join makes an agent that has a token.
func (w *world) join(name string) *fake {
	w.Helper()
	f := &fake{w: w, name: name, dir: filepath.Join(w.T.TempDir(), name)}
	f.run(w.token(name))
	return f
}

// run is a member until the test ends, or stop is called.
func (f *fake) run(token string) {
	f.w.Helper()
	var err error
	f.member, err = member.Open(member.Config{
		Controllers: f.w.listens(), Token: token, Dir: f.dir, Node: f.name, Log: f.w.log.With("agent", f.name),
		Received: f.received, Transport: f.record, Knows: f.knows, NoDrains: f.before, NoFlows: f.noFlows, Now: f.clock,
	})
	f.w.must(err)
	if b, err := os.ReadFile(f.member.PlanFile()); err == nil { // as an agent does that starts again
		n, err := plan.DecodeNode(b)
		f.w.must(err)
		f.take(n, digest(b))
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := f.member.Run(ctx); err != nil {
			f.w.Errorf("agent %s: %v", f.name, err)
		}
	}()
	f.stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	f.w.Cleanup(f.stop)
}

func (f *fake) received(n plan.Node, digest string) {
	f.mu.Lock()
	f.offered = append(f.offered, n)
	f.mu.Unlock()
	f.take(n, digest)
}

// take puts a plan in force, or refuses it.
func (f *fake) take(n plan.Node, digest string) {
	f.mu.Lock()
	f.refused = nil
	if f.refuses != nil && f.refuses(n) {
		r := f.inForce
		r.Refused, r.Error = n.Revision, "the kernel lacks something"
		f.refused = func() { f.take(n, digest) }
		f.mu.Unlock()
		f.member.Report(r)
		return
	}
	if last := len(f.held) - 1; last < 0 || f.held[last].Revision != n.Revision {
		if last >= 0 {
			f.agrees(f.held[last], n)
		}
		f.held = append(f.held, n)
	}
	r := member.Report{Revision: n.Revision, Digest: digest}
	f.inForce = r
	silent := f.silent
	if silent {
		f.released = append(f.released, r)
	}
	f.mu.Unlock()
	if !silent {
		f.member.Report(r)
	}
}

// agrees holds what an agent refuses: an epoch of a path that is new to it and earlier than the latest
// that it has, or a headend that goes back; and that no epoch changes its secrets.
func (f *fake) agrees(was, now plan.Node) {
	type held struct {
		latest uint8
		all    map[uint8]string
		sends  []uint8
	}
	holds := func(n plan.Node) map[uint32]*held {
		m := map[uint32]*held{}
		add := func(id plan.PathID, secret string) *held {
			h, ok := m[id.Path]
			if !ok {
				h = &held{id.Epoch, map[uint8]string{}, nil}
				m[id.Path] = h
			}
			if int8(id.Epoch-h.latest) > 0 {
				h.latest = id.Epoch
			}
			h.all[id.Epoch] += secret
			return h
		}
		for _, h := range n.Headends {
			x := add(h.PathID, "")
			x.sends = append(x.sends, h.Epoch)
		}
		for _, e := range n.Endpoints {
			add(e.PathID, string(e.Share.Key[:]))
		}
		for _, e := range n.Egresses {
			add(e.PathID, "")
		}
		return m
	}
	before := holds(was)
	for path, h := range holds(now) {
		b, ok := before[path]
		if !ok {
			continue
		}
		for e, secret := range h.all {
			s, had := b.all[e]
			if !had && int8(e-b.latest) < 0 {
				f.w.Errorf("%s: revision %d has epoch %d of path %x, and %d was at %d", f.name, now.Revision, e, path, was.Revision, b.latest)
			}
			if had && s != "" && secret != "" && s != secret {
				f.w.Errorf("%s: revision %d has other secrets in epoch %d of path %x than %d", f.name, now.Revision, e, path, was.Revision)
			}
		}
		for _, e := range h.sends {
			for _, s := range b.sends {
				if int8(e-s) < 0 {
					f.w.Errorf("%s: revision %d sends epoch %d of path %x, and %d sent %d", f.name, now.Revision, e, path, was.Revision, s)
				}
			}
		}
	}
}

// hush makes it acknowledge nothing until speak.
func (f *fake) hush() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.silent = true
}

func (f *fake) speak() {
	f.mu.Lock()
	f.silent = false
	late := f.released
	f.released = nil
	f.mu.Unlock()
	for _, r := range late {
		f.member.Report(r)
	}
}

// plans are all that came, the last is in force.
func (f *fake) plans() []plan.Node {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.held)
}

func (f *fake) now() plan.Node {
	f.w.Helper()
	p := f.plans()
	if len(p) == 0 {
		f.w.Fatalf("%s has no plan", f.name)
	}
	return p[len(p)-1]
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// record keeps every byte that the controller and the agent send each other.
func (f *fake) record(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			r = r.Clone(r.Context())
			r.Body = struct {
				io.Reader
				io.Closer
			}{io.TeeReader(r.Body, locked{f, &f.sent}), r.Body}
		}
		answer, err := next.RoundTrip(r)
		if err != nil {
			return nil, err
		}
		f.mu.Lock()
		answer.Header.Write(&f.wire)
		f.mu.Unlock()
		answer.Body = struct {
			io.Reader
			io.Closer
		}{io.TeeReader(answer.Body, locked{f, &f.wire}), answer.Body}
		return answer, nil
	})
}

type locked struct {
	f  *fake
	to *bytes.Buffer
}

func (l locked) Write(b []byte) (int, error) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	return l.to.Write(b)
}

func (w *world) apply(text string) uint64 {
	w.Helper()
	r, err := w.admin.Apply(w.Context(), connect.NewRequest(&v1.ApplyRequest{File: &v1.File{Name: "test.yaml", Source: []byte(text)}}))
	w.must(err)
	return r.Msg.Serial
}

func (w *world) rotate() uint64 {
	w.Helper()
	r, err := w.admin.Rotate(w.Context(), connect.NewRequest(&v1.RotateRequest{All: true}))
	w.must(err)
	return r.Msg.Serial
}

func (w *world) state() *v1.State {
	w.Helper()
	r, err := w.admin.Get(w.Context(), connect.NewRequest(&v1.GetRequest{}))
	w.must(err)
	return r.Msg.State
}

// until waits for a state, and returns it.
func (w *world) until(what string, f func(*v1.State) bool) *v1.State {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), patience)
	defer cancel()
	for {
		stream, err := w.admin.Follow(ctx, connect.NewRequest(&v1.FollowRequest{}))
		w.must(err)
		for stream.Receive() {
			if s := stream.Msg().State; f(s) {
				w.must(stream.Close())
				return s
			}
		}
		err = stream.Err()
		stream.Close()
		if ctx.Err() != nil || len(w.seats) == 0 {
			w.Fatalf("%s: %v; now %v", what, err, w.state())
		}
		time.Sleep(20 * time.Millisecond) // another controller is about to lead, and nothing tells of it
	}
}

func (w *world) listens() []string {
	if len(w.seats) > 0 {
		return w.seats
	}
	return []string{w.listen}
}

func settled(serial uint64) func(*v1.State) bool {
	return func(s *v1.State) bool { return s.Settled && s.Serial >= serial }
}

// drained: one generation is left, and all nodes that are connected hold what they shall.
func drained(s *v1.State) bool {
	return s.Settled && !slices.ContainsFunc(s.Epochs, func(e *v1.EpochState) bool { return e.State != epochActive }) &&
		!slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool { return n.State == nodeBehind })
}

// accepted follows a packet of each path that headends send, from hop to hop.
func (w *world) accepted(at func(name string) plan.Node, names ...string) (followed int) {
	w.Helper()
	for _, head := range names {
		for _, h := range at(head).Headends {
			followed++
			for i, segment := range h.Segments {
				ok := false
				for _, name := range names {
					n := at(name)
					if i == len(h.Segments)-1 {
						ok = ok || slices.ContainsFunc(n.Egresses, func(e plan.Egress) bool {
							return e.SID == segment && e.Path == h.Path && e.Epoch == h.Epoch && slices.Equal(e.Segments, h.Segments)
						})
					} else {
						ok = ok || slices.ContainsFunc(n.Endpoints, func(e plan.Endpoint) bool { return e.SID == segment && e.Path == h.Path && e.Epoch == h.Epoch })
					}
				}
				if !ok {
					w.Errorf("%s sends %s in epoch %d, and nobody takes it at %s", head, h.PathID, h.Epoch, segment)
				}
			}
		}
	}
	return followed
}

func code(err error) connect.Code { return connect.CodeOf(err) }

// errDead is what a store says whose controller has died.
var errDead = errors.New("the controller has died")

// dying is a store that fails for ever, before or behind the commit of a number.
type dying struct {
	store.Store
	mu     sync.Mutex
	at     int
	behind bool
	count  int
	names  []string // of all commits, as their keys tell
	dead   chan struct{}
}

func (d *dying) Commit(ctx context.Context, t store.Txn) (uint64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-d.dead:
		return 0, errDead
	default:
	}
	d.count++
	if d.count != d.at {
		return d.Store.Commit(ctx, t)
	}
	close(d.dead)
	if d.behind {
		if _, err := d.Store.Commit(ctx, t); err != nil {
			return 0, err
		}
	}
	return 0, errDead
}

func edit(text string, oldNew ...string) string {
	for i := 0; i < len(oldNew); i += 2 {
		if !strings.Contains(text, oldNew[i]) {
			panic(fmt.Sprintf("%q is not in the file", oldNew[i]))
		}
	}
	return strings.NewReplacer(oldNew...).Replace(text)
}

// bg is for goroutines that end with the controller.
var bg = context.Background()

func writeFile(t *testing.T, name string, b []byte) {
	t.Helper()
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
