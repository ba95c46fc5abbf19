package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// wire is a node with real neighbours: a namespace "function", which forwards
// from "to" to "from", and a namespace behind "next" with everything else. What
// tests send comes in by "in" and "out".
type wire struct {
	*bed
	d       *Dataplane
	n       plan.Node
	fn      *host.Net
	world   *host.Net // behind next
	capture int       // packet socket at the end of next
}

func newWire(t *testing.T, edit func(*plan.Node)) *wire {
	t.Helper()
	return newWireBefore(t, func(*wire) {}, edit)
}

// before changes the devices before the plan is applied.
func newWireBefore(t *testing.T, before func(*wire), edit func(*plan.Node)) *wire {
	t.Helper()
	w := &wire{bed: newLonelyBed(t)}
	world := w.namespace()
	w.world, w.fn = world, w.namespace()
	for _, v := range []host.Veth{
		{Name: "next", PeerName: "next-peer", Peer: world.NetNS()},
		{Name: "to", PeerName: "to-peer", Peer: w.fn.NetNS()},
		{Name: "from", PeerName: "from-peer", Peer: w.fn.NetNS()},
	} {
		w.must(w.net.AddVeth(v))
	}
	to, back := tables.CutterPairs()
	for _, c := range []tables.CutterPair{to, back} {
		_, err := w.net.EnsureCutter(host.Cutter{In: c.In, Out: c.Out, Owner: "waystamp test"})
		w.must(err)
	}
	w.must(errors.Join(
		w.net.SetSysctl("net/ipv6/conf/all/forwarding", "1"), w.fn.SetSysctl("net/ipv6/conf/all/forwarding", "1"),
		w.net.AddAddress("next", xtest.Prefix("fd00:5::1/64")), world.AddAddress("next-peer", xtest.Prefix("fd00:5::2/64")),
		w.net.AddAddress("to", xtest.Prefix("fd00:6::1/64")), w.fn.AddAddress("to-peer", xtest.Prefix("fd00:6::2/64")),
		w.net.AddAddress("from", xtest.Prefix("fd00:7::1/64")), w.fn.AddAddress("from-peer", xtest.Prefix("fd00:7::2/64")),
		w.net.SetUp("next"), world.SetUp("next-peer"), w.net.SetUp("to"), w.fn.SetUp("to-peer"), w.net.SetUp("from"), w.fn.SetUp("from-peer"),
		w.net.AddRoute(host.Route{Destination: xtest.Prefix("fc00:0:0:200::/56"), Via: xtest.Addr("fd00:5::2"), Device: "next"}),
		w.net.AddRoute(host.Route{Destination: xtest.Prefix("2001:db8::/32"), Via: xtest.Addr("fd00:5::2"), Device: "next"}),
		w.fn.AddRoute(host.Route{Destination: xtest.Prefix("2001:db8::/32"), Via: xtest.Addr("fd00:7::1"), Device: "from-peer"}),
	))
	w.must(w.net.WaitUp(t.Context(), "next", "to", "from", "in"))
	w.must(world.WaitUp(t.Context(), "next-peer"))
	w.must(w.fn.WaitUp(t.Context(), "to-peer", "from-peer"))

	w.n = withLocalNAT(proxyNode())
	w.n.Interfaces = []model.Interface{{Name: "in", Role: model.RoleCore}, {Name: "next", Role: model.RoleCore}, {Name: "out", Role: model.RoleEdge}}
	w.n.Proxies[0].Via = xtest.Addr("fd00:6::2")
	if edit != nil {
		edit(&w.n)
	}
	before(w)
	w.d = w.open()
	w.must(w.apply(w.d, w.n))
	w.capture = w.socket(world, "next-peer", unix.ETH_P_IPV6)
	return w
}

