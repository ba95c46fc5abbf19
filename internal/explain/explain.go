// Package explain says in a sentence what a refused packet shows. Whoever holds
// the secrets of a whole path (the controller, a lab) can try what may have
// happened to a packet: hops left out, in another order, visited again,
// secrets of another epoch or chain, a bit changed on the way. A hypothesis is
// offered only if it reproduces the proof's values, as they are on the wire, bit
// for bit, by the stamps of internal/pot; if none does, that is said. Nothing
// is guessed.
//
// The package is pure. It is called by internal/cli, for waystamp explain and
// waystamp watch, and by internal/lab.
package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
)

// Names are those of SIDs that no path has, such as a lab's routers'. The upper
// 64 bits of a SID count.
type Names map[netip.Addr]string

// Kind is what a hypothesis says happened.
type Kind string

const (
	Whole      Kind = "whole"       // every hop stamped, in order
	Unstamped  Kind = "unstamped"   // nobody stamped
	Skipped    Kind = "skipped"     // some hops did not stamp
	Order      Kind = "order"       // stamps in another order, perhaps with some missing
	Repeated   Kind = "repeated"    // a hop stamped more than once
	OtherEpoch Kind = "other-epoch" // stamps with the secrets of another epoch
	OtherPath  Kind = "other-path"  // stamps with the secrets of another path
	BitChanged Kind = "bit-changed" // one bit of a value was changed on the way
	Unreduced  Kind = "unreduced"   // a multiple of the prime was added to CML
	OtherFlow  Kind = "other-flow"  // the stamps are of a packet of another flow
)

// Explanation is what one event shows.
type Explanation struct {
	Sentence  string `json:"sentence"`
	Node      string `json:"node"` // that refused the packet
	Interface string `json:"interface"`
	Reason    string `json:"reason"`
	Place     string `json:"place,omitempty"`    // see event.Event
	Reported  bool   `json:"reported,omitempty"` // it was let go on

	// Source and Destination are those of the inner packet if there is one.
	Source      netip.Addr `json:"source,omitzero"`
	Destination netip.Addr `json:"destination,omitzero"`
	Proof       *Proof     `json:"proof,omitempty"`
	// Carried and Planned are segment lists in the order of the visit, each SID
	// of a container for itself, the egress left out where it is the last. A
	// reduced list has no first entry, as planned.
	Carried []Segment `json:"carried,omitempty"`
	Planned []Segment `json:"planned,omitempty"`
	// Requires is the chain that takes a packet without a proof, which the chain requires.
	Requires string `json:"requires,omitempty"`
	// Labels are those that a packet with a label stack still has.
	Labels []Label `json:"labels,omitempty"`
	// Malformed says what is wrong with the packet's headers.
	Malformed string `json:"malformed,omitempty"`

	// Hypotheses are all that reproduce the values. Tried: they were looked
	// for, so that none means that none does.
	Hypotheses []Hypothesis `json:"hypotheses"`
	Tried      bool         `json:"tried"`
}

// Proof is the proof TLV as it was received. Chain and Direction are of the
// path that it names, if that is known.
type Proof struct {
	Scheme    string          `json:"scheme"`
	Epoch     uint8           `json:"epoch"`
	Path      Hex32           `json:"path"`
	Chain     string          `json:"chain,omitempty"`
	Direction model.Direction `json:"direction"`
	From      string          `json:"from,omitempty"` // the function that the path starts at
	RND       Hex64           `json:"rnd"`
	CML       Hex64           `json:"cml"`
}

// Segment is one entry of a segment list.
type Segment struct {
	SID  netip.Addr `json:"sid"`
	Name string     `json:"name"` // of what is there, or the SID
}

// Hypothesis is one thing that may have happened. It reproduces the values that
// were received: the stamps, in their order, from a packet with RND Start and a
// CML of zero, with Change.
type Hypothesis struct {
	Kind     Kind    `json:"kind"`
	Sentence string  `json:"sentence"`
	Stamps   []Stamp `json:"stamps"`
	// Start is the RND before the first stamp, as on the wire.
	Start  Hex64   `json:"start"`
	Origin *Origin `json:"origin,omitempty"` // what Start says, if a headend of the path can have sent it
	// Change is a bit that was changed. Several places: each of them would
	// give these values.
	Change *Change `json:"change,omitempty"`
	// Primes is the multiple of the prime that was added to CML.
	Primes uint64 `json:"primes,omitempty"`
	// Flow is how the flow that was stamped differs from this packet's.
	Flow *FlowChange `json:"flow,omitempty"`
}

// FlowChange is one part of a flow that is not as it was stamped.
type FlowChange struct {
	Field string `json:"field"` // source port, destination port or protocol
	Was   uint16 `json:"was"`   // when it was stamped
	Is    uint16 `json:"is"`
}

// Stamp is one hop's work.
type Stamp struct {
	Chain    string `json:"chain"`
	Path     Hex32  `json:"path"` // whose secrets they were
	Epoch    uint8  `json:"epoch"`
	Position uint8  `json:"position"`
	Name     string `json:"name"` // of the hop
	// Renamed: the stamp was made while the proof named the secrets' own path
	// and epoch, not those that it named when it was refused.
	Renamed bool `json:"renamed,omitempty"`
}

