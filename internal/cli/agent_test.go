package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/event"
)

func runMain(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = Main(t.Context(), args, strings.NewReader(""), &out, &errs)
	return out.String(), errs.String(), code
}

func TestAgentSaysHowItIsUsed(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"agent", command.ExitUsage, "--plan or --controller is missing"},
		{"agent --plan x extra", command.ExitUsage, `waystamp agent takes no argument, and there is "extra"`},
		{"agent extra.json", command.ExitUsage, "did you mean --plan extra.json?"},
		{"agent --instance ../x --plan x", command.ExitUsage, `--instance: "../x" has the character`},
		{"agent --yes --plan x", command.ExitUsage, "--yes goes with --detach"},
		{"agent --detach --plan x", command.ExitUsage, "--detach takes no --plan"},
		{"agent --plan " + dir + "/none --run-dir " + dir, command.ExitFailed, "plan " + dir + "/none: open"},
	} {
		stdout, stderr, code := runMain(t, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stderr, c.want) || stdout != "" {
			t.Errorf("%s: exit code %d, %q, %q; want %d and %q", c.args, code, stdout, stderr, c.code, c.want)
		}
	}
}

func TestDetachDoesNothingWithoutYes(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "state.json")
	const content = `{"version":1,"node":"r6","locators":["fc00:0:0:600::/56"],"guarded":[
		{"chain":"web","direction":"forward","path":1},{"chain":"mail","direction":"reverse","path":2}]}`
	if err := os.WriteFile(state, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	instance := "none-" + strings.ToLower(filepath.Base(dir))
	_, stderr, code := runMain(t, "agent", "--detach", "--instance", instance, "--run-dir", dir)
	for _, want := range []string{"would remove the data path of instance " + instance, "locator fc00:0:0:600::/56", "web, mail (reverse)", "add --yes"} {
		if !strings.Contains(stderr, want) {
			t.Errorf("stderr %q lacks %q", stderr, want)
		}
	}
	if code != command.ExitUsage {
		t.Errorf("exit code %d, want %d", code, command.ExitUsage)
	}
	if b, err := os.ReadFile(state); err != nil || string(b) != content {
		t.Errorf("the state is now %q, %v", b, err)
	}
}

// fakeAgent answers like one, with these.
func fakeAgent(t *testing.T, status api.Status, counters api.Counters, events []event.Event) (socket string) {
	t.Helper()
	socket = agent.SocketPath(t.TempDir())
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	answer := func(v any) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if err := json.NewEncoder(w).Encode(v); err != nil {
				t.Error(err)
			}
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", answer(status))
	mux.HandleFunc("GET /v1/counters", answer(counters))
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
		for _, e := range events {
			line, err := event.Append(nil, e)
			if err != nil {
				t.Error(err)
			}
			w.Write(line)
		}
		if r.URL.Query().Get("follow") == "true" {
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	})
	s := &http.Server{Handler: mux}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Serve(l)
	}()
	t.Cleanup(func() {
		s.Close()
		<-done
	})
	return socket
}

func TestGetShowsTablesAndJSON(t *testing.T) {
	socket := fakeAgent(t,
		api.Status{Version: 1, Ready: true, Node: "r1", Error: "e", Problems: []string{"p"}, Warnings: []string{"w"}, Interfaces: []api.Interface{
			{Name: "r1-h1", Role: "edge", Datapath: "auto", Unmatched: "drop", TC: true},
			{Name: "r1-r2", Role: "core", Datapath: "xdp", TC: true, XDP: true},
		}},
		api.Counters{Version: 1, Node: "r1",
			Errors: api.Errors{TooBig: 3, TimeExceeded: 2, Parameter: 1, Unreachable: 4, Suppressed: 40, Unanswerable: 500},
			Refusals: []api.Refusal{
				{Reason: "unproven", Text: abi.ReasonUnproven.Text(), Dropped: 7},
				{Reason: "proof", Text: abi.ReasonProof.Text(), Dropped: 12345, Reported: 1},
			},
			Paths: []api.Path{
				{Role: api.RoleHeadend, Chain: "web", Direction: "forward", Path: 1, Packets: 10, Frames: 430, Bytes: 600000},
				{Role: api.RoleEndpoint, Chain: "web", Direction: "reverse", Path: 2, Function: "fw", Packets: 9, Frames: 9, Bytes: 99},
			},
		}, nil)
	if got, _, code := runMain(t, "get", "errors", "--socket", socket); code != 0 || got != `ERROR                        PACKETS
packet too big                     3
time exceeded                      2
parameter problem                  1
destination unreachable            4
not sent: rate limit              40
not sent: no valid receiver      500
` {
		t.Errorf("get errors: exit code %d:\n%s", code, got)
	}
	for _, c := range []struct{ noun, want, warned string }{
		{"refusals", `
REASON    DROPPED  REPORTED  MEANING
unproven        7         0  a chain requires this packet, and it has no proof
proof       12345         1  the proof does not verify
`, ""},
		{"paths", `
CHAIN  DIRECTION  ROLE      FUNCTION  PACKETS  FRAMES   BYTES
web    forward    headend   -              10     430  600000
web    reverse    endpoint  fw              9       9      99
`, ""},
		{"interfaces", `
INTERFACE  ROLE  UNMATCHED  DATAPATH  TC        XDP       OUT  FUNCTIONS
r1-h1      edge  drop       auto      attached  -         -    -
r1-r2      core  -          xdp       attached  attached  -    -
`, "waystamp: error: e\nwaystamp: warning: p\nwaystamp: warning: w\n"},
	} {
		stdout, stderr, code := runMain(t, "get", c.noun, "--socket", socket)
		if diff := cmp.Diff(strings.TrimPrefix(c.want, "\n"), stdout); diff != "" || code != 0 || stderr != c.warned {
			t.Errorf("get %s: exit code %d, stderr %q, and:\n%s", c.noun, code, stderr, diff)
		}
		stdout, _, code = runMain(t, "get", c.noun, "--socket", socket, "-o", "json")
		var v map[string]any
		if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != 0 || v["version"] != 1.0 || v["node"] != "r1" {
			t.Errorf("get %s -o json: exit code %d, %v, %s", c.noun, code, err, stdout)
		}
		if list, ok := v[c.noun].([]any); !ok || len(list) != 2 {
			t.Errorf("get %s -o json: %s; want a list of two", c.noun, stdout)
		}
	}
}

