package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// stream is a TCP connection between two hosts that carries bytes, not too fast,
// until the test has seen enough.
type stream struct {
	t        *testing.T
	out, in  *net.TCPConn // the sender's end, and the receiver's
	moved    atomic.Int64
	grew     chan struct{}
	enough   context.CancelFunc
	sent     chan error // by whom it is sent, and how that ended
	ended    chan error
	resent   uint32 // segments, once it has finished
	lost     int64  // segments of those with data that were sent and did not come
	received uint32 // segments with data
}

// The bytes of a stream, and the pieces that they are sent in.
const (
	streamPiece = 64 << 10
	streamEvery = 2 * time.Millisecond
)

func (w *world) stream(from, to string) *stream { return w.streamEvery(from, to, streamEvery) }

// streamEvery is stream with another time between its pieces.
func (w *world) streamEvery(from, to string, every time.Duration) *stream {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	stop := context.AfterFunc(interrupted, cancel)
	s := &stream{t: w.t, grew: make(chan struct{}, 1), enough: cancel, sent: make(chan error, 1), ended: make(chan error, 1)}
	content := lab.Content{Seed: 11, Size: 1 << 40}
	var l net.Listener
	must(w.t, w.Do(from, func() (err error) {
		l, err = net.Listen("tcp", net.JoinHostPort(w.addr(from).String(), "0"))
		return err
	}))
	defer l.Close()
	must(w.t, w.Do(to, func() error {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err == nil {
			s.in = conn.(*net.TCPConn)
		}
		return err
	}))
	conn, err := l.Accept()
	must(w.t, err)
	s.out = conn.(*net.TCPConn)
	go func() { s.sent <- s.send(ctx, content.Reader(), every) }()
	go func() { s.ended <- s.receive(content.Reader()) }()
	w.t.Cleanup(func() {
		stop()
		cancel()
		s.out.Close()
		s.in.Close()
	})
	return s
}

