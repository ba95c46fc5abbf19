package agent

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/netfilter"
	"github.com/waystamp/waystamp/internal/plan"
)

// filter is a function of kind netfilter on r1.
func filter(name, namespace, rules string) model.Function {
	f := model.Function{
		Name: name, Node: "r1", Kind: model.KindNetfilter, Proxy: model.NetfilterDetour(name, namespace),
		Netfilter: model.Netfilter{Namespace: namespace, Rules: rules},
	}
	if rules != "" {
		f.Netfilter.Arguments = map[string]uint32{"guest": 1, "staff": 2}
	}
	return f
}

// filtered is the plan of r1 with these functions in its chain.
func filtered(t *testing.T, functions ...model.Function) plan.Node {
	t.Helper()
	return r1(t, func(d *model.Domain) {
		d.Chains[0].Both = false // so that none ends at r1
		for _, f := range functions {
			d.Functions = append(d.Functions, f)
			d.Chains[0].Functions = append(d.Chains[0].Functions, f.Name)
		}
	})
}

const (
	anyRules   = "chain forward {\n}\n"
	otherRules = "chain forward {\n\taccept\n}\n"
)

// refusedRules is what Load says of rules with a mistake.
func refusedRules(function string) error {
	return &netfilter.Error{Function: function, Problems: []netfilter.Problem{{Line: 3, Column: 2, Message: "syntax error of " + function}}}
}

// reconciled lets the agent reconcile as devices change, until that has led to
// something.
func (s *started) reconciled(what string, f func() bool) {
	s.n.Helper()
	s.eventually(what, func() bool { return s.n.tell(host.ChangeLinks) == nil && f() })
}

// withheldNow are the functions that get no packets.
func (n *node) withheldNow() (names []string) {
	n.set(func() {
		for f := range n.withheld {
			names = append(names, f)
		}
	})
	slices.Sort(names)
	return names
}

// rulesAre checks the rules that are loaded, by namespace and function.
func (n *node) rulesAre(when string, want map[string]string) {
	n.Helper()
	got := map[string]string{}
	n.set(func() {
		for name, s := range n.tables {
			got[name] = s.Text
		}
	})
	if diff := cmp.Diff(want, got); diff != "" {
		n.Errorf("rules %s (-want +got):\n%s", when, diff)
	}
}

// Namespace and rules are there before a packet can be handed over, and whatever a
// function had goes when none can be any more, in each kind of namespace.
func TestFunctionsAreMadeBeforeTheProgramsAndRemovedAfterThem(t *testing.T) {
	for _, c := range []struct {
		namespace        string
		rules            string // where they are
		made, taken      []string
		cutters, without []string
	}{
		{
			namespace: model.NamespaceOwn, rules: "waystamp-test-nf/nf",
			made:  []string{"ensure namespace waystamp-test-nf", "load rules waystamp-test-nf/nf"},
			taken: []string{"remove namespace waystamp-test-nf"},
		},
		{
			namespace: "c1", rules: "c1/nf",
			made:  []string{"ensure namespace c1", "load rules c1/nf"},
			taken: []string{"unload rules c1/[]", "leave namespace c1"},
		},
		{
			namespace: model.NamespaceNode, rules: "/nf",
			made:    []string{"load rules /nf"},
			taken:   []string{"unload rules /[]"},
			cutters: []string{"make cutter wscut0", "make cutter wsback0"},
			without: []string{"remove cutter wscut0", "remove cutter wsback0"},
		},
	} {
		t.Run(c.namespace, func(t *testing.T) {
			n := newNode(t)
			n.write(n.encode(filtered(t)))
			n.start()
			n.taken()
			n.write(n.encode(filtered(t, filter("nf", c.namespace, anyRules))))
			n.log.Wait("the new plan is in force")
			n.same("a new function", slices.Concat(c.cutters, c.made, []string{"apply r1"})...)
			n.rulesAre("of a new function", map[string]string{c.rules: anyRules})
			n.log.Forget()
			n.write(n.encode(filtered(t)))
			n.log.Wait("the new plan is in force")
			n.same("without it", slices.Concat([]string{"apply r1"}, c.without, c.taken)...)
			n.rulesAre("without it", map[string]string{})
		})
	}
}

