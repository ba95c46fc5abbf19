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
	Name        string                `json:"name"`
	Node        string                `json:"node"` // of the gateway
	Address     netip.AddrPort        `json:"address"`
	Hosts       []string              `json:"hosts"`
	Clients     string                `json:"clients"`
	Kind        model.IdentityKind    `json:"identity_kind"`
	Within      string                `json:"identity_within"`
	Origin      netip.AddrPort        `json:"origin"`
	OriginName  string                `json:"origin_name"`
	Certificate string                `json:"certificate_file"`
	Rules       []planServiceRuleView `json:"rules"`
	Chains      []planOnwardView      `json:"chains"`
	Clear       string                `json:"clear"` // where payload is
}

type planServiceRuleView struct {
	Who     string              `json:"who"`
	Hosts   []string            `json:"hosts,omitempty"`
	Methods []string            `json:"methods,omitempty"`
	Path    string              `json:"path,omitempty"`
	Headers []planServiceHeader `json:"headers,omitempty"`
	Chain   string              `json:"chain"`
}

type planServiceHeader struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// planOnwardView is a chain that rules name.
type planOnwardView struct {
	Chain  string      `json:"chain"`
	Ports  model.Ports `json:"source_ports"` // of connections by it
	Egress string      `json:"egress"`
	Sees   []string    `json:"functions"` // that see its packets, whose payload is sealed
}

func newPlanServiceViews(node string, g *plan.Gateway, paths []plan.Path) []planServiceView {
	var out []planServiceView
	for _, s := range g.Services {
		v := planServiceView{
			Name: s.Name, Node: node, Address: s.Address, Hosts: s.Hosts, Clients: s.Clients,
			Origin: s.Origin.Address, OriginName: s.Origin.Name, Certificate: s.Certificate,
		}
		for _, c := range g.Clients {
			if c.Name == s.Clients {
				v.Kind, v.Within = c.Kind, c.Within
			}
		}
		for _, r := range s.Rules {
			rv := planServiceRuleView{Who: r.Who, Hosts: r.Hosts, Methods: r.Methods, Path: r.Path, Chain: r.Chain}
			for _, h := range r.Headers {
				rv.Headers = append(rv.Headers, planServiceHeader(h))
			}
			v.Rules = append(v.Rules, rv)
		}
		for _, c := range g.Chains {
			if !slices.ContainsFunc(s.Rules, func(r model.ServiceRule) bool { return r.Chain == c.Chain }) {
				continue
			}
			ov := planOnwardView{Chain: c.Chain, Ports: c.Ports}
			for _, p := range paths {
				if p.Path != c.Forward {
					continue
				}
				last := len(p.Hops) - 1
				for _, h := range p.Hops[1:last] {
					ov.Sees = append(ov.Sees, h.Function+" on "+h.Node)
				}
				ov.Egress = p.Hops[last].Node
			}
			v.Chains = append(v.Chains, ov)
		}
		v.Clear = fmt.Sprintf("payload of %s is in clear inside the gateway on %s and inside the server that shows a certificate of %s at %s; on the way between, also in the functions of its chains, it is sealed by TLS",
			s.Name, node, s.Origin.Name, s.Origin.Address)
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
		fmt.Fprintf(b, "\nservice %s: %s at %s, gateway on %s\n", v.Name, strings.Join(v.Hosts, ", "), v.Address, v.Node)
		fmt.Fprintf(b, "  clients are %s: their certificates have one name of kind %s, within %s\n", v.Clients, v.Kind, v.Within)
		t := planTable{head: []string{">RULE", "WHO", "HOSTS", "METHODS", "PATH", "HEADERS", "CHAIN"}}
		for i, r := range v.Rules {
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
		t.add("", "else", "", "", "", "", "refused")
		t.write(b, "  ")
		t = planTable{head: []string{"CHAIN", ">SOURCE PORTS", "SEALED THROUGH", "TO"}}
		for _, c := range v.Chains {
			t.add(c.Chain, c.Ports, strings.Join(c.Sees, ", "), c.Egress)
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
