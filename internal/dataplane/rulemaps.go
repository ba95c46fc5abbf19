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

// matchMap is what ws_match holds for each use.
func matchMap(lines uint32) *ebpf.MapSpec {
	return &ebpf.MapSpec{
		Name: "ws_match_map", Type: ebpf.Array, Flags: unix.BPF_F_MMAPABLE, KeySize: 4, ValueSize: tables.LineSize, MaxEntries: lines,
	}
}

// putPrefixes makes a map of rules and puts it into ws_match, in one step for the
// packets.
func putPrefixes(outer *ebpf.Map, lines uint32, use uint32, p tables.Prefixes) error {
	b, err := p.Encode()
	if err != nil {
		return err
	}
	if err := roomForLines(b, lines); err != nil {
		return err
	}
	m, err := ebpf.NewMap(matchMap(lines))
	if err != nil {
		return fmt.Errorf("make a map of prefixes: %w", err)
	}
	defer m.Close() // ws_match has it
	memory, err := m.Memory()
	if err != nil {
		return fmt.Errorf("map a map of prefixes: %w", err)
	}
	if _, err := memory.WriteAt(b, 0); err != nil {
		return fmt.Errorf("write a map of prefixes: %w", err)
	}
	if err := outer.Put(use, m); err != nil {
		return fmt.Errorf("write to map %s: %w", tables.MapMatch, err)
	}
	return nil
}

func roomForLines(b []byte, lines uint32) error {
	if have := len(b) / tables.LineSize; have > int(lines) {
		return fmt.Errorf("%w: %d lines of prefixes, of %d", tables.ErrCapacity, have, lines)
	}
	return nil
}

// openMatch opens what ws_match holds.
func (g *generation) openMatch(use abi.MatchUse) (*ebpf.Map, error) {
	var id ebpf.MapID
	if err := g.maps[tables.MapMatch].Lookup(uint32(use), &id); err != nil {
		return nil, fmt.Errorf("read map %s: %w", tables.MapMatch, err)
	}
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return nil, fmt.Errorf("open what map %s holds: %w", tables.MapMatch, err)
	}
	return m, nil
}

// readPrefixes reads what ws_match holds for a use.
func (g *generation) readPrefixes(use abi.MatchUse, p *tables.Prefixes) error {
	m, err := g.openMatch(use)
	if err != nil {
		return err
	}
	defer m.Close()
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

// emptyMatch gives each use a table without rules: by them an agent knows later how
// large they are.
func (g *generation) emptyMatch() error {
	for use := range uint32(abi.MatchUses) {
		if err := putPrefixes(g.maps[tables.MapMatch], g.limits.Lines, use, tables.Prefixes{}); err != nil {
			return err
		}
	}
	return nil
}

// readRules reads what ws_rules holds: a map in it, or none.
func readRules(g *generation, into map[uint32]abi.Ruleset) error {
	var id ebpf.MapID
	err := g.maps[tables.MapRules].Lookup(uint32(0), &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read map %s: %w", tables.MapRules, err)
	}
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return fmt.Errorf("open what map %s holds: %w", tables.MapRules, err)
	}
	defer m.Close()
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
	defer m.Close() // ws_rules has it
	if err := m.Put(uint32(0), s); err != nil {
		return fmt.Errorf("write a map of rules: %w", err)
	}
	if err := g.maps[tables.MapRules].Put(uint32(0), m); err != nil {
		return fmt.Errorf("write to map %s: %w", tables.MapRules, err)
	}
	return nil
}
