package dataplane

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// Service labels of these tests begin there, and the label of node rN is 16000 + N.
const (
	testServices  = 100000
	testNodeLabel = 16000
)

// labelRun is a domain of r1 to r6 with a chain over labels from r1 through fw on r2 and
// dpi on r3 to r6, IPv4 and IPv6, and a rig for each of its nodes. r4 has a label, and no part in a
// chain.
type labelRun struct {
	*testing.T
	domain *plan.Domain
	rigs   map[string]*rig
}

// labelDomain is that domain. core: the version of the addresses that node labels lead to.
func labelDomain(scheme model.Scheme, core int) model.Domain {
	d := model.Domain{Block: xtest.Prefix("fc00::/48"), MPLS: &model.MPLS{Services: testServices, MTU: 9000}}
	for _, n := range []int{1, 2, 3, 4, 6} {
		s := strconv.Itoa(n)
		address := "192.0.2." + s
		if core == 6 {
			address = "fd00:2::" + s
		}
		d.Nodes = append(d.Nodes, model.Node{
			Name: "r" + s, Address: xtest.Addr("fd00:1::" + s), Locator: xtest.Prefix("fc00:0:0:" + s + "00::/56"),
			Interfaces: []model.Interface{{Name: portCore, Role: model.RoleCore}, {Name: portEdge, Role: model.RoleEdge}},
			MPLS:       &model.NodeMPLS{Label: testNodeLabel + uint32(n), Address: xtest.Addr(address)},
		})
	}
	d.Functions = []model.Function{{Name: "fw", Node: "r2"}, {Name: "dpi", Node: "r3"}}
	for name, to := range map[string]string{"web": "2001:db8:8::/48", "legacy": "198.51.100.0/24"} {
		d.Chains = append(d.Chains, model.Chain{
			Name: name, Ingress: []string{"r1"}, Functions: []string{"fw", "dpi"}, Egress: "r6", Match: model.Match{Destination: xtest.Prefix(to)},
			Proof: model.Proof{Scheme: scheme}, Encapsulation: model.Encapsulation{Type: model.EncapsulationSRMPLS},
		})
	}
	slices.SortFunc(d.Chains, func(a, b model.Chain) int { return len(a.Name) - len(b.Name) })
	return d
}

func newLabelRun(t *testing.T, scheme model.Scheme, core int, edit func(*model.Domain)) *labelRun {
	t.Helper()
	d := labelDomain(scheme, core)
	if edit != nil {
		edit(&d)
	}
	out, err := plan.Compile(d, plan.NewKeyring(rand.NewChaCha8([32]byte{7}), nil))
	if err != nil {
		t.Fatal(err)
	}
	l := &labelRun{t, out, map[string]*rig{}}
	for _, n := range out.Nodes {
		r := newRig(t, rigSpec{name: n.Name, block: n.Block, locator: n.Locator, address: n.Address, mpls: n.MPLS})
		r.must(r.apply(&n))
		l.rigs[n.Name] = r
	}
	return l
}

func (l *labelRun) node(name string) plan.Node {
	i := slices.IndexFunc(l.domain.Nodes, func(n plan.Node) bool { return n.Name == name })
	return l.domain.Nodes[i]
}

func (l *labelRun) path(chain string) plan.Path {
	i := slices.IndexFunc(l.domain.Paths, func(p plan.Path) bool { return p.Chain == chain })
	return l.domain.Paths[i]
}

// run gives a frame to the TC program of an interface.
func (l *labelRun) run(node, port string, b []byte) (o outcome, m moved) {
	l.Helper()
	return l.runFrame(node, frame{port: port, b: b})
}

func (l *labelRun) runFrame(node string, f frame) (o outcome, m moved) {
	l.Helper()
	r := l.rigs[node]
	f.b = arriving(f.b)
	r.must(r.in(func() (err error) {
		if o, err = r.runTC(f); err != nil {
			return err
		}
		m, err = r.counted()
		return err
	}))
	return o, m
}

// spending is what a node's headends and egresses have counted.
type spending struct {
	words   map[tables.CounterKey][]uint64
	numbers map[uint32]uint64
}

func (r *rig) spending() spending {
	s := spending{map[tables.CounterKey][]uint64{}, map[uint32]uint64{}}
	for k, w := range r.windows {
		for i := range uint32(w.End() - w.At) {
			s.words[k] = append(s.words[k], r.word(k, i).Load())
		}
	}
	for _, h := range r.have.Headends {
		s.numbers[h.Counter] = r.mem.numbers.readNumbers(h.Counter).start
	}
	return s
}

func (r *rig) setSpending(s spending) {
	for k, words := range s.words {
		for i, word := range words {
			r.word(k, uint32(i)).Store(word)
		}
	}
	for counter, last := range s.numbers {
		r.mem.numbers.putLast(counter, last)
	}
}

