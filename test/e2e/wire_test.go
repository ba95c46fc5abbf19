package e2e

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/srv6"
)

// port is an interface to somebody who sends and receives whole frames.
type port struct {
	mac   [6]byte
	index int
	file  *os.File
}

// openPort opens an interface in a namespace for frames of a protocol
// (unix.ETH_P_IPV6: those that come in; unix.ETH_P_ALL: in both directions, and
// before any program at TC sees them).
func openPort(t *testing.T, ns *host.NetNS, name string, protocol uint16) *port {
	t.Helper()
	p := &port{}
	must(t, ns.Do(func() error {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		p.index = i.Index
		copy(p.mac[:], i.HardwareAddr)
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		p.file = os.NewFile(uintptr(fd), name)
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder(protocol), Ifindex: i.Index})
	}))
	t.Cleanup(func() { p.file.Close() })
	return p
}

func networkOrder(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// send puts a frame on the wire. PayloadLength is made true.
func (p *port) send(frame srv6.Packet) error {
	if err := frame.Fix(); err != nil {
		return err
	}
	b, err := frame.Append(nil)
	if err == nil {
		_, err = p.file.Write(b)
	}
	return err
}

// receive calls f for each frame, until the port is closed. Frames longer than
// buf are cut.
func (p *port) receive(buf []byte, f func(frame []byte)) error {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var n int
		var from unix.Sockaddr
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			n, from, failed = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			return !errors.Is(failed, unix.EAGAIN)
		})
		switch {
		case err != nil: // closed
			return nil
		case errors.Is(failed, unix.ENETDOWN): // for now
			continue
		case failed != nil:
			return failed
		}
		if l, ok := from.(*unix.SockaddrLinklayer); ok && l.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		f(buf[:n])
	}
}

// capture keeps the headers of the IPv6 packets that come in by an interface.
type capture struct {
	mu      sync.Mutex
	packets []srv6.Packet
}

func (w *world) capture(node, name string) *capture {
	w.t.Helper()
	c := &capture{}
	p := openPort(w.t, w.ns(node), name, unix.ETH_P_ALL)
	done := make(chan error, 1)
	go func() {
		done <- p.receive(make([]byte, 512), func(frame []byte) {
			if pkt, err := srv6.DecodeFrame(frame); err == nil {
				c.mu.Lock()
				c.packets = append(c.packets, pkt)
				c.mu.Unlock()
			}
		})
	}()
	w.t.Cleanup(func() {
		p.file.Close()
		if err := <-done; err != nil {
			w.t.Errorf("capture at %s: %v", name, err)
		}
	})
	return c
}

// proofs are those of a path that have come so far, in their order.
func (c *capture) proofs(path uint32) (out []srv6.Proof) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.packets {
		if p.SRH == nil {
			continue
		}
		if proof, err := p.SRH.Proof(); err == nil && proof.Path == path {
			out = append(out, proof)
		}
	}
	return out
}

// meddler is a router in somebody else's hands: a namespace that forwards
// nothing by itself, and a program that passes frames on as it likes.
type meddler struct {
	w     *world
	ports map[string]*port   // by neighbour
	macs  map[string][6]byte // of the neighbours' ends

	mu     sync.Mutex
	tamper tamper
}

// tamper makes of a packet that came from a neighbour what goes on in its
// place; each packet is sent to whom its destination belongs.
type tamper func(from string, p srv6.Packet) []srv6.Packet

// meddle takes a router of the lab over. Until tamper is set it is as honest as
// any wire.
func (w *world) meddle(router string) *meddler {
	w.t.Helper()
	m := &meddler{w: w, ports: map[string]*port{}, macs: map[string][6]byte{}}
	must(w.t, w.net(router).SetSysctl("net/ipv6/conf/all/forwarding", "0"))
	ns := w.ns(router)
	for _, l := range w.manifest.Lab.Links {
		peer := l.A
		switch router {
		case l.A:
			peer = l.B
		case l.B:
		default:
			continue
		}
		m.ports[peer] = openPort(w.t, ns, router+"-"+peer, unix.ETH_P_IPV6)
		must(w.t, w.Do(peer, func() error {
			i, err := net.InterfaceByName(peer + "-" + router)
			if err == nil {
				m.macs[peer] = [6]byte(i.HardwareAddr)
			}
			return err
		}))
	}
	var running sync.WaitGroup
	for peer, p := range m.ports {
		running.Go(func() {
			err := p.receive(make([]byte, 1<<16), func(frame []byte) { m.frame(peer, frame) })
			if err != nil {
				w.t.Errorf("%s, from %s: %v", router, peer, err)
			}
		})
	}
	w.t.Cleanup(func() {
		for _, p := range m.ports {
			p.file.Close()
		}
		running.Wait()
	})
	return m
}

// frame deals with one frame.
func (m *meddler) frame(from string, frame []byte) {
	p, err := srv6.DecodeFrame(frame)
	if err != nil || p.Ethernet.Destination != m.ports[from].mac || !isRouted(p.Header.Destination) {
		return // the router's own
	}
	out := []srv6.Packet{p}
	m.mu.Lock()
	if m.tamper != nil {
		out = m.tamper(from, p)
	}
	m.mu.Unlock()
	for _, p := range out {
		m.send(p)
	}
}

func isRouted(a netip.Addr) bool { return !a.IsLinkLocalUnicast() && !a.IsMulticast() }

// send passes a packet on to whom its destination belongs.
func (m *meddler) send(p srv6.Packet) {
	to := m.w.owner(p.Header.Destination)
	out, ok := m.ports[to]
	if !ok {
		m.w.t.Errorf("no neighbour has %s", p.Header.Destination)
		return
	}
	p.Ethernet = &srv6.Ethernet{Destination: m.macs[to], Source: out.mac, Type: srv6.EtherTypeIPv6}
	if err := out.send(p); err != nil {
		m.w.t.Errorf("send to %s: %v", to, err)
	}
}

// with tampers while f runs.
func (m *meddler) with(do tamper, f func()) {
	set := func(do tamper) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.tamper = do
	}
	set(do)
	defer set(nil)
	f()
}

// owner is the node that an address belongs to, or is behind.
func (w *world) owner(a netip.Addr) string {
	for _, n := range w.manifest.Domain.Nodes {
		if n.Address == a || n.Locator.Contains(a) {
			return n.Name
		}
	}
	for _, h := range w.manifest.Lab.Hosts {
		if h.Prefix.Contains(a) {
			return h.Node
		}
	}
	return ""
}

// proof is what a packet's proof TLV says.
func proof(p srv6.Packet) (srv6.Proof, bool) {
	if p.SRH == nil {
		return srv6.Proof{}, false
	}
	v, err := p.SRH.Proof()
	return v, err == nil
}

// withProof is the packet with another proof, bytes of the rest as they were.
func withProof(p srv6.Packet, edit func(*srv6.Proof)) srv6.Packet {
	srh := *p.SRH
	srh.TLVs = append([]srv6.TLV(nil), p.SRH.TLVs...)
	for i, t := range srh.TLVs {
		if v, err := srv6.ParseProof(t); err == nil {
			edit(&v)
			srh.TLVs[i] = v.TLV()
		}
	}
	p.SRH = &srh
	return p
}

// atSegment is the packet on its way to another entry of its segment list, which
// stays as it is.
func atSegment(p srv6.Packet, left uint8) srv6.Packet {
	srh := *p.SRH
	srh.SegmentsLeft = left
	p.SRH = &srh
	p.Header.Destination = srh.Segments[left]
	return p
}
