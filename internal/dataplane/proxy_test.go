package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

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

// proxyNode has function fw behind "to" and "from" at SID 1 of paths 1 (keyed),
// 2 (opot) and 3 (keyed-flow), and local function nat at SID 2 of path 1.
func proxyNode() plan.Node {
	n := xtest.Node()
	n.Interfaces = []model.Interface{{Name: "in", Role: model.RoleCore}, {Name: "side", Role: model.RoleCore}}
	n.Endpoints = []plan.Endpoint{
		xtest.EndpointOf(1, 0, model.SchemeKeyed, xtest.OwnSID(1)), xtest.EndpointOf(2, 0, model.SchemeOPoT, xtest.OwnSID(1)),
		xtest.EndpointOf(3, 0, model.SchemeKeyedFlow, xtest.OwnSID(1)),
	}
	for i := range n.Endpoints {
		n.Endpoints[i].Behaviour = model.BehaviourEndAD
	}
	n.Proxies = []plan.Proxy{{Function: "fw", Proxy: model.Proxy{
		To: "to", From: "from", Segments: model.SegmentsCut, Cache: 1000, Lifetime: time.Minute,
	}}}
	return n
}

func withLocalNAT(n plan.Node) plan.Node {
	e := xtest.EndpointOf(1, 0, model.SchemeKeyed, xtest.OwnSID(2))
	e.Behaviour, e.Function, e.Share = model.BehaviourEndAD, "nat", xtest.Share(2, 9)
	n.Endpoints = append(slices.Clone(n.Endpoints), e)
	n.Proxies = append(slices.Clone(n.Proxies), plan.Proxy{Function: "nat", Proxy: model.Proxy{
		Local: true, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Cache: 100, Lifetime: time.Minute,
	}, Matches: []model.Match{{Destination: xtest.Prefix("2001:db8:1::/48")}}})
	return n
}

// proxyBed is a bed with a function's interfaces, cutters, and a way to the next
// node.
func newProxyBed(t *testing.T) *bed { return withFunction(newBed(t)) }

// withFunction gives a bed the interfaces of a function, and ways.
func withFunction(b *bed) *bed {
	b.addVeth("to")
	b.addVeth("from")
	to, back := tables.CutterPairs()
	for _, c := range []tables.CutterPair{to, back} {
		_, err := b.net.EnsureCutter(host.Cutter{In: c.In, Out: c.Out, Owner: "waystamp test"})
		b.must(err)
	}
	b.must(errors.Join(
		b.net.SetSysctl("net/ipv6/conf/all/forwarding", "1"),
		b.net.AddAddress("side", xtest.Prefix("fd00:5::1/64")),
		b.net.AddRoute(host.Route{Destination: xtest.Prefix("fc00:0:0:200::/56"), Via: xtest.Addr("fd00:5::2"), Device: "side"}),
	))
	return b
}

// skbContext is struct __sk_buff as a test run takes it.
type skbContext struct {
	_              [36]byte
	IngressIfindex uint32
	Ifindex        uint32
	_              [120]byte
	GSOSegs        uint32
	_              [8]byte
	GSOSize        uint32
	_              [12]byte
}

// proxyRun gives frames to the programs.
type proxyRun struct {
	*bed
	d     *Dataplane
	macs  map[string][6]byte
	index map[string]uint32
}

func newProxyRun(t *testing.T, n plan.Node) *proxyRun {
	b := newProxyBed(t)
	r := &proxyRun{b, b.open(), map[string][6]byte{}, map[string]uint32{}}
	b.must(b.apply(r.d, n))
	for _, name := range []string{"in", "from", "to", "side", "wscut0", "wscut1", "wsback0", "wsback1"} {
		l, err := b.net.Link(name)
		b.must(err)
		r.macs[name], r.index[name] = l.MAC, uint32(l.Index)
	}
	return r
}

// run gives a frame that arrives at an interface to a program.
func (r *proxyRun) run(program, at string, frame []byte, gsoSize int) (verdict uint32, out []byte, err error) {
	return r.runOf(r.d.program(program), at, frame, gsoSize)
}

func (r *proxyRun) runOf(program *ebpf.Program, at string, frame []byte, gsoSize int) (verdict uint32, out []byte, err error) {
	frame = slices.Clone(frame)
	mac := r.macs[at]
	copy(frame, mac[:])
	ctx := skbContext{IngressIfindex: r.index[at], Ifindex: r.index[at], GSOSize: uint32(gsoSize)}
	if gsoSize > 0 {
		ctx.GSOSegs = 2
	}
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+512), Context: ctx}
	err = r.do(func() error {
		var err error
		verdict, err = program.Run(&opts)
		return err
	})
	return verdict, opts.DataOut, err
}

// xdpContext is struct xdp_md as a test run takes it.
type xdpContext struct {
	Data, DataEnd, DataMeta        uint32
	Ingress, RxQueue, EgressDevice uint32
}

// xdpThenTC gives a frame to XDP and, if XDP leaves it alone, to TC, as an
// interface with both does.
func (r *proxyRun) xdpThenTC(xdp, tc, at string, frame []byte) (verdict uint32, out []byte, byXDP bool, err error) {
	frame = slices.Clone(frame)
	mac := r.macs[at]
	copy(frame, mac[:])
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+512), Context: xdpContext{DataEnd: uint32(len(frame)), Ingress: r.index[at]}}
	err = r.do(func() error {
		var err error
		verdict, err = r.d.program(xdp).Run(&opts)
		return err
	})
	if err != nil || verdict == xdpRedirect {
		return verdictRedirect, opts.DataOut, true, err
	}
	if verdict != xdpPass {
		return verdict, nil, false, fmt.Errorf("%s says %d; refusals %v", xdp, verdict, r.refusals())
	}
	if !bytes.Equal(opts.DataOut, frame) {
		return 0, nil, false, fmt.Errorf("%s leaves the packet to TC, changed:\n%x, was\n%x", xdp, opts.DataOut, frame)
	}
	verdict, out, err = r.run(tc, at, frame, 0)
	return verdict, out, false, err
}

// withXDP makes the maps say that there is XDP, and all interfaces take redirects.
func (r *proxyRun) withXDP() {
	node, err := r.d.gen.node()
	r.must(err)
	node.Xdp = 1
	r.must(r.d.gen.setNode(node))
	ports := map[uint32]abi.Port{}
	r.must(readMap(r.d.gen, tables.MapPorts, ports))
	for i, p := range ports {
		p.XdpTarget = 1
		r.must(r.d.gen.maps[tables.MapPorts].Put(i, p))
	}
	// TC finds ways only where the neighbour is known.
	r.must(r.net.AddNeighbour("side", xtest.Addr("fd00:5::2"), [6]byte{2, 9, 9, 9, 9, 9}))
}

