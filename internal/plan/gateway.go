package plan

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/gateway/policy"
	"github.com/waystamp/waystamp/internal/model"
)

// Gateway is the agent's configuration for the services with a gateway on this node. It names
// files on the node, and has no keys.
type Gateway struct {
	MTU      int             // of packets that its namespace sends, so that they fit all chains that begin at it
	Clients  []model.Clients // the clients of Services
	Services []model.Service
	Chains   []GatewayChain // the chains in rules of Services, each once, sorted by name
}

// GatewayChain is a chain that rules name: two paths, one that begins at the gateway and one that
// ends at it.
type GatewayChain struct {
	Chain   string
	Origin  netip.AddrPort // the only one that it leads to
	Ports   model.Ports    // that connections onward come from
	Forward uint32
	Reverse uint32
}

// Gateway is that of the node; nil: it has none.
func (n Node) Gateway() *Gateway {
	for _, p := range n.Proxies {
		if p.Gateway != nil {
			return p.Gateway
		}
	}
	return nil
}

// Addresses are the addresses of the services for clients, each once.
func (g *Gateway) Addresses() []netip.AddrPort {
	var out []netip.AddrPort
	for _, s := range g.Services {
		if !slices.Contains(out, s.Address) {
			out = append(out, s.Address)
		}
	}
	return out
}

// guardOf is the guard's action for packets that a chain requires. Packets to a service always
// need a proof, also if an interface of the egress has another setting.
func guardOf(ch model.Chain) model.Guard {
	if ch.Onward != nil {
		return model.GuardEnforce
	}
	return ch.Guard
}

// checkServices checks the requirements of gateways.
func (c *compiler) checkServices() {
	if err := c.domain.CheckServices(); err != nil {
		c.errs = append(c.errs, err)
		return
	}
	for _, n := range c.domain.Nodes {
		if g := gatewayOn(c.domain, n.Name, nil); g != nil {
			if err := g.check(); err != nil {
				c.errs = append(c.errs, fmt.Errorf("gateway on node %s: %w", n.Name, err))
			}
		}
	}
	for _, s := range c.domain.Services {
		for _, n := range s.Nodes {
			if _, ok := c.nodes[n]; !ok {
				c.errs = append(c.errs, fmt.Errorf("service %s: node %q of its gateway does not exist", s.Name, n))
			}
		}
	}
}

// gateways adds the gateway of its services to each node, as a function.
func gateways(d model.Domain, paths []Path, nodes map[string]*Node) {
	for _, n := range d.Nodes {
		if g := gatewayOn(d, n.Name, paths); g != nil {
			at := nodes[n.Name]
			at.Proxies = append(at.Proxies, Proxy{Function: model.GatewayName, Proxy: model.StreamDetour(model.GatewayName), Gateway: g})
		}
	}
}

// gatewayOn is the gateway of a node; nil: there is none.
func gatewayOn(d model.Domain, node string, paths []Path) *Gateway {
	g := &Gateway{MTU: model.MTUMin}
	named := map[string]bool{}
	for _, s := range d.Services {
		if !slices.Contains(s.Nodes, node) {
			continue
		}
		s.At, s.CertificateAt, s.KeyAt, s.Origin.CAAt = model.Source{}, model.Source{}, model.Source{}, model.Source{} // of the domain's file
		g.Services = append(g.Services, s)
		for _, r := range s.Rules {
			named[r.Chain] = true
		}
	}
	if len(g.Services) == 0 {
		return nil
	}
	for _, c := range d.Clients {
		if slices.ContainsFunc(g.Services, func(s model.Service) bool { return s.Clients == c.Name }) {
			c.At, c.CRLAt = model.Source{}, model.Source{}
			g.Clients = append(g.Clients, c)
		}
	}
	least := 0
	for _, c := range d.Chains {
		if !named[c.Name] || c.Onward == nil {
			continue
		}
		gc := GatewayChain{Chain: c.Name, Origin: c.Onward.Origin, Ports: c.Onward.Ports}
		for _, p := range paths {
			switch {
			case p.Chain != c.Name:
			case p.From == model.GatewayName:
				gc.Forward = p.Path
				if p.MTU != 0 && (least == 0 || p.MTU < least) {
					least = p.MTU
				}
			case p.To == model.GatewayName:
				gc.Reverse = p.Path
			}
		}
		g.Chains = append(g.Chains, gc)
	}
	slices.SortFunc(g.Chains, func(a, b GatewayChain) int { return cmp.Compare(a.Chain, b.Chain) })
	if least != 0 {
		g.MTU = least
	}
	return g
}

