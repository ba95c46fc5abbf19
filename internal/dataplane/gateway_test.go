package dataplane

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// gatewayBed is node r1 of r1, r2, r3, with the gateway of service shop, whose origin is behind r3: rules
// name chains light and deep. legacy is the same by IPv4.
type gatewayBed struct {
	*streamBed
	link string
}

var (
	shopAt   = netip.MustParseAddrPort("[2001:db8:8::2]:443")
	legacyAt = netip.MustParseAddrPort("198.51.100.2:443")
)

func newGatewayBed(t *testing.T) *gatewayBed {
	node := func(name, n string, interfaces ...model.Interface) model.Node {
		return model.Node{Name: name, Address: xtest.Addr("fd00:1::" + n), Locator: xtest.Prefix("fc00:0:0:" + n + "00::/56"), Interfaces: interfaces}
	}
	edge, core := model.Interface{Name: "edge", Role: model.RoleEdge}, model.Interface{Name: "core", Role: model.RoleCore}
	d := model.Domain{
		Block: xtest.Prefix("fc00::/48"),
		Nodes: []model.Node{
			node("r1", "5", model.Interface{Name: "in", Role: model.RoleEdge}, model.Interface{Name: "side", Role: model.RoleCore}),
			node("r2", "6", core), node("r3", "7", edge, core),
		},
		Functions: []model.Function{{Name: "fw", Node: "r2", Kind: model.KindForward}},
		Clients:   []model.Clients{{Name: "staff", CA: "ca.pem", Kind: model.IdentitySPIFFE, Within: "staff.example", Lifetime: time.Hour}},
	}
	add := func(service string, at netip.AddrPort, chains ...string) {
		s := model.Service{Name: service, Hosts: []string{service + ".example.org"}, Nodes: []string{"r1"}, Address: at, Certificate: "c.pem", Key: "c.key", Clients: "staff",
			Origin: model.Origin{Address: at, CA: "ca.pem", Name: "shop.internal"}}
		onward := model.OnwardTo(at, chains)
		for _, c := range chains {
			o := onward[c]
			s.Rules = append(s.Rules, model.ServiceRule{Who: "spiffe://staff.example/**", Path: "/" + c, Chain: c})
			d.Chains = append(d.Chains, model.Chain{Name: c, Ingress: []string{"r1"}, Functions: []string{"fw"}, Egress: "r3", Both: true,
				Match: o.Match(), Onward: &o, Proof: model.Proof{Scheme: model.SchemeKeyedFlow}})
		}
		d.Services = append(d.Services, s)
	}
	add("shop", shopAt, "light", "deep")
	add("legacy", legacyAt, "old")
	compiled, err := plan.Compile(d, plan.NewKeyring(rand.NewChaCha8([32]byte{1}), nil))
	if err != nil {
		t.Fatal(err)
	}
	b := newProxyBed(t)
	link := model.StreamDetour(model.GatewayName).To
	b.must(b.net.AddVeth(host.Veth{Name: link, PeerName: "gateway-peer"}))
	b.must(errors.Join(b.net.SetUp(link), b.net.SetUp("gateway-peer")))
	g := &gatewayBed{&streamBed{&proxyRun{b, b.open(), map[string][6]byte{}, map[string]uint32{}}, compiled, 100}, link}
	b.must(errors.Join(
		b.net.AddAddress("in", xtest.Prefix("fd00:6::1/64")), b.net.AddRoute(host.Route{Destination: xtest.Prefix("fd00:7::/64"), Via: xtest.Addr("fd00:6::2"), Device: "in"}),
		b.net.AddAddress("in", xtest.Prefix("10.6.0.1/24")), b.net.AddRoute(host.Route{Destination: xtest.Prefix("192.0.2.0/24"), Via: xtest.Addr("10.6.0.2"), Device: "in"}),
		b.net.SetSysctl("net/ipv4/conf/all/forwarding", "1"),
	))
	g.must(g.apply(g.d, g.domain.Nodes[0]))
	for _, name := range []string{"in", "side", link} {
		l, err := b.net.Link(name)
		b.must(err)
		g.macs[name], g.index[name] = l.MAC, uint32(l.Index)
	}
	for _, name := range []string{"r2", "r3"} {
		l := g.domain.Nodes[slices.IndexFunc(g.domain.Nodes, func(n plan.Node) bool { return n.Name == name })].Locator
		if l != xtest.Prefix("fc00:0:0:200::/56") {
			b.must(b.net.AddRoute(host.Route{Destination: l, Via: xtest.Addr("fd00:5::2"), Device: "side"}))
		}
	}
	return g
}

