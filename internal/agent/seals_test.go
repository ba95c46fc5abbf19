package agent

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/seal"
	"github.com/waystamp/waystamp/internal/stream"
)

// sealedNodes are those of the example with a dpi that reads payload.
func sealedNodes(t *testing.T) (gateway, dpi plan.Node) {
	t.Helper()
	const file = "../../examples/zerotrust.yaml"
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	for _, c := range [][2]string{
		{"{name: dpi, node: r3, kind: forward}", "{name: dpi, node: r3, kind: stream, intrusive: true, run: [count]}"},
		{"functions: [fw2, dpi], egress: r6, direction: both", "functions: [fw2, dpi], egress: r6, direction: both, seal: true"},
	} {
		if !strings.Contains(text, c[0]) {
			t.Fatalf("the example has no %q", c[0])
		}
		text = strings.Replace(text, c[0], c[1], 1)
	}
	m, err := manifest.Parse(file, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	d, err := plan.Compile(m.Domain, nil)
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) plan.Node {
		return d.Nodes[slices.IndexFunc(d.Nodes, func(n plan.Node) bool { return n.Name == name })]
	}
	return at("r1"), at("r3")
}

// A worker gets the keys of the path that its connection came by, and the gateway's those of the chain that it takes.
func TestEndsAreOfTheConnectionsPath(t *testing.T) {
	r1, r3 := sealedNodes(t)
	i := slices.IndexFunc(r1.Gateway().Chains, func(c plan.GatewayChain) bool { return c.Chain == "deep" })
	chain := r1.Gateway().Chains[i]
	right := stream.Ask{Client: netip.AddrPortFrom(netip.MustParseAddr("fc00:7::2"), chain.Ports.First), Server: chain.Origin}
	read := func(name string) (string, error) { return "content of " + name, nil }
	ends, err := sealEnds(r3, "dpi", chain.Forward, right, read)
	if err != nil {
		t.Fatal(err)
	}
	dials := sealOnward(r1, chain)
	if dials == nil {
		t.Fatal("the gateway has no key for a sealed chain")
	}
	from := ends.From
	if from.Chain != "deep" || from.Path != chain.Forward || from.Name != seal.Name("r3", "dpi") || from.Other != seal.Name("r1", model.GatewayName) ||
		dials.Chain != from.Chain || dials.Path != from.Path || dials.Name != from.Other || dials.Other != from.Name ||
		!dials.Epochs[0].Peer.Equal(from.Epochs[0].Key.Public()) || !from.Epochs[0].Peer.Equal(dials.Epochs[0].Key.Public()) || from.Epochs[0].Number != dials.Epochs[0].Number {
		t.Error("the ends of the part do not fit each other")
	}
	if want := (stream.SealedOrigin{Service: "shop", Roots: "content of origin-ca.pem", Name: "shop.internal"}); ends.To != nil || len(ends.Origins) != 1 || ends.Origins[0] != want {
		t.Errorf("behind dpi there are %+v and %+v; want %+v", ends.To, ends.Origins, want)
	}
	i = slices.IndexFunc(r1.Gateway().Chains, func(c plan.GatewayChain) bool { return c.Chain == "light" })
	light := r1.Gateway().Chains[i]
	if sealOnward(r1, light) != nil {
		t.Error("a chain that is not sealed has a key")
	}
	for name, c := range map[string]struct {
		function string
		path     uint32
		change   func(*stream.Ask)
		read     func(string) (string, error)
	}{
		"another path":           {"dpi", chain.Reverse, func(*stream.Ask) {}, read},
		"no path":                {"dpi", 0, func(*stream.Ask) {}, read},
		"another function":       {"fw2", chain.Forward, func(*stream.Ask) {}, read},
		"another chain's port":   {"dpi", chain.Forward, func(q *stream.Ask) { q.Client = netip.AddrPortFrom(q.Client.Addr(), light.Ports.First) }, read},
		"another server":         {"dpi", chain.Forward, func(q *stream.Ask) { q.Server = netip.MustParseAddrPort("[fc00:8::3]:443") }, read},
		"no file of authorities": {"dpi", chain.Forward, func(*stream.Ask) {}, func(string) (string, error) { return "", errors.New("not there") }},
	} {
		q := right
		c.change(&q)
		if ends, err := sealEnds(r3, c.function, c.path, q, c.read); err == nil {
			t.Errorf("%s: a worker gets %+v", name, ends)
		}
	}
	r3.Headends = nil
	if _, err := sealEnds(r3, "dpi", chain.Forward, right, read); err == nil {
		t.Error("a worker gets keys for a chain that does not go on")
	}
}