func (r *proxyRun) refusals() map[abi.Reason]uint64 {
	c, err := r.d.Counters()
	r.must(err)
	out := map[abi.Reason]uint64{}
	for _, c := range c.Refusals {
		out[c.Reason] = c.Dropped
	}
	return out
}

func (r *proxyRun) function(name string) FunctionCount {
	r.Helper()
	all, err := r.d.FunctionsInFlight()
	r.must(err)
	for _, f := range all {
		if f.Function == name {
			return f
		}
	}
	r.Fatalf("no counters of %s: %+v", name, all)
	panic("unreachable")
}

const (
	verdictUnspec   = ^uint32(0)
	verdictShot     = 2
	verdictRedirect = 7
)

// outerOf is an outer header that has come to xtest.OwnSID(sid) and goes on to a segment
// of another node, with an inner packet.
func outerOf(path uint32, sid int, scheme model.Scheme, rnd uint64, inner []byte) srv6.Packet {
	p := srv6.Packet{
		Ethernet: &srv6.Ethernet{Type: srv6.EtherTypeIPv6},
		Header:   srv6.Header{TrafficClass: 0x48, FlowLabel: 0x54321, HopLimit: 64, Source: xtest.Addr("fc00:1::9"), Destination: xtest.OwnSID(sid)},
		SRH: &srv6.SRH{
			NextHeader: srv6.NextHeaderIPv6, SegmentsLeft: 2, Tag: 7,
			Segments: []netip.Addr{xtest.OtherSID(9), xtest.OtherSID(1), xtest.OwnSID(sid)},
			TLVs:     []srv6.TLV{srv6.Proof{Scheme: scheme, Path: path, RND: rnd, CML: rnd % 53}.TLV()},
		},
		Payload: inner,
	}
	if inner[0]>>4 == 4 {
		p.SRH.NextHeader = srv6.NextHeaderIPv4
	}
	if err := p.Fix(); err != nil {
		panic(err)
	}
	return p
}

// optioned is the packet with extension headers before its SRH, n bytes of them or
// more: hop-by-hop options, one of which changes on the way, and destination
// options.
func optioned(p srv6.Packet, n int) srv6.Packet {
	first := (n - 8) / 8 * 8
	p.Options = slices.Concat([]byte{srv6.NextHeaderDestination, uint8(first/8 - 1), 0x31, uint8(first - 4)}, make([]byte, first-4),
		[]byte{srv6.NextHeaderRoute, 0, 0x1e, 4, 0xde, 0xad, 0xbe, 0xef})
	p.Header.NextHeader = srv6.NextHeaderHopByHop
	if err := p.Fix(); err != nil {
		panic(err)
	}
	return p
}

func frameOf(p srv6.Packet) []byte {
	b, err := p.Append(nil)
	if err != nil {
		panic(err)
	}
	return b
}

// innerOf is a plain packet of a protocol.
func innerOf(next uint8, payload []byte) []byte {
	p := srv6.Packet{
		Header:  srv6.Header{NextHeader: next, HopLimit: 63, Source: xtest.Addr("fd00:1:1::1"), Destination: xtest.Addr("2001:db8:1:1::1"), TrafficClass: 1},
		Payload: payload,
	}
	p.Header.PayloadLength = uint16(len(payload))
	b, err := p.Append(nil)
	if err != nil {
		panic(err)
	}
	return b
}

func ether(inner []byte) []byte {
	return slices.Concat(make([]byte, 12), etherType(inner[0]>>4 == 4), inner)
}

// restored is what must come out for a header that went in as p, around an inner
// packet as the function let it go: advanced and stamped, and nothing else.
func restored(t interface{ Fatal(...any) }, p srv6.Packet, share pot.Share, inner []byte) []byte {
	p.Ethernet = nil
	s := *p.SRH
	s.SegmentsLeft--
	p.Header.Destination = s.Segments[s.SegmentsLeft]
	p.Header.HopLimit--
	s.TLVs = slices.Clone(s.TLVs)
	for i, tlv := range s.TLVs {
		if tlv.Type != abi.TLVType {
			continue
		}
		v, err := srv6.ParseProof(tlv)
		if err != nil {
			t.Fatal(err)
		}
		h := pot.Header{Scheme: v.Scheme, Epoch: v.Epoch, Path: v.Path}
		now, err := pot.Model{}.Stamp(share, h, flowOf(inner), pot.Values{RND: v.RND, CML: v.CML})
		if err != nil {
			t.Fatal(err)
		}
		v.RND, v.CML = now.RND, now.CML
		s.TLVs[i] = v.TLV()
	}
	p.SRH, p.Payload = &s, inner
	if err := p.Fix(); err != nil {
		t.Fatal(err)
	}
	return frameOf(p)
}

// drawProxied draws an inner packet of many kinds. changed is the same after a
// function that forwards it has changed what it may.
func drawProxied(t *rapid.T) (inner, changed []byte) {
	body := rapid.SliceOfN(rapid.Byte(), 20, 200).Draw(t, "body")
	if rapid.Bool().Draw(t, "IPv4") {
		return drawProxied4(t, body)
	}
	next := rapid.SampledFrom([]uint8{6, 17, 58, 50, 47, 59, 132}).Draw(t, "protocol")
	checksum := map[uint8]int{6: 16, 17: 6, 58: 2}[next]
	var headers []byte
	first, last := next, -1 // last: where the next header of the last one is
	chain := func(kind uint8, b []byte) {
		if last < 0 {
			first = kind
		} else {
			headers[last] = kind
		}
		last = len(headers)
		b[0] = next
		headers = append(headers, b...)
	}
	for range rapid.IntRange(0, 2).Draw(t, "extension headers") {
		n := rapid.IntRange(0, 2).Draw(t, "length")
		b := make([]byte, 8*(n+1))
		b[1] = byte(n)
		b[2], b[3] = 1, byte(len(b)-4) // PadN
		chain(rapid.SampledFrom([]uint8{0, 60}).Draw(t, "kind"), b)
	}
	at := 0
	if rapid.Bool().Draw(t, "fragment") {
		b := make([]byte, 8)
		offset := rapid.SampledFrom([]uint16{0, 1, 185}).Draw(t, "offset")
		binary.BigEndian.PutUint16(b[2:], offset<<3|1)
		binary.BigEndian.PutUint32(b[4:], rapid.Uint32Range(0, 3).Draw(t, "identification"))
		chain(44, b)
		if offset > 0 {
			checksum = 0 // no upper-layer header
		}
	}
	at = srv6.IPv6Len + len(headers)
	inner = innerOf(first, append(headers, body...))
	changed = slices.Clone(inner)
	changed[7] -= byte(rapid.IntRange(0, 20).Draw(t, "hops"))
	if rapid.Bool().Draw(t, "remarked") {
		binary.BigEndian.PutUint32(changed, 6<<28|rapid.Uint32Range(0, 1<<28-1).Draw(t, "traffic class and flow label"))
	}
	if checksum != 0 && rapid.Bool().Draw(t, "checksummed") {
		binary.BigEndian.PutUint16(changed[at+checksum:], rapid.Uint16().Draw(t, "checksum"))
	}
	return inner, changed
}