func (s *stream) send(ctx context.Context, content io.Reader, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for ctx.Err() == nil {
		if _, err := io.CopyN(s.out, content, streamPiece); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return s.out.CloseWrite()
}

func (s *stream) receive(content io.Reader) error {
	got, want := make([]byte, streamPiece), make([]byte, streamPiece)
	for {
		n, err := s.in.Read(got)
		if _, err := io.ReadFull(content, want[:n]); err != nil {
			return err
		}
		if !bytes.Equal(got[:n], want[:n]) {
			return fmt.Errorf("the bytes after %d are not those that were sent", s.moved.Load())
		}
		s.moved.Add(int64(n))
		select {
		case s.grew <- struct{}{}:
		default:
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// more waits until as many bytes have come since now.
func (s *stream) more(bytes int64) {
	s.t.Helper()
	limit := time.After(settleTime)
	for until := s.moved.Load() + bytes; s.moved.Load() < until; {
		select {
		case <-s.grew:
		case err := <-s.ended:
			s.t.Fatalf("the stream ended after %d bytes: %v", s.moved.Load(), err)
		case <-limit:
			s.t.Fatalf("the stream is stuck after %d bytes", s.moved.Load())
		case <-interrupted.Done():
			s.t.Fatal(context.Cause(interrupted))
		}
	}
}

// tcpInfo is what the kernel knows of one end.
func (s *stream) tcpInfo(end *net.TCPConn) (info *unix.TCPInfo) {
	s.t.Helper()
	raw, err := end.SyscallConn()
	must(s.t, err)
	var failed error
	must(s.t, raw.Control(func(fd uintptr) { info, failed = unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO) }))
	must(s.t, failed)
	return info
}

// finish waits until all that was sent has come, and counts.
func (s *stream) finish() {
	s.t.Helper()
	s.enough()
	for _, c := range []chan error{s.sent, s.ended} {
		select {
		case err := <-c:
			must(s.t, err)
		case <-time.After(settleTime):
			s.t.Fatalf("the stream does not end")
		}
	}
	// The sender's end has said that it sends no more, and that was acknowledged:
	// nothing is under way.
	eventually(s.t, func() error {
		if i := s.tcpInfo(s.out); i.State != unix.BPF_TCP_FIN_WAIT2 || i.Unacked != 0 {
			return fmt.Errorf("the stream is in state %d, with %d segments not acknowledged", i.State, i.Unacked)
		}
		return nil
	})
	out, in := s.tcpInfo(s.out), s.tcpInfo(s.in)
	s.resent, s.received, s.lost = out.Total_retrans, in.Data_segs_in, int64(out.Data_segs_out)-int64(in.Data_segs_in)
	s.t.Logf("%d bytes in %d segments: %d sent again, %d of them for nothing as the receiver says; %d came; %d timeouts",
		s.moved.Load(), out.Data_segs_out, out.Total_retrans, out.Dsack_dups, in.Data_segs_in, out.Total_rto)
}

// kill ends an agent without a warning.
func (w *world) kill(node string) {
	w.t.Helper()
	m, err := w.Member(node)
	must(w.t, err)
	must(w.t, unix.Kill(m.Agent.PID, unix.SIGKILL))
	eventually(w.t, func() error {
		if m.Agent.Running() {
			return fmt.Errorf("process %d is still there", m.Agent.PID)
		}
		return nil
	})
}

// numbers are the counters of a path's RNDs by lane, in the order in which they
// came by. It is an error if one came twice.
func numbers(t *testing.T, proofs []srv6.Proof) map[uint64][]uint64 {
	t.Helper()
	seen := map[[2]uint64]bool{}
	out := map[uint64][]uint64{}
	for _, p := range proofs {
		lane, number := p.RND>>48, p.RND&(1<<42-1)
		if k := [2]uint64{lane, number}; seen[k] {
			t.Fatalf("number %d of lane %d was given out twice", number, lane)
		} else {
			seen[k] = true
		}
		out[lane] = append(out[lane], number)
	}
	return out
}

func highest(lanes map[uint64][]uint64) (n uint64) {
	for _, l := range lanes {
		n = max(n, slices.Max(l))
	}
	return n
}

func TestKilledAgentsLoseNoPacket(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, killedAgentsLoseNoPacket)
}

func killedAgentsLoseNoPacket(t *testing.T, carried change) {
	w := build(t, paper, carried)
	web := w.path("web", model.Forward)
	r6 := w.stamps("r6", "r6-r3")
	since, back := w.counting(web), w.counting(w.path("web", model.Reverse))
	s := w.stream("h1", "h2")
	const enough = 4 << 20
	s.more(enough)
	for _, n := range w.nodes() {
		w.kill(n)
	}
	s.more(enough) // nobody is there
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
		s.more(enough / 4)
	}
	w.kill("r1") // once more, the headend alone
	s.more(enough / 4)
	must(t, w.StartAgent(soon(t), "r1"))
	s.more(enough / 4)
	s.finish()
	f := since()
	if back().frames() == 0 || f.frames() < 6000 {
		t.Errorf("%d frames forward, %d back", f.frames(), back().frames())
	}
	var n int
	for _, l := range numbers(t, r6.of(web.Path)) {
		n += len(l)
		if !slices.IsSorted(l) {
			t.Error("a lane counted backwards")
		}
	}
	t.Logf("%d packets captured, of %d", n, f[0].Packets)
	if n == 0 {
		t.Error("nothing was captured")
	}
}

// heldPrograms are the links that are pinned for a node, with the program of each.
func (w *world) heldPrograms(node string) map[string]ebpf.ProgramID {
	w.t.Helper()
	dir := filepath.Join(dataplane.DefaultPinDir, w.Instance(node), "links")
	out := map[string]ebpf.ProgramID{}
	for _, name := range entries(w.t, dir, "") {
		l, err := link.LoadPinnedLink(filepath.Join(dir, name), nil)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		must(w.t, err)
		info, err := l.Info()
		must(w.t, errors.Join(err, l.Close()))
		out[name] = info.Program
	}
	return out
}

// Somebody removes all pins under the agents, and then the agents die.
func TestGuardOutlivesPinsThatWereRemoved(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, guardOutlivesPins)
}

func guardOutlivesPins(t *testing.T, carried change) {
	w := build(t, star, carried)
	m := w.meddle("m")
	web := w.path("web", model.Forward)
	r6 := w.stamps("r6", "r6-m")
	toEgress := m.lastLink(web, func() { w.reaches("h1", "h2") })
	if toEgress == nil {
		t.Fatal("no packet to the egress came by")
	}
	sent := r6.of(web.Path)
	before, err := w.frames(web)
	must(t, err)
	held := map[string]map[string]ebpf.ProgramID{}
	for _, n := range w.nodes() {
		if held[n] = w.heldPrograms(n); len(held[n]) == 0 {
			t.Fatalf("no links of %s are pinned", n)
		}
		// The agent may be quicker than what comes last, the directory itself.
		if err := os.RemoveAll(filepath.Join(dataplane.DefaultPinDir, w.Instance(n))); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
			t.Fatal(err)
		}
	}
	for _, n := range w.nodes() {
		eventually(t, func() error {
			if d := cmp.Diff(held[n], w.heldPrograms(n)); d != "" {
				return fmt.Errorf("pinned links of %s (-before +now):\n%s", n, d)
			}
			// The links are not the last of what is put back.
			if s := w.status(n); !slices.ContainsFunc(s.Warnings, func(s string) bool { return strings.Contains(s, "were removed") }) || s.Error != "" {
				return fmt.Errorf("status of %s: %+v; want a warning of its pins", n, s)
			}
			return nil
		})
	}
	for _, n := range w.nodes() {
		w.kill(n)
	}
	for _, n := range w.nodes() {
		if d := cmp.Diff(held[n], w.heldPrograms(n)); d != "" {
			t.Errorf("pinned links of %s (-before +now):\n%s", n, d)
		}
	}
	w.reaches("h1", "h2")
	const plain, again = 3, 2
	for range plain {
		m.send(srv6.Packet{Header: srv6.Header{
			NextHeader: unix.IPPROTO_NONE, HopLimit: 9, Source: w.addr("h1"), Destination: w.addr("h2"),
		}})
	}
	for range again {
		m.Send(*toEgress)
	}
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
	}
	w.mu.Lock()
	w.expected[refusal{Node: "r6", Reason: "unproven"}] += plain
	w.mu.Unlock()
	w.refused("r6", "replay", again)
	w.reaches("h1", "h2")
	eventually(t, func() error {
		now, err := w.frames(web)
		if err != nil {
			return err
		}
		for i := range now {
			if got := now[i].Packets - before[i].Packets; got != 10 {
				return fmt.Errorf("hop %d has counted %d packets since, want 10", i, got)
			}
		}
		return nil
	})
	left := again // the test sent it as often
	numbers(t, slices.DeleteFunc(r6.of(web.Path), func(p srv6.Proof) bool {
		twice := p == sent[len(sent)-1] && left > 0
		if twice {
			left--
		}
		return twice
	}))
}

