package bench

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
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

// Labels: those of visits are behind serviceLabels, those of nodes behind nodeLabels.
const (
	serviceLabels = 100_000
	nodeLabels    = 16_001
)

// chainsMax is as many chains as the nodes have SIDs for, with two segments each:
// of the block's 65536 /64s each of the four nodes has a quarter.
const chainsMax = 1 << 14

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

// innerNet4 is the same of IPv4.
func innerNet4(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
}

// Addresses of IPv4 outside the domain, where it is IPv4 that comes in.
const (
	innerSource4 = "192.0.2.1"
	nodeNext4    = "198.51.100.99"
	nodeAddress4 = "198.51.100.1/24"
)

// worldSpec is a domain with so many chains of one kind.
type worldSpec struct {
	scheme     model.Scheme
	segments   int
	chains     int
	xdp        bool
	compressed bool   // SIDs, and reduced headers
	labels     bool   // in place of SRv6
	ipv4       bool   // what comes in
	ordered    bool   // chains are chosen by rules with a priority
	filter     string // the function at the hop is netfilter in this namespace; "": it is End
	bypass     bool   // it lets flows go past it that its rules are done with
}

// world is a compiled worldSpec.
type world struct {
	worldSpec
	plan *plan.Domain
}

// outerLen is the length in bytes of what its headend puts before a packet.
func (w world) outerLen() int { return w.plan.Paths[0].OuterLen() }

