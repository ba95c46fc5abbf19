package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// fuzzPackets is how many packets the programs and the oracle are compared on, but
// for WAYSTAMP_FUZZ_PACKETS: as many as meet every reason. make fuzz takes ten million.
const fuzzPackets = 300_000

// The block's and locators' lengths are such that masks do not end with a byte.
var fuzzBlock = netip.MustParsePrefix("2001:db8:8::/45")

// fuzzSpecs are the nodes. The last has a single SID.
var fuzzSpecs = []rigSpec{
	{
		name: "a", block: fuzzBlock, locator: xtest.Prefix("2001:db8:9:100::/56"), address: xtest.Addr("fd00:0:a::1"),
		own: []netip.Addr{xtest.Addr("2001:db8:1000:1::1"), xtest.Addr("192.0.2.1")},
		routes: []rigRoute{
			{to: xtest.Prefix("2001:db8:a:40::/61"), mtu: 300},
			{to: xtest.Prefix("2001:db8:1000:1:dead::/80"), kind: unix.RTN_UNREACHABLE},
			{to: xtest.Prefix("198.51.100.64/26"), kind: unix.RTN_UNREACHABLE},
			{to: xtest.Prefix("198.51.101.0/24"), mtu: 200},
		},
	},
	{
		name: "b", block: fuzzBlock, locator: xtest.Prefix("2001:db8:a:40::/61"), address: xtest.Addr("fd00:0:b::1"),
		own: []netip.Addr{xtest.Addr("fd00:1:1::1"), xtest.Addr("198.51.100.1")}, oldKernel: true,
		moved: []netip.Addr{xtest.Addr("2001:db8:1000:1::6"), xtest.Addr("198.51.100.6")},
		routes: []rigRoute{
			{to: xtest.Prefix("2001:db8:1000:1::/66"), mtu: 200},
			{to: xtest.Prefix("2001:db8:9:100::/60"), kind: unix.RTN_PROHIBIT},
		},
	},
	{
		name: "c", block: fuzzBlock, locator: xtest.Prefix("2001:db8:8:ffff::/64"), address: xtest.Addr("fd00:0:c::1"),
		own: []netip.Addr{xtest.Addr("2001:db8:1000:1::2"), xtest.Addr("fd00:5:5::1")},
		routes: []rigRoute{
			{to: xtest.Prefix("fd00:1:1::/48"), kind: unix.RTN_BLACKHOLE},
			{to: xtest.Prefix("2001:db8:9::/48"), mtu: 1000},
		},
	},
}

var (
	fuzzDst = []string{"::/0", "2001:db8::/32", "2001:db8:1000::/36", "2001:db8:1000:1::/64", "2001:db8:1000:1::5/128", "fd00:1::/32", "fd00:1:1::/48"}
	fuzzSrc = []string{"", "::/0", "fd00:5::/32", "fd00:5:5::/48", "fd00:5:5::5/128"}
	// The same for IPv4.
	fuzzDst4 = []string{"0.0.0.0/0", "198.48.0.0/12", "198.51.100.0/23", "198.51.100.0/24", "198.51.100.5/32"}
	fuzzSrc4 = []string{"", "0.0.0.0/0", "203.0.0.0/8", "203.0.113.0/25", "203.0.113.5/32"}
	// Hosts in each of them, and in none; own addresses of the nodes; then those
	// that chains are rarely for: SIDs and what stays on a link.
	fuzzHosts = []string{
		"2001:db8:1000:1::5", "2001:db8:1000:1::6", "2001:db8:1000:1:8000::", "2001:db8:1000:2::1", "2001:db8:2000::1", "2620::1",
		"fd00:1:1::5", "fd00:1:2::1", "2001:db8:1000:1:dead::1", "::ffff:198.51.100.5",
		"2001:db8:1000:1::1", "2001:db8:1000:1::2", "fd00:1:1::1", "fd00:5:5::1", "fd00:0:a::1", "fd00:0:b::1",
		"2001:db8:9:101::", "2001:db8:f:ffff::", "2001:db8:7:ffff::", "2001:db8:10::1", "fe80::1", "febf::1", "fec0::1", "ff02::1", "ff0e::1",
	}
	fuzzSources = []string{"2001:db8:9:101::7", "fd00:5:5::5", "fd00:5:5::6", "fd00:5:5::5", "fd00:5:5::7", "fd00:5:6::1", "fd00:6::1", "2620::2", "2620::3", "fe80::2", "ff02::2", "::", "::ffff:203.0.113.5"}
	fuzzHosts4  = []string{
		"198.51.100.5", "198.51.100.6", "198.51.100.200", "198.51.101.1", "198.51.7.1", "8.8.8.8", "198.51.100.65",
		"198.51.100.1", "192.0.2.1", "169.254.1.1", "169.253.1.1", "224.0.0.251", "239.1.1.1", "255.255.255.255", "240.0.0.1", "127.0.0.1", "0.0.0.5",
	}
	fuzzSources4 = []string{"203.0.113.5", "203.0.113.6", "203.0.113.5", "203.0.113.129", "203.1.1.1", "9.9.9.9", "169.254.2.2", "224.1.1.1", "127.0.0.2", "0.0.0.0"}
	outerSources = []string{secondHeadend, "fd00:0:a::1", "fd00:0:b::1", "fe80::1", "ff02::1", "::", "2001:db8:9:101::"} // of nobody, mostly
	hopLimits    = []uint8{64, 64, 64, 64, 64, 64, 64, 64, 64, 255, 2, 1, 0}
	macs         = [][6]byte{{2, 0, 0, 0, 0, 3}, {0x33, 0x33, 0, 0, 0, 1}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff}}
)

// fuzzPorts are what rules ask for; packets have some at the ends of each.
var fuzzPorts = []model.Ports{{}, {}, {First: 53, Last: 53}, {First: 1, Last: 1023}, {First: 1024, Last: 65535}}

// secondHeadend is that of the paths that have two.
const secondHeadend = "fd00:0:f::1"

// secrets is a path's set of them. Making one costs more than a world, so that
// worlds take theirs from a pool.
type secrets struct {
	shares   []pot.Share
	verifier pot.Verifier
}

// GoString keeps what rapid prints of a failure short.
func (s secrets) GoString() string { return fmt.Sprintf("for %d positions", len(s.shares)) }

type secretPool map[model.Scheme][pot.PositionsMax + 1][]secrets

func newSecretPool(t *testing.T) secretPool {
	t.Helper()
	random := rand.NewChaCha8([32]byte{1}) // the same in every run, so that a seed says all
	pool := secretPool{}
	for _, s := range []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow} {
		var byLength [pot.PositionsMax + 1][]secrets
		for k := pot.PositionsMin; k <= pot.PositionsMax; k++ {
			for range 2 {
				shares, v, err := pot.Generate(random, s, k)
				if err != nil {
					t.Fatal(err)
				}
				byLength[k] = append(byLength[k], secrets{shares, v})
			}
		}
		pool[s] = byLength
	}
	return pool
}

