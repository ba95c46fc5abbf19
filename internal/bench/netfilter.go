package bench

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/bench/meter"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/netfilter"
	"github.com/waystamp/waystamp/internal/srv6"
)

// filterBy is who brings packets to the node's netfilter and away from it.
type filterBy string

const (
	filterByPlain  filterBy = "ip"     // nobody: plain forwarding
	filterByEnd    filterBy = "end"    // nobody: the kernel's End, past netfilter
	filterByStatic filterBy = "static" // the kernel: End.DT6 or End.DX4, netfilter, H.Encaps
	filterByOwn    filterBy = "own"    // ours, in a namespace of the function's own
	filterByNode   filterBy = "node"   // ours, in the node's own

	// As own, with rules that are done with the flow: ours on TC, and on XDP.
	filterByBypass    filterBy = "bypass"
	filterByBypassXDP filterBy = "bypass-xdp"
)

func (b filterBy) ours() bool { return b == filterByOwn || b == filterByNode || b.bypasses() }

func (b filterBy) bypasses() bool { return b == filterByBypass || b == filterByBypassXDP }

// namespace is that of ours.
func (b filterBy) namespace() string {
	if b == filterByNode {
		return model.NamespaceNode
	}
	return model.NamespaceOwn
}

// filtering is one case of netfilter as a function under load.
type filtering struct {
	by    filterBy
	param string // what is varied
	value int

	size    int  // bytes of the inner packet
	rules   int  // that all match, in the forward chain
	regular bool // in chains that nothing refers to
	hooked  bool // there is a chain at prerouting, forward and postrouting
	tracked bool // with connection tracking
	mapped  bool // the verdict is one of a map by mark
	ipv4    bool
	visits  int // chains that visit the function, with an argument each
}

func (f filtering) group() string {
	g := fmt.Sprintf("%s-%d", f.param, f.value)
	if f.param == latency {
		g = latencyMedian
	}
	if f.ipv4 {
		g += "-ipv4"
	}
	return g
}

func (f filtering) name() string { return "nf/" + f.group() + "/" + string(f.by) }

// spec is the domain: the function is where the hop is.
func (f filtering) spec() worldSpec {
	s := worldSpec{scheme: model.SchemeKeyed, segments: 2, chains: max(1, f.visits), ipv4: f.ipv4}
	if f.by.ours() {
		s.filter, s.bypass, s.xdp = f.by.namespace(), f.by.bypasses(), f.by == filterByBypassXDP
	}
	return s
}

// hop is the case as that of a node: what comes to it and what is counted.
func (f filtering) hop() hop {
	h := hopBase
	h.segments, h.chains, h.inner, h.ipv4, h.by = 2, max(1, f.visits), f.size, f.ipv4, byTC
	switch f.by {
	case filterByPlain:
		h.task, h.by = taskForward, byKernel
	case filterByEnd:
		h.task, h.by = taskEnd, byKernel
	case filterByStatic:
		h.task, h.by = taskEgress, byKernel // as the last segment, which is taken off
	case filterByBypassXDP:
		h.task, h.by = taskEnd, byXDP
	default:
		h.task = taskEnd
	}
	return h
}

const filterTable = "bench"

// ruleset is what nftables holds: nothing, hooks, or rules that all match and decide
// nothing.
func (f filtering) ruleset() string {
	var b strings.Builder
	rules := func() {
		for range f.rules {
			b.WriteString("\t\tmeta l4proto udp\n")
		}
	}
	if !f.hooked {
		return ""
	}
	if f.regular {
		for i := range f.rules {
			fmt.Fprintf(&b, "\tchain unused%d {\n\t\tmeta l4proto udp accept\n\t}\n", i)
		}
	}
	for _, hook := range []string{"prerouting", "forward", "postrouting"} {
		fmt.Fprintf(&b, "\tchain %s {\n\t\ttype filter hook %s priority filter; policy accept;\n", hook, hook)
		if hook == "forward" {
			switch {
			case f.mapped:
				b.WriteString("\t\tmeta mark vmap { ")
				for i := range max(1, f.visits) {
					if i > 0 {
						b.WriteString(", ")
					}
					fmt.Fprintf(&b, "%d : accept", i+1)
				}
				b.WriteString(" }\n")
			case f.tracked:
				b.WriteString("\t\tct state invalid drop\n")
			}
			if !f.regular {
				rules()
			}
		}
		b.WriteString("\t}\n")
	}
	return b.String()
}

