package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// goal is what the data path must reach.
type goal struct {
	text   string
	figure string
	want   float64
	value  value
	less   bool // the value must not be above want
	// why it may not be reached: shown if it is not.
	why string
}

// value is what a goal is about; false: not all that it takes was measured.
type value func(f Figure, all map[string]Figure) (x float64, ok bool)

// byRatio is the ratio to the figure's baseline.
func byRatio(f Figure, _ map[string]Figure) (float64, bool) { return f.Ratio, f.Ratio > 0 }

// byTime is how many times as long as another figure it takes.
func byTime(other string) value {
	return func(f Figure, all map[string]Figure) (float64, bool) {
		o, ok := all[other]
		return f.Median / o.Median, ok
	}
}

// moreThan is how much more than another figure it is, for each of n.
func moreThan(other string, n float64) value {
	return func(f Figure, all map[string]Figure) (float64, bool) {
		o, ok := all[other]
		return (f.Median - o.Median) / n, ok
	}
}

// itself is the figure's median.
func itself(f Figure, _ map[string]Figure) (float64, bool) { return f.Median, true }

// Reasons that several goals share.
const (
	whyChecks  = "The goal is what a prototype without checks reached. This data path also checks every header as RFC 8754 asks, the proof's TLV, the path's source and the block of the next segment, and counts; each check is in the tests."
	whyWindow  = "The stamp of every hop is computed anew, one after the other, and eBPF has no rotation of words; and every number is looked up in a replay window and entered, with an atomic operation on a shared line. The goal is of a verdict without a window."
	whyHosts   = "With super-packets whole, TCP in the hosts takes most of the time: path/NAME/offload-on is what nodes and links take of it, and what they save there is a few percent of the whole, as is the spread from run to run."
	whyFrames  = "Each frame goes through the kernel's stack on six nodes for all schemes; our programs save the look-ups of SRv6, not the stack. path/NAME/offload-off is that without TCP in the hosts."
	whyXDP     = "Without offloads TCP in the hosts takes the larger part of both CPUs, for all schemes alike; what the nodes save on XDP is a part of the rest."
	whyList    = "The segments behind the function are visits of one node, each with a stamp of its own, and keyed's verdict computes a hash for each of them."
	whyTrip    = "Runs are of two kinds: where the CPU's caches keep all of it for the millisecond between requests, a round trip takes half as long, and ours are the quicker ones. Where something else uses the caches meanwhile, programs and tables have to be fetched again, of which each of the six nodes has its own, while the kernel's code is one for all of them. rtt-dense leaves no time for that."
	whyTables  = "Entries of so many chains do not fit into the CPU's caches. Each packet here is of another chain than the last, so that every entry, counter and window that it needs comes from memory."
	whyPerHop  = "SipHash of three words takes that long on this CPU; it is computed one hop after the other, since each takes the last one's result."
	whyCutting = "A super-packet that is cut for a function comes back frame by frame, and each is looked up, gets its header and is stamped and verified for itself."
	whyStreams = "A part ends and another begins at the function's node, which verifies and stamps each segment once more than a node that forwards, on the CPU that also moves the bytes."
	whyTail    = "On XDP, packets with labels come to their programs by a tail call, and find the end of a stack, which has no length, by reading it."
	whySpread  = "The rounds of this run spread by a third, with the goal among them; a run of another machine came to 0.98."
	whyTags    = "No helper of the kernel says that a packet has labels, or has none any more: two VLAN tags are pushed and popped for it."
	whyNode    = "Strip, the header kept, the stamp and the way back are on top of what netfilter and forwarding take, where the kernel's static way makes its header from a route."
	whyOwn     = "The way into the namespace and back is two veth pairs, one of them with its queue, and packets enter the namespace one by one where the static way forwards lists that GRO made."
	whyProxy   = "Taking the header off and putting it back is a table entry written, found and removed per packet, which plain routing does not have."
	whySealed  = "Client, gateway, functions, origin and all nodes share the machine's CPUs: what one more stage takes, all others lack. A function opens and seals record by record with crypto/tls, a system call each, and looks for its signature in between."
	whyGateway = "The gateway is in Go (crypto/tls, net/http), and what goes on is sealed and stamped at each node; HAProxy has neither chain nor stamp."
	whyShaking = "The two handshakes take about half a millisecond by themselves (ADR 0109), most of it the exchange of keys (X25519MLKEM768) that each connection has of its own. What takes the rest has not been found."
	whyFleet   = "Whatever the file changes, its 10 000 chains are parsed and checked (0.4 s of CPU time), the records of 1000 nodes are looked at, and the garbage of both is collected; members share the machine's CPUs with the controller."
	whyCompile = "One chain took from 6.2 to 12.9 ms in seven rounds. In CPU time, beside other load, it was a fiftieth to a sixtieth of all (ADR 0130)."
	whyRotated = "All agents apply a plan each second on the CPUs that also carry the stream."
)

