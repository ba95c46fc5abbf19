package lab

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Router is a router of a lab that somebody has taken over: its kernel forwards
// nothing any more, and a program that knows no secret does what it likes with
// the frames on all its links. Left alone it is as honest as any wire.
type Router struct {
	name   string
	domain model.Domain
	hosts  []model.LabHost
	ports  map[string]*host.Frames // by neighbour
	labels map[string]*host.Frames // the same, for frames with labels; empty: the domain has none
	macs   map[string][6]byte      // of the neighbours' ends
	wait   sync.WaitGroup

	mu     sync.Mutex
	rule   Rule
	swap   LabelRule
	tap    func(from string, p srv6.Packet)
	failed []error
}

// Sent is a packet that goes out: to whom its destination, or the label on its top,
// belongs, or to the neighbour that is named.
type Sent struct {
	Packet []byte
	To     string
	Labels bool // the packet begins with a stack of labels; else with an IPv6 header
}

// Rule makes of a packet that came from a neighbour what goes on in its place.
// raw are its bytes from the IPv6 header on. Neither is changed.
type Rule func(from string, p srv6.Packet, raw []byte) []Sent

// LabelRule does the same with a packet that has labels.
type LabelRule func(from string, p mpls.Packet) []Sent

// TakeOver takes a router of the lab, whose plan and links are d and w. Close
// gives it back, and leaves it forwarding nothing.
func (l *Lab) TakeOver(router string, d model.Domain, w model.Lab) (_ *Router, err error) {
	h := &Router{name: router, domain: d, hosts: w.Hosts, ports: map[string]*host.Frames{}, labels: map[string]*host.Frames{}, macs: map[string][6]byte{}}
	defer func() {
		if err != nil {
			h.Close()
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
		if h.ports[peer], err = host.OpenFrames(n.NetNS(), router+"-"+peer, unix.ETH_P_IPV6); err != nil {
			return nil, err
		}
		if d.MPLS != nil {
			if h.labels[peer], err = host.OpenFrames(n.NetNS(), router+"-"+peer, unix.ETH_P_MPLS_UC); err != nil {
				return nil, err
			}
		}
		if h.macs[peer], err = l.macOf(peer, peer+"-"+router); err != nil {
			return nil, err
		}
	}
	for _, side := range []struct {
		ports map[string]*host.Frames
		take  func(from string, frame []byte)
	}{{h.ports, h.frame}, {h.labels, h.labelled}} {
		for peer, p := range side.ports {
			h.wait.Go(func() {
				if err := p.Receive(make([]byte, 1<<16), func(frame []byte) { side.take(peer, bytes.Clone(frame)) }); err != nil {
					h.fail(fmt.Errorf("receive from %s: %w", peer, err))
				}
			})
		}
	}
	return h, nil
}

// frameOf is a packet as a frame.
func frameOf(from *host.Frames, to [6]byte, etherType uint16, packet []byte) []byte {
	frame := make([]byte, 0, srv6.EthernetLen+len(packet))
	frame = append(append(frame, to[:]...), from.MAC[:]...)
	frame = binary.BigEndian.AppendUint16(frame, etherType)
	return append(frame, packet...)
}

// SendFrom sends IPv6 packets from a member to a neighbour, past its kernel.
func (l *Lab) SendFrom(member, neighbour string, packets ...[]byte) error {
	return l.sendFrom(member, neighbour, srv6.EtherTypeIPv6, packets)
}

// SendLabelsFrom does the same with packets that begin with a stack of labels.
func (l *Lab) SendLabelsFrom(member, neighbour string, packets ...[]byte) error {
	return l.sendFrom(member, neighbour, unix.ETH_P_MPLS_UC, packets)
}

func (l *Lab) sendFrom(member, neighbour string, etherType uint16, packets [][]byte) error {
	ns, err := l.NetNS(member)
	if err != nil {
		return err
	}
	defer ns.Close()
	to, err := l.macOf(neighbour, neighbour+"-"+member)
	if err != nil {
		return err
	}
	link, err := host.OpenFrames(ns, member+"-"+neighbour, etherType)
	if err != nil {
		return err
	}
	defer link.Close()
	for _, p := range packets {
		if err := link.Send(frameOf(link, to, etherType, p)); err != nil {
			return fmt.Errorf("send from %s: %w", member, err)
		}
	}
	return nil
}

func (l *Lab) macOf(member, link string) (mac [6]byte, err error) {
	n, err := l.Net(member)
	if err != nil {
		return mac, err
	}
	defer n.Close()
	return n.HardwareAddress(link)
}

// Close ends what the program does.
func (h *Router) Close() {
	for _, ports := range []map[string]*host.Frames{h.ports, h.labels} {
		for _, p := range ports {
			p.Close()
		}
	}
	h.wait.Wait()
}

func (h *Router) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failed = append(h.failed, err)
}

