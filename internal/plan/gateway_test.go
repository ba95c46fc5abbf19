package plan

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

// serving is paper with a service behind r6, whose gateway is on r1: rules name the chains web,
// by fw and dpi, and light, by fw alone.
func serving() model.Domain {
	d := paper(model.SchemeKeyedFlow)
	origin := netip.MustParseAddrPort("[fc00:8::2]:443")
	light := d.Chains[0]
	light.Name, light.Functions = "light", []string{"fw"}
	d.Chains = append(d.Chains, light)
	d.Clients = []model.Clients{{Name: "staff", CA: "staff-ca.pem", Kind: model.IdentitySPIFFE, Within: "staff.example", CRL: "staff.crl", OCSP: true, Responder: "http://ocsp.example.org:8080/", OlderThan: time.Hour, Lifetime: 24 * time.Hour}}
	d.Services = []model.Service{{
		Name: "shop", Hosts: []string{"shop.example.org"}, Nodes: []string{"r1"}, Address: origin, Certificate: "shop.pem", Key: "shop.key", Clients: "staff",
		Origin:  model.Origin{Address: origin, CA: "origin-ca.pem", Name: "shop.internal"},
		Headers: model.ClientHeaders{Certificate: "Client-Cert", PEM: "X-Cert", Identity: "X-Client", Serial: "X-Serial"},
		Rules: []model.ServiceRule{
			{Who: "spiffe://staff.example/ops/*", Methods: []string{"GET"}, Hosts: []string{"shop.example.org"}, Path: "/status", Headers: []model.ServiceHeader{{Name: "X-Version", Value: "beta"}}, Chain: "light"},
			{Who: "**", Chain: "web"},
		},
	}}
	onward(&d)
	return d
}

// onward gives chains that rules name their match, as internal/manifest does.
func onward(d *model.Domain) {
	names := []string{}
	for i := range d.Chains {
		names = append(names, d.Chains[i].Name)
	}
	to := model.OnwardTo(d.Services[0].Origin.Address, names)
	for i := range d.Chains {
		c := &d.Chains[i]
		c.Onward = new(to[c.Name])
		c.Match = c.Onward.Match()
	}
}

func TestChainsOfRulesBeginAndEndAtTheGateway(t *testing.T) {
	d := serving()
	d.Nodes[3].Interfaces[0].Guard = model.GuardOff
	c := compile(t, d, NewKeyring(random(1), nil))
	by := map[uint32]PathID{}
	var got []string
	for _, p := range c.Paths {
		by[p.Path] = p.PathID
		got = append(got, fmt.Sprintf("%s: %s, guard %s", p.PathID, p.Match, p.Guard))
	}
	web, light := d.Chains[0].Onward.Ports, d.Chains[1].Onward.Ports
	rest, other, its := "light", "web", web
	if d.Chains[0].Onward.Rest {
		rest, other, its = "web", "light", light
	}
	want := map[string]string{
		rest:  "priority 2, destination fc00:8::2/128, protocol tcp, destination port 443",
		other: "priority 1, destination fc00:8::2/128, protocol tcp, source port " + its.String() + ", destination port 443",
	}
	back := map[string]string{
		rest:  "priority 2, source fc00:8::2/128, protocol tcp, source port 443",
		other: "priority 1, source fc00:8::2/128, protocol tcp, source port 443, destination port " + its.String(),
	}
	if diff := cmp.Diff([]string{
		"chain web, forward, from gateway on: " + want["web"] + ", guard enforce",
		"chain web, reverse, up to gateway: " + back["web"] + ", guard enforce",
		"chain light, forward, from gateway on: " + want["light"] + ", guard enforce",
		"chain light, reverse, up to gateway: " + back["light"] + ", guard enforce",
	}, got); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}

	for _, n := range c.Nodes {
		again, err := DecodeNode(unchecked(t, n))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(n, again, equal); diff != "" {
			t.Errorf("%s read again (-written +read):\n%s", n.Name, diff)
		}
		if n.Name != "r1" && n.Gateway() != nil {
			t.Errorf("%s has the gateway", n.Name)
		}
	}
	r1, r6 := c.Nodes[0], c.Nodes[3]
	g := r1.Gateway()
	if g == nil || len(g.Services) != 1 || len(g.Clients) != 1 || g.MTU != 1580 {
		t.Fatalf("the gateway of r1 is %+v", g)
	}
	if diff := cmp.Diff(d.Services, g.Services, equal); diff != "" {
		t.Errorf("services (-file +plan):\n%s", diff)
	}
	for i, name := range []string{"light", "web"} {
		c := g.Chains[i]
		if forward, reverse := by[c.Forward], by[c.Reverse]; c.Chain != name || forward.Chain != name || forward.From != model.GatewayName || reverse.Chain != name || reverse.To != model.GatewayName {
			t.Errorf("chain %s is %+v: %s, %s", name, c, forward, reverse)
		}
	}
	if rules := r1.HeadendRules(); len(rules) != 0 {
		t.Errorf("packets from outside are classified into a gateway's chains: %v", rules)
	}
	for _, e := range r1.Egresses {
		forward := g.Chains[0].Forward
		if e.Chain == "web" {
			forward = g.Chains[1].Forward
		}
		if want := (Through{Part: e.Path, Onward: forward, Back: forward, Other: e.Path}); e.Through == nil || *e.Through != want {
			t.Errorf("%s goes on by %+v; want %+v", e.PathID, e.Through, want)
		}
	}
	if len(r6.HeadendRules()) != 2 || len(r6.GuardRules()) != 2 {
		t.Errorf("r6 classifies by %v and guards by %v", r6.HeadendRules(), r6.GuardRules())
	}
}

