// Package oracle says what a node must do with a packet: the data path of bpf/
// once more, in plain Go, from a node's plan and the bytes of one frame. It is
// slow and has no state: what it must know of earlier packets comes with each
// one. Tests give the same packets to it and to the programs
// in the kernel, and verdict, reason and bytes must agree; no product code
// calls it.
//
// It is written from docs/protocol and the RFCs, not from the C code,
// except for the order of the checks: where a packet is wrong in two ways, both
// must name the same one. What it does not model: the value of the flow label
// (see Labels), the layer 2 header of what is sent, and failures of the kernel.
package oracle

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
)

// What a node takes (bpf/include/waystamp/abi.h).
const (
	tlvsMax     = 128 // bytes behind the segment list
	visitsMax   = 17  // that follow one another: all positions but the headend, and one more
	framesMax   = 63  // in one train
	laneShift   = 48
	framesShift = 42
)

// Node is where packets arrive.
type Node struct {
	plan.Node
	Armed bool         // false: the programs are attached, the maps are empty; Block and Locator count
	Own   []netip.Addr // addresses of the node, of both versions, beside Address
	// Route asks the kernel's table for the way to an address that is not the
	// node's own. Nil: there always is one, and it takes all.
	Route func(netip.Addr) Way
	// PathMTU are the sizes of inner packets that this headend has been told to be
	// all that its paths take.
	PathMTU map[uint32]int
}

// Way is what the kernel's table says of an address.
type Way struct {
	MTU  int // of the way out; 0: it takes all
	None NoWay
}

// NoWay is why there is no way; zero: there is one.
type NoWay uint8

const (
	Unreachable NoWay = iota + 1 // a route says so, or there is none
	Prohibited                   // a route says so
	BlackHole                    // a route says so, and that nobody is to be told
)

// Arrival is one frame or super-packet that comes in.
type Arrival struct {
	Interface model.Interface // its Role, Unmatched and Guard count
	Frame     []byte          // from the Ethernet header
	Frames    int             // that a super-packet is on a wire; 0 is 1
	// Longest is the length of the longest of them, in bytes from the IP
	// header; 0: there is but one. It has no outer header of ours at a headend
	// and includes it elsewhere.
	Longest int
	CPU     int    // that works on it
	Number  uint64 // the next one of this CPU for the path; 0: its counter has reached its ceiling
	// Seen are the trains that this node has accepted before as the egress of a
	// path in one epoch, in whatever order; nil: none.
	Seen func(path uint32, epoch uint8) []Train
	// Counted are the frames that the packet counts for at its egress, by what
	// follows its outer header; nil: one.
	Counted func(inner []byte) int
}

// Verdict is what becomes of a packet.
type Verdict uint8

const (
	Pass    Verdict = iota // to the kernel, untouched
	Drop                   // for Reason
	Forward                // Packet goes out by the route to its destination
	Deliver                // Packet, without its outer header, goes up to the node itself, or a function in it
)

var verdictNames = []string{"pass", "drop", "forward", "deliver"}

func (v Verdict) String() string {
	if int(v) < len(verdictNames) {
		return verdictNames[v]
	}
	return fmt.Sprintf("Verdict(%d)", uint8(v))
}

// Result is a verdict with all that it changes.
type Result struct {
	Verdict  Verdict
	Reason   Reason   // of a Drop
	Reported []Reason // that were counted, and the packet let go on
	Packet   []byte   // from the IP header; nil for Pass and Drop
	IPv4     bool     // Packet is one of IPv4
	Labels   bool     // Packet begins with a label stack
	// Error is the ICMP error that a dropped packet's sender is told by, from
	// its IP header on; nil: nothing is said.
	Error []byte
	// Encapsulated: this node wrote the outer header. Its flow label is zero
	// in Packet, and anything but zero on the wire; an entropy label anything from 16 on.
	Encapsulated bool
	Clamped      bool // the inner packet's MSS is lower than it was
	// ToFunction: Packet is the inner one, and goes up to a function in the node's own
	// kernel, with this mark.
	ToFunction bool
	Mark       uint32
	// Visits are the positions that counted the packet: it was stamped there,
	// or verified at the last one.
	Visits []Visit
	// Spent is what the packet has used up of its number, if its proof verified
	// and its number was good; also where it was dropped later.
	Spent *Spent
}

// Visit is one position's work, as its counters see it.
type Visit struct {
	Path     uint32
	Epoch    uint8
	Position uint8
	Frames   int
	Bytes    int // from the inner header on
}

// Process is the whole data path. The frame is not changed.
func (n Node) Process(a Arrival) Result {
	p := &packet{node: n, arrival: a}
	ip := p.unframe()
	if r, ok := p.labels(); ok {
		return r
	}
	switch {
	case a.Interface.Role != model.RoleCore && hasTag(a.Frame):
		return p.drop(VLANTags)
	case !ip:
		return p.pass()
	case a.Interface.Role == model.RoleCore:
		return p.core()
	}
	return p.edge()
}

