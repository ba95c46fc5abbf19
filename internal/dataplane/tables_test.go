package dataplane

import (
	"errors"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

var roomy = limits{headends: 64, stats: 256, buckets: 1 << 14, slots: 1 << 16}

// testWiring has all functions of a plan at hand.
func testWiring(n plan.Node) wiring {
	at := wiring{ports: map[uint32]abi.Port{}, reach: map[string]reach{}, cpus: 4}
	for i, p := range n.Proxies {
		if p.Local {
			at.reach[p.Function] = reach{}
			continue
		}
		at.reach[p.Function] = reach{to: uint32(100 + i), dmac: [6]byte{2}}
		at.ports[uint32(200+i)] = abi.Port{Proxy: 1}
	}
	return at
}

// placedBy is where entries say that their windows and numbers are.
func placedBy(have tables) placed {
	p := placed{map[windowKey]windowSlot{}, map[counterKey]uint32{}}
	for _, h := range have.headends {
		p.numbers[counterKey{h.Path, h.Epoch}] = h.Counter
	}
	for k, e := range have.egresses {
		w := window{windowKey{counterKey{k.Path, k.Epoch}, secretsOf(&e)}, int(e.Lanes), 1 << e.WindowLog2}
		p.windows[w.key] = windowSlot{window: w, at: int(e.Window)}
	}
	return p
}

func mustDesire(t interface{ Fatal(...any) }, n plan.Node, local []netip.Addr, have tables) wanted {
	w, err := desire(n, testWiring(n), local, have, recoverIndexes(have, roomy, placedBy(have)))
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestSamePlanWantsNothingNew(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, local := drawNode(t), drawLocal(t)
		first := mustDesire(t, n, local, mustDesire(t, drawNode(t), nil, newTables()).tables)
		again := mustDesire(t, n, local, first.tables)
		if !equalTables(first.tables, again.tables) {
			t.Fatalf("the same plan over its own state wants something else:\n%v\n%v", first.matchDst, again.matchDst)
		}
		if len(again.freshStats) != 0 || !maps.Equal(first.numbers, again.numbers) {
			t.Fatalf("the same plan over its own state wants %v anew, and numbers %v after %v", again.freshStats, again.numbers, first.numbers)
		}
		if ops := changes(first.tables, again.tables); len(ops) != 0 {
			t.Fatalf("%d changes for the same plan", len(ops))
		}
	})
}

// Every step of a change of plans is looked at, with packets that meet all
// rules.
func TestNoStepOfAChangeOpensAHole(t *testing.T) {
	anew, rules, prefixes := 0, 0, 0
	defer func() {
		t.Logf("%d changes needed a new generation; of the others %d changed ordered rules, %d prefixes beside such", anew, rules, prefixes)
		if !t.Failed() && (anew == 0 || rules == 0 || prefixes == 0) {
			t.Error("want some of each")
		}
	}()
	rapid.Check(t, func(t *rapid.T) {
		first, local := drawNode(t), drawLocal(t)
		before := mustDesire(t, first, local, newTables()).tables
		n, local := drawNext(t, first, local)
		w, err := desire(n, testWiring(n), local, before, recoverIndexes(before, roomy, placedBy(before)))
		if errors.Is(err, errCapacity) {
			t.Skip("needs a new generation")
		}
		if err != nil {
			t.Fatal(err)
		}
		after := w.tables
		if together(before, after) {
			anew++
			return
		}
		switch {
		case !maps.Equal(before.rules, after.rules):
			rules++
		case len(before.rules) > 0 && !maps.Equal(before.matchDst, after.matchDst):
			prefixes++
		}
		now := before.clone()
		check := func() {
			checkSlots(t, now)
			for _, to := range inDst {
				for _, from := range inSrc {
					checkPacket(t, before, now, after, addr(from), addr(to))
				}
			}
			for _, to := range inDst4 {
				for _, from := range inSrc4 {
					checkPacket(t, before, now, after, addr(from), addr(to))
				}
			}
			for k, h := range now.hops {
				if h.Behaviour == uint8(abi.BehaviourEndDT46) {
					if _, ok := now.egresses[abi.EgressKey{Path: k.Path, Epoch: k.Epoch}]; !ok {
						t.Fatalf("an egress SID without its verifier")
					}
				}
				if h.Behaviour == uint8(abi.BehaviourEndAd) && now.proxies[h.Proxy].LifetimeNs == 0 {
					t.Fatalf("a SID names proxy %d, which is not there", h.Proxy)
				}
				if now.sids[abi.HopKey{Sid: k.Sid, Path: k.Path}] != 1 || now.sids[abi.HopKey{Sid: k.Sid}] != 1 {
					t.Fatalf("a SID that ws_sids does not have")
				}
			}
		}
		check()
		for _, o := range append(changes(before, after), leftBehind(before, after)...) {
			now.do(o)
			check()
		}
		if !equalTables(now, after) {
			t.Fatal("the changes do not lead to what is wanted")
		}
	})
}

