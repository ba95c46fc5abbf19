package bench

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestProxyCasesAreDomainsAndHaveTheirBaselines(t *testing.T) {
	for _, quick := range []bool{false, true} {
		for _, s := range slices.Concat(proxySections(quick), labelledProxies(quick)) {
			names := map[string]bool{}
			for _, c := range s.cases {
				if names[c.name] {
					t.Errorf("%s is there twice", c.name)
				}
				names[c.name] = true
			}
			for _, c := range s.cases {
				for _, b := range c.baselines {
					if !names[b] {
						t.Errorf("%s is held against %s, which is not measured in the same rounds", c.name, b)
					}
				}
				d, l := c.domain()
				p, err := plan.Compile(d, plan.NewKeyring(rand.Reader, nil))
				if err != nil {
					t.Errorf("%s: %v", c.name, err)
					continue
				}
				if want := 2 * c.count(); len(p.Paths) != want || len(l.Hosts) != want {
					t.Errorf("%s: %d paths, %d hosts; want %d", c.name, len(p.Paths), len(l.Hosts), want)
				}
				if got := len(p.Paths[0].Segments()); got != max(c.segments, 2) {
					t.Errorf("%s: %d segments", c.name, got)
				}
			}
		}
	}
}

// An answer points to what it says of rules and workers, and that is made anew for each.
func TestCountsAreTheSameWhereOnlyTheAnswersDiffer(t *testing.T) {
	answer := func(headers, through uint64) api.Function {
		return api.Function{Function: "fn", TxSuccess: through, InFlight: &headers, Rules: &api.Rules{Namespace: "fn"}, Stream: &api.Stream{Worker: 7}}
	}
	if !sameCounts(answer(1, 5), answer(2, 5)) {
		t.Error("two answers with the same counts differ")
	}
	if sameCounts(answer(1, 5), answer(1, 6)) {
		t.Error("a packet more makes no difference")
	}
}

func TestFigureIsHeldAgainstBothBaselines(t *testing.T) {
	whole := proxySections(false)[0]
	var series []Series
	for i, c := range whole.cases {
		s := Series{Name: "proxy/" + c.name, Unit: "Mbit/s", Better: More, Samples: []float64{float64(10 * (i + 1))}}
		if len(c.baselines) > 0 {
			s.Baseline = "proxy/" + c.baselines[0]
		}
		series = append(series, s)
	}
	figures, err := Figures(series)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range append(figures, secondBaselines(whole, figures)...) {
		got[f.Name] = fmt.Sprintf("%.2f %s", f.Ratio, f.Baseline)
	}
	if got["proxy/tcp/unaware"] != "3.00 proxy/tcp/plain" || got["proxy/tcp-to-static/unaware"] != "1.50 proxy/tcp/static" {
		t.Errorf("%v", got)
	}
}

func TestCountersOfProxiesAreInTheReport(t *testing.T) {
	r := Result{Command: "proxy", Figures: []Figure{
		{Name: "proxy/tcp/plain", Unit: "Mbit/s", Median: 1},
		{Name: "proxy/delay/unaware-1000", Unit: "Mbit/s", Median: 1, Params: map[string]float64{
			"rx_success": 2000, "tx_success": 1500, "tx_not_cached": 500, "evicted": 500, "waited_ns": 1500 * 5e6, "seconds": 10,
		}},
	}}
	want := "| proxy/delay/unaware-1000 | 2000 | 0 | 0 | 1500 | 0 | 500 | 25.000 % | 500 | 0 | 5.000 | 1 |\n"
	if got := r.Markdown(nil); !strings.Contains(got, want) {
		t.Errorf("no %q in\n%s", want, got)
	}
}

// All frames come out, in order, and not before their time.
func TestDelayerKeepsFramesForATime(t *testing.T) {
	space := func() *host.Net {
		ns, err := host.Anonymous()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ns.Close() })
		n, err := host.Open(ns)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close() })
		return n
	}
	outside, inside := space(), space()
	for _, name := range []string{"to", "from"} {
		must(t, outside.AddVeth(host.Veth{Name: name, PeerName: name, Peer: inside.NetNS()}))
		must(t, errors.Join(outside.SetUp(name), inside.SetUp(name)))
	}
	must(t, outside.WaitUp(t.Context(), "to", "from"))
	next := [6]byte{2, 1, 2, 3, 4, 5}
	const delay = 30 * time.Millisecond
	d, err := newDelayer(inside, "to", "from", next, delay, 0)
	must(t, err)
	send, err := packetSocket(outside, "to", 0)
	must(t, err)
	defer unix.Close(send)
	receive, err := packetSocket(outside, "from", unix.ETH_P_IPV6)
	must(t, err)
	defer unix.Close(receive)

	const frames = 50
	sent := make([]time.Duration, frames)
	for i := range frames {
		p, err := innerPacket(0, 100+i, false)
		must(t, err)
		frame := framed(p, [6]byte{2, 9})
		sent[i] = monotonic()
		_, err = unix.Write(send, frame)
		must(t, err)
	}
	buf := make([]byte, 4096)
	for i := 0; i < frames; {
		n, _, err := unix.Recvfrom(receive, buf, 0)
		if errors.Is(err, unix.EAGAIN) {
			continue
		}
		must(t, err)
		if !forOthers(buf[srv6.EthernetLen:]) {
			continue
		}
		if waited := monotonic() - sent[i]; waited < delay || !bytes.Equal(buf[:6], next[:]) || n != srv6.EthernetLen+100+i {
			t.Fatalf("frame %d: %d bytes to %x after %s", i, n, buf[:6], waited)
		}
		if got := int(binary.BigEndian.Uint16(buf[srv6.EthernetLen+4:])); got != 100+i-srv6.IPv6Len {
			t.Fatalf("frame %d has payload length %d", i, got)
		}
		i++
	}
	must(t, d.close())
	if d.read.Load() != frames || d.written.Load() != frames {
		t.Errorf("%d read, %d written", d.read.Load(), d.written.Load())
	}
}

// Neither baseline goes past the function.
func TestBaselinesLeadThroughTheFunction(t *testing.T) {
	for _, way := range []proxyWay{wayPlain, wayStatic} {
		c := proxyCase{name: "test", way: way}
		track, err := newProxyTrack(t.Context(), Config{Log: slog.New(slog.DiscardHandler)}, c)
		if err != nil {
			t.Fatal(err)
		}
		if bits, err := track.load(t.Context(), time.Second); err != nil || bits <= 0 {
			t.Errorf("way %d: %v bit/s, %v", way, bits, err)
		}
		var forwarded int
		must(t, track.on("fn", func(n *host.Net) error {
			return n.NetNS().Do(func() error {
				b, err := os.ReadFile("/proc/thread-self/net/snmp6")
				_, after, _ := strings.Cut(string(b), "Ip6OutForwDatagrams")
				fmt.Sscan(after, &forwarded)
				return err
			})
		}))
		if forwarded < 100 {
			t.Errorf("way %d: the function forwarded %d packets", way, forwarded)
		}
		if err := track.close(); err != nil {
			t.Error(err)
		}
	}
}
