package plan

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
)

// MPLS has the labels of the domain's nodes for one node. It has no secrets.
type MPLS struct {
	Services uint32 // the service label of the block's SID 0
	Label    uint32 // the node's own; 0: it has none, and packets with labels do not come to it
	MTU      int    // bytes behind the Ethernet header that each link of the core carries; 0: not declared
	Nodes    []MPLSNode
}

// MPLSNode is where packets with a node's label go.
type MPLSNode struct {
	Name    string
	Label   uint32
	Address netip.Addr // IPv4 or IPv6
}

// labels are the domain's rules for labels.
func (m *MPLS) labels() model.MPLS { return model.MPLS{Services: m.Services, MTU: m.MTU} }

// Service is the service label of a SID.
func (m *MPLS) Service(sid netip.Addr) uint32 { return m.labels().Service(sid) }

// NodeOf finds the node of a label.
func (m *MPLS) NodeOf(label uint32) (MPLSNode, bool) {
	if i := slices.IndexFunc(m.Nodes, func(n MPLSNode) bool { return n.Label == label }); i >= 0 {
		return m.Nodes[i], true
	}
	return MPLSNode{}, false
}

// OverLabels reports whether the path's outer headers are stacks of labels.
func (p PathID) OverLabels() bool { return p.Encapsulation.Type == model.EncapsulationSRMPLS }

// OverLabels reports whether the node is on a path over labels.
func (n Node) OverLabels() bool {
	return slices.ContainsFunc(n.Headends, func(h Headend) bool { return h.OverLabels() }) ||
		slices.ContainsFunc(n.Endpoints, func(e Endpoint) bool { return e.OverLabels() }) ||
		slices.ContainsFunc(n.Egresses, func(e Egress) bool { return e.OverLabels() })
}

// OuterLen is the length in bytes of the outer headers of a path with this whole segment list.
func OuterLen(e model.Encapsulation, segments []netip.Addr) int {
	if e.Type == model.EncapsulationSRMPLS {
		return mpls.OuterLen(len(segments))
	}
	return srv6.OuterLen(len(srv6.Carried(segments, e)))
}

// chainLen is the length in bytes of a chain's outer headers.
func chainLen(ch model.Chain) int {
	if ch.Encapsulation.Type == model.EncapsulationSRMPLS {
		return mpls.OuterLen(ch.Segments())
	}
	return srv6.ChainLen(ch)
}

// checkLabels checks the requirements of a path over labels.
func (c *compiler) checkLabels(ch model.Chain) error {
	if ch.Encapsulation.Type != model.EncapsulationSRMPLS {
		return nil
	}
	var errs []error
	for _, p := range ch.CheckLabels(func(name string) model.Function { return c.functions[name] }) {
		errs = append(errs, fmt.Errorf("%s: %w", p.Field, p.Err))
	}
	if c.domain.MPLS == nil {
		return errors.Join(append(errs, errors.New("it is of type sr-mpls, and the domain has no service labels"))...)
	}
	visited := []string{ch.Egress}
	if ch.Both {
		visited = append(visited, ch.Ingress[0])
	}
	for _, f := range ch.Functions {
		visited = append(visited, c.functions[f].Node)
	}
	for i, name := range visited {
		if c.nodes[name].MPLS == nil && !slices.Contains(visited[:i], name) {
			errs = append(errs, fmt.Errorf("it is of type sr-mpls, and node %s has no label", name))
		}
	}
	if c.domain.MPLS.MTU == 0 {
		for _, name := range append(visited, ch.Ingress...) {
			for _, i := range c.nodes[name].Interfaces {
				if i.Role == model.RoleCore && i.MTU == 0 {
					return errors.Join(append(errs, fmt.Errorf("the MTU of the core is not known: neither the domain's labels nor interface %s of node %s have one", i.Name, name))...)
				}
			}
		}
	}
	return errors.Join(errs...)
}

// assignLabels assigns its pair of labels to each hop of a path over labels.
func (c *compiler) assignLabels(p *Path) {
	if !p.OverLabels() {
		return
	}
	for i := range p.Hops[1:] {
		h := &p.Hops[i+1]
		h.NodeLabel, h.ServiceLabel = c.nodes[h.Node].MPLS.Label, c.domain.MPLS.Service(h.SID)
	}
}

// NodeLabels are the node labels of the visits, in their order; nil: the path is not over labels.
func (p Path) NodeLabels() []uint32 {
	if !p.OverLabels() {
		return nil
	}
	var list []uint32
	for _, h := range p.Hops[1:] {
		list = append(list, h.NodeLabel)
	}
	return list
}

