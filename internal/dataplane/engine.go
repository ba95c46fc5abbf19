package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
)

// Addresses of the engine's packets. They never leave it: a test run ends with
// the program's verdict.
const (
	engineBlock   = "3fff:0:0::/48"
	engineLocator = "3fff:0:0:100::/56"
	engineSID     = "3fff:0:0:101::"
	engineNext    = "3fff:0:0:200::"
	engineSource  = "3fff:1::1"
	engineInner   = "3fff:2::1"
)

// engine is a pot.Engine that runs the program of core interfaces, the one that
// ships, on one packet per hop. It is attached to nothing and pinned nowhere.
type engine struct {
	mu   sync.Mutex
	maps map[string]*ebpf.Map
	prog *ebpf.Program
}

var _ pot.Engine = (*engine)(nil)

// NewEngine loads the program. The second result releases it again.
func NewEngine() (pot.Engine, func() error, error) {
	if err := checkCapabilities(); err != nil {
		return nil, nil, err
	}
	spec, err := object.Load(object.CoreTC)
	if err != nil {
		return nil, nil, fmt.Errorf("read the object of %s: %w", object.CoreTC, err)
	}
	block, locator := netip.MustParsePrefix(engineBlock), netip.MustParsePrefix(engineLocator)
	cfg := abi.Config{
		Block: tables.Upper(block.Addr()), BlockMask: tables.UpperMask(block.Bits()),
		Locator: tables.Upper(locator.Addr()), LocatorMask: tables.UpperMask(locator.Bits()),
	}
	if err := spec.Variables[object.VarConfig].Set(cfg); err != nil {
		return nil, nil, fmt.Errorf("configure %s: %w", object.CoreTC, err)
	}
	spec.Maps[string(tables.MapNumbers)].MaxEntries = 1
	spec.Maps[string(tables.MapStats)].MaxEntries = 1
	spec.Maps[string(tables.MapExits)].MaxEntries = 1
	spec.Maps[string(tables.MapHops)].MaxEntries = engineEntry + 1
	spec.Maps[string(tables.MapEgresses)].MaxEntries = engineEntry + 1
	spec.Maps[string(tables.MapPlaces)].MaxEntries = 1
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, nil, fmt.Errorf("load %s into the kernel: %w", object.CoreTC, err)
	}
	e := &engine{maps: coll.Maps, prog: coll.Programs[object.CoreTC]}
	release := func() error { coll.Close(); return nil }
	if err := e.put(tables.MapNode, uint32(0), abi.Node{Armed: 1}); err != nil {
		release()
		return nil, nil, err
	}
	return e, release, nil
}

// Stamp implements pot.Engine, for the headend's share too: the stamp is the
// same code there.
func (e *engine) Stamp(s pot.Share, h pot.Header, f pot.Flow, wire pot.Values) (pot.Values, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stampLocked(s, h, f, wire)
}

func (e *engine) stampLocked(s pot.Share, h pot.Header, f pot.Flow, wire pot.Values) (pot.Values, error) {
	encoded, err := tables.EncodeShare(s, h.Scheme)
	if err != nil {
		return pot.Values{}, err
	}
	if err := e.putHop(abi.Hop{
		Of: e.key(h), Behaviour: uint8(abi.BehaviourEnd), Scheme: uint8(h.Scheme), Position: s.Position, Share: encoded,
		Source: tables.Words(netip.MustParseAddr(engineSource)),
	}); err != nil {
		return pot.Values{}, err
	}
	out, refused, err := e.run(h, f, wire, engineSID, engineNext)
	if err != nil {
		return pot.Values{}, err
	}
	if refused != abi.ReasonNone {
		return pot.Values{}, fmt.Errorf("the program refused the packet: %s (%s)", refused, refused.Text())
	}
	p, err := srv6.DecodeFrame(out)
	if err != nil {
		return pot.Values{}, fmt.Errorf("the program sent a packet that is damaged: %w", err)
	}
	if !p.AtLast() || p.Header.Destination != netip.MustParseAddr(engineNext) {
		return pot.Values{}, errors.New("the program did not advance the packet to its next segment")
	}
	t, ok := p.Proof()
	if !ok {
		return pot.Values{}, errors.New("the program sent a packet without a proof")
	}
	return pot.Values{RND: t.RND, CML: t.CML}, nil
}

