package e2e

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane"
)

// ticking is a steady stream of datagrams from one host to another, each with its
// number, from 0.
type ticking struct {
	t       *testing.T
	name    string
	out, in *net.UDPConn
	next    atomic.Uint64 // the number of the next one
	came    atomic.Uint64 // datagrams, also those that came before
	times   []uint8       // how often each has come; the receiver's until it has ended
	grew    chan struct{}
	enough  context.CancelFunc
	sent    chan error
	ended   chan error
}

const (
	tickEvery = 200 * time.Microsecond
	// What a receiver may leave lying for as long as it gets no CPU.
	tickBuffer = 64 << 20
	// How long the traffic goes where nobody is killed.
	controlTime = time.Minute
)

func (w *world) ticking(from, to string) *ticking { return w.tickingEvery(from, to, tickEvery) }

func (w *world) tickingEvery(from, to string, every time.Duration) *ticking {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	stop := context.AfterFunc(interrupted, cancel)
	d := &ticking{
		t: w.t, name: from + " to " + to, grew: make(chan struct{}, 1),
		enough: cancel, sent: make(chan error, 1), ended: make(chan error, 1),
	}
	must(w.t, w.Do(to, func() (err error) {
		d.in, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(w.addr(to), 0)))
		return err
	}))
	must(w.t, onSocket(d.in, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, tickBuffer)
	}))
	must(w.t, w.Do(from, func() (err error) {
		d.out, err = net.DialUDP("udp", nil, d.in.LocalAddr().(*net.UDPAddr))
		return err
	}))
	go func() { d.sent <- d.send(ctx, every) }()
	go func() { d.ended <- d.receive() }()
	w.t.Cleanup(func() {
		stop()
		cancel()
		d.out.Close()
		d.in.Close()
	})
	return d
}

func (d *ticking) send(ctx context.Context, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	b := make([]byte, 100)
	for ctx.Err() == nil {
		binary.BigEndian.PutUint64(b, d.next.Load())
		if _, err := d.out.Write(b); err != nil {
			return fmt.Errorf("send datagram %d: %w", d.next.Load(), err)
		}
		d.next.Add(1)
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return nil
}

func (d *ticking) receive() error {
	b := make([]byte, 200)
	for {
		n, err := d.in.Read(b)
		if errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return err
		}
		if n != 100 {
			return fmt.Errorf("a datagram has %d bytes, want 100", n)
		}
		number := binary.BigEndian.Uint64(b)
		for uint64(len(d.times)) <= number {
			d.times = append(d.times, 0)
		}
		d.times[number]++
		d.came.Add(1)
		select {
		case d.grew <- struct{}{}:
		default:
		}
	}
}

// more waits until n more have come than now.
func (d *ticking) more(n uint64) {
	d.t.Helper()
	limit := time.After(settleTime)
	for until := d.came.Load() + n; d.came.Load() < until; {
		select {
		case <-d.grew:
		case err := <-d.sent:
			d.t.Fatalf("%s: the sender ended: %v", d.name, err)
		case err := <-d.ended:
			d.t.Fatalf("%s: the receiver ended: %v", d.name, err)
		case <-limit:
			d.t.Fatalf("%s: of %d datagrams %d have come, and no more do", d.name, d.next.Load(), d.came.Load())
		case <-interrupted.Done():
			d.t.Fatal(context.Cause(interrupted))
		}
	}
}

// finish ends the stream and returns the numbers of those that did not come, and of
// those that came more than once.
func (d *ticking) finish() (missing, double []uint64) {
	d.t.Helper()
	d.enough()
	must(d.t, <-d.sent)
	n := d.next.Load()
	// Nobody says when the last has come, where some are lost.
	for limit := time.Now().Add(settleTime); d.came.Load() < n && time.Now().Before(limit); {
		pause(d.t, pollEvery)
	}
	must(d.t, d.in.SetReadDeadline(time.Now()))
	must(d.t, <-d.ended)
	for i := range n {
		switch {
		case i >= uint64(len(d.times)) || d.times[i] == 0:
			missing = append(missing, i)
		case d.times[i] > 1:
			double = append(double, i)
		}
	}
	d.t.Logf("%s: %d datagrams sent, %d came; missing %d, more than once %d", d.name, n, d.came.Load(), len(missing), len(double))
	return missing, double
}

