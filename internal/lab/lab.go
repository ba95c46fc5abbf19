// Package lab builds a domain and the world around it on one machine: a
// network namespace for every node, router, host and function that knows nothing
// of segment routing, veth pairs between them, addresses, routes (static, or by
// FRR) and rulesets, and one agent process per node. It takes all of it away again, also
// what an interrupted build has left. The traffic tools at its end send real
// packets from inside a namespace.
//
// It decides nothing of chains (internal/plan does) and attaches no programs
// (the agents do). `waystamp lab`, `waystamp demo` and the end-to-end tests call
// it.
//
// What a lab is made of is written to a file before it is made, so that Down
// finds it whatever happens to the process that builds. Namespaces are found
// again by their inode and processes by their start time: a name or a number
// that has become somebody else's is left alone.
package lab

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// DefaultRunDir is where labs keep their state, each in a directory of its
// prefix's name.
const DefaultRunDir = "/run/waystamp/lab"

// undoTime is how long taking down what a failed Up has built may take.
const undoTime = time.Minute

// Config is what Up builds.
type Config struct {
	Domain model.Domain // as internal/manifest returned it, with Lab
	Lab    model.Lab
	Plan   *plan.Domain // of Domain; nil: one with fresh secrets
	Prefix string       // of namespaces and instances; "": a random one
	RunDir string       // of all labs; "": DefaultRunDir
	Binary string       // waystamp, that agents are run from; "": the one beside this program, or in PATH
	Files  string       // directory that names of gateways' files count from; "": the agents' own
	// WithoutAgents leaves the nodes plain routers, whose plans are written but
	// not carried out.
	WithoutAgents bool
	// Apply is a domain file, with Domain in it. A controller of the lab's own is given it, agents join that with
	// tokens, and Plan is what routes and the lab's layout are made of, and no plan of anybody. "": plans are
	// written to files.
	Apply string
	// Own: the lab is this process's, which takes it away before it ends, or keeps
	// it.
	Own bool
	Log *slog.Logger // nil: nothing is logged
	// Progress is told, from one goroutine at a time, when an agent is ready; nil: nobody
	// is.
	Progress func(node string, ready, of int)
}

// Lab is a lab that is up. Its methods may be called from several goroutines;
// those that start, stop and detach agents not for one node at once.
type Lab struct {
	dir string
	log *slog.Logger

	mu    sync.Mutex // guards what follows, and the file
	state state
}

