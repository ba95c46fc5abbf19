package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
)

// filtered is the paper's chain with a function between its two that drops long packets.
var filtered = strings.NewReplacer(
	"functions: [fw, dpi]", "functions: [fw, filter, dpi]",
	"functions:\n", `functions:
  - name: filter
    node: r3
    kind: netfilter
    on-unknown: drop
    rules: |
      chain forward {
        type filter hook forward priority filter; policy accept;
        meta length > 500 drop
      }
`,
)

// A packet is followed through three functions; one that a function drops is lost behind the hop before it; and on the wire
// exactly those packets have the flag.
func TestAChainIsTracedHopByHop(t *testing.T) {
	t.Parallel()
	t.Run("srv6", func(t *testing.T) {
		t.Parallel()
		frames, packets := chainIsTraced(t, filtered.Replace(paper), func(frame []byte) bool {
			p, err := srv6.DecodeFrame(frame)
			return err == nil && p.SRH != nil
		}, func(frame []byte) bool {
			p, err := srv6.DecodeFrame(frame)
			return err == nil && p.SRH.Flags == srv6.FlagOAM
		})
		// tshark reads the flags.
		file := pcap(t, frames)
		count := func(filter string) int {
			t.Helper()
			return len(strings.Fields(string(tool(t, "tshark", "-r", file, "-Y", filter, "-T", "fields", "-e", "frame.number"))))
		}
		all, flagged := count("ipv6.routing.srh.last_entry"), count("ipv6.routing.srh.flags == 0x20")
		if all != len(frames) || flagged != packets || count("ipv6.routing.srh.flags != 0x20") != all-flagged {
			t.Errorf("%d of %d frames have the flag, want %d", flagged, len(frames), packets)
		}
	})
	t.Run("sr-mpls", func(t *testing.T) {
		t.Parallel()
		flags := func(frame []byte) (uint8, bool) {
			p, err := mpls.ParseFrame(frame, func(label uint32) bool { return label-100000 < 1<<16 })
			if err != nil || p.Word == nil {
				return 0, false
			}
			return p.Word.Flags, true
		}
		frames, packets := chainIsTraced(t, labelledText(t, filtered.Replace(paper)), func(frame []byte) bool {
			_, ok := flags(frame)
			return ok
		}, func(frame []byte) bool {
			is, _ := flags(frame)
			return is == mpls.FlagTrace
		})
		flagged := 0
		for _, f := range frames {
			switch is, _ := flags(f); is {
			case mpls.FlagTrace:
				flagged++
			case 0:
			default:
				t.Errorf("a word has the flags %#x", is)
			}
		}
		if flagged != packets {
			t.Errorf("%d of %d frames have the flag, want %d", flagged, len(frames), packets)
		}
	})
}