// both gives a frame to TC and then, as if it came for the first time, to XDP, with the ways
// that TC has learned. XDP must leave the frame as it is or do what TC did; took says which.
func (l *labelRun) both(node string, f frame) (o outcome, m moved, took bool) {
	l.Helper()
	r := l.rigs[node]
	before := r.spending()
	o, m = l.runFrame(node, f)
	if f.gsoSize > 0 {
		return o, m, false
	}
	after := r.spending()
	r.setSpending(before)
	f.b = arriving(f.b)
	r.must(r.in(func() (err error) {
		if _, took, err = r.checkXDP(f, o); err != nil {
			return err
		}
		if took {
			return r.checkMoved("XDP", m)
		}
		return r.checkMoved("XDP", moved{})
	}))
	if !took {
		r.setSpending(after) // a headend may have taken a number in vain
	}
	if got := r.spending(); !cmp.Equal(got, after, cmp.AllowUnexported(spending{})) {
		l.Errorf("%s: XDP has spent other numbers than TC", node)
	}
	return o, m, took
}

// sent holds that a node has sent the frame on to its neighbour, and gives the packet with its labels.
func (l *labelRun) sent(node string, o outcome, m moved) mpls.Packet {
	l.Helper()
	if o.verdict != tcRedirect || len(m.dropped) > 0 || [6]byte(o.b) != neighbourMAC || [6]byte(o.b[6:]) != rigMAC {
		l.Fatalf("%s: verdict %d, refused for %v, frame %x", node, int32(o.verdict), m.dropped, o.b)
	}
	p, err := mpls.ParseFrame(o.b, func(label uint32) bool { return label-testServices < 1<<16 })
	if err != nil {
		l.Fatalf("%s: %v: %x", node, err, o.b)
	}
	return p
}

// arriving is what a node sent, as it comes to the next one.
func arriving(b []byte) []byte {
	b = slices.Clone(b)
	copy(b, rigMAC[:])
	return b
}

// labelled is a frame with labels.
func labelled(stack []mpls.Entry, word *mpls.Word, proof *[mpls.ProofLen]byte, payload []byte) []byte {
	return mpls.Packet{Ethernet: &mpls.Ethernet{Destination: rigMAC, Type: mpls.EtherTypeUnicast}, Stack: stack, Word: word, Proof: proof, Payload: payload}.Append(nil)
}

// testInner is a packet of TCP for a chain, and its Next Header value.
func testInner(chain string) (b []byte, next uint8) {
	tcp := make([]byte, 40)
	binary.BigEndian.PutUint16(tcp, 1025)
	binary.BigEndian.PutUint16(tcp[2:], 443)
	tcp[12] = 0x50
	if chain == "legacy" {
		return sentBy4("203.0.113.1", "198.51.100.9", 6, 0, tcp...), mpls.NextHeaderIPv4
	}
	b = sentBy("2001:db8:1::1", "2001:db8:8::9", 6, tcp...)
	b[0], b[1] = 0x6b, 0x80 // DSCP EF: class 5
	return b, mpls.NextHeaderIPv6
}

// hopsLess is the packet with so many taken off its hop limit or TTL.
func hopsLess(t *testing.T, b []byte, n byte) []byte {
	t.Helper()
	b = slices.Clone(b)
	if b[0]>>4 == 6 {
		b[7] -= n
		return b
	}
	b[8] -= n
	binary.BigEndian.PutUint16(b[10:], 0)
	var sum uint32
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum+sum>>16))
	return b
}

// A packet of each version, over a core of each, from the headend to the egress: labels,
// word and proof are what codec and model make, and what comes out is what went in.
func TestProgramsCarryAChainOverLabels(t *testing.T) {
	t.Parallel()
	for _, scheme := range []model.Scheme{model.SchemeKeyed, model.SchemeKeyedFlow, model.SchemeOPoT} {
		for _, core := range []int{4, 6} {
			t.Run(fmt.Sprintf("%s/core of IPv%d", scheme, core), func(t *testing.T) {
				l := newLabelRun(t, scheme, core, nil)
				for _, chain := range []string{"web", "legacy"} {
					l.carry(chain)
				}
			})
		}
	}
}

