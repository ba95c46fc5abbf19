package plan

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

// sealing is serving, whose chain web is sealed: by fw, which reads nothing, and dpi on r3 and av on
// r4, which read payload.
func sealing() model.Domain {
	d := serving()
	s := streaming() // for r4 and what functions of kind stream are like
	d.Nodes = append(d.Nodes, s.Nodes[4])
	for i, f := range []struct{ name, node string }{{"dpi", "r3"}, {"av", "r4"}} {
		is := s.Functions[len(s.Functions)-1]
		is.Name, is.Node, is.Proxy, is.Intrusive = f.name, f.node, model.StreamDetour(f.name), true
		if i == 0 {
			d.Functions[1] = is
		} else {
			d.Functions = append(d.Functions, is)
		}
	}
	d.Chains[0].Functions, d.Chains[0].Seal = []string{"fw", "dpi", "av"}, true
	return d
}

// What is sealed is cut at the functions that read it, and each end of a part takes the other end's
// key alone.
func TestEachPartIsSealedBetweenItsTwoEnds(t *testing.T) {
	d := sealing()
	c := compile(t, d, NewKeyring(random(1), nil))
	type end struct {
		way     string
		origins []SealOrigin
		*Seal
	}
	var dials, takes []end
	var got []string
	for _, n := range c.Nodes {
		again, err := DecodeNode(unchecked(t, n))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(n, again, equal); diff != "" {
			t.Errorf("%s read again (-written +read):\n%s", n.Name, diff)
		}
		for _, h := range n.Headends {
			if h.Seal != nil || h.Origins != nil {
				dials = append(dials, end{n.Name + ": " + h.String(), h.Origins, h.Seal})
			}
		}
		for _, e := range n.Egresses {
			if e.Seal != nil {
				takes = append(takes, end{n.Name + ": " + e.String(), nil, e.Seal})
			}
		}
	}
	for _, list := range [][]end{dials, takes} {
		for _, e := range list {
			if e.Seal == nil {
				got = append(got, fmt.Sprintf("%s: %v", e.way, e.origins))
				continue
			}
			if e.Origin != d.Chains[0].Onward.Origin || e.Ports != d.Chains[0].Onward.Ports {
				t.Errorf("%s tells its connections by %s and %s", e.way, e.Origin, e.Ports)
			}
			got = append(got, fmt.Sprintf("%s: %s with %s", e.way, e.Name, e.Peer))
		}
	}
	const id = "spiffe://waystamp/node/"
	if diff := cmp.Diff([]string{
		"r1: chain web, forward, from gateway to dpi: " + id + "r1/function/gateway with " + id + "r3/function/dpi",
		"r3: chain web, forward, from dpi to av: " + id + "r3/function/dpi with " + id + "r4/function/av",
		"r4: chain web, forward, from av on: [{shop origin-ca.pem shop.internal}]",
		"r3: chain web, forward, from gateway to dpi: " + id + "r3/function/dpi with " + id + "r1/function/gateway",
		"r4: chain web, forward, from dpi to av: " + id + "r4/function/av with " + id + "r3/function/dpi",
	}, got); diff != "" {
		t.Fatalf("ends (-want +got):\n%s", diff)
	}
	seen := map[SealKey]bool{}
	for i, is := range takes {
		if dials[i].Key.Public() != is.PeerKey || is.Key.Public() != dials[i].PeerKey {
			t.Errorf("%s: the ends do not take each other's keys", is.way)
		}
		for _, k := range []SealKey{dials[i].Key, is.Key} {
			if seen[k] || k == (SealKey{}) {
				t.Errorf("%s: an end has the key of another", is.way)
			}
			seen[k] = true
		}
	}
	if g := c.Nodes[0].Gateway(); len(g.Chains) != 2 {
		t.Errorf("the gateway has %d chains", len(g.Chains))
	}
	b, err := EncodePaths(c.Paths)
	if err != nil {
		t.Fatal(err)
	}
	again, err := DecodePaths(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c.Paths, again, equal); diff != "" {
		t.Errorf("paths read again (-written +read):\n%s", diff)
	}
}