func (w *wire) namespace() *host.Net {
	w.Helper()
	ns, err := host.Anonymous()
	w.must(err)
	w.Cleanup(func() { ns.Close() })
	n, err := host.Open(ns)
	w.must(err)
	w.Cleanup(func() { n.Close() })
	return n
}

func (w *wire) socket(n *host.Net, link string, proto uint16) int {
	w.Helper()
	l, err := n.Link(link)
	w.must(err)
	var fd int
	w.must(n.NetNS().Do(func() (err error) {
		network := proto<<8 | proto>>8
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(network)); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: network, Ifindex: l.Index})
	}))
	w.Cleanup(func() { unix.Close(fd) })
	return fd
}

// send puts a frame on the wire to an interface of the bed.
func (w *wire) send(at string, frame []byte) {
	w.Helper()
	fd := w.socket(w.net, at+"-peer", 0)
	l, err := w.net.Link(at)
	w.must(err)
	frame = slices.Clone(frame)
	copy(frame, l.MAC[:])
	_, err = unix.Write(fd, frame)
	w.must(err)
}

// sendSuper sends a super-packet: TCP, to be cut every size bytes of its payload.
// at: where in the frame the TCP header is.
func (w *wire) sendSuper(to string, frame []byte, at, size int) {
	w.Helper()
	fd := w.socket(w.net, to+"-peer", 0)
	w.must(unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1))
	l, err := w.net.Link(to)
	w.must(err)
	head := make([]byte, 10) // struct virtio_net_hdr
	head[0], head[1] = 1, 4  // checksum to be done, TCP over IPv6
	if frame[14]>>4 == 4 {
		head[1] = 1
	}
	if frame[at+13]&0x80 != 0 {
		head[1] |= 0x80 // CWR is set
	}
	binary.NativeEndian.PutUint16(head[2:], uint16(at+int(frame[at+12]>>4)*4))
	binary.NativeEndian.PutUint16(head[4:], uint16(size))
	binary.NativeEndian.PutUint16(head[6:], uint16(at))
	binary.NativeEndian.PutUint16(head[8:], 16)
	frame = slices.Clone(frame)
	copy(frame, l.MAC[:])
	_, err = unix.Write(fd, append(head, frame...))
	w.must(err)
}

// receive waits for the next packet of a chain, or to the chain's destination, at
// the other end of "next". Nil: none came in the time.
func (w *wire) receive() []byte {
	w.Helper()
	deadline := time.Now().Add(waitLimit)
	buf := make([]byte, 1<<16)
	for {
		left := time.Until(deadline)
		if left <= 0 {
			c, err := w.d.Counters()
			w.Fatalf("no packet came; counters %+v, %v", c, err)
		}
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(w.capture), Events: unix.POLLIN}}, int(left.Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			w.Fatal(err)
		}
		n, _, err := unix.Recvfrom(w.capture, buf, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			continue
		}
		w.must(err)
		if n < 54 {
			continue
		}
		if to := netip.AddrFrom16([16]byte(buf[38:54])); xtest.Prefix("fc00::/48").Contains(to) || xtest.Prefix("2001:db8::/32").Contains(to) {
			return slices.Clone(buf[14:n])
		}
	}
}

// refused waits until a reason has been counted n times.
func (w *wire) refused(reason abi.Reason, n uint64) {
	w.Helper()
	deadline := time.Now().Add(waitLimit)
	for {
		c, err := w.d.Counters()
		w.must(err)
		for _, r := range c.Refusals {
			if r.Reason == reason && r.Dropped == n {
				return
			}
		}
		if time.Now().After(deadline) {
			w.Fatalf("refusals %+v, functions %+v; want %d times %s", c.Refusals, c.Functions, n, reason)
		}
		unix.Poll(nil, 2)
	}
}

// forwarded is an inner packet behind a router.
func forwarded(inner []byte) []byte {
	out := slices.Clone(inner)
	out[7]--
	return out
}