func (l *labelRun) carry(chain string) {
	l.Helper()
	inner, next := testInner(chain)
	path := l.path(chain)
	var visits []mpls.Visit
	for _, h := range path.Hops[1:] {
		visits = append(visits, mpls.Visit{Node: h.NodeLabel, Service: h.ServiceLabel})
	}
	both := func(node, port string, b []byte) (outcome, moved) {
		l.Helper()
		o, m, took := l.both(node, frame{port: port, b: b})
		if took != (node != "r4") {
			l.Errorf("%s: XDP finished the packet at %s: %t", chain, node, took)
		}
		return o, m
	}
	o, m := both("r1", portEdge, ether(inner))
	p := l.sent("r1", o, m)
	entropy, ok := p.Entropy()
	if !ok || entropy < mpls.LabelMin {
		l.Fatalf("%s: entropy label %d, %v", chain, entropy, ok)
	}
	class := uint8(0)
	if chain == "web" {
		class = 5
	}
	stack := mpls.Stack(visits, entropy, 0, mpls.TTL)
	for i := range 4 {
		stack[i] = mpls.NewEntry(stack[i].Label(), class, false, stack[i].TTL())
	}
	entered := hopsLess(l.T, inner, 1)
	r1 := l.node("r1")
	lane := startOf(&r1, chain).Lane
	steps := pot.WalkFlow(path.Header(), uint64(lane)<<abi.RNDLaneShift|1, flowOf(inner), path.Shares[:3]...)
	want := func(who string, p mpls.Packet, stack []mpls.Entry, at int) {
		l.Helper()
		v := steps[at].WireOut
		proof := srv6.Proof{Scheme: path.Scheme, Epoch: path.Epoch, Path: path.Path, RND: v.RND, CML: v.CML}.Bytes()
		if diff := cmp.Diff(stack, p.Stack); diff != "" {
			l.Errorf("%s, %s, stack (-want +got):\n%s", chain, who, diff)
		}
		if *p.Word != (mpls.Word{NextHeader: next}) || *p.Proof != proof || !slices.Equal(p.Payload, entered) {
			l.Errorf("%s, %s: word %+v, proof %x, payload %x\nwant next header %d, %x, %x", chain, who, *p.Word, *p.Proof, p.Payload, next, proof, entered)
		}
	}
	want("r1", p, stack, 0)
	for at, name := range []string{"r2", "r3"} {
		// r4 is on the way, and only passes it on.
		before := arriving(o.b)
		if o, m = both("r4", portCore, before); m.stats != nil && len(m.stats) > 0 {
			l.Errorf("%s: r4 counted %v", chain, m.stats)
		}
		less := slices.Clone(stack)
		less[0] = less[0].WithTTL(less[0].TTL() - 1)
		want("r4", l.sent("r4", o, m), less, at)
		o, m = both(name, portCore, before)
		if stack, ok = mpls.Advance(stack); !ok {
			l.Fatal("the codec finds no next visit")
		}
		want(name, l.sent(name, o, m), stack, at+1)
		if len(m.stats) != 1 {
			l.Errorf("%s: %s counted %v; want one stamp", chain, name, m.stats)
		}
	}
	for again, reason := range []abi.Reason{abi.ReasonNone, abi.ReasonReplay} {
		o6, m := both("r6", portCore, arriving(o.b))
		if reason != abi.ReasonNone {
			if o6.verdict != tcDrop || !slices.Equal(m.dropped, []string{reasonName(reason)}) {
				l.Errorf("%s: the same packet again: verdict %d, %v; want %s", chain, o6.verdict, m.dropped, reason)
			}
			continue
		}
		out := hopsLess(l.T, entered, 1)
		if o6.verdict != tcRedirect || len(m.dropped) > 0 || !slices.Equal(o6.b[srv6.EthernetLen:], out) || len(m.stats) != 1 {
			l.Errorf("%s: at the egress (%d): verdict %d, refused for %v, counted %v\n%x, want\n%x", chain, again, int32(o6.verdict), m.dropped, m.stats, o6.b, out)
		}
		if want := etherType(next == mpls.NextHeaderIPv4); !slices.Equal(o6.b[12:14], want) {
			l.Errorf("%s: the frame's type is %x; want %x", chain, o6.b[12:14], want)
		}
	}
}

// Scapy's packets with labels: the programs must do with each what its file says.
func TestProgramsDoWithScapysLabelsWhatTheyMust(t *testing.T) {
	t.Parallel()
	w, err := packets.LoadMPLSWorld()
	if err != nil {
		t.Fatal(err)
	}
	all, err := packets.MPLS()
	if err != nil {
		t.Fatal(err)
	}
	l := &labelRun{T: t, rigs: map[string]*rig{}}
	for _, n := range w.Nodes {
		l.rigs[n.Name] = newRig(t, rigSpec{name: n.Name, block: n.Block, locator: n.Locator, address: n.Address, own: n.Local, routes: refusing(n), mpls: n.MPLS})
	}
	s := &scapyRigs{T: t, world: w, rigs: l.rigs}
	finished := map[string]bool{} // by XDP
	for _, p := range all {
		t.Run(p.Name, func(t *testing.T) {
			r := s.at(t, p)
			r.must(r.forget())
			f := frame{port: p.Interface.Name, b: p.Frame}
			if p.Frames > 1 {
				f.gsoSize, f.gsoSegs = 20, uint32(p.Frames)
			}
			o, m, took := l.both(p.Node, f)
			if took {
				finished[p.Name] = true
			}
			verdict := map[packets.Verdict]uint32{packets.Pass: tcPass, packets.Deliver: tcPass, packets.Drop: tcDrop, packets.Forward: tcRedirect}[p.Verdict]
			var dropped []string
			if p.Reason != "" {
				dropped = []string{p.Reason}
			}
			if o.verdict != verdict && !(p.Verdict == packets.Drop && o.verdict == tcRedirect && !slices.Equal(o.b[12:14], []byte{0x88, 0x47})) || !slices.Equal(m.dropped, dropped) || !slices.Equal(m.reported, p.Reports) {
				t.Fatalf("%s: verdict %d, refused for %v, reported %v; want %s, %v, %v: %x", p.Note, int32(o.verdict), m.dropped, m.reported, p.Verdict, dropped, p.Reports, p.Frame)
			}
			if p.Verdict != packets.Forward {
				return
			}
			sent := o.b[srv6.EthernetLen:]
			if p.Interface.Role == model.RoleEdge && binary.BigEndian.Uint16(o.b[12:]) == mpls.EtherTypeUnicast {
				// The entropy label is the program's own choice.
				e := mpls.Entry(binary.BigEndian.Uint32(sent[8:]))
				if e.Label() < mpls.LabelMin {
					t.Errorf("%s: entropy label %d is a special one", p.Note, e.Label())
				}
				binary.BigEndian.PutUint32(sent[8:], uint32(e.WithLabel(0)))
			}
			if !slices.Equal(sent, p.Out) {
				t.Errorf("%s: sent\n%x\nwant\n%x", p.Note, sent, p.Out)
			}
		})
	}
	for _, p := range all {
		if why, took := leftToTC[p.Name], finished[p.Name]; p.Verdict == packets.Forward && took == (why != "") {
			t.Errorf("%s (%s): XDP finished it: %t; said to be TC's: %q", p.Name, p.Note, took, why)
		}
	}
}

