package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
)

// The shell of FRR, which knows the commands of all its daemons, takes what
// internal/routing writes.
func TestFRRTakesItsConfiguration(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../internal/routing/testdata/*.conf")
	must(t, err)
	if len(files) < 5 {
		t.Fatalf("%d configurations are there; want 5 or more", len(files))
	}
	for _, f := range files {
		if said := string(tool(t, "vtysh", "-C", "-f", f)); strings.TrimSpace(said) != "" {
			t.Errorf("%s: vtysh says\n%s", f, said)
		}
	}
}

// advertising lets all nodes announce their SIDs.
func advertising(m *manifest.Manifest) {
	for i := range m.Domain.Nodes {
		m.Domain.Nodes[i].Advertise = model.AdvertiseSIDs
	}
}

// vtysh runs a command of a member's FRR.
func (w *world) vtysh(at, command string, more ...string) string {
	w.t.Helper()
	args := []string{"vtysh", "--vty_socket", member(w, at).Routing, "-c", command}
	for _, c := range more {
		args = append(args, "-c", c)
	}
	return w.run(at, args...)
}

// community is the large community that FRR at a member knows a prefix by; "": it does
// not know the prefix.
func (w *world) community(at string, p netip.Prefix) string {
	w.t.Helper()
	var route struct {
		Paths []struct {
			LargeCommunity struct{ String string } `json:"largeCommunity"`
		}
	}
	must(w.t, json.Unmarshal([]byte(w.vtysh(at, fmt.Sprintf("show bgp ipv6 unicast %s json", p))), &route))
	if len(route.Paths) == 0 {
		return ""
	}
	return cmp.Or(route.Paths[0].LargeCommunity.String, "none")
}

// learns waits until FRR at a member knows SIDs by these communities.
func (w *world) learns(at string, want map[netip.Prefix]string) {
	w.t.Helper()
	within(w.t, settleTime, func() error {
		for p, c := range want {
			if got := w.community(at, p); got != c {
				return fmt.Errorf("%s knows %s by community %q; want %q", at, p, got, c)
			}
		}
		return nil
	})
}

// routeTo is the device that a member's route by BGP to a prefix leaves by; "": there
// is none.
func (w *world) routeTo(at string, p netip.Prefix) string {
	w.t.Helper()
	routes, err := w.net(at).Routes(host.ProtocolBGP)
	must(w.t, err)
	for _, r := range routes {
		if r.Destination == p {
			return r.Device
		}
	}
	return ""
}

// A domain whose nodes and routers run FRR has no static routes, carries its chain,
// tells all nodes what each SID is, finds another way when a link fails, and leaves
// nothing of FRR behind.
func TestFRRRoutesALab(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "paper.yaml"), advertising, func(m *manifest.Manifest) { m.Lab.Routing = model.LabFRR })
	for _, m := range w.Members() {
		if m.Role != lab.RoleNode {
			continue
		}
		if left, err := w.net(m.Name).Routes(host.ProtocolStatic); err != nil || len(left) > 0 {
			t.Errorf("%s has static routes: %v, %v", m.Name, left, err)
		}
	}
	p := w.path("web", model.Forward)
	verified := w.counting(p)
	w.reaches("h1", "h2")
	w.download("h2", "h1", 2_000_000)
	w.download("h1", "h2", 2_000_000)
	if n := verified().frames(); n < 1000 {
		t.Errorf("%d frames went all the way", n)
	}

	// What r6 knows of the SIDs of the others.
	want := map[netip.Prefix]string{}
	for _, h := range p.Hops[1 : len(p.Hops)-1] {
		as := 4200000001 + slices.IndexFunc(w.manifest.Domain.Nodes, func(n model.Node) bool { return n.Name == h.Node })
		// printf fw | sha256sum | head -c 8
		want[netip.PrefixFrom(h.SID, 64)] = fmt.Sprintf("%d:1:%d", as, map[string]uint32{"fw": 0x07f7ab47, "dpi": 0xa80ad1fe}[h.Function])
	}
	w.learns("r6", want)
	w.vtysh("r6", "configure", "bgp large-community-list expanded fw permit :133671751$")
	if said := w.vtysh("r6", "show bgp ipv6 unicast large-community-list fw"); !strings.Contains(said, p.Hops[1].SID.String()+"/64") || strings.Contains(said, p.Hops[2].SID.String()+"/64") {
		t.Errorf("the SIDs of fw are, r6 says:\n%s", said)
	}

	// r2 and r3 lose their link: from r2 the way to r3 is now by r1, r4, r5 and r6.
	locator := netip.MustParsePrefix("fc00:0:0:300::/56")
	if got := w.routeTo("r2", locator); got != "r2-r3" {
		t.Errorf("r2 reaches r3 by %s", got)
	}
	w.ip("r2", "link set r2-r3 down")
	within(t, settleTime, func() error {
		if got := w.routeTo("r2", locator); got != "r2-r1" {
			return fmt.Errorf("r2 reaches r3 by %s", got)
		}
		return nil
	})
	within(t, settleTime, func() error {
		if n := w.ping("h1", "h2", lab.PingConfig{Count: 1, Timeout: lostTime}); n != 1 {
			return fmt.Errorf("nothing gets from h1 to h2")
		}
		return nil
	})

	dir := filepath.Dir(member(w, "r1").Routing)
	must(t, w.Down(soon(t)))
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", dir, err)
	}
	if left := withArgument(t, dir); len(left) > 0 {
		t.Errorf("these still run: %q", left)
	}
}

// While an interface of a function is missing, no node of the domain has its SIDs, in
// BGP or in the kernel; its node's other prefixes stay, and so does the path.
func TestFRRWithdrawsTheSIDsOfAFunctionThatIsGone(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "routing.yaml"))
	sid := func(s string) netip.Prefix { return netip.MustParsePrefix("fc00:0:0:" + s + "::/64") }
	fw, dpi := "4200000002:32771:133671751", "4200000003:1:2819281406" // End.AD, End
	there := map[netip.Prefix]string{
		sid("200"): fw, sid("201"): fw, sid("300"): dpi, sid("301"): dpi, sid("100"): "4200000001:20:0", // End.DT46
	}
	gone := maps.Clone(there)
	gone[sid("200")], gone[sid("201")] = "", ""

	w.learns("r6", there)
	within(t, settleTime, func() error {
		if got := w.routeTo("r1", sid("200")); got != "r1-r2" {
			return fmt.Errorf("r1 has a route to fw's SID by %q", got)
		}
		return nil
	})
	verified := w.counting(w.path("web", model.Forward))
	w.reaches("h1", "h2")
	if n := verified().frames(); n < 5 {
		t.Errorf("%d frames went all the way", n)
	}

	w.ip("r2", "link set fw-in down")
	w.ip("r2", "link set fw-in name elsewhere")
	w.learns("r6", gone)
	within(t, settleTime, func() error {
		if got := w.routeTo("r1", sid("200")); got != "" {
			return fmt.Errorf("r1 still has a route to fw's SID by %s", got)
		}
		return nil
	})
	if got := w.routeTo("r1", netip.MustParsePrefix("fc00:0:0:200::/56")); got != "r1-r2" {
		t.Errorf("r1 has a route to the locator of r2 by %q", got)
	}
	// Other routes to these prefixes are in the kernel's table, and not in BGP.
	w.ip("r2", "-6 route add blackhole fc00:0:0:200::/64 metric 1024")
	w.ip("r2", "-6 route add blackhole fc00:0:0:2aa::/64 metric 16777215")
	within(t, settleTime, func() error {
		said := w.vtysh("r2", "show ipv6 route kernel")
		if !strings.Contains(said, sid("200").String()) || !strings.Contains(said, sid("2aa").String()) {
			return fmt.Errorf("zebra of r2 has not seen the routes:\n%s", said)
		}
		return nil
	})
	for _, p := range []netip.Prefix{sid("200"), sid("2aa")} {
		if got := w.community("r2", p); got != "" {
			t.Errorf("r2 announces a route to %s that is not waystamp's, by community %s", p, got)
		}
	}
	w.ip("r2", "-6 route del blackhole fc00:0:0:200::/64 metric 1024")

	w.ip("r2", "link set elsewhere name fw-in")
	w.ip("r2", "link set fw-in up")
	w.learns("r6", there)
	w.reaches("h1", "h2")
	w.checkRefusals()

	must(t, w.StopAgent(soon(t), "r2"))
	w.learns("r6", there)
	if r := w.detach("r2", "--yes"); r.code != 0 || !strings.Contains(r.stdout, "locator fc00:0:0:200::/56: route withdrawn\n2 SIDs: routes withdrawn\n") {
		t.Errorf("detach: %s", r)
	}
	w.learns("r6", gone)
	must(t, w.Down(soon(t)))
}

func member(w *world, name string) lab.Member {
	w.t.Helper()
	m, err := w.Member(name)
	must(w.t, err)
	return m
}

// withArgument lists the command lines that have something in them.
func withArgument(t *testing.T, what string) (lines []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), what) {
			lines = append(lines, strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return lines
}
