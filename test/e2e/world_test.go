package e2e

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// How long things may take on a slow and busy machine; where all is well none of
// it is waited out.
var (
	patience   = await.Limit(5 * time.Minute) // a world, or all of a test's traffic
	settleTime = await.Limit(time.Minute)     // a single event
	// lostTime is how long an answer is waited for that must not come.
	lostTime = await.Limit(300 * time.Millisecond)
)

// pollEvery is how often something is looked at that tells nobody when it
// changes, such as a counter in the kernel.
const pollEvery = 5 * time.Millisecond

// world is a lab with its agents at work.
type world struct {
	*lab.Lab
	t        *testing.T
	manifest manifest.Manifest
	plan     *plan.Domain
	runDir   string
	silent   bool        // without agents
	ipv4     bool        // its hosts speak IPv4
	cutting  [][2]string // see cutAndMerge

	*ledger
}

// ledger is which packets must have been refused so far.
type ledger struct {
	mu       sync.Mutex
	expected map[refusal]uint64
	late     map[refusal]bool // more of these may come
}

// in is the world as a subtest sees it.
func (w *world) in(t *testing.T) *world {
	sub := *w
	sub.t = t
	return &sub
}

// change edits a domain before it is compiled.
type change func(*manifest.Manifest)

// proven gives all chains a scheme.
func proven(s model.Scheme) change {
	return func(m *manifest.Manifest) {
		for i := range m.Domain.Chains {
			m.Domain.Chains[i].Proof.Scheme = s
		}
	}
}

// overLabels makes all chains go over labels, through the same core: its IPv6 routes lead to the
// nodes' labels.
func overLabels(m *manifest.Manifest) {
	d := &m.Domain
	d.MPLS = &model.MPLS{Services: 100000, MTU: m.Lab.MTU}
	for i := range d.Nodes {
		d.Nodes[i].MPLS = &model.NodeMPLS{Label: 16001 + uint32(i), Address: d.Nodes[i].Address}
	}
	for i := range d.Chains {
		d.Chains[i].Encapsulation = model.Encapsulation{Type: model.EncapsulationSRMPLS}
	}
}

// overIPv4 makes the core one of IPv4 besides, which routes nothing but addresses of labels.
func overIPv4(m *manifest.Manifest) {
	overLabels(m)
	m.Lab.Core = model.LabIPv4
	for i := range m.Domain.Nodes {
		m.Domain.Nodes[i].MPLS.Address = netip.AddrFrom4([4]byte{10, 255, 0, byte(i + 1)})
	}
}

// routersPassLabels makes the lab's routers nodes of the domain, on no chain, whose agents have them pass
// labels on; call it before overLabels.
func routersPassLabels(m *manifest.Manifest) {
	for i, r := range m.Lab.Routers {
		n := model.Node{Name: r.Name, Address: r.Address, Locator: netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfc, 6: 0xf0 + byte(i)}), 56)}
		for _, k := range m.Lab.Links {
			for _, end := range [][2]string{{k.A, k.B}, {k.B, k.A}} {
				if end[0] == r.Name {
					n.Interfaces = append(n.Interfaces, model.Interface{Name: end[0] + "-" + end[1], Role: model.RoleCore, MTU: m.Lab.MTU})
				}
			}
		}
		m.Domain.Nodes = append(m.Domain.Nodes, n)
	}
	m.Lab.Routers = nil
}

// throughNodes is overLabels in a lab whose traffic passes its routers.
func throughNodes(m *manifest.Manifest) {
	routersPassLabels(m)
	overLabels(m)
}

// labelledText is the text of a domain file with all chains over labels, as overLabels makes them.
func labelledText(t *testing.T, text string) string {
	t.Helper()
	nodes, chains := 0, 0
	var out []string
	for line := range strings.SplitSeq(text, "\n") {
		address, isNode := strings.CutPrefix(line, "    address: ")
		switch {
		case strings.HasPrefix(line, "  block: "):
			line += "\n  mpls: {services: 100000, mtu: 1700}"
		case isNode:
			nodes++
			line += fmt.Sprintf("\n    mpls: {label: %d, address: %q}", 16000+nodes, strings.Fields(address)[0])
		case strings.HasPrefix(line, "    proof: "):
			chains++
			line = "    encapsulation: {type: sr-mpls}\n" + line
		case strings.Contains(line, ", proof: {"):
			chains++
			line = strings.Replace(line, ", proof: {", ", encapsulation: {type: sr-mpls}, proof: {", 1)
		}
		out = append(out, line)
	}
	if nodes < 2 || chains == 0 {
		t.Fatalf("the domain has %d nodes and %d chains that could go over labels", nodes, chains)
	}
	return strings.Join(out, "\n")
}