// fuzzPath is a path of a world, in one epoch.
type fuzzPath struct {
	plan.PathID
	match    model.Match
	visits   []int        // the nodes, the headend's first
	segments []netip.Addr // the SIDs, in the order of the visit
	// arguments are those of visits of a function of kind netfilter, by the index in
	// segments. Other functions are not in it.
	arguments map[int]uint32
	sources   []netip.Addr // its headends
	secrets
}

type fuzzWorld struct {
	paths  []fuzzPath
	nodes  []*plan.Node // nil: without a plan
	guards []map[string]model.Guard
	told   map[uint32]int // to the headends: what their paths take
	number uint64
	seen   map[tables.CounterKey][]oracle.Train // by the egress of a path
}

func drawWorld(t *rapid.T, pool secretPool) fuzzWorld {
	w := fuzzWorld{seen: map[tables.CounterKey][]oracle.Train{}}
	nodes := make([]plan.Node, len(fuzzSpecs))
	free := make([][]netip.Addr, len(fuzzSpecs)) // SIDs
	for i, s := range fuzzSpecs {
		for n := range min(64, 1<<(64-s.locator.Bits())) {
			b := s.locator.Addr().As16()
			b[7] += byte(n)
			free[i] = append(free[i], netip.AddrFrom16(b))
		}
	}
	node := rapid.IntRange(0, len(fuzzSpecs)-1)
	w.told = map[uint32]int{}
	for i := range rapid.IntRange(1, 5).Draw(t, "paths") {
		p := drawPath(t, node, free, uint32(i+1)*0x01010101)
		mtu := rapid.SampledFrom([]int{0, 0, 0, 60, 100, 1280}).Draw(t, "chain MTU")
		w.told[p.Path] = rapid.SampledFrom([]int{0, 0, 0, 0, 92, 1000, 1310}).Draw(t, "told MTU")
		mss := rapid.SampledFrom([]int{1220, 536, 0, 1, 1440, 65535}).Draw(t, "MSS")
		action := rapid.SampledFrom([]model.OnViolation{model.OnViolationDrop, model.OnViolationReport}).Draw(t, "on violation")
		guard := rapid.SampledFrom(xtest.Guards).Draw(t, "guard")
		lanes := rapid.SampledFrom([]uint16{1, 2, 64}).Draw(t, "lanes")
		lane := rapid.Uint16Range(0, 4096-lanes).Draw(t, "lane")
		for e := range rapid.IntRange(1, 2).Draw(t, "epochs") {
			p := p
			p.Epoch += uint8(e)
			p.secrets = rapid.SampledFrom(pool[p.Scheme][len(p.visits)]).Draw(t, "secrets")
			w.paths = append(w.paths, p)
			p.give(nodes, mtu, mss, action, guard, lane, lanes)
			w.seen[tables.CounterKey{Path: abi.BE32(p.Path), Epoch: p.Epoch}] = drawSeen(t, lane+min(lanes, 8))
		}
	}
	for i := range nodes {
		n := &nodes[i]
		if rapid.IntRange(0, 15).Draw(t, "node has no plan") == 15 {
			n = nil
		}
		w.nodes = append(w.nodes, n)
		guard := func() model.Guard { return rapid.SampledFrom(xtest.Guards).Draw(t, "an edge's guard") }
		w.guards = append(w.guards, map[string]model.Guard{portEdge: guard(), portEdgeDrop: guard()})
	}
	w.number = rapid.SampledFrom([]uint64{1, 2, 77, 1<<42 - 1, 0}).Draw(t, "number")
	return w
}

// fuzzCounters are numbers whose places in a window of 64 meet.
var fuzzCounters = []uint64{1, 1, 1, 2, 5, 64, 65, 67, 68, 77, 1 << 20, 1<<42 - 1}

// drawSeen are trains that an egress may have accepted.
func drawSeen(t *rapid.T, lanes uint16) []oracle.Train {
	if rapid.IntRange(0, 3).Draw(t, "seen before") < 2 {
		return nil
	}
	return rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) oracle.Train {
		return oracle.Train{
			Lane:    rapid.SampledFrom([]uint16{min(5, lanes-1), min(5, lanes-1), 0, lanes - 1}).Draw(t, "lane"),
			Counter: rapid.SampledFrom(fuzzCounters).Draw(t, "counter"), Frames: rapid.SampledFrom([]int{1, 1, 2, 62, 63}).Draw(t, "frames"),
		}
	}), 1, 3, func(s oracle.Train) uint64 { return uint64(s.Lane)<<48 | s.Counter }).Draw(t, "seen")
}

// drawRND is mostly a number that some headend could give.
func drawRND(t *rapid.T) uint64 {
	return rapid.OneOf(rapid.Just(uint64(5<<48|1)), rapid.Custom(func(t *rapid.T) uint64 {
		lane := rapid.SampledFrom([]uint64{5, 5, 0, 4095}).Draw(t, "lane")
		frames := rapid.SampledFrom([]uint64{1, 1, 2, 3, 40, 63, 64}).Draw(t, "frames")
		return lane<<48 | (frames-1)<<42 | rapid.SampledFrom(fuzzCounters).Draw(t, "counter")
	}), rapid.SampledFrom([]uint64{0, 5 << 48, 1, 1<<60 - 1, 1<<60 | 5<<48 | 1, 1<<64 - 1}), rapid.Uint64()).Draw(t, "rnd")
}

