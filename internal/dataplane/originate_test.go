package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// Paths of originNode that start at functions.
const (
	wide     = 10 // at own: to 2001:db8:1::/48
	narrow   = 11 // at own: to 2001:db8:1:1::/64
	https    = 12 // at own: TCP to port 443 in 2001:db8:1::/48, before all others
	legacy   = 13 // at own: IPv4, to 198.51.100.0/24
	bound    = 14 // at own: to 2001:db8:4::/48, with keyed-flow
	theOther = 15 // at other: to 2001:db8:2::/48
)

// originNode has functions own and other, which originate, and function quiet, which does
// not; an edge whose traffic to 2001:db8:3::/48 takes path 1, and the guard of path 2.
func originNode() plan.Node {
	n := netfilterNode()
	own, other, quiet := n.Proxies[0], netfilterProxy("other", "container"), netfilterProxy("quiet", "container")
	own.OnUnknown, other.OnUnknown = model.OnUnknownOriginate, model.OnUnknownOriginate
	own.Netfilter.Addresses = []netip.Addr{xtest.Addr("fd00:f::1"), xtest.Addr("192.0.2.1")}
	other.To, other.From, quiet.To, quiet.From = "to2", "from2", "to3", "from3"
	n.Proxies = []plan.Proxy{own, other, quiet}
	n.Endpoints = n.Endpoints[:2]
	from := func(function string, path uint32, scheme model.Scheme, m model.Match) {
		h := xtest.HeadendOf(path, 0, scheme, m, 1)
		h.From = function
		h.Segments = []netip.Addr{xtest.OtherSID(1), xtest.OtherSID(9)}
		n.Headends = append(n.Headends, h)
	}
	n.Headends = []plan.Headend{xtest.HeadendOf(1, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:3::/48")}, 2)}
	from("own", wide, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:1::/48")})
	from("own", narrow, model.SchemeOPoT, model.Match{Destination: xtest.Prefix("2001:db8:1:1::/64")})
	from("own", https, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:1::/48"), Priority: 10, Protocol: 6, DestinationPort: model.Ports{First: 443, Last: 443}})
	from("own", legacy, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("198.51.100.0/24")})
	from("own", bound, model.SchemeKeyedFlow, model.Match{Destination: xtest.Prefix("2001:db8:4::/48")})
	from("other", theOther, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:2::/48")})
	n.Egresses = []plan.Egress{xtest.EgressOf(2, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("fd00:77::/48")}, xtest.OwnSID(7), 2)}
	return n
}

func newOriginRun(t *testing.T) *proxyRun {
	b := newProxyBed(t)
	for _, name := range []string{"to2", "from2", "to3", "from3"} {
		b.addVeth(name)
	}
	r := &proxyRun{b, b.open(), map[string][6]byte{}, map[string]uint32{}}
	b.must(b.apply(r.d, originNode()))
	for _, name := range []string{"in", "from", "to", "from2", "from3", "side"} {
		l, err := b.net.Link(name)
		b.must(err)
		r.macs[name], r.index[name] = l.MAC, uint32(l.Index)
	}
	return r
}

// sentBy is a packet as a function's namespace sends one.
func sentBy(from, to string, next uint8, payload ...byte) []byte {
	p := srv6.Packet{Header: srv6.Header{NextHeader: next, HopLimit: 64, Source: xtest.Addr(from), Destination: xtest.Addr(to), TrafficClass: 1}, Payload: payload}
	p.Header.PayloadLength = uint16(len(payload))
	b, err := p.Append(nil)
	if err != nil {
		panic(err)
	}
	return b
}

func sentBy4(from, to string, protocol uint8, fragment uint16, payload ...byte) []byte {
	b, err := srv6.IPv4{TTL: 64, Protocol: protocol, Fragment: fragment, Source: xtest.Addr(from), Destination: xtest.Addr(to)}.Append(nil, payload)
	if err != nil {
		panic(err)
	}
	return b
}

// tcpTo is the header of a segment from port 80.
func tcpTo(port uint16) []byte {
	b := make([]byte, 20)
	b[1], b[12], b[13] = 80, 0x50, 0x14 // RST, ACK
	binary.BigEndian.PutUint16(b[2:], port)
	return b
}

func originHeadend(path uint32) plan.Headend {
	n := originNode()
	return n.Headends[slices.IndexFunc(n.Headends, func(h plan.Headend) bool { return h.Path == path })]
}

// hopped is the packet after a hop.
func hopped(inner []byte) []byte {
	if inner[0]>>4 == 6 {
		return forwarded(inner)
	}
	out := slices.Clone(inner)
	out[8]--
	sum := uint32(binary.BigEndian.Uint16(out[10:])) + 0x100 // RFC 1624
	binary.BigEndian.PutUint16(out[10:], uint16(sum+sum>>16))
	return out
}

// wantOriginated holds that what comes out is the packet in the path, whole: with the
// first stamp, and its hop counted.
func (r *proxyRun) wantOriginated(path uint32, at string, inner []byte) {
	r.Helper()
	function := map[string]string{"from": "own", "to": "own", "from2": "other"}[at]
	before := r.function(function)
	verdict, out, err := r.run(object.FunctionTC, at, ether(inner), 0)
	if err != nil || verdict != verdictRedirect {
		r.Errorf("verdict %d, %v, refusals %v; want it to take path %d", int32(verdict), err, r.refusals(), path)
		return
	}
	after := r.function(function)
	if after.TxOriginated != before.TxOriginated+1 || after.TxNotCached != before.TxNotCached+1 || after.TxPlain != before.TxPlain || after.TxSuccess != before.TxSuccess {
		r.Errorf("%+v after %+v; want one more that originated there", after, before)
	}
	p, err := srv6.DecodeFrame(out)
	if err != nil || p.SRH == nil {
		r.Errorf("it came out as %x: %v", out, err)
		return
	}
	proof, ok := p.Proof()
	h := originHeadend(path)
	share, start := h.Share, pot.Values{RND: proof.RND}
	if h.Scheme == model.SchemeOPoT {
		start.RND ^= share.Polynomial.Up.RND ^ share.Polynomial.Down.RND // the stamp masks it
	}
	values, err := pot.Model{}.Stamp(share, pot.Header{Scheme: h.Scheme, Epoch: h.Epoch, Path: path}, flowOf(inner), start)
	r.must(err)
	if !ok || proof.Path != path || proof.Scheme != h.Scheme || proof.CML != values.CML || proof.RND != values.RND {
		r.Errorf("path %d: proof %+v; want values %+v", path, proof, values)
	}
	if p.Header.Source != originNode().Address || p.Header.Destination != h.Segments[0] || !slices.Equal(p.SRH.Visit(), h.Segments) || p.SRH.SegmentsLeft != uint8(len(h.Segments)-1) {
		r.Errorf("path %d: outer header %+v, SRH %+v; want %v", path, p.Header, p.SRH, h.Segments)
	}
	if want := hopped(inner); !bytes.Equal(p.Payload, want) {
		r.Errorf("path %d: inside is\n%x, want\n%x", path, p.Payload, want)
	}
}

// What a function makes takes the rest of the chain that takes such packets: the most
// specific one of its own chains, and those alone.
func TestWhatAFunctionMakesTakesTheRestOfItsChain(t *testing.T) {
	r := newOriginRun(t)
	const src = "fd00:1:1::1"
	udpHeader := []byte{0, 80, 0, 81, 0, 8, 0, 0}
	for _, c := range []struct {
		name  string
		path  uint32
		at    string
		inner []byte
	}{
		{"by prefix", wide, "from", sentBy(src, "2001:db8:1:2::1", 17, udpHeader...)},
		{"by the interface to the function", wide, "to", sentBy(src, "2001:db8:1:2::1", 17, udpHeader...)},
		{"by a longer prefix", narrow, "from", sentBy(src, "2001:db8:1:1::1", 17, udpHeader...)},
		{"by priority", https, "from", sentBy(src, "2001:db8:1:1::1", 6, tcpTo(443)...)},
		{"by another port", narrow, "from", sentBy(src, "2001:db8:1:1::1", 6, tcpTo(80)...)},
		{"an ICMP error that a chain takes", wide, "from", sentBy("fd00:f::1", "2001:db8:1:2::1", 58, 1, 1, 0, 0, 0, 0, 0, 0)},
		{"IPv4", legacy, "from", sentBy4("203.0.113.1", "198.51.100.7", 6, 0, tcpTo(80)...)},
		{"bound to its flow", bound, "from", sentBy(src, "2001:db8:4::1", 6, tcpTo(80)...)},
		{"of another function", theOther, "from2", sentBy(src, "2001:db8:2::1", 17, udpHeader...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &proxyRun{r.bed.in(t), r.d, r.macs, r.index}
			r.wantOriginated(c.path, c.at, c.inner)
		})
	}

	srh := outerOf(wide, 1, model.SchemeKeyed, 1, udp(1))
	srh.Header.Destination, srh.Header.Source = xtest.Addr("2001:db8:1::1"), xtest.Addr(src)
	whole := sentBy4("203.0.113.1", "198.51.100.7", 6, 0, tcpTo(80)...)
	badSum := slices.Clone(whole)
	badSum[10]++
	tooLong := slices.Clone(sentBy(src, "2001:db8:1:2::1", 17, udpHeader...))
	tooLong[5]++
	for _, c := range []struct {
		name   string
		reason abi.Reason
		at     string
		inner  []byte
	}{
		{"no chain's", abi.ReasonOriginUnmatched, "from", sentBy(src, "2001:db8:9::1", 17, udpHeader...)},
		{"another function's chain's", abi.ReasonOriginUnmatched, "from", sentBy(src, "2001:db8:2::1", 17, udpHeader...)},
		{"another function's, at the other one", abi.ReasonOriginUnmatched, "from2", sentBy(src, "2001:db8:1::1", 17, udpHeader...)},
		{"that of the node's own edge", abi.ReasonOriginUnmatched, "from", sentBy(src, "2001:db8:3::1", 17, udpHeader...)},
		{"IPv4 of no chain", abi.ReasonOriginUnmatched, "from", sentBy4("203.0.113.1", "198.51.101.7", 6, 0, tcpTo(80)...)},
		{"a function that does not originate", abi.ReasonNotCached, "from3", sentBy(src, "2001:db8:1::1", 17, udpHeader...)},
		{"from a link-local address", abi.ReasonOriginUnmatched, "from", sentBy("fe80::2", "2001:db8:1:2::1", 17, udpHeader...)},
		{"to a SID", abi.ReasonOutsideSID, "from", sentBy(src, "fc00:0:0:200::", 17, udpHeader...)},
		{"from a SID", abi.ReasonOutsideSource, "from", sentBy("fc00:0:0:200::", "2001:db8:1:2::1", 17, udpHeader...)},
		{"with an SRH", abi.ReasonOutsideSRH, "from", frameOf(srh)[srv6.EthernetLen:]},
		{"a fragment, which may be of the chain by port", abi.ReasonPortsUnread, "from", sentBy(src, "2001:db8:1:2::1", 44, 6, 0, 0, 8, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8)},
		{"longer than its frame", abi.ReasonIp6Length, "from", tooLong},
		{"with a wrong checksum", abi.ReasonIp4Checksum, "from", badSum},
		{"an ICMP error from another's address", abi.ReasonOriginUnmatched, "from", sentBy("fd00:f::2", "fd00:1:1::1", 58, 1, 1, 0, 0, 0, 0, 0, 0)},
		{"an ICMP error of a function without an address", abi.ReasonOriginUnmatched, "from2", sentBy("::", "fd00:1:1::1", 58, 1, 1, 0, 0, 0, 0, 0, 0)},
		{"an echo reply from its address", abi.ReasonOriginUnmatched, "from", sentBy("fd00:f::1", "fd00:1:1::1", 58, 129, 0, 0, 0, 0, 0, 0, 0)},
		{"UDP from its address", abi.ReasonOriginUnmatched, "from", sentBy("fd00:f::1", "fd00:1:1::1", 17, udpHeader...)},
		{"an ICMP error cut short", abi.ReasonOriginUnmatched, "from", sentBy("fd00:f::1", "fd00:1:1::1", 58, 1, 1)},
		{"an ICMP error that a chain requires a proof of", abi.ReasonUnproven, "from", sentBy("fd00:f::1", "fd00:77::1", 58, 1, 1, 0, 0, 0, 0, 0, 0)},
		{"an IPv4 fragment from its address", abi.ReasonOriginUnmatched, "from", sentBy4("192.0.2.1", "203.0.113.1", 1, 0x2000, 3, 13, 0, 0, 0, 0, 0, 0)},
		{"an IPv4 echo reply from its address", abi.ReasonOriginUnmatched, "from", sentBy4("192.0.2.1", "203.0.113.1", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0)},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &proxyRun{r.bed.in(t), r.d, r.macs, r.index}
			r.wantRefused(c.reason, object.FunctionTC, c.at, ether(c.inner), 0)
		})
	}

	for _, inner := range [][]byte{
		sentBy("fd00:f::1", "fd00:1:1::1", 58, 1, 1, 0, 0, 0, 0, 0, 0),
		sentBy4("192.0.2.1", "203.0.113.1", 1, 0, 3, 13, 0, 0, 0, 0, 0, 0),
	} {
		before := r.function("own")
		verdict, out, err := r.run(object.FunctionTC, "from", ether(inner), 0)
		if after := r.function("own"); err != nil || verdict != verdictUnspec || !bytes.Equal(out[srv6.EthernetLen:], inner) || after.TxPlain != before.TxPlain+1 || after.TxOriginated != before.TxOriginated {
			t.Errorf("an ICMP error from the function's address: verdict %d, %v, %+v, refusals %v; want it routed as it is", int32(verdict), err, after, r.refusals())
		}
	}
}

// A packet that had an index came out of a tunnel, and nobody has verified it: that it
// has lost its header makes it none of the function's own.
func TestWhatLostItsHeaderIsNotMadeByTheFunction(t *testing.T) {
	r := newOriginRun(t)
	inner := sentBy("fd00:1:1::1", "2001:db8:1:2::1", 17, 0, 80, 0, 81, 0, 8, 0, 0)
	r.wantOriginated(wide, "from", inner)
	if v, _, err := r.run(object.CoreTC, "in", frameOf(argued(1, 1, argumentOwn, inner)), 0); err != nil || v != verdictRedirect {
		t.Fatalf("verdict %d, %v, refusals %v", int32(v), err, r.refusals())
	}
	_, kept := r.keptSlot()
	index := uint32(kept.Fingerprint)
	run := func(index uint32) uint32 {
		t.Helper()
		mac, frame := r.macs["from"], ether(inner)
		copy(frame, mac[:])
		var verdict uint32
		program := setsIndex(t, r.d.program(object.FunctionTC), index)
		r.must(r.do(func() (err error) {
			verdict, err = program.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, 512), Context: skb{Ifindex: r.index["from"]}})
			return err
		}))
		return verdict
	}
	before := r.function("own")
	if v := run(index); v != verdictRedirect {
		t.Fatalf("with its index: verdict %d, refusals %v", int32(v), r.refusals())
	}
	if now := r.function("own"); now.TxSuccess != before.TxSuccess+1 || now.TxOriginated != before.TxOriginated {
		t.Errorf("%+v after %+v; want its own header back", now, before)
	}
	for name, index := range map[string]uint32{"a copy": index, "an index of nobody": index + 1, "what leaves as verified": abi.IndexProven} {
		refused, before := r.refusals()[abi.ReasonNotCached], r.function("own")
		v := run(index)
		if now := r.function("own"); v != verdictShot || r.refusals()[abi.ReasonNotCached] != refused+1 || now.TxOriginated != before.TxOriginated {
			t.Errorf("%s: verdict %d, %+v, refusals %v; want it refused as not-cached", name, int32(v), now, r.refusals())
		}
	}
}