func goals() []goal {
	many := fmt.Sprintf("scale/end-keyed/chains-%d", chainsMax)
	return []goal{
		{"End + opot on XDP: × the packet rate of the kernel's unstamped End", "hop/end-opot/xdp", 3.7, byRatio, false, whyChecks},
		{"End + opot on XDP: × the time of a bare XDP redirect", "hop/end-opot/xdp", 1.3, byTime("hop/redirect/xdp"), true, whyChecks},
		{"End + keyed on XDP: × the kernel's End", "hop/end-keyed/xdp", 3.4, byRatio, false, whyChecks},
		{"headend with first stamp on XDP: × the kernel's H.Encaps", "hop/headend-opot/xdp", 4, byRatio, false, whyChecks},
		{"verify opot and decapsulate on XDP: × the kernel's End.DT6", "hop/verify-opot/xdp", 3, byRatio, false, whyWindow},
		{"verify keyed and decapsulate on XDP: × the kernel's End.DT6", "hop/verify-keyed/xdp", 3, byRatio, false, whyWindow},
		{"the stamp alone, opot: ns more than the least proof (pot)", "stamp/end-opot/xdp/segments-3", 10, moreThan("stamp/end-pot/xdp/segments-3", 1), true, ""},
		{"the stamp alone, keyed: ns more than the least proof (pot)", "stamp/end-keyed/xdp/segments-3", 30, moreThan("stamp/end-pot/xdp/segments-3", 1), true, whyPerHop},
		{"the verdict alone, keyed: ns per hop, from 2 to 16 segments", "stamp/verify-keyed/xdp/segments-16", 30, moreThan("stamp/verify-keyed/xdp/segments-2", 14), true, whyPerHop},
		{"the verdict alone, opot, 16 segments: ns more than with 2", "stamp/verify-opot/xdp/segments-16", 30, moreThan("stamp/verify-opot/xdp/segments-2", 1), true, "The list is compared entry by entry with the plan's, at about 2 ns each."},
		{"TCP, offloads on, opot: × the kernel's SRv6", "tcp/opot/offload-on", 1.03, byRatio, false, whyHosts},
		{"TCP, offloads on, opot: × plain IPv6", "tcp-to-ipv6/opot/offload-on", 1, byRatio, false, whyHosts},
		{"TCP, offloads on, keyed: × the kernel's SRv6", "tcp/keyed/offload-on", 1.03, byRatio, false, whyHosts},
		{"TCP, offloads on, keyed: × plain IPv6", "tcp-to-ipv6/keyed/offload-on", 1, byRatio, false, whyHosts},
		{"TCP, offloads off, opot on TC: × the kernel's SRv6", "tcp/opot/offload-off", 1.4, byRatio, false, whyFrames},
		{"TCP, offloads off, opot on TC: × plain IPv6", "tcp-to-ipv6/opot/offload-off", 1, byRatio, false, whyFrames},
		{"TCP, offloads off, keyed on TC: × the kernel's SRv6", "tcp/keyed/offload-off", 1.4, byRatio, false, whyFrames},
		{"TCP, offloads off, opot on XDP: × the kernel's SRv6", "tcp/opot-xdp/offload-off", 1.8, byRatio, false, whyXDP},
		{"TCP, offloads off, opot on XDP: × plain IPv6", "tcp-to-ipv6/opot-xdp/offload-off", 1, byRatio, false, whyXDP},
		{"TCP, offloads off, keyed on XDP: × the kernel's SRv6", "tcp/keyed-xdp/offload-off", 1.8, byRatio, false, whyXDP},
		{"round trip, offloads on, opot: × as quick as the kernel's SRv6", "rtt/opot/offload-on", 1, byRatio, false, whyTrip},
		{"round trip, offloads on, keyed: × as quick as the kernel's SRv6", "rtt/keyed/offload-on", 1, byRatio, false, whyTrip},
		{"the same, requests following closely, opot", "rtt-dense/opot/offload-on", 1, byRatio, false, whyTrip},
		{"the same, requests following closely, keyed", "rtt-dense/keyed/offload-on", 1, byRatio, false, whyTrip},
		{fmt.Sprintf("End + keyed, %d chains: × the time of one chain, beyond the generator's own", chainsMax), many, 1.1, beyondGenerator, true, whyTables},
		{"End + opot, 16 segments: × the time of 2", "scale/end-opot/segments-16", 1.1, byTime("scale/end-opot/segments-2"), true, ""},
		{"TCP through a function, super-packets whole: × plain routing", "proxy/tcp/unaware", 0.97, byRatio, false, whyProxy},
		{"TCP through a function, super-packets whole: × the kernel's static proxy", "proxy/tcp-to-static/unaware", 1.25, byRatio, false, whyHosts},
		{"TCP through a function, super-packets cut: × plain routing", "proxy/tcp-cut/unaware", 0.97, byRatio, false, whyCutting},
		{"TCP through a function, super-packets cut: × the kernel's static proxy", "proxy/tcp-cut-to-static/unaware", 1.25, byRatio, false, whyCutting},
		{"packets of a function that find their header, cache large enough: part", "proxy/tcp/unaware", 1, found, false, ""},
		{"the same, super-packets cut", "proxy/tcp-cut/unaware", 1, found, false, ""},
		{"the same, 1 % dropped", "proxy/drop/unaware", 1, found, false, ""},
		{"the same, 5 ms in the function, 10 000 headers", "proxy/delay/unaware-10000", 1, found, false, ""},
		{"TCP through a function, 16 segments: × the rate with 2", "proxy/segments/16", 0.97, byRatio, false, whyList},
		{"netfilter, flow past the rules, XDP: × the kernel's static way", "nf/size-126/bypass-xdp", 3, byRatio, false, ""},
		{"the same: × the kernel's End", "nf-to-end/size-126/bypass-xdp", 2.5, byRatio, false, ""},
		{"netfilter, flow past the rules, TC: × the kernel's static way", "nf/size-126/bypass", 1.6, byRatio, false, ""},
		{"the same: × the kernel's End", "nf-to-end/size-126/bypass", 1.3, byRatio, false, ""},
		{"netfilter of the node: × the kernel's static way", "nf/size-126/node", 1.1, byRatio, false, whyNode},
		{"the same: × the kernel's End", "nf-to-end/size-126/node", 0.95, byRatio, false, whyNode},
		{"netfilter of a namespace: × the kernel's static way", "nf/size-126/own", 0.95, byRatio, false, whyOwn},
		{"netfilter of the node, one packet: × as quick as the static way", "nf/latency-median/node", 1, byRatio, false, whyNode},
		{"netfilter of a namespace, one packet: × as quick as the static way", "nf/latency-median/own", 1, byRatio, false, whyOwn},
		{"netfilter, flow past the rules, one packet: × as quick as the kernel's End", "nf-to-end/latency-median/bypass", 1, byRatio, false, ""},
		{"netfilter of the node, 128 rules: × what they add to plain forwarding", "nf/rules-128/node", 1.1, added("nf/rules-%d/node", "nf/rules-%d/ip", 1, 128), true, ""},
		{"netfilter of a namespace, 128 rules: × what they add to plain forwarding", "nf/rules-128/own", 1.1, added("nf/rules-%d/own", "nf/rules-%d/ip", 1, 128), true, ""},
		{"netfilter, 1024 arguments: × the time of one", "nf/arguments-1024/own", 1.1, byTime("nf/arguments-1/own"), true, whyTables},
		{"TCP through netfilter of the node, offloads on: × the same rules by plain routing", "nf/tcp-on/node", 0.97, byRatio, false, whyHosts},
		{"TCP through netfilter of a namespace, offloads on: × the same rules by plain routing", "nf/tcp-on/own", 0.97, byRatio, false, whyHosts},
		{"TCP past netfilter, offloads on: × the same rules by plain routing", "nf/tcp-on/bypass", 0.97, byRatio, false, whyHosts},
		{"TCP through a function on byte streams, one transfer: × plain routing", "streams/one/identity", 1, byRatio, false, whyStreams},
		{"the same, a connection for each 100 KB", "streams/size-100KB/identity", 1, byRatio, false, whyStreams},
		{"the same, a connection for each 10 MB", "streams/size-10MB/identity", 1, byRatio, false, whyStreams},
		{"the same, a connection for each 1 KB, links of 1 ms", "streams/size-1KB/identity", 0.95, byRatio, false, whyStreams},
		{"the same, a connection for each 1 KB, the node's CPU at its limit: × HAProxy", "streams-to-haproxy/size-1KB/identity", 1, byRatio, false, whyStreams},
		{"the same, 1 % lost and 25 ms on all links: × plain routing", "streams/loss-all/identity", 1.8, byRatio, false, ""},
		{"the same, 2 % lost and 50 ms behind the function's node", "streams/loss-behind/identity", 0.95, byRatio, false, ""},
		{"two functions that change each byte, links of 1 Gbit/s: × plain routing", "streams/two/xor", 1, byRatio, false, whyStreams},
		{"a function that changes each byte: × one that copies it", "streams/work-1/xor", 0.8, byRatio, false, ""},
		{"memory of the worker for an idle connection, in bytes", "streams/idle/identity", 1024, itself, true, ""},
		{"SYN to SYN-ACK where the client waits for the server: µs more than plain routing", "streams/connect/identity", 200, moreThan("streams/connect/router", 1), true, ""},
		{"download through a function that reads what is sealed: × through one that sees headers", "zt/throughput/intrusive-1", 0.72, byRatio, false, whySealed},
		{"the same, six functions", "zt/throughput/intrusive-6", 0.35, byRatio, false, whySealed},
		{"the same, six operations of one function: × six functions on one node that see headers", "zt/throughput/one-node-6", 0.6, byRatio, false, whySealed},
		{"the same, one function, links at the paper's 2.15 Gbit/s", "zt/paper-rate/intrusive-1", 0.95, byRatio, false, whySealed},
		{"the same, six functions, links at the paper's 1.55 Gbit/s", "zt/paper-rate/intrusive-6", 0.75, byRatio, false, whySealed},
		{"page of nine files through a function that reads what is sealed: × the time through one that sees headers", "zt/page/intrusive-1", 1.3, byTime("zt/page/forward-1"), true, whySealed},
		{"the same, six functions", "zt/page/intrusive-6", 2, byTime("zt/page/forward-6"), true, whySealed},
		{"CPU time of a function that reads what is sealed: × the gateway's", "zt/cpu/function-to-gateway/intrusive-1", 1, byTime("zt/cpu/gateway/intrusive-1"), true, whySealed},
		{"CPU time of a new connection at a function between two ends, whose sessions are resumed, µs", "zt/connection/intrusive-2", 600, itself, true, whyShaking},
		{"a gateway, one large download by HTTP/1.1: × HAProxy without a chain", "zt/gateway/bulk", 1, byRatio, false, whyGateway},
		{"the same by HTTP/2", "zt/gateway/bulk-http2", 0.9, byRatio, false, whyGateway},
		{"the same, requests for 1 KB", "zt/gateway/requests", 0.75, byRatio, false, whyGateway},
		{"a new epoch of one path where a node holds 8000: × the speed where it holds one", "control/change/paths-8000", 0.67, byRatio, false, ""},
		{"one chain of 10 000 changed, 1000 members, until all have acknowledged: ms", "control/one-chain/agents-1000", 1000, itself, true, whyFleet},
		{"compiling one chain of 10 000: × as fast as compiling all", "control/compile/one-of-10000", 50, byRatio, false, whyCompile},
		{"the controller's heap behind 10 000 changes: × before", "control/memory/controller-heap/changes-10000", 1.1, byTime("control/memory/controller-heap/changes-0"), true, ""},
		{"the same, its store's file", "control/memory/controller-store/changes-10000", 1.1, byTime("control/memory/controller-store/changes-0"), true, ""},
		{"the same, the heap of a node's data path", "control/memory/node-heap/changes-10000", 1.1, byTime("control/memory/node-heap/changes-0"), true, ""},
		{"TCP while all secrets rotate each second: × without", "control/tcp-under-change/rotate", 0.98, byRatio, false, whyRotated},
		{"End + keyed over labels on XDP: × the packet rate over SRv6", "mpls/end-keyed-xdp/labels", 1, byRatio, false, whyTail},
		{"the same, opot", "mpls/end-opot-xdp/labels", 1, byRatio, false, whyTail},
		{"End + keyed over labels on TC: × the packet rate over SRv6", "mpls/end-keyed-tc/labels", 1, byRatio, false, ""},
		{"headend + keyed over labels on XDP: × SRv6", "mpls/headend-keyed-xdp/labels", 1, byRatio, false, whyTail},
		{"the same, 16 segments", "mpls/headend-keyed-xdp/labels/segments-16", 1, byRatio, false, ""},
		{"headend + keyed over labels on TC: × SRv6", "mpls/headend-keyed-tc/labels", 1, byRatio, false, whyTags},
		{"verify keyed over labels on XDP: × SRv6", "mpls/verify-keyed-xdp/labels", 1, byRatio, false, whyTail},
		{"verify keyed over labels on TC: × SRv6", "mpls/verify-keyed-tc/labels", 0.75, byRatio, false, whyTags},
		{"TCP over labels, offloads off: × SRv6", "mpls/tcp/offload-off/labels", 1, byRatio, false, whyTags},
		{"TCP through a function, labels for 10 visits: × the rate with 2", "mpls/labels-10/content", 0.98, byRatio, false, whyList},
		{"the same, recognised by metadata", "mpls/labels-10/metadata", 0.98, byRatio, false, whyList},
		{"the same, hosts send frames", "mpls/labels-10/frames", 0.98, byTime("mpls/labels-2/frames"), false, whyList},
		{"labels taken off for a function, 10 visits: × the time with 2", "mpls/labels-10/strip", 1.03, byTime("mpls/labels-2/strip"), true, ""},
		{"labels given back behind it, 10 visits: × the time with 2", "mpls/labels-10/return", 1.03, byTime("mpls/labels-2/return"), true, whySpread},
		{"packets of a function that find their labels, 1 % dropped: part", "mpls/drop/content", 1, found, false, ""},
		{"the same, 5 ms in the function, 10 000 headers", "mpls/delay/content-10000", 1, found, false, ""},
	}
}

