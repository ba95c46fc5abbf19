//go:build stock

// Tests of what distributions' kernels have and a small one may lack: VLAN
// interfaces, netem, and MPLS routing. make test-kernels builds and runs them.

package e2e

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// impair makes a link lose its order, or what else netem can do (tc-netem(8)),
// in one direction.
func (w *world) impair(from, to string, how ...string) (mend func()) {
	w.t.Helper()
	args := []string{"tc", "qdisc", "add", "dev", from + "-" + to, "root", "netem"}
	w.shell(from, append(args, how...)...)
	return func() {
		w.t.Helper()
		w.shell(from, "tc", "qdisc", "del", "dev", from+"-"+to, "root")
	}
}

// numbered are datagrams from h1 to h2, each with its number.
type numbered struct {
	w        *world
	out      func(payloads ...[]byte)
	in       func() []byte
	sent     uint32
	received []uint32 // in the order in which they came
}

func (w *world) numbered() *numbered {
	w.t.Helper()
	d := &numbered{w: w}
	d.out, d.in = w.datagrams()
	return d
}

// send sends n at once and waits for as many.
func (d *numbered) send(n int) {
	d.w.t.Helper()
	for range n {
		d.out(binary.BigEndian.AppendUint32(nil, d.sent))
		d.sent++
	}
	for range n {
		b := d.in()
		if len(b) != 4 {
			d.w.t.Fatalf("a datagram has %d bytes, want 4", len(b))
		}
		d.received = append(d.received, binary.BigEndian.Uint32(b))
	}
}

// once checks that each datagram has come, and none twice.
func (d *numbered) once() {
	d.w.t.Helper()
	got := slices.Sorted(slices.Values(d.received))
	for i, n := range got {
		if n != uint32(i) {
			d.w.t.Fatalf("of %d datagrams the %d-th that was delivered, in order, has number %d", d.sent, i, n)
		}
	}
}

// A link in the middle of a chain sends some packets twice. The egress refuses
// each second one, and delivers each first one.
func TestStockDuplicatesOfALinkAreRefused(t *testing.T) {
	bothSchemes(t, func(t *testing.T, s model.Scheme) {
		w := build(t, narrowing, proven(s))
		p := w.path("web", model.Forward)
		w.reaches("h1", "h2")
		seen := w.capture("r3", "r3-r2")
		before, err := w.frames(p)
		must(t, err)
		mend := w.impair("r2", "r3", "duplicate", "10%")
		d := w.numbered()
		const n, burst = 600, 100
		for range n / burst {
			d.send(burst)
		}
		mend()
		// What is behind the last second one.
		d.send(1)

		// By what came out of the link: what is in proofs tells packets apart.
		var again uint64
		eventually(t, func() error {
			came := map[srv6.Proof]bool{}
			proofs := seen.proofs(p.Path)
			for _, v := range proofs {
				came[v] = true
			}
			again = uint64(len(proofs) - len(came))
			now, err := w.frames(p)
			if err != nil {
				return err
			}
			got := make([]uint64, len(now))
			for i := range now {
				got[i] = now[i].Frames - before[i].Frames
			}
			want := []uint64{n + 1, n + 1, n + 1 + again, n + 1}
			if len(came) != n+1 || !slices.Equal(got, want) {
				return fmt.Errorf("%d packets and %d second ones came by; the hops have counted %v, want %v", len(came), again, got, want)
			}
			return nil
		})
		if again == 0 {
			t.Fatalf("of %d packets none came twice", n)
		}
		t.Logf("%d of %d packets came twice", again, n)
		w.refused("r6", "replay", again)
		d.once()
	})
}

// A link in the middle of a chain changes the order of packets, by no more than the
// window remembers: none of them is lost.
func TestStockReorderingWithinTheWindowLosesNothing(t *testing.T) {
	bothSchemes(t, func(t *testing.T, s model.Scheme) {
		w := build(t, narrowing, proven(s), func(m *manifest.Manifest) { m.Domain.Chains[0].Proof.Window = model.WindowMin })
		p := w.path("web", model.Forward)
		w.reaches("h1", "h2")
		since := w.counting(p)
		w.impair("r2", "r3", "delay", "10ms", "reorder", "25%")
		d := w.numbered()
		const bursts, burst = 20, model.WindowMin - 4 // so late a packet may be
		for range bursts {
			d.send(burst)
		}
		if n := since().frames(); n != bursts*burst {
			t.Errorf("%d frames have taken the chain, want %d", n, bursts*burst)
		}
		overtaken := 0
		for i, n := range d.received {
			if i > 0 && n < d.received[i-1] {
				overtaken++
			}
		}
		if overtaken == 0 {
			t.Errorf("of %d packets none has been overtaken", bursts*burst)
		}
		t.Logf("%d times a packet came behind a later one", overtaken)
		d.once()
		// And none was refused, anywhere, as is checked at the end.
	})
}