// ceilings reads a node's record of used numbers, by path.
func (w *world) ceilings(node string) map[string]uint64 {
	w.t.Helper()
	b, err := os.ReadFile(filepath.Join(w.AgentDir(node), "counters.json"))
	must(w.t, err)
	var f struct {
		Entries []struct {
			Path    string
			Ceiling uint64
		}
	}
	must(w.t, json.Unmarshal(b, &f))
	out := map[string]uint64{}
	for _, c := range f.Entries {
		out[c.Path] = c.Ceiling
	}
	return out
}

// After a reboot there are no programs and no maps any more; what is on the disk
// keeps the numbers from being given out again.
func TestNumbersAreNotGivenOutAgainAfterAReboot(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, numbersGoOnAfterAReboot)
}

func numbersGoOnAfterAReboot(t *testing.T, carried change) {
	w := build(t, paper, carried)
	web := w.path("web", model.Forward)
	r6 := w.stamps("r6", "r6-r3")
	came := func(n int) map[uint64][]uint64 {
		t.Helper()
		eventually(t, func() error {
			if got := len(r6.of(web.Path)); got != n {
				return fmt.Errorf("%d stamped packets were captured, want %d", got, n)
			}
			return nil
		})
		return numbers(t, r6.of(web.Path))
	}
	key := fmt.Sprintf("0x%08x", web.Path)
	w.reaches("h1", "h2")
	first := highest(came(5))
	ceiling := w.ceilings("r1")[key]
	if ceiling <= first {
		t.Fatalf("number %d was given out, the ceiling on disk is %d", first, ceiling)
	}

	must(t, w.StopAgent(soon(t), "r1"))
	must(t, os.RemoveAll(filepath.Join(dataplane.DefaultPinDir, w.Instance("r1"))))
	eventually(t, func() error { // the kernel lets go a little later
		if n := w.attached("r1", "r1-h1", "r1-r2", "r1-r4"); n != 0 {
			return fmt.Errorf("%d programs are still attached at r1", n)
		}
		return nil
	})
	w.isCutOff("h1", "h2", probes) // plain by now
	must(t, w.StartAgent(soon(t), "r1"))
	w.refused("r6", "unproven", probes)
	w.reaches("h1", "h2")
	lanes := came(10)
	for lane, l := range lanes {
		for _, n := range l {
			if n > first && n <= ceiling {
				t.Errorf("lane %d: number %d after the reboot is not above the old ceiling %d", lane, n, ceiling)
			}
		}
	}
	second := highest(lanes)
	if second <= ceiling {
		t.Errorf("the highest number after the reboot is %d, the ceiling before was %d", second, ceiling)
	}

	// Whoever detaches in an orderly way gives back what it has not used.
	must(t, w.StopAgent(soon(t), "r1"))
	must(t, w.Detach(soon(t), "r1"))
	if back := w.ceilings("r1")[key]; back != second {
		t.Errorf("after detaching the ceiling is %d, want the last number, %d", back, second)
	}
	must(t, w.StartAgent(soon(t), "r1"))
	w.reaches("h1", "h2")
	if third := highest(came(15)); third <= second || third > second+5 {
		t.Errorf("number %d after detaching, want one of the next after %d", third, second)
	}
}

// attached counts the programs at interfaces of a member.
func (w *world) attached(name string, links ...string) (n int) {
	w.t.Helper()
	must(w.t, w.Do(name, func() error {
		for _, l := range links {
			i, err := net.InterfaceByName(l)
			if err != nil {
				return err
			}
			for egress, at := range map[bool]ebpf.AttachType{false: ebpf.AttachTCXIngress, true: ebpf.AttachTCXEgress} {
				r, err := link.QueryPrograms(link.QueryOptions{Target: i.Index, Attach: at})
				if err == nil {
					n += len(r.Programs)
				} else if !errors.Is(err, unix.EINVAL) { // before Linux 6.6
					return fmt.Errorf("query %s: %w", l, err)
				}
				filters, err := w.net(name).Filters(i.Index, egress)
				if err != nil {
					return err
				}
				n += len(filters)
			}
		}
		return nil
	}))
	return n
}