func drawPath(t *rapid.T, node *rapid.Generator[int], free [][]netip.Addr, path uint32) fuzzPath {
	p := fuzzPath{PathID: plan.PathID{
		Path: path, Chain: "c", Epoch: rapid.SampledFrom([]uint8{0, 1, 255}).Draw(t, "epoch"),
		Scheme: rapid.SampledFrom([]model.Scheme{model.SchemeKeyed, model.SchemeOPoT, model.SchemePoT, model.SchemeKeyedFlow}).Draw(t, "scheme"),
	}}
	p.Encapsulation = model.Encapsulation{
		SIDs:    rapid.SampledFrom([]model.SIDs{model.SIDsPlain, model.SIDsPlain, model.SIDsCompressed}).Draw(t, "SIDs"),
		Reduced: rapid.IntRange(0, 2).Draw(t, "reduced") == 2,
	}
	dst, src := fuzzDst, fuzzSrc
	if rapid.IntRange(0, 2).Draw(t, "IPv4") == 2 {
		dst, src = fuzzDst4, fuzzSrc4
	}
	p.match.Destination = xtest.Prefix(rapid.SampledFrom(dst).Draw(t, "destination"))
	p.match.Source = xtest.Prefix(rapid.SampledFrom(src).Draw(t, "source"))
	if rapid.IntRange(0, 2).Draw(t, "ordered") == 2 {
		p.match.Priority = uint16(path) // no two have the same
		p.match.Protocol = rapid.SampledFrom([]model.Protocol{0, 6, 17, 17, 58}).Draw(t, "rule's protocol")
		if p.match.Protocol == 6 || p.match.Protocol == 17 {
			p.match.SourcePort = rapid.SampledFrom(fuzzPorts).Draw(t, "rule's source port")
			p.match.DestinationPort = rapid.SampledFrom(fuzzPorts).Draw(t, "rule's destination port")
		}
		p.match.DSCP = rapid.SampledFrom([]model.DSCP{0, 0, 1, 47}).Draw(t, "rule's DSCP")
	}
	p.visits = []int{node.Draw(t, "headend")}
	p.sources = []netip.Addr{fuzzSpecs[p.visits[0]].address}
	if path%4 == 0x01010101%4 { // not a matter of the epoch
		p.sources = append(p.sources, xtest.Addr(secondHeadend))
	}
	for range rapid.SampledFrom([]int{1, 2, 2, 3, 3, 4, 6, 16}).Draw(t, "segments") {
		n := node.Draw(t, "visit")
		// A SID may be another path's too, but this path comes by once.
		fresh := slices.DeleteFunc(slices.Clone(free[n]), func(a netip.Addr) bool { return slices.Contains(p.segments, a) })
		if len(fresh) == 0 {
			n = 0
			fresh = slices.DeleteFunc(slices.Clone(free[n]), func(a netip.Addr) bool { return slices.Contains(p.segments, a) })
		}
		p.visits = append(p.visits, n)
		p.segments = append(p.segments, rapid.SampledFrom(fresh[:min(4, len(fresh))]).Draw(t, "SID"))
	}
	p.arguments = map[int]uint32{}
	for i := range len(p.segments) - 1 { // the last is the egress's
		if rapid.IntRange(0, 4).Draw(t, "netfilter") == 4 {
			p.arguments[i] = rapid.SampledFrom([]uint32{7, 0, 1, 1 << 31, 1<<32 - 1}).Draw(t, "argument")
		}
	}
	// Other paths mostly have SIDs of their own.
	if rapid.Bool().Draw(t, "its SIDs are its own") {
		for i := range free {
			if left := slices.DeleteFunc(slices.Clone(free[i]), func(a netip.Addr) bool { return slices.Contains(p.segments, a) }); len(left) > 0 {
				free[i] = left
			}
		}
	}
	return p
}

// list is the path's segment list, whole. The nodes' blocks of 48 bits differ:
// C-SIDs lead on only where the next node is in the same one.
func (p fuzzPath) list() []netip.Addr {
	if p.Encapsulation.SIDs == model.SIDsCompressed {
		return srv6.Compress(p.segments)
	}
	list := slices.Clone(p.segments)
	for i, argument := range p.arguments {
		list[i] = withLower(list[i], uint64(argument))
	}
	return list
}

// withLower is an address with other lower 64 bits.
func withLower(a netip.Addr, lower uint64) netip.Addr {
	b := a.As16()
	binary.BigEndian.PutUint64(b[8:], lower)
	return netip.AddrFrom16(b)
}

// arrival is the destination of a packet that comes to position at, and how many
// segments are left then.
func (p fuzzPath) arrival(at int) (netip.Addr, int) {
	if p.Encapsulation.SIDs != model.SIDsCompressed {
		return p.list()[at-1], len(p.segments) - at
	}
	list := p.list()
	container, csid := (at-1)/srv6.CSIDsMax, (at-1)%srv6.CSIDsMax
	c, dst := list[container].As16(), p.segments[at-1].As16()
	copy(dst[6:], c[6+2*csid:])
	return netip.AddrFrom16(dst), len(list) - 1 - container
}

// give adds the path's parts to the plans of its nodes. The headend has the
// newest epoch alone.
func (p fuzzPath) give(nodes []plan.Node, mtu, mss int, action model.OnViolation, guard model.Guard, lane, lanes uint16) {
	for j, i := range p.visits {
		n := &nodes[i]
		switch j {
		case 0:
			n.Headends = slices.DeleteFunc(n.Headends, func(h plan.Headend) bool { return h.Path == p.Path })
			n.Headends = append(n.Headends, plan.Headend{
				PathID: p.PathID, Match: p.match, Segments: p.list(), Lane: lane, Lanes: lanes, MTU: mtu, MSS: mss, Share: p.shares[0],
			})
		case len(p.visits) - 1:
			n.Egresses = append(n.Egresses, plan.Egress{
				PathID: p.PathID, SID: p.segments[j-1], Sources: p.sources, Match: p.match, Segments: p.list(), OnViolation: action, Guard: guard,
				Lanes: min(lane+lanes, lane+8), Window: 64, Share: p.shares[j], Verifier: p.verifier,
			})
		default:
			e := plan.Endpoint{PathID: p.PathID, SID: p.segments[j-1], Function: "f", Sources: p.sources, Share: p.shares[j]}
			if argument, ok := p.arguments[j-1]; ok {
				e.Function, e.Behaviour, e.Argument = "nf", model.BehaviourEndAN, argument
				n.Proxies = []plan.Proxy{packets.NetfilterInNode(e.Function)}
			}
			n.Endpoints = append(n.Endpoints, e)
		}
	}
}

// fuzzFrame is a frame on its way to a node.
type fuzzFrame struct {
	node int
	frame
	leaving oracle.Departure // the same frame on its way out
}

func (f fuzzFrame) GoString() string {
	return fmt.Sprintf("%s of %s, GSO %d/%d: %x", f.port, fuzzSpecs[f.node].name, f.gsoSize, f.gsoSegs, f.b)
}

// dice are those of packets.Vary, thrown by rapid.
type dice struct{ *rapid.T }

func (d dice) IntN(n int) int { return rapid.IntRange(0, n-1).Draw(d.T, "dice") }

