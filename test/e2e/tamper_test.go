package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// All links of the domain meet at m, a router in somebody else's hands:
//
//	h1 --- r1            r6 --- h2    chain web (drop):   to h2 by fw, dpi, and back
//	         \          /  \
//	          ---- m ---    --- h3    chain db (report):  to h3 by dpi, and back
//	         /          \
//	    r2 (fw)        r3 (dpi)
const star = `
version: 1
domain: {block: "fc00::/48"}
nodes:
  - name: r1
    address: fc00:1::1
    locator: fc00:0:0:100::/56
    interfaces: [{name: r1-h1, role: edge}, {name: r1-m, role: core, mtu: 1700}]
  - name: r2
    address: fc00:2::1
    locator: fc00:0:0:200::/56
    interfaces: [{name: r2-m, role: core, mtu: 1700}]
  - name: r3
    address: fc00:3::1
    locator: fc00:0:0:300::/56
    interfaces: [{name: r3-m, role: core, mtu: 1700}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    interfaces: [{name: r6-h2, role: edge}, {name: r6-h3, role: edge}, {name: r6-m, role: core, mtu: 1700}]
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
  - name: db
    ingress: [r1]
    functions: [dpi]
    egress: r6
    match: {destination: "fc00:9::/64"}
    direction: both
    proof: {scheme: keyed, on-violation: report}
lab:
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64"}
    - {name: h2, node: r6, prefix: "fc00:8::/64"}
    - {name: h3, node: r6, prefix: "fc00:9::/64"}
  routers:
    - {name: m, address: "fc00:4::1"}
  links:
    - {between: [r1, m]}
    - {between: [m, r2]}
    - {between: [m, r3]}
    - {between: [m, r6]}
`

// probes is how many packets each scene sends.
const probes = 3

// scene is one way to tamper with packets of chain web on their way to h2.
type scene struct {
	name   string
	tamper func(w *world, web plan.Path) tamper
	node   string // that refuses, and why
	reason string
	says   func(w *world, web plan.Path) string
	only   model.Scheme // 0: all, since pot is not played
}

// between is a place on chain web: packets that a node has sent, on their way to
// the segment at which so many are left.
func between(from string, left uint8, do func(srv6.Packet) []srv6.Packet) func(*world, plan.Path) tamper {
	return func(_ *world, web plan.Path) tamper {
		return func(at string, p srv6.Packet) []srv6.Packet {
			if v, ok := p.Proof(); ok && v.Path == web.Path && at == from && p.SRH.SegmentsLeft == left {
				return do(p)
			}
			return []srv6.Packet{p}
		}
	}
}

func one(do func(srv6.Packet) srv6.Packet) func(srv6.Packet) []srv6.Packet {
	return func(p srv6.Packet) []srv6.Packet { return []srv6.Packet{do(p)} }
}

func edit(do func(*srv6.Proof)) func(srv6.Packet) []srv6.Packet {
	return one(func(p srv6.Packet) srv6.Packet { return p.WithProof(do) })
}

func fixed(s string) func(*world, plan.Path) string {
	return func(*world, plan.Path) string { return s }
}

func unknownPath(at string, web plan.Path) string {
	return fmt.Sprintf("the proof of a packet to %s names path 0x%08x, which no chain has; "+
		"this packet carries the stamps of chain web, while its proof names path 0x%08x", at, web.Path^1, web.Path^1)
}

func unknownEpoch(at string) func(*world, plan.Path) string {
	return fixed("the proof of a packet to " + at + " names epoch 2 of chain web; known here is epoch 1; " +
		"this packet carries the stamps of epoch 1 of chain web, while its proof names epoch 2" + planned)
}

// places stands for others at which a changed bit of CML would show the same.
// opot adds, so that with a chance of one half it is so of each.
func places(p plan.Path) string {
	if p.Scheme == model.SchemeOPoT {
		return "*"
	}
	return ""
}

const planned = "; its segment list is the planned one"

