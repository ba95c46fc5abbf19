// Package attack mounts every attack that waystamp knows of on a lab, with real packets: an
// attacker controls the router that connects all links of the domain, and a program there
// captures packets of real traffic by raw sockets and sends altered ones, or others. Each attack
// has an outcome that must be seen for each scheme: refused for one reason at one node, with
// that explanation, or not detected, as SECURITY.md says. No other packet may be refused.
//
// `waystamp lab attack` and test/attack call it. An attack uses only the knowledge of an outside
// attacker, unless an insider mounts it.
package attack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// Time limits on a busy machine. A run without errors waits for none of them.
var (
	verdictTime = await.Limit(20 * time.Second) // for a packet to arrive, or be refused
	followTime  = await.Limit(30 * time.Second) // for an agent to follow its plan
)

const pollEvery = 2 * time.Millisecond

// The ports of the listeners behind the egress. Chain c takes packets to rulePort, chain d
// packets to filterPort, chains e and f packets to labelPort, chains g and h connections to
// streamPort. Chain i takes packets to h4, chain j packets to labelFilterPort. Chain k takes
// packets of r1 itself to a port of the scheme's own.
const (
	servicePort = 4242
	otherPort   = 4243
	rulePort    = 4244
	filterPort  = 4245
	labelPort   = 4246
	streamPort  = 4247

	labelFilterPort = 4248
)

// ownPorts are those of chains k.
var ownPorts = map[model.Scheme]uint16{model.SchemePoT: 4249, model.SchemeOPoT: 4250, model.SchemeKeyed: 4251, model.SchemeKeyedFlow: 4252}

// Config selects the attacks, and their place.
type Config struct {
	Schemes []model.Scheme // in this order; nil: all
	Only    []string       // names of attacks; nil: all
	Prefix  string         // of namespaces and pins; "": a random one
	RunDir  string         // of labs; "": lab.DefaultRunDir
	Binary  string         // as of lab.Config
	// Up is called when the lab is up, and Done after each attack; nil: not.
	Up   func(prefix string, took time.Duration)
	Done func(Result)
	Log  *slog.Logger
}

// Result is one attack on one scheme.
type Result struct {
	Attack   string `json:"attack"`
	Scheme   string `json:"scheme"`
	Expected string `json:"expected"` // "refused: REASON" or "not detected"
	Observed string `json:"observed"`
	OK       bool   `json:"ok"` // as expected, explained, and no other packet refused
	// Explained is the sentence of the refusal's explanation.
	Explained string `json:"explained,omitempty"`
	Problem   string `json:"problem,omitempty"` // if not OK
}

// NotDetected is the outcome of an attack whose packet is delivered.
const NotDetected = "not detected"

// outcome is the result for an attack's packet.
type outcome struct {
	node, reason string // reason "": it is delivered
	says         string // part of the explanation
}

func delivered() outcome { return outcome{} }

func refused(node, reason, says string) outcome { return outcome{node, reason, says} }

func (o outcome) String() string {
	if o.reason == "" {
		return NotDetected
	}
	return "refused: " + o.reason
}

// Attacks returns the names and descriptions of all attacks, in the order in which they are
// mounted.
func Attacks() []Attack {
	var list []Attack
	for _, a := range attacks() {
		list = append(list, a.Attack)
	}
	return list
}

// Attack describes an attack.
type Attack struct {
	Name  string `json:"name"`
	What  string `json:"what"` // in a sentence
	Where string `json:"by"`   // the attacker
}

