package attack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// serviceAt is where the service label of the next visit is in a stack, behind the node's label
// and an entropy label with its indicator.
const serviceAt = 3

// labelled is an attack that changes one packet of chain e as it comes from a neighbour.
func labelled(name, what, from string, do func(*mounting, mpls.Packet) []lab.Sent, expect func(model.Scheme) outcome) attack {
	return labelledTo(name, what, from, func(m *mounting, tag string) error { return m.send(tag, m.service("h2", labelPort)) }, do, expect)
}

// labelledTo is the same for a packet that send sends.
func labelledTo(name, what, from string, send func(m *mounting, tag string) error, do func(*mounting, mpls.Packet) []lab.Sent, expect func(model.Scheme) outcome) attack {
	return attack{Attack{name, what, onLink}, func(ctx context.Context, m *mounting) error {
		// The chain is good.
		m.count++
		passes := fmt.Sprintf("<passes %d of %s", m.count, m.tag[1:])
		if err := send(m, passes); err != nil {
			return err
		}
		if end, err := m.await(ctx, passes, 1); err != nil || end.host == "" {
			return errors.Join(err, errors.New("a packet over labels was not delivered"))
		}
		m.alterLabels(m.tag, from, func(p mpls.Packet) []lab.Sent { return do(m, p) })
		return send(m, m.tag)
	}, expect}
}

// toFunction sends a datagram of chain j, whose function is netfilter on r2.
func toFunction(m *mounting, tag string) error { return m.send(tag, m.service("h2", labelFilterPort)) }

// ownTraffic sends a datagram of chain k, from a socket of r1 itself.
func ownTraffic(m *mounting, tag string) error {
	return m.lab.Do("r1", func() error {
		to := net.UDPAddrFromAddrPort(m.service("h2", ownPorts[m.scheme]))
		c, err := net.DialUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(m.headend(), 0)), to)
		if err != nil {
			return err
		}
		_, err = c.Write([]byte(tag))
		return errors.Join(err, c.Close())
	})
}

// headend is the address of r1.
func (m *mounting) headend() netip.Addr {
	i := slices.IndexFunc(m.manifest.Domain.Nodes, func(n model.Node) bool { return n.Name == "r1" })
	return m.manifest.Domain.Nodes[i].Address
}

// pastLabels is the packet as its next hop would send it on, without that hop's stamp.
func pastLabels(_ *mounting, p mpls.Packet) []lab.Sent {
	stack, ok := mpls.Advance(p.Stack)
	if !ok {
		return nil
	}
	p.Stack = stack
	return stacked(p)
}

// withValues is the packet with other values in its proof.
func withValues(p mpls.Packet, change func(*srv6.Proof)) mpls.Packet {
	v, ok := srv6.ReadProof(*p.Proof)
	if !ok {
		return p
	}
	change(&v)
	p.Proof = new(v.Bytes())
	return p
}

// alterLabels has do done to packets of labels with a tag that come to the router from one
// neighbour, and to no others.
func (m *mounting) alterLabels(tag, from string, do func(p mpls.Packet) []lab.Sent) {
	m.router.SetLabels(func(at string, p mpls.Packet) []lab.Sent {
		if at == from && bytes.Contains(p.Payload, []byte(tag)) {
			return do(p)
		}
		return stacked(p)
	})
}

// stacked is the packet as bytes.
func stacked(p mpls.Packet) []lab.Sent {
	p.Ethernet = nil
	return []lab.Sent{{Packet: p.Append(nil), Labels: true}}
}

// relabelled is the packet with another label at one place of its stack.
func relabelled(p mpls.Packet, at int, label uint32) mpls.Packet {
	p.Stack = slices.Clone(p.Stack)
	p.Stack[at] = p.Stack[at].WithLabel(label)
	return p
}

// labels are the visits of a chain, without its headend.
func (m *mounting) labels(chain string) []plan.Hop { return m.chain(chain).Hops[1:] }

// captureLabels sends a datagram of chain e and takes the packet on its last link. keep: it does
// not arrive.
func (m *mounting) captureLabels(ctx context.Context, payload string, keep bool) (mpls.Packet, error) {
	took := make(chan mpls.Packet, 1)
	m.alterLabels(payload, "r3", func(p mpls.Packet) []lab.Sent {
		select {
		case took <- p:
		default:
		}
		if keep {
			return nil
		}
		return stacked(p)
	})
	defer m.router.SetLabels(nil)
	if err := m.send(payload, m.service("h2", labelPort)); err != nil {
		return mpls.Packet{}, err
	}
	select {
	case p := <-took:
		return p, nil
	case <-time.After(verdictTime):
		return mpls.Packet{}, errors.New("no packet of chain e came to its last link")
	case <-ctx.Done():
		return mpls.Packet{}, context.Cause(ctx)
	}
}

func replayLabels(ctx context.Context, m *mounting) error {
	p, err := m.captureLabels(ctx, m.tag, false)
	if err != nil {
		return err
	}
	if end, err := m.await(ctx, m.tag, 1); err != nil || end.host == "" {
		return errors.Join(err, errors.New("the packet was not delivered the first time"))
	}
	m.ends = 2
	return m.inject(stacked(p))
}

func wrongChainLabels(ctx context.Context, m *mounting) error {
	p, err := m.captureLabels(ctx, "held back", true)
	if err != nil {
		return err
	}
	p.Payload = udp(m.host(), m.service("h3", labelPort), []byte(m.tag))
	return m.inject(stacked(p))
}

func labelsOutside(ctx context.Context, m *mounting) error {
	p, err := m.captureLabels(ctx, m.tag, true)
	if err != nil {
		return err
	}
	return m.lab.SendLabelsFrom(m.scheme.String(), "r1", stacked(p)[0].Packet)
}

func staleEpochLabels(ctx context.Context, m *mounting) error {
	p, err := m.captureLabels(ctx, m.tag, true)
	if err != nil {
		return err
	}
	if err := m.rotate(ctx, m.chain("e")); err != nil {
		return err
	}
	return m.inject(stacked(p))
}