// Up builds a lab and waits until every agent is ready. If that fails, or ctx
// ends before it is done, all of it is undone. The lab outlives the process;
// Down takes it away.
func Up(ctx context.Context, c Config) (_ *Lab, err error) {
	if c.RunDir == "" {
		c.RunDir = DefaultRunDir
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Prefix != "" {
		if err := model.CheckName(c.Prefix); err != nil {
			return nil, fmt.Errorf("lab prefix %q %w", c.Prefix, err)
		}
	}
	programs := slices.ContainsFunc(c.Lab.Functions, func(f model.LabFunction) bool { return f.Kind == model.LabRaw })
	if c.Binary == "" && (programs || !c.WithoutAgents) {
		if c.Binary, err = host.Program("waystamp"); err != nil {
			return nil, fmt.Errorf("find the program to run agents from: %w; install it beside waystamp-lab (make build builds both)", err)
		}
	}
	if _, err := await.Patience(); err != nil {
		return nil, err
	}
	need := []host.Feature{host.FeatureNetAdmin, host.FeatureNamespaces, host.FeatureIPv6, host.FeatureVeth}
	if slices.ContainsFunc(c.Lab.Routers, func(r model.LabRouter) bool { return len(r.SIDs) > 0 }) {
		need = append(need, host.FeatureSEG6Local)
	}
	if err := host.Require(need...); err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(c.Lab.Functions, func(f model.LabFunction) bool { return f.Kind == model.LabNftables }); i >= 0 {
		if err := host.RequireNft(); err != nil {
			return nil, fmt.Errorf("function %s of the lab is a ruleset: %w", c.Lab.Functions[i].Name, err)
		}
	}
	if c.Lab.Routing == model.LabFRR {
		if err := requireFRR(frrDirs); err != nil {
			return nil, fmt.Errorf("the lab's routing is frr: %w", err)
		}
	}
	world, err := await.Do(ctx, func() (layout, error) { return layOut(c.Domain, c.Lab) })
	if err != nil {
		return nil, err
	}
	if c.Plan == nil {
		if c.Plan, err = await.Do(ctx, func() (*plan.Domain, error) { return compile(c.Domain) }); err != nil {
			return nil, err
		}
	}

	l, unlock, err := create(c)
	if err != nil {
		return nil, err
	}
	defer unlock()
	defer func() {
		if err == nil {
			return
		}
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), await.Limit(undoTime))
		defer cancel()
		if downErr := l.takeDown(undo); downErr != nil {
			err = errors.Join(err, fmt.Errorf("undo lab %s: %w; try: waystamp lab down --prefix %s", l.Prefix(), downErr, l.Prefix()))
		}
	}()
	c.Log.Info("building", "lab", l.Prefix(), "dir", l.dir)
	if c.Apply == "" {
		if err := l.writePlans(ctx, c.Plan); err != nil {
			return nil, err
		}
	}
	if err := l.build(ctx, world); err != nil {
		return nil, err
	}
	if err := l.startRouting(ctx, world, c.Domain, c.Plan.Paths); err != nil {
		return nil, err
	}
	for _, s := range world.stations {
		if s.copier != nil {
			if err := l.startProgram(ctx, s.name, *s.copier); err != nil {
				return nil, err
			}
		}
	}
	switch {
	case c.WithoutAgents:
	case c.Apply != "":
		if err := l.control(ctx, c.Apply, c.Progress); err != nil {
			return nil, err
		}
	default:
		if err := l.startAgents(ctx, c.Progress); err != nil {
			return nil, err
		}
	}
	if err := l.update(func(s *state) {
		s.Up = true
		if !c.Own {
			s.Owner = nil
		}
	}); err != nil {
		return nil, err
	}
	return l, nil
}

// create makes the lab's directory, its lock and its first state.
func create(c Config) (_ *Lab, unlock func(), err error) {
	if err := os.MkdirAll(c.RunDir, 0o700); err != nil {
		return nil, nil, fmt.Errorf("make the labs' directory: %w", err)
	}
	prefix := c.Prefix
	for try := 0; ; try++ {
		if c.Prefix == "" {
			var b [2]byte
			rand.Read(b[:])
			prefix = fmt.Sprintf("ws-%x", b)
		}
		err := os.Mkdir(filepath.Join(c.RunDir, prefix), 0o700)
		if err == nil {
			break
		}
		switch {
		case !errors.Is(err, fs.ErrExist):
			return nil, nil, fmt.Errorf("make the directory of lab %s: %w", prefix, err)
		case c.Prefix != "":
			return nil, nil, fmt.Errorf("there is a lab %s already: %w; try: waystamp lab down --prefix %s", prefix, fs.ErrExist, prefix)
		case try == 99:
			return nil, nil, fmt.Errorf("find a free prefix in %s: %w", c.RunDir, err)
		}
	}
	l := &Lab{dir: filepath.Join(c.RunDir, prefix), log: c.Log}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(l.dir))
		}
	}()
	unlock, err = l.lock()
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			unlock()
		}
	}()
	for _, d := range []string{"nodes", "logs", "agents"} {
		if err := os.Mkdir(filepath.Join(l.dir, d), 0o700); err != nil {
			return nil, nil, fmt.Errorf("make the directory of lab %s: %w", prefix, err)
		}
	}
	me, err := findProcess(os.Getpid())
	if err != nil {
		return nil, nil, err
	}
	l.state = state{
		Version: stateVersion, Prefix: prefix, Created: time.Now().UTC().Truncate(time.Second), Binary: c.Binary, Files: c.Files,
		Owner: &Owner{me.pid, me.start},
	}
	return l, unlock, l.update(func(*state) {})
}

