package controller

import (
	"context"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/srv6"
)

// tracing is a running call.
type tracing struct {
	w      *world
	stream *connect.ServerStreamForClient[v1.TraceResponse]
	stop   context.CancelFunc
}

func (w *world) trace(r *v1.TraceRequest) (*tracing, *v1.TraceBegun) {
	w.Helper()
	return w.traced(func(ctx context.Context) (*connect.ServerStreamForClient[v1.TraceResponse], error) {
		return w.admin.Trace(ctx, connect.NewRequest(r))
	})
}

// traceFlow is a trace of a flow.
func (w *world) traceFlow(r *v1.TraceRequest, flow string) (*tracing, *v1.TraceBegun) {
	w.Helper()
	return w.traced(func(ctx context.Context) (*connect.ServerStreamForClient[v1.TraceResponse], error) {
		return w.admin.TraceFlow(ctx, connect.NewRequest(&v1.TraceFlowRequest{Trace: r, Flow: flow}))
	})
}

func (w *world) traced(call func(context.Context) (*connect.ServerStreamForClient[v1.TraceResponse], error)) (*tracing, *v1.TraceBegun) {
	w.Helper()
	ctx, cancel := context.WithCancel(w.Context())
	stream, err := call(ctx)
	w.must(err)
	t := &tracing{w, stream, cancel}
	w.Cleanup(func() {
		cancel()
		stream.Close()
	})
	return t, t.next().Begun
}

func (t *tracing) next() *v1.TraceResponse {
	t.w.Helper()
	if !t.stream.Receive() {
		t.w.Fatal(t.stream.Err())
	}
	return t.stream.Msg()
}

// ordered waits until an agent is asked for so many traces.
func (f *fake) ordered(n int) []event.Trace {
	f.w.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		if have := f.member.Traces(); len(have) == n {
			return have
		}
		select {
		case <-f.member.TracesChanged():
		case <-ctx.Done():
			f.w.Fatalf("%s is asked for %v, want %d", f.name, f.member.Traces(), n)
		}
	}
}

// hop is a packet at a position of a path; verified at the last one of three.
func hop(path uint32, number uint64, position int) event.Hop {
	h := event.Hop{
		Time: time.Unix(100, int64(position)*1000), Interface: "eth\x1b0", Hook: "xdp", Path: path, Number: number, Position: position,
		Scheme: "keyed", Verified: position == 2, Len: 200, Before: make([]byte, 8),
	}
	if position == 0 {
		h.Before = nil
	}
	if !h.Verified {
		h.After = binary.BigEndian.AppendUint64(nil, number)
	}
	return h
}

// flagged is a refusal of the path's packet of that number.
func flagged(t *testing.T, h plan.Headend, number uint64) event.Event {
	t.Helper()
	inner := append([]byte{0x60, 0, 0, 0, 0, 0, 59, 64}, make([]byte, 32)...)
	b, err := srv6.Wrap(netip.MustParseAddr("fc00:1::1"), h.Segments, srv6.Proof{Scheme: h.Scheme, Epoch: h.Epoch, Path: h.Path, RND: number}, srv6.NextHeaderIPv6, inner)
	if err != nil {
		t.Fatal(err)
	}
	b[srv6.EthernetLen+srv6.IPv6Len+5] |= srv6.FlagOAM
	return event.Event{Time: time.Unix(101, 0), Interface: "r3-r2", Hook: "tc", Reason: "proof", Text: "the proof is wrong", Len: uint32(len(b)), Packet: b}
}

