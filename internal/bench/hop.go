package bench

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/bench/meter"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// task is what the node does to a packet.
type task string

const (
	taskDrop     task = "drop"     // nothing: it is counted where it comes in
	taskRedirect task = "redirect" // out of the other device, as it is
	taskForward  task = "ipv6"     // plain IPv6
	taskHeadend  task = "headend"
	taskEnd      task = "end"
	taskEgress   task = "verify"
)

// by is who does it.
type by string

const (
	byKernel by = "kernel"
	byXDP    by = "xdp"
	byTC     by = "tc"
)

// hop is one case of a node under load.
type hop struct {
	task     task
	by       by
	scheme   model.Scheme
	size     int // bytes of the frame as it comes to the node
	segments int
	chains   int
	numbers  int // that frames of each chain have in turn; 0: one

	inner      int  // bytes of the packet inside, where it is not size that says how long frames are
	compressed bool // SIDs of five to an entry, and headers as short as can be
	labels     bool // in place of SRv6
	ipv4       bool // packets inside
	ordered    bool // chains by rules with a priority
	cores      int  // CPUs that packets come in on; 0: one
}

// kernelName is what the kernel's own behaviour is called.
var kernelName = map[task]string{
	taskForward: "ipv6", taskHeadend: "h.encaps", taskEnd: "end", taskEgress: "end.dt6",
}

func (h hop) name() string {
	switch {
	case h.by != byKernel:
	case h.task == taskEgress && h.ipv4:
		return "hop/end.dx4/kernel"
	case h.task == taskHeadend && h.compressed:
		return "hop/h.encaps.red/kernel"
	default:
		return "hop/" + kernelName[h.task] + "/kernel"
	}
	if h.task == taskDrop || h.task == taskRedirect {
		return "hop/" + string(h.task) + "/xdp"
	}
	return fmt.Sprintf("hop/%s-%s/%s", h.task, h.scheme, h.by)
}

// kernel is the case of the kernel that h is held against.
func (h hop) kernel() hop {
	h.by, h.scheme, h.chains = byKernel, model.SchemeKeyed, 1
	return h
}

func (h hop) spec() worldSpec {
	return worldSpec{scheme: h.scheme, segments: h.segments, chains: h.chains, xdp: h.by == byXDP, compressed: h.compressed, labels: h.labels, ipv4: h.ipv4, ordered: h.ordered}
}

// cpus are those that packets go through the node on: the last ones.
func (h hop) cpus(c Config) []int {
	list := []int{c.cpu()}
	for i := 1; i < h.cores; i++ {
		list = append(list, (c.cpu()-i+runtime.NumCPU())%runtime.NumCPU())
	}
	return list
}

// The frames of all figures whose names say nothing else.
const (
	hopSize     = 256
	hopSegments = 3
)

// hopSetup tells how baselines and ours are set up.
func hopSetup(c Config) []string {
	return []string{
		fmt.Sprintf("One hop: generator, node and sink are network namespaces, joined by veth pairs of MTU %d with one queue each. All of it runs on CPU %d; a figure is the time from the making of one packet to its counting at the sink. The net time leaves out what generator, veth and sink take by themselves (hop/drop/xdp: counted and dropped where they come into the node).", rigMTU, c.cpu()),
		"The generator is an XDP program under BPF_PROG_TEST_RUN with BPF_F_TEST_XDP_LIVE_FRAMES. It writes the head of every frame anew, so that each one is as the first.",
		"Routes are the same for all: one default route; its next hop is a permanent neighbour. The kernel's H.Encaps has its tunnel source set, so that it looks for none, and seg6_flowlabel is 0, so that it computes none. Nothing else hangs on the node: no netfilter, no qdisc.",
		"The kernel and ours on TC get their packets with GRO on at the node (without it, or an XDP program, veth takes no XDP frames) and drop them at a TC sink; ours on XDP and the bare redirect drop them at an XDP sink. Each is the cheaper sink for its kind of packet.",
		fmt.Sprintf("Frames are %d bytes with %d segments where the name says nothing else: the kernel's End and End.DT6 carry the same headers, proof TLV included. Every packet of ours is stamped or verified for real: a run counts only if the data path says so. What comes to an egress has thousands of numbers in turn, each of a train of %d frames; between runs its replay windows are emptied.", hopSize, hopSegments, trainMax),
	}
}

