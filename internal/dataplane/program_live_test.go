package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// waitLimit is how long an event may take that is sure to come.
var waitLimit = await.Limit(time.Minute)

// live is a rig whose TC programs are attached, with sockets on the far ends of
// its interfaces: for what a test run does not have, such as super-packets with
// a type, VLAN tags and truncated headers.
type live struct {
	*rig
	in  map[string]int // sockets, by interface
	out int            // behind portOut
	// unsummed: the device was to compute a checksum of the last frame received.
	unsummed bool
}

// virtioHeader is struct virtio_net_hdr (linux/virtio_net.h), which says what
// kind of super-packet follows.
type virtioHeader struct {
	flags, gsoType      uint8
	hdrLen, gsoSize     uint16
	csumStart, csumOffs uint16
}

const (
	virtioNeedsCsum = 1
	virtioTCPv4     = 1
	virtioTCPv6     = 4
	virtioLen       = 10

	unsummed = -1
)

func (r *rig) goLive() *live {
	r.Helper()
	l := &live{rig: r, in: map[string]int{}}
	r.must(r.in(func() error {
		for _, port := range []string{portCore, portEdge, portEdgeDrop} {
			prog := r.program(object.EdgeTC)
			if port == portCore {
				prog = r.program(object.CoreTC)
			}
			if err := l.attach(prog, port); err != nil {
				return err
			}
			fd, err := l.socket(port+"-peer", 0)
			if err != nil {
				return err
			}
			l.in[port] = fd
		}
		var err error
		l.out, err = l.socket(portOut+"-peer", unix.ETH_P_ALL)
		return err
	}))
	return l
}

func (l *live) attach(p *ebpf.Program, port string) error {
	return l.attachAt(p, port, ebpf.AttachTCXIngress)
}

func (l *live) attachAt(p *ebpf.Program, port string, hook ebpf.AttachType) error {
	dev, err := net.InterfaceByName(port)
	if err != nil {
		return err
	}
	n, err := host.Open(l.ns)
	if err != nil {
		return err
	}
	l.Cleanup(func() { n.Close() })
	off, err := attachOther(n, p, dev.Index, hook == ebpf.AttachTCXEgress, false, false)
	if err != nil {
		return fmt.Errorf("attach to %s: %w", port, err)
	}
	l.Cleanup(func() { off() })
	return nil
}

func (l *live) socket(dev string, protocol uint16) (int, error) {
	i, err := net.InterfaceByName(dev)
	if err != nil {
		return 0, err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	l.Cleanup(func() { unix.Close(fd) })
	limit := unix.NsecToTimeval(waitLimit.Nanoseconds())
	return fd, errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
		unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: i.Index, Protocol: protocol<<8 | protocol>>8}),
	)
}

// send lets a frame come to an interface; mss: of the TCP super-packet that it
// is, or 0; unsummed: a packet whose checksum nobody has computed yet.
func (l *live) send(port string, b []byte, mss int) error {
	var h [virtioLen]byte
	if mss != 0 {
		h[0] = virtioNeedsCsum
		tcp, kind := srv6.EthernetLen+srv6.IPv6Len, byte(virtioTCPv6)
		if b[srv6.EthernetLen]>>4 == 4 {
			tcp, kind = srv6.EthernetLen+srv6.IPv4Len, virtioTCPv4
		}
		if mss != unsummed {
			h[1] = kind
		}
		for i, v := range []int{tcp + 20, max(0, mss), tcp, 16} {
			binary.NativeEndian.PutUint16(h[2+2*i:], uint16(v))
		}
	}
	return l.rig.in(func() error {
		_, err := unix.Write(l.in[port], slices.Concat(h[:], b))
		if err != nil {
			return fmt.Errorf("send %d bytes to %s: %w", len(b), port, err)
		}
		return nil
	})
}

