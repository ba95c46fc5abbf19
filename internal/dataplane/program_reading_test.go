package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
)

// reading is what a receiver made of a datagram.
type reading struct {
	Protocol     model.Protocol
	Sport, Dport uint16
}

// receiver is a Linux host with open ports behind a plain router, and who sends to
// it: what its sockets get is what a datagram is.
type receiver struct {
	wire        int // a socket for frames at the sender
	mac, router [6]byte
	udp         map[uint16]int // sockets, by their ports
	echoes      uint32
}

const (
	rxSender4, rxHost4 = "203.0.113.9", "198.51.100.2"
	rxSender6, rxHost6 = "fc00:7::2", "fc00:8::2"
)

var rxPorts = []uint16{442, 443, 444}

func newReceiver(t *testing.T) *receiver {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var nets []*host.Net
	for range 3 {
		ns, err := host.Anonymous()
		must(err)
		n, err := host.Open(ns)
		must(err)
		t.Cleanup(func() { must(errors.Join(n.Close(), ns.Close())) })
		nets = append(nets, n)
	}
	sender, router, end := nets[0], nets[1], nets[2]
	must(router.AddVeth(host.Veth{Name: "left", PeerName: "eth", Peer: sender.NetNS()}))
	must(router.AddVeth(host.Veth{Name: "right", PeerName: "eth", Peer: end.NetNS()}))
	for _, key := range []string{"net/ipv6/conf/all/forwarding", "net/ipv4/conf/all/forwarding"} {
		must(router.SetSysctl(key, "1"))
	}
	for _, x := range []struct {
		n       *host.Net
		link    string
		address []string
		gateway []string
	}{
		{router, "left", []string{"fc00:7::1/64", "203.0.113.1/24"}, nil},
		{router, "right", []string{"fc00:8::1/64", "198.51.100.1/24"}, nil},
		{sender, "eth", []string{rxSender6 + "/64", rxSender4 + "/24"}, []string{"fc00:7::1", "203.0.113.1"}},
		{end, "eth", []string{rxHost6 + "/64", rxHost4 + "/24"}, []string{"fc00:8::1", "198.51.100.1"}},
	} {
		must(x.n.SetSysctl("net/ipv6/conf/"+x.link+"/accept_dad", "0"))
		must(x.n.SetUp(x.link))
		for _, a := range x.address {
			must(x.n.AddAddress(x.link, netip.MustParsePrefix(a)))
		}
		for _, g := range x.gateway {
			all := netip.PrefixFrom(netip.IPv6Unspecified(), 0)
			if netip.MustParseAddr(g).Is4() {
				all = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
			}
			must(x.n.AddRoute(host.Route{Destination: all, Via: netip.MustParseAddr(g), Device: x.link}))
		}
	}
	for _, n := range []*host.Net{sender, end} {
		must(n.WaitUp(t.Context(), "eth"))
	}
	must(router.WaitUp(t.Context(), "left", "right"))

	r := &receiver{udp: map[uint16]int{}}
	left, err := router.Link("left")
	must(err)
	r.router = left.MAC
	eth, err := sender.Link("eth")
	must(err)
	r.mac = eth.MAC
	must(sender.NetNS().Do(func() (err error) {
		r.wire, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		limit := unix.NsecToTimeval(waitLimit.Nanoseconds())
		return errors.Join(unix.SetsockoptTimeval(r.wire, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
			unix.Bind(r.wire, &unix.SockaddrLinklayer{Ifindex: eth.Index, Protocol: unix.ETH_P_ALL << 8}))
	}))
	t.Cleanup(func() { unix.Close(r.wire) })
	must(end.NetNS().Do(func() error {
		for _, port := range rxPorts {
			for _, kind := range []int{unix.SOCK_DGRAM, unix.SOCK_STREAM} {
				fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
				if err != nil {
					return err
				}
				t.Cleanup(func() { unix.Close(fd) })
				if err := unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}); err != nil {
					return err
				}
				if kind == unix.SOCK_DGRAM {
					r.udp[port] = fd
				} else if err := unix.Listen(fd, 16); err != nil {
					return err
				}
			}
		}
		return nil
	}))
	return r
}

