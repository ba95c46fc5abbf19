package cli

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// planServiceView is a service and its gateway.
type planServiceView struct {
	Name        string             `json:"name"`
	Node        string             `json:"node"` // of the gateway
	Address     netip.AddrPort     `json:"address"`
	Hosts       []string           `json:"hosts"`
	Clients     string             `json:"clients"`
	Kind        model.IdentityKind `json:"identity_kind"`
	Within      string             `json:"identity_within"`
	Mode        string             `json:"mode"`   // of the gateway: transparent, own or connect
	Origin      netip.AddrPort     `json:"origin"` // with connect empty, as OriginName
	OriginName  string             `json:"origin_name"`
	Certificate string             `json:"certificate_file"`
	Protocol    string             `json:"protocol"`       // http, tls or connect
	ALPN        []string           `json:"alpn,omitempty"` // with tls: protocols to agree on
	Idle        string             `json:"idle,omitempty"` // with tls: a connection without a byte ends after it

	Destinations []planDestination `json:"destinations,omitempty"` // with connect

	Rules  []planServiceRuleView `json:"rules"`
	Chains []planOnwardView      `json:"chains"`
	Clear  string                `json:"clear"` // where payload is
}

type planServiceRuleView struct {
	Who     string              `json:"who"`
	Hosts   []string            `json:"hosts,omitempty"`
	Methods []string            `json:"methods,omitempty"`
	Path    string              `json:"path,omitempty"`
	Headers []planServiceHeader `json:"headers,omitempty"`
	To      []string            `json:"to,omitempty"` // destinations
	Chain   string              `json:"chain"`
}

// planDestination is what a proxy's clients may ask for.
type planDestination struct {
	Name    string         `json:"name"` // host and port
	Address netip.AddrPort `json:"address"`
}

type planServiceHeader struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// planOnwardView is a chain that rules name.
type planOnwardView struct {
	Chain   string         `json:"chain"`
	Ports   model.Ports    `json:"source_ports"` // of connections by it
	Egress  string         `json:"egress"`
	Parts   []planSealView `json:"parts"` // in the order of the way to the origin; none: the gateway is a proxy, and nothing is sealed for its clients
	Origin  netip.AddrPort `json:"origin"`
	Through []string       `json:"functions,omitempty"` // of a proxy's chain
	Readers []string       `json:"readers"`             // that have payload in clear
}

// planSealView is what is sealed between two ends.
type planSealView struct {
	From   string   `json:"from"`
	FromID string   `json:"from_identity,omitempty"` // that its certificate says; none: it shows none to the other end
	To     string   `json:"to"`
	ToID   string   `json:"to_identity"`
	Sees   []string `json:"functions,omitempty"` // that see packets, and no payload
}

// newPlanOnwardView finds the parts of a gateway's chain. ends are the functions that open what is sealed.
func newPlanOnwardView(c plan.GatewayChain, s model.Service, ends map[string]bool, paths []plan.Path) planOnwardView {
	v := planOnwardView{Chain: c.Chain, Ports: c.Ports, Origin: c.Origin, Parts: []planSealView{}, Readers: []string{}}
	at := func(function, node string) string {
		if function == model.GatewayName {
			function = "the gateway"
		}
		return function + " on " + node
	}
	for _, p := range paths {
		if p.Chain != c.Chain || p.Direction != model.Forward || p.From != model.GatewayName && !ends[p.From] {
			continue
		}
		last := len(p.Hops) - 1
		if s.Mode == model.ModeConnect {
			for _, h := range p.Hops[1:last] {
				v.Through = append(v.Through, h.Function+" on "+h.Node)
			}
			v.Egress = p.Hops[last].Node
			return v
		}
		part := planSealView{From: at(p.From, p.Hops[0].Node), To: "the server " + s.Origin.Name, ToID: s.Origin.Name}
		if p.To != "" {
			part.FromID = model.SealName(p.Hops[0].Node, p.From)
			part.To, part.ToID = at(p.To, p.Hops[last].Node), model.SealName(p.Hops[last].Node, p.To)
		}
		for _, h := range p.Hops[1:last] {
			part.Sees = append(part.Sees, h.Function+" on "+h.Node)
		}
		v.Egress = p.Hops[last].Node // of the last part in the end
		v.Parts, v.Readers = append(v.Parts, part), append(v.Readers, part.From)
	}
	v.Readers = append(v.Readers, "the server "+s.Origin.Name)
	return v
}

