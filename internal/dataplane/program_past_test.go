package dataplane

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
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
