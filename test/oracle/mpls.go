package oracle

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Reasons of packets with labels.
const (
	Encapsulation   Reason = "ENCAPSULATION"
	LabelsTruncated Reason = "LABELS_TRUNCATED"
	LabelsTooMany   Reason = "LABELS_TOO_MANY"
	LabelsBottom    Reason = "LABELS_BOTTOM"
	LabelNull       Reason = "LABEL_NULL"
	LabelAlert      Reason = "LABEL_ALERT"
	LabelUnknown    Reason = "LABEL_UNKNOWN"
	LabelTrain      Reason = "LABEL_TRAIN"
	WordTruncated   Reason = "WORD_TRUNCATED"
	WordVersion     Reason = "WORD_VERSION"
	WordNext        Reason = "WORD_NEXT"
	ProofTruncated  Reason = "PROOF_TRUNCATED"
	OutsideMPLS     Reason = "OUTSIDE_MPLS"
)

// LabelReasons are all that a packet with labels alone can make.
func LabelReasons() []Reason {
	return []Reason{
		Encapsulation, LabelsTruncated, LabelsTooMany, LabelsBottom, LabelNull, LabelAlert, LabelUnknown, LabelTrain,
		WordTruncated, WordVersion, WordNext, ProofTruncated, OutsideMPLS,
	}
}

const (
	labelsMax = 40 // entries that are looked at for the bottom
	pushed    = 64 // TTL of labels that leave a headend
)

// labels is what a node of a domain with labels does with a frame that has some; false: it is
// not one.
func (p *packet) labels() (Result, bool) {
	frame := p.arrival.Frame
	if p.node.MPLS == nil || len(frame) < srv6.EthernetLen {
		return Result{}, false
	}
	kind := binary.BigEndian.Uint16(frame[12:])
	labelled := kind == mpls.EtherTypeUnicast || kind == mpls.EtherTypeMulticast
	switch {
	case !labelled:
		return Result{}, false
	case p.arrival.Interface.Role != model.RoleCore:
		return p.drop(OutsideMPLS), true
	case kind == mpls.EtherTypeMulticast:
		return p.pass(), true
	case !p.node.Armed:
		return p.drop(Unconfigured), true
	case p.arrival.Frames > 1:
		return p.drop(LabelTrain), true
	}
	p.b = slices.Clone(frame[srv6.EthernetLen:])
	if len(p.b) >= mpls.EntryLen {
		top := p.entry(0)
		if _, ok := p.node.MPLS.NodeOf(top.Label()); ok && top.Label() != p.node.MPLS.Label {
			if top.TTL() <= 1 {
				return p.drop(HopLimit), true
			}
			p.setEntry(0, top.WithTTL(top.TTL()-1))
			return p.forwardLabels(), true
		}
	}
	for range visitsMax {
		if r, again := p.labelVisit(); !again {
			return r, true
		}
	}
	return p.drop(Loop), true
}

func (p *packet) entry(i int) mpls.Entry {
	return mpls.Entry(binary.BigEndian.Uint32(p.b[mpls.EntryLen*i:]))
}

func (p *packet) setEntry(i int, e mpls.Entry) {
	binary.BigEndian.PutUint32(p.b[mpls.EntryLen*i:], uint32(e))
}

// stack is where things are in a label stack, by their entries. next: of the pair of the
// next visit; 0: there is none.
type stack struct{ service, next, bottom int }

// readStack finds them: this node's labels on top, then the service label, and entropy
// pairs anywhere.
func (p *packet) readStack() (stack, Reason) {
	var s stack
	found, skip := false, false
	m := p.node.MPLS
	for i := range labelsMax {
		if len(p.b) < mpls.EntryLen*(i+1) {
			return s, LabelsTruncated
		}
		e := p.entry(i)
		switch l := e.Label(); {
		case skip:
			skip = false
		case l == mpls.LabelEntropy:
			skip = true
		case found:
			if s.next == 0 {
				s.next = i
			}
		case l >= m.Services && l < m.Services+model.ServiceLabels:
			s.service, found = i, true
		case m.Label != 0 && l == m.Label:
		case l == mpls.LabelIPv4Null, l == mpls.LabelIPv6Null:
			return s, LabelNull
		case l == mpls.LabelRouterAlert:
			return s, LabelAlert
		default:
			return s, LabelUnknown
		}
		if e.Bottom() {
			if !found || skip {
				return s, LabelsBottom
			}
			s.bottom = i
			return s, ""
		}
	}
	return s, LabelsTooMany
}