// bothTexts runs a test with domain files over SRv6, and over labels.
func bothTexts(t *testing.T, f func(t *testing.T, carried func(text string) string)) {
	for _, e := range []struct {
		name string
		is   func(t *testing.T, text string) string
	}{{"srv6", func(_ *testing.T, text string) string { return text }}, {"sr-mpls", labelledText}} {
		if e.name == "sr-mpls" && !overAll() {
			continue
		}
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			f(t, func(text string) string { return e.is(t, text) })
		})
	}
}

// labelled: the first chain goes over labels, so that all super-packets are cut at its headend.
func (w *world) labelled() bool {
	return w.manifest.Domain.Chains[0].Encapsulation.Type == model.EncapsulationSRMPLS
}

// overSRv6 leaves a domain as its file says.
func overSRv6(*manifest.Manifest) {}

// bothEncapsulations runs a test over SRv6, and over labels; carried makes a domain's chains go so.
func bothEncapsulations(t *testing.T, f func(t *testing.T, carried change)) {
	encapsulations(t, f, overLabels)
}

// andOverIPv4 is bothEncapsulations with a core that has no IPv6 under the labels.
func andOverIPv4(t *testing.T, f func(t *testing.T, carried change)) { encapsulations(t, f, overIPv4) }

// alsoOverLabels is bothEncapsulations where WAYSTAMP_ENCAPSULATIONS is all. Else it runs a test over SRv6 alone: with a second lab for
// each of these tests, make test takes too long.
func alsoOverLabels(t *testing.T, f func(t *testing.T, carried change)) {
	if overAll() {
		bothEncapsulations(t, f)
		return
	}
	f(t, overSRv6)
}

func overAll() bool { return os.Getenv("WAYSTAMP_ENCAPSULATIONS") == "all" }

func encapsulations(t *testing.T, f func(t *testing.T, carried change), labels change) {
	for _, e := range []struct {
		name string
		is   change
	}{{"srv6", overSRv6}, {"sr-mpls", labels}} {
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			f(t, e.is)
		})
	}
}

// datapath gives all interfaces one.
func datapath(d model.Datapath) change {
	return func(m *manifest.Manifest) {
		for i := range m.Domain.Nodes {
			for j := range m.Domain.Nodes[i].Interfaces {
				m.Domain.Nodes[i].Interfaces[j].Datapath = d
			}
		}
	}
}

// bothSchemes runs a test for the schemes whose programs differ.
func bothSchemes(t *testing.T, f func(t *testing.T, s model.Scheme)) {
	withSchemes(t, f, model.SchemeKeyed, model.SchemeOPoT)
}

// boundToo runs a test for the same and for keyed-flow, whose stamps depend on
// the inner packet.
func boundToo(t *testing.T, f func(t *testing.T, s model.Scheme)) {
	withSchemes(t, f, model.SchemeKeyed, model.SchemeOPoT, model.SchemeKeyedFlow)
}

func withSchemes(t *testing.T, f func(t *testing.T, s model.Scheme), schemes ...model.Scheme) {
	for _, s := range schemes {
		t.Run(s.String(), func(t *testing.T) {
			t.Parallel()
			f(t, s)
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// soon is a context for what should not take long.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), patience, fmt.Errorf("this takes longer than %s", patience))
	stop := context.AfterFunc(interrupted, cancel)
	t.Cleanup(func() {
		stop()
		cancel()
	})
	return ctx
}

// eventually waits until f is content, and fails with its last words.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	within(t, settleTime, f)
}

func within(t *testing.T, limit time.Duration, f func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %v", limit, err)
		}
		pause(t, pollEvery)
	}
}

