package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// runLeave gives the frame to the program at an edge's egress.
func (r *rig) runLeave(f frame, d oracle.Departure) (outcome, error) {
	prog := r.program(object.EdgeOutTC)
	if i := leaveIndex(d); i != 0 {
		var err error
		if prog, err = r.withIndex(object.EdgeOutTC, i); err != nil {
			return outcome{}, err
		}
	}
	const nowhere = 1 // the loopback device, which no plan has
	from := map[oracle.Origin]uint32{oracle.FromNode: 0, oracle.FromPlan: r.ports[portCore], oracle.FromElsewhere: nowhere}[d.From]
	ctx := skb{Ifindex: r.ports[portEdge], IngressIfindex: from, GSOSegs: f.gsoSegs, GSOSize: f.gsoSize}
	return r.run(prog, ebpf.RunOptions{Data: f.b, Context: ctx})
}

// leaveIndex is what skb->tc_index says of a packet.
func leaveIndex(d oracle.Departure) uint32 {
	switch {
	case d.Index:
		return abi.IndexProven
	case d.LetGo:
		return abi.IndexLetGo
	}
	return 0
}

// checkLeaves compares what becomes of a frame that is about to leave with what
// the oracle says: verdict, and that nothing is changed. It returns the reason, and
// what must have been counted.
func (r *rig) checkLeaves(f frame, d oracle.Departure) (oracle.Reason, moved, error) {
	d.Frame, d.Socket = f.b, true // a test run's packets have one
	d.Guard = r.guards[portEdge]
	n := r.node
	if !n.Armed {
		n.Egresses = nil
	}
	if d.From == oracle.FromPlan && !n.Armed {
		d.From = oracle.FromElsewhere // ws_ports is empty
	}
	want := n.Leave(d)
	m := moved{stats: map[uint32]abi.Stats{}}
	got, err := r.runLeave(f, d)
	if err != nil {
		return "", m, err
	}
	for _, x := range want.Reported {
		m.reported = append(m.reported, string(x))
	}
	verdict := uint32(tcPass)
	if want.Verdict == oracle.Drop {
		verdict, m.dropped = tcDrop, []string{string(want.Reason)}
	}
	if got.verdict != verdict {
		err = errors.Join(err, fmt.Errorf("TC egress: verdict %d, want %d", int32(got.verdict), int32(verdict)))
	}
	if !slices.Equal(got.b, f.b) {
		err = errors.Join(err, fmt.Errorf("TC egress changed the packet:\n%s", layers(got.b)))
	}
	if err != nil {
		return "", m, fmt.Errorf("%w\nfrom %d, index %d, the oracle says %s %s:\n%s", err, d.From, leaveIndex(d), want.Verdict, want.Reason, layers(f.b))
	}
	return want.Reason, m, nil
}