// A link in the middle of a chain loses packets both ways, super-packets as a whole among them. TCP sends the bytes again, and
// each packet is stamped anew, so that none is taken for a replay.
func TestStockLossUnderTCP(t *testing.T) {
	w := build(t, string(examples.IPv4), proven(model.SchemeKeyed))
	// gone is how many packets of a link's direction netem has dropped, each super-packet as one.
	gone := func(from, to string) uint64 {
		t.Helper()
		var all []struct {
			Kind  string `json:"kind"`
			Drops uint64 `json:"drops"`
		}
		must(t, json.Unmarshal([]byte(w.shell(from, "tc", "-j", "-s", "qdisc", "show", "dev", from+"-"+to)), &all))
		for _, q := range all {
			if q.Kind == "netem" {
				return q.Drops
			}
		}
		t.Fatalf("there is no netem at %s-%s: %+v", from, to, all)
		return 0
	}
	w.impair("r2", "r3", "loss", "1%")
	w.impair("r3", "r2", "loss", "1%")
	for _, v := range []struct {
		chain string
		ipv4  bool
	}{{"web6", false}, {"web4", true}} {
		w.ipv4 = v.ipv4
		p := w.path(v.chain, model.Forward)
		before, err := w.frames(p)
		must(t, err)
		was := gone("r2", "r3")
		s := w.stream("h1", "h2")
		for gone("r2", "r3") < was+5 {
			s.more(2_000_000)
		}
		s.finish()
		packets := gone("r2", "r3") - was
		var sent, came uint64
		eventually(t, func() error {
			now, err := w.frames(p)
			if err != nil {
				return err
			}
			last := len(now) - 1
			sent, came = now[0].Frames-before[0].Frames, now[last].Frames-before[last].Frames
			// What is before the link has all, and what is behind it the rest.
			if at := now[1].Frames - before[1].Frames; at != sent {
				return fmt.Errorf("the headend has stamped %d frames, and r2 %d", sent, at)
			}
			if at := now[2].Frames - before[2].Frames; at != came {
				return fmt.Errorf("r3 has stamped %d frames, and the egress has verified %d", at, came)
			}
			return nil
		})
		if s.resent == 0 || sent-came < packets {
			t.Errorf("%s: TCP has sent %d segments again; netem dropped %d packets, and of %d frames %d came", v.chain, s.resent, packets, sent, came)
		}
		t.Logf("%s: netem dropped %d packets, which were %d of %d frames; TCP sent %d segments again", v.chain, packets, sent-came, sent, s.resent)
	}
	// None was refused, anywhere, as is checked at the end.
}

// tag is a VLAN tag, in the words of ip-link(8).
type tag struct {
	id       int
	protocol string
}

// above is the name of the VLAN interface of these tags on top of another, and of all below it.
func above(lower string, tags []tag) (names []string) {
	for _, v := range tags {
		lower = fmt.Sprintf("%s.%d", lower, v.id)
		names = append(names, lower)
	}
	return names
}

// tagLink puts VLAN interfaces on top of either end of a link, the last tag in the innermost place, and moves addresses
// and routes there.
func (w *world) tagLink(a, b string, tags ...tag) {
	w.t.Helper()
	var ends []movedEnd
	for _, end := range [][2]string{{a, a + "-" + b}, {b, b + "-" + a}} {
		lower := end[1]
		for i, name := range above(end[1], tags) {
			w.addVLAN(end[0], lower, tags[i])
			lower = name
		}
		ends = append(ends, movedEnd{end[0], end[1], lower})
	}
	w.moveLink(ends...)
}

