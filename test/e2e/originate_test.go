package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// What netfilter in a function makes itself takes the rest of its chain:
//
//	h1 --- r1 --- r2 (fw) --- r3 (dpi) --- r6 --- h2
//
// The IPv4 address of fw is one that its chain covers, that of IPv6 is not.
const rejecting = `
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
    interfaces: [{name: r6-r3, role: core, mtu: 1700}, {name: r6-h2, role: edge}]
functions:
  - name: fw
    node: r2
    kind: netfilter
    address: ["fc00:2:0:f::1", 198.51.100.254]
    rules: |
      chain early {
        type filter hook prerouting priority raw; policy accept;
        tcp dport 80 tcp flags syn notrack
      }
      chain forward {
        type filter hook forward priority filter; policy accept;
        tcp dport 80 ct state invalid,untracked synproxy mss 1300 wscale 7 timestamp sack-perm
        ct state invalid drop
        tcp dport 22 reject with tcp reset
        tcp dport 23 reject with icmpx type host-unreachable
        udp dport 22 reject with icmpx type port-unreachable
      }
  - {name: dpi, node: r3, kind: forward}
chains:
  - {name: web, ingress: [r1], functions: [fw, dpi], egress: r6, match: {destination: "fc00:8::/64"}, direction: both}
  - {name: web4, ingress: [r1], functions: [fw, dpi], egress: r6, match: {destination: 198.51.100.0/24}, direction: both}
lab:
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64", prefix4: 192.0.2.0/24}
    - {name: h2, node: r6, prefix: "fc00:8::/64", prefix4: 198.51.100.0/24}
  links:
    - {between: [r1, r2]}
    - {between: [r2, r3]}
    - {between: [r3, r6]}
`

// fromFW is the path of a chain from fw on.
func (w *world) fromFW(chain string, d model.Direction) plan.Path {
	w.t.Helper()
	i := slices.IndexFunc(w.plan.Paths, func(p plan.Path) bool { return p.Chain == chain && p.Direction == d && p.From == "fw" })
	if i < 0 {
		w.t.Fatalf("chain %s, %s, has no path from fw on", chain, d)
	}
	return w.plan.Paths[i]
}

// meets tries a port of h2 from h1 and wants an error of the kernel.
func (w *world) meets(network string, port uint16, want error) {
	w.t.Helper()
	var c net.Conn
	var err error
	must(w.t, w.Do("h1", func() error {
		c, err = (&net.Dialer{Timeout: settleTime}).DialContext(soon(w.t), network, netip.AddrPortFrom(w.addr("h2"), port).String())
		return nil
	}))
	if err == nil {
		defer c.Close()
		if _, err = c.Write([]byte("anybody there?")); err == nil {
			must(w.t, c.SetReadDeadline(time.Now().Add(settleTime)))
			_, err = c.Read(make([]byte, 1))
		}
	}
	if !errors.Is(err, want) {
		w.t.Errorf("%s, port %d: %v; want %v", network, port, err, want)
	}
}

// The client behind a firewall that rejects is told so at once: by a RST, and by an ICMP
// error where the chain takes that, with a proof of the path from the firewall on.
func TestARejectReachesTheClientWithAProof(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		name    string
		scheme  model.Scheme
		carried change
	}{
		{"keyed", model.SchemeKeyed, overSRv6}, {"keyed-flow", model.SchemeKeyedFlow, overSRv6}, {"opot", model.SchemeOPoT, overSRv6},
		{"keyed-flow over labels", model.SchemeKeyedFlow, overLabels},
	} {
		t.Run(v.name, func(t *testing.T) {
			w := borrow(t, rejecting, proven(v.scheme), v.carried)
			for _, c := range []struct {
				chain   string
				ipv4    bool
				covered bool // the source of ICMP errors, by the chain
			}{{"web", false, false}, {"web4", true, true}} {
				w := w.in(t)
				w.ipv4 = c.ipv4
				before, err := w.function("r2", "fw")
				must(t, err)
				whole := w.counting(w.path(c.chain, model.Reverse))
				rest := w.counting(w.fromFW(c.chain, model.Reverse))
				w.meets("tcp", 22, unix.ECONNREFUSED)
				w.meets("tcp", 23, unix.EHOSTUNREACH)
				w.meets("udp", 22, unix.ECONNREFUSED)
				took := rest().frames()
				if n := whole().frames(); n != 0 {
					t.Errorf("%s: %d packets came from h2", c.chain, n)
				}
				// A connecting socket that is busy when an ICMP error comes sends its SYN again.
				now, err := w.function("r2", "fw")
				must(t, err)
				in := now.RxSuccess - before.RxSuccess
				want := api.Function{RxSuccess: in, TxNotCached: in, TxOriginated: in}
				if !c.covered {
					want.TxOriginated, want.TxPlain = 1, in-1
				}
				w.fwHas(before, want)
				if in < 3 || took != want.TxOriginated {
					t.Errorf("%s: fw has rejected %d packets, and %d took the chain from there; want 3 or more, and %d", c.chain, in, took, want.TxOriginated)
				}
				w.reaches("h1", "h2") // what is not rejected
			}
		})
	}
}

