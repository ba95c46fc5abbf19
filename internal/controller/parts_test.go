package controller

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/store"
)

// wide is a domain with so many nodes, and four chains for each.
func wide(nodes int) model.Domain {
	d := model.Domain{Block: netip.MustParsePrefix("fc00::/48")}
	for i := range nodes {
		d.Nodes = append(d.Nodes, model.Node{
			Name: fmt.Sprintf("n%d", i), Address: netip.MustParseAddr(fmt.Sprintf("fd00::%x", i+1)), Locator: netip.MustParsePrefix(fmt.Sprintf("fc00:0:0:%x::/58", i*64)), CPUs: 2,
			Interfaces: []model.Interface{{Name: "e", Role: model.RoleEdge}, {Name: "c", Role: model.RoleCore}},
		})
		d.Functions = append(d.Functions, model.Function{Name: fmt.Sprintf("f%d", i), Node: fmt.Sprintf("n%d", i), Kind: model.KindForward})
	}
	at := func(prefix string, i int) string { return fmt.Sprintf("%s%d", prefix, i%nodes) }
	for i := range 4 * nodes {
		d.Chains = append(d.Chains, model.Chain{
			Name: fmt.Sprintf("c%d", i), Ingress: []string{at("n", i)}, Functions: []string{at("f", i+1), at("f", i+2)}, Egress: at("n", i+3),
			Match: model.Match{Destination: netip.MustParsePrefix(fmt.Sprintf("2001:db8:0:%x::/64", i))}, Proof: model.Proof{Scheme: model.SchemeKeyed, Window: 64},
		})
	}
	return d
}

// A change of one chain writes the parts that it is in, what was read is what was written, and a part is deleted with
// the last generation that has it.
func TestAChangeWritesThePartsThatDiffer(t *testing.T) {
	s, err := store.OpenBolt(filepath.Join(t.TempDir(), "store"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := &Controller{store: s}
	c.cache.generations = map[uint64]*generation{}
	d := wide(100)
	compile := func(was model.Domain, last *generation, d model.Domain) *generation {
		g := &generation{}
		if g.domain, err = plan.CompileAfter(was, last.domain, d, plan.NewKeyring(rand.Reader, last.domain.Paths)); err != nil {
			t.Fatal(err)
		}
		return g
	}
	write := func(number uint64, g *generation, others ...*generation) store.Txn {
		txn := store.Txn{Put: map[string][]byte{}}
		if err := g.store(number, others, &txn); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Commit(t.Context(), txn); err != nil {
			t.Fatal(err)
		}
		return txn
	}
	reads := func(number uint64, want *plan.Domain) *generation {
		t.Helper()
		got, err := c.generation(t.Context(), &view{}, number)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.EqualFunc(got.domain.Paths, want.Paths, plan.Path.Equal) || !slices.EqualFunc(got.domain.Nodes, want.Nodes, plan.Node.Equal) || got.domain.Block != want.Block {
			t.Fatalf("generation %d is not what was written", number)
		}
		return got
	}
	first := compile(model.Domain{}, &generation{domain: &plan.Domain{}}, d)
	all := len(write(1, first).Put)
	again := reads(1, first.domain)

	changed := d
	changed.Chains = slices.Clone(d.Chains)
	changed.Chains[7].Functions = []string{d.Chains[7].Functions[1], d.Chains[7].Functions[0]}
	second := compile(d, first, changed)
	put := write(2, second, again) // as another process would, that has read the first
	if n := len(put.Put); n < 3 || n > 6 || all < 20 {
		t.Errorf("%d records were written of %d, want those of the chain's part, of its nodes', and the generation's", n, all)
	}
	reads(2, second.domain)

	fewer := changed
	fewer.Chains = slices.Delete(slices.Clone(changed.Chains), 3, 4)
	third := compile(changed, second, fewer)
	if n := len(write(3, third, second).Put); n > 6 {
		t.Errorf("without a chain, %d records were written of %d", n, all)
	}
	// The first goes, and then the second: the third needs neither.
	for number, g := range map[uint64]*generation{1: again} {
		txn := store.Txn{}
		g.unstore(number, []*generation{second, third}, &txn)
		if _, err := s.Commit(t.Context(), txn); err != nil {
			t.Fatal(err)
		}
	}
	reads(2, second.domain)
	txn := store.Txn{}
	second.unstore(2, []*generation{third}, &txn)
	if _, err := s.Commit(t.Context(), txn); err != nil {
		t.Fatal(err)
	}
	reads(3, third.domain)
	snap, err := s.Snapshot(t.Context(), keyParts)
	if err != nil {
		t.Fatal(err)
	}
	if len(snap.Records) != len(third.Parts) {
		t.Errorf("%d parts are kept, and %d are needed", len(snap.Records), len(third.Parts))
	}
}

// A generation of a program that wrote it as a whole is read, and the next one is written in parts.
func TestAGenerationAsAWholeIsRead(t *testing.T) {
	s, err := store.OpenBolt(filepath.Join(t.TempDir(), "store"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := &Controller{store: s}
	c.cache.generations = map[uint64]*generation{}
	d, err := plan.Compile(wide(8), nil)
	if err != nil {
		t.Fatal(err)
	}
	var r generationRecord
	if r.Paths, err = plan.EncodePaths(d.Paths); err != nil {
		t.Fatal(err)
	}
	for _, n := range d.Nodes {
		b, err := plan.EncodeNode(n)
		if err != nil {
			t.Fatal(err)
		}
		r.Nodes = append(r.Nodes, b)
	}
	if _, err := s.Commit(context.Background(), store.Txn{Put: map[string][]byte{keyGeneration(5): encode(r)}}); err != nil {
		t.Fatal(err)
	}
	g, err := c.generation(t.Context(), &view{}, 5)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.EqualFunc(g.domain.Paths, d.Paths, plan.Path.Equal) || len(g.domain.Nodes) != len(d.Nodes) || g.domain.Block != d.Block || len(g.parts) != 0 {
		t.Error("the generation is not what was written")
	}
	txn := store.Txn{Put: map[string][]byte{}}
	if err := g.store(6, []*generation{g}, &txn); err != nil {
		t.Fatal(err)
	}
	if len(g.Parts) == 0 || txn.Put[g.Parts[0].key()] == nil || !reflect.DeepEqual(g.Paths, generationRecord{}.Paths) {
		t.Error("the next one was not written in parts")
	}
}