// detach runs `waystamp agent --detach` for a node, as an operator would.
func (w *world) detach(node string, more ...string) result {
	w.t.Helper()
	return w.detachWithin(soon(w.t), node, more...)
}

// detachWithin is detach while ctx lasts.
func (w *world) detachWithin(ctx context.Context, node string, more ...string) result {
	w.t.Helper()
	p := prepared(ctx, w.t, append([]string{"agent", "--detach", "--instance", w.Instance(node), "--run-dir", w.AgentDir(node), "--state-dir", w.AgentDir(node)}, more...))
	must(w.t, w.ns(node).Do(p.cmd.Start))
	return p.wait()
}

func TestStoppedAgentsLeaveDataPathAndGuard(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, stoppedAgentsLeaveDataPathAndGuard)
}

func stoppedAgentsLeaveDataPathAndGuard(t *testing.T, carried change) {
	w := build(t, paper, carried)
	links := []string{"r1-h1", "r1-r2", "r1-r4"}
	all := len(links) + 1 // the edge has one at its egress too
	if n := w.attached("r1", links...); n != all {
		t.Fatalf("%d programs are attached at r1, want %d", n, all)
	}
	if r := w.detach("r1", "--yes"); r.code != 1 || !strings.Contains(r.stderr, "stop that agent first") {
		t.Errorf("detach beside a running agent: %s", r)
	}
	for _, n := range w.nodes() {
		must(t, w.StopAgent(soon(t), n))
		// It says so when it ends by itself, and not when it is killed.
		log, err := os.ReadFile(filepath.Join(w.Dir(), "logs", n+".log"))
		if err != nil || !bytes.Contains(log, []byte("guard and locator route stay in force")) {
			t.Errorf("the agent of %s says at its end:\n%s%v", n, log, err)
		}
	}
	w.reaches("h1", "h2")
	w.download("h2", "h1", 5_000_000)
	if l, err := w.net("r2").Locators(); err != nil || len(l) != 1 {
		t.Errorf("locators of r2: %v, %v", l, err)
	}

	// First the question, then the deed.
	r := w.detach("r1")
	if r.code != 2 || !strings.Contains(r.stderr, "web (reverse)") || !strings.Contains(r.stderr, "add --yes") {
		t.Errorf("detach without --yes: %s", r)
	}
	if n := w.attached("r1", links...); n != all {
		t.Fatalf("%d programs are attached at r1 after detach without --yes", n)
	}
	r = w.detach("r1", "--yes")
	held := all
	if w.labelled() {
		held++ // where frames of super-packets come out
	}
	want := fmt.Sprintf("instance %s: %d programs taken off their interfaces\n"+
		"locator fc00:0:0:100::/56: route withdrawn\nchain web (reverse): now unguarded\n", w.Instance("r1"), held)
	if r.code != 0 || r.stdout != want || r.stderr != "" {
		t.Errorf("detach: %s\nwant %s", r, want)
	}
	if n := w.attached("r1", links...); n != 0 {
		t.Errorf("%d programs are attached at r1 after detach", n)
	}
	if p := pins(t, w.Instance("r1")); len(p) > 0 {
		t.Errorf("pins of r1 after detach: %q", p)
	}
	if l, err := w.net("r1").Locators(); err != nil || len(l) != 0 {
		t.Errorf("locators of r1 after detach: %v, %v", l, err)
	}
	if left := entries(t, w.AgentDir("r1"), ""); !slices.Equal(left, []string{"counters.json", "windows.json"}) {
		t.Errorf("the run directory of r1 after detach holds %q, want the records of numbers given out and seen alone", left)
	}
	if r := w.detach("r1", "--yes"); r.code != 0 || !strings.Contains(r.stdout, "nothing is there") {
		t.Errorf("detach again: %s", r)
	}

	// Nobody's agent runs, and the guard at r6 stands.
	w.isCutOff("h1", "h2", probes)
	for _, n := range w.nodes() {
		must(t, w.StartAgent(soon(t), n))
	}
	w.refused("r6", "unproven", probes)
	w.reaches("h1", "h2")
}

// writePlan replaces a plan file by any bytes.
func (w *world) writePlan(node string, b []byte) {
	w.t.Helper()
	tmp := w.NodePlanPath(node) + ".tmp"
	must(w.t, os.WriteFile(tmp, b, 0o600))
	must(w.t, os.Rename(tmp, w.NodePlanPath(node)))
}

func TestAWrongPlanLeavesTheOneBeforeInForce(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, wrongPlanLeavesTheOneBefore)
}