var scenes = []scene{
	{
		name: "a hop is skipped, the segment list left as it is",
		tamper: between("r1", 2, one(func(p srv6.Packet) srv6.Packet {
			return p.AtSegment(1)
		})),
		node: "r6", reason: "proof",
		says: fixed("r2 (fw) never stamped this packet" + planned),
	}, {
		name: "all hops are skipped, the segment list left as it is",
		tamper: between("r1", 2, one(func(p srv6.Packet) srv6.Packet {
			return p.AtSegment(0)
		})),
		node: "r6", reason: "proof",
		says: fixed("r2 (fw) and r3 (dpi) never stamped this packet" + planned),
	}, {
		name: "the hops are visited in the wrong order, the segment list left as it is",
		tamper: func(_ *world, web plan.Path) tamper {
			return func(from string, p srv6.Packet) []srv6.Packet {
				v, ok := p.Proof()
				if !ok || v.Path != web.Path {
					return []srv6.Packet{p}
				}
				switch {
				case from == "r1": // to r3 first
					p = p.AtSegment(1)
				case from == "r3": // then to r2
					p = p.AtSegment(2)
				case from == "r2":
					p = p.AtSegment(0)
				}
				return []srv6.Packet{p}
			}
		},
		node: "r6", reason: "proof",
		says: fixed("r3 (dpi) stamped this packet before r2 (fw)" + planned),
	}, {
		name: "a hop is visited twice",
		tamper: func(_ *world, web plan.Path) tamper {
			before := map[string]bool{} // by what is inside
			return func(from string, p srv6.Packet) []srv6.Packet {
				if v, ok := p.Proof(); ok && v.Path == web.Path && from == "r2" && !before[string(p.Payload)] {
					before[string(p.Payload)] = true
					p = p.AtSegment(2)
				}
				return []srv6.Packet{p}
			}
		},
		node: "r6", reason: "proof",
		says: fixed("r2 (fw) stamped this packet twice: the order is r1, r2 (fw), r2 (fw), r3 (dpi)" + planned),
	}, {
		name:   "a bit of CML flips on the last link",
		tamper: between("r3", 0, edit(func(v *srv6.Proof) { v.CML ^= 1 << 17 })),
		node:   "r6", reason: "proof",
		says: func(_ *world, web plan.Path) string {
			return "every hop of chain web stamped this packet in order, but bit 17 of its CML was changed " +
				places(web) + "between r3 (dpi) and r6" + planned
		},
	}, {
		name:   "a bit of RND flips before the first function",
		tamper: between("r1", 2, edit(func(v *srv6.Proof) { v.RND ^= 1 << 3 })),
		node:   "r6", reason: "proof",
		says: fixed("every hop of chain web stamped this packet in order, but bit 3 of its RND was changed between r1 and r2 (fw)" + planned),
	}, {
		name:   "another path is named on the last link",
		tamper: between("r3", 0, edit(func(v *srv6.Proof) { v.Path ^= 1 })),
		node:   "r6", reason: "unknown-path",
		says: func(_ *world, web plan.Path) string {
			return unknownPath("r6", web)
		},
	}, {
		name:   "another path is named on the first link",
		tamper: between("r1", 2, edit(func(v *srv6.Proof) { v.Path ^= 1 })),
		node:   "r2", reason: "unknown-path",
		says: func(_ *world, web plan.Path) string {
			return unknownPath("r2 (fw)", web)
		},
	}, {
		name:   "another epoch is named on the last link",
		tamper: between("r3", 0, edit(func(v *srv6.Proof) { v.Epoch++ })),
		node:   "r6", reason: "unknown-epoch",
		says: unknownEpoch("r6"),
	}, {
		name:   "another epoch is named on the first link",
		tamper: between("r1", 2, edit(func(v *srv6.Proof) { v.Epoch++ })),
		node:   "r2", reason: "unknown-epoch",
		says: unknownEpoch("r2 (fw)"),
	}, {
		name:   "the proof is downgraded to another scheme",
		tamper: between("r3", 0, edit(func(v *srv6.Proof) { v.Scheme = model.SchemePoT })),
		node:   "r6", reason: "scheme",
		says: func(_ *world, web plan.Path) string {
			return fmt.Sprintf("the proof of a packet to r6 says scheme pot, but chain web has %s; "+
				"every hop of chain web stamped this packet in order"+planned, web.Scheme)
		},
	}, {
		name: "the segment list is rewritten",
		tamper: between("r3", 0, one(func(p srv6.Packet) srv6.Packet {
			srh := *p.SRH
			srh.Segments = append([]netip.Addr(nil), srh.Segments...)
			srh.Segments[2] = netip.MustParseAddr("fc00:0:0:400::")
			p.SRH = &srh
			return p
		})),
		node: "r6", reason: "segments",
		says: fixed("every hop of chain web stamped this packet in order; its segment list says fc00:0:0:400::, r3 (dpi)"),
	}, {
		name: "the proof is around a packet of another chain",
		tamper: between("r3", 0, one(func(p srv6.Packet) srv6.Packet {
			return around(p, netip.MustParseAddr("fc00:9::2"))
		})),
		node: "r6", reason: "wrong-chain",
		says: fixed("a packet from fc00:7::2 to fc00:9::2 came with a proof of chain web, but chain db takes it; every hop of chain web stamped this packet in order"),
	}, {
		name: "the proof is around a packet of no chain",
		tamper: between("r3", 0, one(func(p srv6.Packet) srv6.Packet {
			return around(p, netip.MustParseAddr("fc00:6::1"))
		})),
		node: "r6", reason: "wrong-chain",
		says: fixed("a packet from fc00:7::2 to fc00:6::1 came with a proof of chain web, but no chain that ends there takes it; every hop of chain web stamped this packet in order"),
	}, {
		name: "the proof is taken off",
		tamper: between("r3", 0, one(func(p srv6.Packet) srv6.Packet {
			srh := *p.SRH
			srh.TLVs = nil
			p.SRH = &srh
			return p
		})),
		node: "r6", reason: "tlv-missing",
		says: fixed("a packet from fc00:1::1 to r6 was refused: there is no proof TLV"),
	}, {
		name: "the outer header is taken off",
		tamper: between("r3", 0, one(func(p srv6.Packet) srv6.Packet {
			inner, err := srv6.Decode(p.Payload)
			if err != nil {
				panic(err)
			}
			return inner
		})),
		node: "r6", reason: "unproven",
		says: fixed("a packet from fc00:7::2 to fc00:8::2, which chain web requires, came without proof"),
	}, {
		name: "the prime is added to CML",
		tamper: func(w *world, web plan.Path) tamper {
			// Somebody who knows the secrets could: a verifier takes one form only.
			share := web.Shares[len(web.Shares)-1].Polynomial
			return between("r3", 0, edit(func(v *srv6.Proof) {
				v.CML = (v.CML ^ share.Up.CML) + share.Prime ^ share.Up.CML
			}))(w, web)
		},
		node: "r6", reason: "range",
		says: fixed("every hop of chain web stamped this packet in order, but its CML is the prime more than what was sent" + planned),
		only: model.SchemeOPoT,
	},
}