// fromOutside holds that a client's packet gets to the gateway as it is.
func (g *gatewayBed) fromOutside(inner []byte) {
	g.Helper()
	verdict, out, err := g.run(object.EdgeTC, "in", ether(inner), 0)
	if err != nil || verdict != verdictRedirect || !slices.Equal(out[srv6.EthernetLen:], inner) {
		g.Errorf("verdict %d, %v, refusals %v, %x; want it at the gateway", int32(verdict), err, g.refusals(), out)
	}
}

// toOutside holds that what the gateway sends goes on plain.
func (g *gatewayBed) toOutside(inner []byte) {
	g.Helper()
	verdict, out, err := g.run(object.FunctionTC, g.link, ether(inner), 0)
	if err != nil || verdict != verdictRedirect || !slices.Equal(out[srv6.EthernetLen:], hopped(inner)) {
		g.Errorf("verdict %d, %v, refusals %v, %x; want it on its way as it is", int32(verdict), err, g.refusals(), out)
	}
}

func (g *gatewayBed) notFromOutside(reason abi.Reason, inner []byte) {
	g.Helper()
	g.wantRefused(reason, object.EdgeTC, "in", ether(inner), 0)
}

func (g *gatewayBed) notOut(reason abi.Reason, inner []byte) {
	g.Helper()
	g.wantRefused(reason, object.FunctionTC, g.link, ether(inner), 0)
}

// onward holds that what the gateway sends takes a path.
func (g *gatewayBed) onward(p plan.Path, inner []byte) {
	g.Helper()
	verdict, out, err := g.run(object.FunctionTC, g.link, ether(inner), 0)
	if err != nil || verdict != verdictRedirect {
		g.Errorf("verdict %d, %v, refusals %v; want it to take %s", int32(verdict), err, g.refusals(), p.PathID)
		return
	}
	x, err := srv6.DecodeFrame(out)
	if err != nil || x.SRH == nil {
		g.Errorf("it came out as %x: %v", out, err)
		return
	}
	if proof, _ := x.Proof(); proof.Path != p.Path || x.Header.Destination != p.Hops[1].SID || !slices.Equal(x.Payload, hopped(inner)) {
		g.Errorf("proof %+v to %s around %x; want path %s", proof, x.Header.Destination, x.Payload, p.PathID)
	}
}

// back holds that what comes by a path back gets to the gateway.
func (g *gatewayBed) back(p plan.Path, inner []byte) {
	g.Helper()
	verdict, out, err := g.run(object.CoreTC, "side", g.proven(p, inner), 0)
	if err != nil || verdict != verdictRedirect || !slices.Equal(out[srv6.EthernetLen:], inner) {
		g.Errorf("verdict %d, %v, refusals %v, %x; want it at the gateway", int32(verdict), err, g.refusals(), out)
	}
}

func (g *gatewayBed) chain(name string) plan.GatewayChain {
	g.Helper()
	for _, c := range g.domain.Nodes[0].Gateway().Chains {
		if c.Chain == name {
			return c
		}
	}
	g.Fatalf("no chain %s", name)
	return plan.GatewayChain{}
}

