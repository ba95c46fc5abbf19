package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/test/packets"
)

// advertisement is a neighbour advertisement that nobody has asked for (RFC 4861
// 4.4): that address is at that link-layer address.
func advertisement(t *testing.T, of netip.Addr, at [6]byte) []byte {
	t.Helper()
	const length = 32
	h := srv6.Header{NextHeader: 58, HopLimit: 255, Source: of, Destination: addr("ff02::1"), PayloadLength: length}
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
	w := newWire(t, nil)
	neighbours := func() (found []string) {
		w.must(w.do(func() error {
			in, err := netlink.LinkByName("in")
			if err != nil {
				return err
			}
			all, err := netlink.NeighList(in.Attrs().Index, unix.AF_INET6)
			for _, n := range all {
				if n.IP.Equal(addr("fe80::bad").AsSlice()) {
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
			IP: addr("fe80::bad").AsSlice(), HardwareAddr: []byte{2, 1, 1, 1, 1, 1},
		})
	}))
	before := neighbours()
	forged := frameOf(outerOf(1, 2, model.SchemeKeyed, 5, advertisement(t, addr("fe80::bad"), [6]byte{2, 0xb, 0xa, 0xd, 0, 0})))
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
	w := newWire(t, func(n *plan.Node) {
		h := headendOf(1, 0, model.SchemeKeyed, model.Match{Destination: prefix("2001:db8:1::/48")}, 1)
		h.Segments = []netip.Addr{ownSID(2), otherSID(9)}
		n.Headends = []plan.Headend{h}
		for i := range n.Endpoints {
			n.Endpoints[i].Sources = []netip.Addr{n.Address, testSources[0]}
		}
	})
	// As if another node had been the headend: about that one's packets the kernel
	// is asked.
	heads := map[uint32]headend{}
	w.must(readMap(w.d.gen, tableHeadends, heads))
	for i, h := range heads {
		if h.OuterLen != 0 {
			copy(h.Outer[8:], testSources[0].AsSlice())
			w.must(w.d.gen.maps[tableHeadends].Put(i, h))
		}
	}
	w.sendSuper("out", ether(tcp(2500)), 54, 1000)
	// As long as it fits.
	if p, err := srv6.Decode(w.receive()); err != nil || p.SRH == nil || len(p.Payload) != 2560 {
		t.Fatalf("%d bytes, %v", len(p.Payload), err)
	}
	w.must(w.net.SetMTU("next", 1280))
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