// A key is in the plan of its own end, and nowhere else: neither the other end nor a node between
// has it.
func TestAKeyIsAtItsOwnEndAlone(t *testing.T) {
	c := compile(t, sealing(), NewKeyring(random(1), nil))
	keys := 0
	for _, p := range c.Paths {
		if p.Seal == nil {
			continue
		}
		for _, k := range []struct {
			key SealKey
			at  string
		}{{p.Seal.From, p.Hops[0].Node}, {p.Seal.To, p.Hops[len(p.Hops)-1].Node}} {
			keys++
			public := k.key.Public()
			for _, n := range c.Nodes {
				file := unchecked(t, n)
				if has := bytes.Contains(file, hex.AppendEncode(nil, k.key[:])); has != (n.Name == k.at) {
					t.Errorf("%s: the key of %s is in the plan of %s: %t", p.PathID, k.at, n.Name, has)
				}
				other := n.Name == p.Hops[0].Node || n.Name == p.Hops[len(p.Hops)-1].Node
				if has := bytes.Contains(file, hex.AppendEncode(nil, public[:])); has != (other && n.Name != k.at) {
					t.Errorf("%s: the public key of %s is in the plan of %s: %t", p.PathID, k.at, n.Name, has)
				}
			}
		}
	}
	if keys != 4 {
		t.Errorf("looked for %d keys; two parts have 4", keys)
	}
}

func TestAKeyOfAnEndIsNotPrinted(t *testing.T) {
	k := SealKey{0xab, 0xcd}
	s := Seal{Key: k}
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("key", "k", k)
	for _, text := range []string{fmt.Sprintf("%v %+v %#v %x %s %d", k, k, k, k, k, k), fmt.Sprintf("%v %+v", s, s), log.String()} {
		if strings.Contains(text, "abcd") || strings.Contains(text, "171") {
			t.Errorf("printed: %s", text)
		}
	}
	if b, err := json.Marshal(s); err == nil {
		t.Errorf("marshalled: %s", b)
	}
}

// Keys change with their part's epoch, and with nothing else.
func TestKeysOfEndsChangeWithTheEpoch(t *testing.T) {
	last := compile(t, sealing(), NewKeyring(random(1), nil))
	same := compile(t, sealing(), NewKeyring(random(2), last.Paths))
	if diff := cmp.Diff(last.Paths, same.Paths, equal); diff != "" {
		t.Errorf("the same domain (-first +second):\n%s", diff)
	}
	keys := NewKeyring(random(3), last.Paths)
	keys.KeepSIDs()
	keys.Rotate(func(string) bool { return true })
	next := compile(t, sealing(), keys)
	for i, p := range next.Paths {
		was := last.Paths[i]
		if p.Epoch != was.Epoch+1 || p.Seal != nil && (p.Seal.From == was.Seal.From || p.Seal.To == was.Seal.To) {
			t.Errorf("%s has epoch %d; were its keys kept?", p.PathID, p.Epoch)
		}
	}
	s, err := MakeSteps(last.Paths, last.Nodes, next)
	if err != nil {
		t.Fatal(err)
	}
	live := Live{Now: last, Next: next}
	nodes, err := live.Nodes()
	if err != nil {
		t.Fatal(err)
	}
	// While nodes change one after the other, an end takes what either epoch dials.
	dialled := func(n Node, from string) (Headend, bool) {
		for _, h := range n.Headends {
			if h.From == from && h.Seal != nil {
				return h, true
			}
		}
		return Headend{}, false
	}
	takes := func(n Node, h Headend) bool {
		for _, e := range n.Egresses {
			if e.Path == h.Path && e.Epoch == h.Epoch && e.Seal != nil && e.Seal.Key.Public() == h.Seal.PeerKey && e.Seal.PeerKey == h.Seal.Key.Public() {
				return true
			}
		}
		return false
	}
	for _, step := range []struct {
		name           string
		dialling, took []Node
		want           bool
	}{
		{"old to both", last.Nodes, s.Both, true},
		{"both to old", s.Both, last.Nodes, true},
		{"both to turn", s.Both, s.Turn, true},
		{"turn to both", s.Turn, s.Both, true},
		{"turn to new", s.Turn, next.Nodes, true},
		{"new to turn", next.Nodes, s.Turn, true},
		{"live", nodes, nodes, true},
		{"old to new", last.Nodes, next.Nodes, false},
	} {
		h, ok := dialled(step.dialling[0], model.GatewayName)
		if !ok || takes(step.took[2], h) != step.want {
			t.Errorf("%s: dpi takes the gateway: %t; want %t", step.name, !step.want, step.want)
		}
		if h, ok = dialled(step.dialling[2], "dpi"); !ok || takes(step.took[4], h) != step.want {
			t.Errorf("%s: av takes dpi: %t; want %t", step.name, !step.want, step.want)
		}
	}
}

