package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

// matchMap is the type of the maps in ws_match.
func matchMap(lines uint32) *ebpf.MapSpec {
	return &ebpf.MapSpec{
		Name: "ws_match_map", Type: ebpf.Array, Flags: unix.BPF_F_MMAPABLE, KeySize: 4, ValueSize: tables.LineSize, MaxEntries: lines,
	}
}

// newPrefixes makes a map of rules for ws_match.
func newPrefixes(lines uint32, p tables.Prefixes) (_ *ebpf.Map, err error) {
	b, err := p.Encode()
	if err != nil {
		return nil, err
	}
	if err := roomForLines(b, lines); err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(matchMap(lines))
	if err != nil {
		return nil, fmt.Errorf("make a map of prefixes: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	memory, err := m.Memory()
	if err != nil {
		return nil, fmt.Errorf("map a map of prefixes: %w", err)
	}
	if _, err := memory.WriteAt(b, 0); err != nil {
		return nil, fmt.Errorf("write a map of prefixes: %w", err)
	}
	return m, nil
}

// putPrefixes makes a map of rules and puts it into a ws_match that is no generation's.
func putPrefixes(outer *ebpf.Map, lines uint32, use uint32, p tables.Prefixes) error {
	m, err := newPrefixes(lines, p)
	if err != nil {
		return err
	}
	if err := outer.Put(use, m); err != nil {
		return errors.Join(fmt.Errorf("write to map %s: %w", tables.MapMatch, err), m.Close())
	}
	return m.Close() // outer has it
}

// putPrefixes makes a map of rules and puts it into ws_match, in one step for the
// packets.
func (g *generation) putPrefixes(use abi.MatchUse, p tables.Prefixes) error {
	m, err := newPrefixes(g.limits.Lines, p)
	if err != nil {
		return err
	}
	return g.putInner(tables.MapMatch, uint32(use), m)
}

func roomForLines(b []byte, lines uint32) error {
	if have := len(b) / tables.LineSize; have > int(lines) {
		return fmt.Errorf("%w: %d lines of prefixes, of %d", tables.ErrCapacity, have, lines)
	}
	return nil
}

// readPrefixes reads the table of a use in ws_match.
func (g *generation) readPrefixes(use abi.MatchUse, p *tables.Prefixes) error {
	m, err := g.openInner(tables.MapMatch, uint32(use))
	if err != nil {
		return err
	}
	memory, err := m.Memory()
	if err != nil {
		return fmt.Errorf("map what map %s holds: %w", tables.MapMatch, err)
	}
	b := make([]byte, int(m.MaxEntries())*tables.LineSize)
	if _, err := memory.ReadAt(b, 0); err != nil {
		return fmt.Errorf("read what map %s holds: %w", tables.MapMatch, err)
	}
	if *p, err = tables.DecodePrefixes(b); err != nil {
		return fmt.Errorf("read what map %s holds: %w", tables.MapMatch, err)
	}
	return nil
}

// emptyMatch gives each use a table without rules: an agent later reads their size from them.
func (g *generation) emptyMatch() error {
	for use := range uint32(abi.MatchUses) {
		if err := g.putPrefixes(abi.MatchUse(use), tables.Prefixes{}); err != nil {
			return err
		}
	}
	return nil
}

// readRules reads the map in ws_rules, if there is one.
func readRules(g *generation, into map[uint32]abi.Ruleset) error {
	m, err := g.openInner(tables.MapRules, 0)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	s := new(abi.Ruleset)
	if err := m.Lookup(uint32(0), s); err != nil {
		return fmt.Errorf("read what map %s holds: %w", tables.MapRules, err)
	}
	into[0] = *s
	return nil
}

// putRules makes a map of the rules and puts it into ws_rules, in one step for the
// packets.
func (g *generation) putRules(s *abi.Ruleset) error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "ws_rules_map", Type: ebpf.Array, KeySize: 4, ValueSize: uint32(binary.Size(s)), MaxEntries: 1,
	})
	if err != nil {
		return fmt.Errorf("make a map of rules: %w", err)
	}
	if err := m.Put(uint32(0), s); err != nil {
		return errors.Join(fmt.Errorf("write a map of rules: %w", err), m.Close())
	}
	if err := g.putInner(tables.MapRules, 0, m); err != nil {
		return err
	}
	return nil
}
