package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// below is a network whose interfaces belong to others.
type below struct {
	sysctls
	links []host.Link
	on    string // the one feature that is on
	err   error
}

func (b below) find(f func(host.Link) bool) (host.Link, error) {
	if b.err != nil {
		return host.Link{}, b.err
	}
	if i := slices.IndexFunc(b.links, f); i >= 0 {
		return b.links[i], nil
	}
	return host.Link{}, host.ErrNoLink
}
func (b below) Link(n string) (host.Link, error) {
	return b.find(func(l host.Link) bool { return l.Name == n })
}
func (b below) LinkAt(i int) (host.Link, error) {
	return b.find(func(l host.Link) bool { return l.Index == i })
}
func (b below) FeatureOn(_, f string) (bool, error) { return f == b.on, nil }

func TestInterfacesThatBelongToOthers(t *testing.T) {
	n := plan.Node{Interfaces: []model.Interface{{Name: "core", Role: model.RoleCore}}}
	vrf := host.Link{Name: "red", Index: 9, Kind: "vrf"}
	for name, c := range map[string]struct {
		net  below
		want string
	}{
		"none":          {below{links: []host.Link{{Name: "core", Index: 1}}}, ""},
		"a VRF":         {below{links: []host.Link{{Name: "core", Index: 1, Master: 9}, vrf}}, "interface core is in the VRF red, so that routes of the node's main table do not count for its packets, and verified packets are refused: ip link set core nomaster"},
		"a bond":        {below{links: []host.Link{{Name: "core", Index: 1, Master: 9}, {Name: "bond0", Index: 9, Kind: "bond"}}}, "interface core belongs to bond0, of kind bond, so that routes lead to bond0"},
		"one elsewhere": {below{links: []host.Link{{Name: "core", Index: 1, Master: 9}}}, "find out to what interface core belongs: there is no such interface"},
		"LRO":           {below{links: []host.Link{{Name: "core", Index: 1}}, on: "rx-lro"}, "interface core merges packets (LRO), so that the kernel drops merged packets that it should forward: ethtool -K core lro off"},
		"an error":      {below{err: errors.New("netlink is gone")}, "netlink is gone"},
		"not there":     {below{}, ""},
	} {
		got := strings.Join(Wrong(devices(c.net, n)), "\n")
		if (got == "") != (c.want == "") || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// What has no Ethernet frames, and what is down.
func TestInterfacesThatCarryNoChain(t *testing.T) {
	n := plan.Node{
		Interfaces: []model.Interface{{Name: "core", Role: model.RoleCore}},
		Proxies:    []plan.Proxy{{Function: "fw", Proxy: model.Proxy{To: "fw", From: "fw"}}},
	}
	net := below{links: []host.Link{{Name: "core", Index: 1, Frame: "none", Up: true}, {Name: "fw", Index: 2, Frame: "ether"}}}
	got := Wrong(Interfaces(net, n))
	want := []string{
		"core interface core has frames of type none, so that no program is attached to it: choose an Ethernet interface",
		"interface fw to function fw is down, so that no packet can arrive on it or leave by it: ip link set fw up, at both ends",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	net.links[0].Frame, net.links[1].Up = "ether", true
	if got := Wrong(Interfaces(net, n)); len(got) > 0 {
		t.Errorf("mended: %q", got)
	}
}

// A VRF of the kernel: of those in make test-kernels, not of every one that tests run on.
func TestStockVRFIsFound(t *testing.T) {
	m := node(t)
	if err := run(m, "ip", "link", "add", "red", "type", "vrf", "table", "10"); err != nil {
		t.Skip("CONFIG_NET_VRF, for VRFs")
	}
	must(t, run(m, "ip", "link", "set", "core", "master", "red"))
	if s := strings.Join(Wrong(m.node()), "\n"); !strings.Contains(s, "interface core is in the VRF red") {
		t.Errorf("says %q", s)
	}
}

// inFunction is a node with a function behind an interface.
func inFunction(t *testing.T, s model.Segments) (Machine, plan.Node) {
	m := node(t)
	must(t, m.Net.AddVeth(host.Veth{Name: "fw", PeerName: "in"}), m.Net.SetUp("fw"), m.Net.SetUp("in"))
	n := *m.Plan
	n.Proxies = []plan.Proxy{{Function: "fw", Proxy: model.Proxy{To: "fw", From: "fw", Segments: s}}}
	return m, n
}

func TestWhatAFunctionsDeviceCuts(t *testing.T) {
	for _, c := range []struct {
		segments    model.Segments
		whole, told string
	}{
		{model.SegmentsCut, "takes super-packets whole, and the function wants frames (segments: cut)", ""},
		{model.SegmentsKeep, "", "takes no super-packets, and the function wants them whole (segments: keep)"},
	} {
		m, n := inFunction(t, c.segments)
		look := func(what, want string) {
			t.Helper()
			got := strings.Join(Wrong(functionDevices(m.Net, n)), "\n")
			if (got == "") != (want == "") || !strings.Contains(got, want) {
				t.Errorf("%s, %s: %q, want %q", c.segments, what, got, want)
			}
		}
		look("a device that takes super-packets", c.whole)
		must(t, m.Net.CutOnSend("fw"))
		look("one that takes none", c.told)
	}
}

// filtered puts an IPv4 packet of UDP onto the link behind an interface, and tells whether the kernel's
// reverse-path filter dropped it.
func filtered(t *testing.T, m Machine, name, from, to string) bool {
	t.Helper()
	ns := m.Net.NetNS()
	f, err := host.OpenFrames(ns, name+"-peer", unix.ETH_P_IP)
	must(t, err)
	defer f.Close()
	mac, err := m.Net.HardwareAddress(name)
	must(t, err)
	src, dst := netip.MustParseAddr(from).As4(), netip.MustParseAddr(to).As4()
	ip := []byte{0x45, 0, 0, 28, 0, 1, 0, 0, 64, 17, 0, 0}
	ip = append(append(ip, src[:]...), dst[:]...)
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(ip[i])<<8 | uint32(ip[i+1])
	}
	sum = sum&0xffff + sum>>16
	ip[10], ip[11] = byte(^sum>>8), byte(^sum)
	frame := append(append(append([]byte{}, mac[:]...), f.MAC[:]...), 8, 0)
	frame = append(append(frame, ip...), 0x10, 0, 0x10, 0, 0, 8, 0, 0) // ports 4096, no checksum
	// Each frame ends as one of these, and the counters are summed over CPUs.
	counters := func() (dropped, other int) {
		must(t, ns.Do(func() error {
			b, err := os.ReadFile("/proc/thread-self/net/netstat")
			if err != nil {
				return err
			}
			dropped = counter(t, b, "TcpExt:", "IPReversePathFilter")
			b, err = os.ReadFile("/proc/thread-self/net/snmp")
			other = counter(t, b, "Udp:", "NoPorts")
			return err
		}))
		return dropped, other
	}
	dropped, other := counters()
	must(t, f.Send(frame))
	for range 1000 {
		switch d, o := counters(); {
		case d > dropped:
			return true
		case o > other:
			return false
		}
		unix.Poll(nil, 1)
	}
	t.Fatalf("a packet from %s to %s at %s is neither filtered nor received", from, to, name)
	return false
}

// counter reads a file of net/snmp's form: a line of names, and one of numbers.
func counter(t *testing.T, file []byte, group, name string) int {
	t.Helper()
	var names []string
	for line := range bytes.Lines(file) {
		f := strings.Fields(string(line))
		if f[0] != group {
			continue
		}
		if names == nil {
			names = f
			continue
		}
		n, err := strconv.Atoi(f[slices.Index(names, name)])
		must(t, err)
		return n
	}
	t.Fatalf("there is no %s %s", group, name)
	return 0
}

// What the doctor says of the reverse-path filter is what the kernel does to a packet.
func TestReversePathFilterIsAsTheKernelsOwn(t *testing.T) {
	m := node(t)
	must(t, run(m, "ip", "address", "add", "198.51.100.1/32", "dev", "lo"))
	n := plan.Node{
		Interfaces: m.Plan.Interfaces[:2], // one of the core
		Proxies:    []plan.Proxy{{Function: "nat", Proxy: model.Proxy{Local: true}, Matches: []model.Match{{Source: netip.MustParsePrefix("192.0.2.0/24"), Destination: netip.MustParsePrefix("198.51.100.0/24")}}}},
	}
	for _, all := range []string{"0", "1", "2"} {
		for _, address := range []bool{false, true} {
			for _, route := range []string{"", "core", "edge"} {
				name := fmt.Sprintf("rp_filter %s, route by %q, an address on core: %t", all, route, address)
				must(t, m.Net.SetSysctl("net/ipv4/conf/all/rp_filter", all), m.Net.SetSysctl("net/ipv4/conf/core/rp_filter", "0"))
				if address {
					must(t, run(m, "ip", "address", "add", "203.0.113.1/30", "dev", "core"))
				}
				if route != "" {
					must(t, run(m, "ip", "route", "add", "192.0.2.0/24", "dev", route))
				}
				drops := filtered(t, m, "core", "192.0.2.1", "198.51.100.1")
				found := reversePath(m.Net, n)
				if len(found) != 1 || found[0].Verdict != map[bool]Verdict{true: No, false: Yes}[drops] {
					t.Errorf("%s: the kernel drops: %t, and it says %+v", name, drops, found)
				}
				if s := Wrong(found); drops && !strings.Contains(s[0], "sysctl -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.core.rp_filter=0") {
					t.Errorf("%s: %q", name, s)
				}
				if route != "" {
					must(t, run(m, "ip", "route", "del", "192.0.2.0/24", "dev", route))
				}
				if address {
					must(t, run(m, "ip", "address", "del", "203.0.113.1/30", "dev", "core"))
				}
			}
		}
	}
	// At an egress it matters to the node's own addresses alone.
	n.Proxies, n.Egresses = nil, []plan.Egress{{Match: model.Match{Source: netip.MustParsePrefix("192.0.2.0/24"), Destination: netip.MustParsePrefix("198.51.100.0/24")}}}
	must(t, m.Net.SetSysctl("net/ipv4/conf/all/rp_filter", "1"))
	if s := Wrong(reversePath(m.Net, n)); len(s) != 1 {
		t.Errorf("of an egress with an address of the chain: %q", s)
	}
	n.Egresses[0].Match.Source = netip.Prefix{}
	if f := reversePath(m.Net, n); len(f) != 1 || f[0].Verdict != Unknown {
		t.Errorf("with senders everywhere: %+v", f)
	}
	n.Egresses[0].Match.Destination = netip.MustParsePrefix("203.0.113.0/24")
	if f := reversePath(m.Net, n); len(f) != 0 {
		t.Errorf("of an egress without one: %+v", f)
	}
}

// A NIC and its machine as the kernel shows them.
func TestNICsAreHeldAgainstTheCPUs(t *testing.T) {
	file := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s + "\n")} }
	machine := func(more map[string]string) (sys, proc fstest.MapFS) {
		sys = fstest.MapFS{
			"devices/system/cpu/online":              file("0-3"),
			"devices/system/node/node0/cpulist":      file("0-1"),
			"devices/system/node/node1/cpulist":      file("2-3"),
			"class/net/eth0/device/numa_node":        file("1"),
			"class/net/eth0/device/msi_irqs/40":      file("msix"),
			"class/net/eth0/device/msi_irqs/41":      file("msix"),
			"class/net/eth0/queues/rx-0/rps_cpus":    file("0"),
			"class/net/eth0/queues/rx-1/rps_cpus":    file("0"),
			"class/net/eth0/queues/rx-2/rps_cpus":    file("0"),
			"class/net/eth0/queues/rx-3/rps_cpus":    file("0"),
			"class/net/veth0/queues/rx-0/rps_cpus":   file("0"),
			"class/net/single/device/numa_node":      file("-1"),
			"class/net/single/queues/rx-0/rps_cpus":  file("00000000,00000000"),
			"class/net/steered/device/vendor":        file("0x1af4"),
			"class/net/steered/queues/rx-0/rps_cpus": file("f"),
		}
		proc = fstest.MapFS{"irq/40/effective_affinity_list": file("2"), "irq/41/effective_affinity_list": file("3")}
		for name, text := range more {
			if strings.HasPrefix(name, "irq/") {
				proc[name] = file(text)
			} else {
				sys[name] = file(text)
			}
		}
		return sys, proc
	}
	for name, c := range map[string]struct {
		device string
		more   map[string]string
		checks int
		want   string
	}{
		"as it should be":  {"eth0", nil, 2, ""},
		"no hardware":      {"veth0", nil, 0, ""},
		"not there":        {"eth7", nil, 0, ""},
		"fewer queues":     {"single", nil, 1, "interface single has 1 receive queues for 4 CPUs, so that at most 1 of the CPUs process what arrives on it: ethtool -L single combined 4"},
		"packets steered":  {"steered", nil, 1, ""},
		"far away":         {"eth0", map[string]string{"irq/41/effective_affinity_list": "0"}, 2, "1 of 2 interrupts of interface eth0, which is at NUMA node 1, go to CPUs of another node, so that packets and the programs' maps cross between memories of two nodes: give the interrupts to CPUs 2-3"},
		"CPUs of whatever": {"eth0", map[string]string{"devices/system/cpu/online": "many"}, 1, `"many\n" is no list of CPUs`},
	} {
		sys, proc := machine(c.more)
		found := nic(sys, proc, c.device)
		got := strings.Join(Wrong(found), "\n")
		if len(found) != c.checks || (got == "") != (c.want == "") || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %d checks, %q; want %d, %q", name, len(found), got, c.checks, c.want)
		}
	}
	for text, want := range map[string]string{"0": "0", "0-3,8,10-11": "0-3,8,10-11", "": ""} {
		if list, err := cpuList(text); err != nil || listOf(list) != want {
			t.Errorf("%q: %v, %v", text, list, err)
		}
	}
	for _, text := range []string{"3-1", "x", "0-9999999999"} {
		if list, err := cpuList(text); err == nil {
			t.Errorf("%q: %v", text, list)
		}
	}
}

