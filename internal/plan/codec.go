package plan

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"time"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
)

// The two kinds of plan file, and their version.
//
// FileMax is the length in bytes of the largest plan that is read: well above that of
// one for 65 536 chains.
const (
	FileMax     = 1 << 30
	fileVersion = 1
	kindNode    = "node-plan"
	kindPaths   = "paths"
)

// EncodeNode returns the file of one node. The file has keys: write it with mode 0600.
// EncodeNode refuses a plan that DecodeNode would refuse.
func EncodeNode(n Node) ([]byte, error) {
	if err := n.check(); err != nil {
		return nil, fmt.Errorf("encode the plan of node %s: %w", n.Name, err)
	}
	return encode(nodeToFile(n))
}

// DecodeNode reads the output of EncodeNode, and checks everything that a node can check of its
// own plan. The segment lists of headends may name any SIDs of the block, also SIDs of no path:
// the egress checks the packets of a headend.
func DecodeNode(b []byte) (Node, error) {
	var f nodeFile
	if err := decode(b, kindNode, &f); err != nil {
		return Node{}, fmt.Errorf("read a node's plan, as waystamp plan --out writes it to nodes/NAME.json: %w", err)
	}
	n := f.node()
	if err := n.check(); err != nil {
		return Node{}, fmt.Errorf("read the plan of node %s: %w", n.Name, err)
	}
	return n, nil
}

// EncodePaths makes the file that the controller keeps: every path with the
// secrets of all hops. Write it with mode 0600; no node gets it.
func EncodePaths(paths []Path) ([]byte, error) {
	if err := checkPaths(paths); err != nil {
		return nil, fmt.Errorf("encode the paths: %w", err)
	}
	f := pathsFile{fileHead: fileHead{Version: fileVersion, Kind: kindPaths}, Paths: []pathFile{}}
	for _, p := range paths {
		f.Paths = append(f.Paths, pathToFile(p))
	}
	return encode(f)
}

// DecodePaths reads the output of EncodePaths, and checks that the shares of each path verify.
func DecodePaths(b []byte) ([]Path, error) {
	var f pathsFile
	if err := decode(b, kindPaths, &f); err != nil {
		return nil, fmt.Errorf("read the paths: %w", err)
	}
	paths := make([]Path, 0, len(f.Paths))
	for _, p := range f.Paths {
		paths = append(paths, p.path())
	}
	if err := checkPaths(paths); err != nil {
		return nil, fmt.Errorf("read the paths: %w", err)
	}
	return paths, nil
}

func encode(f any) ([]byte, error) {
	b, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(b, '\n'), nil
}