// Err is what went wrong with the router's own work since it was asked last.
func (h *Router) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := errors.Join(h.failed...)
	h.failed = nil
	return err
}

// Set puts a rule in force, nil for none.
func (h *Router) Set(r Rule) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rule = r
}

// SetLabels puts a rule for packets with labels in force, nil for none.
func (h *Router) SetLabels(r LabelRule) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.swap = r
}

// Listen has all IPv6 packets shown to f before anything is done to them; nil: to
// nobody.
func (h *Router) Listen(f func(from string, p srv6.Packet)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tap = f
}

func (h *Router) frame(from string, frame []byte) {
	p, err := srv6.DecodeFrame(frame)
	to := p.Header.Destination
	if err != nil || p.Ethernet.Destination != h.ports[from].MAC || to.IsLinkLocalUnicast() || to.IsMulticast() {
		return // the router's own
	}
	h.mu.Lock()
	if h.tap != nil {
		h.tap(from, p)
	}
	raw := frame[srv6.EthernetLen:]
	out := []Sent{{Packet: raw}}
	if h.rule != nil {
		out = h.rule(from, p, raw)
	}
	h.mu.Unlock()
	for _, s := range out {
		h.Send(s)
	}
}

func (h *Router) labelled(from string, frame []byte) {
	p, err := mpls.ParseFrame(frame, h.domain.MPLS.IsService)
	if err != nil || p.Ethernet.Destination != h.ports[from].MAC {
		h.fail(fmt.Errorf("%s sent a frame with labels that are none: %w", from, err))
		return
	}
	h.mu.Lock()
	out := []Sent{{Packet: frame[srv6.EthernetLen:], Labels: true}}
	if h.swap != nil {
		out = h.swap(from, p)
	}
	h.mu.Unlock()
	for _, s := range out {
		h.Send(s)
	}
}

// Send passes a packet on; Err tells if it could not.
func (h *Router) Send(s Sent) {
	least, etherType := srv6.IPv6Len, uint16(srv6.EtherTypeIPv6)
	if s.Labels {
		least, etherType = mpls.EntryLen, unix.ETH_P_MPLS_UC
	}
	if len(s.Packet) < least {
		h.fail(fmt.Errorf("a packet of %d bytes was to be sent", len(s.Packet)))
		return
	}
	if s.To == "" && s.Labels {
		s.To = h.labelOwner(mpls.Entry(binary.BigEndian.Uint32(s.Packet)).Label())
	} else if s.To == "" {
		s.To = h.owner(netip.AddrFrom16([16]byte(s.Packet[24:40])))
	}
	p, ok := h.ports[s.To]
	if !ok {
		h.fail(fmt.Errorf("no neighbour of %s has what a packet begins with: %x", h.name, s.Packet[:min(len(s.Packet), srv6.IPv6Len)]))
		return
	}
	if err := p.Send(frameOf(p, h.macs[s.To], etherType, s.Packet)); err != nil {
		h.fail(fmt.Errorf("send to %s: %w", s.To, err))
	}
}

// labelOwner is the node that a label leads to.
func (h *Router) labelOwner(label uint32) string {
	for _, n := range h.domain.Nodes {
		if n.MPLS != nil && n.MPLS.Label == label {
			return n.Name
		}
	}
	return ""
}

// owner is the node that an address belongs to, or is behind.
func (h *Router) owner(a netip.Addr) string {
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
