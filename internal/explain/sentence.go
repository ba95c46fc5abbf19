package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// RND as a headend sends it: lane, frames in the train - 1, counter.
const (
	laneShift   = 48
	lanesMax    = 4096
	framesShift = 42
	framesMax   = 63
	counterMax  = 1<<framesShift - 1
)

// hopName is a hop as people know it: "r2 (fw)", and a headend or egress by
// its node.
func hopName(p *plan.Path, position int) string {
	h := p.Hops[position]
	switch {
	case h.Function != "":
		return fmt.Sprintf("%s (%s)", h.Node, h.Function)
	case position == 0 && len(p.Ingress) > 1:
		var nodes []string
		for _, i := range p.Ingress {
			nodes = append(nodes, i.Node)
		}
		return "the headend (" + strings.Join(nodes, " or ") + ")"
	}
	return h.Node
}

func chainName(p *plan.Path) string {
	from := ""
	if p.From != "" {
		from = " from " + p.From + " on"
	}
	if p.Direction == model.Reverse {
		return "chain " + p.Chain + " (reverse)" + from
	}
	return "chain " + p.Chain + from
}

func and(names []string) string { return listed(names, " and ") }

func listed(names []string, last string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:len(names)-1], ", ") + last + names[len(names)-1]
}

// hypothesis turns a finding into words.
func (x *explainer) hypothesis(s *search, f finding) Hypothesis {
	h := Hypothesis{Kind: f.kind, Stamps: []Stamp{}, Start: Hex64(f.start), Change: f.change, Primes: f.primes, Flow: f.flow}
	h.Origin = origin(s.path, f.start)
	for _, st := range f.stamps {
		h.Stamps = append(h.Stamps, Stamp{
			Chain: st.path.Chain, Path: Hex32(st.path.Path), Epoch: st.path.Epoch,
			Position: uint8(st.position), Name: x.stamperName(st.path, st.position, h.Origin),
			Renamed: st.header != s.header && (st.header.Path != s.header.Path || st.header.Epoch != s.header.Epoch),
		})
	}
	h.Sentence = x.hypothesisSentence(s, f, h)
	return h
}

// stamperName names the headend by its lane where there are several.
func (x *explainer) stamperName(p *plan.Path, position int, o *Origin) string {
	if position == 0 && o != nil && slices.ContainsFunc(p.Ingress, func(i plan.Ingress) bool { return i.Node == o.Headend }) {
		return o.Headend
	}
	return hopName(p, position)
}

// origin reads an RND, if a headend of the path can have given it out.
func origin(p *plan.Path, rnd uint64) *Origin {
	lane, number := rnd>>laneShift, rnd&counterMax
	if lane >= lanesMax || number == 0 {
		return nil
	}
	for _, i := range p.Ingress {
		if lane >= uint64(i.Lane) && lane < uint64(i.Lane)+uint64(i.Lanes) {
			return &Origin{Headend: i.Node, Lane: uint16(lane), Frames: int(rnd>>framesShift&framesMax) + 1, Number: number}
		}
	}
	return nil
}

func (x *explainer) hypothesisSentence(s *search, f finding, h Hypothesis) string {
	switch f.kind {
	case Unstamped:
		return "this packet carries no stamp, not even that of its headend: its CML is zero"
	case Whole:
		return x.wholeSentence(s) + x.startedWrong(s, f)
	case Unreduced:
		times := ""
		if f.primes > 1 {
			times = fmt.Sprintf("%d times ", f.primes)
		}
		return x.wholeSentence(s) + fmt.Sprintf(", but its CML is %sthe prime more than what was sent", times) + x.startedWrong(s, f)
	case Skipped:
		return and(x.missing(s, f)) + " never stamped this packet"
	case Order:
		return x.orderSentence(s, f, h)
	case Repeated:
		return x.repeatedSentence(s, f, h)
	case OtherEpoch, OtherPath:
		return x.otherSentence(s, h)
	case OtherFlow:
		return fmt.Sprintf("this packet carries the proof of a packet of another flow, stamped by %s: its %s was %d, here it is %d",
			x.wholeBy(s), f.flow.Field, f.flow.Was, f.flow.Is)
	}
	return x.wholeSentence(s) + x.changeSentence(s, f)
}

// wholeSentence: all stamps are there.
func (x *explainer) wholeSentence(s *search) string {
	order := " in order"
	switch {
	case s.place == 1:
		order = ""
	case s.commutes():
		order = " (pot does not show in which order)"
	}
	return x.wholeBy(s) + " stamped this packet" + order
}

