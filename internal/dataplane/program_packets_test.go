package dataplane

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// scapyRigs are the nodes that Scapy's packets are for.
type scapyRigs struct {
	*testing.T
	world packets.World
	rigs  map[string]*rig
}

func newScapyRigs(t *testing.T, oldKernel bool) *scapyRigs {
	t.Helper()
	w, err := packets.LoadWorld()
	if err != nil {
		t.Fatal(err)
	}
	s := &scapyRigs{T: t, world: w, rigs: map[string]*rig{}}
	for _, n := range w.Nodes {
		s.rigs[n.Name] = newRig(t, rigSpec{name: n.Name, block: n.Block, locator: n.Locator, address: n.Address, own: n.Local, oldKernel: oldKernel, routes: refusing(n)})
	}
	return s
}

// refusing are the node's routes that refuse.
func refusing(n packets.Node) (out []rigRoute) {
	for _, x := range n.Routes {
		kind := map[string]int{"unreachable": unix.RTN_UNREACHABLE, "prohibit": unix.RTN_PROHIBIT, "blackhole": unix.RTN_BLACKHOLE}[x.Kind]
		out = append(out, rigRoute{to: x.To, kind: kind})
	}
	return out
}

// at makes the rig of a packet's node ready for it.
func (s *scapyRigs) at(t *testing.T, p packets.Packet) *rig {
	t.Helper()
	r := s.rigs[p.Node]
	if r.node.Armed != p.Armed || r.node.Node.Name == "" {
		var of *plan.Node
		if p.Armed {
			n, err := s.world.Node(p.Node)
			if err != nil {
				t.Fatal(err)
			}
			of = &n.Node
		}
		if err := r.apply(of); err != nil {
			t.Fatal(err)
		}
	}
	number := max(p.Counter, 1)
	if err := r.setNumbers(number); err != nil {
		t.Fatal(err)
	}
	return r
}

// Every packet that Scapy made, through the programs that ship: they must agree
// with the oracle, and with what the packet's file says.
func TestProgramsDoWithScapysPacketsWhatTheyMust(t *testing.T) {
	t.Parallel()
	for name, old := range map[string]bool{"this kernel": false, "as on Linux 6.1": true} {
		t.Run(name, func(t *testing.T) { allOfScapysPackets(t, newScapyRigs(t, old)) })
	}
}

func allOfScapysPackets(t *testing.T, s *scapyRigs) {
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(all, func(p packets.Packet) bool { return s.rigs[p.Node] == nil }); i >= 0 {
		t.Fatalf("%s is for %q, which the world lacks", all[i].Name, all[i].Node)
	}
	// Nodes beside each other: each has programs of its own to load, which takes longer than its packets.
	for node := range s.rigs {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			for _, p := range all {
				if p.Node != node {
					continue
				}
				t.Run(p.Name, func(t *testing.T) {
					if p.Frames != 1 {
						s.superPacket(t, p)
						return
					}
					s.packet(t, p)
				})
			}
		})
	}
}

