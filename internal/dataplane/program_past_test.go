package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// advertisement is a neighbour advertisement that nobody has asked for (RFC 4861
// 4.4): that address is at that link-layer address.
func advertisement(t *testing.T, of netip.Addr, at [6]byte) []byte {
	t.Helper()
	const length = 32
	h := srv6.Header{NextHeader: 58, HopLimit: 255, Source: of, Destination: xtest.Addr("ff02::1"), PayloadLength: length}
	b, err := h.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	body := make([]byte, length)
	body[0], body[4] = 136, 0x20 // override
	copy(body[8:], of.AsSlice())
	body[24], body[25] = 2, 1 // target link-layer address, in units of 8 bytes
	copy(body[26:], at[:])
	// RFC 8200 8.1: addresses, length and next header.
	binary.BigEndian.PutUint16(body[2:], sumOf(slices.Concat(b[8:40], []byte{0, 0, 0, length, 0, 0, 0, 58}, body)))
	return append(b, body...)
}

// A function in the node's own kernel gets no packet that the kernel would take for
// one of the link that it came by.
func TestNeighbourDiscoveryReachesNoLocalFunction(t *testing.T) {
	t.Parallel()
	w := newWire(t, nil)
	neighbours := func() (found []string) {
		w.must(w.do(func() error {
			in, err := netlink.LinkByName("in")
			if err != nil {
				return err
			}
			all, err := netlink.NeighList(in.Attrs().Index, unix.AF_INET6)
			for _, n := range all {
				if n.IP.Equal(xtest.Addr("fe80::bad").AsSlice()) {
					found = append(found, n.HardwareAddr.String())
				}
			}
			return err
		}))
		return found
	}
	// The neighbour is known: only then is such a message listened to.
	w.must(w.do(func() error {
		in, err := netlink.LinkByName("in")
		if err != nil {
			return err
		}
		return netlink.NeighAdd(&netlink.Neigh{
			LinkIndex: in.Attrs().Index, Family: unix.AF_INET6, State: netlink.NUD_STALE,
			IP: xtest.Addr("fe80::bad").AsSlice(), HardwareAddr: []byte{2, 1, 1, 1, 1, 1},
		})
	}))
	before := neighbours()
	forged := frameOf(outerOf(1, 2, model.SchemeKeyed, 5, advertisement(t, xtest.Addr("fe80::bad"), [6]byte{2, 0xb, 0xa, 0xd, 0, 0})))
	w.send("in", forged)
	// What comes behind it has been worked on later.
	w.send("in", frameOf(outerOf(1, 2, model.SchemeKeyed, 6, udp(1))))
	w.receive()
	if after := neighbours(); !slices.Equal(before, after) || len(after) != 1 {
		t.Errorf("fe80::bad was at %v, and now at %v", before, after)
	}
	w.refused(abi.ReasonInnerAddress, 1)
}