func wrongPlanLeavesTheOneBefore(t *testing.T, carried change) {
	w := borrow(t, paper, carried)
	good, err := os.ReadFile(w.NodePlanPath("r2"))
	must(t, err)
	other, err := os.ReadFile(w.NodePlanPath("r3"))
	must(t, err)
	generation := w.status("r2").Generation
	for _, c := range []struct {
		name string
		plan []byte // nil: the file is gone
		says string
	}{
		{"garbage", []byte("not a plan\n"), "invalid character"},
		{"nothing", []byte{}, "unexpected end of JSON input"},
		{"half a plan", good[:len(good)/2], "unexpected end of JSON input"},
		{"an unknown field", bytes.Replace(good, []byte(`"name"`), []byte(`"nome"`), 1), "nome"},
		{"another node's plan", other, "the plan is for another node: r3; this is the agent of r2"},
		{"an interface that does not exist", bytes.Replace(good, []byte(`"r2-r3"`), []byte(`"r2-r9"`), 1), "interface r2-r9: there is no such interface"},
		{"no file", nil, "no such file"},
	} {
		if c.plan == nil {
			must(t, os.Remove(w.NodePlanPath("r2")))
		} else {
			w.writePlan("r2", c.plan)
		}
		eventually(t, func() error {
			s := w.status("r2")
			if !strings.Contains(s.Error, c.says) || !strings.Contains(s.Error, "the one before stays in force") {
				return fmt.Errorf("%s: the status says %q, want %q in it", c.name, s.Error, c.says)
			}
			if strings.Contains(s.Error, "\n") {
				return fmt.Errorf("%s: the status says more than one line: %q", c.name, s.Error)
			}
			return nil
		})
		w.reaches("h1", "h2")
		if s := w.status("r2"); s.Generation != generation || !s.Ready {
			t.Errorf("%s: generation %d, ready %t, want %d", c.name, s.Generation, s.Ready, generation)
		}
	}
	w.writePlan("r2", good)
	eventually(t, func() error {
		if s := w.status("r2"); s.Error != "" {
			return fmt.Errorf("with its plan back the status of r2 says %q", s.Error)
		}
		return nil
	})
	w.reaches("h1", "h2")
}

func TestAnAgentThatCannotStartChangesNothing(t *testing.T) {
	t.Parallel()
	w := buildFrom(t, parse(t, paper), func(c *lab.Config) { c.WithoutAgents = true })
	good, err := os.ReadFile(w.NodePlanPath("r2"))
	must(t, err)
	dir := newDir(t)
	for _, c := range []struct {
		name string
		plan []byte
		args []string
		says string
	}{
		{"garbage", []byte("not a plan\n"), nil, "it is not whole, or not JSON: invalid character"},
		{"an interface that does not exist", bytes.Replace(good, []byte(`"r2-r3"`), []byte(`"r2-r9"`), 1), nil,
			"interface r2-r9: there is no such interface"},
		{"another node's plan", good, []string{"--node", "r3"}, "the plan is for another node: r2; this is the agent of r3"},
		{"pins that are no pins", good, []string{"--pin-dir", dir}, "is not on a bpf file system, so that the data path would end with the agent: choose a directory below /sys/fs/bpf"},
	} {
		file, run := filepath.Join(dir, "plan.json"), filepath.Join(dir, "run")
		must(t, os.WriteFile(file, c.plan, 0o600))
		args := append([]string{"agent", "--plan", file, "--instance", w.Instance("r2"), "--run-dir", run, "--state-dir", run}, c.args...)
		r := runIn(t, w.ns("r2"), args...)
		// Beside its log, which says how far the start has come.
		said := slices.DeleteFunc(strings.Split(strings.TrimSuffix(r.stderr, "\n"), "\n"), func(l string) bool { return strings.HasPrefix(l, "time=") })
		if r.code != 1 || r.stdout != "" || len(said) != 1 || !strings.Contains(said[0], c.says) {
			t.Errorf("%s: %s\nwant one line with %q", c.name, r, c.says)
		}
		if n := w.attached("r2", "r2-r1", "r2-r3"); n != 0 {
			t.Errorf("%s: %d programs are attached", c.name, n)
		}
		if p := pins(t, w.Instance("r2")); len(p) > 0 {
			t.Errorf("%s: pins %q", c.name, p)
		}
		if l, err := w.net("r2").Locators(); err != nil || len(l) != 0 {
			t.Errorf("%s: locators %v, %v", c.name, l, err)
		}
		if left := entries(t, run, ""); len(left) > 0 {
			t.Errorf("%s: left in the run directory: %q", c.name, left)
		}
	}
	// The very same command does start with a plan that is right.
	must(t, w.StartAgent(soon(t), "r2"))
}

// Chains come and go, so many that the nodes need larger maps and load everything
// anew, and the traffic of those that stay does not notice.
func TestChainsComeAndGoUnderTraffic(t *testing.T) {
	t.Parallel()
	encapsulations(t, chainsComeAndGo, throughNodes)
}