// drawProxied4: TTL, TOS, options and checksums may change.
func drawProxied4(t *rapid.T, body []byte) (inner, changed []byte) {
	h := srv6.IPv4{
		ID: rapid.Uint16Range(0, 3).Draw(t, "id"), TTL: 64,
		Fragment: rapid.SampledFrom([]uint16{0, 0, 0x4000, 0x2000, 0x2001, 185}).Draw(t, "fragment"),
		Protocol: rapid.SampledFrom([]uint8{6, 17, 1, 50, 47, 132}).Draw(t, "protocol"),
		Source:   xtest.Addr("203.0.113.1"), Destination: xtest.Addr("198.51.100.1"),
		Options: bytes.Repeat([]byte{1}, 4*rapid.SampledFrom([]int{0, 0, 1, 10}).Draw(t, "options")),
	}
	inner, err := h.Append(nil, body)
	if err != nil {
		t.Fatal(err)
	}
	changed = slices.Clone(inner)
	changed[8] -= byte(rapid.IntRange(0, 20).Draw(t, "hops"))
	if rapid.Bool().Draw(t, "remarked") {
		changed[1] = rapid.Byte().Draw(t, "tos")
	}
	if len(h.Options) > 0 && rapid.Bool().Draw(t, "recorded") {
		changed[20+2] ^= 0x80
	}
	checksum, ok := map[uint8]int{6: 16, 17: 6, 1: 2}[h.Protocol]
	if ok && h.Fragment&0x1fff == 0 && rapid.Bool().Draw(t, "checksummed") {
		binary.BigEndian.PutUint16(changed[srv6.IPv4Len+len(h.Options)+checksum:], rapid.Uint16().Draw(t, "checksum"))
	}
	return inner, changed
}

// drawForeignTLVs draws foreign TLVs and padding around a proof, which is aligned to 8
// bytes as its place demands.
func drawForeignTLVs(t *rapid.T, proof srv6.TLV) []srv6.TLV {
	area := func(label string) (out []srv6.TLV) {
		n := 8 * rapid.IntRange(0, 3).Draw(t, label)
		for n > 0 {
			if n == 1 || rapid.IntRange(0, 4).Draw(t, "pad1") == 0 {
				out = append(out, srv6.TLV{})
				n--
				continue
			}
			l := rapid.IntRange(2, n).Draw(t, "tlv")
			typ := rapid.SampledFrom([]uint8{4, 5, 100, 200, 253}).Draw(t, "type")
			v := make([]byte, l-2)
			if typ != 4 { // PadN is zero
				for i := range v {
					v[i] = rapid.Byte().Draw(t, "value")
				}
			}
			out = append(out, srv6.TLV{Type: typ, Value: v})
			n -= l
		}
		return out
	}
	return append(append(area("before"), proof), area("behind")...)
}

// What goes in and comes back is sent on with its own outer header, but for the
// advance and the stamp; byte-identical packets get theirs first in, first out.
func TestEveryPacketGetsItsOwnHeaderBack(t *testing.T) {
	for _, xdp := range []bool{false, true} {
		t.Run(map[bool]string{false: "TC", true: "XDP and TC"}[xdp], func(t *testing.T) { everyPacketGetsItsOwnHeaderBack(t, xdp) })
	}
}

func everyPacketGetsItsOwnHeaderBack(t *testing.T, xdp bool) {
	r := newProxyRun(t, proxyNode())
	in := func(frame []byte) (uint32, []byte, error) { return r.run(object.CoreTC, "in", frame, 0) }
	back := func(frame []byte) (uint32, []byte, error) { return r.run(object.FunctionTC, "from", frame, 0) }
	var stripped, returned int // by XDP
	if xdp {
		r.withXDP()
		in = func(frame []byte) (uint32, []byte, error) {
			v, out, own, err := r.xdpThenTC(object.CoreXDP, object.CoreTC, "in", frame)
			if own {
				stripped++
			}
			return v, out, err
		}
		back = func(frame []byte) (uint32, []byte, error) {
			v, out, own, err := r.xdpThenTC(object.FunctionXDP, object.FunctionTC, "from", frame)
			if own {
				returned++
			}
			return v, out, err
		}
	}
	shares := map[uint32]pot.Share{1: xtest.Share(1, 1), 2: xtest.Share(1, 2), 3: xtest.Share(1, 3)}
	schemes := map[uint32]model.Scheme{1: model.SchemeKeyed, 2: model.SchemeOPoT, 3: model.SchemeKeyedFlow}
	var trips, copies, optionedTrips int
	rapid.Check(t, func(t *rapid.T) {
		type flight struct {
			outer   srv6.Packet
			share   pot.Share
			inner   []byte
			changed []byte
		}
		var kinds [][2][]byte
		for range rapid.IntRange(1, 4).Draw(t, "kinds") {
			// Nothing of another draw may be taken for one of these.
			inner, changed := drawProxied(t)
			id := rand.Uint64()
			for _, b := range [][]byte{inner, changed} {
				if b[0]>>4 == 4 {
					binary.BigEndian.PutUint32(b[12:], uint32(id))
					b[12] = 9 // of a host, whatever was drawn
					b[16], b[17], b[18] = 198, byte(id>>32), byte(id>>40)
					continue
				}
				binary.BigEndian.PutUint64(b[8+8:], id)
			}
			kinds = append(kinds, [2][]byte{inner, changed})
		}
		waiting := map[int][]flight{}
		before := r.function("fw")
		for range rapid.IntRange(1, 24).Draw(t, "steps") {
			kind := rapid.IntRange(0, len(kinds)-1).Draw(t, "kind")
			if q := waiting[kind]; len(q) > 0 && rapid.Bool().Draw(t, "returns") {
				f := q[0]
				waiting[kind] = q[1:]
				verdict, out, err := back(ether(f.changed))
				if err != nil || verdict != verdictRedirect {
					t.Fatalf("on return: verdict %d, %v, refusals %v", verdict, err, r.refusals())
				}
				want := restored(t, f.outer, f.share, f.changed)
				if !bytes.Equal(out[14:], want) {
					t.Fatalf("came out:\n%s", cmp.Diff(fmt.Sprintf("%x", want), fmt.Sprintf("%x", out[14:])))
				}
				trips++
				continue
			}
			path := rapid.Uint32Range(1, 3).Draw(t, "path")
			f := flight{outerOf(path, 1, schemes[path], rapid.Uint64Range(0, 1<<62).Draw(t, "rnd"), kinds[kind][0]), shares[path], kinds[kind][0], kinds[kind][1]}
			f.outer.Header.HopLimit = rapid.Uint8Range(2, 255).Draw(t, "hop limit")
			f.outer.SRH.TLVs = drawForeignTLVs(t, f.outer.SRH.TLVs[0])
			for range rapid.IntRange(0, 5).Draw(t, "more segments") {
				f.outer.SRH.Segments = append(f.outer.SRH.Segments, xtest.OtherSID(7))
			}
			if rapid.IntRange(0, 3).Draw(t, "options before the SRH") == 3 {
				f.outer = optioned(f.outer, rapid.IntRange(2, 20).Draw(t, "of them")*8)
				optionedTrips++
			}
			if err := f.outer.Fix(); err != nil {
				t.Fatal(err)
			}
			verdict, out, err := in(frameOf(f.outer))
			if err != nil || verdict != verdictRedirect {
				t.Fatalf("to the function: verdict %d, %v, refusals %v", verdict, err, r.refusals())
			}
			from := r.macs["from"]
			if want := append(from[:], out[6:14]...); !bytes.Equal(out, append(want, f.inner...)) {
				t.Fatalf("the function gets %x, want %x to %x", out, f.inner, from)
			}
			if len(waiting[kind]) > 0 {
				copies++
			}
			waiting[kind] = append(waiting[kind], f)
		}
		left := uint64(0)
		for _, q := range waiting {
			left += uint64(len(q))
		}
		after := r.function("fw")
		if got := *after.InFlight - *before.InFlight; got != left || after.RxSuccess-before.RxSuccess-(after.TxSuccess-before.TxSuccess) != left {
			t.Fatalf("%d headers more are kept, want %d: %+v", got, left, after)
		}
		for k, q := range waiting { // leave nothing
			for range q {
				if verdict, _, err := back(ether(kinds[k][1])); err != nil || verdict != verdictRedirect {
					t.Fatalf("on return: verdict %d, %v, refusals %v", verdict, err, r.refusals())
				}
			}
		}
	})
	if trips < 100 || copies < 100 || optionedTrips < 50 {
		t.Errorf("%d round trips, %d byte-identical packets, %d with options: too few to tell", trips, copies, optionedTrips)
	}
	if f := r.function("fw"); f.RxCopies == 0 || f.TxNotCached != 0 || f.RxIgnored != 0 {
		t.Errorf("%+v", f)
	}
	if xdp && (stripped < 3 || returned < 20 || returned == trips) {
		t.Errorf("%d stripped and %d of %d returned by XDP: too few, or none was left to TC", stripped, returned, trips)
	}
}

