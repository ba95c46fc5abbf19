package controller

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// has tells whether a node has a part in a chain.
func has(n plan.Node, chain string) bool {
	for id := range n.PathIDs() {
		if id.Chain == chain {
			return true
		}
	}
	return false
}

const bad = `  - {name: bad, ingress: [r1], functions: [fw], egress: r3, match: {destination: "2001:db8:66::/48"}}` + "\n"

// A node refuses what a file asks of it. Another file goes on over it, whether it wants other things of the
// node or nothing any more, and whether or not the node takes the plan later that it refused.
func TestAnotherFileGoesOnOverARefusal(t *testing.T) {
	other := file + `  - {name: good, ingress: [r3], functions: [fw], egress: r1, match: {destination: "2001:db8:77::/48"}}` + "\n"
	for _, next := range []string{file, other, edit(file, "direction: both", "direction: both, encapsulation: {reduced: true}")} {
		w, agents := domain(t)
		agents["r2"].refuse(func(n plan.Node) bool { return has(n, "bad") })
		// web changes, too, so that r1 and r3 hold an epoch of it that nobody will send.
		w.apply(edit(file, "direction: both", "direction: both, proof: {scheme: keyed-flow}") + bad)
		w.until("r2 refuses", func(s *v1.State) bool {
			return slices.Equal(s.WaitingFor, []string{"r2"}) && s.Waiting[0].State == nodeRefusing && s.Step == string(stepPrepare)
		})
		if _, takes := epochsOf(agents["r3"].now(), "web"); !slices.Equal(takes, []uint8{1, 2}) {
			t.Errorf("r3 takes %v", takes)
		}
		w.until("the next file", settled(w.apply(next)))
		w.until("drained", drained)
		at := func(name string) plan.Node { return agents[name].now() }
		want := strings.Count(next, "ingress") + 1 // web is two
		if n := w.accepted(at, "r1", "r2", "r3"); n != want {
			t.Errorf("%d paths are sent into, want %d", n, want)
		}
		for name, a := range agents {
			if has(a.now(), "bad") {
				t.Errorf("%s holds what was given up", name)
			}
		}
		// And what nobody sent is no obstacle to what comes.
		agents["r2"].refuse(nil)
		w.until("it comes after all", settled(w.apply(next+bad)))
		w.until("drained", drained)
		if n := w.accepted(at, "r1", "r2", "r3"); n != want+1 {
			t.Errorf("%d paths are sent into, want %d", n, want+1)
		}
	}
}

// A function's node is gone. The file that does without it does not wait until it is back.
func TestAnotherFileGoesOnOverANodeThatIsAway(t *testing.T) {
	w, agents := domain(t)
	agents["r2"].stop()
	first := w.rotate()
	w.until("r2 is away", func(s *v1.State) bool {
		return slices.Equal(s.WaitingFor, []string{"r2"}) && s.Waiting[0].State == nodeAway
	})
	spare := `  - {name: r4, address: "fc00:4::1", locator: "fc00:0:0:400::/56", cpus: 2, interfaces: [{name: r4-r2, role: core}]}` + "\nfunctions:\n"
	agents["r4"] = w.join("r4")
	serial := w.apply(edit(file, "functions:\n  - {name: fw, node: r2", spare+"  - {name: fw, node: r4"))
	if s := w.until("settled", settled(serial)); s.Serial <= first { // all headends have turned, and r2 is still away
		t.Errorf("state %v", s)
	}
	sends, _ := epochsOf(agents["r1"].now(), "web")
	if _, takes := epochsOf(agents["r3"].now(), "web"); !slices.Equal(sends, []uint8{3}) || !slices.Contains(takes, 3) {
		t.Errorf("r1 sends %v, r3 takes %v", sends, takes)
	}
	at := func(name string) plan.Node { return agents[name].now() }
	if n := w.accepted(at, "r1", "r3", "r4"); n != 2 {
		t.Errorf("%d paths are sent into", n)
	}
	agents["r2"].run("")
	w.until("drained", drained)
	if has(agents["r2"].now(), "web") {
		t.Error("r2 still holds web")
	}
}

