package controller

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

func (w *world) describe(kind, name string) *v1.DescribeResponse {
	w.Helper()
	r, err := w.admin.Describe(w.Context(), connect.NewRequest(&v1.DescribeRequest{Kind: kind, Name: name}))
	w.must(err)
	return r.Msg
}

// event waits until the last event of something has a text, and returns all that there are then. A state that lasts
// less than it takes to look at it is no event.
func (w *world) event(kind, name, part string) []*v1.Event {
	w.Helper()
	for began := time.Now(); ; {
		r, err := w.admin.Events(w.Context(), connect.NewRequest(&v1.EventsRequest{}))
		w.must(err)
		last := ""
		for _, e := range r.Msg.Events {
			if e.Kind == kind && e.Name == name {
				last = e.Text
			}
		}
		if strings.Contains(last, part) {
			return r.Msg.Events
		}
		if time.Since(began) > patience {
			w.Fatalf("there is no event of %s %s with %q: %v", kind, name, part, r.Msg.Events)
		}
		time.Sleep(20 * time.Millisecond) // nothing tells of events
	}
}

func TestDescribeSaysForWhomAnEpochWaits(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	agents["r2"].hush()
	w.rotate()
	w.until("r2 is waited for", func(s *v1.State) bool { return slices.Equal(s.WaitingFor, []string{"r2"}) })
	d := w.describe("chain", "web")
	var names []string
	for _, n := range d.Nodes {
		names = append(names, n.Name)
	}
	if !slices.Equal(names, []string{"r1", "r2", "r3"}) || len(d.Chains) != 1 || len(d.Epochs) != 4 || d.Step != string(stepPrepare) || d.Since == nil {
		t.Errorf("chain web: %v", d)
	}
	for _, e := range d.Epochs {
		want := map[string][]string{epochPreparing: {"r2"}}[e.State]
		if !slices.Equal(e.WaitingFor, want) {
			t.Errorf("epoch %d, %s, waits for %v, want %v", e.Epoch, e.State, e.WaitingFor, want)
		}
	}
	if len(d.Waiting) != 1 || d.Waiting[0].Node != "r2" || d.Waiting[0].State != nodeBehind {
		t.Errorf("it waits for %v", d.Waiting)
	}
	if d := w.describe("node", "r1"); len(d.Nodes) != 1 || d.Nodes[0].Revision == 0 || len(d.Waiting) != 0 || len(d.Chains) != 1 || len(d.Facts) < 2 {
		t.Errorf("node r1: %v", d)
	}
	if d := w.describe("function", "fw"); len(d.Nodes) != 1 || d.Nodes[0].Name != "r2" || len(d.Chains) != 1 || d.Chains[0].Name != "web" {
		t.Errorf("function fw: %v", d)
	}
	if d := w.describe("function", "fw:0x2a"); len(d.Chains) != 1 || d.Chains[0].Name != "web" {
		t.Errorf("an instance of function fw: %v", d)
	}
	if d := w.describe("function", ""); !slices.Equal(d.Names, []string{"fw"}) || len(d.Nodes) != 0 {
		t.Errorf("functions: %v", d)
	}
	for _, bad := range []struct {
		kind, name, want string
		code             connect.Code
	}{
		{"chain", "nowhere", "there is no chain nowhere", connect.CodeNotFound},
		{"router", "r1", "expect node, chain or function", connect.CodeInvalidArgument},
	} {
		_, err := w.admin.Describe(t.Context(), connect.NewRequest(&v1.DescribeRequest{Kind: bad.kind, Name: bad.name}))
		if code(err) != bad.code || !strings.Contains(err.Error(), bad.want) {
			t.Errorf("%s %s: %v, want %v and %q", bad.kind, bad.name, err, bad.code, bad.want)
		}
	}
}