func udp(b byte) []byte {
	return innerOf(17, append([]byte{0, 80, 0, 81, 0, 28, 1, 2}, bytes.Repeat([]byte{b}, 20)...))
}

// in sends a packet to the function and returns the whole packet.
func (r *proxyRun) in(sid int, inner []byte) srv6.Packet {
	r.Helper()
	p := outerOf(1, sid, model.SchemeKeyed, 5, inner)
	if verdict, _, err := r.run(object.CoreTC, "in", frameOf(p), 0); err != nil || verdict == verdictShot {
		r.Fatalf("verdict %d, %v, refusals %v", verdict, err, r.refusals())
	}
	return p
}

func (r *proxyRun) wantRefused(reason abi.Reason, program, at string, frame []byte, gso int) {
	r.Helper()
	before := r.refusals()
	verdict, _, err := r.run(program, at, frame, gso)
	after := r.refusals()
	if err != nil || verdict != verdictShot || after[reason] != before[reason]+1 {
		r.Errorf("%s at %s: verdict %d, %v, refusals %v after %v; want %s", program, at, verdict, err, after, before, reason)
	}
}

func TestFunctionPacketsAreRefusedForTheirOwnReasons(t *testing.T) {
	set := func(f func(p *model.Proxy)) func(*plan.Node) {
		return func(n *plan.Node) { f(&n.Proxies[0].Proxy) }
	}
	for _, c := range []struct {
		name string
		edit func(*plan.Node)
		run  func(r *proxyRun)
	}{
		{"nobody sent it in", nil, func(r *proxyRun) {
			r.wantRefused(abi.ReasonNotCached, object.FunctionTC, "from", ether(udp(1)), 0)
			if f := r.function("fw"); f.TxNotCached != 1 || f.TxPlain != 0 {
				r.Errorf("%+v", f)
			}
		}},
		{"it comes by the interface to the function", nil, func(r *proxyRun) {
			r.wantRefused(abi.ReasonNotCached, object.FunctionTC, "to", ether(udp(1)), 0)
		}},
		{"it comes back twice", nil, func(r *proxyRun) {
			r.in(1, udp(1))
			if v, _, err := r.run(object.FunctionTC, "from", ether(udp(1)), 0); err != nil || v != verdictRedirect {
				r.Errorf("%d, %v", v, err)
			}
			r.wantRefused(abi.ReasonNotCached, object.FunctionTC, "from", ether(udp(1)), 0)
		}},
		{"its stamp is bound to ports that it does not have", nil, func(r *proxyRun) {
			short := innerOf(17, make([]byte, 3))
			if v, _, err := r.run(object.CoreTC, "in", frameOf(outerOf(3, 1, model.SchemeKeyedFlow, 5, short)), 0); err != nil || v != verdictRedirect {
				r.Errorf("%d, %v", v, err)
			}
			r.wantRefused(abi.ReasonFlow, object.FunctionTC, "from", ether(short), 0)
		}},
		{"one byte is not what it was", nil, func(r *proxyRun) {
			r.in(1, udp(1))
			changed := udp(1)
			changed[len(changed)-1]++
			r.wantRefused(abi.ReasonNotCached, object.FunctionTC, "from", ether(changed), 0)
		}},
		{"IPv4 that nobody sent in", nil, func(r *proxyRun) {
			frame := append([]byte{12: 8, 13: 0}, append([]byte{0x45, 0, 0, 40, 8: 64, 9: 59, 12: 192, 15: 1, 16: 192, 19: 2}, make([]byte, 20)...)...)
			r.wantRefused(abi.ReasonNotCached, object.FunctionTC, "from", frame, 0)
		}},
		{"its header is too old", set(func(p *model.Proxy) { p.Lifetime = 10 * time.Millisecond }), func(r *proxyRun) {
			r.in(1, udp(1))
			for *r.function("fw").InFlight > 0 {
				time.Sleep(time.Millisecond)
			}
			r.wantRefused(abi.ReasonNotCached, object.FunctionTC, "from", ether(udp(1)), 0)
			if f := r.function("fw"); f.Expired != 1 || *f.InFlight != 0 {
				r.Errorf("%+v", f)
			}
		}},
		{"its header gave way to others", set(func(p *model.Proxy) { p.Cache = 1 }), func(r *proxyRun) {
			r.in(1, udp(1))
			for i := range 20 * abi.Ways * tables.BucketsLeast {
				r.in(1, innerOf(59, binary.BigEndian.AppendUint64(make([]byte, 16), uint64(i))))
			}
			r.wantRefused(abi.ReasonNotCached, object.FunctionTC, "from", ether(udp(1)), 0)
			if f := r.function("fw"); f.Evicted == 0 || f.RxSuccess != f.Evicted+*f.InFlight || *f.InFlight > abi.Ways*tables.BucketsLeast {
				r.Errorf("%+v", f)
			}
		}},
		{"no slot is free", set(func(p *model.Proxy) { p.Recognise, p.Cache = model.RecogniseMetadata, 1 }), func(r *proxyRun) {
			// Each CPU has one.
			p := frameOf(outerOf(1, 1, model.SchemeKeyed, 6, udp(2)))
			for range 2 * r.d.cpus {
				_, _, err := r.run(object.CoreTC, "in", p, 0)
				r.must(err)
			}
			full := r.refusals()[abi.ReasonCacheFull]
			f := r.function("fw")
			if f.RxSuccess < 1 || f.RxSuccess > uint64(r.d.cpus) || f.RxIgnored != full || full != uint64(2*r.d.cpus)-f.RxSuccess || *f.InFlight != f.RxSuccess {
				r.Errorf("%+v, %d refused", f, full)
			}
		}},
		{"its index is lost", set(func(p *model.Proxy) { p.Recognise = model.RecogniseMetadata }), func(r *proxyRun) {
			r.in(1, udp(1))
			r.wantRefused(abi.ReasonNotCached, object.FunctionTC, "from", ether(udp(1)), 0)
		}},
		{"merged, with one index for all", set(func(p *model.Proxy) { p.Recognise = model.RecogniseMetadata }), func(r *proxyRun) {
			r.in(1, udp(1))
			r.wantRefused(abi.ReasonNotCached, object.FunctionTC, "from", ether(tcp(2000)), 1000)
		}},
		{"the plan dropped its path", nil, func(r *proxyRun) {
			r.in(1, udp(1))
			k := tables.EncodeHopKey(xtest.OwnSID(1), 1, 0)
			r.must(r.d.run(r.d.gen, []tables.Op{{Table: tables.MapHops, Key: &k, Value: nil}}))
			r.wantRefused(abi.ReasonShareGone, object.FunctionTC, "from", ether(udp(1)), 0)
		}},
		{"its proxy is not there", nil, func(r *proxyRun) {
			keys, err := tables.ProxyKeys(proxyNode().Proxies)
			r.must(err)
			r.must(r.d.gen.maps[tables.MapProxies].Delete(keys["fw"]))
			r.wantRefused(abi.ReasonProxyMissingBug, object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, udp(1))), 0)
			r.wantRefused(abi.ReasonProxyMissingBug, object.FunctionTC, "from", ether(udp(1)), 0)
		}},
		{"its interface is gone", nil, func(r *proxyRun) {
			r.must(r.net.DeleteLink("to"))
			r.wantRefused(abi.ReasonFunctionGone, object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, udp(1))), 0)
		}},
		{"its interface is gone, and the agent knows", nil, func(r *proxyRun) {
			r.in(1, udp(1))
			r.must(r.net.DeleteLink("to"))
			if err := r.do(r.d.Reconcile); !errors.As(err, new(*DegradedError)) {
				r.Errorf("reconcile: %v; want it to say that the interface is missing", err)
			}
			r.wantRefused(abi.ReasonFunctionGone, object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, udp(1))), 0)
			r.wantRefused(abi.ReasonFunctionGone, object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, tcp(2000))), 1000)
			// What is in it may still come back.
			if v, _, err := r.run(object.FunctionTC, "from", ether(udp(1)), 0); err != nil || v != verdictRedirect {
				r.Errorf("%d, %v", v, err)
			}
		}},
		{"larger than the function takes", nil, func(r *proxyRun) {
			r.wantRefused(abi.ReasonFunctionMTU, object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, innerOf(59, make([]byte, 1461)))), 0)
			r.in(1, innerOf(59, make([]byte, 1460)))
		}},
		{"a super-packet whose frames are larger than the function takes", set(func(p *model.Proxy) { p.Segments = model.SegmentsKeep }), func(r *proxyRun) {
			super := frameOf(outerOf(1, 1, model.SchemeKeyed, 5, tcp(3000)))
			r.wantRefused(abi.ReasonFunctionMTU, object.CoreTC, "in", super, 1441) // and 60 bytes of headers
			// Those just fit. The packets of a test run are of no kind of GSO, and
			// the kernel strips only such as are of one.
			r.wantRefused(abi.ReasonStripFailed, object.CoreTC, "in", super, 1440)
		}},
		{"no cutter", nil, func(r *proxyRun) {
			r.must(r.d.gen.setNode(abi.Node{Armed: 1}))
			r.wantRefused(abi.ReasonCannotCut, object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, tcp(2000))), 1000)
			r.wantRefused(abi.ReasonCannotCut, object.FunctionTC, "from", ether(tcp(2000)), 1000)
		}},
		{"from or to what no headend takes", nil, func(r *proxyRun) {
			withLocal := withLocalNAT(proxyNode())
			r.must(r.apply(r.d, withLocal))
			for _, c := range [][2]string{
				{"fe80::bad", "ff02::1"}, {"fe80::bad", "2001:db8:1:1::1"}, {"fd00:1:1::1", "ff0e::1"}, {"fd00:1:1::1", "fe80::1"},
				{"fd00:1:1::1", xtest.OwnSID(2).String()}, {xtest.OtherSID(1).String(), "2001:db8:1:1::1"}, {"::ffff:192.0.2.1", "2001:db8:1:1::1"},
			} {
				b := udp(1)
				copy(b[8:], xtest.Addr(c[0]).AsSlice())
				copy(b[24:], xtest.Addr(c[1]).AsSlice())
				for _, sid := range []int{1, 2} {
					r.wantRefused(abi.ReasonInnerAddress, object.CoreTC, "in", frameOf(outerOf(1, sid, model.SchemeKeyed, 5, b)), 0)
				}
			}
			four := append([]byte{0x45, 0, 0, 40, 8: 64, 9: 59, 12: 169, 13: 254, 14: 1, 15: 1, 16: 192, 19: 2}, make([]byte, 20)...)
			r.wantRefused(abi.ReasonInnerAddress, object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, four)), 0)
			r.withXDP()
			for i := range 3 { // TC has the way, then XDP goes it
				r.in(1, udp(byte(i)))
			}
			b := udp(1)
			copy(b[8:], xtest.Addr("fe80::bad").AsSlice())
			if v, _, byXDP, err := r.xdpThenTC(object.CoreXDP, object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, b))); err != nil || byXDP || v != verdictShot {
				r.Errorf("verdict %d, by XDP %t, %v", v, byXDP, err)
			}
			if v, _, byXDP, err := r.xdpThenTC(object.CoreXDP, object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, udp(9)))); err != nil || !byXDP {
				r.Errorf("what is good: verdict %d, by XDP %t, %v", v, byXDP, err)
			}
		}},
		{"its header with options is longer than what is kept", nil, func(r *proxyRun) {
			p := outerOf(1, 1, model.SchemeKeyed, 5, udp(1))
			for len(p.SRH.Segments) < 10 {
				p.SRH.Segments = append(p.SRH.Segments, xtest.OtherSID(7))
			}
			r.wantRefused(abi.ReasonHeaderTooLong, object.CoreTC, "in", frameOf(optioned(p, 208)), 0)
			p = optioned(p, 200) // 432 bytes in all
			if v, _, err := r.run(object.CoreTC, "in", frameOf(p), 0); err != nil || v != verdictRedirect {
				r.Errorf("what just fits: verdict %d, %v, refusals %v", v, err, r.refusals())
			}
			if f := r.function("fw"); f.RxIgnored != 0 || f.RxSuccess != 1 { // more room would not help
				r.Errorf("%+v", f)
			}
		}},
		{"hop limit used up", nil, func(r *proxyRun) {
			p := outerOf(1, 1, model.SchemeKeyed, 5, udp(1))
			p.Header.HopLimit = 1
			r.wantRefused(abi.ReasonHopLimit, object.CoreTC, "in", frameOf(p), 0)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := proxyNode()
			if c.edit != nil {
				c.edit(&n)
			}
			c.run(newProxyRun(t, n))
		})
	}
}

