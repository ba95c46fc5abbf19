package dataplane

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/packets"
)

// Where an entry is, ws_places guesses. It is read first; a wrong guess costs
// time, and opens nothing.
func TestEntriesAreFoundByPlaceAndElseByIndex(t *testing.T) {
	const nobodys = uint32(200)
	for _, c := range []struct{ node, packet string }{{"r2", "web-1"}, {"r6", "web-3"}} {
		t.Run(c.packet, func(t *testing.T) {
			p, err := packets.Load(c.packet)
			if err != nil {
				t.Fatal(err)
			}
			r := newScapyRig(t, c.node)
			tlv := p.Frame[srv6.EthernetLen+srv6.IPv6Len+8+3*16:]
			k := abi.HopKey{
				Sid:   binary.NativeEndian.Uint64(p.Frame[srv6.EthernetLen+24:]),
				Epoch: tlv[3], Path: binary.NativeEndian.Uint32(tlv[4:]),
			}
			ek := abi.EgressKey{Path: k.Path, Epoch: k.Epoch}
			places, hopIndex, egressIndex := r.g.maps[tables.MapPlaces], r.g.maps[tables.MapHopIndex], r.g.maps[tables.MapEgressIndex]
			at := placeOf(k, places.MaxEntries())
			var was abi.Place
			r.must(places.Lookup(at, &was))
			var hopAt, egressAt, otherHop, otherEgress uint32
			r.must(hopIndex.Lookup(&k, &hopAt))
			for other := range r.have.Hops {
				if other.Path != k.Path {
					r.must(hopIndex.Lookup(&other, &otherHop))
				}
			}
			isEgress := r.have.Hops[k].Behaviour == uint8(abi.BehaviourEndDT46)
			if isEgress {
				r.must(egressIndex.Lookup(&ek, &egressAt))
				for other := range r.have.Egresses {
					if other.Path != k.Path {
						r.must(egressIndex.Lookup(&other, &otherEgress))
					}
				}
			}
			if was != (abi.Place{Hop: hopAt, Egress: egressAt}) || hopAt == noPlace || otherHop == noPlace || isEgress != (otherEgress != noPlace) {
				t.Fatalf("ws_places guesses %+v; the indexes say %d and %d, others are at %d and %d", was, hopAt, egressAt, otherHop, otherEgress)
			}
			try := func(what string, guess abi.Place, hop, egress *uint32, want abi.Reason) {
				t.Helper()
				for _, hook := range []struct {
					name string
					run  func(frame) (outcome, error)
					ok   uint32
				}{{"TC", r.runTC, tcRedirect}, {"XDP", r.runXDP, xdpRedirect}} {
					r.must(places.Put(at, guess))
					_ = hopIndex.Delete(&k)
					if hop != nil {
						r.must(hopIndex.Put(&k, *hop))
					}
					if isEgress {
						_ = egressIndex.Delete(&ek)
						if egress != nil {
							r.must(egressIndex.Put(&ek, *egress))
						}
					}
					r.must(r.forget())
					r.must(r.freshEvents())
					r.must(r.in(func() error {
						o, err := hook.run(frame{port: portCore, b: p.Frame})
						if err != nil {
							return err
						}
						got, err := r.counted()
						if err != nil {
							return err
						}
						var dropped []string
						verdict := hook.ok
						switch {
						case want != abi.ReasonNone && hook.name == "XDP":
							verdict = xdpPass // TC says why
						case want != abi.ReasonNone:
							verdict, dropped = tcDrop, []string{strings.ToUpper(strings.ReplaceAll(want.String(), "-", "_"))}
						}
						if o.verdict != verdict || !slices.Equal(got.dropped, dropped) {
							t.Errorf("%s, %s: verdict %d, dropped %v; want %d, %v", what, hook.name, o.verdict, got.dropped, verdict, dropped)
						}
						return err
					}))
				}
			}
			none, stray := abi.Place{}, nobodys
			try("as it is", was, &hopAt, &egressAt, abi.ReasonNone)
			try("by the guess alone", was, nil, nil, abi.ReasonNone)
			try("by the indexes alone", none, &hopAt, &egressAt, abi.ReasonNone)
			try("the guess is another's", abi.Place{Hop: otherHop, Egress: otherEgress}, &hopAt, &egressAt, abi.ReasonNone)
			try("the guess is nobody's", abi.Place{Hop: nobodys, Egress: nobodys}, &hopAt, &egressAt, abi.ReasonNone)
			try("the guess is out of bounds", abi.Place{Hop: 1 << 30, Egress: 1 << 30}, &hopAt, &egressAt, abi.ReasonNone)
			for what, change := range map[string]func(*abi.HopKey){
				"SID": func(k *abi.HopKey) { k.Sid++ }, "path": func(k *abi.HopKey) { k.Path++ }, "epoch": func(k *abi.HopKey) { k.Epoch++ },
			} {
				bad := r.have.Hops[k]
				bad.Behaviour = 77
				change(&bad.Of)
				r.must(r.put(tables.MapHops, nobodys, bad))
				r.must(r.put(tables.MapEgresses, uint32(63), abi.Egress{Of: abi.EgressKey{Path: bad.Of.Path, Epoch: bad.Of.Epoch}}))
				guess := abi.Place{Hop: nobodys, Egress: egressAt}
				try("the guess has another "+what, guess, &hopAt, &egressAt, abi.ReasonNone)
				if isEgress && what != "SID" {
					try("the guess has a verifier of another "+what, abi.Place{Hop: hopAt, Egress: 63}, &hopAt, &egressAt, abi.ReasonNone)
				}
			}
			r.must(r.put(tables.MapHops, nobodys, abi.Hop{}))
			try("it is nowhere", none, nil, nil, abi.ReasonUnknownEpoch)
			try("it is another's", abi.Place{Hop: otherHop, Egress: otherEgress}, &otherHop, &otherEgress, abi.ReasonUnknownEpoch)
			try("it is nobody's", none, &stray, &stray, abi.ReasonUnknownEpoch)
			if isEgress {
				try("its verifier is another's", abi.Place{Hop: hopAt, Egress: otherEgress}, &hopAt, &otherEgress, abi.ReasonEgressMissingBug)
				try("its verifier is nowhere", abi.Place{Hop: hopAt, Egress: 0}, &hopAt, nil, abi.ReasonEgressMissingBug)
			}
		})
	}
}