// checkSlots: no two CPUs ever take from the same slot, and no two functions from
// the same bucket.
func checkSlots(t *rapid.T, now tables) {
	owner := map[[2]uint32]uint32{}
	for id, p := range now.proxies {
		cpus := uint32(4)
		if p.Recognise == uint8(abi.RecogniseContent) {
			cpus = 1
			if p.Slots == 0 || p.Slot+p.Slots > roomy.buckets {
				t.Fatalf("proxy %d has %d buckets from %d on", id, p.Slots, p.Slot)
			}
		}
		for i := p.Slot; i < p.Slot+cpus*p.Slots; i++ {
			k := [2]uint32{uint32(p.Recognise), i}
			if other, taken := owner[k]; taken {
				t.Fatalf("slot or bucket %d is both proxy %d's and %d's", i, other, id)
			}
			owner[k] = id
		}
		if p.Recognise == uint8(abi.RecogniseMetadata) && (p.Slot == 0 || p.Slot+4*p.Slots > 1<<16) {
			t.Fatalf("proxy %d has slots from %d on", id, p.Slot)
		}
	}
}

func checkPacket(t *rapid.T, before, now, after tables, from, to netip.Addr) {
	const path = uint8(abi.MatchActionPath)
	guard := func(x tables) match {
		m := lookUp(x.guardDst, x.guardSrc, from, to)
		if rule := x.lookUpRule(false, from, to); rule != 0 {
			m.Action, m.Target = path, rule
		}
		return m
	}
	b, n, a := guard(before), guard(now), guard(after)
	required := func(m match) bool { return m.Action == path && m.Local == 0 }
	if required(b) && required(a) && !required(n) {
		t.Fatalf("%s to %s needs a proof before and after, but not in between", from, to)
	}
	if n != b && n != a {
		t.Fatalf("%s to %s: the guard says %+v, which is neither what it said (%+v) nor what it will (%+v)", from, to, n, b, a)
	}
	steer := func(x tables) (path uint32) {
		m := lookUp(x.matchDst, x.matchSrc, from, to)
		if rule := x.lookUpRule(true, from, to); rule != 0 {
			m.Action, m.Target = uint8(abi.MatchActionPath), rule-1
		}
		if m.Action != uint8(abi.MatchActionPath) || m.Local != 0 {
			return 0
		}
		h, ok := x.headends[m.Target]
		if !ok {
			t.Fatalf("%s to %s: the rule names headend %d, which is not there", from, to, m.Target)
		}
		return h.Path
	}
	local := func(x tables) match {
		m := lookUp(x.localDst, x.localSrc, from, to)
		if m.Action == path && x.proxies[m.Target].LifetimeNs == 0 {
			t.Fatalf("%s to %s must pass proxy %d, which is not there", from, to, m.Target)
		}
		return m
	}
	if is := local(now); is != local(before) && is != local(after) {
		t.Fatalf("%s to %s must pass %+v, which is right neither before nor after", from, to, is)
	}
	if is := steer(now); is != steer(before) && is != steer(after) {
		t.Fatalf("%s to %s is steered into a path that it belongs to neither before nor after", from, to)
	}
}