// decode reads one JSON value. It checks first that the file is of the expected kind: otherwise
// the error would be about an unknown field.
func decode(b []byte, kind string, f any) error {
	var head fileHead
	if len(b) > FileMax {
		return fmt.Errorf("it has more than %d bytes, the most that a plan may have", FileMax)
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return fmt.Errorf("it is not whole, or not JSON: %w", short(err))
	}
	switch {
	case head.Kind != kind:
		return short(fmt.Errorf("its kind is %q; expect %q", head.Kind, kind))
	case head.Version != fileVersion:
		return fmt.Errorf("its version is %d; this program reads version %d", head.Version, fileVersion)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(f); err != nil {
		return short(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after its end")
	}
	return nil
}

// shortError is an error whose text quotes too much of a file.
type shortError struct{ error }

func short(err error) error { return shortError{err} }

func (e shortError) Error() string {
	const most = 300
	s := []rune(e.error.Error())
	if len(s) <= most {
		return string(s)
	}
	return string(s[:most/2]) + "…" + string(s[len(s)-most/2:]) // the informative parts are at both ends
}

func (e shortError) Unwrap() error { return e.error }

// The types below mirror the files. Numbers of more than 32 bits are text, since many readers of
// JSON round them; secrets have types of their own.

type fileHead struct {
	Version int    `json:"version"`
	Kind    string `json:"kind"`
}

type nodeFile struct {
	fileHead
	Name       string          `json:"name"`
	Revision   uint64          `json:"revision,string,omitempty"`
	Block      netip.Prefix    `json:"block"`
	Address    netip.Addr      `json:"address"`
	Locator    netip.Prefix    `json:"locator"`
	Advertise  model.Advertise `json:"advertise,omitzero"`
	MPLS       *mplsFile       `json:"mpls,omitempty"`
	Interfaces []interfaceFile `json:"interfaces"`
	Headends   []headendFile   `json:"headends"`
	Endpoints  []endpointFile  `json:"endpoints"`
	Egresses   []egressFile    `json:"egresses"`
	Proxies    []proxyFile     `json:"proxies,omitempty"`
}

type mplsFile struct {
	Services uint32         `json:"services"`
	Label    uint32         `json:"label,omitempty"`
	MTU      int            `json:"mtu,omitempty"`
	Nodes    []mplsNodeFile `json:"nodes"`
}

type mplsNodeFile struct {
	Name    string     `json:"name"`
	Label   uint32     `json:"label"`
	Address netip.Addr `json:"address"`
}

func mplsToFile(m *MPLS) *mplsFile {
	if m == nil {
		return nil
	}
	f := &mplsFile{Services: m.Services, Label: m.Label, MTU: m.MTU, Nodes: []mplsNodeFile{}}
	for _, n := range m.Nodes {
		f.Nodes = append(f.Nodes, mplsNodeFile(n))
	}
	return f
}

func (f *mplsFile) mpls() *MPLS {
	if f == nil {
		return nil
	}
	m := &MPLS{Services: f.Services, Label: f.Label, MTU: f.MTU}
	for _, n := range f.Nodes {
		m.Nodes = append(m.Nodes, MPLSNode(n))
	}
	return m
}

type interfaceFile struct {
	Name      string          `json:"name"`
	Role      model.Role      `json:"role"`
	Datapath  model.Datapath  `json:"datapath"`
	Unmatched model.Unmatched `json:"unmatched"`
	Guard     model.Guard     `json:"guard,omitzero"`
	MTU       int             `json:"mtu,omitempty"`
}

type pathIDFile struct {
	Path      hex32           `json:"path"`
	Epoch     uint8           `json:"epoch"`
	Chain     string          `json:"chain"`
	Direction model.Direction `json:"direction"`
	From      string          `json:"from,omitempty"`
	To        string          `json:"to,omitempty"`
	Scheme    model.Scheme    `json:"scheme"`
	// Without it: SRv6, plain SIDs, not reduced.
	Encapsulation encapsulationFile `json:"encapsulation,omitzero"`
}

type encapsulationFile struct {
	SIDs    model.SIDs              `json:"sids"`
	Reduced bool                    `json:"reduced"`
	Type    model.EncapsulationType `json:"type,omitzero"`
}

type matchFile struct {
	Destination     netip.Prefix   `json:"destination,omitzero"`
	Source          netip.Prefix   `json:"source,omitzero"`
	Priority        uint16         `json:"priority,omitzero"`
	Protocol        model.Protocol `json:"protocol,omitzero"`
	SourcePort      model.Ports    `json:"source-port,omitzero"`
	DestinationPort model.Ports    `json:"destination-port,omitzero"`
	DSCP            model.DSCP     `json:"dscp,omitzero"`
	Mark            model.Mark     `json:"mark,omitzero"`
}

type headendFile struct {
	pathIDFile
	Match    matchFile    `json:"match"`
	Own      bool         `json:"own-traffic,omitempty"`
	Segments []netip.Addr `json:"segments"`
	// NodeLabels are parallel to segments, where packets have labels.
	NodeLabels []uint32  `json:"node-labels,omitempty"`
	Lane       uint16    `json:"lane"`
	Lanes      uint16    `json:"lanes"`
	MTU        int       `json:"mtu,omitempty"`
	MSS        int       `json:"mss-clamp,omitempty"`
	Share      shareFile `json:"share"`

	Seal    *sealFile        `json:"seal,omitempty"`
	Origins []sealOriginFile `json:"origins,omitempty"`
}

type endpointFile struct {
	pathIDFile
	SID       netip.Addr      `json:"sid"`
	Behaviour model.Behaviour `json:"behaviour"`
	Argument  uint32          `json:"argument,omitempty"`
	Function  string          `json:"function"`
	Sources   []netip.Addr    `json:"sources"`
	Share     shareFile       `json:"share"`
}

type egressFile struct {
	pathIDFile
	SID         netip.Addr        `json:"sid"`
	Sources     []netip.Addr      `json:"sources"`
	Match       matchFile         `json:"match"`
	Segments    []netip.Addr      `json:"segments"`
	OnViolation model.OnViolation `json:"on-violation"`
	Guard       model.Guard       `json:"guard,omitzero"`
	Of          hex32             `json:"of,omitzero"`
	Through     *throughFile      `json:"through,omitempty"`
	Lanes       uint16            `json:"lanes"`
	Window      int               `json:"window"`
	Share       shareFile         `json:"share"`
	Verifier    verifierFile      `json:"verifier"`
	Seal        *sealFile         `json:"seal,omitempty"`
}

type throughFile struct {
	Part   hex32 `json:"part"`
	Onward hex32 `json:"onward"`
	Back   hex32 `json:"back"`
	Other  hex32 `json:"other"`
	Opens  bool  `json:"opens,omitempty"`
}

func throughToFile(t *Through) *throughFile {
	if t == nil {
		return nil
	}
	return &throughFile{Part: hex32(t.Part), Onward: hex32(t.Onward), Back: hex32(t.Back), Other: hex32(t.Other), Opens: t.Opens}
}

func (f *throughFile) through() *Through {
	if f == nil {
		return nil
	}
	return &Through{Part: uint32(f.Part), Onward: uint32(f.Onward), Back: uint32(f.Back), Other: uint32(f.Other), Opens: f.Opens}
}

type proxyFile struct {
	Function  string          `json:"function"`
	Local     bool            `json:"local,omitempty"`
	To        string          `json:"to,omitempty"`
	From      string          `json:"from,omitempty"`
	Via       netip.Addr      `json:"via,omitzero"`
	Recognise model.Recognise `json:"recognise"`
	OnUnknown model.OnUnknown `json:"on-unknown"`
	Segments  model.Segments  `json:"segments"`
	Rewrites  bool            `json:"rewrites,omitempty"`
	Cache     int             `json:"cache"`
	Lifetime  durationFile    `json:"lifetime"`
	Matches   []matchFile     `json:"matches,omitempty"`
	Netfilter *netfilterFile  `json:"netfilter,omitempty"`
	Stream    *streamFile     `json:"stream,omitempty"`
	Gateway   *gatewayFile    `json:"gateway,omitempty"`
}

type streamFile struct {
	Run         []string     `json:"run"`
	Back        []string     `json:"back,omitempty"`
	Early       bool         `json:"early,omitempty"`
	Other       model.Other  `json:"other,omitzero"`
	Connections int          `json:"connections"`
	Buffer      int          `json:"buffer"`
	Idle        durationFile `json:"idle"`
	HalfClosed  durationFile `json:"half-closed"`
	MTU         int          `json:"mtu"`
	Intrusive   bool         `json:"intrusive,omitempty"`

	Attached *attachedFile `json:"attached,omitempty"`
}

type attachedFile struct {
	To   string     `json:"to"`
	From string     `json:"from"`
	Via  netip.Addr `json:"via,omitzero"`
}

type netfilterFile struct {
	Namespace string            `json:"namespace"`
	Arguments map[string]uint32 `json:"arguments,omitempty"`
	// Zones are groups of arguments. The flows of a group are tracked together, apart from other
	// groups; without Zones there is one zone for all.
	Zones     [][]uint32   `json:"zones,omitzero"`
	Bypass    bool         `json:"bypass,omitempty"`
	Rules     string       `json:"rules,omitempty"`
	Addresses []netip.Addr `json:"addresses,omitempty"`
}

type shareFile struct {
	Position   uint8           `json:"position"`
	Key        keyFile         `json:"key,omitzero"`
	Bind       keyFile         `json:"bind,omitzero"`
	Polynomial *polynomialFile `json:"polynomial,omitempty"`
}

type polynomialFile struct {
	Prime  hex64    `json:"prime"`
	Share  hex64    `json:"share"`
	Public hex64    `json:"public"`
	LPC    hex64    `json:"lpc"`
	Up     maskFile `json:"up,omitzero"`
	Down   maskFile `json:"down,omitzero"`
}

type verifierFile struct {
	Secret hex64     `json:"secret,omitzero"`
	Keys   []keyFile `json:"keys,omitempty"`
}

type pathsFile struct {
	fileHead
	Paths []pathFile `json:"paths"`
}

type pathFile struct {
	pathIDFile
	Match       matchFile         `json:"match"`
	OwnTraffic  bool              `json:"own-traffic,omitempty"`
	OnViolation model.OnViolation `json:"on-violation"`
	Guard       model.Guard       `json:"guard,omitzero"`
	Window      int               `json:"window"`
	MTU         int               `json:"mtu,omitempty"`
	MSS         int               `json:"mss-clamp,omitempty"`
	Ingress     []ingressFile     `json:"ingress"`
	Hops        []hopFile         `json:"hops"`
	Verifier    verifierFile      `json:"verifier"`
	Seal        *pathSealFile     `json:"seal,omitempty"`
}

type ingressFile struct {
	Node    string     `json:"node"`
	Address netip.Addr `json:"address"`
	Lane    uint16     `json:"lane"`
	Lanes   uint16     `json:"lanes"`
}

type hopFile struct {
	Node     string `json:"node"`
	Function string `json:"function,omitempty"`
	// Waypoints are visited on the way to this hop, and not proven.
	Waypoints []netip.Addr `json:"waypoints,omitempty"`
	SID       netip.Addr   `json:"sid,omitzero"`
	Argument  uint32       `json:"argument,omitempty"`
	// Of the visit to the function that the path ends at.
	Parameters parametersFile `json:"parameters,omitzero"`
	// The labels that lead to the hop, of a path over labels.
	NodeLabel    uint32    `json:"node-label,omitempty"`
	ServiceLabel uint32    `json:"service-label,omitempty"`
	Share        shareFile `json:"share"`
}

// durationFile is a time with its unit.
type durationFile time.Duration

func (d durationFile) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

func (d *durationFile) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("%q is not a time with its unit, such as 5ms or 1s", b)
	}
	*d = durationFile(v)
	return nil
}

