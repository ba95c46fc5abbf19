package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// controlEvery is how often secrets change beside a load.
const controlEvery = time.Second

// chainsOf is how many chains a domain with so many agents has, of controlFunctions functions each.
func chainsOf(agents int) int { return 10 * agents }

// Control measures what a change of a domain costs: a node, the controller, and the traffic.
func Control(ctx context.Context, c Config) (Result, error) {
	agents, paths := []int{10, 100, 1000}, []int{1, 1000, 8000}
	if c.Quick {
		agents, paths = []int{10, 100}, []int{1, 1000}
	}
	r := c.begin("control",
		"control/change: one node that is the egress of so many paths. Of one of them an epoch is added beside the one that there is, and then the old one is taken out, as a rotation does; the time is that of one such application of a plan, in the kernel and in the state directory, without traffic.",
		fmt.Sprintf("control/one-chain: a controller and so many members, each with a connection of its own over TLS with certificates on both sides, in one process on this machine's CPUs. Members keep plans on disk as agents do; their data paths are missing: they acknowledge what they have on disk. There are ten chains of %d functions for each member. A file is applied in which the functions of one chain are in another order; the time is until all headends have acknowledged, and it is an error if a node that is not on the chain is sent anything.", controlFunctions),
		"control/compile: the domain of the largest case of control/one-chain. One of its chains differs from what was compiled before; all chains are compiled, or those that differ, with the same result.",
		fmt.Sprintf("control/memory: what is held before and behind so many changes. Of the controller: it and its %d members in one process, with %d chains, and its store in memory; in turns a file is applied in which the functions of one chain are in another order, and one chain gets fresh secrets, of all chains one after the other. Of a node: the data path in its process, which gets and gives up an epoch of the one path that it is the egress of. heap: the process's after a collection; resident: its anonymous memory in the kernel's count, when the runtime has given back what it can; store: the store's file. %d changes go before the first ones that count, so that what has a fixed size is full: events, epochs, commits that watches are told of.", memoryAgents, chainsOf(memoryAgents), memoryAhead),
		"control/tcp-under-change: one TCP stream of iperf3 through examples/spare.yaml, whose agents have a controller; in rotate, all chains get fresh secrets each second. It is an error if a node refuses a packet.",
	)
	c.note = r.note
	var change, one, tcp, compile []subject
	chains := chainsOf(agents[len(agents)-1])
	for _, way := range []string{"all", "one"} {
		s := Series{Name: fmt.Sprintf("control/compile/%s-of-%d", way, chains), Unit: "ms", Better: Less, Params: map[string]float64{"chains": float64(chains)}}
		if way == "one" {
			s.Baseline = compile[0].Name
		}
		compile = append(compile, subject{s, func() (*trial, error) { return prepareCompile(agents[len(agents)-1], way == "one") }})
	}
	for i, n := range paths {
		s := Series{Name: fmt.Sprintf("control/change/paths-%d", n), Unit: "ms", Better: Less, Params: map[string]float64{"paths": float64(n)}}
		if i > 0 {
			s.Baseline = change[0].Name
		}
		change = append(change, subject{s, func() (*trial, error) { return prepareChange(n) }})
	}
	for i, n := range agents {
		s := Series{Name: fmt.Sprintf("control/one-chain/agents-%d", n), Unit: "ms", Better: Less, Params: map[string]float64{"agents": float64(n)}}
		if i > 0 {
			s.Baseline = one[0].Name
		}
		one = append(one, subject{s, func() (*trial, error) { return prepareFleet(ctx, n, &r) }})
	}
	for _, way := range []string{"still", "rotate"} {
		s := Series{Name: "control/tcp-under-change/" + way, Unit: "Mbit/s", Better: More}
		if way == "rotate" {
			s.Baseline = tcp[0].Name
		}
		tcp = append(tcp, subject{s, func() (*trial, error) { return prepareRotated(ctx, c, way == "rotate") }})
	}
	for what, subjects := range map[string][]subject{"a node": change, "the controller": one, "the traffic": tcp, "compiling": compile} {
		if c.skips(subjects) {
			continue
		}
		figures, err := c.rounds(ctx, "control, "+what, subjects)
		if err != nil {
			return Result{}, err
		}
		r.Figures = append(r.Figures, figures...)
	}
	memory, held := memorySubjects(c.Quick)
	figures, err := c.memory(ctx, memory, held, &r)
	if err != nil {
		return Result{}, err
	}
	r.Figures = append(r.Figures, figures...)
	if len(r.Figures) == 0 {
		return Result{}, &NoCaseError{c.Only}
	}
	slices.SortStableFunc(r.Figures, func(a, b Figure) int {
		return slices.Index(order(change, one, compile, memory, tcp), a.Name) - slices.Index(order(change, one, compile, memory, tcp), b.Name)
	})
	r.end()
	return r, nil
}

func order(sections ...[]subject) (names []string) {
	for _, s := range slices.Concat(sections...) {
		names = append(names, s.Name)
	}
	return names
}

