package dataplane

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
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
	spec, err := loadEdgeTC()
	if err != nil {
		t.Fatal(err)
	}
	var search asm.Instructions
	for _, in := range spec.Programs[progEdgeTC].Instructions {
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
	// Use, head and the address's halves are in the packet; the answer goes where
	// they were.
	main := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Mov.Imm(asm.R2, 0), asm.Mov.Reg(asm.R3, asm.R10), asm.Add.Imm(asm.R3, -24), asm.Mov.Imm(asm.R4, 24),
		asm.FnSkbLoadBytes.Call(),
		asm.LoadMem(asm.R1, asm.R10, -24, asm.Word), asm.LoadMem(asm.R2, asm.R10, -20, asm.Word),
		asm.LoadMem(asm.R3, asm.R10, -16, asm.DWord), asm.LoadMem(asm.R4, asm.R10, -8, asm.DWord),
		asm.Call.Label(prefixFunction),
		asm.StoreMem(asm.R10, -24, asm.R0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, 0), asm.Mov.Reg(asm.R3, asm.R10), asm.Add.Imm(asm.R3, -24),
		asm.Mov.Imm(asm.R4, 8), asm.Mov.Imm(asm.R5, 0),
		asm.FnSkbStoreBytes.Call(),
		asm.Mov.Imm(asm.R0, 0), asm.Return(),
	}
	coll, err := ebpf.NewCollection(&ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{string(tableMatch): match},
		Programs: map[string]*ebpf.ProgramSpec{"search": {
			Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: append(main, search...),
		}},
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
func (s *prefixSearch) frame(use abi.MatchUse, head uint32, a [2]uint64) []byte {
	b := make([]byte, 64)
	binary.NativeEndian.PutUint32(b, uint32(use))
	binary.NativeEndian.PutUint32(b[4:], head)
	binary.NativeEndian.PutUint64(b[8:], a[0])
	binary.NativeEndian.PutUint64(b[16:], a[1])
	return b
}

func (s *prefixSearch) find(use abi.MatchUse, head uint32, a [2]uint64) match {
	s.t.Helper()
	o := ebpf.RunOptions{Data: s.frame(use, head, a), DataOut: make([]byte, 64)}
	if _, err := s.coll.Programs["search"].Run(&o); err != nil {
		s.t.Fatal(err)
	}
	found := binary.NativeEndian.Uint64(o.DataOut)
	kind := uint8(found >> 32)
	return match{Target: uint32(found), Action: kind & abi.MatchKindAction, Local: kind & abi.MatchKindLocal / abi.MatchKindLocal}
}

// lookUp is what bpf/lib/classify.h does.
func (s *prefixSearch) lookUp(use abi.MatchUse, from, to [2]uint64) match {
	m := s.find(use, 0, to)
	if m.Action != uint8(abi.MatchActionSource) {
		return m
	}
	src := s.find(use, m.Target, from)
	return match{Target: src.Target, Action: src.Action, Local: m.Local}
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
			got, want := s.lookUp(use, from, to), p.scan(from, to)
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
			if got := s.find(abi.MatchUseRequire, 0, a); got != longest {
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
	s := newPrefixSearch(t, 1<<10)
	path := func(target uint32) match { return match{Target: target, Action: uint8(abi.MatchActionPath)} }
	key := func(p string) dstKey { return encodeDst(prefix(p)) }
	one := prefixes{dst: map[dstKey]match{key("::/0"): path(1), key("2001:db8::/32"): path(2), key("2001:db8:1::/48"): path(3)}}
	two := prefixes{dst: map[dstKey]match{key("2001:db8::/33"): path(2), key("2001:db8::/31"): path(4), key("2001:db8:1::1/128"): path(3)}}
	s.put(abi.MatchUseSteer, one)
	stop, ended := make(chan struct{}), make(chan error)
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
		}
	}()
	seen := map[uint32]bool{}
	for i := 0; i < 20000 || len(seen) < 2; i++ {
		for a, want := range map[string]uint32{"2001:db8:1::1": 3, "2001:db8:2::1": 2} {
			if m := s.find(abi.MatchUseSteer, 0, hostWords(addr(a))); m.Target != want {
				t.Fatalf("%s: %+v, want path %d, which both tables say", a, m, want)
			}
		}
		m := s.find(abi.MatchUseSteer, 0, hostWords(addr("2001:db9::1")))
		if m.Target != 1 && m.Target != 4 {
			t.Fatalf("%+v, want path 1 or 4", m)
		}
		seen[m.Target] = true
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
				o := ebpf.RunOptions{Data: s.frame(abi.MatchUseSteer, 0, addrWords(k.Addr)), Repeat: uint32(b.N)}
				b.ResetTimer()
				if _, err := s.coll.Programs["search"].Run(&o); err != nil {
					b.Fatal(err)
				}
				break
			}
		})
	}
}