func newWorld(spec worldSpec) (world, error) {
	if spec.segments < 2 || spec.segments > model.SegmentsMax {
		return world{}, fmt.Errorf("%d segments; a chain has 2 to %d", spec.segments, model.SegmentsMax)
	}
	path := model.DatapathTC
	if spec.xdp {
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
	if spec.labels {
		d.MPLS = &model.MPLS{Services: serviceLabels, MTU: rigMTU}
		for i := range d.Nodes {
			d.Nodes[i].MPLS = &model.NodeMPLS{Label: nodeLabels + uint32(i), Address: d.Nodes[i].Address}
		}
	}
	functions := []string{"here"}
	for range spec.segments - 2 {
		functions = append(functions, "there")
	}
	for i := range spec.chains {
		c := model.Chain{
			Name: fmt.Sprintf("c%d", i), Ingress: []string{nodeHead}, Functions: functions, Egress: nodeTail,
			Match: model.Match{Destination: innerNet(i)}, Proof: model.Proof{Scheme: spec.scheme, Window: windowOf(spec.chains)},
		}
		if spec.ipv4 {
			c.Match.Destination = innerNet4(i)
		}
		if spec.ordered {
			c.Match.Priority, c.Match.Protocol = uint16(i+1), unix.IPPROTO_UDP
		}
		if spec.compressed {
			c.Encapsulation = model.Encapsulation{SIDs: model.SIDsCompressed, Reduced: true}
		}
		if spec.labels {
			c.Encapsulation = model.Encapsulation{Type: model.EncapsulationSRMPLS}
		}
		d.Chains = append(d.Chains, c)
	}
	if spec.filter != "" {
		withFilter(&d, spec.filter, spec.bypass)
	}
	compiled, err := plan.Compile(d, plan.NewKeyring(rand.Reader, nil))
	if err != nil {
		return world{}, err
	}
	return world{spec, compiled}, nil
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

// innerPacket is what comes to a headend for the i-th chain, or a plain router: a
// UDP packet of so many bytes, from its IP header on.
func innerPacket(chain, size int, ipv4 bool) ([]byte, error) {
	head := srv6.IPv6Len
	if ipv4 {
		head = srv6.IPv4Len
	}
	payload := size - head
	if payload < udpLen {
		return nil, fmt.Errorf("a packet of %d bytes has no room for headers of IP and UDP", size)
	}
	udp := make([]byte, payload)
	copy(udp, []byte{0xc0, 0, 0, udpPort, byte(payload >> 8), byte(payload)}) // without a checksum, as IPv4 may be (RFC 768)
	if ipv4 {
		return append(header4(chain, size), udp...), nil
	}
	to := innerNet(chain).Addr().As16()
	to[15] = 1
	from := netip.MustParseAddr(innerSource)
	// Connection tracking takes a packet with a wrong checksum for invalid. It meets the first chain's
	// alone; those of others have the same one, since frames differ in their heads only.
	first := innerNet(0).Addr().As16()
	first[15] = 1
	binary.BigEndian.PutUint16(udp[6:], srv6.UpperLayerChecksum(from, netip.AddrFrom16(first), unix.IPPROTO_UDP, udp))
	p := srv6.Packet{
		Header: srv6.Header{
			NextHeader: 17, HopLimit: 64, FlowLabel: 0x12345,
			Source: from, Destination: netip.AddrFrom16(to),
		},
		Payload: udp,
	}
	if err := p.Fix(); err != nil {
		return nil, err
	}
	return p.Append(nil)
}

// header4 is the header of an IPv4 packet of so many bytes (RFC 791 section 3.1).
func header4(chain, size int) []byte {
	h := make([]byte, 0, srv6.IPv4Len)
	h = append(h, 0x45, 0, byte(size>>8), byte(size), 0, 0, 0x40, 0, 64, 17, 0, 0) // do not fragment; UDP
	to := innerNet4(chain).Addr().As4()
	to[3] = 1
	from := netip.MustParseAddr(innerSource4).As4()
	h = append(append(h, from[:]...), to[:]...)
	sum := uint32(0)
	for i := 0; i < len(h); i += 2 {
		sum += uint32(h[i])<<8 | uint32(h[i+1])
	}
	sum = sum>>16 + sum&0xffff
	sum = ^(sum>>16 + sum)
	h[10], h[11] = byte(sum>>8), byte(sum)
	return h
}

func framed(packet []byte, to [6]byte) []byte {
	b := append(to[:len(to):len(to)], 2, 0, 0, 0, 0, 1, 0x86, 0xdd)
	if packet[0]>>4 == 4 {
		b[12], b[13] = byte(srv6.EtherTypeIPv4>>8), byte(srv6.EtherTypeIPv4&0xff)
	}
	return append(b, packet...)
}

// plainFrame is an Ethernet frame of size bytes without any header of ours.
func (w world) plainFrame(chain, size int, to [6]byte) ([]byte, error) {
	p, err := innerPacket(chain, size-srv6.EthernetLen, w.ipv4)
	if err != nil {
		return nil, err
	}
	return framed(p, to), nil
}

// stampedFrame is a frame of the i-th chain as it comes to the segment with that
// index: rightly stamped by everybody before, one of a train that has that
// number.
func (w world) stampedFrame(chain, number, segment, size int, to [6]byte) ([]byte, error) {
	path := w.plan.Paths[chain]
	payload, err := innerPacket(chain, size-srv6.EthernetLen-w.outerLen(), w.ipv4)
	if err != nil {
		return nil, err
	}
	next := uint8(srv6.NextHeaderIPv6)
	if w.ipv4 {
		next = srv6.NextHeaderIPv4
	}
	read, ok := srv6.ReadFlow(next, payload)
	if !ok {
		return nil, fmt.Errorf("a frame of %d bytes has no room for ports", size)
	}
	flow := pot.Flow{
		Source: read.Source, Destination: read.Destination, Protocol: read.Protocol,
		SourcePort: read.SourcePort, DestinationPort: read.DestinationPort,
	}
	steps := pot.WalkFlow(path.Header(), (trainMax-1)<<42|uint64(number), flow, path.Shares[:segment+1]...)
	wire := steps[len(steps)-1].WireOut
	proof := srv6.Proof{Scheme: path.Scheme, Epoch: path.Epoch, Path: path.Path, RND: wire.RND, CML: wire.CML}
	if w.labels {
		return labelledFrame(path, segment, next, proof, payload, to)
	}
	destination, srh := srv6.Encapsulate(path.Segments(), path.Encapsulation)
	for range segment {
		// As each segment before has left it: the next C-SID, or the next entry.
		shifted, ok := srv6.Shift(destination)
		if ok && w.compressed {
			destination = shifted
			continue
		}
		if srh.SegmentsLeft == 0 {
			return nil, fmt.Errorf("the list of chain %d ends before segment %d", chain, segment)
		}
		srh.SegmentsLeft--
		destination = srh.Segments[srh.SegmentsLeft]
	}
	srh.NextHeader = next
	srh.TLVs = []srv6.TLV{proof.TLV()}
	p := srv6.Packet{
		Header:  srv6.Header{HopLimit: 64, FlowLabel: 0x12345, Source: netip.MustParseAddr(headAddress), Destination: destination},
		SRH:     srh,
		Payload: payload,
	}
	if err := p.Fix(); err != nil {
		return nil, err
	}
	packet, err := p.Append(nil)
	if err != nil {
		return nil, err
	}
	return framed(packet, to), nil
}

// labelledFrame is such a frame with a stack of labels, as it comes to the segment with that
// index.
func labelledFrame(path plan.Path, segment int, next uint8, proof srv6.Proof, payload []byte, to [6]byte) ([]byte, error) {
	var visits []mpls.Visit
	for _, h := range path.Hops[1:] {
		visits = append(visits, mpls.Visit{Node: h.NodeLabel, Service: h.ServiceLabel})
	}
	const entropy = 0x12345 // as the flow label of the others
	stack := mpls.Stack(visits, entropy, 0, mpls.TTL)
	for range segment {
		var ok bool
		if stack, ok = mpls.Advance(stack); !ok {
			return nil, fmt.Errorf("the stack of chain %s ends before segment %d", path.Chain, segment)
		}
	}
	tlv := proof.Bytes()
	return mpls.Packet{
		Ethernet: &mpls.Ethernet{Destination: to, Source: [6]byte{2, 0, 0, 0, 0, 1}, Type: unix.ETH_P_MPLS_UC},
		Stack:    stack, Word: &mpls.Word{NextHeader: next}, Proof: &tlv, Payload: payload,
	}.Append(nil), nil
}
