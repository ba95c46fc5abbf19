package host

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// LocalTable is the routing table of a namespace's own addresses, which the kernel looks
// into first unless its rule is deleted.
const LocalTable = unix.RT_TABLE_LOCAL

// MainTable is the routing table of all other routes.
const MainTable = unix.RT_TABLE_MAIN

// Rule is a rule of policy routing (ip-rule(8)): which table packets look into.
type Rule struct {
	IPv4     bool   // otherwise IPv6
	Priority int    // rules are tried from the lowest on
	Input    string // only packets that come in by this interface; "": all
	Table    int

	Destination netip.Prefix // only packets to it; zero: to all
	// Only packets from and to these ports of TCP and UDP, in host byte order; 0: all.
	SourcePort, DestinationPort uint16
}

// AddRule adds a rule. It is no error if there is one already.
func (n *Net) AddRule(r Rule) error {
	if err := n.h.RuleAdd(r.netlink()); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add rule %d in %s: %w", r.Priority, n.ns, permission(err))
	}
	return nil
}

// DeleteRule removes a rule. It is no error if there is none.
func (n *Net) DeleteRule(r Rule) error {
	if err := n.h.RuleDel(r.netlink()); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EAFNOSUPPORT) {
		return fmt.Errorf("delete rule %d in %s: %w", r.Priority, n.ns, permission(err))
	}
	return nil
}

// HasRule reports whether a rule is there.
func (n *Net) HasRule(r Rule) (bool, error) {
	want := r.netlink()
	list, err := n.h.RuleList(want.Family)
	if err != nil {
		return false, fmt.Errorf("list rules in %s: %w", n.ns, permission(err))
	}
	same := func(a, b *netlink.RulePortRange) bool {
		return a == nil && b == nil || a != nil && b != nil && *a == *b
	}
	return slices.ContainsFunc(list, func(have netlink.Rule) bool {
		dst, _ := prefixOf(have.Dst)
		return have.Priority == r.Priority && have.IifName == r.Input && have.Table == r.Table && dst == r.Destination &&
			same(have.Sport, want.Sport) && same(have.Dport, want.Dport)
	}), nil
}

func (r Rule) netlink() *netlink.Rule {
	out := netlink.NewRule()
	out.Family = netlink.FAMILY_V6
	if r.IPv4 {
		out.Family = netlink.FAMILY_V4
	}
	out.Priority, out.IifName, out.Table = r.Priority, r.Input, r.Table
	if r.Destination.IsValid() {
		out.Dst = ipNet(r.Destination)
	}
	if p := r.SourcePort; p != 0 {
		out.Sport = netlink.NewRulePortRange(p, p)
	}
	if p := r.DestinationPort; p != 0 {
		out.Dport = netlink.NewRulePortRange(p, p)
	}
	return out
}