// unframe finds the IP packet; false: the frame has none.
func (p *packet) unframe() bool {
	frame := p.arrival.Frame
	if len(frame) < srv6.EthernetLen {
		return false
	}
	p.b = bytes.Clone(frame[srv6.EthernetLen:])
	kind := binary.BigEndian.Uint16(frame[12:])
	p.v4 = kind == srv6.EtherTypeIPv4
	return p.v4 || kind == srv6.EtherTypeIPv6
}

// hasTag says whether a VLAN's tag, of IEEE 802.1Q, 802.1ad or before, is in the
// frame. What a device or the kernel has put beside it is not.
func hasTag(frame []byte) bool {
	if len(frame) < srv6.EthernetLen {
		return false
	}
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x8100, 0x88a8, 0x9100, 0x9200, 0x9300:
		return true
	}
	return false
}

// packet is one packet on its way through the node.
type packet struct {
	node    Node
	arrival Arrival
	b       []byte // from the IP header on
	v4      bool   // that is one of IPv4
	behind  []byte // what is behind a packet of IPv6 that enters
	result  Result
	// counted: the hop limit has been decremented here. Consecutive functions
	// on one node are one hop.
	counted bool
	leaves  bool // it is on its way out; the kernel has counted the hop
	own     bool // and nobody else's
}

func (p *packet) pass() Result { return p.end(Pass) }

func (p *packet) drop(r Reason) Result {
	p.result.Reason = r
	p.result.Encapsulated = false
	return p.end(Drop)
}

func (p *packet) end(v Verdict) Result {
	p.result.Verdict = v
	if v == Forward || v == Deliver {
		p.result.Packet, p.result.IPv4 = p.b, p.v4
	}
	return p.result
}

// core is an interface inside the domain.
func (p *packet) core() Result {
	in, ok := headerOf(p.b, p.v4)
	if !ok {
		return p.drop(Truncated)
	}
	if !in.whole() || neverForwarded(in.destination()) {
		return p.pass()
	}
	if p.v4 {
		if p.node.Armed && p.unproven(in) {
			return p.drop(Unproven)
		}
		return p.pass()
	}
	ip := ipv6(p.b)
	inBlock := p.node.Block.Contains(ip.destination())
	switch {
	case !p.node.Armed && (inBlock || ip.hasSRH()):
		return p.drop(Unconfigured)
	case !p.node.Armed:
		return p.pass()
	case ip.destination().Is4In6(), ip.source().Is4In6():
		return p.drop(MappedAddress)
	case p.node.Locator.Contains(ip.destination()):
		return p.endpoints()
	case inBlock:
		return p.pass() // another node's: the kernel routes it
	case p.unproven(ip):
		return p.drop(Unproven)
	}
	return p.pass()
}

// edge is an interface to the outside.
func (p *packet) edge() Result {
	in, ok := headerOf(p.b, p.v4)
	if !ok {
		return p.drop(EdgeTruncated)
	}
	if !in.whole() || neverForwarded(in.destination()) || neverForwarded(in.source()) || in.source() == netip.IPv6Unspecified() {
		return p.pass()
	}
	if !p.v4 {
		switch ip := ipv6(p.b); {
		case p.node.Block.Contains(ip.destination()):
			return p.drop(OutsideSID)
		case p.node.Block.Contains(ip.source()):
			return p.drop(OutsideSource)
		case ip.hasSRH():
			return p.drop(OutsideSRH)
		case ip.isErrorAbout(p.node.Block):
			return p.drop(OutsideError)
		case ip.destination().Is4In6(), ip.source().Is4In6():
			return p.drop(MappedAddress)
		}
	}
	switch {
	case p.node.owns(in.destination()):
		return p.pass()
	case !p.node.Armed:
		return p.drop(Unconfigured)
	}
	h, unread := p.node.headend(in)
	if h != nil && !unsteered(in.destination()) && !unsteered(in.source()) {
		if unread {
			return p.drop(PortsUnread)
		}
		if p.v4 {
			if reason := p.enterIPv4(); reason != "" {
				return p.drop(reason)
			}
		} else if !p.enterIPv6() {
			return p.drop(IP6Length)
		}
		return p.headend(h)
	}
	switch {
	case p.unproven(in):
		return p.drop(Unproven)
	case p.arrival.Interface.Unmatched == model.UnmatchedDrop:
		return p.drop(Unmatched)
	}
	return p.pass()
}

// enterIPv4 is what the kernel would see on its way and a tunnel would hide.
// The padding of the frame goes.
func (p *packet) enterIPv4() Reason {
	ip, super := ipv4(p.b), p.arrival.Frames > 1
	length := ip.totalLength()
	if length == 0 && super {
		length = len(p.b) // more than the field can tell
	}
	switch {
	case length < ip.headerLength(), length > len(p.b), super && length != len(p.b):
		return IP4Length
	case !ip.sumIsRight():
		return IP4Checksum
	}
	p.b = p.b[:length]
	return ""
}

