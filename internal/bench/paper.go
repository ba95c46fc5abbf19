package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane/meter"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

// The network of the paper's Fig. 7b: h1, six nodes in a row, h2. Of the chain,
// r1 is the headend, r2 to r5 are functions, r6 is the egress: five segments.
const (
	paperNodes    = 6
	paperSegments = 5
	paperMTU      = 1500
	paperPings    = 100
)

// way is how packets get from h1 to h2; the way back is plain IPv6 for all, as
// in the paper.
type way struct {
	name   string
	scheme model.Scheme
	ours   bool
	srv6   bool // the kernel's
	xdp    bool
}

func ways(offload bool) []way {
	w := []way{
		{name: "ipv6"},
		{name: "srv6", srv6: true},
		{name: "opot", ours: true, scheme: model.SchemeOPoT},
		{name: "keyed", ours: true, scheme: model.SchemeKeyed},
	}
	if !offload {
		w = append(w,
			way{name: "opot-xdp", ours: true, scheme: model.SchemeOPoT, xdp: true},
			way{name: "keyed-xdp", ours: true, scheme: model.SchemeKeyed, xdp: true})
	}
	return w
}

// mss is the TCP segment size that makes the longest packet fill the links, as
// section V-B of the paper has it.
func (w way) mss() int { return paperMTU - 60 - w.outer() }

func (w way) outer() int {
	switch {
	case w.ours:
		return model.OuterLen(paperSegments)
	case w.srv6:
		return 48 + 16*paperSegments
	}
	return 0
}

// efficiency is the part of a full packet that is not the outer header.
func (w way) efficiency() float64 { return float64(paperMTU-w.outer()) / paperMTU }

func paperDomain(w way) (model.Domain, model.Lab) {
	path := model.DatapathTC
	if w.xdp {
		path = model.DatapathXDP
	}
	d := model.Domain{Block: netip.MustParsePrefix(block)}
	l := model.Lab{MTU: paperMTU, Hosts: []model.LabHost{
		{Name: "h1", Node: "r1", Prefix: netip.MustParsePrefix("fc00:7::/64")},
		{Name: "h2", Node: "r6", Prefix: netip.MustParsePrefix("fc00:8::/64")},
	}}
	chain := model.Chain{
		Name: "paper", Ingress: []string{"r1"}, Egress: "r6",
		Match: model.Match{Destination: l.Hosts[1].Prefix}, Proof: model.Proof{Scheme: w.scheme},
	}
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
			face("h2", model.RoleEdge)
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
			f := fmt.Sprintf("f%d", i)
			d.Functions = append(d.Functions, model.Function{Name: f, Node: n.Name})
			chain.Functions = append(chain.Functions, f)
		}
		d.Nodes = append(d.Nodes, n)
	}
	d.Chains = []model.Chain{chain}
	return d, l
}

// track is a lab of one way, with a server on h2.
type track struct {
	way    way
	lab    *lab.Lab
	rate   uint64 // bits per second of every node's links; 0: unlimited
	server func() // ends it; nil: there is none
	taps   []*meter.Tap
}

