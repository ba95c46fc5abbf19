package plan

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

// labelled is the paper's domain, its chain over labels.
func labelled() model.Domain {
	d := paper(model.SchemeKeyed)
	d.MPLS = &model.MPLS{Services: 100000, MTU: 1500}
	for i := range d.Nodes {
		d.Nodes[i].MPLS = &model.NodeMPLS{Label: 16000 + uint32(d.Nodes[i].Name[1]-'0'), Address: netip.MustParseAddr("192.0.2." + d.Nodes[i].Name[1:])}
	}
	d.Chains[0].Encapsulation.Type = model.EncapsulationSRMPLS
	return d
}

func TestAPathOverLabelsHasAPairForEachVisit(t *testing.T) {
	out := compile(t, labelled(), NewKeyring(random(1), nil))
	p := out.Paths[0]
	var pairs [][2]uint32
	for _, h := range p.Hops {
		pairs = append(pairs, [2]uint32{h.NodeLabel, h.ServiceLabel})
	}
	// Service labels are the base and the SID's 16 bits: fc00:0:0:200:: is 0x200.
	if diff := cmp.Diff([][2]uint32{{}, {16002, 100512}, {16003, 100768}, {16006, 101536}}, pairs); diff != "" {
		t.Errorf("labels of hops (-want +got):\n%s", diff)
	}
	if p.OuterLen() != 60 || p.MTU != 1440 {
		t.Errorf("headers of %d bytes, MTU %d; want 60 of the 1500 that the domain declares", p.OuterLen(), p.MTU)
	}
	r1 := byName(out.Nodes)["r1"]
	h := r1.Headends[0]
	if !slices.Equal(h.NodeLabels, []uint32{16002, 16003, 16006}) || !slices.Equal(h.Segments, addresses("fc00:0:0:200::", "fc00:0:0:300::", "fc00:0:0:600::")) {
		t.Errorf("headend: node labels %v, segments %v", h.NodeLabels, h.Segments)
	}
	want := &MPLS{Services: 100000, Label: 16001, MTU: 1500, Nodes: []MPLSNode{
		{"r1", 16001, netip.MustParseAddr("192.0.2.1")}, {"r2", 16002, netip.MustParseAddr("192.0.2.2")},
		{"r3", 16003, netip.MustParseAddr("192.0.2.3")}, {"r6", 16006, netip.MustParseAddr("192.0.2.6")},
	}}
	if diff := cmp.Diff(want, r1.MPLS, equal); diff != "" {
		t.Errorf("what r1 knows of labels (-want +got):\n%s", diff)
	}
	for label, sid := range map[uint32]string{100512: "fc00:0:0:200::", 165535: "fc00:0:0:ffff::"} {
		if got := r1.MPLS.labels().SID(r1.Block, label); got != netip.MustParseAddr(sid) {
			t.Errorf("SID of label %d is %s; want %s", label, got, sid)
		}
	}
}

// The least of what the domain and its core interfaces carry counts.
func TestLabelsFitEveryLink(t *testing.T) {
	d := labelled()
	d.Nodes[1].Interfaces[0].MTU = 1400
	if p := compile(t, d, nil).Paths[0]; p.MTU != 1340 {
		t.Errorf("MTU %d with a link of 1400; want 1340", p.MTU)
	}
	d.MPLS.MTU = 0
	d.Nodes[1].Interfaces[0].MTU = 1700
	if p := compile(t, d, nil).Paths[0]; p.MTU != 1640 {
		t.Errorf("MTU %d with links of 1700 alone; want 1640", p.MTU)
	}
}