// around puts a packet to another destination behind the headers of p.
func around(p srv6.Packet, to netip.Addr) srv6.Packet {
	inner, err := srv6.Decode(p.Payload)
	if err != nil {
		panic(err)
	}
	inner.Header.Destination = to
	if p.Payload, err = inner.Append(nil); err != nil {
		panic(err)
	}
	return p
}

// Whoever sits in the middle of the domain, knows no secrets and rewrites what
// he likes gets nothing through, and it is told what he did.
func TestNothingTamperedWithGetsThrough(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		scheme model.Scheme
		hook   string // that judges proofs
	}{{model.SchemeKeyed, "tc"}, {model.SchemeOPoT, "tc"}, {model.SchemeKeyed, "xdp"}, {model.SchemeOPoT, "xdp"}} {
		t.Run(c.scheme.String()+" at "+c.hook, func(t *testing.T) {
			t.Parallel()
			d := model.DatapathTC
			if c.hook == "xdp" {
				d = model.DatapathXDP
			}
			w := borrow(t, star, proven(c.scheme), datapath(d))
			for _, l := range [][2]string{{"h1", "h1-r1"}, {"h2", "h2-r6"}, {"h3", "h3-r6"}, {"m", "m-r1"}, {"m", "m-r2"}, {"m", "m-r3"}, {"m", "m-r6"}} {
				must(t, w.net(l[0]).SetOffload(l[1], host.GRO, c.hook == "xdp")) // else it takes no redirects
			}
			m := w.meddle("m")
			w.reaches("h1", "h2") // he is honest yet
			w.reaches("h1", "h3")
			for _, sc := range scenes {
				if sc.only == 0 || sc.only == c.scheme {
					t.Run(sc.name, func(t *testing.T) { sc.play(w.in(t), m, c.hook) })
				}
			}
			w.reaches("h1", "h2") // and it does not last
		})
	}
}