// receive is the next frame that went out to the neighbour, and its GSO size.
func (l *live) receive() (b []byte, gsoSize int, err error) {
	for {
		buf := make([]byte, 1<<17)
		n, err := unix.Read(l.out, buf)
		if err != nil {
			return nil, 0, fmt.Errorf("wait for a frame to go out: %w", err)
		}
		b = buf[virtioLen:n]
		l.unsummed = buf[0]&virtioNeedsCsum != 0
		if [6]byte(b[:6]) == neighbourMAC {
			return b, int(binary.NativeEndian.Uint16(buf[4:])), nil
		}
	}
}

// nextEvent waits for one.
func (l *live) nextEvent() (abi.Event, error) {
	var e abi.Event
	l.events.SetDeadline(time.Now().Add(waitLimit))
	raw, err := l.events.Read()
	if err != nil {
		return e, fmt.Errorf("wait for an event: %w", err)
	}
	copy(xtest.BytesOf(&e), raw.RawSample)
	return e, checkPlace(e)
}

// refuses sends a frame that must be refused for this reason and no other.
func (l *live) refuses(port string, b []byte, mss int, reason abi.Reason) error {
	return l.refusesAs(port, b, mss, reason, len(b))
}

// refusesAs is the same for a packet that may have become shorter.
func (l *live) refusesAs(port string, b []byte, mss int, reason abi.Reason, least int) error {
	if err := l.freshEvents(); err != nil {
		return err
	}
	if _, err := l.drain(); err != nil {
		return err
	}
	if err := l.send(port, b, mss); err != nil {
		return err
	}
	e, err := l.nextEvent()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, layers(b))
	}
	if got := abi.Reason(e.Reason); got != reason || int(e.Len) < least {
		return fmt.Errorf("refused for %s with %d bytes, want %s with %d or more\n%s", got, e.Len, reason, least, layers(b))
	}
	return l.checkMoved("TC", moved{dropped: []string{reasonName(reason)}, stats: map[uint32]abi.Stats{}})
}

// passesThenRefuses: the first of two packets, which is shorter, is not refused;
// the other one is.
func (l *live) passesThenRefuses(port string, first, b []byte, reason abi.Reason) error {
	if err := l.freshEvents(); err != nil {
		return err
	}
	if _, err := l.drain(); err != nil {
		return err
	}
	if err := errors.Join(l.send(port, first, 0), l.send(port, b, 0)); err != nil {
		return err
	}
	e, err := l.nextEvent()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, layers(b))
	}
	if got := abi.Reason(e.Reason); got != reason || int(e.Len) != len(b) {
		return fmt.Errorf("refused for %s with %d bytes, want nothing before %s with %d", got, e.Len, reason, len(b))
	}
	return l.checkMoved("TC", moved{dropped: []string{reasonName(reason)}, stats: map[uint32]abi.Stats{}})
}

// checkOut receives what went out next and compares it with what the oracle
// makes of what came in, and the counters too. A super-packet that says of
// itself that it is not to be trusted, as ours here do, may have been cut by the
// device: then every frame must have the one stamp.
func (l *live) checkOut(a oracle.Arrival, mss int, labels *oracle.Labels) error {
	want := l.node.Process(a)
	if want.Verdict != oracle.Forward {
		return fmt.Errorf("the oracle says %s %s", want.Verdict, want.Reason)
	}
	b, size, err := l.receive()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, layers(a.Frame))
	}
	got := b[srv6.EthernetLen:]
	if want.Encapsulated {
		if err := labels.Check(got); err != nil {
			return err
		}
		got = oracle.WithoutLabel(got)
	}
	switch {
	case [6]byte(b[6:12]) != rigMAC:
		return fmt.Errorf("sent from %x", b[6:12])
	case size == mss && slices.Equal(got, want.Packet):
	case size == 0 && mss != 0:
		if err := l.checkCut(got, want.Packet, mss, a.Frames); err != nil {
			return err
		}
	default:
		return fmt.Errorf("sent, with GSO size %d (want %d):\n%s\nwant\n%s", size, mss, layers(slices.Concat(b[:14], got)), layers(slices.Concat(b[:14], want.Packet)))
	}
	m := moved{stats: map[uint32]abi.Stats{}}
	for _, v := range want.Visits {
		i, err := l.statsOf(v)
		if err != nil {
			return err
		}
		s := m.stats[i]
		m.stats[i] = abi.Stats{Packets: s.Packets + 1, Frames: s.Frames + uint64(v.Frames), Bytes: s.Bytes + uint64(v.Bytes)}
	}
	return l.checkMoved("TC", m)
}

