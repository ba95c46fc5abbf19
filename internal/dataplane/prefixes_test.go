package dataplane

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// prefixSearch is the search of the programs that ship, alone: its instructions are
// taken out of one of them.
type prefixSearch struct {
	t     testing.TB
	coll  *ebpf.Collection
	lines uint32
}

const prefixFunction = "ws_prefix_find"

func newPrefixSearch(t testing.TB, lines uint32) *prefixSearch {
	t.Helper()
	spec, err := object.Load(object.EdgeTC)
	if err != nil {
		t.Fatal(err)
	}
	var search asm.Instructions
	for _, in := range spec.Programs[object.EdgeTC].Instructions {
		name := in.Symbol()
		if name == prefixFunction || len(search) > 0 && name == "" {
			bare, of := in, in.Reference()
			bare.Metadata = asm.Metadata{}
			if of != "" {
				bare = bare.WithReference(of)
			}
			if name != "" {
				bare = bare.WithSymbol(name)
			}
			search = append(search, bare)
		} else if len(search) > 0 {
			break
		}
	}
	match := spec.Maps[string(tables.MapMatch)]
	match.InnerMap.MaxEntries = lines
	// Use and the addresses' halves are in the packet; the answer goes where they
	// were.
	main := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Mov.Imm(asm.R2, 0), asm.Mov.Reg(asm.R3, asm.R10), asm.Add.Imm(asm.R3, -40), asm.Mov.Imm(asm.R4, 40),
		asm.FnSkbLoadBytes.Call(),
		asm.LoadMem(asm.R1, asm.R10, -40, asm.Word),
		asm.LoadMem(asm.R2, asm.R10, -32, asm.DWord), asm.LoadMem(asm.R3, asm.R10, -24, asm.DWord),
		asm.LoadMem(asm.R4, asm.R10, -16, asm.DWord), asm.LoadMem(asm.R5, asm.R10, -8, asm.DWord),
		asm.Call.Label(prefixFunction),
		asm.StoreMem(asm.R10, -24, asm.R0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, 0), asm.Mov.Reg(asm.R3, asm.R10), asm.Add.Imm(asm.R3, -24),
		asm.Mov.Imm(asm.R4, 8), asm.Mov.Imm(asm.R5, 0),
		asm.FnSkbStoreBytes.Call(),
		asm.Mov.Imm(asm.R0, 0), asm.Return(),
	}
	// The same for who asks often: the answer that is expected is behind the question,
	// and where there is another one, that goes behind it.
	often := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Mov.Imm(asm.R2, 0), asm.Mov.Reg(asm.R3, asm.R10), asm.Add.Imm(asm.R3, -48), asm.Mov.Imm(asm.R4, 48),
		asm.FnSkbLoadBytes.Call(),
		asm.LoadMem(asm.R1, asm.R10, -48, asm.Word),
		asm.LoadMem(asm.R2, asm.R10, -40, asm.DWord), asm.LoadMem(asm.R3, asm.R10, -32, asm.DWord),
		asm.LoadMem(asm.R4, asm.R10, -24, asm.DWord), asm.LoadMem(asm.R5, asm.R10, -16, asm.DWord),
		asm.Call.Label(prefixFunction),
		asm.LoadMem(asm.R1, asm.R10, -8, asm.DWord),
		asm.JEq.Reg(asm.R0, asm.R1, "expected"),
		asm.StoreMem(asm.R10, -48, asm.R0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, 48), asm.Mov.Reg(asm.R3, asm.R10), asm.Add.Imm(asm.R3, -48),
		asm.Mov.Imm(asm.R4, 8), asm.Mov.Imm(asm.R5, 0),
		asm.FnSkbStoreBytes.Call(),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("expected"), asm.Return(),
	}
	program := func(main asm.Instructions) *ebpf.ProgramSpec {
		return &ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: append(main, search...)}
	}
	used := map[string]*ebpf.MapSpec{}
	for _, in := range search {
		if m := spec.Maps[in.Reference()]; m != nil {
			used[in.Reference()] = m
		}
	}
	coll, err := ebpf.NewCollection(&ebpf.CollectionSpec{
		Maps:     used,
		Programs: map[string]*ebpf.ProgramSpec{"search": program(main), "often": program(often)},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(coll.Close)
	return &prefixSearch{t, coll, lines}
}

func (s *prefixSearch) put(use abi.MatchUse, p tables.Prefixes) {
	s.t.Helper()
	if err := putPrefixes(s.coll.Maps[string(tables.MapMatch)], s.lines, uint32(use), p); err != nil {
		s.t.Fatal(err)
	}
}

// frame is the question for the program.
func (s *prefixSearch) frame(use abi.MatchUse, from, to [2]uint64) []byte {
	b := make([]byte, 64)
	binary.NativeEndian.PutUint32(b, uint32(use))
	for i, v := range []uint64{to[0], to[1], from[0], from[1]} {
		binary.NativeEndian.PutUint64(b[8+8*i:], v)
	}
	return b
}

func (s *prefixSearch) find(use abi.MatchUse, from, to [2]uint64) tables.Match {
	s.t.Helper()
	o := ebpf.RunOptions{Data: s.frame(use, from, to), DataOut: make([]byte, 64)}
	if _, err := s.coll.Programs["search"].Run(&o); err != nil {
		s.t.Fatal(err)
	}
	found := binary.NativeEndian.Uint64(o.DataOut)
	kind := uint8(found >> 32)
	return tables.Match{Target: uint32(found), Action: kind & abi.MatchKindAction, Local: kind & abi.MatchKindLocal / abi.MatchKindLocal}
}

// other asks often, and gives an answer that is not what is expected; 0: there was
// none.
func (s *prefixSearch) other(use abi.MatchUse, from, to [2]uint64, want uint64) uint64 {
	s.t.Helper()
	o := ebpf.RunOptions{Data: s.frame(use, from, to), DataOut: make([]byte, 64), Repeat: 2000}
	binary.NativeEndian.PutUint64(o.Data[40:], want)
	binary.NativeEndian.PutUint64(o.Data[48:], 0)
	if _, err := s.coll.Programs["often"].Run(&o); err != nil {
		s.t.Fatal(err)
	}
	return binary.NativeEndian.Uint64(o.DataOut[48:])
}

// Rules, and the set of their lengths, change under the same program.
func TestProgramsFindTheLongestPrefix(t *testing.T) {
	s := newPrefixSearch(t, 1<<14)
	found := map[uint8]int{}
	rapid.Check(t, func(t *rapid.T) {
		p := xtest.DrawPrefixes(t)
		use := abi.MatchUse(rapid.Uint8Range(0, abi.MatchUses-1).Draw(t, "use"))
		s.put(use, p)
		for range 30 {
			from, to := xtest.DrawAddress(t), xtest.DrawAddress(t)
			got, want := s.find(use, from, to), xtest.ScanPrefixes(p, from, to)
			if got != want {
				t.Fatalf("%x to %x: the program finds %+v, a scan %+v of\n%v", from, to, got, want, p)
			}
			found[want.Action]++
		}
	})
	if !t.Failed() && (found[0] == 0 || found[1] == 0) {
		t.Errorf("by action %v were found; want some of each", found)
	}
}

// many are as many rules as a node holds, of so many lengths.
func many(lengths ...uint8) tables.Prefixes {
	r := rand.New(rand.NewPCG(1, 2))
	p := tables.Prefixes{Dst: map[tables.DstKey]tables.Match{}, Src: map[tables.SrcKey]tables.Match{}}
	for i := 0; len(p.Dst) < tables.ChainsMax; i++ {
		l := lengths[i%len(lengths)]
		a := tables.Masked([2]uint64{0x2001_0db8_0000_0000 | r.Uint64()>>32, r.Uint64()}, l)
		p.Dst[tables.DstKey{Prefixlen: uint32(l), Addr: xtest.KeyBytes(a)}] = tables.Match{Target: uint32(i), Action: uint8(abi.MatchActionPath)}
	}
	return p
}

func TestTableOfAllPrefixesThatANodeHolds(t *testing.T) {
	for _, lengths := range [][]uint8{{64}, {48, 64, 128}, {56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 72, 80, 88, 96, 104, 128}} {
		p := many(lengths...)
		lines, err := tables.LinesOf(p)
		if err != nil {
			t.Fatal(err)
		}
		s := newPrefixSearch(t, lines)
		s.put(abi.MatchUseRequire, p)
		t.Logf("lengths %v: %d rules in %d lines", lengths, len(p.Dst), lines)
		asked := 0
		for k, want := range p.Dst {
			// What is looked for may be a rule's first or last address.
			a := tables.AddrWords(k.Addr)
			longest := want
			for l := uint32(128); l > k.Prefixlen; l-- {
				if m, ok := p.Dst[tables.DstKey{Prefixlen: l, Addr: xtest.KeyBytes(tables.Masked(a, uint8(l)))}]; ok {
					longest = m
					break
				}
			}
			if got := s.find(abi.MatchUseRequire, [2]uint64{}, a); got != longest {
				t.Fatalf("%s/%d: the program finds %+v, want %+v", netip.AddrFrom16(k.Addr), k.Prefixlen, got, longest)
			}
			if asked++; asked == 4000 {
				break
			}
		}
	}
}

// What both the rules before and those after say, is said at every moment between.
func TestPrefixesChangeAtOnce(t *testing.T) {
	t.Parallel()
	s := newPrefixSearch(t, 1<<10)
	path := func(target uint32) tables.Match {
		return tables.Match{Target: target, Action: uint8(abi.MatchActionPath)}
	}
	class := func(n uint32) tables.Match { return tables.Match{Target: n, Action: uint8(abi.MatchActionSource)} }
	key := func(p string) tables.DstKey { return tables.EncodeDst(xtest.Prefix(p)) }
	src := func(class uint32, p string) tables.SrcKey {
		k := tables.EncodeDst(xtest.Prefix(p))
		return tables.SrcKey{Class: class, Prefixlen: k.Prefixlen, Addr: k.Addr}
	}
	one := tables.Prefixes{
		Dst: map[tables.DstKey]tables.Match{key("::/0"): path(1), key("2001:db8::/32"): path(2), key("2001:db8:1::/48"): path(3), key("2620::/16"): class(1)},
		Src: map[tables.SrcKey]tables.Match{src(1, "fd00::/8"): path(5)},
	}
	// The class that says the same has its head elsewhere.
	two := tables.Prefixes{
		Dst: map[tables.DstKey]tables.Match{
			key("2001:db8::/33"): path(2), key("2001:db8::/31"): path(4), key("2001:db8:1::1/128"): path(3),
			key("2620::/16"): class(2), key("2621::/16"): class(1),
		},
		Src: map[tables.SrcKey]tables.Match{src(1, "::/0"): path(6), src(2, "fd00::/16"): path(5)},
	}
	s.put(abi.MatchUseSteer, one)
	stop, ended := make(chan struct{}), make(chan error)
	changes := atomic.Int64{}
	go func() {
		defer close(ended)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			next := two
			if i%2 == 1 {
				next = one
			}
			if err := putPrefixes(s.coll.Maps[string(tables.MapMatch)], s.lines, uint32(abi.MatchUseSteer), next); err != nil {
				ended <- err
				return
			}
			changes.Add(1)
		}
	}()
	from := tables.HostWords(xtest.Addr("fd00::1"))
	bySource := uint64(abi.MatchActionPath|abi.MatchKindUsed|abi.MatchKindRule)<<32 | 5
	asked := []struct {
		to   string
		want []uint32
	}{
		{"2001:db8:1::1", []uint32{3}},
		{"2001:db8:2::1", []uint32{2}},
		{"2001:db9::1", []uint32{1, 4}},
		{"2620::1", []uint32{5}}, // by its source
	}
	seen := map[uint32]bool{}
	for !t.Failed() && (len(seen) < 5 || changes.Load() < 300) {
		for _, a := range asked {
			m := s.find(abi.MatchUseSteer, from, tables.HostWords(xtest.Addr(a.to)))
			if !slices.Contains(a.want, m.Target) {
				t.Errorf("%s: %+v, want path %v, as the tables say", a.to, m, a.want)
			}
			seen[m.Target] = true
		}
		// A change between one search of a packet and its other one.
		if got := s.other(abi.MatchUseSteer, from, tables.HostWords(xtest.Addr("2620::1")), bySource); got != 0 {
			t.Errorf("2620::1: %#x, want %#x, as both tables say", got, bySource)
		}
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func BenchmarkPrefix(b *testing.B) {
	for _, c := range []struct {
		name string
		p    tables.Prefixes
	}{
		{"one", tables.Prefixes{Dst: map[tables.DstKey]tables.Match{tables.EncodeDst(xtest.Prefix("2001:db8::/32")): {Action: 1}}}},
		{"65536 of one length", many(64)},
		{"65536 of three lengths", many(48, 64, 128)},
		{"65536 of sixteen lengths", many(56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 72, 80, 88, 96, 104, 128)},
	} {
		b.Run(c.name, func(b *testing.B) {
			lines, err := tables.LinesOf(c.p)
			if err != nil {
				b.Fatal(err)
			}
			s := newPrefixSearch(b, lines)
			s.put(abi.MatchUseSteer, c.p)
			for k := range c.p.Dst {
				o := ebpf.RunOptions{Data: s.frame(abi.MatchUseSteer, [2]uint64{}, tables.AddrWords(k.Addr)), Repeat: uint32(b.N)}
				b.ResetTimer()
				if _, err := s.coll.Programs["search"].Run(&o); err != nil {
					b.Fatal(err)
				}
				break
			}
		})
	}
}