// check checks a gateway, except the paths of its chains.
func (g *Gateway) check() error {
	kinds := map[string]model.IdentityKind{}
	for _, c := range g.Clients {
		if err := c.Check(); err != nil {
			return fmt.Errorf("clients %s: %w", c.Name, err)
		}
		if _, twice := kinds[c.Name]; twice {
			return fmt.Errorf("clients %s are given twice", c.Name)
		}
		kinds[c.Name] = c.Kind
	}
	chains := map[string]GatewayChain{}
	for _, c := range g.Chains {
		if _, twice := chains[c.Chain]; twice {
			return fmt.Errorf("chain %s is given twice", c.Chain)
		}
		if c.Ports.First < 1024 || c.Ports.Last < c.Ports.First {
			return fmt.Errorf("chain %s: %s is no range of ports that connections come from", c.Chain, c.Ports)
		}
		for _, o := range g.Chains {
			if o.Chain != c.Chain && o.Origin == c.Origin && o.Ports.First <= c.Ports.Last && c.Ports.First <= o.Ports.Last {
				return fmt.Errorf("chain %s: its ports %s are those of chain %s, too", c.Chain, c.Ports, o.Chain)
			}
		}
		chains[c.Chain] = c
	}
	hosts, services, used := map[string]string{}, map[string]bool{}, map[string]bool{}
	for _, s := range g.Services {
		if err := s.Check(); err != nil {
			return fmt.Errorf("service %s: %w", s.Name, err)
		}
		if services[s.Name] {
			return fmt.Errorf("service %s is given twice", s.Name)
		}
		services[s.Name] = true
		for _, h := range s.Hosts {
			if other, taken := hosts[h]; taken {
				return fmt.Errorf("service %s: host %s is that of service %s already", s.Name, h, other)
			}
			hosts[h] = s.Name
		}
		kind, ok := kinds[s.Clients]
		if !ok {
			return fmt.Errorf("service %s: there are no clients %q", s.Name, s.Clients)
		}
		if _, err := policy.Compile(s, kind); err != nil {
			return fmt.Errorf("service %s: %w", s.Name, err)
		}
		for _, r := range s.Rules {
			to := s.Leads(r)
			if len(to) != 1 {
				return fmt.Errorf("service %s: a rule leads to %d addresses; expect one", s.Name, len(to))
			}
			c, ok := chains[r.Chain]
			if !ok || c.Origin != to[0] {
				return fmt.Errorf("service %s: there is no chain %q to %s", s.Name, r.Chain, to[0])
			}
			used[r.Chain] = true
		}
	}
	for _, c := range g.Chains {
		if !used[c.Chain] {
			return fmt.Errorf("chain %s is one that no rule names", c.Chain)
		}
	}
	if len(g.Services) == 0 {
		return errors.New("has no services")
	}
	if g.MTU < model.MTUMin || g.MTU > model.MTUMax {
		return fmt.Errorf("mtu %d is not from %d to %d", g.MTU, model.MTUMin, model.MTUMax)
	}
	return nil
}

