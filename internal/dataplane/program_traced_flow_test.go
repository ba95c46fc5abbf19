package dataplane

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
)

// flowPacket is a packet with the flow that a headend reads from it: a port is 0 where it cannot.
type flowPacket struct {
	name  string
	chain string // that takes it
	ip    []byte
	model.Flow
}

func flowPackets() (all []flowPacket) {
	const sport, dport = 1025, 443
	from6, to6 := netip.MustParseAddr("2001:db8:1::1"), netip.MustParseAddr("2001:db8:8::9")
	from4, to4 := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("198.51.100.9")
	l4 := make([]byte, 40)
	binary.BigEndian.PutUint16(l4, sport)
	binary.BigEndian.PutUint16(l4[2:], dport)
	binary.BigEndian.PutUint16(l4[4:], 40) // of UDP; to TCP it is a number
	l4[12] = 0x50
	add := func(name string, ip []byte, protocol model.Protocol, ports bool) {
		p := flowPacket{name: name, chain: "web", ip: ip, Flow: model.Flow{Source: netip.PrefixFrom(from6, 128), Destination: netip.PrefixFrom(to6, 128), Protocol: protocol}}
		if ip[0]>>4 == 4 {
			p.chain, p.Source, p.Destination = "legacy", netip.PrefixFrom(from4, 32), netip.PrefixFrom(to4, 32)
		}
		if ports {
			p.SourcePort, p.DestinationPort = sport, dport
		}
		all = append(all, p)
	}
	six := func(next uint8, before ...byte) []byte {
		return sentBy(from6.String(), to6.String(), next, append(before, l4...)...)
	}
	echo := append([]byte{128}, make([]byte, 39)...)
	add("TCP", six(6), 6, true)
	add("UDP", six(17), 17, true)
	add("ICMPv6", sentBy(from6.String(), to6.String(), 58, echo...), 58, false)
	add("UDP behind options", six(60, 17, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 17, true)
	add("a first fragment of UDP", six(44, 17, 0, 0, 1, 0, 0, 0, 7), 17, false)
	add("a later fragment of UDP", six(44, 17, 0, 0, 8, 0, 0, 0, 7), 17, false)
	add("a later fragment whose data look like ports", six(44, 6, 0, 1, 0, 0, 0, 0, 7), 6, false)
	add("ESP", six(50), 50, false)
	four := func(protocol uint8, fragment uint16) []byte {
		return sentBy4(from4.String(), to4.String(), protocol, fragment, l4...)
	}
	add("TCP over IPv4", four(6, 0), 6, true)
	add("UDP over IPv4", four(17, 0), 17, true)
	add("ICMP", four(1, 0), 1, false)
	add("a first fragment over IPv4", four(17, 0x2000), 17, false)
	add("a later fragment over IPv4", four(17, 8), 17, false)
	add("TCP behind IPv4 options", optioned4(four(6, 0)), 6, true)
	return all
}

// optioned4 is an IPv4 packet with 8 bytes of options.
func optioned4(b []byte) []byte {
	b = slices.Concat(b[:20], []byte{1, 1, 1, 1, 1, 1, 1, 0}, b[20:])
	b[0] += 2
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	binary.BigEndian.PutUint16(b[10:], 0)
	var sum uint32
	for i := 0; i < 28; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum+sum>>16))
	return b
}

// flowsAbout are flows with each subset of the conditions that a packet meets, and each of these with one that it
// does not meet.
func flowsAbout(p flowPacket) (all []model.Flow) {
	const conditions = 5
	for named := range 1 << conditions {
		has := func(i int) bool { return named>>i&1 != 0 }
		var f model.Flow
		if has(0) {
			f.Source = p.Source
		}
		if has(1) { // the bits of a prefix end in its first word, and in its last
			f.Destination = netip.PrefixFrom(p.Destination.Addr(), p.Destination.Bits()-[]int{5, 70}[named>>2&1]%p.Destination.Bits()).Masked()
		}
		if has(2) {
			f.Protocol = p.Protocol
		}
		if has(3) {
			f.SourcePort = p.SourcePort
		}
		if has(4) {
			f.DestinationPort = p.DestinationPort
		}
		all = append(all, f)
		other := func(change func(f *model.Flow)) {
			f := f
			change(&f)
			all = append(all, f)
		}
		// The last bit of the prefix is another.
		prefix := func(p netip.Prefix) netip.Prefix {
			b := p.Addr().AsSlice()
			b[(p.Bits()-1)/8] ^= 0x80 >> ((p.Bits() - 1) % 8)
			a, _ := netip.AddrFromSlice(b)
			return netip.PrefixFrom(a, p.Bits())
		}
		if has(0) {
			other(func(f *model.Flow) { f.Source = prefix(f.Source) })
		}
		if has(1) {
			other(func(f *model.Flow) { f.Destination = prefix(f.Destination) })
		}
		if has(2) {
			other(func(f *model.Flow) { f.Protocol = 89 })
		}
		other(func(f *model.Flow) { f.SourcePort = 1024 })
		other(func(f *model.Flow) { f.DestinationPort = 80 })
	}
	all = slices.DeleteFunc(all, func(f model.Flow) bool { return f == model.Flow{} })
	// Of the other version, and of ports that a fragment has in other packets.
	all = append(all, model.Flow{Protocol: p.Protocol, SourcePort: 1025}, model.Flow{Protocol: p.Protocol, DestinationPort: 443})
	if p.Source.Addr().Is4() {
		return append(all, model.Flow{Source: netip.MustParsePrefix("2001:db8::/32")}, model.Flow{Source: netip.MustParsePrefix("0.0.0.0/0")})
	}
	return append(all, model.Flow{Source: netip.MustParsePrefix("0.0.0.0/0")})
}