// enterIPv6: likewise.
func (p *packet) enterIPv6() bool {
	ip, super := ipv6(p.b), p.arrival.Frames > 1
	length := ip.length()
	if length == srv6.IPv6Len && super {
		length = len(p.b)
	}
	if length > len(p.b) || super && length != len(p.b) {
		return false
	}
	p.b, p.behind = p.b[:length], p.b[length:]
	return true
}

// headend is H.Encaps (RFC 8986 5.1) with the first stamp.
func (p *packet) headend(h *plan.Headend) Result {
	if h.OverLabels() {
		return p.labelHeadend(h)
	}
	inner, _ := headerOf(p.b, p.v4)
	next := uint8(srv6.NextHeaderIPv6)
	if p.v4 {
		next = srv6.NextHeaderIPv4
	}
	binding, ok := bind(h.Share, h.Scheme, next, p.b)
	if !ok {
		return p.drop(Flow)
	}
	frames := max(1, p.arrival.Frames)
	first, srh := srv6.Encapsulate(h.Segments, h.Encapsulation)
	outer := srv6.IPv6Len + srv6.SRHLen + srv6.SegmentLen*len(srh.Segments) + srv6.ProofLen
	switch {
	case inner.hopLimit() <= 1 && !p.leaves:
		return p.answer(EdgeHopLimit, 0, icmp{kind: icmpTimeExceeded})
	case h.MTU != 0 && p.longest() > h.MTU:
		return p.answer(ChainMTU, 0, icmp{kind: icmpTooBig, data: uint32(h.MTU)})
	}
	if told := p.node.PathMTU[h.Path]; told != 0 && p.longest() > told && (p.v4 || p.longest() > ipv6MinMTU) {
		return p.answer(PathMTU, 0, icmp{kind: icmpTooBig, data: uint32(told)})
	}
	if outer-srv6.IPv6Len+len(p.b) > 0xffff {
		return p.drop(TrainTooBig)
	}
	// What is too long for the way out is told before anything is done to it.
	if !p.node.Locator.Contains(first) {
		switch way := p.node.way(first, p.node.Address); {
		case way.None != 0:
			return p.noTunnel(0, way.None)
		case way.MTU != 0 && p.longest()+outer > way.MTU:
			return p.answer(TooBig, 0, icmp{kind: icmpTooBig, data: uint32(max(0, way.MTU-outer))})
		}
	}
	switch {
	case frames > framesMax:
		return p.drop(TrainTooLong)
	case p.arrival.CPU >= int(h.Lanes):
		return p.drop(NoLane)
	case p.arrival.Number == 0:
		return p.drop(RNDExhausted)
	}
	lane := uint64(h.Lane) + uint64(p.arrival.CPU)
	rnd := lane<<laneShift | uint64(frames-1)<<framesShift | p.arrival.Number
	header := pot.Header{Scheme: h.Scheme, Epoch: h.Epoch, Path: h.Path}
	values := h.Share.StampFlow(header, pot.Values{RND: rnd}, binding).WireOut

	p.behind = nil
	p.visited(h.PathID, 0, len(p.b))
	if !p.leaves {
		inner.decrement()
	}
	if h.MSS != 0 {
		p.result.Clamped = clampMSS(p.b, p.v4, h.MSS)
	}
	srh.NextHeader = next
	srh.TLVs = []srv6.TLV{srv6.Proof{
		Scheme: h.Scheme, Epoch: h.Epoch, Path: h.Path, RND: values.RND, CML: values.CML,
	}.TLV()}
	out := srv6.Packet{
		Header: srv6.Header{
			TrafficClass: inner.trafficClass(), // RFC 6040: ECN too
			HopLimit:     64,
			Source:       p.node.Address,
			Destination:  first,
		},
		SRH:     srh,
		Payload: p.b,
	}
	p.b, p.v4 = mustAppend(out), false
	p.arrival.Longest += outer
	p.result.Encapsulated = true
	p.counted = true
	if p.node.Locator.Contains(first) {
		if p.leaves {
			return p.end(Forward) // in again
		}
		return p.endpoints()
	}
	return p.forward(NoRoute)
}

// endpoints are all visits that follow one another on this node.
func (p *packet) endpoints() Result {
	for range visitsMax {
		r, again := p.endpoint()
		if !again {
			return r
		}
	}
	return p.drop(Loop)
}

