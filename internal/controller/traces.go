package controller

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
)

const (
	tracePackets    = 3 // unless the caller says another number
	traceTimeout    = 30 * time.Second
	traceTimeoutMax = time.Hour
	// traceSettle is how long the controller waits for further hops of a packet: agents call once a second.
	traceSettle = 3 * time.Second
	// tracesMax is the highest number of traces at once. A headend has fewer: abi.Traces paths.
	tracesMax = 32
	// tracedHeld is how many packets of a trace may wait for the event of their headend, and tracedHops how many events there are
	// of a packet: nodes say what they like, and whoever sends packets inside of the domain can set the flag.
	tracedHeld = 64
	tracedHops = 256

	// TracedMax is how many hops a node may tell of in one call, and tracedBytes how long each is at most.
	TracedMax   = 64
	tracedBytes = 2 << 10
	// tracedIdle is how long a node waits between two calls that no trace asks for.
	tracedIdle = 10 * time.Second
)

// Outcomes of traced packets.
const (
	tracedVerified = "verified" // at its egress
	tracedRefused  = "refused"  // a node has told of a refusal
	tracedLost     = "lost"     // neither: what is known ends at its last hop
)

// traces are those under way, in memory alone.
type traces struct {
	mu       sync.Mutex
	last     uint64 // the identity of an order
	open     []*trace
	reorders chan struct{} // closed when the orders of a node may have changed
}

// trace is one call of Admin.Trace.
type trace struct {
	packets int
	flow    bool // of a flow alone
	paths   []*tracedPath
	news    chan struct{} // something has come
	expired bool

	foreign, suppressed uint64
}

// tracedPath is a path of a trace.
type tracedPath struct {
	order   uint64
	plans   map[uint8]plan.Path // by epoch: what nodes may still hold
	path    uint32
	held    []*tracedPacket // the earliest first
	told    int             // packets that the caller has been sent
	toldOf  map[tracedID]bool
	flow    string // as in its orders; empty: all packets
	asked   bool   // headends are still asked for packets
	headend []string
}

type tracedID struct {
	epoch  uint8
	number uint64
}

type tracedPacket struct {
	tracedID
	begun    bool // its headend has told of it
	last     time.Time
	hops     []event.Hop
	refusals []event.Event
}

func (t *traces) changedLocked() {
	if t.reorders != nil {
		close(t.reorders)
	}
	t.reorders = make(chan struct{})
}

// orders are what a node is asked for, and a channel that is closed when that may have changed. Who knows no flows
// would trace all packets instead, and is not asked for one.
func (t *traces) orders(node string, flows bool) (out []*v1.TraceOrder, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.reorders == nil {
		t.reorders = make(chan struct{})
	}
	for _, x := range t.open {
		for _, p := range x.paths {
			if p.asked && slices.Contains(p.headend, node) && (flows || p.flow == "") {
				out = append(out, &v1.TraceOrder{Id: p.order, Path: p.path, Packets: uint32(x.packets), Flow: p.flow})
			}
		}
	}
	return out, t.reorders
}

// begin adds a trace, or says why it cannot be.
func (t *traces) begin(x *trace) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.open) >= tracesMax {
		return refuse(connect.CodeResourceExhausted, "%d traces are under way; wait until one has ended", tracesMax)
	}
	asked := map[string]int{}
	for _, o := range append(slices.Clone(t.open), x) {
		for _, p := range o.paths {
			for _, node := range p.headend {
				asked[node]++
			}
			if o != x && slices.ContainsFunc(x.paths, func(q *tracedPath) bool { return q.path == p.path }) {
				return refuse(connect.CodeAborted, "the chain is being traced already; wait until that trace has ended")
			}
		}
	}
	for node, n := range asked {
		if n > abi.Traces {
			return refuse(connect.CodeResourceExhausted, "node %s would trace %d paths at once, and can trace %d; wait until another trace has ended", node, n, abi.Traces)
		}
	}
	for _, p := range x.paths {
		t.last++
		p.order = t.last
	}
	t.open = append(t.open, x)
	t.changedLocked()
	return nil
}

func (t *traces) end(x *trace) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open = slices.DeleteFunc(t.open, func(o *trace) bool { return o == x })
	t.changedLocked()
}

// find is the traced path with this number; nil: nobody traces it.
func (t *traces) findLocked(path uint32) (*trace, *tracedPath) {
	for _, x := range t.open {
		for _, p := range x.paths {
			if p.path == path {
				return x, p
			}
		}
	}
	return nil, nil
}

