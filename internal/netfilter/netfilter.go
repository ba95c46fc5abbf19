// Package netfilter makes the kernel's own firewall a function of a chain: it
// checks rules in nft's language, loads them into tables of waystamp's own, reads
// their counters, and keeps the network namespace that such a function runs in.
//
// It runs nft and asks internal/host for namespaces and links. It knows nothing of
// plans, paths and programs: what hands packets to the namespace and takes them back
// is the data path. The agent loads rules and keeps namespaces, the command line
// checks files.
//
// All tables are of family inet and named waystamp (arguments and zones) or
// waystamp-FUNCTION (the rules of one function). No other table is read or written.
package netfilter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/host"
)

// Names of tables.
const (
	sharedTable = "waystamp"
	tablePrefix = sharedTable + "-"
)

// TableOf names the table that has a function's rules.
func TableOf(function string) string { return tablePrefix + function }

// Ruleset is what netfilter holds for one function.
type Ruleset struct {
	Function string // 1 to 64 letters, digits, hyphens, underscores and dots
	Text     string // the body of one table of family inet; may be empty
	At       Source

	// Arguments are names that the rules can use as $NAME, and their packet marks.
	Arguments map[string]uint32

	// Bypass is the conntrack mark that the rules can use as $bypass, of flows that they
	// are done with; 0: none.
	Bypass uint32

	// Zones are groups of marks with a conntrack zone each: the marks of one chain's
	// two directions are one group. Marks in no group stay in zone 0. nil: none.
	Zones [][]uint32

	// Interfaces are names that rules may refer to by index (iif, a device of a hook)
	// beside InsideIn and InsideOut. Check makes interfaces of these names, so that
	// such rules can be checked where the interfaces are not.
	Interfaces []string
}

// Source says where a ruleset's text comes from, for messages.
type Source struct {
	File   string // "": the text has no file, and its own lines and columns are told
	Line   int    // of the text's first line, from 1
	Column int    // of each line's first character, from 1; what is before it, YAML took off
}

func (s Ruleset) table() string { return TableOf(s.Function) }

