package agent

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// withFunctions is the plan of r1, which has two functions and is the egress of the
// reverse path: fw has SIDs 100 and 103, dpi 101 and 102, and the egress 104.
func withFunctions(t *testing.T, edit func(*model.Domain)) plan.Node {
	t.Helper()
	return r1(t, func(d *model.Domain) {
		unaware := func(name string) model.Function {
			return model.Function{Name: name, Node: "r1", Kind: model.KindUnaware, Proxy: model.Proxy{
				To: name, From: name, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep,
				Cache: model.CacheDefault, Lifetime: model.LifetimeDefault,
			}}
		}
		d.Nodes[0].Advertise = model.AdvertiseSIDs
		d.Functions = []model.Function{unaware("fw"), unaware("dpi")}
		d.Chains[0].Functions = []string{"fw", "dpi"}
		if edit != nil {
			edit(d)
		}
	})
}

func sidsOf(addrs ...string) (out []netip.Prefix) {
	for _, a := range addrs {
		out = append(out, netip.MustParsePrefix("fc00:0:0:"+a+"::/64"))
	}
	return out
}

// announced are the SIDs whose routes are there, in order.
func (n *node) announced() []netip.Prefix {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := append([]netip.Prefix(nil), n.sids...)
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}

func (n *node) announces(what string, want []netip.Prefix) {
	n.Helper()
	if diff := cmp.Diff(want, n.announced(), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		n.Errorf("%s: routes of SIDs (-want +got):\n%s", what, diff)
	}
}

// changed tells the agent that devices have changed, and waits until it has looked.
func (s *started) changed(what string, f func() bool) {
	s.n.Helper()
	s.eventually("somebody who watches links", func() bool { return s.n.tell(host.ChangeLinks) == nil })
	s.eventually(what, f)
}

// The programs take packets for a SID before it is announced, and while its function is
// gone it is not.
func TestSIDsAreAnnouncedWhileTheirFunctionsAreThere(t *testing.T) {
	n := newNode(t)
	n.gone = []string{"dpi"}
	n.write(n.encode(withFunctions(t, nil)))
	s := n.start()
	n.same("start", "check", "open", "own addresses [fc00:1::1]", "announce fc00:0:0:100::/56", "apply r1",
		"announce fc00:0:0:100::/64", "announce fc00:0:0:103::/64", "announce fc00:0:0:104::/64")

	n.set(func() { n.gone = nil })
	s.changed("all SIDs", func() bool { return len(n.announced()) == 5 })
	n.announces("all functions are there", sidsOf("100", "101", "102", "103", "104"))

	n.set(func() { n.gone = []string{"fw"} })
	s.changed("three SIDs", func() bool { return len(n.announced()) == 3 })
	n.announces("fw is gone", sidsOf("101", "102", "104"))

	n.set(func() { n.gone = nil })
	s.changed("all SIDs again", func() bool { return len(n.announced()) == 5 })
	if st := s.status(); st.Error != "" || len(st.Warnings) > 0 {
		t.Errorf("status %+v", st)
	}

	// They stay when the agent stops, and the next one has nothing to do.
	n.must(s.halt())
	n.announces("without an agent", sidsOf("100", "101", "102", "103", "104"))
	n.taken()
	n.start()
	n.same("start again", "check", "open", "own addresses [fc00:1::1]", "apply r1")
}

func TestSIDsAreWithdrawnWithThePlan(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(withFunctions(t, nil)))
	s := n.start()
	n.taken()

	n.log.Forget()
	n.write(n.encode(withFunctions(t, func(d *model.Domain) { d.Chains[0].Functions = []string{"fw"} })))
	n.log.Wait("the new plan is in force")
	n.same("a plan with fewer SIDs", "apply r1", "withdraw fc00:0:0:103::/64", "withdraw fc00:0:0:104::/64")

	n.log.Forget()
	n.write(n.encode(withFunctions(t, func(d *model.Domain) { d.Nodes[0].Locator = netip.MustParsePrefix("fc00:0:0:900::/56") })))
	n.log.Wait("the new plan is in force")
	n.announces("a plan with another locator", sidsOf("900", "901", "902", "903", "904"))

	n.log.Forget()
	n.taken()
	n.write(n.encode(withFunctions(t, func(d *model.Domain) {
		d.Nodes[0].Locator, d.Nodes[0].Advertise = netip.MustParsePrefix("fc00:0:0:900::/56"), model.AdvertiseLocator
	})))
	n.log.Wait("the new plan is in force")
	n.announces("a plan that advertises the locator alone", nil)

	// From then on nothing is read of the routes.
	n.fail("list SIDs", errors.New("broken"))
	n.taken()
	s.changed("a reconciliation", func() bool { return len(n.reconciliations()) > 0 })
	if st := s.status(); st.Error != "" {
		t.Errorf("it does not advertise, and looks all the same: %s", st.Error)
	}
}