// A slot is given to another packet when its own is too late, but not while
// somebody has it.
func TestSlotIsGivenAgainOnlyWhenNobodyHasIt(t *testing.T) {
	n := proxyNode()
	n.Proxies[0].Recognise, n.Proxies[0].Segments = model.RecogniseMetadata, model.SegmentsKeep
	n.Proxies[0].Cache, n.Proxies[0].Lifetime = 1, time.Minute
	r := newProxyRun(t, n)
	m := r.d.gen.maps[tables.MapSlots]
	setAll := func(expires uint64) {
		for i := uint32(1); i < m.MaxEntries(); i++ {
			var c abi.Cached
			r.must(m.Lookup(i, &c))
			c.Expires = expires
			r.must(m.Put(i, c))
		}
	}
	frame := frameOf(outerOf(1, 1, model.SchemeKeyed, 6, udp(2)))
	setAll(1)
	r.wantRefused(abi.ReasonCacheFull, object.CoreTC, "in", frame, 0)
	setAll(2)
	r.in(1, udp(2))
	if f := r.function("fw"); f.Expired != 1 || f.RxSuccess != 1 || f.RxIgnored != 1 || *f.InFlight != 1 {
		t.Errorf("%+v", f)
	}
}

// Functions of a node do not take each other's room.
func TestFullCacheOfAFunctionTakesNothingFromAnother(t *testing.T) {
	n := proxyNode()
	n.Interfaces = n.Interfaces[:1]
	n.Endpoints[1].Function = "ids"
	n.Proxies = append(n.Proxies, plan.Proxy{Function: "ids", Proxy: model.Proxy{
		To: "side", From: "side", Segments: model.SegmentsCut, Cache: 1, Lifetime: time.Minute,
	}})
	r := newProxyRun(t, n)
	for i := range 100 {
		r.in(1, udp(byte(i)))
	}
	for i := range 100 {
		p := outerOf(2, 1, model.SchemeOPoT, uint64(i), udp(byte(i)))
		if v, _, err := r.run(object.CoreTC, "in", frameOf(p), 0); err != nil || v != verdictRedirect {
			t.Fatalf("verdict %d, %v, refusals %v", v, err, r.refusals())
		}
	}
	for i := range 100 {
		if v, out, err := r.run(object.FunctionTC, "from", ether(udp(byte(i))), 0); err != nil || v != verdictRedirect {
			t.Fatalf("verdict %d, %v, refusals %v", v, err, r.refusals())
		} else if p, err := srv6.Decode(out[14:]); err != nil || p.SRH == nil || p.SRH.TLVs[0].Value[2] != 0 || p.SRH.TLVs[0].Value[5] != 1 {
			t.Fatalf("%x: %v; want a header of path 1", out, err)
		}
	}
	fw, ids := r.function("fw"), r.function("ids")
	if fw.Evicted != 0 || *fw.InFlight != 0 || ids.Evicted == 0 || ids.Evicted+*ids.InFlight != 100 {
		t.Errorf("fw %+v, ids %+v", fw, ids)
	}
}

