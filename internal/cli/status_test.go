package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

func statusOfR1() api.Status {
	sid := netip.MustParseAddr("fc00:0:0:101::")
	return api.Status{
		Version: 1, Ready: true, Node: "r1", Instance: "default", Generation: 2, Plan: "0123456789abcdef", Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local),
		Paths: []api.PathState{
			{Role: "headend", Chain: "web", Direction: "forward", Path: 1, Epoch: 3},
			{Role: "endpoint", Chain: "web", Direction: "reverse", Path: 2, Epoch: 4, Function: "fw", SID: &sid},
			{Role: "egress", Chain: "web", Direction: "reverse", Path: 2, Epoch: 4},
		},
		Interfaces: []api.Interface{
			{Name: "r1-h1", Role: "edge", Unmatched: "pass", TC: true, Out: true},
			{Name: "r1-r2", Role: "core", TC: true, XDP: true},
			{Name: "from-fw", Role: "core", Functions: []string{"fw"}},
		},
		Recent: api.Recent{Seconds: 62, Refusals: []api.Refusal{{Reason: "proof", Text: "the proof does not verify", Dropped: 7, Reported: 2}, {Reason: "unproven", Text: "a chain requires this packet", Reported: 3}}},
	}
}

func TestStatusShowsANodeAtOnce(t *testing.T) {
	var b strings.Builder
	s := statusOfR1()
	if err := writeStatus(&b, s, s.Since.Add(90*time.Second)); err != nil {
		t.Fatal(err)
	}
	const want = `node r1, instance default: ready
  plan        0123456789ab, in force since 2026-01-02 03:04:05 (1m30s), number 2 since the agent started
  epochs      chain web, forward: 3 (headend)
              chain web, reverse: 4 (endpoint, egress)
  interfaces  r1-h1 (edge): tc, tc egress
              r1-r2 (core): tc, xdp
              from-fw (of function fw): no program attached
  refused     9 proof (2 of them forwarded: on-violation is report), in the last minute: the proof does not verify
              3 unproven (3 of them forwarded: guard is audit), in the last minute: a chain requires this packet
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestStatusTellsWhatIsWrongByItsExitCode(t *testing.T) {
	for name, c := range map[string]struct {
		edit func(*api.Status)
		code int
		want string
	}{
		"all is well": {func(*api.Status) {}, command.ExitDone, "refused     9 proof"},
		"no refusal":  {func(s *api.Status) { s.Recent = api.Recent{Seconds: 20} }, command.ExitDone, "refused     no packet in the last 20s"},
		"a warning":   {func(s *api.Status) { s.Warnings = []string{"w"} }, command.ExitDone, "warning     w"},
		"a problem":   {func(s *api.Status) { s.Problems = []string{"p"} }, command.ExitFailed, "r1, instance default: ready, with problems"},
		"an error":    {func(s *api.Status) { s.Error = "e" }, command.ExitFailed, "error       e"},
		"no plan yet": {func(s *api.Status) { s.Ready = false }, command.ExitFailed, "r1, instance default: not ready"},
		"many of paths": {func(s *api.Status) {
			for i := range 20 {
				s.Paths = append(s.Paths, api.PathState{Role: "headend", Chain: "c", Path: uint32(100 + i)})
			}
		}, command.ExitDone, "and 14 more; -o json has all"},
	} {
		s := statusOfR1()
		c.edit(&s)
		stdout, stderr, code := fakeAgents{"/s": {status: s}}.run(t, t.Context(), "status", "--socket", "/s")
		if code != c.code || !strings.Contains(stdout, c.want) || stderr != "" {
			t.Errorf("%s: exit code %d, stderr %q, and\n%swant %d and %q", name, code, stderr, stdout, c.code, c.want)
		}
	}
}

// One that does not answer hides no other.
func TestStatusOfSeveralAgents(t *testing.T) {
	r2 := statusOfR1()
	r2.Node, r2.Instance = "r2", "second"
	agents := fakeAgents{"/1": {status: statusOfR1()}, "/down": {fails: errors.New("is it running?")}, "/2": {status: r2}}
	stdout, stderr, code := agents.run(t, t.Context(), "status", "--socket", "/1", "--socket", "/down", "--socket", "/2")
	if code != command.ExitFailed || stderr != "waystamp: is it running?\n" || !strings.Contains(stdout, "node r1,") || !strings.Contains(stdout, "\n\nnode r2, instance second:") {
		t.Errorf("exit code %d, %q,\n%s", code, stderr, stdout)
	}
	for socket, c := range agents {
		if c.closed != 1 {
			t.Errorf("the client of %s is closed %d times", socket, c.closed)
		}
	}
}

func TestOutputAsYAMLIsThatOfJSON(t *testing.T) {
	agents := fakeAgents{"/1": {status: statusOfR1()}}
	stdout, stderr, code := agents.run(t, t.Context(), "status", "--socket", "/1", "-o", "yaml")
	for _, want := range []string{"---\nversion: 1\n", "node: r1\n", "- name: r1-h1\n", "  epoch: 3\n"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	if code != 0 || stderr != "" {
		t.Errorf("exit code %d, %q", code, stderr)
	}
	stdout, _, _ = agents.run(t, t.Context(), "status", "--socket", "/1", "-o", "json")
	var back api.Status
	if err := json.Unmarshal([]byte(stdout), &back); err != nil || !cmp.Equal(back.Paths[0], statusOfR1().Paths[0]) {
		t.Errorf("%v, %s", err, stdout)
	}
}

// listenAt answers at the socket of an instance.
func listenAt(t *testing.T, runDir, instance string) (path string, stop func()) {
	t.Helper()
	path = filepath.Join(runDir, instance, "agent.sock")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	stop = func() { l.Close() }
	t.Cleanup(stop)
	return path, stop
}

func TestSocketsAreFound(t *testing.T) {
	in := surroundings{runDir: t.TempDir(), labs: t.TempDir()}
	check := func(name string, flags targetFlags, want ...string) {
		t.Helper()
		flags.in = in
		got, err := flags.find()
		var sockets []string
		for _, g := range got {
			sockets = append(sockets, g.socket)
		}
		if diff := cmp.Diff(want, sockets); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
	a, stopA := listenAt(t, in.runDir, "a")
	b, stopB := listenAt(t, in.runDir, "b")
	check("two agents", targetFlags{}, a, b)
	check("one by name", targetFlags{instances: []string{"b"}}, b)
	check("by name and socket", targetFlags{instances: []string{"b"}, sockets: []string{"/x"}}, "/x", b)
	stopA()
	check("one is left of a killed agent", targetFlags{}, b)
	stopB()
	check("both are", targetFlags{}, a, b)

	bad := targetFlags{in: in, instances: []string{"../x"}}
	if _, err := bad.find(); err == nil || !strings.Contains(err.Error(), `--instance: "../x" has the character`) {
		t.Errorf("a name with slashes: %v", err)
	}
	slip := targetFlags{in: in, instances: []string{"aa"}}
	if _, err := slip.find(); err == nil || !strings.Contains(err.Error(), "the agent of instance aa does not run: it has no socket ") || !strings.Contains(err.Error(), "; these have one: ") {
		t.Errorf("an instance that is not there: %v", err)
	}
	in.runDir = t.TempDir()
	nobody := targetFlags{in: in}
	if _, err := nobody.find(); err == nil || !strings.Contains(err.Error(), "no agent has a socket below "+in.runDir+": start one (waystamp agent --plan FILE)") {
		t.Errorf("without any agent: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(in.labs, "ws-1a2b"), 0o700); err != nil {
		t.Fatal(err)
	}
	only := targetFlags{in: in}
	if _, err := only.find(); err == nil || !strings.Contains(err.Error(), "there are labs: ws-1a2b; name one with --lab") {
		t.Errorf("with a lab only: %v", err)
	}
}

// An agent that has ended leaves a data path in force, which nobody looks after.
func TestStatusTellsOfADataPathWithoutAnAgent(t *testing.T) {
	agents := fakeAgents{}
	in := agents.in(t)
	run := func(args ...string) (string, string, int) {
		var stdout, stderr strings.Builder
		code := command.Run(t.Context(), newRoot(in), args, strings.NewReader(""), &stdout, &stderr)
		return stdout.String(), stderr.String(), code
	}
	if err := os.MkdirAll(filepath.Join(in.runDir, "gone"), 0o700); err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(in.runDir, "gone", "state.json")
	if err := os.WriteFile(state, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	const left = "the agent of instance gone does not run, but its data path is still in force: start the agent again"
	for _, args := range []string{"status", "status --instance gone", "get refusals"} {
		if _, stderr, code := run(strings.Fields(args)...); code != command.ExitFailed || !strings.Contains(stderr, left) {
			t.Errorf("%s alone: exit code %d, %q", args, code, stderr)
		}
	}
	socket, _ := listenAt(t, in.runDir, "there")
	agents[socket] = &fakeClient{status: statusOfR1()}
	stdout, stderr, code := run("status")
	if code != command.ExitFailed || !strings.Contains(stdout, "node r1,") || !strings.Contains(stderr, left) || strings.Contains(stderr, "instance there") {
		t.Errorf("beside another: exit code %d, %q, %q", code, stdout, stderr)
	}
	if err := os.Remove(state); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := run("status"); code != command.ExitDone || stderr != "" {
		t.Errorf("after a detach: exit code %d, %q", code, stderr)
	}
}

func TestShellsCompleteInstancesAndFormats(t *testing.T) {
	agents := fakeAgents{}
	in := agents.in(t)
	listenAt(t, in.runDir, "alpha")
	for _, c := range []struct{ line, want string }{
		{"get paths --instance ", "alpha\n:4"},
		{"get paths -o ", "table\njson\nyaml\n:4"},
		{"status -o ", "text\njson\nyaml\n:4"},
	} {
		var out strings.Builder
		words := append([]string{"__complete"}, strings.Split(c.line, " ")...)
		command.Run(t.Context(), newRoot(in), words, strings.NewReader(""), &out, io.Discard)
		if !strings.HasPrefix(out.String(), c.want) {
			t.Errorf("%q: %q, want %q", c.line, out.String(), c.want)
		}
	}
}

func TestGetOfSeveralNodesIsOneTable(t *testing.T) {
	counts := func(node string, n uint64) *fakeClient {
		return &fakeClient{counters: []api.Counters{{Version: 1, Node: node, Refusals: []api.Refusal{{Reason: "proof", Text: "text", Dropped: n}}}}}
	}
	stdout, _, code := fakeAgents{"/1": counts("r1", 7), "/2": counts("r2", 123)}.run(t, t.Context(), "get", "refusals", "--socket", "/1", "--socket", "/2")
	const want = `NODE  REASON  DROPPED  REPORTED  MEANING
r1    proof         7         0  text
r2    proof       123         0  text
`
	if diff := cmp.Diff(want, stdout); diff != "" || code != 0 {
		t.Errorf("exit code %d (-want +got):\n%s", code, diff)
	}
}

func TestRatesAreOfTheTimeBetween(t *testing.T) {
	read := func(rows ...[]any) []reading {
		return []reading{{node: "r1", header: []string{"PATH", "PACKETS", "IN_FLIGHT"}, key: 1, rows: rows}}
	}
	before := read([]any{"a", uint64(100), gauge(5)}, []any{"b", uint64(50), gauge(0)})
	now := read([]any{"a", uint64(103), gauge(6)}, []any{"b", uint64(4), gauge(0)}, []any{"c", uint64(1), gauge(0)})
	var out strings.Builder
	if err := writeReadings(&out, rates(before, now, 2*time.Second)); err != nil {
		t.Fatal(err)
	}
	// b has begun again, c is new.
	const want = `PATH  PACKETS/S  IN_FLIGHT
a           1.5          6
b           2.0          0
c           0.5          0
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if now[0].header[1] != "PACKETS" || now[0].rows[0][1] != uint64(103) {
		t.Errorf("what was read has changed: %v", now)
	}
}

func TestGetWatchEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	agents := fakeAgents{"/1": {counters: []api.Counters{
		{Version: 1, Node: "r1", Errors: api.Errors{TooBig: 10}}, {Version: 1, Node: "r1", Errors: api.Errors{TooBig: 20}},
	}}}
	stdout, stderr, code := agents.run(t, ctx, "get", "errors", "--socket", "/1", "-w", "--interval", "10ms")
	if code != 0 || stderr != "" || !strings.Contains(stdout, "ERROR                        PACKETS/S") || !strings.Contains(stdout, "packet too big ") {
		t.Errorf("exit code %d, %q, %q", code, stderr, stdout)
	}
}

// aPacket is a stamped packet of path 2, to the SID of fw.
func aPacket(t *testing.T) event.Hex {
	t.Helper()
	inner, err := srv6.Header{
		NextHeader: 6, HopLimit: 64, PayloadLength: 20,
		Source: netip.MustParseAddr("2001:db8:7::2"), Destination: netip.MustParseAddr("2001:db8:8::2"),
	}.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	inner = append(inner, 0x86, 0xd0, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0, 0, 0, 0, 0, 0, 0)
	p := srv6.Packet{
		Ethernet: &srv6.Ethernet{Type: srv6.EtherTypeIPv6},
		Header:   srv6.Header{NextHeader: 43, HopLimit: 64, Source: netip.MustParseAddr("fc00:1::1"), Destination: netip.MustParseAddr("fc00:0:0:101::")},
		SRH: &srv6.SRH{
			NextHeader: srv6.NextHeaderIPv6, Segments: []netip.Addr{netip.MustParseAddr("fc00:0:0:101::")},
			TLVs: []srv6.TLV{srv6.Proof{Scheme: 1, Epoch: 4, Path: 2, RND: 7, CML: 9}.TLV()},
		},
		Payload: inner,
	}
	if err := p.Fix(); err != nil {
		t.Fatal(err)
	}
	b, err := p.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestWatchNamesWhatAPacketIs(t *testing.T) {
	stamped := aPacket(t)
	plain := append(append(event.Hex{}, stamped[:srv6.EthernetLen]...), stamped[len(stamped)-60:]...)
	names := namesOf(statusOfR1())
	for _, c := range []struct {
		name   string
		packet event.Hex
		names  pathNames
		want   string
	}{
		{"stamped", stamped, names, "[2001:db8:7::2]:34512 to [2001:db8:8::2]:80 TCP, chain web (reverse), epoch 4, to function fw"},
		{"of a path that the agent does not have", stamped, pathNames{}, "[2001:db8:7::2]:34512 to [2001:db8:8::2]:80 TCP, chain of path 0x2, epoch 4"},
		{"plain", plain, names, "[2001:db8:7::2]:34512 to [2001:db8:8::2]:80 TCP"},
		{"cut in the inner header", stamped[:len(stamped)-30], names, "fc00:1::1 to fc00:0:0:101::, chain web (reverse), epoch 4, to function fw"},
		{"none", nil, names, ""},
		{"noise", make(event.Hex, 40), names, ""},
	} {
		if got := readPacket(c.packet).text(c.names); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// An agent that restarts is waited for, and its past and present are told apart.
func TestWatchGoesOnWhenAnAgentIsBack(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.Local)
	e := func(reason string) event.Event {
		return event.Event{Time: at, Node: "r1", Interface: "r1-r2", Hook: "tc", Reason: reason, Text: "text", Len: 100}
	}
	fake := &fakeClient{status: statusOfR1(), streams: []fakeStream{
		{past: 1, events: []event.Event{e("proof"), e("replay")}, end: io.EOF},
		{refused: errors.New("connection refused")},
		{past: 0, events: []event.Event{e("stale")}},
	}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o := watchOptions{again: time.Millisecond}
	var out, notes strings.Builder
	p := &eventPrinter{text: true, out: writerFunc(func(b []byte) (int, error) {
		if strings.Contains(string(b), "stale") {
			defer cancel()
		}
		notes.Write(b)
		return out.Write(b)
	}), notes: &notes}
	err := o.follow(ctx, &watched{client: fake, socket: "/run/a.sock"}, p)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("ends with %v", err)
	}
	const want = `2026-01-02 03:04:05.678  r1  r1-r2  refused  proof  100 bytes at tc: text
--- end of the history of r1; new refusals follow ---
2026-01-02 03:04:05.678  r1  r1-r2  refused  replay  100 bytes at tc: text
the agent at /run/a.sock has stopped; waiting until it is back
the agent at /run/a.sock is back
--- end of the history of r1; new refusals follow ---
2026-01-02 03:04:05.678  r1  r1-r2  refused  stale  100 bytes at tc: text
`
	if diff := cmp.Diff(want, notes.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// An agent that was never there is not waited for.
	never := &fakeClient{streams: []fakeStream{{refused: errors.New("is it running?")}}}
	if err := o.follow(t.Context(), &watched{client: never}, p); err == nil || err.Error() != "is it running?" {
		t.Errorf("without an agent: %v", err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// A connection that a worker has refused is a line of its own kind, without an explanation of a packet, and no packet of a capture.
func TestWatchPrintsRefusalsOfWorkers(t *testing.T) {
	e := event.Event{
		Time: time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.Local), Node: "r2", Interface: "wss-zip", Hook: event.HookWorker, Reason: "worker-limit",
		Text: "the function has as many connections as its limits allow; function zip, [fc00:7::2]:4 to [fc00:8::2]:80", Suppressed: 2,
	}
	var out strings.Builder
	w := &watched{client: &fakeClient{}, paths: []plan.Path{}}
	p := &eventPrinter{text: true, out: &out, notes: io.Discard}
	if err := p.event(t.Context(), e, w); err != nil {
		t.Fatal(err)
	}
	const want = `2026-01-02 03:04:05.678  r2  wss-zip  refused  worker-limit  a connection at worker: the function has as many connections as its limits allow; function zip, [fc00:7::2]:4 to [fc00:8::2]:80
    2 more like it were not shown before
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	var capture bytes.Buffer
	p.out = &capture
	if _, err := p.captureTo("-"); err != nil {
		t.Fatal(err)
	}
	before := capture.Len()
	if err := p.event(t.Context(), e, w); err != nil || capture.Len() != before {
		t.Errorf("%d bytes of a connection are in the capture: %v", capture.Len()-before, err)
	}
}
