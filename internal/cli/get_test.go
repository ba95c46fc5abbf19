package cli

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
)

// A slip in a function's name looks like a function whose rules count nothing.
func TestGetFunctionsWarnsOfANameThatNobodyHas(t *testing.T) {
	rules := func(names ...string) *fakeClient {
		c := &fakeClient{}
		for _, n := range names {
			c.functions.Functions = append(c.functions.Functions, api.Function{Function: n, Rules: &api.Rules{}})
		}
		return c
	}
	for name, warned := range map[string]bool{"fw": false, "fww": true} {
		agents := fakeAgents{"/1": rules(), "/2": rules("fw")}
		_, stderr, code := agents.run(t, t.Context(), "get", "functions", name, "--socket", "/1", "--socket", "/2")
		if got := strings.Contains(stderr, "warning: the selected nodes have no function "+name); got != warned || code != command.ExitDone {
			t.Errorf("%s: exit code %d, %q; want a warning: %t", name, code, stderr, warned)
		}
	}
}

// What operations on bytes have found and refused is said; nothing is said of those that found nothing.
func TestGetStreamsSaysWhatOperationsFound(t *testing.T) {
	c := &fakeClient{functions: api.Functions{Node: "r2", Functions: []api.Function{{Function: "dpi", Stream: &api.Stream{
		Worker: 9,
		Run:    []api.StreamOperation{{Name: "count"}, {Name: "match", Events: 3}},
		Back:   []api.StreamOperation{{Name: "match"}, {Name: "open", Events: 2}},
	}}}}}
	r, err := readStreams(t.Context(), c, "")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"function dpi: match has found something in 3 connections, towards the server", "function dpi: open has refused what came in 2 connections, towards the client"}
	if !slices.Equal(r.notes, want) {
		t.Errorf("it says %q; want %q", r.notes, want)
	}
}

// Connections are listed with what each side has moved, and it is said how many are left out.
func TestGetStreamsListsConnections(t *testing.T) {
	connection := api.Connection{
		Function: "zip", Client: netip.MustParseAddrPort("[fc00:7::2]:40000"), Server: netip.MustParseAddrPort("[fc00:8::2]:80"), Chain: "web", State: "open", Idle: 61,
		ClientSide: api.ConnectionSide{State: "established", Received: 10, Sent: 4000}, ServerSide: api.ConnectionSide{State: "established", Received: 400, Sent: 30},
	}
	c := &fakeClient{connected: api.Connections{Node: "r2", Functions: []string{"zip"}, All: 2, Connections: []api.Connection{connection}}}
	stdout, stderr, code := fakeAgents{"/1": c}.run(t, t.Context(), "get", "streams", "zip", "--connections", "--limit", "1", "--socket", "/1")
	var cells [][]string
	for line := range strings.Lines(stdout) {
		cells = append(cells, strings.Fields(line))
	}
	want := []string{"zip", "[fc00:7::2]:40000", "[fc00:8::2]:80", "web", "open", "1m1s", "10", "30", "400", "4000"}
	if code != command.ExitDone || len(cells) != 2 || !slices.Equal(cells[1], want) {
		t.Errorf("exit code %d, %q; want a header, and %q", code, stdout, want)
	}
	if !strings.Contains(stderr, "1 of 2 connections") || !slices.Equal(c.asked, []string{`connections "zip" 1`}) {
		t.Errorf("it asked for %q, and says %q; want that one of two is there", c.asked, stderr)
	}
	c.connected.Functions, c.connected.All, c.connected.Connections = nil, 0, nil
	if _, stderr, _ := (fakeAgents{"/1": c}).run(t, t.Context(), "get", "streams", "zap", "--connections", "--socket", "/1"); !strings.Contains(stderr, "no function zap of kind stream") || strings.Contains(stderr, "connections;") {
		t.Errorf("of a function that nobody has it says %q", stderr)
	}
	for _, wrong := range [][]string{{"--limit", "5"}, {"--connections", "--limit", "0"}, {"--connections", "--limit", "10001"}} {
		if _, stderr, code := (fakeAgents{}).run(t, t.Context(), append([]string{"get", "streams", "--socket", "/1"}, wrong...)...); code != command.ExitUsage || !strings.Contains(stderr, "--limit") {
			t.Errorf("%q: exit code %d, %q; want that --limit is refused", wrong, code, stderr)
		}
	}
}

// The name of a function has its line alone, and those of its instances.
func TestGetStreamsOfOneFunction(t *testing.T) {
	c := &fakeClient{functions: api.Functions{Node: "r2", Functions: []api.Function{{Function: "fw"}, {Function: "zip", Stream: &api.Stream{}}, {Function: "zip:0x2a", Stream: &api.Stream{}}, {Function: "dpi", Stream: &api.Stream{}}}}}
	for name, want := range map[string]int{"": 3, "zip": 2, "zip:0x2a": 1, "zip:0x2b": 0, "fw": 0, "zap": 0} {
		r, err := readStreams(t.Context(), c, name)
		if err != nil || len(r.rows) != want || (r.lacks == "") != (want > 0) {
			t.Errorf("%q: %d rows, lacks %q, %v; want %d", name, len(r.rows), r.lacks, err, want)
		}
		c.functions.Functions = []api.Function{{Function: "fw"}, {Function: "zip", Stream: &api.Stream{}}, {Function: "zip:0x2a", Stream: &api.Stream{}}, {Function: "dpi", Stream: &api.Stream{}}}
	}
}