func TestOwnAddressKeepsWhatCoversIt(t *testing.T) {
	n := testNode()
	n.Egresses = []plan.Egress{
		egressOf(1, 0, model.SchemeKeyed, model.Match{Destination: prefix("2001:db8::/32")}, ownSID(1), 2),
		egressOf(2, 0, model.SchemeKeyed, model.Match{Destination: prefix("2001:db8:1:1::1/128"), Source: prefix("fd00::/8")}, ownSID(2), 2),
	}
	w := mustDesire(t, n, []netip.Addr{addr("2001:db8:1:1::1"), addr("2001:db8:5::1"), addr("2620::1")}, newTables())
	for _, c := range []struct {
		from, to string
		want     match
	}{
		{"fd00::1", "2001:db8:1:1::1", match{Target: abi.BE32(2), Action: 1, Local: 1}},
		{"2620::2", "2001:db8:1:1::1", match{Target: abi.BE32(1), Action: 1, Local: 1}},
		{"2620::2", "2001:db8:5::1", match{Target: abi.BE32(1), Action: 1, Local: 1}},
		{"2620::2", "2001:db8:5::2", match{Target: abi.BE32(1), Action: 1}},
		{"2620::2", "2620::1", match{Local: 1}},
		{"2620::2", "2620::3", match{}},
	} {
		if got := lookUp(w.guardDst, w.guardSrc, addr(c.from), addr(c.to)); got != c.want {
			t.Errorf("%s to %s: %+v, want %+v", c.from, c.to, got, c.want)
		}
	}
}

func TestPlanThatDoesNotFitTogetherIsRefused(t *testing.T) {
	keyed := model.SchemeKeyed
	all := model.Match{Destination: prefix("2001:db8::/32")}
	for _, c := range []struct {
		name string
		edit func(*plan.Node)
		want string
	}{
		{"path 0", func(n *plan.Node) { n.Headends = []plan.Headend{headendOf(0, 0, keyed, all, 1)} }, "path 0 is no path"},
		{"headend twice", func(n *plan.Node) {
			n.Headends = []plan.Headend{headendOf(1, 0, keyed, all, 1), headendOf(1, 1, keyed, all, 1)}
		}, "the node is its headend twice"},
		{"no segments", func(n *plan.Node) { n.Headends = []plan.Headend{headendOf(1, 0, keyed, all, 0)} }, "0 segments; expect 1 to 16"},
		{"17 segments", func(n *plan.Node) { n.Headends = []plan.Headend{headendOf(1, 0, keyed, all, 17)} }, "17 segments; expect 1 to 16"},
		{"lanes beyond the last", func(n *plan.Node) {
			h := headendOf(1, 0, keyed, all, 1)
			h.Lane, h.Lanes = 4095, 2
			n.Headends = []plan.Headend{h}
		}, "lanes 4095 to 4096 are not within 0 to 4095"},
		{"scheme to come", func(n *plan.Node) {
			n.Headends = []plan.Headend{headendOf(1, 0, 4, all, 1)}
		}, "does not know the scheme Scheme(4)"},
		{"SID of another node", func(n *plan.Node) { n.Endpoints = []plan.Endpoint{endpointOf(1, 0, keyed, otherSID(1))} }, "is not in the locator"},
		{"SID twice", func(n *plan.Node) {
			n.Endpoints = []plan.Endpoint{endpointOf(1, 0, keyed, ownSID(1)), endpointOf(1, 0, keyed, ownSID(1))}
		}, "is visited twice"},
		{"egress twice", func(n *plan.Node) {
			n.Egresses = []plan.Egress{egressOf(1, 0, keyed, all, ownSID(1), 2), egressOf(1, 0, keyed, all, ownSID(2), 2)}
		}, "the node is its egress twice"},
		{"epochs that match differently", func(n *plan.Node) {
			n.Egresses = []plan.Egress{egressOf(1, 0, keyed, all, ownSID(1), 2), egressOf(1, 1, keyed, model.Match{}, ownSID(1), 2)}
		}, "its epochs match different packets"},
		{"key missing", func(n *plan.Node) {
			e := egressOf(1, 0, keyed, all, ownSID(1), 3)
			e.Verifier.Keys = e.Verifier.Keys[:2]
			n.Egresses = []plan.Egress{e}
		}, "2 keys for 3 positions that stamp"},
		{"secret at the prime", func(n *plan.Node) {
			e := egressOf(1, 0, model.SchemeOPoT, all, ownSID(1), 3)
			e.Verifier.Secret = 53
			n.Egresses = []plan.Egress{e}
		}, "the secret is not below the prime"},
		{"share at the prime", func(n *plan.Node) {
			e := endpointOf(1, 0, model.SchemeOPoT, ownSID(1))
			e.Share.Polynomial.Share = 53
			n.Endpoints = []plan.Endpoint{e}
		}, "the secret share is not below the prime"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := testNode()
			c.edit(&n)
			_, err := desire(n, wiring{}, nil, newTables(), newIndexes(roomy, placed{}))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v; want %q", err, c.want)
			}
		})
	}
}

