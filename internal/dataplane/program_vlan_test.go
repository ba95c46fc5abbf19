package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

const (
	customerTag = 0x8100 // IEEE 802.1Q
	providerTag = 0x88a8 // IEEE 802.1ad
)

// vlan is one tag of a frame.
type vlan struct {
	proto, id uint16
}

func (v vlan) String() string { return fmt.Sprintf("%04x/%d", v.proto, v.id) }

// inVLANs is a frame with these tags, the outermost first.
func inVLANs(b []byte, tags ...vlan) []byte {
	for _, v := range slices.Backward(tags) {
		tag := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, v.proto), v.id)
		b = slices.Concat(b[:12], tag, b[12:])
	}
	return b
}

var vlanStacks = [][]vlan{
	{{customerTag, 5}},
	{{providerTag, 5}},
	{{providerTag, 9}, {customerTag, 5}},
}

// planVLAN makes a port an edge that has this VLAN in the plan, with others on top
// of it or not.
func (l *live) planVLAN(port string, v vlan, stacked bool) error {
	p := portTable([]binding{{Interface: model.Interface{Role: model.RoleEdge}}}, func(binding) bool { return false })[0]
	p.Vlans[0] = v.id
	if v.proto == providerTag {
		p.Vlans[0] |= abi.VLANAd
	}
	if stacked {
		p.Vlans[0] |= abi.VLANStacked
	}
	return l.put(tables.MapPorts, l.ports[port], p)
}

// A host outside sends a packet to a SID of another node in a VLAN whose interface
// nobody has thought of: the kernel would forward it into the domain.
func TestTagsAreNoWayPastTheBoundary(t *testing.T) {
	p, err := packets.Load("web-1")
	if err != nil {
		t.Fatal(err)
	}
	// Not its MAC address: a VLAN's interface may have one of its own.
	other := slices.Concat([]byte{2, 0, 0, 0, 0, 9}, p.Frame[6:])
	for _, tags := range vlanStacks {
		t.Run(fmt.Sprint(tags), func(t *testing.T) {
			l := newScapyRig(t, "r1").goLive()
			reason := abi.ReasonOutsideSID
			if len(tags) > 1 {
				reason = abi.ReasonVLANTags
			}
			for _, b := range [][]byte{p.Frame, other} {
				if err := l.refusesAs(portEdge, inVLANs(b, tags...), 0, reason, 0); err != nil {
					t.Error(err)
				}
			}
			// Where the VLAN has an interface in the plan, that one's program
			// judges: nothing is counted here but the packet that follows, which
			// is longer.
			l.must(l.planVLAN(portEdge, tags[0], len(tags) > 1))
			if err := l.passesThenRefuses(portEdge, inVLANs(p.Frame, tags...), append(slices.Clone(p.Frame), make([]byte, 8)...), abi.ReasonOutsideSID); err != nil {
				t.Error(err)
			}
			// Of the other kind of tag, with the same id: not in the plan.
			swapped := slices.Clone(tags)
			swapped[0].proto ^= customerTag ^ providerTag
			if err := l.refusesAs(portEdge, inVLANs(p.Frame, swapped...), 0, reason, 0); err != nil {
				t.Error(err)
			}
		})
	}
}

// pushTags is a program that does at an egress what VLAN interfaces on top of it
// would have done before.
func pushTags(tags []vlan) (*ebpf.Program, error) {
	code := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	for _, v := range slices.Backward(tags) {
		code = append(code, asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, int32(v.proto>>8|v.proto<<8&0xff00)),
			asm.Mov.Imm(asm.R3, int32(v.id)), asm.FnSkbVlanPush.Call())
	}
	code = append(code, asm.Mov.Imm(asm.R0, -1), asm.Return())
	return ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Name: "push_tags", License: "MIT", Instructions: code})
}

