package model

import (
	"strings"
	"testing"
)

// Whatever changes what rules decide changes the mark of flows that they were done with.
func TestOtherRulesHaveAnotherMark(t *testing.T) {
	n := func(change func(*Netfilter)) Netfilter {
		n := Netfilter{Namespace: NamespaceOwn, Bypass: true, Rules: "chain c { ct mark set $bypass; }", Arguments: map[string]uint32{"guest": 1, "staff": 2}}
		if change != nil {
			change(&n)
		}
		return n
	}
	seen := map[uint32]string{n(nil).BypassMark("fw"): "its own", n(nil).BypassMark("dpi"): "another function's"}
	for what, change := range map[string]func(*Netfilter){
		"rules":              func(n *Netfilter) { n.Rules += " " },
		"argument's value":   func(n *Netfilter) { n.Arguments["guest"] = 3 },
		"argument's name":    func(n *Netfilter) { delete(n.Arguments, "guest"); n.Arguments["guests"] = 1 },
		"exchange of values": func(n *Netfilter) { n.Arguments["guest"], n.Arguments["staff"] = 2, 1 },
	} {
		m := n(change).BypassMark("fw")
		if other, twice := seen[m]; twice || m == 0 {
			t.Errorf("with another %s the mark is %#x, which is 0 or that of %q", what, m, other)
		}
		seen[m] = what
	}
	if len(seen) != 6 {
		t.Errorf("%d marks: %v; want 6", len(seen), seen)
	}
	if n(nil).BypassMark("fw") != n(nil).BypassMark("fw") {
		t.Error("the same rules have another mark when asked again")
	}
	if m := n(func(n *Netfilter) { n.Bypass = false }).BypassMark("fw"); m != 0 {
		t.Errorf("without a bypass the mark is %#x", m)
	}
}

func TestBypassGoesWithItsRulesAlone(t *testing.T) {
	good := Netfilter{Namespace: NamespaceOwn, Bypass: true, Rules: "chain c { ct mark set $bypass; }"}
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Netfilter){
		"no rule selects": func(n *Netfilter) { n.Rules = "chain c { accept; }" },
		"zones: argument": func(n *Netfilter) { n.Zones, n.Arguments = true, map[string]uint32{"x": 1} },
		"another name":    func(n *Netfilter) { n.Arguments = map[string]uint32{"bypass": 1} },
	} {
		n := good
		change(&n)
		if err := n.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v; want an error with %q", err, want)
		}
	}
	if err := CheckBypass(false, true); err == nil || !strings.Contains(err.Error(), "rewrites: true") {
		t.Errorf("with rewrites: %v", err)
	}
}