// hopSweepSetup tells of what is not in `scale` too.
func hopSweepSetup() []string {
	return []string{
		"size-N: an inner packet of N bytes, and the outer header on top of it. compressed: SIDs of five to an entry and reduced headers; beside them the kernel's H.Encaps.Red, which then needs no SRH at all, and its End of the flavour NEXT-C-SID. ipv4: inner packets of IPv4; beside our verdict is the kernel's End.DX4, which looks up a fixed address in place of the destination (End.DT4 would need VRF devices).",
		"cores-2: both veth pairs have two queues; a generator on each of two CPUs sends half of the packets, and veth hands them on to the queue of the sender's CPU, as a NIC would that spreads flows over queues (RSS). Figures are the time from packet to packet of both CPUs together. Two CPUs of one machine may be threads of one core: cores/redirect shows what there is to be had.",
		"Chains, from one to all that a block has SIDs for, are in scale.",
	}
}

// hopSection are cases of one node that are measured in the same rounds.
type hopSection struct {
	what   string
	runs   int // at most
	cases  []hop
	suffix func(hop) string
	params func(hop) map[string]float64
}

// hopBase are the frames of all figures whose names say nothing else.
var hopBase = hop{size: hopSize, segments: hopSegments, chains: 1, scheme: model.SchemeKeyed}

// Rounds of those figures that are beside the main ones.
const sweepRuns = 5

func hopSections(quick bool) []hopSection {
	as := func(t task, who by, s model.Scheme) hop {
		h := hopBase
		h.task, h.by, h.scheme = t, who, s
		return h
	}
	tasks := []task{taskEnd, taskHeadend, taskEgress}
	main := []hop{as(taskDrop, byXDP, 0), as(taskRedirect, byXDP, 0), as(taskForward, byKernel, 0)}
	for _, t := range tasks {
		main = append(main, as(t, byKernel, model.SchemeKeyed))
		for _, s := range []model.Scheme{model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow} {
			if s == model.SchemeKeyedFlow && quick {
				continue
			}
			main = append(main, as(t, byXDP, s), as(t, byTC, s))
		}
	}
	main = append(main, as(taskEnd, byXDP, model.SchemePoT))
	sections := []hopSection{{what: "hop", cases: main}}
	if quick {
		return sections
	}

	// each is a section of the main behaviours by number, beside the kernel's.
	each := func(what, param string, values []int, set func(*hop, int), list ...hop) {
		s := hopSection{
			what: "hop, " + what, runs: sweepRuns,
			suffix: func(h hop) string { return fmt.Sprintf("/%s-%d", param, h.value(param)) },
			params: func(h hop) map[string]float64 { return map[string]float64{param: float64(h.value(param))} },
		}
		for _, h := range list {
			for _, v := range values {
				c := h
				set(&c, v)
				s.cases = append(s.cases, c)
			}
		}
		sections = append(sections, s)
	}
	var both []hop
	for _, t := range tasks {
		both = append(both, as(t, byKernel, model.SchemeKeyed), as(t, byXDP, model.SchemeKeyed))
	}
	each("packet sizes", "size", []int{128, 256, 512, 1024, 1500}, func(h *hop, n int) { h.inner = n }, both...)
	each("segments", "segments", []int{2, 4, 8, 16}, func(h *hop, n int) { h.segments, h.size = n, 512 }, both...)
	if runtime.NumCPU() > 1 {
		each("two CPUs", "cores", []int{1, 2}, func(h *hop, n int) { h.cores = n },
			append([]hop{as(taskRedirect, byXDP, 0), as(taskForward, byKernel, 0), as(taskEnd, byTC, model.SchemeKeyed)}, both...)...)
	}
	variants := hopSection{what: "hop, compressed SIDs and IPv4", runs: sweepRuns, suffix: hop.variant}
	for _, t := range tasks {
		for _, h := range []hop{as(t, byKernel, model.SchemeKeyed), as(t, byXDP, model.SchemeOPoT), as(t, byXDP, model.SchemeKeyed)} {
			h.compressed = true
			variants.cases = append(variants.cases, h)
		}
	}
	for _, t := range []task{taskHeadend, taskEgress} {
		for _, h := range []hop{as(t, byKernel, model.SchemeKeyed), as(t, byXDP, model.SchemeKeyed), as(t, byTC, model.SchemeKeyed)} {
			h.ipv4 = true
			variants.cases = append(variants.cases, h)
		}
	}
	return append(sections, variants)
}

