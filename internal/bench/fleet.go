package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/controller"
	"github.com/waystamp/waystamp/internal/member"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
	"github.com/waystamp/waystamp/internal/store"
)

// controlFunctions is how many functions a chain of a fleet has, each on a node of its own.
const controlFunctions = 5

// fleet is a controller and its members, in this process. Members have no data path.
type fleet struct {
	agents int
	dir    string
	store  store.Store
	http   *http.Transport
	admin  waystampv1connect.AdminClient
	cancel context.CancelFunc
	runs   errgroup.Group
	turned []int         // by chain: how often its functions have been turned by one
	told   []atomic.Bool // by node: it was sent a plan
}

// domain is the file of now. A change turns the functions of a chain by one: no two in a row are the same, nor is one of the last
// few as before. The nodes of a chain follow each other, so that all have as many SIDs.
func (f *fleet) domain() []byte {
	var b strings.Builder
	b.WriteString("version: 1\ndomain: {block: \"fc00::/48\"}\nnodes:\n")
	for i := range f.agents {
		fmt.Fprintf(&b, "  - {name: n%d, address: \"fd00::%x\", locator: \"fc00:0:0:%x::/58\", cpus: 2, interfaces: [{name: e, role: edge}, {name: c, role: core}]}\n", i, i+1, i*64)
	}
	b.WriteString("functions:\n")
	for i := range f.agents {
		fmt.Fprintf(&b, "  - {name: f%d, node: n%d, kind: forward}\n", i, i)
	}
	b.WriteString("chains:\n")
	for i := range chainsOf(f.agents) {
		var functions []string
		for k := range controlFunctions {
			functions = append(functions, fmt.Sprintf("f%d", f.on(i, k+1)))
		}
		turn := f.turned[i] % controlFunctions
		functions = slices.Concat(functions[turn:], functions[:turn])
		fmt.Fprintf(&b, "  - {name: c%d, ingress: [n%d], functions: [%s], egress: n%d, match: {destination: \"2001:db8:%x:%x::/64\"}, proof: {scheme: keyed, window: 64}}\n",
			i, f.on(i, 0), strings.Join(functions, ", "), f.on(i, controlFunctions+1), i>>8, i&0xff)
	}
	return []byte(b.String())
}

// on is the node of a chain's visit: its headend has none of its SIDs.
func (f *fleet) on(chain, visit int) int { return ((controlFunctions+1)*chain + visit) % f.agents }

// prepareFleet is a fleet of which one chain changes in each run.
func prepareFleet(ctx context.Context, agents int, r *Result) (*trial, error) {
	f, err := newFleet(ctx, "", agents, r)
	if err != nil {
		return nil, err
	}
	return &trial{measure: f.measure, close: f.close}, nil
}