// As many copies of a packet as there is room for, and all of them come back,
// though the function drops some.
func TestManyCopiesOfAPacketAreKept(t *testing.T) {
	r := newProxyRun(t, proxyNode())
	for round := range 3 {
		for range 500 {
			r.in(1, udp(1))
		}
		for i := range 400 {
			if v, _, err := r.run(object.FunctionTC, "from", ether(udp(1)), 0); err != nil || v != verdictRedirect {
				t.Fatalf("round %d, copy %d: verdict %d, %v, refusals %v", round, i, v, err, r.refusals())
			}
		}
	}
	if f := r.function("fw"); f.RxCopies != 3*500-1 || *f.InFlight != 300 || f.Evicted != 0 {
		t.Errorf("%+v", f)
	}
}

// On all CPUs at once, with few kinds of packets and little room, so that they
// meet in the same buckets: no header is given to two packets, and none is lost
// without being counted.
func TestHeadersOfAFunctionAreExactOnManyCPUs(t *testing.T) {
	for _, recognise := range []model.Recognise{model.RecogniseContent, model.RecogniseMetadata} {
		t.Run(recognise.String(), func(t *testing.T) {
			n := proxyNode()
			n.Proxies[0].Recognise, n.Proxies[0].Segments, n.Proxies[0].Cache = recognise, model.SegmentsKeep, 100
			r := newProxyRun(t, n)
			const workers, each, kinds = 8, 1500, 40
			var mu sync.Mutex
			got := map[uint64]int{} // by RND, which a keyed stamp leaves
			var g errgroup.Group
			for w := range workers {
				g.Go(func() error {
					rnd := rand.New(rand.NewPCG(uint64(w), 1))
					for i := range each {
						frame := frameOf(outerOf(1, 1, model.SchemeKeyed, uint64(w*each+i+1), udp(byte(rnd.IntN(kinds)))))
						_, stripped, err := r.run(object.CoreTC, "in", frame, 0)
						if err != nil {
							return err
						}
						back := ether(udp(byte(rnd.IntN(kinds))))
						if recognise == model.RecogniseMetadata {
							back = stripped // without an index: what comes of it is seen below
						}
						v, out, err := r.run(object.FunctionTC, "from", back, 0)
						if err != nil {
							return err
						}
						if v != verdictRedirect {
							continue
						}
						p, err := srv6.Decode(out[14:])
						if err != nil {
							return err
						}
						mu.Lock()
						got[binary.BigEndian.Uint64(p.SRH.TLVs[0].Value[6:])]++
						mu.Unlock()
					}
					return nil
				})
			}
			r.must(g.Wait())
			for rnd, times := range got {
				if times != 1 || rnd < 1 || rnd > workers*each {
					t.Fatalf("the header with RND %d came back %d times", rnd, times)
				}
			}
			f := r.function("fw")
			if f.RxSuccess+f.RxIgnored != workers*each || f.TxSuccess != uint64(len(got)) || f.RxSuccess != f.TxSuccess+f.Evicted+f.Expired+*f.InFlight {
				t.Errorf("%+v after %d came back", f, len(got))
			}
			if recognise == model.RecogniseContent && (f.TxSuccess < workers*each/4 || f.RxCopies < workers*each/4) {
				t.Errorf("%+v: too few to tell", f)
			}
		})
	}
}