// variant is what a name says of packets that are not as all others.
func (h hop) variant() string {
	switch {
	case h.compressed:
		return "/compressed"
	case h.ipv4:
		return "/ipv4"
	}
	return ""
}

func (h hop) value(param string) int {
	return map[string]int{"size": h.inner, "segments": h.segments, "cores": h.cores}[param]
}

// Hop measures one node under load.
func Hop(ctx context.Context, c Config) (Result, error) {
	c.separate = true
	r := c.begin("hop", hopSetup(c)...)
	c.note = r.note
	if !c.Quick {
		r.Setup = append(r.Setup, hopSweepSetup()...)
	}
	for _, s := range hopSections(c.Quick) {
		subjects := s.subjects(c, &r)
		if c.skips(subjects) {
			continue
		}
		sc := c
		if s.runs > 0 {
			sc.Runs = min(c.Runs, s.runs)
		}
		figures, err := sc.rounds(ctx, s.what, subjects)
		if err != nil {
			return Result{}, err
		}
		more, err := speedUps(figures)
		if err != nil {
			return Result{}, err
		}
		r.Figures = append(append(r.Figures, figures...), more...)
	}
	if len(r.Figures) == 0 {
		return Result{}, &NoCaseError{c.Only}
	}
	r.end()
	return r, nil
}

func (s hopSection) subjects(c Config, r *Result) []subject {
	var out []subject
	for _, h := range s.cases {
		suffix := ""
		if s.suffix != nil {
			suffix = s.suffix(h)
		}
		x := subject{
			Series:  Series{Name: h.name() + suffix, Unit: "ns/packet", Better: Less},
			prepare: func() (*trial, error) { return h.prepare(c, r) },
		}
		if s.params != nil {
			x.Params = s.params(h)
		}
		if s.what == "hop" && h.task != taskDrop {
			x.Floor = "hop/drop/xdp"
		}
		switch {
		case h.task == taskRedirect:
			x.Baseline = "hop/ipv6/kernel" + suffix
		case h.by != byKernel && h.task != taskDrop:
			x.Baseline = h.kernel().name() + suffix
		}
		out = append(out, x)
	}
	return out
}

// speedUps hold two CPUs against one, of figures of the same rounds.
func speedUps(of []Figure) ([]Figure, error) {
	var series []Series
	for _, f := range of {
		name, ok := strings.CutSuffix(f.Name, "/cores-1")
		i := slices.IndexFunc(of, func(x Figure) bool { return x.Name == name+"/cores-2" })
		if !ok || i < 0 {
			continue
		}
		name = "cores" + strings.TrimPrefix(name, "hop")
		series = append(series,
			Series{Name: name + "/one", Unit: f.Unit, Better: f.Better, Samples: f.Samples},
			Series{Name: name + "/two", Unit: f.Unit, Better: f.Better, Baseline: name + "/one", Samples: of[i].Samples})
	}
	return Figures(series)
}

// role is the node of the domain that does the task.
func (h hop) role() string {
	switch h.task {
	case taskHeadend:
		return nodeHead
	case taskEnd:
		return nodeHop
	}
	return nodeTail
}

