package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/waystamp/waystamp/internal/model"
)

// labelled is a node under load whose packets have labels, or the same with SRv6.
type labelled struct{ hop }

func (l labelled) name() string {
	over := "srv6"
	if l.labels {
		over = "labels"
	}
	name := fmt.Sprintf("mpls/%s-%s-%s/%s", l.task, l.scheme, l.by, over)
	if l.segments != hopSegments {
		name += fmt.Sprintf("/segments-%d", l.segments)
	}
	return name
}

// mplsInner is the inner packet of all, in bytes: frames over labels are shorter.
const mplsInner = 128

func labelledCases(quick bool) (list []labelled) {
	schemes := []model.Scheme{model.SchemeOPoT, model.SchemeKeyed}
	if quick {
		schemes = schemes[1:]
	}
	both := func(h hop) {
		h.inner = mplsInner
		list = append(list, labelled{h})
		h.labels = true
		list = append(list, labelled{h})
	}
	for _, t := range []task{taskEnd, taskHeadend, taskEgress} {
		for _, s := range schemes {
			for _, who := range []by{byXDP, byTC} {
				h := hopBase
				h.task, h.by, h.scheme = t, who, s
				both(h)
			}
		}
	}
	if !quick {
		h := hopBase
		h.task, h.by, h.segments = taskHeadend, byXDP, model.SegmentsMax
		both(h)
	}
	return list
}

// MPLS measures labels beside SRv6.
func MPLS(ctx context.Context, c Config) (_ Result, err error) {
	c.separate = true
	r := c.begin("mpls",
		fmt.Sprintf("One node under load on CPU %d, as in `hop`: generator, node and sink joined by veth pairs, ours on XDP with an XDP sink, on TC with a TC sink and GRO on at the node. The inner packet has %d bytes and the list %d segments where the name says nothing else; frames over labels are shorter, as labels are. Each is held against SRv6 at the same place, with the same scheme.", c.cpu(), mplsInner, hopSegments),
		fmt.Sprintf("What a headend puts before a packet has to fit into the room of its buffer: %d segments of labels fit on veth, of SRv6 they do not and go by TC. Headends over labels have the interfaces that cut super-packets; frames do not pass them.", model.SegmentsMax),
		"labels, drop, delay: the network of `proxy`, with a function behind interfaces, and every packet there a frame; plain: routing through the function without labels. content, metadata: how packets of the function are recognised. The number is how many visits the stack has labels for, function and egress among them: of 2 it has 6 labels, of 10 it has 22. Visits behind the function are stamps at r3, so that a longer stack is more work there, too. strip, return: what the kernel counts for the programs at r2, its clock included.",
		"Hosts send super-packets, which headends cut before they push labels; with plain they are cut on the way into the function. frames: hosts send frames, and each goes through headend, function and egress by itself, recognised by content; plain-frames: the same frames without labels. frames is held against plain-frames, so that a ratio is to no labels.",
		"tcp: the network and load of `paper`, keyed proofs on TC, with the MSS that each header leaves of 1500 bytes. With offloads on, a super-packet stays whole over SRv6, and is cut before it gets labels.",
	)
	c.note = r.note
	if r.Figures, err = c.labelledHops(ctx, &r); err != nil {
		return Result{}, err
	}
	c.separate = false
	for _, s := range labelledProxies(c.Quick) {
		figures, err := c.proxySection(ctx, s)
		if err != nil {
			return Result{}, err
		}
		r.Figures = append(r.Figures, figures...)
	}
	for _, offload := range []bool{false, true} {
		figures, err := c.labelledTCP(ctx, offload)
		if err != nil {
			return Result{}, err
		}
		r.Figures = append(r.Figures, figures...)
	}
	if len(r.Figures) == 0 {
		return Result{}, &NoCaseError{c.Only}
	}
	r.end()
	return r, nil
}

func (c Config) labelledHops(ctx context.Context, r *Result) ([]Figure, error) {
	var subjects []subject
	for _, l := range labelledCases(c.Quick) {
		s := Series{Name: l.name(), Unit: "ns/packet", Better: Less}
		if l.labels {
			l := l
			l.labels = false
			s.Baseline = l.name()
		}
		subjects = append(subjects, subject{s, func() (*trial, error) { return l.prepare(c, r) }})
	}
	if len(c.wanted(subjects)) == 0 {
		return nil, nil
	}
	return c.rounds(ctx, "mpls", subjects)
}