// play tampers, and looks at who refuses it and what is told of it.
func (sc scene) play(w *world, m *meddler, hook string) {
	web := w.path("web", model.Forward)
	since := time.Now()
	m.with(sc.tamper(w, web), func() { w.isCutOff("h1", "h2", probes) })
	w.refused(sc.node, sc.reason, probes)
	e := w.event(since, sc.node, sc.reason)
	w.explained(e, sc.says(w, web))
	// XDP refuses what fails its proof, and leaves all else that is odd to TC.
	if !slices.Contains([]string{"proof", "range", "segments"}, sc.reason) {
		hook = "tc"
	}
	if e.Hook != hook {
		w.t.Errorf("refused at %s, want %s", e.Hook, hook)
	}
}

// With on-violation: report a packet whose proof fails is let through, counted
// and told. What opens another chain, or has no proof, is not.
func TestAReportingChainLetsViolationsThrough(t *testing.T) {
	t.Parallel()
	bothSchemes(t, func(t *testing.T, s model.Scheme) {
		w := borrow(t, star, proven(s))
		db := w.path("db", model.Forward)
		m := w.meddle("m")
		last := func(do func(srv6.Packet) srv6.Packet) tamper {
			return func(from string, p srv6.Packet) []srv6.Packet {
				if v, ok := p.Proof(); ok && v.Path == db.Path && from == "r3" {
					p = do(p)
				}
				return []srv6.Packet{p}
			}
		}
		flip := last(func(p srv6.Packet) srv6.Packet {
			return p.WithProof(func(v *srv6.Proof) { v.CML ^= 1 << 40 })
		})
		for _, c := range []struct {
			reason string
			tamper tamper
			says   string
		}{
			{"proof", flip, "every hop of chain db stamped this packet in order, but bit 40 of its CML was changed " +
				places(db) + "between r3 (dpi) and r6" + planned},
			{"segments", last(func(p srv6.Packet) srv6.Packet {
				srh := *p.SRH
				srh.Segments = append([]netip.Addr(nil), srh.Segments...)
				srh.Segments[1] = netip.MustParseAddr("fc00:0:0:400::")
				p.SRH = &srh
				return p
			}), "every hop of chain db stamped this packet in order; its segment list says fc00:0:0:400::"},
		} {
			since := time.Now()
			verified := w.counting(db)
			m.with(c.tamper, func() { w.reaches("h1", "h3") })
			w.reported("r6", c.reason, 5)
			e := w.event(since, "r6", c.reason)
			if !e.Reported {
				t.Errorf("the event of reason %s does not say that it was reported only", c.reason)
			}
			w.explained(e, c.says)
			if n := verified().frames(); n != 5 {
				t.Errorf("%s: %d frames went all the way, want 5", c.reason, n)
			}
		}
		for _, c := range []struct {
			reason string
			tamper tamper
		}{
			{"wrong-chain", last(func(p srv6.Packet) srv6.Packet { return around(p, w.addr("h2")) })},
			{"unknown-epoch", last(func(p srv6.Packet) srv6.Packet {
				return p.WithProof(func(v *srv6.Proof) { v.Epoch++ })
			})},
			{"unproven", last(func(p srv6.Packet) srv6.Packet {
				inner, err := srv6.Decode(p.Payload)
				if err != nil {
					panic(err)
				}
				return inner
			})},
		} {
			m.with(c.tamper, func() { w.isCutOff("h1", "h3", probes) })
			w.refused("r6", c.reason, probes)
		}
	})
}

