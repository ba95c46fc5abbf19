package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// Netfilter as a function. r2 has one in each kind of namespace, and each of them has a
// host of its name behind the egress:
//
//	guest ---+                                   +--- own
//	         r1 --- r2 (own, named, local) --- r6 --- named
//	staff ---+                                   +--- local
//
// The chains are guest and staff to each of these hosts, in both versions of IP, both
// ways, as in guest-own-6.
const filtering = `
version: 1
domain: {block: "fc00::/48"}
nodes:
  - name: r1
    address: fc00:1::1
    locator: fc00:0:0:100::/56
    interfaces: [{name: r1-guest, role: edge}, {name: r1-staff, role: edge}, {name: r1-r2, role: core, mtu: 1700}]
  - name: r2
    address: fc00:2::1
    locator: fc00:0:0:200::/56
    interfaces: [{name: r2-r1, role: core, mtu: 1700}, {name: r2-r6, role: core, mtu: 1700}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    interfaces: [{name: r6-own, role: edge}, {name: r6-named, role: edge}, {name: r6-local, role: edge}, {name: r6-r2, role: core, mtu: 1700}]
functions:
FUNCTIONS
chains:
CHAINS
lab:
  mtu: 1700
  hosts:
    - {name: guest, node: r1, prefix: "fc00:10::/64", prefix4: 192.0.2.0/26}
    - {name: staff, node: r1, prefix: "fc00:11::/64", prefix4: 192.0.2.64/26}
    - {name: own, node: r6, prefix: "fc00:20::/64", prefix4: 198.51.100.0/26}
    - {name: named, node: r6, prefix: "fc00:21::/64", prefix4: 198.51.100.64/26}
    - {name: local, node: r6, prefix: "fc00:22::/64", prefix4: 198.51.100.128/26}
  links:
    - {between: [r1, r2]}
    - {between: [r2, r6]}
`

// filterKinds are the functions' names, each for its kind of namespace.
var filterKinds = []string{"own", "named", "local"}

// Addresses that rules give packets: of the guest's prefix, where the chain takes the
// answers, and of another chain's.
var (
	guestSNAT       = [2]netip.Addr{netip.MustParseAddr("fc00:10::99"), netip.MustParseAddr("192.0.2.33")}
	guestMasquerade = [2]netip.Addr{netip.MustParseAddr("fc00:10::98"), netip.MustParseAddr("192.0.2.34")}
	staffSNAT       = [2]netip.Addr{netip.MustParseAddr("fc00:11::99"), netip.MustParseAddr("192.0.2.97")}
)

// second is the other address of a server, that rules lead packets to.
func second(w *world, name string) netip.Addr {
	a := w.addr(name)
	b := a.AsSlice()
	b[len(b)-1] += 7
	a, _ = netip.AddrFromSlice(b)
	return a
}

// Ports, and what the rules do with packets to them.
const (
	portAccept = 1001 + iota
	portDrop
	portSNAT
	portForeignSNAT
	portMasquerade
	portDNAT
	portMark
	portNotrack
	portLimit
	portSet
	portSocket
	portTProxy
	portReject
	portSynproxy
	portByArgument
	portDup
	portQueue
	portUnqueued
	portClosed
	portFTP
	portFTPData
	portFwd
	portFwdVia
)