// labelledWays are the schemes of the paper's network that are compared.
var labelledWays = []way{
	{name: "srv6", network: netOurs, scheme: model.SchemeKeyed},
	{name: "labels", network: netLabels, scheme: model.SchemeKeyed, labels: true},
}

// labelledTCP is TCP through the network of the paper on ordered proof of transit, over both.
func (c Config) labelledTCP(ctx context.Context, offload bool) (_ []Figure, err error) {
	p := &paperRun{Config: c, offload: offload, list: labelledWays, nets: map[string]*paperNet{}}
	defer func() { err = errors.Join(err, p.close()) }()
	var subjects []subject
	for _, w := range p.list {
		s := Series{Name: "mpls/tcp" + p.suffix() + "/" + w.name, Unit: "Mbit/s", Better: More}
		if w.labels {
			s.Baseline = subjects[0].Name
		}
		subjects = append(subjects, subject{Series: s, prepare: p.trial(ctx, w, 0, p.load)})
	}
	if p.skips(subjects) {
		return nil, nil
	}
	return c.rounds(ctx, "mpls, TCP"+p.words(), subjects)
}

// labelledProxies are the experiments of the paper on the caching SFC proxy, over the stack of labels
// that it is about. Packets that go to the function are frames, since nothing is a super-packet with labels.
func labelledProxies(quick bool) []proxySection {
	visits, caches := []int{2, 4, 6, 8, 10}, []int{1000, 2500, 5000, 10000, 100000}
	if quick {
		visits, caches = []int{2, 10}, []int{10000}
	}
	over := func(n int, kind string, c proxyCase) proxyCase {
		c.name, c.cut = fmt.Sprintf("labels-%d/%s", n, kind), true
		c.params = map[string]float64{"labels": float64(n)}
		if n > 0 {
			c.way, c.labels, c.segments = wayOurs, true, n
		}
		if n > 2 {
			c.baselines = []string{"labels-2/" + kind}
		}
		return c
	}
	programs := proxySection{"mpls", "programs", nil}
	plain, single := over(0, "plain", proxyCase{}), over(0, "plain-frames", proxyCase{frames: true})
	stacks, frames := []proxyCase{plain}, []proxyCase{single}
	for _, c := range []struct {
		kind     string
		metadata bool
	}{{"content", false}, {"metadata", true}} {
		for _, n := range visits {
			s := over(n, c.kind, proxyCase{metadata: c.metadata})
			if n == visits[0] {
				s.baselines = []string{plain.name}
			}
			stacks = append(stacks, s)
		}
	}
	for _, n := range visits {
		s := over(n, "frames", proxyCase{frames: true})
		s.baselines = []string{single.name}
		frames = append(frames, s)
	}
	for _, p := range []struct{ name, program string }{{"strip", "ws_core_tc"}, {"return", "ws_function_tc"}} {
		for _, n := range visits {
			programs.cases = append(programs.cases, over(n, p.name, proxyCase{flood: flood{floodPackets, p.program}}))
		}
	}
	drops := []proxyCase{
		{name: "drop/plain"},
		{name: "drop/content", way: wayOurs, labels: true, baselines: []string{"drop/plain"}},
	}
	for i := range drops {
		drops[i].cut, drops[i].function = true, functionDrops
	}
	delays := []proxyCase{{name: "delay/plain"}}
	for _, n := range caches {
		delays = append(delays, proxyCase{name: fmt.Sprintf("delay/content-%d", n), way: wayOurs, labels: true, cache: n, baselines: []string{"delay/plain"}})
	}
	for i := range delays {
		delays[i].cut, delays[i].function = true, functionDelays
	}
	return []proxySection{
		{"mpls", "TCP by labels", stacks}, {"mpls", "frames by labels", frames}, programs, {"mpls", "1 % dropped", drops}, {"mpls", "5 ms in the function", delays},
	}
}
