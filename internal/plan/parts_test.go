package plan

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

// originating is withNetfilter where what fw makes takes its chains.
func originating() model.Domain {
	d := withNetfilter()
	d.Functions[0].Proxy.OnUnknown = model.OnUnknownOriginate
	return d
}

// ways says how the paths go that start at functions.
func ways(paths []Path) (out []string) {
	for _, p := range paths {
		if p.From == "" {
			continue
		}
		var way []string
		for _, h := range p.Hops {
			way = append(way, strings.TrimSuffix(h.Node+" "+h.Function, " "))
		}
		out = append(out, fmt.Sprintf("%s %s: %s", p.Chain, p.Way(), strings.Join(way, ", ")))
	}
	return out
}

func TestPathsStartAtAFunctionThatOriginates(t *testing.T) {
	c := compile(t, originating(), NewKeyring(random(1), nil))
	if diff := cmp.Diff([]string{
		"web forward, from fw on: r2, r3 dpi, r6",
		"web reverse, from fw on: r2, r1",
		"staff forward, from fw on: r2, r6",
		"staff reverse, from fw on: r2, r3 dpi, r1",
	}, ways(c.Paths)); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	without := compile(t, withNetfilter(), NewKeyring(random(1), nil))
	for i, p := range without.Paths {
		if c.Paths[i].Path != p.Path || !slices.EqualFunc(c.Paths[i].Hops, p.Hops, Hop.equal) {
			t.Errorf("%s is another path without those from functions on", p.PathID)
		}
	}
	for _, p := range c.Paths[len(without.Paths):] {
		whole := c.Paths[slices.IndexFunc(c.Paths, func(o Path) bool { return o.Chain == p.Chain && o.Direction == p.Direction })]
		list := whole.Segments()
		if !slices.Equal(p.Segments(), list[len(list)-len(p.Segments()):]) {
			t.Errorf("%s visits %v; want the end of %v", p.PathID, p.Segments(), list)
		}
		if p.Match != whole.Match || p.MTU != whole.MTU || p.MSS != whole.MSS || p.OnViolation != whole.OnViolation || p.Window != model.WindowMin || p.OwnTraffic {
			t.Errorf("%s: %+v; want it as the whole path, with a small window", p.PathID, p)
		}
		if len(p.Ingress) != 1 || p.Ingress[0].Node != "r2" || p.Ingress[0].Lane != 0 {
			t.Errorf("%s starts at %+v; want r2", p.PathID, p.Ingress)
		}
		for j := range p.Shares {
			if cmp.Equal(p.Shares[j].Key, whole.Shares[j].Key) && !absent(p.Shares[j].Key) {
				t.Errorf("%s has the secret of the whole path at position %d", p.PathID, j)
			}
		}
	}
	for _, n := range c.Nodes {
		again, err := DecodeNode(unchecked(t, n))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(n, again, equal); diff != "" {
			t.Errorf("%s read again (-written +read):\n%s", n.Name, diff)
		}
		for _, e := range n.Egresses {
			whole := slices.ContainsFunc(n.Egresses, func(o Egress) bool { return o.Path == e.Requires() && o.From == "" && o.Direction == e.Direction })
			if (e.Of != 0) != (e.From != "") || !whole {
				t.Errorf("%s: the egress of %s is of path %#x; want the whole one", n.Name, e.PathID, e.Of)
			}
		}
		if got := len(n.GuardRules()); got != len(n.Egresses)/2 {
			t.Errorf("%s has %d guard rules for %d egresses; want one for each whole path", n.Name, got, len(n.Egresses))
		}
	}
	r2 := c.Nodes[1]
	if got := len(r2.HeadendRules()); got != 0 {
		t.Errorf("r2 takes traffic from outside into %d paths", got)
	}
	if got := len(r2.OriginRules("fw")); got != 4 {
		t.Errorf("r2 has %d rules for what fw makes; want 4", got)
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

// What a later visit made takes the rest behind the first one.
func TestPathStartsAtTheFirstVisitOfAFunction(t *testing.T) {
	d := originating()
	d.Functions[0].Netfilter.Zones = false
	d.Chains[0].Functions = []string{"fw", "dpi", "fw"}
	if diff := cmp.Diff([]string{
		"web forward, from fw on: r2, r3 dpi, r2 fw, r6",
		"web reverse, from fw on: r2, r3 dpi, r2 fw, r1",
	}, ways(compile(t, d, NewKeyring(random(1), nil)).Paths)[:2]); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
}

func TestChainsByMarkHaveNoPathFromAFunction(t *testing.T) {
	d := originating()
	d.Chains = d.Chains[:1]
	d.Chains[0].Both, d.Chains[0].Match.Priority, d.Chains[0].Match.Mark = false, 1, model.Mark{Value: 7, Mask: 0xff}
	if got := ways(compile(t, d, NewKeyring(random(1), nil)).Paths); len(got) != 0 {
		t.Errorf("got %v; want none", got)
	}
}

func TestPathsFromFunctionsKeepTheirSecrets(t *testing.T) {
	d := originating()
	first := compile(t, d, NewKeyring(random(1), nil))
	second := compile(t, d, NewKeyring(random(2), first.Paths))
	if diff := cmp.Diff(first.Paths, second.Paths, equal); diff != "" {
		t.Errorf("the same domain (-first +second):\n%s", diff)
	}
	// Another window for web makes new secrets for its whole paths; another argument for
	// the visits of fw in staff, for what passes them.
	d.Chains[0].Proof.Window = 4096
	d.Chains[1].Arguments[0].Forward = 1
	third := compile(t, d, NewKeyring(random(3), second.Paths))
	for i, p := range third.Paths {
		want := second.Paths[i].Epoch
		if p.From == "" && (p.Chain == "web" || p.Direction == model.Forward) {
			want++
		}
		if p.Epoch != want {
			t.Errorf("%s has epoch %d; want %d", p.PathID, p.Epoch, want)
		}
	}
}

func TestOriginationThatDoesNotHoldIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*model.Domain)
		want   string
	}{
		"in the node's own kernel": {func(d *model.Domain) {
			d.Functions[0].Netfilter.Namespace, d.Functions[0].Proxy = model.NamespaceNode, model.NetfilterDetour("fw", model.NamespaceNode)
			d.Functions[0].Proxy.OnUnknown = model.OnUnknownOriginate
		}, `function fw: on-unknown: "originate" cannot be combined with namespace node`},
		"of another kind": {func(d *model.Domain) {
			d.Functions[0].Kind, d.Functions[0].Netfilter = model.KindUnaware, model.Netfilter{}
			d.Chains[0].Arguments, d.Chains[1].Arguments = nil, nil
		}, `function fw: on-unknown: "originate" is of functions of kind netfilter`},
		"both directions take the same packets": {func(d *model.Domain) {
			d.Chains = d.Chains[:1]
			d.Chains[0].Match.Source = d.Chains[0].Match.Destination
		}, "function fw: chain web, forward and chain web, reverse take the same packets"},
	} {
		t.Run(name, func(t *testing.T) {
			d := originating()
			c.change(&d)
			if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

func TestNodeRefusesOriginationThatDoesNotHold(t *testing.T) {
	const r1, r2 = 0, 1
	for name, c := range map[string]struct {
		node   int
		change func(*Node)
		want   string
	}{
		"at a function that drops":    {r2, func(n *Node) { n.Proxies[0].OnUnknown = model.OnUnknownDrop }, `from "fw": is no function of this node`},
		"at nothing":                  {r2, func(n *Node) { n.Headends[0].From = "dpi" }, `from "dpi": is no function of this node`},
		"of own traffic":              {r2, func(n *Node) { n.Headends[0].Own = true }, "own-traffic: a path that starts at a function"},
		"in the node's own namespace": {r2, func(n *Node) { n.Proxies[0].Netfilter.Namespace = model.NamespaceNode }, "cannot be combined with namespace node"},
		"the same packets twice":      {r2, func(n *Node) { n.Headends[1].Match = n.Headends[0].Match }, "has the same"},
		"an egress of nothing":        {r1, func(n *Node) { n.Egresses[len(n.Egresses)-1].Of = 7 }, "of 0x00000007: is not the whole path"},
		"an egress of another chain":  {r1, func(n *Node) { n.Egresses[len(n.Egresses)-1].Of = n.Egresses[0].Path }, "is not the whole path of chain staff"},
		"a whole path of another":     {r1, func(n *Node) { n.Egresses[0].Of = n.Egresses[1].Path }, "only a path that starts or ends at a function opens the guard for another one"},
	} {
		t.Run(name, func(t *testing.T) {
			n := compile(t, originating(), NewKeyring(random(1), nil)).Nodes[c.node]
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

// Secrets of paths from functions on are changed beside the others, and such paths come and
// go, in three steps that each hold.
func TestPathsFromFunctionsChangeInSteps(t *testing.T) {
	last := compile(t, originating(), NewKeyring(random(1), nil))
	for name, c := range map[string]struct {
		next         func() model.Domain
		turns, lossy int
	}{
		"fresh secrets":              {originating, 8, 0},
		"the function drops instead": {withNetfilter, 4, 4},
	} {
		t.Run(name, func(t *testing.T) {
			keys := NewKeyring(random(2), last.Paths)
			keys.KeepSIDs()
			keys.Rotate(func(string) bool { return true })
			next := compile(t, c.next(), keys)
			s, err := MakeSteps(last.Paths, last.Nodes, next)
			if err != nil {
				t.Fatal(err)
			}
			if len(s.Turns) != c.turns || len(s.Lossy) != c.lossy {
				t.Errorf("%d paths turn and %d come or go; want %d and %d", len(s.Turns), len(s.Lossy), c.turns, c.lossy)
			}
			for _, n := range slices.Concat(s.Both, s.Turn) {
				if _, err := EncodeNode(n); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