func TestATraceLaysTheHopsOfNodesSideBySide(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	x, begun := w.trace(&v1.TraceRequest{Chain: "web", Direction: "forward", Packets: 3, TimeoutSeconds: 60})
	if len(begun.Paths) != 1 || len(begun.Warnings) != 0 {
		t.Fatalf("begun with %v", begun)
	}
	of := begun.Paths[0]
	if of.Direction != "forward" || of.Scheme != "keyed" || !slices.Equal(of.Headends, []string{"r1"}) || len(of.Positions) != 3 || of.Positions[1].Node != "r2" || of.Positions[1].Function != "fw" {
		t.Errorf("path %v", of)
	}
	order := agents["r1"].ordered(1)[0]
	if order.Path != of.Path || order.Packets != 3 || order.ID == 0 {
		t.Errorf("r1 is asked for %v", order)
	}
	for _, other := range []string{"r2", "r3"} {
		if have := agents[other].member.Traces(); len(have) != 0 {
			t.Errorf("%s is asked for %v", other, have)
		}
	}
	h := agents["r1"].now().Headends[0]
	if h.Direction.String() != "forward" {
		h = agents["r1"].now().Headends[1]
	}
	tell := func(name string, number uint64, position int) {
		e := hop(of.Path, number, position)
		e.Epoch = h.Epoch
		e.Node = "r9" // a node speaks for itself
		agents[name].member.Traced(e)
	}
	// From the last to the first: nobody knows whose call comes first. And no node speaks for another position.
	tell("r3", 7, 2)
	tell("r2", 7, 0)
	tell("r2", 7, 2)
	tell("r2", 7, 1)
	agents["r2"].member.Traced(event.Hop{Path: 0xdead, Position: 1})
	tell("r1", 7, 0)
	p := x.next().Packet
	if p == nil || p.Outcome != "verified" || p.Number != "0000000000000007" || p.Epoch != uint32(h.Epoch) || len(p.Hops) != 3 || len(p.Refusals) != 0 || p.Sentence != "position 2 (r3, egress) has verified it" {
		t.Fatalf("packet %v", p)
	}
	for i, node := range []string{"r1", "r2", "r3"} {
		if at := p.Hops[i]; at.Node != node || at.Position != uint32(i) || at.Interface != "eth 0" || at.Hook != "xdp" || at.Verified != (i == 2) || at.Bytes != 200 || (len(at.Before) == 8) != (i > 0) || (len(at.After) == 8) != (i < 2) || at.Time.AsTime() != time.Unix(100, int64(i)*1000).UTC() {
			t.Errorf("hop %d: %v", i, at)
		}
	}
	if p.Hops[1].Function != "fw" || p.Hops[0].Function != "" {
		t.Errorf("hops %v", p.Hops)
	}
	// One that r3 refuses.
	tell("r1", 8, 0)
	tell("r2", 8, 1)
	agents["r3"].member.Refused(flagged(t, h, 8))
	other := flagged(t, h, 8)
	other.Packet = slices.Clone(other.Packet)
	other.Packet[srv6.EthernetLen+srv6.IPv6Len+5] = 0 // it is not the traced one
	agents["r3"].member.Refused(other)
	p = x.next().Packet
	if p == nil || p.Outcome != "refused" || len(p.Hops) != 2 || len(p.Refusals) != 1 || p.Refusals[0].Node != "r3" || p.Sentence != "r3 refused it as proof: the proof is wrong; the last hop before that was position 1 (r2, fw)" {
		t.Fatalf("packet %v", p)
	}
	// One that is lost behind r1; and one that no headend has told of.
	tell("r2", 99, 1)
	tell("r1", 9, 0)
	p = x.next().Packet
	if p == nil || p.Outcome != "lost" || len(p.Hops) != 1 || p.Sentence != "the last hop was position 0 (r1, headend); position 1 (r2, fw) has not told of it, and no node of a refusal" {
		t.Fatalf("packet %v", p)
	}
	if e := x.next().Ended; e == nil || e.TimedOut || e.Foreign != 1 {
		t.Errorf("it ends with %v", e)
	}
	agents["r1"].ordered(0)
}

func TestATraceEnds(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	// Nothing comes.
	x, begun := w.trace(&v1.TraceRequest{Chain: "web", TimeoutSeconds: 1})
	if len(begun.Paths) != 2 {
		t.Errorf("both directions: %v", begun)
	}
	if e := x.next().Ended; e == nil || !e.TimedOut {
		t.Errorf("it ends with %v", e)
	}
	// The caller goes away.
	x, _ = w.trace(&v1.TraceRequest{Chain: "web", Direction: "forward", Packets: 1, TimeoutSeconds: 3600})
	agents["r1"].ordered(1)
	x.stop()
	agents["r1"].ordered(0)
	// The controller dies, and the agent gives the trace up with the connection.
	x, _ = w.trace(&v1.TraceRequest{Chain: "web", Direction: "forward", Packets: 1, TimeoutSeconds: 3600})
	agents["r1"].ordered(1)
	w.stop()
	agents["r1"].ordered(0)
	if x.stream.Receive() {
		t.Errorf("it goes on with %v", x.stream.Msg())
	}
}