// driver is what one says of itself.
type driver struct {
	l   host.Link
	f   host.XDPFeatures
	err error
}

func (d driver) Link(string) (host.Link, error)               { return d.l, nil }
func (d driver) XDPFeatures(string) (host.XDPFeatures, error) { return d.f, d.err }

func TestDriversLimitAtXDP(t *testing.T) {
	old := errors.New("the kernel has no family netdev")
	xdp := host.XDPFeatures{Native: true, Redirects: true}
	buffers := host.XDPFeatures{Native: true, Buffers: true, Redirects: true}
	for name, c := range map[string]struct {
		d      driver
		checks string
		want   string
	}{
		"short":              {driver{host.Link{MTU: 1500}, xdp, nil}, "xdp yes, xdp-mtu yes, xdp-redirect yes", ""},
		"long":               {driver{host.Link{MTU: 9000}, xdp, nil}, "xdp yes, xdp-mtu no, xdp-redirect yes", "interface eth0 has an MTU of 9000, and 3498 is the longest"},
		"long, in buffers":   {driver{host.Link{MTU: 9000}, buffers, nil}, "xdp yes, xdp-mtu yes, xdp-redirect yes", ""},
		"no XDP":             {driver{host.Link{MTU: 1500}, host.XDPFeatures{}, nil}, "xdp no", "the driver of interface eth0 has no XDP, so that TC handles all packets"},
		"no redirects":       {driver{host.Link{MTU: 1500}, host.XDPFeatures{Native: true}, nil}, "xdp yes, xdp-mtu yes, xdp-redirect no", "interface eth0 does not accept frames that XDP redirects to it, so that TC handles packets that leave by it: choose a NIC"},
		"an old kernel":      {driver{host.Link{MTU: 1500}, host.XDPFeatures{}, old}, "xdp unknown, xdp-mtu yes", ""},
		"the same, and long": {driver{host.Link{MTU: 9000}, host.XDPFeatures{}, old}, "xdp unknown, xdp-mtu no", ""},
	} {
		var checks []string
		found := nativeXDP(c.d, "eth0")
		for _, f := range found {
			checks = append(checks, f.Check+" "+string(f.Verdict))
		}
		if got := strings.Join(checks, ", "); got != c.checks || !strings.Contains(strings.Join(Wrong(found), "\n"), c.want) {
			t.Errorf("%s: %s, %q", name, got, Wrong(found))
		}
	}
}