func newTrack(ctx context.Context, c Config, w way, offload bool) (_ *track, err error) {
	d, l := paperDomain(w)
	t := &track{way: w}
	if t.lab, err = lab.Up(ctx, lab.Config{Domain: d, Lab: l, Binary: c.Binary, WithoutAgents: !w.ours, Log: c.Log}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	if w.srv6 {
		if err := t.kernelSRv6(); err != nil {
			return nil, err
		}
	}
	for _, m := range t.lab.Members() {
		if err := t.member(m.Name, offload); err != nil {
			return nil, err
		}
	}
	t.server, err = serveTCP(t.lab, "h2", netip.MustParseAddr(h2))
	return t, err
}

// member sets offloads, and knows neighbours for good.
func (t *track) member(name string, offload bool) error {
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
		if l.Kind != "veth" {
			continue
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
		if t.way.xdp && name[0] == 'h' {
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

// kernelSRv6 makes the way with the kernel's own H.Encaps, End and End.DT6.
func (t *track) kernelSRv6() error {
	var sids []netip.Addr
	for i := 2; i <= paperNodes; i++ {
		sids = append(sids, netip.MustParseAddr(fmt.Sprintf("fc00:0:0:%d00::", i)))
	}
	for i := 1; i <= paperNodes; i++ {
		name := fmt.Sprintf("r%d", i)
		n, err := t.lab.Net(name)
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
		sid := netip.PrefixFrom(sids[max(i-2, 0)], 64)
		switch i {
		case 1:
			if err := n.SetTunnelSource(netip.MustParseAddr("fc00:1::1")); err != nil {
				return err
			}
			err = n.ReplaceRoute(host.Route{Destination: netip.MustParsePrefix("fc00:8::/64"), Type: host.RouteEncap, Device: dev, Segments: sids})
		case paperNodes:
			err = n.AddKernelEgress(sid, dev, 0)
		default:
			err = n.AddRoute(host.Route{Destination: sid, Type: host.RouteEnd, Device: dev})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

const h2 = "fc00:8::2"

// setRate limits what every node sends out of each of its links.
func (t *track) setRate(rate uint64) error {
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
			if err == nil && l.Kind == "veth" {
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

// tcp sends for that long and returns bits per second of TCP payload that
// arrived.
func (t *track) tcp(ctx context.Context, d time.Duration) (float64, error) {
	bits, err := sendTCP(ctx, t.lab, "h1", netip.MustParseAddr(h2), d, "--set-mss", strconv.Itoa(t.way.mss()))
	if err != nil {
		return 0, fmt.Errorf("over %s: %w", t.way.name, err)
	}
	return bits, nil
}

// rtt is the median round trip of the paper's pings, in microseconds.
func (t *track) rtt(ctx context.Context) (float64, error) {
	ns, err := t.lab.NetNS("h1")
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	r, err := lab.Ping(ctx, ns, netip.MustParseAddr(h2), lab.PingConfig{Count: paperPings, Interval: time.Millisecond})
	if err != nil {
		return 0, err
	}
	if r.Received < paperPings {
		return 0, fmt.Errorf("%d of %d pings over %s came back", r.Received, r.Sent, t.way.name)
	}
	us := make([]float64, len(r.RTTs))
	for i, d := range r.RTTs {
		us[i] = float64(d.Nanoseconds()) / 1e3
	}
	return Median(us), nil
}

func (t *track) close() error {
	if t.server != nil {
		t.server()
	}
	var errs []error
	for _, x := range t.taps {
		errs = append(errs, x.Close())
	}
	return errors.Join(append(errs, t.lab.Down(context.Background()))...)
}

// Paper repeats the experiments of section V-B of the paper.
func Paper(ctx context.Context, c Config) (_ Result, err error) {
	r := c.begin("paper",
		"The network of the paper's Fig. 7b: h1, six nodes in a row, h2, each a network namespace, joined by veth pairs of MTU 1500. r1 encapsulates with five segments, r2 to r5 are functions, r6 is the egress. Only packets to h2 go that way; answers are plain IPv6, as in the paper.",
		"ipv6: plain forwarding. srv6: the kernel's H.Encaps (with its tunnel source set), End and End.DT6. opot, keyed: waystamp's agents and programs on TC; opot-xdp, keyed-xdp: on XDP. All have the same links and routes, and neighbours that the kernel finds and keeps by itself.",
		"Offloads on: TSO, GSO and GRO on all ends of all links; super-packets stay whole, as between virtual machines of one host. Offloads off: all of them off and checksums computed by the sender, every frame by itself, as on a wire.",
		fmt.Sprintf("The load is one TCP stream of iperf3, %s per run, with the MSS of the paper: 1500 − 60 − (48 + 16·5) for srv6, 1500 − 60 − (72 + 16·5) for ours. Bit rates count TCP payload at the receiver. packet rates follow from them and the payload of full packets (MSS − 12 for the timestamps).", c.Duration.Round(time.Second)),
		"Link speeds are set on everything that nodes send, with HTB, offloads on. rho is the bit rate as a part of plain IPv6's at the same speed; its parameter efficiency is what header lengths alone would leave.",
		fmt.Sprintf("Round trips are medians of %d ICMPv6 echo requests, one per millisecond, on links without limit.", paperPings),
	)
	tracks := map[string]*track{}
	defer func() {
		for _, t := range tracks {
			err = errors.Join(err, t.close())
		}
	}()
	get := func(w way, offload bool) (*track, error) {
		key := fmt.Sprintf("%s %t", w.name, offload)
		if tracks[key] == nil {
			t, err := newTrack(ctx, c, w, offload)
			if err != nil {
				return nil, err
			}
			tracks[key] = t
		}
		return tracks[key], nil
	}
	trialOf := func(w way, offload bool, rate uint64, measure func(context.Context, *track) (float64, error)) func() (*trial, error) {
		return func() (*trial, error) {
			t, err := get(w, offload)
			if err != nil {
				return nil, err
			}
			return &trial{measure: func(ctx context.Context) (float64, error) {
				if err := t.setRate(rate); err != nil {
					return 0, err
				}
				return measure(ctx, t)
			}}, nil
		}
	}
	load := func(ctx context.Context, t *track) (float64, error) {
		bits, err := t.tcp(ctx, c.Duration)
		return bits / 1e6, err
	}

	var tcp, rtt, speed []subject
	for _, offload := range []bool{true, false} {
		suffix := map[bool]string{true: "/offload-on", false: "/offload-off"}[offload]
		for _, w := range ways(offload) {
			s := Series{Name: "tcp/" + w.name + suffix, Unit: "Mbit/s", Better: More}
			switch {
			case w.ours:
				s.Baseline = "tcp/srv6" + suffix
			case w.srv6:
				s.Baseline = "tcp/ipv6" + suffix
			}
			tcp = append(tcp, subject{s, trialOf(w, offload, 0, load)})
			s = Series{Name: "rtt/" + w.name + suffix, Unit: "µs", Better: Less}
			if w.ours {
				s.Baseline = "rtt/srv6" + suffix
			}
			rtt = append(rtt, subject{s, trialOf(w, offload, 0, func(ctx context.Context, t *track) (float64, error) { return t.rtt(ctx) })})
		}
	}
	speeds := []uint64{1, 2, 3, 4, 5}
	if c.Quick {
		speeds = nil
	}
	for _, g := range speeds {
		for _, w := range ways(true) {
			s := Series{
				Name: fmt.Sprintf("bit-rate/%s/%d-gbit", w.name, g), Unit: "Mbit/s", Better: More,
				Params: map[string]float64{"gbit": float64(g), "efficiency": w.efficiency()},
			}
			if w.name != "ipv6" {
				s.Baseline = fmt.Sprintf("bit-rate/ipv6/%d-gbit", g)
			}
			speed = append(speed, subject{s, trialOf(w, true, g*1e9, load)})
		}
	}
	for _, part := range []struct {
		what     string
		subjects []subject
		runs     int
	}{{"tcp", tcp, c.Runs}, {"round trips", rtt, c.Runs}, {"link speeds", speed, min(c.Runs, 3)}} {
		if len(part.subjects) == 0 || c.Only != "" && len(c.wanted(part.subjects)) == 0 {
			continue
		}
		rc := c
		rc.Runs = part.runs
		figures, err := rc.rounds(ctx, "paper, "+part.what, part.subjects)
		if err != nil {
			return Result{}, err
		}
		if r.Figures = append(r.Figures, figures...); part.what != "round trips" {
			r.Figures = append(r.Figures, derived(figures)...)
		}
	}
	r.end()
	return r, nil
}

// derived are the figures that follow from bit rates: packet rates, and ours
// beside plain IPv6.
func derived(of []Figure) []Figure {
	by := map[string]Figure{}
	for _, f := range of {
		by[f.Name] = f
	}
	var series []Series
	for _, f := range of {
		kind, rest, _ := strings.Cut(f.Name, "/")
		name, rest, _ := strings.Cut(rest, "/")
		var w way
		for _, x := range ways(false) {
			if x.name == name {
				w = x
			}
		}
		ipv6, ok := by[kind+"/ipv6/"+rest]
		if !ok {
			continue
		}
		if kind == "tcp" {
			if w.ours {
				series = append(series,
					Series{Name: "tcp-to-ipv6/ipv6/" + rest, Unit: f.Unit, Better: More, Samples: ipv6.Samples},
					Series{Name: "tcp-to-ipv6/" + name + "/" + rest, Unit: f.Unit, Better: More, Baseline: "tcp-to-ipv6/ipv6/" + rest, Samples: f.Samples})
			}
			continue
		}
		packets, rho := make([]float64, f.N), make([]float64, f.N)
		for i, x := range f.Samples {
			packets[i] = x * 1e6 / 8 / float64(w.mss()-12) / 1e6
			rho[i] = x / ipv6.Samples[i]
		}
		s := Series{Name: "packet-rate/" + name + "/" + rest, Unit: "Mpackets/s", Better: More, Params: f.Params, Samples: packets}
		if name != "ipv6" {
			s.Baseline = "packet-rate/ipv6/" + rest
			series = append(series, Series{Name: "rho/" + name + "/" + rest, Unit: "of IPv6's bit rate", Better: More, Params: f.Params, Samples: rho})
		}
		series = append(series, s)
	}
	// One plain IPv6 for all.
	seen := map[string]bool{}
	once := series[:0]
	for _, s := range series {
		if !seen[s.Name] {
			once = append(once, s)
		}
		seen[s.Name] = true
	}
	figures, err := Figures(once)
	if err != nil {
		return nil // what they are made of is there, as are their baselines
	}
	return figures
}
