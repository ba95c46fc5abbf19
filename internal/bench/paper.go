package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/bench/meter"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
)

// The network of the paper's Fig. 7b: h1, six nodes in a row, hosts behind the
// last. r1 is the headend, r2 to r5 are functions, r6 is the egress: five
// segments.
const (
	paperNodes    = 6
	paperSegments = 5
	paperMTU      = 1500
	paperPings    = 100
	paperPause    = time.Millisecond // between an answer and the next request
	paperDense    = 10 * time.Microsecond
	paperSpeedMax = 5 // Gbit/s
	// paperSpeedRuns bounds the rounds over all link speeds.
	paperSpeedRuns = 3
)

// Networks that the schemes of the paper are measured in. Each has a host behind
// r6 for each of its schemes, so that one set of agents serves many; a baseline
// is never in the same network as waystamp.
const (
	netKernel = "kernel"
	netOurs   = "waystamp"
	netProxy  = "proxy" // the functions' nodes take headers off and put them back
	netXDP    = "xdp"
	netLabels = "labels" // one of bench mpls
)

// way is a scheme of the paper's Table III, or one of ours beside them: how
// packets get from h1 to its host. The way back is plain IPv6 for all, as in the
// paper.
type way struct {
	name    string
	network string
	srv6    bool // false in netKernel: plain IPv6
	reduced bool // the kernel's H.Encaps.Red: one container needs no SRH
	csid    bool // compressed SIDs: five in one entry
	labels  bool // a stack of labels, not SRv6
	scheme  model.Scheme
}

func (w way) ours() bool { return w.network != netKernel }

// baseline is the kernel's scheme that w is held against: what it does without
// proof and proxy, with SIDs of the same form.
func (w way) baseline() string {
	switch {
	case !w.ours() && !w.srv6:
		return ""
	case !w.ours():
		return "ipv6"
	case w.csid:
		return "srv6-csid"
	}
	return "srv6"
}

func ways(offload bool) []way {
	list := []way{
		{name: "ipv6", network: netKernel},
		{name: "srv6", network: netKernel, srv6: true},
		{name: "srv6-csid", network: netKernel, srv6: true, csid: true},
		{name: "srv6-csid-red", network: netKernel, srv6: true, csid: true, reduced: true},
		{name: "opot", network: netOurs, scheme: model.SchemeOPoT},
		{name: "opot-csid", network: netOurs, scheme: model.SchemeOPoT, csid: true},
		{name: "keyed", network: netOurs, scheme: model.SchemeKeyed},
		{name: "keyed-csid", network: netOurs, scheme: model.SchemeKeyed, csid: true},
		{name: "keyed-flow", network: netOurs, scheme: model.SchemeKeyedFlow},
		{name: "opot-proxy", network: netProxy, scheme: model.SchemeOPoT},
		{name: "opot-proxy-csid", network: netProxy, scheme: model.SchemeOPoT, csid: true},
		{name: "keyed-proxy", network: netProxy, scheme: model.SchemeKeyed},
	}
	if !offload {
		list = append(list,
			way{name: "opot-xdp", network: netXDP, scheme: model.SchemeOPoT},
			way{name: "opot-csid-xdp", network: netXDP, scheme: model.SchemeOPoT, csid: true},
			way{name: "keyed-xdp", network: netXDP, scheme: model.SchemeKeyed})
	}
	return list
}

// quickWays are enough to see that nothing has become slower.
var quickWays = map[string]bool{"ipv6": true, "srv6": true, "opot": true, "keyed": true, "opot-xdp": true, "keyed-xdp": true}

// atSpeeds are the schemes of the paper, which it measures at link speeds, and
// keyed.
var atSpeeds = map[string]bool{
	"ipv6": true, "srv6": true, "opot": true, "opot-proxy": true, "srv6-csid": true, "opot-csid": true, "opot-proxy-csid": true, "keyed": true,
}

// entries is how many the scheme's segment lists have.
func (w way) entries() int {
	if w.csid {
		return 1
	}
	return paperSegments
}

// mss is the TCP segment size that makes the longest packet fill the links, as
// section V-B of the paper has it.
func (w way) mss() int { return paperMTU - 60 - w.outer() }