// checkCut: first and the frames that follow it are whole, cut into so many.
func (l *live) checkCut(first, whole []byte, mss, frames int) error {
	const inner = srv6.IPv6Len + 20
	outer := len(whole) - int(binary.BigEndian.Uint16(whole[4:])) - srv6.IPv6Len
	outer += srv6.IPv6Len + 8 + 8*int(whole[srv6.IPv6Len+1])
	var payload []byte
	for i := range frames {
		f := first
		if i > 0 {
			b, _, err := l.receive()
			if err != nil {
				return fmt.Errorf("frame %d of %d: %w", i+1, frames, err)
			}
			f = oracle.WithoutLabel(b[srv6.EthernetLen:])
		}
		if len(f) < outer+inner || len(f) > outer+inner+mss {
			return fmt.Errorf("frame %d of %d has %d bytes; want at most %d", i+1, frames, len(f), outer+inner+mss)
		}
		head := slices.Clone(whole[:outer])
		binary.BigEndian.PutUint16(head[4:], uint16(len(f)-srv6.IPv6Len))
		if !slices.Equal(f[:outer], head) {
			return fmt.Errorf("frame %d of %d has another outer header:\n%x\nwant\n%x", i+1, frames, f[:outer], head)
		}
		payload = append(payload, f[outer+inner:]...)
	}
	if !slices.Equal(payload, whole[outer+inner:]) {
		return fmt.Errorf("%d frames have %d bytes, or others, want %d", frames, len(payload), len(whole)-outer-inner)
	}
	return nil
}

// tcpPacket is a TCP packet with that much payload.
func tcpPacket(t *testing.T, to string, payload int) []byte {
	t.Helper()
	h := srv6.Header{NextHeader: 6, HopLimit: 64, Source: xtest.Addr("fc00:7::2"), Destination: xtest.Addr(to), PayloadLength: uint16(20 + payload)}
	b, err := h.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return framed(srv6.EtherTypeIPv6, append(b, tcpSegment(payload)...))
}

// tcpPacket4 is the same over IPv4.
func tcpPacket4(t *testing.T, to string, ttl uint8, payload int) []byte {
	t.Helper()
	h := srv6.IPv4{Fragment: 0x4000, TTL: ttl, Protocol: 6, Source: xtest.Addr("203.0.113.2"), Destination: xtest.Addr(to)}
	b, err := h.Append(nil, tcpSegment(payload))
	if err != nil {
		t.Fatal(err)
	}
	return framed(srv6.EtherTypeIPv4, b)
}

func tcpSegment(payload int) []byte {
	tcp := make([]byte, 20+payload)
	binary.BigEndian.PutUint16(tcp, 4242)
	binary.BigEndian.PutUint16(tcp[2:], 80)
	tcp[12], tcp[13] = 0x50, 0x10
	for i := range payload {
		tcp[20+i] = byte(i / 100)
	}
	return tcp
}

