package bench

import (
	"crypto/rand"
	"fmt"
	"net/netip"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
)

// The domain whose nodes are measured one at a time: every chain enters at
// head, is stamped at hop, then as often as its list is long at far, and leaves
// at tail.
const (
	nodeHead = "head"
	nodeHop  = "hop"
	nodeFar  = "far"
	nodeTail = "tail"
)

const block = "fc00::/48"

// headAddress is the source of outer headers; innerSource of what comes from
// outside the domain.
const (
	headAddress = "fc00:1::1"
	innerSource = "2001:db8:1::1"
)

// chainsMax is as many chains as a domain has SIDs for, with two segments each:
// of the block's 65536 /64s hop and tail have 16384 each.
const chainsMax = 16384

// trainMax is how many frames one number stands for at most: as often an egress
// takes the same frame.
const trainMax = 63

// windowOf is the replay window of each of so many chains: large where there is
// one, so that a run does not come to its end.
func windowOf(chains int) int {
	if chains == 1 {
		return model.WindowMax
	}
	return model.WindowDefault
}

// lanes are the CPUs of the headend: it counts in a lane for each.
func lanes() int {
	n, err := dataplane.CPUs()
	if err != nil {
		return model.CPUsDefault
	}
	return n
}

// innerNet is the destination of the i-th chain.
func innerNet(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 0x80 | byte(i>>16), byte(i >> 8), byte(i), 1}), 64)
}

// world is a compiled domain with so many chains of one kind.
type world struct {
	plan     *plan.Domain
	segments int
}

func newWorld(scheme model.Scheme, segments, chains int, xdp bool) (world, error) {
	if segments < 2 || segments > model.SegmentsMax {
		return world{}, fmt.Errorf("%d segments; a chain has 2 to %d", segments, model.SegmentsMax)
	}
	path := model.DatapathTC
	if xdp {
		path = model.DatapathXDP
	}
	in := func(r model.Role) model.Interface { return model.Interface{Name: devIn, Role: r, Datapath: path} }
	out := func(r model.Role) model.Interface { return model.Interface{Name: devOut, Role: r, Datapath: path} }
	d := model.Domain{
		Block: netip.MustParsePrefix(block),
		Nodes: []model.Node{
			{Name: nodeHead, Address: netip.MustParseAddr(headAddress), Locator: netip.MustParsePrefix("fc00::/50"), CPUs: lanes(),
				Interfaces: []model.Interface{in(model.RoleEdge), out(model.RoleCore)}},
			{Name: nodeHop, Address: netip.MustParseAddr("fc00:2::1"), Locator: netip.MustParsePrefix("fc00:0:0:4000::/50"),
				Interfaces: []model.Interface{in(model.RoleCore), out(model.RoleCore)}},
			{Name: nodeFar, Address: netip.MustParseAddr("fc00:3::1"), Locator: netip.MustParsePrefix("fc00:0:0:8000::/50"),
				Interfaces: []model.Interface{in(model.RoleCore), out(model.RoleCore)}},
			{Name: nodeTail, Address: netip.MustParseAddr("fc00:4::1"), Locator: netip.MustParsePrefix("fc00:0:0:c000::/50"),
				Interfaces: []model.Interface{in(model.RoleCore), out(model.RoleEdge)}},
		},
		Functions: []model.Function{{Name: "here", Node: nodeHop}, {Name: "there", Node: nodeFar}},
	}
	functions := []string{"here"}
	for range segments - 2 {
		functions = append(functions, "there")
	}
	for i := range chains {
		d.Chains = append(d.Chains, model.Chain{
			Name: fmt.Sprintf("c%d", i), Ingress: []string{nodeHead}, Functions: functions, Egress: nodeTail,
			Match: model.Match{Destination: innerNet(i)}, Proof: model.Proof{Scheme: scheme, Window: windowOf(chains)},
		})
	}
	compiled, err := plan.Compile(d, plan.NewKeyring(rand.Reader, nil))
	if err != nil {
		return world{}, err
	}
	return world{compiled, segments}, nil
}