// leftToTC are Scapy's packets with labels that leave the node, and that XDP does not finish.
var leftToTC = map[string]string{
	"mpls-two-visits":     "more than one visit",
	"mpls-three-visits":   "more than one visit",
	"mpls-transit-r4":     "on its way to another node",
	"mpls-transit-r3":     "on its way to another node",
	"mpls-transit-others": "on its way to another node",
	"mpls-reported":       "refused, and let go",
	"mpls-padded":         "longer than what is inside",
}

// onLabels is a packet of chain web as it comes to a position, the egress being 3.
func (l *labelRun) onLabels(at int, number uint64) mpls.Packet {
	return l.onLabelsOf("web", at, number)
}

func (l *labelRun) onLabelsOf(chain string, at int, number uint64) mpls.Packet {
	path := l.path(chain)
	inner, next := testInner(chain)
	var visits []mpls.Visit
	for _, h := range path.Hops[1:] {
		visits = append(visits, mpls.Visit{Node: h.NodeLabel, Service: h.ServiceLabel})
	}
	stack := mpls.Stack(visits, 0x12345, 0, mpls.TTL)
	for range at - 1 {
		stack, _ = mpls.Advance(stack)
	}
	v := pot.WalkFlow(path.Header(), number, flowOf(inner), path.Shares[:at]...)[at-1].WireOut
	proof := srv6.Proof{Scheme: path.Scheme, Epoch: path.Epoch, Path: path.Path, RND: v.RND, CML: v.CML}.Bytes()
	return mpls.Packet{
		Ethernet: &mpls.Ethernet{Destination: rigMAC, Type: mpls.EtherTypeUnicast},
		Stack:    stack, Word: &mpls.Word{NextHeader: next}, Proof: &proof, Payload: inner,
	}
}

// Labels that others may have taken off or put between ours.
func TestAStackNeedNotBeAsOursAre(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, nil)
	pair := []mpls.Entry{mpls.NewEntry(mpls.LabelEntropy, 0, false, 9), mpls.NewEntry(0x777, 0, false, 0)}
	own := func(n uint32) mpls.Entry { return mpls.NewEntry(testNodeLabel+n, 0, false, 63) }
	number := uint64(0)
	both := func(node string, b []byte) (outcome, moved) {
		t.Helper()
		o, m, took := l.both(node, frame{port: portCore, b: b})
		if !took {
			t.Errorf("XDP did not finish it at %s", node)
		}
		return o, m
	}
	for name, change := range map[string]func(s []mpls.Entry, n uint32) []mpls.Entry{
		"popped":                     func(s []mpls.Entry, _ uint32) []mpls.Entry { return s[1:] },
		"popped, no entropy label":   func(s []mpls.Entry, _ uint32) []mpls.Entry { return s[3:] },
		"own label twice":            func(s []mpls.Entry, n uint32) []mpls.Entry { return slices.Insert(s, 0, own(n)) },
		"own label three times":      func(s []mpls.Entry, n uint32) []mpls.Entry { return slices.Insert(s, 0, own(n), own(n)) },
		"another entropy pair":       func(s []mpls.Entry, _ uint32) []mpls.Entry { return slices.Insert(s, 3, pair...) },
		"an entropy pair on top":     func(s []mpls.Entry, _ uint32) []mpls.Entry { return slices.Insert(s, 0, pair...) },
		"a pair behind the service":  func(s []mpls.Entry, _ uint32) []mpls.Entry { return slices.Insert(s, 4, pair...) },
		"popped, pairs in between":   func(s []mpls.Entry, _ uint32) []mpls.Entry { return slices.Insert(s, 4, pair...)[1:] },
		"no entropy label, not gone": func(s []mpls.Entry, _ uint32) []mpls.Entry { return slices.Delete(s, 1, 3) },
	} {
		t.Run(name, func(t *testing.T) {
			// At a hop, and at the one behind it, which gets what that has written.
			number++
			p := l.onLabels(1, number)
			p.Stack = change(p.Stack, 2)
			length := len(p.Stack)
			o, m := both("r2", p.Append(nil))
			got := l.sent("r2", o, m)
			if labels := withoutRepeated(got.Labels()); len(got.Stack) != length || !slices.Equal(labels, []uint32{16003, 100768, 16006, 101536}) {
				t.Fatalf("r2 sends %v", got.Stack)
			}
			if got.Stack[0].TTL() != got.Stack[serviceAt(got)].TTL() || got.Stack[0].TTL() >= mpls.TTL {
				t.Errorf("TTLs of %v", got.Stack)
			}
			o, m = both("r3", arriving(o.b))
			got = l.sent("r3", o, m)
			if labels := withoutRepeated(got.Labels()); len(got.Stack) != length || !slices.Equal(labels, []uint32{16006, 101536}) {
				t.Fatalf("r3 sends %v", got.Stack)
			}
			if o, m = both("r6", arriving(o.b)); o.verdict != tcRedirect || len(m.dropped) > 0 {
				t.Errorf("r6: verdict %d, refused for %v, %v", int32(o.verdict), m.dropped, got.Stack)
			}
			// At the egress itself.
			number++
			p = l.onLabels(3, number)
			p.Stack = change(p.Stack, 6)
			if o, m = both("r6", p.Append(nil)); o.verdict != tcRedirect || len(m.dropped) > 0 {
				t.Errorf("at the egress: verdict %d, refused for %v, %v", int32(o.verdict), m.dropped, p.Stack)
			}
		})
	}
}