// scapyNode is a node of the packets' world.
func scapyNode(t *testing.T, name string) packets.Node {
	t.Helper()
	w, err := packets.LoadWorld()
	if err != nil {
		t.Fatal(err)
	}
	n, err := w.Node(name)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func newScapyRig(t *testing.T, name string, routes ...rigRoute) *rig {
	t.Helper()
	n := scapyNode(t, name)
	r := newRig(t, rigSpec{name: name, block: n.Block, locator: n.Locator, address: n.Address, own: n.Local, routes: routes})
	r.must(r.apply(&n.Node))
	return r
}

// The checksum of a SYN that is lowered: one that is there stays right, and one that
// a device is still to compute is left to it (linux/skbuff.h, CHECKSUM_PARTIAL): the
// field has the sum of the pseudo-header then, which lacks what has changed.
func TestClampingLeavesChecksumsToWhoComputesThem(t *testing.T) {
	p, err := packets.Load("syn-6")
	if err != nil {
		t.Fatal(err)
	}
	const tcp = srv6.EthernetLen + srv6.IPv6Len
	l := newScapyRig(t, "r1").goLive()
	for _, left := range []bool{false, true} {
		b, want, mss := slices.Clone(p.Frame), slices.Clone(p.Out), 0
		if left {
			// Source, destination, length and protocol, not inverted. Bytes
			// 10 and 11, which that function passes over, are zero.
			pseudo := slices.Concat(b[srv6.EthernetLen+8:tcp], []byte{0, 0, 0, byte(len(b) - tcp), 0, 0, 0, 6})
			sum := ^srv6.IPv4Checksum(pseudo)
			binary.BigEndian.PutUint16(b[tcp+16:], sum)
			binary.BigEndian.PutUint16(want[len(want)-(len(b)-tcp)+16:], sum)
			mss = unsummed
		}
		l.must(l.setNumbers(7))
		l.must(l.send(portEdge, b, mss))
		got, _, err := l.receive()
		l.must(err)
		if got = oracle.WithoutLabel(got[srv6.EthernetLen:]); l.unsummed != left || !slices.Equal(got, want) {
			t.Errorf("left to the device %t: sent, left %t:\n%s\nwant\n%s", left, l.unsummed, layers(slices.Concat(b[:14], got)), layers(slices.Concat(b[:14], want)))
		}
	}
}

// A super-packet is stamped once, counts as what it is on a wire, and leaves as
// whole as it came.
func TestHeadendStampsTrains(t *testing.T) {
	l := newScapyRig(t, "r1").goLive()
	labels := &oracle.Labels{}
	forward := func(to string, payload, mss, frames int) {
		t.Helper()
		b := tcpPacket(t, to, payload)
		l.must(l.setNumbers(7))
		l.must(l.send(portEdge, b, mss))
		a := oracle.Arrival{
			Interface: model.Interface{Role: model.RoleEdge}, Frame: b, Number: 7,
			Frames: frames, Longest: srv6.IPv6Len + 20 + mss,
		}
		if err := l.checkOut(a, mss, labels); err != nil {
			t.Errorf("%d bytes in frames of %d: %v", payload, mss, err)
		}
	}
	node := l.node
	refused := func(to string, payload, mss int, reason abi.Reason) {
		t.Helper()
		b := tcpPacket(t, to, payload)
		if err := l.refuses(portEdge, b, mss, reason); err != nil {
			t.Errorf("%d bytes in frames of %d: %v", payload, mss, err)
		}
		a := oracle.Arrival{Interface: model.Interface{Role: model.RoleEdge}, Frame: b, Number: 7}
		if mss > 0 {
			a.Frames, a.Longest = (payload+mss-1)/mss, srv6.IPv6Len+20+mss
		}
		want := node.Process(a)
		if want.Error == nil {
			return
		}
		// Its sender is told, by a packet that is no super-packet any more.
		got, size, err := l.receive()
		if err != nil || size != 0 || l.unsummed || !slices.Equal(got[srv6.EthernetLen:], want.Error) {
			t.Errorf("%d bytes in frames of %d: its sender is told, with GSO size %d, checksum left to the device %t, %v\n%s\nwant\n%x",
				payload, mss, size, l.unsummed, err, layers(got), want.Error)
		}
	}
	const web, direct = "fc00:8::2", "fc00:b::2"
	forward(web, 100, 0, 1)
	forward(web, 1001, 1000, 2)
	forward(web, 2000, 1000, 2)
	forward(web, 63*1000, 1000, 63)
	forward(web, 65535-20-80-40, 1400, 47) // the longest that the outer header can tell
	refused(web, 65535-20-80-40+1, 1400, abi.ReasonTrainTooBig)
	refused(web, 63*1000+1, 1000, abi.ReasonTrainTooLong)
	// The chain's MTU is 1300.
	forward(direct, 5000, 1240, 5)
	refused(direct, 5000, 1241, abi.ReasonChainMTU)
	// Too long a packet that is no super-packet: the kernel makes no room for a
	// header before it.
	refused(web, 20000, 0, abi.ReasonPushFailed)

	l.must(l.rig.in(func() error {
		out, err := netlink.LinkByName(portOut)
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(out, 1400)
	}))
	l.must(l.g.flushNexthops()) // as an agent does
	forward(web, 5000, 1400-120-60, 5)
	node.Route = func(netip.Addr) oracle.Way { return oracle.Way{MTU: 1400} }
	refused(web, 5000, 1400-120-60+1, abi.ReasonTooBig)
	refused(web, 1400-120-60+1, 0, abi.ReasonTooBig)
	refused(web, 1400-120-60+1, unsummed, abi.ReasonTooBig)
	// Of a short one not even the ports are where the device would look.
	b := tcpPacket(t, web, 0)
	b[srv6.EthernetLen+7] = 1
	l.must(l.send(portEdge, b, unsummed))
	got, _, err := l.receive()
	l.must(err)
	if want := node.Process(oracle.Arrival{Interface: model.Interface{Role: model.RoleEdge}, Frame: b}); l.unsummed || !slices.Equal(got[srv6.EthernetLen:], want.Error) {
		t.Errorf("about a short packet, checksum left to the device %t:\n%s\nwant\n%x", l.unsummed, layers(got), want.Error)
	}
}

// newLocalRig is r2, which has all functions and the egress of the chain local, as its
// headend too; for the packets of match instead of the chain's, unless that is empty.
func newLocalRig(t *testing.T, oldKernel bool, match model.Match) *live {
	t.Helper()
	s := scapyNode(t, "r2")
	l := newRig(t, rigSpec{name: s.Name, block: s.Block, locator: s.Locator, address: s.Address, own: s.Local, oldKernel: oldKernel}).goLive()
	n := s.Node
	for _, h := range scapyNode(t, "r1").Headends {
		if h.Chain == "local" {
			n.Headends = append(n.Headends, h)
		}
	}
	for i := range n.Endpoints {
		n.Endpoints[i].Sources = []netip.Addr{n.Address}
	}
	for i := range n.Egresses {
		n.Egresses[i].Sources = []netip.Addr{n.Address}
	}
	if match != (model.Match{}) {
		for i := range n.Headends {
			n.Headends[i].Match = match
		}
		for i, e := range n.Egresses {
			if e.Chain == "local" {
				n.Egresses[i].Match = match
			}
		}
	}
	l.must(l.apply(&n))
	return l
}

// The kernel keeps one pair of inner offsets, and does not give it back with the
// header: such a packet must be encapsulated all the same, also where the kernel cannot be
// told its version (Linux before 6.3). Here each packet goes
// through a chain whose functions are all on one node, and comes back to its
// headend until its hop limit is used up.
func TestPacketThatWasATunnelsIsEncapsulatedAgain(t *testing.T) {
	for _, old := range []bool{false, true} {
		for _, version := range []int{4, 6} {
			t.Run(fmt.Sprintf("old kernel %t, IPv%d", old, version), func(t *testing.T) { encapsulatesAgain(t, old, version) })
		}
	}
}

func encapsulatesAgain(t *testing.T, oldKernel bool, version int) {
	const hops = 8 // two are used up per round
	packet := func(payload int) []byte {
		b := tcpPacket(t, "fc00:d::2", payload)
		b[srv6.EthernetLen+7] = hops
		return b
	}
	header, match := srv6.IPv6Len, model.Match{}
	if version == 4 {
		header, match = srv6.IPv4Len, model.Match{Destination: netip.MustParsePrefix("203.0.113.208/28")}
		packet = func(payload int) []byte { return tcpPacket4(t, "203.0.113.210", hops, payload) }
	}
	l := newLocalRig(t, oldKernel, match)
	l.must(l.rig.in(func() error {
		peer, err := netlink.LinkByName(portOut + "-peer")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetHardwareAddr(peer, neighbourMAC[:]), l.attach(l.program(object.EdgeTC), portOut+"-peer"))
	}))
	for _, mss := range []int{0, 1000} {
		l.must(l.freshEvents())
		payload := max(100, 3*mss)
		l.must(l.send(portEdge, packet(payload), mss))
		e, err := l.nextEvent()
		l.must(err)
		got, err := l.counted()
		l.must(err)
		if abi.Reason(e.Reason) != abi.ReasonEdgeHopLimit && abi.Reason(e.Reason) != abi.ReasonInnerHopLimit {
			t.Errorf("mss %d: refused for %s; want the hop limit\n%s", mss, abi.Reason(e.Reason), layers(e.Data[:e.Caplen]))
		}
		frames := uint64(1)
		if mss != 0 {
			frames = 3
		}
		if len(got.stats) != 4 {
			t.Errorf("mss %d: %d positions counted it, want 4: %+v", mss, len(got.stats), got)
		}
		for i, s := range got.stats {
			// Behind an outer header the kernel does not say how many frames they
			// are; what is counted instead may be one too many.
			if s.Packets != 3 && s.Packets != 4 || s.Frames < frames*s.Packets || mss == 0 && s.Frames != s.Packets ||
				s.Frames > (frames+1)*s.Packets || s.Bytes != s.Packets*uint64(header+20+payload) {
				t.Errorf("mss %d: entry %d counted %+v; want 3 or 4 rounds of %d frames", mss, i, s, frames)
			}
		}
	}
}

