package doctor

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// A function's next hop that is there, and one that is not.
func TestNextHopsOfFunctionsAreAsked(t *testing.T) {
	m, n := inFunction(t, model.SegmentsKeep)
	fw, in := netip.MustParsePrefix("198.51.100.1/24"), netip.MustParsePrefix("198.51.100.2/24")
	far, err := host.Anonymous()
	must(t, err)
	defer far.Close()
	b, err := host.Open(far)
	must(t, err)
	defer b.Close()
	must(t, m.Net.AddVeth(host.Veth{Name: "nat", PeerName: "in", Peer: far}), m.Net.SetUp("nat"), b.SetUp("in"))
	must(t, m.Net.AddAddress("nat", fw), b.AddAddress("in", in))
	n.Proxies = append(n.Proxies,
		plan.Proxy{Function: "nat", Proxy: model.Proxy{To: "nat", From: "nat", Via: in.Addr()}},
		plan.Proxy{Function: "own", Proxy: model.Proxy{Local: true, Via: in.Addr()}})
	if f := vias(m.Net, n); len(f) != 1 || f[0].Verdict != Yes || f[0].About != "nat" {
		t.Errorf("of a next hop that is there: %+v", f)
	}
	must(t, m.Net.AddAddress("nat", netip.MustParsePrefix("fe80::1/64")), b.AddAddress("in", netip.MustParsePrefix("fe80::2/64")), m.Net.WaitUp(t.Context(), "nat"), b.WaitUp(t.Context(), "in"))
	n.Proxies[1].Via = netip.MustParseAddr("fe80::2")
	if f := vias(m.Net, n); len(f) != 1 || f[0].Verdict != Yes {
		t.Errorf("of a link-local one: %+v", f)
	}
	n.Proxies[1].Via = netip.MustParseAddr("198.51.100.9") // nobody's
	want := "nobody answers for 198.51.100.9 on interface nat, the next hop to function nat, so that no packet of a chain gets to the function: start the function"
	if s := strings.Join(Wrong(vias(m.Net, n)), "\n"); !strings.HasPrefix(s, want) {
		t.Errorf("of one that is not: %q, want %q", s, want)
	}
	n.Proxies[1].Via = netip.MustParseAddr("2001:db8::1") // no route
	if f := vias(m.Net, n); len(f) != 1 || f[0].Verdict != Unknown {
		t.Errorf("of one that no route leads to: %+v", f)
	}
	must(t, m.Net.SetDown("nat"))
	if f := vias(m.Net, n); len(f) != 0 {
		t.Errorf("on an interface that is down: %+v", f)
	}
}

// On a kernel without tcx the discipline "ingress" is in clsact's way; the agent of such a kernel finds the same.
func TestQdiscInTheWayOfClsactIsFound(t *testing.T) {
	m := node(t)
	look := func() string { return strings.Join(Wrong(queueing(m.Net, *m.Plan, false, nil)), "\n") }
	if s := look(); s != "" {
		t.Errorf("before: %q", s)
	}
	must(t, run(m, "tc", "qdisc", "add", "dev", "core", "ingress"))
	if s, want := look(), "core interface core has the queueing discipline ingress, where clsact has to be, so that no program can be attached to it: tc qdisc del dev core ingress; tc qdisc add dev core clsact"; !strings.HasPrefix(s, want) {
		t.Errorf("says %q, want %q", s, want)
	}
	l, err := m.Net.Link("core")
	must(t, err)
	if err := m.Net.SetFilter(l.Index, false, host.Filter{Preference: 1, Handle: 1, Name: "x"}, 0, true); err == nil || !strings.Contains(err.Error(), "its queueing discipline ingress is in the way") {
		t.Errorf("the agent says %v", err)
	}
	if f := queueing(m.Net, *m.Plan, true, nil); len(f) != 0 {
		t.Errorf("with tcx: %+v", f)
	}
	must(t, run(m, "tc", "qdisc", "del", "dev", "core", "ingress"), run(m, "tc", "qdisc", "add", "dev", "core", "clsact"))
	if s := look(); s != "" {
		t.Errorf("mended: %q", s)
	}
	if f := queueing(m.Net, *m.Plan, false, errors.New("no rights")); len(f) != 3 || f[0].Verdict != Unknown {
		t.Errorf("where nothing can be told: %+v", f)
	}
}