func TestConfigOfAPlanThatDoesNotFitTogetherIsRefused(t *testing.T) {
	for _, c := range []struct{ block, locator, want string }{
		{"10.0.0.0/8", "fc00:0:0:100::/56", "not an IPv6 prefix"},
		{"fc00::/48", "", "not an IPv6 prefix"},
		{"fc00::/48", "fc00:0:0:100::/80", "1 to 64 bits"},
		{"fc00::/48", "fc01:0:0:100::/56", "is not in the block"},
		{"fc00::/48", "fc00::/40", "is not in the block"},
	} {
		n := testNode()
		n.Block, n.Locator = prefix(c.block), prefix(c.locator)
		if _, err := encodeConfig(n); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("block %s, locator %s: got %v; want %q", c.block, c.locator, err, c.want)
		}
	}
}

func TestMoreEntriesThanTheArraysHoldAskForLargerOnes(t *testing.T) {
	n := testNode()
	for i := range 3 {
		n.Headends = append(n.Headends, headendOf(uint32(i+1), 0, model.SchemeKeyed, model.Match{Source: prefix(testSrc[i+1])}, 1))
	}
	for _, l := range []limits{{headends: 2, stats: 256}, {headends: 64, stats: 2}} {
		if _, err := desire(n, wiring{}, nil, newTables(), newIndexes(l, placed{})); !errors.Is(err, errCapacity) {
			t.Errorf("with %+v: got %v; want errCapacity", l, err)
		}
	}
	if _, err := desire(n, wiring{}, nil, newTables(), newIndexes(limits{headends: 3, stats: 3}, placed{})); err != nil {
		t.Errorf("with as many as needed: %v", err)
	}
}

func TestArraysHaveRoomForAChangeOfEverything(t *testing.T) {
	for _, c := range []struct{ need, want limits }{
		{limits{headends: 0, stats: 0, places: 2}, limits{lines: 256, headends: 64, stats: 256, hops: 256, egresses: 64, places: 2}},
		{limits{headends: 32, stats: 128, hops: 128, egresses: 32, places: 2}, limits{lines: 256, headends: 64, stats: 256, hops: 256, egresses: 64, places: 2}},
		{limits{headends: 33, stats: 129, hops: 129, egresses: 33, places: 512}, limits{lines: 256, headends: 128, stats: 512, hops: 512, egresses: 128, places: 512}},
		{
			limits{headends: chainsMax, stats: 2 * chainsMax, hops: 2 * chainsMax, egresses: 2 * chainsMax},
			limits{lines: 256, headends: chainsMax, stats: 2 * chainsMax, hops: 4 * chainsMax, egresses: 4 * chainsMax},
		},
	} {
		if got, err := c.need.size(); err != nil || got != c.want {
			t.Errorf("%+v: got %+v, %v; want %+v", c.need, got, err, c.want)
		}
	}
	if _, err := (limits{headends: chainsMax + 1, stats: 1}).size(); err == nil {
		t.Error("more headends than a node holds are not refused")
	}
}