// There and back, each with an epoch and secrets of its own; SIDs stay. A node's label may change
// without any.
func TestAnotherTypeIsAnotherEpoch(t *testing.T) {
	d := labelled()
	over := compile(t, d, NewKeyring(random(1), nil)).Paths
	d.Nodes[1].MPLS.Label = 17002
	moved := compile(t, d, NewKeyring(random(2), over)).Paths
	if moved[0].Epoch != over[0].Epoch || moved[0].Hops[1].NodeLabel != 17002 {
		t.Errorf("another label of r2: epoch %d of %d, label %d", moved[0].Epoch, over[0].Epoch, moved[0].Hops[1].NodeLabel)
	}
	d = labelled()
	d.Chains[0].Encapsulation.Type = model.EncapsulationSRv6
	segments := compile(t, d, NewKeyring(random(3), over)).Paths
	if segments[0].Epoch != over[0].Epoch+1 || slices.Equal(segments[0].Verifier.Keys, over[0].Verifier.Keys) {
		t.Errorf("SRv6 instead of labels: epoch %d behind %d", segments[0].Epoch, over[0].Epoch)
	}
	if !slices.Equal(segments[0].SIDs(), over[0].SIDs()) || segments[0].Hops[1].ServiceLabel != 0 {
		t.Errorf("SRv6 instead of labels: SIDs %v, service label %d", segments[0].SIDs(), segments[0].Hops[1].ServiceLabel)
	}
}

func TestChainsOverLabelsThatCannotBeAreRefused(t *testing.T) {
	for _, c := range []struct {
		edit func(*model.Domain)
		want string
	}{
		{func(d *model.Domain) { d.MPLS = nil }, "the domain has no service labels"},
		{func(d *model.Domain) { d.Nodes[1].MPLS = nil }, "node r2 has no label"},
		{func(d *model.Domain) { d.Nodes[0].MPLS = nil }, "node r1 has no label"},
		{func(d *model.Domain) { d.MPLS.MTU, d.Nodes[2].Interfaces[1].MTU = 0, 0 }, "interface r3-r6 of node r3"},
		{func(d *model.Domain) { d.MPLS.MTU = 1339 }, "leaves less than 1280"},
		{func(d *model.Domain) { d.Chains[0].Encapsulation.SIDs = model.SIDsCompressed }, "sids: compressed"},
		{func(d *model.Domain) { d.Chains[0].Encapsulation.Reduced = true }, "reduced: is a form"},
		{func(d *model.Domain) {
			d.Chains[0].Waypoints = []model.Waypoint{{SID: netip.MustParseAddr("fc00:0:0:f00::")}}
		}, "waypoint"},
		{func(d *model.Domain) {
			d.Functions = functions().Functions
			d.Functions[0].Proxy.Segments = model.SegmentsKeep
		}, "fw has segments: keep"},
	} {
		d := labelled()
		c.edit(&d)
		if _, err := Compile(d, nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("want an error with %q; got %v", c.want, err)
		}
	}
	d := labelled()
	d.Chains[0].Both, d.Nodes[0].MPLS = false, nil
	if _, err := Compile(d, nil); err != nil {
		t.Errorf("a headend that nothing comes back to by labels needs none: %v", err)
	}
}

func TestNodeRefusesLabelsThatDoNotHold(t *testing.T) {
	for _, c := range []struct {
		node string
		edit func(*Node)
		want string
	}{
		{"r1", func(n *Node) { n.MPLS = nil }, "mpls: is missing"},
		{"r1", func(n *Node) { n.MPLS.Services = 983041 }, "services 983041 is not a label with 65536"},
		{"r1", func(n *Node) { n.MPLS.MTU = 1 }, "mtu 1"},
		{"r1", func(n *Node) { n.MPLS.Nodes[1].Label = 100001 }, "label 100001 is one of the service labels"},
		{"r1", func(n *Node) { n.MPLS.Nodes[1].Label = 16003 }, "label 16003 is that of r2 already"},
		{"r1", func(n *Node) { n.MPLS.Nodes[1].Address = n.MPLS.Nodes[0].Address }, "192.0.2.1 is given twice"},
		{"r1", func(n *Node) { n.MPLS.Nodes[1].Address = netip.MustParseAddr("fc00::1") }, "within the SID block"},
		{"r1", func(n *Node) { n.MPLS.Nodes[1].Name = "-" }, "name"},
		{"r1", func(n *Node) { n.MPLS.Label = 16002 }, "label 16002 is not that of r1"},
		{"r1", func(n *Node) { n.MPLS.Label = 0 }, "label is missing"},
		{"r2", func(n *Node) { n.MPLS.Label, n.MPLS.Nodes = 0, nil }, "visits the node by it"},
		{"r6", func(n *Node) { n.MPLS.Label, n.MPLS.Nodes, n.Headends = 0, nil, nil }, "ends at the node"},
		{"r1", func(n *Node) { n.Headends[0].NodeLabels = n.Headends[0].NodeLabels[1:] }, "has 2; a path over sr-mpls has 3"},
		{"r1", func(n *Node) { n.Headends[0].NodeLabels[1] = 17000 }, "17000 is not the label of a node"},
		{"r1", func(n *Node) { n.Headends[0].Encapsulation.Type = model.EncapsulationSRv6 }, "has 3; a path over srv6 has 0"},
		{"r2", func(n *Node) { n.Endpoints[0].Encapsulation.Reduced = true }, "a stack of labels has one form"},
	} {
		n := byName(compile(t, labelled(), NewKeyring(random(1), nil)).Nodes)[c.node]
		if _, err := DecodeNode(unchecked(t, n)); err != nil {
			t.Fatal(err)
		}
		c.edit(&n)
		if _, err := DecodeNode(unchecked(t, n)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("want an error with %q; got %v", c.want, err)
		}
	}
}