// frames draws packets of the world: whole ones, those that something was done
// to on purpose, and those that were damaged.
func (w fuzzWorld) frames() *rapid.Generator[fuzzFrame] {
	return rapid.Custom(func(t *rapid.T) fuzzFrame {
		f := fuzzFrame{node: rapid.IntRange(0, len(fuzzSpecs)-1).Draw(t, "node")}
		f.port = rapid.SampledFrom([]string{portCore, portCore, portCore, portEdge, portEdge, portEdgeDrop}).Draw(t, "port")
		switch kind := rapid.IntRange(0, 19).Draw(t, "kind"); {
		case kind < 7: // where it belongs
			f.port = portCore
			f.b, f.node = w.drawOnPath(t)
		case kind < 10:
			f.port = rapid.SampledFrom([]string{portEdge, portEdgeDrop}).Draw(t, "edge")
			f.b, f.node = w.drawOpening(t)
		case kind == 10: // where it does not
			f.b, _ = w.drawOnPath(t)
		case kind < 18:
			var headend int
			f.b, headend = w.drawPlain(t)
			if f.port != portCore && rapid.IntRange(0, 3).Draw(t, "elsewhere") < 3 {
				f.node = headend
			}
		default:
			f.b = drawOther(t)
		}
		f.leaving.From = rapid.SampledFrom([]oracle.Origin{oracle.FromPlan, oracle.FromPlan, oracle.FromElsewhere, oracle.FromNode}).Draw(t, "origin")
		switch rapid.IntRange(0, 2).Draw(t, "index") {
		case 1:
			f.leaving.Index = true
		case 2:
			f.leaving.LetGo = true
		}
		if rapid.IntRange(0, 2).Draw(t, "damage") == 2 {
			other, _ := w.drawOnPath(t)
			f.b = packets.Vary(dice{t}, packets.Packet{Frame: f.b}, []packets.Packet{{Frame: other}, {Frame: f.b}})
		}
		if rapid.IntRange(0, 19).Draw(t, "another's frame") == 19 {
			mac := rapid.SampledFrom(macs).Draw(t, "mac")
			copy(f.b, mac[:])
		}
		if rapid.IntRange(0, 9).Draw(t, "super-packet") == 9 {
			f.gsoSize = rapid.SampledFrom([]uint32{1, 8, 100, 536, 1400, 65535}).Draw(t, "gso_size")
			f.gsoSegs = rapid.SampledFrom([]uint32{0, 1, 2, 40, 63, 64, 65535}).Draw(t, "gso_segs")
		}
		return f
	})
}

// innerLengths are differences from what is there.
var innerLengths = []int{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 8, 70, -1, -6}

func drawAddr(t *rapid.T, of []string, label string) netip.Addr {
	return xtest.Addr(rapid.SampledFrom(of).Draw(t, label))
}

// drawInner is an inner packet. To a host that the match takes, if there is one.
func drawInner(t *rapid.T, to *model.Match) (b []byte, v4 bool) {
	v4 = to.Is4()
	if rapid.IntRange(0, 19).Draw(t, "another version") == 19 {
		v4 = !v4
	}
	if v4 {
		return drawInner4(t, to), true
	}
	return drawInner6(t, to), false
}

// drawAddrs are addresses that the match takes, mostly.
func drawAddrs(t *rapid.T, to *model.Match, sources, hosts []string) (src, dst netip.Addr) {
	src, dst = drawAddr(t, sources, "from"), drawAddr(t, hosts, "to")
	if xtest.Addr(hosts[0]).Is4() != to.Is4() || rapid.IntRange(0, 5).Draw(t, "another chain's") == 5 {
		return src, dst
	}
	d, s := to.Whole()
	hosts = slices.DeleteFunc(slices.Clone(hosts), func(a string) bool { return !d.Contains(xtest.Addr(a)) })
	dst = drawAddr(t, hosts[:max(1, len(hosts)*3/4)], "to")
	src = drawAddr(t, slices.DeleteFunc(slices.Clone(sources), func(a string) bool { return !s.Contains(xtest.Addr(a)) }), "from")
	return src, dst
}

func drawInner4(t *rapid.T, to *model.Match) []byte {
	src, dst := drawAddrs(t, to, fuzzSources4, fuzzHosts4)
	h := srv6.IPv4{
		TOS: rapid.SampledFrom([]uint8{0, 0xb9, 0xff, 2}).Draw(t, "tos"), ID: rapid.Uint16().Draw(t, "id"),
		Fragment: rapid.SampledFrom([]uint16{0, 0, 0, 0x4000, 0x2000, 100}).Draw(t, "fragment"),
		TTL:      rapid.SampledFrom(hopLimits).Draw(t, "ttl"), Protocol: rapid.SampledFrom([]uint8{6, 6, 17, 1, 50, 4, 41}).Draw(t, "protocol"),
		Source: src, Destination: dst,
		Options: make([]byte, 4*rapid.SampledFrom([]int{0, 0, 0, 0, 0, 1, 5, 10}).Draw(t, "options")),
	}
	for i := range h.Options {
		h.Options[i] = rapid.Byte().Draw(t, "option")
	}
	b, err := h.Append(nil, drawPayload(t))
	if err != nil {
		t.Fatal(err)
	}
	broken := rapid.IntRange(0, 24).Draw(t, "broken")
	switch broken {
	case 0: // another total length, and a checksum that is right for it
		binary.BigEndian.PutUint16(b[2:], rapid.SampledFrom([]uint16{0, 19, 20, 24, uint16(len(b) - 1), uint16(len(b) + 1), 65535}).Draw(t, "length"))
	case 1:
		b[0] = rapid.Byte().Draw(t, "version and header length")
	case 2:
		binary.BigEndian.PutUint16(b[10:], rapid.SampledFrom([]uint16{0, 0xffff, 0xfeff, 0x1234}).Draw(t, "checksum"))
		return b
	case 3, 4, 5: // as Ethernet pads
		return append(b, make([]byte, rapid.SampledFrom([]int{1, 6, 26}).Draw(t, "padding"))...)
	}
	if broken < 2 && 4*int(b[0]&15) <= len(b) {
		binary.BigEndian.PutUint16(b[10:], srv6.IPv4Checksum(b[:4*int(b[0]&15)]))
	}
	return b
}

// drawPayload has ports, and what a TCP header says of its length.
func drawPayload(t *rapid.T) []byte {
	payload := make([]byte, rapid.SampledFrom([]int{0, 1, 3, 4, 20, 52, 60, 160, 900, 1300}).Draw(t, "payload"))
	if len(payload) > 12 {
		payload[12] = rapid.SampledFrom([]uint8{0x50, 0x80, 0xf0, 0}).Draw(t, "tcp header length")
		port := rapid.OneOf(rapid.SampledFrom([]uint16{0, 1, 52, 53, 54, 1023, 1024, 65535}), rapid.Uint16())
		binary.BigEndian.PutUint16(payload, port.Draw(t, "source port"))
		binary.BigEndian.PutUint16(payload[2:], port.Draw(t, "destination port"))
	}
	return payload
}