// Whatever comes and goes: an entry that something names is never written, what
// nothing names is empty in the end, and the guesses are right where a place has
// one entry only.
func TestEntriesStayAsTheyAreWhileNamed(t *testing.T) {
	spec, err := object.Load(object.CoreTC)
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		g := &generation{maps: map[tables.Map]*ebpf.Map{}}
		defer func() { must(g.close()) }()
		for _, name := range []tables.Map{tables.MapHops, tables.MapHopIndex, tables.MapEgresses, tables.MapEgressIndex, tables.MapPlaces} {
			ms := spec.Maps[string(name)].Copy()
			ms.MaxEntries = 32
			m, err := ebpf.NewMap(ms)
			must(err)
			g.maps[name] = m
		}
		have := tables.New()
		for range rapid.IntRange(1, 3).Draw(t, "runs") {
			want := drawEntries(t)
			in, err := g.openStores()
			must(err)
			hops, egresses := entriesOf[abi.Hop](t, g, tables.MapHops), entriesOf[abi.Egress](t, g, tables.MapEgresses)
			hopAt, egressAt := maps.Clone(in.hops.at), maps.Clone(in.egresses.at)
			for _, o := range tables.Changes(have, want) {
				must(in.do(o))
				// Programs may be at what was there when it began.
				for k, i := range hopAt {
					if now := entriesOf[abi.Hop](t, g, tables.MapHops); now[i] != hops[i] {
						t.Fatalf("the entry of hop %+v was %+v and is %+v", k, hops[i], now[i])
					}
				}
				for k, i := range egressAt {
					if now := entriesOf[abi.Egress](t, g, tables.MapEgresses); now[i] != egresses[i] {
						t.Fatalf("the entry of egress %+v was %+v and is %+v", k, egresses[i], now[i])
					}
				}
			}
			must(in.finish())
			got := tables.New()
			must(errors.Join(g.readHops(got.Hops), g.readEgresses(got.Egresses)))
			if !maps.Equal(got.Hops, want.Hops) || !maps.Equal(got.Egresses, want.Egresses) {
				t.Fatalf("the maps hold\n%+v\n%+v\nwant\n%+v\n%+v", got.Hops, got.Egresses, want.Hops, want.Egresses)
			}
			for i, h := range entriesOf[abi.Hop](t, g, tables.MapHops) {
				if h != (abi.Hop{}) && in.hops.at[h.Of] != uint32(i) {
					t.Fatalf("entry %d has %+v, and nothing names it", i, h)
				}
			}
			for i, e := range entriesOf[abi.Egress](t, g, tables.MapEgresses) {
				if e != (abi.Egress{}) && in.egresses.at[e.Of] != uint32(i) {
					t.Fatalf("entry %d has %+v, and nothing names it", i, e)
				}
			}
			guesses := entriesOf[abi.Place](t, g, tables.MapPlaces)
			sharing := map[uint32]int{}
			for k := range want.Hops {
				sharing[placeOf(k, 32)]++
			}
			for k, i := range in.hops.at {
				right := abi.Place{Hop: i, Egress: in.egresses.at[abi.EgressKey{Path: k.Path, Epoch: k.Epoch}]}
				if p := placeOf(k, 32); sharing[p] == 1 && guesses[p] != right {
					t.Fatalf("the guess for %+v is %+v, want %+v", k, guesses[p], right)
				}
			}
			have = want
		}
	})
}

// drawEntries draws hops, and egresses for some of them, of few keys.
func drawEntries(t *rapid.T) tables.Contents {
	out := tables.New()
	for range rapid.IntRange(0, 6).Draw(t, "entries") {
		k := abi.HopKey{
			Sid:   tables.Upper(xtest.OwnSID(rapid.IntRange(1, 4).Draw(t, "sid"))),
			Path:  abi.BE32(rapid.Uint32Range(1, 2).Draw(t, "path")),
			Epoch: rapid.Uint8Range(0, 3).Draw(t, "epoch"),
		}
		out.Hops[k] = abi.Hop{Of: k, Stats: rapid.Uint32Range(0, 1).Draw(t, "stats")}
		if rapid.Bool().Draw(t, "is an egress") {
			e := abi.EgressKey{Path: k.Path, Epoch: k.Epoch}
			out.Egresses[e] = abi.Egress{Of: e, Window: rapid.Uint32Range(0, 1).Draw(t, "window")}
		}
	}
	return out
}

// entriesOf is all of an array.
func entriesOf[V any](t *rapid.T, g *generation, name tables.Map) []V {
	t.Helper()
	out := make([]V, g.maps[name].MaxEntries())
	for i := range out {
		if err := g.maps[name].Lookup(uint32(i), &out[i]); err != nil {
			t.Fatal(err)
		}
	}
	return out
}
