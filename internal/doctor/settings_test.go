package doctor

import (
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
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

func (s sysctls) Link(string) (host.Link, error)         { return host.Link{}, host.ErrNoLink }
func (s sysctls) LinkAt(int) (host.Link, error)          { return host.Link{}, host.ErrNoLink }
func (s sysctls) HasIPv4(string) (bool, error)           { return false, nil }
func (s sysctls) FeatureOn(string, string) (bool, error) { return false, nil }

func (s sysctls) Sysctl(key string) (string, error) {
	if v, ok := s[key]; ok {
		return v, nil
	}
	return "", fs.ErrNotExist
}

func (s sysctls) Addresses() (own []netip.Addr, err error) {
	for a := range strings.FieldsSeq(s["addresses"]) {
		own = append(own, netip.MustParseAddr(a))
	}
	return own, nil
}

// A gateway in mode own or connect is at an address of its node.
func TestAGatewaysOwnAddressIsTheNodes(t *testing.T) {
	at := func(a string, m model.GatewayMode) model.Service {
		return model.Service{Name: "shop", Address: netip.MustParseAddrPort(a), Mode: m}
	}
	for name, c := range map[string]struct {
		service model.Service
		wrong   string
	}{
		"it has it":           {at("[2001:db8::1]:443", model.ModeOwn), ""},
		"it has it, in IPv4":  {at("192.0.2.1:3128", model.ModeConnect), ""},
		"it has it not":       {at("[2001:db8::2]:443", model.ModeOwn), "no interface has 2001:db8::2, the address of service shop (mode: own)"},
		"the address is away": {at("192.0.2.2:3128", model.ModeConnect), "ip address add 192.0.2.2/32"},
		"the service's own":   {at("[2001:db8::2]:443", model.ModeTransparent), ""},
	} {
		n := plan.Node{Proxies: []plan.Proxy{{Function: model.GatewayName, Gateway: &plan.Gateway{Services: []model.Service{c.service}}}}}
		got := strings.Join(Wrong(ownAddresses(sysctls{"addresses": "2001:db8::1 192.0.2.1"}, n)), "\n")
		if (got == "") != (c.wrong == "") || !strings.Contains(got, c.wrong) {
			t.Errorf("%s: %q; want %q", name, got, c.wrong)
		}
	}
}

func (s sysctls) NextHops(to netip.Addr) (hops []host.Neighbour, err error) {
	if s[to.String()] == "" {
		return nil, host.ErrNoWay
	}
	for by := range strings.FieldsSeq(s[to.String()]) {
		hops = append(hops, host.Neighbour{Device: "core", Address: netip.MustParseAddr(by)})
	}
	return hops, nil
}

// Where several routes lead to a node, the kernel must choose by what the entropy label is put into.
func TestEqualRoutesAreChosenByTheEntropyLabel(t *testing.T) {
	const policy4, policy6 = "net/ipv4/fib_multipath_hash_policy", "net/ipv6/fib_multipath_hash_policy"
	n := plan.Node{Name: "r1", MPLS: &plan.MPLS{Nodes: []plan.MPLSNode{
		{Name: "r1", Label: 16001, Address: netip.MustParseAddr("192.0.2.1")},
		{Name: "r2", Label: 16002, Address: netip.MustParseAddr("192.0.2.2")},
		{Name: "r3", Label: 16003, Address: netip.MustParseAddr("2001:db8::3")},
		{Name: "r4", Label: 16004, Address: netip.MustParseAddr("2001:db8::4")},
	}}}
	one := sysctls{"192.0.2.1": "198.51.100.1 198.51.100.2", "192.0.2.2": "198.51.100.1", "2001:db8::3": "fe80::1"}
	four := sysctls{"192.0.2.2": "198.51.100.1 198.51.100.2"}
	six := sysctls{"2001:db8::3": "fe80::1 fe80::2"}
	with := func(s sysctls, more ...string) sysctls {
		s = maps.Clone(s)
		for i := 0; i < len(more); i += 2 {
			s[more[i]] = more[i+1]
		}
		return s
	}
	for name, c := range map[string]struct {
		s    sysctls
		says string // ""; "yes"; or a part of what is wrong
	}{
		"one route":                {with(one, policy4, "0", policy6, "1"), ""},
		"IPv4, by addresses":       {with(four, policy4, "0"), "equal routes lead to 192.0.2.2, the address of label 16002 (r2)"},
		"IPv4, by ports":           {with(four, policy4, "1"), "yes"},
		"IPv4, by fields":          {with(four, policy4, "3", "net/ipv4/fib_multipath_hash_fields", "0x37"), "yes"},
		"IPv4, by other fields":    {with(four, policy4, "3", "net/ipv4/fib_multipath_hash_fields", "0x0007"), "sysctl -w net.ipv4.fib_multipath_hash_policy=1"},
		"IPv4, fields of whatever": {with(four, policy4, "3", "net/ipv4/fib_multipath_hash_fields", "many"), "many"},
		"IPv4, no such setting":    {four, ""},
		"IPv6, by flow label":      {with(six, policy6, "0"), "yes"},
		"IPv6, by ports":           {with(six, policy6, "1"), "sysctl -w net.ipv6.fib_multipath_hash_policy=0"},
		"IPv6, by fields":          {with(six, policy6, "3", "net/ipv6/fib_multipath_hash_fields", "8"), "yes"},
	} {
		all := equalRoutes(c.s, n)
		wrong := strings.Join(Wrong(all), "\n")
		if ok := wrong == "" && c.says == map[bool]string{true: "yes"}[len(all) == 1]; !ok && (wrong == "" || c.says == "" || !strings.Contains(wrong, c.says)) {
			t.Errorf("%s: %d findings, wrong: %q; want %q", name, len(all), wrong, c.says)
		}
	}
	if all := equalRoutes(with(four, policy4, "0"), plan.Node{Name: "r1"}); len(all) != 0 {
		t.Errorf("of a domain without labels: %v", all)
	}
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

// The interfaces of a function that has read what is sealed are left without IPv6.
func TestAFunctionsInterfacesNeedIPv6(t *testing.T) {
	n := plan.Node{
		Proxies: []plan.Proxy{{Function: "dpi", Proxy: model.Proxy{To: "dpi-to", From: "dpi-from"}}},
	}
	s := sysctls{"net/ipv6/conf/dpi-to/disable_ipv6": "1", "net/ipv6/conf/dpi-from/disable_ipv6": "0"}
	if got := strings.Join(Wrong(ipv6(s, n)), "\n"); !strings.Contains(got, "switched off on interface dpi-to") || !strings.Contains(got, "sysctl -w net.ipv6.conf.dpi-to.disable_ipv6=0") || strings.Contains(got, "dpi-from") {
		t.Errorf("of a function of kind unaware:\n%s", got)
	}
	n.Proxies[0].Stream = &plan.Stream{}
	if got := Wrong(ipv6(s, n)); len(got) != 0 {
		t.Errorf("of a function that reads what is sealed: %q", got)
	}
}

// What the doctor says of the kernel's own SRv6 is what the kernel does to a packet whose segment list has this node's address.
func TestSegmentRoutingIsAsTheKernelsOwn(t *testing.T) {
	m := node(t)
	must(t, m.Net.WaitUp(t.Context(), "edge", "edge-peer"))
	must(t, m.Net.SetSysctl("net/ipv6/conf/all/forwarding", "1"))
	f, err := host.OpenFrames(m.Net.NetNS(), "edge-peer", unix.ETH_P_IPV6)
	must(t, err)
	defer f.Close()
	mac, err := m.Net.HardwareAddress("edge")
	must(t, err)
	own, src, next := netip.MustParseAddr("fc00:1::1").As16(), netip.MustParseAddr("fc00:9::1").As16(), netip.MustParseAddr("fc00:0:0:200::1").As16()
	send := func(header byte, payload []byte) {
		frame := slices.Concat(mac[:], f.MAC[:], []byte{0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(payload)), header, 64}, src[:], own[:], payload)
		must(t, f.Send(frame))
	}
	// RFC 8754 2: no next header, 4 times 8 bytes more, type 4, one segment left, the last entry is 1.
	srh := slices.Concat([]byte{59, 4, 4, 1, 1, 0, 0, 0}, next[:], own[:])
	counters := func() (forwarded, unknown int) {
		must(t, m.Net.NetNS().Do(func() error {
			b, err := os.ReadFile("/proc/thread-self/net/snmp6")
			for line := range strings.Lines(string(b)) {
				switch f := strings.Fields(line); f[0] {
				case "Ip6OutForwDatagrams":
					forwarded, err = strconv.Atoi(f[1])
				case "Ip6InUnknownProtos":
					unknown, err = strconv.Atoi(f[1])
				}
			}
			return err
		}))
		return forwarded, unknown
	}
	for _, all := range []string{"0", "1"} {
		for _, of := range []string{"0", "1"} {
			must(t, m.Net.SetSysctl("net/ipv6/conf/all/seg6_enabled", all), m.Net.SetSysctl("net/ipv6/conf/edge/seg6_enabled", of))
			before, seen := counters()
			send(43, srh)
			send(253, []byte("the one behind it, of a protocol that nobody has (RFC 3692)"))
			after, now := counters()
			for limit := time.Now().Add(await.Limit(5 * time.Second)); now == seen && time.Now().Before(limit); after, now = counters() {
				unix.Poll(nil, 1)
			}
			if now == seen {
				t.Fatal("the packets do not arrive")
			}
			var says Finding
			for _, f := range seg6(m.Net, *m.Plan) {
				if f.About == "edge" {
					says = f
				}
			}
			if want := map[bool]Verdict{true: No, false: Yes}[after > before]; says.Verdict != want {
				t.Errorf("all %s, edge %s: the kernel forwards: %t, and it says %+v", all, of, after > before, says)
			}
		}
	}
}
