package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// Two headends, and a function that knows nothing of segment routing and holds each packet
// for slowFor:
//
//	h1 --- r1 \                              / h2   chain keyed
//	           r2 (fw) --- r3 (slow) --- r6 --- h3  chain bound, keyed-flow
//	h7 --- r7 /                              \ h4   chain opot
//	                                          \ h5  chain swapped: fw and slow change places
const rotated = `
version: 1
domain: {block: "fc00::/48"}
nodes:
  - name: r1
    address: fc00:1::1
    locator: fc00:0:0:100::/56
    interfaces: [{name: r1-h1, role: edge, HOOK}, {name: r1-r2, role: core, mtu: 1700, HOOK}]
  - name: r7
    address: fc00:7:7::1
    locator: fc00:0:0:700::/56
    interfaces: [{name: r7-h7, role: edge, HOOK}, {name: r7-r2, role: core, mtu: 1700, HOOK}]
  - name: r2
    address: fc00:2::1
    locator: fc00:0:0:200::/56
    interfaces: [{name: r2-r1, role: core, mtu: 1700, HOOK}, {name: r2-r7, role: core, mtu: 1700, HOOK}, {name: r2-r3, role: core, mtu: 1700, HOOK}]
  - name: r3
    address: fc00:3::1
    locator: fc00:0:0:300::/56
    interfaces: [{name: r3-r2, role: core, mtu: 1700, HOOK}, {name: r3-r6, role: core, mtu: 1700, HOOK}]
  - name: r6
    address: fc00:6::1
    locator: fc00:0:0:600::/56
    interfaces:
      - {name: r6-h2, role: edge, HOOK}
      - {name: r6-h3, role: edge, HOOK}
      - {name: r6-h4, role: edge, HOOK}
      - {name: r6-h5, role: edge, HOOK}
      - {name: r6-r3, role: core, mtu: 1700, HOOK}
functions:
  - {name: fw, node: r2, kind: forward}
  - {name: slow, node: r3, kind: unaware, attach: {to: slow-to, from: slow-from}, cache: {size: 65536}, lifetime: 10s}
chains:
  - {name: keyed, ingress: [r1, r7], functions: [fw, slow], egress: r6, match: {destination: "fc00:8::/64"}, proof: {scheme: keyed}}
  - {name: bound, ingress: [r1, r7], functions: [fw, slow], egress: r6, match: {destination: "fc00:9::/64"}, proof: {scheme: keyed-flow}}
  - {name: opot, ingress: [r1, r7], functions: [fw, slow], egress: r6, match: {destination: "fc00:a::/64"}, proof: {scheme: opot}}
  - {name: swapped, ingress: [r1, r7], functions: [fw, slow], egress: r6, match: {destination: "fc00:b::/64"}, proof: {scheme: keyed}}
lab:
  mtu: 1700
  hosts:
    - {name: h1, node: r1, prefix: "fc00:7::/64"}
    - {name: h7, node: r7, prefix: "fc00:77::/64"}
    - {name: h2, node: r6, prefix: "fc00:8::/64"}
    - {name: h3, node: r6, prefix: "fc00:9::/64"}
    - {name: h4, node: r6, prefix: "fc00:a::/64"}
    - {name: h5, node: r6, prefix: "fc00:b::/64"}
  links:
    - {between: [r1, r2]}
    - {between: [r7, r2]}
    - {between: [r2, r3]}
    - {between: [r3, r6]}
  functions:
    - {name: slow, kind: raw}
`

// slowFor is how long slow holds a packet.
const slowFor = 50 * time.Millisecond

// slows puts a function in the place of the lab's program, which copies frames as that one does, each slowFor after
// it came. The function that it returns gives how many frames it has copied.
func (w *world) slows(name, to, from string) (copied func() int) {
	w.t.Helper()
	m, err := w.Member(name)
	must(w.t, err)
	must(w.t, unix.Kill(m.Program.PID, unix.SIGKILL))
	eventually(w.t, func() error {
		if m.Program.Running() {
			return fmt.Errorf("the program of %s is still there", name)
		}
		return nil
	})
	type frame struct {
		due   time.Time
		bytes []byte
	}
	var ports []*host.Frames
	for _, link := range []string{to, from} {
		p, err := host.OpenFrames(w.ns(name), link, unix.ETH_P_IPV6)
		must(w.t, err)
		ports = append(ports, p)
	}
	counts := make(chan int, 1)
	counts <- 0
	ended := make(chan error, 4)
	for i, in := range ports {
		out := ports[1-i]
		waiting := make(chan frame, 1<<16)
		go func() {
			defer close(waiting)
			ended <- in.Receive(make([]byte, 1<<16), func(b []byte) { waiting <- frame{time.Now().Add(slowFor), bytes.Clone(b)} })
		}()
		go func() {
			for f := range waiting {
				time.Sleep(time.Until(f.due)) // what the function is for
				err := out.Send(f.bytes)
				for errors.Is(err, unix.ENOBUFS) { // the other end's queue is full
					time.Sleep(time.Millisecond)
					err = out.Send(f.bytes)
				}
				if err != nil {
					ended <- fmt.Errorf("%s: %w", name, err)
					for range waiting { //nolint:revive // so that the other ends
					}
					return
				}
				n := <-counts
				counts <- n + 1
			}
			ended <- nil
		}()
	}
	w.t.Cleanup(func() {
		for _, p := range ports {
			dropped, err := p.CaughtUp(context.Background())
			if err == nil && dropped > 0 {
				err = fmt.Errorf("%s was too slow for %d frames", name, dropped)
			}
			if err = errors.Join(err, p.Close()); err != nil {
				w.t.Error(err)
			}
		}
		for range cap(ended) {
			if err := <-ended; err != nil && !errors.Is(err, os.ErrClosed) {
				w.t.Error(err)
			}
		}
	})
	return func() int {
		n := <-counts
		counts <- n
		return n
	}
}