// A super-packet that a local function has let go gets its outer header where it
// leaves. If it is too long then, there is no kernel behind us to say so.
func TestSuperPacketOfALocalFunctionDoesNotLeaveTooLong(t *testing.T) {
	t.Parallel()
	w := newWire(t, func(n *plan.Node) {
		h := xtest.HeadendOf(1, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:1::/48")}, 1)
		h.Segments = []netip.Addr{xtest.OwnSID(2), xtest.OtherSID(9)}
		n.Headends = []plan.Headend{h}
		for i := range n.Endpoints {
			n.Endpoints[i].Sources = []netip.Addr{n.Address, xtest.Sources[0]}
		}
	})
	// As if another node had been the headend: about that one's packets the kernel
	// is asked.
	heads := map[uint32]abi.Headend{}
	w.must(readMap(w.d.gen, tables.MapHeadends, heads))
	for i, h := range heads {
		if h.OuterLen != 0 {
			copy(h.Outer[8:], xtest.Sources[0].AsSlice())
			w.must(w.d.gen.maps[tables.MapHeadends].Put(i, h))
		}
	}
	w.sendSuper("out", ether(tcp(2500)), 54, 1000)
	// As long as it fits.
	if p, err := srv6.Decode(w.receive()); err != nil || p.SRH == nil || len(p.Payload) != 2560 {
		t.Fatalf("%d bytes, %v", len(p.Payload), err)
	}
	w.must(w.net.SetMTU("next", 1280))
	// An agent that sees the link change makes void what is remembered of it.
	node, err := w.d.gen.node()
	w.must(err)
	w.must(w.d.gen.setNode(node))
	w.sendSuper("out", ether(tcp(3600)), 54, 1200)
	w.refused(abi.ReasonTooBig, 1)
}

// Connection tracking puts fragments together, and the kernel makes them anew: those
// have forgotten where they came in, also where a header is before the fragment's.
func TestFragmentsMadeAnewAreNotTheNodesOwn(t *testing.T) {
	l := newEdgeLive(t)
	l.must(l.rig.in(func() error {
		const ruleset = `add table ip6 t
			add chain ip6 t c { type filter hook prerouting priority 0; }
			add rule ip6 t c ct state new accept`
		out, err := exec.CommandContext(t.Context(), "nft", ruleset).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("nft: %w: %s", err, out)
		}
		return err
	}))
	p, err := packets.Load("edge-web")
	l.must(err)
	for _, c := range []struct {
		name    string
		options int // bytes of a hop-by-hop header before the Fragment header
	}{{"fragment", 0}, {"fragment behind options", 512}} {
		t.Run(c.name, func(t *testing.T) {
			l.must(l.freshEvents())
			for i := range 2 {
				if err := l.send("extra", fragmentOf(t, p.Frame, c.options, i), 0); err != nil {
					t.Fatal(err)
				}
			}
			e, err := l.nextEvent()
			if err == nil && abi.Reason(e.Reason) != abi.ReasonUnverified {
				err = fmt.Errorf("refused for %s", abi.Reason(e.Reason))
			}
			since, err2 := l.counted()
			if err := errors.Join(err, err2); err != nil || len(since.dropped) == 0 {
				t.Errorf("refused %v, %v; want both fragments not to leave", since.dropped, err)
			}
		})
	}
}

// fragmentOf is the first or second fragment of a UDP packet between the addresses
// of a frame, the first with so many bytes of hop-by-hop options.
func fragmentOf(t *testing.T, frame []byte, options, i int) []byte {
	t.Helper()
	const half = 64
	udp := make([]byte, 2*half)
	binary.BigEndian.PutUint16(udp, 4242)
	binary.BigEndian.PutUint16(udp[2:], 53)
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	ip := frame[srv6.EthernetLen:]
	binary.BigEndian.PutUint16(udp[6:], sumOf(slices.Concat(ip[8:40], []byte{0, 0, 0, byte(len(udp)), 0, 0, 0, 17}, udp)))

	head := make([]byte, 8) // RFC 8200 4.5
	head[0] = 17
	binary.BigEndian.PutUint32(head[4:], uint32(4711+options))
	next := uint8(44)
	if i == 0 {
		head[3] = 1 // more
	} else {
		binary.BigEndian.PutUint16(head[2:], half)
	}
	if options > 0 && i == 0 {
		hop := make([]byte, options)
		hop[0], hop[1] = next, uint8(options/8-1)
		for at := 2; at < options; at += 2 + int(hop[at+1]) {
			// For experiments, and skipped by who does not know it (RFC 4727 3.2).
			hop[at], hop[at+1] = 0x1e, uint8(min(options-at-2, 250))
		}
		head, next = append(hop, head...), 0
	}
	h := srv6.Header{
		NextHeader: next, HopLimit: 64, PayloadLength: uint16(len(head) + half),
		Source: netip.AddrFrom16([16]byte(ip[8:24])), Destination: netip.AddrFrom16([16]byte(ip[24:40])),
	}
	b, err := h.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return framed(srv6.EtherTypeIPv6, slices.Concat(b, head, udp[half*i:half*i+half]))
}