func (w world) node(name string) (plan.Node, error) {
	for _, n := range w.plan.Nodes {
		if n.Name == name {
			return n, nil
		}
	}
	return plan.Node{}, fmt.Errorf("the domain has no node %s", name)
}

// udpPort: 9, discard.
const (
	udpLen  = 8
	udpPort = 9
)

// innerFrame is what comes to a headend for the i-th chain, or a plain router: a
// UDP packet, without its Ethernet header of so many bytes.
func innerPacket(chain, size int) (srv6.Packet, error) {
	to := innerNet(chain).Addr().As16()
	to[15] = 1
	payload := size - srv6.IPv6Len
	if payload < udpLen {
		return srv6.Packet{}, fmt.Errorf("a packet of %d bytes has no room for IPv6 and UDP", size)
	}
	p := srv6.Packet{
		Header: srv6.Header{
			NextHeader: 17, HopLimit: 64, FlowLabel: 0x12345,
			Source: netip.MustParseAddr(innerSource), Destination: netip.AddrFrom16(to),
		},
		Payload: make([]byte, payload),
	}
	copy(p.Payload, []byte{0xc0, 0, 0, udpPort, byte(payload >> 8), byte(payload), 0xff, 0xff})
	return p, p.Fix()
}

func framed(p srv6.Packet, to [6]byte) ([]byte, error) {
	p.Ethernet = &srv6.Ethernet{Destination: to, Source: [6]byte{2, 0, 0, 0, 0, 1}, Type: srv6.EtherTypeIPv6}
	return p.Append(nil)
}

// plainFrame is an Ethernet frame of size bytes without any header of ours.
func plainFrame(chain, size int, to [6]byte) ([]byte, error) {
	p, err := innerPacket(chain, size-srv6.EthernetLen)
	if err != nil {
		return nil, err
	}
	return framed(p, to)
}

// stampedFrame is a frame of the i-th chain as it comes to the segment with that
// index: rightly stamped by everybody before, one of a train that has that
// number.
func (w world) stampedFrame(chain, number, segment, size int, to [6]byte) ([]byte, error) {
	path := w.plan.Paths[chain]
	list := path.Segments()
	inner, err := innerPacket(chain, size-srv6.EthernetLen-model.OuterLen(len(list)))
	if err != nil {
		return nil, err
	}
	payload, err := inner.Append(nil)
	if err != nil {
		return nil, err
	}
	read, ok := srv6.ReadFlow(srv6.NextHeaderIPv6, payload)
	if !ok {
		return nil, fmt.Errorf("a frame of %d bytes has no room for ports", size)
	}
	flow := pot.Flow{
		Source: read.Source, Destination: read.Destination, Protocol: read.Protocol,
		SourcePort: read.SourcePort, DestinationPort: read.DestinationPort,
	}
	steps := pot.WalkFlow(path.Header(), (trainMax-1)<<42|uint64(number), flow, path.Shares[:segment+1]...)
	wire := steps[len(steps)-1].WireOut
	p := srv6.Packet{
		Header: srv6.Header{
			HopLimit: 64, FlowLabel: 0x12345,
			Source: netip.MustParseAddr(headAddress), Destination: list[segment],
		},
		SRH: &srv6.SRH{
			NextHeader: srv6.NextHeaderIPv6, SegmentsLeft: uint8(len(list) - 1 - segment), Segments: srv6.Reversed(list),
			TLVs: []srv6.TLV{srv6.Proof{Scheme: path.Scheme, Epoch: path.Epoch, Path: path.Path, RND: wire.RND, CML: wire.CML}.TLV()},
		},
		Payload: payload,
	}
	if err := p.Fix(); err != nil {
		return nil, err
	}
	return framed(p, to)
}