func TestGetWithoutAnAgentSaysWhatIsWrong(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none.sock")
	for _, args := range [][]string{{"get", "paths", "--socket", none}, {"watch", "--socket", none}} {
		_, stderr, code := runMain(t, args...)
		if code != command.ExitFailed || !strings.Contains(stderr, none) || !strings.Contains(stderr, "is it running?") {
			t.Errorf("%v: exit code %d, %q", args, code, stderr)
		}
	}
	for _, args := range [][]string{{"get", "paths", "-o", "xml"}, {"watch", "-o", "xml"}, {"get", "nothing"}, {"watch", "extra"}} {
		if _, stderr, code := runMain(t, args...); code != command.ExitUsage {
			t.Errorf("%v: exit code %d, %q; want %d", args, code, stderr, command.ExitUsage)
		}
	}
}

// What another release means by a field is not guessed.
func TestGetRefusesAnotherVersionOfTheInterface(t *testing.T) {
	socket := fakeAgent(t, api.Status{Version: 2}, api.Counters{Version: 2}, nil)
	for _, noun := range []string{"paths", "refusals", "interfaces"} {
		stdout, stderr, code := runMain(t, "get", noun, "--socket", socket)
		if code != command.ExitFailed || stdout != "" || !strings.Contains(stderr, "answers in version 2 of the interface, and this program reads version 1: run both from the same release") {
			t.Errorf("get %s: exit code %d, %q, %q", noun, code, stdout, stderr)
		}
	}
}

func watchedEvents() []event.Event {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.Local)
	return []event.Event{
		{Time: at, Node: "r6", Interface: "r6-r3", Hook: "tc", Reason: "proof", Text: "the proof does not verify", Place: "proof/verify.h:102", Len: 1514},
		{Time: at, Node: "r6", Interface: "r6-r5", Hook: "xdp", Reason: "segments", Text: "the segment list differs from the path's", Len: 200, Reported: true, Suppressed: 12, Missed: 7},
		{Time: at, Node: "r6", Interface: "r6-r5", Hook: "tc", Reason: "unproven", Text: "a chain requires this packet, and it has no proof", Len: 60, Reported: true},
	}
}

func TestWatchWritesACapture(t *testing.T) {
	events := watchedEvents()
	events[0].Packet = bytes.Repeat([]byte{0xab}, 60)
	socket := fakeAgent(t, api.Status{}, api.Counters{}, events)
	toPipe, stderr, code := runMain(t, "watch", "--once", "--socket", socket, "--pcap", "-")
	if code != command.ExitDone || stderr != "" {
		t.Fatalf("exit code %d, %q", code, stderr)
	}
	for _, want := range []string{
		"r6/r6-r3", "refused: proof: the proof does not verify, at tc (proof/verify.h:102)",
		"r6/r6-r5", "reported: segments: the segment list differs from the path's, at xdp", strings.Repeat("\xab", 60),
	} {
		if !strings.Contains(toPipe, want) {
			t.Errorf("the capture lacks %q", want)
		}
	}
	name := filepath.Join(t.TempDir(), "refused.pcapng")
	if stdout, stderr, code := runMain(t, "watch", "--once", "--socket", socket, "--pcap", name); code != command.ExitDone || stdout+stderr != "" {
		t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
	}
	inFile, err := os.ReadFile(name)
	if err != nil || string(inFile) != toPipe {
		t.Errorf("%v; the file has %d bytes, the pipe got %d", err, len(inFile), len(toPipe))
	}
	for _, args := range [][]string{{"--pcap", "-", "-o", "json"}, {"--pcap", filepath.Join(name, "x")}} {
		if stdout, stderr, code := runMain(t, append([]string{"watch", "--once", "--socket", socket}, args...)...); code == command.ExitDone || stdout != "" || stderr == "" {
			t.Errorf("%q: exit code %d, %q, %q", args, code, stdout, stderr)
		}
	}
}

