package doctor

import (
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

func TestForwardsWhatPacketsComeInBy(t *testing.T) {
	n := plan.Node{
		Interfaces: []model.Interface{{Name: "b"}, {Name: "a"}},
		Proxies: []plan.Proxy{
			{Function: "x", Proxy: model.Proxy{To: "to", From: "from"}}, {Function: "y", Proxy: model.Proxy{Local: true}},
			{Function: "z", Proxy: model.Proxy{To: "a", From: "a"}},
		},
	}
	if got := forwards(n); !slices.Equal(got, []string{"a", "b", "from"}) {
		t.Errorf("got %q", got)
	}
	if got := sysctlName("ipv4", "eth0.7", "forwarding"); got != "net.ipv4.conf.eth0/7.forwarding" {
		t.Errorf("got %q", got)
	}
}

type sysctls map[string]string

func (s sysctls) Link(string) (host.Link, error) { return host.Link{}, host.ErrNoLink }
func (s sysctls) Sysctl(key string) (string, error) {
	if v, ok := s[key]; ok {
		return v, nil
	}
	return "", fs.ErrNotExist
}

// A core that routes labels by IPv4 needs its forwarding, and no IPv6.
func TestLabelsNeedTheIPOfTheirRoutes(t *testing.T) {
	labels := model.Encapsulation{Type: model.EncapsulationSRMPLS}
	n := plan.Node{
		Interfaces: []model.Interface{{Name: "core", Role: model.RoleCore}},
		Endpoints:  []plan.Endpoint{{PathID: plan.PathID{Encapsulation: labels}}},
		MPLS:       &plan.MPLS{Nodes: []plan.MPLSNode{{Name: "r1", Address: netip.MustParseAddr("192.0.2.1")}}},
	}
	s := sysctls{
		"net/ipv6/conf/core/forwarding": "1", "net/ipv4/conf/core/forwarding": "0",
		"net/ipv6/conf/core/disable_ipv6": "1", "net/ipv6/conf/core/seg6_enabled": "0",
	}
	wrong := func() string { return strings.Join(Wrong(Settings(s, n)), "\n") }
	if got := wrong(); !strings.Contains(got, "does not forward IPv4") || strings.Contains(got, "IPv6 is switched off") {
		t.Errorf("of a node over labels:\n%s", got)
	}
	n.Egresses = []plan.Egress{{Segments: []netip.Addr{netip.MustParseAddr("fc00:0:0:600::")}}}
	if got := wrong(); !strings.Contains(got, "IPv6 is switched off") {
		t.Errorf("with a path over SRv6:\n%s", got)
	}
	n.MPLS.Nodes[0].Address = netip.MustParseAddr("2001:db8::1")
	if got := wrong(); strings.Contains(got, "does not forward IPv4") {
		t.Errorf("whose labels take routes of IPv6:\n%s", got)
	}
}
