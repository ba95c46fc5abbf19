package tables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"net/netip"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
)

// NexthopTTL is the life of a next hop that TC has found and XDP uses, in jiffies. The length of
// a jiffy depends on the kernel; with the longest, 10 ms, this is less than the second in which
// a change of routes must be seen.
const NexthopTTL = 90

// ICMP errors of one CPU: the average rate per second, and the burst. Errors with an MTU are
// counted separately.
const (
	errorsPerSecond = 1000
	errorsAtOnce    = 100
)

// Upper is the upper 64 bits of a, as __be64.
func Upper(a netip.Addr) uint64 {
	b := a.As16()
	return binary.NativeEndian.Uint64(b[:8])
}

// Words are the two halves of a, each as __be64.
func Words(a netip.Addr) [2]uint64 {
	b := a.As16()
	return [2]uint64{binary.NativeEndian.Uint64(b[:8]), binary.NativeEndian.Uint64(b[8:])}
}

// Address is the address of Words: IPv4 if it is mapped.
func Address(words [2]uint64) netip.Addr {
	var b [16]byte
	binary.NativeEndian.PutUint64(b[:8], words[0])
	binary.NativeEndian.PutUint64(b[8:], words[1])
	return netip.AddrFrom16(b).Unmap()
}

// UpperMask is the mask of a prefix over the upper 64 bits, as __be64.
func UpperMask(bits int) uint64 {
	if bits >= 64 {
		return ^uint64(0)
	}
	return abi.BE64(^(^uint64(0) >> bits))
}

func EncodeConfig(n plan.Node) (abi.Config, error) {
	for _, p := range []struct {
		what   string
		prefix netip.Prefix
	}{{"block", n.Block}, {"locator", n.Locator}} {
		if !p.prefix.IsValid() || !p.prefix.Addr().Is6() || p.prefix.Bits() < 1 || p.prefix.Bits() > 64 {
			return abi.Config{}, fmt.Errorf("%s %s of node %s is not an IPv6 prefix of 1 to 64 bits", p.what, p.prefix, n.Name)
		}
	}
	if !n.Block.Contains(n.Locator.Addr()) || n.Locator.Bits() < n.Block.Bits() {
		return abi.Config{}, fmt.Errorf("locator %s of node %s is not in the block %s", n.Locator, n.Name, n.Block)
	}
	if !n.Address.Is6() || n.Address.Is4In6() {
		return abi.Config{}, fmt.Errorf("address %s of node %s is not an IPv6 address", n.Address, n.Name)
	}
	var services, label uint32
	if n.MPLS != nil {
		services, label = n.MPLS.Services, n.MPLS.Label
		if n.Block.Bits() != 48 {
			return abi.Config{}, fmt.Errorf("block %s of node %s has labels, which name the 16 bits behind 48", n.Block, n.Name)
		}
	}
	return abi.Config{
		Services:       services,
		Label:          label,
		Address:        Words(n.Address),
		IcmpIntervalNs: 1e9 / errorsPerSecond,
		IcmpBurstNs:    1e9 / errorsPerSecond * errorsAtOnce,

		Block:       Upper(n.Block.Masked().Addr()),
		BlockMask:   UpperMask(n.Block.Bits()),
		Locator:     Upper(n.Locator.Masked().Addr()),
		LocatorMask: UpperMask(n.Locator.Bits()),
		NexthopTtl:  NexthopTTL,
	}, nil
}

// KeyWords are the two little-endian words of a SipHash key.
func KeyWords(k pot.Key) [2]uint64 {
	return [2]uint64{binary.LittleEndian.Uint64(k[:8]), binary.LittleEndian.Uint64(k[8:])}
}

func EncodeShare(s pot.Share, scheme model.Scheme) (abi.Share, error) {
	switch scheme {
	case model.SchemeKeyed:
		return abi.Share{Key: KeyWords(s.Key)}, nil
	case model.SchemeKeyedFlow:
		return abi.Share{Key: KeyWords(s.Key), BindKey: KeyWords(s.Bind)}, nil
	case model.SchemePoT, model.SchemeOPoT:
		p := s.Polynomial
		if err := p.Check(); err != nil {
			return abi.Share{}, err
		}
		return abi.Share{
			Prime: p.Prime, Alpha: p.Alpha(), Lpc: p.LPC, LpcShoup: p.LPCShoup(),
			UpRnd: p.Up.RND, UpCml: p.Up.CML, DownRnd: p.Down.RND, DownCml: p.Down.CML,
		}, nil
	}
	return abi.Share{}, fmt.Errorf("this data path does not know the scheme %s", scheme)
}

func EncodeHopKey(sid netip.Addr, path uint32, epoch uint8) abi.HopKey {
	return abi.HopKey{Sid: Upper(sid), Path: abi.BE32(path), Epoch: epoch}
}

