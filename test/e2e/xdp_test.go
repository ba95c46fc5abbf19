package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

// XDP on all interfaces, and two ways from r2 to r3:
//
//	h1 --- r1 --- r2 (fw) --- r3 (dpi) --- r6 --- h2
//	                 \____________________/
//
// A device takes XDP redirects only if its peer polls: nodes' do, having XDP
// themselves; those of the hosts need GRO.
const fast = `
version: 1
domain: {block: "fc00::/48"}
nodes:
  - name: r1
    address: fc00:1::1
    locator: fc00:0:0:100::/56
    interfaces: [{name: r1-h1, role: edge, datapath: xdp}, {name: r1-r2, role: core, datapath: xdp, mtu: 1700}]
  - name: r2
    address: fc00:2::1
    locator: fc00:0:0:200::/56
    interfaces:
      - {name: r2-r1, role: core, datapath: xdp, mtu: 1700}
      - {name: r2-r3, role: core, datapath: xdp, mtu: 1700}
      - {name: r2-r6, role: core, datapath: xdp, mtu: 1700}
  - name: r3
    address: fc00:3::1
    locator: fc00:0:0:300::/56
    interfaces: [{name: r3-r2, role: core, datapath: xdp, mtu: 1700}, {name: r3-r6, role: core, datapath: xdp, mtu: 1700}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    interfaces:
      - {name: r6-h2, role: edge, datapath: xdp}
      - {name: r6-r3, role: core, datapath: xdp, mtu: 1700}
      - {name: r6-r2, role: core, datapath: xdp, mtu: 1700}
functions:
  - {name: fw, node: r2, kind: forward}
  - {name: dpi, node: r3, kind: forward}
chains:
  - name: web
    ingress: [r1]
    functions: [fw, dpi]
    egress: r6
    match: {destination: "fc00:8::/64"}
    direction: both
    proof: {scheme: keyed, on-violation: drop}
lab:
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64"}
    - {name: h2, node: r6, prefix: "fc00:8::/64"}
  links:
    - {between: [r1, r2]}
    - {between: [r2, r3]}
    - {between: [r3, r6]}
    - {between: [r2, r6]}
`

// buildOnXDP builds that lab, and makes the hosts send and take packets as on a
// wire: TCP checksums are not left to a device that XDP passes by.
func buildOnXDP(t *testing.T, s model.Scheme, changes ...change) *world {
	t.Helper()
	countRuns(t)
	w := build(t, fast, append(changes, proven(s))...)
	w.ipv4 = w.manifest.Domain.Chains[0].Match.Is4()
	for host1, link := range map[string]string{"h1": "h1-r1", "h2": "h2-r6"} {
		must(t, w.net(host1).SetOffload(link, host.GRO, true))
		must(t, w.net(host1).SetOffload(link, host.TransmitSum, false))
	}
	for _, n := range w.nodes() {
		for _, i := range w.status(n).Interfaces {
			if !i.TC || !i.XDP {
				t.Errorf("%s: TC attached %t, XDP attached %t, want both", i.Name, i.TC, i.XDP)
			}
		}
	}
	return w
}

// buildFast is buildOnXDP; when it returns, the programs have found out that XDP
// can do all the work.
func buildFast(t *testing.T, s model.Scheme, changes ...change) *world {
	t.Helper()
	w := buildOnXDP(t, s, changes...)
	eventually(t, func() error {
		const n = 40
		var tc []func() uint64
		for _, p := range hooks {
			tc = append(tc, w.runs(p.node, p.program("tc")))
		}
		if got := w.ping("h1", "h2", lab.PingConfig{Count: n, Interval: time.Millisecond, Timeout: settleTime}); got != n {
			t.Fatalf("%d of %d echo requests were answered", got, n)
		}
		for i, p := range hooks {
			if ran := tc[i](); ran > n/4 {
				return fmt.Errorf("%s %s: TC ran %d times for %d packets", p.node, p.kind, ran, n)
			}
		}
		return nil
	})
	return w
}

// place is one kind of interface of a node; each has two programs.
type place struct{ node, kind string }

func (p place) program(hook string) string { return "ws_" + p.kind + "_" + hook }

// hooks are all places on the way.
var hooks = []place{{"r1", "edge"}, {"r1", "core"}, {"r2", "core"}, {"r3", "core"}, {"r6", "core"}, {"r6", "edge"}}

