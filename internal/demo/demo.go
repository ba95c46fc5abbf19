// Package demo is waystamp in a minute: the network of the paper's Fig. 7a as a
// lab on this machine, real traffic through a proven chain, then one tampering
// after the other, each refused and explained; then changes by a controller while traffic flows; and then the same with netfilter, with
// functions on byte streams, with a gateway, over labels, and with functions that know nothing of
// segment routing. Nothing in it is acted: it edits the files that agents follow,
// stops and detaches agents, kills a worker, changes a firewall's rules, and reads
// what the kernel counted. internal/labcli calls it.
package demo

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// The sizes of the scenes.
const (
	downloadBytes = 50_000_000
	pings         = 5 // of a scene in which traffic flows
	lostPings     = 3 // of a scene in which it must not
)

// How long things may take on a busy machine. None of them is waited out where
// all is well.
var (
	followTime = await.Limit(time.Minute)            // for an agent to follow its plan file
	settleTime = await.Limit(30 * time.Second)       // for packets under way to arrive
	replyTime  = await.Limit(700 * time.Millisecond) // for answers that must not come
)

// Config says how the demo runs.
type Config struct {
	Schemes []model.Scheme // one lab after the other
	Prefix  string         // of namespaces and pins; "": a random one
	RunDir  string         // of labs; "": lab.DefaultRunDir
	Binary  string         // as of lab.Config
	Keep    bool           // leave the last lab up
	Out     io.Writer      // the story
	Log     *slog.Logger
}

// Run plays all scenes. It returns an error if one went otherwise than it must,
// and takes its labs down in any case but that of Keep.
func Run(ctx context.Context, c Config) error {
	paper, err := manifest.Parse(examples.PaperName, examples.Paper)
	if err != nil {
		return err
	}
	functions, err := manifest.Parse(examples.FunctionsName, examples.Functions)
	if err != nil {
		return err
	}
	netfilter, err := manifest.Parse(examples.NetfilterName, examples.Netfilter)
	if err != nil {
		return err
	}
	streams, err := manifest.Parse(examples.StreamsName, examples.Streams)
	if err != nil {
		return err
	}
	service, err := manifest.Parse(examples.ZeroTrustName, examples.ZeroTrust)
	if err != nil {
		return err
	}
	spare, err := manifest.Parse(examples.SpareName, examples.Spare)
	if err != nil {
		return err
	}
	labels, err := manifest.Parse(examples.MPLSName, examples.MPLS)
	if err != nil {
		return err
	}
	if err := host.Require(host.FeatureNetAdmin, host.FeatureNamespaces, host.FeatureSEG6Local); err != nil {
		return err
	}
	if err := host.RequireNft(); err != nil {
		return fmt.Errorf("the demo has a firewall: %w", err)
	}
	s := &stage{Config: c, chain: "web"}
	s.printf("%s", prologue)
	for _, scheme := range c.Schemes {
		s.printf("\n== proof: %s ==\n", scheme)
		if err := s.play(ctx, paper, scheme, s.scenes, false); err != nil {
			return err
		}
	}
	s.printf("%s", controllerPrologue)
	err = s.playControlled(ctx, func(scenes func() []scene) error {
		return s.play(ctx, spare, model.SchemeKeyed, scenes, false) // as in the file that the controller reads
	})
	if err != nil {
		return err
	}
	s.printf("%s", netfilterPrologue)
	if err := s.play(ctx, netfilter, c.Schemes[0], s.netfilterScenes, false); err != nil {
		return err
	}
	s.printf("%s", streamsPrologue)
	if err := s.play(ctx, streams, c.Schemes[0], s.streamScenes, false); err != nil {
		return err
	}
	s.printf("%s", gatewayPrologue)
	err = s.playShop(ctx, func(files string, scenes func() []scene) error {
		s.files = files
		defer func() { s.files = "" }()
		return s.play(ctx, service, model.SchemeKeyedFlow, scenes, false) // the only one of services
	})
	if err != nil {
		return err
	}
	s.printf("%s", labelsPrologue)
	if err := s.play(ctx, labels, c.Schemes[0], s.labelScenes, false); err != nil {
		return err
	}
	s.chain = "web"
	s.printf("%s", functionsPrologue)
	scheme := c.Schemes[0]
	if scheme == model.SchemeKeyedFlow {
		scheme = model.SchemeKeyed // its chain has a NAT, which keyed-flow does not go with
	}
	if err := s.play(ctx, functions, scheme, s.functionScenes, c.Keep); err != nil {
		return err
	}
	if s.failed > 0 {
		return fmt.Errorf("%d of %d scenes did not go as they must", s.failed, s.played)
	}
	s.printf("\nAll %d scenes went as they must.\n", s.played)
	return nil
}