// rotations is how many times secrets change, once a second; by hand more: WAYSTAMP_ROTATIONS=60.
func rotations(t *testing.T) int {
	t.Helper()
	s := os.Getenv("WAYSTAMP_ROTATIONS")
	if s == "" {
		return 8
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("WAYSTAMP_ROTATIONS is %q; want a number of 1 or more", s)
	}
	return n
}

// All chains get fresh secrets each second, and each fifth time one of them exchanges its functions instead, while datagrams and TCP from behind two headends
// pass a function that holds each packet: each datagram comes exactly once, each segment comes, what headends have sent is what
// all hops have stamped and the egress has verified, and no packet is refused.
//
//	WAYSTAMP_ROTATIONS=60 go test -count=1 -v -timeout 30m -run TestSecretsRotateEachSecondUnderLoad ./test/e2e
//
// does it for a minute.
func TestSecretsRotateEachSecondUnderLoad(t *testing.T) {
	t.Parallel()
	for _, d := range []model.Datapath{model.DatapathTC, model.DatapathXDP} {
		t.Run(d.String(), func(t *testing.T) {
			t.Parallel()
			if d == model.DatapathXDP {
				countRuns(t)
			}
			rotatesUnderLoad(t, d)
		})
	}
}

// roles are the frames that all nodes have counted of a chain, forward: its headends (""), each function, and the egress.
func (c *controlled) roles(chain string) map[string]uint64 {
	c.t.Helper()
	out := map[string]uint64{}
	for _, n := range c.nodes() {
		counters, err := c.counters(n)
		must(c.t, err)
		for _, p := range counters.Paths {
			if p.Chain != chain || p.Direction != model.Forward.String() {
				continue
			}
			role := p.Function
			if p.Role == api.RoleEgress {
				role = p.Role
			}
			out[role] += p.Frames
		}
	}
	return out
}