// pause is for polling.
func pause(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-interrupted.Done():
		t.Fatal(context.Cause(interrupted))
	}
}

// parse reads a domain file.
func parse(t *testing.T, text string, changes ...change) manifest.Manifest {
	t.Helper()
	m, err := manifest.Parse(t.Name(), []byte(text))
	must(t, err)
	for _, c := range changes {
		c(&m)
	}
	return m
}

func newPrefix() string { return "e2e-" + strings.ToLower(rand.Text()[:8]) }

// newDir is a temporary directory with a short name, since paths of sockets
// are bounded.
func newDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ws-e2e-")
	must(t, err)
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// atRest are the labs that no test has, the newest last, with what they were made of.
// Making one takes the verifier most of a second for each node, which is half of what
// these tests take.
var atRest struct {
	mu   sync.Mutex
	labs []rested
}

type rested struct {
	of string
	w  *world
}

// restedMost is how many labs are kept for other tests; their agents are at work.
const restedMost = 6

// borrow is build for tests that leave the lab as it was, its hosts and links too. One
// that others have used before is as good, and the next test gets it, unless this one
// fails. A test has it for itself meanwhile.
func borrow(t *testing.T, text string, changes ...change) *world {
	t.Helper()
	m := parse(t, text, changes...)
	of := fmt.Sprintf("%#v %#v", m.Domain, *m.Lab)
	w := takeRested(of)
	if w == nil {
		dir, err := os.MkdirTemp("", "ws-e2e-")
		must(t, err)
		if w, err = up(t, m, lab.Config{RunDir: dir}); err != nil {
			t.Fatal(errors.Join(err, os.RemoveAll(dir)))
		}
	}
	t.Cleanup(func() {
		if !t.Failed() {
			w.in(t).checkRefusals()
		}
		var gone []*world
		if t.Failed() {
			w.in(t).tellAll()
			gone = append(gone, w)
		} else {
			gone = rest(of, w)
		}
		for _, w := range gone {
			if err := w.takeAway(); err != nil {
				t.Error(err)
			}
		}
	})
	return w.in(t)
}

func takeRested(of string) *world {
	atRest.mu.Lock()
	defer atRest.mu.Unlock()
	i := slices.IndexFunc(atRest.labs, func(r rested) bool { return r.of == of })
	if i < 0 {
		return nil
	}
	w := atRest.labs[i].w
	atRest.labs = slices.Delete(atRest.labs, i, i+1)
	return w
}

// rest keeps a lab for the next test, and gives those that are too many.
func rest(of string, w *world) (gone []*world) {
	atRest.mu.Lock()
	defer atRest.mu.Unlock()
	atRest.labs = append(atRest.labs, rested{of, w})
	for len(atRest.labs) > restedMost {
		gone = append(gone, atRest.labs[0].w)
		atRest.labs = slices.Delete(atRest.labs, 0, 1)
	}
	return gone
}

// takeAwayRested takes all labs away that tests have left.
func takeAwayRested() error {
	atRest.mu.Lock()
	defer atRest.mu.Unlock()
	var errs []error
	for _, r := range atRest.labs {
		errs = append(errs, r.w.takeAway())
	}
	atRest.labs = nil
	return errors.Join(errs...)
}

// takeAway takes a borrowed lab down, with its directory.
func (w *world) takeAway() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return errors.Join(w.Down(ctx), left(w.runDir, w.Prefix()), os.RemoveAll(w.runDir))
}

// build makes a lab of a domain file, with agents, and checks when the test ends
// that no other packet was refused than those that the test expected, and
// that nothing of the lab is left.
func build(t *testing.T, text string, changes ...change) *world {
	t.Helper()
	return buildFrom(t, parse(t, text, changes...))
}

func buildFrom(t *testing.T, m manifest.Manifest, options ...func(*lab.Config)) *world {
	t.Helper()
	c := lab.Config{Prefix: newPrefix(), RunDir: newDir(t)}
	for _, o := range options {
		o(&c)
	}
	// Also what a lab leaves that never came up.
	t.Cleanup(func() { leavesNothing(t, c.RunDir, c.Prefix) })
	w, err := up(t, m, c)
	must(t, err)
	t.Cleanup(w.close)
	return w
}

