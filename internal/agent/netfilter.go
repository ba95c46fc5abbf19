package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/netfilter"
	"github.com/waystamp/waystamp/internal/plan"
)

// packetFilter has the operations of internal/netfilter that an agent uses. A namespace without
// a name is the node's own.
type packetFilter interface {
	Ensure(ctx context.Context, n netfilter.Namespace) (netfilter.State, error)
	Load(ctx context.Context, n netfilter.Namespace, sets ...netfilter.Ruleset) error
	Counters(ctx context.Context, n netfilter.Namespace, function string) (netfilter.Counters, error)
	Unload(ctx context.Context, n netfilter.Namespace, functions ...string) error
	Remove(ctx context.Context, n netfilter.Namespace) error
}

// kernelFilter is the packet filter of the kernel.
type kernelFilter struct{ node *host.Net }

// in runs f in the network namespace of n.
func (k kernelFilter) in(n netfilter.Namespace, f func(*host.NetNS) error) (err error) {
	if n.Name == "" {
		return f(k.node.NetNS())
	}
	ns, err := n.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	return f(ns)
}

func (k kernelFilter) Ensure(ctx context.Context, n netfilter.Namespace) (netfilter.State, error) {
	n.Node = k.node.NetNS()
	return n.Ensure(ctx)
}

// Load lets rules name the interfaces that are there.
func (k kernelFilter) Load(ctx context.Context, n netfilter.Namespace, sets ...netfilter.Ruleset) error {
	return k.in(n, func(ns *host.NetNS) error {
		names, err := interfacesOf(ns)
		if err != nil {
			return err
		}
		for i := range sets {
			sets[i].Interfaces = names
		}
		return netfilter.Load(ctx, ns, sets...)
	})
}

func interfacesOf(ns *host.NetNS) (names []string, err error) {
	net, err := host.Open(ns)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, net.Close()) }()
	links, err := net.Links()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		names = append(names, l.Name)
	}
	return names, nil
}

func (k kernelFilter) Counters(ctx context.Context, n netfilter.Namespace, function string) (c netfilter.Counters, err error) {
	err = k.in(n, func(ns *host.NetNS) error {
		c, err = netfilter.ReadCounters(ctx, ns, function)
		return err
	})
	return c, err
}

func (k kernelFilter) Unload(ctx context.Context, n netfilter.Namespace, functions ...string) error {
	return k.in(n, func(ns *host.NetNS) error { return netfilter.Unload(ctx, ns, functions...) })
}

func (k kernelFilter) Remove(ctx context.Context, n netfilter.Namespace) error {
	n.Node = k.node.NetNS()
	return n.Remove(ctx)
}

// filterTimeout bounds the time of nft and the kernel for all functions of a node.
const filterTimeout = time.Minute

// filterSite is where a function of kind netfilter is, as the state file keeps it.
type filterSite struct {
	Function  string `json:"function"`
	Namespace string `json:"namespace,omitempty"` // "": the node's own
	Existing  bool   `json:"existing,omitempty"`  // kept by another program
	To        string `json:"to,omitempty"`
	From      string `json:"from,omitempty"`
}

// siteOf is where an instance's function runs its rules.
func siteOf(instance string, p plan.Proxy) filterSite {
	s := filterSite{Function: p.Function, To: p.To, From: p.From}
	if p.Stream != nil {
		s.To, s.From = p.Stream.Attached.To, p.Stream.Attached.From
	}
	switch p.Netfilter.Namespace {
	case model.NamespaceNode:
	case model.NamespaceOwn:
		s.Namespace = "waystamp-" + instance + "-" + p.Function
	default:
		s.Namespace, s.Existing = p.Netfilter.Namespace, true
	}
	return s
}

func sitesOf(instance string, n plan.Node) (sites []filterSite) {
	for _, p := range n.Proxies {
		if p.Netfilter != nil {
			sites = append(sites, siteOf(instance, p))
		}
	}
	return sites
}

// namespace is where the rules run. In another program's namespace the interfaces of each
// function have names of their own.
func (s filterSite) namespace() netfilter.Namespace {
	n := netfilter.Namespace{Name: s.Namespace, Existing: s.Existing, To: s.To, From: s.From, MTU: model.NetfilterMTU}
	if s.Existing {
		n.In, n.Out = s.To, s.From
	}
	return n
}

