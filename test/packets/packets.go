// Package packets are test packets that Scapy made, with what must become of
// them, and the world that they live in: paths with their secrets, and what
// each node of it holds. See make_packets.py. Tests of the codecs, of the model
// and of the programs in the kernel read them, so that no encoder of ours is
// checked by our own decoder only. It is for tests.
package packets

import (
	"bufio"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/netip"
	"strconv"
	"strings"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
)

//go:embed *.txt world.json mpls/*.txt mpls/world.json
var files embed.FS

// Verdict is what must become of a packet.
type Verdict string

const (
	Pass    Verdict = "pass"    // handed to the kernel untouched
	Forward Verdict = "forward" // sent on as Out
	Deliver Verdict = "deliver" // its inner packet goes up to this node
	Drop    Verdict = "drop"
)

// Errors is the file that says of every packet what its source is told.
const Errors = "errors.txt"

// SYNs is the file of packets that chains clamp, or could.
const SYNs = "syns.txt"

// Packet is one test packet.
type Packet struct {
	Name, Note, File string
	Node             string // where it arrives
	Armed            bool   // false: the node has no plan
	Interface        model.Interface
	Counter          uint64 // at a headend: the number that CPU 0 gives it
	Frames           int    // in the super-packet
	Verdict          Verdict
	Reason           string   // of a drop, as in reasons.h
	Reports          []string // reasons that are reported while it goes on
	Frame            []byte   // from the Ethernet header
	Out              []byte   // from the IPv6 header, or the label stack; a headend's flow label or entropy label is 0
	Error            []byte   // that its source is told of a drop by, from the IPv6 header; see Errors
}

// All are all packets but those of MPLS, by file and then as they stand there.
func All() ([]Packet, error) { return all("") }

// MPLS are the packets of chains over labels, in the world of LoadMPLSWorld; see
// make_mpls.py.
func MPLS() ([]Packet, error) { return all("mpls/") }