// verdicts are the rules of all three. SERVER6 and SERVER4 are the second addresses of
// the function's host.
var verdicts = strings.NewReplacer(
	"portAccept", fmt.Sprint(portAccept), "portDrop", fmt.Sprint(portDrop), "portForeignSNAT", fmt.Sprint(portForeignSNAT),
	"portSNAT", fmt.Sprint(portSNAT), "portMasquerade", fmt.Sprint(portMasquerade), "portDNAT", fmt.Sprint(portDNAT),
	"portMark", fmt.Sprint(portMark), "portNotrack", fmt.Sprint(portNotrack), "portLimit", fmt.Sprint(portLimit),
	"portSet", fmt.Sprint(portSet), "portSocket", fmt.Sprint(portSocket), "portTProxy", fmt.Sprint(portTProxy),
	"portReject", fmt.Sprint(portReject), "portSynproxy", fmt.Sprint(portSynproxy), "portByArgument", fmt.Sprint(portByArgument),
	"portDup", fmt.Sprint(portDup), "portQueue", fmt.Sprint(portQueue), "portUnqueued", fmt.Sprint(portUnqueued),
	"portClosed", fmt.Sprint(portClosed), "portFTPData", fmt.Sprint(portFTPData), "portFTP", fmt.Sprint(portFTP),
	"tproxyMark", fmt.Sprint(tproxyMark),
	"SNAT6", guestSNAT[0].String(), "SNAT4", guestSNAT[1].String(),
	"FOREIGN6", staffSNAT[0].String(), "FOREIGN4", staffSNAT[1].String(),
	"LOCAL6", guestMasquerade[0].String(), "LOCAL4", guestMasquerade[1].String(),
).Replace(`
set seen4 {
  type ipv4_addr . inet_service
  flags dynamic
  size 16
}
set seen6 {
  type ipv6_addr . inet_service
  flags dynamic
  size 16
}
counter marked {
}
counter untracked {
}
counter members {
}
counter errors {
}
counter connections {
}
ct helper ftp {
  type "ftp" protocol tcp
}
chain raw {
  type filter hook prerouting priority raw + 1; policy accept;
  udp dport portNotrack notrack
  tcp dport portSynproxy tcp flags syn notrack
}
chain early {
  type filter hook prerouting priority mangle; policy accept;
  tcp dport portFTP ct helper set "ftp"
  meta nfproto ipv6 udp dport portTProxy meta mark set tproxyMark tproxy ip6 to :portTProxy accept
  meta nfproto ipv4 udp dport portTProxy meta mark set tproxyMark tproxy ip to :portTProxy accept
}
chain destinations {
  type nat hook prerouting priority dstnat; policy accept;
  meta nfproto ipv6 udp dport portDNAT dnat ip6 to SERVER6
  meta nfproto ipv4 udp dport portDNAT dnat ip to SERVER4
  meta nfproto ipv6 udp dport portSocket dnat ip6 to LOCAL6
  meta nfproto ipv4 udp dport portSocket dnat ip to LOCAL4
}
chain forward {
  type filter hook forward priority filter; policy drop;
  ct state related meta l4proto { icmp, icmpv6 } counter name errors accept
  ct state related tcp dport portFTPData counter name connections accept
  ct state new tcp dport portFTPData drop
  ct state invalid tcp dport portSynproxy synproxy mss 1400 wscale 7 timestamp sack-perm
  ct state untracked tcp dport portSynproxy synproxy mss 1400 wscale 7 timestamp sack-perm
  tcp dport portReject reject with tcp reset
  udp dport portReject reject with icmpx type admin-prohibited
  udp dport portMark meta nftrace set 1 log prefix "e2e " meta mark set 0xbad ct mark set 0xbad
  udp dport portMark meta mark 0xbad counter name marked accept
  udp dport portNotrack ct state untracked counter name untracked accept
  udp sport portNotrack ct state new accept
  meta nfproto ipv6 udp dport portLimit limit rate 1/day burst 2 packets accept
  meta nfproto ipv4 udp dport portLimit limit rate 1/day burst 2 packets accept
  ip6 saddr . udp dport @seen6 udp dport portSet counter name members accept
  ip saddr . udp dport @seen4 udp dport portSet counter name members accept
  udp dport portSet add @seen6 { ip6 saddr . udp dport }
  udp dport portSet add @seen4 { ip saddr . udp dport }
  ct direction reply accept
  meta mark $guest udp dport portByArgument accept
  udp dport { portAccept, portSNAT, portForeignSNAT, portMasquerade, portDNAT, portDup, portQueue, portUnqueued, portClosed } accept
  tcp dport { portFTP, portFTPData, 1024-65535 } accept
  meta l4proto { icmp, icmpv6 } accept
}
chain sources {
  type nat hook postrouting priority srcnat; policy accept;
  meta nfproto ipv6 udp dport portSNAT snat ip6 to SNAT6
  meta nfproto ipv4 udp dport portSNAT snat ip to SNAT4
  meta nfproto ipv6 udp dport portForeignSNAT snat ip6 to FOREIGN6
  meta nfproto ipv4 udp dport portForeignSNAT snat ip to FOREIGN4
  udp dport portMasquerade masquerade
}
`)

// tproxyMark leads packets to a socket of the namespace.
const tproxyMark = 0x77

// filterText is a domain with the three functions, rules filled in by their names.
// there is the namespace of named.
func filterText(there string, rules func(kind string) string) string {
	var functions, chains strings.Builder
	for i, kind := range filterKinds {
		namespace := []string{"own", there, "node"}[i]
		fmt.Fprintf(&functions, "  - name: %s\n    node: r2\n    kind: netfilter\n    namespace: %s\n    rewrites: true\n    arguments: {guest: 1, staff: 2}\n", kind, namespace)
		if kind == "own" {
			// What originates there is the matter of originate_test.go.
			fmt.Fprintf(&functions, "    on-unknown: drop\n    address: [%q, %q]\n", guestMasquerade[0], guestMasquerade[1])
		}
		fmt.Fprintf(&functions, "    rules: |\n      %s\n", strings.ReplaceAll(strings.TrimSpace(rules(kind)), "\n", "\n      "))
		for j, from := range []string{"guest", "staff"} {
			fmt.Fprintf(&chains, "  - {name: %s-%s-6, ingress: [r1], functions: [{name: %s, argument: %s}], egress: r6, match: {source: \"fc00:1%d::/64\", destination: \"fc00:2%d::/64\"}, direction: both}\n",
				from, kind, kind, from, j, i)
			fmt.Fprintf(&chains, "  - {name: %s-%s-4, ingress: [r1], functions: [{name: %s, argument: %s}], egress: r6, match: {source: 192.0.2.%d/26, destination: 198.51.100.%d/26}, direction: both}\n",
				from, kind, kind, from, 64*j, 64*i)
		}
	}
	return strings.NewReplacer("FUNCTIONS\n", functions.String(), "CHAINS\n", chains.String()).Replace(filtering)
}

// filterWorld is a world with these functions.
type filterWorld struct {
	*world
	*there
}

// there is the namespace of named, which somebody else keeps.
type there struct {
	name   string
	theirs *host.NetNS
}

// buildFilters makes the namespace of named, as somebody who runs a container would,
// and the lab.
func buildFilters(t *testing.T, rules func(kind string) string, changes ...func(text string) string) *filterWorld {
	t.Helper()
	return buildFiltersCarried(t, overSRv6, rules, changes...)
}

func buildFiltersCarried(t *testing.T, carried change, rules func(kind string) string, changes ...func(text string) string) *filterWorld {
	t.Helper()
	prefix := newPrefix()
	w := &filterWorld{world: &world{t: t}, there: &there{name: "there-" + prefix}}
	w.makeThere()
	t.Cleanup(func() {
		if err := w.theirs.Delete(); err != nil {
			t.Error(err)
		}
	})
	text := filterText(w.there.name, rules)
	for _, c := range changes {
		text = c(text)
	}
	w.world = buildFrom(t, parse(t, text, carried), func(c *lab.Config) { c.Prefix = prefix })
	w.routeThere()
	return w
}