// wholeBy is everybody who should have stamped.
func (x *explainer) wholeBy(s *search) string {
	switch {
	case s.place == 1:
		return "the headend of " + chainName(s.path)
	case s.place < len(s.path.Hops)-1:
		return fmt.Sprintf("every hop of %s before %s", chainName(s.path), hopName(s.path, s.place))
	}
	return "every hop of " + chainName(s.path)
}

// startedWrong is said of good stamps over a number that is not a headend's.
func (x *explainer) startedWrong(s *search, f finding) string {
	if polynomial(s.path.Scheme) {
		if p := s.path.Shares[s.place].Polynomial.Prime; f.start >= p {
			return fmt.Sprintf(", but it started with RND %s, which is not below the prime %s: no headend gives out such a number",
				Hex64(f.start), Hex64(p))
		}
	}
	return ""
}

func (x *explainer) changeSentence(s *search, f finding) string {
	var places []string
	for _, after := range f.change.After {
		places = append(places, fmt.Sprintf("between %s and %s",
			hopName(s.path, after-1), hopName(s.path, after)))
	}
	return fmt.Sprintf(", but bit %d of its %s was changed %s", f.change.Bit, f.change.Field, listed(places, " or "))
}

// missing are the hops that should have stamped and did not.
func (x *explainer) missing(s *search, f finding) []string {
	var names []string
	for j := range s.own {
		if slices.ContainsFunc(f.stamps, func(st stamper) bool { return st.position == j }) {
			continue
		}
		name := hopName(s.path, j)
		if j == 0 && len(s.path.Ingress) < 2 {
			name = "the headend " + name
		}
		names = append(names, name)
	}
	return names
}

func stampNames(h Hypothesis) []string {
	names := make([]string, len(h.Stamps))
	for i, st := range h.Stamps {
		names[i] = st.Name
	}
	return names
}

func (x *explainer) orderSentence(s *search, f finding, h Hypothesis) string {
	names := stampNames(h)
	if missing := x.missing(s, f); len(missing) > 0 {
		return fmt.Sprintf("%s never stamped this packet, and the others did in the order %s", and(missing), strings.Join(names, ", "))
	}
	// Two neighbours exchanged, and all else in order.
	exchanged := -1
	for i, st := range f.stamps {
		if st.position != i && exchanged < 0 {
			exchanged = i
		}
	}
	rest := slices.Clone(f.stamps)
	rest[exchanged], rest[exchanged+1] = rest[exchanged+1], rest[exchanged]
	if slices.IsSortedFunc(rest, func(a, b stamper) int { return a.position - b.position }) {
		return fmt.Sprintf("%s stamped this packet before %s", names[exchanged], names[exchanged+1])
	}
	return "this packet was stamped in the order " + strings.Join(names, ", ")
}

func (x *explainer) repeatedSentence(s *search, f finding, h Hypothesis) string {
	var parts []string
	for j := range s.own {
		n := 0
		for _, st := range f.stamps {
			if st.position == j {
				n++
			}
		}
		switch {
		case n == 2:
			parts = append(parts, hopName(s.path, j)+" stamped this packet twice")
		case n > 2:
			parts = append(parts, fmt.Sprintf("%s stamped this packet %d times", hopName(s.path, j), n))
		}
	}
	sentence := and(parts)
	if missing := x.missing(s, f); len(missing) > 0 {
		sentence += ", and " + and(missing) + " never"
	}
	if s.commutes() {
		return sentence
	}
	return sentence + ": the order is " + strings.Join(stampNames(h), ", ")
}

func (x *explainer) otherSentence(s *search, h Hypothesis) string {
	foreign := func(st Stamp) bool { return uint32(st.Path) != s.header.Path || st.Epoch != s.header.Epoch }
	of := x.secretsName(s, h)
	if !slices.ContainsFunc(h.Stamps, func(st Stamp) bool { return !foreign(st) }) {
		return fmt.Sprintf("this packet carries the stamps of %s, while its proof names %s", of, x.ownName(s, h))
	}
	var others []string
	for _, st := range h.Stamps {
		if foreign(st) {
			others = append(others, st.Name)
		}
	}
	return fmt.Sprintf("%s stamped this packet with the secrets of %s, and the others with those of %s, which its proof names",
		and(others), of, x.ownName(s, h))
}

