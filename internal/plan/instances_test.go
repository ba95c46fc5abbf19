package plan

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

// withInstances is streaming with two chains through zip and unzip that have parameters of their own, and one without.
func withInstances() model.Domain {
	d := streaming()
	d.Functions = slices.Clone(d.Functions)
	for i := range d.Functions {
		if d.Functions[i].Kind == model.KindStream {
			d.Functions[i].Stream.Run = []string{`"xor"`}
		}
	}
	d.Functions[0].Proxy.OnUnknown = model.OnUnknownDrop
	base := d.Chains[0]
	d.Chains = nil
	for i, p := range [][]model.Parameters{
		{{Function: "zip", Forward: 0x2a, Reverse: 0x2a}, {Function: "unzip", Forward: 0xabcdef, Reverse: 0x11}},
		{{Function: "zip", Forward: 0x17, Reverse: 0x17}},
		nil,
	} {
		c := base
		c.Name, c.Parameters = []string{"one", "two", "three"}[i], p
		c.Match = model.Match{Destination: netip.MustParsePrefix([]string{"2001:db8:1::/64", "2001:db8:2::/64", "2001:db8:3::/64"}[i])}
		d.Chains = append(d.Chains, c)
	}
	// xor takes 0x11, and 0xabcdef would be too many passes.
	d.Chains[0].Parameters[1].Forward = 0x3ff11
	return d
}

func TestChainsHaveInstancesByTheirParameters(t *testing.T) {
	c := compile(t, withInstances(), NewKeyring(random(1), nil))
	ends := map[string]string{}
	for _, p := range c.Paths {
		list := p.Segments()
		last := list[len(list)-1].As16()
		ends[p.Chain+", "+p.Way()] = string(rune('0'+last[8])) + " " + cmpHex(last[10:])
		if p.Hops[len(p.Hops)-1].SID.As16()[15] != 0 {
			t.Errorf("%s: the hop's SID has parameters", p.PathID)
		}
	}
	for way, want := range map[string]string{
		"one, forward, up to zip:0x2a":                      "0 00000000002a",
		"one, forward, from zip:0x2a to unzip:0x3ff11:0x11": "0 00000003ff11",
		"one, forward, from unzip:0x3ff11:0x11 on":          "0 000000000000",
		"one, reverse, up to unzip:0x3ff11:0x11":            "0 000000000011",
		"one, reverse, from unzip:0x3ff11:0x11 to zip:0x2a": "0 00000000002a",
		"two, forward, up to zip:0x17":                      "0 000000000017",
		"two, reverse, from unzip to zip:0x17":              "0 000000000017",
		"two, forward, from zip:0x17 to unzip":              "0 000000000000",
		"three, forward, up to zip":                         "0 000000000000",
	} {
		if ends[way] != want {
			t.Errorf("%s: the last SID ends with %q; want %q", way, ends[way], want)
		}
	}
	var got []string
	for _, n := range c.Nodes {
		for _, p := range n.Proxies {
			if p.Stream != nil {
				got = append(got, n.Name+" "+p.Function+" "+strings.Join(p.Stream.Run, ",")+" "+strings.Join(p.Stream.Back, ","))
			}
		}
		if _, err := DecodeNode(unchecked(t, n)); err != nil {
			t.Errorf("its own node refuses the plan: %v", err)
		}
	}
	if diff := cmp.Diff([]string{
		`r2 zip "xor" `, `r2 zip:0x17 {"xor":{"key":23,"passes":1}} `, `r2 zip:0x2a {"xor":{"key":42,"passes":1}} `,
		`r4 unzip "xor" `, `r4 unzip:0x3ff11:0x11 {"xor":{"key":17,"passes":1023}} {"xor":{"key":17,"passes":1}}`,
	}, got); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}
	b, err := EncodePaths(c.Paths)
	if err != nil {
		t.Fatal(err)
	}
	back, err := DecodePaths(b)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.EqualFunc(c.Paths, back, Path.Equal) {
		t.Error("paths are other ones when they were written and read")
	}
}

func cmpHex(b []byte) string {
	const digits = "0123456789abcdef"
	var s strings.Builder
	for _, x := range b {
		s.WriteByte(digits[x>>4])
		s.WriteByte(digits[x&15])
	}
	return s.String()
}

