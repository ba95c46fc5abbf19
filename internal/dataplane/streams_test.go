package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

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

// streamBed is node r2 of r1, r2, r3, with function zip between the hosts behind r1 and
// those behind r3: chain web for IPv6, legacy for IPv4.
type streamBed struct {
	*proxyRun
	domain *plan.Domain
	rnd    uint64
}

func newStreamBed(t *testing.T) *streamBed {
	node := func(name, n string, interfaces ...model.Interface) model.Node {
		return model.Node{Name: name, Address: xtest.Addr("fd00:1::" + n), Locator: xtest.Prefix("fc00:0:0:" + n + "00::/56"), Interfaces: interfaces}
	}
	edge, core := model.Interface{Name: "edge", Role: model.RoleEdge}, model.Interface{Name: "core", Role: model.RoleCore}
	chain := func(name, destination string) model.Chain {
		return model.Chain{
			Name: name, Ingress: []string{"r1"}, Functions: []string{"zip"}, Egress: "r3", Both: true,
			Match: model.Match{Destination: xtest.Prefix(destination)}, Proof: model.Proof{Scheme: model.SchemeKeyed},
		}
	}
	d, err := plan.Compile(model.Domain{
		Block: xtest.Prefix("fc00::/48"),
		Nodes: []model.Node{
			node("r1", "5", edge, core),
			node("r2", "6", model.Interface{Name: "in", Role: model.RoleCore}, model.Interface{Name: "side", Role: model.RoleCore}),
			node("r3", "7", edge, core),
		},
		Functions: []model.Function{{Name: "zip", Node: "r2", Kind: model.KindStream, Proxy: model.StreamDetour("zip"), Stream: model.Stream{
			Run: []string{`"identity"`}, Connections: 10, Buffer: model.StreamBufferDefault, Idle: model.StreamIdleDefault, HalfClosed: model.StreamHalfClosedDefault,
		}}},
		Chains: []model.Chain{chain("web", "2001:db8:8::/48"), chain("legacy", "198.51.100.0/24")},
	}, plan.NewKeyring(rand.NewChaCha8([32]byte{1}), nil))
	if err != nil {
		t.Fatal(err)
	}
	b := newProxyBed(t)
	b.addVeth("wss-zip")
	s := &streamBed{&proxyRun{b, b.open(), map[string][6]byte{}, map[string]uint32{}}, d, 100}
	s.plan()
	for _, name := range []string{"in", "side", "wss-zip"} {
		l, err := b.net.Link(name)
		b.must(err)
		s.macs[name], s.index[name] = l.MAC, uint32(l.Index)
	}
	for _, name := range []string{"r1", "r3"} {
		l := s.domain.Nodes[slices.IndexFunc(s.domain.Nodes, func(n plan.Node) bool { return n.Name == name })].Locator
		b.must(b.net.AddRoute(host.Route{Destination: l, Via: xtest.Addr("fd00:5::2"), Device: "side"}))
	}
	return s
}

func (s *streamBed) plan() {
	s.Helper()
	s.must(s.apply(s.d, s.domain.Nodes[1]))
}

func (s *streamBed) path(chain, way string) plan.Path {
	s.Helper()
	i := slices.IndexFunc(s.domain.Paths, func(p plan.Path) bool { return p.Chain == chain && p.Way() == way })
	if i < 0 {
		s.Fatalf("no path %s of %s", way, chain)
	}
	return s.domain.Paths[i]
}

// proven is a packet at the end of a path, with the proof that belongs there.
func (s *streamBed) proven(p plan.Path, inner []byte) []byte {
	s.rnd++
	last := len(p.Shares) - 1
	steps := pot.WalkFlow(p.Header(), s.rnd, flowOf(inner), p.Shares[:last]...)
	out := steps[last-1].WireOut
	segments := p.SIDs()
	slices.Reverse(segments) // the last segment comes first
	sid := segments[0]
	x := srv6.Packet{
		Ethernet: &srv6.Ethernet{Type: srv6.EtherTypeIPv6},
		Header:   srv6.Header{HopLimit: 63, Source: p.Ingress[0].Address, Destination: sid},
		SRH: &srv6.SRH{NextHeader: srv6.NextHeaderIPv6, Segments: segments,
			TLVs: []srv6.TLV{srv6.Proof{Scheme: p.Scheme, Epoch: p.Epoch, Path: p.Path, RND: out.RND, CML: out.CML}.TLV()}},
		Payload: inner,
	}
	if inner[0]>>4 == 4 {
		x.SRH.NextHeader = srv6.NextHeaderIPv4
	}
	s.must(x.Fix())
	return frameOf(x)
}

// segmentOf is a segment of TCP.
func segmentOf(from, to netip.AddrPort, flags byte, payload ...byte) []byte {
	b := make([]byte, 20, 20+len(payload))
	binary.BigEndian.PutUint16(b, from.Port())
	binary.BigEndian.PutUint16(b[2:], to.Port())
	b[12], b[13] = 0x50, flags
	b = append(b, payload...)
	if from.Addr().Is4() {
		return sentBy4(from.Addr().String(), to.Addr().String(), 6, 0, b...)
	}
	return sentBy(from.Addr().String(), to.Addr().String(), 6, b...)
}

const (
	fin, syn, rst, ack = 1, 2, 4, 16
)

// wantIn holds that a packet gets to the function, without its outer header: to its TCP, or to
// its worker alone if it opens a connection and the server is asked first.
func (s *streamBed) wantIn(frame, inner []byte) {
	s.Helper()
	protocol, flags := uint16(srv6.EtherTypeIPv6), 40+13
	if inner[0]>>4 == 4 {
		protocol, flags = srv6.EtherTypeIPv4, 20+13
	}
	if !s.domain.Nodes[1].Proxies[0].Stream.Early && inner[flags]&(syn|ack) == syn {
		protocol = abi.EthPHeld
	}
	verdict, out, err := s.run(object.CoreTC, "in", frame, 0)
	if err != nil || verdict != verdictRedirect || !slices.Equal(out[srv6.EthernetLen:], inner) || binary.BigEndian.Uint16(out[12:]) != protocol {
		s.Errorf("verdict %d, %v, refusals %v, %x; want it at the function, as Ethertype %#x", int32(verdict), err, s.refusals(), out, protocol)
	}
}

