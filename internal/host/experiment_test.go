package host

import (
	"net/netip"
	"strings"
	"testing"
)

// say is what a tool of iproute2 says of a namespace.
func say(t *testing.T, n *Net, args ...string) string {
	t.Helper()
	b, err := Command(t.Context(), n.NetNS(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, b)
	}
	return string(b)
}

// What the kernel has understood, as iproute2 reads it.
func TestTheKernelsSRv6IsAsAskedFor(t *testing.T) {
	n, _ := pair(t, 0)
	sids := []netip.Addr{netip.MustParseAddr("fc00:0:0:200::"), netip.MustParseAddr("fc00:0:0:300::")}
	at := func(s string) netip.Prefix { return netip.MustParsePrefix(s) }
	must(t, n.AddRoute(Route{Destination: at("fc00:0:0:1::/64"), Type: RouteEnd, Device: "a-b"}))
	must(t, n.AddRoute(Route{Destination: at("fc00:0:0:2::/64"), Type: RouteEnd, Device: "a-b", Compressed: true}))
	must(t, n.AddRoute(Route{Destination: at("fc00:8::/64"), Type: RouteEncap, Device: "a-b", Segments: sids}))
	must(t, n.AddRoute(Route{Destination: at("fc00:9::/64"), Type: RouteEncap, Device: "a-b", Segments: sids, Reduced: true}))
	must(t, n.AddKernelEgress(at("fc00:0:0:3::/64"), "a-b", 0))
	must(t, n.AddKernelEgress4(at("fc00:0:0:4::/64"), "a-b", netip.MustParseAddr("192.0.2.1")))
	for prefix, want := range map[string]string{
		"fc00:0:0:1::/64": "seg6local action End dev a-b",
		"fc00:0:0:2::/64": "seg6local action End flavors next-csid lblen 48 nflen 16 dev a-b",
		"fc00:0:0:3::/64": "seg6local action End.DT6 table main dev a-b",
		"fc00:0:0:4::/64": "seg6local action End.DX4 nh4 192.0.2.1 dev a-b",
		"fc00:8::/64":     "seg6 mode encap segs 2 [ fc00:0:0:200:: fc00:0:0:300:: ] dev a-b",
		"fc00:9::/64":     "seg6 mode encap.red segs 2 [ fc00:0:0:200:: fc00:0:0:300:: ] dev a-b",
	} {
		if got := say(t, n, "ip", "-6", "route", "show", prefix); !strings.Contains(got, want) {
			t.Errorf("route to %s: %s; want %s", prefix, got, want)
		}
	}
}

// A speed can be set, changed and taken away, as tc reads it.
func TestSpeedOfALinkIsChanged(t *testing.T) {
	n, _ := pair(t, 0)
	must(t, n.SetRate("a-b", 0))
	for rate, want := range map[uint64]string{1e9: "rate 1Gbit ceil 1Gbit", 5e9: "rate 5Gbit ceil 5Gbit"} {
		must(t, n.SetRate("a-b", rate))
		if got := say(t, n, "tc", "class", "show", "dev", "a-b"); !strings.Contains(got, want) {
			t.Errorf("class of the link: %s; want %s", got, want)
		}
		if got := say(t, n, "tc", "qdisc", "show", "dev", "a-b"); !strings.Contains(got, "qdisc htb 1: root") || !strings.Contains(got, "default 0x1") {
			t.Errorf("discipline of the link: %s", got)
		}
	}
	must(t, n.SetRate("a-b", 0))
	if got := say(t, n, "tc", "qdisc", "show", "dev", "a-b"); strings.Contains(got, "htb") {
		t.Errorf("the limit is still there: %s", got)
	}
}

func TestQueuesOfAVeth(t *testing.T) {
	n := scratch(t)
	must(t, n.AddVeth(Veth{Name: "a", PeerName: "b", Queues: 7}))
	for _, name := range []string{"a", "b"} {
		if got := say(t, n, "ip", "-d", "link", "show", name); !strings.Contains(got, "numtxqueues 7") || !strings.Contains(got, "numrxqueues 7") {
			t.Errorf("%s: %s", name, got)
		}
	}
}