// addVLAN makes the interface LOWER.ID on top of an interface.
func (w *world) addVLAN(node, lower string, v tag) {
	w.t.Helper()
	name := above(lower, []tag{v})[0]
	w.shell(node, "ip", "link", "add", "link", lower, "name", name, "type", "vlan", "protocol", v.protocol, "id", fmt.Sprint(v.id))
	must(w.t, w.net(node).SetUp(name))
}

// An edge and a link in the middle are VLAN interfaces, of IEEE 802.1Q; so are their
// other ends. What is below them is in the plan, too.
func TestStockChainOverVLANInterfaces(t *testing.T) {
	bothSchemes(t, func(t *testing.T, s model.Scheme) {
		chainOverVLANs(t, s, []tag{{5, "802.1Q"}}, []tag{{7, "802.1Q"}})
	})
}

// They are of IEEE 802.1ad, or of 802.1Q on top of one of 802.1ad.
func TestStockChainOverServiceVLANs(t *testing.T) {
	t.Run("802.1ad", func(t *testing.T) {
		chainOverVLANs(t, model.SchemeKeyed, []tag{{5, "802.1ad"}}, []tag{{7, "802.1ad"}})
	})
	t.Run("802.1Q in 802.1ad", func(t *testing.T) {
		chainOverVLANs(t, model.SchemeKeyed, []tag{{5, "802.1ad"}, {6, "802.1Q"}}, []tag{{7, "802.1ad"}, {8, "802.1Q"}})
	})
}

func chainOverVLANs(t *testing.T, s model.Scheme, edge, core []tag) {
	t.Helper()
	m := parse(t, narrowing, proven(s))
	for _, e := range []struct {
		node string
		on   model.Interface
		tags []tag
	}{
		{"r1", model.Interface{Name: "r1-h1", Role: model.RoleEdge}, edge},
		{"r2", model.Interface{Name: "r2-r3", Role: model.RoleCore, MTU: 1700}, core},
		{"r3", model.Interface{Name: "r3-r2", Role: model.RoleCore, MTU: 1700}, core},
	} {
		at := slices.IndexFunc(m.Domain.Nodes, func(n model.Node) bool { return n.Name == e.node })
		for _, name := range above(e.on.Name, e.tags) {
			i := e.on
			i.Name = name
			m.Domain.Nodes[at].Interfaces = append(m.Domain.Nodes[at].Interfaces, i)
		}
	}
	w := buildFrom(t, m, func(c *lab.Config) { c.WithoutAgents = true })
	w.tagLink("h1", "r1", edge...)
	w.tagLink("r2", "r3", core...)
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
	}
	w.silent = false

	r3 := w.net("r3")
	names := above("r3-r2", core)
	inner := names[len(names)-1]
	tagged, err := r3.Received(inner)
	must(t, err)
	since, back := w.counting(w.path("web", model.Forward)), w.counting(w.path("web", model.Reverse))
	w.reaches("h1", "h2")
	const size = 2_000_000
	for _, way := range [][2]string{{"h1", "h2"}, {"h2", "h1"}} {
		r := w.download(way[0], way[1], size)
		t.Logf("from %s: %.2f Gb/s", way[0], gigabits(r))
	}
	there, andBack := since(), back()
	for _, f := range []flow{there, andBack} {
		if least := uint64(size / 1440); f.frames() < least {
			t.Errorf("%d frames, want %d at least", f.frames(), least)
		}
	}
	now, err := r3.Received(inner)
	must(t, err)
	if now-tagged < there[2].Packets {
		t.Errorf("r3 has stamped %d packets, of which %d came in the VLAN", there[2].Packets, now-tagged)
	}

	// A VLAN that nobody has thought of: of segment routing nothing comes in by
	// it, and no chain takes what does.
	unplanned := tag{9, "802.1Q"}
	w.addVLAN("h1", "h1-r1", unplanned)
	w.addVLAN("r1", "r1-h1", unplanned)
	must(t, w.net("h1").AddAddress("h1-r1.9", netip.MustParsePrefix("fc00:99::2/64")))
	must(t, w.net("r1").AddAddress("r1-h1.9", netip.MustParsePrefix("fc00:99::1/64")))
	must(t, w.net("h1").WaitUp(soon(t), "h1-r1.9"))
	must(t, w.net("r1").WaitUp(soon(t), "r1-h1.9"))
	outside, node := openPort(t, w.ns("h1"), "h1-r1.9", unix.ETH_P_IPV6), openPort(t, w.ns("r1"), "r1-h1.9", unix.ETH_P_IPV6)
	before := time.Now()
	for _, sid := range w.path("web", model.Forward).Segments() {
		must(t, sendBy(outside, srv6.Packet{
			Ethernet: &srv6.Ethernet{Destination: node.MAC, Source: outside.MAC, Type: srv6.EtherTypeIPv6},
			Header:   srv6.Header{NextHeader: unix.IPPROTO_NONE, HopLimit: 64, Source: netip.MustParseAddr("fc00:99::2"), Destination: sid},
		}))
	}
	w.refused("r1", "outside-sid", uint64(len(w.path("web", model.Forward).Segments())))
	w.explained(w.event(before, "r1", "outside-sid"),
		"a packet from fc00:99::2 to r2 (fw) was refused: a packet from outside is addressed to the SID block")

	w.shell("h1", "ip", "-6", "route", "add", "fc00:8::/64", "via", "fc00:99::1", "dev", "h1-r1.9")
	since = w.counting(w.path("web", model.Forward))
	w.isCutOff("h1", "h2", probes)
	w.refused("r6", "unproven", probes)
	if n := since().frames(); n != 0 {
		t.Errorf("the chain has taken %d frames of a VLAN that is not in the plan", n)
	}
}

