package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
)

// A chain there and back, over links of 1700 bytes, of which headers take 120:
//
//	h1 --- r1 --- r2 (fw) --- r3 (dpi) --- r6 --- h2
const narrowing = `
version: 1
domain: {block: "fc00::/48"}
nodes:
  - name: r1
    address: fc00:1::1
    locator: fc00:0:0:100::/56
    interfaces: [{name: r1-h1, role: edge}, {name: r1-r2, role: core, mtu: 1700}]
  - name: r2
    address: fc00:2::1
    locator: fc00:0:0:200::/56
    interfaces: [{name: r2-r1, role: core, mtu: 1700}, {name: r2-r3, role: core, mtu: 1700}]
  - name: r3
    address: fc00:3::1
    locator: fc00:0:0:300::/56
    interfaces: [{name: r3-r2, role: core, mtu: 1700}, {name: r3-r6, role: core, mtu: 1700}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    interfaces: [{name: r6-h2, role: edge}, {name: r6-r3, role: core, mtu: 1700}]
functions:
  - {name: fw, node: r2, kind: forward}
  - {name: dpi, node: r3, kind: forward}
chains:
  - name: web
    ingress: [r1]
    functions: [fw, dpi]
    egress: r6
    match: {destination: "fc00:8::/64"}
    direction: both
    proof: {scheme: keyed, on-violation: drop}
lab:
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64"}
    - {name: h2, node: r6, prefix: "fc00:8::/64"}
  links:
    - {between: [r1, r2]}
    - {between: [r2, r3]}
    - {between: [r3, r6]}
`

// narrow gives a link another MTU, below what the plan knows.
func (w *world) narrow(a, b string, mtu int) {
	w.t.Helper()
	must(w.t, errors.Join(w.net(a).SetMTU(a+"-"+b, mtu), w.net(b).SetMTU(b+"-"+a, mtu)))
}

// refusedSome says that refusals for these reasons are meant, however many there
// are, and that there are some of each.
func (w *world) refusedSome(node string, reasons ...string) {
	w.t.Helper()
	eventually(w.t, func() error {
		all, err := w.refusals()
		if err != nil {
			return err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, reason := range reasons {
			r := refusal{Node: node, Reason: reason}
			if all[r] == 0 {
				return fmt.Errorf("%s refused nothing for %s", node, reason)
			}
			w.expected[r] = all[r]
		}
		return nil
	})
}

// mayRefuse says that refusals for a reason are meant, if there are any, also those that come until
// the world ends: what is sent again.
func (w *world) mayRefuse(node, reason string) {
	w.t.Helper()
	all, err := w.refusals()
	must(w.t, err)
	w.mu.Lock()
	defer w.mu.Unlock()
	r := refusal{Node: node, Reason: reason}
	w.late[r] = true
	if all[r] > 0 {
		w.expected[r] = all[r]
	}
}

// udpSocket is a socket that sends no longer packets than the kernel thinks fit,
// and never cuts them (RFC 8201).
func udpSocket(t *testing.T, ns *host.NetNS, to netip.Addr) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	must(t, ns.Do(func() (err error) {
		c, err = net.DialUDP("udp6", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 9)))
		return err
	}))
	t.Cleanup(func() { c.Close() })
	must(t, onSocket(c, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
	}))
	return c
}

func onSocket(c *net.UDPConn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	return errors.Join(err, failed)
}

// mtu is what the kernel of the sender knows of the way.
func mtu(t *testing.T, c *net.UDPConn) (n int) {
	t.Helper()
	must(t, onSocket(c, func(fd int) (err error) {
		n, err = unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU)
		return err
	}))
	return n
}

// learns sends datagrams of that much payload until the sender's kernel knows
// that the way takes less, and returns how much it takes.
func learns(t *testing.T, c *net.UDPConn, payload, before int) (n int) {
	t.Helper()
	eventually(t, func() error {
		if _, err := c.Write(make([]byte, payload)); err != nil && !errors.Is(err, unix.EMSGSIZE) && !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
		if n = mtu(t, c); n == before {
			return fmt.Errorf("the sender still thinks that %d bytes fit", n)
		}
		return nil
	})
	return n
}