// wantInAsIs holds that a packet gets to the function's kernel, without its outer header.
func (s *streamBed) wantInAsIs(frame, inner []byte) {
	s.Helper()
	verdict, out, err := s.run(object.CoreTC, "in", frame, 0)
	if err != nil || verdict != verdictRedirect || !slices.Equal(out[srv6.EthernetLen:], inner) {
		s.Errorf("verdict %d, %v, refusals %v, %x; want it at the function", int32(verdict), err, s.refusals(), out)
	}
}

// held is a frame with a SYN as the worker sends it once TCP shall have it.
func held(inner []byte) []byte {
	b := ether(inner)
	copy(b[6:], []byte{2, 3, 3, 3, 3, 3})
	binary.BigEndian.PutUint16(b[12:], abi.EthPHeld)
	return b
}

// wantOut holds that what the function sends takes a path, with its first stamp.
func (s *streamBed) wantOut(p plan.Path, inner []byte) {
	s.Helper()
	verdict, out, err := s.run(object.FunctionTC, "wss-zip", ether(inner), 0)
	if err != nil || verdict != verdictRedirect {
		s.Errorf("verdict %d, %v, refusals %v; want it to take %s", int32(verdict), err, s.refusals(), p.PathID)
		return
	}
	s.wantTaken(p, inner, out)
}

// wantTaken holds that a frame is a packet with the outer header of a path and its first stamp.
func (s *streamBed) wantTaken(p plan.Path, inner, out []byte) {
	s.Helper()
	x, err := srv6.DecodeFrame(out)
	if err != nil || x.SRH == nil {
		s.Errorf("it came out as %x: %v", out, err)
		return
	}
	proof, _ := x.Proof()
	values, err := pot.Model{}.Stamp(p.Shares[0], p.Header(), flowOf(inner), pot.Values{RND: proof.RND})
	s.must(err)
	if proof.Path != p.Path || proof.CML != values.CML || x.Header.Destination != p.Hops[1].SID || !slices.Equal(x.Payload, hopped(inner)) {
		s.Errorf("proof %+v to %s around %x; want path %s, values %+v", proof, x.Header.Destination, x.Payload, p.PathID, values)
	}
}

func (s *streamBed) wantNotOut(reason abi.Reason, inner []byte) {
	s.Helper()
	s.wantRefused(reason, object.FunctionTC, "wss-zip", ether(inner), 0)
}

func (s *streamBed) wantNotIn(reason abi.Reason, frame []byte) {
	s.Helper()
	s.wantRefused(reason, object.CoreTC, "in", frame, 0)
}

// A connection that a verified SYN of the chain opens gets to the function, and what the
// function sends of it takes the next part, and the part back. Nothing else passes in either way.
func TestConnectionsPassAStreamFunction(t *testing.T) {
	for _, c := range []struct{ chain, client, server, other string }{
		{"web", "[fd00:7::2]:40000", "[2001:db8:8::2]:80", "[2001:db8:8::3]:80"},
		{"legacy", "192.0.2.2:40000", "198.51.100.2:80", "198.51.100.3:80"},
	} {
		t.Run(c.chain, func(t *testing.T) {
			s := newStreamBed(t)
			client, server, other := netip.MustParseAddrPort(c.client), netip.MustParseAddrPort(c.server), netip.MustParseAddrPort(c.other)
			in, on := s.path(c.chain, "forward, up to zip"), s.path(c.chain, "forward, from zip on")
			answers, back := s.path(c.chain, "reverse, up to zip"), s.path(c.chain, "reverse, from zip on")
			open := segmentOf(client, server, syn)

			s.wantNotIn(abi.ReasonStreamUnknown, s.proven(in, segmentOf(client, server, ack)))
			s.wantNotIn(abi.ReasonStreamUnknown, s.proven(in, segmentOf(client, server, syn|ack)))
			s.wantNotIn(abi.ReasonStreamUnknown, s.proven(answers, segmentOf(server, client, syn)))
			s.wantNotOut(abi.ReasonStreamUnknown, open)
			s.wantNotIn(abi.ReasonUnproven, ether(open))

			forged := s.proven(in, open)
			forged[srv6.EthernetLen+40+8+16+20]++ // of the CML
			s.wantNotIn(abi.ReasonProof, forged)
			s.wantNotOut(abi.ReasonStreamUnknown, segmentOf(server, client, syn|ack))

			first := s.proven(in, open)
			s.wantIn(first, open)
			s.wantNotIn(abi.ReasonReplay, first)
			s.wantOut(back, segmentOf(server, client, syn|ack))
			s.wantIn(s.proven(in, segmentOf(client, server, ack)), segmentOf(client, server, ack))
			s.wantNotOut(abi.ReasonStreamUnknown, segmentOf(client, other, syn))
			s.wantOut(on, open) // the function goes on with it
			s.wantIn(s.proven(answers, segmentOf(server, client, syn|ack)), segmentOf(server, client, syn|ack))
			s.wantOut(on, segmentOf(client, server, ack))
			s.wantOut(back, segmentOf(server, client, ack))
			s.wantNotIn(abi.ReasonStreamUnknown, s.proven(answers, segmentOf(other, client, ack)))
			s.wantIn(s.proven(in, segmentOf(client, server, fin|ack)), segmentOf(client, server, fin|ack))
			s.wantIn(s.proven(answers, segmentOf(server, client, rst)), segmentOf(server, client, rst))

			conns := map[abi.ConnKey]abi.Conn{}
			s.must(readMap(s.d.gen, tables.MapConns, conns))
			if len(conns) != 1 {
				t.Fatalf("connections %+v; want one", conns)
			}
			for k, have := range conns {
				if have.Part != abi.BE32(in.Path) || have.Seen != abi.ConnAnswered|abi.ConnClientFin|abi.ConnRst {
					t.Errorf("%+v: %+v; want it of path %#x, answered, ended by the client and reset", k, have, in.Path)
				}
				// Ports are used again when the function opens another connection, and not before.
				seen := func() uint32 {
					var now abi.Conn
					s.must(s.d.gen.maps[tables.MapConns].Lookup(k, &now))
					return uint32(now.Seen)
				}
				s.wantIn(s.proven(in, open), open)
				if seen() != uint32(have.Seen) {
					t.Errorf("a SYN of the client's: seen %v, want %v still", seen(), have.Seen)
				}
				s.wantOut(on, open)
				if seen() != 0 {
					t.Errorf("the function opens another connection: seen %v", seen())
				}
				// The proof of another chain for the same flow, as after a change of plans.
				have.Part = abi.BE32(on.Path)
				s.must(s.d.gen.maps[tables.MapConns].Put(k, have))
				s.wantNotIn(abi.ReasonWrongChain, s.proven(in, segmentOf(client, server, ack)))
				s.wantNotIn(abi.ReasonWrongChain, s.proven(answers, segmentOf(server, client, ack)))
				s.wantNotIn(abi.ReasonWrongChain, s.proven(in, open))
			}
		})
	}
}