func TestFunctionInANamespaceIsPassed(t *testing.T) {
	t.Parallel()
	for _, recognise := range []model.Recognise{model.RecogniseContent, model.RecogniseMetadata} {
		t.Run(recognise.String(), func(t *testing.T) {
			w := newWire(t, func(n *plan.Node) { n.Proxies[0].Recognise = recognise })
			for i := range 20 {
				p := outerOf(1, 1, model.SchemeKeyed, uint64(i), udp(byte(i)))
				if i%2 == 1 { // somebody has put options before its SRH
					p = optioned(p, 8*(i+1))
				}
				w.send("in", frameOf(p))
				if got, want := w.receive(), restored(t, p, xtest.Share(1, 1), forwarded(udp(byte(i)))); !bytes.Equal(got, want) {
					t.Fatalf("got\n%x, want\n%x", got, want)
				}
			}
			f, err := w.d.FunctionsInFlight()
			w.must(err)
			if f[0].RxSuccess != 20 || f[0].TxSuccess != 20 || *f[0].InFlight != 0 {
				t.Errorf("%+v", f[0])
			}
			// What the function sends of its own accord.
			w.must(w.fn.NetNS().Do(func() error { return sendUDP("fd00:7::2", "2001:db8:1:1::1") }))
			w.refused(abi.ReasonNotCached, 1)
		})
	}
}