// Over labels the plan's MTU is learned, too; of a link that is narrower than the plan knows nobody
// can tell a headend, whose address is not in the packet: the node before it refuses.
func TestSendersLearnWhatAChainOverLabelsTakes(t *testing.T) {
	t.Parallel()
	w := build(t, narrowing, overLabels)
	w.reaches("h1", "h2")
	const headers = 36 + 8*3
	must(t, errors.Join(w.net("h1").SetMTU("h1-r1", 1700), w.net("r1").SetMTU("r1-h1", 1700)))
	c := udpSocket(t, w.ns("h1"), w.addr("h2"))
	if got := learns(t, c, 1640, 1700); got != 1700-headers {
		t.Errorf("the sender has learned that %d bytes fit, want %d", got, 1700-headers)
	}
	w.refusedSome("r1", "chain-mtu")

	w.narrow("r2", "r3", 1500)
	before, err := w.counters("r2")
	must(t, err)
	eventually(t, func() error {
		if _, err := c.Write(make([]byte, 1450)); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
		all, err := w.refusals()
		if n := all[refusal{Node: "r2", Reason: "too-big"}]; err == nil && n < 3 {
			err = fmt.Errorf("r2 has refused %d packets as too big", n)
		}
		return err
	})
	w.refusedSome("r2", "too-big")
	after, err := w.counters("r2")
	must(t, err)
	if got := mtu(t, c); got != 1700-headers || after.Errors.TooBig != before.Errors.TooBig {
		t.Errorf("the sender thinks that %d bytes fit, and r2 has sent %+v; want %d, and no error", got, after.Errors, 1700-headers)
	}
	out, err := w.Run(soon(t), "h1", "ping", "-6", "-c", "1", "-W", "5", "-M", "do", "-s", fmt.Sprint(1500-headers-48), w.addr("h2").String())
	if err != nil {
		t.Errorf("ping -M do of what fits: %v\n%s", err, out)
	}
}

// What a chain takes is learned by whoever sends more: the plan's MTU from the
// headend, a link's that is narrower than the plan knows from the node before it,
// by way of the headend.
func TestSendersLearnWhatAChainTakes(t *testing.T) {
	t.Parallel()
	bothSchemes(t, func(t *testing.T, s model.Scheme) {
		const headers = 120
		w := build(t, narrowing, proven(s))
		w.reaches("h1", "h2")
		// The host's link takes more than the chain.
		must(t, errors.Join(w.net("h1").SetMTU("h1-r1", 1700), w.net("r1").SetMTU("r1-h1", 1700)))
		c := udpSocket(t, w.ns("h1"), w.addr("h2"))
		if got := learns(t, c, 1600, 1700); got != 1700-headers {
			t.Errorf("the sender has learned that %d bytes fit, want %d", got, 1700-headers)
		}
		w.refusedSome("r1", "chain-mtu")

		w.narrow("r2", "r3", 1500)
		if got := learns(t, c, 1450, 1700-headers); got != 1500-headers {
			t.Errorf("behind a narrow link the sender has learned that %d bytes fit, want %d", got, 1500-headers)
		}
		w.refusedSome("r2", "too-big")
		w.refusedSome("r1", "path-mtu")
		for node, want := range map[string]uint64{"r1": 2, "r2": 1} {
			v, err := w.counters(node)
			must(t, err)
			if v.Errors.TooBig < want {
				t.Errorf("%s has sent %+v; want %d packets that tell of sizes, or more", node, v.Errors, want)
			}
		}

		// The same by hand, on the way that nobody has learned yet.
		out, err := w.Run(soon(t), "h2", "ping", "-6", "-c", "3", "-i", "0.2", "-M", "do", "-s", "1400", w.addr("h1").String())
		if said := fmt.Sprintf("mtu=%d", 1500-headers); err == nil || !strings.Contains(string(out), said) {
			t.Errorf("ping -M do: %v, and not %q:\n%s", err, said, out)
		}
		out, err = w.Run(soon(t), "h2", "ping", "-6", "-c", "1", "-W", "5", "-M", "do", "-s", fmt.Sprint(1500-headers-48), w.addr("h1").String())
		if err != nil {
			t.Errorf("ping -M do of what fits: %v\n%s", err, out)
		}
		w.refusedSome("r3", "too-big")
		w.refusedSome("r6", "path-mtu")
	})
}