// program is a program of a node's data path, as it is pinned.
func (w *world) program(node, name string) *ebpf.Program {
	w.t.Helper()
	found, err := filepath.Glob(filepath.Join(dataplane.DefaultPinDir, w.Instance(node), "gen-*", name))
	must(w.t, err)
	if len(found) != 1 {
		w.t.Fatalf("program %s of %s is pinned at %q", name, node, found)
	}
	p, err := ebpf.LoadPinnedProgram(found[0], nil)
	must(w.t, err)
	w.t.Cleanup(func() { p.Close() })
	return p
}

// countRuns makes the kernel count how often programs run, while the test does.
func countRuns(t *testing.T) {
	t.Helper()
	c, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	must(t, err)
	t.Cleanup(func() { c.Close() })
}

// runs notes how often a program has run; the function that it returns tells how
// often since then.
func (w *world) runs(node, name string) func() uint64 {
	w.t.Helper()
	p := w.program(node, name)
	read := func() uint64 {
		w.t.Helper()
		s, err := p.Stats()
		must(w.t, err)
		return s.RunCount
	}
	before := read()
	return func() uint64 { return read() - before }
}

// With programs at XDP all is stamped and verified on any kernel; where no device
// tells whether it takes redirects (before Linux 6.3), TC has every packet.
func TestXDPLosesNothing(t *testing.T) {
	t.Parallel()
	w := buildOnXDP(t, model.SchemeKeyed)
	w.reaches("h1", "h2") // neighbours keep few packets until they are found
	const n = 100
	since, back := w.counting(w.path("web", model.Forward)), w.counting(w.path("web", model.Reverse))
	tc := map[place]func() uint64{}
	for _, p := range hooks {
		tc[p] = w.runs(p.node, p.program("tc"))
	}
	if got := w.ping("h1", "h2", lab.PingConfig{Count: n, Interval: 5 * time.Millisecond, Timeout: settleTime}); got != n {
		t.Errorf("%d of %d echo requests were answered", got, n)
	}
	if a, b := since().frames(), back().frames(); a != n || b != n {
		t.Errorf("%d frames stamped and verified forward, %d back, want %d each", a, b, n)
	}
	if _, err := host.TakesRedirects(1); err != nil {
		t.Logf("XDP leaves all to TC: %v", err)
		for p, ran := range tc {
			if ran := ran(); ran < n {
				t.Errorf("%s %s: TC ran %d times for %d packets", p.node, p.kind, ran, n)
			}
		}
	}
	w.download("h1", "h2", 5_000_000)
	w.download("h2", "h1", 5_000_000)
}

// Where XDP can finish a packet TC never sees it, but once a second and way: so
// the kernel's neighbours stay confirmed, and what XDP knows stays fresh.
func TestXDPDoesTheWorkAndTCKeepsItFresh(t *testing.T) {
	t.Parallel()
	boundToo(t, func(t *testing.T, s model.Scheme) {
		w := buildFast(t, s)
		forward, reverse := w.path("web", model.Forward), w.path("web", model.Reverse)

		xdp, tc := map[place]func() uint64{}, map[place]func() uint64{}
		for _, p := range hooks {
			xdp[p] = w.runs(p.node, p.program("xdp"))
			tc[p] = w.runs(p.node, p.program("tc"))
		}
		since, back := w.counting(forward), w.counting(reverse)
		const n, interval = 700, 5 * time.Millisecond
		started := time.Now()
		if got := w.ping("h1", "h2", lab.PingConfig{Count: n, Interval: interval, Timeout: settleTime}); got != n {
			t.Errorf("%d of %d echo requests were answered", got, n)
		}
		seconds := uint64(time.Since(started) / time.Second)
		if a, b := since().frames(), back().frames(); a != n || b != n {
			t.Errorf("%d frames stamped and verified forward, %d back, want %d each", a, b, n)
		}
		for p, x := range xdp {
			x, tc := x(), tc[p]()
			t.Logf("%s %s: XDP ran %d times, TC %d", p.node, p.kind, x, tc)
			if x < n {
				t.Errorf("%s %s: XDP ran %d times for %d packets", p.node, p.kind, x, n)
			}
			// A next hop counts for 90 jiffies: a tenth of a second at least. There
			// and back.
			if tc > n/10+24*seconds {
				t.Errorf("%s %s: TC ran %d times for %d packets in %d seconds", p.node, p.kind, tc, n, seconds)
			}
			// Less than a second from one time to the next, and until a packet
			// comes then.
			if tc < (seconds-1)/2 {
				t.Errorf("%s %s: TC ran %d times in %d seconds: a next hop was used for too long", p.node, p.kind, tc, seconds)
			}
		}

		// TCP, in frames of its own.
		since = w.counting(forward)
		r := w.download("h1", "h2", 10_000_000)
		t.Logf("TCP: %.1f Gb/s, %d frames", gigabits(r), since().frames())
	})
}