// endpoint is one visit of a SID of this node. again: its next segment is on
// this node too.
func (p *packet) endpoint() (r Result, again bool) {
	ip := ipv6(p.b)
	if srv6.IPv6Len+ip.payloadLength() > len(p.b) {
		return p.drop(PayloadLength), false
	}
	before, refused := ip.options()
	switch {
	case refused.reason == "":
	case refused.pointer != 0:
		return p.answer(refused.reason, 0, icmp{icmpParameter, refused.code, uint32(refused.pointer)}), false
	default:
		return p.drop(refused.reason), false
	}
	srh, reason := checkSRH(ip, before)
	const field = 0
	switch reason {
	case "":
	case SRHLastEntry, SRHSegmentsLeft:
		return p.answer(reason, 0, icmp{icmpParameter, field, uint32(before + 3)}), false
	default:
		return p.drop(reason), false
	}
	proof, reason := srh.findProof()
	switch reason {
	case "":
	case TLVOverrun:
		return p.answer(reason, 0, icmp{icmpParameter, field, uint32(before + 1)}), false
	default:
		return p.drop(reason), false
	}
	h, reason := p.node.find(ip.destination(), proof)
	if reason != "" {
		return p.drop(reason), false
	}
	if proof.Scheme != h.id.Scheme {
		return p.drop(Scheme), false
	}
	if h.id.OverLabels() {
		return p.drop(Encapsulation), false
	}
	if !slices.Contains(h.sources, ip.source()) {
		return p.drop(Source), false
	}
	if h.netfilter {
		return p.toNetfilter(srh, h), false
	}
	binding, ok := bind(h.share, h.id.Scheme, srh.b[0], p.b[srh.end():])
	if !ok {
		return p.drop(Flow), false
	}
	next, shifted := netip.Addr{}, false
	if h.id.Encapsulation.SIDs == model.SIDsCompressed {
		next, shifted = shift(ip.destination())
	}
	if h.egress != nil {
		return p.dt46(srh, proof, binding, h.egress, shifted), false
	}
	left := srh.segmentsLeft()
	if !shifted {
		if left == 0 {
			return p.noNext(srh), false
		}
		left--
		next = srh.segment(left)
	}
	return p.endStamp(srh, proof, binding, h, next, left)
}

// noNext refuses a packet at a SID that is not its last, with no segments left.
func (p *packet) noNext(srh *header) Result {
	return p.answer(UpperLayer, 0, icmp{icmpParameter, icmpCodeUpperLayer, uint32(srh.end())})
}

// toNetfilter is the way into a function of kind netfilter in the node's own kernel:
// all that End refuses, then what such a function must not get. The inner packet goes
// up with the argument as its mark. What comes back is not modelled.
func (p *packet) toNetfilter(srh *header, h hop) Result {
	ip := ipv6(p.b)
	argument := [8]byte(ip[srv6.IPv6Len-8 : srv6.IPv6Len])
	compressed := h.id.Encapsulation.SIDs == model.SIDsCompressed
	next, shifted := netip.Addr{}, false
	if compressed {
		next, shifted = shift(ip.destination())
	}
	if !shifted {
		if srh.segmentsLeft() == 0 {
			return p.noNext(srh)
		}
		next = srh.segment(srh.segmentsLeft() - 1)
	}
	switch {
	case !p.counted && ip.hopLimit() <= 1:
		return p.answer(HopLimit, 0, icmp{kind: icmpTimeExceeded})
	case !p.node.Block.Contains(next):
		return p.drop(SegmentOutside)
	}
	inner, refused := p.inner(srh)
	switch {
	case inner == nil:
		return refused
	case !p.node.steerable(inner):
		return p.drop(InnerAddress)
	case !compressed && binary.BigEndian.Uint64(argument[:]) != uint64(h.argument):
		return p.drop(Argument)
	case srh.end() > abi.CachedMax:
		return p.drop(HeaderTooLong)
	}
	p.b, p.v4 = p.b[srh.end():], srh.b[0] == srv6.NextHeaderIPv4
	p.result.Mark, p.result.ToFunction, p.result.Encapsulated = h.argument, true, false
	return p.end(Deliver)
}

// inner is what is inside; nil: it is refused.
func (p *packet) inner(srh *header) (ip, Result) {
	v4 := srh.b[0] == srv6.NextHeaderIPv4
	if !v4 && srh.b[0] != srv6.NextHeaderIPv6 {
		return nil, p.answer(InnerProtocol, 0, icmp{icmpParameter, icmpCodeUpperLayer, uint32(srh.end())})
	}
	inner, ok := headerOf(p.b[srh.end():], v4)
	switch {
	case !ok:
		return nil, p.drop(InnerTruncated)
	case !inner.whole():
		return nil, p.drop(InnerVersion)
	}
	return inner, Result{}
}

// bind is what keyed-flow binds a stamp to, of an inner packet of that protocol.
// Other schemes need nothing of it. False: it cannot be read.
func bind(s pot.Share, scheme model.Scheme, protocol uint8, inner []byte) (pot.Binding, bool) {
	if scheme != model.SchemeKeyedFlow {
		return pot.Binding{}, true
	}
	f, ok := srv6.ReadFlow(protocol, inner)
	return s.Binding(pot.Flow{
		Source: f.Source, Destination: f.Destination, Protocol: f.Protocol,
		SourcePort: f.SourcePort, DestinationPort: f.DestinationPort,
	}), ok
}

