package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
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
	to, back := CutterPairs()
	for _, c := range []CutterPair{to, back} {
		_, err := w.net.EnsureCutter(host.Cutter{In: c.In, Out: c.Out, Owner: "waystamp test"})
		w.must(err)
	}
	w.must(errors.Join(
		w.net.SetSysctl("net/ipv6/conf/all/forwarding", "1"), w.fn.SetSysctl("net/ipv6/conf/all/forwarding", "1"),
		w.net.AddAddress("next", prefix("fd00:5::1/64")), world.AddAddress("next-peer", prefix("fd00:5::2/64")),
		w.net.AddAddress("to", prefix("fd00:6::1/64")), w.fn.AddAddress("to-peer", prefix("fd00:6::2/64")),
		w.net.AddAddress("from", prefix("fd00:7::1/64")), w.fn.AddAddress("from-peer", prefix("fd00:7::2/64")),
		w.net.SetUp("next"), world.SetUp("next-peer"), w.net.SetUp("to"), w.fn.SetUp("to-peer"), w.net.SetUp("from"), w.fn.SetUp("from-peer"),
		w.net.AddRoute(host.Route{Destination: prefix("fc00:0:0:200::/56"), Via: addr("fd00:5::2"), Device: "next"}),
		w.net.AddRoute(host.Route{Destination: prefix("2001:db8::/32"), Via: addr("fd00:5::2"), Device: "next"}),
		w.fn.AddRoute(host.Route{Destination: prefix("2001:db8::/32"), Via: addr("fd00:7::1"), Device: "from-peer"}),
	))
	w.must(w.net.WaitUp(t.Context(), "next", "to", "from", "in"))
	w.must(world.WaitUp(t.Context(), "next-peer"))
	w.must(w.fn.WaitUp(t.Context(), "to-peer", "from-peer"))

	w.n = withLocalNAT(proxyNode())
	w.n.Interfaces = []model.Interface{{Name: "in", Role: model.RoleCore}, {Name: "next", Role: model.RoleCore}, {Name: "out", Role: model.RoleEdge}}
	w.n.Proxies[0].Via = addr("fd00:6::2")
	if edit != nil {
		edit(&w.n)
	}
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

// sendSuper sends a super-packet: TCP over IPv6, to be cut every size bytes.
func (w *wire) sendSuper(at string, frame []byte, size int) {
	w.Helper()
	fd := w.socket(w.net, at+"-peer", 0)
	w.must(unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1))
	l, err := w.net.Link(at)
	w.must(err)
	head := make([]byte, 10) // struct virtio_net_hdr
	head[0], head[1] = 1, 4  // checksum to be done, TCP over IPv6
	binary.NativeEndian.PutUint16(head[2:], 14+40+20)
	binary.NativeEndian.PutUint16(head[4:], uint16(size))
	binary.NativeEndian.PutUint16(head[6:], 14+40)
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
	deadline := time.Now().Add(5 * time.Second)
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
		if to := netip.AddrFrom16([16]byte(buf[38:54])); prefix("fc00::/48").Contains(to) || prefix("2001:db8::/32").Contains(to) {
			return slices.Clone(buf[14:n])
		}
	}
}