// makeThere makes the namespace of named. Nothing but theirs and its name keeps it.
func (w *filterWorld) makeThere() {
	w.t.Helper()
	var err error
	w.theirs, err = host.New(w.there.name)
	must(w.t, err)
	n, err := host.Open(w.theirs)
	must(w.t, err)
	defer n.Close()
	must(w.t, n.SetUp("lo"))
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		must(w.t, n.SetSysctl(key, "1"))
	}
	must(w.t, n.SetSysctl("net/ipv4/conf/all/rp_filter", "0"))
}

// routeThere does what status says of the namespace of named.
func (w *filterWorld) routeThere() {
	w.t.Helper()
	n, err := host.Open(w.theirs)
	must(w.t, err)
	defer n.Close()
	for _, all := range []string{"::/0", "0.0.0.0/0"} {
		must(w.t, n.ReplaceRoute(host.Route{Destination: netip.MustParsePrefix(all), Via: netip.MustParseAddr("fe80::1"), Device: "wso-named"}))
	}
}

// inside is the network namespace that a function's rules run in.
func (w *filterWorld) inside(kind string) *host.NetNS {
	w.t.Helper()
	name := w.there.name
	switch kind {
	case "own":
		name = "waystamp-" + w.Instance("r2") + "-own"
	case "local":
		return w.ns("r2")
	}
	ns, err := host.OpenNamed(name)
	must(w.t, err)
	w.t.Cleanup(func() { ns.Close() })
	return ns
}

func (w *filterWorld) netOf(kind string) *host.Net {
	w.t.Helper()
	n, err := host.Open(w.inside(kind))
	must(w.t, err)
	w.t.Cleanup(func() { n.Close() })
	return n
}

// in is the world as a subtest sees it, whose hosts speak one version of IP.
func (w *filterWorld) in(t *testing.T, ipv4 bool) *filterWorld {
	sub := &filterWorld{w.world.in(t), w.there}
	sub.ipv4 = ipv4
	return sub
}

// chainOf is a chain in one direction, of the version of the world.
func (w *filterWorld) chainOf(from, kind string, d model.Direction) plan.Path {
	w.t.Helper()
	return w.path(from+"-"+kind+map[bool]string{false: "-6", true: "-4"}[w.ipv4], d)
}

// of is what has this version of IP.
func (w *filterWorld) of(a [2]netip.Addr) netip.Addr {
	if w.ipv4 {
		return a[1]
	}
	return a[0]
}

// socket opens a UDP socket at an address in a namespace.
func socketAt(t *testing.T, ns *host.NetNS, at netip.AddrPort, options ...func(fd int) error) *net.UDPConn {
	t.Helper()
	var c net.PacketConn
	must(t, ns.Do(func() (err error) {
		c, err = (&net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
			for _, o := range options {
				if e := raw.Control(func(fd uintptr) { err = o(int(fd)) }); e != nil || err != nil {
					return errors.Join(e, err)
				}
			}
			return nil
		}}).ListenPacket(t.Context(), "udp", at.String())
		return err
	}))
	t.Cleanup(func() { c.Close() })
	return c.(*net.UDPConn)
}

// passage is what must become of n datagrams to a port.
type passage struct {
	sent      uint64 // datagrams, each with its number
	back      uint64 // of them came back from the function and were stamped
	unknown   uint64 // came back without a header that is kept for them
	delivered []uint32
	from, to  netip.Addr // as the server sees them; not valid: as they were sent
}

// datagram is the number of one in a payload.
func datagram(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i)) }

// passes sends datagrams from a host through a function and checks what becomes of
// them: at the hops of their path, in the function, at its host.
func (w *filterWorld) passes(from, kind string, port uint16, want passage, refused ...refusal) {
	w.t.Helper()
	if !want.from.IsValid() {
		want.from = w.addr(from)
	}
	if !want.to.IsValid() {
		want.to = w.addr(kind)
	}
	server := socketAt(w.t, w.ns(kind), netip.AddrPortFrom(want.to, port))
	defer server.Close()
	client := socketAt(w.t, w.ns(from), netip.AddrPortFrom(w.addr(from), 0))
	defer client.Close()
	p := w.chainOf(from, kind, model.Forward)
	before := mustFrames(w.world, p)
	function := w.tally(kind)
	for i := range want.sent {
		_, err := client.WriteToUDPAddrPort(datagram(int(i)), netip.AddrPortFrom(w.addr(kind), port))
		must(w.t, err)
	}
	var got []uint32
	buf := make([]byte, 64)
	must(w.t, server.SetReadDeadline(time.Now().Add(settleTime)))
	for range want.delivered {
		n, peer, err := server.ReadFromUDPAddrPort(buf)
		must(w.t, err)
		if n != 4 || peer.Addr().Unmap() != want.from {
			w.t.Errorf("%d bytes came from %s, want 4 from %s", n, peer, want.from)
		}
		got = append(got, binary.BigEndian.Uint32(buf))
	}
	slices.Sort(got) // a program that decides on another CPU than before changes their order
	if !slices.Equal(got, want.delivered) {
		w.t.Errorf("datagrams %d were delivered, want %d", got, want.delivered)
	}
	for _, r := range refused {
		w.refused(r.Node, r.Reason, want.sent)
	}
	function.waits(api.Function{RxSuccess: want.sent, TxSuccess: want.back, TxNotCached: want.unknown})
	// Whatever has left the function is at the egress, and delivered, or was refused.
	stamped := []uint64{want.sent, want.back, uint64(len(want.delivered))}
	eventually(w.t, func() error {
		now, err := w.frames(p)
		if err != nil {
			return err
		}
		for i := range now {
			if got := now[i].Frames - before[i].Frames; got != stamped[i] {
				return fmt.Errorf("%s: position %d has counted %d frames, want %d", p.Chain, i, got, stamped[i])
			}
		}
		return nil
	})
	must(w.t, server.SetReadDeadline(time.Now()))
	if n, peer, err := server.ReadFromUDPAddrPort(buf); err == nil {
		w.t.Errorf("%x came from %s besides", buf[:n], peer)
	}
}