// Table returns the outcomes of all attacks as a table of Markdown: a row for each attack and a
// column for each scheme.
func Table(results []Result) string {
	var schemes []string
	outcomes := map[string]map[string]string{}
	for _, r := range results {
		if !slices.Contains(schemes, r.Scheme) {
			schemes = append(schemes, r.Scheme)
		}
		if outcomes[r.Attack] == nil {
			outcomes[r.Attack] = map[string]string{}
		}
		cell := "**" + r.Observed + "**"
		if reason, ok := strings.CutPrefix(r.Observed, "refused: "); ok {
			cell = "`" + reason + "`"
		}
		outcomes[r.Attack][r.Scheme] = cell
	}
	var b strings.Builder
	fmt.Fprintf(&b, "| attack | what | mounted by |")
	for _, s := range schemes {
		fmt.Fprintf(&b, " %s |", s)
	}
	fmt.Fprintf(&b, "\n|---|---|---|%s\n", strings.Repeat("---|", len(schemes)))
	for _, a := range Attacks() {
		if outcomes[a.Name] == nil {
			continue
		}
		fmt.Fprintf(&b, "| %s | %s | %s |", a.Name, a.What, a.Where)
		for _, s := range schemes {
			fmt.Fprintf(&b, " %s |", outcomes[a.Name][s])
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// Run mounts attacks. The error is not nil if something could not be mounted or
// looked at; whether all went as expected is in the results.
func Run(ctx context.Context, c Config) (results []Result, err error) {
	if c.Schemes == nil {
		c.Schemes = []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow}
	}
	chosen := attacks()
	for _, name := range c.Only {
		if !slices.ContainsFunc(chosen, func(a attack) bool { return a.Name == name }) {
			return nil, fmt.Errorf("there is no attack %q", name)
		}
	}
	if len(c.Only) > 0 {
		chosen = slices.DeleteFunc(chosen, func(a attack) bool { return !slices.Contains(c.Only, a.Name) })
	}
	s, err := open(ctx, c)
	if err != nil {
		return nil, err
	}
	defer func() {
		down, cancel := context.WithTimeout(context.WithoutCancel(ctx), await.Limit(time.Minute))
		defer cancel()
		err = errors.Join(err, s.close(down))
	}()
	for _, scheme := range c.Schemes {
		for _, a := range chosen {
			r, err := s.mount(ctx, a, scheme)
			if err != nil {
				return results, fmt.Errorf("%s, %s: %w", a.Name, scheme, err)
			}
			results = append(results, r)
			if c.Done != nil {
				c.Done(r)
			}
		}
	}
	return results, nil
}

// stage is the lab with all that watches it.
type stage struct {
	lab      *lab.Lab
	manifest manifest.Manifest
	plan     *plan.Domain
	paths    []plan.Path // with paths of earlier epochs
	router   *lab.Router
	closers  []func() error
	cancel   context.CancelFunc
	wait     sync.WaitGroup

	senders     map[model.Scheme]*net.UDPConn
	connections map[string]*net.TCPConn // by scheme and host
	count       int                     // of tags
	linked      bool                    // x has a link to r6
	finished    bool                    // packets from the worker leave with their checksums
	ledger      map[refusal]uint64

	mu   sync.Mutex
	seen []sighting
	news chan struct{} // closed when seen grows
	bad  error         // a watcher failed
}

// refusal is a counter of refused packets.
type refusal struct{ node, reason string }

// sighting is the end of a packet: at a host, or at a node that refused it.
type sighting struct {
	host  string // "": refused
	event event.Event
	data  []byte // of the datagram, or of the packet
}

// open builds the lab and watches it.
func open(ctx context.Context, c Config) (_ *stage, err error) {
	s := &stage{ledger: map[refusal]uint64{}, news: make(chan struct{}), senders: map[model.Scheme]*net.UDPConn{}, connections: map[string]*net.TCPConn{}}
	if s.manifest, err = manifest.Parse(examples.AttacksName, examples.Attacks); err != nil {
		return nil, err
	}
	if s.plan, err = plan.Compile(s.manifest.Domain, nil); err != nil {
		return nil, err
	}
	s.paths = slices.Clone(s.plan.Paths)
	start := time.Now()
	s.lab, err = lab.Up(ctx, lab.Config{
		Domain: s.manifest.Domain, Lab: *s.manifest.Lab, Plan: s.plan,
		Prefix: c.Prefix, RunDir: c.RunDir, Binary: c.Binary, Own: true, Log: c.Log,
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			down, cancel := context.WithTimeout(context.WithoutCancel(ctx), await.Limit(time.Minute))
			defer cancel()
			err = errors.Join(err, s.close(down))
		}
	}()
	if c.Up != nil {
		c.Up(s.lab.Prefix(), time.Since(start))
	}
	watching, cancel := context.WithCancel(ctx)
	s.cancel = cancel
	for _, n := range s.plan.Nodes {
		s.wait.Go(func() { s.follow(watching, n.Name) })
	}
	for _, h := range []string{"h2", "h3", "h4"} {
		for _, port := range []uint16{servicePort, otherPort, rulePort, filterPort, labelPort, labelFilterPort} {
			if err := s.serve(h, port); err != nil {
				return nil, err
			}
		}
		if err := s.serveConnections(watching, h); err != nil {
			return nil, err
		}
	}
	for _, scheme := range c.Schemes {
		if err := s.serve("h2", ownPorts[scheme]); err != nil {
			return nil, err
		}
		if err := s.client(scheme); err != nil {
			return nil, err
		}
	}
	// Own packets of r1 leave with their checksums, for the same reason as those of client.
	if err := s.withChecksums("r1", "r1-m"); err != nil {
		return nil, err
	}
	s.router, err = s.lab.TakeOver("m", s.manifest.Domain, *s.manifest.Lab)
	return s, err
}

func (s *stage) close(ctx context.Context) (err error) {
	if s.router != nil {
		s.router.Close()
	}
	if s.cancel != nil {
		s.cancel()
	}
	for _, f := range s.closers {
		err = errors.Join(err, f())
	}
	s.wait.Wait()
	return errors.Join(err, s.lab.Down(ctx))
}

// follow watches the refusals of a node.
func (s *stage) follow(ctx context.Context, node string) {
	c := agent.NewClient(agent.SocketPath(s.lab.AgentDir(node)))
	defer c.Close()
	err := c.Events(ctx, true, func(e event.Event) error {
		s.saw(sighting{event: e, data: e.Packet})
		return nil
	})
	if ctx.Err() == nil {
		s.broken(fmt.Errorf("events of %s: %w", node, err))
	}
}

// serve takes datagrams at a host.
func (s *stage) serve(name string, port uint16) error {
	conn, err := s.socket(name, port)
	if err != nil {
		return err
	}
	s.wait.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			n, _, err := conn.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				s.broken(fmt.Errorf("receive at %s: %w", name, err))
				return
			}
			s.saw(sighting{host: name, data: bytes.Clone(buf[:n])})
		}
	})
	return nil
}