// Nor out, by a VLAN on top of an edge interface.
func TestTagsAreNoWayOut(t *testing.T) {
	p, err := packets.Load("web-1")
	if err != nil {
		t.Fatal(err)
	}
	for _, tags := range vlanStacks {
		t.Run(fmt.Sprint(tags), func(t *testing.T) {
			l := newScapyRig(t, "r1").goLive()
			push, err := pushTags(tags)
			l.must(err)
			defer push.Close()
			l.must(l.rig.in(func() (err error) {
				if err := l.attachAt(push, portOut, ebpf.AttachTCXEgress); err != nil {
					return err
				}
				if err := l.attachAt(l.program(object.EdgeOutTC), portOut, ebpf.AttachTCXEgress); err != nil {
					return err
				}
				l.in[portOut], err = l.socket(portOut, 0)
				return err
			}))
			reason := abi.ReasonLeakSID
			if len(tags) > 1 {
				reason = abi.ReasonVLANTags
			}
			b := slices.Concat(neighbourMAC[:], p.Frame[6:])
			l.must(l.freshEvents())
			if err := l.send(portOut, b, 0); !errors.Is(err, unix.ENOBUFS) { // dropped
				t.Errorf("send: %v", err)
			}
			e, err := l.nextEvent()
			l.must(err)
			if got := abi.Reason(e.Reason); got != reason {
				t.Errorf("refused for %s, want %s", got, reason)
			}
			// Somebody in a bridge with this interface can send any tag. Only below a
			// VLAN of the plan that has others on top is a tag in the frame expected.
			l.must(l.planVLAN(portOut, tags[0], false))
			if err := l.send(portOut, b, 0); !errors.Is(err, unix.ENOBUFS) {
				t.Errorf("send by a VLAN of the plan: %v", err)
			}
			if len(tags) == 1 {
				return
			}
			l.must(l.planVLAN(portOut, tags[0], true))
			l.must(l.send(portOut, b, 0))
			got, _, err := l.receive()
			l.must(err)
			if len(got) < len(b) || !slices.Equal(got[len(got)-len(b)+14:], b[14:]) {
				t.Errorf("a VLAN of the plan sends\n%s", layers(got))
			}
		})
	}
}

// tagKinds are tags as somebody may put before a packet: of priorities, of VLANs, and
// of a kind that is none of IEEE's any more.
var tagKinds = []vlan{{customerTag, 0}, {customerTag, 5}, {providerTag, 0}, {providerTag, 9}, {0x9100, 7}, {0x9300, 0}}

// stacksOf are all that up to so many of these tags can be put into.
func stacksOf(most int) (all [][]vlan) {
	last := [][]vlan{nil}
	for range most {
		var next [][]vlan
		for _, s := range last {
			for _, v := range tagKinds {
				next = append(next, append(slices.Clone(s), v))
			}
		}
		all, last = append(all, next...), next
	}
	return all
}

// kernelKnows: it takes such a tag off, and puts it beside the frame.
func (v vlan) kernelKnows() bool { return v.proto == customerTag || v.proto == providerTag }

// wasRefused waits until a packet has been refused, for this reason.
func (l *live) wasRefused(reason abi.Reason) error {
	for end := time.Now().Add(waitLimit); time.Now().Before(end); {
		m, err := l.counted()
		if err != nil {
			return err
		}
		if len(m.dropped) == 0 {
			continue
		}
		if want := []string{reasonName(reason)}; !slices.Equal(m.dropped, want) {
			return fmt.Errorf("refused for %v, want %v", m.dropped, want)
		}
		return nil
	}
	return fmt.Errorf("not refused within %s, want %s", waitLimit, reason)
}