func chainsComeAndGo(t *testing.T, carried change) {
	w := build(t, star, carried)
	small := w.plan
	d := w.manifest.Domain
	d.Chains = slices.Clone(d.Chains)
	for i := range 100 {
		d.Chains = append(d.Chains, model.Chain{
			Name: fmt.Sprintf("c%d", i), Ingress: []string{"r1"}, Functions: []string{"dpi"}, Egress: "r6",
			Match: model.Match{Destination: netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfc, 15: byte(i), 2: 0x99}), 128)},
			Proof: model.Proof{Scheme: model.SchemeOPoT}, Encapsulation: d.Chains[0].Encapsulation,
		})
	}
	large, err := plan.Compile(d, plan.NewKeyring(rand.Reader, small.Paths))
	must(t, err)
	web := w.path("web", model.Forward)
	if i := slices.IndexFunc(large.Paths, func(p plan.Path) bool { return p.Path == web.Path }); large.Paths[i].Epoch != web.Epoch {
		t.Fatalf("chain web has epoch %d with its neighbours, %d without", large.Paths[i].Epoch, web.Epoch)
	}

	r6 := w.stamps("r6", "r6-m")
	since, back := w.counting(web), w.counting(w.path("web", model.Reverse))
	s := w.stream("h1", "h2")
	const enough = 1 << 20
	s.more(enough)
	for _, p := range []*plan.Domain{large, small, large} {
		for _, n := range p.Nodes {
			before := pins(t, w.Instance(n.Name))
			w.follow(n)
			if after := pins(t, w.Instance(n.Name)); !slices.Equal(before, after) {
				t.Errorf("pins of %s: %q, before %q", n.Name, after, before)
			}
			s.more(enough)
		}
	}
	s.finish()
	f := since()
	if back().frames() == 0 || f.frames() == 0 {
		t.Errorf("%d frames forward, %d back", f.frames(), back().frames())
	}
	numbers(t, r6.of(web.Path))
	if g := entries(t, filepath.Join(dataplane.DefaultPinDir, w.Instance("r1")), "gen-"); len(g) != 1 || strings.HasPrefix(g[0], "gen-1-") {
		t.Errorf("generations of r1: %q; want one, and not the first: else this test shows less than it says", g)
	}
}

// Labs of one and the same file do not meet, and none can take another's place.
func TestLabsLiveBesideEachOther(t *testing.T) {
	t.Parallel()
	a, b := build(t, paper), build(t, paper)
	since := b.counting(b.path("web", model.Forward))
	a.reaches("h1", "h2")
	if n := since().frames(); n != 0 {
		t.Errorf("%d frames of one lab were stamped in the other", n)
	}
	b.reaches("h1", "h2")
	for name, runDir := range map[string]string{"the same directory": filepath.Dir(a.Dir()), "another directory": newDir(t)} {
		_, err := lab.Up(soon(t), lab.Config{
			Domain: a.manifest.Domain, Lab: *a.manifest.Lab, Prefix: a.Prefix(), RunDir: runDir, Binary: program,
		})
		if !errors.Is(err, os.ErrExist) {
			t.Errorf("a lab with a prefix that is taken, in %s: got %v", name, err)
		}
		if name == "another directory" {
			if left := entries(t, runDir, ""); len(left) > 0 {
				t.Errorf("left of it: %q", left)
			}
		}
		a.reaches("h1", "h2")
	}
	b.checkRefusals()
	must(t, b.Down(soon(t)))
	a.reaches("h1", "h2")
}

// moment tells whether a command that builds a lab has come to some point.
type moment func(t *testing.T, prefix, stdout string) bool

func hasNamespace(t *testing.T, prefix, _ string) bool {
	return len(entries(t, host.NamespaceDir, prefix+"-")) > 0
}
func hasAgent(t *testing.T, prefix, _ string) bool { return len(processes(t, prefix+"-")) > 0 }
func hasPin(t *testing.T, prefix, _ string) bool   { return len(pins(t, prefix+"-")) > 0 }
func hasProgram(t *testing.T, prefix, _ string) bool {
	return slices.ContainsFunc(processes(t, prefix+"-"), func(p string) bool { return strings.Contains(p, " lab inline ") })
}

