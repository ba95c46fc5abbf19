package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

// One function that knows nothing of segment routing, fn on r2:
//
//	h1 --- r1 --- r2 (fn) --- r6 --- h2       chain web, both ways: r1, fn, r6
const oneFunction = `
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
    interfaces: [{name: r6-h2, role: edge}, {name: r6-r2, role: core, mtu: 1700}]
functions:
  - {name: fn, node: r2, kind: unaware, FUNCTION}
chains:
  - name: web
    ingress: [r1]
    functions: [fn]
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
    - {between: [r2, r6]}
  functions:
    - name: fn
LAB
`

// Ways to attach fn: it routes, behind two interfaces or one; or it takes any
// frame.
const (
	routing    = `attach: {to: fn-to, from: fn-from, via: "fd00:6::2"}`
	routingOne = `attach: {to: fn0, from: fn0, via: "fe80::2"}`
	inLine     = `attach: {to: fn-to, from: fn-from}`
	inLineOne  = `attach: {to: fn0, from: fn0}`
	local      = `attach: local`
)

// What fn is.
const (
	forwards = `kind: forward`
	copies   = `kind: raw`
	filters  = `kind: nftables
ruleset: |
  table inet fw {
    chain forward {
      type filter hook forward priority filter; policy accept;
      ct state invalid drop
      tcp dport 23 drop
    }
  }`
)

// withFunction fills oneFunction in.
func withFunction(function, made string) string {
	made = "      " + strings.ReplaceAll(made, "\n", "\n      ")
	return strings.NewReplacer("FUNCTION", function, "LAB", made).Replace(oneFunction)
}

// droppedBy is how many frames a member's interfaces of cutAndMerge have dropped (tx_dropped): a veth whose
// other end merges has a queue of 256 frames.
func (w *world) droppedBy(member string) (n uint64) {
	w.t.Helper()
	for _, l := range w.cutting {
		if l[0] == member {
			must(w.t, w.ns(member).Do(func() error {
				dev, err := netlink.LinkByName(l[1])
				if err == nil {
					n += dev.Attrs().Statistics.TxDropped
				}
				return err
			}))
		}
	}
	return n
}

// cutAndMerge makes members cut what they send by an interface, and everybody
// merge what arrives: over veth the kernel merges only what was cut.
func (w *world) cutAndMerge(links ...[2]string) {
	w.t.Helper()
	for _, l := range links {
		must(w.t, w.net(l[0]).SetOffload(l[1], host.TSO, false))
	}
	w.cutting = links
	for _, m := range w.Members() {
		if m.Program != nil {
			continue // it cannot put out what was merged before it
		}
		n := w.net(m.Name)
		links, err := n.Links()
		must(w.t, err)
		for _, l := range links {
			if l.Kind == "veth" && !strings.HasPrefix(l.Name, "ws") { // not the cutters
				must(w.t, n.SetOffload(l.Name, host.GRO, true))
			}
		}
	}
}

// hasOffloads checks that the interfaces between two members have all that make
// super-packets of what TCP sends and leave their checksums to the other end.
func (w *world) hasOffloads(links ...[2]string) {
	w.t.Helper()
	for _, l := range links {
		for _, o := range []host.Offload{host.TSO, host.GSO, host.ScatterGather, host.TransmitSum} {
			on, err := w.net(l[0]).Offload(l[1], o)
			must(w.t, err)
			if !on {
				w.t.Errorf("%s of %s in %s is off", o, l[1], l[0])
			}
		}
	}
}