// read sends the frames of one datagram, which has a number of its own in its payload, or
// as its sequence number, and says what the host read, or nothing.
func (r *receiver) read(frames [][]byte, wanted uint32) (got *reading, err error) {
	r.echoes++
	last := 0x5eed0000 + r.echoes
	for _, b := range append(slices.Clone(frames), echoPacket(last)) {
		b = slices.Concat(r.router[:], r.mac[:], b[12:])
		if _, err := unix.Write(r.wire, b); err != nil {
			return nil, err
		}
	}
	// What was sent before the last request has been read when that is answered.
	for answered, b := false, make([]byte, 4096); !answered; {
		n, err := unix.Read(r.wire, b)
		if err != nil {
			return nil, fmt.Errorf("wait for the last answer: %w", err)
		}
		if n < srv6.EthernetLen+20 || [6]byte(b[6:]) != r.router {
			continue
		}
		ip, at, protocol := b[srv6.EthernetLen:n], 20, b[srv6.EthernetLen+9]
		if ip[0]>>4 == 6 {
			at, protocol = srv6.IPv6Len, ip[6]
		}
		if len(ip) < at+12 {
			continue
		}
		l4 := ip[at:]
		number := func() uint32 { return binary.BigEndian.Uint32(l4[8:]) }
		switch {
		case protocol == 58 && l4[0] == 129 && number() == last:
			answered = true
		case protocol == 58 && l4[0] == 129, protocol == 1 && l4[0] == 0:
			if number() == wanted {
				got = &reading{Protocol: model.Protocol(protocol)}
			}
		case protocol == 6 && len(l4) >= 20 && l4[13] == 0x12 && number() == wanted+1:
			got = &reading{6, binary.BigEndian.Uint16(l4[2:]), binary.BigEndian.Uint16(l4)}
		}
	}
	for port, fd := range r.udp {
		for b := make([]byte, 4096); ; {
			n, from, err := unix.Recvfrom(fd, b, 0)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				return nil, err
			}
			if n >= 4 && binary.BigEndian.Uint32(b) == wanted {
				got = &reading{17, uint16(from.(*unix.SockaddrInet6).Port), port}
			}
		}
	}
	return got, nil
}

// checksummed writes the checksum of an upper layer that has it at this offset.
func checksummed(l4 []byte, at int, protocol uint8, from, to netip.Addr) []byte {
	pseudo := slices.Concat(from.AsSlice(), to.AsSlice(), binary.BigEndian.AppendUint32(nil, uint32(len(l4))), []byte{0, 0, 0, protocol})
	if len(l4)%2 != 0 {
		panic("an odd length")
	}
	if protocol == 1 {
		pseudo = nil
	}
	binary.BigEndian.PutUint16(l4[at:], sumOf(append(pseudo, l4...)))
	return l4
}

func echoPacket(number uint32) []byte {
	from, to := xtest.Addr(rxSender6), xtest.Addr(rxHost6)
	l4 := checksummed(binary.BigEndian.AppendUint32([]byte{128, 0, 0, 0, 0, 1, 0, 1}, number), 2, 58, from, to)
	return framed(srv6.EtherTypeIPv6, ip6Packet(from, to, 58, l4))
}

func ip6Packet(from, to netip.Addr, next uint8, payload []byte) []byte {
	h := srv6.Header{NextHeader: next, HopLimit: 64, PayloadLength: uint16(len(payload)), Source: from, Destination: to}
	b, err := h.Append(nil)
	if err != nil {
		panic(err)
	}
	return append(b, payload...)
}