func rotatesUnderLoad(t *testing.T, hook model.Datapath) {
	text := strings.ReplaceAll(rotated, "HOOK", "datapath: "+hook.String())
	c := buildControlled(t, text)
	defer c.close()
	n := rotations(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience+time.Duration(n)*10*time.Second)
	t.Cleanup(cancel)
	c.lasts = ctx
	copied := c.slows("slow", "slow-to", "slow-from")
	c.start()
	for _, name := range c.nodes() {
		c.agent(name, strings.TrimSpace(c.must("node", "token", name).stdout))
	}
	file := write(t, "domain.yaml", text)
	swapped := write(t, "swapped.yaml", strings.Replace(text, "{name: swapped, ingress: [r1, r7], functions: [fw, slow]", "{name: swapped, ingress: [r1, r7], functions: [slow, fw]", 1))
	c.must("apply", "-f", file, "--wait")
	for _, name := range c.nodes() {
		c.ready(name)
	}
	senders, receivers := []string{"h1", "h7"}, []string{"h2", "h3", "h4", "h5"}
	if hook == model.DatapathXDP { // so that a veth takes what XDP sends, with its checksum
		for link, name := range map[string]string{"h1-r1": "h1", "h7-r7": "h7", "h2-r6": "h2", "h3-r6": "h3", "h4-r6": "h4", "h5-r6": "h5"} {
			must(t, c.net(name).SetOffload(link, host.GRO, true))
			must(t, c.net(name).SetOffload(link, host.TransmitSum, false))
		}
		for _, name := range c.nodes() {
			for _, i := range c.status(name).Interfaces {
				if !i.XDP && i.Functions == nil {
					t.Errorf("%s: XDP is not attached to %s", name, i.Name)
				}
			}
		}
	}
	for _, from := range senders {
		for _, to := range receivers {
			c.reaches(from, to)
		}
	}

	refusedBefore, err := c.refusals()
	must(t, err)
	counted := map[string]func() flow{}
	for _, chain := range []string{"keyed", "bound", "opot"} { // the other one's SIDs change
		counted[chain] = c.counting(c.path(chain, model.Forward))
	}
	rolesBefore := c.roles("swapped")
	heldBefore, epochsBefore := copied(), c.epochs()
	xdp, tc := func() uint64 { return 0 }, func() uint64 { return 0 }
	if hook == model.DatapathXDP {
		xdp, tc = c.runs("r2", "ws_core_xdp"), c.runs("r2", "ws_core_tc")
	}
	// On a busy machine slow gets no CPU for a while, and then sends at once what has come. The kernel's queues hold 1000 packets of
	// all interfaces, those of a veth with XDP 256 frames; what comes beyond is dropped, and no node counts it.
	const every = 10 * time.Millisecond
	inFlight := 64 << 10
	if hook == model.DatapathXDP {
		inFlight = 32 << 10
	}
	var datagrams []*ticking
	var streams []*stream
	for _, to := range receivers {
		for _, from := range senders {
			datagrams = append(datagrams, c.tickingEvery(from, to, every))
		}
		s := c.streamEvery("h1", to, 20*time.Millisecond)
		must(t, s.out.SetWriteBuffer(inFlight))
		streams = append(streams, s)
	}
	flows := func() {
		t.Helper()
		for _, d := range datagrams {
			d.more(50)
		}
		for _, s := range streams {
			s.more(1 << 17)
		}
	}
	flows()
	began, exchanged := time.Now(), 0
	for i := range n {
		second := time.After(time.Second)
		if i%5 == 4 {
			exchanged++
			c.must("apply", "-f", []string{file, swapped}[exchanged%2], "--wait")
		} else {
			c.must("rotate", "--all", "--wait")
		}
		flows()
		select {
		case <-second:
		case <-interrupted.Done():
			t.Fatal(context.Cause(interrupted))
		}
	}
	took := time.Since(began)
	flows()

	sent := 0
	for _, s := range streams {
		s.finish()
		if s.lost != 0 {
			t.Errorf("of TCP's segments with data %d more were sent than the %d that came", s.lost, s.received)
		}
	}
	for _, d := range datagrams {
		missing, double := d.finish()
		sent += int(d.next.Load())
		if len(missing)+len(double) > 0 {
			t.Errorf("%s: %d datagrams are missing, %d came twice", d.name, len(missing), len(double))
		}
	}
	for chain, since := range counted {
		f := since()
		t.Logf("chain %s: %d frames in %d packets sent, stamped twice and verified", chain, f.frames(), f[0].Packets)
		if f.frames() == 0 || hook == model.DatapathTC && 2*f[0].Packets > f.frames() {
			t.Errorf("chain %s: %d packets for %d frames; want super-packets", chain, f[0].Packets, f.frames())
		}
	}
	// Nor do counts of earlier SIDs get lost.
	eventually(t, func() error {
		is := c.roles("swapped")
		headends := is[""] - rolesBefore[""]
		if len(is) != 4 || headends == 0 {
			return fmt.Errorf("chain swapped is counted %v", is)
		}
		for role, n := range is {
			if n-rolesBefore[role] != headends {
				return fmt.Errorf("chain swapped: %d frames sent, and %s has counted %d", headends, role, n-rolesBefore[role])
			}
		}
		return nil
	})
	if held := copied() - heldBefore; held < sent {
		t.Errorf("slow has held %d packets; %d datagrams were sent", held, sent)
	}
	if x, y := xdp(), tc(); hook == model.DatapathXDP && y > x/2 {
		t.Errorf("r2: XDP has run %d times, and left %d packets to TC", x, y)
	}
	for chain, was := range epochsBefore {
		if is := c.epochs()[chain]; int(is-was) != (n-exchanged)%256 && chain != "swapped" {
			t.Errorf("chain %s is in epoch %d, and was in %d; there were %d rotations", chain, is, was, n-exchanged)
		}
	}
	t.Logf("%d changes in %s, %d of them of functions; %d datagrams", n, took.Round(time.Second), exchanged, sent)
	got, err := c.refusals()
	must(t, err)
	for r, n := range got {
		if n != refusedBefore[r] {
			t.Errorf("refused: %v, %d times", r, n-refusedBefore[r])
		}
	}
}

// epochs are those that r1 sends, by chain.
func (c *controlled) epochs() map[string]uint8 {
	c.t.Helper()
	b, err := os.ReadFile(c.AgentDir("r1") + "/member/plan.json")
	must(c.t, err)
	p, err := plan.DecodeNode(b)
	must(c.t, err)
	out := map[string]uint8{}
	for _, h := range p.Headends {
		out[h.Chain] = h.Epoch
	}
	if len(out) == 0 || slices.ContainsFunc(p.Headends, func(h plan.Headend) bool { return h.Epoch != out[h.Chain] }) {
		c.t.Fatalf("r1 sends %v", out)
	}
	return out
}
