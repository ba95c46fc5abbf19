package dataplane

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// What nothing makes of a table of prefixes: as if somebody had removed it, or as it
// would be after a bug.
var missingTables = map[string]func(*rig, abi.MatchUse) error{
	"no table": func(r *rig, use abi.MatchUse) error { return r.g.maps[tables.MapMatch].Delete(uint32(use)) },
	"a length whose lines are not there": func(r *rig, use abi.MatchUse) error {
		return r.putDamaged(use, r.g.limits.Lines, 0)
	},
	"sources whose head is not there": func(r *rig, use abi.MatchUse) error {
		return r.putDamaged(use, 1, r.g.limits.Lines)
	},
	"sources whose head has no end": func(r *rig, use abi.MatchUse) error {
		return r.putDamaged(use, 1, r.g.limits.Lines-1)
	},
}

// putDamaged puts a table in force whose only prefix is that of all addresses. Its
// line is at base, and says where the sources' head is; the last line is one that
// leads further.
func (r *rig) putDamaged(use abi.MatchUse, base, sources uint32) error {
	b := make([]byte, int(r.g.limits.Lines)*tables.LineSize)
	tables.PutStep(b, 0, 0, tables.PrefixStep{Hit: 1}, 0, 0)
	tables.PutStep(b, 0, 1, tables.PrefixStep{}, 0, base)
	tables.PutStep(b, r.g.limits.Lines-1, 0, tables.PrefixStep{Hit: 255}, 0, 1)
	const kind = abi.MatchKindUsed | abi.MatchKindRule | abi.MatchKindLocal
	copy(b[tables.LineSize:], tables.Line{Entries: []tables.PrefixEntry{{Target: sources, Kind: kind | uint8(abi.MatchActionSource)}}}.Append(nil))
	m, err := ebpf.NewMap(matchMap(r.g.limits.Lines))
	if err != nil {
		return err
	}
	defer m.Close()
	memory, err := m.Memory()
	if err != nil {
		return err
	}
	_, err = memory.WriteAt(b, 0)
	return errors.Join(err, r.g.maps[tables.MapMatch].Put(uint32(use), m))
}

// learned lets TC find the packet's way, and makes sure that XDP takes it then.
func (r *rig) learned(p packets.Packet) error {
	f := frame{port: p.Interface.Name, b: p.Frame}
	if _, err := r.runTC(f); err != nil {
		return err
	}
	if err := r.forget(); err != nil {
		return err
	}
	got, err := r.runXDP(f)
	if err == nil && got.verdict != xdpRedirect {
		err = fmt.Errorf("XDP: verdict %d with all tables, want it redirected", got.verdict)
	}
	return err
}

// comes is what becomes of a packet that XDP leaves to TC as it is.
func (r *rig) comes(p packets.Packet) (outcome, error) {
	f := frame{port: p.Interface.Name, b: p.Frame}
	xdp, err := r.runXDP(f)
	if err == nil && (xdp.verdict != xdpPass || !slices.Equal(xdp.b, f.b)) {
		err = fmt.Errorf("XDP: verdict %d, want it left to TC as it is", xdp.verdict)
	}
	if err := errors.Join(err, r.checkMoved("XDP", moved{})); err != nil {
		return outcome{}, err
	}
	return r.runTC(f)
}

// leaves is what a program at TC egress makes of a packet.
func leaves(prog string, from oracle.Origin) func(*rig, packets.Packet) (outcome, error) {
	return func(r *rig, p packets.Packet) (outcome, error) {
		if prog == object.CoreOutTC {
			return r.run(r.program(prog), ebpf.RunOptions{Data: p.Frame, Context: skb{Ifindex: r.ports[portCore]}})
		}
		return r.runLeave(frame{b: p.Frame}, oracle.Departure{From: from})
	}
}

// takesOwn makes a headend's chains take what it sends itself.
func takesOwn(n *plan.Node) {
	for i := range n.Headends {
		n.Headends[i].Own = true
	}
}