// shift is RFC 9800 4.1 N01, N05 and N06 for a block of 48 bits: the argument of
// 64 bits, which is not zero, moves up by the 16 of a C-SID.
func shift(a netip.Addr) (netip.Addr, bool) {
	b := a.As16()
	if binary.BigEndian.Uint64(b[8:]) == 0 {
		return a, false
	}
	return netip.AddrFrom16([16]byte{
		b[0], b[1], b[2], b[3], b[4], b[5],
		b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15], 0, 0,
	}), true
}

// endStamp is End (RFC 8986 4.1) with a stamp. The packet goes to next, and left
// is what Segments Left will be.
func (p *packet) endStamp(srh *header, proof srv6.Proof, binding pot.Binding, h hop, next netip.Addr, left int) (r Result, again bool) {
	ip := ipv6(p.b)
	switch {
	case !p.counted && ip.hopLimit() <= 1:
		return p.answer(HopLimit, 0, icmp{kind: icmpTimeExceeded}), false
	case !p.node.Block.Contains(next):
		return p.drop(SegmentOutside), false
	}
	values := h.share.StampFlow(header4(proof), pot.Values{RND: proof.RND, CML: proof.CML}, binding).WireOut
	binary.BigEndian.PutUint64(srh.b[srh.proof+8:], values.RND)
	binary.BigEndian.PutUint64(srh.b[srh.proof+16:], values.CML)

	srh.b[3] = uint8(left)
	ip.setDestination(next)
	if !p.counted {
		ip.decrement()
		p.counted = true
	}
	p.visited(h.id, h.share.Position, len(p.b)-srh.end())
	if p.node.Locator.Contains(next) {
		return Result{}, true
	}
	return p.forward(NoRoute), false
}

// dt46 is End.DT46 (RFC 8986 4.8) behind the verdict. more: there are C-SIDs behind
// the egress's own.
func (p *packet) dt46(srh *header, proof srv6.Proof, binding pot.Binding, e *plan.Egress, more bool) Result {
	if srh.segmentsLeft() != 0 || more {
		return p.answer(SegmentsRemain, 0, icmp{icmpParameter, 0, uint32(srh.at + 3)})
	}
	reports := e.OnViolation == model.OnViolationReport
	violation, rnd := judge(srh, proof, binding, e)
	if violation != "" {
		if !reports {
			return p.drop(violation)
		}
		p.result.Reported = append(p.result.Reported, violation)
	}

	outer, v4 := srh.end(), srh.b[0] == srv6.NextHeaderIPv4
	inner, refused := p.inner(srh)
	if inner == nil {
		return refused
	}
	length := inner.length()
	if !p.carries(inner, outer, length) {
		if v4 {
			return p.drop(IP4Length)
		}
		return p.drop(IP6Length)
	}
	if violation == "" {
		violation = p.window(rnd, p.b[outer:], e)
		if violation != "" {
			if !reports {
				return p.drop(violation)
			}
			p.result.Reported = append(p.result.Reported, violation)
		}
	}
	// A proof for one chain opens no other.
	path, ok := p.node.requires(inner, e.Requires())
	if !ok || path != e.Requires() || !p.node.steerable(inner) {
		return p.drop(WrongChain) // what no headend steers is no chain's
	}
	ecn, drop := decapsulateECN(inner.ecn(), ipv6(p.b).ecn())
	if drop {
		return p.drop(ECN)
	}
	if ecn != inner.ecn() {
		inner.setECN(ecn)
	}
	p.b, p.v4 = p.b[outer:outer+length], v4
	p.arrival.Longest = max(0, p.arrival.Longest-outer)
	p.result.Encapsulated = false
	p.visited(e.PathID, e.Share.Position, len(p.b))
	if p.node.owns(inner.destination()) {
		return p.end(Deliver)
	}
	return p.forward(InnerNoRoute)
}

// carries: the inner packet at offset outer ends where the outer payload does, or
// before; in a super-packet, where the frame does.
func (p *packet) carries(inner ip, outer, length int) bool {
	end := srv6.IPv6Len + ipv6(p.b).payloadLength()
	if v4, ok := inner.(ipv4); ok && length < v4.headerLength() {
		return false
	}
	return outer+length <= end && (p.arrival.Frames <= 1 || outer+length == len(p.b))
}

// judge is the verdict on the proof: the first violation, or the number.
func judge(srh *header, proof srv6.Proof, binding pot.Binding, e *plan.Egress) (violation Reason, rnd uint64) {
	carried := make([]netip.Addr, srh.segments())
	for i := range carried {
		carried[i] = srh.segment(i)
	}
	want := slices.Clone(e.Segments)
	if e.Encapsulation.Reduced && len(want) > 1 {
		want = want[1:]
	}
	if !slices.Equal(srv6.Reversed(carried), want) {
		return Segments, 0
	}
	return judgeValues(proof, binding, e)
}