// refused waits until a reason has been counted n times.
func (w *wire) refused(reason abi.Reason, n uint64) {
	w.Helper()
	deadline := time.Now().Add(5 * time.Second)
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
	for _, recognise := range []model.Recognise{model.RecogniseContent, model.RecogniseMetadata} {
		t.Run(recognise.String(), func(t *testing.T) {
			w := newWire(t, func(n *plan.Node) { n.Proxies[0].Recognise = recognise })
			for i := range 20 {
				p := outerOf(1, 1, model.SchemeKeyed, uint64(i), udp(byte(i)))
				w.send("in", frameOf(p))
				if got, want := w.receive(), restored(t, p, testShare(1, 1), forwarded(udp(byte(i)))); !bytes.Equal(got, want) {
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
	w := newWire(t, func(n *plan.Node) {
		e := egressOf(9, 0, model.SchemeKeyed, model.Match{Destination: prefix("2001:db8:1::/48")}, ownSID(5), 2)
		e.OnViolation = model.OnViolationReport
		n.Egresses = []plan.Egress{e}
	})
	for i := range 20 {
		p := outerOf(1, 2, model.SchemeKeyed, uint64(i), udp(byte(i)))
		w.send("in", frameOf(p))
		if got, want := w.receive(), restored(t, p, testShare(2, 9), forwarded(udp(byte(i)))); !bytes.Equal(got, want) {
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
	p.SRH.Segments, p.SRH.SegmentsLeft = []netip.Addr{ownSID(5), otherSID(1)}, 0
	w.must(p.Fix())
	w.send("in", frameOf(p))
	if got := w.receive(); !bytes.Equal(got, forwarded(udp(77))) {
		t.Errorf("got %x, want the inner packet", got)
	}
}

// The second segment is the node's own kernel; the first function's packets go
// there over the cutter, and back.
func TestTwoFunctionsOfANodeFollowOneAnother(t *testing.T) {
	for _, order := range [][2]int{{1, 2}, {2, 1}} {
		w := newWire(t, nil)
		p := outerOf(1, order[0], model.SchemeKeyed, 5, udp(1))
		p.SRH.Segments = []netip.Addr{otherSID(9), ownSID(order[1]), ownSID(order[0])}
		w.must(p.Fix())
		w.send("in", frameOf(p))
		got := w.receive()
		out, err := srv6.Decode(got)
		w.must(err)
		want := forwarded(forwarded(udp(1)))
		if out.Header.Destination != otherSID(9) || out.SRH == nil || out.SRH.SegmentsLeft != 0 || !bytes.Equal(out.Payload, want) {
			t.Errorf("segments %v: got %x", order, got)
		}
		f, err := w.d.FunctionsInFlight()
		w.must(err)
		if f[0].TxSuccess != 1 || f[1].TxSuccess != 1 {
			t.Errorf("segments %v: %+v", order, f)
		}
	}
}

// A super-packet is encapsulated whole, cut before the strip, and each of its
// frames comes back with a header of its own.
func TestSuperPacketIsCutSoThatEachFrameHasItsHeader(t *testing.T) {
	w := newWire(t, func(n *plan.Node) {
		for i := range n.Endpoints {
			n.Endpoints[i].Sources = []netip.Addr{testSources[0], n.Address}
		}
		h := headendOf(1, 0, model.SchemeKeyed, model.Match{Destination: prefix("2001:db8:1::/48")}, 1)
		h.Segments, h.MTU = []netip.Addr{ownSID(1), otherSID(9)}, 1400
		n.Headends = []plan.Headend{h}
	})
	w.sendSuper("out", ether(tcp(2500)), 1000)
	sizes := map[int]int{}
	for range 3 {
		out, err := srv6.Decode(w.receive())
		w.must(err)
		if out.Header.Destination != otherSID(9) || out.SRH == nil {
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

func TestTruncatedPacketOfAFunctionIsRefused(t *testing.T) {
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
	if err := unix.Bind(fd, &unix.SockaddrInet6{Addr: addr(from).As16()}); err != nil {
		return err
	}
	return unix.Sendto(fd, []byte("hello"), 0, &unix.SockaddrInet6{Port: 9, Addr: addr(to).As16()})
}

// On devices with native XDP, TC sees only the packets that XDP needs it for: the
// first ones, whose ways TC finds.
func TestFunctionBehindDevicesWithXDPIsPassedByXDP(t *testing.T) {
	w := newWire(t, nil)
	// A veth that says it is hardware gets XDP; its peer must take redirects.
	devices := w.cfg.Devices
	w.cfg.Devices = func(name string) (Device, error) {
		d, err := devices(name)
		if !strings.HasPrefix(name, "ws") {
			d.Kind = "device"
		}
		return d, err
	}
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
		s, err := w.d.gen.programs[program].Stats()
		w.must(err)
		return s.RunCount
	}
	const packets = 20
	quiet := 0
	for i := 0; quiet < packets; i++ {
		if i == 10*packets {
			t.Fatalf("TC is always asked: core %d, function %d runs", runs(progCoreTC), runs(progFunctionTC))
		}
		core, function := runs(progCoreTC), runs(progFunctionTC)
		p := outerOf(1, 1, model.SchemeKeyed, uint64(i), udp(byte(i)))
		w.send("in", frameOf(p))
		if got, want := w.receive(), restored(t, p, testShare(1, 1), forwarded(udp(byte(i)))); !bytes.Equal(got, want) {
			t.Fatalf("got\n%x, want\n%x", got, want)
		}
		if runs(progCoreTC) == core && runs(progFunctionTC) == function {
			quiet++
		}
	}
	f, err := w.d.FunctionsInFlight()
	w.must(err)
	if f[0].RxSuccess != f[0].TxSuccess || f[0].TxNotCached != 0 || *f[0].InFlight != 0 {
		t.Errorf("%+v", f[0])
	}
}
