package controller

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/metrics"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// spareNode is r4 with a function for chains that are not on r2.
const spareNode = `  - {name: r4, address: "fc00:4::1", locator: "fc00:0:0:400::/56", cpus: 2, interfaces: [{name: r4-r2, role: core}, {name: r4-h4, role: edge}]}` + "\nfunctions:\n  - {name: spare, node: r4, kind: forward}\n"

func everything(plan.Node) bool { return true }

// stuckIn tells whether a step waits for this node, which does not come by itself.
func stuckIn(in step, name string) func(*v1.State) bool {
	return func(s *v1.State) bool {
		return s.Step == string(in) && slices.ContainsFunc(s.Waiting, func(x *v1.WaitingState) bool {
			return x.Node == name && x.Step == string(in) && (x.State == nodeAway || x.State == nodeRefusing || x.State == nodeExpected)
		})
	}
}

// refusesIn is stuckIn of a node whose refusal has come.
func refusesIn(in step, name string) func(*v1.State) bool {
	return func(s *v1.State) bool {
		return stuckIn(in, name)(s) && slices.ContainsFunc(s.Waiting, func(x *v1.WaitingState) bool {
			return x.Node == name && x.Step == string(in) && x.State == nodeRefusing
		})
	}
}

// onlyLate tells whether all is done but a turn of this node, over which another change went.
func onlyLate(s *v1.State, name string) bool {
	return !s.Settled && s.Step == string(stepTurn) && s.Serial == s.WantedSerial && slices.Equal(s.WaitingFor, []string{name}) && s.Waiting[0].Step == string(stepTurn)
}

func stateOf(s *v1.State, node string) string {
	for _, n := range s.Nodes {
		if n.Name == node {
			return n.State
		}
	}
	return ""
}

// A file names a node that never comes. The one without it does not wait for it, and nothing of it stays.
func TestAFileGoesOnOverANodeThatNeverJoined(t *testing.T) {
	wrong := edit(file, "functions:\n", `  - {name: r33, address: "fc00:4::1", locator: "fc00:0:0:400::/56", cpus: 2, interfaces: [{name: r4-r2, role: core}]}`+"\nfunctions:\n")
	for _, first := range []bool{true, false} {
		w := newWorld(t)
		w.start()
		for _, name := range []string{"r1", "r2", "r3"} {
			w.join(name)
		}
		if !first {
			w.until("the first file", settled(w.apply(file)))
		}
		w.apply(wrong)
		w.until("r33 is expected", stuckIn(stepPrepare, "r33"))
		s := w.until("without it", settled(w.apply(file)))
		if state := stateOf(s, "r33"); state != "" {
			t.Errorf("r33 is %s", state)
		}
		v, err := readView(w.Context(), w.store)
		w.must(err)
		if r, ok := v.plans["r33"]; ok {
			t.Errorf("r33 has a plan of revision %d", r.Revision)
		}
	}
}

// A node is away since before an erase, whose plan it never acknowledged. What asks nothing of it does not wait for it.
func TestAFileGoesOnOverANodeThatHasNotErased(t *testing.T) {
	w, agents := domain(t)
	agents["r4"] = w.join("r4")
	base := edit(file, "functions:\n", spareNode)
	w.until("r4", settled(w.apply(base)))
	w.until("drained", drained)
	agents["r2"].refuse(func(n plan.Node) bool { _, takes := epochsOf(n, "web"); return slices.Equal(takes, []uint8{2}) })
	w.rotate()
	w.until("r2 does not erase", func(s *v1.State) bool { return s.Settled && stateOf(s, "r2") == nodeRefusing })
	agents["r2"].stop()
	agents["r2"].refuse(everything)
	w.apply(edit(base, "direction: both", "direction: both, encapsulation: {reduced: true}"))
	w.until("r2 is away", stuckIn(stepPrepare, "r2"))
	serial := w.apply(edit(base, "functions: [fw]", "functions: [spare]"))
	w.until("goes over", settled(serial))
	if n := w.accepted(func(name string) plan.Node { return agents[name].now() }, "r1", "r3", "r4"); n != 2 {
		t.Errorf("%d paths are sent into", n)
	}
	agents["r2"].refuse(nil)
	agents["r2"].run("")
	w.until("drained", drained)
}

// A headend does not turn, and refuses what the next file asks of it, too. The one after that asks nothing of it.
func TestAFileGoesOnOverTwo(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	agents["r1"].refuse(func(n plan.Node) bool { sends, _ := epochsOf(n, "web"); return slices.Contains(sends, 2) })
	w.rotate()
	w.until("r1 does not turn", stuckIn(stepTurn, "r1"))
	agents["r1"].refuse(everything)
	w.apply(edit(file, "direction: both", "direction: both, encapsulation: {reduced: true}"))
	w.until("and not prepare", stuckIn(stepPrepare, "r1"))
	agents["r4"] = w.join("r4")
	w.apply(edit(file, "functions:\n", spareNode) +
		`  - {name: voice, ingress: [r3], functions: [fw], egress: r4, match: {destination: "2001:db8:50::/48"}}` + "\n")
	w.until("voice, which asks nothing of r1", func(s *v1.State) bool { return onlyLate(s, "r1") })
	if n := w.accepted(func(name string) plan.Node { return agents[name].now() }, "r1", "r2", "r3", "r4"); n != 3 {
		t.Errorf("%d paths are sent into", n)
	}
	agents["r1"].refuse(nil)
	w.until("drained", drained)
}