// Between nodes of a chain over labels are routers of Linux's own (mpls_router), which have no
// program and no plan. They swap the label of a node for the same one, as all routers of a
// segment routing domain with one SRGB do; or, one hop before the node, take it off.
func TestStockRoutersPassLabelsOn(t *testing.T) {
	for _, v := range []struct {
		name string
		pops bool // the router before a node takes its label off (RFC 3031 3.16)
	}{{"swap", false}, {"pop", true}} {
		t.Run(v.name, func(t *testing.T) {
			w := buildFrom(t, parse(t, string(examples.MPLS), proven(model.SchemeKeyed)), func(c *lab.Config) { c.WithoutAgents = true })
			w.route("r4", v.pops, map[string]string{"r1": "r1", "r2": "r2", "r3": "r2", "r5": "r2", "r6": "r2"})
			w.route("r5", v.pops, map[string]string{"r6": "r6", "r3": "r3", "r2": "r3", "r4": "r3", "r1": "r3"})
			for _, n := range w.nodes() {
				if n != "r4" && n != "r5" {
					must(t, w.StartAgent(soon(t), n))
				}
			}
			for _, c := range []struct {
				chain string
				ipv4  bool
			}{{"web4", true}, {"web6", false}} {
				w.ipv4 = c.ipv4
				since, back := w.counting(w.path(c.chain, model.Forward)), w.counting(w.path(c.chain, model.Reverse))
				w.reaches("h1", "h2")
				w.reaches("h2", "h1")
				const size = 1_000_000
				r := w.download("h1", "h2", size)
				there, andBack := since().frames(), back().frames()
				t.Logf("%s: %.2f Gb/s, %d frames were stamped and verified forward, %d back", c.chain, gigabits(r), there, andBack)
				if least := uint64(size / 1500); there+andBack < least {
					t.Errorf("%s: %d frames; want %d or more", c.chain, there+andBack, least)
				}
			}
		})
	}
}

// route makes a node without an agent an MPLS router of the kernel's: of labels of nodes, by the
// neighbour that leads to each.
func (w *world) route(router string, pops bool, by map[string]string) {
	w.t.Helper()
	n := w.net(router)
	must(w.t, n.SetSysctl("net/mpls/platform_labels", "20000"))
	nodes := map[string]*model.NodeMPLS{}
	for _, m := range w.manifest.Domain.Nodes {
		nodes[m.Name] = m.MPLS
		if m.Name == router {
			for _, i := range m.Interfaces {
				must(w.t, n.SetSysctl("net/mpls/conf/"+i.Name+"/input", "1"))
			}
		}
	}
	for to, neighbour := range by {
		args := []string{"ip", "-f", "mpls", "route", "add", fmt.Sprint(nodes[to].Label)}
		if !pops || to != neighbour {
			args = append(args, "as", fmt.Sprint(nodes[to].Label))
		}
		w.shell(router, append(args, "via", "inet", nodes[neighbour].Address.String(), "dev", router+"-"+neighbour)...)
	}
}