func drawInner6(t *rapid.T, to *model.Match) []byte {
	h := srv6.Header{
		TrafficClass: rapid.SampledFrom([]uint8{0, 0xb9, 0xff}).Draw(t, "tc"), FlowLabel: rapid.SampledFrom([]uint32{0, 0xfffff}).Draw(t, "label"),
		HopLimit:   rapid.SampledFrom(hopLimits).Draw(t, "inner hop limit"),
		NextHeader: rapid.SampledFrom([]uint8{6, 6, 6, 17, 17, 17, 58, 59, 44, 41, 43, 0, 60, 51, 132, 33, 136}).Draw(t, "inner next header"),
	}
	h.Source, h.Destination = drawAddrs(t, to, fuzzSources, fuzzHosts)
	payload := drawPayload(t)
	extensions := []uint8{43, 0, 60, 51, 44}
	for at := 0; slices.Contains(extensions, h.NextHeader) && at+8 <= len(payload) && at < 48; at += 8 { // options, and a routing header perhaps
		payload[at] = rapid.SampledFrom([]uint8{17, 60, 43, 51, 44}).Draw(t, "header behind")
		payload[at+1] = rapid.SampledFrom([]uint8{0, 0, 0, 1, 15, 31, 255}).Draw(t, "its length")
		payload[at+2] = rapid.SampledFrom([]uint8{4, 2}).Draw(t, "routing type")
		if payload[at] == 17 {
			break
		}
	}
	if h.NextHeader == 58 && len(payload) >= 48 && rapid.Bool().Draw(t, "an error about something") {
		payload[0] = rapid.SampledFrom([]uint8{1, 2, 3, 4, 127, 128, 137}).Draw(t, "ICMPv6 type")
		about := drawAddr(t, fuzzHosts, "about").As16()
		copy(payload[8+24:], about[:])
	}
	h.PayloadLength = uint16(len(payload) + rapid.SampledFrom(innerLengths).Draw(t, "more than there is"))
	b, err := h.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return append(b, payload...)
}

// drawOpening is a SYN for a path, and the path's headend.
func (w fuzzWorld) drawOpening(t *rapid.T) ([]byte, int) {
	p := rapid.SampledFrom(w.paths).Draw(t, "towards")
	segment := drawSYN(t)
	hops := rapid.SampledFrom([]uint8{64, 64, 64, 64, 2, 1}).Draw(t, "hops")
	if p.match.Is4() {
		h := srv6.IPv4{
			Fragment: rapid.SampledFrom([]uint16{0, 0, 0, 0, 0x4000, 0x2000, 100}).Draw(t, "fragment"), TTL: hops, Protocol: 6,
			Options: make([]byte, 4*rapid.SampledFrom([]int{0, 0, 0, 1, 10}).Draw(t, "options")),
		}
		h.Source, h.Destination = drawAddrs(t, &p.match, fuzzSources4, fuzzHosts4)
		b, err := h.Append(nil, segment)
		if err != nil {
			t.Fatal(err)
		}
		if rapid.IntRange(0, 9).Draw(t, "pads") == 9 {
			b = append(b, make([]byte, 6)...)
		}
		return framed(srv6.EtherTypeIPv4, b), p.visits[0]
	}
	h := srv6.Header{HopLimit: hops}
	h.Source, h.Destination = drawAddrs(t, &p.match, fuzzSources, fuzzHosts)
	h.NextHeader, segment = drawBehind(t, 6, segment)
	h.PayloadLength = uint16(len(segment))
	if rapid.IntRange(0, 19).Draw(t, "payload length") == 19 {
		h.PayloadLength -= uint16(rapid.IntRange(0, len(segment)).Draw(t, "less"))
	}
	b, err := h.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return framed(srv6.EtherTypeIPv6, append(b, segment...)), p.visits[0]
}

// drawSYN is a TCP segment that says an MSS, mostly: at any offset, more than
// once, in options that are not whole or in a header that is not.
func drawSYN(t *rapid.T) []byte {
	var options []byte
	for range rapid.SampledFrom([]int{1, 1, 2, 3, 5, 12}).Draw(t, "options of TCP") {
		if len(options) > 40 {
			break
		}
		switch rapid.SampledFrom([]int{2, 2, 2, 2, 1, 1, 3, 4, 8, 0, 98, 99}).Draw(t, "option of TCP") {
		case 2:
			mss := rapid.SampledFrom([]uint16{8940, 1440, 1221, 1220, 537, 536, 535, 1441, 65535, 2, 1, 0}).Draw(t, "says")
			options = append(options, 2, 4, byte(mss>>8), byte(mss))
		case 0, 1: // end, and nothing
			options = append(options, rapid.SampledFrom([]byte{1, 1, 1, 0}).Draw(t, "padding"))
		case 3:
			options = append(options, 3, 3, 7)
		case 4:
			options = append(options, 4, 2)
		case 8:
			options = append(options, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0)
		case 98: // of a length that it does not have
			options = append(options, 2, rapid.SampledFrom([]byte{0, 1, 2, 3, 5, 6, 40, 255}).Draw(t, "length of an option"), 255, 255)
		case 99:
			options = append(options, rapid.Byte().Draw(t, "some option"), rapid.ByteRange(0, 12).Draw(t, "its length"))
		}
	}
	options = options[:min(40, len(options))]
	for len(options)%4 != 0 {
		options = append(options, rapid.SampledFrom([]byte{0, 1, 2}).Draw(t, "padding"))
	}
	b := make([]byte, 20, 20+len(options)+100)
	binary.BigEndian.PutUint16(b, rapid.Uint16().Draw(t, "source port"))
	binary.BigEndian.PutUint16(b[2:], rapid.SampledFrom([]uint16{53, 80, 1024}).Draw(t, "destination port"))
	b[12] = uint8(20+len(options)) << 2
	if rapid.IntRange(0, 14).Draw(t, "another header length") == 14 {
		b[12] = rapid.Byte().Draw(t, "tcp header length")
	}
	b[13] = rapid.SampledFrom([]uint8{2, 2, 2, 0x12, 0x12, 0xc2, 0x10, 0xff}).Draw(t, "flags")
	binary.BigEndian.PutUint16(b[16:], rapid.OneOf(rapid.SampledFrom([]uint16{0, 0xffff, 0xfffe}), rapid.Uint16()).Draw(t, "tcp checksum"))
	b = append(b, options...)
	switch rapid.IntRange(0, 9).Draw(t, "segment") {
	case 0:
		b = b[:rapid.IntRange(0, len(b)).Draw(t, "cut")]
	case 1, 2: // with data, as of Fast Open
		b = append(b, make([]byte, rapid.SampledFrom([]int{1, 8, 100}).Draw(t, "data"))...)
	}
	return b
}

// drawBehind puts extension headers before what is next, sometimes: whole ones.
func drawBehind(t *rapid.T, next uint8, b []byte) (uint8, []byte) {
	for range rapid.SampledFrom([]int{0, 0, 0, 0, 1, 2, 4, 5}).Draw(t, "extension headers") {
		length := rapid.SampledFrom([]int{0, 0, 0, 1, 7, 15}).Draw(t, "length of one")
		x := make([]byte, 8*(length+1))
		x[0], x[1] = next, uint8(length)
		next = rapid.SampledFrom([]uint8{0, 60, 60, 43, 51, 44}).Draw(t, "kind of one")
		if next == 51 {
			x[1] = uint8(2 * length) // in units of 4 bytes, and not the first two
		}
		b = append(x, b...)
	}
	return next, b
}

func framed(etherType uint16, b []byte) []byte {
	f := append(append([]byte{}, rigMAC[:]...), 2, 0, 0, 0, 0, 1)
	return append(binary.BigEndian.AppendUint16(f, etherType), b...)
}

