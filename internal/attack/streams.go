package attack

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
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
				buf := make([]byte, 1<<12)
				for {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					s.saw(sighting{host: name, data: slices.Clone(buf[:n])})
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
	if c := m.connections[key]; c != nil {
		return c, nil
	}
	if len(m.connections) == 0 {
		if err := m.finishWorker(ctx); err != nil {
			return nil, err
		}
	}
	var c net.Conn
	err := m.lab.Do(m.scheme.String(), func() (err error) {
		c, err = (&net.Dialer{Timeout: verdictTime}).DialContext(ctx, "tcp6", m.service(to, streamPort).String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("connect through the function: %w", err)
	}
	m.closers = append(m.closers, c.Close)
	m.connections[key] = c.(*net.TCPConn)
	return m.connections[key], nil
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

// ofConnection is an attack on a connection that is open: segment is one with its addresses and
// ports, flags and the attack's tag.
func ofConnection(do func(ctx context.Context, m *mounting, segment func(flags uint8) []byte) error) func(context.Context, *mounting) error {
	return func(ctx context.Context, m *mounting) error {
		c, err := m.connection(ctx, "h2")
		if err != nil {
			return err
		}
		m.count++
		if err := m.say(ctx, c, fmt.Sprintf("<open %d of %s", m.count, m.tag[1:])); err != nil {
			return err
		}
		from := c.LocalAddr().(*net.TCPAddr).AddrPort()
		return do(ctx, m, func(flags uint8) []byte {
			return tcp(from, m.service("h2", streamPort), flags, []byte(m.tag))
		})
	}
}

// plainSegment sends a segment without any outer header to the function's node.
func plainSegment(flags uint8) func(context.Context, *mounting) error {
	return ofConnection(func(_ context.Context, m *mounting, segment func(uint8) []byte) error {
		return m.inject([]lab.Sent{{Packet: segment(flags), To: "r2"}})
	})
}

// captureSegment takes a packet of a connection on the link to the function's node. It does not
// arrive; TCP sends another.
func (m *mounting) captureSegment(ctx context.Context, c *net.TCPConn, keep bool, text string) (srv6.Packet, error) {
	took := make(chan srv6.Packet, 1)
	m.alter(text, map[string]func(srv6.Packet, []byte) []lab.Sent{"r1": func(p srv6.Packet, raw []byte) []lab.Sent {
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
		return srv6.Packet{}, errors.New("no packet of the connection came to the link to r2")
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
	p, err := m.captureSegment(ctx, c, true, text)
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
	p, err := m.captureSegment(ctx, c, true, text)
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
	p, err := m.captureSegment(ctx, c, false, m.tag)
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
func pastFunction(ctx context.Context, m *mounting, segment func(uint8) []byte) error {
	p, err := m.heldSegment(ctx, "h2", segment(tcpACK|tcpPSH))
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
	return func(ctx context.Context, m *mounting) error {
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
		return link.Send(slices.Concat(to[:], link.MAC[:], []byte{0x86, 0xdd}, packet(m)))
	}
}

// unopened is a segment of a connection that was never opened.
func unopened(m *mounting) []byte {
	return tcp(m.service(m.scheme.String(), neverOpened), m.service("h2", streamPort), tcpACK|tcpPSH, []byte(m.tag))
}

// tcp is an IPv6 packet with a TCP segment (RFC 9293 section 3.1).
func tcp(from, to netip.AddrPort, flags uint8, payload []byte) []byte {
	const header = 20
	b := make([]byte, header, header+len(payload))
	binary.BigEndian.PutUint16(b, from.Port())
	binary.BigEndian.PutUint16(b[2:], to.Port())
	binary.BigEndian.PutUint32(b[4:], 1) // sequence number: not checked before the refusal
	binary.BigEndian.PutUint32(b[8:], 1)
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
