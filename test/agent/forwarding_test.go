package agent_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

// An interface that does not forward is told of with what to do, as soon as it
// stops, and no more once it does.
func TestInterfaceThatDoesNotForwardIsToldOf(t *testing.T) {
	b := newBed(t)
	set := func(key, value string) {
		t.Helper()
		b.must(b.net.SetSysctl(key, value))
	}
	const v6, v4 = "net/ipv6/conf/r1-r2/forwarding", "net/ipv4/conf/r1-r2/forwarding"
	set("net/ipv6/conf/all/forwarding", "1")
	set("net/ipv4/conf/all/forwarding", "1")
	first := compile(t, func(d *model.Domain) { d.Nodes[0].Interfaces[1].MTU = 1500 })["r1"]
	b.writePlan(first)
	r := b.start()
	if s := r.status(); len(s.Warnings) != 0 {
		t.Fatalf("all forward, and the status warns: %q", s.Warnings)
	}
	only := func(want ...string) {
		t.Helper()
		s := r.status()
		if len(s.Warnings) != 1 || !s.Ready || len(s.Problems) != 0 || s.Error != "" {
			t.Fatalf("status %+v; want one warning", s)
		}
		for _, w := range want {
			if !strings.Contains(s.Warnings[0], w) {
				t.Errorf("warning %q; want %q in it", s.Warnings[0], w)
			}
		}
	}

	b.log.Forget()
	set(v6, "0")
	b.log.Wait("node settings block packets")
	only("interface r1-r2 does not forward IPv6", "no-route", "sysctl -w net.ipv6.conf.r1-r2.forwarding=1")
	b.log.Forget()
	set(v6, "1")
	b.log.Wait("node settings no longer block packets")
	if s := r.status(); len(s.Warnings) != 0 {
		t.Errorf("it forwards again, and the status warns: %q", s.Warnings)
	}

	// Nor is one that is narrower than the plan says.
	b.log.Forget()
	b.must(b.net.SetMTU("r1-r2", 1400))
	b.log.Wait("node settings block packets")
	only("interface r1-r2 has an MTU of 1400, and the plan counts on 1500", "ip link set r1-r2 mtu 1500")
	b.log.Forget()
	b.must(b.net.SetMTU("r1-r2", 1500))
	b.log.Wait("node settings no longer block packets")

	// IPv4 counts only where it is carried.
	set(v4, "0")
	four := compile(t, func(d *model.Domain) {
		d.Chains[0].Match = model.Match{Destination: netip.MustParsePrefix("198.51.100.0/24")}
	})
	b.log.Forget()
	b.writePlan(four["r1"])
	b.log.Wait("node settings block packets")
	only("interface r1-r2 does not forward IPv4", "sysctl -w net.ipv4.conf.r1-r2.forwarding=1")
	b.log.Forget()
	b.writePlan(first)
	b.log.Wait("node settings no longer block packets")
}
