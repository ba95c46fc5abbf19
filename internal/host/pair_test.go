package host

import (
	"errors"
	"io/fs"
	"net/netip"
	"testing"
)

// Two pairs whose ends have the same names and indices, in namespaces of the same
// making, are told apart.
func TestEndsOfAPairAreTold(t *testing.T) {
	t.Parallel()
	a, b := pair(t, 0)
	c, d := pair(t, 0)
	la, err := a.Link("a-b")
	must(t, err)
	lc, err := c.Link("a-b")
	must(t, err)
	if la.Index != lc.Index {
		t.Fatalf("indices %d and %d: the test shows nothing", la.Index, lc.Index)
	}
	must(t, a.AddVeth(Veth{Name: "x", PeerName: "y"}))
	for _, c := range []struct {
		name  string
		from  *Net
		link  string
		to    *Net
		other string
		want  bool
	}{
		{"both ends", a, "a-b", b, "b-a", true},
		{"seen from the other", b, "b-a", a, "a-b", true},
		{"of another pair", a, "a-b", d, "b-a", false},
		{"and the reverse", c, "a-b", b, "b-a", false},
		{"in one namespace", a, "x", a, "y", true},
		{"itself", a, "x", a, "x", false},
		{"not there", a, "nothing", b, "b-a", false},
		{"nor there", a, "a-b", b, "nothing", false},
		{"no pair", a, "lo", b, "lo", false},
	} {
		got, err := c.from.ArePeers(c.link, c.to, c.other)
		if err != nil || got != c.want {
			t.Errorf("%s: got %t, %v; want %t", c.name, got, err, c.want)
		}
	}
}

func TestWhatWasSetIsFoundAndNothingElse(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	mac, peer := [6]byte{2, 0, 0, 0, 0, 1}, [6]byte{2, 0, 0, 0, 0, 2}
	must(t, n.AddVeth(Veth{Name: "a", PeerName: "b", MAC: mac, PeerMAC: peer}))
	for name, want := range map[string][6]byte{"a": mac, "b": peer} {
		got, err := n.HardwareAddress(name)
		if must(t, err); got != want {
			t.Errorf("%s has MAC address %x, want %x", name, got, want)
		}
	}
	via := netip.MustParseAddr("fe80::1")
	address := netip.MustParsePrefix("fe80::2/64")
	routes := []Route{
		{Destination: netip.MustParsePrefix("::/0"), Via: via, Device: "a", Protocol: ProtocolWaystamp, Metric: 1},
		{Destination: netip.MustParsePrefix("0.0.0.0/0"), Via: via, Device: "a", Protocol: ProtocolWaystamp},
		{Destination: netip.MustParsePrefix("2001:db8::/64"), Device: "a", Metric: 5},
	}
	check := func(when string, want bool) {
		t.Helper()
		expect := func(what string, got bool, err error) {
			t.Helper()
			if err != nil || got != want {
				t.Errorf("%s: %s: got %t, %v; want %t", when, what, got, err, want)
			}
		}
		has, err := n.HasAddress("a", address)
		expect("address", has, err)
		has, err = n.IsUp("a")
		expect("up", has, err)
		has, err = n.HasNeighbour("a", via, peer)
		expect("neighbour", has, err)
		for _, r := range routes {
			has, err = n.HasRoute(r)
			expect("route to "+r.Destination.String(), has, err)
		}
		has, err = n.RoutesLeaveBy("a", true)
		expect("routes of IPv4", has, err)
		has, err = n.RoutesLeaveBy("a", false)
		expect("routes of IPv6", has, err)
		has, err = n.HasSysctl("net/ipv4/conf/a/forwarding", "1")
		expect("setting", has, err)
	}
	check("before", false)
	must(t, n.SetUp("b"))
	must(t, n.AddAddress("a", address))
	must(t, n.SetUp("a"))
	must(t, n.AddNeighbour("a", via, peer))
	must(t, n.SetSysctl("net/ipv4/conf/a/forwarding", "1"))
	for _, r := range routes {
		must(t, n.AddRoute(r))
	}
	check("after", true)

	for name, r := range map[string]Route{
		"metric":  {Destination: netip.MustParsePrefix("::/0"), Via: via, Device: "a", Protocol: ProtocolWaystamp, Metric: 2},
		"device":  {Destination: netip.MustParsePrefix("::/0"), Via: via, Device: "b", Protocol: ProtocolWaystamp, Metric: 1},
		"gateway": {Destination: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("fe80::3"), Device: "a", Protocol: ProtocolWaystamp},
		"owner":   {Destination: netip.MustParsePrefix("0.0.0.0/0"), Via: via, Device: "a"},
		"table":   {Destination: netip.MustParsePrefix("::/0"), Via: via, Device: "a", Protocol: ProtocolWaystamp, Metric: 1, Table: 7},
		"type":    {Destination: netip.MustParsePrefix("::/0"), Type: RouteProhibit, Protocol: ProtocolWaystamp, Metric: 1},
	} {
		if has, err := n.HasRoute(r); err != nil || has {
			t.Errorf("a route with another %s: got %t, %v; want that it is not there", name, has, err)
		}
	}
	if has, err := n.HasNeighbour("a", via, mac); err != nil || has {
		t.Errorf("a neighbour by another MAC address: got %t, %v", has, err)
	}
	ns, err := OpenPath("/proc/thread-self/ns/net")
	must(t, err)
	must(t, ns.Close())
	if _, err := OpenPath("/proc/self/ns/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want %v", err, fs.ErrNotExist)
	}
}
