package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// bypassNode is netfilterNode, whose function in lets flows go past it.
func bypassNode(rules string) plan.Node {
	n := netfilterNode()
	n.Proxies[1].Netfilter.Bypass, n.Proxies[1].Netfilter.Rules = true, rules+" ct mark set $bypass"
	return n
}

func bypassMark(n plan.Node) uint32 { return n.Proxies[1].Netfilter.BypassMark("in") }

// tracked is an entry of the kernel's connection tracking for a packet's flow.
type tracked struct {
	mark   uint32
	status uint32 // IPS_SEEN_REPLY and others
	state  uint8  // of TCP
	helper string
	nat    bool
}

const (
	seenReply   = 1 << 1 // IPS_SEEN_REPLY
	confirmed   = 1 << 3 // IPS_CONFIRMED
	established = 3      // TCP_CONNTRACK_ESTABLISHED
)

// netfilterMessage is struct nfgenmsg, of which all but the family is 0.
type netfilterMessage struct{ family uint8 }

func (netfilterMessage) Len() int            { return 4 }
func (m netfilterMessage) Serialize() []byte { return []byte{m.family, 0, 0, 0} }

// track puts an entry into the bed's namespace, by ctnetlink (linux/netfilter/nfnetlink_conntrack.h).
func (r *proxyRun) track(inner []byte, e tracked) {
	r.Helper()
	const subsystem, newEntry = 1 << 8, 0
	family, src, dst, protocol, l4 := uint8(unix.AF_INET), inner[12:16], inner[16:20], inner[9], inner[20:]
	at := 1 // CTA_IP_V4_SRC
	if inner[0]>>4 == 6 {
		family, src, dst, protocol, l4, at = unix.AF_INET6, inner[8:24], inner[24:40], inner[6], inner[40:], 3
	}
	be32 := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	nested := func(kind int, children ...*nl.RtAttr) *nl.RtAttr {
		a := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
		for _, c := range children {
			a.AddChild(c)
		}
		return a
	}
	tuple := func(kind int, src, dst, sport, dport []byte) *nl.RtAttr {
		return nested(kind,
			nested(1, nl.NewRtAttr(at, src), nl.NewRtAttr(at+1, dst)),
			nested(2, nl.NewRtAttr(1, []byte{protocol}), nl.NewRtAttr(2, sport), nl.NewRtAttr(3, dport)))
	}
	r.must(r.do(func() error {
		req := nl.NewNetlinkRequest(subsystem|newEntry, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
		req.AddData(netfilterMessage{family})
		req.AddData(tuple(1, src, dst, l4[:2], l4[2:4]))
		req.AddData(tuple(2, dst, src, l4[2:4], l4[:2]))
		req.AddData(nl.NewRtAttr(3, be32(e.status|confirmed))) // ctnetlink makes no others
		if protocol == unix.IPPROTO_TCP {
			req.AddData(nested(4, nested(1, nl.NewRtAttr(1, []byte{e.state}))))
		}
		if e.helper != "" {
			req.AddData(nested(5, nl.NewRtAttr(1, append([]byte(e.helper), 0))))
		}
		if e.nat {
			other := slices.Clone(src)
			other[len(other)-1] ^= 0x40
			kind := map[uint8]int{unix.AF_INET: 1, unix.AF_INET6: 4}[family]
			req.AddData(nested(6, nl.NewRtAttr(kind, other), nl.NewRtAttr(kind+1, other)))
		}
		req.AddData(nl.NewRtAttr(7, be32(600)))
		req.AddData(nl.NewRtAttr(8, be32(e.mark)))
		_, err := req.Execute(unix.NETLINK_NETFILTER, 0)
		return err
	}))
}

// goes gives a packet to the function's SID: past it, or into it.
func (r *proxyRun) goes(inner []byte) (past, byXDP bool) {
	r.Helper()
	p := argued(1, 2, argumentNode, inner)
	before := r.function("in")
	v, out, byXDP, err := r.xdpThenTC(object.CoreXDP, object.CoreTC, "in", frameOf(p))
	r.must(err)
	after := r.function("in")
	switch {
	case after.Bypassed == before.Bypassed+1 && after.RxSuccess == before.RxSuccess:
		if want := restored(r, p, xtest.Share(2, 9), inner); v != verdictRedirect || !bytes.Equal(out[srv6.EthernetLen:], want) {
			r.Fatalf("past the function: verdict %d, packet\n%x, want\n%x", int32(v), out[srv6.EthernetLen:], want)
		}
		return true, byXDP
	case after.Bypassed == before.Bypassed && after.RxSuccess == before.RxSuccess+1 && !byXDP:
		if v != verdictUnspec || !bytes.Equal(out[srv6.EthernetLen:], inner) {
			r.Fatalf("into the function: verdict %d, packet\n%x, want\n%x", int32(v), out[srv6.EthernetLen:], inner)
		}
		return false, byXDP
	}
	r.Fatalf("verdict %d, refusals %v, %+v after %+v", int32(v), r.refusals(), after, before)
	return false, false
}

// goesPast allows for packets that go into the function for a flow's timeout, and because
// this goroutine has come to another CPU.
func (r *proxyRun) goesPast(inner []byte) (past, byXDP bool) {
	r.Helper()
	for range 50 {
		if p, x := r.goes(inner); p {
			if past = true; x {
				return true, true
			}
		}
	}
	return past, false
}

func (r *proxyRun) goesIn(inner []byte) bool {
	r.Helper()
	for range 5 {
		if past, _ := r.goes(inner); past {
			return false
		}
	}
	return true
}

// packetOf is a packet of its own flow.
func packetOf(n int, ipv4, overTCP bool) []byte {
	l4 := slices.Concat([]byte{0, 0, 0, 81, 0, 12, 0, 0}, []byte("past"))
	protocol := uint8(unix.IPPROTO_UDP)
	if overTCP {
		l4 = []byte{0, 0, 0, 81, 12: 0x50, 13: 0x10, 23: 1}
		protocol = unix.IPPROTO_TCP
	}
	binary.BigEndian.PutUint16(l4, uint16(2000+n))
	if !ipv4 {
		return innerOf(protocol, l4)
	}
	ip := []byte{0x45, 1, 0, byte(20 + len(l4)), 0, 1, 0, 0, 63, protocol, 0, 0, 192, 0, 2, 1, 198, 51, 100, 1}
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	return slices.Concat(ip, l4)
}

// Each condition by itself: a flow that the rules are done with goes past the function, on
// both hooks, and one that lacks any of what that takes does not.
func TestFlowsGoPastAFunctionThatIsDoneWithThem(t *testing.T) {
	if err := haveLookUp(); err != nil {
		t.Skipf("no look-up of flows: %v", err)
	}
	n := bypassNode("")
	r := newProxyRun(t, n)
	r.withXDP()
	mark := bypassMark(n)
	good := tracked{mark: mark, status: seenReply, state: established}
	with := func(f func(*tracked)) *tracked {
		e := good
		f(&e)
		return &e
	}
	tcpFlags := func(f byte) func([]byte) { return func(b []byte) { b[len(b)-24+13] = f } }
	for i, c := range []struct {
		name  string
		entry *tracked     // nil: there is none
		turn  func([]byte) // what is other than in its flow's packets
		ipv6  bool         // alone
		tcp   bool         // alone
		past  bool
	}{
		{name: "all is there", entry: &good, past: true},
		{name: "no entry"},
		{name: "another mark", entry: with(func(e *tracked) { e.mark++ })},
		{name: "no mark", entry: with(func(e *tracked) { e.mark = 0 })},
		{name: "no answer yet", entry: with(func(e *tracked) { e.status = 0 })},
		{name: "addresses are translated", entry: with(func(e *tracked) { e.nat = true })},
		{name: "a helper follows it", entry: with(func(e *tracked) { e.helper = "ftp" }), tcp: true},
		{name: "its connection ends", entry: with(func(e *tracked) { e.state = 4 }), tcp: true}, // TCP_CONNTRACK_FIN_WAIT
		{name: "its connection begins", entry: with(func(e *tracked) { e.state = 2 }), tcp: true},
		{name: "SYN", entry: &good, turn: tcpFlags(0x02), tcp: true},
		{name: "SYN, ACK", entry: &good, turn: tcpFlags(0x12), tcp: true},
		{name: "FIN, ACK", entry: &good, turn: tcpFlags(0x11), tcp: true},
		{name: "RST, ACK", entry: &good, turn: tcpFlags(0x14), tcp: true},
		{name: "no flag", entry: &good, turn: tcpFlags(0), tcp: true},
		{name: "PSH, ACK", entry: &good, turn: tcpFlags(0x18), tcp: true, past: true},
		{name: "a TCP header beyond the packet", entry: &good, turn: func(b []byte) { b[len(b)-24+12] = 0xf0 }, tcp: true},
		{name: "the last hop", entry: &good, turn: func(b []byte) { b[7] = 1 }, ipv6: true},
		{name: "an extension header", entry: &good, turn: func(b []byte) { b[6] = 60 }, ipv6: true},
	} {
		for j, kind := range []struct{ ipv4, tcp bool }{{false, false}, {false, true}, {true, false}, {true, true}} {
			if c.tcp && !kind.tcp || c.ipv6 && kind.ipv4 {
				continue
			}
			inner := packetOf(10*i+j, kind.ipv4, kind.tcp)
			if c.entry != nil {
				r.track(inner, *c.entry)
			}
			if c.turn != nil {
				c.turn(inner)
			}
			name := fmt.Sprintf("%s, %+v", c.name, kind)
			if !c.past {
				if !r.goesIn(inner) {
					t.Errorf("%s: goes past the function", name)
				}
				continue
			}
			if past, byXDP := r.goesPast(inner); !past || !byXDP {
				t.Errorf("%s: past %t, by XDP %t; want both", name, past, byXDP)
			}
		}
	}

	fragment := packetOf(900, true, false)
	r.track(fragment, good)
	fragment[6], fragment[10] = 0x20, fragment[10]-0x20
	if !r.goesIn(fragment) {
		t.Error("a fragment goes past the function")
	}
}

// A packet that begins or ends a connection goes in, and so does what comes next, until the
// kernel is asked again; one of many goes in anyway; and all do once rules are others.
func TestFlowsComeBackToTheirFunction(t *testing.T) {
	if err := haveLookUp(); err != nil {
		t.Skipf("no look-up of flows: %v", err)
	}
	n := bypassNode("")
	r := newProxyRun(t, n)
	r.must(r.net.AddNeighbour("side", xtest.Addr("fd00:5::2"), [6]byte{2, 9, 9, 9, 9, 9}))
	inner := packetOf(1, false, true)
	r.track(inner, tracked{mark: bypassMark(n), status: seenReply, state: established})
	if past, _ := r.goesPast(inner); !past {
		t.Fatal("the flow does not go past its function")
	}
	const every = 4096 // BYPASS_THROUGH_EVERY
	before := r.function("in")
	frame := frameOf(argued(1, 2, argumentNode, inner))
	for range 2 * every {
		_, _, err := r.run(object.CoreTC, "in", frame, 0)
		r.must(err)
	}
	after := r.function("in")
	in, past := after.RxSuccess-before.RxSuccess, after.Bypassed-before.Bypassed
	if in+past != 2*every || in < 1 || past < every {
		t.Errorf("of %d packets %d went in and %d past it; want some in, most past", 2*every, in, past)
	}

	// Other rules: the mark of the entry is none any more, however short ago it was read.
	if past, _ := r.goesPast(inner); !past {
		t.Fatal("the flow does not go past its function any more")
	}
	r.must(r.apply(r.d, bypassNode("tcp dport 81 drop;")))
	if !r.goesIn(inner) {
		t.Error("the flow goes past a function whose rules have changed")
	}
	r.must(r.apply(r.d, n))
	if past, _ := r.goesPast(inner); !past {
		t.Error("with the rules of before the flow does not go past its function")
	}
	without := netfilterNode()
	r.must(r.apply(r.d, without))
	if !r.goesIn(inner) {
		t.Error("the flow goes past a function without a bypass")
	}
}

// A plan with a bypass is refused where the kernel cannot look flows up, and the one before
// stays in force.
func TestBypassNeedsTheProgramThatAsks(t *testing.T) {
	// The program calls a function that no kernel has.
	i := slices.IndexFunc(object.All, func(o object.Object) bool { return o.Program == object.BypassTC })
	o := object.All[i]
	t.Cleanup(func() { object.All[i] = o })
	elf := bytes.ReplaceAll(*o.ELF, []byte("bpf_skb_ct_lookup"), []byte("bpf_skb_ct_missed"))
	object.All[i].Load = func() (*ebpf.CollectionSpec, error) { return ebpf.LoadCollectionSpecFromReader(bytes.NewReader(elf)) }

	b := withFunction(newLonelyBed(t)) // what all tests load is changed
	d := b.open()
	b.must(b.apply(d, netfilterNode()))
	err := b.apply(d, bypassNode(""))
	if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "bypass: established") || !strings.Contains(err.Error(), "modprobe nf_conntrack") {
		t.Errorf("got %v; want the plan refused, for its bypass, with what the kernel needs", err)
	}
	if have := haveLookUp(); !errors.Is(have, ebpf.ErrNotSupported) {
		t.Errorf("doctor finds %v, want that the kernel has no such function", have)
	}
	proxies := map[uint32]abi.Proxy{}
	b.must(readMap(d.gen, tables.MapProxies, proxies))
	for id, p := range proxies {
		if p.Bypass != 0 {
			t.Errorf("function %d has a bypass, and no program asks: %+v", id, p)
		}
	}
}