// client opens the socket by which a scheme's host sends. The host computes the checksums of its
// packets, not the device: otherwise an attacker on the first link would capture packets with
// wrong checksums.
func (s *stage) client(scheme model.Scheme) error {
	name := scheme.String()
	if err := s.withChecksums(name, name+"-r1"); err != nil {
		return err
	}
	var err error
	s.senders[scheme], err = s.socket(name, servicePort)
	return err
}

// withChecksums has the kernel of a member compute the checksums of what it sends by a device.
func (s *stage) withChecksums(member, device string) error {
	n, err := s.lab.Net(member)
	if err != nil {
		return err
	}
	defer n.Close()
	return n.SetOffload(device, host.TransmitSum, false)
}

func (s *stage) socket(name string, port uint16) (conn *net.UDPConn, err error) {
	err = s.lab.Do(name, func() error {
		var err error
		conn, err = net.ListenUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.address(name), port)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open a socket at %s: %w", name, err)
	}
	s.closers = append(s.closers, conn.Close)
	return conn, nil
}

func (s *stage) service(host string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(s.address(host), port)
}

// address is that of a host.
func (s *stage) address(name string) netip.Addr {
	for _, h := range s.manifest.Lab.Hosts {
		if h.Name == name {
			return lab.HostAddress(h)
		}
	}
	panic("the lab has no host " + name)
}

func (s *stage) saw(x sighting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, x)
	close(s.news)
	s.news = make(chan struct{})
}

func (s *stage) broken(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bad = errors.Join(s.bad, err)
	close(s.news)
	s.news = make(chan struct{})
}

// await waits for the n-th end of a packet with a tag, counted from 1.
func (s *stage) await(ctx context.Context, tag string, n int) (sighting, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, verdictTime, fmt.Errorf("a packet neither arrived nor was reported as refused within %s", verdictTime))
	defer cancel()
	for {
		s.mu.Lock()
		found, news, bad := s.with(tag), s.news, s.bad
		s.mu.Unlock()
		switch {
		case len(found) >= n:
			return found[n-1], nil
		case bad != nil:
			return sighting{}, bad
		}
		select {
		case <-news:
		case <-ctx.Done():
			return sighting{}, context.Cause(ctx)
		}
	}
}

// with are all sightings with a tag so far; s.mu is held.
func (s *stage) with(tag string) (found []sighting) {
	for _, x := range s.seen {
		if bytes.Contains(x.data, []byte(tag)) {
			found = append(found, x)
		}
	}
	return found
}

