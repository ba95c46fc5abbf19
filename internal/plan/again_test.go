package plan

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
)

// edited is a domain with some of its chains changed, added or removed, or with something else that changes. It may have mistakes.
func edited(t *rapid.T, d model.Domain, number int) model.Domain {
	d.Chains = slices.Clone(d.Chains)
	for k := range rapid.IntRange(0, 2).Draw(t, "edits") {
		fresh := model.Match{Destination: netip.MustParsePrefix(fmt.Sprintf("2001:db8:%x:%x::/64", 0x100+number, k))}
		if len(d.Chains) == 0 {
			return d
		}
		at := rapid.IntRange(0, len(d.Chains)-1).Draw(t, "chain")
		ch := &d.Chains[at]
		ch.Functions = slices.Clone(ch.Functions)
		switch what := rapid.IntRange(0, 11).Draw(t, "edit"); what {
		case 0, 1:
			slices.Reverse(ch.Functions)
			ch.Arguments, ch.Waypoints = nil, nil
		case 2:
			ch.Match = fresh
		case 3:
			ch.Proof.Window = rapid.SampledFrom([]int{64, 128, 256}).Draw(t, "window")
		case 4:
			ch.Encapsulation.Reduced = !ch.Encapsulation.Reduced
		case 5, 6:
			added := d.Chains[at]
			added.Name, added.Match = fmt.Sprintf("x%d-%d", number, k), fresh
			d.Chains = slices.Insert(d.Chains, rapid.IntRange(0, len(d.Chains)).Draw(t, "place"), added)
		case 7:
			d.Chains = slices.Delete(d.Chains, at, at+1)
		case 8: // it may overlap
			ch.Match = d.Chains[rapid.IntRange(0, len(d.Chains)-1).Draw(t, "other")].Match
		case 9:
			ch.Functions[0] = rapid.SampledFrom([]string{d.Functions[0].Name, "nobody"}).Draw(t, "function")
			ch.Arguments, ch.Waypoints = nil, nil
		case 10:
			slices.Reverse(d.Chains)
		case 11:
			d.Nodes = slices.Clone(d.Nodes)
			d.Nodes[0].CPUs = 1
		}
	}
	return d
}

// What is compiled by the chains that differ is what is compiled of all, secrets among it, over changes in a row of which some have mistakes.
func TestChainsThatDifferAreEnough(t *testing.T) {
	quick, all := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		was := domains().Draw(t, "domain")
		last, err := Compile(was, NewKeyring(random(1), nil))
		if err != nil {
			t.Skip(err)
		}
		lives := slices.Clone(last.Paths)
		for i := range 4 {
			next := edited(t, was, i)
			rotated := ""
			if len(next.Chains) > 0 && rapid.IntRange(0, 3).Draw(t, "rotates") == 0 {
				rotated = rapid.SampledFrom(next.Chains).Draw(t, "rotated").Name
			}
			keep := rapid.Bool().Draw(t, "keep")
			keys := func() *Keyring {
				k := NewKeyring(random(uint64(i+2)), last.Paths)
				if keep {
					k.KeepSIDs(lives)
				}
				k.Beyond(lives)
				k.Rotate(func(chain string) bool { return chain == rotated })
				return k
			}
			want, wantErr := Compile(next, keys())
			if compileChanged(was, last, next, keys()) != nil {
				quick++
			}
			all++
			got, err := CompileAfter(was, last, next, keys())
			if fmt.Sprint(err) != fmt.Sprint(wantErr) {
				t.Fatalf("got the error %v, want %v", err, wantErr)
			}
			if err != nil {
				continue
			}
			if !reflect.DeepEqual(got, want) {
				for n := range want.Nodes {
					if !reflect.DeepEqual(got.Nodes[n], want.Nodes[n]) {
						t.Errorf("node %s\n got %+v\nwant %+v", want.Nodes[n].Name, got.Nodes[n], want.Nodes[n])
					}
				}
				t.Fatalf("compiled by what differs\n%+v\nand as a whole\n%+v", got.Paths, want.Paths)
			}
			was, last, lives = next, got, append(lives, got.Paths...)
		}
	})
	if quick < all/3 {
		t.Errorf("%d of %d changes were compiled by the chains that differ", quick, all)
	}
	t.Logf("%d of %d changes were compiled by the chains that differ", quick, all)
}