// Verify implements pot.Engine. The program does not return its result, so the final values are
// those of the same share's stamp, without masks.
func (e *engine) Verify(s pot.Share, v pot.Verifier, h pot.Header, f pot.Flow, wire pot.Values) (pot.Values, pot.Result, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	final := wire
	entry := abi.Hop{
		Of: e.key(h), Behaviour: uint8(abi.BehaviourEndDT46), Scheme: uint8(h.Scheme), Position: s.Position,
		Source: tables.Words(netip.MustParseAddr(engineSource)),
	}
	verifier := abi.Egress{Of: abi.EgressKey{Path: abi.BE32(h.Path), Epoch: h.Epoch}, Segments: 1}
	verifier.List[0] = netip.MustParseAddr(engineSID).As16()
	if h.Scheme.Keyed() {
		if h.Scheme == model.SchemeKeyedFlow {
			entry.Share.BindKey = tables.KeyWords(s.Bind)
		}
		if len(v.Keys) > abi.KeysMax {
			return pot.Values{}, pot.Proof, fmt.Errorf("%d keys; a verifier has at most %d", len(v.Keys), abi.KeysMax)
		}
		verifier.Keys = uint8(len(v.Keys))
		for i, k := range v.Keys {
			verifier.Key[i] = tables.KeyWords(k)
		}
	} else {
		bare := s
		bare.Polynomial.Down = pot.Mask{}
		var err error
		if final, err = e.stampLocked(bare, h, f, wire); err != nil {
			return pot.Values{}, pot.Proof, err
		}
		if entry.Share, err = tables.EncodeShare(s, h.Scheme); err != nil {
			return pot.Values{}, pot.Proof, err
		}
		verifier.Secret = v.Secret
	}
	for _, w := range []struct {
		t          tables.Map
		key, value any
	}{
		{tables.MapEgresses, engineEntry, verifier},
		{tables.MapEgressIndex, verifier.Of, engineEntry},
	} {
		if err := e.put(w.t, w.key, w.value); err != nil {
			return pot.Values{}, pot.Proof, err
		}
	}
	all := tables.Prefixes{Dst: map[tables.DstKey]tables.Match{{}: {Target: abi.BE32(h.Path), Action: uint8(abi.MatchActionPath)}}}
	if err := putPrefixes(e.maps[string(tables.MapMatch)], tables.LinesLeast, uint32(abi.MatchUseRequire), all); err != nil {
		return pot.Values{}, pot.Proof, err
	}
	if err := e.putHop(entry); err != nil {
		return pot.Values{}, pot.Proof, err
	}
	_, refused, err := e.run(h, f, wire, engineSID)
	if err != nil {
		return pot.Values{}, pot.Proof, err
	}
	switch refused {
	case abi.ReasonNone:
		return final, pot.Verified, nil
	case abi.ReasonProof:
		return final, pot.Proof, nil
	case abi.ReasonRange:
		return final, pot.Range, nil
	case abi.ReasonNumber:
		// Numbers are not checked here: the replay window has no lanes, and it is read after the
		// proof has verified.
		return final, pot.Verified, nil
	}
	return pot.Values{}, pot.Proof, fmt.Errorf("the program refused the packet: %s (%s)", refused, refused.Text())
}

func (e *engine) key(h pot.Header) abi.HopKey {
	return tables.EncodeHopKey(netip.MustParseAddr(engineSID), h.Path, h.Epoch)
}

// engineEntry is where the only hop and egress are.
const engineEntry = uint32(1)

func (e *engine) putHop(h abi.Hop) error {
	return errors.Join(e.put(tables.MapHops, engineEntry, h), e.put(tables.MapHopIndex, h.Of, engineEntry))
}

func (e *engine) put(t tables.Map, key, value any) error {
	if err := e.maps[string(t)].Put(key, value); err != nil {
		return fmt.Errorf("write to map %s: %w", t, err)
	}
	return nil
}