// isOf says whether the packet is of a flow.
func (p flowPacket) isOf(f model.Flow) bool {
	return (!f.Source.IsValid() || f.Source.Contains(p.Source.Addr())) && (!f.Destination.IsValid() || f.Destination.Contains(p.Destination.Addr())) &&
		(f.Protocol == 0 || f.Protocol == p.Protocol) && (f.SourcePort == 0 || f.SourcePort == p.SourcePort) && (f.DestinationPort == 0 || f.DestinationPort == p.DestinationPort)
}

// A headend flags the packets of a flow that a trace asks for, and counts no others: on both hooks, as a packet comes in and as
// it leaves, over SRv6 and over labels.
func TestAHeadendFlagsThePacketsOfAFlow(t *testing.T) {
	t.Parallel()
	flagOf := map[model.EncapsulationType]func(b []byte) (bool, error){
		model.EncapsulationSRv6: func(b []byte) (bool, error) {
			p, err := srv6.DecodeFrame(b)
			return err == nil && p.SRH.Flags == srv6.FlagOAM, err
		},
		model.EncapsulationSRMPLS: func(b []byte) (bool, error) {
			p, err := mpls.ParseFrame(b, func(label uint32) bool { return label-testServices < 1<<16 })
			return err == nil && p.Word.Flags == mpls.FlagTrace, err
		},
	}
	for encapsulation, isFlagged := range flagOf {
		t.Run(encapsulation.String(), func(t *testing.T) {
			t.Parallel()
			of := func(d *model.Domain) {
				for i := range d.Chains {
					d.Chains[i].Encapsulation = model.Encapsulation{Type: encapsulation}
				}
			}
			l := newLabelRun(t, model.SchemeKeyed, 4, of)
			leaving := newLabelRun(t, model.SchemeKeyed, 4, func(d *model.Domain) {
				of(d)
				leavingLabels(d)
			})
			for _, p := range flowPackets() {
				t.Run(p.name, func(t *testing.T) {
					traced, byXDP := 0, 0
					for _, f := range flowsAbout(p) {
						ways := map[string]func() (outcome, bool){
							"as it comes in": func() (outcome, bool) {
								o, _ := l.run("r1", portEdge, ether(p.ip))
								return o, o.verdict == tcRedirect
							},
							"on XDP": func() (o outcome, took bool) {
								l.rigs["r1"].must(l.rigs["r1"].in(func() (err error) {
									o, err = l.rigs["r1"].run(l.rigs["r1"].program(object.EdgeXDP), ebpf.RunOptions{Data: arriving(ether(p.ip))})
									return err
								}))
								return o, o.verdict == xdpRedirect
							},
						}
						for _, way := range []string{"as it comes in", "on XDP", "as it leaves"} {
							r, send := l.rigs["r1"], ways[way]
							if way == "as it leaves" {
								r = leaving.rigs["r1"]
								send = func() (outcome, bool) {
									mark := map[string]uint32{"web": 0, "legacy": testMark}[p.chain]
									o, _ := leaving.leave("r1", ether(p.ip), p.chain == "web", mark, 0)
									return o, o.verdict == tcRedirect
								}
							}
							if err := traceOnce(r, l.path(p.chain).Path, f, func() error {
								o, took := send()
								if !took {
									if way == "on XDP" {
										return errLeftToTC
									}
									return fmt.Errorf("verdict %d", int32(o.verdict))
								}
								flagged, err := isFlagged(o.b)
								if err == nil && flagged != p.isOf(f) {
									err = fmt.Errorf("it is flagged: %t", flagged)
								}
								if way == "on XDP" {
									byXDP++
								}
								if flagged {
									traced++
								}
								return err
							}, p.isOf(f)); err != nil {
								t.Errorf("flow %s, %s: %v", f, way, err)
							}
						}
					}
					options := p.name == "TCP behind IPv4 options" || p.ip[0]>>4 == 6 && slices.Contains([]byte{44, 60}, p.ip[6])
					if traced == 0 || (byXDP == 0) != options {
						t.Errorf("it was flagged %d times, and XDP took it %d times", traced, byXDP)
					}
				})
			}
		})
	}
}

// errLeftToTC says that XDP has not taken the packet.
var errLeftToTC = fmt.Errorf("left to TC")

// traceOnce lets the headend of a path trace one packet of a flow, sends one, and holds that it was counted if it is of the flow.
func traceOnce(r *rig, path uint32, f model.Flow, send func() error, counts bool) error {
	const entry = 5
	var index uint32
	var h abi.Headend
	for i, x := range r.have.Headends {
		if x.Path == abi.BE32(path) {
			index, h = i, x
		}
	}
	if h == (abi.Headend{}) {
		return fmt.Errorf("no headend of path %#x", path)
	}
	marked, trace := h, tables.EncodeTrace(f)
	marked.Trace, trace.Left = entry+1, 1
	if err := r.put(tables.MapTraces, uint32(entry), trace); err != nil {
		return err
	}
	if err := r.put(tables.MapHeadends, index, marked); err != nil {
		return err
	}
	sent := send()
	if err := r.put(tables.MapHeadends, index, h); err != nil {
		return err
	}
	if sent != nil && sent != errLeftToTC {
		return sent
	}
	hops, err := r.hops()
	if err != nil {
		return err
	}
	var now abi.Trace
	if err := r.g.maps[tables.MapTraces].Lookup(uint32(entry), &now); err != nil {
		return err
	}
	want := 0
	if counts && sent == nil {
		want = 1
	}
	if len(hops) != want || now.Left != int64(1-want) {
		return fmt.Errorf("%d events, and %d packets are left; want %d and %d", len(hops), now.Left, want, 1-want)
	}
	return nil
}