func judgeValues(proof srv6.Proof, binding pot.Binding, e *plan.Egress) (violation Reason, rnd uint64) {
	values, result := e.Verifier.VerifyFlow(e.Share, header4(proof), pot.Values{RND: proof.RND, CML: proof.CML}, binding)
	switch result {
	case pot.Verified:
		return "", values.RND
	case pot.Range:
		return Range, 0
	}
	return Proof, 0
}

// forward sends the packet by ordinary routing. An inner packet's hop limit
// counts here; an outer one's has been counted.
func (p *packet) forward(noRoute Reason) Result {
	ip, _ := headerOf(p.b, p.v4)
	way := p.node.way(ip.destination(), ip.source())
	mtu := way.MTU
	if at := p.ownOuter(); way.None != 0 && at > 0 {
		return p.noTunnel(at, way.None)
	}
	switch way.None {
	case Unreachable:
		return p.answer(noRoute, 0, icmp{kind: icmpUnreachable, code: icmpCodeNoRoute})
	case Prohibited:
		return p.answer(noRoute, 0, icmp{kind: icmpUnreachable, code: icmpCodeProhibited})
	case BlackHole:
		return p.drop(noRoute)
	}
	if noRoute == InnerNoRoute {
		if ip.hopLimit() <= 1 {
			return p.answer(InnerHopLimit, 0, icmp{kind: icmpTimeExceeded})
		}
		// The kernel cuts it, or tells its sender.
		if p.v4 && mtu != 0 && p.longest() > mtu {
			if isFragment(p.b, true) { // the kernel might put it together with others
				return p.answer(TooBig, 0, icmp{kind: icmpTooBig, data: uint32(mtu)})
			}
			return p.end(Deliver)
		}
		ip.decrement()
	}
	if mtu != 0 && p.longest() > mtu {
		return p.tooBig(mtu)
	}
	return p.end(Forward)
}

// tooBig tells whoever made the packet's first header. Where that is this node's
// headend, it is whoever made the inner one, of what is left for it.
func (p *packet) tooBig(mtu int) Result {
	at := p.ownOuter()
	return p.answerInside(TooBig, at, icmp{kind: icmpTooBig, data: uint32(max(0, mtu-at))})
}

// noTunnel tells the sender of the packet at offset at, which this node has
// encapsulated or would have: it knows no more of the way than that there is none
// to its destination (RFC 2473 8).
func (p *packet) noTunnel(at int, why NoWay) Result {
	if why == BlackHole {
		return p.drop(NoRoute)
	}
	return p.answerInside(NoRoute, at, icmp{kind: icmpUnreachable, code: icmpCodeAddress})
}

// ownOuter is the length of the outer header, if this node's headend made it.
func (p *packet) ownOuter() int {
	if p.v4 {
		return 0
	}
	ip := ipv6(p.b)
	srh, refused := ip.options()
	if ip.source() != p.node.Address || refused.reason != "" || len(p.b) < srh+8 {
		return 0
	}
	return srh + 8 + 8*int(p.b[srh+1])
}

// answerInside answers the sender of the packet at offset at, of whatever version.
func (p *packet) answerInside(r Reason, at int, e icmp) Result {
	srh := 0
	if at > len(p.b) {
		return p.drop(r)
	}
	if at > 0 {
		srh, _ = ipv6(p.b).options()
	}
	if at > 0 && p.b[srh] == srv6.NextHeaderIPv4 {
		p.b, p.v4 = p.b[at:], true
		if len(p.b) < srv6.IPv4Len {
			return p.drop(r)
		}
		return p.answer(r, 0, e)
	}
	return p.answer(r, at, e)
}

// way asks for the way to an address from another. An address of the node is no
// way on, and what has a link-local or multicast address stays on its link.
func (n Node) way(to, from netip.Addr) Way {
	if n.owns(to) || neverForwarded(to) || neverForwarded(from) {
		return Way{None: Unreachable}
	}
	if n.Route == nil {
		return Way{}
	}
	return n.Route(to)
}

// longest is the length of the longest frame as the packet is now.
func (p *packet) longest() int {
	if p.arrival.Frames <= 1 {
		return len(p.b)
	}
	return p.arrival.Longest
}

func (p *packet) visited(id plan.PathID, position uint8, inner int) {
	p.result.Visits = append(p.result.Visits, Visit{
		Path: id.Path, Epoch: id.Epoch, Position: position,
		Frames: max(1, p.arrival.Frames), Bytes: inner,
	})
}

// steerable: no headend takes a packet from or to a SID, a link or many.
func (n Node) steerable(ip ip) bool {
	for _, a := range []netip.Addr{ip.source(), ip.destination()} {
		if unsteered(a) || n.Block.Contains(a) {
			return false
		}
	}
	return true
}