// up makes a lab with what c says beside the domain.
func up(t *testing.T, m manifest.Manifest, c lab.Config) (w *world, err error) {
	t.Helper()
	if interrupted.Err() != nil {
		return nil, context.Cause(interrupted)
	}
	w = &world{t: t, manifest: m, runDir: c.RunDir, silent: c.WithoutAgents, ledger: &ledger{expected: map[refusal]uint64{}, late: map[refusal]bool{}}}
	if w.plan, err = plan.Compile(m.Domain, nil); err != nil {
		return nil, err
	}
	if c.Prefix == "" {
		c.Prefix = newPrefix()
	}
	c.Domain, c.Lab, c.Plan = m.Domain, *m.Lab, w.plan
	if c.Binary == "" {
		c.Binary = program
	}
	w.Lab, err = lab.Up(soon(t), c)
	return w, err
}

func (w *world) close() {
	if _, err := os.Stat(w.Dir()); errors.Is(err, fs.ErrNotExist) {
		return // taken down by the test
	}
	switch {
	case w.t.Failed():
		w.tellAll()
	case !w.silent:
		w.checkRefusals()
	}
	// Not a context of the test's, which has ended.
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := w.Down(ctx); err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.t.Error(err)
	}
}

// tellAll shows what the nodes know of a test that failed.
func (w *world) tellAll() {
	for _, n := range w.nodes() {
		if c, err := w.counters(n); err == nil {
			for _, r := range c.Refusals {
				w.t.Logf("%s: %d dropped, %d reported: %s", n, r.Dropped, r.Reported, r.Reason)
			}
			for _, p := range c.Paths {
				if p.Packets == 0 {
					continue
				}
				w.t.Logf("%s: %s %s, %s of %v: %d packets, %d frames", n, p.Chain, p.Direction, p.Role, p.SID, p.Packets, p.Frames)
			}
		}
		if b, err := os.ReadFile(filepath.Join(w.Dir(), "logs", n+".log")); err == nil {
			w.t.Logf("the agent of %s says:\n%s", n, b)
		}
	}
	w.tellDrops()
}

// tellDrops shows which interfaces have dropped packets, and the kernel's IPv6, which no node counts.
func (w *world) tellDrops() {
	for _, m := range w.Members() {
		ns, err := w.NetNS(m.Name)
		if err != nil {
			w.t.Logf("interfaces of %s: %v", m.Name, err)
			continue
		}
		err = ns.Do(func() error {
			links, err := netlink.LinkList()
			for _, l := range links {
				if s := l.Attrs().Statistics; s != nil && s.RxDropped+s.TxDropped+s.RxErrors+s.TxErrors > 0 {
					w.t.Logf("%s of %s: of %d packets in %d were dropped, and of %d out %d; %d and %d errors",
						l.Attrs().Name, m.Name, s.RxPackets, s.RxDropped, s.TxPackets, s.TxDropped, s.RxErrors, s.TxErrors)
				}
			}
			text, ferr := os.ReadFile("/proc/thread-self/net/snmp6")
			for line := range strings.Lines(string(text)) {
				f := strings.Fields(line)
				if len(f) == 2 && f[1] != "0" && stackDrops.MatchString(f[0]) {
					w.t.Logf("%s: %s is %s", m.Name, f[0], f[1])
				}
			}
			return errors.Join(err, ferr)
		})
		if err = errors.Join(err, ns.Close()); err != nil {
			w.t.Logf("interfaces of %s: %v", m.Name, err)
		}
	}
}

// stackDrops are the kernel's counters of packets that its IPv6 did not pass on.
var stackDrops = regexp.MustCompile(`^Ip6(In(HdrErrors|TooBigErrors|NoRoutes|AddrErrors|UnknownProtos|TruncatedPkts|Discards)|Out(Discards|NoRoutes))$`)

// pins are the directories below the pin directory that start with a prefix.
func pins(t *testing.T, prefix string) []string {
	t.Helper()
	return entries(t, dataplane.DefaultPinDir, prefix)
}

func entries(t *testing.T, dir, prefix string) []string {
	t.Helper()
	out, err := entriesOf(dir, prefix)
	if err != nil {
		t.Error(err)
	}
	return out
}