func (t *traces) any() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.open) > 0
}

// hop takes what a node says of a packet. It says so only of positions that it is.
func (t *traces) hop(h event.Hop) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x, p := t.findLocked(h.Path)
	if x == nil {
		return
	}
	x.suppressed += uint64(h.Suppressed)
	of, ok := p.plans[h.Epoch]
	if !ok || !isAt(of, h.Position, h.Node) || h.Verified && h.Position != len(of.Hops)-1 {
		return
	}
	k := p.packetLocked(tracedID{h.Epoch, h.Number})
	if k == nil || len(k.hops) >= tracedHops {
		return
	}
	k.begun = k.begun || h.Position == 0
	k.hops = append(k.hops, h)
	k.last = time.Now()
	notify(x.news)
}

// refused takes a refusal of a packet that may be a traced one.
func (t *traces) refused(e event.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.open) == 0 {
		return
	}
	path, epoch, rnd, flagged := explain.NumberOf(e)
	x, p := t.findLocked(path)
	if x == nil || !flagged {
		return
	}
	numbers := numbersAt(p.plans[epoch], e.Node, rnd)
	i := slices.IndexFunc(p.held, func(k *tracedPacket) bool { return k.epoch == epoch && slices.Contains(numbers, k.number) })
	var k *tracedPacket
	if i >= 0 {
		k = p.held[i]
	} else { // its hops come later
		k = p.packetLocked(tracedID{epoch, numbers[0]})
	}
	if k != nil && len(k.refusals) < tracedHops {
		k.refusals = append(k.refusals, e)
		k.last = time.Now()
		notify(x.news)
	}
}

// numbersAt are the numbers that a packet with this RND may have at a node: with opot, each position unmasks it otherwise.
func numbersAt(p plan.Path, node string, rnd uint64) (out []uint64) {
	for i, h := range p.Hops {
		if h.Node == node && i < len(p.Shares) {
			out = append(out, rnd^p.Shares[i].Polynomial.Up.RND)
		}
	}
	return append(out, rnd)
}

// isAt tells whether a node is that position of a path.
func isAt(p plan.Path, position int, node string) bool {
	if position == 0 {
		return slices.ContainsFunc(p.Ingress, func(in plan.Ingress) bool { return in.Node == node })
	}
	return position > 0 && position < len(p.Hops) && p.Hops[position].Node == node
}

// packetLocked finds a packet, or begins to hold it; nil: the caller has been sent it. If there are too many that no headend
// has told of, the earliest is forgotten.
func (p *tracedPath) packetLocked(id tracedID) *tracedPacket {
	if p.toldOf[id] {
		return nil
	}
	if i := slices.IndexFunc(p.held, func(k *tracedPacket) bool { return k.tracedID == id }); i >= 0 {
		return p.held[i]
	}
	if len(p.held) >= tracedHeld {
		i := slices.IndexFunc(p.held, func(k *tracedPacket) bool { return !k.begun })
		if i < 0 {
			return nil
		}
		p.held = slices.Delete(p.held, i, i+1)
	}
	k := &tracedPacket{tracedID: id, last: time.Now()}
	p.held = append(p.held, k)
	return k
}

// whole tells whether all positions have told of a packet.
func (k *tracedPacket) whole(of plan.Path) bool {
	for i := range of.Hops {
		if !slices.ContainsFunc(k.hops, func(h event.Hop) bool { return h.Position == i && h.Verified == (i == len(of.Hops)-1) }) {
			return false
		}
	}
	return len(k.refusals) == 0 || k.verified()
}

func (k *tracedPacket) verified() bool {
	return slices.ContainsFunc(k.hops, func(h event.Hop) bool { return h.Verified })
}

// take are the packets of which no more is expected. done: none are to come. again is when to ask again.
func (t *traces) take(x *trace) (out []*v1.TracedPacket, done bool, again time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, done, again := time.Now(), true, traceSettle
	for _, p := range x.paths {
		for _, k := range slices.Clone(p.held) {
			left := k.last.Add(traceSettle).Sub(now)
			if !k.begun || p.told >= x.packets {
				continue
			}
			if !k.whole(p.plans[k.epoch]) && left > 0 {
				again = min(again, left)
				done = false
				continue
			}
			p.held = slices.DeleteFunc(p.held, func(o *tracedPacket) bool { return o == k })
			p.told++
			p.toldOf[k.tracedID] = true
			out = append(out, k.describe(p.plans[k.epoch]))
		}
		done = done && (x.expired || p.told >= x.packets)
		if p.asked && p.told >= x.packets {
			p.asked = false
			t.changedLocked()
		}
	}
	if done {
		for _, p := range x.paths {
			for _, k := range p.held {
				if !k.begun {
					x.foreign++
				}
			}
		}
	}
	return out, done, again
}