// stage is the demo while it runs.
type stage struct {
	Config
	played int
	failed int

	manifest manifest.Manifest // of the lab that is up, and what is in it
	lab      *lab.Lab
	plan     *plan.Domain
	scheme   model.Scheme
	chain    string // that path finds
	files    string // directory of a gateway's files; "": there is no gateway
	apply    string // file for the lab's controller; "": agents follow plan files
	names    explain.Names
	h1, h2   *host.NetNS
}

func (s *stage) printf(format string, args ...any) { fmt.Fprintf(s.Out, format, args...) }

const prologue = `waystamp demo: traffic that proves where it has been

               r2 (fw) ---- r3 (dpi)
              /                     \         chain web, both ways: r1, fw, dpi, r6
    h1 ---- r1                       r6 ---- h2
              \                     /
               r4 ---------------- r5         r4, r5: the kernel's own SRv6, no stamps

Each of them is a network namespace of this machine; every packet goes through the
kernel. r1 wraps packets from h1 to h2 in SRv6 and stamps them, fw and dpi stamp
them, r6 checks the stamps. The other direction has a path and secrets of its own.
`

// play builds a lab whose chains are proven by scheme, and plays every scene.
func (s *stage) play(ctx context.Context, m manifest.Manifest, scheme model.Scheme, scenes func() []scene, keep bool) (err error) {
	s.manifest = m
	d, err := lab.OnThisMachine(s.manifest.Domain)
	if err != nil {
		return err
	}
	d.Chains = slices.Clone(d.Chains)
	for i := range d.Chains {
		d.Chains[i].Proof.Scheme = scheme
	}
	if s.plan, err = plan.Compile(d, nil); err != nil {
		return err
	}
	s.scheme = scheme
	started := time.Now()
	s.lab, err = lab.Up(ctx, lab.Config{
		Domain: d, Lab: *s.manifest.Lab, Plan: s.plan,
		Prefix: s.Prefix, RunDir: s.RunDir, Binary: s.Binary, Files: s.files, Apply: s.apply, Own: true, Log: s.Log,
	})
	if err != nil {
		return err
	}
	s.printf("lab %s is up: %d namespaces, %d agents, in %.1f s\n",
		s.lab.Prefix(), len(s.lab.Members()), len(d.Nodes), time.Since(started).Seconds())
	defer func() {
		if keep && err == nil {
			if err = s.lab.Keep(); err == nil {
				s.epilogue()
				return
			}
		}
		down, cancel := context.WithTimeout(context.WithoutCancel(ctx), await.Limit(time.Minute))
		defer cancel()
		if downErr := s.lab.Down(down); downErr != nil {
			err = errors.Join(err, downErr)
		}
	}()
	for name, at := range map[string]**host.NetNS{"h1": &s.h1, "h2": &s.h2} {
		if !slices.ContainsFunc(s.manifest.Lab.Hosts, func(h model.LabHost) bool { return h.Name == name }) {
			continue
		}
		if *at, err = s.lab.NetNS(name); err != nil {
			return err
		}
		defer (*at).Close()
	}
	s.names = explain.Names{}
	for _, r := range s.manifest.Lab.Routers {
		for _, sid := range r.SIDs {
			s.names[sid] = r.Name
		}
	}

	for i, sc := range scenes() {
		s.played++
		s.printf("\n%d. %s\n   did  %s\n", i+1, sc.title, sc.did)
		saw, err := sc.run(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		for _, line := range saw {
			s.printf("   saw  %s\n", line)
		}
		if err != nil {
			s.failed++
			s.printf("   FAILED: %v\n", err)
			continue
		}
		s.printf("   ok\n")
	}
	return nil
}

func (s *stage) epilogue() {
	p := s.lab.Prefix()
	s.printf(`
The lab stays up. Try:
  waystamp lab exec --prefix %[1]s h1 -- curl -sS http://[fc00:8::2]/    (after starting a server on h2)
  waystamp lab exec --prefix %[1]s fw -- nft list ruleset
  waystamp watch --lab %[1]s
  waystamp status --lab %[1]s
  waystamp get functions --lab %[1]s
  waystamp get paths --watch --lab %[1]s
  waystamp lab down --prefix %[1]s
`, p)
}

// scene is one thing that is done, and what must be seen of it.
type scene struct {
	title string
	did   string
	run   func(context.Context) (saw []string, err error)
}

func (s *stage) scenes() []scene {
	web := s.path(model.Forward)
	segments := func(sids ...netip.Addr) func(context.Context) error {
		return func(ctx context.Context) error { return s.divert(ctx, web, sids) }
	}
	var (
		r2, r3, r6 = web.Hops[1].SID, web.Hops[2].SID, web.Hops[3].SID
		r4, r5     = s.sidOf("r4"), s.sidOf("r5")
	)
	return []scene{
		{"Traffic takes its chain",
			fmt.Sprintf("h1 pinged h2 %d times, then downloaded %d MB from it by HTTP", pings, downloadBytes/1_000_000),
			func(ctx context.Context) ([]string, error) { return s.flow(ctx, downloadBytes) }},
		{"Both functions are bypassed",
			"r1's plan was edited: its segment list now says r4, r5 instead of r2, r3; then h1 pinged h2",
			s.refused(segments(r4, r5, r6), "segments", "r2 (fw) and r3 (dpi) never stamped this packet")},
		{"The functions are visited in the wrong order",
			"r1's segment list now says r3, r2; then h1 pinged h2",
			s.refused(segments(r3, r2, r6), "segments", s.wrongOrder())},
		{"One function is left out",
			"r1's segment list now says r3 alone; then h1 pinged h2",
			s.refused(segments(r3, r6), "segments", "r2 (fw) never stamped this packet")},
		{"The headend is gone",
			"r1's agent was stopped and its data path removed, so that packets travel plain, by ordinary routing; then h1 pinged h2",
			s.refused(s.detach, "unproven", "without proof")},
		{"Repaired",
			"r1 got its plan and its agent back; then h1 pinged h2",
			s.repair},
	}
}

// wrongOrder is what the explanation must say of functions that were swapped:
// unordered proof cannot see it.
func (s *stage) wrongOrder() string {
	if s.scheme == model.SchemePoT {
		return "order"
	}
	return "r3 (dpi) stamped this packet before r2 (fw)"
}

// path is the chain in one direction, with everybody's secrets.
func (s *stage) path(d model.Direction) plan.Path {
	for _, p := range s.plan.Paths {
		if p.Chain == s.chain && p.Direction == d {
			return p
		}
	}
	panic("the example has no chain " + s.chain + " in direction " + d.String())
}

func (s *stage) sidOf(router string) netip.Addr {
	for sid, name := range s.names {
		if name == router {
			return sid
		}
	}
	panic("the example has no router " + router)
}

func (s *stage) ping(ctx context.Context, n int) (lab.PingResult, error) {
	return lab.Ping(ctx, s.h1, s.h2Addr(), lab.PingConfig{Count: n, Timeout: settleTime})
}

func (s *stage) h2Addr() netip.Addr { return s.addr("h2") }

func (s *stage) addr(name string) netip.Addr {
	for _, h := range s.manifest.Lab.Hosts {
		if h.Name == name {
			return lab.HostAddress(h)
		}
	}
	panic("the example has no host " + name)
}

// flow is traffic as it should be, and the proof that all of it was stamped by
// all.
func (s *stage) flow(ctx context.Context, size int64) (saw []string, err error) {
	r, err := s.ping(ctx, pings)
	if err != nil {
		return nil, err
	}
	saw = append(saw, fmt.Sprintf("%d of %d echo replies", r.Received, r.Sent))
	if r.Received != pings {
		return saw, fmt.Errorf("%d echo replies are missing", pings-r.Received)
	}

	content := lab.Content{Seed: 7, Size: size}
	server, err := lab.Serve(s.h2, netip.AddrPortFrom(s.h2Addr(), 0), content)
	if err != nil {
		return saw, err
	}
	defer server.Close()
	t, err := lab.Download(ctx, s.h1, server.Addr(), content)
	if err != nil {
		return saw, err
	}
	saw = append(saw, fmt.Sprintf("%d bytes in %.2f s, SHA-256 %x…, as sent", t.Bytes, t.Duration.Seconds(), t.SHA256[:6]))

	for _, d := range []model.Direction{model.Forward, model.Reverse} {
		line, err := s.sameCounts(ctx, s.path(d))
		saw = append(saw, line)
		if err != nil {
			return saw, err
		}
	}
	return saw, nil
}

// sameCounts waits until every hop of a path has stamped as many frames as the
// egress has verified: packets may still be on their way.
func (s *stage) sameCounts(ctx context.Context, p plan.Path) (line string, err error) {
	deadline := time.Now().Add(settleTime)
	for {
		counts := make([]uint64, len(p.Hops))
		for i, h := range p.Hops {
			if counts[i], err = s.frames(ctx, h.Node, p, i); err != nil {
				return "", err
			}
		}
		line = p.Way() + ":"
		for i, h := range p.Hops {
			verb := "stamped"
			if i == len(p.Hops)-1 {
				verb = "verified"
			}
			name := h.Node
			if h.Function != "" && isTwiceIn(p, h.Node) {
				name += " (" + h.Function + ")"
			}
			line += fmt.Sprintf(" %s %s %d,", name, verb, counts[i])
		}
		line = line[:len(line)-1] + " frames"
		switch {
		case counts[0] > 0 && slices.Min(counts) == slices.Max(counts):
			return line, nil
		case time.Now().After(deadline):
			return line, errors.New("the counts differ")
		}
		if err := wait(ctx, 20*time.Millisecond); err != nil {
			return line, err
		}
	}
}

// isTwiceIn tells whether a node has several hops of a path.
func isTwiceIn(p plan.Path, node string) bool {
	n := 0
	for _, h := range p.Hops {
		if h.Node == node {
			n++
		}
	}
	return n > 1
}

// frames is how many frames a node has counted at one position of a path.
func (s *stage) frames(ctx context.Context, node string, p plan.Path, position int) (uint64, error) {
	client := s.client(node)
	defer client.Close()
	counts, err := client.Counters(ctx)
	if err != nil {
		return 0, err
	}
	role := api.RoleEndpoint
	switch position {
	case 0:
		role = api.RoleHeadend
	case len(p.Hops) - 1:
		role = api.RoleEgress
	}
	for _, c := range counts.Paths {
		if c.Path == p.Path && c.Role == role && (c.SID == nil || *c.SID == p.Hops[position].SID) {
			return c.Frames, nil
		}
	}
	return 0, fmt.Errorf("%s counts nothing for path %#x", node, p.Path)
}

func (s *stage) client(node string) *agent.Client {
	return agent.NewClient(agent.SocketPath(s.lab.AgentDir(node)))
}

// divert rewrites the segment list in r1's plan, as a mistake or an intruder
// would, and waits until r1 follows it.
func (s *stage) divert(ctx context.Context, p plan.Path, sids []netip.Addr) error {
	n, err := s.lab.NodePlan("r1")
	if err != nil {
		return err
	}
	for i := range n.Headends {
		if n.Headends[i].Path == p.Path {
			n.Headends[i].Segments = sids
		}
	}
	return s.follow(ctx, n)
}

// follow writes a node's plan and waits until its agent has it in force.
func (s *stage) follow(ctx context.Context, n plan.Node) error {
	ctx, cancel := context.WithTimeout(ctx, followTime)
	defer cancel()
	if err := s.lab.WriteNodePlan(n.Name, n); err != nil {
		return err
	}
	file, err := os.ReadFile(s.lab.NodePlanPath(n.Name))
	if err != nil {
		return fmt.Errorf("read back the plan of %s: %w", n.Name, err)
	}
	digest := fmt.Sprintf("%x", sha256.Sum256(file))
	client := s.client(n.Name)
	defer client.Close()
	for {
		status, err := client.Status(ctx)
		switch {
		case err != nil:
			return err
		case status.Plan == digest:
			return nil
		case status.Error != "":
			return fmt.Errorf("%s does not follow its plan: %s", n.Name, status.Error)
		}
		if err := wait(ctx, 10*time.Millisecond); err != nil {
			return fmt.Errorf("%s does not follow its plan: %w", n.Name, err)
		}
	}
}

// detach takes r1's agent and data path away.
func (s *stage) detach(ctx context.Context) error {
	if err := s.lab.StopAgent(ctx, "r1"); err != nil {
		return err
	}
	return s.lab.Detach(ctx, "r1")
}

// repair gives r1 back what it had.
func (s *stage) repair(ctx context.Context) (saw []string, err error) {
	for _, n := range s.plan.Nodes {
		if n.Name != "r1" {
			continue
		}
		if err := s.lab.WriteNodePlan("r1", n); err != nil {
			return nil, err
		}
	}
	if err := s.lab.StartAgent(ctx, "r1"); err != nil {
		return nil, err
	}
	r, err := s.ping(ctx, pings)
	if err != nil {
		return nil, err
	}
	saw = append(saw, fmt.Sprintf("%d of %d echo replies", r.Received, r.Sent))
	if r.Received != pings {
		return saw, fmt.Errorf("%d echo replies are missing", pings-r.Received)
	}
	return saw, nil
}

// refused is a scene in which nothing may arrive: it tampers, pings, and looks
// at what r6 refused and why.
func (s *stage) refused(tamper func(context.Context) error, reason, sentence string) func(context.Context) ([]string, error) {
	return func(ctx context.Context) (saw []string, err error) {
		if err = tamper(ctx); err != nil {
			return nil, err
		}
		return s.refusal(ctx, "r6", reason, lostPings, sentence, s.unanswered)
	}
}

// unanswered pings, which nobody may answer.
func (s *stage) unanswered(ctx context.Context) (saw string, err error) {
	return unansweredBy(lab.Ping(ctx, s.h1, s.h2Addr(), lab.PingConfig{Count: lostPings, Timeout: replyTime}))
}

func unansweredBy(r lab.PingResult, err error) (string, error) {
	saw := fmt.Sprintf("%d of %d echo replies", r.Received, r.Sent)
	if err == nil && r.Received != 0 {
		err = fmt.Errorf("%d packets got through", r.Received)
	}
	return saw, err
}

// refusal does something that a node must refuse n packets of, for a reason and
// with an explanation.
func (s *stage) refusal(ctx context.Context, node, reason string, n uint64, sentence string, do func(context.Context) (string, error)) (saw []string, err error) {
	before, err := s.dropped(ctx, node, reason)
	if err != nil {
		return nil, err
	}
	since := time.Now()
	line, err := do(ctx)
	saw = append(saw, line)
	if err != nil {
		return saw, err
	}
	after, err := s.dropped(ctx, node, reason)
	if err != nil {
		return saw, err
	}
	packets := "packets"
	if after-before == 1 {
		packets = "packet"
	}
	saw = append(saw, fmt.Sprintf("%s refused %d %s: %s", node, after-before, packets, reason))
	if after-before != n {
		return saw, fmt.Errorf("%s refused %d %s as %s, want %d", node, after-before, packets, reason, n)
	}
	e, err := s.awaitEvent(ctx, node, since, reason)
	if err != nil {
		return saw, err
	}
	x := explain.Explain(e, s.plan.Paths, s.names)
	saw = append(saw, "explained: "+x.Sentence)
	if !strings.Contains(x.Sentence, sentence) {
		return saw, fmt.Errorf("the explanation does not say %q", sentence)
	}
	return saw, nil
}

func (s *stage) dropped(ctx context.Context, node, reason string) (uint64, error) {
	client := s.client(node)
	defer client.Close()
	c, err := client.Counters(ctx)
	if err != nil {
		return 0, err
	}
	for _, r := range c.Refusals {
		if r.Reason == reason {
			return r.Dropped, nil
		}
	}
	return 0, nil
}

// awaitEvent waits for an event of a node with the given reason.
func (s *stage) awaitEvent(ctx context.Context, node string, since time.Time, reason string) (found event.Event, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, settleTime, fmt.Errorf("%s sent no event with the reason %s", node, reason))
	defer cancel()
	client := s.client(node)
	defer client.Close()
	err = client.Events(ctx, true, func(e event.Event) error {
		if e.Reason != reason || e.Time.Before(since) {
			return nil
		}
		found = e
		return errFound
	})
	if errors.Is(err, errFound) {
		err = nil
	}
	return found, err
}

// errFound ends a stream of events.
var errFound = errors.New("found")

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