// A chain keeps its ports while others come and go: else their connections would be refused.
func TestAChainKeepsItsPorts(t *testing.T) {
	origin := netip.MustParseAddrPort("192.0.2.1:443")
	names := []string{}
	before := map[string]model.Onward{}
	for i := range model.OnwardChainsMax {
		names = append(names, fmt.Sprintf("chain-%c", 'a'+i))
		to := model.OnwardTo(origin, names)
		rest := 0
		for name, o := range to {
			if o.Ports.First < 1024 || o.Ports.Last-o.Ports.First != model.OnwardPorts-1 || o.Origin != origin {
				t.Errorf("%s has ports %s", name, o.Ports)
			}
			for other, p := range to {
				if other != name && p.Ports.First <= o.Ports.Last && o.Ports.First <= p.Ports.Last {
					t.Errorf("%s and %s share ports: %s, %s", name, other, o.Ports, p.Ports)
				}
			}
			if was, ok := before[name]; ok && was.Ports != o.Ports {
				t.Errorf("%s had ports %s before %s came, and has %s", name, was.Ports, names[i], o.Ports)
			}
			if o.Rest {
				rest++
			}
		}
		if rest != 1 || len(to) != i+1 {
			t.Errorf("of %d chains %d have ports, and %d the rest", i+1, len(to), rest)
		}
		before = to
	}
}

// Every connection to an origin's port is some chain's, also from ports that no gateway uses.
func TestTheGuardOfAServiceHasNoGap(t *testing.T) {
	c := compile(t, serving(), NewKeyring(random(1), nil))
	rules := Ordered(c.Nodes[3].GuardRules())
	g := c.Nodes[0].Gateway()
	for port := range 1 << 16 {
		var takes uint32
		for _, r := range rules {
			m := r.Match
			if (m.SourcePort == model.Ports{} || int(m.SourcePort.First) <= port && port <= int(m.SourcePort.Last)) {
				takes = r.Target
				break
			}
		}
		want := uint32(0)
		for _, c := range g.Chains {
			if int(c.Ports.First) <= port && port <= int(c.Ports.Last) {
				want = c.Forward
			}
		}
		if takes == 0 || want != 0 && takes != want {
			t.Fatalf("from port %d the guard wants path %#x; want %#x", port, takes, want)
		}
	}
}

func TestServicesThatDoNotHoldAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*model.Domain)
		want   string
	}{
		"a match of its own": {func(d *model.Domain) {
			d.Chains[0].Match = model.Match{Destination: netip.MustParsePrefix("fc00:9::/64")}
		}, "a match of its own"},
		"no rule names it":      {func(d *model.Domain) { d.Services[0].Rules = d.Services[0].Rules[:1] }, "if and only if a rule"},
		"no such chain":         {func(d *model.Domain) { d.Services[0].Rules[0].Chain = "nowhere" }, "nowhere, which is not there"},
		"one direction":         {func(d *model.Domain) { d.Chains[0].Both = false }, "direction: both"},
		"another ingress":       {func(d *model.Domain) { d.Services[0].Nodes = []string{"r2"} }, "is not the gateway's node alone"},
		"two gateways":          {func(d *model.Domain) { d.Services[0].Nodes = []string{"r1", "r2"} }, "has one gateway yet"},
		"a weak scheme":         {func(d *model.Domain) { d.Chains[0].Proof.Scheme = model.SchemeOPoT }, "resists no adversary"},
		"a proof of any packet": {func(d *model.Domain) { d.Chains[0].Proof.Scheme = model.SchemeKeyed }, "does not bind a proof"},
		"a guard that lets by":  {func(d *model.Domain) { d.Chains[0].Guard = model.GuardAudit }, "have no proof"},
		"the name of gateways": {func(d *model.Domain) {
			d.Functions[0].Name = "gateway"
			d.Chains[0].Functions[0] = "gateway"
			d.Chains[1].Functions = []string{"gateway"}
		}, "stands for gateways"},
		"no protocol of HTTP's own": {func(d *model.Domain) {
			d.Services[0].Opaque = model.Opaque{On: true, Idle: time.Hour, ALPN: []string{"http/1.1"}}
		}, "alpn: \"http/1.1\" is HTTP"},
		"no request to look at": {func(d *model.Domain) {
			d.Services[0].Opaque, d.Services[0].Headers = model.Opaque{On: true, Idle: time.Hour}, model.ClientHeaders{}
		}, "methods: the service's protocol is tls"},
		"settings of others": {func(d *model.Domain) { d.Services[0].Opaque.Idle = time.Hour }, "alpn and idle are of"},
		"plain origin":       {func(d *model.Domain) { d.Services[0].Origin.CA = "" }, "origin: ca"},
		"key elsewhere":      {func(d *model.Domain) { d.Services[0].Key = "../shop.key" }, "lead elsewhere"},
		"no clients":         {func(d *model.Domain) { d.Services[0].Clients = "guests" }, "no clients"},
		"stolen keys live on": {func(d *model.Domain) {
			c := &d.Clients[0]
			c.CRL, c.OCSP, c.Responder, c.Lifetime, c.OlderThan = "", false, "", 0, 0
		}, "stolen key"},
		"a responder that nobody asks": {func(d *model.Domain) { d.Clients[0].OCSP = false }, "responder needs ocsp"},
		"a header of HTTP's own":       {func(d *model.Domain) { d.Services[0].Headers.Identity = "Content-Length" }, "has a meaning in HTTP"},
		"a header of two words":        {func(d *model.Domain) { d.Services[0].Headers.Identity = "X Client" }, "is not the name of a header"},
		"a header of two means": {func(d *model.Domain) {
			d.Services[0].Headers = model.ClientHeaders{Identity: "X-Client", Serial: "x-client"}
		}, "is given twice"},
		"headers for no request": {func(d *model.Domain) {
			d.Services[0].Opaque = model.Opaque{On: true, Idle: time.Hour}
			d.Services[0].Headers = model.StandardHeaders()
		}, "are for services of HTTP"},
		"a responder by file":      {func(d *model.Domain) { d.Clients[0].Responder = "file:///etc/shadow" }, "not a URL of a responder"},
		"answers of any age":       {func(d *model.Domain) { d.Clients[0].CRL, d.Clients[0].OlderThan = "", 0 }, "older-than 0s is not from"},
		"a rule that is hidden":    {func(d *model.Domain) { r := d.Services[0].Rules; r[0], r[1] = r[1], r[0] }, "never reached"},
		"another origin":           {func(d *model.Domain) { d.Services[0].Origin.Address = netip.MustParseAddrPort("[fc00:8::3]:443") }, "leads to"},
		"a chain around":           {func(d *model.Domain) { d.Chains = append(d.Chains, around(1)) }, "same priority"},
		"a chain around the rest":  {func(d *model.Domain) { d.Chains = append(d.Chains, around(2)) }, "same priority"},
		"two services with a host": {func(d *model.Domain) { s := d.Services[0]; s.Name = "two"; d.Services = append(d.Services, s) }, "is that of service shop already"},
	} {
		t.Run(name, func(t *testing.T) {
			d := serving()
			c.change(&d)
			if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

// around takes packets of the service with a priority.
func around(priority uint16) model.Chain {
	return model.Chain{Name: "around", Ingress: []string{"r1"}, Functions: []string{"fw"}, Egress: "r6", Match: model.Match{
		Destination: netip.MustParsePrefix("fc00:8::/64"), Priority: priority, Protocol: 6,
	}}
}

// What takes the service's packets behind the chains that rules name is refused at the egress: it
// asks for those. So it may be there.
func TestAWiderChainStandsBesideAService(t *testing.T) {
	for _, m := range []model.Match{around(3).Match, {Destination: netip.MustParsePrefix("fc00:8::/64")}} {
		d := serving()
		c := around(3)
		c.Match, c.Ingress = m, []string{"r2"}
		d.Nodes[1].Interfaces = append(d.Nodes[1].Interfaces, model.Interface{Name: "r2-h3", Role: model.RoleEdge})
		d.Chains = append(d.Chains, c)
		r6 := compile(t, d, NewKeyring(random(1), nil)).Nodes[3]
		if _, err := DecodeNode(unchecked(t, r6)); err != nil {
			t.Error(err)
		}
		if first := Ordered(r6.GuardRules())[0]; first.Target == pathHash(PathID{Chain: "around"}) {
			t.Error("the wider chain comes first at the guard")
		}
	}
}

func TestNodeRefusesAGatewayThatDoesNotHold(t *testing.T) {
	gateway := func(f func(*Gateway)) func(*Node) { return func(n *Node) { f(n.Gateway()) } }
	for name, c := range map[string]struct {
		change func(*Node)
		want   string
	}{
		"gone":                   {func(n *Node) { n.Proxies = nil }, "is no function of this node"},
		"another name":           {func(n *Node) { n.Proxies[0].Function = "gate" }, "stands for function"},
		"another interface":      {func(n *Node) { n.Proxies[0].To = "eth9" }, "its interface"},
		"no service":             {gateway(func(g *Gateway) { g.Services = nil }), "no rule names"},
		"unknown chain":          {gateway(func(g *Gateway) { g.Chains = g.Chains[:1] }), "there is no chain"},
		"path of another":        {gateway(func(g *Gateway) { g.Chains[0].Forward = g.Chains[1].Forward }), "does not begin at it"},
		"way back of another":    {gateway(func(g *Gateway) { g.Chains[0].Reverse = g.Chains[1].Reverse }), "does not end at it"},
		"no path":                {gateway(func(g *Gateway) { g.Chains[0].Forward = 0 }), "does not begin at it"},
		"privileged ports":       {gateway(func(g *Gateway) { g.Chains[0].Ports.First = 1 }), "no range of ports"},
		"ports of another":       {gateway(func(g *Gateway) { g.Chains[0].Ports = g.Chains[1].Ports }), "are those of chain"},
		"packets too large":      {gateway(func(g *Gateway) { g.MTU = 70000 }), "mtu 70000"},
		"clients without a kind": {gateway(func(g *Gateway) { g.Clients[0].Kind = "shoe" }), "shoe"},
		"clients twice":          {gateway(func(g *Gateway) { g.Clients = append(g.Clients, g.Clients[0]) }), "given twice"},
		"a rule of nonsense":     {gateway(func(g *Gateway) { g.Services[0].Rules[0].Who = "alice" }), "not an identity"},
		"a port of no number":    {gateway(func(g *Gateway) { g.Services[0].Address = netip.MustParseAddrPort("[fc00:8::2]:0") }), "address with a port"},
		"a certificate of none":  {gateway(func(g *Gateway) { g.Services[0].Certificate = "" }), "certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			n := compile(t, serving(), NewKeyring(random(1), nil)).Nodes[0]
			c.change(&n)
			if _, err := DecodeNode(unchecked(t, n)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

// Rules change with the headends, and not before: they name chains that begin at the node.
func TestAGatewaysRulesChangeWithItsHeadends(t *testing.T) {
	d := serving()
	last := compile(t, d, NewKeyring(random(1), nil))
	next := serving()
	more := next.Chains[1]
	more.Name = "more"
	next.Chains = append(next.Chains, more)
	next.Services[0].Rules = append([]model.ServiceRule{{Who: "**", Path: "/more", Chain: "more"}}, next.Services[0].Rules...)
	onward(&next)
	keys := NewKeyring(random(2), last.Paths)
	keys.KeepSIDs()
	now := compile(t, next, keys)
	steps, err := MakeSteps(last.Paths, last.Nodes, now)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(steps.Both[0].Gateway().Chains); n != 2 {
		t.Errorf("in the first step the gateway knows %d chains; want those of before", n)
	}
	if n := len(steps.Turn[0].Gateway().Chains); n != 3 {
		t.Errorf("in the second step the gateway knows %d chains; want 3", n)
	}
}

// Whether responders are asked and how origins hear of clients goes to the plan and back, and asks for an agent that knows it.
func TestAPlanAsksForResponders(t *testing.T) {
	d := serving()
	for _, has := range []bool{true, false} {
		r1 := compile(t, d, NewKeyring(random(1), nil)).Nodes[0]
		again, err := DecodeNode(unchecked(t, r1))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(r1.Gateway().Clients, again.Gateway().Clients); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff(r1.Gateway().Services, again.Gateway().Services, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Error(diff)
		}
		for _, feature := range []string{featureOCSP, featureHeaders} {
			if slices.Contains(again.Features(), feature) != has {
				t.Errorf("the plan asks for %q: %v; want %v", feature, !has, has)
			}
			if !slices.Contains(Features(), feature) || slices.Contains(FirstFeatures, feature) {
				t.Errorf("%q is no feature of this version alone", feature)
			}
		}
		d.Clients[0].OCSP, d.Clients[0].Responder, d.Services[0].Headers = false, "", model.StandardHeaders()
	}
}

// A service whose protocol is not HTTP goes to the plan and back, and asks for an agent that knows such services.
func TestAnOpaqueServiceIsInThePlan(t *testing.T) {
	d := serving()
	d.Services[0].Headers = model.ClientHeaders{}
	d.Services[0].Opaque = model.Opaque{On: true, ALPN: []string{"imap", "postgresql"}, Idle: 90 * time.Second}
	d.Services[0].Rules = []model.ServiceRule{{Who: "spiffe://staff.example/ops/*", Chain: "light"}, {Who: "**", Chain: "web"}}
	r1 := compile(t, d, NewKeyring(random(1), nil)).Nodes[0]
	again, err := DecodeNode(unchecked(t, r1))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(d.Services, again.Gateway().Services, equal); diff != "" {
		t.Errorf("services (-file +plan):\n%s", diff)
	}
	if !slices.Contains(again.Features(), featureOpaque) || slices.Contains(FirstFeatures, featureOpaque) {
		t.Errorf("the plan asks for %q", again.Features())
	}
	if f := compile(t, serving(), NewKeyring(random(1), nil)).Nodes[0].Features(); slices.Contains(f, featureOpaque) {
		t.Errorf("a plan of HTTP alone asks for %q", f)
	}
}

// A proxy goes to the plan and back, and so does a gateway at an address of its node; each asks for an agent that knows it.
func TestAProxyIsInThePlan(t *testing.T) {
	proxying := func() model.Domain {
		d := serving()
		s := &d.Services[0]
		s.Mode, s.Opaque = model.ModeConnect, model.Opaque{On: true, Idle: time.Hour}
		s.Headers = model.ClientHeaders{}
		s.Destinations = []model.Destination{{Host: "git.example.org", Port: 22, Address: s.Origin.Address}, {Host: "git.example.org", Port: 443, Address: s.Origin.Address}}
		s.Origin = model.Origin{}
		s.Rules = []model.ServiceRule{
			{Who: "spiffe://staff.example/ops/*", To: []string{"git.example.org:22"}, Chain: "light"},
			{Who: "**", To: []string{"git.example.org:443", "git.example.org:22"}, Chain: "web"},
		}
		return d
	}
	d := proxying()
	r1 := compile(t, d, NewKeyring(random(1), nil)).Nodes[0]
	again, err := DecodeNode(unchecked(t, r1))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(d.Services, again.Gateway().Services, equal); diff != "" {
		t.Errorf("services (-file +plan):\n%s", diff)
	}
	if f := again.Features(); !slices.Contains(f, featureConnect) || slices.Contains(f, featureOpaque) {
		t.Errorf("the plan asks for %q", f)
	}
	own := serving()
	own.Services[0].Mode = model.ModeOwn
	if f := compile(t, own, NewKeyring(random(1), nil)).Nodes[0].Features(); !slices.Contains(f, featureOwn) {
		t.Errorf("the plan asks for %q", f)
	}
	for name, c := range map[string]struct {
		change func(*model.Domain)
		want   string
	}{
		"a sealed chain":    {func(d *model.Domain) { d.Chains[1].Seal = true }, "leave seal out"},
		"no destination":    {func(d *model.Domain) { d.Services[0].Destinations = nil }, "has 0; a proxy has 1 to"},
		"one twice":         {func(d *model.Domain) { d.Services[0].Destinations[1].Port = 22 }, "given twice"},
		"one at no address": {func(d *model.Domain) { d.Services[0].Destinations[1].Address = netip.AddrPort{} }, "is not an address"},
		"one at another": {func(d *model.Domain) {
			d.Services[0].Destinations[1].Address = netip.MustParseAddrPort("[fc00:8::3]:443")
		}, "leads to"},
		"an origin":            {func(d *model.Domain) { d.Services[0].Origin.CA = "a.pem" }, "has destinations"},
		"a rule for nothing":   {func(d *model.Domain) { d.Services[0].Rules[1].To = nil }, "leads to"},
		"a rule for all":       {func(d *model.Domain) { d.Services[0].Rules[1].To[0] = "evil.example.org:1" }, "none of the service's destinations"},
		"requests":             {func(d *model.Domain) { d.Services[0].Opaque = model.Opaque{} }, "does not read"},
		"an address as a name": {func(d *model.Domain) { d.Services[0].Destinations[0].Host = "192.0.2.1" }, "is an address"},
		"no such mode":         {func(d *model.Domain) { d.Services[0].Mode = "sideways" }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			d := proxying()
			c.change(&d)
			_, err := Compile(d, NewKeyring(random(1), nil)) // which may see first that chains lead elsewhere
			if alone := d.Services[0].Check(); err == nil || !strings.Contains(errors.Join(err, alone).Error(), c.want) {
				t.Errorf("got %v, and by itself %v; want %q", err, alone, c.want)
			}
		})
	}
}