// Where there is no room for parameters, the plans alone have them, and instances are as many.
func TestCompressedListsHaveNoParameters(t *testing.T) {
	d := withInstances()
	for i := range d.Chains {
		d.Chains[i].Encapsulation.SIDs = model.SIDsCompressed
	}
	c := compile(t, d, NewKeyring(random(1), nil))
	parameters := 0
	for _, p := range c.Paths {
		if p.Hops[len(p.Hops)-1].Parameters != 0 {
			parameters++
		}
		for _, s := range p.Segments() {
			if err := model.CheckContainer(d.Block, s); err != nil {
				t.Errorf("%s: %s %v", p.PathID, s, err)
			}
		}
	}
	if parameters != 6 {
		t.Errorf("%d paths have parameters; want 6", parameters)
	}
	for _, n := range c.Nodes {
		if _, err := DecodeNode(unchecked(t, n)); err != nil {
			t.Errorf("node %s: %v", n.Name, err)
		}
	}
}

// The same over labels.
func TestStacksOfLabelsHaveNoParameters(t *testing.T) {
	d := withInstances()
	d.MPLS = &model.MPLS{Services: 100000}
	for i := range d.Nodes {
		d.Nodes[i].MPLS = &model.NodeMPLS{Label: uint32(16000 + i), Address: d.Nodes[i].Address}
	}
	for i := range d.Chains {
		d.Chains[i].Encapsulation = model.Encapsulation{Type: model.EncapsulationSRMPLS}
	}
	c := compile(t, d, NewKeyring(random(1), nil))
	for _, p := range c.Paths {
		for _, s := range p.Segments() {
			if !formOfSID(s) {
				t.Errorf("%s: %s has parameters", p.PathID, s)
			}
		}
	}
	for _, n := range c.Nodes {
		if _, err := DecodeNode(unchecked(t, n)); err != nil {
			t.Errorf("node %s: %v", n.Name, err)
		}
	}
}

