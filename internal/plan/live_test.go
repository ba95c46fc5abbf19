package plan

import (
	"crypto/rand"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
)

// Three domains in a row, the first of which still drains when the third is prepared and turned
// to: what was sent in any of the epochs that are live is known at all hops, whichever nodes are a
// step ahead of the others.
func TestNoStepLosesAPacketOfAnyLiveEpoch(t *testing.T) {
	followed := 0
	rapid.Check(t, func(t *rapid.T) {
		var made []*Domain
		var all []Path
		for i := range 3 {
			var last []Path
			if i > 0 {
				last = made[i-1].Paths
			}
			keys := NewKeyring(random(uint64(i+1)), last)
			keys.KeepSIDs(all)
			d, err := Compile(domains().Draw(t, "domain"), keys)
			if err != nil {
				t.Fatal(err)
			}
			made, all = append(made, d), append(all, d.Paths...)
		}
		a, b, c := made[0], made[1], made[2]
		var stages []map[string]Node
		for _, l := range []Live{
			{Now: a},
			{Now: a, Next: b},
			{Old: []*Domain{a}, Now: b},
			{Old: []*Domain{a}, Now: b, Next: c},
			{Old: []*Domain{a, b}, Now: c},
			{Old: []*Domain{b}, Now: c}, // a has drained
			{Now: c},
		} {
			nodes, err := l.Nodes()
			if err != nil {
				if !strings.Contains(err.Error(), "node ") {
					t.Fatal(err)
				}
				t.Skip(err) // what cannot be beside each other is told
			}
			stages = append(stages, byName(nodes))
		}
		// Live at each stage and in the next one, where packets may be under way.
		live := [][]*Domain{{a}, {a}, {a, b}, {a, b}, {b, c}, {c}}
		ahead := rapid.SliceOfN(rapid.Bool(), 16, 16).Draw(t, "ahead")
		for stage, domains := range live {
			i := 0
			state := map[string]Node{}
			for _, name := range slices.Sorted(keysOf(stages...)) {
				from := stage
				if ahead[i%len(ahead)] {
					from++
				}
				i++
				n, ok := stages[from][name]
				if !ok {
					n = stages[stage][name]
				}
				state[name] = n
			}
			for _, d := range domains {
				for _, p := range d.Paths {
					if !inAll(p, stage, live) {
						continue
					}
					followed++
					if err := accepted(p, func(name string) Node { return state[name] }); err != nil {
						t.Fatalf("stage %d: %s, epoch %d: %v", stage, p.PathID, p.Epoch, err)
					}
				}
			}
		}
	})
	if followed == 0 {
		t.Error("no path was in two domains")
	}
}

// inAll: paths that come or go are refused meanwhile; so only those are followed that all
// domains have which are live at the stage, or will be in the next.
func inAll(p Path, stage int, live [][]*Domain) bool {
	domains := slices.Clone(live[stage])
	if stage+1 < len(live) {
		domains = append(domains, live[stage+1]...)
	}
	for _, d := range domains {
		if !slices.ContainsFunc(d.Paths, func(q Path) bool { return q.direction() == p.direction() && q.Path == p.Path }) {
			return false
		}
	}
	return true
}

func keysOf(stages ...map[string]Node) func(func(string) bool) {
	all := map[string]bool{}
	for _, s := range stages {
		for name := range s {
			all[name] = true
		}
	}
	return func(yield func(string) bool) {
		for name := range all {
			if !yield(name) {
				return
			}
		}
	}
}

func TestABlockedChainIsStillRequiredAtItsEgress(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d, err := Compile(domains().Draw(t, "domain"), NewKeyring(random(1), nil))
		if err != nil {
			t.Fatal(err)
		}
		if len(d.Paths) == 0 {
			t.Skip("no path")
		}
		chain := d.Paths[0].Chain
		cut := d.Without(func(c string) bool { return c == chain })
		for i, n := range cut.Nodes {
			if err := n.check(); err != nil {
				t.Fatal(err)
			}
			if len(n.Egresses) != len(d.Nodes[i].Egresses) {
				t.Errorf("node %s ends %d paths, and ended %d", n.Name, len(n.Egresses), len(d.Nodes[i].Egresses))
			}
			for _, h := range n.Headends {
				if h.Chain == chain {
					t.Errorf("node %s sends into %s", n.Name, chain)
				}
			}
			for _, e := range n.Endpoints {
				if e.Chain == chain {
					t.Errorf("node %s has a share of %s", n.Name, chain)
				}
			}
		}
	})
}