// TCP with super-packets, through a link that was made narrower than the plan
// knows, and then narrower still while bytes flow: no black hole.
func TestDownloadThroughANarrowLink(t *testing.T) {
	t.Parallel()
	for _, cut := range []bool{false, true} {
		t.Run(fmt.Sprintf("offloads off %t", cut), func(t *testing.T) {
			t.Parallel()
			w := build(t, narrowing)
			w.reaches("h1", "h2")
			if cut {
				w.offloadsOff("h1", "h1-r1")
				w.offloadsOff("h2", "h2-r6")
			}
			w.narrow("r2", "r3", 1500)
			r := w.download("h2", "h1", 10_000_000)
			t.Logf("%.2f Gb/s", gigabits(r))
			w.narrow("r2", "r3", 1420)
			r = w.download("h2", "h1", 10_000_000)
			t.Logf("narrower: %.2f Gb/s", gigabits(r))
			c := udpSocket(t, w.ns("h2"), w.addr("h1"))
			if got := mtu(t, c); got != 1420-120 {
				t.Errorf("the sender thinks that %d bytes fit, want %d", got, 1420-120)
			}
			// Of super-packets the kernel of r3 tells, and the program refuses none.
			w.mayRefuse("r3", "too-big")
			w.refusedSome("r6", "path-mtu")
		})
	}
}

func (w *world) offloadsOff(node, link string) {
	w.t.Helper()
	n := w.net(node)
	for _, o := range []host.Offload{host.TSO, host.GSO} {
		must(w.t, n.SetOffload(link, o, false))
	}
}

// Probes with rising hop limits show the ends of a chain, as those of any tunnel
// (RFC 2473 3.1), by their nodes' addresses.
func TestHopLimitsShowTheNodes(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, hopLimitsShowTheNodes)
}

func hopLimitsShowTheNodes(t *testing.T, carried change) {
	w := borrow(t, narrowing, carried)
	w.reaches("h1", "h2")
	var conn *icmp.PacketConn
	must(t, w.ns("h1").Do(func() (err error) {
		conn, err = icmp.ListenPacket("ip6:ipv6-icmp", "::")
		return err
	}))
	defer conn.Close()
	var seen []string
	for limit := 1; limit <= 3; limit++ {
		must(t, conn.IPv6PacketConn().SetHopLimit(limit))
		m := icmp.Message{Type: ipv6.ICMPTypeEchoRequest, Body: &icmp.Echo{ID: 4242, Seq: limit, Data: []byte("probe")}}
		b, err := m.Marshal(nil)
		must(t, err)
		_, err = conn.WriteTo(b, &net.IPAddr{IP: w.addr("h2").AsSlice()})
		must(t, err)
		from, err := answer(t.Context(), conn)
		must(t, err)
		seen = append(seen, from)
	}
	want := []string{"fc00:1::1 time exceeded", "fc00:6::1 time exceeded", w.addr("h2").String() + " echo reply"}
	if !slices.Equal(seen, want) {
		t.Errorf("probes were answered by %q, want %q", seen, want)
	}
	w.refusedSome("r1", "edge-hop-limit")
	w.refusedSome("r6", "inner-hop-limit")
}

// answer waits for an error or an echo reply.
func answer(ctx context.Context, conn *icmp.PacketConn) (string, error) {
	if err := conn.SetReadDeadline(time.Now().Add(settleTime)); err != nil {
		return "", err
	}
	buf := make([]byte, 1500)
	for ctx.Err() == nil {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return "", fmt.Errorf("wait for an answer: %w", err)
		}
		m, err := icmp.ParseMessage(58, buf[:n])
		if err != nil {
			continue
		}
		if m.Type == ipv6.ICMPTypeTimeExceeded || m.Type == ipv6.ICMPTypeEchoReply {
			return fmt.Sprintf("%s %s", from, m.Type), nil
		}
	}
	return "", ctx.Err()
}