// drawPlain is a packet for a path, and the path's headend.
func (w fuzzWorld) drawPlain(t *rapid.T) ([]byte, int) {
	p := rapid.SampledFrom(w.paths).Draw(t, "towards")
	b, v4 := drawInner(t, &p.match)
	if v4 {
		return framed(srv6.EtherTypeIPv4, b), p.visits[0]
	}
	return framed(srv6.EtherTypeIPv6, b), p.visits[0]
}

// drawOther: not IPv6, or hardly.
func drawOther(t *rapid.T) []byte {
	kind := rapid.SampledFrom([]uint16{0x0800, 0x0800, 0x0806, srv6.EtherTypeIPv6, 0x88cc, 0x8100}).Draw(t, "ethertype")
	b := rapid.SliceOfN(rapid.Byte(), 40, 90).Draw(t, "bytes")
	if kind == 0x0800 {
		b[0] = 0x45
		copy(b[16:], rapid.SampledFrom([][]byte{{192, 0, 2, 1}, {198, 51, 100, 1}}).Draw(t, "to"))
	}
	return framed(kind, b)
}

// drawOnPath is a packet of a path as it comes to one of its segments, and the
// node of that.
func (w fuzzWorld) drawOnPath(t *rapid.T) ([]byte, int) {
	p := rapid.SampledFrom(w.paths).Draw(t, "path")
	at := rapid.IntRange(1, len(p.segments)).Draw(t, "position")
	id := p.PathID
	rnd := drawRND(t)
	order := slices.Clone(p.shares[:at])
	list := slices.Clone(p.list())
	destination, left := p.arrival(at)
	if p.Encapsulation.Reduced && len(list) > 1 {
		list = list[1:]
	}
	tampered := rapid.IntRange(0, 29).Draw(t, "tampered")
	switch tampered {
	case 1: // a hop was left out
		i := rapid.IntRange(0, at-1).Draw(t, "skipped")
		order = slices.Delete(order, i, i+1)
	case 2: // two were swapped
		i, j := rapid.IntRange(0, at-1).Draw(t, "swapped"), rapid.IntRange(0, at-1).Draw(t, "with")
		order[i], order[j] = order[j], order[i]
	case 3:
		id.Epoch++
	case 4:
		id.Path = rapid.SampledFrom(w.paths).Draw(t, "another path").Path
	case 5:
		id.Scheme = rapid.SampledFrom([]model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow, 77}).Draw(t, "another scheme")
	case 6:
		list[rapid.IntRange(0, len(list)-1).Draw(t, "segment")] = drawAddr(t, fuzzHosts, "another")
	case 7:
		list = append(list, list[len(list)-1])
	case 8: // reduced once more
		list = list[1:]
	case 9:
		left = rapid.IntRange(0, len(list)+2).Draw(t, "segments left")
	}
	carried, v4 := drawInner(t, &p.match)
	stamped := carried
	if tampered == 20 { // its proof was put on another packet
		carried, v4 = drawInner(t, &p.match)
	}
	v := pot.Values{RND: rnd}
	if steps := pot.WalkFlow(p.Header(), rnd, flowOf(stamped), order...); len(steps) > 0 {
		v = steps[len(steps)-1].WireOut
	}
	switch tampered {
	case 10:
		v.CML ^= 1 << rapid.IntRange(0, 63).Draw(t, "bit")
	case 11:
		v.RND ^= 1 << rapid.IntRange(0, 63).Draw(t, "bit")
	case 12: // right, but not below the prime
		if q := p.shares[at].Polynomial; q.Prime != 0 {
			v = q.Up.Of(v)
			if v.CML < 1<<63 {
				v.CML += q.Prime
			}
			v = q.Up.Of(v)
		}
	}
	if len(list) == 0 {
		list = []netip.Addr{p.segments[at-1]}
	}

	next := uint8(srv6.NextHeaderIPv6)
	if v4 {
		next = srv6.NextHeaderIPv4
	}
	out := srv6.Packet{
		Ethernet: &srv6.Ethernet{Destination: rigMAC, Type: srv6.EtherTypeIPv6},
		Header: srv6.Header{
			TrafficClass: rapid.Byte().Draw(t, "outer tc"), FlowLabel: rapid.Uint32Range(0, 0xfffff).Draw(t, "outer label"),
			HopLimit: rapid.SampledFrom(hopLimits).Draw(t, "hop limit"),
			Source:   rapid.SampledFrom(p.sources).Draw(t, "outer source"), Destination: destination,
		},
		SRH: &srv6.SRH{
			NextHeader: next, SegmentsLeft: uint8(left), Segments: srv6.Reversed(list),
			TLVs: []srv6.TLV{srv6.Proof{Scheme: id.Scheme, Epoch: id.Epoch, Path: id.Path, RND: v.RND, CML: v.CML}.TLV()},
		},
		Payload: carried,
	}
	dst := out.Header.Destination.As16()
	switch tampered {
	case 14:
		if len(out.Payload) > 0 {
			out.Payload[0] ^= 0x20 // its version
		}
	case 15:
		out.Payload = out.Payload[:rapid.IntRange(0, len(out.Payload)).Draw(t, "cut")]
	case 16:
		out.SRH.NextHeader = rapid.SampledFrom([]uint8{4, 41, 59, 17, 143}).Draw(t, "inner protocol")
	case 17:
		dst[7] ^= 0x3f // mostly a SID that nobody has
	case 18, 19:
		dst[15] = 7 // an argument
	case 23: // one that is not there, or one bit of it
		binary.BigEndian.PutUint64(dst[8:], binary.BigEndian.Uint64(dst[8:])&rapid.SampledFrom([]uint64{0, 1<<32 - 2, ^uint64(1) >> 1}).Draw(t, "argument's bits"))
	case 24:
		dst[rapid.IntRange(8, 15).Draw(t, "argument's byte")] ^= 1 << rapid.IntRange(0, 7).Draw(t, "its bit")
	case 22:
		out.Header.Source = drawAddr(t, outerSources, "stranger")
	case 20: // other C-SIDs, of which the first may be zero
		copy(dst[8:], rapid.SliceOfN(rapid.SampledFrom([]byte{0, 0, 1, 0x40, 0xff}), 8, 8).Draw(t, "argument"))
	case 21: // to the same SID again and again
		for i := 8; i < len(dst); i++ {
			dst[i] = dst[6+i%2]
		}
		n := rapid.IntRange(1, model.SegmentsMax).Draw(t, "containers")
		out.SRH.Segments, out.SRH.SegmentsLeft = slices.Repeat([]netip.Addr{netip.AddrFrom16(dst)}, n), uint8(n)
	}
	out.Header.Destination = netip.AddrFrom16(dst)
	out.SRH.TLVs = append(drawTLVs(t, "before"), append(out.SRH.TLVs, drawTLVs(t, "behind")...)...)
	if tampered == 13 { // off its boundary
		pads := slices.Repeat([]srv6.TLV{{Type: srv6.TLVPad1}}, 8)
		n := rapid.IntRange(1, 7).Draw(t, "off by")
		out.SRH.TLVs = slices.Concat(pads[:n], out.SRH.TLVs, pads[n:])
	}
	if err := out.Fix(); err != nil {
		t.Fatal(err)
	}
	b, err := out.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	if rapid.IntRange(0, 5).Draw(t, "options before the SRH") == 5 {
		b = drawOptions(t, b)
	}
	return b, p.visits[at]
}