// tally is what a function had counted.
type tally struct {
	w      *filterWorld
	before api.Function
}

func (w *filterWorld) tally(kind string) tally {
	w.t.Helper()
	t := tally{w: w, before: api.Function{Function: kind}}
	before, err := t.more()
	must(w.t, err)
	before.Function = kind
	t.before = before
	return t
}

// more is what the function has counted since.
func (t tally) more() (api.Function, error) {
	c, err := t.w.counters("r2")
	i := slices.IndexFunc(c.Functions, func(f api.Function) bool { return f.Function == t.before.Function })
	if err != nil || i < 0 {
		return api.Function{}, fmt.Errorf("counters of function %s: %w", t.before.Function, err)
	}
	f := c.Functions[i]
	return api.Function{
		RxSuccess: f.RxSuccess - t.before.RxSuccess, TxSuccess: f.TxSuccess - t.before.TxSuccess,
		TxNotCached: f.TxNotCached - t.before.TxNotCached, RxIgnored: f.RxIgnored - t.before.RxIgnored, TxPlain: f.TxPlain - t.before.TxPlain,
	}, nil
}

func (t tally) is(want api.Function) error {
	got, err := t.more()
	if d := cmp.Diff(want, got); err == nil && d != "" {
		err = fmt.Errorf("counters of %s (-want +got):\n%s", t.before.Function, d)
	}
	return err
}

func (t tally) waits(want api.Function) {
	t.w.t.Helper()
	eventually(t.w.t, func() error { return t.is(want) })
}

// named is what a named counter of a function's rules has counted.
func (w *filterWorld) named(kind, counter string) uint64 {
	w.t.Helper()
	f, err := w.function("r2", kind)
	must(w.t, err)
	if f.Rules == nil || f.Rules.Error != "" {
		w.t.Fatalf("the counters of %s: %+v", kind, f.Rules)
	}
	for _, c := range slices.Concat(f.Rules.Counters, f.Rules.Arguments) {
		if c.Name == counter {
			return c.Packets
		}
	}
	w.t.Fatalf("%s has no counter %s: %+v", kind, counter, f.Rules)
	panic("unreachable")
}

// Each line of the table of verdicts in docs/how-to/netfilter.md, of both versions of
// IP, in each kind of namespace.
func TestWhatNetfilterDoesToAPacketAndItsProof(t *testing.T) {
	t.Parallel()
	bothEncapsulations(t, whatNetfilterDoes)
}

func whatNetfilterDoes(t *testing.T, carried change) {
	all := buildFiltersCarried(t, carried, func(kind string) string {
		i := slices.Index(filterKinds, kind)
		return strings.NewReplacer("SERVER6", fmt.Sprintf("fc00:2%d::9", i), "SERVER4", fmt.Sprintf("198.51.100.%d", 64*i+9)).Replace(verdicts)
	})
	for _, kind := range filterKinds {
		for _, ipv4 := range []bool{false, true} {
			if t.Failed() {
				return
			}
			t.Run(kind+map[bool]string{false: ", IPv6", true: ", IPv4"}[ipv4], func(t *testing.T) {
				all.in(t, ipv4).verdicts(kind)
			})
		}
	}
	for _, kind := range filterKinds {
		for _, ipv4 := range []bool{false, true} {
			t.Run("fragments, "+kind+map[bool]string{false: ", IPv6", true: ", IPv4"}[ipv4], func(t *testing.T) {
				all.in(t, ipv4).fragmentsPass(kind)
			})
		}
	}
	t.Run("flowtable", func(t *testing.T) {
		for _, ipv4 := range []bool{false, true} {
			all.in(t, ipv4).throughAFlowtable("own")
		}
	})
}

// fragmentsPass sends datagrams of several fragments through rules that track connections,
// and through each kind of NAT.
func (w *filterWorld) fragmentsPass(kind string) {
	for _, c := range []struct {
		rule     string
		port     uint16
		from, to netip.Addr // as the server sees them
	}{
		{"accept", portAccept, w.addr("guest"), w.addr(kind)},
		{"snat", portSNAT, w.of(guestSNAT), w.addr(kind)},
		{"masquerade", portMasquerade, w.of(guestMasquerade), w.addr(kind)},
		{"dnat", portDNAT, w.addr("guest"), second(w.world, kind)},
	} {
		w.t.Run(c.rule, func(t *testing.T) { w.in(t, w.ipv4).fragmentsThrough(kind, c.port, c.from, c.to) })
	}
}