// Origin is how a headend of the path numbered the packet.
type Origin struct {
	Headend string `json:"headend"`
	Lane    uint16 `json:"lane"`
	Frames  int    `json:"frames"` // in the train
	Number  uint64 `json:"number"`
}

// Change is one bit of a value that is not as it was sent.
type Change struct {
	Field string `json:"field"` // RND or CML
	Bit   int    `json:"bit"`   // the lowest is 0
	After []int  `json:"after"` // so many stamps, in each of the places that fit
}

// Hex32 and Hex64 are numbers that are 0x digits in JSON, where a plain one
// would lose bits in many readers.
type (
	Hex32 uint32
	Hex64 uint64
)

func (h Hex32) String() string               { return fmt.Sprintf("0x%08x", uint32(h)) }
func (h Hex64) String() string               { return fmt.Sprintf("0x%016x", uint64(h)) }
func (h Hex32) MarshalText() ([]byte, error) { return []byte(h.String()), nil }
func (h Hex64) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// Explain says what an event shows, to one who holds paths with all their
// secrets.
func Explain(e event.Event, paths []plan.Path, names Names) Explanation {
	x := explainer{paths: paths, names: names, event: e}
	x.out = Explanation{
		Node: e.Node, Interface: e.Interface, Reason: event.ReasonName(e.Reason),
		Place: e.Place, Reported: e.Reported, Hypotheses: []Hypothesis{},
	}
	x.decode()
	x.try()
	x.out.Sentence = x.sentence()
	return x.out
}

// explainer is one event on its way to an Explanation.
type explainer struct {
	paths []plan.Path
	names Names
	event event.Event
	out   Explanation

	decoded bool // its addresses are known
	from    netip.Addr
	to      netip.Addr
	packet  srv6.Packet
	inner   *srv6.Inner
	payload []byte // of the inner packet, as far as it was captured
	proof   *srv6.Proof
	path    *plan.Path // that the proof names, with its epoch if that is known
	// place is the position of the path that the packet is addressed to, or -1.
	place int

	labelled bool  // it has a label stack
	next     uint8 // of its word
}

func (x *explainer) decode() {
	x.place = -1
	if x.isLabelled() {
		x.decodeLabels()
		return
	}
	p, err := srv6.DecodeFrame(x.event.Packet)
	x.packet = p
	x.decoded = p.Header.Source.IsValid()
	if plain, _, bad := srv6.DecodeInner(x.event.Packet); bad == nil && plain.Version == 4 {
		x.decoded, x.from, x.to = true, plain.Source, plain.Destination
		x.out.Source, x.out.Destination = x.from, x.to
		return
	}
	x.from, x.to = p.Header.Source, p.Header.Destination
	if err != nil {
		x.out.Malformed = err.Error()
		if len(x.event.Packet) == 0 {
			x.out.Malformed = "nothing of it was captured"
		}
	}
	if !x.decoded {
		return
	}
	x.out.Source, x.out.Destination = x.from, x.to
	if !p.Encapsulated() {
		return
	}
	if inner, payload, err := p.Inner(); err == nil {
		x.inner, x.payload = &inner, payload
		x.out.Source, x.out.Destination = inner.Source, inner.Destination
	}
	proof, ok := p.Proof()
	if !ok {
		x.out.Carried = x.segments(x.sids(p.Carried()))
		return
	}
	x.proof = &proof
	x.out.Proof = &Proof{
		Scheme: proof.Scheme.String(), Epoch: proof.Epoch, Path: Hex32(proof.Path),
		RND: Hex64(proof.RND), CML: Hex64(proof.CML),
	}
	x.path = x.find(proof.Path, proof.Epoch)
	carried := x.sids(p.Carried())
	if x.path == nil {
		x.out.Carried = x.segments(carried)
		return
	}
	x.out.Proof.Chain, x.out.Proof.Direction, x.out.Proof.From = x.path.Chain, x.path.Direction, x.path.From
	planned := x.sids(x.path.Carried())
	egress := planned[len(planned)-1]
	if last := len(carried) - 1; carried[last] == egress {
		carried = carried[:last]
	}
	x.out.Carried = x.segments(carried)
	x.out.Planned = x.segments(planned[:len(planned)-1])
	for j, h := range x.path.Hops {
		if j > 0 && upper64(h.SID) == upper64(p.Header.Destination) {
			x.place = j
		}
	}
}

// find is the path of that number: of that epoch, or of another one if the
// epoch is not known.
func (x *explainer) find(path uint32, epoch uint8) *plan.Path {
	var other *plan.Path
	for i := range x.paths {
		p := &x.paths[i]
		if p.Path != path || len(p.Hops) < 2 || len(p.Shares) != len(p.Hops) {
			continue
		}
		if p.Epoch == epoch {
			return p
		}
		other = p
	}
	return other
}