// A super-packet that was a tunnel's and is too long for the link behind the
// egress: no program can answer it. The kernel does, with the packet as it would
// have been had nobody touched its hop limit, and nothing counts as refused.
func TestSuperPacketThatTheKernelAnswersIsNotRefused(t *testing.T) {
	l := newLocalRig(t, false, model.Match{})
	l.must(l.rig.in(func() error {
		out, err := netlink.LinkByName(portOut)
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(out, 1400)
	}))
	l.must(l.g.flushNexthops())
	l.must(l.freshEvents())
	for _, hops := range []byte{64, 3} {
		_, err := l.counted()
		l.must(err)
		b := tcpPacket(t, "fc00:d::2", 3*1400)
		b[srv6.EthernetLen+7] = hops
		l.must(l.send(portEdge, b, 1400))
		got, _, err := l.receive()
		l.must(err)
		p, err := srv6.DecodeFrame(got)
		l.must(err)
		// RFC 4443 3.2: the size, and the packet behind it.
		e := p.Payload
		if p.Header.NextHeader != 58 || len(e) < 48 || e[0] != 2 || binary.BigEndian.Uint32(e[4:]) != 1400 {
			t.Fatalf("hop limit %d: want Packet Too Big that says 1400, got\n%s", hops, layers(got))
		}
		if e[8+7] != hops-1 {
			t.Errorf("hop limit %d: the error quotes %d, want the one that the headend left", hops, e[8+7])
		}
		since, err := l.counted()
		l.must(err)
		if len(since.dropped) != 0 {
			t.Errorf("hop limit %d: refused as %v", hops, since.dropped)
		}
	}
}