// added is what the step from few to many adds to a figure, as a multiple of what it adds to
// another. Both are formats of names.
func added(of, other string, few, many int) value {
	return func(_ Figure, all map[string]Figure) (float64, bool) {
		var x [4]float64
		for i, name := range []string{fmt.Sprintf(of, many), fmt.Sprintf(of, few), fmt.Sprintf(other, many), fmt.Sprintf(other, few)} {
			f, ok := all[name]
			if !ok {
				return 0, false
			}
			x[i] = f.Median
		}
		return (x[0] - x[1]) / (x[2] - x[3]), x[2] > x[3]
	}
}

// found is the part of the packets that came back from a function that found
// their header.
func found(f Figure, _ map[string]Figure) (float64, bool) {
	back := f.Params["tx_success"] + f.Params["tx_not_cached"]
	return f.Params["tx_success"] / back, back > 0
}

// beyondGenerator is how many times as long a packet takes at the node with many
// chains, without what the generator takes longer.
func beyondGenerator(f Figure, all map[string]Figure) (float64, bool) {
	one, ok := all["scale/end-keyed/chains-1"]
	dropMany, ok2 := all[fmt.Sprintf("scale/drop/chains-%d", chainsMax)]
	dropOne, ok3 := all["scale/drop/chains-1"]
	return (f.Median - dropMany.Median) / (one.Median - dropOne.Median), ok && ok2 && ok3
}