// Where the program or a table is not there, nothing is let through.
func TestOriginationFailsClosed(t *testing.T) {
	r := newOriginRun(t)
	inner := sentBy("fd00:1:1::1", "2001:db8:1:2::1", 17, 0, 80, 0, 81, 0, 8, 0, 0)
	r.wantOriginated(wide, "from", inner)
	m := r.d.gen.maps
	for _, c := range []struct {
		name   string
		damage func() error
		reason abi.Reason
	}{
		{"rules by priority", func() error { return m[tables.MapRules].Delete(uint32(0)) }, abi.ReasonRulesMissingBug},
		{"rules by prefixes", func() error {
			proxies := r.contents().Proxies
			keys, err := tables.ProxyKeys(originNode().Proxies)
			return errors.Join(err, r.setNoRules(), m[tables.MapMatch].Delete(uint32(abi.MatchOrigin)-1+uint32(proxies[keys["own"]].Origin)))
		}, abi.ReasonOriginUnmatched},
		{"the program", func() error { return m[tables.MapPrograms].Delete(uint32(abi.ProgramOriginate)) }, abi.ReasonNotCached},
	} {
		if err := c.damage(); err != nil {
			t.Fatal(fmt.Errorf("%s: %w", c.name, err))
		}
		r.wantRefused(c.reason, object.FunctionTC, "from", ether(inner), 0)
	}
}

