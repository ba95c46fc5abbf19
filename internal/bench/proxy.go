package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

// The network of the paper on the caching SFC proxy, with nodes for its virtual
// machines: h1, r1, r2 with the function, r3, h2. Traffic of both directions
// passes the function. The second chain is h3 to h4.
const (
	proxyMTU   = 2000 // of the links between nodes and of the function's
	proxyDelay = 5 * time.Millisecond
	proxyDrop  = 100 // of so many packets the function drops one
	proxyCache = 10000
	proxyTo    = "fn-to"
	proxyFrom  = "fn-from"

	tableToFunction   = 100
	tableFromFunction = 101
)

var (
	proxyHosts    = [][2]string{{"h1", "h2"}, {"h3", "h4"}} // of each chain
	proxyPrefixes = [][2]netip.Prefix{
		{netip.MustParsePrefix("fc00:7::/64"), netip.MustParsePrefix("fc00:8::/64")},
		{netip.MustParsePrefix("fc00:9::/64"), netip.MustParsePrefix("fc00:a::/64")},
	}
	proxyNAT    = netip.MustParseAddr("fc00:33::1")
	proxyInside = netip.MustParseAddr("fe80::2") // the function, on the link of fn-to
)

// proxyWay is how packets get to the function and on.
type proxyWay uint8

const (
	wayPlain  proxyWay = iota // routing, no SRv6 at all
	wayStatic                 // the kernel's End.DT6 before the function, and H.Encaps again behind it
	wayOurs
)

// proxyFunction is what the function does.
type proxyFunction uint8

const (
	functionForwards proxyFunction = iota
	functionDrops
	functionDelays
	functionNAT // in the node's own kernel
)

// proxyCase is one network that is measured.
type proxyCase struct {
	name      string // "": it is in names of cases
	way       proxyWay
	function  proxyFunction
	metadata  bool // ours: recognise metadata, else content
	cut       bool // frames go to the function, else super-packets
	frames    bool // hosts send frames, else super-packets
	cache     int  // ours; 0: proxyCache
	chains    int  // 0: one
	segments  int  // ours; 0: two
	labels    bool // ours: over labels, not SRv6
	params    map[string]float64
	flood     flood
	baselines []string
}

func (c proxyCase) count() int { return max(c.chains, 1) }