// Real TCP in both directions, with all offloads on, loses nothing and no stamp:
// what goes into a function is what is stamped behind it, and no header is
// missed.
func TestTCPThroughAFunctionLosesNoStamp(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, function, made string
		labels               string      // the version of IP that it has over labels where WAYSTAMP_ENCAPSULATIONS is not all; none: neither
		cutAt                [][2]string // and merged wherever it arrives; nil: neither
	}{
		{"nftables, cut", routing, filters, "IPv6", nil},
		{"nftables, cut, and merged by the function", routing, filters, "", [][2]string{{"r2", "fn-to"}}},
		{"nftables, kept", routing + ", recognise: metadata", filters, "IPv4", nil},
		{"nftables, kept, by content", routing + ", segments: keep", filters, "", nil},
		{"one interface", routingOne, forwards, "IPv4", nil},
		{"user space", inLine, copies, "IPv6", nil},
		{"user space, one interface", inLineOne, copies, "IPv4", nil},
		{"own kernel", local, filters, "IPv6", nil},
		{"own kernel, cut and merged on the way", local, filters, "", [][2]string{{"r1", "r1-r2"}, {"r6", "r6-r2"}}},
	} {
		for _, version := range []string{"IPv6", "IPv4", "IPv6 over labels", "IPv4 over labels"} {
			labels := strings.HasSuffix(version, "labels")
			if labels && (c.labels == "" || !overAll() && !strings.HasPrefix(version, c.labels)) {
				continue // see alsoOverLabels
			}
			t.Run(c.name+", "+version, func(t *testing.T) {
				var changes []change
				if strings.HasPrefix(version, "IPv4") {
					changes = append(changes, inIPv4)
				}
				if labels {
					changes = append(changes, overLabels)
				}
				// On a slow machine no kept header expires, and connection tracking takes no segment for
				// invalid by its sequence number.
				w := build(t, withFunction(c.function+", lifetime: 1m", c.made), changes...)
				if c.made == filters {
					at := "fn"
					if c.function == local {
						at = "r2"
					}
					must(t, w.net(at).SetSysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1"))
				}
				w.ipv4 = strings.HasPrefix(version, "IPv4")
				w.hasOffloads([2]string{"h1", "h1-r1"}, [2]string{"h2", "h2-r6"}, [2]string{"r1", "r1-r2"}, [2]string{"r6", "r6-r2"})
				if c.cutAt != nil {
					w.cutAndMerge(c.cutAt...)
				}
				since, back := w.counting(w.path("web", model.Forward)), w.counting(w.path("web", model.Reverse))
				const size = 10_000_000
				// One by one: of echo requests that GRO hands on together, connection tracking sees all before
				// it has confirmed the first, and drops the others (nf_ct_resolve_clash).
				for range 5 {
					if got := w.ping("h1", "h2", lab.PingConfig{Timeout: settleTime}); got != 1 {
						t.Fatal("an echo request was not answered")
					}
				}
				a, b := w.download("h2", "h1", size), w.download("h1", "h2", size)
				t.Logf("%.2f and %.2f Gb/s", gigabits(a), gigabits(b))
				var there, andBack flow
				var f api.Function
				eventually(t, func() error { // what ends a connection may be on its way still
					f, there, andBack = w.passed("r2", "fn"), since(), back()
					if n := there[1].Packets + andBack[1].Packets; f.RxSuccess != n {
						return fmt.Errorf("%d packets were stamped, %d went in", n, f.RxSuccess)
					}
					return nil
				})
				t.Logf("%+v", f)

				if n := there.frames() + andBack.frames(); labels && (f.RxSuccess != n || f.RxCut != 0) {
					t.Errorf("%d frames were sent, %d went in, %d super-packets were cut; want all, and none", n, f.RxSuccess, f.RxCut)
				} else if labels {
					return
				}
				if cut := !strings.Contains(c.function, "keep") && f.Recognise == model.RecogniseContent.String(); cut {
					if n := there.frames() + andBack.frames(); f.RxSuccess != n || f.RxCut == 0 {
						t.Errorf("%d frames were sent, %d went in; %d super-packets were cut", n, f.RxSuccess, f.RxCut)
					}
				} else if 2*f.RxSuccess > there.frames()+andBack.frames() || f.RxCut != 0 {
					t.Errorf("%d frames were sent, %d packets went in: they are no super-packets", there.frames()+andBack.frames(), f.RxSuccess)
				}
				// What comes back merged from one that gets frames is cut again.
				if merged := c.cutAt != nil && c.function == routing; merged != (f.TxCut > 0) {
					t.Errorf("%d super-packets came back", f.TxCut)
				}
			})
		}
	}
}
