package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
)

func byName(nodes []Node) map[string]Node {
	m := map[string]Node{}
	for _, n := range nodes {
		m[n.Name] = n
	}
	return m
}

// accepted follows a packet of a path, in one of its epochs, from hop to hop.
func accepted(p Path, at func(node string) Node) error {
	last := len(p.Hops) - 1
	for i, h := range p.Hops[1:] {
		n := at(h.Node)
		if i+1 == last {
			if !slices.ContainsFunc(n.Egresses, func(e Egress) bool {
				return e.Path == p.Path && e.Epoch == p.Epoch && e.SID == h.SID && slices.Equal(e.Segments, p.Segments()) && slices.Equal(e.Sources, p.Sources())
			}) {
				return fmt.Errorf("its egress %s does not know it", h.Node)
			}
			continue
		}
		if !slices.ContainsFunc(n.Endpoints, func(e Endpoint) bool {
			return e.Path == p.Path && e.Epoch == p.Epoch && e.SID == h.SID && e.Function == h.Function && e.Share == p.Shares[i+1]
		}) {
			return fmt.Errorf("hop %d, node %s, function %s, does not know it", i+1, h.Node, h.Function)
		}
	}
	return nil
}

// Whatever two domains there are, and whichever nodes are a step ahead of the others:
// what a headend sends is known at all hops, and where it was sent the step before too.
func TestNoStepLosesAPacket(t *testing.T) {
	kept := 0
	rapid.Check(t, func(t *rapid.T) {
		was := domains().Draw(t, "last")
		will := domains().Draw(t, "next")
		last, err := Compile(was, NewKeyring(random(1), nil))
		if err != nil {
			t.Fatal(err)
		}
		keys := NewKeyring(random(2), last.Paths)
		keys.KeepSIDs()
		next, err := Compile(will, keys)
		if err != nil {
			t.Fatal(err)
		}
		s, err := MakeSteps(last.Paths, last.Nodes, next)
		if err != nil {
			// What cannot be beside each other is told.
			if !strings.Contains(err.Error(), ", step ") {
				t.Fatal(err)
			}
			t.Skip(err)
		}
		stages := []map[string]Node{byName(last.Nodes), byName(s.Both), byName(s.Turn), byName(next.Nodes)}
		both := map[direction][2]Path{}
		for _, p := range last.Paths {
			for _, q := range next.Paths {
				if p.direction() == q.direction() {
					both[p.direction()] = [2]Path{p, q}
				}
			}
		}
		ahead := rapid.SliceOfN(rapid.Bool(), len(will.Nodes)+len(was.Nodes), -1).Draw(t, "ahead")
		for step := range 3 {
			i := 0
			state := map[string]Node{}
			for _, n := range will.Nodes {
				from := step
				if ahead[i] {
					from++
				}
				i++
				state[n.Name] = stages[from][n.Name]
			}
			at := func(name string) Node {
				if n, ok := state[name]; ok {
					return n
				}
				return stages[min(step, 2)][name] // it leaves the domain
			}
			for _, pq := range both {
				kept++
				for which, p := range pq {
					sends := false
					for _, in := range p.Ingress {
						sends = sends || slices.ContainsFunc(at(in.Node).Headends, func(h Headend) bool { return h.Path == p.Path && h.Epoch == p.Epoch })
					}
					if p.Epoch == pq[1-which].Epoch {
						sends = true // one epoch all the time
					}
					underWay := which == 0 && step < 2 // until step 3 old packets may be anywhere
					if !sends && !underWay {
						continue
					}
					if err := accepted(p, at); err != nil {
						t.Fatalf("chain %s, %s, epoch %d, between steps %d and %d: %v", p.Chain, p.Direction, p.Epoch, step, step+1, err)
					}
				}
			}
		}
	})
	if kept == 0 {
		t.Error("no two domains had a path in common")
	}
}

func TestStepsSayWhatComesGoesAndTurns(t *testing.T) {
	was := paper(model.SchemeKeyed)
	was.Chains = append(was.Chains, model.Chain{
		Name: "gone", Ingress: []string{"r1"}, Functions: []string{"fw"}, Egress: "r6", Match: model.Match{Destination: netip.MustParsePrefix("fc00:9::/64")},
	})
	last := compile(t, was, NewKeyring(random(1), nil))
	will := paper(model.SchemeKeyed)
	will.Chains[0].Functions = []string{"dpi", "fw"}
	will.Chains = append(will.Chains, model.Chain{
		Name: "comes", Ingress: []string{"r1"}, Functions: []string{"fw"}, Egress: "r6", Match: model.Match{Destination: netip.MustParsePrefix("fc00:a::/64")},
	})
	keys := NewKeyring(random(2), last.Paths)
	keys.KeepSIDs()
	next := compile(t, will, keys)
	s, err := MakeSteps(last.Paths, last.Nodes, next)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range s.Turns {
		got = append(got, "turns "+p.Chain+" "+p.Direction.String())
	}
	for _, p := range s.Lossy {
		got = append(got, p.Chain)
	}
	if want := []string{"turns web forward", "turns web reverse", "comes", "gone"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	r6 := func(nodes []Node) (out []string) {
		for _, e := range byName(nodes)["r6"].Egresses {
			out = append(out, fmt.Sprintf("%s %d", e.Chain, e.Epoch))
		}
		slices.Sort(out)
		return out
	}
	for name, c := range map[string]struct {
		nodes []Node
		want  []string
	}{
		"1": {s.Both, []string{"gone 1", "web 1", "web 2"}},
		"2": {s.Turn, []string{"comes 1", "web 1", "web 2"}},
		"3": {next.Nodes, []string{"comes 1", "web 2"}},
	} {
		if got := r6(c.nodes); !slices.Equal(got, c.want) {
			t.Errorf("step %s: r6 is the egress of %q, want %q", name, got, c.want)
		}
	}
	for name, epoch := range map[string]uint8{"1": 1, "2": 2} {
		n := byName(map[string][]Node{"1": s.Both, "2": s.Turn}[name])["r1"]
		for _, h := range n.Headends {
			if h.Chain == "web" && h.Epoch != epoch {
				t.Errorf("step %s: r1 sends epoch %d, want %d", name, h.Epoch, epoch)
			}
		}
	}
	// No SID of the old paths is another's.
	old := map[netip.Addr]string{}
	for _, p := range last.Paths {
		for _, h := range p.Hops[1:] {
			old[h.SID] = p.Chain
		}
	}
	for _, p := range next.Paths {
		for _, h := range p.Hops[1:] {
			if of, ok := old[h.SID]; ok && of != "gone" && p.Epoch != 1 {
				t.Errorf("chain %s has SID %s of the epoch before", p.Chain, h.SID)
			}
		}
	}
}

func TestANodeThatMovesHasNoSteps(t *testing.T) {
	last := compile(t, paper(model.SchemeKeyed), NewKeyring(random(1), nil))
	d := paper(model.SchemeKeyed)
	d.Nodes[1].Locator = netip.MustParsePrefix("fc00:0:0:f00::/56")
	next := compile(t, d, NewKeyring(random(2), last.Paths))
	if _, err := MakeSteps(last.Paths, last.Nodes, next); err == nil || !strings.Contains(err.Error(), "node r2: its address, its locator or the block changes") {
		t.Errorf("got %v", err)
	}
}
