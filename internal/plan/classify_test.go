package plan

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
)

// scan is the meaning of rules: go through all of them and keep the best.
func scan(rules []Rule, destination, source netip.Addr) (target uint32, found bool) {
	best := -1
	for _, r := range rules {
		if !r.Match.Covers(destination, source) {
			continue
		}
		rank := 256*max(0, r.Match.Destination.Bits()) + max(0, r.Match.Source.Bits())
		if rank > best {
			best, target, found = rank, r.Target, true
		}
	}
	return target, found
}

// lookUp is what the data path does with the two tables.
func lookUp(dst []DstEntry, src []SrcEntry, destination, source netip.Addr) (target uint32, found bool) {
	longest := -1
	var entry DstEntry
	for _, e := range dst {
		if e.Prefix.Contains(destination) && e.Prefix.Bits() > longest {
			longest, entry = e.Prefix.Bits(), e
		}
	}
	if longest < 0 || !entry.Source {
		return entry.Target, longest >= 0
	}
	longest = -1
	for _, e := range src {
		if e.Class == entry.Target && e.Prefix.Contains(source) && e.Prefix.Bits() > longest {
			longest, target = e.Prefix.Bits(), e.Target
		}
	}
	return target, longest >= 0
}

// Few addresses and lengths, so that prefixes lie within each other.
func crowded(v4 bool) *rapid.Generator[netip.Addr] {
	return rapid.Custom(func(t *rapid.T) netip.Addr {
		b := rapid.SampledFrom([]byte{0, 0x40, 0x80, 0xc0, 0xff}).Draw(t, "byte")
		if v4 {
			return netip.AddrFrom4([4]byte{0x20, 0x01, b, 1})
		}
		return netip.AddrFrom16([16]byte{0x20, 0x01, 2: b})
	})
}

func crowdedPrefix(v4 bool) *rapid.Generator[netip.Prefix] {
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		bits := rapid.SampledFrom([]int{-1, 0, 8, 16, 17, 18, 24, 128}).Draw(t, "bits")
		if bits < 0 {
			return netip.Prefix{}
		}
		a := crowded(v4).Draw(t, "address")
		return netip.PrefixFrom(a, min(bits, a.BitLen())).Masked()
	})
}

func TestTwoLookUpsGiveWhatAScanOfTheRulesGives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var rules []Rule
		seen := map[model.Match]bool{}
		for i := range rapid.IntRange(0, 12).Draw(t, "rules") {
			v4 := rapid.Bool().Draw(t, "IPv4")
			m := model.NewMatch(crowdedPrefix(v4).Draw(t, "destination"), crowdedPrefix(v4).Draw(t, "source"))
			var key model.Match
			key.Destination, key.Source = m.Whole()
			if !seen[key] {
				seen[key] = true
				rules = append(rules, Rule{Match: m, Target: uint32(i + 100)})
			}
		}
		dst, src := Classify(rules)
		for range 20 {
			v4 := rapid.Bool().Draw(t, "IPv4")
			d, s := crowded(v4).Draw(t, "d"), crowded(v4).Draw(t, "s")
			want, wantFound := scan(rules, d, s)
			got, gotFound := lookUp(dst, src, d, s)
			if got != want && wantFound || gotFound != wantFound {
				t.Fatalf("destination %s, source %s: %d, %v; want %d, %v\nrules %v\ndst %v\nsrc %v", d, s, got, gotFound, want, wantFound, rules, dst, src)
			}
		}
		tablesAreSound(t, dst, src)
	})
}

// tablesAreSound holds what the maps need: each key once, classes from 0 on
// without gaps, all of them used.
func tablesAreSound(t *rapid.T, dst []DstEntry, src []SrcEntry) {
	classes := map[uint32]bool{}
	keys := map[string]bool{}
	once := func(key string) {
		if keys[key] {
			t.Fatalf("%s is there twice", key)
		}
		keys[key] = true
	}
	for _, e := range src {
		classes[e.Class] = true
		once(fmt.Sprintf("class %d source %s", e.Class, e.Prefix))
	}
	used := map[uint32]bool{}
	for _, e := range dst {
		once(fmt.Sprintf("destination %s", e.Prefix))
		if e.Source {
			used[e.Target] = true
		}
	}
	for c := range uint32(len(classes)) {
		if !classes[c] {
			t.Fatalf("class %d of %d is missing", c, len(classes))
		}
	}
	if diff := cmp.Diff(classes, used); diff != "" {
		t.Fatalf("classes (-there +used):\n%s", diff)
	}
}

func TestRuleWithoutSourceNeedsNoSecondLookUp(t *testing.T) {
	dst, src := Classify([]Rule{
		{model.Match{Destination: netip.MustParsePrefix("fc00:8::/64")}, 7},
		{model.Match{Source: netip.MustParsePrefix("fc00:8::/64")}, 8},
	})
	wantDst := []DstEntry{
		{Prefix: netip.MustParsePrefix("::/0"), Source: true, Target: 0},
		{Prefix: netip.MustParsePrefix("fc00:8::/64"), Target: 7},
	}
	wantSrc := []SrcEntry{{Class: 0, Prefix: netip.MustParsePrefix("fc00:8::/64"), Target: 8}}
	if diff := cmp.Diff(wantDst, dst, equal); diff != "" {
		t.Errorf("destinations (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(wantSrc, src, equal); diff != "" {
		t.Errorf("sources (-want +got):\n%s", diff)
	}
}

func TestEqualTablesShareAClass(t *testing.T) {
	from := netip.MustParsePrefix("2001:db8:1::/48")
	dst, src := Classify([]Rule{
		{model.Match{Destination: netip.MustParsePrefix("2001:db8:2::/48"), Source: from}, 3},
		{model.Match{Destination: netip.MustParsePrefix("2001:db8:3::/48"), Source: from}, 3},
	})
	if len(dst) != 2 || len(src) != 1 {
		t.Errorf("%d destinations and %d sources; want 2 and 1", len(dst), len(src))
	}
}

func TestFirstOfRulesWithOneMatchCounts(t *testing.T) {
	m := model.Match{Destination: netip.MustParsePrefix("2001:db8::/32")}
	dst, _ := Classify([]Rule{{m, 1}, {m, 2}})
	if len(dst) != 1 || dst[0].Target != 1 {
		t.Errorf("got %v; want target 1", dst)
	}
}