// drawUpperLayer is what somebody outside wants to get to the host: a datagram, a
// SYN or an echo request, with the number in it.
func drawUpperLayer(t *rapid.T, from, to netip.Addr, number uint32) (protocol uint8, l4 []byte) {
	dport := rapid.SampledFrom(rxPorts).Draw(t, "destination port")
	l4 = binary.BigEndian.AppendUint16(nil, rapid.SampledFrom([]uint16{1, 2, 443, 65535}).Draw(t, "source port"))
	l4 = binary.BigEndian.AppendUint16(l4, dport)
	switch protocol = rapid.SampledFrom([]uint8{6, 17, 58}).Draw(t, "protocol"); protocol {
	case 6:
		l4 = binary.BigEndian.AppendUint32(l4, number)
		l4 = append(l4, 0, 0, 0, 0, 0x50, 2, 0x40, 0, 0, 0, 0, 0)
		return protocol, checksummed(l4, 16, 6, from, to)
	case 17:
		l4 = append(l4, 0, 32, 0, 0)
		l4 = append(binary.BigEndian.AppendUint32(l4, number), make([]byte, 20)...)
		return protocol, checksummed(l4, 6, 17, from, to)
	}
	kind := uint8(128)
	if from.Is4() {
		protocol, kind = 1, 8
	}
	l4 = append(binary.BigEndian.AppendUint32([]byte{kind, 0, 0, 0, 0, 1, 0, 1}, number), make([]byte, 20)...)
	return protocol, checksummed(l4, 2, protocol, from, to)
}

// drawHeaders puts some headers in front of a packet's rest, of which next says
// what it is, and says what the first one is.
func drawHeaders(t *rapid.T, what string, next uint8, rest []byte) (uint8, []byte) {
	for range rapid.SampledFrom([]int{0, 0, 1, 1, 2, 3, 5}).Draw(t, what) {
		kind := rapid.SampledFrom([]uint8{60, 60, 60, 60, 43, 43, 0, 51, 135, 139, 140, 200, 253, 254}).Draw(t, "header")
		units := rapid.SampledFrom([]int{1, 1, 1, 2, 3, 17}).Draw(t, "units of 8")
		b := append([]byte{next, byte(units - 1), 1, byte(8*units - 4)}, make([]byte, 8*units-4)...) // PadN
		switch kind {
		case 43: // no segments left
			b[2], b[3] = rapid.SampledFrom([]byte{0, 2, 3, 253}).Draw(t, "type"), 0
		case 51:
			b[1] = byte(2*units - 2)
		}
		next, rest = kind, append(b, rest...)
	}
	return next, rest
}

// drawDatagram6 is a datagram of IPv6 behind whatever headers, in one packet or in
// several. The later ones may say anything of what they hold.
func drawDatagram6(t *rapid.T, number uint32) (frames [][]byte) {
	from, to := xtest.Addr(rxSender6), xtest.Addr(rxHost6)
	protocol, l4 := drawUpperLayer(t, from, to, number)
	next, rest := drawHeaders(t, "inner headers", protocol, l4)
	parts := [][]byte{rest}
	pieces := rapid.SampledFrom([]int{0, 0, 1, 1, 2, 2, 3}).Draw(t, "fragments")
	if pieces > 0 {
		parts = nil
		for at := 0; at < len(rest); {
			n := len(rest) - at
			if len(parts) < pieces-1 && n > 8 {
				n = 8 * rapid.IntRange(1, (n-1)/8).Draw(t, "length")
			}
			h := []byte{next, 0, byte(at >> 8), byte(at), 0, 0, 0, 0}
			binary.BigEndian.PutUint32(h[4:], number)
			if at > 0 {
				h[0] = rapid.SampledFrom([]byte{next, next, 6, 17, 58, 59, 60, 253}).Draw(t, "later one says")
			}
			if at+n < len(rest) {
				h[3] |= 1
			}
			parts, at = append(parts, append(h, rest[at:at+n]...)), at+n
		}
		next = 44
	}
	for i, b := range parts {
		first := next
		if rapid.IntRange(0, 3).Draw(t, "outer headers") == 0 {
			first, b = drawHeaders(t, "headers", next, b)
		}
		parts[i] = framed(srv6.EtherTypeIPv6, ip6Packet(from, to, first, b))
	}
	return parts
}