// Whatever stack of up to four tags is in front of a packet to a SID: it is refused
// as what it is where that can be seen, and else for its tags. At the ingress the
// kernel puts the first one beside the frame; at the egress it is there or in the
// frame.
func TestNoStackOfTagsHidesAPacket(t *testing.T) {
	p, err := packets.Load("web-1")
	if err != nil {
		t.Fatal(err)
	}
	l := newScapyRig(t, "r1").goLive()
	l.must(l.rig.in(func() (err error) {
		if err := l.attachAt(l.program(object.EdgeOutTC), portOut, ebpf.AttachTCXEgress); err != nil {
			return err
		}
		l.in[portOut], err = l.socket(portOut, 0)
		return err
	}))
	// Of the stacks that begin with only, which a program puts beside the frame; nil:
	// of all, in the frame. A VLAN of the plan without others on top changes nothing.
	out := func(only *vlan) {
		for _, tags := range stacksOf(4) {
			frame, want := inVLANs(p.Frame, tags...), abi.ReasonVLANTags
			if only != nil {
				if tags[0] != *only {
					continue
				}
				if frame = inVLANs(p.Frame, tags[1:]...); len(tags) == 1 {
					want = abi.ReasonLeakSID
				}
			}
			if err := l.send(portOut, slices.Concat(neighbourMAC[:], frame[6:]), 0); !errors.Is(err, unix.ENOBUFS) {
				t.Errorf("out, %v beside the frame, %v: %v, want it dropped", only, tags, err)
			}
			if err := l.wasRefused(want); err != nil {
				t.Errorf("out, %v beside the frame, %v: %v", only, tags, err)
			}
		}
	}
	_, err = l.counted()
	l.must(err)
	out(nil)
	for _, first := range tagKinds[:4] {
		push, err := pushTags([]vlan{first})
		l.must(err)
		defer push.Close()
		n, err := host.Open(l.ns)
		l.must(err)
		defer n.Close()
		var off func() error
		l.must(l.rig.in(func() (err error) {
			off, err = attachOther(n, push, int(l.ports[portOut]), true, true, false)
			return err
		}))
		out(&first)
		if first.id != 0 {
			l.must(l.planVLAN(portOut, first, false))
			out(&first)
		}
		l.must(off())
	}

	for _, mac := range [][]byte{p.Frame[:6], {2, 0, 0, 0, 0, 9}} {
		ours := bytes.Equal(mac, p.Frame[:6])
		for _, tags := range stacksOf(4) {
			want := abi.ReasonVLANTags
			switch {
			case !tags[0].kernelKnows() && !ours, len(tags) == 1 && tags[0].id == 0 && tags[0].kernelKnows() && !ours:
				continue // somebody else's, and of no VLAN
			case len(tags) == 1 && tags[0].kernelKnows():
				want = abi.ReasonOutsideSID
			}
			l.must(l.send(portEdge, slices.Concat(mac, inVLANs(p.Frame, tags...)[6:]), 0))
			if err := l.wasRefused(want); err != nil {
				t.Errorf("in, to our address: %t, %v: %v", ours, tags, err)
			}
		}
	}
}

// What the plan has on top of an interface is told to its programs; XDP there
// would not see the tags.
func TestVLANsOfThePlanAreToldToTheirParent(t *testing.T) {
	b := newBed(t)
	vlans := map[string]host.VLAN{}
	devices := b.cfg.Net.Device
	b.cfg.Net = netWith{b.cfg.Net, func(name string) (host.Device, error) {
		dev, err := devices(name)
		dev.VLAN = vlans[name]
		return dev, err
	}}
	add := func(name, parent string, id uint16, provider bool) {
		t.Helper()
		b.addVeth(name)
		dev, err := devices(parent)
		b.must(err)
		vlans[name] = host.VLAN{Parent: dev.Index, ID: id, Provider: provider}
	}
	add("out.5", "out", 5, false)
	add("out.7", "out", 7, true)
	add("out.7.5", "out.7", 5, false)
	n := bedNode()
	n.Interfaces = []model.Interface{{Name: "out", Role: model.RoleEdge}}
	for _, name := range []string{"out.5", "out.7", "out.7.5", "in"} {
		n.Interfaces = append(n.Interfaces, model.Interface{Name: name, Role: model.RoleCore})
	}
	d := b.open()
	b.must(b.apply(d, n))
	ports := b.world().Maps[0].Ports
	for name, want := range map[string][abi.PortVlans]uint16{"out": {5, 7 | abi.VLANAd | abi.VLANStacked}, "out.5": {}, "out.7": {5}, "in": {}} {
		dev, err := b.cfg.Net.Device(name)
		b.must(err)
		if got := ports[uint32(dev.Index)].Vlans; got != want {
			t.Errorf("%s has %v, want %v", name, got, want)
		}
	}
	n.Interfaces[0].Datapath = model.DatapathXDP
	if err := b.apply(d, n); err == nil || !strings.Contains(err.Error(), "interface out has datapath xdp, and out.5 on top of it is in the plan too") {
		t.Errorf("XDP below a VLAN: %v", err)
	}
	n.Interfaces[0].Datapath = model.DatapathTC
	for id := range uint16(abi.PortVlans) {
		name := fmt.Sprintf("out.%d", 100+id)
		add(name, "out", 100+id, false)
		n.Interfaces = append(n.Interfaces, model.Interface{Name: name, Role: model.RoleCore})
	}
	if err := b.apply(d, n); err == nil || !strings.Contains(err.Error(), "more than 8 VLANs") {
		t.Errorf("too many VLANs: %v", err)
	}
}