// secretsName is the path or epoch that the foreign stamps are of.
func (x *explainer) secretsName(s *search, h Hypothesis) string {
	for _, st := range h.Stamps {
		if uint32(st.Path) != s.header.Path || st.Epoch != s.header.Epoch {
			q := x.find(uint32(st.Path), st.Epoch)
			if h.Kind == OtherEpoch {
				return fmt.Sprintf("epoch %d of %s", st.Epoch, chainName(q))
			}
			return chainName(q)
		}
	}
	return chainName(s.path)
}

func (x *explainer) ownName(s *search, h Hypothesis) string {
	switch {
	case h.Kind == OtherEpoch:
		return fmt.Sprintf("epoch %d", s.header.Epoch)
	case x.path == nil:
		return "path " + Hex32(s.header.Path).String()
	}
	return chainName(x.path)
}

// sentence is the whole explanation.
func (x *explainer) sentence() string {
	if !x.decoded {
		return fmt.Sprintf("%s; the packet cannot be read: %s", x.text(), x.out.Malformed)
	}
	between := fmt.Sprintf("from %s to %s", x.from, x.sidName(x.to))
	if x.labelled {
		between = "with labels to " + x.labelNames()
	}
	switch x.out.Reason {
	case "proof", "range", "segments", "replay", "stale":
		if x.out.Tried {
			return x.proofSentence()
		}
	case "unproven", "unverified":
		did := map[string]string{"unproven": "came without proof", "unverified": "was to leave the domain without having been verified"}[x.out.Reason]
		if p := x.requires(askedOf(x.event.Packet[srv6.EthernetLen:], x.from, x.to), nil); p != nil {
			x.out.Requires = p.Chain
			return fmt.Sprintf("a packet %s, which %s requires, %s", between, chainName(p), did)
		}
		if x.out.Reason == "unverified" {
			break
		}
		return fmt.Sprintf("a packet %s came without proof, and no chain of these paths requires it: %s has another plan", between, x.out.Node)
	case "wrong-chain":
		if x.path != nil && x.inner != nil {
			return x.wrongChainSentence(fmt.Sprintf("from %s to %s", x.inner.Source, x.inner.Destination))
		}
	case "unknown-path", "unknown-epoch", "unknown-sid", "scheme":
		if x.proof != nil {
			return x.unknownSentence() + x.listClause()
		}
	}
	refused := "was " + event.Verdict(x.out.Reason, x.out.Reported)
	s := fmt.Sprintf("a packet %s%s %s: %s", between, x.namedClause(), refused, x.text()) + x.onwardClause()
	if x.out.Malformed != "" {
		s += " (" + x.out.Malformed + ")"
	}
	return s
}

// namedClause says which chain's packet it claims to be.
func (x *explainer) namedClause() string {
	switch {
	case x.path == nil:
		return ""
	case x.inner == nil:
		return fmt.Sprintf(" (its proof names %s)", chainName(x.path))
	}
	return fmt.Sprintf(" (its proof names %s, inside is a packet from %s to %s)", chainName(x.path), x.inner.Source, x.inner.Destination)
}

// onwardClause names the C-SIDs that the destination still has.
func (x *explainer) onwardClause() string {
	if x.path == nil {
		return ""
	}
	ahead := x.segments(x.sids([]netip.Addr{x.packet.Header.Destination}))[1:]
	if len(ahead) == 0 {
		return ""
	}
	var names []string
	for _, s := range ahead {
		names = append(names, s.Name)
	}
	return "; its destination goes on to " + strings.Join(names, ", ")
}

// text is what the node said of the reason.
func (x *explainer) text() string {
	if x.event.Text != "" {
		return x.event.Text
	}
	return x.out.Reason
}

func (x *explainer) proofSentence() string {
	clause := x.listClause()
	hs := x.out.Hypotheses
	switch len(hs) {
	case 0:
		return x.nothingSentence() + clause
	case 1:
		return hs[0].Sentence + x.windowClause(hs[0]) + x.otherPlan(hs[0]) + clause
	}
	return x.severalSentence() + clause
}

func (x *explainer) severalSentence() string {
	var all []string
	for _, h := range x.out.Hypotheses {
		all = append(all, h.Sentence)
	}
	return "the packet does not tell these apart: " + strings.Join(all, "; or ")
}

