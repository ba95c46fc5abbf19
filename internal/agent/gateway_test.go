package agent

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/gateway/worker"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/plan"
)

func gatewayNode(t *testing.T) plan.Node {
	t.Helper()
	const file = "../../examples/zerotrust.yaml"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m, err := manifest.Parse(file, text)
	if err != nil {
		t.Fatal(err)
	}
	d, err := plan.Compile(m.Domain, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range d.Nodes {
		if n.Gateway() != nil {
			return n
		}
	}
	t.Fatal("no node of the example has a gateway")
	panic("unreachable")
}

// Whatever the worker asks for, it gets no connection but one for a client that is there, by a chain of its service.
func TestTheGatewaysWorkerIsNotTrusted(t *testing.T) {
	n := gatewayNode(t)
	g := n.Gateway()
	if len(g.Chains) < 2 {
		t.Fatalf("the example has chains %+v; want two", g.Chains)
	}
	c, other := g.Chains[0], g.Chains[1]
	client := netip.MustParseAddrPort("[fc00:7::2]:40000")
	right := worker.Ask{Chain: c.Chain, Client: client, Source: netip.AddrPortFrom(client.Addr(), c.Ports.First), Origin: c.Origin}
	at := func(client string) func(*worker.Ask) {
		return func(q *worker.Ask) {
			q.Client = netip.AddrPortFrom(netip.MustParseAddr(client), q.Client.Port())
			q.Source = netip.AddrPortFrom(q.Client.Addr(), q.Source.Port())
		}
	}
	for name, test := range map[string]struct {
		change func(*worker.Ask)
		says   string // "": it is let
	}{
		"what it may":          {func(*worker.Ask) {}, ""},
		"the last port":        {func(q *worker.Ask) { q.Source = netip.AddrPortFrom(client.Addr(), c.Ports.Last) }, ""},
		"another chain":        {func(q *worker.Ask) { q.Chain = "web" }, "no rule names chain"},
		"no chain":             {func(q *worker.Ask) { q.Chain = "" }, "no rule names chain"},
		"another origin":       {func(q *worker.Ask) { q.Origin = netip.MustParseAddrPort("[fc00:8::2]:22") }, "leads to"},
		"another chain's port": {func(q *worker.Ask) { q.Source = netip.AddrPortFrom(client.Addr(), other.Ports.First) }, "is not one of chain"},
		"port 0":               {func(q *worker.Ask) { q.Source = netip.AddrPortFrom(client.Addr(), 0) }, "is not one of chain"},
		"another address":      {func(q *worker.Ask) { q.Source = netip.AddrPortFrom(netip.MustParseAddr("fc00:7::3"), c.Ports.First) }, "is not the address of client"},
		"no addresses":         {func(q *worker.Ask) { q.Source, q.Client = netip.AddrPort{}, netip.AddrPort{} }, "is not one of chain"},
		"IPv4 as IPv6":         {at("::ffff:192.0.2.2"), "is not an address as"},
		"a zone":               {at("fe80::2%eth0"), "is not an address as"},
	} {
		f := newFakeMachine()
		a := &agent{dp: fakeDataPath{f}}
		a.inForce.Store(&n)
		q := right
		test.change(&q)
		_, err := a.allowOnward(q)
		if test.says == "" && (err != nil || len(f.steps) != 1 || !strings.HasPrefix(f.steps[0], "open onward "+client.String())) {
			t.Errorf("%s: %v, after %q; want that it is let", name, err, f.steps)
		}
		if test.says != "" && (err == nil || !strings.Contains(err.Error(), test.says) || len(f.steps) > 0) {
			t.Errorf("%s: %v, after %q; want that it is refused: %s", name, err, f.steps, test.says)
		}
	}
	f := newFakeMachine()
	f.fails["open onward"] = dataplane.ErrNoClient
	a := &agent{dp: fakeDataPath{f}}
	if _, err := a.allowOnward(right); err == nil {
		t.Error("without a plan a connection is let")
	}
	a.inForce.Store(&n)
	if _, err := a.allowOnward(right); err == nil || !strings.Contains(err.Error(), client.String()) {
		t.Errorf("for a client that is not there: %v", err)
	}
}
