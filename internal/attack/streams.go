package attack

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// The interface in a worker's namespace.
const workerLink = "waystamp"

// neverOpened is a port that no connection of chain g has on the client's side.
const neverOpened = 9

// What is seen of the end of a connection at its server, before the last data that it had.
const (
	resetAfter = "reset after "
	endAfter   = "end after "
)

// Flags of a TCP header (RFC 9293 section 3.1).
const (
	tcpSYN = 1 << 1
	tcpRST = 1 << 2
	tcpPSH = 1 << 3
	tcpACK = 1 << 4
)

// serveConnections accepts connections at a host, and reads their data.
func (s *stage) serveConnections(ctx context.Context, name string) error {
	if err := s.finish(name, name+"-r6"); err != nil {
		return err
	}
	var l net.Listener
	err := s.lab.Do(name, func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp6", s.service(name, streamPort).String())
		return err
	})
	if err != nil {
		return fmt.Errorf("listen at %s: %w", name, err)
	}
	s.closers = append(s.closers, l.Close)
	s.wait.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // it is closed
			}
			s.wait.Go(func() {
				defer c.Close()
				defer context.AfterFunc(ctx, func() { c.Close() })()
				buf, last := make([]byte, 1<<12), []byte(nil)
				for {
					n, err := c.Read(buf)
					switch {
					case errors.Is(err, unix.ECONNRESET):
						s.saw(sighting{host: name, data: append([]byte(resetAfter), last...)})
						return
					case errors.Is(err, io.EOF):
						s.saw(sighting{host: name, data: append([]byte(endAfter), last...)})
						return
					case err != nil:
						return
					}
					last = slices.Clone(buf[:n])
					s.saw(sighting{host: name, data: last})
				}
			})
		}
	})
	return nil
}

// finish has an interface's packets leave with their checksums.
func (s *stage) finish(name, link string) error {
	n, err := s.lab.Net(name)
	if err != nil {
		return err
	}
	defer n.Close()
	return n.SetOffload(link, host.TransmitSum, false)
}

// worker is the namespace of the function on byte streams.
func (s *stage) worker(ctx context.Context) (*host.NetNS, error) {
	c := agent.NewClient(agent.SocketPath(s.lab.AgentDir("r2")))
	defer c.Close()
	f, err := c.Function(ctx, "tap")
	if err != nil {
		return nil, err
	}
	if f.Stream == nil {
		return nil, errors.New("the function tap is none on byte streams")
	}
	if f.Stream.Worker == 0 {
		return nil, fmt.Errorf("the function tap has no worker: %s", f.Stream.Error)
	}
	return host.OpenProcess(f.Stream.Worker)
}

// finishWorker finishes packets from the worker in the same way.
func (s *stage) finishWorker(ctx context.Context) error {
	ns, err := s.worker(ctx)
	if err != nil {
		return err
	}
	defer ns.Close()
	n, err := host.Open(ns)
	if err != nil {
		return err
	}
	return errors.Join(n.SetOffload(workerLink, host.TransmitSum, false), n.Close())
}

// connection is one of the scheme's host to a host behind the egress: chain g's to h2, chain
// h's to h3. It is opened once.
func (m *mounting) connection(ctx context.Context, to string) (*net.TCPConn, error) {
	key := m.scheme.String() + " " + to
	if m.connections[key] == nil {
		c, err := m.dial(ctx, to)
		if err != nil {
			return nil, err
		}
		m.connections[key] = c
	}
	return m.connections[key], nil
}