// A plan that nothing touches keeps its memory, by which the controller sees that nothing has changed.
func TestWhatAChangeLeavesAloneIsShared(t *testing.T) {
	d := many(64)
	last := compile(t, d, NewKeyring(random(1), nil))
	next := d
	next.Chains = slices.Clone(d.Chains)
	next.Chains[0].Functions = slices.Clone(d.Chains[0].Functions)
	slices.Reverse(next.Chains[0].Functions)
	got, err := CompileAfter(d, last, next, NewKeyring(random(2), last.Paths))
	if err != nil {
		t.Fatal(err)
	}
	shared := 0
	for i := range got.Nodes {
		if got.Nodes[i].shares(last.Nodes[i]) {
			shared++
		}
	}
	if on := len(d.Chains[0].Functions) + 2; shared != len(d.Nodes)-on {
		t.Errorf("%d of %d plans are shared, want all but those of %d nodes", shared, len(d.Nodes), on)
	}
}

// many is a domain with so many nodes, and ten chains for each of them: each has five functions, on nodes behind each other.
func many(nodes int) model.Domain {
	d := model.Domain{Block: netip.MustParsePrefix("fc00::/48")}
	name := func(prefix string, i int) string { return fmt.Sprintf("%s%d", prefix, i%nodes) }
	for i := range nodes {
		d.Nodes = append(d.Nodes, model.Node{
			Name: name("n", i), Address: netip.MustParseAddr(fmt.Sprintf("fd00::%x", i+1)), Locator: netip.MustParsePrefix(fmt.Sprintf("fc00:0:0:%x::/58", i*64)), CPUs: 2,
			Interfaces: []model.Interface{{Name: "e", Role: model.RoleEdge}, {Name: "c", Role: model.RoleCore}},
		})
		d.Functions = append(d.Functions, model.Function{Name: name("f", i), Node: name("n", i), Kind: model.KindForward})
	}
	for i := range 10 * nodes {
		ch := model.Chain{
			Name: fmt.Sprintf("c%d", i), Ingress: []string{name("n", 7*i)}, Egress: name("n", 7*i+6),
			Match: model.Match{Destination: netip.MustParsePrefix(fmt.Sprintf("2001:db8:%x:%x::/64", i>>8, i&0xff))}, Proof: model.Proof{Scheme: model.SchemeKeyed, Window: 64},
		}
		for k := range 5 {
			ch.Functions = append(ch.Functions, name("f", 7*i+1+k))
		}
		d.Chains = append(d.Chains, ch)
	}
	return d
}

// BenchmarkCompile compares compiling all chains with compiling one that differs, also by CPU time, which other load lengthens less.
func BenchmarkCompile(b *testing.B) {
	d := many(1000)
	last := compile(b, d, NewKeyring(random(1), nil))
	next := d
	next.Chains = slices.Clone(d.Chains)
	next.Chains[0].Functions = slices.Clone(d.Chains[0].Functions)
	slices.Reverse(next.Chains[0].Functions)
	keys := func() *Keyring { // as the controller's, while nothing drains
		k := NewKeyring(random(2), last.Paths)
		k.KeepSIDs()
		k.Beyond(last.Paths)
		return k
	}
	used := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	cpu := func(b *testing.B) func() {
		began := used()
		return func() { b.ReportMetric(float64((used()-began).Microseconds())/float64(b.N)/1000, "cpu-ms/op") }
	}
	b.Run("all", func(b *testing.B) {
		defer cpu(b)()
		for b.Loop() {
			if _, err := Compile(next, keys()); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("one", func(b *testing.B) {
		defer cpu(b)()
		for b.Loop() {
			if compileChanged(d, last, next, keys()) == nil {
				b.Fatal("all were compiled")
			}
		}
	})
}