func TestCtrlCLeavesNothing(t *testing.T) {
	t.Parallel()
	file, withFunctions := write(t, "paper.yaml", paper), write(t, "functions.yaml", functions)
	says := func(text string) moment {
		return func(_ *testing.T, _, stdout string) bool { return strings.Contains(stdout, text) }
	}
	for _, c := range []struct {
		name string
		args []string
		when moment
	}{
		{"lab up, at its first namespace", []string{"lab", "up", "-f", file}, hasNamespace},
		{"lab up, at its first agent", []string{"lab", "up", "-f", file}, hasAgent},
		{"lab up, at its first pin", []string{"lab", "up", "-f", file}, hasPin},
		{"lab up, at the program of a function", []string{"lab", "up", "-f", withFunctions}, hasProgram},
		{"demo, at its first namespace", []string{"demo"}, hasNamespace},
		{"demo, at its first scene", []string{"demo"}, says("1. Traffic takes its chain")},
		{"demo, at its third scene", []string{"demo", "--scheme", "opot"}, says("3. The functions are visited")},
		{"demo, at its firewall", []string{"demo", "--scheme", "opot"}, says("3. The firewall answers by itself")},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			prefix, runDir := newPrefix(), newDir(t)
			sweep(t, prefix, runDir)
			p := start(t, append(c.args, "--prefix", prefix, "--run-dir", runDir)...)
			within(t, patience, func() error {
				if !c.when(t, prefix, p.stdout.String()) {
					return fmt.Errorf("it says\n%s%s", p.stdout, p.stderr)
				}
				return nil
			})
			// As timeout(1) does it, which signals the process and its group. By the
			// second it may be over.
			must(t, p.cmd.Process.Signal(unix.SIGINT))
			p.cmd.Process.Signal(unix.SIGTERM)
			r := p.wait()
			if r.code != 1 || !strings.HasSuffix(r.stderr, "waystamp: interrupted\n") {
				t.Errorf("after Ctrl-C: %s\nwant exit code 1 and that it was interrupted", r)
			}
			leavesNothing(t, runDir, prefix)
		})
	}
}

// onTerminal starts a command at a terminal of its own, as its session's first
// process. hangUp closes it.
func onTerminal(t *testing.T, args ...string) (p *process, hangUp func()) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	must(t, err)
	outer := os.NewFile(uintptr(fd), "ptmx") // non-blocking: closing it ends a read
	hangUp = sync.OnceFunc(func() { outer.Close() })
	t.Cleanup(hangUp)
	must(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	must(t, err)
	inner, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	must(t, err)
	defer inner.Close()
	p = prepared(soon(t), t, args)
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = inner, inner, inner
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
	must(t, p.cmd.Start())
	read := make(chan struct{})
	go func() {
		defer close(read)
		io.Copy(p.stdout, outer) // ends when either end is closed
	}()
	t.Cleanup(func() {
		hangUp()
		<-read
	})
	return p, hangUp
}

// A closed terminal sends SIGHUP, and takes nothing any more that is written to it.
func TestAClosedTerminalLeavesNothing(t *testing.T) {
	t.Parallel()
	file := write(t, "paper.yaml", paper)
	for _, c := range []struct {
		name string
		args []string
		when moment
	}{
		{"lab up, at its first agent", []string{"lab", "up", "-v", "-f", file}, hasAgent},
		{"demo, at its first scene", []string{"demo", "-v"}, func(_ *testing.T, _, stdout string) bool {
			return strings.Contains(stdout, "1. Traffic takes its chain")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			prefix, runDir := newPrefix(), newDir(t)
			sweep(t, prefix, runDir)
			p, hangUp := onTerminal(t, append(c.args, "--prefix", prefix, "--run-dir", runDir)...)
			within(t, patience, func() error {
				if !c.when(t, prefix, p.stdout.String()) {
					return fmt.Errorf("it says\n%s", p.stdout)
				}
				return nil
			})
			hangUp()
			if r := p.wait(); r.code != 1 {
				t.Errorf("after the hangup: %s (%s)\nwant exit code 1", r, p.cmd.ProcessState)
			}
			leavesNothing(t, runDir, prefix)
		})
	}
	t.Run("lab down, once it has begun", func(t *testing.T) {
		t.Parallel()
		prefix, runDir := newPrefix(), newDir(t)
		sweep(t, prefix, runDir)
		in := []string{"--prefix", prefix, "--run-dir", runDir}
		if r := run(t, append([]string{"lab", "up", "-f", file}, in...)...); r.code != 0 {
			t.Fatal(r)
		}
		agents := len(processes(t, prefix+"-"))
		p, hangUp := onTerminal(t, append([]string{"lab", "down"}, in...)...)
		within(t, patience, func() error {
			// Its own arguments have the prefix, and no hyphen behind it.
			if n := len(processes(t, prefix+"-")); n >= agents {
				return fmt.Errorf("%d agents run", n)
			}
			return nil
		})
		hangUp()
		if r := p.wait(); r.code != 0 {
			t.Errorf("after the hangup: %s (%s)\nwant it to go to its end", r, p.cmd.ProcessState)
		}
		leavesNothing(t, runDir, prefix)
	})
}