// unreachableCode waits for a Destination Unreachable (RFC 4443 3.1) that quotes a
// packet to there, and returns its source and code.
func unreachableCode(conn *icmp.PacketConn, there netip.Addr) (from string, code int, _ error) {
	if err := conn.SetReadDeadline(time.Now().Add(settleTime)); err != nil {
		return "", 0, err
	}
	buf := make([]byte, 1500)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return "", 0, fmt.Errorf("wait for an answer: %w", err)
		}
		m, err := icmp.ParseMessage(58, buf[:n])
		if err != nil || m.Type != ipv6.ICMPTypeDestinationUnreachable {
			continue
		}
		const quoted, destination = 8, 24
		if n >= quoted+40 && netip.AddrFrom16([16]byte(buf[quoted+destination:])) == there {
			return from.String(), m.Code, nil
		}
	}
}

// Who sends to where there is no way is told so: by the headend if the chain
// cannot begin, by the egress if it ends before nothing. Of a way that is missing
// between them the headend is told.
func TestSendersLearnThatThereIsNoWay(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, sendersLearnThatThereIsNoWay)
}

func sendersLearnThatThereIsNoWay(t *testing.T, carried change) {
	w := borrow(t, narrowing, carried)
	w.reaches("h1", "h2")
	listen := func(node string) (conn *icmp.PacketConn) {
		must(t, w.ns(node).Do(func() (err error) {
			conn, err = icmp.ListenPacket("ip6:ipv6-icmp", "::")
			return err
		}))
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	ip := func(node string, args ...string) {
		t.Helper()
		if out, err := w.Run(soon(t), node, append([]string{"ip", "-6", "route"}, args...)...); err != nil {
			t.Fatalf("%s: ip -6 route %q: %v\n%s", node, args, err, out)
		}
	}
	to := w.addr("h2")
	type noWay struct {
		name, where, hides string // the node, and what a route there refuses
		told, teller       string
		about              netip.Addr
		code               int
		reason             string
	}
	cases := []noWay{
		{"behind the egress", "r6", "unreachable " + to.String(), "h1", "fc00:6::1", to, 0, "inner-no-route"},
		{"behind the egress, prohibited", "r6", "prohibit " + to.String(), "h1", "fc00:6::1", to, 1, "inner-no-route"},
		{"at the headend", "r1", "unreachable fc00:0:0:200::/64", "h1", "fc00:1::1", to, 3, "no-route"},
		{"on the way", "r2", "unreachable fc00:0:0:300::/64", "r1", "fc00:2::1", netip.MustParseAddr("fc00:0:0:300::"), 0, "no-route"},
	}
	if w.labelled() { // on the way nobody knows whom to tell
		cases = cases[:3]
		cases[2].hides = "unreachable fc00:2::1 metric 1"
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			conn := listen(c.told)
			ip(c.where, append([]string{"add"}, strings.Fields(c.hides)...)...)
			udp := udpSocket(t, w.ns("h1"), to)
			before, err := w.counters(c.where)
			must(t, err)
			// Until the ways that the programs remember are void.
			eventually(t, func() error {
				// What the socket has been told of the packet before is an error of this one.
				_, refused := udp.Write([]byte("probe"))
				v, err := w.counters(c.where)
				if err != nil {
					return err
				}
				if v.Errors.Unreachable == before.Errors.Unreachable {
					return fmt.Errorf("%s has sent %+v; the socket says %w", c.where, v.Errors, refused)
				}
				return nil
			})
			from, code, err := unreachableCode(conn, c.about)
			if err != nil || from != c.teller || code != c.code {
				t.Errorf("%s is told code %d by %s, %v; want code %d by %s", c.told, code, from, err, c.code, c.teller)
			}
			ip(c.where, append([]string{"del"}, strings.Fields(c.hides)...)...)
			w.reaches("h1", "h2")
			w.refusedSome(c.where, c.reason)
		})
	}
}