// unproven: a plain packet that some chain which ends here requires, and that is
// refused for it.
func (p *packet) unproven(ip ip) bool {
	if p.node.owns(ip.destination()) {
		return false
	}
	does := p.node.guard(ip, p.arrival.Interface.Guard, model.GuardEnforce)
	if does == model.GuardAudit {
		p.result.Reported = append(p.result.Reported, Unproven)
	}
	return does == model.GuardEnforce
}

func (n Node) owns(a netip.Addr) bool { return a == n.Address || slices.Contains(n.Own, a) }

// requires is the path that a packet must have taken to leave here. proven: the path
// of its proof, whose mark it had at its headend.
func (n Node) requires(ip ip, proven uint32) (path uint32, ok bool) {
	n.Egresses = whole(n.Egresses)
	i := choose(n.egressMatches(), ip, fits, func(i int) bool { return n.Egresses[i].Path == proven })
	if i < 0 {
		return 0, false
	}
	return n.Egresses[i].Path, true
}

// whole are the egresses of paths that start at an ingress: the guard is theirs.
func whole(egresses []plan.Egress) []plan.Egress {
	return slices.DeleteFunc(slices.Clone(egresses), func(e plan.Egress) bool { return e.Of != 0 })
}

func (n Node) egressMatches() []model.Match {
	matches := make([]model.Match, len(n.Egresses))
	for i, e := range n.Egresses {
		matches[i] = e.Match
	}
	return matches
}

// guard is what becomes of a packet without a proof; GuardUnset: no chain that ends
// here requires it. at: what its interface says. otherwise: where neither that nor its
// chain says. Of a packet that cannot be read whole, the strictest of the chains that
// it could be one of counts.
func (n Node) guard(ip ip, at, otherwise model.Guard) model.Guard {
	n.Egresses = whole(n.Egresses)
	of := func(i int) model.Guard { return cmp.Or(max(at, n.Egresses[i].Guard), otherwise) }
	matches := n.egressMatches()
	i := choose(matches, ip, couldFit, func(int) bool { return false })
	if i < 0 {
		return model.GuardUnset
	}
	does := of(i)
	if f, ok := readFlow(ip); !matches[i].Ordered() || ok && f.Known == srv6.ProtocolAndPorts {
		return does
	}
	for j, m := range matches {
		if m.Ordered() && m.Mark == (model.Mark{}) && couldFit(m, ip) {
			does = max(does, of(j))
		}
	}
	if j := longest(matches, ip); j >= 0 {
		does = max(does, of(j))
	}
	return does
}

// headend is the path that a packet from outside takes from here, or nil. unread:
// for all that can be read of it, it could be another one's.
func (n Node) headend(ip ip) (h *plan.Headend, unread bool) {
	n.Headends = outside(n.Headends)
	matches, unmarked := n.headendMatches(), func(int) bool { return false }
	i := choose(matches, ip, fits, unmarked)
	unread = choose(matches, ip, couldFit, unmarked) != i
	if i < 0 {
		return nil, unread
	}
	if f, ok := readFlow(ip); ok && f.Known == srv6.Later && matches[i].Protocol != 0 {
		// The protocol is what it says, and not what its receiver goes by.
		others := slices.Delete(slices.Clone(matches), i, i+1)
		unread = unread || choose(others, ip, couldFit, unmarked) >= 0
	}
	return &n.Headends[i], unread
}

// outside are the headends of what comes from outside, or is the node's own, and not of what a
// function or a gateway sends.
func outside(headends []plan.Headend) []plan.Headend {
	inside := func(h plan.Headend) bool { return h.From != "" }
	if !slices.ContainsFunc(headends, inside) {
		return headends
	}
	return slices.DeleteFunc(slices.Clone(headends), inside)
}

func (n Node) headendMatches() []model.Match {
	matches := make([]model.Match, len(n.Headends))
	for i, h := range n.Headends {
		matches[i] = h.Match
	}
	return matches
}

// choose is the rule that takes a packet: the ordered one with the lowest
// priority, or else the longest. fit: fits or couldFit. marked: the packet has, or
// had, the mark that a rule asks for. -1: none.
func choose(rules []model.Match, ip ip, fit func(model.Match, ip) bool, marked func(int) bool) int {
	best := -1
	for i, m := range rules {
		if m.Ordered() && (m.Mark == model.Mark{} || marked(i)) && fit(m, ip) && (best < 0 || m.Priority < rules[best].Priority) {
			best = i
		}
	}
	if best >= 0 {
		return best
	}
	return longest(rules, ip)
}

// fits says whether an ordered rule takes a packet by what the packet says.
func fits(m model.Match, ip ip) bool {
	if !fitsAddresses(m, ip) {
		return false
	}
	f, ok := readFlow(ip)
	return m.Protocol == 0 || ok && uint8(m.Protocol) == f.Protocol &&
		fitsPort(m.SourcePort, f.SourcePort) && fitsPort(m.DestinationPort, f.DestinationPort)
}

