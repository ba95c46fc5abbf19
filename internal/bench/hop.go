package bench

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane/meter"
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
}

// kernelName is what the kernel's own behaviour is called.
var kernelName = map[task]string{
	taskForward: "ipv6", taskHeadend: "h.encaps", taskEnd: "end", taskEgress: "end.dt6",
}

func (h hop) name() string {
	if h.by == byKernel {
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
		"Routes are the same for all: one default route; its next hop is a permanent neighbour. The kernel's H.Encaps has its tunnel source set, so that it looks for none. Nothing else hangs on the node: no netfilter, no qdisc.",
		"The kernel and ours on TC get their packets with GRO on at the node (without it, or an XDP program, veth takes no XDP frames) and drop them at a TC sink; ours on XDP and the bare redirect drop them at an XDP sink. Each is the cheaper sink for its kind of packet.",
		fmt.Sprintf("Frames are %d bytes with %d segments where the name says nothing else: the kernel's End and End.DT6 carry the same headers, proof TLV included. Every packet of ours is stamped or verified for real: a run counts only if the data path says so. What comes to an egress has thousands of numbers in turn, each of a train of %d frames; between runs its replay windows are emptied.", hopSize, hopSegments, trainMax),
	}
}

// Hop measures one node under load.
func Hop(ctx context.Context, c Config) (Result, error) {
	r := c.begin("hop", hopSetup(c)...)
	var subjects []subject
	add := func(h hop, suffix string, params map[string]float64) {
		s := subject{Series: Series{
			Name: h.name() + suffix, Unit: "ns/packet", Better: Less, Params: params,
		}, prepare: func() (*trial, error) { return h.prepare(c, &r) }}
		if h.task != taskDrop {
			s.Floor = "hop/drop/xdp"
		}
		if h.by != byKernel && h.task != taskDrop && h.task != taskRedirect {
			s.Baseline = h.kernel().name() + suffix
		}
		if h.task == taskRedirect {
			s.Baseline = "hop/ipv6/kernel"
		}
		subjects = append(subjects, s)
	}
	base := hop{size: hopSize, segments: hopSegments, chains: 1, scheme: model.SchemeKeyed}
	as := func(t task, who by, s model.Scheme) hop {
		h := base
		h.task, h.by, h.scheme = t, who, s
		return h
	}
	add(as(taskDrop, byXDP, 0), "", nil)
	add(as(taskRedirect, byXDP, 0), "", nil)
	add(as(taskForward, byKernel, 0), "", nil)
	for _, t := range []task{taskEnd, taskHeadend, taskEgress} {
		add(as(t, byKernel, model.SchemeKeyed), "", nil)
		for _, s := range []model.Scheme{model.SchemeOPoT, model.SchemeKeyed, model.SchemePoT} {
			for _, who := range []by{byXDP, byTC} {
				if s == model.SchemePoT && (who == byTC || t != taskEnd) {
					continue
				}
				add(as(t, who, s), "", nil)
			}
		}
	}
	var err error
	if r.Figures, err = c.rounds(ctx, "hop", subjects); err != nil {
		return Result{}, err
	}
	if !c.Quick {
		for _, size := range []int{512, 1024, 1500} {
			more, err := c.hopSweep(ctx, &r, fmt.Sprintf("hop, %d bytes", size), fmt.Sprintf("/size-%d", size),
				map[string]float64{"size": float64(size)}, func(h *hop) { h.size = size })
			if err != nil {
				return Result{}, err
			}
			r.Figures = append(r.Figures, more...)
		}
		for _, n := range []int{2, 8, 16} {
			more, err := c.hopSweep(ctx, &r, fmt.Sprintf("hop, %d segments", n), fmt.Sprintf("/segments-%d", n),
				map[string]float64{"segments": float64(n)}, func(h *hop) { h.segments, h.size = n, 512 })
			if err != nil {
				return Result{}, err
			}
			r.Figures = append(r.Figures, more...)
		}
	}
	r.end()
	return r, nil
}

// hopSweep measures the main cases with something varied.
func (c Config) hopSweep(ctx context.Context, r *Result, what, suffix string, params map[string]float64, vary func(*hop)) ([]Figure, error) {
	var subjects []subject
	add := func(h hop) {
		h.size, h.segments, h.chains = hopSize, hopSegments, 1
		vary(&h)
		s := subject{
			Series:  Series{Name: h.name() + suffix, Unit: "ns/packet", Better: Less, Params: params},
			prepare: func() (*trial, error) { return h.prepare(c, r) },
		}
		if h.by != byKernel {
			s.Baseline = h.kernel().name() + suffix
		}
		subjects = append(subjects, s)
	}
	for _, t := range []task{taskEnd, taskHeadend, taskEgress} {
		add(hop{task: t, by: byKernel, scheme: model.SchemeKeyed})
		add(hop{task: t, by: byXDP, scheme: model.SchemeOPoT})
		add(hop{task: t, by: byXDP, scheme: model.SchemeKeyed})
	}
	if c.Only != "" && len(c.wanted(subjects)) == 0 {
		return nil, nil
	}
	return c.rounds(ctx, what, subjects)
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

// frame is what comes to the node as the i-th of count, and how much of it may be
// changed there.
func (h hop) frame(w world, i int, to [6]byte) (frame []byte, head int, err error) {
	chain, number := i%max(1, h.chains), i/max(1, h.chains)+1
	switch h.task {
	case taskEnd:
		frame, err = w.stampedFrame(chain, number, 0, h.size, to)
	case taskEgress:
		frame, err = w.stampedFrame(chain, number, h.segments-1, h.size, to)
	default:
		frame, err = plainFrame(chain, h.size, to)
		return frame, srv6.EthernetLen + srv6.IPv6Len, err
	}
	return frame, srv6.EthernetLen + model.OuterLen(h.segments) + srv6.IPv6Len, err
}

// prepare builds the case. What must be said of its runs goes to the result's
// notes.
func (h hop) prepare(c Config, result *Result) (_ *trial, err error) {
	w, err := newWorld(h.scheme, h.segments, h.chains, h.by == byXDP)
	if err != nil {
		return nil, err
	}
	r, err := newRig(c.cpu())
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
	sid := func(i int) netip.Prefix { return netip.PrefixFrom(w.plan.Paths[0].Segments()[i], 64) }
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
			err = r.node.AddRoute(host.Route{
				Destination: innerNet(0), Type: host.RouteEncap, Device: devOut, Segments: w.plan.Paths[0].Segments(),
				Via: netip.MustParseAddr("fe80::99"),
			})
		case taskEnd:
			err = r.node.AddRoute(host.Route{Destination: sid(0), Type: host.RouteEnd, Device: devIn})
		case taskEgress:
			err = r.node.AddKernelEgress(sid(h.segments-1), devIn, 0)
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
		n = int(float64(c.Duration.Nanoseconds()) / r.each)
	}
	if ours && h.task == taskEgress {
		if err := r.dp.ForgetWindows(); err != nil {
			return 0, err
		}
		n = min(n, h.count()*trainMax)
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