// refusals are all counters of all nodes.
func (s *stage) refusals(ctx context.Context) (map[refusal]uint64, error) {
	out := map[refusal]uint64{}
	for _, n := range s.plan.Nodes {
		c := agent.NewClient(agent.SocketPath(s.lab.AgentDir(n.Name)))
		counts, err := c.Counters(ctx)
		c.Close()
		if err != nil {
			return nil, err
		}
		for _, r := range counts.Refusals {
			if r.Dropped+r.Reported > 0 {
				out[refusal{n.Name, r.Reason}] = r.Dropped + r.Reported
			}
		}
	}
	return out, nil
}

// balance describes the difference between the counters and the expected refusals so far. A
// packet is counted before its event is sent, so there is nothing to wait for.
func (s *stage) balance(ctx context.Context) (problem string, err error) {
	got, err := s.refusals(ctx)
	if err != nil {
		return "", err
	}
	var differ []string
	for _, k := range slices.SortedFunc(maps.Keys(got), func(a, b refusal) int { return strings.Compare(a.node+a.reason, b.node+b.reason) }) {
		if got[k] != s.ledger[k] {
			differ = append(differ, fmt.Sprintf("%s refused %d packets as %s, want %d", k.node, got[k], k.reason, s.ledger[k]))
		}
	}
	for k, n := range s.ledger {
		if _, ok := got[k]; !ok {
			differ = append(differ, fmt.Sprintf("%s refused no packet as %s, want %d", k.node, k.reason, n))
		}
	}
	s.ledger = got // report one mistake once
	return strings.Join(differ, "; "), nil
}

// explained is the explanation of an event with all secrets.
func (s *stage) explained(e event.Event) string { return explain.Explain(e, s.paths, nil).Sentence }

// mount mounts one attack and records its outcome.
func (s *stage) mount(ctx context.Context, a attack, scheme model.Scheme) (Result, error) {
	s.count++
	m := &mounting{stage: s, scheme: scheme, tag: fmt.Sprintf("<%s %s %d>", a.Name, scheme, s.count), ends: 1}
	want := a.expect(scheme)
	r := Result{Attack: a.Name, Scheme: scheme.String(), Expected: want.String()}
	// The way is good, and neighbours are known.
	err := m.honest(ctx)
	if err == nil {
		err = a.mount(ctx, m)
	}
	if err == nil {
		err = s.router.Err()
	}
	var end sighting
	if err == nil {
		end, err = s.await(ctx, m.tag, m.ends)
	}
	s.router.Set(nil)
	s.router.SetLabels(nil)
	if m.after != nil {
		err = errors.Join(err, m.after())
	}
	if err != nil {
		return r, err
	}
	got := outcome{}
	if end.host == "" {
		got.node, got.reason = end.event.Node, end.event.Reason
		r.Explained = s.explained(end.event)
		s.ledger[refusal{got.node, got.reason}]++
	}
	// A packet that is sent now arrives after all earlier packets; and the path is as good as
	// before.
	if err := m.honest(ctx); err != nil {
		return r, err
	}
	s.mu.Lock()
	ends := len(s.with(m.tag))
	s.mu.Unlock()
	differ, err := s.balance(ctx)
	if err != nil {
		return r, err
	}
	r.judge(want, got, ends-m.ends, differ)
	return r, s.router.Err()
}

// judge compares the outcome of an attack with the expected one. more: further packets of the
// attack that arrived or were refused; differ: other refusals.
func (r *Result) judge(want, got outcome, more int, differ string) {
	r.Observed = got.String()
	switch {
	case got.node != want.node || got.reason != want.reason:
		r.Problem = fmt.Sprintf("%s, want it %s", at(got), at(want))
	case !strings.Contains(r.Explained, want.says):
		r.Problem = fmt.Sprintf("the explanation does not say %q", want.says)
	case want.reason != "" && want.says == "":
		r.Problem = "nothing is said of what the explanation must say"
	case more != 0:
		r.Problem = fmt.Sprintf("%+d packets of the attack came to an end", more)
	default:
		r.Problem = differ
	}
	r.OK = r.Problem == ""
}

func at(o outcome) string {
	if o.reason == "" {
		return "delivered"
	}
	return fmt.Sprintf("refused at %s: %s", o.node, o.reason)
}