// sids takes a segment list apart: the entries of a compressed one are containers
// of several, if they are of the block. For a path that nobody knows any of those
// known will do.
func (x *explainer) sids(list []netip.Addr) []netip.Addr {
	paths := x.paths
	if x.path != nil {
		paths = []plan.Path{*x.path}
	}
	var sids []netip.Addr
	for _, a := range list {
		container := slices.ContainsFunc(paths, func(p plan.Path) bool {
			return p.Encapsulation.SIDs == model.SIDsCompressed && len(p.Hops) > 1 && srv6.SameBlock(p.Hops[1].SID, a)
		})
		if container {
			sids = append(sids, srv6.Uncompress([]netip.Addr{a})...)
		} else {
			sids = append(sids, a)
		}
	}
	return sids
}

func (x *explainer) segments(list []netip.Addr) []Segment {
	out := make([]Segment, len(list))
	for i, sid := range list {
		out[i] = Segment{SID: sid, Name: x.sidName(sid)}
	}
	return out
}

// sidName is what is at a SID: a hop of some path, something that the caller
// named, or the SID itself.
func (x *explainer) sidName(sid netip.Addr) string {
	for i := range x.paths {
		for j, h := range x.paths[i].Hops {
			if j > 0 && upper64(h.SID) == upper64(sid) {
				return hopName(&x.paths[i], j)
			}
		}
	}
	for _, named := range slices.SortedFunc(maps.Keys(x.names), netip.Addr.Compare) {
		if upper64(named) == upper64(sid) {
			return x.names[named]
		}
	}
	for i := range x.paths {
		for _, h := range x.paths[i].Hops {
			if slices.ContainsFunc(h.Waypoints, func(w netip.Addr) bool { return upper64(w) == upper64(sid) }) {
				return "waypoint " + sid.String()
			}
		}
	}
	return sid.String()
}

func upper64(a netip.Addr) [8]byte {
	b := a.As16()
	return [8]byte(b[:8])
}

// try looks for hypotheses where the packet has a proof of a known path at one
// of its places. A refusal that has nothing to do with the proof needs none.
func (x *explainer) try() {
	path, place := x.path, x.place
	switch x.out.Reason {
	case "proof", "range", "segments", "wrong-chain", "unknown-epoch", "scheme", "replay", "stale":
	case "unknown-path":
		if x.proof == nil {
			return
		}
		path, place = x.owner(x.to)
	default:
		return
	}
	if path == nil || place < 0 {
		return
	}
	s := search{
		paths: x.paths, path: path, place: place,
		header: pot.Header{Scheme: path.Scheme, Epoch: x.proof.Epoch, Path: x.proof.Path},
		want:   pot.Values{RND: x.proof.RND, CML: x.proof.CML},
		flow:   x.flow(),
	}
	carried := x.sids(x.packet.Carried())
	if whole := path.Segments(); len(whole) > len(path.Carried()) {
		// Its first entry was in the destination alone, and is gone.
		carried = append(x.sids(whole[:1]), carried...)
	}
	for _, sid := range carried {
		for i, h := range path.Hops[:place] {
			if i > 0 && upper64(h.SID) == upper64(sid) {
				s.carried = append(s.carried, i)
			}
		}
	}
	for _, f := range s.run() {
		x.out.Hypotheses = append(x.out.Hypotheses, x.hypothesis(&s, f))
	}
	x.out.Tried = true
}

// owner is the path that has a SID, and the SID's position on it.
func (x *explainer) owner(sid netip.Addr) (*plan.Path, int) {
	for i := range x.paths {
		p := &x.paths[i]
		for j, h := range p.Hops {
			if j > 0 && upper64(h.SID) == upper64(sid) && len(p.Shares) == len(p.Hops) {
				return p, j
			}
		}
	}
	return nil, -1
}

// flow is what keyed-flow binds to. What cannot be read is refused before its
// proof is looked at.
func (x *explainer) flow() pot.Flow {
	f, _ := x.packet.InnerFlow()
	if x.labelled {
		f, _ = srv6.ReadFlow(x.next, x.packet.Payload)
	}
	return pot.Flow{
		Source: f.Source, Destination: f.Destination, Protocol: f.Protocol,
		SourcePort: f.SourcePort, DestinationPort: f.DestinationPort,
	}
}

// PathOf is the path and the epoch that the packet of an event names in its proof, if it has one.
func PathOf(e event.Event) (path uint32, epoch uint8) {
	x := explainer{event: e}
	x.decode()
	if x.proof == nil {
		return 0, 0
	}
	return x.proof.Path, x.proof.Epoch
}

// NumberOf is what the packet of an event says of itself in its proof, if it has one: its path and epoch, RND as it is on the link,
// and whether its SRH has the O-flag (RFC 9259 section 2.1).
func NumberOf(e event.Event) (path uint32, epoch uint8, rnd uint64, flagged bool) {
	x := explainer{event: e}
	x.decode()
	if x.proof == nil {
		return 0, 0, 0, false
	}
	return x.proof.Path, x.proof.Epoch, x.proof.RND, x.packet.Flagged()
}