// drawOptions puts extension headers behind the IPv6 header of a frame, mostly such
// as are taken there.
func drawOptions(t *rapid.T, frame []byte) []byte {
	const at, hopByHop, destination = srv6.EthernetLen + srv6.IPv6Len, srv6.NextHeaderHopByHop, srv6.NextHeaderDestination
	kinds := rapid.SampledFrom([][]uint8{
		{hopByHop}, {hopByHop}, {destination}, {destination}, {hopByHop, destination}, {hopByHop, destination},
		{destination, destination}, {destination, hopByHop}, {hopByHop, hopByHop}, {hopByHop, destination, destination}, {destination, 44},
	}).Draw(t, "extension headers")
	var all []byte
	next := rapid.SampledFrom([]uint8{43, 43, 43, 43, 43, 43, 43, 43, 43, 43, 43, 43, 43, 43, 43, 41, 44, 17, 0, 60}).Draw(t, "behind them")
	for i := len(kinds) - 1; i >= 0; i-- {
		h := append([]byte{next, 0}, drawOptionBytes(t)...)
		h[1] = uint8(len(h)/8 - 1)
		all, next = append(h, all...), kinds[i]
	}
	b := slices.Concat(frame[:at], all, frame[at:])
	b[srv6.EthernetLen+6] = next
	length := binary.BigEndian.Uint16(b[srv6.EthernetLen+4:])
	binary.BigEndian.PutUint16(b[srv6.EthernetLen+4:], length+uint16(len(all)))
	switch rapid.IntRange(0, 19).Draw(t, "damaged options") {
	case 0:
		b[at+1] = rapid.Byte().Draw(t, "another length")
	case 1:
		b[at+2+rapid.IntRange(0, len(all)-3).Draw(t, "where")] = rapid.Byte().Draw(t, "what")
	case 2:
		b = b[:at+rapid.IntRange(0, len(all)+8).Draw(t, "cut")]
		binary.BigEndian.PutUint16(b[srv6.EthernetLen+4:], uint16(len(b)-at))
	}
	return b
}

// drawOptionBytes are options that fill a header behind its first two bytes.
func drawOptionBytes(t *rapid.T) (b []byte) {
	for range rapid.SampledFrom([]int{0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 31, 34}).Draw(t, "options") {
		switch kind := rapid.SampledFrom([]uint8{0, 0, 1, 0x11, 0x31, 0x3e, 0x3e, 0x1e, 0x5e, 0x9e, 0xde}).Draw(t, "option"); {
		case kind == 0:
			b = append(b, 0)
		case kind > 0x3f && rapid.IntRange(0, 7).Draw(t, "known") > 0: // rarely one that nobody may pass over
		default:
			n := rapid.SampledFrom([]int{0, 1, 2, 4, 12, 28, 70}).Draw(t, "length")
			b = append(append(b, kind, uint8(n)), make([]byte, n)...)
		}
	}
	for len(b)%8 != 6 { // Pad1
		b = append(b, 0)
	}
	return b[:min(len(b), 8*255+6)]
}

// flowOf is what the proof of a packet is bound to; of one that has no readable
// flow, anything.
func flowOf(inner []byte) pot.Flow {
	next := uint8(srv6.NextHeaderIPv6)
	if len(inner) > 0 && inner[0]>>4 == 4 {
		next = srv6.NextHeaderIPv4
	}
	f, _ := srv6.ReadFlow(next, inner)
	return pot.Flow{
		Source: f.Source, Destination: f.Destination, Protocol: f.Protocol,
		SourcePort: f.SourcePort, DestinationPort: f.DestinationPort,
	}
}

// drawTLVs are mostly none, and together a multiple of eight bytes.
func drawTLVs(t *rapid.T, where string) []srv6.TLV {
	pad1 := srv6.TLV{Type: srv6.TLVPad1}
	switch rapid.IntRange(0, 39).Draw(t, "TLVs "+where) {
	case 10:
		return slices.Repeat([]srv6.TLV{pad1}, 8*rapid.IntRange(1, 13).Draw(t, "Pad1"))
	case 11:
		return []srv6.TLV{{Type: srv6.TLVPadN, Value: make([]byte, 5)}, pad1}
	case 12:
		return []srv6.TLV{{Type: 0x80, Value: []byte{252, 22, 0, 0, 0, 0}}}
	case 13:
		return []srv6.TLV{{Type: srv6.TLVHMAC, Value: make([]byte, 38)}}
	case 14:
		return []srv6.TLV{pad1, {Type: 0x7e, Value: make([]byte, 5)}}
	case 15:
		return []srv6.TLV{srv6.Proof{Scheme: model.SchemeKeyed, Path: 0x01010101}.TLV()}
	}
	return nil
}

// The programs and the oracle are given the same worlds and packets, and must
// do the same. A failure is repeated with the -rapid.seed that it names.
//
// Each worker has worlds of its own, and nodes of its own on one CPU: a headend
// counts by CPU. There are two workers for each, since one waits for the kernel
// before every world.
func TestProgramsDoWhatTheOracleSays(t *testing.T) {
	t.Parallel()
	goal := fuzzPackets
	if s := os.Getenv("WAYSTAMP_FUZZ_PACKETS"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			t.Fatalf("WAYSTAMP_FUZZ_PACKETS is %q; want a number of packets", s)
		}
		goal = n
	}
	pool := newSecretPool(t)
	cpus := runtime.NumCPU()
	workers := min(2*cpus, fuzzWorkers)
	counts := make([]fuzzCount, workers)
	start := time.Now()
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			t.Run(strconv.Itoa(i), func(t *testing.T) { counts[i] = fuzz(t, pool, i%cpus, goal/workers) })
		})
	}
	all.Wait()
	done := newFuzzCount()
	for _, c := range counts {
		done.add(c)
	}
	t.Logf("%d packets in %d worlds in %s; XDP finished %d; %d answered; %d with another MSS; %d with options taken; %d marked; verdicts %v; reasons %v", done.packets, done.worlds, time.Since(start).Round(time.Millisecond), done.xdp, done.answered, done.clamped, done.optioned, done.marked, done.verdicts, done.reasons)
	done.judge(t)
}

// fuzzWorkers is how many there are at most: each has programs of its own to load.
const fuzzWorkers = 4