// fragmentsThrough sends datagrams as long as large answers of DNS from the guest to a port,
// and back. Connection tracking reassembles them, and all fragments that the kernel makes of one
// have the index of its first. from and to are the addresses as the server sees them.
func (w *filterWorld) fragmentsThrough(kind string, port uint16, from, to netip.Addr) {
	const size, datagrams = 4000, 20
	server := socketAt(w.t, w.ns(kind), netip.AddrPortFrom(to, port))
	client := socketAt(w.t, w.ns("guest"), netip.AddrPortFrom(w.addr("guest"), 0))
	payload := func(i int) []byte {
		b := bytes.Repeat([]byte{byte(i)}, size)
		for j := range b {
			b[j] += byte(j >> 4)
		}
		return b
	}
	buf := make([]byte, 2*size)
	read := func(i int, at *net.UDPConn, wait time.Duration, want netip.Addr) (netip.AddrPort, error) {
		must(w.t, at.SetReadDeadline(time.Now().Add(wait)))
		for {
			n, peer, err := at.ReadFromUDPAddrPort(buf)
			if err != nil {
				return peer, err
			}
			if i > 0 && bytes.Equal(buf[:n], payload(0)) {
				continue // one that was late before all hosts knew the size
			}
			if peer = netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port()); peer.Addr() != want || !bytes.Equal(buf[:n], payload(i)) {
				return peer, fmt.Errorf("datagram %d came from %s with %d bytes, want it from %s as it was sent", i, peer, n, want)
			}
			return peer, nil
		}
	}
	pass := func(i int, wait time.Duration) error {
		if _, err := client.WriteToUDPAddrPort(payload(i), netip.AddrPortFrom(w.addr(kind), port)); err != nil {
			return err
		}
		peer, err := read(i, server, wait, from)
		if err != nil {
			return err
		}
		if _, err := server.WriteToUDPAddrPort(payload(i), peer); err != nil {
			return err
		}
		_, err = read(i, client, wait, w.addr(kind))
		return err
	}
	// The headends say how long a packet may be; what they say it of is lost.
	eventually(w.t, func() error { return pass(0, 100*time.Millisecond) })
	function := w.tally(kind)
	for i := range datagrams {
		must(w.t, pass(i+1, settleTime))
	}
	eventually(w.t, func() error {
		more, err := function.more()
		if err != nil {
			return err
		}
		if more.RxSuccess < 2*2*datagrams || more.RxSuccess != more.TxSuccess || more.TxNotCached != 0 {
			return fmt.Errorf("after %d datagrams of %d bytes to and fro: %+v; want as many fragments out as in, at least two of each", datagrams, size, more)
		}
		return nil
	})
}

// fetchesByFTP transfers a file by FTP in passive mode (RFC 959, RFC 2428). The rules let its
// second connection in only as one that is related to the first, which the kernel's helper reads.
func (w *filterWorld) fetchesByFTP(kind string) {
	const file = "a file from the server"
	at := func(port uint16) string { return netip.AddrPortFrom(w.addr(kind), port).String() }
	listen := func(port uint16) (l net.Listener) {
		must(w.t, w.Do(kind, func() (err error) {
			l, err = new(net.ListenConfig).Listen(soon(w.t), "tcp", at(port))
			return err
		}))
		w.t.Cleanup(func() { l.Close() })
		return l
	}
	control, data := listen(portFTP), listen(portFTPData)
	w.unanswered(kind, "tcp", portFTPData)

	passive, answer := "EPSV", fmt.Sprintf("229 Entering Extended Passive Mode (|||%d|)", portFTPData)
	if w.ipv4 {
		a := w.addr(kind).As4()
		passive, answer = "PASV", fmt.Sprintf("227 Entering Passive Mode (%d,%d,%d,%d,%d,%d)", a[0], a[1], a[2], a[3], portFTPData>>8, portFTPData&0xff)
	}
	served := make(chan error, 1)
	go func() { served <- serveFTP(control, data, passive, answer, file) }()

	before := w.named(kind, "connections")
	c, err := w.dial("guest", kind, "tcp", portFTP)
	must(w.t, err)
	must(w.t, c.SetDeadline(time.Now().Add(settleTime)))
	lines := bufio.NewReader(c)
	reply := func(code string) {
		w.t.Helper()
		line, err := lines.ReadString('\n')
		if err != nil || !strings.HasPrefix(line, code+" ") {
			w.t.Fatalf("the server answers %q, %v; want %s", line, err, code)
		}
	}
	ask := func(command, code string) {
		w.t.Helper()
		_, err := io.WriteString(c, command+"\r\n")
		must(w.t, err)
		reply(code)
	}
	reply("220")
	ask(passive, answer[:3])
	d, err := w.dialFor(settleTime, "guest", kind, "tcp", portFTPData)
	must(w.t, err)
	must(w.t, d.SetDeadline(time.Now().Add(settleTime)))
	ask("RETR file", "150")
	got, err := io.ReadAll(d)
	if err != nil || string(got) != file {
		w.t.Errorf("got %q, %v; want %q", got, err, file)
	}
	reply("226")
	must(w.t, errors.Join(d.Close(), c.Close(), <-served))
	if n := w.named(kind, "connections") - before; n == 0 {
		w.t.Error("no packet was of a related connection")
	}
}

