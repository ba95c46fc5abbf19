package doctor

import (
	"errors"
	"io/fs"
	"net/netip"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// street is a network with interfaces that are in no plan.
type street struct {
	below
	filtered bool
}

func (s street) XDPFeatures(name string) (host.XDPFeatures, error) {
	return host.XDPFeatures{Native: name == "eth0"}, nil
}

func (s street) Links() ([]host.Link, error)     { return s.links, s.err }
func (s street) FiltersForwarded() (bool, error) { return s.filtered, nil }
func (s street) Sysctl(key string) (string, error) {
	if key == "net/ipv6/conf/off/disable_ipv6" {
		return "1", nil
	}
	if v, ok := s.sysctls[key]; ok {
		return v, nil
	}
	if strings.HasSuffix(key, "/disable_ipv6") {
		return "0", nil
	}
	return "", fs.ErrNotExist
}

func TestInterfacesInNoPlanThatForward(t *testing.T) {
	lo := host.Link{Name: "lo", Index: 1, Frame: "loopback", Up: true}
	core := host.Link{Name: "core", Index: 2, Frame: "ether", Up: true}
	mgmt := func(change func(*host.Link)) []host.Link {
		l := host.Link{Name: "mgmt", Index: 3, Frame: "ether", Up: true}
		change(&l)
		return []host.Link{lo, core, l, {Name: "br0", Index: 8, Kind: "bridge"}, {Name: "red", Index: 9, Kind: "vrf", Up: true}}
	}
	plain := mgmt(func(*host.Link) {})
	six, four := sysctls{"net/ipv6/conf/all/forwarding": "1"}, sysctls{"net/ipv6/conf/all/forwarding": "0", "net/ipv4/conf/mgmt/forwarding": "1"}
	const says = "interface mgmt is up and in no plan, and the kernel forwards IPv6 from it"
	for name, c := range map[string]struct {
		net     street
		ipv4    bool
		guarded error // errGuarded: yes
		verdict Verdict
		want    string
	}{
		"IPv6":                {street{below{six, plain, "", nil}, false}, false, nil, No, says + ", so that packets that arrive on it take no chain, and are not refused if they are for a SID: write it into the domain's file as an edge interface of r1"},
		"a filter looks":      {street{below{six, plain, "", nil}, true}, false, nil, Unknown, says + ", unless a rule at hook forward drops it"},
		"IPv4":                {street{below{four, plain, "", nil}, false}, true, nil, No, "interface mgmt is up and in no plan, and the kernel forwards IPv4 from it"},
		"IPv4, of no chain":   {street{below{four, plain, "", nil}, false}, false, nil, Yes, ""},
		"forced":              {street{below{sysctls{"net/ipv6/conf/all/forwarding": "0", "net/ipv6/conf/mgmt/force_forwarding": "1"}, plain, "", nil}, false}, false, nil, No, says},
		"nothing is":          {street{below{sysctls{"net/ipv6/conf/all/forwarding": "0"}, plain, "", nil}, false}, true, nil, Yes, ""},
		"without IPv6":        {street{below{six, mgmt(func(l *host.Link) { l.Name = "off" }), "", nil}, false}, false, nil, Yes, ""},
		"down":                {street{below{six, mgmt(func(l *host.Link) { l.Up = false }), "", nil}, false}, false, nil, Yes, ""},
		"in a bridge":         {street{below{six, mgmt(func(l *host.Link) { l.Master = 8 }), "", nil}, false}, false, nil, Yes, ""},
		"in a VRF":            {street{below{six, mgmt(func(l *host.Link) { l.Master = 9 }), "", nil}, false}, false, nil, No, says},
		"a tunnel":            {street{below{six, mgmt(func(l *host.Link) { l.Frame = "none" }), "", nil}, false}, false, nil, No, says + ", so that packets that arrive on it take no chain, and are not refused if they are for a SID: keep the kernel from forwarding"},
		"nothing arrives":     {street{below{six, mgmt(func(l *host.Link) { l.Kind = "dummy" }), "", nil}, false}, false, nil, Yes, ""},
		"an agent's":          {street{below{six, mgmt(func(l *host.Link) { l.Alias = "waystamp r2" }), "", nil}, false}, false, nil, Yes, ""},
		"of another instance": {street{below{six, plain, "", nil}, false}, false, errGuarded, Yes, ""},
		"without rights":      {street{below{six, plain, "", nil}, false}, false, fs.ErrPermission, Unknown, "interface mgmt, which is in no plan: permission denied"},
		"an error":            {street{below{six, plain, "", errors.New("netlink is gone")}, false}, false, nil, Unknown, "netlink is gone"},
	} {
		n := plan.Node{Name: "r1", Interfaces: []model.Interface{{Name: "core", Role: model.RoleCore}}}
		if c.ipv4 {
			n.Egresses = []plan.Egress{{Match: model.Match{Destination: netip.MustParsePrefix("192.0.2.0/24")}}}
		}
		found := unplanned(c.net, n, func(host.Link) (bool, error) {
			if errors.Is(c.guarded, errGuarded) {
				return true, nil
			}
			return false, c.guarded
		})
		got := strings.Join(Wrong(found), "\n")
		if len(found) != 1 || found[0].Verdict != c.verdict || (got == "") != (c.want == "") || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %+v; want %s, %q", name, found, c.verdict, c.want)
		}
	}
}