// With the addresses, ports and numbers of a connection a plain packet still needs a proof, whatever interface it comes by.
func TestPlainPacketsOfAConnectionAreRefusedAtEachInterface(t *testing.T) {
	for _, c := range []struct{ chain, client, server string }{
		{"web", "[fd00:7::2]:40000", "[2001:db8:8::2]:80"},
		{"legacy", "192.0.2.2:40000", "198.51.100.2:80"},
	} {
		t.Run(c.chain, func(t *testing.T) {
			s := newStreamBed(t)
			client, server := netip.MustParseAddrPort(c.client), netip.MustParseAddrPort(c.server)
			in, answers := s.path(c.chain, "forward, up to zip"), s.path(c.chain, "reverse, up to zip")
			s.wantIn(s.proven(in, segmentOf(client, server, syn)), segmentOf(client, server, syn))
			for _, inner := range [][]byte{
				segmentOf(client, server, ack, 1, 2, 3), segmentOf(client, server, fin|ack), segmentOf(client, server, rst), segmentOf(client, server, syn),
				segmentOf(server, client, ack, 1, 2, 3), segmentOf(server, client, fin|ack), segmentOf(server, client, rst), segmentOf(server, client, syn|ack),
			} {
				for _, link := range []string{"in", "side"} {
					s.wantRefused(abi.ReasonUnproven, object.CoreTC, link, ether(inner), 0)
				}
			}
			// The same segments pass with one.
			data, answer := segmentOf(client, server, ack, 1, 2, 3), segmentOf(server, client, ack, 1, 2, 3)
			s.wantIn(s.proven(in, data), data)
			s.wantIn(s.proven(answers, answer), answer)
		})
	}
}

// The client is answered at once where the file says so.
func TestSYNsOfAnEarlyFunctionDoNotWait(t *testing.T) {
	s := newStreamBed(t)
	s.domain.Nodes[1].Proxies[0].Stream.Early = true
	s.plan()
	open := segmentOf(netip.MustParseAddrPort("[fd00:7::2]:40000"), netip.MustParseAddrPort("[2001:db8:8::2]:80"), syn)
	s.wantIn(s.proven(s.path("web", "forward, up to zip"), open), open)
}

// What the worker lets in comes back to the function, and to nobody else; it can be nothing but a
// SYN of a connection that was admitted.
func TestASYNThatHasWaitedComesBackToTheFunction(t *testing.T) {
	for _, c := range []struct {
		chain, client, server string
		protocol              uint16
	}{
		{"web", "[fd00:7::2]:40000", "[2001:db8:8::2]:80", srv6.EtherTypeIPv6},
		{"legacy", "192.0.2.2:40000", "198.51.100.2:80", srv6.EtherTypeIPv4},
	} {
		t.Run(c.chain, func(t *testing.T) {
			s := newStreamBed(t)
			client, server := netip.MustParseAddrPort(c.client), netip.MustParseAddrPort(c.server)
			open := segmentOf(client, server, syn)
			refused := func(reason abi.Reason, frame []byte) {
				t.Helper()
				s.wantRefused(reason, object.FunctionTC, "wss-zip", frame, 0)
			}
			refused(abi.ReasonStreamUnknown, held(open))
			s.wantIn(s.proven(s.path(c.chain, "forward, up to zip"), open), open)
			verdict, out, err := s.run(object.FunctionTC, "wss-zip", held(open), 0)
			node := s.macs["wss-zip"]
			want := slices.Concat([]byte{2, 3, 3, 3, 3, 3}, node[:], binary.BigEndian.AppendUint16(nil, c.protocol), open)
			if err != nil || verdict != verdictRedirect || !slices.Equal(out, want) {
				t.Errorf("verdict %d, %v, refusals %v, %x; want it back, as %x", int32(verdict), err, s.refusals(), out, want)
			}
			refused(abi.ReasonStreamUnknown, held(segmentOf(client, server, ack)))
			refused(abi.ReasonStreamUnknown, held(segmentOf(client, server, syn|ack)))
			refused(abi.ReasonStreamUnknown, held(segmentOf(server, client, syn)))
			refused(abi.ReasonStreamNotTcp, held(open[:len(open)-1]))
			refused(abi.ReasonStreamNotTcp, held([]byte{0x70, 0, 0, 0}))
			udp := slices.Clone(open)
			if c.protocol == srv6.EtherTypeIPv4 {
				udp[9] = 17
			} else {
				udp[6] = 17
			}
			refused(abi.ReasonStreamNotTcp, held(udp))
			s.wantOut(s.path(c.chain, "reverse, from zip on"), segmentOf(server, client, rst|ack)) // the server's refusal
		})
	}
}

// A reset that comes before the function goes on with a connection is not forgotten: else its
// entry would stay as long as that of a connection which is idle.
func TestAResetBeforeAConnectionIsKeptIsKnown(t *testing.T) {
	s := newStreamBed(t)
	in, on := s.path("web", "forward, up to zip"), s.path("web", "forward, from zip on")
	client, server := netip.MustParseAddrPort("[fd00:7::2]:40000"), netip.MustParseAddrPort("[2001:db8:8::2]:80")
	s.wantIn(s.proven(in, segmentOf(client, server, syn)), segmentOf(client, server, syn))
	s.wantIn(s.proven(in, segmentOf(client, server, rst)), segmentOf(client, server, rst))
	s.wantOut(on, segmentOf(client, server, syn))
	conns := map[abi.ConnKey]abi.Conn{}
	s.must(readMap(s.d.gen, tables.MapConns, conns))
	for _, c := range conns {
		if c.Seen != abi.ConnRst {
			t.Errorf("seen %v, want the reset", c.Seen)
		}
	}
	if len(conns) != 1 {
		t.Errorf("connections %+v; want one", conns)
	}
}