// mplsOf has the domain's labels for a node; nil: there are none.
func mplsOf(d model.Domain, node model.Node) *MPLS {
	if d.MPLS == nil {
		return nil
	}
	m := &MPLS{Services: d.MPLS.Services, MTU: d.MPLS.MTU}
	if node.MPLS != nil {
		m.Label = node.MPLS.Label
	}
	for _, n := range d.Nodes {
		if n.MPLS != nil {
			m.Nodes = append(m.Nodes, MPLSNode{n.Name, n.MPLS.Label, n.MPLS.Address})
		}
	}
	return m
}

// labels checks the labels in a node's plan.
func (c *nodeChecker) labels(p *problems) {
	m := c.node.MPLS
	if m == nil {
		if c.node.OverLabels() {
			p.addf("mpls: is missing; the node has a part in paths over labels")
		}
		return
	}
	p.within("mpls", func(p *problems) {
		p.add(model.CheckServices(m.Services), "services %d", m.Services)
		p.add(checkMTU(m.MTU), "mtu %d", m.MTU)
		labels, addresses := map[uint32]string{}, map[netip.Addr]bool{}
		for i, n := range m.Nodes {
			p.within(fmt.Sprintf("nodes[%d]", i), func(p *problems) {
				p.add(model.CheckName(n.Name), "name %q", n.Name)
				p.add(m.labels().CheckNodeLabel(n.Label), "label %d", n.Label)
				p.add(model.CheckNodeMPLSAddress(n.Address), "address %q", n.Address)
				if c.node.Block.Contains(n.Address) {
					p.addf("address %s is within the SID block %s; a node's address is outside", n.Address, c.node.Block)
				}
				if other, ok := labels[n.Label]; ok {
					p.addf("label %d is that of %s already", n.Label, other)
				}
				if addresses[n.Address] {
					p.addf("address %s is given twice", n.Address)
				}
				labels[n.Label], addresses[n.Address] = n.Name, true
			})
		}
		switch of, ok := labels[m.Label]; {
		case m.Label == 0 && slices.ContainsFunc(m.Nodes, func(n MPLSNode) bool { return n.Name == c.node.Name }):
			p.addf("label is missing; the nodes' list has one for %s", c.node.Name)
		case m.Label != 0 && (!ok || of != c.node.Name):
			p.addf("label %d is not that of %s in the nodes' list", m.Label, c.node.Name)
		case m.Label == 0 && len(c.node.Endpoints)+len(c.node.Egresses) > 0:
			for _, e := range c.node.Endpoints {
				if e.OverLabels() {
					p.addf("label is missing; %s visits the node by it", e.PathID)
				}
			}
			for _, e := range c.node.Egresses {
				if e.OverLabels() {
					p.addf("label is missing; %s ends at the node", e.PathID)
				}
			}
		}
	})
}

// nodeLabels checks the labels of a headend.
func (c *nodeChecker) nodeLabels(p *problems, h Headend) {
	want := 0
	if h.OverLabels() {
		want = len(h.Segments)
	}
	if len(h.NodeLabels) != want {
		p.addf("node-labels: has %d; a path over %s has %d", len(h.NodeLabels), h.Encapsulation.Type, want)
		return
	}
	for i, l := range h.NodeLabels {
		if c.node.MPLS == nil {
			return // reported
		}
		if _, ok := c.node.MPLS.NodeOf(l); !ok {
			p.addf("node-labels[%d]: %d is not the label of a node", i, l)
		}
	}
}

// encapsulation checks that a path's form is one that packets can have.
func checkEncapsulation(p *problems, e model.Encapsulation) {
	if e.Type == model.EncapsulationSRMPLS && (e.SIDs != model.SIDsPlain || e.Reduced) {
		p.addf("encapsulation: %s SIDs and reduced are forms of segment lists; a stack of labels has one form", model.SIDsCompressed)
	}
}

// sameLabels is an error if a node cannot hold paths of both: a label means one thing at a time.
func sameLabels(o, n *MPLS) error {
	if o == nil || n == nil {
		return nil
	}
	if o.Services != n.Services {
		return errors.New("the domain's service labels change, and a label means one thing at a time")
	}
	for _, a := range o.Nodes {
		for _, b := range n.Nodes {
			if (a.Name == b.Name) != (a.Label == b.Label) {
				return fmt.Errorf("the label of node %s changes, or is another node's, and a label means one thing at a time", b.Name)
			}
		}
	}
	return nil
}

// bothLabels is n with the nodes of o that n no longer has.
func bothLabels(o, n *MPLS) *MPLS {
	if o == nil {
		return n
	}
	if n == nil {
		return o
	}
	both := *n
	both.Nodes = slices.Clone(n.Nodes)
	if both.Label == 0 {
		both.Label = o.Label
	}
	for _, a := range o.Nodes {
		if !slices.ContainsFunc(n.Nodes, func(b MPLSNode) bool { return a.Name == b.Name }) {
			both.Nodes = append(both.Nodes, a)
		}
	}
	return &both
}