// A node refuses a list that has other parameters than the function at its end.
func TestNodeRefusesParametersOfAnotherInstance(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Node)
		want   string
	}{
		"others": {func(n *Node) {
			for i := range n.Egresses {
				if e := &n.Egresses[i]; e.To == "zip:0x2a" && e.Direction == model.Forward {
					e.Segments = []netip.Addr{withParameters(e.SID, 0x2b)}
				}
			}
		}, "the last one is the egress's own, fc00:0:0:200::2a"},
		"none": {func(n *Node) {
			for i := range n.Egresses {
				if e := &n.Egresses[i]; e.To == "zip:0x2a" && e.Direction == model.Forward {
					e.Segments = []netip.Addr{e.SID}
				}
			}
		}, "the last one is the egress's own, fc00:0:0:200::2a"},
		"too large": {func(n *Node) {
			for i := range n.Headends {
				if h := &n.Headends[i]; h.To != "" {
					h.Segments = slices.Clone(h.Segments)
					s := &h.Segments[len(h.Segments)-1]
					b := s.As16()
					b[9] = 1
					*s = netip.AddrFrom16(b)
				}
			}
		}, "is not a SID with parameters of 48 bits or none"},
		"a name that nobody writes": {func(n *Node) { n.Proxies[1].Function = "zip:0x02a" }, "is not how an instance is written; expect zip:0x2a"},
		"no number":                 {func(n *Node) { n.Proxies[1].Function = "zip:x" }, "is not parameters"},
		"a number of 49 bits":       {func(n *Node) { n.Proxies[1].Function = "zip:0x1000000000000" }, "is not parameters"},
		"three numbers":             {func(n *Node) { n.Proxies[1].Function = "zip:0x1:0x2:0x3" }, "more than two colons"},
	} {
		t.Run(name, func(t *testing.T) {
			d := compile(t, withInstances(), NewKeyring(random(1), nil))
			n := d.Nodes[1]
			c.change(&n)
			if _, err := DecodeNode(unchecked(t, n)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

func TestPathsRefuseParametersThatAreNotTheirs(t *testing.T) {
	c := compile(t, withInstances(), NewKeyring(random(1), nil))
	for want, change := range map[string]func(*Path){
		"parameters 0x2b: those of the function that the path ends at are 0x2a": func(p *Path) { p.Hops[len(p.Hops)-1].Parameters = 0x2b },
		"only a path's last hop has them":                                       func(p *Path) { p.Hops[0].Parameters = 1 },
	} {
		paths := slices.Clone(c.Paths)
		paths[0].Hops = slices.Clone(paths[0].Hops)
		change(&paths[0])
		if err := checkPaths(paths); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v; want %q", err, want)
		}
	}
}

func TestParametersThatDoNotHoldAreRefused(t *testing.T) {
	for want, change := range map[string]func(*model.Domain){
		"which it does not visit":                      func(d *model.Domain) { d.Chains[0].Parameters[0].Function = "nobody" },
		"parameters for function zip twice":            func(d *model.Domain) { d.Chains[0].Parameters[1].Function = "zip" },
		"have more than 48 bits":                       func(d *model.Domain) { d.Chains[0].Parameters[0].Reverse = 1 << 48 },
		"parameters of 0 are none":                     func(d *model.Domain) { d.Chains[0].Parameters[0] = model.Parameters{Function: "zip"} },
		"only functions of kind stream take":           func(d *model.Domain) { d.Chains[0].Parameters[0].Function = "fw" },
		"none of its operations takes parameters":      func(d *model.Domain) { d.Functions[2].Stream.Run = []string{`"gzip"`} },
		"function zip: run: limit: its rate is the pa": func(d *model.Domain) { d.Functions[2].Stream.Run = []string{`"limit"`} },
	} {
		d := withInstances()
		d.Functions = slices.Clone(d.Functions)
		d.Chains[0].Parameters = slices.Clone(d.Chains[0].Parameters)
		change(&d)
		if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v; want %q", err, want)
		}
	}
}

// A function that needs parameters is there for its visits alone.
func TestAFunctionThatNeedsParametersHasNoWorkerWithout(t *testing.T) {
	d := withInstances()
	d.Functions = append(slices.Clone(d.Functions), d.Functions[2])
	last := &d.Functions[len(d.Functions)-1]
	last.Name, last.Proxy, last.Stream.Run = "slow", model.StreamDetour("slow"), []string{`"limit"`}
	out, err := Instances(d)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range out.Functions {
		names = append(names, f.Name)
	}
	if diff := cmp.Diff([]string{"fw", "dpi", "zip", "zip:0x17", "zip:0x2a", "unzip", "unzip:0x3ff11:0x11"}, names); diff != "" {
		t.Errorf("functions (-want +got):\n%s", diff)
	}
	d = streaming()
	if same, err := Instances(d); err != nil || !sameMemory(same.Functions, d.Functions) || !sameMemory(same.Chains, d.Chains) {
		t.Errorf("a domain without parameters is made anew: %v", err)
	}
}

// Other parameters in one chain are an edit like any other: CompileAfter makes what Compile makes.
func TestOtherParametersAreCompiledAgain(t *testing.T) {
	was := withInstances()
	last := compile(t, was, NewKeyring(random(1), nil))
	for name, change := range map[string]func(*model.Domain){
		"an instance of another chain": func(d *model.Domain) {
			d.Chains[2].Parameters = []model.Parameters{{Function: "zip", Forward: 0x17, Reverse: 0x17}}
		},
		"a new instance": func(d *model.Domain) {
			d.Chains[2].Parameters = []model.Parameters{{Function: "zip", Forward: 0x18, Reverse: 0x18}}
		},
		"no more":       func(d *model.Domain) { d.Chains[0].Parameters = nil },
		"another match": func(d *model.Domain) { d.Chains[0].Match.Destination = netip.MustParsePrefix("2001:db8:9::/64") },
	} {
		d := withInstances()
		change(&d)
		got, err := CompileAfter(was, last, d, NewKeyring(random(2), last.Paths))
		if err != nil {
			t.Fatal(err)
		}
		want := compile(t, d, NewKeyring(random(2), last.Paths))
		if !slices.EqualFunc(got.Nodes, want.Nodes, Node.Equal) || !slices.EqualFunc(got.Paths, want.Paths, Path.Equal) {
			t.Errorf("%s: compiled again it is another plan", name)
		}
	}
}

func TestAPlanAsksForParametersOfFunctions(t *testing.T) {
	c := compile(t, withInstances(), NewKeyring(random(1), nil))
	for _, n := range c.Nodes {
		asks := n.Name == "r2" || n.Name == "r4"
		if got := slices.Contains(n.Features(), featureParams); got != asks {
			t.Errorf("%s asks for parameters: %t; want %t", n.Name, got, asks)
		}
	}
	if slices.Contains(FirstFeatures, featureParams) || !slices.Contains(Features(), featureParams) {
		t.Error("agents of before know parameters of functions, or those of this program do not")
	}
}
