package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// checkOwn gives the frame to the program at a core interface's egress, and
// compares what it does with what the oracle says.
func (r *rig) checkOwn(b []byte, d oracle.Departure, mark uint32, labels *oracle.Labels) (oracle.Result, error) {
	const nowhere = 1 // the loopback device, which no plan has
	d.Socket = true   // a test run's packets have one
	from := map[oracle.Origin]uint32{oracle.FromNode: 0, oracle.FromPlan: r.ports[portEdge], oracle.FromElsewhere: nowhere}[d.From]
	want := r.node.Out(oracle.Arrival{Frame: b, Number: r.number}, d, mark)
	f := frame{port: portCore, b: b}
	wantMoved, err := r.wantMoved(f, want)
	if err != nil {
		return want, err
	}
	got, err := r.run(r.program(object.CoreOutTC), ebpf.RunOptions{Data: b, Context: skb{Ifindex: r.ports[portCore], IngressIfindex: from, Mark: mark}})
	if err != nil {
		return want, err
	}
	self := want.Error != nil && slices.Contains(append(r.node.Own, r.node.Address), addressOf(want.Error))
	if self || want.Verdict == oracle.Forward && r.node.Locator.Contains(addressOf(want.Packet)) {
		// It goes to the address that it came from.
		if !slices.Equal(got.b[:6], b[6:12]) {
			return want, fmt.Errorf("comes in again for %x, want %x", got.b[:6], b[6:12])
		}
		copy(got.b, b[:6])
	}
	if err := errors.Join(checkTC(f, want, got, labels), r.checkMoved("TC egress", wantMoved)); err != nil {
		return want, fmt.Errorf("%w\nfrom %d, mark %#x, the oracle says %s %s:\n%s", err, d.From, mark, want.Verdict, want.Reason, layers(b))
	}
	return want, r.takeNumberBack(want)
}

func addressOf(b []byte) netip.Addr {
	if b[0]>>4 == 4 {
		return netip.AddrFrom4([4]byte(b[16:20]))
	}
	return netip.AddrFrom16([16]byte(b[24:40]))
}

// changed is a node without functions, with other headends.
func changed(n plan.Node, change func(n *plan.Node)) *plan.Node {
	n.Proxies, n.Headends = nil, slices.Clone(n.Headends)
	change(&n)
	return &n
}

func startOf(n *plan.Node, chain string) *plan.Headend {
	for i := range n.Headends {
		if n.Headends[i].Chain == chain {
			return &n.Headends[i]
		}
	}
	panic(chain)
}

// edited is a frame with bytes of its IP packet changed.
func edited(b []byte, change func(ip []byte)) []byte {
	b = slices.Clone(b)
	change(b[srv6.EthernetLen:])
	return b
}