// The kernel's own drivers: veth has XDP, a bridge has none.
func TestDriversAreAsked(t *testing.T) {
	m := node(t)
	must(t, m.Net.AddBridge("nic"), m.Net.SetMTU("edge", 9000))
	if _, err := m.Net.XDPFeatures("edge"); err != nil {
		t.Skip("Linux 6.3, for what drivers say of XDP")
	}
	if got := wrong(nativeXDP(m.Net, "edge")); !slices.Equal(got, []string{"xdp-redirect no"}) {
		t.Errorf("veth: %q", got)
	}
	must(t, m.Net.SetOffload("edge-peer", host.GRO, true))
	if got := wrong(nativeXDP(m.Net, "edge")); len(got) > 0 {
		t.Errorf("veth whose peer has GRO: %q", got)
	}
	if got := wrong(nativeXDP(m.Net, "nic")); !slices.Equal(got, []string{"xdp no"}) {
		t.Errorf("bridge: %q", got)
	}
}

// What XDP would lose: checksums that the other end of a veth pair leaves to it.
func TestChecksumsOfThePeerAreAsked(t *testing.T) {
	m := node(t)
	says := func() string { return strings.Join(Wrong(checksums(m.Net, "edge")), "\n") }
	if s, want := says(), "interface edge has datapath xdp, and its other end, edge-peer, leaves checksums to it, so that packets of senders there arrive with wrong checksums: ethtool -K edge-peer tx off"; !strings.HasPrefix(s, want) {
		t.Errorf("says %q, want %q", s, want)
	}
	must(t, m.Net.SetOffload("edge-peer", host.TransmitSum, false))
	if s := says(); s != "" {
		t.Errorf("mended: %q", s)
	}
	far, err := host.Anonymous()
	must(t, err)
	defer far.Close()
	must(t, m.Net.AddVeth(host.Veth{Name: "away", PeerName: "x", Peer: far}), m.Net.AddBridge("nic"))
	if f := checksums(m.Net, "away"); len(f) != 1 || f[0].Verdict != Unknown || !strings.Contains(f[0].Says, "the other end of interface away is in another namespace") {
		t.Errorf("of one elsewhere: %+v", f)
	}
	if f := checksums(m.Net, "nic"); len(f) != 0 {
		t.Errorf("of a device that is no veth: %+v", f)
	}
}
