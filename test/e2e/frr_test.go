package e2e

import (
	"encoding/json"
	"fmt"
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

// A domain whose nodes and routers run FRR has no static routes, carries its chain,
// tells all nodes what each SID is, finds another way when a link fails, and leaves
// nothing of FRR behind.
func TestFRRRoutesALab(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "paper.yaml"), func(m *manifest.Manifest) { m.Lab.Routing = model.LabFRR })
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
	vtysh := func(at string, command string) string {
		t.Helper()
		m, err := w.Member(at)
		must(t, err)
		return w.run(at, "vtysh", "--vty_socket", m.Routing, "-c", command)
	}
	for _, h := range p.Hops[1 : len(p.Hops)-1] {
		var route struct {
			Paths []struct {
				LargeCommunity struct{ String string } `json:"largeCommunity"`
			}
		}
		said := vtysh("r6", fmt.Sprintf("show bgp ipv6 unicast %s/64 json", h.SID))
		must(t, json.Unmarshal([]byte(said), &route))
		as := 4200000001 + slices.IndexFunc(w.manifest.Domain.Nodes, func(n model.Node) bool { return n.Name == h.Node })
		// printf fw | sha256sum | head -c 8
		want := fmt.Sprintf("%d:1:%d", as, map[string]uint32{"fw": 0x07f7ab47, "dpi": 0xa80ad1fe}[h.Function])
		if len(route.Paths) == 0 || route.Paths[0].LargeCommunity.String != want {
			t.Errorf("r6 knows of %s of %s %+v; want large community %s", h.SID, h.Function, route, want)
		}
	}
	w.run("r6", "vtysh", "--vty_socket", member(w, "r6").Routing, "-c", "configure", "-c", "bgp large-community-list expanded fw permit :133671751$")
	if said := vtysh("r6", "show bgp ipv6 unicast large-community-list fw"); !strings.Contains(said, p.Hops[1].SID.String()+"/64") || strings.Contains(said, p.Hops[2].SID.String()+"/64") {
		t.Errorf("the SIDs of fw are, r6 says:\n%s", said)
	}

	// r2 and r3 lose their link: from r2 the way to r3 is now by r1, r4, r5 and r6.
	locator := netip.MustParsePrefix("fc00:0:0:300::/56")
	by := func() string {
		routes, err := w.net("r2").Routes(host.ProtocolBGP)
		must(t, err)
		for _, r := range routes {
			if r.Destination == locator {
				return r.Device
			}
		}
		return "nothing"
	}
	if got := by(); got != "r2-r3" {
		t.Errorf("r2 reaches r3 by %s", got)
	}
	w.ip("r2", "link set r2-r3 down")
	within(t, settleTime, func() error {
		if got := by(); got != "r2-r1" {
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