// couldFit says whether it takes the packet for what its receiver may find there.
func couldFit(m model.Match, ip ip) bool {
	if !fitsAddresses(m, ip) {
		return false
	}
	f, ok := readFlow(ip)
	switch {
	case !ok || f.Known == srv6.Hidden:
		return true
	case f.Known == srv6.ProtocolAndPorts:
		return fits(m, ip)
	case f.Known == srv6.Later && m.SourcePort == model.Ports{} && m.DestinationPort == model.Ports{}:
		return true // whose first fragment it takes, so that the datagram comes together
	}
	return m.Protocol == 0 || uint8(m.Protocol) == f.Protocol
}

func readFlow(ip ip) (srv6.Flow, bool) {
	switch b := ip.(type) {
	case ipv6:
		return srv6.ReadFlow(srv6.NextHeaderIPv6, b)
	case ipv4:
		return srv6.ReadFlow(srv6.NextHeaderIPv4, b)
	}
	return srv6.Flow{}, false
}

// fitsAddresses: and the DSCP.
func fitsAddresses(m model.Match, ip ip) bool {
	dscp, anyDSCP := m.DSCP.Value()
	return isIPv4(m) == ip.destination().Is4() && contains(m.Destination, ip.destination()) && contains(m.Source, ip.source()) &&
		(!anyDSCP || dscp == ip.trafficClass()>>2)
}

// fitsPort: fragments have port 0, and no rule asks for that.
func fitsPort(want model.Ports, p uint16) bool {
	return want == model.Ports{} || want.First <= p && p <= want.Last
}

// longest is the rule that takes a packet: of those that match both addresses,
// the one with the longest destination prefix, and of these the one with the
// longest source prefix. -1: none.
func longest(rules []model.Match, ip ip) int {
	best, found := -1, [2]int{}
	for i, m := range rules {
		if m.Ordered() || isIPv4(m) != ip.destination().Is4() || !contains(m.Destination, ip.destination()) || !contains(m.Source, ip.source()) {
			continue
		}
		l := [2]int{max(0, m.Destination.Bits()), max(0, m.Source.Bits())}
		if best < 0 || slices.Compare(l[:], found[:]) > 0 {
			best, found = i, l
		}
	}
	return best
}

// isIPv4: a match is of one version; one without conditions is of IPv6.
func isIPv4(m model.Match) bool {
	return m.Destination.IsValid() && m.Destination.Addr().Is4() || m.Source.IsValid() && m.Source.Addr().Is4()
}

// contains: the zero Prefix takes all.
func contains(p netip.Prefix, a netip.Addr) bool {
	return !p.IsValid() || p.Contains(a)
}

// hop is what a node has for one SID, path and epoch.
type hop struct {
	id      plan.PathID
	sources []netip.Addr
	share   pot.Share
	egress  *plan.Egress // nil: End

	netfilter bool // in place of End: a function of this kind, in the node's own kernel
	argument  uint32
}

// find looks a SID up with the path and epoch that the proof names, and says
// how far it came.
func (n Node) find(sid netip.Addr, proof srv6.Proof) (hop, Reason) {
	knowsSID, knowsPath := false, false
	try := func(at netip.Addr, id plan.PathID) bool {
		if upper64(at) != upper64(sid) {
			return false
		}
		knowsSID = true
		if id.Path != proof.Path {
			return false
		}
		knowsPath = true
		return id.Epoch == proof.Epoch
	}
	for _, e := range n.Endpoints {
		if try(e.SID, e.PathID) {
			return hop{id: e.PathID, sources: e.Sources, share: e.Share, netfilter: e.Behaviour == model.BehaviourEndAN, argument: e.Argument}, ""
		}
	}
	for i, e := range n.Egresses {
		if try(e.SID, e.PathID) {
			return hop{id: e.PathID, sources: e.Sources, share: e.Share, egress: &n.Egresses[i]}, ""
		}
	}
	switch {
	case knowsPath:
		return hop{}, UnknownEpoch
	case knowsSID:
		return hop{}, UnknownPath
	}
	return hop{}, UnknownSID
}

func upper64(a netip.Addr) uint64 {
	b := a.As16()
	return binary.BigEndian.Uint64(b[:])
}

func header4(p srv6.Proof) pot.Header {
	return pot.Header{Scheme: p.Scheme, Epoch: p.Epoch, Path: p.Path}
}

// mustAppend: a header that a plan gave, with lengths checked before.
func mustAppend(p srv6.Packet) []byte {
	err := p.Fix()
	var b []byte
	if err == nil {
		b, err = p.Append(nil)
	}
	if err != nil {
		panic(fmt.Sprintf("oracle: the plan asks for an impossible header: %v", err))
	}
	return b
}