// chainIsTraced returns the frames of the chain at r2, and how many of them a trace asked for.
func chainIsTraced(t *testing.T, text string, ofChain, isFlagged func(frame []byte) bool) (frames [][]byte, traced int) {
	c := buildControlled(t, text)
	defer c.close()
	c.start()
	for _, name := range c.nodes() {
		c.agent(name, strings.TrimSpace(c.must("node", "token", name).stdout))
	}
	c.must("apply", "-f", write(t, "domain.yaml", text), "--wait")
	for _, name := range c.nodes() {
		c.ready(name)
	}
	c.reaches("h1", "h2")
	var wire recorder[[]byte]
	wire.start(c.world, "r2", "r2-r1", 2048, func(frame []byte) ([]byte, bool) {
		return bytes.Clone(frame), ofChain(frame)
	})

	pings := func(size int) func() {
		return func() { c.ping("h1", "h2", lab.PingConfig{Count: 1, Size: size, Timeout: lostTime}) }
	}
	// trace runs the command while packets go from h1 to h2.
	trace := func(send func(), code int, args ...string) (out api.TraceOutput) {
		t.Helper()
		p := start(t, append([]string{"trace", "web", "-o", "json", "--timeout", "2m", "--controller", "unix:" + c.dir + "/operators"}, args...)...)
		ended := make(chan result, 1)
		go func() { ended <- p.wait() }()
		for {
			send()
			select {
			case r := <-ended:
				if r.code != code {
					t.Fatalf("exit code %d, want %d: %s", r.code, code, r)
				}
				must(t, json.Unmarshal([]byte(r.stdout), &out))
				return out
			default:
			}
		}
	}
	const packets = 2
	both := trace(pings(56), 0, "--direction", "both", "--packets", "2")
	if len(both.Paths) != 2 || len(both.Packets) != 2*packets || both.TimedOut || both.Foreign != 0 || len(both.Warnings) != 0 {
		t.Fatalf("%+v", both)
	}
	ways := map[string][]string{
		"forward": {"r1", "r2 fw", "r3 filter", "r3 dpi", "r6"},
		"reverse": {"r6", "r3 dpi", "r3 filter", "r2 fw", "r1"},
	}
	numbers := map[string]bool{}
	for _, k := range both.Packets {
		i := slices.IndexFunc(both.Paths, func(p api.TracePath) bool { return p.Path == k.Path })
		var way []string
		for j, h := range k.Hops {
			way = append(way, strings.TrimSpace(h.Node+" "+h.Function))
			if j > 0 && h.Before != k.Hops[j-1].After {
				t.Errorf("it comes with %s behind a stamp of %s", h.Before, k.Hops[j-1].After)
			}
			if j > 0 && h.Time.Before(k.Hops[j-1].Time) {
				t.Errorf("the machine has one clock, and position %d is before %d: %+v", j, j-1, k.Hops)
			}
		}
		if want := ways[both.Paths[i].Direction]; k.Outcome != "verified" || !slices.Equal(way, want) || !k.Hops[len(k.Hops)-1].Verified {
			t.Errorf("%s took %v, want %v", k.Outcome, way, want)
		}
		numbers[both.Paths[i].Direction+k.Number] = true
	}
	if len(numbers) != 2*packets {
		t.Errorf("packets %v", numbers)
	}

	// Of two flows and echo requests one flow is traced.
	const ofFlow = 3
	flows := map[string]*net.UDPConn{}
	for _, port := range []uint16{4001, 4002} {
		flows[fmt.Sprintf("flow of port %d", port)] = c.udp("h1", "udp", netip.AddrPortFrom(c.addr("h1"), port).String())
	}
	to := netip.AddrPortFrom(c.addr("h2"), 9)
	c.udp("h2", "udp", to.String()) // without it h2 would answer with errors
	flow := fmt.Sprintf("%s,%s,udp,4001,9", c.addr("h1"), c.addr("h2"))
	one := trace(func() {
		for text, from := range flows {
			_, err := from.WriteToUDPAddrPort([]byte(text), to)
			must(t, err)
		}
		pings(56)()
	}, 0, "--packets", "3", "--flow", flow)
	if len(one.Paths) != 1 || one.Flow != flow || len(one.Packets) != ofFlow || one.TimedOut || one.Foreign != 0 || len(one.Warnings) != 0 {
		t.Errorf("%+v", one)
	}
	for _, k := range one.Packets {
		if k.Outcome != "verified" || len(k.Hops) != len(ways["forward"]) {
			t.Errorf("%+v", k)
		}
	}
	of := map[string]int{}
	for _, frame := range wire.soFar() {
		for text := range flows {
			if bytes.Contains(frame, []byte(text)) && isFlagged(frame) {
				of[text]++
			}
		}
	}
	if want := map[string]int{"flow of port 4001": ofFlow}; !maps.Equal(of, want) {
		t.Errorf("flagged at r2: %v, want %v", of, want)
	}

	// Its stamp is missing at the function that dropped it, and at all behind.
	lost := trace(pings(800), 4, "--packets", "1")
	if len(lost.Packets) != 1 || lost.Packets[0].Outcome != "lost" || len(lost.Packets[0].Hops) != 2 ||
		lost.Packets[0].Sentence != "the last hop was position 1 (r2, fw); position 2 (r3, filter) has not told of it, and no node of a refusal" {
		t.Errorf("%+v", lost.Packets)
	}

	c.checkRefusals()
	return wire.soFar(), packets + ofFlow + 1 // at r2 there are those of the forward path
}