// drawDatagram4 is one of IPv4.
func drawDatagram4(t *rapid.T, number uint32) (frames [][]byte) {
	from, to := xtest.Addr(rxSender4), xtest.Addr(rxHost4)
	protocol, rest := drawUpperLayer(t, from, to, number)
	if rapid.IntRange(0, 5).Draw(t, "AH") == 0 {
		rest, protocol = append([]byte{protocol, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1}, rest...), 51
	}
	pieces := rapid.SampledFrom([]int{1, 1, 2, 3}).Draw(t, "fragments")
	for at := 0; at < len(rest); {
		n := len(rest) - at
		if len(frames) < pieces-1 && n > 8 {
			n = 8 * rapid.IntRange(1, (n-1)/8).Draw(t, "length")
		}
		h := []byte{0x45, 0, 0, 0, byte(number >> 8), byte(number), byte(at / 8 >> 8), byte(at / 8), 64, protocol, 0, 0}
		if at+n < len(rest) {
			h[6] |= 0x20
		}
		h = slices.Concat(h, from.AsSlice(), to.AsSlice())
		if rapid.IntRange(0, 3).Draw(t, "options") == 0 {
			h[0], h = 0x46, append(h, 1, 1, 1, 0)
		}
		binary.BigEndian.PutUint16(h[2:], uint16(len(h)+n))
		binary.BigEndian.PutUint16(h[10:], sumOf(h))
		frames, at = append(frames, framed(srv6.EtherTypeIPv4, append(h, rest[at:at+n]...))), at+n
	}
	return frames
}

// pair are a headend and an egress with the same rules, which is which path's by
// its place.
type pair struct {
	headend, egress *rig
	labels          oracle.Labels
}

// What becomes of a frame between them.
const (
	readPlain   = -1
	readRefused = -2
)

// takes gives a frame to the headend, and if that lets it by to the guard. Both
// hooks of both must do as the oracle says.
func (p *pair) takes(b []byte) (rule int, err error) {
	rule = readRefused
	for _, x := range []struct {
		r    *rig
		port string
	}{{p.headend, portEdge}, {p.egress, portCore}} {
		var got seen
		if err := x.r.in(func() (err error) {
			got, err = x.r.check(frame{port: x.port, b: b}, &p.labels, true)
			return err
		}); err != nil {
			return 0, err
		}
		switch got.want.Verdict {
		case oracle.Forward:
			return int(got.want.Visits[0].Path - 0x10000), nil
		case oracle.Drop:
			return readRefused, nil
		}
	}
	return readPlain, nil
}

// ruleOf is the rule that a datagram falls under as its receiver reads it: a search
// through the rules as they are written.
func ruleOf(rules []model.Match, v4 bool, read reading) int {
	from, to := xtest.Addr(rxSender6), xtest.Addr(rxHost6)
	if v4 {
		from, to = xtest.Addr(rxSender4), xtest.Addr(rxHost4)
	}
	in := func(p model.Ports, port uint16) bool {
		return p == model.Ports{} || p.First <= port && port <= p.Last
	}
	best := readPlain
	for i, m := range rules {
		if m.Is4() != v4 || !m.Covers(to, from) || m.Protocol != 0 && m.Protocol != read.Protocol ||
			!in(m.SourcePort, read.Sport) || !in(m.DestinationPort, read.Dport) {
			continue
		}
		if best < 0 || m.Ordered() && (!rules[best].Ordered() || m.Priority < rules[best].Priority) ||
			!m.Ordered() && !rules[best].Ordered() && m.Destination.Bits() > rules[best].Destination.Bits() {
			best = i
		}
	}
	return best
}

// readingDatagrams is how many datagrams are read three times; WAYSTAMP_READINGS
// sets another number.
const readingDatagrams = 2000