func serviceAt(p mpls.Packet) int {
	return slices.IndexFunc(p.Stack, func(e mpls.Entry) bool { return e.Label()-testServices < 1<<16 })
}

// withoutRepeated: the next node's label may be there twice.
func withoutRepeated(labels []uint32) []uint32 { return slices.Compact(labels) }

// A packet that is not as it must be: each has its reason, and is not sent anywhere.
func TestPacketsWithLabelsAreRefusedForTheirReasons(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, func(d *model.Domain) {
		d.Chains = append(d.Chains, model.Chain{
			Name: "segments", Ingress: []string{"r1"}, Functions: []string{"fw"}, Egress: "r6", Match: model.Match{Destination: xtest.Prefix("2001:db8:9::/48")},
			Proof: model.Proof{Scheme: model.SchemeKeyed},
		})
	})
	// What is refused below is refused with a way out that XDP knows.
	for node, at := range map[string]int{"r2": 1, "r6": 3} {
		if _, m, took := l.both(node, frame{port: portCore, b: l.onLabels(at, 800).Append(nil)}); !took {
			t.Fatalf("%s: XDP does not finish what is in order: %v", node, m.dropped)
		}
	}
	for name, c := range labelRefusals(l) {
		t.Run(name, func(t *testing.T) {
			frames := [][]byte{}
			if c.frame != nil {
				frames = append(frames, c.frame)
			} else {
				p := l.onLabels(c.at, 900)
				c.edit(&p)
				frames = append(frames, p.Append(nil))
			}
			for _, b := range frames {
				o, m, took := l.both(c.node, frame{port: c.port, b: b, gsoSize: c.gso, gsoSegs: min(c.gso, 2)})
				if took != (c.reason == abi.ReasonProof) {
					t.Errorf("XDP refused it: %t", took)
				}
				if o.verdict != tcDrop || !slices.Equal(m.dropped, []string{reasonName(c.reason)}) {
					t.Errorf("verdict %d, refused for %v; want %s: %x", int32(o.verdict), m.dropped, c.reason, b)
				}
				if len(m.stats) > 0 {
					t.Errorf("counted %v", m.stats)
				}
			}
		})
	}
}

type labelRefusal struct {
	node, port string
	at         int // position that the packet comes to
	edit       func(*mpls.Packet)
	frame      []byte
	gso        uint32
	reason     abi.Reason
}

