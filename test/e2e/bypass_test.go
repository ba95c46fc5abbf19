package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// A firewall in a namespace of its own lets flows go past it that it has accepted:
//
//	h1 --- r1 --- r2 (fw) --- r6 --- h2
const bypassing = `
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
    interfaces: [{name: r2-r1, role: core, mtu: 1700}, {name: r2-r6, role: core, mtu: 1700}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    interfaces: [{name: r6-r2, role: core, mtu: 1700}, {name: r6-h2, role: edge}]
functions:
  - name: fw
    node: r2
    kind: netfilter
    bypass: established
    rules: |
      counter begun {
      }
      chain forward {
        type filter hook forward priority filter; policy drop;
        ct state invalid drop
        ct state established ct mark set $bypass accept
        udp dport { 4000, 4001 } counter name begun accept
        tcp dport 1024-65535 accept
      }
chains:
  - {name: web, ingress: [r1], functions: [fw], egress: r6, match: {destination: "fc00:8::/64"}, direction: both}
lab:
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64"}
    - {name: h2, node: r6, prefix: "fc00:8::/64"}
  links:
    - {between: [r1, r2]}
    - {between: [r2, r6]}
`

// echo is a server of h2 that answers datagrams, and counts them.
type echo struct {
	w     *world
	heard atomic.Uint64
	conn  *net.UDPConn // of h1, to it
}

func (w *world) echoes(port uint16) *echo {
	w.t.Helper()
	at := netip.AddrPortFrom(w.addr("h2"), port)
	e, server := &echo{w: w}, socketAt(w.t, w.ns("h2"), at)
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := server.ReadFromUDPAddrPort(b)
			if err != nil {
				return // it is closed
			}
			e.heard.Add(1)
			server.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	must(w.t, w.Do("h1", func() (err error) {
		e.conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(at))
		return err
	}))
	w.t.Cleanup(func() { e.conn.Close() })
	return e
}

// asks sends a datagram and waits for the answer.
func (e *echo) asks() {
	e.w.t.Helper()
	must(e.w.t, e.send())
	must(e.w.t, e.conn.SetReadDeadline(time.Now().Add(settleTime)))
	if _, err := e.conn.Read(make([]byte, 100)); err != nil {
		e.w.t.Fatalf("no answer: %v", err)
	}
}

func TestFlowsGoPastAFirewallThatHasAcceptedThem(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		d       model.Datapath
		carried change
	}{{"tc", model.DatapathTC, overSRv6}, {"xdp", model.DatapathXDP, overSRv6}, {"tc, sr-mpls", model.DatapathTC, overLabels}} {
		t.Run(c.name, func(t *testing.T) {
			w := build(t, bypassing, datapath(c.d), c.carried)
			if c.d == model.DatapathXDP {
				for host1, link := range map[string]string{"h1": "h1-r1", "h2": "h2-r6"} {
					must(t, w.net(host1).SetOffload(link, host.GRO, true))          // else it takes no redirects
					must(t, w.net(host1).SetOffload(link, host.TransmitSum, false)) // nobody completes them behind XDP
				}
			}
			e := w.echoes(4000)
			there, back := w.counting(w.path("web", model.Forward)), w.counting(w.path("web", model.Reverse))
			asked := uint64(0)
			eventually(t, func() error {
				for range 10 {
					e.asks()
				}
				asked += 10
				f, err := w.function("r2", "fw")
				if err == nil && f.Bypassed < 100 {
					err = fmt.Errorf("%d packets went past fw, %d through it", f.Bypassed, f.RxSuccess)
				}
				return err
			})
			f, err := w.function("r2", "fw")
			must(t, err)
			if f.Bypassed+f.RxSuccess != 2*asked || f.RxSuccess < 2 || f.RxSuccess != f.TxSuccess {
				t.Errorf("%d asked and %d answered; %d went past fw, %d to it and %d came back", asked, asked, f.Bypassed, f.RxSuccess, f.TxSuccess)
			}
			if a, b := there().frames(), back().frames(); a != asked || b != asked {
				t.Errorf("%d asked; the chain has counted %d and %d", asked, a, b)
			}

			// A connection of which netfilter sees a few segments is none that it takes for wrong.
			before := f
			w.download("h2", "h1", 8<<20)
			f, err = w.function("r2", "fw")
			must(t, err)
			if f.Bypassed == before.Bypassed {
				t.Errorf("of a download no packet went past fw: %+v", f)
			}

			// Rules that forbid the flow: not one of its packets more.
			n, err := w.NodePlan("r2")
			must(t, err)
			i := slices.IndexFunc(n.Proxies, func(p plan.Proxy) bool { return p.Function == "fw" })
			nf := *n.Proxies[i].Netfilter
			nf.Rules = "chain forward {\n  type filter hook forward priority filter; policy drop;\n  udp dport 4000 drop\n  ct state established ct mark set $bypass accept\n  udp dport 4001 accept\n}\n"
			n.Proxies[i].Netfilter = &nf
			e.asks() // it goes past fw, or did a moment ago
			w.follow(n)
			heard := e.heard.Load()
			for range 50 {
				_, err := e.conn.Write([]byte("still there?"))
				must(t, err)
			}
			w.echoes(4001).asks() // behind all those
			if now := e.heard.Load(); now != heard {
				t.Errorf("%d datagrams have come through rules that forbid them", now-heard)
			}
			must(t, e.conn.SetReadDeadline(time.Now()))
			if _, err := e.conn.Read(make([]byte, 100)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%v; want no answer", err)
			}
		})
	}
}