// fwHas waits until fw has counted so much more.
func (w *world) fwHas(before, more api.Function) {
	w.t.Helper()
	eventually(w.t, func() error {
		now, err := w.function("r2", "fw")
		if err != nil {
			return err
		}
		got := [4]uint64{now.RxSuccess - before.RxSuccess, now.TxNotCached - before.TxNotCached, now.TxOriginated - before.TxOriginated, now.TxPlain - before.TxPlain}
		if want := [4]uint64{more.RxSuccess, more.TxNotCached, more.TxOriginated, more.TxPlain}; got != want {
			return fmt.Errorf("fw has counted %d packets in, %d made, of these %d in a chain and %d plain; want %d", got[0], got[1], got[2], got[3], want)
		}
		return nil
	})
}

// Nothing but what comes out of the function's own interfaces, and what its chains cover,
// gets a proof.
func TestNobodyElseOriginatesAtAFunction(t *testing.T) {
	t.Parallel()
	bothEncapsulations(t, nobodyElseOriginates)
}

func nobodyElseOriginates(t *testing.T, carried change) {
	w := borrow(t, rejecting, carried)
	w.reaches("h1", "h2")
	before, err := w.function("r2", "fw")
	must(t, err)

	// A stranger at the core interface, in the names of both hosts.
	p := openPort(t, w.ns("r1"), "r1-r2", unix.ETH_P_ALL)
	l, err := w.net("r2").Link("r2-r1")
	must(t, err)
	send := func(from, to netip.Addr) {
		t.Helper()
		rst := make([]byte, 20)
		rst[1], rst[3], rst[12], rst[13] = 22, 99, 0x50, 0x14
		must(t, sendBy(p, srv6.Packet{
			Ethernet: &srv6.Ethernet{Destination: l.MAC, Source: p.MAC, Type: srv6.EtherTypeIPv6},
			Header:   srv6.Header{NextHeader: unix.IPPROTO_TCP, HopLimit: 63, Source: from, Destination: to}, Payload: rst,
		}))
	}
	since := time.Now()
	send(w.addr("h2"), w.addr("h1"))
	w.refused("r1", "unproven", 1)
	w.explained(w.event(since, "r1", "unproven"), "*came without proof*")
	send(w.addr("h1"), w.addr("h2"))
	w.refused("r6", "unproven", 1)
	w.fwHas(before, api.Function{})

	// The function itself: to h2 its chain leads, from its address to h1 none does.
	ns, err := host.OpenNamed("waystamp-" + w.Instance("r2") + "-fw")
	must(t, err)
	defer ns.Close()
	at := w.udp("h2", "udp6", netip.AddrPortFrom(w.addr("h2"), 7777).String())
	own := netip.MustParseAddr("fc00:2:0:f::1")
	say := func(to netip.AddrPort) {
		t.Helper()
		must(t, ns.Do(func() error {
			c, err := net.DialUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(own, 0)), net.UDPAddrFromAddrPort(to))
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("from fw"))
			return err
		}))
	}
	rest := w.counting(w.fromFW("web", model.Forward))
	say(netip.AddrPortFrom(w.addr("h2"), 7777))
	b := make([]byte, 64)
	must(t, at.SetReadDeadline(time.Now().Add(settleTime)))
	n, peer, err := at.ReadFromUDPAddrPort(b)
	if err != nil || peer.Addr() != own || !bytes.Equal(b[:n], []byte("from fw")) {
		t.Errorf("h2 got %q from %s, %v", b[:n], peer, err)
	}
	if n := rest().frames(); n != 1 {
		t.Errorf("%d packets took the chain from fw on; want 1", n)
	}
	since = time.Now()
	say(netip.AddrPortFrom(w.addr("h1"), 7777))
	w.refused("r2", "origin-unmatched", 1)
	w.explained(w.event(since, "r2", "origin-unmatched"), "a packet from fc00:2:0:f::1 to fc00:7::2 was refused: a function made this packet itself, and no chain through the function takes it")
	w.fwHas(before, api.Function{TxNotCached: 2, TxOriginated: 1})

	// A proof of the path from the function on opens its own chain, and no other one.
	other := w.fromFW("web4", model.Forward)
	if other.Path == w.fromFW("web", model.Forward).Path || other.Path == w.path("web4", model.Forward).Path {
		t.Errorf("paths share the id %#x", other.Path)
	}
}