// Between the ends of a connection nobody opens another one the other way round: packets of
// the function could not be told apart.
func TestNobodyOpensAConnectionTheOtherWayRound(t *testing.T) {
	s := newStreamBed(t)
	in := s.path("web", "forward, up to zip")
	client, server := netip.MustParseAddrPort("[2001:db8:8::5]:40000"), netip.MustParseAddrPort("[2001:db8:8::2]:80")
	s.wantIn(s.proven(in, segmentOf(client, server, syn)), segmentOf(client, server, syn))
	s.wantNotIn(abi.ReasonStreamUnknown, s.proven(in, segmentOf(server, client, syn)))
	s.wantIn(s.proven(in, segmentOf(client, server, ack)), segmentOf(client, server, ack))
}

// A proof of the chain's other part, or for packets that are not the chain's, opens
// nothing at the function.
func TestProofsOfOthersOpenNothingAtAStreamFunction(t *testing.T) {
	s := newStreamBed(t)
	in, legacy := s.path("web", "forward, up to zip"), s.path("legacy", "forward, up to zip")
	client, server := netip.MustParseAddrPort("[fd00:7::2]:40000"), netip.MustParseAddrPort("[2001:db8:8::2]:80")
	s.wantNotIn(abi.ReasonWrongChain, s.proven(legacy, segmentOf(client, server, syn)))
	s.wantNotIn(abi.ReasonWrongChain, s.proven(in, segmentOf(client, netip.MustParseAddrPort("[2001:db8:9::2]:80"), syn)))
	s.wantNotIn(abi.ReasonWrongChain, s.proven(s.path("web", "reverse, up to zip"), segmentOf(client, server, syn)))
}

func TestWhatIsNotTCPIsRefusedAtAStreamFunction(t *testing.T) {
	s := newStreamBed(t)
	in, legacy := s.path("web", "forward, up to zip"), s.path("legacy", "forward, up to zip")
	for name, inner := range map[string][]byte{
		"UDP":                 sentBy("fd00:7::2", "2001:db8:8::2", 17, 0, 80, 0, 81, 0, 8, 0, 0),
		"an echo":             sentBy("fd00:7::2", "2001:db8:8::2", 58, 128, 0, 0, 0, 0, 0, 0, 0),
		"behind an extension": sentBy("fd00:7::2", "2001:db8:8::2", 60, append([]byte{6, 0, 1, 4, 0, 0, 0, 0}, segmentOf(netip.MustParseAddrPort("[fd00:7::2]:4"), netip.MustParseAddrPort("[2001:db8:8::2]:80"), syn)[40:]...)...),
		"a header cut short":  sentBy("fd00:7::2", "2001:db8:8::2", 6, make([]byte, 19)...),
		"a fragment of IPv6":  sentBy("fd00:7::2", "2001:db8:8::2", 44, append([]byte{6, 0, 0, 1, 0, 0, 0, 1}, make([]byte, 24)...)...),
		"a fragment of IPv4":  sentBy4("192.0.2.2", "198.51.100.2", 6, 0x2000, make([]byte, 24)...),
		"UDP in IPv4":         sentBy4("192.0.2.2", "198.51.100.2", 17, 0, make([]byte, 24)...),
		"an SRH":              sentBy("fd00:7::2", "2001:db8:8::2", 43, append([]byte{6, 2, 4, 0, 0, 0, 0, 0}, make([]byte, 40)...)...),
		"an advertisement":    sentBy("fd00:7::2", "2001:db8:8::2", 58, append([]byte{136, 0, 0, 0, 32, 0, 0, 0}, make([]byte, 24)...)...),
	} {
		t.Run(name, func(t *testing.T) {
			s := &streamBed{&proxyRun{s.bed.in(t), s.d, s.macs, s.index}, s.domain, s.rnd}
			p := in
			if inner[0]>>4 == 4 {
				p = legacy
			}
			s.wantNotIn(abi.ReasonStreamNotTcp, s.proven(p, inner))
			s.wantNotOut(abi.ReasonStreamNotTcp, inner)
		})
		s.rnd += 10
	}
	arp := slices.Concat(make([]byte, 12), []byte{8, 6}, make([]byte, 28))
	s.wantRefused(abi.ReasonStreamNotTcp, object.FunctionTC, "wss-zip", arp, 0)
}

func TestAStreamFunctionWithoutAWorkerGetsNothing(t *testing.T) {
	s := newStreamBed(t)
	client, server := netip.MustParseAddrPort("[fd00:7::2]:40000"), netip.MustParseAddrPort("[2001:db8:8::2]:80")
	in, open := s.path("web", "forward, up to zip"), segmentOf(client, server, syn)
	s.wantIn(s.proven(in, open), open)
	s.d.Withhold(map[string]error{"zip": errors.New("no worker")})
	if err := s.do(s.d.Reconcile); err == nil {
		t.Error("a function that gets no packets is no problem")
	}
	s.wantNotIn(abi.ReasonStreamDown, s.proven(in, open))
	s.wantOut(s.path("web", "reverse, from zip on"), segmentOf(server, client, rst)) // that it is gone may be said
}

// The interface of a function ends with its agent, and with it the worker.
func TestAStreamFunctionWhoseInterfaceIsGoneGetsNothing(t *testing.T) {
	s := newStreamBed(t)
	client, server := netip.MustParseAddrPort("[fd00:7::2]:40000"), netip.MustParseAddrPort("[2001:db8:8::2]:80")
	in, open := s.path("web", "forward, up to zip"), segmentOf(client, server, syn)
	s.wantIn(s.proven(in, open), open)
	s.must(s.net.DeleteLink("wss-zip"))
	s.wantNotIn(abi.ReasonStreamDown, s.proven(in, open))
	s.wantNotIn(abi.ReasonStreamDown, s.proven(in, segmentOf(client, server, ack)))
}