// clear says where payload of a service is not sealed.
func clear(v planServiceView) string {
	if v.Mode == string(model.ModeConnect) {
		return fmt.Sprintf("what clients send is sealed by TLS up to the gateway on %s; behind it, as the client and the destination seal it themselves, and else in clear on the way and in all functions of the chains", v.Node)
	}
	inside := fmt.Sprintf("payload of %s is in clear inside the gateway on %s", v.Name, v.Node)
	var functions []string
	for _, c := range v.Chains {
		for i, p := range c.Parts {
			if i > 0 { // else the gateway
				functions = append(functions, fmt.Sprintf("%s (chain %s)", p.From, c.Chain))
			}
		}
	}
	if len(functions) > 0 {
		inside += ", inside " + strings.Join(functions, ", inside ") + ","
	}
	return fmt.Sprintf("%s and inside the server that shows a certificate of %s at %s; on the way between, also in other functions of its chains, it is sealed by TLS",
		inside, v.OriginName, v.Origin)
}

func newPlanServiceViews(node string, g *plan.Gateway, ends map[string]bool, paths []plan.Path) []planServiceView {
	var out []planServiceView
	for _, s := range g.Services {
		v := planServiceView{
			Name: s.Name, Node: node, Address: s.Address, Hosts: s.Hosts, Clients: s.Clients,
			Mode: s.Mode.String(), Origin: s.Origin.Address, OriginName: s.Origin.Name, Certificate: s.Certificate,
			Protocol: s.Protocol(), ALPN: s.Opaque.ALPN,
		}
		if s.Opaque.On {
			v.Idle = s.Opaque.Idle.String()
		}
		for _, c := range g.Clients {
			if c.Name == s.Clients {
				v.Kind, v.Within = c.Kind, c.Within
			}
		}
		for _, d := range s.Destinations {
			v.Destinations = append(v.Destinations, planDestination{d.Name(), d.Address})
		}
		for _, r := range s.Rules {
			rv := planServiceRuleView{Who: r.Who, Hosts: r.Hosts, Methods: r.Methods, Path: r.Path, To: r.To, Chain: r.Chain}
			for _, h := range r.Headers {
				rv.Headers = append(rv.Headers, planServiceHeader(h))
			}
			v.Rules = append(v.Rules, rv)
		}
		for _, c := range g.Chains {
			if !slices.ContainsFunc(s.Rules, func(r model.ServiceRule) bool { return r.Chain == c.Chain }) {
				continue
			}
			v.Chains = append(v.Chains, newPlanOnwardView(c, s, ends, paths))
		}
		v.Clear = clear(v)
		out = append(out, v)
	}
	return out
}