// run sends a packet through the program at the SID, with this segment list as on the wire. It
// returns the packet as the program left it, and the reason if it was refused before the program
// counted it as stamped or verified. The machine's routes have no effect.
func (e *engine) run(h pot.Header, f pot.Flow, wire pot.Values, list ...string) (out []byte, refused abi.Reason, err error) {
	frame, err := enginePacket(h, f, wire, list)
	if err != nil {
		return nil, abi.ReasonNone, fmt.Errorf("make a packet: %w", err)
	}
	done, refusals, err := e.counts()
	if err != nil {
		return nil, abi.ReasonNone, err
	}
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256)}
	if _, err := e.prog.Run(&opts); err != nil {
		return nil, abi.ReasonNone, fmt.Errorf("run %s: %w", object.CoreTC, err)
	}
	doneNow, refusalsNow, err := e.counts()
	if err != nil {
		return nil, abi.ReasonNone, err
	}
	if doneNow == done+1 {
		return opts.DataOut, abi.ReasonNone, nil
	}
	for i := range refusalsNow {
		if refusalsNow[i] > refusals[i] {
			return nil, abi.Reason(i), nil
		}
	}
	return nil, abi.ReasonNone, errors.New("the program neither took the packet nor refused it")
}

// counts are how many packets the program has stamped or verified, and refused
// by reason.
func (e *engine) counts() (done uint64, refusals []uint64, err error) {
	var each []abi.Stats
	if err := e.maps[string(tables.MapStats)].Lookup(uint32(0), &each); err != nil {
		return 0, nil, fmt.Errorf("read map %s: %w", tables.MapStats, err)
	}
	for _, s := range each {
		done += s.Packets
	}
	m := e.maps[string(tables.MapRefusals)]
	refusals = make([]uint64, m.MaxEntries())
	for i := range refusals {
		var each []abi.Refusal
		if err := m.Lookup(uint32(i), &each); err != nil {
			return 0, nil, fmt.Errorf("read map %s: %w", tables.MapRefusals, err)
		}
		for _, r := range each {
			refusals[i] += r.Dropped
		}
	}
	return done, refusals, nil
}

// innerPacket is a packet of that flow, and its type as a Next Header value. Without ports it is
// a fragment, which has none with any protocol.
func innerPacket(f pot.Flow) (b []byte, next uint8, err error) {
	ports := binary.BigEndian.AppendUint16(nil, f.SourcePort)
	ports = binary.BigEndian.AppendUint16(ports, f.DestinationPort)
	fragment := f.SourcePort == 0 && f.DestinationPort == 0
	if f.Source.Is4() && f.Destination.Is4() {
		src, dst := f.Source.As4(), f.Destination.As4()
		b = []byte{0x45, 0, 0, 24, 0, 0, 0, 0, 64, f.Protocol, 0, 0}
		if fragment {
			b[6] = 0x20 // more fragments
		}
		b, next = append(append(append(b, src[:]...), dst[:]...), ports...), srv6.NextHeaderIPv4
	} else {
		h := srv6.Header{NextHeader: f.Protocol, HopLimit: 64, PayloadLength: 4, Source: f.Source, Destination: f.Destination}
		payload := ports
		if fragment {
			payload = []byte{f.Protocol, 0, 0, 1, 0, 0, 0, 0} // the first of some
			h.NextHeader, h.PayloadLength = 44, 8
		}
		if b, err = h.Append(nil); err != nil {
			return nil, 0, err
		}
		b, next = append(b, payload...), srv6.NextHeaderIPv6
	}
	read, ok := srv6.ReadFlow(next, b)
	got := pot.Flow{
		Source: read.Source, Destination: read.Destination, Protocol: read.Protocol,
		SourcePort: read.SourcePort, DestinationPort: read.DestinationPort,
	}
	if !ok || got != f {
		return nil, 0, fmt.Errorf("no packet is of the flow from %s port %d to %s port %d by protocol %d: that protocol has no ports, or the addresses are not of one version of IP",
			f.Source, f.SourcePort, f.Destination, f.DestinationPort, f.Protocol)
	}
	return b, next, nil
}

func enginePacket(h pot.Header, f pot.Flow, wire pot.Values, list []string) ([]byte, error) {
	if h.Scheme != model.SchemeKeyedFlow {
		f = pot.Flow{Source: netip.MustParseAddr(engineSource), Destination: netip.MustParseAddr(engineInner), Protocol: 59} // no next header
	}
	payload, next, err := innerPacket(f)
	if err != nil {
		return nil, err
	}
	segments := make([]netip.Addr, len(list))
	for i, s := range list {
		segments[i] = netip.MustParseAddr(s)
	}
	proof := srv6.Proof{Scheme: h.Scheme, Epoch: h.Epoch, Path: h.Path, RND: wire.RND, CML: wire.CML}
	return srv6.Wrap(netip.MustParseAddr(engineSource), segments, proof, next, payload)
}