func (s *scapyRigs) packet(t *testing.T, p packets.Packet) {
	r := s.at(t, p)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", p.Note, err)
		}
	}
	f := frame{port: p.Interface.Name, b: p.Frame}
	must(r.g.flushNexthops())
	must(r.freshEvents())
	_, err := r.drain()
	must(err)

	// Before TC has learned a way out XDP can do nothing but refuse a proof.
	must(r.in(func() error {
		cold, err := r.runXDP(f)
		if err != nil {
			return err
		}
		counted, err := r.counted()
		if err != nil {
			return err
		}
		switch {
		case !bytes.Equal(cold.b, f.b):
			return fmt.Errorf("XDP, without a way out in its cache, changed the packet:\n%s", layers(cold.b))
		case cold.verdict == xdpPass && len(counted.dropped)+len(counted.reported)+len(counted.stats) == 0:
			return nil
		case cold.verdict == xdpDrop && slices.Equal(counted.dropped, []string{p.Reason}) && len(counted.reported)+len(counted.stats) == 0:
			return nil
		}
		return fmt.Errorf("XDP, without a way out in its cache: verdict %d, counted %+v", cold.verdict, counted)
	}))
	must(r.setNumbers(r.number))
	must(r.freshEvents())
	_, err = r.drain()
	must(err)

	var got seen
	must(r.in(func() (err error) {
		got, err = r.check(f, &oracle.Labels{}, true)
		return err
	}))

	if f.truncated() {
		return // the rest is in TestTruncatedHeaders
	}

	// What the file says.
	if got.want.Verdict.String() != string(p.Verdict) || string(got.want.Reason) != p.Reason {
		t.Errorf("%s: %s %s, want %s %s", p.Note, got.want.Verdict, got.want.Reason, p.Verdict, p.Reason)
	}
	if p.File == packets.Errors && !bytes.Equal(got.want.Error, p.Error) {
		t.Errorf("%s: its source is told\n%x\nwant\n%x", p.Note, got.want.Error, p.Error)
	}
	if p.Verdict == packets.Forward {
		sent := got.tc.b[srv6.EthernetLen:]
		if got.want.Encapsulated {
			sent = oracle.WithoutLabel(sent)
		}
		if !bytes.Equal(sent, p.Out) {
			t.Errorf("%s: sent\n%s\nwant\n%s", p.Note, layers(slices.Concat(f.b[:14], sent)), layers(slices.Concat(f.b[:14], p.Out)))
		}
	}

	events, err := r.drain()
	must(err)
	var reasons []string
	for _, e := range events {
		reasons = append(reasons, reasonName(abi.Reason(e.Reason)))
		must(checkEvent(r, f, got, e))
	}
	want := slices.Clone(p.Reports)
	if p.Reason != "" {
		want = append(want, p.Reason)
		if got.xdp == xdpDrop {
			want = append(want, p.Reason)
		}
	}
	if !slices.Equal(reasons, want) {
		t.Errorf("%s: events for %v, want %v", p.Note, reasons, want)
	}

	// What XDP can finish it must.
	if easy := xdpShouldFinish(f, got) && !r.asksForMSS(f, got.want); easy != got.took {
		t.Errorf("%s: XDP finished it: %t, want %t; its verdict is %d", p.Note, got.took, easy, got.xdp)
	}
}

// checkEvent: the record has the reason and the packet as it was then.
func checkEvent(r *rig, f frame, got seen, e abi.Event) error {
	packet := got.tc.b
	const quote = srv6.IPv6Len + 8
	switch {
	case e.Reported != 0 || got.want.Error != nil && len(got.want.Visits) == 0:
		packet = f.b // before anything was done to it
	case len(got.want.Visits) > 0 && got.want.Visits[0].Position == 0:
		// With the outer header made here, whose label the oracle does not know.
		packet = e.Data[:min(int(e.Caplen), len(e.Data))]
		const outer = srv6.IPv6Len + srv6.SRHLen + 3*srv6.SegmentLen + srv6.ProofLen
		if payload := f.b[len(f.b)-8:]; len(packet) != len(f.b)+outer || !bytes.HasSuffix(packet, payload) {
			return fmt.Errorf("the event for %s has %d bytes:\n%s\nwant the %d of the frame and %d of an outer header", abi.Reason(e.Reason), len(packet), layers(packet), len(f.b), outer)
		}
	case got.want.Error != nil && got.want.Error[0]>>4 == 4:
		packet = slices.Concat(f.b[:12], etherType(true), got.want.Error[srv6.IPv4Len+8:])
	case got.want.Error != nil:
		packet = slices.Concat(f.b[:srv6.EthernetLen], got.want.Error[quote:])
	}
	port := r.ports[f.port]
	if e.Hook == uint8(abi.HookXDP) {
		port = 1 // a test run comes by the loopback device
	}
	reported := uint8(0)
	if !slices.Contains([]string{string(got.want.Reason)}, reasonName(abi.Reason(e.Reason))) {
		reported = 1
	}
	n := min(len(packet), abi.EventData)
	switch {
	case int(e.Len) != len(packet) || int(e.Caplen) != n || !bytes.Equal(e.Data[:n], packet[:n]):
		return fmt.Errorf("the event for %s has %d of %d bytes:\n%s\nwant %d of\n%s", abi.Reason(e.Reason), e.Caplen, e.Len, layers(e.Data[:min(int(e.Caplen), len(e.Data))]), n, layers(packet))
	case e.Ifindex != port || e.Suppressed != 0 || e.Reported != reported || e.TimeNs == 0:
		return fmt.Errorf("the event for %s has interface %d (want %d), %d suppressed, reported %d (want %d), time %d", abi.Reason(e.Reason), e.Ifindex, port, e.Suppressed, e.Reported, reported, e.TimeNs)
	}
	return nil
}

