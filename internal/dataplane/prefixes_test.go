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
	match := spec.Maps[string(tableMatch)]
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

func (s *prefixSearch) put(use abi.MatchUse, p prefixes) {
	s.t.Helper()
	if err := putPrefixes(s.coll.Maps[string(tableMatch)], s.lines, uint32(use), p); err != nil {
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

func (s *prefixSearch) find(use abi.MatchUse, from, to [2]uint64) match {
	s.t.Helper()
	o := ebpf.RunOptions{Data: s.frame(use, from, to), DataOut: make([]byte, 64)}
	if _, err := s.coll.Programs["search"].Run(&o); err != nil {
		s.t.Fatal(err)
	}
	found := binary.NativeEndian.Uint64(o.DataOut)
	kind := uint8(found >> 32)
	return match{Target: uint32(found), Action: kind & abi.MatchKindAction, Local: kind & abi.MatchKindLocal / abi.MatchKindLocal}
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

// scan is the same by a look at every rule.
func (p prefixes) scan(from, to [2]uint64) match {
	longest, m := -1, match{}
	for k, r := range p.dst {
		if masked(to, uint8(k.Prefixlen)) == addrWords(k.Addr) && int(k.Prefixlen) > longest {
			longest, m = int(k.Prefixlen), r
		}
	}
	if m.Action != uint8(abi.MatchActionSource) {
		return m
	}
	longest, src := -1, match{}
	for k, r := range p.src {
		if k.Class == m.Target && masked(from, uint8(k.Prefixlen)) == addrWords(k.Addr) && int(k.Prefixlen) > longest {
			longest, src = int(k.Prefixlen), r
		}
	}
	return match{Target: src.Target, Action: src.Action, Local: m.Local}
}

func keyBytes(a [2]uint64) (b [16]uint8) {
	binary.BigEndian.PutUint64(b[:8], a[0])
	binary.BigEndian.PutUint64(b[8:], a[1])
	return b
}

// drawAddress draws from few, so that prefixes lie in one another: a long common
// beginning, and a bit that differs.
func drawAddress(t *rapid.T) [2]uint64 {
	base := rapid.SampledFrom([][2]uint64{{}, {0, 0xffff_c633_6401}, {0x20010db8_00010001, 1}, {^uint64(0), ^uint64(0)}}).Draw(t, "base")
	if bit := rapid.IntRange(-1, 127).Draw(t, "bit"); bit >= 0 {
		base[bit/64] ^= 1 << (63 - bit%64)
	}
	return base
}

// drawPrefixes draws rules with few lengths, or with many.
func drawPrefixes(t *rapid.T) prefixes {
	p := prefixes{map[dstKey]match{}, map[srcKey]match{}}
	lengths := rapid.SliceOfNDistinct(rapid.Uint8Range(0, 128), 1, 129, rapid.ID[uint8]).Draw(t, "lengths")
	if rapid.Bool().Draw(t, "few") {
		lengths = lengths[:min(len(lengths), 4)]
	}
	classes := rapid.Uint32Range(0, 3).Draw(t, "classes")
	length := rapid.SampledFrom(lengths)
	for range rapid.IntRange(0, 40).Draw(t, "destinations") {
		l := length.Draw(t, "length")
		m := match{
			Target: rapid.Uint32().Draw(t, "target"), Action: rapid.SampledFrom([]uint8{0, 1, 1, 1, 2}).Draw(t, "action"), Local: rapid.Uint8Range(0, 1).Draw(t, "local"),
		}
		if m.Action == uint8(abi.MatchActionSource) {
			if m.Target = rapid.Uint32Range(0, classes).Draw(t, "class"); m.Target == 0 {
				m.Action = uint8(abi.MatchActionPath)
			}
		}
		p.dst[dstKey{uint32(l), keyBytes(masked(drawAddress(t), l))}] = m
	}
	for range rapid.IntRange(0, 20).Draw(t, "sources") {
		if classes == 0 {
			break
		}
		l := length.Draw(t, "length")
		p.src[srcKey{rapid.Uint32Range(1, classes).Draw(t, "of"), uint32(l), keyBytes(masked(drawAddress(t), l))}] = match{
			Target: rapid.Uint32().Draw(t, "target"), Action: uint8(abi.MatchActionPath),
		}
	}
	return p
}

// Rules, and the set of their lengths, change under the same program.
func TestProgramsFindTheLongestPrefix(t *testing.T) {
	s := newPrefixSearch(t, 1<<14)
	found := map[uint8]int{}
	rapid.Check(t, func(t *rapid.T) {
		p := drawPrefixes(t)
		use := abi.MatchUse(rapid.Uint8Range(0, abi.MatchUses-1).Draw(t, "use"))
		s.put(use, p)
		for range 30 {
			from, to := drawAddress(t), drawAddress(t)
			got, want := s.find(use, from, to), p.scan(from, to)
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

// An agent reads back what another one has written.
func TestPrefixesAreReadAsTheyWereWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPrefixes(t)
		// A class without a rule that names it is nothing that a plan has.
		used := map[uint32]bool{}
		for _, m := range p.dst {
			used[m.Target] = used[m.Target] || m.Action == uint8(abi.MatchActionSource)
		}
		for k := range p.src {
			if !used[k.Class] {
				delete(p.src, k)
			}
		}
		b, err := p.encode()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := decodePrefixes(append(b, make([]byte, 5*lineSize)...)); err != nil || !got.equal(p) {
			t.Fatalf("%v was read as %v, %v", p, got, err)
		}
		again, err := p.encode()
		if err != nil || !slices.Equal(b, again) {
			t.Fatalf("the same rules make different tables (%v)", err)
		}
		for range 20 { // damage is found, or does no harm
			bad := slices.Clone(b)
			bad[rapid.IntRange(0, len(bad)-1).Draw(t, "byte")] = rapid.Uint8().Draw(t, "value")
			_, _ = decodePrefixes(bad[:rapid.IntRange(0, len(bad)).Draw(t, "length")])
		}
	})
}

// A table whose steps lead back to where they came from is read to an end.
func TestPrefixesInACircleAreReadOnce(t *testing.T) {
	p := prefixes{dst: map[dstKey]match{{Prefixlen: 128}: {Target: 7, Action: uint8(abi.MatchActionPath)}}}
	b, err := p.encode()
	if err != nil {
		t.Fatal(err)
	}
	const hit, miss = 2, 3 // in struct ws_match_step
	first := b[2]          // where a search begins
	b[8*first+hit], b[8*first+miss] = first, first
	got, err := decodePrefixes(b)
	if err != nil || len(got.dst) != 1 {
		t.Errorf("read %v, %v; want the one rule", got, err)
	}
}

// many are as many rules as a node holds, of so many lengths.
func many(lengths ...uint8) prefixes {
	r := rand.New(rand.NewPCG(1, 2))
	p := prefixes{map[dstKey]match{}, map[srcKey]match{}}
	for i := 0; len(p.dst) < chainsMax; i++ {
		l := lengths[i%len(lengths)]
		a := masked([2]uint64{0x2001_0db8_0000_0000 | r.Uint64()>>32, r.Uint64()}, l)
		p.dst[dstKey{uint32(l), keyBytes(a)}] = match{Target: uint32(i), Action: uint8(abi.MatchActionPath)}
	}
	return p
}

func TestTableOfAllPrefixesThatANodeHolds(t *testing.T) {
	for _, lengths := range [][]uint8{{64}, {48, 64, 128}, {56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 72, 80, 88, 96, 104, 128}} {
		p := many(lengths...)
		lines, err := linesOf(p)
		if err != nil {
			t.Fatal(err)
		}
		s := newPrefixSearch(t, lines)
		s.put(abi.MatchUseRequire, p)
		t.Logf("lengths %v: %d rules in %d lines", lengths, len(p.dst), lines)
		asked := 0
		for k, want := range p.dst {
			// What is looked for may be a rule's first or last address.
			a := addrWords(k.Addr)
			longest := want
			for l := uint32(128); l > k.Prefixlen; l-- {
				if m, ok := p.dst[dstKey{l, keyBytes(masked(a, uint8(l)))}]; ok {
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
	path := func(target uint32) match { return match{Target: target, Action: uint8(abi.MatchActionPath)} }
	class := func(n uint32) match { return match{Target: n, Action: uint8(abi.MatchActionSource)} }
	key := func(p string) dstKey { return encodeDst(prefix(p)) }
	src := func(class uint32, p string) srcKey {
		k := encodeDst(prefix(p))
		return srcKey{class, k.Prefixlen, k.Addr}
	}
	one := prefixes{
		dst: map[dstKey]match{key("::/0"): path(1), key("2001:db8::/32"): path(2), key("2001:db8:1::/48"): path(3), key("2620::/16"): class(1)},
		src: map[srcKey]match{src(1, "fd00::/8"): path(5)},
	}
	// The class that says the same has its head elsewhere.
	two := prefixes{
		dst: map[dstKey]match{
			key("2001:db8::/33"): path(2), key("2001:db8::/31"): path(4), key("2001:db8:1::1/128"): path(3),
			key("2620::/16"): class(2), key("2621::/16"): class(1),
		},
		src: map[srcKey]match{src(1, "::/0"): path(6), src(2, "fd00::/16"): path(5)},
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
			if err := putPrefixes(s.coll.Maps[string(tableMatch)], s.lines, uint32(abi.MatchUseSteer), next); err != nil {
				ended <- err
				return
			}
			changes.Add(1)
		}
	}()
	from := hostWords(addr("fd00::1"))
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
			m := s.find(abi.MatchUseSteer, from, hostWords(addr(a.to)))
			if !slices.Contains(a.want, m.Target) {
				t.Errorf("%s: %+v, want path %v, as the tables say", a.to, m, a.want)
			}
			seen[m.Target] = true
		}
		// A change between one search of a packet and its other one.
		if got := s.other(abi.MatchUseSteer, from, hostWords(addr("2620::1")), bySource); got != 0 {
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
		p    prefixes
	}{
		{"one", prefixes{dst: map[dstKey]match{encodeDst(prefix("2001:db8::/32")): {Action: 1}}}},
		{"65536 of one length", many(64)},
		{"65536 of three lengths", many(48, 64, 128)},
		{"65536 of sixteen lengths", many(56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 72, 80, 88, 96, 104, 128)},
	} {
		b.Run(c.name, func(b *testing.B) {
			lines, err := linesOf(c.p)
			if err != nil {
				b.Fatal(err)
			}
			s := newPrefixSearch(b, lines)
			s.put(abi.MatchUseSteer, c.p)
			for k := range c.p.dst {
				o := ebpf.RunOptions{Data: s.frame(abi.MatchUseSteer, [2]uint64{}, addrWords(k.Addr)), Repeat: uint32(b.N)}
				b.ResetTimer()
				if _, err := s.coll.Programs["search"].Run(&o); err != nil {
					b.Fatal(err)
				}
				break
			}
		})
	}
}