// A node that took what was given up is gone before that.
func TestAFileGoesOnOverANodeThatTookWhatWasGivenUp(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	agents["r2"].refuse(func(n plan.Node) bool { _, takes := epochsOf(n, "web"); return slices.Contains(takes, 2) })
	w.apply(edit(file, "direction: both", "direction: both, encapsulation: {reduced: true}"))
	w.until("r2 refuses", func(s *v1.State) bool { return stuckIn(stepPrepare, "r2")(s) && len(s.Waiting) == 1 })
	agents["r3"].stop()
	w.until("r3 is away", func(s *v1.State) bool { return stateOf(s, "r3") == nodeAway })
	w.until("the first file", settled(w.apply(file)))
	agents["r2"].refuse(nil)
	rotation := w.rotate() // before r3 says what it holds
	w.until("it waits for r3", stuckIn(stepPrepare, "r3"))
	agents["r3"].run("")
	w.until("fresh secrets", settled(rotation))
	w.until("drained", drained)
	if sends, _ := epochsOf(agents["r1"].now(), "web"); !slices.Equal(sends, []uint8{3}) {
		t.Errorf("r1 sends %v; r3 may hold 2 under other secrets", sends)
	}
}

// A node is revoked while a change waits, and another one is away: files that ask nothing of that one go on, and
// its chain is not said to be active before it has its fresh secrets.
func TestAFileGoesOnOverARevocation(t *testing.T) {
	w, agents := domain(t)
	agents["r4"] = w.join("r4")
	base := edit(file, "functions:\n", spareNode, "ingress: [r1]", "ingress: [r1, r4]", "direction: both, ", "")
	w.until("r4", settled(w.apply(base)))
	w.until("drained", drained)
	agents["r2"].stop()
	w.apply(edit(base, "egress: r3", "egress: r3, encapsulation: {reduced: true}"))
	w.until("r2 is away", stuckIn(stepPrepare, "r2"))
	_, err := w.admin.Revoke(w.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r4"}))
	w.must(err)
	w.until("r4 is revoked", func(s *v1.State) bool { return stuckIn(stepPrepare, "r2")(s) && stateOf(s, "r4") == nodeRevoked })
	w.apply(edit(file, "functions:\n", spareNode, "direction: both, ", ""))
	s := w.until("the next file", func(s *v1.State) bool { return onlyLate(s, "r2") })
	if ch := s.Chains[0]; ch.State != chainPreparing || ch.Reason != "waits for r2" {
		t.Errorf("chain %v", ch)
	}
	agents["r2"].run("")
	w.until("drained", drained)
	if n := w.accepted(func(name string) plan.Node { return agents[name].now() }, "r1", "r2", "r3"); n != 1 {
		t.Errorf("%d paths are sent into", n)
	}
}

// A headend has not turned: neither is the rotation through, nor is its chain active, whatever file comes behind.
func TestARotationIsNotThroughBeforeAllHeadendsHaveTurned(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	agents["r1"].refuse(func(n plan.Node) bool { sends, _ := epochsOf(n, "web"); return slices.Contains(sends, 2) })
	rotation := w.rotate()
	w.until("r1 does not turn", refusesIn(stepTurn, "r1"))
	agents["r1"].refuse(everything)
	w.apply(edit(file, "direction: both", "direction: both, encapsulation: {reduced: true}"))
	over := w.until("the other file goes over it, and waits for r1", refusesIn(stepPrepare, "r1")).Since.AsTime()
	w.apply(file + "# a third\n")
	s := w.until("the third", func(s *v1.State) bool {
		// Its own turn looks the same, but for the time.
		return onlyLate(s, "r1") && s.Waiting[0].State == nodeRefusing && s.Since.AsTime().Before(over)
	})
	if s.Serial <= rotation {
		t.Errorf("since %v, and the other file since %v; waiting %v", s.Since.AsTime(), over, s.Waiting)
	}
	if ch := s.Chains[0]; ch.State != chainPreparing || ch.Reason != "waits for r1, which refuses its plan: the kernel lacks something" {
		t.Errorf("chain %v", ch)
	}
	g, err := w.ctl.gauges(w.Context())
	w.must(err)
	var text strings.Builder
	w.must(metrics.Write(&text, Metrics, g))
	for _, line := range []string{"waystamp_controller_settled 0", "waystamp_controller_waiting_nodes 1", `waystamp_controller_step_seconds{step="turn"} `} {
		if !strings.Contains(text.String(), "\n"+line) {
			t.Errorf("there is no %q in\n%s", line, text.String())
		}
	}
	agents["r1"].refuse(nil)
	w.until("drained", drained)
	if sends, _ := epochsOf(agents["r1"].now(), "web"); !slices.Equal(sends, []uint8{2}) {
		t.Errorf("r1 sends %v", sends)
	}
}

// Generations that one headend has not turned from are counted, whatever changes.
func TestGenerationsThatWaitAreBounded(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	agents["r1"].refuse(everything)
	var s *v1.State
	for i := range OldMax + 2 {
		serial := w.apply(file + fmt.Sprintf(`  - {name: x%d, ingress: [r1], functions: [fw], egress: r3, match: {destination: "2001:db8:%d::/48"}}`+"\n", i, 50+i))
		s = w.until(fmt.Sprint("as far as it can be ", i), func(s *v1.State) bool {
			return s.Serial == serial && stuckIn(stepTurn, "r1")(s) || s.Problem != ""
		})
	}
	v, err := readView(w.Context(), w.store)
	w.must(err)
	if len(v.state.Old) != OldMax || s.Problem != "it waits: there are 8 generations already that headends have to turn from" {
		t.Errorf("%d are old; problem %q", len(v.state.Old), s.Problem)
	}
	agents["r1"].refuse(nil)
	w.until("drained", drained)
}

// What a revocation replaces before it was sent is no obstacle to a chain that comes another way.
func TestARevocationReplacesWhatNobodyHasSent(t *testing.T) {
	w, agents := domain(t)
	agents["r4"], agents["r5"] = w.join("r4"), w.join("r5")
	base := edit(file, "functions:\n", `  - {name: r5, address: "fc00:5::1", locator: "fc00:0:0:500::/56", cpus: 2, interfaces: [{name: r5-r2, role: core}]}`+"\n"+
		edit(spareNode, "node: r4, kind", "node: r5, kind"))
	w.until("base", settled(w.apply(base)))
	w.until("drained", drained)
	agents["r2"].refuse(func(n plan.Node) bool { return has(n, "x") })
	w.apply(base + `  - {name: x, ingress: [r1, r4], functions: [fw], egress: r3, match: {destination: "2001:db8:50::/48"}}` + "\n")
	w.until("r2 refuses", stuckIn(stepPrepare, "r2"))
	_, err := w.admin.Revoke(w.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r4"}))
	w.must(err)
	w.until("r2 refuses still", func(s *v1.State) bool {
		return stuckIn(stepPrepare, "r2")(s) && slices.ContainsFunc(s.Epochs, func(e *v1.EpochState) bool { return e.Chain == "x" && e.Epoch == 2 })
	})
	agents["r2"].stop()
	w.until("without x", settled(w.apply(base)))
	w.until("x another way", settled(w.apply(base+`  - {name: x, ingress: [r1], functions: [spare], egress: r3, match: {destination: "2001:db8:50::/48"}}`+"\n")))
	if n := w.accepted(func(name string) plan.Node { return agents[name].now() }, "r1", "r2", "r3", "r5"); n != 3 {
		t.Errorf("%d paths are sent into", n)
	}
}

// A rotation waits for a node. Files that ask nothing of that node go over it without the rotation, and use up no epochs. It
// is not through before the node is back, and comes then by itself.
func TestAFileGoesOnOverARotation(t *testing.T) {
	w, agents := domain(t)
	agents["r4"] = w.join("r4")
	base := edit(file, "functions:\n", spareNode)
	w.until("r4", settled(w.apply(base)))
	w.until("drained", drained)
	agents["r2"].stop()
	w.rotate()
	w.until("it waits for r2", stuckIn(stepPrepare, "r2"))
	for i := range 3 {
		serial := w.apply(base + fmt.Sprintf(`  - {name: x%d, ingress: [r1], functions: [spare], egress: r3, match: {destination: "2001:db8:5%d::/48"}}`+"\n", i, i))
		s := w.until("a chain that is not on r2", func(s *v1.State) bool { return s.Serial == serial && s.Step == "" && s.Problem != "" })
		if s.Settled || s.Problem != "it waits: chain web gets fresh secrets as soon as r2 can take them" {
			t.Errorf("settled %v, problem %q", s.Settled, s.Problem)
		}
	}
	if sends, _ := epochsOf(agents["r1"].now(), "web"); !slices.Equal(sends, []uint8{1}) {
		t.Errorf("r1 sends %v", sends)
	}
	agents["r2"].run("")
	w.until("drained", drained)
	if sends, _ := epochsOf(agents["r1"].now(), "web"); !slices.Equal(sends, []uint8{2}) && !slices.Equal(sends, []uint8{3}) {
		t.Errorf("r1 sends %v; only 2 was given up, and all files between had 1", sends)
	}
	if n := w.accepted(func(name string) plan.Node { return agents[name].now() }, "r1", "r2", "r3", "r4"); n != 3 {
		t.Errorf("%d paths are sent into", n)
	}
}