// A test run takes no frame without a whole IPv6 header; devices do.
func TestTruncatedHeaders(t *testing.T) {
	l := newScapyRig(t, "r2").goLive()
	all, err := packets.All()
	l.must(err)
	tried := 0
	for _, p := range all {
		f := frame{port: p.Interface.Name, b: p.Frame}
		if !f.truncated() {
			continue
		}
		reason := abi.ReasonTruncated
		if p.Reason == "EDGE_TRUNCATED" {
			reason = abi.ReasonEdgeTruncated
		}
		if reasonName(reason) != p.Reason {
			t.Errorf("%s is truncated, and expects %s %s", p.Name, p.Verdict, p.Reason)
			continue
		}
		tried++
		if err := l.refuses(f.port, f.b, 0, reason); err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
	}
	if tried < 3 {
		t.Errorf("only %d packets are truncated", tried)
	}
}

func tagged(b []byte, tci uint16) []byte {
	return slices.Concat(b[:12], []byte{0x81, 0x00}, binary.BigEndian.AppendUint16(nil, tci), b[12:])
}

// What the kernel takes as untagged must not slip past the guard; what is a
// VLAN's is not ours.
func TestPriorityTagsAreNoWayPastTheGuard(t *testing.T) {
	l := newScapyRig(t, "r6").goLive()
	load := func(name string) packets.Packet {
		p, err := packets.Load(name)
		l.must(err)
		return p
	}
	plain, good := load("unproven"), load("web-3")
	for _, tci := range []uint16{0, 0xe000} {
		l.must(l.freshEvents())
		l.must(l.forget())
		l.must(l.send(portCore, tagged(plain.Frame, tci), 0))
		e, err := l.nextEvent()
		l.must(err)
		if abi.Reason(e.Reason) != abi.ReasonUnproven {
			t.Errorf("tag %04x: refused for %s, want unproven", tci, abi.Reason(e.Reason))
		}
		if err := l.checkMoved("TC", moved{dropped: []string{"UNPROVEN"}, stats: map[uint32]abi.Stats{}}); err != nil {
			t.Errorf("tag %04x: %v", tci, err)
		}
		l.must(l.send(portCore, tagged(good.Frame, tci), 0))
		if err := l.checkOut(oracle.Arrival{Interface: good.Interface, Frame: good.Frame}, 0, nil); err != nil {
			t.Errorf("tag %04x: %v", tci, err)
		}
	}
	// Those of a VLAN, then one of ours: nothing but it may be counted.
	l.must(l.send(portCore, tagged(plain.Frame, 5), 0))
	l.must(l.send(portCore, tagged(good.Frame, 0xe005), 0))
	if err := l.refuses(portCore, plain.Frame, 0, abi.ReasonUnproven); err != nil {
		t.Error(err)
	}
}