// parametersFile are the parameters of a visit: 0x and 12 digits.
type parametersFile uint64

func (p parametersFile) MarshalText() ([]byte, error) {
	return fmt.Appendf(nil, "0x%012x", uint64(p)), nil
}

func (p *parametersFile) UnmarshalText(b []byte) error {
	n, err := parseHex(b, 48)
	*p = parametersFile(n)
	return err
}

// hex32 and hex64 are 0x and all digits.
type (
	hex32 uint32
	hex64 uint64
)

func (h hex32) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "0x%08x", uint32(h)), nil }
func (h hex64) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "0x%016x", uint64(h)), nil }

func (h *hex32) UnmarshalText(b []byte) error {
	n, err := parseHex(b, 32)
	*h = hex32(n)
	return err
}

func (h *hex64) UnmarshalText(b []byte) error {
	n, err := parseHex(b, 64)
	*h = hex64(n)
	return err
}

// parseHex keeps the text out of its message: it may be a secret.
func parseHex(b []byte, size int) (uint64, error) {
	digits, ok := bytes.CutPrefix(b, []byte("0x"))
	if !ok || len(digits) != size/4 {
		return 0, fmt.Errorf("a number is not 0x and %d hexadecimal digits", size/4)
	}
	n, err := strconv.ParseUint(string(digits), 16, size)
	if err != nil {
		return 0, fmt.Errorf("a number is not 0x and %d hexadecimal digits", size/4)
	}
	return n, nil
}