// build makes namespaces, links, addresses, routes and rulesets.
func (l *Lab) build(ctx context.Context, w layout) (err error) {
	spaces := map[string]*host.NetNS{}
	nets := map[string]*host.Net{}
	defer func() {
		for _, n := range nets {
			err = errors.Join(err, n.Close())
		}
		for _, ns := range spaces {
			err = errors.Join(err, ns.Close())
		}
	}()
	// First without names, then recorded, then named: nothing that outlives the
	// process is ever there without a record of whose it is.
	members := make([]Member, 0, len(w.stations))
	for _, s := range w.stations {
		ns, err := host.Anonymous()
		if err != nil {
			return err
		}
		spaces[s.name] = ns
		if nets[s.name], err = host.Open(ns); err != nil {
			return err
		}
		members = append(members, Member{Name: s.name, Role: s.role, Namespace: l.Prefix() + "-" + s.name, Inode: ns.Inode()})
	}
	if err := l.update(func(s *state) { s.Members = members }); err != nil {
		return err
	}
	for _, m := range members {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := spaces[m.Name].Publish(m.Namespace); err != nil {
			return err
		}
	}
	for _, s := range w.stations {
		if err := s.prepare(nets[s.name]); err != nil {
			return err
		}
	}
	for _, k := range w.wires {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		a, b := k.ends()
		if err := nets[k.a].AddVeth(host.Veth{Name: a, PeerName: b, Peer: spaces[k.b], MTU: k.mtu}); err != nil {
			return err
		}
	}
	for _, s := range w.stations {
		if err := s.address(nets[s.name]); err != nil {
			return err
		}
	}
	for _, s := range w.stations {
		if err := s.route(ctx, nets[s.name]); err != nil {
			return err
		}
	}
	for _, s := range w.stations {
		if err := s.program(ctx, nets[s.name]); err != nil {
			return err
		}
	}
	return nil
}

// startAgents runs one agent per node, all at once.
func (l *Lab) startAgents(ctx context.Context, progress func(node string, ready, of int)) error {
	g, ctx := errgroup.WithContext(ctx)
	nodes := slices.DeleteFunc(slices.Clone(l.Members()), func(m Member) bool { return m.Role != RoleNode })
	var mu sync.Mutex
	ready := 0
	for _, m := range nodes {
		g.Go(func() error {
			if err := l.StartAgent(ctx, m.Name); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			if ready++; progress != nil {
				progress(m.Name, ready, len(nodes))
			}
			return nil
		})
	}
	return g.Wait()
}

// Open finds a lab that is up, or half up, by its prefix. RunDir "" stands for
// DefaultRunDir; a nil logger logs nothing. The error is fs.ErrNotExist if there
// is no such lab.
func Open(runDir, prefix string, log *slog.Logger) (*Lab, error) {
	if runDir == "" {
		runDir = DefaultRunDir
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if err := model.CheckName(prefix); err != nil {
		return nil, fmt.Errorf("lab prefix %q %w", prefix, err)
	}
	l := &Lab{dir: filepath.Join(runDir, prefix), log: log}
	if _, err := os.Stat(l.dir); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("there is no lab %s: %w; try: waystamp lab ls", prefix, fs.ErrNotExist)
		}
		return nil, fmt.Errorf("open lab %s: %w", prefix, err)
	}
	return l, l.read()
}