// windowClause says what the replay window made of a packet whose proof is right.
func (x *explainer) windowClause(h Hypothesis) string {
	if h.Kind != Whole || h.Origin == nil {
		return ""
	}
	number := fmt.Sprintf(", but number %d of lane %d (%s)", h.Origin.Number, h.Origin.Lane, h.Origin.Headend)
	switch x.out.Reason {
	case "replay":
		return number + " has been here before"
	case "stale":
		return number + " is older than the numbers in the replay window"
	}
	return ""
}

// otherPlan: what this explainer holds and what the egress held disagree.
func (x *explainer) otherPlan(h Hypothesis) string {
	if h.Kind != Whole || x.place != len(x.path.Hops)-1 || x.out.Reason != "proof" {
		return ""
	}
	return fmt.Sprintf(" with the secrets known here, so that %s holds others", x.out.Node)
}

// nothingSentence says what has been tried, and that it was for nothing.
func (x *explainer) nothingSentence() string {
	tried := "no selection or order of the hops of %s, none of them repeated"
	switch n := x.place; {
	case x.path.Scheme == model.SchemePoT:
		tried = "no selection of the hops of %s, none of them repeated"
	case n > arrangementsMax:
		tried = "no selection of the hops of %s, none of them moved, exchanged with another or repeated"
	}
	s := fmt.Sprintf("nothing that was tried gives the values of this packet (RND %s, CML %s): ", x.out.Proof.RND, x.out.Proof.CML) +
		fmt.Sprintf(tried, chainName(x.path)) + ", no other epoch or chain, no single bit changed"
	if x.path.Scheme == model.SchemeKeyedFlow {
		s += ", no other port or protocol"
	}
	return s
}

// listClause compares the carried segment list with the planned one.
func (x *explainer) listClause() string {
	if x.labelled {
		return "; its labels say " + x.labelNames()
	}
	if x.path == nil || !x.packet.Encapsulated() {
		return ""
	}
	list := x.packet.Carried()
	switch {
	case slices.Equal(list, x.path.Carried()):
		if !x.out.Tried {
			return ""
		}
		return "; its segment list is the planned one"
	case slices.Equal(x.out.Carried, x.out.Planned):
		return fmt.Sprintf("; its segment list names the planned segments, but in other entries: %s instead of %s", addresses(list), addresses(x.path.Carried()))
	}
	if len(x.out.Carried) == 0 {
		return "; its segment list names nothing before " + hopName(x.path, len(x.path.Hops)-1)
	}
	var names []string
	planned := x.sids(x.path.Carried()) // with the egress
	for i, c := range x.out.Carried {
		n := c.Name
		// The same place by name, another address: the argument differs, or the parameters of the last one do.
		if i < len(x.out.Planned) && x.out.Planned[i].Name == n && planned[i] != c.SID ||
			i == len(planned)-1 && upper64(planned[i]) == upper64(c.SID) && planned[i] != c.SID {
			n += " as " + c.SID.String()
		}
		names = append(names, n)
	}
	return "; its segment list says " + strings.Join(names, ", ")
}

func addresses(list []netip.Addr) string {
	names := make([]string, len(list))
	for i, a := range list {
		names[i] = a.String()
	}
	return strings.Join(names, ", ")
}

// asked is what the guard asks a packet for.
type asked struct {
	srv6.Flow
	read bool // all of the flow could be
	dscp uint8
}

// askedOf takes a packet from its IP header on.
func askedOf(b []byte, source, destination netip.Addr) asked {
	var a asked
	switch {
	case len(b) >= 2 && b[0]>>4 == 4:
		a.Flow, a.read = srv6.ReadFlow(srv6.NextHeaderIPv4, b)
		a.dscp = b[1] >> 2
	case len(b) >= 2 && b[0]>>4 == 6:
		a.Flow, a.read = srv6.ReadFlow(srv6.NextHeaderIPv6, b)
		a.dscp = b[0]&15<<2 | b[1]>>6
	}
	a.Source, a.Destination = source, destination
	return a
}

// fits says whether the guard sees a packet as one of m's. Of a fragment it does
// not know the ports, of what it cannot read not even the protocol: these fit. So
// does a later fragment, whatever it says, where a rule names no ports.
func (a asked) fits(m model.Match) bool {
	anyPorts := m.SourcePort == model.Ports{} && m.DestinationPort == model.Ports{}
	within := func(p model.Ports, port uint16) bool {
		return p == model.Ports{} || a.Known.Fragment() || p.First <= port && port <= p.Last
	}
	dscp, byDSCP := m.DSCP.Value()
	if !m.Covers(a.Destination, a.Source) || byDSCP && dscp != a.dscp {
		return false
	}
	return !a.read || a.Known == srv6.Hidden || a.Known == srv6.Later && anyPorts || (m.Protocol == 0 || uint8(m.Protocol) == a.Protocol) &&
		within(m.SourcePort, a.SourcePort) && within(m.DestinationPort, a.DestinationPort)
}