// becomes gives a frame to the programs, which must do what the oracle does, and
// that must be this.
func (r *rig) becomes(f frame, want oracle.Verdict, reason oracle.Reason) (seen, error) {
	var s seen
	err := r.in(func() (err error) {
		s, err = r.check(f, &oracle.Labels{}, true)
		return err
	})
	if err == nil && (s.want.Verdict != want || s.want.Reason != reason) {
		err = fmt.Errorf("%s %s, want %s %s\n%s", s.want.Verdict, s.want.Reason, want, reason, layers(f.b))
	}
	return s, err
}

func frameNamed(t *testing.T, name string) []byte {
	t.Helper()
	p, err := packets.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return p.Frame
}

// grown is a frame whose IP packet has that many bytes.
func grown(b []byte, length int) []byte {
	b = slices.Concat(b, make([]byte, srv6.EthernetLen+length-len(b)))
	return edited(b, func(ip []byte) {
		if ip[0]>>4 == 6 {
			binary.BigEndian.PutUint16(ip[4:], uint16(length-srv6.IPv6Len))
			return
		}
		binary.BigEndian.PutUint16(ip[2:], uint16(length))
		summed(ip)
	})
}

// summed makes the checksum of an IPv4 header without options right.
func summed(ip []byte) {
	binary.BigEndian.PutUint16(ip[10:], 0)
	binary.BigEndian.PutUint16(ip[10:], sumOf(ip[:srv6.IPv4Len]))
}

// Whoever is inside can say that only 1280 bytes fit. That must not end what cannot
// be made smaller.
func TestForgedSizeStopsNoIPv6(t *testing.T) {
	r := newScapyRig(t, "r1")
	told := map[uint32]int{}
	for _, h := range r.node.Headends {
		told[h.Path] = 1280 - 120
	}
	r.must(r.tell(told))
	for _, c := range []struct {
		packet  string
		length  int
		verdict oracle.Verdict
		reason  oracle.Reason
	}{
		{"edge-web", 1161, oracle.Forward, ""},
		{"edge-web", 1280, oracle.Forward, ""},
		{"edge-web", 1281, oracle.Drop, oracle.PathMTU},
		{"edge-four", 1160, oracle.Forward, ""},
		{"edge-four", 1161, oracle.Drop, oracle.PathMTU},
	} {
		if _, err := r.becomes(frame{port: portEdge, b: grown(frameNamed(t, c.packet), c.length)}, c.verdict, c.reason); err != nil {
			t.Errorf("%s of %d bytes: %v", c.packet, c.length, err)
		}
	}
}

// consecutiveIPv4 is consecutive for the packets of "edge-four". leaves: the last
// segment is another node's.
func consecutiveIPv4(t *testing.T, leaves bool) plan.Node {
	n := consecutive(t, model.SchemeKeyed, 3)
	m := model.Match{Destination: xtest.Prefix("198.51.100.0/24")}
	n.Headends[0].Match, n.Headends[0].MTU, n.Egresses[0].Match = m, 0, m
	if leaves {
		n.Headends[0].Segments[2], n.Egresses = xtest.Addr("fc00:0:0:300::"), nil
	}
	return n
}