// errorAbout is an ICMP error from an address about a packet, to that packet's sender.
func errorAbout(from netip.Addr, kind, code byte, about []byte) []byte {
	head := []byte{kind, code, 0, 0, 0, 0, 5, 0xdc}
	if from.Is4() {
		sender, _ := netip.AddrFromSlice(about[12:16])
		return sentBy4(from.String(), sender.String(), 1, 0, append(head, about...)...)
	}
	sender, _ := netip.AddrFromSlice(about[8:24])
	return sentBy(from.String(), sender.String(), 58, append(head, about...)...)
}

// Errors about segments of a connection get to the function from both sides, and none about others. Of
// its own it may send that the server cannot be reached, to the client and in the server's name.
func TestErrorsAboutConnectionsPassAStreamFunction(t *testing.T) {
	for _, c := range []struct {
		chain, client, server, other             string
		unreachable, prohibited, sized, redirect byte
		tooBig                                   byte // code of sized
	}{
		{"web", "[fd00:7::2]:40000", "[2001:db8:8::2]:80", "[2001:db8:8::3]:80", 1, 1, 2, 137, 0},
		{"legacy", "192.0.2.2:40000", "198.51.100.2:80", "198.51.100.3:80", 3, 13, 3, 5, 4},
	} {
		t.Run(c.chain, func(t *testing.T) {
			s := newStreamBed(t)
			client, server, other := netip.MustParseAddrPort(c.client), netip.MustParseAddrPort(c.server), netip.MustParseAddrPort(c.other)
			in, answers, back := s.path(c.chain, "forward, up to zip"), s.path(c.chain, "reverse, up to zip"), s.path(c.chain, "reverse, from zip on")
			open, answer := segmentOf(client, server, syn), segmentOf(server, client, syn|ack)
			unreachable := errorAbout(server.Addr(), c.unreachable, c.prohibited, open)

			s.wantNotIn(abi.ReasonStreamUnknown, s.proven(answers, unreachable))
			s.wantNotOut(abi.ReasonStreamUnknown, unreachable)
			s.wantIn(s.proven(in, open), open)
			// A router of the server's network says so, and that what was sent is too long.
			router := errorAbout(other.Addr(), c.unreachable, c.prohibited, open)
			s.wantInAsIs(s.proven(answers, router), router)
			long := errorAbout(other.Addr(), c.sized, c.tooBig, open)
			s.wantInAsIs(s.proven(answers, long), long)
			// The client's side is told of what went there.
			there := errorAbout(client.Addr(), c.sized, c.tooBig, answer)
			s.wantInAsIs(s.proven(in, there), there)

			s.wantNotIn(abi.ReasonStreamUnknown, s.proven(answers, errorAbout(other.Addr(), c.unreachable, 0, segmentOf(client, other, syn))))
			s.wantNotIn(abi.ReasonStreamUnknown, s.proven(in, errorAbout(client.Addr(), c.unreachable, 0, segmentOf(other, client, ack))))
			s.wantNotIn(abi.ReasonStreamNotTcp, s.proven(answers, errorAbout(other.Addr(), c.redirect, 0, open)))
			s.wantNotIn(abi.ReasonStreamNotTcp, s.proven(answers, errorAbout(server.Addr(), c.unreachable, 0, open[:len(open)-18]))) // no ports

			s.wantOut(back, unreachable)
			s.wantNotOut(abi.ReasonStreamUnknown, router) // in nobody else's name
			s.wantNotOut(abi.ReasonStreamNotTcp, errorAbout(server.Addr(), c.redirect, 0, open))
			if c.chain == "web" {
				s.wantNotOut(abi.ReasonStreamNotTcp, errorAbout(server.Addr(), c.sized, c.tooBig, open))
			} else {
				s.wantNotOut(abi.ReasonStreamNotTcp, errorAbout(server.Addr(), c.unreachable, c.tooBig, open))
			}
			s.wantNotOut(abi.ReasonStreamUnknown, errorAbout(server.Addr(), c.unreachable, c.prohibited, segmentOf(client, netip.AddrPortFrom(server.Addr(), 81), syn)))
			s.wantNotOut(abi.ReasonStreamUnknown, errorAbout(client.Addr(), c.unreachable, c.prohibited, answer)) // not to the server

			conns := map[abi.ConnKey]abi.Conn{}
			s.must(readMap(s.d.gen, tables.MapConnsNew, conns))
			for k, have := range conns {
				have.Part = abi.BE32(back.Path)
				s.must(s.d.gen.maps[tables.MapConnsNew].Put(k, have))
			}
			s.wantNotIn(abi.ReasonWrongChain, s.proven(answers, router))
		})
	}
}

func TestAFullTableOfConnectionsRefusesMore(t *testing.T) {
	s := newStreamBed(t)
	client, server := netip.MustParseAddrPort("[fd00:7::2]:40000"), netip.MustParseAddrPort("[2001:db8:8::2]:80")
	open := segmentOf(client, server, syn)
	s.wantIn(s.proven(s.path("web", "forward, up to zip"), open), open)
	conns := s.d.gen.maps[tables.MapConns]
	keys, values := make([]abi.ConnKey, conns.MaxEntries()), make([]abi.Conn, conns.MaxEntries())
	for i := range keys {
		keys[i].Client[0] = uint64(i)
	}
	if _, err := conns.BatchUpdate(keys, values, &ebpf.BatchOptions{}); err != nil {
		t.Fatal(err)
	}
	s.wantNotOut(abi.ReasonStreamsFull, open)
	s.must(conns.Delete(keys[0]))
	s.wantOut(s.path("web", "forward, from zip on"), open)
}