func TestWatchPrintsWhatIsRemembered(t *testing.T) {
	socket := fakeAgent(t, api.Status{}, api.Counters{}, watchedEvents())
	stdout, stderr, code := runMain(t, "watch", "--once", "--socket", socket)
	want := `2026-01-02 03:04:05.678  r6  r6-r3  refused  proof  1514 bytes at tc (proof/verify.h:102): the proof does not verify
    7 events of r6 were lost here: they were not read fast enough
2026-01-02 03:04:05.678  r6  r6-r5  reported  segments  200 bytes at xdp: the segment list differs from the path's
    12 more like it were not shown before
2026-01-02 03:04:05.678  r6  r6-r5  audited  unproven  60 bytes at tc: a chain requires this packet, and it has no proof
`
	if diff := cmp.Diff(want, stdout); diff != "" || code != 0 || stderr != "" {
		t.Errorf("exit code %d, stderr %q, and:\n%s", code, stderr, diff)
	}
	// What explain reads is what watch prints.
	stdout, _, _ = runMain(t, "watch", "--once", "--socket", socket, "-o", "json")
	var n int
	for e, err := range event.Read(strings.NewReader(stdout)) {
		if err != nil || e.Node != "r6" {
			t.Errorf("%+v, %v", e, err)
		}
		n++
	}
	if n != 3 {
		t.Errorf("%d events in %q, want 3", n, stdout)
	}
}

func TestWatchWithPathsExplains(t *testing.T) {
	socket := fakeAgent(t, api.Status{}, api.Counters{}, watchedEvents()[:1])
	paths := filepath.Join(t.TempDir(), "paths.json")
	if err := os.WriteFile(paths, []byte(`{"version":1,"kind":"paths","paths":[]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	stdout, stderr, code := runMain(t, "watch", "--once", "--socket", socket, "--paths", paths)
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	if code != 0 || len(lines) != 2 || len(strings.Fields(lines[1])) < 4 {
		t.Errorf("exit code %d, %q, %q; want a sentence below the event", code, stdout, stderr)
	}
	if _, stderr, code := runMain(t, "watch", "--once", "--socket", socket, "--paths", paths+"x"); code != command.ExitFailed || !strings.Contains(stderr, paths+"x") {
		t.Errorf("without the file: exit code %d, %q", code, stderr)
	}
}

func TestWatchEndsWithItsContext(t *testing.T) {
	socket := fakeAgent(t, api.Status{}, api.Counters{}, watchedEvents())
	ctx, cancel := context.WithCancel(t.Context())
	out, in := io.Pipe()
	done := make(chan int)
	go func() {
		var stderr bytes.Buffer
		code := Main(ctx, []string{"watch", "--socket", socket, "-o", "json"}, strings.NewReader(""), in, &stderr)
		in.CloseWithError(errors.New("watch has ended: " + stderr.String()))
		done <- code
	}()
	n := 0
	for _, err := range event.Read(out) {
		if err != nil {
			t.Error(err)
			break
		}
		if n++; n == 2 {
			break
		}
	}
	cancel()
	go io.Copy(io.Discard, out) // it may be in the midst of a write
	if code := <-done; code != command.ExitDone {
		t.Errorf("exit code %d after Ctrl-C, want 0", code)
	}
}

// Where nothing is, there is nothing to confirm.
func TestDetachOfNothingAsksNothing(t *testing.T) {
	dir := t.TempDir()
	stdout, stderr, code := runMain(t, "agent", "--detach", "--instance", "none", "--pin-dir", dir, "--run-dir", filepath.Join(dir, "run"))
	if code != command.ExitDone || stdout != "instance none: nothing is there\n" || stderr != "" {
		t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
	}
	if err := os.Mkdir(filepath.Join(dir, "none"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := runMain(t, "agent", "--detach", "--instance", "none", "--pin-dir", dir, "--run-dir", filepath.Join(dir, "run")); code != command.ExitUsage || !strings.Contains(stderr, "add --yes") {
		t.Errorf("with pins: exit code %d, %q", code, stderr)
	}
}