// A change of routes, links or neighbours is followed at once where an agent
// runs, and within a second where none does: how long a next hop counts is
// TestXDPGoesByWhatTCLearnedAndNoFurther's matter, since a busy machine may take
// longer than that to run this test.
func TestXDPFollowsChanges(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		change func(w *world)
		// arrived is what grows for packets that have taken the new way.
		arrived func(w *world) int
	}{
		{"a route", func(w *world) {
			must(w.t, w.net("r2").ReplaceRoute(w.detour(1024)))
		}, func(w *world) int { return w.snmp("r6", "Ip6OutForwDatagrams") }},
		{"a link", func(w *world) {
			must(w.t, w.net("r2").AddRoute(w.detour(2048)))
			must(w.t, w.net("r2").SetDown("r2-r3"))
		}, func(w *world) int { return w.snmp("r6", "Ip6OutForwDatagrams") }},
		{"a neighbour", func(w *world) {
			mac := net.HardwareAddr{2, 0, 0, 0, 0, 0x66}
			w.setMAC("h2", "h2-r6", mac)
			w.setNeighbour("r6", "r6-h2", w.addr("h2"), mac)
		}, func(w *world) int { return w.snmp("h2", "Icmp6InEchos") }},
	} {
		for _, agents := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, agents %t", c.name, agents), func(t *testing.T) {
				t.Parallel()
				w := buildFast(t, model.SchemeKeyed)
				if !agents {
					for _, n := range w.nodes() {
						must(t, w.StopAgent(soon(t), n))
					}
				}
				ctx, cancel := context.WithCancel(soon(t))
				stopped := make(chan struct{})
				go func() { // one packet each 2 ms, until the change was followed
					defer close(stopped)
					lab.Ping(ctx, w.ns("h1"), w.addr("h2"), lab.PingConfig{Count: 30000, Interval: 2 * time.Millisecond})
				}()
				defer func() {
					cancel()
					<-stopped
				}()
				// Until the way is known to XDP, and is in use.
				at := w.snmp("h2", "Icmp6InEchos")
				eventually(t, func() error {
					if n := w.snmp("h2", "Icmp6InEchos") - at; n < 20 {
						return fmt.Errorf("%d packets have come to h2", n)
					}
					return nil
				})
				c.change(w)
				changed := time.Now()
				before := c.arrived(w)
				eventually(t, func() error {
					if n := c.arrived(w) - before; n < 5 {
						return fmt.Errorf("%d packets have taken the new way", n)
					}
					return nil
				})
				t.Logf("followed after %s", time.Since(changed).Round(time.Millisecond))
				if !agents {
					for _, n := range w.nodes() {
						must(t, w.StartAgent(soon(t), n))
					}
				}
			})
		}
	}
}

// detour is the way from r2 to r3 by r6.
func (w *world) detour(metric int) host.Route {
	return host.Route{
		Destination: netip.MustParsePrefix("fc00:0:0:300::/56"),
		Via:         netip.MustParseAddr("fe80::4"), // r6, the fourth station
		Device:      "r2-r6",
		Source:      netip.MustParseAddr("fc00:2::1"),
		Metric:      metric,
	}
}

// snmp reads one of the kernel's IPv6 counters of a member.
func (w *world) snmp(name, counter string) (n int) {
	w.t.Helper()
	must(w.t, w.Do(name, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/snmp6")
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) == 2 && f[0] == counter {
				fmt.Sscan(f[1], &n)
			}
		}
		return err
	}))
	return n
}

// setMAC gives an interface another hardware address.
func (w *world) setMAC(name, link string, mac net.HardwareAddr) {
	w.t.Helper()
	must(w.t, w.Do(name, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		return netlink.LinkSetHardwareAddr(l, mac)
	}))
}

// setNeighbour tells a member where an address is, as a neighbour
// advertisement would.
func (w *world) setNeighbour(name, link string, a netip.Addr, mac net.HardwareAddr) {
	w.t.Helper()
	must(w.t, w.Do(name, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: l.Attrs().Index, Family: unix.AF_INET6, State: netlink.NUD_REACHABLE, IP: a.AsSlice(), HardwareAddr: mac,
		})
	}))
}