func entriesOf(dir, prefix string) (out []string, err error) {
	all, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	for _, e := range all {
		if strings.HasPrefix(e.Name(), prefix) {
			out = append(out, e.Name())
		}
	}
	return out, err
}

// processes are those one of whose arguments starts with a prefix, as agents'
// instances do.
func processes(t *testing.T, prefix string) []string {
	t.Helper()
	out, err := processesOf(prefix)
	must(t, err)
	return out
}

func processesOf(prefix string) (out []string, err error) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // has ended
		}
		args := strings.Split(string(b), "\x00")
		if slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, prefix) }) {
			out = append(out, filepath.Base(filepath.Dir(f))+" "+strings.Join(args, " "))
		}
	}
	return out, err
}

// leavesNothing checks that of a lab no namespace, pin, process and record is
// there.
func leavesNothing(t *testing.T, runDir, prefix string) {
	t.Helper()
	if err := left(runDir, prefix); err != nil {
		t.Error(err)
	}
}

func left(runDir, prefix string) error {
	named, err1 := entriesOf(host.NamespaceDir, prefix+"-")
	functions, err2 := entriesOf(host.NamespaceDir, "waystamp-"+prefix+"-")
	pinned, err3 := entriesOf(dataplane.DefaultPinDir, prefix+"-")
	running, err4 := processesOf(prefix + "-")
	records, err5 := entriesOf(runDir, prefix)
	errs := []error{err1, err2, err3, err4, err5}
	for what, left := range map[string][]string{
		"namespaces": append(named, functions...), "pins": pinned, "processes": running, "records": records,
	} {
		if len(left) > 0 {
			errs = append(errs, fmt.Errorf("left of lab %s: %s %q", prefix, what, left))
		}
	}
	return errors.Join(errs...)
}

// nodes are the names of the domain's nodes.
func (w *world) nodes() []string {
	var names []string
	for _, n := range w.plan.Nodes {
		names = append(names, n.Name)
	}
	return names
}

// path is a chain in one direction, with everybody's secrets.
func (w *world) path(chain string, d model.Direction) plan.Path {
	w.t.Helper()
	for _, p := range w.plan.Paths {
		if p.Chain == chain && p.Direction == d {
			return p
		}
	}
	w.t.Fatalf("there is no chain %s in direction %s", chain, d)
	panic("unreachable")
}

func (w *world) ns(name string) *host.NetNS {
	w.t.Helper()
	ns, err := w.NetNS(name)
	must(w.t, err)
	w.t.Cleanup(func() { ns.Close() })
	return ns
}

func (w *world) net(name string) *host.Net {
	w.t.Helper()
	n, err := w.Net(name)
	must(w.t, err)
	w.t.Cleanup(func() { n.Close() })
	return n
}

// addr is the address of a host.
func (w *world) addr(name string) netip.Addr {
	w.t.Helper()
	for _, h := range w.manifest.Lab.Hosts {
		if h.Name == name && w.ipv4 {
			return lab.HostAddress4(h)
		}
		if h.Name == name {
			return lab.HostAddress(h)
		}
	}
	w.t.Fatalf("there is no host %s", name)
	panic("unreachable")
}

func (w *world) client(node string) *agent.Client {
	return agent.NewClient(agent.SocketPath(w.AgentDir(node)))
}

func (w *world) counters(node string) (api.Counters, error) {
	c := w.client(node)
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), settleTime)
	defer cancel()
	return c.Counters(ctx)
}

func (w *world) status(node string) api.Status {
	w.t.Helper()
	c := w.client(node)
	defer c.Close()
	s, err := c.Status(soon(w.t))
	must(w.t, err)
	return s
}

// ping sends echo requests from one host to another and returns how many were
// answered.
func (w *world) ping(from, to string, c lab.PingConfig) int {
	w.t.Helper()
	r, err := lab.Ping(soon(w.t), w.ns(from), w.addr(to), c)
	must(w.t, err)
	return r.Received
}