// gateway checks the node's.
func (c *nodeChecker) gateway(p *problems, x Proxy) {
	if x.Function != model.GatewayName {
		p.addf("gateway: it stands for function %q; expect %q", x.Function, model.GatewayName)
	}
	if x.Proxy != model.StreamDetour(x.Function) || x.Netfilter != nil || x.Stream != nil {
		p.addf("gateway: its interface, or its way to recognise packets, does not fit a gateway")
	}
	if err := x.Gateway.check(); err != nil {
		p.list = append(p.list, fmt.Errorf("gateway: %w", err))
	}
	for _, g := range x.Gateway.Chains {
		// While chains come and go, their paths may not be there yet, or any more.
		if h, ok := c.headsOf[g.Forward]; ok && (h.Chain != g.Chain || h.From != x.Function) || g.Forward == 0 {
			p.addf("gateway: path 0x%08x does not begin at it for chain %s", g.Forward, g.Chain)
		}
		if e, ok := c.whole[g.Reverse]; ok && (e.Chain != g.Chain || e.To != x.Function) || g.Reverse == 0 {
			p.addf("gateway: path 0x%08x does not end at it for chain %s", g.Reverse, g.Chain)
		}
	}
}

// The types below mirror the file.

type gatewayFile struct {
	MTU      int                `json:"mtu"`
	Clients  []clientsFile      `json:"clients"`
	Services []serviceFile      `json:"services"`
	Chains   []gatewayChainFile `json:"chains"`
}

type clientsFile struct {
	Name      string             `json:"name"`
	CA        string             `json:"ca"`
	Kind      model.IdentityKind `json:"kind"`
	Within    string             `json:"within"`
	CRL       string             `json:"crl,omitempty"`
	OCSP      bool               `json:"ocsp,omitempty"`
	Responder string             `json:"responder,omitempty"`
	OlderThan durationFile       `json:"older-than,omitzero"`
	Lifetime  durationFile       `json:"lifetime,omitzero"`
}

type serviceFile struct {
	Name        string            `json:"name"`
	Hosts       []string          `json:"hosts"`
	Node        string            `json:"node"`
	Address     netip.AddrPort    `json:"address"`
	Certificate string            `json:"certificate"`
	Key         string            `json:"key,omitempty"`
	Signer      string            `json:"signer,omitempty"`
	Clients     string            `json:"clients"`
	Origin      *originFile       `json:"origin,omitempty"` // none: destinations
	Rules       []serviceRuleFile `json:"rules"`
	Opaque      *opaqueFile       `json:"opaque,omitempty"` // none: HTTP
	Mode        model.GatewayMode `json:"mode,omitempty"`

	Destinations []destinationFile `json:"destinations,omitempty"`
	// Headers are left out where they are the standard's.
	Headers *clientHeadersFile `json:"client-headers,omitempty"`
}

type clientHeadersFile struct {
	Certificate string `json:"certificate,omitempty"`
	PEM         string `json:"pem,omitempty"`
	Identity    string `json:"identity,omitempty"`
	Serial      string `json:"serial,omitempty"`
}

type destinationFile struct {
	Host    string         `json:"host"`
	Port    uint16         `json:"port"`
	Address netip.AddrPort `json:"address"`
}

type opaqueFile struct {
	ALPN []string     `json:"alpn,omitempty"`
	Idle durationFile `json:"idle"`
}

type originFile struct {
	Address netip.AddrPort `json:"address"`
	CA      string         `json:"ca"`
	Name    string         `json:"name"`
}

type serviceRuleFile struct {
	Who     string              `json:"who"`
	Hosts   []string            `json:"hosts,omitempty"`
	Methods []string            `json:"methods,omitempty"`
	Path    string              `json:"path,omitempty"`
	Headers []serviceHeaderFile `json:"headers,omitempty"`
	To      []string            `json:"to,omitempty"`
	Chain   string              `json:"chain"`
}

type serviceHeaderFile struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type gatewayChainFile struct {
	Chain   string         `json:"chain"`
	Origin  netip.AddrPort `json:"origin"`
	Ports   model.Ports    `json:"ports"`
	Forward hex32          `json:"forward"`
	Reverse hex32          `json:"reverse"`
}

