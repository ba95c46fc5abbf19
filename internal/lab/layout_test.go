package lab

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
)

func stationOf(t *testing.T, w layout, name string) station {
	t.Helper()
	for _, s := range w.stations {
		if s.name == name {
			return s
		}
	}
	t.Fatalf("there is no %s", name)
	return station{}
}

func TestRoutesTakeTheShortestWayFirstNameFirst(t *testing.T) {
	t.Parallel()
	w, err := layOut(paper())
	must(t, err)
	for _, c := range []struct{ from, to, device, via string }{
		{"r1", "fc00:8::/64", "r1-r2", "fe80::2"}, // r2 before r4
		{"r1", "fc00:6::1/128", "r1-r2", "fe80::2"},
		{"r1", "fc00:0:0:600::/56", "r1-r2", "fe80::2"},
		{"r2", "fc00:8::/64", "r2-r3", "fe80::3"},
		{"r3", "fc00:8::/64", "r3-r6", "fe80::4"},
		{"r6", "fc00:7::/64", "r6-r3", "fe80::3"}, // r3 before r5
		{"r1", "fc00:0:0:400::/64", "r1-r4", "fe80::5"},
		{"r1", "fc00:0:0:500::/64", "r1-r4", "fe80::5"},
		{"r6", "fc00:0:0:500::/64", "r6-r5", "fe80::6"},
		{"r2", "fc00:5::1/128", "r2-r1", "fe80::1"}, // r1 before r3
		{"r4", "fc00:8::/64", "r4-r5", "fe80::6"},
		{"h1", "::/0", "h1-r1", "fc00:7::1"},
	} {
		found := false
		for _, r := range stationOf(t, w, c.from).routes {
			if r.Destination != netip.MustParsePrefix(c.to) {
				continue
			}
			found = true
			if r.Device != c.device || r.Via.String() != c.via || r.Type != host.RouteUnicast {
				t.Errorf("%s to %s: got via %s dev %s, want via %s dev %s", c.from, c.to, r.Via, r.Device, c.via, c.device)
			}
		}
		if !found {
			t.Errorf("%s has no route to %s", c.from, c.to)
		}
	}
	// Everything that forwards reaches everything.
	for _, s := range w.stations {
		if s.role == RoleHost {
			continue
		}
		// 4 nodes (address, locator), 2 routers (address, SID), 2 hosts, less its own
		// address and what is on its own links.
		own := map[string]int{"r1": 3, "r2": 2, "r3": 2, "r6": 3, "r4": 1, "r5": 1}[s.name]
		if got, want := len(s.routes), 4*2+2*2+2-own; got != want {
			t.Errorf("%s has %d routes, want %d", s.name, got, want)
		}
	}
}

// Every way ends at its destination, however the links are written down.
func TestRoutesNeverGoInCircles(t *testing.T) {
	t.Parallel()
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}
	links := map[string][]string{}
	for i, a := range names {
		for j, b := range names {
			if i < j && (i*7+j*3)%4 < 2 {
				links[a], links[b] = append(links[a], b), append(links[b], a)
			}
		}
	}
	for _, to := range names {
		next := nextHops(links, to)
		for _, from := range names {
			at := from
			for steps := 0; at != to; steps++ {
				if at = next[at]; at == "" || steps > len(names) {
					t.Fatalf("from %s to %s: lost", from, to)
				}
			}
		}
	}
}

func TestLayoutSaysWhatCannotBeReached(t *testing.T) {
	t.Parallel()
	d, l := paper()
	l.Links = l.Links[:5] // without r5-r6: still connected
	if _, err := layOut(d, l); err != nil {
		t.Errorf("got %v, want no error", err)
	}
	l.Links = l.Links[:3] // r4 and r5 alone
	if _, err := layOut(d, l); err == nil || !strings.Contains(err.Error(), "cannot reach") {
		if err == nil || !strings.Contains(err.Error(), "no link of the lab ends at it") {
			t.Errorf("got %v, want that r4 cannot be reached", err)
		}
	}
	d, l = paper()
	l.Links = append(l.Links, model.LabLink{A: "r1", B: "r9"})
	if _, err := layOut(d, l); err == nil || !strings.Contains(err.Error(), `"r9"`) {
		t.Errorf("got %v, want that r9 is nothing", err)
	}
}

func TestLayoutIsTheSameEveryTime(t *testing.T) {
	t.Parallel()
	first, err := layOut(paper())
	must(t, err)
	for range 20 {
		again, err := layOut(paper())
		must(t, err)
		if fmt.Sprint(first) != fmt.Sprint(again) {
			t.Fatalf("got %v, then %v", first, again)
		}
	}
}

// A core of IPv4 has routes to the addresses of labels alone, and links without addresses.
func TestACoreOfIPv4LeadsToLabels(t *testing.T) {
	t.Parallel()
	d, l := paper()
	l.Core, l.Routers = model.LabIPv4, nil
	l.Links = l.Links[:0]
	for _, pair := range [][2]string{{"r1", "r2"}, {"r2", "r3"}, {"r3", "r6"}} {
		l.Links = append(l.Links, model.LabLink{A: pair[0], B: pair[1]})
	}
	d.MPLS = &model.MPLS{Services: 100000, MTU: 1500}
	for i := range d.Nodes {
		d.Nodes[i].MPLS = &model.NodeMPLS{Label: 16000 + uint32(i), Address: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})}
	}
	w, err := layOut(d, l)
	must(t, err)
	s := stationOf(t, w, "r1")
	var got []string
	for _, r := range s.routes {
		got = append(got, fmt.Sprintf("%s via %s dev %s src %s", r.Destination, r.Via, r.Device, r.Source))
	}
	want := []string{
		"192.0.2.2/32 via invalid IP dev r1-r2 src 192.0.2.1",
		"192.0.2.3/32 via 192.0.2.2 dev r1-r2 src 192.0.2.1",
		"192.0.2.4/32 via 192.0.2.2 dev r1-r2 src 192.0.2.1",
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("routes of r1:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, i := range s.interfaces {
		if core := i.name == "r1-r2"; i.noIPv6 != core || core && len(i.addresses) > 0 {
			t.Errorf("%s: no IPv6: %t, addresses %v", i.name, i.noIPv6, i.addresses)
		}
	}
	// In a core of IPv6 they are reached beside everything else.
	l.Core = model.LabIPv6
	w, err = layOut(d, l)
	must(t, err)
	found := false
	for _, r := range stationOf(t, w, "r1").routes {
		found = found || r.Destination.String() == "192.0.2.4/32" && r.Device == "r1-r2" && r.Via.String() == "fe80::2"
	}
	if !found {
		t.Error("r1 has no route to the address of r6's label in a core of IPv6")
	}
}
