package host

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
)

var sameNeighbour = cmp.Comparer(func(a, b Neighbour) bool { return a == b })

func TestNextHopsAreThoseOfTheRoute(t *testing.T) {
	a, b := pair(t, 1500)
	addr := netip.MustParseAddr
	must(t, a.SetUp("lo"))
	must(t, a.AddAddress("lo", netip.MustParsePrefix("192.0.2.1/32")))
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("192.0.2.129/30")))
	must(t, b.AddAddress("b-a", netip.MustParsePrefix("192.0.2.130/30")))
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("fd00::1/64")))
	must(t, a.WaitUp(soon(t), "a-b"))
	must(t, a.AddRoute(Route{Destination: netip.MustParsePrefix("192.0.2.2/32"), Via: addr("192.0.2.130"), Device: "a-b"}))
	must(t, a.AddRoute(Route{Destination: netip.MustParsePrefix("fd00:2::/64"), Via: addr("fd00::2"), Device: "a-b"}))
	must(t, a.AddRoute(Route{Destination: netip.MustParsePrefix("198.51.100.0/24"), Via: addr("fd00::2"), Device: "a-b"}))
	must(t, a.AddRoute(Route{Destination: netip.MustParsePrefix("fd00:3::/64"), Type: RouteBlackhole}))
	must(t, a.AddRoute(Route{Destination: netip.MustParsePrefix("fd00:4::/64"), Type: RouteProhibit}))
	for to, want := range map[string][]Neighbour{
		"192.0.2.2":    {{"a-b", addr("192.0.2.130")}},
		"192.0.2.130":  {{"a-b", addr("192.0.2.130")}}, // on the link
		"192.0.2.1":    nil,                            // its own
		"fd00:2::7":    {{"a-b", addr("fd00::2")}},
		"198.51.100.7": {{"a-b", addr("fd00::2")}}, // RFC 8950
	} {
		got, err := a.NextHops(addr(to))
		if diff := cmp.Diff(want, got, sameNeighbour); err != nil || diff != "" {
			t.Errorf("next hops to %s: %v\n%s", to, err, diff)
		}
	}
	for _, to := range []string{"fd00:3::1", "fd00:4::1", "fd00:5::1", "203.0.113.1"} {
		if got, err := a.NextHops(addr(to)); !errors.Is(err, ErrNoWay) {
			t.Errorf("next hops to %s: %v, %v; want ErrNoWay", to, got, err)
		}
	}
}

// Two equal-cost ways, as the kernel's multipath has them.
func TestNextHopsAreAllOfAMultipathRoute(t *testing.T) {
	a, _ := pair(t, 1500)
	must(t, a.AddVeth(Veth{Name: "a-c", PeerName: "c-a", Peer: a.NetNS(), MTU: 1500}))
	must(t, a.SetUp("a-c"))
	must(t, a.SetUp("c-a"))
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("192.0.2.1/30")))
	must(t, a.AddAddress("a-c", netip.MustParsePrefix("192.0.2.5/30")))
	must(t, a.WaitUp(soon(t), "a-b", "a-c"))
	hop := func(device, via string) *netlink.NexthopInfo {
		l, err := a.link(device)
		must(t, err)
		return &netlink.NexthopInfo{LinkIndex: l.Attrs().Index, Gw: netip.MustParseAddr(via).AsSlice()}
	}
	must(t, a.h.RouteAdd(&netlink.Route{
		Dst: ipNet(netip.MustParsePrefix("198.51.100.1/32")), MultiPath: []*netlink.NexthopInfo{hop("a-b", "192.0.2.2"), hop("a-c", "192.0.2.6")},
	}))
	got, err := a.NextHops(netip.MustParseAddr("198.51.100.1"))
	want := []Neighbour{{"a-b", netip.MustParseAddr("192.0.2.2")}, {"a-c", netip.MustParseAddr("192.0.2.6")}}
	if diff := cmp.Diff(want, got, sameNeighbour); err != nil || diff != "" {
		t.Errorf("next hops: %v\n%s", err, diff)
	}
}