// A function that has its share of the table opens no further connections; those that it has go on. What is over makes room.
func TestAFunctionHasItsShareOfTheConnections(t *testing.T) {
	s := newStreamBed(t)
	in, on := s.path("web", "forward, up to zip"), s.path("web", "forward, from zip on")
	server := netip.MustParseAddrPort("[2001:db8:8::2]:80")
	from := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr("fd00:7::2"), port) }
	keys, err := tables.ProxyKeys(s.domain.Nodes[1].Proxies)
	s.must(err)
	var p abi.Proxy
	proxies := s.d.gen.maps[tables.MapProxies]
	s.must(proxies.Lookup(keys["zip"], &p))
	if p.Conns != abi.ConnsMax {
		t.Errorf("the only function has a share of %d, want all %d", p.Conns, abi.ConnsMax)
	}
	p.Conns = 2
	s.must(proxies.Put(keys["zip"], p))
	for port := range uint16(3) {
		s.wantIn(s.proven(in, segmentOf(from(port), server, syn)), segmentOf(from(port), server, syn))
	}
	for range 2 { // a SYN that is sent again takes no more of it
		s.wantOut(on, segmentOf(from(0), server, syn))
		s.wantOut(on, segmentOf(from(1), server, syn))
	}
	s.wantNotOut(abi.ReasonStreamQuota, segmentOf(from(2), server, syn))
	s.wantOut(on, segmentOf(from(0), server, ack))
	s.wantIn(s.proven(in, segmentOf(from(1), server, ack)), segmentOf(from(1), server, ack))
	sweep := func(open int) {
		t.Helper()
		got, err := s.d.SweepConnections(map[string]time.Duration{"zip": time.Hour})
		if err != nil || got["zip"].Open != open {
			t.Errorf("%+v, %v left; want %d", got, err, open)
		}
	}
	sweep(2)
	s.wantNotOut(abi.ReasonStreamQuota, segmentOf(from(2), server, syn))
	var ts unix.Timespec
	s.must(unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts))
	over := abi.Conn{Used: uint64(ts.Nano()) - uint64(connEnded+time.Second), Seen: abi.ConnRst, Part: abi.BE32(in.Path)}
	s.must(s.d.gen.maps[tables.MapConns].Put(tables.ConnKey(keys["zip"], from(0), server), over))
	sweep(1)
	s.wantOut(on, segmentOf(from(2), server, syn))
	sweep(2)
}

// What is over is taken out: ended for a while, without a packet for too long, or of a
// function that is gone. All else stays.
func TestConnectionsThatAreOverAreTakenOut(t *testing.T) {
	s := newStreamBed(t)
	keys, err := tables.ProxyKeys(s.domain.Nodes[1].Proxies)
	s.must(err)
	var ts unix.Timespec
	s.must(unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts))
	ago := func(d time.Duration) uint64 { return uint64(ts.Nano()) - uint64(d) }
	put := func(m tables.Map, port uint16, proxy uint32, c abi.Conn) {
		s.must(s.d.gen.maps[m].Put(abi.ConnKey{ClientPort: port, Proxy: proxy}, c))
	}
	zip := keys["zip"]
	put(tables.MapConns, 1, zip, abi.Conn{Used: ago(0), Seen: abi.ConnAnswered})
	put(tables.MapConns, 2, zip, abi.Conn{Used: ago(time.Second), Seen: abi.ConnRst})
	put(tables.MapConns, 3, zip, abi.Conn{Used: ago(3 * time.Second), Seen: abi.ConnAnswered | abi.ConnClientFin})
	put(tables.MapConns, 4, zip, abi.Conn{Used: ago(20 * time.Second), Seen: abi.ConnAnswered})
	put(tables.MapConns, 5, zip+1, abi.Conn{Used: ago(0)})
	put(tables.MapConnsNew, 6, zip, abi.Conn{Used: ago(0)})
	sweep := func(idle time.Duration, want Connections) {
		t.Helper()
		got, err := s.d.SweepConnections(map[string]time.Duration{"zip": idle})
		if err != nil || got["zip"] != want {
			t.Errorf("%+v, %v left of those that may be idle for %s; want %+v", got, err, idle, want)
		}
	}
	for _, limit := range []int{0, 2, 10} {
		got, all, err := s.d.Connections([]string{"zip", "none"}, limit)
		var ports []uint16
		for _, c := range got {
			ports = append(ports, c.Client.Port())
		}
		want := []uint16{1, 3, 4, 6}
		for i, port := range want {
			want[i] = abi.BE16(port)
		}
		slices.Sort(want)
		if err != nil || all != 4 || !slices.Equal(ports, want[:min(limit, 4)]) {
			t.Errorf("of ports %v the first %d are asked for: %v of %d, %v", want, limit, ports, all, err)
		}
		for _, c := range got {
			if wants := (Connection{
				Function: "zip", Client: c.Client, Server: c.Server, New: abi.BE16(c.Client.Port()) == 6, Answered: abi.BE16(c.Client.Port()) != 6,
				ClientEnded: abi.BE16(c.Client.Port()) == 3, Idle: c.Idle,
			}); c != wants || abi.BE16(c.Client.Port()) == 4 && c.Idle < 20*time.Second {
				t.Errorf("a connection is %+v; want %+v", c, wants)
			}
		}
	}
	sweep(time.Minute, Connections{Open: 4, New: 1})
	sweep(10*time.Second, Connections{Open: 3, New: 1})
	put(tables.MapConns, 2, zip, abi.Conn{Used: ago(connEnded + time.Second), Seen: abi.ConnRst})
	put(tables.MapConns, 3, zip, abi.Conn{Used: ago(connEnded + time.Second), Seen: abi.ConnClientFin | abi.ConnServerFin})
	put(tables.MapConns, 7, zip, abi.Conn{Used: ago(connEnded + time.Second), Seen: abi.ConnAnswered | abi.ConnClientFin})
	put(tables.MapConns, 8, zip, abi.Conn{Used: ago(connEnded + time.Second)}) // its server has not answered
	put(tables.MapConnsNew, 6, zip, abi.Conn{Used: ago(connEnded + time.Second)})
	sweep(time.Hour, Connections{Open: 2})
}