// Connection tracking puts fragments together and cuts them anew, all with the index of
// the first. They get their headers back, and none of them is taken for the function's own.
func TestFragmentsAreNotMadeByTheFunction(t *testing.T) {
	t.Parallel()
	bothEncapsulations(t, fragmentsAreNotMade)
}

func fragmentsAreNotMade(t *testing.T, carried change) {
	w := borrow(t, rejecting, carried)
	w.reaches("h1", "h2")
	rest := w.counting(w.fromFW("web", model.Forward))
	before, err := w.function("r2", "fw")
	must(t, err)
	w.udp("h2", "udp6", netip.AddrPortFrom(w.addr("h2"), 7777).String()) // so that it answers nothing
	from := w.udp("h1", "udp6", netip.AddrPortFrom(w.addr("h1"), 0).String())
	_, err = from.WriteToUDPAddrPort(make([]byte, 2500), netip.AddrPortFrom(w.addr("h2"), 7777))
	must(t, err)
	w.fwHas(before, api.Function{RxSuccess: 2})
	eventually(t, func() error {
		now, err := w.function("r2", "fw")
		if err == nil && now.TxSuccess != before.TxSuccess+2 {
			err = fmt.Errorf("%d packets have their headers back, want 2", now.TxSuccess-before.TxSuccess)
		}
		return err
	})
	if n := rest().frames(); n != 0 {
		t.Errorf("%d packets took the chain from fw on; want none", n)
	}
}

// With on-unknown: drop the client waits for its timeout.
func TestRejectsAreRefusedWhereTheOperatorSaysSo(t *testing.T) {
	t.Parallel()
	w := build(t, rejecting, func(m *manifest.Manifest) {
		m.Domain.Functions[0].Proxy.OnUnknown = model.OnUnknownDrop
	})
	var ne net.Error
	var err error
	must(t, w.Do("h1", func() error {
		_, err = (&net.Dialer{Timeout: lostTime}).DialContext(soon(t), "tcp", netip.AddrPortFrom(w.addr("h2"), 22).String())
		return nil
	}))
	if !errors.As(err, &ne) || !ne.Timeout() {
		t.Errorf("%v; want no answer", err)
	}
	w.refused("r2", "not-cached", 1)
}

// A SYN proxy answers the client, and then asks the server, by packets of its own in both
// directions; the connection goes on by the whole chain.
func TestASynproxyConnectsThroughItsChain(t *testing.T) {
	t.Parallel()
	bothEncapsulations(t, synproxyConnects)
}

func synproxyConnects(t *testing.T, carried change) {
	w := build(t, rejecting, carried)
	ns, err := host.OpenNamed("waystamp-" + w.Instance("r2") + "-fw")
	must(t, err)
	defer ns.Close()
	inside, err := host.Open(ns)
	must(t, err)
	defer inside.Close()
	// Else an ACK would be taken for one of a connection that was there before.
	must(t, inside.SetSysctl("net/netfilter/nf_conntrack_tcp_loose", "0"))
	for _, ipv4 := range []bool{false, true} {
		w := w.in(t)
		w.ipv4 = ipv4
		chain := map[bool]string{false: "web", true: "web4"}[ipv4]
		there, back := w.counting(w.fromFW(chain, model.Forward)), w.counting(w.fromFW(chain, model.Reverse))
		at := netip.AddrPortFrom(w.addr("h2"), 80).String()
		var l net.Listener
		must(t, w.Do("h2", func() (err error) {
			l, err = new(net.ListenConfig).Listen(soon(t), "tcp", at)
			return err
		}))
		served := make(chan error, 1)
		go func() {
			c, err := l.Accept()
			if err == nil {
				_, err = c.Write([]byte("from h2"))
				err = errors.Join(err, c.Close())
			}
			served <- err
		}()
		must(t, w.Do("h1", func() error {
			c, err := (&net.Dialer{Timeout: settleTime}).DialContext(soon(t), "tcp", at)
			if err != nil {
				return err
			}
			defer c.Close()
			b, err := io.ReadAll(c)
			if err == nil && string(b) != "from h2" {
				err = fmt.Errorf("h1 got %q", b)
			}
			return err
		}))
		must(t, errors.Join(<-served, l.Close()))
		if n := back().frames(); n == 0 {
			t.Errorf("%s: no packet took the chain back from fw on; want the SYN proxy's answer", chain)
		}
		if n := there().frames(); n == 0 {
			t.Errorf("%s: no packet took the chain from fw on; want the SYN proxy's SYN", chain)
		}
	}
}