// Page is docs/performance.md: goals, what has to be known of them, and plots, which are
// in a folder beside it. The figures are on a page of their own.
func (r Result) Page(plots []string) string {
	var b strings.Builder
	b.WriteString("# Performance\n\n")
	b.WriteString("Goals and plots; [all figures](performance/figures.md), and how they were measured, are on a page of their own. Both are made by\n`waystamp bench docs docs/performance/results.json docs`; do not edit. To repeat every figure: `waystamp bench all --out DIR`, or the\nsame with `--quick`, with fewer and shorter runs. One figure again, beside its baseline: `waystamp bench hop --only NAME`; each group\nof figures says which part it is of.\n\n")
	r.goals(&b, true)
	r.measured(&b)
	list(&b, "To be known", r.Notes)
	b.WriteString("\n## Plots\n")
	names, _ := r.groups()
	for _, g := range names {
		of := ofGroup(plots, g)
		if len(of) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n[%s](performance/figures.md#%s):\n", g, g)
		for _, p := range of {
			fmt.Fprintf(&b, "![%s](performance/%s.svg)\n", p, p)
		}
	}
	return b.String()
}

// FiguresPage is docs/performance/figures.md: how figures were measured, and all of them.
func (r Result) FiguresPage() string {
	var b strings.Builder
	b.WriteString("# Figures\n\nMade by `waystamp bench docs docs/performance/results.json docs`; do not edit. [Goals and plots](../performance.md).\n\n")
	r.measured(&b)
	list(&b, "How", r.Setup)
	r.tables(&b, nil)
	return b.String()
}

// goals is a table of what must be reached, and what was; every: also of goals
// that nothing was measured for. Below it is why those are not reached that are
// not.
func (r Result) goals(b *strings.Builder, every bool) {
	all := map[string]Figure{}
	for _, f := range r.Figures {
		all[f.Name] = f
	}
	rows := 0
	var reasons []string // each once, with the goals that it is of
	for _, g := range goals() {
		f, ok := all[g.figure]
		if !ok && !every {
			continue
		}
		if rows++; rows == 1 {
			b.WriteString("## Goals\n\n| goal | figure | wanted | measured | |\n|---|---|---:|---:|---|\n")
		}
		sign := "≥"
		if g.less {
			sign = "≤"
		}
		x := 0.0
		if ok {
			x, ok = g.value(f, all)
		}
		measured, verdict := "–", "not measured"
		if ok {
			measured, verdict = fmt.Sprintf("%.2f", x), "reached"
			if x == f.Ratio && f.RatioLow > 0 {
				measured += fmt.Sprintf(" (%.2f–%.2f)", f.RatioLow, f.RatioHigh)
			}
			switch {
			case f.Disturbed > 0:
				verdict = "not judged: others used the machine"
			case !g.reached(x):
				verdict = "not reached"
				if g.why != "" {
					if !slices.Contains(reasons, g.why) {
						reasons = append(reasons, g.why)
					}
					verdict += fmt.Sprintf(" [%d]", slices.Index(reasons, g.why)+1)
				}
			}
		}
		fmt.Fprintf(b, "| %s | %s | %s %.2f | %s | %s |\n", g.text, g.figure, sign, g.want, measured, verdict)
	}
	if rows > 0 {
		b.WriteString("\n")
	}
	if len(reasons) > 0 {
		b.WriteString("Why not:\n\n")
		for i, why := range reasons {
			fmt.Fprintf(b, "%d. %s\n", i+1, why)
		}
		b.WriteString("\n")
	}
}

func (g goal) reached(x float64) bool {
	if g.less {
		return x <= g.want
	}
	return x >= g.want
}

// WritePage writes dir/performance.md, and the page of figures and the plots to
// dir/performance.
func WritePage(r Result, dir string) error {
	folder := filepath.Join(dir, "performance")
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return fmt.Errorf("make the folder of the plots: %w", err)
	}
	// Figures of an older result may have had others.
	for _, format := range plotFormats {
		old, err := filepath.Glob(filepath.Join(folder, "*."+format))
		if err != nil {
			return fmt.Errorf("look for old plots: %w", err)
		}
		for _, name := range old {
			if err := os.Remove(name); err != nil {
				return fmt.Errorf("remove an old plot: %w", err)
			}
		}
	}
	plots, err := r.Plots(folder)
	if err != nil {
		return err
	}
	slices.Sort(plots)
	for name, page := range map[string]string{"performance.md": r.Page(plots), "performance/figures.md": r.FiguresPage()} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(page), 0o666); err != nil {
			return fmt.Errorf("write the page: %w", err)
		}
	}
	return nil
}