// keyFile is a key in a file, and the only form that a key is written in: 32
// hexadecimal digits, in the order of pot.Key.
type keyFile pot.Key

func (k keyFile) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, k[:]), nil }

func (k *keyFile) UnmarshalText(b []byte) error {
	if len(b) != 2*len(k) {
		return fmt.Errorf("a key is not %d hexadecimal digits", 2*len(k))
	}
	if _, err := hex.Decode(k[:], b); err != nil {
		return fmt.Errorf("a key is not %d hexadecimal digits", 2*len(k))
	}
	return nil
}

func (keyFile) String() string   { return pot.Redacted }
func (keyFile) GoString() string { return pot.Redacted }

// maskFile is a link mask in a file: 32 hexadecimal digits, RND then CML, as it
// is XORed on the wire.
type maskFile pot.Mask

func (m maskFile) MarshalText() ([]byte, error) {
	b := binary.BigEndian.AppendUint64(nil, m.RND)
	b = binary.BigEndian.AppendUint64(b, m.CML)
	return hex.AppendEncode(nil, b), nil
}

func (m *maskFile) UnmarshalText(text []byte) error {
	var b [16]byte
	if len(text) != 2*len(b) {
		return fmt.Errorf("a mask is not %d hexadecimal digits", 2*len(b))
	}
	if _, err := hex.Decode(b[:], text); err != nil {
		return fmt.Errorf("a mask is not %d hexadecimal digits", 2*len(b))
	}
	*m = maskFile{RND: binary.BigEndian.Uint64(b[:8]), CML: binary.BigEndian.Uint64(b[8:])}
	return nil
}