// reaches checks that all of some echo requests are answered.
func (w *world) reaches(from, to string) {
	w.t.Helper()
	const n = 5
	if got := w.ping(from, to, lab.PingConfig{Count: n, Timeout: settleTime}); got != n {
		w.t.Fatalf("%d of %d echo requests from %s to %s were answered, want all", got, n, from, to)
	}
}

// isCutOff checks that none of n echo requests is answered.
func (w *world) isCutOff(from, to string, n int) {
	w.t.Helper()
	if got := w.ping(from, to, lab.PingConfig{Count: n, Timeout: lostTime}); got != 0 {
		w.t.Fatalf("%d of %d echo requests from %s to %s were answered, want none", got, n, from, to)
	}
}

// download moves bytes by HTTP from one host to another, and checks them.
func (w *world) download(from, to string, bytes int64) lab.Transfer {
	w.t.Helper()
	content := lab.Content{Seed: 7, Size: bytes}
	server, err := lab.Serve(w.ns(from), netip.AddrPortFrom(w.addr(from), 0), content)
	must(w.t, err)
	defer server.Close()
	r, err := lab.Download(soon(w.t), w.ns(to), server.Addr(), content)
	must(w.t, err)
	must(w.t, server.Close())
	w.closed(to, from, int(server.Addr().Port()))
	return r
}

// frames are what the hops of a path have counted, by position.
func (w *world) frames(p plan.Path) ([]api.Path, error) {
	out := make([]api.Path, len(p.Hops))
	for i, h := range p.Hops {
		role := api.RoleEndpoint
		nodes := []string{h.Node}
		switch i {
		case 0:
			role = api.RoleHeadend
			nodes = nil
			for _, in := range p.Ingress {
				nodes = append(nodes, in.Node)
			}
		case len(p.Hops) - 1:
			role = api.RoleEgress
		}
		found := false
		for _, n := range nodes {
			c, err := w.counters(n)
			if err != nil {
				return nil, err
			}
			for _, pc := range c.Paths {
				if pc.Path == p.Path && pc.Role == role && (pc.SID == nil || *pc.SID == h.SID) {
					packets, frames, bytes := out[i].Packets, out[i].Frames, out[i].Bytes
					out[i] = pc
					out[i].Packets += packets
					out[i].Frames += frames
					out[i].Bytes += bytes
					found = true
				}
			}
		}
		if !found {
			return nil, fmt.Errorf("%v count nothing at position %d of %s %s", nodes, i, p.Chain, p.Direction)
		}
	}
	return out, nil
}

// flow is what has passed a path between two moments, by position.
type flow []api.Path

func (f flow) frames() uint64 { return f[0].Frames }

// counting notes what the hops of a path have counted; the function that it
// returns waits until each of them has counted as many frames since then as the
// headend, and gives what they have counted.
func (w *world) counting(p plan.Path) func() flow {
	w.t.Helper()
	before, err := w.frames(p)
	must(w.t, err)
	droppedBefore := w.droppedBy(p.Hops[0].Node)
	// Some of them have counted a packet that is under way. Where traffic does not pause, the last
	// reading counts.
	for range 20 {
		now, err := w.frames(p)
		must(w.t, err)
		if slices.EqualFunc(now, before, func(a, b api.Path) bool { return a.Frames == b.Frames }) {
			break
		}
		before = now
	}
	return func() (f flow) {
		w.t.Helper()
		eventually(w.t, func() error {
			now, err := w.frames(p)
			if err != nil {
				return err
			}
			f = now
			for i := range f {
				f[i].Packets -= before[i].Packets
				f[i].Frames -= before[i].Frames
				f[i].Bytes -= before[i].Bytes
			}
			for i := range f {
				if f[i].Frames != f[0].Frames && f[i].Frames+w.droppedBy(p.Hops[0].Node)-droppedBefore != f[0].Frames {
					return fmt.Errorf("%s %s: %s at position %d has counted %d frames, the headend %d",
						p.Chain, p.Direction, p.Hops[i].Node, i, f[i].Frames, f[0].Frames)
				}
			}
			return nil
		})
		return f
	}
}

// refusal is a counter of refused packets.
type refusal struct {
	Node, Reason string
	Reported     bool
}