func TestFunctionInTheNodesOwnKernelIsPassed(t *testing.T) {
	t.Parallel()
	w := newWire(t, func(n *plan.Node) {
		e := xtest.EgressOf(9, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:1::/48")}, xtest.OwnSID(5), 2)
		e.OnViolation = model.OnViolationReport
		n.Egresses = []plan.Egress{e}
	})
	for i := range 20 {
		p := outerOf(1, 2, model.SchemeKeyed, uint64(i), udp(byte(i)))
		if i%2 == 1 { // somebody has put options before its SRH
			p = optioned(p, 8*(i+1))
		}
		w.send("in", frameOf(p))
		if got, want := w.receive(), restored(t, p, xtest.Share(2, 9), forwarded(udp(byte(i)))); !bytes.Equal(got, want) {
			t.Fatalf("got\n%x, want\n%x", got, want)
		}
	}
	f, err := w.d.FunctionsInFlight()
	w.must(err)
	if f[1].Function != "nat" || f[1].RxSuccess != 20 || f[1].TxSuccess != 20 || *f[1].InFlight != 0 {
		t.Errorf("%+v", f[1])
	}
	// Without a header, it has lost it.
	w.must(w.do(func() error {
		if err := sendUDP("fd00:5::1", "2001:db8:1:1::1"); !errors.Is(err, unix.ENOBUFS) && err != nil {
			return err
		}
		return nil
	}))
	w.refused(abi.ReasonNotCached, 1)
	// What this node itself has verified needs none.
	p := outerOf(9, 5, model.SchemeKeyed, 1, udp(77))
	p.SRH.Segments, p.SRH.SegmentsLeft = []netip.Addr{xtest.OwnSID(5), xtest.OtherSID(1)}, 0
	w.must(p.Fix())
	w.send("in", frameOf(p))
	if got := w.receive(); !bytes.Equal(got, forwarded(udp(77))) {
		t.Errorf("got %x, want the inner packet", got)
	}
}

// A super-packet of IPv4 that a function gets whole goes back into an outer header, also where
// the kernel, which takes it for a tunnel's still, cannot be told that it becomes one of IPv6
// (Linux before 6.3). The node is its headend, so that it is one of a tunnel.
func TestSuperPacketOfIPv4GetsItsHeaderBack(t *testing.T) {
	t.Parallel()
	for _, old := range []bool{false, true} {
		t.Run(fmt.Sprintf("old kernel %t", old), func(t *testing.T) {
			match := model.Match{Destination: xtest.Prefix("198.51.100.0/24")}
			w := newWireBefore(t, func(w *wire) {
				w.cfg.noDecapL3 = old
				w.must(errors.Join(
					w.net.SetSysctl("net/ipv4/ip_forward", "1"),
					w.net.AddAddress("next", xtest.Prefix("192.0.2.1/24")), w.world.AddAddress("next-peer", xtest.Prefix("192.0.2.2/24")),
					w.net.AddRoute(host.Route{Destination: match.Destination, Via: xtest.Addr("192.0.2.2"), Device: "next"}),
					w.net.AddRoute(host.Route{Destination: xtest.Prefix("203.0.113.0/24"), Via: xtest.Addr("192.0.2.2"), Device: "next"}),
				))
			}, func(n *plan.Node) {
				h := xtest.HeadendOf(1, 0, model.SchemeKeyed, match, 1)
				h.Segments = []netip.Addr{xtest.OwnSID(2), xtest.OtherSID(1)}
				n.Headends = []plan.Headend{h}
				for i := range n.Endpoints {
					n.Endpoints[i].Sources = []netip.Addr{n.Address}
				}
				n.Proxies[1].Matches = append(n.Proxies[1].Matches, match)
			})
			const frames, size = 20, 1000
			w.sendSuper("out", tcpPacket4(t, "198.51.100.2", 64, frames*size), 14+srv6.IPv4Len, size)
			// A device may cut it behind the node.
			for got := 0; got < frames*size; {
				p, err := srv6.DecodeFrame(slices.Concat(make([]byte, 12), []byte{0x86, 0xdd}, w.receive()))
				w.must(err)
				inner, tcp, err := p.Inner()
				w.must(err)
				if inner.Version != 4 || inner.HopLimit != 62 || inner.Length != srv6.IPv4Len+len(tcp) || len(tcp) <= 20 {
					t.Fatalf("got %+v with %d bytes behind the IPv4 header", inner, len(tcp))
				}
				if !bytes.Equal(tcp[20:], tcpSegment(frames * size)[20:][got:got+len(tcp)-20]) {
					t.Fatalf("behind %d bytes, %d others", got, len(tcp)-20)
				}
				got += len(tcp) - 20
			}
			c, err := w.d.Counters()
			w.must(err)
			if f := c.Functions[1]; f.RxSuccess != 1 || f.TxSuccess != 1 {
				t.Errorf("%+v; want one packet each way", f)
			}
			for _, r := range c.Refusals {
				if r.Dropped != 0 {
					t.Errorf("%d packets are refused: %s", r.Dropped, r.Reason)
				}
			}
		})
	}
}

// A packet out of the node's own kernel that leaves by the interface of its next segment
// meets one program there, once the way is remembered: it is not sent to that interface
// anew. One that the kernel sends elsewhere is.
func TestLocalFunctionsPacketStaysOnItsWayOut(t *testing.T) {
	t.Parallel()
	w := newWire(t, nil)
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	w.must(err)
	defer stats.Close()
	number := 0
	pass := func() (runs uint64) {
		t.Helper()
		before, err := w.d.gen.programs[object.CoreOutTC].Stats()
		w.must(err)
		number++
		p := outerOf(1, 2, model.SchemeKeyed, uint64(number), udp(byte(number)))
		w.send("in", frameOf(p))
		if got, want := w.receive(), restored(t, p, xtest.Share(2, 9), forwarded(udp(byte(number)))); !bytes.Equal(got, want) {
			t.Fatalf("got\n%x, want\n%x", got, want)
		}
		after, err := w.d.gen.programs[object.CoreOutTC].Stats()
		w.must(err)
		return after.RunCount - before.RunCount
	}
	// Neighbour discovery and a way that has expired make it more.
	for tries := 0; pass() != 1; tries++ {
		if tries == 200 {
			t.Fatal("each packet is sent to the interface that it leaves by")
		}
	}
	w.must(w.do(func() error {
		in, err := netlink.LinkByName("in")
		if err != nil {
			return err
		}
		return netlink.NeighAdd(&netlink.Neigh{
			LinkIndex: in.Attrs().Index, Family: unix.AF_INET6, State: netlink.NUD_PERMANENT,
			IP: xtest.Addr("fe80::99").AsSlice(), HardwareAddr: []byte{2, 1, 1, 1, 1, 1},
		})
	}))
	w.must(w.net.AddRoute(host.Route{Destination: xtest.Prefix("2001:db8:1::/48"), Via: xtest.Addr("fe80::99"), Device: "in"}))
	for range 20 {
		if n := pass(); n < 2 {
			t.Errorf("a packet that the kernel sends elsewhere met %d programs, want one at either interface", n)
		}
	}
}

// The second segment is the node's own kernel; the first function's packets go
// there over the cutter, and back.
func TestTwoFunctionsOfANodeFollowOneAnother(t *testing.T) {
	t.Parallel()
	for _, order := range [][2]int{{1, 2}, {2, 1}} {
		w := newWire(t, nil)
		plain := outerOf(1, order[0], model.SchemeKeyed, 5, udp(1))
		plain.SRH.Segments = []netip.Addr{xtest.OtherSID(9), xtest.OwnSID(order[1]), xtest.OwnSID(order[0])}
		w.must(plain.Fix())
		for i, p := range []srv6.Packet{plain, optioned(plain, 40)} {
			w.send("in", frameOf(p))
			got := w.receive()
			out, err := srv6.Decode(got)
			w.must(err)
			want := forwarded(forwarded(udp(1)))
			if out.Header.Destination != xtest.OtherSID(9) || out.SRH == nil || out.SRH.SegmentsLeft != 0 || !bytes.Equal(out.Payload, want) || !bytes.Equal(out.Options, p.Options) {
				t.Errorf("segments %v: got %x", order, got)
			}
			f, err := w.d.FunctionsInFlight()
			w.must(err)
			if n := uint64(i + 1); f[0].TxSuccess != n || f[1].TxSuccess != n {
				t.Errorf("segments %v: %+v", order, f)
			}
		}
	}
}

// A super-packet is encapsulated whole, cut before the strip, and each of its
// frames comes back with a header of its own.
func TestSuperPacketIsCutSoThatEachFrameHasItsHeader(t *testing.T) {
	t.Parallel()
	w := newWire(t, func(n *plan.Node) {
		for i := range n.Endpoints {
			n.Endpoints[i].Sources = []netip.Addr{xtest.Sources[0], n.Address}
		}
		h := xtest.HeadendOf(1, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:1::/48")}, 1)
		h.Segments, h.MTU = []netip.Addr{xtest.OwnSID(1), xtest.OtherSID(9)}, 1400
		n.Headends = []plan.Headend{h}
	})
	w.sendSuper("out", ether(tcp(2500)), 54, 1000)
	sizes := map[int]int{}
	for range 3 {
		out, err := srv6.Decode(w.receive())
		w.must(err)
		if out.Header.Destination != xtest.OtherSID(9) || out.SRH == nil {
			t.Fatalf("%+v", out)
		}
		sizes[len(out.Payload)]++
	}
	f, err := w.d.FunctionsInFlight()
	w.must(err)
	if sizes[1060] != 2 || sizes[560] != 1 || f[0].RxCut != 1 || f[0].RxSuccess != 3 || f[0].TxSuccess != 3 || *f[0].InFlight != 0 {
		t.Errorf("sizes %v, %+v", sizes, f[0])
	}
}

// Where the function's device cuts, the headers of all frames are kept at once, by
// the fingerprints that they will have. The kernel is asked how it cuts: drawn
// super-packets, each frame of which must come back with a header.
func TestFramesThatTheDeviceCutsGetTheirHeaders(t *testing.T) {
	t.Parallel()
	w := newCuttingWire(t, true)
	const supers = 120
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	frames := 0
	for i := range supers {
		s := drawSuper(r)
		frames += s.frames()
		w.sendSuper("out", s.frame, s.at, s.size)
		got := map[uint32][]byte{} // payloads by their sequence numbers
		for range s.frames() {
			out, err := srv6.Decode(w.receive())
			w.must(err)
			if out.Header.Destination != xtest.OtherSID(9) || out.SRH == nil || out.SRH.SegmentsLeft != 0 {
				t.Fatalf("super-packet %d, %+v: got %+v", i, s, out)
			}
			segment := out.Payload[s.at-14:]
			got[binary.BigEndian.Uint32(segment[4:])] = segment[s.header:]
		}
		for at := 0; at < len(s.payload); at += s.size {
			if want := s.payload[at:min(at+s.size, len(s.payload))]; !bytes.Equal(got[s.sequence+uint32(at)], want) {
				t.Fatalf("super-packet %d: frame at %d is not there whole", i, at)
			}
		}
	}
	f, err := w.d.FunctionsInFlight()
	w.must(err)
	if f[0].RxCut != supers || f[0].RxSuccess != uint64(frames) || f[0].TxSuccess != uint64(frames) || f[0].TxNotCached != 0 || *f[0].InFlight != 0 {
		t.Errorf("%d frames: %+v", frames, f[0])
	}
	if n := w.received("wscut1"); n > ambient {
		t.Errorf("%d bytes went through the cutter", n)
	}
	if f[0].TxCut != 0 {
		t.Errorf("%d super-packets came back", f[0].TxCut)
	}
}

// Of a datagram that may be fragmented the identification counts, and how it
// grows is not known: these go through the cutter. So does what is not TCP.
func TestSuperPacketsOfUnknownCutGoThroughTheCutter(t *testing.T) {
	t.Parallel()
	w := newCuttingWire(t, true)
	s := superOf(true, 0, 0, 0x10, 1, 1000, make([]byte, 2500))
	s.frame[14+6] = 0 // may be fragmented
	binary.BigEndian.PutUint16(s.frame[14+10:], 0)
	binary.BigEndian.PutUint16(s.frame[14+10:], ^onesSum(s.frame[14:34]))
	w.sendSuper("out", s.frame, s.at, s.size)
	for range s.frames() {
		w.receive()
	}
	f, err := w.d.FunctionsInFlight()
	w.must(err)
	if n := w.received("wscut1"); n < 2500 || f[0].RxCut != 1 || f[0].RxSuccess != 3 || f[0].TxSuccess != 3 || f[0].TxNotCached != 0 {
		t.Errorf("%d bytes through the cutter, %+v", n, f[0])
	}
}

// The device has become one that leaves super-packets whole, and nobody has told
// yet: what the function sends back whole is cut then, and each frame is known.
func TestSuperPacketThatNobodyCutIsCutOnItsWayBack(t *testing.T) {
	t.Parallel()
	w := newCuttingWire(t, false)
	s := superOf(false, 0, 12, 0x18, 1, 1000, make([]byte, 2500))
	w.sendSuper("out", s.frame, s.at, s.size)
	for range s.frames() {
		w.receive()
	}
	f, err := w.d.FunctionsInFlight()
	w.must(err)
	if f[0].RxCut != 1 || f[0].TxCut != 1 || f[0].RxSuccess != 3 || f[0].TxSuccess != 3 || f[0].TxNotCached != 0 {
		t.Errorf("%+v", f[0])
	}
}

// newCuttingWire is a wire whose function's device is believed to take no
// super-packets, which may be true, with headends for both versions of IP.
func newCuttingWire(t *testing.T, cuts bool) *wire {
	t.Helper()
	w := newWireBefore(t, func(w *wire) {
		if cuts {
			w.must(w.net.CutOnSend("to"))
		}
		devices := w.cfg.Net.Device
		w.cfg.Net = netWith{w.cfg.Net, func(name string) (host.Device, error) {
			d, err := devices(name)
			if d.Cuts != (cuts && name == "to" || name == "wscut0" || name == "wsback0") {
				return d, fmt.Errorf("of %s it is said that it cuts: %v", name, d.Cuts)
			}
			d.Cuts = true
			return d, err
		}}
		w.must(errors.Join(
			w.fn.SetSysctl("net/ipv4/ip_forward", "1"),
			w.fn.SetSysctl("net/ipv4/conf/all/rp_filter", "0"), w.fn.SetSysctl("net/ipv4/conf/to-peer/rp_filter", "0"),
			w.fn.AddRoute(host.Route{Destination: xtest.Prefix("198.51.100.0/24"), Via: xtest.Addr("fd00:7::1"), Device: "from-peer"}),
		))
	}, func(n *plan.Node) {
		for i := range n.Endpoints {
			n.Endpoints[i].Sources = []netip.Addr{xtest.Sources[0], n.Address}
		}
		for i, to := range []string{"2001:db8:1::/48", "198.51.100.0/24"} {
			h := xtest.HeadendOf(uint32(i+1), 0, []model.Scheme{model.SchemeKeyed, model.SchemeOPoT}[i], model.Match{Destination: xtest.Prefix(to)}, 1)
			h.Segments, h.MTU = []netip.Addr{xtest.OwnSID(1), xtest.OtherSID(9)}, 1400
			n.Headends = append(n.Headends, h)
		}
	})
	return w
}

// ambient is how many bytes the kernel may send by itself.
const ambient = 500

// received is how many bytes came in by an interface of the node.
func (w *wire) received(name string) uint64 {
	w.Helper()
	var out uint64
	w.must(w.net.NetNS().Do(func() error {
		l, err := netlink.LinkByName(name)
		if err == nil {
			out = l.Attrs().Statistics.RxBytes
		}
		return err
	}))
	return out
}

// superPacket is one of TCP.
type superPacket struct {
	frame    []byte
	at       int // of the TCP header
	header   int // bytes of it
	size     int // of a frame's payload
	sequence uint32
	payload  []byte
}

func (s superPacket) frames() int { return (len(s.payload) + s.size - 1) / s.size }

func superOf(ip4 bool, extension, options int, flags byte, sequence uint32, size int, payload []byte) superPacket {
	head := make([]byte, 20+options)
	copy(head, []byte{0, 80, 0, 81})
	binary.BigEndian.PutUint32(head[4:], sequence)
	head[8], head[12], head[13], head[14] = 7, byte(len(head)/4)<<4, flags, 9
	for i := range options {
		head[20+i] = 1 // no operation
	}
	s := superPacket{at: 14 + 40 + extension, header: len(head), size: size, sequence: sequence, payload: payload}
	segment := append(head, payload...)
	if ip4 {
		s.at = 14 + 20
		h := srv6.IPv4{ID: 65534, Fragment: 0x4000, TTL: 64, Protocol: 6, Source: xtest.Addr("203.0.113.1"), Destination: xtest.Addr("198.51.100.1")}
		inner, err := h.Append(nil, segment)
		if err != nil {
			panic(err)
		}
		s.pseudo(inner[12:20], len(segment), segment[16:])
		copy(inner[20:], segment)
		s.frame = ether(inner)
		return s
	}
	next := uint8(6)
	behind := segment
	if extension > 0 {
		e := make([]byte, extension) // destination options, all padding
		e[0], e[1], e[2], e[3] = 6, byte(extension/8-1), 1, byte(extension-4)
		next, behind = 60, append(e, segment...)
	}
	inner := innerOf(next, behind)
	s.pseudo(inner[8:40], len(segment), inner[s.at-14+16:])
	s.frame = ether(inner)
	return s
}

// pseudo writes what a sender leaves of the checksum to its device.
func (s superPacket) pseudo(addresses []byte, length int, to []byte) {
	b := append(slices.Clone(addresses), 0, 6, byte(length>>8), byte(length))
	binary.BigEndian.PutUint16(to, onesSum(b))
}

func onesSum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

func drawSuper(r *rand.Rand) superPacket {
	size := []int{40 + r.IntN(30), 100 + r.IntN(1000), 1000}[r.IntN(3)]
	payload := make([]byte, size+1+r.IntN(min(30*size, 20000)))
	for i := range payload {
		payload[i] = byte(r.Uint32())
	}
	ip4, extension := r.IntN(2) == 0, 8*r.IntN(2)
	flags := byte(0x10) | byte(r.Uint32())&0xe9 // no SYN, no RST
	return superOf(ip4, extension, 4*r.IntN(11), flags, []uint32{r.Uint32(), 0xffffff00}[r.IntN(2)], size, payload)
}

func TestTruncatedPacketOfAFunctionIsRefused(t *testing.T) {
	t.Parallel()
	w := newWire(t, nil)
	l, err := w.net.Link("from")
	w.must(err)
	fd := w.socket(w.fn, "from-peer", 0)
	_, err = unix.Write(fd, append(append(l.MAC[:], make([]byte, 6)...), 0x86, 0xdd, 0x60))
	w.must(err)
	w.refused(abi.ReasonFunctionTruncated, 1)
}

// sendUDP sends a datagram from an address of the namespace that it is called in.
func sendUDP(from, to string) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet6{Addr: xtest.Addr(from).As16()}); err != nil {
		return err
	}
	return unix.Sendto(fd, []byte("hello"), 0, &unix.SockaddrInet6{Port: 9, Addr: xtest.Addr(to).As16()})
}