// asksForMSS: a SYN, or what could be one, of a chain that lowers what it says.
func (r *rig) asksForMSS(f frame, want oracle.Result) bool {
	if len(want.Visits) == 0 || want.Visits[0].Position != 0 {
		return false
	}
	path := want.Visits[0].Path
	clamps := slices.ContainsFunc(r.node.Headends, func(h plan.Headend) bool { return h.Path == path && h.MSS != 0 })
	protocol, at := f.b[20], 54
	if f.b[12] == 8 && f.b[13] == 0 {
		protocol, at = f.b[23], 34
	}
	return clamps && protocol == 6 && (len(f.b) < at+20 || f.b[at+13]&2 != 0)
}

// xdpShouldFinish: one visit, the proof alone behind the list, no headers to be
// looked through at a headend, and its header no longer than the headroom of 256
// bytes, nothing behind the inner packet; or a proof that the egress refuses.
func xdpShouldFinish(f frame, got seen) bool {
	w := got.want
	ipv4 := [2]byte(f.b[12:14]) == [2]byte{8, 0}
	atOnce := len(f.b) > 58 && !ipv4 && f.b[20] == 43 && f.b[55] == 2*(f.b[58]+1)+3
	switch w.Verdict {
	case oracle.Forward:
		switch {
		case len(w.Visits) != 1 || len(w.Reported) != 0:
			return false
		case w.Encapsulated && len(w.Packet) > len(f.b)+256-srv6.EthernetLen:
			return false
		case w.Encapsulated && ipv4:
			return f.b[14] == 0x45 // no options
		case w.Encapsulated: // 20: next header; options, or another header that may hide an SRH
			return !slices.Contains([]byte{0, 43, 44, 51, 60}, f.b[20])
		}
		decapsulated := len(got.tc.b) < len(f.b)
		if decapsulated && len(f.b) > srv6.EthernetLen+48+8*int(f.b[55])+len(w.Packet) {
			return false // TC cuts what is behind
		}
		return atOnce && !(decapsulated && !w.IPv4 && slices.Contains([]byte{0, 43, 44, 51, 60}, w.Packet[6]))
	case oracle.Drop:
		return atOnce && slices.Contains([]oracle.Reason{oracle.Segments, oracle.Proof, oracle.Range}, w.Reason) && len(w.Visits) == 0
	}
	return false
}

// superPacket: a test run's super-packets cannot be encapsulated, so only what
// comes before is seen here; see TestHeadendStampsTrains for the rest.
func (s *scapyRigs) superPacket(t *testing.T, p packets.Packet) {
	r := s.at(t, p)
	f := frame{port: p.Interface.Name, b: p.Frame, gsoSize: 1, gsoSegs: uint32(p.Frames)}
	if err := r.in(func() error {
		got, err := r.check(f, &oracle.Labels{}, true)
		if err != nil {
			return err
		}
		want := p.Reason
		if p.Verdict == packets.Forward {
			want = "PUSH_FAILED"
		}
		if string(got.want.Reason) != want {
			return fmt.Errorf("dropped for %s, want %s", got.want.Reason, want)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