func nodeToFile(n Node) nodeFile {
	f := nodeFile{
		fileHead:   fileHead{Version: fileVersion, Kind: kindNode},
		Name:       n.Name,
		Revision:   n.Revision,
		Block:      n.Block,
		Address:    n.Address,
		Locator:    n.Locator,
		Advertise:  n.Advertise,
		MPLS:       mplsToFile(n.MPLS),
		Interfaces: []interfaceFile{},
		Headends:   []headendFile{},
		Endpoints:  []endpointFile{},
		Egresses:   []egressFile{},
	}
	for _, i := range n.Interfaces {
		f.Interfaces = append(f.Interfaces, interfaceFile(i))
	}
	for _, h := range n.Headends {
		f.Headends = append(f.Headends, headendFile{
			pathIDFile: pathIDToFile(h.PathID),
			Match:      matchFile(h.Match),
			Own:        h.Own,
			Segments:   h.Segments,
			NodeLabels: h.NodeLabels,
			Lane:       h.Lane,
			Lanes:      h.Lanes,
			MTU:        h.MTU,
			MSS:        h.MSS,
			Share:      shareToFile(h.Share),
			Seal:       sealToFile(h.Seal),
			Origins:    sealOriginsToFile(h.Origins),
		})
	}
	for _, e := range n.Endpoints {
		f.Endpoints = append(f.Endpoints, endpointFile{
			pathIDFile: pathIDToFile(e.PathID),
			SID:        e.SID,
			Behaviour:  e.Behaviour,
			Argument:   e.Argument,
			Function:   e.Function,
			Sources:    e.Sources,
			Share:      shareToFile(e.Share),
		})
	}
	for _, e := range n.Egresses {
		f.Egresses = append(f.Egresses, egressFile{
			pathIDFile:  pathIDToFile(e.PathID),
			SID:         e.SID,
			Sources:     e.Sources,
			Match:       matchFile(e.Match),
			Segments:    e.Segments,
			OnViolation: e.OnViolation,
			Guard:       e.Guard,
			Of:          hex32(e.Of),
			Through:     throughToFile(e.Through),
			Lanes:       e.Lanes,
			Window:      e.Window,
			Share:       shareToFile(e.Share),
			Verifier:    verifierToFile(e.Verifier),
			Seal:        sealToFile(e.Seal),
		})
	}
	for _, p := range n.Proxies {
		f.Proxies = append(f.Proxies, proxyToFile(p))
	}
	return f
}

