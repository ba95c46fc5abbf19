package model

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Netfilter has the settings of the kernel's packet filter as a function of a chain.
type Netfilter struct {
	// Namespace is where the rules run: NamespaceOwn, NamespaceNode, or the name of a network
	// namespace of the node that another program keeps.
	Namespace string
	Arguments map[string]uint32 // packet marks, by the names that rules and chains use
	Zones     bool              // flows of different arguments are tracked apart
	Rules     string            // the body of one nftables table of family inet; may be empty
	// RulesFile is where the rules are, if Rules is not the domain file's own text.
	RulesFile string
	RulesAt   Source
	// Bypass: packets of flows whose conntrack entry has the mark $bypass skip the function; its
	// rules set the mark.
	Bypass    bool
	Addresses []netip.Addr // of a namespace of NamespaceOwn: its ICMP errors come from them
}

// Namespaces with a meaning of their own.
const (
	NamespaceOwn  = "own"  // one that the agent makes and keeps
	NamespaceNode = "node" // the node's
)

// Source is the position of a text in a file, for messages.
type Source struct {
	File   string
	Line   int // of the first line, from 1; 0: not known
	Column int // of each line's first character, from 1
}

// Bounds of functions of kind netfilter.
const (
	ArgumentsMax = 1024    // names of arguments
	RulesMax     = 1 << 20 // bytes of rules
	addressesMax = 2       // one of IPv6, one of IPv4
)

// NetfilterMTU is the MTU of the links to a function's namespace: every packet that reaches the
// node fits, also one that connection tracking has reassembled.
const NetfilterMTU = MTUMax

// NetfilterDetour is how packets reach a function of kind netfilter and are recognised
// behind it. All but the cache, its lifetime, OnUnknown and Rewrites follows from the
// function's name and namespace.
func NetfilterDetour(function, namespace string) Proxy {
	p := Proxy{
		Recognise: RecogniseMetadata,
		Segments:  SegmentsKeep,
		Cache:     CacheDefault,
		Lifetime:  LifetimeDefault,
	}
	if namespace == NamespaceNode {
		p.Local = true
		return p
	}
	p.To, p.From = "wsi-"+shortName(function), "wso-"+shortName(function)
	return p
}

// shortName leaves room for a prefix in the name of an interface. Long names keep
// their beginning and get a hash of the whole, and so do names of instances, whose colon no interface may have.
func shortName(name string) string {
	const room, kept = InterfaceNameMax - len("wsi-"), 4
	function, _, instance := strings.Cut(name, ":")
	if len(name) <= room && !instance {
		return name
	}
	h := fnv.New32a()
	h.Write([]byte(name))
	return fmt.Sprintf("%s%07x", function[:min(len(function), kept)], h.Sum32()>>4)
}

// Check checks one function of kind netfilter by itself. Its errors start with the name of the
// setting that breaks a rule.
func (n Netfilter) Check() error {
	if err := CheckNamespace(n.Namespace); err != nil {
		return fmt.Errorf("namespace: %q %w", n.Namespace, err)
	}
	if err := CheckArguments(n.Arguments); err != nil {
		return fmt.Errorf("arguments: %w", err)
	}
	if len(n.Rules) > RulesMax {
		return fmt.Errorf("rules: has %d bytes; a function has at most %d", len(n.Rules), RulesMax)
	}
	for _, a := range n.Addresses {
		if err := CheckFunctionAddress(a); err != nil {
			return fmt.Errorf("address: %q %w", a, err)
		}
	}
	if len(n.Addresses) > addressesMax {
		return fmt.Errorf("address: %d addresses; expect one of IPv6, one of IPv4", len(n.Addresses))
	}
	if len(n.Addresses) == addressesMax && n.Addresses[0].Is4() == n.Addresses[1].Is4() {
		return errors.New("address: two addresses of one version; expect one of IPv6, one of IPv4")
	}
	if n.Namespace != NamespaceOwn && len(n.Addresses) > 0 {
		return errors.New("address: only a namespace that the agent makes (own) gets an address")
	}
	return n.checkBypass()
}

// BypassVariable is the name of the bypass's conntrack mark in rules.
const BypassVariable = "bypass"

func (n Netfilter) checkBypass() error {
	if !n.Bypass {
		return nil
	}
	if err := CheckBypass(n.Zones, false); err != nil {
		return fmt.Errorf("bypass: established %w", err)
	}
	if _, taken := n.Arguments[BypassVariable]; taken {
		return fmt.Errorf("arguments: %q is the conntrack mark of bypass: established; give the argument another name", BypassVariable)
	}
	if !strings.Contains(n.Rules, "$"+BypassVariable) {
		return fmt.Errorf("bypass: no rule selects flows that bypass the function; add one such as: ct state established ct mark set $%s accept", BypassVariable)
	}
	return nil
}

