package plan

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

// What of two plans a node holds at once is found by indexes; here it is by a look at each pair.
func TestBothOfTwoPlansAreAsByEachPair(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	draw := func() (n Node) {
		seen := map[[2]int]bool{}
		for range random.IntN(12) {
			path, epoch := 1+random.IntN(5), 1+random.IntN(3)
			if seen[[2]int{path, epoch}] {
				continue
			}
			seen[[2]int{path, epoch}] = true
			id := PathID{Path: uint32(path), Epoch: uint8(epoch)}
			n.Endpoints = append(n.Endpoints, Endpoint{PathID: id, SID: netip.AddrFrom16([16]byte{0xfc, 7: byte(path + random.IntN(2))}), Argument: random.Uint32N(3)})
			n.Egresses = append(n.Egresses, Egress{PathID: id, Match: model.Match{Priority: uint16(random.IntN(4))}, Guard: model.Guard(random.IntN(2)), Window: random.IntN(3)})
		}
		return n
	}
	for range 2000 {
		o, n := draw(), draw()
		in := map[uint32]bool{}
		stays := func(path uint32) bool { return in[path] }
		for path := range uint32(6) {
			in[path] = random.IntN(3) > 0
		}
		egresses := slices.Clone(o.Egresses)
		for _, e := range n.Egresses {
			if !stays(e.Path) || slices.ContainsFunc(o.Egresses, func(x Egress) bool { return x.Path == e.Path && x.Epoch == e.Epoch }) {
				continue
			}
			if i := slices.IndexFunc(o.Egresses, func(x Egress) bool { return x.Path == e.Path }); i >= 0 {
				e = e.takesAs(o.Egresses[i])
			}
			egresses = append(egresses, e)
		}
		if got := bothEgresses(o.Egresses, n.Egresses, stays); !slices.EqualFunc(got, egresses, Egress.Equal) {
			t.Fatalf("egresses %+v of %+v and %+v; want %+v", got, o.Egresses, n.Egresses, egresses)
		}
		endpoints := slices.Clone(n.Endpoints)
		for _, e := range o.Endpoints {
			if !slices.ContainsFunc(n.Endpoints, func(x Endpoint) bool { return x.SID == e.SID && x.Path == e.Path && x.Epoch == e.Epoch }) {
				endpoints = append(endpoints, e)
			}
		}
		if got := bothEndpoints(o, n); !slices.EqualFunc(got, endpoints, Endpoint.Equal) {
			t.Fatalf("visits %+v of %+v and %+v; want %+v", got, o.Endpoints, n.Endpoints, endpoints)
		}
	}
}

// A plan that differs anywhere is another one: it would be taken for one that was checked.
func TestPlansAreEqualInAll(t *testing.T) {
	n := Node{
		Name: "r1", Revision: 1, Headends: []Headend{{MTU: 1}}, Endpoints: []Endpoint{{Argument: 1}}, Egresses: []Egress{{Window: 1}},
		Interfaces: []model.Interface{{Name: "a"}}, Proxies: []Proxy{{Function: "f", Matches: []model.Match{{Priority: 1}}}}, MPLS: &MPLS{Label: 1},
	}
	if !n.Equal(deepCopy(reflect.ValueOf(n)).Interface().(Node)) {
		t.Error("a copy differs")
	}
	for i := range reflect.TypeFor[Node]().NumField() {
		other := deepCopy(reflect.ValueOf(n))
		switch f := other.Field(i); f.Kind() {
		case reflect.Slice, reflect.Pointer:
			f.SetZero()
		case reflect.Struct: // addresses, prefixes and Advertise
			f.Set(reflect.ValueOf(map[string]any{
				"Block": netip.MustParsePrefix("fc00::/48"), "Address": netip.MustParseAddr("fd00::1"), "Locator": netip.MustParsePrefix("fc00::/64"),
			}[reflect.TypeFor[Node]().Field(i).Name]))
		default:
			change(f)
		}
		if o := other.Interface().(Node); n.Equal(o) || o.Equal(n) {
			t.Errorf("%s does not count", reflect.TypeFor[Node]().Field(i).Name)
		}
	}
	for what, change := range map[string]func(*Node){
		"a headend": func(n *Node) { n.Headends[0].MTU++ }, "a visit": func(n *Node) { n.Endpoints[0].Argument++ }, "an egress": func(n *Node) { n.Egresses[0].Window++ },
		"an interface": func(n *Node) { n.Interfaces[0].Name = "b" }, "a function's match": func(n *Node) { n.Proxies[0].Matches[0].Priority++ },
	} {
		o := deepCopy(reflect.ValueOf(n)).Interface().(Node)
		change(&o)
		if n.Equal(o) {
			t.Errorf("%s does not count", what)
		}
	}
}