func TestEventsHaveStatesChangesAndCalls(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	events := w.event(aboutChange, "settle", "request 1")
	if !slices.ContainsFunc(events, func(e *v1.Event) bool { return e.Kind == aboutCall && e.Name == "Apply" }) {
		t.Errorf("the file's Apply is missing: %v", events)
	}
	for i, e := range events[1:] {
		if e.Time.AsTime().Before(events[i].Time.AsTime()) {
			t.Errorf("event %d is before the one before it: %v", i+1, events)
		}
	}
	w.until("r3 is ready", func(s *v1.State) bool {
		return slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool { return n.Name == "r3" && n.State == nodeReady })
	})
	w.event(aboutNode, "r3", nodeReady) // what it was before may be over when somebody looks first
	if n := w.describe("node", "r3").Nodes[0]; n.StateSince == nil {
		t.Errorf("r3 is %s since nobody knows when", n.State)
	}
	agents["r3"].stop()
	w.event(aboutNode, "r3", nodeReady+" -> "+nodeAway)
	d := w.describe("node", "r3")
	if last := d.Events[len(d.Events)-1]; last.Name != "r3" || !strings.Contains(last.Text, nodeAway) {
		t.Errorf("the last event about r3 is %v", last)
	}
	if n := d.Nodes[0]; n.StateSince == nil || n.StateSince.AsTime().Before(d.Events[0].Time.AsTime()) {
		t.Errorf("r3 is %s since %v", n.State, n.StateSince)
	}
	// Calls that change nothing are no events.
	if slices.ContainsFunc(events, func(e *v1.Event) bool { return e.Name == "Follow" || e.Name == "Get" || e.Name == "Events" }) {
		t.Errorf("there are events of readers: %v", events)
	}
}

func TestEventsAreBounded(t *testing.T) {
	var j journal
	j.begin(time.Now())
	for i := range eventsMax + 10 {
		j.add(time.Now(), aboutChange, fmt.Sprint(i), "")
	}
	events, _ := j.about(func(*v1.Event) bool { return true })
	if len(events) != eventsMax || events[0].Name != "10" {
		t.Errorf("%d events, the first %v", len(events), events[0])
	}
}

func TestAChainThatCutsANodeOffIsRefused(t *testing.T) {
	w, _ := domain(t) // its agents come from 127.0.0.1, which no chain takes
	w.until("drained", drained)
	for _, name := range []string{"r1", "r3"} {
		at := session{remote: netip.MustParseAddrPort("192.0.2.5:40000"), local: netip.MustParseAddrPort("192.0.2.1:7443")}
		w.ctl.session(name, 1, at)
		t.Cleanup(func() { w.ctl.session(name, -1, session{}) })
	}
	cuts := edit(file, "chains:", "chains:\n  - {name: all, ingress: [r1], functions: [fw], egress: r3, match: {destination: \"192.0.2.0/24\"}}")
	apply := func(text string, force, dry bool) (*v1.ApplyResponse, error) {
		r, err := w.admin.Apply(t.Context(), connect.NewRequest(&v1.ApplyRequest{File: &v1.File{Name: "test.yaml", Source: []byte(text)}, Force: force, DryRun: dry}))
		if err != nil {
			return nil, err
		}
		return r.Msg, nil
	}
	before := w.state().WantedSerial
	for _, dry := range []bool{false, true} {
		_, err := apply(cuts, false, dry)
		if code(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "chain all takes the packets between the controller and r1, r3 (192.0.2.5 to 192.0.2.1 port 7443)") {
			t.Errorf("dry %v: %v", dry, err)
		}
	}
	if s := w.state(); s.WantedSerial != before {
		t.Errorf("the refused file is wanted: %v", s)
	}
	r, err := apply(cuts, true, false)
	if err != nil || len(r.CutOff) != 1 || !strings.Contains(r.CutOff[0], "chain all") {
		t.Errorf("by force: %v, %v", r, err)
	}
	w.until("settled", settled(r.GetSerial()))
	// What was forced once is not asked for again, but said.
	if r, err := apply(strings.ReplaceAll(cuts, "cpus: 2", "cpus: 3"), false, true); err != nil || len(r.CutOff) != 1 {
		t.Errorf("another change: %v, %v", r, err)
	}
	// Another match of the same chain is another chain.
	if _, err := apply(edit(cuts, "192.0.2.0/24", "192.0.2.0/25"), false, true); code(err) != connect.CodeFailedPrecondition {
		t.Errorf("another match: %v", err)
	}
}