// Connection tracking is that of the namespace that the rules are in, whose it ever is; and of a
// packet that goes past the rules the stamp is bound to its flow, where the chain asks for that.
func TestFlowsGoPastAFirewallWhereverItsRulesAre(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		namespace string
		scheme    model.Scheme
	}{{model.NamespaceOwn, model.SchemeKeyedFlow}, {model.NamespaceNode, model.SchemeKeyed}, {"named", model.SchemeKeyedFlow}} {
		t.Run(c.namespace+" "+c.scheme.String(), func(t *testing.T) {
			prefix := newPrefix()
			name := c.namespace
			theirs := &filterWorld{world: &world{t: t}, there: &there{name: "there-" + prefix}}
			if c.namespace == "named" {
				name = theirs.there.name
				theirs.makeThere()
				t.Cleanup(func() { must(t, theirs.theirs.Delete()) })
			}
			text := strings.Replace(bypassing, "bypass: established", "namespace: "+name+"\n    bypass: established", 1)
			w := buildFrom(t, parse(t, text, proven(c.scheme)), func(l *lab.Config) { l.Prefix = prefix })
			if c.namespace == "named" {
				n, err := host.Open(theirs.theirs)
				must(t, err)
				t.Cleanup(func() { must(t, n.Close()) })
				must(t, n.ReplaceRoute(host.Route{Destination: netip.MustParsePrefix("::/0"), Via: netip.MustParseAddr("fe80::1"), Device: "wso-fw"}))
			}
			e := w.echoes(4000)
			there, back := w.counting(w.path("web", model.Forward)), w.counting(w.path("web", model.Reverse))
			asked := uint64(0)
			eventually(t, func() error {
				for range 10 {
					e.asks()
				}
				asked += 10
				f, err := w.function("r2", "fw")
				if err == nil && f.Bypassed < 100 {
					err = fmt.Errorf("%d packets went past fw, %d through it", f.Bypassed, f.RxSuccess)
				}
				return err
			})
			f, err := w.function("r2", "fw")
			must(t, err)
			if f.Bypassed+f.RxSuccess != 2*asked || f.RxSuccess != f.TxSuccess {
				t.Errorf("%d asked and answered; %d went past fw, %d to it and %d came back", asked, f.Bypassed, f.RxSuccess, f.TxSuccess)
			}
			// Egresses have verified each of them.
			if a, b := there().frames(), back().frames(); a != asked || b != asked {
				t.Errorf("%d asked; the chain has counted %d and %d", asked, a, b)
			}
			// A flow that the rules do not let in never gets there.
			closed := w.echoes(4002)
			must(t, errors.Join(closed.send(), closed.send()))
			w.echoes(4001).asks()
			if n := closed.heard.Load(); n != 0 {
				t.Errorf("%d datagrams have come through rules that forbid them", n)
			}
		})
	}
}

func (e *echo) send() error {
	_, err := e.conn.Write([]byte("anybody there?"))
	return err
}