func (f filtering) prepare(c Config, result *Result) (_ *trial, err error) {
	h := f.hop()
	r, err := newRig(c.cpu())
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = joinClose(err, r)
		}
	}()
	sink := meter.TC
	if h.by == byXDP {
		sink = meter.XDP
	}
	if err := r.listen(sink); err != nil {
		return nil, err
	}
	w, frame, head, err := f.build(r)
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
	return &trial{measure: func(ctx context.Context) (each float64, err error) {
		err = f.goesPast(r, func() error {
			each, err = h.measure(ctx, c, r, result)
			return err
		})
		return each, err
	}, close: r.close}, nil
}

// build sets the node up. It returns what comes to it, and how much of that may be changed
// there. Whoever listens behind the node is there already.
func (f filtering) build(r *rig) (w world, frame []byte, head int, err error) {
	h := f.hop()
	if w, err = newWorld(f.spec()); err != nil {
		return w, nil, 0, err
	}
	if h.by != byXDP {
		if err := r.node.SetOffload(devIn, host.GRO, true); err != nil {
			return w, nil, 0, err
		}
	}
	if frame, head, err = h.frame(w, 0, r.mac); err != nil {
		return w, nil, 0, err
	}
	inner := frame
	if h.task != taskForward {
		inner = inner[w.outerLen():]
	}
	return w, frame, head, f.setUp(r, w, inner[srv6.EthernetLen:])
}

// goesPast runs load, and holds that a function with a bypass has seen next to none of it.
func (f filtering) goesPast(r *rig, load func() error) error {
	before, err := bypassed(r)
	if err != nil {
		return err
	}
	if err := load(); err != nil || !f.by.bypasses() {
		return err
	}
	after, err := bypassed(r)
	if past, through := after.Bypassed-before.Bypassed, after.RxSuccess-before.RxSuccess; err == nil && past < 10*through {
		err = fmt.Errorf("%d packets went past the function, and %d through it", past, through)
	}
	return err
}

// bypassed is what the one function of the node has counted.
func bypassed(r *rig) (f dataplane.FunctionCount, err error) {
	if r.dp == nil {
		return f, nil
	}
	c, err := r.dp.Counters()
	if err == nil && len(c.Functions) > 0 {
		f = c.Functions[0]
	}
	return f, err
}

// setUp makes the node do the task. inner is a packet as the function gets it.
func (f filtering) setUp(r *rig, w world, inner []byte) error {
	ctx := context.Background()
	sid := func(i int) netip.Prefix { return netip.PrefixFrom(w.plan.Paths[0].SIDs()[i], 64) }
	switch f.by {
	case filterByEnd:
		return r.node.AddRoute(host.Route{Destination: sid(0), Type: host.RouteEnd, Device: devIn})
	case filterByStatic:
		if err := f.setUpStatic(r, w, sid(1)); err != nil {
			return err
		}
	case filterByOwn, filterByBypass, filterByBypassXDP:
		p, err := w.node(nodeHop)
		if err != nil {
			return err
		}
		ns := netfilter.Namespace{
			Name: "waystamp-" + instancePrefix(os.Getpid()) + f.group() + "-" + string(f.by), Node: r.node.NetNS(),
			To: p.Proxies[0].To, From: p.Proxies[0].From, MTU: model.NetfilterMTU,
		}
		r.closers = append(r.closers, func() error { return ns.Remove(ctx) })
		if _, err := ns.Ensure(ctx); err != nil {
			return err
		}
		if f.by.bypasses() {
			if err := bypass(ctx, ns, p.Proxies[0], inner); err != nil {
				return err
			}
		} else if text := f.ruleset(); text != "" {
			if err := ns.Load(ctx, netfilter.Ruleset{Function: filterTable, Text: text}); err != nil {
				return err
			}
		}
		return r.apply(p)
	}
	if text := f.ruleset(); text != "" {
		if err := netfilter.Load(ctx, r.node.NetNS(), netfilter.Ruleset{Function: filterTable, Text: text}); err != nil {
			return err
		}
	}
	if f.by != filterByNode {
		return nil
	}
	p, err := w.node(nodeHop)
	if err != nil {
		return err
	}
	return r.apply(p)
}