// Of a packet that this node has encapsulated and stamped, and that is too long for
// its way out, the sender is told, whichever version of IP it has.
func TestTooLongBehindAFunctionOfTheHeadendsOwn(t *testing.T) {
	const mtu = 1000
	r := newScapyRig(t, "r2", rigRoute{to: xtest.Prefix("fc00:0:0:300::/56"), mtu: mtu})
	n := consecutiveIPv4(t, true)
	r.must(r.apply(&n))
	outer := srv6.IPv6Len + srv6.SRHLen + 3*srv6.SegmentLen + srv6.ProofLen
	b := frameNamed(t, "edge-four")
	if _, err := r.becomes(frame{port: portEdge, b: grown(b, mtu-outer)}, oracle.Forward, ""); err != nil {
		t.Error(err)
	}
	s, err := r.becomes(frame{port: portEdge, b: grown(b, mtu-outer+1)}, oracle.Drop, oracle.TooBig)
	if err != nil {
		t.Fatal(err)
	}
	// RFC 792 and 1191: fragmentation needed, and the size.
	e := s.want.Error
	if len(e) < 28 || e[0]>>4 != 4 || e[20] != 3 || e[21] != 4 || int(binary.BigEndian.Uint32(e[24:])) != mtu-outer {
		t.Errorf("told %x, want a size of %d", e, mtu-outer)
	}
}

// Of IPv6 the kernel forwards if the node does, whatever the interface is set to. So
// where the plan was told wrongly that an address is the node's own, the interface's
// word lets nothing past the guard.
func TestInterfaceThatDoesNotForwardIsNoWayPastTheGuard(t *testing.T) {
	n := scapyNode(t, "r6")
	r := newRig(t, rigSpec{
		name: "r6", block: n.Block, locator: n.Locator, address: n.Address, own: n.Local, moved: []netip.Addr{xtest.Addr("fc00:8::2")},
	})
	r.must(r.apply(&n.Node))
	b := frameNamed(t, "edge-web")
	for _, forwarding := range []string{"1", "0"} {
		r.must(r.in(func() error {
			err := os.WriteFile("/proc/sys/net/ipv6/conf/"+portCore+"/forwarding", []byte(forwarding), 0)
			if err != nil {
				return err
			}
			got, err := r.runTC(frame{port: portCore, b: b})
			if err != nil {
				return err
			}
			since, err := r.counted()
			if err != nil || got.verdict != tcDrop || !slices.Equal(since.dropped, []string{string(oracle.Unproven)}) {
				t.Errorf("forwarding %s: verdict %d, refused %v, %v; want %s", forwarding, int32(got.verdict), since.dropped, err, oracle.Unproven)
			}
			return nil
		}))
	}
}

