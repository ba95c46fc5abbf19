package plan

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

// withNetfilter is the domain of the paper with a firewall that two chains visit, each
// direction with an argument of its own.
func withNetfilter() model.Domain {
	d := paper(model.SchemeKeyed)
	d.Functions[0] = model.Function{
		Name: "fw", Node: "r2", Kind: model.KindNetfilter, Proxy: model.NetfilterDetour("fw", model.NamespaceOwn),
		Netfilter: model.Netfilter{
			Namespace: model.NamespaceOwn, Arguments: map[string]uint32{"guest": 1, "guestback": 2, "staff": 1<<32 - 1}, Zones: true,
			Rules: "chain forward {\n}\n", RulesAt: model.Source{File: "domain.yaml", Line: 3, Column: 5},
		},
	}
	d.Chains[0].Arguments = []model.Argument{{Of: 0, Forward: 1, Reverse: 2}}
	staff := d.Chains[0]
	staff.Name, staff.Match.Destination = "staff", netip.MustParsePrefix("fc00:9::/64")
	staff.Functions = []string{"dpi", "fw"}
	staff.Arguments = []model.Argument{{Of: 1, Forward: 1<<32 - 1, Reverse: 1<<32 - 1}}
	d.Chains = append(d.Chains, staff)
	return d
}

func TestArgumentsAreInSIDsAndPlans(t *testing.T) {
	c := compile(t, withNetfilter(), NewKeyring(random(1), nil))
	for i, want := range [][]string{
		{"fc00:0:0:200::1", "fc00:0:0:300::", "fc00:0:0:600::"},
		{"fc00:0:0:301::", "fc00:0:0:201::2", "fc00:0:0:100::"},
		{"fc00:0:0:302::", "fc00:0:0:202::ffff:ffff", "fc00:0:0:601::"},
		{"fc00:0:0:203::ffff:ffff", "fc00:0:0:303::", "fc00:0:0:101::"},
	} {
		if diff := cmp.Diff(addresses(want...), c.Paths[i].Segments(), equal); diff != "" {
			t.Errorf("%s, %s (-want +got):\n%s", c.Paths[i].Chain, c.Paths[i].Direction, diff)
		}
	}
	r2 := c.Nodes[1]
	var arguments []uint32
	for _, e := range r2.Endpoints {
		if e.Behaviour != model.BehaviourEndAN {
			t.Errorf("%s is visited as %s; want End.AN", e.SID, e.Behaviour)
		}
		arguments = append(arguments, e.Argument)
	}
	if diff := cmp.Diff([]uint32{1, 2, 1<<32 - 1, 1<<32 - 1}, arguments); diff != "" {
		t.Errorf("arguments of r2 (-want +got):\n%s", diff)
	}
	// The two directions of a chain are one flow to connection tracking.
	if diff := cmp.Diff([][]uint32{{1, 2}, {1<<32 - 1}}, r2.Proxies[0].Netfilter.Groups); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
	again, err := DecodeNode(unchecked(t, r2))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r2, again, equal); diff != "" {
		t.Errorf("read again (-written +read):\n%s", diff)
	}
}

func TestCompressedListsHaveNoRoomForArguments(t *testing.T) {
	d := withNetfilter()
	d.Chains[0].Encapsulation.SIDs = model.SIDsCompressed
	c := compile(t, d, NewKeyring(random(1), nil))
	if diff := cmp.Diff(addresses("fc00:0:0:200:300:600::"), c.Paths[0].Segments(), equal); diff != "" {
		t.Errorf("segments (-want +got):\n%s", diff)
	}
	if e := c.Nodes[1].Endpoints[0]; e.Argument != 1 {
		t.Errorf("the plan of the node has argument %d; want 1", e.Argument)
	}
}