// setUpStatic makes the kernel take the outer header off, and put another one on at the
// route to the inner destination.
func (f filtering) setUpStatic(r *rig, w world, sid netip.Prefix) error {
	if err := r.node.SetTunnelSource(netip.MustParseAddr(headAddress)); err != nil {
		return err
	}
	if err := r.node.AddAddress("lo", netip.MustParsePrefix(headAddress+"/128")); err != nil {
		return err
	}
	way := host.Route{
		Destination: innerNet(0), Type: host.RouteEncap, Device: devOut, Segments: w.plan.Paths[0].Segments(),
		Via: netip.MustParseAddr("fe80::99"),
	}
	if f.ipv4 {
		way.Destination, way.Via = innerNet4(0), netip.MustParseAddr(nodeNext4)
	}
	if err := r.node.AddRoute(way); err != nil {
		return err
	}
	if f.ipv4 {
		return r.node.AddKernelEgress4(sid, devIn, innerNet4(0).Addr().Next())
	}
	return r.node.AddKernelEgress(sid, devIn, 0)
}

func filterSetup(c Config) []string {
	return []string{
		fmt.Sprintf("Netfilter as a function: one node on CPU %d, generator and sink as in `hop`, GRO on at the node, which counts at a TC sink. Packets come with two segments. ip: plain forwarding through the same rules, without an outer header; end: the kernel's End, which netfilter does not see; static: the kernel's End.DT6 (inner IPv4: End.DX4) takes the outer header off, the packet meets the rules, H.Encaps at the route to its destination puts another one on; own and node: ours, which put the packet's own header back and stamp, in a namespace of the function's own and in the node's; bypass and bypass-xdp: ours, with connection tracking and rules that are done with the flow (bypass: established), on TC and on XDP, which has the cheaper sink.", c.cpu()),
		"size-N: inner packets of N bytes, without hooks. rules-N: N rules in the chain at forward, which all match and decide nothing, with chains at prerouting and postrouting. unused-N: N chains that nothing refers to. tracked-1: connection tracking, beside plain forwarding, since it does not see what comes out of End.DT6. arguments-N: N chains, each with an argument of its own, and a verdict by a map from marks; ours alone, since the kernel's static way knows no argument.",
		fmt.Sprintf("latency: one packet of 256 bytes each %s, from the call that sends it until a program at the sink has it; a thread at the generator sends it before all other tasks of CPU %d, where the kernel takes it all the way. Of each run the median, the mean and the 99th percentile; boxes show all packets.", latencyEvery, c.cpu()),
		"tcp-on, tcp-off: one TCP stream of iperf3, a second per run, in the network of `proxy` with the firewall at r2, which tracks connections; TSO, GSO and GRO on or off at all links. plain: rules of r2 itself, reached by plain routing, beside which is node. routed: the same rules in a namespace behind two links, reached by plain routing, beside which are own and bypass. Bit rates count TCP payload at the receiver.",
	}
}

// filterCases are sections of cases that are measured in the same rounds.
func filterCases(quick bool) [][]filtering {
	all := []filterBy{filterByPlain, filterByEnd, filterByStatic, filterByOwn, filterByNode}
	sizes, rules, arguments := []int{126, 300, 474, 648, 822, 996, 1170, 1344, 1518}, []int{1, 8, 32, 128}, []int{1, 32, 1024}
	if quick {
		sizes, rules, arguments = []int{126, 1518}, []int{1, 128}, []int{1, 1024}
	}
	section := func(by []filterBy, param string, values []int, set func(*filtering, int)) (list []filtering) {
		for _, v := range values {
			for _, b := range by {
				f := filtering{by: b, param: param, value: v, size: 256}
				set(&f, v)
				list = append(list, f)
			}
		}
		return list
	}
	seen := slices.DeleteFunc(slices.Clone(all), func(b filterBy) bool { return b == filterByEnd })
	sized := append(slices.Clone(all), filterByBypass, filterByBypassXDP)
	out := [][]filtering{
		section(sized, "size", sizes, func(f *filtering, n int) { f.size = n }),
		section(seen, "rules", rules, func(f *filtering, n int) { f.hooked, f.rules = true, n }),
		// After End.DT6 the inner packet is at forward and postrouting alone, so that connection
		// tracking takes it for invalid.
		section([]filterBy{filterByPlain, filterByOwn, filterByNode}, "tracked", []int{1}, func(f *filtering, _ int) { f.hooked, f.tracked = true, true }),
		section([]filterBy{filterByOwn, filterByNode}, "arguments", arguments, func(f *filtering, n int) { f.hooked, f.mapped, f.visits = true, true, n }),
	}
	if quick {
		return out
	}
	return append(out,
		section(seen, "unused", rules, func(f *filtering, n int) { f.hooked, f.regular, f.rules = true, true, n }),
		section(sized, "size", []int{126, 1518}, func(f *filtering, n int) { f.size, f.ipv4 = n, true }))
}