// Two tags: the kernel would take both off, one after the other.
func TestSecondPriorityTagIsRefused(t *testing.T) {
	l := newScapyRig(t, "r6").goLive()
	p, err := packets.Load("unproven")
	l.must(err)
	l.must(l.send(portCore, tagged(tagged(p.Frame, 0), 0), 0))
	e, err := l.nextEvent()
	l.must(err)
	if got := abi.Reason(e.Reason); got != abi.ReasonVLANTags {
		t.Errorf("refused for %s, want %s", got, abi.ReasonVLANTags)
	}
}

// Sent by a real device, to the neighbour that the kernel's table names.
func TestEveryRoleSendsToTheNeighbour(t *testing.T) {
	for _, name := range []string{"edge-web", "ordered-1", "unordered-2", "web-3", "local"} {
		p, err := packets.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			l := newScapyRig(t, p.Node).goLive()
			l.must(l.setNumbers(max(p.Counter, 1)))
			l.must(l.send(p.Interface.Name, p.Frame, 0))
			if err := l.checkOut(oracle.Arrival{Interface: p.Interface, Frame: p.Frame, Number: l.number}, 0, &oracle.Labels{}); err != nil {
				t.Error(err)
			}
		})
	}
}

// An inner packet for the egress itself reaches its socket.
func TestInnerPacketForTheEgressIsDelivered(t *testing.T) {
	p, err := packets.Load("inner-for-the-egress")
	if err != nil {
		t.Fatal(err)
	}
	l := newScapyRig(t, p.Node).goLive()
	var c *net.UDPConn
	l.must(l.rig.in(func() (err error) {
		c, err = net.ListenUDP("udp6", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("[fc00:8::1]:53")))
		return err
	}))
	defer c.Close()
	l.must(c.SetReadDeadline(time.Now().Add(waitLimit)))
	l.must(l.send(portCore, p.Frame, 0))
	b := make([]byte, 100)
	n, from, err := c.ReadFromUDPAddrPort(b)
	if err != nil || string(b[:n]) != "waystamp" || from.String() != "[fc00:7::2]:4242" {
		t.Errorf("got %q from %s, %v", b[:n], from, err)
	}
}

