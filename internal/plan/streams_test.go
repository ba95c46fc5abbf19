package plan

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

// streaming is withNetfilter with functions of kind stream on both sides of fw, which
// originates: zip on r2, fw on r3, unzip on r4.
func streaming() model.Domain {
	d := withNetfilter()
	stream := func(name, node string) model.Function {
		return model.Function{Name: name, Node: node, Kind: model.KindStream, Proxy: model.StreamDetour(name), Stream: model.Stream{
			Run: []string{`"identity"`}, Connections: 10, Buffer: model.StreamBufferDefault, Idle: model.StreamIdleDefault, HalfClosed: model.StreamHalfClosedDefault,
		}}
	}
	d.Functions[0].Netfilter.Zones = false
	d.Functions[0].Node, d.Functions[0].Proxy.OnUnknown = "r3", model.OnUnknownOriginate
	n := d.Nodes[2]
	n.Name, n.Address, n.Locator = "r4", netip.MustParseAddr("fc00:4::1"), netip.MustParsePrefix("fc00:0:0:400::/56")
	d.Nodes = append(d.Nodes, n)
	d.Functions = append(d.Functions, stream("zip", "r2"), stream("unzip", "r4"))
	d.Chains = d.Chains[:1]
	d.Chains[0].Functions = []string{"zip", "fw", "unzip"}
	d.Chains[0].Arguments = nil
	d.Chains[0].Both = true
	return d
}

func TestChainsAreCutAtStreamFunctions(t *testing.T) {
	c := compile(t, streaming(), NewKeyring(random(1), nil))
	var got []string
	by := map[uint32]string{0: "none"}
	ids := map[string]bool{}
	for _, p := range c.Paths {
		var way []string
		for _, h := range p.Hops {
			way = append(way, strings.TrimSuffix(h.Node+" "+h.Function, " "))
		}
		got = append(got, p.Way()+": "+strings.Join(way, ", "))
		by[p.Path] = p.Way()
		key := string(p.Shares[0].Key[:])
		if ids[key] {
			t.Errorf("%s has the secret of another part", p.PathID)
		}
		ids[key] = true
	}
	if diff := cmp.Diff([]string{
		"forward, up to zip: r1, r2",
		"forward, from zip to unzip: r2, r3 fw, r4",
		"forward, from unzip on: r4, r6",
		"reverse, up to unzip: r6, r4",
		"reverse, from unzip to zip: r4, r3 fw, r2",
		"reverse, from zip on: r2, r1",
		"forward, from fw to unzip: r3, r4",
		"reverse, from fw to zip: r3, r2",
	}, got); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	got = nil
	for _, n := range c.Nodes {
		again, err := DecodeNode(unchecked(t, n))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(n, again, equal); diff != "" {
			t.Errorf("%s read again (-written +read):\n%s", n.Name, diff)
		}
		for _, e := range n.Egresses {
			if x := e.Through; x != nil {
				got = append(got, fmt.Sprintf("%s | part %s | onward %s | back %s | other %s | opens %t | of %s", by[e.Path], by[x.Part], by[x.Onward], by[x.Back], by[x.Other], x.Opens, by[e.Of]))
			}
		}
	}
	if diff := cmp.Diff([]string{
		"forward, up to zip | part forward, up to zip | onward forward, from zip to unzip | back reverse, from zip on | other reverse, from unzip to zip | opens true | of none",
		"reverse, from unzip to zip | part reverse, from unzip to zip | onward reverse, from zip on | back forward, from zip to unzip | other forward, up to zip | opens false | of none",
		"reverse, from fw to zip | part reverse, from unzip to zip | onward reverse, from zip on | back forward, from zip to unzip | other forward, up to zip | opens false | of reverse, from unzip to zip",
		"forward, from zip to unzip | part forward, from zip to unzip | onward forward, from unzip on | back reverse, from unzip to zip | other reverse, up to unzip | opens true | of none",
		"reverse, up to unzip | part reverse, up to unzip | onward reverse, from unzip to zip | back forward, from unzip on | other forward, from zip to unzip | opens false | of none",
		"forward, from fw to unzip | part forward, from zip to unzip | onward forward, from unzip on | back reverse, from unzip to zip | other reverse, up to unzip | opens true | of forward, from zip to unzip",
	}, got); diff != "" {
		t.Errorf("what is behind functions (-want +got):\n%s", diff)
	}
}

func TestReportIsForTheLastPartAlone(t *testing.T) {
	d := streaming()
	d.Chains[0].Proof.OnViolation = model.OnViolationReport
	for _, p := range compile(t, d, NewKeyring(random(1), nil)).Paths {
		if want := p.To == ""; (p.OnViolation == model.OnViolationReport) != want {
			t.Errorf("%s: on violation %s", p.PathID, p.OnViolation)
		}
	}
}

func TestChainsThatCannotBeCutAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*model.Domain)
		want   string
	}{
		"one direction":  {func(d *model.Domain) { d.Chains[0].Both = false }, "set direction: both"},
		"twice":          {func(d *model.Domain) { d.Chains[0].Functions = []string{"zip", "fw", "zip"} }, "visits function zip twice"},
		"at the ingress": {func(d *model.Domain) { d.Functions[len(d.Functions)-2].Node = "r1" }, "begins and ends its part from its ingress to function zip at the same node, r1"},
		"at the egress":  {func(d *model.Domain) { d.Functions[len(d.Functions)-1].Node = "r6" }, "begins and ends its part from function unzip to its egress at the same node, r6"},
		"one after the other": {func(d *model.Domain) {
			d.Functions[len(d.Functions)-1].Node = "r2"
			d.Chains[0].Functions = []string{"zip", "unzip"}
		}, "put both into one function"},
		"there and back": {func(d *model.Domain) { d.Functions[len(d.Functions)-1].Node = "r2" }, "begins and ends its part from function zip to function unzip at the same node, r2"},
	} {
		t.Run(name, func(t *testing.T) {
			d := streaming()
			c.change(&d)
			if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

func TestNodeRefusesPartsThatDoNotHold(t *testing.T) {
	r2 := 1
	for name, c := range map[string]struct {
		change func(*Node)
		want   string
	}{
		"no function":       {func(n *Node) { n.Proxies = nil }, "is no function of this node of kind stream"},
		"no way on":         {func(n *Node) { n.Egresses[0].Through.Onward = 0 }, "lacks a path"},
		"another way on":    {func(n *Node) { n.Headends[0].From = "fw" }, "is no function of this node"},
		"nothing behind":    {func(n *Node) { n.Egresses[0].Through = nil }, "says how connections go on"},
		"unverified bytes":  {func(n *Node) { n.Egresses[0].OnViolation = model.OnViolationReport }, "not verified"},
		"another interface": {func(n *Node) { n.Proxies[0].To = "eth9" }, "its interface"},
		"packets too large": {func(n *Node) { n.Proxies[0].Stream.MTU = 70000 }, "mtu 70000"},
		"no connections":    {func(n *Node) { n.Proxies[0].Stream.Connections = 0 }, "connections: 0"},
	} {
		t.Run(name, func(t *testing.T) {
			d := compile(t, streaming(), NewKeyring(random(1), nil))
			n := d.Nodes[r2]
			c.change(&n)
			if _, err := DecodeNode(unchecked(t, n)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

// Answers take the functions that the chain has for them. Those of kind stream have each connection in both directions.
func TestAnswersTakeTheFunctionsOfReturn(t *testing.T) {
	d := streaming()
	d.Functions = append(d.Functions, model.Function{Name: "log", Node: "r3", Kind: model.KindForward})
	d.Chains[0].Return = []string{"log", "unzip", "zip"}
	c := compile(t, d, NewKeyring(random(1), nil))
	var got []string
	by := map[uint32]string{}
	for _, p := range c.Paths {
		var way []string
		for _, h := range p.Hops {
			way = append(way, strings.TrimSuffix(h.Node+" "+h.Function, " "))
		}
		got = append(got, p.Way()+": "+strings.Join(way, ", "))
		by[p.Path] = p.Way()
	}
	if diff := cmp.Diff([]string{
		"forward, up to zip: r1, r2",
		"forward, from zip to unzip: r2, r3 fw, r4",
		"forward, from unzip on: r4, r6",
		"reverse, up to unzip: r6, r3 log, r4",
		"reverse, from unzip to zip: r4, r2",
		"reverse, from zip on: r2, r1",
		"forward, from fw to unzip: r3, r4",
	}, got); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	for _, n := range c.Nodes {
		for _, e := range n.Egresses {
			if x := e.Through; x != nil && by[e.Path] == "reverse, up to unzip" &&
				(by[x.Onward] != "reverse, from unzip to zip" || by[x.Back] != "forward, from unzip on" || by[x.Other] != "forward, from zip to unzip") {
				t.Errorf("behind %s: onward %s, back %s, other %s", by[e.Path], by[x.Onward], by[x.Back], by[x.Other])
			}
		}
	}
	for want, back := range map[string][]string{
		"in this order: zip, unzip":        {"zip", "unzip"},
		"in this order: unzip; ":           {"unzip", "log"},
		"in this order: none; ":            {"log"},
		`function "nobody" does not exist`: {"unzip", "nobody", "zip"},
	} {
		d.Chains[0].Return = back
		if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("return %v: %v; want %q", back, err, want)
		}
	}
}