// List returns the prefixes of all labs in a run directory, sorted.
func List(runDir string) ([]string, error) {
	if runDir == "" {
		runDir = DefaultRunDir
	}
	entries, err := os.ReadDir(runDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	out := []string{}
	for _, e := range entries {
		if e.IsDir() && model.CheckName(e.Name()) == nil {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// Keep leaves a lab that was this process's own to whoever takes it down.
func (l *Lab) Keep() error { return l.update(func(s *state) { s.Owner = nil }) }

// owner is the process that has yet to take the lab away; the zero process: none.
func (l *Lab) owner() process {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state.Owner == nil {
		return process{}
	}
	return process{l.state.Owner.PID, l.state.Owner.Start}
}

// Owned returns the prefixes, sorted, of the labs in a run directory that this
// process has yet to take away, and of those that are left of processes that have
// ended. RunDir "" stands for DefaultRunDir.
func Owned(runDir string) (own, orphans []string, err error) {
	all, err := List(runDir)
	if err != nil {
		return nil, nil, err
	}
	var errs []error
	for _, prefix := range all {
		l, err := Open(runDir, prefix, nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue // gone meanwhile
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		switch orphan, err := l.IsOrphan(); {
		case err != nil:
			errs = append(errs, err)
		case orphan:
			orphans = append(orphans, prefix)
		case l.owner().pid == os.Getpid():
			own = append(own, prefix)
		}
	}
	return own, orphans, errors.Join(errs...)
}

// IsOrphan tells whether the process that would have taken the lab away has ended.
func (l *Lab) IsOrphan() (bool, error) {
	p := l.owner()
	if p == (process{}) {
		return false, nil
	}
	f, err := p.open()
	if f == nil {
		return err == nil, err
	}
	return false, f.Close()
}

// Down stops agents and programs, detaches the data path, deletes the namespaces
// and forgets the lab. It does as much as it can, also of a lab that is only half
// there. If something could not be taken away, the lab's record stays so that
// Down can be called again.
func (l *Lab) Down(ctx context.Context) error {
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	// Agents may have been started by another process since.
	if err := l.read(); err != nil {
		return err
	}
	if err := l.takeDown(ctx); err != nil {
		return fmt.Errorf("take down lab %s: %w", l.Prefix(), err)
	}
	return nil
}

func (l *Lab) takeDown(ctx context.Context) error {
	members := l.Members()
	errs := make([]error, len(members))
	var agents sync.WaitGroup
	for i, m := range members {
		if m.Agent == nil && m.Program == nil && m.Routing == "" {
			continue
		}
		agents.Go(func() {
			errs[i] = errors.Join(l.stopProgram(ctx, m), l.stopRouting(ctx, m))
			if m.Agent == nil {
				return
			}
			err := l.StopAgent(ctx, m.Name)
			if err == nil {
				err = l.Detach(ctx, m.Name)
			}
			errs[i] = errors.Join(errs[i], err)
		})
	}
	agents.Wait()
	errs = append(errs, l.stopController(ctx))
	for i, m := range members {
		errs[i] = errors.Join(errs[i], l.deleteNamespace(m))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.RemoveAll(l.dir); err != nil {
		return fmt.Errorf("remove the record: %w", err)
	}
	return nil
}

// deleteNamespace deletes a member's namespace if it is still there, and says
// what keeps it alive although its name is gone.
func (l *Lab) deleteNamespace(m Member) error {
	ns, err := m.open()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, pid := range processesIn(m.Inode) {
		l.log.Warn("a process still runs in the lab; its namespace lives until it ends", "namespace", m.Namespace, "pid", pid)
	}
	return ns.Delete()
}

// open returns the member's namespace. If the name is not there, or is by now
// somebody else's, the error is fs.ErrNotExist.
func (m Member) open() (*host.NetNS, error) {
	ns, err := host.OpenNamed(m.Namespace)
	if err != nil {
		return nil, err
	}
	if ns.Inode() != m.Inode {
		ns.Close()
		return nil, fmt.Errorf("network namespace %s is another than this lab has made: %w", m.Namespace, fs.ErrNotExist)
	}
	return ns, nil
}

// Prefix returns what the names of the lab's namespaces and instances start with.
func (l *Lab) Prefix() string { return filepath.Base(l.dir) }

// Dir returns the directory of the lab's state.
func (l *Lab) Dir() string { return l.dir }

// Members returns nodes, routers, hosts and functions that are behind interfaces,
// in the order of the file.
func (l *Lab) Members() []Member {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.state.Members)
}

func (l *Lab) files() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state.Files
}

func (l *Lab) binary() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state.Binary
}

// IsUp tells whether the lab was built to its end.
func (l *Lab) IsUp() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state.Up
}

// Created returns when the lab was begun.
func (l *Lab) Created() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state.Created
}

// Member finds one of Members by its name.
func (l *Lab) Member(name string) (Member, error) {
	members := map[string]Member{}
	for _, m := range l.Members() {
		members[m.Name] = m
	}
	m, ok := members[name]
	if !ok {
		return Member{}, fmt.Errorf("lab %s has no %q; it has %s", l.Prefix(), name, strings.Join(slices.Sorted(maps.Keys(members)), ", "))
	}
	return m, nil
}

// NetNS returns a handle on a member's namespace, which is the caller's to
// close.
func (l *Lab) NetNS(name string) (*host.NetNS, error) {
	m, err := l.Member(name)
	if err != nil {
		return nil, err
	}
	return m.open()
}

// Net returns a handle on the network of a member, which is the caller's to
// close.
func (l *Lab) Net(name string) (*host.Net, error) {
	ns, err := l.NetNS(name)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return host.Open(ns)
}

// Do runs f inside a member's namespace; see host.NetNS.Do.
func (l *Lab) Do(name string, f func() error) error {
	ns, err := l.NetNS(name)
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(f)
}

// Run runs a command inside a member's namespace to its end and returns its
// output, standard error included.
func (l *Lab) Run(ctx context.Context, name string, argv ...string) ([]byte, error) {
	ns, err := l.NetNS(name)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return host.Command(ctx, ns, argv[0], argv[1:]...).CombinedOutput()
}

// Exec replaces the process by a command in a member's namespace, and returns
// only if that does not work; see host.NetNS.Exec.
func (l *Lab) Exec(name string, argv, env []string) error {
	ns, err := l.NetNS(name)
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Exec(argv, env)
}

// lock keeps two processes from building or taking down one lab at once. It
// ends with the process that holds it.
func (l *Lab) lock() (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(l.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no lab %s: %w", l.Prefix(), err)
	}
	if err != nil {
		return nil, fmt.Errorf("lock lab %s: %w", l.Prefix(), err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lab %s is being built or taken down by another process", l.Prefix())
		}
		return nil, fmt.Errorf("lock lab %s: %w", l.Prefix(), err)
	}
	return func() {
		// Not by Close alone: a process that is just being started may have the
		// file open until it runs its own program.
		unix.Flock(int(f.Fd()), unix.LOCK_UN)
		f.Close()
	}, nil
}

// NodePlanPath returns the plan file of a node, which its agent follows.
func (l *Lab) NodePlanPath(node string) string { return filepath.Join(l.dir, "nodes", node+".json") }

// PathsPath returns the file that holds all paths with their secrets.
func (l *Lab) PathsPath() string { return filepath.Join(l.dir, "paths.json") }

// AgentDir returns the run directory of a node's agent; its socket is
// agent.sock there.
func (l *Lab) AgentDir(node string) string { return filepath.Join(l.dir, "agents", node) }

// Instance returns the name of a node's pins.
func (l *Lab) Instance(node string) string { return l.Prefix() + "-" + node }

// HostAddress returns the address of a lab's host: ::2 of its prefix.
func HostAddress(h model.LabHost) netip.Addr { return hostSide(h.Prefix, 2) }

// HostAddress4 returns the host's IPv4 address, the second of its prefix; zero if
// it has none.
func HostAddress4(h model.LabHost) netip.Addr {
	if !h.Prefix4.IsValid() {
		return netip.Addr{}
	}
	return hostSide(h.Prefix4, 2)
}