// labelVisit is one visit of a service label of this node. again: the next one is here too.
func (p *packet) labelVisit() (r Result, again bool) {
	s, reason := p.readStack()
	if reason != "" {
		return p.drop(reason), false
	}
	word := mpls.EntryLen * (s.bottom + 1)
	if len(p.b) < word+mpls.WordLen {
		return p.drop(WordTruncated), false
	}
	next := p.b[word+3]
	switch {
	case p.b[word] != 0:
		return p.drop(WordVersion), false
	case next != srv6.NextHeaderIPv4 && next != srv6.NextHeaderIPv6:
		return p.drop(WordNext), false
	}
	at := word + mpls.WordLen
	end := at + mpls.ProofLen
	if len(p.b) < end {
		return p.drop(ProofTruncated), false
	}
	if p.b[at] != srv6.TLVProof {
		return p.drop(TLVMissing), false
	}
	proof, err := srv6.ParseProof(srv6.TLV{Type: srv6.TLVProof, Value: p.b[at+2 : end]})
	if err != nil || p.b[at+1] != mpls.ProofLen-2 {
		return p.drop(TLVLength), false
	}
	sid := p.sidOf(p.entry(s.service).Label())
	h, reason := p.node.find(sid, proof)
	switch {
	case reason != "":
		return p.drop(reason), false
	case proof.Scheme != h.id.Scheme:
		return p.drop(Scheme), false
	case !h.id.OverLabels():
		return p.drop(Encapsulation), false
	}
	binding, ok := bind(h.share, h.id.Scheme, next, p.b[end:])
	if !ok {
		return p.drop(Flow), false
	}
	if h.egress != nil {
		return p.labelEgress(s, end, next == srv6.NextHeaderIPv4, proof, binding, h.egress), false
	}
	switch {
	case s.next == 0:
		return p.drop(UpperLayer), false
	case s.next >= s.bottom:
		return p.drop(LabelsBottom), false
	}
	ttl := min(p.entry(0).TTL(), p.entry(s.service).TTL())
	if !p.counted {
		if ttl <= 1 {
			return p.drop(HopLimit), false
		}
		ttl--
	}
	node, service := p.entry(s.next).Label(), p.entry(s.next+1).Label()
	if service < p.node.MPLS.Services || service >= p.node.MPLS.Services+model.ServiceLabels {
		return p.drop(SegmentOutside), false
	}
	values := h.share.StampFlow(header4(proof), pot.Values{RND: proof.RND, CML: proof.CML}, binding).WireOut
	binary.BigEndian.PutUint64(p.b[at+8:], values.RND)
	binary.BigEndian.PutUint64(p.b[at+16:], values.CML)
	p.counted = true
	p.rewrite(s, node, service, ttl)
	p.visited(h.id, h.share.Position, len(p.b)-end)
	if node == p.node.MPLS.Label {
		return Result{}, true
	}
	return p.forwardLabels(), false
}

func (p *packet) sidOf(label uint32) netip.Addr {
	return model.MPLS{Services: p.node.MPLS.Services}.SID(p.node.Block, label)
}

// rewrite writes the next visit's pair where the hop's was, without changing the length: what
// is left of both pairs becomes entropy pairs. In a stack whose top label a router took off, the next
// node's is there twice.
func (p *packet) rewrite(s stack, node, service uint32, ttl uint8) {
	old := make([]mpls.Entry, s.bottom+1)
	for i := range old {
		old[i] = p.entry(i)
	}
	if old[0].Label() == p.node.MPLS.Label && old[1].Label() == mpls.LabelEntropy && s.service == 3 {
		p.setEntry(0, old[0].WithLabel(node).WithTTL(ttl))
		p.setEntry(3, old[3].WithLabel(service).WithTTL(ttl))
		p.setEntry(s.next, old[1])
		p.setEntry(s.next+1, old[2].WithBottom(old[s.next+1].Bottom()))
		return
	}
	entropy := uint32(mpls.LabelMin)
	for i := range min(3, len(old)-1) {
		if old[i].Label() == mpls.LabelEntropy {
			entropy = old[i+1].Label()
			break
		}
	}
	all := s.next + 2
	top := old[0].WithLabel(node).WithTTL(ttl).WithBottom(false)
	made := []mpls.Entry{top}
	if all%2 == 1 {
		made = append(made, top)
	}
	pair := []mpls.Entry{top.WithLabel(mpls.LabelEntropy), mpls.NewEntry(entropy, 0, false, 0)}
	if all > 3 {
		made = append(made, pair...)
	}
	class := uint8(0)
	if len(old) > 3 {
		class = old[3].TC()
	}
	made = append(made, mpls.NewEntry(service, class, false, ttl))
	for len(made) < all {
		made = append(made, pair...)
	}
	for i, e := range made {
		p.setEntry(i, e.WithBottom(old[i].Bottom()))
	}
}

