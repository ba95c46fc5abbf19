package attack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// port is one end of a link, for whole frames.
type port struct {
	mac  [6]byte
	file *os.File
}

// receiveBuffer holds all that is under way in an attack, in bytes.
const receiveBuffer = 16 << 20

// openPort opens an interface for the IPv6 frames that come in by it.
func openPort(ns *host.NetNS, name string) (p *port, err error) {
	p = &port{}
	err = ns.Do(func() error {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		copy(p.mac[:], i.HardwareAddr)
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		p.file = os.NewFile(uintptr(fd), name)
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer); err != nil {
			return err
		}
		protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_IPV6))
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: i.Index})
	})
	if err != nil {
		p.close()
		return nil, fmt.Errorf("open %s in %s for raw frames: %w", name, ns, err)
	}
	return p, nil
}

func (p *port) close() {
	if p.file != nil {
		p.file.Close()
	}
}

// send puts an IPv6 packet on the wire.
func (p *port) send(to [6]byte, packet []byte) error {
	frame := make([]byte, 0, srv6.EthernetLen+len(packet))
	frame = append(append(frame, to[:]...), p.mac[:]...)
	frame = binary.BigEndian.AppendUint16(frame, srv6.EtherTypeIPv6)
	_, err := p.file.Write(append(frame, packet...))
	return err
}

// receive calls f for each frame that came in until the port is closed. The
// frame is f's to keep.
func (p *port) receive(f func(frame []byte)) error {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, 1<<16)
	for {
		var (
			n      int
			from   unix.Sockaddr
			failed error
		)
		if err := raw.Read(func(fd uintptr) bool {
			n, from, failed = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			return !errors.Is(failed, unix.EAGAIN)
		}); err != nil {
			return nil // it was closed
		}
		if failed != nil {
			return failed
		}
		if l, ok := from.(*unix.SockaddrLinklayer); !ok || l.Pkttype != unix.PACKET_OUTGOING {
			f(bytes.Clone(buf[:n]))
		}
	}
}

// hacked is the router of the lab that somebody has taken over: its kernel forwards
// nothing any more, and a program that knows no secret does what it likes with
// the frames on all its links. Left alone it is as honest as any wire.
type hacked struct {
	name   string
	domain model.Domain
	hosts  []model.LabHost
	ports  map[string]*port   // by neighbour
	macs   map[string][6]byte // of the neighbours' ends
	wait   sync.WaitGroup

	mu     sync.Mutex
	rule   rule
	tap    func(from string, p srv6.Packet)
	failed []error
}

// sent is an IPv6 packet that goes out: to whom its destination belongs, or to
// the neighbour that is named.
type sent struct {
	packet []byte
	to     string
}

// rule makes of a packet that came from a neighbour what goes on in its place.
// raw are its bytes from the IPv6 header on.
type rule func(from string, p srv6.Packet, raw []byte) []sent

// takeOver takes a router of a lab.
func takeOver(l *lab.Lab, router string, d model.Domain, w model.Lab) (_ *hacked, err error) {
	h := &hacked{name: router, domain: d, hosts: w.Hosts, ports: map[string]*port{}, macs: map[string][6]byte{}}
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	n, err := l.Net(router)
	if err != nil {
		return nil, err
	}
	defer n.Close()
	if err := n.SetSysctl("net/ipv6/conf/all/forwarding", "0"); err != nil {
		return nil, err
	}
	for _, k := range w.Links {
		peer := k.A
		switch router {
		case k.A:
			peer = k.B
		case k.B:
		default:
			continue
		}
		if h.ports[peer], err = openPort(n.NetNS(), router+"-"+peer); err != nil {
			return nil, err
		}
		if h.macs[peer], err = macOf(l, peer, peer+"-"+router); err != nil {
			return nil, err
		}
	}
	for peer, p := range h.ports {
		h.wait.Go(func() {
			if err := p.receive(func(frame []byte) { h.frame(peer, frame) }); err != nil {
				h.fail(fmt.Errorf("receive from %s: %w", peer, err))
			}
		})
	}
	return h, nil
}

func macOf(l *lab.Lab, member, link string) (mac [6]byte, err error) {
	n, err := l.Net(member)
	if err != nil {
		return mac, err
	}
	defer n.Close()
	return n.HardwareAddress(link)
}

func (h *hacked) close() {
	for _, p := range h.ports {
		p.close()
	}
	h.wait.Wait()
}

func (h *hacked) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failed = append(h.failed, err)
}

// err is what went wrong with the router's own work.
func (h *hacked) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := errors.Join(h.failed...)
	h.failed = nil
	return err
}

// set puts a rule in force, nil for none.
func (h *hacked) set(r rule) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rule = r
}