func tcp(payload int) []byte {
	return innerOf(6, append([]byte{0, 80, 0, 81, 12: 0x50, 13: 0x10, 19: 0}, make([]byte, payload)...))
}

func TestUnknownPacketGoesPlainWhereTheOperatorSaysSo(t *testing.T) {
	n := proxyNode()
	n.Proxies[0].OnUnknown = model.OnUnknownPlain
	n.Egresses = []plan.Egress{xtest.EgressOf(3, 0, model.SchemeKeyed, model.Match{Destination: xtest.Prefix("2001:db8:2::/48")}, xtest.OwnSID(5), 2)}
	r := newProxyRun(t, n)
	if v, out, err := r.run(object.FunctionTC, "from", ether(udp(1)), 0); err != nil || v != verdictUnspec || !bytes.Equal(out[14:], udp(1)) {
		t.Errorf("verdict %d, %v, packet %x; want it unchanged and let go", v, err, out)
	}
	guarded := udp(1)
	copy(guarded[24:], []byte{0x20, 0x01, 0x0d, 0xb8, 0, 2})
	r.wantRefused(abi.ReasonUnproven, object.FunctionTC, "from", ether(guarded), 0)
	if f := r.function("fw"); f.TxPlain != 2 || f.TxNotCached != 2 || f.TxSuccess != 0 {
		t.Errorf("%+v", f)
	}
}

func TestSuperPacketsAreCutOnTheirWay(t *testing.T) {
	r := newProxyRun(t, proxyNode())
	v, out, err := r.run(object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, 5, tcp(2000))), 1000)
	if mac := r.macs["wscut1"]; err != nil || v != verdictRedirect || !bytes.Equal(out[:6], mac[:]) || len(out) < 2000 {
		t.Errorf("verdict %d, %v, %d bytes to %x; want it whole, to the cutter %x", v, err, len(out), out[:6], mac)
	}
	v, out, err = r.run(object.FunctionTC, "from", ether(tcp(2000)), 1000)
	if mac := r.macs["wsback1"]; err != nil || v != verdictRedirect || !bytes.Equal(out[:6], mac[:]) {
		t.Errorf("verdict %d, %v, to %x; want it to the cutter %x", v, err, out[:6], mac)
	}
	if f := r.function("fw"); f.RxCut != 1 || f.TxCut != 1 || f.RxSuccess != 0 {
		t.Errorf("%+v", f)
	}
}

func TestProgramsOfFunctionsAreAttachedAndGoAgain(t *testing.T) {
	b := newProxyBed(t)
	d := b.open()
	b.must(b.apply(d, withLocalNAT(proxyNode())))
	hooks := func() map[string]int {
		out := map[string]int{}
		for k := range d.links {
			out[string(k.hook)]++
		}
		return out
	}
	// in, side and the cutter; to, from and the cutter back; out of in and side.
	if diff := cmp.Diff(map[string]int{"tc": 3, "from": 3, "out": 2}, hooks()); diff != "" {
		t.Error(diff)
	}
	before := b.world()
	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, withLocalNAT(proxyNode())))
	if diff := diffWorlds(before, b.world()); diff != "" {
		t.Errorf("taking it over has changed something:\n%s", diff)
	}
	b.must(b.apply(d, proxyNode()))
	if diff := cmp.Diff(map[string]int{"tc": 3, "from": 3}, hooks()); diff != "" {
		t.Errorf("without a local function: %s", diff)
	}
	n := proxyNode()
	n.Proxies, n.Endpoints = nil, n.Endpoints[:1]
	n.Endpoints[0].Behaviour = model.BehaviourEnd
	b.must(b.apply(d, n))
	if diff := cmp.Diff(map[string]int{"tc": 2}, hooks()); diff != "" {
		t.Errorf("without a function: %s", diff)
	}
	w := b.world()
	if len(w.Maps[0].Proxies) != 0 || len(w.Maps[0].LocalDst) != 0 || len(w.Maps[0].Ports) != 2 {
		t.Errorf("left in the maps: %+v", w.Maps[0].Proxies)
	}
	b.must(b.apply(d, withLocalNAT(proxyNode())))
	b.must(d.Close())
	r, err := b.detach(b.cfg)
	b.must(err)
	if r.Links != 8 {
		t.Errorf("%d links removed, want 8", r.Links)
	}
}

// An interface that a function was behind can be any other, and the other way round:
// the program that is there is the instance's own, for another use.
func TestInterfaceOfAFunctionCanBecomeAnother(t *testing.T) {
	b := newProxyBed(t)
	d := b.open()
	plain := proxyNode()
	plain.Interfaces = append(plain.Interfaces, model.Interface{Name: "from", Role: model.RoleEdge})
	plain.Proxies, plain.Endpoints = nil, slices.Clone(plain.Endpoints[:1])
	plain.Endpoints[0].Behaviour = model.BehaviourEnd
	for _, n := range []plan.Node{proxyNode(), plain, proxyNode()} {
		b.must(b.apply(d, n))
	}
	// The same for a process that finds the programs there.
	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, plain))
}