func gatewayToFile(g *Gateway) *gatewayFile {
	if g == nil {
		return nil
	}
	f := &gatewayFile{MTU: g.MTU, Clients: []clientsFile{}, Services: []serviceFile{}, Chains: []gatewayChainFile{}}
	for _, c := range g.Clients {
		f.Clients = append(f.Clients, clientsFile{c.Name, c.CA, c.Kind, c.Within, c.CRL, c.OCSP, c.Responder, durationFile(c.OlderThan), durationFile(c.Lifetime)})
	}
	for _, s := range g.Services {
		sf := serviceFile{
			Name: s.Name, Hosts: s.Hosts, Node: s.Nodes[0], Address: s.Address, Certificate: s.Certificate, Key: s.Key, Signer: s.Signer, Clients: s.Clients,
			Mode: s.Mode,
		}
		if !s.Opaque.On && s.Headers != model.StandardHeaders() {
			h := clientHeadersFile(s.Headers)
			sf.Headers = &h
		}
		if s.Mode != model.ModeConnect {
			sf.Origin = &originFile{s.Origin.Address, s.Origin.CA, s.Origin.Name}
		}
		for _, d := range s.Destinations {
			sf.Destinations = append(sf.Destinations, destinationFile(d))
		}
		if s.Opaque.On {
			sf.Opaque = &opaqueFile{s.Opaque.ALPN, durationFile(s.Opaque.Idle)}
		}
		for _, r := range s.Rules {
			rf := serviceRuleFile{Who: r.Who, Hosts: r.Hosts, Methods: r.Methods, Path: r.Path, To: r.To, Chain: r.Chain}
			for _, h := range r.Headers {
				rf.Headers = append(rf.Headers, serviceHeaderFile(h))
			}
			sf.Rules = append(sf.Rules, rf)
		}
		f.Services = append(f.Services, sf)
	}
	for _, c := range g.Chains {
		f.Chains = append(f.Chains, gatewayChainFile{c.Chain, c.Origin, c.Ports, hex32(c.Forward), hex32(c.Reverse)})
	}
	return f
}

func (f *gatewayFile) gateway() *Gateway {
	if f == nil {
		return nil
	}
	g := &Gateway{MTU: f.MTU}
	for _, c := range f.Clients {
		g.Clients = append(g.Clients, model.Clients{
			Name: c.Name, CA: c.CA, Kind: c.Kind, Within: c.Within, CRL: c.CRL, OCSP: c.OCSP, Responder: c.Responder, OlderThan: time.Duration(c.OlderThan), Lifetime: time.Duration(c.Lifetime),
		})
	}
	for _, s := range f.Services {
		ms := model.Service{
			Name: s.Name, Hosts: s.Hosts, Nodes: []string{s.Node}, Address: s.Address, Certificate: s.Certificate, Key: s.Key, Signer: s.Signer, Clients: s.Clients,
			Mode: s.Mode,
		}
		if s.Origin != nil {
			ms.Origin = model.Origin{Address: s.Origin.Address, CA: s.Origin.CA, Name: s.Origin.Name}
		}
		for _, d := range s.Destinations {
			ms.Destinations = append(ms.Destinations, model.Destination(d))
		}
		switch {
		case s.Headers != nil:
			ms.Headers = model.ClientHeaders(*s.Headers)
		case s.Opaque == nil:
			ms.Headers = model.StandardHeaders()
		}
		if s.Opaque != nil {
			ms.Opaque = model.Opaque{On: true, ALPN: s.Opaque.ALPN, Idle: time.Duration(s.Opaque.Idle)}
		}
		for _, r := range s.Rules {
			mr := model.ServiceRule{Who: r.Who, Hosts: r.Hosts, Methods: r.Methods, Path: r.Path, To: r.To, Chain: r.Chain}
			for _, h := range r.Headers {
				mr.Headers = append(mr.Headers, model.ServiceHeader(h))
			}
			ms.Rules = append(ms.Rules, mr)
		}
		g.Services = append(g.Services, ms)
	}
	for _, c := range f.Chains {
		g.Chains = append(g.Chains, GatewayChain{c.Chain, c.Origin, c.Ports, uint32(c.Forward), uint32(c.Reverse)})
	}
	return g
}