// Whatever headers somebody puts in front of a datagram, and however they cut it
// to pieces: if a Linux host behind a plain router gets it, then its packets have
// taken the chain that the datagram falls under as that host reads it, or one of
// them was refused. The programs, on both hooks, at the headend and at the guard,
// do what the Go model does.
func TestWhatAHostReadsHasTakenItsChain(t *testing.T) {
	t.Parallel()
	want := readingDatagrams
	if s, ok := os.LookupEnv("WAYSTAMP_READINGS"); ok {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatalf("WAYSTAMP_READINGS: %v", err)
		}
		want = n
	}
	p := pair{headend: newScapyRig(t, "r1"), egress: newScapyRig(t, "r6")}
	host := newReceiver(t)
	r1, r6 := p.headend.node.Node, p.egress.node.Node
	start, end := *startOf(&r1, "direct"), r6.Egresses[slices.IndexFunc(r6.Egresses, func(e plan.Egress) bool { return e.Chain == "direct" })]
	r1.Proxies, r6.Proxies = nil, nil
	number := uint32(0x10000000)
	count := map[string]int{}
	check := func(t *rapid.T) {
		rules := make([]model.Match, rapid.IntRange(1, 4).Draw(t, "rules"))
		r1.Headends, r6.Egresses, r6.Headends, r1.Egresses = nil, nil, nil, nil
		v4 := rapid.IntRange(0, 3).Draw(t, "IPv4") == 0
		to := map[bool]string{false: "fc00:8::/64", true: "198.51.100.0/24"}[v4]
		for i := range rules {
			m := drawMatch(t)
			m.Source, m.DSCP, m.Mark, m.Destination = netip.Prefix{}, 0, model.Mark{}, netip.MustParsePrefix(to)
			if m.Protocol == 58 && v4 {
				m.Protocol = 1
			}
			m.Priority = uint16(1000*i + 500)
			if i == len(rules)-1 && rapid.Bool().Draw(t, "by prefix") {
				m = model.Match{Destination: m.Destination}
			}
			rules[i] = m
			h, e := start, end
			h.Path, h.Match = 0x10000+uint32(i), m
			e.Path, e.Match = h.Path, m
			r1.Headends, r6.Egresses = append(r1.Headends, h), append(r6.Egresses, e)
		}
		p.headend.must(errors.Join(p.headend.apply(nil), p.headend.apply(&r1)))
		p.egress.must(errors.Join(p.egress.apply(nil), p.egress.apply(&r6)))
		for range 20 {
			number++
			draw := drawDatagram6
			if v4 {
				draw = drawDatagram4
			}
			frames := draw(t, number)
			taken := make([]int, len(frames))
			for i, b := range frames {
				var err error
				if taken[i], err = p.takes(b); err != nil {
					t.Fatalf("%v\nrules %v", err, rules)
				}
			}
			read, err := host.read(frames, number)
			if err != nil {
				t.Fatal(err)
			}
			count["datagrams"]++
			refused := slices.Contains(taken, readRefused)
			if read == nil {
				count["not read by the host"]++
				continue
			}
			rule := ruleOf(rules, v4, *read)
			switch {
			case refused:
				count["read, and refused by us"]++
			case rule == readPlain:
				count["read, and under no rule"]++
			case slices.ContainsFunc(taken, func(r int) bool { return r != rule }):
				t.Fatalf("a host reads %+v, which is rule %d of %v; its packets took %v (-1: none)", *read, rule, rules, taken)
			default:
				count["read, and took its chain"]++
				if len(frames) > 1 {
					count["of these in fragments"]++
				}
			}
		}
	}
	for count["datagrams"] < want && !t.Failed() {
		rapid.Check(t, check)
	}
	t.Logf("%v", count)
	for _, what := range []string{"not read by the host", "read, and refused by us", "read, and under no rule", "read, and took its chain", "of these in fragments"} {
		if count[what] < want/100 {
			t.Errorf("%s: %d of %d; the datagrams show too little", what, count[what], want)
		}
	}
}