// Which packets a headend takes as they leave, and that it takes them as the
// oracle does.
func TestWhatTakesAChainAsItLeaves(t *testing.T) {
	tcp := upperLayer(t, 6, 1, 443, false, 0)
	icmp := func(kind byte) []byte {
		return edited(upperLayer(t, 58, 0, 0, false, 0), func(ip []byte) { ip[srv6.IPv6Len] = kind })
	}
	to := func(a string) func(ip []byte) { return func(ip []byte) { copy(ip[24:], xtest.Addr(a).AsSlice()) } }
	from := func(a string) func(ip []byte) { return func(ip []byte) { copy(ip[8:], xtest.Addr(a).AsSlice()) } }
	packet := func(name string) []byte {
		p, err := packets.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		return p.Frame
	}
	web := func(f func(h *plan.Headend)) func(n *plan.Node) {
		return func(n *plan.Node) { f(startOf(n, "web")) }
	}
	own := web(func(h *plan.Headend) { h.Own = true })
	ports := web(func(h *plan.Headend) {
		h.Own, h.Match.Priority, h.Match.Protocol, h.Match.DestinationPort = true, 10, 6, model.Ports{First: 443, Last: 443}
	})
	marked := web(func(h *plan.Headend) { h.Match.Priority, h.Match.Mark = 10, model.Mark{Value: 0x10, Mask: 0xf0} })
	hidden := func(n *plan.Node) { // a rule that takes no own traffic comes before one that does
		marked(n)
		h := *startOf(n, "web")
		h.Path, h.Chain, h.Match.Mark, h.Match.Priority = 4711, "other", model.Mark{}, 5
		n.Headends = append(n.Headends, h)
	}
	dscp := web(func(h *plan.Headend) { h.Own, h.Match.Priority, h.Match.DSCP = true, 10, 49 })

	type in struct {
		change func(n *plan.Node)
		b      []byte
		d      oracle.Departure
		mark   uint32
	}
	node, elsewhere, plans := oracle.Departure{From: oracle.FromNode}, oracle.Departure{From: oracle.FromElsewhere}, oracle.Departure{From: oracle.FromPlan}
	cases := map[string]struct {
		in
		takes bool
	}{
		"own":                               {in{own, tcp, node, 0}, true},
		"own, hop limit 1":                  {in{own, edited(tcp, func(ip []byte) { ip[7] = 1 }), node, 0}, true},
		"somebody else's":                   {in{own, tcp, elsewhere, 0}, false},
		"from a plan's interface":           {in{own, tcp, plans, 0}, false},
		"nobody asks for own packets":       {in{web(func(*plan.Headend) {}), tcp, node, 0}, false},
		"own, another destination":          {in{own, edited(tcp, to("2001:db8::1")), node, 0}, false},
		"own, to a SID":                     {in{own, edited(tcp, to("fc00:0:0:200::")), node, 0}, false},
		"own, from a SID":                   {in{own, edited(tcp, from("fc00:0:0:100::")), node, 0}, false},
		"own, from a link-local address":    {in{own, edited(tcp, from("fe80::1")), node, 0}, false},
		"own, to this node":                 {in{own, edited(tcp, to("fc00:1::1")), node, 0}, false},
		"own, with an SRH":                  {in{own, edited(packet("outside-srh"), to("fc00:8::2")), node, 0}, false},
		"own echo request":                  {in{own, icmp(128), node, 0}, true},
		"own Time Exceeded":                 {in{own, icmp(3), node, 0}, true},
		"own router solicitation":           {in{own, icmp(133), node, 0}, false},
		"own neighbour solicitation":        {in{own, icmp(135), node, 0}, false},
		"own redirect":                      {in{own, icmp(137), node, 0}, false},
		"own, after it":                     {in{own, icmp(138), node, 0}, true},
		"own, CS6":                          {in{own, upperLayer(t, 6, 1, 443, false, 48<<2), node, 0}, false},
		"own, CS7":                          {in{own, upperLayer(t, 6, 1, 443, false, 56<<2), node, 0}, false},
		"own, EF":                           {in{own, upperLayer(t, 6, 1, 443, false, 46<<2), node, 0}, true},
		"own, CS6 where the rule says so":   {in{dscp, upperLayer(t, 6, 1, 443, false, 48<<2), node, 0}, true},
		"own, by a port":                    {in{ports, tcp, node, 0}, true},
		"own, by another port":              {in{ports, upperLayer(t, 6, 1, 444, false, 0), node, 0}, false},
		"own fragment":                      {in{ports, upperLayer(t, 6, 1, 443, true, 0), node, 0}, false},
		"own, marked":                       {in{marked, tcp, node, 0x10}, true},
		"marked, with other bits":           {in{marked, tcp, elsewhere, 0xabc12}, true},
		"marked, from outside":              {in{marked, tcp, plans, 0x10}, true},
		"marked, CS6":                       {in{marked, upperLayer(t, 6, 1, 443, false, 48<<2), elsewhere, 0x10}, true},
		"another mark":                      {in{marked, tcp, elsewhere, 0x30}, false},
		"not marked":                        {in{marked, tcp, node, 0}, false},
		"marked, another destination":       {in{marked, edited(tcp, to("2001:db8::1")), elsewhere, 0x10}, false},
		"marked, to a SID":                  {in{marked, edited(tcp, to("fc00:0:0:200::")), elsewhere, 0x10}, false},
		"marked neighbour advertisement":    {in{marked, icmp(136), node, 0x10}, false},
		"marked multicast":                  {in{marked, edited(tcp, to("ff02::1")), node, 0x10}, false},
		"marked, but another rule comes up": {in{hidden, tcp, node, 0x10}, false},
		"IPv4 though only IPv6 is asked":    {in{own, packet("edge-ipv4"), node, 0}, false},
	}
	labels := &oracle.Labels{}
	r := newScapyRig(t, "r1")
	whole := r.node.Node
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		c := cases[name]
		r.must(r.apply(changed(whole, c.change)))
		if err := r.in(func() error {
			want, err := r.checkOwn(c.b, c.d, c.mark, labels)
			if err == nil && (want.Verdict == oracle.Forward) != c.takes {
				err = fmt.Errorf("%s %s, want taken: %t", want.Verdict, want.Reason, c.takes)
			}
			return err
		}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What enters no chain though it must is refused, and a sender on the node itself
// is told as any other.
func TestWhatCannotTakeItsChainIsRefused(t *testing.T) {
	const small = 1400
	r := newScapyRig(t, "r1")
	r.must(r.apply(changed(r.node.Node, func(n *plan.Node) {
		for i := range n.Headends {
			n.Headends[i].Own, n.Headends[i].MTU = true, small
		}
	})))
	labels := &oracle.Labels{}
	long := func(name string, length int, change func(ip []byte)) []byte {
		p, err := packets.Load(name)
		r.must(err)
		b := slices.Concat(p.Frame, make([]byte, srv6.EthernetLen+length-len(p.Frame)))
		ip := b[srv6.EthernetLen:]
		if ip[0]>>4 == 6 {
			binary.BigEndian.PutUint16(ip[4:], uint16(length-srv6.IPv6Len))
		} else {
			binary.BigEndian.PutUint16(ip[2:], uint16(length))
		}
		change(ip)
		if ip[0]>>4 == 4 {
			binary.BigEndian.PutUint16(ip[10:], 0)
			binary.BigEndian.PutUint16(ip[10:], sumOf(ip[:20]))
		}
		return b
	}
	six := func(ip []byte) { copy(ip[8:], xtest.Addr("fc00:7::1").AsSlice()) }
	four := func(ip []byte) { copy(ip[12:], xtest.Addr("192.0.2.254").AsSlice()) }
	as := func(ip []byte) {}
	for _, c := range []struct {
		name   string
		b      []byte
		from   oracle.Origin
		reason oracle.Reason
		told   bool
	}{
		{"fits", long("edge-web", small, six), oracle.FromNode, "", false},
		{"IPv4 that fits", long("edge-four", small, four), oracle.FromNode, "", false},
		{"too long", long("edge-web", small+1, six), oracle.FromNode, oracle.ChainMTU, true},
		{"too long, of an address that the node has not", long("edge-web", small+1, as), oracle.FromNode, oracle.ChainMTU, true},
		{"IPv4, too long", long("edge-four", small+1, four), oracle.FromNode, oracle.ChainMTU, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.must(r.in(func() error {
				want, err := r.checkOwn(c.b, oracle.Departure{From: c.from}, 0, labels)
				if err == nil && (want.Reason != c.reason || (want.Error != nil) != c.told) {
					err = fmt.Errorf("%s %q, an answer %t; want %q, %t", want.Verdict, want.Reason, want.Error != nil, c.reason, c.told)
				}
				return err
			}))
		})
	}
	r.must(r.setNumbers(0))
	r.must(r.in(func() error {
		want, err := r.checkOwn(long("edge-web", small, six), oracle.Departure{From: oracle.FromNode}, 0, labels)
		if err == nil && want.Reason != oracle.RNDExhausted {
			err = fmt.Errorf("without numbers: %s %s", want.Verdict, want.Reason)
		}
		return err
	}))
}

// sumOf is the checksum of an IPv4 header whose own field is zero (RFC 1071).
func sumOf(b []byte) uint16 {
	s := uint32(0)
	for i := 0; i < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}

// SYNs that a chain takes as they leave say no more than others: the node's own and
// marked ones.
func TestSYNsAreClampedAsTheyLeave(t *testing.T) {
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	r := newScapyRig(t, "r1")
	whole := r.node.Node
	for _, own := range []bool{true, false} {
		r.must(r.apply(changed(whole, func(n *plan.Node) {
			for i, chain := range []string{"clamped", "clamped4"} {
				h := startOf(n, chain)
				if h.Own = own; !own {
					h.Match.Priority, h.Match.Mark = uint16(i+1), model.Mark{Value: 0x10, Mask: 0xf0}
				}
			}
		})))
		d, mark := oracle.Departure{From: oracle.FromNode}, uint32(0)
		if !own {
			d, mark = oracle.Departure{From: oracle.FromElsewhere}, 0x10
		}
		labels, clamped := &oracle.Labels{}, 0
		for _, p := range all {
			if p.File != packets.SYNs {
				continue
			}
			if err := r.in(func() error {
				want, err := r.checkOwn(p.Frame, d, mark, labels)
				if err == nil && want.Verdict != oracle.Forward {
					err = fmt.Errorf("%s %s, want it taken", want.Verdict, want.Reason)
				}
				if want.Clamped {
					clamped++
				}
				return err
			}); err != nil {
				t.Errorf("own %t, %s: %v", own, p.Name, err)
			}
		}
		if clamped < 30 {
			t.Errorf("own %t: only %d SYNs were clamped", own, clamped)
		}
	}
}