// The kernel resolves what it keeps, though nothing is sent there, and stops to keep what is not wanted.
func TestManagedNeighboursAreResolved(t *testing.T) {
	a, b := pair(t, 1500)
	must(t, a.SetUp("lo"))
	must(t, b.SetUp("lo"))
	must(t, a.AddAddress("lo", netip.MustParsePrefix("192.0.2.1/32"))) // no address on the link
	must(t, b.AddAddress("lo", netip.MustParsePrefix("192.0.2.2/32")))
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("fd00::1/64")))
	must(t, b.AddAddress("b-a", netip.MustParsePrefix("fd00::2/64")))
	must(t, a.WaitUp(soon(t), "a-b"))
	must(t, b.WaitUp(soon(t), "b-a"))
	four, six := Neighbour{"a-b", netip.MustParseAddr("192.0.2.2")}, Neighbour{"a-b", netip.MustParseAddr("fd00::2")}
	// Somebody else's stays.
	others, err := a.link("a-b")
	must(t, err)
	must(t, a.h.NeighSet(&netlink.Neigh{LinkIndex: others.Attrs().Index, IP: netip.MustParseAddr("192.0.2.3").AsSlice(), FlagsExt: netlink.NTF_EXT_MANAGED}))

	added, removed, err := a.ManageNeighbours([]Neighbour{four, six})
	if err != nil || added != 2 || removed != 0 {
		t.Fatalf("added %d, removed %d: %v", added, removed, err)
	}
	if added, removed, err := a.ManageNeighbours([]Neighbour{six, four}); err != nil || added+removed != 0 {
		t.Errorf("again: added %d, removed %d: %v", added, removed, err)
	}
	far, err := b.Link("b-a")
	must(t, err)
	resolved := func(w Neighbour) bool {
		list, err := a.h.NeighList(others.Attrs().Index, netlink.FAMILY_ALL)
		must(t, err)
		for _, n := range list {
			if ip, _ := netip.AddrFromSlice(n.IP); ip.Unmap() == w.Address && string(n.HardwareAddr) == string(far.MAC[:]) {
				return true
			}
		}
		return false
	}
	stop := errors.New("resolved")
	if err := a.Watch(soon(t), ChangeNeighbours, func() error {
		if resolved(four) && resolved(six) {
			return stop
		}
		return nil
	}); !errors.Is(err, stop) {
		t.Fatalf("the kernel has not resolved the neighbours: %v", err)
	}

	if added, removed, err := a.ManageNeighbours([]Neighbour{six}); err != nil || added != 0 || removed != 1 {
		t.Errorf("without one: added %d, removed %d: %v", added, removed, err)
	}
	got, err := a.ManagedNeighbours()
	if diff := cmp.Diff([]Neighbour{six}, got, sameNeighbour); err != nil || diff != "" {
		t.Errorf("kept now: %v\n%s", err, diff)
	}
	if _, _, err := a.ManageNeighbours([]Neighbour{{"gone", four.Address}}); !errors.Is(err, ErrNoLink) {
		t.Errorf("on a device that is not there: %v", err)
	}
}

// An entry that somebody has set stays as it is: it is not resolved anew, and not let go later.
func TestNeighboursOfOthersStay(t *testing.T) {
	a, _ := pair(t, 1500)
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("192.0.2.1/30")))
	must(t, a.WaitUp(soon(t), "a-b"))
	set := Neighbour{"a-b", netip.MustParseAddr("192.0.2.2")}
	mac := [6]byte{2, 0, 0, 0, 0, 9}
	must(t, a.AddNeighbour(set.Device, set.Address, mac))
	for _, want := range [][]Neighbour{{set}, nil} {
		added, removed, err := a.ManageNeighbours(want)
		if added != 0 || removed != 0 || err != nil {
			t.Errorf("%v: %d added, %d removed, %v", want, added, removed, err)
		}
		if has, err := a.HasNeighbour(set.Device, set.Address, mac); !has || err != nil {
			t.Errorf("%v: the entry is gone: %v", want, err)
		}
	}
}