// labelEgress is the verdict, and what End.DT46 does with what is inside.
func (p *packet) labelEgress(s stack, outer int, v4 bool, proof srv6.Proof, binding pot.Binding, e *plan.Egress) Result {
	if s.next != 0 {
		return p.drop(SegmentsRemain)
	}
	reports := e.OnViolation == model.OnViolationReport
	violation, rnd := judgeValues(proof, binding, e)
	if violation != "" {
		if !reports {
			return p.drop(violation)
		}
		p.result.Reported = append(p.result.Reported, violation)
	}
	inner, ok := headerOf(p.b[outer:], v4)
	switch {
	case !ok:
		return p.drop(InnerTruncated)
	case !inner.whole():
		return p.drop(InnerVersion)
	}
	length := inner.length()
	ip4, is4 := inner.(ipv4)
	switch {
	case is4 && (length < ip4.headerLength() || outer+length > len(p.b)):
		return p.drop(IP4Length)
	case outer+length > len(p.b):
		return p.drop(IP6Length)
	}
	if violation == "" {
		if violation = p.window(rnd, p.b[outer:], e); violation != "" {
			if !reports {
				return p.drop(violation)
			}
			p.result.Reported = append(p.result.Reported, violation)
		}
	}
	path, ok := p.node.requires(inner, e.Requires())
	if !ok || path != e.Requires() || !p.node.steerable(inner) {
		return p.drop(WrongChain)
	}
	p.b, p.v4 = p.b[outer:outer+length], v4
	p.visited(e.PathID, e.Share.Position, len(p.b))
	if p.node.owns(inner.destination()) {
		return p.end(Deliver)
	}
	return p.forward(InnerNoRoute)
}

// labelHeadend is H.Encaps over labels, with the first stamp. A super-packet is segmented
// before.
func (p *packet) labelHeadend(h *plan.Headend) Result {
	inner, _ := headerOf(p.b, p.v4)
	next := uint8(srv6.NextHeaderIPv6)
	if p.v4 {
		next = srv6.NextHeaderIPv4
	}
	binding, ok := bind(h.Share, h.Scheme, next, p.b)
	outer := mpls.OuterLen(len(h.Segments))
	switch {
	case !ok:
		return p.drop(Flow)
	case inner.hopLimit() <= 1 && !p.leaves:
		return p.answer(EdgeHopLimit, 0, icmp{kind: icmpTimeExceeded})
	case h.MTU != 0 && len(p.b) > h.MTU:
		return p.answer(ChainMTU, 0, icmp{kind: icmpTooBig, data: uint32(h.MTU)})
	}
	here := h.NodeLabels[0] == p.node.MPLS.Label
	if !here {
		switch way := p.labelWay(h.NodeLabels[0]); {
		case way.None != 0:
			return p.noTunnel(0, way.None)
		case way.MTU != 0 && len(p.b)+outer > way.MTU:
			return p.answer(TooBig, 0, icmp{kind: icmpTooBig, data: uint32(max(0, way.MTU-outer))})
		}
	}
	switch {
	case p.arrival.CPU >= int(h.Lanes):
		return p.drop(NoLane)
	case p.arrival.Number == 0:
		return p.drop(RNDExhausted)
	}
	rnd := (uint64(h.Lane)+uint64(p.arrival.CPU))<<laneShift | p.arrival.Number
	header := pot.Header{Scheme: h.Scheme, Epoch: h.Epoch, Path: h.Path}
	values := h.Share.StampFlow(header, pot.Values{RND: rnd}, binding).WireOut
	p.visited(h.PathID, 0, len(p.b))
	class := inner.trafficClass() >> 5
	if !p.leaves {
		inner.decrement()
	}
	if h.MSS != 0 {
		p.result.Clamped = clampMSS(p.b, p.v4, h.MSS)
	}
	var b []byte
	put := func(label uint32, class uint8, bottom bool, ttl uint8) {
		b = binary.BigEndian.AppendUint32(b, uint32(mpls.NewEntry(label, class, bottom, ttl)))
	}
	for i, sid := range h.Segments {
		last := i == len(h.Segments)-1
		put(h.NodeLabels[i], class, false, pushed)
		if i == 0 {
			put(mpls.LabelEntropy, class, false, pushed)
			put(0, class, false, 0)
		}
		put(p.node.MPLS.Service(sid), class, last, pushed)
		class = 0
	}
	b = append(b, 0, 0, 0, next, srv6.TLVProof, mpls.ProofLen-2, uint8(h.Scheme), h.Epoch)
	b = binary.BigEndian.AppendUint32(b, h.Path)
	b = binary.BigEndian.AppendUint64(b, values.RND)
	b = binary.BigEndian.AppendUint64(b, values.CML)
	p.b, p.v4, p.behind = append(b, p.b...), false, nil
	p.result.Encapsulated, p.counted = true, true
	if here {
		for range visitsMax {
			if r, again := p.labelVisit(); !again {
				return r
			}
		}
		return p.drop(Loop)
	}
	return p.forwardLabels()
}

// labelWay is the way to the node of a label.
func (p *packet) labelWay(label uint32) Way {
	to, ok := p.node.MPLS.NodeOf(label)
	switch {
	case !ok:
		return Way{None: Unreachable}
	case p.node.Route == nil:
		return Way{}
	}
	return p.node.Route(to.Address)
}

// forwardLabels sends the packet to the node that its top label names. Labels name no source
// that could be told of an error.
func (p *packet) forwardLabels() Result {
	way := p.labelWay(p.entry(0).Label())
	switch {
	case way.None != 0:
		return p.drop(NoRoute)
	case way.MTU != 0 && len(p.b) > way.MTU:
		return p.drop(TooBig)
	}
	p.result.Labels = true
	return p.end(Forward)
}
