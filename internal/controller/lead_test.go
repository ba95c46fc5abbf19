package controller

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/member"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
	"github.com/waystamp/waystamp/internal/store"
	"github.com/waystamp/waystamp/test/etcdtest"
)

// seat is one of several controllers that share an etcd.
type seat struct {
	number int
	socket string
	trap   *trap
	ctl    *Controller
	*store.Etcd
	cancel context.CancelFunc
	ended  chan error
	dead   chan struct{}
	died   sync.Once
}

// trap ends the controller that does a certain commit, before it is done or behind.
type trap struct {
	mu     sync.Mutex
	last   stateRecord
	what   string // of the commit; "": none
	behind bool
	sprung chan *seat
}

// named tells which commit leads from one state to the other.
func named(was, is stateRecord) string {
	switch {
	case is.Step == stepPrepare && was.Step == stepNone:
		return "begin"
	case is.Step == stepTurn && was.Step == stepPrepare:
		return "turn"
	case is.Step == stepNone && was.Step == stepTurn:
		return "settle"
	case len(is.Old) < len(was.Old):
		return "erase"
	case len(is.Erasing) < len(was.Erasing):
		return "forget"
	}
	return "another"
}

// Commit is Etcd's, but for the trap.
func (s *seat) Commit(ctx context.Context, t store.Txn) (uint64, error) {
	select {
	case <-s.dead:
		return 0, errDead
	default:
	}
	b, ok := t.Put[keyState]
	if !ok {
		return s.Etcd.Commit(ctx, t)
	}
	var is stateRecord
	if err := json.Unmarshal(b, &is); err != nil {
		return 0, err
	}
	s.trap.mu.Lock()
	defer s.trap.mu.Unlock()
	if named(s.trap.last, is) != s.trap.what {
		r, err := s.Etcd.Commit(ctx, t)
		if err == nil {
			s.trap.last = is
		}
		return r, err
	}
	if s.trap.behind {
		if _, err := s.Etcd.Commit(ctx, t); err != nil {
			return 0, err
		}
		s.trap.last = is
	}
	s.trap.what = ""
	close(s.dead)
	s.trap.sprung <- s
	return 0, errDead
}

// kill ends it as a signal would: it resigns nothing.
func (s *seat) kill(t *testing.T) {
	s.died.Do(func() {
		if err := s.Etcd.Close(); err != nil {
			t.Error(err)
		}
		s.cancel()
		<-s.ended
	})
}

// cluster is several controllers on one etcd.
func cluster(t *testing.T, n int, log *slog.Logger, with ...func(*world)) (*world, []*seat, *trap) {
	t.Helper()
	w := newWorld(t)
	for _, f := range with {
		f(w)
	}
	if log != nil {
		w.log = log
	}
	at := store.EtcdConfig{Endpoints: []string{etcdtest.Shared(t).Endpoint}, Prefix: "test" + w.dir, Lease: 2 * time.Second}
	trap := &trap{sprung: make(chan *seat, 1)}
	var seats []*seat
	for i := range n {
		etcd, err := store.OpenEtcd(t.Context(), at)
		w.must(err)
		nodes, err := Listen("tcp:127.0.0.1:0")
		w.must(err)
		s := &seat{number: i, socket: filepath.Join(w.dir, fmt.Sprint("s", i)), trap: trap, Etcd: etcd, ended: make(chan error, 1), dead: make(chan struct{})}
		operators, err := Listen("unix:" + s.socket)
		w.must(err)
		c, err := New(t.Context(), Config{Store: s, Advertise: "tcp:" + nodes.Addr().String(), Log: w.log.With("controller", i), Drain: w.drain, Now: w.now})
		w.must(err)
		s.ctl = c
		ctx, cancel := context.WithCancel(context.Background())
		s.cancel = cancel
		go func() { s.ended <- c.Run(ctx, operators, nodes) }()
		t.Cleanup(func() {
			s.died.Do(func() {
				cancel()
				if err := <-s.ended; err != nil {
					t.Errorf("controller %d ends with %v", i, err)
				}
				w.must(s.Etcd.Close())
			})
		})
		seats = append(seats, s)
		w.seats = append(w.seats, nodes.Addr().String())
		if i == 0 { // it leads
			w.admin = adminAt(t, s.socket)
			w.until("the first leads", func(*v1.State) bool { return true })
		}
	}
	var sockets []string
	for _, s := range seats {
		sockets = append(sockets, s.socket)
	}
	w.admin = adminAt(t, sockets...)
	return w, seats, trap
}