// baseline is the case that f is held against.
func (f filtering) baseline() string {
	switch {
	case f.param == "arguments" && f.value > 1:
		f.value = 1
	case f.param == "arguments", f.by == filterByStatic, f.by == filterByEnd, f.param == "tracked" && f.by == filterByPlain:
		return ""
	case f.param == "tracked":
		f.by = filterByPlain
	default:
		f.by = filterByStatic
	}
	return f.name()
}

// Netfilter measures netfilter as a function, beside the kernel's own ways to it.
func Netfilter(ctx context.Context, c Config) (Result, error) {
	if err := host.RequireNft(); err != nil {
		return Result{}, err
	}
	c.separate = true
	r := c.begin("nf", filterSetup(c)...)
	c.note = r.note
	for _, cases := range filterCases(c.Quick) {
		var subjects []subject
		for _, f := range cases {
			subjects = append(subjects, subject{
				Series: Series{
					Name: f.name(), Unit: "ns/packet", Better: Less, Baseline: f.baseline(),
					Params: map[string]float64{f.param: float64(f.value)},
				},
				prepare: func() (*trial, error) { return f.prepare(c, &r) },
			})
		}
		if c.skips(subjects) {
			continue
		}
		figures, err := c.rounds(ctx, "nf, "+cases[0].param, subjects)
		if err != nil {
			return Result{}, err
		}
		more, err := toEnd(figures)
		if err != nil {
			return Result{}, err
		}
		r.Figures = append(append(r.Figures, figures...), more...)
	}
	for _, part := range []func(context.Context) ([]Figure, error){
		c.filterLatency,
		func(ctx context.Context) ([]Figure, error) { return c.filterTCPs(ctx, true) },
		func(ctx context.Context) ([]Figure, error) { return c.filterTCPs(ctx, false) },
	} {
		figures, err := part(ctx)
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

// toEnd holds ours against the kernel's End of the same rounds.
func toEnd(of []Figure) ([]Figure, error) {
	var series []Series
	for _, end := range of {
		group, ok := strings.CutSuffix(end.Name, "/"+string(filterByEnd))
		if !ok {
			continue
		}
		base := strings.Replace(end.Name, "nf/", "nf-to-end/", 1)
		series = append(series, Series{Name: base, Unit: end.Unit, Better: end.Better, Params: end.Params, Samples: end.Samples})
		for _, f := range of {
			by, ok := strings.CutPrefix(f.Name, group+"/")
			if ok && filterBy(by).ours() {
				series = append(series, Series{
					Name: strings.Replace(f.Name, "nf/", "nf-to-end/", 1), Unit: f.Unit, Better: f.Better, Params: f.Params, Baseline: base, Samples: f.Samples,
				})
			}
		}
	}
	return Figures(series)
}

// withFilter makes the function at the hop netfilter.
func withFilter(d *model.Domain, namespace string, bypass bool) {
	f := &d.Functions[0]
	f.Kind, f.Proxy = model.KindNetfilter, model.NetfilterDetour(f.Name, namespace)
	f.Netfilter = model.Netfilter{Namespace: namespace, Arguments: map[string]uint32{}}
	if bypass {
		f.Netfilter.Bypass, f.Netfilter.Rules = true, bypassRules
	}
	for i := range d.Chains {
		v := uint32(i + 1)
		f.Netfilter.Arguments[fmt.Sprintf("a%d", v)] = v
		d.Chains[i].Arguments = []model.Argument{{Of: 0, Forward: v, Reverse: v}}
	}
}