// CheckBypass refuses settings that a bypass cannot be combined with.
func CheckBypass(zones, rewrites bool) error {
	switch {
	case rewrites:
		return errors.New("cannot be combined with rewrites: true: a packet that bypasses the rules is not rewritten; expect none")
	case zones:
		return errors.New("cannot be combined with zones: argument: flows are looked up only in zone 0; expect none")
	}
	return nil
}

// BypassMark is the conntrack mark of flows that bypass a function, never 0; 0 if the function
// has no bypass. It depends on the rules: with changed rules the mark is another one, except by
// a chance of one in 2^32, and all flows go through the function again.
func (n Netfilter) BypassMark(function string) uint32 {
	if !n.Bypass {
		return 0
	}
	h := sha256.New()
	fmt.Fprintf(h, "%q %q", function, n.Rules)
	for _, name := range slices.Sorted(maps.Keys(n.Arguments)) {
		fmt.Fprintf(h, " %s=%d", name, n.Arguments[name])
	}
	return max(1, binary.BigEndian.Uint32(h.Sum(nil)))
}

// OnUnknownDefault is the default action for packets from a function of kind netfilter without a
// kept header. Only the function's chains lead into a namespace of our own.
func OnUnknownDefault(namespace string) OnUnknown {
	if namespace == NamespaceOwn {
		return OnUnknownOriginate
	}
	return OnUnknownDrop
}

// CheckOnUnknown checks that only a function of kind netfilter whose packets come back by
// interfaces of their own begins a chain's path. namespace is "" for other kinds.
func CheckOnUnknown(u OnUnknown, namespace string) error {
	switch {
	case u != OnUnknownOriginate:
		return nil
	case namespace == "":
		return errors.New("is of functions of kind netfilter; expect drop or plain")
	case namespace == NamespaceNode:
		return errors.New("cannot be combined with namespace node, where netfilter also answers packets of no chain; give the function a namespace (own), or expect drop or plain")
	}
	return nil
}

// CheckNamespace checks the name of a network namespace.
func CheckNamespace(s string) error {
	switch {
	case s == "":
		return errors.New("is empty; expect own, node or the name of a namespace (ip netns list)")
	case len(s) > 64:
		return fmt.Errorf("has %d characters; the name of a namespace has at most 64", len(s))
	}
	for i, c := range s {
		alphanumeric := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alphanumeric && (i == 0 || c != '-' && c != '_' && c != '.') {
			return fmt.Errorf("has the character %q; the name of a namespace has letters, digits, hyphens, underscores and dots, and starts with a letter or digit", c)
		}
	}
	return nil
}

// CheckArguments holds the rules for names and values of a function's arguments.
func CheckArguments(arguments map[string]uint32) error {
	if len(arguments) > ArgumentsMax {
		return fmt.Errorf("%d arguments; a function has at most %d", len(arguments), ArgumentsMax)
	}
	names := map[uint32]string{}
	for _, name := range slices.Sorted(maps.Keys(arguments)) {
		if err := CheckArgumentName(name); err != nil {
			return fmt.Errorf("%q %w", name, err)
		}
		value := arguments[name]
		if value == 0 {
			return fmt.Errorf("%s is 0, which stands for no argument; expect 1 to 4294967295", name)
		}
		if other, ok := names[value]; ok {
			return fmt.Errorf("%s and %s are both %d; rules could not distinguish them", other, name, value)
		}
		names[value] = name
	}
	return nil
}

// CheckArgumentName holds the rule for the name of an argument, which is a variable
// in the rules.
func CheckArgumentName(s string) error {
	if len(s) > NameMax {
		return fmt.Errorf("has %d characters; the name of an argument has at most %d", len(s), NameMax)
	}
	for i, c := range s {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || (c < '0' || c > '9') && c != '_') {
			return fmt.Errorf("has the character %q; the name of an argument has letters, digits and underscores, and starts with a letter", c)
		}
	}
	if s == "" {
		return errors.New("is empty")
	}
	return nil
}

// CheckFunctionAddress holds the rule for an address of a function's namespace.
func CheckFunctionAddress(a netip.Addr) error {
	if !a.IsValid() || a.Zone() != "" || a.Is4In6() || !a.IsGlobalUnicast() {
		return errors.New("is not a unicast address that others can reach")
	}
	return nil
}