// made says whether a path is of what a function makes itself; its packets belong to
// another path.
func (x *explainer) made(p *plan.Path) bool {
	return p.From != "" && !slices.ContainsFunc(x.paths, func(o plan.Path) bool { return o.To == p.From })
}

// requires is the path that takes a packet: the rule of the lowest priority, else
// the longest destination prefix, then the longest source prefix. Where the node
// that refused it is the egress of some path, only such paths count. Marks are
// gone, so that rules by mark count only for packets with a proof of theirs.
func (x *explainer) requires(a asked, proven *plan.Path) *plan.Path {
	var best *plan.Path
	var first [3]int // the lowest comes first
	for i := range x.paths {
		p := &x.paths[i]
		if len(p.Hops) == 0 || x.made(p) || x.out.Node != "" && p.Hops[len(p.Hops)-1].Node != x.out.Node {
			continue
		}
		m := p.Match
		if !a.fits(m) || m.ByMark() && p != proven {
			continue
		}
		at := [3]int{int(m.Priority)}
		if !m.Ordered() {
			at = [3]int{model.PriorityMax + 1, -max(0, m.Destination.Bits()), -max(0, m.Source.Bits())}
		}
		if best == nil || slices.Compare(at[:], first[:]) < 0 {
			best, first = p, at
		}
	}
	return best
}

func (x *explainer) wrongChainSentence(between string) string {
	belongs := "no chain that ends there takes it"
	if p := x.requires(askedOf(x.packet.Payload, x.inner.Source, x.inner.Destination), x.path); p != nil {
		belongs = chainName(p) + " takes it"
	}
	s := fmt.Sprintf("a packet %s came with a proof of %s, but %s", between, chainName(x.path), belongs)
	switch hs := x.out.Hypotheses; {
	case len(hs) == 1:
		return s + "; " + hs[0].Sentence
	case len(hs) > 1:
		return s + "; " + x.severalSentence()
	}
	return s
}

func (x *explainer) unknownSentence() string {
	at := x.sidName(x.to)
	switch x.out.Reason {
	case "unknown-sid":
		if x.labelled {
			return fmt.Sprintf("the service label of a packet is that of %s, which %s has not", at, x.event.Node)
		}
		return fmt.Sprintf("a packet is addressed to %s, where there is nothing", at)
	case "unknown-path":
		if x.path == nil {
			return fmt.Sprintf("the proof of a packet to %s names path %s, which no chain has", at, x.out.Proof.Path) + x.also()
		}
		return fmt.Sprintf("the proof of a packet to %s names %s, which has another SID there or does not go there", at, chainName(x.path)) + x.also()
	case "scheme":
		if x.path == nil {
			return fmt.Sprintf("the proof of a packet to %s says scheme %s, which is not its path's", at, x.out.Proof.Scheme)
		}
		return fmt.Sprintf("the proof of a packet to %s says scheme %s, but %s has %s", at, x.out.Proof.Scheme, chainName(x.path), x.path.Scheme) + x.also()
	}
	if x.path == nil {
		return fmt.Sprintf("the proof of a packet to %s names epoch %d of path %s, which no chain has", at, x.proof.Epoch, x.out.Proof.Path)
	}
	if x.path.Epoch == x.proof.Epoch {
		return fmt.Sprintf("the proof of a packet to %s names epoch %d of %s, which is known here but not to %s", at, x.proof.Epoch, chainName(x.path), x.out.Node) + x.also()
	}
	return fmt.Sprintf("the proof of a packet to %s names epoch %d of %s; known here is %s", at, x.proof.Epoch, chainName(x.path), x.epochs()) + x.also()
}

// also adds what the stamps show, if they show anything.
func (x *explainer) also() string {
	if len(x.out.Hypotheses) != 1 {
		return ""
	}
	return "; " + x.out.Hypotheses[0].Sentence
}

func (x *explainer) epochs() string {
	var e []string
	for _, p := range x.paths {
		if p.Path == x.proof.Path {
			e = append(e, strconv.Itoa(int(p.Epoch)))
		}
	}
	return "epoch " + and(e)
}
