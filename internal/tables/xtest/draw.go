package xtest

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

var Roomy = tables.Limits{Headends: 64, Stats: 256, Buckets: 1 << 14, Slots: 1 << 16}

// Wiring has all functions of a plan at hand.
func Wiring(n plan.Node) tables.Wiring {
	at := tables.Wiring{Ports: map[uint32]abi.Port{}, Reach: map[string]tables.Reach{}, Cpus: 4}
	for i, p := range n.Proxies {
		if p.Local {
			at.Reach[p.Function] = tables.Reach{}
			continue
		}
		at.Reach[p.Function] = tables.Reach{To: uint32(100 + i), Dmac: [6]byte{2}}
		at.Ports[uint32(200+i)] = abi.Port{Proxy: 1}
	}
	return at
}

// PlacedBy is where entries say that their windows and numbers are.
func PlacedBy(have tables.Contents) tables.Placed {
	p := tables.Placed{Windows: map[tables.WindowKey]tables.WindowSlot{}, Numbers: map[tables.CounterKey]uint32{}}
	for _, h := range have.Headends {
		p.Numbers[tables.CounterKey{Path: h.Path, Epoch: h.Epoch}] = h.Counter
	}
	for k, e := range have.Egresses {
		w := tables.Window{Key: tables.WindowKey{CounterKey: tables.CounterKey{Path: k.Path, Epoch: k.Epoch}, Secrets: tables.SecretsOf(&e)}, Lanes: int(e.Lanes), Size: 1 << e.WindowLog2}
		p.Windows[w.Key] = tables.WindowSlot{Window: w, At: int(e.Window)}
	}
	return p
}

func MustDesire(t interface{ Fatal(...any) }, n plan.Node, local []netip.Addr, have tables.Contents) tables.Wanted {
	w, err := tables.Desire(n, Wiring(n), local, have, tables.RecoverIndexes(have, Roomy, PlacedBy(have)))
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// scan is the same by a look at every rule.
func ScanPrefixes(p tables.Prefixes, from, to [2]uint64) tables.Match {
	longest, m := -1, tables.Match{}
	for k, r := range p.Dst {
		if tables.Masked(to, uint8(k.Prefixlen)) == tables.AddrWords(k.Addr) && int(k.Prefixlen) > longest {
			longest, m = int(k.Prefixlen), r
		}
	}
	if m.Action != uint8(abi.MatchActionSource) {
		return m
	}
	longest, src := -1, tables.Match{}
	for k, r := range p.Src {
		if k.Class == m.Target && tables.Masked(from, uint8(k.Prefixlen)) == tables.AddrWords(k.Addr) && int(k.Prefixlen) > longest {
			longest, src = int(k.Prefixlen), r
		}
	}
	return tables.Match{Target: src.Target, Action: src.Action, Local: m.Local}
}

func KeyBytes(a [2]uint64) (b [16]uint8) {
	binary.BigEndian.PutUint64(b[:8], a[0])
	binary.BigEndian.PutUint64(b[8:], a[1])
	return b
}

// DrawAddress draws from few, so that prefixes lie in one another: a long common
// beginning, and a bit that differs.
func DrawAddress(t *rapid.T) [2]uint64 {
	base := rapid.SampledFrom([][2]uint64{{}, {0, 0xffff_c633_6401}, {0x20010db8_00010001, 1}, {^uint64(0), ^uint64(0)}}).Draw(t, "base")
	if bit := rapid.IntRange(-1, 127).Draw(t, "bit"); bit >= 0 {
		base[bit/64] ^= 1 << (63 - bit%64)
	}
	return base
}

// DrawPrefixes draws rules with few lengths, or with many.
func DrawPrefixes(t *rapid.T) tables.Prefixes {
	p := tables.Prefixes{Dst: map[tables.DstKey]tables.Match{}, Src: map[tables.SrcKey]tables.Match{}}
	lengths := rapid.SliceOfNDistinct(rapid.Uint8Range(0, 128), 1, 129, rapid.ID[uint8]).Draw(t, "lengths")
	if rapid.Bool().Draw(t, "few") {
		lengths = lengths[:min(len(lengths), 4)]
	}
	classes := rapid.Uint32Range(0, 3).Draw(t, "classes")
	length := rapid.SampledFrom(lengths)
	for range rapid.IntRange(0, 40).Draw(t, "destinations") {
		l := length.Draw(t, "length")
		m := tables.Match{
			Target: rapid.Uint32().Draw(t, "target"), Action: rapid.SampledFrom([]uint8{0, 1, 1, 1, 2}).Draw(t, "action"), Local: rapid.Uint8Range(0, 1).Draw(t, "local"),
		}
		if m.Action == uint8(abi.MatchActionSource) {
			if m.Target = rapid.Uint32Range(0, classes).Draw(t, "class"); m.Target == 0 {
				m.Action = uint8(abi.MatchActionPath)
			}
		}
		p.Dst[tables.DstKey{Prefixlen: uint32(l), Addr: KeyBytes(tables.Masked(DrawAddress(t), l))}] = m
	}
	for range rapid.IntRange(0, 20).Draw(t, "sources") {
		if classes == 0 {
			break
		}
		l := length.Draw(t, "length")
		p.Src[tables.SrcKey{Class: rapid.Uint32Range(1, classes).Draw(t, "of"), Prefixlen: uint32(l), Addr: KeyBytes(tables.Masked(DrawAddress(t), l))}] = tables.Match{
			Target: rapid.Uint32().Draw(t, "target"), Action: uint8(abi.MatchActionPath),
		}
	}
	return p
}

// BytesOf is a value as it lies in a map.
func BytesOf[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}