// While a chain changes from labels to SRv6 nodes know both; a label means one thing all the while.
func TestStepsKeepLabelsUntilTheyAreUnused(t *testing.T) {
	was := compile(t, labelled(), NewKeyring(random(1), nil))
	d := labelled()
	d.MPLS, d.Chains[0].Encapsulation = nil, model.Encapsulation{}
	for i := range d.Nodes {
		d.Nodes[i].MPLS = nil
	}
	keys := NewKeyring(random(2), was.Paths)
	keys.KeepSIDs()
	next := compile(t, d, keys)
	steps, err := MakeSteps(was.Paths, was.Nodes, next)
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range steps.Turn {
		if diff := cmp.Diff(was.Nodes[i].MPLS, n.MPLS, equal); diff != "" || next.Nodes[i].MPLS != nil {
			t.Errorf("%s, while packets with labels are under way:\n%s", n.Name, diff)
		}
	}
	for name, edit := range map[string]func(*model.Domain){
		"service labels change": func(d *model.Domain) { d.MPLS.Services++ },
		"node r2 changes":       func(d *model.Domain) { d.Nodes[1].MPLS.Label = 16009 },
	} {
		d := labelled()
		edit(&d)
		keys := NewKeyring(random(2), was.Paths)
		keys.KeepSIDs()
		next := compile(t, d, keys)
		if _, err := MakeSteps(was.Paths, was.Nodes, next); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("steps: want an error with %q; got %v", name, err)
		}
		if _, err := (Live{Now: was, Next: next}).Nodes(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("live: want an error with %q; got %v", name, err)
		}
	}
}

// What a gateway sends is as long as the chains of its rules leave, with labels as with segments.
func TestChainsOfRulesGoOverLabels(t *testing.T) {
	d := serving()
	d.MPLS = &model.MPLS{Services: 100000, MTU: 1500}
	for i := range d.Nodes {
		d.Nodes[i].MPLS = &model.NodeMPLS{Label: 16001 + uint32(i), Address: d.Nodes[i].Address}
	}
	for i := range d.Chains {
		d.Chains[i].Encapsulation.Type = model.EncapsulationSRMPLS
	}
	c := compile(t, d, NewKeyring(random(1), nil))
	r1 := byName(c.Nodes)["r1"]
	if g := r1.Gateway(); g == nil || len(g.Chains) != 2 || g.MTU != 1500-(36+8*3) {
		t.Errorf("the gateway is %+v; want one of two chains, with an MTU of 1440", g)
	}
	labels := map[string][]uint32{}
	for _, h := range r1.Headends {
		if h.From != model.GatewayName {
			t.Errorf("path %s begins at %q", h.PathID, h.From)
		}
		labels[h.Chain] = h.NodeLabels
	}
	if diff := cmp.Diff(map[string][]uint32{"web": {16002, 16003, 16004}, "light": {16002, 16004}}, labels); diff != "" {
		t.Errorf("labels of headends (-want +got):\n%s", diff)
	}
}