// adminAt is an operator who tries sockets in turn.
func adminAt(t *testing.T, sockets ...string) waystampv1connect.AdminClient {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (conn net.Conn, err error) {
		for _, s := range sockets {
			if conn, err = new(net.Dialer).DialContext(ctx, "unix", s); err == nil {
				return conn, nil
			}
		}
		return nil, err
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return waystampv1connect.NewAdminClient(&http.Client{Transport: transport}, "http://controller")
}

// The controller that leads dies at each commit of a change, before it is done or behind it. Another one
// carries the change on.
func TestTheNextControllerCarriesAChangeOn(t *testing.T) {
	for what, when := range map[string][]bool{"begin": {false}, "turn": {false, true}, "settle": {true}, "erase": {false}, "forget": {true}} {
		for _, behind := range when {
			t.Run(fmt.Sprint(what, " behind ", behind), func(t *testing.T) {
				t.Parallel()
				w, _, trap := cluster(t, 2, nil)
				agents := map[string]*fake{}
				names := []string{"r1", "r2", "r3"}
				for _, name := range names {
					agents[name] = w.join(name)
				}
				w.until("settled", settled(w.apply(file)))
				w.until("drained", drained)
				trap.mu.Lock()
				trap.what, trap.behind = what, behind
				trap.mu.Unlock()
				serial := w.rotate()
				var dead *seat
				select {
				case dead = <-trap.sprung:
				case <-time.After(patience):
					t.Fatalf("nobody has done the commit %s", what)
				}
				if dead.number != 0 {
					t.Errorf("controller %d has led", dead.number)
				}
				dead.kill(t)
				w.until("carried on", func(s *v1.State) bool {
					return settled(serial)(s) && drained(s) && !slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool { return n.State != nodeReady })
				})
				at := func(name string) plan.Node { return agents[name].now() }
				if n := w.accepted(at, names...); n != 2 {
					t.Errorf("%d paths are sent into, want 2", n)
				}
				secrets := map[string]string{}
				for name, a := range agents {
					last := uint64(0)
					for _, p := range a.plans() {
						if p.Revision <= last {
							t.Errorf("%s: revision %d behind %d", name, p.Revision, last)
						}
						last = p.Revision
						for _, e := range p.Endpoints {
							id, key := fmt.Sprint(name, e.Path, e.Epoch), string(e.Share.Key[:])
							if was, ok := secrets[id]; ok && was != key {
								t.Errorf("%s had two secrets of epoch %d", name, e.Epoch)
							}
							secrets[id] = key
						}
					}
					if sends, takes := epochsOf(a.now(), "web"); slices.Contains(sends, 1) || slices.Contains(takes, 1) {
						t.Errorf("%s still has epoch 1: %v, %v", name, sends, takes)
					}
				}
				w.until("it leads on", settled(w.rotate()))
			})
		}
	}
}

// syncWriter is a log that is read while it is written.
type syncWriter struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncWriter) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *syncWriter) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// Whoever calls another controller than the one that leads is answered by that one, as whom he is.
func TestCallsArePassedOnToTheControllerThatLeads(t *testing.T) {
	var out syncWriter
	w, seats, _ := cluster(t, 3, slog.New(slog.NewTextHandler(&out, nil)))
	w.admin = adminAt(t, seats[1].socket)
	all := w.seats
	w.seats = all[2:]
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("settled", settled(w.apply(file)))
	before := agents["r2"].now().Revision
	w.until("settled", settled(w.rotate()))
	if r := agents["r2"].now().Revision; r <= before {
		t.Errorf("the stream of plans has brought revision %d behind %d", r, before)
	}
	for _, line := range []string{"who=\"node r2\"", "who=\"uid"} {
		if text := out.String(); !slices.ContainsFunc(strings.Split(text, "\n"), func(l string) bool {
			return strings.Contains(l, "controller=0") && strings.Contains(l, "msg=audit") && strings.Contains(l, line) && strings.Contains(l, "via=")
		}) {
			t.Errorf("the audit trail of the first has no line with %s and via", line)
		}
	}
	// What a caller says of himself counts for nothing.
	header := base64.StdEncoding.EncodeToString(encode(passed{Operator: true}))
	liar := func(to string) *member.Member {
		m, err := member.Open(member.Config{Controllers: []string{to}, Dir: agents["r1"].dir, Transport: func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				r.Header.Set(headerPassed, header)
				return next.RoundTrip(r)
			})
		}})
		w.must(err)
		return m
	}
	for _, to := range all { // an operator would find no such call
		if err := liar(to).Renew(t.Context()); err != nil {
			t.Errorf("%s takes the caller for somebody else: %v", to, err)
		}
	}
	_, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r1"}))
	w.must(err)
	if err := liar(all[1]).Renew(t.Context()); code(err) != connect.CodePermissionDenied {
		t.Errorf("a revoked node through another controller: %v", err)
	}
	w.until("its stream has ended", func(s *v1.State) bool { return nodeIn(s, "r1").State == nodeRevoked })
	// One that ends resigns: another one leads at once, and streams go on with it.
	seats[0].died.Do(func() {
		seats[0].cancel()
		w.must(<-seats[0].ended)
		w.must(seats[0].Etcd.Close())
	})
	if n := len(seats[0].ctl.cache.generations); n != 0 {
		t.Errorf("one that leads no more has the secrets of %d generations in memory", n)
	}
	var serial uint64
	for {
		r, err := w.admin.Rotate(t.Context(), connect.NewRequest(&v1.RotateRequest{All: true}))
		if err == nil {
			serial = r.Msg.Serial
			break
		}
		if code(err) != connect.CodeUnavailable {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond) // nothing tells of it
	}
	w.until("settled", settled(serial))
}