// A function whose namespace or rules cannot be had is withheld. Its chains are in
// force all the same, and so are other functions; it gets its packets as soon as it can.
func TestFunctionThatCannotBeMadeIsWithheld(t *testing.T) {
	for _, c := range []struct {
		step string
		err  error
		says string
	}{
		{"ensure namespace waystamp-test-nf", netfilter.ErrTaken, "the name is taken"},
		{"load rules waystamp-test-nf/nf", refusedRules("nf"), "syntax error of nf"},
		{"load rules waystamp-test-nf/nf", &netfilter.NotCheckedError{Function: "nf", Err: host.ErrNoNft}, "were not checked: " + host.ErrNoNft.Error()},
	} {
		t.Run(c.says, func(t *testing.T) {
			n := newNode(t)
			n.fail(c.step, c.err)
			n.write(n.encode(filtered(t, filter("nf", model.NamespaceOwn, anyRules), filter("ids", model.NamespaceOwn, anyRules))))
			s := n.start()
			st := s.status()
			if len(st.Problems) != 1 || !strings.Contains(st.Problems[0], "function nf gets no packets: ") || !strings.Contains(st.Problems[0], c.says) || !st.Ready || st.Error != "" {
				t.Errorf("status %+v; want function nf withheld: %s", st, c.says)
			}
			if got := n.withheldNow(); !slices.Equal(got, []string{"nf"}) {
				t.Errorf("withheld are %v", got)
			}
			n.rulesAre("while nf is withheld", map[string]string{"waystamp-test-ids/ids": anyRules})

			n.fail(c.step, nil)
			s.reconciled("a whole plan", func() bool { return len(s.status().Problems) == 0 })
			if got := n.withheldNow(); got != nil {
				t.Errorf("still withheld are %v", got)
			}
			n.rulesAre("of both", map[string]string{"waystamp-test-ids/ids": anyRules, "waystamp-test-nf/nf": anyRules})
		})
	}
}

// The functions of one namespace are loaded together; what is wrong with one is not the
// other's, and what is wrong with neither is both's.
func TestOneFunctionsMistakeWithholdsNoOtherOfItsNamespace(t *testing.T) {
	n := newNode(t)
	n.fail("load rules c1/nf", refusedRules("nf"))
	n.write(n.encode(filtered(t, filter("nf", "c1", anyRules), filter("ids", "c1", anyRules))))
	s := n.start()
	if got := n.withheldNow(); !slices.Equal(got, []string{"nf"}) {
		t.Errorf("withheld are %v, want nf alone", got)
	}
	if st := s.status(); len(st.Problems) != 1 {
		t.Errorf("problems %q, want one of nf", st.Problems)
	}
	n.rulesAre("of the other", map[string]string{"c1/ids": anyRules})
	n.set(func() { clear(n.tables) })
	n.fail("load rules c1/", errors.New("nft was killed"))
	s.reconciled("both withheld", func() bool { return slices.Equal(n.withheldNow(), []string{"ids", "nf"}) })
}

// The state that new rules were refused in is not lost: the old ones stay in force, and
// the function goes on getting packets.
func TestRefusedRulesLeaveTheOldOnesAndTheFunctionAtWork(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(filtered(t, filter("nf", model.NamespaceOwn, anyRules))))
	s := n.start()
	n.fail("load rules", refusedRules("nf"))
	n.write(n.encode(filtered(t, filter("nf", model.NamespaceOwn, otherRules))))
	n.log.Wait("the new plan is in force")
	st := s.status()
	if len(st.Problems) != 1 || !strings.Contains(st.Problems[0], "the previous rules stay in force: ") || !strings.Contains(st.Problems[0], "syntax error of nf") || st.Generation != 2 || st.Error != "" {
		t.Errorf("status %+v; want the new plan in force with the rules before", st)
	}
	if got := n.withheldNow(); got != nil {
		t.Errorf("withheld are %v", got)
	}
	n.rulesAre("after the refusal", map[string]string{"waystamp-test-nf/nf": anyRules})
	n.fail("load rules", nil)
	s.reconciled("a whole plan", func() bool { return len(s.status().Problems) == 0 })
	n.rulesAre("when they are taken", map[string]string{"waystamp-test-nf/nf": otherRules})
}