// What no table says anything of is refused: nobody knows what it would have said.
// Not so what is for the node itself, as the kernel says, and what no rule is ever
// asked about.
func TestWithoutATableOfPrefixesNothingGoesOn(t *testing.T) {
	const (
		none    = ""
		missing = "RULES_MISSING_BUG"
	)
	comes, fromElsewhere, own := (*rig).comes, leaves(object.EdgeOutTC, oracle.FromElsewhere), leaves(object.CoreOutTC, oracle.FromNode)
	proven := func(r *rig, p packets.Packet) (outcome, error) {
		return r.runLeave(frame{b: p.Frame}, oracle.Departure{From: oracle.FromPlan, Index: true})
	}
	type entry struct {
		node, packet string
		use          abi.MatchUse
		run          func(*rig, packets.Packet) (outcome, error)
		reason       string
		xdp          bool // it would have taken the packet
	}
	type place struct {
		node string
		use  abi.MatchUse
	}
	of := map[place][]entry{}
	for _, c := range []entry{
		// The guard where packets come in.
		{"r6", "unproven", abi.MatchUseRequire, comes, missing, false},
		{"r6", "unproven-ipv4", abi.MatchUseRequire, comes, missing, false},
		{"r6", "plain-transit", abi.MatchUseRequire, comes, missing, false},
		{"r1", "edge-unmatched", abi.MatchUseRequire, comes, missing, false},
		// Behind a proof.
		{"r6", "web-3", abi.MatchUseRequire, comes, missing, true},
		// Where they leave.
		{"r6", "edge-web", abi.MatchUseRequire, fromElsewhere, missing, false},
		{"r6", "edge-unmatched", abi.MatchUseRequire, fromElsewhere, missing, false},
		{"r6", "edge-ipv4", abi.MatchUseRequire, fromElsewhere, missing, false},
		{"r6", "edge-unmatched", abi.MatchUseLocal, fromElsewhere, missing, false},
		{"r1", "edge-unmatched", abi.MatchUseLocal, own, missing, false},
		// The headend.
		{"r1", "edge-web", abi.MatchUseSteer, comes, missing, true},
		{"r1", "edge-unmatched", abi.MatchUseSteer, comes, missing, false},
		{"r1", "edge-ipv4", abi.MatchUseSteer, comes, missing, false},
		{"r1", "edge-web", abi.MatchUseSteer, own, missing, false},
		{"r1", "edge-unmatched", abi.MatchUseSteer, own, missing, false},
		// The node's own, by the kernel's word.
		{"r6", "own-address", abi.MatchUseRequire, comes, none, false},
		{"r6", "own-address-in-match", abi.MatchUseRequire, comes, none, false},
		{"r6", "plain-ipv4-own", abi.MatchUseRequire, comes, none, false},
		{"r1", "edge-own-address", abi.MatchUseSteer, comes, none, false},
		// Verified a moment before, and what nobody forwards.
		{"r6", "edge-web", abi.MatchUseRequire, proven, none, false},
		{"r6", "link-local", abi.MatchUseRequire, comes, none, false},
		{"r6", "edge-multicast", abi.MatchUseRequire, fromElsewhere, none, false},
		{"r6", "edge-multicast", abi.MatchUseLocal, fromElsewhere, none, false},
	} {
		of[place{c.node, c.use}] = append(of[place{c.node, c.use}], c)
	}
	load := func(name string) packets.Packet {
		p, err := packets.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	rigs := map[string]*rig{"r1": newScapyRig(t, "r1"), "r6": newScapyRig(t, "r6")}
	for _, r := range rigs {
		r.must(r.apply(changed(r.node.Node, takesOwn)))
	}
	for at, cases := range of {
		r := rigs[at.node]
		whole, err := r.g.openInner(tables.MapMatch, uint32(at.use))
		r.must(err)
		for how, damage := range missingTables {
			for _, c := range cases {
				if c.xdp {
					r.must(r.in(func() error { return r.learned(load(c.packet)) }))
				}
			}
			r.must(errors.Join(r.forget(), damage(r, at.use)))
			for _, c := range cases {
				if _, err := r.counted(); err != nil {
					t.Fatal(err)
				}
				var got outcome
				if err := r.in(func() (err error) {
					got, err = c.run(r, load(c.packet))
					return err
				}); err != nil {
					t.Fatalf("%s, %s, use %d: %s: %v", c.node, how, c.use, c.packet, err)
				}
				m, err := r.counted()
				verdict, want := uint32(tcPass), []string(nil)
				if c.reason != none {
					verdict, want = tcDrop, []string{c.reason}
				}
				if err != nil || got.verdict != verdict || !slices.Equal(m.dropped, want) {
					t.Errorf("%s, %s, use %d: %s: verdict %d, counted %+v, %v; want verdict %d, %v",
						c.node, how, c.use, c.packet, int32(got.verdict), m, err, int32(verdict), want)
				}
			}
			r.must(r.g.maps[tables.MapMatch].Put(uint32(at.use), whole))
		}
	}
}

// Before there is a plan no rule is missed: what goes on then goes on without any
// table, too.
func TestWithoutAPlanTablesAreNoMatter(t *testing.T) {
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	whole := slices.DeleteFunc(all, func(p packets.Packet) bool { return (frame{b: p.Frame}).truncated() })
	r := newScapyRig(t, "r6")
	r.must(r.apply(nil))
	type done struct {
		verdict, leaves uint32
		dropped         string
	}
	run := func() (out []done) {
		for _, p := range whole {
			r.must(r.in(func() error {
				in, err := r.runTC(frame{port: p.Interface.Name, b: p.Frame})
				if err != nil {
					return err
				}
				leaves, err := r.runLeave(frame{b: p.Frame}, oracle.Departure{From: oracle.FromElsewhere})
				if err != nil {
					return err
				}
				m, err := r.counted()
				out = append(out, done{in.verdict, leaves.verdict, fmt.Sprint(m.dropped)})
				return err
			}))
		}
		return out
	}
	with := run()
	for use := range uint32(abi.MatchUses) {
		r.must(r.g.maps[tables.MapMatch].Delete(use))
	}
	passed := 0
	for i, got := range run() {
		if got != with[i] {
			t.Errorf("%s: %+v, with tables %+v", whole[i].Name, got, with[i])
		}
		if got.verdict == tcPass {
			passed++
		}
	}
	if passed == 0 || passed == len(whole) {
		t.Errorf("%d of %d packets pass; want some of them", passed, len(whole))
	}
}

// The set of ordered rules is missed like a table of prefixes, once it is known to
// be there: while a plan with rules comes or goes there may be none yet, or none any
// more.
func TestWithoutItsSetOfRulesANodeRefuses(t *testing.T) {
	type run = func(*rig, packets.Packet) (outcome, error)
	fromElsewhere, own := leaves(object.EdgeOutTC, oracle.FromElsewhere), leaves(object.CoreOutTC, oracle.FromNode)
	rigs := map[string]*rig{"r4": newScapyRig(t, "r4"), "r5": newScapyRig(t, "r5")}
	for _, r := range rigs {
		r.must(r.apply(changed(r.node.Node, takesOwn)))
	}
	for _, c := range []struct {
		node, packet string
		run          run
		xdp          bool   // it would have taken the packet
		without      uint32 // what becomes of it where there may be no set
	}{
		{"r4", "rule-dport-443", (*rig).comes, true, tcPass},
		{"r4", "rule-dport-442", (*rig).comes, false, tcPass},
		{"r4", "rule-dport-443", own, false, tcPass},
		{"r5", "rule-dport-443-plain", (*rig).comes, false, tcPass},
		{"r5", "rule-dport-442-plain", (*rig).comes, false, tcPass},
		{"r5", "rule-dport-443-proven", (*rig).comes, true, tcDrop}, // wrong-chain
		{"r5", "rule-dport-443-plain", fromElsewhere, false, tcPass},
	} {
		r := rigs[c.node]
		p, err := packets.Load(c.packet)
		r.must(err)
		node, err := r.g.node()
		r.must(err)
		set, err := r.openRules()
		r.must(err)
		for state, want := range map[abi.RulesState]uint32{abi.RulesStateThere: tcDrop, abi.RulesStateMaybe: c.without} {
			node.Rules = uint32(state)
			r.must(errors.Join(r.g.maps[tables.MapRules].Put(uint32(0), set), r.g.setNode(node), r.setNumbers(1), r.forget()))
			if c.xdp {
				r.must(r.in(func() error { return r.learned(p) }))
			}
			r.must(errors.Join(r.forget(), r.g.maps[tables.MapRules].Delete(uint32(0))))
			_, err := r.counted()
			r.must(err)
			var got outcome
			r.must(r.in(func() (err error) {
				got, err = c.run(r, p)
				return err
			}))
			m, err := r.counted()
			r.must(err)
			missed := slices.Equal(m.dropped, []string{"RULES_MISSING_BUG"})
			if got.verdict != want || missed != (state == abi.RulesStateThere) {
				t.Errorf("%s: %s, rules %s: verdict %d, refused for %v; want verdict %d", c.node, c.packet, state, int32(got.verdict), m.dropped, int32(want))
			}
		}
		node.Rules = uint32(abi.RulesStateThere)
		r.must(errors.Join(r.g.maps[tables.MapRules].Put(uint32(0), set), set.Close(), r.g.setNode(node)))
	}
}

// openRules opens the set of rules in force.
func (r *rig) openRules() (*ebpf.Map, error) {
	var id ebpf.MapID
	if err := r.g.maps[tables.MapRules].Lookup(uint32(0), &id); err != nil {
		return nil, err
	}
	return ebpf.NewMapFromID(id)
}
