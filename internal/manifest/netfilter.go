package manifest

import (
	"maps"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/model"
)

// netfilter reports whether the function is known to be of this kind.
func (f *function) netfilter() bool { return f.kind.ok && f.kind.value == model.KindNetfilter }

func (f *function) namespaceName() string {
	if f.namespace.given() {
		return f.namespace.value
	}
	return model.NamespaceOwn
}

// inNode reports whether the rules run in the node's own network namespace.
func (f *function) inNode() bool { return f.namespaceName() == model.NamespaceNode }

// netfilterModel is what the file, of this name, says of a function of that kind.
func (f *function) netfilterModel(file string) model.Netfilter {
	if !f.netfilter() {
		return model.Netfilter{}
	}
	n := model.Netfilter{
		Namespace: f.namespaceName(),
		Zones:     f.zones.value,
		Bypass:    f.bypass.value,
		Rules:     f.rules.value,
		RulesFile: f.rulesFile.value,
	}
	if f.rules.given() {
		n.RulesAt = f.rules.source
		n.RulesAt.File = file
	}
	for name, v := range f.arguments.values {
		if n.Arguments == nil {
			n.Arguments = map[string]uint32{}
		}
		n.Arguments[name] = v.value
	}
	for _, a := range f.addresses {
		n.Addresses = append(n.Addresses, a.value)
	}
	return n
}

// checkNetfilter holds the rules for a function's own settings. What nft says of its
// rules is another's matter.
func (c *checker) checkNetfilter(f *function) {
	c.checkRulesOnce(f)
	if f.zones.value && len(f.arguments.values) == 0 {
		c.problemf(f.zones.at, "zones by argument need arguments, and the function has none; add arguments, or leave zones out")
	}
	if f.bypass.value {
		if err := model.CheckBypass(f.zones.value, f.rewrites.value); err != nil {
			c.problemf(f.bypass.at, "established %v", err)
		}
		if v, taken := f.arguments.values[model.BypassVariable]; taken {
			c.problemf(v.at, "%q is the conntrack mark of bypass: established; give the argument another name", model.BypassVariable)
		}
		if !f.rulesFile.given() && !strings.Contains(f.rules.value, "$"+model.BypassVariable) {
			c.problemf(f.bypass.at, "no rule selects flows that bypass the function; add one such as: ct state established ct mark set $%s accept", model.BypassVariable)
		}
	}
	for i, a := range f.addresses {
		switch {
		case i > 1:
			c.problemf(a.at, "a third address; expect one of IPv6, one of IPv4")
		case f.namespaceName() != model.NamespaceOwn:
			c.problemf(a.at, "only a namespace that the agent makes (own) gets an address; add this one in namespace %s yourself", f.namespaceName())
		case a.ok && c.file.block.ok && c.file.block.value.Contains(a.value):
			c.problemf(a.at, "%q is within the SID block %s; an address is outside", a.value, c.file.block.value)
		case i == 1 && a.ok && f.addresses[0].ok && a.value.Is4() == f.addresses[0].value.Is4():
			c.problemf(a.at, "two addresses of one version of IP; expect one of each")
		}
	}
}

func (c *checker) checkRulesOnce(f *function) {
	if f.rules.given() && f.rulesFile.given() {
		c.problemf(f.rulesFile.at, "the rules are given twice; give rules or rules-file")
	}
}

// checkArgument holds that a chain's argument is one of the function's. It tells
// whether it could be found.
func (c *checker) checkArgument(ch *chain, a argument) bool {
	function := ch.functions.value[a.of]
	f := c.functions[function.value]
	if !function.ok || f == nil || !f.kind.ok {
		return false
	}
	ok := true
	names := []item[string]{a.forward}
	if a.reverse.at != a.forward.at {
		names = append(names, a.reverse)
	}
	for _, name := range names {
		if !name.ok {
			ok = ok && !name.given()
			continue
		}
		if !f.netfilter() {
			c.problemf(name.at, "%q is of kind %s, and only functions of kind netfilter take an argument", function.value, f.kind.value)
			return false
		}
		if f.plain() {
			c.problemf(name.at, "%q is intrusive, and the connections through it have no argument; leave it out", function.value)
			return false
		}
		if _, known := f.arguments.values[name.value]; known {
			continue
		}
		ok = false
		if known := slices.Sorted(maps.Keys(f.arguments.values)); len(known) > 0 {
			c.problemf(name.at, "%s is not an argument of %s; expect %s", quote(name.value), function.value, oneOf(known))
		} else {
			c.problemf(name.at, "%s is not an argument of %s, which has none; add it there, as in arguments: {%s: 1}", quote(name.value), function.value, name.value)
		}
	}
	return ok
}