// A headend does not turn. What it sends is taken for as long as that lasts, and another change
// goes on meanwhile.
func TestAnotherFileGoesOnOverAHeadendThatDoesNotTurn(t *testing.T) {
	w, agents := domain(t)
	agents["r1"].refuse(func(n plan.Node) bool {
		sends, _ := epochsOf(n, "web")
		return slices.Contains(sends, 2)
	})
	w.rotate()
	w.until("r1 refuses", func(s *v1.State) bool {
		return slices.Equal(s.WaitingFor, []string{"r1"}) && s.Waiting[0].State == nodeRefusing && s.Step == string(stepTurn)
	})
	// Nothing of it is for r1.
	agents["r4"] = w.join("r4")
	serial := w.apply(edit(file, "functions:\n", `  - {name: r4, address: "fc00:4::1", locator: "fc00:0:0:400::/56", cpus: 2, interfaces: [{name: r4-r2, role: core}, {name: r4-h4, role: edge}]}`+"\nfunctions:\n") +
		`  - {name: voice, ingress: [r3], functions: [fw], egress: r4, match: {destination: "2001:db8:50::/48"}}` + "\n")
	w.until("voice, and nothing drains but what r1 sends", func(s *v1.State) bool {
		active := slices.ContainsFunc(s.Chains, func(ch *v1.ChainState) bool { return ch.Name == "voice" && ch.State == chainActive })
		return active && s.Serial == serial && onlyLate(s, "r1") && !slices.ContainsFunc(s.Epochs, func(e *v1.EpochState) bool { return e.Until != nil }) &&
			!slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool { return n.State == nodeBehind })
	})
	at := func(name string) plan.Node { return agents[name].now() }
	if n := w.accepted(at, "r1", "r2", "r3", "r4"); n != 3 {
		t.Errorf("%d paths are sent into", n)
	}
	if sends, _ := epochsOf(agents["r1"].now(), "web"); !slices.Equal(sends, []uint8{1}) {
		t.Errorf("r1 sends %v", sends)
	}
	agents["r1"].refuse(nil)
	w.until("drained", drained)
	if _, takes := epochsOf(agents["r3"].now(), "web"); !slices.Equal(takes, []uint8{2}) {
		t.Errorf("r3 takes %v", takes)
	}
}

// Nodes refuse, relent, go away and come back while files follow each other: none is sent back (fake.agrees),
// what headends send of the chain that all files have is taken everywhere, no file waits for a node that it asks
// nothing of, and in the end all is as
// the last file says.
func TestChangesGoOnOverRandomRefusals(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomRefusals(t, seed) })
	}
}