// expire ends the wait for packets that no headend has told of.
func (t *traces) expire(x *trace) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x.expired = true
	for _, p := range x.paths {
		p.asked = false
	}
	t.changedLocked()
}

// describe is a packet as the caller is told of it.
func (k *tracedPacket) describe(of plan.Path) *v1.TracedPacket {
	slices.SortStableFunc(k.hops, func(a, b event.Hop) int {
		return cmp.Or(cmp.Compare(a.Position, b.Position), a.Time.Compare(b.Time))
	})
	slices.SortStableFunc(k.refusals, func(a, b event.Event) int { return a.Time.Compare(b.Time) })
	out := &v1.TracedPacket{Path: of.Path, Epoch: uint32(k.epoch), Outcome: tracedLost}
	if of.Scheme != model.SchemeOPoT { // beside what is on the links it would show their masks
		out.Number = fmt.Sprintf("%016x", k.number)
	}
	for _, h := range k.hops {
		out.Hops = append(out.Hops, &v1.TracedHop{
			Time: timestamppb.New(h.Time), Position: uint32(h.Position), Node: h.Node, Function: of.Hops[h.Position].Function,
			Interface: h.Interface, Hook: h.Hook, Before: h.Before, After: h.After, Verified: h.Verified, Bytes: h.Len,
		})
	}
	for _, e := range k.refusals {
		out.Refusals = append(out.Refusals, &v1.TracedRefusal{
			Time: timestamppb.New(e.Time), Node: e.Node, Interface: e.Interface, Hook: e.Hook, Reason: e.Reason, Text: e.Text, Reported: e.Reported,
		})
	}
	last := 0
	for _, h := range k.hops {
		last = max(last, h.Position)
	}
	refused := slices.IndexFunc(k.refusals, func(e event.Event) bool { return !e.Reported })
	var missing []string
	for i := 1; i < last; i++ {
		if !slices.ContainsFunc(k.hops, func(h event.Hop) bool { return h.Position == i }) {
			missing = append(missing, placeName(of, i))
		}
	}
	switch {
	case refused >= 0:
		e := k.refusals[refused]
		out.Outcome = tracedRefused
		out.Sentence = fmt.Sprintf("%s refused it as %s: %s; the last hop before that was %s", e.Node, e.Reason, e.Text, placeName(of, last))
	case k.verified():
		out.Outcome = tracedVerified
		out.Sentence = fmt.Sprintf("%s has verified it", placeName(of, last))
		if last := k.refusals; len(last) > 0 {
			out.Sentence += fmt.Sprintf("; %s has reported it as %s, and let it go on", last[0].Node, last[0].Reason)
		}
	default:
		out.Sentence = fmt.Sprintf("the last hop was %s; %s has not told of it, and no node of a refusal", placeName(of, last), placeName(of, last+1))
	}
	if len(missing) > 0 {
		out.Sentence += "; " + strings.Join(missing, ", ") + " has not told of it"
	}
	return out
}

// placeName is a position of a path, for people.
func placeName(p plan.Path, position int) string {
	if position >= len(p.Hops) {
		return "nobody"
	}
	h, what := p.Hops[position], "hop"
	switch {
	case position == 0:
		what = "headend"
	case position == len(p.Hops)-1:
		what = "egress"
	case h.Function != "":
		what = h.Function
	}
	return fmt.Sprintf("position %d (%s, %s)", position, h.Node, what)
}

// Trace implements the service.
func (s admin) Trace(ctx context.Context, r *connect.Request[v1.TraceRequest], stream *connect.ServerStream[v1.TraceResponse]) error {
	return s.trace(ctx, waystampv1connect.AdminTraceProcedure, r.Msg, model.Flow{}, stream)
}

// TraceFlow implements the service.
func (s admin) TraceFlow(ctx context.Context, r *connect.Request[v1.TraceFlowRequest], stream *connect.ServerStream[v1.TraceResponse]) error {
	f, err := model.ParseFlow(r.Msg.Flow)
	if err != nil {
		return refuse(connect.CodeInvalidArgument, "the flow: %s", short(err.Error()))
	}
	if r.Msg.Trace == nil {
		return refuse(connect.CodeInvalidArgument, "the request says nothing of the trace")
	}
	return s.trace(ctx, waystampv1connect.AdminTraceFlowProcedure, r.Msg.Trace, f, stream)
}