// Connections by a sealed part end when a node of its ends is revoked: the part is gone, or comes again with a later number.
func TestConnectionsWithARevokedNodeAreTakenOut(t *testing.T) {
	s := newStreamBed(t)
	const deep, other = 0x11, 0x22
	node := func(revocations map[uint32]uint32) plan.Node {
		n := plan.Node{}
		for path, number := range revocations {
			id := plan.PathID{Chain: fmt.Sprint(path), Path: path}
			n.Egresses = append(n.Egresses, plan.Egress{PathID: id, Seal: &plan.Seal{Certified: true, Name: "dpi", Peer: "gateway", PeerRevocations: number}})
		}
		return n
	}
	for what, c := range map[string]struct {
		next map[uint32]uint32
		left []uint16
	}{
		"nothing has changed":      {map[uint32]uint32{deep: 1, other: 0}, []uint16{1, 2, 3, 4}},
		"the part is gone":         {map[uint32]uint32{other: 0}, []uint16{2, 3}},
		"it has joined again":      {map[uint32]uint32{deep: 2, other: 0}, []uint16{2, 3}},
		"a restored controller's":  {map[uint32]uint32{deep: 0, other: 0}, []uint16{1, 2, 3, 4}},
		"another node has, before": {map[uint32]uint32{deep: 1, other: 7}, []uint16{1, 3, 4}},
	} {
		var put []abi.ConnKey
		add := func(m tables.Map, port uint16, proxy, part uint32) {
			k := abi.ConnKey{ClientPort: port, Proxy: proxy}
			s.must(s.d.gen.maps[m].Put(k, abi.Conn{Used: 1, Part: abi.BE32(part)}))
			put = append(put, k)
		}
		add(tables.MapConns, 1, 1, deep)
		add(tables.MapConns, 2, 1, other)
		add(tables.MapConns, 3, 1|abi.ConnAccepted, deep) // a client's own
		add(tables.MapConnsNew, 4, 2, deep)
		was := node(map[uint32]uint32{deep: 1, other: 0})
		s.must(s.d.endRevoked(&was, node(c.next)))
		var left []uint16
		for _, m := range []tables.Map{tables.MapConns, tables.MapConnsNew} {
			var k abi.ConnKey
			var c abi.Conn
			it := s.d.gen.maps[m].Iterate()
			for it.Next(&k, &c) {
				left = append(left, k.ClientPort)
			}
			s.must(it.Err())
			for _, k := range put {
				if err := s.d.gen.maps[m].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
					t.Fatal(err)
				}
			}
		}
		if slices.Sort(left); !slices.Equal(left, c.left) {
			t.Errorf("%s: %v are left; want %v", what, left, c.left)
		}
	}
}

// Programs of another version take over the connections of those before, so that what was admitted stays so.
func TestConnectionsGoOnWithProgramsOfAnotherVersion(t *testing.T) {
	s := newStreamBed(t)
	for port, m := range []tables.Map{tables.MapConns, tables.MapConnsNew} {
		s.must(s.d.gen.maps[m].Put(abi.ConnKey{ClientPort: uint16(port)}, abi.Conn{Used: 7}))
	}
	of, dir := identityOf(abi.Config{}).objects, s.d.gen.dir
	s.must(s.d.Close())
	another := strings.Repeat("0", len(of))
	s.must(os.Rename(dir, strings.Replace(dir, of, another, 1)))
	s.d = s.open()
	if s.d.gen != nil {
		t.Fatal("the generation of another version is taken for one of this")
	}
	s.plan()
	if s.d.gen.identity.objects != of {
		t.Fatalf("the programs are %s; want %s", s.d.gen.identity.objects, of)
	}
	for port, m := range []tables.Map{tables.MapConns, tables.MapConnsNew} {
		var c abi.Conn
		if err := s.d.gen.maps[m].Lookup(abi.ConnKey{ClientPort: uint16(port)}, &c); err != nil || c.Used != 7 {
			t.Errorf("map %s has %+v: %v; want the connection of before", m, c, err)
		}
	}
}

// wantBy holds that a packet goes by the function: it leaves the part that it came by, and takes another with its first stamp.
func (s *streamBed) wantBy(from, to plan.Path, inner []byte) {
	s.Helper()
	verdict, out, err := s.run(object.CoreTC, "in", s.proven(from, inner), 0)
	if err != nil || verdict != verdictRedirect {
		s.Errorf("verdict %d, %v, refusals %v; want it to take %s", int32(verdict), err, s.refusals(), to.PathID)
		return
	}
	s.wantTaken(to, inner, out)
}