func (g *gatewayBed) byID(id uint32) plan.Path {
	g.Helper()
	i := slices.IndexFunc(g.domain.Paths, func(p plan.Path) bool { return p.Path == id })
	if i < 0 {
		g.Fatalf("no path %#x", id)
	}
	return g.domain.Paths[i]
}

// A client's connection gets to the gateway from outside, and its answers back; what the gateway opens takes the
// chain that it was let open for. Nothing else passes in any way.
func TestConnectionsPassTheGateway(t *testing.T) {
	for _, c := range []struct {
		chain, client string
		at            netip.AddrPort
	}{
		{"light", "[fd00:7::2]:40000", shopAt}, {"deep", "[fd00:7::2]:40000", shopAt}, {"old", "192.0.2.2:40000", legacyAt},
	} {
		t.Run(c.chain, func(t *testing.T) {
			g := newGatewayBed(t)
			client, at := netip.MustParseAddrPort(c.client), c.at
			chain := g.chain(c.chain)
			forward, back := g.byID(chain.Forward), g.byID(chain.Reverse)
			source := netip.AddrPortFrom(client.Addr(), chain.Ports.First)

			g.notFromOutside(abi.ReasonStreamUnknown, segmentOf(client, at, ack))
			g.notFromOutside(abi.ReasonStreamUnknown, segmentOf(client, at, syn|ack))
			g.notOut(abi.ReasonStreamUnknown, segmentOf(at, client, syn|ack))
			g.noClient("that is not there", client, at, source, chain)
			g.connect(client, at, source, chain)
			// A worker that was taken over opens a connection to whoever has sent a SYN.
			g.notOut(abi.ReasonStreamUnknown, segmentOf(at, client, syn))
			g.notOut(abi.ReasonStreamUnknown, segmentOf(at, client, syn|fin))
			g.notOut(abi.ReasonStreamUnknown, segmentOf(at, netip.AddrPortFrom(client.Addr(), 40001), ack))

			// A worker that was taken over dials by itself.
			g.notOut(abi.ReasonStreamUnknown, segmentOf(source, at, syn))
			g.notOut(abi.ReasonStreamUnknown, segmentOf(client, at, syn))
			g.wantRefused(abi.ReasonStreamUnknown, object.CoreTC, "side", g.proven(back, segmentOf(at, source, syn|ack)), 0)
			g.must(g.do(func() error { return g.d.OpenOnward(client, at, source, at, chain.Reverse) }))
			g.onward(forward, segmentOf(source, at, syn))
			// The origin still has an old connection, and the gateway's TCP begins anew (RFC 9293 section 3.5.1).
			g.back(back, segmentOf(at, source, ack))
			g.onward(forward, segmentOf(source, at, rst))
			g.onward(forward, segmentOf(source, at, syn))
			g.back(back, segmentOf(at, source, syn|ack))
			g.onward(forward, segmentOf(source, at, syn))
			g.onward(forward, segmentOf(source, at, ack))
			g.notOut(abi.ReasonStreamUnknown, segmentOf(source, at, syn))
			g.notOut(abi.ReasonStreamUnknown, segmentOf(netip.AddrPortFrom(source.Addr(), source.Port()+1), at, syn))
			g.notOut(abi.ReasonStreamUnknown, segmentOf(source, netip.AddrPortFrom(at.Addr(), 80), syn))
			short := segmentOf(source, at, syn)
			g.notOut(abi.ReasonStreamNotTcp, short[:len(short)-1])
			// Without a proof, and by a proof that is another's.
			g.wantRefused(abi.ReasonUnproven, object.CoreTC, "side", ether(segmentOf(at, source, ack)), 0)
			for _, other := range g.domain.Nodes[0].Gateway().Chains {
				if other.Chain != c.chain {
					g.wantRefused(abi.ReasonWrongChain, object.CoreTC, "side", g.proven(g.byID(other.Reverse), segmentOf(at, source, ack)), 0)
				}
			}
			// From outside nobody has the gateway's place towards the origin.
			g.notFromOutside(abi.ReasonUnproven, segmentOf(at, source, ack))
			g.notFromOutside(abi.ReasonStreamUnknown, segmentOf(source, at, ack))

			g.fromOutside(segmentOf(client, at, fin|ack))
			g.toOutside(segmentOf(at, client, fin|ack))
			g.onward(forward, segmentOf(source, at, fin|ack))
			g.back(back, segmentOf(at, source, fin|ack))
			conns := map[abi.ConnKey]abi.Conn{}
			g.must(readMap(g.d.gen, tables.MapConns, conns))
			for k, have := range conns {
				part := abi.BE32(chain.Reverse)
				if k.Proxy&abi.ConnAccepted != 0 {
					part = 0
				}
				if have.Part != part || have.Seen != abi.ConnAnswered|abi.ConnClientFin|abi.ConnServerFin {
					t.Errorf("%+v: %+v; want it of path %#x, answered, and ended by both", k, have, part)
				}
			}
			if len(conns) != 2 {
				t.Errorf("connections %+v; want the client's and the one onward", conns)
			}
			g.noClient("whose connection has ended", client, at, source, chain)
			g.notOut(abi.ReasonStreamUnknown, segmentOf(source, at, syn))
			// Ports are used again.
			g.connect(client, at, source, chain)
			g.must(g.do(func() error { return g.d.OpenOnward(client, at, source, at, chain.Reverse) }))
			g.onward(forward, segmentOf(source, at, syn))
			g.must(readMap(g.d.gen, tables.MapConns, conns))
			for k, have := range conns {
				if want := k.Proxy & abi.ConnAccepted / abi.ConnAccepted * abi.ConnAnswered; have.Seen != want {
					t.Errorf("%+v: %+v of a connection that begins; want %d seen", k, have, want)
				}
			}
			counts, err := g.d.SweepConnections(map[string]time.Duration{model.GatewayName: time.Hour})
			if err != nil || counts[model.GatewayName].Open != 2 {
				t.Errorf("%+v, %v; want two connections to be kept", counts, err)
			}
		})
	}
}