func all(folder string) ([]Packet, error) {
	names, err := fs.Glob(files, folder+"*.txt")
	if err != nil {
		return nil, err
	}
	var all []Packet
	for _, name := range names {
		text, err := files.ReadFile(name)
		if err != nil {
			return nil, err
		}
		ps, err := parse(string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		for i := range ps {
			ps[i].File = name
		}
		all = append(all, ps...)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("there are no test packets: run test/packets/make_packets.py")
	}
	return all, nil
}

// Load is the packet of this name.
func Load(name string) (Packet, error) {
	all, err := All()
	if err != nil {
		return Packet{}, err
	}
	for _, p := range all {
		if p.Name == name {
			return p, nil
		}
	}
	return Packet{}, fmt.Errorf("no test packet is called %q", name)
}

func parse(text string) ([]Packet, error) {
	var all []Packet
	var p *Packet
	var hexes *[]byte // of the key whose lines follow
	s := bufio.NewScanner(strings.NewReader(text))
	for n := 1; s.Scan(); n++ {
		line := s.Text()
		if line == "" || line[0] == '#' {
			continue
		}
		if digits, ok := strings.CutPrefix(line, "  "); ok && hexes != nil {
			b, err := hex.DecodeString(digits)
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
			*hexes = append(*hexes, b...)
			continue
		}
		hexes = nil
		key, value, ok := strings.Cut(line, ":")
		if !ok {
			return nil, fmt.Errorf("line %d: %q is not of the form key: value", n, line)
		}
		value = strings.TrimSpace(value)
		if key == "name" {
			all = append(all, Packet{Name: value, Armed: true, Frames: 1})
			p = &all[len(all)-1]
			continue
		}
		if p == nil {
			return nil, fmt.Errorf("line %d: %s stands before the first name", n, key)
		}
		var err error
		switch key {
		case "note":
			p.Note = value
		case "node":
			var un bool
			p.Node, un = strings.CutSuffix(value, " unarmed")
			p.Armed = !un
		case "port":
			p.Interface, err = port(value)
		case "counter":
			p.Counter, err = strconv.ParseUint(value, 10, 64)
		case "frames":
			p.Frames, err = strconv.Atoi(value)
		case "expect":
			v, reason, _ := strings.Cut(value, " ")
			p.Verdict, p.Reason = Verdict(v), reason
		case "report":
			p.Reports = strings.Fields(value)
		case "frame":
			hexes = &p.Frame
		case "out":
			hexes = &p.Out
		case "error":
			hexes = &p.Error
		default:
			err = fmt.Errorf("key %q is not known", key)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	return all, s.Err()
}

func port(s string) (model.Interface, error) {
	switch s {
	case "core":
		return model.Interface{Name: "core", Role: model.RoleCore}, nil
	case "edge":
		return model.Interface{Name: "edge", Role: model.RoleEdge}, nil
	case "edge-drop":
		return model.Interface{Name: "edge-drop", Role: model.RoleEdge, Unmatched: model.UnmatchedDrop}, nil
	}
	return model.Interface{}, fmt.Errorf("port %q is not known", s)
}

// World is where the packets live.
type World struct {
	Paths []plan.Path
	Nodes []Node
}

// Node is one node's plan, with its own addresses.
type Node struct {
	plan.Node
	Local  []netip.Addr // beside Address
	Routes []Route      // that refuse
}

// Route is one that refuses packets.
type Route struct {
	To   netip.Prefix `json:"to"`
	Kind string       `json:"kind"` // unreachable, prohibit, blackhole
}

// Node is the node of this name.
func (w World) Node(name string) (Node, error) {
	for _, n := range w.Nodes {
		if n.Name == name {
			return n, nil
		}
	}
	return Node{}, fmt.Errorf("no node is called %q", name)
}

// hex64 is a number as 0x digits: JSON's own lose bits in many readers.
type hex64 uint64

func (h *hex64) UnmarshalText(b []byte) error {
	n, err := strconv.ParseUint(string(b), 0, 64)
	*h = hex64(n)
	return err
}

type worldFile struct {
	Comment string       `json:"comment"`
	Block   netip.Prefix `json:"block"`
	Lane    uint16       `json:"lane"`
	Lanes   uint16       `json:"lanes"`
	// Services is the label of the block's SID 0; 0: there are no labels.
	Services uint32 `json:"services"`
	Nodes    []struct {
		Name    string       `json:"name"`
		Address netip.Addr   `json:"address"`
		Locator netip.Prefix `json:"locator"`
		Local   []netip.Addr `json:"local"`
		Routes  []Route      `json:"routes"`
		Label   uint32       `json:"label"`
		LabelAt netip.Addr   `json:"label_address"`
	} `json:"nodes"`
	Paths []pathFile `json:"paths"`
}

type pathFile struct {
	Chain       string                  `json:"chain"`
	Path        uint32                  `json:"path"`
	Epoch       uint8                   `json:"epoch"`
	Scheme      model.Scheme            `json:"scheme"`
	OnViolation model.OnViolation       `json:"on_violation"`
	Guard       model.Guard             `json:"guard"`
	Destination netip.Prefix            `json:"destination"`
	Source      netip.Prefix            `json:"source"`
	MTU         int                     `json:"mtu"`
	MSS         int                     `json:"mss"`
	SIDs        model.SIDs              `json:"sids"`
	Reduced     bool                    `json:"reduced"`
	Type        model.EncapsulationType `json:"type"`
	Rule        *ruleFile               `json:"rule"`
	Hops        []struct {
		Node      string `json:"node"`
		Function  string `json:"function"`
		SID       string `json:"sid"`
		Netfilter bool   `json:"netfilter"` // the function's kind
		Argument  uint32 `json:"argument"`
	} `json:"hops"`
	Keys        []string `json:"keys"`
	Bind        string   `json:"bind"`
	Prime       hex64    `json:"prime"`
	Secret      hex64    `json:"secret"`
	Polynomials []struct {
		Share  hex64    `json:"share"`
		Public hex64    `json:"public"`
		LPC    hex64    `json:"lpc"`
		Up     [2]hex64 `json:"up"`
		Down   [2]hex64 `json:"down"`
	} `json:"polynomials"`
}

type ruleFile struct {
	Priority        uint16    `json:"priority"`
	Protocol        uint8     `json:"protocol"`
	SourcePort      portsFile `json:"source_port"`
	DestinationPort portsFile `json:"destination_port"`
	DSCP            *uint8    `json:"dscp"`
	Mark            uint32    `json:"mark"`
	Mask            uint32    `json:"mask"`
}

type portsFile struct {
	First uint16 `json:"first"`
	Last  uint16 `json:"last"`
}

// match adds what the rule asks for.
func (r *ruleFile) match(m model.Match) model.Match {
	if r == nil {
		return m
	}
	m.Priority, m.Protocol = r.Priority, model.Protocol(r.Protocol)
	m.SourcePort, m.DestinationPort = model.Ports(r.SourcePort), model.Ports(r.DestinationPort)
	m.Mark = model.Mark{Value: r.Mark, Mask: r.Mask}
	if r.DSCP != nil {
		m.DSCP = model.DSCP(*r.DSCP + 1)
	}
	return m
}

// LoadWorld reads the world. Every call makes a new one.
func LoadWorld() (World, error) { return loadWorld("world.json") }

// LoadMPLSWorld reads the world of chains over labels.
func LoadMPLSWorld() (World, error) { return loadWorld("mpls/world.json") }

func loadWorld(file string) (World, error) {
	text, err := files.ReadFile(file)
	if err != nil {
		return World{}, err
	}
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.DisallowUnknownFields()
	var f worldFile
	if err := d.Decode(&f); err != nil {
		return World{}, fmt.Errorf("%s: %w", file, err)
	}
	var w World
	labels := map[string]plan.MPLSNode{}
	var all []plan.MPLSNode
	for _, n := range f.Nodes {
		if n.Label != 0 {
			labels[n.Name] = plan.MPLSNode{Name: n.Name, Label: n.Label, Address: n.LabelAt}
			all = append(all, labels[n.Name])
		}
	}
	for _, p := range f.Paths {
		path, err := p.path()
		if err != nil {
			return World{}, fmt.Errorf("%s: path %s: %w", file, p.Chain, err)
		}
		for i := range path.Hops[1:] {
			if h := &path.Hops[i+1]; path.OverLabels() {
				h.NodeLabel, h.ServiceLabel = labels[h.Node].Label, model.MPLS{Services: f.Services}.Service(h.SID)
			}
		}
		for _, n := range f.Nodes {
			if n.Name == path.Hops[0].Node {
				path.Ingress = []plan.Ingress{{Node: n.Name, Address: n.Address, Lane: f.Lane, Lanes: f.Lanes}}
			}
		}
		w.Paths = append(w.Paths, path)
	}
	for _, n := range f.Nodes {
		node := Node{Node: plan.Node{Name: n.Name, Block: f.Block, Address: n.Address, Locator: n.Locator}, Local: n.Local, Routes: n.Routes}
		if f.Services != 0 {
			node.MPLS = &plan.MPLS{Services: f.Services, Label: n.Label, Nodes: all}
		}
		for i, p := range w.Paths {
			node.add(p)
			node.addNetfilter(f.Paths[i])
		}
		w.Nodes = append(w.Nodes, node)
	}
	return w, nil
}

func (f pathFile) path() (plan.Path, error) {
	p := plan.Path{
		PathID: plan.PathID{
			Path: f.Path, Epoch: f.Epoch, Chain: f.Chain, Scheme: f.Scheme,
			Encapsulation: model.Encapsulation{SIDs: f.SIDs, Reduced: f.Reduced, Type: f.Type},
		},
		Match:       f.Rule.match(model.Match{Destination: f.Destination, Source: f.Source}),
		MTU:         f.MTU,
		MSS:         f.MSS,
		OnViolation: f.OnViolation,
		Guard:       f.Guard,
		Window:      model.WindowDefault,
	}
	p.Verifier.Secret = uint64(f.Secret)
	for j, h := range f.Hops {
		hop := plan.Hop{Node: h.Node, Function: h.Function, Argument: h.Argument}
		if h.SID != "" {
			a, err := netip.ParseAddr(h.SID)
			if err != nil {
				return plan.Path{}, err
			}
			hop.SID = a
		}
		p.Hops = append(p.Hops, hop)
		share := pot.Share{Position: uint8(j)}
		if j < len(f.Keys) {
			k, err := hex.DecodeString(f.Keys[j])
			if err != nil || copy(share.Key[:], k) != len(share.Key) {
				return plan.Path{}, fmt.Errorf("key %d is not 32 hexadecimal digits", j)
			}
			p.Verifier.Keys = append(p.Verifier.Keys, share.Key)
		}
		if f.Bind != "" {
			k, err := hex.DecodeString(f.Bind)
			if err != nil || copy(share.Bind[:], k) != len(share.Bind) {
				return plan.Path{}, fmt.Errorf("bind is not 32 hexadecimal digits")
			}
		}
		if len(f.Polynomials) > 0 {
			q := f.Polynomials[j]
			share.Polynomial = pot.Polynomial{
				Prime: uint64(f.Prime), Share: uint64(q.Share), Public: uint64(q.Public), LPC: uint64(q.LPC),
				Up:   pot.Mask{RND: uint64(q.Up[0]), CML: uint64(q.Up[1])},
				Down: pot.Mask{RND: uint64(q.Down[0]), CML: uint64(q.Down[1])},
			}
		}
		p.Shares = append(p.Shares, share)
	}
	return p, nil
}

// add gives the node its part of p, as internal/plan would. Of two epochs of
// one path the headend has the one that comes last.
func (n *Node) add(p plan.Path) {
	segments := p.Segments()
	for j, h := range p.Hops {
		if h.Node != n.Name {
			continue
		}
		share := p.Shares[j]
		switch j {
		case 0:
			hd := plan.Headend{PathID: p.PathID, Match: p.Match, Segments: segments, NodeLabels: p.NodeLabels(), Lane: p.Ingress[0].Lane, Lanes: p.Ingress[0].Lanes, MTU: p.MTU, MSS: p.MSS, Share: share}
			if last := len(n.Headends) - 1; last >= 0 && n.Headends[last].Path == p.Path {
				n.Headends[last] = hd
			} else {
				n.Headends = append(n.Headends, hd)
			}
		case len(p.Hops) - 1:
			n.Egresses = append(n.Egresses, plan.Egress{
				PathID: p.PathID, SID: h.SID, Sources: p.Sources(), Match: p.Match, Segments: segments,
				OnViolation: p.OnViolation, Guard: p.Guard, Lanes: p.Lanes(), Window: p.Window, Share: share, Verifier: p.Verifier,
			})
		default:
			n.Endpoints = append(n.Endpoints, plan.Endpoint{PathID: p.PathID, SID: h.SID, Function: h.Function, Argument: h.Argument, Sources: p.Sources(), Share: share})
		}
	}
}

// addNetfilter makes the functions of the node that the file says are of kind
// netfilter what they are: rules in the node's own kernel, of which there are none.
func (n *Node) addNetfilter(f pathFile) {
	for _, h := range f.Hops {
		if h.Node != n.Name || !h.Netfilter {
			continue
		}
		for i := range n.Endpoints {
			if n.Endpoints[i].Function == h.Function {
				n.Endpoints[i].Behaviour = model.BehaviourEndAN
			}
		}
		if len(n.Proxies) == 0 {
			n.Proxies = []plan.Proxy{NetfilterInNode(h.Function)}
		}
		if h.Argument != 0 {
			n.Proxies[0].Netfilter.Arguments[fmt.Sprintf("a%d", h.Argument)] = h.Argument
		}
	}
}

// NetfilterInNode is a function of kind netfilter in its node's own kernel. It keeps
// headers for as short a time as a plan may say, since what goes in during a test run
// does not come back.
func NetfilterInNode(name string) plan.Proxy {
	x := plan.Proxy{
		Function: name, Proxy: model.NetfilterDetour(name, model.NamespaceNode),
		Netfilter: &plan.Netfilter{Netfilter: model.Netfilter{Namespace: model.NamespaceNode, Arguments: map[string]uint32{}}},
	}
	x.Cache, x.Lifetime = 512, model.LifetimeMin
	return x
}