func (f nodeFile) node() Node {
	n := Node{Name: f.Name, Revision: f.Revision, Block: f.Block, Address: f.Address, Locator: f.Locator, Advertise: f.Advertise, MPLS: f.MPLS.mpls()}
	for _, i := range f.Interfaces {
		n.Interfaces = append(n.Interfaces, model.Interface(i))
	}
	for _, h := range f.Headends {
		n.Headends = append(n.Headends, Headend{
			PathID:     h.pathID(),
			Match:      model.Match(h.Match),
			Own:        h.Own,
			Segments:   h.Segments,
			NodeLabels: h.NodeLabels,
			Lane:       h.Lane,
			Lanes:      h.Lanes,
			MTU:        h.MTU,
			MSS:        h.MSS,
			Share:      h.Share.share(),
			Seal:       h.Seal.seal(),
			Origins:    sealOriginsOf(h.Origins),
		})
	}
	for _, e := range f.Endpoints {
		n.Endpoints = append(n.Endpoints, Endpoint{
			PathID:    e.pathID(),
			SID:       e.SID,
			Behaviour: e.Behaviour,
			Argument:  e.Argument,
			Function:  e.Function,
			Sources:   e.Sources,
			Share:     e.Share.share(),
		})
	}
	for _, e := range f.Egresses {
		n.Egresses = append(n.Egresses, Egress{
			PathID:      e.pathID(),
			SID:         e.SID,
			Sources:     e.Sources,
			Match:       model.Match(e.Match),
			Segments:    e.Segments,
			OnViolation: e.OnViolation,
			Guard:       e.Guard,
			Of:          uint32(e.Of),
			Through:     e.Through.through(),
			Lanes:       e.Lanes,
			Window:      e.Window,
			Share:       e.Share.share(),
			Verifier:    e.Verifier.verifier(),
			Seal:        e.Seal.seal(),
		})
	}
	for _, p := range f.Proxies {
		n.Proxies = append(n.Proxies, p.proxy())
	}
	return n
}

func proxyToFile(p Proxy) proxyFile {
	f := proxyFile{
		Function:  p.Function,
		Local:     p.Local,
		To:        p.To,
		From:      p.From,
		Via:       p.Via,
		Recognise: p.Recognise,
		OnUnknown: p.OnUnknown,
		Segments:  p.Segments,
		Rewrites:  p.Rewrites,
		Cache:     p.Cache,
		Lifetime:  durationFile(p.Lifetime),
	}
	for _, m := range p.Matches {
		f.Matches = append(f.Matches, matchFile(m))
	}
	if s := p.Stream; s != nil {
		f.Stream = &streamFile{
			Run: s.Run, Back: s.Back, Early: s.Early, Other: s.Other, Connections: s.Connections, Buffer: s.Buffer,
			Idle: durationFile(s.Idle), HalfClosed: durationFile(s.HalfClosed), MTU: s.MTU, Intrusive: s.Intrusive,
		}
		if s.Attached != (model.Attached{}) {
			a := attachedFile(s.Attached)
			f.Stream.Attached = &a
		}
	}
	f.Gateway = gatewayToFile(p.Gateway)
	if n := p.Netfilter; n != nil {
		f.Netfilter = &netfilterFile{Namespace: n.Namespace, Arguments: n.Arguments, Bypass: n.Bypass, Rules: n.Rules, Addresses: n.Addresses}
		if n.Zones {
			f.Netfilter.Zones = append([][]uint32{}, n.Groups...)
		}
	}
	return f
}

func (f proxyFile) proxy() Proxy {
	p := Proxy{
		Function: f.Function,
		Proxy: model.Proxy{
			Local:     f.Local,
			To:        f.To,
			From:      f.From,
			Via:       f.Via,
			Recognise: f.Recognise,
			OnUnknown: f.OnUnknown,
			Segments:  f.Segments,
			Rewrites:  f.Rewrites,
			Cache:     f.Cache,
			Lifetime:  time.Duration(f.Lifetime),
		},
	}
	for _, m := range f.Matches {
		p.Matches = append(p.Matches, model.Match(m))
	}
	if s := f.Stream; s != nil {
		p.Stream = &Stream{
			Stream: model.Stream{
				Run: s.Run, Back: s.Back, Early: s.Early, Other: s.Other, Connections: s.Connections, Buffer: s.Buffer,
				Idle: time.Duration(s.Idle), HalfClosed: time.Duration(s.HalfClosed),
			},
			MTU:       s.MTU,
			Intrusive: s.Intrusive,
		}
		if s.Attached != nil {
			p.Stream.Attached = model.Attached(*s.Attached)
		}
	}
	p.Gateway = f.Gateway.gateway()
	if n := f.Netfilter; n != nil {
		p.Netfilter = &Netfilter{
			Netfilter: model.Netfilter{
				Namespace: n.Namespace,
				Arguments: n.Arguments,
				Zones:     n.Zones != nil,
				Bypass:    n.Bypass,
				Rules:     n.Rules,
				Addresses: n.Addresses,
			},
			Groups: n.Zones,
		}
	}
	return p
}