// Scapy's packets at the way out of an edge.
func TestWhatMayLeaveTheDomain(t *testing.T) {
	const none = ""
	rigs := map[string]*rig{"r1": newScapyRig(t, "r1"), "r6": newScapyRig(t, "r6"), "r1 unarmed": newScapyRig(t, "r1")}
	rigs["r1 unarmed"].must(rigs["r1 unarmed"].apply(nil))
	for _, c := range []struct {
		node, packet string
		from         oracle.Origin
		index        bool
		reason       oracle.Reason
	}{
		// web ends at r6, whose edge its packets leave by.
		{"r6", "edge-web", oracle.FromPlan, true, none},
		{"r6", "edge-web", oracle.FromPlan, false, oracle.Unverified},
		{"r6", "edge-web", oracle.FromElsewhere, false, oracle.Unverified},
		{"r6", "edge-web", oracle.FromElsewhere, true, oracle.Unverified}, // an index that somebody else has set
		{"r6", "edge-web", oracle.FromNode, false, none},
		{"r6", "edge-web", oracle.FromNode, true, none},
		{"r1", "edge-web", oracle.FromElsewhere, false, none}, // required elsewhere
		{"r6", "edge-unmatched", oracle.FromElsewhere, false, none},
		{"r6", "edge-multicast", oracle.FromElsewhere, false, none},
		{"r6", "edge-ipv4", oracle.FromElsewhere, false, none},
		// Nothing encapsulated, whoever says so.
		{"r6", "web-1", oracle.FromPlan, true, oracle.LeakSID},
		{"r6", "web-1", oracle.FromNode, false, oracle.LeakSID},
		{"r1 unarmed", "web-1", oracle.FromElsewhere, false, oracle.LeakSID},
		{"r6", "outside-srh", oracle.FromNode, false, oracle.LeakSRH},
		{"r6", "outside-srh-behind-4", oracle.FromPlan, true, oracle.LeakSRH},
		{"r6", "outside-options", oracle.FromPlan, false, none},
		{"r6", "outside-routing-type-2", oracle.FromPlan, false, none},
	} {
		t.Run(fmt.Sprintf("%s %s %d %t", c.node, c.packet, c.from, c.index), func(t *testing.T) {
			r := rigs[c.node]
			p, err := packets.Load(c.packet)
			if err == nil {
				err = r.in(func() error {
					got, m, err := r.checkLeaves(frame{b: p.Frame}, oracle.Departure{From: c.from, Index: c.index})
					err = errors.Join(err, r.checkMoved("TC egress", m))
					if err == nil && got != c.reason {
						err = fmt.Errorf("refused for %q, want %q", got, c.reason)
					}
					return err
				})
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// What the second guard does, by what the chain, the interface and the first guard say.
func TestTheSecondGuardCountsOnce(t *testing.T) {
	const none = ""
	plan, let := oracle.Departure{From: oracle.FromPlan}, oracle.Departure{From: oracle.FromPlan, LetGo: true}
	elsewhere, forged := oracle.Departure{From: oracle.FromElsewhere}, oracle.Departure{From: oracle.FromElsewhere, LetGo: true}
	rigs := map[model.Guard]*rig{}
	for _, g := range []model.Guard{model.GuardUnset, model.GuardOff, model.GuardAudit, model.GuardEnforce} {
		r := newScapyRig(t, "r6")
		r.guards = map[string]model.Guard{portEdge: g}
		n := r.node.Node
		r.must(r.apply(&n))
		rigs[g] = r
	}
	for _, c := range []struct {
		packet            string
		edge              model.Guard
		d                 oracle.Departure
		dropped, reported oracle.Reason
	}{
		{"guard-audit-core", model.GuardUnset, plan, none, oracle.Unverified},
		{"guard-audit-core", model.GuardUnset, let, none, none},
		{"guard-audit-core", model.GuardUnset, forged, none, oracle.Unverified},
		{"guard-audit-core", model.GuardOff, elsewhere, none, oracle.Unverified},
		{"guard-audit-core", model.GuardEnforce, let, oracle.Unverified, none},
		{"guard-off-core", model.GuardUnset, elsewhere, none, none},
		{"guard-off-core", model.GuardAudit, elsewhere, none, oracle.Unverified},
		{"guard-enforce-core", model.GuardOff, let, oracle.Unverified, none},
		{"edge-web", model.GuardUnset, plan, oracle.Unverified, none},
		{"edge-web", model.GuardUnset, let, none, none}, // by what it came in at
		{"edge-web", model.GuardUnset, forged, oracle.Unverified, none},
		{"edge-web", model.GuardOff, elsewhere, none, none},
		{"edge-web", model.GuardAudit, elsewhere, none, oracle.Unverified},
		{"edge-web", model.GuardEnforce, let, oracle.Unverified, none},
		// Not its matter.
		{"web-1", model.GuardOff, let, oracle.LeakSID, none},
		{"outside-srh", model.GuardOff, let, oracle.LeakSRH, none},
	} {
		t.Run(fmt.Sprintf("%s at %s, from %d, index %d", c.packet, c.edge, c.d.From, leaveIndex(c.d)), func(t *testing.T) {
			r := rigs[c.edge]
			p, err := packets.Load(c.packet)
			if err == nil {
				err = r.in(func() error {
					dropped, m, err := r.checkLeaves(frame{b: p.Frame}, c.d)
					err = errors.Join(err, r.checkMoved("TC egress", m))
					if reported := strings.Join(m.reported, " "); err == nil && (dropped != c.dropped || reported != string(c.reported)) {
						err = fmt.Errorf("refused for %q and reported for %q, want %q and %q", dropped, reported, c.dropped, c.reported)
					}
					return err
				})
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// newEdgeLive is r6 with portOut as its way out of the domain, and an interface
// "extra" that is not in its plan.
func newEdgeLive(t *testing.T) *live {
	t.Helper()
	l := newScapyRig(t, "r6").goLive()
	l.must(l.rig.in(func() error {
		a := netlink.NewLinkAttrs()
		a.Name, a.HardwareAddr = "extra", rigMAC[:]
		v := netlink.NewVeth(a)
		v.PeerName = "extra-peer"
		if err := netlink.LinkAdd(v); err != nil {
			return err
		}
		for _, name := range []string{a.Name, v.PeerName} {
			dev, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetUp(dev); err != nil {
				return err
			}
		}
		fd, err := l.socket(v.PeerName, 0)
		l.in["extra"] = fd
		return errors.Join(err, l.attachAt(l.program(object.EdgeOutTC), portOut, ebpf.AttachTCXEgress))
	}))
	return l
}

// leaves sends a frame that must go out to the neighbour as it is, but for the
// hop limit.
func (l *live) leaves(port string, b []byte) error {
	if err := l.send(port, b, 0); err != nil {
		return err
	}
	got, _, err := l.receive()
	if err != nil {
		return err
	}
	want := slices.Clone(b[srv6.EthernetLen:])
	want[7]--
	if !slices.Equal(want, got[srv6.EthernetLen:]) {
		return fmt.Errorf("sent:\n%s\nwant\n%s", layers(got), layers(b))
	}
	return nil
}

// The ways through a node that our programs do not see: each ends at the edge.
func TestNothingGetsPastTheGuardByAnotherWay(t *testing.T) {
	l := newEdgeLive(t)
	load := func(name string) []byte {
		p, err := packets.Load(name)
		l.must(err)
		return p.Frame
	}
	required, other := load("edge-web"), load("edge-unmatched")

	t.Run("verified", func(t *testing.T) {
		p, err := packets.Load("web-3")
		l.must(err)
		l.must(l.send(portCore, p.Frame, 0))
		if err := l.checkOut(oracle.Arrival{Interface: p.Interface, Frame: p.Frame}, 0, &oracle.Labels{}); err != nil {
			t.Error(err)
		}
	})
	t.Run("sent by the node", func(t *testing.T) {
		l.must(l.rig.in(func() error {
			c, err := net.Dial("udp6", "[fc00:8::2]:53")
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("waystamp"))
			return err
		}))
		if b, _, err := l.receive(); err != nil || !bytes.HasSuffix(b, []byte("waystamp")) {
			t.Errorf("%v\n%s", err, layers(b))
		}
	})
	t.Run("interface that is not in the plan", func(t *testing.T) {
		if err := l.leaves("extra", other); err != nil {
			t.Errorf("a packet that nobody requires: %v", err)
		}
		if err := l.refuses("extra", required, 0, abi.ReasonUnverified); err != nil {
			t.Error(err)
		}
	})
	t.Run("kernel's own SRv6", func(t *testing.T) {
		l.must(l.rig.in(func() error {
			if err := os.WriteFile("/proc/sys/net/ipv6/conf/extra/seg6_enabled", []byte("1"), 0); err != nil {
				return err
			}
			dev, err := netlink.LinkByName("extra")
			if err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{
				LinkIndex: dev.Attrs().Index, Dst: netOf(xtest.Prefix("fc00:77::1/128")),
				Encap: &netlink.SEG6LocalEncap{
					Flags:  [nl.SEG6_LOCAL_MAX]bool{nl.SEG6_LOCAL_ACTION: true, nl.SEG6_LOCAL_TABLE: true},
					Action: nl.SEG6_LOCAL_ACTION_END_DT6, Table: unix.RT_TABLE_MAIN,
				},
			})
		}))
		tunnelled := func(inner []byte) []byte {
			h := srv6.Header{NextHeader: srv6.NextHeaderIPv6, HopLimit: 64, Source: xtest.Addr("fc00:99::1"), Destination: xtest.Addr("fc00:77::1")}
			h.PayloadLength = uint16(len(inner))
			b, err := h.Append(nil)
			l.must(err)
			return framed(srv6.EtherTypeIPv6, append(b, inner...))
		}
		l.must(l.send("extra", tunnelled(other[srv6.EthernetLen:]), 0))
		if b, _, err := l.receive(); err != nil || b[srv6.EthernetLen+6] != other[srv6.EthernetLen+6] {
			t.Fatalf("the kernel does not take the outer header off: %v\n%s", err, layers(b))
		}
		if err := l.refusesAs("extra", tunnelled(required[srv6.EthernetLen:]), 0, abi.ReasonUnverified, len(required)); err != nil {
			t.Error(err)
		}
	})
	t.Run("index that another namespace has set", func(t *testing.T) {
		l.must(l.rig.in(func() error {
			forger, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
				Instructions: asm.Instructions{
					asm.Mov.Imm(asm.R2, abi.IndexProven),
					asm.StoreMem(asm.R1, tcIndex, asm.R2, asm.Word),
					asm.Mov.Imm(asm.R0, -1),
					asm.Return(),
				},
			})
			if err != nil {
				return err
			}
			defer forger.Close()
			return l.attachAt(forger, "extra-peer", ebpf.AttachTCXEgress)
		}))
		if err := l.refuses("extra", required, 0, abi.ReasonUnverified); err != nil {
			t.Error(err)
		}
	})
}

// A packet socket sends what it likes.
func TestTruncatedPacketDoesNotLeave(t *testing.T) {
	l := newEdgeLive(t)
	p, err := packets.Load("edge-truncated")
	l.must(err)
	l.must(l.rig.in(func() error {
		fd, err := l.socket(portOut, 0)
		l.in[portOut] = fd
		return err
	}))
	if err := l.send(portOut, p.Frame, 0); !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("sent, and not dropped by the program: %v", err)
	}
	l.must(l.checkMoved("TC", moved{dropped: []string{reasonName(abi.ReasonLeaveTruncated)}, stats: map[uint32]abi.Stats{}}))
}