// A function becomes intrusive with the chains that it is on.
func TestAFunctionBecomesIntrusiveInSteps(t *testing.T) {
	before := sealing()
	before.Functions[1].Intrusive = false
	before.Chains[0].Seal, before.Chains[0].Functions = false, []string{"fw"}
	last := compile(t, before, NewKeyring(random(1), nil))
	keys := NewKeyring(random(2), last.Paths)
	keys.KeepSIDs()
	next := compile(t, sealing(), keys)
	if _, err := MakeSteps(last.Paths, last.Nodes, next); err != nil {
		t.Error(err)
	}
	keys = NewKeyring(random(3), next.Paths)
	keys.KeepSIDs()
	if _, err := MakeSteps(next.Paths, next.Nodes, compile(t, before, keys)); err != nil {
		t.Error(err)
	}
}

func TestChainsThatCannotBeSealedAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*model.Domain)
		want   string
	}{
		"without a gateway": {func(d *model.Domain) {
			d.Chains[1].Onward, d.Chains[1].Seal, d.Chains[1].Match.Priority = nil, true, 9
			d.Services[0].Rules = d.Services[0].Rules[1:]
		}, "so far only a gateway's data is sealed"},
		"by a function that reads nothing": {func(d *model.Domain) { d.Functions[1].Intrusive = false }, `"dpi" is of kind stream, and would receive sealed bytes`},
		"not at all":                       {func(d *model.Domain) { d.Chains[0].Seal = false }, "set seal: true"},
		"an intrusive one of another kind": {func(d *model.Domain) { d.Functions[0].Intrusive = true }, "function fw: intrusive: is so far only for functions of the kinds stream, unaware and netfilter"},
		"an intrusive one on a plain chain": {func(d *model.Domain) {
			f := d.Functions[1]
			f.Name, f.Proxy = "ids", model.StreamDetour("ids")
			d.Functions = append(d.Functions, f)
			p := around(7)
			p.Functions, p.Both = []string{"ids"}, true
			d.Chains = append(d.Chains, p)
		}, `"ids" is intrusive, and receives only data that is sealed for it`},
		"one direction":       {func(d *model.Domain) { d.Chains[0].Both = false }, "direction: both"},
		"with pot":            {func(d *model.Domain) { d.Chains[0].Proof.Scheme = model.SchemePoT }, "resists no adversary"},
		"at the gateway":      {func(d *model.Domain) { d.Functions[1].Node = "r1" }, "a part needs two nodes"},
		"at the egress":       {func(d *model.Domain) { d.Functions[len(d.Functions)-1].Node = "r6" }, "a part needs two nodes"},
		"two on a node":       {func(d *model.Domain) { d.Functions[len(d.Functions)-1].Node = "r3" }, "put both into one function"},
		"a name of two parts": {func(d *model.Domain) { d.Chains[0].Functions = []string{"dpi", "fw", "dpi"} }, "visits function dpi twice"},
	} {
		t.Run(name, func(t *testing.T) {
			d := sealing()
			c.change(&d)
			if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

// Rules that plain connections meet are in the plan of the function's node, beside its interfaces, and nothing is there that such
// a function has not.
func TestRulesThatPlainConnectionsMeet(t *testing.T) {
	const rules = "chain forward {\n\ttype filter hook forward priority filter\n}\n"
	d := sealing()
	f := &d.Functions[1]
	f.Stream.Run, f.Stream.Back, f.Stream.Attached = nil, nil, model.FilterAttached(f.Name)
	f.Netfilter = model.Netfilter{Namespace: model.NamespaceOwn, Rules: rules, RulesFile: "dpi.nft"}
	out := compile(t, d, NewKeyring(random(1), nil))
	i := slices.IndexFunc(out.Nodes, func(n Node) bool { return n.Name == f.Node })
	text, err := EncodeNode(out.Nodes[i])
	if err != nil {
		t.Fatal(err)
	}
	n, err := DecodeNode(text)
	if err != nil {
		t.Fatal(err)
	}
	x := n.Proxies[slices.IndexFunc(n.Proxies, func(x Proxy) bool { return x.Function == f.Name })]
	if x.Stream == nil || !x.Stream.Intrusive || x.Stream.Attached != model.FilterAttached("dpi") || x.Netfilter == nil || x.Netfilter.Rules != rules || x.Netfilter.RulesFile != "" || x.Netfilter.Namespace != model.NamespaceOwn {
		t.Errorf("its node has %+v, %+v, %+v", x, x.Stream, x.Netfilter)
	}
	if !slices.Contains(n.Features(), featureFilter) {
		t.Errorf("the plan asks for %q, and not for %q", n.Features(), featureFilter)
	}
	for name, c := range map[string]struct {
		change func(x *Proxy)
		want   string
	}{
		"the node's namespace":       {func(x *Proxy) { x.Netfilter.Namespace = model.NamespaceNode }, "in clear on all of the node"},
		"a namespace of another":     {func(x *Proxy) { x.Netfilter.Namespace = "dpi" }, "of another program"},
		"other interfaces":           {func(x *Proxy) { x.Stream.Attached.To = "eth9" }, "does not lead to the function's namespace"},
		"arguments":                  {func(x *Proxy) { x.Netfilter.Arguments = map[string]uint32{"guest": 1} }, "has no arguments"},
		"a bypass":                   {func(x *Proxy) { x.Netfilter.Bypass = true }, "no bypass"},
		"an address":                 {func(x *Proxy) { x.Netfilter.Addresses = []netip.Addr{netip.MustParseAddr("2001:db8::9")} }, "no address"},
		"a function that reads none": {func(x *Proxy) { x.Stream.Intrusive = false }, "attached is for an intrusive function"},
	} {
		n, err := DecodeNode(text)
		if err != nil {
			t.Fatal(err)
		}
		c.change(&n.Proxies[slices.IndexFunc(n.Proxies, func(x Proxy) bool { return x.Function == f.Name })])
		if err := n.check(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
	d.Functions[1].Netfilter.Namespace = model.NamespaceNode
	if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil || !strings.Contains(err.Error(), "in clear on all of the node") {
		t.Errorf("in the node's namespace: %v", err)
	}
}

// A chain that is sealed has no part that is not, whatever its plan was made to say.
func TestNodeRefusesSealsThatDoNotHold(t *testing.T) {
	const r1, r3, r4 = 0, 2, 4
	head := func(from string, change func(*Headend)) func(*Node) {
		return func(n *Node) {
			for i := range n.Headends {
				if n.Headends[i].From == from && n.Headends[i].Direction == model.Forward && n.Headends[i].Chain == "web" {
					change(&n.Headends[i])
				}
			}
		}
	}
	end := func(change func(*Egress)) func(*Node) {
		return func(n *Node) {
			for i := range n.Egresses {
				if n.Egresses[i].Seal != nil {
					change(&n.Egresses[i])
				}
			}
		}
	}
	for name, c := range map[string]struct {
		node   int
		change func(*Node)
		want   string
	}{
		"a gateway without a key":          {r1, head("gateway", func(h *Headend) { h.Seal = nil }), "an end of a sealed chain sends only sealed data"},
		"a function that goes on in clear": {r3, head("dpi", func(h *Headend) { h.Seal = nil }), "an end of a sealed chain sends only sealed data"},
		"a function that takes it so":      {r3, end(func(e *Egress) { e.Seal = nil }), "takes nothing that is not sealed for it"},
		"no origin":                        {r4, head("av", func(h *Headend) { h.Origins = nil }), "opens the session with the origin"},
		"an origin that is not behind":     {r3, head("dpi", func(h *Headend) { h.Origins = []SealOrigin{{"shop", "ca.pem", "shop.internal"}} }), "only a path from the last intrusive function"},
		"an origin without a name":         {r4, head("av", func(h *Headend) { h.Origins[0].Name = "" }), "is not a name of a host"},
		"an origin's file elsewhere":       {r4, head("av", func(h *Headend) { h.Origins[0].CA = "../ca.pem" }), "lead elsewhere"},
		"an origin twice":                  {r4, head("av", func(h *Headend) { h.Origins = append(h.Origins, h.Origins[0]) }), "given twice"},
		"a key that is none":               {r3, end(func(e *Egress) { e.Seal.Key = SealKey{} }), "key: is missing"},
		"a peer without a key":             {r3, end(func(e *Egress) { e.Seal.PeerKey = SealPublic{} }), "peer-key: is missing"},
		"its own key as the other's":       {r3, end(func(e *Egress) { e.Seal.PeerKey = e.Seal.Key.Public() }), "a key is that of"},
		"the name of another end":          {r3, end(func(e *Egress) { e.Seal.Name = e.Seal.Peer }), "is not that of this end"},
		"a peer of no function":            {r3, end(func(e *Egress) { e.Seal.Peer = "spiffe://waystamp/node/r1/function/fw" }), "is not function gateway"},
		"a peer that is itself":            {r3, head("dpi", func(h *Headend) { h.Seal.Peer = h.Seal.Name }), "is not function av"},
		"a key of two parts": {r3, func(n *Node) {
			head("dpi", func(h *Headend) { h.Seal.Key = n.Egresses[0].Seal.Key })(n)
		}, "a key is that of"},
		"another origin than packets go to": {r3, end(func(e *Egress) { e.Seal.Origin = netip.MustParseAddrPort("[2001:db8:77::1]:9") }), "differ from the path's match"},
		"a part that is not there": {r3, func(n *Node) {
			for i := range n.Egresses {
				if n.Egresses[i].Seal != nil {
					n.Egresses[i].Seal, n.Egresses[i].Through.Part = nil, 7
				}
			}
		}, "is no sealed part that ends at function dpi"},
		"ports that are none":              {r3, end(func(e *Egress) { e.Seal.Ports = model.Ports{First: 80, Last: 90} }), "no range that connections come from"},
		"a function that is not intrusive": {r3, func(n *Node) { n.Proxies[0].Stream.Intrusive = false }, "only a part that ends at an intrusive function has a key"},
		"plain connections of another": {r3, func(n *Node) {
			n.Proxies[0].Stream.Intrusive, n.Proxies[0].Stream.Run, n.Proxies[0].Stream.Attached = false, nil, model.Attached{To: "x", From: "y"}
		}, "attached is for an intrusive function"},
		"plain connections and operations": {r3, func(n *Node) { n.Proxies[0].Stream.Attached = model.Attached{To: "x", From: "y"} }, "has no run, no back"},
		"plain connections and an origin at their port": {r3, func(n *Node) {
			n.Proxies[0].Stream.Run, n.Proxies[0].Stream.Attached = nil, model.Attached{To: "x", From: "y"}
			end(func(e *Egress) { e.Seal.Origin = netip.AddrPortFrom(e.Seal.Origin.Addr(), model.StreamPlainPort) })(n)
		}, "the two kinds of connections could not be distinguished"},
		"plain connections by one interface": {r3, func(n *Node) {
			n.Proxies[0].Stream.Run, n.Proxies[0].Stream.Attached = nil, model.Attached{To: "x", From: "x"}
		}, "both ends of a plain connection would meet"},
		"plain connections by its own interface": {r3, func(n *Node) {
			n.Proxies[0].Stream.Run, n.Proxies[0].Stream.Attached = nil, model.Attached{To: "x", From: n.Proxies[0].To}
		}, "a function has interfaces of its own"},
		"plain connections by a router elsewhere": {r3, func(n *Node) {
			n.Proxies[0].Stream.Run, n.Proxies[0].Stream.Attached = nil, model.Attached{To: "x", From: "y", Via: netip.MustParseAddr("2001:db8::1")}
		}, "is not a link-local address"},
	} {
		t.Run(name, func(t *testing.T) {
			n := compile(t, sealing(), NewKeyring(random(1), nil)).Nodes[c.node]
			if err := n.check(); err != nil {
				t.Fatalf("refused before the change: %v", err)
			}
			c.change(&n)
			if _, err := DecodeNode(unchecked(t, n)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
	for name, change := range map[string]func(*Path){
		"a key for both":    func(p *Path) { p.Seal.To = p.Seal.From },
		"a key of another":  nil,
		"in the other way":  func(p *Path) { p.Direction = model.Reverse },
		"a key that is not": func(p *Path) { p.Seal.To = SealKey{} },
	} {
		paths := compile(t, sealing(), NewKeyring(random(1), nil)).Paths
		if change == nil {
			paths[1].Seal.From = paths[0].Seal.To
		} else {
			change(&paths[0])
		}
		if _, err := EncodePaths(paths); err == nil || !strings.Contains(err.Error(), "seal: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A plain chain with functions of kind stream becomes a sealed one, and back: what is between them is not
// the path that it was.
func TestAPlainChainBecomesSealedInSteps(t *testing.T) {
	before := sealing()
	for i := range before.Functions {
		before.Functions[i].Intrusive = false
	}
	before.Chains, before.Services, before.Clients = before.Chains[:1], nil, nil
	c := &before.Chains[0]
	c.Seal, c.Onward, c.Match = false, nil, model.Match{Destination: netip.MustParsePrefix("fc00:8::/64")}
	plain, sealed := before, sealing()
	for _, change := range [][2]model.Domain{{plain, sealed}, {sealed, plain}} {
		last := compile(t, change[0], NewKeyring(random(1), nil))
		keys := NewKeyring(random(2), last.Paths)
		keys.KeepSIDs()
		next := compile(t, change[1], keys)
		s, err := MakeSteps(last.Paths, last.Nodes, next)
		if err != nil {
			t.Error(err)
		}
		if _, err := (Live{Now: last, Next: next}).Nodes(); err != nil {
			t.Error(err)
		}
		if _, err := (Live{Old: []*Domain{last}, Now: next}).Nodes(); err != nil {
			t.Error(err)
		}
		if i := slices.IndexFunc(s.Lossy, func(p Path) bool { return p.From == "dpi" && p.To == "av" && p.Direction == model.Forward }); i < 0 {
			t.Error("the part from dpi to av only turns; its connections are of another kind")
		}
	}
}

// What fw makes itself belongs to connections that the gateway has opened.
func TestOnlyTheEndBeforeOpensSealedConnections(t *testing.T) {
	d := sealing()
	nf := originating().Functions[0]
	nf.Netfilter.Zones, nf.Netfilter.Arguments = false, nil
	d.Functions[0] = nf
	c := compile(t, d, NewKeyring(random(1), nil))
	opens := map[string]bool{}
	for _, e := range c.Nodes[2].Egresses {
		if e.Direction == model.Forward && e.To == "dpi" {
			opens[e.Way()] = e.Through.Opens
		}
	}
	if diff := cmp.Diff(map[string]bool{"forward, from gateway to dpi": true, "forward, from fw to dpi": false}, opens); diff != "" {
		t.Errorf("what opens connections to dpi (-want +got):\n%s", diff)
	}
	n := c.Nodes[2]
	if err := n.check(); err != nil {
		t.Fatal(err)
	}
	for i := range n.Egresses {
		if n.Egresses[i].From == "fw" && n.Egresses[i].To == "dpi" {
			n.Egresses[i].Through.Opens = true
		}
	}
	if err := n.check(); err == nil || !strings.Contains(err.Error(), "opens connections") {
		t.Errorf("got %v; want it refused", err)
	}
}

// A service that comes to a chain is known to the last end before its gateway sends for it.
func TestTheLastEndKnowsOriginsOfBothSteps(t *testing.T) {
	last := compile(t, sealing(), NewKeyring(random(1), nil))
	d := sealing()
	more := d.Services[0]
	more.Name, more.Hosts, more.Rules = "desk", []string{"desk.example.org"}, []model.ServiceRule{{Who: "**", Chain: "web"}}
	d.Services = append(d.Services, more)
	keys := NewKeyring(random(2), last.Paths)
	keys.KeepSIDs()
	next := compile(t, d, keys)
	s, err := MakeSteps(last.Paths, last.Nodes, next)
	if err != nil {
		t.Fatal(err)
	}
	for step, nodes := range map[string][]Node{"1": s.Both, "2": s.Turn, "3": next.Nodes} {
		for _, h := range nodes[4].Headends {
			if h.From == "av" && h.Direction == model.Forward && len(h.Origins) != 2 {
				t.Errorf("in step %s av knows %v; want both services", step, h.Origins)
			}
		}
	}
}

// A function that knows nothing of seals has its interfaces in the plan of its node, and in its file.
func TestAPlanSaysWherePlainConnectionsGo(t *testing.T) {
	d := sealing()
	for i := range d.Functions {
		if f := &d.Functions[i]; f.Name == "dpi" {
			f.Stream.Run, f.Stream.Attached = nil, model.Attached{To: "ids-to", From: "ids-from", Via: netip.MustParseAddr("fe80::2")}
		}
	}
	n := compile(t, d, NewKeyring(random(1), nil)).Nodes[2]
	if err := n.check(); err != nil {
		t.Fatal(err)
	}
	text, err := EncodeNode(n)
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeNode(text)
	if err != nil {
		t.Fatal(err)
	}
	if a := got.Proxies[0].Stream.Attached; a != n.Proxies[0].Stream.Attached || a.To != "ids-to" {
		t.Errorf("the file of r3 has %+v", a)
	}
}

// With a controller, who plans has no key of any end: plans and paths have the names alone, in its trust domain.
func TestEndsWithCertificatesHaveNoKeysInPlans(t *testing.T) {
	last := compile(t, sealing(), NewKeyring(random(1), nil))
	certify := func(seed uint64, rotate bool) *Domain {
		keys := NewKeyring(random(seed), last.Paths)
		keys.Certify("corp.example", nil)
		keys.KeepSIDs()
		keys.Rotate(func(string) bool { return rotate })
		return compile(t, sealing(), keys)
	}
	// What is kept from before has keys until its next epoch.
	if diff := cmp.Diff(last.Paths, certify(2, false).Paths, equal); diff != "" {
		t.Errorf("the same domain (-before +with certificates):\n%s", diff)
	}
	next := certify(3, true)
	b, err := EncodePaths(next.Paths)
	if err != nil {
		t.Fatal(err)
	}
	again, err := DecodePaths(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(next.Paths, again, equal); diff != "" {
		t.Errorf("paths read again (-written +read):\n%s", diff)
	}
	for _, p := range next.Paths {
		if p.Seal != nil && *p.Seal != (PathSeal{Domain: "corp.example"}) {
			t.Errorf("%s has keys", p.PathID)
		}
	}
	const id = "spiffe://corp.example/node/"
	for i, want := range map[int]map[string]string{
		0: {"gateway": id + "r1/function/gateway"}, 1: {}, 2: {"dpi": id + "r3/function/dpi"}, 4: {"av": id + "r4/function/av"},
	} {
		n := next.Nodes[i]
		if diff := cmp.Diff(want, n.CertifiedEnds()); diff != "" {
			t.Errorf("ends of %s (-want +got):\n%s", n.Name, diff)
		}
		if got := slices.Contains(n.Features(), "seal certificates"); got != (len(want) > 0) {
			t.Errorf("the plan of %s asks for certificates: %t", n.Name, got)
		}
		if before := last.Nodes[i]; slices.Contains(before.Features(), "seal certificates") || len(before.CertifiedEnds()) > 0 {
			t.Errorf("the plan of %s asked for certificates before", n.Name)
		}
		file := unchecked(t, n)
		again, err := DecodeNode(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(n, again, equal); diff != "" {
			t.Errorf("%s read again (-written +read):\n%s", n.Name, diff)
		}
		if bytes.Contains(file, []byte(`"peer-key"`)) {
			t.Errorf("the plan of %s has a key of a peer", n.Name)
		}
	}
	// In steps both kinds are there.
	s, err := MakeSteps(last.Paths, last.Nodes, next)
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[bool]bool{}
	for _, e := range s.Both[2].Egresses {
		if e.Seal != nil {
			kinds[e.Seal.Certified] = true
		}
	}
	if len(kinds) != 2 {
		t.Errorf("while it changes, dpi takes %v", kinds)
	}
}

// Plans say how often the nodes of both ends were revoked, from the next epoch on.
func TestPlansHaveRevocationsOfEnds(t *testing.T) {
	certify := func(last []Path, revocations map[string]uint32, rotate bool) *Domain {
		keys := NewKeyring(random(1), last)
		keys.Certify("corp.example", revocations)
		keys.Rotate(func(string) bool { return rotate })
		return compile(t, sealing(), keys)
	}
	first := certify(nil, nil, false)
	for _, n := range first.Nodes {
		if slices.Contains(n.Features(), "seal revocations") {
			t.Errorf("%s was never revoked, and its plan asks for revocations", n.Name)
		}
	}
	revocations := map[string]uint32{"r1": 2, "r2": 7}
	if diff := cmp.Diff(first.Paths, certify(first.Paths, revocations, false).Paths, equal); diff != "" {
		t.Errorf("an epoch that is kept (-before +after):\n%s", diff)
	}
	next := certify(first.Paths, revocations, true)
	b, err := EncodePaths(next.Paths)
	if err != nil {
		t.Fatal(err)
	}
	again, err := DecodePaths(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(next.Paths, again, equal); diff != "" {
		t.Errorf("paths read again (-written +read):\n%s", diff)
	}
	seen := 0
	for _, n := range next.Nodes {
		asks := false
		of := func(s *Seal) {
			if s == nil {
				return
			}
			seen++
			node := func(name string) uint32 { return revocations[strings.Split(name, "/")[4]] }
			if s.Revocations != node(s.Name) || s.PeerRevocations != node(s.Peer) {
				t.Errorf("%s with %s: %d and %d revocations", s.Name, s.Peer, s.Revocations, s.PeerRevocations)
			}
			if got := n.EndRevocations(s.Name); got != node(s.Name) {
				t.Errorf("%s has to show a certificate of %d revocations; want %d", s.Name, got, node(s.Name))
			}
			asks = asks || s.Revocations+s.PeerRevocations > 0
		}
		for _, h := range n.Headends {
			of(h.Seal)
		}
		for _, e := range n.Egresses {
			of(e.Seal)
		}
		if slices.Contains(n.Features(), "seal revocations") != asks {
			t.Errorf("the plan of %s asks for revocations: %t", n.Name, !asks)
		}
		again, err := DecodeNode(unchecked(t, n))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(n, again, equal); diff != "" {
			t.Errorf("%s read again (-written +read):\n%s", n.Name, diff)
		}
	}
	if seen == 0 {
		t.Error("no end was looked at")
	}
}

func TestBadEndsWithCertificatesAreRefused(t *testing.T) {
	keys := NewKeyring(random(1), nil)
	keys.Certify("corp.example", nil)
	for name, c := range map[string]struct {
		change func(s *Seal)
		says   string
	}{
		"a key of its own":       {func(s *Seal) { s.Key = SealKey{1} }, "the plan has none"},
		"a key of its peer":      {func(s *Seal) { s.PeerKey = SealPublic{1} }, "the plan has none"},
		"no trust domain":        {func(s *Seal) { s.Name = strings.Replace(s.Name, "corp.example", "", 1) }, "no trust domain"},
		"another trust domain":   {func(s *Seal) { s.Peer = strings.Replace(s.Peer, "corp.example", "other", 1) }, "is not function gateway of another node"},
		"a trust domain as none": {func(s *Seal) { s.Name = strings.Replace(s.Name, "corp.example", "Corp Example", 1) }, "no trust domain"},
		"the name of another":    {func(s *Seal) { s.Name = s.Peer }, "is not that of this end"},
		"revocations and keys":   {func(s *Seal) { s.Certified, s.Key, s.PeerKey, s.Revocations = false, SealKey{1}, SealPublic{1}, 1 }, "revocations: only ends"},
		"neither":                {func(s *Seal) { s.Certified = false }, "key: is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			n := compile(t, sealing(), keys).Nodes[2]
			n.Egresses = slices.Clone(n.Egresses)
			for i, e := range n.Egresses {
				if e.Seal != nil {
					s := *e.Seal
					c.change(&s)
					n.Egresses[i].Seal = &s
				}
			}
			if err := n.check(); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("it says %v; want %q", err, c.says)
			}
		})
	}
	for name, change := range map[string]func(s *PathSeal){
		"keys beside it": func(s *PathSeal) { s.From, s.To = SealKey{1}, SealKey{2} },
		"no name":        func(s *PathSeal) { s.Domain = "a/b" },
	} {
		paths := slices.Clone(compile(t, sealing(), keys).Paths)
		i := slices.IndexFunc(paths, func(p Path) bool { return p.Seal != nil })
		s := *paths[i].Seal
		change(&s)
		paths[i].Seal = &s
		if err := checkPaths(paths); err == nil || !strings.Contains(err.Error(), "seal: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