// A connection between controllers may be older than the certificate that opened it, as long as there are streams on it.
func TestCallsArePassedOnForLongerThanACertificateLasts(t *testing.T) {
	var later atomic.Int64
	w, seats, _ := cluster(t, 2, nil, func(w *world) {
		w.now = func() time.Time { return time.Now().Add(time.Duration(later.Load())) }
	})
	w.admin = adminAt(t, seats[1].socket)
	stream, err := w.admin.Follow(t.Context(), connect.NewRequest(&v1.FollowRequest{}))
	w.must(err)
	defer stream.Close()
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	for range 5 {
		later.Add(int64(identity.CertificateValid / 3))
		w.state()
	}
	w.token("r1") // it is a change: the stream tells of it
	if !stream.Receive() {
		t.Error(stream.Err())
	}
}

// A call that is passed on by somebody unknown is not one of nobody, who may join.
func TestACallThatSomebodyUnknownPassesOnIsRefused(t *testing.T) {
	w := newWorld(t)
	w.start()
	r := httptest.NewRequest(http.MethodPost, waystampv1connect.NodeRenewProcedure, strings.NewReader("{}"))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(headerPassed, base64.StdEncoding.EncodeToString(encode(passed{Operator: true})))
	r.TLS = &tls.ConnectionState{}
	answer := httptest.NewRecorder()
	w.ctl.handler().ServeHTTP(answer, r)
	if text := answer.Body.String(); answer.Code != http.StatusUnauthorized || !strings.Contains(text, "whoever passes the call on") {
		t.Errorf("%d %s", answer.Code, text)
	}
}

// Of two that are started on an empty store at once, both have the same CA.
func TestControllersThatStartAtOnceShareTheirCA(t *testing.T) {
	at := store.EtcdConfig{Endpoints: []string{etcdtest.Shared(t).Endpoint}, Prefix: "test" + t.TempDir(), Lease: 2 * time.Second}
	pins := make([][32]byte, 4)
	var group sync.WaitGroup
	for i := range pins {
		group.Go(func() {
			s, err := store.OpenEtcd(t.Context(), at)
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Close()
			c, err := New(t.Context(), Config{Store: s, Advertise: "tcp:127.0.0.1:7443"})
			if err != nil {
				t.Error(err)
				return
			}
			pins[i] = c.ca().Pin()
		})
	}
	group.Wait()
	for _, p := range pins {
		if p != pins[0] {
			t.Error("there are two CAs")
		}
	}
}

func TestOthersHaveToReachAControllerThatSharesItsStore(t *testing.T) {
	for address, says := range map[string]string{
		"tcp:[fd00::1]:7443": "", "tcp:ctl.example.org:7443": "", "tls+unix:/run/x": "",
		"": "no address of a controller", "[fd00::1]:7443": "no address of a controller", "unix:/run/x": "no address of a controller",
		"tcp:[::]:7443": "every address of this machine", "tcp::7443": "every address of this machine", "tcp:0.0.0.0:7443": "every address of this machine",
		"tcp:[fd00::1]:0": "no port",
	} {
		if err := CheckAddress(address); (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", address, err, says)
		}
	}
	if _, err := New(t.Context(), Config{Store: new(store.Etcd)}); err == nil || errors.Is(err, store.ErrClosed) {
		t.Errorf("a controller that nobody reaches: %v", err)
	}
}