// What is right is loaded once; what somebody deletes is loaded again.
func TestRulesThatSomebodyDeletesAreLoadedAgain(t *testing.T) {
	for _, namespace := range []string{model.NamespaceOwn, "c1", model.NamespaceNode} {
		t.Run(namespace, func(t *testing.T) {
			n := newNode(t)
			n.write(n.encode(filtered(t, filter("nf", namespace, anyRules), filter("ids", namespace, otherRules))))
			s := n.start()
			whole := map[string]string{}
			n.set(func() {
				for name, r := range n.tables {
					whole[name] = r.Text
				}
			})
			n.taken()
			s.reconciled("two reconciliations", func() bool { return len(n.reconciliations()) >= 2 })
			if steps := n.taken(); slices.ContainsFunc(steps, func(s string) bool { return strings.HasPrefix(s, "load") }) {
				t.Errorf("rules that are there are loaded again: %q", steps)
			}
			n.set(func() {
				for name := range n.tables {
					delete(n.tables, name)
					break // one of them
				}
			})
			s.reconciled("all rules", func() bool {
				var all int
				n.set(func() { all = len(n.tables) })
				return all == len(whole)
			})
			n.rulesAre("again", whole)
		})
	}
}

// What a namespace of somebody else lacks is a problem that others can mend.
func TestWhatANamespaceLacksIsTold(t *testing.T) {
	n := newNode(t)
	n.lacks = []string{"namespace c1: it does not forward IPv6"}
	n.write(n.encode(filtered(t, filter("nf", "c1", anyRules))))
	s := n.start()
	if st := s.status(); !slices.Equal(st.Problems, []string{"function nf: namespace c1: it does not forward IPv6"}) {
		t.Errorf("problems %q", st.Problems)
	}
	if got := n.withheldNow(); got != nil {
		t.Errorf("withheld are %v", got)
	}
	n.set(func() { n.lacks = nil })
	s.reconciled("a whole plan", func() bool { return len(s.status().Problems) == 0 })
}

// A function without rules has none, also if it had some before.
func TestRulesThatAPlanHasNoMoreAreRemoved(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(filtered(t, filter("nf", "c1", anyRules), filter("ids", "c1", anyRules))))
	s := n.start()
	n.taken()
	n.write(n.encode(filtered(t, filter("nf", "c1", ""), filter("ids", "c1", anyRules))))
	n.log.Wait("the new plan is in force")
	n.same("one without rules", "ensure namespace c1", "ensure namespace c1", "unload rules c1/[nf]", "load rules c1/ids", "apply r1")
	n.rulesAre("of the other", map[string]string{"c1/ids": anyRules})

	n.log.Forget()
	n.fail("unload", errors.New("nft was killed"))
	n.write(n.encode(filtered(t, filter("nf", "c1", ""), filter("ids", "c1", ""))))
	n.log.Wait("the new plan is in force")
	if st := s.status(); len(st.Problems) != 1 || !strings.Contains(st.Problems[0], "rules of function ids could not be removed, and stay in force although the plan has none: nft was killed") {
		t.Errorf("status %+v", st)
	}
	n.fail("unload", nil)
	s.reconciled("a whole plan", func() bool { return len(s.status().Problems) == 0 })
	n.rulesAre("of none", map[string]string{})
}