// XDP sees tags in the frame, where a device has not taken them off: it leaves such
// frames to TC as they are, whatever is behind them, also where it would finish the
// same packet without a tag.
func TestXDPLeavesTaggedFramesToTC(t *testing.T) {
	stacks := append([][]vlan{{{customerTag, 0}}, {{customerTag, 0x6000}}}, vlanStacks...) // priority tags first
	for _, name := range []string{"edge-web", "edge-four", "outside-sid", "web-1", "web-3", "four-2", "unproven"} {
		p, err := packets.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			r := newScapyRig(t, p.Node)
			port := p.Interface.Name
			r.must(r.setNumbers(max(p.Counter, 1)))
			r.must(r.in(func() error {
				// TC learns the way that XDP needs.
				s, err := r.check(frame{port: port, b: p.Frame}, &oracle.Labels{}, true)
				if err != nil {
					return err
				}
				if forwards := s.want.Verdict == oracle.Forward; s.took != forwards {
					return fmt.Errorf("without a tag XDP finishes it: %t, want %t", s.took, forwards)
				}
				if _, err := r.counted(); err != nil {
					return err
				}
				for _, tags := range stacks {
					b := inVLANs(p.Frame, tags...)
					got, err := r.runXDP(frame{port: port, b: b})
					if err != nil {
						return err
					}
					if got.verdict != xdpPass || !slices.Equal(got.b, b) {
						return fmt.Errorf("%v: verdict %d\n%s", tags, got.verdict, layers(got.b))
					}
					if err := r.checkMoved("XDP", moved{stats: map[uint32]abi.Stats{}}); err != nil {
						return fmt.Errorf("%v: %w", tags, err)
					}
				}
				return nil
			}))
		})
	}
}

// On a core interface the frames of a VLAN are its own interface's matter: nobody
// stamps or decapsulates them below it. With a priority tag alone they are
// untagged ones.
func TestTagsOnACoreInterface(t *testing.T) {
	for name, reason := range map[string]abi.Reason{"no-srh-udp": abi.ReasonNoSRH, "unproven": abi.ReasonUnproven, "unproven-ipv4": abi.ReasonUnproven} {
		p, err := packets.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			l := newScapyRig(t, p.Node).goLive()
			longer := append(slices.Clone(p.Frame), make([]byte, 8)...)
			for _, tags := range vlanStacks {
				if err := l.passesThenRefuses(portCore, inVLANs(p.Frame, tags...), longer, reason); err != nil {
					t.Errorf("%v: %v", tags, err)
				}
			}
			if err := l.refusesAs(portCore, inVLANs(p.Frame, vlan{customerTag, 0x6000}), 0, reason, 0); err != nil {
				t.Errorf("priority tag: %v", err)
			}
		})
	}
}
