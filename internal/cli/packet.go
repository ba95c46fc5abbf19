package cli

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
)

// packetText is what the headers of a captured packet say.
type packetText struct {
	flow    srv6.Flow // of the inner packet, or of one without outer headers
	known   bool
	outer   bool
	to      netip.Addr // destination of the outer header
	path    uint32     // of the proof; 0: there is none
	epoch   uint8
	onlyEnd srv6.Header // where there is no flow
}

// readPacket reads the first bytes of a frame.
func readPacket(frame []byte) (t packetText) {
	if len(frame) <= srv6.EthernetLen {
		return t
	}
	if l, err := mpls.ParseFrame(frame, func(uint32) bool { return true }); err == nil && l.Proof != nil {
		if proof, ok := srv6.ReadProof(*l.Proof); ok {
			t.outer, t.path, t.epoch = true, proof.Path, proof.Epoch
			t.flow, t.known = srv6.ReadFlow(l.Word.NextHeader, l.Payload)
		}
		return t
	}
	p, err := srv6.DecodeFrame(frame)
	t.onlyEnd = p.Header
	if err == nil && p.Encapsulated() {
		t.outer, t.to = true, p.Header.Destination
		if proof, ok := p.Proof(); ok {
			t.path, t.epoch = proof.Path, proof.Epoch
		}
		t.flow, t.known = p.InnerFlow()
		return t
	}
	next := uint8(srv6.NextHeaderIPv6)
	if _, _, err := srv6.DecodeInner(frame); err == nil && p.Ethernet != nil && p.Ethernet.Type == srv6.EtherTypeIPv4 {
		next = srv6.NextHeaderIPv4
	}
	t.flow, t.known = srv6.ReadFlow(next, frame[srv6.EthernetLen:])
	return t
}

// pathNames are the names of a node's paths, by their numbers, and of its functions.
type pathNames struct {
	node     string
	chain    map[uint32]string
	function map[[8]byte]string // by the upper half of a SID
	asked    time.Time
}

func namesOf(s api.Status) pathNames {
	n := pathNames{node: s.Node, chain: map[uint32]string{}, function: map[[8]byte]string{}, asked: time.Now()}
	for _, p := range s.Paths {
		n.chain[p.Path] = p.Chain
		if p.Direction != "forward" {
			n.chain[p.Path] += " (" + p.Direction + ")"
		}
		if p.From != "" {
			n.chain[p.Path] += " from " + p.From + " on"
		}
		if p.SID != nil && p.Function != "" {
			n.function[half(*p.SID)] = p.Function
		}
	}
	return n
}

func half(sid netip.Addr) (h [8]byte) {
	b := sid.As16()
	copy(h[:], b[:8])
	return h
}

// text is the packet for people: who sends to whom, and what its headers name.
func (t packetText) text(names pathNames) string {
	var parts []string
	switch {
	case t.known:
		parts = append(parts, flowText(t.flow))
	case t.onlyEnd.Source.IsValid():
		parts = append(parts, fmt.Sprintf("%s to %s", t.onlyEnd.Source, t.onlyEnd.Destination))
	}
	if t.outer && t.path == 0 {
		parts = append(parts, fmt.Sprintf("inside a packet to %s without proof", t.to))
	}
	if t.path != 0 {
		chain := names.chain[t.path]
		if chain == "" {
			chain = fmt.Sprintf("of path %#x", t.path)
		}
		parts = append(parts, fmt.Sprintf("chain %s, epoch %d", chain, t.epoch))
		if f := names.function[half(t.to)]; t.to.IsValid() && f != "" {
			parts = append(parts, "to function "+f)
		}
	}
	return strings.Join(parts, ", ")
}

var protocols = map[uint8]string{1: "ICMP", 6: "TCP", 17: "UDP", 33: "DCCP", 47: "GRE", 50: "ESP", 58: "ICMPv6", 132: "SCTP", 136: "UDP-Lite"}

func flowText(f srv6.Flow) string {
	protocol := protocols[f.Protocol]
	if protocol == "" {
		protocol = "protocol " + strconv.Itoa(int(f.Protocol))
	}
	if f.Known.Fragment() {
		protocol += " fragment"
	}
	if f.SourcePort == 0 && f.DestinationPort == 0 {
		return fmt.Sprintf("%s to %s %s", f.Source, f.Destination, protocol)
	}
	return fmt.Sprintf("%s to %s %s", netip.AddrPortFrom(f.Source, f.SourcePort), netip.AddrPortFrom(f.Destination, f.DestinationPort), protocol)
}