func (w way) outer() int {
	switch {
	case w.labels:
		return mpls.OuterLen(paperSegments)
	case w.ours():
		return srv6.OuterLen(w.entries())
	case w.reduced:
		return srv6.IPv6Len
	case w.srv6:
		return srv6.IPv6Len + 8 + 16*w.entries()
	}
	return 0
}

// efficiency is the part of a full packet that is not the outer header: the
// packet sending efficiency of section V-B.
func (w way) efficiency() float64 { return float64(paperMTU-w.outer()) / paperMTU }

// prefix is the network of the i-th host behind r6.
func paperPrefix(i int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("fc00:%x::/64", 0x10+i))
}

func paperHost(i int) string { return fmt.Sprintf("h%d", i+2) }

func paperAddress(i int) netip.Addr {
	b := paperPrefix(i).Addr().As16()
	b[15] = 2
	return netip.AddrFrom16(b)
}

// paperDomain is the domain of a network with those schemes, and what is around
// it.
func paperDomain(network string, list []way) (model.Domain, model.Lab) {
	path := model.DatapathTC
	if network == netXDP {
		path = model.DatapathXDP
	}
	d := model.Domain{Block: netip.MustParsePrefix(block)}
	l := model.Lab{MTU: paperMTU, Hosts: []model.LabHost{{Name: "h1", Node: "r1", Prefix: netip.MustParsePrefix("fc00:7::/64")}}}
	var functions []string
	for i := 1; i <= paperNodes; i++ {
		n := model.Node{
			Name: fmt.Sprintf("r%d", i), Address: netip.MustParseAddr(fmt.Sprintf("fc00:%d::1", i)),
			Locator: netip.MustParsePrefix(fmt.Sprintf("fc00:0:0:%d00::/56", i)),
		}
		face := func(peer string, role model.Role) {
			n.Interfaces = append(n.Interfaces, model.Interface{Name: n.Name + "-" + peer, Role: role, Datapath: path, MTU: paperMTU})
		}
		switch i {
		case 1:
			face("h1", model.RoleEdge)
		case paperNodes:
			for j := range list {
				face(paperHost(j), model.RoleEdge)
			}
		}
		if i > 1 {
			face(fmt.Sprintf("r%d", i-1), model.RoleCore)
		}
		if i < paperNodes {
			next := fmt.Sprintf("r%d", i+1)
			face(next, model.RoleCore)
			l.Links = append(l.Links, model.LabLink{A: n.Name, B: next})
		}
		if i > 1 && i < paperNodes {
			f := model.Function{Name: fmt.Sprintf("f%d", i), Node: n.Name}
			if network == netProxy {
				// As in the paper: the node's kernel forwards, and is the function.
				f.Kind = model.KindUnaware
				f.Proxy = model.Proxy{
					Local: true, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Cache: proxyCache, Lifetime: time.Second,
				}
			}
			d.Functions = append(d.Functions, f)
			functions = append(functions, f.Name)
		}
		d.Nodes = append(d.Nodes, n)
	}
	for i, w := range list {
		l.Hosts = append(l.Hosts, model.LabHost{Name: paperHost(i), Node: fmt.Sprintf("r%d", paperNodes), Prefix: paperPrefix(i)})
		chain := model.Chain{
			Name: w.name, Ingress: []string{"r1"}, Functions: functions, Egress: fmt.Sprintf("r%d", paperNodes),
			Match: model.Match{Destination: paperPrefix(i)}, Proof: model.Proof{Scheme: w.scheme},
		}
		if w.csid {
			chain.Encapsulation = model.Encapsulation{SIDs: model.SIDsCompressed, Reduced: true}
		}
		if w.labels {
			chain.Encapsulation.Type = model.EncapsulationSRMPLS
			d.MPLS = &model.MPLS{Services: serviceLabels, MTU: paperMTU}
		}
		d.Chains = append(d.Chains, chain)
	}
	for i := range d.Nodes {
		if d.MPLS != nil {
			d.Nodes[i].MPLS = &model.NodeMPLS{Label: nodeLabels + uint32(i), Address: d.Nodes[i].Address}
		}
	}
	return d, l
}

// paperNet is a network that is up.
type paperNet struct {
	ways    []way
	offload bool
	lab     *lab.Lab
	rate    uint64            // bits per second of every node's links; 0: unlimited
	servers map[string]func() // by host; each ends the one that listens there
	taps    []*meter.Tap
	floods  map[int]*flooder // by way
}