// listen has all packets shown to f before anything is done to them; nil: to
// nobody.
func (h *hacked) listen(f func(from string, p srv6.Packet)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tap = f
}

func (h *hacked) frame(from string, frame []byte) {
	p, err := srv6.DecodeFrame(frame)
	to := p.Header.Destination
	if err != nil || p.Ethernet.Destination != h.ports[from].mac || to.IsLinkLocalUnicast() || to.IsMulticast() {
		return // the router's own
	}
	h.mu.Lock()
	if h.tap != nil {
		h.tap(from, p)
	}
	raw := frame[srv6.EthernetLen:]
	out := asIs(raw)
	if h.rule != nil {
		out = h.rule(from, p, raw)
	}
	h.mu.Unlock()
	for _, s := range out {
		h.send(s)
	}
}

// send passes a packet on.
func (h *hacked) send(s sent) {
	if len(s.packet) < srv6.IPv6Len {
		h.fail(fmt.Errorf("a packet of %d bytes was to be sent", len(s.packet)))
		return
	}
	if s.to == "" {
		s.to = h.owner(netip.AddrFrom16([16]byte(s.packet[24:40])))
	}
	p, ok := h.ports[s.to]
	if !ok {
		h.fail(fmt.Errorf("no neighbour of %s has %s", h.name, netip.AddrFrom16([16]byte(s.packet[24:40]))))
		return
	}
	if err := p.send(h.macs[s.to], s.packet); err != nil {
		h.fail(fmt.Errorf("send to %s: %w", s.to, err))
	}
}

// owner is the node that an address belongs to, or is behind.
func (h *hacked) owner(a netip.Addr) string {
	for _, n := range h.domain.Nodes {
		if n.Address == a || n.Locator.Contains(a) {
			return n.Name
		}
	}
	for _, x := range h.hosts {
		if x.Prefix.Contains(a) {
			return x.Node
		}
	}
	return ""
}

// What the program does to packets. None of it changes the packet given.

func asIs(raw []byte) []sent { return []sent{{packet: raw}} }

// whole is the packet as bytes, with a payload length and lengths of headers that
// are right.
func whole(p srv6.Packet) []sent {
	p.Ethernet = nil
	if err := p.Fix(); err != nil {
		return nil
	}
	b, err := p.Append(nil)
	if err != nil {
		return nil
	}
	return []sent{{packet: b}}
}

func proofOf(p srv6.Packet) (srv6.Proof, bool) {
	if p.SRH == nil {
		return srv6.Proof{}, false
	}
	v, err := p.SRH.Proof()
	return v, err == nil
}

// withSRH is the packet with its own copy of the SRH, changed.
func withSRH(p srv6.Packet, edit func(*srv6.SRH)) srv6.Packet {
	s := *p.SRH
	s.Segments = append([]netip.Addr(nil), s.Segments...)
	s.TLVs = append([]srv6.TLV(nil), s.TLVs...)
	edit(&s)
	p.SRH = &s
	return p
}

func withProof(p srv6.Packet, edit func(*srv6.Proof)) srv6.Packet {
	return withSRH(p, func(s *srv6.SRH) {
		for i, t := range s.TLVs {
			if v, err := srv6.ParseProof(t); err == nil {
				edit(&v)
				s.TLVs[i] = v.TLV()
			}
		}
	})
}

// atSegment is the packet on its way to another entry of its segment list,
// which stays as it is. Entry 0 is the egress.
func atSegment(p srv6.Packet, left uint8) srv6.Packet {
	p = withSRH(p, func(s *srv6.SRH) { s.SegmentsLeft = left })
	p.Header.Destination = p.SRH.Segments[left]
	return p
}

// udp is an IPv6 packet with a UDP datagram (RFC 768).
func udp(from, to netip.AddrPort, payload []byte) []byte {
	length := 8 + len(payload)
	h := srv6.Header{
		NextHeader: unix.IPPROTO_UDP, HopLimit: 63, PayloadLength: uint16(length),
		Source: from.Addr(), Destination: to.Addr(),
	}
	b, _ := h.Append(nil) // both addresses are IPv6
	d := binary.BigEndian.AppendUint16(nil, from.Port())
	d = binary.BigEndian.AppendUint16(d, to.Port())
	d = binary.BigEndian.AppendUint16(d, uint16(length))
	d = append(append(d, 0, 0), payload...)
	src, dst := from.Addr().As16(), to.Addr().As16()
	pseudo := append(append([]byte{}, src[:]...), dst[:]...)
	pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(length))
	pseudo = binary.BigEndian.AppendUint32(pseudo, unix.IPPROTO_UDP)
	sum := checksum(append(pseudo, d...))
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(d[6:], sum)
	return append(b, d...)
}

// checksum is that of RFC 1071.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