func randomRefusals(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	w := newWorld(t)
	w.start()
	agents := map[string]*fake{}
	names := []string{"r1", "r2", "r3", "r4"}
	for _, name := range names {
		agents[name] = w.join(name)
	}
	spare := `  - {name: r4, address: "fc00:4::1", locator: "fc00:0:0:400::/56", cpus: 2, interfaces: [{name: r4-r2, role: core}]}` + "\nfunctions:\n  - {name: spare, node: r4, kind: forward}\n"
	base := edit(file, "functions:\n", spare)
	variant := func() string {
		text := base
		if r.IntN(2) == 0 {
			text = edit(text, "functions: [fw]", []string{"functions: [spare]", "functions: [fw, spare]"}[r.IntN(2)])
		}
		if r.IntN(3) == 0 {
			text = edit(text, "direction: both", "direction: both, "+[]string{"proof: {scheme: keyed-flow}", "encapsulation: {reduced: true}"}[r.IntN(2)])
		}
		for i := range 3 {
			if r.IntN(2) == 0 {
				text += fmt.Sprintf("  - {name: x%d, %s, functions: [%s], match: {destination: \"2001:db8:%d::/48\"}}\n",
					i, []string{"ingress: [r1], egress: r3", "ingress: [r3], egress: r1"}[r.IntN(2)], []string{"fw", "spare"}[r.IntN(2)], 50+i)
			}
		}
		return text
	}
	w.until("settled", settled(w.apply(base)))
	stuck := map[string]string{}
	over := 0
	for i := range 12 {
		name := names[r.IntN(len(names))]
		switch r.IntN(4) {
		case 0:
			if stuck[name] == "" {
				stuck[name] = nodeAway
				agents[name].stop()
			}
		case 1:
			if stuck[name] == "" {
				stuck[name] = nodeRefusing
				agents[name].refuse(func(plan.Node) bool { return true })
			}
		default:
			switch stuck[name] {
			case nodeAway:
				agents[name].run("")
			case nodeRefusing:
				agents[name].refuse(nil)
			}
			delete(stuck, name)
		}
		if r.IntN(4) == 0 {
			w.rotate()
		}
		serial := w.apply(fmt.Sprintf("# %d\n", i) + variant()) // the same file again would wait
		s := w.until("as far as it can be", func(s *v1.State) bool {
			waits := s.Step == "" || len(s.Waiting) > 0 && !slices.ContainsFunc(s.Waiting, func(x *v1.WaitingState) bool { return x.State != stuck[x.Node] })
			return waits && (s.Serial == serial || s.Problem != "")
		})
		if s.Step != "" && s.Serial == serial {
			over++
		}
		waitsForGood(w, stuck)
		sentIsTaken(t, agents)
	}
	for name, how := range maps.Clone(stuck) {
		if how == nodeAway {
			agents[name].run("")
		} else {
			agents[name].refuse(nil)
		}
	}
	w.until("the last", settled(w.apply("# the last\n"+base)))
	w.until("drained", drained)
	at := func(name string) plan.Node { return agents[name].now() }
	if n := w.accepted(at, names...); n != 2 {
		t.Errorf("%d paths are sent into", n)
	}
	t.Logf("%d changes waited for a node", over)
}

// waitsForGood: what is prepared waits for a node that does not come by itself only if some path that is new, or has
// another epoch than headends send, passes that node.
func waitsForGood(w *world, stuck map[string]string) {
	w.Helper()
	v, err := readView(w.Context(), w.store)
	w.must(err)
	if v.state.Step != stepPrepare {
		return
	}
	now, err := w.ctl.generation(w.Context(), v, v.state.Now)
	w.must(err)
	next, err := w.ctl.generation(w.Context(), v, v.state.Next)
	w.must(err)
	had := map[pathEpoch]bool{}
	for _, p := range now.domain.Paths {
		had[pathEpoch{p.Path, p.Epoch}] = true
	}
	for _, name := range v.waitingFor() {
		if stuck[name] != "" && !slices.ContainsFunc(next.domain.Paths, func(p plan.Path) bool { return on(p, name) && !had[pathEpoch{p.Path, p.Epoch}] }) {
			w.Errorf("serial %d waits for %s, which is %s, and asks nothing of it", v.state.Serial, name, stuck[name])
		}
	}
}

// sentIsTaken follows what headends send of web, at a moment at which all nodes held what they are seen with.
func sentIsTaken(t *testing.T, agents map[string]*fake) {
	t.Helper()
	all := func() map[string]plan.Node {
		m := map[string]plan.Node{}
		for name, a := range agents {
			m[name] = a.now()
		}
		return m
	}
	now, again := all(), all()
	for !maps.EqualFunc(now, again, func(a, b plan.Node) bool { return a.Revision == b.Revision }) {
		now, again = again, all()
	}
	for name, n := range now {
		for _, h := range n.Headends {
			if h.Chain != "web" {
				continue
			}
			for i, segment := range h.Segments {
				taken := false
				for _, x := range now {
					taken = taken || slices.ContainsFunc(x.Egresses, func(e plan.Egress) bool {
						return i == len(h.Segments)-1 && e.SID == segment && e.Path == h.Path && e.Epoch == h.Epoch
					}) || slices.ContainsFunc(x.Endpoints, func(e plan.Endpoint) bool { return e.SID == segment && e.Path == h.Path && e.Epoch == h.Epoch })
				}
				if !taken {
					t.Errorf("%s, revision %d, sends %s in epoch %d, and nobody takes it at %s", name, n.Revision, h.PathID, h.Epoch, segment)
				}
			}
		}
	}
}