// newPaperNet builds a network with the schemes of list that belong to it.
func newPaperNet(ctx context.Context, c Config, network string, list []way, offload bool) (_ *paperNet, err error) {
	t := &paperNet{offload: offload, servers: map[string]func(){}, floods: map[int]*flooder{}}
	for _, w := range list {
		if w.network == network {
			t.ways = append(t.ways, w)
		}
	}
	d, l := paperDomain(network, t.ways)
	if t.lab, err = lab.Up(ctx, lab.Config{Domain: d, Lab: l, Binary: c.Binary, Own: true, WithoutAgents: network == netKernel, Log: c.Log}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	if network == netKernel {
		if err := t.kernelSRv6(); err != nil {
			return nil, err
		}
	}
	for _, m := range t.lab.Members() {
		if err := t.member(m.Name, offload, network == netXDP); err != nil {
			return nil, err
		}
	}
	for i := range t.ways {
		stop, err := serveTCP(ctx, t.lab, paperHost(i), paperAddress(i))
		if err != nil {
			return nil, err
		}
		t.servers[paperHost(i)] = stop
	}
	return t, nil
}

// member sets the offloads of a member's links.
func (t *paperNet) member(name string, offload, xdp bool) error {
	n, err := t.lab.Net(name)
	if err != nil {
		return err
	}
	defer n.Close()
	links, err := n.Links()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Kind != "veth" || strings.HasPrefix(l.Name, "ws") {
			continue // the agents' own
		}
		each := []host.Offload{host.TSO, host.GSO, host.GRO}
		if !offload {
			// Native XDP on veth forgets that a checksum is still to be filled in.
			each = append(each, host.TransmitSum)
		}
		for _, o := range each {
			// What native XDP at the other end has switched off cannot be set.
			on, err := n.Offload(l.Name, o)
			if err == nil && on != offload {
				err = n.SetOffload(l.Name, o, offload)
			}
			if err != nil {
				return err
			}
		}
		if xdp && name[0] == 'h' {
			if err := n.NetNS().Do(func() error {
				tap, err := meter.NewIdle(l.Index)
				if err == nil {
					t.taps = append(t.taps, tap)
				}
				return err
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// kernelSRv6 makes the ways with the kernel's own H.Encaps, End and End.DT6, of
// plain and of compressed SIDs.
func (t *paperNet) kernelSRv6() error {
	sid := func(node int, csid bool) netip.Addr {
		instance := 0
		if csid {
			instance = 1
		}
		return netip.MustParseAddr(fmt.Sprintf("fc00:0:0:%d%02x::", node, instance))
	}
	list := func(w way) (sids []netip.Addr) {
		for i := 2; i <= paperNodes; i++ {
			sids = append(sids, sid(i, w.csid))
		}
		if w.csid {
			return srv6.Compress(sids)
		}
		return sids
	}
	for i := 1; i <= paperNodes; i++ {
		n, err := t.lab.Net(fmt.Sprintf("r%d", i))
		if err != nil {
			return err
		}
		defer n.Close()
		dev := fmt.Sprintf("r%d-r%d", i, i-1)
		if i == 1 {
			dev = "r1-r2"
		}
		for _, key := range []string{"all", "default", dev} {
			if err := n.SetSysctl("net/ipv6/conf/"+key+"/seg6_enabled", "1"); err != nil {
				return err
			}
		}
		if i == 1 {
			if err := n.SetTunnelSource(netip.MustParseAddr("fc00:1::1")); err != nil {
				return err
			}
			for j, w := range t.ways {
				if !w.srv6 {
					continue
				}
				r := host.Route{Destination: paperPrefix(j), Type: host.RouteEncap, Device: dev, Segments: list(w), Reduced: w.reduced}
				if err := n.ReplaceRoute(r); err != nil {
					return err
				}
			}
			continue
		}
		for _, csid := range []bool{false, true} {
			at := netip.PrefixFrom(sid(i, csid), 64)
			if i == paperNodes {
				err = n.AddKernelEgress(at, dev, 0)
			} else {
				err = n.AddRoute(host.Route{Destination: at, Type: host.RouteEnd, Device: dev, Compressed: csid})
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// setRate limits what every node sends out of each of its links.
func (t *paperNet) setRate(rate uint64) error {
	if rate == t.rate {
		return nil
	}
	for i := 1; i <= paperNodes; i++ {
		n, err := t.lab.Net(fmt.Sprintf("r%d", i))
		if err != nil {
			return err
		}
		links, err := n.Links()
		for _, l := range links {
			if err == nil && l.Kind == "veth" && !strings.HasPrefix(l.Name, "ws") {
				err = n.SetRate(l.Name, rate)
			}
		}
		if err = errors.Join(err, n.Close()); err != nil {
			return err
		}
	}
	t.rate = rate
	return nil
}

// tcp sends to the i-th way's host for that long and returns Mbit/s of TCP
// payload that arrived.
func (t *paperNet) tcp(ctx context.Context, i int, d time.Duration) (float64, error) {
	w := t.ways[i]
	bits, err := sendTCP(ctx, t.lab, "h1", paperAddress(i), d, "--set-mss", strconv.Itoa(w.mss()))
	if err != nil {
		return 0, fmt.Errorf("over %s: %w", w.name, err)
	}
	return bits / 1e6, nil
}

// ping is the round trips of the paper's pings, in microseconds.
func (t *paperNet) ping(ctx context.Context, i, cpu, count int, pause time.Duration) ([]float64, error) {
	ns, err := t.lab.NetNS("h1")
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	us, err := roundTrips(ctx, ns, paperAddress(i), cpu, count, pause)
	if err != nil {
		return nil, fmt.Errorf("over %s: %w", t.ways[i].name, err)
	}
	return us, nil
}

// flood is how long a packet to the i-th way's network takes through all nodes, in
// nanoseconds: a super-packet where offloads are on.
func (t *paperNet) flood(ctx context.Context, i, cpu int, d time.Duration) (ns float64, err error) {
	f := t.floods[i]
	if f == nil {
		host, last := paperHost(i), fmt.Sprintf("r%d", paperNodes)
		b := paperPrefix(i).Addr().As16()
		b[15] = 0x99
		f, err = newFlooder(floodWay{
			flood: paperFlood(t.offload), lab: t.lab, finished: !t.offload,
			payload: t.ways[i].mss() - floodOptions,
			source:  netip.MustParseAddr("fc00:7::2"), to: netip.AddrFrom16(b),
			out: interfaceOf{"h1", "h1-r1"}, first: interfaceOf{"r1", "r1-h1"},
			last: interfaceOf{last, last + "-" + host}, sink: interfaceOf{host, host + "-" + last},
		}, cpu)
		if err != nil {
			return 0, err
		}
		t.floods[i] = f
	}
	ns, err = f.run(ctx, d)
	if err != nil {
		return 0, fmt.Errorf("over %s: %w", t.ways[i].name, err)
	}
	return ns, nil
}

func paperFlood(offload bool) flood {
	if offload {
		return flood{what: floodSupers}
	}
	return flood{what: floodPackets}
}

func (t *paperNet) close() error {
	var errs []error
	for _, f := range t.floods {
		errs = append(errs, f.close())
	}
	for _, stop := range t.servers {
		stop()
	}
	for _, x := range t.taps {
		errs = append(errs, x.Close())
	}
	return errors.Join(append(errs, t.lab.Down(context.Background()))...)
}

// paperRun measures with one setting of offloads.
type paperRun struct {
	Config
	offload bool
	list    []way
	nets    map[string]*paperNet
}

func (p *paperRun) close() error {
	var errs []error
	for _, t := range p.nets {
		errs = append(errs, t.close())
	}
	return errors.Join(errs...)
}

// trial builds the way's network, if nobody did before, and measures in it.
func (p *paperRun) trial(ctx context.Context, w way, rate uint64, measure func(context.Context, *paperNet, int) (float64, error)) func() (*trial, error) {
	return func() (*trial, error) {
		t := p.nets[w.network]
		if t == nil {
			var err error
			if t, err = newPaperNet(ctx, p.Config, w.network, p.list, p.offload); err != nil {
				return nil, err
			}
			p.nets[w.network] = t
		}
		return &trial{measure: func(ctx context.Context) (float64, error) {
			if err := t.setRate(rate); err != nil {
				return 0, err
			}
			for i := range t.ways {
				if t.ways[i] == w {
					return measure(ctx, t, i)
				}
			}
			return 0, fmt.Errorf("network %s has no way %s", w.network, w.name)
		}}, nil
	}
}

func (p *paperRun) load(ctx context.Context, t *paperNet, i int) (float64, error) {
	return t.tcp(ctx, i, p.Duration)
}

func (p *paperRun) suffix() string {
	if p.offload {
		return "/offload-on"
	}
	return "/offload-off"
}

// subjects are the schemes of list, under a prefix of their names, each beside
// its baseline.
func (p *paperRun) subjects(ctx context.Context, prefix, unit string, better Better, measure func(context.Context, *paperNet, int) (float64, error)) []subject {
	var out []subject
	for _, w := range p.list {
		s := Series{Name: prefix + "/" + w.name + p.suffix(), Unit: unit, Better: better}
		if b := w.baseline(); b != "" {
			s.Baseline = prefix + "/" + b + p.suffix()
		}
		out = append(out, subject{Series: s, prepare: p.trial(ctx, w, 0, measure)})
	}
	return out
}

// skips says that nothing of all was asked for.
func (c Config) skips(all []subject) bool {
	return len(all) == 0 || c.Only != "" && len(c.wanted(all)) == 0
}

// throughput is Mbit/s on links without limit.
func (p *paperRun) throughput(ctx context.Context) ([]Figure, error) {
	subjects := p.subjects(ctx, "tcp", "Mbit/s", More, p.load)
	if p.skips(subjects) {
		return nil, nil
	}
	figures, err := p.rounds(ctx, "paper, TCP"+p.words(), subjects)
	if err != nil {
		return nil, err
	}
	beside, err := besideIPv6(figures)
	return append(figures, beside...), err
}

// path is the time that nodes and links alone take, without TCP in the hosts.
func (p *paperRun) path(ctx context.Context) ([]Figure, error) {
	measure := func(ctx context.Context, t *paperNet, i int) (float64, error) {
		return t.flood(ctx, i, p.cpu(), floodBursts*(floodBurst+floodRest))
	}
	subjects := p.subjects(ctx, "path", paperFlood(p.offload).unit(), Less, measure)
	if p.skips(subjects) {
		return nil, nil
	}
	figures, err := p.rounds(ctx, "paper, packets one by one"+p.words(), subjects)
	if err != nil {
		return nil, err
	}
	beside, err := besideIPv6(figures)
	return append(figures, beside...), err
}

func (p *paperRun) words() string {
	if p.offload {
		return ", offloads on"
	}
	return ", offloads off"
}

// roundTrips is the paper's Fig. 12, and the same with requests that follow each
// other so soon that the CPU still has in its caches what they need.
func (p *paperRun) roundTrips(ctx context.Context) ([]Figure, error) {
	figures, err := p.roundTripsEvery(ctx, "rtt", paperPings, paperPause)
	if err != nil {
		return nil, err
	}
	dense, err := p.roundTripsEvery(ctx, "rtt-dense", 10*paperPings, paperDense)
	return append(figures, dense...), err
}

func (p *paperRun) roundTripsEvery(ctx context.Context, group string, count int, pause time.Duration) ([]Figure, error) {
	all := map[string][]float64{} // by name; of counted runs
	var subjects []subject
	for i, s := range p.subjects(ctx, group, "µs", Less, nil) {
		name := s.Name
		warm := true
		measure := func(ctx context.Context, t *paperNet, at int) (float64, error) {
			us, err := t.ping(ctx, at, p.cpu(), count, pause)
			if err != nil {
				return 0, err
			}
			if !warm {
				all[name] = append(all[name], us...)
			}
			warm = false
			return Median(us), nil
		}
		s.prepare = p.trial(ctx, p.list[i], 0, measure)
		subjects = append(subjects, s)
	}
	if p.skips(subjects) {
		return nil, nil
	}
	figures, err := p.rounds(ctx, fmt.Sprintf("paper, round trips %s apart%s", pause, p.words()), subjects)
	if err != nil {
		return nil, err
	}
	for i := range figures {
		box := BoxOf(all[figures[i].Name])
		figures[i].Box = &box
	}
	return figures, nil
}

// speeds is the paper's Figs. 9 to 11: bit rates, and what follows from them, at
// link speeds of 1 Gbit/s and more.
func (p *paperRun) speeds(ctx context.Context) ([]Figure, error) {
	var subjects []subject
	for g := uint64(1); g <= paperSpeedMax; g++ {
		for _, w := range p.list {
			if !atSpeeds[w.name] {
				continue
			}
			s := Series{
				Name: fmt.Sprintf("bit-rate/%s/%d-gbit", w.name, g), Unit: "Mbit/s", Better: More,
				Params: map[string]float64{"gbit": float64(g), "efficiency": w.efficiency()},
			}
			if b := w.baseline(); b != "" {
				s.Baseline = fmt.Sprintf("bit-rate/%s/%d-gbit", b, g)
			}
			subjects = append(subjects, subject{Series: s, prepare: p.trial(ctx, w, g*1e9, p.load)})
		}
	}
	if p.skips(subjects) {
		return nil, nil
	}
	c := p.Config
	c.Runs, c.warm = min(c.Runs, paperSpeedRuns), true
	figures, err := c.rounds(ctx, "paper, link speeds", subjects)
	if err != nil {
		return nil, err
	}
	more, err := fromBitRates(figures)
	return append(figures, more...), err
}

// Paper repeats the experiments of section V-B of the paper on ordered proof of
// transit.
func Paper(ctx context.Context, c Config) (_ Result, err error) {
	r := c.begin("paper",
		"The network of the paper's Fig. 7b: h1, six nodes in a row, hosts behind the last, each a network namespace, joined by veth pairs of MTU 1500. r1 encapsulates with five segments, r2 to r5 are functions, r6 is the egress. Only packets from h1 go that way; answers are plain IPv6, as in the paper. There is a network of the kernel alone, one with waystamp, one with waystamp and proxies, one with waystamp on XDP; in each a host behind r6 for each scheme.",
		"Schemes are those of the paper's Table III. ipv6: plain forwarding. srv6: the kernel's H.Encaps (with its tunnel source set, seg6_flowlabel 0), End and End.DT6; srv6-csid: the same with End of the flavour NEXT-C-SID and all five SIDs in one entry; srv6-csid-red: with H.Encaps.Red, which leaves out the SRH. opot, keyed, keyed-flow: waystamp's agents and programs on TC; -csid: with compressed SIDs; -xdp: on XDP; -proxy: r2 to r5 are functions that know nothing of SRv6, here as in the paper the node's own kernel, so that each takes all outer headers off, forwards the packet, and puts them back. All have the same links and routes, and neighbours that the kernel finds and keeps by itself.",
		"Offloads on: TSO, GSO and GRO on all ends of all links; super-packets stay whole, as between virtual machines of one host. Offloads off: all of them off and checksums computed by the sender, every frame by itself, as on a wire.",
		fmt.Sprintf("The load is one TCP stream of iperf3, %s per run, with the MSS of the paper's Table III: 1500 − 60 less the outer header, of 48 + 16·m bytes (40 for srv6-csid-red) for the kernel and 72 + 16·m for ours, with m of 5 entries, or 1 of compressed SIDs. Bit rates count TCP payload at the receiver.", seconds(c.Duration)),
		fmt.Sprintf("path: a program at h1 writes full packets of TCP one after the other, as super-packets of %d frames where offloads are on, before all other tasks on CPU %d; a figure is the time from writing one to writing the next, in which the kernel takes it all the way to a host behind r6, where nobody has its address. So it is what links and nodes take of a stream's time, without TCP itself.", floodFrames, c.cpu()),
		fmt.Sprintf("Link speeds are set on everything that nodes send, with HTB, offloads on, in up to %d rounds. Packet rates follow from the bit rates and the payload of full packets (MSS − 12 for the timestamps). rho is the bit rate as a part of plain IPv6's at the same speed; beside it is the packet sending efficiency, what the lengths of headers alone would leave. HTB counts a super-packet as the frames that it stands for.", paperSpeedRuns),
		fmt.Sprintf("Round trips are of %d ICMPv6 echo requests per run, a millisecond between an answer and the next request (rtt-dense: %d of them, %s in between), on links without limit; one thread sends and receives before all other tasks of its CPU, and does not sleep in between. Medians are of runs; boxes show all requests of all runs: quartiles, whiskers to the furthest within 1.5 times their distance.", paperPings, 10*paperPings, paperDense),
	)
	c.note = r.note
	for _, offload := range []bool{true, false} {
		if err := c.paper(ctx, &r, offload); err != nil {
			return Result{}, err
		}
	}
	if len(r.Figures) == 0 {
		return Result{}, &NoCaseError{c.Only}
	}
	r.end()
	return r, nil
}

// paper adds what is measured with one setting of offloads. Its networks are
// there only meanwhile.
func (c Config) paper(ctx context.Context, r *Result, offload bool) (err error) {
	p := &paperRun{Config: c, offload: offload, nets: map[string]*paperNet{}}
	for _, w := range ways(offload) {
		if !c.Quick || quickWays[w.name] {
			p.list = append(p.list, w)
		}
	}
	defer func() { err = errors.Join(err, p.close()) }()
	parts := []func(context.Context) ([]Figure, error){p.throughput, p.path, p.roundTrips}
	if offload && !c.Quick {
		parts = append(parts, p.speeds)
	}
	for _, part := range parts {
		figures, err := part(ctx)
		if err != nil {
			return err
		}
		r.Figures = append(r.Figures, figures...)
	}
	return nil
}

// seconds is how long iperf3 sends, which counts in whole ones.
func seconds(d time.Duration) string {
	n := max(1, int(d.Round(time.Second).Seconds()))
	if n == 1 {
		return "1 second"
	}
	return fmt.Sprintf("%d seconds", n)
}

// besideIPv6 holds our figures against plain IPv6's of the same rounds: kind/
// NAME/rest becomes kind-to-ipv6/NAME/rest.
func besideIPv6(of []Figure) ([]Figure, error) {
	by := map[string]Figure{}
	for _, f := range of {
		by[f.Name] = f
	}
	var series []Series
	have := map[string]bool{}
	for _, f := range of {
		kind, name, rest := splitName(f.Name)
		ipv6, ok := by[kind+"/ipv6/"+rest]
		if !ok || name == "ipv6" || strings.HasPrefix(name, "srv6") {
			continue // the kernel's are beside it already
		}
		base := Series{Name: kind + "-to-ipv6/ipv6/" + rest, Unit: f.Unit, Better: f.Better, Samples: ipv6.Samples}
		if !have[base.Name] {
			series = append(series, base)
			have[base.Name] = true
		}
		series = append(series, Series{Name: kind + "-to-ipv6/" + name + "/" + rest, Unit: f.Unit, Better: f.Better, Baseline: base.Name, Samples: f.Samples})
	}
	return Figures(series)
}

func splitName(s string) (kind, name, rest string) {
	kind, rest, _ = strings.Cut(s, "/")
	name, rest, _ = strings.Cut(rest, "/")
	return kind, name, rest
}

// fromBitRates are the packet rates that follow from bit rates, and rho of each.
func fromBitRates(of []Figure) ([]Figure, error) {
	by := map[string]Figure{}
	for _, f := range of {
		by[f.Name] = f
	}
	var packetRates, rhos []Series
	for _, f := range of {
		_, name, rest := splitName(f.Name)
		var w way
		for _, x := range ways(true) {
			if x.name == name {
				w = x
			}
		}
		packets := Series{Name: "packet-rate/" + name + "/" + rest, Unit: "Mpackets/s", Better: More, Params: f.Params}
		for _, x := range f.Samples {
			packets.Samples = append(packets.Samples, x/8/float64(w.mss()-12))
		}
		if f.Baseline != "" {
			_, base, _ := splitName(f.Baseline)
			packets.Baseline = "packet-rate/" + base + "/" + rest
		}
		packetRates = append(packetRates, packets)
		ipv6, ok := by["bit-rate/ipv6/"+rest]
		if !ok || name == "ipv6" {
			continue
		}
		rho := Series{Name: "rho/" + name + "/" + rest, Unit: "of IPv6's bit rate", Better: More, Params: f.Params}
		for i, x := range f.Samples {
			rho.Samples = append(rho.Samples, x/ipv6.Samples[i])
		}
		rhos = append(rhos, rho)
	}
	return Figures(append(packetRates, rhos...))
}