// Of two functions in one namespace one goes: the other keeps its rules, and the table
// that they share is made anew without the arguments of the one that is gone.
func TestFunctionThatGoesLeavesTheOthersOfItsNamespace(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(filtered(t, filter("nf", "c1", anyRules), filter("ids", "c1", otherRules))))
	s := n.start()
	n.taken()
	n.write(n.encode(filtered(t, filter("ids", "c1", otherRules))))
	n.log.Wait("the new plan is in force")
	n.same("without nf", "ensure namespace c1", "load rules c1/ids", "apply r1", "unload rules c1/[nf]", "leave namespace c1")
	n.rulesAre("of the other", map[string]string{"c1/ids": otherRules})
	s.reconciled("a reconciliation", func() bool { return len(n.reconciliations()) > 0 })
	n.rulesAre("of the other, later", map[string]string{"c1/ids": otherRules})
}

// The interfaces of a function have the same names wherever it is: those that lead to
// its new namespace must not go with the old one.
func TestFunctionThatMovesKeepsItsInterfaces(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(filtered(t, filter("nf", model.NamespaceOwn, anyRules))))
	n.start()
	n.taken()
	for _, c := range []struct {
		to   string
		want []string
	}{
		{"c1", []string{"ensure namespace c1", "load rules c1/nf", "apply r1", "remove namespace without the interfaces of waystamp-test-nf"}},
		{"c2", []string{"ensure namespace c2", "load rules c2/nf", "apply r1", "unload rules c1/[]", "leave namespace without the interfaces of c1"}},
		{model.NamespaceOwn, []string{"ensure namespace waystamp-test-nf", "load rules waystamp-test-nf/nf", "apply r1", "unload rules c2/[]", "leave namespace without the interfaces of c2"}},
		{model.NamespaceNode, []string{
			"make cutter wscut0", "make cutter wsback0", "load rules /nf", "apply r1", "remove namespace waystamp-test-nf",
		}},
	} {
		n.log.Forget()
		n.write(n.encode(filtered(t, filter("nf", c.to, anyRules))))
		n.log.Wait("the new plan is in force")
		n.same("to "+c.to, c.want...)
	}
	n.rulesAre("in the end", map[string]string{"/nf": anyRules})
}

// A first plan that cannot be applied leaves nothing of its functions.
func TestAFirstPlanThatFailsTakesBackItsFunctions(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(filtered(t, filter("a", model.NamespaceOwn, anyRules), filter("b", "c1", anyRules), filter("c", model.NamespaceNode, anyRules))))
	broken := errors.New("broken")
	n.fail("apply", broken)
	if err := run(t.Context(), n.cfg, n.on); !errors.Is(err, broken) {
		t.Errorf("ends with %v", err)
	}
	steps := n.taken()
	at := slices.Index(steps, "apply r1")
	want := []string{
		"apply r1", "remove cutter wscut0", "remove cutter wsback0",
		"remove namespace waystamp-test-a", "unload rules c1/[]", "leave namespace c1", "unload rules /[]",
		"withdraw fc00:0:0:100::/56", "close data path", "close network",
	}
	if at < 0 {
		t.Fatalf("steps %q", steps)
	}
	if diff := cmp.Diff(want, steps[at:]); diff != "" {
		t.Errorf("from the failure on (-want +got):\n%s", diff)
	}
	n.rulesAre("after all", map[string]string{})
	if _, err := os.Stat(statePath(n.cfg.RunDir)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a state is left, %v", err)
	}
}

// A plan that is refused does not leave its rules to the one before.
func TestRefusedPlanLeavesTheRulesBefore(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(filtered(t, filter("nf", model.NamespaceOwn, anyRules))))
	s := n.start()
	n.taken()
	n.fail("apply", errors.New("broken"))
	n.write(n.encode(filtered(t, filter("nf", model.NamespaceOwn, otherRules), filter("ids", "c1", otherRules))))
	n.log.Wait("the new plan is refused")
	n.same("a refused plan",
		"ensure namespace waystamp-test-nf", "ensure namespace c1", "load rules waystamp-test-nf/nf", "load rules c1/ids", "apply r1",
		"unload rules c1/[]", "leave namespace c1", "ensure namespace waystamp-test-nf", "load rules waystamp-test-nf/nf")
	n.rulesAre("after a refused plan", map[string]string{"waystamp-test-nf/nf": anyRules})
	if st := s.status(); st.Generation != 1 || len(st.Problems) != 0 {
		t.Errorf("status %+v", st)
	}
}

