//go:build stock

package e2e

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

// dropped is how many packets a node has refused by now for a reason; "": for any.
func (w *world) dropped(node, reason string) (n uint64) {
	w.t.Helper()
	c, err := w.counters(node)
	must(w.t, err)
	for _, r := range c.Refusals {
		if reason == "" || r.Reason == reason {
			n += r.Dropped
		}
	}
	return n
}

// mplsLab is the example of chains over labels, without agents and with hosts of IPv4.
func mplsLab(t *testing.T, changes ...change) *world {
	t.Helper()
	w := buildFrom(t, parse(t, string(examples.MPLS), changes...), func(c *lab.Config) { c.WithoutAgents = true })
	w.ipv4 = true
	return w
}

// The kernel of r1 pushes labels itself (ip route ... encap mpls), also those of all visits of the chain. Without a proof no
// node takes such a packet.
func TestStockLabelsThatTheKernelPushesProveNothing(t *testing.T) {
	w := mplsLab(t)
	for _, n := range w.nodes() {
		if n != "r1" {
			must(t, w.StartAgent(soon(t), n))
		}
	}
	w.neighboured("r4", "r2")
	w.neighboured("r2", "r3")
	w.neighboured("r3", "r5")
	w.neighboured("r5", "r6")
	const indicator, entropy = 7, 4711
	var stack []uint32
	path := w.path("web4", model.Forward)
	for i, h := range path.Hops[1:] {
		stack = append(stack, h.NodeLabel)
		if i == 0 {
			stack = append(stack, indicator, entropy)
		}
		stack = append(stack, h.ServiceLabel)
	}
	egress := path.Hops[len(path.Hops)-1]
	delivered := w.record("h2", "h2-r6")
	for _, c := range []struct {
		name         string
		labels       []uint32
		node, reason string
	}{
		{"the stack of the chain", stack, "r2", "word-version"},
		{"the visit of the egress", []uint32{egress.NodeLabel, indicator, entropy, egress.ServiceLabel}, "r6", "word-version"},
		{"the same without entropy", []uint32{egress.NodeLabel, egress.ServiceLabel}, "r6", "word-version"},
		{"the node of the egress alone", []uint32{egress.NodeLabel}, "r6", "labels-bottom"},
		{"a label of nobody", []uint32{500}, "r4", "label-unknown"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := w.in(t)
			var labels []string
			for _, l := range c.labels {
				labels = append(labels, strconv.Itoa(int(l)))
			}
			w.shell("r1", "ip", "-4", "route", "replace", "198.51.100.0/24", "encap", "mpls", strings.Join(labels, "/"), "via", w.nodeOf("r4").MPLS.Address.String(), "dev", "r1-r4", "onlink")
			before, all := w.dropped(c.node, c.reason), w.dropped(c.node, "")
			since := time.Now()
			w.isCutOff("h1", "h2", probes)
			eventually(t, func() error {
				if n, of := w.dropped(c.node, c.reason)-before, w.dropped(c.node, "")-all; n != probes || of != probes {
					return fmt.Errorf("%s has refused %d packets, %d of them for %s; want %d", c.node, of, n, c.reason, probes)
				}
				return nil
			})
			t.Log(w.sentence(w.event(since, c.node, c.reason)))
		})
	}
	if n := echoes4(delivered.soFar(), w.addr("h2")); n > 0 {
		t.Errorf("%d echo requests came to h2", n)
	}
}

// echoes4 counts echo requests of IPv4 to an address.
func echoes4(all [][]byte, to netip.Addr) (n int) {
	a := to.As4()
	for _, b := range all {
		if len(b) > 34 && b[12] == 8 && b[13] == 0 && b[14] == 0x45 && b[23] == unix.IPPROTO_ICMP && [4]byte(b[30:34]) == a && b[34] == 8 {
			n++
		}
	}
	return n
}

// The kernel of an edge node takes labels from outside, and has routes for them, and others that push labels towards the
// outside (MPLS input is on). With waystamp nothing with labels passes the boundary in either direction.
func TestStockLabelsDoNotPassTheBoundary(t *testing.T) {
	w := mplsLab(t)
	r1 := w.net("r1")
	must(t, r1.SetSysctl("net/mpls/platform_labels", "20000"))
	must(t, r1.SetSysctl("net/mpls/conf/r1-h1/input", "1"))
	const taken, pushed, server = 600, 700, "203.0.113.9"
	w.shell("r1", "ip", "-f", "mpls", "route", "add", strconv.Itoa(taken), "via", "inet", w.nodeOf("r4").MPLS.Address.String(), "dev", "r1-r4")
	w.shell("r1", "ip", "-4", "route", "add", server+"/32", "encap", "mpls", strconv.Itoa(pushed), "via", w.addr("h1").String(), "dev", "r1-h1")
	w.shell("h1", "ip", "-4", "route", "add", w.addr("h2").String()+"/32", "encap", "mpls", strconv.Itoa(taken), "via", "192.0.2.1", "dev", "h1-r1")
	atR4, atH1 := w.record("r4", "r4-r1"), w.record("h1", "h1-r1")
	in := func() int { return echoes4(atR4.soFar(), w.addr("h2")) }
	mac, err := w.net("h1").HardwareAddress("h1-r1")
	must(t, err)
	out := func() (n int) {
		for _, b := range atH1.soFar() {
			// Frames that h1 sends are not among them, though they have labels, too.
			if len(b) > 14 && [6]byte(b[:6]) == mac && b[12] == 0x88 && (b[13] == 0x47 || b[13] == 0x48) {
				n++
			}
		}
		return n
	}
	sendIn := func() {
		t.Helper()
		w.isCutOff("h1", "h2", probes) // without labels there is no way back
	}
	sendOut := func() {
		t.Helper()
		if said, err := w.Run(soon(t), "r1", "ping", "-c", strconv.Itoa(probes), "-i", "0.2", "-W", "1", server); err == nil {
			t.Errorf("%s answers, which is nowhere: %s", server, said)
		}
	}
	// So the kernel does it, where waystamp is not.
	sendIn()
	sendOut()
	eventually(t, func() error {
		if a, b := in(), out(); a != probes || b != probes {
			return fmt.Errorf("without waystamp %d packets came to r4, and %d with labels to h1; want %d each", a, b, probes)
		}
		return nil
	})
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
	}
	w.silent = false
	sendIn()
	w.refused("r1", "outside-mpls", probes)
	sendOut()
	w.refused("r1", "leak-mpls", probes)
	// Labels of a node and of a visit are refused as any others are.
	egress := w.path("web4", model.Forward).Hops[3]
	w.shell("h1", "ip", "-4", "route", "replace", w.addr("h2").String()+"/32", "encap", "mpls", fmt.Sprintf("%d/%d", egress.NodeLabel, egress.ServiceLabel), "via", "192.0.2.1", "dev", "h1-r1")
	sendIn()
	w.refused("r1", "outside-mpls", probes)
	if a, b := in(), out(); a != probes || b != probes {
		t.Errorf("with waystamp %d packets more came to r4, and %d with labels to h1", a-probes, b-probes)
	}
	// What has no labels takes the chain.
	w.shell("h1", "ip", "-4", "route", "del", w.addr("h2").String()+"/32")
	w.reaches("h1", "h2")
}