// encodeSource is the source field of an entry of ws_hops: the path's headend, or :: if there
// are several, which are in ws_sources. Packets with labels have no source.
func encodeSource(id plan.PathID, sources []netip.Addr) ([2]uint64, error) {
	for _, a := range sources {
		if !a.Is6() || a.Is4In6() || a.Zone() != "" || a.IsUnspecified() {
			return [2]uint64{}, fmt.Errorf("headend address %s is not a plain IPv6 address", a)
		}
	}
	switch {
	case len(sources) == 0:
		return [2]uint64{}, errors.New("no headend; packets must come from one")
	case id.OverLabels():
		// No packet has it: one with the path's proof in headers of IPv6 is not of the path,
		// also where the chain's epoch before was over SRv6.
		return Words(netip.IPv6Loopback()), nil
	case len(sources) == 1:
		return Words(sources[0]), nil
	}
	return [2]uint64{}, nil
}

var behaviours = map[model.Behaviour]abi.Behaviour{
	model.BehaviourEnd:   abi.BehaviourEnd,
	model.BehaviourEndAD: abi.BehaviourEndAd,
	model.BehaviourEndAN: abi.BehaviourEndAd, // with an argument
}

// encodeHop: proxy is that of the endpoint's function, 0 if it needs none.
func encodeHop(e plan.Endpoint, statsIndex, proxy uint32) (abi.Hop, error) {
	s, err := EncodeShare(e.Share, e.Scheme)
	if err != nil {
		return abi.Hop{}, err
	}
	from, err := encodeSource(e.PathID, e.Sources)
	if err != nil {
		return abi.Hop{}, err
	}
	behaviour, ok := behaviours[e.Behaviour]
	if !ok {
		return abi.Hop{}, fmt.Errorf("this data path does not know the behaviour %s", e.Behaviour)
	}
	if e.Behaviour.Proxied() && proxy == 0 {
		return abi.Hop{}, fmt.Errorf("its SID is %s, and the plan has no proxy for it", e.Behaviour)
	}
	return abi.Hop{
		Behaviour: uint8(behaviour), Scheme: uint8(e.Scheme), Position: e.Share.Position,
		Form: uint8(formOf(e.PathID)), Stats: statsIndex, Share: s, Proxy: proxy, Argument: e.Argument, Source: from,
	}, nil
}

// formOf is the type of the path's outer headers.
func formOf(id plan.PathID) abi.Form {
	switch {
	case id.OverLabels():
		return abi.FormLabels
	case id.Encapsulation.SIDs == model.SIDsCompressed:
		return abi.FormCSID
	}
	return abi.FormSRv6
}

// encodeOuter is the outer header of a path at its headend.
func encodeOuter(n plan.Node, h plan.Headend) ([]byte, error) {
	proof := srv6.Proof{Scheme: h.Scheme, Epoch: h.Epoch, Path: h.Path}
	if !h.OverLabels() {
		return srv6.Outer(n.Address, h.Segments, h.Encapsulation, proof)
	}
	if n.MPLS == nil || len(h.NodeLabels) != len(h.Segments) {
		return nil, fmt.Errorf("%d node labels for %d visits", len(h.NodeLabels), len(h.Segments))
	}
	visits := make([]mpls.Visit, len(h.Segments))
	for i, s := range h.Segments {
		visits[i] = mpls.Visit{Node: h.NodeLabels[i], Service: n.MPLS.Service(s)}
	}
	return mpls.Outer(visits, proof.Bytes())
}

// encodeLabels has the addresses of the nodes with labels.
func encodeLabels(m *plan.MPLS) (map[uint32]abi.Label, error) {
	out := map[uint32]abi.Label{}
	if m == nil {
		return out, nil
	}
	for _, n := range m.Nodes {
		if !n.Address.IsValid() || n.Address.Zone() != "" {
			return nil, fmt.Errorf("node %s has label %d and no address that packets with it go to", n.Name, n.Label)
		}
		if _, twice := out[n.Label]; twice {
			return nil, fmt.Errorf("label %d is of two nodes, node %s among them", n.Label, n.Name)
		}
		out[n.Label] = abi.Label{Addr: Words(n.Address)}
	}
	return out, nil
}