// newFleet starts a controller, lets all members join, and waits until they have the first plans. Records and plans are below a directory; "": the
// system's for temporary files.
func newFleet(ctx context.Context, below string, agents int, r *Result) (_ *fleet, err error) {
	f := &fleet{agents: agents, told: make([]atomic.Bool, agents), turned: make([]int, chainsOf(agents))}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	if f.dir, err = os.MkdirTemp(below, "waystamp-bench-"); err != nil {
		return nil, fmt.Errorf("make a directory for a controller: %w", err)
	}
	if f.store, err = store.OpenBolt(filepath.Join(f.dir, "store")); err != nil {
		return nil, err
	}
	ctl, err := controller.New(ctx, controller.Config{Store: f.store, Log: slog.New(slog.DiscardHandler), Drain: 10 * time.Millisecond})
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(f.dir, "operators")
	operators, err := controller.Listen("unix:" + socket)
	if err != nil {
		return nil, err
	}
	nodes, err := controller.Listen("tcp:127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(err, operators.Close())
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	f.cancel = cancel
	f.runs.Go(func() error { return ctl.Run(run, operators, nodes) })
	f.http = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	f.admin = waystampv1connect.NewAdminClient(&http.Client{Transport: f.http}, "http://controller")

	began := time.Now()
	if err := f.join(ctx, run, nodes.Addr().String()); err != nil {
		return nil, err
	}
	joined := time.Since(began)
	began = time.Now()
	if err := f.apply(ctx); err != nil {
		return nil, err
	}
	r.note(fmt.Sprintf("%d members joined in %.1f s, one token each; the first file, with %d chains, took %.1f s until all had acknowledged.", agents, joined.Seconds(), chainsOf(agents), time.Since(began).Seconds()))
	return f, nil
}

// join makes the members, some at once, and lets them run.
func (f *fleet) join(ctx, run context.Context, at string) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	var mu sync.Mutex
	for i := range f.agents {
		g.Go(func() error {
			name := fmt.Sprintf("n%d", i)
			token, err := f.admin.CreateToken(ctx, connect.NewRequest(&v1.CreateTokenRequest{Node: name}))
			if err != nil {
				return err
			}
			var m *member.Member
			ready := make(chan struct{})
			m, err = member.Open(member.Config{
				Controllers: []string{at}, Token: token.Msg.Token, Dir: filepath.Join(f.dir, name), Node: name,
				Received: func(n plan.Node, digest string) {
					<-ready
					f.told[i].Store(true)
					m.Report(member.Report{Revision: n.Revision, Digest: digest})
				},
			})
			if err != nil {
				return err
			}
			close(ready)
			if err := m.Join(ctx); err != nil {
				return fmt.Errorf("join %s: %w", name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			f.runs.Go(func() error { return m.Run(run) })
			return nil
		})
	}
	return g.Wait()
}

// apply puts a file in force, and waits until all have acknowledged.
func (f *fleet) apply(ctx context.Context) error {
	answer, err := f.admin.Apply(ctx, connect.NewRequest(&v1.ApplyRequest{File: &v1.File{Name: "fleet.yaml", Source: f.domain()}}))
	if err != nil {
		return err
	}
	return f.inForce(ctx, answer.Msg.Serial)
}

// rotate gives a chain fresh secrets, and waits until all have acknowledged.
func (f *fleet) rotate(ctx context.Context, chain int) error {
	answer, err := f.admin.Rotate(ctx, connect.NewRequest(&v1.RotateRequest{Chains: []string{fmt.Sprintf("c%d", chain)}}))
	if err != nil {
		return err
	}
	return f.inForce(ctx, answer.Msg.Serial)
}

// inForce waits until all have acknowledged what a request asked for.
func (f *fleet) inForce(ctx context.Context, serial uint64) error {
	return f.until(ctx, true, func(s *v1.State) (bool, error) {
		if s.Problem != "" && s.WantedSerial == serial {
			return false, errors.New(s.Problem)
		}
		return s.Settled && s.Serial >= serial, nil
	})
}

// until follows the controller until something is so. progress: without chains and epochs, as waystamp apply --wait does.
func (f *fleet) until(ctx context.Context, progress bool, is func(*v1.State) (bool, error)) error {
	stream, err := f.admin.Follow(ctx, connect.NewRequest(&v1.FollowRequest{Progress: progress}))
	if err != nil {
		return err
	}
	defer stream.Close()
	for stream.Receive() {
		if done, err := is(stream.Msg().State); done || err != nil {
			return err
		}
	}
	return errors.Join(stream.Err(), errors.New("the controller has ended the connection"))
}

// quiet waits until changes have left no epochs that drain, and nobody is still sent something of them.
func (f *fleet) quiet(ctx context.Context) error {
	return f.until(ctx, false, func(s *v1.State) (bool, error) {
		for _, e := range s.Epochs {
			if e.State != "active" {
				return false, nil
			}
		}
		for _, n := range s.Nodes {
			if n.State != "ready" {
				return false, nil
			}
		}
		return s.Settled, nil
	})
}

// measure changes the first chain, in milliseconds until it is in force.
func (f *fleet) measure(ctx context.Context) (float64, error) {
	if err := f.quiet(ctx); err != nil {
		return 0, err
	}
	for i := range f.told {
		f.told[i].Store(false)
	}
	f.turned[0]++
	began := time.Now()
	if err := f.apply(ctx); err != nil {
		return 0, err
	}
	took := time.Since(began)
	on := map[int]bool{}
	for visit := range controlFunctions + 2 {
		on[f.on(0, visit)] = true
	}
	for i := range f.told {
		if f.told[i].Load() != on[i] {
			return 0, fmt.Errorf("node n%d: told of the change: %t, on its chain: %t", i, f.told[i].Load(), on[i])
		}
	}
	return took.Seconds() * 1000, ctx.Err()
}

func (f *fleet) close() error {
	var errs []error
	if f.cancel != nil {
		f.cancel()
		if err := f.runs.Wait(); !errors.Is(err, context.Canceled) {
			errs = append(errs, err)
		}
	}
	if f.http != nil {
		f.http.CloseIdleConnections()
	}
	if f.store != nil {
		errs = append(errs, f.store.Close())
	}
	if f.dir != "" {
		errs = append(errs, os.RemoveAll(f.dir))
	}
	return errors.Join(errs...)
}