func TestTracesThatCannotBe(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	x, _ := w.trace(&v1.TraceRequest{Chain: "web", Direction: "reverse", TimeoutSeconds: 3600})
	refused := func(r *v1.TraceRequest, code connect.Code, want string) {
		t.Helper()
		stream, err := w.admin.Trace(t.Context(), connect.NewRequest(r))
		w.must(err)
		defer stream.Close()
		if stream.Receive() || connect.CodeOf(stream.Err()) != code || !strings.Contains(stream.Err().Error(), want) {
			t.Errorf("%v: %v, %v; want %s and %q", r, stream.Msg(), stream.Err(), code, want)
		}
	}
	refused(&v1.TraceRequest{Chain: "web", Direction: "reverse"}, connect.CodeAborted, "is being traced already")
	refused(&v1.TraceRequest{Chain: "web"}, connect.CodeAborted, "is being traced already")
	refused(&v1.TraceRequest{Chain: "wob\x1b"}, connect.CodeNotFound, `no chain "wob " is in force`)
	refused(&v1.TraceRequest{Chain: "web", Direction: "up"}, connect.CodeInvalidArgument, `"up" is no direction`)
	refused(&v1.TraceRequest{Chain: "web", Packets: 17}, connect.CodeInvalidArgument, "16 packets at most; have 17")
	refused(&v1.TraceRequest{Chain: "web", Direction: "forward", TimeoutSeconds: 3601}, connect.CodeInvalidArgument, "for packets at most; have 1h0m1s")
	x.stop()
	agents["r3"].ordered(0)
	agents["r2"].stop()
	w.until("r2 is away", func(s *v1.State) bool { return nodeIn(s, "r2").State == nodeAway })
	x, begun := w.trace(&v1.TraceRequest{Chain: "web", Direction: "forward"})
	if len(begun.Warnings) != 1 || begun.Warnings[0] != "node r2 has no connection to the controller: its hops will be missing" {
		t.Errorf("warnings %q", begun.Warnings)
	}
	x.stop()
	agents["r1"].ordered(0)
	agents["r1"].stop()
	w.until("r1 is away", func(s *v1.State) bool { return nodeIn(s, "r1").State == nodeAway })
	refused(&v1.TraceRequest{Chain: "web", Direction: "forward"}, connect.CodeFailedPrecondition, "no packet can be traced: its headend r1 has no connection to the controller")
}

// A node that says what it likes uses no more than its share, and whoever sets the flag pushes no traced packet out.
func TestANodeCannotCrowdOutATrace(t *testing.T) {
	p := &tracedPath{path: 1, toldOf: map[tracedID]bool{}}
	mine := p.packetLocked(tracedID{0, 1})
	mine.begun = true
	for i := range uint64(10 * tracedHeld) {
		p.packetLocked(tracedID{0, 1000 + i})
	}
	if len(p.held) != tracedHeld || p.held[0] != mine {
		t.Errorf("%d packets are held, the first is %v", len(p.held), p.held[0])
	}
	for _, bad := range []string{"{", "[]", `{"before":"00"}`, `{"after":"` + strings.Repeat("00", 9) + `"}`, `{"node":"` + strings.Repeat("x", tracedBytes) + `"}`} {
		if h, err := readHop("r1", []byte(bad)); err == nil {
			t.Errorf("%.20s is taken as %v", bad, h)
		}
	}
	if h, err := readHop("r1", []byte(`{"node":"r2","later":1}`)); err != nil || h.Node != "r1" {
		t.Errorf("%v, %v", h, err)
	}
}