// serveFTP serves one session.
func serveFTP(control, data net.Listener, passive, answer, file string) error {
	c, err := control.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(settleTime)); err != nil {
		return err
	}
	lines := bufio.NewReader(c)
	say := func(line string) error {
		_, err := io.WriteString(c, line+"\r\n")
		return err
	}
	hear := func(want string) error {
		line, err := lines.ReadString('\n')
		if err == nil && line != want+"\r\n" {
			err = fmt.Errorf("the client says %q, want %s", line, want)
		}
		return err
	}
	transfer := func() error {
		d, err := data.Accept()
		if err != nil {
			return err
		}
		_, err = io.WriteString(d, file)
		return errors.Join(err, d.Close())
	}
	for _, step := range []func() error{
		func() error { return say("220 ready") },
		func() error { return hear(passive) },
		func() error { return say(answer) },
		func() error { return hear("RETR file") },
		func() error { return say("150 here it is") },
		transfer,
		func() error { return say("226 that was it") },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// throughAFlowtable has an established connection pass the rules by. Its packets have
// their index all the same.
func (w *filterWorld) throughAFlowtable(kind string) {
	const counts = `flowtable fast {
	hook ingress priority filter
	devices = { waystamp-in, waystamp-out }
}
chain forward {
	type filter hook forward priority filter - 1; policy accept;
	meta l4proto tcp flow add @fast
	meta l4proto tcp counter
}`
	if err := w.tryBeside(kind, counts); err != nil {
		w.t.Skipf("this kernel has no flowtables (CONFIG_NF_FLOW_TABLE, CONFIG_NFT_FLOW_OFFLOAD): %v", err)
	}
	function := w.tally(kind)
	there, back := w.counting(w.chainOf("guest", kind, model.Forward)), w.counting(w.chainOf("guest", kind, model.Reverse))
	w.download(kind, "guest", 30_000_000)
	var in, out flow
	eventually(w.t, func() error { // what ends a connection may be on its way still
		in, out = there(), back()
		n := in[1].Packets + out[1].Packets
		return function.is(api.Function{RxSuccess: n, TxSuccess: n})
	})
	family, _ := w.family()
	list, err := host.Command(w.t.Context(), w.inside(kind), "nft", "list", "table", family, besides).Output()
	must(w.t, err)
	m := regexp.MustCompile(`counter packets (\d+)`).FindSubmatch(list)
	if m == nil {
		w.t.Fatalf("the table has no counter:\n%s", list)
	}
	saw, err := strconv.ParseUint(string(m[1]), 10, 64)
	must(w.t, err)
	if n := in[1].Packets + out[1].Packets; saw == 0 || 2*saw > n {
		w.t.Errorf("of %d packets the rules saw %d; want a few", n, saw)
	}
}

func (w *filterWorld) verdicts(kind string) {
	both := []uint32{0, 1, 2}
	far := second(w.world, kind)
	must(w.t, w.net(kind).AddAddress(kind+"-r6", netip.PrefixFrom(far, far.BitLen())))
	if kind != "own" { // which has its address by the file
		link := map[string]string{"named": "lo", "local": "r2-r6"}[kind]
		a := w.of(guestMasquerade)
		must(w.t, w.netOf(kind).AddAddress(link, netip.PrefixFrom(a, a.BitLen())))
	}
	run := func(name string, f func(w *filterWorld)) {
		if !w.t.Failed() { // a refusal too many would fail all that come behind
			w.t.Run(name, func(t *testing.T) { f(w.in(t, w.ipv4)) })
		}
	}
	run("accept", func(w *filterWorld) {
		w.passes("guest", kind, portAccept, passage{sent: 3, back: 3, delivered: both})
	})
	run("drop", func(w *filterWorld) { w.passes("guest", kind, portDrop, passage{sent: 3}) })
	run("by argument", func(w *filterWorld) {
		guests, staffs := w.named(kind, "guest"), w.named(kind, "staff")
		w.passes("guest", kind, portByArgument, passage{sent: 3, back: 3, delivered: both})
		w.passes("staff", kind, portByArgument, passage{sent: 3})
		if g, s := w.named(kind, "guest")-guests, w.named(kind, "staff")-staffs; g != 3 || s != 3 {
			w.t.Errorf("%d packets of the guest and %d of staff were counted, want 3 and 3", g, s)
		}
	})
	run("snat", func(w *filterWorld) {
		w.passes("guest", kind, portSNAT, passage{sent: 3, back: 3, delivered: both, from: w.of(guestSNAT)})
	})
	run("snat to another chain", func(w *filterWorld) {
		w.passes("guest", kind, portForeignSNAT, passage{sent: 3, back: 3}, refusal{Node: "r6", Reason: "wrong-chain"})
	})
	run("masquerade", func(w *filterWorld) {
		w.passes("guest", kind, portMasquerade, passage{sent: 3, back: 3, delivered: both, from: w.of(guestMasquerade)})
	})
	run("dnat", func(w *filterWorld) {
		w.passes("guest", kind, portDNAT, passage{sent: 3, back: 3, delivered: both, to: far})
	})
	run("mark set", func(w *filterWorld) {
		before := w.named(kind, "marked")
		w.passes("guest", kind, portMark, passage{sent: 3, back: 3, delivered: both})
		if n := w.named(kind, "marked") - before; n != 3 {
			w.t.Errorf("%d packets were marked, want 3", n)
		}
	})
	run("notrack", func(w *filterWorld) {
		before := w.named(kind, "untracked")
		w.passes("guest", kind, portNotrack, passage{sent: 3, back: 3, delivered: both})
		if n := w.named(kind, "untracked") - before; n != 3 {
			w.t.Errorf("%d packets were not tracked, want 3", n)
		}
	})
	run("limit", func(w *filterWorld) {
		w.passes("guest", kind, portLimit, passage{sent: 3, back: 2, delivered: []uint32{0, 1}})
	})
	run("set", func(w *filterWorld) { // of those that have been here once
		before := w.named(kind, "members")
		w.passes("guest", kind, portSet, passage{sent: 3, back: 2, delivered: []uint32{1, 2}})
		if n := w.named(kind, "members") - before; n != 2 {
			w.t.Errorf("%d packets were the set's, want 2", n)
		}
	})
	run("related errors", func(w *filterWorld) { // of a host where nobody listens
		before := w.named(kind, "errors")
		c, err := w.dial("guest", kind, "udp", portClosed)
		must(w.t, err)
		_, err = c.Write([]byte("anybody there?"))
		must(w.t, err)
		must(w.t, c.SetReadDeadline(time.Now().Add(settleTime)))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
			w.t.Errorf("%v, want %v", err, unix.ECONNREFUSED)
		}
		if n := w.named(kind, "errors") - before; n != 1 {
			w.t.Errorf("%d errors were related to a flow, want 1", n)
		}
	})
	run("related connections", func(w *filterWorld) { w.fetchesByFTP(kind) })
	run("a socket", func(w *filterWorld) {
		socket := socketAt(w.t, w.inside(kind), netip.AddrPortFrom(w.of(guestMasquerade), portSocket))
		w.passes("guest", kind, portSocket, passage{sent: 3})
		w.hears(socket)
	})
	run("tproxy", func(w *filterWorld) {
		options := func(fd int) error {
			return errors.Join(unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1), unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1))
		}
		family, all := "-6", "::/0"
		if w.ipv4 {
			family, all = "-4", "0.0.0.0/0"
		}
		ns := w.inside(kind)
		for _, what := range []string{fmt.Sprintf("rule add fwmark %d lookup %d", tproxyMark, tproxyMark), fmt.Sprintf("route add local %s dev lo table %d", all, tproxyMark)} {
			if out, err := host.Command(w.t.Context(), ns, "ip", append([]string{family}, strings.Fields(what)...)...).CombinedOutput(); err != nil {
				w.t.Fatalf("ip %s %s: %v\n%s", family, what, err, out)
			}
		}
		socket := socketAt(w.t, ns, netip.AddrPortFrom(netip.IPv6Unspecified(), portTProxy), options)
		w.passes("guest", kind, portTProxy, passage{sent: 3})
		w.hears(socket)
	})
	run("reject", func(w *filterWorld) {
		function, sent := w.tally(kind), w.sent("guest", kind)
		w.unanswered(kind, "tcp", portReject) // a RST in the server's name
		n := sent()                           // TCP tries again where a test waits for long
		if n == 0 {
			w.t.Fatal("no SYN was sent")
		}
		if kind == "local" {
			// An ICMP error in the node's own name is a packet of the node's, and of no chain.
			w.refused("r2", "not-cached", n)
			w.forbidden(kind, portReject)
			function.waits(api.Function{RxSuccess: n + 1, TxNotCached: n})
			return
		}
		w.unanswered(kind, "udp", portReject)
		w.refused("r2", "not-cached", n+1)
		function.waits(api.Function{RxSuccess: n + 1, TxNotCached: n + 1})
	})
	run("synproxy", func(w *filterWorld) {
		function, sent := w.tally(kind), w.sent("guest", kind)
		w.unanswered(kind, "tcp", portSynproxy)
		n := sent()
		w.refused("r2", "not-cached", n)
		function.waits(api.Function{RxSuccess: n, TxNotCached: n})
	})
	run("dup", func(w *filterWorld) {
		w.loadBeside(kind, fmt.Sprintf(`chain prerouting {
	type filter hook prerouting priority mangle; policy accept;
	udp dport %d dup to %s
}`, portDup, w.addr(kind)))
		w.passes("guest", kind, portDup, passage{sent: 3, back: 3, delivered: both, unknown: 3}, refusal{Node: "r2", Reason: "not-cached"})
	})
	if kind == "own" && !w.ipv4 {
		run("fwd", func(w *filterWorld) { w.forwardedAtIngress(kind) })
	}
	run("queue", func(w *filterWorld) { w.throughQueues(kind) })
	run("TCP", func(w *filterWorld) {
		function := w.tally(kind)
		there, back := w.counting(w.chainOf("guest", kind, model.Forward)), w.counting(w.chainOf("guest", kind, model.Reverse))
		w.download(kind, "guest", 3_000_000)
		var in, out flow
		eventually(w.t, func() error { // what ends a connection may be on its way still
			in, out = there(), back()
			n := in[1].Packets + out[1].Packets
			return function.is(api.Function{RxSuccess: n, TxSuccess: n})
		})
		if !w.labelled() && 10*out[1].Packets > 9*out.frames() { // the slower the machine, the fewer segments TCP sends at once
			w.t.Errorf("%d packets for %d frames: they are no super-packets", out[1].Packets, out.frames())
		}
	})
}