// The egress takes one segment list in each epoch.
func TestAnotherArgumentMakesANewEpoch(t *testing.T) {
	d := withNetfilter()
	first := compile(t, d, NewKeyring(random(1), nil))
	d.Chains[0].Arguments[0].Forward = 2
	second := compile(t, d, NewKeyring(random(2), first.Paths))
	for i, want := range []uint8{1, 0, 0, 0} {
		if got := second.Paths[i].Epoch - first.Paths[i].Epoch; got != want {
			t.Errorf("path %d went on by %d epochs; want %d", i, got, want)
		}
		if diff := cmp.Diff(first.Paths[i].SIDs(), second.Paths[i].SIDs(), equal); diff != "" {
			t.Errorf("path %d changed its SIDs:\n%s", i, diff)
		}
	}
}

func TestNetfilterThatDoesNotHoldIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*model.Domain)
		want   string
	}{
		"argument of nobody": {func(d *model.Domain) { d.Chains[0].Arguments[0].Forward = 7 }, "function fw has no argument of value 7"},
		"argument too many":  {func(d *model.Domain) { d.Chains[0].Arguments[0].Of = 2 }, "an argument is of function 3 of 2"},
		"argument 0":         {func(d *model.Domain) { d.Functions[0].Netfilter.Arguments["none"] = 0 }, "none is 0, which stands for no argument"},
		"argument twice":     {func(d *model.Domain) { d.Functions[0].Netfilter.Arguments["again"] = 1 }, "again and guest are both 1"},
		"name of argument":   {func(d *model.Domain) { d.Functions[0].Netfilter.Arguments["a-b"] = 9 }, "has the character '-'"},
		"namespace":          {func(d *model.Domain) { d.Functions[0].Netfilter.Namespace = "../x" }, `namespace: "../x" has the character '.'`},
		"rules":              {func(d *model.Domain) { d.Functions[0].Netfilter.Rules = strings.Repeat("x", model.RulesMax+1) }, "rules: has 1048577 bytes"},
		"two visits in one zone": {func(d *model.Domain) {
			d.Chains[0].Functions = []string{"fw", "dpi", "fw"}
			d.Chains[0].Arguments = append(d.Chains[0].Arguments, model.Argument{Of: 2, Forward: 1, Reverse: 2})
		}, "visits function fw twice with the same argument"},
		"keyed-flow": {func(d *model.Domain) {
			d.Functions[0].Proxy.Rewrites, d.Chains[0].Proof.Scheme = true, model.SchemeKeyedFlow
		}, "rewrites addresses or ports"},
		"ordered match in the node's kernel": {func(d *model.Domain) {
			d.Functions[0].Netfilter.Namespace, d.Functions[0].Proxy = model.NamespaceNode, model.NetfilterDetour("fw", model.NamespaceNode)
			d.Chains[0].Match.Priority = 1
		}, "give the function a namespace (own)"},
	} {
		t.Run(name, func(t *testing.T) {
			d := withNetfilter()
			c.change(&d)
			if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

func TestNodeRefusesNetfilterThatDoesNotHold(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Node)
		want   string
	}{
		"argument of End":       {func(n *Node) { n.Endpoints[0].Behaviour = model.BehaviourEndAD }, "a function has a proxy if and only if"},
		"End.AN without":        {func(n *Node) { n.Proxies[0].Netfilter = nil }, "a function has a proxy if and only if"},
		"interface of another":  {func(n *Node) { n.Proxies[0].To = "eth9" }, "do not fit namespace own"},
		"recognised by content": {func(n *Node) { n.Proxies[0].Recognise = model.RecogniseContent }, "do not fit namespace own"},
		"address of a container": {func(n *Node) {
			n.Proxies[0].Netfilter.Namespace = "c1"
			n.Proxies[0].Netfilter.Addresses = addresses("fd00::1")
		}, "only a namespace that the agent makes (own) gets an address"},
		"two groups": {func(n *Node) { n.Proxies[0].Netfilter.Groups = [][]uint32{{1}, {2, 1}} }, "argument 1 is in a zone that it does not belong to"},
	} {
		t.Run(name, func(t *testing.T) {
			n := compile(t, withNetfilter(), NewKeyring(random(1), nil)).Nodes[1]
			if err := n.check(); err != nil {
				t.Fatalf("refused before the change: %v", err)
			}
			c.change(&n)
			if _, err := DecodeNode(unchecked(t, n)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}