// services says of each who may what, by which chain, and who can read it.
func services(b *strings.Builder, list []planServiceView) {
	all := func(s []string) string {
		if len(s) == 0 {
			return "all"
		}
		return strings.Join(s, ", ")
	}
	for _, v := range list {
		at := "gateway on " + v.Node
		switch v.Mode {
		case string(model.ModeOwn):
			at += ", which has this address"
		case string(model.ModeConnect):
			at += ", which has this address, as a proxy"
		}
		fmt.Fprintf(b, "\nservice %s: %s at %s, %s\n", v.Name, strings.Join(v.Hosts, ", "), v.Address, at)
		fmt.Fprintf(b, "  clients are %s: their certificates have one name of kind %s, within %s\n", v.Clients, v.Kind, v.Within)
		if v.Mode == string(model.ModeConnect) {
			proxy(b, v)
			continue
		}
		if v.Idle != "" {
			agreed := ""
			if len(v.ALPN) > 0 {
				agreed = ", of " + strings.Join(v.ALPN, " or ") + " as both sides agree (ALPN)"
			}
			fmt.Fprintf(b, "  its protocol is tls: bytes that the gateway does not read%s; each connection takes one chain, and ends after %s without a byte\n", agreed, v.Idle)
		}
		t := planTable{head: []string{">RULE", "WHO", "HOSTS", "METHODS", "PATH", "HEADERS", "CHAIN"}}
		if v.Idle != "" {
			t.head = []string{">RULE", "WHO", "HOSTS", "CHAIN"}
		}
		for i, r := range v.Rules {
			if v.Idle != "" {
				t.add(i+1, r.Who, all(r.Hosts), r.Chain)
				continue
			}
			path := r.Path
			if path == "" {
				path = "all"
			}
			var headers []string
			for _, h := range r.Headers {
				headers = append(headers, h.Name+": "+h.Value)
			}
			t.add(i+1, r.Who, all(r.Hosts), all(r.Methods), path, all(headers), r.Chain)
		}
		if v.Idle != "" {
			t.add("", "else", "", "refused")
		} else {
			t.add("", "else", "", "", "", "", "refused")
		}
		t.write(b, "  ")
		t = planTable{head: []string{"CHAIN", ">SOURCE PORTS", "SEALED FROM", "THROUGH", "TO"}}
		for _, c := range v.Chains {
			chain, ports := c.Chain, c.Ports.String()
			for _, p := range c.Parts {
				t.add(chain, ports, p.From, strings.Join(p.Sees, ", "), p.To)
				chain, ports = "", ""
			}
		}
		t.write(b, "  ")
		fmt.Fprintf(b, "  %s\n", v.Clear)
		fmt.Fprintf(b, "  %s refuses TCP to port %d of %s that came by none of these chains\n", egressesOf(v), v.Origin.Port(), v.Origin.Addr())
	}
}

func egressesOf(v planServiceView) string {
	var out []string
	for _, c := range v.Chains {
		if !slices.Contains(out, c.Egress) {
			out = append(out, c.Egress)
		}
	}
	return strings.Join(out, " and ")
}

// proxy says of one what clients may ask for, and by which chain.
func proxy(b *strings.Builder, v planServiceView) {
	fmt.Fprintf(b, "  clients ask for a destination by CONNECT (HTTP/1.1), and for nothing else; a connection ends after %s without a byte\n", v.Idle)
	address := map[string]netip.AddrPort{}
	for _, d := range v.Destinations {
		address[d.Name] = d.Address
	}
	t := planTable{head: []string{">RULE", "WHO", "ASKS FOR", "AT", "CHAIN"}}
	for i, r := range v.Rules {
		t.add(i+1, r.Who, strings.Join(r.To, ", "), address[r.To[0]], r.Chain)
	}
	t.add("", "else", "", "", "refused")
	t.write(b, "  ")
	t = planTable{head: []string{"CHAIN", ">SOURCE PORTS", "THROUGH", "TO"}}
	for _, c := range v.Chains {
		t.add(c.Chain, c.Ports, strings.Join(c.Through, ", "), c.Origin)
	}
	t.write(b, "  ")
	fmt.Fprintf(b, "  %s\n", v.Clear)
	for i, c := range v.Chains {
		if slices.ContainsFunc(v.Chains[:i], func(o planOnwardView) bool { return o.Origin == c.Origin && o.Egress == c.Egress }) {
			continue
		}
		fmt.Fprintf(b, "  %s refuses TCP to port %d of %s that came by none of its chains\n", c.Egress, c.Origin.Port(), c.Origin.Addr())
	}
}