func labelRefusals(l *labelRun) map[string]labelRefusal {
	hop := func(reason abi.Reason, edit func(p *mpls.Packet)) labelRefusal {
		return labelRefusal{node: "r2", port: portCore, at: 1, edit: edit, reason: reason}
	}
	end := func(reason abi.Reason, edit func(p *mpls.Packet)) labelRefusal {
		return labelRefusal{node: "r6", port: portCore, at: 3, edit: edit, reason: reason}
	}
	cut := func(reason abi.Reason, length int) labelRefusal {
		whole := l.onLabels(1, 900)
		b := whole.Append(nil)
		return labelRefusal{node: "r2", port: portCore, frame: b[:srv6.EthernetLen+length], reason: reason}
	}
	label := func(i int, to uint32) func(p *mpls.Packet) {
		return func(p *mpls.Packet) { p.Stack[i] = p.Stack[i].WithLabel(to) }
	}
	bottom := func(i int) func(p *mpls.Packet) {
		return func(p *mpls.Packet) { p.Stack[i] = p.Stack[i].WithBottom(true) }
	}
	proof := func(i int, x byte) func(p *mpls.Packet) {
		return func(p *mpls.Packet) { p.Proof[i] ^= x }
	}
	stack := 4 * 8
	inner, _ := testInner("web")
	segments := l.path("segments")
	return map[string]labelRefusal{
		"cut off in the stack":          cut(abi.ReasonLabelsTruncated, stack-1),
		"cut off in the word":           cut(abi.ReasonWordTruncated, stack+3),
		"cut off in the proof":          cut(abi.ReasonProofTruncated, stack+4+23),
		"cut off in the inner packet":   labelRefusal{node: "r6", port: portCore, frame: l.onLabels(3, 901).Append(nil)[:srv6.EthernetLen+stack+4+24+39], reason: abi.ReasonInnerTruncated},
		"no bottom within 40":           hop(abi.ReasonLabelsTooMany, func(p *mpls.Packet) { p.Stack = slices.Repeat(p.Stack[:1], 60) }),
		"own label is the bottom":       hop(abi.ReasonLabelsBottom, bottom(0)),
		"entropy indicator is it":       hop(abi.ReasonLabelsBottom, bottom(1)),
		"entropy label is it":           hop(abi.ReasonLabelsBottom, bottom(2)),
		"next node label is it":         hop(abi.ReasonLabelsBottom, func(p *mpls.Packet) { p.Stack = p.Stack[:5]; p.Stack[4] = p.Stack[4].WithBottom(true) }),
		"service label is it":           hop(abi.ReasonWordVersion, bottom(3)),
		"IPv4 explicit null":            hop(abi.ReasonLabelNull, label(0, 0)),
		"IPv6 explicit null":            hop(abi.ReasonLabelNull, label(3, 2)),
		"router alert":                  hop(abi.ReasonLabelAlert, label(0, 1)),
		"a label of nobody":             hop(abi.ReasonLabelUnknown, label(0, 17000)),
		"a label of nobody below ours":  hop(abi.ReasonLabelUnknown, label(3, 17000)),
		"another node's below ours":     hop(abi.ReasonLabelUnknown, label(3, testNodeLabel+4)),
		"a word of version 1":           hop(abi.ReasonWordVersion, func(p *mpls.Packet) { p.Word.Version = 1 }),
		"no word":                       hop(abi.ReasonWordVersion, func(p *mpls.Packet) { p.Word, p.Proof = nil, nil }),
		"next header TCP":               hop(abi.ReasonWordNext, func(p *mpls.Packet) { p.Word.NextHeader = 6 }),
		"no proof":                      hop(abi.ReasonTLVMissing, proof(0, 1)),
		"proof of another length":       hop(abi.ReasonTLVLength, proof(1, 1)),
		"another scheme":                hop(abi.ReasonScheme, proof(2, 1)),
		"another epoch":                 hop(abi.ReasonUnknownEpoch, proof(3, 8)),
		"another path":                  hop(abi.ReasonUnknownPath, proof(4, 0x80)),
		"another SID of this node":      hop(abi.ReasonUnknownSID, label(3, testServices+0x2ff)),
		"a SID of another node":         hop(abi.ReasonUnknownSID, label(3, testServices+0x300)),
		"TTL of the top label":          hop(abi.ReasonHopLimit, func(p *mpls.Packet) { p.Stack[0] = p.Stack[0].WithTTL(1) }),
		"TTL of the service label":      hop(abi.ReasonHopLimit, func(p *mpls.Packet) { p.Stack[3] = p.Stack[3].WithTTL(1) }),
		"TTL of a packet for another":   {node: "r4", port: portCore, at: 1, edit: func(p *mpls.Packet) { p.Stack[0] = p.Stack[0].WithTTL(1) }, reason: abi.ReasonHopLimit},
		"no next visit":                 hop(abi.ReasonUpperLayer, func(p *mpls.Packet) { p.Stack = p.Stack[:4]; p.Stack[3] = p.Stack[3].WithBottom(true) }),
		"next label is no service":      hop(abi.ReasonSegmentOutside, label(5, 16003)),
		"a visit behind the egress":     end(abi.ReasonSegmentsRemain, func(p *mpls.Packet) { p.Stack = append(p.Stack[:7], p.Stack[0], p.Stack[3].WithBottom(true)) }),
		"inside is the other version":   end(abi.ReasonInnerVersion, func(p *mpls.Packet) { p.Word.NextHeader = 4 }),
		"inside is longer":              end(abi.ReasonIp6Length, func(p *mpls.Packet) { p.Payload = slices.Clone(p.Payload); p.Payload[5]++ }),
		"a hop skipped":                 {node: "r6", port: portCore, at: 3, edit: func(p *mpls.Packet) { p.Proof = l.onLabels(2, 900).Proof }, reason: abi.ReasonProof},
		"another chain's packet inside": end(abi.ReasonWrongChain, func(p *mpls.Packet) { p.Payload = sentBy("2001:db8:1::1", "2001:db8:7::9", 6, make([]byte, 40)...) }),
		"a super-packet":                {node: "r2", port: portCore, at: 1, edit: func(*mpls.Packet) {}, gso: 20, reason: abi.ReasonLabelTrain},
		"a super-packet for a chain":    {node: "r1", port: portEdge, frame: ether(inner), gso: 20, reason: abi.ReasonCannotCut},
		"a proof of a path over SRv6": hop(abi.ReasonEncapsulation, func(p *mpls.Packet) {
			p.Stack[3] = p.Stack[3].WithLabel(testServices + uint32(segments.Hops[1].SID.As16()[7]) + 0x200)
			b := srv6.Proof{Scheme: segments.Scheme, Epoch: segments.Epoch, Path: segments.Path}.Bytes()
			p.Proof = &b
		}),
		"outside":                  {node: "r1", port: portEdge, at: 1, edit: func(*mpls.Packet) {}, reason: abi.ReasonOutsideMPLS},
		"outside, upstream labels": {node: "r1", port: portEdge, at: 1, edit: func(p *mpls.Packet) { p.Ethernet.Type = mpls.EtherTypeMulticast }, reason: abi.ReasonOutsideMPLS},
	}
}