// forwardedAtIngress has packets leave before routing. By a neighbour they have the node's MAC
// address, and come back; by an interface alone they have that of the namespace, so that nobody
// takes them.
func (w *filterWorld) forwardedAtIngress(kind string) {
	n := w.netOf(kind)
	must(w.t, n.LoadRuleset(w.t.Context(), fmt.Sprintf(`table netdev %s {
	chain in {
		type filter hook ingress device "waystamp-in" priority 0; policy accept;
		meta protocol ip6 udp dport %d fwd to "waystamp-out"
		meta protocol ip6 udp dport %d fwd ip6 to fe80::1 device "waystamp-out"
	}
}
`, besides, portFwd, portFwdVia)))
	w.t.Cleanup(func() {
		if err := n.LoadRuleset(context.WithoutCancel(w.t.Context()), fmt.Sprintf("delete table netdev %s\n", besides)); err != nil {
			w.t.Error(err)
		}
	})
	w.passes("guest", kind, portFwd, passage{sent: 3})
	w.passes("guest", kind, portFwdVia, passage{sent: 3, back: 3, delivered: []uint32{0, 1, 2}})
}

// Numbers of queues.
const (
	queueWhole  = 5 // whose reader takes super-packets
	queueFrames = 6 // whose does not
)

// throughQueues has packets decided on by a program: one of three is dropped, and a
// super-packet that the program takes whole gets through whole. Of one that the kernel
// cuts for the program, all frames have the same index: the first to come back takes
// the header. Over labels each frame comes with a header of its own.
func (w *filterWorld) throughQueues(kind string) {
	w.queueBeside(kind, map[uint16]uint16{portQueue: queueWhole, portUnqueued: queueFrames})
	ns := w.inside(kind)
	readQueue(w.t, ns, queueWhole, true, func(p queued) bool { return !bytes.HasSuffix(p.payload, datagram(1)) })
	readQueue(w.t, ns, queueFrames, false, func(queued) bool { return true })
	w.passes("guest", kind, portQueue, passage{sent: 3, back: 2, delivered: []uint32{0, 2}})

	const size, n = 1000, 3
	for port, through := range map[uint16]uint64{portQueue: n, portUnqueued: 1} {
		server := socketAt(w.t, w.ns(kind), netip.AddrPortFrom(w.addr(kind), port))
		function, want := w.tally(kind), api.Function{RxSuccess: 1, TxSuccess: 1, TxNotCached: n - through}
		if w.labelled() {
			through, want = n, api.Function{RxSuccess: n, TxSuccess: n}
		}
		udpTrain(w.t, w.ns("guest"), netip.AddrPortFrom(w.addr(kind), port), size, make([]byte, n*size))
		must(w.t, server.SetReadDeadline(time.Now().Add(settleTime)))
		for range through {
			if got, err := server.Read(make([]byte, 2*size)); err != nil || got != size {
				w.t.Fatalf("a datagram of %d bytes, %v; want %d", got, err, size)
			}
		}
		if n > through {
			w.refused("r2", "not-cached", n-through)
		}
		function.waits(want)
	}
}

