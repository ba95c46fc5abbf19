package tables_test

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// An agent reads back what another one has written.
func TestPrefixesAreReadAsTheyWereWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := xtest.DrawPrefixes(t)
		// A class without a rule that names it is nothing that a plan has.
		used := map[uint32]bool{}
		for _, m := range p.Dst {
			used[m.Target] = used[m.Target] || m.Action == uint8(abi.MatchActionSource)
		}
		for k := range p.Src {
			if !used[k.Class] {
				delete(p.Src, k)
			}
		}
		b, err := p.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tables.DecodePrefixes(append(b, make([]byte, 5*tables.LineSize)...)); err != nil || !got.Equal(p) {
			t.Fatalf("%v was read as %v, %v", p, got, err)
		}
		again, err := p.Encode()
		if err != nil || !slices.Equal(b, again) {
			t.Fatalf("the same rules make different tables (%v)", err)
		}
		for range 20 { // damage is found, or does no harm
			bad := slices.Clone(b)
			bad[rapid.IntRange(0, len(bad)-1).Draw(t, "byte")] = rapid.Uint8().Draw(t, "value")
			_, _ = tables.DecodePrefixes(bad[:rapid.IntRange(0, len(bad)).Draw(t, "length")])
		}
	})
}

// A table whose steps lead back to where they came from is read to an end.
func TestPrefixesInACircleAreReadOnce(t *testing.T) {
	p := tables.Prefixes{Dst: map[tables.DstKey]tables.Match{{Prefixlen: 128}: {Target: 7, Action: uint8(abi.MatchActionPath)}}}
	b, err := p.Encode()
	if err != nil {
		t.Fatal(err)
	}
	const hit, miss = 2, 3 // in struct ws_match_step
	first := b[2]          // where a search begins
	b[8*first+hit], b[8*first+miss] = first, first
	got, err := tables.DecodePrefixes(b)
	if err != nil || len(got.Dst) != 1 {
		t.Errorf("read %v, %v; want the one rule", got, err)
	}
}