// A chain over labels takes no packet over SRv6 either.
func TestProofOfAPathOverLabelsIsNoneOverSRv6(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, nil)
	path := l.path("web")
	inner, _ := testInner("web")
	v := pot.WalkFlow(path.Header(), 5, flowOf(inner), path.Shares[:1]...)[0].WireOut
	b, err := srv6.Wrap(path.Ingress[0].Address, path.SIDs(), srv6.Proof{Scheme: path.Scheme, Epoch: path.Epoch, Path: path.Path, RND: v.RND, CML: v.CML}, srv6.NextHeaderIPv6, inner)
	if err != nil {
		t.Fatal(err)
	}
	copy(b, rigMAC[:])
	if o, m := l.run("r2", portCore, b); o.verdict != tcDrop || !slices.Equal(m.dropped, []string{reasonName(abi.ReasonEncapsulation)}) {
		t.Errorf("verdict %d, refused for %v; want ENCAPSULATION", int32(o.verdict), m.dropped)
	}
}

// What the kernel would send to a neighbour by itself, it does not send with labels.
func TestPacketsWithLabelsGoWhereTheyCan(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, nil)
	inner, _ := testInner("web")
	r2 := l.node("r2")
	wants := func(what string, reason abi.Reason, r *rig) {
		t.Helper()
		l.rigs["r1"] = r
		if o, m := l.run("r1", portEdge, ether(inner)); !slices.Equal(m.dropped, []string{reasonName(reason)}) || o.verdict != tcDrop && slices.Equal(o.b[12:14], []byte{0x88, 0x47}) {
			t.Errorf("%s: refused for %v, frame %x; want %s", what, m.dropped, o.b, reason)
		}
	}
	n := l.node("r1")
	spec := rigSpec{name: n.Name, block: n.Block, locator: n.Locator, address: n.Address, mpls: n.MPLS}
	rigWith := func(routes ...rigRoute) *rig {
		s := spec
		s.routes = routes
		r := newRig(t, s)
		r.must(r.apply(&n))
		return r
	}
	host := func(kind, mtu int) rigRoute {
		return rigRoute{to: netip.PrefixFrom(r2MPLS(r2), 32), kind: kind, mtu: mtu}
	}
	wants("unreachable", abi.ReasonNoRoute, rigWith(host(unix.RTN_UNREACHABLE, 0)))
	wants("too long for the route", abi.ReasonTooBig, rigWith(host(0, 100)))
	r := rigWith()
	r.must(r.g.maps[tables.MapLabels].Delete(uint32(testNodeLabel + 2)))
	wants("label of nobody", abi.ReasonNoRoute, r)
	r = rigWith()
	r.must(r.in(r.forgetNeighbour))
	wants("no neighbour", abi.ReasonNoNeighbour, r)
	r = rigWith()
	r.program(object.EdgeTC) // with which the other comes
	r.must(r.g.maps[tables.MapPrograms].Delete(uint32(abi.ProgramMPLS)))
	wants("no program", abi.ReasonLabelsProgramBug, r)
}

// Where XDP has no programs for labels, TC does the work.
func TestWithoutProgramsForLabelsXDPLeavesThemToTC(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, nil)
	inner, _ := testInner("web")
	for _, want := range []bool{true, false} {
		for _, c := range []struct {
			node, port string
			b          []byte
		}{{"r1", portEdge, ether(inner)}, {"r2", portCore, l.onLabels(1, 5).Append(nil)}} {
			if o, _, took := l.both(c.node, frame{port: c.port, b: c.b}); took != want || o.verdict != tcRedirect {
				t.Errorf("%s: TC's verdict is %d, XDP finished it: %t; want %t", c.node, int32(o.verdict), took, want)
			}
			for _, j := range jumps {
				if r := l.rigs[c.node]; j.table == tables.MapProgramsXDP && want {
					r.program(j.program)
					r.must(r.g.maps[j.table].Delete(j.at))
				}
			}
		}
	}
}

