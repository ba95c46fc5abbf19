package netfilter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/host"
)

// Load makes the rulesets of a namespace's functions its tables, each in one
// transaction: every packet meets either all of the old rules or all of the new ones.
// Named counters and quotas keep their values, dynamic sets their elements, as long as
// they keep name, kind and (sets) type.
//
// A ruleset that cannot be loaded leaves the function's old one in force and does not
// keep the others from being loaded; the errors are joined, each an *Error, a
// *NotCheckedError, or one about nft. Tables of functions that are not given stay; see
// Unload. One process at a time may load into a namespace.
func Load(ctx context.Context, ns *host.NetNS, sets ...Ruleset) error {
	var errs []error
	for _, s := range sets {
		if err := load(ctx, ns, s, sets); err != nil {
			errs = append(errs, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// load loads one ruleset, with the shared table for all that the namespace has.
func load(ctx context.Context, ns *host.NetNS, s Ruleset, all []Ruleset) error {
	tried, err := rehearse(ctx, s, all)
	if err != nil {
		return err
	}
	marks, zones, err := sharedOf(all)
	if err != nil {
		return s.wrong(err.Error())
	}
	failed := func(err error) error { return fmt.Errorf("load rules of function %s into %s: %w", s.Function, ns, err) }
	shared, err := list(ctx, ns, sharedTable)
	if err != nil {
		return failed(err)
	}
	function, err := list(ctx, ns, s.table())
	if err != nil {
		return failed(err)
	}
	var t script
	s.defines(&t)
	t.clear(sharedTable, shared, tried.shared)
	t.table(sharedTable, sharedBody(marks, zones))
	t.clear(s.table(), function, tried.function)
	s.body(&t)
	err = t.run(ctx, ns)
	var refused *refusal
	if errors.As(err, &refused) && refused.aboutRules() {
		return failed(s.explain(refused))
	}
	if err != nil {
		return failed(err)
	}
	return nil
}

// Unload deletes the tables of functions. With no names it deletes all tables of
// waystamp. What is not there is no error.
func Unload(ctx context.Context, ns *host.NetNS, functions ...string) error {
	text, err := nft(ctx, ns, "", "list", "tables", "inet")
	if err != nil {
		return fmt.Errorf("list tables in %s: %w", ns, err)
	}
	var t script
	for line := range strings.Lines(text) {
		table, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "table inet ")
		function, ours := strings.CutPrefix(table, tablePrefix)
		switch {
		case !ok:
		case len(functions) == 0 && (ours || table == sharedTable), ours && slices.Contains(functions, function):
			t.linef("delete table inet %s", table)
		}
	}
	if len(t.origins) == 0 {
		return nil
	}
	if err := t.run(ctx, ns); err != nil {
		return fmt.Errorf("delete tables in %s: %w", ns, err)
	}
	return nil
}

// Counter is what netfilter has counted.
type Counter struct {
	Packets, Bytes uint64 // bytes from the network header on
}

// Counters is what a function's tables have counted.
type Counters struct {
	Named map[string]Counter // the rules' named counters

	// Arguments counts the packets of each mark as they come in (prerouting), before
	// the function's rules. It is the whole namespace's.
	Arguments map[uint32]Counter
}

// ReadCounters reads the counters of a function in a namespace. The error is
// ErrNotLoaded if the function has no rules there.
func ReadCounters(ctx context.Context, ns *host.NetNS, function string) (Counters, error) {
	out := Counters{Named: map[string]Counter{}, Arguments: map[uint32]Counter{}}
	failed := func(err error) (Counters, error) {
		return Counters{}, fmt.Errorf("read counters of function %s in %s: %w", function, ns, err)
	}
	have, err := list(ctx, ns, TableOf(function))
	if err != nil {
		return failed(err)
	}
	if have == nil {
		return failed(ErrNotLoaded)
	}
	text, err := nft(ctx, ns, "", "--json", "list", "counters", "table", "inet", TableOf(function))
	if err == nil {
		err = decode(text, func(o object) {
			if c := o.Counter; c != nil {
				out.Named[c.Name] = Counter{c.Packets, c.Bytes}
			}
		})
	}
	if err != nil {
		return failed(err)
	}
	shared, err := list(ctx, ns, sharedTable)
	if err != nil {
		return failed(err)
	}
	if !slices.ContainsFunc(shared, func(d declaration) bool { return d.name == argumentSet }) {
		return out, nil
	}
	text, err = nft(ctx, ns, "", "--json", "list", "set", "inet", sharedTable, argumentSet)
	if err == nil {
		err = decode(text, func(o object) {
			if o.Set == nil {
				return
			}
			for _, e := range o.Set.Elements {
				out.Arguments[e.Element.Value] = Counter{e.Element.Counter.Packets, e.Element.Counter.Bytes}
			}
		})
	}
	if err != nil {
		return failed(err)
	}
	return out, nil
}

// ErrNotLoaded means that a function has no rules in a namespace.
var ErrNotLoaded = errors.New("its rules are not loaded")

// object is an entry of nft's JSON (libnftables-json(5)).
type object struct {
	Counter *struct {
		Name    string `json:"name"`
		Packets uint64 `json:"packets"`
		Bytes   uint64 `json:"bytes"`
	} `json:"counter"`
	Set *struct {
		Elements []struct {
			Element struct {
				Value   uint32 `json:"val"`
				Counter struct {
					Packets uint64 `json:"packets"`
					Bytes   uint64 `json:"bytes"`
				} `json:"counter"`
			} `json:"elem"`
		} `json:"elem"`
	} `json:"set"`
}

func decode(text string, visit func(object)) error {
	var reply struct {
		Objects []object `json:"nftables"`
	}
	if err := json.Unmarshal([]byte(text), &reply); err != nil {
		return fmt.Errorf("nft's JSON is not understood: %w", err)
	}
	for _, o := range reply.Objects {
		visit(o)
	}
	return nil
}