// connect holds that a client is connected when the gateway has something to say to it, and not before: who sends with
// another's address gets that far that TCP acknowledges what it has sent.
func (g *gatewayBed) connect(client, at, source netip.AddrPort, chain plan.GatewayChain) {
	g.Helper()
	g.fromOutside(segmentOf(client, at, syn))
	g.noClient("that has sent a SYN", client, at, source, chain)
	g.toOutside(segmentOf(at, client, syn|ack))
	g.noClient("that has been sent a SYN", client, at, source, chain)
	g.fromOutside(segmentOf(client, at, syn))
	g.toOutside(segmentOf(at, client, ack))
	g.noClient("that has sent two SYNs", client, at, source, chain)
	g.fromOutside(segmentOf(client, at, ack, 22, 3, 1))
	g.toOutside(segmentOf(at, client, ack))
	g.noClient("that has been sent no payload", client, at, source, chain)
	g.toOutside(segmentOf(at, client, ack, 22, 3, 3))
}

func (g *gatewayBed) noClient(which string, client, at, source netip.AddrPort, chain plan.GatewayChain) {
	g.Helper()
	if err := g.do(func() error { return g.d.OpenOnward(client, at, source, at, chain.Reverse) }); !errors.Is(err, ErrNoClient) {
		g.Errorf("for a client %s: %v; want that it is none", which, err)
	}
}