// trace is a trace of all packets, or of a flow that is not zero.
func (s admin) trace(ctx context.Context, procedure string, r *v1.TraceRequest, f model.Flow, stream *connect.ServerStream[v1.TraceResponse]) error {
	x, begun, err := s.c.newTrace(ctx, r, f)
	if err != nil {
		return err
	}
	timeout := traceTimeout
	if r.TimeoutSeconds != 0 {
		timeout = time.Duration(r.TimeoutSeconds) * time.Second
	}
	if timeout > traceTimeoutMax {
		return refuse(connect.CodeInvalidArgument, "a trace waits %s for packets at most; have %s", traceTimeoutMax, timeout)
	}
	if err := s.c.traces.begin(x); err != nil {
		return err
	}
	defer s.c.traces.end(x)
	who, about := callerOf(ctx), short(r.Chain)
	if f != (model.Flow{}) {
		about += " flow " + f.String()
	}
	s.c.note(auditLine{Who: who.String(), From: who.remote, Via: who.via, Call: procedure, About: about, Result: "begun"}, true)
	if err := stream.Send(&v1.TraceResponse{Begun: begun}); err != nil {
		return err
	}
	expires := time.After(timeout)
	for {
		if err := s.c.authorize(ctx, procedure); err != nil { // he may have been removed
			return err
		}
		packets, done, again := s.c.traces.take(x)
		for _, p := range packets {
			if err := stream.Send(&v1.TraceResponse{Packet: p}); err != nil {
				return err
			}
		}
		if done {
			s.c.traces.end(x) // before the caller knows: the next call may be of the same chain
			return stream.Send(&v1.TraceResponse{Ended: &v1.TraceEnded{TimedOut: x.expired, Foreign: x.foreign, Suppressed: x.suppressed}})
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-x.news:
		case <-expires:
			s.c.traces.expire(x)
		case <-time.After(again):
		}
	}
}

// newTrace finds what is to be traced, and says who will not tell of it.
func (c *Controller) newTrace(ctx context.Context, r *v1.TraceRequest, f model.Flow) (*trace, *v1.TraceBegun, error) {
	x := &trace{packets: cmp.Or(int(r.Packets), tracePackets), flow: f != (model.Flow{}), news: make(chan struct{}, 1)}
	if r.Packets > event.TracePacketsMax {
		return nil, nil, refuse(connect.CodeInvalidArgument, "a trace has %d packets at most; have %d", event.TracePacketsMax, r.Packets)
	}
	if r.Direction != "" && r.Direction != model.Forward.String() && r.Direction != model.Reverse.String() {
		return nil, nil, refuse(connect.CodeInvalidArgument, "%q is no direction; expect %s or %s, or leave it out for both", short(r.Direction), model.Forward, model.Reverse)
	}
	live, err := c.livePaths(ctx)
	if err != nil {
		return nil, nil, failed(err)
	}
	begun := &v1.TraceBegun{}
	known := false
	if len(live) > 0 {
		for _, p := range live[0] { // those in force
			if known = known || p.Chain == r.Chain; p.Chain != r.Chain || r.Direction != "" && p.Direction.String() != r.Direction || !isPart(p, live[0]) {
				continue
			}
			t := &tracedPath{path: p.Path, plans: map[uint8]plan.Path{}, toldOf: map[tracedID]bool{}, asked: true}
			for _, in := range p.Ingress {
				t.headend = append(t.headend, in.Node)
			}
			if x.flow {
				of := f
				if p.Direction == model.Reverse {
					of = f.Reverse()
				}
				if !of.Meets(p.Match) {
					return nil, nil, refuse(connect.CodeInvalidArgument, "%s takes %s, and no packet of flow %s; name a flow that it takes, from the source of the forward direction to its destination", p, p.Match, of)
				}
				t.flow = of.String()
			}
			x.paths = append(x.paths, t)
			begun.Paths = append(begun.Paths, describePath(p, t.headend))
		}
	}
	switch {
	case !known:
		return nil, nil, refuse(connect.CodeNotFound, "no chain %q is in force; waystamp get chains lists them", short(r.Chain))
	case len(x.paths) == 0:
		return nil, nil, refuse(connect.CodeInvalidArgument, "chain %s has no direction %s", r.Chain, r.Direction)
	}
	for _, paths := range live {
		for _, p := range paths {
			if i := slices.IndexFunc(x.paths, func(t *tracedPath) bool { return t.path == p.Path }); i >= 0 {
				x.paths[i].plans[p.Epoch] = p
			}
		}
	}
	begun.Warnings, err = c.whoCannotTell(x, live[0])
	return x, begun, err
}