// domain is the case's; the lab of the other ways has the same function, and no
// agents.
func (c proxyCase) domain() (model.Domain, model.Lab) {
	d := model.Domain{Block: netip.MustParsePrefix(block)}
	l := model.Lab{MTU: proxyMTU, Links: []model.LabLink{{A: "r1", B: "r2"}, {A: "r2", B: "r3"}}}
	face := func(name string, role model.Role, mtu int) model.Interface {
		return model.Interface{Name: name, Role: role, Datapath: model.DatapathTC, MTU: mtu}
	}
	interfaces := map[string][]model.Interface{
		"r1": {face("r1-r2", model.RoleCore, proxyMTU)},
		"r2": {face("r2-r1", model.RoleCore, proxyMTU), face("r2-r3", model.RoleCore, proxyMTU)},
		"r3": {face("r3-r2", model.RoleCore, proxyMTU)},
	}
	functions := []string{"fn"}
	for i := 2; i < c.segments; i++ {
		name := fmt.Sprintf("f%d", i)
		functions = append(functions, name)
		d.Functions = append(d.Functions, model.Function{Name: name, Node: "r3"})
	}
	for i := range c.count() {
		for side, node := range []string{"r1", "r3"} {
			h := proxyHosts[i][side]
			l.Hosts = append(l.Hosts, model.LabHost{Name: h, Node: node, Prefix: proxyPrefixes[i][side]})
			interfaces[node] = append(interfaces[node], face(node+"-"+h, model.RoleEdge, 0))
		}
		d.Chains = append(d.Chains, model.Chain{
			Name: fmt.Sprintf("c%d", i+1), Ingress: []string{"r1"}, Functions: functions, Egress: "r3", Both: true,
			Match: model.Match{Destination: proxyPrefixes[i][1]}, Proof: model.Proof{Scheme: model.SchemeKeyed},
		})
	}
	for i, name := range []string{"r1", "r2", "r3"} {
		d.Nodes = append(d.Nodes, model.Node{
			Name: name, Address: netip.MustParseAddr(fmt.Sprintf("fc00:%d::1", i+1)),
			Locator: netip.MustParsePrefix(fmt.Sprintf("fc00:0:0:%d00::/56", i+1)), Interfaces: interfaces[name],
		})
	}
	if c.labels {
		d.MPLS = &model.MPLS{Services: serviceLabels, MTU: proxyMTU}
		for i := range d.Nodes {
			d.Nodes[i].MPLS = &model.NodeMPLS{Label: nodeLabels + uint32(i), Address: d.Nodes[i].Address}
		}
		for i := range d.Chains {
			d.Chains[i].Encapsulation.Type = model.EncapsulationSRMPLS
		}
	}
	p := model.Proxy{To: proxyTo, From: proxyFrom, Via: proxyInside, Cache: proxyCache, Lifetime: time.Second, Segments: model.SegmentsKeep}
	if c.cache > 0 {
		p.Cache = c.cache
	}
	if c.cut && !c.metadata { // an index stays with whole packets; over labels they are frames
		p.Segments = model.SegmentsCut
	}
	if c.metadata {
		p.Recognise = model.RecogniseMetadata
	}
	made := model.LabFunction{Name: "fn", Kind: model.LabForward}
	switch c.function {
	case functionDrops:
		made.Kind = model.LabNftables
		made.Ruleset = fmt.Sprintf("table ip6 fn { chain forward { type filter hook forward priority filter; numgen random mod %d 0 counter drop; }; }\n", proxyDrop)
	case functionNAT:
		p = model.Proxy{Local: true, Recognise: model.RecogniseMetadata, Rewrites: true, Segments: model.SegmentsKeep, Cache: p.Cache, Lifetime: p.Lifetime}
		made.Kind = model.LabNftables
		made.Ruleset = fmt.Sprintf("table ip6 fn { chain out { type nat hook postrouting priority srcnat; ip6 saddr %s ip6 daddr %s snat to %s; }; }\n",
			proxyPrefixes[0][0], proxyPrefixes[0][1], proxyNAT)
	}
	d.Functions = append([]model.Function{{Name: "fn", Node: "r2", Kind: model.KindUnaware, Proxy: p}}, d.Functions...)
	l.Functions = []model.LabFunction{made}
	return d, l
}

// proxyTrack is a lab of one case, with servers on the receiving hosts.
type proxyTrack struct {
	proxyCase
	lab     *lab.Lab
	servers []func()
	delayer *delayer
	flooder *flooder
}

