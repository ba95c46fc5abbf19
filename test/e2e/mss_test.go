package e2e

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
)

// What the chains of examples/ipv4.yaml leave to TCP: links take 1700 bytes,
// headers 120.
const (
	fitsIPv6 = 1700 - 120 - 60
	fitsIPv4 = 1700 - 120 - 40
)

// clamped makes all chains lower what SYNs say.
func clamped(m *manifest.Manifest) {
	for i := range m.Domain.Chains {
		m.Domain.Chains[i].Clamp.On = true
	}
}

// deaf is a host whose firewall drops what tells of sizes (RFC 2923 2.1).
const deaf = `
table inet deaf {
	chain input {
		type filter hook input priority filter; policy accept;
		icmpv6 type packet-too-big drop
		icmp type destination-unreachable icmp code frag-needed drop
	}
}
`

// buildDeaf is examples/ipv4.yaml with hosts whose links take more than the
// chains, and who learn nothing of it.
func buildDeaf(t *testing.T, changes ...change) *world {
	t.Helper()
	w := build(t, string(examples.IPv4), changes...)
	for _, l := range [][2]string{{"h1", "r1"}, {"h2", "r6"}} {
		w.narrow(l[0], l[1], 1700)
		must(t, w.net(l[0]).LoadRuleset(soon(t), deaf))
	}
	w.reaches("h1", "h2")
	return w
}

// stalls checks that nothing of a download arrives, though its sender tries again
// and again; the headend refuses it.
func (w *world) stalls(from, to, headend string) {
	w.t.Helper()
	var l net.Listener
	must(w.t, w.ns(from).Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(w.addr(from), 0).String())
		return err
	}))
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	sent := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			accepted <- c
			_, err = c.Write(make([]byte, 1_000_000))
		}
		sent <- err
	}()
	var c net.Conn
	must(w.t, w.ns(to).Do(func() (err error) {
		c, err = (&net.Dialer{}).DialContext(soon(w.t), "tcp", l.Addr().String())
		return err
	}))
	sender := <-accepted
	got := make(chan int, 1)
	go func() {
		n, _ := c.Read(make([]byte, 1))
		got <- n
	}()
	const tries = 4
	eventually(w.t, func() error {
		all, err := w.refusals()
		if err != nil {
			return err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		r := refusal{Node: headend, Reason: "chain-mtu"}
		if n := all[r] - w.expected[r]; n < tries {
			return fmt.Errorf("%s has refused %d packets that were too long, want %d", headend, n, tries)
		}
		return nil
	})
	select {
	case n := <-got:
		w.t.Errorf("from %s to %s: %d byte arrived; want none", from, to, n)
	default:
	}
	// So that nobody sends again.
	must(w.t, errors.Join(sender.(*net.TCPConn).SetLinger(0), sender.Close(), c.(*net.TCPConn).SetLinger(0), c.Close()))
	if err := <-sent; err == nil {
		w.t.Errorf("from %s to %s: all was sent", from, to)
	}
	w.refusedSome(headend, "chain-mtu")
}

// Where ICMP is filtered TCP stalls, and with clamped SYNs it does not: both ways,
// both versions, on both hooks.
func TestTCPGetsOnWithoutICMP(t *testing.T) {
	t.Parallel()
	versions := func(t *testing.T, w *world, f func()) {
		for _, w.ipv4 = range []bool{false, true} {
			f()
		}
	}
	t.Run("not clamped", func(t *testing.T) {
		t.Parallel()
		alsoOverLabels(t, func(t *testing.T, carried change) {
			w := buildDeaf(t, carried)
			versions(t, w, func() {
				w.stalls("h2", "h1", "r6")
				w.stalls("h1", "h2", "r1")
			})
		})
	})
	clampedAt := func(d model.Datapath, carried change) func(t *testing.T) {
		return func(t *testing.T) {
			t.Parallel()
			w := buildDeaf(t, clamped, datapath(d), carried)
			if d == model.DatapathXDP { // so that a veth takes what XDP sends
				for host1, link := range map[string]string{"h1": "h1-r1", "h2": "h2-r6"} {
					must(t, w.net(host1).SetOffload(link, host.GRO, true))
					must(t, w.net(host1).SetOffload(link, host.TransmitSum, false))
				}
			}
			versions(t, w, func() {
				w.download("h2", "h1", 5_000_000)
				w.download("h1", "h2", 5_000_000)
			})
		}
	}
	for _, d := range []model.Datapath{model.DatapathTC, model.DatapathXDP} {
		t.Run("clamped, "+d.String(), clampedAt(d, overSRv6))
		t.Run("clamped, "+d.String()+", over labels", clampedAt(d, overLabels))
	}
	// The node's own SYNs too.
	t.Run("own", func(t *testing.T) {
		t.Parallel()
		w := buildDeaf(t, clamped, func(m *manifest.Manifest) { m.Domain.Chains[1].OwnTraffic = true })
		w.download("h2", "r1", 5_000_000)
	})
}

//go:embed testdata/syns.py
var readSYNs string

// saidSYN is what a decoder reads of a SYN.
type saidSYN struct {
	Answer int   // 1: it is one
	MSS    []int // options
	Right  int   // 1: the checksum is
	Outer  bool  // it has an outer header; tshark is not asked
}

// What was lowered is what two decoders of others read, with a checksum that is
// right: below the outer header, and at the receiver.
func TestOthersReadTheClampedMSS(t *testing.T) {
	t.Parallel()
	w := buildDeaf(t, clamped)
	for host1, link := range map[string]string{"h1": "h1-r1", "h2": "h2-r6"} {
		must(t, w.net(host1).SetOffload(link, host.TransmitSum, false))
	}
	// Where SYNs are on their way, and answers, and where both arrive.
	recorded := map[bool][]*frames{
		true:  {w.record("r2", "r2-r1"), w.record("r1", "r1-r2")},
		false: {w.record("h2", "h2-r6"), w.record("h1", "h1-r1")},
	}
	for _, w.ipv4 = range []bool{false, true} {
		w.download("h2", "h1", 10_000)
	}
	for outer, links := range recorded {
		var all [][]byte
		for _, l := range links {
			all = append(all, l.soFar()...)
		}
		file := pcap(t, all)
		want := map[string]bool{}
		for _, mss := range []int{fitsIPv6, fitsIPv4} {
			for answer := range 2 {
				want[fmt.Sprint(saidSYN{answer, []int{mss}, 1, outer})] = true
			}
		}
		var scapy, tshark []saidSYN
		must(t, json.Unmarshal(tool(t, "/usr/bin/python3", "-c", readSYNs, file), &scapy))
		for line := range strings.Lines(string(tool(t, "tshark", "-r", file, "-o", "tcp.check_checksum:TRUE", "-Y", "tcp.flags.syn == 1",
			"-T", "fields", "-E", "separator=/s", "-e", "tcp.flags.ack", "-e", "tcp.options.mss_val", "-e", "tcp.checksum.status"))) {
			s := saidSYN{MSS: []int{0}, Outer: outer}
			if _, err := fmt.Sscan(strings.NewReplacer("True", "1", "False", "0").Replace(line), &s.Answer, &s.MSS[0], &s.Right); err != nil {
				t.Fatalf("tshark says %q: %v", line, err)
			}
			tshark = append(tshark, s)
		}
		for who, read := range map[string][]saidSYN{"Scapy": scapy, "tshark": tshark} {
			got := map[string]bool{}
			for _, s := range read {
				got[fmt.Sprint(s)] = true
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("with an outer header %t: what is right (-), and what %s reads (+):\n%s", outer, who, d)
			}
		}
	}
}