func TestWhatAChainTakesOfAConnection(t *testing.T) {
	s := session{remote: netip.MustParseAddrPort("[fd00::5]:40123"), local: netip.MustParseAddrPort("[fd00::1]:7443")}
	passed := session{remote: s.remote, local: netip.MustParseAddrPort("[fd00::1]:0")}
	prefix := netip.MustParsePrefix
	for _, c := range []struct {
		name  string
		chain model.Chain
		in    session
		want  bool
	}{
		{"the controller's address", model.Chain{Match: model.Match{Destination: prefix("fd00::1/128")}}, s, true},
		{"a node's address, of answers", model.Chain{Match: model.Match{Destination: prefix("fd00::5/128")}}, s, true},
		{"everything", model.Chain{}, s, true},
		{"everything of IPv4", model.Chain{Match: model.NewMatch(prefix("0.0.0.0/0"), netip.Prefix{})}, s, false},
		{"everything, on this machine", model.Chain{}, session{remote: netip.MustParseAddrPort("[::1]:4"), local: netip.MustParseAddrPort("[::1]:7443")}, false},
		{"others", model.Chain{Match: model.Match{Destination: prefix("fd00:1::/64")}}, s, false},
		{"from a node to others", model.Chain{Match: model.Match{Destination: prefix("fd00:1::/64"), Source: prefix("fd00::5/128")}}, s, false},
		{"the port", model.Chain{Match: model.Match{Priority: 1, Protocol: 6, DestinationPort: model.Ports{First: 7000, Last: 8000}}}, s, true},
		{"another port", model.Chain{Match: model.Match{Priority: 1, Protocol: 6, DestinationPort: model.Ports{First: 80, Last: 80}}}, s, true}, // answers come to any port of the node
		{"another port of the controller", model.Chain{Match: model.Match{Priority: 1, Protocol: 6, Destination: prefix("fd00::1/128"), DestinationPort: model.Ports{First: 80, Last: 80}}}, s, false},
		{"another port, and nobody knows the controller's", model.Chain{Match: model.Match{Priority: 1, Protocol: 6, Destination: prefix("fd00::1/128"), DestinationPort: model.Ports{First: 80, Last: 80}}}, passed, true},
		{"UDP", model.Chain{Match: model.Match{Priority: 1, Protocol: 17}}, s, false},
		{"another code point", model.Chain{Match: model.Match{Priority: 1, DSCP: 47}}, s, false},
		{"marked packets", model.Chain{Match: model.Match{Priority: 1, Mark: model.Mark{Value: 1, Mask: 1}}}, s, false},
		{"the source, in reverse", model.Chain{Both: true, Match: model.Match{Priority: 1, Destination: prefix("fd00:1::/64"), Source: prefix("fd00::1/128")}}, s, false},
	} {
		if got := len(cutOff(model.Domain{Chains: []model.Chain{c.chain}}, map[string]session{"n": c.in})) > 0; got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// An agent of a version before does not get a plan that it would not understand, and another file goes over the change.
func TestAnAgentThatKnowsTooLittleIsNotSentItsPlan(t *testing.T) {
	w := newWorld(t)
	w.start()
	r1 := w.join("r1")
	w.join("r3")
	old := &fake{w: w, name: "r2", dir: t.TempDir(), knows: slices.DeleteFunc(plan.Features(), func(f string) bool { return f == "kind forward" })}
	old.run(w.token("r2"))
	w.apply(file)
	s := w.until("r2 is incompatible", func(s *v1.State) bool {
		return nodeIn(s, "r2").State == nodeIncompatible && slices.Equal(s.WaitingFor, []string{"r2"})
	})
	if why := nodeIn(s, "r2").Reason; !strings.Contains(why, "(kind forward)") || !strings.Contains(why, "a later version") {
		t.Errorf("the reason is %q", why)
	}
	if len(s.Waiting) != 1 || s.Waiting[0].State != nodeIncompatible {
		t.Errorf("the change waits for %v", s.Waiting)
	}
	if n := len(old.plans()); n != 0 {
		t.Errorf("it was sent %d plans", n)
	}
	serial := w.apply(edit(file, "node: r2", "node: r3"))
	w.until("the other file", settled(serial))
	if s := w.state(); nodeIn(s, "r2").State == nodeIncompatible {
		t.Errorf("it knows all of its plan now: %v", nodeIn(s, "r2"))
	}
	// An agent that says nothing is older than what it could say.
	content, err := plan.EncodeNode(r1.now())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := lacking(content, plan.FirstFeatures); err != nil || len(got) != 0 {
		t.Errorf("agents of before lack %v, %v", got, err)
	}
	if got, err := lacking(nil, plan.Features()); err != nil || got != nil { // nobody has to look
		t.Errorf("agents of now lack %v, %v", got, err)
	}
}

func TestTokensThatAreNotValidAreLimitedBySource(t *testing.T) {
	var l limits
	now := time.Unix(1, 0)
	const from, other = "[fd00::5]:1000", "[fd00:0:0:1::5]:1000"
	for i := range joinMost {
		if !l.mayJoin(now, from) {
			t.Fatalf("token %d is refused", i)
		}
		l.failedJoin(now, from)
	}
	if l.mayJoin(now, from) || l.mayJoin(now, "[fd00::6]:2000") {
		t.Error("the next one of the same /64 is not refused")
	}
	if !l.mayJoin(now, other) {
		t.Error("another source is refused")
	}
	if now = now.Add(10 * time.Second); !l.mayJoin(now, from) {
		t.Error("it is refused for ever")
	}
	for i := range 2 * joinFrom {
		l.failedJoin(now, fmt.Sprintf("[fd01:0:%x:%x::1]:1", i>>16, i&0xffff))
	}
	if len(l.join) > joinFrom+1 {
		t.Errorf("%d sources are kept", len(l.join))
	}
	if !l.mayJoin(now, "[fd02::1]:1") {
		t.Error("whoever comes first is refused for what others have failed at")
	}
}

func TestANodeDoesNotRenewWithoutEnd(t *testing.T) {
	w, agents := domain(t)
	var err error
	n := 0
	for ; n < 3*renewMost && err == nil; n++ {
		err = agents["r1"].member.Renew(context.Background())
	}
	if code(err) != connect.CodeResourceExhausted || n > renewMost+2 { // the clock goes on meanwhile
		t.Errorf("renewal %d: %v", n, err)
	}
	w.must(agents["r2"].member.Renew(context.Background()))
}

// The stream of an agent of before an upgrade, which ends late, says nothing about the upgraded one.
func TestOnlyTheLastStreamSaysWhatANodeLacks(t *testing.T) {
	var c Controller
	c.sessions.open, c.sessions.of, c.sessions.news = map[string]int{}, map[string]session{}, make(chan struct{})
	before, after := new(int), new(int)
	c.session("r1", 1, session{stream: before})
	c.session("r1", 1, session{stream: after})
	c.lacks("r1", before, []string{"seal"})
	if got := c.incompatible("r1"); len(got) != 0 {
		t.Errorf("the upgraded agent lacks %q", got)
	}
	c.lacks("r1", after, []string{"gateway"})
	c.session("r1", -1, session{})
	c.lacks("r1", before, nil)
	if got := c.incompatible("r1"); !slices.Equal(got, []string{"gateway"}) {
		t.Errorf("it lacks %q", got)
	}
}

// A chain is degraded as long as a node on it is in trouble, and says which one and why; others are not.
func TestAChainOfANodeInTroubleIsDegraded(t *testing.T) {
	w, agents := domain(t)
	agents["r4"] = w.join("r4")
	w.until("mail", settled(w.apply(edit(file, "functions:\n", spareNode)+
		`  - {name: mail, ingress: [r1], functions: [spare], egress: r3, match: {destination: "2001:db8:25::/48"}}`+"\n")))
	w.until("drained", drained)
	is := func(web, mail string) func(*v1.State) bool {
		return func(s *v1.State) bool {
			for _, ch := range s.Chains {
				want, reason, _ := strings.Cut(map[string]string{"web": web, "mail": mail}[ch.Name], " ")
				if ch.State != want || ch.Reason != reason {
					return false
				}
			}
			return len(s.Chains) == 2
		}
	}
	w.until("all well", is(chainActive, chainActive))
	agents["r4"].stop()
	w.until("r4 is away", is(chainActive, chainDegraded+" node r4 is away: its agent has no connection"))
	agents["r4"].run("")
	r2 := agents["r2"]
	r2.mu.Lock()
	report := r2.inForce
	r2.mu.Unlock()
	report.Problems = []string{"interface r2-r1 is not there", "nor is r2-r3"}
	r2.member.Report(report)
	w.until("r2 lacks a part", is(chainDegraded+" node r2 holds not all of its plan: interface r2-r1 is not there", chainActive))
	report.Problems, report.Warnings = nil, []string{"it is slow"}
	r2.member.Report(report)
	w.until("a warning is no trouble", is(chainActive, chainActive))
	r2.refuse(everything)
	w.rotate()
	w.until("r2 refuses", is(chainDegraded+" node r2 is refusing: the kernel lacks something", chainActive))
	events, _ := w.ctl.journal.about(func(e *v1.Event) bool { return e.Kind == aboutChain && strings.Contains(e.Text, chainDegraded) })
	if len(events) != 0 { // a node's event says it
		t.Errorf("events %v", events)
	}
	r2.refuse(nil)
	w.until("drained", drained)
}

// The way of a chain has the names of instances.
func TestAChainIsDescribedWithItsParameters(t *testing.T) {
	ch := model.Chain{Ingress: []string{"r1"}, Functions: []string{"zip", "fw"}, Egress: "r6", Parameters: []model.Parameters{{Function: "zip", Forward: 0x2a}}}
	for _, f := range chainFacts(ch, map[string]string{"zip": "r2", "fw": "r3"}) {
		if f.Name == "way" && f.Value != "r1 -> zip:0x2a:0 (r2) -> fw (r3) -> r6" {
			t.Errorf("its way is %q", f.Value)
		}
	}
}
