// Package routing writes configurations of routing daemons that announce a domain:
// each node's address and locator, and its SIDs with their behaviour and function. It
// does no I/O: `waystamp routing` prints what it writes, and internal/lab runs daemons
// on it.
package routing

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// Behaviour is what is behind a SID, by its codepoint in IANA's registry of SRv6
// endpoint behaviors.
type Behaviour uint16

const (
	End             Behaviour = 1  // RFC 8986 4.1
	EndDT46         Behaviour = 20 // RFC 8986 4.8
	EndNextCSID     Behaviour = 43 // RFC 9800 4.1
	EndDT46NextCSID Behaviour = 64 // RFC 9800 4.1
	// EndAN and EndAD have none yet: draft-ietf-spring-sr-service-programming asks for
	// them as TBA1 and TBA3. Until then they are 1 and 3 behind the beginning of the
	// range for private use.
	EndAN Behaviour = 0x8001
	EndAD Behaviour = 0x8003
)

var behaviourNames = map[Behaviour]string{
	End: "End", EndDT46: "End.DT46", EndNextCSID: "End with NEXT-CSID", EndDT46NextCSID: "End.DT46 with NEXT-CSID", EndAN: "End.AN", EndAD: "End.AD",
}

// codepoints are those of functions' SIDs in plain lists.
var codepoints = map[model.Behaviour]Behaviour{model.BehaviourEnd: End, model.BehaviourEndAD: EndAD, model.BehaviourEndAN: EndAN}

func (b Behaviour) String() string { return behaviourNames[b] }

// Codepoint is the codepoint of a function's SID in plain lists.
func Codepoint(b model.Behaviour) Behaviour { return codepoints[b] }

// FirstAS is the first number for private use of 32 bits (RFC 6996). The first node
// of a domain has the next one.
const FirstAS uint32 = 4_200_000_000

// SID is one that is announced by a large community AS:BEHAVIOUR:FUNCTION (RFC 8092).
type SID struct {
	Prefix    netip.Prefix
	Behaviour Behaviour
	Function  string // "": none
}

// FunctionNumber is what large communities call a function: the first 32 bits of the
// SHA-256 of its name, so that it stays the same when the file changes. 0: none.
func FunctionNumber(name string) uint32 {
	if name == "" {
		return 0
	}
	sum := sha256.Sum256([]byte(name))
	return binary.BigEndian.Uint32(sum[:])
}

// Speaker is a node or router that speaks BGP with its neighbours.
type Speaker struct {
	Name   string
	AS     uint32
	Number uint32 // in the domain, from 1: its router id
	Source netip.Addr
	Own    []netip.Prefix // announced as they are
	SIDs   []SID          // announced with their community
	// Metric of the kernel's routes to the SIDs: a SID is announced while it has one.
	// 0: it always is.
	Metric     int
	Note       string   // about the SIDs, for the reader; "": none
	Neighbours []string // interfaces with a neighbour that has a number of its own
}