func fuzz(t *testing.T, pool secretPool, cpu, goal int) fuzzCount {
	var rigs []*rig
	for _, s := range fuzzSpecs {
		s.cpu = cpu
		rigs = append(rigs, newRig(t, s))
	}
	done := newFuzzCount()
	for done.packets < goal && !t.Failed() {
		rapid.Check(t, func(rt *rapid.T) {
			w := drawWorld(rt, pool)
			frames := rapid.SliceOfN(w.frames(), 300, 600).Draw(rt, "packets")
			if err := w.run(rigs, frames, &done); err != nil {
				rt.Fatal(err)
			}
		})
	}
	return done
}

// fuzzCount shows that the packets were good for something.
type fuzzCount struct {
	packets, worlds, xdp int
	answered             int // by an ICMP error
	clamped              int // SYNs
	optioned             int // taken with options before the SRH
	marked               int // taken by a function, with a mark
	audited              int // by either guard
	verdicts             map[oracle.Verdict]int
	reasons              map[oracle.Reason]int
}

func newFuzzCount() fuzzCount {
	return fuzzCount{verdicts: map[oracle.Verdict]int{}, reasons: map[oracle.Reason]int{}}
}

func (c *fuzzCount) add(o fuzzCount) {
	c.packets, c.worlds, c.xdp = c.packets+o.packets, c.worlds+o.worlds, c.xdp+o.xdp
	c.answered, c.clamped, c.optioned, c.marked = c.answered+o.answered, c.clamped+o.clamped, c.optioned+o.optioned, c.marked+o.marked
	c.audited += o.audited
	for k, n := range o.verdicts {
		c.verdicts[k] += n
	}
	for k, n := range o.reasons {
		c.reasons[k] += n
	}
}

func (w fuzzWorld) run(rigs []*rig, frames []fuzzFrame, done *fuzzCount) error {
	// At the same time, since each waits for the kernel to wait for programs.
	var prepare errgroup.Group
	for i, r := range rigs {
		prepare.Go(func() error { return w.prepare(r, i) })
	}
	if err := prepare.Wait(); err != nil {
		return err
	}
	for i, r := range rigs {
		if err := r.in(func() error {
			labels := &oracle.Labels{}
			for _, f := range frames {
				if f.node != i {
					continue
				}
				if err := f.check(r, labels, done); err != nil {
					return err
				}
			}
			for _, h := range r.have.Headends {
				if err := r.checkNumber(h, 0); err != nil {
					return fmt.Errorf("a number was used that no packet has: %w", err)
				}
			}
			r.entries = 0
			return r.checkMoved("after all packets, entries that no path has", moved{})
		}); err != nil {
			r.entries = 0
			return errors.Join(err, r.recount())
		}
	}
	done.worlds++
	return nil
}

// prepare makes a rig the world's node i.
func (w fuzzWorld) prepare(r *rig, i int) error {
	r.guards = w.guards[i]
	if err := r.apply(w.nodes[i]); err != nil {
		return fmt.Errorf("plan of %s: %w", r.spec.name, err)
	}
	r.entries = 1
	for _, h := range r.have.Headends {
		r.entries = max(r.entries, int(h.Stats)+1)
	}
	for _, h := range r.have.Hops {
		r.entries = max(r.entries, int(h.Stats)+1)
	}
	if err := errors.Join(r.setNumbers(w.number), r.tell(w.told)); err != nil {
		return err
	}
	for k := range r.windows {
		if err := r.see(k, w.seen[k]); err != nil {
			return err
		}
	}
	return nil
}

// check gives the frame to all programs that it can come to, and then looks at
// what they have counted together.
func (f fuzzFrame) check(r *rig, labels *oracle.Labels, done *fuzzCount) error {
	s, err := r.check(f.frame, labels, false)
	if err != nil || f.truncated() {
		return err
	}
	reason, left, err := r.checkLeaves(f.frame, f.leaving)
	if err != nil {
		return err
	}
	s.moved.dropped = append(s.moved.dropped, left.dropped...)
	s.moved.reported = append(s.moved.reported, left.reported...)
	if err := r.checkMoved("TC, XDP and TC egress", s.moved); err != nil {
		return r.describe(fmt.Errorf("%w\non its way out, from %d, index %d, the oracle says %s", err, f.leaving.From, leaveIndex(f.leaving), reason), f.frame, s.want)
	}
	done.reasons[reason]++
	done.packets++
	done.verdicts[s.want.Verdict]++
	done.reasons[s.want.Reason]++
	if s.want.Error != nil {
		done.answered++
	}
	if s.want.Clamped {
		done.clamped++
	}
	if s.took {
		done.xdp++
	}
	if s.want.Mark != 0 {
		done.marked++
	}
	if slices.Contains(s.want.Reported, oracle.Unproven) || len(left.reported) > 0 {
		done.audited++
	}
	if len(s.want.Visits) > 0 && f.port == portCore && (f.b[srv6.EthernetLen+6] == srv6.NextHeaderHopByHop || f.b[srv6.EthernetLen+6] == srv6.NextHeaderDestination) {
		done.optioned++
	}
	return nil
}

// recount makes the rig forget a packet that failed.
func (r *rig) recount() error {
	_, err := r.counted()
	return err
}

// judge fails where the packets would not show much.
func (c fuzzCount) judge(t *testing.T) {
	if t.Failed() {
		return
	}
	if c.packets < fuzzPackets/2 {
		return // chance alone could leave something out
	}
	for v := oracle.Pass; v <= oracle.Deliver; v++ {
		if c.verdicts[v] < c.packets/10000 {
			t.Errorf("only %d of %d packets came to %s", c.verdicts[v], c.packets, v)
		}
	}
	if c.audited < c.packets/200 {
		t.Errorf("only %d of %d packets were audited", c.audited, c.packets)
	}
	if c.answered < c.packets/50 {
		t.Errorf("only %d of %d packets were answered by an ICMP error", c.answered, c.packets)
	}
	if c.clamped < c.packets/500 {
		t.Errorf("only %d of %d packets had their MSS lowered", c.clamped, c.packets)
	}
	if c.optioned < c.packets/200 {
		t.Errorf("only %d of %d packets were taken with options before their SRH", c.optioned, c.packets)
	}
	if c.marked < c.packets/200 {
		t.Errorf("only %d of %d packets came to a function with an argument", c.marked, c.packets)
	}
	if c.xdp < c.packets/20 {
		t.Errorf("XDP finished only %d of %d packets", c.xdp, c.packets)
	}
	for _, x := range append(oracle.Reasons(), "PUSH_FAILED", "STRIP_FAILED") {
		switch x {
		case oracle.Truncated, oracle.EdgeTruncated, oracle.LeaveTruncated, oracle.TrainTooBig, oracle.NoLane: // not in a test run; see the tests of reasons
		case oracle.HeaderTooLong: // rare
		case oracle.OutsideError: // one packet of 80 000
			if c.reasons[x] == 0 && c.packets > 1_000_000 {
				t.Errorf("no packet of %d was refused for %s", c.packets, x)
			}
		default:
			if c.reasons[x] == 0 {
				t.Errorf("no packet of %d was refused for %s", c.packets, x)
			}
		}
	}
}