// EncodeEgress returns both entries of an egress: the entry of its SID, and the verifier's.
// windowIndex is the index of its replay window.
func EncodeEgress(e plan.Egress, statsIndex uint32) (abi.Hop, abi.Egress, error) {
	from, err := encodeSource(e.PathID, e.Sources)
	if err != nil {
		return abi.Hop{}, abi.Egress{}, err
	}
	h := abi.Hop{
		Behaviour: uint8(abi.BehaviourEndDT46), Scheme: uint8(e.Scheme), Position: e.Share.Position,
		Form: uint8(formOf(e.PathID)), Stats: statsIndex, Argument: abi.BE32(e.Requires()), Source: from,
	}
	if err := model.CheckWindow(e.Window); err != nil {
		return abi.Hop{}, abi.Egress{}, fmt.Errorf("window %d %w", e.Window, err)
	}
	if e.Lanes == 0 || e.Lanes > abi.RNDLanes {
		return abi.Hop{}, abi.Egress{}, fmt.Errorf("%d lanes; a path has 1 to %d", e.Lanes, abi.RNDLanes)
	}
	if err := checkSegments(e.Segments); err != nil {
		return abi.Hop{}, abi.Egress{}, err
	}
	list := srv6.OnWire(e.Segments, e.Encapsulation)
	v := abi.Egress{
		Segments: uint8(len(list)), OnViolation: uint8(e.OnViolation),
		WindowLog2: uint8(bits.TrailingZeros(uint(e.Window))), Lanes: uint32(e.Lanes),
	}
	for i, s := range list {
		v.List[i] = s.As16()
	}
	switch e.Scheme {
	case model.SchemeKeyedFlow:
		h.Share.BindKey = KeyWords(e.Share.Bind)
		fallthrough
	case model.SchemeKeyed:
		if len(e.Verifier.Keys) != int(e.Share.Position) || len(e.Verifier.Keys) > abi.KeysMax {
			return abi.Hop{}, abi.Egress{}, fmt.Errorf("%d keys for %d positions that stamp", len(e.Verifier.Keys), e.Share.Position)
		}
		v.Keys = uint8(len(e.Verifier.Keys))
		for i, k := range e.Verifier.Keys {
			v.Key[i] = KeyWords(k)
		}
		return h, v, nil
	}
	s, err := EncodeShare(e.Share, e.Scheme)
	if err != nil {
		return abi.Hop{}, abi.Egress{}, err
	}
	if e.Verifier.Secret >= s.Prime {
		return abi.Hop{}, abi.Egress{}, errors.New("the secret is not below the prime")
	}
	h.Share, v.Secret = s, e.Verifier.Secret
	return h, v, nil
}

func EncodeHeadend(n plan.Node, h plan.Headend, statsIndex, counterIndex uint32) (abi.Headend, error) {
	s, err := EncodeShare(h.Share, h.Scheme)
	if err != nil {
		return abi.Headend{}, err
	}
	if err := checkSegments(h.Segments); err != nil {
		return abi.Headend{}, err
	}
	if h.Lanes == 0 || int(h.Lane)+int(h.Lanes) > abi.RNDLanes {
		return abi.Headend{}, fmt.Errorf("lanes %d to %d are not within 0 to %d", h.Lane, int(h.Lane)+int(h.Lanes)-1, abi.RNDLanes-1)
	}
	if h.MTU < 0 || h.MTU > math.MaxUint16 {
		return abi.Headend{}, fmt.Errorf("MTU %d is not one of IPv6", h.MTU)
	}
	if h.MSS < 0 || h.MSS > math.MaxUint16 {
		return abi.Headend{}, fmt.Errorf("MSS %d does not fit the option of TCP", h.MSS)
	}
	outer, err := encodeOuter(n, h)
	if err != nil {
		return abi.Headend{}, err
	}
	out := abi.Headend{
		OuterLen: uint16(len(outer)), Lane: h.Lane, Lanes: h.Lanes,
		Scheme: uint8(h.Scheme), Epoch: h.Epoch, Path: abi.BE32(h.Path),
		Counter: counterIndex, Stats: statsIndex, Mtu: uint16(h.MTU), Mss: uint16(h.MSS), Share: s, Form: uint8(formOf(h.PathID)),
	}
	if h.Own {
		out.Own = 1
	}
	copy(out.Outer[:], outer)
	return out, nil
}

func checkSegments(s []netip.Addr) error {
	if len(s) == 0 || len(s) > abi.SegsMax {
		return fmt.Errorf("%d segments; expect 1 to %d", len(s), abi.SegsMax)
	}
	for _, a := range s {
		if !a.Is6() || a.Is4In6() || a.Zone() != "" {
			return fmt.Errorf("segment %s is not a plain IPv6 address", a)
		}
	}
	return nil
}

// bitsOf is the length of a prefix as the maps count it: an IPv4 address is
// ::ffff:a.b.c.d there.
func bitsOf(p netip.Prefix) uint32 {
	if p.Addr().Is4() {
		return 96 + uint32(p.Bits())
	}
	return uint32(p.Bits())
}

func EncodeDst(p netip.Prefix) DstKey {
	return DstKey{Prefixlen: bitsOf(p), Addr: p.Masked().Addr().As16()}
}

func EncodeSrc(class uint32, p netip.Prefix) SrcKey {
	return SrcKey{Class: class, Prefixlen: bitsOf(p), Addr: p.Masked().Addr().As16()}
}

// EncodeTrace is an entry of ws_traces without packets; a zero flow takes all packets of the path.
func EncodeTrace(f model.Flow) abi.Trace {
	if f == (model.Flow{}) {
		return abi.Trace{}
	}
	t := abi.Trace{Sport: abi.BE16(f.SourcePort), Dport: abi.BE16(f.DestinationPort), Protocol: uint8(f.Protocol), Flow: 1}
	t.Src, t.SrcMask = wordsOf(f.Source)
	t.Dst, t.DstMask = wordsOf(f.Destination)
	return t
}

// wordsOf are the address of a prefix and its mask; not valid: a mask without a bit.
func wordsOf(p netip.Prefix) (addr, mask [2]uint64) {
	if !p.IsValid() {
		return addr, mask
	}
	n := int(bitsOf(p))
	return Words(p.Masked().Addr()), [2]uint64{UpperMask(n), UpperMask(max(0, n-64))}
}