// A rule for all of IPv6 covers ::ffff:0:0/96, where IPv4 is, and must not take
// it; and the other way round.
func TestARuleOfOneVersionTakesNoPacketOfTheOther(t *testing.T) {
	n := testNode()
	n.Headends = []plan.Headend{headendOf(5, 0, model.SchemeKeyed, model.Match{Source: prefix("fd00::/8")}, 1)}
	w := mustDesire(t, n, []netip.Addr{addr("192.0.2.1")}, newTables())
	if m := lookUp(w.matchDst, w.matchSrc, addr("203.0.113.1"), addr("198.51.100.1")); m != (match{}) {
		t.Errorf("a rule for IPv6 gives an IPv4 packet %+v", m)
	}
	if m := lookUp(w.matchDst, w.matchSrc, addr("203.0.113.1"), addr("192.0.2.1")); m != (match{Local: 1}) {
		t.Errorf("a rule for IPv6 gives an IPv4 packet to the node itself %+v", m)
	}
	n.Headends[0].Match = model.Match{Source: prefix("203.0.113.0/24")}
	w = mustDesire(t, n, nil, newTables())
	if m := lookUp(w.matchDst, w.matchSrc, addr("fd00::1"), addr("2001:db8::1")); m != (match{}) {
		t.Errorf("a rule for IPv4 gives an IPv6 packet %+v", m)
	}
	if m := lookUp(w.matchDst, w.matchSrc, addr("203.0.113.1"), addr("198.51.100.1")); m.Action != uint8(abi.MatchActionPath) {
		t.Errorf("a rule for IPv4 gives its packet %+v", m)
	}
}

func onlyOne[K comparable, V any](t *testing.T, m map[K]V) (K, V) {
	t.Helper()
	if len(m) != 1 {
		t.Fatalf("%d entries, want one: %v", len(m), m)
	}
	for k, v := range m {
		return k, v
	}
	panic("unreachable")
}

// An array's entry does not change at once, so a rule must never name one that
// changes.
func TestNewEpochIsANewHeadendWithTheStatisticsOfThePath(t *testing.T) {
	n := testNode()
	n.Headends = []plan.Headend{headendOf(5, 0, model.SchemeKeyed, model.Match{Destination: prefix("2001:db8::/32")}, 1)}
	n.Endpoints = []plan.Endpoint{endpointOf(5, 0, model.SchemeKeyed, ownSID(1)), endpointOf(5, 1, model.SchemeKeyed, ownSID(1))}
	first := mustDesire(t, n, nil, newTables())
	n.Headends[0].Epoch = 1
	next := mustDesire(t, n, nil, first.tables)
	i, a := onlyOne(t, first.headends)
	j, b := onlyOne(t, next.headends)
	if i == j {
		t.Errorf("the new epoch is written over the old one, at %d", i)
	}
	if _, m := onlyOne(t, next.matchDst); m.Target != j {
		t.Errorf("the rule names headend %d, want %d", m.Target, j)
	}
	if a.Stats != b.Stats || a.Counter == b.Counter {
		t.Errorf("statistics %d and %d, want the same; counters %d and %d, want two", a.Stats, b.Stats, a.Counter, b.Counter)
	}
	x, y := first.hops[encodeHopKey(ownSID(1), 5, 0)], first.hops[encodeHopKey(ownSID(1), 5, 1)]
	if x.Stats != y.Stats {
		t.Errorf("two epochs of a visit have statistics %d and %d; want one", x.Stats, y.Stats)
	}
}