// filters are the functions of kind netfilter of the plan that is being put in force.
type filters struct {
	withheld map[string]error // functions that get no packets
	problems []string         // of those that do
}

// ensureFilters makes the namespaces and loads the rules of a plan's functions. A new function
// gets no packets before its rules are in force; a function whose new rules are refused keeps
// the old ones.
func (a *agent) ensureFilters(n plan.Node) filters {
	ctx, cancel := context.WithTimeout(context.Background(), filterTimeout)
	defer cancel()
	out := filters{withheld: map[string]error{}}
	var sites []netfilter.Namespace
	sets := map[string][]netfilter.Ruleset{} // by namespace
	for _, p := range n.Proxies {
		if p.Netfilter == nil {
			continue
		}
		ns := siteOf(a.cfg.Instance, p).namespace()
		ns.Plain = p.Stream != nil
		ns.Addresses, ns.Bypass = p.Netfilter.Addresses, p.Netfilter.Bypass
		if ns.Name != "" || ns.Bypass {
			state, err := a.filter.Ensure(ctx, ns)
			if err != nil {
				out.withheld[p.Function] = err
				continue
			}
			for _, what := range state.Changed {
				a.cfg.Log.Debug("a function's namespace was changed", "function", p.Function, "change", what)
			}
			for _, what := range state.Missing {
				out.problems = append(out.problems, fmt.Sprintf("function %s: %s", p.Function, what))
			}
		}
		if _, known := sets[ns.Name]; !known {
			sites = append(sites, ns)
		}
		sets[ns.Name] = append(sets[ns.Name], rulesetOf(p))
	}
	for _, ns := range sites {
		a.loadFilters(ctx, ns, sets[ns.Name], &out)
	}
	return out
}

func rulesetOf(p plan.Proxy) netfilter.Ruleset {
	return netfilter.Ruleset{
		Function:  p.Function,
		Text:      p.Netfilter.Rules,
		Arguments: p.Netfilter.Arguments,
		Zones:     p.Netfilter.Groups,
		Bypass:    p.Netfilter.BypassMark(p.Function),
	}
}

// loadFilters loads the missing rules of the functions of a namespace, and removes those of
// functions without rules.
func (a *agent) loadFilters(ctx context.Context, ns netfilter.Namespace, all []netfilter.Ruleset, out *filters) {
	var sets []netfilter.Ruleset
	var without []string
	for _, s := range all {
		if s.Text != "" || len(s.Arguments) > 0 {
			sets = append(sets, s)
		} else if a.areLoaded(ctx, ns, []netfilter.Ruleset{s}) {
			without = append(without, s.Function)
		}
	}
	if without != nil {
		delete(a.loaded, ns.Name) // the arguments that they share with others
		functions := without
		if sets == nil {
			functions = nil // and the table that they share
		}
		if err := a.filter.Unload(ctx, ns, functions...); err != nil {
			out.problems = append(out.problems, fmt.Sprintf("rules of function %s could not be removed, and stay in force although the plan has none: %v", strings.Join(without, ", "), err))
		}
	}
	if len(sets) == 0 || slices.EqualFunc(a.loaded[ns.Name], sets, sameRuleset) && a.areLoaded(ctx, ns, sets) {
		return
	}
	err := a.filter.Load(ctx, ns, slices.Clone(sets)...)
	if err == nil {
		a.loaded[ns.Name] = sets
		return
	}
	delete(a.loaded, ns.Name)
	for _, s := range sets {
		why := aboutFunction(err, s.Function)
		if why == nil {
			continue
		}
		if a.areLoaded(ctx, ns, []netfilter.Ruleset{s}) {
			out.problems = append(out.problems, fmt.Sprintf("the previous rules stay in force: %v", why))
		} else {
			out.withheld[s.Function] = why
		}
	}
}

// areLoaded reports whether the tables of all these rulesets exist.
func (a *agent) areLoaded(ctx context.Context, ns netfilter.Namespace, sets []netfilter.Ruleset) bool {
	return !slices.ContainsFunc(sets, func(s netfilter.Ruleset) bool {
		_, err := a.filter.Counters(ctx, ns, s.Function)
		return err != nil
	})
}