// New is the speaker that a node of a domain is: with each neighbour behind an
// interface of role core, and with its SIDs if the file says that it advertises them.
// paths are those of the domain's plan.
func New(d model.Domain, paths []plan.Path, node string) (Speaker, error) {
	i := slices.IndexFunc(d.Nodes, func(n model.Node) bool { return n.Name == node })
	if i < 0 {
		var names []string
		for _, n := range d.Nodes {
			names = append(names, n.Name)
		}
		return Speaker{}, fmt.Errorf("the domain has no node %q; it has %s", node, strings.Join(names, ", "))
	}
	if err := errors.Join(checkFunctions(d.Functions), checkPaths(d, paths)); err != nil {
		return Speaker{}, err
	}
	n := d.Nodes[i]
	s := Speaker{
		Name: n.Name, AS: FirstAS + 1 + uint32(i), Number: 1 + uint32(i), Source: n.Address,
		Own: []netip.Prefix{netip.PrefixFrom(n.Address, n.Address.BitLen()), n.Locator},
	}
	for _, f := range n.Interfaces {
		if f.Role == model.RoleCore {
			s.Neighbours = append(s.Neighbours, f.Name)
		}
	}
	if n.Advertise != model.AdvertiseSIDs {
		s.Note = "No SIDs: the domain file has no advertise: sids at this node."
		return s, nil
	}
	s.Metric = model.SIDMetric
	s.Note = "Its SIDs, each while waystamp has a route for it, with the large community AS:BEHAVIOUR:FUNCTION:"
	does := map[string]Behaviour{}
	for _, f := range d.Functions {
		does[f.Name] = codepoints[f.Kind.Behaviour()]
	}
	at := map[netip.Prefix]int{}
	for _, p := range paths {
		for j, h := range p.Hops {
			if h.Node != node || !h.SID.IsValid() {
				continue
			}
			sid := SID{Prefix: netip.PrefixFrom(h.SID, 64).Masked(), Function: h.Function}
			compressed := p.Encapsulation.SIDs == model.SIDsCompressed
			switch {
			case j == len(p.Hops)-1 && compressed:
				sid.Behaviour = EndDT46NextCSID
			case j == len(p.Hops)-1:
				sid.Behaviour = EndDT46
			case does[h.Function] == End && compressed:
				sid.Behaviour = EndNextCSID
			default:
				sid.Behaviour = does[h.Function]
			}
			k, ok := at[sid.Prefix]
			if !ok {
				at[sid.Prefix] = len(s.SIDs)
				s.SIDs = append(s.SIDs, sid)
			} else {
				// Of a SID in lists of both forms: NEXT-CSID is End where no C-SID is left.
				s.SIDs[k].Behaviour = max(s.SIDs[k].Behaviour, sid.Behaviour)
			}
		}
	}
	slices.SortFunc(s.SIDs, func(a, b SID) int { return a.Prefix.Addr().Compare(b.Prefix.Addr()) })
	return s, nil
}

// checkFunctions holds that no two functions have one number.
func checkFunctions(fs []model.Function) error {
	names := map[uint32]string{}
	for _, f := range fs {
		n := FunctionNumber(f.Name)
		if other, ok := names[n]; ok || n == 0 {
			return fmt.Errorf("functions %q and %q would have the same number in large communities; rename one of them", cmp.Or(other, "none"), f.Name)
		}
		names[n] = f.Name
	}
	return nil
}

// checkPaths holds that the paths are those of the domain's chains as they are now.
func checkPaths(d model.Domain, paths []plan.Path) error {
	type direction struct {
		chain string
		model.Direction
	}
	d, err := plan.Instances(d)
	if err != nil {
		return err
	}
	at := map[string]string{}
	for _, f := range d.Functions {
		at[f.Name] = f.Node
	}
	visits := map[direction][]string{}
	for _, c := range d.Chains {
		for _, dir := range c.Directions() {
			directed := c.Directed(dir)
			way := []string{}
			for _, name := range directed.Functions {
				way = append(way, name+" on "+at[name])
			}
			visits[direction{c.Name, dir}] = append(way, directed.Egress)
		}
	}
	planned := map[direction]bool{}
	stream := map[string]bool{}
	for _, f := range d.Functions {
		stream[f.Name] = f.Kind == model.KindStream
	}
	parts := map[direction][]string{}
	for _, p := range paths {
		if p.From != "" && !stream[p.From] {
			continue // of what a function makes, at the SIDs of another one
		}
		way := []string{}
		for _, h := range p.Hops[1 : len(p.Hops)-1] {
			way = append(way, h.Function+" on "+h.Node)
		}
		is := direction{p.Chain, p.Direction}
		last := p.Hops[len(p.Hops)-1].Node
		if p.To != "" {
			parts[is] = append(append(parts[is], way...), p.To+" on "+last)
			continue
		}
		way = append(append(parts[is], way...), last)
		if !slices.Equal(way, visits[is]) {
			return fmt.Errorf("chain %s, %s, leads by %s in the paths, and not in the domain file: %w", p.Chain, p.Direction, strings.Join(way, ", "), ErrPaths)
		}
		planned[is] = true
	}
	for _, c := range d.Chains {
		for _, dir := range c.Directions() {
			if !planned[direction{c.Name, dir}] {
				return fmt.Errorf("chain %s, %s, is not in the paths: %w", c.Name, dir, ErrPaths)
			}
		}
	}
	return nil
}

// ErrPaths means that paths are those of another domain, or of an earlier version.
var ErrPaths = errors.New("they are of another file, or an earlier one; write them anew by waystamp plan --out")