// Under nohup(1) a hangup is ignored, and stays so.
func TestAnIgnoredHangupStaysIgnored(t *testing.T) {
	t.Parallel()
	file := write(t, "paper.yaml", paper)
	prefix, runDir := newPrefix(), newDir(t)
	sweep(t, prefix, runDir)
	in := []string{"--prefix", prefix, "--run-dir", runDir}
	p := prepared(soon(t), t, nil)
	p.cmd.Path = "/bin/sh"
	p.cmd.Args = append([]string{"sh", "-c", `trap "" HUP; exec "$@"`, "sh", program, "lab", "up", "-f", file}, in...)
	must(t, p.cmd.Start())
	within(t, patience, func() error {
		if !hasNamespace(t, prefix, "") {
			return errors.New("it has no namespace yet")
		}
		return nil
	})
	must(t, p.cmd.Process.Signal(unix.SIGHUP))
	if r := p.wait(); r.code != 0 {
		t.Errorf("after a hangup: %s\nwant the lab to be up", r)
	}
	if r := run(t, append([]string{"lab", "down"}, in...)...); r.code != 0 {
		t.Error(r)
	}
	leavesNothing(t, runDir, prefix)
}

// As in waystamp demo | head -1.
func TestADemoThatNobodyReadsLeavesNothing(t *testing.T) {
	t.Parallel()
	prefix, runDir := newPrefix(), newDir(t)
	sweep(t, prefix, runDir)
	out, in, err := os.Pipe()
	must(t, err)
	defer out.Close()
	p := prepared(soon(t), t, []string{"demo", "--prefix", prefix, "--run-dir", runDir})
	p.cmd.Stdout = in
	must(t, p.cmd.Start())
	in.Close()
	s := bufio.NewScanner(out)
	for s.Scan() && !strings.HasPrefix(s.Text(), "lab "+prefix+" is up") {
	}
	out.Close()
	if r := p.wait(); r.code != 1 || !strings.HasSuffix(r.stderr, "waystamp: interrupted\n") {
		t.Errorf("after its reader has gone: %s (%s)\nwant exit code 1 and that it was interrupted", r, p.cmd.ProcessState)
	}
	leavesNothing(t, runDir, prefix)
}

// sweep takes away, when a test has failed, what a command under test has left.
func sweep(t *testing.T, prefix, runDir string) {
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, p := range processes(t, prefix+"-") { // the prefix is random, hence ours
			var pid int
			if _, err := fmt.Sscan(p, &pid); err == nil {
				unix.Kill(pid, unix.SIGKILL)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if said, err := exec.CommandContext(ctx, program, "lab", "down", "--prefix", prefix, "--run-dir", runDir).CombinedOutput(); err != nil {
			t.Logf("sweep lab %s: %v: %s", prefix, err, said)
		}
		for _, e := range entries(t, host.NamespaceDir, prefix+"-") {
			os.Remove(filepath.Join(host.NamespaceDir, e)) // a file; a namespace's is busy
		}
	})
}

// What a killed `lab up` has left, `lab down` takes away.
func TestDownTakesAwayWhatAKilledUpHasLeft(t *testing.T) {
	t.Parallel()
	file := write(t, "functions.yaml", functions)
	for _, c := range []struct {
		name string
		when moment
	}{
		{"at its first namespace", hasNamespace}, {"at the program of a function", hasProgram},
		{"at its first agent", func(t *testing.T, prefix, _ string) bool { return len(processes(t, prefix+"-")) > 1 }},
		{"at its first pin", hasPin},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			prefix, runDir := newPrefix(), newDir(t)
			sweep(t, prefix, runDir)
			p := start(t, "lab", "up", "-f", file, "--prefix", prefix, "--run-dir", runDir)
			within(t, patience, func() error {
				if !c.when(t, prefix, "") {
					return errors.New("it has not come so far")
				}
				return nil
			})
			must(t, p.cmd.Process.Kill())
			p.wait()
			if len(entries(t, host.NamespaceDir, prefix+"-")) == 0 {
				t.Error("nothing was left: this test shows nothing")
			}
			// A child of it may hold the lab's lock until it runs its own program.
			eventually(t, func() error {
				if r := run(t, "lab", "down", "--prefix", prefix, "--run-dir", runDir); r.code != 0 {
					return errors.New(r.String())
				}
				return nil
			})
			leavesNothing(t, runDir, prefix)
		})
	}
}

// What windows have seen is written down, and who cannot is told of in the status
// for as long as that is so.
func TestWindowsThatCannotBeSavedAreToldOf(t *testing.T) {
	t.Parallel()
	w := build(t, narrowing)
	w.reaches("h1", "h2")
	file := filepath.Join(w.AgentDir("r6"), "windows.json")
	eventually(t, func() error {
		_, err := os.Stat(file)
		return err
	})
	// A directory in the place of the file; the agent may write it meanwhile.
	eventually(t, func() error { return errors.Join(os.RemoveAll(file), os.Mkdir(file, 0o700)) })
	eventually(t, func() error {
		if s := w.status("r6"); !strings.Contains(s.Error, file) || !s.Ready {
			return fmt.Errorf("status %+v; want %s in its error", s, file)
		}
		return nil
	})
	w.reaches("h1", "h2")
	must(t, os.Remove(file))
	eventually(t, func() error {
		if s := w.status("r6"); s.Error != "" {
			return fmt.Errorf("nothing is in the way, and the status says %q", s.Error)
		}
		_, err := os.Stat(file)
		return err
	})
}