// queueBeside has packets to ports put into queues.
func (w *filterWorld) queueBeside(kind string, queues map[uint16]uint16) {
	w.t.Helper()
	const hook = "chain forward {\n\ttype filter hook forward priority mangle; policy accept;\n"
	var statements, jumps, chains strings.Builder
	for port, queue := range queues {
		fmt.Fprintf(&statements, "\tudp dport %d queue num %d\n", port, queue)
		fmt.Fprintf(&jumps, "\tudp dport %d jump queue%d\n", port, queue)
		fmt.Fprintf(&chains, "chain queue%d {\n}\n", queue)
	}
	if w.tryBeside(kind, hook+statements.String()+"}") == nil {
		return
	}
	must(w.t, w.tryBeside(kind, chains.String()+hook+jumps.String()+"}"))
	table, family := w.family()
	for _, queue := range queues {
		if err := addQueueRule(w.inside(kind), family, besides, fmt.Sprintf("queue%d", queue), queue); err != nil {
			w.t.Fatalf("table %s: neither a queue statement nor the target NFQUEUE: %v", table, err)
		}
	}
}

// forbidden checks that an ICMP error answers a datagram to a port.
func (w *filterWorld) forbidden(kind string, port uint16) {
	w.t.Helper()
	c, err := w.dial("guest", kind, "udp", port)
	must(w.t, err)
	_, err = c.Write([]byte("anybody there?"))
	must(w.t, err)
	must(w.t, c.SetReadDeadline(time.Now().Add(settleTime)))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EHOSTUNREACH) {
		w.t.Errorf("%v, want that it is prohibited", err)
	}
}

// unanswered checks that whoever talks to a port hears nothing.
func (w *filterWorld) unanswered(kind, network string, port uint16) {
	w.t.Helper()
	c, err := w.dial("guest", kind, network, port)
	if err == nil {
		if _, err = c.Write([]byte("anybody there?")); err == nil {
			must(w.t, c.SetReadDeadline(time.Now().Add(lostTime)))
			_, err = c.Read(make([]byte, 1))
		}
	}
	var ne net.Error
	if !errors.As(err, &ne) || !ne.Timeout() {
		w.t.Errorf("%s: %v; want no answer", network, err)
	}
}

// sent notes how many packets the headend has sent forward; the function that it returns tells how many since then.
func (w *filterWorld) sent(from, kind string) func() uint64 {
	w.t.Helper()
	read := func() uint64 {
		w.t.Helper()
		f, err := w.frames(w.chainOf(from, kind, model.Forward))
		must(w.t, err)
		return f[0].Packets
	}
	before := read()
	return func() uint64 { return read() - before }
}

// hears checks that three datagrams have come to a socket.
func (w *filterWorld) hears(socket *net.UDPConn) {
	w.t.Helper()
	must(w.t, socket.SetReadDeadline(time.Now().Add(settleTime)))
	for i := range 3 {
		b := make([]byte, 64)
		n, peer, err := socket.ReadFromUDPAddrPort(b)
		must(w.t, err)
		if peer.Addr().Unmap() != w.addr("guest") || !slices.Equal(b[:n], datagram(i)) {
			w.t.Errorf("%x came from %s, want %x from %s", b[:n], peer, datagram(i), w.addr("guest"))
		}
	}
}

// dial connects a socket of a host with a port of a function's host.
func (w *filterWorld) dial(from, kind, network string, port uint16) (net.Conn, error) {
	w.t.Helper()
	return w.dialFor(lostTime, from, kind, network, port)
}

func (w *filterWorld) dialFor(limit time.Duration, from, kind, network string, port uint16) (c net.Conn, err error) {
	w.t.Helper()
	e := w.Do(from, func() error {
		c, err = (&net.Dialer{Timeout: limit}).DialContext(soon(w.t), network, netip.AddrPortFrom(w.addr(kind), port).String())
		return nil
	})
	must(w.t, e)
	if err == nil {
		w.t.Cleanup(func() { c.Close() })
	}
	return c, err
}

// besides is the table of somebody else in a function's namespace: iptables has such,
// and what family inet has not.
const besides = "e2e"

func (w *filterWorld) family() (name string, number byte) {
	if w.ipv4 {
		return "ip", unix.NFPROTO_IPV4
	}
	return "ip6", unix.NFPROTO_IPV6
}

// loadBeside loads a table of somebody else's, for a subtest. waystamp leaves it alone.
func (w *filterWorld) loadBeside(kind, body string) {
	w.t.Helper()
	must(w.t, w.tryBeside(kind, body))
}

func (w *filterWorld) tryBeside(kind, body string) error {
	w.t.Helper()
	family, _ := w.family()
	n := w.netOf(kind)
	if err := n.LoadRuleset(w.t.Context(), fmt.Sprintf("table %s %s {\n%s\n}\n", family, besides, body)); err != nil {
		return err
	}
	w.t.Cleanup(func() {
		if err := n.LoadRuleset(context.WithoutCancel(w.t.Context()), fmt.Sprintf("delete table %s %s\n", family, besides)); err != nil {
			w.t.Error(err)
		}
	})
	return nil
}
