package controller

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/plan"
)

// What is remembered of a plan is what encoding it says, however plans of a node follow each other.
func TestKnownDigestsAreThoseOfTheFiles(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	var known knownPlans
	var nodes []plan.Node
	for i := range 40 {
		nodes = append(nodes, plan.Node{Name: fmt.Sprintf("r%d", i%3), Revision: uint64(i), MPLS: &plan.MPLS{Label: uint32(i % 13)}})
	}
	encoded := 0
	encode := func(n plan.Node) ([]byte, error) {
		encoded++
		return fmt.Appendf(nil, "%s %d %d", n.Name, n.Revision, n.MPLS.Label), nil
	}
	content := func(p *knownPlan) *string { return &p.content }
	const looks = 500
	for range looks {
		n := nodes[random.IntN(len(nodes))]
		got, err := known.digest(n, encode, content)
		if err != nil {
			t.Fatal(err)
		}
		n.Revision = 0
		if b, _ := encode(n); got != digest(b) {
			t.Fatalf("%s with label %d has the digest of another plan", n.Name, n.MPLS.Label)
		}
		encoded--
		if len(known.of[n.Name]) > knownPlansMax {
			t.Fatalf("%d plans of %s are known", len(known.of[n.Name]), n.Name)
		}
	}
	if encoded >= looks {
		t.Error("nothing was remembered")
	}
	known.forgetBut(nodes[:2], false)
	if len(known.of) > 2 || len(known.of["r0"]) > 1 || len(known.of["r1"]) > 1 {
		t.Errorf("still known: %v", known.of)
	}
}

// A request may change the list of chains of a domain that it has parsed; the next one gets them as the file says.
func TestParsedFilesAreNotChanged(t *testing.T) {
	f := fileRecord{Name: "spare.yaml", Source: bytes.Clone(examples.Spare)}
	first, err := parse(f)
	if err != nil {
		t.Fatal(err)
	}
	chain := first.Domain.Chains[0].Name
	block(&first.Domain, []string{first.Domain.Chains[0].Egress})
	first.Domain.Chains[0].Name = "other"
	first.Domain.Chains = slices.Delete(first.Domain.Chains, 0, 1)
	again, err := parse(f)
	if err != nil {
		t.Fatal(err)
	}
	if again.Domain.Chains[0].Name != chain {
		t.Errorf("parsed again: chain %s", again.Domain.Chains[0].Name)
	}
	f.Source = append(bytes.Clone(f.Source), "\n# another file\n"...)
	if _, err := parse(f); err != nil {
		t.Error(err)
	}
	f.Source = []byte("version: 1\nnonsense: here\n")
	if _, err := parse(f); err == nil {
		t.Error("another file of the same name was not read")
	}
}
