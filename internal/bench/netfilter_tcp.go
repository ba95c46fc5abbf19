package bench

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/netfilter"
)

// TCP through a firewall at r2, in the network for proxies: by plain routing to the same rules, in
// r2's own network or in a namespace behind two links, and by ours.
const (
	filterByRules filterBy = "plain"  // rules of r2 itself, by plain routing
	filterByRoute filterBy = "routed" // rules of a namespace, by plain routing
)

// filterTCPRules track connections and let those to the server in. By $bypass they are done
// with one, where that is asked for.
const filterTCPRules = `chain forward {
	type filter hook forward priority filter; policy drop;
	ct state invalid drop
	ct state established %saccept
	tcp dport 5201 accept
}
`

// filterTCP is one network that is measured.
type filterTCP struct {
	by      filterBy
	offload bool
}

func (f filterTCP) group() string {
	if f.offload {
		return "tcp-on"
	}
	return "tcp-off"
}

func (f filterTCP) name() string { return "nf/" + f.group() + "/" + string(f.by) }

// baseline is the same rules in the same place, reached by plain routing.
func (f filterTCP) baseline() string {
	switch {
	case !f.by.ours():
		return ""
	case f.by == filterByNode:
		f.by = filterByRules
	default:
		f.by = filterByRoute
	}
	return f.name()
}

func filterTCPCases(offload bool) (list []filterTCP) {
	for _, b := range []filterBy{filterByRules, filterByRoute, filterByOwn, filterByNode, filterByBypass} {
		list = append(list, filterTCP{b, offload})
	}
	return list
}

func (f filterTCP) rules() string {
	mark := ""
	if f.by.bypasses() {
		mark = "ct mark set $bypass "
	}
	return fmt.Sprintf(filterTCPRules, mark)
}

func (f filterTCP) domain() (model.Domain, model.Lab) {
	d, l := proxyCase{way: wayPlain}.domain()
	switch {
	case f.by == filterByRoute:
		l.Functions[0].Kind = model.LabNftables
		l.Functions[0].Ruleset = "table inet " + filterTable + " {\n" + f.rules() + "}\n"
		return d, l
	case f.by.ours():
		withFilter(&d, f.by.namespace(), f.by.bypasses())
		d.Functions[0].Netfilter.Rules = f.rules()
	default:
		d.Functions[0].Kind, d.Functions[0].Proxy = model.KindForward, model.Proxy{}
	}
	l.Functions = nil
	return d, l
}

// filterTrack is a lab of one case, with a server on h2.
type filterTrack struct {
	filterTCP
	*proxyTrack
}

func (f filterTCP) open(ctx context.Context, cfg Config) (_ *filterTrack, err error) {
	d, l := f.domain()
	t := &filterTrack{f, &proxyTrack{proxyCase: proxyCase{way: wayPlain}}}
	if t.lab, err = lab.Up(ctx, lab.Config{Domain: d, Lab: l, Binary: cfg.Binary, Own: true, WithoutAgents: !f.by.ours(), Log: cfg.Log}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	for _, m := range t.lab.Members() {
		if err := t.on(m.Name, t.setOffloads); err != nil {
			return nil, err
		}
	}
	switch f.by {
	case filterByRoute:
		err = t.routes()
	case filterByRules:
		err = t.on("r2", func(n *host.Net) error {
			return netfilter.Load(ctx, n.NetNS(), netfilter.Ruleset{Function: filterTable, Text: f.rules()})
		})
	}
	if err != nil {
		return nil, err
	}
	stop, err := serveTCP(ctx, t.lab, proxyHosts[0][1], t.address(0))
	if err == nil {
		t.servers = append(t.servers, stop)
	}
	return t, err
}

// setOffloads lets super-packets be made and stay whole at all links of a member, or be at none.
func (f filterTCP) setOffloads(n *host.Net) error {
	links, err := n.Links()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Kind != "veth" || strings.HasPrefix(l.Name, "ws") {
			continue // the agents' own
		}
		for _, o := range []host.Offload{host.TSO, host.GSO, host.GRO} {
			if err := n.SetOffload(l.Name, o, f.offload); err != nil {
				return err
			}
		}
	}
	return nil
}

// rate is a run: Mbit/s of payload. Of ours, all of it must have taken the way that is asked for.
func (t *filterTrack) rate(ctx context.Context, cfg Config) (float64, error) {
	if !t.by.ours() {
		bits, err := t.load(ctx, cfg.Duration)
		return bits / 1e6, err
	}
	before, err := t.counters(ctx)
	if err != nil {
		return 0, err
	}
	bits, err := t.load(ctx, cfg.Duration)
	if err != nil {
		return 0, err
	}
	after, err := t.counters(ctx)
	if err != nil {
		return 0, err
	}
	through, past := after.TxSuccess-before.TxSuccess, after.Bypassed-before.Bypassed
	if through == 0 || t.by.bypasses() != (past > through) {
		return 0, fmt.Errorf("%d packets went through the function, and %d past it", through, past)
	}
	return bits / 1e6, nil
}

// filterTCPs measures TCP with offloads on or off.
func (c Config) filterTCPs(ctx context.Context, offload bool) (_ []Figure, err error) {
	c.separate = false
	var tracks []*filterTrack
	defer func() {
		for _, t := range tracks {
			err = errors.Join(err, t.close())
		}
	}()
	var subjects []subject
	for _, f := range filterTCPCases(offload) {
		subjects = append(subjects, subject{
			Series: Series{Name: f.name(), Unit: "Mbit/s", Better: More, Baseline: f.baseline()},
			prepare: func() (*trial, error) {
				t, err := f.open(ctx, c)
				if err != nil {
					return nil, err
				}
				tracks = append(tracks, t)
				return &trial{measure: func(ctx context.Context) (float64, error) { return t.rate(ctx, c) }}, nil
			},
		})
	}
	if c.skips(subjects) {
		return nil, nil
	}
	if _, err := exec.LookPath("iperf3"); err != nil {
		return nil, fmt.Errorf("measure TCP: %w; install it (apt-get install iperf3)", err)
	}
	return c.rounds(ctx, "nf, TCP", subjects)
}
