package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/metrics"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/seal"
	"github.com/waystamp/waystamp/internal/stream"
)

// sealedDomain is the example with a dpi that reads payload.
func sealedDomain(t *testing.T) model.Domain {
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
	return m.Domain
}

func sealedNodes(t *testing.T) (gateway, dpi plan.Node) {
	t.Helper()
	d, err := plan.Compile(sealedDomain(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	return gatewayAndDPI(d.Nodes)
}

func gatewayAndDPI(nodes []plan.Node) (gateway, dpi plan.Node) {
	at := func(name string) plan.Node {
		return nodes[slices.IndexFunc(nodes, func(n plan.Node) bool { return n.Name == name })]
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
	ends, err := sealEnds(r3, "dpi", chain.Forward, right, nil, read)
	if err != nil {
		t.Fatal(err)
	}
	dials, err := sealOnward(r1, chain, nil)
	if err != nil || dials == nil {
		t.Fatalf("the gateway has no key for a sealed chain: %v", err)
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
	if part, err := sealOnward(r1, light, nil); part != nil || err != nil {
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
		if ends, err := sealEnds(r3, c.function, c.path, q, nil, c.read); err == nil {
			t.Errorf("%s: a worker gets %+v", name, ends)
		}
	}
	r3.Headends = nil
	if _, err := sealEnds(r3, "dpi", chain.Forward, right, nil, read); err == nil {
		t.Error("a worker gets keys for a chain that does not go on")
	}
}

// buffered is a connection on lo: both ends.
func buffered(t *testing.T) (near, far net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if near, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if far, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	return near, far
}

// While keys change in steps, which nodes take one after the other, ends shake hands. An end that skipped a step does not.
func TestEndsShakeHandsWhileKeysChange(t *testing.T) {
	last, err := plan.Compile(sealedDomain(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	keys := plan.NewKeyring(rand.Reader, last.Paths)
	keys.KeepSIDs()
	keys.Rotate(func(string) bool { return true })
	next, err := plan.Compile(sealedDomain(t), keys)
	if err != nil {
		t.Fatal(err)
	}
	s, err := plan.MakeSteps(last.Paths, last.Nodes, next)
	if err != nil {
		t.Fatal(err)
	}
	shake := func(dials, takes []plan.Node) error {
		r1, _ := gatewayAndDPI(dials)
		_, r3 := gatewayAndDPI(takes)
		chains := r1.Gateway().Chains
		chain := chains[slices.IndexFunc(chains, func(c plan.GatewayChain) bool { return c.Chain == "deep" })]
		q := stream.Ask{Client: netip.AddrPortFrom(netip.MustParseAddr("fc00:7::2"), chain.Ports.First), Server: chain.Origin}
		ends, err := sealEnds(r3, "dpi", chain.Forward, q, nil, func(string) (string, error) { return "", nil })
		if err != nil {
			return err
		}
		ctx, stop := context.WithTimeout(t.Context(), await.Limit(20*time.Second))
		defer stop()
		near, far := buffered(t) // each end sends before the other one reads
		defer near.Close()
		taken := make(chan error, 1)
		go func() {
			c, _, err := ends.From.Accept(ctx, far)
			if err == nil {
				err = c.Answer(t.Context(), seal.Answer{})
			}
			taken <- errors.Join(err, far.Close())
		}()
		part, err := sealOnward(r1, chain, nil)
		if err == nil {
			_, err = part.Dial(ctx, near, "shop", seal.HTTP1)
		}
		near.Close()
		return errors.Join(err, <-taken)
	}
	steps := [][]plan.Node{last.Nodes, s.Both, s.Turn, next.Nodes}
	for i, dials := range steps {
		for j, takes := range steps {
			err := shake(dials, takes)
			if apart := i - j; (err == nil) != (apart >= -1 && apart <= 1) && apart*apart != 4 {
				t.Errorf("an end at step %d dials one at step %d: %v", i, j, err)
			}
		}
	}
	if shake(last.Nodes, next.Nodes) == nil || shake(next.Nodes, last.Nodes) == nil {
		t.Error("ends of different epochs take each other")
	}
}

// Where a controller signs, workers get the node's own keys, and none without a certificate.
func TestEndsOfAControllersPlanAreTheNodesOwn(t *testing.T) {
	ring := plan.NewKeyring(rand.Reader, nil)
	ring.Certify("corp.example", map[string]uint32{"r1": 3})
	d, err := plan.Compile(sealedDomain(t), ring)
	if err != nil {
		t.Fatal(err)
	}
	r1, r3 := gatewayAndDPI(d.Nodes)
	i := slices.IndexFunc(r1.Gateway().Chains, func(c plan.GatewayChain) bool { return c.Chain == "deep" })
	chain := r1.Gateway().Chains[i]
	q := stream.Ask{Client: netip.AddrPortFrom(netip.MustParseAddr("fc00:7::2"), chain.Ports.First), Server: chain.Origin}
	read := func(string) (string, error) { return "", nil }
	asked := ""
	own := func(name string) (seal.Identity, error) {
		asked = name
		return seal.Identity{Key: []byte("key of " + name), Certificate: []byte("certificate"), Roots: [][]byte{[]byte("root")}}, nil
	}
	ends, err := sealEnds(r3, "dpi", chain.Forward, q, own, read)
	if err != nil {
		t.Fatal(err)
	}
	const dpi, gateway = "spiffe://corp.example/node/r3/function/dpi", "spiffe://corp.example/node/r1/function/gateway"
	if e := ends.From.Epochs[0]; ends.From.Name != dpi || ends.From.Other != gateway || string(e.Key) != "key of "+dpi || e.Peer != nil || string(e.Certificate) != "certificate" || len(e.Roots) != 1 {
		t.Errorf("dpi has %s with %s, and %q", ends.From.Name, ends.From.Other, asked)
	}
	// How often the other end's node was revoked, the plan says.
	if ends.From.Epochs[0].PeerRevocations != 3 {
		t.Errorf("dpi takes a gateway of %d revocations; want 3", ends.From.Epochs[0].PeerRevocations)
	}
	part, err := sealOnward(r1, chain, own)
	if err != nil || part.Name != gateway || part.Other != dpi || asked != gateway {
		t.Errorf("the gateway has %+v, %v", part, err)
	}
	none := func(name string) (seal.Identity, error) {
		return seal.Identity{}, errors.New("no certificate for " + name)
	}
	for what, own := range map[string]identities{"no certificate for spiffe://corp.example/": none, "start it with --controller": nil} {
		if ends, err := sealEnds(r3, "dpi", chain.Forward, q, own, read); err == nil || ends != nil || !strings.Contains(err.Error(), what) {
			t.Errorf("dpi gets keys: %v; want %q", err, what)
		}
		if part, err := sealOnward(r1, chain, own); err == nil || part != nil || !strings.Contains(err.Error(), what) {
			t.Errorf("the gateway gets keys: %v; want %q", err, what)
		}
	}
}

// A controller's plan of sealed chains is refused by an agent without a controller, which could open none of their connections. One
// of waystamp plan has the keys, and is taken.
func TestAControllersPlanOfSealedChainsNeedsItsController(t *testing.T) {
	ring := plan.NewKeyring(rand.Reader, nil)
	ring.Certify("corp.example", nil)
	for what, c := range map[string]struct {
		ring *plan.Keyring
		own  identities
		says string
	}{
		"a controller's":          {ring, nil, "signs the keys of ends of sealed parts (av, dpi), and this agent has no controller: start it with --controller"},
		"a controller's, with it": {ring, func(string) (seal.Identity, error) { return seal.Identity{}, nil }, ""},
		"with keys":               {plan.NewKeyring(rand.Reader, nil), nil, ""},
	} {
		d, err := plan.Compile(sealedDomain(t), c.ring)
		if err != nil {
			t.Fatal(err)
		}
		_, r3 := gatewayAndDPI(d.Nodes)
		b, err := plan.EncodeNode(r3)
		if err != nil {
			t.Fatal(err)
		}
		a := &agent{cfg: Config{PlanFile: "r3.json", End: c.own}}
		_, err = a.decode(t.Context(), b)
		if c.says == "" {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
			continue
		}
		if _, ok := errors.AsType[*PlanError](err); !ok || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %q", what, err, c.says)
		}
	}
}

// Metrics tell until when the certificates of the node's ends are valid.
func TestMetricsTellWhenCertificatesOfEndsEnd(t *testing.T) {
	ring := plan.NewKeyring(rand.Reader, nil)
	ring.Certify("corp.example", nil)
	d, err := plan.Compile(sealedDomain(t), ring)
	if err != nil {
		t.Fatal(err)
	}
	r1, r3 := gatewayAndDPI(d.Nodes)
	const dpi = "spiffe://corp.example/node/r3/function/dpi"
	a := &agent{cfg: Config{EndCertificate: func(name string) (at time.Time) {
		if name == dpi {
			at = time.Unix(1_800_000_000, 0)
		}
		return at
	}}}
	for n, want := range map[*plan.Node]map[string]float64{
		&r3: {`waystamp_end_certificate_expires_timestamp_seconds{function="dpi"}`: 1_800_000_000, `waystamp_end_certificate_expires_timestamp_seconds{function="av"}`: 0}, // it has none
		&r1: {`waystamp_end_certificate_expires_timestamp_seconds{function="gateway"}`: 0},
	} {
		a.inForce.Store(n)
		m := metrics.NewSet(Metrics)
		a.measureEnds(m)
		if got := written(t, m); len(got) != len(want) {
			t.Errorf("%s: %v", n.Name, got)
		} else {
			wants(t, got, want)
		}
	}
}