// isPart tells whether each packet of the chain, or of a connection on it, takes the path. Paths of packets that functions make
// are no parts.
func isPart(p plan.Path, all []plan.Path) bool {
	return p.From == "" || slices.ContainsFunc(all, func(q plan.Path) bool {
		return q.Chain == p.Chain && q.Direction == p.Direction && q.To == p.From
	})
}

func describePath(p plan.Path, headends []string) *v1.TracedPath {
	out := &v1.TracedPath{Path: p.Path, Direction: p.Direction.String(), From: p.From, To: p.To, Scheme: p.Scheme.String(), Headends: headends}
	for _, h := range p.Hops {
		out.Positions = append(out.Positions, &v1.TracedPosition{Node: h.Node, Function: h.Function})
	}
	return out
}

// whoCannotTell are warnings for nodes without a connection, or with an agent that knows no traces. Without a headend there is
// nothing to trace, which is an error.
func (c *Controller) whoCannotTell(x *trace, paths []plan.Path) (warnings []string, err error) {
	sessions := c.connections()
	why := func(node string) string {
		switch s, ok := sessions[node]; {
		case !ok:
			return "has no connection to the controller"
		case !s.traces:
			return "has an agent of an earlier version, which cannot trace"
		}
		return ""
	}
	whyHeadend := func(node string) string {
		if w := why(node); w != "" || !x.flow || sessions[node].flows {
			return w
		}
		return "has an agent of an earlier version, which cannot trace a flow"
	}
	said := map[string]bool{}
	for _, t := range x.paths {
		i := slices.IndexFunc(paths, func(p plan.Path) bool { return p.Path == t.path })
		p := paths[i]
		if !slices.ContainsFunc(t.headend, func(n string) bool { return whyHeadend(n) == "" }) {
			return nil, refuse(connect.CodeFailedPrecondition, "%s: no packet can be traced: its headend %s %s", p, t.headend[0], whyHeadend(t.headend[0]))
		}
		for _, n := range t.headend {
			if why(n) == "" && whyHeadend(n) != "" && !said[n] {
				said[n] = true
				warnings = append(warnings, fmt.Sprintf("node %s %s: packets that enter there are not traced", n, whyHeadend(n)))
			}
		}
		nodes := slices.Clone(t.headend)
		for _, h := range p.Hops[1:] {
			nodes = append(nodes, h.Node)
		}
		for _, n := range nodes {
			if w := why(n); w != "" && !said[n] {
				said[n] = true
				warnings = append(warnings, fmt.Sprintf("node %s %s: its hops will be missing", n, w))
			}
		}
	}
	return warnings, nil
}

// Traced implements the service.
func (s node) Traced(ctx context.Context, r *connect.Request[v1.TracedRequest]) (*connect.Response[v1.TracedResponse], error) {
	name, err := s.authenticate(ctx, false)
	if err != nil {
		return nil, err
	}
	if len(r.Msg.Hops) > TracedMax {
		return nil, refuse(connect.CodeInvalidArgument, "%d hops came in one call; %d are the most", len(r.Msg.Hops), TracedMax)
	}
	for _, b := range r.Msg.Hops {
		h, err := readHop(name, b)
		if err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		s.c.traces.hop(h)
	}
	pause := refusedPause
	if !s.c.traces.any() { // whoever sets the flag, no trace asks for it
		pause = tracedIdle
	}
	return connect.NewResponse(&v1.TracedResponse{PauseMilliseconds: uint32(pause / time.Millisecond)}), nil
}

// readHop reads what a node says. An agent of a later version may say more than this program knows. Operators' terminals show it.
func readHop(node string, b []byte) (h event.Hop, err error) {
	if len(b) > tracedBytes {
		return h, errors.New("the hop is too long")
	}
	if err := json.NewDecoder(bytes.NewReader(b)).Decode(&h); err != nil {
		return h, err
	}
	const value = 8
	if len(h.Before) != 0 && len(h.Before) != value || len(h.After) != 0 && len(h.After) != value {
		return h, fmt.Errorf("a CML of the hop has not %d bytes", value)
	}
	h.Node, h.Interface, h.Hook = node, short(h.Interface), short(h.Hook)
	return h, nil
}