// count is how many different frames come to the node. An egress takes each of
// them trainMax times, and the kernel's gets the same.
func (h hop) count() int { return max(1, h.chains) * max(1, h.numbers) }

// needNumbers makes them enough for so many packets, if they can be.
func (h *hop) needNumbers(packets int) {
	if h.task == taskEgress {
		h.numbers = min(packets/trainMax/h.chains+1, windowOf(h.chains)-4)
	}
}

// frameSize is how long frames are that come to the node, in bytes.
func (h hop) frameSize(w world) int {
	if h.inner == 0 {
		return h.size
	}
	if h.task == taskEnd || h.task == taskEgress {
		return srv6.EthernetLen + w.outerLen() + h.inner
	}
	return srv6.EthernetLen + h.inner
}

// frame is what comes to the node as the i-th of count, and how much of it may be
// changed there.
func (h hop) frame(w world, i int, to [6]byte) (frame []byte, head int, err error) {
	chain, number := i%max(1, h.chains), i/max(1, h.chains)+1
	size := h.frameSize(w)
	switch h.task {
	case taskEnd:
		frame, err = w.stampedFrame(chain, number, 0, size, to)
	case taskEgress:
		frame, err = w.stampedFrame(chain, number, h.segments-1, size, to)
	default:
		frame, err = w.plainFrame(chain, size, to)
		return frame, srv6.EthernetLen + srv6.IPv6Len, err
	}
	return frame, srv6.EthernetLen + w.outerLen() + srv6.IPv6Len, err
}

// prepare builds the case. What must be said of its runs goes to the result's
// notes.
func (h hop) prepare(c Config, result *Result) (_ *trial, err error) {
	w, err := newWorld(h.spec())
	if err != nil {
		return nil, err
	}
	r, err := newRig(h.cpus(c)...)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w", joinClose(err, r))
		}
	}()
	h.needNumbers(warmUp + int(c.Duration/leastTime))
	if err := h.setUp(r, w); err != nil {
		return nil, err
	}
	frame, head, err := h.frame(w, 0, r.mac)
	if err != nil {
		return nil, err
	}
	fields, err := h.fields(w, r.mac, frame, head)
	if err != nil {
		return nil, err
	}
	if err := r.generate(frame, head, fields...); err != nil {
		return nil, err
	}
	return &trial{measure: func(ctx context.Context) (float64, error) { return h.measure(ctx, c, r, result) }, close: r.close}, nil
}

func joinClose(err error, r *rig) error {
	if e := r.close(); e != nil {
		return fmt.Errorf("%w; and then: %w", err, e)
	}
	return err
}

// setUp makes the node do the task.
func (h hop) setUp(r *rig, w world) (err error) {
	if h.task != taskDrop {
		// First: what our data path may redirect to depends on who listens there.
		sink := meter.TC
		if h.by == byXDP {
			sink = meter.XDP
		}
		if err := r.listen(sink); err != nil {
			return err
		}
	}
	sid := func(i int) netip.Prefix { return netip.PrefixFrom(w.plan.Paths[0].SIDs()[i], 64) }
	switch {
	case h.task == taskDrop:
		return in(r.node, func() error {
			r.tap, err = meter.NewSink(r.index.in, meter.XDP)
			return err
		})
	case h.task == taskRedirect:
		err = in(r.node, func() error {
			from, err := meter.NewRedirect(r.index.in, r.index.out)
			if err == nil {
				r.others = append(r.others, from)
			}
			return err
		})
	case h.by == byKernel:
		err = r.node.SetOffload(devIn, host.GRO, true)
		if err != nil {
			return err
		}
		switch h.task {
		case taskHeadend:
			if err := r.node.SetTunnelSource(netip.MustParseAddr(headAddress)); err != nil {
				return err
			}
			if err := r.node.AddAddress("lo", netip.MustParsePrefix(headAddress+"/128")); err != nil {
				return err
			}
			way := host.Route{
				Destination: innerNet(0), Type: host.RouteEncap, Device: devOut, Segments: w.plan.Paths[0].Segments(),
				Via: netip.MustParseAddr("fe80::99"), Reduced: h.compressed,
			}
			if h.ipv4 {
				way.Destination, way.Via = innerNet4(0), netip.MustParseAddr(nodeNext4)
			}
			err = r.node.AddRoute(way)
		case taskEnd:
			err = r.node.AddRoute(host.Route{Destination: sid(0), Type: host.RouteEnd, Device: devIn, Compressed: h.compressed})
		case taskEgress:
			if h.ipv4 {
				// The kernel looks up the way to this address, and asks for whoever is
				// not behind a router: so one that is.
				err = r.node.AddKernelEgress4(sid(h.segments-1), devIn, innerNet4(0).Addr().Next())
			} else {
				err = r.node.AddKernelEgress(sid(h.segments-1), devIn, 0)
			}
		}
	default:
		if h.by == byTC {
			if err := r.node.SetOffload(devIn, host.GRO, true); err != nil {
				return err
			}
		}
		p, err := w.node(h.role())
		if err != nil {
			return err
		}
		if err := r.apply(p); err != nil {
			return err
		}
	}
	return err
}