// The head of a packet that a socket owns would grow without being counted.
func TestPacketOfATCPSocketLosesItsOwnerAtTheHeadend(t *testing.T) {
	const skOffset = 168 // of __sk_buff
	l := newScapyRig(t, "r1").goLive()
	l.must(l.setNumbers(1))
	peer := portEdge + "-peer"
	owned := 0 // packets with a routing header: [0] without, [1] with an owner
	l.must(l.rig.in(func() error {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 2})
		if err != nil {
			return err
		}
		defer m.Close()
		count, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadAbs(srv6.EthernetLen+6, asm.Byte),
			asm.JNE.Imm(asm.R0, srv6.NextHeaderRoute, "end"),
			asm.LoadMem(asm.R7, asm.R6, skOffset, asm.DWord),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.JEq.Imm(asm.R7, 0, "count"),
			asm.StoreImm(asm.RFP, -4, 1, asm.Word),
			asm.LoadMapPtr(asm.R1, m.FD()).WithSymbol("count"),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "end"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("end"),
			asm.Return(),
		}})
		if err != nil {
			return err
		}
		defer count.Close()
		if err := l.attach(count, portOut+"-peer"); err != nil {
			return err
		}

		// From the far end of the edge interface, which is in the same namespace.
		dev, err := netlink.LinkByName(peer)
		if err != nil {
			return err
		}
		web := net.ParseIP("fc00:8::2")
		if err := errors.Join(
			netlink.AddrAdd(dev, &netlink.Addr{IPNet: netOf(netip.MustParsePrefix("fc00:7::2/128")), Flags: unix.IFA_F_NODAD}),
			netlink.RouteAdd(&netlink.Route{LinkIndex: dev.Attrs().Index, Dst: netOf(netip.MustParsePrefix("fc00:8::2/128"))}),
			netlink.NeighAdd(&netlink.Neigh{LinkIndex: dev.Attrs().Index, IP: web, HardwareAddr: rigMAC[:], State: netlink.NUD_PERMANENT}),
		); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		to := &unix.SockaddrInet6{Port: 80, Addr: [16]byte(web)}
		if err := unix.Connect(fd, to); !errors.Is(err, unix.EINPROGRESS) {
			return fmt.Errorf("connect: %w", err)
		}
		for {
			b, _, err := l.receive()
			if err != nil {
				return err
			}
			if len(b) > 20 && b[20] == srv6.NextHeaderRoute {
				break
			}
		}
		var without, with uint64
		err = errors.Join(m.Lookup(uint32(0), &without), m.Lookup(uint32(1), &with))
		owned = int(with)
		if without == 0 && err == nil {
			err = errors.New("no packet without an owner was seen")
		}
		return err
	}))
	if owned != 0 {
		t.Errorf("%d encapsulated packets belong to the socket that sent them", owned)
	}
}