// On devices with native XDP, TC sees only the packets that XDP needs it for: the
// first ones, whose ways TC finds.
func TestFunctionBehindDevicesWithXDPIsPassedByXDP(t *testing.T) {
	t.Parallel()
	w := newWire(t, nil)
	// A veth that says it is hardware gets XDP; its peer must take redirects.
	devices := w.cfg.Net.Device
	w.cfg.Net = netWith{w.cfg.Net, func(name string) (host.Device, error) {
		d, err := devices(name)
		if !strings.HasPrefix(name, "ws") {
			d.Kind = "device"
		}
		return d, err
	}}
	for _, name := range []string{"to-peer", "from-peer"} {
		w.must(w.fn.SetOffload(name, host.GRO, true))
	}
	w.must(w.world.SetOffload("next-peer", host.GRO, true))
	w.must(w.d.Close())
	w.d = w.open()
	w.must(w.apply(w.d, w.n))
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	w.must(err)
	defer stats.Close()
	runs := func(program string) uint64 {
		s, err := w.d.program(program).Stats()
		w.must(err)
		return s.RunCount
	}
	const packets = 20
	quiet := 0
	for i := 0; quiet < packets; i++ {
		if i == 10*packets {
			t.Fatalf("TC is always asked: core %d, function %d runs", runs(object.CoreTC), runs(object.FunctionTC))
		}
		core, function := runs(object.CoreTC), runs(object.FunctionTC)
		p := outerOf(1, 1, model.SchemeKeyed, uint64(i), udp(byte(i)))
		w.send("in", frameOf(p))
		if got, want := w.receive(), restored(t, p, xtest.Share(1, 1), forwarded(udp(byte(i)))); !bytes.Equal(got, want) {
			t.Fatalf("got\n%x, want\n%x", got, want)
		}
		if runs(object.CoreTC) == core && runs(object.FunctionTC) == function {
			quiet++
		}
	}
	f, err := w.d.FunctionsInFlight()
	w.must(err)
	if f[0].RxSuccess != f[0].TxSuccess || f[0].TxNotCached != 0 || *f[0].InFlight != 0 {
		t.Errorf("%+v", f[0])
	}
}