// Nodes may hold later epochs of a path than those that a compilation goes on from.
func TestFreshSecretsGetAnEpochBeyondAllThatNodesHold(t *testing.T) {
	for _, c := range []struct {
		last uint8
		held []uint8
		want uint8
	}{{1, nil, 2}, {1, []uint8{1}, 2}, {1, []uint8{2}, 3}, {1, []uint8{5, 2, 1}, 6}, {3, []uint8{1, 2}, 4}, {255, []uint8{1, 0}, 2}, {254, []uint8{255}, 0}, {2, []uint8{250}, 3}} {
		p := Path{PathID: PathID{Path: 7, Epoch: c.last, Chain: "web", Scheme: model.SchemeKeyed}, Hops: make([]Hop, 3)}
		keys := NewKeyring(rand.Reader, []Path{p})
		keys.Rotate(func(string) bool { return true })
		held := []Path{{PathID: PathID{Path: 8, Epoch: 100}}}
		for _, e := range c.held {
			held = append(held, Path{PathID: PathID{Path: 7, Epoch: e}})
		}
		keys.Beyond(held)
		if err := keys.secrets(&p); err != nil || p.Epoch != c.want {
			t.Errorf("behind epoch %d, with %v held: %d, %v; want %d", c.last, c.held, p.Epoch, err, c.want)
		}
	}
}

// Of two compilations only the paths between the first and the last that differ are looked at. What turns, is lossy and stays is as if all were.
func TestPathsOutsideOfTheDifferenceStay(t *testing.T) {
	skipped := 0
	rapid.Check(t, func(t *rapid.T) {
		first := domains().Draw(t, "domain")
		was, err := Compile(first, NewKeyring(random(1), nil))
		if err != nil {
			t.Skip(err)
		}
		next := edited(t, first, 0)
		keys := NewKeyring(random(2), was.Paths)
		if len(next.Chains) > 0 && rapid.Bool().Draw(t, "rotates") {
			rotated := rapid.SampledFrom(next.Chains).Draw(t, "rotated").Name
			keys.Rotate(func(chain string) bool { return chain == rotated })
		}
		is, err := Compile(next, keys)
		if err != nil {
			t.Skip(err)
		}
		if a, b := differing(was.Paths, is.Paths); len(a)+len(b) < len(was.Paths)+len(is.Paths) {
			skipped++
		}
		find := func(d *Domain, like *Path) *Path {
			for i := range d.Paths {
				if d.Paths[i].direction() == like.direction() {
					return &d.Paths[i]
				}
			}
			return nil
		}
		var turning, lossy []Path
		stays := map[uint32]bool{}
		for i := range is.Paths {
			p := &is.Paths[i]
			switch q := find(was, p); {
			case q == nil || !sameWay(q, p):
				lossy = append(lossy, *p)
			case q.Epoch != p.Epoch:
				turning = append(turning, *p)
				stays[p.Path] = true
			default:
				stays[p.Path] = true
			}
		}
		for i := range was.Paths {
			if find(is, &was.Paths[i]) == nil {
				lossy = append(lossy, was.Paths[i])
			}
		}
		gotTurning, gotLossy := was.Turning(is)
		if !slices.EqualFunc(gotTurning, turning, Path.Equal) || !slices.EqualFunc(gotLossy, lossy, Path.Equal) {
			t.Fatalf("%d turn and %d are lossy; want %d and %d", len(gotTurning), len(gotLossy), len(turning), len(lossy))
		}
		for _, p := range slices.Concat(was.Paths, is.Paths) {
			if got := staying(was, is)(p.Path); got != stays[p.Path] {
				t.Fatalf("%s stays: %t, want %t", p.PathID, got, stays[p.Path])
			}
		}
	})
	if skipped == 0 {
		t.Error("in no case was a path left out")
	}
}