var (
	functionName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
	variableName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.-]{0,63}$`)
)

// Check tells whether a ruleset can be loaded. The error is an *Error if it cannot,
// with the mistakes that were found, and a *NotCheckedError if that could not be
// found out: without nft, without the right to make a namespace, without nf_tables
// in the kernel. It loads the rules into a namespace that it makes for that, so
// nothing on the machine changes, and names of interfaces mean none of the machine's.
func Check(ctx context.Context, s Ruleset) error {
	_, err := rehearse(ctx, s, []Ruleset{s})
	return err
}

// NotCheckedError says why a check was not made. It says nothing about the rules.
type NotCheckedError struct {
	Function string
	Err      error
}

func (e *NotCheckedError) Error() string {
	return fmt.Sprintf("rules of function %s were not checked: %v", e.Function, e.Err)
}

func (e *NotCheckedError) Unwrap() error { return e.Err }

// ErrNoZones means that the kernel has no connection tracking with zones.
var ErrNoZones = errors.New("this kernel has no connection tracking zones; they need CONFIG_NF_CONNTRACK_ZONES and CONFIG_NFT_CT")

// rehearsal is what a ruleset came out as in a namespace of its own.
type rehearsal struct {
	shared, function listing
}

// rehearse loads a ruleset into a scratch namespace, with the shared table of all that
// its namespace has.
func rehearse(ctx context.Context, s Ruleset, all []Ruleset) (*rehearsal, error) {
	marks, zones, err := sharedOf(all)
	if err != nil {
		return nil, s.wrong(err.Error())
	}
	if e := s.scan(); e != nil {
		return nil, e
	}
	unknown := func(err error) error { return &NotCheckedError{Function: s.Function, Err: err} }
	if err := host.RequireNft(); err != nil {
		return nil, unknown(err)
	}
	ns, err := host.Anonymous()
	if err != nil {
		return nil, unknown(err)
	}
	defer ns.Close()
	if err := addInterfaces(ns, s.Interfaces); err != nil {
		return nil, unknown(err)
	}
	// The shared table first and alone: what is wrong with it is not the file's text.
	var shared script
	shared.table(sharedTable, sharedBody(marks, zones))
	if err := shared.run(ctx, ns); err != nil {
		var refused *refusal
		if len(zones) > 0 && errors.As(err, &refused) && refused.byKernel() {
			return nil, s.wrong(ErrNoZones.Error(), ErrNoZones)
		}
		return nil, unknown(err)
	}
	var t script
	s.defines(&t)
	s.body(&t)
	if err := t.run(ctx, ns); err != nil {
		var refused *refusal
		if !errors.As(err, &refused) {
			return nil, unknown(err)
		}
		return nil, s.explain(refused)
	}
	out := &rehearsal{}
	if out.shared, err = list(ctx, ns, sharedTable); err == nil {
		out.function, err = list(ctx, ns, s.table())
	}
	if err != nil {
		return nil, unknown(err)
	}
	return out, nil
}

func addInterfaces(ns *host.NetNS, names []string) error {
	n, err := host.Open(ns)
	if err != nil {
		return err
	}
	defer n.Close()
	if err := n.AddVeth(host.Veth{Name: InsideIn, PeerName: InsideOut}); err != nil {
		return err
	}
	for i, name := range names {
		if name == "lo" || name == InsideIn || name == InsideOut || slices.Contains(names[:i], name) {
			continue
		}
		if err := n.AddVeth(host.Veth{Name: name, PeerName: fmt.Sprintf("far-%d", i)}); err != nil {
			return err
		}
	}
	return nil
}

func (s Ruleset) defines(t *script) {
	for _, name := range slices.Sorted(maps.Keys(s.Arguments)) {
		t.line(fmt.Sprintf("define %s = %d", name, s.Arguments[name]), origin{argument: name})
	}
	if s.Bypass != 0 {
		t.line(fmt.Sprintf("define bypass = %d", s.Bypass), origin{})
	}
}

func (s Ruleset) body(t *script) {
	t.line("table inet "+s.table()+" {", origin{})
	for i, line := range s.lines() {
		t.line(line, origin{line: i + 1})
	}
	t.line("}", origin{})
}

func (s Ruleset) lines() []string {
	if s.Text == "" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(s.Text, "\n"), "\n")
}

// sharedOf is what the table that functions share is made of.
func sharedOf(sets []Ruleset) (marks []uint32, zones []zone, err error) {
	var groups [][]uint32
	for _, s := range sets {
		marks = slices.AppendSeq(marks, maps.Values(s.Arguments))
		groups = append(groups, s.Zones...)
	}
	slices.Sort(marks)
	zones, err = zonesOf(groups)
	return slices.Compact(marks), zones, err
}

// zone is the conntrack zone of a mark.
type zone struct {
	mark uint32
	id   uint16
}

// zonesOf numbers the groups. A group's number is its smallest mark where that is
// one, so that a group keeps its flows when others come and go; a larger mark takes the
// highest number that is free.
func zonesOf(groups [][]uint32) ([]zone, error) {
	groups = slices.Clone(groups)
	seen := map[uint32]bool{}
	for i, g := range groups {
		groups[i] = slices.Sorted(slices.Values(g))
		for _, m := range groups[i] {
			if seen[m] {
				return nil, fmt.Errorf("argument %d is in two conntrack zones; give the visits different arguments", m)
			}
			seen[m] = true
		}
	}
	groups = slices.DeleteFunc(groups, func(g []uint32) bool { return len(g) == 0 })
	slices.SortFunc(groups, func(a, b []uint32) int { return cmp.Compare(a[0], b[0]) })
	var out []zone
	taken := map[uint16]bool{0: true} // of packets without an argument
	for _, g := range groups {
		id := uint16(math.MaxUint16)
		if g[0] > 0 && g[0] <= math.MaxUint16 {
			id = uint16(g[0])
		}
		for ; taken[id] && id > 0; id-- {
		}
		if id == 0 {
			return nil, fmt.Errorf("there are %d conntrack zones at most", math.MaxUint16)
		}
		taken[id] = true
		for _, m := range g {
			out = append(out, zone{m, id})
		}
	}
	return out, nil
}

// Counts of packets per argument are in a set of their own.
const argumentSet = "arguments"

// sharedBody is the body of the table that is not a function's: it counts packets
// per argument, and gives each group of arguments its conntrack zone.
func sharedBody(marks []uint32, zones []zone) string {
	if len(marks) == 0 && len(zones) == 0 {
		return ""
	}
	var b strings.Builder
	if len(marks) > 0 {
		// Dynamic, so that what it counts survives a reload.
		fmt.Fprintf(&b, "\tset %s {\n\t\ttype mark\n\t\tflags dynamic\n\t\tsize %d\n\t\tcounter\n\t\telements = { ", argumentSet, 1<<16)
		for i, m := range marks {
			if i > 0 {
				b.WriteString(", ")
			}
			fmt.Fprintf(&b, "%d counter", m)
		}
		b.WriteString(" }\n\t}\n")
	}
	// nft takes the mark for a zone through a map only.
	b.WriteString("\tchain prerouting {\n\t\ttype filter hook prerouting priority raw; policy accept;\n")
	if len(marks) > 0 {
		fmt.Fprintf(&b, "\t\tmeta mark @%s\n", argumentSet)
	}
	if len(zones) > 0 {
		b.WriteString("\t\tct zone set meta mark map { ")
		for i, z := range zones {
			if i > 0 {
				b.WriteString(", ")
			}
			fmt.Fprintf(&b, "%d : %d", z.mark, z.id)
		}
		b.WriteString(" }\n")
	}
	b.WriteString("\t}\n")
	return b.String()
}