// What the kernel puts together has the index of its first fragment, which says that
// it was verified. So no fragment goes up to be cut further.
func TestVerifiedFragmentDoesNotGoUp(t *testing.T) {
	r := newScapyRig(t, "r2", rigRoute{to: xtest.Prefix("198.51.100.0/24"), mtu: 400})
	n := consecutiveIPv4(t, false)
	r.must(r.apply(&n))
	b := grown(frameNamed(t, "edge-four"), 500)
	for _, c := range []struct {
		name    string
		field   uint16 // of flags and offset
		verdict oracle.Verdict
		reason  oracle.Reason
		told    bool
	}{
		{"no fragment", 0, oracle.Deliver, "", false},
		{"first fragment", 0x2000, oracle.Drop, oracle.TooBig, true},
		{"middle", 0x2040, oracle.Drop, oracle.TooBig, false},
		{"last fragment", 0x0040, oracle.Drop, oracle.TooBig, false},
	} {
		f := edited(b, func(ip []byte) { binary.BigEndian.PutUint16(ip[6:], c.field); summed(ip) })
		s, err := r.becomes(frame{port: portEdge, b: f}, c.verdict, c.reason)
		if err == nil && (s.want.Error != nil) != c.told {
			err = fmt.Errorf("its sender is told: %t", s.want.Error != nil)
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// The kernel acts on a routing header behind an atomic fragment's header (RFC 6946).
func TestFragmentHeaderHidesNoSRH(t *testing.T) {
	behind := func(b []byte, field uint16) []byte {
		ip := b[srv6.EthernetLen:]
		head := []byte{ip[6], 0, byte(field >> 8), byte(field), 0, 0, 0, 1}
		b = slices.Concat(b[:srv6.EthernetLen+srv6.IPv6Len], head, b[srv6.EthernetLen+srv6.IPv6Len:])
		return edited(b, func(ip []byte) {
			ip[6] = 44
			binary.BigEndian.PutUint16(ip[4:], binary.BigEndian.Uint16(ip[4:])+8)
		})
	}
	r1, r6 := newScapyRig(t, "r1"), newScapyRig(t, "r6")
	for _, c := range []struct {
		name     string
		b        []byte
		in, out  oracle.Reason
		inbounds oracle.Verdict
	}{
		{"SRH", behind(frameNamed(t, "outside-srh"), 0), oracle.OutsideSRH, oracle.LeakSRH, oracle.Drop},
		{"SRH in a first fragment", behind(frameNamed(t, "outside-srh"), 1), oracle.OutsideSRH, oracle.LeakSRH, oracle.Drop},
		{"SRH behind two", behind(behind(frameNamed(t, "outside-srh"), 0), 0), oracle.OutsideSRH, oracle.LeakSRH, oracle.Drop},
		{"UDP", behind(frameNamed(t, "edge-web"), 1), "", "", oracle.Forward},
		{"later fragment", behind(frameNamed(t, "edge-web"), 64), "", "", oracle.Forward},
	} {
		if _, err := r1.becomes(frame{port: portEdge, b: c.b}, c.inbounds, c.in); err != nil {
			t.Errorf("%s, from outside: %v", c.name, err)
		}
		r6.must(r6.in(func() error {
			got, _, err := r6.checkLeaves(frame{b: c.b}, oracle.Departure{From: oracle.FromPlan, Index: true})
			if err != nil || got != c.out {
				t.Errorf("%s, on its way out: %q, want %q, %v", c.name, got, c.out, err)
			}
			return nil
		}))
	}
}

// RFC 4291 2.5.2 and 2.5.3: no router forwards these, in a tunnel or out of one.
func TestUnspecifiedAndLoopbackAddressesTakeNoChain(t *testing.T) {
	r1, r6 := newScapyRig(t, "r1"), newScapyRig(t, "r6")
	inner := srv6.IPv6Len + srv6.SRHLen + 3*srv6.SegmentLen + srv6.ProofLen
	for _, a := range []string{"::", "::1"} {
		for name, at := range map[string]int{"source": 8, "destination": 24} {
			as := func(off int) func(ip []byte) {
				return func(ip []byte) { copy(ip[off+at:], xtest.Addr(a).AsSlice()) }
			}
			if _, err := r1.becomes(frame{port: portEdge, b: edited(frameNamed(t, "edge-web"), as(0))}, oracle.Pass, ""); err != nil {
				t.Errorf("%s %s: %v", name, a, err)
			}
			if _, err := r6.becomes(frame{port: portCore, b: edited(frameNamed(t, "web-3"), as(inner))}, oracle.Drop, oracle.WrongChain); err != nil {
				t.Errorf("inner %s %s: %v", name, a, err)
			}
		}
	}
}

// A header that says more than there is would be believed behind the tunnel, where
// the kernel would have dropped it before.
func TestIPv6PacketShorterThanItSaysTakesNoChain(t *testing.T) {
	r := newScapyRig(t, "r1")
	b := frameNamed(t, "edge-web")
	for _, more := range []uint16{0, 1, 1000} {
		f := edited(b, func(ip []byte) { binary.BigEndian.PutUint16(ip[4:], binary.BigEndian.Uint16(ip[4:])+more) })
		verdict, reason := oracle.Forward, oracle.Reason("")
		if more > 0 {
			verdict, reason = oracle.Drop, oracle.IP6Length
		}
		if _, err := r.becomes(frame{port: portEdge, b: f}, verdict, reason); err != nil {
			t.Errorf("%d bytes more: %v", more, err)
		}
	}
}

// A verifier entry without keys, which no plan makes, verifies nothing: not the tag
// that no key has been put into.
func TestNoKeysVerifyNothing(t *testing.T) {
	r := newScapyRig(t, "r6")
	k := abi.EgressKey{Path: abi.BE32(0x5eed0001), Epoch: 1}
	e := r.have.Egresses[k]
	tag := srv6.IPv6Len + srv6.SRHLen + 3*srv6.SegmentLen + 16
	zero := edited(frameNamed(t, "web-3"), func(ip []byte) { clear(ip[tag : tag+8]) })
	for _, keys := range []uint8{0, e.Keys - 1} {
		e.Keys = keys
		r.must(r.d.run(r.g, []tables.Op{{Table: tables.MapEgresses, Key: &k, Value: &e}}))
		r.must(r.in(func() error {
			for name, run := range map[string]func(frame) (outcome, error){"TC": r.runTC, "XDP": r.runXDP} {
				got, err := run(frame{port: portCore, b: zero})
				if err != nil {
					return err
				}
				since, err := r.counted()
				if err != nil || !slices.Equal(since.dropped, []string{string(oracle.Proof)}) {
					t.Errorf("%d keys, %s: verdict %d, refused %v, %v; want %s", keys, name, got.verdict, since.dropped, err, oracle.Proof)
				}
			}
			return nil
		}))
	}
}

// Where a chain by ports and one by prefixes take packets to the same place, who
// cuts packets to pieces, or hides their ports behind long headers, must not get
// into the other chain by that.
func TestWhoHidesPortsDoesNotChooseTheChain(t *testing.T) {
	r := newScapyRig(t, "r2", rigRoute{to: xtest.Prefix("fc00:0:0:300::/56"), mtu: 9000})
	n := consecutive(t, model.SchemeKeyed, 1)
	n.Headends[0].Segments, n.Endpoints, n.Egresses = []netip.Addr{xtest.Addr("fc00:0:0:300::")}, nil, nil
	by := n.Headends[0]
	by.Path, by.Chain = 8, "web"
	by.Match.Priority, by.Match.Protocol, by.Match.DestinationPort = 10, 6, model.Ports{First: 443, Last: 443}
	n.Headends = append(n.Headends, by)
	r.must(r.apply(&n))

	whole := tcpPacket(t, "fc00:8::2", 100) // to port 80
	eth, segment := whole[:14], whole[14:]
	// behind is the packet behind extension headers, the first of which is of that type.
	behind := func(first byte, headers []byte) []byte {
		b := slices.Concat(segment[:srv6.IPv6Len], headers, segment[srv6.IPv6Len:])
		b[6] = first
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-srv6.IPv6Len))
		return b
	}
	fragment := func(protocol byte, bits uint16) []byte {
		return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16([]byte{protocol, 0}, bits), 7)
	}
	options := func(next byte, units int) []byte { // an option of units times 8 octets
		return append([]byte{next, byte(units - 1), 0x1e, byte(8*units - 4)}, make([]byte, 8*units-4)...)
	}
	for _, c := range []struct {
		name   string
		packet []byte
		want   oracle.Verdict
		reason oracle.Reason
	}{
		{"whole", segment, oracle.Forward, ""},
		{"first fragment", behind(44, fragment(6, 1)), oracle.Drop, oracle.PortsUnread},
		{"last fragment", behind(44, fragment(6, 2<<3)), oracle.Drop, oracle.PortsUnread},
		{"atomic fragment", behind(44, fragment(6, 0)), oracle.Drop, oracle.PortsUnread},
		{"fragment of another protocol", behind(44, fragment(17, 1)), oracle.Forward, ""},
		{"options that are passed over", behind(60, options(6, 2)), oracle.Forward, ""},
		{"options too long for that", behind(60, options(6, 40)), oracle.Drop, oracle.PortsUnread},
	} {
		if _, err := r.becomes(frame{port: portEdge, b: slices.Concat(eth, c.packet)}, c.want, c.reason); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