// refusals are all counters of all nodes.
func (w *world) refusals() (map[refusal]uint64, error) {
	out := map[refusal]uint64{}
	for _, n := range w.nodes() {
		c, err := w.counters(n)
		if err != nil {
			return nil, err
		}
		for _, r := range c.Refusals {
			if r.Dropped > 0 {
				out[refusal{n, r.Reason, false}] = r.Dropped
			}
			if r.Reported > 0 {
				out[refusal{n, r.Reason, true}] = r.Reported
			}
		}
	}
	return out, nil
}

// refused waits until n more packets were refused at a node for a reason, and
// nothing else anywhere.
func (w *world) refused(node, reason string, n uint64) {
	w.t.Helper()
	w.expect(refusal{Node: node, Reason: reason}, n)
}

// reported is refused for packets that were let go on.
func (w *world) reported(node, reason string, n uint64) {
	w.t.Helper()
	w.expect(refusal{Node: node, Reason: reason, Reported: true}, n)
}

func (w *world) expect(r refusal, n uint64) {
	w.t.Helper()
	w.mu.Lock()
	w.expected[r] += n
	want := maps.Clone(w.expected)
	w.mu.Unlock()
	eventually(w.t, func() error {
		got, err := w.refusals()
		if err != nil {
			return err
		}
		if d := cmp.Diff(want, got); d != "" {
			return fmt.Errorf("refused packets (-want +got):\n%s", d)
		}
		return nil
	})
}

// checkRefusals checks that no counter has moved but those that were expected
// to.
func (w *world) checkRefusals() {
	w.t.Helper()
	got, err := w.refusals()
	if err != nil {
		w.t.Error(err)
		return
	}
	for r := range w.late {
		if got[r] > w.expected[r] {
			w.expected[r] = got[r]
		}
	}
	if d := cmp.Diff(w.expected, got); d != "" {
		w.t.Errorf("refused packets at the end (-want +got):\n%s", d)
	}
}

// event waits for an event of a node with a reason.
func (w *world) event(since time.Time, node, reason string) (found event.Event) {
	w.t.Helper()
	ctx, cancel := context.WithTimeoutCause(soon(w.t), settleTime, fmt.Errorf("%s sent no event with the reason %s", node, reason))
	defer cancel()
	c := w.client(node)
	defer c.Close()
	err := c.Events(ctx, true, func(e event.Event) error {
		if e.Reason != reason || e.Time.Before(since) {
			return nil
		}
		found = e
		return errFound
	})
	if !errors.Is(err, errFound) {
		w.t.Fatalf("events of %s: %v", node, err)
	}
	return found
}

var errFound = errors.New("found")

// events are those that a node remembers.
func (w *world) events(node string) (out []event.Event) {
	w.t.Helper()
	c := w.client(node)
	defer c.Close()
	must(w.t, c.Events(soon(w.t), false, func(e event.Event) error {
		out = append(out, e)
		return nil
	}))
	return out
}

// explained checks what an event's explanation says. A * in want stands for
// anything.
func (w *world) explained(e event.Event, want string) {
	w.t.Helper()
	got := w.sentence(e)
	rest, ok := got, true
	for i, part := range strings.Split(want, "*") {
		at := strings.Index(rest, part)
		if at < 0 || i == 0 && at > 0 {
			ok = false
			break
		}
		rest = rest[at+len(part):]
	}
	if !ok || rest != "" {
		w.t.Errorf("explanation of %s at %s:\ngot  %s\nwant %s", e.Reason, e.Node, got, want)
	}
}

func (w *world) sentence(e event.Event) string {
	return explain.Explain(e, w.plan.Paths, nil).Sentence
}

// follow writes a node's plan and waits until its agent has it in force.
func (w *world) follow(n plan.Node) {
	w.t.Helper()
	must(w.t, w.WriteNodePlan(n.Name, n))
	b, err := os.ReadFile(w.NodePlanPath(n.Name))
	must(w.t, err)
	digest := fmt.Sprintf("%x", sha256.Sum256(b))
	eventually(w.t, func() error {
		if s := w.status(n.Name); s.Plan != digest || s.Error != "" {
			return fmt.Errorf("%s has plan %.8s in force, want %.8s; error %q", n.Name, s.Plan, digest, s.Error)
		}
		return nil
	})
}