// Over labels no segment list is in the packet: the stamps alone say what was done to it.
func TestAReportingChainLetsViolationsOverLabelsThrough(t *testing.T) {
	t.Parallel()
	w := borrow(t, star, overLabels)
	db := w.path("db", model.Forward)
	m := w.meddle("m")
	last := func(do func(mpls.Packet) lab.Sent) func(string, mpls.Packet) lab.Sent {
		return func(from string, p mpls.Packet) lab.Sent {
			if v, ok := proofOf(p); ok && v.Path == db.Path && from == "r3" {
				return do(p)
			}
			return labelled(p)
		}
	}
	proof := func(change func(*srv6.Proof)) func(mpls.Packet) lab.Sent {
		return func(p mpls.Packet) lab.Sent {
			v, _ := proofOf(p)
			change(&v)
			p.Proof = new(v.Bytes())
			return labelled(p)
		}
	}
	since := time.Now()
	verified := w.counting(db)
	m.withLabels(last(proof(func(v *srv6.Proof) { v.CML ^= 1 << 40 })), func() { w.reaches("h1", "h3") })
	w.reported("r6", "proof", 5)
	e := w.event(since, "r6", "proof")
	if !e.Reported {
		t.Error("the event does not say that it was reported only")
	}
	w.explained(e, "every hop of chain db stamped this packet in order, but bit 40 of its CML was changed between r3 (dpi) and r6; its labels say r6")
	if n := verified().frames(); n != 5 {
		t.Errorf("%d frames went all the way, want 5", n)
	}
	inner := func(p mpls.Packet, change func(*srv6.Packet)) []byte {
		v, err := srv6.Decode(p.Payload)
		must(t, err)
		change(&v)
		b, err := v.Append(nil)
		must(t, err)
		return b
	}
	for _, c := range []struct {
		reason string
		tamper func(mpls.Packet) lab.Sent
	}{
		{"wrong-chain", func(p mpls.Packet) lab.Sent {
			p.Payload = inner(p, func(v *srv6.Packet) { v.Header.Destination = w.addr("h2") })
			return labelled(p)
		}},
		{"unknown-epoch", proof(func(v *srv6.Proof) { v.Epoch++ })},
		{"unproven", func(p mpls.Packet) lab.Sent { return lab.Sent{Packet: inner(p, func(*srv6.Packet) {})} }},
	} {
		m.withLabels(last(c.tamper), func() { w.isCutOff("h1", "h3", probes) })
		w.refused("r6", c.reason, probes)
	}
}

// What is injected on a core link without a proof is refused where a chain
// requires one, and travels where none does.
func TestAPlainPacketOnACoreLinkIsRefused(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, plainPacketOnACoreLink)
}

func plainPacketOnACoreLink(t *testing.T, carried change) {
	w := borrow(t, star, carried)
	m := w.meddle("m")
	plain := func(to netip.Addr) srv6.Packet {
		return srv6.Packet{
			Header:  srv6.Header{NextHeader: unix.IPPROTO_NONE, HopLimit: 9, Source: netip.MustParseAddr("fc00:7::66"), Destination: to},
			Payload: []byte("nothing"),
		}
	}
	since := time.Now()
	for range probes {
		m.send(plain(w.addr("h2")))
	}
	w.refused("r6", "unproven", probes)
	w.explained(w.event(since, "r6", "unproven"), "a packet from fc00:7::66 to fc00:8::2, which chain web requires, came without proof")
	// Answers need a proof too, at r1.
	back := plain(w.addr("h1"))
	back.Header.Source = w.addr("h3")
	since = time.Now()
	m.send(back)
	w.refused("r1", "unproven", 1)
	w.explained(w.event(since, "r1", "unproven"), "a packet from fc00:9::2 to fc00:7::2, which chain db (reverse) requires, came without proof")

	// From an address that no chain comes from: ordinary traffic. A SID without a
	// stamp is none.
	h1 := w.capture("h1", "h1-r1")
	back.Header.Source = netip.MustParseAddr("fc00:4::1")
	m.send(back)
	eventually(t, func() error {
		if n := h1.from(back.Header.Source); n != 1 {
			return fmt.Errorf("%d of 1 plain packets came to h1", n)
		}
		return nil
	})
	m.send(plain(w.path("web", model.Forward).Hops[1].SID))
	w.refused("r2", "no-srh", 1)
}