// drops are the counters of a member's kernel that may tell where packets have
// gone, by name: its devices', IP's, and all that TCP counts.
func (w *world) drops(member string) map[string]uint64 {
	w.t.Helper()
	out := map[string]uint64{}
	must(w.t, w.Do(member, func() error {
		links, err := os.ReadFile("/proc/thread-self/net/dev")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(links)) {
			name, rest, ok := strings.Cut(line, ":")
			if !ok {
				continue
			}
			v := strings.Fields(rest)
			for i, what := range map[int]string{2: "rx errors", 3: "rx dropped", 10: "tx errors", 11: "tx dropped"} {
				if n, _ := strconv.ParseUint(v[i], 10, 64); n > 0 {
					out[strings.TrimSpace(name)+" "+what] = n
				}
			}
		}
		b, err := os.ReadFile("/proc/thread-self/net/snmp6")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(b)) {
			v := strings.Fields(line)
			if len(v) != 2 || !strings.Contains(v[0], "Errors") && !strings.Contains(v[0], "Discards") && !strings.Contains(v[0], "NoRoutes") {
				continue
			}
			if n, _ := strconv.ParseUint(v[1], 10, 64); n > 0 {
				out[v[0]] = n
			}
		}
		// Each protocol has a line with names, and one with numbers.
		for _, file := range []string{"/proc/thread-self/net/netstat", "/proc/thread-self/net/snmp"} {
			b, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			lines := strings.Split(strings.TrimSpace(string(b)), "\n")
			for i := 0; i+1 < len(lines); i += 2 {
				names, v := strings.Fields(lines[i]), strings.Fields(lines[i+1])
				for j := 1; j < len(names) && j < len(v); j++ {
					if n, _ := strconv.ParseUint(v[j], 10, 64); n > 0 && (names[0] == "TcpExt:" || strings.Contains(names[j], "Err")) {
						out[names[0]+names[j]] = n
					}
				}
			}
		}
		return nil
	}))
	return out
}

// kills is how many agents are killed; by hand more: WAYSTAMP_KILLS=100.
func kills(t *testing.T) int {
	t.Helper()
	s := os.Getenv("WAYSTAMP_KILLS")
	if s == "" {
		return 8
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		t.Fatalf("WAYSTAMP_KILLS is %q; want a number", s)
	}
	return n
}

// killAtWork starts an agent that makes a new generation, and kills it once it has
// something of that.
func (w *world) killAtWork(node string) {
	w.t.Helper()
	started := make(chan error, 1)
	ctx := soon(w.t)
	go func() { started <- w.StartAgent(ctx, node) }()
	defer func() {
		if err := <-started; err == nil {
			w.t.Errorf("the agent of %s got ready, and was to be killed before", node)
		}
	}()
	dir := filepath.Join(dataplane.DefaultPinDir, w.Instance(node))
	eventually(w.t, func() error {
		if m, err := w.Member(node); err != nil || !m.Agent.Running() || len(entries(w.t, dir, "new-")) == 0 {
			return fmt.Errorf("the agent of %s makes no generation", node)
		}
		return nil
	})
	w.kill(node)
}

// Agents of all nodes are killed and started again, one after the other, while
// datagrams go both ways and TCP one; each datagram comes exactly once, and each
// segment comes. Every second round an agent finds its locator to be a /57, or
// a /56 again, which holds the same SIDs and is part of the programs: it makes all
// anew, as after an upgrade, and moves the traffic there; half of these are killed
// while they do.
//
// A segment that was sent again though it had come is no loss: TCP takes one for
// lost that was late, as on a machine with more to do than CPUs. So the segments
// with data are counted at both ends.
//
//	WAYSTAMP_KILLS=100 go test -count=1 -v -timeout 60m -run TestKillsLoseNoDatagram ./test/e2e
//
// kills a hundred times. With 0 it kills nobody for a minute, to compare with.
func TestKillsLoseNoDatagram(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, killsLoseNoDatagram)
}