func (r *proxyRun) contents() tables.Contents {
	r.Helper()
	c, err := r.d.gen.read()
	r.must(err)
	return c
}

// setNoRules tells the programs that there are no rules by priority.
func (r *proxyRun) setNoRules() error {
	n, err := r.d.gen.node()
	if err != nil {
		return err
	}
	n.Rules = uint32(abi.RulesStateNone)
	return r.d.gen.setNode(n)
}

// The proof of a path from a function on opens the guard of its own chain as the whole
// path's does, on either hook, and no other one; and each path has its own window.
func TestPathFromAFunctionOpensItsOwnChainAlone(t *testing.T) {
	const whole, short, other = 2, 20, 3
	n := netfilterNode()
	n.Proxies, n.Endpoints = nil, nil
	match := func(to string) model.Match { return model.Match{Destination: xtest.Prefix(to)} }
	n.Egresses = []plan.Egress{
		xtest.EgressOf(whole, 0, model.SchemeKeyed, match("2001:db8:77::/48"), xtest.OwnSID(7), 1),
		xtest.EgressOf(short, 0, model.SchemeKeyed, match("2001:db8:77::/48"), xtest.OwnSID(7), 1),
		xtest.EgressOf(other, 0, model.SchemeKeyed, match("2001:db8:78::/48"), xtest.OwnSID(8), 1),
	}
	n.Egresses[1].Of, n.Egresses[1].From = whole, "fw"
	r := newProxyRun(t, n)
	r.must(r.net.AddRoute(host.Route{Destination: xtest.Prefix("2001:db8::/32"), Via: xtest.Addr("fd00:5::2"), Device: "side"}))
	r.withXDP()
	packet := func(path uint32, rnd uint64, to string) []byte {
		e := n.Egresses[slices.IndexFunc(n.Egresses, func(e plan.Egress) bool { return e.Path == path })]
		inner := sentBy("fd00:1:1::1", to, 17, 0, 80, 0, 81, 0, 8, 0, 0)
		v, err := pot.Model{}.Stamp(pot.Share{Key: e.Verifier.Keys[0]}, pot.Header{Scheme: e.Scheme, Path: path}, flowOf(inner), pot.Values{RND: rnd})
		r.must(err)
		p := outerOf(path, 1, model.SchemeKeyed, rnd, inner)
		p.Header.Destination = e.SID
		p.SRH.Segments, p.SRH.SegmentsLeft = []netip.Addr{e.SID}, 0
		p.SRH.TLVs = []srv6.TLV{srv6.Proof{Scheme: e.Scheme, Path: path, RND: v.RND, CML: v.CML}.TLV()}
		r.must(p.Fix())
		return frameOf(p)
	}
	byXDP := 0
	for rnd := uint64(1); rnd <= 6; rnd++ { // the first of them teach XDP the way
		for _, path := range []uint32{whole, short} {
			before := r.refusals()
			v, out, own, err := r.xdpThenTC(object.CoreXDP, object.CoreTC, "in", packet(path, rnd, "2001:db8:77::1"))
			if err != nil || v == verdictShot || !bytes.Contains(out, xtest.Addr("2001:db8:77::1").AsSlice()) {
				t.Errorf("path %d: verdict %d, %v, refusals %v after %v; want the inner packet sent on", path, int32(v), err, r.refusals(), before)
			}
			if own {
				byXDP++
			}
		}
	}
	if byXDP == 0 {
		t.Error("XDP has taken none of them")
	}
	for _, path := range []uint32{whole, short} {
		r.wantRefused(abi.ReasonWrongChain, object.CoreTC, "in", packet(path, 100, "2001:db8:78::1"), 0)
		r.wantRefused(abi.ReasonReplay, object.CoreTC, "in", packet(path, 1, "2001:db8:77::1"), 0)
	}
	r.wantRefused(abi.ReasonWrongChain, object.CoreTC, "in", packet(other, 100, "2001:db8:77::1"), 0)
	if v, _, err := r.run(object.CoreTC, "in", packet(other, 101, "2001:db8:78::1"), 0); err != nil || v == verdictShot {
		t.Errorf("path %d: verdict %d, %v, refusals %v", other, int32(v), err, r.refusals())
	}
}