// Each kind of step, the first and the last time that it is taken, as for other
// plans.
func TestFailureAtAnyStepOfAFunctionLeavesWhatWasThere(t *testing.T) {
	b := newProxyBed(t)
	broken := errors.New("broken off by the test")
	k := &breaker{fail: func() error { return broken }}
	k.reset("", 0)
	b.cfg.before = k.before
	d := b.open()
	plain := proxyNode()
	plain.Proxies, plain.Endpoints = nil, slices.Clone(plain.Endpoints[:1])
	plain.Endpoints[0].Behaviour = model.BehaviourEnd
	b.must(b.apply(d, plain))
	large := withLocalNAT(proxyNode())
	large.Proxies[0].Cache = 10000 // more than there is: a new generation
	for _, to := range []plan.Node{proxyNode(), large} {
		before := b.world()
		for _, kind := range []string{stepLinkAttach, stepChange, stepArm} {
			k.reset(kind, 1)
			for nth := 1; ; nth++ {
				k.reset(kind, nth)
				err := b.apply(d, to)
				if err == nil {
					t.Fatalf("%q, time %d: nothing broke off", kind, nth)
				}
				if !errors.Is(err, broken) {
					t.Fatal(err)
				}
				if errors.As(err, new(*DegradedError)) {
					break // in force: what comes now is taken back by nobody
				}
				if diff := diffWorlds(before, b.world()); diff != "" {
					t.Fatalf("broken off at %q, time %d: something has changed:\n%s", kind, nth, diff)
				}
				if nth > 3 && kind != stepLinkAttach || nth > 2 {
					break
				}
				if kind == stepArm {
					break
				}
			}
			k.reset("", 0)
			b.must(b.apply(d, plain))
			before = b.world()
		}
	}
}

// keyOffset is where the key of the cache is in a wsConfig, in bytes.
func keyOffset(t *testing.T) int {
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, abi.Config{FingerprintKey: [2]uint64{1<<64 - 1, 1<<64 - 1}}); err != nil {
		t.Fatal(err)
	}
	return bytes.IndexByte(b.Bytes(), 0xff)
}

func TestLargerCacheNeedsANewGenerationAndCountersGoOn(t *testing.T) {
	r := newProxyRun(t, proxyNode())
	r.in(1, udp(1))
	if r.d.gen.limits.Buckets != 512 || r.d.gen.limits.Slots != 1 {
		t.Errorf("limits %+v", r.d.gen.limits)
	}
	spec, err := object.Load(object.FunctionTC)
	r.must(err)
	// The key lies in the read-only data of the program.
	at := spec.Variables["cfg"].Offset + uint32(keyOffset(t))
	key := func() (k [2]uint64) {
		info, err := r.d.program(object.FunctionTC).Info()
		r.must(err)
		ids, _ := info.MapIDs()
		for _, id := range ids {
			m, err := ebpf.NewMapFromID(id)
			r.must(err)
			defer m.Close()
			if mi, err := m.Info(); err == nil && mi.Name == ".rodata" || err == nil && m.Type() == ebpf.Array && m.ValueSize() >= 56 && mi.Name != "" && mi.Name[0] == '.' {
				b, err := m.LookupBytes(uint32(0))
				r.must(err)
				return [2]uint64{binary.NativeEndian.Uint64(b[at:]), binary.NativeEndian.Uint64(b[at+8:])}
			}
		}
		t.Fatal("no read-only data")
		return k
	}
	first := key()
	n := proxyNode()
	n.Proxies[0].Cache = 10000
	r.must(r.apply(r.d, n))
	if r.d.gen.seq != 2 || r.d.gen.limits.Buckets != 4096 {
		t.Errorf("generation %d, limits %+v", r.d.gen.seq, r.d.gen.limits)
	}
	if second := key(); first == [2]uint64{} || second == first || second == [2]uint64{} {
		t.Errorf("keys %x and %x", first, second)
	}
	if f := r.function("fw"); f.RxSuccess != 1 || *f.InFlight != 0 || f.Cache != 10000 {
		t.Errorf("%+v; want the counters from before, and an empty cache", f)
	}
	r.must(r.apply(r.d, proxyNode()))
	if r.d.gen.seq != 2 {
		t.Error("a new generation for a smaller cache")
	}
}

func TestSlotsAreSharedOutAmongFunctionsAndCPUs(t *testing.T) {
	fn := func(name string, cache int) plan.Proxy {
		return plan.Proxy{Function: name, Proxy: model.Proxy{Recognise: model.RecogniseMetadata, Cache: cache}}
	}
	for _, c := range []struct {
		cpus int
		in   []plan.Proxy
		want map[string]uint32
	}{
		{2, nil, map[string]uint32{}},
		{2, []plan.Proxy{fn("a", 1000)}, map[string]uint32{"a": 1024}},
		{64, []plan.Proxy{fn("a", 1000)}, map[string]uint32{"a": 512}},
		{2, []plan.Proxy{fn("a", 20000), fn("b", 10000)}, map[string]uint32{"a": 16384, "b": 8192}},
		{2, []plan.Proxy{fn("a", 40000), fn("b", 40000)}, nil},
		{2, []plan.Proxy{fn("a", 1<<30)}, nil},
	} {
		got, err := tables.SlotsPerCPU(c.in, c.cpus)
		if c.want == nil {
			if err == nil {
				t.Errorf("%v: %v; want an error", c.in, got)
			}
			continue
		}
		if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
			t.Errorf("%s %v", diff, err)
		}
	}
}

func TestFunctionsThatCannotBeAreRefused(t *testing.T) {
	b := newProxyBed(t)
	d := b.open()
	for _, c := range []struct {
		name string
		edit func(*plan.Node)
		want string
	}{
		{"two send to one interface", func(n *plan.Node) {
			p := n.Proxies[0]
			p.Function = "other"
			n.Proxies = append(n.Proxies, p)
		}, "interface from from function other is the same device as interface from from function fw"},
		{"the node's own interface", func(n *plan.Node) { n.Proxies[0].From = "in" }, "is the same device as interface in"},
		{"the node's own interface, towards it", func(n *plan.Node) { n.Proxies[0].To = "in" }, "interface in to function fw is the same device as interface in"},
		{"missing interface", func(n *plan.Node) { n.Proxies[0].To = "gone" }, "interface gone to function fw"},
		{"no cache", func(n *plan.Node) { n.Proxies[0].Cache = 0 }, "function fw: a cache of 0 headers"},
		{"local by content", func(n *plan.Node) { n.Proxies[0].Local = true }, "recognised by metadata only"},
	} {
		n := proxyNode()
		c.edit(&n)
		if err := b.apply(d, n); err == nil || !bytes.Contains([]byte(err.Error()), []byte(c.want)) {
			t.Errorf("%s: got %v; want %q", c.name, err, c.want)
		}
	}
	if w := b.world(); len(w.Links) != 0 {
		t.Errorf("attached: %v", w.Links)
	}
}

// No function's key is the index that says that a packet was verified.
func TestNoFunctionHasTheIndexOfTheProven(t *testing.T) {
	// lb-1747 comes to 65535 by its name.
	keys, err := tables.ProxyKeys([]plan.Proxy{{Function: "lb-1747"}, {Function: "ids-5470"}, {Function: "fw"}})
	if err != nil {
		t.Fatal(err)
	}
	for name, key := range keys {
		if key == 0 || key == abi.IndexProven {
			t.Errorf("function %s has key %d", name, key)
		}
	}
}
