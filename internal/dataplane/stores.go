package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

// The entries of hops and egresses are in arrays, at places that only this file determines: a
// hash has the index of an entry, and ws_places a hint. A packet keeps using the entry that it
// found, so entries never change: a changed entry is written at another place, then its index is
// changed, and the old entry is cleared when no program uses it any more.

// noPlace is the index of a reserved entry.
const noPlace = 0

// placeOf is place_of of bpf/lib/node/lookup.h, in an array of that size.
func placeOf(k abi.HopKey, size uint32) uint32 {
	return (uint32(abi.BE64(k.Sid))<<1 | uint32(k.Epoch&1)) & (size - 1)
}

// store is an array with its index.
type store[K comparable, V any] struct {
	array, index *ebpf.Map
	name         tables.Map
	at           map[K]uint32
	used         map[uint32]bool
	next         uint32
	old          []uint32 // that nothing names any more
}

func openStore[K comparable, V any](g *generation, array, index tables.Map) (*store[K, V], error) {
	s := &store[K, V]{array: g.maps[array], index: g.maps[index], name: array, at: map[K]uint32{}, used: map[uint32]bool{noPlace: true}}
	if err := readMap(g, index, s.at); err != nil {
		return nil, err
	}
	for _, i := range s.at {
		s.used[i] = true
	}
	return s, nil
}

func (s *store[K, V]) put(k K, v *V) error {
	for s.used[s.next] {
		s.next++
	}
	i := s.next
	if err := s.array.Put(i, v); err != nil {
		return fmt.Errorf("write to map %s: %w", s.name, err)
	}
	if err := s.index.Put(&k, i); err != nil {
		return fmt.Errorf("name an entry of map %s: %w", s.name, err)
	}
	s.used[i] = true
	s.leave(k)
	s.at[k] = i
	return nil
}

func (s *store[K, V]) remove(k K) error {
	if err := s.index.Delete(&k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete from the index of map %s: %w", s.name, err)
	}
	s.leave(k)
	return nil
}

func (s *store[K, V]) leave(k K) {
	if i, ok := s.at[k]; ok {
		s.old = append(s.old, i)
		delete(s.at, k)
	}
}

// clear empties entries without an index. No program may use them any more.
func (s *store[K, V]) clear() error {
	var none V
	for _, i := range s.old {
		if err := s.array.Put(i, &none); err != nil {
			return fmt.Errorf("clear an entry of map %s: %w", s.name, err)
		}
		delete(s.used, i)
		s.next = min(s.next, i)
	}
	s.old = nil
	return nil
}

// stores are the two, while ops are done on them.
type stores struct {
	g        *generation
	partly   bool            // finish corrects only the hints that ops may have changed
	touched  map[uint32]bool // their places
	hops     *store[abi.HopKey, abi.Hop]
	egresses *store[abi.EgressKey, abi.Egress]
}

func (g *generation) openStores() (*stores, error) {
	hops, err := openStore[abi.HopKey, abi.Hop](g, tables.MapHops, tables.MapHopIndex)
	if err != nil {
		return nil, err
	}
	egresses, err := openStore[abi.EgressKey, abi.Egress](g, tables.MapEgresses, tables.MapEgressIndex)
	if err != nil {
		return nil, err
	}
	return &stores{g: g, touched: map[uint32]bool{}, hops: hops, egresses: egresses}, nil
}

// do does an op on hops or egresses.
func (s *stores) do(o tables.Op) error {
	switch k := o.Key.(type) {
	case *abi.HopKey:
		// From here on the index alone counts.
		if err := s.guess(*k, abi.Place{}); err != nil {
			return err
		}
		if o.Remove() {
			return s.hops.remove(*k)
		}
		return s.hops.put(*k, o.Value.(*abi.Hop))
	case *abi.EgressKey:
		if o.Remove() {
			return s.egresses.remove(*k)
		}
		return s.egresses.put(*k, o.Value.(*abi.Egress))
	}
	return fmt.Errorf("map %s has no keys %T", o.Table, o.Key)
}

func (s *stores) guess(k abi.HopKey, p abi.Place) error {
	m := s.g.maps[tables.MapPlaces]
	at := placeOf(k, m.MaxEntries())
	s.touched[at] = true
	if err := m.Put(at, p); err != nil {
		return fmt.Errorf("write to map %s: %w", tables.MapPlaces, err)
	}
	return nil
}

// finish corrects the hints and clears entries without an index. Of several entries for one
// place the newest epoch gets the hint.
func (s *stores) finish() error {
	size := s.g.maps[tables.MapPlaces].MaxEntries()
	keys := maps.Keys(s.hops.at)
	if s.partly {
		keys = func(yield func(abi.HopKey) bool) {
			for k := range s.hops.at {
				if s.touched[placeOf(k, size)] && !yield(k) {
					return
				}
			}
		}
	}
	order := slices.SortedFunc(keys, tables.CompareHopKeys)
	s.touched = map[uint32]bool{}
	for _, k := range order {
		p := abi.Place{Hop: s.hops.at[k], Egress: s.egresses.at[abi.EgressKey{Path: k.Path, Epoch: k.Epoch}]}
		if err := s.guess(k, p); err != nil {
			return err
		}
	}
	if len(s.hops.old)+len(s.egresses.old) == 0 {
		return nil
	}
	if err := waitForPrograms(); err != nil {
		return err
	}
	return errors.Join(s.hops.clear(), s.egresses.clear())
}

// readStore reads the entries of an array that its index names.
func readStore[K comparable, V any](g *generation, array, index tables.Map, into map[K]V) error {
	at := map[K]uint32{}
	if err := readMap(g, index, at); err != nil {
		return err
	}
	for k, i := range at {
		var v V
		if err := g.maps[array].Lookup(i, &v); err != nil {
			return fmt.Errorf("read entry %d of map %s: %w", i, array, err)
		}
		into[k] = v
	}
	return nil
}

func (g *generation) readHops(into map[abi.HopKey]abi.Hop) error {
	return readStore(g, tables.MapHops, tables.MapHopIndex, into)
}

func (g *generation) readEgresses(into map[abi.EgressKey]abi.Egress) error {
	return readStore(g, tables.MapEgresses, tables.MapEgressIndex, into)
}

// egressOf is the entry of a path and epoch; false: there is none.
func (g *generation) egressOf(k abi.EgressKey) (e abi.Egress, ok bool, err error) {
	var i uint32
	err = g.maps[tables.MapEgressIndex].Lookup(&k, &i)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return e, false, nil
	}
	if err == nil {
		err = g.maps[tables.MapEgresses].Lookup(i, &e)
	}
	if err != nil {
		return e, false, fmt.Errorf("read map %s: %w", tables.MapEgresses, err)
	}
	return e, true, nil
}

// checkRoom: old entries stay until the new ones are written.
func (g *generation) checkRoom(have, want tables.Contents) error {
	hops := len(have.Hops) + len(tables.Puts(nil, tables.MapHops, have.Hops, want.Hops))
	egresses := len(have.Egresses) + len(tables.Puts(nil, tables.MapEgresses, have.Egresses, want.Egresses))
	if hops >= int(g.limits.Hops) || egresses >= int(g.limits.Egresses) {
		return fmt.Errorf("%w: %d hops, %d egresses with those there are", tables.ErrCapacity, hops, egresses)
	}
	before := have.ByUse()
	for use, p := range want.ByUse() {
		if p.Equal(before[use]) {
			continue
		}
		b, err := p.Over(before[use]).Encode()
		if err != nil {
			return err
		}
		if err := roomForLines(b, g.limits.Lines); err != nil {
			return err
		}
	}
	return nil
}