// fields make the generator go round all frames.
func (h hop) fields(w world, to [6]byte, first []byte, head int) ([]meter.Field, error) {
	if h.count() == 1 {
		return nil, nil
	}
	// Where frames differ, by aligned words.
	frames := make([][]byte, h.count())
	for i := range frames {
		var err error
		if frames[i], _, err = h.frame(w, i, to); err != nil {
			return nil, err
		}
	}
	var fields []meter.Field
	for at := 0; at+8 <= head; at += 8 {
		differs := false
		for _, f := range frames {
			if string(f[at:at+8]) != string(first[at:at+8]) {
				differs = true
				break
			}
		}
		if !differs {
			continue
		}
		f := meter.Field{Offset: at, Values: make([][]byte, h.count())}
		for i := range frames {
			f.Values[i] = frames[i][at : at+8]
		}
		fields = append(fields, f)
	}
	return fields, nil
}

// lossMax is the part of packets that may be lost before a run is not worth
// anything: what is lost was made, and is in the time of the others.
const lossMax = 0.02

// leastTime is shorter than any packet takes.
const leastTime = 100 * time.Nanosecond

func (h hop) measure(ctx context.Context, c Config, r *rig, result *Result) (float64, error) {
	ours := r.dp != nil
	var before uint64
	var refusedBefore map[string]uint64
	var err error
	if ours {
		if before, refusedBefore, err = r.done(); err != nil {
			return 0, err
		}
	}
	n := warmUp
	if r.each > 0 {
		n = max(int(float64(c.Duration.Nanoseconds())/r.each), meter.Least*len(r.cpus))
	}
	if ours && h.task == taskEgress {
		if err := r.dp.ForgetWindows(); err != nil {
			return 0, err
		}
		// No frame more often than its train is long, on all CPUs together.
		n = min(n, h.count()*(trainMax/len(r.cpus))*len(r.cpus))
	}
	each, loss, err := r.run(n)
	if err != nil {
		return 0, err
	}
	first := r.each == 0
	r.each = each
	if loss > lossMax && !first {
		result.Notes = append(result.Notes, fmt.Sprintf("%s: a run lost %.1f %% of its packets on the way.", h.name(), 100*loss))
	}
	if ours {
		after, refused, err := r.done()
		if err != nil {
			return 0, err
		}
		for reason, n := range refused {
			if n > refusedBefore[reason] {
				return 0, fmt.Errorf("the data path refused %d packets: %s", n-refusedBefore[reason], reason)
			}
		}
		// What was lost on the way to the node was not there to be stamped.
		if done := after - before; float64(done) < (1-loss-0.001)*float64(n) {
			return 0, fmt.Errorf("of %d packets the data path stamped or verified only %d", n, done)
		}
	}
	return each, ctx.Err()
}