var errGuarded = errors.New("guarded")

// The other ends of the node's interfaces are in no plan, and the kernel forwards from them once it forwards at all.
func TestInterfacesInNoPlanAreFound(t *testing.T) {
	m := node(t)
	must(t, m.Net.WaitUp(t.Context(), "edge-peer", "core-peer", "far-peer"))
	if got := wrong(m.unplanned()); len(got) != 0 {
		t.Errorf("without forwarding: %q", got)
	}
	must(t, m.Net.SetSysctl("net/ipv6/conf/all/forwarding", "1"))
	if got := wrong(m.unplanned()); len(got) != 3 {
		t.Errorf("of three: %q", got)
	}
	if got := wrong(m.settings()); len(got) != 0 {
		t.Errorf("the node itself: %q", got)
	}
	detach, err := atTC(m, "core-peer", "ws_core_tc")
	must(t, err)
	if s := strings.Join(Wrong(m.unplanned()), "\n"); strings.Contains(s, "core-peer") || !strings.Contains(s, "edge-peer") {
		t.Errorf("one is another instance's: %s", s)
	}
	must(t, detach(), m.Net.SetDown("far-peer"), m.Net.SetSysctl("net/ipv6/conf/edge-peer/disable_ipv6", "1"))
	if s := Wrong(m.unplanned()); len(s) != 1 || !strings.HasPrefix(s[0], "interface core-peer is up and in no plan, and the kernel forwards IPv6 from it") {
		t.Errorf("of one: %q", s)
	}
	must(t, m.Net.LoadRuleset(t.Context(), "table inet t { chain c { type filter hook forward priority 0; iifname \"core-peer\" drop; }; }"))
	if f := m.unplanned(); len(f) != 1 || f[0].Verdict != Unknown {
		t.Errorf("behind a packet filter: %+v", f)
	}
}

// A device that takes tags off frames, below VLANs that are in no plan.
func TestTagsThatXDPWouldNotSee(t *testing.T) {
	eth0, eth1 := host.Link{Name: "eth0", Index: 2, Kind: "device"}, host.Link{Name: "eth0", Index: 2, Kind: "veth"}
	elsewhere := func(l host.Link) host.Link { l.PeerNamespace = 1; return l }
	vlan := func(name string, parent int) host.Link {
		return host.Link{Name: name, Index: 20, Kind: "vlan", VLAN: host.VLAN{Parent: parent, ID: 7}}
	}
	const parses, says = "rx-vlan-hw-parse", "interface eth0 takes VLAN tags off frames before XDP sees them, and eth0.7 is on top of it, so that XDP takes frames for eth0.7 for those of eth0: ethtool -K eth0 rxvlan off, or datapath: tc"
	for name, c := range map[string]struct {
		datapath model.Datapath
		links    []host.Link
		on       string
		planned  string
		findings int
		want     string
	}{
		"parses":             {model.DatapathAuto, []host.Link{eth0, vlan("eth0.7", 2)}, parses, "", 1, says},
		"parses, as ordered": {model.DatapathXDP, []host.Link{eth0, vlan("eth0.7", 2)}, parses, "", 1, says},
		"leaves tags":        {model.DatapathAuto, []host.Link{eth0, vlan("eth0.7", 2)}, "", "", 1, ""},
		"at TC":              {model.DatapathTC, []host.Link{eth0, vlan("eth0.7", 2)}, parses, "", 0, ""},
		"of the plan":        {model.DatapathAuto, []host.Link{eth0, vlan("eth0.7", 2)}, parses, "eth0.7", 0, ""},
		"another's":          {model.DatapathAuto, []host.Link{eth0, vlan("eth1.7", 3)}, parses, "", 0, ""},
		"not there":          {model.DatapathAuto, nil, parses, "", 0, ""},
		"no hardware":        {model.DatapathAuto, []host.Link{eth1, vlan("eth0.7", 2)}, parses, "", 0, ""},
		"of another place":   {model.DatapathAuto, []host.Link{eth0, elsewhere(vlan("eth0.7", 2))}, parses, "", 0, ""},
	} {
		n := plan.Node{Interfaces: []model.Interface{{Name: "eth0", Role: model.RoleCore, Datapath: c.datapath}}}
		if c.planned != "" {
			n.Interfaces = append(n.Interfaces, model.Interface{Name: c.planned, Role: model.RoleCore, Datapath: model.DatapathTC})
		}
		found := tagsUnderXDP(street{below{sysctls{}, c.links, c.on, nil}, false}, n)
		if got := strings.Join(Wrong(found), "\n"); len(found) != c.findings || got != c.want {
			t.Errorf("%s: %d findings, %q; want %d, %q", name, len(found), got, c.findings, c.want)
		}
	}
}