// Who sends resets with a client's address ends nothing: the client is one again with its next segment. A new SYN makes nobody one.
func TestAResetThatIsNotTheClientsIsForgotten(t *testing.T) {
	g := newGatewayBed(t)
	client := netip.MustParseAddrPort("[fd00:7::2]:40000")
	chain := g.chain("light")
	source := netip.AddrPortFrom(client.Addr(), chain.Ports.First)
	g.connect(client, shopAt, source, chain)
	g.fromOutside(segmentOf(client, shopAt, rst))
	g.noClient("that was reset", client, shopAt, source, chain)
	g.fromOutside(segmentOf(client, shopAt, syn))
	g.noClient("that was reset, and has sent a SYN", client, shopAt, source, chain)
	g.fromOutside(segmentOf(client, shopAt, ack, 23, 3, 3))
	g.must(g.do(func() error { return g.d.OpenOnward(client, shopAt, source, shopAt, chain.Reverse) }))
	g.fromOutside(segmentOf(client, shopAt, rst))
	g.fromOutside(segmentOf(client, shopAt, ack))
	g.toOutside(segmentOf(shopAt, client, rst))
	g.noClient("that the gateway has reset", client, shopAt, source, chain)
}

// A worker that was taken over cannot fill the table of connections with those onward.
func TestConnectionsOnwardAreBounded(t *testing.T) {
	g := newGatewayBed(t)
	client := netip.MustParseAddrPort("[fd00:7::2]:40000")
	chain := g.chain("light")
	source := netip.AddrPortFrom(client.Addr(), chain.Ports.First)
	next := netip.AddrPortFrom(client.Addr(), chain.Ports.First+1)
	open := func(source netip.AddrPort) error {
		return g.do(func() error { return g.d.OpenOnward(client, shopAt, source, shopAt, chain.Reverse) })
	}
	g.connect(client, shopAt, source, chain)
	g.must(open(source))
	g.d.onward = tables.OnwardMax
	if err := open(next); err == nil || !strings.Contains(err.Error(), "may have no more") {
		t.Errorf("beyond what it may have: %v", err)
	}
	g.notOut(abi.ReasonStreamUnknown, segmentOf(next, shopAt, syn))
	g.must(open(source)) // it has its place
	if _, err := g.d.SweepConnections(map[string]time.Duration{model.GatewayName: time.Hour}); err != nil || g.d.onward != 1 {
		t.Errorf("%v, and %d connections onward; want one", err, g.d.onward)
	}
	g.must(open(next))
	if g.d.onward != 2 {
		t.Errorf("%d connections onward; want two", g.d.onward)
	}
}

// What is not the service's goes the way it would without a gateway.
func TestTheGatewayTakesItsServiceAlone(t *testing.T) {
	g := newGatewayBed(t)
	client := netip.MustParseAddrPort("[fd00:7::2]:40000")
	for name, inner := range map[string][]byte{
		"another port":    segmentOf(client, netip.AddrPortFrom(shopAt.Addr(), 80), syn),
		"another address": segmentOf(client, netip.MustParseAddrPort("[2001:db8:8::3]:443"), syn),
		"UDP":             sentBy(client.Addr().String(), shopAt.Addr().String(), 17, 0x9c, 0x40, 1, 0xbb, 0, 8, 0, 0),
	} {
		if verdict, _, err := g.run(object.EdgeTC, "in", ether(inner), 0); err != nil || verdict != verdictUnspec {
			t.Errorf("%s: verdict %d, %v, refusals %v; want it to be routed", name, int32(verdict), err, g.refusals())
		}
	}
	g.d.Withhold(map[string]error{model.GatewayName: errors.New("no worker")})
	if err := g.do(g.d.Reconcile); err == nil {
		t.Error("a gateway that gets no packets is no problem")
	}
	g.notFromOutside(abi.ReasonStreamDown, segmentOf(client, shopAt, syn))
	none := g.domain.Nodes[0]
	none.Proxies, none.Headends, none.Egresses = nil, nil, nil
	g.must(g.apply(g.d, none))
	if verdict, _, err := g.run(object.EdgeTC, "in", ether(segmentOf(client, shopAt, syn)), 0); err != nil || verdict != verdictUnspec {
		t.Errorf("without a gateway: verdict %d, %v, refusals %v; want it to be routed", int32(verdict), err, g.refusals())
	}
}