func pathToFile(p Path) pathFile {
	f := pathFile{
		pathIDFile:  pathIDToFile(p.PathID),
		Match:       matchFile(p.Match),
		OwnTraffic:  p.OwnTraffic,
		OnViolation: p.OnViolation,
		Guard:       p.Guard,
		Window:      p.Window,
		MTU:         p.MTU,
		MSS:         p.MSS,
		Verifier:    verifierToFile(p.Verifier),
		Seal:        pathSealToFile(p.Seal),
	}
	for _, in := range p.Ingress {
		f.Ingress = append(f.Ingress, ingressFile(in))
	}
	for j, h := range p.Hops {
		f.Hops = append(f.Hops, hopFile{Node: h.Node, Function: h.Function, Waypoints: h.Waypoints, SID: h.SID, Argument: h.Argument, Parameters: parametersFile(h.Parameters), NodeLabel: h.NodeLabel, ServiceLabel: h.ServiceLabel, Share: shareToFile(p.Shares[j])})
	}
	return f
}

func (f pathFile) path() Path {
	p := Path{
		PathID:      f.pathID(),
		Match:       model.Match(f.Match),
		OwnTraffic:  f.OwnTraffic,
		OnViolation: f.OnViolation,
		Guard:       f.Guard,
		Window:      f.Window,
		MTU:         f.MTU,
		MSS:         f.MSS,
		Verifier:    f.Verifier.verifier(),
		Seal:        f.Seal.seal(),
	}
	for _, in := range f.Ingress {
		p.Ingress = append(p.Ingress, Ingress(in))
	}
	for _, h := range f.Hops {
		p.Hops = append(p.Hops, Hop{Node: h.Node, Function: h.Function, Waypoints: h.Waypoints, SID: h.SID, Argument: h.Argument, Parameters: uint64(h.Parameters), NodeLabel: h.NodeLabel, ServiceLabel: h.ServiceLabel})
		p.Shares = append(p.Shares, h.Share.share())
	}
	return p
}

func pathIDToFile(p PathID) pathIDFile {
	return pathIDFile{
		Path: hex32(p.Path), Epoch: p.Epoch, Chain: p.Chain, Direction: p.Direction, From: p.From, To: p.To, Scheme: p.Scheme,
		Encapsulation: encapsulationFile(p.Encapsulation),
	}
}

func (f pathIDFile) pathID() PathID {
	return PathID{
		Path: uint32(f.Path), Epoch: f.Epoch, Chain: f.Chain, Direction: f.Direction, From: f.From, To: f.To, Scheme: f.Scheme,
		Encapsulation: model.Encapsulation(f.Encapsulation),
	}
}

func shareToFile(s pot.Share) shareFile {
	f := shareFile{Position: s.Position, Key: keyFile(s.Key), Bind: keyFile(s.Bind)}
	if p := s.Polynomial; p != (pot.Polynomial{}) {
		f.Polynomial = &polynomialFile{
			Prime:  hex64(p.Prime),
			Share:  hex64(p.Share),
			Public: hex64(p.Public),
			LPC:    hex64(p.LPC),
			Up:     maskFile(p.Up),
			Down:   maskFile(p.Down),
		}
	}
	return f
}

func (f shareFile) share() pot.Share {
	s := pot.Share{Position: f.Position, Key: pot.Key(f.Key), Bind: pot.Key(f.Bind)}
	if p := f.Polynomial; p != nil {
		s.Polynomial = pot.Polynomial{
			Prime:  uint64(p.Prime),
			Share:  uint64(p.Share),
			Public: uint64(p.Public),
			LPC:    uint64(p.LPC),
			Up:     pot.Mask(p.Up),
			Down:   pot.Mask(p.Down),
		}
	}
	return s
}

func verifierToFile(v pot.Verifier) verifierFile {
	f := verifierFile{Secret: hex64(v.Secret)}
	for _, k := range v.Keys {
		f.Keys = append(f.Keys, keyFile(k))
	}
	return f
}

func (f verifierFile) verifier() pot.Verifier {
	v := pot.Verifier{Secret: uint64(f.Secret)}
	for _, k := range f.Keys {
		v.Keys = append(v.Keys, pot.Key(k))
	}
	return v
}