// What cannot be removed is an error that stays until it is removed, and no reason to
// refuse the plan, which is in force.
func TestWhatCannotBeRemovedIsRemovedLater(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(filtered(t, filter("nf", "c1", anyRules))))
	s := n.start()
	n.fail("unload", host.ErrNoNft)
	n.write(n.encode(filtered(t)))
	n.log.Wait("the new plan is in force")
	if st := s.status(); st.Generation != 2 || !strings.Contains(st.Error, failedFilters) || !strings.Contains(st.Error, "remove the rules of function nf: "+host.ErrNoNft.Error()) {
		t.Errorf("status %+v", st)
	}
	// It also outlives the agent.
	n.must(s.halt())
	s = n.start()
	n.rulesAre("of the next agent", map[string]string{"c1/nf": anyRules})
	s.eventually("the error of the next agent", func() bool { return strings.Contains(s.status().Error, failedFilters) })
	n.fail("unload", nil)
	s.reconciled("no error", func() bool { return s.status().Error == "" })
	n.rulesAre("in the end", map[string]string{})
	n.taken()
	s.reconciled("a reconciliation", func() bool { return len(n.reconciliations()) > 0 })
	if steps := n.taken(); slices.ContainsFunc(steps, func(s string) bool { return strings.HasPrefix(s, "unload") }) {
		t.Errorf("it is removed twice: %q", steps)
	}
}

// An agent finds what the one before has made, and removes what its own plan has not.
func TestNextAgentRemovesWhatThePlanHasNoMore(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(filtered(t, filter("nf", model.NamespaceOwn, anyRules), filter("ids", model.NamespaceNode, anyRules))))
	n.must(n.start().halt())
	n.taken()
	n.write(n.encode(filtered(t, filter("ids", model.NamespaceNode, anyRules))))
	n.start()
	n.same("the next agent", "check", "open", "own addresses [fc00:1::1]", "load rules /ids", "apply r1", "remove namespace waystamp-test-nf")
	n.rulesAre("then", map[string]string{"/ids": anyRules})
}

// The agent's answer has what rules have counted, by the names of the plan.
func TestCountersOfRulesAreAnswered(t *testing.T) {
	n := newNode(t)
	n.counts = dataplane.Counts{Functions: []dataplane.FunctionCount{{Function: "nf"}, {Function: "ids"}, {Function: "bare"}}}
	n.fail("load rules /ids", refusedRules("ids"))
	n.write(n.encode(filtered(t, filter("nf", model.NamespaceOwn, anyRules), filter("ids", model.NamespaceNode, anyRules), filter("bare", "c1", ""))))
	s := n.start()
	got, err := s.client.Functions(t.Context())
	n.must(err)
	rules := map[string]*api.Rules{}
	for _, f := range got.Functions {
		rules[f.Function] = f.Rules
	}
	want := map[string]*api.Rules{
		"nf": {
			Namespace: "waystamp-test-nf",
			Counters:  []api.RuleCounter{{Name: "seen", Packets: 3, Bytes: 300}},
			Arguments: []api.RuleCounter{{Name: "guest", Packets: 2, Bytes: 200}, {Name: "staff"}},
		},
		"ids":  {Error: netfilter.ErrNotLoaded.Error(), Counters: []api.RuleCounter{}, Arguments: []api.RuleCounter{}},
		"bare": {Namespace: "c1", Counters: []api.RuleCounter{}, Arguments: []api.RuleCounter{}},
	}
	if diff := cmp.Diff(want, rules); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}
}