func sameRuleset(a, b netfilter.Ruleset) bool {
	return a.Function == b.Function && a.Text == b.Text && a.Bypass == b.Bypass && maps.Equal(a.Arguments, b.Arguments) &&
		slices.EqualFunc(a.Zones, b.Zones, slices.Equal)
}

// aboutFunction is the part of an error of Load that is about a function, or all of it
// if it names none; nil: it is about others.
func aboutFunction(err error, function string) error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		joined = joinedErrors{err}
	}
	var out error
	for _, e := range joined.Unwrap() {
		named := ""
		if wrong, ok := errors.AsType[*netfilter.Error](e); ok {
			named = wrong.Function
		} else if unknown, ok := errors.AsType[*netfilter.NotCheckedError](e); ok {
			named = unknown.Function
		}
		if named == "" || named == function {
			out = errors.Join(out, e)
		}
	}
	return out
}

type joinedErrors []error

func (j joinedErrors) Unwrap() []error { return j }

// removeOldFilters removes the rules and namespaces of functions that are not in the plan in
// force.
func (a *agent) removeOldFilters() error {
	s := a.state.get()
	stay := sitesOf(a.cfg.Instance, *a.plan)
	gone := slices.DeleteFunc(slices.Clone(s.Filters), func(f filterSite) bool { return slices.Contains(stay, f) })
	if len(gone) == 0 {
		return nil
	}
	if err := a.removeFilters(gone, stay); err != nil {
		return err
	}
	s.Filters = stay
	return a.state.put(s)
}

// removeFilters removes the rules and namespaces of functions at gone, except those that
// functions at stay use. No packets may go to these functions any more.
func (a *agent) removeFilters(gone, stay []filterSite) error {
	var errs []error
	for _, s := range gone {
		if slices.Contains(stay, s) {
			continue
		}
		delete(a.loaded, s.Namespace)
		errs = append(errs, removeFilter(a.filter, s, stay))
	}
	return errors.Join(errs...)
}

func removeFilter(f packetFilter, s filterSite, stay []filterSite) error {
	ctx, cancel := context.WithTimeout(context.Background(), filterTimeout)
	defer cancel()
	var errs []error
	if s.Namespace == "" || s.Existing {
		functions := []string{s.Function}
		if !slices.ContainsFunc(stay, func(o filterSite) bool { return o.Namespace == s.Namespace }) {
			functions = nil // and the table that they share
		}
		if err := f.Unload(ctx, s.namespace(), functions...); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the rules of function %s: %w", s.Function, err))
		}
	}
	if s.Namespace != "" {
		ns := s.namespace()
		if slices.ContainsFunc(stay, func(o filterSite) bool { return o.To == s.To }) {
			ns.To, ns.From = "", "" // they lead to where the function is now
		}
		errs = append(errs, f.Remove(ctx, ns))
	}
	return errors.Join(errs...)
}

// rulesOf reads the counters of the rules of the plan's functions.
func (a *agent) rulesOf(ctx context.Context, n *plan.Node) map[string]*api.Rules {
	out := map[string]*api.Rules{}
	if n == nil {
		return out
	}
	for _, p := range n.Proxies {
		if p.Netfilter == nil {
			continue
		}
		s := siteOf(a.cfg.Instance, p)
		r := &api.Rules{Namespace: s.Namespace, Counters: []api.RuleCounter{}, Arguments: []api.RuleCounter{}}
		out[p.Function] = r
		c, err := a.filter.Counters(ctx, s.namespace(), p.Function)
		if err != nil {
			if p.Netfilter.Rules != "" || len(p.Netfilter.Arguments) > 0 {
				r.Error = err.Error()
			}
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(c.Named)) {
			r.Counters = append(r.Counters, api.RuleCounter{Name: name, Packets: c.Named[name].Packets, Bytes: c.Named[name].Bytes})
		}
		for _, name := range slices.Sorted(maps.Keys(p.Netfilter.Arguments)) {
			v := c.Arguments[p.Netfilter.Arguments[name]]
			r.Arguments = append(r.Arguments, api.RuleCounter{Name: name, Packets: v.Packets, Bytes: v.Bytes})
		}
	}
	return out
}