// What the file says goes by a function, verified by the part that ends there and stamped by the next one, in both directions. Nothing
// that could be TCP does, and nothing comes out of the function's interface for it.
func TestWhatIsNotTCPGoesByAStreamFunction(t *testing.T) {
	const client, server, router = "fd00:7::2", "2001:db8:8::2", "2001:db8:8::9"
	const client4, server4 = "192.0.2.2", "198.51.100.2"
	echo := sentBy(client, server, 58, 128, 0, 0, 0, 0, 1, 0, 1, 5)
	reply := sentBy(server, client, 58, 129, 0, 0, 0, 0, 1, 0, 1, 5)
	echo4 := sentBy4(client4, server4, 1, 0, 8, 0, 0, 0, 0, 1, 0, 1)
	reply4 := sentBy4(server4, client4, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1)
	udp := sentBy(client, server, 17, 0, 80, 0, 81, 0, 8, 0, 0)
	answer := sentBy(server, client, 17, 0, 81, 0, 80, 0, 8, 0, 0)
	udp4 := sentBy4(client4, server4, 17, 0, 0, 80, 0, 81, 0, 8, 0, 0)
	port := func(a string) netip.AddrPort { return netip.AddrPortFrom(xtest.Addr(a), 80) }
	extension := func(next byte, kind byte) []byte {
		return sentBy(client, server, kind, append([]byte{next, 0, 1, 4, 0, 0, 0, 0}, make([]byte, 40)...)...)
	}
	fragment := func(next byte, offset byte) []byte {
		return sentBy(client, server, 44, append([]byte{next, 0, 0, offset, 0, 0, 0, 1}, make([]byte, 24)...)...)
	}
	type packet struct {
		name        string
		inner       []byte
		icmp, relay bool // whether it goes by
		reason      abi.Reason
	}
	forward := []packet{
		{"an echo", echo, true, true, 0},
		{"an echo in IPv4", echo4, true, true, 0},
		{"an error about an echo", errorAbout(xtest.Addr(client), 1, 4, reply), true, true, 0},
		{"an error about an echo in IPv4", errorAbout(xtest.Addr(client4), 3, 1, reply4), true, true, 0},
		{"UDP", udp, false, true, 0},
		{"UDP in IPv4", udp4, false, true, 0},
		{"a fragment of UDP", fragment(17, 1), false, true, 0},
		{"a later fragment of UDP", fragment(17, 8), false, true, 0},
		{"a fragment of UDP in IPv4", sentBy4(client4, server4, 17, 0x2000, make([]byte, 24)...), false, true, 0},
		{"a fragment of an echo in IPv4", sentBy4(client4, server4, 1, 0x2000, 8, 0, 0, 0, 0, 1, 0, 1), false, true, 0},
		{"a group's", sentBy(client, server, 58, 131, 0, 0, 0, 0, 1, 0, 1), false, true, 0},
		{"TCP", segmentOf(port(client), port(server), ack), false, false, abi.ReasonStreamUnknown},
		{"TCP in IPv4", segmentOf(port(client4), port(server4), ack), false, false, abi.ReasonStreamUnknown},
		{"an error about TCP", errorAbout(xtest.Addr(client), 1, 4, segmentOf(port(server), port(client), ack)), false, false, abi.ReasonStreamUnknown},
		{"an error about TCP in IPv4", errorAbout(xtest.Addr(client4), 3, 1, segmentOf(port(server4), port(client4), ack)), false, false, abi.ReasonStreamUnknown},
		{"a fragment of TCP", fragment(6, 1), false, false, abi.ReasonStreamNotTcp},
		{"a later fragment of TCP", fragment(6, 8), false, false, abi.ReasonStreamNotTcp},
		{"a fragment of TCP in IPv4", sentBy4(client4, server4, 6, 0x2000, make([]byte, 24)...), false, false, abi.ReasonStreamNotTcp},
		{"a later fragment of TCP in IPv4", sentBy4(client4, server4, 6, 9, make([]byte, 24)...), false, false, abi.ReasonStreamNotTcp},
		{"TCP behind options", extension(6, 60), false, false, abi.ReasonStreamNotTcp},
		{"UDP behind options", extension(17, 60), false, false, abi.ReasonStreamNotTcp},
		{"a fragment that begins with options", fragment(60, 1), false, false, abi.ReasonStreamNotTcp},
		{"a fragment in a fragment", fragment(44, 1), false, false, abi.ReasonStreamNotTcp},
		{"mobility", extension(6, 135), false, false, abi.ReasonStreamNotTcp},
		{"an unassigned protocol", extension(6, 200), false, false, abi.ReasonStreamNotTcp},
		{"an SRH", sentBy(client, server, 43, append([]byte{6, 2, 4, 0, 0, 0, 0, 0}, make([]byte, 40)...)...), false, false, abi.ReasonStreamNotTcp},
		{"an advertisement", sentBy(client, server, 58, append([]byte{136, 0, 0, 0, 32, 0, 0, 0}, make([]byte, 24)...)...), false, false, abi.ReasonStreamNotTcp},
		{"a redirect", sentBy(client, server, 58, append([]byte{137, 0, 0, 0, 32, 0, 0, 0}, make([]byte, 40)...)...), false, false, abi.ReasonStreamNotTcp},
		{"a redirect in IPv4", errorAbout(xtest.Addr(client4), 5, 1, reply4), false, false, abi.ReasonStreamNotTcp},
		{"an error that quotes nothing", sentBy(client, server, 58, 1, 4, 0, 0, 0, 0, 0, 0), false, false, abi.ReasonStreamNotTcp},
		{"ICMP cut short", sentBy(client, server, 58, 128, 0), false, false, abi.ReasonStreamNotTcp},
	}
	reverse := []packet{
		{"a reply", reply, true, true, 0},
		{"a reply in IPv4", reply4, true, true, 0},
		{"a router's error about an echo", errorAbout(xtest.Addr(router), 3, 0, echo), true, true, 0},
		{"a router's error about UDP", errorAbout(xtest.Addr(router), 1, 4, udp), true, true, 0},
		{"UDP", answer, false, true, 0},
	}
	for _, other := range []model.Other{model.OtherRefuse, model.OtherICMP, model.OtherRelay} {
		t.Run(other.String(), func(t *testing.T) {
			s := newStreamBed(t)
			s.domain.Nodes[1].Proxies[0].Stream.Other = other
			s.plan()
			for way, packets := range map[string][]packet{"forward": forward, "reverse": reverse} {
				for _, c := range packets {
					ok := t.Run(way+", "+c.name, func(t *testing.T) {
						s := &streamBed{&proxyRun{s.bed.in(t), s.d, s.macs, s.index}, s.domain, s.rnd}
						chain := "web"
						if c.inner[0]>>4 == 4 {
							chain = "legacy"
						}
						from, to := s.path(chain, way+", up to zip"), s.path(chain, way+", from zip on")
						if other == model.OtherICMP && c.icmp || other == model.OtherRelay && c.relay {
							s.wantBy(from, to, c.inner)
						} else {
							reason := c.reason
							if reason == 0 {
								reason = abi.ReasonStreamNotTcp
							}
							s.wantNotIn(reason, s.proven(from, c.inner))
						}
						// Without its proof, with that of another chain, or out of the function's namespace.
						s.wantRefused(abi.ReasonUnproven, object.CoreTC, "in", ether(c.inner), 0)
						if way == "forward" && chain == "web" {
							s.wantNotIn(abi.ReasonWrongChain, s.proven(s.path("legacy", "forward, up to zip"), c.inner))
						}
						forged := s.proven(from, c.inner)
						forged[srv6.EthernetLen+40+8+16+20]++ // of the CML
						s.wantNotIn(abi.ReasonProof, forged)
						if c.icmp || c.relay {
							s.wantNotOut(abi.ReasonStreamNotTcp, c.inner)
						}
					})
					if !ok {
						t.Logf("%s, %s", way, c.name)
					}
					s.rnd += 10
				}
			}
			if other == model.OtherRefuse {
				return
			}
			// It does not need the function.
			s.d.Withhold(map[string]error{"zip": errors.New("no worker")})
			if err := s.do(s.d.Reconcile); err == nil {
				t.Error("a function that gets no packets is no problem")
			}
			s.wantBy(s.path("web", "forward, up to zip"), s.path("web", "forward, from zip on"), echo)
		})
	}
}