// The headends of both directions are asked for the flow as they see it, and an agent that knows no flows for nothing: it would
// trace all packets.
func TestAHeadendIsAskedForAFlow(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	match := agents["r1"].now().Headends[0].Match
	if agents["r1"].now().Headends[0].Direction != model.Forward {
		match = agents["r1"].now().Headends[1].Match
	}
	to := match.Destination.Addr()
	flow := model.Flow{Source: netip.MustParsePrefix("2001:db8:7::/64"), Destination: netip.PrefixFrom(to, 128), Protocol: 6, SourcePort: 1025, DestinationPort: 443}
	x, begun := w.traceFlow(&v1.TraceRequest{Chain: "web", Packets: 2, TimeoutSeconds: 3600}, flow.String())
	if len(begun.Paths) != 2 || len(begun.Warnings) != 0 {
		t.Errorf("begun with %v", begun)
	}
	if have := agents["r1"].ordered(1)[0]; have.Flow != flow || have.Packets != 2 {
		t.Errorf("r1 is asked for %+v, want flow %s", have, flow)
	}
	if have := agents["r3"].ordered(1)[0]; have.Flow != flow.Reverse() {
		t.Errorf("r3 is asked for %+v, want flow %s", have, flow.Reverse())
	}
	// One that was there and goes on as a version that knows no flows.
	agents["r1"].stop()
	w.until("r1 is away", func(s *v1.State) bool { return nodeIn(s, "r1").State == nodeAway })
	agents["r1"].noFlows = true
	agents["r1"].run("")
	w.until("r1 is back", func(s *v1.State) bool { return nodeIn(s, "r1").State == nodeReady })
	// The stream to r1 begins with its orders; a plan of another epoch comes behind them.
	w.until("rotated", settled(w.rotate()))
	if have := agents["r1"].member.Traces(); len(have) != 0 {
		t.Errorf("r1 knows no flows, and is asked for %+v", have)
	}
	agents["r3"].ordered(1)
	x.stop()
	agents["r3"].ordered(0)

	refused := func(r *v1.TraceFlowRequest, code connect.Code, want string) {
		t.Helper()
		stream, err := w.admin.TraceFlow(t.Context(), connect.NewRequest(r))
		w.must(err)
		defer stream.Close()
		if stream.Receive() || connect.CodeOf(stream.Err()) != code || !strings.Contains(stream.Err().Error(), want) {
			t.Errorf("%v: %v, %v; want %s and %q", r, stream.Msg(), stream.Err(), code, want)
		}
	}
	forward := &v1.TraceRequest{Chain: "web", Direction: "forward", TimeoutSeconds: 3600}
	refused(&v1.TraceFlowRequest{Trace: forward, Flow: flow.String()}, connect.CodeFailedPrecondition, "its headend r1 has an agent of an earlier version, which cannot trace a flow")
	refused(&v1.TraceFlowRequest{Trace: forward, Flow: "any,2001:db8:ffff::1,tcp"}, connect.CodeInvalidArgument, "and no packet of flow any,2001:db8:ffff::1,tcp")
	refused(&v1.TraceFlowRequest{Trace: &v1.TraceRequest{Chain: "web", Direction: "reverse"}, Flow: flow.Reverse().String()}, connect.CodeInvalidArgument, "and no packet of flow "+flow.String())
	refused(&v1.TraceFlowRequest{Trace: forward, Flow: "any,any"}, connect.CodeInvalidArgument, "the flow: ")
	refused(&v1.TraceFlowRequest{Trace: forward}, connect.CodeInvalidArgument, "the flow: ")
	refused(&v1.TraceFlowRequest{Flow: flow.String()}, connect.CodeInvalidArgument, "says nothing of the trace")
	// All packets it can trace.
	y, _ := w.trace(&v1.TraceRequest{Chain: "web", Direction: "forward", Packets: 1, TimeoutSeconds: 3600})
	if have := agents["r1"].ordered(1)[0]; have.Flow != (model.Flow{}) || have.Packets != 1 {
		t.Errorf("r1 is asked for %+v, want all packets", have)
	}
	y.stop()
}

// Of several headends those that know no flows are named, once, and those that do are enough.
func TestHeadendsThatKnowNoFlowsAreNamed(t *testing.T) {
	c := &Controller{}
	c.sessions.of = map[string]session{"r1": {traces: true}, "r2": {traces: true, flows: true}, "r4": {traces: true}}
	hops := []plan.Hop{{Node: "r1"}, {Node: "r3"}, {Node: "r4"}}
	paths := []plan.Path{{PathID: plan.PathID{Path: 7}, Hops: hops}, {PathID: plan.PathID{Path: 8}, Hops: hops}}
	x := &trace{paths: []*tracedPath{{path: 7, headend: []string{"r1", "r2"}}, {path: 8, headend: []string{"r1", "r2"}}}}
	without := []string{"node r3 has no connection to the controller: its hops will be missing"}
	if have, err := c.whoCannotTell(x, paths); err != nil || !slices.Equal(have, without) {
		t.Errorf("all packets: %q, %v; want %q", have, err, without)
	}
	x.flow = true
	want := append([]string{"node r1 has an agent of an earlier version, which cannot trace a flow: packets that enter there are not traced"}, without...)
	if have, err := c.whoCannotTell(x, paths); err != nil || !slices.Equal(have, want) {
		t.Errorf("a flow: %q, %v; want %q", have, err, want)
	}
	x.paths[0].headend = []string{"r1"}
	if have, err := c.whoCannotTell(x, paths); err == nil || !strings.Contains(err.Error(), "its headend r1 has an agent of an earlier version, which cannot trace a flow") {
		t.Errorf("no headend: %q, %v", have, err)
	}
}