// community is that of a SID.
func (s Speaker) community(sid SID) string {
	return fmt.Sprintf("%d:%d:%d", s.AS, sid.Behaviour, FunctionNumber(sid.Function))
}

// FRR is the configuration for zebra and bgpd of FRR, from 8.4 on, as vtysh reads
// it.
func (s Speaker) FRR() string { return s.BGP() + "!\n" + s.Zebra() }

// BGP is the part of it that is bgpd's. BGP is unnumbered: neighbours find each other
// by router advertisements, and talk by link-local addresses.
func (s Speaker) BGP() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("! FRR, zebra and bgpd, of %s. It announces:", s.Name)
	for _, p := range s.Own {
		line("!   %s", p)
	}
	if s.Note != "" {
		line("! %s", s.Note)
	}
	for _, sid := range s.SIDs {
		line("!   %s  %s  %s%s", sid.Prefix, s.community(sid), sid.Behaviour, prefixed(", ", sid.Function))
	}
	line("frr defaults datacenter")
	line("hostname %s", s.Name)
	line("!")
	// FRR delays routes for 5 s whose route map it reads later.
	for i, p := range s.Own {
		le := " le 128"
		if p.IsSingleIP() {
			le = ""
		}
		line("ipv6 prefix-list waystamp-own seq %d permit %s%s", 5*(i+1), p, le)
	}
	for i, of := range s.byCommunity() {
		line("!")
		for j, sid := range of {
			line("ipv6 prefix-list %s seq %d permit %s", of[0].list(), 5*(j+1), sid.Prefix)
		}
		line("route-map waystamp-sids permit %d", 10*(i+1))
		line(" match ipv6 address prefix-list %s", of[0].list())
		if s.Metric != 0 {
			line(" match metric %d", s.Metric)
			line(" set metric 0")
		}
		line(" set large-community %s", s.community(of[0]))
		line("exit")
	}
	line("!")
	line("! Refuse this node's own prefixes from neighbours.")
	line("route-map waystamp-in deny 10")
	line(" match ipv6 address prefix-list waystamp-own")
	line("exit")
	line("route-map waystamp-in permit 20")
	line("exit")
	line("!")
	line("route-map waystamp-out permit 10")
	line("exit")
	line("!")
	line("router bgp %d", s.AS)
	line(" bgp router-id %s", netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, s.Number))))
	line(" no bgp default ipv4-unicast")
	line(" no bgp network import-check")
	line(" neighbor core peer-group")
	line(" neighbor core remote-as external")
	line(" neighbor core timers connect 1")
	for _, n := range s.Neighbours {
		line(" neighbor %s interface peer-group core", n)
	}
	line(" !")
	line(" address-family ipv6 unicast")
	for _, p := range s.Own {
		line("  network %s", p)
	}
	if s.Metric != 0 {
		line("  redistribute kernel route-map waystamp-sids")
	} else {
		for _, sid := range s.SIDs {
			line("  network %s route-map waystamp-sids", sid.Prefix)
		}
	}
	line("  neighbor core activate")
	line("  neighbor core route-map waystamp-in in")
	line("  neighbor core route-map waystamp-out out")
	line(" exit-address-family")
	line("exit")
	return b.String()
}

// Zebra is the part that is zebra's: packets that the node originates have its address.
func (s Speaker) Zebra() string {
	return fmt.Sprintf(`! Packets that the node originates have its address.
route-map waystamp-source permit 10
 set src %s
exit
!
ipv6 protocol bgp route-map waystamp-source
`, s.Source)
}

// byCommunity groups the SIDs that have the same community.
func (s Speaker) byCommunity() [][]SID {
	var groups [][]SID
	for _, sid := range s.SIDs {
		same := func(g []SID) bool { return s.community(g[0]) == s.community(sid) }
		if i := slices.IndexFunc(groups, same); i >= 0 {
			groups[i] = append(groups[i], sid)
		} else {
			groups = append(groups, []SID{sid})
		}
	}
	return groups
}

// list is the name of the prefix list of all SIDs with this one's community.
func (s SID) list() string {
	return fmt.Sprintf("waystamp-%d%s", s.Behaviour, prefixed("-", s.Function))
}

func prefixed(prefix, s string) string {
	if s == "" {
		return ""
	}
	return prefix + s
}