// Nothing of segment routing comes in from outside.
func TestOutsidersCannotUseTheDomain(t *testing.T) {
	t.Parallel()
	w := borrow(t, star)
	h1 := openPort(t, w.ns("h1"), "h1-r1", unix.ETH_P_IPV6)
	r1 := openPort(t, w.ns("r1"), "r1-h1", unix.ETH_P_IPV6)
	web := w.path("web", model.Forward)
	send := func(p srv6.Packet) {
		t.Helper()
		p.Ethernet = &srv6.Ethernet{Destination: r1.MAC, Source: h1.MAC, Type: srv6.EtherTypeIPv6}
		must(t, sendBy(h1, p))
	}
	header := func(to netip.Addr) srv6.Header {
		return srv6.Header{NextHeader: unix.IPPROTO_NONE, HopLimit: 64, Source: w.addr("h1"), Destination: to}
	}
	srh := func(left uint8) *srv6.SRH {
		return &srv6.SRH{NextHeader: srv6.NextHeaderIPv6, SegmentsLeft: left, Segments: srv6.Reversed(web.Segments())}
	}

	since := time.Now()
	for _, sid := range web.Segments() {
		send(srv6.Packet{Header: header(sid)})
	}
	// A stamped packet that an outsider has got hold of is no key either.
	w.reaches("h1", "h2")
	stolen := w.steal("r2", "r2-m", web)
	send(stolen)
	w.refused("r1", "outside-sid", 4)
	w.explained(w.event(since, "r1", "outside-sid"),
		"a packet from fc00:7::2 to r2 (fw) was refused: a packet from outside is addressed to the SID block")

	since = time.Now()
	send(srv6.Packet{Header: header(w.addr("h2")), SRH: srh(0)})
	send(srv6.Packet{Header: header(netip.MustParseAddr("fc00:1::1")), SRH: srh(1)})
	w.refused("r1", "outside-srh", 2)
	w.explained(w.event(since, "r1", "outside-srh"),
		"a packet from fc00:7::2 to fc00:8::2 was refused: a packet from outside carries a segment routing header")
	w.reaches("h1", "h2")
}

// steal returns a packet of a path as it came in by an interface, while somebody
// pings.
func (w *world) steal(node, name string, p plan.Path) (stolen srv6.Packet) {
	w.t.Helper()
	c := w.capture(node, name)
	w.reaches("h1", "h2")
	eventually(w.t, func() error {
		for _, pkt := range c.soFar() {
			if v, ok := pkt.Proof(); ok && v.Path == p.Path {
				stolen = pkt
				return nil
			}
		}
		return fmt.Errorf("no packet of chain %s came by at %s", p.Chain, name)
	})
	return stolen
}

// from counts the packets of a sender.
func (c *capture) from(a netip.Addr) (n int) {
	for _, p := range c.soFar() {
		if p.Header.Source == a {
			n++
		}
	}
	return n
}

// Events are a sample: of many refusals for one reason the first ones come, and
// how many were left out is told.
func TestAFloodIsCountedInFullAndToldInPart(t *testing.T) {
	t.Parallel()
	w := build(t, star)
	m := w.meddle("m")
	plain := func() {
		m.send(srv6.Packet{Header: srv6.Header{
			NextHeader: unix.IPPROTO_NONE, HopLimit: 9, Source: w.addr("h1"), Destination: w.addr("h2"),
		}})
	}
	const flood, burst = 1000, 250 // no queue on the way is as short
	for range flood / burst {
		for range burst {
			plain()
		}
		w.refused("r6", "unproven", burst)
	}
	// A packet of another second tells of those that were not.
	var told, left uint64
	eventually(t, func() error {
		pause(t, 100*time.Millisecond)
		plain()
		w.refused("r6", "unproven", 1)
		told, left = 0, 0
		for _, e := range w.events("r6") {
			told++
			left += uint64(e.Suppressed)
		}
		if left == 0 {
			return fmt.Errorf("%d events, and none of them tells of others", told)
		}
		return nil
	})
	if told >= flood {
		t.Errorf("%d of %d refusals were told one by one", told, flood)
	}
	if got, err := w.refusals(); err != nil || told+left > got[refusal{Node: "r6", Reason: "unproven"}] {
		t.Errorf("%d events tell of %d more, but %d were refused (%v)", told, left, got[refusal{Node: "r6", Reason: "unproven"}], err)
	}
}