func killsLoseNoDatagram(t *testing.T, carried change) {
	w := build(t, paper, carried)
	there, back := w.ticking("h1", "h2"), w.ticking("h2", "h1")
	s := w.stream("h1", "h2")
	const enough, enoughTCP = 200, 1 << 20
	flows := func() {
		t.Helper()
		there.more(enough)
		back.more(enough)
		s.more(enoughTCP)
	}
	generation := func(node string) []string {
		return entries(t, filepath.Join(dataplane.DefaultPinDir, w.Instance(node)), "gen-")
	}
	// What was done, from which number of each stream of datagrams on.
	type mark struct {
		what        string
		there, back uint64
		resent      uint32
	}
	var marks []mark
	did := func(format string, args ...any) {
		t.Helper()
		marks = append(marks, mark{fmt.Sprintf(format, args...), there.next.Load(), back.next.Load(), s.tcpInfo(s.out).Total_retrans})
	}
	began := time.Now()
	flows()
	did("began")
	nodes := w.nodes()
	n, atWork := kills(t), 0
	for i := range n {
		node := nodes[i%len(nodes)]
		before := generation(node)
		did("kill %d, of %s", i, node)
		w.kill(node)
		flows() // nobody is there
		another := i/len(nodes)%2 == 1
		if another {
			p, err := w.NodePlan(node)
			must(t, err)
			p.Locator = netip.PrefixFrom(p.Locator.Addr(), 56+57-p.Locator.Bits())
			must(t, w.WriteNodePlan(node, p))
			did("start %d, of %s with another plan", i, node)
			if (i+i/len(nodes)/2)%2 == 1 {
				w.killAtWork(node)
				did("kill of start %d, of %s", i, node)
				flows()
				atWork++
			}
		} else {
			did("start %d, of %s", i, node)
		}
		must(t, w.StartAgent(soon(t), node))
		did("end of start %d, of %s", i, node)
		if now := generation(node); slices.Equal(now, before) == another {
			t.Errorf("start %d, of %s: generations %q, before it %q; the plan was another: %t", i, node, now, before, another)
		}
		flows()
	}
	for n == 0 && time.Since(began) < controlTime {
		flows()
	}
	did("ended")
	s.finish()
	took := time.Since(began)
	var again []string
	for i, m := range marks[1:] {
		if r := m.resent - marks[i].resent; r > 0 {
			again = append(again, fmt.Sprintf("%d after %s", r, marks[i].what))
		}
	}
	t.Logf("%d kills, and %d of agents that began, in %s; sent again: %s", n, atWork, took.Round(time.Second), strings.Join(again, "; "))
	if s.lost != 0 {
		t.Errorf("of TCP's segments with data %d more were sent than the %d that came", s.lost, s.received)
	}
	for _, d := range []*ticking{there, back} {
		missing, double := d.finish()
		for what, numbers := range map[string][]uint64{"is missing": missing, "came more than once": double} {
			const tell = 50
			for _, x := range numbers[:min(len(numbers), tell)] {
				last := "nothing"
				for _, m := range marks {
					if from := map[*ticking]uint64{there: m.there, back: m.back}; from[d] <= x {
						last = m.what
					}
				}
				t.Errorf("%s: datagram %d %s; done last before it: %s", d.name, x, what, last)
			}
			if len(numbers) > tell {
				t.Errorf("%s: and %d others", d.name, len(numbers)-tell)
			}
		}
	}
	if t.Failed() {
		for _, m := range w.Members() {
			t.Logf("%s: %v", m.Name, w.drops(m.Name))
		}
	}
}