// A super-packet that a path over labels takes is cut before it gets them, and comes back in
// frames; whether these fit is asked before.
func TestSuperPacketsAreCutBeforeTheyGetLabels(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, func(d *model.Domain) { d.MPLS.MTU = 1400 })
	r := l.rigs["r1"]
	mac := [6]byte{2, 0, 0, 0, 0, 0x77}
	r.must(r.g.setNode(abi.Node{Armed: 1, CutEnterIfindex: r.ports[portOut], CutEnterDmac: mac}))
	at := r.ports[portEdge]
	r.must(r.put(tables.MapPorts, &at, &abi.Port{Edge: 1}))
	for _, v := range []int{4, 6} {
		long := func(payload int) []byte {
			tcp := slices.Concat([]byte{4, 1, 1, 187, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0, 64, 0, 0, 0, 0}, make([]byte, payload))
			if v == 4 {
				return ether(sentBy4("203.0.113.1", "198.51.100.9", 6, 0, tcp...))
			}
			return ether(sentBy("2001:db8:1::1", "2001:db8:8::9", 6, tcp...))
		}
		before := r.spending()
		b := long(3000)
		o, m := l.runFrame("r1", frame{port: portEdge, b: b, gsoSize: 1200, gsoSegs: 3})
		if want := slices.Concat(mac[:], arriving(b)[6:]); o.verdict != tcRedirect || !slices.Equal(o.b, want) || len(m.dropped)+len(m.stats) > 0 {
			t.Errorf("IPv%d: verdict %d, refused for %v, counted %v, frame\n%s\nwant it unchanged for the cutter", v, int32(o.verdict), m.dropped, m.stats, layers(o.b))
		}
		if !cmp.Equal(r.spending(), before, cmp.AllowUnexported(spending{})) {
			t.Errorf("IPv%d: it has taken a number", v)
		}
		if o, m = l.runFrame("r1", frame{port: portEdge, b: b, gsoSize: 1330, gsoSegs: 3}); !slices.Equal(m.dropped, []string{reasonName(abi.ReasonChainMTU)}) {
			t.Errorf("IPv%d: frames that do not fit: verdict %d, refused for %v", v, int32(o.verdict), m.dropped)
		}
	}
	inner, _ := testInner("web")
	r.must(r.put(tables.MapPorts, &at, &abi.Port{Edge: 1, Cutter: 1}))
	if o, m := l.runFrame("r1", frame{port: portEdge, b: ether(inner), gsoSize: 20, gsoSegs: 2}); o.verdict != tcDrop || !slices.Equal(m.dropped, []string{reasonName(abi.ReasonLabelTrain)}) {
		t.Errorf("out of the cutter: verdict %d, refused for %v; want LABEL_TRAIN, or it goes round", int32(o.verdict), m.dropped)
	}
}

func r2MPLS(n plan.Node) netip.Addr {
	i := slices.IndexFunc(n.MPLS.Nodes, func(m plan.MPLSNode) bool { return m.Name == n.Name })
	return n.MPLS.Nodes[i].Address
}

// A packet with labels does not leave the domain, whatever is in it.
func TestPacketsWithLabelsDoNotLeaveTheDomain(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, nil)
	for _, index := range []uint32{0, abi.IndexProven, abi.IndexLetGo} {
		for _, kind := range []uint16{mpls.EtherTypeUnicast, mpls.EtherTypeMulticast} {
			p := l.onLabels(1, 5)
			p.Ethernet.Type = kind
			r := l.rigs["r6"]
			var o outcome
			var m moved
			r.must(r.in(func() (err error) {
				o, err = r.runLeave(frame{b: p.Append(nil)}, oracle.Departure{Index: index == abi.IndexProven, LetGo: index == abi.IndexLetGo})
				if err == nil {
					m, err = r.counted()
				}
				return err
			}))
			if o.verdict != tcDrop || !slices.Equal(m.dropped, []string{reasonName(abi.ReasonLeakMPLS)}) {
				t.Errorf("type %#x, index %d: verdict %d, refused for %v; want LEAK_MPLS", kind, index, int32(o.verdict), m.dropped)
			}
		}
	}
}

// A node without a plan lets nothing with labels pass.
func TestUnconfiguredNodeRefusesLabels(t *testing.T) {
	t.Parallel()
	l := newLabelRun(t, model.SchemeKeyed, 4, nil)
	r := l.rigs["r4"]
	r.must(r.apply(nil))
	if o, m := l.run("r4", portCore, l.onLabels(1, 5).Append(nil)); o.verdict != tcDrop || !slices.Equal(m.dropped, []string{reasonName(abi.ReasonUnconfigured)}) {
		t.Errorf("verdict %d, refused for %v; want UNCONFIGURED", int32(o.verdict), m.dropped)
	}
}

// forgetNeighbour leaves the rig without the neighbour that routes of IPv4 lead to. It
// answers nobody. It is a job.
func (r *rig) forgetNeighbour() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	return h.NeighDel(&netlink.Neigh{LinkIndex: int(r.ports[portOut]), Family: unix.AF_INET, IP: net.ParseIP(neighbourIPv4)})
}