// prepareChange makes a node that is the egress of so many paths, of which one changes in each run.
func prepareChange(paths int) (_ *trial, err error) {
	w, err := newWorld(worldSpec{scheme: model.SchemeKeyed, segments: 2, chains: paths})
	if err != nil {
		return nil, err
	}
	p, err := w.node(nodeTail)
	if err != nil {
		return nil, err
	}
	r, err := newRig(0)
	if err != nil {
		return nil, err
	}
	if err := r.apply(p); err != nil {
		return nil, joinClose(err, r)
	}
	return &trial{close: r.close, measure: func(ctx context.Context) (float64, error) {
		next := p.Egresses[0]
		next.Epoch++
		next.Verifier.Keys = slices.Clone(next.Verifier.Keys)
		for i := range next.Verifier.Keys {
			rand.Read(next.Verifier.Keys[i][:])
		}
		both, one := p, p
		both.Egresses = slices.Insert(slices.Clone(p.Egresses), 1, next)
		one.Egresses = slices.Clone(p.Egresses)
		one.Egresses[0] = next
		began := time.Now()
		for _, n := range []plan.Node{both, one} {
			if err := in(r.node, func() error { return r.dp.Apply(n) }); err != nil {
				return 0, err
			}
		}
		p = one
		return time.Since(began).Seconds() * 1000 / 2, ctx.Err()
	}}, nil
}

// prepareCompile compiles a fleet's domain, of which one chain changes with each run. by: by what differs.
func prepareCompile(agents int, by bool) (*trial, error) {
	f := &fleet{agents: agents, turned: make([]int, chainsOf(agents))}
	parse := func() (model.Domain, error) {
		m, err := manifest.Parse("fleet.yaml", f.domain())
		return m.Domain, err
	}
	was, err := parse()
	if err != nil {
		return nil, err
	}
	last, err := plan.Compile(was, nil)
	if err != nil {
		return nil, err
	}
	f.turned[0]++
	d, err := parse()
	if err != nil {
		return nil, err
	}
	d.Nodes, d.Functions = was.Nodes, was.Functions // as the controller has them of files that differ in chains
	return &trial{close: func() error { return nil }, measure: func(ctx context.Context) (float64, error) {
		keys := plan.NewKeyring(rand.Reader, last.Paths)
		keys.KeepSIDs()
		began := time.Now()
		if by {
			_, err = plan.CompileAfter(was, last, d, keys)
		} else {
			_, err = plan.Compile(d, keys)
		}
		if err != nil {
			return 0, err
		}
		return time.Since(began).Seconds() * 1000, ctx.Err()
	}}, nil
}

// prepareRotated makes a lab with a controller, and a server on h2.
func prepareRotated(ctx context.Context, c Config, rotates bool) (_ *trial, err error) {
	m, err := manifest.Parse(examples.SpareName, examples.Spare)
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "waystamp-bench-")
	if err != nil {
		return nil, fmt.Errorf("make a directory for the domain's file: %w", err)
	}
	defer os.RemoveAll(folder)
	file := filepath.Join(folder, "domain.yaml")
	if err := os.WriteFile(file, examples.Spare, 0o600); err != nil {
		return nil, fmt.Errorf("write the domain's file: %w", err)
	}
	l, err := lab.Up(ctx, lab.Config{Domain: m.Domain, Lab: *m.Lab, Apply: file, Binary: c.Binary, Own: true, Log: c.Log})
	if err != nil {
		return nil, err
	}
	down := func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return l.Down(ctx)
	}
	to := lab.HostAddress(m.Lab.Hosts[1])
	stop, err := serveTCP(ctx, l, m.Lab.Hosts[1].Name, to)
	if err != nil {
		return nil, errors.Join(err, down())
	}
	closing := func() error {
		stop()
		return down()
	}
	return &trial{close: closing, measure: func(ctx context.Context) (rate float64, err error) {
		before, err := refusedIn(ctx, l)
		if err != nil {
			return 0, err
		}
		ended, rotated := make(chan struct{}), make(chan error, 1)
		go func() { rotated <- rotateUntil(ctx, l, rotates, ended) }()
		rate, err = sendTCP(ctx, l, m.Lab.Hosts[0].Name, to, max(c.Duration, 4*controlEvery))
		close(ended)
		if err = errors.Join(err, <-rotated); err != nil {
			return 0, err
		}
		after, err := refusedIn(ctx, l)
		if err == nil && after != before {
			err = fmt.Errorf("nodes have refused %d packets", after-before)
		}
		return rate / 1e6, err
	}}, nil
}

// rotateUntil gives all chains fresh secrets each second, until the load has ended; or does nothing.
func rotateUntil(ctx context.Context, l *lab.Lab, rotates bool, ended <-chan struct{}) error {
	if !rotates {
		return nil
	}
	tick := time.NewTicker(controlEvery)
	defer tick.Stop()
	for {
		if _, err := l.Operate(ctx, "rotate", "--all", "--wait"); err != nil {
			return err
		}
		select {
		case <-ended:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// refusedIn is how many packets all nodes of a lab have refused.
func refusedIn(ctx context.Context, l *lab.Lab) (n uint64, err error) {
	for _, m := range l.Members() {
		if m.Role != lab.RoleNode {
			continue
		}
		client := agent.NewClient(agent.SocketPath(l.AgentDir(m.Name)))
		c, err := client.Counters(ctx)
		client.Close()
		if err != nil {
			return 0, err
		}
		for _, r := range c.Refusals {
			n += r.Dropped + r.Reported
		}
	}
	return n, nil
}