func newProxyTrack(ctx context.Context, cfg Config, c proxyCase) (_ *proxyTrack, err error) {
	d, l := c.domain()
	t := &proxyTrack{proxyCase: c}
	if t.lab, err = lab.Up(ctx, lab.Config{Domain: d, Lab: l, Binary: cfg.Binary, Own: true, WithoutAgents: c.way != wayOurs, Log: cfg.Log}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	if err := t.offloads(); err != nil {
		return nil, err
	}
	if err := t.routes(); err != nil {
		return nil, err
	}
	if c.function == functionDelays {
		if err := t.startDelayer(); err != nil {
			return nil, err
		}
	}
	if c.flood.what != floodNone {
		t.flooder, err = newFlooder(floodWay{
			flood: c.flood, lab: t.lab, payload: floodPayload, cut: c.cut, function: "r2",
			source: proxyPrefixes[0][0].Addr().Next().Next(), to: netip.MustParseAddr("fc00:8::99"),
			out: interfaceOf{"h1", "h1-r1"}, first: interfaceOf{"r1", "r1-h1"},
			last: interfaceOf{"r3", "r3-h2"}, sink: interfaceOf{"h2", "h2-r3"},
		}, cfg.cpu())
		return t, err
	}
	for i := range c.count() {
		stop, err := serveTCP(ctx, t.lab, proxyHosts[i][1], t.address(i))
		if err != nil {
			return nil, err
		}
		t.servers = append(t.servers, stop)
	}
	return t, nil
}

// address is that of the receiving host of a chain.
func (t *proxyTrack) address(chain int) netip.Addr {
	b := proxyPrefixes[chain][1].Addr().As16()
	b[15] = 2
	return netip.AddrFrom16(b)
}

// on does something to a member's network.
func (t *proxyTrack) on(name string, f func(*host.Net) error) error { return onMember(t.lab, name, f) }

// offloads makes links leave super-packets whole, and cuts them, where they
// shall be cut, on the way into the function.
func (t *proxyTrack) offloads() error {
	for _, m := range t.lab.Members() {
		err := t.on(m.Name, func(n *host.Net) error {
			links, err := n.Links()
			if err != nil {
				return err
			}
			for _, l := range links {
				if l.Kind != "veth" || strings.HasPrefix(l.Name, "ws") {
					continue
				}
				whole := !(t.cut && m.Name == "r2" && (l.Name == proxyTo || l.Name == proxyFrom)) &&
					!(t.frames && slices.ContainsFunc(proxyHosts, func(h [2]string) bool { return m.Name == h[0] || m.Name == h[1] }))
				err := errors.Join(
					n.SetOffload(l.Name, host.TSO, whole), n.SetOffload(l.Name, host.GSO, whole),
					// What is cut for the function stays cut.
					n.SetOffload(l.Name, host.GRO, !t.cut))
				if !whole && t.function == functionDelays {
					// Nobody completes checksums behind here.
					err = errors.Join(err, n.SetOffload(l.Name, host.TransmitSum, false))
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// routes leads packets through the function where waystamp does not.
func (t *proxyTrack) routes() error {
	if t.function == functionNAT {
		// The way of answers to r2, whose second link ends at r3.
		return t.on("r3", func(n *host.Net) error {
			return n.AddRoute(host.Route{Destination: netip.PrefixFrom(proxyNAT, 128), Via: netip.MustParseAddr("fe80::2"), Device: "r3-r2"})
		})
	}
	if t.way == wayOurs {
		return nil
	}
	err := t.on("r2", func(n *host.Net) error {
		for i := range t.count() {
			for _, p := range proxyPrefixes[i] {
				if err := n.AddRoute(host.Route{Destination: p, Via: proxyInside, Device: proxyTo, Table: tableToFunction}); err != nil {
					return err
				}
			}
		}
		if t.way == wayPlain {
			return errors.Join(n.AddRule(host.Rule{Priority: 100, Input: "r2-r1", Table: tableToFunction}),
				n.AddRule(host.Rule{Priority: 100, Input: "r2-r3", Table: tableToFunction}))
		}
		return n.AddRule(host.Rule{Priority: 100, Input: proxyFrom, Table: tableFromFunction})
	})
	if err != nil || t.way == wayPlain {
		return err
	}
	return t.kernelProxy()
}

// kernelProxy is the kernel's static way: a function's node takes the header off,
// and makes another one for what comes back. The list ends at the function, since
// End.DT6 takes no packet that has segments left.
func (t *proxyTrack) kernelProxy() error {
	sid := func(i int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fc00:0:0:%d00::", i)) }
	for i := 1; i <= 3; i++ {
		err := t.on(fmt.Sprintf("r%d", i), func(n *host.Net) error {
			links, err := n.Links()
			if err != nil {
				return err
			}
			keys := []string{"all", "default"}
			for _, l := range links {
				if l.Kind == "veth" {
					keys = append(keys, l.Name)
				}
			}
			for _, key := range keys {
				if err := n.SetSysctl("net/ipv6/conf/"+key+"/seg6_enabled", "1"); err != nil {
					return err
				}
			}
			if err := n.SetTunnelSource(netip.MustParseAddr(fmt.Sprintf("fc00:%d::1", i))); err != nil {
				return err
			}
			encap := func(side, table int, device string, list ...netip.Addr) error {
				for c := range t.count() {
					r := host.Route{Destination: proxyPrefixes[c][side], Type: host.RouteEncap, Device: device, Segments: list, Table: table}
					if err := n.ReplaceRoute(r); err != nil {
						return err
					}
				}
				return nil
			}
			at := netip.PrefixFrom(sid(i), 64)
			switch i {
			case 1:
				return errors.Join(n.AddKernelEgress(at, "r1-r2", 0), encap(1, 0, "r1-r2", sid(2)))
			case 2:
				return errors.Join(n.AddKernelEgress(at, "r2-r1", tableToFunction),
					encap(1, tableFromFunction, "r2-r3", sid(3)), encap(0, tableFromFunction, "r2-r1", sid(1)))
			}
			return errors.Join(n.AddKernelEgress(at, "r3-r2", 0), encap(0, 0, "r3-r2", sid(2)))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// startDelayer puts a program in the place of the function's kernel.
func (t *proxyTrack) startDelayer() error {
	var next [6]byte
	err := t.on("r2", func(n *host.Net) (err error) {
		next, err = n.HardwareAddress(proxyFrom)
		return err
	})
	if err != nil {
		return err
	}
	return t.on("fn", func(n *host.Net) (err error) {
		if err := n.SetSysctl("net/ipv6/conf/all/forwarding", "0"); err != nil {
			return err
		}
		t.delayer, err = newDelayer(n, proxyTo, proxyFrom, next, proxyDelay, 0)
		return err
	})
}

// load sends over all chains at once for that long and returns bits per second of
// TCP payload that arrived.
func (t *proxyTrack) load(ctx context.Context, d time.Duration) (float64, error) {
	var mu sync.Mutex
	var total float64
	g, ctx := errgroup.WithContext(ctx)
	for i := range t.count() {
		g.Go(func() error {
			bits, err := sendTCP(ctx, t.lab, proxyHosts[i][0], t.address(i), d)
			mu.Lock()
			defer mu.Unlock()
			total += bits
			return err
		})
	}
	err := g.Wait()
	return total, err
}

// counters are those of the function's proxy.
func (t *proxyTrack) counters(ctx context.Context) (api.Function, error) {
	c := agent.NewClient(agent.SocketPath(t.lab.AgentDir("r2")))
	defer c.Close()
	f, err := c.Functions(ctx)
	if err != nil {
		return api.Function{}, err
	}
	i := slices.IndexFunc(f.Functions, func(f api.Function) bool { return f.Function == "fn" })
	if i < 0 {
		return api.Function{}, errors.New("the agent of r2 knows no function fn")
	}
	return f.Functions[i], nil
}

// settled are the counters when what is on its way has arrived.
func (t *proxyTrack) settled(ctx context.Context) (now api.Function, err error) {
	for {
		before := now
		if now, err = t.counters(ctx); err != nil {
			return now, err
		}
		if sameCounts(before, now) {
			return now, nil
		}
		select {
		case <-ctx.Done():
			return now, context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// sameCounts reports whether nothing was counted between two answers. What an answer points to is
// made anew for each.
func sameCounts(a, b api.Function) bool {
	a.InFlight, a.Rules, a.Stream = nil, nil, nil
	b.InFlight, b.Rules, b.Stream = nil, nil, nil
	return a == b
}

// measure is a run: Mbit/s, or ns per packet. What the proxy counted is added to params.
func (t *proxyTrack) measure(ctx context.Context, d time.Duration, params map[string]float64) (float64, error) {
	load := func() (float64, error) {
		bits, err := t.load(ctx, d)
		return bits / 1e6, err
	}
	if t.flooder != nil {
		load = func() (float64, error) { return t.flooder.run(ctx, d) }
	}
	if t.way != wayOurs {
		return load()
	}
	before, err := t.settled(ctx)
	if err != nil {
		return 0, err
	}
	start := time.Now()
	value, err := load()
	if err != nil {
		return 0, err
	}
	seconds := time.Since(start).Seconds()
	after, err := t.settled(ctx)
	if err != nil {
		return 0, err
	}
	for _, c := range proxyCounters {
		params[c.name] += float64(c.of(after) - c.of(before))
	}
	params["seconds"] += seconds
	return value, nil
}

func (t *proxyTrack) close() error {
	for _, stop := range t.servers {
		stop()
	}
	var err error
	if t.delayer != nil {
		err = t.delayer.close()
	}
	if t.flooder != nil {
		err = errors.Join(err, t.flooder.close())
	}
	return errors.Join(err, t.lab.Down(context.Background()))
}

// proxyCounters are shown for each of our cases; the names are those of the
// paper where it has one.
var proxyCounters = []struct {
	name string
	of   func(api.Function) uint64
}{
	{"rx_success", func(c api.Function) uint64 { return c.RxSuccess }},
	{"rx_ignored", func(c api.Function) uint64 { return c.RxIgnored }},
	{"rx_copies", func(c api.Function) uint64 { return c.RxCopies }},
	{"tx_success", func(c api.Function) uint64 { return c.TxSuccess }},
	{"tx_ignored", func(c api.Function) uint64 { return c.TxIgnored }},
	{"tx_not_cached", func(c api.Function) uint64 { return c.TxNotCached }},
	{"evicted", func(c api.Function) uint64 { return c.Evicted }},
	{"expired", func(c api.Function) uint64 { return c.Expired }},
	{"waited_ns", func(c api.Function) uint64 { return c.WaitedNs }},
}

// serveTCP starts iperf3 on a host and returns when it listens. It ends with ctx.
func serveTCP(ctx context.Context, l *lab.Lab, name string, at netip.Addr) (stop func(), err error) {
	ns, err := l.NetNS(name)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	own, cancel := context.WithCancel(ctx)
	cmd := host.Command(own, ns, "iperf3", "--server", "--bind", at.String(), "--forceflush")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("start iperf3, which makes the load: %w; install it (apt-get install iperf3)", err)
	}
	stop = func() {
		cancel()
		cmd.Wait() // it was killed, and says so
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "listening") {
			go io.Copy(io.Discard, out)
			return stop, nil
		}
	}
	stop()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	return nil, errors.New("iperf3 --server ended before it listened")
}

// sendTCP sends one stream from a host for that long and returns bits per second
// of payload that arrived.
func sendTCP(ctx context.Context, l *lab.Lab, from string, to netip.Addr, d time.Duration, args ...string) (float64, error) {
	seconds := strconv.Itoa(max(1, int(d.Round(time.Second).Seconds())))
	out, err := l.Run(ctx, from, append([]string{"iperf3", "--client", to.String(), "--json", "--time", seconds}, args...)...)
	var answer struct {
		Error string `json:"error"`
		End   struct {
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if jsonErr := json.Unmarshal(out, &answer); err == nil {
		err = jsonErr
	}
	var exit *exec.ExitError
	if answer.Error != "" && (err == nil || errors.As(err, &exit)) {
		err = errors.New(answer.Error)
	}
	if err != nil {
		return 0, fmt.Errorf("iperf3 from %s to %s: %w", from, to, err)
	}
	return answer.End.Received.BitsPerSecond, ctx.Err()
}

// proxySection are cases that are measured in the same rounds.
type proxySection struct {
	part  string // names begin with it
	what  string
	cases []proxyCase
}

func proxySections(quick bool) []proxySection {
	delays := []proxyCase{
		{name: "delay/plain", way: wayPlain}, {name: "delay/static", way: wayStatic},
	}
	for _, n := range []int{100, 1000, 2500, 5000, 10000, 100000} {
		delays = append(delays, proxyCase{name: fmt.Sprintf("delay/unaware-%d", n), way: wayOurs, cache: n, baselines: []string{"delay/plain", "delay/static"}})
	}
	if quick {
		delays = append(delays[:4:4], delays[6])
	}
	for i := range delays {
		delays[i].function, delays[i].cut = functionDelays, true
	}
	var segments []proxyCase
	for _, n := range proxySegments {
		c := proxyCase{name: fmt.Sprintf("segments/%d", n), way: wayOurs, segments: n}
		if n > 2 {
			c.baselines = []string{"segments/2"}
		}
		segments = append(segments, c)
	}
	all := append([]proxySection{
		{"", "super-packets whole", []proxyCase{
			{name: "tcp/plain", way: wayPlain}, {name: "tcp/static", way: wayStatic},
			{name: "tcp/unaware", way: wayOurs, baselines: []string{"tcp/plain", "tcp/static"}},
			{name: "tcp/unaware-metadata", way: wayOurs, metadata: true, baselines: []string{"tcp/plain", "tcp/static"}},
		}},
		{"", "super-packets cut", []proxyCase{
			{name: "tcp-cut/plain", way: wayPlain, cut: true}, {name: "tcp-cut/static", way: wayStatic, cut: true},
			{name: "tcp-cut/unaware", way: wayOurs, cut: true, baselines: []string{"tcp-cut/plain", "tcp-cut/static"}},
		}},
		{"", "1 % dropped", []proxyCase{
			{name: "drop/plain", way: wayPlain, cut: true, function: functionDrops}, {name: "drop/static", way: wayStatic, cut: true, function: functionDrops},
			{name: "drop/unaware", way: wayOurs, cut: true, function: functionDrops, baselines: []string{"drop/plain", "drop/static"}},
		}},
		{"", "5 ms in the function", delays},
		{"", "NAT", []proxyCase{
			{name: "nat/plain", way: wayPlain, function: functionNAT},
			{name: "nat/unaware", way: wayOurs, function: functionNAT, metadata: true, baselines: []string{"nat/plain"}},
		}},
		{"", "two chains", []proxyCase{
			{name: "chains-2/plain", way: wayPlain, chains: 2}, {name: "chains-2/static", way: wayStatic, chains: 2},
			{name: "chains-2/unaware", way: wayOurs, chains: 2, baselines: []string{"chains-2/plain", "chains-2/static"}},
		}},
		{"", "segment lists", segments},
	}, floodSections()...)
	for i := range all {
		all[i].part = "proxy"
	}
	return all
}

// proxySegments are the lengths of segment lists that are compared: from the
// shortest, function and egress, to the longest that there is.
var proxySegments = []int{2, 4, 8, 16}

// floodSections are of single packets, by the time that they take.
func floodSections() []proxySection {
	var out []proxySection
	for _, k := range []struct {
		name, what string
		flood      floodKind
		cut        bool
	}{
		{"packet", "packets", floodPackets, false},
		{"super", "super-packets", floodSupers, false},
		{"super-cut", "super-packets, cut", floodSupers, true},
	} {
		f, base := flood{what: k.flood}, []string{k.name + "/plain", k.name + "/static"}
		s := proxySection{"", k.what, []proxyCase{
			{name: base[0], way: wayPlain, cut: k.cut, flood: f}, {name: base[1], way: wayStatic, cut: k.cut, flood: f},
			{name: k.name + "/unaware", way: wayOurs, cut: k.cut, flood: f, baselines: base},
		}}
		if !k.cut {
			s.cases = append(s.cases, proxyCase{name: k.name + "/unaware-metadata", way: wayOurs, metadata: true, flood: f, baselines: base})
		}
		out = append(out, s)
	}
	programs := proxySection{what: "programs"}
	for _, p := range []struct{ name, program string }{{"strip", "ws_core_tc"}, {"return", "ws_function_tc"}} {
		for _, n := range proxySegments {
			c := proxyCase{name: fmt.Sprintf("%s/%d", p.name, n), way: wayOurs, segments: n, flood: flood{floodPackets, p.program}}
			if n != proxySegments[0] {
				c.baselines = []string{fmt.Sprintf("%s/%d", p.name, proxySegments[0])}
			}
			programs.cases = append(programs.cases, c)
		}
	}
	return append(out, programs)
}

// Proxy repeats the experiments of the paper on the caching SFC proxy.
func Proxy(ctx context.Context, c Config) (_ Result, err error) {
	r := c.begin("proxy",
		"The network of the paper on the caching SFC proxy, of namespaces and veth pairs: h1, r1, r2 with the function behind fn-to and fn-from, r3, h2. Traffic of both directions passes the function. Links have an MTU of 2000, hosts one of 1500, so that TCP has the same segments everywhere.",
		"plain: routing by a rule of r2, without SRv6. static: the kernel's H.Encaps at r1, End.DT6 at r2 before the function and H.Encaps behind it, End.DT6 at r3, and so back. unaware: waystamp with keyed proofs on TC, recognition by content; unaware-metadata: by metadata. All have the same function, namespaces and links.",
		"tcp: TSO, GSO and GRO on at all links: super-packets go through the function whole. tcp-cut: they are cut on the way into it and nowhere merged again: TSO and GSO off at fn-to and fn-from, GRO off everywhere; waystamp cuts with segments: cut.",
		fmt.Sprintf("drop: an nftables rule in the function drops 1 of %d packets at random. delay: a program in user space reads frames from a packet socket, keeps each for %s and writes it to another. The number behind unaware is the size of the cache.", proxyDrop, proxyDelay),
		"nat: source NAT by nftables in r2's own kernel, recognised by metadata. The kernel's static way takes no packet through its NAT behind H.Encaps. chains-2: two pairs of hosts, one stream each, one function. segments: more functions at r3, with a stamp each.",
		fmt.Sprintf("packet, super, super-cut: a program at h1 writes one packet of TCP after the other, of %d bytes of payload or as super-packets of %d such frames, before all other tasks on CPU %d; a figure is the time from writing one to writing the next, in which the kernel takes it all the way to h2, where nobody has its address. strip, return: what the kernel counts for the programs at r2 in such a run (its clock included), by segments in the list.", floodPayload, floodFrames, c.cpu()),
		fmt.Sprintf("The load of all others is one TCP stream of iperf3 per chain, %s per run. Bit rates count TCP payload at the receiver.", c.Duration.Round(time.Second)),
	)
	c.note = r.note
	for _, s := range proxySections(c.Quick) {
		figures, err := c.proxySection(ctx, s)
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

func (c Config) proxySection(ctx context.Context, s proxySection) (_ []Figure, err error) {
	var tracks []*proxyTrack
	defer func() {
		for _, t := range tracks {
			err = errors.Join(err, t.close())
		}
	}()
	var subjects []subject
	for _, pc := range s.cases {
		series := Series{Name: s.part + "/" + pc.name, Unit: "Mbit/s", Better: More}
		if pc.flood.what != floodNone {
			series.Unit, series.Better = pc.flood.unit(), Less
		}
		if len(pc.baselines) > 0 {
			series.Baseline = s.part + "/" + pc.baselines[0]
		}
		series.Params = maps.Clone(pc.params)
		if pc.way == wayOurs && series.Params == nil {
			series.Params = map[string]float64{}
		}
		subjects = append(subjects, subject{series, func() (*trial, error) {
			t, err := newProxyTrack(ctx, c, pc)
			if err != nil {
				return nil, err
			}
			tracks = append(tracks, t)
			warm := map[string]float64{} // the first run is not counted
			return &trial{measure: func(ctx context.Context) (float64, error) {
				into := series.Params
				if warm != nil {
					into, warm = warm, nil
				}
				return t.measure(ctx, c.Duration, into)
			}}, nil
		}})
	}
	if c.Only != "" && len(c.wanted(subjects)) == 0 {
		return nil, nil
	}
	figures, err := c.rounds(ctx, s.part+", "+s.what, subjects)
	if err != nil {
		return nil, err
	}
	return append(figures, secondBaselines(s, figures)...), nil
}

// secondBaselines are the same figures beside the second thing that they are held
// against.
func secondBaselines(s proxySection, of []Figure) []Figure {
	by := map[string]Figure{}
	for _, f := range of {
		by[f.Name] = f
	}
	var out []Figure
	for _, c := range s.cases {
		f, ok := by[s.part+"/"+c.name]
		if !ok || len(c.baselines) < 2 {
			continue
		}
		base, ok := by[s.part+"/"+c.baselines[1]]
		if !ok || base.N != f.N {
			continue
		}
		kind, rest, _ := strings.Cut(c.name, "/")
		second := Series{Name: s.part + "/" + kind + "-to-static/" + rest, Unit: f.Unit, Better: f.Better, Baseline: base.Name, Samples: f.Samples}
		beside, err := second.figure(map[string]Series{base.Name: {Name: base.Name, Unit: base.Unit, Better: base.Better, Samples: base.Samples}})
		if err == nil { // both were figures before
			out = append(out, beside)
		}
	}
	return out
}