// dial opens a connection of the scheme's host that no other attack has.
func (m *mounting) dial(ctx context.Context, to string) (*net.TCPConn, error) {
	if !m.finished {
		if err := m.finishWorker(ctx); err != nil {
			return nil, err
		}
		m.finished = true
	}
	var c net.Conn
	err := m.lab.Do(m.scheme.String(), func() (err error) {
		c, err = (&net.Dialer{Timeout: verdictTime}).DialContext(ctx, "tcp6", m.service(to, streamPort).String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("connect through the function: %w", err)
	}
	m.closers = append(m.closers, func() error {
		if err := c.Close(); !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	return c.(*net.TCPConn), nil
}

// say sends a text on a connection, and waits until it has arrived.
func (m *mounting) say(ctx context.Context, c *net.TCPConn, text string) error {
	if _, err := c.Write([]byte(text)); err != nil {
		return err
	}
	end, err := m.await(ctx, text, 1)
	if err == nil && end.host == "" {
		err = fmt.Errorf("what a connection brought was refused at %s: %s", end.event.Node, end.event.Reason)
	}
	return err
}

// numbers are what the next segment of a connection has, as its client sees it.
type numbers struct {
	client, server  netip.AddrPort
	sequence, acked uint32 // of the client's next segment
}

// segment is one from the client, with a text as data.
func (n numbers) segment(flags uint8, data string) []byte {
	return tcp(n.client, n.server, n.sequence, n.acked, flags, []byte(data))
}

// answer is one from the server.
func (n numbers) answer(flags uint8, data string) []byte {
	return tcp(n.server, n.client, n.acked, n.sequence, flags, []byte(data))
}

// listen sends a text on a connection, and reads in the packet that has it, on a link from a node, what the connection's
// next segment has. The text arrives before it returns.
func (m *mounting) listen(ctx context.Context, c *net.TCPConn, from, text string) (n numbers, err error) {
	p, err := m.captureSegment(ctx, c, from, false, text)
	if err != nil {
		return n, err
	}
	end, err := m.await(ctx, text, 1)
	if err == nil && end.host == "" {
		err = fmt.Errorf("what a connection brought was refused at %s: %s", end.event.Node, end.event.Reason)
	}
	if err != nil {
		return n, err
	}
	b := p.Payload
	src, dst := netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
	b = b[srv6.IPv6Len:]
	return numbers{
		client: netip.AddrPortFrom(src, binary.BigEndian.Uint16(b)), server: netip.AddrPortFrom(dst, binary.BigEndian.Uint16(b[2:])),
		sequence: binary.BigEndian.Uint32(b[4:]) + uint32(len(text)), acked: binary.BigEndian.Uint32(b[8:]),
	}, nil
}

// ofConnection is an attack on a connection that is open, with the numbers of its next segment.
func ofConnection(do func(ctx context.Context, m *mounting, n numbers) error) func(context.Context, *mounting) error {
	return func(ctx context.Context, m *mounting) error {
		c, err := m.connection(ctx, "h2")
		if err != nil {
			return err
		}
		m.count++
		n, err := m.listen(ctx, c, "r1", fmt.Sprintf("<open %d of %s", m.count, m.tag[1:]))
		if err != nil {
			return err
		}
		return do(ctx, m, n)
	}
}

// plainSegment sends a segment of the client's without any outer header to a node.
func plainSegment(node string, flags uint8) func(context.Context, *mounting) error {
	return ofConnection(func(_ context.Context, m *mounting, n numbers) error {
		return m.inject([]lab.Sent{{Packet: n.segment(flags, m.tag), To: node}})
	})
}

// plainAnswer sends one of the server's.
func plainAnswer(node string) func(context.Context, *mounting) error {
	return ofConnection(func(_ context.Context, m *mounting, n numbers) error {
		return m.inject([]lab.Sent{{Packet: n.answer(tcpACK|tcpPSH, m.tag), To: node}})
	})
}

// segmentBackDoor sends a segment of the client's into the egress node by a link that is not in its plan.
func segmentBackDoor(ctx context.Context, m *mounting) error {
	if err := m.linkToEgress(ctx); err != nil {
		return err
	}
	return ofConnection(func(_ context.Context, m *mounting, n numbers) error {
		return m.from("x", "r6", asIs(n.segment(tcpACK|tcpPSH, m.tag)))
	})(ctx, m)
}

// otherReset puts a RST of one connection, with its numbers, into a packet of another one.
func otherReset(ctx context.Context, m *mounting) error {
	victim, err := m.dial(ctx, "h2")
	if err != nil {
		return err
	}
	m.count++
	text := fmt.Sprintf("<victim %d of %s", m.count, m.tag[1:])
	n, err := m.listen(ctx, victim, "r1", text)
	if err != nil {
		return err
	}
	m.tag = resetAfter + text
	p, err := m.heldSegment(ctx, "h2", n.segment(tcpRST, m.tag)) // data in a RST: RFC 9293 section 3.5.3
	if err != nil {
		return err
	}
	return m.inject(whole(p))
}

// replayConnection opens a connection, sends on it, ends it, and sends all of its packets to the function again.
func replayConnection(ctx context.Context, m *mounting) error {
	var path uint32
	for _, p := range m.paths {
		if p.Chain == m.scheme.String()+"-g" && p.Direction == model.Forward && p.To == "tap" {
			path = p.Path
		}
	}
	// All of the chain's: others that are open send nothing but signs of life, which were as used.
	var packets []lab.Sent
	m.router.Set(func(from string, p srv6.Packet, raw []byte) []lab.Sent {
		if v, ok := p.Proof(); ok && from == "r1" && v.Path == path {
			packets = append(packets, lab.Sent{Packet: slices.Clone(raw)})
		}
		return asIs(raw)
	})
	defer m.router.Set(nil)
	c, err := m.dial(ctx, "h2")
	if err != nil {
		return err
	}
	if err := m.say(ctx, c, m.tag); err != nil {
		return err
	}
	if err := c.Close(); err != nil {
		return err
	}
	if _, err := m.await(ctx, endAfter+m.tag, 1); err != nil {
		return err
	}
	m.router.Set(nil) // which waits for the rule
	const least = 4   // SYN, ACK, data, FIN
	if len(packets) < least {
		return fmt.Errorf("%d packets of a connection were recorded; it has %d at least", len(packets), least)
	}
	m.ends = 3 // the data, the connection's end, and the data refused
	// The others are refused for the same reason.
	m.ledger[refusal{"r2", "replay"}] += uint64(len(packets)) - 1
	return m.inject(packets)
}

// captureSegment takes the packet with a text of a connection on the link from a node. keep: it does not
// arrive; TCP sends another.
func (m *mounting) captureSegment(ctx context.Context, c *net.TCPConn, from string, keep bool, text string) (srv6.Packet, error) {
	took := make(chan srv6.Packet, 1)
	m.alter(text, map[string]func(srv6.Packet, []byte) []lab.Sent{from: func(p srv6.Packet, raw []byte) []lab.Sent {
		select {
		case took <- p:
			if keep {
				return nil
			}
		default:
		}
		return asIs(raw)
	}})
	defer m.router.Set(nil)
	if _, err := c.Write([]byte(text)); err != nil {
		return srv6.Packet{}, err
	}
	select {
	case p := <-took:
		return p, nil
	case <-time.After(verdictTime):
		return srv6.Packet{}, errors.New("no packet of the connection came to the link from " + from)
	case <-ctx.Done():
		return srv6.Packet{}, context.Cause(ctx)
	}
}

// heldSegment is a packet on the link to r2, of the connection to a host, with another segment
// in it. The one that it held arrives before this returns.
func (m *mounting) heldSegment(ctx context.Context, to string, segment []byte) (srv6.Packet, error) {
	c, err := m.connection(ctx, to)
	if err != nil {
		return srv6.Packet{}, err
	}
	m.count++
	text := fmt.Sprintf("<held back %d of %s", m.count, m.tag[1:])
	p, err := m.captureSegment(ctx, c, "r1", true, text)
	if err != nil {
		return srv6.Packet{}, err
	}
	p.Payload = segment
	_, err = m.await(ctx, text, 1)
	return p, err
}

// otherData replaces the data in a packet of a connection. TCP accepts it as its client's.
func otherData(ctx context.Context, m *mounting) error {
	c, err := m.connection(ctx, "h2")
	if err != nil {
		return err
	}
	text := "~" + m.tag[1:]
	p, err := m.captureSegment(ctx, c, "r1", true, text)
	if err != nil {
		return err
	}
	const sumAt = srv6.IPv6Len + 16
	p.Payload = bytes.Replace(p.Payload, []byte(text), []byte(m.tag), 1)
	p.Payload[sumAt], p.Payload[sumAt+1] = 0, 0
	sum := srv6.UpperLayerChecksum(m.host().Addr(), m.address("h2"), unix.IPPROTO_TCP, p.Payload[srv6.IPv6Len:])
	binary.BigEndian.PutUint16(p.Payload[sumAt:], sum)
	return m.inject(whole(p))
}

func replaySegment(ctx context.Context, m *mounting) error {
	c, err := m.connection(ctx, "h2")
	if err != nil {
		return err
	}
	p, err := m.captureSegment(ctx, c, "r1", false, m.tag)
	if err != nil {
		return err
	}
	if end, err := m.await(ctx, m.tag, 1); err != nil || end.host == "" {
		return errors.Join(err, errors.New("the segment was not delivered the first time"))
	}
	m.ends = 2
	return m.inject(whole(p))
}

// pastFunction sends a packet of the part before the function to the chain's egress.
func pastFunction(ctx context.Context, m *mounting, n numbers) error {
	p, err := m.heldSegment(ctx, "h2", n.segment(tcpACK|tcpPSH, m.tag))
	if err != nil {
		return err
	}
	var egress netip.Addr
	for _, x := range m.paths {
		if x.Chain == m.scheme.String()+"-g" && x.Direction == model.Forward && x.To == "" {
			egress = x.Hops[len(x.Hops)-1].SID
		}
	}
	p.Header.Destination = egress
	return m.inject(whole(p.WithSRH(func(s *srv6.SRH) { s.Segments[0] = egress })))
}

// fromWorker sends a packet from the worker's namespace.
func fromWorker(packet func(*mounting) []byte) func(context.Context, *mounting) error {
	return func(ctx context.Context, m *mounting) error { return m.sendFromWorker(ctx, packet(m)) }
}

func (m *mounting) sendFromWorker(ctx context.Context, packet []byte) error {
	r2, err := m.lab.Net("r2")
	if err != nil {
		return err
	}
	defer r2.Close()
	to, err := r2.HardwareAddress(model.StreamDetour("tap").To)
	if err != nil {
		return err
	}
	ns, err := m.worker(ctx)
	if err != nil {
		return err
	}
	defer ns.Close()
	link, err := host.OpenFrames(ns, workerLink, unix.ETH_P_IPV6)
	if err != nil {
		return err
	}
	defer link.Close()
	return link.Send(slices.Concat(to[:], link.MAC[:], []byte{0x86, 0xdd}, packet))
}

// workerData has the function's process send data of its own on a connection that is open, with the numbers of the
// segment that its TCP would send next.
func workerData(ctx context.Context, m *mounting) error {
	c, err := m.dial(ctx, "h2")
	if err != nil {
		return err
	}
	m.count++
	n, err := m.listen(ctx, c, "r2", fmt.Sprintf("<open %d of %s", m.count, m.tag[1:]))
	if err != nil {
		return err
	}
	return m.sendFromWorker(ctx, n.segment(tcpACK|tcpPSH, m.tag))
}

// workerSRH has it send a whole packet that was held back on the last link.
func workerSRH(ctx context.Context, m *mounting) error {
	p, err := m.capture(ctx, m.tag, true)
	if err != nil {
		return err
	}
	return m.sendFromWorker(ctx, whole(p)[0].Packet)
}

// advertisement says to all nodes on the link that the sender has an address of r2 (RFC 4861 section 4.4).
func advertisement(m *mounting) []byte {
	const kind, override, targetLinkLayer = 136, 1 << 5, 2
	from, to := netip.MustParseAddr("fe80::2"), netip.MustParseAddr("ff02::1")
	target := netip.MustParseAddr("fc00:2::1").As16()
	b := append([]byte{kind, 0, 0, 0, override, 0, 0, 0}, target[:]...)
	b = append(b, targetLinkLayer, 1, 2, 0, 0, 0, 0, 9)
	b = append(b, m.tag...)
	binary.BigEndian.PutUint16(b[2:], srv6.UpperLayerChecksum(from, to, unix.IPPROTO_ICMPV6, b))
	h := srv6.Header{NextHeader: unix.IPPROTO_ICMPV6, HopLimit: 255, PayloadLength: uint16(len(b)), Source: from, Destination: to}
	out, _ := h.Append(nil) // both addresses are IPv6
	return append(out, b...)
}

// unopened is a segment of a connection that was never opened.
func unopened(m *mounting) []byte {
	return unopenedTo(m, m.address("h2"))
}

func unopenedTo(m *mounting, to netip.Addr) []byte {
	return tcp(m.service(m.scheme.String(), neverOpened), netip.AddrPortFrom(to, streamPort), 1, 1, tcpACK|tcpPSH, []byte(m.tag))
}

// tcp is an IPv6 packet with a TCP segment (RFC 9293 section 3.1).
func tcp(from, to netip.AddrPort, sequence, acked uint32, flags uint8, payload []byte) []byte {
	const header = 20
	b := make([]byte, header, header+len(payload))
	binary.BigEndian.PutUint16(b, from.Port())
	binary.BigEndian.PutUint16(b[2:], to.Port())
	binary.BigEndian.PutUint32(b[4:], sequence)
	binary.BigEndian.PutUint32(b[8:], acked)
	b[12], b[13] = header/4<<4, flags
	binary.BigEndian.PutUint16(b[14:], 1<<15-1)
	b = append(b, payload...)
	binary.BigEndian.PutUint16(b[16:], srv6.UpperLayerChecksum(from.Addr(), to.Addr(), unix.IPPROTO_TCP, b))
	h := srv6.Header{
		NextHeader: unix.IPPROTO_TCP, HopLimit: 63, PayloadLength: uint16(len(b)),
		Source: from.Addr(), Destination: to.Addr(),
	}
	out, _ := h.Append(nil) // both addresses are IPv6
	return append(out, b...)
}