// Whoever put a route to a SID there keeps it, whether there is room beside it or not.
func TestRoutesOfOthersToSIDsAreLeftAloneAndToldOf(t *testing.T) {
	n := newNode(t)
	beside := host.Route{Destination: sidsOf("100")[0], Protocol: host.ProtocolStatic, Metric: 1024}
	instead := host.Route{Destination: sidsOf("104")[0], Protocol: host.ProtocolBGP, Metric: model.SIDMetric}
	elsewhere := host.Route{Destination: sidsOf("1ff")[0], Protocol: host.ProtocolBGP, Metric: 20}
	n.others = []host.Route{beside, instead, elsewhere}
	n.write(n.encode(withFunctions(t, nil)))
	s := n.start()
	n.announces("beside others", sidsOf("100", "101", "102", "103"))
	want := []string{
		"SID fc00:0:0:100::/64 has a route that is not waystamp's (protocol 4, metric 1024): neighbours may not learn the SID, or keep it while its function is gone; look at it with ip -6 route show fc00:0:0:100::/64, and remove it",
		"SID fc00:0:0:104::/64 has a route that is not waystamp's (protocol 186, metric 16777215): neighbours may not learn the SID, or keep it while its function is gone; look at it with ip -6 route show fc00:0:0:104::/64, and remove it",
	}
	if st := s.status(); !slices.Equal(st.Warnings, want) || st.Error != "" || !st.Ready {
		t.Errorf("status %+v; want %q", st, want)
	}
	// One that could be announced in the SID's place is told of all the more.
	n.set(func() { n.gone = []string{"fw"} })
	s.changed("no SIDs of fw", func() bool { return len(n.announced()) == 2 })
	if st := s.status(); !slices.Equal(st.Warnings, want) {
		t.Errorf("while fw is gone: status %+v; want %q", st, want)
	}
	n.set(func() { n.gone = nil })
	s.changed("the SIDs of fw", func() bool { return len(n.announced()) == 4 })

	n.set(func() { n.others = nil })
	s.changed("the SID that had no room", func() bool { return len(n.announced()) == 5 })
	n.log.Wait("the SID has no route any more that is not waystamp's")
	if st := s.status(); len(st.Warnings) > 0 {
		t.Errorf("it still warns: %q", st.Warnings)
	}
}

// A route that cannot be changed does not keep a plan from being in force.
func TestSIDsThatCannotBeAnnouncedAreTriedAgain(t *testing.T) {
	n := newNode(t)
	broken := errors.New("broken")
	n.fail("announce fc00:0:0:101::/64", broken)
	n.write(n.encode(withFunctions(t, nil)))
	s := n.start()
	n.announces("but one", sidsOf("100", "102", "103", "104"))
	if st := s.status(); !strings.Contains(st.Error, "the routes of SIDs could not be brought to the plan: broken") || !st.Ready {
		t.Errorf("status %+v", st)
	}
	n.fail("announce fc00:0:0:101::/64", nil)
	s.changed("the SID", func() bool { return len(n.announced()) == 5 })
	s.eventually("no error", func() bool { return s.status().Error == "" })

	// Of a locator that the plan has no more they are withdrawn later.
	n.fail("withdraw fc00:0:0:102::/64", broken)
	n.log.Forget()
	n.write(n.encode(withFunctions(t, func(d *model.Domain) { d.Nodes[0].Locator = netip.MustParsePrefix("fc00:0:0:900::/56") })))
	n.log.Wait("the new plan is in force")
	n.announces("another locator, and one that stays", sidsOf("102", "900", "901", "902", "903", "904"))
	if st := s.status(); !strings.Contains(st.Error, "broken") {
		t.Errorf("status %+v", st)
	}
	n.fail("withdraw fc00:0:0:102::/64", nil)
	s.changed("its end", func() bool { return len(n.announced()) == 5 })
}

func TestSIDsOutsideOfALocatorAreNotAnnouncedInIt(t *testing.T) {
	n := newFakeMachine()
	want := append(sidsOf("100"), netip.MustParsePrefix("fc00:0:0:900::/64"))
	if announced, withdrawn, others, err := setSIDs(fakeNet{n}, netip.MustParsePrefix("fc00:0:0:100::/56"), want); announced != 1 || withdrawn != 0 || len(others) > 0 || err != nil || !slices.Equal(n.sids, want[:1]) {
		t.Errorf("%d announced, %d withdrawn, %v, %v: %v", announced, withdrawn, others, err, n.sids)
	}
}
