package netfilter

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/host"
)

// A table is replaced in place, in one transaction: what is the same before and after
// stays, the rest is deleted and made. Deleting the whole table would be simpler, but
// lose what counters, quotas and dynamic sets hold, and between the old and the new
// base chains there is a moment in which packets meet a new chain before its policy is
// in force. See docs/adr/0047-rulesets-are-replaced-in-place.md.

// listing is a table as nft prints it, without rules, elements and values; nil if
// there is none.
type listing []declaration

// declaration is one thing in a table.
type declaration struct {
	kind string // "chain", "set", "map", "counter", "quota", "ct helper" …
	name string
	body string // of a chain: what makes it a base chain, "" if nothing does
}

// list reads a table.
func list(ctx context.Context, ns *host.NetNS, table string) (listing, error) {
	// Asked for by name, a table that is not there is an error like others.
	tables, err := nft(ctx, ns, "", "list", "tables", "inet")
	if err != nil {
		return nil, fmt.Errorf("list tables in %s: %w", ns, err)
	}
	if !slices.Contains(strings.Split(tables, "\n"), "table inet "+table) {
		return nil, nil
	}
	text, err := nft(ctx, ns, "", "--stateless", "--terse", "list", "table", "inet", table)
	if err != nil {
		return nil, fmt.Errorf("list table %s in %s: %w", table, ns, err)
	}
	return parseListing(text), nil
}

// parseListing reads nft's own layout: what a table has is indented by one tab, and
// what that has by more.
func parseListing(text string) listing {
	out := listing{}
	var now *declaration
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		header, deep := strings.CutPrefix(line, "\t")
		switch {
		case !deep: // the table's own line, and its end
		case now == nil:
			words := strings.Fields(strings.TrimSuffix(header, "{"))
			if !strings.HasSuffix(header, "{") || len(words) < 2 {
				continue // of the table: a comment, flags
			}
			last := len(words) - 1
			now = &declaration{kind: strings.Join(words[:last], " "), name: words[last]}
		case header == "}":
			out = append(out, *now)
			now = nil
		case now.kind != "chain":
			now.body += header + "\n"
		case now.body == "" && strings.HasPrefix(header, "\ttype "):
			now.body = header
		}
	}
	return out
}

// isDynamic tells whether rules change a set's elements.
func (d declaration) isDynamic() bool {
	for line := range strings.Lines(d.body) {
		if flags, ok := strings.CutPrefix(strings.TrimSpace(line), "flags "); ok {
			return slices.Contains(strings.Split(flags, ","), "dynamic")
		}
	}
	return false
}

// refersToOthers tells whether a map's elements may name chains or objects, which
// then could not be deleted.
func (d declaration) refersToOthers() bool {
	for line := range strings.Lines(d.body) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "type ") && !strings.HasPrefix(line, "typeof ") {
			continue
		}
		_, data, found := strings.Cut(line, " : ")
		word, _, _ := strings.Cut(data, " ")
		return found && slices.Contains([]string{"verdict", "counter", "quota", "limit", "ct", "synproxy", "secmark", "tunnel"}, word)
	}
	return d.kind == "map"
}

// stays tells whether something may stay where new is to be. It then has the same
// name and kind, and adding it again changes nothing but a quota's limit.
func (d declaration) stays(new listing) bool {
	return slices.ContainsFunc(new, func(n declaration) bool {
		if n.kind != d.kind || n.name != d.name {
			return false
		}
		switch d.kind {
		case "counter", "quota":
			return true
		case "chain":
			return d.body != "" && n.body == d.body
		case "set", "map":
			return d.isDynamic() && !d.refersToOthers() && n.body == d.body
		}
		return false
	})
}

// clear takes out of a table whatever does not stay when new is added, in an order
// that the kernel takes: who refers to others first.
func (t *script) clear(table string, old, new listing) {
	if old == nil {
		return
	}
	t.linef("flush table inet %s", table)
	order := func(kind string) int {
		switch kind {
		case "set", "map":
			return 0
		case "chain":
			return 1
		}
		return 2
	}
	for pass := range 3 {
		for _, d := range old {
			if order(d.kind) == pass && !d.stays(new) {
				t.linef("delete %s inet %s %s", d.kind, table, d.name)
			}
		}
	}
}
